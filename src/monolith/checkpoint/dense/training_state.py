"""Training state: optimizers, schedulers, gradient scaler and random generators, in one file and back.

Torch numbers an optimizer's parameters in the order they were given. Here the state of a parameter is stored
under its name in the model, so that another order, other groups or a renamed layer cannot give one parameter
the momentum of another. Names are those of the plain model: a checkpoint restores into a compiled or
distributed one as well, so prefixes of wrappers are removed.

Restoring is in two halves: `prepare` reads and fits, `apply` changes what is live.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monolith.checkpoint.dense.custom_restore import Origin
from monolith.checkpoint.part import RestoreReport
from monolith.errors import MonolithError, RestoreError, SaveError
from monolith.nn.optimizers import rule_of
from monolith.tensors.plain_state import Json, decode, encode

Variables: TypeAlias = nn.Module | Mapping[str, Tensor]
"""A model, or tensors by name."""


class ModelVariables:
    """The variables of a model by name, whatever wraps it: its parameters and persistent buffers.

    Args:
        error: The exception to raise if a variable has no memory to save or restore.
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
            except Exception as cause:  # the module may be any user's code
                raise RestoreError(
                    f"{type(self._model).__name__} refused a state that fits its variables: {cause}. It may "
                    "be loaded in part: create it again before you continue."
                ) from cause
            return
        with torch.no_grad():
            for name, value in values.items():
                self.tensors[name].copy_(value)


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile puts it before the names of what it compiled


Optimizers: TypeAlias = Mapping[str, Optimizer] | Sequence[Optimizer]
"""By name; those in a sequence are called "0", "1", ..."""
Schedulers: TypeAlias = Mapping[str, LRScheduler] | Sequence[LRScheduler]
"""Likewise."""

KEYS = frozenset({"optimizers", "schedulers", "scaler", "random"})
"""The keys of the JSON of a training state."""

_OF_THIS_RUN = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Settings of a group that depend on this run's parameters and devices: they are not loaded."""
_OPTIMIZER_KEYS = ({"kind", "plain"}, {"kind", "state", "groups", "shared", "rest"})
_SCALER, _RANDOM = "gradient scaler", "random generators"

Item = TypeVar("Item")


