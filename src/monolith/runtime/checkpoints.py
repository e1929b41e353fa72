"""The checkpoints of a run, from the step that is saved to the source that may forget it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from monolith import concurrency, filesystem
from monolith.checkpoint import (
    BestCheckpoint,
    Checkpointer,
    Part,
    PendingCheckpoint,
    Restored,
    RestoreOptions,
    Saver,
    checkpoint_exists,
    read_best,
    resolve_restore,
    write_best,
)
from monolith.checkpoint.folder.manifest import needs_of
from monolith.checkpoint.folder.state_files import TableKind, update_monolith_checkpoint
from monolith.data.source import Position
from monolith.errors import CorruptFileError, RestoreError
from monolith.observe import Metrics
from monolith.runtime.coordinator import LastCheckpoint
from monolith.runtime.session import Session
from monolith.train.config import TrainConfig
from monolith.train.hook import Hook, StepResult, TrainingRun
from monolith.train.hooks import (
    AlertHook,
    ForceDumpHook,
    OnlineFileHook,
    RequestTimeHook,
    SaveHook,
    SaveMemory,
)
from monolith.train.hooks.save import SavePlan
from monolith.train.hooks.save_timing import SaveListener

_log = logging.getLogger(__name__)

DENSE_ONLY = "dense_only"
"""The folder of dense-only checkpoints, below the model's."""


def newest_checkpoint(config: TrainConfig, mode: Literal["train", "eval", "predict"]) -> str | None:
    """Return the checkpoint to start from; None if there never was one.

    Raises:
        RestoreError: Checkpoints are listed and all of them are gone.
    """
    # Where a run starts from another one, `checkpoint` is one of the other's.
    wanted = None if config.restore.fit else config.restore.checkpoint
    state = resolve_restore(config.model_dir, restore_ckpt=wanted, mode=mode)
    if state is None:
        return None
    listed = [state.model_checkpoint_path, *reversed(state.all_model_checkpoint_paths)]
    for prefix in dict.fromkeys(listed):
        if checkpoint_exists(prefix):
            return prefix
        _log.warning("checkpoint %s is listed but missing; trying the previous one", prefix)
    names = ", ".join(map(filesystem.base_name, listed))
    raise RestoreError(
        f"cannot resume in {config.model_dir}: all of its checkpoints are missing ({names}). Copy one back; "
        "or, to start over, delete the file `checkpoint` there."
    )


