"""What a training would refuse of its data and its model, found before it starts.

`monolith train` and `monolith config check` call the same function, so they say the same. It makes the model,
opens the data and reads a bounded sample of it, in the way the training does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import torch

from monolith.checkpoint import read_checkpoint_state
from monolith.data import Stream
from monolith.errors import ConfigError, DataError, MonolithError
from monolith.run.config import RunConfig
from monolith.run.config_task import ConfigTask
from monolith.run.task_data import data_of
from monolith.train.retrieval import RetrievalTask
from monolith.train.task import Mode, Task

SAMPLE = 10_000
"""The records that are read: a missing column shows in the first, a wrong label in most of them."""


def check_before_training(task: Task, run: RunConfig) -> None:
    """Refuse a task of a config file whose training would fail in its first steps.

    Only a new run is checked: one that goes on may have used up files that are gone by now. A task in Python
    fails by itself in its first step, and its source may be one that cannot be read twice.

    Raises:
        MonolithError: What is wrong.
    """
    chief = run.cluster.role == "worker" and run.cluster.index == 0
    service = run.data_service is not None and run.data_service.enabled
    if not isinstance(task, ConfigTask) or not chief or service:
        return
    if run.train.model_dir and read_checkpoint_state(run.train.model_dir) is not None:
        return
    for problem in task_problems(task, run):
        raise problem


def task_problems(task: Task, run: RunConfig) -> Iterator[MonolithError]:
    """Yield what a training would refuse: of the model, of the training data and of the evaluation data.

    Reads `SAMPLE` records at most, and leaves random numbers as they were. A task in Python is asked for its
    data only if that is files by a `DataConfig`.
    """
    if isinstance(task, ConfigTask):
        yield from _config_task_problems(task, run)
    elif _reads_files(task):
        yield from _caught(lambda: _read(task.dataset(Mode.TRAIN), _batches(getattr(task, "batch_size", 1))))


def _config_task_problems(task: ConfigTask, run: RunConfig) -> Iterator[MonolithError]:
    # Files in a queue are taken by whoever opens it; a check must leave them to the workers.
    data = replace(task.data, queue=None)
    if data.watch is not None:
        with suppress(DataError):  # there is no file yet
            data.at_rest().files()
            data = data.at_rest()  # those that are there: a check must not wait for others
    task = replace(task, data=data)
    batches = _batches(task.batch_size)
    if data.live and task.features.to_learn:
        return  # learning them needs files, which the training says
    if task.features.to_learn:  # on a sample: only whether they can be learned matters here
        learned: list[ConfigTask] = []

        def learn() -> None:
            with closing(task.records(Mode.TRAIN)) as records:
                sample = itertools.islice(records, batches)
                learned.append(replace(task, features=task.features.fit(sample, show=False)))

        failed = list(_caught(learn))
        yield from failed
        if failed:
            return
        task = learned[0]
    with torch.random.fork_rng(devices=[]):  # a run has the same first weights whether or not it was checked
        yield from _caught(task.model)
    if data.live:
        return
    if data.path is None and data.train is None:  # not files: opened, not read
        yield from _caught(lambda: task.dataset(Mode.TRAIN).close())
        return
    failed = list(_caught(lambda: _read(task.dataset(Mode.TRAIN), batches)))
    yield from failed
    if failed:
        return  # the other data has the same features
    if run.train.evaluate.enabled:
        # Records that a split holds back may be at the end of the files, so only files of their own are read.
        count = batches if task.data.evaluate is not None else 0
        yield from _caught(lambda: _read(task.dataset(Mode.EVALUATE), count))
    if isinstance(task, RetrievalTask):
        with torch.random.fork_rng(devices=[]):
            yield from _caught(lambda: _read(task.candidates(), 1))


def _batches(size: object) -> int:
    return max(SAMPLE // max(size if isinstance(size, int) else 1, 1), 1)


def _reads_files(task: Task) -> bool:
    try:
        return data_of(task).config.path is not None
    except ConfigError:
        return False


def _read(stream: Stream[object], batches: int) -> None:
    with closing(stream):
        for _ in itertools.islice(stream, batches):
            pass


def _caught(step: Callable[[], object]) -> Iterator[MonolithError]:
    try:
        step()
    except MonolithError as error:
        yield error
