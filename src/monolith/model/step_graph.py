"""StepGraph: a whole training step on a GPU, captured once per shape of batch and replayed as one launch.

A step of a small model takes a GPU less time than a host needs to launch its hundred kernels. So lookup,
forward, backward, the update of weights and the update of rows are captured as one CUDA graph, and the host
only copies a batch into place and launches that:

    send(batch)     any thread: ids, floats and labels go to the device
    train(sent)     copy them into the memory that the graph reads ──► replay ──► one copy comes back, later

Nothing in a step waits for the device. What the host would look at before it continues is either known on the
device or looked at later:

    is the batch finite?    the update of weights is undone and no row gets a place if not (`BatchVerdict`)
    loss                    in the report of the step, which arrives some steps later
    predictions             in the report, too: metrics are computed in host memory
    room for new ids        tables keep room for several batches; their counters come back later, too
    rates, the global step  in device memory

A graph has addresses in it. It is captured anew after anything that it reads or writes has moved: a table
that grew, an optimizer whose state was restored. Batches of a shape that is not captured, or not yet, are
trained by the same launches one by one. Ragged batches are padded to a shape that many of them have; see
`DeviceGatherer`. If batches come in more shapes than are captured, the most frequent ones are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from monolith.cuda import BatchVerdict, Carriers, Device, DeviceGraph, DeviceStream, Kept
from monolith.errors import AcceleratorError
from monolith.feature import Batch
from monolith.feature.cuda import DeviceBatch, DeviceIds
from monolith.model.collection import EmbeddingCollection, PreparedBatch
from monolith.model.optimizer import EmbeddingOptimizer
from monolith.model.updates import UpdateConfig, clip, set_gradients
from monolith.store import LocalStore, TableIds
from monolith.table import arguments
from monolith.table.cuda.fused import CapturedStep, FusedTables
from monolith.table.cuda.hot_rows import HotRows, StagedBatch, unmoved

MOST_SHAPES = 4
"""Shapes of batches that are captured at the same time: those that come most often."""
_SEEN_FIRST = 2  # batches of a shape that are trained before it is captured: kernels are loaded by then
_WINDOW = 256  # batches after which the counts of all shapes are halved
_TIMES_AS_OFTEN = 2  # as the rarest of the chosen shapes: how often another must have come to replace it
_WORTH_A_CAPTURE = 8  # and so many batches more, if that one is captured: to capture takes as long as steps
_MOST_RATES = 8  # sets of rates of an optimizer that has them in its launches, until capturing is given up

_KINDS = (
    "the loss",
    "a gradient of the dense weights",
    "a gradient of the rows",
    "the norm of the gradients",
)


class Ungraphed(StrEnum):
    """Why a batch was trained by single launches; completes "batches ..."."""

    EARLY = "before a capture"  # of their size, or anew; or while a snapshot needs what is overwritten
    OTHER_SIZE = f"of other sizes than the {MOST_SHAPES} most frequent"
    NO_IDS = "whose histories have no ID to be padded with"
    NO_ROOM = "whose rows the device, or the index of a tiered table, had no room for"
    GIVEN_UP = "after capturing was given up"


Outputs = Callable[[Batch, list[PreparedBatch]], tuple[Tensor, Mapping[str, Tensor]]]
"""Returns the loss of a batch, a scalar, and predictions by head, given its rows by collection."""


@dataclass(frozen=True, slots=True, eq=False)
class SentBatch:
    """A batch on its way to the device."""

    batch: Batch
    ids: list[DeviceBatch]
    """By collection. The first has floats, labels and the event time as its `numbers`."""
    shape: Hashable | None
    """Equal for batches that one graph can train; None if no graph can."""
    staged: list[StagedBatch | None]
    """By collection; None if all rows are on the device anyway."""


class StepFound(NamedTuple):
    """What the host learns of a step, some steps later."""

    trouble: str | None
    """Why the batch was refused; None if it was trained on."""
    loss: float
    finite: dict[str, bool]
    """By head, whether all predictions are finite."""
    predictions: dict[str, Tensor]
    """By head, in host memory."""


class _Landed(NamedTuple):
    """Pinned memory that reports of one length arrive in."""

    memory: Tensor
    array: NDArray[np.float32]
    """The same, as numpy has it."""


class _Heads(Mapping[str, Tensor]):
    """The predictions in a report, each made when it is asked for."""

    def __init__(self, report: Tensor, heads: Mapping[str, torch.Size], first: int) -> None:
        self._report, self._heads, self._first = report, heads, first

    def __getitem__(self, head: str) -> Tensor:
        at = self._first
        for name, shape in self._heads.items():
            if name == head:
                return self._report[at : at + shape.numel()].view(shape)
            at += shape.numel()
        raise KeyError(head)

    def __iter__(self) -> Iterator[str]:
        return iter(self._heads)

    def __len__(self) -> int:
        return len(self._heads)


class GraphedStep:
    """What a step has said: on the device at once, on the host later.

    Of a batch that is refused, loss and predictions are those of the batch before it: so sums over steps stay
    finite.

    Args:
        report: Of this step alone; it is copied to the host by the current stream.
        free: Memory for such copies that no step uses; that of this one returns there.

    Attributes:
        loss: float32 of shape ().
        predictions: By head, as the model gave them, in float32. They stay on the device.
    """

    def __init__(
        self,
        report: Tensor,
        device: Device,
        free: dict[int, list[_Landed]],
        heads: Mapping[str, torch.Size],
        verdict: BatchVerdict,
    ) -> None:
        self._verdict = verdict
        self._heads = dict(heads)
        # A report: what the verdict found, the loss, whether each head is finite, and the predictions.
        self._first = first = 1 + len(_KINDS)
        self._at = first + 1 + len(heads)
        self._free = free.setdefault(len(report), [])
        if self._free:
            self._landed = self._free.pop()
        else:
            memory = device.pinned((len(report),), torch.float32)
            self._landed = _Landed(memory, memory.numpy())
        # Not on a stream of its own: a few microseconds of the device are less than the host needs for that.
        self._landed.memory.copy_(report, non_blocking=True)
        self._over = device.current_stream().record()
        self.loss = report[first]
        self.predictions: Mapping[str, Tensor] = _Heads(report, self._heads, self._at)

    def wait(self) -> StepFound:
        """Wait for the report. Call it once."""
        self._over.synchronize()
        report = self._landed.array.copy()
        self._free.append(self._landed)
        first = self._first
        *found, loss = report[: first + 1].tolist()
        finite = [bool(one) for one in report[first + 1 : self._at].tolist()]
        return StepFound(
            self._verdict.describe([int(count) for count in found]),
            loss,
            dict(zip(self._heads, finite, strict=True)),
            dict(_Heads(torch.from_numpy(report), self._heads, self._at)),
        )

    @property
    def arrived(self) -> bool:
        """Whether `wait` returns at once."""
        return self._over.query()


class _EventTime:
    """Stands for the event time of a batch, which differs from batch to batch."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AcceleratorError("the model reads the event time of its batch")

    __int__ = __float__ = __index__ = __bool__ = __str__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = _refuse
    __mod__ = _refuse


