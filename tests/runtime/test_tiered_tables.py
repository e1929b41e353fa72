"""Runs whose tables keep cold rows in files: they train, save and restore as with all rows in memory."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.test_full_disks import SmallDisk
from runtime.fleets import PATIENT, read_model, run_fleet
from runtime.rank_runs import quiet, train_ranks
from runtime.test_device_rows import OnDevice, Rows, assert_same_rows
from runtime.test_fleet import StopAt
from services.emulated_cuda import device_named, device_names
from torch import nn
from train.tasks import Clicks

from monolith.errors import ConfigError
from monolith.runtime import Trainer
from monolith.store import LocalStore
from monolith.table import NativeTable, Segment, SpillingTable, TableConfig, TableStats, TieredTable
from monolith.table import Rows as StoredRows
from monolith.train import TrainConfig
from monolith.train.config import KeepConfig, TablesConfig
from monolith.train.hook import Hook, TrainingRun
from monolith.train.hooks import SaveConfig

TASK = Clicks(batches=12, batch_size=256, dim=512)
TIERED = TablesConfig(storage="tiered", memory_bytes=4 << 20)


class Cold(Hook):
    """Takes down the most rows that were in files, and where the files were."""

    def __init__(self) -> None:
        self.rows = 0
        self.folders: set[Path] = set()

    def after_step(self, run: TrainingRun, result: Any) -> None:  # noqa: ARG002
        store = run.model.embeddings.store  # type: ignore[union-attr]
        self.rows = max(self.rows, sum(table.cold_rows for table in store.stats().values()))
        if isinstance(store, LocalStore):
            tables = [store.table(name) for name in store.tables]
            below = [table.far if isinstance(table, SpillingTable) else table for table in tables]
            self.folders |= {table.folder for table in below if isinstance(table, TieredTable)}


def trained(
    model_dir: Path, *, tables: TablesConfig, steps: int | None = None, **more: Any
) -> tuple[Rows, Cold]:
    rows, cold = Rows(), Cold()
    config = TrainConfig(
        model_dir=str(model_dir),
        deterministic=True,
        tables=tables,
        save=SaveConfig(steps=4),
        max_steps=steps,
        **more,
    )
    Trainer(TASK, config, hooks=(rows, cold)).train()
    return rows, cold


def test_a_run_with_cold_rows_ends_as_with_all_rows_in_memory(tmp_path: Path) -> None:
    (memory, _), (tiered, cold) = (
        trained(tmp_path / one.storage, tables=one) for one in (TablesConfig(), TIERED)
    )
    assert (memory.kinds, tiered.kinds) == ({NativeTable}, {TieredTable})
    assert cold.rows > 100
    assert tiered.found == memory.found  # to the bit


def test_cold_rows_are_read_while_the_step_before_trains_and_not_in_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_steps = [0]
    look_up, read_ahead = TieredTable.lookup, TieredTable.read_ahead
    ahead = [0]

    def counting(count: list[int], call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(table: TieredTable, *args: Any, **more: Any) -> Any:
            before = table.stats().cold_ids_read
            found = call(table, *args, **more)
            count[0] += table.stats().cold_ids_read - before
            return found

        return counted

    monkeypatch.setattr(TieredTable, "lookup", counting(in_steps, look_up))
    monkeypatch.setattr(TieredTable, "read_ahead", counting(ahead, read_ahead))
    trained(tmp_path / "run", tables=TIERED, prefetch=1)
    assert ahead[0] > 100
    assert in_steps[0] < ahead[0]  # rows that left memory in between


@pytest.mark.parametrize(
    "first, then", [(TablesConfig(), TIERED), (TIERED, TablesConfig()), (TIERED, TIERED)]
)
def test_a_checkpoint_restores_with_either_storage(
    first: TablesConfig, then: TablesConfig, tmp_path: Path
) -> None:
    whole, _ = trained(tmp_path / "whole", tables=TablesConfig())
    trained(tmp_path / "run", tables=first, steps=8)
    resumed, _ = trained(tmp_path / "run", tables=then)
    assert_same_rows(resumed.found, whole.found)


def test_increments_have_the_cold_rows_that_changed(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", tables=TablesConfig())
    keep = KeepConfig(full_every=3)
    trained(tmp_path / "run", tables=TIERED, steps=8, keep=keep)
    resumed, _ = trained(tmp_path / "run", tables=TIERED, keep=keep)
    assert_same_rows(resumed.found, whole.found)


def test_files_are_below_the_model_dir_and_go_at_the_end(tmp_path: Path) -> None:
    _, cold = trained(tmp_path / "run", tables=TIERED, steps=2)
    assert {folder.parent for folder in cold.folders} == {tmp_path / "run" / "cold"}
    assert not any(folder.exists() for folder in cold.folders)


def test_what_a_killed_run_left_is_removed_and_its_checkpoint_resumes(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from runtime.test_tiered_tables import TIERED, TASK
        from monolith.runtime import Trainer
        from monolith.train import Hook, TrainConfig
        from monolith.train.hooks import SaveConfig

        class Kill(Hook):
            def after_step(self, run, result):
                if result.step == 10:
                    os.kill(os.getpid(), signal.SIGKILL)

        save = SaveConfig(steps=4)
        config = TrainConfig(model_dir=sys.argv[1], deterministic=True, tables=TIERED, save=save)
        Trainer(TASK, config, hooks=(Kill(),)).train()
    """)
    run, tests = tmp_path / "run", Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program, str(run), str(tests)], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    left = list((run / "cold").glob("*.cold"))
    assert left
    whole, _ = trained(tmp_path / "whole", tables=TablesConfig())
    resumed, _ = trained(run, tables=TIERED)
    assert_same_rows(resumed.found, whole.found)
    assert not any(folder.exists() for folder in left)


