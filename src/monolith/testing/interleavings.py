"""Interleavings: small scenarios of a few threads, under many orders of their single instructions.

A `Simulation` changes threads where one may wait. That finds what goes wrong between processes. Inside of a
class that is used by several threads, the mistake is more often between two plain lines: a field is checked
and then used, a counter is read and then written, a lock is taken one line too late. `explore` runs a
scenario again and again, and may change threads before every instruction of the named modules that reads or
writes an attribute, an item, or a variable of an enclosing function, or that calls something:

    def scenario():
        cache = Cache()                 # made by a simulated thread, so its locks are simulated
        run_threads(lambda: cache.put(1), lambda: cache.put(2))
        assert cache.size == 2

    explore(scenario, [cache_module], schedules=300)

Which thread runs is decided by one of two strategies, by turns:

- `Priorities` is PCT (Burckhardt, Kothari, Musuvathi, Nagarakatte: A Randomized Scheduler with Probabilistic
  Guarantees of Finding Bugs, ASPLOS 2010). Every thread has a random priority, and the one with the highest
  runs, except that at `depth - 1` random steps the running thread falls behind all others. A bug of depth d
  needs d things to happen in a certain order: two for most data races, three for most check-then-act. With n
  threads and k steps in all, one schedule finds a bug of depth d with a chance of at least 1 / (n k^(d-1));
  here divided by 2^(d-1) if threads wait with a timeout, because at half of these steps a timeout passes.
- `Preemptions` changes to any other thread at each step with a fixed chance. It promises nothing for a
  single schedule, and is better at bugs that need many changes of threads.

A schedule that fails is repeated by its number, and told with the line at which each thread was stopped.
Native code, torch and modules that are not named run as one step. So do the primitives of the simulation,
whose waits are points of change in any case. Objects that the scenario shares between threads must take
their locks from `monolith.concurrency`: a real lock that a stopped thread has would stop all others.
"""

from __future__ import annotations

import _thread
import dis
import functools
import linecache
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Protocol

from monolith import concurrency
from monolith.testing.scheduler import SimThread, Simulation, SimulationError

_SHARED = ("ATTR", "METHOD", "SUBSCR", "DEREF", "CALL", "CONTAINS_OP", "FOR_ITER", "STORE_GLOBAL", "SLICE")
"""Parts of the names of instructions that touch what other threads may touch, on any version of CPython."""
_TOOL = 4
"""Number of the explorer for `sys.monitoring`: debuggers, coverage, profilers and optimizers have others."""
_TIMEOUTS = 0.5
"""Chance that a deadline passes when a thread is stopped, if one is waited for."""
_LONGEST_STOP = 1.0
"""Virtual seconds that a thread is stopped at most: a later deadline passes only if all threads wait."""
_MOST_SECONDS, _MOST_SWITCHES = 3600.0, 100_000
"""Virtual seconds and changes of threads after which a schedule counts as one without an end."""


class Strategy(Protocol):
    """Decides which thread runs."""

    def plan(self, draw: random.Random, steps: int) -> Plan:
        """Return the decisions for one schedule of about so many steps."""


class Plan(Protocol):
    """The decisions for one schedule."""

    def stops(self, thread: SimThread, ready: Sequence[SimThread]) -> bool:
        """Return whether `thread` is stopped before its next step, so that one of `ready` may run."""

    def pick(self, ready: Sequence[SimThread]) -> int:
        """Return the place of the thread that runs next."""


@dataclass(frozen=True, slots=True)
class Priorities:
    """PCT: finds every bug of `depth` with the chance that the module's docstring states."""

    depth: int

    def plan(self, draw: random.Random, steps: int) -> Plan:
        changes = draw.sample(range(1, steps + 1), min(self.depth - 1, steps))
        return _PriorityPlan(draw, changes=frozenset(changes))


