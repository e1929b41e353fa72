"""The process that the demo serves from: it says why it does not begin, and ends with its parent."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import pytest
from services import warm

from monolith.errors import UnavailableError
from monolith_bench.examples.demo import serving
from monolith_bench.examples.demo.serving import ServingProcess


def test_one_that_cannot_serve_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(warm.server().interpreter))
    with (
        ServingProcess(tmp_path / "nothing", "grpc://127.0.0.1:1", tmp_path / "log") as process,
        pytest.raises(UnavailableError, match=r"ended with status 2: .*nothing"),
    ):
        process.wait_until_ready()


def test_it_stops_when_its_standard_input_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
    serving.end_with_parent()
    assert told == [(os.getpid(), signal.SIGTERM)]
