"""Batches: the feature values of a number of examples, as a model reads them.

The ids of all features are in one tensor, feature after feature, so that one call into
the core reads them all. A cell is the ids of one feature in one example; a shared
feature, such as the user of a request with many items, has one cell for all examples.

    names   ("user", "tags")             2 examples: user 17 with tags 3 and 9, user 18 without tags
    ids     [17, 18, 3, 9]               (n,)
    splits  [0, 1, 2, 4, 4]              (cells + 1,): cells of user, then of tags
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from monolith.errors import FeatureError
from monolith.tensors import RaggedTensor


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """How the data stores a column, so that its values can be written as they were read.

    In memory a column is ragged, of int64, float32 or bytes. To join written predictions with the data, more
    is needed: whether a value is a list, a text or bytes, a signed or an unsigned number.
    """

    type: str
    """The type of a value, by its name in Arrow: string, binary, bool, int32, uint64, float, double, ..."""
    single: bool = True
    """Whether a record has one value or none, and not a list."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureIds:
    """The ids of many features. The core checks the splits when a batch is used, and refuses nonsense.

    Shapes: n examples, v IDs of all features together. A cell has the IDs of one feature in one
    example; cells follow each other example by example, feature after feature.

    Examples:
        >>> import torch
        >>> from monolith import RaggedTensor
        >>> from monolith.feature import FeatureIds
        >>> tags = RaggedTensor.from_list([[3, 9], []])
        >>> ids = FeatureIds.pack({"user": torch.tensor([17, 18]), "tags": tags})
        >>> ids.ids, ids.splits  # v = 4 IDs in 4 cells: two of user, two of tags
        (tensor([17, 18,  3,  9]), tensor([0, 1, 2, 4, 4]))
        >>> ids["tags"].row_lengths()
        tensor([2, 0])
    """

    names: tuple[str, ...]
    """Features in the order of their ids. Batches of one source should share the tuple."""
    ids: Tensor
    """int64 of shape (n,), on the CPU: cell after cell, feature after feature."""
    splits: Tensor
    """int64 of shape (cells + 1,), on the CPU: where each cell begins, then n."""
    batch_size: int
    """Examples. A feature has this many cells, or one when it is shared."""
    shared: tuple[bool, ...] = ()
    """Which features have one cell for all; by default none."""
    event_time: int = 0
    """Unix seconds of the newest example."""
    event_times: Tensor | None = None
    """int64 of shape (examples,): Unix seconds of each example, 0 for one without a time; None takes
    `event_time` for all of them. Rows expire by them."""
    weights: Tensor | None = None
    """float32 of shape (n,), on the CPU: by what each id's embedding is multiplied before it is combined; a
    mean is divided by their sum. None is 1 for all."""

    def __post_init__(self) -> None:
        if not self.shared:
            object.__setattr__(self, "shared", (False,) * len(self.names))
        if len(self.shared) != len(self.names):
            raise FeatureError(f"batch: shared has {len(self.shared)} entries for {len(self.names)} features")
        for name, array in (("ids", self.ids), ("splits", self.splits)):
            # `meta` has a shape and no values: the ids of a step that is captured; see `StepGraph`.
            here = array.device.type in ("cpu", "meta")
            if array.dtype is not torch.int64 or array.ndim != 1 or not here:
                raise FeatureError(
                    f"batch: {name} must be int64 of one dimension on the CPU, got "
                    f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)} on {array.device}"
                )
        times = self.event_times
        if times is not None and (times.dtype is not torch.int64 or times.shape != (self.batch_size,)):
            raise FeatureError(
                f"batch: event_times must be int64 of shape ({self.batch_size},), one for each example and 0 "
                f"for one without a time, got {str(times.dtype).removeprefix('torch.')} {tuple(times.shape)}"
            )
        if self.weights is not None and (
            self.weights.dtype is not torch.float32 or self.weights.shape != self.ids.shape
        ):
            raise FeatureError(
                f"batch: weights must be float32 of shape {tuple(self.ids.shape)}, one for each id, got "
                f"{str(self.weights.dtype).removeprefix('torch.')} {tuple(self.weights.shape)}"
            )

    @classmethod
    def pack(
        cls,
        features: Mapping[str, RaggedTensor | Tensor],
        *,
        shared: Iterable[str] = (),
        event_time: int = 0,
        event_times: Tensor | None = None,
        batch_size: int | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> FeatureIds:
        """Pack the ids of several features into one tensor.

        Args:
            features: Ragged int64 ids with one row per example; or a tensor of shape (examples,) or
                (examples, k), whose features then have one id, or k, in each example.
            shared: Features of one row, which counts for every example.
            batch_size: Needed only when all features are shared.
            weights: Feature to a number for each of its ids, in their order; 1 for all others.
        """
        single = set(shared)
        if unknown := single - features.keys():
            raise FeatureError(f"batch: shared names features that are not there: {sorted(unknown)}")
        ragged = {name: _ragged(name, feature) for name, feature in features.items()}
        sizes = {name: rows.nrows for name, rows in ragged.items() if name not in single}
        if batch_size is None:
            if not sizes:
                raise FeatureError(
                    "batch: give batch_size, since no feature says how many examples there are"
                )
            batch_size = next(iter(sizes.values()))
        for name, rows in ragged.items():
            wanted = 1 if name in single else batch_size
            if rows.nrows != wanted:
                raise FeatureError(f"batch: feature {name!r} has {rows.nrows} rows instead of {wanted}")
        splits, offset = [torch.zeros(1, dtype=torch.int64)], 0
        for rows in ragged.values():
            splits.append(rows.row_splits[1:] + offset)
            offset += len(rows.flat_values)
        ids = [rows.flat_values for rows in ragged.values()]
        return cls(
            names=tuple(ragged),
            ids=torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64),
            splits=torch.cat(splits),
            batch_size=batch_size,
            shared=tuple(name in single for name in ragged),
            event_time=event_time,
            event_times=event_times,
            weights=_weights(ragged, weights) if weights else None,
        )

    @classmethod
    def one_each(cls, names: Sequence[str], ids: Tensor, *, event_time: int = 0) -> FeatureIds:
        """Take int64 ids of shape (examples, features): one id of each feature in each example."""
        if ids.ndim != 2 or ids.shape[1] != len(names):
            raise FeatureError(f"batch: ids must have shape (examples, {len(names)}), got {tuple(ids.shape)}")
        return cls(
            names=tuple(names),
            ids=ids.t().reshape(-1),
            splits=one_each_splits(ids.numel()),
            batch_size=len(ids),
            event_time=event_time,
        )

    def __getitem__(self, name: str) -> RaggedTensor:
        """Return one feature's ids, a row per cell, over the same memory."""
        if name not in self.names:
            raise FeatureError(f"batch has no feature {name!r}; it has {', '.join(self.names)}")
        position = self.names.index(name)
        cells = [1 if one else self.batch_size for one in self.shared]
        first = sum(cells[:position])
        splits = self.splits[first : first + cells[position] + 1]
        return RaggedTensor(self.ids[int(splits[0]) : int(splits[-1])], splits - splits[0])

    def first(self, name: str) -> Tensor:
        """Return the first id of a feature in each example, int64 of shape (examples,); 0 where none is."""
        ids = self[name]
        padded = torch.cat([ids.flat_values, ids.flat_values.new_zeros(1)])
        none = len(padded) - 1
        first = padded[torch.where(ids.row_lengths() > 0, ids.row_splits[:-1], none)]
        return first if ids.nrows == len(self) else first.expand(len(self))

    def example_times(self) -> int | Tensor:
        """Return the event time that each example gives the rows of its IDs: one number if all have the same.

        An example without a time counts as new as the newest: a row too many is cheaper than one too few.
        """
        times = self.event_times
        if times is None or not len(times):
            return self.event_time
        oldest, newest = (int(one) for one in torch.aminmax(times))
        newest = max(newest, self.event_time)
        if newest in (oldest, 0):
            return newest
        return times if oldest > 0 else torch.where(times > 0, times, newest)

    def __len__(self) -> int:
        return self.batch_size


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The input of a model for n examples, and their labels.

    Shapes: n examples, v IDs of all features together. IDs are int64 of shape (v,), floats float32 of shape
    (n, width), labels float32 of shape (n,).

    Examples:
        >>> import torch
        >>> from monolith import Batch, RaggedTensor
        >>> from monolith.feature import FeatureIds
        >>> tags = RaggedTensor.from_list([[3, 9], []])
        >>> ids = FeatureIds.pack({"user": torch.tensor([17, 18]), "tags": tags})
        >>> price, click = torch.tensor([[0.5], [2.0]]), torch.tensor([1.0, 0.0])
        >>> batch = Batch(ids, floats={"price": price}, labels={"click": click})
        >>> len(batch), batch.ids.ids  # all IDs of all features: user, then tags
        (2, tensor([17, 18,  3,  9]))
        >>> batch.ids["tags"].row_lengths()
        tensor([2, 0])
    """

    ids: FeatureIds
    floats: Mapping[str, Tensor] = field(default_factory=dict)
    """Features that are numbers already: float32 of shape (examples, width)."""
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    """By task: float32 of shape (examples,)."""
    raw: Mapping[str, RaggedTensor] = field(default_factory=dict)
    """Columns of the data as they were read, if the caller asked for some; models do not read them."""
    raw_kinds: Mapping[str, ColumnKind] = field(default_factory=dict)
    """How the data stores the columns of `raw`, if that is known."""
    group: str | None = None
    """The feature of ids that groups examples for metrics by group, such as the user."""

    def __post_init__(self) -> None:
        for kind, tensors in (("feature", self.floats), ("label", self.labels)):
            for name, tensor in tensors.items():
                if not len(tensor) == self.ids.batch_size:
                    raise FeatureError(
                        f"batch: {kind} {name!r} has {len(tensor)} rows for {self.ids.batch_size} examples"
                    )

    @classmethod
    def of_none(cls) -> Batch:
        """Return a batch of no examples: the part of a rank without data in a step of the other ranks."""
        return cls(FeatureIds.pack({}, batch_size=0))

    @property
    def label(self) -> Tensor:
        """The label of a batch with one task."""
        if len(self.labels) != 1:
            raise FeatureError(f"batch has {len(self.labels)} labels: choose from `labels`")
        return next(iter(self.labels.values()))

    @property
    def groups(self) -> Tensor | None:
        """The group of each example, int64: its first id of `group`, 0 if it has none; None without a
        group."""
        return None if self.group is None else self.ids.first(self.group)

    def on(self, device: torch.device, *, labels: bool = True) -> Batch:
        """Return the batch with its floats and labels on a device. IDs stay in host memory.

        Args:
            labels: Whether labels are copied, too.
        """

        def there(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

        return replace(self, floats=there(self.floats), labels=there(self.labels) if labels else self.labels)

    def __len__(self) -> int:
        return self.ids.batch_size


def _weights(features: Mapping[str, RaggedTensor], weights: Mapping[str, Tensor]) -> Tensor:
    """Return a weight for each id of all features."""
    if unknown := weights.keys() - features.keys():
        raise FeatureError(f"batch: weights names features that are not there: {sorted(unknown)}")
    parts = []
    for name, rows in features.items():
        count = len(rows.flat_values)
        found = weights.get(name)
        if found is not None and found.shape != (count,):
            raise FeatureError(f"batch: feature {name!r} has {count} ids and weights {tuple(found.shape)}")
        parts.append(torch.ones(count) if found is None else found.to("cpu", torch.float32))
    return torch.cat(parts)


@lru_cache(maxsize=16)
def one_each_splits(cells: int) -> Tensor:
    """Return the splits of cells with one ID each: 0, 1, 2, ...

    All such batches share one tensor, which is never changed. So they are recognised by it, and 200,000
    numbers are neither written nor compared for each of them.
    """
    return torch.arange(cells + 1)


def newest_of_each(times: RaggedTensor) -> Tensor:
    """Return the newest event time of each example, int64 of shape (examples,); 0 for one without a time."""
    flat, lengths = times.flat_values, times.row_lengths()
    if len(flat) == len(lengths) and bool((lengths == 1).all()):
        return flat
    examples = torch.repeat_interleave(lengths)
    return flat.new_zeros(len(lengths)).scatter_reduce_(0, examples, flat, "amax")


def _ragged(name: str, feature: RaggedTensor | Tensor) -> RaggedTensor:
    if isinstance(feature, RaggedTensor):
        ragged = feature
    elif isinstance(feature, Tensor) and feature.ndim in (1, 2):
        examples, each = len(feature), 1 if feature.ndim == 1 else feature.shape[1]
        splits = (
            torch.arange(0, examples * each + 1, max(each, 1))
            if each
            else torch.zeros(examples + 1, dtype=torch.int64)
        )
        ragged = RaggedTensor(feature.reshape(-1), splits, validate=False)
    else:
        raise FeatureError(f"batch: feature {name!r} must be ragged, or a tensor of one or two dimensions")
    if ragged.ragged_rank != 1 or ragged.dtype is not torch.int64 or ragged.flat_values.ndim != 1:
        raise FeatureError(f"batch: feature {name!r} must hold int64 ids in rows, got {ragged!r}")
    return ragged
