"""The online joiner: impressions joined with the actions of users.

Features are logged when a request is answered, clicks come minutes later, in another
stream, in no particular order. The joiner pairs them by a key: an impression waits until
an action makes it a positive example, or until its window closes and it becomes a
negative one. Negatives are many, so a sample of them is enough; `line_id.sample_rate` of
every example is the sampling rate, so that a model can correct for it.

Time is event time, never a clock. Each stream has reached its newest event less `lateness`,
and the watermark is the smaller of the two. An impression of time t takes actions up to
t + window, that second included, and closes once the watermark is past it. So replaying
the streams gives the same examples, today or in a year.

    impression at t ──► open ──positive action by t + window──► positive example
                          └──watermark > t + window──► negative example, or dropped by sampling
    action without an impression ──► waits ──impression──► joined;  ──hold_actions──► unmatched

    config = JoinerConfig(key="line_id.req_id", positives=(frozenset({1}),), window=timedelta(hours=1))
    joiner = Joiner(config)
    examples = joiner.push_impressions(records)     # those that this made ready
    examples = joiner.push_actions(records)

`JoinedSource` does that with two sources, and has a position. Columns stay columns; the only
object per impression is its key in an index, which stays in memory.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import concurrency, filesystem
from monolith.data.join.store import BLOCK_RECORDS, Arrays, JoinStore, StoredBlock, pack, unpack
from monolith.data.records import LABEL, LINE_ID, Records, concat, timely
from monolith.errors import ConfigError, CorruptFileError, DataError, FileMissingError, RestoreError
from monolith.observe import Doublings, Metrics
from monolith.observe.progress import counted
from monolith.table.arguments import is_second, wrong_second
from monolith.table.hashing import mix, mix_one
from monolith.tensors import RaggedTensor

_log = logging.getLogger(__name__)

Key = int | bytes

SAMPLE_RATE = LINE_ID + "sample_rate"
PRE_ACTIONS = LINE_ID + "pre_actions"
NO_DELAY = timedelta()

_ROW_BITS = 16  # of a handle: block << 16 | row
_STATE = "state-"
_COMMITTED = "committed.json"
_MANY = 100  # snapshots that were not committed

NOTHING_JOINED: dict[str, Any] = {"kind": "joiner", "snapshot": None}
"""The state of a joiner that was given nothing yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinerConfig:
    """Which streams are joined, for how long, and which examples come out."""

    key: str
    """The column, in both streams, that says which request it was: one int64 or one string per record."""
    positives: tuple[frozenset[int], ...]
    """For each task the actions that make its label 1. Any of them makes an example positive."""
    window: timedelta
    """How long after an impression its actions count."""
    lateness: timedelta = NO_DELAY
    """How far behind the newest event of its stream an event may come."""
    max_skew: timedelta = timedelta(minutes=10)
    """How far one stream may be behind the other and still delay the watermark. 0 never waits: the newest
    event of either decides."""
    hold_actions: timedelta | None = None
    """How long an action waits for an impression that has not come; None for as long as the window."""
    late_actions: Literal["drop", "join"] = "drop"
    """An action is late when it is past its impression's window, or behind the watermark and without an
    impression. "join" joins the former while the impression is still there, and lets the latter wait."""
    emit: Literal["first", "each", "close"] = "first"
    """When a positive example comes out: at its first positive action, and no more; at each, with the actions
    of the one before in `line_id.pre_actions`; or when the window closes, with all of them."""
    negative_rate: float = 1.0
    """The fraction of negatives that come out, chosen by a hash of the key: always the same ones."""
    seed: int = 0
    """Another seed chooses other negatives."""
    time: str = LINE_ID + "req_time"
    """The column of the event time, in both streams: one int64 of Unix seconds per record."""
    action: str = LINE_ID + "actions"
    """The column of the actions: int64, any number per record of the action stream. Examples have it, too."""
    folder: str | None = None
    """The folder for snapshots and for impressions beyond the memory limits. One folder per joiner; it must
    exist as long as a checkpoint may be restored."""
    memory_records: int | None = None
    """The most impressions to keep in memory; the older ones go to the folder. None for no limit."""
    memory_bytes: int | None = None
    """The most bytes of impressions to keep in memory, without the index of keys. None for no limit."""
    snapshot_every: int = 1000
    """Batches that a joined source reads between snapshots: so many at most are joined again at a restart."""
    keep_snapshots: int = 10
    """How many committed snapshots are kept: at least so many checkpoints can be restored."""

    def __post_init__(self) -> None:
        if not self.positives or not all(self.positives):
            raise ConfigError("joiner: positives must name at least one action for each task")
        for name in ("window", "lateness", "max_skew", "hold_actions"):
            value = getattr(self, name)
            if value is not None and value < NO_DELAY:
                raise ConfigError(f"joiner: {name} must not be negative, got {value}")
        if not 0 < self.negative_rate <= 1:
            raise ConfigError(
                f"joiner: negative_rate must be above 0 and at most 1, got {self.negative_rate}"
            )
        for name in ("memory_records", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"joiner: {name} must not be negative, got {value}")
            if value is not None and self.folder is None:
                raise ConfigError(f"joiner: {name} needs a folder for the rest; set folder")
        for name in ("keep_snapshots", "snapshot_every"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"joiner: {name} must be at least 1, got {value}")


