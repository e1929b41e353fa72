"""From what a config says of publishing to the channel of each share."""

from __future__ import annotations

from contextlib import closing

import pytest
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka

from monolith.cli.options.serve import ServeOptions
from monolith.cli.serve import trainer_of
from monolith.cluster.addresses import Address
from monolith.cluster.run_token import TOKEN_FILE, read_token
from monolith.cluster.security import Guard
from monolith.errors import ConfigError
from monolith.observe import Metrics
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.publish import address_of, publish_plan
from monolith.sync import LogPosition, ShardLog
from monolith.sync.channel_url import open_reader
from monolith.sync.messages import run_identity


def test_a_run_that_says_nothing_has_no_plan() -> None:
    assert publish_plan(load_run_config(), Metrics()) is None


def test_a_plan_has_the_settings_and_names_the_run_by_its_folder_and_id(tmp_path) -> None:
    run = load_run_config(code={"publish.to": str(tmp_path / "log"), "train.model_dir": f"{tmp_path}/runs/1"})
    plan = publish_plan(run, Metrics())
    assert plan is not None
    assert plan.config == run.publish
    assert plan.run == run_identity(f"{tmp_path}/runs/1")
    assert publish_plan(run, Metrics()).run == plan.run, "a run that is started again is the same"
    log = ShardLog(plan.run, (0, 1), LogPosition("e", 0), 1, {"item": 4})
    with closing(plan.open_writer((0, 1))) as writer, closing(open_reader(str(tmp_path / "log"))) as reader:
        writer.open(log, lambda buckets=None: iter(()))  # noqa: ARG005
        assert [one.run for one in reader.logs()] == [plan.run]


def test_each_share_has_a_port_of_its_own_and_the_log_says_which(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("pyarrow")
    caplog.set_level("INFO")
    plan = publish_plan(load_run_config(code={"publish.to": "grpc://127.0.0.1:0"}), Metrics())
    assert plan is not None
    with closing(plan.open_writer((0, 2))) as first, closing(plan.open_writer((1, 2))) as second:
        assert f"shard 0 of 2 is published at grpc://{first.address}" in caplog.text
        assert f"shard 1 of 2 is published at grpc://{second.address}" in caplog.text
        assert first.address != second.address


def test_a_port_of_a_run_that_was_given_no_token_demands_the_one_in_its_folder(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    code = {"publish.to": "grpc://127.0.0.1:0", "train.model_dir": str(tmp_path)}
    plan = publish_plan(load_run_config(code=code), Metrics())
    assert plan is not None
    log = ShardLog(plan.run, (0, 1), LogPosition("e", 0), 1, {"item": 4})
    with closing(plan.open_writer((0, 1))) as writer:
        writer.open(log, lambda buckets=None: iter(()))  # noqa: ARG005
        url = f"grpc://{writer.address}"
        guard = Guard(token=read_token(tmp_path / TOKEN_FILE))
        with closing(open_reader(url, guard=guard)) as reader:
            assert [one.run for one in reader.logs()] == [plan.run]
        with (
            closing(open_reader(url)) as reader,
            pytest.raises(ConfigError, match="refused the shared token"),
        ):
            reader.logs()


def test_holders_listen_at_the_addresses_they_are_given_or_at_ports_that_follow() -> None:
    assert address_of(("a:1", "b:2"), (1, 2)) == Address("b", 2)
    assert address_of(("a:7900",), (0, 3)) == Address("a", 7900)
    assert address_of(("a:7900",), (2, 3)) == Address("a", 7902)
    assert address_of(("a:0",), (2, 3)) == Address("a", 0)
    with pytest.raises(ConfigError, match="2 addresses for 3 publishers"):
        address_of(("a:1", "b:2"), (0, 3))


def test_what_is_no_channel_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"publish\.to: cannot open the delta channel 'grcp://h:1'"):
        publish_plan(load_run_config(code={"publish.to": "grcp://h:1"}), Metrics())


def test_a_run_publishes_to_a_broker_with_the_settings_that_it_needs_and_a_server_follows_with_its_own(
    kafka: Kafka,
) -> None:
    topic = kafka.create_topic()
    settings = {"publish.kafka_settings": PRODUCER_SETTINGS}
    to = f"kafka://{kafka.address}/{topic}"
    plan = publish_plan(load_run_config(code={"publish.to": to, **settings}), Metrics())
    assert plan is not None
    run = load_run_config(code={"serve.follow.url": to, "serve.follow.kafka_settings": CONSUMER_SETTINGS})
    options = ServeOptions(folders=())
    with closing(plan.open_writer((0, 1))) as writer, trainer_of(options, run.serve) as opener:
        log = ShardLog("run", (0, 1), LogPosition("e", 0), 1, {"item": 4})
        writer.open(log, lambda buckets=None: iter(()))  # noqa: ARG005
        assert opener is not None
        with closing(opener()) as reader:
            assert [one.run for one in reader.logs()] == ["run"]


@pytest.mark.parametrize("section", ["publish.{}", "serve.follow.{}"])
@pytest.mark.parametrize(
    ("url", "settings", "says"),
    [
        ("deltas", {"security.protocol": "SASL_SSL"}, "is for a channel of Kafka"),
        ("kafka://broker:9092/deltas", {"bootstrap.servers": "broker"}, "bootstrap.servers"),
    ],
)
def test_settings_of_kafka_that_nothing_would_obey_are_refused(
    section: str, url: str, settings: dict[str, str], says: str
) -> None:
    to = section.format("to" if section.startswith("publish") else "url")
    with pytest.raises(ConfigError, match=says):
        load_run_config(code={to: url, section.format("kafka_settings"): settings})
