"""Every implementation of the source seam, over the same records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import torch
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS

from monolith.data import Format, HistoryConfig, JoinedSource, JoinerConfig, Position, Records, Source
from monolith.data.files.discovery import Watch
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.formats import PayloadParser, PayloadWriter
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.memory import MemorySource, to_records
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.formats.tables import ArrowSource, IterableSource, PandasSource, PolarsSource
from monolith.data.formats.tfrecord import TfRecordFormat
from monolith.data.kafka import ByWorker, KafkaConfig, KafkaSink, KafkaSource
from monolith.data.pipeline import Pipeline
from monolith.data.service import DataJobConfig, DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher
from monolith.data.shuffling import ShuffleConfig
from monolith.data.synthetic.drift import DriftConfig, DriftingStream
from monolith.data.transforms import MergeFlow
from monolith.tensors import RaggedTensor

COUNT = 13
IDS = list(range(100, 100 + COUNT))
SIZES = (3, 1, 0, 5, 4)
"""Records per file: one of a single record, which has all columns, and one of none."""
CUTS = ((13,), (4, 9), (1, 2, 10), SIZES)
"""Other numbers of files for the same records, of unequal sizes."""
CUT = "cut.json"
"""Put into a folder, it has the sizes of the files that sources make there."""


def some_records(ids: Sequence[int] = tuple(IDS)) -> Records:
    """Records whose other columns follow from their id: 0 to 2 tags, and a name or none."""
    return to_records(
        {
            "id": [[one] for one in ids],
            "tags": torch_tags(ids),
            "name": [[f"n{one}"] if one % 2 else [] for one in ids],
        }
    )


def torch_tags(ids: Sequence[int]) -> list[list[int]]:
    return [[one * 10 + number for number in range(one % 3)] for one in ids]


def ids_of(batches: Sequence[Records] | Source | Iterator[Records]) -> list[int]:
    """The ids of all records, in order; each record must be whole."""
    ids: list[int] = []
    for batch in batches:
        here = batch["id"].flat_values.tolist()
        assert len(here) == len(batch) > 0
        # A file of messages knows only the columns that some record of it has.
        tags = batch["tags"].to_list() if "tags" in batch.columns else [[] for _ in here]
        assert tags == torch_tags(here)
        if "name" in batch.columns:
            assert batch.strings("name") == [[b"n%d" % one] if one % 2 else [] for one in here]
        ids += here
    return ids


@dataclass(frozen=True)
class Case:
    """One kind of source."""

    make: Callable[..., Source]
    """Takes a folder of its own, in which there may be files from an earlier call; then options."""
    ids: Sequence[int] = field(default_factory=lambda: tuple(IDS))
    """What comes out, in whatever order."""
    options: frozenset[str] = frozenset()
    """Which of worker (with num_workers), epochs and seed it takes, besides batch_size."""
    shares: Mapping[str, Any] | None = field(default_factory=dict)
    """Options with which several workers can share it out; None where what comes out depends on how many
    there are, or nothing can be shared."""
    in_files: bool = False
    """Whether it reads what `write_files` writes."""
    service: str | None = None
    """The fixture of a server that `make` is given as `service`."""


def write_files(folder: Path, form: Format) -> list[str]:
    """Write the records into a few files, unless they are there."""
    cut = folder / CUT
    sizes = tuple(json.loads(cut.read_text())) if cut.exists() else SIZES
    paths = [folder / f"{number:02}.{form.name}" for number in range(len(sizes))]
    for path, content in zip(paths, _encoded(form, sizes), strict=True):
        if not path.exists():
            path.write_bytes(content)
    return [str(path) for path in paths]


@cache
def _encoded(form: Format, sizes: Sequence[int]) -> list[bytes]:
    """The files of a format, which are the same for all tests."""
    found, first = [], 0
    with TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder) / f"file.{form.name}"
            with form.writer(str(path)) as writer:
                writer.write(some_records(IDS[first : first + size]))
            found.append(path.read_bytes())
            first += size
    return found


ALL = frozenset({"worker", "epochs", "seed"})


def _memory(_: Path, *, batch_size: int = 4, seed: int | None = None, **options: Any) -> Source:
    return MemorySource(some_records(), batch_size=batch_size, shuffle_seed=seed, **options)


def _rows() -> list[dict[str, Any]]:
    return [
        {"id": one, "tags": tags, "name": f"n{one}" if one % 2 else None}
        for one, tags in zip(IDS, torch_tags(IDS), strict=True)
    ]


def _table(make: Callable[..., Source]) -> Callable[..., Source]:
    """A source of tables over the rows, in whatever form `make` takes them."""

    def made(_: Path, *, batch_size: int = 4, seed: int | None = None, **options: Any) -> Source:
        shuffle = None if seed is None else ShuffleConfig(seed=seed, buffer=9)
        return make(batch_size=batch_size, shuffle=shuffle, **options)

    return made


def _arrow(**options: Any) -> Source:
    """Record batches of a reader that is opened each time."""
    return ArrowSource(lambda: pa.Table.from_pylist(_rows()).to_reader(max_chunksize=6), **options)


def _files(form: Format, buffer: int = 7) -> Callable[..., Source]:
    def make(folder: Path, *, batch_size: int = 4, seed: int | None = None, **options: Any) -> Source:
        shuffle = None if seed is None else ShuffleConfig(seed=seed, buffer=buffer)
        return FileSource(write_files(folder, form), form, batch_size=batch_size, shuffle=shuffle, **options)

    return make


PARQUET = ParquetFormat(chunk_rows=3, row_group_rows=4)
CSV = CsvFormat(
    chunk_bytes=40,
    list_separator="|",
    types={"id": torch.int64, "tags": torch.int64, "name": torch.uint8},
)


def _watched(folder: Path, *, batch_size: int = 4, **options: Any) -> Source:
    write_files(folder, PARQUET)
    watch = Watch(str(folder / "*.parquet"), stop_after=timedelta(0))
    return FileSource(watch, PARQUET, batch_size=batch_size, **options)


def _grown(folder: Path, *, batch_size: int = 4, **options: Any) -> Source:
    write_files(folder, CSV)
    watch = Watch(str(folder / "*.csv"), grows=True, stop_after=timedelta(0))
    return FileSource(watch, CSV, batch_size=batch_size, **options)


class _WithItsQueue:
    """A file source with a queue of its own: the two positions together, as a checkpoint has them."""

    def __init__(self, queue: LocalFileQueue, source: FileSource) -> None:
        self._queue, self._source = queue, source

    def __iter__(self) -> Iterator[Records]:
        return iter(self._source)

    def position(self) -> Position:
        return {"queue": self._queue.state(), "source": self._source.position()}

    def restore(self, position: Position) -> None:
        self._queue.restore(position.get("queue", {}))
        self._source.restore(position.get("source", {}))

    def commit(self, position: Position) -> None:
        self._source.commit(position["source"])

    def close(self) -> None:
        self._source.close()


def _queued(auto_commit: bool) -> Callable[..., Source]:
    def make(folder: Path, *, batch_size: int = 4, seed: int | None = None, **options: Any) -> Source:
        shuffle = None if seed is None else ShuffleConfig(seed=seed, buffer=7)
        queue = LocalFileQueue(write_files(folder, PARQUET))
        return _WithItsQueue(
            queue,
            FileSource(
                queue,
                PARQUET,
                batch_size=batch_size,
                auto_commit=auto_commit,
                shuffle=shuffle,
                **options,
            ),
        )

    return make


def _pipeline(stages: Callable[[Pipeline], Pipeline]) -> Callable[..., Source]:
    def make(folder: Path, *, batch_size: int = 4) -> Source:
        return stages(Pipeline(FileSource(write_files(folder, PARQUET), PARQUET, batch_size=batch_size)))

    return make


def _payloads() -> list[bytes]:
    """Each record as Monolith's Example."""
    return PayloadWriter("example", ids=())(some_records())


