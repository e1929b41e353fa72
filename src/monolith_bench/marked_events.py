"""Events at the pace of the clock, some of which show an item never seen before.

For `monolith bench freshness`. Event n happens n / rate seconds after the stream began and is read with its
batch, when the last event of that has happened. Every so manieth is marked: its item is new, and known by its
number.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from monolith.data import DataConfig, Pipeline, Position, Records, Stream
from monolith.data.records import LABEL, LINE_ID, BatchSpec
from monolith.feature import Batch
from monolith.model import DeepFM, Feature, TwoTower
from monolith.table import Adagrad, GroupAdagrad
from monolith.tensors import RaggedTensor
from monolith.train import Mode, RetrievalTask, Task
from monolith_bench.ids import zipf

HEAD = "click"
FEATURES = ("user", "item")
MARKED = 1 << 40
"""The id of the first marked item; the ids of later marked items follow it."""
NOBODY = 1 << 50
"""The id of a user, and of an item, that no event has."""
_TIME = LINE_ID + "req_time"
EVENT_SPEC = BatchSpec(ids=FEATURES, labels={HEAD: (LABEL, 0)}, event_time=_TIME)
_TYPES = {"user": torch.int64, "item": torch.int64, LABEL: torch.float32, _TIME: torch.int64}
_DRAWN = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshnessJob:
    """What is trained, settled: what both processes must agree on."""

    model_dir: str
    rows: int
    """Of users, and as many of items."""
    dim: int = 16
    hidden: tuple[int, ...] = (64, 32)
    batch: int = 100
    rate: int | None = None
    """Events per second; None hands them out as fast as they are taken."""
    mark_every: int = 200
    """Events from one that is marked to the next; 0 marks none."""
    seed: int = 0
    file: str = ""
    """The file that others append the events to, in place of a stream within the process."""
    towers: bool = False
    """Whether the model is a two-tower model, in place of a DeepFM."""
    out: int = 16
    """Floats of the vector of a user, and of an item, of a two-tower model."""
    remove_after: float = 0.0
    """Seconds after a marked event in which the trainer removes its item; 0 keeps it."""

    def mark_at(self, number: int) -> float:
        """Return how many seconds after the beginning a marked event happens."""
        assert self.rate is not None
        return number * self.mark_every / self.rate

    def batch_of_mark(self, number: int) -> int:
        """Return the number of the batch that has a marked event."""
        return number * self.mark_every // self.batch

    def user_of_mark(self, number: int) -> int:
        """Return the user of a marked event, who is in few other events and has a row."""
        return self.rows - 1 - number % self.rows


class MarkedEvents:
    """A source of events as they happen. What has passed when it begins is gone.

    Args:
        clock: Returns Unix seconds.
        sleep: Waits so many seconds.
    """

    repeats = True
    live = True

    def __init__(
        self,
        job: FreshnessJob,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job = job
        self._clock = clock
        self._sleep = sleep
        self._next = 0
        self.began = 0.0
        """When the first event happened; 0 before it was waited for."""
        self.read: list[float] = []
        """When each batch was read; empty if the job has no rate."""
        random = np.random.default_rng(job.seed)
        count = max(job.batch, _DRAWN // job.batch * job.batch)
        self._ids = {name: _drawn(job.rows, count, random) for name in FEATURES}
        self._labels = torch.from_numpy(random.integers(0, 2, count)).float()

    def __iter__(self) -> Iterator[Records]:
        job = self._job
        if not self.began:
            self.began = self._clock()
        while True:
            first, end = self._next, self._next + job.batch
            if job.rate is not None:
                ahead = self.began + end / job.rate - self._clock()
                if ahead > 0:
                    self._sleep(ahead)
                self.read.append(self._clock())
            self._next = end
            yield self.records(first)

    def records(self, first: int) -> Records:
        """Return the batch that begins with this event."""
        job = self._job
        begin = first % len(self._labels)
        span = slice(begin, begin + job.batch)
        columns = {name: ids[span] for name, ids in self._ids.items()}
        columns[LABEL] = self._labels[span]
        times = self.began + (first + np.arange(job.batch)) / (job.rate or 1e9)
        columns[_TIME] = torch.from_numpy(times.astype(np.int64))
        if job.mark_every:
            marked = torch.tensor(
                range(-first % job.mark_every, job.batch, job.mark_every), dtype=torch.int64
            )
            if len(marked):
                numbers = (first + marked) // job.mark_every
                for name in (*FEATURES, LABEL):
                    columns[name] = columns[name].clone()
                columns["user"][marked] = torch.tensor([job.user_of_mark(one) for one in numbers.tolist()])
                columns["item"][marked] = MARKED + numbers
                columns[LABEL][marked] = 1.0
        return Records(job.batch, {name: _plain(column) for name, column in columns.items()})

    def position(self) -> Position:
        return {"source": "live", "next": self._next}

    def restore(self, position: Position) -> None:
        """Do nothing: what passed is gone."""

    def commit(self, position: Position) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class EventsWriter:
    """Appends events to a CSV file as they happen, one line each, in a thread of its own.

    Args:
        job: Names the file.
    """

    def __init__(self, job: FreshnessJob) -> None:
        assert job.rate is not None, "events have a pace"
        self._job = job
        self._events = MarkedEvents(job)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, name="events", daemon=True)
        self.began = self._events.began = time.time()
        """When the first event happened."""
        with Path(job.file).open("w") as file:
            file.write(",".join(_TYPES) + "\n")

    def _write(self) -> None:
        job = self._job
        assert job.rate is not None
        with Path(job.file).open("a", buffering=1) as file:  # a line at a time
            for first in itertools.count(0, job.batch):
                records = self._events.records(first)
                columns = [records[name].flat_values.tolist() for name in _TYPES]
                for number, values in enumerate(zip(*columns, strict=True), first):
                    ahead = self.began + number / job.rate - time.time()
                    if self._closed.wait(max(ahead, 0.0)):
                        return
                    file.write(",".join(map(str, values)) + "\n")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()


class MarkedClicks(Task):
    """Learns from live events.

    Args:
        events: Where they come from, for one run; by default a stream that begins then.
    """

    def __init__(self, job: FreshnessJob, events: MarkedEvents | None = None) -> None:
        self._job = job
        self._events = events

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        if self._job.file:
            files = DataConfig(watch=self._job.file, columns=tuple(_TYPES))
            return Pipeline(files.source(self._job.batch, types=_TYPES)).to_batches(EVENT_SPEC)
        return Pipeline(MarkedEvents(self._job) if self._events is None else self._events).to_batches(
            EVENT_SPEC
        )

    def model(self) -> nn.Module:
        rows = Adagrad(learning_rate=0.1)
        return DeepFM(
            FEATURES,
            dim=self._job.dim,
            hidden=self._job.hidden,
            optimizer=rows,
            bias_optimizer=rows,
            seed=self._job.seed,
            threads=1,
        )

    def describe(self) -> dict[str, Any]:
        return {"dim": self._job.dim}


class MarkedLikes(RetrievalTask):
    """Learns from live events which items users like.

    A new item should be in its user's list after a single step. So its row moves far, in the direction of its
    gradient, which is that of the user's vector; that itself hardly moves. And vectors have length 1, so that
    popular items are not in all lists.

    Args:
        events: Where they come from, for one run; by default a stream that begins then.
    """

    def __init__(self, job: FreshnessJob, events: MarkedEvents | None = None) -> None:
        self._job = job
        self._events = events

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        return Pipeline(self._events or MarkedEvents(self._job)).to_batches(EVENT_SPEC)

    def candidates(self) -> Stream[Batch]:
        raise NotImplementedError("made-up items are not evaluated")

    def model(self) -> TwoTower:
        job = self._job
        return TwoTower(
            [
                Feature(name="user", optimizer=Adagrad(learning_rate=0.001)),
                Feature(
                    name="item", optimizer=GroupAdagrad(learning_rate=1.0, initial_accumulator_value=1e-9)
                ),
            ],
            item=("item",),
            dim=job.dim,
            hidden=job.hidden,
            out=job.out,
            similarity="cosine",
            negatives="batch",
            correction=False,
            seed=job.seed,
            threads=1,
        )

    def describe(self) -> dict[str, Any]:
        return {"dim": self._job.dim}


def task_of(job: FreshnessJob, events: MarkedEvents | None = None) -> Task:
    """Return what learns from the events of a job."""
    return MarkedLikes(job, events) if job.towers else MarkedClicks(job, events)


def _drawn(rows: int, count: int, random: np.random.Generator) -> Tensor:
    return torch.from_numpy(zipf(rows, count, random).astype(np.int64))


def _plain(column: Tensor) -> RaggedTensor:
    """Return a column with one value in each record."""
    return RaggedTensor(column, torch.arange(len(column) + 1), validate=False)
