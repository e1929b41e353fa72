"""`monolith bench data` compares reading files of each format into batches with the usual way to read them.

The usual way to read messages is the `protobuf` package, one object per record; the usual
way to read Parquet is pyarrow's `to_numpy`, column by column; and Python's `csv` module reads
CSV, a list per record, and its `json` module JSON lines. All end with the same batches. Messages of
Kafka are measured if there is a broker; see `data_kafka`. The cost of turning raw columns into features is
measured against reading the same columns unchanged; see `data_features`. Last, some of the files are read
as a run reads them, shuffled, by more and more threads.
"""

from __future__ import annotations

import csv
import itertools
import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.data import BatchSpec, FileSource, Format, Pipeline, Records, ShuffleConfig, make_batch
from monolith.data.formats import CsvFormat, JsonLinesFormat, ParquetFormat, TfRecordFormat
from monolith.errors import ConfigError
from monolith.feature import Batch, make_fid
from monolith.tensors import RaggedTensor
from monolith_bench.data_features import measure_features
from monolith_bench.data_kafka import measure_kafka
from monolith_bench.options import BenchDataOptions
from monolith_bench.report import Report, cores
from monolith_bench.timing import Contender, Timing, race

FLOATS = 5
SEPARATOR = "|"
"""Between the values of a field of CSV."""
SLOW_SHARE = 20
"""Records per record that the slow ways are given, so that they end today; what counts is the rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """The options, settled."""

    records: int
    features: int
    batch: int
    threads: tuple[int, ...]
    timing: Timing
    seed: int

    @classmethod
    def settle(cls, options: BenchDataOptions) -> DataPlan:
        for name in ("records", "features", "batch", "repeats"):
            if getattr(options, name) < 1:
                raise ConfigError(f"bench data: --{name} must be at least 1, got {getattr(options, name)}")
        if any(threads < 1 for threads in options.threads):
            raise ConfigError(f"bench data: --threads must be at least 1, got {min(options.threads)}")
        threads = options.threads or (*(1 << power for power in range(cores().bit_length())), cores())
        quick = options.quick
        return cls(
            records=min(options.records, 2000) if quick else options.records,
            features=options.features,
            batch=options.batch,
            threads=tuple(sorted({min(one, cores()) for one in threads})),
            timing=Timing(repeats=1 if quick else options.repeats, window=0.0),
            seed=options.seed,
        )

    @property
    def spec(self) -> BatchSpec:
        return BatchSpec(
            ids=tuple(f"f{number:02d}" for number in range(self.features)),
            floats={f"x{number}": 1 for number in range(FLOATS)},
            event_time=None,
        )


def run(options: BenchDataOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    plan = DataPlan.settle(options)
    report = Report("data")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(plan.threads[-1])
    try:
        with tempfile.TemporaryDirectory(prefix="monolith-bench-") as folder:
            measure(plan, report, folder)
        measure_kafka(options, plan.spec, plan.batch, make_records(plan), report, plan.timing)
    finally:
        torch.set_num_threads(torch_threads)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(plan: DataPlan, report: Report, folder: str) -> None:
    records = make_records(plan)
    few = records.slice(0, max(plan.records // SLOW_SHARE, 1))
    workers = native.Workers(plan.threads[-1])
    formats: dict[str, Format] = {
        "tf_example": TfRecordFormat("tf_example", workers=workers),
        "example": TfRecordFormat("example", workers=workers),
        "instance": TfRecordFormat("instance", workers=workers),
        "example_batch": TfRecordFormat("example_batch", workers=workers),
        "parquet": ParquetFormat(),
        "csv": CsvFormat(list_separator=SEPARATOR),
        "jsonl": JsonLinesFormat(types=types_of(plan)),
    }
    slow: dict[str, tuple[str, Callable[[str, DataPlan], Iterator[Batch]]]] = {
        "tf_example": ("protobuf", with_protobuf),
        "parquet": ("pyarrow to_numpy", with_pyarrow),
        "csv": ("csv module", with_csv_module),
        "jsonl": ("json module", with_json_module),
    }
    for name, format_ in formats.items():
        report.say(name)
        path = f"{folder}/{name}.{name}"
        write(format_, path, records, plan.batch)
        runs = {name: contender(len(records), lambda f=format_, p=path: batches(f, p, plan))}  # type: ignore[misc]
        if name in slow:
            rival, read = slow[name]
            short = f"{folder}/few.{name}"
            small = records if name == "parquet" else few
            write(format_, short, small, plan.batch)
            runs[rival] = contender(len(small), lambda r=read, s=short: r(s, plan))  # type: ignore[misc]
        rates = race(runs, **plan.timing)
        size = Path(path).stat().st_size / len(records)
        if name in slow:
            rival = slow[name][0]
            report.add(f"{rival}, {name}", "records_per_s", rates[rival], "records/s")
            report.compare(
                name, "records_per_s", rates[name], "records/s", {f"{rival}, {name}": rates[rival]}
            )
        else:
            report.add(name, "records_per_s", rates[name], "records/s")
        report.add(f"{name}, bytes", "mb_per_s", rates[name] * size / 1e6, "MB/s")
    report.show(f"{len(records):,} records of {plan.features} features of ids and {FLOATS} of floats")
    measure_features(plan, report, folder)
    for name in ("csv", "jsonl", "tf_example", "parquet"):
        measure_threads(plan, report, name, formats[name], f"{folder}/{name}.{name}")
    report.show(f"{len(records):,} records, shuffled, with several threads")


def measure_threads(plan: DataPlan, report: Report, name: str, format_: Format, path: str) -> None:
    """Measure how fast so many threads read, shuffle and pack a file."""
    report.say(f"{name}, with {', '.join(map(str, plan.threads))} threads")

    def read(threads: int) -> Iterator[Batch]:
        shuffle = ShuffleConfig(seed=plan.seed)
        source = FileSource(
            [path],
            format_,
            batch_size=plan.batch,
            columns=plan.spec.columns,
            shuffle=shuffle,
            threads=threads,
        )
        return iter(Pipeline(source).to_batches(plan.spec))

    # One thread parses and one packs: what several are held against.
    counts = sorted({1, *plan.threads})
    runs = {str(count): contender(plan.records, lambda n=count: read(n)) for count in counts}  # type: ignore[misc]
    rates = race(runs, **plan.timing)
    alone = f"{name}, 1 thread"
    report.add(alone, "records_per_s", rates["1"], "records/s")
    for count in counts[1:]:
        case = f"{name}, {count} threads"
        report.compare(case, "records_per_s", rates[str(count)], "records/s", {alone: rates["1"]})


def types_of(plan: DataPlan) -> dict[str, torch.dtype]:
    """Return the types of all columns, as a run has them from its features."""
    return {name: torch.int64 if name in plan.spec.ids else torch.float32 for name in plan.spec.columns}


def make_records(plan: DataPlan) -> Records:
    """Return records with one to three ids of each feature, a few floats and a label."""
    random = np.random.default_rng(plan.seed)
    columns: dict[str, RaggedTensor] = {}
    for slot, name in enumerate(plan.spec.ids, start=1):
        lengths = torch.from_numpy(random.integers(1, 4, plan.records))
        ids = torch.from_numpy(random.integers(0, 1 << 40, int(lengths.sum())))
        columns[name] = RaggedTensor.from_row_lengths(make_fid(slot, ids), lengths)
    one_each = torch.arange(plan.records + 1)
    for name in plan.spec.floats:
        columns[name] = RaggedTensor(torch.from_numpy(random.random(plan.records, np.float32)), one_each)
    label = torch.from_numpy(random.integers(0, 2, plan.records)).float()
    return Records(plan.records, {**columns, "label": RaggedTensor(label, one_each)})


def write(format_: Format, path: str, records: Records, batch: int) -> None:
    with format_.writer(path) as file:
        for begin in range(0, len(records), batch):
            file.write(records.slice(begin, begin + batch))


def batches(format_: Format, path: str, plan: DataPlan) -> Iterator[Batch]:
    """Read a file by one of our formats."""
    for chunk in format_.chunks(path, columns=plan.spec.columns):
        for begin in range(0, len(chunk.records), plan.batch):
            yield make_batch(chunk.records.slice(begin, begin + plan.batch), plan.spec)


def contender(records: int, read: Callable[[], Iterator[Batch]]) -> Contender:
    """Reads a whole file in a turn."""
    return Contender(records, lambda _: sum(len(batch) for batch in read()), itertools.repeat(0))


# The usual ways


def with_protobuf(path: str, plan: DataPlan) -> Iterator[Batch]:
    """Parse each record to an object of the `protobuf` package, and gather the lists."""
    from monolith.wire import tf_example_pb2

    data = Path(path).read_bytes()
    at, rows = 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        rows.append(tf_example_pb2.Example.FromString(data[at + 12 : at + 12 + length]))
        at += length + 16
        if len(rows) == plan.batch or at >= len(data):
            yield make_batch(from_messages(rows, plan), plan.spec)
            rows = []


def from_messages(messages: Sequence[Any], plan: DataPlan) -> Records:
    features = [message.features.feature for message in messages]
    columns = {
        name: lists([feature[name].int64_list.value for feature in features], torch.int64)
        for name in plan.spec.ids
    }
    for name in (*plan.spec.floats, "label"):
        columns[name] = lists([feature[name].float_list.value for feature in features], torch.float32)
    return Records(len(messages), columns)


def lists(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> RaggedTensor:
    values = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)
    return RaggedTensor.from_row_lengths(values, torch.tensor([len(row) for row in rows]), validate=False)


def with_pyarrow(path: str, plan: DataPlan) -> Iterator[Batch]:
    """Read batches by pyarrow, and take values and offsets of each column as numpy arrays."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    def column(array: Any) -> RaggedTensor:
        if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
            values: Tensor = torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False)))
            return RaggedTensor(values, torch.arange(len(values) + 1), validate=False)
        offsets = array.offsets.to_numpy().astype(np.int64)
        values = torch.from_numpy(np.array(array.flatten().to_numpy(zero_copy_only=False)))
        return RaggedTensor(values, torch.from_numpy(offsets - offsets[0]), validate=False)

    for batch in parquet.ParquetFile(path).iter_batches(plan.batch):
        names = batch.schema.names
        records = Records(batch.num_rows, {name: column(batch.column(name)) for name in names})
        yield make_batch(records, plan.spec)


