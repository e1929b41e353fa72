"""Threads, locks, queues and clocks: those of the standard library, or those of a simulation.

The packages that coordinate processes (`runtime`, `store`, `sync`, `checkpoint`, parts of `data` and `serve`)
take these names from here instead of from `threading`, `queue`, `concurrent.futures` and `time`:

    from monolith.concurrency import Condition, Thread, monotonic

In a normal process every name makes the object of the standard library and is as fast. A thread that
`monolith.testing` started belongs to a simulated `Machine` instead: its locks and clocks are those of the
machine, and so are those of every thread it starts. So a whole cluster runs in one process, on virtual time,
in an order that one seed decides. `docs/decisions` says why the choice depends on the calling thread and is
not an argument of some hundred constructors.
"""

from __future__ import annotations

import concurrent.futures
import queue
import secrets
import threading
import time as _time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

__all__ = [
    "BoundedSemaphore",
    "Clocks",
    "Condition",
    "Empty",
    "Event",
    "Full",
    "Future",
    "Lock",
    "Machine",
    "Queue",
    "RLock",
    "SimpleQueue",
    "Thread",
    "ThreadPoolExecutor",
    "current_thread",
    "machine",
    "monotonic",
    "run_on",
    "sleep",
    "time",
    "token_hex",
    "wait",
]

Empty = queue.Empty
Full = queue.Full


class Machine(Protocol):
    """Where a simulated thread runs: makes its locks and threads, and has its clocks."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    def thread(
        self,
        target: Callable[..., object],
        *,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> Any: ...
    def current_thread(self) -> Any: ...
    def lock(self) -> Any: ...
    def rlock(self) -> Any: ...
    def condition(self, lock: Any) -> Any: ...
    def event(self) -> Any: ...
    def semaphore(self, value: int) -> Any: ...
    def queue(self, maxsize: int) -> Any: ...
    def executor(self, max_workers: int, thread_name_prefix: str) -> Any: ...
    def future(self) -> Any: ...
    def wait(self, futures: Iterable[Any], timeout: float | None) -> Any: ...
    def token_hex(self, size: int) -> str: ...

    @property
    def transport(self) -> Any:
        """A `monolith.wire.flight_transport.Transport`."""

    @property
    def ranks(self) -> Any:
        """A `monolith.store.rank_network.RankNetwork`."""

    @property
    def disk(self) -> Any:
        """A `monolith.filesystem.backends.Backend`, for paths that begin with sim://."""

    @property
    def kafka(self) -> Any:
        """What code finds in place of the package confluent_kafka."""

    @property
    def grpc(self) -> Any:
        """What code finds in place of the package grpc."""


class _ThisThread(threading.local):
    machine: Machine | None = None


_this_thread = _ThisThread()


def run_on(machine: Machine | None) -> None:
    """Let the calling thread belong to a simulated machine from now on; None is the real one."""
    _this_thread.machine = machine


def machine() -> Machine | None:
    """Return the simulated machine of the calling thread, or None."""
    return _this_thread.machine


def monotonic() -> float:
    """Return the seconds of a clock that never jumps, as `time.monotonic` does."""
    return _time.monotonic() if (here := _this_thread.machine) is None else here.monotonic()


def time() -> float:
    """Return the seconds since 1970 by this machine's clock, as `time.time` does."""
    return _time.time() if (here := _this_thread.machine) is None else here.time()


def sleep(seconds: float) -> None:
    """Wait, as `time.sleep` does."""
    if (here := _this_thread.machine) is None:
        _time.sleep(seconds)
    else:
        here.sleep(seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks:
    """The clocks of one object, for a test to replace."""

    wall: Callable[[], float] = time
    """Unix seconds, for stamps: an operator or NTP may set it, forward or back."""
    timer: Callable[[], float] = monotonic
    """Seconds that only grow, for intervals."""
    sleep: Callable[[float], None] = sleep


def token_hex(size: int) -> str:
    """Return `size` random bytes as hexadecimal text, as `secrets.token_hex` does."""
    return secrets.token_hex(size) if (here := _this_thread.machine) is None else here.token_hex(size)


def current_thread() -> threading.Thread:
    """Return the thread that calls, as `threading.current_thread` does."""
    if (here := _this_thread.machine) is None:
        return threading.current_thread()
    return here.current_thread()  # type: ignore[no-any-return]


if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor, wait
    from queue import Queue, SimpleQueue
    from threading import BoundedSemaphore, Condition, Event, Lock, RLock, Thread
else:
    # Each class only makes an object of another class: that of the standard library, or of the machine.

    class Thread:
        def __new__(cls, group=None, target=None, **options):
            here = _this_thread.machine
            if here is None:
                return threading.Thread(group, target, **options)
            return here.thread(target, **options)

    class Lock:
        def __new__(cls):
            return threading.Lock() if (here := _this_thread.machine) is None else here.lock()

    class RLock:
        def __new__(cls):
            return threading.RLock() if (here := _this_thread.machine) is None else here.rlock()

    class Condition:
        def __new__(cls, lock=None):
            here = _this_thread.machine
            return threading.Condition(lock) if here is None else here.condition(lock)

    class Event:
        def __new__(cls):
            return threading.Event() if (here := _this_thread.machine) is None else here.event()

    class BoundedSemaphore:
        def __new__(cls, value=1):
            here = _this_thread.machine
            return threading.BoundedSemaphore(value) if here is None else here.semaphore(value)

    class Queue:
        def __new__(cls, maxsize=0):
            return queue.Queue(maxsize) if (here := _this_thread.machine) is None else here.queue(maxsize)

        def __class_getitem__(cls, _):
            return cls

    class SimpleQueue:
        def __new__(cls):
            return queue.SimpleQueue() if (here := _this_thread.machine) is None else here.queue(0)

        def __class_getitem__(cls, _):
            return cls

    class ThreadPoolExecutor:
        def __new__(cls, max_workers, thread_name_prefix=""):
            if (here := _this_thread.machine) is None:
                return concurrent.futures.ThreadPoolExecutor(max_workers, thread_name_prefix)
            return here.executor(max_workers, thread_name_prefix)

    class Future:
        def __new__(cls):
            return concurrent.futures.Future() if (here := _this_thread.machine) is None else here.future()

        def __class_getitem__(cls, _):
            return cls

    def wait(futures, timeout=None):
        if (here := _this_thread.machine) is None:
            return concurrent.futures.wait(futures, timeout)
        return here.wait(futures, timeout)
