"""`monolith evaluate insight`: from event files to a table, a JSON object and a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monolith.cli.insight import run
from monolith.cli.options.jobs import InsightOptions
from monolith.errors import ConfigError, DataError, FileMissingError, MissingExtraError
from monolith.observe.summaries import SummaryWriter, insight_data, nas_data

NAMES = ["user", "item", "hour"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    with SummaryWriter(str(tmp_path / "summaries" / "insight")) as writer:
        for step in (100, 200):
            parts = random.normal(size=(50, 3)) * [3.0, 1.0, 0.0]
            label = parts[:, 0] + random.normal(size=50) > 0
            writer.tensor(insight_data(parts, NAMES, [1, 1, 1], label=label), step)
            writer.tensor(insight_data(np.square(parts), NAMES, [1, 1, 1]), step)
            writer.tensor(nas_data(np.array([0.2, 0.9]), ["user", "item"], [8, 16]), step)
    return tmp_path


def options(run_dir: Path, **others: Any) -> InsightOptions:
    return InsightOptions(run_dir=str(run_dir), summaries=True, **others)


def test_a_table_for_each_kind_of_summary(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options(run_dir)) == 0
    printed = capsys.readouterr().out
    for tag in ("fi_direct/monolith_feature_insight", "fi_train/monolith_feature_insight", "gating/"):
        assert tag in printed
    assert "100 rows, steps 100 to 200" in printed
    assert printed.index("user") < printed.index("hour")
    assert "correlation" in printed


def test_json_has_the_same(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options(run_dir, json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    kinds = {one["type"]: one for one in report["insights"]}
    assert report["run"] == str(run_dir)
    assert kinds["fi_train"]["segments"][0]["name"] == "user"
    assert [segment["name"] for segment in kinds["fi_direct"]["segments"]] == NAMES
    assert kinds["gating"]["segments"][0] == {"name": "item", "importance": 0.9, "group": 1}


def test_only_the_top_is_shown_and_the_rest_is_counted(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(options(run_dir, top=1, json=True))
    assert all(len(one["segments"]) == 1 for one in json.loads(capsys.readouterr().out)["insights"])
    run(options(run_dir, top=1))
    assert "and 2 more" in capsys.readouterr().out


def test_a_picture_is_drawn(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options(run_dir, png=str(tmp_path / "features.png"))) == 0
    assert (tmp_path / "features.png").read_bytes().startswith(b"\x89PNG")
    assert "drawn to" in capsys.readouterr().err


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="there is no folder"):
        run(options(tmp_path / "gone"))


def test_a_folder_without_event_files_says_how_to_get_some(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(FileMissingError, match="insight_every_steps"):
        run(options(tmp_path))


def test_event_files_without_insight_are_told_from_none_at_all(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.scalar("loss", 1.0, 1)
    with pytest.raises(DataError, match=r"1 event files .* contain nothing for the 'monolith' plugin"):
        run(options(tmp_path))


def test_an_empty_event_file_is_like_none(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(DataError, match="contain nothing"):
        run(options(tmp_path))


def test_counts_below_their_least_are_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--top must be at least 0"):
        run(options(run_dir, top=-1))
    with pytest.raises(ConfigError, match="--last must be at least 1"):
        run(options(run_dir, last=0))


def test_without_matplotlib_the_extra_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[plot\]"):
        run(options(run_dir, png="x.png"))
