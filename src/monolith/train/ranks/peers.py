"""The peers of a rank: the other ranks, with whom it takes every step.

Between two steps all ranks say a word, which most of the time is nothing. Rank 0 leads:

    meet       everybody says a word, and goes on, or stops, at the same step
    halted     rank 0 says so in place of meeting: all finish their updates, say where they stand, and meet
               again when it lets them go
    looking    while it holds them, rank 0 evaluates: the others hear of each lookup, and answer with the rows
               that they hold
    go_back    while it holds them, rank 0 has restored the rows of all: they take its weights, its step and
               their places in the data
    gather     the word of who has no more to do; all stop where they hear it
    leave      the others wait, through the halts of rank 0's last saves, until it says that all is over

So whoever comes to the next word, for whichever reason, hears the same as everybody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from monolith.checkpoint import Part
from monolith.data import Shard
from monolith.data.source import Position
from monolith.errors import ConfigError, RetryableError, UnavailableError
from monolith.model import WeightOptimizer
from monolith.store import MakeStore, RankGroups, ServerGroup
from monolith.store.dense import dump_dense, load_dense_states, pack_tensors, read_dense, unpack_tensors
from monolith.sync.guard import RecoveringGuard
from monolith.train.config import TrainConfig
from monolith.train.fleet.buffers import merge_buffers
from monolith.train.hook import TrainingRun
from monolith.train.hooks.barrier import Barrier, MachineHealth
from monolith.train.hooks.installed import Others
from monolith.train.lane import Silence
from monolith.train.lost import Lost
from monolith.train.model import Model
from monolith.train.peers import (
    Gathered,
    LastCheckpoint,
    ScheduledOptimizer,
    Staleness,
    Start,
    Stepper,
    WorkerState,
)
from monolith.train.publishing.holders import Holders
from monolith.train.publishing.share import PublishPlan
from monolith.train.ranks.agreement import agreed
from monolith.train.ranks.averaging import AveragedGradients
from monolith.train.ranks.barrier import WAITS, RankBarrier
from monolith.train.ranks.config import RanksConfig
from monolith.train.ranks.parts import RankDense
from monolith.train.ranks.rows import RankRows, RowsOnRanks, RowsOnServers
from monolith.train.ranks.words import NOTHING, Word, hear_from_first, say_to_all
from monolith.wire.bulk import Traffic

Item = TypeVar("Item")

BEGUN = "begun"
LOOK_EVERY = 0.1
"""Seconds between two looks whether rank 0 has begun."""


class RankPeers:
    """`Peers` of one rank. Rank 0 leads.

    Args:
        groups: What connects the ranks; closed by whoever made it. They serve one run.
        servers: Those who hold the rows, where it is not the ranks themselves; likewise.
    """

    may_change = False
    more_may_come = False
    departed = False
    save_wanted = False
    resumed = False
    lost = Lost()
    in_step = True

    def __init__(
        self, groups: RankGroups, config: RanksConfig | None = None, *, servers: ServerGroup | None = None
    ) -> None:
        self._groups = groups
        self._rows: RankRows = RowsOnRanks(groups) if servers is None else RowsOnServers(groups, servers)
        self._config = config or RanksConfig()
        self._run = TrainConfig()
        """The settings of the run, once they were looked at."""
        self._barrier = RankBarrier(groups)
        self._model: Model | None = None
        self._average: AveragedGradients | None = None
        self._first_buffers: list[torch.Tensor] = []
        self._merged: list[torch.Tensor] | None = None
        self._halts: dict[int, WorkerState] = {}
        """Halt -> how this rank stood then, until it is on disk."""
        self._halt = 0
        self._halted: Gathered | None = None
        """While this rank, which leads, holds the others."""
        self._back: Start | None = None
        """Where all go on when it lets them go, if that is elsewhere."""
        self._saved = self._told_saved = 0
        self._begun = ""
        """What the others hear when rank 0 has begun and restored everything."""
        self._joined = False
        self._stop: str | None = None
        """Why all stop, as all have heard."""
        self._unfinished = False
        self._stuck = False
        """Whether the data of this rank is still being read although it was closed."""
        self._me: Stepper | None = None

    @property
    def leads(self) -> bool:
        return self._groups.rank == 0

    @property
    def share(self) -> Shard:
        return Shard(self._groups.rank, self._groups.size)

    @property
    def finished(self) -> bool:
        return not self._unfinished

    @property
    def make_store(self) -> MakeStore:
        return self._rows.make_store

    def holding(self, local: MakeStore) -> MakeStore | None:
        return self._rows.holding(local)

    @property
    def barrier(self) -> Barrier:
        return self._barrier

    @property
    def others(self) -> Others | None:
        return OtherRanks(self._groups.rank, lambda: 0 if self._me is None else self._me.step, self._rows)

    @property
    def together(self) -> AveragedGradients | None:
        return self._average

    def check(self, config: TrainConfig) -> None:
        self._run = config
        if config.hooks.slow_start_steps:
            raise ConfigError(
                "hooks.slow_start_steps: ranks take every step together, so none can start late"
            )

    def attach(self, model: Model) -> WeightOptimizer | None:
        if own := [store for store in model.stores if not self._rows.made(store)]:
            raise ConfigError(
                f"task {model.task.name!r}: its model has a store of its own, {own[0]!r}, so every rank "
                "would train its own copy of the rows. Leave out `store`: the run decides where rows live."
            )
        self._model = model
        assert model.sparse is not None
        model.sparse.in_step = True
        self._rows.attach(model, self._run)
        self._average = AveragedGradients(list(model.weights().values()), self._groups.dense, self._config)
        if model.dense is None or model.schedule is None:
            return model.dense
        return ScheduledOptimizer(model.dense, model.schedule)

    def parts(self, model: Model, *, incremental: bool, beside: bool) -> list[Part]:  # noqa: ARG002
        return [self._rows.tables_part(), self.dense_part(model)]

    def dense_part(self, model: Model) -> Part:
        return RankDense(model.dense_part(), self._saving_buffers)

    def holders(self, model: Model, plan: PublishPlan, guard: RecoveringGuard) -> Holders | None:
        return self._rows.holders(model, plan, guard)

    def restore_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Do nothing: who loses a rank begins again."""

    def outlives(self, error: Exception) -> bool:  # noqa: ARG002
        return False

    # Beginning

    def begin(self, *, hands_out: bool = False) -> None:  # noqa: ARG002
        """Begin with the rows, as rank 0; weights are the same on all."""
        if self.leads:
            self._begun = self._rows.begin()

    def go_to(self, step: int) -> None:
        """Do nothing: the others hear it when all go on."""

    def open(self, start: Start, me: Stepper) -> Start | None:
        assert self._model is not None, "attach a model first"
        self._me = me
        if self.leads:
            self._groups.put_note(BEGUN, self._begun)
        while not (begun := self._groups.get_note(BEGUN)):
            if me.interrupted:
                return None
            self._groups.check()
            time.sleep(LOOK_EVERY)
        if not self.leads:
            self._rows.join(begun)
        self._joined = True
        return self._begin_at(start)

    def _begin_at(self, start: Start | None) -> Start:
        """Take up where rank 0 says, with its weights."""
        said = say_to_all(self._groups.control, Start, start if self.leads else None)
        assert said[0] is not None
        self._take_weights()
        return said[0]

    def _take_weights(self) -> None:
        """Begin with the weights, optimizer state and buffers of rank 0."""
        model, control = self._model, self._groups.control
        assert model is not None
        weights = model.weights()
        state = hear_from_first(control, dump_dense(weights, model.dense, 0, model.schedule))
        frozen = [p for name, p in model.module.named_parameters() if name not in weights]
        kept = [*frozen, *model.buffers().values()]
        rest = hear_from_first(control, pack_tensors(kept).tobytes())
        if not self.leads:
            load_dense_states(weights, model.dense, [read_dense(state)], model.schedule)
            _fill(kept, _unpacked(rest, kept))
        self._first_buffers = [buffer.clone() for buffer in model.buffers().values()]

    # Between steps

    def read_in_step(
        self, items: Iterator[Item], *, every: float, pressed: Callable[[], bool], silences: bool
    ) -> Generator[Item | Silence, None, None]:
        return agreed(
            items,
            self._groups.lookups,
            every=every,
            pressed=pressed,
            silences=silences,
            on_stuck=self._note_stuck,
        )

    def _note_stuck(self) -> None:
        self._stuck = True

    def meet(self, me: Stepper) -> str | None:
        self._groups.check()
        if me.interrupted and self._stop is None:
            word = Word(stop=f"rank {self._groups.rank} was asked to stop", interrupted=True)
        else:
            word = NOTHING
        self._go_through(word, me)
        return self._stop

    def _go_through(self, word: Word, me: Stepper) -> None:
        """Say a word, and again after each halt, until everybody goes on."""
        while self._say(word).halt:
            self._stand_still(me)

    def _say(self, word: Word) -> Word:
        """Say a word and hear those of all; return that of rank 0."""
        if self.leads and self._saved > self._told_saved:
            self._told_saved = self._saved
            word = replace(word, saved=self._saved)
        key, waits = WAITS.format(rank=self._groups.rank), False

        def waiting() -> None:
            nonlocal waits
            self._groups.check()
            if not waits:
                waits = True
                self._groups.put_note(key, "yes")

        try:
            said = say_to_all(self._groups.control, Word, None if word == NOTHING else word, waiting)
        finally:
            if waits:
                self._groups.put_note(key, "")
        words = [one or NOTHING for one in said]
        if not words[0].halt:
            self._unfinished |= any(one.interrupted for one in words)
            self._stop = self._stop or next((one.stop for one in words if one.stop is not None), None)
        if words[0].saved:
            self._saved = words[0].saved
        return words[0]

    def _stand_still(self, me: Stepper) -> Gathered:
        """Finish the updates of this rank, and hear where the others stand, for as long as it takes."""
        me.drain()
        self._halt += 1
        gathered = self._gather_states(me)
        self._halts[self._halt] = me.state()
        if not self.leads:
            while (word := self._say(NOTHING)).look:
                self._rows.answer(word.look - 1)
            if word.back:  # said when rank 0 lets everybody go
                me.go_back(self._begin_at(None))
                self._check_read_anew()
        return gathered

    def _gather_states(self, me: Stepper) -> Gathered:
        states = say_to_all(self._groups.control, WorkerState, me.state())
        self._gather_buffers(me.state().examples)
        others = [state for rank, state in enumerate(states) if rank != self._groups.rank]
        return Gathered(step=me.step, others=tuple(state for state in others if state is not None))

    def count(self, step: int) -> int:
        return step + 1

    def refresh(self) -> None:
        """Do nothing: nobody has trained without this rank."""

    def staleness(self) -> Staleness | None:
        return None

    def traffic(self) -> Traffic | None:
        ranks, servers = self._groups.traffic, self._rows.traffic
        return Traffic(ranks.received + servers.received, ranks.sent + servers.sent)

    def standbys(self) -> str:
        return ""

    @contextmanager
    def halted(self, me: Stepper) -> Iterator[Gathered]:
        if self._halted is not None:  # this rank holds the others already
            yield self._halted
            return
        self._say(Word(halt=self._halt + 1))
        self._halted = self._stand_still(me)
        try:
            yield self._halted
        except BaseException:
            self._back = None
            with suppress(RetryableError):
                self._let_go()
            raise
        self._let_go()

    @contextmanager
    def looking(self) -> Iterator[None]:
        assert self._halted is not None, "the others must stand still"
        with self._rows.solo_lookups(self._call_in), self._with_all_buffers(self._merged):
            yield

    def _call_in(self, store: int) -> None:
        self._say(Word(look=store + 1))

    def _let_go(self) -> None:
        self._halted = None
        start, self._back = self._back, None
        self._say(Word(back=start is not None))
        if start is not None:
            self._begin_at(start)

    def go_back(self, start: Start) -> None:
        self._check_read_anew()
        self._back = start

    def _check_read_anew(self) -> None:
        """See that nobody still reads the data from where it was before all went back.

        Raises:
            UnavailableError: Somebody does, and would take an item that is to be trained again.
        """
        if self._stuck:
            raise UnavailableError(
                f"rank {self._groups.rank} cannot go back: its data is still being read, and gives nothing. "
                "All begin again from the last checkpoint"
            )

    def note_saved(self, position: Position) -> None:
        if self.leads:
            for halt in [one for one, state in self._halts.items() if state.position is position]:
                self._forget_halts(halt)
                self._saved = halt

    def safe(self) -> Position | None:
        if self.leads or self._saved not in self._halts:
            return None
        position = self._halts[self._saved].position
        self._forget_halts(self._saved)
        return position

    def _forget_halts(self, last: int) -> None:
        self._halts = {number: held for number, held in self._halts.items() if number > last}

    # Buffers: each rank has its own, and a checkpoint has those of all; see `monolith.train.fleet.buffers`

    def _gather_buffers(self, examples: int) -> None:
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
        return self._with_all_buffers(merged)

    @contextmanager
    def _with_all_buffers(self, merged: Sequence[torch.Tensor] | None) -> Iterator[None]:
        """Have the buffers of all ranks in the module of this one, while they are saved or looked at."""
        if merged is None or self._model is None:
            yield
            return
        mine = list(self._model.buffers().values())
        own = [buffer.clone() for buffer in mine]
        _fill(mine, merged)
        try:
            yield
        finally:
            _fill(mine, own)

    # Ending

    def wait_for_more(self, me: Stepper, look: Callable[[], None]) -> bool:  # noqa: ARG002
        return False

    def leaves_work(self, run: TrainingRun) -> bool:  # noqa: ARG002
        return False

    def gather(self, me: Stepper, run: TrainingRun, look: Callable[[], None]) -> Gathered | None:  # noqa: ARG002
        if not self._joined:
            return None
        if self._stop is None:
            reason = run.stop_reason or "it has no more to do"
            self._go_through(Word(stop=reason, interrupted=run.interrupted), me)
        gathered = self._gather_states(me)
        return gathered if self.leads else None

    def leave(self, run: TrainingRun, state: WorkerState) -> bool:  # noqa: ARG002
        if not self._joined:
            return False
        assert self._me is not None
        if self.leads:
            self._groups.expect_end()
            self._say(Word(over=True))
            self._rows.end(finished=self.finished and not run.interrupted)
            return False
        while not (word := self._say(NOTHING)).over:
            if word.halt:
                self._stand_still(self._me)
        self._groups.expect_end()
        return True

    def fail(self, error: BaseException | None) -> None:
        self._rows.close()
        text = "it ended before the run did" if error is None else f"{type(error).__name__}: {error}"
        self._groups.fail(text)


class OtherRanks:
    """What hooks may ask of the other ranks, who are all at the same step, and of servers."""

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


def _unpacked(data: bytes, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return unpack_tensors(np.frombuffer(data, np.uint8).copy(), like)


def _fill(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
