"""What a checkpoint of a fleet is made of: as that of one process, so that either restores the other's.

Rows are written and read by the servers that hold them, each its share, at paths that all
processes reach. Weights come to the chief, who writes them as ever.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.checkpoint import DensePart, Part, RestoreOptions, SavedPart, merge_entries
from monolith.checkpoint.part import Entry, PartSnapshot, RestoreReport
from monolith.data import Shard
from monolith.data.source import Position
from monolith.errors import BarrierAlreadyPlacedError, ClusterError, ConfigError, RetryableError
from monolith.model import WeightOptimizer
from monolith.runtime.coordinator import Gathered, LastCheckpoint, RunState, Staleness, Start, WorkerState
from monolith.runtime.failover import LOOK_EVERY
from monolith.runtime.fleet import Fleet
from monolith.runtime.losses import Lost
from monolith.runtime.prefetch import Silence
from monolith.runtime.server_calls import TableWork
from monolith.runtime.standbys import describe_standbys
from monolith.store import MakeStore, ParameterServerStore, ServerGroup
from monolith.store.dense import pack_tensors, unpack_tensors
from monolith.store.dense_cache import DenseCache
from monolith.store.dense_config import DenseConfig
from monolith.sync.guard import PublishGuard
from monolith.train.config import TrainConfig
from monolith.train.hook import DATA_ENDED, TrainingRun
from monolith.train.hooks.barrier import Barrier, Placement
from monolith.train.hooks.installed import Others
from monolith.train.model import Model
from monolith.train.publishing.holders import Holders
from monolith.train.publishing.served_rows import RowsOfServers
from monolith.train.publishing.share import PublishPlan
from monolith.wire.bulk import Traffic

_log = logging.getLogger(__name__)

CHIEF = 0


class FleetBuffers:
    """The buffers of one worker's module, and its way to those of the others. Used by its training thread.

    Args:
        worker: Which one this is.
        buffers: By name, as they stand in the module. With none, nobody is asked for anything.
    """

    def __init__(self, group: ServerGroup, worker: int, buffers: Mapping[str, Tensor]) -> None:
        self._group = group
        self._worker = worker
        self._mine = list(buffers.values())
        self._first: list[Tensor] = []
        """What all began with."""
        self._examples = 0

    def begin(self) -> None:
        """Begin with what the chief has; it calls this before the others do."""
        if not self._mine:
            return
        if self._worker == CHIEF:
            self._give(0)
        else:
            for _, theirs in self._take(CHIEF):
                _fill(self._mine, theirs)
        self._first = [buffer.clone() for buffer in self._mine]

    def lay_down(self, examples: int) -> None:
        """Give what this worker has to whoever saves; the chief keeps its own, and says only what it weighs.

        Args:
            examples: Trained on by this worker since all began.
        """
        self._examples = examples
        if self._mine and self._worker != CHIEF:
            self._give(examples)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Have the buffers of all in the chief's module, while they are saved."""
        others = self._take(None) if self._mine else []
        if not others:
            yield
            return
        own = [buffer.clone() for buffer in self._mine]
        _fill(self._mine, merge_buffers(self._first, [(self._examples, own), *others]))
        try:
            yield
        finally:
            _fill(self._mine, own)

    def _give(self, examples: int) -> None:
        body = {"worker": self._worker, "examples": examples}
        self._group.exchange("put_buffers", {0: (body, pack_tensors(self._mine))})

    def _take(self, worker: int | None) -> list[tuple[int, list[Tensor]]]:
        """Return what others laid down, and how many examples it weighs; of all of them but the chief, or of
        one."""
        answer = self._group.exchange("get_buffers", {0: ({"worker": worker}, b"")})[0]
        about: Sequence[tuple[int, int]] = answer.body["workers"]
        size = len(answer.data) // max(len(about), 1)
        return [
            (examples, unpack_tensors(answer.data[number * size : (number + 1) * size], self._mine))
            for number, (who, examples) in enumerate(about)
            if who == worker or (worker is None and who != CHIEF)
        ]


def merge_buffers(first: Sequence[Tensor], given: Sequence[tuple[int, Sequence[Tensor]]]) -> list[Tensor]:
    """Return one tensor for each buffer.

    Args:
        first: What all began with.
        given: Of each worker, the chief before the others: examples, and its buffers.
    """
    total = sum(examples for examples, _ in given)
    merged = []
    for number, before in enumerate(first):
        all_of_them = [buffers[number] for _, buffers in given]
        own = all_of_them[0]
        if own.is_floating_point():
            same = all(torch.equal(own, other) for other in all_of_them)
            weighted = [buffers[number].double() * (examples / max(total, 1)) for examples, buffers in given]
            merged.append(own if same or not total else torch.stack(weighted).sum(0).to(own.dtype))
        elif own.dtype is torch.bool or own.is_complex():
            merged.append(own)
        else:
            merged.append(before + sum((one - before for one in all_of_them), torch.zeros_like(before)))
    return merged


