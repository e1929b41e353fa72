"""Means and quantiles are learned in one pass, and the same of the same data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from data.lists import records

from monolith.data import Records
from monolith.errors import DataError
from monolith.feature import BucketFeature, FeatureSpec, FloatFeature, IdFeature
from monolith.feature.spec import fitting

SPEC = FeatureSpec(
    features={
        "x": FloatFeature(scale="standard"),
        "pair": FloatFeature(scale="standard", width=2),
        "tenth": BucketFeature(column="x", quantiles=10),
        "set": BucketFeature(column="x", boundaries=(1.0,), quantiles=3),
        "item": IdFeature(),
    },
    labels={},
)


def rows(values: Any, size: int) -> Iterator[Records]:
    for begin in range(0, len(values), size):
        some = values[begin : begin + size].tolist()
        yield records(
            x=[[value] for value in some],
            pair=[[value, 2 * value] for value in some],
            item=[[1] for _ in some],
        )


def feature(spec: FeatureSpec, name: str) -> Any:
    return spec.features[name]


def test_means_and_deviations_are_those_of_the_data():
    values = np.random.default_rng(0).normal(1000, 3, 5000)
    fitted = SPEC.fit(rows(values, 700), show=False)
    stored = values.astype(np.float32)
    assert feature(fitted, "x").mean == pytest.approx([stored.mean(dtype=np.float64)], rel=1e-5)
    assert feature(fitted, "x").std == pytest.approx([stored.std(dtype=np.float64)], rel=1e-4)
    assert feature(fitted, "pair").mean == pytest.approx([values.mean(), 2 * values.mean()], rel=1e-5)
    assert fitted.to_learn == ()
    assert fitted.features["item"] is SPEC.features["item"]
    assert feature(fitted, "set").boundaries == (1.0,)  # what is set stays


def test_quantiles_make_buckets_of_one_size():
    values = np.random.default_rng(1).exponential(5, 2000)
    fitted = SPEC.fit(rows(values, 300), show=False)
    batch = fitted.make(next(rows(values, 2000)))
    counts = np.bincount(batch.ids["tenth"].flat_values.numpy())
    assert counts.tolist() == [200] * 10


def test_the_same_data_gives_the_same_spec_in_any_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fitting, "SAMPLE", 100)
    values = np.random.default_rng(2).normal(0, 1, 1000)
    fitted = [SPEC.fit(rows(values, size), show=False) for size in (1000, 7, 333)]
    assert fitted[0] == fitted[1] == fitted[2]
    assert fitted[0] == FeatureSpec.from_json(fitted[0].to_json())
    middle = feature(fitted[0], "tenth").boundaries[4]
    assert abs((values < middle).mean() - 0.5) < 0.2  # of a sample of a hundred


def test_what_cannot_be_read_counts_as_none():
    spec = FeatureSpec(features={"x": FloatFeature(scale="standard")}, labels={})
    some = records(x=[[1.0], [float("nan")], [], [3.0], [1.0, 2.0]])
    assert feature(spec.fit([some], show=False), "x").mean == (2.0,)


@pytest.mark.parametrize("one", [FloatFeature(scale="standard"), BucketFeature(quantiles=4)])
def test_no_numbers_at_all_are_an_error(one: Any):
    spec = FeatureSpec(features={"x": one}, labels={})
    with pytest.raises(DataError, match=r"features\.x: column 'x' has no"):
        spec.fit([records(y=[[1.0]])], show=False)


def test_a_spec_with_nothing_to_learn_reads_nothing():
    spec = FeatureSpec(features={"x": FloatFeature()}, labels={})

    def never() -> Iterator[Records]:
        raise AssertionError
        yield

    assert spec.fit(never()) is spec
