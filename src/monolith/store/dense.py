"""Dense weights on parameter servers: which server owns a weight, the optimizer step, and the byte formats.

Every process builds the whole module, because that is what a task describes. Each weight has one server that
trains it; the copies on the other servers are never read. No weight is split, so an optimizer sees it whole.

    partition_weights   weight -> server, the same in every process
    DenseShard          the weights of one server, their optimizer and the count of steps
    pack_tensors        every step: the bytes of gradients and weights, one after another
    dump_dense          around a save: a dense file with weights, optimizer state and schedule
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from monolith import concurrency
from monolith.errors import FeatureError, RestoreError
from monolith.nn.optimizers import rule_of
from monolith.tensors.files import dump_tensors, load_tensors
from monolith.tensors.plain_state import decode, encode

_VERSION = 3
_METADATA = "monolith"
_ALIGNMENT = 8
_WEIGHT, _STATE, _SCHEDULE = "weight/", "state/", "schedule"


def partition_weights(parameters: Mapping[str, Tensor], num_servers: int) -> dict[str, int]:
    """Return the server of each weight, by name: the largest weight first, to the server with the least
    bytes.

    The result is the same in every process that builds the same module:

        partition_weights({"a": 8 bytes, "b": 4 bytes, "c": 4 bytes}, 2) == {"a": 0, "b": 1, "c": 1}
    """
    if num_servers < 1:
        raise FeatureError(f"cannot partition weights among {num_servers} servers; there must be at least 1")
    loads = [0] * num_servers
    servers: dict[str, int] = {}
    for name in sorted(parameters, key=lambda name: (-_size(parameters[name]), name)):
        servers[name] = loads.index(min(loads))
        loads[servers[name]] += _size(parameters[name])
    return {name: servers[name] for name in sorted(servers)}


def check_optimizer_covers(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise a FeatureError for a weight that the optimizer would never train."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for name, parameter in parameters.items() if id(parameter) not in held]:
        raise FeatureError(f"the optimizer does not hold {missing[0]!r}: it would never be trained")


def rates_of(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the learning rate of each parameter group whose rate is a number, by index."""
    rates = enumerate(group.get("lr") for group in optimizer.param_groups)
    return {number: float(rate) for number, rate in rates if isinstance(rate, (int, float, Tensor))}


