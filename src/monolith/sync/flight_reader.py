"""A subscriber's end of the delta channel over Arrow Flight, see `flight_channel`."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch import Tensor

from monolith.cluster.addresses import Address
from monolith.errors import (
    CorruptMessageError,
    MonolithError,
    OverloadedError,
    RetryableError,
    UnavailableError,
)
from monolith.sync.channel import ShareLog
from monolith.sync.flight_calls import SERVICE, AnswerAbout, unpack_answer
from monolith.sync.messages import Delta, LogPlace, Message, PublishState, SnapshotBegin
from monolith.sync.wire_format import FRAME_LIMIT, decode_all, log_from_plain
from monolith.wire.flight import Caller, Clock, PortGuard

_LONGEST_WAIT = 20.0
"""Seconds that one call waits; more is several."""
_ANSWER_WITHIN = timedelta(seconds=45)
_OFFSET_WITHIN_S = 1.0
"""A call that took longer does not measure the publisher's clock: half of it is the error."""

_log = logging.getLogger(__name__)


class FlightDeltaReader:
    """Reads the shares that some processes publish. For one thread.

    Args:
        addresses: host:port of each process that publishes; or who knows them, asked whenever shares are.
        model: Which model's shares, where a process publishes several.
        guard: What to present; None where nothing is demanded.
        in_a_row: Whether the one address is that of share 0 of as many as there are, each at the port after
            that of the one before.
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
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self._addresses = addresses if callable(addresses) else lambda: addresses
        self._model = model
        self._guard = guard
        self._in_a_row = in_a_row
        self._limit = limit
        self._clock, self._wall = clock, wall
        self._name = secrets.token_hex(16)
        self._callers: dict[str, Caller] = {}
        self._where: dict[int, str] = {}
        """Share -> who publishes it."""
        self._incomplete = False
        """Whether some publishers could not be reached, which was said."""
        self._closed = False

    def shares(self) -> Sequence[ShareLog]:
        """Return what is published now; see `DeltaReader`.

        Where processes publish different numbers of shares, as some do while others are replaced, those count
        of which most are there.
        """
        found: list[tuple[str, ShareLog]] = []
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
                raise CorruptMessageError(f"{address} does not say which shares it publishes")
            offset = self._offset(answer.get("now"), asked_at, self._clock() - asked)
            found += [(address, replace(log_from_plain(one), clock_offset=offset)) for one in logs]
            if self._in_a_row and len(addresses) == 1 and len(found) == 1:
                addresses += _those_after(address, found[0][1])
        if failures and len(failures) == len(addresses):
            raise UnavailableError(f"no publisher can be reached: {'; '.join(failures)}")
        if failures and not self._incomplete:
            _log.warning("delta channel: some publishers cannot be reached: %s", "; ".join(failures))
        self._incomplete = bool(failures)
        kinds = Counter((log.run, log.share[1]) for _, log in found)
        kept = {
            log.share[0]: (where, log) for where, log in found if _kind(log) == kinds.most_common(1)[0][0]
        }
        self._where = {share: where for share, (where, _) in kept.items()}
        return [log for _, (_, log) in sorted(kept.items())]

    def _offset(self, now: object, asked_at: float, took: float) -> float | None:
        """Return how far a publisher's clock is ahead of ours, from the time it gave in the middle of a call.

        None if it gave none, as older ones do; or if the call took so long that the middle says little.
        """
        if isinstance(now, bool) or not isinstance(now, int | float) or took > _OFFSET_WITHIN_S:
            return None
        return now - (asked_at + took / 2)

    def read(self, share: int, after: LogPlace | None, *, wait: float) -> Iterator[Message]:
        """Yield what comes after a place; see `DeltaReader`."""
        place, state = after, -1
        give_up = self._clock() + wait
        while True:
            left = min(max(give_up - self._clock(), 0.0), _LONGEST_WAIT)
            after_place = None if place is None else asdict(place)
            about, frames = self._fetch(share, "deltas", after=after_place, state=state, wait=left)
            for message in decode_all(frames, limit=self._limit):
                if isinstance(message, PublishState):
                    state = message.number
                elif isinstance(message, Delta):
                    place = message.place
                yield message
            if about.behind:
                for message in self._snapshot(share, None):
                    if isinstance(message, SnapshotBegin):
                        place = message.place
                    yield message
            if len(frames) or about.behind:
                give_up = self._clock() + wait
            elif self._clock() >= give_up:
                return

    def read_buckets(self, share: int, buckets: Tensor) -> Iterator[Message]:
        """Yield a snapshot of these buckets."""
        return self._snapshot(share, [int(one) for one in buckets.tolist()])

    def close(self) -> None:
        """Say that it follows no more, where somebody hears it. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        for caller in self._callers.values():
            with suppress(MonolithError):
                caller.call("leave", reader=self._name)
            caller.close()

    def _snapshot(self, share: int, buckets: list[int] | None) -> Iterator[Message]:
        stream, chunk, where = "", 0, ""
        try:
            while chunk == 0 or stream:
                about, frames = self._fetch(share, "snapshot", stream=stream, chunk=chunk, buckets=buckets)
                stream, chunk, where = about.stream, chunk + 1, self._where[share]
                yield from decode_all(frames, limit=self._limit)
        finally:
            if stream:  # whoever reads has had enough
                with suppress(MonolithError):
                    self._caller(where).call("leave", reader=self._name, stream=stream)

    def _fetch(self, share: int, ask: str, **body: Any) -> tuple[AnswerAbout, memoryview]:
        if share not in self._where:
            self.shares()
        if share not in self._where:
            raise UnavailableError(f"nobody publishes share {share} of model {self._model!r}, or not yet")
        asked = {"ask": ask, "body": {"reader": self._name, "model": self._model, "share": share, **body}}
        try:
            with self._asking():
                return unpack_answer(self._caller(self._where[share]).fetch(asked))
        except UnavailableError:
            if ask == "deltas":
                self._where.pop(share, None)  # another may publish it by now
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


def _those_after(address: str, log: ShareLog) -> list[str]:
    """Return where the other shares are, if the first of them is here."""
    (number, total), first = log.share, Address.parse(address)
    if number != 0:
        return []
    return [str(Address(first.host, first.port + one)) for one in range(1, total) if first.port + one < 65536]


def _kind(log: ShareLog) -> tuple[str, int]:
    return log.run, log.share[1]
