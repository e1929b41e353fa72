"""A CSV of clicks, and a config file that says all of a task on it, for tests."""

from __future__ import annotations

import random
from pathlib import Path

GENRES = ["drama", "comedy", "noir", "western"]

CONFIG = """
[data]
path = "{folder}/clicks.csv"
split = {{ evaluate = 0.2 }}

[features.user]
kind = "string"

[features.item]
kind = "int"

[features.tags]
kind = "string"
separator = "|"
combiner = "mean"

[features.price]
scale = "standard"

[features.price_level]
column = "price"
quantiles = 4

[features.user_tag]
of = ["user", "tags"]

[labels.click]

[examples]
event_time = "time"
group = "user"

[model]
type = "deepfm"
dim = 4
hidden = [8]
optimizer = {{ type = "Adagrad", learning_rate = 0.1 }}

[task]
batch_size = 100

[train]
model_dir = "{folder}/run"
summary_every_steps = "none"
"""


def write_clicks(path: Path, records: int = 1000, *, seed: int = 7, label: bool = True) -> None:
    """Write clicks of users who each like one genre."""
    rng = random.Random(seed)
    lines = ["user,item,tags,price,time" + (",click" if label else "")]
    for n in range(records):
        user, tags = rng.randrange(20), rng.sample(GENRES, rng.randrange(1, 4))
        click = int(rng.random() < (0.9 if GENRES[user % 4] in tags else 0.1))
        cells = [
            f"{user:04d}",
            rng.randrange(50),
            "|".join(tags),
            f"{rng.expovariate(0.1):.2f}",
            1_700_000_000 + n,
        ]
        lines.append(",".join(map(str, [*cells, click] if label else cells)))
    path.write_text("\n".join(lines) + "\n")


def write_project(folder: Path, *, records: int = 1000, more: str = "") -> Path:
    """Write the data and the config; return the config's path."""
    write_clicks(folder / "clicks.csv", records)
    (folder / "clicks.toml").write_text(CONFIG.format(folder=folder) + more)
    return folder / "clicks.toml"
