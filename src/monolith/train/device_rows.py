"""Rows on the device that the dense half computes on: `train.rows_on`.

With rows in host memory a step brings those of a batch to the device and their gradients back. A model whose
rows fit into the memory of a GPU keeps them there, and only ids go up.
"""

from __future__ import annotations

from functools import partial

from monolith.errors import ConfigError
from monolith.store import LocalStore, MakeStore
from monolith.train.accelerator import Accelerator
from monolith.train.config import TrainConfig


def store_maker(config: TrainConfig, accelerator: Accelerator | None, otherwise: MakeStore) -> MakeStore:
    """Return what makes the stores of a run in this process.

    Args:
        otherwise: Makes them where rows are in host memory.

    Raises:
        ConfigError: The accelerator cannot hold rows.
    """
    if config.rows_on == "host":
        return otherwise
    device = None if accelerator is None else accelerator.rows_device()
    if device is None:
        raise ConfigError(
            "train.rows_on: rows can only be on a CUDA device; set train.accelerator to cuda, or "
            "train.rows_on to host"
        )
    return partial(LocalStore.from_configs, device=device)
