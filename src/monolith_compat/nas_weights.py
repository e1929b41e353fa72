"""Weights of an architecture search, read from a checkpoint.

`monolith evaluate insight` shows the widths that a search prefers, from the summaries that a run with
`hooks.nas_every_steps` writes. This reads any dense variable, as the original's tools expect it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from monolith import filesystem
from monolith.checkpoint.folder.state_files import read_checkpoint_state
from monolith.errors import ConfigError, FileMissingError
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


def nas_weight_json(variables: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Return the values of the one variable whose name contains `prefix`, as text.

    Raises:
        ConfigError: No variable's name does, or several do.
    """
    if not prefix:
        raise ConfigError("nas weights: say which variable to read; the prefix must not be empty")
    found = [name for name in variables if prefix in name]
    if len(found) != 1:
        what = f"{len(found)} variables do: {', '.join(sorted(found))}" if found else "no variable does"
        raise ConfigError(
            f"nas weights: one variable should have {prefix!r} in its name, but {what}. "
            f"The checkpoint has {', '.join(sorted(variables)) or 'none at all'}."
        )
    return [str(value) for value in variables[found[0]].flatten().tolist()]


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