ALONE = ByWorker(worker=0, num_workers=1)


def _kafka(folder: Path, *, service: Any, batch_size: int = 4, assignment: ByWorker | None = ALONE) -> Source:
    """A topic that is filled the first time, and read by offset."""
    topic = folder / "topic"
    if not topic.exists():
        topic.write_text(service.create_topic())
        sink = KafkaSink([service.address], topic.read_text(), settings=PRODUCER_SETTINGS)
        sink.send(_payloads())
        sink.flush()
        sink.close()
    config = KafkaConfig(
        servers=(service.address,),
        topics=(topic.read_text(),),
        group="contract",
        assignment=assignment,
        poll_batch=batch_size,
        poll_timeout=timedelta(milliseconds=200),
        stream_timeout=timedelta(milliseconds=200),
        settings=CONSUMER_SETTINGS,
    )
    return KafkaSource(config, PayloadParser("example"))


@contextmanager
def data_service(folder: Path) -> Iterator[Dispatcher]:
    """A dispatcher over a few splits of the records, and a data worker that reads them."""
    config = DataJobConfig(splits=("0", "5", "6"), lease=timedelta(seconds=5))
    ends = {"0": 5, "5": 6, "6": COUNT}

    def open_split(split: str) -> Source:
        return MemorySource(some_records(IDS[int(split) : ends[split]]), batch_size=4)

    with (
        Dispatcher(config, folder=str(folder)) as dispatcher,
        DataWorker(dispatcher.address, open_split, DataWorkerConfig(chunk_records=3)),
    ):
        yield dispatcher


