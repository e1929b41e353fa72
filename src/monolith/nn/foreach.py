"""Lists of tensors, cut into runs that one fused kernel can take.

A model has hundreds of small parameters, and a GPU spends longer starting a kernel
than running it on one of them. torch's `_foreach_` operations start one for a whole
list, provided all of it is on one device and of one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fusable_runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return positions of `tensors` by device and dtype, each run in the order given."""
    runs: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        runs.setdefault((tensor.device, tensor.dtype), []).append(position)
    return list(runs.values())
