"""Training steps that a GPU replays as graphs: runs end as with single launches, and say which they use."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from runtime.test_device_rows import OnDevice, Rows, assert_same_rows
from services.emulated_cuda import device_named, device_names
from torch import Tensor, nn
from train.published import Following
from train.tasks import Clicks

from monolith.cuda import Device
from monolith.errors import DivergedError
from monolith.feature import Batch, Each, FeatureIds
from monolith.model import Feature, RetrievalModel
from monolith.model.by_name import MODELS
from monolith.observe import Metrics
from monolith.runtime import Trainer
from monolith.tensors import RaggedTensor
from monolith.train import Hook, Mode, Outputs, StepResult, TrainConfig, TrainingRun
from monolith.train.hooks import SaveConfig


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


@dataclass(frozen=True)
class Spoiled(Clicks):
    """Some of its batches have a label that is infinite, and so is their loss."""

    batches: int = 12
    batch_size: int = 16
    bad: Sequence[int] = ()
    scheduled: bool = False

    def dataset(self, mode: Mode) -> Any:
        for number, batch in enumerate(super().dataset(mode)):
            spoil = torch.inf if mode is Mode.TRAIN and number in self.bad else 1.0
            yield replace(batch, labels={"click": spoil * (batch.labels["click"] + 1) - 1})

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        logits: Tensor = model(batch)
        error = logits.sigmoid() - batch.labels["click"]
        return Outputs(error.square().mean(), {"click": logits.sigmoid()})

    def metrics(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        return ("mae",)

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def dense_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if self.scheduled else None


class Steps(Hook):
    """Remembers the steps that hooks were told of, and what they said."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.steps.append(result.step)
        self.losses.append(float(result.loss))


def run(device: Device, task: Clicks, *hooks: Hook, metrics: Metrics | None = None, **config: Any) -> Any:
    on_device: dict[str, Any] = {"accelerator": "cuda", "embedding_device": "device", "metric_window": 32}
    settings = TrainConfig(**{**on_device, "deterministic": True, **config})
    return Trainer(task, settings, hooks=hooks, accelerator=OnDevice(device), metrics=metrics).train()


