"""Ranks train one model in step: what each of them has is one batch of the whole."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import (
    Tallied,
    TalliedFiles,
    TalliedQueue,
    TalliedService,
    numbered,
    read_model,
    run_fleet,
)
from runtime.rank_data import Given, batch_of
from runtime.rank_runs import quiet, train_ranks
from torch import Tensor, nn

from monolith.checkpoint import read_manifest
from monolith.data.formats.parquet import ParquetFormat
from monolith.errors import ConfigError, DataError, MonolithError
from monolith.feature import Batch, FirstN
from monolith.model import UpdateConfig
from monolith.nn import GradClipType
from monolith.runtime import LocalRun, Trainer
from monolith.train import Hook, SaveConfig, StepResult, TrainConfig, TrainingRun
from monolith.train.config import ExpiryConfig, KeepConfig, RanksConfig

PLAIN = quiet(TrainConfig(), prefetch=0, async_push=False)
"""Nothing is stale."""
SPEEDY = [PLAIN, quiet(TrainConfig(), prefetch=1), quiet(TrainConfig(), prefetch=2)]
NOW_AND_AHEAD = [(2, SPEEDY[0]), (3, SPEEDY[2])]
"""How many ranks, and how."""


class Watch(Hook):
    """Keeps what a rank has after each step, and its model at the end."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self.steps: list[StepResult] = []
        self.weights: list[dict[str, Tensor]] = []

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.steps.append(result)
        found = self._run.session.model.module.named_parameters()
        self.weights.append({name: weight.detach().clone() for name, weight in found})


class Watched(dict[int, Watch]):
    """Rank -> its watch."""

    def __call__(self, rank: int, run: LocalRun) -> list[Hook]:
        self[rank] = Watch(run)
        return [self[rank]]


def saved_rows(task: Given, model_dir: Path) -> dict[int, Any]:
    return read_model(task, model_dir).rows["f"]


# The cases of cpu_sync_training_test


@pytest.mark.parametrize(("size", "config"), [(2, SPEEDY[0]), (3, SPEEDY[1]), (3, SPEEDY[2])])
def test_a_feature_is_trained_by_all(size: int, config: TrainConfig, tmp_path: Path) -> None:
    steps = 4 if config.prefetch else 2
    task = Given(batches=[batch_of(*[[1, 2, 3, 4]] * 5)] * 5)
    reports = train_ranks([task] * size, replace(config, model_dir=str(tmp_path), max_steps=steps))
    assert [report.step for report in reports] == [steps] * size
    rows = saved_rows(task, tmp_path)
    assert sorted(rows) == [1, 2, 3, 4]
    assert len({tuple(value) for _, value, _ in rows.values()}) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ten_steps_of_adagrad_equal_a_dense_embedding_at_each_step(size: int) -> None:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 30, (size, 10, 4, 3), generator=draw)
    tasks = [Given(batches=[batch_of(*batch.tolist()) for batch in mine]) for mine in ids]
    watched = Watched()
    train_ranks(tasks, PLAIN, hooks=watched)
    table = nn.Embedding(30, 5)
    nn.init.zeros_(table.weight)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=1.0, eps=0.0)
    for step in range(10):
        optimizer.zero_grad()
        for rank in range(size):
            pooled = table(ids[rank, step]).sum(1)
            found = watched[rank].steps[step].predictions["sum"]
            torch.testing.assert_close(found, pooled.sum(1).detach())
            pooled.sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("size", "config"), NOW_AND_AHEAD)
def test_float_features_are_read_and_rows_trained(size: int, config: TrainConfig) -> None:
    floats = {"x": torch.arange(6.0).view(3, 2)}
    task = Given(
        batches=[batch_of([1], [2], [3], floats=floats)] * 2,
        predict=lambda _, batch: batch.floats["x"].sum(1),
    )
    watched = Watched()
    train_ranks([task] * size, config, hooks=watched)
    assert all(one.steps[1].predictions["sum"].tolist() == [1, 5, 9] for one in watched.values())


