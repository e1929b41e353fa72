"""The publishing of a run, asked and controlled through the control server that its model_dir names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from monolith.cluster.security import SecurityConfig
from monolith.errors import MonolithError
from monolith.sync.publish_messages import ShardPublishStatus
from monolith.ui.figures import PublishFigures

ASK_EVERY = 2.0
"""Seconds between two questions: the chief asks all who hold rows."""
ANSWER_SECONDS = 10.0


class PublishOrders(Protocol):
    """Passes an order on to a run (status, hold, resume, rollback); returns where each share stands then."""

    def __call__(
        self, action: str, *, reason: str = "", version: str = ""
    ) -> Sequence[ShardPublishStatus]: ...


class RunPublishing:
    """Pauses, resumes and rolls back the publishing of a run. Thread-safe.

    Args:
        order: Reaches the run.
        timer: Seconds that only grow.
    """

    def __init__(self, order: PublishOrders, *, timer: Callable[[], float] = time.monotonic) -> None:
        self._order = order
        self._timer = timer
        self._lock = threading.Lock()  # guards what follows
        self._asked: float | None = None
        self._known: PublishFigures | None = None

    def hold(self, reason: str) -> None:
        self._note(self._order("hold", reason=reason))

    def resume(self) -> None:
        self._note(self._order("resume"))

    def rollback(self, version: str) -> None:
        self._note(self._order("rollback", version=version))

    def figures(self) -> PublishFigures | None:
        """Return the state of publishing; None if the run publishes nothing, or does not answer."""
        with self._lock:
            if self._asked is not None and self._timer() - self._asked < ASK_EVERY:
                return self._known
        try:
            self._note(self._order("status"))
        except MonolithError:
            self._note(())
        with self._lock:
            return self._known

    def _note(self, shares: Sequence[ShardPublishStatus]) -> None:
        with self._lock:
            self._asked = self._timer()
            self._known = publish_figures(shares)


def publish_figures(shares: Sequence[ShardPublishStatus]) -> PublishFigures | None:
    """Return the state of a run's publishing: paused if one shard is, with all reasons."""
    if not shares:
        return None
    held = [one for one in shares if one.held]
    return PublishFigures(
        held=bool(held),
        reason="; ".join(dict.fromkeys(one.reason for one in held if one.reason)),
        since=min((one.since for one in held if one.since), default=None),
        version=next((one.version for one in held if one.version is not None), None),
        controllable=True,
    )


def orders_of(model_dir: str, security: SecurityConfig | None) -> PublishOrders:
    """Return what reaches the run of a model_dir, wherever that listens at the time."""

    def order(action: str, *, reason: str = "", version: str = "") -> Sequence[ShardPublishStatus]:
        from monolith.train.hooks import ControlClient

        with ControlClient(model_dir, security=security, timeout=ANSWER_SECONDS) as job:
            return job.publish(action, reason=reason, version=version)

    return order
