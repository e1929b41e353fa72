"""Shuffling a list of files: mixed over the whole length, another order in each epoch, exact on resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.files.chunked import Chunks, SplitChunks
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.data import Format, Position
from monolith.data.files.bad_records import BadRecordPolicy
from monolith.data.files.pieces import FEW_OPEN, MOST_OPEN
from monolith.data.files.source import FileSource
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.memory import to_records
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.formats.tfrecord import FramedFormat, TfRecordFormat
from monolith.data.shuffling import ShuffleConfig
from monolith.errors import ConfigError, CorruptFileError, DataError, RestoreError

RECORDS = 3000
FORMATS: dict[str, Format] = {
    "csv": CsvFormat(),
    "jsonl": JsonLinesFormat(),
    "parquet": ParquetFormat(row_group_rows=50),
    "tfrecord": TfRecordFormat("tf_example"),
    "framed": FramedFormat("example", ids=()),
    "batches": TfRecordFormat("example_batch", ids=()),
}
SHUFFLE = ShuffleConfig(seed=5, buffer=300, piece_bytes=500)


def write(folder: Path, ending: str, sizes: Sequence[int] = (RECORDS,)) -> list[str]:
    """Write files of so many records, with ids from 0 on, and the label 1 in the second half."""
    found, first, total = [], 0, sum(sizes)
    for number, size in enumerate(sizes):
        path = str(folder / f"{number:03}.{ending}")
        with FORMATS[ending.partition(".")[0]].writer(path) as writer:
            for begin in range(first, first + size, 50):
                ids = list(range(begin, min(begin + 50, first + size)))
                writer.write(to_records({"id": ids, "label": [float(one >= total // 2) for one in ids]}))
        first += size
        found.append(path)
    return found


def source_of(paths: Sequence[str], ending: str, **options: Any) -> FileSource:
    form = FORMATS[ending.partition(".")[0]]
    return FileSource(paths, form, **{"batch_size": 64, "shuffle": SHUFFLE, **options})


def counts(source: FileSource) -> tuple[int, int]:
    position = source.position()
    return position["good"], position["bad"]


def read(source: FileSource, batches: int | None = None) -> list[int]:
    return [one for batch in islice(source, batches) for one in batch["id"].flat_values.tolist()]


def correlation(order: Sequence[int]) -> float:
    """Of the place of a record in the output with its place in the input."""
    return float(np.corrcoef(np.arange(len(order)), np.array(order))[0, 1])


@pytest.mark.parametrize("ending", FORMATS)
def test_a_sorted_file_is_mixed_over_its_whole_length_and_each_epoch_ends_on_other_rows(
    tmp_path: Path, ending: str
) -> None:
    order = read(source_of(write(tmp_path, ending), ending, epochs=2))
    first, second = order[:RECORDS], order[RECORDS:]
    for epoch in (first, second):
        assert sorted(epoch) == list(range(RECORDS))
        assert abs(correlation(epoch)) < 0.2
        # Every tenth of the epoch has rows of most fifths of the file.
        for begin in range(0, RECORDS, RECORDS // 10):
            assert len({one * 5 // RECORDS for one in epoch[begin : begin + RECORDS // 10]}) > 2
    last = set(first[-150:]) & set(second[-150:])
    assert len(last) < 75
    # It was not with stretches: they leave the file sorted.
    plain = read(source_of(write(tmp_path, ending), ending, shuffle=ShuffleConfig(buffer=300, files=False)))
    assert correlation(plain) > 0.98


def test_a_small_sorted_file_is_mixed_to_its_last_row(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")[0]
    piece = int(Path(path).stat().st_size * 0.3)  # the fourth is a third of the others
    order = read(source_of([path], "csv", shuffle=ShuffleConfig(seed=3, piece_bytes=piece)))
    last = np.array(order[-RECORDS // 10 :]) >= RECORDS // 2
    assert 0.4 < last.mean() < 0.6


def test_a_row_group_is_shuffled_as_a_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "one.parquet")
    with ParquetFormat(row_group_rows=RECORDS).writer(path) as writer:
        writer.write(to_records({"id": list(range(RECORDS))}))
    form = ParquetFormat(chunk_rows=100)
    order = read(FileSource([path], form, batch_size=64, shuffle=ShuffleConfig(buffer=100)))
    assert sorted(order) == list(range(RECORDS))
    assert abs(correlation(order)) < 0.1  # by chance about 0.02


def test_a_compressed_file_is_read_from_its_beginning_next_to_others(tmp_path: Path) -> None:
    paths = write(tmp_path, "csv.gz", [500] * 6)
    form = CsvFormat(chunk_bytes=500)
    order = read(FileSource(paths, form, batch_size=64, shuffle=SHUFFLE))
    assert sorted(order) == list(range(RECORDS))
    assert len({one // 500 for one in order[:64]}) == 6
    assert [one for one in order if one < 500][-1] > 400  # each of them is still about in its order


@pytest.mark.parametrize(
    "ending", ["csv", "jsonl", "parquet", "tfrecord", "tfrecord.gz", "csv.gz", "batches"]
)
def test_a_run_that_is_resumed_after_some_batch_reads_what_an_unbroken_one_does(
    tmp_path: Path, ending: str
) -> None:
    paths = write(tmp_path, ending, [120, 0, 300, 80])
    shuffle = ShuffleConfig(seed=1, buffer=60, piece_bytes=400)
    options: dict[str, Any] = {"epochs": 2, "shuffle": shuffle, "batch_size": 37}
    whole = read(source_of(paths, ending, **options))
    assert Counter(whole) == Counter(dict.fromkeys(range(500), 2))
    source = source_of(paths, ending, **options)
    stood = [(0, source.position())]
    for number, _ in enumerate(source, 1):
        stood.append((number * 37, source.position()))
    for done, position in stood[:: 1 if ending == "parquet" else 5]:
        again = source_of(paths, ending, **options)
        again.restore(json.loads(json.dumps(position)))
        assert read(again) == whole[done:]


@st.composite
def some_files(draw: st.DrawFn) -> dict[str, list[list[Any]]]:
    """Up to 6 files of up to 6 chunks of up to 7 records, with ids from 0 on, and some bad ones."""
    sizes = draw(st.lists(st.lists(st.integers(0, 7), max_size=6), min_size=1, max_size=6))
    ids = iter(range(1000))
    files: dict[str, list[list[Any]]] = {"a": [[next(ids)]]}
    for number, file in enumerate(sizes):
        files[f"f{number}"] = [[*islice(ids, size), *["bad"] * draw(st.integers(0, 1))] for size in file]
    return files


@pytest.mark.parametrize("kind", [Chunks, SplitChunks])
@settings(max_examples=tries(40), deadline=None)
@given(
    files=some_files(),
    sizes=st.tuples(st.sampled_from([1, 5, 20, 1000]), st.integers(1, 9)),
    epochs=st.integers(1, 3),
    stops=st.lists(st.integers(0, 6), max_size=6),
)
def test_however_often_a_run_is_broken_off_it_reads_every_record_once_in_each_epoch(
    kind: type[Chunks],
    files: dict[str, list[list[Any]]],
    sizes: tuple[int, int],
    epochs: int,
    stops: list[int],
) -> None:
    buffer, batch_size = sizes

    def make() -> FileSource:
        return FileSource(
            sorted(files),
            kind(files),
            batch_size=batch_size,
            epochs=epochs,
            shuffle=ShuffleConfig(seed=2, buffer=buffer),
            bad=BadRecordPolicy(max_fraction=1),
        )

    unbroken = make()
    whole = read(unbroken)
    each = [one for file in files.values() for chunk in file for one in chunk if isinstance(one, int)]
    for epoch in range(epochs):
        assert sorted(whole[epoch * len(each) : (epoch + 1) * len(each)]) == each
    found: list[int] = []
    position: Position | None = None
    for stop in [*stops, None]:
        source = make()
        if position is not None:
            source.restore(json.loads(json.dumps(position)))
        found += read(source, stop)
        position = source.position()
    assert found == whole
    assert counts(source) == counts(unbroken)


def test_memory_and_positions_are_bounded() -> None:
    """However much there is: as many pieces are open as hold the buffer, at least 8 and at most 256."""
    files = {f"{number:03}": [[20 * number + one for one in range(20)]] for number in range(300)}
    for buffer, most in ((200, 10), (1, FEW_OPEN), (10**6, MOST_OPEN)):
        form = SplitChunks(files)
        config = ShuffleConfig(buffer=buffer)
        source = FileSource(sorted(files), form, batch_size=50, shuffle=config, threads=0)
        given = 0
        for batch in source:
            given += len(batch)
            of_files = ("pass", "pieces")  # a few bytes for each file, whatever is open
            position = {name: one for name, one in source.position().items() if name not in of_files}
            assert len(position["open"]) + sum(len(one[1]) for one in position["windows"]) <= most
            assert len(json.dumps(position)) < 300 + 30 * most
        assert given == form.loaded == 6000
        assert form.most_open == 1  # a piece that was read is closed
    form = Chunks({name: [*file, []] for name, file in files.items()})  # no telling that nothing follows
    list(FileSource(sorted(files), form, batch_size=50, shuffle=ShuffleConfig(buffer=10**6), threads=0))
    assert form.most_open == MOST_OPEN
    assert form.open == 0


OLD: Position = dict(
    zip(
        ("source", "shuffle", "shard", "round", "file", "place", "skip", "length", "taken", "good", "bad"),
        ("files", [3, 8, True], [0, 1], 0, "b.parquet", 5, 1, 8, 4, 15, 0),
        strict=True,
    ),
    files=3533921088,
)
"""Of the version before, after 20 of two times 30 records."""
OLD_REST = [
    *[17, 21, 16, 20, 25, 29, 24, 27, 26, 28, 1, 2, 4, 5, 6, 7, 3, 0, 8, 20, 25, 22, 23, 21, 9, 24, 10, 11],
    *[29, 12, 28, 27, 26, 13, 14, 19, 15, 18, 17, 16],
]


def test_a_position_of_a_version_that_shuffled_blocks_resumes_in_its_order_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    form = ParquetFormat(row_group_rows=5)
    for number, name in enumerate("abc"):
        with form.writer(f"{name}.parquet") as writer:
            writer.write(to_records({"id": list(range(10 * number, 10 * number + 10))}))

    def make() -> FileSource:
        shuffle = ShuffleConfig(seed=3, buffer=8)
        return FileSource([f"{n}.parquet" for n in "abc"], form, batch_size=4, epochs=2, shuffle=shuffle)

    source = make()
    source.restore(OLD)
    assert read(source, 2) == OLD_REST[:8]
    assert "shuffled 8 records at a time, and the run resumes in that order" in caplog.text
    again = make()
    again.restore(json.loads(json.dumps(source.position())))
    assert read(again) == OLD_REST[8:]
    (moved,) = make().redistribute([OLD], 1)
    third = make()
    third.restore(moved)
    assert sorted(read(third)) == sorted(OLD_REST)


def test_positions_that_do_not_fit_are_refused_with_what_to_do(tmp_path: Path) -> None:
    paths = write(tmp_path, "csv", [200, 200])
    source = source_of(paths, "csv")
    read(source, 2)
    position = source.position()
    for change, said in (
        ({"files": 1}, "list of files has changed, .* Give the same files, or shuffle with files=False"),
        ({"shuffle": [1, 2, "pieces of 1000 bytes"]}, "taken with shuffle .* Use the same settings"),
        ({"open": [[0, 7, 0, 0, 0]]}, "malformed numbers"),
        ({"open": [[0, "secret", 0, 0, 0]]}, "is not the rest of a file"),
        ({"open": None}, "not of a source that shuffles pieces"),
        ({"rest": [[0, 3, 2, 0, 1]]}, "malformed numbers"),
        ({"rest": [[4, 0, 1, 0, 1]]}, "in epoch 4, there are 1 from 0 on"),
        ({"given": -1}, "malformed numbers"),
        ({"windows": [[7, []]]}, "malformed numbers"),
    ):
        with pytest.raises(RestoreError, match=said):
            source_of(paths, "csv").restore({**position, **change})
    (tmp_path / "000.csv").write_text("id,label\n1,0\n")
    replaced = source_of(paths, "csv")
    replaced.restore(position)
    with pytest.raises(DataError, match="it was replaced since"):
        read(replaced)
    with pytest.raises(ConfigError, match="piece_bytes must be at least 1"):
        ShuffleConfig(piece_bytes=0)


LINES = st.sampled_from(
    ["1,a", '2,"b\nc"', "", "\r", '3,"d', '4,e"', "5,f,g", '6,""""', "7," + 30 * "x", '8,"' + 30 * "y"]
)