@pytest.mark.parametrize(("size", "config"), NOW_AND_AHEAD)
def test_of_a_sequence_the_first_are_trained(size: int, config: TrainConfig, tmp_path: Path) -> None:
    task = Given(batches=[batch_of([1, 2, 3], [2, 4])] * 2, combiner=FirstN(2))
    train_ranks([task] * size, replace(config, model_dir=str(tmp_path)))
    trained = {key for key, (_, value, _) in saved_rows(task, tmp_path).items() if any(value)}
    assert trained == {1, 2, 4}


@pytest.mark.parametrize(("size", "config"), NOW_AND_AHEAD)
def test_a_model_that_reads_no_ids_takes_its_steps_too(size: int, config: TrainConfig) -> None:
    task = Given(
        batches=[batch_of([], [])] * 2, dense=True, loss=lambda model, *_: 0 * model.top.bias.sum() + 3
    )
    reports = train_ranks([task] * size, config)
    assert [report.step for report in reports] == [2] * size


# One process on all batches laid end to end


def regression(model: Any, vectors: Tensor, batch: Batch) -> Tensor:
    error: Tensor = (model.top(vectors).squeeze(1) - batch.labels["y"]).square()
    return error.mean()


def halves(*sizes: int, steps: int = 4) -> list[list[Batch]]:
    """Return batches of each rank: ids that every rank has, labels that differ."""
    draw = torch.Generator().manual_seed(5)
    return [
        [
            batch_of(
                *torch.randint(0, 12, (size, 2), generator=draw).tolist(),
                labels={"y": torch.randint(-4, 5, (size,), generator=draw) / 4},
            )
            for _ in range(steps)
        ]
        for size in sizes
    ]


def end_to_end(batches: Sequence[Batch]) -> Batch:
    rows = [
        one.ids.ids[a:b].tolist()
        for one in batches
        for a, b in zip(one.ids.splits[:-1].tolist(), one.ids.splits[1:].tolist(), strict=True)
    ]
    return batch_of(*rows, labels={"y": torch.cat([one.labels["y"] for one in batches])})


UPDATES = {
    "plain": UpdateConfig(),
    "one norm": UpdateConfig(clip_norm=0.5),
    "a norm for rows": UpdateConfig(
        clip_type=GradClipType.ClipByDenseAndSparse, clip_norm=0.3, sparse_clip_norm=0.2
    ),
    "each by its norm": UpdateConfig(clip_type=GradClipType.ClipByNorm, clip_norm=0.2),
    "by value": UpdateConfig(clip_type=GradClipType.ClipByValue, clip_norm=0.05),
    "least norms": UpdateConfig(min_norms={"f": 4.0}),
    "decay": UpdateConfig(dense_weight_decay=0.1, clip_norm=1.0),
}


