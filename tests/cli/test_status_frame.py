"""One picture of a job, from given statuses."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from monolith.cli.options.jobs import TopOptions
from monolith.cli.status import frame, is_well, members, ordered, totals
from monolith.cluster.status import JobStatus, ProcessStatus, TierStatus

NOW = 1000.0


def process(role: Any = "worker", index: int = 0, **more: Any) -> ProcessStatus:
    known = {
        "state": "serving" if role == "ps" else "training",
        "time": NOW - 1,
        "every": 2.0,
        "started": 10.0,
    }
    return ProcessStatus(role=role, index=index, **(known | {"num_ps": 2, "num_workers": 1} | more))


def job(*processes: ProcessStatus, **more: Any) -> JobStatus:
    return JobStatus(time=NOW, processes=processes, **more)


def drawn(found: JobStatus, width: int = 160, height: int | None = None, **options: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    picture = frame(found, TopOptions(run="m", **options), "runs/m", width=width, height=height)
    console.print(picture)
    return file.getvalue()


def fleet(servers: int, **more: Any) -> JobStatus:
    counts = {"num_ps": servers, "num_workers": 1}
    found = [process("ps", index, rows=index, **counts) for index in range(servers)]
    return job(process(**counts), *found, **more)


def test_the_part_of_the_data_and_the_time_left_are_shown_for_each_and_for_all() -> None:
    one, other = (
        process(data_read=0.5, seconds_left=60.0),
        process(index=1, data_read=0.25, seconds_left=90.0),
    )
    found = job(one, other)
    assert "37% of the data  1:30 left" in totals(found)
    assert "50%" in drawn(found)
    assert "1:30" in drawn(found)
    assert "of the data" not in totals(job(process()))


CHIEF = process(
    job="clicks",
    host="a",
    pid=7,
    step=1234,
    examples_per_s=20_000.0,
    steps_per_s=9.76,
    lag_seconds=65.0,
    staleness=1.25,
    failovers=3,
    saved_at=NOW - 125,
)
SERVER = process("ps", address="10.0.0.1:4000", rows=12_345_678, bytes=3 << 30, restarts=2)


def test_every_process_has_a_line_with_all_that_it_knows() -> None:
    lines = drawn(job(CHIEF, SERVER, process("ps", 1))).splitlines()
    assert lines[0].strip() == "runs/m  clicks"
    (chief,) = [line for line in lines if line.startswith("worker 0")]
    assert " ".join(chief.split()) == "worker 0 a pid 7 training 1,234 20,000 9.8 1:05 1.2 3 2:05 ago"
    (server,) = [line for line in lines if line.startswith("ps 0")]
    assert " ".join(server.split()) == "ps 0 10.0.0.1:4000 serving 12.35 M 3 GiB 2"


def test_totals_are_at_the_top() -> None:
    text = totals(job(CHIEF, SERVER, process("ps", 1, rows=322, bytes=1 << 30)))
    first, second = text.splitlines()
    assert first.split("  ") == [
        "1 of 1 workers, 2 of 2 servers",
        "step 1,234",
        "20,000 examples/s",
        "9.8 steps/s",
        "12.35 M rows",
        "4 GiB",
    ]
    parts = ["behind 1:05", "staleness up to 1.2", "restarts 2", "failovers 3", "checkpoint 2:05 ago"]
    assert second.split("  ") == parts


def test_bytes_on_the_wire_are_summed_over_the_servers() -> None:
    servers = [process("ps", index, received_per_s=512.0, sent_per_s=1024.0) for index in range(2)]
    assert "wire 1 KiB/s in, 2 KiB/s out" in totals(job(process(), *servers))


def test_rows_in_files_are_summed_over_the_servers_and_only_told_where_there_are_some() -> None:
    tiers = TierStatus(
        rows=6_200_000,
        hot_rows=1_550_000,
        memory_bytes=200 << 20,
        file_bytes=700 << 20,
        compactions=1,
        ids_per_s=1000.0,
        ids_read_per_s=25.0,
        reads_per_s=2000.0,
        read_per_s=9 << 20,
        written_per_s=1 << 20,
    )
    text = drawn(job(process(), process("ps", 0, tiers=tiers), process("ps", 1, tiers=tiers)), width=200)
    (line,) = [line.strip() for line in text.splitlines() if "tiered tables" in line]
    assert line == (
        "tiered tables: 12.4 M rows: 3,100,000 in memory (400 MiB), 9,300,000 in files (1.367 GiB); 97% of "
        "lookups and updates read no file; 4,000 reads/s of 18 MiB/s, 2 MiB/s written; 2 files compacted"
    )
    fresh = drawn(
        job(process(tiers=TierStatus(rows=5, hot_rows=5, memory_bytes=80, file_bytes=0, compactions=0)))
    )
    assert "tiered tables: 5 rows: 5 in memory (80 B), 0 in files (0 B)" in map(str.strip, fresh.splitlines())
    assert "tiered" not in drawn(job(process(), process("ps"), process("ps", 1)))


def test_a_column_without_any_value_is_left_out() -> None:
    assert "behind" not in drawn(job(process(num_ps=0)))
    assert "behind" in drawn(job(process(num_ps=0, lag_seconds=3.0)))


# Trouble


def test_processes_in_trouble_come_first_and_the_worst_of_them_before_all() -> None:
    found = [
        process(),
        process("ps", 0),
        process("ps", 1, state="without a chief"),
        process("ps", 2, time=NOW - 30),
        process("ps", 3, time=NOW - 3600),
        process("ps", 4, state="failed", time=NOW - 5),
        process("ps", 5, restarts=1),
    ]
    order = [one.name for one in ordered(found, "worst", NOW)]
    assert order == ["ps 4", "ps 3", "ps 2", "ps 1", "ps 5", "worker 0", "ps 0"]


def test_a_process_without_recent_news_is_shown_as_silent_and_not_counted() -> None:
    found = job(process(examples_per_s=5.0), process("ps"), process("ps", 1, time=NOW - 90))
    text = drawn(found)
    assert "silent for 1:30" in text
    assert "1 of 1 workers, 1 of 2 servers" in text
    assert not is_well(found)
    assert is_well(job(process(), process("ps"), process("ps", 1)))


def test_an_expected_process_that_was_never_seen_is_listed() -> None:
    found = job(process(), process("ps", 0))
    assert [(one.name, one.state) for one in members(found)][-1] == ("ps 1", "not seen yet")
    assert not is_well(found)


def test_what_a_larger_run_left_behind_is_not_part_of_this_one() -> None:
    left = process("ps", 7, time=NOW - 9000, num_ps=8, started=1.0)
    spare = process("ps", 2)  # it lives, and has no share yet
    found = members(job(process(), process("ps"), process("ps", 1), spare, left))
    assert [one.name for one in found] == ["worker 0", "ps 0", "ps 1", "ps 2"]


def test_of_a_job_that_was_killed_everything_is_silent() -> None:
    found = job(*(process(time=10.0, num_ps=0),))
    assert "silent for 16:30" in drawn(found)
    assert "0 of 1 workers" in drawn(found)


def test_what_cannot_be_read_is_counted() -> None:
    assert "3 status files cannot be read" in drawn(job(process(), unreadable=3))
    assert not is_well(job(process(num_ps=0), unreadable=3))


# Size


def test_of_a_thousand_servers_as_many_are_shown_as_there_are_lines_for() -> None:
    text = drawn(fleet(1000), height=24)
    assert len(text.splitlines()) <= 24
    assert "... and 984 more; --rows 0 shows all" in text


def test_of_those_not_shown_it_says_how_many_are_in_trouble() -> None:
    counts = {"num_ps": 1000, "num_workers": 1}
    found = job(process(**counts), *(process("ps", n, time=NOW - 60, **counts) for n in range(1000)))
    assert "and 951 more, 950 of them in trouble" in drawn(found)


def test_all_are_shown_on_demand_and_never_less_than_some() -> None:
    assert sum(line.startswith("ps ") for line in drawn(fleet(200), rows=0).splitlines()) == 200
    assert sum(line.startswith("ps ") for line in drawn(fleet(200), rows=2, sort="rows").splitlines()) == 2
    assert "worker 0" in drawn(fleet(200), height=1)


@pytest.mark.parametrize("width", [40, 60, 80, 99, 100, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(job(CHIEF, SERVER, process("ps", 1)), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("worker" in line for line in lines)


def test_where_there_is_room_addresses_are_shown() -> None:
    assert "10.0.0.1:4000" in drawn(job(CHIEF, SERVER), width=120)
    assert "10.0.0.1:4000" not in drawn(job(CHIEF, SERVER), width=80)


@pytest.mark.parametrize(
    ("sort", "first"),
    [("rows", "ps 1"), ("lag", "worker 0"), ("restarts", "ps 0"), ("name", "worker 0"), ("age", "ps 1")],
)
def test_the_order_can_be_chosen(sort: Any, first: str) -> None:
    found = [
        process("ps", 1, rows=9, time=NOW - 5),
        process("ps", 0, rows=3, restarts=1),
        process(lag_seconds=1),
    ]
    assert ordered(found, sort, NOW)[0].name == first


# Publishing


def test_the_state_of_publishing_is_a_line_of_its_own() -> None:
    held = "publishing held since 2026-11-17 02:00:00 UTC: a bad upstream; servers at version 1200"
    assert held in drawn(job(process(publishing=held)))
    assert "\npublishing\n" in re.sub(" *\n", "\n", drawn(job(process(publishing="publishing"))))
    assert "publishing" not in drawn(job(process()))


def test_shards_that_lack_a_standby_are_a_line_of_its_own() -> None:
    lacking = "shards that lack a standby: 1 (0 of 1 for 12 s)"
    assert lacking in drawn(job(process(standbys=lacking)))
    assert "standby" not in drawn(job(process()))
