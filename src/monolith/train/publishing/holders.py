"""Those who hold the rows of a model, and publish them: this process, all ranks, or parameter servers.

Each holder publishes its share by itself. One process of the run, which leads, tells all of them what they do
not see (dense weights, how far the data is) and what to do; and it sees that they stand together: where the
guard of one holds it back, all are held, since what is wrong with some rows is rarely right with the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from monolith.errors import MonolithError
from monolith.observe import Doublings
from monolith.sync.messages import LearnedUpTo, LogPosition
from monolith.sync.publish_config import GuardConfig
from monolith.train.publishing.bodies import PublishOrder, ShareStanding
from monolith.train.publishing.hold_file import HoldFile
from monolith.train.publishing.metric_guard import BadSince
from monolith.train.publishing.share import SharePublisher

_log = logging.getLogger(__name__)


class Holders(Protocol):
    """The holders of all rows, as one process of the run has to do with them. Nothing of it ever raises what
    a channel or another process does wrong, but `obey`."""

    @property
    def brings_weights(self) -> bool:
        """Whether this process is the one that brings the dense weights."""

    def start(self) -> None:
        """Publish from now on: everything is made or restored."""

    def note(self, learned: LearnedUpTo) -> None:
        """Hear what the rows have learned from. On the thread that updates them."""

    def bring(self, weights: Mapping[str, Tensor]) -> None:
        """Take a copy of the dense weights, which nobody changes any more."""

    def obey(self, order: PublishOrder) -> Sequence[ShareStanding]:
        """Have all holders do something, as the process that leads; return where each is. From any thread.

        Raises:
            MonolithError: One of them could not be told.
        """

    def places(self) -> Mapping[int, LogPosition]:
        """Return how far each share was published some moment ago, at the most; as the process that leads."""

    def flush(self) -> None:
        """Have everything published that this process can see to: the run is at its end."""

    def close(self) -> None:
        """Stop. Closing again does nothing."""


class OwnRows:
    """Holders where this process has all rows."""

    brings_weights = True

    def __init__(self, share: SharePublisher) -> None:
        self._share = share

    def start(self) -> None:
        self._share.start()

    def note(self, learned: LearnedUpTo) -> None:
        self._share.learning.note(learned)

    def bring(self, weights: Mapping[str, Tensor]) -> None:
        self._share.bring(weights)

    def obey(self, order: PublishOrder) -> Sequence[ShareStanding]:
        return self._share.obey(order)

    def places(self) -> Mapping[int, LogPosition]:
        place = self._share.place
        return {} if place is None else {0: place}

    def flush(self) -> None:
        self._share.flush()

    def close(self) -> None:
        self._share.close()


def _as_held(one: ShareStanding) -> PublishOrder:
    """Return what has all stand as one share does, which is held."""
    if one.version is not None:
        return PublishOrder("rollback", version=one.version)
    reason = f"{one.reason} (share {one.share})"
    return PublishOrder("hold", reason[:4096], by_guard=one.by_guard, first_bad_step=one.first_bad_step)


class Steward:
    """Keeps the holders of a run together, and lets them go on when what a guard held back is well again.

        all go on ──one is held, or a metric is out of bounds──► all held
            ▲                                                        │
            └──resume by hand, or all recovered where that is asked──┘

    Args:
        metric: Says what is wrong with the model as a whole, and since which step; None while nothing is.
        every: Seconds between two looks.
        hold_file: Told how all stand, for the next start of the run.
    """

    def __init__(
        self,
        holders: Holders,
        config: GuardConfig,
        metric: Callable[[], BadSince | None],
        *,
        every: float,
        hold_file: HoldFile | None = None,
    ) -> None:
        self._holders = holders
        self._config = config
        self._metric = metric
        self._every = every
        self._hold_file = hold_file
        self._closed = threading.Event()
        self._failed = Doublings()
        self._failures = 0
        self._turn = threading.Lock()  # held while somebody is told something
        self.standing: Sequence[ShareStanding] = ()
        """Where each share was when it was last asked; replaced as a whole."""
        self._thread = threading.Thread(target=self._run, name="publish-steward", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def look(self) -> None:
        """See that all stand together. Called by the thread of its own, and by tests."""
        with self._turn:
            found = self._tell(PublishOrder("status"))
            held = [one for one in found if one.held]
            bad = self._metric()
            if not held and bad is not None:
                self._tell(PublishOrder("hold", bad.reason, by_guard=True, first_bad_step=bad.step))
            elif held and len(held) < len(found):
                self._tell(_as_held(held[0]))
            elif held and bad is None and self._may_go_on(held):
                _log.warning("what held publishing back is within bounds again; publishing goes on")
                self._tell(PublishOrder("resume", by_guard=True))

    def obey(self, order: PublishOrder) -> Sequence[ShareStanding]:
        """Have all holders do something, and keep it for the next start; see `Holders.obey`."""
        with self._turn:
            found = self._tell(order)
            if order.action == "release" and self._hold_file is not None:
                self._hold_file.release()
            return found

    def _tell(self, order: PublishOrder) -> Sequence[ShareStanding]:
        self.standing = found = self._holders.obey(order)
        if self._hold_file is not None:
            self._hold_file.note(found)
        return found

    def _may_go_on(self, held: Sequence[ShareStanding]) -> bool:
        recovered = all(one.by_guard and one.recovered for one in held)
        return recovered and self._config.resume == "when_recovered"

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            try:
                self.look()
            except Exception as error:
                self._failures += 1
                if self._failed.due(self._failures) and not self._closed.is_set():
                    unexpected = None if isinstance(error, MonolithError) else error
                    _log.warning(
                        "could not see how publishing stands (%d times so far); training goes on: %s",
                        self._failures,
                        error,
                        exc_info=unexpected,
                    )