def set_rates(optimizer: torch.optim.Optimizer, rates: Mapping[int, float]) -> None:
    """Set the learning rates of parameter groups to those that `rates_of` returned in another process.

    Raises:
        FeatureError: A group is missing, or its rate is not a number. Nothing has changed.
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


class DenseShard:
    """The weights that one server owns, and the count of steps. Thread-safe.

        shard = DenseShard(dict(model.named_parameters()), optimizer, shard=(0, 2))
        weights = shard.push({"bias": gradient})     # one optimizer step; the weights after it, as copies
        shard.step == 1

    Args:
        parameters: All weights of the module, by name. Only this shard may change the ones it owns.
        optimizer: Holds all of them; weights of other servers never have a gradient here. None if there are
            no weights.
        shard: (k, n) for server k of n. Server 0 counts the steps.
        schedule: Changes the optimizer's rates after each step. Every server with weights gets every push, so
            all schedules advance together.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        shard: tuple[int, int],
        schedule: LRScheduler | None = None,
    ) -> None:
        number, count = shard
        if optimizer is None and parameters:
            raise FeatureError("dense weights need an optimizer; give the one the task makes")
        if optimizer is not None:
            check_optimizer_covers(parameters, optimizer)
        servers = partition_weights(parameters, count)
        self._mine = {name: parameters[name] for name, server in servers.items() if server == number}
        self._optimizer = optimizer
        self._schedule = schedule
        self._shard = shard
        # Guards the weights, optimizer, schedule and _step: a push changes all of them as one.
        self._lock = concurrency.Lock()
        self._step = 0

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """The weights that this server owns, sorted by name."""
        return self._mine

    @property
    def step(self) -> int:
        """Pushes of all workers so far; only server 0 gets all of them."""
        with self._lock:
            return self._step

    @step.setter
    def step(self, value: int) -> None:
        if not isinstance(value, int) or value < 0:
            raise FeatureError(f"the global step must be a whole number from 0 on, got {value!r}")
        with self._lock:
            self._step = value

    def raise_step(self, least: int) -> None:
        """Count from `least` on, unless more steps were counted. Pushes at the same time are not lost."""
        with self._lock:
            self._step = max(self._step, least)

    def push(
        self, gradients: Mapping[str, Tensor], rates: Mapping[int, float] | None = None
    ) -> dict[str, Tensor]:
        """Take one optimizer step with these gradients, by name; return copies of all weights after it.

        Weights without a gradient do not change.

        Args:
            rates: New learning rates, by parameter group; the other groups keep theirs.

        Raises:
            FeatureError: A gradient belongs to no weight of this shard, or has another shape; or there is no
                such group. Nothing has changed.
        """
        for name, gradient in gradients.items():
            weight = self._mine.get(name)
            if weight is None:
                raise FeatureError(f"server {self._shard[0]} does not own the weight {name!r}")
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
        """Return copies of all weights of this shard."""
        with self._lock:
            return self._copies()

    def dump(self) -> bytes:
        """Return weights, their optimizer state and the step as a dense file with JSON in its metadata.

        Raises:
            SaveError: The optimizer's state has a value that is neither number, text nor tensor.
        """
        with self._lock:
            return dump_dense(self._mine, self._optimizer, self._step, self._schedule)

    def load(self, data: bytes) -> None:
        """Load the result of `dump`, from a shard of the same weights.

        Raises:
            RestoreError: It contains other weights. Nothing has changed.
        """
        state = read_dense(data)
        with self._lock:
            load_dense_states(self._mine, self._optimizer, [state], self._schedule)
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
    """Return packed tensors with the shapes and types of `like`, as views of `data`.

    Raises:
        FeatureError: `data` has another size.
    """
    expected = sum(_padded(_size(tensor)) for tensor in like)
    if len(data) != expected:
        raise FeatureError(f"{len(like)} dense tensors take {expected} bytes, got {len(data)}")
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
    """The content of a dense file, as `read_dense` returns it."""

    step: int
    optimizer: str | None
    """The name of its class; None if there are no weights."""
    weights: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    """The optimizer state of each weight."""
    group_steps: Sequence[int | None]
    """The step count of each parameter group, if it has one."""
    schedule: ScheduleState | None = None
    """The state of the learning rate schedule, if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleState:
    """The state of a learning rate schedule."""

    kind: str
    """The name of its class."""
    state: Mapping[str, Any]
    rates: Mapping[int, float]
    """The current rate of each parameter group."""


def dump_dense(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    step: int = 0,
    schedule: LRScheduler | None = None,
) -> bytes:
    """Return weights, their optimizer state and schedule as a dense file, with JSON in its metadata.

    Raises:
        SaveError: The state of the optimizer or schedule has a value that is neither number, text nor tensor.
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
    """Return the content of a dense file that `dump_dense` wrote.

    Raises:
        RestoreError: These bytes are no such file.
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


def load_dense_states(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    states: Collection[DenseState],
    schedule: LRScheduler | None = None,
) -> None:
    """Load states, which together have each weight once, into weights, optimizer and schedule.

    The schedule of the first state counts: server 0 gets every push, a server without weights gets none.

    Raises:
        RestoreError: A weight is missing, unknown or of another shape. Nothing has changed.
    """
    weights = {name: weight for state in states for name, weight in state.weights.items()}
    if odd := sorted(weights.keys() ^ parameters.keys()):
        side = "this model" if odd[0] in weights else "the saved state"
        raise RestoreError(
            f"cannot load {len(weights)} dense weights: {side} has no weight {odd[0]!r}. Both sides must run "
            "the same task, on the same number of servers."
        )
    for name, weight in parameters.items():
        if weights[name].shape != weight.shape or weights[name].dtype != weight.dtype:
            raise RestoreError(
                f"cannot load the dense weight {name!r}: the saved one has {_kind(weights[name])}, this one "
                f"has {_kind(weight)}"
            )
    groups = [] if optimizer is None else optimizer.param_groups
    for state in states:
        if state.weights and state.optimizer != _name(optimizer):
            raise RestoreError(
                f"cannot load the state of {state.optimizer}: the optimizer here is {_name(optimizer)}"
            )
        if state.weights and len(state.group_steps) != len(groups):
            raise RestoreError(
                f"cannot load an optimizer of {len(state.group_steps)} parameter groups: there are "
                f"{len(groups)} here"
            )
    moved = next((state.schedule for state in states), None)
    there, here = None if moved is None else moved.kind, None if schedule is None else type(schedule).__name__
    if there != here:
        raise RestoreError(
            f"cannot load a learning rate schedule: the saved one is {there}, this one {here}. Both sides "
            "must run the same task."
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
