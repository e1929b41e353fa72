"""A two-tower model in a file: trained, measured among all candidates and written out without Python."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from monolith.cli.main import main
from monolith.config import to_toml
from monolith.data.config import DataConfig
from monolith.errors import ConfigError
from monolith.feature import FeatureSpec, IdFeature, SequenceFeature
from monolith.model import TwoTower
from monolith.model.by_name import ModelConfig
from monolith.runtime import Trainer
from monolith.runtime.config import RETRIEVAL_TASK
from monolith.runtime.config_loading import read_run
from monolith.runtime.config_task import ConfigRetrievalTask
from monolith.table import Adagrad
from monolith.train import CandidatesConfig, Mode, RetrievalTask, TrainConfig, load_task

CONFIG = """
[data]
train = "{folder}/train.csv"
evaluate = "{folder}/held.csv"

[features.user]
kind = "int"
[features.seen]
type = "SequenceFeature"
length = 3
kind = "string"
shares = "item"
combiner = "mean"
[features.item]
kind = "string"

[examples]
group = "user"
optional = ["label"]

[model]
type = "two_tower"
item = ["item"]
user = ["user"]
dim = 8
hidden = []
out = 8
optimizer = {{ type = "Adagrad", learning_rate = 0.5 }}

[candidates]
path = "{folder}/items.csv"
ks = [5]
barred = "seen"

[task]
batch_size = 32
dense_rate = 0.02

