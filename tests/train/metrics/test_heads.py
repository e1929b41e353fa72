"""The metrics of a run: batches are taken in several at once, by a thread if steps are graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from time import sleep
from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names
from torch import Tensor
from train.tasks import Clicks

from monolith.errors import MetricError
from monolith.feature import Batch, FeatureIds
from monolith.train import METRICS, Mode
from monolith.train.metrics import heads as heads_module
from monolith.train.metrics.heads import HeadMetrics
from monolith.train.metrics.metric_set import MetricSet, WindowRow

SIZE = 50
NAMES = ("auc", "log_loss", "ne", "calibration", "rmse", "mae")


class Measured(Clicks):
    """A task with many metrics, whose weights are some whole number, and sometimes 0."""

    names: tuple[str, ...] = NAMES

    def metrics(self, mode: Mode) -> tuple[str, ...]:  # noqa: ARG002
        return self.names

    def weights(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"click": torch.arange(len(batch)) % 3.0}

    def groups(self, batch: Batch) -> Tensor:
        return torch.arange(len(batch)) % 7


@pytest.fixture(params=["host", *device_names()])
def where(request: pytest.FixtureRequest) -> torch.device:
    """Where predictions are."""
    return torch.device("cpu") if request.param == "host" else device_named(request.param).torch_device


def batch_of(seed: int, event_time: int = 0, size: int = SIZE) -> tuple[dict[str, Tensor], Batch]:
    draws = torch.Generator().manual_seed(seed)
    predictions, labels = torch.rand(size, generator=draws), torch.rand(size, generator=draws)
    ids = FeatureIds.one_each(("user",), torch.zeros((size, 1), dtype=torch.int64), event_time=event_time)
    return {"click": predictions}, Batch(ids, {}, {"click": (labels < predictions).float()})


def there(where: torch.device, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {head: one.to(where) for head, one in given.items()}


def rows_of(window: Any, where: torch.device, times: list[int]) -> dict[str, list[tuple[int, WindowRow]]]:
    """Return the rows of windows, each with the number of the batch after which it was reported."""
    told: dict[str, list[tuple[int, WindowRow]]] = {}
    number = 0
    metrics = HeadMetrics(
        Measured(),
        Mode.TRAIN,
        window=window,
        report=lambda name, row: told.setdefault(name, []).append((number, row)),
    )
    for number, time in enumerate(times):
        predictions, batch = batch_of(number, time)
        metrics.update(there(where, predictions), batch)
    metrics.end()
    return told


def batch_by_batch(window: Any, times: list[int]) -> dict[str, list[tuple[int, WindowRow]]]:
    """Return the same rows by a set of metrics that takes in each batch as it comes."""
    told: dict[str, list[tuple[int, WindowRow]]] = {}
    metrics = MetricSet.named({"click": NAMES}, window=window)
    for number, time in enumerate(times):
        predictions, batch = batch_of(number, time)
        metrics.update(predictions, batch.labels, Measured().weights(batch), event_time=time)
        for name, rows in metrics.take_rows().items():
            told.setdefault(name, []).extend((number, row) for row in rows)
    metrics.close_windows()
    for name, rows in metrics.take_rows().items():
        told.setdefault(name, []).extend((len(times) - 1, row) for row in rows)
    return told


@pytest.mark.parametrize(
    ("window", "times"),
    [
        (120, [10, 10, 20, 20, 30, 31, 32, 33]),
        (7, [10, 11, 12]),
        (timedelta(seconds=10), [10, 12, 21, 22, 15, 23, 60, 61, 95]),
    ],
)
def test_windows_end_with_the_same_batch_and_value_as_batch_by_batch(
    window: Any, times: list[int], where: torch.device
) -> None:
    found, expected = rows_of(window, where, times), batch_by_batch(window, times)
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert [number for number, _ in found[name]] == [number for number, _ in rows]
        for (_, mine), (_, theirs) in zip(found[name], rows, strict=True):
            assert (mine.first_event_time, mine.event_time, mine.examples) == (
                theirs.first_event_time,
                theirs.event_time,
                theirs.examples,
            )
            if name == "click/auc":  # whole weights: equal to the bit
                assert mine.value == theirs.value or (math.isnan(mine.value) and math.isnan(theirs.value))
            else:
                assert mine.value == pytest.approx(theirs.value, rel=1e-12, nan_ok=True)


def test_a_value_covers_all_batches_and_so_does_a_saved_state(where: torch.device) -> None:
    whole, first, second = (HeadMetrics(Measured(), Mode.EVALUATE) for _ in range(3))
    for number in range(6):
        predictions, batch = batch_of(number)
        whole.update(there(where, predictions), batch)
        (first if number < 3 else second).update(there(where, predictions), batch)
        if number == 2:
            second.restore(first.state())
    assert whole.values()["click/auc"] == second.values()["click/auc"]
    assert second.values() == pytest.approx(whole.values(), rel=1e-12)


def test_many_examples_are_not_all_kept(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_module, "AT_ONCE", 3 * SIZE)
    metrics = HeadMetrics(Measured(), Mode.EVALUATE)
    for number in range(8):
        predictions, batch = batch_of(number)
        metrics.update(there(where, predictions), batch)
        assert metrics._kept_examples == SIZE * ((number + 1) % 3)


@pytest.mark.parametrize(("window", "times"), [(120, range(12)), (timedelta(seconds=3), range(12))])
def test_a_thread_ends_the_same_windows_whenever_it_is_done(
    window: Any, times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reports them after the same batches, however slow it is."""

    def told() -> list[tuple[int, str, WindowRow]]:
        found: list[tuple[int, str, WindowRow]] = []
        metrics = HeadMetrics(
            Measured(),
            Mode.TRAIN,
            window=window,
            report=lambda name, row: found.append((number, name, row)),
            threaded=True,
        )
        number = 0
        for number in times:
            predictions, batch = batch_of(number, number)
            metrics.update(predictions, batch)
        metrics.end()
        metrics.close()
        return found

    def slowly(*given: Any) -> None:
        sleep(0.01)
        add(*given)

    add = heads_module._add
    quick = told()
    monkeypatch.setattr(heads_module, "_add", slowly)
    slow = told()
    assert quick == slow
    expected = batch_by_batch(window, list(times))
    for name, rows in expected.items():
        mine = [(after, row) for after, one, row in quick if one == name]
        assert [row.examples for _, row in mine] == [row.examples for _, row in rows]
        assert [row.value for _, row in mine] == pytest.approx([row.value for _, row in rows], rel=1e-12)
        assert all(after >= due for (after, _), (due, _) in zip(mine, rows, strict=True))


