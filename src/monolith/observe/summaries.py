"""Summaries: what a model makes of its features, in the words of the `monolith` TensorBoard plugin.

A summary is a tensor with a head, a line of JSON that says how the tensor is cut into
segments, one for each feature. Two kinds are drawn: weights of an architecture search
(`nas_data`) and what segments contribute to a layer (`insight_data`). Readers take heads byte
for byte, so keys stand in a fixed order and Python's own separators are used.

Here is only what a summary says; `summary_files` writes and reads it, and `monolith.nn` computes
what is worth saying.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from monolith.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

PLUGIN_NAME = "monolith"
NAS_LEAF = "monolith_nas_weight"
"""The last part of the tag of NAS weights."""
INSIGHT_LEAF = "monolith_feature_insight"
"""The last part of the tag of feature insight."""


class SummaryType(StrEnum):
    """How the segments of a summary are to be read."""

    GATING = "gating"
    SELECTING = "selecting"
    MIXED = "mixed"
    SIMPLE = "simple"
    FI_DIRECT = "fi_direct"
    FI_TRAIN = "fi_train"


Sizes = Sequence[int] | Sequence[Sequence[int]]
"""Width of each segment; or, for each, the widths a search may choose from."""
Groups = Sequence[Sequence[str]]
"""Names of segments that belong together."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSummary:
    """A tensor and what a reader needs to know of it."""

    tag: str
    data: NDArray[Any]
    content: bytes
    """The head: UTF-8 JSON, or nothing."""
    description: str


@overload
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    out_type: Literal["tensor"] = "tensor",
) -> tuple[Tensor, SummaryType | None]: ...
@overload
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    *,
    out_type: Literal["json"],
) -> tuple[dict[str, Any], SummaryType | None]: ...
@overload
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    *,
    out_type: Literal["bytes"],
) -> tuple[bytes, SummaryType | None]: ...
def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    out_type: str = "tensor",
) -> tuple[Any, SummaryType | None]:
    """Return the head of a summary and its type.

    Args:
        group_info: Segments that belong together, by name; by default each stands alone.
        raw_tag: The type, where sizes do not tell: whole numbers mean `gating`, lists `selecting`.
        out_type: "json" for an object, "bytes" for its text, "tensor" for the text as uint8.

    Returns:
        Without names and sizes an empty head, and `raw_tag` as the type.

    Raises:
        ConfigError: Names and sizes differ in number, or a segment is in no group.
    """
    kind = None if raw_tag is None else _type_of(raw_tag)
    if not len(segment_names) and not len(segment_sizes):
        return _formed({}, out_type), kind
    sizes = _checked_sizes(segment_names, segment_sizes)
    if kind is None:
        whole = all(isinstance(size, int) for size in sizes)
        kind = SummaryType.GATING if whole else SummaryType.SELECTING
    head: dict[str, Any] = {
        "tag_type": kind.value,
        "segment_names": list(segment_names),
        "segment_sizes": sizes,
    }
    if kind in (SummaryType.GATING, SummaryType.FI_TRAIN):
        head["group_index"] = _group_index(segment_names, group_info)
    return _formed(head, out_type), kind


def nas_data(
    weight: Tensor | NDArray[Any],
    segment_names: Sequence[str] = (),
    segment_sizes: Sizes = (),
    group_info: Groups | None = None,
    raw_tag: str | None = None,
    *,
    description: str | None = None,
    name: str | None = None,
) -> TensorSummary:
    """Return the summary of the weights with which a search prefers one architecture to another.

    Args:
        description: By default the type.
        name: Comes before the type in the tag.
    """
    content, kind = prepare_head(segment_names, segment_sizes, group_info, raw_tag, out_type="bytes")
    if kind is None:
        raise ConfigError("nas_data: without segments the type of the summary is unknown; give raw_tag")
    return TensorSummary(_tag(kind, name, NAS_LEAF), _array(weight), content, description or kind.value)


