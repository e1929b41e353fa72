"""Layouts: the source of the kernels that are made for the rows of one table.

What a row is made of never changes, so it stands in the source as constants: loops have fixed widths, and
an optimizer's settings are folded into its arithmetic. Tables of equal segments share what was compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import numpy as np

from monolith.table.compressors import FixedR8, OneBit
from monolith.table.config import Segment, TableConfig
from monolith.table.hashing import mix_one
from monolith.table.update_rules import decays_lazily

MAX_LANES = 32
"""Threads of a warp: as many as can work on one row together."""

_LEAST_LANES = 8

_SETTINGS = {
    "kInitialAccumulator": "initial_accumulator_value",
    "kWeightDecay": "weight_decay",
    "kBeta": "beta",
    "kBeta1": "beta1",
    "kBeta2": "beta2",
    "kEpsilon": "epsilon",
    "kRho": "rho",
    "kMomentum": "momentum",
    "kL1": "l1",
    "kL2": "l2",
}
_CHOICES = {"kNesterov": "use_nesterov", "kDecouple": "decouple_weight_decay", "kLazy": "lazy_decay"}


@dataclass(frozen=True, slots=True)
class DeviceRowLayout:
    """Where the floats of a row lie in device memory, and by how many threads it is worked on."""

    dim: int
    state_dim: int
    row_bytes: int
    """Of the values alone, in whole words; state lies apart."""
    lanes: int
    lazy: bool
    """Whether rows decay by steps they are not in, which kernels that show or write them must know of."""
    trained: bool
    """Whether rows take steps; those of tables that serve do not."""
    source: str

    @property
    def bytes_per_place(self) -> int:
        """What a place of the table costs: key, event time, values, state."""
        return 8 + 4 + self.row_bytes + 4 * self.state_dim


def index_source() -> str:
    """Return the source of what is done to an index, whatever the rows are."""
    return _text("places.cuh") + _text("index.cu")


def fused_index_source() -> str:
    """Return the source of what is done to the indices of many tables at once."""
    return index_source() + _text("cells.cuh") + _text("fused_index.cu")


def fused_row_source(layout: DeviceRowLayout) -> str:
    """Return the source of what is done to the rows of many tables of a layout at once."""
    trained = _text("fused_train.cu") if layout.trained else ""
    return layout.source + _text("cells.cuh") + _text("fused_rows.cu") + trained


def row_layout(config: TableConfig) -> DeviceRowLayout:
    """Return the layout of a table's rows."""
    structs, column, state, byte = [], 0, 0, 0
    for number, segment in enumerate(config.segments):
        structs.append(_segment_struct(number, segment, column, state, byte))
        column += segment.dim
        state += segment.state_dim
        byte += segment.dim * segment.compressor.bytes_per_value
    row_bytes = -(-byte // 4) * 4 if config.serving else 4 * column
    lanes = _lanes(config.dim)
    viewed = any(isinstance(segment.compressor, FixedR8 | OneBit) for segment in config.segments)
    lazy = decays_lazily(config) and not config.serving
    numbers = {
        "DIM": config.dim,
        "STATE_DIM": config.state_dim,
        "ROW_BYTES": row_bytes,
        "SERVING": int(config.serving),
        "LAZY": int(lazy),
        "PLAIN": int(not config.serving and not viewed and not lazy),
        "ROUNDED": int(any(segment.optimizer.stochastic_rounding for segment in config.segments)),
        "LANES": lanes,
        # On a multiprocessor at once, which bounds the registers of each to what steps need without spilling.
        "TRAIN_BLOCKS": 1 if config.dim > 128 else 3 if config.state_dim > config.dim else 4,
        "SEGMENTS": len(config.segments),
        "SEED": f"{mix_one(config.seed):#x}ULL",
        "EACH_SEGMENT(X)": " ".join(f"X({number})" for number in range(len(config.segments))),
    }
    defines = [f"#define {name} {value}" for name, value in numbers.items()]
    layout = "\n".join([*defines, *structs])
    source = _text("places.cuh") + _text("rows.cu").replace("\nLAYOUT\n", f"\n{layout}\n", 1)
    if not config.serving:
        source += _text("train.cu")
    return DeviceRowLayout(config.dim, config.state_dim, row_bytes, lanes, lazy, not config.serving, source)


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
        "kDim": segment.dim,
        "kColumn": column,
        "kState": state,
        "kStateDim": segment.state_dim,
        "kByte": byte,
        "kOptimizer": rule.kind.upper(),
        "kCompressor": compressor.kind.upper(),
    }
    floats = {name: getattr(rule, setting, 0.0) for name, setting in _SETTINGS.items()}
    floats |= {
        "kLow": low,
        "kHigh": high,
        "kLambda": optimizer.delay_compensation or 0.0,
        "kRange": compressor.range if isinstance(compressor, FixedR8) else 1.0,
        "kAmplitude": compressor.amplitude if isinstance(compressor, OneBit) else 1.0,
    }
    choices = {name: getattr(rule, setting, False) for name, setting in _CHOICES.items()}
    choices |= {
        "kDelayed": optimizer.delay_compensation is not None,
        "kRounded": optimizer.stochastic_rounding,
    }
    lines = [
        *(f"  static constexpr int {name} = {value};" for name, value in integers.items()),
        *(f"  static constexpr float {name} = {_literal(value)};" for name, value in floats.items()),
        *(f"  static constexpr bool {name} = {str(bool(value)).lower()};" for name, value in choices.items()),
    ]
    return "\n".join([f"struct Segment{number} {{", *lines, "};"])


def _literal(value: float) -> str:
    """Return a float32 as C++ spells it, to the last bit."""
    return f"{float(np.float32(value)).hex()}f"


def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text("utf-8")
