"""Importance: what the summaries of a run say about its features.

`fi_direct` summaries hold, for each example, how large each segment's contribution to the
layer was. A segment's importance is their mean: of the squared contribution where the layer's
weight went into the summary, of the absolute inputs where it did not. It says what the layer
listens to, not whether that helps.

`fi_train` summaries hold the contributions themselves, k numbers each, beside the label.
What lies above the layer is not in the summary, so a linear readout of the layer's output is
fitted to the label (least squares, with a little ridge): each contribution then counts as one
number, its part of a predicted label. A segment's importance is how much worse that
prediction becomes without it: the rise of the mean squared error when the segment's part is
held at its mean, as a share of the label's variance. Zero says the segment tells nothing
that counts; below zero, that it misleads. `correlation` is between the segment's part and
the label, alone. Several labels are averaged. The readout needs more rows than outputs: with fewer the
numbers flatter the model, and `rows` and `outputs` are there to judge by.

NAS summaries hold weights. `gating`: one for each segment, group or column, of which a
segment gets the mean size. `selecting`: one for each width a segment may have; the
greatest is the choice.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monolith.errors import DataError
from monolith.observe.summaries import INSIGHT_LEAF, NAS_LEAF, StoredSummary, SummaryType

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
