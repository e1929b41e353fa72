"""The settings of what else a run does: checked when they are made."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from monolith.errors import ConfigError
from monolith.train.hooks import DeepInsightConfig, HooksConfig

KAFKA = {"KAFKA_BROKER_LIST": "a:1, b:2", "KAFKA_TOPIC_NAME": " t "}


@pytest.mark.parametrize(
    "given",
    [
        {"slow_start_steps": -1},
        {"slow_start_max_wait": timedelta(0)},
        {"memory_limit_bytes": 0},
        {"memory_check_every": timedelta(0)},
        {"heartbeat_every": timedelta(0)},
        {"throughput_every": timedelta(seconds=-1)},
        {"online_file_every_steps": 0},
        {"nas_every_steps": 0},
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        HooksConfig(**given)


def test_a_share_of_examples_is_from_0_to_1() -> None:
    with pytest.raises(ConfigError, match="sample_ratio must be from 0 to 1"):
        DeepInsightConfig(sample_ratio=1.5)


def test_further_fields_need_targets() -> None:
    with pytest.raises(ConfigError, match="extra_fields needs targets"):
        DeepInsightConfig(extra_fields=("gid",))


def test_brokers_and_topic_come_from_the_environment_where_settings_say_nothing() -> None:
    found = HooksConfig().with_environment(KAFKA).deep_insight
    assert (found.kafka_brokers, found.kafka_topic) == (("a:1", "b:2"), "t")
    said = DeepInsightConfig(kafka_brokers=("c:3",), kafka_topic="own")
    assert HooksConfig(deep_insight=said).with_environment(KAFKA).deep_insight == said


def test_a_broker_in_the_environment_alone_turns_nothing_on() -> None:
    assert not HooksConfig().with_environment(KAFKA).deep_insight.kafka


def test_settings_are_read_without_torch() -> None:
    code = "import sys, monolith.train.hooks.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
