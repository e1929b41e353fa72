"""Targets in a config file: numbers, several labels with weights, and labels that do not fit their loss."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from monolith.cli.main import main
from monolith.serve.manifest import read_servable
from monolith.serve.predictor import Predictor

TRAIN = '[features.user]\nkind = "string"\n[task]\nbatch_size = 100\ndense_rate = 0.02\n'
DEEPFM = '[model]\ntype = "deepfm"\ndim = 4\nhidden = [16]\n'


def write_watches(path: Path, records: int = 4000) -> None:
    """Write how long users watched: each user has a typical time, which varies by a fifth."""
    rng = random.Random(3)
    lines = ["user,seconds,liked"]
    for _ in range(records):
        user = rng.randrange(20)
        seconds = 30 * (1 + user) * rng.uniform(0.8, 1.2)
        liked = "" if rng.random() < 0.5 else str(int(user >= 10))
        lines.append(f"u{user},{seconds:.1f},{liked}")
    path.write_text("\n".join(lines) + "\n")


def write_config(folder: Path, text: str, *, model: str = DEEPFM) -> str:
    write_watches(folder / "watches.csv")
    data = f'[data]\npath = "{folder}/watches.csv"\nsplit = {{ evaluate = 0.2 }}\n'
    train = f'[train]\nmodel_dir = "{folder}/run"\nepochs = 5\nseed = 1\n'
    (folder / "watches.toml").write_text(data + TRAIN + train + model + text)
    return str(folder / "watches.toml")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--quiet", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_seconds_are_predicted_as_seconds_from_training_to_a_served_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, '[labels.seconds]\nloss = "log"\n')
    run(capsys, "train", "--config", config)
    metrics = run(capsys, "evaluate", "--config", config)["metrics"]
    assert set(metrics) == {"seconds/rmse", "seconds/mae", "seconds/calibration", "loss"}
    # The best model is off by 31 s, and this one by 33 s with any seed; always saying the mean by 150 s.
    assert metrics["seconds/mae"] < 60
    exported = run(capsys, "export", "--config", config, "--to", str(tmp_path / "out"))
    with Predictor(exported["folder"], show=False) as predictor:
        answer = predictor.predict({"user": ["u1", "u19"]}).outputs["seconds"]
    assert answer[0] < 120  # 60 s on average
    assert answer[1] > 450  # 600 s
    signature = read_servable(exported["folder"]).signature
    assert signature is not None
    assert [one.meaning for one in signature.outputs] == ["value"]


def test_a_class_says_that_it_is_served_as_a_probability(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, "[labels.long]\ncolumn = 'seconds'\nat_least = 300\n")
    run(capsys, "train", "--config", config, "--steps", "2")
    exported = run(capsys, "export", "--config", config, "--to", str(tmp_path / "out"))
    signature = read_servable(exported["folder"]).signature
    assert signature is not None
    assert [one.meaning for one in signature.outputs] == ["probability"]


def test_seconds_as_classes_are_refused_with_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, "[labels.seconds]\n")
    assert main(["train", "--config", config, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "a class is 0 or 1" in said
    assert 'labels.seconds.loss to "mse", "huber" or "log"' in said


def test_several_targets_have_weights_and_a_label_may_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = (
        '[examples]\noptional = ["liked"]\n[labels.seconds]\nloss = "log"\nweight = 0.5\n[labels.liked]\n'
    )
    mmoe = '[model]\ntype = "mmoe"\ndim = 4\nexperts = [16]\nhidden = [8]\n'
    config = write_config(tmp_path, labels, model=mmoe)
    report = run(capsys, "train", "--config", config)
    assert report["skipped_batches"] == 0
    metrics = run(capsys, "evaluate", "--config", config)["metrics"]
    assert metrics["liked/auc"] > 0.95
    assert metrics["seconds/mae"] < 60  # 32 to 36 s with other seeds


MEASURED = """
from dataclasses import dataclass

from monolith.runtime.config_task import ConfigTask
from monolith.train import Outputs


@dataclass(frozen=True, kw_only=True)
class Measured(ConfigTask):
    def outputs(self, model, batch):
        found = super().outputs(model, batch)
        error = (found.predictions["seconds"] - batch.labels["seconds"]).abs()
        return Outputs(found.loss, found.predictions, {"within_60_s": (error < 60).float().detach()})

    def measures(self, mode):
        return ["within_60_s"]
"""


@pytest.mark.parametrize("how", ["by config", "in Python"])
def test_metrics_of_your_own_are_in_the_report_and_in_the_live_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    config = write_config(tmp_path, '[labels.seconds]\nloss = "log"\n')
    words = ["--config", config, "--steps", "4", "--train.evaluate.every-steps", "2"]
    words += ["--train.metric-window", "200", "--train.report-every", "0.001"]
    if how == "by config":
        words += ["--task.scores", '["mae", "absolute_loss"]']
        shown, evaluated = ["seconds mae", "seconds absolute_loss"], ["seconds mae", "seconds absolute_loss"]
    else:
        (tmp_path / "mine.py").write_text(MEASURED)
        words = [f"{tmp_path}/mine.py:Measured", *words]
        shown, evaluated = ["seconds rmse"], ["seconds rmse", "within_60_s"]
    assert main(["train", *words]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "live_line: step 4" in line]
    for name in evaluated:
        assert f"eval {name} " in line
        assert f"  eval {name} " in out
    for name in shown:
        assert f", {name} " in line
        assert f"  {name} " in out


def test_a_served_two_tower_says_that_its_output_only_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "items.csv").write_text("item\n" + "".join(f"i{n}\n" for n in range(5)))
    (tmp_path / "clicks.csv").write_text(
        "user,item,click\n" + "".join(f"u{n % 7},i{n % 5},1\n" for n in range(400))
    )
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\npath = "{tmp_path}/clicks.csv"\n[candidates]\npath = "{tmp_path}/items.csv"\n'
        '[features.user]\nkind = "string"\n[features.item]\nkind = "string"\n[labels.click]\n'
        '[model]\ntype = "two_tower"\nitem = ["item"]\nuser = ["user"]\ndim = 4\nhidden = [8]\n'
        f'[task]\nbatch_size = 50\n[train]\nmodel_dir = "{tmp_path}/run"\nsteps = 2\n'
    )
    run(capsys, "train", "--config", str(config))
    exported = run(capsys, "export", "--config", str(config), "--to", str(tmp_path / "out"))
    signature = read_servable(exported["folder"]).signature
    assert signature is not None
    assert [one.meaning for one in signature.outputs] == ["score"]


def test_a_loss_of_another_name_is_refused_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, '[labels.seconds]\nloss = "rmse"\n')
    assert main(["config", "check", config]) == 1
    said = capsys.readouterr()
    assert "mse" in said.err + said.out
    assert "huber" in said.err + said.out
