"""`monolith experiment quality`: what it trains, what it shows, and the AUC that defaults must keep."""

from __future__ import annotations

import inspect
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli.main import main
from monolith.model import EmbeddingCollection
from monolith.table import iterate
from monolith_bench import quality
from monolith_bench.collisions import click_log
from monolith_bench.learner import Learner, Recipe, aucs
from monolith_bench.movielens import RATINGS
from monolith_bench.options import ExperimentQualityOptions
from monolith_bench.public_sets import PACKAGES, Examples, click_examples, read_set
from monolith_bench.served_codings import CODINGS, rows_served_as
from monolith_bench.stream_baselines import BASELINES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a wheel whose ratings are a small click log: clicks are fives, the others ones."""
    log = click_log(1_000)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows = zip(log.users.tolist(), log.items.tolist(), log.likes.tolist(), strict=True)
    lines += [f"{user}\t{item}\t{5 if like else 1}\t{time}" for time, (user, item, like) in enumerate(rows)]
    found = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(found / "recbole-1.2.1-py3-none-any.whl", "w") as writing:
        writing.writestr(RATINGS, "\n".join(lines) + "\n")
    return str(found)


def report(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["experiment", "quality", "--seeds", "2", "--json", *words]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["results"]
    return found


def on_movielens(folder: str) -> list[str]:
    return ["--folder", folder, "--sets", "ml-100k", "--models", "deepfm"]


def test_each_protocol_has_means_and_errors_and_the_known_reference(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = report(capsys, *on_movielens(folder))
    assert [(one["model"], one["data"], one["protocol"]) for one in results] == [
        ("deepfm", "ml-100k", protocol) for protocol in ("random", "time", "stream")
    ]
    assert [one["reference"] for one in results] == [0.7872, 0.7108, None]
    for one in results:
        for part in ("valid", "test"):
            assert 0.3 < one[part]["auc"] < 1
            assert one[part]["error"] >= 0
    assert results[0]["test"]["error"] > 0  # seeds split differently


def test_a_set_without_numbers_is_not_measured_with_a_model_that_reads_them(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--folder", folder, "--sets", "ml-100k", "--protocols", "stream"]
    results = report(capsys, *words, "--models", "dlrm", "ffm")
    assert [one["model"] for one in results] == ["ffm"]


def test_a_quick_run_trains_every_model_without_any_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--protocols", "stream", "--folder", str(tmp_path)]
    results = report(capsys, *words)
    assert [one["model"] for one in results] == [
        "deepfm",
        "dcnv2",
        "dlrm",
        "ffm",
        "mmoe",
        "din",
        "sequence_ranker",
    ]


def test_a_sweep_shows_nothing_of_the_test(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "changes", lambda: {"defaults": Recipe(), "dim 8": Recipe().but(dim=8)})
    results = report(capsys, *on_movielens(folder), "--protocols", "stream", "--sweep")
    assert [one["settings"] for one in results] == ["defaults", "dim 8"]
    assert all("valid" in one and "test" not in one for one in results)


def test_a_sweep_may_compare_some_changes_alone(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*on_movielens(folder), "--protocols", "stream", "--sweep", "--changes", "decay of vectors 0"]
    results = report(capsys, *words)
    assert [one["settings"] for one in results] == [
        "defaults",
        "decay of vectors 0.1",
        "decay of vectors 0.3",
    ]


def test_every_change_differs_from_the_defaults_and_from_the_others() -> None:
    found = list(quality.changes().values())
    assert found[0] == Recipe()
    assert all(one not in found[:at] for at, one in enumerate(found))


def test_a_deepfm_with_defaults_is_compared_with_the_recipe(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = report(capsys, *on_movielens(folder), "--protocols", "stream", "--recipes")
    assert [one["settings"] for one in results] == ["defaults", "recipe"]


def test_prefetch_with_fresh_rows_is_compared_with_none_and_with_rows_looked_up_ahead(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh, none, ahead = report(capsys, *on_movielens(folder), "--prefetch")
    assert [one["settings"] for one in (fresh, none, ahead)] == list(quality.PREFETCH)
    assert (fresh["valid"], fresh["test"]) == (none["valid"], none["test"])
    assert fresh["test"] != ahead["test"]
    assert all(one["examples_per_s"] > 0 for one in (fresh, none, ahead))


def test_rows_of_exports_are_compared_with_rows_as_trained(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, *_ = report(capsys, *on_movielens(folder), "--protocols", "random")
    exported = report(capsys, *on_movielens(folder), "--protocols", "random", "stream", "--codings")
    assert [one["settings"] for one in exported] == list(CODINGS)
    assert (exported[0]["valid"], exported[0]["test"]) == (plain["valid"], plain["test"])
    assert {one["valid"]["auc"] for one in exported} == {plain["valid"]["auc"]}
    assert exported[3]["test"] != plain["test"]


def test_a_model_whose_rows_were_served_trains_on_with_its_own() -> None:
    data = click_examples(2_000)
    learner = Learner(Recipe(), data, 0)
    some = torch.arange(len(data))
    learner.train(some)
    before = learner.scores(some)
    with rows_served_as(learner.model, "int4"):
        assert not torch.equal(learner.scores(some), before)
    assert torch.equal(learner.scores(some), before)
    (model,) = [one for one in learner.model.modules() if isinstance(one, EmbeddingCollection)]
    store: Any = model.store
    states = [torch.cat([rows.state for rows in iterate(store.table(name))]) for name in store.tables]
    assert all(bool((state > 0.1).any()) for state in states), "what Adagrad has added up"


def test_baselines_are_compared_in_streams_with_the_same_batches(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_alone = {"torch deepfm": {"Adam 0.01": BASELINES["torch deepfm"]["Adam 0.01"]}}
    monkeypatch.setattr(quality, "BASELINES", torch_alone)
    words = [*on_movielens(folder), "--protocols", "time", "stream", "--baselines", "torch"]
    results = report(capsys, *words)
    assert [(one["model"], one["protocol"], one["settings"]) for one in results] == [
        ("deepfm", "time", "defaults"),
        ("deepfm", "stream", "defaults"),
        ("deepfm", "stream", "rates of rows 0.1"),
        ("torch deepfm", "stream", "Adam 0.01"),
    ]
    smaller = report(capsys, *words, "--batch", "64")
    assert [one["settings"] for one in smaller] == [
        "batches of 64",
        "batches of 64",
        "rates of rows 0.1",
        "Adam 0.01",
    ]
    assert all(one["test"] != other["test"] for one, other in zip(results, smaller, strict=True))


@pytest.mark.parametrize(
    "words",
    [
        ["--quick", "--batch", "0"],
        ["--quick", "--batch", "8", "--sweep"],
        ["--quick", "--baselines", "torch", "--sweep"],
        ["--quick", "--baselines", "torch", "--protocols", "random"],
        ["--seeds", "0"],
        ["--sweep", "--codings"],
        ["--sweep", "--prefetch"],
        ["--quick", "--changes", "decay"],
        ["--quick", "--sweep", "--changes", "deacy"],
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str]) -> None:
    assert main(["experiment", "quality", *words]) == 2


@pytest.mark.parametrize("old", ["defaults", "movielens"])
def test_old_names_of_the_command_still_work(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["experiment", old, "--quick", "--seeds", "1", "--models", "ffm", "--protocols", "stream"]) == 0
    )
    assert f"`monolith experiment {old}` is now `monolith experiment quality`" in capsys.readouterr().err


EXPECTED = json.loads((Path(__file__).parent / "expected_quality.json").read_text())
"""AUC of valid, by model, set and protocol, of the defaults with seed 0."""
FOLDER = os.environ.get("QUALITY_SETS")


def check_expected(expected: dict[str, Any], data: Examples) -> None:
    """Compare what the defaults reach with what they have reached before."""
    model, protocol = expected["model"], expected["protocol"]
    made = data.made_for(model, protocol, 0)
    assert made is not None
    found = aucs(protocol, Recipe(), made, 0, model).valid
    assert found == pytest.approx(expected["auc"], abs=EXPECTED["tolerance"]), (
        f"{model} with its defaults reaches {found:.4f} on {expected['data']}, {protocol}, and reached "
        f"{expected['auc']:.4f} before. If the change is meant, measure it on several sets with "
        "`monolith experiment quality`, and set the new value in expected_quality.json"
    )


@pytest.mark.parametrize("expected", EXPECTED["clicks"], ids=lambda one: f"{one['model']}-{one['protocol']}")
def test_defaults_keep_their_quality_on_clicks(expected: dict[str, Any]) -> None:
    check_expected(expected, click_examples(EXPECTED["examples"]))


@pytest.mark.soak
@pytest.mark.skipif(
    FOLDER is None, reason=f"no public sets: {PACKAGES}, and name their folder in QUALITY_SETS"
)
@pytest.mark.parametrize(
    "expected", EXPECTED["downloaded"], ids=lambda one: f"{one['data']}-{one['model']}-{one['protocol']}"
)
def test_defaults_keep_their_quality_on_public_sets(expected: dict[str, Any]) -> None:
    check_expected(expected, read_set(expected["data"], Path(str(FOLDER))))


def test_every_model_of_the_command_has_an_expected_quality() -> None:
    default = inspect.signature(ExperimentQualityOptions).parameters["models"].default
    assert {one["model"] for one in EXPECTED["clicks"]} == set(default)
