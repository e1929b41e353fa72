"""`monolith insight RUN_DIR`: which features a model depends on.

By default the features of a checkpoint are shuffled in turn on evaluation data; see
`monolith.train.importance`. With --summaries, it reads what `FeatureInsightHook` and others have written to a
run's event files; `monolith.cli.importance` says what those numbers mean.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from monolith import filesystem
from monolith.cli.evaluation import settled, write_json
from monolith.cli.export import as_trained, reading_options
from monolith.cli.importance import Importance, Insight, insights
from monolith.cli.options.export import ExportOptions
from monolith.cli.options.insight import InsightOptions
from monolith.cli.task_config import load_reading_run
from monolith.errors import ConfigError, DataError, FileMissingError, MissingExtraError
from monolith.observe import Progress, progress
from monolith.observe.summaries import EVENT_FILE_MARK, PLUGIN_NAME, SummaryType, read_summaries
from monolith.train import Trainer
from monolith.train.importance import FeatureImportance

MEANING = {
    SummaryType.FI_DIRECT: "mean squared contribution to the layer",
    SummaryType.FI_TRAIN: "share of the label's variance lost without it",
    SummaryType.GATING: "weight of its gate",
    SummaryType.SELECTING: "weight of the chosen width",
}


def run(options: InsightOptions) -> int:
    """Print, and draw, how important each feature is."""
    for name in ("top", "last"):
        least = 0 if name == "top" else 1
        if getattr(options, name) < least:
            raise ConfigError(f"insight: --{name} must be at least {least}, got {getattr(options, name)}")
    if not options.summaries:
        return by_permutation(options)
    found = read(options.run_dir, options.last)
    if options.png is not None:
        draw(found, options.png, options.top)
    if options.json:
        report = {"run": options.run_dir, "insights": [shortened(one, options.top) for one in found]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return 0
    console = Console()
    for one in found:
        console.print(heading_of(one), markup=False, highlight=False, soft_wrap=True)
        console.print(table_of(one, options.top))
    if options.png is not None:
        Console(stderr=True).print(f"drawn to {options.png}")
    return 0


def by_permutation(options: InsightOptions) -> int:
    """Print how much worse a checkpoint is without each feature."""
    asked = ExportOptions(
        run=options.run_dir,
        config=options.config,
        task=options.task,
        checkpoint=options.checkpoint,
        quiet=options.quiet,
    )
    task, settings = load_reading_run(reading_options(as_trained(asked, "insight")))
    checkpoint, step, why = settled(settings.train)
    with ExitStack() as shown_while:
        bar: Progress | None = None
        if not options.quiet:
            bar = shown_while.enter_context(progress("Shuffling", None, unit="examples"))
        found = Trainer(task, settings.train).importance(
            examples=options.examples,
            repeats=options.repeats,
            checkpoint=checkpoint,
            advance=None if bar is None else bar.advance,
        )
    features = found.features[: options.top] if options.top else found.features
    if options.png is not None:
        draw_bars(features, f"{found.metric} lost without the feature", options.png)
    if options.json:
        plain = {**asdict(found), "features": [_plain(one) for one in features]}
        write_json(task, checkpoint, step, chosen=why, **plain)
        return 0
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{task.name}: {checkpoint}, step {step:,} ({why})",
        title_justify="left",
        caption=f"{found.metric} is {found.value:.4f} over {found.examples:,} examples; each feature was "
        f"shuffled {found.repeats} times",
        caption_justify="left",
    )
    table.add_column("feature", style="cyan", no_wrap=True)
    table.add_column(f"{found.metric} lost without it", justify="right")
    table.add_column("standard error", justify="right")
    for one in features:
        table.add_row(one.feature, f"{one.loss:+.4f}", "" if math.isnan(one.error) else f"{one.error:.4f}")
    Console().print(table, soft_wrap=True)
    return 0


def _plain(one: FeatureImportance) -> dict[str, object]:
    return {**asdict(one), "error": None if math.isnan(one.error) else one.error}  # JSON has no NaN


def draw_bars(features: Sequence[FeatureImportance], what: str, path: str) -> None:
    """Draw one horizontal bar per feature, with its error, to a picture."""
    figure = _figure(7, len(features))
    axis = figure.subplots()
    upwards, places = list(reversed(features)), range(len(features))
    axis.barh(places, [one.loss for one in upwards], xerr=[one.error for one in upwards], color="#2a7f9e")
    axis.set_yticks(places, [one.feature for one in upwards])
    axis.set_xlabel(what)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(path), dpi=120)


def _figure(width: float, bars: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise MissingExtraError("matplotlib", "plot", "drawing feature importance") from cause
    return Figure(figsize=(width, 1.6 + 0.28 * bars), layout="constrained")


def read(run_dir: str, last: int) -> list[Insight]:
    """Return what a run's event files say.

    Raises:
        FileMissingError: There is no such folder, or no event file in it.
        DataError: Its event files hold no feature insight and no NAS weights.
    """
    if not filesystem.is_folder(run_dir):
        raise FileMissingError(f"insight: there is no folder {run_dir!r}")
    files = filesystem.list_files(run_dir, recursive=True)
    paths = [path for path in files if EVENT_FILE_MARK in filesystem.base_name(path)]
    if not paths:
        raise FileMissingError(
            f"insight: no event files in {run_dir!r}. Train with insight_every_steps or a "
            "FeatureInsightHook, which write them to summaries/ of the model_dir."
        )
    # Their names begin with the time at which they were begun.
    found = insights(read_summaries(sorted(paths, key=filesystem.base_name)), last)
    if not found:
        raise DataError(
            f"insight: the {len(paths)} event files in {run_dir!r} contain nothing for the "
            f"{PLUGIN_NAME!r} plugin. Train with insight_every_steps, for at least as many steps."
        )
    return found


def shown(insight: Insight, top: int) -> Sequence[Importance]:
    return insight.segments[:top] if top else insight.segments


def shortened(insight: Insight, top: int) -> dict[str, object]:
    whole = insight.to_json()
    return {**whole, "segments": whole["segments"][:top] if top else whole["segments"]}


def heading_of(insight: Insight) -> str:
    steps = f"steps {insight.steps[0]:,} to {insight.steps[1]:,}"
    counted = "rows" if insight.kind in (SummaryType.FI_DIRECT, SummaryType.FI_TRAIN) else "summaries"
    return f"{insight.tag}: {meaning_of(insight)}\n{insight.rows:,} {counted}, {steps}"


def meaning_of(insight: Insight) -> str:
    if insight.kind is SummaryType.FI_DIRECT and insight.outputs > 1:
        return "mean absolute input"  # no weight went into it, which would have left one number
    return MEANING.get(insight.kind, "weight")


def table_of(insight: Insight, top: int) -> Table:
    """Return a table of one kind of summary, with columns only for what it has."""
    table = Table(box=box.SIMPLE_HEAD)
    segments = shown(insight, top)
    total = sum(max(segment.importance, 0.0) for segment in insight.segments) or 1.0
    grouped = len({segment.group for segment in insight.segments}) < len(insight.segments)
    columns = {
        "feature": [segment.name for segment in segments],
        "importance": [f"{segment.importance:.4g}" for segment in segments],
        "share": [f"{max(segment.importance, 0.0) / total:.1%}" for segment in segments],
        "correlation": [_number(segment.correlation, "+.3f") for segment in segments],
        "width": [_number(segment.choice, "d") for segment in segments],
        "group": [_number(segment.group, "d") for segment in segments] if grouped else [],
    }
    there = {heading: cells for heading, cells in columns.items() if any(cells)}
    for heading in there:
        table.add_column(heading, justify="left" if heading == "feature" else "right", no_wrap=True)
    for row in zip(*there.values(), strict=True):
        table.add_row(*row)
    left = len(insight.segments) - len(segments)
    if left:
        table.caption = f"... and {left:,} more; --top 0 shows all"
        table.caption_justify = "left"
    return table


def draw(found: Sequence[Insight], path: str, top: int) -> None:
    """Draw a bar for each feature, a panel for each kind of summary, to a picture."""
    figure = _figure(7 * len(found), max(len(shown(one, top)) for one in found))
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, one in zip(panels, found, strict=True):
        segments = list(reversed(shown(one, top)))
        heights = range(len(segments))  # by place, since two features may have one name
        axis.barh(heights, [segment.importance for segment in segments], color="#2a7f9e")
        axis.set_yticks(heights, [segment.name for segment in segments])
        axis.set_xlabel(meaning_of(one))
        axis.set_title(one.tag)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(path), dpi=120)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
