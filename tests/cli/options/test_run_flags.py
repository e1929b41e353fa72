"""Which flags of a command line are fields of the run's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monolith.cli.main import main, parse_options
from monolith.cli.options.flags import split_run_flags
from monolith.errors import ConfigError
from monolith.runtime.config_loading import load_run_config

OWN = {"model_dir", "steps", "num_ps"}


@pytest.mark.parametrize(
    ("words", "own", "run"),
    [
        ("tasks:T --steps 3", "tasks:T --steps 3", ""),
        ("tasks:T --cluster.num-workers 2 --steps 3", "tasks:T --steps 3", "--cluster.num-workers 2"),
        ("--cluster.index 2 tasks:T", "tasks:T", "--cluster.index 2"),
        ("--job.local tasks:T", "tasks:T", "--job.local"),
        ("--job.local true tasks:T", "tasks:T", "--job.local true"),
        ("--no-job.local tasks:T", "tasks:T", "--no-job.local"),
        ("--job.no-local tasks:T", "tasks:T", "--job.no-local"),
        ("--nois_local tasks:T", "tasks:T", "--nois_local"),
        ("--save_checkpoints_steps=5 tasks:T", "tasks:T", "--save_checkpoints_steps=5"),
        ("--kafka.topics a b --steps 1", "--steps 1", "--kafka.topics a b"),
        ("--operation_timeout_in_ms -1 tasks:T", "tasks:T", "--operation_timeout_in_ms -1"),
        ("--num_ps 2 --model_dir m", "--num_ps 2 --model_dir m", ""),
        ("--cluster.num-pz 2 tasks:T", "tasks:T", "--cluster.num-pz 2"),
        ("--stepz 3", "--stepz 3", ""),
        ("--train.save.steps 5 tasks:T", "tasks:T", "--train.save.steps 5"),
        ("--checkpoint.keep 5 tasks:T", "tasks:T", "--checkpoint.keep 5"),
        ("tasks:T -- --cluster.index 1", "tasks:T -- --cluster.index 1", ""),
    ],
)
def test_fields_of_the_run_are_told_from_the_commands_own_flags(words: str, own: str, run: str) -> None:
    assert split_run_flags(words.split(), OWN) == (own.split(), run.split())


def test_both_kinds_reach_the_options_and_the_words_are_kept() -> None:
    words = ["train", "tasks:T", "--cluster.role", "ps", "--num_ps=2", "--steps", "4", "--index", "1"]
    options = parse_options("train", words[1:], words)
    assert (options.task, options.num_ps, options.steps) == ("tasks:T", 2, 4)
    assert options.words == tuple(words)
    config = load_run_config(
        args=list(options.run_flags), code={"train.model_dir": "m", "cluster.num_ps": options.num_ps}
    )
    assert (config.cluster.role, config.cluster.index) == ("ps", 1)


def test_an_unknown_flag_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "train.tasks:Clicks", "--stepz", "3"]) == 2
    assert "--steps" in capsys.readouterr().err
    assert main(["train", "train.tasks:Clicks", "--cluster.num-workerz", "3"]) == 2
    said = capsys.readouterr().err
    assert "unknown flag --cluster.num-workerz; the nearest known one is --cluster.num-workers" in said


@pytest.mark.parametrize(
    ("flags", "group", "read"),
    [
        (["--model.dim", "16"], "model", {"dim": 16}),
        (["--model.kernel-norm=true"], "model", {"kernel_norm": True}),
        (["--model.hidden", "[64, 32]"], "model", {"hidden": [64, 32]}),
        (["--labels.seconds.loss", "log"], "labels", {"click": {}, "seconds": {"loss": "log"}}),
        (["--task.batch-size", "100"], "task", {"batch_size": 100}),
    ],
)
def test_keys_of_a_model_a_label_and_a_task_are_flags_too(
    tmp_path: Path, flags: list[str], group: str, read: dict[str, Any]
) -> None:
    own, run = split_run_flags([*flags, "--quiet"], {"quiet"})
    assert (own, run) == (["--quiet"], flags)
    file = tmp_path / "run.toml"
    file.write_text(
        '[features.user]\nkind = "string"\n[labels.click]\n[model]\ntype = "deepfm"\n[data]\npath = "a.csv"\n'
    )
    found = getattr(load_run_config(file=file, args=run), group)
    assert {name: found[name] for name in read} == read
    if group == "model":
        assert found["type"] == "deepfm"  # what the file says stays


def test_the_name_of_a_feature_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[features.price-eur]\nquantiles = 4\n[model]\ntype = "deepfm"\n[data]\npath = "a.csv"\n')
    run = load_run_config(file=file, args=["--features.price-eur.quantiles", "8"])
    assert run.features["price-eur"]["quantiles"] == 8


def test_a_mistyped_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[features.user]\nkind = "string"\n[model]\ntype = "deepfm"\n[data]\npath = "a.csv"\n')
    with pytest.raises(ConfigError, match=r"model\.dimm .*nearest known key is model\.dim"):
        load_run_config(file=file, args=["--model.dimm", "4"])
