"""Where the ids of a batch go: the places of each feature, and the memory that is sent to a device.

    description of features │ ids, table after table │ what models read │ weights │ splits │ numbers

The places of batches of one shape are the same: if every cell has one id, or if batches are padded to the
room of the batch before. See `device_gathering` for why they are padded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda import Carriers, Device
from monolith.errors import FeatureError
from monolith.feature.batches import FeatureIds
from monolith.feature.layouts import RowSplits
from monolith.tensors import RaggedTensor

MOST = 1 << 31
"""Ids, cells or floats that one call on a device may have."""
_ROUNDED = 5  # bits of the room of a table that are not zeros, at most: it is rounded up by 1/16 at most
_LEAST_ROOM = 8
_MOST_PADDED = 1.5  # of the ids of a batch, and some for each table: with more, room is found anew
_SOME = 32
_COMPARED_ALONE = 4  # threads of torch that compare numbers as fast as one of numpy: measured


def sums(numbers: NDArray[np.int64], group_of: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """Return the sum of the numbers of each group."""
    found = np.zeros(groups, np.int64)
    np.add.at(found, group_of, numbers)
    return found


@dataclass(frozen=True, slots=True)
class KeptPart:
    """Where a feature whose IDs a model reads is among the numbers that are sent for that."""

    name: str | None
    """None for the event times of examples."""
    first: int
    """Its row splits begin here."""
    ids: int
    """Its IDs, if they are sent for the model alone."""
    end: int

    def fill(self, numbers: NDArray[np.int64], given: RaggedTensor | Tensor | None) -> None:
        if isinstance(given, RaggedTensor):
            numbers[self.first : self.ids] = given.row_splits.numpy()
            numbers[self.ids : self.end] = 0
            many = min(self.end - self.ids, len(given.flat_values))
            numbers[self.ids : self.ids + many] = given.flat_values.numpy()[:many]
        elif given is not None:
            numbers[self.first : self.end] = given.numpy()


def kept_parts(
    kept: Mapping[str, RaggedTensor], rooms: Mapping[str, int], batch: FeatureIds
) -> list[KeptPart]:
    """Return the parts of the features that a model reads, and of the event times of examples.

    Args:
        rooms: For how many IDs there is room, of features whose IDs are sent for the model alone.
    """
    found, at = list[KeptPart](), 0
    for name, one in kept.items():
        ids = at + len(one.row_splits)
        found.append(KeptPart(name, at, ids, ids + rooms.get(name, 0)))
        at = found[-1].end
    times = batch.event_times
    if kept and times is not None and len(times) == batch.batch_size:
        found.append(KeptPart(None, at, at, at + len(times)))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The places of the ids of a batch. Never changed."""

    about: NDArray[np.uint8]
    """The description of each feature that kernels read, as bytes; then int64, the ids of each table."""
    features: int
    sizes: Tensor
    """int64 of shape (tables,)."""
    floats: int
    """Floats of the rows of all ids."""
    runs: list[tuple[int, int, int]]
    """Ranges of ids to copy: begin in the batch, place on the device, and number."""
    ids: int
    weighs: bool
    padding: list[tuple[int, int, int]]
    """As of `_padding`."""
    shape: Hashable | None = None
    """Equal for batches with the same numbers of ids: one in each cell, or as many as they were padded to."""
    repeats: bool = False
    """Whether all batches of these features and this size have the same."""
    row_splits: RowSplits = field(default_factory=dict)
    """On the device, unless they are among `kept`."""
    kept: tuple[KeptPart, ...] = ()
    """Of a padded batch, what a model reads in addition to rows."""
    rooms: Mapping[int, int] = field(default_factory=dict)
    """Feature of which each ID is kept -> for how many there is room."""


