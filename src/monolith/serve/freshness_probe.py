"""Probing freshness: the time from an event in the stream to an answer that reflects it.

A probe takes a row with an unseen ID. Such an ID has no row in the table, so the model answers it like any
other unseen ID. The probe writes the row into the stream that the trainer reads, and sends it to the server
together with a second unseen ID that is not written. While the two answers are equal, the event is not
served. Dense weights that are swapped meanwhile change both answers equally.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from monolith import concurrency, filesystem
from monolith.data import KafkaSink
from monolith.errors import ConfigError, DeadlineExceededError
from monolith.serve.client_messages import ClientAnswer
from monolith.serve.rows import ServedUpTo
from monolith.sync.messages import LearnedUpTo

Row = Mapping[str, Any]
Ask = Callable[[Sequence[Row]], ClientAnswer]
"""Sends rows to the server and returns its answer."""


class WritesEvents(Protocol):
    """Writes events to the stream that a trainer reads."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class FolderEvents:
    """Writes each event to a folder that a trainer watches, as a file of one JSON line."""

    def __init__(self, folder: str) -> None:
        if not filesystem.is_folder(folder):
            raise ConfigError(f"cannot write events to {folder}: it is no folder")
        self._folder = folder

    def write(self, row: Row) -> None:
        path = filesystem.join(self._folder, f"probe-{time.time_ns()}-{concurrency.token_hex(4)}.jsonl")
        with filesystem.atomic_write(path) as file:
            file.write(json.dumps(dict(row)).encode() + b"\n")

    def close(self) -> None:
        """Do nothing: files stay."""


class KafkaEvents:
    """Sends each event to a topic, as a message in JSON."""

    def __init__(self, servers: Sequence[str], topic: str) -> None:
        self._sink = KafkaSink(servers, topic, settings={"linger.ms": 0})

    def write(self, row: Row) -> None:
        self._sink.send([json.dumps(dict(row)).encode()])
        self._sink.flush()

    def close(self) -> None:
        self._sink.close()


def open_events(source: str) -> WritesEvents:
    """Return a writer of events to kafka://broker[,broker]/topic, or to a folder that is watched for files.

    Raises:
        ConfigError: It is neither.
    """
    parts = urlsplit(source)
    if parts.scheme == "kafka":
        servers, topic = [one for one in parts.netloc.split(",") if one], parts.path.strip("/")
        if not servers or not topic:
            raise ConfigError(f"cannot write events to {source!r}: write kafka://broker:9092/topic")
        return KafkaEvents(servers, topic)
    if parts.scheme not in ("", "file"):
        raise ConfigError(
            f"cannot write events to {source!r}: write kafka://broker:9092/topic, or the folder of a trainer "
            "that watches for new .jsonl files"
        )
    return FolderEvents(str(Path(parts.path)) if parts.scheme == "file" else source)


@dataclass(frozen=True, slots=True)
class Probed:
    """One event, and the time until an answer reflected it."""

    seconds: float
    """Seconds from before the event was written to the answer that differed."""
    asked: int
    """Number of requests that were sent."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage, from the answer that differed; empty if it does not state them."""


class FreshnessProbe:
    """Probes one server.

    Args:
        ask: Sends rows to the model.
        row: All columns of an event, labels included.
        column: The column whose ID is replaced by a new one.
        event_time: The column that is set to the time of writing, in Unix seconds; None if events have no
            times.
        pause: Seconds between two requests.
        clock: Unix seconds, for the event's time.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        ask: Ask,
        row: Row,
        column: str,
        *,
        event_time: str | None = None,
        pause: float = 0.01,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
        sleep: Callable[[float], None] = concurrency.sleep,
    ) -> None:
        if column not in row:
            raise ConfigError(f"freshness: the row has no column {column!r}; it has {', '.join(row)}")
        self._ask = ask
        self._row, self._column, self._event_time = row, column, event_time
        self._pause, self._clock, self._timer, self._sleep = pause, clock, timer, sleep

    def probe(self, events: WritesEvents, timeout: float) -> Probed:
        """Write an event, and ask until an answer reflects it.

        Raises:
            ConfigError: The model answers two unseen IDs differently, so the probe cannot work.
            DeadlineExceededError: No answer did within the timeout.
        """
        marked, control = self._unseen(), self._unseen()
        if self._differ(self._ask([marked, control])):
            raise ConfigError(
                f"freshness: the model answers two unseen IDs of {self._column!r} differently; name a column "
                "whose IDs have rows of their own"
            )
        begun = self._timer()
        event = dict(marked)
        if self._event_time is not None:
            event[self._event_time] = int(self._clock())
        events.write(event)
        asked = 0
        while self._timer() - begun < timeout:
            answered = self._ask([marked, control])
            asked += 1
            if self._differ(answered):
                return Probed(self._timer() - begun, asked, stages_of(answered.parameters))
            self._sleep(self._pause)
        raise DeadlineExceededError(
            f"the answer for a new {self._column} did not change within {timeout:g} s ({asked} requests). "
            "Does the trainer read this source, admit an id at once, and publish?"
        )

    def _unseen(self) -> dict[str, Any]:
        return {**self._row, self._column: _unseen_like(self._row[self._column])}

    @staticmethod
    def _differ(answered: ClientAnswer) -> bool:
        return any(not np.array_equal(values[0], values[1]) for values in answered.outputs.values())


def _unseen_like(value: Any) -> Any:
    if isinstance(value, list):
        return [_unseen_like(value[0] if value else "")]
    if isinstance(value, str):
        return f"probe-{concurrency.token_hex(8)}"
    return secrets.randbits(47)


def up_to_of(parameters: Mapping[str, Any]) -> ServedUpTo:
    """Return how far an answer follows its trainer; 0 for values that it does not state."""
    event, read, trained, published, received, applied = (
        float(parameters.get(name, 0.0))
        for name in ("event_at", "read_at", "trained_at", "published_at", "received_at", "applied_at")
    )
    step, watermark = int(parameters.get("step", 0)), int(parameters.get("watermark", 0))
    return ServedUpTo(LearnedUpTo(step, watermark, event, read, trained, published), received, applied)


def stages_of(parameters: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each stage that an answer states."""
    return up_to_of(parameters).stages()


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the value that this fraction of the values does not exceed; `values` is not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(fraction * len(ordered), 9)) - 1)]
