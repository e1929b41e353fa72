"""A task from data to checkpoint and back, in one process."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train.tasks import Clicks, rows_of

from monolith.checkpoint import read_checkpoint_state, read_manifest, read_monolith_checkpoint
from monolith.data import FileSource, JsonMessages, KafkaConfig, KafkaSource, Pipeline
from monolith.data.files.discovery import Watch as FileWatch
from monolith.data.formats import CsvFormat
from monolith.errors import (
    ConfigError,
    DivergedError,
    ModelDirLockedError,
    RestoreError,
    StoppedWhileWaitingError,
)
from monolith.feature import Batch, FeatureSpec, IdFeature, Label
from monolith.model import DeepFM
from monolith.runtime import LocalRun, Trainer
from monolith.train import (
    AlertConfig,
    DailyHours,
    Hook,
    KeepConfig,
    Mode,
    Outputs,
    RestoreConfig,
    SaveConfig,
    StepResult,
    Task,
    TrainConfig,
    TrainingRun,
    WindowRow,
)

TASK = Clicks()


class Watch(Hook):
    """Remembers what happened, and the state of the model at the end."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.examples: list[int] = []
        self.rows: Any = None
        self.weights: Any = None

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.steps.append(result.step)
        self.losses.append(float(result.loss))
        self.examples.extend(result.batch.ids["user"].flat_values.tolist())

    def end(self, run: Any) -> None:
        run.session.drain()
        self.rows = rows_of(run.session.model.module)
        self.weights = {name: w.tolist() for name, w in run.session.model.module.state_dict().items()}


class StopAt(Hook):
    def __init__(self, step: int, error: Exception | None = None) -> None:
        self._step, self._error = step, error

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if result.step == self._step:
            if self._error is not None:
                raise self._error
            run.request_stop("the test says so")


def train(task: Any = TASK, *hooks: Hook, **config: Any) -> tuple[Watch, Any]:
    watch = Watch()
    report = Trainer(
        task, TrainConfig(**{"save": SaveConfig(steps=5), **config}), hooks=[*hooks, watch]
    ).train()
    return watch, report


def test_a_run_takes_a_step_for_each_batch_and_ends_with_the_data() -> None:
    watch, report = train()
    assert watch.steps == list(range(1, 21))
    assert (report.step, report.examples, report.stop_reason) == (20, 20 * 64, "the data ended")
    assert report.checkpoint is None


def test_a_report_has_the_loss_of_the_last_steps_and_what_the_time_went_to(tmp_path: Path) -> None:
    watch = Watch()
    report = Trainer(TASK, TrainConfig(model_dir=str(tmp_path), steps=5), hooks=[watch]).train()
    assert report.loss == pytest.approx(sum(watch.losses) / 5)
    assert 0 < report.start_seconds < report.seconds
    assert 0 < report.save_seconds < report.seconds - report.start_seconds
    assert report.evaluate_seconds == 0


def test_a_run_without_a_step_was_all_start(tmp_path: Path) -> None:
    Trainer(TASK, TrainConfig(model_dir=str(tmp_path), max_steps=1)).train()
    report = Trainer(TASK, TrainConfig(model_dir=str(tmp_path), max_steps=1)).train()
    assert math.isnan(report.loss)
    assert report.start_seconds == report.seconds


def test_the_loss_goes_down() -> None:
    watch, _ = train(replace(TASK, batches=120))
    assert sum(watch.losses[-40:]) < sum(watch.losses[:40])


@pytest.mark.parametrize(("limit", "step"), [({"steps": 7}, 7), ({"max_steps": 9}, 9)])
def test_a_run_ends_at_its_limit(limit: dict[str, int], step: int) -> None:
    _, report = train(**limit)
    assert report.step == step


def test_a_run_ends_when_its_time_is_up() -> None:
    _, report = train(max_time=timedelta(0))
    assert report.step == 1
    assert "max_time" in report.stop_reason


