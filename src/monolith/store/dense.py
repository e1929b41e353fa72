"""Dense weights on parameter servers: who has which, one step for a share of them, and all of it as bytes.

Every process builds the whole module, because that is what a task describes. Each weight
has one server that trains it; what the others hold of it is a copy that nobody reads. No
weight is divided, so an optimizer sees it whole.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.errors import FeatureError, RestoreError
from monolith.nn.optimizers import rule_of
from monolith.tensors.files import dump_tensors, load_tensors
from monolith.tensors.plain_state import decode, encode

_VERSION = 3
_METADATA = "monolith"
_ALIGNMENT = 8
_WEIGHT, _STATE, _SCHEDULE = "weight/", "state/", "schedule"


def share_of_weights(parameters: Mapping[str, Tensor], num_servers: int) -> dict[str, int]:
    """Return the server of each weight, by name: the largest goes first, to the server that has least.

    The same in every process that builds the same module.
    """
    if num_servers < 1:
        raise FeatureError(f"cannot share weights among {num_servers} servers; there must be at least 1")
    loads = [0] * num_servers
    servers: dict[str, int] = {}
    for name in sorted(parameters, key=lambda name: (-_size(parameters[name]), name)):
        servers[name] = loads.index(min(loads))
        loads[servers[name]] += _size(parameters[name])
    return {name: servers[name] for name in sorted(servers)}


def check_held(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse weights that an optimizer would never train."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for name, parameter in parameters.items() if id(parameter) not in held]:
        raise FeatureError(f"the optimizer does not hold {missing[0]!r}: it would never be trained")


def rates_of(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the learning rate of each group of weights, by number, where it is a number."""
    rates = enumerate(group.get("lr") for group in optimizer.param_groups)
    return {number: float(rate) for number, rate in rates if isinstance(rate, (int, float, Tensor))}


