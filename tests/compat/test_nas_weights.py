"""Weights of an architecture search: always those of the checkpoint that is the latest now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith.checkpoint.folder.state_files import CheckpointState, write_checkpoint_state
from monolith.errors import ConfigError, FileMissingError
from monolith.tensors.files import write_tensors
from monolith_compat.nas_weights import get_nas_weight_json, nas_weight_json


def save(folder: Path, step: int, *weights: float) -> str:
    prefix = str(folder / f"model.ckpt-{step}")
    tensors = {"arch/alpha": torch.tensor(weights), "dense/kernel": torch.ones(2)}
    write_tensors(f"{prefix}.dense-00000-of-00001.safetensors", tensors, {})
    write_checkpoint_state(str(folder), CheckpointState(prefix, (prefix,)))
    return prefix


def test_a_newer_checkpoint_in_the_same_folder_is_seen(tmp_path: Path) -> None:
    save(tmp_path, 1, 0.5, 1.5)
    assert get_nas_weight_json(str(tmp_path), "arch/") == ["0.5", "1.5"]
    save(tmp_path, 2, 2.5)
    assert get_nas_weight_json(str(tmp_path), "arch/") == ["2.5"]


def test_one_checkpoint_or_one_file_may_be_named(tmp_path: Path) -> None:
    prefix = save(tmp_path, 1, 0.5)
    save(tmp_path, 2, 2.5)
    assert get_nas_weight_json(prefix, "arch/") == ["0.5"]
    assert get_nas_weight_json(f"{prefix}.dense-00000-of-00001.safetensors", "arch/") == ["0.5"]


def test_the_prefix_must_be_given_and_be_found(tmp_path: Path) -> None:
    save(tmp_path, 1, 0.5)
    with pytest.raises(TypeError, match="prefix"):
        get_nas_weight_json(str(tmp_path))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="no variable does"):
        get_nas_weight_json(str(tmp_path), "nas/")


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="has no checkpoint"):
        get_nas_weight_json(str(tmp_path), "arch/")
    with pytest.raises(FileMissingError, match=r"model\.ckpt-7"):
        get_nas_weight_json(str(tmp_path / "model.ckpt-7"), "arch/")


def test_weights_of_a_checkpoint_are_found_by_a_part_of_their_name() -> None:
    variables = {"arch/alpha": torch.tensor([[0.5, 1.5]]), "dense/kernel": torch.ones(2)}
    assert nas_weight_json(variables, "arch/") == ["0.5", "1.5"]


def test_the_part_of_the_name_is_required_and_must_mean_one_variable() -> None:
    variables = {"arch/a": torch.ones(1), "arch/b": torch.ones(1)}
    with pytest.raises(ConfigError, match="must not be empty"):
        nas_weight_json(variables, "")
    with pytest.raises(ConfigError, match="no variable does"):
        nas_weight_json(variables, "nas")
    with pytest.raises(ConfigError, match="2 variables do: arch/a, arch/b"):
        nas_weight_json(variables, "arch")
