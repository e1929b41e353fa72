"""`monolith plan`: what it takes, what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monolith.cli import measuring
from monolith.cli.main import main
from monolith.cli.plan import _RANGES
from monolith.runtime.cluster_config import ClusterConfig

ASKED = ["plan", "--rows", "1e10", "--dim", "32", "--examples-per-s", "1e6"]


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([*ASKED, *more]) == 0
    return capsys.readouterr().out


def test_the_plan_has_bytes_of_a_row_bounds_and_servers(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--optimizer", "adagrad")
    assert re.search(r"in memory +285 B  256 B \+ 29 B\n", text)
    assert re.search(r"memory +52  1e10 rows x 285 B = 2.85 TB; / \(0.8 x 64 GiB\) <- most\n", text)
    assert "=> 52 servers of 64 GiB; each\n" in text
    assert 'storage = "tiered"' in text
    assert "`monolith bench scale`" in text
    assert max(map(len, text.splitlines())) < 250


def test_numbers_may_be_written_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--rows", "10_000_000_000") == printed(capsys)


def test_one_storage_is_planned_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--storage", "memory")
    assert "tiered" not in text
    assert "in a file" not in text


def test_standbys_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--replicas", "1", "--storage", "memory")
    assert "=> 52 servers of 64 GiB and 52 standbys, 104 in all; each" in text
    ClusterConfig(num_ps=1, standbys=int(_RANGES["replicas"][1]))


def test_json_has_all_of_it_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(printed(capsys, "--json"))
    assert plan["asked"]["rows"] == 1e10
    assert {figure["name"]: figure["value"] for figure in plan["row"]}["in memory"] == 285
    memory, tiered = plan["servers"]
    assert (memory["storage"], memory["servers"], memory["binding"]) == ("memory", 52, "memory")
    assert tiered["storage"] == "tiered"
    assert {bound["unit"] for bound in memory["bounds"]} == {"servers"}
    assert all(figure["how"] for servers in plan["servers"] for figure in servers["bounds"])
    assert plan["costs"]["disk_reads_per_s"] > 0


def test_a_faster_disk_needs_fewer_servers(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for reads in ("5000", "500000"):
        plan = json.loads(printed(capsys, "--storage", "tiered", "--disk-reads-per-s", reads, "--json"))
        assert plan["costs"]["disk_reads_per_s"] == float(reads)
        counts.append(plan["servers"][0]["servers"])
    assert counts[0] > counts[1]


def test_bfloat16_rows_are_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--embedding-dtype", "bfloat16", "--optimizer", "sgd", "--storage", "memory")
    assert re.search(r"values +64 B  32 x 2 B\n +state +0 B", text)


def test_it_measures_this_machine_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "SAMPLE_BYTES", 8 << 20)
    flags = ("--measure", "--folder", str(tmp_path), "--disk-mb-per-s", "123", "--json")
    costs = json.loads(printed(capsys, *flags))["costs"]
    assert 10e-9 < costs["table_row"] < costs["row"] < 1e-4
    assert costs["cold_row"] > 0
    assert costs["save_bytes_per_s"] > 1e6
    assert costs["disk_reads_per_s"] > 0
    assert costs["disk_bytes_per_s"] == 123e6  # a flag wins
    assert str(tmp_path) in costs["source"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--optimizer", "adagradd"], "--optimizer must be one of .*; did you mean 'adagrad'?"),
        (["--embedding-dtype", "bfloat"], "--embedding-dtype must be one of .*; did you mean 'bfloat16'?"),
        (["--storage", "teired"], "did you mean 'tiered'?"),
        (["--rows", "0"], "--rows must be from 1 to .*, got 0"),
        (["--rows", "-5"], "--rows must be from 1 to .*, got -5"),
        (["--rows", "nan"], "--rows must be from 1 to .*, got nan"),
        (["--rows", "many"], "--rows must be a number, got 'many'"),
        (["--dim", "1.5"], "--dim must be a whole number, got '1.5'"),
        (["--examples-per-s", "inf"], "--examples-per-s must be from"),
        (["--headroom", "1"], "--headroom must be from 0 to 0.95, got 1"),
        (["--hit-rate", "1.5"], "--hit-rate must be from 0 to 1, got 1.5"),
        (["--replicas", "3"], "--replicas must be from 0 to 2, got 3"),
        (["--memory", "64GBytes"], "'64GBytes' is not a size"),
        (["--memory", "1MB"], "--memory must be at least 1GiB, got 1MB"),
        (["--checkpoint-every", "soon"], "'soon' is not a duration"),
        (["--checkpoint-every", "0"], "--checkpoint-every must be above 0"),
        (["--folder", "/nowhere"], "--folder needs --measure"),
        (["--measure", "--folder", "/nowhere"], "/nowhere is not a folder"),
        (["--optimizer", "batch_softmax"], "batch_softmax learns one number, so dim must be 1, got 32"),
        (["--batch", "64"], "a step asks every server.* With --batch 2995 half of that is left for rows"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *flags]) == 2
    said = capsys.readouterr()
    assert re.search(says.replace("?", r"\?"), said.err), said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
