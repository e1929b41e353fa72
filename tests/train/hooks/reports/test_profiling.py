"""Profiles of windows of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train.runs import At, FakeClock, FakeRun, train

from monolith.errors import ConfigError
from monolith.train.hooks import ProfilerHook


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
