"""Profiles of a few steps now and then, for people who ask where the time goes.

A window of steps is recorded by torch's profiler and left as a Chrome trace in `profile/` of the
model directory; open it with chrome://tracing or Perfetto.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from monolith import concurrency, filesystem
from monolith.errors import ConfigError, ProfilerBusyError, TrainingError
from monolith.train.hook import Hook, StepResult, TrainingRun

_log = logging.getLogger(__name__)

FOLDER = "profile"
FIRST_STEP = 500
WINDOW_STEPS = 10


def torch_profiler() -> torch.profiler.profile:
    """Return a profiler of the thread that starts it: the CPU, and the GPU where there is one."""
    return torch.profiler.profile(activities=_activities())


def all_threads_profiler() -> torch.profiler.profile:
    """Return a profiler of all threads of this process."""
    from torch._C._profiler import _ExperimentalConfig  # torch has no other way to see threads of others

    config = _ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=_activities(), experimental_config=config)


def _activities() -> list[torch.profiler.ProfilerActivity]:
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


class ProfilerHook(Hook):
    """Records windows of steps. A window that the end of the run cuts short is kept.

    Args:
        init_step_range: The first window, [begin, end), counted from the step the run starts at. By default
            10 steps after the first 500.
        save_steps: From the beginning of one window to that of the next; by default there is one window.
        save_secs: The same in seconds.
        make: Makes a profiler for each window.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        init_step_range: tuple[int, int] = (FIRST_STEP, FIRST_STEP + WINDOW_STEPS),
        *,
        save_steps: int | None = None,
        save_secs: float | None = None,
        make: Callable[[], torch.profiler.profile] = torch_profiler,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        begin, end = init_step_range
        if begin < 0 or end <= begin:
            raise ConfigError(f"profiler: the first window must end after it begins, got [{begin}, {end})")
        if save_steps is not None and save_secs is not None:
            raise ConfigError("profiler: give save_steps or save_secs, not both")
        if save_steps is not None and save_steps <= end - begin:
            raise ConfigError(
                f"profiler: save_steps must be more than a window of {end - begin} steps, got {save_steps}"
            )
        if save_secs is not None and save_secs <= 0:
            raise ConfigError(f"profiler: save_secs must be above 0, got {save_secs}")
        self._offset = begin
        self._length = end - begin
        self._save_steps = save_steps
        self._save_secs = save_secs
        self._make = make
        self._clock = clock
        self._next_step: int | None = None
        self._next_time: float | None = None
        self._profiler: torch.profiler.profile | None = None
        self._began = 0
        self._seen = 0
        """Steps of the current window that were taken."""

    def after_create(self, run: TrainingRun) -> None:
        self._next_step = run.step + self._offset

    def before_step(self, run: TrainingRun) -> None:
        if self._profiler is not None or not run.model_dir or not self._is_due(run.step):
            return
        self._began, self._seen = run.step, 0
        self._next_step = self._next_time = None
        if self._save_steps is not None:
            self._next_step = run.step + self._save_steps
        elif self._save_secs is not None:
            self._next_time = self._clock() + self._save_secs
        self._profiler = self._make()
        self._profiler.start()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if self._profiler is not None:
            self._seen += 1
            if run.step >= self._began + self._length:
                self._dump(run)

    def end(self, run: TrainingRun) -> None:
        if self._profiler is not None and self._seen:
            self._dump(run)

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _is_due(self, step: int) -> bool:
        if self._next_step is not None:
            return step >= self._next_step
        return self._next_time is not None and self._clock() >= self._next_time

    def _dump(self, run: TrainingRun) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        folder = filesystem.join(run.model_dir, FOLDER)
        filesystem.make_dirs(folder)
        path = filesystem.join(folder, f"steps_{self._began}_{run.step}.json")
        # torch writes to local files only, and the model directory may be anywhere.
        with filesystem.temporary_folder() as local:
            trace = local / "trace.json"
            profiler.export_chrome_trace(str(trace))
            filesystem.copy_file(str(trace), path)
        _log.info("profiled steps %d to %d: %s", self._began, run.step, path)


# Traces of a running process: the work of its threads for some seconds, on request.
#
# A trace is a file for chrome://tracing or Perfetto. It has the operations of torch on all threads and on the
# GPU, and next to them the Python stacks of all threads, looked at a hundred times a second: a process that
# serves or reads does little in torch, and its stacks say where its time goes. `Trace.threads` sums
# these stacks up for people who only want to know the functions that take the time.


MOST_SECONDS = 120.0
"""The longest trace: a second of training may be some megabytes."""
MOST_STEPS = 1000
SAMPLE_SECONDS = 0.01
_LOOK_SECONDS = 0.02
_DEEPEST = 64
_FUNCTIONS = 12
"""Functions of each thread in a summary."""
_STACKS = "Python stacks"


