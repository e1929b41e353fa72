"""The commands as data: for each the options it takes and the module that runs it.

A command is a frozen dataclass, whose fields are its flags, and a module with
`run(options) -> int`. The module is named, not imported, so that `--help` and a
mistyped flag answer at once, without waiting for torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from monolith.cli.checkpoint_options import (
    CheckpointCompactOptions,
    CheckpointDiffOptions,
    CheckpointExportOptions,
    CheckpointInspectOptions,
    CheckpointListOptions,
    CheckpointReshardOptions,
)
from monolith.cli.config_options import (
    ConfigCheckOptions,
    ConfigExplainOptions,
    ConfigInitOptions,
    ConfigShowOptions,
)
from monolith.cli.data_service_options import DataDispatcherOptions, DataWorkerOptions
from monolith.cli.insight_options import InsightOptions
from monolith.cli.train_options import EvaluateOptions, PredictOptions, TrainOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Say what is installed, what is missing and how to get it; or who of a cluster is there."""

    json: bool = False
    """Print one JSON object instead of tables."""
    cluster: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[URL]")] = None
    """Say instead who is registered, who answers and who does not. Takes a registry, as in
    zookeeper://host:2181/job, consul://host:8500/job or files:///shared/folder/job; by default that of
    --config, or of the environment."""
    config: Path | None = None
    """With --cluster: the run's config file, which names the registry."""
    zookeeper: str | None = None
    """host:port to try; by default $MONOLITH_ZOOKEEPER, then localhost:2181."""
    kafka: str | None = None
    """host:port to try; by default $MONOLITH_KAFKA, then localhost:9092."""
    consul: str | None = None
    """host:port to try; by default $MONOLITH_CONSUL, then localhost:8500."""
    timeout: float = 1.0
    """Seconds to wait for each service."""
    path: Path = Path()
    """A folder on the disk that will hold checkpoints; by default the current one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Train a DeepFM on a stream that drifts, kill it, resume, and see what going on to learn is worth."""

    seconds: float = 60.0
    """How long to train, starts not counted."""
    dim: int = 8
    """Floats per vector."""
    batch: int = 1024
    """Examples in a batch."""
    seed: int = 0
    """The same seed gives the same stream and the same first weights."""
    to: Path | None = None
    """A new folder for the model, its checkpoints and the picture; by default a temporary one. It is kept."""
    quick: bool = False
    """A small world and few steps, to see that it works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TourOptions:
    """Take a short tour of the table: insert, look up, train, expire, save, restore."""

    rows: int = 1_000_000
    """How many ids the tour puts into its table."""
    dim: int = 16
    """Floats per embedding."""
    seed: int = 0
    """The same seed gives the same ids and gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTableOptions:
    """Measure the table beside the machine's random-access limit and torch's sparse embedding."""

    rows: int = 10_000_000
    """Ids in the table."""
    dim: int = 16
    """Floats per embedding."""
    also_dims: tuple[int, ...] = (64, 128)
    """Widths to measure too, with fewer rows: about as many bytes."""
    threads: tuple[int, ...] = (1, 2)
    """Thread counts, at most the machine's cores."""
    batch: int = 65536
    """Ids in a call."""
    repeats: int = 12
    """Rounds, after one to warm up; the best counts."""
    scaling: bool = False
    """Also the cost of a row from 1 to 50 million rows."""
    busy: bool = False
    """Also the same with one core kept busy by another process."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTrainOptions:
    """Measure training: a DeepFM on our rows beside the same model on torch's and FBGEMM's."""

    ids: int = 10_000_000
    """Ids of all features together."""
    features: int = 26
    """Features, with one id each in every example."""
    dim: int = 16
    """Floats per vector, beside a bias."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the MLP's hidden layers."""
    batch: int = 2048
    """Examples in a batch."""
    threads: int = 2
    """Threads, at most the machine's cores."""
    repeats: int = 8
    """Rounds, after one to warm up; the best counts."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchStoreOptions:
    """Measure rows on parameter servers: beside rows in this process, and beside the wire alone."""

    ids: tuple[int, ...] = (1_000, 10_000)
    """Distinct ids in a batch."""
    rows: int = 200_000
    """Rows in the table."""
    dim: int = 16
    """Floats per embedding."""
    servers: tuple[int, ...] = (1, 2)
    """Numbers of servers, each a process on this machine."""
    dense_bytes: int = 1_000_000
    """Size of the dense weights that are pushed."""
    repeats: int = 5
    """Rounds, after one to warm up; the best counts."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchDataOptions:
    """Measure reading: files of each format to ready batches, beside protobuf and pyarrow."""

    records: int = 100_000
    """Records in a file."""
    features: int = 20
    """Features of one to three ids."""
    batch: int = 2048
    """Records in a batch."""
    threads: int = 2
    """Threads, at most the machine's cores."""
    repeats: int = 5
    """Rounds, after one to warm up; the best counts."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCheckpointOptions:
    """Measure checkpoints: beside plain files of the same bytes, and what training feels of a save."""

    rows: int = 10_000_000
    """Rows in the table."""
    dim: int = 16
    """Floats per embedding, beside as many of optimizer state."""
    batch: int = 8192
    """Ids in a training step."""
    threads: tuple[int, ...] = (1, 2)
    """Thread counts to train with, at most the machine's cores."""
    touched: tuple[float, ...] = (0.01, 0.1)
    """Shares of the rows that change before an increment."""
    repeats: int = 3
    """Rounds; the best counts."""
    folder: str | None = None
    """A folder on the disk to measure; by default where temporary files go."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataHeadOptions:
    """Show the first records of a file."""

    path: str
    """The file."""
    records: int = 3
    """How many to show."""
    columns: tuple[str, ...] = ()
    """Columns to show; by default all."""
    format: str | None = None
    """How the file is written; by default told by its name."""
    json: bool = False
    """Print one JSON object per record instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStatsOptions:
    """Count what each column of some files holds: fill rates, values per record, distinct values."""

    paths: tuple[str, ...]
    """Files, or patterns with * in them."""
    columns: tuple[str, ...] = ()
    """Columns to count; by default all."""
    format: str | None = None
    """How the files are written; by default told by their names."""
    plot: str | None = None
    """Also draw a picture to this file (.png, .svg, .pdf)."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConvertOptions:
    """Write the records of some files to one file of another format."""

    paths: tuple[str, ...]
    """Files to read, or patterns with * in them."""
    to: str = ""
    """The file to write; it appears when all is written."""
    columns: tuple[str, ...] = ()
    """Columns to keep; by default all."""
    format: str | None = None
    """How the files to read are written; by default told by their names."""
    to_format: str | None = None
    """How to write; by default told by the name of the file."""
    skip_bad: bool = False
    """Leave malformed records out, instead of stopping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataValidateOptions:
    """Read files to their end and say what is wrong with them."""

    paths: tuple[str, ...]
    """Files, or patterns with * in them."""
    format: str | None = None
    """How the files are written; by default told by their names."""
    most: int = 20
    """Faults to print; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Command:
    """What `monolith NAME` reads and where it goes."""

    options: type
    """A frozen dataclass; its docstring is the help text, its fields are the flags."""
    module: str
    """Has `run(options) -> int`, which returns the exit status."""
    function: str = "run"
    """Another name for that function, where a module has several commands."""
    positional: bool = False
    """Whether options without a default are given without their flag: `data head FILE`."""
    run_flags: bool = False
    """Whether fields of a run's config are flags of it, too. Its options have `run_flags` and `words`."""
    let_down_status: int = 2
    """The exit status after a RetryableError; os.EX_TEMPFAIL asks to be started again."""

    @property
    def summary(self) -> str:
        return (self.options.__doc__ or "").partition("\n")[0]


