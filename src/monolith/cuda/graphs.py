"""Graphs: what a module launches in every step, captured once and replayed as one launch.

A small dense half takes the host longer to launch than the device to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ModuleGraph:
    """A module on a CUDA device whose passes are replayed, forward and backward, in training.

    That is for inputs of the shapes it was captured with: those of others, such as the last batch of a file,
    passes without gradients and eval mode go the plain way. Outputs of a pass are overwritten by the next.
    The module keeps its parameters and their names; it must have no hooks.

    Args:
        module: On the device, in training mode, with gradients on.
        sample: Inputs by place, on the device, that require gradients where those to come do.

    Attributes:
        enabled: Whether passes are replayed.
    """

    def __init__(self, module: nn.Module, sample: Sequence[Tensor]) -> None:
        self.enabled = True
        self._module = module
        self._plain = module.forward
        self._shapes = [tuple(one.shape) for one in sample]
        capture: Any = torch.cuda.make_graphed_callables
        capture(module, tuple(sample))  # it gives the module another forward
        self._captured = module.forward
        module.forward = self._forward

    def _forward(self, *inputs: Tensor) -> Any:
        fits = self.enabled and self._module.training and torch.is_grad_enabled()
        if fits and [tuple(one.shape) for one in inputs] == self._shapes:
            return self._captured(*inputs)
        return self._plain(*inputs)
