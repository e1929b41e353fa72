"""The data of a task, read by others: which files, in what batches, and from whom a worker gets them.

A task says how it reads by what it does: it calls `source` of a setting of type DataConfig when it is asked
for its data. Here that call is noted instead of obeyed. The dispatcher and the data workers of a run then do
what the task would have done, and a worker is handed a source of their batches in its place. So the same task
reads files by itself, or through a data service, and does not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monolith.data.config import DataConfig, DataServiceConfig
from monolith.errors import ConfigError

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
            "data.watch and data.kafka: a data service hands out files that are there. Leave data_service "
            "out, and have the workers read the stream themselves"
        )
    if noted[0].config.queue is not None:
        raise ConfigError("data.queue: a data service hands out the files itself; leave the queue out")
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
