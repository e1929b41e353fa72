"""Devices: which GPU a rank has, and where a part of a model may run.

Whether GPUs may be used is said once, when `Devices` is made. A part that asks for one where
there is none to be had runs on the CPU, so a model is written once for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from monolith.cluster.mpi import world_from_environment
from monolith.errors import ConfigError


def visible_gpu(local_rank: int, processes_per_gpu: int = 1) -> int:
    """Return the GPU that a rank of this machine shares with `processes_per_gpu - 1` others.

    Raises:
        ConfigError: Not a rank, or nobody shares.
    """
    if processes_per_gpu < 1 or local_rank < 0:
        raise ConfigError(
            f"cannot choose a GPU for local rank {local_rank}: ranks begin with 0, and at least one process "
            f"has a GPU, not {processes_per_gpu}"
        )
    return local_rank // processes_per_gpu


def cuda_variables(environ: Mapping[str, str], processes_per_gpu: int = 1) -> dict[str, str]:
    """Return the variables that make CUDA show this rank its GPU alone; to be set before CUDA starts.

    Empty where no launcher gave a rank, or somebody has chosen already.
    """
    world = world_from_environment(environ)
    if world is None or "CUDA_VISIBLE_DEVICES" in environ:
        return {}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": str(visible_gpu(world.local_rank, processes_per_gpu)),
    }


class Devices:
    """Where parts of a model run. Each thread and task has a place of its own in the nest.

    Args:
        gpu: Whether GPUs may be used.
    """

    def __init__(self, *, gpu: bool) -> None:
        self.gpu = gpu
        self._cpu = torch.device("cpu")
        self._current: ContextVar[torch.device] = ContextVar("device", default=self._cpu)

    @property
    def current(self) -> torch.device:
        """The innermost device asked for; the CPU outside of all."""
        return self._current.get()

    def allowed(self, name: str | torch.device | None) -> torch.device:
        """Return the device of that name, or the CPU where GPUs may not be used.

        Args:
            name: As torch writes it, "cuda:0", or with GPU in its place; None means the CPU.

        Raises:
            ConfigError: No such device.
        """
        if name is None:
            return self._cpu
        if isinstance(name, torch.device):
            device = name
        else:
            try:
                device = torch.device(name.lower().replace("gpu", "cuda"))
            except RuntimeError as cause:
                raise ConfigError(f"no device is called {name!r}: {cause}") from cause
        if device.type == "cpu" or not self.gpu:
            return self._cpu
        return torch.device(device.type, device.index or 0)

    @contextmanager
    def use(self, name: str | torch.device | None) -> Iterator[torch.device]:
        """Make `allowed(name)` current, and where torch puts new tensors, as long as the block lasts."""
        device = self.allowed(name)
        token = self._current.set(device)
        try:
            with device:
                yield device
        finally:
            self._current.reset(token)
