"""Importing a model of the original system: its rows and weights become the first checkpoint of a run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from monolith import filesystem
from monolith.checkpoint import Checkpointer, ModelDirLock, Saver, read_checkpoint_state
from monolith.checkpoint.folder.manifest import needs_of
from monolith.checkpoint.folder.state_files import TableKind, update_monolith_checkpoint
from monolith.checkpoint.original import (
    ImportedName,
    ImportReport,
    ImportTarget,
    NameMap,
    OriginalCheckpoint,
    import_original,
)
from monolith.errors import ConfigError, RestoreError
from monolith.nn import RateSchedule
from monolith.observe import Progress
from monolith.train.accelerator import accelerator_of
from monolith.train.config import TrainConfig
from monolith.train.model import Model
from monolith.train.task import Mode, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportPlan:
    """What to import, and how."""

    source: OriginalCheckpoint
    names: NameMap
    step: int | None = None
    """The step to resume from; None takes the original's."""
    partial: bool = False
    """Whether tables and variables that the original does not have may start as the model makes them."""
    dry_run: bool = False
    """Whether everything is read and checked and nothing is written."""


def import_checkpoint(
    task: Task,
    config: TrainConfig,
    plan: ImportPlan,
    *,
    tell: Callable[[ImportReport], None] = lambda _: None,
    progress: Progress | None = None,
) -> ImportReport:
    """Write the first checkpoint of a run from a checkpoint of the original.

    All rows are in the memory of this process meanwhile. The checkpoint has no position: training reads its
    data from the beginning.

    Args:
        tell: Given the report before anything is refused or written.
        progress: Advanced by rows.

    Raises:
        ConfigError: The run has checkpoints already.
        RestoreError: Something does not fit, or is missing and `partial` is off.
    """
    model_dir = config.model_dir
    with contextlib.ExitStack() as open_things:
        if not plan.dry_run:
            filesystem.make_dirs(model_dir)
            open_things.enter_context(ModelDirLock(model_dir))
        _refuse_other_checkpoints(model_dir)
        random.seed(config.seed)
        np.random.seed(config.seed % (1 << 32))
        model = Model(
            task, Mode.TRAIN, seed=config.seed, accelerator=accelerator_of("cpu"), rates=config.schedule
        )
        open_things.callback(model.close)
        target = ImportTarget(model.tables, model.module, model.dense)
        report = import_original(plan.source, plan.names, target, step=plan.step, progress=progress)
        assert model.sparse is not None
        model.sparse.global_step = report.step
        _move_schedule(model, report)
        tell(report)
        if report.missing and not plan.partial:
            raise RestoreError(
                f"nothing was imported: the original has nothing for {_some(report.missing)}. Map the names "
                "with --names, or start these as the model makes them with --partial"
            )
        if plan.dry_run:
            return report
        saver = Saver(model_dir, max_to_keep=config.keep.max_to_keep or None, keep_every=config.keep.every)
        saver.recover(needs=needs_of)
        update_monolith_checkpoint(model_dir, table_kind=TableKind.MULTI_CUCKOO_HASH_MAP)
        report.prefix = Checkpointer(saver, [*model.features_parts(), *model.parts()]).save(report.step)
        return report


def _refuse_other_checkpoints(model_dir: str) -> None:
    state = read_checkpoint_state(model_dir) if filesystem.is_folder(model_dir) else None
    if state is not None:
        there = filesystem.base_name(state.model_checkpoint_path)
        raise ConfigError(f"{model_dir} has the checkpoint {there} already; import into a new --model-dir")


def _move_schedule(model: Model, report: ImportReport) -> None:
    """Have the rates of dense weights be those of the imported step."""
    schedule = model.schedule
    if schedule is None:
        return
    if not isinstance(schedule, RateSchedule):  # most of torch's compute a rate from the one before
        why = f"{type(schedule).__name__} starts at step 0; rates of train.schedule continue at the step"
        report.names.append(ImportedName("optimizer", "learning rates", None, why))
        return
    schedule.load_state_dict(
        {**schedule.state_dict(), "last_epoch": report.step, "_step_count": report.step + 1}
    )
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_lr(), strict=True):
        group["lr"] = rate


def _some(names: list[str], shown: int = 6) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