def set_rates(optimizer: torch.optim.Optimizer, rates: Mapping[int, float]) -> None:
    """Make the learning rates of groups of weights what `rates_of` said elsewhere.

    Raises:
        FeatureError: A group is not there, or its rate is no number. Nothing has changed.
    """
    known = rates_of(optimizer)
    if odd := sorted(rates.keys() - known.keys()):
        raise FeatureError(f"the optimizer has no group {odd[0]} whose learning rate is a number")
    for number, rate in rates.items():
        group = optimizer.param_groups[number]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class DenseShare:
    """The weights that one server is in charge of, and the count of steps. Thread-safe.

    Args:
        parameters: All weights of the module, by name. Nobody else may change them.
        optimizer: Holds all of them; the others never have a gradient here. None where there are none.
        share: Which of how many servers this is, (k, n). Number 0 counts the steps.
        schedule: Moves the optimizer's rates after each step. All servers with weights hear of every step,
            so it stands alike on each.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        share: tuple[int, int],
        schedule: LRScheduler | None = None,
    ) -> None:
        number, count = share
        if optimizer is None and parameters:
            raise FeatureError("dense weights need an optimizer; give the one the task makes")
        if optimizer is not None:
            check_held(parameters, optimizer)
        servers = share_of_weights(parameters, count)
        self._mine = {name: parameters[name] for name, server in servers.items() if server == number}
        self._optimizer = optimizer
        self._schedule = schedule
        self._share = share
        self._lock = threading.Lock()  # guards weights, optimizer, schedule and _step
        self._step = 0

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """What this server is in charge of, sorted by name."""
        return self._mine

    @property
    def step(self) -> int:
        """Pushes so far, of all workers; only server 0 hears of all."""
        with self._lock:
            return self._step

    @step.setter
    def step(self, value: int) -> None:
        if not isinstance(value, int) or value < 0:
            raise FeatureError(f"the global step must be a whole number from 0 on, got {value!r}")
        with self._lock:
            self._step = value

    def push(
        self, gradients: Mapping[str, Tensor], rates: Mapping[int, float] | None = None
    ) -> dict[str, Tensor]:
        """Take one optimizer step with these gradients, by name; return copies of all weights after it.

        Weights without a gradient stay as they are.

        Args:
            rates: Learning rates that hold from now on, by group of the optimizer; others stay.

        Raises:
            FeatureError: A gradient is of no weight of this share, or of another shape; or there is no such
                group. Nothing has changed.
        """
        for name, gradient in gradients.items():
            weight = self._mine.get(name)
            if weight is None:
                raise FeatureError(f"server {self._share[0]} is not in charge of the weight {name!r}")
            if gradient.shape != weight.shape or gradient.dtype != weight.dtype:
                raise FeatureError(
                    f"the gradient of {name!r} has {_kind(gradient)}, and the weight {_kind(weight)}"
                )
        with self._lock:
            if rates and self._optimizer is not None:
                set_rates(self._optimizer, rates)
            try:
                for name, gradient in gradients.items():
                    self._mine[name].grad = gradient.to(self._mine[name].device)
                if self._optimizer is not None:
                    self._optimizer.step()
                if self._schedule is not None:
                    self._schedule.step()
            finally:
                for weight in self._mine.values():
                    weight.grad = None
            self._step += 1
            return self._copies()

    def pull(self) -> dict[str, Tensor]:
        """Return copies of all weights of this share."""
        with self._lock:
            return self._copies()

    def dump(self) -> bytes:
        """Return weights, their optimizer state and the step as a dense file with JSON in its metadata.

        Raises:
            SaveError: The optimizer keeps something that is neither number, text nor tensor.
        """
        with self._lock:
            return dump_dense(self._mine, self._optimizer, self._step, self._schedule)

    def load(self, data: bytes) -> None:
        """Take over what `dump` returned, of a share of the same weights.

        Raises:
            RestoreError: It is of other weights. Nothing has changed.
        """
        state = read_dense(data)
        with self._lock:
            fill_dense(self._mine, self._optimizer, [state], self._schedule)
            self._step = state.step

    def _copies(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self._mine.items()}


# As bytes, every step


def pack_tensors(tensors: Sequence[Tensor]) -> NDArray[np.uint8]:
    """Return the bytes of all tensors, one after another, each beginning at a multiple of 8."""
    out = np.zeros(sum(_padded(_size(tensor)) for tensor in tensors), np.uint8)
    at = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        out[at : at + len(flat)] = flat
        at += _padded(len(flat))
    return out


def unpack_tensors(data: NDArray[np.uint8], like: Sequence[Tensor]) -> list[Tensor]:
    """Return what was packed, of the shapes and types of `like`, sharing the memory of `data`.

    Raises:
        FeatureError: There are more bytes, or fewer.
    """
    expected = sum(_padded(_size(tensor)) for tensor in like)
    if len(data) != expected:
        raise FeatureError(f"{len(like)} dense tensors take {expected} bytes, and {len(data)} came")
    found, at = [], 0
    for tensor in like:
        size = _size(tensor)
        piece = torch.from_numpy(data[at : at + size])
        found.append(piece.view(tensor.dtype).reshape(tensor.shape))
        at += _padded(size)
    return found


# As a dense file, around a save


@dataclass(frozen=True, slots=True, eq=False)
class DenseState:
    """What `dump_dense` wrote."""

    step: int
    optimizer: str | None
    """The name of its class; None where there are no weights."""
    weights: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    """Weight to what its optimizer keeps of it."""
    group_steps: Sequence[int | None]
    """Steps that each group of the optimizer has counted, where it counts."""
    schedule: ScheduleState | None = None
    """Where the schedule of the rates stands; None where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleState:
    """Where a schedule of learning rates stands."""

    kind: str
    """The name of its class."""
    state: Mapping[str, Any]
    rates: Mapping[int, float]
    """What it has made of the rate of each group."""


def dump_dense(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    step: int = 0,
    schedule: LRScheduler | None = None,
) -> bytes:
    """Return weights, their optimizer state and schedule as a dense file, with JSON in its metadata.

    Raises:
        SaveError: The optimizer or schedule keeps something that is neither number, text nor tensor.
    """
    tensors = {_WEIGHT + name: weight.detach() for name, weight in parameters.items()}
    about = {
        "version": _VERSION,
        "step": step,
        "optimizer": _name(optimizer),
        "state": {
            name: encode(dict(_kept(optimizer, weight)), f"{_STATE}{name}", tensors)
            for name, weight in parameters.items()
        },
        "group_steps": [] if optimizer is None else [_group_step(group) for group in optimizer.param_groups],
        "schedule": None,
    }
    if schedule is not None and optimizer is not None:
        about["schedule"] = {
            "kind": type(schedule).__name__,
            "state": encode(schedule.state_dict(), _SCHEDULE, tensors),
            "rates": list(rates_of(optimizer).items()),
        }
    return dump_tensors(tensors, {_METADATA: json.dumps(about)})


