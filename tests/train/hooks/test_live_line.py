"""The live line: what it says, how often, and to whom."""

from __future__ import annotations

import io
import json
import logging
import math
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from train.runs import FakeClock, FakeRun, train

from monolith import concurrency
from monolith.observe import Metrics
from monolith.observe.logs import JsonFormatter
from monolith.observe.terminal import LiveLine
from monolith.table import TableStats
from monolith.train.hooks import LiveLineHook, TrainStatus
from monolith.train.hooks.live_line import LiveValues, Outlook, describe_status, gauge_status, log_status


def stats(rows: int, **others: int) -> TableStats:
    numbers: dict[str, Any] = dict.fromkeys(TableStats.__dataclass_fields__, 0)
    return TableStats(**{**numbers, "rows": rows, "bytes_total": 100 * rows, **others})


def taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Take what is named out of the options."""
    return {name: options.pop(name) for name in names if name in options}


class Shown:
    """A hook on a run whose steps take a second, and what it showed."""

    def __init__(self, seconds: float = 1.0, every: float = 1.0, **options: Any) -> None:
        self.timer = FakeClock(50.0)
        self.clock = FakeClock(1_000_000.0)
        self.seconds = seconds
        self.seen: list[TrainStatus] = []
        tables = {"user": stats(3, filtered=5, non_finite=6), "item": stats(4, refused=1, evicted=2)}
        self.hook = LiveLineHook(
            self.seen.append,
            LiveValues(
                **{"stats": lambda: tables, "skipped": lambda: 3, **taken(options, "metrics", "evaluated")}
            ),
            Outlook(timer=self.timer, **taken(options, "steps", "max_steps", "read")),
            every=options.pop("every_steps", timedelta(seconds=every)),
            clock=self.clock,
            timer=self.timer,
            **options,
        )

    def run(self, steps: int, *, first_step: int = 0, **how: Any) -> list[TrainStatus]:
        def tick(_: object) -> None:
            self.timer.now += self.seconds

        train([self.hook], steps, run=FakeRun(step=first_step), on_step=tick, **how)
        return self.seen


def test_metrics_that_a_thread_computes_are_shown_once_they_are_known() -> None:
    asked: list[concurrency.Future[dict[str, float]]] = [concurrency.Future() for _ in range(3)]
    asked[2].set_result({})  # that of the end of the run
    shown = Shown(metrics=partial(next, iter(asked)), every=2.0)
    seen: list[int] = []

    def tick(run: FakeRun) -> None:
        seen.append(len(shown.seen))
        shown.timer.now += 1.0
        if run.step == 3:
            asked[0].set_result({"click/auc": 0.5, "click/gauc": math.nan})
        if run.step == 5:
            asked[1].set_result({"click/auc": 0.75})

    train([shown.hook], 5, run=FakeRun(step=0), on_step=tick)
    # Each has the numbers of its own step, and comes with the first step after its metrics are known.
    found = [(one.step, one.metrics) for one in shown.seen]
    assert found == [(2, {"click/auc": 0.5}), (4, {"click/auc": 0.75}), (5, {})]
    assert seen == [0, 0, 0, 1, 1]


def standing(**changes: Any) -> TrainStatus:
    return TrainStatus(
        **{
            "step": 1200,
            "last_step": 5000,
            "seconds_left": 95.0,
            "examples": 76_800,
            "examples_per_s": 12_345.6,
            "loss": 0.43214,
            "metrics": {"click/auc": 0.7312, "click/log_loss": 0.4},
            "lag_seconds": 3.2,
            "rows": 1_234_567,
            "bytes": 3 << 20,
            "filtered": 9,
            "refused": 0,
            "evicted": 33,
            **changes,
        }
    )


# Gathering


def test_it_is_shown_at_most_that_often_and_once_more_at_the_end() -> None:
    assert [one.step for one in Shown(seconds=0.25).run(10)] == [4, 8, 10]


def test_it_may_be_shown_every_so_many_steps() -> None:
    assert [one.step for one in Shown(seconds=100, every_steps=4).run(10, first_step=2)] == [4, 8, 12]


def test_a_run_that_ends_before_the_first_showing_leaves_nothing() -> None:
    assert Shown(every=30).run(10) == []


def test_the_loss_is_the_mean_since_the_last_showing() -> None:
    assert [one.loss for one in Shown(seconds=0.5).run(4, losses=float)] == [1.5, 3.5]


def test_speed_is_that_of_the_last_seconds() -> None:
    shown = Shown()
    steps = iter([1.0] * 30 + [0.1] * 200)

    def tick(_: object) -> None:
        shown.timer.now += next(steps)

    train([shown.hook], 230, on_step=tick)
    assert shown.seen[29].examples_per_s == pytest.approx(1.0)  # an example a step
    assert shown.seen[-1].examples_per_s == pytest.approx(10.0)
    assert shown.seen[-1].examples == 230


def test_tables_are_summed_up() -> None:
    (one,) = Shown().run(1)
    assert (one.rows, one.bytes, one.filtered, one.refused, one.evicted) == (7, 700, 5, 1, 2)
    assert (one.skipped, one.non_finite) == (3, 6)


@pytest.mark.parametrize(("event_time", "lag"), [(999_990, 10.0), (0, None), (1_000_005, 0.0)])
def test_the_lag_is_from_the_event_to_the_clock_where_there_are_event_times(
    event_time: int, lag: float | None
) -> None:
    assert Shown().run(1, event_times=lambda _: event_time)[0].lag_seconds == lag


def test_data_that_was_there_already_is_not_behind() -> None:
    (one,) = Shown(live=False).run(1, event_times=lambda _: 999_990)
    assert (one.lag_seconds, one.event_time) == (None, 999_990)
    assert "behind" not in describe_status(one)


def test_metrics_without_a_value_are_left_out() -> None:
    shown = Shown(metrics=lambda: {"click/auc": 0.7, "like/auc": math.nan})
    assert shown.run(1)[0].metrics == {"click/auc": 0.7}


@pytest.mark.parametrize(
    ("limits", "last", "left"),
    [
        ({}, None, None),
        ({"steps": 10}, 110, 8.0),
        ({"max_steps": 105}, 105, 3.0),
        ({"steps": 10, "max_steps": 105}, 105, 3.0),
    ],
)
def test_the_end_is_the_nearest_limit(limits: dict[str, int], last: int | None, left: float | None) -> None:
    one = Shown(**limits).run(2, first_step=100)[1]
    assert (one.last_step, one.seconds_left) == (last, left)


def test_data_of_which_a_part_is_known_to_be_read_gives_the_time_left() -> None:
    parts = iter([0.1, 0.1, 0.2, 0.3])
    seen = Shown(read=lambda: next(parts)).run(3)
    assert [one.data_read for one in seen] == [0.1, 0.2, 0.3]
    assert [one.seconds_left for one in seen] == [None, pytest.approx(8.0), pytest.approx(7.0)]


@pytest.mark.parametrize(("limits", "left"), [({"steps": 4}, 1.0), ({"steps": 400}, 7.0)])
def test_of_steps_and_data_that_counts_which_ends_first(limits: dict[str, int], left: float) -> None:
    parts = iter([0.1, 0.1, 0.2, 0.3])
    assert Shown(read=lambda: next(parts), **limits).run(3)[-1].seconds_left == pytest.approx(left)


# Showing


def test_what_says_nothing_is_left_out() -> None:
    assert describe_status(standing()) == {
        "speed": "12,346 examples/s",
        "loss": "0.4321",
        "click auc": "0.7312",
        "rows": "1,234,567",
        "memory": "3 MiB",
        "behind": "3s",
        "not admitted": "9",
        "evicted": "33",
        "left": "1:35",
    }
    bare = standing(metrics={}, lag_seconds=None, filtered=0, evicted=0, seconds_left=None)
    assert list(describe_status(bare)) == ["speed", "loss", "rows", "memory"]


def test_the_part_of_the_data_is_shown_with_the_epoch_where_there_are_several() -> None:
    assert describe_status(standing(data_read=0.42))["data"] == "42%"
    assert describe_status(standing(data_read=0.42, epochs=3))["data"] == "42% (epoch 2 of 3)"
    assert describe_status(standing(data_read=1.0, epochs=3))["data"] == "100% (epoch 3 of 3)"


def test_what_was_not_finite_is_shown() -> None:
    facts = describe_status(standing(skipped=4, non_finite=1200))
    assert (facts["skipped batches"], facts["rows with bad gradients"]) == ("4", "1,200")


def test_data_of_long_ago_is_days_behind() -> None:
    assert describe_status(standing(lag_seconds=86_400 * 1096.4))["behind"] == "1,096 days"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_is_drawn_over_itself_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with LiveLine("Training clicks", "steps", stream) as line:
        for step in (1200, 1300):
            one = standing(step=step)
            line.show(describe_status(one), one.step, one.last_step)
    drawn = stream.getvalue()
    assert "1,200/5,000 steps (24%)" in drawn
    assert "1,300/5,000 steps (26%)" in drawn
    assert "━" in drawn
    assert "12,346 examples/s" in drawn
    assert "\x1b[1A" in drawn  # up again, over what was there


def test_a_known_part_of_the_data_is_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with LiveLine("Training clicks", "steps", stream) as line:
        line.show({}, 1200, None, 0.5)
    assert "━" in stream.getvalue()


def test_without_an_end_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with LiveLine("Training clicks", "steps", stream) as line:
        line.show({}, 1200)
    assert "1,200 steps" in stream.getvalue()
    assert "━" not in stream.getvalue()


def test_elsewhere_it_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_status(standing())
    assert caplog.messages == [
        "step 1,200/5,000 (24%): speed 12,346 examples/s, loss 0.4321, click auc 0.7312, rows 1,234,567, "
        "memory 3 MiB, behind 3s, not admitted 9, evicted 33, left 1:35"
    ]


def test_a_log_of_json_has_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_status(standing(loss=math.nan))
    found = json.loads(JsonFormatter().format(caplog.records[0]), parse_constant=pytest.fail)
    assert (found["step"], found["rows"], found["loss"]) == (1200, 1_234_567, None)
    assert found["metrics"]["click/auc"] == 0.7312


def test_gauges_are_kept_for_prometheus() -> None:
    metrics = Metrics()
    gauge_status(metrics)(standing())
    text = metrics.render().decode()
    assert "monolith_train_step 1200.0" in text
    assert "monolith_train_event_time_lag_seconds 3.2" in text
    assert 'monolith_train_metric{metric="click/auc"} 0.7312' in text


def test_gauges_tell_the_tables_apart() -> None:
    metrics = Metrics()
    tables = {"user": stats(3, inserted=9, filtered=5), "item": stats(4, refused=1, evicted=2)}
    gauge_status(metrics)(standing(tables=tables))
    text = metrics.render().decode()
    for line in (
        'table_rows{table="user"} 3.0',
        'table_bytes{table="item"} 400.0',
        'table_births{table="user"} 9.0',
        'table_filtered{table="user"} 5.0',
        'table_refused{table="item"} 1.0',
        'table_expired{table="item"} 2.0',
    ):
        assert f"monolith_{line}\n" in text


TIERED = stats(
    100,
    cold_rows=60,
    cold_bytes=6144,
    tiered_ids=1000,
    cold_found=50,
    cold_found_in_memory=20,
    cold_reads=2,
    cold_bytes_read=4096,
    cold_bytes_written=8192,
    compactions=1,
)


def test_gauges_tell_the_tiers_of_tiered_tables_and_only_of_these() -> None:
    metrics = Metrics()
    show = gauge_status(metrics)
    show(standing(tables={"user": stats(3)}))
    assert b"cold" not in metrics.render()
    show(standing(tables={"user": stats(3), "item": TIERED}))
    text = metrics.render().decode()
    for line in (
        'table_cold_rows{table="item"} 60.0',
        'table_cold_bytes{table="item"} 6144.0',
        'table_tiered_ids{table="item"} 1000.0',
        'table_cold_ids_read{table="item"} 30.0',
        'table_cold_reads{table="item"} 2.0',
        'table_cold_bytes_read{table="item"} 4096.0',
        'table_cold_bytes_written{table="item"} 8192.0',
        'table_compactions{table="item"} 1.0',
    ):
        assert f"monolith_{line}\n" in text
    assert 'cold_rows{table="user"}' not in text


SPILLING = stats(100, device_rows=40, device_bytes=320)


def test_gauges_and_status_tell_which_rows_are_on_a_device_if_others_are_elsewhere() -> None:
    metrics = Metrics()
    show = gauge_status(metrics)
    show(standing(tables={"user": stats(3), "item": SPILLING, "shop": replace(TIERED, device_bytes=320)}))
    text = metrics.render().decode()
    for line in ('rows{table="item"} 40.0', 'bytes{table="item"} 320.0', 'rows{table="shop"} 0.0'):
        assert f"monolith_table_device_{line}\n" in text
    assert 'device_rows{table="user"}' not in text
    assert 'cold_rows{table="item"}' not in text
    assert 'cold_rows{table="shop"} 60.0' in text
    assert "on the device" not in describe_status(standing(tables={"user": stats(3)}))
    facts = describe_status(standing(tables={"user": stats(3), "item": SPILLING}))
    assert facts["on the device"] == "40 rows"


def test_rows_in_files_are_told_if_a_table_is_tiered() -> None:
    assert "in files" not in describe_status(standing(tables={"user": stats(3)}))
    facts = describe_status(standing(tables={"user": stats(3), "item": TIERED}))
    assert (facts["in files"], facts["found in memory"]) == ("60 rows, 6 KiB", "97%")


def test_the_newest_event_is_a_gauge_where_the_data_has_times() -> None:
    metrics = Metrics()
    show = gauge_status(metrics)
    show(standing())
    assert b"monolith_train_event_time_seconds 0.0" in metrics.render()
    show(standing(event_time=999_990))
    assert b"monolith_train_event_time_seconds 999990.0" in metrics.render()


def test_the_staleness_of_dense_weights_is_told_where_there_is_some() -> None:
    assert "dense staleness" not in describe_status(standing())
    assert "dense staleness" not in describe_status(standing(staleness=0))
    assert describe_status(standing(staleness=1))["dense staleness"] == "1 step"
    assert describe_status(standing(staleness=3))["dense staleness"] == "3 steps"
    metrics = Metrics()
    gauge_status(metrics)(standing(staleness=3))
    assert b"train_dense_staleness_steps 3.0" in metrics.render()


def test_the_last_evaluation_is_in_the_line_and_in_the_gauges() -> None:
    found = {"click/auc": 0.75, "click/log_loss": 0.5, "loss": 0.25}
    shown = Shown(evaluated=lambda: found | {"click/ne": math.nan}).run(2)[-1]
    assert shown.evaluated == found
    assert describe_status(shown)["eval click auc"] == "0.7500"
    assert "eval loss" not in describe_status(shown)
    assert describe_status(standing(evaluated={"loss": 0.25}))["eval loss"] == "0.2500"
    metrics = Metrics()
    gauge_status(metrics)(shown)
    assert b'train_evaluated_metric{metric="click/log_loss"} 0.5' in metrics.render()