def test_a_full_disk_pauses_training_which_resumes_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = trained(tmp_path / "whole", tables=TablesConfig())
    found: list[Rows] = []
    with closing(SmallDisk(tmp_path / "disk", mebibytes=64)) as disk, caplog.at_level(logging.WARNING):
        disk.fill(room=600 << 10)
        tables = replace(TIERED, storage_dir=str(disk.path))
        training = threading.Thread(
            target=lambda: found.append(trained(tmp_path / "run", tables=tables)[0]), daemon=True
        )
        training.start()
        while "is paused: its cold rows cannot be written" not in caplog.text:
            assert training.is_alive()
            training.join(0.05)
        assert "No space left on device). No row is lost; it resumes when the disk takes them" in caplog.text
        assert f"Make room on {disk.path}" in caplog.text
        disk.empty()
        training.join(PATIENT)
        assert not training.is_alive()
    assert "resumes: its cold rows are written again" in caplog.text
    assert found[0].found == whole.found  # to the bit


# On parameter servers, and across ranks


@dataclass(frozen=True)
class ManyClicks(Clicks):
    """Rows for several servers, and weights that begin alike in every thread that makes a model."""

    batches: int = 12
    batch_size: int = 512
    dim: int = 512

    def model(self) -> nn.Module:
        model: nn.Module = super().model()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))
        return model


@pytest.mark.parametrize("servers", [(1, 2), (2, 1)])
def test_parameter_servers_keep_cold_rows_and_a_stopped_run_resumes_with_equal_rows(
    servers: tuple[int, int], tmp_path: Path
) -> None:
    task, cold = ManyClicks(), Cold()
    how: dict[str, Any] = {"num_workers": 1, "deterministic": True, "save": SaveConfig(steps=4)}
    run_fleet(task, tmp_path / "whole", num_ps=1, **how)
    how |= {"tables": TIERED, "hooks": lambda _: [cold, StopAt(8)]}
    first = run_fleet(task, tmp_path / "run", num_ps=servers[0], **how)
    assert first.chief.step == 8
    assert cold.rows > 100
    how |= {"hooks": lambda _: [cold]}
    second = run_fleet(task, tmp_path / "run", num_ps=servers[1], **how)
    assert second.chief.restored_from is not None
    whole, resumed = (read_model(task, tmp_path / name) for name in ("whole", "run"))
    assert (resumed.step, resumed.rows) == (whole.step, whole.rows)
    assert not list((tmp_path / "run").rglob("*.cold"))


def test_ranks_keep_cold_rows_and_resume_with_equal_rows(tmp_path: Path) -> None:
    tasks = [ManyClicks(seed=rank) for rank in range(2)]
    cold = [Cold(), Cold()]
    config = quiet(TrainConfig(save=SaveConfig(steps=4)), prefetch=1)

    def train(name: str, tables: TablesConfig, hooks: Callable[[int], list[Hook]]) -> None:
        there = replace(config, model_dir=str(tmp_path / name), tables=tables)
        train_ranks(tasks, there, hooks=lambda rank, _: hooks(rank))

    train("whole", TablesConfig(), lambda _: [])
    train("run", TIERED, lambda rank: [cold[rank], StopAt(8)])
    train("run", TIERED, lambda rank: [cold[rank]])
    assert all(one.rows > 100 for one in cold)
    assert not list((tmp_path / "run").rglob("*.cold"))
    whole, resumed = (read_model(tasks[0], tmp_path / name) for name in ("whole", "run"))
    assert (resumed.step, resumed.rows) == (whole.step, whole.rows)


# Below rows on a device

ON_DEVICE: dict[str, Any] = {"accelerator": "cuda", "embedding_device": "device"}
FEW = 8_000_000
"""Bytes of a device for rows: those of some batches."""


