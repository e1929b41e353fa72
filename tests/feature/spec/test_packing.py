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
from monolith.feature import (
    FeatureIds,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    SequenceFeature,
)
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


# Sequences and histories

_ODD = ["as it is", "as it is", "one more", "empty", "unread"]
_STEPS = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 3 * 10**9)), max_size=5)


def spoilt(rows: list[list[Any]], odd: str, unread: Any) -> list[list[Any]]:
    """Change the last row."""
    last = {"one more": [*rows[-1], 5], "empty": [], "unread": [unread]}.get(odd, rows[-1])
    return [*rows[:-1], last]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(_STEPS, min_size=1, max_size=4),
    st.lists(st.sampled_from([[10**9], [2 * 10**9], [10**12], []]), min_size=4, max_size=4),
    st.sampled_from(_ODD),
    st.sampled_from(["first", "last"]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_sequences_and_gaps_read_where_they_are_are_those_read_one_by_one(
    rows: list[list[tuple[int, int]]],
    events: list[list[int]],
    odd: str,
    keep: Any,
    length: int,
    as_texts: bool,
    fids: bool,
):
    items: list[list[Any]] = [[item for item, _ in row] for row in rows]
    times = spoilt([[time for _, time in row] for row in rows], odd, b"soon" if as_texts else -1)
    if as_texts:
        items, times = [as_text(row) for row in items], [as_text(row) for row in times]
    separator = "|" if as_texts else None
    spec = FeatureSpec(
        features={
            "item": IdFeature(),
            "seen": SequenceFeature(
                length=length, keep=keep, times="at", gaps=(10.0, 1e6), separator=separator
            ),
            "tags": IdFeature(weights="w"),
            "words": SequenceFeature(length=length, keep=keep, column="said", kind="string"),
        },
        labels={},
        event_time="now",
        fids=fids,
    )
    some = records(
        item=[[number] for number in range(len(rows) + 1)],
        seen=[*items, as_text([1, 2]) if as_texts else [1, 2]],
        at=[*times, as_text([10**9, 10**8]) if as_texts else [10**9, 10**8]],
        now=[*events[: len(rows)], [10**9]],
        tags=[[3]] * (len(rows) + 1),
        w=[[0.5]] * (len(rows) + 1),
        said=[*([b"a", b"", b"b", b"c"] for _ in rows), []],
    )
    straight, _ = both_ways(spec, some)
    if odd == "as it is" and not straight.bad:
        assert straight.packed is not None
        assert straight.packed.names == ("item", "seen", "seen.gap", "tags", "words")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.binary(max_size=4), st.integers(0, 99), st.integers(0, 3 * 10**9)), max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(_ODD),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_histories_read_where_they_are_are_those_read_one_by_one(
    rows: list[list[tuple[bytes, int, int]]], odd: str, most: int, as_texts: bool, fids: bool
):
    items: list[list[Any]] = [[item.replace(b"|", b"") for item, _, _ in row] for row in rows]
    actions: list[list[Any]] = [[action for _, action, _ in row] for row in rows]
    times = spoilt([[time for _, _, time in row] for row in rows], odd, b"soon" if as_texts else -1)
    lists = [[*items, [b"a", b"b"]], [*actions, [1, 2]], [*times, [5, 6]]]
    is_whole = all(len(item) > 0 for row in items for item in row)  # a value of each list at each step
    if as_texts:
        lists = [[as_text(row) for row in each] for each in lists]
    spec = FeatureSpec(
        features={
            "item": IdFeature(kind="string"),
            "action": IdFeature(),
            "history": HistoryFeature(
                of="item", max=most, with_=("action", "at"), separator="|" if as_texts else None
            ),
        },
        labels={},
        event_time="at",
        fids=fids,
    )
    size = len(rows) + 1
    columns = dict(zip(("history", "history__action", "history__time"), lists, strict=True))
    straight, _ = both_ways(
        spec, records(item=[[b"x"]] * size, action=[[1]] * size, at=[[10**9]] * size, **columns)
    )
    if odd == "as it is" and is_whole:
        assert straight.packed is not None
        assert straight.packed.names == ("item", "action", "history", "history.action", "history.time")


@pytest.mark.parametrize("separator", [None, "|"])
def test_sequences_and_histories_are_read_without_moving_a_column(
    separator: str | None, monkeypatch: pytest.MonkeyPatch
):
    spec = FeatureSpec(
        features={
            "item": IdFeature(),
            "seen": SequenceFeature(length=2, times="seen_at", gaps=(10.0,), separator=separator),
            "history": HistoryFeature(of="item", max=2, with_=("now",), separator=separator),
        },
        labels={},
        event_time="now",
    )
    lists: dict[str, list[list[Any]]] = {
        "seen": [[1, 2, 3], [], [4]],
        "seen_at": [[970, 980, 995], [], [1]],
        "history": [[7, 8, 9], [5], []],
        "history__time": [[1, 2, 3], [4], []],
    }
    if separator is not None:
        lists = {name: [as_text(row) for row in rows] for name, rows in lists.items()}
    some = records(item=[[1], [2], [3]], now=[[1000], [1000], []], **lists)
    wanted = spec.make(some).ids
    rows = unmoved(some)
    monkeypatch.setattr(native, "gather_rows", lambda *_: pytest.fail("a column was moved"))
    found = spec.make(rows).ids
    assert_same(found, wanted)
    assert found["seen"].to_list() == [[2, 3], [], [4]]
    assert found["seen.gap"].to_list() == [[1, 0], [], []]  # no gap without the time of the event
    assert found["history"].to_list() == [[8, 9], [5], []]
    assert found["history.time"].to_list() == [[2, 3], [4], []]


def test_the_form_of_times_in_lists_is_said_once(caplog: pytest.LogCaptureFixture):
    spec = FeatureSpec(
        features={"item": IdFeature(), "history": HistoryFeature(of="item", max=2, with_=("now",))},
        labels={},
        event_time="now",
    )
    some = records(item=[[1]], now=[[10**9]], history=[[1, 2]], history__time=[[10**12, 5]])
    with caplog.at_level("INFO"):
        for _ in range(2):
            spec.make(unmoved(some))
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "column 'history.time': its times are recognised as Unix milliseconds"
    ]


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
