"""The groups of a run: what connects its ranks, for each thread that talks to the others one.

    lookups    ids out and rows back, ahead of a step
    pushes     gradients of rows, behind it
    dense      gradients of the weights, while backward goes on
    control    between two steps: stop, halt, save. It waits for as long as it takes.
    pulse      says that everybody is alive; see `Pulse`
    calls      questions at any time; see `RankCalls`

When a rank is lost, everything is broken off, on every rank: a run of ranks goes on with all or not at all.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch

from monolith.cuda import CudaDevice
from monolith.errors import ClusterError, RetryableError
from monolith.store.collective import Collective, Pulse, make_group
from monolith.store.rank_calls import RankCalls, RankPort
from monolith.store.rank_keys import RankKeys, prefixed
from monolith.wire.bulk import Traffic, TrafficMeter

_log = logging.getLogger(__name__)

ENDLESS = timedelta(days=30)
"""How long a rank may wait for the others between steps, as long as their pulse is there."""
TIMEOUT = timedelta(minutes=30)
SILENCE = timedelta(seconds=60)
LET_GO_WITHIN = 10.0
"""Seconds that closed connections may take: the others close theirs at the same time."""


class RankGroups:
    """What connects this rank to the others. Made by every rank at the same time; whoever makes it closes it.

    Args:
        keys: Shared by all ranks of this attempt.
        rank: Which one this is.
        size: How many there are.
        port: Where this rank listens, and what it demands of callers.
        timeout: How long one exchange of a step may take.
        silence: How long a rank may be silent, over connections that are whole, before it counts as lost; and
            how long the ranks may take to connect, once all are there.
        backend: gloo, or nccl: then the gradients of weights are summed on the GPU.
        rows_backend: gloo, which takes rows and their gradients through the memory of the host, wherever
            tables are, or nccl: from GPU to GPU, for tables that are there. NCCL wants a GPU for each rank.

    Raises:
        UnavailableError: Not all ranks were there in time.
    """

    def __init__(
        self,
        keys: RankKeys,
        rank: int,
        size: int,
        *,
        port: RankPort,
        timeout: timedelta = TIMEOUT,
        silence: timedelta = SILENCE,
        backend: str = "gloo",
        rows_backend: str = "gloo",
        pulse_every: timedelta = timedelta(seconds=1),
    ) -> None:
        self.rank = rank
        self.size = size
        self._keys = keys
        self._traffic = TrafficMeter()
        self._lock = threading.Lock()  # guards what follows
        self._lost: RetryableError | None = None
        self._closed = self._parting = False
        self._collectives: list[Collective] = []

        def collective(name: str, limit: timedelta, kind: str = "gloo") -> Collective:
            group = make_group(
                prefixed(keys, name),
                rank,
                size,
                host=port.host,
                connect=silence,
                timeout=limit,
                backend=kind,
            )
            device = CudaDevice.of().torch_device if kind == "nccl" else torch.device("cpu")
            found = Collective(group, name, device=device, traffic=self._traffic)
            found.ask_why(self._why)
            self._collectives.append(found)
            return found

        self.calls = RankCalls(keys, rank, size, port, timeout=timeout)
        try:
            self.lookups = collective("lookups", timeout, rows_backend)
            self.pushes = collective("pushes", timeout, rows_backend)
            self.dense = collective("dense", timeout, backend)
            self.control = collective("control", ENDLESS)
            self.calls.find_others()
            self._pulse = Pulse(collective("pulse", silence), self._lose, pulse_every)
        except BaseException:
            self.calls.close()
            for made in self._collectives:
                made.abort()
            raise

    @property
    def traffic(self) -> Traffic:
        """What came from other ranks, and went to them."""
        return self._traffic.total()

    def check(self) -> None:
        """Raise if a rank was lost.

        Raises:
            RetryableError: One was.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost

    def say(self, key: str, value: str) -> None:
        """Leave a word for the others; what was there before is replaced."""
        with suppress(ClusterError):
            self._keys.set(f"said/{key}", value)

    def said(self, key: str) -> str:
        """Return the note that a rank left under a key; "" for none.

        Raises:
            UnavailableError: The process that keeps the keys is gone.
        """
        return (self._keys.peek(f"said/{key}") or b"").decode()

    def part(self) -> None:
        """Hear that the run is over: from now on it is no loss if others are gone."""
        self._parting = True

    def fail(self, text: str) -> None:
        """Say why this rank cannot go on, and break everything off, for all. It never raises."""
        self._keys.fail(self.rank, text)
        self.close()

    def break_off(self, error: RetryableError) -> None:
        """End the attempt for all, because of what all need and no rank is. From any thread."""
        self._keys.fail(self.rank, str(error))
        self._lose(error)

    def close(self) -> None:
        """Let go of the others. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._abort()
        self._pulse.close()
        self.calls.close()
        deadline = time.monotonic() + LET_GO_WITHIN
        for collective in self._collectives:
            collective.let_go(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _abort(self) -> None:
        for collective in (self.lookups, self.pushes, self.dense, self.control):
            collective.abort()

    def _lose(self, error: RetryableError) -> None:
        if self._parting:
            return
        _log.warning("rank %d lost others: %s", self.rank, error)
        with self._lock:
            self._lost = self._lost or error
        self.calls.fail(error)
        self._abort()

    def _why(self) -> RetryableError | None:
        """Return why a call failed, if a rank has said so."""
        with suppress(ClusterError):
            if (failure := self._keys.failure()) is not None:
                return failure
        with self._lock:
            return self._lost
