"""`monolith checkpoint import` and `export --format original`: a model leaves and comes back the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monolith.checkpoint import find_checkpoint
from monolith.checkpoint.original import TensorBundle, write_bundle
from monolith.cli.main import main
from monolith.data import BatchSpec, MemorySource, Pipeline, Stream
from monolith.feature import Batch, hash_strings
from monolith.model import DeepFM
from monolith.runtime import Trainer
from monolith.train import Mode, Task, TrainConfig

TASK = f"{Path(__file__)}:Shop"
NAMES = """
[tables]
fc_item = "item"

[variables]
"deep/layer_*/kernel" = "dense.mlp.*.kernel.weight"
"deep/layer_*/bias" = "dense.mlp.*.bias"
"""


class Shop(Task):
    """Forty clicks of five users on seven items."""

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        columns: dict[str, Any] = {
            "user": hash_strings([f"user-{number % 5}" for number in range(40)], slot=1),
            "item": hash_strings([f"item-{number % 7}" for number in range(40)], slot=2),
            "click": [float(number % 2) for number in range(40)],
        }
        spec = BatchSpec(ids=["user", "item"], labels={"click": ("click", 0)}, event_time=None)
        return Pipeline(MemorySource(columns, batch_size=8)).to_batches(spec)

    def model(self) -> nn.Module:
        return DeepFM(["user", "item"], dim=2, hidden=(4,), threads=1)


def run(*words: str, status: int = 0) -> None:
    assert main([*words]) == status


def predictions(folder: Path) -> torch.Tensor:
    found = Trainer(Shop(), TrainConfig(model_dir=str(folder))).predict()
    return torch.cat([each["click"] for _, each in found])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop") / "run"
    run("train", TASK, "--model-dir", str(folder), "--quiet", "--no-summaries")
    return folder


@pytest.fixture
def names(tmp_path: Path) -> str:
    path = tmp_path / "names.toml"
    path.write_text(NAMES)
    return str(path)


@pytest.mark.parametrize("form", ["original", "original-multi"])
def test_a_model_leaves_as_the_original_writes_it_and_comes_back_the_same(
    trained: Path, tmp_path: Path, names: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    run("checkpoint", "export", str(trained), "--to", str(out), "--format", form, "--names", names)
    written = TensorBundle(f"{out}/model.ckpt-5").variables
    assert {
        "deep/layer_0/kernel",
        "deep/layer_0/kernel/Adam_1",
        "global_step",
        "beta1_power",
    } <= written.keys()
    capsys.readouterr()
    run(
        "checkpoint", "import", str(out), "--task", TASK, "--model-dir", str(back), "--names", names, "--json"
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["rows"], report["missing"]) == (5, {"item": 7, "user": 5}, [])
    assert all(one["ours"] for one in report["names"]), "nothing was left out"
    assert torch.equal(predictions(back), predictions(trained))
    # Trained on over the same data, both come to the same bits: rows, weights and optimizers were all there.
    again = tmp_path / "again"
    for folder, start in ((again, trained), (tmp_path / "on", back)):
        flags = ("--restore-dir", str(start), "--train.restore.restart_data", "true", "--deterministic")
        run("train", TASK, "--model-dir", str(folder), *flags, "--quiet", "--no-summaries")
    assert find_checkpoint(str(again)).endswith("model.ckpt-10")
    assert torch.equal(predictions(again), predictions(tmp_path / "on"))


def test_training_resumes_in_the_folder_that_was_imported_into(trained: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    run("checkpoint", "export", str(trained), "--to", str(out), "--format", "original")
    run("checkpoint", "import", str(out), "--task", TASK, "--model-dir", str(back))
    run("train", TASK, "--model-dir", str(back), "--quiet", "--no-summaries")
    assert find_checkpoint(str(back)).endswith("model.ckpt-10")
    run("evaluate", TASK, "--model-dir", str(back), "--quiet")
    run("export", str(back), "--task", TASK, "--to", f"{tmp_path}/served", "--quiet", "--no-warm-up")


def test_a_dry_run_says_everything_and_writes_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, back = tmp_path / "out", tmp_path / "back"
    run("checkpoint", "export", str(trained), "--to", str(out), "--format", "original")
    capsys.readouterr()
    run("checkpoint", "import", str(out), "--task", TASK, "--model-dir", str(back), "--dry-run")
    said = capsys.readouterr().out
    assert "MonolithHashTable_item" in said
    assert "7 rows" in said
    assert "nothing was written; step 5" in said
    assert not back.exists()


def test_what_the_original_lacks_must_be_allowed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    run("checkpoint", "export", str(trained), "--to", str(out), "--format", "original", "--tables", "item")
    write_bundle(f"{out}/model.ckpt-5", {"global_step": torch.tensor(5), "text/Adam": torch.ones(1)})
    flags = ("checkpoint", "import", str(out), "--task", TASK, "--model-dir", str(back))
    run(*flags, status=2)
    found = capsys.readouterr()
    assert "not in the original: table user" in found.out
    assert "the model has no variable text/Adam" in found.out.replace("\n", " ").replace("  ", " ")
    assert "start these as the model makes them with --partial" in found.err
    run(*flags, "--partial", "--step", "77")
    assert find_checkpoint(str(back)).endswith("model.ckpt-77")
    run(*flags, "--partial", status=2)
    assert "has the checkpoint model.ckpt-77 already; import into a new" in capsys.readouterr().err


def test_flags_that_make_no_sense_are_refused(
    trained: Path, tmp_path: Path, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("checkpoint", "export", str(trained), "--to", str(tmp_path), "--names", names, status=2)
    assert "--names is for --format original" in capsys.readouterr().err
    run("checkpoint", "import", str(tmp_path / "none"), "--task", TASK, "--model-dir", "x", status=2)
    assert "is no checkpoint of the original" in capsys.readouterr().err