class _Shape:
    """Batches of one shape: the memory that their steps read, and the graph, once it is captured.

    Args:
        sent: The first of them.
    """

    def __init__(self, sent: SentBatch, graph: StepGraph) -> None:
        self.ids = [one.twin() for one in sent.ids]
        self.keys = [TableIds(one.ids, one.sizes, distinct=False) for one in self.ids]
        *numbers, self.event_times = self.ids[0].numbers
        given, each = sent.batch, iter(numbers)
        # The ids of the batch are of no device: a model that reads them by itself, and not by its embeddings,
        # fails to be captured. With ids of the first batch it would be wrong for all others.
        unknown = torch.empty(given.ids.ids.shape, dtype=torch.int64, device="meta")
        second: Any = _EventTime()
        hidden = replace(given.ids, ids=unknown, event_times=None, event_time=second)
        if any(one.ragged for one in self.ids):  # and so are their lengths, and weights
            splits = torch.empty_like(given.ids.splits, device="meta")
            weights = (
                None if given.ids.weights is None else torch.empty_like(given.ids.weights, device="meta")
            )
            hidden = replace(hidden, splits=splits, weights=weights)
        there = {name: found for one in self.ids for name, found in one.kept_ids.items()}
        if there:  # a model of histories gets what it reads on the device
            times = next((one.event_times for one in self.ids if one.event_times is not None), None)
            parts = {part.name: getattr(hidden, part.name) for part in fields(hidden)}
            hidden = DeviceIds(**(parts | {"event_times": times}), there=there)
        self.batch = Batch(
            hidden,
            {name: next(each) for name in given.floats},
            {name: next(each) for name in given.labels},
        )
        self.rows = [
            CapturedStep(tables, one.sizes.numpy(), graph.number, graph.verdict.found, one.occurring)
            for tables, one in zip(graph.tables, self.ids, strict=True)
        ]
        self.said: Tensor | None = None
        """Loss and predictions of the last batch that was applied."""
        self.report: Tensor | None = None
        self.heads: dict[str, torch.Size] = {}
        self.seen = 0
        self.chosen = False
        """Whether it is one of the most frequent."""
        self.graph: DeviceGraph | None = None
        self.captured_with: object = None

    def describe(self) -> str:
        if not any(one.ragged for one in self.ids):
            return f"{len(self.batch):,}"
        return f"{len(self.batch):,} with {sum(len(one.ids) for one in self.ids):,} ids each, padded"

    def fill(self, sent: SentBatch) -> None:
        """Copy a batch to where steps read it, on the current stream."""
        for mine, given in zip(self.ids, sent.ids, strict=True):
            mine.refill(given)


