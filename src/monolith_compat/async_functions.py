"""Work pushed behind the step: what step t asks for is done during step t + 1.

Pushing gradients to their tables need not delay the next step, if that step may read
rows one update old. So a call only keeps its arguments, and a thread runs it while the
next step computes. One step late, and never later: a call waits for the one before it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from monolith.errors import QueueClosedError, WrongThreadError

_log = logging.getLogger(__name__)


class AsyncFunctions:
    """Functions whose calls run one step late, in order, each exactly once.

    A training loop calls `start_step` when a step begins, so that the calls of the step
    before run at the same time, and `close`, or leaves the `with`, at the end:

        with AsyncFunctions() as functions:
            push = functions.add(push_gradients)
            for batch in batches:
                functions.start_step()
                push(*train(batch))

    Args:
        is_async: What holds for functions that do not say.
    """

    def __init__(self, is_async: bool = True) -> None:
        self._is_async = is_async
        self._functions: list[_AsyncFunction] = []
        self._closed = False

    def add(
        self, target: Callable[..., Any], is_async: bool | None = None, name: str = "async_queue"
    ) -> Callable[..., Any]:
        """Return a function to call in place of `target`.

        If asynchronous it returns None at once, keeping the arguments for the next step.
        Without `start_step` they are run by the next call, which waits. The arguments are
        not copied: pass tensors that are not written to later. An error of `target` is
        raised by the next call, which is then not kept itself, or by `close`.

        If synchronous, it is `target`.
        """
        if self._closed:
            raise QueueClosedError(f"cannot add {name!r}: the async functions were closed")
        if not (self._is_async if is_async is None else is_async):
            return target
        function = _AsyncFunction(target, name)
        self._functions.append(function)
        return function

    def start_step(self) -> None:
        """Let the calls kept from the step before run, each function's in its thread."""
        for function in self._functions:
            function.start()

    def close(self) -> None:
        """Run what is kept, in the order functions were added, and wait. Then calls are refused.

        Raises what the targets raised; several errors in an ExceptionGroup, and only
        after every function had its turn.
        """
        self._closed = True
        errors = []
        for function in self._functions:
            try:
                function.close()
            except Exception as error:
                errors.append(error)
        if len(errors) > 1:
            raise ExceptionGroup(f"{len(errors)} async functions failed", errors)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The updates were computed, so they count, whatever ended the loop.
        try:
            self.close()
        except Exception as late:
            _log.error("async functions failed while ending after another error", exc_info=late)
            error.add_note(f"In addition, an async function failed at the end: {late!r}")


class _Kept:
    """The call waiting for the next step: a queue of one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.call: Callable[[], Any] | None = None

    def report_lost(self) -> None:
        if self.call is not None:
            _log.error("async function %r was never closed: its last call is lost", self.name)


class _AsyncFunction:
    """A target, the call kept for it, and the thread that runs it."""

    def __init__(self, target: Callable[..., Any], name: str) -> None:
        self._target = target
        self._kept = _Kept(name)
        self._running: Future[Any] | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards all above
        self._inside = threading.local()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        weakref.finalize(self, self._kept.report_lost)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_itself()
        with self._lock:
            if self._closed:
                raise QueueClosedError(f"cannot call {self._kept.name!r}: the async functions were closed")
            self._start()
            self._wait()
            # Knows nothing of self, which could otherwise not be collected while a call is kept.
            work = partial(self._target, *args, **kwargs)
            self._kept.call = partial(_run, work, self._inside, _current_stream(), torch.is_grad_enabled())

    def start(self) -> None:
        self._refuse_itself()
        with self._lock:
            self._start()

    def close(self) -> None:
        self._refuse_itself()
        with self._lock:
            self._closed = True
            self._start()
            try:
                self._wait()
            finally:
                self._worker.shutdown()

    def _start(self) -> None:
        if self._kept.call is not None:
            self._running = self._worker.submit(self._kept.call)
            self._kept.call = None

    def _wait(self) -> None:
        if self._running is not None:
            wait([self._running])
            running, self._running = self._running, None
            running.result()

    def _refuse_itself(self) -> None:
        if getattr(self._inside, "running", False):
            raise WrongThreadError(
                f"async function {self._kept.name!r} would wait for itself: "
                "its target may use only its arguments"
            )


def _run(work: Callable[[], Any], inside: threading.local, stream: Any, with_gradients: bool) -> None:
    inside.running = True
    # On the caller's stream the arguments are ready when they are read, and so is what is written.
    on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
    with torch.set_grad_enabled(with_gradients), on_stream:
        work()


def _current_stream() -> Any:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream() if used else None
