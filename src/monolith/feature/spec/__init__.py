"""The feature spec: raw columns of strings, whole numbers, numbers and lists become ids and floats."""

from monolith.feature.spec.feature_spec import GAP, FeatureSpec
from monolith.feature.spec.kinds import (
    AnyFeature,
    BucketFeature,
    CrossFeature,
    FloatFeature,
    IdFeature,
    Label,
    RowInitializer,
    RowOptimizer,
    RowSettings,
    SequenceFeature,
)
from monolith.feature.spec.reading import RawColumns

__all__ = [
    "GAP",
    "AnyFeature",
    "BucketFeature",
    "CrossFeature",
    "FeatureSpec",
    "FloatFeature",
    "IdFeature",
    "Label",
    "RawColumns",
    "RowInitializer",
    "RowOptimizer",
    "RowSettings",
    "SequenceFeature",
]
