"""The task whose checkpoints are kept here: small, and with one of everything that a checkpoint holds.

It is run by the program of before, which writes the checkpoints, and by that of today,
which restores them. So it names only what both have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monolith.checkpoint import Checkpointer, DensePart, Saver, StatePart, TablesPart
from monolith.data import DriftConfig, DriftingStream, Pipeline, ShuffleConfig, Stream
from monolith.data.records import BatchSpec
from monolith.feature import Batch
from monolith.model import DeepFM, EmbeddingOptimizer, Feature, UpdateConfig
from monolith.store import LocalStore
from monolith.table import Adagrad, Ftrl, iterate
from monolith.train import KeepConfig, Mode, SaveConfig, Task, TrainConfig

ALONE, FLEET = "alone", "fleet"
SAVES = SaveConfig(steps=2, asynchronous=False)
KEEPS = KeepConfig(max_to_keep=3, full_every=3, every=None)
SEED = 7
EXAMPLES = 72
STATES = ("position", "progress", "metrics")


class ClicksModel(nn.Module):
    """Rows of Adagrad that wait for their second sighting, and rows of FTRL that expire."""

    def __init__(self) -> None:
        super().__init__()
        features = [
            Feature(name="user", occurrence_threshold=1),
            Feature(name="item", optimizer=Ftrl(), expire_after=timedelta(minutes=4)),
        ]
        self.clicks = DeepFM(
            features,
            dim=2,
            hidden=(4,),
            threads=1,
            optimizer=Adagrad(learning_rate=0.05, initial_accumulator_value=0.1),
            seed=3,
        )
        self.norm = nn.BatchNorm1d(1)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.norm(self.clicks(batch)[:, None])
        return logits.squeeze(1)


def stream(batch_size: int, examples: int = EXAMPLES) -> DriftingStream:
    return DriftingStream(
        DriftConfig(
            examples=examples,
            batch_size=batch_size,
            cohort=timedelta(minutes=1),
            new_users=4,
            new_items=2,
            user_life=timedelta(minutes=10),
            item_life=timedelta(minutes=4),
            start_time=0,
            examples_per_second=1,
        )
    )


@dataclass(frozen=True)
class OlderTask(Task):
    """Batches of 6 of 10 minutes of the drifting stream, shuffled."""

    examples: int = EXAMPLES

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        spec = BatchSpec(ids=("user", "item"), labels={"click": ("label", 0)}, event_time="line_id.req_time")
        source = stream(8, self.examples)
        return Pipeline(source).shuffle(ShuffleConfig(seed=1, buffer=20)).rebatch(6).to_batches(spec)

    def model(self) -> nn.Module:
        return ClicksModel()

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def updates(self) -> UpdateConfig:
        return UpdateConfig(multiply_rows_by=1)


def config_of(model_dir: Path | str, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model_dir": str(model_dir),
        "save": SAVES,
        "keep": KEEPS,
        "seed": SEED,
        "deterministic": True,
        "prefetch": 0,
        "summary_every_steps": None,
    }
    return TrainConfig(**{**settings, **changes})


def checkpoints(folder: Path) -> list[str]:
    """Return the prefixes of a folder's checkpoints, oldest first."""
    found = (str(path).removesuffix(".manifest") for path in folder.glob("model.ckpt-*.manifest"))
    return sorted(found, key=lambda prefix: int(prefix.rpartition("-")[2]))


def content_of(prefix: str) -> dict[str, Any]:
    """Return all that a checkpoint brings back into one process, as plain values that survive JSON."""
    module = ClicksModel()
    dense = OlderTask().dense_optimizer(module)
    states: dict[str, Any] = {}
    with contextlib.closing(module.clicks.embeddings.store) as store:
        assert isinstance(store, LocalStore)
        tables: dict[str, Any] = {name: store.table(name) for name in store.tables}
        parts = [
            TablesPart(tables, store.filters),
            DensePart(module, {"rows": EmbeddingOptimizer(module), "dense": dense}),
            *(StatePart(name, dict, partial(states.__setitem__, name)) for name in STATES),
        ]
        restored = Checkpointer(Saver(str(Path(prefix).parent)), parts).restore(prefix)
        return {
            "complete": restored.report.complete,
            "step": restored.step,
            "states": _plain(states),
            "rows": {name: _rows(table) for name, table in tables.items()},
            "weights": _plain(module.state_dict()),
            "optimizer": _plain(dense.state_dict()["state"]),
            "random": torch.rand(3).tolist(),
            "admitted next": {name: _admitted(table) for name, table in tables.items()},
        }


def _rows(table: Any) -> dict[str, Any]:
    """Return id -> event time, values and state."""
    chunks = [
        [chunk.ids.tolist(), chunk.event_times.tolist(), chunk.values.tolist(), chunk.state.tolist()]
        for chunk in iterate(table)
    ]
    return {str(key): row for chunk in chunks for key, *row in sorted(zip(*chunk, strict=True))}


def _admitted(table: Any) -> list[int]:
    """Return which ids of the data have a row after one more sighting: what the filter remembers."""
    (records,) = list(stream(EXAMPLES))
    seen = torch.unique(torch.cat([records.columns[name].flat_values for name in ("user", "item")]))
    table.assign(seen, torch.zeros(len(seen), table.dim))
    return seen[table.contains(seen)].tolist()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
