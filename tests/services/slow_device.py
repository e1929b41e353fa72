"""A device whose events come when a test says so, over plain CPU memory: what code does in between shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from services.emulated_cuda import HOST_MEMORY, EmulatedDevice
from torch import Tensor

from monolith.cuda import Kernels
from monolith.cuda.kernels import Headers


class SlowEvent:
    """An event that comes when it is told to, or when the host waits for it."""

    def __init__(self) -> None:
        self.has_come = False
        self.waits = 0
        """How often the host has waited for it, before it came."""

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.waits += not self.has_come
        self.has_come = True

    def milliseconds_since(self, earlier: Self) -> float:  # noqa: ARG002
        return 1.0


class SlowStream:
    """Notes what it was told to wait for, and the events it gave."""

    def __init__(self, *, slow: bool) -> None:
        self._slow = slow
        self.events: list[SlowEvent] = []
        self.waited_for: list[object] = []
        self.kept: list[Tensor] = []

    @property
    def handle(self) -> int:
        return id(self)

    def wait_for(self, other: SlowStream) -> None:
        self.waited_for.append(other)

    def wait_for_event(self, event: SlowEvent) -> None:
        self.waited_for.append(event)

    def record(self, *, timed: bool = False) -> SlowEvent:  # noqa: ARG002
        self.events.append(SlowEvent())
        self.events[-1].has_come = not self._slow
        return self.events[-1]

    def keep(self, tensor: Tensor) -> None:
        self.kept.append(tensor)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class SlowDevice:
    """A `Device` whose kernels are emulated, and done when they are launched.

    Args:
        slow: Whether events wait to be told; otherwise they have come when they are recorded.
    """

    def __init__(self, *, slow: bool = True) -> None:
        self._slow = slow
        self.first = SlowStream(slow=slow)
        """The stream that computes."""
        self._current = threading.local()
        self.pinned_sizes: list[int] = []

    @property
    def torch_device(self) -> torch.device:
        return HOST_MEMORY

    @property
    def processors(self) -> int:
        return 1

    def holds(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return True

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def current_stream(self) -> SlowStream:
        stream: SlowStream = getattr(self._current, "stream", self.first)
        return stream

    def new_stream(self) -> SlowStream:
        return SlowStream(slow=self._slow)

    @contextmanager
    def on(self, stream: SlowStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.pinned_sizes.append(shape[0])
        return torch.empty(shape, dtype=dtype)

    def kernels(self, source: str, name: str, headers: Headers = ()) -> Kernels:
        return EmulatedDevice(torch_device=self.torch_device).kernels(source, name, headers)

    def compile_ahead(self, source: str, name: str, headers: Headers = ()) -> None:
        pass
