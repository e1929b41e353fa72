"""Rows on the device that the dense half computes on: `train.rows_on`.

With rows in host memory a step brings those of a batch to the device and their gradients back. A model whose
rows fit into the memory of a GPU keeps them there, and only ids go up; with more, those that were not trained
for longest go to host memory (`train.device_memory_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from monolith.errors import ConfigError
from monolith.store import LocalStore, MakeStore, Store
from monolith.table import TableConfig
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
    if config.device_memory_bytes is None:
        return partial(LocalStore.from_configs, device=device)
    return _OneStore(partial(LocalStore.from_configs, device=device, device_bytes=config.device_memory_bytes))


class _OneStore:
    """Makes one store, whose tables share all the memory that there is for rows."""

    def __init__(self, make: MakeStore) -> None:
        self._make = make
        self._made = False

    def __call__(self, configs: Mapping[str, TableConfig], /, **how: Any) -> Store:
        if self._made:
            raise ConfigError(
                "train.device_memory_bytes: the model has several embedding collections, and memory is "
                "shared out among the tables of one; bring their features into one, or leave it out"
            )
        self._made = True
        return self._make(configs, **how)
