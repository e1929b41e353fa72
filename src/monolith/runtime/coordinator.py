"""The coordinator seam: the processes that train one model together, as one of them sees the others.

A session does not know whether it trains alone, as a worker of a fleet on parameter servers, or as one of
several ranks. It reports its progress to its coordinator, which tells it what to do:

    begin          prepare for creating or restoring the model
    go_to          the model is at this step: new, or restored
    open           start from a step and a position in the data; or the run has ended
    meet           between steps, and while there is no data: pause if all processes pause, learn which
                   process was lost, return the work of a lost worker to the queue, or reassign it
    refresh        before a step that followed a wait: fetch the newest weights
    count          the number of the step just taken
    halted         all processes are quiesced and have reported their state while a snapshot is taken
    go_back        all processes roll back to an earlier checkpoint, restored while they are quiesced
    note_saved     the snapshot is on disk, so each source may commit its position
    wait_for_more  the data has ended here: a worker may be lost, or leave, and leave work to this process
    gather         this process has finished: wait for the other processes
    leave          a clean end; `fail` ends with an error

One process, the chief, restores, saves, evicts rows and decides when the run ends. A lost process or machine
is a `RetryableError` of the next call: the caller then makes a new coordinator and restarts from the last
checkpoint. A fleet that keeps going replaces a lost server itself, from the checkpoint that `restore_from`
returns, and reports it in `lost`; only a save under way is dropped (`outlives`).

Every implementation passes `tests/contracts/test_coordinator.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from monolith.checkpoint import Part, RestoreOptions
from monolith.data import Shard
from monolith.data.source import Position
from monolith.model import Together, WeightOptimizer
from monolith.runtime.losses import Lost
from monolith.runtime.prefetch import Silence
from monolith.store import MakeStore
from monolith.sync.guard import PublishGuard
from monolith.train.config import TrainConfig
from monolith.train.hook import TrainingRun
from monolith.train.hooks.barrier import Barrier
from monolith.train.hooks.installed import Others
from monolith.train.model import Model
from monolith.train.publishing.holders import Holders
from monolith.train.publishing.share import PublishPlan
from monolith.wire.bulk import Traffic
from monolith.wire.messages import Count

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """What one process says of itself while a moment is cut."""

    position: Position
    """Where its data goes on."""
    examples: Count
    """Trained on by it since everybody began."""
    skipped: Count
    """Batches that it did not train on since then."""
    event_time: int | None
    """The time by which its rows expire; None while it cannot tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where everybody goes on."""

    step: Count
    positions: tuple[Position, ...] = ()
    """Of each worker's data; none where all data begins."""
    back: WorkerState | None = None
    """How this process stood when the last checkpoint was cut, where it comes back to a run that goes on."""
    others: tuple[WorkerState, ...] = ()
    """How the others stood then, where this one leads and comes back."""
    hands_out: bool = False
    """Whether the data hands out work: everybody begins with nothing, and workers may come and go."""
    deals_out: bool = False
    """Whether it does so only when the one that leads deals it out, who begins with all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastCheckpoint:
    """What a share that was lost is restored from."""

    prefix: str
    options: RestoreOptions
    dense_cleared: bool = False
    """Whether the run began from it with the dense weights as they are made, and has saved none since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Everybody stands still."""

    step: int
    """The global step of the model."""
    others: tuple[WorkerState, ...] = ()
    """All but this process, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """How many steps, of all workers, the dense weights of a gradient lacked when it was applied."""

    last: int
    """Those of the last gradient."""
    most: int
    """Those of the gradient that lacked most."""


class Stepper(Protocol):
    """What all peers ask of the session of this process."""

    @property
    def step(self) -> int:
        """The global step, as far as is known here."""

    @property
    def interrupted(self) -> bool:
        """Whether somebody wants this process to stop, and wait for nothing."""

    def drain(self) -> None:
        """Return when all updates of this process are done."""

    def state(self) -> WorkerState:
        """Return what a checkpoint keeps of this process."""

    def go_back(self, start: Start) -> None:
        """Go on from a step and a place in the data that were before; the model was restored to them."""


