"""The log of served features: all that was answered, as it was answered, and never in the way of answers."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.test_served import assert_same_features
from serve.served_tasks import SPEC, columns, exported, trained
from serve.server.linear import LinearModel
from serve.server.serving import GrpcClient, ask_http
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka

from monolith.concurrency import Clocks
from monolith.data import Records, concat
from monolith.data.formats import format_of
from monolith.data.formats.payloads import PayloadParser
from monolith.data.kafka import ByWorker, KafkaConfig, KafkaSource
from monolith.data.served import KEY, MODEL, REQ_ID, SCORE, STEP, VERSION, ServedSpec
from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.observe import Metrics
from monolith.serve import Predictor
from monolith.serve.config import ServeConfig, ServeLogConfig, VersionPolicy
from monolith.serve.served_log import FolderSink, ServedLog, open_sink, recover
from monolith.serve.server import InferenceServer
from monolith.serve.server.batching import ModelOutputs
from monolith.serve.server.catalog import ServableCatalog, served_folder
from monolith.serve.server.tensors import RequestColumns
from monolith.wire.open_inference import message_types

READ = SPEC.only(SPEC.features)
"""The features, without labels."""


@pytest.fixture(scope="module")
def servables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served_log")
    exported(trained(folder / "run"), folder / "models")
    return folder / "models"


@contextmanager
def logging_server(servables: Path, **log: Any) -> Iterator[InferenceServer]:
    config = ServeConfig(http_port=0, grpc_port=0, poll=timedelta(hours=1), log=ServeLogConfig(**log))
    folders = [served_folder(f"ads={servables}", VersionPolicy.parse("latest"))]
    with InferenceServer(config, folders, ServableCatalog({"threads": 1})) as server:
        yield server


def request_of(rows: int, seed: int, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request in JSON, and its columns as a predictor takes them."""
    raw = {name: values for name, values in columns(rows, seed).items() if name not in ("click", "time")}
    flat = [item for row in raw["history"] for item in row]
    splits = np.cumsum([0, *map(len, raw["history"])]).tolist()
    inputs = [
        {"name": "user_id", "datatype": "BYTES", "shape": [rows], "data": raw["user_id"]},
        {"name": "item", "datatype": "INT64", "shape": [rows], "data": raw["item"]},
        {"name": "tags", "datatype": "BYTES", "shape": [rows], "data": raw["tags"]},
        {"name": "history", "datatype": "INT64", "shape": [len(flat)], "data": flat},
        {"name": "history.row_splits", "datatype": "INT64", "shape": [len(splits)], "data": splits},
        {"name": "price", "datatype": "FP32", "shape": [rows], "data": raw["price"]},
        {"name": "where", "datatype": "FP32", "shape": [rows, 2], "data": np.ravel(raw["where"]).tolist()},
    ]
    return {"inputs": inputs, **fields}, raw


def grpc_request(body: dict[str, Any]) -> Any:
    message = message_types().ModelInferRequest(model_name="ads", id=body.get("id", ""))
    fields = {"BYTES": "bytes_contents", "INT64": "int64_contents", "FP32": "fp32_contents"}
    for one in body["inputs"]:
        made = message.inputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        values = [text.encode() for text in one["data"]] if one["datatype"] == "BYTES" else one["data"]
        getattr(made.contents, fields[one["datatype"]]).extend(values)
    return message


def read_log(folder: Path) -> Records:
    form = format_of("x.tfrecord")
    files = sorted(map(str, folder.glob("*.tfrecord")))
    return concat([chunk.records for path in files for chunk in form.chunks(path)])