def _served(_: Path, *, service: Dispatcher, batch_size: int = 4) -> Source:
    """The only trainer of a job: what it was given once comes to it again after a restart."""
    source = DataServiceSource(service.address, "only", patience=timedelta(seconds=20))
    return Pipeline(source).rebatch(batch_size)


def _joined(folder: Path, *, batch_size: int = 4, snapshot_every: int = 1000) -> Source:
    """Every impression once; every third with an action, which comes some time later."""
    times = torch.arange(COUNT) * 10 + 1000
    splits = torch.arange(COUNT + 1)
    shown = some_records().with_columns({"line_id.req_time": RaggedTensor(times, splits)})
    clicked = shown.select(["id", "line_id.req_time"]).with_columns(
        {
            "line_id.req_time": RaggedTensor(times + 15, splits),
            "line_id.actions": RaggedTensor(torch.ones(COUNT, dtype=torch.int64), splits),
        }
    )
    config = JoinerConfig(
        key="id",
        positives=(frozenset({1}),),
        window=timedelta(seconds=40),
        folder=str(folder / "join"),
        snapshot_every=snapshot_every,
    )
    return JoinedSource(
        MemorySource(shown, batch_size=batch_size),
        MemorySource(clicked.take(torch.arange(0, COUNT, 3)), batch_size=batch_size),
        config,
    )


def _joined_often(folder: Path, *, batch_size: int = 4) -> Source:
    return _joined(folder, batch_size=batch_size, snapshot_every=2)


class _Alternating:
    """Keeps every other record that it sees, and remembers which is next."""

    def __init__(self) -> None:
        self._keeps = True

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        keep = (torch.arange(len(records)) % 2 == 0) == self._keeps
        self._keeps ^= len(records) % 2 == 1
        return records.keep(keep)

    def state(self) -> dict[str, Any]:
        return {"keeps": self._keeps}

    def restore(self, state: dict[str, Any]) -> None:
        self._keeps = state["keeps"]


def _merged(folder: Path, *, batch_size: int = 4) -> Source:
    """Two flows, of the second every other record."""
    del folder
    first, second = some_records(IDS[:6]), some_records(IDS[6:])
    flows = {
        "all": MemorySource(first, batch_size=batch_size),
        "half": MemorySource(second, batch_size=batch_size),
    }
    return MergeFlow(flows, capacity=3, transforms={"half": _Alternating()})


def _drifting(_: Path, *, batch_size: int = 4) -> Source:
    """The first records of a stream, told by their users alone."""
    stream = DriftingStream(DriftConfig(examples=COUNT, batch_size=batch_size))
    return Pipeline(stream).map(lambda records: some_records(_users(records)))


def _users(records: Records) -> list[int]:
    return [user % 10_000 for user in records["user"].flat_values.tolist()]


def _odd(records: Records) -> torch.Tensor:
    return records["id"].flat_values % 2 == 1


