"""Two-tower retrieval: the items that a user would like, out of all there are.

A made-up shop: users like some genres, items have one genre each, and some items are sold far more often than
others. Each purchase is picked out of the items of its batch and of a few that were drawn. Then every item
is ranked for users whose last purchase was not trained on.

    python examples/two_tower.py

The same by a config file alone, two_tower.toml, on the same log as CSV:

    python examples/two_tower.py --write shop
    cd shop
    monolith train --config ../examples/two_tower.toml
"""

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from monolith.data import Batches, MemorySource, Pipeline
from monolith.data.sampling import ItemPoolConfig, NegativeGeneration, NegativeGenerationConfig
from monolith.feature import FeatureSpec, IdFeature, SequenceFeature
from monolith.model import TwoTower
from monolith.runtime import Trainer
from monolith.table import Adagrad
from monolith.train import Mode, RetrievalTask, SaveConfig, TrainConfig

USERS, ITEMS, GENRES, BOUGHT = 800, 400, 20, 12

SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "bought": SequenceFeature(length=20, keep="last", kind="string", combiner="mean", shares="item"),
        "item": IdFeature(kind="string"),
        "genre": IdFeature(kind="string"),
    },
    group="user",
)


def purchases(seed: int = 7) -> tuple[dict[str, list], dict[str, list], dict[str, list], float]:
    """Return what was bought, what each user bought last, all items, and the best recall@10 there is."""
    rng = np.random.default_rng(seed)
    genre = rng.integers(GENRES, size=ITEMS)
    sold = 1.0 / (1 + rng.permutation(ITEMS)) ** 0.8
    columns = ("user", "bought", "item", "genre", "label")
    train: dict[str, list] = {name: [] for name in columns}
    test: dict[str, list] = {name: [] for name in columns}
    hits = 0
    for user in range(USERS):
        liked = rng.choice(GENRES, 2, replace=False)
        chance = sold * np.where(np.isin(genre, liked), 1.0, 0.01)
        items = rng.choice(ITEMS, BOUGHT, replace=False, p=chance / chance.sum())
        chance[items[:-1]] = 0  # nothing is bought twice
        hits += items[-1] in np.argsort(-chance)[:10]
        for n, item in enumerate(items):
            rows = test if n == BOUGHT - 1 else train
            before = [f"item {one}" for one in items[:n]]
            row = (f"user {user}", before, f"item {item}", f"genre {genre[item]}", 1.0)
            for name, value in zip(columns, row, strict=True):
                rows[name].append(value)
    order = rng.permutation(len(train["user"]))
    train = {name: [values[n] for n in order] for name, values in train.items()}
    items_table = {"item": [f"item {n}" for n in range(ITEMS)], "genre": [f"genre {one}" for one in genre]}
    return train, test, items_table, hits / USERS


class Shop(RetrievalTask):
    """What a user buys next."""

    ks = (10, 50)
    barred = "bought"

    def __init__(self, correction: bool = True) -> None:
        self.correction = correction
        self.train, self.test, self.items, self.best = purchases()

    def dataset(self, mode: Mode) -> Batches:
        if mode is not Mode.TRAIN:
            return Pipeline(MemorySource(self.test, batch_size=256)).to_batches(SPEC)
        drawn = NegativeGenerationConfig(
            neg_num=1,
            item_features=("item", "genre"),
            item_id="item_number",
            pool=ItemPoolConfig(start_num=50, max_item_num_per_channel=1000),
        )
        numbers = [int(item.removeprefix("item ")) for item in self.train["item"]]
        source = MemorySource({**self.train, "item_number": numbers}, batch_size=256, epochs=3)
        return Pipeline(source).transform(NegativeGeneration(drawn)).rebatch(256).to_batches(SPEC)

    def candidates(self) -> Batches:
        return Pipeline(MemorySource(self.items, batch_size=256)).to_batches(self.model().item_spec)

    def model(self) -> TwoTower:
        return TwoTower(
            SPEC,
            item=("item", "genre"),
            dim=16,
            hidden=(32,),
            out=16,
            correction=self.correction,
            optimizer=Adagrad(learning_rate=0.1),
        )

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.005)


def write(folder: Path) -> None:
    """Write the log for two_tower.toml: train.csv, test.csv and items.csv."""
    train, test, items, _ = purchases()
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (("train", train), ("test", test), ("items", items)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(table)
            for row in zip(*table.values(), strict=True):
                rows.writerow("|".join(cell) if isinstance(cell, list) else cell for cell in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--no-correction", action="store_true", help="do not correct for popularity")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the log as CSV, and end")
    options = parser.parse_args()
    if options.write:
        write(options.write)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(model_dir=str(Path(folder) / "run"), save=SaveConfig(steps=1000))
        shop = Shop(correction=not options.no_correction)
        trainer = Trainer(shop, config)
        report = trainer.train()
        found = trainer.evaluate()
    print(f"{report.step} steps, {report.examples} examples; {ITEMS} candidates")
    for name in ("recall@10", "recall@50", "ndcg@10", "mrr"):
        print(f"{name} {found[name]:.3f}")
    print(f"who knows each user's chances reaches recall@10 {shop.best:.3f}")


if __name__ == "__main__":
    main()