@dataclass(slots=True)
class _PriorityPlan:
    draw: random.Random
    changes: frozenset[int]
    """Steps at which the running thread falls behind all others."""
    step: int = 0
    of: dict[SimThread, float] = field(default_factory=dict)
    """Thread -> its priority: 0 to 1 at first, then below all that were given before."""

    def stops(self, thread: SimThread, ready: Sequence[SimThread]) -> bool:
        self.step += 1
        if self.step in self.changes:
            self.of[thread] = -float(self.step)
            return True
        mine = self._priority(thread)
        return any(self._priority(other) > mine for other in ready)

    def pick(self, ready: Sequence[SimThread]) -> int:
        return max(range(len(ready)), key=lambda place: self._priority(ready[place]))

    def _priority(self, thread: SimThread) -> float:
        if thread not in self.of:
            self.of[thread] = self.draw.random()
        return self.of[thread]


@dataclass(frozen=True, slots=True)
class Preemptions:
    """Stops the running thread with a fixed chance at each step."""

    chance: float

    def plan(self, draw: random.Random, steps: int) -> Plan:  # noqa: ARG002
        return _PreemptionPlan(draw, self.chance)


@dataclass(slots=True)
class _PreemptionPlan:
    draw: random.Random
    chance: float

    def stops(self, thread: SimThread, ready: Sequence[SimThread]) -> bool:  # noqa: ARG002
        return self.draw.random() < self.chance

    def pick(self, ready: Sequence[SimThread]) -> int:
        return self.draw.randrange(len(ready))


STRATEGIES: tuple[Strategy, ...] = (Priorities(2), Priorities(3), Preemptions(0.05), Priorities(4))
"""By turns: schedule i has the strategy i modulo their number."""


@dataclass(frozen=True, slots=True)
class Explored:
    """What `explore` has tried."""

    schedules: int
    distinct: int
    """Schedules that differ in where a thread was stopped or waited."""
    steps: int
    """The most steps of one schedule."""


