"""The coordinator of a worker on parameter servers.

`Fleet` speaks the protocol with server 0; this module turns it into the verbs of the coordinator seam. What
`at_step` returns on each kind of worker:

    chief     Pause      the work queue is assigned by the chief, and a worker joined or left
              Rebalance  after that, or when work of a departed worker returned to the queue
    others    Pause      the chief wants all workers to quiesce
              Rebalance  the chief assigned this worker other work
    all       Stop, Continue
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from monolith import concurrency
from monolith.data import WorkQueueSource
from monolith.data.source import Position
from monolith.errors import BarrierAlreadyPlacedError, ClusterError, ConfigError, RetryableError, lacks_memory
from monolith.runtime.coordinator import (
    Continue,
    CoordinatorStatus,
    Decision,
    Membership,
    Outcome,
    Pause,
    Quiesced,
    Rebalance,
    Start,
    Stop,
    WorkerProgress,
    WorkerState,
)
from monolith.runtime.failover import LOOK_EVERY
from monolith.runtime.fleet import FinishDeadline, Fleet
from monolith.runtime.fleet_placement import ServerPlacement
from monolith.runtime.standbys import describe_standbys
from monolith.store.dense_config import DenseConfig
from monolith.train.hook import DATA_ENDED
from monolith.train.hooks.barrier import Barrier, PlacedBarrier

_log = logging.getLogger(__name__)


class FleetBarrier:
    """A `Barrier` that the chief places: all other workers pause between their steps. Thread-safe."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = concurrency.Lock()  # guards `_placed`, and that one barrier is placed at a time
        self._placed: PlacedBarrier | None = None

    @property
    def capacity(self) -> int:
        return self._fleet.num_workers

    def place(self, action: str = "") -> PlacedBarrier:
        with self._lock:
            if self._placed is not None:
                raise BarrierAlreadyPlacedError(
                    f"cannot place a barrier (action {action!r}): one is in place (action "
                    f"{self._placed.action!r}). Wait until it is removed, or remove it."
                )
            self._placed = PlacedBarrier(action, self._fleet.pause())
            return self._placed

    def remove(self) -> None:
        with self._lock:
            if self._placed is not None:
                self._placed = None
                self._fleet.resume()

    def placement(self) -> PlacedBarrier | None:
        with self._lock:
            return self._placed

    def blocked_indices(self) -> list[int]:
        with self._lock:
            if self._placed is None:
                return []
            return [0, *self._fleet.quiesced_workers()]


