"""The variables of a model by name, whatever the model is wrapped in.

A checkpoint should restore into a model that is compiled, or trained on many ranks, as
well as into the plain one, so what wrappers add to names is taken off here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from monolith.errors import RestoreError, SaveError

Variables: TypeAlias = nn.Module | Mapping[str, Tensor]
"""A model, or tensors by name."""


class ModelVariables:
    """What a checkpoint holds of a model: its parameters and buffers, less those that are not persistent.

    Args:
        error: What to raise where there is nothing to save or nothing to restore into.
    """

    def __init__(self, model: Variables, error: type[SaveError] | type[RestoreError]) -> None:
        self._error = error
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        state: Mapping[str, Any]
        if isinstance(self._model, nn.Module):
            state = self._model.state_dict()
            parameters: Iterable[tuple[str, Tensor]] = self._model.named_parameters(remove_duplicate=False)
        else:
            state = self._model
            parameters = self._model.items()
        self._keys = {_plain_name(key): key for key in state}
        self.tensors: dict[str, Tensor] = {}
        """Not copies: they share their memory with the model."""
        self.extra: dict[str, Any] = {}
        """What modules return from `get_extra_state`."""
        for name, key in self._keys.items():
            (self.tensors if isinstance(state[key], Tensor) else self.extra)[name] = state[key]
        self._names: dict[int, str] = {}
        for name, parameter in parameters:
            self._names.setdefault(id(parameter), _plain_name(name))
        for name, tensor in self.tensors.items():
            if is_lazy(tensor) or tensor.is_meta:
                raise error(
                    f"{name!r} has no memory yet: give the model its first batch, or move it off the meta "
                    "device with to_empty, before it is saved or restored"
                )

    def name_of(self, parameter: Tensor, owner: str) -> str:
        """Return the name of a parameter that `owner` trains."""
        if (name := self._names.get(id(parameter))) is None:
            raise self._error(
                f"{owner} trains a tensor of shape {tuple(parameter.shape)} that is not a parameter of the "
                "model. Pass the model that holds all parameters of its optimizers."
            )
        return name

    def load(self, values: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        """Write values, whose shapes and dtypes are right, into the variables."""
        if isinstance(self._model, nn.Module):
            state = {self._keys[name]: value for name, value in {**values, **extra}.items()}
            try:
                self._model.load_state_dict(state, strict=False)
            except Exception as cause:  # the code of anybody's module
                raise RestoreError(
                    f"{type(self._model).__name__} refused a state that fits its variables: {cause}. It may "
                    "be loaded in part: create it again before you go on."
                ) from cause
            return
        with torch.no_grad():
            for name, value in values.items():
                self.tensors[name].copy_(value)


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile puts it before the names of what it compiled
