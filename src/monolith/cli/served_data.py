"""`monolith data join | skew`: logs of served features, joined with actions and compared with training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from monolith import filesystem
from monolith.checkpoint import Saver, read_manifest
from monolith.cli.data_files import expanded, read, shown
from monolith.cli.evaluation import settled
from monolith.cli.export import as_trained, reading_options
from monolith.cli.options.data import DataJoinOptions, DataSkewOptions
from monolith.cli.options.export import ExportOptions
from monolith.cli.task_config import load_reading_run
from monolith.config import parse_duration
from monolith.data import FileSource, JoinedSource, JoinerConfig, Stream, concat, format_of
from monolith.data.served import STEP
from monolith.data.skew import SkewLog
from monolith.errors import ConfigError, DataError
from monolith.feature import Batch
from monolith.observe import progress
from monolith.observe.progress import counted
from monolith.runtime import Trainer
from monolith.runtime.config_task import ConfigTask
from monolith.train import TrainConfig

BATCH = 4096


def join(options: DataJoinOptions) -> int:
    """Write examples: rows that were served, with labels by the actions that followed."""
    if not options.to or not options.actions:
        raise ConfigError(
            "data join: needs --actions, the files of actions, and --to, the file to write, such as "
            "joined.tfrecord"
        )
    log, actions = expanded(options.paths), expanded(options.actions)
    types = {options.key: torch.uint8, options.time: torch.int64, options.action: torch.int64}
    with ExitStack() as opened:
        # The state of the join is of no use after it: nothing resumes in the middle of one file.
        folder = opened.enter_context(filesystem.temporary_folder("monolith-join-"))
        config = JoinerConfig(
            key=options.key,
            positives=tuple(_actions(one) for one in options.positives),
            window=parse_duration(options.window),
            lateness=parse_duration(options.lateness),
            negative_rate=options.negative_rate,
            time=options.time,
            action=options.action,
            folder=str(folder),
        )
        joined = JoinedSource(
            FileSource(log, format_of(log[0]), batch_size=BATCH),
            FileSource(
                actions,
                format_of(actions[0], options.actions_format, types=types),
                batch_size=BATCH,
                columns=list(types),
            ),
            config,
        )
        opened.enter_context(closing(joined))
        bar = opened.enter_context(progress("Joining", None, unit="examples"))
        with format_of(options.to, options.to_format).writer(options.to) as file:
            for records in joined:
                file.write(records)
                bar.advance(len(records))
        stats = joined.joiner.stats
    lost = stats.unmatched_actions + stats.late_actions
    Console(stderr=True).print(
        f"{stats.positives + stats.negatives:,} examples in {options.to}, {stats.positives:,} of them "
        f"positive; {lost:,} actions without a served row, or too late",
        highlight=False,
    )
    return 0


def _actions(text: str) -> frozenset[int]:
    try:
        return frozenset(int(one) for one in text.split(","))
    except ValueError as cause:
        raise ConfigError(f"data join: --positives must be whole numbers, as 1,2, got {text!r}") from cause


def skew(options: DataSkewOptions) -> int:
    """Print how features and scores of a log differ from those that training computes; 1 if they do."""
    found = [chunk.records for _, _, chunk in read(expanded(options.log), None, (), "Reading the log")]
    records = concat(found)
    log = SkewLog(records)
    asked = ExportOptions(
        run=options.run,
        config=options.config,
        task=options.task,
        checkpoint=options.checkpoint,
        quiet=options.quiet,
    )
    task, settings = load_reading_run(reading_options(as_trained(asked, "data skew")))
    if options.data is not None:
        if not isinstance(task, ConfigTask):
            raise ConfigError(
                "data skew: --data is for a task that is a config file; others say what they read for "
                "Mode.PREDICT"
            )
        files = replace(
            task.data, path=options.data, train=None, watch=None, kafka=None, stop_after=None, format=None
        )
        data = replace(files, evaluate=None, predict=options.data, split=None, pattern=None, served=False)
        task = replace(task, data=data)
    checkpoint = _served_checkpoint(settings.train, int(records[STEP].flat_values.max()))
    if checkpoint is None:
        checkpoint = settled(settings.train).prefix
    step = read_manifest(checkpoint).manifest.step

    def on_open(data: Stream[Batch]) -> None:
        if not data.keep_columns([options.key]):
            raise DataError(f"data skew: the pipeline of {task.name!r} cannot pass on a column of its data")

    for batch, scores in Trainer(task, settings.train).predict(checkpoint=checkpoint, on_open=on_open):
        log.compare(list(_keys(batch, options.key)), batch, scores, step)
    if not log.matched:
        raise DataError(
            f"data skew: none of the {log.unknown:,} records of the data is in the log, which has "
            f"{len(log):,}. Column {options.key!r} must have ID/ROW of a request, or its ID; --key names "
            "another column"
        )
    different = any(one.different for one in log.differences.values())
    if options.json:
        sys.stdout.write(json.dumps(_plain(log, checkpoint, step)) + "\n")
    else:
        _print(log, step)
    return int(different)


def _served_checkpoint(config: TrainConfig, step: int) -> str | None:
    """Return the checkpoint that was served, unless another is named or it is gone."""
    return Saver(config.model_dir).find(step) if config.restore.checkpoint is None else None


def _keys(batch: Batch, name: str) -> Iterator[bytes]:
    column = batch.raw[name]
    for row in column.to_list():
        one = row[0] if row else b""
        yield bytes(one) if isinstance(one, list) else str(one).encode() if row else b""


def _plain(log: SkewLog, checkpoint: str, step: int) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "step": step,
        "matched": log.matched,
        "only_in_log": len(log) - log.matched,
        "only_in_data": log.unknown,
        "scores_of_other_steps": log.other_steps,
        "differences": {
            name: {
                "kind": one.kind,
                "compared": one.compared,
                "different": one.different,
                "largest": one.largest,
                "example": None
                if one.example is None
                else dict(zip(("key", "logged", "computed"), one.example, strict=True)),
            }
            for name, one in log.differences.items()
        },
    }


def _print(log: SkewLog, step: int) -> None:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{counted(log.matched, 'event')} in both the log and the data",
        title_justify="left",
    )
    for heading in ("name", "kind", "compared", "different", "largest difference", "first example"):
        table.add_column(heading, justify="left" if heading in ("name", "kind", "first example") else "right")
    for name, one in sorted(log.differences.items(), key=lambda item: -item[1].different):
        example = ""
        if one.example is not None:
            key, logged, computed = one.example
            example = f"{key}: served {shown(logged) or 'nothing'}, trained on {shown(computed) or 'nothing'}"
        largest = f"{one.largest:.3g}" if one.kind != "ids" else ""
        table.add_row(name, one.kind, f"{one.compared:,}", f"{one.different:,}", largest, example)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = max(console.width, 140)
    console.print(table)
    console.print(
        f"{len(log) - log.matched:,} records are only in the log, {log.unknown:,} only in the data",
        highlight=False,
    )
    if log.other_steps:
        console.print(
            f"scores of {log.other_steps:,} records were not compared: another step than {step:,} was served",
            highlight=False,
        )
