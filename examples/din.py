"""DIN: what a user clicked before, weighed by the item at hand.

The history of a made-up log reads the rows of items, step by step. Attention weighs each step by how it
relates to the item that is shown; then a small network reads all of it. As a task: data, model, and nothing
else to write.

    python examples/din.py
"""

import tempfile

import torch
from torch import Tensor, nn

from monolith.data import Batches, ClickLog, ClickLogConfig, MemorySource, Pipeline
from monolith.feature import (
    CONCAT,
    NONE,
    Batch,
    FeatureSpec,
    FirstN,
    IdFeature,
    Label,
    Layout,
    SequenceFeature,
)
from monolith.model import EmbeddingCollection, FeatureSet
from monolith.nn import DIN, MLP
from monolith.runtime import Trainer
from monolith.table import Adagrad
from monolith.train import Mode, SaveConfig, Task, TrainConfig

STEPS, DIM = 4, 8
TRAINED, TESTED = 40_000, 10_000
LOG = ClickLog(ClickLogConfig(users=500, items=200, contexts=20, history=STEPS, dim=2))

SPEC = FeatureSpec(
    features={
        "user": IdFeature(),
        "item": IdFeature(),
        "context": IdFeature(),
        "history": SequenceFeature(length=STEPS, shares="item"),  # in order, not combined
    },
    labels={"click": Label()},
)


class Interest(nn.Module):
    """What a user likes about an item, from who they are and what they clicked before."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = SPEC  # goes into every checkpoint
        features = FeatureSet(SPEC, optimizer=Adagrad(learning_rate=0.1))
        self.embeddings = EmbeddingCollection(
            [
                Layout("vectors", CONCAT, features.slices(["user", "item", "context"], "vector", DIM)),
                Layout("attention", NONE, features.slices(["item", "history"], "vector", DIM)),
            ]
        )
        self.din = DIN(DIM, (16, 1))
        self.mlp = MLP(5 * DIM, (32, 1), kernel_norm=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits of shape (examples,)."""
        read = self.embeddings(batch)
        item, seen = read["attention"]  # (examples, DIM) and (examples, STEPS, DIM)
        mask = FirstN(STEPS).mask(batch.ids["history"]).bool()
        interest = self.din(item, seen, mask)
        user = read["vectors"][:, :DIM]
        logits: Tensor = self.mlp(torch.cat([read["vectors"], interest * item, user * item], 1))
        return logits.squeeze(1)


class Clicks(Task):
    def dataset(self, mode: Mode) -> Batches:
        first, count = (0, TRAINED) if mode is Mode.TRAIN else (TRAINED, TESTED)
        batch = LOG.batch(first, count)
        columns = {name: batch.ids[name] for name in SPEC.ids} | {"click": batch.labels["click"]}
        return Pipeline(MemorySource(columns, batch_size=256)).to_batches(SPEC)

    def model(self) -> Interest:
        return Interest()

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.005)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Clicks(), TrainConfig(model_dir=folder, save=SaveConfig(steps=1000)))
        trainer.train()
        reached = trainer.evaluate()["click/auc"]
    best = LOG.best_auc(TESTED, first=TRAINED)
    print(f"test AUC {reached:.3f}, and the log's own probabilities reach {best:.3f}")


if __name__ == "__main__":
    main()
