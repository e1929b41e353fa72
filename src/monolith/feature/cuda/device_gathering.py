"""Gathering on a CUDA device: ids are copied to it, and all further work on a batch happens there.

Duplicates are not removed: rows are looked up as ids occur, table after table, and a gradient belongs to an
occurrence. So the host knows all sizes without asking the device, and never waits for it. One launch fills
all outputs of a model, another propagates their gradients (a third, before it, if features are shared).

A launch that is captured has the number of ids of each table in it. Batches of ragged features are therefore
padded: each table gets room for some more ids than it has, and the rest repeats its last one, with gradients
of 0, so that the sum of the id's gradients is the same. Room follows the batches: after the first ones nearly
all have the same, and one graph trains them.

    ids of a table   [ feature a ][ feature b ][ last id, last id, ... ]
    its room         [---------------------------------------------------]

The rows of one feature follow each other, so that an output which keeps each ID of a feature is a part of
the rows. Such a feature gets room of its own in its table, so that all batches of a shape have that part at
one place. A model that says so (`PaddedSteps`) gets all of the room: values behind the last ID are zeros, no
gradient comes back from them, and the row splits, which the device has, end before them. Without that, such
batches have no shape in common, and no graph is captured for them.

    ids of a table   [ history, last id, ... ][ item ][ last id, ... ]
    its rooms        [-----------------------][----------------------]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda import Carrier, Carriers, Device, blocks_for
from monolith.errors import AcceleratorError, FeatureError
from monolith.feature.batches import FeatureIds, one_each_splits
from monolith.feature.combiners import Max
from monolith.feature.cuda.batch_places import (
    MOST,
    BatchCells,
    KeptPart,
    Placed,
    Places,
    StagedParts,
    check_ends,
    check_splits,
    id_runs,
    kept_parts,
    sums,
)
from monolith.feature.cuda.device_plan import FEATURE, PART, BatchStruct, DevicePlan
from monolith.feature.gathering import Scaled
from monolith.feature.layouts import LayoutPlan, LayoutTensor
from monolith.tensors import RaggedTensor

_EXAMPLES = _FLOATS = 4  # that a thread does, as in layouts.cu
_SHAPES = 16  # of batches that are remembered


@dataclass(frozen=True, slots=True)
class PaddedSteps:
    """What a model reads of histories that may be padded: values behind the last row split are no steps."""

    aligned: tuple[str, ...]
    """Features with a value for each step: the history, its companions, and its times."""
    read: tuple[str, ...] = ()
    """Other features whose IDs the model reads."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceIds(FeatureIds):
    """The IDs of a step that is captured: only those that `PaddedSteps` names, on the device, and padded.

    Tensors of all IDs have a shape and no values.
    """

    there: Mapping[str, RaggedTensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> RaggedTensor:
        """Return one feature's IDs on the device; those behind the last row split are of no example.

        Raises:
            AcceleratorError: They are not there.
        """
        if name not in self.there:
            raise AcceleratorError(f"the model reads the IDs of feature {name!r} by itself")
        return self.there[name]


class DeviceGatherer:
    """All layouts of one model, ready for batches whose rows are on a device. Thread-safe."""

    distinct = False

    def __init__(self, plan: LayoutPlan, device: Device) -> None:
        self.plan = plan
        self.device = device
        self.on_device = DevicePlan(plan, device)
        self._upload = device.new_stream()
        self._shapes: dict[tuple[tuple[str, ...], tuple[bool, ...], int], BatchCells] = {}
        order, tables = self.on_device.order, self.on_device.table_of
        self._maxima = [isinstance(plan.features[f].combiner, Max) for f in order]
        jagged = np.isin(np.array(order, np.int64), plan.jagged)
        self._jagged: NDArray[np.int64] = np.flatnonzero(jagged)
        """Places in the order of features of which each ID is kept."""
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (tables[1:] != tables[:-1]) | jagged[1:] | jagged[:-1]
        self._room_of: NDArray[np.int64] = np.cumsum(begins) - 1
        """By place in the order: the room that a feature is in, one or more for each table."""
        self._table_of_room: NDArray[np.int64] = tables[begins]
        self._combines_all = not any(feature.combiner.length for feature in plan.features)

    def read(
        self,
        batch: FeatureIds,
        *,
        in_place_of_ids: Callable[[Tensor], None] | None = None,
        one_each: bool | None = None,
        padded: bool = False,
        steps: PaddedSteps | None = None,
        numbers: Sequence[Tensor] = (),
        carriers: Carriers | None = None,
    ) -> DeviceBatch:
        """Copy a batch to the device. Features the model does not read are ignored.

        It is on its way when this returns, by a stream of its own, for which the current one waits; or, with
        carriers, those that call `arrive`.

        Args:
            in_place_of_ids: Fills what goes up for each occurrence, int64, table after table; by default the
                ids of the batch do.
            one_each: Whether every cell that is read has exactly one id, as a caller knows that has found the
                splits sound; None looks.
            padded: Whether a batch with other numbers of ids may be padded, to have the `shape` of others.
            steps: What the model reads of padded histories; None if it takes none.
            numbers: To send along: `DeviceBatch.numbers`.
            carriers: Lend the memory for it.

        Raises:
            FeatureError: The splits do not fit the ids, or the number of examples.
        """
        cells = self._cells(batch)
        if one_each is None:
            each = one_each_splits(cells.count)  # those of most batches, which are recognised by one look
            same = batch.splits is each or (len(batch.ids) == cells.count and torch.equal(batch.splits, each))
            one_each = (check_ends if same else check_splits)(batch, cells.count)
        splits = batch.splits.numpy()
        kept: dict[str, RaggedTensor] = {}
        if self.plan.jagged and padded:
            kept = {} if steps is None else self._kept(batch, steps)
            padded, one_each = bool(kept), one_each and not kept
        if one_each and batch.weights is None and (splits[cells.first] == cells.first).all():
            known = cells.one_each  # as in every batch of this shape
            if known is None:
                repeats = not self.plan.jagged
                known = cells.one_each = replace(
                    self._placed(batch, cells, splits), shape=cells.key if repeats else None, repeats=repeats
                )
        else:
            known = self._placed(batch, cells, splits, padded=padded, one_each=one_each, kept=kept)
        if self.plan.jagged and not known.kept:
            found = self.plan.row_splits(batch)
            there = {feature: self._sent(self._pinned(one)) for feature, one in found.items()}
            known = replace(known, row_splits=there)
        staged = StagedParts(
            self.device,
            features=len(known.about),
            ids=known.ids,
            kept=known.kept[-1].end if known.kept else 0,
            weights=known.ids if known.weighs else 0,
            splits=0 if one_each else len(splits),
            numbers=numbers,
            carriers=carriers,
        )
        staged.features[:] = known.about
        ids = torch.from_numpy(staged.ids)
        if in_place_of_ids is not None:
            in_place_of_ids(ids)
        elif known.runs == [(0, 0, len(ids))] and len(batch.ids) == len(ids):
            ids.copy_(batch.ids)  # by several threads if it is long
        else:
            for source, to, count in known.runs:
                ids[to : to + count].copy_(batch.ids[source : source + count])
        if batch.weights is not None and known.weighs:
            weights = batch.weights.numpy()
            for source, to, count in known.runs:
                staged.weights[to : to + count] = weights[source : source + count]
        for first, end, source in known.padding:
            staged.ids[first:end] = staged.ids[source]
            if known.weighs:
                staged.weights[first:end] = 0  # the memory may hold anything, such as NaN
        for part in known.kept:
            part.fill(staged.kept, batch.event_times if part.name is None else kept[part.name])
        if not one_each:
            staged.splits[:] = splits
        carrier, memory = staged.carrier, staged.memory
        if carriers is None or carrier is None:
            buffer = self._sent(memory)
        else:
            carriers.send(carrier, staged.size)
            buffer = carrier.there[: staged.size]
        sent = DeviceBatch(
            self,
            buffer,
            staged.places,
            known,
            batch.batch_size,
            plain=one_each and not known.weighs and cells.all_there and self._combines_all,
            shared=any(batch.shared),
            host_ids=ids,
        )
        sent.carrier = carrier
        return sent

    def sum_equal(
        self, ids: Tensor, sizes: Tensor, gradients: Tensor, known: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Give the first of equal ids of a table the sum of their gradients, and the repeats zeros.

        So norms are those of what rows are trained by, and what is applied is the same.

        Args:
            ids: int64, as they occur, table after table.
            sizes: int64 of shape (tables,), on the CPU.
            gradients: float32, laid out as the rows of the ids.
            known: The result of `about_tables`, if the caller has it.

        Returns:
            As `gradients`. Nothing is waited for.
        """
        n = len(ids)
        if n == 0:
            return gradients.clone()
        device = self.device
        with device.active():
            about, ends = self.about_tables(sizes) if known is None else known
            positions = torch.arange(n, device=device.torch_device)
            tables = torch.bucketize(positions, ends, right=True, out_int32=True)
            by_id = torch.argsort(ids, stable=True)
            order = by_id[torch.argsort(tables[by_id], stable=True)]
            out = torch.empty_like(gradients)
            self.launch(
                "sum_equal",
                blocks_for(n * 32),
                ids,
                tables,
                order,
                about,
                n,
                gradients.contiguous(),
                out,
            )
        return out

    def about_tables(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the structs Part of all tables, and where the ids of each end, on the device."""
        dims, device = self.on_device.dims, self.device
        many = sizes.numpy()
        parts = np.zeros(len(dims), PART)
        parts["first"] = np.cumsum(many) - many
        parts["floats"] = np.cumsum(many * dims) - many * dims
        parts["dim"] = dims
        pinned = device.pinned((parts.nbytes + 8 * len(dims),), torch.uint8)
        pinned.numpy()[:] = np.concatenate([parts.view(np.uint8), np.cumsum(many).view(np.uint8)])
        about = torch.empty_like(pinned, device=device.torch_device, pin_memory=False)
        about.copy_(pinned, non_blocking=True)
        return about, about[parts.nbytes :].view(torch.int64)

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        """Launch one of the plan's kernels on the current stream."""
        stream = self.device.current_stream().handle
        self.on_device.kernels.launch(kernel, blocks, *arguments, stream=stream)

    def _kept(self, batch: FeatureIds, steps: PaddedSteps) -> dict[str, RaggedTensor]:
        """Return the features whose IDs a model reads; nothing if those of a step do not belong together,
        which a step without a graph reports."""
        of_plan = {self.plan.features[f].name: splits for f, splits in self.plan.row_splits(batch).items()}
        names = [*of_plan, *(name for name in (*steps.aligned, *steps.read) if name not in of_plan)]
        found = {name: batch[name] for name in names if name in batch.names}
        nothing = torch.zeros(0, dtype=torch.int64)
        found |= {name: RaggedTensor(nothing, one) for name, one in of_plan.items() if name not in found}
        aligned = [found[name].row_splits for name in steps.aligned if name in found]
        return found if all(torch.equal(aligned[0], other) for other in aligned[1:]) else {}

    def _pinned(self, tensor: Tensor) -> Tensor:
        pinned = self.device.pinned(tuple(tensor.shape), tensor.dtype)
        pinned.copy_(tensor)
        return pinned

    def _sent(self, staged: Tensor) -> Tensor:
        """Start copying a tensor in pinned memory to the device, and return it."""
        device = self.device
        with device.active():
            with device.on(self._upload):
                buffer = torch.empty(staged.shape, dtype=staged.dtype, device=device.torch_device)
                buffer.copy_(staged, non_blocking=True)
            current = device.current_stream()
            current.wait_for(self._upload)
            current.keep(buffer)
        return buffer

    def _cells(self, batch: FeatureIds) -> BatchCells:
        """Return where the cells of a batch's features are: the same for all batches of one shape."""
        key = batch.names, batch.shared, batch.batch_size
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            found = self._shapes[key] = BatchCells(self._where(batch.names), batch, key)
        return found

    def _placed(
        self,
        batch: FeatureIds,
        cells: BatchCells,
        splits: NDArray[np.int64],
        *,
        padded: bool = False,
        one_each: bool = True,
        kept: Mapping[str, RaggedTensor] | None = None,
    ) -> Placed:
        """Return the places of a batch's ids, and the description of its features that kernels read."""
        starts, ends = splits[cells.first], splits[cells.end]
        counts = ends - starts
        weighted = self._weighted(batch, starts, ends)
        tables = self._table_of_room
        there = sums(counts, self._room_of, len(tables))
        of_tables = sums(counts, self.on_device.table_of, len(self.on_device.dims))
        rooms, parts = there, list[KeptPart]()
        if kept and not of_tables[self.on_device.table_of[self._jagged]].all():
            padded = False  # a history in a table without ids has none to repeat
        elif padded and not one_each:
            names = {self.plan.features[self.on_device.order[place]].name for place in self._jagged}
            carried = {name: len(one.flat_values) for name, one in (kept or {}).items() if name not in names}
            # A room of a table with ids has some to repeat, if need be of another room. Without features of
            # which each ID is kept, a table is one room.
            active = np.append(of_tables[tables] > 0, np.ones(len(carried), np.bool_))
            found = cells.room_for(np.append(there, np.array([*carried.values()], np.int64)), active)
            rooms, others = found[: len(there)], found[len(there) :].tolist()
            parts = kept_parts(kept or {}, dict(zip(carried, others, strict=True)), batch)
        sizes = sums(rooms, tables, len(self.on_device.dims))
        about = self._about(counts, there, rooms)
        about["cell"] = np.where(cells.there, cells.first, -1)
        about["shift"] = about["first"] - starts
        about["step"] = cells.step
        about["weighted"] = weighted
        pinned = self.device.pinned(sizes.shape, torch.int64)  # the lookup may send them along
        pinned.numpy()[:] = sizes
        weighs = bool(weighted.any())
        shape = cells.key, rooms.tobytes(), weighs, one_each, weighted[self._jagged].tobytes(), tuple(parts)
        return Placed(
            about=np.concatenate([about.view(np.uint8), of_tables.view(np.uint8)]),
            features=len(about),
            sizes=pinned,
            floats=int(sizes @ self.on_device.dims),
            runs=list(id_runs(starts, about["first"], counts)),
            ids=int(sizes.sum()),
            weighs=weighs,
            padding=self._padding(there, rooms),
            shape=shape if padded else None,
            kept=tuple(parts),
            rooms={self.on_device.order[p]: int(rooms[self._room_of[p]]) for p in self._jagged},
        )

    def _padding(self, there: NDArray[np.int64], rooms: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Return ranges of places that are padded: begin, end, and the place of the id that they repeat.

        Args:
            there: Ids in each room.
            rooms: For how many there is room.
        """
        ends = np.cumsum(rooms)
        begins = ends - rooms
        found = []
        for room in np.flatnonzero(rooms > there).tolist():
            first, end = int(begins[room] + there[room]), int(ends[room])
            source = first - 1
            if not there[room]:  # the first id of the table
                others = np.flatnonzero((self._table_of_room == self._table_of_room[room]) & (there > 0))
                source = int(begins[others[0]])
            found.append((first, end, source))
        return found

    def _where(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        places = {name: place for place, name in enumerate(names)}
        if len(places) < len(names):
            raise FeatureError(f"batch: a feature appears twice in {list(names)}")
        features = self.plan.features
        return np.array([places.get(features[f].name, -1) for f in self.on_device.order], dtype=np.int64)

    def _weighted(
        self, batch: FeatureIds, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which features have a weight other than 1."""
        if batch.weights is None:
            return np.zeros(len(starts), np.bool_)
        others = np.concatenate([[0], np.cumsum(batch.weights.numpy() != 1)])
        weighted: NDArray[np.bool_] = others[ends] > others[starts]
        if (weighted & np.array(self._maxima, np.bool_)).any():
            raise FeatureError("batch: a feature that takes the maximum has no weights")
        return weighted

    def _about(
        self, counts: NDArray[np.int64], there: NDArray[np.int64], rooms: NDArray[np.int64]
    ) -> NDArray[np.void]:
        """Return the places of the rows of each feature.

        Args:
            counts: Ids of each feature.
            there: Ids in each room.
            rooms: The same with padding.
        """
        plan = self.on_device
        dims, tables = plan.dims, plan.table_of
        sizes = sums(rooms, self._table_of_room, len(dims))
        floats = np.cumsum(sizes * dims) - sizes * dims
        firsts = np.cumsum(sizes) - sizes
        padding_before = (np.cumsum(rooms) - rooms) - (np.cumsum(there) - there)
        about = plan.features.copy()
        about["first"] = np.cumsum(counts) - counts + padding_before[self._room_of]
        about["count"] = counts
        about["base"] = (floats - firsts * dims)[tables]
        about["begin"] = about["base"] + about["first"].astype(np.int64) * about["dim"]
        if int((counts * about["dim"]).max(initial=0)) >= MOST:
            raise FeatureError("batch: a feature has 2^31 floats or more; use smaller batches on a GPU")
        return about


class DeviceBatch:
    """One batch on a device: its ids as they occur, and the functions from their rows to the outputs and
    back."""

    distinct = False
    counts = None

    def __init__(
        self,
        gatherer: DeviceGatherer,
        buffer: Tensor,
        places: Places,
        placed: Placed,
        batch_size: int,
        *,
        plain: bool,
        shared: bool,
        host_ids: Tensor | None = None,
    ) -> None:
        self.host_ids = host_ids
        """The same ids in host memory; None for a `twin`, and where a carrier's memory may have others by
        now."""
        self.carrier: Carrier | None = None
        """Whose memory it has; None if that is its own."""
        self._places = places
        _, two, three, four, five = places.ends
        self._placed = placed
        self._tables: tuple[Tensor, Tensor] | None = None
        self.batch_size = batch_size
        self.sizes = placed.sizes
        self.floats = placed.floats
        self._gatherer = gatherer
        self._buffer = buffer
        self._stream = gatherer.device.current_stream()
        self._gather = "gather_plain" if plain else "gather"
        self._shared = shared
        self._weights = buffer[three:four].view(torch.float32) if four > three else None
        self._kept_numbers = buffer[two:three].view(torch.int64) if three > two else None
        self._row_splits = dict(placed.row_splits)
        self.kept_ids: dict[str, RaggedTensor] = {}
        """Of a padded batch: what `PaddedSteps` names, with as many IDs as there is room for."""
        self.event_times: Tensor | None = None
        """Of a padded batch: int64 of shape (examples,), if all of them have one."""
        self._take_kept()
        features = buffer.data_ptr()
        self._struct = BatchStruct(
            features,
            features + four if five > four else None,
            features + three if four > three else None,
            batch_size,
            len(gatherer.on_device.order),
        )

    # Made when they are asked for: a batch that is trained by a replay needs none of its own.

    @cached_property
    def ids(self) -> Tensor:
        """int64, on the device: as they occur, table after table."""
        first, end, *_ = self._places.ends
        return self._buffer[first:end].view(torch.int64)

    @cached_property
    def occurring(self) -> Tensor:
        """int64 of shape (tables,), on the device: the ids of each table without those that pad it."""
        one = self._places.ends[0]
        return self._buffer[one - 8 * len(self.sizes) : one].view(torch.int64)

    @cached_property
    def numbers(self) -> list[Tensor]:
        """The numbers of the batch, on the device: those that `DeviceGatherer.read` was given."""
        places = self._places.numbers
        return [self._buffer[one.at : one.end].view(one.dtype).view(one.shape) for one in places]

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def arrive(self) -> None:
        """Have the current stream wait until the batch is on the device, and keep it for that stream."""
        if self.carrier is not None and self.carrier.sent is not None:
            current = self._gatherer.device.current_stream()
            current.wait_for_event(self.carrier.sent)
            current.keep(self.carrier.there)

    def outputs(self, rows: Tensor, scale: Callable[[], float] | None = None) -> tuple[Tensor, ...]:
        """Return the outputs in order of the plan, differentiable in `rows`.

        Args:
            rows: float32 of shape (floats,), on the device: a row for each of `ids`.
            scale: Asked in each backward pass by what to multiply the gradient of `rows`; None leaves it.
        """
        device = self._gatherer.device
        if rows.shape != (self.floats,) or rows.dtype is not torch.float32 or not device.holds(rows):
            raise FeatureError(
                f"rows must be float32 of shape ({self.floats},) on {device.torch_device}, got "
                f"{str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)} on {rows.device}"
            )
        found: tuple[Tensor, ...] = ()
        if self._gatherer.on_device.width:
            found = _Gathered.apply(rows, self, scale)  # type: ignore[no-untyped-call]
        plan = self._gatherer.plan
        if not plan.jagged:
            return found
        if scale is not None and rows.requires_grad:
            rows = Scaled.apply(rows, scale)  # type: ignore[no-untyped-call]
        with device.active():
            self._arrive(rows)
            others = iter(found)
            return tuple(
                next(others) if feature < 0 else self._kept(rows, output)
                for output, feature in enumerate(plan.each)
            )

    def _take_kept(self) -> None:
        """Find the parts of the memory with what a model reads in addition to rows."""
        plan = self._gatherer.plan
        jagged = {plan.features[feature].name: feature for feature in plan.jagged}
        for part in self._placed.kept:
            numbers = self._kept_numbers
            assert numbers is not None
            if part.name is None:
                self.event_times = numbers[part.first : part.end]
                continue
            splits, ids = numbers[part.first : part.ids], numbers[part.ids : part.end]
            feature = jagged.get(part.name)
            if feature is not None:
                self._row_splits[feature] = splits
                first = int(self._about_of(feature)["first"])
                ids = self.ids[first : first + self._placed.rooms[feature]]
            self.kept_ids[part.name] = RaggedTensor(ids, splits, validate=False)

    def _about_of(self, feature: int) -> Any:
        """Return the description of a feature of the plan, in host memory."""
        features = self._placed.about[: self._placed.features * FEATURE.itemsize].view(FEATURE)
        return features[self._gatherer.on_device.order.index(feature)]

    def _kept(self, rows: Tensor, output: int) -> Tensor:
        """Return an output that keeps each ID of its feature: a part of the rows.

        That of a `twin` has all of the room, with zeros behind the last ID. No gradient comes from there.
        """
        plan = self._gatherer.plan
        about = self._about_of(plan.each[output])
        begin, count, dim = int(about["begin"]), int(about["count"]), int(about["dim"])
        is_twin = self.host_ids is None
        if is_twin:
            count = self._placed.rooms[plan.each[output]]
        kept = rows[begin : begin + count * dim].view(count, dim)
        if about["weighted"]:
            assert self._weights is not None
            first = int(about["first"])
            kept = kept * self._weights[first : first + count, None]
        if is_twin:
            real = torch.arange(count, device=rows.device) < self._row_splits[plan.each[output]][-1]
            kept = torch.where(real[:, None], kept, 0.0)
        uses = sorted((use for use in plan.uses if use.output == output), key=lambda use: use.offset)
        parts = [kept[:, use.start : use.start + use.width] for use in uses]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)

    @property
    def shape(self) -> Hashable | None:
        """What all batches share that differ only in their ids, or were padded to as many; None if every
        batch has its own."""
        return self._placed.shape

    @property
    def ragged(self) -> bool:
        """Whether batches of this shape differ in the numbers of their ids."""
        return not self._placed.repeats

    @property
    def padded(self) -> bool:
        """Whether some of its ids pad it: as updates they change nothing, but they are no sightings."""
        return bool(self._placed.padding)

    def twin(self) -> DeviceBatch:
        """Return a batch of the same shape in memory of its own, not filled; see `refill`."""
        return DeviceBatch(
            self._gatherer,
            torch.empty_like(self._buffer),
            self._places,
            self._placed,
            self.batch_size,
            plain=self._gather == "gather_plain",
            shared=self._shared,
        )

    def refill(self, other: DeviceBatch) -> None:
        """Copy a batch of the same shape into the memory of this one, on the current stream.

        A carrier of that batch may be given back, if nothing else reads it.
        """
        current = self._gatherer.device.current_stream()
        if other.carrier is not None and other.carrier.sent is not None:
            current.wait_for_event(other.carrier.sent)
        elif current != other._stream:
            current.wait_for(other._stream)
            current.keep(other._buffer)
        self._buffer.copy_(other._buffer, non_blocking=True)
        if other.carrier is not None:
            other.carrier.used = current.record()

    def layouts(self, outputs: tuple[Tensor, ...]) -> dict[str, LayoutTensor | list[LayoutTensor]]:
        """Return outputs by layout: a tensor, or for NONE a list with one for each slice."""
        return self._gatherer.plan.by_name(outputs, self._row_splits)

    def newest(self, times: Tensor) -> Tensor:
        """Return, for each of `ids`, the time of its example, or of the newest one that shares it.

        Nothing is waited for. An ID that pads the batch gets 0.

        Args:
            times: int64 of shape (n,), on the device or in host memory.
        """
        gatherer = self._gatherer
        with gatherer.device.active():
            self._arrive(self._buffer)
            there = times if gatherer.device.holds(times) else gatherer._sent(gatherer._pinned(times))
            out = torch.zeros(len(self.ids), dtype=torch.int64, device=there.device)
            threads = len(gatherer.on_device.order) * self.batch_size
            gatherer.launch("spread_times", blocks_for(threads), self._struct, there, there.amax(), out)
        return out

    def sum_equal(self, gradients: Tensor) -> Tensor:
        """Sum the gradients of equal ids; see `DeviceGatherer.sum_equal`."""
        # Made once: a step that is captured must not copy from memory that is gone when it is replayed.
        if self._tables is None:
            self._tables = self._gatherer.about_tables(self.sizes)
        return self._gatherer.sum_equal(self.ids, self.sizes, gradients, self._tables)

    @property
    def needs_rows(self) -> bool:
        """Whether gradients depend on the rows."""
        return self._gatherer.on_device.takes_maximum

    def gather(self, rows: Tensor) -> tuple[Tensor, ...]:
        gatherer, plan = self._gatherer, self._gatherer.on_device
        threads = blocks_for(self.batch_size, per_block=_EXAMPLES) * plan.width
        if threads >= MOST:
            raise FeatureError(
                f"batch: {self.batch_size:,} examples of {plan.width:,} floats are too many for one call on "
                "a GPU; use smaller batches"
            )
        with gatherer.device.active():
            self._arrive(rows)
            each = zip(gatherer.plan.shapes, gatherer.plan.each, strict=True)
            shapes = [shape for shape, feature in each if feature < 0]
            outputs = tuple(rows.new_empty((self.batch_size, *shape)) for shape in shapes)
            pointers, blocks = plan.pointers(outputs), blocks_for(threads)
            gatherer.launch(self._gather, blocks, self._struct, plan.struct, pointers, rows.detach())
        return outputs

    def _arrive(self, rows: Tensor) -> None:
        """Have the current stream wait for the one that the batch was read on, if that is another."""
        current = self._gatherer.device.current_stream()
        self.arrive()
        if current != self._stream:
            current.wait_for(self._stream)
            current.keep(self._buffer)
            current.keep(rows)

    def scatter(self, rows: Tensor | None, gradients: Sequence[Tensor | None], scale: float = 1.0) -> Tensor:
        """Return the gradient of `rows` from those of the outputs, of which None is zeros."""
        gatherer, plan = self._gatherer, self._gatherer.on_device
        device = gatherer.device.torch_device
        with gatherer.device.active():
            given = [None if one is None else one.to(torch.float32).contiguous() for one in gradients]
            pointers = plan.pointers(given)
            sums = None
            if self._shared:
                sums = torch.empty(plan.width, dtype=torch.float32, device=device)
                gatherer.launch(
                    "sum_examples", blocks_for(plan.width), plan.struct, pointers, self.batch_size, sums
                )
            out = torch.empty(self.floats, dtype=torch.float32, device=device)
            gatherer.launch(
                "scatter",
                blocks_for(blocks_for(self.floats, per_block=_FLOATS)),
                self._struct,
                plan.struct,
                pointers,
                sums,
                rows,
                scale,
                self.floats,
                out,
            )
        return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, batch: DeviceBatch, scale: Callable[[], float] | None
    ) -> tuple[Tensor, ...]:
        ctx.batch = batch
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        if batch.needs_rows:
            ctx.save_for_backward(rows)
        return batch.gather(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors or (None,)
        scale = 1.0 if ctx.scale is None else ctx.scale()
        return ctx.batch.scatter(rows, gradients, scale), None, None
