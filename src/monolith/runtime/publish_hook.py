"""The hook by which a training process publishes: it reports the newest event and sends dense weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monolith import concurrency
from monolith.errors import MonolithError, RetryableError, UnpublishedError
from monolith.observe import Doublings
from monolith.runtime.metric_guard import BadSince, MetricGuard
from monolith.runtime.publish_pause import PauseFile
from monolith.runtime.publishers import Publishers
from monolith.sync.messages import LearnedUpTo
from monolith.sync.publish_config import GuardConfig, PublishConfig
from monolith.sync.publish_messages import PublishOrder, ShardPublishStatus, UnpublishedShard
from monolith.train.hook import Hook, StepResult, TrainingRun
from monolith.train.model import Model

_log = logging.getLogger(__name__)


def _same_pause(one: ShardPublishStatus) -> PublishOrder:
    """Return the order that pauses all shards as one shard is paused."""
    if one.version is not None:
        return PublishOrder("rollback", version=one.version)
    reason = f"{one.reason} (shard {one.share})"
    return PublishOrder("hold", reason[:4096], by_guard=one.by_guard, first_bad_step=one.first_bad_step)


class PublishSupervisor:
    """Keeps all shards of a run in the same state: a pause of one pauses all, since bad rows rarely come
    alone.

        all publish ──one is paused, or a metric is out of bounds──► all paused
             ▲                                                           │
             └── an operator resumes, or guard.resume is when_recovered ─┘
                 and all guards have recovered

    Args:
        metric: Returns what is wrong with the model as a whole, and since which step; None if all is well.
        every: Seconds between two checks.
        pause_file: Records the pause for the next start of the run.
    """

    def __init__(
        self,
        publishers: Publishers,
        config: GuardConfig,
        metric: Callable[[], BadSince | None],
        *,
        every: float,
        pause_file: PauseFile | None = None,
    ) -> None:
        self._publishers = publishers
        self._config = config
        self._metric = metric
        self._every = every
        self._pause_file = pause_file
        self._closed = concurrency.Event()
        self._failed = Doublings()
        self._failures = 0
        self._turn = concurrency.Lock()  # one order at a time: an order of an operator never meets a check
        self.statuses: Sequence[ShardPublishStatus] = ()
        """The status of each shard at the latest check; replaced as a whole."""
        self._thread = concurrency.Thread(target=self._run, name="publish-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def check(self) -> None:
        """Check that all shards are in the same state. The supervisor's thread calls it, and tests do."""
        with self._turn:
            found = self._order(PublishOrder("status"))
            held = [one for one in found if one.held]
            bad = self._metric()
            if not held and bad is not None:
                self._order(PublishOrder("hold", bad.reason, by_guard=True, first_bad_step=bad.step))
            elif held and len(held) < len(found):
                self._order(_same_pause(held[0]))
            elif held and bad is None and self._may_resume(held):
                _log.warning(
                    "the metrics for which publishing was paused are within bounds again; publishing resumes"
                )
                self._order(PublishOrder("resume", by_guard=True))

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        """Execute an order on all publishers, and record a pause; see `Publishers.execute`."""
        with self._turn:
            found = self._order(order)
            if order.action == "release" and self._pause_file is not None:
                self._pause_file.release()
            return found

    def _order(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        self.statuses = found = self._publishers.execute(order)
        if self._pause_file is not None:
            self._pause_file.note(found)
        return found

    def _may_resume(self, held: Sequence[ShardPublishStatus]) -> bool:
        recovered = all(one.by_guard and one.recovered for one in held)
        return recovered and self._config.resume == "when_recovered"

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            try:
                self.check()
            except Exception as error:
                self._failures += 1
                if self._failed.due(self._failures) and not self._closed.is_set():
                    unexpected = None if isinstance(error, MonolithError) else error
                    _log.warning(
                        "could not check the state of publishing (%d times so far); training continues: %s",
                        self._failures,
                        error,
                        exc_info=unexpected,
                    )


FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0
"""Seconds between the first two attempts to publish the last changes of a run, and the most between two."""
SAY_AFTER_S = 0.5
"""Seconds after which the retries are worth a line: the snapshot of a short run takes a moment."""


def _described(shards: Sequence[UnpublishedShard]) -> str:
    return "; ".join(
        f"shard {one.share} of {one.shares}, published up to step {one.step}: {one.reason}" for one in shards
    )


class PublishHook(Hook):
    """Publishes while the run trains, and all remaining changes at its end.

    Weights are copied between two steps, so no copy mixes the weights of two steps.

    Args:
        guard: Guards the model as a whole; it receives every batch that this process trains on.
        leads: Whether this process keeps all publishers in the same state.
        pause_file: Records a pause, if this process leads.
        refresh: Fetches the newest weights into this process.
        stopped: Whether this process was asked to stop.
    """

    essential = True

    def __init__(
        self,
        publishers: Publishers,
        model: Model,
        config: PublishConfig,
        guard: MetricGuard,
        *,
        leads: bool,
        pause_file: PauseFile | None = None,
        refresh: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.publishers = publishers
        self._model = model
        self._every = config.dense_interval.total_seconds()
        self._to, self._patience = config.to, config.finish_timeout.total_seconds()
        self.guard = guard
        self._refresh = refresh
        self._stopped = stopped
        self._sent_at = 0.0
        self._step = -1
        """The step of the weights that were sent last."""
        self._supervisor: PublishSupervisor | None = None
        if leads:
            self._supervisor = PublishSupervisor(
                publishers, config.guard, lambda: guard.bad, every=self._every, pause_file=pause_file
            )

    def after_create(self, run: TrainingRun) -> None:
        if run.step:  # rows were restored: servers may ask for them before the first step is done
            self.publishers.note(LearnedUpTo(step=run.step))
        self._send_weights(run.step)
        self.publishers.start()
        if self._supervisor is not None:
            self._supervisor.start()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        self.guard.update(result.predictions, result.batch.labels, step=run.step)
        if concurrency.monotonic() - self._sent_at >= self._every or run.step < self._step:  # a rollback
            self._send_weights(run.step)

    def idle(self, run: TrainingRun) -> None:
        """Send the weights of the last step while there is no data for another."""
        if run.step != self._step:
            self._send_weights(run.step)

    def end(self, run: TrainingRun) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
        self._refresh()
        self._send_weights(run.step)
        try:
            self._publish_last(run)
        except RetryableError as error:
            if not run.interrupted:
                raise  # the run is not done: subscribers lack rows that no later start would publish
            _log.warning("%s", error)

    def _publish_last(self, run: TrainingRun) -> None:
        """Publish all remaining changes of a run that is saved; retry while the channel does not take them.

        Raises:
            UnpublishedError: It did not for `publish.finish_timeout`, or this process was asked to stop.
            RetryableError: A process was lost with changes that it had not published.
        """
        began, pause, progress, said = concurrency.monotonic(), FIRST_RETRY_S, 0, False
        while left := self.publishers.flush():
            now, before = concurrency.monotonic(), progress
            progress = sum(one.progress for one in left)
            if progress > before:
                # A snapshot may take longer than the timeout, and would again after a restart.
                began = now
            stopped, waited = self._stopped(), now - began
            if stopped or waited >= self._patience:
                if all(one.by_readers for one in left):
                    return
                until = "until this process was asked to stop" if stopped else "publish.finish_timeout"
                raise UnpublishedError(
                    f"the run ended at step {run.step}, and {self._to} did not take its last changes for "
                    f"{waited:.0f} s ({until}): {_described(left)}. Servers that follow lack these changes. "
                    "Check that the channel can be reached, and start the run again: it resumes from its "
                    "last checkpoint, trains nothing twice and publishes all rows."
                )
            if not said and waited >= SAY_AFTER_S:
                said = True
                _log.warning(
                    "the run ended at step %d, and %s has not taken its last changes; retrying for up to "
                    "%g s (publish.finish_timeout): %s",
                    run.step,
                    self._to,
                    self._patience,
                    _described(left),
                )
            concurrency.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)

    def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
        self.publishers.close()

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        """Execute an order on all publishers, as the process that leads; see `Publishers.execute`."""
        if order.action == "resume":
            self.guard.accept()
        return self.publishers.execute(order) if self._supervisor is None else self._supervisor.execute(order)

    @property
    def statuses(self) -> Sequence[ShardPublishStatus]:
        """The latest status of each shard, if this process leads; empty before the first publication."""
        return () if self._supervisor is None else self._supervisor.statuses

    def positions(self) -> Mapping[str, Any]:
        """Return the published position of each shard, for a checkpoint."""
        found = self.publishers.positions()
        return {
            str(share): {"epoch": place.epoch, "sequence": place.sequence} for share, place in found.items()
        }

    def _send_weights(self, step: int) -> None:
        if not self.publishers.sends_weights:
            return
        self._sent_at, self._step = concurrency.monotonic(), step
        self.publishers.send_weights(copied(self._model.published()))


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU that only the caller refers to."""
    with torch.no_grad():
        return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
