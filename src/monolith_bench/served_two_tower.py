"""A servable TwoTower with as many items as a bench asks for: made up, trained for one step."""

from __future__ import annotations

from pathlib import Path

from monolith.data import Pipeline, Stream
from monolith.feature import Batch
from monolith.model import TwoTower
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export, task_exporter
from monolith.train import Mode, RetrievalTask, SaveConfig, TrainConfig
from monolith_bench.marked_events import EVENT_SPEC, FEATURES, FreshnessJob, MarkedEvents
from monolith_bench.marked_trainer import FillTables


class MadeUpLikes(RetrievalTask):
    """Users and items with IDs from 0 on, and nothing to learn."""

    def __init__(self, job: FreshnessJob) -> None:
        self._job = job

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        return Pipeline(MarkedEvents(self._job)).to_batches(EVENT_SPEC)

    def candidates(self) -> Stream[Batch]:
        raise NotImplementedError("made-up items are not evaluated")

    def model(self) -> TwoTower:
        job = self._job
        return TwoTower(
            FEATURES, item=("item",), dim=job.dim, hidden=job.hidden, out=job.dim, seed=job.seed, threads=1
        )


def write_two_tower(root: Path, items: int, *, dim: int, hidden: tuple[int, ...], seed: int) -> None:
    """Write the one version of the model: as many users as items, all with a row."""
    job = FreshnessJob(
        model_dir=f"{root}-run", rows=items, dim=dim, hidden=hidden, batch=10, mark_every=0, seed=seed
    )
    config = TrainConfig(model_dir=job.model_dir, steps=1, save=SaveConfig(), summary_every_steps=None)
    task = MadeUpLikes(job)
    made = Trainer(task, config, hooks=lambda run: [FillTables(run, job)]).train()
    assert made.checkpoint is not None
    with task_exporter(task, config, how_to_export(ExportConfig(), config), warm_up=False) as exporter:
        exporter.export(made.checkpoint, str(root))
