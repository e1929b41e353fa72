"""`monolith experiment movielens`: which protocols it runs and what it shows of them."""

from __future__ import annotations

import json
import zipfile
from typing import Any

import pytest

from monolith.cli.main import main
from monolith_bench import quality
from monolith_bench.collisions import click_log
from monolith_bench.movielens import RATINGS, Recipe


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A wheel whose ratings are a small click log: clicks are fives, the others ones."""
    log = click_log(1_000)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows = zip(log.users.tolist(), log.items.tolist(), log.likes.tolist(), strict=True)
    lines += [f"{user}\t{item}\t{5 if like else 1}\t{time}" for time, (user, item, like) in enumerate(rows)]
    path = tmp_path_factory.mktemp("wheel") / "recbole-1.2.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as writing:
        writing.writestr(RATINGS, "\n".join(lines) + "\n")
    return str(path)


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["experiment", "movielens", "--seeds", "2", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_protocol_has_means_and_errors(wheel: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = report(capsys, "--wheel", wheel)["results"]
    assert [one["protocol"] for one in results] == ["random", "time", "stream"]
    for one in results:
        for part in ("valid", "test"):
            assert 0.3 < one[part]["auc"] < 1
            assert one[part]["error"] >= 0
    assert results[0]["test"]["error"] > 0  # seeds split differently


def test_a_sweep_shows_nothing_of_the_test(
    wheel: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "variants", lambda: {"defaults": Recipe(), "dim 8": Recipe(dim=8)})
    results = report(capsys, "--wheel", wheel, "--protocols", "stream", "--sweep")["results"]
    assert [one["settings"] for one in results] == ["defaults", "dim 8"]
    assert all("valid" in one and "test" not in one for one in results)


def test_the_defaults_are_compared_with_the_recipe(wheel: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = report(capsys, "--wheel", wheel, "--protocols", "stream", "--defaults")["results"]
    assert [one["settings"] for one in results] == ["recipe", "defaults"]


def test_prefetch_with_fresh_rows_is_compared_with_none_and_with_rows_looked_up_ahead(
    wheel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh, none, ahead = report(capsys, "--wheel", wheel, "--prefetch")["results"]
    assert [one["settings"] for one in (fresh, none, ahead)] == list(quality.PREFETCH)
    assert (fresh["valid"], fresh["test"]) == (none["valid"], none["test"])
    assert fresh["test"] != ahead["test"]
    assert all(one["examples_per_s"] > 0 for one in (fresh, none, ahead))
