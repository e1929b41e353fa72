"""What the page remembers has bounds, and loses detail before it loses history.

The board: what sources say, gathered, and told as it changes.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from ui.sample import SampleRun

from monolith.errors import ConfigError, UnavailableError
from monolith.ui import Feed
from monolith.ui.board import SILENT_SECONDS, Board, Seen
from monolith.ui.figures import PageReading, RecentHistograms, ThinnedCurve, quantile


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
    lately = RecentHistograms(60.0, timer)
    assert lately.of("read", buckets(4, 0)).counts == [4, 0, 0]
    timer.now = 30.0
    assert lately.of("read", buckets(4, 2)).counts == [4, 2, 0]
    timer.now = 90.0
    assert lately.of("read", buckets(4, 3)).counts == [0, 1, 0]
    assert lately.of("train", buckets(1, 0)).counts == [1, 0, 0]


def test_a_histogram_that_begins_again_counts_from_there() -> None:
    timer = Timer()
    lately = RecentHistograms(60.0, timer)
    lately.of("read", buckets(400, 0))
    timer.now = 61.0
    assert lately.of("read", buckets(1, 0)).counts == [1, 0, 0]


def test_quantiles_are_read_off_a_histogram() -> None:
    assert quantile([1.0, 2.0, math.inf], [10, 10, 0], 0.5) == 1.0
    assert quantile([1.0, 2.0, math.inf], [10, 10, 0], 0.75) == 1.5
    assert quantile([1.0, 2.0, math.inf], [0, 0, 5], 0.5) == 2.0
    assert quantile([1.0, math.inf], [0, 0], 0.5) is None
    found = RecentHistograms(60.0, Timer()).of("read", buckets(1, 1))
    assert found.bounds == [0.1, 1.0, None]
    assert found.p50 == pytest.approx(0.1)
    assert found.total == 2


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Moody:
    """A source that answers, refuses or breaks, as told."""

    name = "moody"

    def __init__(self) -> None:
        self.outcome: PageReading | Exception = PageReading(kind="server", facts={"requests": "1"})

    def read(self) -> PageReading:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def close(self) -> None: ...


def state(board: Board) -> dict[str, Any]:
    news = board.news(Seen())
    assert news is not None
    return news


def curve(news: dict[str, Any] | None) -> list[tuple[bool, list[list[float]]]]:
    assert news is not None
    return [(one["whole"], one["points"]) for one in news["curves"]]


def test_a_source_that_is_down_says_why_and_comes_back_by_itself() -> None:
    clock, source = Clock(), Moody()
    board = Board([source], clock=clock)
    assert state(board)["sources"][0]["up"] is False
    board.look(source)
    (one,) = state(board)["sources"]
    assert (one["up"], one["kind"], one["facts"], one["read_at"]) == (
        True,
        "server",
        {"requests": "1"},
        1_000.0,
    )
    clock.now, source.outcome = 1_010.0, UnavailableError("host:1 cannot be reached")
    board.look(source)
    clock.now = 1_020.0
    board.look(source)
    (one,) = state(board)["sources"]
    assert (one["up"], one["error"], one["since"]) == (False, "host:1 cannot be reached", 1_010.0)
    assert (one["facts"], one["read_at"]) == ({"requests": "1"}, 1_000.0)  # what it said last
    source.outcome = PageReading(kind="server", facts={"requests": "2"})
    board.look(source)
    (one,) = state(board)["sources"]
    assert (one["up"], one["facts"], one["since"]) == (True, {"requests": "2"}, 1_020.0)


def test_a_source_that_breaks_breaks_no_other() -> None:
    source = Moody()
    source.outcome = ZeroDivisionError()
    board = Board([source])
    board.look(source)
    assert "ZeroDivisionError" in state(board)["sources"][0]["error"]


def test_a_source_that_hangs_is_down_after_a_while() -> None:
    clock, hangs, goes_on = Clock(), threading.Event(), threading.Event()

    class Hanging(Moody):
        def read(self) -> PageReading:
            if hangs.is_set():
                goes_on.wait(60)
            return PageReading(kind="server")

    source = Hanging()
    board = Board([source], clock=clock)
    board.look(source)
    hangs.set()
    asking = threading.Thread(target=board.look, args=(source,))
    asking.start()
    try:
        clock.now += SILENT_SECONDS - 1
        assert state(board)["sources"][0]["up"]
        clock.now += 2
        assert state(board)["sources"][0]["error"] == "it has not answered for 21 s"
    finally:
        goes_on.set()
        asking.join()


def test_an_onlooker_is_told_all_at_first_and_then_what_is_new() -> None:
    feed = Feed("demo")
    board, seen = Board([feed]), Seen()
    feed.add("auc", 1.0, 0.5)
    feed.add("auc", 2.0, 0.6)
    board.look(feed)
    assert curve(board.news(seen)) == [(True, [[1.0, 0.5], [2.0, 0.6]])]
    assert board.news(seen) is None
    feed.add("auc", 3.0, 0.7)
    board.look(feed)
    assert curve(board.news(seen)) == [(False, [[3.0, 0.7]])]
    board.look(feed)
    assert curve(board.news(seen)) == []
    feed.add("auc", 2.0, 0.9)  # a run that went back
    board.look(feed)
    assert curve(board.news(seen)) == [(True, [[1.0, 0.5], [2.0, 0.9]])]
    assert curve(board.news(Seen())) == [(True, [[1.0, 0.5], [2.0, 0.9]])]


def test_curves_without_end_are_not_all_kept() -> None:
    feed = Feed("demo")
    board = Board([feed])
    for number in range(300):
        feed.add("auc", 1.0, 0.5, label=f"head {number}")
    board.look(feed)
    assert len(state(board)["curves"]) == 200


def test_two_sources_need_two_names() -> None:
    with pytest.raises(ConfigError, match="two sources are called 'demo'"):
        Board([Feed("demo"), Feed("demo")])


def test_only_a_source_that_publishes_can_be_controlled() -> None:
    run = SampleRun()
    board = Board([run, Feed("demo")])
    board.control("online").hold("why")
    assert run.calls == [("hold", "why")]
    with pytest.raises(ConfigError, match="demo has no publishing"):
        board.control("demo")
    with pytest.raises(ConfigError, match="there is no source 'x'"):
        board.control("x")
