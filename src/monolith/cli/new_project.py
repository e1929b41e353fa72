"""`monolith new NAME`: a folder to begin with, in which everything works before anything is changed."""

from __future__ import annotations

import random
import re
import sys

from monolith import filesystem
from monolith.cli.options.jobs import NewOptions
from monolith.errors import ConfigError

EXAMPLES = 3000
GENRES = ("comedy", "drama", "noir", "western")

TASK = '''\
"""What is trained on what. `monolith train --config run.toml` finds it by `task` in run.toml."""

from dataclasses import dataclass

from monolith.data import DataConfig, DataSplit
from monolith.feature import BucketFeature, CrossFeature, FeatureSpec, FloatFeature, IdFeature, Label
from monolith.model import DeepFM
from monolith.train import Task

FEATURES = FeatureSpec(
    features={{
        "user": IdFeature(kind="string"),
        "item": IdFeature(),
        "tags": IdFeature(kind="string", separator="|", combiner="mean"),
        "price": FloatFeature(scale="log"),
        "age": BucketFeature(boundaries=(18, 25, 35, 50)),
        "user_tag": CrossFeature(of=("user", "tags")),
    }},
    labels={{"click": Label()}},
    event_time="time",
    group="user",
)


@dataclass(frozen=True)
class {task}(Task):
    """Who clicks on what. The fields are settings: [task] in run.toml, or --set dim=16."""

    data: DataConfig = DataConfig(path="data/clicks.csv", split=DataSplit(evaluate=0.1))
    batch_size: int = 100
    dim: int = 8

    def dataset(self, mode):
        records = self.data.pipeline(mode.value, self.batch_size, types=FEATURES.columns)
        return records.to_batches(FEATURES)

    def model(self):
        return DeepFM(FEATURES, dim=self.dim, hidden=(32, 16))

    def metrics(self, mode):
        return ("auc", "gauc", "log_loss", "calibration")
'''

CONFIG = """\
# `monolith config check run.toml` checks this file, `monolith config explain all` lists what else there is.

[job]
task = "task.py:{task}"

[data]
path = "data/clicks.csv"
split = {{ evaluate = 0.1 }}  # used for evaluation, not for training

[task]
batch_size = 100
dim = 8

[train]
model_dir = "runs/1"
epochs = 3
evaluate = {{ every_steps = 25, metric = "click/auc", patience = 3 }}
"""

TEST = '''\
"""Run with `pytest` in this folder."""

from monolith.runtime import Trainer
from monolith.train import Mode, TrainConfig

from task import {task}


def test_training_and_evaluation_read_the_data():
    some = {{mode: next(iter({task}().dataset(mode))) for mode in Mode}}
    assert all(len(batch) > 0 for batch in some.values())


def test_it_learns(tmp_path):
    trainer = Trainer({task}(), TrainConfig(model_dir=str(tmp_path), epochs=3, summary_every_steps=None))
    trainer.train()
    assert trainer.evaluate()["click/auc"] > 0.7
'''

COMMANDS = (
    "monolith train --config run.toml",
    "monolith evaluate --config run.toml --checkpoint best",
    "monolith predict --config run.toml --checkpoint best --columns user,item --to predictions.csv",
)
"""What to type, in the folder."""


def run(options: NewOptions) -> int:
    """Write the folder, and say what to type.

    Raises:
        ConfigError: The folder exists, or its name makes no name of a task.
    """
    folder = options.name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", folder.name):
        raise ConfigError(
            f"cannot make a project {folder.name!r}: use a letter, and then letters, digits, - and _"
        )
    if folder.exists():
        raise ConfigError(f"cannot make {folder}: it exists; choose another name, or remove it first")
    files = dict(project_files(folder.name))
    for name, text in files.items():
        path = folder / name
        filesystem.make_dirs(path.parent)
        with filesystem.atomic_write(path) as file:
            file.write(text.encode())
    lines = [f"made {folder}: {', '.join(files)}", "", f"  cd {folder}", *(f"  {line}" for line in COMMANDS)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def project_files(name: str) -> list[tuple[str, str]]:
    """Return the files of a project of that name: path in its folder, and text."""
    task = "".join(part[:1].upper() + part[1:] for part in re.split("[-_]+", name))
    return [
        ("task.py", TASK.format(task=task)),
        ("run.toml", CONFIG.format(task=task)),
        ("data/clicks.csv", sample_clicks()),
        ("test_task.py", TEST.format(task=task)),
    ]


def sample_clicks() -> str:
    """Return a made-up log: strings, whole numbers, numbers, lists and a label. Users like one genre each."""
    rng = random.Random(0)
    lines = ["user,item,tags,price,age,time,click"]
    for n in range(EXAMPLES):
        user, tags = rng.randrange(60), rng.sample(GENRES, rng.randrange(1, 4))
        click = int(rng.random() < (0.9 if GENRES[user % 4] in tags else 0.1))
        lines.append(
            f"{user:04d},{rng.randrange(200)},{'|'.join(tags)},{rng.expovariate(0.1):.2f},"
            f"{16 + user % 50},{1_700_000_000 + 60 * n},{click}"
        )
    return "\n".join(lines) + "\n"
