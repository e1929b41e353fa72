"""Rows in host memory for a model on a device: distinct rows are copied once, all else happens there.

The host finds the distinct ids of a batch and looks their rows up, straight into pinned memory. What the
device is told of the batch in addition is the number of each occurrence's id: with that it repeats rows as
ids occur and lays them out as if they had been looked up there. On the way back it adds up the gradients of
each row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monolith import native
from monolith.cuda import Device, Sent, Transfers
from monolith.errors import FeatureError
from monolith.feature.batches import FeatureIds
from monolith.feature.cuda.device_gathering import DeviceBatch, DeviceGatherer
from monolith.feature.cuda.repeating import Occurrences, Repeater
from monolith.feature.gathering import GatheredBatch, Gatherer
from monolith.feature.layouts import LayoutPlan, LayoutTensor


class HostRowGatherer:
    """All layouts of one model on a device, ready for batches whose rows are in host memory. Thread-safe.

    Args:
        workers: Threads that share large batches; see `Gatherer`.
    """

    distinct = True

    def __init__(self, plan: LayoutPlan, workers: native.Workers | None, device: Device) -> None:
        self.plan = plan
        self.device = device
        self.transfers = Transfers(device)
        self.there = DeviceGatherer(plan, device)
        self.repeater = Repeater(plan.table_dims, device)
        self._here = Gatherer(plan, workers)

    def read(self, batch: FeatureIds) -> HostRowBatch:
        """Find the distinct ids of a batch, and send the device where they occur.

        Raises:
            FeatureError: The splits do not fit the ids, or the number of examples.
        """
        found = self._here.read(batch)
        there = self.there.read(batch, in_place_of_ids=found.number, one_each=found.one_each)
        return HostRowBatch(self, found, there)


class HostRowBatch:
    """One batch: its distinct ids, whose rows the host looks up, and the way from them to the outputs."""

    distinct = True

    def __init__(self, gatherer: HostRowGatherer, found: GatheredBatch, there: DeviceBatch) -> None:
        self._gatherer = gatherer
        self._there = there
        self.newest = found.newest
        self._told = gatherer.device.current_stream().record()
        self._sent: Sent | None = None
        self.ids, self.sizes, self.counts = found.ids, found.sizes, found.counts
        self.batch_size, self.floats = found.batch_size, found.floats

    def send(self, fill: Callable[[Tensor], None]) -> None:
        """Send the rows to the device, on a stream of their own.

        Args:
            fill: Puts a row for each of `ids` into float32 of shape (floats,), in pinned memory.
        """
        repeater = self._gatherer.repeater
        staged = self._gatherer.transfers.stage(
            (self.floats, torch.float32), (repeater.part_bytes, torch.uint8)
        )
        rows, parts = staged.parts
        fill(rows)
        parts.numpy()[:] = repeater.parts(self.sizes.numpy(), self._there.sizes.numpy())
        self._sent = staged.send()

    def rows(self) -> Tensor:
        """Return the rows on the device, for use on the current stream, which waits for them."""
        assert self._sent is not None, "rows are sent first"
        stream = self._gatherer.device.current_stream()
        stream.wait_for_event(self._told)
        stream.keep(self._there.ids)
        return self._sent.take()[0]

    def outputs(self, rows: Tensor, scale: Callable[[], float] | None = None) -> tuple[Tensor, ...]:
        """Return the outputs in order of the plan, differentiable in `rows`.

        Args:
            rows: What `rows` returned, or as many floats on the device.
            scale: Asked in each backward pass by what to multiply the gradient of `rows`; None leaves it.
        """
        assert self._sent is not None, "rows are sent first"
        if rows.shape != (self.floats,) or rows.dtype is not torch.float32:
            raise FeatureError(
                f"rows must be float32 of shape ({self.floats},), got {rows.dtype} {tuple(rows.shape)}"
            )
        there = self._there
        occurrences = Occurrences(self._sent.tensors[1], there.ids, len(self.ids), there.floats)
        return there.outputs(self._gatherer.repeater.repeated(rows, occurrences), scale)

    def layouts(self, outputs: tuple[Tensor, ...]) -> dict[str, LayoutTensor | list[LayoutTensor]]:
        """Return outputs by layout: a tensor, or for NONE a list with one for each slice."""
        return self._there.layouts(outputs)