class FleetCoordinator:
    """`Coordinator` of a worker whose model is on parameter servers. Worker 0 is the chief.

    Args:
        fleet: The place of this worker, closed by its maker. It serves one run: to restart, join the fleet
            again.
        dense: When this worker fetches dense weights and pushes their gradients.
    """

    def __init__(self, fleet: Fleet, dense: DenseConfig | None = None) -> None:
        self._fleet = fleet
        self._placement = ServerPlacement(fleet, dense)
        self._barrier = FleetBarrier(fleet)
        self._work_queue: WorkQueueSource | None = None
        self._interrupted: Callable[[], bool] = lambda: False
        self._reported: dict[int, WorkerState] = {}
        """Number of a quiesce -> the state this worker reported there, until that snapshot is on disk."""
        self._departed = False
        self._assigns = False
        """Whether the next quiesce of the chief is for assigning work: its `at_step` has returned Pause."""
        self._tried_to_assign = False
        """Whether work was assigned, or could not be, since the chief last continued. Without this, a deal
        that fails because a server is lost would be retried forever, and no step taken."""
        self._assigned: Position | None = None
        """The position that the chief assigned to itself, until `at_step` returns it."""
        self._deadline: FinishDeadline | None = None
        """While the data of the chief has ended and other workers still train."""

    @property
    def membership(self) -> Membership:
        fleet = self._fleet
        return Membership(
            index=fleet.index,
            size=fleet.max_workers,
            elastic=fleet.max_workers > 1,
            growable=fleet.max_workers > fleet.num_workers,
        )

    @property
    def placement(self) -> ServerPlacement:
        return self._placement

    @property
    def barrier(self) -> Barrier:
        return self._barrier

    def status(self) -> CoordinatorStatus:
        return CoordinatorStatus(
            finished=self._fleet.finished,
            departed=self._departed,
            stopping=self._fleet.stop_reason is not None,
            lost=self._fleet.lost,
            traffic=self._fleet.group.traffic,
            staleness=self._placement.staleness,
            standbys=describe_standbys(self._fleet.standbys),
        )

    def join(
        self,
        restore: Callable[[bool], Start],
        *,
        work_queue: WorkQueueSource | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Start | None:
        self._work_queue, self._interrupted = work_queue, interrupted
        if self._fleet.is_chief:
            start: Start | None = self._start_or_rejoin(restore)
        elif (start := self._fleet.join(interrupted)) is not None:
            self._placement.start_buffers()
        if start is not None:
            self._placement.pull_dense()
        return start

    def _start_or_rejoin(self, restore: Callable[[bool], Start]) -> Start:
        """Start a run as its chief, or rejoin the one that the servers still hold."""
        fleet = self._fleet
        fleet.begin(hands_out=self._work_queue is not None)
        if not fleet.resumed:
            self._placement.send_dense()
        self._set_step(0)
        start = restore(fleet.resumed)
        self._set_step(start.step)
        # The chief lays its buffers down before `open`: the other workers fetch them once they may start.
        self._placement.start_buffers()
        if fleet.resumed and start.hands_out:
            start = replace(start, positions=fleet.start.positions)
        fleet.open(start)
        if not fleet.resumed:
            return start
        mine, *others = fleet.safe
        known = tuple(state for state in others if state is not None)
        return replace(start, step=fleet.read_step(), back=mine, others=known)

    def _set_step(self, step: int) -> None:
        if self._fleet.resumed:  # the workers trained meanwhile: the step never decreases
            step = max(step, self._fleet.read_step())
        self._fleet.group.set_step(step)

    # Between steps

    def at_step(self, progress: WorkerProgress) -> Decision:
        fleet = self._fleet
        fleet.check()
        if fleet.keeps_going:
            fleet.note_trained(progress.state.examples)
        if fleet.is_chief:
            if progress.data_ended:
                return self._wait_for_work()
            if (moved := self._move_work()) is not None:
                return moved
        else:
            if progress.data_ended:  # only the chief waits for work of others
                return Stop(reason=DATA_ENDED)
            if (position := fleet.take_dealt()) is not None:
                self._reported.clear()  # its source must not commit parts that another worker has now
                return Rebalance(position)
            if fleet.is_halted:
                return Pause()
        committed = self._take_committed()
        if (reason := fleet.stop_reason) is not None:
            return Stop(reason=reason, committed=committed)
        return Continue(committed=committed, save=self._save_wanted)

    @property
    def _save_wanted(self) -> bool:
        return self._fleet.is_chief and not self._fleet.deals_out and self._fleet.save_wanted

    def _move_work(self) -> Rebalance | Pause | None:
        """Give the work of departed workers to the present ones, as the chief; None if all keep theirs."""
        fleet = self._fleet
        if not fleet.hands_out:
            return None
        assert self._work_queue is not None
        if not fleet.deals_out:
            return Rebalance(None) if fleet.give_back(self._work_queue.give_back) else None
        if self._assigned is not None:
            position, self._assigned = self._assigned, None
            return Rebalance(position)
        if self._tried_to_assign:
            self._tried_to_assign = False
            return None
        if fleet.deal_wanted:
            self._assigns = True
            return Pause()
        return None

    def _wait_for_work(self) -> Decision:
        """Wait up to a second, as a chief that has read all of its data: a worker may leave work to it."""
        fleet = self._fleet
        if not fleet.hands_out:
            return Stop(reason=DATA_ENDED)
        self._placement.settle()
        if self._interrupted() or fleet.stop_reason is not None:
            return Stop(reason=fleet.stop_reason or DATA_ENDED)
        if (moved := self._move_work()) is not None:
            self._deadline = None
            return moved
        if missing := fleet.still_training():
            self._deadline = self._deadline or fleet.finish_deadline()
            self._deadline.check(missing)
            return Continue(save=self._save_wanted)
        self._deadline = None
        if not fleet.has_departing:
            # All work was given out, but not necessarily to workers of this run.
            assert self._work_queue is not None
            others = fleet.positions_of_others()
            if others is None:
                return Continue(save=self._save_wanted)
            if self._work_queue.take_back(others):
                _log.warning("a process that is not in this run had taken work; it is read again")
                return Rebalance(None)
            return Stop(reason=DATA_ENDED)
        concurrency.sleep(LOOK_EVERY)  # the last steps of a departed worker are being saved
        return Continue(save=self._save_wanted)

    @contextmanager
    def quiesce(self, progress: WorkerProgress, drain: Callable[[], None]) -> Iterator[Quiesced | None]:
        if not self._fleet.is_chief:
            drain()
            self._placement.settle()
            self._placement.report_buffers(progress.state.examples)
            if number := self._fleet.wait_at_halt(progress.state):
                self._reported[number] = progress.state
            yield None
        elif self._assigns:
            self._assigns = False
            drain()
            self._assign_work(progress.state)
            yield None
        else:
            with self._fleet.halted(self._interrupted) as paused:
                self._placement.settle()  # or its last steps would be counted after the snapshot
                self._placement.report_buffers(progress.state.examples)
                self._reported[paused.number] = progress.state
                quiesced = self._quiesced(paused.states)
                yield quiesced
                if quiesced.restored is not None:
                    raise ConfigError(
                        "alert: the workers of a fleet do not roll back; set alert.action to 'stop'"
                    )

    def _assign_work(self, mine: WorkerState) -> None:
        """Pause all workers and divide all remaining work among them, as the chief."""
        self._tried_to_assign = True
        # Only entering the pause may fail and be survived (a server was lost: the workers keep their work,
        # and the next `at_step` tries again). An error in the block is one of the deal itself.
        with ExitStack() as halted:
            try:
                paused = halted.enter_context(self._fleet.halted(self._interrupted))
            except ClusterError as error:
                if not self._placement.survives(error):
                    raise
                _log.warning("work is not assigned yet: %s", error)
                return
            self._placement.settle()
            assert self._work_queue is not None
            self._assigned = self._fleet.deal(paused, mine, self._work_queue)

    def committed(self, position: Position) -> None:
        if self._fleet.is_chief:
            # Of several snapshots in which the chief reported the same position, only the first is known to
            # be on disk: it may have waited for data while later ones were taken.
            numbers = [number for number, state in self._reported.items() if state.position is position]
            if numbers:
                first = min(numbers)
                state = self._reported[first]
                self._forget_reported(first)
                self._fleet.note_saved(first, state)

    def _take_committed(self) -> Position | None:
        """Return the position that this worker reported in the last snapshot on disk; once."""
        saved = self._fleet.saved_halt
        if self._fleet.is_chief or saved not in self._reported:
            return None
        position = self._reported[saved].position
        self._forget_reported(saved)
        return position

    def _forget_reported(self, last: int) -> None:
        self._reported = {number: state for number, state in self._reported.items() if number > last}

    def _quiesced(self, states: Mapping[int, WorkerState]) -> Quiesced:
        return Quiesced(step=self._fleet.group.read_step(), others=tuple(states.values()))

    # Ending

    def finish(self, outcome: Outcome, progress: WorkerProgress, idle: Callable[[], None]) -> Quiesced | None:
        if not self._fleet.is_chief:
            return None
        self._placement.settle()
        self._placement.report_buffers(progress.state.examples)
        if outcome.reason != DATA_ENDED:
            self._fleet.stop(outcome.reason or "the chief has ended", unfinished=outcome.interrupted)
        return self._quiesced(self._fleet.wait_for_others(idle, stopping=outcome.interrupted))

    def leave(self, outcome: Outcome, state: WorkerState | None = None) -> bool:
        """End the part of this worker.

        The chief has saved by now, and tells every worker that the run is over. Another worker waits for
        that: only then are its last steps safe. If the data is a work queue, a worker that is told to stop
        leaves its unfinished work to the other workers and is gone at once; otherwise it stops the run.
        """
        fleet = self._fleet
        if outcome.failed:
            error = outcome.error
            retryable = isinstance(error, RetryableError) or lacks_memory(error)
            why = "it was ended" if error is None else f"{type(error).__name__}: {error}"
            fleet.fail(why, final=not retryable, lost=retryable)
            return False
        if fleet.is_chief:
            fleet.end()
            return False
        if not fleet.joined:
            return False
        assert state is not None
        # If all workers stop anyway, there is none to leave work to.
        gives_back = outcome.interrupted and fleet.hands_out and fleet.stop_reason is None
        if outcome.interrupted and not gives_back:  # its shard of the data is not done, so neither is the run
            fleet.stop(f"worker {fleet.index}: {outcome.reason}", unfinished=True)
        self._placement.settle()
        self._placement.report_buffers(state.examples)
        fleet.leave(state, gives_back=gives_back)
        if gives_back:
            self._departed = True
            return False
        fleet.wait_for_end()
        return True
