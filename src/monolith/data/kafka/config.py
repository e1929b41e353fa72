"""Kafka settings: how to reach the brokers, which worker reads which partitions, and the client's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from monolith import concurrency
from monolith.config import Secret
from monolith.errors import ConfigError, optional_package

if TYPE_CHECKING:
    import torch

    from monolith.data.format import BadRecord
    from monolith.data.records import Records


STARTS = ("earliest", "latest")
OURS = ("enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "enable.partition.eof")
"""Settings that positions depend on; users may not set them."""
TAKEN = {"bootstrap.servers": "servers", "group.id": "group"}
"""Settings that have a field of their own."""


Decode = Callable[[list[bytes]], "tuple[Records, Sequence[BadRecord]]"]
"""Turns the payloads of messages into records, in order; the `place` of an unreadable record is its position
among the payloads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByWorker:
    """Gives each worker fixed partitions: p of topic number t to worker (p + t) mod `num_workers`."""

    worker: int
    """The number of this worker, from 0 on."""
    num_workers: int
    """How many workers read the partitions."""

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.num_workers:
            raise ConfigError(
                f"kafka: worker must be from 0 to num_workers - 1 = {self.num_workers - 1}, got {self.worker}"
            )

    def reads(self, topic: int, partition: int) -> bool:
        return (partition + topic) % self.num_workers == self.worker


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaConfig:
    """Which messages are read, by which workers, and how long a read waits.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import KafkaConfig
        >>> config = KafkaConfig(
        ...     servers=("kafka:9092",), topics=("clicks",), group="train", outage_timeout=timedelta(hours=1)
        ... )
        >>> config.start, config.poll_batch
        ('earliest', 128)
    """

    servers: tuple[str, ...]
    """host:port of some brokers; they name the rest of the cluster."""
    topics: tuple[str, ...]
    """The topics to read, each once."""
    group: str
    """The consumer group under which offsets are committed. Outside of a run it also assigns partitions."""
    assignment: ByWorker | None = None
    """The partitions of this source, if they are fixed here. None leaves them to the run: one worker reads
    all partitions; of several, the chief assigns them, again whenever a worker joins or leaves, or they are
    fixed if a stage buffers records (see `read_shard`). So a checkpoint can contain all offsets. Outside of a
    run the consumer group assigns them."""
    run: str = ""
    """Names one start of the job, the same for all its workers. It distinguishes an offset that another
    worker committed since this start from an older one, over which a restored position wins. Only a group
    needs it."""
    poll_batch: int = 128
    """The most messages that are decoded and yielded together. Where a message is itself a batch, take 16."""
    batch_wait: timedelta = timedelta(milliseconds=50)
    """How long the first message of a batch waits for the rest of it."""
    poll_timeout: timedelta = timedelta(seconds=10)
    """How long one poll waits for a message."""
    stream_timeout: timedelta | None = None
    """The source ends after this long without a message, though not before one poll; None never ends it."""
    start: str = "earliest"
    """Where to begin without a position: "earliest" or "latest"."""
    connect_timeout: timedelta = timedelta(seconds=30)
    """How long to try until a broker answers for the first time."""
    outage_timeout: timedelta = timedelta(minutes=10)
    """How long the brokers may be out of reach later on, for reading and for committing."""
    username: str | None = None
    """The user name for SASL."""
    password: Secret | None = None
    """The password for SASL."""
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Anything else librdkafka knows, security included: {"security.protocol": "SASL_SSL", ...}."""

    def __post_init__(self) -> None:
        for name in ("servers", "topics"):
            given = getattr(self, name)
            if isinstance(given, str) or not given or not all(given):
                raise ConfigError(f"kafka: {name} must be a tuple of at least one name, got {given!r}")
        if len(set(self.topics)) < len(self.topics):
            raise ConfigError(f"kafka: topics names one twice: {', '.join(self.topics)}")
        if not self.group:
            raise ConfigError("kafka: group must not be empty, also if no group assigns partitions")
        if self.poll_batch < 1:
            raise ConfigError(f"kafka: poll_batch must be at least 1, got {self.poll_batch}")
        if self.start not in STARTS:
            raise ConfigError(f"kafka: start must be one of {', '.join(STARTS)}, got {self.start!r}")
        for name in ("batch_wait", "poll_timeout", "connect_timeout", "outage_timeout", "stream_timeout"):
            given = getattr(self, name)
            if given is not None and given < timedelta(0):
                raise ConfigError(f"kafka: {name} must not be negative, got {given}")
        check_settings(self.settings, OURS)

    @property
    def client_settings(self) -> dict[str, str | int | float | bool]:
        """The settings and the login as librdkafka takes them; reveals the password."""
        login = {} if self.username is None else {"sasl.username": self.username}
        if self.password is not None:
            login["sasl.password"] = self.password.reveal()
        return {**self.settings, **login}


MessageFormat = Literal["json", "csv", "tf_example", "example", "instance", "example_batch"]
"""The format of a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicsConfig(KafkaConfig):
    """Topics whose messages a run's features are read from, as they are read from columns of a file."""

    format: MessageFormat = "json"
    """The format of a message: a JSON object, one line of CSV without a header, TensorFlow's Example
    (tf_example), or an Example, an Instance or an ExampleBatch of the original system."""
    columns: tuple[str, ...] = ()
    """The names of all fields of a message, in their order; for csv, which does not say them."""

    def __post_init__(self) -> None:
        KafkaConfig.__post_init__(self)
        if (self.format == "csv") != bool(self.columns):
            raise ConfigError(
                f"kafka: columns names the fields of messages in csv, and only of those; format is "
                f"{self.format!r} and columns has {len(self.columns)} names"
            )
        for name, instead in (("poll_batch", "task.batch_size"), ("batch_wait", "data.max_wait")):
            if getattr(self, name) != TopicsConfig.__dataclass_fields__[name].default:
                raise ConfigError(
                    f"kafka: {name} is not for [data.kafka], whose batches are as {instead} says"
                )

    def reading(self, batch_size: int, max_wait: timedelta) -> KafkaConfig:
        """Return how the messages are read, in batches of that size."""
        given = {one.name: getattr(self, one.name) for one in fields(KafkaConfig)}
        return KafkaConfig(**{**given, "poll_batch": batch_size, "batch_wait": max_wait})

    def decoder(self, types: Mapping[str, torch.dtype], threads: int = 1) -> Decode:
        """Return what makes records of messages, with columns of these types.

        Args:
            threads: How many decode the messages of one poll.
        """
        from monolith import native
        from monolith.data.formats.payloads import PayloadParser
        from monolith.data.kafka.messages import CsvMessages, JsonMessages

        workers = native.Workers(threads) if threads > 1 else None
        if self.format == "csv":
            return CsvMessages(self.columns, types, workers=workers)
        if self.format == "json":
            return JsonMessages(types, workers=workers)
        return PayloadParser(self.format, columns=list(types), workers=workers)


