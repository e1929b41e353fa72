"""`monolith checkpoint list | inspect | diff | reshard | export | import | compact`: parse, call, print.

The exit status is 1 if a file is damaged or missing; its name is printed.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from monolith import checkpoint, filesystem
from monolith.checkpoint import original
from monolith.checkpoint.offline.listing import find_named
from monolith.checkpoint.offline.reading import Damage, rows_to_read, rows_to_write, size_of
from monolith.cli.options.checkpoint import (
    CheckpointCompactOptions,
    CheckpointDiffOptions,
    CheckpointExportOptions,
    CheckpointImportOptions,
    CheckpointInspectOptions,
    CheckpointListOptions,
    CheckpointReshardOptions,
)
from monolith.cli.options.train import EvaluateOptions
from monolith.errors import ConfigError, UnknownTableError
from monolith.observe import Progress, progress
from monolith.runtime.config_loading import read_run

if TYPE_CHECKING:
    from monolith.checkpoint import Contents, Difference, FoundRow, Listed
    from monolith.checkpoint.offline.comparing import VariableDifference
    from monolith.checkpoint.offline.reading import TableContents, Variable
    from monolith.checkpoint.offline.rewriting import Rewritten
    from monolith.checkpoint.original import ImportReport
    from monolith.feature import FeatureSpec

SHOWN_VALUES = 8
LINE = 100
"""Characters of a part of plain values that --details shows in one line."""
SHOWN_STATE = 80
"""Characters of a part of plain values; a longer one is shown with --details."""
SHOWN_TABLES = 3


def run_or_checkpoint(given: str | None, config: Path | None) -> str:
    """Return the folder or checkpoint that is meant: the config file of a run means its model_dir.

    Args:
        given: A folder, a checkpoint or a config file; with `config`, a checkpoint of that run.

    Raises:
        ConfigError: Nothing is named, or a config file cannot be read or has no model_dir.
    """
    if config is not None:
        folder = _model_dir(config)
        return folder if given is None else find_named(folder, given)
    if given is None:
        raise ConfigError("name the folder of a run, or give the config file of the run as --config")
    path = Path(given)
    if path.suffix not in (".toml", ".json") or not path.is_file():
        return given
    return _model_dir(path)


def find(given: str | None, config: Path | None) -> str:
    """Return the prefix of the checkpoint that is meant."""
    return checkpoint.find_checkpoint(run_or_checkpoint(given, config))


def _model_dir(config: Path) -> str:
    model_dir = read_run(config, {}).train.model_dir
    if not model_dir:
        raise ConfigError(f"{config} has no train.model_dir, the folder with the checkpoints of its run")
    return model_dir


# list


def list_(options: CheckpointListOptions) -> int:
    """List the checkpoints of a run; return 1 if one is damaged."""
    if options.run_dir is not None and options.config is not None:
        raise ConfigError("checkpoint list: RUN-DIR and --config both name the run; give one of them")
    run_dir = run_or_checkpoint(options.run_dir, options.config)
    found = checkpoint.list_checkpoints(run_dir)
    if options.json:
        print_json(
            {
                "run": found.model_dir,
                "checkpoints": [
                    {
                        **asdict(one),
                        "name": one.name,
                        "latest": "latest" in one.marks,
                        "listed": "listed" in one.marks,
                        "best": "best" in one.marks,
                        "exempt": "exempt" in one.marks,
                        "ok": one.problem is None,
                    }
                    for one in found.checkpoints
                ],
                "problems": found.problems,
            }
        )
        return 0 if found.sound else 1
    console = Console()
    if not found.checkpoints:
        show(console, f"{run_dir} has no checkpoints")
    else:
        console.print(listing_table(run_dir, found.checkpoints))
    for one in found.checkpoints:
        if one.problem is not None:
            show(console, f"{one.name}: {one.problem}")
    for problem in found.problems:
        show(console, problem)
    return 0 if found.sound else 1


def listing_table(title: str, checkpoints: Iterable[Listed]) -> Table:
    table = new_table(title, "checkpoint", "saved", "kind", ">rows", ">size", "kept", "state")
    for one in checkpoints:
        kind = one.kind if len(one.chain) == 1 else f"{len(one.chain) - 1} after {short(one.chain[0])}"
        state = "[red]damaged" if one.problem else "" if one.kind == "unfinished" else "ok"
        table.add_row(
            one.name,
            at_time(one.saved_at),
            kind,
            rows_text(one),
            decimal(one.bytes),
            marks_text(one),
            state,
        )
    return table


def rows_text(one: Listed) -> str:
    if len(one.rows) <= SHOWN_TABLES:
        return "\n".join(f"{name} {rows:,}" for name, rows in one.rows.items())
    return f"{sum(one.rows.values()):,}\nin {len(one.rows)} tables"


def marks_text(one: Listed) -> str:
    shown = [mark for mark in one.marks if not (mark == "listed" and "latest" in one.marks)]
    return ", ".join(f"[bold]{mark}[/bold]" if mark in ("latest", "best") else mark for mark in shown)


# inspect


def inspect(options: CheckpointInspectOptions) -> int:
    """Show the contents of a checkpoint, or the row of one id; return 1 if something is damaged."""
    prefix = find(options.checkpoint, options.config)
    if options.id is not None:
        return guarded(prefix, options.json, lambda: show_row(prefix, options))
    return guarded(prefix, options.json, lambda: show_contents(prefix, options))


def show_row(prefix: str, options: CheckpointInspectOptions) -> int:
    assert options.id is not None
    rows = checkpoint.find_value(prefix, options.id, feature=options.feature, table=options.table)
    known = [row for row in rows if row.prefix is not None]
    if len(known) > 1:
        of = ", ".join(row.feature or row.table for row in known)
        raise ConfigError(
            f"checkpoint inspect: {options.id!r} has a row in each of {of}; choose one with --feature"
        )
    found = rows[0]
    if options.json:
        print_json({"checkpoint": prefix, "value": options.id, **asdict(found)})
        return 0
    console = Console()
    if not known and len(rows) > 1:
        of = ", ".join(row.feature or row.table for row in rows)
        show(console, f"{options.id} in {short(prefix)}: no row in any of {of}")
        return 0
    show(console, row_heading(prefix, found, options.id))
    if found.status == "found":
        console.print(row_table(found))
    return 0


def row_heading(prefix: str, found: FoundRow, value: str) -> str:
    whose = f"{found.table} {value}{'' if value == str(found.id) else f' (id {found.id})'} in {short(prefix)}"
    if found.prefix is None:
        return f"{whose}: no row, neither here nor in the checkpoints it continues"
    where = filesystem.base_name(found.prefix)
    if found.status == "found":
        return f"{whose}: written by {where}, event time {at_time(found.event_time)} ({found.event_time})"
    what = "removed" if found.status == "removed" else "gone since the table was cleared,"
    return f"{whose}: {what} at {where}"


def row_table(found: FoundRow) -> Table:
    table = new_table("", "segment", "what", "values")
    for number, segment in enumerate(found.segments):
        label = f"{number}: {len(segment.values)} x {segment.optimizer}"
        table.add_row(label, "embedding", numbers(segment.values))
        for name, values in segment.state.items():
            table.add_row("", name, str(values) if isinstance(values, int) else numbers(values))
    return table


def show_contents(prefix: str, options: CheckpointInspectOptions) -> int:
    with bar("Reading", rows_to_read(prefix) if options.verify else 0) as done:
        found = checkpoint.read_contents(prefix, verify=options.verify, progress=done)
    tables = [table for table in found.tables if options.table in (None, table.name)]
    if options.table is not None and not tables:
        names = ", ".join(table.name for table in found.tables) or "none"
        raise UnknownTableError(f"{prefix} has no table {options.table!r}; it has {names}")
    if options.json:
        print_json({**asdict(found), "tables": [asdict(table) for table in tables], "ok": not found.problems})
        return 1 if found.problems else 0
    console = Console()
    show(console, contents_heading(found))
    if tables:
        console.print(contents_table(tables, details=options.details))
    if options.table is None and options.details:
        show_rest(console, found, options.variables)
    elif options.table is None:
        for name, words in summary(found).items():
            show(console, f"  {name:<9} {words}")
    for problem in found.problems:
        show(console, f"damaged: {problem}", style="red")
    if not found.problems:
        more = "" if options.details else "; --details shows every variable, setting and position"
        show(
            console,
            ("verified: all checksums match" if found.verified else "ok; --verify reads every byte") + more,
        )
    return 1 if found.problems else 0


def contents_heading(found: Contents) -> str:
    lines = [f"{found.prefix}\nstep {found.step:,}, saved {at_time(found.saved_at)}, {decimal(found.bytes)}"]
    if found.kind == "full":
        lines[0] += ", full"
    else:
        chain = " < ".join(filesystem.base_name(prefix) for prefix in found.chain)
        lines.append(f"an increment: {chain}")
    return "\n".join(lines)


def summary(found: Contents) -> dict[str, str]:
    """Return a line of text for each part of a checkpoint except its tables."""
    lines: dict[str, str] = {}
    if found.variables:
        weights = sum(math.prod(one.shape) for one in found.variables if one.same_as is None)
        lines["dense"] = f"{weights:,} weights in {len(found.variables):,} variables"
        lines["dense"] += f", and {found.training_tensors:,} tensors of optimizers" * bool(
            found.training_tensors
        )
    for one in found.filters:
        if one.kind != "none":
            used = "" if one.cells is None else f", {one.cells:,} of {one.capacity:,} cells in use"
            lines["filters"] = "; ".join(
                filter(None, [lines.get("filters"), f"{one.table}: {one.kind}{used}"])
            )
    for name, value in found.states.items():
        if name == checkpoint.FEATURES:
            spec = checkpoint.saved_spec(found.prefix, value).to_dict()
            lines["features"] = ", ".join(spec["features"])
            lines["labels"] = ", ".join(spec["labels"])
        else:
            lines[name] = state_words(name, value)
    return {name: words for name, words in lines.items() if words}


def state_words(name: str, value: Any) -> str:
    """Return the gist of a part of plain values, as a text."""
    if name == "metrics" and isinstance(value, dict) and isinstance(value.get("set"), dict):
        last = {metric: one.get("last") for metric, one in value["set"].items() if isinstance(one, dict)}
        known = [f"{metric} {number:.4f}" for metric, number in last.items() if isinstance(number, float)]
        return ", ".join(known) or f"{len(last)}, none of them over a whole window yet"
    if name == "progress" and isinstance(value, dict) and "examples" in value:
        skipped = f", {value['skipped']:,} skipped" if value.get("skipped") else ""
        return f"{value['examples']:,} examples trained{skipped}"
    if name == "position" and (file := _found(value, "file")) is not None:
        return f"in {file}" + (f", round {rounds}" if (rounds := _found(value, "round")) else "")
    text = json.dumps(plain(value))
    return text if len(text) <= SHOWN_STATE else f"{len(text):,} characters"


def _found(value: Any, key: str) -> Any:
    """Return the value of a key in nested dicts: a pipeline's stages contain the position of its source."""
    while isinstance(value, dict):
        if key in value:
            return value[key]
        value = value.get("source")
    return None


