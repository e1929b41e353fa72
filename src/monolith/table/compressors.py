"""Compressors: how a segment's values look to a server, and to training meanwhile.

A serving table keeps codes of one to four bytes per value. Where those codes are
coarse (`FixedR8`, `OneBit`), training looks at the same coarse values, so that the
model learns what it will be served with; the stored values stay float32 and the
gradient finds its way back to them.

These functions are the reference: float32 throughout, one array in, one out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from monolith.errors import ConfigError
from monolith.table.hashing import mix_one
from monolith.table.optimizers import label

Floats = NDArray[np.float32]

LARGEST_HALF = 65504.0


@dataclass(frozen=True, slots=True)
class Compressor(ABC):
    """A code for float32 values. Equal settings compare equal and print the same."""

    kind: ClassVar[str] = ""
    bytes_per_value: ClassVar[int] = 4

    @property
    def initial_scale(self) -> float:
        """The scale a segment starts with; only `OneBit` uses one."""
        return 1.0

    def scale_at(self, step: int, scale: float) -> float:  # noqa: ARG002
        """Return the scale from `step` on, given the one before."""
        return scale

    @abstractmethod
    def encode(self, values: Floats) -> NDArray[Any]:
        """Return the codes a server keeps, one per value."""

    @abstractmethod
    def decode(self, codes: NDArray[Any]) -> Floats:
        """Return the values a server answers with."""

    def fake_quant(self, values: Floats, scale: float = 1.0) -> Floats:  # noqa: ARG002
        """Return what training sees of the stored values."""
        return values

    def backward(self, values: Floats, gradients: Floats, scale: float = 1.0) -> Floats:  # noqa: ARG002
        """Return the gradient of the stored values, given that of what training saw."""
        return gradients

    def __str__(self) -> str:
        return label(self.kind, self)


@dataclass(frozen=True, slots=True)
class Fp32(Compressor):
    """Stores values as they are, in 4 bytes each.

    Examples:
        >>> from monolith import Fp32, Segment
        >>> Segment(dim=8) == Segment(dim=8, compressor=Fp32())  # the default
        True
    """

    kind: ClassVar[str] = "fp32"

    def encode(self, values: Floats) -> NDArray[np.float32]:
        return values.copy()

    def decode(self, codes: NDArray[Any]) -> Floats:
        return codes.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Fp16(Compressor):
    """Stores values in IEEE half precision, rounded to nearest, ties to even; infinity beyond 65504.

    Examples:
        >>> import torch
        >>> from monolith import Fp16, NativeTable, Segment, TableConfig
        >>> segment = Segment(dim=1, compressor=Fp16())
        >>> table = NativeTable(TableConfig(name="item", segments=(segment,), serving=True))
        >>> table.assign(torch.tensor([7]), torch.tensor([[0.1]]))
        >>> table.lookup(torch.tensor([7])).item()  # 2 bytes per float, about three digits
        0.0999755859375
    """

    kind: ClassVar[str] = "fp16"
    bytes_per_value: ClassVar[int] = 2

    def encode(self, values: Floats) -> NDArray[np.float16]:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)

    def decode(self, codes: NDArray[Any]) -> Floats:
        return codes.astype(np.float32)


@dataclass(frozen=True, slots=True)
class FixedR8(Compressor):
    """256 even steps from -range to just below range; halves go away from 0, NaN becomes 0."""

    kind: ClassVar[str] = "fixed_r8"
    bytes_per_value: ClassVar[int] = 1
    range: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.range < math.inf:
            raise ConfigError(f"fixed_r8: range must be above 0, got {self.range!r}")

    @property
    def _step(self) -> np.float32:
        return np.float32(self.range) / np.float32(128)

    def encode(self, values: Floats) -> NDArray[np.int8]:
        step = self._step
        half = np.copysign(step / np.float32(2), values + np.float32(0))  # + 0 turns -0 into +0
        with np.errstate(over="ignore"):
            codes = np.trunc((values + half) / step)
        # Clamped as floats: an integer made of infinity is anyone's guess.
        clamped: Floats = np.clip(np.where(np.isnan(codes), np.float32(0), codes), -128, 127)
        return clamped.astype(np.int8)

    def decode(self, codes: NDArray[Any]) -> Floats:
        return codes.astype(np.float32) * self._step

    def fake_quant(self, values: Floats, scale: float = 1.0) -> Floats:  # noqa: ARG002
        return self.decode(self.encode(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBit(Compressor):
    """HashNet: a tanh that steepens into a sign as training continues.

    Training sees `amplitude * tanh(scale * x)`; a server keeps the sign. All rows
    of a segment share one scale, which the table moves on at every step that
    `step_size` divides.
    """

    kind: ClassVar[str] = "one_bit"
    bytes_per_value: ClassVar[int] = 1
    step_size: int = 200
    init_scale: float = 1.0
    max_scale: float = 10000.0
    amplitude: float = 0.05
    """Upstream's Python default; its proto says 0.1."""

    def __post_init__(self) -> None:
        if self.step_size < 1:
            raise ConfigError(f"one_bit: step_size must be at least 1, got {self.step_size!r}")
        for name in ("init_scale", "max_scale", "amplitude"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"one_bit: {name} must be above 0, got {getattr(self, name)!r}")

    @property
    def initial_scale(self) -> float:
        return self.init_scale

    def scale_at(self, step: int, scale: float) -> float:
        if step % self.step_size:
            return scale
        return min(self.init_scale * math.sqrt(1 + 0.005 * step), self.max_scale)

    def encode(self, values: Floats) -> NDArray[np.int8]:
        return np.where(values > 0, np.int8(1), np.int8(-1))

    def decode(self, codes: NDArray[Any]) -> Floats:
        return codes.astype(np.float32) * np.float32(self.amplitude)

    def fake_quant(self, values: Floats, scale: float = 1.0) -> Floats:
        return np.float32(self.amplitude) * _tanh(np.float32(scale) * values)

    def backward(self, values: Floats, gradients: Floats, scale: float = 1.0) -> Floats:
        tanh = _tanh(np.float32(scale) * values)
        slope = np.float32(self.amplitude) * np.float32(scale) * (1 - tanh * tanh)
        return gradients * slope


