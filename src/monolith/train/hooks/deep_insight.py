"""Deep insight: the predictions of single examples, for people who look at single examples.

A sample of each batch becomes messages, one JSON object an example. Version 1 tells of one
target; version 2, when targets are named, of several, and of further fields of the example:

    {"model_name": "m", "target": "ctr_head", "uid": 7, "req_time": 1700000000, "label": 1.0,
     "pred": 0.3, "sample_rate": 1.0}
    {"model_name": "m", "uid": 7, "req_time": 1700000000, "targets": ["click", "like"],
     "labels": [1.0, 0.0], "preds": [0.3, 0.1], "sample_rates": [1.0, 1.0],
     "extra_float": {"price": 2.5}, "extra_int": {"gid": 9}, "extra_str": {"city": "Bonn"}}
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monolith import concurrency, filesystem
from monolith.data.kafka.config import ClientLog, check_settings, import_kafka
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.filesystem.paths import is_url
from monolith.train.hook import Hook, StepResult, TrainingRun
from monolith.train.hooks.metric_sinks import MessageCounts, MessageQueue

_log = logging.getLogger(__name__)

SAMPLE_RATIO = 0.01
TARGET = "ctr_head"
UID = "uid"
REQ_TIME = "req_time"
SAMPLE_RATE = "sample_rate"

Column = Tensor | Sequence[str]
"""One value for each example: float or int64 of shape (n,), or texts."""
ReadField = Callable[[Batch, str], Column | None]
"""Reads a field of a batch; None if the batch does not have it."""


def read_field(batch: Batch, name: str) -> Column | None:
    """Return the first id of a feature, 0 where there is none, or the first number of a float feature."""
    if name in batch.ids.names:
        ids = batch.ids[name]
        starts, lengths = ids.row_splits[:-1], ids.row_splits.diff()
        first = torch.zeros(ids.nrows, dtype=torch.int64)
        first[lengths > 0] = ids.flat_values[starts[lengths > 0]]
        return first if len(first) == len(batch) else first.expand(len(batch))
    if name in batch.floats:
        return batch.floats[name].reshape(len(batch), -1)[:, 0]
    return None


def messages_v1(
    *,
    model_name: str,
    target: str = TARGET,
    uids: Tensor,
    req_times: Tensor,
    labels: Tensor,
    preds: Tensor,
    sample_rates: Tensor | None = None,
) -> list[str]:
    """Return a message for each example; all tensors have shape (n,), rates are 1 by default."""
    rates = torch.ones(len(uids)) if sample_rates is None else sample_rates
    columns = _same_length(
        {UID: uids, REQ_TIME: req_times, "label": labels, "pred": preds, SAMPLE_RATE: rates}
    )
    return [
        json.dumps({"model_name": model_name, "target": target, **dict(zip(columns, row, strict=True))})
        for row in zip(*columns.values(), strict=True)
    ]


def messages_v2(
    *,
    model_name: str,
    targets: Sequence[str],
    req_times: Tensor,
    labels: Tensor,
    preds: Tensor,
    sample_rates: Tensor | None = None,
    fields: Mapping[str, Column],
) -> list[str]:
    """Return a message for each example.

    Args:
        labels: Of shape (targets, n), as are `preds` and `sample_rates`.
        fields: Further fields, sorted by what they are into `extra_float`, `extra_int` and `extra_str`.
            `uid` must be among them and stands by itself.
    """
    if UID not in fields:
        raise ConfigError(f"deep insight: the field {UID!r} is mandatory, got {sorted(fields)}")
    rates = torch.ones_like(preds) if sample_rates is None else sample_rates
    for name, tensor in (("labels", labels), ("preds", preds), ("sample_rates", rates)):
        if tensor.shape != (len(targets), len(req_times)):
            raise ConfigError(
                f"deep insight: {name} must have shape ({len(targets)}, {len(req_times)}), "
                f"got {tuple(tensor.shape)}"
            )
    columns = _same_length({**fields, REQ_TIME: req_times})
    kinds: dict[str, list[str]] = {"extra_float": [], "extra_int": [], "extra_str": []}
    for name, column in fields.items():
        if name != UID:
            kinds[_kind_of(column)].append(name)
    by_target = {
        "labels": labels.t().tolist(),
        "preds": preds.t().tolist(),
        "sample_rates": rates.t().tolist(),
    }
    return [
        json.dumps(
            {
                "model_name": model_name,
                "uid": columns[UID][row],
                "req_time": columns[REQ_TIME][row],
                "targets": list(targets),
                **{name: values[row] for name, values in by_target.items()},
                **{kind: {name: columns[name][row] for name in names} for kind, names in kinds.items()},
            }
        )
        for row in range(len(req_times))
    ]


class DeepInsightHook(Hook):
    """Hands messages about a sample of the examples to sinks, after each step.

    Without a sink, or for batches without the time of the request, it does nothing.

    Args:
        target: Of version 1: the head to tell of; a model with a single head may call it otherwise.
        targets: Heads to tell of by version 2; none means version 1.
        extra_fields: Further fields for version 2; `uid` always comes along.
        read: Reads a field of a batch, for fields that are not simply features.
        generator: Chooses the sample.
    """

    def __init__(
        self,
        sinks: Sequence[FileMetricHook | KafkaMetricHook],
        *,
        model_name: str,
        sample_ratio: float = SAMPLE_RATIO,
        target: str = TARGET,
        targets: Sequence[str] = (),
        extra_fields: Sequence[str] = (),
        read: ReadField = read_field,
        generator: torch.Generator | None = None,
    ) -> None:
        if not 0 <= sample_ratio <= 1:
            raise ConfigError(f"deep insight: sample_ratio must be from 0 to 1, got {sample_ratio}")
        self._sinks = tuple(sinks)
        self._model_name = model_name
        self._ratio = sample_ratio
        self._target = target
        self._targets = tuple(targets)
        self._fields = tuple(dict.fromkeys((UID, *extra_fields)))
        self._read = read
        self._generator = generator
        self._silent = False

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if not self._sinks or not self._ratio or not result.examples:
            return
        chosen = torch.rand(result.examples, generator=self._generator) < self._ratio
        messages = self.messages(result, chosen.nonzero().flatten())
        if messages:
            for sink in self._sinks:
                sink.put(messages)

    def messages(self, result: StepResult, chosen: Tensor) -> list[str]:
        """Return the messages about the examples at these positions of a step's batch."""
        batch = result.batch
        req_times = self._read(batch, REQ_TIME)
        if req_times is None:
            if not self._silent:
                _log.warning("deep insight is off: the batches have no feature %r", REQ_TIME)
                self._silent = True
            return []
        times = _take(_tensor(REQ_TIME, req_times), chosen)
        heads = self._targets or (self._only_head(result),)
        labels = torch.stack([_take(batch.labels[head], chosen) for head in heads])
        preds = torch.stack([_take(result.predictions[head], chosen) for head in heads])
        rate = self._read(batch, SAMPLE_RATE)
        rates = None if rate is None else _take(_tensor(SAMPLE_RATE, rate), chosen).expand_as(preds)
        fields = {name: _some(self._field(batch, name), chosen) for name in self._fields}
        if self._targets:
            return messages_v2(
                model_name=self._model_name,
                targets=self._targets,
                req_times=times,
                labels=labels,
                preds=preds,
                sample_rates=rates,
                fields=fields,
            )
        return messages_v1(
            model_name=self._model_name,
            target=self._target,
            uids=_tensor(UID, fields[UID]),
            req_times=times,
            labels=labels[0],
            preds=preds[0],
            sample_rates=None if rates is None else rates[0],
        )

    def _only_head(self, result: StepResult) -> str:
        if self._target in result.predictions:
            return self._target
        if len(result.predictions) == 1:
            return next(iter(result.predictions))
        raise ConfigError(
            f"deep insight: the model has no head {self._target!r} but {', '.join(result.predictions)}; "
            "choose one as target, or several as targets"
        )

    def _field(self, batch: Batch, name: str) -> Column:
        column = self._read(batch, name)
        if column is None:
            raise ConfigError(
                f"deep insight: the batch has no field {name!r}; it has "
                f"{', '.join([*batch.ids.names, *batch.floats])}"
            )
        return column


