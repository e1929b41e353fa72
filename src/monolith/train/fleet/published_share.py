"""What a parameter server publishes of the rows it holds, from when it hears that they are restored.

A server sees which rows change. It stamps its deltas with the step and the event time of the newest update
that it applied; the chief tells it the rest: how far the data is, and, on server 0, the dense weights. When
the batch of an event was read no server knows, and its stamps say 0 there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from monolith.store.server import NewestPush
from monolith.sync.messages import LearnedUpTo
from monolith.train.model import Model
from monolith.train.publishing.bodies import HoldersTold, PublishOrder, ShareStanding
from monolith.train.publishing.share import PublishPlan, SharePublisher


class PublishedShare:
    """The publishing of what a server holds for one run; begins when the chief first says how far it is.

    Args:
        newest: Says what the newest update was.
    """

    def __init__(
        self, model: Model, share: tuple[int, int], plan: PublishPlan, newest: Callable[[], NewestPush]
    ) -> None:
        self._model = model
        self._share = share
        self._plan = plan
        self._newest = newest
        self._told: HoldersTold | None = None
        self._stale = (0, 0)
        """The steps that were told and pushed last before rows were restored, and say nothing of these."""
        self._weights: Mapping[str, Tensor] | None = None
        self._lock = threading.Lock()  # guards the publisher
        self._publisher: SharePublisher | None = None
        self._over = False

    def hear(self, told: HoldersTold) -> None:
        """Hear how far the run is."""
        self._told = told
        with self._lock:
            if self._over:
                return
            publisher = self._publisher
            if publisher is None:
                self._publisher = publisher = SharePublisher(
                    self._model.tables, self._share, self._plan, learned=self._learned
                )
                self._model.restoring = self._restoring
                if self._weights is not None:
                    publisher.bring(self._weights)
            publisher.start()  # which failed, perhaps, the last time

    def bring(self, weights: Mapping[str, Tensor]) -> None:
        """Take the dense weights."""
        self._weights = weights
        if (publisher := self._publisher) is not None:
            publisher.bring(weights)

    def obey(self, order: PublishOrder) -> tuple[ShareStanding, ...]:
        publisher = self._publisher
        return () if publisher is None else publisher.obey(order)

    def flush(self) -> None:
        if (publisher := self._publisher) is not None:
            publisher.flush()

    def close(self) -> None:
        """Stop. Closing again does nothing."""
        with self._lock:
            self._over = True
            publisher = self._publisher
        if publisher is not None:
            publisher.close()

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        assert self._publisher is not None
        with self._publisher.restoring():
            yield
            self._stale = (0 if self._told is None else self._told.step, self._newest().step)

    def _learned(self) -> LearnedUpTo:
        newest, told = self._newest(), self._told
        steps = (0 if told is None else told.step, newest.step)
        return LearnedUpTo(
            step=max(0 if step == stale else step for step, stale in zip(steps, self._stale, strict=True)),
            watermark=0 if told is None else told.watermark,
            event_at=float(newest.event_time),
            trained_at=newest.at,
        )
