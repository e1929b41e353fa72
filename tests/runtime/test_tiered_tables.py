"""Runs whose tables keep cold rows in files: they train, save and restore as with all rows in memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from runtime.test_device_rows import OnDevice, Rows, assert_same_rows
from services.emulated_cuda import device_named, device_names
from train.tasks import Clicks

from monolith.errors import ConfigError
from monolith.runtime import Trainer
from monolith.table import NativeTable, TieredTable
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
        tables = [store.table(name) for name in store.tables]  # type: ignore[union-attr, operator]
        self.rows = max(self.rows, sum(table.stats().cold_rows for table in tables))
        self.folders |= {table.folder for table in tables if isinstance(table, TieredTable)}


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


def test_rows_on_a_device_are_not_tiered() -> None:
    device = device_named(device_names()[0])
    config = TrainConfig(tables=TIERED, accelerator="cuda", embedding_device="device")
    with pytest.raises(ConfigError, match="storage='tiered' is for tables in host memory"):
        Trainer(TASK, config, accelerator=OnDevice(device)).train()
