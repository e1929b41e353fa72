"""Arguments of table calls: checked once, then seen as numpy arrays.

Every table takes torch tensors and works on plain memory. These functions convert: they share memory if
they can, copy a strided tensor, and raise before anything is changed if an argument does not fit. They run on
every call, so that the path of a correct call checks as little as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple, NoReturn, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.errors import RestoreError, ServingTableError, TableArgumentError
from monolith.table.config import ConstantRate, Segment, TableConfig
from monolith.table.table import Rows

MAX_EVENT_TIME = (1 << 32) - 1
"""Rows keep their event time in 32 unsigned bits."""

_INT64_MAX = (1 << 63) - 1
_UINT32_MAX = (1 << 32) - 1


@contextmanager
def core_errors() -> Iterator[None]:
    """Translate the errors of the core."""
    try:
        yield
    except ValueError as cause:
        raise TableArgumentError(str(cause)) from cause


def id_array(ids: Tensor, name: str = "ids") -> NDArray[np.int64]:
    """Return int64 ids of shape (n,)."""
    if not isinstance(ids, Tensor) or ids.dtype is not torch.int64 or ids.ndim != 1 or not ids.is_cpu:
        refuse(name, "int64 of shape (n,) on the CPU", ids)
    array: NDArray[np.int64] = (ids if ids.is_contiguous() else ids.contiguous()).numpy()
    return array


def float_array(values: Tensor, shape: tuple[int, ...], name: str) -> NDArray[np.float32]:
    """Return float32 values of exactly `shape`. The result may share memory: read only."""
    if (
        not isinstance(values, Tensor)
        or values.dtype is not torch.float32
        or values.shape != shape
        or not values.is_cpu
    ):
        refuse(name, f"float32 of shape {shape} on the CPU", values)
    if values.requires_grad:
        values = values.detach()
    array: NDArray[np.float32] = (values if values.is_contiguous() else values.contiguous()).numpy()
    return array


def out_array(out: Tensor | None, *shape: int) -> tuple[Tensor, NDArray[np.float32]]:
    """Return the tensor to answer with and the memory to fill: a new one, or `out`, never a copy of it."""
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    elif not isinstance(out, Tensor) or not out.is_contiguous() or out.requires_grad:
        refuse("out", f"float32, contiguous, without gradient, of shape {shape}", out)
    return out, float_array(out, shape, "out")


def event_time_array(event_time: int | Tensor, n: int) -> NDArray[np.int64]:
    """Return int64 event times: of shape (1,) when one holds for the batch, else of shape (n,)."""
    if isinstance(event_time, Tensor):
        times = id_array(event_time, "event_time")
        if len(times) != n:
            refuse("event_time", f"one number or int64 of shape ({n},)", event_time)
        # Negative times are huge as unsigned, so one comparison finds both ends.
        if n and int(times.view(np.uint64).max()) > MAX_EVENT_TIME:
            wrong = times[(times < 0) | (times > MAX_EVENT_TIME)]
            raise TableArgumentError(f"event_time: {wrong_second(int(wrong[0]))}")
        return times
    return np.array([event_second(event_time)], dtype=np.int64)


def event_second_array(event_time: int | Tensor, n: int) -> NDArray[np.uint32]:
    """Return event times as rows keep them, of the same shapes."""
    if isinstance(event_time, Tensor):
        return event_time_array(event_time, n).astype(np.uint32)
    return np.array([event_second(event_time)], dtype=np.uint32)


def event_second(time: int, name: str = "event_time") -> int:
    """Return one event time, within what a row can hold."""
    if not isinstance(time, int):
        raise TableArgumentError(f"{name} must be Unix seconds from 0 to {MAX_EVENT_TIME}, got {time!r}")
    if not is_second(time):
        raise TableArgumentError(f"{name}: {wrong_second(time)}")
    return time


def is_second(time: float) -> bool:
    """Whether a row can keep an event time."""
    return 0 <= time <= MAX_EVENT_TIME


def wrong_second(time: int) -> str:
    """Return what to say of an event time that is out of range."""
    what = f"must be Unix seconds from 0 to {MAX_EVENT_TIME}, got {time}"
    for unit, per_second in (("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)):
        if MAX_EVENT_TIME < time <= MAX_EVENT_TIME * per_second:
            moment = datetime.fromtimestamp(time // per_second, UTC)
            return f"{what}; {unit}? It would be {moment:%Y-%m-%d %H:%M} UTC. Divide by {per_second}"
    return what


class UpdateOptions(TypedDict, total=False):
    """The keyword arguments of `apply_gradients` and of fused calls; n is the number of ids."""

    step: int
    """The global step, for learning-rate schedules, batch_softmax and one_bit; 0 by default."""
    event_time: int | Tensor
    """Unix seconds of the event, one for the batch or int64 of shape (n,); 0 by default."""
    learning_rates: Tensor | None
    """float32, one per segment; by default each segment's own rate at `step`."""
    dedup: bool
    """False, the default, applies repeats one after another, in order. True sums the gradients of equal ids
    over the whole call and takes one step, with the latest of their event times."""
    latest_values: Tensor | None
    """float32, shaped as the gradients: the values they were computed on, for delay-compensated segments."""
    counts: Tensor | None
    """int64 of shape (n,): how many sightings each id counts for, for the admission filter, if equal ids were
    combined before the call; one each by default."""


