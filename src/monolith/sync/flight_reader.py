"""A subscriber's end of the delta channel over Arrow Flight, see `flight_channel`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch import Tensor

from monolith import concurrency
from monolith.cluster.addresses import Address
from monolith.errors import (
    CorruptMessageError,
    MonolithError,
    OverloadedError,
    RetryableError,
    UnavailableError,
)
from monolith.sync.channel import ShardLog
from monolith.sync.flight_channel import SERVICE, AnswerAbout, unpack_answer
from monolith.sync.messages import Delta, LogPosition, Message, PublishState, SnapshotBegin
from monolith.sync.wire_format import FRAME_LIMIT, decode_all, log_from_plain
from monolith.wire.flight import Caller, Clock
from monolith.wire.transport import PortGuard

_LONGEST_WAIT = 20.0
"""Seconds that one call waits; a longer wait is several calls."""
_ANSWER_WITHIN = timedelta(seconds=45)
_OFFSET_WITHIN_S = 1.0
"""A call that took longer does not measure the publisher's clock: half of its duration is the error."""

_log = logging.getLogger(__name__)


class FlightDeltaReader:
    """Reads the shards that some processes publish. For one thread.

    Args:
        addresses: host:port of each publisher; or a function that returns them, called by each `logs`.
        model: The model to read, if a process publishes several.
        guard: Credentials to present; None if the publisher demands none.
        in_a_row: The one address is that of shard 0, and each further shard is at the next port.
        limit: The most bytes of one frame.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        addresses: Sequence[str] | Callable[[], Sequence[str]],
        *,
        model: str = "",
        guard: PortGuard | None = None,
        in_a_row: bool = False,
        limit: int = FRAME_LIMIT,
        clock: Clock = concurrency.monotonic,
        wall: Clock = concurrency.time,
    ) -> None:
        self._addresses = addresses if callable(addresses) else lambda: addresses
        self._model = model
        self._guard = guard
        self._in_a_row = in_a_row
        self._limit = limit
        self._clock, self._wall = clock, wall
        self._name = concurrency.token_hex(16)
        self._callers: dict[str, Caller] = {}
        self._where: dict[int, str] = {}
        """Shard -> address of its publisher."""
        self._incomplete = False
        """Whether some publishers could not be reached, which has been logged."""
        self._closed = False

    def logs(self) -> Sequence[ShardLog]:
        """Return the logs that are published now; see `DeltaReader`.

        While processes are replaced, some may publish another number of shards than the rest. Then the logs
        of the larger group are returned.
        """
        found: list[tuple[str, ShardLog]] = []
        failures: list[str] = []
        addresses = list(dict.fromkeys(self._addresses()))
        for address in addresses:
            asked, asked_at = self._clock(), self._wall()
            try:
                with self._asking():
                    answer = self._caller(address).call("shares", reader=self._name, model=self._model)
            except RetryableError as error:
                failures.append(str(error))
                continue
            logs = answer.get("shares")
            if not isinstance(logs, list):
                raise CorruptMessageError(f"{address} does not tell which shards it publishes")
            offset = self._offset(answer.get("now"), asked_at, self._clock() - asked)
            found += [(address, replace(log_from_plain(one), clock_offset=offset)) for one in logs]
            if self._in_a_row and len(addresses) == 1 and len(found) == 1:
                addresses += _next_ports(address, found[0][1])
        if failures and len(failures) == len(addresses):
            raise UnavailableError(f"no publisher can be reached: {'; '.join(failures)}")
        if failures and not self._incomplete:
            _log.warning("delta channel: some publishers cannot be reached: %s", "; ".join(failures))
        self._incomplete = bool(failures)
        kinds = Counter((log.run, log.shard[1]) for _, log in found)
        kept = {
            log.shard[0]: (where, log) for where, log in found if _kind(log) == kinds.most_common(1)[0][0]
        }
        self._where = {shard: where for shard, (where, _) in kept.items()}
        return [log for _, (_, log) in sorted(kept.items())]

    def _offset(self, now: object, asked_at: float, took: float) -> float | None:
        """Return how far a publisher's clock is ahead of ours, from the time it told in the middle of a call.

        None if it told none, as older releases do; or if the call took too long to measure anything.
        """
        if isinstance(now, bool) or not isinstance(now, int | float) or took > _OFFSET_WITHIN_S:
            return None
        return now - (asked_at + took / 2)

    def read(self, shard: int, after: LogPosition | None, *, wait: float) -> Iterator[Message]:
        """Yield the messages after a position; see `DeltaReader`."""
        position, state = after, -1
        give_up = self._clock() + wait
        while True:
            left = min(max(give_up - self._clock(), 0.0), _LONGEST_WAIT)
            after_position = None if position is None else asdict(position)
            about, frames = self._fetch(shard, "deltas", after=after_position, state=state, wait=left)
            for message in decode_all(frames, limit=self._limit):
                if isinstance(message, PublishState):
                    state = message.number
                elif isinstance(message, Delta):
                    position = message.position
                yield message
            if about.behind:
                for message in self._snapshot(shard, None):
                    if isinstance(message, SnapshotBegin):
                        position = message.position
                    yield message
            if len(frames) or about.behind:
                give_up = self._clock() + wait
            elif self._clock() >= give_up:
                return

    def read_buckets(self, shard: int, buckets: Tensor) -> Iterator[Message]:
        """Yield a snapshot of these buckets."""
        return self._snapshot(shard, [int(one) for one in buckets.tolist()])

    def close(self) -> None:
        """Tell the publishers that can be reached, and disconnect. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        for caller in self._callers.values():
            with suppress(MonolithError):
                caller.call("leave", reader=self._name)
            caller.close()

    def _snapshot(self, shard: int, buckets: list[int] | None) -> Iterator[Message]:
        stream, chunk, where = "", 0, ""
        try:
            while chunk == 0 or stream:
                about, frames = self._fetch(shard, "snapshot", stream=stream, chunk=chunk, buckets=buckets)
                stream, chunk, where = about.stream, chunk + 1, self._where[shard]
                yield from decode_all(frames, limit=self._limit)
        finally:
            if stream:  # the subscriber stopped reading in the middle
                with suppress(MonolithError):
                    self._caller(where).call("leave", reader=self._name, stream=stream)

    def _fetch(self, shard: int, ask: str, **body: Any) -> tuple[AnswerAbout, memoryview]:
        if shard not in self._where:
            self.logs()
        if shard not in self._where:
            raise UnavailableError(
                f"no publisher of shard {shard} of model {self._model!r} was found; retry later"
            )
        asked = {"ask": ask, "body": {"reader": self._name, "model": self._model, "share": shard, **body}}
        try:
            with self._asking():
                return unpack_answer(self._caller(self._where[shard]).fetch(asked))
        except UnavailableError:
            if ask == "deltas":
                self._where.pop(shard, None)  # another process may publish it by now
            raise

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except OverloadedError as cause:
            raise UnavailableError(f"a publisher has too many readers: {cause}") from cause

    def _caller(self, address: str) -> Caller:
        if address not in self._callers:
            self._callers[address] = Caller(SERVICE, address, guard=self._guard, timeout=_ANSWER_WITHIN)
        return self._callers[address]


def _next_ports(address: str, log: ShardLog) -> list[str]:
    """Return the addresses of the remaining shards, if shard 0 is at this one."""
    (number, total), first = log.shard, Address.parse(address)
    if number != 0:
        return []
    return [str(Address(first.host, first.port + one)) for one in range(1, total) if first.port + one < 65536]


def _kind(log: ShardLog) -> tuple[str, int]:
    return log.run, log.shard[1]
