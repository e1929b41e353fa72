"""How a task is trained: where to, how long, how often saved, what restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

from monolith import filesystem
from monolith.checkpoint import CustomRestore, RestoreOptions
from monolith.errors import ConfigError
from monolith.table.config import (
    EmbeddingDtype,
    EmbeddingRounding,
    TableStorage,
    check_embedding_storage,
    check_table_storage,
)
from monolith.train.evaluate_config import EvaluateConfig
from monolith.train.hooks import AlertConfig, DailyHours, SaveConfig
from monolith.train.hooks.config import HooksConfig, TrackingConfig
from monolith.train.rate_schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiryConfig:
    """By which clock rows expire, and how many may go at once.

    Examples:
        >>> from monolith import ExpiryConfig, KeepConfig, TrainConfig
        >>> TrainConfig(keep=KeepConfig(evict=True), expiry=ExpiryConfig(max_fraction=0.5)).expiry
        ExpiryConfig(max_fraction=0.5, gradual=False, max_ahead=datetime.timedelta(seconds=3600))
    """

    max_fraction: float = 0.1
    """The fraction of a table that may expire at once, 0 to 1. If more has expired, as after a pause of a
    tenth of `expire_after` or with wrong event times, the table keeps all of its rows, at this and all later
    evictions, until `gradual` or this is set; a warning and `monolith status` say so. 1 sets no limit."""
    gradual: bool = False
    """Whether a table of which more has expired evicts its oldest rows, nearly `max_fraction` of it at each
    eviction, in place of none. Event times that are wrong then cost rows, but not all at once."""
    max_ahead: timedelta = timedelta(hours=1)
    """How far event times may move the clock of expiry ahead of the wall clock."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise ConfigError(f"expiry: max_fraction must be from 0 to 1, got {self.max_fraction}")
        if self.max_ahead < timedelta(0):
            raise ConfigError(f"expiry: max_ahead must not be negative, got {self.max_ahead}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepConfig:
    """Which checkpoints are kept.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import KeepConfig, TrainConfig
        >>> keep = KeepConfig(max_to_keep=3, every=timedelta(days=7), full_every=10)
        >>> TrainConfig(model_dir="run", keep=keep).keep.max_to_keep
        3
    """

    max_to_keep: int = 10
    """How many checkpoints are kept, besides exempt ones; 0 keeps all."""
    every: timedelta | None = timedelta(hours=24)
    """The period of which one checkpoint is kept for good, when it would be deleted; None keeps none."""
    full_every: int = 1
    """Every how many saves a full checkpoint is written; the saves between hold only the changed rows."""
    evict: bool = False
    """Whether expired rows are dropped before each save, as `expiry` says; a save by itself writes all rows
    there are."""

    def __post_init__(self) -> None:
        if self.max_to_keep < 0:
            raise ConfigError(f"keep: max_to_keep must be 0 or more, got {self.max_to_keep}")
        if self.full_every < 1:
            raise ConfigError(f"keep: full_every must be at least 1, got {self.full_every}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreConfig:
    """The checkpoint that a run starts from.

    A model_dir with a checkpoint resumes from it, whatever is set here.

    Examples:
        >>> from monolith import RestoreConfig, TrainConfig
        >>> config = TrainConfig(model_dir="run2", restore=RestoreConfig(dir="run1", optimizer_state="reset"))
        >>> config.restore.strict
        True
    """

    dir: str | None = None
    """Another model_dir to start from, where this one has no checkpoint of its own. Nothing is copied."""
    checkpoint: str | None = None
    """Which of the listed checkpoints to restore, such as model.ckpt-30; training does it once per model_dir.
    One that is not listed is skipped with a warning, unless it is `required`."""
    required: bool = False
    """Whether a missing `checkpoint` ends the run with an error, and any that is on disk and sound is taken,
    by name, step or prefix; training rolls back to each once. --restore-checkpoint sets it."""
    restart_data: bool = False
    """Whether a run that starts from `dir` reads its data from the beginning, instead of resuming where the
    other run stopped."""
    optimizer_state: Literal["keep", "reset", "auto"] = "keep"
    """What happens to the optimizer state of restored rows; auto resets it where the optimizer changed."""
    strict: bool = True
    """Whether a table or variable that the checkpoint lacks is an error."""
    fit: bool = False
    """Whether the checkpoint of `dir` may be of another model: one without a feature, with other widths, of
    another optimizer or type. What fits is loaded, the rest starts fresh, and a table of both is logged.
    Data, metrics and evaluations start over. Later starts resume as always. --from sets it."""
    alias_map: Mapping[str, str] | None = None
    """The dense variables that were saved under another name: name in the model to name in the checkpoint."""
    auto_alias: bool = True
    """Whether the old names of variables that the checkpoint does not have are guessed."""
    reset_dense: bool = False
    """Whether dense variables are initialized again, once, and only rows are restored."""
    continue_training: bool = False
    """Whether `reset_dense` keeps the step of the checkpoint, instead of counting from 0."""

    def __post_init__(self) -> None:
        self.options("")  # refuses what does not go together

    def options(self, model_dir: str) -> RestoreOptions:
        return RestoreOptions(
            optimizer_state=self.optimizer_state,
            strict=self.strict,
            custom=CustomRestore(
                alias_map=None if self.alias_map is None else dict(self.alias_map),
                reset_dense=self.reset_dense,
                continue_training=self.continue_training,
                auto_alias=self.auto_alias,
            ),
            model_dir=model_dir,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TablesConfig:
    """How the slots of a model become tables."""

    merge_equal_slots: bool = False
    """Whether slots with equal rows (dims, optimizers, initializers, rates) live in one table: fewer tables
    with larger batches. Only slots whose ids are fids, which carry the number of their slot (examples.fids),
    and that have no capacity_bytes. Results are the same; a checkpoint restores with either value."""
    initial_rows: int = 0
    """How many rows each table has room for from the start, if its feature does not say; 0 for few."""
    embedding_dtype: EmbeddingDtype = "float32"
    """How tables store embeddings, if their features do not say. "bfloat16" and "float16" take half the
    bytes, "int8" a quarter and 4 more; steps are computed in float32 and optimizer state stays float32. A
    checkpoint restores with any value."""
    embedding_rounding: EmbeddingRounding = "stochastic"
    """How steps are rounded to embedding_dtype: "stochastic" by a repeatable chance, so that the mean of many
    small steps is right, or "nearest", which loses small ones: with bfloat16 those of less than 1/512 of a
    value."""
    storage: TableStorage = "memory"
    """Where rows are: "memory" keeps all of them there; "tiered" keeps the hot ones in memory_bytes of memory
    and all others in files, for tables that are larger than memory. With rows on a GPU there are three tiers:
    the hottest rows are in device_memory_bytes of the GPU, and files have those that fit into neither."""
    memory_bytes: int | None = None
    """Bytes of host memory of each tiered table, for hot rows, 9 to 10 bytes for each cold row, and buffers.
    Memory of a GPU is no part of it."""
    storage_dir: str | None = None
    """The folder for the files of tiered tables, on a local disk; by default "cold" in a local model_dir,
    else the system's folder of temporary files. They are no checkpoint: the process removes them at its
    end."""

    def __post_init__(self) -> None:
        if self.initial_rows < 0:
            raise ConfigError(f"tables: initial_rows must be 0 or more, got {self.initial_rows}")
        check_embedding_storage("tables", self.embedding_dtype, self.embedding_rounding)
        check_table_storage("tables", self.storage, self.memory_bytes, self.storage_dir)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a task is trained, in each process of a run.

    Examples:
        >>> from monolith import KeepConfig, SaveConfig, TrainConfig
        >>> config = TrainConfig(
        ...     model_dir="run", max_steps=10_000, save=SaveConfig(steps=1000), keep=KeepConfig(max_to_keep=3)
        ... )
        >>> config.save.steps
        1000
    """

    model_dir: str = ""
    """The folder of checkpoints, summaries and the run's manifest, local or remote; "" keeps nothing. A run
    of several processes needs one."""
    model_name: str = ""
    """The name of the model in metrics and in sampled predictions; by default the job's or the task's."""
    submitted_at: float | None = None
    """Unix seconds at which the job was submitted; metrics of the start-up time count from it. None counts
    from the start of training."""
    steps: int | None = None
    """The run ends after this many more steps."""
    max_steps: int | None = None
    """The run ends when the model has taken so many steps in all its runs."""
    max_time: timedelta | None = None
    """The run ends after so long."""
    epochs: int | None = None
    """How often the training data is read, in another order each time; None leaves that to the task. Needs
    data that ends, such as files."""
    shuffle_buffer: int = 65_536
    """The records that are held at a time to be mixed, where `epochs` is given and the task's source does not
    shuffle by itself; 0 leaves their order. A list of files is mixed over its whole
    length, whatever it is."""
    seed: int = 0
    """The seed of the first weights and of random numbers."""
    deterministic: bool = False
    """Whether nothing may depend on time: the same data gives the same bits, also through kills and restarts.
    Saves are then waited for, and counted in steps."""
    accelerator: Literal["cpu", "cuda", "xla"] | None = None
    """Where the dense half of the model computes: xla is a TPU, and needs torch_xla. None leaves it where the
    task has put it."""
    embedding_device: Literal["host", "device"] | None = None
    """The memory that holds embedding rows: that of the host, or that of the accelerator, which must be cuda.
    On the device, only ids cross the bus, and no step waits for rows. For runs of one process, and for ranks
    without parameter servers. None trains with rows on the device in a run of one process on a GPU that can
    hold them, or if device_memory_bytes is set; other runs, and commands that only read a model, have them in
    host memory."""
    device_memory_bytes: int | None = None
    """The memory of the accelerator that rows on it may take, all tables together: "40GB". It is taken at the
    start; beyond it the rows that were not trained for longest go to host memory and, with tables.storage =
    "tiered", from there to files. None takes as much as rows need. If a run of one process then finds no room
    for more, it resumes from its last checkpoint with a part of that memory."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The numbers that the dense half computes with in training. bfloat16 is torch's autocast: it computes
    matrix products, while weights, losses, and rows with their gradients stay float32. Evaluation and serving
    compute in float32."""
    step_graphs: bool = True
    """Whether training steps on a GPU that holds the rows are captured and replayed as CUDA graphs: one
    launch in place of about a hundred. If a model cannot be captured, the log says why, and it is trained by
    single launches. False for models that do something else in each step, such as reading a clock."""
    tables: TablesConfig = field(default_factory=TablesConfig)
    prefetch: int = 1
    """The number of batches that are read and prepared ahead; 0 for none. Their rows are looked up ahead,
    too, unless they are to be fresh."""
    reading_process: bool | None = None
    """Whether a process of its own reads the data, in place of threads of the process that trains: they take
    turns with its steps in Python. None has one where files are read on a machine with 8 cores or more, by a
    run that `monolith train` starts from a config without a task in Python and without histories. Batches,
    their order and checkpoints are the same. For files and tables; Linux only."""
    fresh_rows: bool | None = None
    """Whether a step reads rows after the update of the step before it, as with `prefetch = 0`. If not, rows
    that two batches in a row share are one update old, and updates are done while the next batch is computed.
    None follows the data: fresh if it is read once, as a stream is, and not if `epochs` is set. Rows on
    parameter servers and ranks are looked up ahead, and are never fresh unless prefetch is 0; steps that are
    replayed as CUDA graphs look their rows up themselves, and are always fresh."""
    async_push: bool = True
    """Whether rows are updated while the next batch is computed, if they need not be fresh."""
    evict_every_steps: int | None = None
    """How many steps there are between drops of expired rows, as `expiry` says; None drops them only where
    `keep.evict` says so."""
    expiry: ExpiryConfig = field(default_factory=ExpiryConfig)
    save: SaveConfig = field(default_factory=lambda: SaveConfig(steps=1000, asynchronous=True))
    dense_save: SaveConfig | None = None
    """How often the dense weights alone are saved too, in `dense_only` below model_dir; None never."""
    keep: KeepConfig = field(default_factory=KeepConfig)
    restore: RestoreConfig = field(default_factory=RestoreConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    hours: DailyHours | None = None
    """The daily hours, UTC, in which to train; outside of them the run saves and ends. If a run's config also
    sets `save.secs_outside_hours`, the run continues, and saves at that interval."""
    schedule: ScheduleConfig | None = None
    """How learning rates move with the step; None leaves that to the task."""
    alert: AlertConfig | None = None
    """What to do about a loss that is NaN or explodes; None does not look."""
    max_skipped_in_a_row: int = 10
    """How many batches in a row may be skipped because their loss or a gradient is NaN or infinite; one more
    ends the run before it saves. A skipped batch counts as read, and neither as a step nor as trained on."""
    metric_window: int | timedelta = 100_000
    """The examples, or the event time, over which each reported metric is computed."""
    eval_predictions: Literal["auto", "always", "never"] = "auto"
    """Whether the metrics of training are computed on predictions in eval mode, which costs a second forward
    pass in each step. auto does so only where the model has layers that differ in training, such as dropout
    and batch norm, or whose forward looks at self.training; never takes the predictions of the step."""
    hooks: HooksConfig = field(default_factory=HooksConfig)
    operator_files: bool = False
    """Whether the run obeys the files dump_<step>, stop_<step> and limit_req_time in the model_dir."""
    operator_files_every_steps: int = 100
    """How often operator_files looks for dump_<step> and stop_<step>, in steps; their steps are multiples of
    it."""
    request_time_every_steps: int = 1000
    """How often operator_files looks at limit_req_time, and whether the data has reached it, in steps. Among
    ranks, the data of rank 0 says it for all."""
    dump_window: DailyHours | None = None
    """The daily hours, UTC, in which a run with operator_files saves by itself; outside of them only where a
    file asks for it. None saves at any hour."""
    insight_every_steps: int | None = None
    """Report the contribution of each feature every so many steps, for `monolith evaluate insight`; None
    writes none. Any model has them; see `ModelInsightHook`."""
    insight_label: str | None = None
    """The label that is written next to the contributions of features (`fi_train`), so that `monolith
    insight` can say how well each feature predicts it; None writes only how large they are (`fi_direct`)."""
    summary_every_steps: int | None = 100
    """How many steps there are between summaries, in TensorBoard's files or where `tracking` says; None
    writes none."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    report_every: timedelta = timedelta(seconds=30)
    """How often a line is logged, where there is no terminal."""
    report_every_steps: int | None = None
    """How many steps there are between log lines, on a terminal too; None logs by report_every."""
    idle_after: timedelta = timedelta(seconds=1)
    """How long a stream may bring nothing before rows are updated without waiting for it."""

    def __post_init__(self) -> None:
        if self.device_memory_bytes is not None and (
            self.embedding_device == "host" or self.device_memory_bytes < 1
        ):
            raise ConfigError(
                f"train: device_memory_bytes is {self.device_memory_bytes:,}; it must be above 0, and is for "
                "embedding_device='device'. Leave it out, or keep rows on the device"
            )
        if self.asks_for_device_rows and self.accelerator != "cuda":
            given = "embedding_device='device'" if self.embedding_device else "device_memory_bytes"
            raise ConfigError(
                f"train: {given} needs a GPU, and accelerator is {self.accelerator!r}; "
                "set accelerator to cuda, or embedding_device to host"
            )
        if (
            self.tables.storage == "tiered"
            and self.embedding_device == "device"
            and self.device_memory_bytes is None
        ):
            raise ConfigError(
                "train: tables.storage='tiered' with embedding_device='device' needs device_memory_bytes, "
                "the memory of the accelerator for rows of all tables; rows beyond it are in "
                "tables.memory_bytes of host memory for each table, and in files"
            )
        if self.submitted_at is not None and self.submitted_at < 0:
            raise ConfigError(f"train: submitted_at must be 0 or more, or None, got {self.submitted_at}")
        if self.dump_window is not None and not self.operator_files:
            raise ConfigError("train: dump_window is for runs with operator_files; set that, or leave it out")
        for name in (
            "steps",
            "max_steps",
            "evict_every_steps",
            "summary_every_steps",
            "operator_files_every_steps",
            "request_time_every_steps",
        ):
            given = getattr(self, name)
            if given is not None and given < (1 if name.endswith("every_steps") else 0):
                raise ConfigError(f"train: {name} must be above 0, or None, got {given}")
        for name in ("insight_every_steps", "report_every_steps"):
            if (steps := getattr(self, name)) is not None and steps < 1:
                raise ConfigError(f"train: {name} must be above 0, got {steps}")
        if self.insight_label is not None and self.insight_every_steps is None:
            raise ConfigError("train: insight_label needs insight_every_steps: how often it is written")
        if self.max_skipped_in_a_row < 0:
            raise ConfigError(
                f"train: max_skipped_in_a_row must be 0 or more, got {self.max_skipped_in_a_row}"
            )
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"train: epochs must be at least 1, or None, got {self.epochs}")
        if self.shuffle_buffer < 0:
            raise ConfigError(f"train: shuffle_buffer must be 0 or more, got {self.shuffle_buffer}")
        if self.prefetch < 0:
            raise ConfigError(f"train: prefetch must be 0 or more, got {self.prefetch}")
        if self.deterministic and self.evaluate.every is not None:
            raise ConfigError(
                "train: a deterministic run is evaluated by steps, not by time: set evaluate.every_steps, or "
                "deterministic=False"
            )
        if self.deterministic and self.save.secs is not None:
            raise ConfigError(
                "train: a deterministic run saves by steps, not by seconds: set save.steps, "
                "or deterministic=False"
            )

    @property
    def summaries_dir(self) -> str:
        """The folder of TensorBoard's event files."""
        return self.tracking.tensorboard_dir or filesystem.join(self.model_dir, "summaries")

    @property
    def curves_dir(self) -> str:
        """The folder of the event files of evaluations."""
        return filesystem.join(self.tracking.tensorboard_dir or self.model_dir, "eval")

    @property
    def asks_for_device_rows(self) -> bool:
        """Whether rows are to be on the accelerator whatever the run is; see `runtime.rows_place` for a
        config that leaves it open."""
        if self.embedding_device is None:
            return self.device_memory_bytes is not None
        return self.embedding_device == "device"

    @property
    def wants_fresh_rows(self) -> bool:
        """Whether rows are read after the updates of all earlier steps, if they are in this process."""
        return self.epochs is None if self.fresh_rows is None else self.fresh_rows

    @property
    def settled_tables(self) -> TablesConfig:
        """`tables`, with the folder for files of tiered tables settled: below a local model_dir."""
        tables, model_dir = self.tables, self.model_dir
        if tables.storage == "memory" or tables.storage_dir is not None:
            return tables
        if not model_dir or filesystem.is_remote(model_dir):
            return tables
        return replace(tables, storage_dir=filesystem.join(model_dir, "cold"))

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while training continues."""
        return self.save.asynchronous and not self.deterministic


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksConfig:
    """How ranks that train in step add up the gradients of the dense weights."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """What adds them up: gloo in the memory of the host, nccl on GPUs, one for each rank. Rows on GPUs are
    exchanged by the same."""
    bucket_bytes: int = 4 << 20
    """How many bytes of gradients are sent at a time, while backward computes the rest; 0 sends those of each
    weight separately."""
    half_gradients: bool = False
    """Whether gradients are sent as half floats, at half the bytes; each is rounded to one part in 2,048."""
    skip_allreduce: bool = False
    """Whether gradients of dense weights are not added up at all. Then the weights of ranks drift apart, and
    those of rank 0 are saved: only to see what the exchange costs."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0:
            raise ConfigError(f"ranks: bucket_bytes must be 0 or more, got {self.bucket_bytes}")