class Update(NamedTuple):
    """The options of an `apply_gradients` call, with their defaults; see `UpdateOptions`."""

    step: int = 0
    event_time: int | Tensor = 0
    learning_rates: Tensor | None = None
    dedup: bool = False
    latest_values: Tensor | None = None
    counts: Tensor | None = None


def update_options(options: UpdateOptions) -> Update:
    """Return all options of a call, defaults included; one that does not exist is a TypeError."""
    return Update(**options)


def rate_array(learning_rates: Tensor | None, config: TableConfig, step: int) -> NDArray[np.float32]:
    """Return one float32 rate per segment: those given, or the config's at `step`."""
    if learning_rates is None:
        return np.array(config.learning_rates(step), dtype=np.float32)
    return float_array(learning_rates, (len(config.segments),), "learning_rates")


def fixed_rates(segments: Iterable[Segment]) -> NDArray[np.float32] | None:
    """Return one float32 rate per segment where no step changes any of them, else None."""
    rates = [segment.rate for segment in segments]
    if not all(isinstance(rate, ConstantRate) for rate in rates):
        return None
    return np.array([rate(0) for rate in rates], dtype=np.float32)


def latest_array(latest_values: Tensor | None, config: TableConfig, n: int) -> NDArray[np.float32] | None:
    """Return the values workers computed their gradients on, required by delay-compensated segments."""
    if latest_values is not None:
        return float_array(latest_values, (n, config.dim), "latest_values")
    if any(segment.optimizer.delay_compensation is not None for segment in config.segments):
        raise TableArgumentError(
            f"table {config.name!r}: latest_values is required, "
            "since a segment is delay-compensated; pass the values the gradients were computed on"
        )
    return None


def count_array(counts: Tensor | None, n: int) -> NDArray[np.uint32] | None:
    """Return how many sightings each id counts for; None if each counts once."""
    if counts is None:
        return None
    numbers = id_array(counts, "counts")
    if len(numbers) != n:
        refuse("counts", f"int64 of shape ({n},)", counts)
    if n and int(numbers.min()) < 1:
        raise TableArgumentError(f"counts must be 1 or more, got {int(numbers.min())}")
    return np.minimum(numbers, _UINT32_MAX).astype(np.uint32)


def check_step(step: int) -> None:
    """Refuse a global step that cannot be one."""
    if not isinstance(step, int) or not 0 <= step <= _INT64_MAX:
        raise TableArgumentError(f"step must be a whole number from 0 to 2^63 - 1, got {step!r}")


def check_trainable(config: TableConfig, call: str) -> None:
    """Refuse a call that needs an optimizer on a table that has none."""
    if config.serving:
        raise ServingTableError(
            f"table {config.name!r}: {call} needs optimizer state, and a serving table keeps none; "
            "send rows to it with assign or restore"
        )


def scan_range(cursor: int | None, limit: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Return the hashes [begin, end) that a scan has left; `end` may be 2^64."""
    if limit < 1:
        raise TableArgumentError(f"scan: limit must be at least 1, got {limit}")
    if not 0 <= shard < num_shards:
        raise TableArgumentError(f"scan: shard must be from 0 to num_shards - 1, got {shard} of {num_shards}")
    begin, end = (shard << 64) // num_shards, (shard + 1 << 64) // num_shards
    if cursor is None:
        return begin, end
    if not begin < cursor < end:
        raise TableArgumentError(
            f"scan: cursor {cursor} is not of shard {shard} of {num_shards}; "
            "pass the cursor of the same shard's previous scan, or None to start"
        )
    return cursor, end


def row_arrays(
    rows: Rows, config: TableConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32] | None]:
    """Return ids, event times, values and state of rows to restore.

    State is None if the row must start with fresh state: the rows carry none,
    or the table keeps none.
    """
    ids = id_array(rows.ids, "rows.ids")
    n = len(ids)
    times = event_time_array(rows.event_times, n)
    for name, tensor, widths in (
        ("values", rows.values, {config.dim}),
        ("state", rows.state, {0, config.state_dim}),
    ):
        ignored = name == "state" and config.serving
        if tensor.ndim == 2 and tensor.shape[1] not in widths and not ignored:
            raise RestoreError(
                f"cannot restore table {config.name!r}: the rows have {tensor.shape[1]} floats of {name}, "
                f"this table needs {max(widths)} ({config.dim} embedding + {config.state_dim} state). "
                "If the optimizer changed, restore without state."
            )
    values = float_array(rows.values, (n, config.dim), "rows.values")
    if config.serving or (rows.state.ndim == 2 and rows.state.shape[1] == 0):
        return ids, times, values, None
    return ids, times, values, float_array(rows.state, (n, config.state_dim), "rows.state")


def refuse(name: str, wanted: str, found: object) -> NoReturn:
    if isinstance(found, Tensor):
        seen = f"{str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)} on {found.device}"
        seen += "" if found.is_contiguous() else ", not contiguous"
        seen += ", requiring a gradient" if found.requires_grad else ""
    else:
        seen = type(found).__name__
    raise TableArgumentError(f"{name} must be {wanted}, got {seen}")
