"""The batch-trained model: what the demo's model knew once, and nothing since.

It is a checkpoint of the run itself, so it has learned from the same records in the same way.
It only stops. What no model can beat is known too: the stream says how well its own
probabilities do, those of the moment and those of the day the rival stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monolith.checkpoint import Checkpointer, RestoreOptions, Saver
from monolith.cli.demo.process import WindowEnded
from monolith.cli.demo.task import HEAD, DemoJob, DriftingClicks
from monolith.data import DriftingStream
from monolith.nn import auc
from monolith.train import Mode
from monolith.train.model import Model

SAMPLE = 20_000
"""Examples of a window that the best possible AUC is measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One window of the stream, as all of them see it."""

    window: WindowEnded
    hours: float
    """Of event time since the beginning, in its middle."""
    best: float
    """What the probabilities score that decided the clicks."""
    frozen: float | None = None
    """What the batch-trained model scores; None while it learns."""
    best_frozen: float | None = None
    """What those score who knew everything when the batch-trained model stopped, and nothing since."""

    @property
    def online(self) -> float:
        return self.window.auc


class FrozenRival:
    """A model that learns no more.

    Args:
        checkpoint: The prefix of what it knows.
        since: The number of the first record it has not seen.
    """

    def __init__(self, job: DemoJob, checkpoint: str, since: int) -> None:
        self.since = since
        self._model = Model(DriftingClicks(job), Mode.PREDICT, seed=job.seed)
        saver = Saver(job.model_dir)
        Checkpointer(saver, self._model.parts()).restore(checkpoint, RestoreOptions(optimizer_state="reset"))

    def auc(self, stream: DriftingStream, first: int, end: int) -> float:
        """Return how well it predicts records [first, end)."""
        batch = stream.batch(first, end - first)
        with torch.no_grad():
            outputs = self._model.outputs(batch, self._model.prepare(batch))
        return auc(outputs.predictions[HEAD], batch.label)

    def close(self) -> None:
        self._model.close()


class Judge:
    """Compares on the same records: the model that learns, the one that stopped, and the best there is."""

    def __init__(self, job: DemoJob) -> None:
        self._stream = DriftingStream(job.drift())
        self.rival: FrozenRival | None = None
        """From when it stops learning."""

    def judge(self, window: WindowEnded) -> Point:
        stream, rival = self._stream, self.rival
        size = min(SAMPLE, window.end - window.first)
        middle = (window.first + window.end) // 2
        known = rival if rival is not None and rival.since <= window.first else None
        return Point(
            window=window,
            hours=self.hours(middle),
            best=stream.best_auc(size, first=window.first),
            frozen=None if known is None else known.auc(stream, window.first, window.end),
            best_frozen=None
            if known is None
            else stream.best_auc(size, first=window.first, as_of=stream.time_of(known.since)),
        )

    def hours(self, record: int) -> float:
        """Return the event time of a record, in hours since the beginning."""
        return (self._stream.time_of(record) - self._stream.config.start_time) / 3600
