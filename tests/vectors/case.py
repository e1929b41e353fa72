"""What a vector is, and how an answer is compared with it.

A vector is `{name, op, inputs, params, expected, tolerance, source}`. The modules beside
this one hold one function per `op`: it gets a `Case` and returns a mapping with at
least the keys of `expected`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monolith.table import Segment, Table, TableConfig

SHIPPED = Path(__file__).parent / "vectors.json"


@dataclass(frozen=True)
class Case:
    """One vector, and the class of table to run it on."""

    vector: Mapping[str, Any]
    table_class: Any

    @property
    def inputs(self) -> Any:
        return self.vector["inputs"]

    @property
    def params(self) -> Any:
        return self.vector["params"]

    def table(self, *segments: Segment, admission: Any = None, **options: Any) -> Table:
        config = TableConfig(name=options.pop("name", "vector"), segments=segments, **options)
        table: Table = self.table_class(config, admission=admission)
        return table


def load(path: Path = SHIPPED) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads(path.read_text())
    return vectors


def differences(expected: Any, found: Any, tolerance: float, at: str = "expected") -> Iterable[str]:
    """Yield where `found` is not what was expected; keys that were not asked for do not matter."""
    if isinstance(expected, Mapping) and set(expected) == {"range"}:
        expected = list(range(*expected["range"]))
    found = found.tolist() if isinstance(found, Tensor | np.ndarray | np.generic) else found
    if isinstance(expected, Mapping):
        for key, value in expected.items():
            if not isinstance(found, Mapping) or key not in found:
                yield f"{at}.{key}: missing from the answer"
            else:
                yield from differences(value, found[key], tolerance, f"{at}.{key}")
    elif isinstance(expected, list):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            yield f"{at}: {found!r} instead of {expected!r}"
        else:
            for position, (want, got) in enumerate(zip(expected, found, strict=True)):
                yield from differences(want, got, tolerance, f"{at}[{position}]")
    elif not _agrees(expected, found, tolerance):
        yield f"{at}: {found!r} instead of {expected!r}"


def _agrees(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(found, int | float) and not isinstance(found, bool) and not isinstance(expected, bool):
        if isinstance(expected, str) and expected.lstrip("-").isdigit():
            return int(expected) == found
        if isinstance(expected, int | float | str):
            want = float(expected)
            same = want == found or (math.isnan(want) and math.isnan(found))
            return same or abs(want - found) <= tolerance
    return bool(expected == found)


# Reading what vectors write


def id_tensor(ids: Iterable[int | str]) -> Tensor:
    """Return int64 ids; those written as unsigned keep their bits."""
    return torch.from_numpy(np.array([int(i) & (1 << 64) - 1 for i in ids], dtype=np.uint64).view(np.int64))


def floats(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
