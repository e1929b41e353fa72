"""Trainer: runs a task from data to checkpoint and back, in one process or together with others.

    trainer = Trainer(Clicks(), TrainConfig(model_dir="runs/1", max_steps=10_000))
    trainer.train()
    trainer.evaluate()["click/auc"]
    for batch, predictions in trainer.predict(): ...

A run that was interrupted, for whatever reason, resumes from its last checkpoint, with the first
record that it had not trained on. Evaluating and predicting read checkpoints and write nothing.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from monolith import concurrency, filesystem
from monolith.checkpoint import (
    Checkpointer,
    CustomRestore,
    ModelDirLock,
    Restored,
    RestoreOptions,
    Saver,
    StatePart,
    read_manifest,
    roll_back,
    start_from,
)
from monolith.checkpoint.folder.state_files import SaveNames
from monolith.cuda.kernels import kernel_counts
from monolith.data import Epochs, Stream, as_stream
from monolith.errors import (
    ConfigError,
    DeviceFullError,
    DivergedError,
    RestoreError,
    StoppedWhileWaitingError,
    TransientFilesystemError,
)
from monolith.feature import Batch
from monolith.model.ready import WatchedModel
from monolith.observe import Metrics
from monolith.observe.summaries import SummaryWriter
from monolith.runtime.batches import OpenData, open_data
from monolith.runtime.checkpoints import RunCheckpoints, newest_checkpoint
from monolith.runtime.coordinator import Coordinator, Outcome
from monolith.runtime.evaluate_hook import EvaluateHook
from monolith.runtime.local import LocalCoordinator, LocalPlacement, store_maker, stores_over
from monolith.runtime.metric_guard import MetricGuard
from monolith.runtime.progress import check_not_all_skipped
from monolith.runtime.publish_hook import PublishHook
from monolith.runtime.publish_shard import PublishPlan
from monolith.runtime.report import (
    BestEvaluation,
    FirstAndLastSteps,
    TrainReport,
    write_run_end,
    write_run_manifest,
)
from monolith.runtime.rows_place import RowsPlace, RowsRefusedError, WholeRun
from monolith.runtime.session import Session
from monolith.store import AllToAllStore, LocalStore
from monolith.train.accelerator import Accelerator, AcceleratorHook, accelerator_of
from monolith.train.candidates import Candidates, towers_of
from monolith.train.config import TrainConfig
from monolith.train.evaluating import BestSoFar, OnOpen, measured, outputs_of
from monolith.train.evaluation_log import EvaluationLog
from monolith.train.hook import Hook, StepResult, TrainingRun, drive
from monolith.train.hooks import (
    FeatureDump,
    FeatureInsightHook,
    ModelInsightHook,
    SaveHook,
    StopOutsideHoursHook,
    SummaryHook,
    TableInfoHook,
)
from monolith.train.hooks.barrier import Barrier
from monolith.train.hooks.installed import installed_hooks
from monolith.train.hooks.save_timing import SaveListener
from monolith.train.hooks.summaries import sink_openers
from monolith.train.importance import Importances, permutation_importance
from monolith.train.metrics.heads import HeadMetrics
from monolith.train.metrics.metric_set import WindowRow
from monolith.train.model import Model, OwnRandom
from monolith.train.retrieval import RetrievalTask
from monolith.train.task import Mode, Outputs, Task

_log = logging.getLogger(__name__)

Report = Callable[[str, WindowRow], None]


class LocalRun:
    """A run in this process, as hooks see it."""

    def __init__(self, session: Session, model_dir: str, barrier: Barrier, summaries_dir: str = "") -> None:
        self.session = session
        self.barrier = barrier
        """Pauses all processes that train this model between their steps."""
        self.save: SaveHook | None = None
        """Saves on demand; None if nothing is saved."""
        self.publish: PublishHook | None = None
        """Publishes rows and weights; None if nothing is published, or this process has no part in it."""
        self.evaluate: EvaluateHook | None = None
        """Evaluates while the run trains; None if that is not asked for, or another process does it."""
        self._model_dir = model_dir
        self._summaries_dir = summaries_dir
        self._summaries: SummaryWriter | None = None
        # Guards both below as one: hooks, signals and the control port may each ask to stop, and the first
        # reason counts. Read without it.
        self._lock = concurrency.Lock()
        self._stop_reason: str | None = None
        self._interrupted = False

    @property
    def step(self) -> int:
        return self.session.step

    @property
    def model_dir(self) -> str:
        return self._model_dir

    @property
    def model(self) -> nn.Module:
        return self.session.model.module

    @property
    def summaries(self) -> SummaryWriter | None:
        if self._summaries is None and self._summaries_dir:
            self._summaries = SummaryWriter(self._summaries_dir)
            self._summaries.start(self.step)
        return self._summaries

    def close_summaries(self) -> None:
        if self._summaries is not None:
            self._summaries.close()

    @property
    def stop_reason(self) -> str | None:
        return self._stop_reason

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    def request_stop(self, reason: str) -> None:
        self._stop(reason, interrupted=False)

    def interrupt(self, reason: str) -> None:
        """End the run after the current step, although there is more to do. From any thread."""
        self._stop(reason, interrupted=True)
        self.session.interrupt()

    def _stop(self, reason: str, *, interrupted: bool) -> None:
        with self._lock:
            if self._stop_reason is None:
                self._stop_reason, self._interrupted = reason, interrupted
                _log.info("stopping: %s", reason)


class Trainer:
    """Runs one task. Not thread-safe, but for `stop`. Refuses an accelerator that this machine lacks.

    Args:
        hooks: Run after the trainer's own and before the task's; or a function that makes them of the run,
            for those that look at its session or ask it to save. They begin a second time, or are made anew,
            if the run resumes from its last checkpoint because a GPU has no room for more rows.
        metrics: Where counters of the run go.
        coordinator: The processes to train with, for one run; None trains in this process alone.
        listeners: Told of each checkpoint that this process saves.
        publish: How what is learned is published for servers that follow; None publishes nothing.
        clock: Unix seconds, for stamps: it may be set, ahead or back.
        timer: Seconds that only grow, for intervals.
        accelerator: Stands for the one of the config.
        opens: Opens the data to train on, as `open_data` does for a task.

    Raises:
        ConfigError: This machine lacks the accelerator; or rows are to be on it, and it cannot hold them, or
            they are on servers.

    Examples:
        >>> from monolith import ClickLog, ClickLogConfig, DeepFM, Mode, Task, TrainConfig, Trainer
        >>> class Clicks(Task):
        ...     def dataset(self, mode: Mode):
        ...         return ClickLog(ClickLogConfig(users=100, items=50, history=4, dim=2)).batches(20, 64)
        ...     def model(self):
        ...         return DeepFM(["user", "item", "context"], dim=4)
        >>> Trainer(Clicks(), TrainConfig(model_dir="run", max_steps=10)).train().step
        10
        >>> Trainer(Clicks(), TrainConfig(model_dir="run", max_steps=15)).train().restored_from  # resumes
        'run/model.ckpt-10'
    """

    def __init__(  # noqa: PLR0913  keywords that users write; see decision 0065
        self,
        task: Task,
        config: TrainConfig | None = None,
        *,
        hooks: Sequence[Hook] | Callable[[LocalRun], Sequence[Hook]] = (),
        metrics: Metrics | None = None,
        coordinator: Coordinator | None = None,
        listeners: Sequence[SaveListener] = (),
        publish: PublishPlan | None = None,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
        accelerator: Accelerator | None = None,
        opens: OpenData | None = None,
    ) -> None:
        self.task = task
        self._open_data = partial(open_data, task) if opens is None else opens
        self._publish = publish
        self._listeners = tuple(listeners)
        self._coordinator: Coordinator = LocalCoordinator() if coordinator is None else coordinator
        self.config = TrainConfig() if config is None else config
        self._accelerator = accelerator_of(self.config.accelerator) if accelerator is None else accelerator
        if self.config.asks_for_device_rows:
            stores_over(self._coordinator.placement, LocalStore.from_configs)
        self._hooks = hooks
        self._metrics = Metrics() if metrics is None else metrics
        self._clock, self._timer = clock, timer
        self._run: LocalRun | None = None
        self._stop_asked: str | None = None
        self._stop = concurrency.Event()
        """Set with it: the data may wait for a server before there is a run."""

    def stop(self, reason: str) -> None:
        """End the run after its current step, or its wait for data, saved. From any thread.

        A signal handler should leave it to one: it runs in the middle of whatever the main thread holds.
        """
        # First the request, then the run; `train` sets the run first, then looks at the request. So one of
        # the two threads sees the other, and a stop during the start is not lost.
        self._stop_asked = reason
        self._stop.set()
        run = self._run
        if run is not None:
            run.interrupt(reason)

    def train(self, *, report: Report | None = None) -> TrainReport:
        """Train until a limit, the end of the data, or a request to stop.

        If rows on a GPU find no room, and no setting says how much they may take, training resumes from the
        last checkpoint with fewer of them there; see `RowsPlace`.

        Args:
            report: Given "head/metric" and the row of each window of a metric as it ends.

        Raises:
            DeviceFullError: A GPU has no room for more rows, and training cannot continue with fewer there.
            ModelDirLockedError: Another process trains in this model_dir.
            RestoreError: The checkpoint does not fit the task.
            CorruptFileError: The checkpoint is damaged.
            StoppedWhileWaitingError: `stop` was called while the data waited for a server, and nothing was
                trained since the last checkpoint. Its text is the reason of the stop.
        """
        whole = WholeRun(concurrency.monotonic())
        alone = isinstance(self._coordinator, LocalCoordinator)
        place = RowsPlace.of(self.config, self._accelerator, alone=alone)
        while True:
            place.say()
            try:
                return self._train(place, whole, report)
            except StoppedWhileWaitingError as stopped:
                raise StoppedWhileWaitingError(self._stop_asked or str(stopped)) from stopped
            except Exception as error:
                less = place.less(error, whole.collections)
                if less is None:
                    raise
                why = str(error)
                resuming = None if isinstance(error, RowsRefusedError) else self._resuming(whole, error)
            # Only here the error is gone, and with its traceback what the attempt had on the device.
            place = place.with_less(less, why if resuming is None else "", whole.rows)
            if resuming is not None:
                _log.warning("%s. %s. %s", why.partition("; ")[0], resuming, place.describe())

    def _train(self, place: RowsPlace, whole: WholeRun, report: Report | None) -> TrainReport:
        """Train with rows at a place: all of a run, or what an attempt before has left of it."""
        config = self.config

        def tell(name: str, row: WindowRow) -> None:
            whole.windows.setdefault(name, []).append(row)
            if report is not None:
                report(name, row)

        coordinator = self._coordinator
        membership = coordinator.membership
        model_dir = config.model_dir if membership.is_chief else ""  # only the chief writes there
        with contextlib.ExitStack() as open_things:
            if config.deterministic and (self._accelerator is None or self._accelerator.name == "cpu"):
                open_things.enter_context(_OrderedSums())
            if model_dir:
                filesystem.make_dirs(config.model_dir)
                open_things.enter_context(ModelDirLock(config.model_dir))
                restore = config.restore
                if restore.dir:
                    start_from(restore.dir, model_dir, restore.checkpoint, required=restore.required)
                if restore.checkpoint and restore.required and not restore.fit:
                    roll_back(model_dir, restore.checkpoint)
            random.seed(config.seed)
            np.random.seed(config.seed % (1 << 32))
            session = self._open_session(place, tell)
            open_things.callback(session.close)
            summaries_dir = config.summaries_dir if model_dir else ""
            self._run = run = LocalRun(session, model_dir, coordinator.barrier, summaries_dir)
            open_things.callback(run.close_summaries)
            open_things.callback(self._forget_run)
            publishing = self._publishing(run)
            best = BestSoFar(config.evaluate)
            more = [StatePart("evaluation", best.state, best.restore)] if config.evaluate.enabled else []
            if run.publish is not None and run.publish.guard.looks:
                more.append(StatePart("publish_guard", run.publish.guard.state, run.publish.guard.restore))
            keeper = (
                RunCheckpoints(session, config, self._clock, more, timer=self._timer) if model_dir else None
            )
            if config.evaluate.enabled and membership.is_chief:
                run.evaluate = self._evaluate_hook(run, best, keeper)
            own = self._own_hooks(run, keeper, whole)
            given = self._hooks(run) if callable(self._hooks) else self._hooks
            progress = session.progress
            if self._stop_asked is not None:
                run.interrupt(self._stop_asked)
            restored: list[Restored] = []
            ends = FirstAndLastSteps(whole.first_step_at)
            open_things.callback(lambda: whole.leave(run, keeper, ends))
            if place.device is not None:
                open_things.callback(lambda: whole.count_rows(session.model))

            def restore_newest() -> None:
                if keeper is not None and (found := keeper.restore()) is not None:
                    restored.append(found)

            def create() -> None:
                if (reason := session.join(restore_newest)) is not None:
                    run.request_stop(reason)
                whole.begin(session, restored[0].prefix if restored else None)
                if model_dir:
                    write_run_manifest(model_dir, self.task, place.config, run.step, self._clock())
                self._check_limits(run)

            def save_if_due() -> None:
                if keeper is not None:
                    keeper.save_if_due(run)

            def step() -> StepResult | None:
                # Ranks take this step, or none of them does, by the words that all have just exchanged. If
                # this rank is asked to stop after it has said its word, other ranks do not know: they take
                # the step and wait for this rank in it. So it takes the step, and says so in `finish`.
                if membership.lockstep and session.at_step(run):
                    return None
                while (result := try_step()) is None and session.wait_for_more(run, save_if_due):
                    pass
                if result is None and run.stop_reason is None and membership.size == 1:
                    check_any()  # before anything is saved
                return result

            def check_any() -> None:
                if session.step == whole.begun.step:
                    check_not_all_skipped(
                        progress.total_skipped - whole.begun.skipped, session.batches.stream.bad_records()
                    )

            def try_step() -> StepResult | None:
                try:
                    return session.take_step()
                except DivergedError as error:
                    if keeper is not None and keeper.alert is not None:
                        keeper.alert.go_on_after(error, run)
                    elif not self._follows_rollback:
                        raise
                    stops = session.at_step(run) if membership.lockstep else run.stop_reason is not None
                    return None if stops else session.take_step()

            leave = _LeaveHook(session)
            drive(
                run,
                [ends, *own, *given, *self.task.hooks(Mode.TRAIN), *publishing, leave],
                step=step,
                create=create,
                chief_hooks=self.task.chief_hooks(Mode.TRAIN) if membership.is_chief else (),
            )
            status = coordinator.status()
            finished = not run.interrupted and status.finished
            if finished and membership.is_chief:
                check_any()
            if model_dir:
                reason = run.stop_reason or ""
                now = self._clock()
                try:
                    write_run_end(model_dir, step=session.step, reason=reason, finished=finished, now=now)
                except TransientFilesystemError as error:  # the model is saved; this is for status pages
                    _log.error("could not note how the run ended: %s", error)
            return TrainReport(
                step=session.step,
                steps=session.step - whole.begun.step,
                examples=progress.total_examples - whole.begun.examples,
                replayed=session.training_step.replayed,
                skipped=progress.total_skipped - whole.begun.skipped,
                bad_records=session.batches.stream.bad_records(),
                dense_staleness=None if status.staleness is None else status.staleness.most,
                seconds=(ended := concurrency.monotonic()) - whole.began_at,
                start_seconds=(ends.first_at or ended) - whole.began_at,
                kernels=kernel_counts(),
                save_seconds=whole.save_seconds + (0.0 if keeper is None else keeper.waited_seconds),
                evaluate_seconds=whole.evaluate_seconds
                + (0.0 if run.evaluate is None else run.evaluate.seconds),
                loss=ends.loss(),
                stop_reason=run.stop_reason or "",
                finished=finished,
                restored_from=whole.restored_from,
                windows=whole.windows,
                checkpoint=None if keeper is None else keeper.newest,
                save_trouble="" if keeper is None or keeper.save is None else keeper.save.trouble,
                evaluation=None if run.evaluate is None else run.evaluate.latest,
                evaluations=whole.evaluations + (0 if run.evaluate is None else run.evaluate.evaluations),
                best=_best(best),
                refused=_refused(session),
                overdue={name: rows for name, rows in progress.expiry.overdue.items() if rows},
                departed=status.departed,
                lost=status.lost,
            )

    def evaluate(
        self,
        *,
        steps: int | None = None,
        checkpoint: str | None = None,
        data: Mode = Mode.EVALUATE,
        advance: Callable[[int], object] | None = None,
        on_open: OnOpen | None = None,
    ) -> dict[str, float]:
        """Return the task's metrics on its evaluation data, as "head/metric", and "examples" and "loss".

        Batches with a prediction that is NaN or infinite are not in the metrics; where there were some,
        "left_out" says how many. Torch's random numbers are the caller's again afterwards.

        Args:
            steps: Batches to look at; by default all there are.
            checkpoint: The prefix of its files; by default the newest, or the one of `config.restore`.
            data: Whose data to measure on: that of Mode.PREDICT is often a test, and needs labels for it.
            advance: Told the examples of each batch that is done.
            on_open: Given the data before it is read.

        Raises:
            RestoreError: There is no checkpoint to evaluate.
        """
        return measured(self.task, self._outputs(Mode.EVALUATE, steps, checkpoint, on_open, data), advance)

    def importance(
        self,
        *,
        examples: int = 20_000,
        repeats: int = 5,
        checkpoint: str | None = None,
        advance: Callable[[int], object] | None = None,
        on_open: OnOpen | None = None,
    ) -> Importances:
        """Return how much worse the model is on evaluation data without each feature; see `evaluate`.

        Args:
            examples: How many to read, at least one batch; they are kept in memory.
            repeats: How often each feature is shuffled; more make smaller errors.
        """
        with self._restored(Mode.EVALUATE, checkpoint) as (model, own, prefix):
            batches: list[Batch] = []
            with own.drawn():
                stream = as_stream(self.task.dataset(Mode.EVALUATE))
            with contextlib.closing(stream):
                self._read_as_trained(model, stream, prefix)
                if on_open is not None:
                    on_open(stream)
                for batch in stream:
                    batches.append(batch)
                    if sum(map(len, batches)) >= examples:
                        break
            if not batches:
                raise ConfigError(f"task {self.task.name!r}: dataset(Mode.EVALUATE) has no examples")
            return permutation_importance(
                model,
                batches,
                self.config.evaluate,
                repeats=repeats,
                seed=self.config.seed,
                advance=advance,
            )

    def predict(
        self,
        *,
        steps: int | None = None,
        checkpoint: str | None = None,
        on_open: OnOpen | None = None,
    ) -> Iterator[tuple[Batch, Mapping[str, Tensor]]]:
        """Yield the batches to predict, and what the model says of each; see `evaluate`.

        Data without labels is predicted under the names of those that the model was trained on; its batches
        then have them as NaN.
        """
        for batch, outputs in self._outputs(Mode.PREDICT, steps, checkpoint, on_open):
            yield batch, outputs.predictions

    @contextlib.contextmanager
    def without_rows(self) -> Iterator[tuple[Model, Callable[[str], None]]]:
        """Have the model in eval mode on the CPU, with no rows, and what loads weights into it.

        That is called with the prefix of a checkpoint, as often as one likes, from any thread. Torch's random
        numbers are the caller's again afterwards.
        """
        config = self.config
        with OwnRandom(config.seed).drawn():
            model = Model(
                self.task,
                Mode.PREDICT,
                seed=config.seed,
                accelerator=accelerator_of("cpu"),
                tables=config.settled_tables,
            )

        def restore(prefix: str) -> None:
            parts = [*model.features_parts(), model.dense_part()]
            Checkpointer(Saver(config.model_dir), parts).restore(prefix, self._reading_options())

        with contextlib.closing(model):
            yield model, restore

    def embed(
        self,
        *,
        queries: int = 0,
        checkpoint: str | None = None,
        on_open: OnOpen | None = None,
        advance: Callable[[int], object] | None = None,
    ) -> tuple[Candidates, Tensor]:
        """Return the vectors of all candidates of a retrieval task, and those of some users.

        Args:
            queries: How many users of the evaluation data, at most.
            checkpoint, on_open, advance: As in `evaluate`, of the candidates.

        Raises:
            ConfigError: The task is no `RetrievalTask`.
        """
        task = self.task
        if not isinstance(task, RetrievalTask):
            raise ConfigError(
                f"task {task.name!r} has no candidates: embeddings are of a RetrievalTask, whose "
                "candidates() says which items there are"
            )
        with self._restored(Mode.EVALUATE, checkpoint) as (model, own, _), own.drawn(), torch.no_grad():
            with contextlib.closing(as_stream(task.candidates())) as items:
                if on_open is not None:
                    on_open(items)
                found = Candidates.of(model.module, items, advance)
            users: list[Tensor] = [torch.empty(0, found.vectors.shape[1])]
            if queries:
                with contextlib.closing(task.dataset(Mode.EVALUATE)) as data:
                    for batch in data:
                        users.append(towers_of(model.module).users(batch).float().cpu())
                        if sum(map(len, users)) >= queries:
                            break
            return found, torch.cat(users)[:queries]

    def dump_features(self, *, steps: int | None = None, batches_per_file: int = 100) -> int:
        """Write the training data as the model would read it, instead of training; return the batches.

        Args:
            steps: Batches to write; by default all there are.
        """
        if not self.config.model_dir:
            raise ConfigError("cannot write features: needs model_dir, the folder to write them to")
        dump = FeatureDump(self.config.model_dir, cap=batches_per_file, skip_first=False)
        written = 0
        with contextlib.closing(self.task.dataset(Mode.TRAIN)) as data:
            for batch in data:
                if steps is not None and written >= steps:
                    break
                dump(batch)
                written += 1
        dump.flush()
        return written

    # Inside

    def _resuming(self, whole: WholeRun, error: Exception) -> str:
        """Say where the next attempt begins, after one for which the device had no room.

        Raises:
            DeviceFullError: It could not train on every record.
        """
        config = self.config
        prefix = newest_checkpoint(config, "train") if config.model_dir else None
        own = prefix is not None and filesystem.parent(prefix) == filesystem.parent(
            Saver(config.model_dir).names.prefix(0)
        )
        again = prefix is None or (config.restore.restart_data and not own)  # from the beginning of the data
        if again and whole.live:
            raise DeviceFullError(
                f"{error}. Training cannot resume with fewer rows on the device: there is no checkpoint yet, "
                "and the data is a live stream, which cannot be read again. Set train.device_memory_bytes to "
                "the memory that rows may take there, or train.embedding_device to host"
            ) from error
        if prefix is None:
            whole.windows.clear()
            begun, where = 0, "There is no checkpoint yet, so training starts over"
        else:
            begun, where = SaveNames.step_of(prefix), f"Training resumes from {prefix}"
        return f"{where}, and repeats {whole.step - begun:,} steps" if whole.step > begun else where

    def _open_session(self, place: RowsPlace, report: Report) -> Session:
        config, coordinator = place.config, self._coordinator
        coordinator.placement.check(config)
        with contextlib.ExitStack() as made:
            model = Model(
                self.task,
                Mode.TRAIN,
                seed=config.seed,
                make_store=place.makes(store_maker(config, self._accelerator, coordinator.placement)),
                accelerator=self._accelerator,
                rates=config.schedule,
                tables=config.settled_tables,
                precision=config.precision,
            )
            made.callback(model.close)
            data = self._open_data(coordinator.membership.shard, self._epochs(), config.model_dir)
            made.callback(data.close)
            model.read(data.spec)
            self._metrics.gauge(
                "data_trouble", "1 while a source cannot record its progress, as on a full disk; else 0"
            ).read_from(lambda: float(bool(data.trouble)))
            session = Session(
                model,
                data,
                coordinator,
                config,
                report=report,
                clock=self._clock,
                metrics=self._metrics,
                stop=self._stop,
            )
            made.pop_all()
            return session

    def _publishing(self, run: LocalRun) -> list[Hook]:
        """Return the hook that publishes, if any; made before anything is restored or saved."""
        plan, session = self._publish, run.session
        if plan is None:
            return []
        guard = MetricGuard(plan.config.guard)
        publishers = self._coordinator.placement.publishers(session.model, plan, guard)
        if publishers is None:
            return []
        leads = self._coordinator.membership.is_chief
        run.publish = hook = PublishHook(
            publishers,
            session.model,
            plan.config,
            guard,
            leads=leads,
            pause_file=plan.pause_file,
            refresh=self._coordinator.placement.refresh,
            stopped=lambda: session.interrupted,
        )
        session.training_step.learned = publishers.note
        session.idle = lambda: hook.idle(run)
        if leads:
            session.log_places = hook.positions
        return [hook]

    def _epochs(self) -> Epochs | None:
        config = self.config
        if config.epochs is None:
            return None
        return Epochs(count=config.epochs, seed=config.seed % (1 << 64), buffer=config.shuffle_buffer)

    def _outputs(
        self,
        mode: Mode,
        steps: int | None,
        checkpoint: str | None,
        on_open: OnOpen | None = None,
        data: Mode | None = None,
    ) -> Iterator[tuple[Batch, Outputs]]:
        with self._restored(mode, checkpoint) as (model, own, prefix):
            heads = _trained_heads(prefix) if mode is Mode.PREDICT else ()

            def opened(stream: Stream[Batch]) -> None:
                self._read_as_trained(model, stream, prefix)
                if on_open is not None:
                    on_open(stream)

            yield from outputs_of(model, mode, own, steps, data=data, on_open=opened, heads=heads)

    def _read_as_trained(self, model: Model, data: Stream[Batch], prefix: str) -> None:
        """Take note of the data that a restored model reads.

        Raises:
            FeatureError, RestoreError: It is made by another spec than the model or its checkpoint.
        """
        known = model.spec is not None
        model.read(data.spec)
        if not known:  # or it was compared when it was restored
            parts = model.features_parts()
            Checkpointer(Saver(self.config.model_dir), parts).restore(prefix, self._reading_options())

    @contextlib.contextmanager
    def _restored(self, mode: Mode, checkpoint: str | None) -> Iterator[tuple[Model, OwnRandom, str]]:
        """Have the model of a checkpoint, which prefix that is, and where it draws random numbers from."""
        config = self.config
        if not config.model_dir:
            raise ConfigError("cannot read a model: needs model_dir, the folder with its checkpoints")
        prefix = checkpoint or newest_checkpoint(config, "eval" if mode is Mode.EVALUATE else "predict")
        if prefix is None:
            raise RestoreError(
                f"there is no checkpoint in {config.model_dir}; train first, or check the path"
            )
        own = OwnRandom(config.seed)
        with own.drawn():
            make_store = store_maker(config, self._accelerator, LocalPlacement())
            model = Model(
                self.task,
                mode,
                seed=config.seed,
                make_store=make_store,
                accelerator=self._accelerator,
                tables=config.settled_tables,
            )
        with contextlib.closing(model):
            parts = [*model.features_parts(), *model.parts()]
            restored = Checkpointer(Saver(config.model_dir), parts).restore(prefix, self._reading_options())
            _log.info("reading %s: step %d", prefix, restored.step)
            yield model, own, prefix

    def _reading_options(self) -> RestoreOptions:
        """Return the options for restoring a checkpoint only to read it."""
        restore = self.config.restore
        custom = CustomRestore(alias_map=restore.alias_map, auto_alias=restore.auto_alias)
        return replace(restore.options(self.config.model_dir), optimizer_state="reset", custom=custom)

    def _own_hooks(self, run: LocalRun, keeper: RunCheckpoints | None, whole: WholeRun) -> list[Hook]:
        config = self.config
        hooks: list[Hook] = [_SessionHook(run.session, config, whole), _MetricsHook(run.session.metrics)]
        if self._accelerator is not None:
            hooks.append(AcceleratorHook(self._accelerator))
        if config.hours is not None:
            hooks.append(StopOutsideHoursHook(config.hours, clock=self._clock))
        kept: list[Hook] = []
        if keeper is not None:
            kept = keeper.hooks(self._metrics, self._listeners)
            run.save = keeper.save
        hooks.append(_CoordinatorHook(run.session, keeper))
        hooks = [*self._asked_hooks(run, hooks), *hooks]
        if keeper is not None:
            hooks += self._summary_hooks(run)
            hooks += self._insight_hooks(run)
            hooks.append(TableInfoHook(run.session.model.stats))
        if run.evaluate is not None:
            hooks.append(run.evaluate)
        hooks += kept
        return hooks

    def _evaluate_hook(self, run: LocalRun, best: BestSoFar, keeper: RunCheckpoints | None) -> EvaluateHook:
        config = self.config
        log = None
        if keeper is not None:
            log = EvaluationLog(config.model_dir, curves=config.curves_dir, clock=self._clock)
        return EvaluateHook(
            run.session,
            config.evaluate,
            best,
            seed=config.seed,
            keeper=keeper,
            log=log,
            epochs=config.epochs,
        )

    def _asked_hooks(self, run: LocalRun, rest: Sequence[Hook]) -> list[Hook]:
        return installed_hooks(
            self.config,
            run,
            self.task.name,
            metrics=self._metrics,
            others=self._coordinator.placement.others,
            rest=rest,
            clock=self._clock,
            timer=self._timer,
        )

    def _summary_hooks(self, run: LocalRun) -> list[Hook]:
        every = self.config.summary_every_steps
        if every is None:
            return []
        session, sinks = run.session, sink_openers(self.config.tracking, self.task.name)
        return [SummaryHook(every, metrics=session.metrics, stats=session.model.stats, sinks=sinks)]

    def _insight_hooks(self, run: LocalRun) -> list[Hook]:
        every, module = self.config.insight_every_steps, run.session.model.module
        label = self.config.insight_label
        if every is None:
            return []
        if not isinstance(module, WatchedModel):
            return [ModelInsightHook(every_steps=every, label=label)]
        return [FeatureInsightHook(module.first, module.segments, every_steps=every, label=label)]

    def _check_limits(self, run: LocalRun) -> None:
        limit = self.config.max_steps
        if limit is not None and run.step >= limit:
            run.request_stop(f"max_steps is {limit}, and the model has already taken {run.step} steps")
        if self.config.steps == 0:
            run.request_stop("steps is 0, so there is nothing to do")

    @property
    def _follows_rollback(self) -> bool:
        """Whether rank 0 decides what happens after steps that no rank can take, and this is another."""
        alert = self.config.alert
        membership = self._coordinator.membership
        follows = membership.lockstep and not membership.is_chief
        return follows and alert is not None and alert.action == "rollback"

    def _forget_run(self) -> None:
        self._run = None


def _refused(session: Session) -> dict[str, int]:
    """By table of this process; a server logs its own, and may be gone."""
    stores = [one.inner if isinstance(one, AllToAllStore) else one for one in session.model.stores]
    here = [store for store in stores if isinstance(store, LocalStore)]
    return {name: stats.refused for one in here for name, stats in one.stats().items() if stats.refused}


def _trained_heads(prefix: str) -> Sequence[str]:
    """Return the labels that a checkpoint was trained on; none if an older one does not say."""
    progress = read_manifest(prefix).manifest.parts.get("progress", {})
    return [str(head) for head in progress.get("value", {}).get("heads", ())]


def _best(best: BestSoFar) -> BestEvaluation | None:
    if best.step is None or best.metric is None:
        return None
    return BestEvaluation(step=best.step, metric=best.metric, value=best.value)


class _OrderedSums:
    """Has torch add up the gradients of repeated indices in one order, as long as some run needs it.

    On a CPU the gradient of `x[index]` is added up by several threads with atomic operations, so its bits
    depend on which of them is faster. That of a GPU is sorted first. The choice belongs to the whole process,
    in which several runs may train on threads of their own, so their number is counted.
    """

    _lock = concurrency.Lock()
    # Guarded by it: the runs that need it, and what the process had chosen before the first of them.
    _runs = 0
    _before = (False, False, True)

    def __enter__(self) -> None:
        kind, memory = _OrderedSums, cast(Any, torch.utils.deterministic)
        with kind._lock:
            if kind._runs == 0:
                kind._before = (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                    memory.fill_uninitialized_memory,
                )
                # An operation without an order of its own is named in a warning, and the run continues.
                self._set(True, True, False)
            kind._runs += 1

    def __exit__(self, *_: object) -> None:
        kind = _OrderedSums
        with kind._lock:
            kind._runs -= 1
            if kind._runs == 0:
                self._set(*kind._before)

    def _set(self, enabled: bool, warn_only: bool, fill: bool) -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        # torch would fill all new memory, to find code that reads it before it is written.
        cast(Any, torch.utils.deterministic).fill_uninitialized_memory = fill


class _SessionHook(Hook):
    """Measures predictions, stops at the limits of the run, and finishes its last updates."""

    essential = True

    def __init__(self, session: Session, config: TrainConfig, whole: WholeRun) -> None:
        self._session = session
        self._config = config
        self._whole = whole

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if result.to_measure:
            self._session.metrics.update(result.predictions, result.batch)
        config, first = self._config, self._whole.begun.step
        # Steps of a graph may turn out to be refused, and then count no more: the last ones are looked at.
        if config.steps is not None and run.step - first >= config.steps:
            self._session.training_step.settle()
            if run.step - first >= config.steps:
                run.request_stop(f"{config.steps} steps were taken")
        if config.max_steps is not None and run.step >= config.max_steps:
            self._session.training_step.settle()
            if run.step >= config.max_steps:
                run.request_stop(f"max_steps of {config.max_steps} was reached")
        if (
            config.max_time is not None
            and concurrency.monotonic() - self._whole.began_at >= config.max_time.total_seconds()
        ):
            run.request_stop(f"max_time of {config.max_time} was reached")

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._session.drain()


class _MetricsHook(Hook):
    """Reports the windows that are open at the end."""

    def __init__(self, metrics: HeadMetrics) -> None:
        self._metrics = metrics

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._metrics.end()


class _CoordinatorHook(Hook):
    """Asks the coordinator before each step; comes before the hook that saves."""

    essential = True

    def __init__(self, session: Session, keeper: RunCheckpoints | None) -> None:
        self._session = session
        self._keeper = keeper

    def before_step(self, run: TrainingRun) -> None:
        # Ranks ask just before the step instead, after all hooks: in between, one of them may not stop.
        if not self._session.coordinator.membership.lockstep:
            self._session.at_step(run)
        if self._session.save_wanted:
            self._save_if_due(run)

    def end(self, run: TrainingRun) -> None:
        self._session.finish(run, lambda: self._save_if_due(run))

    def _save_if_due(self, run: TrainingRun) -> None:
        if self._keeper is not None:
            self._keeper.save_if_due(run)


class _LeaveHook(Hook):
    """Leaves the run; the very last hook, because servers and ranks may be gone afterwards."""

    essential = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left = False

    def end(self, run: TrainingRun) -> None:
        self._session.leave(run)
        self._left = True

    def close(self) -> None:
        if not self._left:
            self._session.coordinator.leave(Outcome(failed=True, error=sys.exc_info()[1]))