def contents_table(tables: Iterable[TableContents], *, details: bool) -> Table:
    if not details:
        shown = new_table("", "table", ">rows", ">dim", ">changed", ">removed", ">size", "newest")
        for one in tables:
            changes = ("", "") if one.kind == "full" else (f"{one.changed or 0:,}", f"{one.removed or 0:,}")
            newest = "" if one.newest_event_time is None else at_time(one.newest_event_time)
            dim = one.layout.partition(" ")[0]  # "9 values + 9 state (...)"
            shown.add_row(one.name, f"{one.rows:,}", dim, *changes, decimal(one.bytes), newest)
        return shown
    shown = new_table("", "table", ">rows", "holds", ">files", ">size", "newest", "a row")
    for one in tables:
        holds = "all"
        if one.kind == "changes":
            holds = f"{one.changed or 0:,} changed, {one.removed or 0:,} removed"
            holds += ", cleared first" if one.cleared else ""
            holds += "".join(f", ps-{share} cleared first" for share in one.cleared_shares)
        files = str(one.shards) + (f" + {one.linked} linked" if one.linked else "")
        files += "" if one.shares == 1 else f" of {one.shares} servers"
        newest = "" if one.newest_event_time is None else at_time(one.newest_event_time)
        shown.add_row(one.name, f"{one.rows:,}", holds, files, decimal(one.bytes), newest, one.layout)
    return shown


