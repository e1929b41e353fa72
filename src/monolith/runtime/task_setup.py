"""Makes the task of a run ready to train: from its name and settings, with learned means and quantiles."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from monolith import concurrency, filesystem
from monolith.checkpoint import read_manifest, saved_spec
from monolith.checkpoint.part import FEATURES
from monolith.data import as_stream
from monolith.data.config import DataConfig
from monolith.errors import ConfigError, DataError, RestoreError
from monolith.feature import BucketFeature, FeatureSpec, FloatFeature
from monolith.feature.spec import AnyFeature
from monolith.observe.machine import usable_cores
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.runtime.cluster_config import JobConfig
from monolith.runtime.config import CONFIG_TASK, RETRIEVAL_TASK, RunConfig, ThreadsConfig
from monolith.runtime.config_task import ConfigTask
from monolith.runtime.task_data import check_before_training
from monolith.train.accelerator import accelerator_of
from monolith.train.config import TrainConfig
from monolith.train.task import Mode, Task
from monolith.train.task_loading import load_task

_log = logging.getLogger(__name__)

CPU_TEST_BATCH = 128
"""The most examples of a batch where a task is tried on a CPU."""

Warn = Callable[[str], None]


def with_job(task: Task, job: JobConfig, warn: Warn = _log.warning) -> Task:
    """Return the task with the end date, and the small batches of a test, that the job asks for.

    Args:
        warn: Told what the job asks for and the task has no setting for.
    """
    if job.override_end_date is not None:
        task = _changed(
            task,
            _end_dates(task, job.override_end_date),
            f"job.override_end_date {job.override_end_date}",
            warn,
        )
    if job.cpu_test:
        batch_size = getattr(task, "batch_size", CPU_TEST_BATCH)
        if isinstance(batch_size, int) and batch_size > CPU_TEST_BATCH:
            task = _changed(task, {"batch_size": CPU_TEST_BATCH}, "the batch size of job.cpu_test", warn)
    return task


def with_task(run: RunConfig, task: Task) -> RunConfig:
    """Return the run, which saves as often as its task says, if the task says so."""
    steps, save = task.save_steps, run.train.save
    if steps is None or (save.steps, save.secs) == (steps, None):
        return run
    _log.info("saving every %d steps, as the task says, which beats train.save", steps)
    return replace(run, train=replace(run.train, save=replace(save, steps=steps, secs=None)))


def _end_dates(task: Task, day: str) -> dict[str, Any]:
    """Return the settings of a task that have an end date, with that one."""
    settings = {field: getattr(task, field) for field in _fields(task)}
    found: dict[str, Any] = {
        name: replace(value, end_date=day)
        for name, value in settings.items()
        if isinstance(value, DataConfig) and value.start_date is not None
    }
    return found | ({"end_date": day} if "end_date" in settings else {})


def _changed(task: Task, settings: dict[str, Any], what: str, warn: Warn) -> Task:
    if not settings or not _fields(task):
        warn(f"{what} changes nothing: task {task.name!r} is no dataclass with a setting for it")
        return task
    changed: Task = dataclasses.replace(task, **settings)  # type: ignore[type-var]
    return changed


def _fields(task: Task) -> list[str]:
    return [field.name for field in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []


# Means and quantiles that a run's features need: learned once, at its first start, and kept.
#
# They are in `features.json` of the model_dir, and in every checkpoint. A later process (a restart,
# another process of the run, `monolith evaluate` or `monolith predict`) reads them there: quantiles of
# other data would turn the same values into other ids.


SPEC_FILE = "features.json"
"""The file in the model_dir that has the features of the run, with the learned means and quantiles."""

POLL = timedelta(seconds=0.2)
"""How often a process checks whether the chief has learned them."""


def with_learned_features(
    task: Task,
    run: RunConfig,
    *,
    trains: bool,
    say: Callable[[str], None],
    clock: Callable[[], float] = concurrency.monotonic,
    sleep: Callable[[float], None] = concurrency.sleep,
) -> Task:
    """Return the task with the means and quantiles of its run, learned now unless an earlier process did.

    Args:
        trains: Whether they may be learned: a process that only reads a model uses those it was trained with.

    Raises:
        ConfigError: No process has learned them, and this one may not learn them or waited in vain.
    """
    if not isinstance(task, ConfigTask) or not task.features.to_learn:
        return task
    spec, config = task.features, run.train
    found = _first_complete(spec, _kept(config))
    if found is None and not trains:
        raise ConfigError(
            f"{', '.join(spec.to_learn)}: means or quantiles are not known: there is neither {SPEC_FILE} nor "
            f"a checkpoint with them in {config.model_dir}. Train first, with the same features."
        )
    if found is None and run.distributed and (run.cluster.role != "worker" or run.cluster.index):
        found = _awaited(spec, config, run.timeouts.start, clock, sleep)
    if found is None:
        for kept in _kept(config):  # of a run that this one starts from: its ids keep their meaning
            spec = take_learned(spec, kept)
        say(f"learning {', '.join(spec.to_learn)} in one pass over the training data")
        with_data = as_stream(_to_learn_from(task).records(Mode.TRAIN))
        try:
            found = spec.fit(with_data, fraction=lambda: with_data.fraction_read(with_data.position()))
        finally:
            with_data.close()
    if trains and config.model_dir and run.cluster.role == "worker" and not run.cluster.index:
        _keep(config.model_dir, found)
    return replace(task, features=found)


def _to_learn_from(task: ConfigTask) -> ConfigTask:
    """Return the task over what there is to read now, and to its end.

    Raises:
        ConfigError: It reads a stream of which nothing is there.
    """
    names = ", ".join(task.features.to_learn)
    if task.data.served:
        raise ConfigError(
            f"{names}: means or quantiles are not known, and a log of served features has none of the raw "
            "numbers to learn them of. Start from the model that was served, with restore.dir; or give "
            "boundaries, or mean and std, in the config."
        )
    try:
        data = task.data.at_rest()
        if task.data.live:
            data.files()
    except (ConfigError, DataError) as cause:
        raise ConfigError(
            f"{names}: means or quantiles are learned of the data before training, and there is none yet: "
            f"{cause}. Give boundaries, or mean and std, in the config; or train first on files."
        ) from cause
    return replace(task, data=data)


def take_learned(spec: FeatureSpec, kept: FeatureSpec) -> FeatureSpec:
    """Return a spec with what another one has learned of the same features, read in the same way."""
    taken: dict[str, AnyFeature] = {}
    for name in spec.to_learn:
        one, other = spec.features[name], kept.features.get(name)
        if isinstance(one, FloatFeature) and isinstance(other, FloatFeature):
            learned: AnyFeature = replace(one, mean=other.mean, std=other.std)
        elif isinstance(one, BucketFeature) and isinstance(other, BucketFeature):
            learned = replace(one, boundaries=other.boundaries)
        else:
            continue
        if learned == other:  # asked for in the same way, so learning would have come to the same
            taken[name] = learned
    return replace(spec, features={**spec.features, **taken})


def _first_complete(spec: FeatureSpec, kept: Iterable[FeatureSpec]) -> FeatureSpec | None:
    for other in kept:
        found = take_learned(spec, other)
        if not found.to_learn:
            return found
    return None


def _kept(config: TrainConfig) -> Iterator[FeatureSpec]:
    """Yield what is kept where this run, or the one that it starts from, writes; the surest first."""
    for folder in filter(None, (config.model_dir, config.restore.dir)):
        path = filesystem.join(folder, SPEC_FILE)
        if filesystem.exists(path):
            yield FeatureSpec.from_json(filesystem.read_bytes(path).decode(), path)
        prefix = newest_checkpoint(
            replace(config, model_dir=folder, restore=replace(config.restore, checkpoint=None)), "predict"
        )
        if prefix is not None:
            part = read_manifest(prefix).manifest.parts.get(FEATURES)
            if part is not None:
                yield saved_spec(prefix, part.get("value"))


def _awaited(
    spec: FeatureSpec,
    config: TrainConfig,
    patience: timedelta,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> FeatureSpec:
    end = clock() + patience.total_seconds()
    while clock() < end:
        found = _first_complete(spec, _kept(config))
        if found is not None:
            return found
        sleep(POLL.total_seconds())
    raise RestoreError(
        f"waited {patience} for the chief to learn {', '.join(spec.to_learn)} and write {SPEC_FILE} to "
        f"{config.model_dir}; see what the chief (worker 0) says, or raise timeouts.start"
    )


def _keep(model_dir: str, spec: FeatureSpec) -> None:
    path = filesystem.join(model_dir, SPEC_FILE)
    text = spec.to_json(indent=2).encode()
    if filesystem.exists(path) and filesystem.read_bytes(path) == text:
        return
    filesystem.make_dirs(model_dir)
    with filesystem.atomic_write(path) as file:
        file.write(text)


# Making the task


def prepared_task(
    task: Task | Callable[[RunConfig], Task] | None,
    config: RunConfig,
    *,
    say: Warn = _log.info,
    warn: Warn = _log.warning,
) -> tuple[Task, RunConfig]:
    """Return the task of a run, ready to train, and the run as the task changes it.

    Args:
        task: The task, or what makes it; None makes the one that the config names or describes.

    Raises:
        ConfigError: There is no such task, a setting is wrong, or its data cannot be trained on.
    """
    if config.cluster.role == "worker":
        accelerator_of(config.train.accelerator)  # or an error, before anything is made
    if task is None:
        task = make_task(config)
    elif not isinstance(task, Task):
        task = task(config)
    task = with_job(task, config.job, warn)
    check_before_training(task, config)
    task = with_learned_features(task, config, trains=True, say=say)
    return task, with_task(config, task)


def make_task(run: RunConfig, config: Path | None = None, texts: Sequence[str] = ()) -> Task:
    """Return the task that a run names, or that its config says.

    Args:
        config: The file of the run, for messages.
        texts: Settings of the task as key=value.

    Raises:
        ConfigError: There is no such task, or a setting is wrong.
    """
    if not run.job.task:
        raise ConfigError(
            "name the task: package.module:Name or path/to/file.py:Name, or job.task in the config; or say "
            "what it is in the config: [model], [features] and [data]"
        )
    source = f"[task] of {config}" if config else "task"
    try:
        return load_task(
            run.job.task,
            _nested(run.task),
            texts=texts,
            source=source,
            inputs=run.inputs,
            optional=("data_service",),  # a task that reads files by its DataConfig need not know of it
        )
    except ConfigError as error:
        said = str(error)
        if run.job.task in (CONFIG_TASK, RETRIEVAL_TASK):  # names that nothing in the file says
            said = said.replace(f"cannot make task {run.job.task}:", "cannot read the config:", 1)
        refused = [text for text in texts if f"from {text!r}" in said]
        if not refused or refused[0].split(".")[0] not in {field.name for field in fields(run)}:
            raise ConfigError(said) from error
        key, _, value = refused[0].partition("=")
        raise ConfigError(
            f"{said}. --set is for settings of the task; settings of the run are flags: "
            f"--{key.replace('_', '-')} {value}"
        ) from error


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the task, with a table for each dotted name."""
    nested: dict[str, Any] = {}
    for path, value in settings.items():
        *above, last = path.split(".")
        table = nested
        for key in above:
            inner = table.get(key)
            table[key] = dict(inner) if isinstance(inner, Mapping) else {}
            table = table[key]
        table[last] = value
    return nested


MANY_CORES = 8
"""Of a machine on which torch, and what reads for it, need not share all cores."""


def set_threads(threads: ThreadsConfig, *, shares_cores: bool = False) -> None:
    """Set the threads of torch's own operations, of this process.

    Args:
        shares_cores: Whether it computes on cores that it also needs to read and to look rows up, and its
            user has not said with how many.
    """
    if threads.intra_op is not None:
        torch.set_num_threads(threads.intra_op)
    elif shares_cores and usable_cores() >= MANY_CORES:
        # Each operation waits for the last of its threads. One that has to share its core with a thread that
        # reads holds up all others.
        torch.set_num_threads(usable_cores() // 2)
    if threads.inter_op is not None and torch.get_num_interop_threads() != threads.inter_op:
        torch.set_num_interop_threads(threads.inter_op)
