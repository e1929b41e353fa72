"""The commands as data: for each the options it takes and the module that runs it.

A command is a frozen dataclass, whose fields are its flags, and a module with
`run(options) -> int`. The module is named, not imported, so that `--help` and a
mistyped flag answer at once, without waiting for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Say what is installed, what is missing and how to get it."""

    json: bool = False
    """Print one JSON object instead of tables."""
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
    """Train a DeepFM on a generated click log, and watch it learn."""

    seconds: float = 20.0
    """How long to train."""
    users: int = 50_000
    """Different users in the log."""
    items: int = 5_000
    """Different items in the log."""
    dim: int = 8
    """Floats per vector."""
    batch: int = 1024
    """Examples in a batch."""
    seed: int = 0
    """The same seed gives the same log and the same first weights."""


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


@dataclass(frozen=True, slots=True)
class Command:
    """What `monolith NAME` reads and where it goes."""

    options: type
    """A frozen dataclass; its docstring is the help text, its fields are the flags."""
    module: str
    """Has `run(options) -> int`, which returns the exit status."""

    @property
    def summary(self) -> str:
        return (self.options.__doc__ or "").partition("\n")[0]


COMMANDS = {
    "demo": Command(DemoOptions, "monolith.cli.demo"),
    "tour": Command(TourOptions, "monolith.cli.tour"),
    "bench table": Command(BenchTableOptions, "monolith.cli.bench.table"),
    "bench train": Command(BenchTrainOptions, "monolith.cli.bench.train"),
    "doctor": Command(DoctorOptions, "monolith.cli.doctor"),
}
