"""Features of several columns are read where their rows are, and as the ones that are read in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data.lists import records
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith import native
from monolith.data import Records
from monolith.feature import FeatureIds, FeatureSpec, FloatFeature, IdFeature
from monolith.feature.spec.reading import Reading

NAN = float("nan")


def unmoved(some: Records) -> Records:
    """Return the same records as a batch has them that no one looked at."""
    rows = some.take(torch.arange(len(some)))
    assert rows.unmoved is not None
    return rows


def both_ways(spec: FeatureSpec, some: Records) -> tuple[Reading, Reading]:
    """Read records where they are, and column by column; check that both come to the same."""
    straight, slowly = spec.reader.read(unmoved(some)), spec.reader.read(some)
    assert list(straight.bad.items()) == list(slowly.bad.items())
    if not slowly.bad:
        assert_same(straight.batch().ids, slowly.batch().ids)
    return straight, slowly


def assert_same(ids: FeatureIds, others: FeatureIds) -> None:
    assert (ids.names, ids.shared, ids.event_time) == (others.names, others.shared, others.event_time)
    for one, other in (
        (ids.ids, others.ids),
        (ids.splits, others.splits),
        (ids.weights, others.weights),
        (ids.event_times, others.event_times),
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype is other.dtype
            assert torch.equal(one, other)


def as_text(row: list[Any]) -> list[bytes]:
    """A row as one text with separators."""
    return [b"|".join(value if isinstance(value, bytes) else str(value).encode() for value in row)]


# Weights

_WEIGHT = st.floats(-4, 4, width=32) | st.sampled_from([NAN, 0.5, 0.5])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-(1 << 40), 1 << 47), _WEIGHT), max_size=3).map(
            lambda pairs: ([item for item, _ in pairs], [weight for _, weight in pairs])
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["as they are", "as they are", "without", "one more", "infinite"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_weights_read_where_they_are_are_those_read_one_by_one(
    rows: list[tuple[list[int], list[float]]], last: str, as_texts: bool, fids: bool, hashes: bool
):
    items, weights = [list(of) for of, _ in rows], [list(of) for _, of in rows]
    changed = {"without": [], "one more": [*weights[-1], 2.0], "infinite": [float("inf")] * len(items[-1])}
    weights[-1] = changed.get(last, weights[-1])
    separator = "|" if as_texts or hashes else None
    cells: list[Any] = [as_text(row) for row in items] if as_texts or hashes else items
    given_weights: list[Any] = [as_text(row) for row in weights] if as_texts or hashes else weights
    spec = FeatureSpec(
        features={
            "tags": IdFeature(weights="w", separator=separator, kind="string" if hashes else "int"),
            "item": IdFeature(),
            "again": IdFeature(column="whole", weights="whole_w"),
            "plain": IdFeature(column="whole"),
            "price": FloatFeature(),
        },
        labels={},
        fids=fids,
    )
    some = records(
        tags=[*cells, as_text([7]) if separator else [7]],
        w=[*given_weights, as_text([0.5]) if separator else [0.5]],
        item=[[number] for number in range(len(rows) + 1)],
        whole=[*([5, 6] for _ in rows), []],
        whole_w=[*([2, -3] for _ in rows), []],
        price=[[1.0]] * (len(rows) + 1),
    )
    straight, _ = both_ways(spec, some)
    if not straight.bad and straight.packed is not None:
        assert straight.packed.names == ("item", "plain", "tags", "again")


def test_weights_are_read_without_moving_a_column(monkeypatch: pytest.MonkeyPatch):
    spec = FeatureSpec(
        features={"tags": IdFeature(weights="w"), "item": IdFeature(), "more": IdFeature(weights="v")},
        labels={},
    )
    some = records(
        tags=[[1, 2], [3], []],
        w=[[0.5, NAN], [], []],
        item=[[7], [8], [9]],
        more=[[4], [], [5, 6]],
        v=[[2], [], []],
    )
    wanted = spec.make(some).ids
    rows = unmoved(some)
    monkeypatch.setattr(native, "gather_rows", lambda *_: pytest.fail("a column was moved"))
    found = spec.make(rows).ids
    assert_same(found, wanted)
    assert found.names == ("item", "tags", "more")
    assert found.weights is not None
    assert found.weights.tolist() == [1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 2.0, 1.0, 1.0]


def test_weights_of_records_without_ids_are_there_and_empty():
    spec = FeatureSpec(features={"tags": IdFeature(weights="w")}, labels={})
    straight, _ = both_ways(spec, records(tags=[[], []], w=[[], []]))
    assert straight.packed is not None
    weights = straight.batch().ids.weights
    assert weights is not None
    assert weights.tolist() == []


def test_a_feature_behind_one_that_is_odd_stays_in_its_place():
    spec = FeatureSpec(
        features={
            "item": IdFeature(),
            "first": IdFeature(weights="w"),
            "odd": IdFeature(weights="w"),
            "last": IdFeature(weights="w"),
        },
        labels={},
    )
    plain = {"item": [[1], [2]], "first": [[1], [2]], "last": [[5], [6]], "w": [[0.5], [2.0]]}
    straight, _ = both_ways(spec, records(odd=[[3.0], [4.0]], **plain))
    assert straight.packed is not None
    assert straight.packed.names == ("item", "first")  # whole numbers as floats are read in Python
    assert straight.batch().ids.names == ("item", "first", "odd", "last")
