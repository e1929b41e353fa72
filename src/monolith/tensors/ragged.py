"""Ragged tensors: rows of different lengths, stored end to end.

A batch of examples has three ids here and none there. Padding them would waste
memory and confuse zero with absent, so all values are in one tensor and the row
splits say where each row begins: row i is `values[row_splits[i]:row_splits[i + 1]]`.
Values may be ragged themselves, which gives rows of rows.

    rows          [[3, 9], [], [7]]           [["hi", "you"], []], as bytes
    values        [3, 9, 7]                   rows [[104, 105], [121, 111, 117]]
    row_splits    [0, 2, 2, 3]                [0, 2, 2]
    ragged_rank   1                           2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import check_indices, describe


class RaggedTensor:
    """Rows of different lengths. Never changes once built; two are equal only if they are one object.

    Shapes: nrows rows, n values in all rows together.

    Args:
        values: The values of all rows, one after the other: a tensor of shape (n, ...),
            or a RaggedTensor of n rows.
        row_splits: int64 of shape (nrows + 1,), from 0 up to n, never falling, on the
            device of `values`.
        value_rowids: The row of every value, where that is known already.
        validate: Whether to look into `row_splits`. That waits for a CUDA device, so
            code that computed the splits itself passes False. Shapes, dtypes and
            devices are checked in any case.

    Raises:
        TensorArgumentError: `values` and `row_splits` do not describe rows.

    Examples:
        >>> from monolith import RaggedTensor
        >>> tags = RaggedTensor.from_list([[3, 9], [], [7]])
        >>> tags.flat_values, tags.row_splits  # (n,) and (nrows + 1,)
        (tensor([3, 9, 7]), tensor([0, 2, 2, 3]))
        >>> tags.row_lengths()
        tensor([2, 0, 1])
        >>> tags.to_padded(2)
        tensor([[3, 9],
                [0, 0],
                [7, 0]])
    """

    __slots__ = ("__weakref__", "_row_splits", "_value_rowids", "_values")

    _values: Tensor | RaggedTensor
    _row_splits: Tensor
    _value_rowids: Tensor | None

    def __init__(
        self,
        values: Tensor | RaggedTensor,
        row_splits: Tensor,
        *,
        value_rowids: Tensor | None = None,
        validate: bool = True,
    ) -> None:
        _check_parts(values, row_splits, value_rowids)
        if validate:
            _check_splits(row_splits, len(values))
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_row_splits", row_splits)
        object.__setattr__(self, "_value_rowids", value_rowids)

    @classmethod
    def from_row_lengths(
        cls, values: Tensor | RaggedTensor, row_lengths: Tensor, *, validate: bool = True
    ) -> RaggedTensor:
        """Build from int64 row lengths of shape (nrows,), which must sum to `len(values)`."""
        if (
            not isinstance(row_lengths, Tensor)
            or row_lengths.dtype is not torch.int64
            or row_lengths.ndim != 1
        ):
            raise TensorArgumentError(
                f"row_lengths must be int64 of shape (nrows,), got {describe(row_lengths)}"
            )
        row_splits = row_lengths.new_zeros(len(row_lengths) + 1)
        torch.cumsum(row_lengths, 0, out=row_splits[1:])
        return cls(values, row_splits, validate=validate)

    @classmethod
    def from_list(
        cls, rows: Sequence[Any], dtype: torch.dtype | None = None, ragged_rank: int | None = None
    ) -> RaggedTensor:
        """Build from nested lists.

        Args:
            rows: Nested lists; all numbers are at the same depth.
            dtype: By default what torch infers, and float32 when there is no number.
            ragged_rank: How many dimensions may vary in length; the ones below must be
                uniform. By default every dimension below the first is ragged.
        """
        depth = _depth(rows)
        rank = max(depth - 1, 1) if ragged_rank is None else ragged_rank
        if rank < 1:
            raise TensorArgumentError(f"ragged_rank must be at least 1, got {rank}")
        flat: list[Any] = list(rows)
        all_splits = []
        for _ in range(rank):
            if not all(isinstance(row, list | tuple) for row in flat):
                raise TensorArgumentError(
                    f"cannot read {rows!r} as ragged rank {rank}: there is a number instead of a row"
                )
            lengths = torch.tensor([0, *map(len, flat)], dtype=torch.int64)
            all_splits.append(lengths.cumsum(0))
            flat = [value for row in flat for value in row]
        try:
            values: Tensor | RaggedTensor = torch.tensor(flat, dtype=dtype)
        except (ValueError, TypeError) as cause:
            raise TensorArgumentError(f"cannot read {rows!r} as ragged rank {rank}: {cause}") from cause
        for row_splits in reversed(all_splits):
            values = cls(values, row_splits, validate=False)
        assert isinstance(values, cls)
        return values

    @classmethod
    def from_nested(cls, nested: Tensor) -> RaggedTensor:
        """Build from torch's jagged NestedTensor of shape (nrows, *, ...); only holes cost a copy."""
        if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout is not torch.jagged:
            raise TensorArgumentError(
                f"nested must be a NestedTensor of layout torch.jagged, got {describe(nested)}"
            )
        if not isinstance(nested.shape[1], torch.SymInt):
            raise TensorArgumentError(f"nested must vary in dimension 1, got shape {tuple(nested.shape)}")
        packed: Any = nested if nested.is_contiguous() else nested.contiguous()
        return cls(packed.values(), packed.offsets().to(torch.int64), validate=False)

    def to_nested(self) -> Tensor:
        """Return torch's jagged NestedTensor over the same memory; ragged rank 1 only."""
        nested: Tensor = torch.nested.nested_tensor_from_jagged(
            self._dense_values("to_nested"), self._row_splits
        )
        return nested

    @property
    def values(self) -> Tensor | RaggedTensor:
        """The rows end to end: shape (n, ...), or ragged when the rows contain rows."""
        return self._values

    @property
    def flat_values(self) -> Tensor:
        """The innermost values, which are always a tensor."""
        values = self._values
        return values.flat_values if isinstance(values, RaggedTensor) else values

    @property
    def row_splits(self) -> Tensor:
        """int64 of shape (nrows + 1,): where each row begins, and the end of the last."""
        return self._row_splits

    @property
    def nrows(self) -> int:
        return self._row_splits.shape[0] - 1

    @property
    def ragged_rank(self) -> int:
        """How many dimensions vary in length: 1 when `values` is a tensor."""
        return 1 + (self._values.ragged_rank if isinstance(self._values, RaggedTensor) else 0)

    @property
    def dtype(self) -> torch.dtype:
        return self.flat_values.dtype

    @property
    def device(self) -> torch.device:
        return self._row_splits.device

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Sizes of the dimensions; None for those that vary."""
        return (self.nrows, None, *tuple(self._values.shape)[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def value_rowids(self) -> Tensor:
        """int64 of shape (n,): the row of every value. Computed once, then the same object."""
        if self._value_rowids is None:
            rows = torch.arange(self.nrows, device=self.device)
            # The size is known here; without it, torch would ask the device.
            rowids = torch.repeat_interleave(rows, self.row_lengths(), output_size=len(self._values))
            object.__setattr__(self, "_value_rowids", rowids)
        assert self._value_rowids is not None
        return self._value_rowids

    def row_lengths(self) -> Tensor:
        """Return int64 of shape (nrows,)."""
        return self._row_splits[1:] - self._row_splits[:-1]

    def with_values(self, values: Tensor | RaggedTensor) -> RaggedTensor:
        """Return the same rows holding other values: one for each value here."""
        if len(values) != len(self._values):
            raise TensorArgumentError(f"with_values needs {len(self._values)} values, got {len(values)}")
        return RaggedTensor(values, self._row_splits, value_rowids=self._value_rowids, validate=False)

    def with_flat_values(self, flat_values: Tensor) -> RaggedTensor:
        """Return the same rows, and rows of rows, holding other innermost values."""
        if isinstance(self._values, RaggedTensor):
            return self.with_values(self._values.with_flat_values(flat_values))
        return self.with_values(flat_values)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RaggedTensor:
        """Return a copy on `device`, or this very object if it lives there."""
        values = self._values.to(device, non_blocking=non_blocking)
        row_splits = self._row_splits.to(device, non_blocking=non_blocking)
        return self._replaced(values, row_splits)

    def pin_memory(self) -> RaggedTensor:
        """Return a copy in page-locked memory, from which a device can copy while the host works on."""
        return self._replaced(self._values.pin_memory(), self._row_splits.pin_memory())

    def to_list(self) -> list[Any]:
        """Return nested lists of numbers."""
        values = self._values.to_list() if isinstance(self._values, RaggedTensor) else self._values.tolist()
        splits = self._row_splits.tolist()
        return [values[begin:end] for begin, end in pairwise(splits)]

    def to_padded(self, max_length: int | None = None, padding: float = 0) -> Tensor:
        """Return a tensor of shape (nrows, max_length, ...); ragged rank 1 only.

        Longer rows lose their end, shorter ones are filled with `padding`. Without a
        `max_length` the longest row decides, and a CUDA device is waited for.
        """
        values = self._dense_values("to_padded")
        if max_length is None:
            max_length = int(self.row_lengths().max()) if self.nrows else 0
        elif max_length < 0:
            raise TensorArgumentError(f"max_length must not be negative, got {max_length}")
        shape = (self.nrows, max_length, *values.shape[1:])
        if not len(values):
            return values.new_full(shape, padding)
        columns = torch.arange(max_length, device=self.device)
        positions = (self._row_splits[:-1, None] + columns).clamp(max=len(values) - 1)
        present = columns < self.row_lengths()[:, None]
        present = present.reshape(*present.shape, *[1] * (values.ndim - 1))
        return torch.where(present, values[positions], values.new_full((), padding))

    def __len__(self) -> int:
        return self.nrows

    def __repr__(self) -> str:
        return f"RaggedTensor(shape={self.shape}, dtype={self.dtype}, device={str(self.device)!r})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"a RaggedTensor never changes: cannot set {name!r}; build a new one, or use with_values"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a RaggedTensor never changes: cannot delete {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._values, self._row_splits)

    def _replaced(self, values: Tensor | RaggedTensor, row_splits: Tensor) -> RaggedTensor:
        if values is self._values and row_splits is self._row_splits:
            return self
        return RaggedTensor(values, row_splits, validate=False)

    def _dense_values(self, call: str) -> Tensor:
        if isinstance(self._values, RaggedTensor):
            raise TensorArgumentError(f"{call} needs ragged rank 1, got {self.ragged_rank}")
        return self._values


def fused_value_rowids(rt: RaggedTensor) -> Tensor:
    """Return the row of every value of `rt`: the same object each time."""
    if not isinstance(rt, RaggedTensor):
        raise TensorArgumentError("rt must be RaggedTensor")
    return rt.value_rowids


def gen_seq_mask(row_splits: Tensor | RaggedTensor, max_seq_length: int) -> Tensor:
    """Return 1 where a row has a value: shape (nrows, max_seq_length), of the dtype of the splits."""
    splits = row_splits.row_splits if isinstance(row_splits, RaggedTensor) else row_splits
    if not isinstance(splits, Tensor) or splits.dtype not in (torch.int32, torch.int64) or splits.ndim != 1:
        raise TensorArgumentError(
            "row_splits must be a RaggedTensor, or int32 or int64 of shape (nrows + 1,), "
            f"got {describe(splits)}"
        )
    if not len(splits):
        raise TensorArgumentError("row_splits must hold at least the 0 it begins with, got none")
    if max_seq_length < 0:
        raise TensorArgumentError(f"max_seq_length must not be negative, got {max_seq_length}")
    lengths = splits[1:] - splits[:-1]
    return (torch.arange(max_seq_length, device=splits.device) < lengths[:, None]).to(splits.dtype)


def maybe_squeeze_3d_tensor(ragged: RaggedTensor) -> RaggedTensor:
    """Return `ragged` in two dimensions: as it is, or without dimension 1 if that has size 1 throughout."""
    if not isinstance(ragged, RaggedTensor):
        raise TensorArgumentError("input must be RaggedTensor")
    if ragged.ndim == 2:
        return ragged
    if ragged.ndim != 3:
        raise TensorArgumentError(f"input must have 2 or 3 dimensions, got shape {ragged.shape}")
    if not bool((ragged.row_lengths() == 1).all()):
        raise TensorArgumentError(
            f"cannot squeeze dimension 1 of shape {ragged.shape}: not every row has length 1"
        )
    values = ragged.values
    if isinstance(values, RaggedTensor):
        return values
    width = values.shape[1]
    row_splits = torch.arange(ragged.nrows + 1, device=ragged.device) * width
    return RaggedTensor(values.reshape(-1), row_splits, validate=False)


def normalize_merged_split(row_split: Tensor, row_split_size: Tensor | Sequence[int]) -> Tensor:
    """Return one vector of row splits for several that are concatenated.

    Each part but the first drops the 0 it begins with, and its splits are shifted by the
    values of the parts before.

    Args:
        row_split: int64 of shape (n,): row splits of all parts, end to end.
        row_split_size: How many of them each part has, at least 1 each.
    """
    check_indices(row_split, "row_split")
    sizes = torch.as_tensor(row_split_size, dtype=torch.int64, device=row_split.device)
    if sizes.ndim != 1 or int(sizes.sum()) != len(row_split) or bool((sizes < 1).any()):
        raise TensorArgumentError(
            f"row_split_size must hold numbers from 1 that sum to {len(row_split)}, got {sizes.tolist()}"
        )
    if not len(sizes):
        return row_split.new_zeros(1)
    ends = sizes.cumsum(0)
    totals = row_split[ends - 1]
    shift = torch.repeat_interleave(totals.cumsum(0) - totals, sizes, output_size=len(row_split))
    kept = torch.ones_like(row_split, dtype=torch.bool)
    kept[ends[:-1]] = False
    return (row_split + shift)[kept]


def ranges(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Return `starts[i], starts[i] + 1, ...`, `lengths[i]` of them, for every i end to end.

    `total` is the sum of the lengths; without it, this waits for a CUDA device.
    """
    total = int(lengths.sum()) if total is None else total
    first = starts - (lengths.cumsum(0) - lengths)
    if first.is_cpu:  # numpy's has no threads to wake, which costs more than the work where cores are busy
        return torch.from_numpy(np.repeat(first.numpy(), lengths.numpy())) + torch.arange(total)
    shift = torch.repeat_interleave(first, lengths, output_size=total)
    return shift + torch.arange(total, device=starts.device)


