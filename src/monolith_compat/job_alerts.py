"""Alerts about a whole job: the people to alert, the conditions, and how often they are checked.

The text form is upstream's `AlertProto`. A service that watches jobs reads it, and ignores a run
without one. (`hooks.AlertConfig` is another matter: a loss that diverges.)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAlertConfig:
    """The conditions of a training job that are watched. An empty field is not watched."""

    user: str = ""
    """The user who receives the alerts."""
    kafka_topic: str = ""
    kafka_group: str = ""
    """The consumer group whose lag on the topic is watched."""
    training_prefix: str = ""
    """The prefix of the names of the watched metrics."""
    start_delay: timedelta = timedelta(0)
    """Time after the start of a job before the first check."""
    check_interval: timedelta = timedelta(seconds=1800)

    def __post_init__(self) -> None:
        if self.start_delay < timedelta(0):
            raise ConfigError(f"job alert: start_delay must not be negative, got {self.start_delay}")
        if self.check_interval <= timedelta(0):
            raise ConfigError(f"job alert: check_interval must be above 0, got {self.check_interval}")
        if bool(self.kafka_topic) != bool(self.kafka_group):
            raise ConfigError(
                "job alert: a lag is that of a group on a topic, "
                f"got topic {self.kafka_topic!r} and group {self.kafka_group!r}; give both or neither"
            )


def parse_job_alert(text: str) -> JobAlertConfig:
    """Read the text form of an `AlertProto`.

    Raises:
        ConfigError: It does not parse, has an unknown field, or makes no sense.
    """
    from google.protobuf import text_format  # type: ignore[import-untyped]

    from monolith.wire.alert_pb2 import AlertProto

    message = AlertProto()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as cause:
        raise ConfigError(f"job alert: the text is not an AlertProto: {cause}") from cause
    return JobAlertConfig(
        user=message.alert_message.user,
        kafka_topic=message.kafka_alert.topic,
        kafka_group=message.kafka_alert.group,
        training_prefix=message.training_alert.prefix,
        start_delay=timedelta(seconds=message.start_delay_sec),
        check_interval=timedelta(seconds=message.check_interval_sec),
    )