def show_rest(console: Console, found: Contents, most: int) -> None:
    if found.variables:
        console.print(variables_table(found.variables, most, found.training_tensors))
    for one in found.filters:
        if one.kind != "none":
            used = "" if one.cells is None else f", {one.cells:,} cells in use, room for {one.capacity:,}"
            whose = "" if one.shares == 1 else f", of {one.shares} servers"
            show(console, f"filter of {one.table}: {one.kind}{whose}{used}")
    for name, value in found.states.items():
        if name == checkpoint.FEATURES:
            console.print(features_table(checkpoint.saved_spec(found.prefix, value)))
        else:
            show(console, f"{name}: {in_lines(value)}")


def in_lines(value: Any) -> str:
    """Return plain values as text: in lines below each other if there are many."""
    text = json.dumps(plain(value))
    if len(text) <= LINE:
        return text
    return "\n" + textwrap.indent(pformat(plain(value), width=LINE, compact=True, sort_dicts=False), "  ")


def features_table(spec: FeatureSpec) -> Table:
    """Return what raw data a model reads, a line for each feature."""
    shown = new_table("", "feature", "kind", "settings")
    plain = spec.to_dict()
    for name, one in (*plain["features"].items(), *plain["labels"].items()):
        kind = one.get("type", "Label")
        settings = (f"{key}={json.dumps(value)}" for key, value in one.items() if key != "type")
        shown.add_row(name, kind, escape(", ".join(settings)))
    return shown


