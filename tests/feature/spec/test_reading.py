"""Raw columns become batches; what cannot be read is named, with the record and the reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from data.lists import records
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith import native
from monolith.data import Records
from monolith.errors import DataError
from monolith.feature import (
    Batch,
    BucketFeature,
    CrossFeature,
    FeatureSpec,
    FloatFeature,
    IdFeature,
    Label,
    SequenceFeature,
    hash_strings,
    make_fid,
    slot_of,
)
from monolith.feature.spec.packing import Packer
from monolith.tensors import RaggedTensor


def spec(event_time: str | None = None, fids: bool = False, **features: Any) -> FeatureSpec:
    return FeatureSpec(features=features, labels={}, event_time=event_time, fids=fids)


def ids(batch: Batch, name: str) -> list[list[int]]:
    return batch.ids[name].to_list()


def hashed(*texts: str) -> list[int]:
    return hash_strings(texts).tolist()


def bad(one: FeatureSpec, some: Records) -> dict[int, str]:
    return one.reader.read(some).bad


# Ids


def test_whole_numbers_stay_as_they_are():
    batch = spec(item=IdFeature()).make(records(item=[[3], [], [7, 1 << 50]]))
    assert ids(batch, "item") == [[3], [], [7, 1 << 50]]


def test_strings_have_the_id_that_hash_strings_gives_them():
    batch = spec(user=IdFeature(kind="string")).make(records(user=[[b"ann"], [], [b"bob", b"ann"], [b""]]))
    assert ids(batch, "user") == [hashed("ann"), [], hashed("bob", "ann"), []]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=20).filter(lambda text: b"|" not in text)), min_size=1))
def test_a_list_in_one_text_reads_as_the_list_it_is(rows: list[list[bytes]]):
    rows = [*rows, [b"some"]]
    lists = spec(tags=IdFeature(kind="string")).make(records(tags=rows))
    texts = spec(tags=IdFeature(kind="string", separator="|")).make(
        records(tags=[[b"|".join(row)] for row in rows])
    )
    wanted = [hash_strings([text for text in row if text]).tolist() for row in rows]
    assert ids(lists, "tags") == ids(texts, "tags") == wanted


def test_numbers_in_a_text_are_read():
    batch = spec(item=IdFeature(separator="|")).make(records(item=[[b"3| 9"], [b""], [b"-1"]]))
    assert ids(batch, "item") == [[3, 9], [], [-1]]


def test_fids_carry_their_slot():
    one = spec(
        fids=True, user=IdFeature(kind="string"), item=IdFeature(slot=5), age=BucketFeature(boundaries=(2.0,))
    )
    batch = one.make(records(user=[[b"ann"]], item=[[3]], age=[[7.0]]))
    assert ids(batch, "user") == [hash_strings(["ann"], slot=one.slots["user"]).tolist()]
    assert ids(batch, "item") == [[make_fid(5, 3)]]
    assert slot_of(ids(batch, "age")[0][0]) == one.slots["age"]
    assert (
        "does not fit into the 48 bits" in bad(one, records(user=[[b"a"]], item=[[1 << 50]], age=[[1.0]]))[0]
    )


def test_weights_are_next_to_their_items():
    one = spec(tags=IdFeature(weights="w"), item=IdFeature())
    batch = one.make(records(tags=[[1, 2], [3]], w=[[0.5, 2.0], [3.0]], item=[[7], [8]]))
    assert batch.ids.weights is not None
    assert dict(zip(batch.ids.ids.tolist(), batch.ids.weights.tolist(), strict=True)) == {
        1: 0.5,
        2: 2.0,
        3: 3.0,
        7: 1.0,
        8: 1.0,
    }
    texts = spec(tags=IdFeature(weights="w", separator="|"))
    batch = texts.make(records(tags=[[b"1|2"], [b""]], w=[[b"0.5|2"], [b""]]))
    assert batch.ids.weights is not None
    assert batch.ids.weights.tolist() == [0.5, 2.0]


def test_numbers_fall_into_buckets():
    one = spec(age=BucketFeature(boundaries=(18.0, 30.0)), big=BucketFeature(boundaries=(float(1 << 40),)))
    batch = one.make(records(age=[[17.5], [18.0], [], [99.0]], big=[[(1 << 40) - 1], [1 << 40], [], [0]]))
    assert ids(batch, "age") == [[0], [1], [], [2]]
    assert ids(batch, "big") == [[0], [1], [], [0]]  # as whole numbers: no float is as exact


def test_a_cross_is_an_id_for_every_pair():
    one = spec(a=IdFeature(), b=IdFeature(kind="string"), both=CrossFeature(of=("a", "b")))
    batch = one.make(records(a=[[1, 2], [1], []], b=[[b"x"], [b"x", b"y"], [b"x"]]))
    first, second, third = ids(batch, "both")
    assert (len(first), len(second), third) == (2, 2, [])
    assert first[0] == second[0]
    assert len({*first, *second}) == 3
    few = spec(a=IdFeature(), b=IdFeature(), both=CrossFeature(of=("a", "b"), most=1))
    assert "more than 1 crosses of 2 and 1 ids" in bad(few, records(a=[[1, 2], [3]], b=[[4], [5]]))[0]


@pytest.mark.parametrize(("keep", "kept"), [("first", [[1, 2], [4]]), ("last", [[2, 3], [4]])])
def test_a_sequence_keeps_some_of_its_ids(keep: Any, kept: list[list[int]]):
    batch = spec(seen=SequenceFeature(length=2, keep=keep)).make(records(seen=[[1, 2, 3], [4]]))
    assert ids(batch, "seen") == kept


def test_time_gaps_become_a_feature():
    one = spec(event_time="now", seen=SequenceFeature(length=2, times="at", gaps=(10.0, 100.0)))
    some = records(seen=[[1, 2, 3], []], at=[[900, 989, 995], []], now=[[1000], [1000]])
    batch = one.make(some)
    assert ids(batch, "seen.gap") == [[1, 0], []]
    assert batch.ids.event_time == 1000
    # Without an event time, or without the times, there are no gaps.
    batch = one.make(records(seen=[[1, 2], [3], [4]], at=[[1, 2], [], [970]], now=[[], [1000], [1000]]))
    assert ids(batch, "seen") == [[1, 2], [3], [4]]
    assert ids(batch, "seen.gap") == [[], [], [1]]
    assert batch.ids.event_times.tolist() == [0, 1000, 1000]
    batch = spec(event_time="now", seen=IdFeature()).make(records(seen=[[1]] * 3, now=[[7, 9], [], [5]]))
    assert batch.ids.event_times.tolist() == [9, 0, 5]
    assert batch.ids.example_times().tolist() == [9, 9, 5]
    wrong = bad(one, records(seen=[[1], [1]], at=[[2, 3], [1]], now=[[5], [5, 6]]))
    assert "1 items, and 2 values in column 'at'" in wrong[0]
    assert "several event times in 'now'" in wrong[1]


def test_a_shared_column_is_read_once():
    one = spec(
        user=IdFeature(kind="string"),
        item=IdFeature(),
        both=CrossFeature(of=("user", "item")),
        age=FloatFeature(),
    )
    batch = one.make(records(["user", "age"], user=[[b"ann"]], item=[[1], [2], [3]], age=[[4.0]]))
    assert batch.ids.shared == (True, False, False)
    assert [len(row) for row in ids(batch, "both")] == [1, 1, 1]
    assert batch.floats["age"].tolist() == [[4.0]] * 3


# Numbers, labels, times


def test_numbers_are_scaled():
    one = spec(
        raw=FloatFeature(column="x"),
        log=FloatFeature(column="x", scale="log"),
        standard=FloatFeature(column="x", scale="standard", mean=(1.0,), std=(2.0,)),
        pair=FloatFeature(width=2, missing=-1.0),
    )
    batch = one.make(records(x=[[3.0], [-1.0], []], pair=[[1.0, 2.0], [], [3.0, 4.0]]))
    assert batch.floats["raw"].tolist() == [[3.0], [-1.0], [0.0]]
    torch.testing.assert_close(batch.floats["log"], torch.tensor([[math.log(4)], [-math.log(2)], [0.0]]))
    assert batch.floats["standard"].tolist() == [[1.0], [-1.0], [0.0]]
    assert batch.floats["pair"].tolist() == [[1.0, 2.0], [-1.0, -1.0], [3.0, 4.0]]


def test_numbers_that_are_not_there_are_counted():
    one = FeatureSpec(
        features={"x": FloatFeature(), "age": FloatFeature(), "may_lack": FloatFeature()},
        labels={},
        optional=("may_lack",),
    )
    one.make(records(["age"], x=[[3.0], []], age=[[]]))
    assert one.reader.empty.counts == {"x": 1, "age": 2}


def test_labels_may_be_made_of_a_threshold():
    one = FeatureSpec(
        features={"item": IdFeature()},
        labels={"like": Label(column="rating", at_least=4.0), "rating": Label()},
    )
    batch = one.make(records(item=[[1], [2]], rating=[[4.0], [3.5]]))
    assert batch.labels["like"].tolist() == [1.0, 0.0]
    assert batch.labels["rating"].tolist() == [4.0, 3.5]


def test_examples_are_grouped_by_a_feature():
    one = FeatureSpec(features={"user": IdFeature()}, labels={}, group="user")
    groups = one.groups(one.make(records(user=[[7], [], [8, 9]])))
    assert groups is not None
    assert groups.tolist() == [7, 0, 8]


# Bad input


@pytest.mark.parametrize(
    ("feature", "cells", "reason"),
    [
        (IdFeature(), [b"17", b"seven"], "has 'seven', which is not a whole number; if its ids are strings"),
        (IdFeature(separator="|"), [b"1|2", b"1|x"], "has '1|x', which is not a whole number"),
        (FloatFeature(), [1.0, float("inf")], "column 'x' is [inf]"),
        (FloatFeature(), [b"1.5", b"cheap"], "has 'cheap', which is not a number"),
        (BucketFeature(boundaries=(1.0,)), [1.0, float("inf")], "column 'x' is [inf]"),
    ],
)
def test_a_value_that_cannot_be_read_names_its_record(feature: Any, cells: list[Any], reason: str):
    one, some = spec(x=feature), records(x=[[cell] for cell in cells])
    assert list(bad(one, some)) == [1]
    assert reason in bad(one, some)[1]
    with pytest.raises(DataError, match=r"record 1 of 2 is bad: features\.x"):
        one.make(some)


def test_lists_of_another_length_are_bad():
    weighted = spec(x=IdFeature(weights="w"))
    assert "2 items, and 1 values in column 'w'" in bad(weighted, records(x=[[1, 2]], w=[[1.0]]))[0]
    wide = spec(x=FloatFeature(width=2))
    assert "has 1 numbers, not 2" in bad(wide, records(x=[[1.0, 2.0], [1.0]]))[1]
    whole = spec(x=FloatFeature(missing=None))
    assert "has no value; say what that means with `missing`" in bad(whole, records(x=[[1.0], []]))[1]


@pytest.mark.parametrize(
    ("feature", "cells", "message"),
    [
        (
            IdFeature(kind="string"),
            [[3]],
            r'has whole numbers, and the feature hashes strings\. Say kind = "int"',
        ),
        (IdFeature(), [[3.5]], "has numbers, and ids are whole numbers.*FloatFeature"),
        (FloatFeature(scale="standard"), [[3.5]], "to be learned from data first"),
    ],
)
def test_a_column_of_another_type_is_an_error(feature: Any, cells: Any, message: str):
    with pytest.raises(DataError, match=message):
        spec(x=feature).make(records(x=cells))


def test_a_missing_column_is_an_error_unless_it_is_optional():
    one = spec(x=IdFeature(), y=IdFeature(kind="string"))
    with pytest.raises(DataError, match=r"no column 'y'; they have x.*optional=\['y'\]"):
        one.make(records(x=[[1]]))
    relaxed = FeatureSpec(features=one.features, labels={}, optional=("y",))
    assert ids(relaxed.make(records(x=[[1]])), "y") == [[]]


def test_event_times_and_labels_that_cannot_be_are_bad():
    one = FeatureSpec(features={"x": IdFeature()}, labels={"y": Label()}, event_time="t")
    found = bad(one, records(x=[[1], [2], [3]], y=[[1.0], [float("inf")], [0.0]], t=[[5], [5], [-1]]))
    assert found[1] == "label 'y' is [inf]"
    assert "event time 't' must be Unix seconds" in found[2]


# All at once


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.binary(max_size=12)),
            st.lists(st.integers(-(1 << 63), (1 << 63) - 1)),
            st.lists(st.floats(width=32), max_size=1) | st.just([2.5]),
            st.integers(-(1 << 60), 1 << 60),
            st.sampled_from([[0], [0], [1], [1], [2], []]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from(["binary", "mse", "log", None]),
)
def test_features_read_at_once_are_those_read_one_by_one(rows: list[Any], fids: bool, loss: Any):
    one = replace(
        spec(
            fids=fids,
            text=IdFeature(kind="string"),
            split=IdFeature(column="text", kind="string", separator="a"),
            item=IdFeature(),
            bucket=BucketFeature(column="number", boundaries=(-1.0, 0.1, 0.7, 5.0)),
            big=BucketFeature(column="whole", boundaries=(0.0, float(1 << 50))),
            number=FloatFeature(),
            pair=FloatFeature(width=2, missing=1.0),
            log=FloatFeature(column="number", scale="log", missing=-1.0),
            whole=FloatFeature(scale="standard", mean=(1.0,), std=(3.0,)),
            both=CrossFeature(of=("text", "bucket"), most=50),
        ),
        labels={
            "click": Label(loss=loss),
            "far": Label(column="number", at_least=0.5),
            "maybe": Label(column="number", loss="huber"),
        },
        optional=("number",),
    )
    texts, items, numbers, whole, clicks = zip(*rows, strict=True)
    some = records(
        text=[*texts, [b"x"]],
        item=[*items, [1]],
        number=[*numbers, [0.7]],
        pair=[*([0.5, 1.5] for _ in rows), []],
        whole=[*([value] for value in whole), [7]],
        click=[*clicks, [1]],
    )
    unmoved = some.take(torch.arange(len(some)))
    at_once, straight = one.reader.read(some), one.reader.read(unmoved)
    assert straight.packed is None or unmoved.unmoved is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packer, "ids", lambda *_: None)
        patch.setattr(Packer, "floats", lambda *_: None)
        slowly = one.reader.read(some)
    for quickly in (at_once, straight):
        assert quickly.bad == slowly.bad
        assert list(quickly.floats) == list(slowly.floats)
        assert list(quickly.labels) == list(slowly.labels)
        assert quickly.empty == slowly.empty
        for task, values in slowly.labels.items():
            assert torch.equal(quickly.labels[task].nan_to_num(-9), values.nan_to_num(-9))
        if slowly.bad:
            continue
        for name in one.ids:
            assert quickly.ids_of(name).to_list() == slowly.ids_of(name).to_list()
            assert ids(quickly.batch(), name) == ids(slowly.batch(), name)
        for name in one.floats:
            assert torch.equal(quickly.floats[name], slowly.floats[name])


_TIMES = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([10**8, 10**11, 10**14, 10**17]).flatmap(lambda n: st.integers(n - 2, n + 2)),
    st.integers(10**9, 2 * 10**9).flatmap(lambda n: st.sampled_from([n, n * 10**3, n * 10**6, n * 10**9])),
    st.sampled_from([(1 << 32) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63)]),
)
_ISO = ["2024-05-01", "2024-05-01T10:00:00", "2024-02-30", "2024-05-01 23:59:59Z", "1969-12-31", "0001-01-01"]
_OTHER = [
    "2024-05-01T10:00:00+02:00",
    "2024-05-01T10:00:00.5",
    "12.5",
    "1714557600.9",
    "word",
    "",
    " 7",
    "+7",
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.just([]) | st.lists(_TIMES, min_size=1, max_size=1), min_size=1, max_size=4)
    | st.lists(st.lists(_TIMES, max_size=2), min_size=1, max_size=4),
    st.lists(st.sampled_from([*_ISO, *_ISO, *_OTHER]), max_size=2),
    st.booleans(),
    st.sampled_from(["auto", "iso", "s", "ms", "us", "ns"]),
    st.lists(
        st.lists(st.floats(width=32), min_size=2, max_size=2) | st.lists(st.floats(width=32), max_size=3),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_times_and_wide_numbers_read_where_they_are_are_those_read_one_by_one(
    times: list[Any], odd: list[str], as_texts: bool, unit: Any, pairs: list[Any], missing: bool
):
    size = max(len(times) + len(odd), len(pairs))
    one = FeatureSpec(
        features={
            "item": IdFeature(),
            "pair": FloatFeature(width=2, missing=0.0 if missing else None, scale="log"),
            "text": FloatFeature(width=2, missing=0.0, separator="|"),
            "one": FloatFeature(column="text_one", missing=0.0),
            "items": SequenceFeature(length=3, times="at_items"),
        },
        labels={},
        event_time="at",
        event_time_unit=unit,
    )
    if as_texts:
        rows = [[str(time).encode() for time in row] for row in times] + [[text.encode()] for text in odd]
    else:
        rows = times
    texts = [[b"|".join(str(number).encode() for number in row)] for row in pairs]
    given = records(
        item=[[number] for number in range(size)],
        at=rows + [[rows[0][0]] if rows[0] else []] * (size - len(rows)),
        pair=pairs + [[1.0, 2.0]] * (size - len(pairs)),
        text=texts + [[b"1|2"]] * (size - len(texts)),
        text_one=[[b"3"], *[[b"0.5"]] * (size - 1)],
        items=[[1, 2]] * size,
        at_items=[[1714557600, 1714557601]] * size,
    )
    unmoved = given.take(torch.arange(size))
    assert unmoved.unmoved is not None
    straight, slowly = one.reader.read(unmoved), one.reader.read(given)
    assert straight.bad == slowly.bad
    assert straight.empty == slowly.empty
    assert straight.event_times is not None
    assert torch.equal(straight.event_times, slowly.event_times)
    for name, numbers in slowly.floats.items():
        assert torch.equal(straight.floats[name].nan_to_num(-9), numbers.nan_to_num(-9))
    if not slowly.bad:
        for name in one.ids:
            assert straight.ids_of(name).to_list() == slowly.ids_of(name).to_list()


@pytest.mark.parametrize(
    "at", [[[5], [6], []], [[b"1714557600"], [b""], [b"9"]], [[b"2024-05-01"], [b"2024-05-01T10:00:00Z"], []]]
)
def test_times_wide_numbers_and_numbers_in_texts_are_read_without_moving_a_column(
    at: list[Any], monkeypatch: pytest.MonkeyPatch
):
    one = FeatureSpec(
        features={
            "item": IdFeature(),
            "pair": FloatFeature(width=2, missing=0.0),
            "text": FloatFeature(separator="|", width=3, missing=0.0),
        },
        labels={"y": Label()},
        event_time="at",
    )
    some = records(
        item=[[1], [2], [3]],
        pair=[[1.0, 2.0], [], [3.0, 4.0]],
        text=[[b"1|2|3"], [b"4|5|6"], [b""]],
        y=[[1.0], [0.0], [1.0]],
        at=at,
    )
    wanted = one.make(some)
    rows = some.take(torch.arange(3))
    monkeypatch.setattr(native, "gather_rows", lambda *_: pytest.fail("a column was moved"))
    batch = one.make(rows)
    assert batch.ids.event_times is not None
    assert torch.equal(batch.ids.event_times, wanted.ids.event_times)
    assert batch.ids.event_time == wanted.ids.event_time
    assert batch.floats["pair"].tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    assert batch.floats["text"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [0.0, 0.0, 0.0]]


def test_the_form_of_times_that_the_core_recognises_is_said_once(caplog: pytest.LogCaptureFixture):
    one = spec(event_time="at", item=IdFeature())
    some = records(item=[[1], [2]], at=[[b"1714557600000"], [b"2024-05-01"]])
    with caplog.at_level("INFO"):
        for _ in range(2):
            one.make(some.take(torch.arange(2)))
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "column 'at': its times are recognised as Unix milliseconds",
        "column 'at': its times are recognised as texts in ISO 8601, UTC without a zone",
    ]


def test_plain_features_are_read_at_once():
    one = spec(text=IdFeature(kind="string"), age=BucketFeature(boundaries=(1.0,)), price=FloatFeature())
    reading = one.reader.read(records(text=[[b"a"], []], age=[[1.0], [0.0]], price=[[1.0], [2.0]]))
    assert reading.packed is not None
    assert reading.packed.names == ("text", "age")
    assert reading.ids == {}


def test_rows_that_were_not_moved_are_read_where_they_are():
    one = FeatureSpec(features={"user": IdFeature(), "age": FloatFeature(missing=0.0)}, labels={"y": Label()})
    some = records(user=[[7], [8], [9]], age=[[1.0], [], [3.0]], y=[[1.0], [0.0], [1.0]]).slice(1, 3)
    batch = one.make(some)
    assert some.unmoved is not None
    assert (ids(batch, "user"), batch.label.tolist()) == ([[8], [9]], [0.0, 1.0])
    assert batch.floats["age"].tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize("longest", [7, 16, 30])
def test_texts_of_any_length_have_the_id_that_hash_strings_gives_them(longest: int):
    texts = ["abcdefghijklmnopqrstuvwxyz0123456789"[:size] for size in range(longest - 6, longest + 1)]
    reading = spec(text=IdFeature(kind="string")).reader.read(
        records(text=[[text.encode()] for text in texts])
    )
    assert reading.packed is not None
    assert reading.packed.ids.tolist() == hashed(*texts)


def test_values_that_are_not_contiguous_are_read_too():
    every_second = RaggedTensor(torch.arange(8)[::2], torch.arange(5))
    some = Records(4, {"item": every_second})
    reading = spec(item=IdFeature()).reader.read(some)
    assert reading.packed is None
    assert ids(reading.batch(), "item") == [[0], [2], [4], [6]]


def test_a_weight_that_is_missing_is_one():
    one = spec(x=IdFeature(weights="w"))
    nan = float("nan")
    batch = one.make(records(x=[[1, 2], [3], []], w=[[0.5, nan], [], []]))
    assert batch.ids.weights.tolist() == [0.5, 1.0, 1.0]


def test_whole_numbers_that_came_as_floats_are_ids():
    one = spec(x=IdFeature())
    assert ids(one.make(records(x=[[3.0], [float("nan")], []])), "x") == [[3], [], []]
    with pytest.raises(DataError, match="ids are whole numbers"):
        one.make(records(x=[[1.5]]))