@pytest.mark.parametrize(
    ("update", "sizes"),
    [("plain", (4, 4)), ("one norm", (4, 4)), *((update, (2, 5, 1)) for update in UPDATES)],
)
def test_ranks_learn_what_one_process_learns_of_their_batches_together(
    update: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """Also where one has more examples: a gradient counts as often as there are examples."""
    batches = halves(*sizes)
    task = Given(dense=True, loss=regression, update=UPDATES[update])
    alone = replace(task, batches=[end_to_end(step) for step in zip(*batches, strict=True)])
    Trainer(alone, replace(PLAIN, model_dir=str(tmp_path / "one"))).train()
    watched = Watched()
    tasks = [replace(task, batches=mine) for mine in batches]
    train_ranks(tasks, replace(PLAIN, model_dir=str(tmp_path / "ranks")), hooks=watched)
    one, ranks = (read_model(alone, tmp_path / name) for name in ("one", "ranks"))
    assert one.step == ranks.step == 4
    for name, weight in one.weights.items():
        torch.testing.assert_close(torch.tensor(ranks.weights[name]), torch.tensor(weight))
    assert one.rows["f"].keys() == ranks.rows["f"].keys()
    for key, (_, value, state) in one.rows["f"].items():
        torch.testing.assert_close(torch.tensor(ranks.rows["f"][key][1]), torch.tensor(value))
        torch.testing.assert_close(torch.tensor(ranks.rows["f"][key][2]), torch.tensor(state))
    for step in range(4):
        first = watched[0].weights[step]
        assert all(
            torch.equal(first[name], weight)
            for other in watched.values()
            for name, weight in other.weights[step].items()
        ), "the weights of all ranks are the same bits"


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 2)])
def test_they_are_the_same_bits_where_sums_are(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """All numbers are small, and the examples are as many as a power of two: no sum is rounded."""

    def exact(model: Any, vectors: Tensor, batch: Batch) -> Tensor:
        return ((vectors * batch.labels["y"][:, None]).sum(1) + model.top.weight.sum()).mean()

    labels = iter([0.5, 2.0, 1.0, -0.25, 1.5, 0.5, 4.0, 0.125])
    batches = [
        [
            batch_of(*([1], [2])[:size], labels={"y": torch.tensor([next(labels) for _ in range(size)])})
            for _ in range(2)
        ]
        for size in sizes
    ]
    task = Given(dense=True, loss=exact, update=UpdateConfig())
    alone = replace(task, batches=[end_to_end(step) for step in zip(*batches, strict=True)])
    Trainer(alone, replace(PLAIN, model_dir=str(tmp_path / "one"))).train()
    tasks = [replace(task, batches=mine) for mine in batches]
    train_ranks(tasks, replace(PLAIN, model_dir=str(tmp_path / "ranks")))
    one, ranks = (read_model(alone, tmp_path / name) for name in ("one", "ranks"))
    assert (one.rows, one.weights) == (ranks.rows, ranks.weights)


@pytest.mark.parametrize(("size", "prefetch"), [(2, 0), (3, 2)])
def test_rows_are_the_same_bits_whatever_the_numbers_where_a_rank_meets_an_id_once(
    size: int, prefetch: int, tmp_path: Path
) -> None:
    """Their gradients are added up in the order of ranks, which is that of the batches laid end to end."""
    draw = torch.Generator().manual_seed(7)
    batches = [
        [
            batch_of(
                *torch.randperm(9, generator=draw).view(3, 3).tolist(),
                labels={"y": torch.randn(3, generator=draw)},
            )
            for _ in range(8)
        ]
        for _ in range(size)
    ]
    task = Given(loss=lambda _, vectors, batch: (vectors * batch.labels["y"][:, None]).sum())
    alone = replace(task, batches=[end_to_end(step) for step in zip(*batches, strict=True)])
    config = quiet(TrainConfig(), prefetch=prefetch, async_push=prefetch > 0)
    Trainer(alone, replace(config, model_dir=str(tmp_path / "one"))).train()
    tasks = [replace(task, batches=mine) for mine in batches]
    train_ranks(tasks, replace(config, model_dir=str(tmp_path / "ranks")))
    assert saved_rows(alone, tmp_path / "one") == saved_rows(alone, tmp_path / "ranks")


@pytest.mark.parametrize(
    "ranks",
    [RanksConfig(bucket_bytes=0), RanksConfig(bucket_bytes=1 << 30), RanksConfig(half_gradients=True)],
)
def test_how_gradients_are_sent_changes_little(ranks: RanksConfig) -> None:
    tasks = [Given(dense=True, loss=regression, update=UpdateConfig(), batches=mine) for mine in halves(4, 2)]
    plain, other = Watched(), Watched()
    train_ranks(tasks, PLAIN, hooks=plain)
    train_ranks(tasks, PLAIN, hooks=other, ranks=ranks)
    for name, weight in plain[0].weights[-1].items():
        torch.testing.assert_close(other[1].weights[-1][name], weight, atol=2e-3, rtol=2e-3)


def test_gradients_that_are_not_added_up_let_ranks_drift_apart() -> None:
    tasks = [Given(dense=True, loss=regression, batches=mine) for mine in halves(4, 4)]
    watched = Watched()
    train_ranks(tasks, PLAIN, hooks=watched, ranks=RanksConfig(skip_allreduce=True))
    assert not torch.equal(watched[0].weights[-1]["top.weight"], watched[1].weights[-1]["top.weight"])


@pytest.mark.parametrize("config", SPEEDY)
def test_a_batch_that_is_not_finite_is_skipped_by_all(config: TrainConfig) -> None:
    batches = halves(2, 2)
    batches[1][1] = replace(batches[1][1], labels={"y": torch.tensor([1.0, float("nan")])})
    tasks = [Given(dense=True, loss=regression, batches=mine) for mine in batches]
    reports = train_ranks(tasks, config)
    assert [(report.step, report.examples) for report in reports] == [(3, 12), (3, 6)]
    assert reports[0].skipped == 2, "one batch of each"


# The end of the data


@pytest.mark.parametrize(
    ("have", "prefetch", "num_ps"),
    [((3, 5, 4), 0, 0), ((4, 4), 2, 0), ((0, 3), 2, 0), ((2, 0, 0), 0, 1), ((1, 4), 2, 1)],
)
def test_every_batch_is_trained_however_unequal_the_ranks(
    have: tuple[int, ...], prefetch: int, num_ps: int, tmp_path: Path
) -> None:
    tasks = [
        Given(batches=[batch_of([100 * rank + number]) for number in range(many)])
        for rank, many in enumerate(have)
    ]
    config = quiet(TrainConfig(model_dir=str(tmp_path)), prefetch=prefetch)
    for _ in range(2):  # the second start finds that nothing is left
        reports = train_ranks(tasks, config, num_ps=num_ps)
        found = [(report.step, report.stop_reason, report.finished) for report in reports]
        assert found == [(max(have), "the data ended", True)] * len(have)
    rows = saved_rows(tasks[0], tmp_path)
    assert sorted(rows) == [100 * rank + number for rank, many in enumerate(have) for number in range(many)]


@pytest.mark.parametrize("update", UPDATES)
def test_ranks_of_which_some_have_no_data_learn_what_one_process_does(update: str, tmp_path: Path) -> None:
    """Also in the very first step, with each limit on gradients, and with an optimizer that has a state."""
    first, second = halves(3, steps=2)[0], halves(2, steps=5)[0]
    task = Given(dense=True, loss=regression, update=UPDATES[update])
    together = [end_to_end(step) for step in zip(first, second, strict=False)] + second[2:]
    Trainer(replace(task, batches=together), replace(PLAIN, model_dir=str(tmp_path / "one"))).train()
    watched = Watched()
    tasks = [replace(task, batches=mine) for mine in ([], second, first)]
    train_ranks(tasks, replace(PLAIN, model_dir=str(tmp_path / "ranks")), hooks=watched)
    one, ranks = (read_model(task, tmp_path / name) for name in ("one", "ranks"))
    assert one.step == ranks.step == 5
    for name, weight in one.weights.items():
        torch.testing.assert_close(torch.tensor(ranks.weights[name]), torch.tensor(weight))
    assert one.rows["f"].keys() == ranks.rows["f"].keys()
    for key, (_, value, state) in one.rows["f"].items():
        torch.testing.assert_close(torch.tensor(ranks.rows["f"][key][1]), torch.tensor(value))
        torch.testing.assert_close(torch.tensor(ranks.rows["f"][key][2]), torch.tensor(state))
    for step in range(5):
        for other in watched.values():
            assert torch.equal(watched[0].weights[step]["top.weight"], other.weights[step]["top.weight"])


def test_a_hook_on_a_rank_without_data_gets_the_loss_of_the_other_ranks() -> None:
    batches = halves(2, 2)
    watched = Watched()
    tasks = [Given(dense=True, loss=regression, batches=mine) for mine in ([], *batches)]
    train_ranks(tasks, PLAIN, hooks=watched)
    for nothing, one, other in zip(*(watched[rank].steps for rank in range(3)), strict=True):
        assert nothing.examples == 0
        assert not nothing.predictions
        assert float(nothing.loss) == pytest.approx((float(one.loss) + float(other.loss)) / 2)


def test_a_checkpoint_names_the_labels_although_rank_0_has_no_data(tmp_path: Path) -> None:
    tasks = [Given(dense=True, loss=regression, batches=mine) for mine in ([], *halves(2))]
    (report, _) = train_ranks(tasks, quiet(TrainConfig(model_dir=str(tmp_path))))
    assert report.checkpoint is not None
    assert read_manifest(report.checkpoint).manifest.parts["progress"]["value"]["heads"] == ["y"]


def test_a_rank_without_data_skips_the_steps_that_the_others_skip() -> None:
    batches = halves(2, steps=4)[0]
    batches[1] = replace(batches[1], labels={"y": torch.tensor([1.0, float("nan")])})
    tasks = [Given(dense=True, loss=regression, batches=mine) for mine in ([], batches)]
    reports = train_ranks(tasks, PLAIN)
    assert [(report.step, report.skipped) for report in reports] == [(3, 1), (3, 1)]


@dataclass(frozen=True)
class LongAndShort(TalliedQueue):
    """A queue of a short file, and one that is longer than ranks read ahead."""

    def write(self) -> list[str]:
        paths = [f"{self.folder}/{name}.parquet" for name in ("0-short", "1-long")]
        for path, first, size in zip(paths, (0, 8), (8, self.records - 8), strict=True):
            with ParquetFormat().writer(path) as writer:
                writer.write(numbered(self.stream().records(first, size)))
        return paths

    @property
    def records(self) -> int:
        return self.batches * 8


def test_a_rank_that_waits_for_a_queue_does_not_keep_the_others_from_its_last_file(tmp_path: Path) -> None:
    task = LongAndShort(batches=25, folder=str(tmp_path))
    config = quiet(TrainConfig(model_dir=str(tmp_path / "model"), idle_after=timedelta(milliseconds=50)))
    assert task.write()
    reports = train_ranks([task] * 2, config)
    assert [report.stop_reason for report in reports] == ["the data ended"] * 2
    assert trained_once(task, tmp_path)


def test_ranks_train_everything_that_a_data_service_gives_them(tmp_path: Path) -> None:
    with TalliedService(batches=9, folder=str(tmp_path)).served() as task:
        train_ranks([task] * 2, quiet(TrainConfig(model_dir=str(tmp_path / "model"))))
        assert trained_once(task, tmp_path)


def test_ranks_without_any_data_are_an_error() -> None:
    with pytest.raises(DataError, match="has no examples; nothing was trained or saved"):
        train_ranks([Given(), Given()], quiet(TrainConfig()))


def test_a_run_that_is_done_may_be_started_again(tmp_path: Path) -> None:
    config = quiet(TrainConfig(model_dir=str(tmp_path)), prefetch=0)
    tasks = [Given(batches=[batch_of([rank, 7])] * 2) for rank in range(2)]
    assert [report.step for report in train_ranks(tasks, config)] == [2, 2]
    assert [report.step for report in train_ranks(tasks, config)] == [2, 2]


def test_a_run_that_is_stopped_while_a_rank_has_no_data_trains_the_rest_after_a_restart(
    tmp_path: Path,
) -> None:
    config = quiet(TrainConfig(model_dir=str(tmp_path)), prefetch=2)
    few, many = ([batch_of([one]) for one in range(start, start + n)] for start, n in ((0, 2), (100, 5)))
    tasks = [Given(batches=few), Given(batches=many)]
    assert [report.step for report in train_ranks(tasks, replace(config, max_steps=3))] == [3, 3]
    assert [report.step for report in train_ranks(tasks, config)] == [5, 5]
    assert sorted(saved_rows(tasks[0], tmp_path)) == [0, 1, 100, 101, 102, 103, 104]


@pytest.mark.parametrize(("prefetch", "deterministic"), [(0, False), (2, False), (2, True)])
def test_a_rank_that_waits_for_a_silent_stream_can_be_stopped(
    prefetch: int, deterministic: bool, tmp_path: Path
) -> None:
    silent, asked = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        if number == 3:
            silent.set()
            asked.wait(60)

    class Stops(Hook):
        def __init__(self, run: LocalRun) -> None:
            self._run = run

        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if run.step == 3:
                threading.Thread(target=self._stop, daemon=True).start()

        def _stop(self) -> None:
            silent.wait(60)
            threading.Event().wait(0.1)  # most likely it waits by then, and if not, the outcome is the same
            self._run.interrupt("enough")

        def end(self, run: TrainingRun) -> None:  # noqa: ARG002
            asked.set()

    batches = [batch_of([one]) for one in range(9)]
    config = quiet(
        TrainConfig(model_dir=str(tmp_path), deterministic=deterministic, save=SaveConfig(steps=100)),
        prefetch=prefetch,
        idle_after=timedelta(milliseconds=20),
    )
    try:
        reports = train_ranks(
            [Given(batches=batches, wait=wait), Given(batches=batches)],
            config,
            hooks=lambda rank, run: [Stops(run)] if rank == 1 else [],
        )
    finally:
        asked.set()
    assert [report.step for report in reports] == [3, 3]
    assert not any(report.finished for report in reports)
    assert read_model(Given(), tmp_path).step == 3, "what was trained is saved"


def test_a_stop_while_a_rank_waits_at_a_collective_takes_effect_after_the_step(tmp_path: Path) -> None:
    runs: dict[int, LocalRun] = {}

    class StopsTheOther(Hook):
        """Of rank 0: comes late to the meeting before step 4, and stops rank 1 while that waits there."""

        def __init__(self, rank: int, run: LocalRun) -> None:
            runs[rank] = run
            self._leads = rank == 0

        def before_step(self, run: TrainingRun) -> None:
            if not self._leads or run.step != 3:
                return
            barrier = runs[0].barrier
            barrier.place("see who waits")
            while barrier.blocked_indices() != [0, 1]:  # then rank 1 has said its word
                threading.Event().wait(0.02)
            barrier.remove()
            runs[1].interrupt("SIGTERM")

    reports = train_ranks(
        [Given(batches=[batch_of([one]) for one in range(9)])] * 2,
        quiet(TrainConfig(model_dir=str(tmp_path), save=SaveConfig(steps=100))),
        hooks=lambda rank, run: [StopsTheOther(rank, run)],
        timeout=timedelta(seconds=10),  # a rank that goes into a step alone ends here, not after PATIENT
    )
    assert [report.step for report in reports] == [4, 4]
    assert not any(report.finished for report in reports)
    assert read_model(Given(), tmp_path).step == 4, "what was trained is saved"


# Checkpoints


def tallied(tmp_path: Path, **options: Any) -> tuple[TalliedFiles, TrainConfig]:
    task = TalliedFiles(batches=15, folder=str(tmp_path))
    config = quiet(TrainConfig(model_dir=str(tmp_path / "model"), **options))
    return task, config


def trained_once(task: TalliedFiles, tmp_path: Path) -> bool:
    tally = read_model(task, tmp_path / "model").tally
    assert set(tally.values()) <= {1.0}
    return len(tally) == task.records


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 3), (3, 2)])
def test_a_checkpoint_restores_into_any_number_of_ranks(first: int, then: int, tmp_path: Path) -> None:
    task, config = tallied(tmp_path, save=SaveConfig(steps=2))
    train_ranks([task] * first, replace(config, steps=4))
    assert not trained_once(task, tmp_path)
    reports = train_ranks([task] * then, config)
    assert reports[0].restored_from is not None
    if not trained_once(task, tmp_path):  # ranks end with the one that has least, the rest is for who has all
        Trainer(task, config).train()
        assert trained_once(task, tmp_path)