def trained_on(name: str, model_dir: Path, *, steps: int | None = None, **more: Any) -> tuple[Rows, Cold]:
    rows, cold = Rows(), Cold()
    config = TrainConfig(
        model_dir=str(model_dir), deterministic=True, save=SaveConfig(steps=4), max_steps=steps, **ON_DEVICE
    )
    accelerator = OnDevice(device_named(name))
    Trainer(TASK, replace(config, **more), hooks=(rows, cold), accelerator=accelerator).train()
    return rows, cold


@pytest.mark.parametrize("keep", [KeepConfig(), KeepConfig(full_every=3)], ids=["full", "increments"])
@pytest.mark.parametrize("name", device_names())
def test_a_run_in_three_tiers_stops_resumes_and_ends_as_with_all_rows_on_the_device(
    name: str, keep: KeepConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.step")
    whole, tiers = Rows(), {"tables": TIERED, "device_memory_bytes": FEW, "keep": keep}
    for steps in (6, 12):
        whole, _ = trained_on(name, tmp_path / "whole", steps=steps)
    caplog.clear()
    for steps in (6, 12):
        resumed, cold = trained_on(name, tmp_path / "run", steps=steps, **tiers)
        assert resumed.kinds == {SpillingTable}
        assert cold.rows > 100
        assert {folder.parent for folder in cold.folders} == {tmp_path / "run" / "cold"}
        assert not any(folder.exists() for folder in cold.folders)
    assert resumed.found == whole.found  # to the bit
    assert caplog.text.count("replayed as CUDA graphs, one launch each") == 2
    assert caplog.text.count("the other rows came from host memory and files") == 2


class Fill(Hook):
    """Restores rows of other ids after the first step, until a table has room for few more."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.stats: dict[str, TableStats] = {}
        self.most: dict[str, int] = {}

    def after_step(self, run: TrainingRun, result: Any) -> None:
        store = run.model.embeddings.store  # type: ignore[union-attr]
        assert isinstance(store, LocalStore)
        self.stats.update(store.stats())
        if result.step > 1:
            return
        for name in store.tables:
            table = store.table(name)
            assert isinstance(table, SpillingTable)
            assert isinstance(table.far, TieredTable)
            self.most[name] = table.far.core.most_rows
            count = self.most[name] - len(table) - self._room
            for ids in torch.arange(1 << 40, (1 << 40) + count).split(1 << 14):
                state = torch.ones(len(ids), table.state_dim)
                table.restore(StoredRows(ids, ids * 0, torch.zeros(len(ids), table.dim), state))


@pytest.mark.parametrize("name", device_names())
def test_a_run_in_three_tiers_trains_on_while_its_full_index_refuses_new_ids(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, fill = Clicks(batches=12, batch_size=256, dim=4), Fill(room=300)
    for steps in (9, 12):  # and a full table is restored
        config = TrainConfig(
            model_dir=str(tmp_path),
            deterministic=True,
            tables=TIERED,
            device_memory_bytes=400_000,
            max_steps=steps,
            **ON_DEVICE,
        )
        fill.stats.clear()
        result = Trainer(task, config, hooks=(fill,), accelerator=OnDevice(device_named(name))).train()
        assert result.step == steps
        assert fill.stats["user"].rows == fill.most["user"]
        assert fill.stats["user"].refused > 100
    assert "table 'user' is full: it refused" in caplog.text
    assert "set memory_bytes to 8,388,608 for twice as many rows" in caplog.text


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize(
    "first, then", [("host", "three"), ("three", "host"), ("two", "three"), ("three", "two")]
)
def test_a_checkpoint_restores_in_two_tiers_or_in_three(
    name: str, first: str, then: str, tmp_path: Path
) -> None:
    """In host memory, there and in files, or on a device as well."""

    def run(how: str, steps: int | None) -> Rows:
        where = tmp_path / "run"
        if how == "three":
            return trained_on(name, where, steps=steps, tables=TIERED, device_memory_bytes=FEW)[0]
        return trained(where, tables=TIERED if how == "two" else TablesConfig(), steps=steps)[0]

    whole, _ = trained(tmp_path / "whole", tables=TablesConfig())
    run(first, 8)
    assert_same_rows(run(then, None).found, whole.found)


def test_tiers_below_a_device_need_its_share_of_memory() -> None:
    with pytest.raises(ConfigError, match="needs device_memory_bytes, the memory of the accelerator"):
        TrainConfig(tables=TIERED, **ON_DEVICE)
    segments = (Segment(dim=4),)
    table = TableConfig(name="item", segments=segments, storage="tiered", memory_bytes=4 << 20)
    with pytest.raises(ConfigError, match="table 'item': storage='tiered' keeps rows in files that have no"):
        LocalStore.from_configs({"item": table}, device=device_named(device_names()[0]))
