"""The coordinator of a rank: all ranks take every step together.

Between two steps all ranks exchange a word, which is empty most of the time. Rank 0 is the chief:

    at_step     every rank says a word; all continue, or stop, at the same step
    quiesce     rank 0 says "halt" in place of its word of the next step: all ranks finish their updates,
                exchange their states, and wait until rank 0 releases them
    readable    while they wait, rank 0 evaluates: the other ranks answer each of its lookups
    Restore     rank 0 has restored all rows meanwhile: other ranks take its weights, step and positions
    finish      the word of a rank that has no more to do; all stop once it is said
    leave       other ranks wait, through the pauses of rank 0's last saves, until it says that all is over

So a rank that comes to the next word, for whatever reason, learns the same as all other ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import torch

from monolith import concurrency
from monolith.data import WorkQueueSource
from monolith.data.source import Position
from monolith.errors import BarrierAlreadyPlacedError, RetryableError, UnavailableError
from monolith.runtime.coordinator import (
    Continue,
    CoordinatorStatus,
    Decision,
    Membership,
    Outcome,
    Pause,
    Quiesced,
    Restore,
    Start,
    Stop,
    WorkerProgress,
    WorkerState,
)
from monolith.runtime.messages import NOTHING, Word
from monolith.runtime.rank_placement import RankPlacement
from monolith.store import RankGroups, ServerGroup
from monolith.store.rank_groups import Collective
from monolith.train.config import RanksConfig
from monolith.train.hook import DATA_ENDED
from monolith.train.hooks.barrier import Barrier, PlacedBarrier
from monolith.wire.messages import read_message, write_message

_log = logging.getLogger(__name__)

W = TypeVar("W")


def say_to_all(
    collective: Collective,
    kind: type[W],
    word: W | None,
    waiting: Callable[[], None] | None = None,
) -> Sequence[W | None]:
    """Return the words of all ranks, in order; None for a rank that says nothing.

    One collective call if no rank says anything, which is the usual case; two otherwise.

    Args:
        waiting: Called every second for as long as a rank is missing.
    """
    said = b"" if word is None else json.dumps(write_message(word)).encode()
    lengths = collective.all_gather(torch.tensor([len(said)]), waiting).flatten().tolist()
    if not any(lengths):
        return [None] * collective.size
    padded = torch.frombuffer(bytearray(said.ljust(max(lengths), b" ")), dtype=torch.uint8)
    texts = [one.numpy().tobytes().strip() for one in collective.all_gather(padded)]
    return [read_message(kind, json.loads(text)) if text else None for text in texts]


WAITS = "waits/{rank}"
"""The note by which a rank says that it waits for the other ranks, once that has taken a second."""


class RankBarrier:
    """A `Barrier` that rank 0 places; its `BarrierHook` keeps it from its next step. Thread-safe.

    The other ranks need no message: they wait for rank 0 in the next collective call.
    """

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._lock = concurrency.Lock()  # guards `_placed` and `_generation`
        self._placed: PlacedBarrier | None = None
        self._generation = 0

    @property
    def capacity(self) -> int:
        return self._groups.size

    def place(self, action: str = "") -> PlacedBarrier:
        with self._lock:
            if self._placed is not None:
                raise BarrierAlreadyPlacedError(
                    f"cannot place a barrier (action {action!r}): one is in place (action "
                    f"{self._placed.action!r}). Wait until it is removed, or remove it."
                )
            self._generation += 1
            self._placed = PlacedBarrier(action, self._generation)
            return self._placed

    def remove(self) -> None:
        with self._lock:
            self._placed = None

    def placement(self) -> PlacedBarrier | None:
        with self._lock:
            return self._placed

    def blocked_indices(self) -> list[int]:
        if self.placement() is None:
            return []
        others = range(1, self.capacity)
        return [0, *(rank for rank in others if self._groups.get_note(WAITS.format(rank=rank)))]


BEGUN = "begun"
"""The note by which rank 0 says that it has restored everything; its value is the run on the servers."""


START_POLL_S = 0.1
"""Seconds between two looks whether rank 0 has restored the model."""


class RankCoordinator:
    """`Coordinator` of one rank. Rank 0 is the chief.

    Args:
        groups: The connections of the ranks, closed by their maker. They serve one run.
        servers: The parameter servers that hold the rows, if the ranks do not; likewise.
    """

    def __init__(
        self, groups: RankGroups, config: RanksConfig | None = None, *, servers: ServerGroup | None = None
    ) -> None:
        self._groups = groups
        self.membership = Membership(index=groups.rank, size=groups.size, lockstep=True)
        self._placement = RankPlacement(groups, config, servers=servers, call_in=self._call_in)
        self._barrier = RankBarrier(groups)
        self._interrupted: Callable[[], bool] = lambda: False
        self._joined = False
        self._number = 0
        """The number of the last quiesce; all ranks count the same."""
        self._reported: dict[int, WorkerState] = {}
        """Number of a quiesce -> the state this rank reported there, until that snapshot is on disk."""
        self._quiesced: Quiesced | None = None
        """Set while rank 0 has all ranks quiesced."""
        self._restore: Start | None = None
        """Where rank 0 rolled back to, until `at_step` returns it on this other rank."""
        self._rereads = False
        """Whether a `Restore` was returned: by the next `at_step`, the data must be read from there."""
        self._saved = self._told_saved = 0
        """The last quiesce whose snapshot is on disk, and the last one that rank 0 told all ranks."""
        self._stop: str | None = None
        """Why all ranks stop, as all of them know."""
        self._unfinished = False

    @property
    def placement(self) -> RankPlacement:
        return self._placement

    @property
    def barrier(self) -> Barrier:
        return self._barrier

    def status(self) -> CoordinatorStatus:
        return CoordinatorStatus(
            finished=not self._unfinished, stopping=self._stop is not None, traffic=self._placement.traffic
        )

    def join(
        self,
        restore: Callable[[bool], Start],
        *,
        work_queue: WorkQueueSource | None = None,  # noqa: ARG002
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Start | None:
        self._interrupted = interrupted
        start: Start | None = None
        if self.membership.is_chief:
            begun = self._placement.rows.begin()
            start = restore(False)
            self._groups.put_note(BEGUN, begun)
        # No collective call yet: restoring may take longer than one may wait.
        while not (begun := self._groups.get_note(BEGUN)):  # `check` ends it if a rank is lost
            if interrupted():
                return None
            self._groups.check()
            concurrency.sleep(START_POLL_S)
        if not self.membership.is_chief:
            self._placement.rows.join(begun)
        self._joined = True
        return self._start_at(start)

    def _start_at(self, start: Start | None) -> Start:
        """Start all ranks where rank 0 says, with its weights."""
        said = say_to_all(self._groups.control, Start, start)
        assert said[0] is not None
        self._placement.take_weights()
        return said[0]

    # Between steps

    def at_step(self, progress: WorkerProgress) -> Decision:
        if progress.data_ended:
            return Stop(reason=DATA_ENDED)  # as for all ranks; they say so in `finish`
        if (restore := self._take_restore()) is not None:
            return restore
        self._groups.check()
        self._placement.step = progress.step
        word = NOTHING
        if self._interrupted() and self._stop is None:
            word = Word(stop=f"rank {self._groups.rank} was asked to stop", interrupted=True)
        if self._say(word).halt:
            return Pause()
        committed = self._take_committed()
        if self._stop is not None:
            return Stop(reason=self._stop, committed=committed)
        return Continue(committed=committed)

    def _take_restore(self) -> Restore | None:
        """Return where rank 0 rolled back to; at the call after that, check that the data followed."""
        if self._restore is not None:
            start, self._restore = self._restore, None
            self._rereads = True
            return Restore(start)
        if self._rereads:
            self._rereads = False
            self._placement.check_data_closed()
        return None

    def _say(self, word: Word) -> Word:
        """Exchange a word with all ranks; return that of rank 0."""
        if self.membership.is_chief and self._saved > self._told_saved:
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
        # While rank 0 pauses all, the word of another rank is not final: it is said again afterwards.
        if not words[0].halt:
            self._unfinished |= any(one.interrupted for one in words)
            self._stop = self._stop or next((one.stop for one in words if one.stop is not None), None)
        if words[0].saved:
            self._saved = words[0].saved
        return words[0]

    @contextmanager
    def quiesce(self, progress: WorkerProgress, drain: Callable[[], None]) -> Iterator[Quiesced | None]:
        if not self.membership.is_chief:
            drain()
            self._wait_quiesced(progress)
            yield None
            return
        if self._quiesced is not None:  # within another block
            yield self._quiesced
            return
        self._say(Word(halt=self._number + 1))
        # Now, and not before: the updates of a rank are collective calls, which other ranks make only
        # once they know of the pause.
        drain()
        self._quiesced = self._exchange_states(progress)
        try:
            yield self._quiesced
            restored = self._quiesced.restored
            if restored is not None:
                self._placement.check_data_closed()
        except BaseException:
            self._quiesced = None
            with suppress(RetryableError):
                self._say(NOTHING)
            raise
        self._quiesced = None
        self._say(Word(back=restored is not None))
        if restored is not None:
            self._start_at(restored)

    def _wait_quiesced(self, progress: WorkerProgress) -> None:
        """Report the state of this rank, and answer the lookups of rank 0 until it releases all ranks."""
        self._exchange_states(progress)
        while (word := self._say(NOTHING)).look:
            self._placement.rows.answer(word.look - 1)
        if word.back:
            self._restore = self._start_at(None)

    def _exchange_states(self, progress: WorkerProgress) -> Quiesced:
        self._number += 1
        quiesced = self._gather_states(progress)
        self._reported[self._number] = progress.state
        return quiesced

    def _gather_states(self, progress: WorkerProgress) -> Quiesced:
        states = say_to_all(self._groups.control, WorkerState, progress.state)
        self._placement.gather_buffers(progress.state.examples)
        others = [state for rank, state in enumerate(states) if rank != self._groups.rank]
        return Quiesced(step=progress.step, others=tuple(state for state in others if state is not None))

    def _call_in(self, store: int) -> None:
        """Have the other ranks answer a lookup of rank 0 in this store."""
        assert self._quiesced is not None, "the other ranks must be quiesced"
        self._say(Word(look=store + 1))

    def committed(self, position: Position) -> None:
        if self.membership.is_chief:
            # Several quiesces may have reported this position, if no step was taken in between. Ranks take
            # their steps together, so then no other rank has moved either, and the last one says the same.
            for number in [one for one, state in self._reported.items() if state.position is position]:
                self._forget_reported(number)
                self._saved = number

    def _take_committed(self) -> Position | None:
        """Return the position that this rank reported in the last snapshot on disk; once."""
        if self.membership.is_chief or self._saved not in self._reported:
            return None
        position = self._reported[self._saved].position
        self._forget_reported(self._saved)
        return position

    def _forget_reported(self, last: int) -> None:
        self._reported = {number: state for number, state in self._reported.items() if number > last}

    # Ending

    def finish(
        self,
        outcome: Outcome,
        progress: WorkerProgress,
        idle: Callable[[], None],  # noqa: ARG002
    ) -> Quiesced | Restore | None:
        if not self._joined:
            return None
        self._take_restore()  # the last one was followed
        if self._stop is None:
            word = Word(stop=outcome.reason or "it has no more to do", interrupted=outcome.interrupted)
            while self._say(word).halt:
                self._wait_quiesced(progress)
                if (restore := self._take_restore()) is not None:
                    return restore
        quiesced = self._gather_states(progress)
        return quiesced if self.membership.is_chief else None

    def leave(self, outcome: Outcome, state: WorkerState | None = None) -> bool:
        rows = self._placement.rows
        if outcome.failed:
            rows.close()
            error = outcome.error
            text = "it ended before the run did" if error is None else f"{type(error).__name__}: {error}"
            self._groups.fail(text)
            return False
        if not self._joined:
            return False
        if self.membership.is_chief:
            self._groups.expect_end()
            try:
                self._say(Word(over=True))
            except RetryableError as error:
                # Everything is saved, and a rank that has received the word may be gone before its part of
                # the call arrives here. A retry would wait for that rank in vain.
                _log.warning("some ranks may not know that the run is over: %s", error)
            rows.end(finished=not self._unfinished and not outcome.interrupted)
            return False
        assert state is not None
        while not (word := self._say(NOTHING)).over:
            if word.halt:  # rank 0 takes its last snapshots
                self._wait_quiesced(WorkerProgress(step=self._placement.step, state=state))
                if self._restore is not None:
                    raise UnavailableError("rank 0 rolled the model back after this rank had finished")
        self._groups.expect_end()
        return True
