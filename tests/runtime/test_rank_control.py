"""What an operator says by files is done by all ranks at the same step: rank 0 looks, and its word counts."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runtime.rank_data import Given, batch_of
from runtime.rank_runs import quiet, train_ranks

from monolith.errors import UnavailableError
from monolith.runtime import LocalRun
from monolith.runtime.messages import Word
from monolith.runtime.ranks import RankCoordinator
from monolith.train import Hook, SaveConfig, StepResult, TrainConfig, TrainingRun
from monolith.train.config import KeepConfig
from monolith.train.hooks.config import HooksConfig
from monolith.train.hooks.hours import DailyHours

STEPS = 10
SIZES = pytest.mark.parametrize("size", [2, 3])


def settings(model_dir: Path, **options: Any) -> TrainConfig:
    given = {"save": SaveConfig(steps=100), "keep": KeepConfig(max_to_keep=STEPS), **options}
    return quiet(TrainConfig(model_dir=str(model_dir), **given))


def tasks(size: int) -> list[Given]:
    """Each rank meets five ids of its own and five that its neighbour has; an example a minute."""
    return [
        Given(
            dense=True,
            loss=lambda model, vectors, _: model.top(vectors).mean(),
            batches=[
                replace(one, ids=replace(one.ids, event_time=60 * step - rank))
                for step in range(1, STEPS + 1)
                for one in [batch_of(range(5 * rank, 5 * rank + 10))]
            ],
        )
        for rank in range(size)
    ]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("model.ckpt-*.manifest"))


class Puts(Hook):
    """Puts the file ONLINE there after step 3, and takes it away after step 7."""

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if run.step == 3:
            Path(run.model_dir, "ONLINE").touch()
        if run.step == 7:
            Path(run.model_dir, "ONLINE").unlink()


def on_rank_0(rank: int, run: LocalRun) -> list[Hook]:  # noqa: ARG001
    return [Puts()] if rank == 0 else []


@SIZES
@pytest.mark.parametrize(("every", "fresh"), [(1, [4, 5, 6, 7]), (4, [4, 5, 6, 7]), (5, [5, 6, 7, 8, 9])])
def test_weights_are_kept_fresh_while_there_is_a_file_online(
    size: int, every: int, fresh: list[int], tmp_path: Path
) -> None:
    """Which is looked for as often as the settings say."""
    online = HooksConfig(online_file=True, online_file_every_steps=every)
    config = settings(tmp_path, dense_save=SaveConfig(steps=1), hooks=online)
    reports = train_ranks(tasks(size), config, hooks=on_rank_0)
    assert [report.step for report in reports] == [STEPS] * size
    assert saved(tmp_path / "dense_only") == fresh


@SIZES
@pytest.mark.parametrize(("hour", "steps"), [(19, [3, 5, 8, 10]), (10, [5, 10])])
def test_inside_of_a_window_ranks_save_by_themselves_and_outside_only_where_a_file_asks(
    size: int, hour: int, steps: list[int], tmp_path: Path
) -> None:
    """The step that ends a run is saved at any hour."""
    (tmp_path / "dump_5").touch()
    config = settings(
        tmp_path,
        save=SaveConfig(steps=3),
        operator_files=True,
        operator_files_every_steps=1,
        dump_window=DailyHours(18, 0, 21, 0),
    )
    day = timedelta(days=20_000, hours=hour).total_seconds()
    reports = train_ranks(tasks(size), config, clock=lambda: day)
    assert [report.step for report in reports] == [STEPS] * size
    assert saved(tmp_path) == steps


@SIZES
@pytest.mark.parametrize(("every", "limit", "last"), [(1, 60 * 4, 4), (3, 60 * 4, 6), (1, 60 * 99, STEPS)])
def test_all_ranks_save_and_end_where_the_data_of_the_first_has_reached_a_time(
    size: int, every: int, limit: int, last: int, tmp_path: Path
) -> None:
    (tmp_path / "limit_req_time").write_text(str(limit))
    config = settings(tmp_path, operator_files=True, request_time_every_steps=every)
    reports = train_ranks(tasks(size), config)
    assert [report.step for report in reports] == [last] * size
    assert [("limit_req_time" in report.stop_reason) for report in reports] == [last < STEPS] * size
    assert saved(tmp_path) == [last]


@SIZES
def test_the_log_has_the_rows_of_all_ranks_together_and_once(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path)
    train_ranks(tasks(size), replace(config, steps=1))
    caplog.set_level(logging.INFO, "monolith.train.hooks.summaries")
    caplog.clear()
    train_ranks(tasks(size), config)
    told = [one.getMessage() for one in caplog.records if one.name.endswith("summaries")]
    assert len(told) == 1
    assert told[0].startswith(f"step 2: table f: {5 * (size + 1)} rows")


def test_rank_0_ends_although_a_rank_is_gone_before_its_part_of_the_last_word_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation of ranks: rank 0 waited for a rank that had ended to join again."""
    right = RankCoordinator._say

    def say(self: RankCoordinator, word: Word) -> Word:
        heard = right(self, word)
        if word.over:
            raise UnavailableError("control: another rank is gone")
        return heard

    monkeypatch.setattr(RankCoordinator, "_say", say)
    reports = train_ranks(tasks(2), settings(tmp_path))
    assert [(report.step, report.finished) for report in reports] == [(STEPS, True)] * 2
    assert saved(tmp_path) == [STEPS]