def variables_table(variables: Sequence[Variable], most: int, training: int) -> Table:
    shown = new_table("", "variable", "type", "shape")
    for one in variables[: most or None]:
        shape = " x ".join(map(str, one.shape)) or "one number"
        shown.add_row(one.name, one.dtype, shape + (f", tied to {one.same_as}" if one.same_as else ""))
    caption = [f"and {training:,} tensors of optimizers"] if training else []
    if most and len(variables) > most:
        caption.insert(0, f"... {len(variables) - most:,} more; --variables 0 shows all")
    shown.caption = "; ".join(caption) or None
    shown.caption_justify = "left"
    return shown


# diff


def diff(options: CheckpointDiffOptions) -> int:
    """Show what two checkpoints have not in common; 1 where one is damaged."""
    if options.top < 0 or options.variables < 0:
        raise ConfigError("checkpoint diff: --top and --variables must not be negative")
    before, after = (find(name, options.config) for name in (options.before, options.after))

    def work() -> int:
        rows = rows_to_write(before) + rows_to_write(after)
        with bar("Comparing", rows) as done:
            found = checkpoint.compare(
                before, after, tables=options.tables or None, top=options.top, progress=done
            )
        if options.json:
            print_json({**asdict(found), "same": found.same})
        else:
            show_difference(Console(), found, options)
        return 0

    return guarded(f"{before} and {after}", options.json, work)


def show_difference(console: Console, found: Difference, options: CheckpointDiffOptions) -> None:
    names = [short(path) for path in (found.before, found.after)]
    if names[0] == names[1]:
        names = [found.before, found.after]
    sizes = [decimal(size_of(path)) for path in (found.before, found.after)]
    before, after = (
        f"{name} (step {step:,}, {size})" for name, step, size in zip(names, found.steps, sizes, strict=True)
    )
    show(console, f"{before} and {after}")
    if found.same:
        show(console, "the two are identical, bit for bit")
        return
    if found.tables:
        headings = ("table", ">rows before", ">rows after", ">added", ">removed", ">changed", ">only time")
        table = new_table("", *headings)
        for one in found.tables:
            counts = (one.rows_before, one.rows_after, one.added, one.removed, one.changed, one.touched)
            table.add_row(one.name, *(f"{count:,}" for count in counts))
        console.print(table)
    for one in found.tables:
        if one.layout is not None:
            show(console, f"rows of {one.name}: {one.layout[0]}, then {one.layout[1]}")
        if one.largest and options.details:
            table = new_table(
                f"{one.name}: moved furthest", ">id", ">distance", ">norm before", ">norm after"
            )
            for row in one.largest:
                table.add_row(str(row.id), *(f"{n:.4g}" for n in (row.distance, row.before, row.after)))
            console.print(table)
    if not options.details:
        show_changes(console, found)
        return
    if found.variables:
        console.print(variable_changes(found.variables, options.variables, found.variables_same))
    elif found.variables_same:
        show(console, f"{found.variables_same:,} dense variables are the same")
    for name, values in found.states.items():
        for label, value in zip(("before", "after"), values, strict=True):
            show(console, f"{name} {label}: {in_lines(value)}")


