"""Transforms: records filtered, relabelled, repeated, sampled and routed on their way to training."""

from monolith.data.transforms.actions import AddAction, SpecialStrategy
from monolith.data.transforms.columns import parse_integer_list
from monolith.data.transforms.composition import (
    TRANSFORMS,
    AnyFilter,
    AnyTransform,
    LogicalOr,
    TransformsConfig,
    read_transforms,
)
from monolith.data.transforms.downsampling import LogOddsCorrection, NegativeDownsample, sample_rates
from monolith.data.transforms.features import FeatureCombine, SlotFilter, SwitchSlot
from monolith.data.transforms.filters import (
    FilterByAction,
    FilterByFid,
    FilterByLabel,
    FilterBySlot,
    instance_filters,
)
from monolith.data.transforms.flows import MergeFlow, SplitConfig, SplitFlow, flow_key
from monolith.data.transforms.labels import (
    INVALID_LABEL,
    AddLabel,
    BlankInvalidLabels,
    LabelNormalization,
    LabelUpperBound,
    NormStep,
    ScatterLabel,
    UseFieldAsLabel,
    is_valid,
    label_matrix,
)
from monolith.data.transforms.numbering import NUMBER
from monolith.data.transforms.reweight import InstanceReweight
from monolith.data.transforms.transform import Compose, Filter, Rewrite, Stateful, Transform
from monolith.data.transforms.value_codecs import DecodeValues, EncodeValues, decode_values, encode_values
from monolith.data.transforms.values import FilterByValue

__all__ = [
    "INVALID_LABEL",
    "NUMBER",
    "TRANSFORMS",
    "AddAction",
    "AddLabel",
    "AnyFilter",
    "AnyTransform",
    "BlankInvalidLabels",
    "Compose",
    "DecodeValues",
    "EncodeValues",
    "FeatureCombine",
    "Filter",
    "FilterByAction",
    "FilterByFid",
    "FilterByLabel",
    "FilterBySlot",
    "FilterByValue",
    "InstanceReweight",
    "LabelNormalization",
    "LabelUpperBound",
    "LogOddsCorrection",
    "LogicalOr",
    "MergeFlow",
    "NegativeDownsample",
    "NormStep",
    "Rewrite",
    "ScatterLabel",
    "SlotFilter",
    "SpecialStrategy",
    "SplitConfig",
    "SplitFlow",
    "Stateful",
    "SwitchSlot",
    "Transform",
    "TransformsConfig",
    "UseFieldAsLabel",
    "decode_values",
    "encode_values",
    "flow_key",
    "instance_filters",
    "is_valid",
    "label_matrix",
    "parse_integer_list",
    "read_transforms",
    "sample_rates",
]
