"""The tables there are, and small ways to talk to them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import monolith.table
from monolith.table import DictTable


def _core_is_built() -> bool:
    return find_spec("monolith.native") is not None and find_spec("monolith.native._core") is not None


def table_classes() -> list[Any]:
    """Return every implementation of the table seam that this installation has."""
    if _core_is_built() and hasattr(monolith.table, "NativeTable"):
        return [DictTable, monolith.table.NativeTable]
    return [DictTable]


def planned(name: str) -> Any:
    """Return `module.attribute`; an AttributeError or ImportError says what is still to be built."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
