"""A trainer that is none: deltas of made-up rows at a steady pace, for a server to apply."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from monolith.errors import UnavailableError
from monolith.sync.channel import ShardLog
from monolith.sync.flight_channel import DeltaPort
from monolith.sync.messages import Delta, LearnedUpTo, LogPosition, Message, PublishState
from monolith.table import Rows

START = LogPosition("bench", 0)
"""What a server has that begins with the export."""
_DRAWN = 16


class RowFeed:
    """Publishes rows over Flight, made before the clock starts. Used by one thread, in addition to its own.

    Args:
        widths: The floats in a row of each table.
        ids: Of each table: from 0 on.
        rows: In each delta, spread evenly over the tables.
        interval: Seconds between deltas.
    """

    def __init__(
        self, widths: Mapping[str, int], *, ids: int, rows: int, interval: float, seed: int = 0
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        each = max(1, min(ids, rows // len(widths)))
        self.rows = each * len(widths)
        self._drawn = [
            {name: _rows(ids, each, width, random) for name, width in widths.items()} for _ in range(_DRAWN)
        ]
        self._interval = interval
        self._port = DeltaPort()
        self._writer = self._port.writer()
        self._writer.open(ShardLog("bench", (0, 1), START, 1, dict(widths)), _no_snapshot)
        self._writer.set_state(PublishState(number=1))
        self._place = START
        self._going = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_feeding, name="row-feed", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"grpc://{self._port.address}"

    @property
    def sequence(self) -> int:
        """Of the newest delta; answers say it as the step."""
        return self._place.sequence

    def next_ids(self, count: int) -> dict[str, list[int]]:
        """Return some of the ids of each table that the next delta changes."""
        rows = self._drawn[(self.sequence + 1) % _DRAWN]
        return {name: one.ids[:count].tolist() for name, one in rows.items()}

    def publish(self) -> None:
        """Publish one delta now. Only while it does not go by itself."""
        place = replace(self._place, sequence=self._place.sequence + 1)
        learned = LearnedUpTo(step=place.sequence, published_at=time.time())
        rows = self._drawn[place.sequence % _DRAWN]
        self._writer.append(Delta("bench", (0, 1), place, learned, rows))
        self._place = place

    def go(self) -> None:
        """Publish at the pace from now on."""
        self._going.set()

    def rest(self) -> None:
        """Publish nothing until the next `go`."""
        self._going.clear()

    def go_back(self, version: str) -> None:
        """Have servers roll back to an exported version."""
        self._writer.set_state(PublishState(paused=True, reason="bench", version=version, number=2))

    def _keep_feeding(self) -> None:
        while not self._stop.is_set():
            if not self._going.wait(0.1):
                continue
            due = time.monotonic()
            while self._going.is_set() and not self._stop.wait(max(0.0, due - time.monotonic())):
                self.publish()
                due += self._interval

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._going.set()
        self._thread.join()
        self._port.close()


def _rows(ids: int, count: int, width: int, random: torch.Generator) -> Rows:
    chosen = torch.randperm(ids, generator=random)[:count]
    values = torch.rand(count, width, generator=random) * 0.1 - 0.05
    return Rows(chosen, torch.ones(count, dtype=torch.int64), values, torch.empty(count, 0))


def _no_snapshot(buckets: Tensor | None = None) -> Iterator[Message]:  # noqa: ARG001
    raise UnavailableError("a feed has no rows but those of its deltas")
