"""Nested structures of tensors as a flat list, and back.

What carries tensors (a queue, a wire, a fused op) wants a list. `NestedTensors`
remembers the structure, so the tensors that come out at the other end can be put
where their forerunners stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from monolith.errors import TensorArgumentError
from monolith.tensors.handover import map_leaves
from monolith.tensors.ragged import RaggedTensor

_CONSTANTS = (bool, int, float, str, bytes, nn.Parameter)
"""Leaves that are kept, not carried."""


class _Place:
    """Where a leaf's replacement stands: in the dense tensors, or in the ragged ones.

    Not a dataclass, which would be a container.
    """

    __slots__ = ("position", "ragged")

    def __init__(self, *, ragged: bool, position: int) -> None:
        self.ragged = ragged
        self.position = position


class NestedTensors:
    """A structure of tensors taken apart: tensors aside, constants kept in place.

    Args:
        nested: Dicts, lists, tuples and dataclasses of tensors, ragged tensors of ragged
            rank 1, and constants: None, bool, int, float, str, bytes, and parameters,
            which are shared and so not carried along. Never written to. A tensor that
            appears twice is carried once.

    Raises:
        TensorArgumentError: A leaf is something else.
    """

    def __init__(self, nested: Any) -> None:
        self._dense: list[Tensor] = []
        self._ragged: list[RaggedTensor] = []
        # Addresses tell objects apart only while all of them live, so they stay in here.
        seen: dict[int, _Place] = {}

        def taken_aside(leaf: Any) -> Any:
            if leaf is None or isinstance(leaf, _CONSTANTS):
                return leaf
            if id(leaf) not in seen:
                seen[id(leaf)] = self._add(leaf)
            return seen[id(leaf)]

        self._template = map_leaves(taken_aside, nested)

    def get_tensors(self) -> list[Tensor]:
        """Return the dense tensors in the order they were met, then values and row splits of each ragged."""
        parts = [part for ragged in self._ragged for part in (ragged.flat_values, ragged.row_splits)]
        return [*self._dense, *parts]

    def get_nested_result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with `tensors` in it, one for each of `get_tensors`, in that order."""
        expected = len(self._dense) + 2 * len(self._ragged)
        if len(tensors) != expected:
            raise TensorArgumentError(
                f"the structure holds {expected} tensors, got {len(tensors)} to put in it"
            )
        parts = tensors[len(self._dense) :]
        ragged = [
            RaggedTensor(values, row_splits, validate=False)
            for values, row_splits in zip(parts[::2], parts[1::2], strict=True)
        ]

        def put_back(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return ragged[leaf.position] if leaf.ragged else tensors[leaf.position]
            return leaf

        return map_leaves(put_back, self._template)

    def _add(self, leaf: Any) -> _Place:
        if isinstance(leaf, RaggedTensor):
            if leaf.ragged_rank != 1:
                raise TensorArgumentError("Nested tensor doesn't support nested RaggedTensor.")
            self._ragged.append(leaf)
            return _Place(ragged=True, position=len(self._ragged) - 1)
        if isinstance(leaf, Tensor):
            self._dense.append(leaf)
            return _Place(ragged=False, position=len(self._dense) - 1)
        raise TensorArgumentError(f"Tensor is not supported. {leaf}")
