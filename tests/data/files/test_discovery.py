"""Patterns, ranges and files that appear."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

import pytest

from monolith.data.files.discovery import (
    Watch,
    expand,
    find_files,
    gen_patterns,
    matching_patterns,
)
from monolith.errors import ConfigError, DataError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def names(folder: Path, paths: Sequence[str]) -> list[str]:
    return [str(Path(path).relative_to(folder)) for path in paths]


def test_a_pattern_without_ranges_is_itself() -> None:
    assert expand("/data/{x}/part-*") == ["/data/{x}/part-*"]


def test_days_and_hours_and_numbers_are_counted_to_the_last() -> None:
    assert expand("d/{DATE(20240228,20240301)}/p") == ["d/20240228/p", "d/20240229/p", "d/20240301/p"]
    assert expand("{DATE(2023123122, 2024010101)}") == [
        "2023123122",
        "2023123123",
        "2024010100",
        "2024010101",
    ]
    assert expand("p-{INT(8,11)}") == ["p-8", "p-9", "p-10", "p-11"]
    assert expand("p-{INT(08,11)}") == ["p-08", "p-09", "p-10", "p-11"]


def test_two_ranges_give_all_combinations() -> None:
    assert expand("{INT(0,1)}/{INT(5,6)}.x") == ["0/5.x", "0/6.x", "1/5.x", "1/6.x"]


@pytest.mark.parametrize(
    "pattern",
    [
        "{DATE(20240101)}",
        "{DATE(20240102,20240101)}",
        "{DATE(20240101,2024010200)}",
        "{DATE(20241301,20241302)}",
        "{DATE(2024-01-01,2024-01-02)}",
        "{INT(a,b)}",
        "{INT(2,1)}",
        "{INT(0,99999999)}",
        "{INT(0,9999)}{INT(0,9999)}",
    ],
)
def test_a_range_that_makes_no_sense_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError):
        expand(pattern)


def test_files_are_found_sorted_and_once(tmp_path: Path) -> None:
    touch(tmp_path, "20240101/b", "20240101/a", "20240103/a", "20240103/a-tmp-0123456789ab")
    pattern = f"{tmp_path}/{{DATE(20240101,20240131)}}/*"
    found = find_files([pattern, f"{tmp_path}/*/a"])
    assert names(tmp_path, found) == ["20240101/a", "20240101/b", "20240103/a"]


def test_finding_nothing_is_an_error_that_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"p-0, .*p-4 and 5 more"):
        find_files(f"{tmp_path}/p-{{INT(0,9)}}")
    with pytest.raises(DataError, match="empty list"):
        find_files([])


def test_patterns_that_match_nothing_are_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "1/a", "3/a", "3/b")
    assert names(tmp_path, matching_patterns([f"{tmp_path}/{{INT(0,4)}}/*"])) == ["1/*", "3/*"]
    with pytest.raises(DataError, match="no file matches"):
        matching_patterns([f"{tmp_path}/{{INT(5,6)}}/*"])


def test_patterns_are_made_of_days_or_hours_the_end_left_out() -> None:
    days = ("20240131", date(2024, 2, 2))
    assert gen_patterns("hdfs:///x", days) == ["hdfs:///x/20240131/*", "hdfs:///x/20240201/*"]
    assert gen_patterns("x", days, (22, 24), is_hourly=True, wildcard="*.gz") == [
        "x/20240131/22/*.gz",
        "x/20240131/23/*.gz",
        "x/20240201/22/*.gz",
        "x/20240201/23/*.gz",
    ]
    assert gen_patterns("x", ("20240131", "20240131")) == []
    for wrong in [("20240131", "20240130"), ("31.1.2024", "20240201")]:
        with pytest.raises(ConfigError):
            gen_patterns("x", wrong)
    with pytest.raises(ConfigError):
        gen_patterns("x", days, (5, 25), is_hourly=True)


def test_a_watch_sees_what_appears_and_gives_up_after_a_while(tmp_path: Path) -> None:
    now, pauses = [0.0], list[float]()
    watch = Watch(
        f"{tmp_path}/*",
        every=timedelta(seconds=5),
        stop_after=timedelta(seconds=8),
        clock=lambda: now[0],
        pause=pauses.append,
    )
    assert watch.list_files() == []
    assert not watch.is_over()
    touch(tmp_path, "a")
    assert names(tmp_path, watch.list_files()) == ["a"]
    now[0] = 7.9
    assert not watch.is_over()
    watch.found()
    now[0] = 8.0
    assert not watch.is_over()
    now[0] = 16.0
    assert watch.is_over()
    watch.wait(threading.Event())
    assert pauses == [5.0]


def test_a_watch_without_an_end_waits_for_ever() -> None:
    assert not Watch("x", clock=lambda: 1e12).is_over()
    with pytest.raises(ConfigError):
        Watch("{INT(2,1)}")