def encode_training(
    model: ModelVariables,
    optimizers: Optimizers,
    schedulers: Schedulers,
    *,
    scaler: torch.amp.GradScaler | None,
    random: bool,
    tensors: dict[str, Tensor],
) -> dict[str, Json]:
    """Return the state of all as JSON, and add the tensors in it, not copied, to `tensors`.

    Raises:
        SaveError: A value is of a kind that cannot be saved, or an optimizer trains what is not in the model.
    """
    return {
        "optimizers": {
            name: _encode_optimizer(name, optimizer, model, tensors)
            for name, optimizer in _named(optimizers).items()
        },
        "schedulers": {
            name: {
                "kind": kind_of(scheduler),
                "state": encode(scheduler.state_dict(), f"schedulers/{name}", tensors),
            }
            for name, scheduler in _named(schedulers).items()
        },
        "scaler": None if scaler is None else encode(scaler.state_dict(), "scaler", tensors),
        "random": encode(capture_random(), "random", tensors) if random else None,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Which parts of a training state are loaded; the rest stays as the run initialized it."""

    optimizers: bool = True
    counters: bool = True
    """Optimizers whose state is not of parameters, such as `EmbeddingOptimizer`: its global step."""
    schedulers: bool = True
    scaler: bool = True
    random: bool = True


@dataclass(frozen=True, slots=True)
class LoadedVariables:
    """What happens to the model's variables, and so to the optimizer state of each."""

    model: ModelVariables
    chosen: Callable[[str], bool]
    """False: the variable is not loaded, and neither is its state."""
    origins: Mapping[str, Origin]
    """The variables that are loaded; the rest are reset."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the saved variables."""
    names: Callable[[str], Sequence[str]]
    """All names that a saved variable had."""


ReadTensors = Callable[[Callable[[str], bool]], dict[str, Tensor]]
"""Reads the tensors of the names that a function chooses."""


class TrainingRestore:
    """Restores a training state in two steps: `prepare` reads and fits, `apply` changes what is live.

    Args:
        about: The JSON of `encode_training`; None if the checkpoint has none, or it is not wanted.
        read: Reads the tensors of its file.
    """

    def __init__(
        self, about: Json | None, read: ReadTensors, variables: LoadedVariables, resumed: Resumed
    ) -> None:
        nothing: Json = dict.fromkeys(KEYS) | {"optimizers": {}, "schedulers": {}}
        self._about: Json = nothing if about is None else about
        self._read = read
        self._variables = variables
        self._resumed = resumed
        self._loads: list[_Load] = []
        self._random: dict[str, Any] | None = None
        self._loaded: dict[str, str] = {}
        self._reset: dict[str, str] = {}
        self._missing: list[str] = []
        self.problems: dict[str, str] = {}
        """Name -> what does not fit; these are reset if the caller continues."""

    @property
    def report(self) -> RestoreReport:
        fit = {name: f"reset: {why}" for name, why in self.problems.items() if name not in self._missing}
        return RestoreReport(loaded=self._loaded, reset=fit | self._reset, missing=tuple(self._missing))

    def prepare(
        self, optimizers: Optimizers, schedulers: Schedulers, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Read the wanted state and check whether it fits; changes nothing.

        Raises:
            RestoreError: An optimizer trains what is not in the model, or the saved state makes no sense.
        """
        tensors = self._read(self._is_wanted)
        for name, optimizer in _named(optimizers).items():
            self._prepare_optimizer(name, optimizer, tensors)
        for name, scheduler in _named(schedulers).items():
            title = f"scheduler {name}"
            saved = self._about["schedulers"].get(name)
            if not self._resumed.schedulers:
                self._reset[title] = ""
            elif self._is_there(title, saved, kind_of(scheduler)):
                self._loads.append(_Load(title, scheduler, decode(saved["state"], tensors)))
                self._loaded[title] = ""
        if scaler is not None and scaler.is_enabled():
            state = decode(self._about["scaler"], tensors) if self._resumed.scaler else None
            if state:
                self._loads.append(_Load(_SCALER, scaler, state))
                self._loaded[_SCALER] = ""
            else:
                self._reset[_SCALER] = ""
        if self._resumed.random and self._about["random"] is not None:
            self._random = decode(self._about["random"], tensors)
            self._loaded[_RANDOM] = ""

    def apply(self, undo: ExitStack) -> None:
        """Load the prepared state; `undo` restores the state before.

        Raises:
            RestoreError: A `load_state_dict` refused it.
        """
        for load in self._loads:
            load.run(undo)
        if self._random is not None:  # last: no code draws random numbers after it
            undo.callback(restore_random, capture_random())
            restore_random(self._random)

    def _is_wanted(self, tensor: str) -> bool:
        part, _, rest = tensor.partition("/")
        if part == "optimizers" and not self._resumed.optimizers:
            saved = self._about["optimizers"]
            return any("plain" in saved[name] and rest.startswith(f"{name}/") for name in saved)
        return bool(getattr(self._resumed, part, True))

    def _is_there(self, title: str, saved: Json | None, kind: str) -> bool:
        if saved is None:
            self.problems[title] = "not found in checkpoint"
            self._missing.append(title)
        elif saved["kind"] != kind:
            self.problems[title] = f"it is a {saved['kind']} in the checkpoint, a {kind} in this run"
        return title not in self.problems

    def _prepare_optimizer(self, name: str, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
        title = f"optimizer {name}"
        present = optimizer.state_dict()
        plain = not {"state", "param_groups"} <= present.keys()
        names = {} if plain else _numbered_names(name, optimizer, present, self._variables.model)
        if not (self._resumed.counters if plain else self._resumed.optimizers):
            self._reset[title] = ""
            return
        saved = self._about["optimizers"].get(name)
        if not self._is_there(title, saved, kind_of(optimizer)):
            return
        if saved.keys() not in _OPTIMIZER_KEYS or plain != ("plain" in saved):
            raise RestoreError(f"the saved state of {title} has unknown keys: {', '.join(sorted(saved))}")
        if plain:
            self._loads.append(_Load(title, optimizer, decode(saved["plain"], tensors)))
            self._loaded[title] = ""
            return
        slots, count, lost = self._slots(names, present["state"], saved["state"], tensors)
        groups = self._groups(title, names, present["param_groups"], saved["groups"], tensors)
        if title in self.problems:
            return
        state = {"state": decode(saved["shared"], tensors) | slots, "param_groups": groups}
        self._loads.append(_Load(title, optimizer, decode(saved["rest"], tensors) | state))
        self._loaded[title] = f"state of {count} parameter{'' if count == 1 else 's'} loaded"
        if lost:
            self._reset[title] = f"state of {', '.join(lost)} reset"

    def _slots(
        self, names: dict[Any, str], present: dict[Any, Any], saved: Json, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[Any, Any], int, list[str]]:
        """Return the state by parameter, the number of loaded ones, and the names whose state is lost."""
        slots: dict[Any, Any] = {}
        loaded, lost = 0, []
        for number, name in names.items():
            if not self._variables.chosen(name):
                if number in present:
                    slots[number] = present[number]
                continue
            origin = self._variables.origins.get(name)
            if origin is None:
                lost += [name] if name in saved else []
                continue
            found = next((saved[one] for one in self._variables.names(origin.name) if one in saved), None)
            if found is not None:
                fitted = self._fit(decode(found, tensors), origin, self._variables.model.tensors[name])
            elif origin.rows is not None and name in saved:
                # A variable in parts is saved as one tensor, but its optimizer state is saved by part.
                fitted = _same_part(decode(saved[name], tensors), self._variables.model.tensors[name])
            else:
                continue  # it never had a gradient
            if fitted is None:
                lost.append(name)
            else:
                slots[number] = fitted
                loaded += 1
        return slots, loaded, lost

    def _fit(self, slots: dict[str, Any], origin: Origin, parameter: Tensor) -> dict[str, Any] | None:
        """Return the state of a variable, sliced and reshaped like the variable; None if it does not fit."""
        shape = self._variables.shapes[origin.name]
        if origin.rows is None and shape == parameter.shape:
            return slots
        fitted = {}
        for slot, value in slots.items():
            if not isinstance(value, Tensor) or value.numel() == 1:
                fitted[slot] = value
            elif value.shape == shape:
                rows = value if origin.rows is None else value[slice(*origin.rows)].clone()
                fitted[slot] = rows.reshape(parameter.shape)
            else:
                return None
        return fitted

    def _groups(
        self,
        title: str,
        names: dict[Any, str],
        present: list[dict[str, Any]],
        saved: list[Json],
        tensors: Mapping[str, Tensor],
    ) -> list[dict[str, Any]]:
        """Return the present groups with the settings their parameters were saved with."""
        number_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
        groups = []
        for i, group in enumerate(present):
            origins = [
                origin.name
                for name in (names[number] for number in group["params"])
                if self._variables.chosen(name) and (origin := self._variables.origins.get(name)) is not None
            ]
            known = [one for origin in origins for one in self._variables.names(origin)]
            known += [names[number] for number in group["params"]]  # parts go by their own names
            sources = sorted({number_of[name] for name in known if name in number_of}) if origins else []
            settings = [saved[number]["settings"] for number in sources]
            if any(other != settings[0] for other in settings[1:]):
                self.problems[title] = (
                    f"its group {i} has parameters of groups {', '.join(map(str, sources))} in the "
                    "checkpoint, whose settings differ"
                )
            groups.append(group | (decode(settings[0], tensors) if settings else {}))
        return groups


@dataclass(frozen=True, slots=True)
class _Load:
    """A state that is ready to be loaded."""

    title: str
    target: Any
    """Has `state_dict` and `load_state_dict`."""
    state: dict[str, Any] = field(repr=False)

    def run(self, undo: ExitStack) -> None:
        before = self.target.state_dict()
        if not isinstance(self.target, Optimizer):  # an optimizer replaces its state when it loads one
            before = copy.deepcopy(before)
        undo.callback(self.target.load_state_dict, before)
        try:
            self.target.load_state_dict(self.state)
        except MonolithError:
            raise
        except Exception as cause:  # may be any user's code
            raise RestoreError(
                f"cannot restore {self.title}: {type(self.target).__name__} refused its state: {cause}. "
                "Nothing was changed. optimizer_state='reset' starts it from its initial state."
            ) from cause


def _encode_optimizer(
    name: str, optimizer: Optimizer, model: ModelVariables, tensors: dict[str, Tensor]
) -> Json:
    state = optimizer.state_dict()
    where = f"optimizers/{name}"
    if not {"state", "param_groups"} <= state.keys():
        return {"kind": kind_of(optimizer), "plain": encode(state, where, tensors)}
    names = _numbered_names(name, optimizer, state, model)
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    shared = {key: value for key, value in state["state"].items() if key not in names}
    return {
        "kind": kind_of(optimizer),
        "state": {
            names[number]: encode(slots, f"{where}/{names[number]}", tensors)
            for number, slots in state["state"].items()
            if number in names
        },
        "groups": [
            {
                "params": [names[number] for number in group["params"]],
                "settings": encode(
                    {key: value for key, value in group.items() if key not in _OF_THIS_RUN},
                    f"{where}/groups/{i}",
                    tensors,
                ),
            }
            for i, group in enumerate(state["param_groups"])
        ],
        "shared": encode(shared, f"{where}/shared", tensors),
        "rest": encode(rest, f"{where}/rest", tensors),
    }


def _numbered_names(
    name: str, optimizer: Optimizer, state: dict[str, Any], model: ModelVariables
) -> dict[Any, str]:
    """Return parameter's number in `state` -> its name in the model."""
    return {
        number: model.name_of(parameter, f"optimizer {name!r}, in group {i},")
        for i, (live, packed) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True))
        for parameter, number in zip(live["params"], packed["params"], strict=True)
    }


