"""Transforms as data: every kind by its name, and lists of them read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from monolith.config import config_from_mapping
from monolith.data.records import Records
from monolith.data.transforms.filters import (
    FeatureCombine,
    FilterByAction,
    FilterByFid,
    FilterByLabel,
    FilterBySlot,
    SlotFilter,
    SwitchSlot,
)
from monolith.data.transforms.labels import (
    AddAction,
    AddLabel,
    BlankInvalidLabels,
    LabelNormalization,
    LabelUpperBound,
    ScatterLabel,
    SpecialStrategy,
    UseFieldAsLabel,
)
from monolith.data.transforms.transform import Compose, Filter
from monolith.data.transforms.values import DecodeValues, EncodeValues, FilterByValue
from monolith.data.transforms.weighting import InstanceReweight, LogOddsCorrection, NegativeDownsample

AnyFilter = FilterByAction | FilterByFid | FilterByLabel | FilterBySlot | FilterByValue


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalOr(Filter):
    """Keeps what either of two filters keeps."""

    any_thread = True

    left: AnyFilter
    right: AnyFilter

    def mask(self, records: Records) -> Tensor:
        return self.left.mask(records) | self.right.mask(records)


AnyTransform = (
    AddAction
    | AddLabel
    | BlankInvalidLabels
    | DecodeValues
    | EncodeValues
    | FeatureCombine
    | FilterByAction
    | FilterByFid
    | FilterByLabel
    | FilterBySlot
    | FilterByValue
    | InstanceReweight
    | LabelNormalization
    | LabelUpperBound
    | LogOddsCorrection
    | LogicalOr
    | NegativeDownsample
    | ScatterLabel
    | SlotFilter
    | SpecialStrategy
    | SwitchSlot
    | UseFieldAsLabel
)
"""For a field of a run's config: `transforms: tuple[AnyTransform, ...] = ()`."""

TRANSFORMS: dict[str, type[AnyTransform]] = {
    "AddAction": AddAction,
    "AddLabel": AddLabel,
    "BlankInvalidLabels": BlankInvalidLabels,
    "DecodeValues": DecodeValues,
    "EncodeValues": EncodeValues,
    "FeatureCombine": FeatureCombine,
    "FilterByAction": FilterByAction,
    "FilterByFid": FilterByFid,
    "FilterByLabel": FilterByLabel,
    "FilterBySlot": FilterBySlot,
    "FilterByValue": FilterByValue,
    "InstanceReweight": InstanceReweight,
    "LabelNormalization": LabelNormalization,
    "LabelUpperBound": LabelUpperBound,
    "LogOddsCorrection": LogOddsCorrection,
    "LogicalOr": LogicalOr,
    "NegativeDownsample": NegativeDownsample,
    "ScatterLabel": ScatterLabel,
    "SlotFilter": SlotFilter,
    "SpecialStrategy": SpecialStrategy,
    "SwitchSlot": SwitchSlot,
    "UseFieldAsLabel": UseFieldAsLabel,
}
"""Each kind by the name it has in the key `type` of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformsConfig:
    """A list of transforms, in the order they are applied."""

    transforms: tuple[AnyTransform, ...] = ()

    def build(self) -> Compose:
        return Compose(self.transforms)


def read_transforms(tables: Sequence[Mapping[str, Any]], source: str = "transforms") -> Compose:
    """Return the transforms that plain data describes: each names its `type`, and its settings.

    Args:
        source: Where the data came from, for messages.

    Raises:
        ConfigError: Lists every problem found.
    """
    return config_from_mapping(TransformsConfig, {"transforms": list(tables)}, source).build()
