"""Topics by a config alone: messages are trained on as records of files are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka

from monolith.checkpoint.offline.reading import find_id
from monolith.cli.main import main
from monolith.data import KafkaSink
from monolith.feature import hash_strings

EVENTS = [{"user": f"u{n % 40}", "movie": n % 7, "click": n % 2} for n in range(300)]

FEATURES = """
[features.user]
kind = "string"
[features.movie]
kind = "int"
[labels.click]
[model]
type = "deepfm"
dim = 4
hidden = [8]
[task]
batch_size = 100
"""


def trained(config: Path, data: str, capsys: pytest.CaptureFixture[str]) -> int:
    config.write_text(f'{data}\n{FEATURES}\n[train]\nmodel_dir = "{config.with_suffix("")}"\n')
    assert main(["train", "--config", str(config), "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    checkpoint = report["checkpoint"]
    for user in ("u0", "u39"):
        [number] = hash_strings([user]).tolist()
        assert find_id(checkpoint, "user", number).status == "found", f"{user} has no row"
    examples: int = report["examples"]
    return examples


@pytest.mark.parametrize("form", ["json", "csv"])
def test_topics_are_trained_on_by_config_and_strings_are_hashed_as_from_a_file(
    kafka: Kafka, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    topic = kafka.create_topic()
    sink = KafkaSink([kafka.address], topic, settings=PRODUCER_SETTINGS)
    lines = [",".join(map(str, one.values())) for one in EVENTS]
    sink.send(
        [json.dumps(one).encode() for one in EVENTS] if form == "json" else [one.encode() for one in lines]
    )
    sink.flush()
    sink.close()
    (tmp_path / "clicks.csv").write_text("\n".join(["user,movie,click", *lines]) + "\n")
    settings = "\n".join(f'"{name}" = {json.dumps(value)}' for name, value in CONSUMER_SETTINGS.items())
    columns = 'columns = ["user", "movie", "click"]' if form == "csv" else ""
    topics = f"""
[data.kafka]
servers = ["{kafka.address}"]
topics = ["{topic}"]
group = "train"
format = "{form}"
stream_timeout = "1s"
poll_timeout = "1s"
{columns}
[data.kafka.settings]
{settings}
"""
    assert trained(tmp_path / "topics.toml", topics, capsys) == 300
    assert trained(tmp_path / "file.toml", f'[data]\npath = "{tmp_path}/clicks.csv"', capsys) == 300
    assert main(["train", "--config", str(tmp_path / "topics.toml"), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 0  # offsets are in the checkpoint


@pytest.mark.parametrize(
    ("data", "more", "what"),
    [
        (
            'watch = "x/*.csv"',
            "[train]\nepochs = 2",
            "a stream is read once, as it comes: leave train.epochs out",
        ),
        ('watch = "x/*.csv"', "[features.price]\nquantiles = 4", "there is none yet: no file matches"),
        (
            'kafka = { servers = ["k"], topics = ["t"], group = "g" }',
            "[features.price]\nquantiles = 4",
            "topics have no end up to which they could be read first",
        ),
    ],
)
def test_what_a_stream_cannot_do_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, more: str, what: str
) -> None:
    config = tmp_path / "live.toml"
    config.write_text(f"[data]\n{data}\n{FEATURES}\n{more}\n")
    assert main(["train", "--config", str(config), "--quiet"]) != 0
    assert what in capsys.readouterr().err
