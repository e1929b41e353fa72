"""Weights of an architecture search, read from a checkpoint."""

from __future__ import annotations

from torch import Tensor

from monolith import filesystem
from monolith.checkpoint.folder.state_files import read_checkpoint_state
from monolith.errors import FileMissingError
from monolith.observe.summaries import nas_weight_json
from monolith.tensors.files import read_tensors


def get_nas_weight_json(checkpoint: str, prefix: str) -> list[str]:
    """Return the values of the one dense variable whose name contains `prefix`, as text.

    Looks at the disk at every call: a folder means the latest checkpoint it has now.

    Args:
        checkpoint: A folder of checkpoints, the prefix of one (".../model.ckpt-100"), or a dense file of one.

    Raises:
        FileMissingError: There is no such checkpoint.
        ConfigError: No variable's name contains `prefix`, or several do.
    """
    variables: dict[str, Tensor] = {}
    for path in _dense_files(checkpoint):
        variables |= read_tensors(path)
    return nas_weight_json(variables, prefix)


def _dense_files(checkpoint: str) -> list[str]:
    if checkpoint.endswith(".safetensors"):
        return [checkpoint]
    prefix = checkpoint
    if filesystem.is_folder(checkpoint):
        state = read_checkpoint_state(checkpoint)
        if state is None:
            raise FileMissingError(f"nas weights: the folder {checkpoint!r} has no checkpoint")
        prefix = state.model_checkpoint_path
    found = filesystem.glob(f"{prefix}.dense-*.safetensors")
    if not found:
        raise FileMissingError(f"nas weights: the checkpoint {prefix!r} has no dense variables on disk")
    return found
