"""Histories: jagged lists of the last values of a feature, with what was known at each step."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from data.lists import records
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.config import load_config, to_toml
from monolith.errors import ConfigError, DataError
from monolith.feature import FeatureSpec, HistoryFeature, IdFeature, SequenceFeature
from monolith.feature.spec.times import TIME

FEATURES = {
    "user": IdFeature(),
    "item": IdFeature(kind="string"),
    "action": IdFeature(),
    "history": HistoryFeature(of="item", max=3, with_=("action", "at")),
}
SPEC = FeatureSpec(features=FEATURES, labels={}, event_time="at")
NAMES = ("history", "history.action", "history.time")


def with_history(spec: FeatureSpec = SPEC, **changed: Any) -> FeatureSpec:
    history = spec.features["history"]
    assert isinstance(history, HistoryFeature)
    return replace(spec, features={**spec.features, "history": replace(history, **changed)})


def made(spec: FeatureSpec, **columns: Any) -> list[list[list[int]]]:
    """Return the lists of a history as a batch has them."""
    size = len(next(iter(columns.values())))
    others = {name: [[]] * size for name in spec.columns if name not in columns}
    batch = spec.make(records(**{**others, **columns}))
    return [batch.ids[name].to_list() for name in spec.ids if name.startswith("history")]


def items(*texts: str) -> list[int]:
    """Return the ids that the listed feature itself has for values."""
    batch = FeatureSpec(features={"item": FEATURES["item"]}, labels={}).make(
        records(item=[[text.encode()] for text in texts])
    )
    found: list[int] = batch.ids["item"].flat_values.tolist()
    return found


# What it says


def test_it_reads_a_column_for_its_items_and_one_for_each_companion():
    assert {name: SPEC.columns[name] for name in NAMES} == {
        "history": torch.uint8,
        "history.action": torch.int64,
        "history.time": TIME,
    }
    assert SPEC.ids == ("user", "item", "action", *NAMES)


def test_its_lists_read_the_rows_of_what_they_list_and_times_read_none():
    assert [SPEC.owner(name) for name in NAMES[:2]] == ["item", "action"]
    assert SPEC.with_rows == ("user", "item", "action", *NAMES[:2])
    fids = replace(SPEC, fids=True)
    assert [fids.slots[name] for name in NAMES[:2]] == [fids.slots["item"], fids.slots["action"]]
    assert "history.time" not in fids.slots


def test_another_column_gives_its_name_to_the_companions_too():
    columns = [each.column for each in with_history(column="seen").histories["history"]]
    assert columns == ["seen", "seen.action", "seen.time"]


def test_the_times_of_steps_have_one_name_whatever_the_column_of_times_is_called():
    assert [each.name for each in SPEC.histories["history"]] == list(NAMES)


def test_it_goes_to_json_and_toml_and_back(tmp_path):
    spec = with_history(by="user", only="click")
    assert FeatureSpec.from_json(spec.to_json()) == spec
    path = tmp_path / "features.toml"
    path.write_text(to_toml(spec))
    assert "with = [" in path.read_text()
    assert load_config(FeatureSpec, file=path) == spec


def test_a_file_tells_it_by_its_kind(tmp_path):
    path = tmp_path / "features.toml"
    path.write_text(
        'event_time = "at"\n[labels]\n[features]\nitem = {kind = "int"}\naction = {kind = "string"}\n'
        'history = {kind = "sequence", of = "item", max = 200, with = ["action", "at"]}\n'
    )
    found = load_config(FeatureSpec, file=path).features["history"]
    assert found == HistoryFeature(of="item", max=200, with_=("action", "at"))


def test_a_flag_sets_what_is_kept_along(tmp_path):
    path = tmp_path / "features.toml"
    path.write_text(to_toml(SPEC))
    spec = load_config(FeatureSpec, file=path, args=["--features.history.with", '["user"]'])
    assert spec == with_history(with_=("user",))


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"of": "itm"}, "features.history.of: 'itm' is no IdFeature; did you mean 'item'"),
        ({"of": "seen"}, "features.history.of: 'seen' is no IdFeature"),
        ({"with_": ("acton",)}, "features.history.with: 'acton' is no IdFeature or the column of the event"),
        ({"with_": ("tags",)}, "'tags' has several values in one text"),
        ({"by": "usr"}, "features.history.by: 'usr' is no IdFeature"),
    ],
)
def test_it_names_features_that_are_there(changed, said):
    more = {"seen": SequenceFeature(length=2), "tags": IdFeature(separator="|")}
    with pytest.raises(ConfigError, match=said):
        with_history(replace(SPEC, features={**FEATURES, **more}), **changed)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"max": 0}, "max must be at least 1, got 0"),
        ({"with_": ("action", "action")}, "with names 'action' twice"),
        ({"only": "click"}, "set by, too"),
        ({"by": "user", "separator": "|"}, "set one"),
        ({"separator": "||"}, "one ASCII character"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changed, said):
    with pytest.raises(ConfigError, match=said):
        with_history(**changed)


def test_a_list_that_has_the_name_of_a_feature_is_refused():
    with pytest.raises(ConfigError, match=r"'history.action' is the name of another feature"):
        replace(SPEC, features={**FEATURES, "history.action": IdFeature()})
    timed = {**FEATURES, "time": IdFeature()}
    with pytest.raises(ConfigError, match=r"'history.time' is the name of another feature or list"):
        with_history(replace(SPEC, features=timed), with_=("time", "at"))
    with pytest.raises(ConfigError, match="'at' is both a feature and the column of the event time"):
        replace(SPEC, features={**FEATURES, "at": IdFeature()})


def test_one_that_the_pipeline_makes_needs_event_times():
    with pytest.raises(ConfigError, match=r"features.history.by: .* set event_time"):
        replace(with_history(with_=(), by="user"), event_time=None)


def test_the_data_has_no_columns_that_the_pipeline_makes_and_what_decides_who_enters():
    spec = with_history(by="user", only="liked")
    assert spec.source_columns == {
        "user": torch.int64,
        "item": torch.uint8,
        "action": torch.int64,
        "at": TIME,
        "liked": torch.float32,
    }
    assert SPEC.source_columns == SPEC.columns


def test_a_checkpoint_fits_another_way_to_get_the_same_history():
    other = with_history(by="user", only="click", column="seen")
    assert SPEC.difference(other) is None
    said = "features.history.with is ('action', 'at') in this model and ('at',) in the checkpoint"
    assert SPEC.difference(with_history(with_=("at",))) == said


# Parts


@pytest.mark.parametrize("fids", [False, True])
def test_a_part_with_it_reads_the_same_ids_without_the_columns_of_what_it_lists(fids):
    whole = replace(with_history(by="user"), fids=fids)
    part = whole.only(["history"])
    assert (part.ids, set(part.columns)) == (NAMES, {*NAMES, "at"})
    columns = {
        "history": [[b"a", b"b"], []],
        "history.action": [[1, 2], []],
        "history.time": [[10, 20], []],
    }
    assert made(part, **columns) == made(whole, **columns)
    assert part.only(part.read_features).ids == NAMES  # a part of a part
    assert part.optional == ("at",)  # an example needs no time for the times of its steps


def test_a_part_may_be_named_by_a_list_of_it():
    assert SPEC.only(["history.action", "user"]).ids == ("user", *NAMES)
    assert SPEC.only(["item"]).ids == ("item",)


def test_rows_of_the_part_are_those_of_the_whole():
    shared = replace(SPEC, features={"product": IdFeature(kind="string"), **FEATURES}, fids=True)
    shared = replace(shared, features={**shared.features, "item": IdFeature(kind="string", shares="product")})
    part = shared.only(["history", "action"])
    assert {name: part.slots[name] for name in part.slots} == {
        name: shared.slots[name] for name in ("action", "history", "history.action")
    }


# Reading


def test_it_has_the_ids_of_what_it_lists_without_padding():
    found = made(
        SPEC,
        **{
            "history": [[b"a", b"b"], [], [b"c"]],
            "history.action": [[1, 2], [], [1]],
            "history.time": [[10, 20], [], [30]],
        },
    )
    assert found == [[items("a", "b"), [], items("c")], [[1, 2], [], [1]], [[10, 20], [], [30]]]


def test_the_most_recent_steps_are_kept_in_every_list():
    found = made(
        SPEC,
        **{
            "history": [[b"a", b"b", b"c", b"d"], [b"e"]],
            "history.action": [[1, 2, 3, 4], [5]],
            "history.time": [[10, 20, 30, 40], [50]],
        },
    )
    assert found == [[items("b", "c", "d"), items("e")], [[2, 3, 4], [5]], [[20, 30, 40], [50]]]


def test_texts_are_cut_at_the_separator():
    found = made(
        with_history(separator="|"),
        **{
            "history": [[b"a|b"], [b""], [b"c"]],
            "history.action": [[b"1|2"], [], [b"3"]],
            "history.time": [[b"10|1970-01-01T00:00:20Z"], [b""], [b"30"]],
        },
    )
    assert found == [[items("a", "b"), [], items("c")], [[1, 2], [], [3]], [[10, 20], [], [30]]]


def test_times_may_have_every_form_of_an_event_time():
    when = int(datetime(2024, 5, 1, 10, tzinfo=UTC).timestamp())
    spec = with_history(with_=("at",))
    for given_times in ([b"2024-05-01T10:00:00Z", b"2024-05-01 12:00+02:00"], [when * 1000, when]):
        found = made(spec, **{"history": [[b"a", b"b"]], "history.time": [given_times]})
        assert found[1] == [[when, when]]


def test_a_step_without_one_of_its_values_is_none():
    found = made(
        with_history(max=2),
        **{
            "history": [[b"a", b"", b"c", b"d"], [b"e"]],
            "history.action": [[1.0, 2.0, float("nan"), 4.0], [5.0]],
            "history.time": [[10, 20, 30, 40], [50]],
        },
    )
    assert found == [[items("a", "d"), items("e")], [[1, 4], [5]], [[10, 40], [50]]]


@pytest.mark.parametrize("separator", [None, "|"])
def test_lists_of_different_lengths_make_a_bad_record_that_is_named(separator):
    columns: dict[str, Any] = {
        "history": [[b"a", b"b"], [b"c"]],
        "history.action": [[1, 2], []],
        "history.time": [[10, 20], [30]],
    }
    if separator is not None:
        columns = {
            "history": [[b"a|b"], [b"c"]],
            "history.action": [[b"1|2"], [b""]],
            "history.time": [[b"10|20"], [b"30"]],
        }
    spec = with_history(separator=separator)
    others = {name: [[], []] for name in ("user", "item", "action", "at")}
    reading = spec.reader.read(records(**others, **columns))
    said = "features.history: column 'history' has 1 steps, and column 'history.action' 0"
    assert list(reading.bad) == [1]
    assert reading.bad[1].startswith(said)
    with pytest.raises(DataError, match="record 1 of 2 is bad"):
        spec.make(records(**others, **columns))


def test_a_value_that_cannot_be_read_makes_a_bad_record():
    others = {name: [[], []] for name in ("user", "item", "action", "at")}
    columns = {
        "history": [[b"a"], [b"b"]],
        "history.action": [[1], [1]],
        "history.time": [[b"10"], [b"soon"]],
    }
    assert list(SPEC.reader.read(records(**others, **columns)).bad) == [1]


def test_a_history_that_all_records_share_is_read_once():
    columns = {"history": [[b"a", b"b"]], "history.action": [[1, 2]], "history.time": [[10, 20]]}
    others = {name: [[], [], []] for name in ("user", "item", "action", "at")}
    batch = SPEC.make(records(shared=NAMES, **others, **columns))
    assert [batch.ids[name].to_list() for name in NAMES] == [[items("a", "b")], [[1, 2]], [[10, 20]]]
    mixed = {**columns, "history.time": [[10, 20], [30, 40], [50, 60]]}  # each record has times of its own
    batch = SPEC.make(records(shared=NAMES[:2], **others, **mixed))
    assert batch.ids["history"].to_list() == [items("a", "b")] * 3
    assert batch.ids["history.time"].to_list() == mixed["history.time"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "straße"]),
        st.integers(0, 9),
        st.integers(0, 2_000_000_000),
    ),
    max_size=6,
)


@given(rows=st.lists(STEPS, min_size=1, max_size=5), most=st.integers(1, 4), fids=st.booleans())
@settings(deadline=None, max_examples=60)
def test_it_reads_as_the_features_that_it_lists_do(rows, most, fids):
    spec = replace(with_history(max=most), fids=fids)
    found = made(
        spec,
        **{
            "history": [[item.encode() for item, _, _ in row] for row in rows],
            "history.action": [[action for _, action, _ in row] for row in rows],
            "history.time": [[time for _, _, time in row] for row in rows],
        },
    )
    for row, *lists in zip(rows, *found, strict=True):
        steps = [step for step in row if step[0]][-most:]
        one_each = spec.make(
            records(
                user=[[]] * len(steps),
                item=[[item.encode()] for item, _, _ in steps],
                action=[[action] for _, action, _ in steps],
                at=[[time] for _, _, time in steps],
                **{name: [[]] * len(steps) for name in NAMES},
            )
        ).ids
        assert lists == [
            one_each["item"].flat_values.tolist(),
            one_each["action"].flat_values.tolist(),
            [time for _, _, time in steps],
        ]