class BatchCells:
    """Where the cells of each feature are, in batches of one shape.

    Args:
        where: The place of each feature among those of the batch; -1 for one that it does not have.
        key: Equal for batches of one shape.
    """

    def __init__(self, where: NDArray[np.int64], batch: FeatureIds, key: Hashable) -> None:
        self.key = key
        shared = np.array(batch.shared, np.bool_)
        begins = np.concatenate([[0], np.cumsum(np.where(shared, 1, batch.batch_size))])
        self.count = int(begins[-1])
        self.there = where >= 0
        self.all_there = bool(self.there.all())
        self.first = begins[where]
        self.end = np.where(self.there, begins[where + 1], self.first)
        self.step = self.there & ~np.append(shared, False)[where]
        self.one_each: Placed | None = None
        """The places of batches in which every cell has one id, without weights."""
        self._room: NDArray[np.int64] | None = None
        """Of the last batch that was padded."""

    def room_for(self, sizes: NDArray[np.int64], active: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return how large rooms are in a batch that has so many ids in each: if possible, as large as in the
        batch before.

        Args:
            active: Which rooms there are; one that has nothing to repeat is none.
        """
        room = self._room
        if room is not None and ((room > 0) != active).any():
            room = None
        most = _MOST_PADDED * sizes.sum() + _SOME * active.sum()
        if room is None or (sizes > room).any() or room.sum() > most:
            # The next batches should fit, too: many examples of independent lengths differ by little more.
            wanted = np.ceil(sizes * (1 + 1 / 16) + 4 * np.sqrt(sizes)).astype(np.int64)
            # bits[i] of wanted[i] are needed for it; all but the first few of them become zeros.
            bits = np.frexp(wanted.astype(np.float64))[1].astype(np.int64)
            step = np.maximum(np.int64(1) << np.maximum(bits - _ROUNDED, 0), _LEAST_ROOM)
            found = np.maximum(-(-wanted // step) * step, _LEAST_ROOM)
            found = np.where(active, found, 0)
            if room is not None and np.maximum(found, room).sum() <= most:
                found = np.maximum(found, room)
            self._room = room = found
        return room


class SentNumber(NamedTuple):
    """Where a tensor is that is sent along with ids."""

    at: int
    end: int
    dtype: torch.dtype
    shape: torch.Size


class Places(NamedTuple):
    """Where the parts of a batch are in its memory."""

    ends: list[int]
    """Of the description of features, ids, what models read, weights and splits."""
    numbers: list[SentNumber]


class StagedParts:
    """What is copied of one batch, in one block of pinned memory.

    Parts are arrays of numpy. To slice or view a tensor gives the interpreter to another thread, and a
    process that reads, packs and saves has thirty of them: to get it back took longer than the copies.
    """

    def __init__(
        self,
        device: Device,
        *,
        features: int,
        ids: int,
        kept: int,
        weights: int,
        splits: int,
        numbers: Sequence[Tensor] = (),
        carriers: Carriers | None = None,
    ) -> None:
        ends = list(accumulate((features, 8 * ids, 8 * kept, 4 * weights, 4 * splits)))
        one, two, three, four, five = ends
        self.places = Places(ends, [])
        self.size = five
        for each in numbers:
            at = -(-self.size // 8) * 8
            self.size = at + each.numel() * each.element_size()
            self.places.numbers.append(SentNumber(at, self.size, each.dtype, each.shape))
        self.size = max(self.size, 1)
        self.carrier = None if carriers is None else carriers.lend(self.size)
        if self.carrier is None:
            self.memory = device.pinned((self.size,), torch.uint8)
            whole: NDArray[np.uint8] = self.memory.numpy()
        else:
            self.memory, whole = self.carrier.host, self.carrier.bytes
        for about, each in zip(self.places.numbers, numbers, strict=True):
            # numpy has no bfloat16; what is copied are its bits.
            values = (each.view(torch.int16) if each.dtype is torch.bfloat16 else each).numpy()
            whole[about.at : about.end].view(values.dtype).reshape(values.shape)[...] = values
        self.features = whole[:one]
        self.ids = whole[one:two].view(np.int64)
        self.kept = whole[two:three].view(np.int64)
        self.weights = whole[three:four].view(np.float32)
        self.splits = whole[four:five].view(np.int32)


def check_splits(batch: FeatureIds, cells: int) -> bool:
    """Check a batch; return whether every cell has one id.

    Raises:
        FeatureError: It does not. In the words of the core.
    """
    check_ends(batch, cells)
    splits, ids = batch.splits, len(batch.ids)
    many_threads = torch.get_num_threads() > _COMPARED_ALONE
    numbers: Any = splits if many_threads else splits.numpy()
    before, after = numbers[:-1], numbers[1:]
    if ids == cells and bool((after > before).all()):
        return True
    if not bool((after >= before).all()):
        raise FeatureError("batch: splits must not fall")
    return False


def check_ends(batch: FeatureIds, cells: int) -> bool:
    """Check what can be seen without looking at all splits; returns True.

    Raises:
        FeatureError: As in `check_splits`.
    """
    splits, ids = batch.splits, len(batch.ids)
    if len(splits) != cells + 1:
        raise FeatureError(
            f"batch: splits must have one entry per cell and one more: expected {cells + 1}, "
            f"got {len(splits)}"
        )
    first, last = int(splits[0]), int(splits[-1])
    if first != 0 or last != ids:
        raise FeatureError(
            f"batch: splits must begin with 0 and end with the number of ids, {ids}: got {first} and {last}"
        )
    if ids >= MOST or cells >= MOST:
        raise FeatureError("batch: a batch on a GPU may have 2^31 - 1 ids")
    return True


def id_runs(
    starts: NDArray[np.int64], firsts: NDArray[np.int32], counts: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of ids to copy: begin, place and number. Ranges adjacent in both are merged."""
    begin = to = count = 0
    for start, first, many in zip(starts.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        if many and count and start == begin + count and first == to + count:
            count += many
        elif many:
            if count:
                yield begin, to, count
            begin, to, count = start, first, many
    if count:
        yield begin, to, count
