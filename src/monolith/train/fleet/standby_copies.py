"""The second copy of a server's share: how it is told of every change, and how another server keeps it.

    in a run ──standby.open──► tells what changes, every interval
                                  │  a delta channel with optimizer state, under the name of the incarnation
                                  ▼
    spare ──standby.follow──► standby ──standby.take_over──► in the run, in the place of the lost server
                               ▲  │
                               └──┘ follow: another share, from the beginning; or another incarnation of the
                                    same, whose rows replace those that are there

A copy has the rows with their optimizer state, the weights with theirs, and which pushes are in it. So a
worker that sends a push again, because the lost server never answered it, has it applied once. What the lost
server acknowledged after the newest change that came here is lost, and counted. What filters have counted is
not in the copy.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from monolith.checkpoint.shares import IdShare
from monolith.errors import RestoreError
from monolith.store import DenseShard
from monolith.store.pushes import KnownPushes
from monolith.sync.flight_channel import DeltaPort
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.sync.messages import LearnedUpTo
from monolith.sync.publisher import Publisher
from monolith.sync.subscriber import Followed, Subscriber
from monolith.sync.table_target import TableTarget
from monolith.table import Rows
from monolith.train.fleet.standby_bodies import CopyOpened, FollowShare, StandbyStanding
from monolith.train.model import Model
from monolith.wire.flight import PortGuard
from monolith.wire.ports import Limits

H = TypeVar("H")

_DENSE, _ABOUT = "weights", "about"


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlan:
    """How a share tells its standby what changes."""

    interval: float = 0.1
    """Seconds between two looks at what has changed: what a server learns after the last is lost with it."""
    log_bytes: int = 64 << 20
    """The most bytes of changes that are kept for a standby; one that is further behind takes all rows."""


class CopiedShare:
    """Tells whoever keeps the copy of a share what changes in it, until it is closed.

    Args:
        dense: The weights of the share.
        incarnation: Names what is held.
        pushes: Says which pushes have been applied to it.
        host: Where to listen, on a port of its own.
        guard: What callers must present.
    """

    def __init__(
        self,
        model: Model,
        dense: DenseShard,
        share: IdShare,
        *,
        incarnation: str,
        pushes: Callable[[], Mapping[str, KnownPushes]],
        plan: CopyPlan,
        host: str,
        guard: PortGuard | None,
        limits: Limits | None,
    ) -> None:
        self._tables = model.tables
        self._dense = dense
        self._pushes = pushes
        self._incarnation = incarnation
        self._known = threading.local()
        self.port = DeltaPort(host=host, guard=guard, limits=limits)
        tables: Mapping[str, Any] = self._tables
        self.publisher = Publisher(
            tables,
            self.port.writer(incarnation, log_bytes=plan.log_bytes),
            run=incarnation,
            share=share,
            interval=plan.interval,
            dense_interval=0.0,  # with every delta: weights and rows are of one moment, or nearly so
            dense=self._rest,
            learned=self._learned,
            with_state=True,
        )
        self.publisher.start()

    @property
    def opened(self) -> CopyOpened:
        return CopyOpened(self.port.address, self._incarnation)

    def close(self) -> None:
        """Tell nobody any more. Closing again does nothing."""
        self.publisher.close()
        self.port.close()

    def _learned(self) -> LearnedUpTo:
        """Note which pushes are in the rows, before those are looked up; see `_rest`."""
        self._known.pushes = self._pushes()
        return LearnedUpTo(step=self._dense.step)

    def _rest(self) -> Mapping[str, Tensor]:
        """Return what a share has beside its rows, as bytes. Whoever reads a snapshot asks it before the rows
        are read, on a thread of its own; a delta brings what was known before its rows were."""
        known = self._known.__dict__.pop("pushes", None)
        about = {
            "pushes": {
                sender: [one.highest, one.missing]
                for sender, one in (self._pushes() if known is None else known).items()
            },
            "scales": {name: table.scales for name, table in self._tables.items()},
        }
        return {_DENSE: _as_tensor(self._dense.dump()), _ABOUT: _as_tensor(json.dumps(about).encode())}


class StandbyCopy(Generic[H]):
    """The copy of one share, kept up to date by threads of its own until it is taken or closed.

    Args:
        held: What the copy is made in, for whoever takes it.
        model: That of `held`; nobody else writes to its tables.
        guard: What to present to the server that is followed.
        clock: Returns seconds that only grow; nothing it stamps is compared with another process's time.
    """

    def __init__(
        self,
        held: H,
        model: Model,
        follows: FollowShare,
        *,
        guard: PortGuard | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held = held
        self.follows = follows
        self._tables: Mapping[str, Any] = model.tables
        self._clock = clock
        for table in self._tables.values():
            # So that the next increment of a checkpoint has all of the rows: those before it had others.
            table.clear()
        self._target = _CopyTarget(self._tables)
        self._guard = guard
        self._was_whole, self._was_received_at = False, 0.0
        self._subscriber = self._subscribe()

    def _subscribe(self) -> Subscriber:
        follows, guard = self.follows, self._guard

        def open_reader() -> FlightDeltaReader:
            return FlightDeltaReader([follows.address], model=follows.incarnation, guard=guard)

        subscriber = Subscriber(open_reader, self._target, wait=1.0, clock=self._clock)
        subscriber.start()
        return subscriber

    def follow(self, follows: FollowShare) -> None:
        """Follow another incarnation of the same share, whose server was replaced.

        What is there stays until it is replaced by what comes, so a copy that was whole can take over at any
        moment: the rows are then of both, and the pushes are those of the older at least.
        """
        if (followed := self.followed) is not None:
            self._was_whole, self._was_received_at = self.whole, followed.received_at
        self._close_soon()
        self.follows = follows
        self._subscriber = self._subscribe()

    @property
    def followed(self) -> Followed | None:
        """How far it is; None before anything was heard."""
        return self._subscriber.standing.get(self.follows.index)

    @property
    def whole(self) -> bool:
        """Whether all of the share has come at least once."""
        followed = self.followed
        came = self._was_whole or (followed is not None and followed.place is not None)
        return came and self._target.dense is not None

    @property
    def behind(self) -> float:
        """Seconds since the newest change that it has came."""
        followed = self.followed
        received_at = self._was_received_at if followed is None else followed.received_at
        return 0.0 if not received_at else max(0.0, self._clock() - received_at)

    def standing(self) -> StandbyStanding:
        followed = self.followed
        error = self._subscriber.error if followed is None else followed.error
        return StandbyStanding(in_run=False, follows=self.follows, whole=self.whole, error=error[:4096])

    def take(self, dense: DenseShard) -> Mapping[str, KnownPushes]:
        """Change no more, and put what is not rows in its place; return which pushes the copy has.

        Raises:
            RestoreError: The copy is of other weights.
        """
        self._target.end()
        self._close_soon()
        assert self._target.dense is not None, "taken only when it is whole"
        dense.load(_as_bytes(self._target.dense[_DENSE]))
        about = _read_about(_as_bytes(self._target.dense[_ABOUT]))
        for name, scales in about["scales"].items():
            if name in self._tables:
                self._tables[name].set_scales(scales)
        return {
            sender: KnownPushes(int(highest), tuple(map(int, missing)))
            for sender, (highest, missing) in about["pushes"].items()
        }

    def close(self) -> None:
        """Follow no more, and leave the tables alone. Closing again does nothing."""
        self._target.end()
        self._close_soon()

    def _close_soon(self) -> None:
        # A read of a server that is silent takes a while to end, and nobody must wait for it.
        threading.Thread(target=self._subscriber.close, name="standby-close", daemon=True).start()


class _CopyTarget(TableTarget):
    """Tables that take changes until they are in use. Thread-safe."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        super().__init__(tables)
        self._lock = threading.Lock()  # held while tables change
        self._over = False

    def end(self) -> None:
        """Change nothing from now on."""
        with self._lock:
            self._over = True

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        with self._lock:
            if not self._over:
                super().apply(rows, removed)

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        with self._lock:
            if not self._over:
                super().snapshot_rows(table, rows)

    def end_snapshot(self) -> None:
        with self._lock:
            if not self._over:
                super().end_snapshot()

    def digests(self, table: str, share: IdShare, buckets: Tensor) -> Tensor:
        with self._lock:
            if self._over:
                return torch.zeros(len(buckets), dtype=torch.int64)
            return super().digests(table, share, buckets)

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        with self._lock:
            if not self._over:
                super().swap_dense(weights)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _read_about(data: bytes) -> dict[str, Any]:
    try:
        about = json.loads(data)
        return {"pushes": dict(about["pushes"]), "scales": dict(about["scales"])}
    except (ValueError, KeyError, TypeError) as cause:
        raise RestoreError(
            f"cannot take over the copy of a share: what came with its rows is {cause!r}"
        ) from cause
