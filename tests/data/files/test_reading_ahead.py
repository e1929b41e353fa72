"""Reading ahead: the same records, positions and errors for any number of threads."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data.files.test_pieces import FORMATS, write

from monolith.data import Chunk, Format, RecordWriter
from monolith.data.files.bad_records import BadRecordPolicy
from monolith.data.files.discovery import Watch
from monolith.data.files.reading_ahead import AHEAD_BYTES, InOrder, ahead_of
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.format import Part
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.memory import to_records
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.formats.tfrecord import FramedFormat, TfRecordFormat
from monolith.data.shuffling import ShuffleConfig
from monolith.errors import CorruptFileError

SMALL: dict[str, Format] = {
    "csv": CsvFormat(chunk_bytes=300),
    "jsonl": JsonLinesFormat(chunk_bytes=500),
    "parquet": ParquetFormat(chunk_rows=30),
    "tfrecord": TfRecordFormat("tf_example", chunk_bytes=2000),
    "framed": FramedFormat("example", ids=(), chunk_bytes=2000),
    "batches": TfRecordFormat("example_batch", ids=(), chunk_bytes=2000),
}


def source_of(paths: Any, ending: str, **options: Any) -> FileSource:
    return FileSource(paths, SMALL[ending.partition(".")[0]], **{"batch_size": 64, **options})


def batches_of(source: FileSource, count: int | None = None) -> list[tuple[list[int], Any]]:
    return [(batch["id"].flat_values.tolist(), source.position()) for batch in islice(source, count)]


def run(threads: int, tasks: Iterator[Callable[[], int]]) -> list[int]:
    with InOrder(threads, "test", tasks) as results:
        return list(iter(results.take, None))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_tasks(threads: int) -> None:
    assert run(threads, (partial(pow, number, 2) for number in range(40))) == [n * n for n in range(40)]


def test_an_error_comes_after_the_results_before_it() -> None:
    def tasks() -> Iterator[Callable[[], int]]:
        yield from (partial(int, "7"), partial(int, "8"), partial(int, "x"), partial(int, "9"))
        raise OSError("the file ends here")

    with InOrder(2, "test", tasks()) as results:
        assert [results.take(), results.take()] == [7, 8]
        with pytest.raises(ValueError, match="invalid literal"):
            results.take()
        assert results.take() == 9
        with pytest.raises(OSError, match="ends here"):
            results.take()
        assert results.take() is None


def test_only_a_few_results_are_ahead_and_fewer_if_they_are_large() -> None:
    asked: list[int] = []

    def tasks() -> Iterator[Callable[[], int]]:
        for number in range(100):
            asked.append(number)
            yield partial(int, number)

    with InOrder(3, "test", tasks()) as results:
        results.take()
        assert len(asked) == ahead_of(3, 0) == 6
    asked.clear()
    with InOrder(3, "test", tasks()) as results:
        results.take(AHEAD_BYTES)
        assert len(asked) == 2


def test_a_first_task_may_run_alone_in_the_thread_that_takes() -> None:
    names: list[str] = []
    with InOrder(
        2, "test", iter([lambda: names.append(threading.current_thread().name)] * 3), first_alone=True
    ) as results:
        for _ in range(3):
            results.take()
    assert names[0] == threading.current_thread().name
    assert all(name.startswith("test") for name in names[1:])


@pytest.mark.parametrize("shuffle", [None, ShuffleConfig(seed=3, buffer=100, files=False)])
@pytest.mark.parametrize("ending", [*FORMATS, "csv.gz", "jsonl.gz"])
def test_threads_change_neither_records_nor_positions_of_files_in_order(
    tmp_path: Path, ending: str, shuffle: ShuffleConfig | None
) -> None:
    paths = write(tmp_path, ending, (700, 40, 300))
    found = [
        batches_of(source_of(paths, ending, epochs=2, threads=threads, shuffle=shuffle))
        for threads in (0, 1, 2, 4)
    ]
    assert sum(len(ids) for ids, _ in found[0]) == 2 * 1040
    assert all(one == found[0] for one in found[1:])


@pytest.mark.parametrize("ending", FORMATS)
def test_reading_in_order_resumes_with_the_very_next_record(tmp_path: Path, ending: str) -> None:
    paths = write(tmp_path, ending, (300, 200))
    everything = [ids for ids, _ in batches_of(source_of(paths, ending, epochs=2))]
    for before in (0, 3, 6, 12):
        first = source_of(paths, ending, epochs=2, threads=3)
        seen = [ids for ids, _ in batches_of(first, before)]
        second = source_of(paths, ending, epochs=2, threads=2)
        second.restore(json.loads(json.dumps(first.position())))
        assert seen + [ids for ids, _ in batches_of(second)] == everything


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_malformed_record_is_reported_with_its_place(tmp_path: Path, threads: int) -> None:
    lines = ["id"] + ["x" if number in (40, 700, 1500) else str(number) for number in range(2000)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines) + "\n")
    policy = BadRecordPolicy(max_fraction=0.5, quarantine=str(tmp_path / "bad"))
    form = CsvFormat(chunk_bytes=500, types={"id": torch.int64})
    source = FileSource([str(path)], form, batch_size=64, bad=policy, threads=threads)
    assert sum(len(batch) for batch in source) == 1997
    told = "".join(one.read_text() for one in sorted((tmp_path / "bad").rglob("*")) if one.is_file())
    assert [f"line {number + 2}" in told for number in (40, 700, 1500)] == [True] * 3
    assert (source.position()["good"], source.position()["bad"]) == (1997, 3)


@pytest.mark.parametrize("ending", ["tfrecord", "csv.gz"])
def test_a_damaged_file_fails_after_the_records_before_the_damage(tmp_path: Path, ending: str) -> None:
    paths = write(tmp_path, ending, (400, 100))
    damaged = Path(paths[0])
    data = bytearray(damaged.read_bytes())
    if ending == "csv.gz":
        whole = gzip.decompress(bytes(data))
        data = bytearray(gzip.compress(whole, mtime=0)[:-200])
    else:
        data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(bytes(data))
    results = []
    for threads in (0, 1, 3):
        read: list[int] = []
        source = source_of(paths, ending, batch_size=4, threads=threads)
        with pytest.raises(CorruptFileError) as failed:  # noqa: PT012  what was read before counts
            for batch in source:
                read += batch["id"].flat_values.tolist()
        results.append((read, str(failed.value)))
    assert results[1:] == results[:1] * 2


@pytest.mark.parametrize("threads", [0, 2])
def test_watched_and_leased_files_are_read_by_threads_too(tmp_path: Path, threads: int) -> None:
    paths = write(tmp_path, "parquet", (90, 60))
    watch = Watch(str(tmp_path / "*.parquet"), stop_after=timedelta())
    seen = [one for ids, _ in batches_of(source_of(watch, "parquet", threads=threads), 2) for one in ids]
    assert seen == list(range(len(seen)))
    assert len(seen) >= 128
    queue = LocalFileQueue(paths)
    leased = source_of(queue, "parquet", threads=threads, auto_commit=True)
    assert sorted(one for ids, _ in batches_of(leased) for one in ids) == list(range(150))


class Counted(Format):
    """Files of one record each chunk; counts the parts that are parsed and not taken."""

    name = "counted"

    def __init__(self) -> None:
        self.cut = 0

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for parse in self.parts(path, start=start, columns=columns):
            yield from parse()

    def parts(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Part]:
        del path, columns
        for place in range(start, 1000):
            self.cut += 1
            yield partial(self._parse, place)

    def _parse(self, place: int) -> list[Chunk]:
        return [Chunk(to_records({"id": [place]}), place + 1)]

    @contextmanager
    def writer(self, path: str) -> Iterator[RecordWriter]:
        raise NotImplementedError(path)
        yield


def test_reading_waits_for_its_consumer(tmp_path: Path) -> None:
    form = Counted()
    source = FileSource([str(tmp_path / "x")], form, batch_size=1, threads=3)
    for number, _ in enumerate(islice(source, 50), start=1):
        assert form.cut <= number + ahead_of(3, 0)