@dataclass(slots=True)
class JoinStats:
    """What the joiner did so far. Actions are counted one by one, not by record."""

    impressions: int = 0
    duplicate_impressions: int = 0
    """Impressions whose key is already waiting; ignored."""
    actions: int = 0
    joined_actions: int = 0
    duplicate_actions: int = 0
    """That an impression had already, or that waits already; ignored."""
    late_actions: int = 0
    """See `JoinerConfig.late_actions`; those that were dropped."""
    unmatched_actions: int = 0
    """Whose impression never came."""
    positives: int = 0
    """Examples that came out."""
    negatives: int = 0
    """Examples that came out."""
    negatives_left_out: int = 0
    bad_times: int = 0
    """Records of both streams that were dropped because their time is no Unix second."""


@dataclass(slots=True)
class _OpenBlock:
    """The keys and times of a block of impressions, and which of them are still open."""

    keys: list[Key]
    times: NDArray[np.int64]
    open: NDArray[np.bool_]


@dataclass(slots=True)
class _Due:
    """Examples that are ready, in the order in which they come out."""

    handles: list[int] = field(default_factory=list)
    actions: list[tuple[int, ...]] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, handle: int, actions: tuple[int, ...], before: tuple[int, ...] = ()) -> None:
        self.handles.append(handle)
        self.actions.append(actions)
        self.before.append(before)


