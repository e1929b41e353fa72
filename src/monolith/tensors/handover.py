"""Passing tensors from one thread to another.

Each thread has its own current CUDA stream, and streams run side by side: a tensor that
one thread has computed may be unfinished when another reads it. A `Handover` carries the
events to wait for. It can also take tensors to a device on the way, from page-locked
memory on a stream of its own, so that neither thread nor device waits meanwhile.

A batch is rarely one tensor: it is dicts, lists, tuples and dataclasses in each other, with
tensors at the leaves. `map_leaves` returns a new structure of the same containers; that of
the caller is never written to.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from monolith.tensors.ragged import RaggedTensor


@dataclass(frozen=True, slots=True)
class Handover:
    """A structure on its way to another thread, and what the device must finish first."""

    structure: Any
    events: tuple[tuple[torch.device, Any], ...]

    def take(self) -> Any:
        """Return the structure, for use on this thread's current streams. The host does not wait."""
        if self.events:
            streams = {}
            for device, event in self.events:
                streams[device] = torch.cuda.current_stream(device)
                streams[device].wait_event(event)
            for tensor in tensors_of(self.structure):
                if tensor.device in streams:
                    # Or its memory, freed by us, could be given out while we still read it.
                    tensor.record_stream(streams[tensor.device])
        return self.structure


class Courier:
    """Prepares structures for another thread, in the thread that made them.

    Args:
        device: The device to copy the tensors to; None leaves each where it is.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._copies: torch.cuda.Stream | None = None

    def hand_over(self, structure: Any) -> Handover:
        """Start what copies are needed, and note what to wait for."""
        device = self._device
        if device is None:
            return Handover(structure, _events(tensors_of(structure)))
        if device.type != "cuda":
            return Handover(moved(structure, device), ())
        if self._copies is None:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for source in {tensor.device for tensor in tensors_of(structure) if tensor.is_cuda}:
            self._copies.wait_stream(torch.cuda.current_stream(source))
        with torch.cuda.stream(self._copies):
            there = moved(structure, device)
            return Handover(there, _events(tensors_of(there)))


def moved(structure: Any, device: torch.device) -> Any:
    """Return the structure with all tensors on `device`, each copied once however often it appears.

    Copies to a CUDA device are queued on its current stream, from page-locked memory.
    """
    done: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor | RaggedTensor):
            return leaf
        if id(leaf) not in done:
            there = device.type == "cuda"
            done[id(leaf)] = (_pinned(leaf) if there else leaf).to(device, non_blocking=there)
        return done[id(leaf)]

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return map_leaves(move, structure)


def tensors_of(structure: Any) -> Iterator[Tensor]:
    """Yield every tensor, the parts of ragged ones included."""
    for leaf in leaves(structure):
        if not isinstance(leaf, Tensor | RaggedTensor):
            continue
        part = leaf
        while isinstance(part, RaggedTensor):
            yield part.row_splits
            part = part.values
        if part.is_nested and part.layout is torch.jagged:
            yield from (part.values(), part.offsets())  # type: ignore[attr-defined]
        else:
            yield part


def _pinned(leaf: Tensor | RaggedTensor) -> Tensor | RaggedTensor:
    flat = leaf.flat_values if isinstance(leaf, RaggedTensor) else leaf
    return leaf.pin_memory() if flat.is_cpu and flat.layout is torch.strided else leaf


def _events(tensors: Iterator[Tensor]) -> tuple[tuple[torch.device, Any], ...]:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return tuple((device, torch.cuda.current_stream(device).record_event()) for device in devices)


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return `structure` with every leaf replaced by `function(leaf)`, its containers of the same types.

    Containers are dicts, lists, tuples, named tuples and dataclasses. All else is a
    leaf, None included. Leaves are visited in order.
    """
    if isinstance(structure, dict):
        # A copy keeps what a type has besides its items, such as a defaultdict's factory.
        mapped = copy.copy(structure)
        mapped.update((key, map_leaves(function, value)) for key, value in structure.items())
        return mapped
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(function, value) for value in structure))
    if isinstance(structure, list | tuple):
        return type(structure)(map_leaves(function, value) for value in structure)
    if is_dataclass_instance(structure):
        changed = copy.copy(structure)
        for field in dataclasses.fields(structure):
            # Frozen ones refuse to be set the plain way, and no caller has this copy yet.
            object.__setattr__(changed, field.name, map_leaves(function, getattr(structure, field.name)))
        return changed
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """Return every leaf, in the order in which `map_leaves` visits them."""
    # A batch that passes from thread to thread has a hundred, so each is a turn of a loop and not a call.
    found, rest = [], [structure]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            rest.extend(reversed(part.values()))
        elif isinstance(part, list | tuple):
            rest.extend(reversed(part))
        elif (names := _fields_of(type(part))) is not None:  # type: ignore[arg-type]  # types are hashable
            rest.extend([getattr(part, name) for name in names])
        else:
            found.append(part)
    return found


@cache
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass, the last one first; None if it is another type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in reversed(dataclasses.fields(kind)))


def is_dataclass_instance(structure: object) -> bool:
    return dataclasses.is_dataclass(structure) and not isinstance(structure, type)
