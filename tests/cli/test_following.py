"""`monolith evaluate --follow`: each checkpoint of a run, written where TensorBoard looks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monolith.cli.main import main
from monolith.observe.summaries import read_summaries

TASK = "train.tasks:Clicks"
SMALL = ("--set", "batch_size=16")


def train(model_dir: Path, *flags: str) -> None:
    words = ("--save-steps", "2", "--quiet", "--no-summaries")
    assert main(["train", TASK, *SMALL, "--model-dir", str(model_dir), *words, *flags]) == 0


def follow(model_dir: Path, *flags: str) -> int:
    return main(
        [
            "evaluate",
            TASK,
            *SMALL,
            "--model-dir",
            str(model_dir),
            "--follow",
            "--quiet",
            "--log-level",
            "info",
            *flags,
        ]
    )


def lines(model_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (model_dir / "eval" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_followed_to_its_end_and_not_measured_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--steps", "4")
    capsys.readouterr()
    assert follow(tmp_path, "--json") == 0
    said = capsys.readouterr()
    printed = [json.loads(line) for line in said.out.splitlines()]
    assert [(one["step"], one["checkpoint"]) for one in printed] == [
        (2, "model.ckpt-2"),
        (4, "model.ckpt-4"),
    ]
    assert printed[0]["metrics"].keys() >= {"click/auc", "click/log_loss", "loss"}
    assert "2 checkpoints; the run is finished, at step 4" in said.err
    assert [{**line, "time": 0} for line in lines(tmp_path)] == [{**one, "time": 0} for one in printed]
    drawn = list(read_summaries(map(str, (tmp_path / "eval" / "checkpoints").glob("*tfevents*")), "scalars"))
    curve = [(one.step, float(one.data)) for one in drawn if one.tag == "metrics/click/auc"]
    assert curve == [(one["step"], pytest.approx(one["metrics"]["click/auc"])) for one in printed]
    train(tmp_path, "--steps", "2")
    capsys.readouterr()
    assert follow(tmp_path, "--steps", "1") == 0
    said = capsys.readouterr()
    assert said.out.startswith("step 6: click/auc ")
    assert "over 16 examples" in said.out
    assert [line["step"] for line in lines(tmp_path)] == [2, 4, 6]


def test_ctrl_c_ends_it_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "--steps", "2")
    manifest = tmp_path / "run.json"
    starts = json.loads(manifest.read_text())
    del starts["starts"][0]["ended"]  # as if it trained on
    manifest.write_text(json.dumps(starts))

    def press() -> None:
        while not (tmp_path / "eval" / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    assert follow(tmp_path, "--steps", "1", "--poll", "50ms", "--timeout", "0") == 130
    thread.join()
    assert [line["step"] for line in lines(tmp_path)] == [2]
    assert "followed" in capsys.readouterr().err


def test_what_does_not_go_together_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(tmp_path, "--checkpoint", "best") == 2
    assert "give one of them" in capsys.readouterr().err
    assert follow(tmp_path, "--poll", "soon") == 2
    assert "--poll" in capsys.readouterr().err


def test_the_report_of_a_run_has_its_evaluations_and_best_reads_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--steps", "6", "--evaluate-every-steps", "3", "--train.evaluate.steps", "2", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["evaluations"] == 2
    assert report["evaluation"]["step"] == 6
    assert report["best"]["metric"] == "click/auc"
    step = report["best"]["step"]
    words = ["evaluate", TASK, *SMALL, "--model-dir", str(tmp_path), "--checkpoint", "best", "--steps", "2"]
    assert main([*words, "--json", "--quiet"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["step"], read["metrics"]["click/auc"]) == (step, report["best"]["value"])
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["step"] for one in listed if one["best"]] == [step]
    assert main(["config", "explain", "train.evaluate.patience"]) == 0
    assert "no better than the best" in " ".join(capsys.readouterr().out.split())
