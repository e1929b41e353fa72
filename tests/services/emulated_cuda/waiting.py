"""What makes the host wait for a device, as far as it can be seen where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from services.emulated_cuda.device import EmulatedDevice, EmulationError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from monolith.cuda import Device

WAITS = frozenset(
    [
        "item",
        "tolist",
        "cpu",
        "numpy",
        "nonzero",
        "unique",
        "unique_consecutive",
        "masked_select",
        "argwhere",
        "equal",
        "allclose",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
    ]
)


@contextmanager
def nothing_waits(device: Device) -> Iterator[None]:
    """Fail where the host waits for the device.

    On an emulated one calls are refused that would wait by what they return: `item`, `tolist`, `cpu`,
    `nonzero`, indices by a mask and their like, of a tensor of the device.
    """
    if isinstance(device, EmulatedDevice):
        with _Watch(device):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Watch(TorchFunctionMode):
    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        name = getattr(func, "__name__", "")
        tensors = [one for one in args if isinstance(one, Tensor)]
        of_device = bool(tensors) and self._device.holds(tensors[0])
        if of_device and (name in WAITS or (name == "__getitem__" and _is_mask(args[1]))):
            raise EmulationError(f"the host waits for the device: {name} of {tuple(tensors[0].shape)}")
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in parts)
