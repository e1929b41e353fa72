"""`monolith bench scale`: what it prints and draws."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services import warm

from monolith.cli.main import main
from monolith_bench.scale_costs import MeasuredExchange, fitted, meeting_work
from monolith_bench.scale_plot import Line, Panel, draw

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    picture = tmp_path_factory.mktemp("scale") / "scale.svg"
    command = ["-m", "monolith", "bench", "scale", "--quick", "--json", "--svg", str(picture)]
    done = warm.run([*command, "--servers", "1", "3", "10"], check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"picture": picture}


def values(report: dict[str, Any], metric: str) -> dict[str, float]:
    return {one["case"]: one["value"] for one in report["results"] if one["metric"] == metric}


def test_costs_are_measured_in_the_same_run(report: dict[str, Any]) -> None:
    assert report["bench"] == "scale"
    found = values(report, "cost")
    for name in (
        "lookup, worker, a request",
        "lookup, server, a request",
        "small call, caller",
        "row, memory",
    ):
        assert found[name] > 0, name


@pytest.mark.parametrize("servers", ["1 server", "2 servers"])
def test_the_simulation_is_compared_with_a_real_worker(report: dict[str, Any], servers: str) -> None:
    case = f"step of rows alone, {servers}, simulated"
    (found,) = [one for one in report["results"] if one["case"] == case]
    assert found["baseline"] == f"step of rows alone, {servers}, measured"
    assert found["ratio"] > 0


def test_steps_and_upkeep_are_simulated_for_every_size(report: dict[str, Any]) -> None:
    rates = values(report, "examples_per_s")
    assert set(rates) == {
        f"{name}, {servers}"
        for name in ("10,000 ids", "10,000 ids, no answer late", "100,000 ids")
        for servers in ("1 server", "3 servers", "10 servers")
    }
    assert values(report, "memory of a server")["10 servers, 1e+11 rows, memory of a server"] > 0


def test_the_picture_is_svg_with_a_line_for_each_case(report: dict[str, Any]) -> None:
    root = ET.fromstring(Path(report["picture"]).read_text())
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 + 4


@pytest.mark.parametrize("flag", ["servers", "ids", "rows", "compute-ms", "gbits"])
def test_a_job_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be more than 0" in capsys.readouterr().err


# Costs


def test_costs_are_found_again_in_what_they_add_up_to() -> None:
    measured = [
        MeasuredExchange(servers, ids, 5 + 3 * servers + 0.25 * ids, 2 * servers + 0.5 * ids)
        for servers in (1, 16)
        for ids in (10, 100, 1000)
    ]
    found = fitted(measured, 0.125, 8, 64)
    client = (found.client_call, found.client_request, found.client_row)
    np.testing.assert_allclose(client, (5, 3, 0.25))
    np.testing.assert_allclose((found.server_request, found.server_row), (2, 0.5))
    assert found.table_row == 0.125


def test_no_cost_is_less_than_nothing() -> None:
    measured = [MeasuredExchange(s, n, 0.25 * n - 1, 0.5 * n) for s in (1, 16) for n in (10, 100, 1000)]
    found = fitted(measured, 0.1, 8, 64)
    assert min(found.client_call, found.client_request, found.server_request) == 0
    assert found.client_row > 0


def test_a_look_for_lost_workers_is_measured() -> None:
    look, wait = meeting_work()
    assert 0 < look < wait < 1


# The picture


def test_names_are_escaped_and_axes_hold_all_points() -> None:
    panel = Panel("a < b", "x", "y", [Line("l & m", [(1, 2), (10, 20)])])
    root = ET.fromstring(draw([panel], "note"))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "l & m", "note"} <= set(texts)
