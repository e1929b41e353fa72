"""DeviceFilter: an admission filter whose counts are in the memory of a GPU.

Which ids of a batch get rows depends on what the batches before it have counted, and a batch that is not
finite counts nothing. In a replayed step only the device knows that before the next step begins, so it asks
the filter itself (`admission.cu`): no step waits for ids without rows to come to the host, or for answers to
return. The filter in host memory is what is saved and restored: its counts come back to be looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.cuda.device import Device
from monolith.cuda.kernels import Kernels
from monolith.table.admission import AdmissionFilter, MovableFilter, ProbabilisticFilter, SlidingFilter
from monolith.table.cuda.layout import admission_kernels
from monolith.table.hashing import MAX_SLOTS, mix_one

THREADS = 512
"""Of the block that asks a filter."""

_INTS, _SUMS = 10, 2  # of memory to work in, for each id: as in admission.cu
_HEAD, _ADVANCES, _FAILURES, _ELEMENTS = range(4)  # as in admission.cu
_WORDS = 10


class _Filter(ctypes.Structure):
    """struct Filter in admission.cu."""

    _fields_ = [("words", ctypes.c_uint64 * _WORDS)]


class DeviceFilter:
    """The counts of one filter, on a device. Calls follow one another, on whatever streams they come.

    Args:
        home: The filter in host memory. It has the counts until now, and again after each `fetch`.

    Raises:
        torch.OutOfMemoryError: The device has no room for the counts.
    """

    def __init__(
        self, home: SlidingFilter | ProbabilisticFilter, core: native.Admission, device: Device
    ) -> None:
        self.device = device
        self.kernels: Kernels = admission_kernels().on(device)
        self._core = core
        where = device.torch_device
        with device.active():
            self._stream = device.current_stream()
            slots = home.thresholds.per_slot
            self._by_slot = None
            if slots:
                each = np.full(MAX_SLOTS, home.thresholds.default, np.uint32)
                each[list(slots)] = list(slots.values())
                self._by_slot = torch.from_numpy(each.view(np.int32)).to(where)
            self._cells = None
            blocks = stride = total = capacity = 0
            if isinstance(core, native.SlidingFilter):
                blocks, stride, total = core.split_num, core.cells_per_split, core.split_meta(0).total_size
                capacity = core.capacity_per_split
                self._cells = torch.zeros((blocks, stride), dtype=torch.int16, device=where)
            self._meta = torch.zeros(_ELEMENTS + blocks, dtype=torch.int64, device=where)
        by_chance = home if isinstance(home, ProbabilisticFilter) else None
        self.words = [
            0 if self._cells is None else self._cells.data_ptr(),
            self._meta.data_ptr(),
            0 if self._by_slot is None else self._by_slot.data_ptr(),
            home.thresholds.default,
            blocks,
            stride,
            total,
            capacity,
            0 if by_chance is None else mix_one(by_chance.seed + 1),
            0 if by_chance is None else by_chance.equal,
        ]
        """The fields of struct Filter."""
        self._struct = _Filter((ctypes.c_uint64 * _WORDS)(*self.words))
        self.send()

    def enter(self) -> None:
        """Put what follows on the current stream behind all that was done before."""
        stream = self.device.current_stream()
        if stream != self._stream:
            stream.wait_for(self._stream)
            self._stream = stream

    def ask(
        self,
        index: tuple[Tensor, int],
        counters: Tensor,
        ids: Tensor,
        *,
        skip: Tensor | None,
        counts: Tensor | None,
        together: bool,
    ) -> Tensor:
        """Return `skip` with the ids that must wait marked as TURNED_AWAY; see `ask_filter`.

        Args:
            index: The keys of the table's memory, and the number of their buckets.
        """
        self.enter()
        out = torch.empty(len(ids), dtype=torch.uint8, device=self.device.torch_device)
        given = *index, counters, ids, len(ids), skip, counts, together
        work = memory_to_ask(len(ids), self.device)
        self.kernels.launch(
            "ask_filter",
            min(1, len(ids)),
            self._struct,
            *given,
            *work,
            out,
            stream=self._stream.handle,
            threads=THREADS,
        )
        return out

    def fetch(self) -> None:
        """Bring the filter in host memory up to date; waits for the device."""
        with self.device.active():
            self.enter()
            meta: list[int] = self._meta.tolist()
            core = self._core
            if isinstance(core, native.ProbabilisticFilter):
                core.draws = meta[0]
                return
            assert isinstance(core, native.SlidingFilter)
            assert self._cells is not None
            before, splits = core.meta(), core.split_num
            # Blocks that were wiped since then have no failures any more.
            wiped = {(before.head + 2 + n) % splits for n in range(meta[_ADVANCES] - before.head_increment)}
            failures = [0 if n in wiped else core.split_meta(n).failure_count for n in range(splits)]
            core.restore(_meta_with(before, meta))
            for split in range(splits):
                core.restore_split(split, _split_with(core.split_meta(split), failures[split]))
                if meta[_ELEMENTS + split]:
                    core.write_cells(split, 0, self._cells[split].cpu().numpy().view(np.uint16))

    def send(self) -> None:
        """Take the counts of the filter in host memory."""
        with self.device.active():
            self.enter()
            core = self._core
            if isinstance(core, native.ProbabilisticFilter):
                self._meta[0] = core.draws
                return
            assert isinstance(core, native.SlidingFilter)
            assert self._cells is not None
            now = core.meta()
            in_use: list[int] = self._meta[_ELEMENTS:].tolist()
            meta = [now.head, now.head_increment, now.failure_count]
            for split in range(core.split_num):
                used = 0
                if in_use[split]:
                    self._cells[split].zero_()
                if core.split_meta(split).num_elements:
                    cells = core.read_cells(split)
                    used = int(np.count_nonzero(cells))
                    self._cells[split].copy_(torch.from_numpy(cells.view(np.int16)))
                meta.append(used)
            self._meta.copy_(torch.tensor(meta))


def device_filter(admission: AdmissionFilter | None, device: Device) -> DeviceFilter | None:
    """Return an admission filter as a device asks it, and have it count there from now on.

    Returns:
        None if it must stay in host memory: something else counts in it there, it is none of ours, or the
        device has no room for it.
    """
    if not isinstance(admission, MovableFilter):
        return None
    if admission.away is None and not admission.lent:
        with suppress(torch.OutOfMemoryError):
            admission.away = DeviceFilter(admission, admission._core, device)
    away = admission.away
    return away if isinstance(away, DeviceFilter) and away.device == device else None


def memory_to_ask(ids: int, device: Device) -> tuple[Tensor, Tensor]:
    """Return memory that kernels need to ask filters about so many ids."""
    where = device.torch_device
    return (
        torch.empty(_INTS * ids, dtype=torch.int32, device=where),
        torch.empty(_SUMS * ids, dtype=torch.int64, device=where),
    )


def filter_structs(filters: Sequence[DeviceFilter | None], device: Device) -> Tensor:
    """Return the structs of filters on a device, zeros for None."""
    words = [[0] * _WORDS if one is None else one.words for one in filters]
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64)).to(device.torch_device)


def _meta_with(before: native.SlidingFilterMeta, meta: list[int]) -> native.SlidingFilterMeta:
    return native.SlidingFilterMeta(
        split_num=before.split_num,
        max_forward_step=before.max_forward_step,
        max_backward_step=before.max_backward_step,
        max_step=before.max_step,
        head=meta[_HEAD],
        head_increment=meta[_ADVANCES],
        failure_count=meta[_FAILURES],
    )


def _split_with(before: native.FilterSplitMeta, failures: int) -> native.FilterSplitMeta:
    return native.FilterSplitMeta(
        failure_count=failures,
        total_size=before.total_size,
        num_elements=before.num_elements,
        fill_rate=before.fill_rate,
    )
