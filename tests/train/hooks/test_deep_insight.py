"""Deep insight: messages about single examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.tensors import RaggedTensor
from monolith.train import StepResult
from monolith.train.hooks.deep_insight import DeepInsightHook, messages_v1, messages_v2, read_field

NOW = 1_700_000_000


class Kept:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def put(self, messages: Sequence[str]) -> None:
        self.messages += [json.loads(message) for message in messages]


def result(count: int = 2, *, timed: bool = True, heads: Sequence[str] = ("click", "like")) -> StepResult:
    features: dict[str, Any] = {"uid": torch.arange(count) + 7, "gid": torch.arange(count) + 70}
    if timed:
        features["req_time"] = torch.full((count,), NOW)
    batch = Batch(
        FeatureIds.pack(features),
        floats={"price": torch.full((count, 1), 2.5)},
        labels={head: torch.arange(count).float() % 2 for head in heads},
    )
    predictions = {head: torch.full((count,), 0.5 / (n + 1)) for n, head in enumerate(heads)}
    return StepResult(1, batch, torch.tensor(0.0), predictions)


def told(hook: DeepInsightHook, given: StepResult) -> None:
    hook.after_step(None, given)  # type: ignore[arg-type]


# Messages


def test_version_1_tells_of_one_target() -> None:
    texts = messages_v1(
        model_name="feed",
        uids=torch.tensor([7, 8]),
        req_times=torch.tensor([NOW, NOW + 1]),
        labels=torch.tensor([1.0, 0.0]),
        preds=torch.tensor([0.5, 0.25]),
    )
    assert [json.loads(text) for text in texts] == [
        {
            "model_name": "feed",
            "target": "ctr_head",
            "uid": uid,
            "req_time": at,
            "label": label,
            "pred": pred,
            "sample_rate": 1.0,
        }
        for uid, at, label, pred in [(7, NOW, 1.0, 0.5), (8, NOW + 1, 0.0, 0.25)]
    ]


def test_version_2_tells_of_several_and_sorts_fields_by_their_kind() -> None:
    (text,) = messages_v2(
        model_name="feed",
        targets=["click", "like"],
        req_times=torch.tensor([NOW]),
        labels=torch.tensor([[1.0], [0.0]]),
        preds=torch.tensor([[0.5], [0.25]]),
        sample_rates=torch.tensor([[1.0], [0.5]]),
        fields={
            "uid": torch.tensor([7]),
            "gid": torch.tensor([70]),
            "price": torch.tensor([2.5]),
            "city": ["Köln"],
        },
    )
    assert json.loads(text) == {
        "model_name": "feed",
        "uid": 7,
        "req_time": NOW,
        "targets": ["click", "like"],
        "labels": [1.0, 0.0],
        "preds": [0.5, 0.25],
        "sample_rates": [1.0, 0.5],
        "extra_float": {"price": 2.5},
        "extra_int": {"gid": 70},
        "extra_str": {"city": "Köln"},
    }


def test_the_uid_is_mandatory() -> None:
    with pytest.raises(ConfigError, match="'uid' is mandatory"):
        messages_v2(
            model_name="feed",
            targets=["click"],
            req_times=torch.tensor([NOW]),
            labels=torch.ones(1, 1),
            preds=torch.ones(1, 1),
            fields={"gid": torch.tensor([1])},
        )


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"labels must have shape \(1, 2\)"):
        messages_v2(
            model_name="feed",
            targets=["click"],
            req_times=torch.tensor([NOW, NOW]),
            labels=torch.ones(2, 1),
            preds=torch.ones(1, 2),
            fields={"uid": torch.tensor([1, 2])},
        )
    with pytest.raises(ConfigError, match="one value for each example"):
        messages_v1(
            model_name="feed",
            uids=torch.tensor([1]),
            req_times=torch.tensor([NOW, NOW]),
            labels=torch.ones(2),
            preds=torch.ones(2),
        )


# Fields of a batch


def test_a_field_is_the_first_id_or_number_and_0_where_there_is_none() -> None:
    ids = FeatureIds.pack(
        {
            "words": RaggedTensor.from_list([[5, 6], [], [7]], dtype=torch.int64),
            "user": torch.tensor([9]),
        },
        shared=["user"],
        batch_size=3,
    )
    batch = Batch(ids, floats={"price": torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0]])})
    assert read_field(batch, "words").tolist() == [5, 0, 7]  # type: ignore[union-attr]
    assert read_field(batch, "user").tolist() == [9, 9, 9]  # type: ignore[union-attr]
    assert read_field(batch, "price").tolist() == [1.0, 2.0, 3.0]  # type: ignore[union-attr]
    assert read_field(batch, "city") is None


# The hook


def test_one_head_is_told_by_version_1_and_named_targets_by_version_2() -> None:
    one, several = Kept(), Kept()
    told(DeepInsightHook([one], model_name="feed", sample_ratio=1.0), result(heads=["click"]))
    told(
        DeepInsightHook(
            [several],
            model_name="feed",
            sample_ratio=1.0,
            targets=["like", "click"],
            extra_fields=["gid", "price"],
        ),
        result(),
    )
    assert [message["pred"] for message in one.messages] == [0.5, 0.5]
    assert one.messages[0]["target"] == "ctr_head"
    assert several.messages[1]["preds"] == [0.25, 0.5]
    assert several.messages[1]["uid"] == 8
    assert several.messages[1]["extra_int"] == {"gid": 71}
    assert several.messages[1]["extra_float"] == {"price": 2.5}


def test_a_hundredth_of_the_examples_is_told_of() -> None:
    kept = Kept()
    hook = DeepInsightHook([kept], model_name="feed", generator=torch.Generator().manual_seed(0))
    told(hook, result(20_000, heads=["click"]))
    assert 140 < len(kept.messages) < 260


def test_fields_of_one_hook_do_not_pile_up_in_the_next() -> None:
    given = ["gid"]
    for _ in range(3):
        kept = Kept()
        hook = DeepInsightHook(
            [kept], model_name="feed", sample_ratio=1.0, targets=["click"], extra_fields=given
        )
        told(hook, result(1))
        assert kept.messages[0]["extra_int"] == {"gid": 70}
    assert given == ["gid"]
    assert (
        DeepInsightHook([], model_name="a")._fields == DeepInsightHook([], model_name="b")._fields == ("uid",)
    )


def test_without_the_time_of_the_request_it_is_off_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    hook = DeepInsightHook([kept], model_name="feed", sample_ratio=1.0, targets=["click"])
    told(hook, result(timed=False))
    told(hook, result(timed=False))
    assert kept.messages == []
    assert caplog.text.count("deep insight is off") == 1


def test_without_a_sink_nothing_is_computed() -> None:
    def never(*_: object) -> None:
        raise AssertionError("was read")

    told(DeepInsightHook([], model_name="feed", sample_ratio=1.0, read=never), result())


def test_a_field_or_head_that_is_not_there_is_named() -> None:
    kept = Kept()
    with pytest.raises(ConfigError, match="no field 'city'; it has uid, gid, req_time, price"):
        told(
            DeepInsightHook(
                [kept], model_name="m", sample_ratio=1.0, targets=["click"], extra_fields=["city"]
            ),
            result(),
        )
    with pytest.raises(ConfigError, match="no head 'ctr_head' but click, like"):
        told(DeepInsightHook([kept], model_name="m", sample_ratio=1.0), result())


def test_a_ratio_is_a_share() -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        DeepInsightHook([], model_name="m", sample_ratio=1.5)