def explore(
    scenario: Callable[[], object],
    modules: Iterable[ModuleType],
    *,
    schedules: int,
    first: int = 0,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> Explored:
    """Run a scenario under the schedules `first` to `first + schedules - 1`.

    Args:
        scenario: Makes its objects anew, starts threads, waits for them and asserts. Called once per schedule
            on a simulated thread. What its threads raise fails the schedule too.
        modules: The modules between whose instructions threads are changed.

    Raises:
        SimulationError: A schedule failed. The message has its number and where threads were changed.
    """
    names = frozenset(module.__name__ for module in modules)
    # Once without a change of threads, to know how many steps there are to choose from. Every call does this,
    # so that a schedule is the same one whichever schedule is the first.
    counted = _Exploration(0, names, Priorities(1).plan(random.Random(0), 0))
    counted.run(scenario)
    seen = set()
    most = 0
    for number in range(first, first + schedules):
        strategy = strategies[number % len(strategies)]
        plan = strategy.plan(random.Random(f"schedule {number}"), max(1, counted.steps))
        exploration = _Exploration(number, names, plan)
        try:
            exploration.run(scenario)
        except SimulationError as error:
            again = f"schedule {number}, {strategy}; explore(..., first={number}, schedules=1) repeats it"
            failed = type(error)(f"{again}\n{error}")
            failed.seed = number
            raise failed from error
        seen.add(hash(tuple(exploration.changes)))
        most = max(most, exploration.steps)
    return Explored(schedules, len(seen), most)


def schedules_until_failure(
    scenario: Callable[[], object], modules: Iterable[ModuleType], *, most: int
) -> int | None:
    """Return how many schedules `explore` needs until one fails, for a deliberate bug; None if none does."""
    try:
        explore(scenario, modules, schedules=most)
    except SimulationError as error:
        return 1 if error.seed is None else error.seed + 1  # None: it fails without a change of threads, too
    return None


def run_threads(*targets: Callable[[], object]) -> None:
    """Run functions in a thread each, and return when all have returned."""
    threads = [
        concurrency.Thread(target=target, name=f"thread {number}") for number, target in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Exploration(Simulation):
    """One schedule: a simulation that also changes threads between the instructions of some modules."""

    def __init__(self, number: int, modules: frozenset[str], plan: Plan) -> None:
        super().__init__(number, most_seconds=_MOST_SECONDS, most_switches=_MOST_SWITCHES)
        self._modules = modules
        self._plan = plan
        self._watched: set[CodeType] = set()
        """Functions of the named modules that were called, from Python 3.12 on."""
        self.steps = 0
        self.changes: list[tuple[str, str, int]] = []
        """Thread, file and line, at each change of threads."""

    def maybe_switch(self) -> None:
        self._step(sys._getframe(1))
        self.check_alive()

    def block(self, why: str, seconds: float | None = None, waiters: list[SimThread] | None = None) -> bool:
        if self.current.machine.alive:
            self._note_place(f"waits ({why})", sys._getframe(1))
        return super().block(why, seconds, waiters)

    def _pick(self, ready: Sequence[SimThread]) -> int:
        return self._plan.pick(ready)

    # Python 3.12 crashes if threads change within a callback of `sys.settrace`, and brings what replaces it.
    if sys.version_info >= (3, 12):

        def run(self, play: Callable[[], object]) -> None:
            watch, events = sys.monitoring, sys.monitoring.events
            watch.use_tool_id(_TOOL, "monolith interleavings")
            try:
                watch.register_callback(_TOOL, events.PY_START, self._watch_if_named)
                watch.register_callback(_TOOL, events.INSTRUCTION, self._instruction)
                watch.restart_events()  # an earlier exploration has disabled those of functions that it saw
                watch.set_events(_TOOL, events.PY_START)
                super().run(play)
            finally:
                watch.set_events(_TOOL, 0)
                for code in self._watched:
                    watch.set_local_events(_TOOL, code, 0)
                watch.free_tool_id(_TOOL)

        def _watch_if_named(self, code: CodeType, _offset: int) -> object:
            if sys._getframe(1).f_globals.get("__name__") in self._modules:
                self._watched.add(code)
                sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.INSTRUCTION)
            return sys.monitoring.DISABLE  # once for each function

        def _instruction(self, code: CodeType, offset: int) -> None:
            if offset in _shared_offsets(code) and self.current.ident == _thread.get_ident():
                self._step(sys._getframe(1))

    else:

        def _call(self, target: Callable[[], object]) -> None:
            # Of this thread only, and gone with it: nothing outside of the simulation is traced.
            sys.settrace(self._trace_call)
            try:
                target()
            finally:
                sys.settrace(None)

        def _trace_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:  # noqa: ARG002
            if frame.f_globals.get("__name__") not in self._modules:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._trace_opcode

        def _trace_opcode(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:  # noqa: ARG002
            if event == "opcode" and frame.f_lasti in _shared_offsets(frame.f_code):
                self._step(frame)
            return self._trace_opcode

    def _step(self, frame: FrameType) -> None:
        """Count a step of the running thread, and let another one run first if the plan says so."""
        thread = self.current
        if not thread.machine.alive:
            return  # it is being ended, and runs its `finally` blocks
        self.steps += 1
        if not self._plan.stops(thread, self._ready):
            return
        # A timeout may pass at any moment, not only while all threads wait.
        if self._timers and self.random.random() < _TIMEOUTS:
            self._reach_deadline(_LONGEST_STOP)
        if self._ready:
            self._note_place("is stopped", frame)
            self._yield()
            self.check_alive()

    def _note_place(self, what: str, frame: FrameType | None) -> None:
        """Note at which line of the named modules the running thread is."""
        while frame is not None and frame.f_globals.get("__name__") not in self._modules:
            frame = frame.f_back
        if frame is None:
            return
        path, line = frame.f_code.co_filename, frame.f_lineno
        self.changes.append((self.current.name, path, line))
        text = linecache.getline(path, line).strip()
        self.note(f"{what} at {Path(path).name}:{line} {frame.f_code.co_name}: {text}")


@functools.cache
def _shared_offsets(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions before which threads may be changed.

    Those that belong to no line, such as the cleanup of a `with` in Python 3.12, are left out: a failure
    there could not be told with its line.
    """
    return frozenset(
        one.offset
        for one in dis.get_instructions(code)
        if any(part in one.opname for part in _SHARED)
        and one.opname != "PRECALL"
        and one.positions is not None
        and one.positions.lineno is not None
    )
