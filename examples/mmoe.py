"""MMoE: clicks and likes of the same examples, by experts that both share and gates of their own.

python examples/mmoe.py
"""

import tempfile

import torch
from torch import nn

from monolith.data import Batches, ClickLog, ClickLogConfig, MemorySource, Pipeline
from monolith.feature import FeatureSpec, IdFeature, Label
from monolith.model import MMoE
from monolith.runtime import Trainer
from monolith.table import Adagrad
from monolith.train import Mode, SaveConfig, Task, TrainConfig

TRAINED, TESTED = 40_000, 10_000
LOG = ClickLog(ClickLogConfig(users=500, items=200, contexts=20, dim=2, likes=True))

SPEC = FeatureSpec(
    features={name: IdFeature() for name in ("user", "item", "context")},
    labels={"click": Label(), "like": Label()},
)


class ClicksAndLikes(Task):
    def dataset(self, mode: Mode) -> Batches:
        first, count = (0, TRAINED) if mode is Mode.TRAIN else (TRAINED, TESTED)
        batch = LOG.batch(first, count)
        columns = {name: batch.ids[name] for name in SPEC.ids} | dict(batch.labels)
        return Pipeline(MemorySource(columns, batch_size=256)).to_batches(SPEC)

    def model(self) -> MMoE:  # its tasks are the labels of the spec
        rows = Adagrad(learning_rate=0.1)
        return MMoE(SPEC, dim=8, num_experts=3, experts=(32,), hidden=(16,), optimizer=rows)

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.005)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(ClicksAndLikes(), TrainConfig(model_dir=folder, save=SaveConfig(steps=1000)))
        trainer.train()
        found = trainer.evaluate()
    for head in SPEC.labels:
        best = LOG.best_auc(TESTED, first=TRAINED, task=head)
        print(
            f"{head}: test AUC {found[f'{head}/auc']:.3f}, and the log's own probabilities reach {best:.3f}"
        )


if __name__ == "__main__":
    main()
