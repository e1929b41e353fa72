"""The first days of a new user: a CSV to a served model, a model in Python, retraining, a new feature.

The CSV has what real logs have: ids that are strings, lists in a cell, prices with gaps, ISO timestamps, a
click and the seconds watched. Each stage starts from the result of the one before it.
"""

from __future__ import annotations

import csv
import json
import math
import random
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from services import warm

from monolith.cli.main import main
from monolith.serve import Predictor

pytest.importorskip("uvicorn")
PATIENCE = 120
START = datetime(2024, 3, 1, tzinfo=UTC)
CATEGORIES = ["shoes", "books", "tea", "lamps"]

CONFIG = """
[data]
train = "{shop}/days/*.csv"
evaluate = "{shop}/held_out.csv"
predict = "{shop}/held_out.csv"

[features.user]
kind = "string"

[features.item]
kind = "string"

[features.tags]
kind = "string"
separator = "|"
combiner = "mean"

[features.price]
quantiles = 8

[labels.click]

[examples]
event_time = "time"

[model]
type = "deepfm"
dim = 4
hidden = [16]

[task]
batch_size = 50

[train]
model_dir = "{shop}/run"
epochs = 1
evaluate = {{ every_epochs = 1, metric = "click/auc" }}
"""


def write_events(path: Path, first: int, count: int) -> None:
    """`count` events of the shop's log from event number `first` on."""
    rng = random.Random(first)
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item", "tags", "price", "time", "category", "seconds", "click"])
        for n in range(first, first + count):
            user, item = rng.randrange(60), rng.randrange(120)
            category = CATEGORIES[item % 4]
            click = int(rng.random() < 0.1 + 0.4 * (item % 3 == 0) + 0.4 * (user % 2))
            price = "" if rng.random() < 0.2 else f"{rng.expovariate(0.05):.2f}"
            tags = "|".join(rng.sample(CATEGORIES, rng.randrange(3)))
            time = (START + timedelta(seconds=30 * n)).isoformat()
            seconds = round(10 * (1 + user % 5) * rng.uniform(0.7, 1.3), 1)
            rows.writerow([f"u_{user:04x}", f"i_{item:04x}", tags, price, time, category, seconds, click])


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shop's folder after the first stage: two days of events, and a model trained on them by config."""
    folder = tmp_path_factory.mktemp("shop")
    write_events(folder / "days" / "2024-03-01.csv", first=0, count=3000)
    write_events(folder / "days" / "2024-03-02.csv", first=3000, count=3000)
    write_events(folder / "held_out.csv", first=6000, count=1000)
    (folder / "shop.toml").write_text(CONFIG.format(shop=folder))
    assert main(["config", "check", str(folder / "shop.toml")]) == 0
    assert main(["train", "--config", str(folder / "shop.toml"), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def predictions(shop: Path) -> pd.DataFrame:
    """What `monolith predict` wrote for the held-out events."""
    to = shop / "predictions.parquet"
    flags = ["--columns", "user,item,time", "--to", str(to), "--quiet"]
    assert main(["predict", "--config", str(shop / "shop.toml"), *flags]) == 0
    return pd.read_parquet(to)


@pytest.fixture(scope="module")
def server(shop: Path) -> Iterator[str]:
    """The address of `monolith serve` with the model that the shop exported."""
    assert (
        main(["export", "--config", str(shop / "shop.toml"), "--to", str(shop / "servables"), "--quiet"]) == 0
    )
    words = [
        "-m",
        "monolith",
        "serve",
        f"clicks={shop / 'servables'}",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
    ]
    process = warm.Popen(words, stdout=warm.PIPE)
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if line.startswith("http "):
            url = line.split()[1]
        if line.startswith("ask it"):
            break
    threading.Thread(target=process.stdout.read, daemon=True).start()
    yield url
    process.terminate()
    assert process.wait(PATIENCE) in (0, 143)


def evaluated(config: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """The AUC that `monolith evaluate` reports."""
    capsys.readouterr()
    assert main(["evaluate", "--config", str(config), "--quiet", "--json"]) == 0
    return float(json.loads(capsys.readouterr().out)["metrics"]["click/auc"])


def test_a_csv_and_a_config_file_become_a_model(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated(shop / "shop.toml", capsys) > 0.7  # 0.8 is the most that this log allows


def test_predictions_join_with_the_data(shop: Path, predictions: pd.DataFrame) -> None:
    events = pd.read_csv(shop / "held_out.csv")
    joined = events.merge(predictions, on=["user", "item", "time"], validate="one_to_one")
    assert len(joined) == len(events) == len(predictions)
    assert predictions["prediction.click"].between(0, 1).all()


def test_the_served_model_answers_what_predict_wrote(
    shop: Path, predictions: pd.DataFrame, server: str
) -> None:
    events = pd.read_csv(shop / "held_out.csv").head(50)
    assert events["price"].isna().any()
    prices = [None if math.isnan(price) else price for price in events["price"]]
    tags = [None if isinstance(text, float) else text for text in events["tags"]]
    columns = {"user": list(events["user"]), "item": list(events["item"]), "tags": tags}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [50], "data": data} for name, data in columns.items()
    ]
    inputs.append({"name": "price", "datatype": "FP32", "shape": [50], "data": prices})
    body = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(f"{server}/v2/models/clicks/infer", body, timeout=PATIENCE) as answer:
        served = json.load(answer)["outputs"][0]["data"]
    assert served == pytest.approx(list(predictions["prediction.click"].head(50)), abs=1e-6)


@pytest.mark.usefixtures("server")  # which exports the model
def test_a_data_frame_gets_the_same_predictions(shop: Path, predictions: pd.DataFrame) -> None:
    events = pd.read_csv(shop / "held_out.csv")
    predictor = Predictor(str(shop / "servables"))
    answer = predictor.predict(events)
    predictor.close()
    assert list(answer.outputs["click"]) == pytest.approx(list(predictions["prediction.click"]), abs=1e-6)


def test_a_model_with_two_targets_in_python(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, run = f"{Path(__file__).with_name('shop_task.py')}:Watches", str(shop / "watches")
    flags = ["--model-dir", run, "--task.shop", str(shop)]
    # A process of its own, as the run remembers its command: export needs neither the task nor its settings.
    words = ["-m", "monolith", "train", task, *flags, "--epochs", "3", "--quiet"]
    assert warm.run(words).returncode == 0
    capsys.readouterr()
    assert main(["evaluate", task, *flags, "--quiet", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["click/auc"] > 0.7
    assert metrics["seconds/mae"] < 10  # the mean of all is 13 s off
    assert 0 < metrics["within_20_percent"] <= 1

    assert main(["export", run, "--to", str(shop / "two"), "--quiet"]) == 0
    events = pd.read_csv(shop / "held_out.csv").head(20)
    predictor = Predictor(str(shop / "two"))
    answer = predictor.predict(events)
    predictor.close()
    to = shop / "two.csv"
    assert main(["predict", task, *flags, "--to", str(to), "--quiet"]) == 0
    expected = pd.read_csv(to).head(20)
    for target in ("click", "seconds"):
        assert list(answer.outputs[target]) == pytest.approx(list(expected[f"prediction.{target}"]), rel=1e-5)


def test_flags_of_the_training_need_not_be_given_again(shop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, run = str(shop / "shop.toml"), str(shop / "flags")
    flags = ["--model.dim", "6", "--features.price.quantiles", "4"]
    words = ["-m", "monolith", "train", "--config", config, "--model-dir", run, *flags, "--quiet"]
    assert warm.run(words).returncode == 0
    assert main(["evaluate", "--config", config, "--model-dir", run]) == 0
    assert f"with the flags of the training: {' '.join(flags)}" in capfd.readouterr().err
    assert main(["evaluate", "--config", config, "--model-dir", run, *flags, "--quiet"]) == 0
    assert main(["export", run, "--to", str(shop / "of_flags"), "--quiet"]) == 0
    assert main(["evaluate", "--config", config, "--model-dir", run, "--model.dim", "7", "--quiet"]) == 2


def test_the_next_day_only_the_new_file_is_trained(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(shop / "days" / "2024-03-03.csv", first=7000, count=3000)
    (shop / "days" / "2024-03-01.csv").unlink()  # cleaned up since: it was trained
    capsys.readouterr()
    assert main(["train", "--config", str(shop / "shop.toml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["examples"] == 3000


def test_a_feature_is_added_to_the_model(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = evaluated(shop / "shop.toml", capsys)
    text = (shop / "shop.toml").read_text().replace(f"{shop}/run", f"{shop}/with_category")
    changed = shop / "with_category.toml"
    changed.write_text(text + '\n[features.category]\nkind = "string"\n')
    write_events(shop / "days" / "2024-03-04.csv", first=10_000, count=3000)
    assert main(["train", "--config", str(changed), "--from", f"{shop}/run/best"]) == 0
    said = capsys.readouterr().out
    assert "category" in said
    assert evaluated(changed, capsys) > before - 0.02