def _twice(records: Records) -> Records:
    """Each record as it is; for a change, in the order of their ids and not all in one go."""
    return records.take(records["id"].flat_values.argsort())


SOURCES: dict[str, Case] = {
    "memory": Case(_memory, options=ALL),
    "arrow": Case(_table(_arrow), options=ALL),
    "pandas": Case(_table(lambda **options: PandasSource(pd.DataFrame(_rows()), **options)), options=ALL),
    "polars": Case(_table(lambda **options: PolarsSource(pl.DataFrame(_rows()), **options)), options=ALL),
    "iterable": Case(_table(lambda **options: IterableSource(lambda: iter(_rows()), **options)), options=ALL),
    "parquet": Case(_files(PARQUET), options=ALL, in_files=True),
    "parquet, shuffled in one go": Case(_files(PARQUET, buffer=1000), options=ALL, in_files=True),
    "csv": Case(_files(CSV), options=ALL, in_files=True),
    "tf_example": Case(_files(TfRecordFormat("tf_example")), options=ALL, in_files=True),
    "tf_example, gzip": Case(
        _files(TfRecordFormat("tf_example", compression="gzip")), options=ALL, in_files=True
    ),
    "example": Case(_files(TfRecordFormat("example", ids=())), options=ALL, in_files=True),
    "example_batch": Case(_files(TfRecordFormat("example_batch", ids=())), options=ALL, in_files=True),
    "watched files": Case(_watched, options=frozenset({"worker"}), in_files=True),
    "growing files": Case(_grown, options=frozenset({"worker"}), in_files=True),
    "queue, committing by itself": Case(_queued(True), options=frozenset({"seed"}), shares=None),
    "queue, committed by the caller": Case(_queued(False), options=frozenset({"seed"}), shares=None),
    "kafka": Case(_kafka, service="kafka", shares={"assignment": None}),
    "data service": Case(_served, service="data_service"),
    "joined": Case(_joined),
    "joined, with snapshots": Case(_joined_often),
    "merged flows": Case(_merged, [*IDS[:6], *IDS[6::2]], shares=None),
    "drifting": Case(_drifting, _users(DriftingStream().records(0, COUNT))),
    "pipeline": Case(_pipeline(lambda p: p), in_files=True),
    "pipeline: map": Case(_pipeline(lambda p: p.map(_twice))),
    "pipeline: filter": Case(_pipeline(lambda p: p.filter(_odd)), [one for one in IDS if one % 2]),
    "pipeline: transform": Case(
        _pipeline(lambda p: p.transform(_Alternating(), snapshot_every=6)), IDS[::2], shares=None
    ),
    "pipeline: history": Case(
        _pipeline(lambda p: p.history(HistoryConfig(by="id", of="name", max=3, time="id"))), shares=None
    ),
    "pipeline: rebatch to less": Case(_pipeline(lambda p: p.rebatch(3)), in_files=True),
    "pipeline: rebatch to more": Case(_pipeline(lambda p: p.rebatch(7)), in_files=True),
    "pipeline: shuffle": Case(_pipeline(lambda p: p.shuffle(ShuffleConfig(seed=3, buffer=9)))),
    "pipeline: shuffle in one go": Case(_pipeline(lambda p: p.shuffle(ShuffleConfig(buffer=1000)))),
    "pipeline: take": Case(_pipeline(lambda p: p.take(10)), IDS[:10], shares=None),
    "pipeline: take more than there is": Case(_pipeline(lambda p: p.take(1000))),
    "pipeline: prefetch": Case(_pipeline(lambda p: p.prefetch(2)), in_files=True),
    "pipeline: prefetch of nothing": Case(_pipeline(lambda p: p.prefetch(0))),
    "pipeline: progress": Case(_pipeline(lambda p: p.with_progress(stream=StringIO()))),
    "pipeline: all": Case(
        _pipeline(
            lambda p: (
                p.filter(_odd)
                .shuffle(ShuffleConfig(seed=1, buffer=5))
                .prefetch(1)
                .rebatch(3)
                .map(_twice)
                .take(5)
                .prefetch(2)
            )
        ),
        [one for one in IDS if one % 2][:5],
        shares=None,
    ),
}
"""By name. Whoever adds a source adds a line here."""