def test_a_run_ends_when_it_is_asked_to() -> None:
    trainer = Trainer(replace(TASK, batches=100_000), TrainConfig())
    threading.Timer(0.2, trainer.stop, ["SIGTERM"]).start()
    report = trainer.train()
    assert report.stop_reason == "SIGTERM"
    assert 0 < report.step < 100_000


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_run_whose_live_data_is_quiet_leaves_no_thread_in_a_read(
    tmp_path: Path, prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    ids = "".join(f"{number},1\n" for number in range(4))
    (tmp_path / "a.csv").write_text(f"id,click\n{ids}")
    spec = FeatureSpec(features={"id": IdFeature()}, labels={"click": Label()})
    looks_at = timedelta(hours=1)

    class Watching(Task):
        def dataset(self, mode: Mode) -> Any:  # noqa: ARG002
            watch = FileWatch(str(tmp_path / "*.csv"), every=looks_at)
            types = {"id": torch.int64, "click": torch.int64}
            source = FileSource(watch, CsvFormat(types=types), batch_size=2, threads=1)
            return Pipeline(source).to_batches(spec)

        def model(self) -> Any:
            return DeepFM(["id"], dim=2)

    class StopLater(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if result.step == 2:  # the last one that there is data for
                threading.Timer(0.1, trainer.stop, ["SIGTERM"]).start()

    before = set(threading.enumerate())
    config = TrainConfig(model_dir=str(tmp_path / "m"), prefetch=prefetch)
    trainer = Trainer(Watching(), config, hooks=[StopLater()])
    report = trainer.train()
    assert (report.step, report.stop_reason, report.finished) == (2, "SIGTERM", False)
    assert report.checkpoint == str(tmp_path / "m" / "model.ckpt-2")
    assert "still being read" not in caplog.text
    left = {one.name for one in set(threading.enumerate()) - before}
    assert not left & {"prefetch", "monolith-read-live"}


def test_a_run_that_waits_for_a_broker_before_its_first_step_ends_with_the_reason_of_its_stop() -> None:
    pytest.importorskip("confluent_kafka")

    class Unreachable(Task):
        def dataset(self, mode: Mode) -> Any:  # noqa: ARG002
            servers, patience = ("127.0.0.1:1",), timedelta(hours=1)
            config = KafkaConfig(servers=servers, topics=("t",), group="g", connect_timeout=patience)
            spec = FeatureSpec(features={"id": IdFeature()}, labels={"click": Label()})
            source = KafkaSource(config, JsonMessages({"id": torch.int64, "click": torch.int64}))
            return Pipeline(source).to_batches(spec)

        def model(self) -> Any:
            return DeepFM(["id"], dim=2)

    trainer = Trainer(Unreachable(), TrainConfig())
    threading.Timer(0.2, trainer.stop, ["SIGTERM"]).start()
    with pytest.raises(StoppedWhileWaitingError, match=r"^SIGTERM$"):
        trainer.train()


def test_a_run_that_waits_for_data_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    quiet = threading.Event()

    class Live(Clicks):
        def dataset(self, mode: Mode) -> Any:
            data = super().dataset(mode)
            return Silent(data) if mode is Mode.TRAIN else data

    class Silent:
        def __init__(self, data: Any) -> None:
            self.position, self.restore, self.close, self._data = (
                data.position,
                data.restore,
                data.close,
                data,
            )

        def __iter__(self) -> Any:
            yield from self._data
            quiet.wait(30)

    class StopLater(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if result.step == 3:  # the last one that there is data for
                threading.Timer(0.3, trainer.stop, ["SIGTERM"]).start()

        def end(self, run: TrainingRun) -> None:  # noqa: ARG002
            quiet.set()

    trainer = Trainer(Live(batches=3), TrainConfig(model_dir=str(tmp_path)), hooks=[StopLater()])
    report = trainer.train()
    assert (report.step, report.stop_reason) == (3, "SIGTERM")
    assert report.checkpoint == str(tmp_path / "model.ckpt-3")


def test_hooks_may_be_made_of_the_run(tmp_path: Path) -> None:
    saved: list[Any] = []

    class SaveAt(Hook):
        def __init__(self, run: LocalRun) -> None:
            assert run.save is not None
            self._save = run.save
            self._stats = run.session.model.stats

        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if result.step == 3:
                saved.append((self._save.trigger_save().result(), self._stats()["user"].rows > 0))

    config = TrainConfig(model_dir=str(tmp_path), steps=5)
    report = Trainer(TASK, config, hooks=lambda run: [SaveAt(run)]).train()
    assert saved == [(str(tmp_path / "model.ckpt-3"), True)]
    assert (report.step, report.steps) == (5, 5)
    assert Trainer(TASK, config).train().steps == 5
    assert Trainer(TASK, config).evaluate(checkpoint=saved[0][0], steps=1)["examples"] == 64


def test_the_same_seed_gives_the_same_bits() -> None:
    task = replace(TASK, dropout=0.5)
    first, second, other = train(task)[0], train(task)[0], train(task, seed=1)[0]
    assert first.rows == second.rows
    assert first.weights == second.weights
    assert first.weights != other.weights


@pytest.mark.parametrize("ahead", [1, 3])
def test_of_data_that_is_read_once_prefetch_changes_no_bit(ahead: int) -> None:
    """Every step reads rows as the step before it has left them; the ids of two batches in a row overlap."""
    plain, fresh = train(prefetch=0)[0], train(prefetch=ahead)[0]
    assert (fresh.losses, fresh.rows, fresh.weights) == (plain.losses, plain.rows, plain.weights)
    stale = train(prefetch=ahead, fresh_rows=False)[0]
    assert stale.losses[0] == plain.losses[0]
    assert stale.losses != plain.losses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("embedding_device", ["host", "device"])
def test_on_a_gpu_too_prefetch_changes_nothing_of_data_that_is_read_once(embedding_device: str) -> None:
    where = {"accelerator": "cuda", "embedding_device": embedding_device}
    plain, fresh = train(prefetch=0, **where)[0], train(prefetch=2, **where)[0]
    assert fresh.losses == pytest.approx(plain.losses, rel=1e-5)
    # A step that is replayed as a graph looks its rows up itself.
    stale = train(prefetch=2, fresh_rows=False, step_graphs=False, **where)[0]
    assert stale.losses != pytest.approx(plain.losses, rel=1e-5)


def test_rows_are_fresh_unless_data_is_read_in_epochs_or_the_config_says_otherwise() -> None:
    assert TrainConfig().wants_fresh_rows
    assert not TrainConfig(epochs=2).wants_fresh_rows
    assert TrainConfig(epochs=2, fresh_rows=True).wants_fresh_rows
    assert not TrainConfig(fresh_rows=False).wants_fresh_rows


def test_prefetch_and_asynchronous_push_change_rows_that_need_not_be_fresh_by_one_step_at_most() -> None:
    plain, _ = train(prefetch=0)
    ahead, _ = train(prefetch=1, fresh_rows=False)
    waited, _ = train(prefetch=1, fresh_rows=False, async_push=False)
    assert ahead.rows == waited.rows
    assert ahead.losses[0] == plain.losses[0]
    assert ahead.rows.keys() == plain.rows.keys()
    assert ahead.rows["item"].keys() == plain.rows["item"].keys()
    assert abs(sum(ahead.losses) - sum(plain.losses)) < 0.05 * sum(plain.losses)


def test_metrics_are_of_predictions_made_before_training() -> None:
    rows: list[tuple[str, WindowRow]] = []
    trainer = Trainer(replace(TASK, batches=40), TrainConfig(metric_window=1280))
    report = trainer.train(report=lambda name, row: rows.append((name, row)))
    aucs = [row.value for name, row in rows if name == "click/auc"]
    assert len(aucs) == 2
    assert all(0.4 < auc < 1 for auc in aucs)
    assert [row.examples for row in report.windows["click/auc"]] == [1280, 1280]
    assert report.windows["click/auc"][1].event_time > report.windows["click/auc"][0].event_time


def test_evaluating_reads_the_last_checkpoint_and_writes_nothing(tmp_path: Path) -> None:
    config = TrainConfig(model_dir=str(tmp_path))
    Trainer(replace(TASK, batches=50), config).train()
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    found = Trainer(replace(TASK, batches=50), config).evaluate()
    assert found["examples"] == 1000
    assert 0.5 < found["click/auc"] < 1
    assert 0 < found["loss"] < 1
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    assert Trainer(TASK, config).evaluate(steps=2)["examples"] == 128


def test_predicting_returns_what_the_model_says(tmp_path: Path) -> None:
    config = TrainConfig(model_dir=str(tmp_path))
    Trainer(TASK, config).train()
    batches = list(Trainer(TASK, config).predict())
    assert sum(len(batch) for batch, _ in batches) == 1000
    assert all(said["click"].shape == (len(batch),) for batch, said in batches)
    assert all(0 <= p <= 1 for _, said in batches for p in said["click"].tolist())


def test_train_evaluate_predict_again_and_again_in_one_process(tmp_path: Path) -> None:
    config = TrainConfig(model_dir=str(tmp_path), steps=2)
    for number in range(1, 6):
        trainer = Trainer(TASK, config)
        assert trainer.train().step == 2 * number
        assert trainer.evaluate(steps=1)["examples"] == 64
        assert len(list(trainer.predict(steps=3))) == 3


def test_without_a_checkpoint_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="train first"):
        Trainer(TASK, TrainConfig(model_dir=str(tmp_path))).evaluate()
    with pytest.raises(ConfigError, match="needs model_dir"):
        Trainer(TASK, TrainConfig()).evaluate()


# Going on


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("keep", [KeepConfig(), KeepConfig(full_every=3, max_to_keep=2)])
def test_a_run_that_was_cut_short_ends_bit_for_bit_like_one_that_was_not(
    tmp_path: Path, prefetch: int, keep: KeepConfig
) -> None:
    task = replace(TASK, dropout=0.3, threshold=1)
    how = {"deterministic": True, "prefetch": prefetch, "keep": keep, "save": SaveConfig(steps=4)}
    whole, _ = train(task, model_dir=str(tmp_path / "whole"), **how)
    folder = str(tmp_path / "cut")
    trained: list[int] = []
    for step in (6, 7, 13, 19):
        watch = Watch()
        config = TrainConfig(model_dir=folder, **how)
        with pytest.raises(RuntimeError, match="lightning"):
            Trainer(task, config, hooks=[watch, StopAt(step, RuntimeError("lightning"))]).train()
        trained = trained[: 64 * (watch.steps[0] - 1)] + watch.examples
    last, report = train(task, model_dir=folder, **how)
    assert report.restored_from is not None
    assert last.rows == whole.rows
    assert last.weights == whole.weights
    assert trained[: 64 * (last.steps[0] - 1)] + last.examples == whole.examples


class Repeated(nn.Module):
    """Adds one of a few biases to each example, very often: its gradient is the sum of many floats."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.biases = inner, nn.Parameter(torch.zeros(3))
        self.embeddings = inner.embeddings  # where `Watch` finds the rows

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        chosen = torch.arange(400_000).remainder(3).view(-1, len(logits))
        scale = torch.linspace(0.1, 1, chosen.numel()).view(chosen.shape)
        return logits + (self.biases[chosen] * scale).sum(0)


@dataclass(frozen=True)
class RepeatedIndices(Clicks):
    def model(self) -> nn.Module:
        return Repeated(super().model())


def test_sums_over_repeated_indices_have_the_same_bits_on_several_threads() -> None:
    """Threads of torch once added up gradients in the order in which they arrived."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = (train(RepeatedIndices(batches=4), deterministic=True)[0] for _ in range(4))
    finally:
        torch.set_num_threads(threads)
    assert all(other.weights == first.weights for other in others)
    assert not torch.are_deterministic_algorithms_enabled()  # the choice of the process is as before


def test_a_run_that_ended_well_continues_with_the_next_record(tmp_path: Path) -> None:
    first, _ = train(TASK, StopAt(8), model_dir=str(tmp_path))
    second, report = train(TASK, model_dir=str(tmp_path))
    whole, _ = train(TASK)
    assert first.steps + second.steps == whole.steps
    assert first.examples + second.examples == whole.examples
    assert report.examples == 12 * 64


def test_a_run_that_is_done_takes_no_more_steps(tmp_path: Path) -> None:
    train(model_dir=str(tmp_path), max_steps=5)
    watch, report = train(model_dir=str(tmp_path), max_steps=5)
    assert watch.steps == []
    assert "already" in report.stop_reason


def test_checkpoints_are_saved_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    _, report = train(TASK, StopAt(13), model_dir=str(tmp_path), save=SaveConfig(steps=5))
    state = read_checkpoint_state(str(tmp_path))
    assert state is not None
    names = [Path(path).name for path in state.all_model_checkpoint_paths]
    assert names == ["model.ckpt-5", "model.ckpt-10", "model.ckpt-13"]
    assert report.checkpoint == str(tmp_path / "model.ckpt-13")
    assert not (tmp_path / "model.ckpt-0.manifest").exists()


def test_saving_in_the_background_saves_the_same_steps(tmp_path: Path) -> None:
    how = {"save": SaveConfig(steps=10, asynchronous=True), "prefetch": 0}
    train(TASK, model_dir=str(tmp_path / "a"), **how)
    train(TASK, model_dir=str(tmp_path / "b"), prefetch=0, save=SaveConfig(steps=10))
    for step in (10, 20):
        parts = [read_manifest(str(tmp_path / d / f"model.ckpt-{step}")).manifest.parts for d in "ab"]
        assert parts[0]["position"] == parts[1]["position"]
        assert parts[0]["dense"] == parts[1]["dense"]  # with the checksums of its files
        assert parts[0]["tables"]["tables"] == parts[1]["tables"]["tables"]


def test_metrics_resume_where_they_were(tmp_path: Path) -> None:
    how = {"metric_window": 64 * 15, "model_dir": str(tmp_path)}
    train(TASK, StopAt(10), **how)
    _, report = train(TASK, **how)
    assert report.windows["click/auc"][0].examples in (64 * 15, 64 * 5)


def test_a_run_starts_from_another_folder(tmp_path: Path) -> None:
    train(TASK, StopAt(10), model_dir=str(tmp_path / "old"))
    watch, report = train(
        TASK, model_dir=str(tmp_path / "new"), restore=RestoreConfig(dir=str(tmp_path / "old"))
    )
    assert watch.steps[0] == 11
    assert report.restored_from == str(tmp_path / "old" / "model.ckpt-10")


def test_a_run_goes_back_to_a_checkpoint_once(tmp_path: Path) -> None:
    how = {"model_dir": str(tmp_path), "restore": RestoreConfig(checkpoint="model.ckpt-5")}
    train(TASK, model_dir=str(tmp_path))
    first, _ = train(TASK, StopAt(7), **how)
    second, _ = train(TASK, **how)
    assert (first.steps[0], second.steps[0]) == (6, 8)


def test_weights_are_reset_on_request_and_rows_are_not(tmp_path: Path) -> None:
    train(TASK, StopAt(10), model_dir=str(tmp_path))
    how = {"model_dir": str(tmp_path), "restore": RestoreConfig(reset_dense=True, continue_training=True)}
    watch, _ = train(TASK, StopAt(11), **how)
    assert watch.steps == [11]
    assert (tmp_path / "clear_nn").read_text() == "clean nn done!"


def test_a_wider_model_is_refused_with_a_hint(tmp_path: Path) -> None:
    train(TASK, StopAt(3), model_dir=str(tmp_path))
    with pytest.raises(RestoreError, match="table"):
        train(replace(TASK, dim=8), model_dir=str(tmp_path))


# What goes wrong


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    class Another(Hook):
        def after_create(self, run: TrainingRun) -> None:
            with pytest.raises(ModelDirLockedError, match="writes checkpoints there"):
                Trainer(TASK, TrainConfig(model_dir=run.model_dir)).train()

    train(TASK, Another(), model_dir=str(tmp_path), steps=1)


def test_checkpoints_that_are_all_gone_are_not_started_over_silently(tmp_path: Path) -> None:
    train(TASK, StopAt(5), model_dir=str(tmp_path))
    for path in tmp_path.glob("*.manifest"):
        path.unlink()
    with pytest.raises(RestoreError, match="all of its checkpoints are missing"):
        train(TASK, model_dir=str(tmp_path))


def test_a_checkpoint_deleted_under_us_leaves_the_one_before(tmp_path: Path) -> None:
    train(TASK, StopAt(12), model_dir=str(tmp_path))
    (tmp_path / "model.ckpt-12.manifest").unlink()
    watch, _ = train(TASK, model_dir=str(tmp_path))
    assert watch.steps[0] == 11


class Diverges(Clicks):
    """Its loss is NaN at the fifth batch, the first time."""

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        outputs = super().outputs(model, batch)
        if batch.ids.event_time == self.bad_time():
            return Outputs(outputs.loss * math.nan, outputs.predictions)
        return outputs

    def bad_time(self) -> int:
        return int(list(self.dataset(Mode.TRAIN))[4].ids.event_time)


def test_a_loss_that_is_nan_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        train(
            Diverges(),
            model_dir=str(tmp_path),
            save=SaveConfig(steps=3),
            alert=AlertConfig(action="stop", every_steps=100),
        )
    state = read_checkpoint_state(str(tmp_path))
    assert state is not None
    assert state.model_checkpoint_path.endswith("-3")


def test_a_loss_that_is_nan_once_is_rolled_back(tmp_path: Path) -> None:
    class Once(Diverges):
        left = 1

        def bad_time(self) -> int:
            if Once.left and (time := super().bad_time()):
                return time
            return -1

        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            outputs = super().outputs(model, batch)
            if outputs.loss.isnan():
                Once.left = 0
            return outputs

    watch, report = train(
        Once(),
        model_dir=str(tmp_path),
        save=SaveConfig(steps=3),
        alert=AlertConfig(action="rollback", every_steps=1),
    )
    assert watch.steps[:5] == [1, 2, 3, 4, 5] or watch.steps[:4] == [1, 2, 3, 4]
    assert report.step == 20
    assert all(math.isfinite(value) for rows in watch.rows.values() for r in rows.values() for value in r[1])


def test_outside_its_hours_a_run_saves_and_ends(tmp_path: Path) -> None:
    config = TrainConfig(model_dir=str(tmp_path), hours=DailyHours(1, 0, 5, 0))
    report = Trainer(TASK, config, clock=lambda: 10 * 3600.0).train()
    assert report.step == 1
    assert report.checkpoint == str(tmp_path / "model.ckpt-1")


def test_a_deterministic_run_does_not_save_by_the_clock() -> None:
    with pytest.raises(ConfigError, match=r"save\.steps"):
        TrainConfig(deterministic=True, save=SaveConfig(secs=10))


def test_the_manifest_of_a_run_says_how_it_was_started(tmp_path: Path) -> None:
    train(TASK, StopAt(5), model_dir=str(tmp_path), seed=3)
    train(TASK, StopAt(7), model_dir=str(tmp_path), seed=3)
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["from_step"] for start in starts] == [5, 0]
    assert starts[0]["config"]["seed"] == 3
    assert starts[0]["task"] == "clicks"
    assert (
        starts[0]["versions"]["torch"] == torch.__version__.partition("+")[0]
        or starts[0]["versions"]["torch"]
    )


def test_expired_rows_are_dropped_as_often_as_asked() -> None:
    watch, _ = train(evict_every_steps=5)
    assert watch.rows["item"]


def test_a_run_that_is_stopped_before_its_first_batch_says_so() -> None:
    class StopsAtOnce(Hook):
        def before_step(self, run: TrainingRun) -> None:
            assert isinstance(run, LocalRun)
            run.interrupt("somebody stops it")

    report = Trainer(Clicks(batches=0), TrainConfig(), hooks=[StopsAtOnce()]).train()
    assert (report.step, report.stop_reason) == (0, "somebody stops it")


def test_dense_weights_are_saved_by_themselves_too(tmp_path: Path) -> None:
    train(TASK, StopAt(9), model_dir=str(tmp_path), save=SaveConfig(steps=6), dense_save=SaveConfig(steps=2))
    state = read_checkpoint_state(str(tmp_path / "dense_only"))
    assert state is not None
    steps = [int(path.rpartition("-")[2]) for path in state.all_model_checkpoint_paths]
    assert steps == [2, 4, 8]  # 6 is in the full checkpoint of that step
    assert set(read_manifest(state.model_checkpoint_path).manifest.parts) == {"dense"}


def test_the_state_file_of_exempt_checkpoints_is_there_from_the_start(tmp_path: Path) -> None:
    class Look(Hook):
        def after_create(self, run: TrainingRun) -> None:
            found = read_monolith_checkpoint(run.model_dir)
            assert found is not None
            assert found.last_checkpoint_save_timestamp is None

    train(TASK, Look(), model_dir=str(tmp_path), steps=1)


def test_an_operator_ends_a_run_at_a_time_of_the_data(tmp_path: Path) -> None:
    tmp_path.joinpath("stop_20").touch()
    how = {"operator_files": True, "operator_files_every_steps": 10}
    _, report = train(replace(TASK, batches=40), model_dir=str(tmp_path), **how)
    assert report.step in (20, 21)
    assert report.checkpoint is not None


def test_the_contribution_of_each_feature_is_written_on_request(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from monolith.observe.summaries import read_summaries

    train(TASK, model_dir=str(tmp_path), insight_every_steps=5)
    files = [str(path) for path in (tmp_path / "summaries").iterdir()]
    found = list(read_summaries(files))
    assert [one.step for one in found] == [5, 10, 15, 20]
    assert json.loads(found[0].content)["segment_names"] == ["user", "item", "context"]


class OwnModule(nn.Module):
    """Hides that a ready model is in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        return logits


class OwnModel(Clicks):
    def model(self) -> nn.Module:
        return OwnModule(super().model())


def test_the_label_is_written_next_to_the_contributions_on_request(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from monolith.observe.summaries import read_summaries

    for name, task in (("ready", TASK), ("own", OwnModel())):
        folder = str(tmp_path / name)
        Trainer(task, TrainConfig(model_dir=folder, insight_every_steps=10, insight_label="click")).train()
        files = [str(path) for path in (tmp_path / name / "summaries").iterdir()]
        first, *_ = read_summaries(files)
        head = json.loads(first.content)
        assert first.tag == "fi_train/monolith_feature_insight"
        assert (head["tag_type"], head["label_size"]) == ("fi_train", 1)
        assert first.data.shape[1] == sum(head["segment_sizes"]) + 1
        assert set(first.data[:, -1].tolist()) == {0.0, 1.0}, "the label is the last column"
    with pytest.raises(ConfigError, match="no label 'buy'; they have click"):
        train(TASK, model_dir=str(tmp_path / "other"), insight_every_steps=1, insight_label="buy")
    with pytest.raises(ConfigError, match="insight_label needs insight_every_steps"):
        TrainConfig(insight_label="click")


def test_features_can_be_written_instead_of_trained(tmp_path: Path) -> None:
    trainer = Trainer(TASK, TrainConfig(model_dir=str(tmp_path)))
    assert trainer.dump_features(steps=5, batches_per_file=2) == 5
    assert len(list((tmp_path / "features").iterdir())) == 3
    with pytest.raises(ConfigError, match="model_dir"):
        Trainer(TASK, TrainConfig()).dump_features()


def test_how_far_a_row_goes_does_not_depend_on_the_size_of_a_batch() -> None:
    """The loss is a mean; the rows of a batch twice as large must not be half as well trained."""
    small, _ = train(replace(TASK, batches=1, batch_size=64), prefetch=0)
    large, _ = train(replace(TASK, batches=1, batch_size=128), prefetch=0)
    users = small.rows["user"].keys() & large.rows["user"].keys()
    moved = [[abs(rows["user"][user][1][0]) for user in users] for rows in (small.rows, large.rows)]
    assert sum(moved[1]) > 0.9 * sum(moved[0])


def test_another_window_of_metrics_does_not_stop_a_run(tmp_path: Path) -> None:
    train(TASK, StopAt(5), model_dir=str(tmp_path), metric_window=1000)
    _, report = train(TASK, model_dir=str(tmp_path), metric_window=500)
    assert report.step == 20


def test_a_warm_start_may_begin_with_the_data_of_its_own(tmp_path: Path) -> None:
    train(TASK, StopAt(10), model_dir=str(tmp_path / "old"))
    restore = RestoreConfig(dir=str(tmp_path / "old"), restart_data=True)
    first, _ = train(TASK, StopAt(12), model_dir=str(tmp_path / "new"), restore=restore)
    again, _ = train(TASK, StopAt(13), model_dir=str(tmp_path / "new"), restore=restore)
    whole, _ = train(TASK)
    assert first.steps == [11, 12]
    assert first.examples == whole.examples[: 2 * 64]
    assert again.examples == whole.examples[2 * 64 : 3 * 64]  # once begun, it goes on like any run


def test_an_error_at_the_end_of_a_run_never_loses_what_was_trained(tmp_path: Path) -> None:
    class Failing(Hook):
        def end(self, run: TrainingRun) -> None:  # noqa: ARG002
            raise ValueError("the report could not be sent")

    class Reported(Clicks):
        def chief_hooks(self, mode: Mode) -> list[Hook]:  # noqa: ARG002
            return [Failing()]  # before the hook that saves

    with pytest.raises(ValueError, match="could not be sent"):
        train(Reported(), model_dir=str(tmp_path), save=SaveConfig(steps=1000))
    assert list(tmp_path.glob("model.ckpt-20.manifest"))
