"""DictTable: the simplest table, which defines what the other implementations must do.

One Python dict, one lock, one row at a time. It is the reference in tests and
the fallback without a compiled core; it is not meant to be fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency
from monolith.errors import TableArgumentError, TableClosedError
from monolith.table import arguments
from monolith.table.admission import AdmissionFilter, Refusals
from monolith.table.compressors import round_by_chance, round_to_half, round_to_nearest
from monolith.table.config import Segment, TableConfig
from monolith.table.digests import digest_rows
from monolith.table.hashing import draws, mix, mix_one
from monolith.table.table import Rows, Scan, TableStats
from monolith.table.touched_keys import TouchedKeySet
from monolith.table.update_rules import MAX_GRADIENT, decayed, last_steps, state_views, take_step

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_ROW_OVERHEAD_BYTES = 24


@dataclass(slots=True)
class _Row:
    values: NDArray[np.float32]
    state: NDArray[np.float32]
    event_time: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """The position of a segment in a row."""

    segment: Segment
    columns: range
    values: slice
    state: slice


@dataclass(slots=True)
class _Counts:
    inserted: int = 0
    filtered: int = 0
    refused: int = 0
    evicted: int = 0
    removed: int = 0
    non_finite: int = 0
    max_event_time: int = 0


@dataclass(frozen=True, slots=True)
class _Updates:
    """Gradients to apply, in order, each worth `counts` sightings of its id."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    event_times: NDArray[np.int64]
    gradients: NDArray[np.float32]
    latest: NDArray[np.float32] | None

    def summed(self) -> _Updates:
        """Return one update per id, in order of first sight, with the sum of its gradients.

        Of the event times the latest counts, of the latest values the first.
        """
        _, first, inverse = np.unique(self.ids, return_index=True, return_inverse=True)
        order = np.argsort(first)
        position = np.argsort(order)[inverse]
        gradients = np.zeros((len(first), self.gradients.shape[1]), np.float32)
        np.add.at(gradients, position, self.gradients)
        counts = np.zeros(len(first), np.int64)
        np.add.at(counts, position, self.counts)
        times = np.zeros(len(first), np.int64)
        np.maximum.at(times, position, self.event_times)
        first = first[order]
        latest = None if self.latest is None else self.latest[first]
        return _Updates(self.ids[first], counts, times, gradients, latest)


