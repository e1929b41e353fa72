"""Profiles of windows of steps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from train.runs import At, FakeClock, FakeRun, train

from monolith.errors import ConfigError, ProfilerBusyError, TrainingError
from monolith.train.hooks import ProfilerHook
from monolith.train.hooks.profiling import MOST_SECONDS, MOST_STEPS, StackSampler, Tracer


class Recorder:
    """A profiler that writes a file with nothing in it."""

    def __init__(self) -> None:
        self.running = False

    def __call__(self) -> Recorder:
        return self

    def start(self) -> None:
        assert not self.running
        self.running = True

    def stop(self) -> None:
        assert self.running
        self.running = False

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


def dumps(folder: Path) -> list[tuple[int, int]]:
    """First step before, and last step inside of each window."""
    found = (path.stem.split("_")[1:] for path in (folder / "profile").glob("*.json"))
    return sorted((int(begin), int(end)) for begin, end in found)


def profile(folder: Path, steps: int, *arguments, step: int = 0, **options) -> list[tuple[int, int]]:
    recorder = Recorder()
    on_step = options.pop("on_step", None)
    hook = ProfilerHook(*arguments, make=recorder, **options)
    train([hook], steps, run=FakeRun(folder, step=step), on_step=on_step)
    assert not recorder.running
    return dumps(folder)


@pytest.mark.parametrize(
    "steps, windows", [(9, [(0, 9)]), (10, [(0, 10)]), (30, [(0, 10)]), (31, [(0, 10), (30, 31)])]
)
def test_a_window_every_so_many_steps(tmp_path, steps, windows):
    assert profile(tmp_path, steps, (0, 10), save_steps=30) == windows


def test_by_default_ten_steps_after_the_first_five_hundred(tmp_path):
    assert profile(tmp_path, 2000, step=1000) == [(1500, 1510)]


def test_a_short_run_is_not_profiled(tmp_path):
    assert profile(tmp_path, 500) == []


def test_a_window_every_so_many_seconds(tmp_path):
    clock = FakeClock()
    windows = profile(tmp_path, 70, (5, 10), save_secs=30, clock=clock, on_step=lambda _: clock.sleep(1))
    assert windows == [(5, 10), (35, 40), (65, 70)]


@pytest.mark.parametrize(
    "arguments, options",
    [
        (((10, 10),), {}),
        (((10, 5),), {}),
        (((-1, 5),), {}),
        (((0, 10),), {"save_steps": 10}),
        (((0, 10),), {"save_steps": 30, "save_secs": 30}),
        (((0, 10),), {"save_secs": 0}),
    ],
)
def test_windows_that_make_no_sense_are_refused(arguments, options):
    with pytest.raises(ValueError, match="profiler"):
        ProfilerHook(*arguments, **options)
    assert issubclass(ConfigError, ValueError)


def test_a_run_that_dies_stops_the_profiler(tmp_path):
    def die() -> None:
        raise ZeroDivisionError

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        train([ProfilerHook((0, 10), make=recorder), At(3, die)], 5, run=FakeRun(tmp_path))
    assert not recorder.running
    assert dumps(tmp_path) == []


def test_a_run_without_a_folder_is_not_profiled():
    train([ProfilerHook((0, 10), make=lambda: pytest.fail("profiled"))], 5)


def test_the_trace_is_one_that_chrome_reads(tmp_path):
    hook = ProfilerHook((1, 3))
    run = FakeRun(tmp_path)
    train([hook], 5, run=run, on_step=lambda _: torch.ones(8, 8) @ torch.ones(8, 8))
    trace = json.loads((tmp_path / "profile" / "steps_1_3.json").read_text())
    assert sum(event.get("name") == "aten::matmul" for event in trace["traceEvents"]) == 2


# Traces of a process, recorded when somebody asks.


SECONDS = 60.0


class Recorded:
    """Stands in for torch's profiler."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.stopped = threading.Event()

    def start(self) -> None:
        self.started.set()

    def stop(self) -> None:
        self.stopped.set()

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text('{"baseTimeNanoseconds": 0, "traceEvents": [{"name": "own"}]}')


