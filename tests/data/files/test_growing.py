"""Files that others append to: what is read of them and when, and going on exactly after a kill."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.data import Records
from monolith.data.files.discovery import Watch
from monolith.data.files.source import FileSource
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.source import Shard
from monolith.errors import ConfigError, DataError, RestoreError

TYPES = {"id": torch.int64, "name": torch.uint8}


class Logs:
    """A folder of CSV files. Whenever somebody waits, time passes and the next thing happens."""

    def __init__(self, folder: Path, *later: Callable[[Logs], None]) -> None:
        self.folder = folder
        self.now = 0.0
        self._later = list(later)

    def append(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)

    def rows(self, name: str, *ids: int) -> None:
        head = "" if (self.folder / name).exists() else "id,name\n"
        self.append(name, head + "".join(f"{one},n{one}\n" for one in ids))

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self._later:
            self._later.pop(0)(self)

    def source(self, stop_after: float | None = 0.1, **options: Any) -> FileSource:
        watch = Watch(
            str(self.folder / "*.csv"),
            grows=True,
            stop_after=None if stop_after is None else timedelta(seconds=stop_after),
            clock=lambda: self.now,
            pause=self.pause,
        )
        given = {"batch_size": 4, "columns": ["id"], "clock": lambda: self.now, **options}
        return FileSource(watch, CsvFormat(types=TYPES), **given)


def ids(records: Records) -> list[int]:
    found: list[int] = records["id"].flat_values.tolist()
    return found


def read(source: FileSource) -> list[list[int]]:
    return [ids(records) for records in source]


def resumed(source: FileSource, logs: Logs, **options: Any) -> FileSource:
    again = logs.source(**options)
    again.restore(json.loads(json.dumps(source.position())))
    return again


def test_what_is_appended_and_files_that_appear_are_read_within_a_poll(tmp_path: Path) -> None:
    seen: list[tuple[float, list[int]]] = []
    logs = Logs(tmp_path, lambda to: to.rows("b.csv", 3), lambda to: to.rows("a.csv", 4, 5), lambda _: None)
    logs.rows("b.csv", 1, 2)
    for records in logs.source():
        seen.append((round(logs.now, 2), ids(records)))
    assert seen == [(0.0, [1, 2]), (0.02, [3]), (0.04, [4, 5])]


def test_a_record_is_read_when_its_line_is_finished(tmp_path: Path) -> None:
    logs = Logs(
        tmp_path,
        lambda to: to.append("a.csv", ',n1\n2,"two'),
        lambda to: to.append("a.csv", "\nlines"),
        lambda to: to.append("a.csv", '"\n'),
        lambda to: to.append("a.csv", "\n\n3,n3\n"),
    )
    logs.append("a.csv", "id,na")
    logs.append("a.csv", "me\n1")
    found = [records.strings("name")[0][0] for records in logs.source(columns=["id", "name"], batch_size=1)]
    assert found == [b"n1", b"two\nlines", b"n3"]


def test_json_lines_grow_and_unread_keys_may_appear_later(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{"id": 2')
    texts = iter(['}\n{"id": 3, "new": "x"}\n'])

    def pause(_: float) -> None:
        for text in texts:
            path.write_text(path.read_text() + text)
            break

    watch = Watch(str(path), grows=True, stop_after=timedelta(), pause=pause)
    watch.is_over = lambda: path.read_text().endswith("\n")  # type: ignore[method-assign]
    source = FileSource(watch, JsonLinesFormat(types=TYPES), batch_size=8, columns=["id"])
    assert read(source) == [[1], [2, 3]]
    assert source.position()["bad"] == 0


def test_a_batch_that_is_not_full_waits_for_max_wait_and_no_longer(tmp_path: Path) -> None:
    seen: list[tuple[float, list[int]]] = []
    later = [lambda to, one=one: to.rows("a.csv", one) for one in range(2, 9)]
    logs = Logs(tmp_path, *later)
    logs.rows("a.csv", 1)
    for records in logs.source(max_wait=timedelta(milliseconds=50), batch_size=6):
        seen.append((round(logs.now, 2), ids(records)))
    # One comes every 20 ms: a batch is flushed at the first look 50 ms or more after its first record.
    assert seen == [(0.06, [1, 2, 3, 4]), (0.14, [5, 6, 7, 8])]
    logs.rows("a.csv", *range(20))
    full = resumed(logs.source(), logs, max_wait=timedelta(days=1), batch_size=7)
    assert len(next(iter(full))) == 7  # one that is full waits for nothing


def everything(first: list[list[int]], rest: list[list[int]]) -> list[int]:
    return sorted(one for batch in [*first, *rest] for one in batch)


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_kill_anywhere_neither_loses_nor_repeats_a_record(tmp_path: Path, stop: int) -> None:
    """Two files grow by turns, and batches are flushed in the middle of what was read."""

    def turn(first: int) -> Callable[[Logs], None]:
        return lambda to: (to.rows("a.csv", first, first + 1), to.rows("b.csv", first + 2))[0]

    logs = Logs(tmp_path, *(turn(first) for first in range(3, 30, 3)))
    logs.rows("b.csv", 0, 1, 2)
    options = {"max_wait": timedelta(milliseconds=30), "batch_size": 5}
    source = logs.source(**options)
    taken: list[list[int]] = []
    iterator: Iterator[Records] = iter(source)
    for _ in range(stop):
        if (records := next(iterator, None)) is None:
            break
        taken.append(ids(records))
    again = resumed(source, logs, **options)  # the old one is killed; what it read ahead is forgotten
    assert everything(taken, read(again)) == list(range(30))


def test_the_position_is_that_of_the_last_batch_also_while_records_are_buffered(tmp_path: Path) -> None:
    taken: list[list[int]] = []
    positions: list[Any] = []
    logs = Logs(tmp_path, lambda to: to.rows("b.csv", 5, 6), lambda _: positions.append(source.position()))
    logs.rows("a.csv", 1, 2, 3, 4)
    source = logs.source(max_wait=timedelta(seconds=1), stop_after=2)
    taken.append(ids(next(iterator := iter(source))))
    next(iterator)
    again = logs.source()
    again.restore(positions[0])  # saved while 5 and 6 were read and held back
    assert [*taken, *read(again)] == [[1, 2, 3, 4], [5, 6]]


def test_a_file_that_was_read_may_be_deleted_also_between_two_runs(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.rows("a.csv", 1)
    logs.rows("b.csv", 2)
    source = logs.source()
    assert read(source) == [[1, 2]]
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).unlink()
    logs.rows("c.csv", 3)
    again = resumed(source, logs)
    assert read(again) == [[3]]
    assert list(again.position()["grown"]) == [str(tmp_path / "c.csv")]  # which does not grow for ever


def test_a_file_that_vanished_before_all_of_it_was_read_is_an_error(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.rows("a.csv", *range(10))
    source = logs.source()
    next(iter(source))
    (tmp_path / "a.csv").rename(tmp_path / "a.old")
    with pytest.raises(
        RestoreError, match=r"a\.csv was deleted or renamed, and only the first .*Put it back"
    ):
        resumed(source, logs)
    (tmp_path / "a.old").rename(tmp_path / "a.csv")
    assert read(resumed(source, logs)) == [[4, 5, 6, 7], [8, 9]]

    logs = Logs(tmp_path, lambda to: (to.folder / "b.csv").unlink(), *[lambda _: None] * 60)
    logs.rows("b.csv", 1)
    logs.append("b.csv", "2,unfinis")
    with pytest.raises(DataError, match=r"b\.csv was deleted or renamed"):
        read(logs.source(stop_after=2))


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    logs = Logs(tmp_path, lambda to: (to.folder / "a.csv").write_text("id,name\n7,x\n"))
    logs.rows("a.csv", *range(10))
    source = logs.source()
    with pytest.raises(DataError, match="truncated or replaced"):
        read(source)
    with pytest.raises(RestoreError, match="truncated or replaced"):
        resumed(source, logs)


def test_a_last_line_without_a_line_break_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = Logs(tmp_path)
    logs.append("a.csv", "id,name\n1,n1\n2,n2")
    with caplog.at_level(logging.WARNING):
        assert read(logs.source(stop_after=90, batch_size=8)) == [[1]]
    assert [one.getMessage() for one in caplog.records] == [
        f"file source: the last line of {tmp_path}/a.csv, at byte 13, has no line break at its end, so it is "
        "not read: it may be incomplete. End the file with a line break."
    ]


def test_other_numbers_of_workers_read_every_record_once(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    for name in "abcdef":
        logs.rows(f"{name}.csv", *(10 * ord(name) + one for one in range(7)))
    one = logs.source()
    taken = [ids(next(iter(one))) for _ in range(3)]
    shares = []
    for worker in range(2):
        source = logs.source()
        source.read_shard(Shard(worker, 2))
        shares.append(source)
    for source, position in zip(shares, shares[0].redistribute([one.position()], 2), strict=True):
        source.restore(json.loads(json.dumps(position)))
    rest = [read(source) for source in shares]
    assert all(rest)
    assert everything(taken, [*rest[0], *rest[1]]) == sorted(
        10 * ord(n) + i for n in "abcdef" for i in range(7)
    )


def test_formats_that_cannot_grow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="their format is parquet"):
        FileSource(Watch(f"{tmp_path}/*.parquet", grows=True), ParquetFormat(), batch_size=1)
    with pytest.raises(ConfigError, match="not compressed"):
        FileSource(Watch(f"{tmp_path}/*.csv.gz", grows=True), CsvFormat(), batch_size=1)
