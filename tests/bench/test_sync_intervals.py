"""`monolith experiment intervals`: what is printed and drawn, and what must be so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from monolith.cli.main import main
from monolith_bench.sync_intervals import BATCH_ONLY

COMMAND = ["experiment", "freshness", "--quick"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("freshness")
    picture, printed = folder / "freshness.svg", folder / "printed"
    words = [*COMMAND, "--intervals", "1s", "1m", "5h", "--json", "--plot", str(picture)]
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(words) == 0
    found: dict[str, Any] = json.loads(printed.read_text())
    return found | {"picture": picture}


def test_every_interval_is_compared_with_batch_only(report: dict[str, Any]) -> None:
    (found,) = report["results"]
    assert [one["synced_every"] for one in found["served"]] == ["1s", "1m", "5h", BATCH_ONLY]
    assert [one["syncs"] for one in found["served"]] == [29, 4, 0, 0]
    assert found["online_events"] == 600


def test_each_has_a_mean_and_an_error_over_the_seeds(report: dict[str, Any]) -> None:
    for one in report["results"][0]["served"]:
        assert 0.4 < one["auc"] < 1
        assert 0 <= one["error"] < 1
        assert math.isfinite(one["gain_error"])


def test_before_its_first_sync_a_server_answers_as_batch_only_does(report: dict[str, Any]) -> None:
    *_, later, batch_only = report["results"][0]["served"]
    assert later["auc"] == batch_only["auc"]
    assert later["gain"] == later["gain_error"] == 0


def test_after_a_sync_a_server_answers_differently(report: dict[str, Any]) -> None:
    second, minute, _, batch_only = report["results"][0]["served"]
    assert len({second["auc"], minute["auc"], batch_only["auc"]}) == 3


def test_the_picture_names_what_it_draws(report: dict[str, Any]) -> None:
    picture: Path = report["picture"]
    drawn = picture.read_text(encoding="utf-8")
    for text in ("1s", "1m", "5h", BATCH_ONLY):
        assert f"<!-- {text} -->" in drawn  # matplotlib draws letters as outlines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--intervals", "500ms"], "--intervals are whole seconds"),
        (["--intervals", "soon"], "soon"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--online-share", "1"], "--online-share must be above 0 and below 1"),
        (["--online-hours", "nan"], "--online-hours must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *words]) == 2
    assert said in capsys.readouterr().err
