"""`monolith evaluate TASK` and `monolith predict TASK`: the metrics of a checkpoint, and its predictions.

Both read checkpoints and change nothing of the training, so they may run at the same time. Only `evaluate
--follow` writes to the model_dir: to the folder eval in it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from monolith.checkpoint import checkpoint_exists, named_checkpoint, read_best, read_manifest
from monolith.cli.options.jobs import EmbeddingsOptions
from monolith.cli.options.train import EvaluateOptions, PredictOptions
from monolith.cli.task_config import load_reading
from monolith.cli.terminal import StopSignals, say
from monolith.config import parse_duration
from monolith.data import (
    Format,
    Records,
    RecordWriter,
    Stream,
    format_of,
)
from monolith.data.formats import ParquetFormat
from monolith.data.records import LABEL, LINE_ID, known_columns
from monolith.errors import ConfigError, CorruptFileError, DataError, FileMissingError, RestoreError
from monolith.feature import Batch
from monolith.observe import Progress, progress
from monolith.runtime import FollowConfig, Follower, Trainer
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.runtime.following import Found
from monolith.runtime.local_profile import profiled_by_user
from monolith.tensors import RaggedTensor
from monolith.train import Evaluation, Mode, Task, TrainConfig
from monolith.train.evaluation_log import EvaluationLog

PREDICTION = "prediction"


def evaluate(options: EvaluateOptions) -> int:
    """Print a checkpoint's metrics."""
    task, config = load_reading(options)
    if options.follow:
        return follow(options, task, config, lambda: ReadingBar(options, "Evaluating"))
    checkpoint, step, why = settled(config)
    mode = Mode.PREDICT if options.part == "predict" else Mode.EVALUATE
    with (
        ReadingBar(options, "Evaluating") as shown,
        profiled_by_user("evaluate-0", os.environ, name=task.name),
    ):
        found = Trainer(task, config).evaluate(
            steps=options.steps,
            checkpoint=checkpoint,
            data=mode,
            advance=shown.advance,
            on_open=shown.open,
        )
    examples = int(found.pop("examples"))
    bad, protocol = shown.bad_records, task.protocol(mode)
    if options.json:
        numbers = {name: None if math.isnan(value) else value for name, value in found.items()}
        said: dict[str, Any] = {} if protocol is None else {"protocol": protocol}
        said |= {"metrics": numbers, "bad_records": bad}
        write_json(task, checkpoint, step, chosen=why, examples=examples, **said)
        return 0
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{task.name}: {checkpoint}, step {step:,} ({why})", title_justify="left"
    )
    table.add_column("metric", style="cyan", no_wrap=True)
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(name, "nothing to say" if math.isnan(value) else f"{value:.6f}")
    left_out = "".join(f"; {count:,} bad records left out: {why}" for why, count in bad.items())
    measured_by = "" if protocol is None else f"\nprotocol: {protocol}"
    table.caption = f"over {examples:,} examples{left_out}{measured_by}"
    table.caption_justify = "left"
    Console().print(table, soft_wrap=True)
    return 0


def predict(options: PredictOptions) -> int:
    """Write what a checkpoint says of each example to a file."""
    if not options.to:
        raise ConfigError("predict: needs --to: the file to write, such as predictions.parquet")
    kind = format_of(options.to, options.to_format)
    task, config = load_reading(options)
    checkpoint, step, why = settled(config)
    examples = 0
    with ExitStack() as open_things:
        open_things.enter_context(profiled_by_user("predict-0", os.environ, name=task.name))
        shown = open_things.enter_context(ReadingBar(options, "Predicting"))
        file: RecordWriter | None = None
        columns = [name for given in options.columns for name in given.split(",") if name]

        def on_open(data: Stream[Batch]) -> None:
            if columns:
                data.keep_columns(columns)
            shown.open(data)

        for batch, predictions in Trainer(task, config).predict(
            steps=options.steps, checkpoint=checkpoint, on_open=on_open
        ):
            records = to_records(batch, predictions, columns)
            if file is None:
                file = open_things.enter_context(writer(kind, options.to, records))
            file.write(records)
            examples += len(records)
            shown.advance(len(records))
        if file is None:
            raise DataError(
                f"predict: dataset(Mode.PREDICT) of task {task.name!r} has no examples; {options.to} was not "
                "written"
            )
    if options.json:
        write_json(task, checkpoint, step, chosen=why, examples=examples, file=options.to)
    else:
        say(f"{examples:,} predictions of {checkpoint}, step {step:,} ({why}), in {options.to}")
    return 0


# Which checkpoint


class Chosen(NamedTuple):
    """The checkpoint that a command reads, and why that one."""

    prefix: str
    step: int
    why: str


def settled(config: TrainConfig) -> Chosen:
    """Settle on one checkpoint, whatever training saves meanwhile.

    That is the one that a person names; else the best, if the run was evaluated; else the latest. After early
    stopping the latest is the one that had become worse.

    Raises:
        RestoreError: There is none, or none of that name that is sound.
    """
    wanted, model_dir = config.restore.checkpoint, config.model_dir
    best = read_best(model_dir)
    if wanted is not None:
        prefix: str | None = named_checkpoint(model_dir, wanted)
        why = f"--checkpoint {wanted}"
    elif best is not None and checkpoint_exists(best.prefix(model_dir)):
        prefix = best.prefix(model_dir)
        why = f"the best by {best.metric}, {best.value:.4f}; --checkpoint latest takes the newest"
    else:
        prefix, why = newest_checkpoint(config, "eval"), "the latest"
    if prefix is None:
        raise RestoreError(
            f"there is no checkpoint in {config.model_dir}; train first with monolith train ... --model-dir "
            f"{config.model_dir}, or check the path"
        )
    return Chosen(prefix, read_manifest(prefix).manifest.step, why)