@dataclass(frozen=True, slots=True)
class FunctionTime:
    """How often a thread was seen in one function."""

    function: str
    at: str
    """The file and the line where it begins."""
    own: float
    """The share of looks, 0 to 1, that saw the thread in this function or in native code it called."""
    total: float
    """The share of looks that saw it in this function or in one that it called."""


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """Where one thread spent its time."""

    name: str
    cpu: float | None
    """The share of one core that it used, 0 to 1; None if the system does not tell. A thread without Python
    code, such as one of torch's, has no functions."""
    functions: tuple[FunctionTime, ...]
    """Those with the largest own share first."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was recorded."""

    path: str
    steps: int
    """Taken meanwhile."""
    seconds: float
    threads: tuple[ThreadTime, ...] = ()
    """The threads that used the CPU most come first."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return asdict(self)


class Tracer:
    """Records traces of this process, one at a time, into a folder. Thread-safe.

    Args:
        folder: Where traces go; made when there is one. May be empty if each request names one.
        name: What their names begin with, such as worker_0.
        steps: Counts the steps of this process; None for one that takes none.
        make: Makes what records torch.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        *,
        steps: Callable[[], int] | None = None,
        make: Callable[[], torch.profiler.profile] = all_threads_profiler,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._folder = folder
        self._name = name
        self._steps = steps
        self._make = make
        self._clock = clock
        self._busy = concurrency.Lock()  # held while a trace is recorded

    def trace(
        self,
        *,
        steps: int = 0,
        seconds: float = 10.0,
        folder: str = "",
        given_up: Callable[[], bool] = lambda: False,
    ) -> Trace:
        """Record for so many steps, and for so many seconds at the most; return when the file is there.

        Args:
            steps: 0 does not count them.
            folder: Where this trace goes; by default the folder of the tracer.
            given_up: Whether the trace is no longer wanted.

        Raises:
            ConfigError: More is asked for than a trace may have, or steps of a process that takes none.
            ProfilerBusyError: Another one is being recorded.
            TrainingError: It was given up.
        """
        self._check(steps, seconds)
        if not (folder or self._folder):
            raise ConfigError(f"profile: {self._name} has no folder for traces; name one")
        if not self._busy.acquire(blocking=False):
            raise ProfilerBusyError(
                f"{self._name} is being profiled already; ask again when that is done, {MOST_SECONDS:g} s at "
                "the most"
            )
        try:
            return self._record(steps, seconds, folder or self._folder, given_up)
        finally:
            self._busy.release()

    def _check(self, steps: int, seconds: float) -> None:
        if not 0 < seconds <= MOST_SECONDS:
            raise ConfigError(
                f"profile: seconds must be above 0 and at most {MOST_SECONDS:g}, got {seconds:g}"
            )
        if not 0 <= steps <= MOST_STEPS:
            raise ConfigError(f"profile: steps must be from 0 to {MOST_STEPS}, got {steps}")
        if steps and self._steps is None:
            raise ConfigError(f"profile: {self._name} takes no steps; ask for seconds")

    def _record(self, steps: int, seconds: float, folder: str, given_up: Callable[[], bool]) -> Trace:
        count = self._steps or (lambda: 0)
        recorder = self._make()
        sampler = StackSampler()
        recorder.start()  # which takes seconds, the first time
        began, first = self._clock(), count()
        try:
            with sampler:
                while self._clock() - began < seconds and not (steps and count() - first >= steps):
                    if given_up():
                        raise TrainingError("the profile was given up: its caller no longer waits for it")
                    concurrency.sleep(_LOOK_SECONDS)
        finally:
            recorder.stop()
        took, taken = self._clock() - began, count() - first
        path = filesystem.join(folder, f"{self._name}_{time.time_ns() // 1_000_000}.json")
        filesystem.make_dirs(folder)
        # torch writes to local files only, and the folder may be anywhere.
        with filesystem.temporary_folder() as local:
            file = local / "trace.json"
            recorder.export_chrome_trace(str(file))
            _add_events(file, sampler)
            filesystem.copy_file(str(file), path)
        _log.info("profiled %d steps in %.1f s: %s", taken, took, path)
        return Trace(path, taken, took, sampler.summary())


