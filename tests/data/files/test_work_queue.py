"""Queues of strings, and of files that are leased: in a process and in a folder."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from monolith.data.files.discovery import find_files
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.files.work_queue import FileQueue, LocalFileQueue, StrQueue
from monolith.errors import ConfigError, CorruptFileError, DataError, ReplacedError, RestoreError


def drained(queue: StrQueue) -> list[str]:
    values = []
    while True:
        value, ended = queue.dequeue()
        if ended:
            return values
        values.append(value)


# Strings


def test_strings_come_out_in_order_and_the_end_stays_the_end() -> None:
    queue = StrQueue(["a", "b"])
    assert [queue.dequeue() for _ in range(4)] == [("a", False), ("b", False), ("", True), ("", True)]


def test_more_than_fit_are_refused_and_none_is_added() -> None:
    queue = StrQueue(["a"], capacity=2)
    with pytest.raises(DataError, match="2 more do not fit: it has 1 of at most 2"):
        queue.enqueue_many(["b", "c"])
    assert len(queue) == 1
    with pytest.raises(ConfigError):
        StrQueue(capacity=0)


def test_a_queue_is_filled_when_it_runs_dry_until_there_is_nothing() -> None:
    calls = []

    def fill() -> Sequence[str]:
        calls.append(1)
        return ["x", "y"] if len(calls) < 3 else []

    queue = StrQueue(["a"], refill=fill)
    assert drained(queue) == ["a", "x", "y", "x", "y"]
    assert queue.dequeue() == ("", True)
    assert len(calls) == 3


def test_five_patterns_of_two_files_come_out_in_order(tmp_path: Path) -> None:
    for day in range(5):
        (tmp_path / str(day)).mkdir()
        for part in "ab":
            (tmp_path / str(day) / part).write_bytes(b"")
    patterns = StrQueue([f"{tmp_path}/{day}/*" for day in range(5)])

    def files_of_the_next_pattern() -> list[str]:
        pattern, ended = patterns.dequeue()
        return [] if ended else find_files(pattern)

    files = drained(StrQueue(refill=files_of_the_next_pattern))
    assert [str(Path(file).relative_to(tmp_path)) for file in files] == [
        f"{day}/{part}" for day in range(5) for part in "ab"
    ]


def test_an_empty_queue_ends_at_once() -> None:
    assert StrQueue().dequeue() == ("", True)


def test_a_restored_queue_continues_with_the_second() -> None:
    queue = StrQueue(["a", "b", "c"])
    queue.dequeue()
    again = StrQueue(["other"])
    again.restore(json.loads(json.dumps(queue.state())))
    assert drained(again) == ["b", "c"]
    for garbage in [{}, {"values": [1], "ended": False}, {"values": [], "ended": 3}]:
        with pytest.raises(RestoreError):
            again.restore(garbage)


# Files


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


MakeQueue = Callable[[Sequence[str]], FileQueue]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["local", "shared"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> MakeQueue:
    count = iter(range(100))

    def make(files: Sequence[str]) -> FileQueue:
        lease = timedelta(seconds=60)
        if request.param == "local":
            return LocalFileQueue(files, lease=lease, clock=clock, pause=lambda _: None)
        queue = SharedFileQueue(
            str(tmp_path / f"queue{next(count)}"), lease=lease, clock=clock, timer=clock, pause=lambda _: None
        )
        queue.add(files)
        return queue

    return make


def path_of(queue: FileQueue, worker: str = "w", **options: Any) -> str | None:
    lease = queue.take(worker, **options)
    return None if lease is None else lease.path


def test_each_file_is_leased_once(make: MakeQueue) -> None:
    queue = make(["a", "b", "c"])
    assert [path_of(queue, worker) for worker in "vwvw"] == ["a", "b", "c", None]


def test_a_finished_file_does_not_come_back(make: MakeQueue, clock: Clock) -> None:
    queue = make(["a"])
    lease = queue.take("w")
    assert lease is not None
    assert queue.finish(lease)
    clock.now += 1000
    assert queue.take("w") is None
    assert not queue.others_are_reading("v")


def test_a_file_whose_lease_expired_is_leased_again_from_its_reported_progress(
    make: MakeQueue, clock: Clock
) -> None:
    queue = make(["a", "b"])
    lease = queue.take("dead")
    assert lease is not None
    assert lease.progress == {}
    assert queue.report(lease, {"place": 7})
    clock.now += 59.9
    assert path_of(queue) == "b"
    assert queue.others_are_reading("w")
    clock.now += 0.2
    again = queue.take("w")
    assert again is not None
    assert (again.number, again.path, again.progress) == (0, "a", {"place": 7})
    assert not queue.others_are_reading("w")


def test_a_worker_that_lost_a_lease_cannot_report_for_it(make: MakeQueue, clock: Clock) -> None:
    queue = make(["a"])
    lost = queue.take("slow")
    assert lost is not None
    clock.now += 61
    assert queue.renew(lost) is None
    lease = queue.take("w")
    assert lease is not None
    assert not queue.report(lost, {"place": 99})
    assert not queue.finish(lost)
    queue.give_back(lost)
    assert queue.finish(lease)


def test_a_renewed_lease_lasts(make: MakeQueue, clock: Clock) -> None:
    queue = make(["a"])
    lease = queue.take("w")
    for _ in range(5):
        clock.now += 50
        assert lease is not None
        lease = queue.renew(lease)
    assert lease is not None
    assert queue.take("v") is None
    assert queue.renew(lease) is lease  # most of its time is left


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_wall_clock_that_jumps_takes_no_lease_away_and_keeps_none_for_good(
    tmp_path: Path, clock: Clock, jump: float
) -> None:
    timer = Clock()
    how: dict[str, Any] = {"lease": timedelta(seconds=60), "clock": clock, "timer": timer}
    mine, other = (SharedFileQueue(str(tmp_path), **how) for _ in range(2))
    mine.add(["a", "b"])
    lease = mine.take("w")
    assert other.take("dead") is not None
    clock.now += jump
    assert other.take("v") is None, "both are held"
    for _ in range(4):
        timer.now += 20
        clock.now += 20
        assert lease is not None
        lease = mine.renew(lease)
    assert lease is not None
    again = other.take("v")  # what nobody renewed for a minute
    assert again is not None
    assert again.path == "b"


def test_what_is_given_back_comes_before_what_is_new(make: MakeQueue) -> None:
    queue = make(["a", "b", "c"])
    queue.take("w")
    lease = queue.take("w")
    assert lease is not None
    queue.report(lease, {"place": 3})
    queue.give_back(lease)
    again = queue.take("v")
    assert again is not None
    assert (again.path, again.progress) == ("b", {"place": 3})


def test_no_worker_waits_for_a_file_that_was_read_to_its_end(make: MakeQueue, clock: Clock) -> None:
    queue = make(["a"])
    lease = queue.take("v")
    assert lease is not None
    assert queue.others_are_reading("w")
    queue.mark_read(lease)
    assert not queue.others_are_reading("w")
    clock.now += 61
    assert path_of(queue) == "a"  # it never counted
    assert queue.others_are_reading("v")


def test_all_leases_of_a_worker_can_be_taken_back(make: MakeQueue) -> None:
    queue = make(["a", "b", "c"])
    queue.take("dead")
    queue.take("w")
    queue.take("dead")
    queue.release("dead")
    assert [path_of(queue) for _ in range(3)] == ["a", "c", None]


def test_a_process_that_was_replaced_gets_no_more_files(make: MakeQueue) -> None:
    queue = make(["a", "b"])
    queue.begin("worker 1", "first")
    assert path_of(queue, "worker 1", session="first") == "a"
    queue.begin("worker 1", "second")
    with pytest.raises(ReplacedError, match="another process was started under this name"):
        queue.take("worker 1", session="first")
    with pytest.raises(ReplacedError):
        queue.take("worker 1", 0, session="first")
    assert [path_of(queue, "worker 1", session="second") for _ in range(3)] == ["a", "b", None]


def test_a_replaced_process_that_closes_releases_no_file_of_its_successor(make: MakeQueue) -> None:
    queue = make(["a", "b"])
    queue.begin("worker 1", "first")
    queue.begin("worker 1", "second")
    lease = queue.take("worker 1", session="second")
    queue.release("worker 1", "first")
    assert lease is not None
    assert queue.finish(lease)


def test_a_file_of_an_earlier_process_of_a_worker_is_waited_for(make: MakeQueue) -> None:
    queue = make(["a"])
    queue.take("worker 1", session="first")
    assert queue.others_are_reading("worker 1", "second")
    assert not queue.others_are_reading("worker 1", "first")


def test_what_a_worker_had_done_is_settled_as_its_leases_are_taken_back(make: MakeQueue) -> None:
    queue = make(["a", "b", "c", "d"])
    leases = [queue.take("one") for _ in range(3)]
    other = queue.take("two")
    assert None not in leases
    assert other is not None
    assert queue.readers() == ["one", "two"]
    queue.settle(["one"], finished=[0, other.number], reached={1: {"place": 5}, 9: {"place": 1}})
    assert queue.readers() == ["two"], "what another has is its business"
    handed = [queue.take("two") for _ in range(3)]
    assert [(one.path, one.progress) for one in handed if one is not None] == [("b", {"place": 5}), ("c", {})]
    assert queue.finish(other)


def test_a_worker_can_ask_for_the_file_it_had(make: MakeQueue) -> None:
    queue = make(["a", "b"])
    lease = queue.take("w")
    assert lease is not None
    assert path_of(queue, "other", number=0) is None
    assert path_of(queue, "w", number=0) == "a"
    assert not queue.finish(lease)  # of the process before
    assert path_of(queue, "w", number=5) is None


def test_a_restored_queue_leases_unfinished_files(make: MakeQueue) -> None:
    queue = make(["a", "b", "c", "d"])
    leases = [queue.take(worker) for worker in "uvw"]
    assert leases[0] is not None
    assert leases[1] is not None
    queue.finish(leases[0])
    queue.report(leases[1], {"place": 4})
    state = json.loads(json.dumps(queue.state()))
    again = make(["a", "b", "c", "d"])
    again.restore(state)
    taken = [again.take("x") for _ in range(4)]
    assert [(lease.path, lease.progress) for lease in taken if lease] == [
        ("b", {"place": 4}),
        ("c", {}),
        ("d", {}),
    ]
    again.restore(state)
    assert path_of(again) == "b"


@pytest.mark.parametrize("garbage", [{}, {"handed": 1}, {"handed": 1, "waiting": [[1]]}, {"waiting": 3}])
def test_a_state_of_something_else_is_refused(make: MakeQueue, garbage: dict[str, Any]) -> None:
    with pytest.raises(RestoreError):
        make(["a"]).restore(garbage)


def test_a_lease_needs_some_time() -> None:
    with pytest.raises(ConfigError):
        LocalFileQueue(["a"], lease=timedelta(0))


# In a folder


def test_a_file_is_added_once_by_any_worker(tmp_path: Path) -> None:
    first, second = SharedFileQueue(str(tmp_path)), SharedFileQueue(str(tmp_path))
    assert first.add(["a", "b"]) == 2
    assert second.add(["a", "b", "c", "c"]) == 1
    assert [path_of(first), path_of(second), path_of(first), path_of(first)] == ["a", "b", "c", None]


def test_a_line_that_was_half_written_is_written_over(tmp_path: Path) -> None:
    SharedFileQueue(str(tmp_path)).add(["a"])
    with (tmp_path / "files.jsonl").open("ab") as file:
        file.write(b'"half')
    queue = SharedFileQueue(str(tmp_path))
    assert queue.add(["b"]) == 1
    assert [path_of(queue) for _ in range(3)] == ["a", "b", None]


def test_a_ledger_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{")
    with pytest.raises(CorruptFileError, match="ledger"):
        SharedFileQueue(str(tmp_path)).take("w")


def test_all_processes_know_which_one_was_started_last_as_a_worker(tmp_path: Path) -> None:
    first, second = SharedFileQueue(str(tmp_path)), SharedFileQueue(str(tmp_path))
    first.add(["a"])
    first.begin("worker 1", "first")
    second.begin("worker 1", "second")
    with pytest.raises(ReplacedError):
        first.take("worker 1", session="first")


def test_a_ledger_of_a_version_without_sessions_is_read(tmp_path: Path) -> None:
    lease = {"number": 0, "path": "a", "worker": "worker 1", "token": "t", "expires": 1e12, "progress": {}}
    ledger = {"handed": 1, "waiting": [], "leases": [{**lease, "read": False}]}
    (tmp_path / "ledger.json").write_text(json.dumps(ledger))
    queue = SharedFileQueue(str(tmp_path))
    queue.begin("worker 1", "second")
    assert path_of(queue, "worker 1", session="second") == "a"


def _take_all(folder: str, worker: str) -> list[str]:
    queue = SharedFileQueue(folder)
    taken = []
    while lease := queue.take(worker):
        taken.append(lease.path)
        assert queue.finish(lease)
    return taken


def test_processes_lease_different_files_of_a_folder(tmp_path: Path) -> None:
    files = [str(number) for number in range(60)]
    SharedFileQueue(str(tmp_path)).add(files)
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        taken = pool.starmap(_take_all, [(str(tmp_path), worker) for worker in "uvw"])
    assert sorted(file for files in taken for file in files) == sorted(files)