def test_what_was_served_is_logged_with_the_features_that_the_model_was_given(
    servables: Path, tmp_path: Path
) -> None:
    asked: dict[bytes, tuple[dict[str, Any], list[float]]] = {}
    with logging_server(servables, to=str(tmp_path / "log")) as server:
        assert server.http_url is not None
        assert server.grpc_address is not None
        port = int(server.http_url.rpartition(":")[2])
        for seed in range(6):
            body, raw = request_of(seed + 1, seed, **({"id": f"mine-{seed}"} if seed % 2 else {}))
            status, reply, _ = ask_http(port, "POST", "/v2/models/ads/infer", body)
            assert status == 200, reply
            asked[reply["id"].encode()] = raw, reply["outputs"][0]["data"]
        with GrpcClient(server.grpc_address) as client:
            body, raw = request_of(3, 99, id="over-grpc")
            answer = client.ModelInfer(grpc_request(body))
            scores = np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()
            asked[b"over-grpc"] = raw, scores
    log = read_log(tmp_path / "log")
    ids = [texts[0] for texts in log.strings(REQ_ID)]
    assert list(dict.fromkeys(ids)) == list(asked)  # a server gives an ID to a request without one
    assert {b"mine-1", b"mine-3", b"mine-5"} < asked.keys()
    assert log.strings(KEY) == [
        [b"%s/%d" % (name, row)] for name, (raw, _) in asked.items() for row in range(len(raw["item"]))
    ]
    assert {texts[0] for texts in log.strings(MODEL)} == {b"ads"}
    assert {texts[0] for texts in log.strings(VERSION)} == {b"6"}
    assert set(log[STEP].flat_values.tolist()) == {6}
    scores = [score for _, answered in asked.values() for score in answered]
    assert log[SCORE + "click"].flat_values.tolist() == pytest.approx(scores, abs=1e-7)
    # Trained on are the very IDs and floats that the model was given, and they give the same scores.
    found = ServedSpec.of(READ).make(log)
    with Predictor(str(servables), show=False) as predictor:
        together = {name: [one for raw, _ in asked.values() for one in raw[name]] for name in raw}
        assert_same_features(predictor.read(together), found)
        assert predictor.predict_batch(found).outputs["click"].tolist() == pytest.approx(scores, abs=1e-6)


def test_a_ranking_request_is_logged_with_the_user_in_each_row(servables: Path, tmp_path: Path) -> None:
    body, raw = request_of(3, 1, id="ranked")
    user = next(one for one in body["inputs"] if one["name"] == "user_id")
    user["shape"], user["data"] = [1], user["data"][:1]
    with logging_server(servables, to=str(tmp_path / "log")) as server:
        assert server.http_url is not None
        port = int(server.http_url.rpartition(":")[2])
        assert ask_http(port, "POST", "/v2/models/ads/infer", body)[0] == 200
    with Predictor(str(servables), show=False) as predictor:
        wanted = predictor.read({**raw, "user_id": raw["user_id"][:1] * 3})
    assert_same_features(wanted, ServedSpec.of(READ).make(read_log(tmp_path / "log")))


def test_only_their_user_can_read_the_files(servables: Path, tmp_path: Path) -> None:
    with logging_server(servables, to=str(tmp_path / "log")) as server:
        assert server.http_url is not None
        port = int(server.http_url.rpartition(":")[2])
        assert ask_http(port, "POST", "/v2/models/ads/infer", request_of(1, 0)[0])[0] == 200
        long = request_of(1, 0, id="x" * 257)[0]
        status, reply, _ = ask_http(port, "POST", "/v2/models/ads/infer", long)
        assert status == 400
        assert "at most 256" in reply["error"]
    [file] = (tmp_path / "log").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700


# The log by itself


class Items(LinearModel):
    """Has one feature, `item`."""

    def read(self, columns: dict[str, Any]) -> Batch:
        return Batch(FeatureIds.pack({"item": torch.from_numpy(columns["item"])}))


MODEL_OF_ITEMS: Any = Items(version="3")


