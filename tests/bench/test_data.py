"""`monolith bench data`: what it prints, and that the usual ways read the same batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from services import warm
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from services.servers import free_port

from monolith.cli.main import main
from monolith.data import ByWorker, KafkaConfig
from monolith.data.formats import CsvFormat, JsonLinesFormat, ParquetFormat, TfRecordFormat
from monolith.errors import ConfigError
from monolith_bench import data, data_features, data_kafka
from monolith_bench.options import BenchDataOptions
from monolith_bench.report import Report, cores


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = ["-m", "monolith", "bench", "data", "--quick", "--json"]
    done = warm.run(command, check=True)
    assert "2,000 records" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_format_is_measured(report: dict[str, Any]) -> None:
    assert report["bench"] == "data"
    found = {result["case"]: result for result in report["results"]}
    for name in ("tf_example", "example", "instance", "example_batch", "parquet", "csv", "jsonl"):
        assert found[name]["metric"] == "records_per_s"
        assert found[name]["value"] > 0
        assert found[f"{name}, bytes"]["unit"] == "MB/s"
    assert found["tf_example"]["baseline"] == "protobuf, tf_example"
    assert found["parquet"]["baseline"] == "pyarrow to_numpy, parquet"
    assert found["csv"]["baseline"] == "csv module, csv"
    assert found["jsonl"]["baseline"] == "json module, jsonl"


def test_reading_with_several_threads_is_held_against_one(report: dict[str, Any]) -> None:
    found = {result["case"]: result for result in report["results"]}
    for name in ("csv", "jsonl", "tf_example", "parquet"):
        assert found[f"{name}, 1 thread"]["value"] > 0
        if cores() > 1:
            assert found[f"{name}, 2 threads"]["baseline"] == f"{name}, 1 thread"
    assert data.DataPlan.settle(BenchDataOptions(threads=(2, 1, 10**6))).threads[-1] == cores()
    with pytest.raises(ConfigError, match="--threads must be at least 1, got 0"):
        data.DataPlan.settle(BenchDataOptions(threads=(0,)))


def test_messages_of_kafka_are_left_out_without_a_broker_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = data.DataPlan.settle(BenchDataOptions(quick=True, records=20, features=2))
    report = Report("data")
    records = data.make_records(plan)
    for options in (BenchDataOptions(), BenchDataOptions(kafka=f"127.0.0.1:{free_port()}")):
        data_kafka.measure_kafka(options, plan.spec, 8, records, report, plan.timing)
        assert "kafka: left out" in capsys.readouterr().err
    assert report.results == []


def test_messages_of_kafka_are_measured_and_both_ways_read_the_same(kafka: Kafka) -> None:
    plan = data.DataPlan.settle(BenchDataOptions(quick=True, records=300, batch=128, features=3))
    topic = kafka.create_topic(partitions=2)
    settings = [f"consumer.{name}={value}" for name, value in CONSUMER_SETTINGS.items()]
    settings += [f"producer.{name}={value}" for name, value in PRODUCER_SETTINGS.items()]
    options = BenchDataOptions(kafka=kafka.address, kafka_topic=topic, kafka_settings=tuple(settings))
    report = Report("data")
    records = data.make_records(plan)
    data_kafka.measure_kafka(options, plan.spec, plan.batch, records, report, plan.timing)
    (client, ours) = report.results
    assert (ours.case, ours.baseline, ours.unit) == ("kafka", client.case, "records/s")
    assert ours.value
    config = KafkaConfig(
        servers=(kafka.address,),
        topics=(topic,),
        group="bench",
        assignment=ByWorker(worker=0, num_workers=1),
        settings=CONSUMER_SETTINGS,
    )
    found = []
    for read in (data_kafka.with_source, data_kafka.with_client):
        batches = list(read(config, plan.spec, 300))
        found.append(
            sorted(
                [batch.ids[n].to_list()[i] for n in plan.spec.ids]
                for batch in batches
                for i in range(len(batch))
            )
        )
        assert len(found[-1]) == 300
    assert found[0] == found[1]


def test_features_of_raw_columns_are_compared_with_reading_the_columns_alone(report: dict[str, Any]) -> None:
    found = {result["case"]: result for result in report["results"]}
    for kind in ("parquet", "csv"):
        for case, baseline in (
            ("strings hashed", "strings read"),
            ("lists split and hashed", "lists hashed as one string"),
            ("floats bucketised", "floats as they are"),
        ):
            result = found[f"{case}, {kind}"]
            assert result["baseline"] == f"{baseline}, {kind}"
            assert result["ratio"] == result["value"] / found[f"{baseline}, {kind}"]["value"]
    assert found["strings hashed in Python, parquet"]["baseline"] == "strings read, parquet"


def test_hashing_in_python_gives_the_same_ids(tmp_path: Path) -> None:
    plan = data.DataPlan.settle(BenchDataOptions(quick=True, records=50, batch=20, features=2))
    case, names = data_features.CASES[0], ["f00", "f01"]
    path, format_ = str(tmp_path / "file"), ParquetFormat()
    data.write(format_, path, data_features.make_columns(case, names, plan), 50)
    spec = data_features.spec_of(names, case.feature)
    ours = data_features.by_spec(format_, path, plan, spec)
    theirs = data_features.with_python(format_, path, plan, names)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.ids.ids, other.ids.ids)


@pytest.mark.parametrize(
    ("format_", "usual"),
    [
        (TfRecordFormat("tf_example"), data.with_protobuf),
        (ParquetFormat(), data.with_pyarrow),
        (CsvFormat(list_separator="|"), data.with_csv_module),
        (JsonLinesFormat(), data.with_json_module),
    ],
)
def test_the_usual_ways_read_the_same(tmp_path: Path, format_: Any, usual: Any) -> None:
    plan = data.DataPlan.settle(BenchDataOptions(quick=True, records=300, batch=128, features=3))
    path = str(tmp_path / "file")
    data.write(format_, path, data.make_records(plan), plan.batch)
    ours, others = list(data.batches(format_, path, plan)), list(usual(path, plan))
    for name in plan.spec.ids:
        assert [row for batch in ours for row in batch.ids[name].to_list()] == [
            row for batch in others for row in batch.ids[name].to_list()
        ]
    for name in plan.spec.floats:
        assert torch.equal(*(torch.cat([b.floats[name] for b in some]) for some in (ours, others)))
    assert torch.equal(torch.cat([b.label for b in ours]), torch.cat([b.label for b in others]))


@pytest.mark.parametrize("flag", ["records", "features", "batch", "threads", "repeats"])
def test_nothing_to_measure_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "data", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be at least 1" in capsys.readouterr().err
