"""Rows on the device that the dense half computes on: `train.embedding_device`.

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
from monolith.train.peers import Peers


def store_maker(config: TrainConfig, accelerator: Accelerator | None, peers: Peers) -> MakeStore:
    """Return what makes the stores of a run in this process.

    Raises:
        ConfigError: The accelerator cannot hold rows, or this process holds none.
    """
    if config.embedding_device == "host":
        return peers.make_store
    device = None if accelerator is None else accelerator.rows_device()
    if device is None:
        raise ConfigError(
            "train.embedding_device: rows can only be on a CUDA device; set train.accelerator to cuda, or "
            "train.embedding_device to host"
        )
    local: MakeStore = partial(LocalStore.from_configs, device=device)
    if config.device_memory_bytes is not None:
        local = _OneStore(
            partial(LocalStore.from_configs, device=device, device_bytes=config.device_memory_bytes)
        )
    return holding(peers, local)


def holding(peers: Peers, local: MakeStore) -> MakeStore:
    """Return what makes stores over those of this process.

    Raises:
        ConfigError: It holds no rows.
    """
    found = peers.holding(local)
    if found is None:
        raise ConfigError(
            "train.embedding_device: rows are on parameter servers in this run, not on the device of a "
            "worker; set train.embedding_device to host, or train in one process or on ranks without "
            "parameter servers"
        )
    return found


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
