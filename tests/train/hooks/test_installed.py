"""What else a run can do: each setting, seen in a run."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import PATIENT, Tallied, read_model, run_fleet
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.summary.writer import event_file_writer
from torch import Tensor, nn
from train.runs import FakeClock
from train.tasks import Clicks

from monolith.data import DriftConfig, DriftingStream, Pipeline, Records, Stream
from monolith.data.kafka import ByWorker, KafkaConfig, KafkaSource, plain_strings
from monolith.data.records import BatchSpec
from monolith.data.synthetic.drift import FEATURES, SPEC, TIME
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.nn import IRazor, SeNet
from monolith.observe import Metrics
from monolith.observe.summaries import read_summaries
from monolith.runtime import LocalRun, Trainer, TrainReport
from monolith.train import EvaluateConfig, Hook, Mode, SaveConfig, StepResult, TrainConfig, TrainingRun
from monolith.train.hooks import DeepInsightConfig, HooksConfig
from monolith.train.hooks.config import TrackingConfig

SOON = timedelta(milliseconds=1)


def train(
    hooks: HooksConfig, task: Any = None, *, metrics: Metrics | None = None, given: Any = (), **config: Any
) -> TrainReport:
    settings = TrainConfig(hooks=hooks, summary_every_steps=None, **config)
    return Trainer(task or Clicks(batches=5), settings, metrics=metrics, hooks=given).train()


def lines(metrics: Metrics, name: str) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if line.startswith(name)]


def test_a_heart_beat_is_counted_while_the_run_lasts_and_once_when_it_ends() -> None:
    metrics = Metrics("m")
    train(HooksConfig(heartbeat_every=timedelta(hours=1)), metrics=metrics)
    assert lines(metrics, "m_training_heart_beat_total") == [
        'm_training_heart_beat_total{type="running"} 1.0',
        'm_training_heart_beat_total{type="stopped"} 1.0',
    ]


class Later(Hook):
    """Lets a clock run a second a step."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def before_step(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._clock.now += 1


def test_throughput_is_reported_every_so_often_and_the_start_once() -> None:
    metrics, clock = Metrics("m"), FakeClock(1000.0)
    hooks = HooksConfig(throughput_every=timedelta(seconds=2))
    config = TrainConfig(hooks=hooks, summary_every_steps=None, submitted_at=990.0, model_name="feed")
    Trainer(
        Clicks(batches=5), config, metrics=metrics, hooks=[Later(clock)], clock=clock, timer=clock
    ).train()
    tags = '{cluster_type="local",model_name="feed"}'
    assert lines(metrics, f"m_run_steps_all_total{tags}") == [f"m_run_steps_all_total{tags} 4.0"]
    assert lines(metrics, "m_run_start_elapsed_time_all_sum")[0].endswith(" 10.0")
    assert len(lines(metrics, "m_step_loss")) == 1


