"""Graphs: the launches of a module's step, captured once and replayed as one launch.

The dense part of a small model takes the host longer to launch than the device to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ModuleGraph:
    """A module on a CUDA device whose forward and backward passes are replayed in training.

    Only inputs of the captured shapes are replayed. Other shapes (the last batch of a file), passes without
    gradients and eval mode run the module as usual. The outputs of a pass are overwritten by the next one.
    The module keeps its parameters and their names; it must have no hooks.

    Args:
        module: On the device, in training mode, with gradients on.
        sample: Positional inputs on the device; each requires gradients if later inputs will.

    Attributes:
        enabled: Whether passes are replayed.
    """

    def __init__(self, module: nn.Module, sample: Sequence[Tensor]) -> None:
        self.enabled = True
        self._module = module
        self._plain = module.forward
        self._shapes = [tuple(one.shape) for one in sample]
        capture: Any = torch.cuda.make_graphed_callables
        capture(module, tuple(sample))  # replaces module.forward, which decides below whether to use it
        self._captured = module.forward
        module.forward = self._forward

    def _forward(self, *inputs: Tensor) -> Any:
        fits = self.enabled and self._module.training and torch.is_grad_enabled()
        if fits and [tuple(one.shape) for one in inputs] == self._shapes:
            return self._captured(*inputs)
        return self._plain(*inputs)
