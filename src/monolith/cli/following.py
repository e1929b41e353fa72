"""`monolith evaluate TASK --follow`: evaluates each checkpoint that a run saves, in a process of its own."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from monolith.checkpoint import checkpoint_exists
from monolith.cli.options.train import EvaluateOptions
from monolith.cli.terminal import StopSignals, say
from monolith.config import parse_duration
from monolith.data import Stream
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, RestoreError
from monolith.feature import Batch
from monolith.train import Evaluation, FollowConfig, Follower, Task, TrainConfig, Trainer
from monolith.train.evaluation_log import EvaluationLog
from monolith.train.following import Found

AGAIN = "run the same command again to go on with the checkpoints that are new"


class ShownReading(Protocol):
    """Shows how far an evaluation has come."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...
    def open(self, data: Stream[Batch]) -> None: ...
    def advance(self, amount: float = 1) -> None: ...


class _StoppedError(Exception):
    """Somebody wants to stop in the middle of an evaluation."""


def follow(
    options: EvaluateOptions,
    task: Task,
    config: TrainConfig,
    watched: Callable[[], ShownReading],
) -> int:
    """Evaluate checkpoints as they come, write what was found, and return the exit status.

    Args:
        watched: Shows how far an evaluation has come.
    """
    if options.checkpoint is not None:
        raise ConfigError("evaluate: --follow reads every new checkpoint, --checkpoint one; give one of them")
    if options.part != "evaluate":
        raise ConfigError("evaluate: --follow measures on what the task evaluates on; leave --part out")
    settings = follow_config(options, config)
    stop = threading.Event()
    log = EvaluationLog(config.model_dir)
    follower = Follower(config.model_dir, settings, wait=stop.wait, clock=time.monotonic, taken=log.taken())
    trainer, done = Trainer(task, config), 0
    with StopSignals(lambda _: stop.set(), say, doing="this batch", again=AGAIN) as signals:
        for found in follower:
            try:
                evaluation = evaluated(trainer, found, options.steps, watched(), stop)
            except _StoppedError:
                break
            except (FileMissingError, RestoreError, CorruptFileError):
                if checkpoint_exists(found.prefix):
                    raise
                follower.passed_over(found)
                continue
            log.add(evaluation)
            done += 1
            tell(evaluation, as_json=options.json)
        log.close()
    skipped = f", {follower.skipped} passed over that were deleted" if follower.skipped else ""
    say(f"followed {config.model_dir}: {done} checkpoints{skipped}; {follower.why or 'stopped'}")
    return 0 if signals.received is None else 128 + signals.received


def follow_config(options: EvaluateOptions, config: TrainConfig) -> FollowConfig:
    """Return how a run is followed.

    Raises:
        ConfigError: A duration makes no sense.
    """
    found: dict[str, timedelta] = {}
    for name in ("poll", "timeout"):
        try:
            found[name] = parse_duration(getattr(options, name))
        except ConfigError as cause:
            raise ConfigError(f"--{name}: {cause}") from cause
    return FollowConfig(
        poll=found["poll"],
        timeout=found["timeout"] or None,
        last_step=config.max_steps if options.last_step is None else options.last_step,
    )


def evaluated(
    trainer: Trainer, found: Found, steps: int | None, watched: ShownReading, stop: threading.Event
) -> Evaluation:
    """Evaluate one checkpoint, unless somebody stops it meanwhile."""
    began = time.monotonic()
    with watched as shown:

        def advance(examples: int) -> None:
            shown.advance(examples)
            if stop.is_set():
                raise _StoppedError

        values = trainer.evaluate(steps=steps, checkpoint=found.prefix, advance=advance, on_open=shown.open)
    examples = int(values.pop("examples"))
    return Evaluation(
        step=found.step,
        metrics=values,
        examples=examples,
        seconds=time.monotonic() - began,
        checkpoint=found.name,
        saved_at=found.saved_at,
    )


def tell(evaluation: Evaluation, *, as_json: bool) -> None:
    """Print one evaluation, as a line."""
    if as_json:
        sys.stdout.write(json.dumps(evaluation.to_json()) + "\n")
    else:
        values = ", ".join(f"{name} {value:.6f}" for name, value in evaluation.metrics.items())
        sys.stdout.write(f"step {evaluation.step:,}: {values}, over {evaluation.examples:,} examples\n")
    sys.stdout.flush()
