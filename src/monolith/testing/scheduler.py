"""A cluster in one process: simulated machines whose threads run one at a time, in an order that a seed
decides.

Threads are real, so the code under test is the code that ships, but only the one with the *baton* runs. At
every point where a thread may wait (a lock, a queue, an event, a sleep, a message) it passes the baton to a
thread that the seeded generator chooses. If all wait, virtual time jumps to the earliest deadline: hours pass
in milliseconds, and the same seed gives the same run again.

    simulation = Simulation(seed=7)
    simulation.run(lambda: play(simulation))      # `play` runs on a simulated thread and may start machines

State of a thread:

            start            chosen               blocks
    (new) --------> ready ------------> running ---------> blocked
                      ^                   |  |                |
                      |     preempted     |  | returns        | woken, or the deadline came
                      +-------------------+  v                |
                      ^                    ended              |
                      +---------------------------------------+

A machine that is killed does not tidy up: each of its threads receives `MachineKilled` where it waits, and
from then on nothing that it does has an effect on other machines. `finally` blocks still run, as Python
demands; the locks, files and connections that they touch ignore them.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import heapq
import logging
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monolith.concurrency import Empty, Full, run_on

_EPOCH = 1_800_000_000.0
"""Wall clock of every machine at virtual time 0, in seconds since 1970."""
_TICK = 1e-7
"""Seconds by which every wait with a deadline moves virtual time at least."""
_STUCK_AFTER = 20.0
"""Real seconds without a change of threads after which a simulation counts as stuck outside the simulator."""
_LINES = 4_000
"""Events that a trace keeps."""


class MachineKilled(BaseException):
    """Ends the threads of a killed machine. Not an Exception: code under test must not survive it."""


class SimulationError(AssertionError):
    """A simulated run broke a rule. The message has the seed, the reason and the last events."""

    seed: int | None = None
    """Of the run, or the number of the schedule."""


class DeadlockError(SimulationError):
    """All threads wait, and no timer will wake any of them."""


@dataclass(eq=False, slots=True)
class SimThread:
    """A thread of a simulated machine."""

    machine: SimMachine
    name: str
    target: Callable[[], object]
    daemon: bool = True
    state: str = "new"
    why: str = ""
    """What a blocked thread waits for, in words, for traces."""
    waits: int = 0
    """Number of its present wait: a timer of an earlier wait is ignored."""
    woken: bool = False
    """Whether another thread ended the last wait, and not its deadline."""
    ended: list[SimThread] = field(default_factory=list)
    """Threads in `join`."""
    baton: Any = field(default_factory=_thread.allocate_lock)
    """Taken while the thread may not run."""
    ident: int | None = None

    def __post_init__(self) -> None:
        self.baton.acquire()

    # As of threading.Thread

    def start(self) -> None:
        self.machine.simulation._start(self)

    def join(self, timeout: float | None = None) -> None:
        simulation = self.machine.simulation
        if self.state not in ("new", "ended"):
            simulation.block(f"join {self.name}", timeout, self.ended)

    def is_alive(self) -> bool:
        return self.state not in ("new", "ended")


class _Runner:
    """A real thread, and the simulated one that it runs next."""

    def __init__(self, thread: SimThread | None) -> None:
        self.thread = thread
        self.wake = _thread.allocate_lock()
        self.wake.acquire()


class SimMachine:
    """A machine of the simulation: implements `monolith.concurrency.Machine` for its threads.

    Args:
        rate: Seconds that its monotonic clock counts in one virtual second: its drift.
        wall_offset: Seconds by which its wall clock is ahead of other machines'; may change.
    """

    def __init__(
        self, simulation: Simulation, name: str, *, rate: float = 1.0, wall_offset: float = 0.0
    ) -> None:
        self.simulation = simulation
        self.name = name
        self.rate = rate
        self.wall_offset = wall_offset
        self.alive = True
        self.paused_until = 0.0
        """Virtual time before which none of its threads runs."""
        self.threads: list[SimThread] = []
        self.on_kill: list[Callable[[], None]] = []
        """Called once when it is killed: closes its listeners and connections."""
        self.transport: Any = None
        """Of a `SimNetwork`, if the machine is connected to one."""
        self.ranks: Any = None
        """A `SimRankNetwork`, if the machine is connected to a network."""
        self.disk: Any = None
        """A `SimDisk`, if the machine has one."""
        self.kafka: Any = None
        """The client of a `SimKafka`, if the machine uses one."""
        self.grpc: Any = None
        """A `SimGrpc`, if the machine is connected to a network."""

    def spawn(self, target: Callable[[], object], name: str = "main") -> SimThread:
        """Start a thread of this machine, from any thread of the simulation."""
        thread = SimThread(self, name, target)
        thread.start()
        return thread

    def kill(self) -> None:
        """End all threads at once, without cleanup. A thread of another machine calls it, or the last one."""
        if not self.alive:
            return
        self.simulation.note(f"{self.name} is killed")
        self.alive = False
        for close in self.on_kill:
            close()
        for thread in self.threads:
            self.simulation.wake(thread)
        self.simulation.check_alive()

    # As monolith.concurrency.Machine

    def monotonic(self) -> float:
        return self.simulation.now * self.rate

    def time(self) -> float:
        return _EPOCH + self.wall_offset + self.simulation.now

    def sleep(self, seconds: float) -> None:
        self.simulation.block("sleep", max(0.0, seconds))

    def thread(
        self,
        target: Callable[..., object],
        *,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> SimThread:
        chosen = name or f"thread-{len(self.threads)}"
        return SimThread(self, chosen, lambda: target(*args, **(kwargs or {})), daemon=bool(daemon))

    def current_thread(self) -> SimThread:
        return self.simulation.current

    def lock(self) -> SimLock:
        return SimLock(self.simulation)

    def rlock(self) -> SimRLock:
        return SimRLock(self.simulation)

    def condition(self, lock: Any) -> SimCondition:
        return SimCondition(self.simulation, self.rlock() if lock is None else lock)

    def event(self) -> SimEvent:
        return SimEvent(self.simulation)

    def semaphore(self, value: int) -> SimSemaphore:
        return SimSemaphore(self.simulation, value)

    def queue(self, maxsize: int) -> SimQueue:
        return SimQueue(self.simulation, maxsize)

    def executor(self, max_workers: int, thread_name_prefix: str) -> SimExecutor:
        return SimExecutor(self, max_workers, thread_name_prefix)

    def future(self) -> concurrent.futures.Future[Any]:
        return SimFuture(self.simulation)

    def wait(self, futures: Iterable[Any], timeout: float | None) -> Any:
        all_of = list(dict.fromkeys(futures))  # and no set, whose order is another one in every run
        until = None if timeout is None else self.monotonic() + timeout
        for one in all_of:
            left = None if until is None else max(0.0, until - self.monotonic())
            with one._condition:
                one._condition.wait_for(one.done, left)
        done = {one for one in all_of if one.done()}
        return concurrent.futures._base.DoneAndNotDoneFutures(done, set(all_of) - done)

    def token_hex(self, size: int) -> str:
        return self.simulation.random.randbytes(size).hex()


class Simulation:
    """One run of a simulated cluster.

    Args:
        seed: Decides every choice. The same seed and code give the same run if PYTHONHASHSEED is fixed too.
        preempt: Chance that a thread is preempted at a point where it would not have to wait.
        most_seconds: Virtual seconds after which the run counts as a livelock.
        most_switches: Changes of threads after which the run counts as a livelock.
    """

    def __init__(
        self,
        seed: int,
        *,
        preempt: float = 0.1,
        most_seconds: float = 24 * 3600.0,
        most_switches: int = 2_000_000,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.switches = 0
        self.machines: list[SimMachine] = []
        self.invariants: list[Callable[[], None]] = []
        """Called at each change of threads; each raises an AssertionError if it does not hold."""
        self._preempt = preempt
        self._most_seconds, self._most_switches = most_seconds, most_switches
        self._ready: list[SimThread] = []
        self._timers: list[tuple[float, int, SimThread, int]] = []
        self._numbers = 0
        self.current: SimThread = None  # type: ignore[assignment]
        """The thread that runs; None before the first one does. A plain attribute, since it is read most."""
        self._failure: BaseException | None = None
        self._over = threading.Event()
        """Set when the last thread has ended; the only object that the real world waits for."""
        self._live = 0
        self._idle: list[_Runner] = []
        self._trace: deque[tuple[float, str, str]] = deque(maxlen=_LINES)

    def machine(self, name: str, *, rate: float = 1.0, wall_offset: float = 0.0) -> SimMachine:
        """Add a machine. A restarted one is a new machine of the same name."""
        made = SimMachine(self, name, rate=rate, wall_offset=wall_offset)
        self.machines.append(made)
        return made

    def run(self, play: Callable[[], object]) -> None:
        """Run `play` on a machine of its own, then kill all others, and return when every thread has ended.

        Raises:
            SimulationError: A rule was broken, or a thread ended with an exception.
        """
        stage = self.machine("play")

        def whole() -> None:
            play()
            for machine in self.machines:
                if machine is not stage:
                    machine.kill()

        thread = SimThread(stage, "main", whole)
        self._register(thread)
        self._ready.remove(thread)
        self._resume(thread)
        seen = -1
        while not self._over.wait(_STUCK_AFTER):
            if self.switches == seen:  # a thread waits for something that is not of the simulation
                raise SimulationError(self._told("a thread is stuck outside the simulator", _stacks()))
            seen = self.switches
        for runner in self._idle:
            runner.wake.release()
        if self._failure is not None:
            error = self._failure
            shown = "".join(traceback.format_exception(error))
            kind = DeadlockError if isinstance(error, DeadlockError) else SimulationError
            raise kind(self._told(str(error) or type(error).__name__, shown)) from error

    def note(self, text: str) -> None:
        """Add an event to the trace."""
        current = self.current
        self._trace.append(
            (self.now, "" if current is None else f"{current.machine.name}/{current.name}", text)
        )

    def fail(self, error: BaseException) -> None:
        """Fail the run with the first error, and end all machines."""
        if self._failure is None:
            self._failure = error
            self.note(f"FAILED: {error!r:.200}")
        for machine in self.machines:
            if machine.alive:
                machine.alive = False
                for thread in machine.threads:
                    self.wake(thread)

    # What primitives are made of

    def dead(self) -> bool:
        """Whether the running thread belongs to a killed machine, so that nothing it does may have an
        effect."""
        return not self.current.machine.alive

    def check_alive(self) -> None:
        """Raise `MachineKilled` if the machine of the running thread was killed."""
        if not self.current.machine.alive:
            raise MachineKilled

    def block(self, why: str, seconds: float | None = None, waiters: list[SimThread] | None = None) -> bool:
        """Wait until another thread calls `wake`; False if `seconds` (of this machine's clock) passed before.

        `waiters` is the list of the object that is waited for: the thread is in it while it waits.
        """
        self.check_alive()
        thread = self.current
        thread.state, thread.why, thread.woken = "blocked", why, False
        thread.waits += 1
        if waiters is not None:
            waiters.append(thread)
        if seconds is not None:
            # At least a tick: code that sleeps for the rest of a timeout would else never reach its end, once
            # the rest is smaller than the precision of a float.
            due = self.now + max(seconds / thread.machine.rate, _TICK)
            self._numbers += 1
            heapq.heappush(self._timers, (due, self._numbers, thread, thread.waits))
        self._pass_baton(thread)
        if waiters is not None and thread in waiters:
            waiters.remove(thread)
        self.check_alive()
        return thread.woken

    def wake(self, thread: SimThread) -> None:
        """Make a blocked thread ready; others are left as they are."""
        if thread.state == "blocked":
            thread.state, thread.woken = "ready", True
            self._ready.append(thread)

    def wake_some(self, waiters: list[SimThread], count: int | None = None) -> None:
        """Wake waiting threads, in an order of the seed; all of them by default."""
        if not waiters:
            return
        for _ in range(len(waiters) if count is None else min(count, len(waiters))):
            self.wake(waiters.pop(self.random.randrange(len(waiters))))

    def maybe_switch(self) -> None:
        """Let another thread run first, by chance: any operation of a primitive may be preempted."""
        # The most frequent call of a run: `check_alive` is written out.
        if not self.current.machine.alive:
            raise MachineKilled
        if self._ready and self.random.random() < self._preempt:
            self._yield()
            self.check_alive()

    def _yield(self) -> None:
        thread = self.current
        thread.state, thread.why = "ready", "preempted"
        self._ready.append(thread)
        self._pass_baton(thread)

    # The baton

    def _register(self, thread: SimThread) -> None:
        thread.state = "ready"
        thread.machine.threads.append(thread)
        self._live += 1
        self._ready.append(thread)
        if self._idle:
            runner = self._idle.pop()
            runner.thread = thread
            runner.wake.release()
        else:
            _thread.start_new_thread(self._run_threads, (_Runner(thread),))

    def _start(self, thread: SimThread) -> None:
        self.check_alive()
        thread.machine.threads = [one for one in thread.machine.threads if one.state != "ended"]
        self._register(thread)
        self.maybe_switch()

    def _resume(self, thread: SimThread) -> None:
        thread.state = "running"
        self.current = thread
        self.switches += 1
        thread.baton.release()

    def _run_threads(self, runner: _Runner) -> None:
        """The body of a real thread: runs one simulated thread after the other. To start one takes longer."""
        while (thread := runner.thread) is not None:
            runner.thread = None
            thread.ident = _thread.get_ident()
            thread.baton.acquire()
            run_on(thread.machine)
            try:
                if thread.machine.alive:
                    self._call(thread.target)
            except MachineKilled:
                pass
            except BaseException as error:  # whatever the code under test raises is the result of the run
                self.fail(error)
            thread.state = "ended"
            thread.target = _nothing
            self.wake_some(thread.ended)
            self._live -= 1
            self._idle.append(runner)
            if self._live == 0:
                self._over.set()
            elif (chosen := self._choose()) is not None:
                self._resume(chosen)
            runner.wake.acquire()

    def _call(self, target: Callable[[], object]) -> None:
        target()

    def _pass_baton(self, thread: SimThread) -> None:
        chosen = self._choose()
        if chosen is thread:
            thread.state = "running"
            self.switches += 1
        elif chosen is not None:
            self._resume(chosen)
            thread.baton.acquire()

    def _choose(self) -> SimThread | None:
        """Return the thread that runs next, moving virtual time if all wait."""
        if self._failure is None:
            self._check_rules()
        while True:
            while self._ready:
                place = self._pick(self._ready) if len(self._ready) > 1 else 0
                self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
                thread = self._ready.pop()
                if thread.machine.paused_until > self.now and thread.machine.alive:
                    thread.state = "blocked"
                    thread.waits += 1
                    self._numbers += 1
                    heapq.heappush(
                        self._timers, (thread.machine.paused_until, self._numbers, thread, thread.waits)
                    )
                    continue
                return thread
            if not self._reach_deadline():
                self.fail(DeadlockError(self._waiting()))
                assert self._ready, "no thread is left to run"

    def _pick(self, ready: Sequence[SimThread]) -> int:
        """Return the place of the thread that runs next; there are at least two."""
        return self.random.randrange(len(ready))

    def _reach_deadline(self, within: float = float("inf")) -> bool:
        """Move virtual time to the earliest deadline, and make its thread ready; False if there is none in
        so many seconds."""
        while self._timers and self._timers[0][0] <= self.now + within:
            due, _, thread, number = heapq.heappop(self._timers)
            if thread.state == "blocked" and thread.waits == number:  # else its wait has ended
                self.now = max(self.now, due)
                thread.state = "ready"
                self._ready.append(thread)
                return True
        return False

    def _check_rules(self) -> None:
        error: BaseException | None = None
        if self.now > self._most_seconds or self.switches > self._most_switches:
            error = SimulationError(
                f"no end after {self.now:,.0f} virtual seconds and {self.switches:,} changes of threads"
            )
        else:
            try:
                for check in self.invariants:
                    check()
            except AssertionError as broken:
                error = broken
        if error is not None:
            self.fail(error)

    def _waiting(self) -> str:
        lines = [
            f"  {thread.machine.name}/{thread.name}: {thread.why}"
            for machine in self.machines
            for thread in machine.threads
            if thread.state == "blocked"
        ]
        return "\n".join(["every thread waits, and no timer is set:", *lines])

    def _told(self, reason: str, more: str) -> str:
        lines = [f"  {at:12.6f}  {where:30}  {text}" for at, where, text in self._trace]
        return "\n".join([f"seed {self.seed}: {reason}", "The last events:", *lines, more])


def _nothing() -> None: ...


def _stacks() -> str:
    return "\n".join("".join(traceback.format_stack(frame)) for frame in sys._current_frames().values())


# Primitives. Each behaves as its namesake of the standard library, except that a choice between threads that
# wait is the seed's, not the order of arrival. A thread of a killed machine changes nothing and waits for
# nothing.


class SimLock:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._owner: SimThread | None = None
        self._waiters: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        simulation = self._simulation
        simulation.maybe_switch()
        if self._owner is None:
            self._owner = simulation.current
            return True
        if not blocking:
            return False
        until = None if timeout < 0 else simulation.current.machine.monotonic() + timeout
        while self._owner is not None:
            left = None if until is None else until - simulation.current.machine.monotonic()
            if left is not None and left <= 0:
                return False
            simulation.block("lock", left, self._waiters)
        self._owner = simulation.current
        return True

    def release(self) -> None:
        simulation = self._simulation
        if not simulation.current.machine.alive:
            return
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        if self._waiters:
            simulation.wake_some(self._waiters, 1)

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimRLock(SimLock):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not self._simulation.current and not super().acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        if self._simulation.dead():
            return
        if self._owner is not self._simulation.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            super().release()


class SimCondition:
    def __init__(self, simulation: Simulation, lock: Any) -> None:
        self._simulation = simulation
        self._lock = lock
        self._waiters: list[SimThread] = []
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock = self._lock
        self._simulation.check_alive()
        if lock._owner is not self._simulation.current:
            raise RuntimeError("cannot wait on un-acquired lock")
        depth = getattr(lock, "_depth", 1)
        for _ in range(depth):
            lock.release()
        try:
            return self._simulation.block("condition", timeout, self._waiters)
        finally:
            if not self._simulation.dead():
                for _ in range(depth):
                    lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        clock = self._simulation.current.machine.monotonic
        until = None if timeout is None else clock() + timeout
        while not (found := predicate()):
            left = None if until is None else until - clock()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        if not self._simulation.dead():
            self._simulation.wake_some(self._waiters, n)

    def notify_all(self) -> None:
        if not self._simulation.dead():
            self._simulation.wake_some(self._waiters)


class SimEvent:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._set = False
        self._waiters: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        if not self._simulation.dead():
            self._set = True
            self._simulation.wake_some(self._waiters)
            self._simulation.maybe_switch()

    def clear(self) -> None:
        if not self._simulation.dead():
            self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._simulation.maybe_switch()
        if not self._set:
            self._simulation.block("event", timeout, self._waiters)
        return self._set


class SimSemaphore:
    def __init__(self, simulation: Simulation, value: int) -> None:
        self._condition = SimCondition(simulation, SimLock(simulation))
        self._value = self._most = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._condition:
            if blocking:
                self._condition.wait_for(lambda: self._value > 0, timeout)
            if self._value <= 0:
                return False
            self._value -= 1
            return True

    def release(self) -> None:
        with self._condition:
            if self._value >= self._most:
                raise ValueError("Semaphore released too many times")
            self._value += 1
            self._condition.notify()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        if not self._condition._simulation.dead():
            self.release()


class SimQueue:
    """As queue.Queue, and as queue.SimpleQueue if `maxsize` is 0."""

    def __init__(self, simulation: Simulation, maxsize: int) -> None:
        self.maxsize = maxsize
        self._items: deque[Any] = deque()
        self._condition = SimCondition(simulation, SimLock(simulation))

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._condition:
            if self.maxsize > 0:
                if block:
                    self._condition.wait_for(lambda: len(self._items) < self.maxsize, timeout)
                if len(self._items) >= self.maxsize:
                    raise Full
            self._items.append(item)
            self._condition.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            if block:
                self._condition.wait_for(lambda: self._items, timeout)
            if not self._items:
                raise Empty
            self._condition.notify_all()
            return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def full(self) -> bool:
        return 0 < self.maxsize <= len(self._items)


class SimFuture(concurrent.futures.Future[Any]):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._condition = SimCondition(simulation, SimRLock(simulation))  # type: ignore[assignment]


class SimExecutor(concurrent.futures.Executor):
    def __init__(self, machine: SimMachine, max_workers: int, prefix: str) -> None:
        self._machine = machine
        self._most, self._prefix = max_workers, prefix or "pool"
        self._tasks = SimQueue(machine.simulation, 0)
        self._threads: list[SimThread] = []
        self._idle = 0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        found = SimFuture(self._machine.simulation)
        self._tasks.put((found, fn, args, kwargs))
        if self._idle < self._tasks.qsize() and len(self._threads) < self._most:
            thread = SimThread(self._machine, f"{self._prefix}_{len(self._threads)}", self._work)
            self._threads.append(thread)
            thread.start()
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            while not self._tasks.empty():
                task = self._tasks.get_nowait()
                if task is not None:
                    task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while True:
            self._idle += 1
            task = self._tasks.get()
            self._idle -= 1
            if task is None:
                return
            found, function, args, kwargs = task
            if not found.set_running_or_notify_cancel():
                continue
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                found.set_exception(error)
            else:
                found.set_result(result)


class TraceHandler(logging.Handler):
    """Adds the log lines of simulated threads to the trace."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self.lock = (
            None  # one thread runs at a time; a real lock would be taken by a thread that is then killed
        )

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname}: {record.getMessage()}"
        if record.exc_info and record.exc_info[0] is not None:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self._simulation.note(text)
