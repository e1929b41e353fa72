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

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np
import torch

from monolith.checkpoint import Part
from monolith.cluster import Discovery, Waiting
from monolith.cluster.addresses import Address
from monolith.cluster.security import is_loopback
from monolith.config import Secret
from monolith.data import Shard
from monolith.data.source import Position
from monolith.errors import (
    AddressError,
    BarrierAlreadyPlacedError,
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    ListenError,
    RetryableError,
    UnavailableError,
)
from monolith.model import WeightOptimizer
from monolith.runtime.coordinator import Gathered, LastCheckpoint, Staleness, Start, Stepper, WorkerState
from monolith.runtime.fleet_placement import merge_buffers
from monolith.runtime.local import ScheduledOptimizer
from monolith.runtime.losses import Lost
from monolith.runtime.messages import NOTHING, Word
from monolith.runtime.prefetch import SILENT, Silence
from monolith.runtime.rank_placement import AveragedGradients, RankDense, RankRows, RowsOnRanks, RowsOnServers
from monolith.store import MakeStore, RankGroups, ServerGroup
from monolith.store.dense import dump_dense, load_dense_states, pack_tensors, read_dense, unpack_tensors
from monolith.store.rank_calls import RankPort
from monolith.store.rank_groups import Collective, RankOptions
from monolith.store.rank_keys import RankKeys, begin_attempt, join_attempt, keep_keys, prefixed, reach_keys
from monolith.sync.guard import PublishGuard
from monolith.train.config import RanksConfig, TrainConfig
from monolith.train.hook import TrainingRun
from monolith.train.hooks.barrier import Barrier, MachineHealth, Placement
from monolith.train.hooks.installed import Others
from monolith.train.model import Model
from monolith.train.publishing.holders import Holders
from monolith.train.publishing.share import PublishPlan
from monolith.wire.bulk import Traffic
from monolith.wire.messages import read_message, write_message

_log = logging.getLogger(__name__)

W = TypeVar("W")


def say_to_all(
    collective: Collective,
    kind: type[W],
    word: W | None,
    waiting: Callable[[], None] | None = None,
) -> Sequence[W | None]:
    """Return what all ranks say, in order; None of one that says nothing. If nobody does, it is one call.

    Args:
        waiting: Called every second for as long as somebody has not come.
    """
    said = b"" if word is None else json.dumps(write_message(word)).encode()
    lengths = collective.all_gather(torch.tensor([len(said)]), waiting).flatten().tolist()
    if not any(lengths):
        return [None] * collective.size
    padded = torch.frombuffer(bytearray(said.ljust(max(lengths), b" ")), dtype=torch.uint8)
    texts = [one.numpy().tobytes().strip() for one in collective.all_gather(padded)]
    return [read_message(kind, json.loads(text)) if text else None for text in texts]


def hear_from_first(collective: Collective, data: bytes) -> bytes:
    """Return the bytes that rank 0 gives, on every rank."""
    length = int(collective.broadcast(torch.tensor([len(data)]))[0])
    given = bytearray(data if len(data) == length else bytes(length)) or bytearray(1)
    sent = torch.frombuffer(given, dtype=torch.uint8)
    return collective.broadcast(sent).numpy().tobytes()[:length]


Item = TypeVar("Item")


CLOSE_WITHIN = 5.0
"""Seconds that closing waits for a source that is being read."""


class Readiness(IntEnum):
    """What a rank says of its data."""

    READY = 0
    WAITING = 1
    ENDED = 2


class _Reader(Generic[Item]):
    """Reads ahead on a thread, so that who waits for an item need not wait for ever."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._found: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)
        self._thread.start()

    def look(self, timeout: float) -> tuple[Readiness, Item | None]:
        """Return the next item, if it comes in time, and what the others are to hear.

        Raises:
            BaseException: What reading raised.
        """
        try:
            found = self._found.get(timeout=timeout)
        except queue.Empty:
            return Readiness.WAITING, None
        if isinstance(found, BaseException):
            raise found
        return (Readiness.ENDED if found is None else Readiness.READY), found

    def close(self) -> bool:
        """End; return whether nobody reads the items any more."""
        self._over.set()
        self._thread.join(CLOSE_WITHIN)
        if self._thread.is_alive():
            _log.warning("the source is still being read; its thread ends when that returns")
            return False
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        return True

    def _read(self) -> None:
        try:
            for item in self._items:
                if not self._hand_over(item):
                    return
            self._hand_over(None)
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, found: Item | BaseException | None) -> bool:
        while not self._over.is_set():
            try:
                self._found.put(found, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def agreed(
    items: Iterator[Item],
    collective: Collective,
    *,
    every: float,
    pressed: Callable[[], bool],
    silences: bool = True,
    on_stuck: Callable[[], None] = lambda: None,
) -> Generator[Item | Silence, None, None]:
    """Give the items of this rank that all ranks train on, and `SILENT` where somebody has none for now.

    Args:
        items: Of this rank; a generator is closed with the one returned.
        collective: Used by whoever reads.
        every: Seconds that an item may take before the others hear that there is none.
        pressed: Whether this rank wants to wait no more, so that a silence is given in any case.
        silences: Whether they are given otherwise.
        on_stuck: Called where this is closed, and the items are still being read.
    """
    reader = _Reader(items)
    try:
        while True:
            item: Item | None = None
            readiness = Readiness.WAITING
            while True:
                if item is None:
                    readiness, item = reader.look(every)
                word = torch.tensor([int(readiness), int(pressed())])
                everybody, hurry = collective.all_gather(word).T.tolist()
                if Readiness.ENDED in everybody:
                    return
                if Readiness.WAITING not in everybody:
                    break
                if silences or any(hurry):
                    yield SILENT
            assert item is not None
            yield item
    finally:
        if not reader.close():
            on_stuck()


WAITS = "waits/{rank}"
"""Under which a rank says that it waits for the others, once that has taken a second."""


class RankBarrier:
    """A `Barrier` that rank 0 places; its `BarrierHook` keeps it from its next step. Thread-safe."""

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._lock = threading.Lock()  # guards what follows
        self._placed: Placement | None = None
        self._generation = 0

    @property
    def capacity(self) -> int:
        return self._groups.size

    def place(self, action: str = "") -> Placement:
        with self._lock:
            if self._placed is not None:
                raise BarrierAlreadyPlacedError(
                    f"cannot place a barrier (action {action!r}): one is in place (action "
                    f"{self._placed.action!r}). Wait until it is removed, or remove it."
                )
            self._generation += 1
            self._placed = Placement(action, self._generation)
            return self._placed

    def remove(self) -> None:
        with self._lock:
            self._placed = None

    def placement(self) -> Placement | None:
        with self._lock:
            return self._placed

    def blocked_indices(self) -> list[int]:
        if self.placement() is None:
            return []
        others = range(1, self.capacity)
        return [0, *(rank for rank in others if self._groups.get_note(WAITS.format(rank=rank)))]


ROLE = "rank"


ASK_EVERY = 0.2
"""Seconds between two looks for the others."""


OnWaiting = Callable[[Waiting], object]


class RankRendezvous:
    """Where the ranks of one run meet, attempt after attempt. Used by one thread.

    Args:
        rank: Which one this process is.
        size: How many there are.
        discovery: Where rank 0 says how to reach it; None where variables say it, as those of torchrun do.
        environ: Of this process.
        port: Where this process listens, and what it demands of callers: at least a token.
        start: How long to wait for the others.
        options: Of `RankGroups`.
        on_waiting: Told of the wait; it may raise to end it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        discovery: Discovery | None,
        environ: Mapping[str, str],
        port: RankPort,
        start: timedelta,
        options: RankOptions,
        on_waiting: OnWaiting = lambda _: None,
    ) -> None:
        if port.guard.token is None:
            raise ConfigError("ranks sign the keys that they share with a token, and the guard has none")
        self._token: Secret = port.guard.token
        self._rank = rank
        self._size = size
        self._discovery = discovery
        self._environ = environ
        self._port = port
        self._start = start.total_seconds()
        self._options = options
        self._on_waiting = on_waiting
        self._process = secrets.token_hex(8)
        self._left: set[str] = set()
        """Attempts that are over."""
        self._registered: str | None = None
        self._trouble = ""
        """Why this rank could not join an attempt, the last time."""
        self.processes: tuple[str, ...] = ()
        """The processes of all ranks, in the last attempt."""

    def join(self) -> RankGroups:
        """Wait for all ranks, and connect to them.

        Raises:
            DeadlineExceededError: Not all were there in time.
            UnavailableError: One was lost meanwhile; to be tried again.
        """
        began = time.monotonic()
        while True:
            keys = self._find(began)
            if keys.attempt in self._left:
                self._wait(began, 0)
                continue
            self._left.add(keys.attempt)
            if keys.compare_set(f"process/{self._rank}", "", self._process).decode() != self._process:
                keys.fail(self._rank, "its process was lost, and has restarted")
                continue
            try:
                self.processes = self._await_all(keys, began)
                return RankGroups(keys, self._rank, self._size, port=self._port, options=self._options)
            except BaseException as error:
                # The others may have seen this rank sign in, and wait for its connections.
                keys.fail(self._rank, f"it left before all were connected: {type(error).__name__}: {error}")
                raise

    def close(self) -> None:
        """Be found no more."""
        if self._discovery is not None and self._registered is not None:
            with suppress(ClusterError):
                self._discovery.deregister(ROLE, 0, self._registered)

    def _find(self, began: float) -> RankKeys:
        """Return the keys of the newest attempt; as rank 0, those of a new one."""
        if self._rank == 0 and self._discovery is not None:
            return self._keep_keys(self._discovery)
        while True:
            try:
                if self._discovery is None:
                    return self._keys_of_launcher()
                found = self._discovery.query(ROLE).get(0)
                if found is not None:
                    address = Address.parse(found)
                    return join_attempt(reach_keys(address.host, address.port), self._token)
            except (UnavailableError, AddressError) as error:  # its keeper may not be there yet
                self._trouble = str(error)
            self._wait(began, 0)

    def _keep_keys(self, discovery: Discovery) -> RankKeys:
        keys = keep_keys(self._port.host, self._token)
        self.close()
        self._registered = str(Address(self._port.host, keys.port))
        discovery.register(ROLE, 0, self._registered)
        return keys

    def _keys_of_launcher(self) -> RankKeys:
        """Return the keys that torchrun keeps, or has rank 0 keep."""
        try:
            address = Address(self._environ["MASTER_ADDR"], int(self._environ["MASTER_PORT"]))
        except (KeyError, ValueError) as cause:
            raise ConfigError(
                "ranks without a registry are started by torchrun, which sets MASTER_ADDR and MASTER_PORT"
            ) from cause
        of_torchrun = self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank == 0 and not of_torchrun:
            return self._keep_named(address)
        keys = reach_keys(address.host, address.port)
        if of_torchrun:  # whose keys outlive a restart of all ranks
            keys = prefixed(keys, f"monolith/{self._environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        return begin_attempt(keys, self._token) if self._rank == 0 else join_attempt(keys, self._token)

    def _keep_named(self, address: Address) -> RankKeys:
        """Keep the keys at the address that variables name, as far as that is one of this machine.

        Some launchers name "localhost" to rank 0 and its host to the others; some name what is routed here.
        """
        if not is_loopback(address.host) or is_loopback(self._port.host):
            with suppress(ListenError):
                return keep_keys(address.host, self._token, address.port)
        return keep_keys(self._port.host, self._token, address.port)

    def _await_all(self, keys: RankKeys, began: float) -> tuple[str, ...]:
        """Return the processes of all ranks, as soon as all have signed in."""
        while True:
            found = [keys.peek(f"process/{rank}") for rank in range(self._size)]
            there = [process.decode() for process in found if process is not None]
            if len(there) == self._size:
                return tuple(there)
            if (failure := keys.failure()) is not None:
                raise UnavailableError(f"a rank was lost before all were there: {failure}")
            self._wait(began, len(there))

    def _wait(self, began: float, found: int) -> None:
        elapsed = time.monotonic() - began
        if elapsed >= self._start:
            trouble = f". The last attempt to join: {self._trouble}" if self._trouble else ""
            raise DeadlineExceededError(
                f"{found} of {self._size} ranks were there after {elapsed:.0f} s; see the logs of the others "
                f"or set timeouts.start{trouble}"
            )
        what = "rank 0" if found == 0 and self._rank else "ranks"
        self._on_waiting(Waiting(what, found, self._size, timedelta(seconds=elapsed)))
        time.sleep(ASK_EVERY)


BEGUN = "begun"


LOOK_EVERY = 0.1
"""Seconds between two looks whether rank 0 has begun."""


class RankCoordinator:
    """`Coordinator` of one rank. Rank 0 leads.

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

    def holders(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
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

    # Buffers: each rank has its own, and a checkpoint has those of all; see `fleet_placement`

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
