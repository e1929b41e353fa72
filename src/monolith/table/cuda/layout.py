"""Layouts: what kernels know about the rows of a table, when they are compiled and at each launch.

The segments of a row never change, so kernels have them as constants (`layout.h`): loops have fixed widths,
and an optimizer's settings are folded into its arithmetic. Tables of equal segments share the compiled
kernels. The arithmetic itself is in headers that the core is compiled with, too.

A few numbers change from step to step and are an argument of each launch (`StepScalars`): learning rates are
given with each step, the scale of one_bit segments follows from the steps, and rows with lazy decay are shown
as of the newest step and its rates.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monolith.cuda.device import Device
from monolith.cuda.kernels import Headers, Kernels, headers_of
from monolith.errors import TableArgumentError
from monolith.table.compressors import FixedR8, OneBit
from monolith.table.config import Segment, TableConfig
from monolith.table.hashing import mix_one
from monolith.table.update_rules import decays_lazily, last_steps

MAX_LANES = 32
"""Threads of a warp: as many as can work on one row together."""

_LEAST_LANES = 8


@dataclass(frozen=True, slots=True)
class KernelProgram:
    """The source of some kernels with the files it includes."""

    name: str
    """For messages; `name.cu` must not be a file it includes, or NVRTC takes it for a circle."""
    source: str
    headers: Headers

    def on(self, device: Device) -> Kernels:
        """Return its kernels on a device, compiled when first used."""
        return device.kernels(self.source, self.name, self.headers)

    def compile_ahead(self, device: Device) -> None:
        """Start to compile its kernels for a device; returns at once."""
        device.compile_ahead(self.source, self.name, self.headers)


@dataclass(frozen=True, slots=True)
class DeviceRowLayout:
    """The layout of a row in device memory, and the number of threads that work on it."""

    dim: int
    state_dim: int
    row_bytes: int
    """Bytes of the values with the scales of int8, in whole words; state is a separate array."""
    lanes: int
    lazy: bool
    """Whether rows decay by steps they are not in, which kernels that show or write them must know of."""
    trained: bool
    """Whether rows take steps; those of tables that serve do not."""
    header: str
    """`layout.h`, the constants that kernels for such rows are compiled with."""

    @property
    def rows(self) -> KernelProgram:
        """The kernels over the rows of one table."""
        return _program("rows_of_table", "train.cu" if self.trained else "rows.cu", self.header)

    @property
    def fused_rows(self) -> KernelProgram:
        """The kernels over the rows of many tables of this layout at once."""
        return _program("rows_of_tables", "fused_train.cu" if self.trained else "fused_rows.cu", self.header)

    @property
    def bytes_per_place(self) -> int:
        """What a place of the table costs: key, event time, values, state."""
        return 8 + 4 + self.row_bytes + 4 * self.state_dim


def index_kernels() -> KernelProgram:
    """Return the kernels over the index of one table, whatever its rows are."""
    return _program("index_of_table", "index.cu")


def fused_index_kernels() -> KernelProgram:
    """Return the kernels over the indices of many tables at once."""
    return _program("index_of_tables", "fused_index.cu")


def admission_kernels() -> KernelProgram:
    """Return the kernels that ask admission filters."""
    return _program("admission_of_tables", "admission.cu")


def compile_tables_ahead(
    configs: Iterable[TableConfig], device: Device, *, fused: bool, filtered: bool = False
) -> None:
    """Start to compile all kernels of some tables, which otherwise each table waits for in turn.

    Args:
        fused: Whether one launch will work on many tables.
        filtered: Whether one of them has an admission filter.
    """
    layouts = dict.fromkeys(row_layout(config) for config in configs)
    programs = [index_kernels(), *(layout.rows for layout in layouts)]
    if fused:
        programs += [fused_index_kernels(), *(layout.fused_rows for layout in layouts)]
    if filtered:
        programs.append(admission_kernels())
    for program in programs:
        program.compile_ahead(device)


@functools.cache  # a table asks again whenever it grows, and reading the files takes milliseconds
def _program(name: str, file: str, layout: str | None = None) -> KernelProgram:
    source = f'#include "{file}"\n'
    # The second has the headers that the core is compiled with, too: hashes, quantizers, update rules.
    folders = (resources.files(__package__), resources.files("monolith.native").joinpath("include"))
    made = {} if layout is None else {"layout.h": layout}
    return KernelProgram(name, source, headers_of(source, folders, made))


def row_layout(config: TableConfig) -> DeviceRowLayout:
    """Return the layout of a table's rows."""
    structs, column, state, byte = [], 0, 0, 0
    for number, segment in enumerate(config.segments):
        structs.append(_segment_struct(number, segment, column, state, byte))
        column += segment.dim
        state += segment.state_dim
        byte += segment.dim * segment.compressor.bytes_per_value
    row_bytes = -(-config.embedding_bytes // 4) * 4
    stored = config.embedding_dtype if config.stores_narrow else "float32"
    by_chance = config.stores_narrow and config.embedding_rounding == "stochastic"
    lanes = _lanes(config.dim)
    viewed = any(isinstance(segment.compressor, FixedR8 | OneBit) for segment in config.segments)
    lazy = decays_lazily(config) and not config.serving
    # PLAIN: training sees the stored values as they are, so that a lookup is a copy.
    numbers = {
        "DIM": config.dim,
        "STATE_DIM": config.state_dim,
        "ROW_BYTES": row_bytes,
        "SERVING": int(config.serving),
        "LAZY": int(lazy),
        "PLAIN": int(not config.serving and not viewed and not lazy),
        "BFLOAT16": int(stored == "bfloat16"),
        "FLOAT16": int(stored == "float16"),
        "INT8": int(stored == "int8"),
        "BY_CHANCE": int(by_chance),
        "HASHED": int(by_chance or any(segment.optimizer.stochastic_rounding for segment in config.segments)),
        "LANES": lanes,
        # On a multiprocessor at once, which bounds the registers of each to what steps need without spilling.
        "TRAIN_BLOCKS": 1 if config.dim > 128 else 3 if config.state_dim > config.dim else 4,
        "SEGMENTS": len(config.segments),
        "SEED": f"{mix_one(config.seed):#x}ULL",
        "EACH_SEGMENT(X)": " ".join(f"X({number})" for number in range(len(config.segments))),
    }
    defines = [f"#define {name} {value}" for name, value in numbers.items()]
    header = "\n".join(["#pragma once", *defines, *structs, ""])
    return DeviceRowLayout(config.dim, config.state_dim, row_bytes, lanes, lazy, not config.serving, header)


def _lanes(dim: int) -> int:
    """Return how many threads work on a row: so few that each has four values to fetch at once, but eight
    that fetch a sector of memory. The fewer they are, the more rows are under way."""
    lanes = 1
    while lanes < min(MAX_LANES, dim) and (lanes < _LEAST_LANES or 4 * lanes < dim):
        lanes *= 2
    return lanes


def _segment_struct(number: int, segment: Segment, column: int, state: int, byte: int) -> str:
    optimizer, compressor = segment.optimizer, segment.compressor
    rule = optimizer.rule
    low, high = segment.initializer.bounds
    integers = {
        "kNumber": number,
        "kDim": segment.dim,
        "kColumn": column,
        "kState": state,
        "kStateDim": segment.state_dim,
        "kByte": byte,
        "kCompressor": compressor.kind.upper(),
    }
    floats = {
        "kLow": low,
        "kHigh": high,
        "kLambda": optimizer.delay_compensation or 0.0,
        "kRange": compressor.range if isinstance(compressor, FixedR8) else 1.0,
        "kAmplitude": compressor.amplitude if isinstance(compressor, OneBit) else 1.0,
    }
    choices = {
        "kLazy": optimizer.decays_lazily,
        "kDelayed": optimizer.delay_compensation is not None,
        "kRounded": optimizer.stochastic_rounding,
    }
    settings = {field.name: getattr(rule, field.name) for field in fields(rule)}
    lines = [
        # The rule and its settings have the names of the Python class and its fields; see update_rules.h.
        f"  using Rule = monolith::rules::{type(rule).__name__};",
        "  struct Settings {",
        *(f"    static constexpr {_constant(name, value)};" for name, value in settings.items()),
        "  };",
        *(f"  static constexpr int {name} = {value};" for name, value in integers.items()),
        *(f"  static constexpr {_constant(name, value)};" for name, value in (floats | choices).items()),
    ]
    return "\n".join([f"struct Segment{number} {{", *lines, "};"])


def _constant(name: str, value: float | bool) -> str:
    """Return a bool or a float32, to the last bit, as C++ defines it."""
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    return f"float {name} = {float(np.float32(value)).hex()}f"


class StepScalars:
    """The rates, scales and decays of one table, by segment. Not thread-safe.

    Attributes:
        scales: One per segment: how steep a one_bit segment has become.
    """

    def __init__(self, config: TableConfig, *, lazy: bool) -> None:
        self._name = config.name
        self._segments = config.segments
        self._lazy = lazy
        self._one_rule = _has_one_rule(config)
        self.scales = [float(np.float32(s.compressor.initial_scale)) for s in config.segments]
        self._decays = self._decays_at([segment.decay_rate for segment in config.segments])
        self._steps = 0  # one more than the newest

    def set_scales(self, scales: Sequence[float]) -> None:
        """Set the scale of each segment.

        Raises:
            TableArgumentError: There is not one for each segment.
        """
        if len(scales) != len(self.scales):
            raise TableArgumentError(
                f"table {self._name!r}: needs {len(self.scales)} scales, got {len(scales)}"
            )
        self.scales = [float(np.float32(scale)) for scale in scales]

    def begin(self, step: int, rates: Sequence[float]) -> None:
        """Record a step that is about to be taken."""
        if self._lazy:
            self._decays = self._decays_at(rates)
            self._steps = max(self._steps, step + 1)
        for number, segment in enumerate(self._segments):
            compressor = segment.compressor
            if isinstance(compressor, OneBit) and step % compressor.step_size == 0:
                # In double, rounded once: the core computes the same bits.
                first, most = np.float32(compressor.init_scale), np.float32(compressor.max_scale)
                self.scales[number] = float(
                    min(np.float32(float(first) * math.sqrt(1.0 + 0.005 * step)), most)
                )

    def note(self, state: NDArray[np.float32] | None) -> None:
        """Advance to the newest step in the state of restored rows."""
        if not self._lazy or state is None or not len(state):
            return
        begin = 0
        for segment in self._segments:
            if segment.optimizer.decays_lazily:
                seen = last_steps(state[:, begin : begin + segment.state_dim], segment.dim)
                self._steps = max(self._steps, int(seen.max()))
            begin += segment.state_dim

    def forget(self) -> None:
        """Reset the step after the table was cleared."""
        self._steps = 0

    def scalars(self, rates: Sequence[float] | None = None) -> ctypes.Structure:
        """Return the argument of a launch: struct Scalars in rows.cuh."""
        n = len(self._segments)
        told: Any = _scalars_type(n, self._lazy)()
        told.rates = (ctypes.c_float * n)(*(rates or ()))
        told.scales = (ctypes.c_float * n)(*self.scales)
        if self._lazy:
            told.decays = (ctypes.c_float * n)(*self._decays)
            told.steps = self._steps
        structure: ctypes.Structure = told
        return structure

    def stay_finite(self, rates: Sequence[float]) -> bool:
        """Whether steps by usable gradients leave every row finite, so that kernels need not check."""
        decay = getattr(self._segments[0].optimizer.rule, "weight_decay", 0.0)
        return self._one_rule and all(rate == rates[0] for rate in rates) and not abs(rates[0] * decay) > 1

    def _decays_at(self, rates: Sequence[float]) -> list[float]:
        """Return the share that a step at these rates takes of a value, by segment, as float32 has it."""
        decays = [getattr(segment.optimizer.rule, "weight_decay", 0.0) for segment in self._segments]
        return [float(np.float32(r) * np.float32(d)) for r, d in zip(rates, decays, strict=True)]


@functools.cache
def _scalars_type(segments: int, lazy: bool) -> Any:
    floats = ctypes.c_float * segments
    fields: list[tuple[str, Any]] = [("rates", floats), ("scales", floats)]
    if lazy:
        fields += [("decays", floats), ("steps", ctypes.c_int64)]
    return type("Scalars", (ctypes.Structure,), {"_fields_": fields})


def _has_one_rule(config: TableConfig) -> bool:
    """Whether all values of a row are trained by one rule that keeps them finite; see `stay_finite`."""
    # The rules alone keep a row finite if the gradients are usable. Anything that mixes values of different
    # columns or scales gradients may overflow: one_bit, delay compensation, rounding, or state shared by all
    # columns of a segment if there are several segments.
    first = config.segments[0].optimizer
    same_rule = all(s.optimizer == first and not isinstance(s.compressor, OneBit) for s in config.segments)
    by_value = first.state_dim(2) in (0, 2) and first.rule.kind != "batch_softmax"
    plain = first.delay_compensation is None and not first.stochastic_rounding
    return same_rule and plain and (len(config.segments) == 1 or by_value)