def test_a_run_says_that_steps_are_replayed_and_ends_as_without(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    found = []
    for graphs in (False, True):
        rows, steps = Rows(), Steps()
        report = run(device, Spoiled(), rows, steps, step_graphs=graphs)
        found.append((rows.found, steps.losses, report.windows, report.examples))
        said = r"replayed as CUDA graphs, one launch each: batches of 16; [\d,]+ MiB for inputs and undo"
        assert (re.search(said, caplog.text) is not None) == graphs
        assert steps.steps == list(range(1, 13))
    assert_same_rows(found[1][0], found[0][0])
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    assert found[1][3] == found[0][3] == 12 * 16
    windows = [[row.value for row in one[2]["click/mae"]] for one in found]
    assert len(windows[0]) == 6
    assert windows[1] == pytest.approx(windows[0], rel=1e-4)


@dataclass(frozen=True)
class Ragged(Spoiled):
    """Its examples have several items, or none."""

    batches: int = 16

    def dataset(self, mode: Mode) -> Any:
        draw = torch.Generator().manual_seed(3)
        for batch in super().dataset(mode):
            lengths = torch.randint(0, 5, (len(batch),), generator=draw)
            lengths[0] = 2
            items = torch.randint(0, 40, (int(lengths.sum()),), generator=draw)
            ids = FeatureIds.pack(
                {
                    "user": batch.ids["user"],
                    "item": RaggedTensor.from_row_lengths(items, lengths),
                    "context": batch.ids["context"],
                },
                event_time=batch.ids.event_time,
            )
            yield replace(batch, ids=ids)


@pytest.mark.parametrize("bad", [(), (7, 8)])
def test_a_run_on_ragged_features_is_replayed_too(
    device: Device, bad: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    found = []
    for graphs in (False, True):
        rows, steps = Rows(), Steps()
        report = run(device, Ragged(bad=bad), rows, steps, step_graphs=graphs)
        found.append((rows.found, report.windows))
        assert ("replayed as CUDA graphs, one launch each: batches of 16" in caplog.text) == graphs
        assert report.step == 16 - len(bad)
    assert "ids each, padded" in caplog.text
    assert_same_rows(found[1][0], found[0][0])
    windows = [[row.value for row in one[1]["click/mae"]] for one in found]
    assert windows[1] == pytest.approx(windows[0], rel=1e-4)


@pytest.mark.parametrize("bad", [(6,), (5, 6, 9), (11,), (0, 1)])
def test_a_refused_batch_is_skipped_and_not_counted(
    device: Device, bad: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for graphs in (False, True):
        rows = Rows()
        report = run(device, Spoiled(bad=bad), rows, step_graphs=graphs)
        found.append(rows.found)
        assert report.skipped == len(bad)
        assert report.step == 12 - len(bad)
        assert report.examples == 16 * (12 - len(bad))
    assert_same_rows(found[1], found[0])
    assert f"Nothing of it was applied; {len(bad)} so far" in caplog.text


def test_hooks_see_finite_losses(device: Device) -> None:
    steps = Steps()
    run(device, Spoiled(bad=(6,)), steps)
    assert all(torch.tensor(steps.losses).isfinite())


def test_a_run_takes_as_many_steps_as_it_was_asked_for(device: Device) -> None:
    """A refused batch among the last ones is noticed before the run ends."""
    report = run(device, Spoiled(batches=20, bad=(8,)), max_steps=9)
    assert (report.step, report.skipped) == (9, 1)


def test_too_many_refused_batches_in_a_row_end_the_run(device: Device) -> None:
    with pytest.raises(DivergedError, match="3 batches in a row could not be trained on"):
        run(device, Spoiled(bad=range(5, 12)), max_skipped_in_a_row=2)


@pytest.mark.parametrize(
    "task",
    [
        Spoiled(batches=20, threshold=2, bad=(6, 9, 10)),
        Ragged(batches=24, threshold=3, bad=(0, 7, 8)),
    ],
)
def test_a_run_whose_rows_wait_for_admission_is_replayed_too(
    device: Device, task: Spoiled, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused batch counts no sightings, and neither do the ids that pad a batch."""
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    found = []
    for graphs in (False, True):
        rows = Rows()
        report = run(device, task, rows, step_graphs=graphs)
        found.append(rows)
        assert report.skipped == len(task.bad)
        assert ("replayed as CUDA graphs, one launch each: batches of 16" in caplog.text) == graphs
    assert_same_rows(found[1].found, found[0].found)
    assert found[1].filtered == found[0].filtered
    assert sum(found[0].filtered.values()) > 100


@pytest.mark.parametrize("bad, threshold", [((), 0), ((3, 7), 0), ((3, 7), 2)])
def test_a_run_that_is_saved_and_resumed_ends_like_one_that_is_not(
    device: Device, tmp_path: Path, bad: Sequence[int], threshold: int
) -> None:
    task = Spoiled(bad=bad, threshold=threshold)
    alone, resumed = Rows(), Rows()
    run(device, task, alone, model_dir=str(tmp_path / "alone"))
    batches = list(task.dataset(Mode.TRAIN))

    @dataclass(frozen=True)
    class Resumable(Spoiled):
        def dataset(self, mode: Mode) -> Any:
            del mode
            return _Listed(batches)

    for steps in (4, None):
        how = {"model_dir": str(tmp_path / "resumed"), "save": SaveConfig(steps=2), "steps": steps}
        run(device, Resumable(bad=bad, threshold=threshold), resumed, **how)
    assert_same_rows(resumed.found, alone.found)


class _Listed:
    """Batches of a list, as a source with a position."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches, self._next = batches, 0

    def __iter__(self) -> Any:
        while self._next < len(self._batches):
            self._next += 1
            yield self._batches[self._next - 1]

    def position(self) -> dict[str, int]:
        return {"next": self._next}

    def restore(self, position: Any) -> None:
        self._next = position["next"]

    def commit(self, position: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_schedule_of_rates_moves_with_the_steps(device: Device) -> None:
    """SGD has its rate in its launches: after some captures it is trained by single launches."""
    found = []
    for graphs in (False, True):
        rows = Rows()
        run(device, Spoiled(batches=16, scheduled=True), rows, step_graphs=graphs)
        found.append(rows.found)
    assert_same_rows(found[1], found[0])


def test_a_run_says_why_its_model_is_not_captured(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    assert run(device, Spoiled(threshold=2), device_memory_bytes=3100).replayed == 0
    assert "not replayed as CUDA graphs: table" in caplog.text
    assert "training several times slower if the model is small" in caplog.text
    assert "counts in host memory how often an id was seen" in caplog.text


@dataclass(frozen=True)
class Sized(Spoiled):
    """Its batches have several sizes, in turn."""

    batches: int = 68
    sizes: int = 8

    def dataset(self, mode: Mode) -> Any:
        for number, batch in enumerate(super().dataset(mode)):
            size = len(batch) - number % self.sizes
            ids = {name: batch.ids[name].values[:size] for name in ("user", "item", "context")}
            labels = {"click": batch.labels["click"][:size]}
            yield Batch(FeatureIds.pack(ids, event_time=batch.ids.event_time), {}, labels)


def test_a_run_says_once_that_batches_have_more_sizes_than_are_captured(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    metrics = Metrics()
    report = run(device, Sized(batches=132), metrics=metrics)
    # Of each of 4 sizes, 17 batches come, 2 of them before its capture; the first of all is of another size.
    (told,) = [one for one in caplog.messages if "of the last 64 training batches were launched" in one]
    assert told.startswith("31 of")
    assert "not replayed as CUDA graphs: batches of other sizes than the 4 most frequent. " in told
    assert "several times slower if the model is small. Have the dataset give batches of one size" in told
    (line,) = [one for one in caplog.messages if "training batches were replayed as CUDA graphs" in one]
    assert line.startswith("44.7% of 132 training batches were")
    assert line.endswith("kernel by kernel: 64 of other sizes than the 4 most frequent, 9 before a capture")
    assert report.replayed == 59 / 132
    (share,) = re.findall(r"^\w*train_replayed_batches (\S+)", metrics.render().decode(), re.MULTILINE)
    assert float(share) == pytest.approx(report.replayed)


def test_a_run_does_not_warn_of_batches_that_are_replayed(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    run(device, Sized(batches=66, sizes=4))
    assert not [one for one in caplog.records if "kernel by kernel" in one.getMessage()]


def test_a_run_says_that_rows_have_too_little_room_on_the_device_to_replay_steps(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    report = run(device, Spoiled(batches=66, batch_size=64), device_memory_bytes=FEW)
    assert "batches whose rows the device, or the index of a tiered table, had no room for. " in caplog.text
    assert "Give rows more memory (train.device_memory_bytes; memory_bytes of tables" in caplog.text
    assert report.replayed < 0.9


def test_a_run_on_a_gpu_says_that_rows_in_host_memory_keep_it_from_replaying(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for graphs in (True, False):
        caplog.clear()
        config = TrainConfig(accelerator="cuda", embedding_device="host", step_graphs=graphs)
        report = Trainer(Spoiled(batches=1), config, accelerator=OnDevice(device)).train()
        assert report.replayed is None
        found.append("not replayed as CUDA graphs: embedding rows are in host memory" in caplog.text)
    assert found == [True, False]


def test_a_model_that_reads_its_batch_by_itself_is_trained_by_single_launches(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    class Peeks(Spoiled):
        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            found = super().outputs(model, batch)
            return replace(found, loss=found.loss * (1 + batch.ids.event_time % 2))

    found = []
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    for graphs in (False, True):
        rows = Rows()
        report = run(device, Peeks(), rows, step_graphs=graphs)
        assert (report.step, report.replayed) == (12, 0 if graphs else None)
        found.append(rows.found)
    assert "11 after capturing was given up, 1 before a capture" in caplog.text
    assert "not replayed as CUDA graphs: AcceleratorError: the model reads the event time" in caplog.text
    assert_same_rows(found[1], found[0])


def test_products_in_bfloat16_train_nearly_as_in_float32() -> None:
    found = []
    for precision in ("float32", "bfloat16"):
        steps, rows = Steps(), Rows()
        config: Any = {"precision": precision, "deterministic": True}
        task = Clicks(batches=12, batch_size=64)
        trainer = Trainer(task, TrainConfig(**config), hooks=[steps, rows])
        trainer.train()
        found.append((steps.losses, rows.found))
    assert found[1][0] == pytest.approx(found[0][0], abs=0.02)
    assert found[1][0] != found[0][0]
    assert found[1][1].keys() == found[0][1].keys()


# Rows in host memory that come to the device ahead of steps

FEW = 12_000
"""Bytes of a device for rows: those of some batches of 16."""


@pytest.mark.parametrize("bad", [(), (6, 7, 11)])
def test_steps_are_replayed_on_rows_that_come_from_host_memory(
    device: Device, bad: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    task = Spoiled(batches=30, bad=bad)
    there, some = Rows(), Rows()
    run(device, task, there)
    caplog.clear()
    metrics = Metrics()
    report = run(device, task, some, metrics=metrics, device_memory_bytes=FEW)
    assert "replayed as CUDA graphs, one launch each: batches of 16" in caplog.text
    assert "the device has room for" in caplog.text
    assert "% of the ids found their row on the device" in caplog.text
    (share,) = re.findall(r"^\w*train_hot_ids (\S+)", metrics.render().decode(), re.MULTILINE)
    assert 0 < float(share) < 1
    assert (report.step, report.skipped) == (30 - len(bad), len(bad))
    assert some.far > 50
    assert some.found == there.found  # to the bit


def test_rows_that_come_and_go_are_saved_restored_and_evaluated_as_those_that_stay(
    device: Device, tmp_path: Path
) -> None:
    """Stopped after steps that no save has, resumed with less memory, then with all rows on the device."""
    batches = list(Spoiled(batches=30).dataset(Mode.TRAIN))

    @dataclass(frozen=True)
    class Resumable(Spoiled):
        def dataset(self, mode: Mode) -> Any:
            return _Listed(batches) if mode is Mode.TRAIN else _Listed(batches[:3])

    class Killed(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if result.step == 17:
                raise KeyboardInterrupt

    alone, resumed, measured = Rows(), Rows(), []
    save = SaveConfig(steps=5)
    for folder, rows, memory in (
        ("alone", alone, (None, None, None)),
        ("resumed", resumed, (FEW, 2 * FEW, None)),
    ):
        where = str(tmp_path / folder)
        with pytest.raises(KeyboardInterrupt):
            run(device, Resumable(), Killed(), model_dir=where, save=save, device_memory_bytes=memory[0])
        for steps, few in zip((24, 30), memory[1:], strict=True):
            run(
                device,
                Resumable(),
                rows,
                model_dir=where,
                save=save,
                max_steps=steps,
                device_memory_bytes=few,
            )
        settings = TrainConfig(
            accelerator="cuda", embedding_device="device", deterministic=True, model_dir=where
        )
        measured.append(Trainer(Resumable(), settings, accelerator=OnDevice(device)).evaluate())
    assert resumed.found == alone.found
    assert measured[0] == measured[1]


def test_a_subscriber_ends_equal_to_a_trainer_whose_rows_come_and_go(device: Device) -> None:
    task = Spoiled(batches=30)
    following, rows = Following(task), Rows()
    settings = TrainConfig(
        accelerator="cuda", embedding_device="device", device_memory_bytes=FEW, summary_every_steps=None
    )
    Trainer(task, settings, hooks=[rows], publish=following.plan, accelerator=OnDevice(device)).train()
    trained = {name: {key: tuple(row[1]) for key, row in of.items()} for name, of in rows.found.items()}
    assert rows.far > 50
    assert following.values == trained


@dataclass(frozen=True)
class Histories(Spoiled):
    """Users of whom it is known which items they have seen; a ranker has labels, other models have none."""

    kind: Literal["hstu", "sasrec", "gru4rec", "sequence_ranker"] = "hstu"
    batches: int = 16

    def dataset(self, mode: Mode) -> Any:
        draw = torch.Generator().manual_seed(3)
        for batch in super().dataset(mode):
            lengths = torch.randint(0, 5, (len(batch),), generator=draw)
            seen = torch.randint(0, 40, (int(lengths.sum()),), generator=draw)
            ids = FeatureIds.pack(
                {"item": batch.ids["item"], "seen": RaggedTensor.from_row_lengths(seen, lengths)},
                event_time=batch.ids.event_time,
            )
            yield Batch(ids, {}, batch.labels if self.kind == "sequence_ranker" else {})

    def model(self) -> nn.Module:
        make: Any = MODELS[self.kind]
        seen = Feature(name="seen", shares="item", combiner=Each())
        # By cosine, vectors that are still short would make immense gradients of differences in rounding.
        how: dict[str, Any] = {"hidden": (4,)} if self.kind == "sequence_ranker" else {"similarity": "dot"}
        item = Feature(name="item", occurrence_threshold=self.threshold)
        found: nn.Module = make([item, seen], dim=4, layers=1, max_length=5, threads=1, **how)
        return found

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        if not isinstance(model, RetrievalModel):
            return super().outputs(model, batch)
        picked = model.pick(batch)
        return Outputs(picked.loss, {"click": picked.scores})

    def metrics(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        return ()


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "gru4rec", "sequence_ranker"])
def test_a_run_on_histories_is_replayed_unless_its_model_is_recurrent(
    device: Device, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    found, bad = [], (5,) if kind == "sequence_ranker" else ()
    for graphs in (False, True):
        rows, steps = Rows(), Steps()
        task = Histories(kind=kind, bad=bad)
        report = run(device, task, rows, steps, step_graphs=graphs, deterministic=False)
        found.append((rows.found, steps.losses))
        captured = graphs and kind != "gru4rec"
        assert ("replayed as CUDA graphs, one launch each: batches of 16 with" in caplog.text) == captured
        assert ("a GRU has a launch for each step" in caplog.text) == (graphs and kind == "gru4rec")
        assert report.step == 16 - len(bad)
    assert_same_rows(found[1][0], found[0][0])
    if not bad:
        assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)


def test_a_deterministic_run_on_histories_is_not_replayed(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """Its padding would depend on earlier batches, which a resumed run has not seen."""
    report = run(device, Histories(), deterministic=True)
    assert report.replayed == 0
    assert "train.deterministic is set" in caplog.text


def test_histories_whose_items_wait_for_admission_are_trained_one_by_one(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """What pads a history lies between IDs, where an admission filter would count it."""
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    found = []
    for graphs in (False, True):
        rows = Rows()
        task = Histories(kind="sequence_ranker", threshold=2)
        report = run(device, task, rows, step_graphs=graphs, deterministic=False)
        assert report.replayed == (0 if graphs else None)
        found.append(rows)
    assert "the padding behind them would count as sightings of an ID" in caplog.text
    assert_same_rows(found[1].found, found[0].found)
    assert found[1].filtered == found[0].filtered
    assert sum(found[0].filtered.values()) > 10
