"""Publishers of a model's rows: this process, all ranks, or the parameter servers.

Each process that stores a shard of the rows publishes that shard. One process of the run leads: it sends the
publishers what they cannot see (dense weights, the step and watermark of the run) and orders such as a pause.
`publish_hook` keeps all shards in the same state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from monolith import concurrency
from monolith.errors import DeadlineExceededError, MonolithError, RetryableError, UnavailableError
from monolith.observe import Doublings
from monolith.runtime.publish_shard import Learning, ShardPublisher
from monolith.store import RankGroups, ServerGroup
from monolith.store.dense import pack_tensors
from monolith.sync.messages import LearnedUpTo, LogPosition
from monolith.sync.publish_messages import (
    Flushed,
    PublishedWeights,
    PublishOrder,
    PublishProgress,
    PublishStatus,
    ShardPublishStatus,
    UnpublishedShard,
    checked_order,
)
from monolith.wire.messages import Json, read_message, write_message

_log = logging.getLogger(__name__)

LATE_SECONDS = 60.0
"""How long a server that does not answer may take for its last delta."""
RETRY_SECONDS = 0.2


class Publishers(Protocol):
    """All publishers of a run, as one of its processes sees them.

    Only `execute` and `flush` raise an error of another process: publishing must not stop a training step.
    """

    @property
    def sends_weights(self) -> bool:
        """Whether this process sends the dense weights."""

    def start(self) -> None:
        """Start publishing: all rows are created or restored."""

    def note(self, learned: LearnedUpTo) -> None:
        """Record the newest event that the rows have learned from, on the thread that updates them."""

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take a copy of the dense weights, which the caller does not change any more."""

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        """Execute an order on all publishers, as the process that leads; return their status. Thread-safe.

        Raises:
            MonolithError: One of them did not answer.
        """

    def positions(self) -> Mapping[int, LogPosition]:
        """Return a recent published position of each shard, as the process that leads; it may be a little
        old."""

    def flush(self) -> Sequence[UnpublishedShard]:
        """Publish all remaining changes: the run is at its end, and saved. Return the shards that could not,
        as their channel cannot be reached; the caller calls again.

        Raises:
            RetryableError: A process was lost with changes that it had not published. A run that resumes from
                the last checkpoint publishes all rows.
        """

    def close(self) -> None:
        """Stop. Closing again does nothing."""


def _not_published(error: RetryableError) -> UnavailableError:
    """Return the error of a run whose process was lost with changes that it had not published."""
    return UnavailableError(
        f"the last changes of the run are saved and not all of them are published: {error}. A run that "
        "resumes from its last checkpoint publishes all rows."
    )


def _unpublished(answers: Sequence[Mapping[str, Json]]) -> list[UnpublishedShard]:
    return [one for answer in answers for one in read_message(Flushed, answer).unpublished]


class LocalPublisher:
    """The publisher of a run whose rows are all in this process."""

    sends_weights = True

    def __init__(self, share: ShardPublisher) -> None:
        self._share = share

    def start(self) -> None:
        self._share.start()

    def note(self, learned: LearnedUpTo) -> None:
        self._share.learning.note(learned)

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._share.send_weights(weights)

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        return self._share.execute(order)

    def positions(self) -> Mapping[int, LogPosition]:
        place = self._share.place
        return {} if place is None else {0: place}

    def flush(self) -> Sequence[UnpublishedShard]:
        return self._share.flush()

    def close(self) -> None:
        self._share.close()


_EXECUTE = "publish/obey"
_FLUSH = "publish/flush"


class RankPublishers:
    """The publishers of a run of ranks: each publishes its shard, and rank 0 leads and sends the weights.

    At the end of a run rank 0 asks every rank for its last delta, once the run is saved. The other ranks
    answer while they wait for the word that the run is over.
    """

    def __init__(self, groups: RankGroups, share: ShardPublisher) -> None:
        self._groups = groups
        self._share = share
        self._lock = concurrency.Lock()  # guards the fields below
        self._statuses: dict[int, ShardPublishStatus] = {}
        groups.calls.offer({_EXECUTE: self._answer, _FLUSH: self._answer_flush})

    @property
    def sends_weights(self) -> bool:
        return self._groups.rank == 0

    def start(self) -> None:
        self._share.start()

    def note(self, learned: LearnedUpTo) -> None:
        self._share.learning.note(learned)

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._share.send_weights(weights)

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        found = self._groups.calls.ask_all(_EXECUTE, write_message(order))
        shares = [one for answer in found for one in read_message(PublishStatus, answer).shares]
        with self._lock:
            self._statuses |= {one.share: one for one in shares}
        return shares

    def positions(self) -> Mapping[int, LogPosition]:
        with self._lock:
            found = dict(self._statuses)
        if len(found) < self._groups.size:
            return {}  # an incomplete answer would be read as that of fewer shards
        return {share: LogPosition(one.epoch, one.sequence) for share, one in found.items()}

    def flush(self) -> Sequence[UnpublishedShard]:
        """Have all ranks publish their last changes, as rank 0; see `Publishers`."""
        if self._groups.rank:
            return ()  # rank 0 may still save: it asks this rank afterwards, and ends only with its answer
        try:
            answers = self._groups.calls.ask_all(_FLUSH, {})
        except RetryableError as error:
            raise _not_published(error) from error
        return _unpublished(answers)

    def close(self) -> None:
        self._share.close()

    def _answer(self, body: dict[str, Json]) -> dict[str, Json]:
        order = checked_order(read_message(PublishOrder, body))
        return write_message(PublishStatus(self._share.execute(order)))

    def _answer_flush(self, _: dict[str, Json]) -> dict[str, Json]:
        return write_message(Flushed(self._share.flush()))


