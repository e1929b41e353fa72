"""Messages in files: by day, in parts, whatever else is thrown at it."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from monolith.errors import ConfigError
from monolith.train.hooks.deep_insight import DayFiles, FileMetricHook, insight_line
from monolith.train.hooks.metric_sinks import MessageCounts

DAY = 86_400
START = 19_700 * DAY  # 2023-12-09


def message(at: int, **others: Any) -> str:
    fields = {"target": "ctr_head", "uid": 7, "req_time": at, "label": 1.0, "pred": 0.5}
    return json.dumps({**fields, **others})


def hook(base: Path, **options: Any) -> FileMetricHook:
    chosen = {"batch_lines": 8, "part_lines": 32, **options}
    files = {name: chosen.pop(name) for name in ("batch_lines", "part_lines")}
    clock = {"clock": chosen["clock"]} if "clock" in chosen else {}
    made = FileMetricHook(DayFiles(str(base), "feed", 3, **files, **clock), **chosen)
    made.begin(None)  # type: ignore[arg-type]
    return made


def contents(base: Path) -> dict[str, int]:
    """Path below the base to its number of lines."""
    return {
        str(path.relative_to(base)): len(path.read_text().splitlines())
        for path in sorted(base.rglob("*"))
        if path.is_file()
    }


def test_64_messages_a_day_for_8_days_are_2_files_of_32_lines_a_day(tmp_path: Path) -> None:
    files = hook(tmp_path)
    files.put([message(START + day * DAY + n) for n in range(64) for day in range(8)])
    files.end(None)  # type: ignore[arg-type]
    found = contents(tmp_path)
    assert len(found) == 16
    assert set(found.values()) == {32}
    assert list(found)[:3] == [
        "feed/20231209/worker_3/part_000000.txt",
        "feed/20231209/worker_3/part_000001.txt",
        "feed/20231210/worker_3/part_000000.txt",
    ]
    assert files.counts == MessageCounts(total=512, success=512)


def test_a_line_has_the_time_the_metric_the_process_and_the_two_numbers() -> None:
    assert insight_line(message(START)) == (
        "20231209",
        f'{START};;7;{{"ctr_head": 0.5}};{{"ctr_head": 1.0}}',
    )
    second = {
        "uid": 7,
        "req_time": START,
        "targets": ["click", "like"],
        "labels": [1.0, 0.0],
        "preds": [0.5, 0.25],
        "extra_int": {"gid": 9},
    }
    assert insight_line(json.dumps(second)) == (
        "20231209",
        f'{START};9;7;{{"click": 0.5, "like": 0.25}};{{"click": 1.0, "like": 0.0}}',
    )


def test_bad_messages_are_counted_and_the_end_does_not_hang(tmp_path: Path) -> None:
    files = hook(tmp_path)
    files.put(["no json", "{}", message(START, req_time="soon"), message(START), "[]", message(START)])
    ended = threading.Thread(target=files.end, args=(None,), daemon=True)
    ended.start()
    ended.join(60)
    assert not ended.is_alive()
    assert files.counts == MessageCounts(total=6, success=2, failed=4)
    assert list(contents(tmp_path).values()) == [2]


def test_a_layout_that_always_fails_does_not_hang_either(tmp_path: Path) -> None:
    def broken(_: str) -> tuple[str, str]:
        raise RuntimeError("broken")

    files = hook(tmp_path, layout=broken)
    files.put(["a"] * 100)
    files.close()
    assert files.counts.failed == 100


def test_a_disk_that_takes_nothing_loses_lines_and_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "feed").write_text("in the way")
    files = hook(tmp_path)
    files.put([message(START)] * 20)
    files.close()
    assert files.counts == MessageCounts(total=20, failed=20)
    assert caplog.text.count("cannot write to") == 1


def test_a_resumed_run_begins_a_new_part(tmp_path: Path) -> None:
    for _ in range(2):
        files = hook(tmp_path)
        files.put([message(START)] * 3)
        files.close()
    assert contents(tmp_path) == {
        "feed/20231209/worker_3/part_000000.txt": 3,
        "feed/20231209/worker_3/part_000001.txt": 3,
    }


def test_the_rest_of_a_batch_is_written_at_the_end_however_the_run_ended(tmp_path: Path) -> None:
    files = hook(tmp_path, batch_lines=1024)
    files.put([message(START)])
    files.close()
    files.close()
    assert list(contents(tmp_path).values()) == [1]


# The files of days


def day_files(base: Path, now: list[float], **options: Any) -> DayFiles:
    chosen = {"batch_lines": 4, "part_lines": 10, **options}
    return DayFiles(str(base), "feed", 0, clock=lambda: now[0], **chosen)


def test_a_part_is_never_longer_than_asked_though_batches_do_not_divide_it(tmp_path: Path) -> None:
    files = day_files(tmp_path, [0.0])
    for n in range(25):
        files.add("20231209", str(n))
    files.flush()
    assert list(contents(tmp_path).values()) == [10, 10, 5]


def test_days_without_lines_are_forgotten_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    files = day_files(tmp_path, now)
    files.add("20231209", "a")
    now[0] = 20 * 3600
    files.add("20231210", "b")
    files.close_idle(timedelta(hours=24))
    assert files.days == ["20231209", "20231210"]
    assert files.written == 2
    now[0] = 25 * 3600
    files.close_idle(timedelta(hours=24))
    assert files.days == ["20231210"]


def test_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line break"):
        day_files(tmp_path, [0.0]).add("20231209", "a\nb")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "s3://bucket/x"}, "needs a local folder"),
        ({"model": "a/b"}, "is not a valid folder name"),
        ({"batch_lines": 0}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DayFiles(**{"base": "x", "model": "feed", **options})