def with_csv_module(path: str, plan: DataPlan) -> Iterator[Batch]:
    """Read rows by Python's `csv` module, and make numbers of their fields."""
    with Path(path).open(newline="") as file:
        rows = csv.reader(file)
        names = next(rows)
        while some := list(itertools.islice(rows, plan.batch)):
            cells = dict(zip(names, zip(*some, strict=True), strict=True))
            columns = {
                name: lists(
                    [[int(value) for value in cell.split(SEPARATOR)] for cell in cells[name]], torch.int64
                )
                for name in plan.spec.ids
            }
            for name in (*plan.spec.floats, "label"):
                columns[name] = lists([[float(cell)] for cell in cells[name]], torch.float32)
            yield make_batch(Records(len(some), columns), plan.spec)


def with_json_module(path: str, plan: DataPlan) -> Iterator[Batch]:
    """Read lines by Python's `json` module, a dict per record, and gather the lists."""
    with Path(path).open() as file:
        while some := [json.loads(line) for line in itertools.islice(file, plan.batch)]:
            columns = {
                name: lists([_listed(row[name]) for row in some], torch.int64) for name in plan.spec.ids
            }
            for name in (*plan.spec.floats, "label"):
                columns[name] = lists([_listed(row[name]) for row in some], torch.float32)
            yield make_batch(Records(len(some), columns), plan.spec)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]
