"""`monolith query freshness`: a real server, and a model that learns of an event when its file is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
from serve.server.linear import LinearAnswer, LinearCatalog, LinearModel
from serve.server.serving import serving

from monolith.cli.main import main

ROW = json.dumps({"user": "ann", "item": 3, "time": 0, "click": 1})


class LearningModel(LinearModel):
    """Adds 1 to the score of users that are in the files of a folder."""

    folder: Path

    def predict(self, columns: Mapping[str, Any], *, deadline: float | None = None) -> LinearAnswer:
        answer = super().predict(columns, deadline=deadline)
        events = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.jsonl"))]
        known = {event["user"].encode() for event in events}
        for row, user in enumerate(columns["user"]):
            answer.outputs["score"][row] += float(user in known)
        times = {"published_at": 5.0, "received_at": 5.25, "applied_at": 5.5}
        return replace(answer, freshness={**answer.freshness, **times})


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    model = LearningModel()
    model.folder = tmp_path
    with serving(LinearCatalog({"linear": {"1": lambda: model}}), grpc_port=None) as server:
        assert server.http_url is not None
        yield server.http_url


def test_events_are_written_and_waited_for(url: str, tmp_path: Path, capsys: Any) -> None:
    words = ["--id", "user", "--event-time", "time", "--source", str(tmp_path), "--every", "0"]
    assert main(["query", "freshness", url, "--row", ROW, *words, "--count", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["events"], len(said["all"])) == (3, 3)
    assert 0 < said["seconds"]["p50"] <= said["seconds"]["p99"]
    assert said["stages"] == {"wire": {"p50": 0.25, "p99": 0.25}, "apply": {"p50": 0.25, "p99": 0.25}}
    events = [json.loads(path.read_text()) for path in tmp_path.glob("*.jsonl")]
    assert len({event["user"] for event in events}) == 3
    assert all(event["time"] > 0 for event in events)
    assert main(["query", "freshness", url, "--row", ROW, *words, "--count", "1"]) == 0
    assert "250 ms" in capsys.readouterr().out


def test_without_a_source_it_shows_what_answers_say_of_themselves(url: str, capsys: Any) -> None:
    words = ["--count", "2", "--every", "0"]
    assert main(["query", "freshness", url, "--row", ROW, *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["version"], said["step"], said["staleness"]) == ("1", 100, {"p50": 0.5, "p99": 0.5})
    assert main(["query", "freshness", url, "--row", ROW, *words]) == 0
    assert "staleness of 2 answers: p50 500 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--row", ROW, "--source", "x"], "--source needs --id"),
        ([], "give a row to ask for with --row"),
        (["--row", "{"], "is no JSON"),
        (["--row", ROW, "--count", "0"], "--count must be at least 1"),
        (["--row", ROW, "--id", "nobody", "--source", "/no/such"], "has no column 'nobody'"),
    ],
)
def test_what_is_missing_is_named(url: str, words: list[str], said: str, capsys: Any) -> None:
    assert main(["query", "freshness", url, *words]) != 0
    assert said in capsys.readouterr().err