class DictTable:
    """A `Table` on a Python dict: the plain implementation that all other tables are compared with.

    Shapes: n ids of a call, dim floats of an embedding; ids are int64 of shape (n,), embeddings float32 of
    shape (n, dim). Thread-safe: one call at a time.

    Args:
        admission: Asked about ids without a row before they are given one; None admits all.
        touched: A set that gets the ids whose rows changed or were removed; see `touch`.

    The memory of a row is taken to be its floats and 24 bytes; `capacity_bytes` is checked by that measure.

    Examples:
        >>> import torch
        >>> from monolith import DictTable, Segment, TableConfig
        >>> table = DictTable(TableConfig(name="item", segments=(Segment(dim=2),)))
        >>> table.assign(torch.tensor([7]), torch.tensor([[1.0, 2.0]]))
        >>> table.lookup(torch.tensor([7, 8]))  # ID 8 has no row
        tensor([[1., 2.],
                [0., 0.]])
    """

    cold: None = None

    def __init__(
        self,
        config: TableConfig,
        *,
        admission: AdmissionFilter | None = None,
        touched: TouchedKeySet | None = None,
    ) -> None:
        self._config = config
        self._admission = admission
        self._touched = [] if touched is None else [touched]
        self._pieces = list(_pieces(config))
        self._dims = [segment.dim for segment in config.segments]
        self._fresh_state = np.concatenate(
            [np.empty(0, np.float32)]
            + [p.segment.optimizer.initial_state(p.segment.dim) for p in self._pieces if not config.serving]
        )
        self._row_bytes = _ROW_OVERHEAD_BYTES + config.embedding_bytes + 4 * config.state_dim
        self._lock = concurrency.Lock()
        self._thawed = concurrency.Condition(self._lock)
        # All below is guarded by the lock.
        self._frozen = 0
        self._rows: dict[int, _Row] = {}
        self._scales = [p.segment.compressor.initial_scale for p in self._pieces]
        self._decay_rates = [p.segment.decay_rate for p in self._pieces]
        self._steps = 0  # one more than the newest step
        self._counts = _Counts()
        self._refusals = Refusals(config)
        self._snapshot: DictTableSnapshot | None = None
        self._saved: dict[int, _Row] | None = None  # as of the last snapshot; None tracks nothing
        self._closed = False

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def dim(self) -> int:
        return self._config.dim

    @property
    def state_dim(self) -> int:
        return self._config.state_dim

    @property
    def cuda(self) -> None:
        return None

    def __len__(self) -> int:
        with self._open():
            return len(self._rows)

    # Reading

    def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        with self._open():
            keys = arguments.id_array(ids)
            answer, values = arguments.out_array(out, len(keys), self.dim)
            values[:] = self._gather(keys).values.numpy()
            if not self._config.serving:
                self._decay(keys, values)
                for piece, scale in zip(self._pieces, self._scales, strict=True):
                    values[:, piece.values] = piece.segment.compressor.fake_quant(
                        values[:, piece.values], scale
                    )
            return answer

    def _decay(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Decay the rows read by the steps that each was not in, if the table decays lazily."""
        for piece, rate in zip(self._pieces, self._decay_rates, strict=True):
            optimizer = piece.segment.optimizer
            for position, key in enumerate(keys.tolist() if optimizer.decays_lazily else ()):
                if (row := self._rows.get(key)) is not None:
                    stored, state = row.values[piece.values], row.state[piece.state]
                    values[position, piece.values] = decayed(
                        optimizer, stored, state, rate=rate, steps=self._steps
                    )

    def _catch_up(self, row: _Row) -> None:
        """Decay a row that is about to be written by the steps that it was not in."""
        for piece, rate in zip(self._pieces, self._decay_rates, strict=True):
            optimizer = piece.segment.optimizer
            if optimizer.decays_lazily and not self._config.serving:
                values, state = row.values[piece.values], row.state[piece.state]
                values[:] = self._as_stored(decayed(optimizer, values, state, rate=rate, steps=self._steps))
                seen = state_views(optimizer, state, len(values))["last_step"]
                seen[0] = self._steps if 0 < seen[0] < self._steps else seen[0]

    def lookup_rows(self, ids: Tensor) -> tuple[Tensor, Rows]:
        with self._open():
            keys = arguments.id_array(ids)
            return torch.from_numpy(self._found(keys)), self._gather(keys)

    def contains(self, ids: Tensor) -> Tensor:
        with self._open():
            return torch.from_numpy(self._found(arguments.id_array(ids)))

    # Writing

    def assign(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._writing():
            keys, new, times = self._write_arguments(ids, values, event_time)
            for key, value, time in zip(keys.tolist(), new, times.tolist(), strict=True):
                if self._leaves_no_row(value):
                    self._counts.removed += self._drop(key)
                elif row := self._row_for(key, time):
                    self._catch_up(row)
                    row.values[:] = self._as_stored(value)
                    row.event_time = max(row.event_time, time)
            self._touch(keys[self._found(keys)])

    def assign_add(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._writing():
            keys, added, times = self._write_arguments(ids, values, event_time)
            for key, value, time in zip(keys.tolist(), added, times.tolist(), strict=True):
                if row := self._row_for(key, time):
                    self._catch_up(row)
                    row.values[:] = self._as_stored(row.values + value)
                    row.event_time = max(row.event_time, time)
            self._touch(keys[self._found(keys)])

    def apply_gradients(
        self, ids: Tensor, gradients: Tensor, **options: Unpack[arguments.UpdateOptions]
    ) -> None:
        step, event_time, learning_rates, dedup, latest_values, counts = arguments.update_options(options)
        with self._writing():
            arguments.check_trainable(self._config, "apply_gradients")
            arguments.check_step(step)
            rates = arguments.rate_array(learning_rates, self._config, step).tolist()
            keys = arguments.id_array(ids)
            latest = arguments.latest_array(latest_values, self._config, len(keys))
            given = arguments.float_array(gradients, (len(keys), self.dim), "gradients")
            usable = (np.abs(given) <= MAX_GRADIENT).all(1)
            if not usable.all():
                self._counts.non_finite += int((~usable).sum())
                kept = torch.from_numpy(usable)
                ids, gradients, counts = ids[kept], gradients[kept], None if counts is None else counts[kept]
                latest = None if latest is None else latest[usable]
                event_time = event_time[kept] if isinstance(event_time, Tensor) else event_time
            keys, grads, times = self._write_arguments(ids, gradients, event_time, "gradients")
            met = arguments.count_array(counts, len(keys))
            seen = np.ones_like(keys) if met is None else met.astype(np.int64)
            updates = _Updates(keys, seen, times, grads, latest)
            self._apply(updates.summed() if dedup else updates, rates, step)

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows; -1 for an id without a row if there is no memory for one."""
        with self._writing():
            arguments.check_trainable(self._config, "reinitialize")
            keys = arguments.id_array(ids)
            arguments.event_second(now, "now")
            if len(keys):
                self._counts.max_event_time = max(self._counts.max_event_time, now)
            existed = np.empty(len(keys), np.int8)
            for position, key in enumerate(keys.tolist()):
                existed[position] = key in self._rows
                row = self._row_for(key, now, ask=False)
                if row is None:
                    existed[position] = -1
                else:
                    self._rows[key] = self._new_row(key, now)
            self._touch(keys[existed >= 0])
            return torch.from_numpy(existed)

    def remove(self, ids: Tensor) -> int:
        with self._writing():
            keys = arguments.id_array(ids).tolist()
            removed = sum(self._drop(key) for key in keys)
            self._counts.removed += removed
            return removed

    def count_expired(self, now: int) -> int:
        with self._open():
            return len(self._expired(now))

    def evict(self, now: int | None = None) -> int:
        with self._writing():
            expired = self._expired(self._counts.max_event_time if now is None else now)
            for key in expired:
                self._drop(key)
            self._counts.evicted += len(expired)
            return len(expired)

    # Whole tables

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows in the order of their hashes: a shard is a range of hashes, a cursor the next one."""
        with self._open():
            start, end = arguments.scan_range(cursor, limit, shard, num_shards)
            keys, following = _chunk_of(self._rows, start, end, limit)
            return Scan(self._gather(keys), following)

    def restore(self, rows: Rows) -> None:
        with self._writing():
            keys, times, values, state = arguments.row_arrays(rows, self._config)
            if len(keys):
                self._counts.max_event_time = max(self._counts.max_event_time, int(times.max()))
                self._note_steps(state)
            for position, (key, time) in enumerate(zip(keys.tolist(), times.tolist(), strict=True)):
                if self._leaves_no_row(values[position]):
                    self._counts.removed += self._drop(key)
                elif row := self._row_for(key, time, ask=False):
                    row.values[:] = self._as_stored(values[position])
                    row.state[:] = self._fresh_state if state is None else state[position]
                    row.event_time = time
            self._touch(keys[self._found(keys)])

    def clear(self, *, expect_rows: int = 0) -> None:  # noqa: ARG002
        with self._writing():
            if self._snapshot is not None:
                raise TableArgumentError("clear: a snapshot of this table is open; close it first")
            gone = np.fromiter(self._rows, np.int64, len(self._rows))
            self._rows.clear()
            self._touch(gone)
            self._counts.max_event_time = self._steps = 0

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Pause writers while the block runs; readers continue. Nests."""
        with self._open():
            self._frozen += 1
        try:
            yield
        finally:
            with self._lock:
                self._frozen -= 1
                self._thawed.notify_all()

    def snapshot(self) -> DictTableSnapshot:
        """Copy all rows. A frozen table can be snapshotted."""
        with self._open():
            if self._snapshot is not None:
                raise TableArgumentError("table: a snapshot is open already; close it first")
            rows = self._copied()
            self._snapshot = DictTableSnapshot(
                self, rows, self._saved, list(self._scales), self._counts.max_event_time
            )
            return self._snapshot

    def track_changes(self, on: bool = True) -> None:
        with self._open():
            rows = self._copied()
            self._saved = rows if on else None

    def end_snapshot(self, rows: dict[int, _Row] | None) -> None:
        """Close the open snapshot, whose rows are given if they are saved. Called by the snapshot."""
        with self._lock:
            self._snapshot = None
            if self._saved is not None and rows is not None:
                self._saved = rows

    def touch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._touched.append(touched)

    def untouch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._touched = [other for other in self._touched if other is not touched]

    def digests(self, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
        with self._open():
            keys = np.fromiter(self._rows, np.int64, len(self._rows))
            rows = self._gather(keys)
        return digest_rows(rows.ids, rows.values, buckets, share=share)

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""
        with self._open():
            return list(self._scales)

    def set_scales(self, scales: list[float]) -> None:
        with self._open():
            if len(scales) != len(self._pieces):
                raise TableArgumentError(
                    f"table {self._config.name!r}: needs {len(self._pieces)} scales, got {len(scales)}"
                )
            self._scales = list(scales)

    def stats(self) -> TableStats:
        with self._open():
            counts = self._counts
            rows = len(self._rows)
            return TableStats(
                rows=rows,
                bytes_total=rows * self._row_bytes,
                bytes_rows=rows * (self._row_bytes - _ROW_OVERHEAD_BYTES),
                bytes_index=rows * _ROW_OVERHEAD_BYTES,
                load=1.0 if rows else 0.0,  # a dict does not tell
                inserted=counts.inserted,
                filtered=counts.filtered,
                refused=counts.refused,
                evicted=counts.evicted,
                removed=counts.removed,
                max_event_time=counts.max_event_time,
                non_finite=counts.non_finite,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._rows.clear()

    # Inside. Every method below is called with the lock held.

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            self._thawed.wait_for(lambda: not self._frozen)
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise TableClosedError(f"table {self._config.name!r} was closed")

    def _copied(self) -> dict[int, _Row]:
        return {
            key: _Row(row.values.copy(), row.state.copy(), row.event_time) for key, row in self._rows.items()
        }

    def _found(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.array([key in self._rows for key in keys.tolist()], dtype=np.bool_)

    def _expired(self, now: int) -> list[int]:
        keys = np.fromiter(self._rows, np.int64, len(self._rows))
        times = np.fromiter((row.event_time for row in self._rows.values()), np.int64, len(keys))
        expired: list[int] = keys[self._config.expiry.expired(keys, times, now)].tolist()
        return expired

    def _gather(self, keys: NDArray[np.int64]) -> Rows:
        return _gathered(self._rows, keys, self.dim, self.state_dim)

    def _write_arguments(
        self, ids: Tensor, values: Tensor, event_time: int | Tensor, name: str = "values"
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        """Check the arguments of a write and move the table's clock on to their newest event time."""
        keys = arguments.id_array(ids)
        array = arguments.float_array(values, (len(keys), self.dim), name)
        times = np.broadcast_to(arguments.event_time_array(event_time, len(keys)), keys.shape)
        if len(keys):
            self._counts.max_event_time = max(self._counts.max_event_time, int(times.max()))
        return keys, array, times

    def _note_steps(self, state: NDArray[np.float32] | None) -> None:
        """Be at the newest step of rows that come from elsewhere."""
        for piece in self._pieces:
            if state is not None and piece.segment.optimizer.decays_lazily:
                seen = last_steps(state[:, piece.state], piece.segment.dim)
                self._steps = max(self._steps, int(seen.max()))

    def _apply(self, updates: _Updates, rates: list[float], step: int) -> None:
        self._scales = [
            piece.segment.compressor.scale_at(step, scale)
            for piece, scale in zip(self._pieces, self._scales, strict=True)
        ]
        self._decay_rates, self._steps = rates, max(self._steps, step + 1)
        changed = []
        for position, key in enumerate(updates.ids.tolist()):
            time = int(updates.event_times[position])
            row = self._row_for(key, time, count=int(updates.counts[position]))
            if row is None:
                continue
            latest = None if updates.latest is None else updates.latest[position]
            before = row.values.copy(), row.state.copy()
            for piece, scale, rate in zip(self._pieces, self._scales, rates, strict=True):
                values, state = row.values[piece.values], row.state[piece.state]
                gradient = piece.segment.compressor.backward(
                    values, updates.gradients[position, piece.values], scale
                )
                optimizer = piece.segment.optimizer
                if optimizer.delay_compensation is not None and latest is not None:
                    pull = np.float32(optimizer.delay_compensation) * gradient * gradient
                    gradient = gradient + pull * (values - latest[piece.values])
                take_step(optimizer, values, state, gradient, rate=rate, step=step)
                if optimizer.stochastic_rounding:
                    values[:] = self._rounded(key, piece.columns, values, step)
            if not np.isfinite(row.values).all():
                self._counts.non_finite += 1
                row.values[:], row.state[:] = before
            elif self._config.stores_narrow and self._config.embedding_rounding == "stochastic":
                row.values[:] = round_by_chance(
                    row.values,
                    self._config.embedding_dtype,
                    self._dims,
                    seed=self._config.seed,
                    row_id=key,
                    step=step,
                )
            else:
                row.values[:] = self._as_stored(row.values)
            row.event_time = max(row.event_time, time)
            changed.append(key)
        self._touch(np.array(changed, np.int64))

    def _rounded(
        self, key: int, columns: range, values: NDArray[np.float32], step: int
    ) -> NDArray[np.float32]:
        """Round to half precision by chances drawn from the step and the bits of each value as well."""
        salt = values.view(np.uint32).astype(np.uint64) + np.uint64(mix_one(step))
        chances = draws(self._config.seed, np.array([key]), columns, salt=salt[None])
        return round_to_half(values, chances[0])

    def _row_for(self, key: int, time: int, *, count: int = 1, ask: bool = True) -> _Row | None:
        """Return the id's row, a new one if it may have one; None if it must wait or the table is full."""
        if row := self._rows.get(key):
            return row
        if ask and self._admission is not None:
            waits = self._admission.refuse(torch.tensor([key]), torch.tensor([count]))
            if bool(waits[0]):
                self._counts.filtered += count
                return None
        if not self._makes_room(time):
            self._counts.refused += 1
            self._refusals.note(self._counts.refused, self._rows.__len__)
            return None
        self._counts.inserted += 1
        return self._rows.setdefault(key, self._new_row(key, time))

    def _new_row(self, key: int, time: int) -> _Row:
        values = np.concatenate(
            [
                p.segment.initializer.values(np.array([key]), p.columns, self._config.seed)[0]
                for p in self._pieces
            ]
        )
        return _Row(self._as_stored(values), self._fresh_state.copy(), time)

    def _makes_room(self, time: int) -> bool:
        capacity = self._config.capacity_bytes
        if capacity is None or (len(self._rows) + 1) * self._row_bytes <= capacity:
            return True
        if self._config.when_full == "refuse" or not self._rows:
            return False
        oldest = min(self._rows, key=lambda key: self._rows[key].event_time)
        if self._rows[oldest].event_time > time:
            return False
        self._drop(oldest)
        self._counts.evicted += 1
        return True

    def _leaves_no_row(self, values: NDArray[np.float32]) -> bool:
        return self._config.skip_zero and bool(np.sum(values * values) < _SMALLEST_NORMAL)

    def _as_stored(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the values as this table can hold them: a server has only what its codes can say."""
        if not self._config.serving:
            return round_to_nearest(values, self._config.embedding_dtype, self._dims)
        return np.concatenate(
            [p.segment.compressor.decode(p.segment.compressor.encode(values[p.values])) for p in self._pieces]
        )

    def _drop(self, key: int) -> bool:
        """Take a row out; return whether there was one."""
        found = self._rows.pop(key, None) is not None
        if found:
            self._touch(np.array([key], np.int64))
        return found

    def _touch(self, keys: NDArray[np.int64]) -> None:
        if self._touched and len(keys):
            changed = torch.from_numpy(np.unique(keys))
            for touched in self._touched:
                touched.insert(changed)


class DictTableSnapshot:
    """A `TableSnapshot` that is a copy. What changed is what differs from the copy before."""

    cold: None = None

    def __init__(
        self,
        table: DictTable,
        rows: dict[int, _Row],
        before: dict[int, _Row] | None,
        scales: list[float],
        max_event_time: int,
    ) -> None:
        self._table = table
        self._rows = rows
        self._before = before
        self.scales = scales
        self.max_event_time = max_event_time
        self.captured_bytes = 0
        self.cleared = False
        self._open = True

    @property
    def config(self) -> TableConfig:
        return self._table.config

    @property
    def tracked(self) -> bool:
        return self._before is not None

    def __len__(self) -> int:
        return len(self._rows)

    def removed(self) -> Tensor:
        gone = (self._before or {}).keys() - self._rows.keys()
        return torch.tensor(sorted(gone), dtype=torch.int64)

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        start, end = arguments.scan_range(cursor, limit, shard, num_shards)
        if not self._open:
            raise TableArgumentError("scan: the snapshot was closed")
        rows = self._rows
        if changed_only:
            before = self._before
            if before is None:
                raise TableArgumentError("scan: this table does not keep track of changes")
            rows = {key: row for key, row in rows.items() if not _equal(row, before.get(key))}
        keys, following = _chunk_of(rows, start, end, limit)
        return Scan(_gathered(rows, keys, self.config.dim, self._table.state_dim), following)

    def close(self, *, saved: bool) -> None:
        if self._open:
            self._open = False
            self._table.end_snapshot(self._rows if saved else None)


def _equal(row: _Row, other: _Row | None) -> bool:
    return (
        other is not None
        and row.event_time == other.event_time
        and row.values.tobytes() == other.values.tobytes()
        and row.state.tobytes() == other.state.tobytes()
    )


def _chunk_of(
    rows: dict[int, _Row], start: int, end: int, limit: int
) -> tuple[NDArray[np.int64], int | None]:
    """Return up to `limit` ids with hashes [start, end), in their order, and the hash to continue from."""
    keys = np.fromiter(rows, np.int64, len(rows))
    hashes = mix(keys)
    left = [i for i in np.argsort(hashes).tolist() if start <= int(hashes[i]) < end]
    chunk = left[:limit]
    return keys[chunk], int(hashes[chunk[-1]]) + 1 if len(left) > limit else None


def _gathered(rows: dict[int, _Row], keys: NDArray[np.int64], dim: int, state_dim: int) -> Rows:
    """Return whole rows of these ids, zeros where there is none."""
    n = len(keys)
    times = np.zeros(n, np.int64)
    values = np.zeros((n, dim), np.float32)
    state = np.zeros((n, state_dim), np.float32)
    for position, key in enumerate(keys.tolist()):
        if row := rows.get(key):
            times[position] = row.event_time
            values[position] = row.values
            state[position] = row.state
    columns = (keys.copy(), times, values, state)
    return Rows(*(torch.from_numpy(column) for column in columns))


def _pieces(config: TableConfig) -> Iterator[_Piece]:
    column = state = 0
    for segment in config.segments:
        state_dim = 0 if config.serving else segment.state_dim
        yield _Piece(
            segment,
            range(column, column + segment.dim),
            slice(column, column + segment.dim),
            slice(state, state + state_dim),
        )
        column += segment.dim
        state += state_dim