def _fill(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


class TableServers(Protocol):
    """The servers of a run, as far as its checkpoints have to do with them."""

    @property
    def keeps_going(self) -> bool:
        """Whether the run outlives the loss of a server."""

    @property
    def losses(self) -> int:
        """How often servers were lost so far."""

    @property
    def fresh(self) -> Sequence[int]:
        """Servers that hold nothing of the run yet, so that a restore is for them."""

    @property
    def tables(self) -> TableWork:
        """What the servers may be asked to do with their tables."""

    def note_cut(self, step: int) -> None:
        """Hear that this step is about to be cut: all updates are done."""

    def begin_commit(self, losses: int) -> None:
        """Hear that all servers have written a checkpoint; see `ServerRecovery`."""

    def end_commit(self) -> None:
        """Hear that the checkpoint counts, or never will."""


class ServedTables:
    """The tables of all servers, held fast and written by them."""

    name = "tables"

    def __init__(self, servers: TableServers) -> None:
        self._servers = servers

    def snapshot(self, step: int) -> PartSnapshot:
        cut = _ServedCut(self._servers, secrets.token_hex(8))
        self._servers.note_cut(step)
        try:
            self._servers.tables.cut(cut.name)
        except BaseException:
            cut.close(saved=False)
            raise
        return cut

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        # Of a run that goes on, only the servers that lost what they held: the others are ahead of it.
        answers = self._servers.tables.restore(chain, options, self._servers.fresh)
        if not answers:
            return RestoreReport(skipped={"tables": "all servers still hold them"})
        rows = {name: sum(answer.rows[name] for answer in answers) for name in answers[0].loaded}
        loaded = {name: f"{many:,} rows on {len(answers)} servers" for name, many in rows.items()}
        return replace(RestoreReport().merge(*(answer.report() for answer in answers)), loaded=loaded)


class _ServedCut:
    def __init__(self, servers: TableServers, name: str) -> None:
        self._servers = servers
        self.name = name
        self._losses = servers.losses
        self._commits = False
        self._closed = False

    def write(self, prefix: str, *, full: bool) -> Entry:
        written = self._servers.tables.write(self.name, prefix, full=full)
        if not self._commits:
            self._servers.begin_commit(self._losses)
            self._commits = True
        return merge_entries([answer.entry for answer in written])

    def close(self, *, saved: bool) -> None:
        if not self._closed:
            self._closed = True
            # A moment that was not saved is of no use to anybody, and a server that is gone holds it no more.
            try:
                passing = not saved or self._servers.keeps_going
                with suppress(ClusterError) if passing else nullcontext():
                    self._servers.tables.close_cut(self.name, saved=saved)
            finally:
                if self._commits:
                    self._servers.end_commit()


class ServedDense:
    """The weights, and the buffers of all workers: brought here to be saved, sent out again when restored."""

    name = "dense"

    def __init__(
        self,
        fleet: Fleet,
        inner: DensePart,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        *,
        schedule: LRScheduler | None = None,
        buffers: FleetBuffers,
    ) -> None:
        self._fleet = fleet
        self._inner = inner
        self._parameters = dict(parameters)
        self._optimizer = optimizer
        self._schedule = schedule
        self._buffers = buffers

    def snapshot(self, step: int) -> PartSnapshot:
        if self._optimizer is not None:
            self._fleet.group.fetch_dense(self._parameters, self._optimizer, schedule=self._schedule)
        with self._buffers.merged():
            return self._inner.snapshot(step)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        cleared = options.custom.clears(options.model_dir)
        report = self._inner.restore(chain, options)
        if not self._fleet.resumed:
            self.send()
        elif chain and not cleared:  # servers that still hold theirs keep them, whatever was asked for
            self._fleet.restore_dense(chain[-1], options)
        return report

    def send(self) -> None:
        """Give the servers the weights as they are here."""
        if self._optimizer is not None:
            self._fleet.group.send_dense(self._parameters, self._optimizer, schedule=self._schedule)


class FleetBarrier:
    """A `Barrier` that the chief places. The others stand still between their steps. Thread-safe."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()  # guards what follows
        self._placed: Placement | None = None

    @property
    def capacity(self) -> int:
        return self._fleet.num_workers

    def place(self, action: str = "") -> Placement:
        with self._lock:
            if self._placed is not None:
                raise BarrierAlreadyPlacedError(
                    f"cannot place a barrier (action {action!r}): one is in place (action "
                    f"{self._placed.action!r}). Wait until it is removed, or remove it."
                )
            self._placed = Placement(action, self._fleet.hold())
            return self._placed

    def remove(self) -> None:
        with self._lock:
            if self._placed is not None:
                self._placed = None
                self._fleet.let_go()

    def placement(self) -> Placement | None:
        with self._lock:
            return self._placed

    def blocked_indices(self) -> list[int]:
        with self._lock:
            if self._placed is None:
                return []
            return [0, *self._fleet.standing_still()]


Item = TypeVar("Item")


class FleetCoordinator:
    """`Coordinator` of a worker, whose model is on parameter servers. The chief leads.

    Args:
        fleet: This worker's place, which whoever made it closes. It serves one run; who begins again joins
            the fleet again.
        dense: When this worker fetches dense weights and pushes their gradients.
    """

    def __init__(self, fleet: Fleet, dense: DenseConfig | None = None) -> None:
        self._fleet = fleet
        self._config = dense or DenseConfig()
        self._barrier = FleetBarrier(fleet)
        self._served: ServedDense | None = None
        self._buffers: FleetBuffers | None = None
        self._store: ParameterServerStore | None = None
        self._halts: dict[int, WorkerState] = {}
        """Halt -> how this worker stood then, until it is on disk."""
        self._departed = False

    in_step = False
    together = None

    @property
    def leads(self) -> bool:
        return self._fleet.is_chief

    @property
    def share(self) -> Shard:
        return Shard(self._fleet.index, self._fleet.max_workers)

    @property
    def may_change(self) -> bool:
        return self._fleet.max_workers > 1

    @property
    def more_may_come(self) -> bool:
        return self._fleet.max_workers > self._fleet.num_workers

    @property
    def departed(self) -> bool:
        return self._departed

    @property
    def save_wanted(self) -> bool:
        return self.leads and not self._fleet.deals_out and self._fleet.save_wanted

    @property
    def finished(self) -> bool:
        return self._fleet.finished

    @property
    def lost(self) -> Lost:
        return self._fleet.lost

    @property
    def resumed(self) -> bool:
        return self.leads and self._fleet.resumed

    @property
    def make_store(self) -> MakeStore:
        return self._fleet.make_store

    def holding(self, local: MakeStore) -> None:  # noqa: ARG002
        return None

    @property
    def barrier(self) -> Barrier:
        return self._barrier

    @property
    def others(self) -> Others | None:
        return self._fleet

    def check(self, config: TrainConfig) -> None:
        if config.alert is not None and config.alert.action == "rollback":
            raise ConfigError(
                "alert: several processes cannot roll back together yet; set alert.action to 'stop'"
            )
        if config.deterministic and self._config.depends_on_time:
            raise ConfigError(
                "train.deterministic: dense weights would depend on how fast servers answer. Set "
                "dense.max_staleness to 1, and dense.prefetch where dense.postpush is set."
            )

    def attach(self, model: Model) -> WeightOptimizer | None:
        if own := [store for store in model.stores if not isinstance(store, ParameterServerStore)]:
            raise ConfigError(
                f"task {model.task.name!r}: its model has a store of its own, {own[0]!r}, so every worker "
                "would train its own copy of the rows. Leave out `store`: the run decides where rows live."
            )
        weights, store = model.weights(), model.stores[0]
        assert isinstance(store, ParameterServerStore)
        if model.dense is not None:
            scheduled = model.schedule is not None
            store.attach_dense(weights, model.dense, config=self._config, scheduled=scheduled)
        self._store = store
        self._buffers = FleetBuffers(self._fleet.group, self._fleet.index, model.buffers())
        self._served = ServedDense(
            self._fleet,
            model.dense_part(),
            weights,
            model.dense,
            schedule=model.schedule,
            buffers=self._buffers,
        )
        return ServedOptimizer(store, model.dense)

    def parts(self, model: Model, *, incremental: bool, beside: bool) -> list[Part]:  # noqa: ARG002
        return [ServedTables(self._fleet), self._dense()]  # servers have the same settings

    def dense_part(self, model: Model) -> Part:  # noqa: ARG002
        return self._dense()

    def _dense(self) -> ServedDense:
        assert self._served is not None, "attach a model first"
        return self._served

    def holders(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:  # noqa: ARG002
        if not self.leads:
            return None  # servers hold the rows, and the chief tells them
        every = plan.config.dense_interval.total_seconds()
        return RowsOfServers(self._fleet.group, lambda: self._fleet.run, every=every)

    def restore_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        self._fleet.last_checkpoint = last

    def outlives(self, error: Exception) -> bool:
        return self._fleet.keeps_going and isinstance(error, ClusterError)

    # Beginning

    def begin(self, *, hands_out: bool = False) -> None:
        if self.leads:
            self._fleet.begin(hands_out=hands_out)
            if not self._fleet.resumed:
                self._dense().send()

    def go_to(self, step: int) -> None:
        if not self.leads:
            return
        if self._fleet.resumed:  # others have trained on meanwhile: the step never goes back
            step = max(step, self._fleet.read_step())
        self._fleet.group.set_step(step)

    def open(self, start: Start, me: RunState) -> Start | None:
        found: Start | None = start
        assert self._store is not None, "attach a model first"
        assert self._buffers is not None
        if self.leads:
            self._buffers.begin()
            if self._fleet.resumed and start.hands_out:
                found = start = replace(start, positions=self._fleet.start.positions)
            self._fleet.open(start)
            if self._fleet.resumed:
                me_then, *others = self._fleet.safe
                step = self._fleet.read_step()
                known = tuple(state for state in others if state is not None)
                found = replace(start, step=step, back=me_then, others=known)
        elif (found := self._fleet.join(lambda: me.interrupted)) is not None:
            self._buffers.begin()
        if found is not None:
            self._store.pull_dense()
        return found

    # Between steps

    def read_in_step(
        self,
        items: Iterator[Item],
        *,
        every: float,  # noqa: ARG002
        pressed: Callable[[], bool],  # noqa: ARG002
        silences: bool,  # noqa: ARG002
    ) -> Iterator[Item | Silence]:
        return items

    def meet(self, me: RunState) -> str | None:
        self._fleet.check()
        if self._fleet.keeps_going:
            self._fleet.note_trained(me.state().examples)
        self._take_dealt(me)
        if not self.leads and self._fleet.is_halted:
            me.drain()
            self._settle()
            state = me.state()
            self._lay_down(state)
            if halt := self._fleet.wait_at_halt(state):
                self._halts[halt] = state
            self._take_dealt(me)
        if self.leads and self._fleet.hands_out:
            self._hand_on(me)
        return self._fleet.stop_reason

    def _take_dealt(self, me: RunState) -> None:
        """Go on with what the chief has dealt this worker, if it has since."""
        if not self.leads and (position := self._fleet.take_dealt()) is not None:
            self._halts.clear()  # its source is to hear of no part that is another's now
            me.move_to(position)

    def _hand_on(self, me: RunState) -> bool:
        """Have those who are there get the work of those who are not; return whether there was any."""
        return self._deal(me) if self._fleet.deals_out else self._fleet.give_back(me.give_back)

    def _deal(self, me: RunState) -> bool:
        """Halt everybody and deal out all work, where somebody came or went; return whether it was."""
        if not self._fleet.deal_wanted:
            return False
        me.drain()
        with ExitStack() as halted:
            try:
                halt = halted.enter_context(self._fleet.halted(lambda: me.interrupted))
            except ClusterError as error:
                if not self.outlives(error):
                    raise
                _log.warning("work is not dealt out yet: %s", error)
                return False
            self._settle()
            position = self._fleet.deal(halt, me.state(), me.deal, me.give_back)
            if position is not None:
                me.move_to(position)
        return position is not None

    def wait_for_more(self, me: RunState, look: Callable[[], None]) -> bool:
        if not self.leads or not self._fleet.hands_out:
            return False
        self._settle()
        more = False

        def idle() -> None:
            nonlocal more
            look()
            more = self._hand_on(me) or more

        def ended() -> bool:
            return more or me.interrupted or self._fleet.stop_reason is not None

        idle()
        while not ended():
            self._fleet.wait_for_others(idle, until=ended)
            idle()  # who left work behind is not waited for
            if not self._fleet.has_departing:
                break
            time.sleep(LOOK_EVERY)  # what it did last is being saved
        return more and not me.interrupted and self._fleet.stop_reason is None

    def count(self, step: int) -> int:  # noqa: ARG002
        cache = self._cache  # server 0 said it when it took the gradients of the weights, or will
        return self._fleet.group.step if cache is None else cache.step

    def refresh(self) -> None:
        if (cache := self._cache) is not None:
            cache.refresh()

    def staleness(self) -> Staleness | None:
        if (cache := self._cache) is None:
            return None
        last, most = cache.behind
        return Staleness(last=last, most=most)

    def traffic(self) -> Traffic | None:
        return self._fleet.group.traffic

    def standbys(self) -> str:
        return describe_standbys(self._fleet.standbys)

    @property
    def _cache(self) -> DenseCache | None:
        return None if self._store is None else self._store.dense

    def _lay_down(self, state: WorkerState) -> None:
        """Leave the buffers of this worker to whoever saves."""
        if self._buffers is not None:
            self._buffers.lay_down(state.examples)

    def _settle(self) -> None:
        """See everything done that this worker pushed behind its steps."""
        if (cache := self._cache) is not None:
            cache.settle()

    @contextmanager
    def halted(self, me: RunState) -> Iterator[Gathered]:
        with self._fleet.halted(lambda: me.interrupted) as halt:
            self._settle()  # or its last steps would be counted after this
            state = me.state()
            self._lay_down(state)
            self._halts[halt.number] = state
            yield self._gathered(halt.states)

    def looking(self) -> AbstractContextManager[None]:
        return nullcontext()  # the servers answer

    def go_back(self, start: Start) -> None:  # noqa: ARG002
        raise ConfigError("alert: several processes cannot roll back together yet")  # and `check` said so

    def note_saved(self, position: Position) -> None:
        if self.leads:
            # Of several at which this process had come no further, the first: the others may not be on disk.
            halts = [halt for halt, state in self._halts.items() if state.position is position]
            if halts:
                halt = min(halts)
                state = self._halts[halt]
                self._forget_halts(halt)
                self._fleet.note_saved(halt, state)

    def safe(self) -> Position | None:
        saved = self._fleet.saved_halt
        if self.leads or saved not in self._halts:
            return None
        position = self._halts[saved].position
        self._forget_halts(saved)
        return position

    def _forget_halts(self, last: int) -> None:
        self._halts = {number: held for number, held in self._halts.items() if number > last}

    def _gathered(self, states: Mapping[int, WorkerState]) -> Gathered:
        return Gathered(step=self._fleet.group.read_step(), others=tuple(states.values()))

    # Ending

    def gather(self, me: RunState, run: TrainingRun, look: Callable[[], None]) -> Gathered | None:
        if not self.leads:
            return None
        self._settle()
        self._lay_down(me.state())
        if run.stop_reason != DATA_ENDED:
            self._fleet.stop(run.stop_reason or "the chief has ended", unfinished=run.interrupted)
        return self._gathered(self._fleet.wait_for_others(look, stopping=run.interrupted))

    def leave(self, run: TrainingRun, state: WorkerState) -> bool:
        """As the chief, who has saved by now, tell everybody that the run is over. As another worker, wait to
        hear it: what it trained last is safe only then. One that is told to stop leaves the rest of its work
        to the others where the data hands out work, and is gone; else it stops everybody."""
        if self.leads:
            self._fleet.end()
            return False
        if not self._fleet.joined:
            return False
        if self.leaves_work(run):
            self._settle()
            self._lay_down(state)
            self._fleet.leave(state, gives_back=True)
            self._departed = True
            return False
        if run.interrupted:  # its share of the data is not done, so the run cannot be either
            self._fleet.stop(f"worker {self._fleet.index}: {run.stop_reason}", unfinished=True)
        self._settle()
        self._lay_down(state)
        self._fleet.leave(state)
        self._fleet.wait_for_end()
        return True

    def leaves_work(self, run: TrainingRun) -> bool:
        if self.leads or not run.interrupted or not self._fleet.joined or not self._fleet.hands_out:
            return False
        return self._fleet.stop_reason is None  # otherwise all stop

    def fail(self, error: BaseException | None) -> None:
        self._fleet.fail(
            "it was ended" if error is None else f"{type(error).__name__}: {error}",
            final=not isinstance(error, RetryableError),
            lost=isinstance(error, RetryableError),
        )


class ServedOptimizer:
    """Stands where a training step expects the optimizer of the dense weights, which the servers have."""

    def __init__(self, store: ParameterServerStore, inner: torch.optim.Optimizer | None) -> None:
        self._store = store
        self._inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [] if self._inner is None else self._inner.param_groups

    def step(self) -> None:
        """Send the gradients, and take the newest weights."""
        self._store.push_dense()
        self._store.pull_dense()

    def zero_grad(self) -> None:
        if self._inner is not None:
            self._inner.zero_grad()
