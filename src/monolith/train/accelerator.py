"""Accelerators: where the dense half of a model computes. Rows stay where their store keeps them: in host
memory, or on the accelerator, too, where a run asks for that (`train.embedding_device`).

Without one a module computes where the task has put it. With one the trainer moves the module there, and
the outputs of its embedding collections come there, too; what is missing to use it is said before a run
begins.

    accelerator = accelerator_of("xla")
    if accelerator is not None:
        take(accelerator, module)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from torch import nn

from monolith.cuda import CudaDevice, Device
from monolith.errors import ConfigError
from monolith.model import EmbeddingCollection
from monolith.train.hook import Hook, StepResult, TrainingRun

AcceleratorName = Literal["cpu", "cuda", "xla"]


class Accelerator(Protocol):
    """A device of this machine that a module can be moved to."""

    name: AcceleratorName

    def missing(self) -> str | None:
        """Return what keeps this machine from using it, and what to do about it; None if nothing does."""

    def device(self) -> torch.device:
        """Return the device of this process. Only where nothing is missing."""

    def rows_device(self) -> Device | None:
        """Return it as tables know it, to keep their rows there; None if it cannot hold them."""

    def after_step(self) -> None:
        """Have done what a step has asked for; called once after each."""


class Cpu:
    """The processors of this machine."""

    name: AcceleratorName = "cpu"

    def missing(self) -> str | None:
        return None

    def device(self) -> torch.device:
        return torch.device("cpu")

    def rows_device(self) -> Device | None:
        return None

    def after_step(self) -> None:
        return


class Cuda:
    """An NVIDIA GPU: torch's current one.

    Args:
        is_available: Whether torch can use one.
    """

    name: AcceleratorName = "cuda"

    def __init__(self, is_available: Callable[[], bool] = torch.cuda.is_available) -> None:
        self._is_available = is_available

    def missing(self) -> str | None:
        if self._is_available():
            return None
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA; install one that was built with it"
        return (
            f"torch {torch.__version__} finds no GPU; see that nvidia-smi lists one and that "
            "CUDA_VISIBLE_DEVICES does not hide it"
        )

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def rows_device(self) -> Device | None:
        return CudaDevice.of(self.device())

    def after_step(self) -> None:
        return


class Xla:
    """A TPU, or what else XLA compiles for, by torch_xla.

    XLA notes what a step computes and runs it when it is told that the step is over.

    Args:
        load: Returns the module torch_xla; None if it is not installed.
    """

    name: AcceleratorName = "xla"

    def __init__(self, load: Callable[[], Any | None] | None = None) -> None:
        self._load = _load_torch_xla if load is None else load

    def missing(self) -> str | None:
        try:
            if (xla := self._load()) is None:
                return (
                    "torch_xla is not installed; install the one of torch "
                    f"{torch.__version__.partition('+')[0]}: "
                    "`pip install 'torch_xla[tpu]'` on a machine with a TPU"
                )
            xla.device()
        except (ImportError, RuntimeError) as error:  # of another version, or without a device
            return f"torch_xla is installed, but cannot be used: {error}"
        return None

    def device(self) -> torch.device:
        found: torch.device = self._loaded().device()
        return found

    def rows_device(self) -> Device | None:
        return None

    def after_step(self) -> None:
        self._loaded().sync()

    def _loaded(self) -> Any:
        xla = self._load()
        assert xla is not None, "nothing is missing"
        return xla


ACCELERATORS: Mapping[AcceleratorName, Callable[[], Accelerator]] = {"cpu": Cpu, "cuda": Cuda, "xla": Xla}


def accelerator_of(name: AcceleratorName | None) -> Accelerator | None:
    """Return the accelerator of a config; None leaves modules where they are.

    Raises:
        ConfigError: This machine lacks something for it. Says what.
    """
    if name is None:
        return None
    accelerator = ACCELERATORS[name]()
    if (missing := accelerator.missing()) is not None:
        raise ConfigError(f"train.accelerator: cannot use {name!r}: {missing}")
    return accelerator


def take(accelerator: Accelerator, module: nn.Module) -> None:
    """Move a module to an accelerator, and have the rows of its collections come there."""
    device = accelerator.device()
    module.to(device)
    for part in module.modules():
        if isinstance(part, EmbeddingCollection):
            part.device = device


class AcceleratorHook(Hook):
    """Tells an accelerator when a step is over."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._accelerator.after_step()


def _load_torch_xla() -> Any | None:
    if find_spec("torch_xla") is None:
        return None
    import torch_xla  # type: ignore[import-not-found]

    return torch_xla
