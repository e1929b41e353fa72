"""Inputs: the arguments of calls to a table on a GPU, checked and copied to its device.

Tensors on the CPU are checked as every table checks them. Tensors on the table's own device are used as they
are, and only checked as far as that is possible without waiting for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from monolith.cuda.device import Device
from monolith.table import arguments
from monolith.table.arguments import MAX_EVENT_TIME
from monolith.table.config import TableConfig
from monolith.table.cuda.memory import BAD_TIMES, Times
from monolith.table.table import Rows


class Inputs:
    """Brings arguments to the device of a table.

    Args:
        counters: Where event times on the device that no row can keep are counted.
        device: The one of the counters.
    """

    def __init__(self, config: TableConfig, counters: Tensor, device: Device) -> None:
        self._config = config
        self._counters = counters
        self._owner = device
        self._device = device.torch_device

    def ids(self, ids: Tensor, name: str = "ids") -> Tensor:
        """Return int64 of shape (n,), contiguous."""
        if not self._is_here(ids):
            return torch.from_numpy(arguments.id_array(ids, name)).to(self._device, non_blocking=True)
        if ids.dtype is not torch.int64 or ids.ndim != 1:
            arguments.refuse(name, "int64 of shape (n,)", ids)
        return ids.contiguous()

    def floats(self, values: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
        """Return float32 of exactly this shape, contiguous."""
        if not self._is_here(values):
            array = arguments.float_array(values, shape, name)
            return torch.from_numpy(array).to(self._device, non_blocking=True)
        if values.dtype is not torch.float32 or values.shape != shape:
            arguments.refuse(name, f"float32 of shape {shape}", values)
        return values.detach().contiguous()

    def out(self, out: Tensor | None, ids: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the tensor to answer with, where the ids are, and the one on the device to write to."""
        here = self._is_here(ids)
        if out is None:
            answer = torch.empty(shape, dtype=torch.float32, device=self._device if here else "cpu")
        elif not here:
            answer, _ = arguments.out_array(out, *shape)
        else:
            contiguous = self._is_here(out) and out.is_contiguous() and not out.requires_grad
            if not contiguous or out.dtype is not torch.float32 or out.shape != shape:
                arguments.refuse("out", f"float32, contiguous, of shape {shape} on {self._device}", out)
            answer = out
        return answer, answer if here else torch.empty(shape, dtype=torch.float32, device=self._device)

    def times(self, event_time: int | Tensor, n: int) -> Times:
        """Return event times. Impossible ones on the device count as 0, and a later call raises."""
        if not isinstance(event_time, Tensor):
            return Times(None, arguments.event_second(event_time))
        if not self._is_here(event_time):
            seconds = arguments.event_second_array(event_time, n).view(np.int32)
            return Times(torch.from_numpy(seconds).to(self._device, non_blocking=True), 0)
        there = self._seconds_here(event_time, n)
        wrong = (there < 0) | (there > MAX_EVENT_TIME)
        self._counters[BAD_TIMES] += wrong.sum()
        return Times(there.masked_fill(wrong, 0).to(torch.int32), 0)

    def seconds(self, event_time: int | Tensor, n: int) -> int | Tensor:
        """Return event times, int64 if there are several; those on the device are not checked yet."""
        if not isinstance(event_time, Tensor):
            return arguments.event_second(event_time)
        if not self._is_here(event_time):
            seconds = arguments.event_time_array(event_time, n)
            return torch.from_numpy(seconds).to(self._device, non_blocking=True)
        return self._seconds_here(event_time, n)

    def counts(self, counts: Tensor | None, n: int) -> Tensor | None:
        """Return how many sightings each id counts for, int64 on the CPU."""
        if counts is None:
            return None
        given = arguments.count_array(counts.cpu() if self._is_here(counts) else counts, n)
        return None if given is None else torch.from_numpy(given.astype(np.int64))

    def latest(self, values: Tensor | None, n: int) -> Tensor | None:
        """Return the values that workers computed their gradients on, where a segment needs them."""
        if values is None:
            arguments.latest_array(None, self._config, n)
            return None
        return self.floats(values, (n, self._config.dim), "latest_values")

    def rows(self, rows: Rows) -> tuple[Tensor, Times, Tensor, Tensor | None]:
        """Return ids, event times, values and state of rows to restore; None for state that starts fresh."""
        on_cpu = Rows(rows.ids.cpu(), rows.event_times.cpu(), rows.values.cpu(), rows.state.cpu())
        ids, times, values, state = arguments.row_arrays(on_cpu, self._config)
        seconds = torch.from_numpy(times.astype(np.uint32).view(np.int32)).to(self._device)
        return (
            torch.from_numpy(ids).to(self._device),
            Times(seconds, 0),
            torch.from_numpy(values).to(self._device),
            None if state is None else torch.from_numpy(state).to(self._device),
        )

    def _seconds_here(self, event_time: Tensor, n: int) -> Tensor:
        if event_time.dtype is not torch.int64 or event_time.shape != (n,):
            arguments.refuse("event_time", f"one number or int64 of shape ({n},)", event_time)
        return event_time.contiguous()

    def _is_here(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and self._owner.holds(tensor)
