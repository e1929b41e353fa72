"""Step scalars: the numbers of a table that change from step to step, which every launch is given.

Learning rates are given with each step. The scale of one_bit segments follows from the steps, and rows with
lazy decay are shown as of the newest step and its rates.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monolith.errors import TableArgumentError
from monolith.table.compressors import OneBit
from monolith.table.config import TableConfig
from monolith.table.update_rules import last_steps


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
    first = config.segments[0].optimizer
    same_rule = all(s.optimizer == first and not isinstance(s.compressor, OneBit) for s in config.segments)
    by_value = first.state_dim(2) in (0, 2) and first.rule.kind != "batch_softmax"
    plain = first.delay_compensation is None and not first.stochastic_rounding
    return same_rule and plain and (len(config.segments) == 1 or by_value)