def _tanh(values: Floats) -> Floats:
    return np.asarray(np.tanh(values), dtype=np.float32)


COMPRESSORS: dict[str, type[Compressor]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "fixed_r8": FixedR8,
    "one_bit": OneBit,
}


def round_to_half(values: Floats, chances: Floats) -> Floats:
    """Round each value to a neighbouring half, up when its chance allows; the result stays float32.

    With `down` and `up` the halves on either side, a value becomes `up` if its
    chance is at most `(value - down) / (up - down)`. What is a half already, NaN
    and infinity stay as they are. A finite value beyond the largest half goes to
    the largest half, not to infinity: a weight must survive rounding.

    Args:
        values: float32.
        chances: float32 in [0, 1), of the same shape.
    """
    limit = np.float32(LARGEST_HALF)
    bounded = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    with np.errstate(all="ignore"):
        half = bounded.astype(np.float16)
        nearest = half.astype(np.float32)
        below = np.nextafter(half, np.float16(-np.inf)).astype(np.float32)
        above = np.nextafter(half, np.float16(np.inf)).astype(np.float32)
        down = np.where(nearest > bounded, below, nearest)
        up = np.where(nearest < bounded, above, nearest)
        rounded = np.where(chances <= (bounded - down) / (up - down), up, down)
    exact = (nearest == bounded) | np.isnan(bounded)
    return np.where(exact, bounded, rounded).astype(np.float32)


# bfloat16: float32 without its low 16 bits, as tables store embeddings with embedding_dtype="bfloat16". The
# compiled arithmetic is in native/include/bfloat16.h and gives the same bits.


def nearest_bfloat16(values: Floats) -> Floats:
    """Round each value to the nearest bfloat16, ties to even; the result stays float32.

    No finite value becomes infinite: beyond the largest bfloat16 the low bits are cut off.

    Args:
        values: float32.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    return _cut_off(bits, np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))


def stochastic_bfloat16(values: Floats, *, seed: int, row_id: int, step: int) -> Floats:
    """Round the values of a row up or down, up as often as the low bits that are cut off are large.

    The chance is a hash of the seed, the ID, the step, the column and the value.

    Args:
        values: float32 of shape (dim,), the whole row.
        seed: The table's.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    key = mix_one(mix_one(row_id) + mix_one(seed) + mix_one(step))
    low, high = np.uint32(key & 0xFFFF_FFFF), np.uint32(key >> 32)
    h = (bits ^ low) + np.uint32(0x9E3779B9) * np.arange(1, len(bits) + 1, dtype=np.uint32)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h = (h ^ h >> np.uint32(15) ^ high) * np.uint32(0x846CA68B)
    return _cut_off(bits, h >> np.uint32(16))


def inexact_as_bfloat16(values: Floats) -> NDArray[np.bool_]:
    """Return for each row of values, (n, dim), whether bfloat16 cannot hold some of it."""
    low = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFF)
    return np.asarray(low.any(axis=1))


def _cut_off(bits: NDArray[np.uint32], more: NDArray[np.uint32]) -> Floats:
    """Add to the bits of finite values, then clear the low half; a NaN stays one."""
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    large = np.where(magnitude > 0x7F80_0000, bits | np.uint32(0x0040_0000), bits)
    rounded = np.where(magnitude >= 0x7F7F_0000, large, bits + more) & np.uint32(0xFFFF_0000)
    return rounded.astype(np.uint32).view(np.float32)
