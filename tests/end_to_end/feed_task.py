"""The task of a news feed in Python: whether an article is clicked, and how long it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from monolith.data import FileSource, Pipeline, Stream
from monolith.data.formats import ParquetFormat
from monolith.feature import Batch, FeatureSpec, FloatFeature, IdFeature, Label
from monolith.model import MMoE
from monolith.nn import Target
from monolith.train import Mode, Task

SPEC = FeatureSpec(
    features={
        "reader": IdFeature(kind="string"),
        "article": IdFeature(kind="string"),
        "topics": IdFeature(kind="string", combiner="mean"),
        "vector": FloatFeature(width=4),
    },
    labels={"click": Label(), "dwell": Label()},
    event_time="time",
)


@dataclass(frozen=True)
class Reads(Task):
    feed: str
    """The folder of the impressions."""

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        files = [str(path) for path in Path(self.feed).glob("part-*.parquet")]
        return Pipeline(FileSource(files, ParquetFormat(), batch_size=50)).to_batches(SPEC)

    def model(self) -> nn.Module:
        return MMoE(SPEC, dim=8, experts=(16,), hidden=(8,))

    def targets(self) -> dict[str, Target]:
        return {"click": Target(), "dwell": Target(loss="log", weight=0.1)}
