"""Queues between a thread that prepares batches and one that trains on them.

Reading, parsing and looking up the next batch takes as long as training on this one, and
needs little of the same hardware. So a thread works ahead, a bounded number of batches
deep, and puts them on the device before they are asked for.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from monolith.errors import ConfigError, QueueClosedError, TensorArgumentError
from monolith.tensors.handover import Courier, Handover, moved

Item = TypeVar("Item")

_log = logging.getLogger(__name__)


class PrefetchQueue(Generic[Item]):
    """First in, first out, and never more than `capacity` items. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"a queue's capacity must be at least 1, got {capacity!r}")
        self._capacity = capacity
        self._changed = threading.Condition()  # guards all below
        self._items: deque[Item] = deque()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: Item) -> None:
        """Add an item, once the queue is not full.

        Raises:
            QueueClosedError: The queue was closed, perhaps while this call waited; the
                item is not in it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                raise QueueClosedError("cannot put: the queue was closed")
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item:
        """Take the oldest item, once there is one.

        Raises:
            QueueClosedError: The queue was closed, and all its items have been taken.
            BaseException: Likewise, but it was closed with this error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items))
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            raise self._error or QueueClosedError("cannot get: the queue was closed and is empty")

    def close(self, *, error: BaseException | None = None, discard: bool = False) -> None:
        """Accept no more items, and wake waiting threads. Closing again changes nothing, but may discard.

        Args:
            error: What `get` raises in place of QueueClosedError, after the last item.
            discard: Whether to drop the items in it; otherwise they can still be taken.
        """
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
            if discard:
                self._items.clear()
            self._changed.notify_all()

    def size(self) -> int:
        """Return how many items could be taken right now."""
        with self._changed:
            return len(self._items)

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed

    @property
    def error(self) -> BaseException | None:
        """What the queue was closed with."""
        with self._changed:
            return self._error


class Prefetched(ABC, Iterator[Any]):
    """Elements prepared ahead. Close it, or leave its `with`, when done before the end."""

    @abstractmethod
    def size(self) -> int:
        """Return how many elements are ready."""

    @abstractmethod
    def close(self) -> None:
        """Prepare no more; the elements that were ready are dropped. May be called twice, by any thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefetch(
    source: Iterable[Any] | Callable[[], Any],
    capacity: int,
    device: torch.device | str | None = None,
    *,
    patience: timedelta = timedelta(seconds=30),
) -> Prefetched:
    """Iterate over `source` in a background thread, up to `capacity` elements ahead.

    Elements come in order and are any nesting of containers, tensors, ragged tensors and
    whatever else. An error of the source is raised here, after the elements before it.
    The thread ends with the data, with `close`, and when the result is no longer referenced.
    It records gradients if the caller of this function does.

    Args:
        source: What to iterate over, or a function that returns one element per call
            and raises StopIteration at the end. It runs in the thread, which owns it
            from here on; a generator is closed there.
        capacity: Elements ready at most; one more may be in the making. 0 means no
            thread: elements are made when asked for.
        device: Where to take all tensors. To a CUDA device they are copied from
            page-locked memory on a stream of their own, and the consumer's current
            stream waits for the copy; the host never does. By default tensors stay
            where they are, and are safe to use on any stream.
        patience: How long `close` waits for a source that does not return. Then it
            logs a warning and leaves the thread, which ends when the source does.
    """
    if not isinstance(capacity, int) or capacity < 0:
        raise ConfigError(f"a prefetch capacity must be 0 or more, got {capacity!r}")
    if not isinstance(source, Iterable) and not callable(source):
        raise TensorArgumentError(f"a prefetch source must be iterable or callable, got {source!r}")
    target = None if device is None else _with_index(torch.device(device))
    if capacity == 0:
        return _PassedThrough(source, target)
    return _InBackground(source, capacity, target, patience)


class _PassedThrough(Prefetched):
    """Elements made when asked for."""

    def __init__(self, source: Iterable[Any] | Callable[[], Any], device: torch.device | None) -> None:
        self._elements = _elements_of(source)
        self._device = device
        self._closed = False

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        element = next(self._elements)
        return element if self._device is None else moved(element, self._device)

    def size(self) -> int:
        return 0

    def close(self) -> None:
        self._closed = True
        if inspect.getgeneratorstate(self._elements) != inspect.GEN_RUNNING:  # else it finds out by itself
            self._elements.close()


class _InBackground(Prefetched):
    """Elements made by a thread.

    The thread knows the queue, never this object: so this object can die while the
    thread waits, and take the thread with it.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Any],
        capacity: int,
        device: torch.device | None,
        patience: timedelta,
    ) -> None:
        self._queue: PrefetchQueue[Handover] = PrefetchQueue(capacity)
        self._patience = patience
        self._ended = False
        # A daemon, or a source that never returns would keep the process from ending.
        self._thread = threading.Thread(
            target=_produce,
            args=(source, self._queue, device, torch.is_grad_enabled()),
            name="prefetch",
            daemon=True,
        )
        weakref.finalize(self, self._queue.close, discard=True)
        self._thread.start()

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return self._queue.get().take()
        except QueueClosedError as closed:
            self._ended = True
            if closed is self._queue.error:
                raise
            raise StopIteration from None
        except BaseException:
            # An error of the source ends the data; an interrupt while waiting does not.
            self._ended = self._queue.closed and self._queue.size() == 0
            raise

    def size(self) -> int:
        return self._queue.size()

    def close(self) -> None:
        self._ended = True
        self._queue.close(discard=True)
        if self._thread is threading.current_thread():
            return  # a source that closes its own prefetch: the thread ends by itself
        self._thread.join(self._patience.total_seconds())
        if self._thread.is_alive():
            _log.warning(
                "prefetch: the source did not return within %s of closing; its thread is left behind",
                self._patience,
            )


def _produce(
    source: Iterable[Any] | Callable[[], Any],
    queue: PrefetchQueue[Handover],
    device: torch.device | None,
    with_gradients: bool,
) -> None:
    torch.set_grad_enabled(with_gradients)  # of this thread alone
    courier = Courier(device)
    elements = _elements_of(source)
    try:
        for element in elements:
            ready = courier.hand_over(element)
            try:
                queue.put(ready)
            except QueueClosedError:
                return
            del element, ready  # the consumer owns them now: drop the references of this thread
    except BaseException as error:
        queue.close(error=error)
    finally:
        queue.close()
        elements.close()


def _elements_of(source: Iterable[Any] | Callable[[], Any]) -> Generator[Any, None, None]:
    if isinstance(source, Iterable):
        elements = iter(source)
        try:
            yield from elements
        finally:
            if isinstance(elements, Generator):
                elements.close()
        return
    while True:
        try:
            element = source()
        except StopIteration:
            return
        yield element


def _with_index(device: torch.device) -> torch.device:
    """Settle which CUDA device is meant here: the current one of another thread may be another."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
