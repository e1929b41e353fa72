"""What the page remembers has bounds, and loses detail before it loses history."""

from __future__ import annotations

import math

import pytest

from monolith.ui.curves import LatelyCounted, ThinnedCurve, quantile


def curve_of(count: int, most: int = 8) -> ThinnedCurve:
    curve = ThinnedCurve(most)
    for number in range(count):
        curve.add(number, 10.0 * number)
    return curve


def test_points_stay_in_order() -> None:
    curve = curve_of(3)
    assert curve.since(0) == [(0, 0.0), (1, 10.0), (2, 20.0)]
    assert curve.since(2) == [(2, 20.0)]
    assert curve.generation == 0


def test_a_full_curve_is_made_coarser_and_keeps_its_whole_history() -> None:
    curve = curve_of(8)
    assert curve.since(0) == [(1, 5.0), (3, 25.0), (5, 45.0), (7, 65.0)]
    assert curve.generation == 1
    curve.add(8, 80.0)  # waits for its neighbour
    assert len(curve) == 4
    assert curve.newest == (8, 80.0)
    curve.add(9, 90.0)
    assert curve.since(4) == [(9, 85.0)]


@pytest.mark.parametrize("count", [7, 8, 100, 10_000])
def test_there_are_never_more_points_than_allowed(count: int) -> None:
    curve = curve_of(count)
    assert 3 <= len(curve) < 8
    assert curve.since(0)[0][0] < count / 3
    assert curve.since(0)[-1][0] > count / 2


def test_a_point_before_the_last_begins_the_history_again_from_there() -> None:
    curve = curve_of(5)
    curve.add(2, -1.0)
    assert curve.since(0) == [(0, 0.0), (1, 10.0), (2, -1.0)]
    assert curve.generation == 1


@pytest.mark.parametrize("point", [(math.nan, 1.0), (9.0, math.inf), (2.0, 30.0)])
def test_what_has_no_place_or_that_of_the_last_is_left_out(point: tuple[float, float]) -> None:
    curve = curve_of(3)
    curve.add(*point)
    assert curve.since(0) == [(0, 0.0), (1, 10.0), (2, 20.0)]
    assert curve.newest == ((2, 30.0) if point[0] == 2 else (2, 20.0))


# Counts of late


class Timer:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def buckets(small: float, large: float) -> dict[float, float]:
    return {0.1: small, 1.0: small + large, math.inf: small + large}


def test_a_histogram_is_of_the_last_seconds() -> None:
    timer = Timer()
    lately = LatelyCounted(60.0, timer)
    assert lately.of("read", buckets(4, 0)).counts == [4, 0, 0]
    timer.now = 30.0
    assert lately.of("read", buckets(4, 2)).counts == [4, 2, 0]
    timer.now = 90.0
    assert lately.of("read", buckets(4, 3)).counts == [0, 1, 0]
    assert lately.of("train", buckets(1, 0)).counts == [1, 0, 0]


def test_a_histogram_that_begins_again_counts_from_there() -> None:
    timer = Timer()
    lately = LatelyCounted(60.0, timer)
    lately.of("read", buckets(400, 0))
    timer.now = 61.0
    assert lately.of("read", buckets(1, 0)).counts == [1, 0, 0]


def test_quantiles_are_read_off_a_histogram() -> None:
    assert quantile([1.0, 2.0, math.inf], [10, 10, 0], 0.5) == 1.0
    assert quantile([1.0, 2.0, math.inf], [10, 10, 0], 0.75) == 1.5
    assert quantile([1.0, 2.0, math.inf], [0, 0, 5], 0.5) == 2.0
    assert quantile([1.0, math.inf], [0, 0], 0.5) is None
    found = LatelyCounted(60.0, Timer()).of("read", buckets(1, 1))
    assert found.bounds == [0.1, 1.0, None]
    assert found.p50 == pytest.approx(0.1)
    assert found.total == 2
