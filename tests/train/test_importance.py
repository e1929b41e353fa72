"""Permutation importance: what the metric loses when a feature is shuffled."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli.main import main
from monolith.feature import Batch, FeatureIds
from monolith.tensors import RaggedTensor
from monolith.train.importance import _shuffled


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which the item decides, the user helps a little, and a large price says nothing."""
    folder, rng = tmp_path_factory.mktemp("shop"), random.Random(5)
    lines = ["user,item,price,click"]
    for _ in range(4000):
        user, item = rng.randrange(20), rng.randrange(40)
        chance = 0.1 + 0.7 * (item % 2) + 0.15 * (user % 2)
        lines.append(f"u{user},i{item},{rng.uniform(0, 1000):.2f},{int(rng.random() < chance)}")
    (folder / "shop.csv").write_text("\n".join(lines) + "\n")
    (folder / "shop.toml").write_text(
        f'[data]\npath = "{folder}/shop.csv"\nsplit = {{ evaluate = 0.25 }}\n'
        '[features.user]\nkind = "string"\n[features.item]\nkind = "string"\n'
        '[features.price]\nscale = "standard"\n'
        '[labels.click]\n[model]\ntype = "deepfm"\ndim = 4\nhidden = [8]\n[task]\nbatch_size = 100\n'
        f'[train]\nmodel_dir = "{folder}/run"\nepochs = 4\n'
    )
    assert main(["train", "--config", str(folder / "shop.toml"), "--quiet"]) == 0
    return folder / "run"


def of(run: Path) -> list[str]:
    return ["--config", str(run.parent / "shop.toml")]


def insight(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> dict[str, Any]:
    assert main(["evaluate", "insight", str(run), *of(run), *words, "--quiet", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_feature_that_decides_comes_first_whatever_its_scale(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = insight(capsys, run)
    by_name = {one["feature"]: one for one in found["features"]}
    assert [one["feature"] for one in found["features"]][:2] == ["item", "user"]
    assert by_name["item"]["loss"] > 0.15
    assert abs(by_name["price"]["loss"]) < 0.02
    assert 0 < by_name["item"]["error"] < 0.02
    assert found["metric"] == "click/auc"


def test_a_person_gets_a_table_with_errors_and_a_picture(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--repeats", "2", "--png", str(tmp_path / "bars.png"), "--quiet"]
    assert main(["evaluate", "insight", str(run), *of(run), *words]) == 0
    said = capsys.readouterr().out
    assert "click/auc lost without it" in said
    assert "standard error" in said
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_one_repeat_has_no_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = insight(capsys, run, "--repeats", "1", "--examples", "100")
    assert {one["error"] for one in found["features"]} == {None}
    assert found["examples"] == 100


def test_no_repeats_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "insight", str(run), *of(run), "--repeats", "0", "--quiet"]) == 2
    assert "repeats must be at least 1" in capsys.readouterr().err


class TestShuffling:
    BATCHES = (
        Batch(
            FeatureIds.pack(
                {"tags": RaggedTensor.from_list([[1, 2], [], [3]]), "user": torch.tensor([7, 8, 9])},
                weights={"tags": torch.tensor([0.1, 0.2, 0.3])},
            ),
            {"price": torch.tensor([[1.0], [2.0], [3.0]])},
        ),
        Batch(
            FeatureIds.pack(
                {"tags": RaggedTensor.from_list([[4, 5, 6]]), "user": torch.tensor([10])},
                weights={"tags": torch.tensor([0.4, 0.5, 0.6])},
            ),
            {"price": torch.tensor([[4.0]])},
        ),
    )

    def test_whole_cells_move_with_their_weights_across_batches(self) -> None:
        seen = set()
        for seed in range(20):
            moved = list(_shuffled(self.BATCHES, "tags", torch.Generator().manual_seed(seed)))
            cells = [tuple(cell) for batch in moved for cell in batch.ids["tags"].to_list()]
            assert sorted(cells) == [(), (1, 2), (3,), (4, 5, 6)]
            for batch in moved:
                assert batch.ids.weights is not None
                tags = batch.ids["tags"].flat_values
                torch.testing.assert_close(batch.ids.weights[: len(tags)], tags / 10)
            assert [batch.ids["user"].flat_values.tolist() for batch in moved] == [[7, 8, 9], [10]]
            seen.add(tuple(cells))
        assert len(seen) > 5

    def test_numbers_move_and_nothing_else_does(self) -> None:
        moved = list(_shuffled(self.BATCHES, "price", torch.Generator().manual_seed(1)))
        prices = torch.cat([batch.floats["price"] for batch in moved]).flatten().tolist()
        assert sorted(prices) == [1.0, 2.0, 3.0, 4.0]
        assert prices != [1.0, 2.0, 3.0, 4.0]
        assert moved[0].ids is self.BATCHES[0].ids


def test_nothing_to_measure_on_is_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run.parent / "shop.toml").read_text().replace("evaluate = 0.25", "evaluate = 0.0")
    (tmp_path / "none.toml").write_text(text)
    assert main(["evaluate", "insight", str(run), "--config", str(tmp_path / "none.toml"), "--quiet"]) == 2
    assert "evaluate" in capsys.readouterr().err
