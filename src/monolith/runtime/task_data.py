"""The data of a task, read by others: which files, in what batches, and from whom a worker gets them.

A task says how it reads by what it does: it calls `source` of a setting of type DataConfig when it is asked
for its data. Here that call is noted instead of obeyed. The dispatcher and the data workers of a run then do
what the task would have done, and a worker is handed a source of their batches in its place. So the same task
reads files by itself, or through a data service, and does not know.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from monolith.checkpoint import read_checkpoint_state
from monolith.data import Stream
from monolith.data.config import DataConfig, DataServiceConfig
from monolith.errors import ConfigError, DataError, MonolithError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_task import ConfigTask
from monolith.train.retrieval import RetrievalTask
from monolith.train.task import Mode, Task

if TYPE_CHECKING:
    from monolith.data.files.source import FileSource
    from monolith.data.records import Records
    from monolith.data.service import DataServiceSource
    from monolith.data.source import Position
    from monolith.train.task import Task

OpenSource = Callable[[], "DataServiceSource"]

_OF_ONE_READER = {"worker", "num_workers", "epochs", "auto_commit", "drop_remainder"}
"""Options of a source that say who reads how much of all files, which the dispatcher decides."""


@dataclass(frozen=True, slots=True)
class TaskData:
    """What a task reads, and how."""

    setting: str
    """The setting of the task that it reads by."""
    config: DataConfig
    batch_size: int
    options: dict[str, Any]
    """As `FileSource` takes them."""

    @property
    def epochs(self) -> int:
        """How often it reads each file.

        Raises:
            ConfigError: For ever, which a data service cannot count.
        """
        epochs = self.options.get("epochs", 1)
        if not isinstance(epochs, int):
            raise ConfigError(
                "data service: the task reads its files for ever (epochs=None); name a number of epochs"
            )
        return epochs

    def open_split(self, path: str) -> FileSource:
        """Return a source of one of its files."""
        from monolith.data.files.source import FileSource

        options = {name: value for name, value in self.options.items() if name not in _OF_ONE_READER}
        options = {"threads": 0, **options}  # a data worker reads several files at a time instead
        types = options.pop("types", None)
        return FileSource(
            [path],
            self.config.file_format(path, types),
            batch_size=self.batch_size,
            columns=self.config.columns or None,
            **options,
        )


def data_of(task: Task) -> TaskData:
    """Return what a task trains on, without reading any of it.

    Raises:
        ConfigError: It does not read files by one DataConfig.
    """
    from monolith.train.task import Mode

    noted: list[TaskData] = []
    settings: dict[str, Any] = {
        name: _NotedData(note=lambda *call, name=name: noted.append(TaskData(name, *call)), **_fields(value))
        for name, value in _settings(task, DataConfig).items()
    }
    if settings:
        services = _settings(task, DataServiceConfig)
        settings |= {name: dataclasses.replace(one, enabled=False) for name, one in services.items()}
        _with(task, settings).dataset(Mode.TRAIN).close()
    if len(noted) != 1:
        found = "two or more sources" if noted else "nothing"
        raise ConfigError(
            f"task {task.name!r} cannot be read by a data service: its dataset() makes {found} of settings "
            "of type DataConfig, and must make one, as in `self.data.source(batch_size=512)`"
        )
    if noted[0].config.live:
        raise ConfigError(
            "data.watch and data.kafka: a data service assigns files that exist. Leave data_service "
            "out, and have the workers read the stream themselves"
        )
    if noted[0].config.queue is not None:
        raise ConfigError("data.queue: a data service assigns the files itself; leave the queue out")
    return noted[0]


def read_from_service(task: Task, open_source: OpenSource) -> Task:
    """Return the task reading from a data service: by its own setting for one, or in place of its files.

    Raises:
        ConfigError: It has no such setting, and does not read files by one DataConfig.
    """
    own = _settings(task, DataServiceConfig)
    if own:
        return _with(
            task,
            {
                name: _ServedService(
                    open_source=open_source, **_fields(dataclasses.replace(one, enabled=True))
                )
                for name, one in own.items()
            },
        )
    data = data_of(task)
    return _with(task, {data.setting: _ServedData(open_source=open_source, **_fields(data.config))})


@dataclass(frozen=True, kw_only=True, slots=True)
class _ServedData(DataConfig):
    """Files that others read."""

    open_source: OpenSource = field(repr=False, compare=False)

    def source(self, batch_size: int, **options: Any) -> Any:  # noqa: ARG002
        return self.open_source()


@dataclass(frozen=True, kw_only=True, slots=True)
class _ServedService(DataServiceConfig):
    """A data service that this process was shown in to."""

    open_source: OpenSource = field(repr=False, compare=False)

    def source(self, trainer: str, *, guard: Any = None) -> DataServiceSource:  # noqa: ARG002
        return self.open_source()


@dataclass(frozen=True, kw_only=True, slots=True)
class _NotedData(DataConfig):
    """Files of which is noted how they would be read."""

    note: Callable[[DataConfig, int, dict[str, Any]], None] = field(repr=False, compare=False)

    def source(self, batch_size: int, **options: Any) -> Any:
        values = _fields(self)
        del values["note"]
        self.note(DataConfig(**values), batch_size, options)
        return _Nothing()


class _Nothing:
    """A source of no records."""

    def __iter__(self) -> Iterator[Records]:
        return iter(())

    def position(self) -> Position:
        return {}

    def restore(self, position: Position) -> None: ...
    def commit(self, position: Position) -> None: ...
    def close(self) -> None: ...


def _settings(task: Task, kind: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(task):
        return {}
    values = {one.name: getattr(task, one.name) for one in dataclasses.fields(task)}
    return {name: value for name, value in values.items() if isinstance(value, kind)}


def _with(task: Task, settings: dict[str, Any]) -> Task:
    changed: Task = dataclasses.replace(task, **settings)  # type: ignore[type-var]
    return changed


def _fields(config: Any) -> dict[str, Any]:
    return {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}


# What a training would refuse of its data and its model, found before it starts.
#
# `monolith train` and `monolith config check` call the same function, so they say the same. It makes the
# model, opens the data and reads a bounded sample of it, in the way the training does.


SAMPLE = 10_000
"""The records that are read: a missing column shows in the first, a wrong label in most of them."""


def check_before_training(task: Task, run: RunConfig) -> None:
    """Refuse a task of a config file whose training would fail in its first steps.

    Only a new run is checked: a resumed run may have used up files that are gone by now. A task in Python
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
    # Opening a queue takes files from it; a check must leave them to the workers.
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
        # Records that a split withholds may be at the end of the files, so only separate files are read.
        count = batches if data.evaluate is not None else 0
        # Their histories begin with all training data, which is not read for a check.
        alone = replace(data, path=None, train=None) if data.evaluate is not None else data
        yield from _caught(lambda: _read(replace(task, data=alone).dataset(Mode.EVALUATE), count))
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
