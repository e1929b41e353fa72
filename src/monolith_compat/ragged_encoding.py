"""Ragged tensors as plain tensors, for what carries only those, and the steps that undo it.

Reading data may precompute what training needs, such as the row of every value. The result
travels with the values and is put back into the ragged tensor at the other end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import describe
from monolith.tensors.ragged import RaggedTensor

ParseStep = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes the features of a batch by name, returns them changed."""


def expand_ragged(
    ragged: RaggedTensor, *, with_nrows: bool = True, with_value_rowids: bool = False
) -> dict[str, Tensor]:
    """Return `values`, `row_splits` and, where asked for, `nrows` (int64, no shape) and `value_rowids`."""
    if not isinstance(ragged, RaggedTensor) or isinstance(ragged.values, RaggedTensor):
        raise TensorArgumentError(
            f"only a RaggedTensor of ragged rank 1 can be expanded, got {describe(ragged)}"
        )
    encoded = {"values": ragged.values, "row_splits": ragged.row_splits}
    if with_nrows:
        encoded["nrows"] = torch.tensor(ragged.nrows, device=ragged.device)
    if with_value_rowids:
        encoded["value_rowids"] = ragged.value_rowids
    return encoded


def contract_ragged(encoded: Mapping[str, Tensor]) -> RaggedTensor:
    """Return the ragged tensor that `expand_ragged` took apart; precomputed tensors are kept with it."""
    unknown = encoded.keys() - {"values", "row_splits", "nrows", "value_rowids"}
    if unknown or not {"values", "row_splits"} <= encoded.keys():
        raise TensorArgumentError(
            "an expanded ragged tensor has values and row_splits, and may have nrows and value_rowids; "
            f"got {sorted(encoded)}"
        )
    return RaggedTensor(
        encoded["values"], encoded["row_splits"], value_rowids=encoded.get("value_rowids"), validate=False
    )


class ParseSteps:
    """Steps waiting for the next batch that is parsed; each then runs once, first come first served."""

    def __init__(self) -> None:
        self._steps: deque[ParseStep] = deque()

    def add(self, step: ParseStep) -> None:
        self._steps.append(step)

    def run(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return what the waiting steps make of `features`. Steps added by a step run too."""
        while self._steps:
            features = self._steps.popleft()(features)
        return features

    def __len__(self) -> int:
        return len(self._steps)
