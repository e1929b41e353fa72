"""A news feed: a file a day, histories and vectors by config, two targets in Python, ranks, serving, expiry.

Articles are shown for two days, and readers click the topic that they like. A day is a Parquet file of
impressions; the model is trained again each night, on the new file alone. Records are counted.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from monolith.cli.main import main
from monolith.serve import Predictor

START = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp())
DAY = 86_400
DAYS, IMPRESSIONS, ARTICLES, TOPICS = 5, 900, 12, 4

CONFIG = """
[data]
path = "{feed}/day-*.parquet"
predict = "{feed}/today.parquet"

[features]
reader = {{ kind = "string" }}
article = {{ kind = "string", expire_after = "2d" }}
topics = {{ kind = "string", combiner = "mean" }}
vector = {{ type = "FloatFeature", width = 4 }}
age_hours = {{ scale = "log" }}
history = {{ kind = "sequence", of = "article", max = 10, by = "reader", only = "click" }}

[labels.click]

[examples]
event_time = "time"

[model]
type = "din"
dim = 8
hidden = [16]

[task]
batch_size = 50

[train]
model_dir = "{feed}/run"
evict_every_steps = 1
expiry = {{ gradual = true }}
"""


def impressions(day: int, count: int = IMPRESSIONS) -> pd.DataFrame:
    """The impressions of a day, in the order of time. Article `aD-N` is shown on day D, and on the next."""
    rng = random.Random(day)
    rows: list[dict[str, Any]] = []
    for n in range(count):
        reader, born, number = rng.randrange(60), max(0, day - rng.randrange(2)), rng.randrange(ARTICLES)
        topic, time = number % TOPICS, START + day * DAY + n * DAY // count
        click = rng.random() < (0.8 if topic == reader % TOPICS else 0.1)
        rows.append(
            {
                "time": time,
                "reader": f"r{reader:02d}",
                "article": f"a{born}-{number:02d}",
                "topics": [f"t{topic}", "news"],
                "vector": [float(topic == one) + rng.gauss(0, 0.1) for one in range(TOPICS)],
                "age_hours": (time - START - born * DAY) / 3600,
                "click": int(click),
                "dwell": rng.uniform(20, 60) if click else 1.0,
            }
        )
    return pd.DataFrame(rows)


def with_late_events(day: pd.DataFrame) -> pd.DataFrame:
    """The same impressions, but every hundredth is of an article of the first day, and came late."""
    late = day.copy()
    late.loc[::100, "article"] = [f"a0-{n:02d}" for n in range(len(late.loc[::100]))]
    late.loc[::100, "time"] = START
    return late


def trained(capsys: pytest.CaptureFixture[str], *flags: str) -> int:
    """Run `monolith train`; return how many records it has trained."""
    capsys.readouterr()
    assert main(["train", *flags, "--json", "--quiet"]) == 0
    return int(json.loads(capsys.readouterr().out.splitlines()[-1])["examples"])


def has_row(capsys: pytest.CaptureFixture[str], run: Path, article: str) -> bool:
    capsys.readouterr()
    main(["checkpoint", "inspect", str(run), "--id", article, "--feature", "article", "--json"])
    return bool(json.loads(capsys.readouterr().out)["status"] == "found")


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("feed")
    (folder / "feed.toml").write_text(CONFIG.format(feed=folder))
    impressions(DAYS).to_parquet(folder / "today.parquet")
    return folder


def test_each_night_the_new_day_alone_is_trained(feed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in range(DAYS):
        found = with_late_events(impressions(day)) if day == DAYS - 1 else impressions(day)
        found.to_parquet(feed / f"day-{day}.parquet", row_group_size=200)
        assert trained(capsys, "--config", str(feed / "feed.toml")) == IMPRESSIONS
    assert trained(capsys, "--config", str(feed / "feed.toml")) == 0


def test_articles_expire_although_late_events_name_them(
    feed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without histories: an article in the history of a reader is trained with it, and so stays."""
    text = (feed / "feed.toml").read_text().replace('"din"', '"deepfm"').replace("/run", "/plain")
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("history"))
    (feed / "plain.toml").write_text(plain)
    assert trained(capsys, "--config", str(feed / "plain.toml")) == DAYS * IMPRESSIONS
    assert has_row(capsys, feed / "plain", f"a{DAYS - 1}-00")
    assert not has_row(capsys, feed / "plain", "a0-00")


def test_a_servable_answers_raw_values_as_predict_does(feed: Path) -> None:
    config = ["--config", str(feed / "feed.toml"), "--quiet"]
    assert main(["predict", *config, "--to", str(feed / "said.parquet")]) == 0
    assert main(["export", *config, "--to", str(feed / "servables")]) == 0
    said = pd.read_parquet(feed / "said.parquet")["prediction.click"]
    today = impressions(DAYS)
    clicked = today["click"] == 1
    assert (
        said[clicked].mean() > said[~clicked].mean() + 0.02
    )  # of articles without a row, by topic and vector

    # The first impression of each reader, with the articles that were clicked before, but for late clicks.
    days = [pd.read_parquet(feed / f"day-{day}.parquet") for day in range(DAYS)]
    known = pd.concat(days, ignore_index=True)
    clicks = known[(known["click"] == 1)]
    late = set(days[-1].loc[::100, "reader"])
    first = today[~today["reader"].isin(late)].drop_duplicates("reader")
    history = [list(clicks[clicks["reader"] == reader]["article"])[-10:] for reader in first["reader"]]
    assert len(first) > 40
    predictor = Predictor(str(feed / "servables"))
    answer = predictor.predict(first.assign(history=history))
    predictor.close()
    assert answer.outputs["click"].tolist() == pytest.approx(said[first.index].tolist(), abs=1e-6)


def test_two_targets_in_python_are_trained_on_ranks_with_three_files(
    feed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, and three files of unequal size: one rank has two of them."""
    for name, count in (("x", 500), ("y", 200), ("z", 350)):
        impressions(1, count).to_parquet(feed / f"part-{name}.parquet")
    task = [f"{Path(__file__).with_name('feed_task.py')}:Reads", "--task.feed", str(feed)]
    run = ["--model-dir", str(feed / "ranks")]
    flags = ["--launch", "local", "--mode", "sync", "--num-workers", "2", "--threads", "1"]
    for examples in (1050, 0):
        assert main(["train", *task, *run, *flags, "--json", "--quiet"]) == 0
        report = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert report["examples"] == examples
    assert main(["evaluate", *task, *run, "--json", "--quiet"]) == 0
    metrics = json.loads(capfd.readouterr().out)["metrics"]
    assert metrics.keys() >= {"click/auc", "dwell/mae"}
