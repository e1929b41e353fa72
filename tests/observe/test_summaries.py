"""Summaries: heads byte for byte, and what tensors stand beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError
from monolith.observe.summaries import SummaryType, insight_data, nas_data, prepare_head

NAMES = ["f1", "f2", "f3"]

# Heads


def test_whole_sizes_make_a_gating_head_with_groups() -> None:
    head, kind = prepare_head(NAMES, [3, 5, 9], [["f1", "f2"], ["f3", "f4"], ["f5", "f6"]], out_type="bytes")
    assert kind is SummaryType.GATING
    assert head == (
        b'{"tag_type": "gating", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [3, 5, 9], '
        b'"group_index": [0, 0, 1]}'
    )


def test_lists_of_sizes_make_a_selecting_head_without_groups() -> None:
    head, kind = prepare_head(NAMES, [[3, 6], [5, 10], [4, 8, 16]], out_type="bytes")
    assert kind is SummaryType.SELECTING
    assert head == (
        b'{"tag_type": "selecting", "segment_names": ["f1", "f2", "f3"], '
        b'"segment_sizes": [[3, 6], [5, 10], [4, 8, 16]]}'
    )


def test_a_head_comes_as_an_object_as_bytes_or_as_a_tensor_of_bytes() -> None:
    as_bytes, _ = prepare_head(NAMES, [3, 5, 9], out_type="bytes")
    as_json, _ = prepare_head(NAMES, [3, 5, 9], out_type="json")
    as_tensor, _ = prepare_head(NAMES, [3, 5, 9])
    assert json.dumps(as_json).encode() == as_bytes
    assert as_tensor.dtype is torch.uint8
    assert bytes(as_tensor.tolist()) == as_bytes


def test_without_segments_a_head_is_empty_and_the_type_is_the_one_given() -> None:
    assert prepare_head([], [], out_type="bytes") == (b"", None)
    assert prepare_head([], [], raw_tag="simple", out_type="bytes") == (b"", SummaryType.SIMPLE)
    assert prepare_head([], [], out_type="json") == ({}, None)
    assert prepare_head([], [])[0].shape == (0,)


def test_a_given_type_wins_over_the_sizes() -> None:
    head, kind = prepare_head(NAMES, [3, 5, 9], raw_tag="mixed", out_type="json")
    assert kind is SummaryType.MIXED
    assert list(head) == ["tag_type", "segment_names", "segment_sizes"]


def test_groups_are_renumbered_in_their_own_order_and_listed_in_that_of_the_segments() -> None:
    groups = [["x"], ["f3"], ["y"], ["f1", "f2"]]
    head, _ = prepare_head(NAMES, [1, 1, 1], groups, out_type="json")
    assert head["group_index"] == [1, 1, 0]


def test_a_segment_in_several_groups_belongs_to_the_last() -> None:
    head, _ = prepare_head(NAMES, [1, 1, 1], [["f1", "f2"], ["f2", "f3"]], out_type="json")
    assert head["group_index"] == [0, 1, 1]


def test_without_groups_each_segment_is_its_own() -> None:
    head, _ = prepare_head(NAMES, [1, 1, 1], out_type="json")
    assert head["group_index"] == [0, 1, 2]


def test_a_segment_without_a_group_is_named() -> None:
    with pytest.raises(ConfigError, match="no group for f2, f3"):
        prepare_head(NAMES, [1, 1, 1], [["f1"]])


def test_groups_are_lists_of_names_and_nothing_else() -> None:
    for groups in ([0, 0, 1], ["f1", "f2", "f3"]):
        with pytest.raises(ConfigError, match="lists of names"):
            prepare_head(NAMES, [1, 1, 1], groups)  # type: ignore[arg-type]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="the same length, got 3 and 2"):
        prepare_head(NAMES, [1, 2])
    with pytest.raises(ConfigError, match="gating, selecting"):
        prepare_head(NAMES, [1, 2, 3], raw_tag="gated")
    with pytest.raises(ConfigError, match="tensor, json or bytes"):
        prepare_head(NAMES, [1, 2, 3], out_type="text")  # type: ignore[call-overload]


def test_sizes_may_be_numbers_of_numpy() -> None:
    head, kind = prepare_head(["a"], [np.int64(4)], out_type="json")  # type: ignore[list-item]
    assert kind is SummaryType.GATING
    assert json.dumps(head["segment_sizes"]) == "[4]"


# NAS


def test_nas_weights_are_tagged_by_their_type_and_described_by_it() -> None:
    summary = nas_data(torch.tensor([0.1, 0.2, 0.3]), NAMES, [3, 5, 9])
    assert summary.tag == "gating/monolith_nas_weight"
    assert summary.description == "gating"
    assert summary.data.tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_a_name_comes_before_the_type() -> None:
    summary = nas_data(torch.ones(3), NAMES, [3, 5, 9], name="user", description="gates")
    assert summary.tag == "user_gating/monolith_nas_weight"
    assert summary.description == "gates"


def test_nas_weights_without_segments_need_a_type() -> None:
    assert nas_data(torch.ones(3), raw_tag="simple").tag == "simple/monolith_nas_weight"
    with pytest.raises(ConfigError, match="give raw_tag"):
        nas_data(torch.ones(3))


# Feature insight


def test_insight_without_a_label_is_direct() -> None:
    summary = insight_data(torch.ones(2, 17), NAMES, [3, 5, 9])
    assert summary.tag == "fi_direct/monolith_feature_insight"
    assert summary.content == (
        b'{"tag_type": "fi_direct", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [3, 5, 9], '
        b'"label_size": 0}'
    )
    assert summary.data.shape == (2, 17)


def test_labels_are_the_last_columns_as_float32() -> None:
    summary = insight_data(
        torch.zeros(2, 3, dtype=torch.float64), NAMES, [1, 1, 1], label=torch.tensor([[0, 1], [1, 1]])
    )
    assert json.loads(summary.content)["label_size"] == 2
    assert summary.data.tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]
    assert summary.data.dtype == np.float32


def test_insight_needs_segments_that_fit() -> None:
    with pytest.raises(ConfigError, match="at least one segment"):
        insight_data(torch.ones(2, 0), [], [])
    with pytest.raises(ConfigError, match="shape \\(examples, 4\\)"):
        insight_data(torch.ones(2, 3), NAMES, [1, 1, 2])
    with pytest.raises(ConfigError, match="one width"):
        insight_data(torch.ones(2, 3), NAMES, [[1], [1], [1]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="each of 2 examples"):
        insight_data(torch.ones(2, 3), NAMES, [1, 1, 1], label=torch.ones(3))
