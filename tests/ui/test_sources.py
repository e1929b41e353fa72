"""What the page reads of a run's folder, of a process that trains, and of one that serves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.small_runs import chain
from serve.server.linear import LinearCatalog, LinearModel
from serve.server.serving import Served, serving

from monolith.cluster.security import Guard, SecurityConfig
from monolith.cluster.status import FAILED, JobStatus, ProcessStatus, StatusBoard, TierStatus
from monolith.config import Secret
from monolith.errors import ConfigError, RequestError, UnavailableError
from monolith.observe import Metrics
from monolith.observe.summaries import SummaryWriter
from monolith.train.evaluation_log import Evaluation, EvaluationLog
from monolith.ui.figures import CurvePoint, PageReading
from monolith.ui.run_source import RunSource
from monolith.ui.sources import STILL_LOOKS, Feed, ProcessSource, source_of


def process(role: Any = "worker", index: int = 0, **more: Any) -> ProcessStatus:
    known = {"state": "training", "time": time.time(), "every": 2.0, "started": time.time()}
    return ProcessStatus(role=role, index=index, **(known | more))


def trained(metrics: Metrics, *, auc: float = 0.75, event_time: float = 5_000.0) -> Metrics:
    """What a run that trains shows."""
    metrics.gauge("train_step", "").set(1200)
    metrics.gauge("train_examples_per_s", "").set(5_000)
    metrics.gauge("train_event_time_seconds", "").set(event_time)
    quality = metrics.gauge("train_metric", "", ["metric"])
    quality.set(auc, metric="click/auc")
    quality.set(0.5, metric="click/log_loss")
    for name, user, item in (("rows", 3, 40), ("births", 9, 50), ("expired", 0, 10)):
        gauge = metrics.gauge(f"table_{name}", "", ["table"])
        gauge.set(user, table="user")
        gauge.set(item, table="item")
    took = metrics.histogram("publish_stage_seconds", "", ["stage"], buckets=(0.1, 1.0))
    took.observe(0.05, stage="train")
    took.observe(0.5, stage="read")
    return metrics


@contextmanager
def shown(metrics: Metrics, *processes: ProcessStatus) -> Iterator[str]:
    pages = {"/status": JobStatus(time=time.time(), processes=processes).to_json} if processes else None
    with metrics.serve(0, pages=pages) as served:
        yield f"http://127.0.0.1:{served.port}"


def of(reading: PageReading, chart: str) -> list[tuple[str, float, float]]:
    return [(point.label, point.x, point.y) for point in reading.points if point.chart == chart]


# A process that trains


def test_a_trainer_shows_its_quality_over_event_time() -> None:
    with shown(trained(Metrics())) as url:
        reading = ProcessSource("online", url, clock=lambda: 9_000.0).read()
    assert reading.kind == "trainer"
    assert of(reading, "auc") == [("click", 5_000.0, 0.75)]
    assert of(reading, "examples") == [("", 9_000.0, 5_000.0)]
    assert reading.facts["step"] == "1,200"


def test_quality_is_ordered_by_step_if_event_time_does_not_advance() -> None:
    metrics = trained(Metrics())
    step = metrics.gauge("train_step", "")
    with shown(metrics) as url:
        source = ProcessSource("epochs", url)
        charts = []
        for number in range(STILL_LOOKS + 2):
            step.set(100 + number)
            charts.append(source.read().points[0].chart)
        assert set(charts[:STILL_LOOKS]) == {"auc"}
        assert charts[-1] == "auc_by_step"
        metrics.gauge("train_event_time_seconds", "").set(6_000)
        assert source.read().points[0].chart == "auc"
        metrics.gauge("train_event_time_seconds", "").set(0)
        assert of(source.read(), "auc_by_step") == [("click", 100.0 + STILL_LOOKS + 1, 0.75)]


def test_a_trainer_shows_its_tables_and_the_stages_of_freshness_in_order() -> None:
    with shown(trained(Metrics())) as url:
        reading = ProcessSource("online", url).read()
    first, second = reading.tables
    assert (first.table, first.rows, first.births, first.expired, first.refused) == ("item", 40, 50, 10, None)
    assert second.table == "user"
    assert [(one.stage, one.seconds.total) for one in reading.stages] == [("read", 1), ("train", 1)]


def test_a_trainer_shows_the_processes_of_its_job_those_in_trouble_first() -> None:
    lost = process("ps", 1, time=time.time() - 600, restarts=2, address="host:1")
    with shown(trained(Metrics()), process(pid=7, host="here"), lost) as url:
        found = ProcessSource("online", url).read().processes
    assert [(one.name, one.trouble, one.restarts, one.place) for one in found] == [
        ("ps 1", True, 2, "host:1"),
        ("worker 0", False, 0, "here pid 7"),
    ]
    assert found[0].state.startswith("silent for 60")


def test_a_trainer_says_what_its_tiered_tables_have_in_files() -> None:
    tiers = TierStatus(rows=90, hot_rows=30, memory_bytes=512, file_bytes=2048, compactions=0)
    with shown(trained(Metrics()), process(tiers=tiers)) as url:
        assert ProcessSource("online", url).read().facts["tiered tables"] == (
            "90 rows: 30 in memory (512 B), 60 in files (2 KiB)"
        )
    with shown(trained(Metrics()), process()) as url:
        assert "tiered tables" not in ProcessSource("online", url).read().facts


def test_a_port_of_something_else_is_not_taken_for_a_run() -> None:
    other = Metrics("other")
    other.gauge("step", "").set(1)
    with shown(other) as url, pytest.raises(UnavailableError, match="neither a run"):
        ProcessSource("x", url).read()


def test_a_process_that_is_gone_is_said_to_be() -> None:
    with shown(trained(Metrics())) as url:
        source = ProcessSource("online", url)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:\d+ cannot be reached"):
        source.read()


def test_a_token_is_sent_to_servers_that_require_one() -> None:
    with trained(Metrics()).serve(0, admits=lambda sent: sent == "Bearer s3cret") as served:
        url = f"http://127.0.0.1:{served.port}"
        with pytest.raises(UnavailableError, match="wants a token"):
            ProcessSource("online", url).read()
        assert ProcessSource("online", url, SecurityConfig(token=Secret("s3cret"))).read().kind == "trainer"


def test_a_trainer_reports_that_its_publishing_is_paused() -> None:
    metrics = trained(Metrics())
    held = metrics.gauge("publish_held", "", ["share"])
    with shown(metrics) as url:
        source = ProcessSource("online", url)
        assert source.read().publish is None
        held.set(0, share="0")
        held.set(1, share="1")
        found = source.read().publish
    assert found is not None
    assert (found.held, found.controllable) == (True, False)


# A process that serves


class Timer:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_server_shows_requests_latency_and_versions() -> None:
    metrics, timer = Metrics(), Timer()
    metrics.gauge("serve_in_flight", "").set(0)
    requests = metrics.counter("serve_requests", "", ["model", "code"])
    took = metrics.histogram("serve_request_seconds", "", ["model"], buckets=(0.002, 0.004))
    index = [{"name": "ads", "version": "3", "state": "READY", "reason": ""}]
    pages = {"/v2/repository/index": lambda: json.dumps(index).encode()}
    requests.inc(10, model="ads", code="ok")
    metrics.gauge("serve_staleness_seconds", "", ["model"]).set(0.26, model="ads")
    metrics.gauge("serve_follow_paused", "", ["model"]).set(1, model="ads")
    with metrics.serve(0, pages=pages) as served:
        source = ProcessSource("ads", f"http://127.0.0.1:{served.port}", clock=lambda: 9_000.0, timer=timer)
        assert of(source.read(), "requests") == []  # there is no rate yet
        timer.now += 2
        requests.inc(30, model="ads", code="ok")
        requests.inc(2, model="ads", code="invalid")
        took.observe(0.001, model="ads")
        reading = source.read()
    assert reading.kind == "server"
    assert of(reading, "requests") == [("", 9_000.0, 16.0)]
    assert [(label, round(ms, 2)) for label, _, ms in of(reading, "latency")] == [
        ("ads p50", 1.0),
        ("ads p99", 1.98),
    ]
    assert [(one.name, one.version, one.state) for one in reading.models] == [("ads", "3", "READY")]
    assert (reading.facts["refused"], reading.facts["staleness"]) == ("2", "0.3 s")
    assert reading.note == "the trainer has paused publishing"


CONTROL = SecurityConfig(token=Secret("s3cret"))


@pytest.fixture
def splitting() -> Iterator[Served]:
    made = {one: lambda one=one: LinearModel(version=one) for one in ("1", "2")}
    with serving(
        LinearCatalog({"f": made}),
        allow_control=True,
        splits=("ads=f/1:50,f/2:50",),
        server={"guard": Guard(token=Secret("s3cret"))},
    ) as server:
        yield server


def splits_of(source: ProcessSource) -> list[tuple[str, str]]:
    return [(one.name, one.targets) for one in source.read().splits]


def test_a_server_shows_its_splits_and_changes_them_with_the_control_token(splitting: Served) -> None:
    source = ProcessSource("ads", splitting.http_url, CONTROL)
    assert splits_of(source) == [("ads", "f/1:50,f/2:50")]
    source.set_split("ads", "f/1:90,f/2:10")
    assert splits_of(source) == [("ads", "f/1:90,f/2:10")]
    with pytest.raises(RequestError, match=r"answers 404: .*9"):
        source.set_split("ads", "f/9")
    with pytest.raises(RequestError, match="answers 400"):
        source.set_split("a/../b", "nobody")
    assert splits_of(source) == [("ads", "f/1:90,f/2:10")]
    source.set_split("ads", "")
    assert splits_of(source) == []


def test_a_split_is_not_changed_with_the_token_of_clients(splitting: Served) -> None:
    predict = Guard(token=Secret("s3cret")).for_role("predict").token
    source = ProcessSource("ads", splitting.http_url, SecurityConfig(token=predict))
    with pytest.raises(RequestError, match=r"answers 403: .*control token"):
        source.set_split("ads", "f/1")
    assert splits_of(source) == [("ads", "f/1:50,f/2:50")]


# A folder


def test_a_run_shows_its_processes_and_how_fast_they_are(tmp_path: Path) -> None:
    board = StatusBoard(str(tmp_path))
    board.write(process(examples_per_s=1_000.0))
    board.write(process(index=1, examples_per_s=500.0, num_workers=2))
    reading = RunSource("r", str(tmp_path)).read()
    assert reading.kind == "run"
    assert [one.name for one in reading.processes] == ["worker 0", "worker 1"]
    assert [speed for _, _, speed in of(reading, "examples")] == [1_500.0]
    assert "--metrics-port" in reading.note


def test_a_run_that_cannot_save_says_so_before_anything_else(tmp_path: Path) -> None:
    trouble = "saving fails, attempt 2 of 10, 0 bytes free: cannot write a: No space left on device"
    board = StatusBoard(str(tmp_path))
    board.write(process(save_trouble=trouble, num_workers=2))
    board.write(process(index=1, num_workers=2))
    reading = RunSource("r", str(tmp_path)).read()
    assert reading.note == trouble
    assert [(one.name, one.trouble) for one in reading.processes] == [("worker 0", True), ("worker 1", False)]
    board.write(process(num_workers=2))
    assert trouble not in RunSource("r", str(tmp_path)).read().note


def test_a_run_leads_to_the_metrics_of_its_chief(tmp_path: Path) -> None:
    with shown(trained(Metrics())) as url:
        StatusBoard(str(tmp_path)).write(process(metrics=f"{url}/metrics", examples_per_s=1.0))
        source = RunSource("r", str(tmp_path))
        reading = source.read()
        assert of(reading, "auc") == [("click", 5_000.0, 0.75)]
        assert [speed for _, _, speed in of(reading, "examples")] == [5_000.0]
        assert len(reading.tables) == 2
    assert "cannot be reached" in source.read().note


def test_the_evaluations_of_a_run_are_points_each_once(tmp_path: Path) -> None:
    def evaluated(step: int, auc: float, checkpoint: str | None = None) -> Evaluation:
        metrics = {"click/auc": auc, "loss": 0.4}
        return Evaluation(step=step, metrics=metrics, examples=10, seconds=1.0, checkpoint=checkpoint)

    timer = Timer()
    log = EvaluationLog(str(tmp_path))
    log.add(evaluated(10, 0.6))
    log.add(evaluated(20, 0.7))
    log.add(evaluated(20, 0.8, "model.ckpt-20"))
    source = RunSource("r", str(tmp_path), timer=timer)
    assert of(source.read(), "evaluation") == [
        ("click/auc", 10.0, 0.6),
        ("click/auc", 20.0, 0.7),
        ("click/auc checkpoints", 20.0, 0.8),
    ]
    timer.now += 60
    log.add(evaluated(30, 0.75))
    assert of(source.read(), "evaluation") == [("click/auc", 30.0, 0.75)]
    timer.now += 60
    log.add(evaluated(20, 0.9))  # the run went back, and so does its curve
    assert of(source.read(), "evaluation") == [("click/auc", 10.0, 0.6), ("click/auc", 20.0, 0.9)]
    log.close()


def test_metrics_of_different_scale_are_on_charts_of_their_own(tmp_path: Path) -> None:
    metrics = {
        "click/auc": 0.7,
        "buy/auc": 0.8,
        "click/log_loss": 0.4,
        "seconds/rmse": 30.0,
        "price/rmse": 2.0,
    }
    log = EvaluationLog(str(tmp_path))
    log.add(Evaluation(step=10, metrics={**metrics, "loss": 0.9}, examples=10, seconds=1.0))
    log.close()
    points = RunSource("r", str(tmp_path)).read().points
    assert {(one.chart, one.label) for one in points} == {
        ("evaluation", "click/auc"),
        ("evaluation", "buy/auc"),
        ("evaluation:log_loss", "click/log_loss"),
        ("evaluation:seconds/rmse", "seconds/rmse"),
        ("evaluation:price/rmse", "price/rmse"),
        ("evaluation:loss", "loss"),
    }
    training = trained(Metrics())
    training.gauge("train_loss", "").set(0.5)
    training.gauge("train_metric", "", ["metric"]).set(12.0, metric="seconds/mae")
    with shown(training) as url:
        reading = ProcessSource("online", url).read()
    assert of(reading, "online:loss") == [("", 1_200.0, 0.5)]
    assert of(reading, "online:seconds/mae") == [("seconds", 1_200.0, 12.0)]


def test_a_run_is_up_while_a_process_of_it_is_and_says_how_it_is_otherwise(tmp_path: Path) -> None:
    now, board = time.time(), StatusBoard(str(tmp_path))
    timer = Timer()

    def read() -> Any:
        timer.now += 60
        return source.read()

    source = RunSource("r", str(tmp_path), timer=timer)
    assert (read().state, "has not begun" in read().note) == ("not begun", True)
    board.write(process(time=now))
    assert read().state == "up"
    board.write(process(time=now - 600))
    assert (read().state, "no process wrote its status for 10:0" in read().note) == ("silent", True)
    board.write(process(time=now - 600, state=FAILED))
    assert read().state == "failed"
    board.remove("worker", 0)
    chain(tmp_path)  # four checkpoints, and no process
    assert read().state == "ended"
    assert "its last checkpoint is model.ckpt-4, of step 4" in read().note


def test_a_run_shows_the_state_of_publishing_if_it_can_be_queried(tmp_path: Path) -> None:
    def order(action: str, *, reason: str = "", version: str = "") -> list[Any]:  # noqa: ARG001
        return [SimpleNamespace(held=True, reason="AUC fell by 0.2", since=5.0, version=None)]

    board = StatusBoard(str(tmp_path))
    board.write(process())
    source = RunSource("r", str(tmp_path), order=order)
    assert source.read().publish is None
    board.write(process(control="127.0.0.1:1"))
    found = source.read().publish
    assert found is not None
    assert (found.held, found.reason, found.since, found.controllable) == (True, "AUC fell by 0.2", 5.0, True)


def test_a_run_that_is_over_says_so_and_one_that_never_was_is_down(tmp_path: Path) -> None:
    assert "has ended" in RunSource("r", str(tmp_path)).read().note
    with pytest.raises(UnavailableError, match="there is no folder"):
        RunSource("r", str(tmp_path / "no")).read()


def test_a_run_that_nobody_watched_shows_its_loss_and_metrics_when_it_has_ended(tmp_path: Path) -> None:
    chain(tmp_path)
    with SummaryWriter(str(tmp_path / "summaries")) as writer:
        for step in (10, 20):
            writer.scalars({"loss": 9.0 / step, "metrics/click/auc": step / 40, "rows/user": 5.0}, step)
    source = RunSource("r", str(tmp_path))
    reading = source.read()
    assert reading.state == "ended"
    assert of(reading, "auc_by_step") == [("click", 10.0, 0.25), ("click", 20.0, 0.5)]
    assert [round(y, 2) for _, _, y in of(reading, "online:loss")] == [0.9, 0.45]
    assert not of(source.read(), "auc_by_step")  # the page has them


# By name


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("runs/1", "1", RunSource),
        ("runs/1/", "1", RunSource),
        ("mine=runs/1", "mine", RunSource),
        ("http://127.0.0.1:9090", "127.0.0.1:9090", ProcessSource),
        ("http://127.0.0.1:9090/metrics", "127.0.0.1:9090", ProcessSource),
        ("frozen=http://127.0.0.1:9090", "frozen", ProcessSource),
        ("runs/lr=0.1", "lr=0.1", RunSource),
    ],
)
def test_people_name_sources_by_their_place(text: str, name: str, kind: type) -> None:
    source = source_of(text)
    assert (source.name, type(source)) == (name, kind)


@pytest.mark.parametrize("text", ["", "mine=", "http://", "http://a@host:1", "http://host:x", "grpc://a:1"])
def test_what_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ui: "):
        source_of(text)


def test_a_process_feeds_a_page_of_its_own() -> None:
    feed = Feed("frozen")
    feed.add("auc", 10.0, 0.7)
    feed.say("stopped at step 5")
    reading = feed.read()
    assert reading.points == (CurvePoint("auc", "", 10.0, 0.7),)
    assert reading.note == "stopped at step 5"
    assert feed.read().points == ()
