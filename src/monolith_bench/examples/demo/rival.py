"""The batch-trained model: what the demo's model knew once, and nothing since.

It is a checkpoint of the run itself, so it has learned from the same records in the same way.
It only stops: it is what a server would still say that does not follow. What no model can beat is known
too, but for what is staged: the stream says how well its own probabilities do, those of the moment and
those of when the rival stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monolith.checkpoint import Checkpointer, RestoreOptions, Saver
from monolith.data import DriftingStream
from monolith.nn import auc
from monolith.train import Mode
from monolith.train.model import Model
from monolith_bench.examples.demo.live_stream import LiveClicks
from monolith_bench.examples.demo.process import WindowEnded
from monolith_bench.examples.demo.task import HEAD, DemoJob, LiveTask

SAMPLE = 20_000
"""Examples of a window that the best possible AUC is measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One window of the stream, as all of them see it."""

    window: WindowEnded
    seconds: float
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
        self._model = Model(LiveTask(job), Mode.PREDICT, seed=job.script.seed)
        saver = Saver(job.model_dir)
        Checkpointer(saver, self._model.parts()).restore(checkpoint, RestoreOptions(optimizer_state="reset"))

    def auc(self, stream: LiveClicks, first: int, end: int) -> float:
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
        self._script = job.script
        self._stream = DriftingStream(job.script.drift())
        self._staged = LiveClicks(job.script, job.cues.read)
        self.rival: FrozenRival | None = None
        """From when it stops learning."""

    def judge(self, window: WindowEnded) -> Point:
        stream, rival = self._stream, self.rival
        size = min(SAMPLE, window.end - window.first)
        middle = (window.first + window.end) // 2
        known = rival if rival is not None and rival.since <= window.first else None
        return Point(
            window=window,
            seconds=self.seconds(middle),
            best=stream.best_auc(size, first=window.first),
            frozen=None if known is None else known.auc(self._staged, window.first, window.end),
            best_frozen=None
            if known is None
            else stream.best_auc(size, first=window.first, as_of=stream.time_of(known.since)),
        )

    def seconds(self, record: int) -> float:
        """Return the event time of a record, in seconds since the beginning."""
        return record / self._script.rate