def _check_parts(values: object, row_splits: object, value_rowids: object) -> None:
    """Refuse what is visible without asking a device."""
    if not isinstance(values, RaggedTensor) and not (isinstance(values, Tensor) and values.ndim):
        raise TensorArgumentError(
            f"values must be a tensor of shape (n, ...) or ragged, got {describe(values)}"
        )
    if (
        not isinstance(row_splits, Tensor)
        or row_splits.dtype is not torch.int64
        or row_splits.ndim != 1
        or not row_splits.shape[0]
    ):
        raise TensorArgumentError(
            f"row_splits must be int64 of shape (nrows + 1,), got {describe(row_splits)}"
        )
    if values.device != row_splits.device:
        raise TensorArgumentError(
            f"values and row_splits must share a device, got {values.device} and {row_splits.device}"
        )
    if value_rowids is not None and not (
        isinstance(value_rowids, Tensor) and value_rowids.shape == (len(values),)
    ):
        raise TensorArgumentError(
            f"value_rowids must be int64 of shape ({len(values)},), got {describe(value_rowids)}"
        )


def _check_splits(row_splits: Tensor, n: int) -> None:
    # Joined before it is read: one wait for the device instead of three.
    good = (row_splits[0] == 0) & (row_splits[-1] == n) & (row_splits[1:] >= row_splits[:-1]).all()
    if not bool(good):
        raise TensorArgumentError(
            f"row_splits must rise from 0 to the {n} values there are, got {row_splits.tolist()}"
        )


def _depth(rows: object) -> int:
    """Return how deep the lists are nested."""
    if not isinstance(rows, list | tuple):
        return 0
    return 1 + max(map(_depth, rows), default=0)


def _rebuilt(values: Tensor | RaggedTensor, row_splits: Tensor) -> RaggedTensor:
    """Unpickle: splits that were checked once are not checked again."""
    return RaggedTensor(values, row_splits, validate=False)
