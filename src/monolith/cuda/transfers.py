"""Transfers: tensors between host and device, through reused pinned memory, while kernels run.

Pinned memory takes long to allocate, and copies from it and to it overlap with everything else, as long as no
thread touches the memory before the copy is done. So a pool lends buffers and takes them back with the event
of their copy, and each direction has a stream of its own:

    host            fill a buffer ──send──┐                   ┌──► wait, read the buffer, release it
    copies                                └─► up      down ───┘
    computing                                 └──► ... ──┘

Streams wait for each other by events. The host waits only in `Landing.wait`, and if more copies are in flight
than the pool has buffers for. Batches that come one after the other go through `Carriers`, which have memory
on the device, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda.device import Device, DeviceEvent

Parts = Sequence[tuple[int, torch.dtype]]
"""Length and type of tensors that follow one another in one piece of memory."""

_ALIGNED = 256
"""Bytes: the parts of a transfer begin at multiples of this."""
_SPARE = 1.25
"""A buffer is this much larger than requested, since batches differ a little in size."""
_UNDER_WAY = 4
"""Copies in flight before the host waits for the oldest."""


class PinnedPool:
    """Pinned memory, lent and used again. Thread-safe.

    Args:
        under_way: Copies that may be in flight before `lend` waits for the oldest of them.
    """

    def __init__(self, device: Device, under_way: int = _UNDER_WAY) -> None:
        self._device = device
        self._under_way = under_way
        self.made = 0
        """How many buffers were allocated."""
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []  # guarded by the lock; the oldest first

    def lend(self, size: int) -> Tensor:
        """Return at least `size` bytes of pinned memory that no copy uses any more."""
        with self._lock:
            waiting = [one for one in self._kept if not one.is_free()]
            if len(waiting) >= self._under_way:
                waiting[0].wait()
            fitting = [one for one in self._kept if one.after is None and one.size >= size]
            if fitting:
                found = min(fitting, key=lambda one: one.size)
                self._kept.remove(found)
                return found.memory
            # Buffers must not add up as batches grow.
            small = next((one for one in self._kept if one.after is None), None)
            if small is not None:
                self._kept.remove(small)
            self.made += 1
        return self._device.pinned((_rounded(size * _SPARE),), torch.uint8)

    def give_back(self, memory: Tensor, after: DeviceEvent | None = None) -> None:
        """Take memory back; it is lent again once the event `after` is reached."""
        with self._lock:
            self._kept.append(_Kept(memory, memory.numel(), after))


@dataclass(slots=True, eq=False)
class _Kept:
    """Memory that a pool may lend."""

    memory: Tensor
    size: int
    after: DeviceEvent | None
    """Until this event is reached, a copy uses the memory; None once that is known. A step lends twice, and
    asking for an event takes a few microseconds: so each is asked for until it is reached, and no longer."""

    def is_free(self) -> bool:
        if self.after is not None and self.after.query():
            self.after = None
        return self.after is None

    def wait(self) -> None:
        if self.after is not None:
            self.after.synchronize()
            self.after = None


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Tensors that are being copied to a device."""

    device: Device
    tensors: tuple[Tensor, ...]
    ready: DeviceEvent

    def take(self) -> tuple[Tensor, ...]:
        """Return the tensors, for use on the current stream, which waits for them; the host does not."""
        stream = self.device.current_stream()
        stream.wait_for_event(self.ready)
        if self.tensors:
            stream.keep(self.tensors[0])  # all are views of one allocation
        return self.tensors


class Staged:
    """Pinned memory to fill and to send as one copy. Used by one thread."""

    def __init__(self, transfers: Transfers, parts: Parts) -> None:
        self._transfers = transfers
        self._parts = parts
        size = bytes_of(parts)
        self._memory: Tensor | None = transfers.pool.lend(size)
        self._size = size
        self.parts = cut(self._memory[:size], parts)
        """One tensor per part: write to them before `send`, not after."""

    def send(self) -> Sent:
        """Start the copy. The parts must not be written to afterwards."""
        assert self._memory is not None, "it is sent once"
        transfers, memory, self._memory, self.parts = self._transfers, self._memory, None, ()
        device = transfers.device
        with device.active(), device.on(transfers.up):
            # Allocated on the stream of the copy, so the copy need not wait for the stream that computes. The
            # stream that uses the tensors waits for `ready` (`Sent.take`).
            there = torch.empty(self._size, dtype=torch.uint8, device=device.torch_device)
            there.copy_(memory[: self._size], non_blocking=True)
            ready = transfers.up.record()
        transfers.pool.give_back(memory, ready)
        return Sent(device, cut(there, self._parts), ready)


