"""Batches of a stream that may pause are made on several threads, and none waits for later records."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from data.lists import column, records

from monolith.concurrency import Event
from monolith.data import BadRecord, BatchSpec, FileSource, Pipeline, Position, Records, Source
from monolith.data.files.discovery import Watch
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.formats import CsvFormat
from monolith.data.live_ahead import LiveAhead
from monolith.data.pipeline import Batches
from monolith.errors import DataError, TooManyBadRecordsError
from monolith.feature import Batch, FeatureSpec, FloatFeature, IdFeature
from monolith.tensors import RaggedTensor

T = TypeVar("T")

LONG_S = 20.0
"""Longer than anything here takes; a test that fails waits for it."""
SPEC = FeatureSpec(features={"n": IdFeature()}, labels={})
END = None


class Fed(Source):
    """Yields what a test feeds it, and waits when there is nothing."""

    live = True

    def __init__(self, *fed: Records | Exception | None) -> None:
        self.fed: list[Records | Exception | None] = []
        self.next = 0
        self.on_read: Callable[[], int] = lambda: 0
        self.taken: list[int] = []
        """What `on_read` returned at each read."""
        self.rejected: list[BadRecord] = []
        self.changed = threading.Condition()
        self._stop = Event()
        for one in fed:
            self.feed(one)

    def feed(self, one: Records | Exception | None) -> None:
        with self.changed:
            self.fed.append(one)
            self.changed.notify_all()

    def read_until(self, stop: Event) -> None:
        self._stop = stop

    def __iter__(self) -> Iterator[Records]:
        while True:
            with self.changed:
                while not self.changed.wait_for(lambda: self.next < len(self.fed), 0.01):
                    if self._stop.is_set():
                        return
                one = self.fed[self.next]
            if isinstance(one, Exception):
                raise one
            if one is END:
                return
            with self.changed:
                self.next += 1
                self.taken.append(self.on_read())
                self.changed.notify_all()
            yield one

    def position(self) -> Position:
        return {"next": self.next}

    def restore(self, position: Position) -> None:
        self.next = position["next"]

    def reject(self, bad: Any) -> None:
        self.rejected.extend(bad)


def some(*numbers: int) -> Records:
    return records(n=[[number] for number in numbers])


def ids(batch: Batch) -> list[int]:
    return batch.ids["n"].flat_values.tolist()


def batches_of(source: Any, threads: int, spec: BatchSpec | FeatureSpec = SPEC) -> Batches:
    return Pipeline(source).to_batches(spec, threads=threads)


def soon(function: Callable[[], T]) -> T:
    """Call a function that may wait for ever if there is a bug."""
    found: queue.Queue[T | BaseException] = queue.Queue()

    def call() -> None:
        try:
            found.put(function())
        except BaseException as error:
            found.put(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        result = found.get(timeout=LONG_S)
    except queue.Empty:
        pytest.fail("it waits for something")
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_record_that_arrives_alone_gets_its_batch_before_any_later_one_arrives(threads: int) -> None:
    source = Fed()
    with closing(batches_of(source, threads)) as batches:
        reading = iter(batches)
        ages = []
        for number in range(8):
            source.feed(some(number))
            assert ids(soon(lambda: next(reading))) == [number]
            assert batches.position() == {"next": number + 1}
            ages.append(len(source.fed) - 1 - number)  # in records that arrived since
        assert ages == [0] * 8


class Blocking(Mapping[str, RaggedTensor]):
    """Columns whose values are moved when first asked for, as those of gathered records: here, together with
    those of other batches."""

    def __init__(self, number: int, barrier: threading.Barrier) -> None:
        self._column = column([[number]])
        self._barrier: threading.Barrier | None = None
        self._of = barrier

    def block(self) -> None:
        self._barrier = self._of

    def __getitem__(self, name: str) -> RaggedTensor:
        barrier, self._barrier = self._barrier, None
        if barrier is not None:
            barrier.wait(LONG_S)
        if name != "n":
            raise KeyError(name)
        return self._column

    def __iter__(self) -> Iterator[str]:
        return iter(["n"])

    def __len__(self) -> int:
        return 1


def test_as_many_batches_are_in_work_at_the_same_time_as_there_are_threads() -> None:
    threads = 3
    barrier = threading.Barrier(threads)  # nobody gets past it until all are there
    source = Fed()
    for number in range(2 * threads):
        columns = Blocking(number, barrier)
        fed = Records(1, columns)
        columns.block()
        source.feed(fed)
    source.feed(END)
    found = soon(lambda: list(batches_of(source, threads, BatchSpec(ids=("n",), labels={}))))
    assert [ids(one) for one in found] == [[number] for number in range(2 * threads)]


def test_no_more_is_read_ahead_than_threads_have_work() -> None:
    source = Fed(*[some(number) for number in range(60)], END)
    owner = Fed()
    ahead = LiveAhead(owner, source, len, threads=4)
    for number in range(60):
        taken = soon(lambda: ahead.take(Event()))
        assert taken is not None
        assert taken.position == {"next": number + 1}
        taken.work.result(LONG_S)
        # Those that are started, and one that is being read.
        assert source.next <= number + 1 + 4 + 1
    assert ahead.take(Event()) is None
    assert ahead.join(LONG_S)
    ahead.close()


def test_what_is_done_and_not_taken_keeps_the_source_from_being_read() -> None:
    threads, rounds = 4, 10
    source = Fed(*[some(number) for number in range(threads * rounds)], END)
    taken = 0
    source.on_read = lambda: taken
    may_work = threading.Semaphore(0)
    owner = Fed()
    ahead = LiveAhead(owner, source, lambda _: may_work.acquire(timeout=LONG_S), threads)
    for full in range(threads, threads * rounds + 1, threads):
        with source.changed:  # all threads have work
            assert source.changed.wait_for(lambda full=full: source.next == full, LONG_S)
        may_work.release(threads)
        with ahead._changed:
            assert ahead._changed.wait_for(lambda: not ahead._unfinished, LONG_S)
        for _ in range(threads):
            taken += 1
            assert soon(lambda: ahead.take(Event())) is not None
    assert soon(lambda: ahead.take(Event())) is None
    assert source.taken == [threads * (number // threads) for number in range(threads * rounds)]


def test_positions_are_those_of_the_consumer_and_a_new_stage_continues_there() -> None:
    parts = [some(3 * number, 3 * number + 1, 3 * number + 2) for number in range(20)]
    everything = [(ids(one), None) for one in batches_of(Fed(*parts, END), 0)]
    first = batches_of(Fed(*parts, END), 3)
    seen = [(ids(one), first.position()) for one in islice(first, 7)]
    assert [position for _, position in seen] == [{"next": number + 1} for number in range(7)]
    second = batches_of(Fed(*parts, END), 2)
    second.restore(first.position())
    rest = [ids(one) for one in second]
    assert [one for one, _ in seen] + rest == [one for one, _ in everything]
    assert second.position() == {"next": 20}
    # The first continues, too: in another iteration, and restored to where it was.
    assert ids(next(iter(first))) == ids_of(parts[7])
    first.restore({"next": 7})
    assert [ids(one) for one in first] == rest


def ids_of(part: Records) -> list[int]:
    return part["n"].flat_values.tolist()


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_the_source_comes_after_the_batches_before_it(threads: int) -> None:
    source = Fed(some(1), some(2), DataError("the broker is away"))
    batches = batches_of(source, threads)
    reading = iter(batches)
    assert [ids(next(reading)), ids(next(reading))] == [[1], [2]]
    with pytest.raises(DataError, match="away"):
        next(reading)
    assert batches.position() == {"next": 2}
    source.fed[2] = some(3)  # it is back
    source.feed(END)
    assert [ids(one) for one in batches] == [[3]]


def test_what_was_read_after_a_batch_that_fails_comes_again() -> None:
    spec = FeatureSpec(features={"x": FloatFeature()}, labels={}, max_bad=0.0)
    good = [records(x=[[float(number)]]) for number in range(4)]
    source = Fed(good[0], records(x=[[float("inf")]]), *good[1:], END)
    with closing(batches_of(source, 2, spec)) as batches:
        with pytest.raises(TooManyBadRecordsError):
            list(batches)
        assert [bad.reason for bad in source.rejected] == ["features.x: column 'x' is [inf]"]
        assert batches.position() == {"next": 1}
        source.fed[1] = good[0]
        assert [one.floats["x"].tolist() for one in batches] == [[[float(n)]] for n in (0, 1, 2, 3)]


def test_a_stage_that_waits_for_data_can_be_restored_and_closed() -> None:
    source = Fed(some(1), some(2))
    batches = batches_of(source, 2)
    reading = iter(batches)
    assert [ids(soon(lambda: next(reading))) for _ in range(2)] == [[1], [2]]
    soon(lambda: batches.restore({"next": 1}))
    again = iter(batches)
    assert ids(soon(lambda: next(again))) == [2]
    with pytest.raises(DataError, match="restored or closed"):
        next(reading)
    soon(batches.close)
    source.feed(END)
    assert list(source) == []  # it is not stopped for others


def test_a_stage_that_is_forgotten_ends_its_threads() -> None:
    source = Fed(some(1), some(2))
    batches = batches_of(source, 2)
    assert ids(next(iter(batches))) == [1]
    (reader,) = [one for one in threading.enumerate() if one.name == "monolith-read-live"]
    known = weakref.ref(batches)
    del batches
    gc.collect()
    assert known() is None
    reader.join(LONG_S)
    assert not reader.is_alive()


# Files that appear, files that grow, and queues of files

TYPES = {"n": torch.int64}


def write(folder: Path, name: str, first: int, count: int) -> str:
    path = folder / name
    path.write_text("n\n" + "".join(f"{first + number}\n" for number in range(count)))
    return str(path)


def read_all(source: FileSource, threads: int | None) -> list[tuple[list[int], Position]]:
    with closing(Pipeline(source).to_batches(SPEC, threads=threads)) as batches:
        return [(ids(one), batches.position()) for one in batches]


@pytest.mark.parametrize("grows", [False, True])
def test_watched_files_have_the_same_batches_and_positions_for_any_number_of_threads(
    tmp_path: Path, grows: bool
) -> None:
    for number in range(3):
        write(tmp_path, f"{number}.csv", 100 * number, 50)

    def source(threads: int) -> FileSource:
        watch = Watch(str(tmp_path / "*.csv"), grows=grows, stop_after=timedelta(0))
        return FileSource(watch, CsvFormat(types=TYPES), batch_size=8, threads=threads)

    assert [source(threads).batch_threads for threads in (0, 1, 3)] == [0, 1, 3]
    alone = read_all(source(0), None)
    assert sum(len(one) for one, _ in alone) == 150
    assert read_all(source(3), None) == alone
    resumed = []
    for threads in (0, 3):
        one = source(threads)
        one.restore(alone[6][1])
        resumed.append(read_all(one, None))
    assert resumed[0] == resumed[1]
    assert [seen for seen, _ in resumed[1]] == [seen for seen, _ in alone[7:]]


def test_a_line_that_is_appended_gets_its_batch_and_a_wait_for_more_can_be_ended(tmp_path: Path) -> None:
    path = write(tmp_path, "clicks.csv", 0, 3)
    watch = Watch(path, grows=True)
    source = FileSource(watch, CsvFormat(types=TYPES), batch_size=8, threads=2)
    with closing(Pipeline(source).to_batches(SPEC)) as batches:
        reading = iter(batches)
        assert ids(soon(lambda: next(reading))) == [0, 1, 2]
        before = batches.position()
        with Path(path).open("a") as file:
            file.write("3\n")
        assert ids(soon(lambda: next(reading))) == [3]
        soon(lambda: batches.restore(before))
        again = iter(batches)
        assert ids(soon(lambda: next(again))) == [3]


def test_a_worker_on_a_queue_gives_back_what_it_read_ahead_and_has_not_trained(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{number}.csv", 100 * number, 20) for number in range(4)]
    shared = LocalFileQueue(paths)

    def worker(number: int) -> FileSource:
        form = CsvFormat(types=TYPES)
        return FileSource(shared, form, batch_size=8, worker=number, num_workers=2, threads=3)

    leaving = Pipeline(worker(0)).to_batches(SPEC)
    assert leaving.work_queue is not None
    leaving.work_queue.defer_to_chief()
    trained = [ids(one) for one in islice(leaving, 4)]
    position = leaving.position()
    leaving.close()
    other = worker(1)
    other.give_back(position)
    trained += [one for one, _ in read_all(other, None)]
    assert sorted(number for one in trained for number in one) == [
        100 * file + number for file in range(4) for number in range(20)
    ]


def test_no_batch_is_made_ahead_where_what_was_read_counts_as_trained(tmp_path: Path) -> None:
    shared = LocalFileQueue([write(tmp_path, "some.csv", 0, 8)])
    form = CsvFormat(types=TYPES)
    assert FileSource(shared, form, batch_size=8, threads=3).batch_threads == 3
    assert FileSource(shared, form, batch_size=8, threads=3, auto_commit=True).batch_threads == 0
    assert Fed().batch_threads == 0