def _same_part(slots: dict[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """Return the state if it is of a part of this size."""
    sizes = {value.shape for value in slots.values() if isinstance(value, Tensor) and value.numel() > 1}
    return slots if sizes <= {parameter.shape} else None


def _named(items: Mapping[str, Item] | Sequence[Item]) -> dict[str, Item]:
    return dict(items) if isinstance(items, Mapping) else {str(i): item for i, item in enumerate(items)}


def kind_of(thing: object) -> str:
    """Return the name of a class with its top package only: modules move, and old checkpoints must match."""
    kind = rule_of(thing) if isinstance(thing, Optimizer) else type(thing)
    return f"{kind.__module__.split('.')[0]}.{kind.__qualname__}"


# Random generators


def capture_random() -> dict[str, Any]:
    """Return the state of the process's generators: Python's, numpy's, torch's, and CUDA's if it is in use.

    A generator that user code made is the user's to save.
    """
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": _cuda_states(),
    }


def _cuda_states() -> list[Tensor]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return torch.cuda.get_rng_state_all()


def restore_random(state: dict[str, Any]) -> None:
    """Set the process's generators to a state of `capture_random`.

    States of more CUDA devices than there are now are left out.

    Raises:
        RestoreError: The state is malformed. No generator has changed.
    """
    before = capture_random()
    try:
        _set(state)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as cause:
        _set(before)
        raise RestoreError(f"the saved state of the random generators is malformed: {cause}") from cause


def _set(state: dict[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