def offer(log: ServedLog, name: str, *items: int) -> None:
    given = RequestColumns({"item": np.array(items)}, len(items), (("item", 1),))
    found = ModelOutputs({"score": np.array(items, np.float32)}, (), {"step": 5})
    log.offer(name, "ads", MODEL_OF_ITEMS, given, found)


class Gate:
    """A sink that waits until it is opened."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.items: list[int] = []
        self.closed = False

    def write(self, records: Records) -> None:
        self.entered.set()
        assert self.open.wait(60)
        self.items += records["item"].flat_values.tolist()

    def due(self) -> float | None:
        return None

    def tick(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def dropped(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith("monolith_serve_log_dropped_total{")]
    return {name.partition('reason="')[2].partition('"')[0]: float(value) for name, _, value in found}


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted() -> None:
    metrics, sink = Metrics(), Gate()
    log = ServedLog(ServeLogConfig(to="x", queue_rows=4), metrics, sink=sink)
    offer(log, "a", 0)
    assert sink.entered.wait(60)  # the thread is busy with it, so that the rest is queued
    for number in range(1, 4):
        offer(log, f"b{number}", 2 * number, 2 * number + 1)  # returns at once
    assert dropped(metrics) == {"full": 2, "failed": 0}
    sink.open.set()
    log.close()
    assert sink.items == [0, 2, 3, 4, 5]
    assert sink.closed
    offer(log, "c", 9)  # of a request that outlived the log
    assert dropped(metrics) == {"full": 3, "failed": 0}


def test_a_sample_is_chosen_by_the_id_of_the_request() -> None:
    chosen = []
    for _ in range(2):
        sink = Gate()
        sink.open.set()
        log = ServedLog(ServeLogConfig(to="x", fraction=0.25), Metrics(), sink=sink)
        for number in range(2000):
            offer(log, f"request {number}", number)
        log.close(timedelta(seconds=60))
        chosen.append(sink.items)
    assert chosen[0] == chosen[1]  # any server chooses the same
    assert 420 < len(chosen[0]) < 580


def test_a_folder_that_cannot_be_written_costs_records_and_nothing_else(tmp_path: Path) -> None:
    metrics = Metrics()
    log = ServedLog(ServeLogConfig(to=str(tmp_path / "log")), metrics)
    (tmp_path / "log").rmdir()
    offer(log, "a", 1, 2)
    log.close()
    assert dropped(metrics) == {"full": 0, "failed": 2}


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sink_of(folder: Path, **config: Any) -> tuple[FolderSink, Time]:
    time = Time()
    made = open_sink(ServeLogConfig(to=str(folder), **config), Clocks(timer=time))
    assert isinstance(made, FolderSink)
    return made, time


def some(item: int) -> Records:
    column = FeatureIds.pack({"item": torch.tensor([item])})["item"]
    return Records(1, {"item": column})


def items_in(folder: Path) -> list[list[int]]:
    """Return the items of each complete file."""
    form = format_of("x.tfrecord")
    return [
        [item for chunk in form.chunks(str(path)) for item in chunk.records["item"].flat_values.tolist()]
        for path in sorted(folder.glob("*.tfrecord"))
    ]


def test_a_file_is_complete_when_it_is_large_or_old_enough(tmp_path: Path) -> None:
    sink, time = sink_of(tmp_path, file_bytes=60, file_age=timedelta(seconds=10))
    for item in range(5):
        sink.write(some(item))
        sink.tick()
    before = items_in(tmp_path)
    assert len(before) > 1
    assert [item for file in before for item in file] == list(range(len(before) * 2))
    time.now = 9.9
    assert sink.due() == pytest.approx(0.1)
    sink.tick()
    assert items_in(tmp_path) == before
    time.now = 10.0
    sink.tick()
    assert items_in(tmp_path)[-1] == [4]
    assert sink.due() is None
    assert not list(tmp_path.glob("*.open"))


def test_the_oldest_files_are_deleted_if_there_may_be_only_so_many(tmp_path: Path) -> None:
    sink, _ = sink_of(tmp_path, file_bytes=1, max_files=2)
    for item in range(4):
        sink.write(some(item))
        sink.tick()
    assert items_in(tmp_path) == [[2], [3]]


def test_the_file_of_a_killed_server_is_completed_without_half_a_record(tmp_path: Path) -> None:
    sink, _ = sink_of(tmp_path)
    sink.write(some(1))
    sink.write(some(2))
    [path] = tmp_path.glob("*.open")
    data = path.read_bytes()
    assert recover(tmp_path) == []  # its server lives: the file is locked
    assert sink._file is not None
    fcntl.flock(sink._file, fcntl.LOCK_UN)  # as the system does for a process that was killed
    path.write_bytes(data + data[: len(data) // 4])
    (tmp_path / f"empty-{path.name}").touch()
    empty = path.with_name(path.name.replace("000001", "000009"))
    empty.write_bytes(data[:5])
    empty.chmod(0o600)
    again, _ = sink_of(tmp_path)
    assert items_in(tmp_path) == [[1, 2]]
    assert not list(tmp_path.glob("served-*.open"))
    again.write(some(3))
    again.close()
    assert sorted(items_in(tmp_path)) == [[1, 2], [3]]


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to], ids=["link", "second name"])
def test_a_planted_file_is_neither_cut_nor_renamed(
    tmp_path: Path, plant: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Everyone who may write to the folder could have the server cut any file of its user to nothing."""
    victim, log = tmp_path / "victim", tmp_path / "log"
    victim.write_text("dear")
    victim.chmod(0o600)
    log.mkdir()
    plant(log / "served-1.tfrecord.open", victim)
    os.mkfifo(log / "served-2.tfrecord.open", 0o600)
    (log / "served-3.tfrecord.open").mkdir()
    assert recover(log) == []
    assert victim.read_text() == "dear"
    assert len(list(log.iterdir())) == 3
    assert caplog.text.count("left alone") == 3