def test_dense_weights_alone_are_saved_only_while_the_model_is_online(tmp_path: Path) -> None:
    (tmp_path / "ONLINE").touch()

    class GoesOffline(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if result.step == 3:
                (tmp_path / "ONLINE").unlink()

    train(
        HooksConfig(online_file=True, online_file_every_steps=1),
        Clicks(batches=6),
        given=[GoesOffline()],
        model_dir=str(tmp_path),
        dense_save=SaveConfig(steps=1),
    )
    saved = {path.name.split("-")[1].split(".")[0] for path in (tmp_path / "dense_only").glob("*.manifest")}
    assert saved == {"1", "2", "3"}


def test_a_model_that_was_never_online_is_not_saved_for_it(tmp_path: Path) -> None:
    train(HooksConfig(online_file=True), model_dir=str(tmp_path), dense_save=SaveConfig(steps=1))
    assert not list((tmp_path / "dense_only").glob("*.manifest"))


@pytest.mark.parametrize(
    ("hooks", "config", "says"),
    [
        (HooksConfig(online_file=True), {"model_dir": "MODEL_DIR"}, "dense_save is not set"),
        (HooksConfig(online_file=True), {"dense_save": SaveConfig(steps=1)}, "needs a model_dir"),
        (HooksConfig(nas_every_steps=1), {}, "needs a model_dir"),
        (HooksConfig(nas_every_steps=1), {"model_dir": "MODEL_DIR"}, "no IRazor or SeNet layer"),
        (HooksConfig(deep_insight=DeepInsightConfig(kafka=True)), {}, "kafka_brokers and kafka_topic"),
    ],
)
def test_what_a_run_does_not_have_is_refused(
    hooks: HooksConfig, config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    given = {name: str(tmp_path) if value == "MODEL_DIR" else value for name, value in config.items()}
    with pytest.raises(ConfigError, match=says):
        train(hooks, **given)


# Memory


def test_a_run_that_uses_too_much_memory_halts_until_it_is_stopped_and_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics("m")
    config = TrainConfig(
        model_dir=str(tmp_path),
        hooks=HooksConfig(memory_limit_bytes=1, memory_check_every=SOON),
        summary_every_steps=None,
    )
    saved: list[str | None] = []

    class Operator(Hook):
        """Waits for the halt; then saves twice, and stops the run, from another thread."""

        def __init__(self, run: Any) -> None:
            self._run = run

        def after_create(self, run: TrainingRun) -> None:  # noqa: ARG002
            threading.Thread(target=self._act).start()

        def _act(self) -> None:
            while self._run.barrier.placement() is None:
                threading.Event().wait(0.01)
            saved.extend(self._run.save.trigger_save().result(PATIENT) for _ in range(2))
            trainer.stop("somebody stops it")

    trainer = Trainer(Clicks(batches=200), config, metrics=metrics, hooks=lambda run: [Operator(run)])
    report = trainer.train()
    assert report.stop_reason == "somebody stops it"
    assert report.step < 200
    assert report.checkpoint == str(tmp_path / f"model.ckpt-{report.step}")
    assert len(set(saved)) == 1  # no step was taken between the two
    assert saved[0] in {str(tmp_path / f"model.ckpt-{report.step - held_back}") for held_back in (0, 1)}
    assert lines(metrics, "m_out_of_memory_total") == ['m_out_of_memory_total{process="this process"} 1.0']
    assert "halting training: this process uses" in caplog.text
    assert "Stop the run" in caplog.text


def test_memory_within_its_limit_stops_no_worker() -> None:
    report = train(HooksConfig(memory_limit_bytes=1 << 60, memory_check_every=SOON))
    assert report.step == 5


def test_a_server_that_uses_too_much_memory_halts_all_workers_until_the_run_is_stopped(
    tmp_path: Path,
) -> None:
    task, halted = Tallied(batches=400), threading.Event()

    class Operator(Hook):
        """Sees, from another thread, that nobody trains any more, and stops the run."""

        def __init__(self, run: Any) -> None:
            self._run = run

        def after_create(self, run: TrainingRun) -> None:  # noqa: ARG002
            threading.Thread(target=self._act).start()

        def _act(self) -> None:
            while self._run.barrier.blocked_indices() != [0, 1]:
                threading.Event().wait(0.01)
            halted.set()
            self._run.interrupt("somebody stops it")

    outcome = run_fleet(
        task,
        tmp_path,
        hooks=lambda worker: (lambda run: [Operator(run)]) if worker == 0 else [],
        installed=HooksConfig(memory_limit_bytes=1, memory_check_every=SOON),
    )
    assert halted.is_set()
    assert outcome.chief.stop_reason == "somebody stops it"
    assert outcome.chief.step < task.batches
    assert sum(read_model(task, tmp_path).tally.values()) == 8 * outcome.chief.step


# Slow start


def test_a_worker_takes_its_first_step_when_the_model_has_reached_its_own(tmp_path: Path) -> None:
    first: dict[int, int] = {}
    lacked: dict[int, int] = {}

    class NotesTheFirst(Hook):
        def __init__(self, worker: int) -> None:
            self._worker = worker

        def of(self, run: LocalRun) -> list[Hook]:
            self._session = run.session
            return [self]

        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            first.setdefault(self._worker, result.step)
            staleness = self._session.coordinator.status().staleness
            assert staleness is not None
            lacked.setdefault(self._worker, staleness.last)

    task = Tallied(batches=20)
    outcome = run_fleet(
        task,
        tmp_path,
        hooks=lambda worker: NotesTheFirst(worker).of,
        save=SaveConfig(steps=4),  # the one who waits takes part in saves
        installed=HooksConfig(slow_start_steps=10),
    )
    assert first[0] == 1
    assert first[1] > 6  # 10 * ln 2
    assert lacked[1] < 6, "it fetched the weights when it began"
    assert outcome.chief.step == task.batches


# Weights of a search


class Searched(nn.Module):
    """A model with a search over the widths of two features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.search = IRazor(2, [0, 4])

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        return logits + self.search(logits.new_ones(len(batch), 2, 4)).sum((1, 2))


@dataclass(frozen=True)
class Searching(Clicks):
    def model(self) -> nn.Module:
        return Searched(super().model())


def test_weights_of_a_search_are_written_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    train(HooksConfig(nas_every_steps=2), Searching(batches=5), model_dir=str(tmp_path))
    files = [str(path) for path in (tmp_path / "summaries").iterdir()]
    found = [one for one in read_summaries(files) if one.tag == "search_selecting/monolith_nas_weight"]
    assert [one.step for one in found] == [2, 4, 5]
    assert json.loads(found[0].content)["segment_names"] == ["feature 0", "feature 1"]
    assert found[0].data.shape == (2, 2)


class Gated(nn.Module):
    """A model with gates over three features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gate = SeNet(3, 2)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        return logits + self.gate(logits.new_ones(len(batch), 3, 4)).sum((1, 2))


@dataclass(frozen=True)
class Gating(Clicks):
    def model(self) -> nn.Module:
        return Gated(super().model())


def test_how_much_a_gate_lets_each_feature_count_is_written(tmp_path: Path) -> None:
    train(HooksConfig(nas_every_steps=2), Gating(batches=5), model_dir=str(tmp_path))
    files = [str(path) for path in (tmp_path / "summaries").iterdir()]
    found = [one for one in read_summaries(files) if one.tag == "gate_gating/monolith_nas_weight"]
    assert [one.step for one in found] == [2, 4]
    assert json.loads(found[0].content) == {
        "tag_type": "gating",
        "segment_names": ["feature 0", "feature 1", "feature 2"],
        "segment_sizes": [1, 1, 1],
        "group_index": [0, 1, 2],
    }
    assert found[0].data.shape == (3,)
    assert ((found[0].data > 0) & (found[0].data < 1)).all(), "the mean of sigmoids"


def shown_by_tensorboard(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Run to tag to steps, as TensorBoard itself reads the event files of a folder."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return {
        run: {tag: [event.step for event in multiplexer.Tensors(run, tag)] for tag in tags["tensors"]}
        for run, tags in multiplexer.Runs().items()
    }


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the model_dir", "in a folder of its own"])
def test_tensorboard_shows_what_all_hooks_of_a_run_and_of_its_next_start_have_written(
    tmp_path: Path, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Names of event files sort by second, process and this counter, and both starts may have the same second.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    folder = tmp_path / "board" if elsewhere else tmp_path / "run" / "summaries"
    for steps in (4, 6):
        config = TrainConfig(
            model_dir=str(tmp_path / "run"),
            max_steps=steps,
            summary_every_steps=2,
            insight_every_steps=2,
            hooks=HooksConfig(nas_every_steps=2),
            evaluate=EvaluateConfig(every_steps=2),
            tracking=TrackingConfig(tensorboard_dir=str(folder) if elsewhere else ""),
        )
        Trainer(Gating(batches=8), config).train()
        assert len(list(folder.glob("events.*"))) == steps // 2 - 1, "one event file for each start"
    shown = shown_by_tensorboard(tmp_path)
    here = shown["board" if elsewhere else "run/summaries"]
    tags = ("loss", "gate_gating/monolith_nas_weight", "fi_direct/monolith_feature_insight")
    assert {tag: here[tag] for tag in tags} == {tag: [2, 4, 6] for tag in tags}
    assert shown["board/eval" if elsewhere else "run/eval"]["loss"] == [2, 4, 6]


# Deep insight


@dataclass(frozen=True)
class WithUsers(Clicks):
    """Its batches have the features that a message needs."""

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        stream = DriftingStream(
            DriftConfig(examples=self.batches * 8, batch_size=8, new_users=4, new_items=2, start_time=0)
        )
        spec = BatchSpec(ids=(*FEATURES, "uid", "req_time"), labels=SPEC.labels, event_time=TIME)
        return Pipeline(stream).map(_with_users).to_batches(spec)


def _with_users(records: Records) -> Records:
    columns = {**records.columns, "uid": records.columns["user"], "req_time": records.columns[TIME]}
    return Records(records.size, columns, records.shared)


def test_sampled_predictions_are_written_by_model_day_and_worker(tmp_path: Path) -> None:
    insight = DeepInsightConfig(folder=str(tmp_path), sample_ratio=1.0)
    train(HooksConfig(deep_insight=insight), WithUsers(batches=3), model_name="feed")
    part = tmp_path / "feed" / "19700101" / "worker_0" / "part_000000.txt"
    written = part.read_text().splitlines()
    assert len(written) == 24
    assert json.loads(written[0].split(";")[3]).keys() == {"ctr_head"}


def test_the_ratio_decides_how_many_are_sampled(tmp_path: Path) -> None:
    train(HooksConfig(deep_insight=DeepInsightConfig(folder=str(tmp_path), sample_ratio=0.0)), WithUsers())
    assert list(tmp_path.iterdir()) == []


def test_sampled_predictions_are_sent_to_kafka(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    insight = DeepInsightConfig(
        kafka=True,
        kafka_brokers=(kafka.address,),
        kafka_topic=topic,
        kafka_settings=PRODUCER_SETTINGS,
        sample_ratio=1.0,
        targets=("click",),
    )
    train(HooksConfig(deep_insight=insight), WithUsers(batches=1))
    config = KafkaConfig(
        servers=(kafka.address,),
        topics=(topic,),
        group="readers",
        assignment=ByWorker(worker=0, num_workers=1),
        poll_timeout=timedelta(seconds=1),
        stream_timeout=timedelta(seconds=1),
        settings=CONSUMER_SETTINGS,
    )
    with KafkaSource(config, plain_strings) as source:
        found = [json.loads(text) for records in source for row in records.strings("value") for text in row]
    assert len(found) == 8
    assert {one["model_name"] for one in found} == {"with_users"}
    assert found[0]["targets"] == ["click"]