def show_changes(console: Console, found: Difference) -> None:
    """Print one line for each part that differs, except for tables."""
    kinds = Counter(one.kind for one in found.variables)
    if found.variables_same:
        kinds["the same"] = found.variables_same
    if kinds:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        furthest = max(found.variables, key=lambda one: one.largest or 0.0, default=None)
        by = f"; {furthest.name} by up to {furthest.largest:.4g}" if furthest and furthest.largest else ""
        show(console, f"  dense     variables: {counts}{by}")
    for name, values in found.states.items():
        before, after = ("none" if value is None else state_words(name, value) for value in values)
        show(console, f"  {name:<9} " + (before if before == after else f"{before}, then {after}"))
    show(console, "--details shows the rows and variables that moved furthest, and positions in full")


def variable_changes(changes: Sequence[VariableDifference], most: int, same: int) -> Table:
    order = sorted(changes, key=lambda one: -math.inf if one.largest is None else -one.largest)
    table = new_table("", "variable", "what", ">largest difference", "")
    for one in order[: most or None]:
        table.add_row(one.name, one.kind, "" if one.largest is None else f"{one.largest:.4g}", one.words)
    caption = [f"{same:,} are the same"]
    if most and len(order) > most:
        caption.insert(0, f"... {len(order) - most:,} more; --variables 0 shows all")
    table.caption = "; ".join(caption)
    table.caption_justify = "left"
    return table


# reshard, compact, export


def reshard_(options: CheckpointReshardOptions) -> int:
    """Write a checkpoint to another folder in another number of files."""
    if not options.to:
        raise ConfigError("checkpoint reshard: needs --to: where to write")
    check_shards(options.num_shards)
    prefix = find(options.checkpoint, options.config)

    def work() -> int:
        with bar("Writing", rows_to_write(prefix)) as done:
            written = checkpoint.reshard(prefix, options.to, num_shards=options.num_shards, progress=done)
        return report(written, options.json, f"written to {written.prefix}")

    return guarded(prefix, options.json, work)


def compact_(options: CheckpointCompactOptions) -> int:
    """Make the last increment of a chain a full checkpoint."""
    check_shards(options.num_shards)
    prefix = find(options.checkpoint, options.config)

    def work() -> int:
        with bar("Compacting", rows_to_write(prefix)) as done:
            written = checkpoint.compact(prefix, num_shards=options.num_shards, progress=done)
        words = f"{written.prefix} is full now, made of {len(written.chain)} checkpoints"
        if len(written.chain) == 1:
            words = f"{written.prefix} was full already"
        report(written, options.json, words)
        if not options.json:
            show_chain(written)
        return 0

    return guarded(prefix, options.json, work)


def show_chain(written: Rewritten) -> None:
    """Print which checkpoints of a compacted chain were deleted, and which stay."""
    stay = [prefix for prefix in written.chain[:-1] if prefix not in written.deleted]
    if written.deleted:
        show(Console(), f"deleted: {', '.join(map(short, written.deleted))}")
    if stay:
        show(Console(), f"kept, listed or needed by one that is: {', '.join(map(short, stay))}")


def export_(options: CheckpointExportOptions) -> int:
    """Write a checkpoint for other programs."""
    if not options.to:
        raise ConfigError("checkpoint export: needs --to: where to write")
    if options.names and options.format == "plain":
        raise ConfigError("checkpoint export: --names is for --format original or original-multi")
    check_shards(options.num_shards)
    prefix = find(options.checkpoint, options.config)

    def work() -> int:
        tables = options.tables or None
        with bar("Exporting", rows_to_write(prefix, tables)) as done:
            if options.format == "plain":
                written = checkpoint.export(
                    prefix,
                    options.to,
                    tables=tables,
                    dense=options.dense,
                    num_shards=options.num_shards,
                    progress=done,
                )
            else:
                written = original.export_original(
                    prefix,
                    options.to,
                    original.NameMap.read(options.names) if options.names else original.NameMap(),
                    tables=tables,
                    dense=options.dense,
                    multi_table=options.format == "original-multi",
                    num_shards=options.num_shards,
                    progress=done,
                )
        if options.json:
            print_json({"checkpoint": prefix, **asdict(written)})
            return 0
        rows = ", ".join(f"{count:,} rows of {name}" for name, count in written.rows.items()) or "no rows"
        show(Console(), f"{rows}; {len(written.files)} files, {decimal(written.bytes)}, in {options.to}")
        for line in written.left_out:
            show(Console(), f"left out: {line}")
        return 0

    return guarded(prefix, options.json, work)


