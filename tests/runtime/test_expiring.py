"""Rows that expire: which, by what clock, never too many at once. Whole runs, from files to checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.fleets import run_fleet
from runtime.rank_runs import train_ranks
from torch import nn

from monolith.checkpoint.folder.manifest import read_manifest
from monolith.data import BatchSpec, FileSource, Pipeline, Records, Stream
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.records import LABEL, LINE_ID
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.model import DeepFM, Feature
from monolith.observe import Metrics
from monolith.runtime import Trainer
from monolith.runtime.progress import RowExpiry
from monolith.tensors import RaggedTensor
from monolith.train import ExpiryConfig, Hook, KeepConfig, Mode, SaveConfig, Task, TrainConfig

DAY = 86_400
START = 20_000 * DAY
ITEMS = 500
TIME = LINE_ID + "req_time"


def write_days(
    path: Path,
    first: int,
    days: int,
    *,
    items: int = ITEMS,
    late: int = 0,
    ahead: Sequence[int] = (),
    milliseconds: Sequence[int] = (),
) -> str:
    """Write 500 records a day, of every item one, in order of time.

    Args:
        late: Of how many further items there is an event of the start in each day.
        ahead: Which of them are 40 days too late.
        milliseconds: Which of them have these instead of seconds.
    """
    times = torch.arange(days * 500) * DAY // 500 + START + first * DAY
    for record in ahead:
        times[record] += 40 * DAY
    for record in milliseconds:
        times[record] *= 1000
    keys = torch.arange(days * 500) % 500 % items
    if late:
        is_late = torch.arange(days * 500) % 500 < late
        keys[is_late] = items + torch.arange(days * 500)[is_late] % 500
        times[is_late] = START
    columns = {"item": keys + 1, LABEL: (keys % 2).float(), TIME: times}
    rows = {name: RaggedTensor.from_row_lengths(c, torch.ones_like(times)) for name, c in columns.items()}
    with ParquetFormat().writer(str(path)) as file:
        file.write(Records(len(times), rows))
    return str(path)


@dataclass(frozen=True)
class Items(Task):
    """Learns which items are clicked, from files."""

    files: tuple[str, ...]
    days: int
    """After which rows expire."""
    epochs: int = 1
    batch_size: int = 125

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        spec = BatchSpec(ids=("item",), labels={"click": (LABEL, 0)}, event_time=TIME)
        source = FileSource(self.files, ParquetFormat(), batch_size=self.batch_size, epochs=self.epochs)
        return Pipeline(source).to_batches(spec)

    def metrics(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        return ()

    def model(self) -> nn.Module:
        feature = Feature(name="item", expire_after=timedelta(days=self.days))
        return DeepFM([feature], dim=2, hidden=(4,), threads=1)


def config(folder: Path, **more: Any) -> TrainConfig:
    plain = TrainConfig(
        model_dir=str(folder),
        summary_every_steps=None,
        save=SaveConfig(steps=4),  # a day
        keep=KeepConfig(max_to_keep=0, every=None, evict=True),
    )
    return replace(plain, **more)


def saved_items(folder: Path) -> list[int]:
    """Return the rows in each checkpoint, in order."""
    found = sorted(folder.glob("model.ckpt-*.manifest"), key=lambda path: int(path.stem.rpartition("-")[2]))
    tables = [read_manifest(str(path).removesuffix(".manifest")).manifest.parts["tables"] for path in found]
    return [one["tables"]["item"]["rows"] for one in tables]


KEPT = {"evicting": KeepConfig(max_to_keep=0, every=None, evict=True), "keeping": KeepConfig(max_to_keep=0)}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_record_40_days_ahead_costs_no_row(tmp_path: Path, keep: KeepConfig) -> None:
    data = write_days(tmp_path / "data.parquet", 0, 10, ahead=[2777])
    Trainer(Items((data,), days=30), config(tmp_path / "run", keep=keep)).train()
    assert saved_items(tmp_path / "run")[1:] == [ITEMS] * 9


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_second_pass_over_ten_days_costs_no_row_that_expires_after_seven(
    tmp_path: Path, keep: KeepConfig
) -> None:
    data = write_days(tmp_path / "data.parquet", 0, 10)
    Trainer(Items((data,), days=7, epochs=2), config(tmp_path / "run", keep=keep)).train()
    assert saved_items(tmp_path / "run")[1:] == [ITEMS] * 19


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_two_workers_on_files_of_overlapping_dates_cost_no_row(tmp_path: Path, keep: KeepConfig) -> None:
    files = (write_days(tmp_path / "a.parquet", 0, 12), write_days(tmp_path / "b.parquet", 6, 12))
    task = Items(files, days=7)
    run_fleet(task, tmp_path / "run", save=SaveConfig(steps=10), keep=keep)
    saved = saved_items(tmp_path / "run")
    assert saved[-1] == ITEMS
    assert saved == sorted(saved)  # none was lost on the way


def test_rows_that_are_no_longer_trained_expire_if_requested(tmp_path: Path) -> None:
    """Of 500 items 20 end after the third day."""
    files = (write_days(tmp_path / "a.parquet", 0, 3), write_days(tmp_path / "b.parquet", 3, 37, items=480))
    task, save = Items(files, days=30, batch_size=250), SaveConfig(steps=10)
    Trainer(task, config(tmp_path / "evicting", save=save)).train()
    often = config(tmp_path / "often", save=save, keep=KeepConfig(), evict_every_steps=7)
    Trainer(task, often).train()
    Trainer(task, config(tmp_path / "keeping", save=save, keep=KeepConfig())).train()
    assert [saved_items(tmp_path / name)[-1] for name in ("evicting", "often", "keeping")] == [480, 480, 500]


PLACES: dict[str, Callable[..., object]] = {
    "one process": lambda task, settings: Trainer(task, settings).train(),
    "parameter servers": lambda task, settings: run_fleet(
        task, settings.model_dir, num_workers=1, save=settings.save, keep=settings.keep
    ),
    "ranks": lambda task, settings: train_ranks([task, task], settings),
}


@pytest.mark.parametrize("train", PLACES.values(), ids=PLACES)
def test_late_events_keep_no_row_alive(tmp_path: Path, train: Callable[..., object]) -> None:
    """Of 500 items 20 were last seen on the first day. Events of then arrive until the end."""
    files = [write_days(tmp_path / name, 0, 40, items=480, late=20) for name in ("a.parquet", "b.parquet")]
    train(
        Items(tuple(files), days=30, batch_size=250),
        settings=config(tmp_path / "run", save=SaveConfig(steps=10)),
    )
    assert saved_items(tmp_path / "run")[-1] == 480


def test_a_table_that_would_lose_a_large_share_at_once_keeps_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = (write_days(tmp_path / "a.parquet", 0, 1), write_days(tmp_path / "b.parquet", 50, 10, items=400))
    task, metrics = Items(files, days=30), Metrics()
    report = Trainer(task, config(tmp_path / "run"), metrics=metrics).train()
    assert saved_items(tmp_path / "run")[-1] == ITEMS
    assert report.overdue == {"item": 100}
    warnings = [record for record in caplog.records if "have expired" in record.getMessage()]
    assert 1 <= len(warnings) <= 4  # of about ten evictions
    for part in ("table 'item'", "100 of 500 rows", "fraction of 0.1", "max_fraction"):
        assert part in warnings[0].getMessage()
    assert 'train_rows_overdue{table="item"} 100.0' in metrics.render().decode()
    allowed = config(tmp_path / "all", expiry=ExpiryConfig(max_fraction=1))
    assert Trainer(task, allowed).train().overdue == {}
    assert saved_items(tmp_path / "all")[-1] == 400


class Days:
    """A store of one table with a row of each of 100 days, which expires after 100 more."""

    def __init__(self, days: Sequence[int] = range(100)) -> None:
        self.days = list(days)

    def stats(self) -> dict[str, SimpleNamespace]:
        return {"item": SimpleNamespace(rows=len(self.days))}

    def count_expired(self, now: int) -> dict[str, int]:
        return {"item": sum(now - day * DAY >= 100 * DAY for day in self.days)}

    def evict(self, now: int, *, tables: Collection[str]) -> dict[str, int]:
        assert tables == {"item"}
        before = self.days
        self.days = [day for day in before if now - day * DAY < 100 * DAY]
        return {"item": len(before) - len(self.days)}


def test_a_table_of_which_too_much_expired_in_a_pause_loses_the_oldest_rows_if_that_is_to_be_gradual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 150 * DAY  # after a pause of 50 days
    store, expiry = Days(), RowExpiry(ExpiryConfig())
    for _ in range(3):
        expiry.evict([store], now)
    assert (len(store.days), expiry.overdue) == (100, {"item": 51})
    assert "51 of 100 rows of table 'item' have expired" in expiry.trouble
    assert "none is evicted" in expiry.trouble
    assert "train.expiry.gradual" in caplog.text

    caplog.clear()
    expiry, left = RowExpiry(ExpiryConfig(gradual=True)), [len(store.days)]
    while not expiry.overdue or expiry.overdue["item"]:
        expiry.evict([store], now)
        left.append(len(store.days))
        assert left[-1] == 100 or store.days == list(range(100 - left[-1], 100)), "the oldest go first"
        assert left[-2] - left[-1] <= 0.1 * left[-2]
    assert len(left) < 12, "nearly as many go as may go at once"
    assert store.days == list(range(51, 100))
    assert expiry.trouble == ""
    assert "the oldest 9 are evicted" in caplog.text


def test_rows_of_one_moment_stay_if_they_are_too_many_for_gradual_eviction() -> None:
    store, expiry = Days([0] * 50 + [140] * 50), RowExpiry(ExpiryConfig(gradual=True))
    expiry.evict([store], 150 * DAY)
    assert (len(store.days), expiry.overdue) == (100, {"item": 50})
    assert "none is evicted" in expiry.trouble


def test_the_clock_of_a_run_is_never_far_ahead_of_the_wall_clock(tmp_path: Path) -> None:
    """Days that are still to come: rows are as old as the data says, and the clock stands."""
    files = (write_days(tmp_path / "a.parquet", 0, 1), write_days(tmp_path / "b.parquet", 50, 10, items=480))
    task = Items(files, days=30)
    Trainer(task, config(tmp_path / "ahead"), clock=lambda: START + 5 * DAY).train()
    Trainer(task, config(tmp_path / "later"), clock=lambda: START + 100 * DAY).train()
    assert [saved_items(tmp_path / name)[-1] for name in ("ahead", "later")] == [500, 480]


class Clock(Hook):
    """Notes what time it is for rows, at each step."""

    def __init__(self) -> None:
        self.times: list[int | None] = []

    def after_step(self, run: Any, result: Any) -> None:  # noqa: ARG002
        self.times.append(run.session.progress.expiry.now())


def test_a_resumed_run_has_the_clock_it_ended_with(tmp_path: Path) -> None:
    data = write_days(tmp_path / "data.parquet", 0, 10)
    whole, first, second = Clock(), Clock(), Clock()
    task = Items((data,), days=30)
    Trainer(task, config(tmp_path / "whole"), hooks=[whole]).train()
    Trainer(task, config(tmp_path / "parts", steps=13), hooks=[first]).train()
    Trainer(task, config(tmp_path / "parts"), hooks=[second]).train()
    assert first.times + second.times == whole.times
    assert whole.times[0] is None
    assert whole.times[-1] is not None


def test_times_in_milliseconds_end_neither_a_run_nor_its_next_start(tmp_path: Path) -> None:
    data = write_days(tmp_path / "data.parquet", 0, 10, milliseconds=[120, 121, 4999])
    task = Items((data,), days=30)
    first = Trainer(task, config(tmp_path / "run", steps=8)).train()
    second = Trainer(task, config(tmp_path / "run")).train()
    assert first.examples + second.examples == 4997
    assert saved_items(tmp_path / "run")[-1] == ITEMS


@pytest.mark.parametrize("wrong", [{"max_fraction": -1}, {"max_fraction": 1.1}, {"max_ahead": timedelta(-1)}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expiry"):
        ExpiryConfig(**wrong)
