"""`monolith evaluate insight RUN`: which features matter to a model, by shuffling or by its summaries."""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from monolith import filesystem
from monolith.cli.evaluation import settled, write_json
from monolith.cli.export import as_trained, reading_options
from monolith.cli.options.export import ExportOptions
from monolith.cli.options.jobs import InsightOptions
from monolith.cli.task_config import load_reading_run
from monolith.errors import ConfigError, DataError, FileMissingError, optional_package
from monolith.observe import Progress, progress
from monolith.observe.summaries import (
    EVENT_FILE_MARK,
    INSIGHT_LEAF,
    NAS_LEAF,
    PLUGIN_NAME,
    StoredSummary,
    SummaryType,
    read_summaries,
)
from monolith.runtime import Trainer
from monolith.train.importance import FeatureImportance

_RIDGE = 1e-3
"""Of the mean variance of the layer's outputs: enough that outputs which move together do no harm."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Importance:
    """One feature in one kind of summary."""

    name: str
    importance: float
    group: int | None = None
    correlation: float | None = None
    """With the label; only `fi_train` has one."""
    choice: int | None = None
    """The width a search prefers; only `selecting` has one."""


@dataclass(frozen=True, slots=True)
class Insight:
    """What the summaries of one tag say."""

    tag: str
    kind: SummaryType
    steps: tuple[int, int]
    """Of the oldest and the newest summary it was computed from."""
    rows: int
    """Examples; for NAS weights, summaries."""
    outputs: int
    """Numbers a segment contributes to one example."""
    segments: tuple[Importance, ...]
    """The most important first."""

    def to_json(self) -> dict[str, Any]:
        return {
            "tag": self.tag,
            "type": self.kind.value,
            "steps": list(self.steps),
            "rows": self.rows,
            "outputs": self.outputs,
            "segments": [
                {
                    name: getattr(segment, name)
                    for name in Importance.__dataclass_fields__
                    if getattr(segment, name) is not None
                }
                for segment in self.segments
            ],
        }


def insights(summaries: Iterable[StoredSummary], last: int) -> list[Insight]:
    """Return an insight for each tag, by name, from its `last` newest summaries.

    Args:
        summaries: In the order of writing. Those of steps that a restarted run took again are dropped,
            and those without a head, which name no feature.

    Raises:
        DataError: A summary does not fit its own head.
    """
    by_tag: dict[str, deque[StoredSummary]] = {}
    for summary in summaries:
        if summary.content and summary.tag.endswith((INSIGHT_LEAF, NAS_LEAF)):
            kept = by_tag.setdefault(summary.tag, deque(maxlen=last))
            while kept and kept[-1].step >= summary.step:
                kept.pop()
            kept.append(summary)
    return [_insight(tag, list(found)) for tag, found in sorted(by_tag.items())]


def _insight(tag: str, found: Sequence[StoredSummary]) -> Insight:
    head = _head(found[-1])
    same = [one for one in found if one.content == found[-1].content]  # the segments may have changed
    kind = SummaryType(head["tag_type"])
    steps = (same[0].step, same[-1].step)
    if tag.endswith(NAS_LEAF):
        segments = _nas_segments(same[-1], head, kind)
        return Insight(tag, kind, steps, len(same), 1, _ordered(segments))
    width = sum(head["segment_sizes"]) + head["label_size"]
    for one in same:
        if one.data.ndim != 2 or one.data.shape[1] != width:
            raise DataError(
                f"{one.path}: {tag} of step {one.step} has shape {one.data.shape}, "
                f"but its head describes {width} columns"
            )
    rows = np.concatenate([one.data for one in same]).astype(np.float64)
    rows = rows[np.isfinite(rows).all(1)]
    if not len(rows):
        raise DataError(f"{found[-1].path}: {tag} has no rows of finite numbers; did training diverge?")
    parts = np.split(rows, np.cumsum(head["segment_sizes"]), axis=1)
    labels = parts.pop()
    if kind is SummaryType.FI_TRAIN:
        segments = _by_label(head, parts, labels)
    else:
        sizes = [float(np.abs(part).sum(1).mean()) for part in parts]
        segments = [Importance(name, size) for name, size in zip(head["segment_names"], sizes, strict=True)]
    return Insight(tag, kind, steps, len(rows), max(head["segment_sizes"]), _ordered(segments))


def _by_label(head: Mapping[str, Any], parts: Sequence[Floats], labels: Floats) -> list[Importance]:
    if len({part.shape[1] for part in parts}) == 1:
        readouts = [_readout(sum(parts, np.zeros_like(parts[0])), labels)] * len(parts)
    else:  # no layer adds these up: each segment is a piece of the layer's input, with outputs of its own
        together = _readout(np.concatenate(parts, 1), labels)
        readouts = np.split(together, np.cumsum([part.shape[1] for part in parts])[:-1])
    shares = [_centred(part) @ readout for part, readout in zip(parts, readouts, strict=True)]
    wanted = _centred(labels)
    missed = wanted - sum(shares, np.zeros_like(wanted))
    variance = np.square(wanted).mean(0)
    varied = variance > 0
    segments = []
    for name, group, share in zip(head["segment_names"], head["group_index"], shares, strict=True):
        rise = np.square(missed + share).mean(0) - np.square(missed).mean(0)
        spread = np.sqrt(np.square(share).mean(0) * variance)
        correlation = np.divide((share * wanted).mean(0), spread, out=np.zeros_like(spread), where=spread > 0)
        importance = float((rise[varied] / variance[varied]).mean()) if varied.any() else 0.0
        segments.append(Importance(name, importance, group, float(correlation.mean())))
    return segments


def _readout(columns: Floats, labels: Floats) -> Floats:
    """Return the weights, of shape (columns, labels), of the best linear prediction of the labels."""
    x, y = _centred(columns), _centred(labels)
    gram = x.T @ x
    ridge = _RIDGE * float(np.trace(gram)) / len(gram)
    return np.linalg.lstsq(gram + ridge * np.eye(len(gram)), x.T @ y, rcond=None)[0].astype(np.float64)


def _centred(columns: Floats) -> Floats:
    centred: Floats = columns - columns.mean(0)
    return centred


def _nas_segments(summary: StoredSummary, head: Mapping[str, Any], kind: SummaryType) -> list[Importance]:
    names, sizes = head["segment_names"], head["segment_sizes"]
    weights = summary.data.astype(np.float64).reshape(-1)
    groups: list[int | None] = head.get("group_index") or [None] * len(names)
    if all(isinstance(size, list) for size in sizes):
        counts = [len(size) for size in sizes]
        if len(weights) == sum(counts):
            pieces = np.split(weights, np.cumsum(counts)[:-1])
            return [
                Importance(name, float(piece.max()), choice=size[int(piece.argmax())])
                for name, size, piece in zip(names, sizes, pieces, strict=True)
            ]
    elif len(weights) == len(names):
        return [Importance(*row) for row in zip(names, weights.tolist(), groups, strict=True)]
    elif len(weights) == sum(sizes):
        means = [float(np.abs(piece).mean()) for piece in np.split(weights, np.cumsum(sizes)[:-1])]
        return [Importance(*row) for row in zip(names, means, groups, strict=True)]
    elif len(weights) == len(set(groups)) and None not in groups:
        return [
            Importance(n, float(weights[g]), g) for n, g in zip(names, groups, strict=True) if g is not None
        ]
    raise DataError(
        f"{summary.path}: {summary.tag} of step {summary.step} has {len(weights)} weights, which fit neither "
        f"the segments nor the sizes {sizes} of its {kind} head"
    )


def _head(summary: StoredSummary) -> dict[str, Any]:
    doing = f"{summary.path}: {summary.tag} of step {summary.step}"
    try:
        head = json.loads(summary.content)
        SummaryType(head["tag_type"])
        known = {"label_size": 0, **head}
        return {key: known[key] for key in ("tag_type", "segment_names", "segment_sizes", "label_size")} | {
            "group_index": head.get("group_index")
        }
    except (ValueError, KeyError, TypeError) as cause:
        raise DataError(f"{doing} has a head that cannot be read: {cause!r}") from cause


def _ordered(segments: Iterable[Importance]) -> tuple[Importance, ...]:
    return tuple(sorted(segments, key=lambda segment: -segment.importance))


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
    with optional_package("matplotlib", "plot", "drawing feature importance"):
        from matplotlib.figure import Figure
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
