"""Devices: which GPU a rank has, and where a part of a model may run.

Whether GPUs may be used is said once, when `Devices` is made. A part that asks for one where
there is none to be had runs on the CPU, so a model is written once for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from monolith.errors import ConfigError
from monolith.runtime.discovery import world_from_environment


def visible_gpu(local_rank: int, processes_per_gpu: int = 1) -> int:
    """Return the GPU that a rank of this machine shares with `processes_per_gpu - 1` other ranks.

    Raises:
        ConfigError: `local_rank` is below 0, or `processes_per_gpu` is below 1.
    """
    if processes_per_gpu < 1 or local_rank < 0:
        raise ConfigError(
            f"cannot choose a GPU for local rank {local_rank} with {processes_per_gpu} processes per GPU: "
            "ranks count from 0, and processes_per_gpu must be at least 1"
        )
    return local_rank // processes_per_gpu


def cuda_variables(environ: Mapping[str, str], processes_per_gpu: int = 1) -> dict[str, str]:
    """Return the variables that make CUDA show this rank its GPU alone; to be set before CUDA starts.

    Empty if no launcher gave a rank, or CUDA_VISIBLE_DEVICES is already set.
    """
    world = world_from_environment(environ)
    if world is None or "CUDA_VISIBLE_DEVICES" in environ:
        return {}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": str(visible_gpu(world.local_rank, processes_per_gpu)),
    }


@dataclass(frozen=True, slots=True)
class Devices:
    """Where a part of a model runs: on `current`, and what it is made of on what it asks for within.

    A value, passed to the code that builds a part; it never changes, and there is no global state:

        def tower(devices: Devices) -> nn.Module:
            with devices.current:  # where torch puts new tensors
                ...

        tower(Devices(gpu=True).within("GPU:0"))
    """

    gpu: bool
    """Whether GPUs may be used."""
    current: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def allowed(self, name: str | torch.device | None) -> torch.device:
        """Return the device of that name, or the CPU where GPUs may not be used.

        Args:
            name: As torch writes it, "cuda:0", or with GPU in its place; None means the CPU.

        Raises:
            ConfigError: No such device.
        """
        if name is None:
            return torch.device("cpu")
        if isinstance(name, torch.device):
            device = name
        else:
            try:
                device = torch.device(name.lower().replace("gpu", "cuda"))
            except RuntimeError as cause:
                raise ConfigError(f"unknown device {name!r}: {cause}") from cause
        if device.type == "cpu" or not self.gpu:
            return torch.device("cpu")
        return torch.device(device.type, device.index or 0)

    def within(self, name: str | torch.device | None) -> Devices:
        """Return the same with `allowed(name)` as the current device, for a part that asks for it."""
        return replace(self, current=self.allowed(name))
