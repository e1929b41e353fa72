"""Update rules: the arithmetic of the sparse optimizers, in numpy, one segment of one row at a time.

This is the reference: the compiled rules of `native/include/update_rules.h`, for the CPU and for GPUs, give
the same bits. A rule changes values and state in place. All arithmetic is float32 in the order written,
except where a rule says otherwise.

Lazy decay: a row of such an optimizer stores the step of its last update, and a table shows it decayed by all
steps since. `caught_up` does the same for rows that are read from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monolith.table.config import TableConfig
from monolith.table.optimizers import (
    Adadelta,
    Adagrad,
    Adam,
    Amsgrad,
    DynamicWdAdagrad,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    Momentum,
    MovingAverage,
    Optimizer,
    Rmsprop,
    RmspropV2,
    RowwiseAdagrad,
)
from monolith.table.table import Rows

MAX_GRADIENT = 1e15
"""A gradient with a float beyond this, or with a NaN, trains nothing: squares of usable gradients, and sums
of many squares, stay finite."""

Floats = NDArray[np.float32]
State = dict[str, NDArray[Any]]

_f = np.float32


def take_step(optimizer: Optimizer, w: Floats, state: Floats, g: Floats, *, rate: float, step: int) -> None:
    """Update the values `w` and `state` of one segment in place, by the rule under any decorators."""
    with np.errstate(all="ignore"):
        RULES[optimizer.rule.kind](
            optimizer.rule, w, state_views(optimizer, state, len(w)), g, _f(rate), step
        )


def state_views(optimizer: Optimizer, state: Floats, dim: int) -> State:
    """Return the named pieces of a segment's state, as views of it; a counter as one int64."""
    views: State = {}
    start = 0
    for field in optimizer.state_fields:
        piece = state[start : start + field.size(dim)]
        views[field.name] = piece.view(np.int64) if field.shape == "counter" else piece
        start += field.size(dim)
    return views


def kept_after(decay: float, steps: int) -> np.float32:
    """Return what is left of a value of 1 after `steps` steps that each take the share `decay` of it."""
    base, kept = 1.0 - float(_f(decay)), 1.0
    while steps > 0:
        kept *= base if steps & 1 else 1.0
        base *= base
        steps >>= 1
    return _f(kept)


def decayed(optimizer: Optimizer, w: Floats, state: Floats, *, rate: float, steps: int) -> Floats:
    """Return the values of a segment as they are after all steps, in most of which it may not have been.

    Args:
        rate: Of the newest step.
        steps: One more than the newest step.
    """
    seen = last_steps(state[None], len(w))[0]
    if seen == 0 or seen >= steps:
        return w
    after: Floats = np.multiply(w, kept_after(_decay(optimizer.rule, _f(rate)), steps - int(seen)))
    return after


def last_steps(states: Floats, dim: int) -> NDArray[np.int64]:
    """Return, of the state of a segment in many rows, the step after each row's last; 0 where it has none."""
    counters: NDArray[np.int64] = np.ascontiguousarray(states[:, dim : dim + 2]).view(np.int64)[:, 0]
    return counters


def _decay(rule: Any, rate: np.float32) -> float:
    """Return which share of a value a step takes off."""
    return float(_f(rate * _f(rule.weight_decay)))


def _sgd(_o: Optimizer, w: Floats, _s: State, g: Floats, lr: np.float32, _step: int) -> None:
    w -= lr * g


def _adagrad(
    o: Adagrad | DynamicWdAdagrad, w: Floats, s: State, g: Floats, lr: np.float32, _step: int
) -> None:
    g = g + _f(o.weight_decay) * w
    s["norm"] += g * g
    w -= _over(lr, np.sqrt(s["norm"])) * g


