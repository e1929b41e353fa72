"""Holders where parameter servers have the rows: the process that leads tells them, over their own port."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from monolith.errors import MonolithError
from monolith.observe import Doublings
from monolith.store import ServerGroup
from monolith.store.dense import pack_tensors
from monolith.sync.messages import LearnedUpTo, LogPosition
from monolith.train.publishing.bodies import (
    HoldersTold,
    PublishedShares,
    PublishOrder,
    ShareStanding,
    WeightsTold,
)
from monolith.train.publishing.learning import Learning
from monolith.wire.messages import read_message, write_message

_log = logging.getLogger(__name__)


class RowsOfServers:
    """Holders of a run on parameter servers, as the process that leads it sees them.

    A thread tells all servers, every `every` seconds, how far the run is: the first time each begins to
    publish, and so does one that took the place of another, in an epoch of its own. A server that cannot be
    told is told the next time; training never waits for it.

    Args:
        group: The servers; closed by whoever made it.
        run: Names the run on the servers, once it has begun.
        every: Seconds between two rounds.
    """

    brings_weights = True

    def __init__(self, group: ServerGroup, run: Callable[[], str], *, every: float) -> None:
        self._group = group
        self._run = run
        self._every = every
        self._learning = Learning()
        self._lock = threading.Lock()  # guards what follows
        self._weights: Mapping[str, Tensor] | None = None
        self._standings: dict[int, ShareStanding] = {}
        self._failures, self._failed = 0, Doublings()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tell_on, name="publish-tells", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, learned: LearnedUpTo) -> None:
        self._learning.note(learned)

    def bring(self, weights: Mapping[str, Tensor]) -> None:
        with self._lock:
            self._weights = weights

    def obey(self, order: PublishOrder) -> Sequence[ShareStanding]:
        found = self._group.call_all("publish.obey", **write_message(order))
        shares = [one for answer in found for one in read_message(PublishedShares, answer).shares]
        self._note(shares)
        return shares

    def places(self) -> Mapping[int, LogPosition]:
        with self._lock:
            found = dict(self._standings)
        if len(found) < len(self._group):
            return {}  # part of the places would be read as if there were fewer shares
        return {share: LogPosition(one.epoch, one.sequence) for share, one in found.items()}

    def flush(self) -> None:
        """Tell the servers the last of all, and wait until they have published it."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)
        self._tell()
        self._try(lambda: self._group.call_all("publish.flush", run=self._run()))

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _tell_on(self) -> None:
        self._tell()
        while not self._closed.wait(self._every):
            self._tell()

    def _tell(self) -> None:
        """Tell the server of share 0 the dense weights, and all servers how far the run is."""
        self._try(self._tell_weights)
        self._try(self._tell_learned)

    def _tell_weights(self) -> None:
        with self._lock:
            weights, self._weights = self._weights, None
        if weights is None:
            return
        said = write_message(WeightsTold(self._run(), len(weights)))
        try:
            self._group.exchange("publish.weights", {0: (said, pack_tensors(list(weights.values())))})
        except BaseException:
            with self._lock:
                self._weights = self._weights or weights
            raise

    def _tell_learned(self) -> None:
        learned = self._learning.now()
        told = HoldersTold(self._run(), learned.step, max(learned.watermark, 0))
        found = self._group.call_all("publish.told", **write_message(told))
        self._note([one for answer in found for one in read_message(PublishedShares, answer).shares])

    def _note(self, shares: Sequence[ShareStanding]) -> None:
        with self._lock:
            self._standings |= {one.share: one for one in shares}

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._failures += 1
            if self._failed.due(self._failures):
                unexpected = None if isinstance(error, MonolithError) else error
                _log.warning(
                    "parameter servers were not told what to publish (%d times so far); training goes on: %s",
                    self._failures,
                    error,
                    exc_info=unexpected,
                )