class RunState(Stepper, Protocol):
    """What those ask besides who may come and go."""

    def give_back(self, position: Position) -> Position:
        """Have the data hand out what one of the others has not done; see `WorkQueueSource`."""

    def deal(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Have the data deal what some workers had to so many; see `WorkQueueSource`."""

    def move_to(self, position: Position) -> None:
        """Go on from what was dealt to this process, all updates done; what it read ahead is dropped."""


class Coordinator(Protocol):
    """Those who train a model together, as one of them sees the others. Used by the training thread."""

    @property
    def leads(self) -> bool:
        """Whether it is this process that restores and saves."""

    @property
    def share(self) -> Shard:
        """Which share of the data this process reads."""

    @property
    def may_change(self) -> bool:
        """Whether processes may come and go where the data hands out work."""

    @property
    def more_may_come(self) -> bool:
        """Whether there may be more of them than there are at first."""

    @property
    def departed(self) -> bool:
        """Whether this process has left a run that goes on without it."""

    @property
    def save_wanted(self) -> bool:
        """Whether somebody has left whose work can be given back only when its last steps are saved, where
        this process leads."""

    @property
    def finished(self) -> bool:
        """Once the run is over: whether it came to its end everywhere, and nobody stopped it before."""

    @property
    def resumed(self) -> bool:
        """Whether this process, which leads, came back to others who went on without it."""

    @property
    def make_store(self) -> MakeStore:
        """Makes the stores of the model, in the order of its collections."""

    def holding(self, local: MakeStore) -> MakeStore | None:
        """Return what makes the stores of the model over stores of this process; None where it holds no rows.

        Args:
            local: Makes those, of all rows or of a share of them.
        """

    @property
    def barrier(self) -> Barrier:
        """Holds everybody between their steps, where this process leads."""

    @property
    def in_step(self) -> bool:
        """Whether all take every step together. Then whatever one does between steps, all do: they meet just
        before a step, and stop at the same one."""

    @property
    def together(self) -> Together | None:
        """Those with whom gradients are averaged; None where everybody trains with its own."""

    @property
    def others(self) -> Others | None:
        """What hooks may ask of the other processes; None where there are none."""

    @property
    def lost(self) -> Lost:
        """What was lost while the others kept going, where this process leads."""

    def check(self, config: TrainConfig) -> None:
        """Look at the settings of a run before anything is made.

        Raises:
            ConfigError: They ask for what these peers cannot do together.
        """

    def attach(self, model: Model) -> WeightOptimizer | None:
        """Take part with a model, bound to stores of `make_store`; return what trains its dense weights.

        Raises:
            ConfigError: Its rows are not where everybody's are.
        """

    def parts(self, model: Model, *, incremental: bool, beside: bool) -> list[Part]:
        """Return what a checkpoint keeps of the model, rows and weights; see `Model.parts`."""

    def dense_part(self, model: Model) -> Part:
        """Return what a checkpoint keeps of the weights."""

    def holders(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
        """Return who publishes the rows of an attached model, as this process has to do with them; None where
        it has nothing to do.

        Args:
            guard: Of the model as a whole, asked beside those that look at rows.
        """

    def restore_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Hear, as the one that leads, how to find the newest checkpoint. It may be asked from any thread."""

    def outlives(self, error: Exception) -> bool:
        """Whether training goes on although a save failed with this."""

    # Beginning

    def begin(self, *, hands_out: bool = False) -> None:
        """Make ready for a restore, with a model as it was made.

        Args:
            hands_out: Whether the data hands out work, and processes may come and go.
        """

    def go_to(self, step: int) -> None:
        """Have everybody count on from a step, as the one that leads."""

    def open(self, start: Start, me: RunState) -> Start | None:
        """Go on together, when everything was made or restored.

        Args:
            start: What this process found, where it leads; the others hear it.

        Returns:
            Where everybody goes on; None where this process has nothing to do any more.
        """

    # Between steps

    def read_in_step(
        self, items: Iterator[Item], *, every: float, pressed: Callable[[], bool], silences: bool
    ) -> Iterator[Item | Silence]:
        """Return the batches of this process that all train on, where they are `in_step`; see `agreed`."""

    def meet(self, me: RunState) -> str | None:
        """Stand still as long as the others are held; return why everybody is to stop, if they are.

        Raises:
            RetryableError: One of them was lost.
        """

    def count(self, step: int) -> int:
        """Return which step of the model was just taken, from 1; `step` is the last that was known here."""

    def refresh(self) -> None:
        """Take the newest weights: this process has waited, and the others may not have."""

    def staleness(self) -> Staleness | None:
        """Return how old the weights are that this process computes with; None where there are no others."""

    def traffic(self) -> Traffic | None:
        """Return what came over the wire and went there; None where there are no others. From any thread."""

    def standbys(self) -> str:
        """Return which shards lack a standby, in words; empty if none does, or none is wanted. From any
        thread."""

    def halted(self, me: RunState) -> AbstractContextManager[Gathered]:
        """Hold the others between their steps, as the one that leads, while a moment is cut."""

    def looking(self) -> AbstractContextManager[None]:
        """Have every row within reach of this process, which holds the others, to look at the model."""

    def go_back(self, start: Start) -> None:
        """Have everybody go on from where this process, which leads, restored the model to while it holds the
        others."""

    def note_saved(self, position: Position) -> None:
        """Hear, as the one that leads, that the moment with this position is on disk."""

    def safe(self) -> Position | None:
        """Return a position of this process that is on disk, where it does not lead; each once."""

    # Ending

    def wait_for_more(self, me: RunState, look: Callable[[], None]) -> bool:
        """Wait, as the one that leads and has read all data there is, until the others have no more to do;
        return at once, with True, when there is more to read here.

        Args:
            look: Called every second meanwhile: it may be time to save.
        """

    def leaves_work(self, run: TrainingRun) -> bool:
        """Whether this process is told to stop, and the others are to go on with what it has not done."""

    def gather(self, me: RunState, run: TrainingRun, look: Callable[[], None]) -> Gathered | None:
        """Wait, as the one that leads, until the others have no more to do; None where another leads.

        Args:
            run: Why this process has no more to do. Unless its data has ended, the others are told to stop.
            look: Called every second meanwhile: it may be time to save.
        """

    def leave(self, run: TrainingRun, state: WorkerState) -> bool:
        """End this process's part; the last thing of all, since the others may be gone after it.

        Returns:
            Whether what it trained was saved by another, so that its source is still to be told.
        """

    def fail(self, error: BaseException | None) -> None:
        """Say that this process cannot go on, if anybody hears it. It never raises."""
