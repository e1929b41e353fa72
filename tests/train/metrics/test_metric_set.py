"""Metrics of a stream, alone, over windows and by head."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.errors import ConfigError, MetricError, RestoreError
from monolith.train.metrics.metric_set import (
    METRICS,
    Calibration,
    MeanLoss,
    MetricSet,
    NormalizedEntropy,
    StreamingAuc,
    Windowed,
    WindowRow,
    make_metric,
)


def t(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


# Sums


def test_always_saying_the_mean_has_a_normalized_entropy_of_1() -> None:
    metric = NormalizedEntropy()
    metric.update(t(0.25, 0.25, 0.25, 0.25), t(0, 0, 0, 1))
    assert metric.value() == pytest.approx(1.0)


def test_knowing_more_than_the_mean_is_less_than_1_and_knowing_it_wrong_is_more() -> None:
    better, worse = NormalizedEntropy(), NormalizedEntropy()
    better.update(t(0.1, 0.1, 0.1, 0.7), t(0, 0, 0, 1))
    worse.update(t(0.7, 0.1, 0.1, 0.1), t(0, 0, 0, 1))
    assert better.value() < 1 < worse.value()


def test_labels_that_are_all_alike_have_no_entropy_to_compare_with() -> None:
    metric = NormalizedEntropy()
    metric.update(t(0.1, 0.2), t(0, 0))
    assert math.isnan(metric.value())


def test_calibration_is_what_was_promised_over_what_came() -> None:
    metric = Calibration()
    metric.update(t(0.3, 0.3), t(0, 1))
    metric.update(t(0.2, 0.3), t(0, 0))
    assert metric.value() == pytest.approx(1.1)


def test_calibration_says_nothing_while_nothing_happened() -> None:
    metric = Calibration()
    metric.update(t(0.3), t(0))
    assert math.isnan(metric.value())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [("log", (math.log(2) - math.log(0.9)) / 2), ("squared", (0.25 + 0.01) / 2), ("absolute", 0.3)],
)
def test_a_mean_loss(loss: str, expected: float) -> None:
    metric = MeanLoss(loss)
    metric.update(t(0.5), t(1))
    metric.update(t(0.1), t(0))
    assert metric.value() == pytest.approx(expected)


def test_weights_weigh() -> None:
    metric = MeanLoss("absolute")
    metric.update(t(1.0, 0.0), t(0, 0), t(3, 1))
    assert metric.value() == 0.75


def test_a_sure_and_wrong_prediction_costs_much_but_not_everything() -> None:
    metric = MeanLoss()
    metric.update(t(0.0, 1.0), t(1, 0))
    assert 27 < metric.value() < 28


def test_logits_given_for_probabilities_are_refused() -> None:
    for metric in (NormalizedEntropy(), MeanLoss()):
        with pytest.raises(MetricError, match="are these logits"):
            metric.update(t(-1.5), t(1))


def test_a_column_of_one_is_as_good_as_a_vector() -> None:
    metric = MeanLoss("absolute")
    metric.update(t(1.0, 0.0)[:, None], t(0, 0)[:, None])
    assert metric.value() == 0.5


# All of them

EXAMPLES = st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 3)), min_size=1, max_size=40)


@pytest.mark.parametrize("name", METRICS)
@settings(deadline=None)
@given(examples=EXAMPLES, cut=st.integers(0, 40))
def test_a_state_goes_through_json_and_the_metric_resumes(
    name: str, examples: list[tuple[int, bool, int]], cut: int
) -> None:
    predictions = torch.tensor([p / 10 for p, _, _ in examples])
    labels = torch.tensor([float(label) for _, label, _ in examples])
    groups = torch.tensor([group for _, _, group in examples])
    whole, first, second = make_metric(name), make_metric(name), make_metric(name)
    whole.update(predictions, labels, None, groups)
    first.update(predictions[:cut], labels[:cut], None, groups[:cut])
    second.restore(json.loads(json.dumps(first.state(), default=lambda tensor: tensor.tolist())))
    second.update(predictions[cut:], labels[cut:], None, groups[cut:])
    assert second.value() == pytest.approx(whole.value(), nan_ok=True)


@pytest.mark.parametrize("name", METRICS)
def test_a_nan_prediction_is_an_error_and_leaves_no_trace(name: str) -> None:
    metric = make_metric(name)
    with pytest.raises(MetricError, match="1 of 2 predictions are NaN or infinite"):
        metric.update(t(0.1, math.nan), t(0, 1), None, torch.tensor([1, 1]))
    assert math.isnan(metric.value())


@pytest.mark.parametrize("name", METRICS)
def test_nothing_seen_is_nothing_said_and_a_reset_returns_to_that(name: str) -> None:
    metric = make_metric(name)
    assert math.isnan(metric.value())
    metric.update(t(0.2, 0.4), t(0, 1), None, torch.tensor([1, 1]))
    assert not math.isnan(metric.value())
    metric.reset()
    assert math.isnan(metric.value())


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'calibration'"):
        make_metric("calibrations")
    with pytest.raises(ConfigError, match="log, squared, absolute"):
        MeanLoss("cubic")


def test_the_state_of_another_metric_is_refused() -> None:
    with pytest.raises(RestoreError, match=r"\['weight'\] instead of \['label', 'prediction'\]"):
        Calibration().restore({"weight": 1.0})


# Windows


def absolute(window: int | timedelta) -> Windowed:
    return Windowed(MeanLoss("absolute"), window)


def test_a_window_of_examples_ends_in_the_middle_of_a_batch() -> None:
    metric = absolute(3)
    metric.update(t(1, 1, 1, 0, 0), t(0, 0, 0, 0, 0), event_time=torch.tensor([10, 11, 12, 13, 14]))
    assert metric.value() == 1.0
    assert metric.take_rows() == [WindowRow(10, 12, 3, 1.0)]
    metric.update(t(1, 1), t(0, 0), event_time=15)
    assert metric.take_rows() == [WindowRow(13, 15, 3, 1 / 3)]
    assert metric.take_rows() == []


def test_a_batch_may_hold_many_windows() -> None:
    metric = absolute(2)
    metric.update(t(1, 1, 1, 0, 0, 0, 1), torch.zeros(7), event_time=5)
    assert [row.value for row in metric.take_rows()] == [1.0, 0.5, 0.0]


def test_a_window_of_time_ends_when_a_later_example_comes() -> None:
    metric = absolute(timedelta(minutes=1))
    metric.update(t(1, 1), t(0, 0), event_time=torch.tensor([600, 659]))
    assert metric.take_rows() == []
    assert math.isnan(metric.value())
    metric.update(t(0), t(0), event_time=660)
    assert metric.take_rows() == [WindowRow(600, 659, 2, 1.0)]
    metric.update(t(1), t(0), event_time=1000)
    assert metric.take_rows() == [WindowRow(660, 660, 1, 0.0)]


def test_a_late_example_counts_in_the_open_window_and_its_own_tensor_stays_as_it_was() -> None:
    metric = absolute(timedelta(seconds=10))
    times = torch.tensor([10, 25, 12, 31])
    metric.update(t(1, 0, 1, 0), torch.zeros(4), event_time=times)
    assert metric.take_rows() == [WindowRow(10, 10, 1, 1.0), WindowRow(12, 25, 2, 0.5)]
    assert metric.late == 1
    assert times.tolist() == [10, 25, 12, 31]


def test_closing_gives_the_row_of_the_open_window_and_an_empty_one_gives_none() -> None:
    metric = absolute(100)
    metric.update(t(1.0), t(0), event_time=7)
    metric.close_window()
    metric.close_window()
    assert metric.take_rows() == [WindowRow(7, 7, 1, 1.0)]


def test_without_event_times_only_windows_of_examples_can_be() -> None:
    metric = absolute(1)
    metric.update(t(1.0), t(0))
    assert metric.take_rows() == [WindowRow(0, 0, 1, 1.0)]
    with pytest.raises(MetricError, match="pass event_time"):
        absolute(timedelta(seconds=1)).update(t(1.0), t(0))


def test_a_batch_with_a_nan_is_refused_whole() -> None:
    metric = absolute(2)
    with pytest.raises(MetricError, match="NaN"):
        metric.update(t(1, 1, math.nan), torch.zeros(3))
    assert metric.take_rows() == []


@pytest.mark.parametrize("window", [0, -3, timedelta(0), timedelta(milliseconds=1500)])
def test_a_window_must_be_whole_and_not_empty(window: int | timedelta) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        absolute(window)


@pytest.mark.parametrize("window", [7, timedelta(seconds=7)])
@settings(deadline=None)
@given(numbers=st.lists(st.floats(0, 1), max_size=50), batch=st.integers(1, 20), stop=st.integers(0, 50))
def test_windows_do_not_depend_on_batches_nor_on_a_restart(
    window: int | timedelta, numbers: list[float], batch: int, stop: int
) -> None:
    values, times = torch.tensor(numbers, dtype=torch.float64), torch.arange(len(numbers))
    zeros = torch.zeros(len(numbers))
    whole, cut = absolute(window), absolute(window)
    whole.update(values, zeros, event_time=times)
    for start in range(0, len(numbers), batch):
        if start >= stop:
            restored = absolute(window)
            restored.restore(json.loads(json.dumps(cut.state())))
            cut = restored
        piece = slice(start, start + batch)
        cut.update(values[piece], zeros[piece], event_time=times[piece])
    expected, found = whole.take_rows(), cut.take_rows()
    assert [row.value for row in found] == pytest.approx([row.value for row in expected])
    assert [(r.event_time, r.examples) for r in found] == [(r.event_time, r.examples) for r in expected]


def test_a_state_of_other_windows_is_refused() -> None:
    with pytest.raises(RestoreError, match="windows of 3 examples: the state has 3 seconds"):
        absolute(3).restore(absolute(timedelta(seconds=3)).state())


def test_a_window_without_a_value_has_a_row_and_a_state() -> None:
    metric = Windowed(StreamingAuc(), 2)
    metric.update(t(0.1, 0.2), t(1, 1))
    again = Windowed(StreamingAuc(), 2)
    again.restore(json.loads(json.dumps(metric.state(), default=lambda tensor: tensor.tolist())))
    (row,) = again.take_rows()
    assert math.isnan(row.value)
    assert row.examples == 2


# Sets


def set_of_two(**options: Any) -> MetricSet:
    return MetricSet.named({"click": ("auc", "calibration"), "like": ("squared_loss",)}, **options)


def feed(metrics: MetricSet, event_time: int = 0) -> None:
    metrics.update(
        {"click": t(0.1, 0.9), "like": t(0.5, 0.5), "extra": t(0, 0)},
        {"click": t(0, 1), "like": t(0, 1)},
        event_time=event_time,
    )


def test_values_are_named_by_head_and_metric() -> None:
    metrics = set_of_two()
    feed(metrics)
    assert metrics.values() == pytest.approx(
        {"click/auc": 1.0, "click/calibration": 1.0, "like/squared_loss": 0.25}
    )


def test_a_head_that_was_not_predicted_is_named() -> None:
    with pytest.raises(MetricError, match="like need its predictions; the batch has those of click"):
        set_of_two().update({"click": t(0.1)}, {"click": t(0)})
    with pytest.raises(MetricError, match=r"metrics of click, like need its labels; .* nothing"):
        set_of_two().update({"click": t(0.1), "like": t(1)}, {})


def test_weights_are_by_head_too() -> None:
    metrics = MetricSet.named({"a": ("calibration",), "b": ("calibration",)})
    both = {"a": t(1.0, 3.0), "b": t(1.0, 3.0)}
    metrics.update(both, {"a": t(1, 1), "b": t(1, 1)}, {"b": t(1, 0)})
    assert metrics.values() == {"a/calibration": 2.0, "b/calibration": 1.0}


def test_rows_of_all_windows_are_taken_together() -> None:
    metrics = set_of_two(window=timedelta(seconds=10))
    feed(metrics, 5)
    assert metrics.take_rows() == {}
    feed(metrics, 15)
    rows = metrics.take_rows()
    assert list(rows) == ["click/auc", "click/calibration", "like/squared_loss"]
    assert rows["click/auc"] == [WindowRow(5, 5, 2, 1.0)]
    metrics.close_windows()
    assert metrics.take_rows()["like/squared_loss"] == [WindowRow(15, 15, 2, 0.25)]


def test_a_set_restores_what_it_still_has_and_begins_what_is_new() -> None:
    metrics = set_of_two()
    feed(metrics)
    other = MetricSet.named({"click": ("auc", "ne")})
    other.restore(metrics.state())
    assert other.values()["click/auc"] == 1.0
    assert math.isnan(other.values()["click/ne"])
