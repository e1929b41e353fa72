"""`monolith train --from RUN`: a changed model starts from another run's checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.config_files import write_project

from monolith.checkpoint import BestCheckpoint, write_best
from monolith.cli.main import main

EARLY, LATE = 4, 8
ADDED = '[features.genre]\ncolumn = "tags"\nkind = "string"\nseparator = "|"\n\n'
Train = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project of a run with checkpoints of two steps, of which the earlier one is the best."""
    folder = tmp_path_factory.mktemp("old")
    config = str(write_project(folder))
    flags = ["--steps", str(LATE), "--save-steps", str(EARLY), "--quiet"]
    assert main(["train", "--config", config, *flags]) == 0
    best = BestCheckpoint(name=f"model.ckpt-{EARLY}", step=EARLY, metric="click/auc", value=0.75)
    write_best(str(folder / "run"), best)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def train(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Train:
    """Train a changed model for two steps; return the report, and what was logged."""

    def run(change: Callable[[str], str], start: str, *flags: str) -> tuple[dict[str, Any], str]:
        config = tmp_path / "new.toml"
        config.write_text(change((old / "clicks.toml").read_text()))
        words = ["--steps", "2", "--quiet", "--log-level", "info", "--json"]
        words += ["--model-dir", str(tmp_path / "new")]
        caplog.clear()
        caplog.set_level("INFO")
        assert main(["train", "--config", str(config), "--from", start, *words, *flags]) == 0
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said, caplog.text

    return run


def with_feature(config: str) -> str:
    return config.replace("[labels.click]", f"{ADDED}[labels.click]")


def same(config: str) -> str:
    return config


@pytest.mark.parametrize(
    ("start", "step"),
    [
        ("run", EARLY),
        ("run/best", EARLY),
        ("run/latest", LATE),
        (f"run/{LATE}", LATE),
        (f"run/model.ckpt-{EARLY}", EARLY),
        (f"run/model.ckpt-{LATE}.manifest", LATE),
    ],
)
def test_a_start_is_a_run_or_one_of_its_checkpoints(train: Train, old: Path, start: str, step: int) -> None:
    said, _ = train(same, str(old / start))
    assert said["restored_from"].endswith(f"old0/run/model.ckpt-{step}")
    assert (said["steps"], said["step"]) == (2, step + 2)


def test_an_added_feature_starts_fresh_next_to_those_that_are_loaded(train: Train, old: Path) -> None:
    _, logged = train(with_feature, str(old / "run/best"))
    assert "started from" in logged
    for line in (
        "  loaded    table item                 ",
        "  partly    dense.mlp.0.kernel.weight  168 of 200 weights of 25 x 8",
        "  fresh     table genre                the checkpoint does not have it",
    ):
        assert line in logged
    assert "does not exist" not in logged


@pytest.mark.parametrize(
    ("old_text", "new_text", "lines"),
    [
        ("dim = 4", "dim = 6", ["5 of 7 columns", "168 of 248 weights of 31 x 8"]),
        ("hidden = [8]", "hidden = [12]", ["168 of 252 weights of 21 x 12", "8 of 12 weights of 12 x 1"]),
        ('"Adagrad"', '"Adam"', ["optimizer state reset, because the optimizer changed", "21 x 8"]),
        (
            "deepfm",
            "dcnv2",
            ["4 of 5 saved columns", "loaded    dense.mlp.0.kernel.weight", "fresh     dense.head.bias"],
        ),
        (
            '"deepfm"\ndim = 4\nhidden = [8]',
            '"dlrm"\ndim = 4',
            ["4 of 5 saved columns", "fresh     dense.bottom.0.bias", "left out  dense.mlp.0"],
        ),
        ("deepfm", "mmoe", ["4 of 5 saved columns", "fresh     dense.mixture.gate"]),
        ('kind = "int"', 'kind = "int"\ndim = 4', ["loaded    dense.mlp.0.kernel.weight  21 x 8"]),
    ],
)
def test_what_fits_is_loaded_and_the_table_says_what_does_not(
    train: Train, old: Path, old_text: str, new_text: str, lines: list[str]
) -> None:
    _, logged = train(lambda config: config.replace(old_text, new_text), str(old / "run"))
    table = " ".join(logged.split())
    for line in lines:
        assert " ".join(line.split()) in table


def test_a_removed_feature_is_left_out(train: Train, old: Path) -> None:
    user_tag = '[features.user_tag]\nof = ["user", "tags"]\n'
    _, logged = train(lambda config: config.replace(user_tag, ""), str(old / "run"))
    assert "left out  table user_tag" in logged
    assert "rows; this model does not have it" in logged
    assert "dense.mlp.0.kernel.weight  136 of 136 weights of 17 x 8" in logged


def test_means_and_quantiles_of_the_other_run_stay_what_they_were(train: Train, old: Path) -> None:
    more = '[features.cheap]\ncolumn = "price"\nquantiles = 3\n\n[labels.click]'
    data = "\n".join((old / "clicks.csv").read_text().splitlines()[:300])
    other = old / "fewer.csv"
    other.write_text(data + "\n")
    _, logged = train(
        lambda config: config.replace("[labels.click]", more).replace("clicks.csv", "fewer.csv"),
        str(old / "run"),
    )
    assert "loaded table price_level 4 rows" in " ".join(logged.split())
    assert "boundaries changed" not in logged


def test_a_run_that_was_killed_resumes_and_says_so(train: Train, old: Path, tmp_path: Path) -> None:
    first, _ = train(with_feature, str(old / "run/best"))
    second, logged = train(with_feature, str(old / "run/best"))
    assert second["restored_from"] == first["checkpoint"]
    assert (first["step"], second["step"]) == (EARLY + 2, EARLY + 4)
    assert f"{tmp_path / 'new'} has a checkpoint: resuming it" in logged
    assert "started from" not in logged


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_there_again(
    train: Train, old: Path, tmp_path: Path
) -> None:
    train(with_feature, str(old / "run/best"))
    for path in (tmp_path / "new").glob("model.ckpt-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    prefix = str(old / f"run/model.ckpt-{EARLY}")
    state = f'model_checkpoint_path: "{prefix}"\nall_model_checkpoint_paths: "{prefix}"\n'
    (tmp_path / "new" / "checkpoint").write_text(state)
    said, logged = train(with_feature, str(old / "run/best"))
    assert said["restored_from"] == prefix
    assert "fresh     table genre" in logged


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--from", "{old}/nowhere"], "there is no run and no checkpoint"),
        (["--from", "{old}/run/77"], "there is no checkpoint 77"),
        (["--from", "{old}/run", "--restore-dir", "{old}/run"], "leave out --restore-dir"),
        (["--from", "{old}/run", "--model-dir", "{old}/run"], "Give the new run a folder of its own"),
    ],
)
def test_a_start_that_cannot_be_is_refused_with_what_to_do(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    words = ["train", "--config", str(old / "clicks.toml"), "--model-dir", str(tmp_path / "new"), "--quiet"]
    assert main([*words, *(flag.format(old=old) for flag in flags)]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("new/model.ckpt-*"))