COMMANDS = {
    "demo": Command(DemoOptions, "monolith.cli.demo"),
    "tour": Command(TourOptions, "monolith.cli.tour"),
    "train": Command(TrainOptions, "monolith.cli.launching", run_flags=True, let_down_status=os.EX_TEMPFAIL),
    "evaluate": Command(EvaluateOptions, "monolith.cli.evaluation", "evaluate"),
    "predict": Command(PredictOptions, "monolith.cli.evaluation", "predict"),
    "bench table": Command(BenchTableOptions, "monolith.cli.bench.table"),
    "bench data": Command(BenchDataOptions, "monolith.cli.bench.data"),
    "bench checkpoint": Command(BenchCheckpointOptions, "monolith.cli.bench.checkpoint"),
    "bench train": Command(BenchTrainOptions, "monolith.cli.bench.train"),
    "bench store": Command(BenchStoreOptions, "monolith.cli.bench.store"),
    "data head": Command(DataHeadOptions, "monolith.cli.data_files", "head", positional=True),
    "data stats": Command(DataStatsOptions, "monolith.cli.data_files", "stats", positional=True),
    "data convert": Command(DataConvertOptions, "monolith.cli.data_files", "convert", positional=True),
    "data validate": Command(DataValidateOptions, "monolith.cli.data_files", "validate", positional=True),
    "data dispatcher": Command(DataDispatcherOptions, "monolith.cli.data_service", "dispatcher"),
    "data worker": Command(DataWorkerOptions, "monolith.cli.data_service", "worker"),
    "checkpoint list": Command(CheckpointListOptions, "monolith.cli.checkpoint", "list_", positional=True),
    "checkpoint inspect": Command(
        CheckpointInspectOptions, "monolith.cli.checkpoint", "inspect", positional=True
    ),
    "checkpoint diff": Command(CheckpointDiffOptions, "monolith.cli.checkpoint", "diff", positional=True),
    "checkpoint reshard": Command(
        CheckpointReshardOptions, "monolith.cli.checkpoint", "reshard_", positional=True
    ),
    "checkpoint export": Command(
        CheckpointExportOptions, "monolith.cli.checkpoint", "export_", positional=True
    ),
    "checkpoint compact": Command(
        CheckpointCompactOptions, "monolith.cli.checkpoint", "compact_", positional=True
    ),
    "insight": Command(InsightOptions, "monolith.cli.insight", positional=True),
    "config init": Command(ConfigInitOptions, "monolith.cli.config_commands", "init"),
    "config explain": Command(
        ConfigExplainOptions, "monolith.cli.config_commands", "explain", positional=True
    ),
    "config check": Command(ConfigCheckOptions, "monolith.cli.config_commands", "check", positional=True),
    "config show": Command(ConfigShowOptions, "monolith.cli.config_commands", "show", positional=True),
    "doctor": Command(DoctorOptions, "monolith.cli.doctor"),
}
