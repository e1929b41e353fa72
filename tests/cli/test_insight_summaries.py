"""Importance: what summaries say about features, on numbers small enough to see the answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from monolith.cli.insight import Insight, insights
from monolith.errors import DataError
from monolith.observe.summaries import StoredSummary, TensorSummary, insight_data, nas_data

RANDOM = np.random.default_rng(0)
ROWS = 4000


def stored(summary: TensorSummary, step: int = 1) -> StoredSummary:
    return StoredSummary("events", summary.tag, step, 0.0, summary.data, summary.content, summary.description)


def only(*summaries: StoredSummary, last: int = 10) -> Insight:
    (found,) = insights(summaries, last)
    return found


def by_name(insight: Insight) -> dict[str, float]:
    return {segment.name: segment.importance for segment in insight.segments}


def test_direct_insight_is_the_mean_squared_contribution_the_greatest_first() -> None:
    squares = np.array([[1.0, 5.0], [3.0, 7.0]])
    found = only(stored(insight_data(squares, ["a", "b"], [1, 1])))
    assert [segment.name for segment in found.segments] == ["b", "a"]
    assert by_name(found) == {"a": 2.0, "b": 6.0}
    assert found.rows == 2


def test_inputs_without_a_weight_count_by_their_absolute_size() -> None:
    inputs = np.array([[1.0, -1.0, 4.0], [-1.0, 1.0, 0.0]])
    assert by_name(only(stored(insight_data(inputs, ["a", "b"], [2, 1])))) == {"a": 2.0, "b": 2.0}


def contributions(outputs: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Three segments: the first makes most of the label, the second a little, the third is large noise."""
    signal = RANDOM.normal(size=(ROWS, 3)) * [1.0, 1.0, 3.0]
    label = 2.0 * signal[:, 0] + 0.5 * signal[:, 1] + RANDOM.normal(size=ROWS)
    # The outputs are spread so that only a readout that combines them finds the label again.
    spread = RANDOM.normal(size=(3, outputs))
    weights = np.array([2.0, 0.5, 0.0])
    direction = spread[0] / np.linalg.norm(spread[0])
    spread -= np.outer(spread @ direction, direction)
    parts = signal[:, :, None] * (spread + np.outer(weights, direction))
    return parts.reshape(ROWS, -1), label


@pytest.mark.parametrize("outputs", [1, 4])
def test_with_a_label_importance_is_what_the_prediction_loses(outputs: int) -> None:
    parts, label = contributions(outputs)
    found = only(stored(insight_data(parts, ["a", "b", "c"], [outputs] * 3, label=label)))
    importance = by_name(found)
    variance = 4 + 0.25 + 1
    assert importance["a"] == pytest.approx(4 / variance, abs=0.03)
    assert importance["b"] == pytest.approx(0.25 / variance, abs=0.03)
    assert importance["c"] == pytest.approx(0, abs=0.03)
    assert found.outputs == outputs
    correlation = {segment.name: segment.correlation for segment in found.segments}
    assert correlation["a"] == pytest.approx(2 / variance**0.5, abs=0.05)


def test_a_segment_that_misleads_is_below_zero() -> None:
    """The layer adds up what it is given; a part that spoils the sum is better left out."""
    truth = RANDOM.normal(size=ROWS)
    noise = RANDOM.normal(size=ROWS)
    parts = np.stack([truth, 0.9 * noise], 1)
    found = only(stored(insight_data(parts, ["good", "bad"], [1, 1], label=truth)))
    assert by_name(found)["good"] > 0.5
    assert by_name(found)["bad"] < 0


def test_labels_that_are_all_alike_make_nothing_important() -> None:
    found = only(stored(insight_data(np.ones((4, 2)), ["a", "b"], [1, 1], label=np.ones(4))))
    assert by_name(found) == {"a": 0.0, "b": 0.0}


def test_several_labels_are_averaged() -> None:
    x = RANDOM.normal(size=(ROWS, 2))
    found = only(stored(insight_data(np.zeros((ROWS, 2)) + x, ["a", "b"], [1, 1], label=x)))
    assert by_name(found)["a"] == pytest.approx(by_name(found)["b"], abs=0.1)