def test_a_state_and_a_value_include_what_the_thread_still_has() -> None:
    threaded = HeadMetrics(Measured(), Mode.TRAIN, window=2 * SIZE, threaded=True)
    plain = HeadMetrics(Measured(), Mode.TRAIN, window=2 * SIZE)
    for number in range(7):
        predictions, batch = batch_of(number)
        threaded.update(predictions, batch)
        plain.update(predictions, batch)
        assert threaded.values() == plain.values()
        assert threaded.values_later().result(timeout=30) == plain.values_later().result(timeout=0)
    assert str(threaded.state()) == str(plain.state())
    threaded.close()


def test_what_the_metrics_raise_in_a_thread_is_raised_by_the_next_part() -> None:
    metrics = HeadMetrics(Measured(), Mode.TRAIN, window=SIZE, threaded=True)
    predictions, batch = batch_of(0)
    metrics.update(predictions, Batch(batch.ids, {}, {"click": batch.labels["click"] * 2}))
    with pytest.raises(MetricError, match=r"auc: labels must be 0 or 1"):
        metrics.update(*batch_of(1))
    metrics.close()


def test_a_batch_that_is_known_not_to_be_finite_is_left_out() -> None:
    metrics, without = (HeadMetrics(Measured(), Mode.EVALUATE) for _ in range(2))
    for number in range(3):
        metrics.update(*batch_of(number), {"click": number != 1})
        if number != 1:
            without.update(*batch_of(number))
    assert metrics.left_out == 1
    assert metrics.values() == without.values()


def test_a_restore_forgets_the_batches_that_were_kept() -> None:
    metrics, other = (HeadMetrics(Measured(), Mode.EVALUATE) for _ in range(2))
    metrics.update(*batch_of(0))
    saved = metrics.state()
    metrics.update(*batch_of(1))
    metrics.restore(saved)
    for one in (metrics, other):
        one.update(*batch_of(0 if one is other else 2))
    other.update(*batch_of(2))
    assert metrics.values() == pytest.approx(other.values())


def test_batches_without_weights_and_with_them_may_follow_each_other() -> None:
    class Sometimes(Measured):
        def weights(self, batch: Batch) -> Any:
            return super().weights(batch) if batch.ids.event_time else None

    metrics = HeadMetrics(Sometimes(), Mode.EVALUATE)
    expected = MetricSet.named({"click": NAMES})
    for number in range(4):
        predictions, batch = batch_of(number, number % 2)
        metrics.update(predictions, batch)
        expected.update(predictions, batch.labels, Sometimes().weights(batch))
    assert metrics.values() == pytest.approx(expected.values())


def test_labels_that_make_no_sense_are_an_error_before_a_save_and_only_once() -> None:
    metrics = HeadMetrics(Measured(), Mode.TRAIN, window=1000)
    predictions, batch = batch_of(0)
    metrics.update(predictions, Batch(batch.ids, {}, {"click": batch.labels["click"] * 2}))
    with pytest.raises(MetricError, match=r"auc: labels must be 0 or 1, and .* are not: one is 2"):
        metrics.state()
    metrics.state()


class OfMyOwn:
    """The sum of predictions, in host memory; it is given them as the model made them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = 0.0

    def update(self, predictions: Tensor, labels: Tensor, weights: Any = None, groups: Any = None) -> None:
        del labels, weights, groups
        assert predictions.dtype is torch.float32
        self.total += float(predictions.cpu().numpy().sum())

    def value(self) -> float:
        return self.total

    def state(self) -> dict[str, Any]:
        return {"total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]


def test_a_metric_of_the_users_own_is_given_what_the_model_predicted(
    where: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "mine", OfMyOwn)
    monkeypatch.setattr(Measured, "names", ("auc", "mine", "gauc"))
    metrics = HeadMetrics(Measured(), Mode.TRAIN, window=2 * SIZE)
    for number in range(6):
        predictions, batch = batch_of(number)
        metrics.update(there(where, predictions), batch)
    sums = [float(batch_of(number)[0]["click"].sum()) for number in (4, 5)]
    assert metrics.values()["click/mine"] == pytest.approx(sum(sums))
