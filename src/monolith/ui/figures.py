"""What a source says of itself at one moment, as the page draws it. All of it can be sent as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from monolith.ui.curves import Distribution

Chart = str
"""auc, auc_by_step, evaluation, examples, requests, latency; or `evaluation:AXIS` and `online:AXIS` for
metrics on another scale than an AUC, see `axis_of`."""
RunState = Literal["up", "ended", "not begun", "failed", "silent"]
_ONE_SCALE = ("auc", "gauc", "recall", "ndcg", "hit_rate", "mrr", "log_loss", "ne", "calibration")
"""Kinds of metrics that mean the same for every label; an rmse of seconds is not one of prices."""
STAGES = ("read", "train", "publish", "wire", "apply", "total")
"""What an event passes on its way to a changed answer, in this order; a server knows all, a trainer three."""
STAGE_HISTOGRAMS = ("serve_event_to_served_seconds", "publish_stage_seconds")
"""What servers and trainers call the histograms of stages, with the label `stage`."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of a curve."""

    chart: Chart
    label: str
    """Which curve of the source; empty where a source has one."""
    x: float
    """Unix seconds, of events or of the clock; of what goes by steps, the step."""
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFigures:
    """One table. None is what nobody says."""

    table: str
    rows: float | None = None
    bytes: float | None = None
    births: float | None = None
    """Ids that were given a row."""
    filtered: float | None = None
    """Sightings of ids that are too rare to be admitted."""
    refused: float | None = None
    """Ids that were refused because the table is full."""
    expired: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFigures:
    """How long events took for one stage on their way to a changed answer, of late, in seconds."""

    stage: str
    seconds: Distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """One version of a served model."""

    name: str
    version: str
    state: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishFigures:
    """Whether what a run learns is let out."""

    held: bool
    reason: str = ""
    since: float | None = None
    """Unix seconds."""
    version: str | None = None
    """The exported version that servers were taken back to."""
    versions: Sequence[str] = ()
    """Those that they could be taken back to, the newest first."""
    controllable: bool = False
    """Whether the page can hold, resume and roll back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFigures:
    """One checkpoint."""

    name: str
    step: int
    saved_at: float | None
    kind: str
    rows: int
    bytes: int
    marks: Sequence[str] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFigures:
    """One process of a run."""

    name: str
    state: str
    place: str
    trouble: bool
    """Whether somebody should look."""
    step: int | None = None
    examples_per_s: float | None = None
    lag_seconds: float | None = None
    rows: int | None = None
    bytes: int | None = None
    restarts: int = 0
    failovers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PageReading:
    """What a source said when it was asked."""

    kind: str
    """What it is: run, trainer, server."""
    state: RunState = "up"
    """Whether it runs. A source that cannot be asked at all is down, which the board says."""
    note: str = ""
    """What a person should know besides, such as that a run has ended."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """A few more words, by name."""
    points: Sequence[CurvePoint] = ()
    tables: Sequence[TableFigures] = ()
    stages: Sequence[StageFigures] = ()
    models: Sequence[ModelFigures] = ()
    publish: PublishFigures | None = None
    checkpoints: Sequence[CheckpointFigures] = ()
    processes: Sequence[ProcessFigures] = ()


def axis_of(metric: str) -> str:
    """Return the axis that a metric is drawn on: with the same kind of other labels, or alone."""
    kind = metric.rpartition("/")[2].partition("@")[0]
    return kind if kind in _ONE_SCALE else metric


def plain(value: Any) -> Any:
    """Return figures as JSON can hold them: numbers that are not finite are nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
