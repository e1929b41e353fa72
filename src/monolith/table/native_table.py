"""NativeTable: the table of the compiled core.

Python checks the arguments and hands over borrowed arrays; hashing, memory,
locking and the optimizers are in `native/src`. Calls release the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.errors import TableArgumentError, TableClosedError
from monolith.table import arguments
from monolith.table.admission import AdmissionFilter, Refusals
from monolith.table.compressors import Compressor, FixedR8, OneBit
from monolith.table.config import Segment, TableConfig
from monolith.table.optimizers import Optimizer
from monolith.table.table import Rows, Scan, TableStats
from monolith.table.touched_keys import TouchedKeySet

_COMPRESSOR_KINDS = {
    "fp32": native.CompressorKind.FP32,
    "fp16": native.CompressorKind.FP16,
    "fixed_r8": native.CompressorKind.FIXED_R8,
    "one_bit": native.CompressorKind.ONE_BIT,
}
_CODINGS = {
    "float32": native.ValueCoding.FLOAT32,
    "bfloat16": native.ValueCoding.BFLOAT16,
    "float16": native.ValueCoding.FLOAT16,
    "int8": native.ValueCoding.INT8,
}
_LAST_HASH = (1 << 64) - 1


class NativeTable:
    """A `Table` in native memory. Thread-safe: readers take no lock, writers one per partition.

    Shapes: n ids of a call, dim floats of an embedding, state_dim floats of optimizer state. A row
    in memory is dim values, of 4 or 2 bytes, and state_dim floats; its event time is in the index.

    Args:
        admission: Asked about ids without a row before they are given one; None admits all.
        touched: Gets the ids whose rows change or are removed; see `touch`.
        workers: Threads that share large batches; None works on the calling thread alone.
            The outcome does not depend on how many there are.
        warns_of_refusals: False where another table has this one's rows, too, and warns itself.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Segment, Sgd, TableConfig
        >>> segment = Segment(dim=2, optimizer=Sgd(learning_rate=0.5))
        >>> table = NativeTable(TableConfig(name="item", segments=(segment,)))
        >>> ids = torch.tensor([7, 8])                                      # n = 2
        >>> table.assign(ids, torch.zeros(2, 2), event_time=1_700_000_000)  # dim = 2
        >>> table.apply_gradients(ids, torch.ones(2, 2), step=1)
        >>> mask, rows = table.lookup_rows(torch.tensor([7, 9]))
        >>> mask, rows.values
        (tensor([ True, False]), tensor([[-0.5000, -0.5000],
                [ 0.0000,  0.0000]]))
    """

    cold: None = None

    def __init__(
        self,
        config: TableConfig,
        *,
        admission: AdmissionFilter | None = None,
        touched: TouchedKeySet | None = None,
        workers: native.Workers | None = None,
        warns_of_refusals: bool = True,
    ) -> None:
        self._config = config
        # Settled once, because calls are made every step.
        self._dim = config.dim
        self._fixed_rates = arguments.fixed_rates(config.segments)
        self._delayed = any(s.optimizer.delay_compensation is not None for s in config.segments)
        self._refusals = Refusals(config) if warns_of_refusals else None
        expiry = config.expiry
        self._core: native.Table | None = native.Table(
            segments=[_segment_spec(segment) for segment in config.segments],
            serving=config.serving,
            coding=_CODINGS[config.embedding_dtype],
            round_by_chance=config.embedding_rounding == "stochastic",
            skip_zero=config.skip_zero,
            expire_when_full=config.when_full == "expire_oldest",
            seed=config.seed,
            initial_rows=config.initial_rows,
            capacity_bytes=config.capacity_bytes or 0,
            expire_seconds=int(expiry.default.total_seconds()),
            slot_expire_seconds=[(slot, int(ttl.total_seconds())) for slot, ttl in expiry.per_slot.items()],
            admission=None if admission is None else admission.core,
            touched=None if touched is None else touched.core,
            workers=workers,
        )

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def state_dim(self) -> int:
        return self._config.state_dim

    @property
    def core(self) -> native.Table:
        """The compiled table, for fused calls over many tables."""
        core = self._core
        if core is None:
            raise TableClosedError(f"table {self._config.name!r} was closed")
        return core

    @property
    def cuda(self) -> None:
        return None

    def __len__(self) -> int:
        return len(self.core)

    # Reading

    def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        core = self.core
        keys = arguments.id_array(ids)
        answer, values = arguments.out_array(out, len(keys), self._dim)
        core.lookup(keys, values)
        return answer

    def lookup_rows(self, ids: Tensor) -> tuple[Tensor, Rows]:
        core = self.core
        keys = arguments.id_array(ids)
        found = np.empty(len(keys), np.uint8)
        times = np.empty(len(keys), np.int64)
        values = np.empty((len(keys), self.dim), np.float32)
        state = np.empty((len(keys), self.state_dim), np.float32)
        core.lookup_rows(keys, found, times, values, state)
        columns = (keys.copy(), times, values, state)
        return _mask(found), Rows(*(torch.from_numpy(column) for column in columns))

    def contains(self, ids: Tensor) -> Tensor:
        core = self.core
        keys = arguments.id_array(ids)
        found = np.empty(len(keys), np.uint8)
        core.contains(keys, found)
        return _mask(found)

    # Writing

    def assign(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        core = self.core
        keys = arguments.id_array(ids)
        new = arguments.float_array(values, (len(keys), self.dim), "values")
        core.assign(keys, new, arguments.event_second_array(event_time, len(keys)))
        self.note_refusals()

    def assign_add(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        core = self.core
        keys = arguments.id_array(ids)
        added = arguments.float_array(values, (len(keys), self.dim), "values")
        core.assign_add(keys, added, arguments.event_second_array(event_time, len(keys)))
        self.note_refusals()

    def apply_gradients(
        self, ids: Tensor, gradients: Tensor, **options: Unpack[arguments.UpdateOptions]
    ) -> None:
        step, event_time, learning_rates, dedup, latest_values, counts = arguments.update_options(options)
        core = self.core
        arguments.check_trainable(self._config, "apply_gradients")
        arguments.check_step(step)
        keys = arguments.id_array(ids)
        rates = self._fixed_rates
        if rates is None or learning_rates is not None:
            rates = arguments.rate_array(learning_rates, self._config, step)
        latest = None
        if self._delayed or latest_values is not None:
            latest = arguments.latest_array(latest_values, self._config, len(keys))
        core.apply_gradients(
            keys,
            arguments.float_array(gradients, (len(keys), self._dim), "gradients"),
            rates,
            step,
            arguments.event_second_array(event_time, len(keys)),
            dedup,
            latest,
            arguments.count_array(counts, len(keys)),
        )
        self.note_refusals()

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows; -1 for an id that had no row and found no room for one."""
        core = self.core
        arguments.check_trainable(self._config, "reinitialize")
        keys = arguments.id_array(ids)
        status = np.empty(len(keys), np.int8)
        core.reinitialize(keys, arguments.event_second(now, "now"), status)
        self.note_refusals()
        return torch.from_numpy(status)

    def note_refusals(self) -> None:
        """Warn if the core has refused ids: after every write, also one that went past this table."""
        core = self._core
        if self._refusals is not None and core is not None and (refused := core.refused):
            self._refusals.note(refused, core.__len__)

    def remove(self, ids: Tensor) -> int:
        return self.core.remove(arguments.id_array(ids))

    def count_expired(self, now: int) -> int:
        return self.core.count_expired(now)

    def evict(self, now: int | None = None) -> int:
        core = self.core
        return core.evict(core.max_event_time if now is None else now)

    # Whole tables

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows in the order of their hashes: a shard is a range of hashes, a cursor the next one."""
        core = self.core
        begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
        *columns, following = core.scan(begin, min(end - 1, _LAST_HASH), limit)
        return Scan(Rows(*(torch.from_numpy(column) for column in columns)), following)

    def restore(self, rows: Rows) -> None:
        core = self.core
        keys, times, values, state = arguments.row_arrays(rows, self._config)
        core.restore(keys, times.astype(np.uint32), values, state, None)

    def clear(self, *, expect_rows: int = 0) -> None:
        core = self.core
        with arguments.core_errors():
            core.clear(expect_rows)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Pause writers while the block runs; readers continue.

        A call in the block that writes to this table would wait for the block to end: do not.
        """
        core = self.core
        core.freeze()
        try:
            yield
        finally:
            core.thaw()

    def snapshot(self) -> NativeTableSnapshot:
        """Open a snapshot; waits for the writes in progress, not longer."""
        return NativeTableSnapshot(self)

    def track_changes(self, on: bool = True) -> None:
        self.core.track_changes(on)

    def touch(self, touched: TouchedKeySet) -> None:
        self.core.touch(touched.core)

    def untouch(self, touched: TouchedKeySet) -> None:
        self.core.untouch(touched.core)

    def digests(self, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
        keys = arguments.id_array(buckets, "buckets")
        sums = np.empty(len(keys), np.uint64)
        with arguments.core_errors():
            self.core.digests(keys, *share, sums)
        return torch.from_numpy(sums.view(np.int64))

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""
        return self.core.scales

    def set_scales(self, scales: list[float]) -> None:
        if len(scales) != len(self._config.segments):
            raise TableArgumentError(
                f"table {self._config.name!r}: needs {len(self._config.segments)} scales, got {len(scales)}"
            )
        self.core.scales = scales

    def stats(self) -> TableStats:
        found = self.core.stats()
        return TableStats(
            rows=found.rows,
            bytes_total=found.bytes_total,
            bytes_rows=found.bytes_rows,
            bytes_index=found.bytes_index,
            load=found.rows / found.slots,
            inserted=found.inserted,
            filtered=found.filtered,
            refused=found.refused,
            evicted=found.evicted,
            removed=found.removed,
            max_event_time=found.max_event_time,
            non_finite=found.non_finite,
        )

    def close(self) -> None:
        self._core = None  # calls still running hold on to it; the last one frees it


class NativeTableSnapshot:
    """A `TableSnapshot` in the core. It keeps the core of its table alive."""

    cold: None = None

    def __init__(self, table: NativeTable) -> None:
        self._config = table.config
        with arguments.core_errors():
            self._core = native.TableSnapshot(table.core)

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def scales(self) -> list[float]:
        return list(self._core.scales)

    @property
    def max_event_time(self) -> int:
        return self._core.max_event_time

    @property
    def captured_bytes(self) -> int:
        return self._core.captured_bytes

    @property
    def tracked(self) -> bool:
        return self._core.tracked

    @property
    def cleared(self) -> bool:
        return self._core.cleared

    def __len__(self) -> int:
        return self._core.rows

    def removed(self) -> Tensor:
        return torch.from_numpy(self._core.removed())

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
        with arguments.core_errors():
            *columns, following = self._core.scan(begin, min(end - 1, _LAST_HASH), limit, changed_only)
        return Scan(Rows(*(torch.from_numpy(column) for column in columns)), following)

    def close(self, *, saved: bool) -> None:
        self._core.close(saved)


def _mask(found: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(found.view(np.bool_))


def _segment_spec(segment: Segment) -> native.SegmentSpec:
    optimizer = _optimizer_spec(segment.optimizer)
    if segment.optimizer.decays_lazily:
        optimizer.decay_rate = segment.decay_rate
    bounds = segment.initializer.bounds
    return native.SegmentSpec(segment.dim, optimizer, bounds, _compressor_spec(segment.compressor))


def _optimizer_spec(optimizer: Optimizer) -> native.OptimizerSpec:
    rule = optimizer.rule
    spec = native.OptimizerSpec(rule.kind)
    for field in fields(rule):
        if hasattr(spec, field.name):
            setattr(spec, field.name, getattr(rule, field.name))
    spec.stochastic_rounding = optimizer.stochastic_rounding
    if optimizer.delay_compensation is not None:
        spec.delay_compensated = True
        spec.delay_compensation = optimizer.delay_compensation
    return spec


def _compressor_spec(compressor: Compressor) -> native.CompressorSpec:
    spec = native.CompressorSpec(_COMPRESSOR_KINDS[compressor.kind])
    if isinstance(compressor, FixedR8):
        spec.range = compressor.range
    if isinstance(compressor, OneBit):
        spec.step_size = compressor.step_size
        spec.init_scale = compressor.init_scale
        spec.max_scale = compressor.max_scale
        spec.amplitude = compressor.amplitude
    return spec
