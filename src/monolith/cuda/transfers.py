"""Transfers: tensors between host and device, through reused pinned memory, while kernels run.

Pinned memory takes long to make, and a copy from it or to it overlaps with everything else, as long as no
thread touches the memory before the copy is over. So a pool lends buffers and gets them back with the event
of their copy, and copies run on a stream for each direction:

    host            fill a buffer ──send──┐                   ┌──► wait, read the buffer, let it go
    copies                                └─► up      down ───┘
    computing                                 └──► ... ──┘

A stream waits for another by events. The host waits only in `Landing.wait`, and where more copies are under
way than the pool has buffers for.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monolith.cuda.device import Device, DeviceEvent

_ALIGNED = 256
"""Bytes to whose multiples the parts of a transfer are laid."""
_SPARE = 1.25
"""How much larger a buffer is made than was asked for, since batches differ a little."""
_UNDER_WAY = 4
"""Copies under way before the host waits for the oldest."""


class PinnedPool:
    """Pinned memory, lent and used again. Thread-safe.

    Args:
        under_way: Buffers whose copies may be under way before `lend` waits for one of them.
    """

    def __init__(self, device: Device, under_way: int = _UNDER_WAY) -> None:
        self._device = device
        self._under_way = under_way
        self.made = 0
        """How often memory was taken that was not here before."""
        self._lock = threading.Lock()
        self._kept: list[tuple[Tensor, DeviceEvent | None]] = []  # guarded by the lock; the oldest first

    def lend(self, size: int) -> Tensor:
        """Return so many bytes of pinned memory, or more, that no copy touches any more."""
        with self._lock:
            waiting = [event for _, event in self._kept if event is not None and not event.query()]
            if len(waiting) >= self._under_way:
                waiting[0].synchronize()
            found: int | None = None
            for place, (memory, event) in enumerate(self._kept):
                if event is not None and not event.query():
                    continue
                if len(memory) >= size and (found is None or len(memory) < len(self._kept[found][0])):
                    found = place
            if found is not None:
                return self._kept.pop(found)[0]
            self._drop_one_too_small(size)
            self.made += 1
        return self._device.pinned((_rounded(size * _SPARE),), torch.uint8)

    def give_back(self, memory: Tensor, after: DeviceEvent | None = None) -> None:
        """Take memory back, to be lent again once an event has come."""
        with self._lock:
            self._kept.append((memory, after))

    def _drop_one_too_small(self, size: int) -> None:
        """Let a larger buffer come in place of one, so that they do not add up as batches grow."""
        for place, (memory, event) in enumerate(self._kept):
            if len(memory) < size and (event is None or event.query()):
                del self._kept[place]
                return


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Tensors on their way to a device."""

    device: Device
    tensors: tuple[Tensor, ...]
    ready: DeviceEvent

    def take(self) -> tuple[Tensor, ...]:
        """Return the tensors, for use on the current stream, which waits for them; the host does not."""
        stream = self.device.current_stream()
        stream.wait_for_event(self.ready)
        if self.tensors:
            stream.keep(self.tensors[0])  # they lie in one piece of memory
        return self.tensors


class Staged:
    """Pinned memory to be filled and sent as one copy. Used by one thread."""

    def __init__(self, transfers: Transfers, parts: Sequence[tuple[int, torch.dtype]]) -> None:
        self._transfers = transfers
        self._parts = parts
        size = sum(_rounded(count * dtype.itemsize) for count, dtype in parts)
        self._memory: Tensor | None = transfers.pool.lend(size)
        self._size = size
        self.parts = _cut(self._memory[:size], parts)
        """To be written to before `send`, not after."""

    def send(self) -> Sent:
        """Begin the copy. What is here may no longer be written to."""
        assert self._memory is not None, "it is sent once"
        transfers, memory, self._memory, self.parts = self._transfers, self._memory, None, ()
        device = transfers.device
        with device.active(), device.on(transfers.up):
            there = torch.empty(self._size, dtype=torch.uint8, device=device.torch_device)
            there.copy_(memory[: self._size], non_blocking=True)
            ready = transfers.up.record()
        transfers.pool.give_back(memory, ready)
        return Sent(device, _cut(there, self._parts), ready)


class Landing:
    """A tensor of a device on its way to the host."""

    def __init__(self, transfers: Transfers, tensor: Tensor) -> None:
        device = transfers.device
        self._pool = transfers.pool
        part = [(tensor.numel(), tensor.dtype)]
        memory = transfers.pool.lend(_rounded(tensor.numel() * tensor.dtype.itemsize))
        with device.active():
            transfers.down.wait_for(device.current_stream())
            with device.on(transfers.down):
                (values,) = _cut(memory, part)
                values.copy_(tensor.detach().reshape(-1), non_blocking=True)
                transfers.down.keep(tensor)
                self._over = transfers.down.record()
        self._memory, self._values = memory, values.view(tensor.shape)

    def wait(self) -> Tensor:
        """Return the tensor in pinned memory, when it is all there. It is valid until `release`."""
        self._over.synchronize()
        return self._values

    def release(self) -> None:
        """Release the memory for reuse: the tensor of `wait` must not be read any more. At most once.

        Without it the memory lives as long as that tensor, and is not used again.
        """
        self._pool.give_back(self._memory, self._over)
        del self._memory, self._values


class Transfers:
    """Copies to a device and back, on streams of their own. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool = PinnedPool(device)
        with device.active():
            self.up, self.down = device.new_stream(), device.new_stream()

    def stage(self, *parts: tuple[int, torch.dtype]) -> Staged:
        """Return memory for tensors of one dimension that go up together: elements and type of each."""
        return Staged(self, parts)

    def land(self, tensor: Tensor) -> Landing:
        """Begin to copy a contiguous tensor to the host, after what the current stream has to do now."""
        return Landing(self, tensor)


def _cut(memory: Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> tuple[Tensor, ...]:
    """Return tensors over one piece of memory, one after another."""
    found, at = [], 0
    for count, dtype in parts:
        size = count * dtype.itemsize
        found.append(memory[at : at + size].view(dtype))
        at += _rounded(size)
    return tuple(found)


def _rounded(size: float) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED
