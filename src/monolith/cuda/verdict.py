"""The verdict on a batch, on a device: whether it may be applied, known to kernels and not yet to the host.

A batch whose loss or gradients are NaN or infinite must leave no trace. A host that reads this before it
updates anything waits for the device in every step. So the device decides: what is updated first is copied
before and put back if the batch is refused, and what can look at the verdict looks at it.

    verdict.look([loss], gradients, rows)      # found[0] != 0: refused
    kept.keep()                                # copies of weights and the state of their optimizer
    optimizer.step()
    kept.put_back()                            # only if it was refused

Everything is launched on the current stream and may be captured: addresses are parameters of the launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from monolith.cuda.device import Device
from monolith.cuda.kernels import Kernels

_PIECES = 96  # of a launch, and bytes of a block: as in verdict.cu
_CHUNK = 1 << 15


class _Piece(ctypes.Structure):
    _fields_ = [
        ("at", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("begin", ctypes.c_int),
        ("kind", ctypes.c_int),
    ]


class _Pieces(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("blocks", ctypes.c_int), ("at", _Piece * _PIECES)]


class BatchVerdict:
    """Whether a batch is refused. Used by one thread at a time.

    Args:
        kinds: What is looked at, in words, in the order in which `look` is given it.

    Attributes:
        found: int64 of shape (1 + kinds,), on the device: floats that are NaN or infinite, all and by kind.
    """

    def __init__(self, device: Device, kinds: Sequence[str]) -> None:
        self.kinds = tuple(kinds)
        self._device = device
        self._kernels = _kernels(device)
        self.found = torch.zeros(1 + len(kinds), dtype=torch.int64, device=device.torch_device)

    def look(self, *tensors: Sequence[Tensor]) -> None:
        """Count what is not finite in tensors of each kind, in place of what was found before."""
        self.found.zero_()
        floats = [
            (one.detach().to(torch.float32).contiguous(), kind)
            for kind, several in enumerate(tensors)
            for one in several
        ]
        self.look_also(floats)

    def look_also(self, floats: Sequence[tuple[Tensor, int]]) -> None:
        """Add what is not finite in further tensors, float32 and contiguous, each with its kind."""
        stream = self._device.current_stream().handle
        for pieces in _launches([(one, None, kind) for one, kind in floats]):
            self._kernels.launch("count_non_finite", pieces.blocks, pieces, self.found, stream=stream)

    def describe(self, found: Sequence[int]) -> str | None:
        """Return what was found, in words, given `found` on the host; None if the batch was applied."""
        if not found[0]:
            return None
        return " and ".join(
            f"{kind} has {count:,} floats that are NaN or infinite"
            for kind, count in zip(self.kinds, found[1:], strict=True)
            if count
        )


class Kept:
    """Copies of tensors that a batch updates before the host knows whether it may.

    Args:
        tensors: On the device, each without gaps; they must not move.

    Attributes:
        bytes: Of device memory, for the copies.
    """

    def __init__(self, device: Device, tensors: Sequence[Tensor], verdict: BatchVerdict) -> None:
        self._device = device
        self._kernels = _kernels(device)
        self._verdict = verdict
        self._copies = [torch.empty_like(one) for one in tensors]
        self._tensors = list(tensors)
        self._pieces = list(
            _launches([(one, copy, 0) for one, copy in zip(self._tensors, self._copies, strict=True)])
        )
        self.bytes = sum(one.numel() * one.element_size() for one in tensors)

    def keep(self) -> None:
        """Copy all tensors."""
        self._copy(back=False)

    def put_back(self) -> None:
        """Undo what happened since `keep`, if the verdict refuses the batch."""
        self._copy(back=True)

    def _copy(self, *, back: bool) -> None:
        stream = self._device.current_stream().handle
        for pieces in self._pieces:
            given = pieces, self._verdict.found, int(back)
            self._kernels.launch("copy_pieces", pieces.blocks, *given, stream=stream)


def _launches(given: Sequence[tuple[Tensor, Tensor | None, int]]) -> Iterator[_Pieces]:
    """Yield the pieces of each launch; empty tensors have none."""
    some = [one for one in given if one[0].numel()]
    for first in range(0, len(some), _PIECES):
        made: Any = _Pieces()
        for tensor, copy, kind in some[first : first + _PIECES]:
            size = tensor.numel() * tensor.element_size()
            at = None if copy is None else copy.data_ptr()
            made.at[made.count] = _Piece(tensor.data_ptr(), at, size, made.blocks, kind)
            made.count += 1
            made.blocks += -(-size // _CHUNK)
        yield made


def verdict_source() -> str:
    """Return the source of the kernels."""
    return resources.files(__package__).joinpath("verdict.cu").read_text("utf-8")


def _kernels(device: Device) -> Kernels:
    return device.kernels(verdict_source(), "verdict")