[train]
model_dir = "{folder}/run"
summary_every_steps = "none"
evaluate = {{ every_steps = 25, metric = "recall@5" }}
"""
SPEC = FeatureSpec(
    features={
        "user": IdFeature(),
        "seen": SequenceFeature(length=3, kind="string", shares="item", combiner="mean"),
        "item": IdFeature(kind="string"),
    },
    group="user",
    optional=("label",),
)
TWO_TOWER = {
    "item": ("item",),
    "user": ("user",),
    "dim": 8,
    "hidden": (),
    "out": 8,
    "optimizer": Adagrad(learning_rate=0.5),
}


def write_shop(folder: Path) -> Path:
    """Write likes of users for items with the same last digit, and a config; return the config's path."""
    for name, many in (("train", 1600), ("held", 40)):
        users = [n * 7 % 40 for n in range(many)]
        items = [user % 10 + 10 * (n // 40 % 5) for n, user in enumerate(users)]
        rows = (f"{user},item {item},item {item}" for user, item in zip(users, items, strict=True))
        (folder / f"{name}.csv").write_text("user,item,seen\n" + "\n".join(rows) + "\n")
    (folder / "items.csv").write_text("item\n" + "\n".join(f"item {n}" for n in range(50)) + "\n")
    (folder / "shop.toml").write_text(CONFIG.format(folder=folder))
    return folder / "shop.toml"


def task_of(folder: Path, **settings: object) -> ConfigRetrievalTask:
    said: Mapping[str, object] = {
        "features": SPEC,
        "network": ModelConfig(type="two_tower", settings=TWO_TOWER),
        "data": DataConfig(train=f"{folder}/train.csv", evaluate=f"{folder}/held.csv"),
        "items": CandidatesConfig(path=f"{folder}/items.csv", ks=(5,), barred="seen"),
        "batch_size": 32,
        "dense_rate": 0.02,
    }
    return ConfigRetrievalTask(**{**said, **settings})  # type: ignore[arg-type]


def test_a_file_trains_evaluates_and_embeds_without_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_shop(tmp_path))
    assert main(["train", "--config", config, "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 50
    assert report["best"]["metric"] == "recall@5"
    assert main(["evaluate", "--config", config, "--quiet", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["protocol"] == (
        f"all records of {tmp_path}/held.csv; full ranking over all candidates but those in 'seen' of each "
        "example; ties count as the mean over all orders"
    )
    assert report["evaluation"]["protocol"] == answer["protocol"]
    follow = ["evaluate", "--config", config, "--quiet", "--follow"]
    assert main([*follow, "--timeout", "1s"]) == 0
    first, *each = capsys.readouterr().out.splitlines()
    assert first == f"protocol: {answer['protocol']}"
    assert each[-1].startswith("step 50: recall@5 ")
    lines = (tmp_path / "run" / "eval" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["protocol"] for line in lines} == {answer["protocol"]}
    found = answer["metrics"]
    assert set(found) == {"recall@5", "ndcg@5", "hit_rate@5", "mrr@5", "mrr", "loss"}
    assert found["recall@5"] > 0.7  # by chance 0.1
    to = tmp_path / "items.parquet"
    assert main(["export", "embeddings", "--config", config, "--to", str(to), "--quiet"]) == 0
    assert {one.as_py() for one in pq.read_table(to)["id"]} == {f"item {n}" for n in range(50)}
    to = tmp_path / "scores.csv"
    assert main(["predict", "--config", config, "--columns", "user,item", "--to", str(to), "--quiet"]) == 0
    assert to.read_text().splitlines()[0] == "prediction,user,item"


def test_the_file_is_what_a_python_user_would_write(tmp_path: Path) -> None:
    run = read_run(write_shop(tmp_path), {})
    assert run.job.task == RETRIEVAL_TASK
    assert load_task(RETRIEVAL_TASK, run.task, inputs=run.inputs) == task_of(tmp_path)
    assert 'path = "' in to_toml(run).partition("[candidates]")[2]


def test_it_measures_what_a_class_by_hand_measures(tmp_path: Path) -> None:
    write_shop(tmp_path)
    by_file = task_of(tmp_path)

    class ByHand(RetrievalTask):
        ks, barred = (5,), "seen"

        def dataset(self, mode: Mode) -> object:  # type: ignore[override]
            return by_file.dataset(mode)

        def model(self) -> TwoTower:
            return TwoTower(SPEC, seed=0, **TWO_TOWER)  # type: ignore[arg-type]

        def candidates(self) -> object:  # type: ignore[override]
            items = DataConfig(path=f"{tmp_path}/items.csv")
            spec = self.model().item_spec
            return items.pipeline("train", 7, types=spec.columns).to_batches(spec)

        def dense_optimizer(self, model: object) -> object:  # type: ignore[override]
            return by_file.dense_optimizer(model)  # type: ignore[arg-type]

    seeded = task_of(tmp_path, network=ModelConfig(type="two_tower", settings={**TWO_TOWER, "seed": 0}))
    found = []
    for name, task in (("file", seeded), ("hand", ByHand())):
        config = TrainConfig(model_dir=str(tmp_path / name), steps=10, summary_every_steps=None)
        trainer = Trainer(task, config)
        trainer.train()
        found.append(trainer.evaluate())
    assert found[0] == found[1]
    assert found[0]["mrr"] > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[candidates]", "[candidate]", r"unknown key candidate\b"),
        ('path = "{folder}/items.csv"', "", "candidates.path is required"),
        ("ks = [5]", "ks = []", "candidates.ks.*one or more different numbers"),
        ("ks = [5]", "ks = [5, 5]", "candidates.ks.*one or more different numbers"),
        ('barred = "seen"', 'bared = "seen"', "nearest known key is candidates.barred"),
        ('barred = "seen"', 'barred = "sene"', "candidates.barred: 'sene' is no feature of ids"),
        ("dense_rate", 'scores = ["auc"]\ndense_rate', "measured by candidates.ks; leave scores out"),
        ('item = ["item"]', 'item = ["itme"]', "there is no feature 'itme'; did you mean 'item'"),
    ],
)
def test_a_problem_is_reported_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    config = write_shop(tmp_path)
    assert old in CONFIG
    config.write_text(CONFIG.replace(old, new, 1).format(folder=tmp_path))
    assert main(["train", "--config", str(config)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_two_tower_model_needs_candidates_and_others_have_none(tmp_path: Path) -> None:
    config = write_shop(tmp_path)
    whole = config.read_text()
    head, candidates = whole.split("[candidates]")
    config.write_text(head + "[task]" + candidates.split("[task]")[1])
    with pytest.raises(ConfigError, match=r"say where they are, as in \[candidates\] path"):
        read_run(config, {})
    config.write_text(whole.replace('item = ["item"]\nuser = ["user"]\n', "").replace("two_tower", "deepfm"))
    with pytest.raises(
        ConfigError, match=r"candidates are of models that retrieve items \(two_tower, sasrec"
    ):
        read_run(config, {})


def test_another_model_has_no_candidates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model of type deepfm has no candidates"):
        task_of(tmp_path, network=ModelConfig(type="deepfm"))


def test_leave_one_out_measures_on_the_last_records_of_each_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_shop(tmp_path)
    rows = (tmp_path / "train.csv").read_text().splitlines()
    timed = [f"{row},{'time' if at == 0 else at}" for at, row in enumerate(rows)]
    (tmp_path / "log.csv").write_text("\n".join(timed) + "\n")
    words = path.read_text().replace(f'evaluate = "{tmp_path}/held.csv"\n', "")
    words = words.replace(
        f'train = "{tmp_path}/train.csv"',
        f'path = "{tmp_path}/log.csv"\nsplit = {{ last_of = "user", time = "time" }}',
    )
    path.write_text(words)
    assert main(["train", "--config", str(path), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 1600 - 2 * 40
    for part, which in (("evaluate", "the last record but one"), ("predict", "the last record")):
        assert main(["evaluate", "--config", str(path), "--part", part, "--quiet", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["examples"] == 40
        assert answer["protocol"].startswith(f"leave-one-out: {which} of each user by time; full ranking")
        assert answer["metrics"]["hit_rate@5"] > 0.5  # by chance 0.1