class StepGraph:
    """Trains a model whose rows are on a GPU by replayed graphs. Used by one thread, except `send`.

    Shapes: see `Outputs`.

    Args:
        module: The model: its weights and buffers are put back if a batch is refused.
        collections: All of its embeddings, each with a store of its own.
        sparse: The optimizer of their rows. Its `global_step` is that of the next step; the caller counts.
        dense: The optimizer of the weights; None if there are none.
        outputs: Runs the model. It must do the same for each batch, and look at no value of a tensor.
        config: What is done to gradients.

    Raises:
        AcceleratorError: Steps of this model cannot be captured; says why.

    Attributes:
        trouble: Why nothing is captured any more; None while all is well.
        captures: How often a shape was captured.
        replays: How many steps were replayed.
        ungraphed: How many batches were trained by single launches, by reason.
    """

    def __init__(
        self,
        module: nn.Module,
        collections: Sequence[EmbeddingCollection],
        sparse: EmbeddingOptimizer,
        dense: Optimizer | None,
        outputs: Outputs,
        config: UpdateConfig | None = None,
    ) -> None:
        self._module = module
        self._collections = list(collections)
        self._sparse = sparse
        self._dense = dense
        self._outputs = outputs
        self._config = UpdateConfig() if config is None else config
        self._stores = [_store(one) for one in self._collections]
        if len(set(self._stores)) < len(self._stores):
            raise AcceleratorError("two embedding collections share a store")
        self._hot = [one.hot_rows for one in self._stores]
        self.tables = [_tables(one) for one in self._stores]
        if not self.tables:
            raise AcceleratorError("the model has no embeddings")
        if self._config.sparse_norm_warmup_steps is not None:
            raise AcceleratorError("the limit of the rows' gradients changes from step to step")
        self.device: Device = self.tables[0].device
        self._weights = [] if dense is None else [w for g in dense.param_groups for w in g["params"]]
        if any(not self._is_there(weight) for weight in self._weights):
            raise AcceleratorError(f"some dense weights are not on {self.device.torch_device}")
        _check_optimizer(dense)
        if self._config.multiply_rows_by is not None:
            sparse.multiply_rows_by = self._config.multiply_rows_by
        # Rows that come from host memory are brought by their own streams, which would have to keep carriers.
        self._carriers = None if self.hot_rows else Carriers(self.device)
        self._landed: dict[int, list[_Landed]] = {}
        with self.device.active():
            self._stream = self.device.new_stream()
            where = self.device.torch_device
            self.verdict = BatchVerdict(self.device, _KINDS)
            self.number = torch.zeros(1, dtype=torch.int64, device=where)
            groups = [] if dense is None else dense.param_groups
            self._rates = torch.zeros(len(groups), dtype=torch.float32, device=where)
        self._number_is = 0  # what `number` is on the device, unless a batch was refused
        self._rates_are: tuple[float, ...] = ()
        self._sets_of_rates = 0
        self._live_rates = False
        """Whether the optimizer reads its rates from device memory: from the first change of them on."""
        self._buffers: list[Tensor] = []
        self._kept: tuple[tuple[int, ...], Kept] | None = None
        self._host_steps: list[Tensor] = []
        self._shapes: dict[Hashable, _Shape] = {}
        # How often each shape came. Counts are halved after each window, and those of 0 go: so their sum, and
        # the number of shapes that are remembered, stays below two windows.
        self._came: dict[Hashable, int] = {}
        self._counted = 0  # batches since the last halving
        self.trouble = next(filter(None, map(_why_not_padded, self._collections)), None)
        self.captures = self.replays = 0
        # With a place for each reason, since other threads read it.
        self.ungraphed: Counter[Ungraphed] = Counter(dict.fromkeys(Ungraphed, 0))

    @property
    def hot_rows(self) -> list[HotRows]:
        """What brings rows to the device ahead of steps, of stores that keep some in host memory."""
        return [one for one in self._hot if one is not None]

    # Sending

    def send(self, batch: Batch) -> SentBatch:
        """Start copying a batch to the device; from any thread.

        Raises:
            FeatureError, TableArgumentError: The batch is not sound.
        """
        times = arguments.event_time_array(batch.ids.example_times(), len(batch))
        named = {**{f"float {n}": t for n, t in batch.floats.items()}, **batch.labels}
        numbers = [*(one.detach() for one in named.values()), torch.from_numpy(times).expand(len(batch))]
        first, *others = self._collections
        ids = [first.send(batch, numbers=numbers, carriers=self._carriers)]
        ids += [one.send(batch, carriers=self._carriers) for one in others]
        shapes = [one.shape for one in ids]
        about = tuple((name, tuple(one.shape), one.dtype) for name, one in named.items())
        key = None if any(one is None for one in shapes) else (len(batch), batch.group, *shapes, *about)
        hot = [
            None
            if rows is None or one.host_ids is None
            else rows.stage(one.host_ids, one.ids, one.sizes.numpy())
            for rows, one in zip(self._hot, ids, strict=True)
        ]
        return SentBatch(batch, ids, key, hot)

    def look_up(self, sent: SentBatch) -> list[PreparedBatch]:
        """Return the rows of a batch, for a step that is not graphed."""
        found = []
        for collection, one, store in zip(self._collections, sent.ids, self._stores, strict=True):
            one.arrive()
            if one.padded and store.counts_sightings:
                found.append(collection.prepare(sent.batch))  # without padding, which would be counted
                continue
            keys = TableIds(one.ids, one.sizes, distinct=False)
            found.append(PreparedBatch(one, keys, store.lookup(keys), sent.batch.ids.example_times()))
        return found

    def takes(self, sent: SentBatch) -> bool:
        """Whether `train` can train on a batch. Called once for each: batches it refuses are counted.

        Not the first batches: the state of an optimizer must be there to be put back if a batch is refused.
        Rows that have left the device since the batch was sent are brought back.
        """
        if self.trouble is not None:
            why = Ungraphed.GIVEN_UP
        elif sent.shape is None:
            why = Ungraphed.NO_IDS
        elif not self._has_state():
            why = Ungraphed.EARLY
        elif all(
            hot is None or staged is None or hot.ready(staged)
            for hot, staged in zip(self._hot, sent.staged, strict=True)
        ):
            return True
        else:
            why = Ungraphed.NO_ROOM
        self.ungraphed[why] += 1
        return False

    # Training

    def train(self, sent: SentBatch) -> GraphedStep:
        """Launch a step. The caller counts it, and takes it back by `refused` when it learns of that.

        Raises:
            AcceleratorError: It cannot be captured: `trouble` is set, and nothing of the batch was done.
        """
        step = self._sparse.global_step
        with self.on_stream() as caller:
            shape = self._shape(sent)
            shape.fill(sent)
            if self._number_is != step:
                self.number.fill_(step)
            self._send_rates()
            for rows, staged in zip(shape.rows, sent.staged, strict=True):
                if staged is not None:
                    rows.coming = staged.coming
            if not self._replayed(shape, step):
                # A capture must not contain launches of the thread that stages batches.
                with unmoved(self.hot_rows):
                    self._launched(shape, step)
            for hot, staged in zip(self._hot, sent.staged, strict=True):
                if hot is not None and staged is not None:
                    hot.trained(staged)
            if self._carriers is not None:
                for one in sent.ids:
                    if one.carrier is not None:
                        self._carriers.give_back(one.carrier)
            self._number_is = step + 1
            assert shape.report is not None
            report = shape.report.clone()  # the next replay overwrites it
            found = GraphedStep(report, self.device, self._landed, shape.heads, self.verdict)
            caller.keep(report)
        return found

    @contextmanager
    def on_stream(self) -> Iterator[DeviceStream]:
        """Put the work of a block on the stream of the graphs, in order with that of the caller's stream.

        Steps without a graph belong there, too. torch adds a gradient to that of a weight on the stream of
        the weight's first use in a graph of autograd that is still alive: a gradient that is added on another
        stream than that of a capture would not be in it.
        """
        device = self.device
        with device.active():
            caller = device.current_stream()
            self._stream.wait_for(caller)
            try:
                with device.on(self._stream):
                    yield caller
            finally:
                caller.wait_for(self._stream)

    def refused(self) -> None:
        """Take note that a step left no trace: the step counts less by one, as on the device."""
        self._number_is -= 1
        if self._host_steps:
            torch._foreach_sub_(self._host_steps, 1)

    def close(self) -> None:
        """Wait for the device and drop all graphs: their memory is not left to the garbage collector."""
        self._stream.synchronize()
        for shape in self._shapes.values():
            shape.graph = shape.report = shape.said = None
        self._shapes.clear()
        self._kept = None

    def describe(self) -> str:
        """Describe what is captured, and the device memory that it needs, for a log."""
        sizes = ", ".join(one.describe() for one in self._shapes.values() if one.graph is not None)
        own = sum(ids.nbytes for one in self._shapes.values() for ids in one.ids)
        own += 0 if self._kept is None else self._kept[1].bytes
        return f"batches of {sizes or 'no size yet'}; {own / 2**20:,.0f} MiB for inputs and undo"

    def _shape(self, sent: SentBatch) -> _Shape:
        """Return the chosen shape of a batch; or one for this batch alone, if others are more frequent.

        A chosen shape gives way to one that is clearly more frequent, so that shapes of about the same
        frequency do not take turns: each change costs a capture.
        """
        key = sent.shape
        assert key is not None, "a graph takes it"
        self._count(key)
        found = self._shapes.get(key)
        if found is not None:
            return found
        found = _Shape(sent, self)
        if len(self._shapes) >= MOST_SHAPES:
            came = self._came
            rarest = min(self._shapes, key=lambda one: came.get(one, 0))
            captured = self._shapes[rarest].graph is not None
            least = _TIMES_AS_OFTEN * came.get(rarest, 0) + (_WORTH_A_CAPTURE if captured else 0)
            if came.get(key, 0) <= least:
                return found
            del self._shapes[rarest]
        found.chosen = True
        self._shapes[key] = found
        return found

    def _count(self, key: Hashable) -> None:
        self._came[key] = self._came.get(key, 0) + 1
        self._counted += 1
        if self._counted == _WINDOW:
            self._counted = 0
            self._came = {one: count // 2 for one, count in self._came.items() if count > 1}

    def _replayed(self, shape: _Shape, step: int) -> bool:
        """Replay a step; False if there is no graph of it, or it is not right any more."""
        if shape.graph is None or shape.captured_with != self._addresses():
            shape.graph = None
            return False
        with ExitStack() as entered:
            replays = [
                entered.enter_context(rows.replaying(store.rates(step)))
                for rows, store in zip(shape.rows, self._stores, strict=True)
            ]
            if not all(one.fits for one in replays):
                shape.graph = None
                return False
            counts = torch._foreach_add(self._host_steps, 1) if self._host_steps else []
            shape.graph.replay()
            self.replays += 1
            if counts:  # a device that replays by calling again has counted, too
                torch._foreach_copy_(self._host_steps, list(counts))
            for one in replays:
                one.launched = True
        return True

    def _launched(self, shape: _Shape, step: int) -> None:
        """Train by single launches; or, if the shape was seen often enough, capture those and replay them."""
        for rows, store in zip(shape.rows, self._stores, strict=True):
            rows.ready(store.rates(step))
        self._look_at_optimizer()
        captures = shape.seen >= _SEEN_FIRST and all(rows.capturable for rows in shape.rows)
        try:
            if not captures:
                shape.seen += 1
                self._work(shape)
                self.ungraphed[Ungraphed.EARLY if shape.chosen else Ungraphed.OTHER_SIZE] += 1
                return
            self._capture(shape)
        except Exception as cause:
            # Of the model, in its forward or backward pass: nothing was updated yet, but buffers may be.
            # Nothing of a capture has run, and the saved weights are then those before the last step.
            self.trouble = f"{type(cause).__name__}: {cause}"
            self.ungraphed[Ungraphed.GIVEN_UP] += 1
            self._forget()
            if not captures and self._kept is not None:
                self.verdict.found.fill_(1)
                self._kept[1].put_back()
            raise AcceleratorError(f"the step cannot be captured: {self.trouble}") from cause
        if not self._replayed(shape, step):
            raise AssertionError("a graph that was just captured fits")

    def _capture(self, shape: _Shape) -> None:
        before = [one.clone() for one in self._host_steps]
        for rows in shape.rows:
            rows.capturing = True
        try:
            shape.graph = self.device.capture(lambda: self._work(shape))
        finally:
            for rows in shape.rows:
                rows.capturing = False
            if before:
                torch._foreach_copy_(self._host_steps, before)  # no step was taken yet
        for rows in shape.rows:
            rows.captured()
        shape.captured_with = self._addresses()
        self.captures += 1

    def _work(self, shape: _Shape) -> None:
        """Launch a whole step on the current stream: what is captured."""
        assert self._kept is not None
        _, kept = self._kept
        kept.keep()  # before the forward pass: it updates buffers, the running means of a batch norm
        looked_up = [
            PreparedBatch(ids, keys, tables.lookup_batch(ids.ids, ids.sizes.numpy()), 0)
            for ids, keys, tables in zip(shape.ids, shape.keys, self.tables, strict=True)
        ]
        with torch.enable_grad():
            loss, predictions = self._outputs(shape.batch, looked_up)
            torch.autograd.backward(loss)
        with torch.no_grad():
            self._update(shape, loss, kept)
            shape.heads = {head: one.shape for head, one in predictions.items()}
            said = [one.detach().reshape(-1).to(torch.float32) for one in (loss, *predictions.values())]
            applied = self.verdict.found[:1] == 0
            if shape.said is None:  # not in a capture: batches of this shape were trained before
                shape.said = torch.zeros_like(torch.cat(said))
            shape.said.copy_(torch.where(applied, torch.cat(said), shape.said))
            sizes = [one.numel() for one in said]
            finite = [one.isfinite().all().to(torch.float32) for one in torch.split(shape.said, sizes)[1:]]
            parts = (
                self.verdict.found.to(torch.float32),
                shape.said[:1],
                *(one.view(1) for one in finite),
                shape.said[1:],
            )
            shape.report = torch.cat(parts)
            self.number.add_(applied)

    def _update(self, shape: _Shape, loss: Tensor, kept: Kept) -> None:
        """Update weights and rows, unless something is not finite; see `apply_gradients`."""
        config, sparse = self._config, self._sparse
        weights = [weight for weight in self._weights if weight.grad is not None]
        by_collection = [sparse.pending(one) for one in self._collections]
        if any(len(several) > 1 for several in by_collection):
            raise AcceleratorError("the model reads its embeddings twice in a step")
        found = [row for several in by_collection for row in several if row.grad is not None]
        gradients = [[w.grad for w in weights], [row.grad for row in found]]
        self.verdict.look([loss], *[[g for g in several if g is not None] for several in gradients])
        clipped = clip(sparse, weights, found, config)
        norms = [one for one in (clipped.dense_norm, clipped.sparse_norm) if one is not None]
        self.verdict.look_also([(one.detach().to(torch.float32), 3) for one in norms])
        set_gradients(weights, found, clipped, config)
        if self._dense is not None:
            self._step_weights(self._dense)
        kept.put_back()
        for rows, ids, store, several in zip(shape.rows, shape.ids, self._stores, by_collection, strict=True):
            for row in several:
                if row.grad is not None:
                    latest = row.detach() if store.delay_compensated else None
                    rows.train(ids.ids, ids.newest(shape.event_times), row.grad.detach(), latest)
        self._forget()

    def _step_weights(self, dense: Optimizer) -> None:
        if not self._live_rates:
            dense.step()
            return
        # The optimizer reads its rates from device memory in the graph; all other code sees plain numbers.
        own = [group["lr"] for group in dense.param_groups]
        for group, rate in zip(dense.param_groups, self._rates.unbind(), strict=True):
            group["lr"] = rate
        try:
            dense.step()
        finally:
            for group, rate in zip(dense.param_groups, own, strict=True):
                group["lr"] = rate

    def _send_rates(self) -> None:
        """Have the graph step by the rates that the dense optimizer has now."""
        if self._dense is None:
            return
        now = tuple(float(group["lr"]) for group in self._dense.param_groups)
        if now == self._rates_are:
            return
        self._rates_are = now
        if self._live_rates:
            for number, rate in enumerate(now):
                self._rates[number].fill_(rate)
            return
        self._sets_of_rates += 1
        if self._sets_of_rates > 1 and _reads_rates(self._dense):
            self._live_rates = True
            self._rates_are = ()
            self._send_rates()
        elif self._sets_of_rates > _MOST_RATES:
            self.trouble = (
                f"the learning rate of its {type(self._dense).__name__} changes from step to step, and only "
                "Adam and its like read it from the device"
            )
            raise AcceleratorError(f"the step cannot be captured: {self.trouble}")

    def _look_at_optimizer(self) -> None:
        """Find what a step updates: weights, the state of their optimizer, buffers."""
        if self._dense is not None:
            _prepare_optimizer(self._dense)
        self._buffers = list(self._module.buffers())
        tensors = self._updated()
        pointers = tuple(one.data_ptr() for one in tensors)
        there = [one for one in tensors if self._is_there(one)]
        if self._kept is None or self._kept[0] != pointers:
            self._kept = pointers, Kept(self.device, there, self.verdict)
        self._host_steps = [one for one in tensors if not self._is_there(one)]

    def _updated(self) -> list[Tensor]:
        states = [] if self._dense is None else self._dense.state.values()
        found = [one for state in states for one in state.values() if isinstance(one, Tensor)]
        return [*self._weights, *found, *self._buffers]

    def _addresses(self) -> object:
        """Return what a graph is right for: where everything is that it updates, and constants in it."""
        rates = None if self._live_rates else self._rates_are
        return [one.data_ptr() for one in self._updated()], rates, self._module.training

    def _has_state(self) -> bool:
        dense = self._dense
        return dense is None or not _has_state(dense) or any(dense.state.values())

    def _is_there(self, tensor: Tensor) -> bool:
        return self.device.holds(tensor)

    def _forget(self) -> None:
        self._sparse.zero_grad()
        if self._dense is not None:
            self._dense.zero_grad()


def _why_not_padded(collection: EmbeddingCollection) -> str | None:
    """Return why batches have no shape in common, if a layout has as many parts as a batch has IDs."""
    plan, steps = collection.plan, collection.padded_steps
    if not plan.jagged:
        return None
    names = ", ".join(repr(plan.features[feature].name) for feature in plan.jagged)
    if isinstance(steps, str):
        return f"each ID of {names} is kept, so batches differ in size, and {steps}"
    if isinstance(collection.store, LocalStore) and collection.store.counts_sightings:
        # An admission filter knows padding by being behind all IDs of a table; that of a history is not.
        return f"each ID of {names} is kept, and the padding behind them would count as sightings of an ID"
    return None


def _store(collection: EmbeddingCollection) -> LocalStore:
    store = collection.store
    if not isinstance(store, LocalStore) or store.fused is None:
        raise AcceleratorError("rows are not on the GPU (train.embedding_device)")
    return store


def _tables(store: LocalStore) -> FusedTables:
    found = store.fused if store.hot_rows is None else store.hot_rows.near
    assert found is not None
    if (why := found.why_not_captured()) is not None:
        raise AcceleratorError(why)
    return found


def _check_optimizer(dense: Optimizer | None) -> None:
    """Refuse an optimizer that keeps more than tensors from step to step, such as a count.

    Raises:
        AcceleratorError: It is one.
    """
    if dense is None or _reads_rates(dense) or isinstance(dense, SGD):
        return
    if isinstance(dense, Adagrad) and not any(group["lr_decay"] for group in dense.param_groups):
        return
    raise AcceleratorError(
        f"the dense optimizer, {type(dense).__name__}, counts its steps in host memory; torch's Adam, AdamW, "
        "RMSprop, SGD, and Adagrad without lr_decay, can be captured"
    )


def _reads_rates(dense: Optimizer) -> bool:
    """Whether an optimizer of torch can count its steps, and read its rate, on the device."""
    return all("capturable" in group for group in dense.param_groups)


def _has_state(dense: Optimizer) -> bool:
    return not isinstance(dense, SGD) or any(group["momentum"] for group in dense.param_groups)


def _prepare_optimizer(dense: Optimizer) -> None:
    """Have torch's optimizers count their steps on the device, also after a restore."""
    if not _reads_rates(dense):
        return
    for group in dense.param_groups:
        # On an emulated device torch refuses the setting.
        group["capturable"] = all(weight.is_cuda for weight in group["params"])
        for weight in group["params"]:
            step = dense.state.get(weight, {}).get("step")
            if isinstance(step, Tensor) and step.device != weight.device:
                dense.state[weight]["step"] = step.to(weight.device, torch.float32)
