"""The guide for Kafka, word for word, against a real broker: producer, task, config and command."""

from __future__ import annotations

import json
import re
import tomllib
from functools import reduce
from pathlib import Path

import pytest
from services import warm
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka

PAGE = Path(__file__).parents[2] / "docs/guides/kafka.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def toml_of(settings: dict[str, object]) -> str:
    return "\n".join(f'"{name}" = {json.dumps(value)}' for name, value in settings.items())


@pytest.fixture
def folder(kafka: Kafka, tmp_path: Path) -> Path:
    """The files of the page, with the broker and the topic of this test."""
    topic = kafka.create_topic()
    producer, task = blocks("python")
    (config,) = blocks("toml")
    changes = {
        '"localhost:9092"': f'"{kafka.address}"',
        '"clicks", settings={}': f'"{topic}", settings={PRODUCER_SETTINGS!r}',
        'topics = ["clicks"]': f'topics = ["{topic}"]',
        '"client.id" = "clicks"': toml_of(CONSUMER_SETTINGS),
        '"10s"': '"1s"',
    }
    for name, text in (
        ("producer.py", producer),
        ("clicks.py", "import json\n" + task),
        ("clicks.toml", config),
    ):
        (tmp_path / name).write_text(reduce(lambda so_far, one: so_far.replace(*one), changes.items(), text))
    assert tomllib.loads((tmp_path / "clicks.toml").read_text())["kafka"]["topics"] == [topic]
    return tmp_path


def test_what_was_produced_is_trained_on_once_and_bad_messages_are_set_aside(folder: Path) -> None:
    warm.run(["producer.py"], cwd=folder, timeout=120, check=True)
    (command,) = blocks("sh")
    assert command.split()[0] == "monolith"
    words = ["-m", *command.split(), "--json"]
    first = json.loads(warm.run([*words, "--max-steps", "8"], cwd=folder, timeout=300, check=True).stdout)
    second = json.loads(warm.run(words, cwd=folder, timeout=300, check=True).stdout)
    assert first["step"] == 8
    assert first["examples"] + second["examples"] == 2000
    reasons = [
        json.loads(line)["reason"] for line in (folder / "bad_messages.jsonl").read_text().splitlines()
    ]
    assert ["'seventeen' is not a whole number" in reason for reason in reasons] == [False, True]