class RunCheckpoints:
    """Saves a session and restores it. Used by the training thread, except for writing in the background.

    Args:
        clock: Unix seconds, for stamps.
        more: What else a checkpoint keeps.
        timer: Seconds that only grow, for intervals.
    """

    def __init__(
        self,
        session: Session,
        config: TrainConfig,
        clock: Callable[[], float],
        more: Sequence[Part] = (),
        *,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._session = session
        self._placement = session.coordinator.placement
        self._config = config
        self._clock, self._timer = clock, timer
        saver = Saver(
            config.model_dir,
            max_to_keep=config.keep.max_to_keep or None,
            keep_every=config.keep.every,
            clock=clock,
        )
        saver.recover(needs=needs_of)
        with contextlib.suppress(CorruptFileError):  # it is left as it is, and said
            update_monolith_checkpoint(config.model_dir, table_kind=TableKind.MULTI_CUCKOO_HASH_MAP)
        self._checkpointer = Checkpointer(
            saver, [*session.parts(), *more], full_every=config.keep.full_every, clock=clock
        )
        self._memory = SaveMemory(writer=session.model.resting)
        self.save: SaveHook | None = None
        """The hook that saves, once there is one."""
        self.alert: AlertHook | None = None
        """The hook that watches the loss, where one was asked for."""
        # Guards what follows. The training thread takes snapshots and commits positions; the thread that
        # writes a checkpoint notes that it is on disk; one that replaces a lost server asks for the newest.
        self._lock = concurrency.Lock()
        self._positions: dict[int, Position] = {}
        """Step -> the position of this process in its snapshot, until that is on disk."""
        self._safe: Position | None = None
        """The position of the last checkpoint on disk, until the training thread commits it."""
        self._began_from: LastCheckpoint | None = None
        self._best: BestCheckpoint | None = None
        """Becomes the best checkpoint once it is on disk, by the name that it has there."""
        self._placement.restore_lost_from(self._last)
        self.newest: str | None = None
        """The last checkpoint that was saved or restored."""

    @property
    def waited_seconds(self) -> float:
        """How long training has waited for checkpoints in this run."""
        return self._memory.waited_seconds

    def restore(self) -> Restored | None:
        """Restore the newest checkpoint, if there is one."""
        prefix = newest_checkpoint(self._config, "train")
        return None if prefix is None else self._restore(prefix)

    def snapshot(self, step: int) -> PendingCheckpoint:
        """Take a snapshot, once every update of a row is done."""
        # Expired rows go first, behind the updates that are queued; then all of it is done. Weights are
        # checked before the snapshot: a checkpoint that diverged must not replace a good one.
        if self._config.keep.evict:
            self._session.evict()
        self._session.drain()
        self._session.check_weights()
        moment = self._checkpointer.snapshot(step)
        with self._lock:
            self._positions[step] = self._session.batches.position
        return moment

    def hooks(self, metrics: Metrics, listeners: Sequence[SaveListener] = ()) -> list[Hook]:
        """Return the hooks that save, in order.

        Args:
            listeners: Told of each checkpoint with rows.
        """
        config = self._config
        memory = self._memory
        clocks = concurrency.Clocks(wall=self._clock, timer=self._timer)
        save = SaveHook(
            self,
            replace(config.save, asynchronous=config.saves_in_background),
            plan=SavePlan(
                resumed=lambda: self._session.rejoined,
                together=self._session.quiesced,
                outlives=self._placement.survives,
                on_saved=self._note,
            ),
            listeners=listeners,
            memory=memory,
            metrics=metrics,
            clocks=clocks,
        )
        self.save = save
        self._session.save_due = lambda: save.timer.retry_due and not save.is_writing
        hooks: list[Hook] = [save, _CommitHook(self)]
        if config.operator_files:
            hooks = [
                ForceDumpHook(
                    save.timer,
                    step_interval=config.operator_files_every_steps,
                    window=config.dump_window,
                    clock=self._clock,
                ),
                RequestTimeHook(save.timer, step_interval=config.request_time_every_steps),
                *hooks,
            ]
        if config.dense_save is not None:
            dense_part = self._placement.dense_part(self._session.model)
            dense = SaveHook(
                Checkpointer(self._dense_saver(), [dense_part], clock=self._clock),
                config.dense_save,
                plan=SavePlan(dense_only=True),
                memory=memory,
                metrics=metrics,
                clocks=clocks,
            )
            if config.hooks.online_file:
                every = config.hooks.online_file_every_steps
                hooks.append(OnlineFileHook(dense.timer, step_interval=every))
            hooks.append(dense)
        if config.alert is not None:

            def rollback() -> None:
                save.wait()
                self._roll_back()

            self.alert = AlertHook(
                config.alert,
                rollback=rollback,
                also_when=save.timer.should_trigger,
                skipped=lambda: self._session.progress.skipping.batches,
                metrics=metrics,
            )
            hooks.insert(0, self.alert)
        return hooks

    def _dense_saver(self) -> Saver:
        saver = Saver(
            filesystem.join(self._config.model_dir, DENSE_ONLY),
            max_to_keep=self._config.keep.max_to_keep or None,
            keep_every=self._config.keep.every,
            clock=self._clock,
        )
        saver.recover()
        return saver

    def save_if_due(self, run: TrainingRun) -> None:
        """Save if it is time to, or a worker that left waits for it, while no step is taken that would."""
        assert self.save is not None
        self.commit()
        self.save.look(run, wanted=self._session.save_wanted and not self.save.is_writing)
        self.commit()

    def named_best(self) -> BestCheckpoint | None:
        """Return which checkpoint the folder names as the best."""
        return read_best(self._config.model_dir)

    def keep_best(self, run: TrainingRun, step: int, metric: str, value: float) -> None:
        """Save the model as it stands at a step, and name it the best once it is on disk."""
        assert self.save is not None
        self.save.wait()
        if self.save.has_saved(step):
            self.name_best(step, metric, value)
            return
        with self._lock:
            self._best = BestCheckpoint(name="", step=step, metric=metric, value=value)
        self.save.look(run, wanted=True)

    def name_best(self, step: int, metric: str, value: float) -> None:
        """Name the checkpoint of a step the best, if it is on disk and not named so yet."""
        named = self.named_best()
        if named is not None and (named.step, named.metric, named.value) == (step, metric, value):
            return  # and not that of the same step of another history
        prefix = self._checkpointer.saver.find(step)
        if prefix is not None:
            name = filesystem.base_name(prefix)
            best = BestCheckpoint(name=name, step=step, metric=metric, value=value)
            write_best(self._config.model_dir, best)

    def commit(self) -> None:
        """Commit the position of the last checkpoint on disk."""
        # On the training thread: the source is read by the pipeline, and its commit is queued there in order.
        with self._lock:
            safe, self._safe = self._safe, None
        if safe is not None:
            self._session.commit(safe)

    def end(self) -> None:
        """Tell the source what is safe, and wait until it has committed it."""
        self.commit()
        self._session.drain()

    def _note(self, step: int, prefix: str | None) -> None:
        """Note that a checkpoint is on disk. On the thread that wrote it."""
        with self._lock:
            self.newest = prefix
            self._safe = self._positions.pop(step, self._safe)
            for earlier in [one for one in self._positions if one < step]:  # of saves that failed
                del self._positions[earlier]
            best = self._best if self._best is not None and self._best.step == step else None
        if best is not None and prefix is not None:
            write_best(self._config.model_dir, replace(best, name=filesystem.base_name(prefix)))

    def _last(self) -> LastCheckpoint | None:
        """Return the newest checkpoint that was saved or restored. From any thread."""
        prefix = self._checkpointer.newest
        with self._lock:
            began = self._began_from
        if prefix is None or (began is not None and began.prefix == prefix):
            return began
        return LastCheckpoint(prefix=prefix, options=RestoreOptions(model_dir=self._config.model_dir))

    def _roll_back(self) -> None:
        if self.newest is None:
            raise RestoreError("cannot roll back: nothing was saved yet")
        with self._session.rolling_back():
            self._restore(self.newest)

    def _restore(self, prefix: str) -> Restored:
        elsewhere = filesystem.parent(prefix) != filesystem.parent(self._checkpointer.saver.names.prefix(0))
        self._session.restarts_data = self._config.restore.restart_data and elsewhere
        fit = self._config.restore.fit and elsewhere
        options = self._config.restore.options(self._config.model_dir)
        if self._config.restore.fit and not elsewhere:
            _log.info(
                "%s has a checkpoint: resuming it; --from was for its first start", self._config.model_dir
            )
        if fit:
            options = self._checkpointer.fitting(prefix, options)
        cleared = options.custom.clears(options.model_dir)
        restored = self._checkpointer.restore(prefix, options)
        self._session.start_from(restored.step)
        with self._lock:
            self._began_from = LastCheckpoint(prefix=prefix, options=options, dense_cleared=cleared)
        self.newest = prefix
        if fit:
            _log.info("started from %s, step %d:\n%s", prefix, restored.step, restored.report.table())
        else:
            _log.info("restored %s:\n%s", prefix, restored.report.describe())
        return restored


class _CommitHook(Hook):
    """Commits, on the training thread, the positions of checkpoints that were written in the background."""

    def __init__(self, keeper: RunCheckpoints) -> None:
        self._keeper = keeper

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._keeper.commit()

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._keeper.end()
