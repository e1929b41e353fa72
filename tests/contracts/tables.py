"""The tables there are, and small ways to talk to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monolith.table import CudaTable, DictTable, NativeTable


def table_classes() -> list[Any]:
    """Return every implementation of the table seam that works on this machine, the plain one first."""
    return [*dumpable_table_classes(), *([CudaTable] if torch.cuda.is_available() else [])]


def dumpable_table_classes() -> list[Any]:
    """Return those that can be cut, and so be dumped while they are trained."""
    return [DictTable, NativeTable]


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
