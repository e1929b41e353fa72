"""`monolith experiment retrieval`: what a two-tower model finds, by its negatives and its correction."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch

from monolith.cli.main import main
from monolith_bench import retrieval
from monolith_bench.movielens import RATINGS, Ratings
from monolith_bench.retrieval import Finder, best_recall

USERS, ITEMS = 12, 24


def likes() -> Ratings:
    """Users who each like the third of the items that has their number modulo 3."""
    pairs = [(user, item) for user in range(USERS) for item in range(ITEMS) if user % 3 == item % 3]
    users, items = (torch.tensor(side) for side in zip(*pairs, strict=True))
    return Ratings(users, items, torch.ones(len(pairs)))


def test_what_is_known_is_left_out_of_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "AT", ITEMS)
    data = likes()
    all_of_them = torch.arange(len(data))
    finder = Finder(data, "batch", correction=True, seed=0)
    assert finder.recall(all_of_them[:0], all_of_them) == 1
    monkeypatch.setattr(retrieval, "AT", ITEMS - ITEMS // 3)
    others = all_of_them[data.users > 0]  # of a user, none is known, or all are
    assert finder.recall(others, others) == 0


@pytest.mark.parametrize("negatives", ["batch", "both"])
def test_it_learns_which_users_like_which_items(
    monkeypatch: pytest.MonkeyPatch, negatives: retrieval.Negatives
) -> None:
    monkeypatch.setattr(retrieval, "BATCH", 16)
    monkeypatch.setattr(retrieval, "AT", 3)
    recall, epoch = best_recall(likes(), negatives, correction=False, seed=0)
    assert recall > 0.5  # chance is 3 of the 18 to 24 that are not known
    assert epoch >= 1


def test_each_setting_has_a_recall_of_the_valid_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    lines += [
        f"{user}\t{item}\t5\t7"
        for user, item in zip(likes().users.tolist(), likes().items.tolist(), strict=True)
    ]
    wheel = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as writing:
        writing.writestr(RATINGS, "\n".join([*lines, "1\t1\t1\t9"]) + "\n")
    assert main(["experiment", "retrieval", "--wheel", str(wheel), "--seeds", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["negatives"], one["correction"]) for one in results] == list(retrieval.SETTINGS)
    assert all(0 <= one["valid"]["recall@10"] <= 1 for one in results)
