"""The devices that tests run on: the GPU where there is one, and emulated ones."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from services.emulated_cuda.device import HOST_MEMORY, EmulatedDevice
from services.emulated_cuda.tensors import DEVICE

from monolith.cuda import Device, device_of


def device_names() -> list[str]:
    """Return the devices that work on this machine: the GPU, if any, and the emulated one."""
    if not torch.cuda.is_available():
        return ["emulated"]
    return ["gpu", "emulated"] if shutil.which("g++") else ["gpu"]


def device_named(name: str, *, mixes: bool = False) -> Device:
    """Return a device by its name.

    Args:
        mixes: Whether an emulated one has plain CPU tensors; see `EmulatedDevice`.
    """
    if name == "gpu":
        return device_of(None)
    seed = {"emulated": 0, "shuffled": 7}[name]
    return EmulatedDevice(seed=seed, torch_device=HOST_MEMORY if mixes else DEVICE)


def on_devices(cases: list[tuple[Any, ...]], plain: list[tuple[Any, ...]]) -> list[Any]:
    """Return the cases of a test with the name of a device before each.

    On a GPU all of them are quick. Where g++ compiles every layout `make test` runs only the plain ones, and
    `make soak` the rest.
    """
    slow = pytest.mark.soak
    return [
        pytest.param(name, *case, marks=[] if name == "gpu" or case in plain else [slow])
        for name in device_names()
        for case in cases
    ]
