"""Alerts about a job, from their text form."""

from __future__ import annotations

from datetime import timedelta

import pytest

from monolith.errors import ConfigError
from monolith.wire.alert_pb2 import AlertProto
from monolith_compat.job_alerts import JobAlertConfig, parse_job_alert


def test_a_whole_alert_is_read() -> None:
    text = """
        alert_message { user: "ada" }
        kafka_alert { topic: "clicks" group: "train" }
        training_alert { prefix: "monolith.training.feed" }
        start_delay_sec: 60
        check_interval_sec: 300
    """
    assert parse_job_alert(text) == JobAlertConfig(
        user="ada",
        kafka_topic="clicks",
        kafka_group="train",
        training_prefix="monolith.training.feed",
        start_delay=timedelta(seconds=60),
        check_interval=timedelta(seconds=300),
    )


def test_an_empty_alert_watches_nothing_every_half_hour() -> None:
    assert parse_job_alert("") == JobAlertConfig()
    assert JobAlertConfig().check_interval == timedelta(minutes=30)


def test_the_fields_have_the_numbers_of_the_wire() -> None:
    numbers = {field.name: field.number for field in AlertProto.DESCRIPTOR.fields}
    assert numbers == {
        "alert_message": 1,
        "kafka_alert": 2,
        "training_alert": 3,
        "start_delay_sec": 1000,
        "check_interval_sec": 10001,
    }
    assert AlertProto().check_interval_sec == 1800


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alert { }", 'no field named "alert"'),
        ("kafka_alert { topic: 'clicks' }", "give both or neither"),
        ("check_interval_sec: 0", "check_interval must be above 0"),
        ("start_delay_sec: -1", "must not be negative"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job_alert(text)
