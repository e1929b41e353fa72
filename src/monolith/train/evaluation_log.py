"""What evaluations found, where people look for it: `<model_dir>/eval`, for TensorBoard and as JSON lines.

A line says of which step it is, when, and every metric. The file is replaced in one step each time, so that
it can lie anywhere and is never half written. Lines of steps that are still to come, which a run that went
back has left, go when the first of the new history is written.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from monolith import concurrency, filesystem
from monolith.errors import CorruptFileError, FileMissingError, TransientFilesystemError
from monolith.observe.summaries import SummaryWriter

FOLDER = "eval"
"""Below the model's folder."""
LINES = "metrics.jsonl"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What one evaluation found."""

    step: int
    metrics: Mapping[str, float]
    """By "head/metric", and the loss; NaN where there is nothing to say."""
    examples: int
    seconds: float
    """How long it took."""
    checkpoint: str | None = None
    """The name of the checkpoint that was evaluated; None if it was the model of a run as it trains."""
    saved_at: float | None = None
    """Unix seconds at which that was saved."""
    protocol: str | None = None
    """How it was made, as `Task.protocol` says; None if the names of the metrics say it."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "step": self.step,
            "checkpoint": self.checkpoint,
            "saved_at": self.saved_at,
            "examples": self.examples,
            "seconds": round(self.seconds, 3),
            **({} if self.protocol is None else {"protocol": self.protocol}),
            "metrics": {
                name: value if math.isfinite(value) else None for name, value in self.metrics.items()
            },
        }


class EvaluationLog:
    """Writes evaluations to the folder `eval` of a model. One process writes at a time.

    Args:
        curves: The folder of TensorBoard's event files, which shows it as a run of its own; by default that
            of the lines. Evaluations of checkpoints are drawn in `checkpoints` below it, since another
            process may draw those of the run as it trains.
        clock: Unix seconds, which lines are stamped with.
    """

    def __init__(
        self, model_dir: str, *, curves: str | None = None, clock: Callable[[], float] = concurrency.time
    ) -> None:
        self._folder = filesystem.join(model_dir, FOLDER)
        self._curves = self._folder if curves is None else curves
        self._path = filesystem.join(self._folder, LINES)
        self._clock = clock
        self._writer: SummaryWriter | None = None
        self._unwritten: list[dict[str, Any]] = []
        """Lines for which there was no room."""

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines that are there, oldest first.

        Raises:
            CorruptFileError: One is no JSON.
        """
        try:
            text = filesystem.read_bytes(self._path).decode()
        except FileMissingError:
            return []
        found = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                found.append({"step": int((one := json.loads(line))["step"]), **one})
            except (ValueError, KeyError, TypeError) as cause:
                reason = f"line {number} is no evaluation: {cause}. Move the file away to begin another"
                raise CorruptFileError(self._path, 0, reason) from cause
        return found

    def add(self, evaluation: Evaluation) -> None:
        """Write a line, in place of those of the same step and later ones, and a point of each curve.

        Evaluations of checkpoints replace only such, and those of a run as it trains only such.
        """
        saved = evaluation.checkpoint is not None
        kept = [
            line
            for line in self.lines()
            if line["step"] < evaluation.step or (line.get("checkpoint") is not None) != saved
        ]
        kept += [line for line in self._unwritten if line["step"] < evaluation.step]
        lines = [*kept, {**evaluation.to_json(), "time": self._clock()}]
        try:
            filesystem.make_dirs(self._folder)
            with filesystem.atomic_write(self._path) as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            self._unwritten = []
            self._draw(evaluation)
        except TransientFilesystemError as error:
            _log.warning("the evaluation of step %d is written with the next one: %s", evaluation.step, error)
            self._unwritten = [line for line in self._unwritten if line["step"] < evaluation.step]
            self._unwritten.append(lines[-1])

    def taken(self) -> list[tuple[str, float]]:
        """Return the checkpoints of which there are lines: their names, and when each was saved."""
        return [
            (str(line["checkpoint"]), float(line["saved_at"]))
            for line in self.lines()
            if line.get("checkpoint") is not None and line.get("saved_at") is not None
        ]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _draw(self, evaluation: Evaluation) -> None:
        if self._writer is None:
            if find_spec("tensorboard") is None:
                return
            saved = evaluation.checkpoint is not None
            folder = filesystem.join(self._curves, "checkpoints") if saved else self._curves
            self._writer = SummaryWriter(folder, clock=self._clock)
            self._writer.start(evaluation.step - 1)
        finite = {
            name if name == "loss" else f"metrics/{name}": value
            for name, value in evaluation.metrics.items()
            if math.isfinite(value)
        }
        self._writer.scalars(finite, evaluation.step)
        self._writer.flush()