def _dynamic_wd_adagrad(
    o: DynamicWdAdagrad, w: Floats, s: State, g: Floats, lr: np.float32, step: int
) -> None:
    if o.lazy_decay:  # counts one more than the step: 0 is a row that has not had any
        seen = int(s["last_step"][0])
        s["norm"] += g * g
        w *= kept_after(_decay(o, lr), 1 if seen == 0 else step + 1 - seen)
        w -= _over(lr, np.sqrt(s["norm"])) * g
        s["last_step"][0] = max(seen, step + 1)
        return
    if o.decouple_weight_decay:
        s["norm"] += g * g
        w -= _over(lr, np.sqrt(s["norm"])) * g + lr * _f(o.weight_decay) * w
    else:
        _adagrad(o, w, s, g, lr, step)
    s["last_step"][0] = step


def _adadelta(o: Adadelta, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    rho, epsilon = _f(o.rho), _f(o.epsilon)
    g = g + _f(o.weight_decay) * w
    s["accum"][:] = rho * s["accum"] + (1 - rho) * g * g
    update = _over(np.sqrt(s["accum_update"] + epsilon), np.sqrt(s["accum"] + epsilon)) * g
    w -= lr * update
    s["accum_update"][:] = rho * s["accum_update"] + (1 - rho) * update * update


def _adam(o: Adam | Amsgrad, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    beta1, beta2 = _f(o.beta1), _f(o.beta2)
    alpha = lr * np.sqrt(1 - s["beta2_power"]) / (1 - s["beta1_power"])
    g = g + _f(o.weight_decay) * w
    s["m"] += (g - s["m"]) * (1 - beta1)
    s["v"] += (g * g - s["v"]) * (1 - beta2)
    square = s["v"]
    if "vhat" in s:
        np.maximum(s["vhat"], s["v"], out=s["vhat"])
        square = s["vhat"]
    mean = (1 - beta1) * g + beta1 * s["m"] if o.use_nesterov else s["m"]
    w -= _over(alpha * mean, np.sqrt(square) + _f(o.epsilon))
    s["beta1_power"] *= beta1
    s["beta2_power"] *= beta2


def _batch_softmax(_o: Optimizer, w: Floats, s: State, _g: Floats, lr: np.float32, step: int) -> None:
    w[:] = (1 - lr) * w + lr * _f(step - int(s["last_step"][0]))
    s["last_step"][0] = step


def _ftrl(o: Ftrl, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    if lr == 0:
        return
    _lead(w, s, g, lr)
    l1, z = _f(o.l1), s["zero"]
    shrunk = lr * (np.sign(z) * l1 - z)
    w[:] = np.where(np.abs(z) <= l1, 0, _over(shrunk, np.sqrt(s["norm"]) + _f(o.beta) + _f(o.l2) * lr))


def _group_ftrl(o: GroupFtrl, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    if lr == 0:
        return
    _lead(w, s, g, lr)
    l1, z = _f(o.l1), s["zero"]
    norm = _l2norm(z)
    if norm < l1 or norm == 0:
        w[:] = 0
    else:
        shrunk = lr * z * ((l1 - norm) / norm)
        w[:] = _over(shrunk, _f(o.beta) + np.sqrt(s["norm"]) + _f(o.l2) * lr)


def _lead(w: Floats, s: State, g: Floats, lr: np.float32) -> None:
    """Accumulate what both ftrl rules are the leader of."""
    norm = s["norm"] + g * g
    sigma = (np.sqrt(norm) - np.sqrt(s["norm"])) / lr
    s["zero"] += g - sigma * w
    s["norm"][:] = norm


def _group_adagrad(o: GroupAdagrad, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    g = g + _f(o.weight_decay) * w
    s["grad_square_sum"] += np.max(g * g)
    denominator = _f(o.beta) + np.sqrt(s["grad_square_sum"][0])
    if lr == 0 or denominator == 0:
        return
    rate = lr / denominator
    z = g - w / rate
    norm = _l2norm(z)
    l2 = _f(o.l2)
    w[:] = 0 if norm < l2 or norm == 0 else -rate * ((norm - l2) / norm) * z


def _rowwise_adagrad(o: RowwiseAdagrad, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    g = g + _f(o.weight_decay) * w
    s["norm"] += np.sum(g * g) / _f(len(g))
    w -= _over(lr, np.sqrt(s["norm"])) * g


def _momentum(o: Momentum, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    mu, n = _f(o.momentum), s["n"]
    velocity = mu * n - lr * (g + _f(o.weight_decay) * w)
    w += -mu * n + (1 + mu) * velocity if o.use_nesterov else velocity
    n[:] = velocity


def _moving_average(o: MovingAverage, w: Floats, _s: State, g: Floats, _lr: np.float32, _step: int) -> None:
    mu = _f(o.momentum)
    w[:] = mu * w + (1 - mu) * g


def _rmsprop(o: Rmsprop | RmspropV2, w: Floats, s: State, g: Floats, lr: np.float32, _step: int) -> None:
    decay, mu = float(_f(o.weight_decay)), float(_f(o.momentum))
    value = w.astype(np.float64)
    delta = g.astype(np.float64) + decay * value
    share = 1 - mu if isinstance(o, Rmsprop) else 1.0
    n = mu * s["n"].astype(np.float64) + share * delta * delta
    w[:] = value - float(lr) / (np.sqrt(n) + 1) * delta
    s["n"][:] = n


def _over(numerator: Any, denominator: Floats) -> Floats:
    """Divide, with 0 wherever the denominator is 0."""
    quotient = np.zeros(denominator.shape, np.float32)
    np.divide(numerator, denominator, out=quotient, where=denominator != 0)
    return quotient


def _l2norm(z: Floats) -> np.float32:
    return np.float32(np.sqrt(np.sum(z * z)))


RULES: dict[str, Callable[[Any, Floats, State, Floats, np.float32, int], None]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "dynamic_wd_adagrad": _dynamic_wd_adagrad,
    "adadelta": _adadelta,
    "adam": _adam,
    "amsgrad": _adam,
    "batch_softmax": _batch_softmax,
    "ftrl": _ftrl,
    "group_ftrl": _group_ftrl,
    "group_adagrad": _group_adagrad,
    "momentum": _momentum,
    "moving_average": _moving_average,
    "rmsprop": _rmsprop,
    "rmspropv2": _rmsprop,
    "rowwise_adagrad": _rowwise_adagrad,
}


def decays_lazily(config: TableConfig) -> bool:
    """Whether rows of a table decay by steps that they are not in."""
    return any(segment.optimizer.decays_lazily for segment in config.segments)


def caught_up(config: TableConfig, saved: Iterable[Rows]) -> Callable[[Rows], Floats]:
    """Return what gives the values of rows after the newest step.

    Args:
        saved: All rows, with the state of this table, to find that step.
    """
    pieces = [piece for piece in _pieces(config) if config.segments[piece[0]].optimizer.decays_lazily]
    newest = 0
    for rows in saved:
        newest = max(newest, newest_step(config, rows))

    def values_of(rows: Rows) -> Floats:
        values = np.array(rows.values.numpy(), dtype=np.float32)
        for number, columns, state in pieces:
            segment = config.segments[number]
            seen = last_steps(rows.state.numpy()[:, state], segment.dim)
            missed = np.where(seen == 0, 0, newest - seen)
            decay = np.float32(segment.decay_rate) * np.float32(segment.optimizer.rule.weight_decay)  # type: ignore[attr-defined]
            steps, which = np.unique(missed, return_inverse=True)
            kept = np.array([kept_after(float(decay), int(one)) for one in steps], dtype=np.float32)
            values[:, columns] *= kept[which][:, None]
        return values

    return values_of


def newest_step(config: TableConfig, rows: Rows) -> int:
    """Return the step after the last of any of these rows, 0 where none was in one."""
    newest = 0
    for number, _, state in _pieces(config):
        segment = config.segments[number]
        if segment.optimizer.decays_lazily:
            newest = max(newest, int(last_steps(rows.state.numpy()[:, state], segment.dim).max(initial=0)))
    return newest


def _pieces(config: TableConfig) -> Iterable[tuple[int, slice, slice]]:
    """Yield each segment's number, and the positions of its values and its state."""
    column = state = 0
    for number, segment in enumerate(config.segments):
        yield number, slice(column, column + segment.dim), slice(state, state + segment.state_dim)
        column, state = column + segment.dim, state + segment.state_dim
