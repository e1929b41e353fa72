import io
import threading
from datetime import timedelta

import pytest

from monolith.observe import progress
from monolith.observe.progress import counted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_short_work_leaves_a_log_untouched():
    out = io.StringIO()
    with progress("Saving rows", total=10, unit="rows", stream=out, clock=Clock()) as bar:
        bar.advance(10)
    assert out.getvalue() == ""


def test_long_work_prints_a_line_per_period_with_rate_and_time_left_and_one_at_the_end():
    out, clock = io.StringIO(), Clock()
    every = timedelta(seconds=30)
    with progress("Saving rows", total=4000, unit="rows", stream=out, clock=clock, every=every) as bar:
        for _ in range(4):
            clock.now += 20
            bar.advance(1000)
    assert out.getvalue().splitlines() == [
        "Saving rows: 2,000/4,000 rows (50%), 50 rows/s, 40s left",
        "Saving rows: 4,000/4,000 rows (100%), 50 rows/s, 0s left",
        "Saving rows: 4,000/4,000 rows (100%), 50 rows/s, done after 1:20",
    ]


def test_without_a_total_there_is_no_time_left():
    out, clock = io.StringIO(), Clock()
    with progress("Reading", unit="batches", stream=out, clock=clock) as bar:
        clock.now += 60
        bar.advance(3)
        assert out.getvalue() == "Reading: 3 batches, 0.05 batches/s\n"


def test_without_a_total_a_part_that_is_known_gives_percent_and_time_left():
    out, clock, part = io.StringIO(), Clock(), [0.2]
    with progress("Reading", unit="records", stream=out, clock=clock, fraction=lambda: part[0]) as bar:
        clock.now += 40
        bar.advance(30)
        part[0] = 0.999
        clock.now += 60
        bar.advance(70)
    assert out.getvalue().splitlines() == [
        "Reading: 30 records (20%), 0.75 records/s, 2:40 left",
        "Reading: 100 records (99%), 1 records/s, 0s left",
        "Reading: 100 records, 1 records/s, done after 1:40",
    ]


def test_a_bar_shows_a_part_that_is_known():
    out, clock = Terminal(), Clock()
    with progress("Reading", unit="records", stream=out, clock=clock, fraction=lambda: 0.25) as bar:
        clock.now += 2
        bar.advance(40)
    assert "40 records (25%)" in out.getvalue()
    assert "20 records/s" in out.getvalue()


def test_an_exception_is_not_reported_as_done():
    out, clock = io.StringIO(), Clock()

    def read_and_fail() -> None:
        with progress("Reading", stream=out, clock=clock) as bar:
            clock.now += 3700
            bar.advance()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        read_and_fail()
    assert out.getvalue().splitlines()[-1] == "Reading: 1, 0.00027/s, stopped after 1:01:40"


def test_every_none_keeps_silent():
    out, clock = io.StringIO(), Clock()
    with progress("Reading", stream=out, clock=clock, every=None) as bar:
        clock.now += 1e6
        bar.advance()
    assert out.getvalue() == ""


def test_threads_may_advance_together():
    out, clock = io.StringIO(), Clock()
    with progress("Reading", total=4000, stream=out, clock=clock) as bar:
        threads = [threading.Thread(target=lambda: [bar.advance() for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.now += 40
        bar.advance(0)
    assert "4,000/4,000" in out.getvalue()


def test_a_terminal_gets_a_bar_with_amount_and_rate():
    out, clock = Terminal(), Clock()
    with progress("Saving rows", total=100, unit="rows", stream=out, clock=clock) as bar:
        clock.now += 1
        bar.advance(40)
        clock.now += 1
        bar.advance(60)
    assert "Saving rows" in out.getvalue()
    assert "100/100 rows (100%)" in out.getvalue()


def test_work_of_size_zero_is_no_division_by_zero():
    out, clock = io.StringIO(), Clock()
    with progress("Nothing", total=0, stream=out, clock=clock) as bar:
        clock.now += 60
        bar.advance(0)
    assert "0/0" in out.getvalue()


def test_a_count_of_one_is_one_thing():
    assert [counted(number, "event") for number in (0, 1, 2000)] == ["0 events", "1 event", "2,000 events"]