def import_(options: CheckpointImportOptions) -> int:
    """Write the first checkpoint of a run from one of the original system."""
    # Restoring a model needs torch and the task's code; the remaining commands of this module do not.
    from monolith.cli.task_config import load_reading_run
    from monolith.train.importing import ImportPlan, import_checkpoint

    if options.step is not None and options.step < 0:
        raise ConfigError(f"checkpoint import: --step must not be negative, got {options.step}")
    reading = EvaluateOptions(
        task=options.task, model_dir=options.model_dir, config=options.config, set=options.set
    )
    plan = ImportPlan(
        source=original.OriginalCheckpoint.find(options.source),
        names=original.NameMap.read(options.names) if options.names else original.NameMap(),
        step=options.step,
        partial=options.partial,
        dry_run=options.dry_run,
    )
    task, run = load_reading_run(reading, learns=True)

    def tell(found: ImportReport) -> None:
        if not options.json:
            show_imported(Console(), found, options.shown)

    with bar("Importing", 0) as done:
        found = import_checkpoint(task, run.train, plan, tell=tell, progress=done)
    if options.json:
        print_json(asdict(found))
    elif found.prefix is None:
        show(Console(), f"dry run: nothing was written; {_summary(found)}")
    else:
        show(Console(), f"written to {found.prefix}: {_summary(found)}")
    return 0


def show_imported(console: Console, found: ImportReport, most: int) -> None:
    table = new_table("", "", "original", "here", "what")
    for one in found.loaded[: most or None]:
        table.add_row(one.kind, escape(one.original), escape(one.ours or ""), escape(one.detail))
    if most and len(found.loaded) > most:
        table.caption = f"... {len(found.loaded) - most:,} more; --shown 0 shows all"
        table.caption_justify = "left"
    console.print(table)
    if found.left_out:
        table = new_table("left out", "", "original", "why")
        for one in found.left_out:
            table.add_row(one.kind, escape(one.original), escape(one.detail))
        console.print(table)
    for name in found.missing:
        show(console, f"not in the original: {name}")


def _summary(found: ImportReport) -> str:
    rows = ", ".join(f"{count:,} rows of {name}" for name, count in found.rows.items()) or "no rows"
    variables = sum(one.kind == "variable" for one in found.loaded)
    return f"step {found.step:,}, {rows}, {variables:,} variables, {len(found.left_out):,} names left out"


def report(written: Rewritten, as_json: bool, words: str) -> int:
    if as_json:
        print_json(asdict(written))
    else:
        rows = sum(written.rows.values())
        size = decimal(written.bytes)
        show(Console(), f"{words}: {rows:,} rows in {len(written.rows)} tables, {size}")
    return 0


# Shared


def guarded(what: str, as_json: bool, work: Callable[[], int]) -> int:
    """Return the status of `work`; if a file is damaged, print which, and return 1."""
    try:
        return work()
    except Damage as error:
        if as_json:
            print_json({"checkpoint": what, "ok": False, "problems": [str(error)]})
        else:
            show(Console(), f"damaged: {error}", style="red")
        return 1


def bar(label: str, rows: int) -> AbstractContextManager[Progress]:
    return progress(label, rows or None, "rows")


def check_shards(num_shards: int | None) -> None:
    if num_shards is not None and num_shards < 1:
        raise ConfigError(f"checkpoint: --num-shards must be at least 1, got {num_shards}")


def new_table(title: str, *headings: str) -> Table:
    """Return an empty table; columns whose heading starts with > are numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for number, heading in enumerate(headings):
        right = heading.startswith(">")
        table.add_column(
            heading.removeprefix(">"),
            justify="right" if right else "left",
            style="cyan" if number == 0 else None,
            overflow="fold",
        )
    return table


def show(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Return a value that JSON can express: NaN and infinities become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def numbers(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:SHOWN_VALUES])
    return f"{shown}, ... ({len(values)})" if len(values) > SHOWN_VALUES else shown


def at_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def short(prefix: str) -> str:
    return filesystem.base_name(prefix)
