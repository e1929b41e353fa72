"""The settings of publishing: where to, how often, how large the log is, and what pauses it.

Nothing here imports torch: a command reads settings before it decides whether to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from monolith.config import Checked, Problem
from monolith.config.problems import not_negative
from monolith.data.kafka.config import OURS, check_settings
from monolith.errors import ConfigError

KafkaSettings = Mapping[str, str | int | float | bool]
"""Settings of librdkafka in addition to the brokers."""


def kafka_problems(settings: KafkaSettings, url: str | None) -> Iterator[Problem]:
    """Yield what is wrong with the settings of librdkafka that one end of a delta channel is given."""
    if settings and url and not url.startswith("kafka://"):
        yield Problem(
            ("kafka_settings",), f"is for a channel of Kafka, kafka://broker:9092/topic, not {url!r}"
        )
    try:
        check_settings(settings, OURS)
    except ConfigError as error:
        yield Problem(("kafka_settings",), str(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig(Checked):
    """Bounds that pause publishing if a row, a weight or a metric exceeds them. NaN and infinity always do.

    Examples:
        >>> from monolith import GuardConfig, PublishConfig
        >>> guard = GuardConfig(largest_value=100.0, auc_fall=0.05)
        >>> PublishConfig(to="deltas", guard=guard).guard.resume
        'by_hand'
    """

    largest_value: float | None = 10_000.0
    """The largest absolute value that a published row or weight may have; None sets no bound."""
    times_usual: float | None = 100.0
    """The most that a row's largest absolute value may be, as a multiple of the largest value published of
    its table before; values below 1 may always be published. None sets no bound."""
    auc_fall: float | None = 0.1
    """How far the AUC of the latest examples may fall below its running level; None disables this check."""
    calibration_rise: float | None = 0.5
    """How much the calibration error of the latest examples (predicted over happened, less 1) may rise above
    its running level; None disables this check."""
    window: int = 10_000
    """The number of latest examples whose AUC and calibration are compared with their running levels."""
    warm_up: int = 50_000
    """The number of examples of a new run whose AUC and calibration pause nothing: they set the first running
    levels, which checkpoints keep, so that a restart is watched at once."""
    resume: Literal["by_hand", "when_recovered"] = "by_hand"
    """How publishing resumes after the guard has paused it: by `monolith publish resume`, or also by itself,
    when the values are within bounds again. A pause by an operator stays until the operator resumes."""

    def problems(self) -> Iterator[Problem]:
        for name in ("largest_value", "auc_fall", "calibration_rise"):
            given = getattr(self, name)
            if given is not None and not given > 0:
                yield Problem((name,), f"must be above 0, or None, got {given}")
        if self.times_usual is not None and not self.times_usual > 1:
            yield Problem(("times_usual",), f"must be above 1, or None, got {self.times_usual}")
        if self.window < 1:
            yield Problem(("window",), f"must be at least 1, got {self.window}")
        if self.warm_up < self.window:
            yield Problem(("warm_up", "window"), f"is {self.warm_up}, less than one window of {self.window}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig(Checked):
    """Publishing of changed rows and weights, for servers that follow the run (`monolith serve --follow`).

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import PublishConfig, RunConfig
        >>> publish = PublishConfig(to="grpc://127.0.0.1:7900", interval=timedelta(seconds=1))
        >>> RunConfig(publish=publish).publish.to
        'grpc://127.0.0.1:7900'
    """

    to: str | None = None
    """Where changes are published: grpc://host:port (grpc+tls:// with certificates) to listen there,
    kafka://broker/topic, or a folder that servers see. None publishes nothing."""
    interval: timedelta = timedelta(milliseconds=50)
    """The shortest time between two publications. Changed rows are published as soon as a step has changed
    them, and at most this often. If a publication takes more than a twentieth of this, the next one waits for
    twenty times as long as it took, but no longer than 250 ms, so that training keeps its speed."""
    dense_interval: timedelta = timedelta(seconds=1)
    """How often dense weights are published."""
    kafka_settings: KafkaSettings = field(default_factory=dict)
    """Anything else librdkafka knows if `to` is kafka://broker/topic, security included:
    { "security.protocol" = "SASL_SSL", "sasl.mechanism" = "SCRAM-SHA-512", ... }."""
    keep_bytes: int = 256 << 20
    """The most bytes of published changes in each shard's log; a server that is further behind takes a
    snapshot."""
    finish_timeout: timedelta = timedelta(minutes=1)
    """How long a run retries at its end if the channel does not take its last changes. Then the run, which is
    saved, ends with status 75, and its next start publishes all rows. A snapshot that is being written may
    take longer. 0 tries once."""
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def enabled(self) -> bool:
        return self.to is not None

    def problems(self) -> Iterator[Problem]:
        if self.to is not None and not self.to.strip():
            yield Problem(("to",), "must name a channel, or be left out")
        yield from kafka_problems(self.kafka_settings, self.to)
        for name in ("interval", "dense_interval"):
            given = getattr(self, name)
            if given <= timedelta(0):
                yield Problem((name,), f"must be more than 0, got {given}")
        yield from not_negative(self, "finish_timeout")
        if self.keep_bytes < 1 << 20:
            yield Problem(("keep_bytes",), f"must be at least 1048576, a mebibyte, got {self.keep_bytes}")
