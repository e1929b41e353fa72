"""`monolith export RUN --to DIR`: a checkpoint becomes a servable folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from monolith import filesystem
from monolith.cli.evaluation import settled
from monolith.cli.options.export import ExportOptions
from monolith.cli.options.train import EvaluateOptions
from monolith.cli.task_config import load_reading_run, train_options
from monolith.cli.terminal import say, warn
from monolith.errors import ConfigError
from monolith.observe import Progress, progress
from monolith.observe.progress import describe_bytes
from monolith.runtime.config import ExportConfig, RowCoding, RunConfig
from monolith.runtime.export import export_folder, how_to_export, task_exporter
from monolith.runtime.report import read_run_manifest
from monolith.serve.exporter import ExportedServable
from monolith.serve.python_module import PythonModule
from monolith.train import Task

FACTORY = "monolith.cli.export:served_module"


def run(options: ExportOptions) -> int:
    """Export one checkpoint, and say what to do with it."""
    options = as_trained(with_run(options))
    task, settings = load_reading_run(reading_options(options))
    export, config = settings.export, settings.train
    export = with_flags(export, options)
    root = options.to or export_folder(export, config)
    how = replace(
        how_to_export(export, config, as_module=options.as_module),
        keep=options.keep,
        compiled=options.compile,
    )
    checkpoint, _, why = settled(config)
    with ExitStack() as opened:
        exporter = opened.enter_context(
            task_exporter(
                task,
                config,
                how,
                factory=FACTORY if options.as_module else None,
                arguments=module_arguments(options, settings),
                warm_up=not options.no_warm_up,
                say=warn,
            )
        )
        shown: Progress | None = None
        if not options.quiet:
            total = exporter.rows_of(checkpoint)
            shown = opened.enter_context(progress("Exporting", total, "rows"))
        made = exporter.export(checkpoint, root, version=options.version, progress=shown)
    if options.json:
        sys.stdout.write(json.dumps({**to_json(made, task, checkpoint), "chosen": why}) + "\n")
    else:
        say(f"checkpoint {checkpoint} ({why})")
        for line in described(made, root):
            say(line)
    return 0


def with_flags(export: ExportConfig, options: ExportOptions) -> ExportConfig:
    """Return what the config says, with what flags say over it.

    Raises:
        ConfigError: A coding is none.
    """
    known = get_args(RowCoding)
    tables: dict[str, Any] = {}
    for text in options.coding:
        table, equals, given = text.rpartition("=")
        coding: Any = given
        if coding not in known or (equals and not table):
            raise ConfigError(f"--coding: expected {', '.join(known)}, or TABLE=CODING, got {text!r}")
        if table:
            tables[table] = coding
        else:
            export = replace(export, coding=coding, codings={})
    if options.missing_rows is not None and options.missing_rows not in ("refuse", "default"):
        raise ConfigError(f"--missing-rows: expected refuse or default, got {options.missing_rows!r}")
    missing: Any = options.missing_rows or export.missing_rows
    return replace(
        export,
        codings={**export.codings, **tables},
        shards=export.shards if options.shards is None else options.shards,
        missing_rows=missing,
    )


# Which task


def with_run(options: ExportOptions) -> ExportOptions:
    """Return the options with the run that --model-dir names, if it is named so.

    Raises:
        ConfigError: Another is named, too.
    """
    if options.model_dir is None:
        return options
    if options.run is not None:
        raise ConfigError(f"export: {options.run} and --model-dir both name the run; give one of them")
    return replace(options, run=options.model_dir)


def as_trained(options: ExportOptions, command: str = "export") -> ExportOptions:
    """Return the options with the task that the run was trained with, where nobody names another.

    Raises:
        ConfigError: Nothing says what it was.
    """
    if options.task is not None or options.config is not None:
        return options
    if options.run is None:
        raise ConfigError(
            "export: needs the run to export, as in: monolith export runs/1 --to servables; or --config"
        )
    starts = read_run_manifest(options.run) if filesystem.is_folder(options.run) else []
    trained = train_options(starts[0].get("command", ())) if starts else None
    if trained is None or (trained.task is None and trained.config is None):
        raise ConfigError(
            f"{command}: nothing in {options.run} says which task was trained there; name it with --task "
            "path/to/file.py:Name, or the run's config file with --config"
        )
    say(f"the task is as {options.run} was trained: {trained.task or trained.config}")
    return replace(options, task=trained.task, config=trained.config, set=(*trained.set, *options.set))


def reading_options(options: ExportOptions) -> EvaluateOptions:
    return EvaluateOptions(
        task=options.task,
        model_dir=options.run,
        config=options.config,
        set=options.set,
        checkpoint=options.checkpoint,
        threads=options.threads,
        quiet=options.quiet,
    )


def module_arguments(options: ExportOptions, settings: RunConfig) -> dict[str, Any]:
    """Return what `served_module` is called with where the model is served as code."""
    if not options.as_module:
        return {}
    config = None if options.config is None else str(options.config.absolute())
    return {
        "task": settings.job.task,
        "config": config,
        "settings": list(options.set),
        "model_dir": os.path.abspath(settings.train.model_dir),  # noqa: PTH100  a remote one stays
        "folder": str(Path.cwd()),
    }


def served_module(
    task: str | None, config: str | None, settings: Sequence[str], model_dir: str, folder: str
) -> PythonModule:
    """Make the model of a task again, where it is served.

    Args:
        folder: Where the export was started: files of the task's code are found from there.
    """
    if task is not None and ".py:" in task and not Path(task.partition(":")[0]).exists():
        task = str(Path(folder, task))
    options = EvaluateOptions(
        task=task,
        model_dir=model_dir,
        config=None if config is None else Path(config),
        set=tuple(settings),
    )
    made, _ = load_reading_run(options)
    return PythonModule(made.model(), made.predictions)


# What is said


def described(made: ExportedServable, root: str) -> list[str]:
    """Return what was exported, for a person."""
    servable = made.servable
    where = f"{made.folder} is there already" if made.was_there else f"exported {made.folder}"
    lines = [
        f"{where}: {servable.model}, step {servable.step:,}, {servable.rows:,} rows, "
        f"{describe_bytes(made.bytes)}"
        + (f" over {servable.shards} serving servers" if servable.shards else "")
    ]
    for name, table in servable.tables.items():
        if table.coding != "fp32" or table.expired:
            gone = f", {table.expired:,} expired rows left out" if table.expired else ""
            lines.append(
                f"  {name}: {table.coding}, off by at most {table.largest_error:.3g}, "
                f"{table.mean_error:.3g} on average{gone}"
            )
    if made.removed:
        lines.append(f"  removed the versions {', '.join(made.removed)}")
    if made.in_use:
        lines.append(f"  kept the versions {', '.join(made.in_use)}: a server uses them")
    if made.withheld:
        lines.append(
            "  withheld from servers: publishing of the run is paused, and this checkpoint is of the first "
            f"bad step or later. To serve it all the same: monolith serve {root} --serve-withheld "
            f"{servable.version}"
        )
    else:
        lines.append(f"next: monolith serve {root}")
    return lines


def to_json(made: ExportedServable, task: Task, checkpoint: str) -> Mapping[str, Any]:
    servable = made.servable
    return {
        "task": task.name,
        "checkpoint": checkpoint,
        "step": servable.step,
        "folder": made.folder,
        "version": servable.version,
        "was_there": made.was_there,
        "rows": servable.rows,
        "bytes": made.bytes,
        "watermark": servable.watermark,
        "shards": servable.shards,
        "tables": {
            name: {
                "rows": table.rows,
                "coding": table.coding,
                "largest_error": table.largest_error,
                "mean_error": table.mean_error,
                "expired": table.expired,
            }
            for name, table in servable.tables.items()
        },
        "removed": list(made.removed),
        "held": list(made.in_use),
        "withheld": made.withheld,
    }
