"""Ranges of float features: what a model was trained on, to notice values that it has never seen.

A client that sends hours where the model learned days, or numbers that are scaled already, gets scores that
look like any others. So training notes the smallest and the largest number of each feature as the model read
it, the export has them, and a server compares them with its first requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ALL_OF_THE_FIRST = 64
"""So many batches are all looked at, and after them one in `EVERY`, so that it costs next to nothing."""
EVERY = 64


class FloatRanges:
    """The smallest and the largest number of each float feature, of a sample of batches.

    Examples:
        >>> import torch
        >>> from monolith.feature.ranges import FloatRanges, far_outside
        >>> ranges = FloatRanges()
        >>> ranges.note({"price": torch.tensor([[0.5], [2.0]])})
        >>> ranges.state()
        {'price': [0.5, 2.0]}
        >>> far_outside(ranges.state(), {"price": torch.tensor([[1.0], [44.0]])})
        {'price': 44.0}
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[float]] = {}
        self._batches = 0

    def note(self, floats: Mapping[str, Tensor]) -> None:
        """Take in float32 (n, width) of a batch, if it is its turn. Those of a device are left alone."""
        self._batches += 1
        if self._batches > ALL_OF_THE_FIRST and self._batches % EVERY:
            return
        for name, (least, most) in _ranges_of(floats).items():
            known = self._ranges.setdefault(name, [least, most])
            known[:] = min(known[0], least), max(known[1], most)

    def state(self) -> dict[str, list[float]]:
        """Return the range of each feature, for a checkpoint."""
        return {name: list(known) for name, known in self._ranges.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Resume with the ranges of a checkpoint."""
        self._ranges = {str(name): [float(least), float(most)] for name, (least, most) in state.items()}


def far_outside(ranges: Mapping[str, Sequence[float]], floats: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the number of each feature that is furthest outside of its range, by more than its width.

    Ranges are those of a sample, and a long tail has numbers a little outside of any.
    """
    found = {}
    for name, (low, high) in _ranges_of({name: floats[name] for name in ranges if name in floats}).items():
        least, most = ranges[name]
        below, above = least - low, high - most
        if max(below, above) > most - least:
            found[name] = low if below > above else high
    return found


def _ranges_of(floats: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the range of each feature of shape (n, width) that has one, by one call for all."""
    here = {name: one for name, one in floats.items() if one.device.type == "cpu" and one.numel()}
    if not here:
        return {}
    least, most = (one.tolist() for one in torch.aminmax(torch.cat([*here.values()], 1), dim=0))
    found, begin = {}, 0
    for name, one in here.items():
        end = begin + one.shape[1]
        low, high = min(least[begin:end]), max(most[begin:end])
        if math.isfinite(low) and math.isfinite(high):
            found[name] = low, high
        begin = end
    return found