def read_dense(data: bytes) -> DenseState:
    """Return what `dump_dense` wrote.

    Raises:
        RestoreError: These bytes are something else.
    """
    try:
        tensors, metadata = load_tensors(data, "dense weights")
        about = json.loads(metadata[_METADATA])
        if about["version"] != _VERSION:
            raise ValueError(f"version {about['version']!r} is not {_VERSION}")
        return DenseState(
            step=int(about["step"]),
            optimizer=about["optimizer"],
            weights={
                name.removeprefix(_WEIGHT): tensor
                for name, tensor in tensors.items()
                if name.startswith(_WEIGHT)
            },
            state={name: decode(kept, tensors) for name, kept in about["state"].items()},
            group_steps=about["group_steps"],
            schedule=_read_schedule(about["schedule"], tensors),
        )
    except (RestoreError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise RestoreError(f"these {len(data)} bytes hold no dense weights: {cause}") from cause


def _read_schedule(about: Any, tensors: Mapping[str, Tensor]) -> ScheduleState | None:
    if about is None:
        return None
    rates = {int(number): float(rate) for number, rate in about["rates"]}
    return ScheduleState(about["kind"], decode(about["state"], tensors), rates)


def fill_dense(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    states: Collection[DenseState],
    schedule: LRScheduler | None = None,
) -> None:
    """Make weights, their optimizer and schedule what the states say, which together have each weight.

    The schedule is that of the first state: server 0 hears of every step, one without weights of none.

    Raises:
        RestoreError: A weight is missing, unknown or of another shape. Nothing has changed.
    """
    weights = {name: weight for state in states for name, weight in state.weights.items()}
    if odd := sorted(weights.keys() ^ parameters.keys()):
        side = "there is none here" if odd[0] in weights else "none came"
        raise RestoreError(
            f"cannot take over {len(weights)} dense weights: of {odd[0]!r} {side}. Both sides must run the "
            "same task, on the same number of servers."
        )
    for name, weight in parameters.items():
        if weights[name].shape != weight.shape or weights[name].dtype != weight.dtype:
            raise RestoreError(
                f"cannot take over the dense weight {name!r}: it came with {_kind(weights[name])}, and has "
                f"{_kind(weight)} here"
            )
    groups = [] if optimizer is None else optimizer.param_groups
    for state in states:
        if state.weights and state.optimizer != _name(optimizer):
            raise RestoreError(
                f"cannot take over the state of {state.optimizer}: the optimizer here is {_name(optimizer)}"
            )
        if state.weights and len(state.group_steps) != len(groups):
            raise RestoreError(
                f"cannot take over an optimizer of {len(state.group_steps)} groups of weights: there are "
                f"{len(groups)} here"
            )
    moved = next((state.schedule for state in states), None)
    there, here = None if moved is None else moved.kind, None if schedule is None else type(schedule).__name__
    if there != here:
        raise RestoreError(
            f"cannot take over a schedule of learning rates: it is {there} there, and {here} here. Both "
            "sides must run the same task."
        )
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(weights[name])
    if optimizer is None:
        return
    if moved is not None and schedule is not None:
        schedule.load_state_dict(dict(moved.state))
        set_rates(optimizer, moved.rates)
    for state in states:
        for name, kept in state.state.items():
            weight = parameters[name]
            optimizer.state.pop(weight, None)
            if kept:
                optimizer.state[weight] = {key: _placed(key, value, weight) for key, value in kept.items()}
    for number, group in enumerate(groups):
        steps = [state.group_steps[number] for state in states if state.group_steps]
        if "step" in group and (counted := [step for step in steps if step is not None]):
            group["step"] = max(counted)


def _name(optimizer: torch.optim.Optimizer | None) -> str | None:
    return None if optimizer is None else rule_of(optimizer).__name__


def _kept(optimizer: torch.optim.Optimizer | None, weight: Tensor) -> Mapping[str, Any]:
    kept: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(weight, {})
    return kept


def _placed(key: str, value: Any, weight: Tensor) -> Any:
    # Torch counts steps on the CPU, wherever the weight is.
    return value.to(weight.device) if isinstance(value, Tensor) and key != "step" else value


def _group_step(group: Mapping[str, Any]) -> int | None:
    step = group.get("step")
    return step if isinstance(step, int) else None


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _kind(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"