class StackSampler:
    """Looks at the stacks of all other threads while its block lasts.

    What a thread is seen in at two looks in a row counts as one stay there: a stack is a bar for each
    function, from the first look that saw it to the last.
    """

    def __init__(self, every: float = SAMPLE_SECONDS) -> None:
        self._every = every
        self._stop = concurrency.Event()
        self._open: dict[int, list[tuple[str, str, int]]] = {}
        """By thread, from the outermost on: function, file, and since when in ns."""
        self._bars: list[tuple[int, str, str, int, int]] = []
        self._names: dict[int, str] = {}
        self._native: dict[int, int] = {}
        """The thread id of the system, by that of Python."""
        self._own: Counter[tuple[int, str, str]] = Counter()
        self._total: Counter[tuple[int, str, str]] = Counter()
        """Looks that saw a thread in a function itself, and anywhere below it."""
        self._looks: Counter[int] = Counter()
        self._cpu: list[dict[int, float]] = []
        """CPU seconds of each thread of the system, at the beginning and at the end."""
        self._seconds = 0.0
        self._thread = concurrency.Thread(target=self._run, name="stack-sampler", daemon=True)

    def __enter__(self) -> StackSampler:
        self._cpu = [_cpu_seconds()]
        self._seconds = -concurrency.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._cpu.append(_cpu_seconds())
        self._seconds += concurrency.monotonic()

    def summary(self) -> tuple[ThreadTime, ...]:
        """Return where each thread spent its time, after the block."""
        before, after = self._cpu
        used = {thread: (spent - before.get(thread, 0.0)) / self._seconds for thread, spent in after.items()}
        used.pop(self._thread.native_id or 0, None)
        found = []
        for thread, looks in self._looks.items():
            functions = [
                FunctionTime(function, at, self._own[thread, function, at] / looks, total / looks)
                for (one, function, at), total in self._total.items()
                if one == thread
            ]
            functions.sort(key=lambda one: (-one.own, -one.total))
            cpu = used.pop(self._native.get(thread, 0), None)
            name = self._names.get(thread, f"thread {thread}")
            found.append(ThreadTime(name, cpu, tuple(functions[:_FUNCTIONS])))
        if rest := [share for share in used.values() if share > 0]:  # threads that no Python code runs in
            found.append(ThreadTime(f"native threads ({len(rest)})", sum(rest), ()))
        return tuple(sorted(found, key=lambda one: -(one.cpu or 0.0)))

    def events(self, base_ns: int) -> list[dict[str, Any]]:
        """Return what was seen, as events of a trace whose times count from `base_ns` of Unix time."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": _STACKS, "tid": thread, "args": {"name": name}}
            for thread, name in self._names.items()
        ]
        bars = [
            {
                "ph": "X",
                "cat": "python_stack",
                "name": function,
                "pid": _STACKS,
                "tid": thread,
                "ts": (since - base_ns) / 1000,
                "dur": (until - since) / 1000,
                "args": {"at": at},
            }
            for thread, function, at, since, until in self._bars
        ]
        return [*names, *bars]

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._look(time.time_ns())
        now = time.time_ns()
        for thread in self._open:
            self._close(thread, 0, now)

    def _look(self, now: int) -> None:
        own = threading.get_ident()
        for one in threading.enumerate():
            if one.ident is not None:
                self._names[one.ident] = one.name
                # The main thread has the number of the process, also after a fork that Python missed.
                is_main = one is threading.main_thread()
                self._native[one.ident] = os.getpid() if is_main else one.native_id or 0
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != own}
        for thread in self._open.keys() - frames.keys():
            self._close(thread, 0, now)
        for thread, frame in frames.items():
            seen = _stack(frame)
            self._looks[thread] += 1
            self._own[(thread, *seen[-1])] += 1
            for place in set(seen):  # a function that calls itself counts once
                self._total[(thread, *place)] += 1
            known = self._open.setdefault(thread, [])
            same = 0
            while same < min(len(seen), len(known)) and seen[same] == known[same][:2]:
                same += 1
            self._close(thread, same, now)
            known += [(function, at, now) for function, at in seen[same:]]

    def _close(self, thread: int, depth: int, now: int) -> None:
        """End the bars of a thread from some depth on."""
        known = self._open[thread]
        self._bars += [(thread, function, at, since, now) for function, at, since in known[depth:]]
        del known[depth:]


def _stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """Return function and file of each frame, from the outermost on, but for what is too deep."""
    found: list[tuple[str, str]] = []
    while frame is not None:
        code = frame.f_code
        found.append((code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}"))
        frame = frame.f_back
    return found[::-1][:_DEEPEST]


def _cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds that each thread of this process has used; empty if the system does not tell."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    with suppress(OSError):
        for one in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                # The name, in parentheses, may have anything in it; utime and stime are the 14th and 15th.
                fields = (one / "stat").read_text().rpartition(")")[2].split()
                found[int(one.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return found


def _add_events(file: Path, sampler: StackSampler) -> None:
    trace: Mapping[str, Any] = json.loads(file.read_text())
    events = sampler.events(int(trace.get("baseTimeNanoseconds", 0)))
    whole = {**trace, "traceEvents": [*trace.get("traceEvents", []), *events], "process": os.getpid()}
    with filesystem.atomic_write(file) as written:
        written.write(json.dumps(whole).encode())