class Landing:
    """A tensor that is being copied from a device to the host."""

    def __init__(self, transfers: Transfers, tensor: Tensor) -> None:
        device = transfers.device
        self._pool = transfers.pool
        part = [(tensor.numel(), tensor.dtype)]
        memory = transfers.pool.lend(_rounded(tensor.numel() * tensor.dtype.itemsize))
        with device.active():
            transfers.down.wait_for(device.current_stream())
            with device.on(transfers.down):
                (values,) = cut(memory, part)
                values.copy_(tensor.detach().reshape(-1), non_blocking=True)
                transfers.down.keep(tensor)
                self._over = transfers.down.record()
        self._memory, self._values = memory, values.view(tensor.shape)

    @property
    def arrived(self) -> bool:
        """Whether the copy is done, so that `wait` returns at once."""
        return self._over.query()

    def wait(self) -> Tensor:
        """Wait for the copy and return the tensor, in pinned memory. It is valid until `release`."""
        self._over.synchronize()
        return self._values

    def release(self) -> None:
        """Release the memory for reuse: the tensor of `wait` must not be read any more. Call it at most once.

        Without it the memory lives as long as that tensor, and is not reused.
        """
        self._pool.give_back(self._memory, self._over)
        del self._memory, self._values


@dataclass(slots=True, eq=False)
class Carrier:
    """Pinned memory, and as much memory of a device, that one batch after the other travels through."""

    host: Tensor
    bytes: NDArray[np.uint8]
    """The same, as numpy has it: to slice a tensor takes several times as long."""
    there: Tensor
    sent: DeviceEvent | None = None
    """Reached when the copy is done."""
    used: DeviceEvent | None = None
    """Reached when the device has read it, so that the next copy may arrive."""


class Carriers:
    """Memory to send batches by one copy each, used again batch after batch. Thread-safe.

        carrier = carriers.lend(size)            # host: fill carrier.bytes
        carriers.send(carrier, size)             # the stream that reads carrier.there waits for carrier.sent
        carrier.used = stream.record()           # by then that stream has read it
        carriers.give_back(carrier)

    A carrier that is not given back is freed with its last tensor: then a stream that reads it must keep it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: list[Carrier] = []  # guarded by the lock; the one that is free for longest first
        with device.active():
            self._up = device.new_stream()

    def lend(self, size: int) -> Carrier:
        """Return memory of at least `size` bytes that no copy uses any more."""
        with self._lock:
            found = next((one for one in self._free if one.bytes.size >= size), None)
            small = self._free[0] if found is None and self._free else None
            if (taken := found or small) is not None:
                self._free.remove(taken)
        if found is None:
            if small is not None and small.used is not None:
                small.used.synchronize()  # it is freed here, and batches grow
            room, device = _rounded(size * _SPARE), self._device
            host = device.pinned((room,), torch.uint8)
            with device.active(), device.on(self._up):
                there = torch.empty(room, dtype=torch.uint8, device=device.torch_device)
            found = Carrier(host, host.numpy(), there)
        if found.sent is not None:
            found.sent.synchronize()
        return found

    def send(self, carrier: Carrier, size: int) -> None:
        """Start to copy its first bytes; they must not be written to afterwards."""
        device, up = self._device, self._up
        with device.active(), device.on(up):
            if carrier.used is not None:
                up.wait_for_event(carrier.used)
            carrier.there[:size].copy_(carrier.host[:size], non_blocking=True)
            carrier.sent = up.record()

    def give_back(self, carrier: Carrier) -> None:
        """Take a carrier back that nothing reads but what its `used` comes after."""
        with self._lock:
            self._free.append(carrier)


class Transfers:
    """Copies to a device and back, on streams of their own. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool = PinnedPool(device)
        with device.active():
            self.up, self.down = device.new_stream(), device.new_stream()

    def stage(self, *parts: tuple[int, torch.dtype]) -> Staged:
        """Return pinned memory for one-dimensional tensors to send together: length and type of each."""
        return Staged(self, parts)

    def land(self, tensor: Tensor) -> Landing:
        """Start copying a contiguous tensor to the host, after all present work of the current stream."""
        return Landing(self, tensor)


def bytes_of(parts: Parts) -> int:
    """Return the bytes of memory that `cut` needs."""
    return sum(_rounded(count * dtype.itemsize) for count, dtype in parts)


def cut(memory: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    """Return tensors that follow one another in one piece of memory."""
    found, at = [], 0
    for count, dtype in parts:
        size = count * dtype.itemsize
        found.append(memory[at : at + size].view(dtype))
        at += _rounded(size)
    return tuple(found)


def _rounded(size: float) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED
