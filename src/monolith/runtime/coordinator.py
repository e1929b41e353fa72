"""The coordinator seam: the processes that train one model together, as one of them sees the run.

A training process does not know whether it trains alone, as a worker on parameter servers, or as one of
several ranks. It owns its steps, and asks its coordinator what to do between them:

    join        the chief restores the model; every process learns the step and the position to start from
    at_step     between two steps, and while there is no data: returns one of the decisions below
    quiesce     all processes finish their updates and report their state; the chief takes a snapshot
    committed   the snapshot is on disk, so each process may commit the position it reported at that quiesce
    finish      this process has no more to do; the chief waits for the other processes to say the same
    leave       the last call: a clean end, the handover of unfinished work, or a failure
    membership  one immutable value: the index of this process, how many there are, and which one is chief

`at_step` returns a decision, and the process acts on it before it asks again:

    Continue    take the next step
    Pause       call `quiesce`: the chief takes a snapshot, or assigns the work anew
    Rebalance   work moved between workers: read from another position
    Restore     the chief rolled the model back to an earlier checkpoint: follow it there
    Stop        end the run

                  join                 Pause                  release
    (created) ───────────► training ───────────► quiesced ───────────────► training
                              │                      └──── Restore ──────► training, at an earlier step
                              │ Stop, or no more data
                              ▼
                          finishing ── finish ──► finished ── leave ──► (left)

One process, the chief, restores, saves, evicts rows and decides when the run ends. A lost process or machine
is a `RetryableError` of the next call: the caller then makes a new coordinator and restarts from the last
checkpoint. A fleet that keeps going replaces a lost server itself, from the checkpoint that
`Placement.restore_lost_from` names; only a save under way is dropped (`Placement.survives`).

Where the parameters live, and how this process reads and updates them, is a seam of its own: `Placement`.

Every implementation passes `tests/contracts/test_coordinator.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from monolith.checkpoint import Part, RestoreOptions
from monolith.data import Shard, WorkQueueSource
from monolith.data.source import Position
from monolith.model import Together, WeightOptimizer
from monolith.runtime.losses import Lost
from monolith.runtime.prefetch import Silence
from monolith.runtime.publish_shard import PublishPlan
from monolith.runtime.publishers import Publishers
from monolith.store import MakeStore
from monolith.sync.guard import PublishGuard
from monolith.train.config import TrainConfig
from monolith.train.hooks.barrier import Barrier
from monolith.train.hooks.installed import Others
from monolith.train.model import Model
from monolith.wire.bulk import Traffic
from monolith.wire.messages import Count

Item = TypeVar("Item")


# Values


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """The state of one process that a checkpoint keeps, in addition to the model."""

    position: Position
    """The position from which its data resumes."""
    examples: Count
    """Examples it has trained on since the run started."""
    skipped: Count
    """Batches it has skipped since then."""
    event_time: int | None
    """The time by which its rows expire; None while it is not known."""
    heads: tuple[str, ...] = ()
    """The labels it trains on; none if it has had no data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    """How far one process has come, as it tells its coordinator."""

    step: int
    """The global step, as far as this process knows it."""
    state: WorkerState
    data_ended: bool = False
    """Whether its data has ended. It stays in the run for as long as it may be given more work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The step and the positions from which all processes start."""

    step: Count
    positions: tuple[Position, ...] = ()
    """One per worker; empty if all data starts at its beginning."""
    back: WorkerState | None = None
    """The state of this process in the last checkpoint, if it rejoins a run that continued without it."""
    others: tuple[WorkerState, ...] = ()
    """The states of the other workers then, if this process is the chief and rejoins."""
    hands_out: bool = False
    """Whether the data is a work queue: every worker starts with nothing, and workers may join and leave."""
    deals_out: bool = False
    """Whether the chief assigns the work of that queue, and starts with all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastCheckpoint:
    """The checkpoint that a lost shard is restored from."""

    prefix: str
    options: RestoreOptions
    dense_cleared: bool = False
    """Whether the run started from it with new dense weights, and has saved none since."""


@dataclass(kw_only=True, slots=True)
class Quiesced:
    """All processes have finished their updates and take no steps."""

    step: int
    """The global step of the model."""
    others: tuple[WorkerState, ...] = ()
    """The states of all processes but this one, in order."""
    restored: Start | None = None
    """Set by the chief if it restored an earlier checkpoint meanwhile: all other processes then roll back
    to it, by a `Restore` of their next `at_step`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """How many steps, of all workers, the dense weights of a gradient lacked when it was applied."""

    last: int
    """For the last gradient."""
    most: int
    """For the stalest gradient so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """The part that this process has in the run."""

    index: int = 0
    size: int = 1
    """How many shards the data has: the most workers there may be."""
    elastic: bool = False
    """Whether workers may join and leave, if the data is a work queue."""
    growable: bool = False
    """Whether there may be more workers than at the start."""
    lockstep: bool = False
    """Whether all processes take every step together. All of them then stop at the same step, and every
    lookup and update is a call that all make in one order."""

    @property
    def is_chief(self) -> bool:
        """Whether this process restores, saves, and decides when the run ends."""
        return self.index == 0

    @property
    def shard(self) -> Shard:
        """The shard of the data that this process reads."""
        return Shard(self.index, self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorStatus:
    """What one process can tell about the run, for reports and status pages."""

    finished: bool = True
    """Once the run is over: whether it reached its end, and was not stopped before."""
    departed: bool = False
    """Whether this process has left a run that continues without it."""
    stopping: bool = False
    """Whether all processes were told to stop."""
    lost: Lost = field(default_factory=Lost)
    """Servers and workers that were lost while the run kept going, as the chief knows them."""
    traffic: Traffic | None = None
    """Bytes received from and sent to other processes; None if there are none."""
    staleness: Staleness | None = None
    """The age of the dense weights this process computes with; None if it cannot lag behind."""
    standbys: str = ""
    """Which shards of the parameter servers lack a standby, in words; empty if none does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Why this process has no more to do."""

    reason: str | None = None
    """The stop reason of its run."""
    interrupted: bool = False
    """Whether it was stopped from outside, with more to do."""
    failed: bool = False
    error: BaseException | None = None
    """What it failed with, if it did."""


# Decisions


@dataclass(frozen=True, kw_only=True, slots=True)
class Continue:
    """Take the next step."""

    committed: Position | None = None
    """A position of this process that is on disk, and that its source may commit now; told once."""
    save: bool = False
    """Whether the chief should save now: a worker has left, and its work can be given back only once its
    last steps are in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Call `quiesce`, then ask again."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Work moved between workers; then ask again."""

    position: Position | None
    """The position to read from; None if work returned to the queue, which this process reads already."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The chief restored an earlier checkpoint, rows and weights included: resume there, then ask again."""

    start: Start


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """End the run."""

    reason: str
    committed: Position | None = None
    """See `Continue`."""


Decision = Continue | Pause | Rebalance | Restore | Stop


# The seams


class Placement(Protocol):
    """Where the parameters of a model live, and how one process reads and updates them.

    In this process (local), on parameter servers, or sharded across ranks. Used by the training thread.

        store = placement.make_store             # bind the model to stores of this placement
        dense = placement.attach(model)          # the optimizer of its dense weights
        step = placement.count_step(step)        # after the update: the global step it was
    """

    @property
    def make_store(self) -> MakeStore:
        """Makes the stores of the model, in the order of its embedding collections."""

    @property
    def averaging(self) -> Together | None:
        """Averages gradients over ranks; None if every process trains with its own."""

    @property
    def others(self) -> Others | None:
        """The other processes, as far as hooks ask for them; None if there are none."""

    def over(self, local: MakeStore) -> MakeStore | None:
        """Return a maker of the model's stores on top of stores in this process; None if it has no rows.

        Args:
            local: Makes stores in this process, of all rows or of one shard.
        """

    def check(self, config: TrainConfig) -> None:
        """Check the settings of a run before anything is made.

        Raises:
            ConfigError: They ask for what these processes cannot do together.
        """

    def attach(self, model: Model) -> WeightOptimizer | None:
        """Take over a model that is bound to stores of `make_store`; return its dense optimizer.

        Raises:
            ConfigError: Its rows are in a store of its own.
        """

    def parts(self, model: Model, *, incremental: bool, background: bool) -> list[Part]:
        """Return the parts of a checkpoint that hold rows and weights; see `Model.parts`."""

    def dense_part(self, model: Model) -> Part:
        """Return the part of a checkpoint that holds the dense weights."""

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Publishers | None:
        """Return the publishers of an attached model's rows; None if this process has no part in it.

        Args:
            guard: Checks the model as a whole, in addition to the guards that check rows.
        """

    def restore_lost_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Set how the chief finds the newest checkpoint for a lost shard. It is called from any thread."""

    def survives(self, error: Exception) -> bool:
        """Whether training continues although a save failed with this error."""

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
        """Return the items of this process, one for each step that it takes; see `lockstep.aligned`.

        If the processes train in lockstep, there are empty ones and silences among them.
        """

    def count_step(self, step: int) -> int:
        """Return the number of the step just taken, from 1; `step` is the last one known here."""

    def refresh(self) -> None:
        """Fetch the newest dense weights: this process has waited while others may have trained."""

    def readable(self) -> AbstractContextManager[None]:
        """Make every row readable by the chief alone, while all processes are quiesced."""


class Coordinator(Protocol):
    """The processes that train one model, as one of them sees the run. Used by its training thread.

    Examples:
        >>> from monolith.runtime.local import LocalCoordinator
        >>> coordinator = LocalCoordinator()
        >>> coordinator.membership.is_chief, coordinator.membership.size
        (True, 1)
        >>> coordinator.join(lambda rejoins: "start of all")  # the chief restores, all processes start there
        'start of all'
    """

    @property
    def membership(self) -> Membership:
        """The part that this process has in the run; it never changes."""

    @property
    def placement(self) -> Placement:
        """Where the parameters live."""

    @property
    def barrier(self) -> Barrier:
        """Pauses all processes between their steps, for an operator or a hook of the chief. Thread-safe."""

    def status(self) -> CoordinatorStatus:
        """Return what is known about the run. From any thread."""

    def join(
        self,
        restore: Callable[[bool], Start],
        *,
        work_queue: WorkQueueSource | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Start | None:
        """Start together, with a model that is attached to the placement.

        Args:
            restore: Restores the model and returns the start of all. Called on the chief only, with True if
                it rejoins a run that its workers continued without it.
            work_queue: Set if workers may join and leave. Work of lost workers is given back to it.
            interrupted: Whether this process was asked to stop, and should not wait. From any thread.

        Returns:
            Where this process starts; None if the run is over, or it was interrupted.
        """

    def at_step(self, progress: WorkerProgress) -> Decision:
        """Return what this process does next. Does not block, unless its data has ended or in lockstep.

        Raises:
            RetryableError: A process was lost.
        """

    def quiesce(
        self, progress: WorkerProgress, drain: Callable[[], None]
    ) -> AbstractContextManager[Quiesced | None]:
        """Have all processes finish their updates and report their state.

        The chief enters whenever it wants the model unchanged; every other process after a `Pause`, and
        leaves when the chief does.

        Args:
            drain: Finishes the updates of this process. Ranks call it between two collective calls, so it
                cannot be called before; the chief of a fleet drains inside the block.

        Yields:
            The states of all processes, on the chief; None on another process, or if the chief only
            assigned work anew.
        """

    def committed(self, position: Position) -> None:
        """Note, as the chief, that the snapshot in which it reported this position is on disk."""

    def finish(
        self, outcome: Outcome, progress: WorkerProgress, idle: Callable[[], None]
    ) -> Quiesced | Restore | None:
        """Say that this process has no more to do; as the chief, wait until all others say the same.

        Args:
            outcome: Unless its data ended, all other processes are told to stop.
            idle: Called every second meanwhile: a save may be due.

        Returns:
            The last states of all processes, on the chief; None on another process. `Restore` if the chief
            rolled the model back at this very step: follow it there, then call this again.
        """

    def leave(self, outcome: Outcome, state: WorkerState | None = None) -> bool:
        """End the part of this process; no call follows, and servers and ranks may be gone.

        A process that failed reports it to the other processes if it can, and never raises.

        Args:
            state: Its last state; None only if it failed.

        Returns:
            Whether another process saved what it trained, so that its source is still to commit it.
        """
