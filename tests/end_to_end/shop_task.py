"""A shop's own task: clicks and watched seconds, with a metric of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from monolith.data import FileSource, Pipeline, Stream
from monolith.data.formats import CsvFormat
from monolith.feature import Batch, BucketFeature, FeatureSpec, IdFeature, Label
from monolith.model import MMoE
from monolith.nn import Target
from monolith.train import Mode, Outputs, Task

SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "item": IdFeature(kind="string"),
        "tags": IdFeature(kind="string", separator="|", combiner="mean"),
        "price": BucketFeature(boundaries=(5, 10, 20, 40)),
    },
    labels={"click": Label(), "seconds": Label()},
    event_time="time",
)


@dataclass(frozen=True)
class Watches(Task):
    shop: str
    """The folder of the shop's files."""

    def dataset(self, mode: Mode) -> Stream[Batch]:
        pattern = "days/*.csv" if mode is Mode.TRAIN else "held_out.csv"
        files = [str(path) for path in Path(self.shop).glob(pattern)]
        form, columns = CsvFormat(types=SPEC.columns), list(SPEC.columns)
        source = FileSource(files, form, batch_size=50, columns=columns)
        return Pipeline(source).to_batches(SPEC)

    def model(self) -> nn.Module:
        return MMoE(SPEC, dim=8, experts=(32,), hidden=(16,))

    def targets(self) -> dict[str, Target]:
        return {"click": Target(), "seconds": Target(loss="log", weight=0.2)}

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found = super().outputs(model, batch)
        error = (found.predictions["seconds"] - batch.labels["seconds"]).abs()
        within = (error < 0.2 * batch.labels["seconds"]).float()
        return Outputs(found.loss, found.predictions, {"within_20_percent": within.detach()})

    def measures(self, mode: Mode) -> list[str]:  # noqa: ARG002
        return ["within_20_percent"]