@settings(max_examples=tries(150), deadline=None)
@given(
    lines=st.lists(LINES, max_size=40),
    ending=st.sampled_from(["\n", "\r\n"]),
    piece_bytes=st.integers(1, 60),
    record_bytes=st.sampled_from([20, 1 << 20]),
)
def test_the_pieces_of_a_csv_are_found_whatever_it_holds(
    lines: list[str], ending: str, piece_bytes: int, record_bytes: int, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.csv"
    path.write_bytes(ending.join(["id,text", *lines]).encode())
    form = CsvFormat(record_bytes=record_bytes, types={}).in_pieces(piece_bytes)
    whole = list(form.chunks(str(path)))
    bounds = form.bounds(str(path))
    assert bounds is not None
    assert bounds[1:] == [chunk.next for chunk in whole]
    for (begin, end), chunk in zip(pairwise(bounds), whole, strict=True):
        alone = next(iter(form.chunks(str(path), start=begin)))
        assert (alone.next, len(alone.records)) == (end, len(chunk.records))


def test_files_that_were_read_may_be_deleted_and_new_ones_are_read_last(tmp_path: Path) -> None:
    """In the middle of a pass, the others keep their order; after it, only files that are new are read."""
    paths = write(tmp_path, "csv", (40, 900, 900))
    whole = read(source_of(paths, "csv"))
    first = source_of(paths, "csv")
    batches = iter(first)
    order: list[int] = []
    while not set(range(40)) <= set(order):  # until all of the first file came
        order += next(batches)["id"].flat_values.tolist()
    assert len(order) < len(whole)

    Path(paths[0]).unlink()
    second = source_of(paths[1:], "csv")
    second.restore(json.loads(json.dumps(first.position())))
    assert order + read(second) == whole

    (tmp_path / "new").mkdir()
    new = write(tmp_path / "new", "csv", (70,))
    third = source_of([*paths[1:], *new], "csv")
    third.restore(json.loads(json.dumps(second.position())))
    assert sorted(read(third)) == list(range(70))


def test_a_file_that_is_not_read_to_its_end_may_not_be_deleted(tmp_path: Path) -> None:
    paths = write(tmp_path, "csv", (900, 900))
    first = source_of(paths, "csv")
    read(first, 3)
    second = source_of(paths[1:], "csv")
    with pytest.raises(RestoreError, match=r"000\.csv is not among the files.*Put it back"):
        second.restore(first.position())


@pytest.mark.parametrize("ending", [*FORMATS, "csv.gz"])
def test_threads_that_read_ahead_change_neither_records_nor_positions(tmp_path: Path, ending: str) -> None:
    paths = write(tmp_path, ending, (700, 40, 300))
    found = []
    for threads in (0, 1, 2, 4):
        source = source_of(paths, ending, epochs=2, threads=threads)
        found.append([(batch["id"].flat_values.tolist(), source.position()) for batch in source])
    assert len(found[0]) == -(-2 * 1040 // 64)
    assert all(one == found[0] for one in found[1:])


def test_reading_ahead_resumes_with_the_very_next_record(tmp_path: Path) -> None:
    paths = write(tmp_path, "csv", (700, 300))
    everything = [batch["id"].flat_values.tolist() for batch in source_of(paths, "csv", epochs=2)]
    for before in (0, 3, 15, 20):
        first = source_of(paths, "csv", epochs=2, threads=3)
        seen = [batch["id"].flat_values.tolist() for batch in islice(first, before)]
        second = source_of(paths, "csv", epochs=2, threads=2)
        second.restore(json.loads(json.dumps(first.position())))
        assert seen + [batch["id"].flat_values.tolist() for batch in second] == everything


class FailingCsv(CsvFormat):
    """Cannot read from the middle of a file."""

    def chunks(self, path: str, *, start: int = 0, **options: Any) -> Any:
        if start > 8000:
            raise CorruptFileError(path, start, "made up")
        yield from super().chunks(path, start=start, **options)


def test_a_piece_that_cannot_be_read_fails_in_its_turn(tmp_path: Path) -> None:
    paths = write(tmp_path, "csv")
    results = []
    for threads in (0, 3):
        read: list[int] = []
        source = FileSource(paths, FailingCsv(), batch_size=16, shuffle=SHUFFLE, threads=threads)
        with pytest.raises(CorruptFileError) as failed:  # noqa: PT012  what was read before counts
            for batch in source:
                read += batch["id"].flat_values.tolist()
        results.append((read, str(failed.value)))
    assert results[0] == results[1]
