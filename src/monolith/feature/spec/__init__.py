"""The feature spec: raw columns of strings, whole numbers, numbers and lists become ids and floats."""

from monolith.feature.spec.feature_spec import GAP, FeatureSpec, HistoryList
from monolith.feature.spec.kinds import (
    AnyFeature,
    BucketFeature,
    CrossFeature,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    RowInitializer,
    RowOptimizer,
    RowSettings,
    SequenceFeature,
)
from monolith.feature.spec.packing import UnmovedRows
from monolith.feature.spec.reading import RawColumns

__all__ = [
    "GAP",
    "AnyFeature",
    "BucketFeature",
    "CrossFeature",
    "FeatureSpec",
    "FloatFeature",
    "HistoryFeature",
    "HistoryList",
    "IdFeature",
    "Label",
    "RawColumns",
    "RowInitializer",
    "RowOptimizer",
    "RowSettings",
    "SequenceFeature",
    "UnmovedRows",
]
