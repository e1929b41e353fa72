"""`monolith ui`: what it prints, whom it lets in, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from services import warm

from monolith.cli.main import main
from monolith.cluster.status import ProcessStatus, StatusBoard


def test_it_prints_the_address_of_a_page_that_shows_a_run_and_ends_when_told(tmp_path: Path) -> None:
    status = ProcessStatus(role="worker", index=0, state="training", time=1.0, every=2.0, started=1.0)
    StatusBoard(str(tmp_path)).write(status)
    started = warm.Popen(
        [
            "-m",
            "monolith",
            "ui",
            f"mine={tmp_path}",
            "gone=http://127.0.0.1:9",
            "--port",
            "0",
            "--every",
            "0.1",
        ],
        stdout=warm.PIPE,
    )
    assert started.stdout is not None
    try:
        (url,) = re.findall(r"page +(http://127\.0\.0\.1:\d+/)", started.stdout.readline())
        while True:
            with urllib.request.urlopen(f"{url}state", timeout=60) as answer:
                run, gone = json.load(answer)["sources"]
            if run["up"] and gone["error"] != "not read yet":
                break
        assert (run["name"], run["processes"][0]["name"]) == ("mine", "worker 0")
        assert "127.0.0.1:9 cannot be reached" in gone["error"]
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "at least one run"),
        (["runs/1", "runs/1"], "two sources are called '1'"),
        (["runs/1", "--host", "0.0.0.0"], "neither certificates nor a token"),
        (["runs/1", "--every", "0"], "--every must be more than 0"),
        (["kafka://broker/topic"], "give the http:// address"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", *words]) == 2
    assert said in capsys.readouterr().err
