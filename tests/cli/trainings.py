"""The task and the run that a command line of `monolith train` asks for, without training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from monolith.cli.options.train import TrainOptions
from monolith.cli.run_settings import run_of
from monolith.cli.train import _make_task
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import check_run
from monolith.runtime.task_setup import prepared_task, set_threads
from monolith.train import Task, TrainConfig


class Training(NamedTuple):
    task: Task
    run: RunConfig

    @property
    def config(self) -> TrainConfig:
        return self.run.train


def load_training(options: TrainOptions, environ: Mapping[str, str] | None = None) -> Training:
    run = run_of(options, os.environ if environ is None else environ)
    check_run(run)
    set_threads(run.threads)
    return Training(*prepared_task(lambda config: _make_task(options, config), run))