def check_settings(settings: Mapping[str, object], ours: Sequence[str]) -> None:
    """Refuse extra settings that are decided elsewhere."""
    for name in settings:
        if name in TAKEN:
            raise ConfigError(f"kafka: give {name!r} as {TAKEN[name]}, not in settings")
        if name in ours:
            raise ConfigError(
                f"kafka: {name!r} cannot be set; which messages were read is for the checkpoint to say"
            )


def read_settings(pairs: Iterable[str]) -> dict[str, str | int | float | bool]:
    """Return settings given as "key=value", as command lines have them."""
    settings: dict[str, str | int | float | bool] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"kafka: a setting must be key=value, got {pair!r}")
        settings[key.strip()] = value.strip()
    return settings


def import_kafka() -> Any:
    """Return the client library, which is an optional extra; in a simulation, that of its broker."""
    if (here := concurrency.machine()) is not None:
        return here.kafka
    with optional_package("confluent-kafka", "kafka", "reading and writing Kafka topics"):
        import confluent_kafka.admin  # which is then an attribute of the package
    return confluent_kafka


QUIET_S = 60.0
"""Seconds in which nothing more of the same kind is shown."""

_CONNECTION = ("FAIL", "ERROR")
"""Kinds that say the same in other words: a broker cannot be reached, and all of them cannot."""


class ClientLog:
    """The client's logger: shows one line of each kind a minute, and logs the rest at debug level.

    Thread-safe: the client calls from threads of its own.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = concurrency.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = concurrency.Lock()  # guards the moments
        self._shown_at: dict[str, float] = {}

    def log(self, level: int, message: str, *args: str) -> None:
        """Log a line of the client; the arguments are its kind, the client's name and a text."""
        if level < logging.WARNING:
            self._logger.log(level, message, *args)
            return
        kind = "connection" if args and args[0] in _CONNECTION else str(args[:1])
        with self._lock:
            now = self._clock()
            again = now - self._shown_at.get(kind, -QUIET_S) < QUIET_S
            if not again:
                self._shown_at[kind] = now
        if again:
            self._logger.debug(message, *args)
        else:
            self._logger.warning(
                f"kafka: the client retries; it says: {message} (more of this is not shown for %.0f s)",
                *args,
                QUIET_S,
            )