def _kind_of(column: Column) -> str:
    if not isinstance(column, Tensor):
        return "extra_str"
    return "extra_float" if column.is_floating_point() else "extra_int"


def _same_length(columns: Mapping[str, Column]) -> dict[str, list[float | int | str]]:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"deep insight: fields must have one value for each example, got {lengths}")
    return {name: c.tolist() if isinstance(c, Tensor) else list(c) for name, c in columns.items()}


def _tensor(name: str, column: Column) -> Tensor:
    if not isinstance(column, Tensor):
        raise ConfigError(f"deep insight: the field {name!r} must be numeric, got strings")
    return column


def _take(tensor: Tensor, chosen: Tensor) -> Tensor:
    return tensor.detach().reshape(len(tensor), -1)[:, 0].cpu()[chosen]


def _some(column: Column, chosen: Tensor) -> Column:
    if isinstance(column, Tensor):
        return _take(column, chosen)
    return [column[place] for place in chosen.tolist()]


# Messages of a training run in files, by day.
#
#     <base>/<model>/<date>/worker_<i>/part_000000.txt
#
# The date is that of the request, in UTC. A line is `req_time;gid;uid;<json predict>;<json label>`.
# Lines are written in batches, and a part that is full is followed by the next; a run that
# resumes starts a new part next to the existing ones.