# What is written


def to_records(batch: Batch, predictions: Mapping[str, Tensor], columns: Sequence[str]) -> Records:
    """Return predictions and labels by head, and what says whose they are."""
    made = {column_of(PREDICTION, head): one_each(given) for head, given in predictions.items()}
    made |= {column_of(LABEL, head): one_each(given, drop_nan=True) for head, given in batch.labels.items()}
    ids, raw = batch.ids, batch.raw
    if unknown := [name for name in columns if name not in raw and name not in ids.names]:
        known = known_columns(unknown[0], ids.names)
        raise ConfigError(f"predict: the batches have no feature {unknown[0]!r}; {known}")
    if taken := [name for name in columns if name in made]:
        raise ConfigError(f"predict: --columns {taken[0]}: a column of that name is written already")
    wanted = [name for name in ids.names if name not in raw and (name.startswith(LINE_ID) or name in columns)]
    shared = {name for name, alone in zip(ids.names, ids.shared, strict=True) if alone and name in wanted}
    passed = {name: raw[name] if name in raw else ids[name] for name in [*columns, *wanted]}
    return Records(len(batch), {**made, **passed}, frozenset(shared), kinds=batch.raw_kinds)


def column_of(kind: str, head: str) -> str:
    return kind if head == kind else f"{kind}.{head}"


def one_each(values: Tensor, *, drop_nan: bool = False) -> RaggedTensor:
    """Return a value per example, or several where it has a row of them; a label that is NaN is none."""
    rows = values.detach().float().cpu().reshape(len(values), -1)
    there = ~rows.isnan() if drop_nan else torch.ones_like(rows, dtype=torch.bool)
    return RaggedTensor.from_row_lengths(rows[there], there.sum(dim=1))


def writer(kind: Format, path: str, records: Records) -> AbstractContextManager[RecordWriter]:
    if isinstance(kind, ParquetFormat):  # its readers expect numbers, not lists of one
        single = [name for name in records.columns if name.startswith((PREDICTION, LABEL))]
        kind = ParquetFormat(single=single)
    return kind.writer(path)


# What is shown


class ReadingBar(ExitStack):
    """Shows the progress of reading, with percent and time left if the amount of data is known."""

    def __init__(self, options: EvaluateOptions | PredictOptions | EmbeddingsOptions, label: str) -> None:
        super().__init__()
        self._options = options
        self._label = label
        self._steps: int | None = getattr(options, "steps", None)
        self._batches = 0
        self._bar: Progress | None = None
        self._data: Stream[Batch] | None = None

    @property
    def bad_records(self) -> dict[str, int]:
        """Why records of the data were left out, and how many for each reason."""
        return {} if self._data is None else self._data.bad_records()

    def open(self, data: Stream[Batch]) -> None:
        """Begin to show what is read of some data."""
        self._data = data
        if not self._options.quiet:
            total = None if self._steps is not None else data.size()
            self._bar = self.enter_context(
                progress(self._label, total, unit="examples", fraction=lambda: self._part(data))
            )

    def advance(self, amount: float = 1) -> None:
        """Count the examples of a batch."""
        self._batches += 1
        if self._bar is not None:
            self._bar.advance(amount)

    def _part(self, data: Stream[Batch]) -> float | None:
        """Return which part is done: of the steps or of the data, whichever ends first."""
        read = data.fraction_read(data.position())
        if not self._steps:
            return read
        return max(self._batches / self._steps, read or 0.0)


def write_json(task: Task, checkpoint: str, step: int, **more: Any) -> None:
    said = {"task": task.name, "checkpoint": checkpoint, "step": step, **more}
    sys.stdout.write(json.dumps(said) + "\n")


AGAIN = "run the same command again to continue with the checkpoints that are new"


class _StoppedError(Exception):
    """A signal asked to stop in the middle of an evaluation."""


def follow(
    options: EvaluateOptions,
    task: Task,
    config: TrainConfig,
    watched: Callable[[], ReadingBar],
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
    log = EvaluationLog(config.model_dir, curves=config.curves_dir)
    follower = Follower(config.model_dir, settings, wait=stop.wait, clock=time.monotonic, taken=log.taken())
    trainer, done = Trainer(task, config), 0
    if (protocol := task.protocol(Mode.EVALUATE)) is not None and not options.json:
        sys.stdout.write(f"protocol: {protocol}\n")
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
    skipped = f", {follower.skipped} skipped because they were deleted" if follower.skipped else ""
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
    trainer: Trainer, found: Found, steps: int | None, watched: ReadingBar, stop: threading.Event
) -> Evaluation:
    """Evaluate one checkpoint, unless a signal stops it."""
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
        protocol=trainer.task.protocol(Mode.EVALUATE),
    )


def tell(evaluation: Evaluation, *, as_json: bool) -> None:
    """Print one evaluation, as a line."""
    if as_json:
        sys.stdout.write(json.dumps(evaluation.to_json()) + "\n")
    else:
        values = ", ".join(f"{name} {value:.6f}" for name, value in evaluation.metrics.items())
        sys.stdout.write(f"step {evaluation.step:,}: {values}, over {evaluation.examples:,} examples\n")
    sys.stdout.flush()