def test_one_process_resumes_from_ranks_and_ranks_from_one_process(tmp_path: Path) -> None:
    task, config = tallied(tmp_path)
    train_ranks([task] * 2, replace(config, steps=3))
    Trainer(task, replace(config, steps=3)).train()
    train_ranks([task] * 2, replace(config, steps=2))
    Trainer(task, config).train()
    assert trained_once(task, tmp_path)


def test_servers_resume_from_ranks_and_ranks_from_servers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    task, config = tallied(tmp_path)
    train_ranks([task] * 2, replace(config, steps=3))
    outcome = run_fleet(task, tmp_path / "model", num_ps=2, num_workers=2, steps=4)
    assert outcome.chief.restored_from is not None
    train_ranks([task] * 3, replace(config, steps=1))
    Trainer(task, config).train()
    assert trained_once(task, tmp_path)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_expire_on_all_ranks_at_the_same_place(prefetch: int, tmp_path: Path) -> None:
    """So two runs have the same rows."""
    task = Tallied(batches=16, expire_after=timedelta(seconds=40))
    found = []
    for name in ("one", "two"):
        config = quiet(
            TrainConfig(model_dir=str(tmp_path / name), deterministic=True, seed=1),
            prefetch=prefetch,
            evict_every_steps=3,
            expiry=ExpiryConfig(max_fraction=1.0),
        )
        train_ranks([task] * 2, config)
        found.append(read_model(task, tmp_path / name).rows)
    assert found[0].keys() == found[1].keys()
    assert {name: sorted(rows) for name, rows in found[0].items()} == {
        name: sorted(rows) for name, rows in found[1].items()
    }
    oldest = min(time for name, rows in found[0].items() if "user" in name for time, *_ in rows.values())
    assert oldest > 0, "the first rows have expired"


