"""`monolith experiment collisions`: what is hashed, what is printed, and what is drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli.main import main
from monolith_bench.collisions import COLLISIONLESS, click_log, distinct, hashed, with_collisions


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("collisions")
    picture, printed = folder / "collisions.svg", folder / "printed"
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(["experiment", "collisions", "--quick", "--json", "--plot", str(picture)]) == 0
    found: dict[str, Any] = json.loads(printed.read_text())
    return found | {"picture": picture}


def test_a_row_for_each_id_is_compared_with_three_hashed_vocabularies(report: dict[str, Any]) -> None:
    names = [curve["name"] for curve in report["curves"]]
    assert names == [COLLISIONLESS, "hashed to 100%", "hashed to 50%", "hashed to 25%"]
    rows = [curve["rows"] for curve in report["curves"]]
    assert rows == sorted(rows, reverse=True)
    assert rows[3] < 0.3 * rows[0]


def test_every_epoch_has_a_mean_and_an_error(report: dict[str, Any]) -> None:
    for curve in report["curves"]:
        assert len(curve["auc"]) == len(curve["error"]) == 2
        assert all(0.4 < auc < 1 for auc in curve["auc"])
        assert all(error >= 0 and math.isfinite(error) for error in curve["error"])
    assert len({tuple(curve["auc"]) for curve in report["curves"]}) == 4


def test_the_picture_names_every_curve(report: dict[str, Any]) -> None:
    picture: Path = report["picture"]
    drawn = picture.read_text(encoding="utf-8")
    for curve in report["curves"]:
        assert f"<!-- {curve['name']} -->" in drawn  # matplotlib draws letters as outlines


def test_an_id_is_hashed_to_the_same_row_wherever_it_stands() -> None:
    ids = torch.tensor([7, 8, 7, 9, 8])
    found = hashed(ids, 1.0, "user 0")
    assert found[0] == found[2]
    assert found[1] == found[4]
    assert found.max() < 3


def test_hashing_to_all_of_the_vocabulary_already_collides() -> None:
    """A hash that is even leaves a share of 1/e of the rows empty."""
    ids = torch.arange(5_000)
    assert len(hashed(ids, 1.0, "a").unique()) / 5_000 == pytest.approx(1 - 1 / math.e, abs=0.02)
    assert not torch.equal(hashed(ids, 1.0, "a"), hashed(ids, 1.0, "b"))


def test_users_and_items_are_hashed_apart() -> None:
    log = click_log(500)
    found = with_collisions(log, 0.5, seed=0)
    assert distinct(found) < distinct(log)
    assert torch.equal(found.likes, log.likes)
    assert found.users.max() < 0.5 * len(log.users.unique()) + 1


@pytest.mark.parametrize("share", ["0", "1.5", "nan"])
def test_a_share_beyond_the_vocabulary_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "collisions", "--quick", "--shares", share]) == 2
    assert "--shares are above 0 and at most 1" in capsys.readouterr().err


def test_a_picture_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment", "collisions", "--quick", "--seeds", "1", "--epochs", "1", "--shares", "1"]
    assert main([*words, "--plot", str(tmp_path / "a.wrong")]) == 2
    assert "cannot draw to" in capsys.readouterr().err