def test_names_that_are_no_files_of_the_log_do_not_end_it(tmp_path: Path) -> None:
    (tmp_path / "served-0-planted.tfrecord").mkdir()
    sink, _ = sink_of(tmp_path, file_bytes=1, max_files=1)
    for item in range(3):
        sink.write(some(item))
        sink.tick()
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 1


def test_a_log_goes_to_a_local_folder_or_to_a_topic() -> None:
    with pytest.raises(ConfigError, match="local folder"):
        open_sink(ServeLogConfig(to="s3://bucket/log"), Clocks())
    with pytest.raises(ConfigError, match="topic"):
        open_sink(ServeLogConfig(to="kafka://broker:9092"), Clocks())


@pytest.mark.parametrize(
    "wrong", [{"fraction": 0}, {"fraction": 1.1}, {"queue_rows": 0}, {"file_age": timedelta(0)}]
)
def test_settings_of_the_log_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServeLogConfig(to="x", **wrong)


def test_a_topic_has_one_message_for_each_row(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    settings: dict[str, Any] = PRODUCER_SETTINGS
    to = f"kafka://{kafka.address}/{topic}"
    log = ServedLog(ServeLogConfig(to=to, kafka_settings=settings), Metrics())
    offer(log, "a", 7, 8)
    offer(log, "b", 9)
    log.close(timedelta(seconds=60))
    reading = KafkaConfig(
        servers=(kafka.address,),
        topics=(topic,),
        group="served",
        assignment=ByWorker(worker=0, num_workers=1),
        stream_timeout=timedelta(milliseconds=300),
        poll_timeout=timedelta(milliseconds=300),
        settings=CONSUMER_SETTINGS,
    )
    found = concat(list(KafkaSource(reading, PayloadParser("tf_example"))))
    assert found["item"].flat_values.tolist() == [7, 8, 9]
    assert found.strings(KEY) == [[b"a/0"], [b"a/1"], [b"b/0"]]