class ServerPublishers:
    """The publishers of a run on parameter servers, as the process that leads sees them.

    A thread sends all servers, every `every` seconds, the step and watermark of the run. The first message
    starts the publishing of a server; a server that replaced a lost one starts in a new epoch. A server that
    does not answer gets the next message; training never waits for it.

    Args:
        group: The servers; the caller closes the group.
        run: Returns the name of the run on the servers, once it has started.
        every: Seconds between two rounds.
    """

    sends_weights = True

    def __init__(self, group: ServerGroup, run: Callable[[], str], *, every: float) -> None:
        self._group = group
        self._run = run
        self._every = every
        self._learning = Learning()
        self._lock = concurrency.Lock()  # guards the fields below
        self._weights: Mapping[str, Tensor] | None = None
        self._statuses: dict[int, ShardPublishStatus] = {}
        self._failures, self._failed = 0, Doublings()
        self._closed = concurrency.Event()
        self._thread = concurrency.Thread(target=self._run_thread, name="publish-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, learned: LearnedUpTo) -> None:
        self._learning.note(learned)

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        with self._lock:
            self._weights = weights

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        found = self._group.call_all("publish.obey", **write_message(order))
        shares = [one for answer in found for one in read_message(PublishStatus, answer).shares]
        self._note(shares)
        return shares

    def positions(self) -> Mapping[int, LogPosition]:
        with self._lock:
            found = dict(self._statuses)
        if len(found) < len(self._group):
            return {}  # an incomplete answer would be read as that of fewer shards
        return {share: LogPosition(one.epoch, one.sequence) for share, one in found.items()}

    def flush(self) -> Sequence[UnpublishedShard]:
        """Send the servers the last step, and have them publish it.

        A server that was lost is waited for if it is going to be replaced; one that is late, for a while.
        """
        # The thread ends first: of two progress reports at the same time, the older could arrive last.
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)
        began = concurrency.monotonic()
        while True:
            try:
                self._try(self._send_newest_weights, RetryableError)
                self._try(self._send_progress, RetryableError)
                return _unpublished(self._group.call_all("publish.flush", run=self._run()))
            except RetryableError as error:
                late = LATE_SECONDS if isinstance(error, DeadlineExceededError) else 0.0
                wait = max(late, self._group.replacement_timeout.total_seconds())
                if concurrency.monotonic() - began >= wait:
                    raise _not_published(error) from error
                concurrency.sleep(RETRY_SECONDS)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run_thread(self) -> None:
        self._send()
        while not self._closed.wait(self._every):
            self._send()

    def _send(self) -> None:
        """Send the dense weights to the server of shard 0, and the progress of the run to all servers."""
        self._try(self._send_newest_weights)
        self._try(self._send_progress)

    def _send_newest_weights(self) -> None:
        with self._lock:
            weights, self._weights = self._weights, None
        if weights is None:
            return
        said = write_message(PublishedWeights(self._run(), len(weights)))
        try:
            self._group.exchange("publish.weights", {0: (said, pack_tensors(list(weights.values())))})
        except BaseException:
            with self._lock:
                self._weights = self._weights or weights  # unless the training thread left newer ones
            raise

    def _send_progress(self) -> None:
        learned = self._learning.now()
        told = PublishProgress(self._run(), learned.step, max(learned.watermark, 0))
        found = self._group.call_all("publish.told", **write_message(told))
        self._note([one for answer in found for one in read_message(PublishStatus, answer).shares])

    def _note(self, shares: Sequence[ShardPublishStatus]) -> None:
        with self._lock:
            self._statuses |= {one.share: one for one in shares}

    def _try(self, call: Callable[[], object], *raised: type[Exception]) -> None:
        try:
            call()
        except raised:
            raise
        except Exception as error:
            self._failures += 1
            if self._failed.due(self._failures):
                unexpected = None if isinstance(error, MonolithError) else error
                _log.warning(
                    "parameter servers did not get the progress to publish (%d times so far); training "
                    "continues: %s",
                    self._failures,
                    error,
                    exc_info=unexpected,
                )