def test_pieces_of_unequal_width_are_read_out_each_by_itself() -> None:
    x = RANDOM.normal(size=(ROWS, 3))
    found = only(stored(insight_data(x, ["a", "b"], [1, 2], label=x[:, 1] - x[:, 2])))
    assert by_name(found)["b"] == pytest.approx(1, abs=0.02)
    assert by_name(found)["a"] == pytest.approx(0, abs=0.02)


def test_groups_come_along() -> None:
    summary = insight_data(
        np.ones((2, 2)), ["a", "b"], [1, 1], label=np.array([0, 1]), group_info=[["a", "b"]]
    )
    assert {segment.group for segment in only(stored(summary)).segments} == {0}


# Which summaries are read


def direct(value: float) -> TensorSummary:
    return insight_data(np.full((1, 1), value), ["a"], [1])


def test_only_the_newest_are_read() -> None:
    found = only(*(stored(direct(step), step) for step in range(1, 6)), last=2)
    assert by_name(found) == {"a": 4.5}
    assert found.steps == (4, 5)


def test_what_a_restarted_run_did_again_counts_once() -> None:
    first = [stored(direct(100.0), step) for step in (10, 20, 30)]
    again = [stored(direct(1.0), step) for step in (20, 30)]
    assert by_name(only(*first, *again, last=2)) == {"a": 1.0}


def test_summaries_of_other_segments_than_the_newest_are_left_out() -> None:
    other = insight_data(np.ones((1, 2)), ["a", "b"], [1, 1])
    assert by_name(only(stored(other, 1), stored(direct(3.0), 2))) == {"a": 3.0}


def test_rows_with_nan_are_left_out_and_nothing_but_nan_is_an_error() -> None:
    data = np.array([[1.0], [np.nan]])
    assert by_name(only(stored(insight_data(data, ["a"], [1])))) == {"a": 1.0}
    with pytest.raises(DataError, match="no rows of finite numbers"):
        only(stored(insight_data(data[1:], ["a"], [1])))


def test_a_summary_that_does_not_fit_its_head_is_refused() -> None:
    good = stored(direct(1.0))
    with pytest.raises(DataError, match="1 columns"):
        only(StoredSummary("events", good.tag, 1, 0.0, np.ones((2, 3)), good.content, ""))
    with pytest.raises(DataError, match="cannot be read"):
        only(StoredSummary("events", good.tag, 1, 0.0, good.data, b"{}", ""))


def test_tensors_that_are_not_ours_or_have_no_head_are_passed_by() -> None:
    assert insights([stored(nas_data(np.ones(2), raw_tag="simple"))], 10) == []
    assert insights([StoredSummary("events", "pr_curve", 1, 0.0, np.ones(2), b"{}", "")], 10) == []


# NAS


def test_a_gate_may_have_a_weight_for_each_segment_column_or_group() -> None:
    names, sizes, groups = ["a", "b", "c"], [1, 2, 3], [["a", "b"], ["c"]]

    def weights(*values: float) -> dict[str, float]:
        return by_name(only(stored(nas_data(np.array(values), names, sizes, groups))))

    assert weights(0.1, 0.2, 0.3) == {"a": 0.1, "b": 0.2, "c": 0.3}
    assert weights(1, 2, -4, 3, 3, -3) == {"a": 1, "b": 3, "c": 3}
    assert weights(0.5, 0.7) == {"a": 0.5, "b": 0.5, "c": 0.7}


def test_a_search_among_widths_shows_the_one_it_prefers() -> None:
    found = only(stored(nas_data(np.array([0.1, 0.9, 0.6, 0.4]), ["a", "b"], [[4, 8], [4, 8]])))
    assert [(s.name, s.choice, s.importance) for s in found.segments] == [("a", 8, 0.9), ("b", 4, 0.6)]


def test_weights_that_fit_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="5 weights, which fit neither"):
        only(stored(nas_data(np.ones(5), ["a", "b"], [1, 2])))


def test_an_insight_goes_into_json_without_what_it_lacks() -> None:
    found = only(stored(direct(2.0)))
    assert json.loads(json.dumps(found.to_json())) == {
        "tag": "fi_direct/monolith_feature_insight",
        "type": "fi_direct",
        "steps": [1, 1],
        "rows": 1,
        "outputs": 1,
        "segments": [{"name": "a", "importance": 2.0}],
    }
