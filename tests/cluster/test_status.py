"""What the processes of a job say of themselves in the folder they share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from monolith.cluster.status import (
    FAILED,
    JobStatus,
    ProcessStatus,
    Rates,
    StatusBoard,
    StatusPage,
    StatusWriter,
)
from monolith.errors import RequestError

NEVER = timedelta(days=1)


def process(role: str = "worker", index: int = 0, **more: object) -> ProcessStatus:
    known: dict[str, object] = {"state": "training", "time": 100.0, "every": 2.0, "started": 50.0}
    return ProcessStatus(role=role, index=index, **(known | more))  # type: ignore[arg-type]


def names(job: JobStatus) -> list[str]:
    return [one.name for one in job.processes]


@pytest.fixture
def board(tmp_path: Path) -> StatusBoard:
    return StatusBoard(str(tmp_path / "m"))


# The board


def test_all_processes_are_read_from_the_folder_workers_first(board: StatusBoard) -> None:
    for one in (process("ps", 10, rows=5), process("ps", 9), process()):
        board.write(one)
    job = board.read(lambda: 101.0)
    assert (job.time, job.unreadable) == (101.0, 0)
    assert names(job) == ["worker 0", "ps 9", "ps 10"]
    assert job.processes[2] == process("ps", 10, rows=5)


def test_a_process_s_last_word_replaces_the_one_before(board: StatusBoard) -> None:
    board.write(process(state="starting"))
    board.write(process(state="training"))
    assert [one.state for one in board.read().processes] == ["training"]


def test_a_folder_without_status_files_has_no_processes(board: StatusBoard) -> None:
    assert board.read().processes == ()


def test_what_is_damaged_or_of_another_version_is_counted_and_the_rest_is_read(board: StatusBoard) -> None:
    board.write(process())
    folder = Path(board.folder)
    (folder / "ps-0.json").write_text('{"role": "ps"')
    (folder / "ps-1.json").write_text('{"role": "ps", "index": 1, "colour": "blue"}')
    (folder / "ps-2.json.new").write_text("being written")
    job = board.read()
    assert (names(job), job.unreadable) == (["worker 0"], 2)


def test_the_folder_goes_with_the_last_process(board: StatusBoard) -> None:
    board.write(process("ps", 0))
    board.write(process("ps", 1))
    board.remove("ps", 0)
    assert names(board.read()) == ["ps 1"]
    board.remove("ps", 1)
    assert not Path(board.folder).exists()
    board.remove("ps", 1)


# Silence


@pytest.mark.parametrize(("every", "after"), [(2.0, 10.0), (15.0, 60.0)])
def test_a_process_that_misses_its_own_periods_is_silent(every: float, after: float) -> None:
    one = process(every=every)
    assert not one.is_silent(100 + after)
    assert one.is_silent(100 + after + 0.1)
    assert not one.is_silent(90)  # its clock is ahead of ours


# The writer


def writer(board: StatusBoard, look: Callable[[], ProcessStatus] = process) -> StatusWriter:
    return StatusWriter(board, look, every=NEVER, clock=lambda: 200.0)


def test_a_process_is_seen_while_it_runs_and_gone_when_it_ended_well(board: StatusBoard) -> None:
    with writer(board) as writing:
        writing.write()
        (seen,) = board.read().processes
        assert seen == process(time=200.0, every=86_400.0)
    assert board.read().processes == ()


def test_a_process_that_an_error_ended_stays_and_says_so(board: StatusBoard) -> None:
    with pytest.raises(ValueError, match="a bug"), writer(board):
        raise ValueError("a bug")
    assert [one.state for one in board.read().processes] == [FAILED]


def test_a_process_that_was_asked_to_stop_leaves_nothing(board: StatusBoard) -> None:
    with pytest.raises(SystemExit), writer(board):
        raise SystemExit(143)
    assert board.read().processes == ()


def test_a_process_that_finds_its_own_file_of_an_earlier_start_counts_as_restarted(
    board: StatusBoard,
) -> None:
    board.write(process(restarts=2))  # and was killed
    board.write(process("ps", 0, restarts=7))
    with writer(board) as writing:
        assert writing.now().restarts == 3
    with writer(board) as writing:  # the one before ended well
        assert writing.now().restarts == 0


def test_a_folder_that_cannot_be_written_is_warned_about_and_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m").write_text("a file")
    with caplog.at_level(logging.WARNING), writer(StatusBoard(str(tmp_path / "m"))) as writing:
        for _ in range(10):
            writing.write()
    assert 0 < len(caplog.records) < 8
    assert "`monolith status watch` cannot see this process" in caplog.text


def test_a_look_that_fails_harms_nothing(board: StatusBoard, caplog: pytest.LogCaptureFixture) -> None:
    looks = iter([process()])
    with writer(board, lambda: next(looks)):
        pass
    assert "cannot see this process" in caplog.text


def test_remote_storage_is_written_less_often(board: StatusBoard) -> None:
    assert board.every == timedelta(seconds=2)
    assert StatusBoard("memory://job").every == timedelta(seconds=15)


# The page


def test_a_page_shows_all_and_this_process_as_it_is_now(board: StatusBoard) -> None:
    board.write(process(state="old"))
    board.write(process("ps", 0))
    job = JobStatus.from_json(StatusPage(board, lambda: process(state="new"))())
    assert [(one.name, one.state) for one in job.processes] == [("worker 0", "new"), ("ps 0", "training")]


def test_a_page_of_a_run_that_keeps_nothing_shows_its_process() -> None:
    assert names(JobStatus.from_json(StatusPage(None, process)())) == ["worker 0"]


def test_however_many_ask_a_page_is_gathered_once_in_a_while(board: StatusBoard) -> None:
    clock, looks = [0.0], []

    def look() -> ProcessStatus:
        looks.append(clock[0])
        return process()

    page = StatusPage(board, look, clock=lambda: -86_400 * clock[0], timer=lambda: clock[0])
    for moment in (0.0, 0.5, 0.9, 1.0, 1.5, 2.0):
        clock[0] = moment
        page()
    assert looks == [0.0, 1.0, 2.0]


def test_a_clock_that_is_ahead_is_distinguished_from_a_recent_report() -> None:
    assert process(time=100.0).clock_ahead(now=95.0) == 0
    assert process(time=86_500.0).clock_ahead(now=100.0) == 86_400


@pytest.mark.parametrize("text", [b"# HELP x", b"[]", b'{"time": -1}', b'{"time": 1, "processes": [{}]}'])
def test_what_is_no_status_is_refused(text: bytes) -> None:
    with pytest.raises(RequestError):
        JobStatus.from_json(text)


def test_what_is_written_is_read_again() -> None:
    job = JobStatus(time=1.0, processes=(process(), process("ps", 3, rows=4)), unreadable=2)
    assert JobStatus.from_json(job.to_json()) == job
    assert JobStatus.from_json(replace(job, processes=()).to_json()).processes == ()


# Rates


def test_a_rate_is_that_of_the_last_seconds() -> None:
    clock = [0.0]
    rates = Rates(span=10, clock=lambda: clock[0])
    assert rates.of({"steps": 0}) == {}
    for moment, steps, rate in ((5, 50, 10.0), (10, 100, 10.0), (15, 100, 5.0), (20, 100, 0.0)):
        clock[0] = moment
        assert rates.of({"steps": steps}) == {"steps": rate}


def test_a_counter_that_begins_again_has_no_rate_for_a_moment() -> None:
    clock = [0.0]
    rates = Rates(clock=lambda: clock[0])
    rates.of({"steps": 100})
    clock[0] = 1
    assert rates.of({"steps": 3}) == {}
    clock[0] = 2
    assert rates.of({"steps": 5}) == {"steps": 2.0}