def insight_data(
    values: Tensor | NDArray[Any],
    segment_names: Sequence[str],
    segment_sizes: Sequence[int],
    *,
    group_info: Groups | None = None,
    label: Tensor | NDArray[Any] | None = None,
    description: str | None = None,
    name: str | None = None,
) -> TensorSummary:
    """Return the summary of what each segment holds, for a batch of examples.

    Args:
        values: float of shape (examples, sum of the sizes): the segments side by side.
        label: Of shape (examples,) or (examples, k): with it the type is `fi_train`, and the labels
            are the last columns of what is written; without it the type is `fi_direct`.

    Raises:
        ConfigError: There are no segments, or something does not fit.
    """
    if not len(segment_names):
        raise ConfigError("feature insight needs at least one segment; give segment_names and segment_sizes")
    kind = SummaryType.FI_DIRECT if label is None else SummaryType.FI_TRAIN
    head, _ = prepare_head(segment_names, segment_sizes, group_info, kind, out_type="json")
    data = _array(values).astype(np.float32)
    if not all(isinstance(size, int) for size in head["segment_sizes"]):
        raise ConfigError(
            f"feature insight: a segment has one width, got segment_sizes={head['segment_sizes']}"
        )
    if data.ndim != 2 or data.shape[1] != sum(head["segment_sizes"]):
        raise ConfigError(
            f"feature insight: values must have shape (examples, {sum(head['segment_sizes'])}), "
            f"the sum of segment_sizes, got {data.shape}"
        )
    labels = np.empty((len(data), 0), np.float32)
    if label is not None:
        labels = _array(label).astype(np.float32)
        labels = labels.reshape(-1, 1) if labels.ndim < 2 else labels
        if labels.ndim != 2 or len(labels) != len(data):
            raise ConfigError(
                f"feature insight: label must have one row for each of {len(data)} examples, "
                f"got shape {labels.shape}"
            )
    head["label_size"] = labels.shape[1]
    return TensorSummary(
        _tag(kind, name, INSIGHT_LEAF),
        np.concatenate([data, labels], 1),
        json.dumps(head).encode(),
        description or kind.value,
    )


def _type_of(raw_tag: str) -> SummaryType:
    try:
        return SummaryType(raw_tag)
    except ValueError as cause:
        raise ConfigError(
            f"unknown summary type {raw_tag!r}; choose one of {', '.join(SummaryType)}"
        ) from cause


def _checked_sizes(names: Sequence[str], sizes: Sizes) -> list[int | list[int]]:
    if len(names) != len(sizes):
        raise ConfigError(
            "summary: segment_names and segment_sizes must have the same length, "
            f"got {len(names)} and {len(sizes)}"
        )
    return [[int(one) for one in size] if isinstance(size, Sequence) else int(size) for size in sizes]


def _group_index(names: Sequence[str], groups: Groups | None) -> list[int]:
    """Return the group of each segment, renumbered from 0 in the order of the groups that occur."""
    if groups is None:
        return list(range(len(names)))
    if any(isinstance(group, str) or not isinstance(group, Sequence) for group in groups):
        raise ConfigError(f"summary: group_info must be lists of names of segments, got {groups!r}")
    # A name that is in several groups belongs to the last of them.
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    if missing := [name for name in names if name not in group_of]:
        raise ConfigError(f"summary: group_info has no group for {', '.join(missing)}")
    rank = {number: place for place, number in enumerate(sorted({group_of[name] for name in names}))}
    return [rank[group_of[name]] for name in names]


def _formed(head: dict[str, Any], out_type: str) -> Any:
    if out_type == "json":
        return head
    text = json.dumps(head).encode() if head else b""
    if out_type == "bytes":
        return text
    if out_type == "tensor":
        import torch

        return torch.tensor(list(text), dtype=torch.uint8)
    raise ConfigError(f"summary: out_type must be tensor, json or bytes, got {out_type!r}")


def _tag(kind: SummaryType, name: str | None, leaf: str) -> str:
    return f"{name}_{kind}/{leaf}" if name else f"{kind}/{leaf}"


def _array(values: Tensor | NDArray[Any]) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    return values.detach().cpu().numpy()