class Steps:
    """Counts up, one step each time it is asked."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self) -> int:
        self.taken += 1
        return self.taken


@contextmanager
def computing() -> Iterator[None]:
    """A thread that computes with torch."""
    stop = threading.Event()

    def spin() -> None:
        weights = torch.ones(16, 16)
        while not stop.is_set():
            weights @ weights
            time.sleep(0.001)

    thread = threading.Thread(target=spin, name="computes")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_trace_has_what_torch_does_on_other_threads_and_where_python_is(tmp_path: Path) -> None:
    with computing():
        trace = Tracer(str(tmp_path / "profile"), "worker_3").trace(seconds=0.5)
    found: dict[str, Any] = json.loads(Path(trace.path).read_text())
    assert Path(trace.path).parent == tmp_path / "profile"
    assert Path(trace.path).name.startswith("worker_3_")
    assert any(event.get("name") == "aten::mm" for event in found["traceEvents"])
    stacks = [event for event in found["traceEvents"] if event.get("cat") == "python_stack"]
    assert any(event["name"].endswith("spin") for event in stacks)
    assert all(event["dur"] >= 0 for event in stacks)


def test_a_trace_sums_up_which_functions_of_which_thread_took_the_time(tmp_path: Path) -> None:
    with computing():
        trace = Tracer(str(tmp_path), "worker_3", make=Recorded).trace(seconds=0.5)
    threads = {one.name: one for one in trace.threads}
    spin = next(one for one in threads["computes"].functions if one.function.endswith("spin"))
    assert 0 < spin.own <= spin.total <= 1
    assert spin.at.startswith(__file__)
    used = [one.cpu or 0.0 for one in trace.threads]
    assert used == sorted(used, reverse=True)
    assert json.loads(json.dumps(trace.to_dict()))["threads"][0]["name"] == trace.threads[0].name


def test_a_process_without_a_folder_needs_one_with_each_request(tmp_path: Path) -> None:
    tracer = Tracer("", "serve_0", make=Recorded)
    with pytest.raises(ConfigError, match="serve_0 has no folder for traces"):
        tracer.trace(seconds=0.01)
    assert Path(tracer.trace(seconds=0.01, folder=str(tmp_path)).path).parent == tmp_path


def test_it_ends_after_so_many_steps(tmp_path: Path) -> None:
    trace = Tracer(str(tmp_path), "w", steps=Steps(), make=Recorded).trace(steps=3, seconds=MOST_SECONDS)
    assert trace.steps >= 3
    assert trace.seconds < MOST_SECONDS


def test_it_ends_after_so_many_seconds_whatever_steps_are_missing(tmp_path: Path) -> None:
    trace = Tracer(str(tmp_path), "w", steps=lambda: 0, make=Recorded).trace(steps=3, seconds=0.05)
    assert trace.steps == 0


def test_one_trace_is_recorded_at_a_time(tmp_path: Path) -> None:
    recorder, enough = Recorded(), threading.Event()
    tracer = Tracer(str(tmp_path), "w", make=lambda: recorder)
    ended: list[BaseException] = []

    def first() -> None:
        try:
            tracer.trace(seconds=MOST_SECONDS, given_up=enough.is_set)
        except TrainingError as error:
            ended.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert recorder.started.wait(SECONDS)
    with pytest.raises(ProfilerBusyError, match="w is being profiled already"):
        tracer.trace(seconds=0.01)
    enough.set()
    thread.join(SECONDS)
    assert "given up" in str(ended[0])
    assert recorder.stopped.is_set()
    assert tracer.trace(seconds=0.01).path  # free again


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"seconds": 0.0}, "above 0"),
        ({"seconds": float("nan")}, "above 0"),
        ({"seconds": MOST_SECONDS + 1}, "at most"),
        ({"steps": MOST_STEPS + 1}, "from 0 to 1000"),
        ({"steps": 1}, "takes no steps"),
    ],
)
def test_what_a_trace_cannot_have_is_refused(tmp_path: Path, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Tracer(str(tmp_path), "w", make=Recorded).trace(**asked)


def test_a_stay_in_a_function_is_one_bar_over_all_looks() -> None:
    leave = threading.Event()

    def stays() -> None:
        leave.wait()

    thread = threading.Thread(target=stays, name="stays")
    thread.start()
    with StackSampler(every=0.001) as sampler:
        time.sleep(0.1)
    leave.set()
    thread.join()
    events = sampler.events(0)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    bars = [event for event in events if event["ph"] == "X" and names.get(event["tid"]) == "stays"]
    assert len([bar for bar in bars if bar["name"].endswith("stays")]) == 1