@pytest.mark.parametrize("background", [False, True])
def test_each_rank_writes_its_share_of_increments_too(background: bool, tmp_path: Path) -> None:
    task, config = tallied(
        tmp_path, save=SaveConfig(steps=1, asynchronous=background), keep=KeepConfig(full_every=3)
    )
    train_ranks([task] * 2, replace(config, steps=5))
    found = {path.name for path in (tmp_path / "model").glob("model.ckpt-5.assets/*") if path.is_dir()}
    assert found == {"ps-0-of-2", "ps-1-of-2"}
    Trainer(task, config).train()
    assert trained_once(task, tmp_path)


def test_a_save_on_demand_holds_all(tmp_path: Path) -> None:
    task, config = tallied(tmp_path)
    saved: list[Any] = []

    class Saves(Hook):
        def __init__(self, run: LocalRun) -> None:
            self._run = run

        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if run.step == 2:
                assert self._run.save is not None
                saved.append(self._run.save.trigger_save().result())

    train_ranks([task] * 2, replace(config, steps=4), hooks=lambda rank, run: [] if rank else [Saves(run)])
    assert saved == [str(tmp_path / "model" / "model.ckpt-2")]


def test_operator_files_stop_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    task, config = tallied(tmp_path, operator_files=True, operator_files_every_steps=2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "dump_2").touch()
    (tmp_path / "model" / "stop_4").touch()
    reports = train_ranks([task] * 2, config, hooks=lambda *_: [])
    assert [report.step for report in reports] == [4, 4]
    assert (tmp_path / "model" / "model.ckpt-2.assets").exists()


def test_when_a_rank_fails_the_other_ranks_get_the_reason(tmp_path: Path) -> None:
    class Breaks(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if run.step == 2:
                raise MonolithError("no disk")

    task, config = tallied(tmp_path)
    with pytest.raises(MonolithError, match="rank 1 cannot continue: MonolithError: no disk"):
        train_ranks([task] * 3, config, hooks=lambda rank, _: [Breaks()] if rank == 1 else [])


def test_a_model_with_a_store_of_its_own_is_refused() -> None:
    class Own(Given):
        def model(self) -> nn.Module:
            found = super().model()
            assert found.embeddings.store is not None  # type: ignore[union-attr]
            return found

    with pytest.raises(ConfigError, match="its model has a store of its own"):
        train_ranks([Own(batches=[batch_of([1])])], PLAIN)
