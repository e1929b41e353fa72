"""The options of commands about projects, running jobs and their models; reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from monolith.cli.options.flags import SecurityOptions
from monolith.cli.options.train import Settings, TrainOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class NewOptions:
    """Start a project: create a folder with a task, its config, sample data and a test, ready to train."""

    name: Path
    """The folder to make, such as shop; its name is that of the task, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigInitOptions:
    """Write a first config file, with every field explained."""

    kind: Literal["local", "ps"]
    """The kind of run: local is one process, ps has parameter servers and workers."""
    to: Path | None = None
    """The TOML file to write, which must not exist; by default standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigExplainOptions:
    """Explain a field of the config, by its new name or an old one; or list a group, or all fields."""

    field: str
    """A field such as train.save.steps or num_ps, a group such as train.save, or all; or a key that depends
    on a type, such as model.dim, model.two_tower (all of a type), features.user.kind or task.batch_size."""
    task: str | None = None
    """Your own task, package.module:Name or path/to/file.py:Name, whose settings task.* are; by default those
    of a task by config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigTokenOptions:
    """Print the token of a role, for a process that may do no more than that role."""

    role: Literal["follow", "predict"]
    """follow: read the rows that a run publishes; predict: ask a model server for predictions."""
    model_dir: Path | None = None
    """The model_dir of a run that was not given a token: it has one there, in the file run_token."""
    token_file: Path | None = None
    """The file with the token for everything, for a run that was given one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigCheckOptions(TrainOptions):
    """List everything for which `monolith train` would refuse a config file, or the data it names.

    Makes the task and its model, opens the data and reads a sample of it: files and columns that are missing,
    values of the wrong kind, labels that do not fit their loss. Takes the flags of monolith train, which win
    over the file.
    """

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A config file, TOML or JSON."""
    task: Annotated[str | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    environment: bool = False
    """Apply the variables of the environment, as a run would."""
    no_data: bool = False
    """Check the file alone: the task is not imported and no data is opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigShowOptions:
    """Print the whole run that a config file describes: every default spelled out, secrets masked."""

    file: Path
    """A config file, TOML or JSON."""
    environment: bool = False
    """Apply the variables of the environment, as a run would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Check this machine: list what is installed or missing; or check which processes of a cluster answer."""

    json: bool = False
    """Print one JSON object instead of tables."""
    cluster: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[URL]")] = None
    """List instead which processes are registered and which of them answer. Takes a registry, as in
    zookeeper://host:2181/job, consul://host:8500/job or files:///shared/folder/job; by default that of
    --config, or of the environment."""
    config: Path | None = None
    """With --cluster: the run's config file, which names the registry."""
    zookeeper: str | None = None
    """The host:port of ZooKeeper to try; by default $MONOLITH_ZOOKEEPER, then localhost:2181."""
    kafka: str | None = None
    """The host:port of Kafka to try; by default $MONOLITH_KAFKA, then localhost:9092."""
    consul: str | None = None
    """The host:port of Consul to try; by default $MONOLITH_CONSUL, then localhost:8500."""
    timeout: float = 1.0
    """Seconds to wait for each service."""
    path: Path = Path()
    """A folder on the disk that will hold checkpoints; by default the current one."""
    disk: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[FOLDER]")] = None
    """Measure the disk that cold rows of tiered tables would be on: random reads of 4 KiB and sequential
    writes, past the kernel's cache, for a second, with a file of at most 256 MiB that is removed. Takes the
    folder, that of train.tables.storage_dir; by default the system's folder of temporary files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Plan a cluster: how many parameter servers of which size a table needs, with the arithmetic.

    Figures of work are measured ones: those of docs/scale.md and of the command that the output names, or
    with --measure those of this machine.
    """

    rows: float
    """Rows of all tables together, such as 1e10 or 10_000_000_000."""
    dim: int
    """Floats of an embedding."""
    examples_per_s: float
    """Examples that all workers train per second."""
    optimizer: str = "adagrad"
    """The optimizer of the rows: sgd, adagrad, adam, ftrl or another of monolith.table."""
    embedding_dtype: str = "float32"
    """How embeddings are stored: train.tables.embedding_dtype."""
    ids_per_example: float = 26.0
    """IDs of an example, of all features together."""
    batch: int = 2048
    """Examples of a worker's step. Requests cost more than rows, so larger batches need fewer servers."""
    storage: Literal["memory", "tiered", "both"] = "both"
    """Where rows are: all in memory, hot ones in memory and all others on a local disk, or both plans."""
    memory: str = "64GiB"
    """Memory of a server."""
    gbits: float = 25.0
    """Network of a server, Gbit/s in each direction."""
    headroom: float = 0.2
    """The share of a server's memory, core, disk and network that stays free."""
    zipf: float = 1.05
    """How uneven IDs are: the k-th most frequent one comes k**-zipf as often as the first; 0 is uniform."""
    hit_rate: float | None = None
    """The share of lookups and updates of a tiered table that read no file, as `monolith status` shows it; by
    default computed from --zipf."""
    disk_reads_per_s: float | None = None
    """Random reads of 4 KiB per second of a server's disk, as `monolith doctor --disk` measures them."""
    disk_mb_per_s: float | None = None
    """MB/s that a server writes to its disk, and saves and restores, at most."""
    replicas: int = 0
    """Standby servers of each server: cluster.standbys, 0 to 2."""
    checkpoint_every: str = "10m"
    """Time between two full checkpoints, which must be enough to save one."""
    measure: bool = False
    """Measure rows, saving and the disk on this machine, for some seconds, with this optimizer and dim."""
    folder: Path | None = None
    """With --measure: the folder whose disk is measured; by default that of temporary files."""
    json: bool = False
    """Print one JSON object instead of text."""


Sort = Literal["worst", "name", "examples", "steps", "lag", "staleness", "rows", "bytes", "restarts", "age"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusOptions:
    """Print the status of a training job: its processes, failed saves, publishing, missing standbys.

    The exit status is 0 if all is well, and 1 if some process is in trouble.
    """

    run: str
    """The model_dir of a run, or http(s)://host:port of the metrics of one of its processes
    (`monolith train --metrics-port`)."""
    json: bool = False
    """Print the status as one JSON object, and exit."""
    token_file: Path | None = None
    """A file with the token of the run, where a URL asks for one."""
    tls_cert: Path | None = None
    """The certificate to show to a URL that wants one, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificate of the process, PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopOptions(StatusOptions):
    """Watch a training job: its processes, how fast they are, and which of them are in trouble."""

    every: float = 2.0
    """Seconds between two refreshes."""
    sort: Sort = "worst"
    """What comes first: processes in trouble, or those with the most of something."""
    rows: int | None = None
    """How many processes to show; by default as many as the terminal has lines for, and 0 shows all."""
    once: bool = False
    """Print the status as plain text, and exit, as `monolith status` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Profile a running job: its slowest functions, and a trace for Perfetto or chrome://tracing.

    Works for every job of the same user on this machine, without a flag when it starts. Processes on other
    machines are reached if the run was started with --control, or by MLP.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[JOB]")] = ""
    """The job: its name, its model_dir, the folder that a server serves, or the process id of one of its
    processes; or http(s)://host:port of the metrics of a process elsewhere. Not needed if one job runs;
    with several, they are listed."""
    process: tuple[str, ...] = ()
    """The processes to profile, such as worker-0 ps-1 data_worker-0 serve-0; by default all."""
    seconds: float = 10.0
    """How long to record, at most 120 seconds."""
    steps: int = 0
    """End after so many steps instead, if that is earlier; only workers take steps."""
    to: Path | None = None
    """The folder for the traces; by default profile/ of the model_dir, or of the current folder."""
    json: bool = False
    """Print one JSON object on standard output: for each process its trace, or the error."""
    token_file: Path | None = None
    """A file with the token of the run; by default the one that a run of this user left in its model_dir."""
    tls_cert: Path | None = None
    """The certificate to show to processes that want one, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificates of the processes, PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UiOptions:
    """Show runs and servers on a page in the browser, live: quality, freshness, speed, tables."""

    sources: tuple[str, ...]
    """The sources to show: the model_dir of a run, http://host:port of the metrics of a process that trains
    (`monolith train --metrics-port`), or http://host:port of a server (`monolith serve`). NAME=SOURCE sets
    the name that the page shows."""
    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it. Another one needs a token."""
    port: int = 8686
    """The port of the page; 0 chooses a free one."""
    every: float = 1.0
    """Seconds between two reads of a source."""
    source_token_file: Path | None = None
    """A file with the token that runs and servers ask for, if it differs from the page's own."""
    open: bool = False
    """Open the page in the browser of this machine."""
    security: Annotated[SecurityOptions, tyro.conf.arg(name="")] = field(default_factory=SecurityOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishStatusOptions:
    """Print what a run publishes: the progress of each shard, whether publishing is paused, and why."""

    run: str
    """The model_dir of a run, or host:port of the control server of its chief."""
    json: bool = False
    """Print one JSON object on standard output."""
    token_file: Path | None = None
    """A file with the token of the run; by default the one that a run of this user left in its model_dir."""
    tls_cert: Path | None = None
    """The certificate to show to a run that wants one, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificate of the run, PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishPauseOptions(PublishStatusOptions):
    """Pause publishing: servers keep the rows they have, and training continues."""

    reason: str = "paused by an operator"
    """The reason, shown by `publish status` and in the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResumeOptions(PublishStatusOptions):
    """Resume publishing: servers that follow get the current rows. Withheld versions stay withheld."""

    include_withheld: bool = False
    """Let servers also load the withheld versions: their rows turned out to be good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishRollbackOptions(PublishStatusOptions):
    """Roll all servers back to an exported version, and pause publishing until it is resumed."""

    version: str
    """The version, the name of a folder that each server has, such as 1200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshnessOptions:
    """Measure freshness: the time from an event to an answer of a server that has learned from it.

    With --source, new ids are written to the stream that the trainer reads, and asked for until their answer
    changes. Without it, the ages that the answers report are shown.
    """

    url: str
    """The address of the server: http://host:port, https://host:port or grpc://host:port."""
    row: str = ""
    """An event as a JSON object with all columns that training reads, labels included."""
    id: str | None = None
    """The column of the row whose id is replaced by a new one; needed with --source."""
    source: str | None = None
    """The stream to write events to: kafka://broker:9092/topic (messages in JSON), or a folder that the
    trainer watches for new .jsonl files."""
    event_time: str | None = None
    """The column that is set to the time of writing, in Unix seconds."""
    count: int = 10
    """How many events are written, one after the other; without --source, how often the server is asked."""
    every: float = 0.2
    """Seconds between two events, or two requests without --source."""
    pause: float = 0.01
    """Seconds between two requests for one event."""
    timeout: float = 30.0
    """Seconds that an event has to reach an answer."""
    model: str | None = None
    """The name of the model; by default the only one of the server."""
    json: bool = False
    """Print the outcome as one JSON object."""
    token_file: Path | None = None
    """A file with the token that the server asks for."""
    tls_cert: Path | None = None
    """The certificate to show to the server, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificate of the server, PEM."""
    tls_server_name: str | None = None
    """The name in the server's certificate, if it is not the host in the URL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InsightOptions:
    """Show which features matter to a model: how much worse it evaluates without each of them."""

    run_dir: str
    """The folder of a run; with --summaries, any folder with its event files below it."""
    config: Path | None = None
    """The config file of the run; by default the one it was trained with."""
    task: str | None = None
    """The task, path/to/file.py:Name; by default the one that was trained."""
    checkpoint: str | None = None
    """The checkpoint to read: model.ckpt-30, 30, best or latest. By default the best one, if the run was
    evaluated, and otherwise the latest."""
    examples: int = 20_000
    """Evaluation examples to measure on."""
    repeats: int = 5
    """How often each feature is shuffled; more give smaller errors."""
    summaries: bool = False
    """Read what a layer of the model listened to from the summaries of training instead (insight_every_steps,
    NAS weights); it does not say whether that helped."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    png: str | None = None
    """Also draw a picture to this file."""
    json: bool = False
    """Print one JSON object instead of tables."""
    top: int = 20
    """Features to show, the most important first; 0 shows all."""
    last: int = 10
    """With --summaries: how many of the newest of each kind to read; older ones describe an older model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingsOptions:
    """Write the embeddings of all candidates of a retrieval task, and an index to search them by.

    The file has the columns id, as it is in the data, embedding and step, and hash, the id that the index
    answers with, if that differs, as for strings. The results of the index are compared with an exact
    search, and its recall is reported.
    """

    task: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]")] = None
    """The task: package.module:Name or path/to/file.py:Name of a RetrievalTask, a subclass, or a function
    that returns one; by default job.task of the config."""
    to: str | None = None
    """The file to write: JSON lines if its name ends in .jsonl, otherwise Parquet."""
    index: str | None = None
    """The file of the index to write, for FAISS or hnswlib; None writes none."""
    library: Literal["faiss", "hnswlib"] | None = None
    """The library to make the index with; by default the one that is installed, FAISS first."""
    model_dir: str | None = None
    """The folder with the checkpoints of the training."""
    config: Path | None = None
    """The config file that it was trained with; flags win over it."""
    set: Settings = ()
    """A setting of the task, as key=value; may be given several times."""
    checkpoint: str | None = None
    """The checkpoint to read, any that is on disk and sound: model.ckpt-30, 30, the whole prefix of its
    files, best or latest. By default the best one, if the run was evaluated, and otherwise the latest."""
    k: int = 10
    """How many neighbours the recall check looks for."""
    queries: int = 256
    """How many users of the evaluation data the recall check asks for, at most."""
    min_recall: float = 0.0
    """The least recall of the index, 0 to 1: below it, the exit status is 1 and no index is written."""
    threads: int | None = None
    """Threads of torch's own operations; by default as many as there are cores."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    json: bool = False
    """Print a summary of the written files as one JSON object."""
