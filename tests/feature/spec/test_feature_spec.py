"""A feature spec is a plain value: it checks itself, goes to text and back, and says what it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from monolith.errors import ConfigError
from monolith.feature import (
    MAX_SLOTS_V2,
    BucketFeature,
    CrossFeature,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    SequenceFeature,
)
from monolith.feature.spec.times import TIME
from monolith.table import Adagrad, Ftrl

SPEC = FeatureSpec(
    features={
        "user": IdFeature(
            column="user_id",
            kind="string",
            dim=16,
            optimizer=Adagrad(learning_rate=0.1),
            bias_optimizer=Ftrl(learning_rate=0.02),
            bias_learning_rate=0.01,
            occurrence_threshold=2,
            expire_after=timedelta(days=9),
        ),
        "item": IdFeature(),
        "tags": IdFeature(kind="string", separator="|", weights="tag_weights", combiner="mean"),
        "price": FloatFeature(scale="standard", mean=(0.1,), std=(1 / 3,), missing=None),
        "age": BucketFeature(boundaries=(18.0, 30.5)),
        "user_item": CrossFeature(of=("user", "item")),
        "clicked": SequenceFeature(length=3, shares="item", times="clicked_at"),
    },
    labels={"click": Label(), "like": Label(column="rating", at_least=4.0)},
    event_time="time",
    group="user",
    optional=("tags",),
    max_bad=0.25,
)


def test_it_goes_to_json_and_back_without_loss():
    assert FeatureSpec.from_json(SPEC.to_json()) == SPEC
    assert list(FeatureSpec.from_json(SPEC.to_json()).features) == list(SPEC.features)
    bare = FeatureSpec(features={"user": IdFeature()})
    assert FeatureSpec.from_json(bare.to_json(indent=2)) == bare


def test_an_unknown_key_is_an_error_that_names_the_nearest():
    plain = SPEC.to_dict()
    plain["features"]["user"]["dimm"] = 3
    with pytest.raises(ConfigError, match=r"features\.user\.dimm.*nearest known key is features\.user\.dim"):
        FeatureSpec.from_json(json.dumps(plain))
    with pytest.raises(ConfigError, match="'knd'; the nearest known key is 'kind'"):
        FeatureSpec.from_dict({"features": {"user": {"knd": "string"}}})
    with pytest.raises(ConfigError, match="not JSON"):
        FeatureSpec.from_json("{")


def test_a_kind_is_told_by_its_keys_where_these_tell():
    spec = FeatureSpec.from_dict(
        {"features": {"user": {"kind": "string"}, "age": {"boundaries": [18]}, "price": {"scale": "log"}}}
    )
    assert spec.features == {
        "user": IdFeature(kind="string"),
        "age": BucketFeature(boundaries=(18.0,)),
        "price": FloatFeature(scale="log"),
    }
    with pytest.raises(ConfigError, match="say which with type"):
        FeatureSpec.from_dict({"features": {"user": {}}})


def test_it_says_what_it_reads_and_as_what():
    assert SPEC.columns == {
        "user_id": torch.uint8,
        "item": torch.int64,
        "tags": torch.uint8,
        "tag_weights": torch.uint8,  # lists in a text, as the tags are
        "price": torch.float32,
        "age": torch.float32,
        "clicked": torch.int64,
        "clicked_at": TIME,
        "time": TIME,
        "click": torch.float32,
        "rating": torch.float32,
    }
    assert "tags" not in SPEC.required
    assert set(SPEC.without_labels().columns) == SPEC.columns.keys() - {"click", "rating"}


def test_it_says_what_it_makes():
    assert SPEC.ids == ("user", "item", "tags", "age", "user_item", "clicked", "clicked.gap")
    assert SPEC.floats == {"price": 1}


def test_a_column_of_whole_numbers_may_be_read_as_numbers_and_as_ids():
    spec = FeatureSpec(features={"age": IdFeature(), "years": FloatFeature(column="age")})
    assert spec.columns["age"] is torch.int64
    with pytest.raises(ConfigError, match="reads column 'age' as texts, and another feature as whole"):
        FeatureSpec(features={"age": IdFeature(), "text": IdFeature(column="age", kind="string")})


def test_slots_are_chosen_by_name_and_stay_when_features_come_and_go():
    spec = replace(SPEC, fids=True)
    assert SPEC.slots == {}
    assert spec.slots["clicked"] == spec.slots["item"]  # whose rows it shares
    own = {name: slot for name, slot in spec.slots.items() if name != "clicked"}
    assert len(set(own.values())) == len(own)
    assert all(0 < slot < MAX_SLOTS_V2 for slot in own.values())
    fewer = FeatureSpec(features={"item": IdFeature(), "new": IdFeature()}, fids=True)
    assert fewer.slots["item"] == spec.slots["item"]
    taken = FeatureSpec(
        features={"other": IdFeature(slot=fewer.slots["item"]), "item": IdFeature()}, fids=True
    )
    assert taken.slots["item"] == fewer.slots["item"] + 1


def two(**settings: Any) -> Any:
    return lambda: FeatureSpec(
        features={"a": IdFeature(kind="string"), "f": FloatFeature(), **settings.pop("features", {})},
        **settings,
    )


WRONG: dict[str, tuple[Any, str]] = {
    "a cross of numbers": (two(features={"c": CrossFeature(of=("a", "f"))}), "'f' is no feature of ids"),
    "a cross of nothing known": (two(features={"c": CrossFeature(of=("a", "aa"))}), "did you mean 'a'"),
    "a cross of a cross": (
        two(features={"c": CrossFeature(of=("a", "a")), "d": CrossFeature(of=("a", "c"))}),
        "a cross itself",
    ),
    "sharing nothing known": (two(features={"b": IdFeature(shares="x")}), "'x' is no feature of ids"),
    "sharing in a circle": (
        two(features={"b": IdFeature(shares="c"), "c": IdFeature(shares="b")}),
        "in a circle, b -> c -> b",
    ),
    "sharing rows of other ids": (two(features={"b": IdFeature(shares="a")}), "would never be the same"),
    "setting rows of another": (lambda: IdFeature(shares="a", dim=3), "sets dim: set it there"),
    "a group of numbers": (two(group="f"), "group: 'f' is no feature of ids"),
    "an optional stranger": (two(optional=("x",)), "optional names 'x', which no feature reads"),
    "gaps without a time": (
        two(features={"s": SequenceFeature(length=2, times="t")}),
        "set event_time",
    ),
    "a slot twice": (
        two(features={"b": IdFeature(slot=3), "c": IdFeature(slot=3)}, fids=True),
        "3 is the slot of 'b'",
    ),
    "boundaries that fall": (lambda: BucketFeature(boundaries=(2.0, 1.0)), "must be finite and rise"),
    "a bucket of nothing": (BucketFeature, "needs boundaries, or quantiles"),
    "a mean without a deviation": (lambda: FloatFeature(scale="standard", mean=(1.0,)), "go together"),
    "a mean of something raw": (
        lambda: FloatFeature(mean=(1.0,), std=(1.0,)),
        'goes with scale = "standard"',
    ),
    "a weighted maximum": (lambda: IdFeature(weights="w", combiner="max"), "not with max"),
    "a long separator": (lambda: IdFeature(separator="||"), "one ASCII character"),
    "a name for gaps": (two(features={"b.gap": IdFeature()}), "does not end in '.gap'"),
    "a label that is none": (two(labels={"click": "click"}), "labels must be labels by task"),
    "a mean that is no list": (
        lambda: FloatFeature(mean=14.5),
        "mean must be list of float or None, got 14.5",
    ),
    "a scale that there is not": (
        lambda: FloatFeature(scale="standrd"),
        "one of 'raw', 'log', 'standard', got",
    ),
    "a kind that there is not": (
        lambda: IdFeature(kind="str"),
        "must be one of 'int', 'string', got 'str'",
    ),
    "half a number": (lambda: FloatFeature(width=2.5), "width must be int, got 2.5"),
    "a cross of one text": (lambda: CrossFeature(of="ab"), "of must be list of str, got 'ab'"),
    "steps with a text": (
        lambda: HistoryFeature(of="a", max=2, with_="b"),
        "with must be list of str, got 'b'",
    ),
    "optional text": (two(optional="a"), "optional must be list of str, got 'a'"),
    "a loss that there is not": (lambda: Label(loss="bce"), "loss must be one of 'binary', 'mse', 'huber'"),
    "a share beyond all": (two(max_bad=2.0), "max_bad must be from 0 to 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_refuses(case: str):
    make, message = WRONG[case]
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(".", r"\.")):
        make()


def test_a_list_is_as_good_as_a_tuple():
    assert CrossFeature(of=["a", "f"]) == CrossFeature(of=("a", "f"))
    assert FloatFeature(scale="standard", mean=[1], std=[2]).mean == (1,)


def change(name: str, **settings: Any) -> FeatureSpec:
    features = dict(SPEC.features)
    features[name] = replace(features[name], **settings)
    return replace(SPEC, features=features)


def test_what_gives_rows_another_meaning_is_a_difference():
    assert SPEC.difference(SPEC) is None
    assert (
        SPEC.difference(change("user", kind="int"))
        == "features.user.kind is 'string' in this model and 'int' in the checkpoint"
    )
    assert SPEC.difference(change("price", mean=(0.2,))) == (
        "features.price.mean is (0.1,) in this model and (0.2,) in the checkpoint"
    )
    assert SPEC.difference(change("age", boundaries=(1.0,))) is not None
    reordered = replace(SPEC, features=dict(reversed(SPEC.features.items())))
    assert "in the order user, item" in str(SPEC.difference(reordered))
    fewer = replace(SPEC, features={n: f for n, f in SPEC.features.items() if n != "age"})
    assert SPEC.difference(fewer) == "the checkpoint does not have features.age"
    assert fewer.difference(SPEC) == "this model does not have features.age"
    assert SPEC.difference(fewer, strict=False) is None
    assert (
        SPEC.difference(replace(SPEC, fids=True)) == "fids is False in this model and True in the checkpoint"
    )


def test_what_does_not_is_none():
    assert SPEC.difference(change("user", learning_rate=0.5, expire_after=None, column="uid")) is None
    assert SPEC.difference(replace(SPEC, labels={}, event_time="at", max_bad=0.0)) is None


def test_one_side_of_a_model_is_read_by_its_features_alone():
    items = SPEC.only(["item", "price"])
    assert list(items.features) == ["item", "price"]
    assert items.columns == {"item": torch.int64, "price": torch.float32}
    assert (items.labels, items.event_time, items.group, items.optional) == ({}, None, None, ())
    assert SPEC.only(["user", "tags"]).optional == ("tags",)
    assert SPEC.only(["user"]).group == "user"
    assert SPEC.only(["clicked"]).event_time == "time"
    with pytest.raises(ConfigError, match="no feature 'itme'; did you mean 'item'"):
        SPEC.only(["itme"])
    with pytest.raises(ConfigError, match="user_item"):
        SPEC.only(["user_item"])


def test_one_side_has_the_same_fids_as_the_whole():
    whole = FeatureSpec(
        features={
            "item": IdFeature(),
            "bought": IdFeature(shares="item"),
            "seen": SequenceFeature(length=3, shares="bought"),
        },
        fids=True,
    )
    one_side = whole.only(["bought", "seen"])
    assert one_side.slots == dict.fromkeys(("bought", "seen"), whole.slots["item"])