_PART = re.compile(r"part_(\d{6,})\.txt")

Layout = Callable[[str], tuple[str, str]]
"""Turns a message into the day it belongs to and the line to write; any exception marks it as bad."""


def insight_line(message: str) -> tuple[str, str]:
    """Return the day and the line of a deep-insight message, of either version."""
    found = json.loads(message)
    req_time = int(found["req_time"])
    if "targets" in found:
        preds = dict(zip(found["targets"], found["preds"], strict=True))
        labels = dict(zip(found["targets"], found["labels"], strict=True))
    else:
        preds, labels = {found["target"]: found["pred"]}, {found["target"]: found["label"]}
    gid = found.get("extra_int", {}).get("gid", "")
    day = datetime.fromtimestamp(req_time, UTC).strftime("%Y%m%d")
    return day, f"{req_time};{gid};{found['uid']};{json.dumps(preds)};{json.dumps(labels)}"


@dataclass(slots=True)
class _Day:
    """A day that is being written to."""

    folder: Path
    part: int
    in_part: int = 0
    used_at: float = 0.0
    lines: list[str] = field(default_factory=list)


class DayFiles:
    """Appends lines to the files of their days. One thread uses it.

    No file is held open between batches, so that a kill loses at most the batch in memory.

    Args:
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        base: str,
        model: str,
        worker: int = 0,
        *,
        batch_lines: int = 1024,
        part_lines: int = 1_000_000,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        if batch_lines < 1 or part_lines < 1:
            raise ConfigError(
                "file metrics: batch_lines and part_lines must be at least 1, "
                f"got {batch_lines} and {part_lines}"
            )
        if is_url(base):
            raise ConfigError(f"file metrics: appending to files needs a local folder; got {base!r}")
        if not model or "/" in model or model in (".", ".."):
            raise ConfigError(f"file metrics: {model!r} is not a valid folder name")
        self._root = Path(base) / model
        self._worker = worker
        self._batch = batch_lines
        self._most = part_lines
        self._clock = clock
        self._days: dict[str, _Day] = {}
        self.written = 0
        self.lost = 0
        """Lines that a disk would not take."""

    def add(self, day: str, line: str) -> None:
        """Append a line, which is on disk when its batch is full."""
        if "\n" in line:
            raise ConfigError("file metrics: a line has a line break in it")
        entry = self._days.get(day) or self._open(day)
        entry.used_at = self._clock()
        entry.lines.append(line)
        if len(entry.lines) >= self._batch or entry.in_part + len(entry.lines) >= self._most:
            self._write(entry)

    def flush(self) -> None:
        """Write all lines, of full batches or not."""
        for entry in self._days.values():
            self._write(entry)

    def close_idle(self, idle: timedelta) -> None:
        """Write all lines, and forget days that got none for this long."""
        self.flush()
        limit = self._clock() - idle.total_seconds()
        self._days = {day: entry for day, entry in self._days.items() if entry.used_at > limit}

    @property
    def days(self) -> list[str]:
        """Those being written to."""
        return sorted(self._days)

    def _open(self, day: str) -> _Day:
        folder = self._root / day / f"worker_{self._worker}"
        names = (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())
        found = [int(match[1]) for name in names if (match := _PART.fullmatch(name))]
        self._days[day] = _Day(folder, max(found, default=-1) + 1)
        return self._days[day]

    def _write(self, entry: _Day) -> None:
        lines, entry.lines = entry.lines, []
        if not lines:
            return
        try:
            filesystem.make_dirs(entry.folder)
            part = entry.folder / f"part_{entry.part:06d}.txt"
            opened = filesystem.open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(opened, "a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
        except OSError as error:
            if not self.lost:  # the queue behind this must not fill up, so these lines are gone
                _log.error("file metrics: cannot write to %s: %s", entry.folder, error)
            self.lost += len(lines)
            return
        self.written += len(lines)
        entry.in_part += len(lines)
        if entry.in_part >= self._most:
            entry.part, entry.in_part = entry.part + 1, 0


class FileMetricHook(Hook):
    """Writes messages to files of their day while a run lasts, from a thread of its own.

    A message that cannot be laid out as a line is counted as failed; other messages are written.

    Args:
        files: The files, which only this hook writes.
        layout: Of messages; by default that of deep insight.
        idle: How long a day may go without a line before it is forgotten.
        sweep: How often lines of unfinished batches are written and idle days are looked for.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        files: DayFiles,
        *,
        layout: Layout = insight_line,
        idle: timedelta = timedelta(hours=24),
        sweep: timedelta = timedelta(seconds=600),
        capacity: int = 100_000,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._files = files
        self._layout = layout
        self._queue = MessageQueue(
            "file-metrics",
            self._handle,
            capacity=capacity,
            tick=lambda: self._files.close_idle(idle),
            tick_secs=sweep.total_seconds(),
            clock=clock,
        )

    @property
    def counts(self) -> MessageCounts:
        """What became of the messages; those in an unfinished batch are in `total` only."""
        handled = self._queue.counts
        return MessageCounts(
            total=handled.total,
            success=self._files.written,
            failed=handled.failed + self._files.lost,
            dropped=handled.dropped,
        )

    def put(self, messages: Sequence[str]) -> None:
        self._queue.put(messages)

    def begin(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._queue.start()

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> None:
        self._queue.finish()
        self._files.flush()

    def _handle(self, message: str) -> bool:
        self._files.add(*self._layout(message))
        return False


# Messages of a training run to a Kafka topic, from a thread of their own.


_PAUSE_S = 0.2


class KafkaProducer:
    """A producer of confluent-kafka that reports the outcome of each message.

    Args:
        delivery_timeout: How long a message may wait for a broker to take it.
        settings: Anything else librdkafka knows.

    Raises:
        MissingExtraError: confluent-kafka is not installed.
        ConfigError: The client does not take the settings.
    """

    def __init__(
        self,
        brokers: Sequence[str],
        topic: str,
        *,
        delivery_timeout: timedelta = timedelta(seconds=30),
        settings: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        self._kafka = import_kafka()
        self._topic = topic
        check_settings(settings or {}, ())
        chosen: dict[str, Any] = {
            "linger.ms": 50,
            "message.timeout.ms": round(delivery_timeout.total_seconds() * 1000),
            **(settings or {}),
            "bootstrap.servers": ",".join(brokers),
        }
        try:
            self._producer = self._kafka.Producer(chosen, logger=ClientLog(_log))
        except self._kafka.KafkaException as cause:
            raise ConfigError(f"kafka metrics: the client rejects the settings: {cause}") from cause

    def send(self, payload: bytes, done: Callable[[bool], None]) -> None:
        while True:
            try:
                self._producer.produce(
                    self._topic, payload, on_delivery=lambda error, _message: done(error is None)
                )
                break
            except BufferError:  # full: what is in it is delivered or given up within delivery_timeout
                self._producer.poll(_PAUSE_S)
        self._producer.poll(0)

    def flush(self, timeout: timedelta) -> int:
        left: int = self._producer.flush(timeout.total_seconds())
        return left


class KafkaMetricHook(Hook):
    """Forwards messages to Kafka while a run lasts.

    `put` never waits. When the run ends, however it does, what is queued is sent and waited for, at
    most `flush_timeout`; what was not delivered by then counts as failed.
    """

    def __init__(
        self,
        producer: KafkaProducer,
        *,
        capacity: int = 100_000,
        flush_timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        self._producer = producer
        self._open = True
        self._timeout = flush_timeout
        self._queue = MessageQueue(
            "kafka-metrics", self._send, capacity=capacity, clock=concurrency.monotonic
        )

    @property
    def counts(self) -> MessageCounts:
        return self._queue.counts

    def put(self, messages: Sequence[str]) -> None:
        if self._open:
            self._queue.put(messages)

    def begin(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._queue.start()

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._queue.finish()
            self._queue.settle(failed=self._producer.flush(self._timeout))

    def _send(self, message: str) -> bool:
        self._producer.send(message.encode(), self._heard)
        return False

    def _heard(self, delivered: bool) -> None:
        self._queue.settle(success=int(delivered), failed=int(not delivered))
