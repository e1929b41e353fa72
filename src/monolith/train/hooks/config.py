"""What else a run does while it trains, as settings; `installed` makes the hooks they ask for.

Nothing here needs torch: a command reads settings before it decides whether to train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

from monolith.errors import ConfigError

KAFKA_BROKERS_VARIABLE = "KAFKA_BROKER_LIST"
KAFKA_TOPIC_VARIABLE = "KAFKA_TOPIC_NAME"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepInsightConfig:
    """Messages about single predictions, for a sample of the examples; off unless it has somewhere to go.

    Batches need the features `uid` and `req_time`.
    """

    folder: str | None = None
    """The local folder in which sampled predictions are written, by model, day and worker; None writes no
    files."""
    kafka: bool = False
    """Whether sampled predictions are sent to Kafka as JSON messages."""
    kafka_brokers: tuple[str, ...] = ()
    """The brokers for sampled predictions, as host:port; by default those of the variable
    KAFKA_BROKER_LIST."""
    kafka_topic: str = ""
    """The topic for sampled predictions; by default that of the variable KAFKA_TOPIC_NAME."""
    kafka_settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """What else the Kafka client that sends sampled predictions is told, by librdkafka's own names."""
    sample_ratio: float = 0.01
    """The share of examples whose prediction is reported, from 0 to 1."""
    targets: tuple[str, ...] = ()
    """The labels whose predictions are reported together in one message; without any, a message has one
    target."""
    extra_fields: tuple[str, ...] = ()
    """Features that are reported in addition to the predictions of `targets`."""

    def __post_init__(self) -> None:
        if not 0 <= self.sample_ratio <= 1:
            raise ConfigError(f"deep insight: sample_ratio must be from 0 to 1, got {self.sample_ratio}")
        if self.extra_fields and not self.targets:
            raise ConfigError("deep insight: extra_fields needs targets; messages of one target have none")

    @property
    def enabled(self) -> bool:
        return self.folder is not None or self.kafka

    def with_environment(self, environ: Mapping[str, str]) -> DeepInsightConfig:
        """Return these settings with what the environment says of Kafka where they say nothing."""
        brokers = environ.get(KAFKA_BROKERS_VARIABLE, "").split(",")
        return replace(
            self,
            kafka_brokers=self.kafka_brokers or tuple(one.strip() for one in brokers if one.strip()),
            kafka_topic=self.kafka_topic or environ.get(KAFKA_TOPIC_VARIABLE, "").strip(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where the numbers of a run go, every `summary_every_steps`."""

    sinks: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Where loss, metrics, rows and speed are written: tensorboard for event files, mlflow for an MLflow
    server or database, wandb for Weights & Biases."""
    tensorboard_dir: str = ""
    """The folder of TensorBoard's event files, those of evaluations in eval/ below it; by default summaries/
    and eval/ of the model_dir. One folder for each model: a run hides what another one wrote there."""
    project: str = ""
    """The MLflow experiment or W&B project; by default the task's name."""
    run_name: str = ""
    """What MLflow and W&B call the run; by default the task's name."""
    mlflow_uri: str = ""
    """The MLflow server or database, such as http://host:5000 or sqlite:///runs.db; by default what the
    variable MLFLOW_TRACKING_URI says."""
    wandb_offline: bool = False
    """Whether W&B writes files in the model_dir and sends nothing; `wandb sync` does that later."""

    def __post_init__(self) -> None:
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(f"tracking: sinks names one twice: {', '.join(self.sinks)}")
        if self.mlflow_uri and "mlflow" not in self.sinks:
            raise ConfigError("tracking: mlflow_uri needs 'mlflow' among sinks")
        if self.wandb_offline and "wandb" not in self.sinks:
            raise ConfigError("tracking: wandb_offline needs 'wandb' among sinks")


@dataclass(frozen=True, kw_only=True, slots=True)
class HooksConfig:
    """What else a run does while it trains. By default nothing of it is done."""

    slow_start_steps: int = 0
    """Workers join one after another: worker i takes its first step when the model has reached step
    slow_start_steps * ln(1 + i). With 0 all begin together."""
    slow_start_max_wait: timedelta = timedelta(minutes=10)
    """The longest that a worker waits for its slow start once the model moves. Up to 10 minutes are added at
    random, so that workers that give up do not all begin at once."""
    memory_limit_bytes: int | None = None
    """The memory that a process with rows may use: a parameter server, or the only process of a run. Above it
    the chief halts training, logs which process it is, and waits to be stopped. None does not check."""
    memory_check_every: timedelta = timedelta(seconds=30)
    """How often memory is compared with memory_limit_bytes."""
    heartbeat_every: timedelta | None = None
    """How often the chief counts the metric training_heart_beat, also during a long step; None never."""
    throughput_every: timedelta | None = None
    """How often the chief reports steps, their time and the loss as metrics, and once the time that the run
    took to start; None never."""
    online_file: bool = False
    """Whether dense weights alone (dense_save) are saved only while a file ONLINE is in model_dir."""
    online_file_every_steps: int = 100
    """How often online_file looks for the file, in steps."""
    nas_every_steps: int | None = None
    """How often, in steps, the weights of an architecture search (IRazor layers, as `selecting`) and of gates
    over features (SeNet layers, as `gating`) are written to the summaries, for `monolith evaluate insight`;
    None never."""
    deep_insight: DeepInsightConfig = field(default_factory=DeepInsightConfig)

    def __post_init__(self) -> None:
        if self.slow_start_steps < 0:
            raise ConfigError(f"hooks: slow_start_steps must be 0 or more, got {self.slow_start_steps}")
        for name in ("memory_limit_bytes", "online_file_every_steps", "nas_every_steps"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"hooks: {name} must be at least 1, got {count}")
        for name in ("slow_start_max_wait", "memory_check_every", "heartbeat_every", "throughput_every"):
            every = getattr(self, name)
            if every is not None and every <= timedelta(0):
                raise ConfigError(f"hooks: {name} must be above 0, got {every}")

    def with_environment(self, environ: Mapping[str, str]) -> HooksConfig:
        """Return these settings with what the environment says where they say nothing."""
        return replace(self, deep_insight=self.deep_insight.with_environment(environ))
