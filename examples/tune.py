"""Look for good settings with Optuna: each trial trains a model, and is judged on examples to come.

    pip install optuna
    python examples/tune.py --trials 20

A study that is kept (`--storage sqlite:///tune.db`) can be shared by several of these programs at once, and
resumes where it was stopped.
"""

import argparse
import tempfile
from dataclasses import dataclass

import optuna
import torch

from monolith.data import DriftConfig, DriftingStream, Pipeline
from monolith.data.synthetic.drift import SPEC
from monolith.model import DeepFM
from monolith.runtime import Trainer
from monolith.table import Adagrad
from monolith.train import Mode, SaveConfig, ScheduleConfig, Task, TrainConfig


@dataclass(frozen=True)
class Clicks(Task):
    examples: int = 40_000
    rate: float = 0.05
    dense_rate: float = 1e-3
    dim: int = 8

    def dataset(self, mode):
        until = self.examples if mode is Mode.TRAIN else self.examples + self.examples // 4
        stream = DriftingStream(DriftConfig(examples=until, batch_size=250, new_users=20, new_items=10))
        if mode is not Mode.TRAIN:
            stream.restore({**stream.position(), "next": self.examples})
        return Pipeline(stream).to_batches(SPEC)

    def model(self):
        rows = Adagrad(learning_rate=self.rate)
        return DeepFM(SPEC.ids, dim=self.dim, hidden=(32,), optimizer=rows, bias_optimizer=rows)

    def dense_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=self.dense_rate)


def objective(trial: optuna.Trial, examples: int) -> float:
    """Train once, and return the AUC on what comes after."""
    task = Clicks(
        examples=examples,
        rate=trial.suggest_float("rate", 0.01, 0.5, log=True),
        dense_rate=trial.suggest_float("dense_rate", 1e-4, 1e-2, log=True),
        dim=trial.suggest_categorical("dim", [4, 8, 16]),
    )
    falls = ScheduleConfig(kind="cosine", warmup_steps=5, steps=max(examples // 250, 1), end=0.1)
    chosen = falls if trial.suggest_categorical("schedule", ["none", "cosine"]) == "cosine" else None
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model_dir=folder, save=SaveConfig(steps=10**9), summary_every_steps=None, schedule=chosen
        )
        trainer = Trainer(task, config)
        trainer.train()
        return trainer.evaluate()["click/auc"]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--trials", type=int, default=20)
    options.add_argument("--examples", type=int, default=40_000)
    options.add_argument("--storage", default=None)
    given = options.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        study_name="clicks",
        storage=given.storage,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=1),
    )
    study.optimize(
        lambda trial: objective(trial, given.examples),
        n_trials=given.trials,
        callbacks=[
            lambda _, trial: print(f"trial {trial.number}: {trial.params}, AUC {trial.value:.4f}", flush=True)
        ],
    )
    best = study.best_trial
    print(f"best AUC {best.value:.4f} with rate {best.params['rate']:.3f}, dim {best.params['dim']}")


if __name__ == "__main__":
    main()
