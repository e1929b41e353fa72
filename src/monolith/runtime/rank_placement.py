"""The placement of ranks: dense weights on every rank, with averaged gradients; rows as `rank_rows` says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from monolith.checkpoint import DensePart, Part, RestoreOptions, SavedPart
from monolith.checkpoint.part import PartSnapshot, RestoreReport
from monolith.errors import (
    ConfigError,
    UnavailableError,
)
from monolith.model import WeightOptimizer
from monolith.runtime.coordinator import Item, LastCheckpoint
from monolith.runtime.fleet_placement import copy_into, merge_buffers
from monolith.runtime.local import scheduled
from monolith.runtime.lockstep import aligned
from monolith.runtime.prefetch import Silence
from monolith.runtime.publish_shard import PublishPlan
from monolith.runtime.publishers import Publishers
from monolith.runtime.rank_rows import RankRows, RowsOnRanks, RowsOnServers
from monolith.store import (
    MakeStore,
    RankGroups,
    ServerGroup,
)
from monolith.store.dense import dump_dense, load_dense_states, pack_tensors, read_dense, unpack_tensors
from monolith.store.rank_groups import Collective
from monolith.sync.guard import PublishGuard
from monolith.train.config import RanksConfig, TrainConfig
from monolith.train.hooks.barrier import MachineHealth
from monolith.train.hooks.installed import Others
from monolith.train.model import Model
from monolith.wire.bulk import Traffic

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Bucket:
    """Weights whose gradients are sent together."""

    weights: list[nn.Parameter]
    waits_for: set[int] = field(default_factory=set)
    """The `id()` of each weight that has no gradient yet, in this step."""
    finish: Callable[[], Tensor] | None = None
    """Waits for the sum, once the bucket was sent."""


class AveragedGradients:
    """The gradients of one model's dense weights, averaged over ranks. Used by the training thread.

    Weights are grouped into buckets in the order in which backward reaches them, last layer first. A bucket
    is sent as soon as all of its gradients are there, so the sum overlaps with the rest of backward:

        begin(examples) ──► backward: bucket 0 sent, bucket 1 sent, ... ──► finish: wait, take the means

    Every rank sends the same buckets in the same order, whatever order its gradients come in.

    Args:
        weights: In the same order on every rank.
        collective: Used for nothing else.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], collective: Collective, config: RanksConfig | None = None
    ) -> None:
        self._weights = list(weights)
        self._collective = collective
        self._config = config or RanksConfig()
        self._buckets = _in_buckets(self._weights, self._config.bucket_bytes)
        self._bucket_of = {id(w): bucket for bucket in self._buckets for w in bucket.weights}
        self._examples = 0
        self._weight = 1.0
        """Factor of this rank's gradients in the sum."""
        self.loss = torch.tensor(math.nan)
        self._next = len(self._buckets)
        """Index of the bucket to be sent next; past the last one outside of a step."""
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def begin(self, examples: int) -> None:
        self._examples = examples
        self._weight = float(examples)
        if self._config.half_gradients:  # their range is small: weight by the fraction of all examples
            self._weight /= max(float(self._collective.sum(torch.tensor(float(examples)))), 1.0)
        self._next = 0
        for bucket in self._buckets:
            bucket.waits_for = {id(weight) for weight in bucket.weights}
            bucket.finish = None

    @torch.no_grad()
    def finish(self, loss: Tensor | None, trouble: str | None) -> str | None:
        used = [float(weight.grad is not None) for weight in self._weights]
        self._send_ready(all_of_them=True)
        lost = 0.0 if loss is None else float(loss) * self._examples
        word = torch.tensor(
            [float(self._examples), lost, float(trouble is not None), *used], dtype=torch.float64
        )
        summed = self._collective.sum(word)
        examples, lost, troubled, *users = summed.tolist()
        if loss is None:
            device = self._weights[0].device if self._weights else None
            self.loss = torch.tensor(lost / max(examples, 1.0), device=device)
        total = 1.0 if self._config.half_gradients else max(examples, 1.0)
        self._take(total, {id(w): many for w, many in zip(self._weights, users, strict=True)})
        if not troubled:
            return None
        return trouble or "the loss or a gradient of another rank's batch is NaN or infinite"

    def add_up(self, squares: Tensor) -> Tensor:
        return self._collective.sum(squares.clone())

    def _note(self, weight: Tensor) -> None:
        """Note that backward has computed a gradient."""
        bucket = self._bucket_of[id(weight)]
        bucket.waits_for.discard(id(weight))
        if self._next < len(self._buckets):
            self._send_ready()

    def _send_ready(self, *, all_of_them: bool = False) -> None:
        """Send complete buckets, in order; with `all_of_them`, the incomplete ones too."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waits_for and not all_of_them:
                return
            self._next += 1
            if not self._config.skip_allreduce:
                bucket.finish = self._collective.begin_sum(self._packed(bucket))

    @torch.no_grad()
    def _packed(self, bucket: _Bucket) -> Tensor:
        """Return the gradients of a bucket, weighted."""
        parts = [w.new_zeros(w.numel()) if w.grad is None else w.grad.flatten() for w in bucket.weights]
        flat = torch.cat(parts).mul_(self._weight)
        return flat.half() if self._config.half_gradients else flat

    def _take(self, total: float, users: dict[int, float]) -> None:
        """Make every gradient the mean over all examples; None if no rank has one."""
        for bucket in self._buckets:
            if bucket.finish is None:
                continue
            flat = bucket.finish().to(bucket.weights[0].dtype).div_(total)
            parts = torch.split(flat, [weight.numel() for weight in bucket.weights])
            for weight, part in zip(bucket.weights, parts, strict=True):
                weight.grad = part.view_as(weight) if users[id(weight)] else None


def _in_buckets(weights: Sequence[nn.Parameter], most_bytes: int) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    room = 0
    for weight in reversed(weights):
        size = weight.numel() * weight.element_size()
        like = buckets and (buckets[-1].weights[0].dtype, buckets[-1].weights[0].device)
        if not buckets or size > room or like != (weight.dtype, weight.device):
            buckets.append(_Bucket([]))
            room = most_bytes
        buckets[-1].weights.append(weight)
        room -= size
    return buckets


class RankDense:
    """The weights, which are the same on all ranks, with the buffers of all of them."""

    name = "dense"

    def __init__(self, inner: DensePart, merged: Callable[[], AbstractContextManager[None]]) -> None:
        self._inner = inner
        self._merged = merged

    def snapshot(self, step: int) -> PartSnapshot:
        with self._merged():
            return self._inner.snapshot(step)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        return self._inner.restore(chain, options)


class RankPlacement:
    """Parameters of ranks: rows sharded across them or on servers, dense weights as a copy on every rank.

    Gradients of dense weights are averaged, so the copies stay equal. Buffers (the running means of a batch
    norm) are not: each rank has its own, and a checkpoint has them merged; see `merge_buffers`.

    Args:
        groups: The connections of the ranks.
        servers: The parameter servers that hold the rows, if the ranks do not.
        call_in: Makes the other ranks answer a lookup of rank 0 in a store, while all are quiesced.
    """

    def __init__(
        self,
        groups: RankGroups,
        config: RanksConfig | None = None,
        *,
        servers: ServerGroup | None = None,
        call_in: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self.rows: RankRows = RowsOnRanks(groups) if servers is None else RowsOnServers(groups, servers)
        self._config = config or RanksConfig()
        self._call_in = call_in
        self._run = TrainConfig()
        """The settings of the run, once they were checked."""
        self._model: Model | None = None
        self._average: AveragedGradients | None = None
        self._first_buffers: list[Tensor] = []
        """The buffers that all ranks started with."""
        self._merged: list[Tensor] | None = None
        """The buffers of all ranks merged, from a quiesce until they are saved."""
        self._data_stuck = False
        """Whether the source of this rank was blocked in a read when its pipeline was closed."""
        self.step = 0
        """The global step, as far as hooks on other threads ask for it."""

    @property
    def make_store(self) -> MakeStore:
        return self.rows.make_store

    @property
    def averaging(self) -> AveragedGradients | None:
        return self._average

    @property
    def others(self) -> Others | None:
        return OtherRanks(self._groups.rank, lambda: self.step, self.rows)

    @property
    def traffic(self) -> Traffic:
        """Bytes received from and sent to other ranks and servers. From any thread."""
        ranks, servers = self._groups.traffic, self.rows.traffic
        return Traffic(ranks.received + servers.received, ranks.sent + servers.sent)

    def over(self, local: MakeStore) -> MakeStore | None:
        return self.rows.over(local)

    def check(self, config: TrainConfig) -> None:
        self._run = config
        if config.hooks.slow_start_steps:
            raise ConfigError(
                "hooks.slow_start_steps: ranks take every step together, so none can start late"
            )

    def attach(self, model: Model) -> WeightOptimizer | None:
        if own := [store for store in model.stores if not self.rows.made(store)]:
            raise ConfigError(
                f"task {model.task.name!r}: its model has a store of its own, {own[0]!r}, so every rank "
                "would train its own copy of the rows. Leave out `store`: the run decides where rows live."
            )
        self._model = model
        assert model.sparse is not None
        model.sparse.in_step = True
        self.rows.attach(model, self._run)
        self._average = AveragedGradients(list(model.weights().values()), self._groups.dense, self._config)
        return scheduled(model)

    def parts(self, model: Model, *, incremental: bool, background: bool) -> list[Part]:  # noqa: ARG002
        return [self.rows.tables_part(), self.dense_part(model)]

    def dense_part(self, model: Model) -> Part:
        return RankDense(model.dense_part(), self._saving_buffers)

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Publishers | None:
        return self.rows.publishers(model, plan, guard)

    def restore_lost_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Do nothing: a run that loses a rank restarts on all ranks."""

    def survives(self, error: Exception) -> bool:  # noqa: ARG002
        return False

    def align(
        self,
        items: Iterator[Item],
        *,
        empty: Callable[[], Item],
        every: float,
        pressed: Callable[[], bool],
        silences: bool,
        shares_work: bool,
    ) -> Iterator[Item | Silence]:
        return aligned(
            items,
            self._groups.lookups,
            empty=empty,
            every=every,
            pressed=pressed,
            silences=silences,
            shares_work=shares_work,
            on_stuck=self._note_stuck,
        )

    def _note_stuck(self) -> None:
        self._data_stuck = True

    def check_data_closed(self) -> None:
        """Check that the data of before a rollback is not read any more.

        Raises:
            UnavailableError: It is, and would take an item that is to be trained on again.
        """
        if self._data_stuck:
            raise UnavailableError(
                f"rank {self._groups.rank} cannot roll back: its data is still being read, and gives "
                "nothing. All ranks restart from the last checkpoint"
            )

    def count_step(self, step: int) -> int:
        self.step = step + 1
        return self.step

    def refresh(self) -> None:
        """Do nothing: no rank trains without this one, so its weights are the newest."""

    @contextmanager
    def readable(self) -> Iterator[None]:
        with self.rows.solo_lookups(self._call_in), self._with_buffers(self._merged):
            yield

    # For the coordinator of the same rank

    def take_weights(self) -> None:
        """Start with the weights, optimizer state and buffers of rank 0. A collective call."""
        model, control = self._model, self._groups.control
        assert model is not None, "attach a model first"
        weights = model.weights()
        state = broadcast_bytes(control, dump_dense(weights, model.dense, 0, model.schedule))
        frozen = [p for name, p in model.module.named_parameters() if name not in weights]
        rest = [*frozen, *model.buffers().values()]
        packed = broadcast_bytes(control, pack_tensors(rest).tobytes())
        if self._groups.rank:
            load_dense_states(weights, model.dense, [read_dense(state)], model.schedule)
            copy_into(rest, unpack_tensors(np.frombuffer(packed, np.uint8).copy(), rest))
        self._first_buffers = [buffer.clone() for buffer in model.buffers().values()]

    def gather_buffers(self, examples: int) -> None:
        """Merge the buffers of all ranks, for the checkpoint that follows. A collective call.

        Args:
            examples: The weight of this rank's buffers.
        """
        assert self._model is not None
        mine = list(self._model.buffers().values())
        if not mine or self._groups.size == 1:
            return
        control = self._groups.control
        weights = control.all_gather(torch.tensor([examples])).flatten().tolist()
        packed = control.all_gather(torch.from_numpy(pack_tensors(mine)))
        given = [(many, unpack_tensors(one.numpy(), mine)) for many, one in zip(weights, packed, strict=True)]
        self._merged = merge_buffers(self._first_buffers, given)

    def _saving_buffers(self) -> AbstractContextManager[None]:
        merged, self._merged = self._merged, None
        return self._with_buffers(merged)

    @contextmanager
    def _with_buffers(self, merged: Sequence[Tensor] | None) -> Iterator[None]:
        """Have the merged buffers in the module of this rank, while they are saved or evaluated."""
        if merged is None or self._model is None:
            yield
            return
        mine = list(self._model.buffers().values())
        own = [buffer.clone() for buffer in mine]
        copy_into(mine, merged)
        try:
            yield
        finally:
            copy_into(mine, own)


class OtherRanks:
    """The other ranks, all at the same step, and the servers, as far as hooks ask for them."""

    def __init__(self, rank: int, step: Callable[[], int], rows: RankRows) -> None:
        self.index = rank
        self._step = step
        self._rows = rows

    @property
    def servers(self) -> Sequence[str]:
        return self._rows.servers

    def read_step(self) -> int:
        return self._step()

    def server_health(self, server: int) -> MachineHealth:
        return self._rows.server_health(server)


def broadcast_bytes(collective: Collective, data: bytes) -> bytes:
    """Return the bytes of rank 0 on every rank. A collective call."""
    length = int(collective.broadcast(torch.tensor([len(data)]))[0])
    given = bytearray(data if len(data) == length else bytes(length)) or bytearray(1)
    sent = torch.frombuffer(given, dtype=torch.uint8)
    return collective.broadcast(sent).numpy().tobytes()[:length]
