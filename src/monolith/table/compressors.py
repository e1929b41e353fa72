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
from collections.abc import Callable, Sequence
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


# Narrow values: what training tables store with another `embedding_dtype` than float32. The compiled
# arithmetic is in native/include/narrow.h, which says how it works, and gives the same bits. Here values stay
# float32.

_NARROW_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_CUT, _CODE_CUT = 7, 15
_LEAST_SCALE, _MOST_SCALE = np.uint32(0x0100_0000), np.uint32(0x7C01_0200)

Bits = NDArray[np.uint32]
# What to add to bits, given also the bits of the value, its column and how many low bits are then cut off.
_More = Callable[[Bits, Bits, "NDArray[np.int64]", int], Bits]


def narrow_bytes(dtype: str, dims: Sequence[int]) -> int:
    """Return the bytes of a row's values, without padding; `dims` are those of its segments."""
    return _NARROW_BYTES[dtype] * sum(dims) + (4 * len(dims) if dtype == "int8" else 0)


def round_to_nearest(values: Floats, dtype: str, dims: Sequence[int]) -> Floats:
    """Round each value to the nearest that `dtype` can hold, ties to even.

    No finite value becomes infinite: what is beyond the largest becomes the largest. With int8, each segment
    of a row has a scale of its own, which follows from the largest of its values.

    Args:
        values: float32 of shape (n, dim) or (dim,).
        dtype: An `embedding_dtype`.
        dims: Those of the segments of a row.
    """
    return _rounded(values, dtype, dims, lambda bits, _value, _columns, cut: _to_nearest(bits, cut))


def round_by_chance(
    values: Floats, dtype: str, dims: Sequence[int], *, seed: int, row_id: int, step: int
) -> Floats:
    """Round the values of a row up or down, up as often as the low bits that are cut off are large.

    The chance is a hash of the seed, the ID, the step, the column and the value.

    Args:
        values: float32 of shape (dim,), the whole row.
        dtype: An `embedding_dtype`.
        dims: Those of the segments of the row.
        seed: The table's.
    """
    key = mix_one(mix_one(row_id) + mix_one(seed) + mix_one(step))
    low, high = np.uint32(key & 0xFFFF_FFFF), np.uint32(key >> 32)

    def more(_bits: Bits, value: Bits, columns: NDArray[np.int64], cut: int) -> Bits:
        h = (value ^ low) + np.uint32(0x9E3779B9) * (columns + 1).astype(np.uint32)
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
        h = (h ^ h >> np.uint32(15) ^ high) * np.uint32(0x846CA68B)
        drawn: Bits = h >> np.uint32(32 - cut)
        return drawn

    return _rounded(values, dtype, dims, more, by_chance=True)


def inexact(values: Floats, dtype: str, dims: Sequence[int]) -> NDArray[np.bool_]:
    """Return for each row of values, (n, dim), whether `dtype` cannot hold some of it."""
    rounded = round_to_nearest(values, dtype, dims)
    changed = (rounded != values) & ~(np.isnan(rounded) & np.isnan(values))
    return np.asarray(changed.any(axis=1))


def _rounded(
    values: Floats, dtype: str, dims: Sequence[int], more: _More, *, by_chance: bool = False
) -> Floats:
    values = np.ascontiguousarray(values)
    bits, columns = values.view(np.uint32), np.arange(values.shape[-1])
    if dtype == "bfloat16":
        return _cut_off(bits, more(bits, bits, columns, 16))
    if dtype == "float16" and by_chance:
        return _float16(values, more(bits, bits, columns, 13))
    if dtype == "float16":
        return _finite_half(values).astype(np.float16).astype(np.float32)
    if dtype == "int8":
        firsts = np.cumsum([0, *dims[:-1]])
        rounded = [
            _int8(values[..., first : first + dim], columns[first : first + dim], number, more)
            for number, (first, dim) in enumerate(zip(firsts, dims, strict=True))
        ]
        return np.concatenate(rounded, axis=-1)
    return values


def _to_nearest(bits: Bits, cut: int) -> Bits:
    return np.uint32((1 << (cut - 1)) - 1) + (bits >> np.uint32(cut) & np.uint32(1))


def _cut_off(bits: Bits, more: Bits) -> Floats:
    """Add to the bits of finite values, then clear the low half; a NaN stays one."""
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    large = np.where(magnitude > 0x7F80_0000, bits | np.uint32(0x0040_0000), bits)
    rounded = np.where(magnitude >= 0x7F7F_0000, large, bits + more) & np.uint32(0xFFFF_0000)
    return rounded.astype(np.uint32).view(np.float32)


def _finite_half(values: Floats) -> Floats:
    limit = np.float32(LARGEST_HALF)
    return np.where(np.isfinite(values), np.clip(values, -limit, limit), values)


def _float16(values: Floats, more: Bits) -> Floats:
    """Add to values in units of 2^-13 of the distance of two halves, then cut the fraction off."""
    bounded = np.where(np.isfinite(values), np.abs(_finite_half(values)), np.float32(0))
    magnitude = bounded.view(np.uint32)
    raised = (bounded + np.float32(2**-14)).view(np.uint32) - np.uint32(0x3880_0000)
    fine = np.where(magnitude < 0x3880_0000, raised, magnitude - np.uint32(0x3800_0000))
    code = np.minimum((fine + more) >> np.uint32(13), np.uint32(0x7BFF)).astype(np.uint16)
    rounded = np.copysign(code.view(np.float16).astype(np.float32), values)
    return np.where(np.isfinite(values), rounded, values)


def _int8(values: Floats, columns: NDArray[np.int64], segment: int, more: _More) -> Floats:
    bits = np.ascontiguousarray(values).view(np.uint32)
    largest = (bits & np.uint32(0x7FFF_FFFF)).max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        share = (largest.view(np.float32) / np.float32(127)).view(np.uint32)
        raised_share = share + more(share, share, np.array([-1 - segment]), _SCALE_CUT)
        scale = raised_share >> np.uint32(_SCALE_CUT) << np.uint32(_SCALE_CUT)
        scale = np.where(scale < _LEAST_SCALE, np.uint32(0), np.minimum(scale, _MOST_SCALE))
        scale = np.where(share >= 0x7F80_0000, np.uint32(0x7FC0_0000), scale).view(np.float32)
        inverse = np.where(scale > 0, np.float32(127) / largest.view(np.float32), np.float32(0))
        raised = (values * inverse + np.float32(384)).view(np.uint32)
        codes = (raised + more(raised, bits, columns, _CODE_CUT)) >> np.uint32(_CODE_CUT) ^ np.uint32(0x80)
        rounded: Floats = codes.astype(np.uint8).view(np.int8).astype(np.float32) * scale
        return rounded
