"""What a run says of the data its task reads: files, or a data service. Kafka has a config of its own.

A task takes one as a setting and makes a source of it when it is asked for its dataset:

    @dataclass(frozen=True)
    class Clicks(Task):
        data: DataConfig = DataConfig(path="clicks", pattern="*.parquet")

        def dataset(self, mode):
            return Pipeline(self.data.source(batch_size=512), ...)

Reading one needs no torch; making a source does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from monolith.config import Checked, Problem
from monolith.errors import ConfigError

if TYPE_CHECKING:
    from monolith.data.files.source import FileSource
    from monolith.data.format import Format
    from monolith.data.service import DataServiceSource
    from monolith.data.service.flight import PortGuard

FormatName = Literal[
    "tf_example",
    "example",
    "instance",
    "example_batch",
    "framed_example",
    "framed_instance",
    "framed_example_batch",
    "parquet",
    "csv",
    "tsv",
    "jsonl",
]
"""The names of `FORMATS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Checked):
    """The files that a task reads."""

    path: str | None = None
    """A file, a folder with `pattern` or dates below it, or a path with * and {DATE(...)} in it."""
    pattern: str | None = None
    """Which files of the folder are read, such as *.parquet; with dates, all by default."""
    format: FormatName | None = None
    """The format of the files; None tells it by their names."""
    lagrangex: bool = False
    """Whether records of a framed file begin with one number, with the kind of the payload in it; then they
    have no other header."""
    sort_id: bool = True
    """Whether records of a framed file have a sort id before them."""
    kafka_dump: bool = False
    """Whether records of a framed file have the number before them that dumps of Kafka have."""
    kafka_dump_prefix: bool = False
    """Whether records of a framed file begin with the prefix that some dumps of Kafka have."""
    columns: tuple[str, ...] = ()
    """The columns, or features, to read; none means all."""
    hourly: bool = False
    """Whether below each day's folder there is one for each hour."""
    start_date: str | None = None
    """The first day's folder to read, as 20240131; None reads no folders by day."""
    end_date: str | None = None
    """The day after the last one to read; None reads one day."""
    start_hour: int | None = None
    """The first hour of each day to read, where folders are by hour."""
    end_hour: int | None = None
    """The hour after the last one of each day."""
    queue: str | None = None
    """A local folder that all workers see: they take files from a queue in it, so that a fast worker reads
    more. None deals the files out beforehand."""

    def problems(self) -> Iterator[Problem]:
        for name in ("start_hour", "end_hour"):
            given = getattr(self, name)
            if given is not None and not 0 <= given <= 24:
                yield Problem((name,), f"must be from 0 to 24, got {given}")
            if given is not None and not self.hourly:
                yield Problem((name, "hourly"), "hours are read of folders by hour: set hourly")
        for name in ("start_date", "end_date"):
            given = getattr(self, name)
            if given is not None and (len(given) != 8 or not given.isdigit()):
                yield Problem((name,), f"must be a day such as 20240131, got {given!r}")
        if self.start_date is None and (self.end_date is not None or self.hourly):
            yield Problem(("start_date", "end_date", "hourly"), "folders by day need a start_date")
        if self.start_date and self.end_date and self.start_date > self.end_date:
            yield Problem(("start_date", "end_date"), f"{self.start_date} is after {self.end_date}")
        if self.lagrangex and (self.kafka_dump or self.kafka_dump_prefix):
            yield Problem(("lagrangex", "kafka_dump", "kafka_dump_prefix"), "only one header may be set")

    def patterns(self) -> list[str]:
        """Return the patterns whose files are read.

        Raises:
            ConfigError: There is no path.
        """
        from monolith.data.files.discovery import gen_patterns
        from monolith.filesystem import join

        if self.path is None:
            raise ConfigError("data: path is not set; give it as data.path of the run, or to the task")
        if self.start_date is None:
            return [self.path if self.pattern is None else join(self.path, self.pattern)]
        hours = (self.start_hour or 0, 24 if self.end_hour is None else self.end_hour)
        days = (self.start_date, self.end_date or _day_after(self.start_date))
        return gen_patterns(self.path, days, hours, self.hourly, self.pattern or "*")

    def files(self) -> list[str]:
        """Return the files that are there now, sorted.

        Raises:
            DataError: There is none.
        """
        from monolith.data.files.discovery import find_files

        return find_files(self.patterns())

    def file_format(self, example: str) -> Format:
        """Return the format that `format` names, or else the one that the name of an example tells."""
        from monolith.data.formats import FramedFormat, Framing, format_of

        if self.format is None or not self.format.startswith("framed_"):
            return format_of(example, self.format)
        framing = (
            Framing(lagrangex=True)
            if self.lagrangex
            else Framing(
                sort_id=self.sort_id, kafka_dump=self.kafka_dump, kafka_dump_prefix=self.kafka_dump_prefix
            )
        )
        return FramedFormat(self.format.removeprefix("framed_"), framing=framing)

    def source(self, batch_size: int, **options: Any) -> FileSource:
        """Return a source of these files.

        Args:
            options: As `FileSource` takes them: epochs, shuffle, bad, ...
        """
        from monolith.data.files.source import FileSource
        from monolith.data.files.work_queue import SharedFileQueue

        files = self.files()
        form = self.file_format(files[0])
        columns = self.columns or None
        if self.queue is None:
            return FileSource(files, form, batch_size=batch_size, columns=columns, **options)
        queue = SharedFileQueue(self.queue)
        queue.add(files)
        return FileSource(queue, form, batch_size=batch_size, columns=columns, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataServiceConfig(Checked):
    """A data service: other processes read the data and hand out its batches."""

    enabled: bool = False
    """Whether the task reads from the data service."""
    dispatcher: str | None = None
    """The address of the data service's dispatcher, host:port."""
    folder: str | None = None
    """The local folder in which the dispatcher of the run keeps how far the data was read; None is
    data_service in the model_dir."""
    readers: int = 2
    """How many files a data worker of the run reads at the same time."""
    extra_workers: int = 0
    """How many data workers each worker starts beside itself, on the cores that it leaves idle."""
    prefetch: int = 4
    """How many chunks are fetched from the data service ahead of their use."""
    patience: timedelta = timedelta(minutes=5)
    """How long the dispatcher, or every data worker, may be away before the run fails."""

    def problems(self) -> Iterator[Problem]:
        for name, least in (("prefetch", 1), ("readers", 1), ("extra_workers", 0)):
            if getattr(self, name) < least:
                yield Problem((name,), f"must be at least {least}, got {getattr(self, name)}")
        if self.patience < timedelta(0):
            yield Problem(("patience",), f"must not be negative, got {self.patience}")

    def source(self, trainer: str, *, guard: PortGuard | None = None) -> DataServiceSource | None:
        """Return a source of this trainer's share, see `DataServiceSource`; None where it is not enabled.

        Raises:
            ConfigError: There is no dispatcher.
        """
        from monolith.data.service import DataServiceSource

        if not self.enabled:
            return None
        if self.dispatcher is None:
            raise ConfigError("data service: dispatcher is not set; give it as data_service.dispatcher")
        return DataServiceSource(
            self.dispatcher, trainer, guard=guard, prefetch=self.prefetch, patience=self.patience
        )


def _day_after(day: str) -> str:
    return f"{datetime.strptime(day, '%Y%m%d') + timedelta(days=1):%Y%m%d}"