class Joiner:
    """Joins two streams. Not thread-safe.

    An impression is addressed by a handle, `block << 16 | row`: the block's number in the store and its row.

    Args:
        metrics: Counts what `stats` counts, as `joiner_events{event=...}`.
    """

    def __init__(self, config: JoinerConfig, *, metrics: Metrics | None = None) -> None:
        self.config = config
        self._events = (
            None if metrics is None else metrics.counter("joiner_events", "What the joiner did", ["event"])
        )
        self._reported = JoinStats()
        self._positive = frozenset(chain.from_iterable(config.positives))
        self._window = config.window.total_seconds()
        self._lateness = config.lateness.total_seconds()
        self._skew = config.max_skew.total_seconds()
        self._hold = (config.window if config.hold_actions is None else config.hold_actions).total_seconds()
        self._store = JoinStore(
            config.folder, memory_records=config.memory_records, memory_bytes=config.memory_bytes
        )
        self._snapshot: str | None = None
        """The snapshot file of the current state; None if it has changed since the last one."""
        self._warned = False
        self._files_of: dict[str, frozenset[str]] = {}
        """Snapshot to the files of blocks that it names."""
        self._reset()

    def _reset(self) -> None:
        self._stats = JoinStats()
        self._key_kind: type | None = None
        self._newest: dict[str, int | None] = {"impressions": None, "actions": None}
        self._reached: float = -np.inf  # the watermark, which never falls
        self._bad_times = Doublings()
        # Invariant: `_index` has exactly the open impressions of `_blocks`; every block with one is in the
        # heap once, by the time of its oldest; `_seen` and `_emitted` have handles of open impressions only.
        self._blocks: dict[int, _OpenBlock] = {}
        self._index: dict[Key, int] = {}
        self._closing: list[tuple[int, int]] = []
        """A heap of blocks by their oldest open impression."""
        self._seen: dict[int, tuple[int, ...]] = {}
        """Actions of an impression, in the order in which they came."""
        self._emitted: dict[int, int] = {}
        """How many of those were in the example that came out last."""
        self._waiting: dict[Key, list[tuple[int, tuple[int, ...]]]] = {}
        """Actions without an impression, with their times."""
        self._expiring: list[tuple[int, Key]] = []
        """A heap of those by time. An entry stays when its impression comes: `_expire` then finds nothing."""

    @property
    def stats(self) -> JoinStats:
        """What has happened so far, a copy."""
        return replace(self._stats)

    @property
    def watermark(self) -> float:
        """The Unix second up to which the streams have come; minus infinity before both have begun."""
        return self._reached

    @property
    def open(self) -> int:
        """How many impressions wait for actions."""
        return len(self._index)

    @property
    def on_disk(self) -> int:
        """How many impressions can only be had from disk."""
        return self._store.disk_records

    @property
    def newest(self) -> dict[str, int | None]:
        """The newest event time of "impressions" and of "actions"; None before the first."""
        return dict(self._newest)

    def push_impressions(self, records: Records) -> Records:
        """Add impressions; return the examples that are ready now.

        Raises:
            DataError: Key or time is missing or not one per record. Nothing was taken.
        """
        records = self._timely(records, "impressions")
        if not records.size:
            return Records(0, {})
        # All checks first: a batch that is refused has changed nothing.
        keys, times = self._keys(records, "impressions"), self._times(records, "impressions")
        self._snapshot = None
        self._stats.impressions += len(keys)
        fresh = []
        among = set()
        # Of several impressions with one key the first counts, within a batch as well.
        for row, key in enumerate(keys):
            if key not in self._index and key not in among:
                among.add(key)
                fresh.append(row)
        self._stats.duplicate_impressions += len(keys) - len(fresh)
        due = _Due()
        for begin in range(0, len(fresh), BLOCK_RECORDS):
            rows = fresh[begin : begin + BLOCK_RECORDS]
            block = records if len(rows) == records.size else records.take(torch.tensor(rows))
            self._add(block, [keys[row] for row in rows], times[rows], due)
        # The watermark moves after the records are in: an impression of this batch cannot close before its
        # own actions, which may wait already, have joined it.
        self._see("impressions", times)
        return self._ready(due)

    def push_actions(self, records: Records) -> Records:
        """Add actions; return the examples that are ready now.

        Raises:
            DataError: Key or time is missing or not one per record. Nothing was taken.
        """
        records = self._timely(records, "actions")
        if not records.size:
            return Records(0, {})
        keys, times = self._keys(records, "actions"), self._times(records, "actions")
        column = records[self.config.action]
        if column.dtype is not torch.int64:
            raise DataError(
                f"joiner: {self.config.action!r} of the actions must be int64, got {column.dtype}"
            )
        self._snapshot = None
        due = _Due()
        for key, time, actions in zip(keys, times.tolist(), _tuples(column), strict=True):
            self._stats.actions += len(actions)
            handle = self._index.get(key)
            if handle is not None:
                self._join(handle, time, actions, due)
            elif time >= self._reached or self.config.late_actions == "join":
                self._wait(key, time, actions)
            else:
                self._stats.late_actions += len(actions)
        self._see("actions", times)
        return self._ready(due)

    def advance(self, time: int) -> Records:
        """Move the watermark to `time`, although a stream may be quiet; return the examples that are
        ready."""
        self._snapshot = None
        self._reached = max(self._reached, time)
        return self._ready(_Due())

    def finish(self) -> Records:
        """Close all windows at the end of both streams; return the remaining examples."""
        before = self._reached
        self._snapshot = None
        self._reached = np.inf
        examples = self._ready(_Due())
        self._reached = before
        return examples

    # Joining

    def _add(self, records: Records, keys: list[Key], times: NDArray[np.int64], due: _Due) -> None:
        number = self._store.add(records)
        self._blocks[number] = _OpenBlock(keys, times, np.ones(len(keys), dtype=bool))
        heapq.heappush(self._closing, (int(times.min()), number))
        first = number << _ROW_BITS
        self._index.update(zip(keys, range(first, first + len(keys)), strict=True))
        if self._waiting:
            for row, key in enumerate(keys):
                for time, actions in self._waiting.pop(key, ()):
                    self._join(first + row, time, actions, due)

    def _join(self, handle: int, time: int, actions: tuple[int, ...], due: _Due) -> None:
        begin = int(self._blocks[handle >> _ROW_BITS].times[handle & (1 << _ROW_BITS) - 1])
        if time > begin + self._window and self.config.late_actions == "drop":
            self._stats.late_actions += len(actions)
            return
        seen = self._seen.get(handle, ())
        new = tuple(dict.fromkeys(action for action in actions if action not in seen))
        self._stats.joined_actions += len(new)
        self._stats.duplicate_actions += len(actions) - len(new)
        if not new:
            return
        self._seen[handle] = now = seen + new
        if self.config.emit == "close" or self._positive.isdisjoint(new):
            return
        already = self._emitted.get(handle, 0)
        if already and self.config.emit == "first":
            return
        self._emitted[handle] = len(now)
        due.add(handle, now, now[:already])

    def _wait(self, key: Key, time: int, actions: tuple[int, ...]) -> None:
        waiting = self._waiting.get(key, [])
        known = set(chain.from_iterable(others for _, others in waiting))
        new = tuple(dict.fromkeys(action for action in actions if action not in known))
        self._stats.duplicate_actions += len(actions) - len(new)
        if not new:
            return
        self._waiting[key] = [*waiting, (time, new)]
        heapq.heappush(self._expiring, (time, key))

    def _see(self, stream: str, times: NDArray[np.int64]) -> None:
        """Advance the watermark to the time that both streams have reached."""
        newest = self._newest[stream]
        self._newest[stream] = int(times.max()) if newest is None else max(newest, int(times.max()))
        known = [time for time in self._newest.values() if time is not None]
        # The slower stream decides, unless it is behind by more than max_skew: then it is taken to be idle.
        both = min(known) if len(known) == 2 else -np.inf
        self._reached = max(self._reached, max(both, max(known) - self._skew) - self._lateness)

    def _ready(self, due: _Due) -> Records:
        """Return the examples that are due, then those whose window the watermark closes."""
        # Examples are taken from the store before blocks without an open impression are dropped from it.
        examples = [self._examples(due)] if due.handles else []
        closed, done = self._close()
        if closed.handles:
            examples.append(self._examples(closed))
        for number in done:
            del self._blocks[number]
            self._store.drop(number)
        while self._expiring and self._expiring[0][0] + self._hold < self._reached:
            self._expire(*heapq.heappop(self._expiring))
        self._report()
        return concat(examples) if examples else Records(0, {})

    def _close(self) -> tuple[_Due, list[int]]:
        """Close the windows that the watermark has passed.

        Returns:
            What comes out, by time and then by arrival, and the blocks that have nothing open any more.
        """
        times, handles, done = [], [], []
        while self._closing and self._closing[0][0] + self._window < self._reached:
            _, number = heapq.heappop(self._closing)
            block = self._blocks[number]
            rows = np.flatnonzero(block.open & (block.times + self._window < self._reached))
            block.open[rows] = False
            times.append(block.times[rows])
            handles.append(rows + (number << _ROW_BITS))
            for row in rows.tolist():
                del self._index[block.keys[row]]
            if block.open.any():
                heapq.heappush(self._closing, (int(block.times[block.open].min()), number))
            else:
                done.append(number)
        due = _Due()
        if not handles:
            return due, done
        # By event time, then by handle, which is the order of arrival: the same in every replay.
        closed = np.concatenate(handles)
        closed = closed[np.lexsort((closed, np.concatenate(times)))]
        for handle, keep in zip(closed.tolist(), self._sampled(closed).tolist(), strict=True):
            seen = self._seen.pop(handle, ())
            if self._emitted.pop(handle, 0):  # it was a positive example, and came out then
                continue
            if keep or not self._positive.isdisjoint(seen):
                due.add(handle, seen)
            else:
                self._stats.negatives_left_out += 1
        return due, done

    def _sampled(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which impressions come out if they are negatives."""
        if self.config.negative_rate == 1:
            return np.ones(len(handles), dtype=bool)
        keys = [
            self._blocks[handle >> _ROW_BITS].keys[handle & (1 << _ROW_BITS) - 1]
            for handle in handles.tolist()
        ]
        # By a hash of the key, not by a generator: a replay, or another worker, leaves out the same ones. The
        # upper 53 bits of the hash are a float in [0, 1).
        numbers = np.array([_number(key) for key in keys], dtype=np.int64)
        draws = mix(numbers.view(np.uint64) ^ np.uint64(mix_one(self.config.seed)))
        return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.config.negative_rate

    def _expire(self, time: int, key: Key) -> None:
        """Give up the actions of a key that have waited since `time`."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        left = [entry for entry in waiting if entry[0] > time]
        self._stats.unmatched_actions += sum(len(actions) for _, actions in waiting)
        self._stats.unmatched_actions -= sum(len(actions) for _, actions in left)
        if left:
            self._waiting[key] = left
        else:
            del self._waiting[key]

    def _examples(self, due: _Due) -> Records:
        """Return the examples of some impressions: labels, actions and sample rate added."""
        handles = np.array(due.handles, dtype=np.int64)
        shown = self._store.take(handles >> _ROW_BITS, handles & (1 << _ROW_BITS) - 1)
        labels = torch.tensor(
            [[not wanted.isdisjoint(actions) for wanted in self.config.positives] for actions in due.actions],
            dtype=torch.float32,
        )
        positives = int(labels.any(1).sum())
        self._stats.positives += positives
        self._stats.negatives += len(handles) - positives
        rates = torch.full((len(handles),), self.config.negative_rate)
        if SAMPLE_RATE in shown.columns:  # they were a sample already
            rates *= shown[SAMPLE_RATE].to_padded(1, 1.0).squeeze(1)
        columns = {
            LABEL: _even(labels.reshape(-1), labels.shape[1]),
            self.config.action: _ragged(due.actions),
            SAMPLE_RATE: _even(rates, 1),
        }
        if self.config.emit == "each":
            columns[PRE_ACTIONS] = _ragged(due.before)
        return shown.with_columns(columns)

    # Keys and times of records

    def _keys(self, records: Records, stream: str) -> list[Key]:
        column = self._one_each(records, self.config.key, stream)
        keys: list[Key]
        if column.dtype is torch.int64:
            keys = column.flat_values.tolist()
        elif column.dtype is torch.uint8 and isinstance(column.values, RaggedTensor):
            text, ends = column.flat_values.numpy().tobytes(), column.values.row_splits.tolist()
            keys = [text[begin:end] for begin, end in pairwise(ends)]
        else:
            raise DataError(
                f"joiner: the key {self.config.key!r} of the {stream} must be int64 or strings, "
                f"got {column.dtype}"
            )
        kind = type(keys[0])
        if self._key_kind is None:
            self._key_kind = kind
        if kind is not self._key_kind:
            raise DataError(
                f"joiner: the key {self.config.key!r} of the {stream} is {kind.__name__}, but was "
                f"{self._key_kind.__name__} before; impressions and actions need keys of one kind"
            )
        return keys

    def _timely(self, records: Records, stream: str) -> Records:
        """Drop records with an impossible time: one in milliseconds would close every window for good."""
        fine = timely(records, self.config.time)
        if bool(fine.all()):
            return records
        self._stats.bad_times += int((~fine).sum())
        if self._bad_times.due(self._stats.bad_times):
            wrong = [time for time in records[self.config.time].flat_values.tolist() if not is_second(time)]
            _log.warning(
                "joiner: left out %s so far: the time %r of the %s %s",
                counted(self._stats.bad_times, "record"),
                self.config.time,
                stream,
                wrong_second(int(wrong[0])),
                extra={"cause": f"times of the {stream}"},
            )
        return records.keep(fine)

    def _times(self, records: Records, stream: str) -> NDArray[np.int64]:
        column = self._one_each(records, self.config.time, stream)
        if column.dtype is not torch.int64:
            raise DataError(
                f"joiner: the time {self.config.time!r} of the {stream} must be int64, got {column.dtype}"
            )
        times: NDArray[np.int64] = column.flat_values.numpy()
        return times

    def _one_each(self, records: Records, name: str, stream: str) -> RaggedTensor:
        column = records[name]
        lengths = column.row_lengths()
        if not bool((lengths == 1).all()):
            row = int((lengths != 1).nonzero()[0])
            raise DataError(
                f"joiner: {name!r} of the {stream} must have one value per record, "
                f"record {row} has {int(lengths[row])}"
            )
        return column

    def _report(self) -> None:
        if self._events is None:
            return
        for one in fields(JoinStats):
            now = getattr(self._stats, one.name)
            self._events.inc(now - getattr(self._reported, one.name), event=one.name)
        self._reported = replace(self._stats)

    # Snapshots

    def state(self) -> dict[str, Any]:
        """Write a snapshot, unless the last one is still current, and return the argument of `restore`:
        JSON-able.

        The snapshot is there whole or not at all, and stays until a later one is committed.

        Raises:
            ConfigError: There is no folder to write it to.
        """
        if self._snapshot is None:
            self._snapshot = self._write_snapshot()
        return {"kind": "joiner", "snapshot": self._snapshot}

    def commit(self, state: dict[str, Any]) -> None:
        """Note that a checkpoint contains this state: older snapshots are deleted, except the last committed
        ones.

        See `JoinerConfig.keep_snapshots`. Committing again does nothing.
        """
        name, present = state["snapshot"], self._snapshots()
        committed = self._committed()
        if name not in present or name in committed[-1:]:
            return
        others = [one for one in committed if one in present and one != name]
        committed = [*others, name][-self.config.keep_snapshots :]
        with filesystem.atomic_write(filesystem.join(self._folder(), _COMMITTED)) as file:
            file.write(json.dumps(committed).encode())
        # The list is on disk first: after a crash here, older snapshots remain and the next commit removes
        # them.
        for old in present[: present.index(name)]:
            if old not in committed:
                filesystem.remove(filesystem.join(self._folder(), old))
        self._pin()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a joiner; `NOTHING_JOINED` is that of a new one.

        Raises:
            RestoreError: It is not the state of a joiner with this key, or its files are gone.
        """
        name = state.get("snapshot")
        if state.get("kind") != "joiner" or not isinstance(name, str | None) or "snapshot" not in state:
            raise RestoreError(f"cannot restore a joiner: {state!r} is not the state of one")
        if name is None:
            self._store.clear()
            self._reset()
            return
        if not name.startswith(_STATE) or name != filesystem.base_name(name):
            # The name is joined to the folder: another one could lead out of it.
            raise RestoreError(f"cannot restore a joiner: {name!r:.200} is not the name of a snapshot")
        about, arrays = self._read_snapshot(name)
        if about["key"] != self.config.key:
            raise RestoreError(
                f"cannot restore the joiner: {name} was joined by {about['key']!r}, this one joins by "
                f"{self.config.key!r}"
            )
        self._store.restore([StoredBlock(*block) for block in about["blocks"]], about["next_block"])
        self._pin()
        self._reset()
        self._stats = JoinStats(**about["stats"])
        self._reported = replace(self._stats)
        self._key_kind = {"int": int, "bytes": bytes, None: None}[about["key_kind"]]
        self._newest = about["newest"]
        self._reached = -np.inf if about["reached"] is None else about["reached"]
        keys = iter(self._unpack_keys(arrays, "open"))
        begin = 0
        for number, _, _, size in about["blocks"]:
            times, is_open = (arrays[name][begin : begin + size] for name in ("times", "is_open"))
            begin += size
            block = _OpenBlock(
                [next(keys) if one else b"" for one in is_open.tolist()], times, is_open.astype(bool)
            )
            self._blocks[number] = block
            heapq.heappush(self._closing, (int(times[block.open].min()), number))
            for row in np.flatnonzero(block.open).tolist():
                self._index[block.keys[row]] = (number << _ROW_BITS) + row
        for handle, actions, emitted in zip(
            arrays["seen"].tolist(), _unpack_tuples(arrays, "seen"), arrays["emitted"].tolist(), strict=True
        ):
            self._seen[handle] = actions
            if emitted:
                self._emitted[handle] = emitted
        for key, time, actions in zip(
            self._unpack_keys(arrays, "waiting"),
            arrays["waiting"].tolist(),
            _unpack_tuples(arrays, "waiting"),
            strict=True,
        ):
            self._waiting.setdefault(key, []).append((time, actions))
            heapq.heappush(self._expiring, (time, key))
        self._snapshot = name

    def close(self) -> None:
        """Remove the files that no snapshot names. Closing again does nothing."""
        self._store.clear()
        self._reset()

    def _write_snapshot(self) -> str:
        folder = self._folder()
        filesystem.make_dirs(folder)
        # Blocks first, then the snapshot that names them: a kill in between leaves files that no snapshot
        # names, which the next `_pin` removes.
        blocks = self._store.persist()
        opened = [self._blocks[block.number] for block in blocks]
        waiting = [(key, *entry) for key, entries in self._waiting.items() for entry in entries]
        about = {
            "key": self.config.key,
            "key_kind": self._key_kind and self._key_kind.__name__,
            "stats": asdict(self._stats),
            "newest": self._newest,
            "reached": self._reached if np.isfinite(self._reached) else None,
            "next_block": self._store.next_block,
            "blocks": [(block.number, block.file, block.first, block.size) for block in blocks],
        }
        arrays: Arrays = {
            "times": np.concatenate([np.empty(0, np.int64), *(one.times for one in opened)]),
            "is_open": np.concatenate([np.empty(0, np.uint8), *(one.open.view(np.uint8) for one in opened)]),
            **self._pack_keys([one.keys[row] for one in opened for row in np.flatnonzero(one.open)], "open"),
            "seen": np.array(list(self._seen), dtype=np.int64),
            **_pack_tuples(list(self._seen.values()), "seen"),
            "emitted": np.array([self._emitted.get(handle, 0) for handle in self._seen], dtype=np.int64),
            **self._pack_keys([key for key, _, _ in waiting], "waiting"),
            "waiting": np.array([time for _, time, _ in waiting], dtype=np.int64),
            **_pack_tuples([actions for _, _, actions in waiting], "waiting"),
        }
        # Numbers continue after the newest in the folder, also after an older one was restored: so the order
        # of names is the order in which they were written.
        snapshots = self._snapshots()
        number = int(snapshots[-1].split("-")[1]) + 1 if snapshots else 0
        name = f"{_STATE}{number:012}-{concurrency.token_hex(4)}"
        with filesystem.atomic_write(filesystem.join(folder, name)) as file:
            file.write(pack(about, arrays))
        self._pin()
        self._warn_of_many(len(snapshots) + 1)
        return name

    def _warn_of_many(self, snapshots: int) -> None:
        if snapshots > self.config.keep_snapshots + _MANY and not self._warned:
            self._warned = True
            _log.warning(
                "joiner: there are %d snapshots in %s, because none was committed: call commit(position) "
                "whenever a position was saved, or older snapshots are never deleted",
                snapshots,
                self._folder(),
            )

    def _committed(self) -> list[str]:
        """Return the committed snapshots that still exist, in the order of their commits."""
        path = filesystem.join(self._folder(), _COMMITTED)
        try:
            found: list[str] = json.loads(filesystem.read_bytes(path))
        except FileMissingError:
            return []
        except ValueError as cause:
            raise CorruptFileError(path, 0, f"it is not a list of snapshots: {cause}") from cause
        return found

    def _pin(self) -> None:
        """Keep the files that snapshots name, and remove the rest."""
        names = self._snapshots()
        self._files_of = {name: self._files_of.get(name) or self._named_by(name) for name in names}
        self._store.pin(frozenset[str]().union(*self._files_of.values()))

    def _named_by(self, snapshot: str) -> frozenset[str]:
        return frozenset(file for _, file, _, _ in self._read_snapshot(snapshot)[0]["blocks"])

    def _read_snapshot(self, name: str) -> tuple[dict[str, Any], Arrays]:
        path = filesystem.join(self._folder(), name)
        try:
            return unpack(filesystem.read_bytes(path), path)
        except FileMissingError as cause:
            raise RestoreError(
                f"cannot restore the joiner: its snapshot {path} is gone. The last "
                f"{self.config.keep_snapshots} that were committed are kept; raise keep_snapshots to restore "
                "older checkpoints."
            ) from cause

    def _snapshots(self) -> list[str]:
        """Return the names of all snapshots, oldest first."""
        if not filesystem.is_folder(self._folder()):
            return []
        names = map(filesystem.base_name, filesystem.list_files(self._folder()))
        return sorted(name for name in names if name.startswith(_STATE) and not filesystem.is_temporary(name))

    def _folder(self) -> str:
        if self.config.folder is None:
            raise ConfigError("joiner: a position needs a folder for its snapshot; set folder")
        return self.config.folder

    def _pack_keys(self, keys: Sequence[Key], name: str) -> Arrays:
        if self._key_kind is int:
            return {f"{name}/keys": np.array(keys, dtype=np.int64)}
        texts = [key for key in keys if isinstance(key, bytes)]
        return {
            f"{name}/keys": np.frombuffer(b"".join(texts), dtype=np.uint8),
            f"{name}/key_lengths": np.array([len(text) for text in texts], dtype=np.int64),
        }

    def _unpack_keys(self, arrays: Arrays, name: str) -> list[Key]:
        if f"{name}/key_lengths" not in arrays:
            keys: list[Key] = arrays[f"{name}/keys"].tolist()
            return keys
        text, ends = arrays[f"{name}/keys"].tobytes(), np.cumsum(arrays[f"{name}/key_lengths"]).tolist()
        return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _number(key: Key) -> int:
    if isinstance(key, int):
        return key
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


def _tuples(column: RaggedTensor) -> list[tuple[int, ...]]:
    values, ends = column.flat_values.tolist(), column.row_splits.tolist()
    return [tuple(values[begin:end]) for begin, end in pairwise(ends)]


def _ragged(rows: Sequence[tuple[int, ...]]) -> RaggedTensor:
    values = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return RaggedTensor.from_row_lengths(
        values, torch.tensor(list(map(len, rows)), dtype=torch.int64), validate=False
    )


def _even(values: torch.Tensor, width: int) -> RaggedTensor:
    """Return a column of `width` values per record."""
    return RaggedTensor(values, torch.arange(0, len(values) + 1, width), validate=False)


def _pack_tuples(rows: Sequence[tuple[int, ...]], name: str) -> Arrays:
    return {
        f"{name}/actions": np.array(list(chain.from_iterable(rows)), dtype=np.int64),
        f"{name}/lengths": np.array(list(map(len, rows)), dtype=np.int64),
    }


def _unpack_tuples(arrays: Arrays, name: str) -> list[tuple[int, ...]]:
    values, ends = arrays[f"{name}/actions"].tolist(), np.cumsum(arrays[f"{name}/lengths"]).tolist()
    return [tuple(values[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
