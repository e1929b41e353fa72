"""The config of the data that a task reads: files, watched files, topics, or a data service.

A task takes one as a setting and makes a source of it when it is asked for its dataset:

    @dataclass(frozen=True)
    class Clicks(Task):
        data: DataConfig = DataConfig(path="clicks", pattern="*.parquet")

        def dataset(self, mode):
            return Pipeline(self.data.source(batch_size=512), ...)

Reading one needs no torch; making a source does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from monolith.config import Checked, Problem
from monolith.data.kafka.config import TopicsConfig
from monolith.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from monolith.data.files.source import FileSource
    from monolith.data.format import Format
    from monolith.data.histories import HistoryConfig
    from monolith.data.kafka import KafkaSource
    from monolith.data.pipeline import Pipeline
    from monolith.data.records import Records
    from monolith.data.service import DataServiceSource
    from monolith.data.service.messages import PortGuard
    from monolith.data.source import Stream

_log = logging.getLogger(__name__)

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

_AT_ONCE = 1 << 14
"""Records of a batch when files are only looked through."""
_LOOK_EVERY = timedelta(seconds=1)
"""How often is looked for files that appear whole."""

Part = Literal["train", "evaluate", "predict"]
"""What a part of the data is for."""


def moment_of(at: float | str) -> float:
    """Return a number as it is, and a time in ISO 8601 as its Unix second; without a zone it is UTC.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(at, str):
        return at
    try:
        return float(at)
    except ValueError:
        moment = datetime.fromisoformat(at)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplit(Checked):
    """Which records of one set of files are withheld from training.

    By chance: a hash of a record's values decides, so it is in the same part in every run, on every worker
    and in whatever order the files are read. Or by time: records from a moment on. Or the last records of
    each user, as papers on sequences do (leave-one-out).

    Examples:
        >>> from monolith import DataSplit
        >>> by_user = DataSplit(evaluate=0.1, by=("user",))  # all records of a user are in one part
        >>> by_time = DataSplit(time="time", evaluate_from="2024-05-01T10:00:00Z")
        >>> leave_one_out = DataSplit(last_of="user", time="time")
        >>> by_user.columns, by_time.columns, leave_one_out.columns
        (('user',), ('time',), ('user', 'time'))
    """

    evaluate: float = 0.0
    """The fraction of records to evaluate on, 0 to 1."""
    predict: float = 0.0
    """The fraction of records to predict, 0 to 1, such as a test set; 0 predicts those to evaluate on."""
    by: tuple[str, ...] = ()
    """Columns whose values decide: records with the same values there are in one part, such as all of a
    user. None means every column that is read."""
    seed: int = 0
    """Another seed is another choice."""
    time: str | None = None
    """A column of times, or of other numbers: the parts then follow each other by it. A record without a
    value there is trained on."""
    evaluate_from: float | str | None = None
    """The value of the time column from which records are evaluated on: a number, or a time such as
    2024-05-01T10:00:00Z, which is UTC without a zone."""
    predict_from: float | str | None = None
    """The value of the time column from which records are predicted, likewise."""
    last_of: str | None = None
    """A column such as the user: of the records with the same value there, the last one by time is predicted
    (the test), the one before it is evaluated on, and the rest is trained on; of fewer than three, all are.
    At the same time, the order of the files decides. The files are read once more to find them, and 24 bytes
    of each record are kept meanwhile."""

    def problems(self) -> Iterator[Problem]:
        for name in ("evaluate", "predict"):
            if not 0 <= getattr(self, name) < 1:
                yield Problem((name,), f"must be from 0 to below 1, got {getattr(self, name)}")
        if self.evaluate + self.predict >= 1:
            yield Problem(("evaluate", "predict"), "the fractions leave nothing to train on")
        by_chance = self.evaluate or self.predict
        moments = []
        for name in ("evaluate_from", "predict_from"):
            at = getattr(self, name)
            try:
                moments += [] if at is None else [moment_of(at)]
            except ValueError:
                yield Problem((name,), f"must be a number or a time such as 2024-05-01T10:00:00Z, got {at!r}")
                return
        if self.time is None and moments:
            yield Problem(("evaluate_from", "predict_from"), "these are values of a time column: set time")
        if self.last_of is not None:
            if self.time is None:
                yield Problem(("last_of", "time"), "the last record is the last by time: set time")
            if by_chance or self.by or moments:
                yield Problem(
                    ("last_of", "evaluate", "predict", "by", "evaluate_from", "predict_from"),
                    "split by last_of or by another rule, not by both",
                )
            return
        if self.time is None and not by_chance:
            yield Problem(("evaluate",), "nothing is withheld: set a fraction, such as 0.1, or time")
        if self.time is not None and (by_chance or self.by):
            yield Problem(("time", "evaluate", "predict", "by"), "split by chance or by time, not by both")
        if self.time is not None and not moments:
            yield Problem(("evaluate_from", "time"), "set the value from which records are withheld")
        if moments != sorted(moments):
            yield Problem(
                ("evaluate_from", "predict_from"), "what is predicted comes after what is evaluated on"
            )

    def has(self, part: Part) -> bool:
        """Whether there are records for this."""
        if self.last_of is not None:
            return True
        withheld = {
            "evaluate": (self.evaluate, self.evaluate_from),
            "predict": (self.predict, self.predict_from),
        }
        fraction, moment = withheld.get(part, (1.0, None))
        return fraction > 0 or moment is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it names."""
        named = self.by if self.time is None else (self.time,)
        return named if self.last_of is None else (self.last_of, *named)

    def protocol(self, part: Part) -> str:
        """Return which records are in a part, in words that are printed with results."""
        if self.last_of is not None:
            which = {"train": "all but the last two records", "evaluate": "the last record but one"}
            return (
                f"leave-one-out: {which.get(part, 'the last record')} of each {self.last_of} by {self.time}"
            )
        if self.time is None:
            share = {"evaluate": self.evaluate, "predict": self.predict}.get(
                part, 1 - self.evaluate - self.predict
            )
            return f"{share:.3g} of the records by a hash of {', '.join(self.by) or 'their values'}"
        first, last = self.evaluate_from or self.predict_from, self.predict_from
        said = {"train": f"before {first}", "predict": f"from {last} on"}.get(part, f"from {first} on")
        ended = f" and before {last}" if part == "evaluate" and last is not None else ""
        return f"by time: records with {self.time} {said}{ended}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Checked):
    """The files, or the stream, that a task reads.

    Examples:
        >>> from monolith import DataConfig, DataSplit
        >>> data = DataConfig(path="clicks/*.parquet", split=DataSplit(evaluate=0.1))
        >>> data.split.has("evaluate")
        True
    """

    path: str | None = None
    """All of the data: a file, a folder with `pattern` or dates below it, or a path with * and {DATE(...)} in
    it."""
    train: str | None = None
    """What to train on, in place of path, if there are files for each purpose."""
    watch: str | None = None
    """What to train on as it arrives, in place of path: a path with * in it. New files are read, and records
    that are appended to CSV, TSV and JSON lines. Other formats, and compressed files, must appear whole."""
    kafka: TopicsConfig | None = None
    """What to train on as it arrives, in place of path: topics."""
    max_wait: timedelta = timedelta(milliseconds=50)
    """How long the first record of a batch waits for the rest of it, with `watch` and `kafka`; then the batch
    is trained on as it is."""
    stop_after: timedelta | None = None
    """The run ends after so long without a new record, with `watch`; None waits for good. Topics have
    kafka.stream_timeout."""
    evaluate: str | None = None
    """The files to evaluate on; None evaluates on the records that `split` withholds."""
    predict: str | None = None
    """The files to predict; None predicts the records that `split` withholds, or those to evaluate on."""
    split: DataSplit | None = None
    """Which records are withheld from training, if there is one set of files."""
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
    served: bool = False
    """Whether the records are a log of served features (serve.log), with labels joined to it. Features are
    then read as the server gave them to its model, and not made of raw columns again."""
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
    max_unreadable: float = 0.0
    """The fraction of records that may be malformed, 0 to 1, such as lines with too many fields: they are
    dropped and counted. More end the run, and with 0 the first does."""
    history_users: int = 1_000_000
    """The most users whose histories are kept, for features of kind "sequence" with `by`; the user whose last
    event is the oldest leaves."""
    threads: int | None = None
    """How many threads read, parse, hash and pack records ahead of the training; None takes three of four
    cores of the machine, up to 16, and 0 reads in the thread that looks rows up. Batches and their order do
    not depend on it. A batch of data that arrives as it happens never waits for later records."""
    queue: str | None = None
    """A local folder that all workers see: they lease files from a queue in it, so that a fast worker reads
    more. None assigns the files beforehand."""

    def problems(self) -> Iterator[Problem]:
        if not 0 <= self.max_unreadable <= 1:
            yield Problem(("max_unreadable",), f"must be from 0 to 1, got {self.max_unreadable}")
        if self.history_users < 1:
            yield Problem(("history_users",), f"must be at least 1, got {self.history_users}")
        if self.threads is not None and self.threads < 0:
            yield Problem(("threads",), f"must be 0 or more, got {self.threads}")
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
        trained = [name for name in ("path", "train", "watch", "kafka") if getattr(self, name) is not None]
        if len(trained) > 1:
            several = "both" if len(trained) == 2 else "all"
            yield Problem(tuple(trained), f"{several} say what to train on; give one of them")
        if self.live and (self.queue or self.start_date or self.pattern):
            yield Problem(
                ("watch", "kafka", "queue", "start_date", "pattern"),
                "a queue, days and a pattern are for files that are there; give the pattern as watch",
            )
        if self.kafka is not None and self.split is not None:
            yield Problem(
                ("kafka", "split"),
                "topics are read once, so nothing of them can be withheld; name files to evaluate on",
            )
        if self.watch is not None and self.split is not None and self.split.last_of is not None:
            yield Problem(
                ("watch", "split"),
                "which record is the last is known of files that are there; give path instead of watch",
            )
        if self.stop_after is not None and self.watch is None:
            yield Problem(("stop_after", "watch"), "this is for files that are watched; set watch")
        for name in ("max_wait", "stop_after"):
            given = getattr(self, name)
            if given is not None and given < timedelta(0):
                yield Problem((name,), f"must not be negative, got {given}")
        if self.split is not None and self.evaluate is not None and self.split.has("evaluate"):
            yield Problem(("evaluate", "split"), "both say what to evaluate on; give one of them")
        if self.split is not None and self.predict is not None and self.split.has("predict"):
            yield Problem(("predict", "split"), "both say what to predict; give one of them")

    @property
    def live(self) -> bool:
        """Whether the training data arrives as it happens, and does not end."""
        return self.watch is not None or self.kafka is not None

    @property
    def reading_threads(self) -> int:
        """How many threads parse, and make batches: `threads`, settled for this machine."""
        from monolith.data.files.reading_ahead import default_threads

        return default_threads() if self.threads is None else self.threads

    def at_rest(self) -> DataConfig:
        """Return the training data that is there now, which ends.

        Raises:
            ConfigError: It is in topics.
        """
        if self.kafka is not None:
            raise ConfigError("data: topics have no end up to which they could be read first")
        return self if self.watch is None else replace(self, path=self.watch, watch=None, stop_after=None)

    def part(self, part: Part) -> tuple[DataConfig, DataSplit | None, Part]:
        """Return the files for a purpose, as their `path`, and what chooses which part of them, if anything.

        Raises:
            ConfigError: Nothing says what to evaluate on.
        """
        whole = next((one for one in (self.path, self.train, self.watch) if one is not None), None)
        own = {"evaluate": self.evaluate, "predict": self.predict}.get(part)
        if own is not None:
            return self._of(own), None, part
        if part == "train" and self.live:
            return replace(self, evaluate=None, predict=None, split=None), self.split, part
        if part == "train" or (self.split is not None and self.split.has(part)):
            files = self._of(whole)
            return (replace(files, queue=self.queue) if part == "train" else files), self.split, part
        if part == "predict":
            return self.part("evaluate")
        raise ConfigError(
            "data: nothing says what to evaluate on; set data.evaluate to files of their own, or "
            "withhold some records, as in `split = { evaluate = 0.1 }`"
        )

    def earlier(self, part: Part) -> list[DataConfig]:
        """Return the files with the events before those of a part that has files of its own, in order.

        They are what is trained on, and before predictions what is evaluated on, too. Of data that is watched
        they are the files that are there.

        Topics cannot be read again, so nothing of them is returned.
        """
        from monolith.data.files.discovery import matching_files

        if getattr(self, part, None) is None:
            withheld = part != "predict" or (self.split is not None and self.split.has(part))
            return [] if withheld else self.earlier("evaluate")
        if part == "train":
            return []
        whole = next((one for one in (self.path, self.train, self.watch) if one is not None), None)
        before = [whole] if part == "evaluate" else [whole, self.evaluate]
        found = [self._of(one) for one in before if one is not None]
        return [one for one in found if self.watch is None or matching_files(one.patterns())]

    def protocol(self, part: Part) -> str:
        """Return which records are for a purpose, in words that are printed with results.

        Raises:
            ConfigError: Nothing says what to evaluate on.
        """
        files, split, chosen = self.part(part)
        return f"all records of {files.path}" if split is None else split.protocol(chosen)

    def _of(self, path: str | None) -> DataConfig:
        # Without the queue, which assigns each file once, to train on it: what is evaluated on is read again.
        return replace(
            self,
            path=path,
            train=None,
            watch=None,
            kafka=None,
            stop_after=None,
            evaluate=None,
            predict=None,
            split=None,
            queue=None,
        )

    def pipeline(
        self,
        part: Part,
        batch_size: int,
        *,
        types: Mapping[str, torch.dtype] | None = None,
        histories: Sequence[HistoryConfig] = (),
        **options: Any,
    ) -> Pipeline:
        """Return the records for a purpose, in batches.

        Args:
            histories: The histories to build; see `HistoryConfig.from_spec`. They see all records, also those
                of other purposes that a split takes out of the same files, and begin with the events of
                `earlier` files.
            types: The columns to read and their types, as `FeatureSpec.source_columns`, for formats that
                would have to guess. What is to be predicted is read with all its columns, to be passed on.
            options: As `FileSource` takes them.

        Raises:
            ConfigError: Nothing says what to evaluate on.
        """
        from monolith.data.pipeline import Pipeline
        from monolith.data.splitting import last_filter, part_filter, times_in, types_for

        files, split, chosen = self.part(part)
        if types is not None:
            types = types_for(split, types)
            if part != "predict" and not files.columns:
                files = replace(files, columns=tuple(types))
        read = Pipeline(files.source(batch_size, types=types, **options))
        before = self.earlier(part) if histories else []
        if histories and self.kafka is not None and part != "train":
            _log.warning(
                "data: topics cannot be read again, so histories of %s begin without the events that were "
                "trained on",
                files.path,
            )
        for one in histories:
            known = None if types is None else {name: types[name] for name in one.inputs if name in types}
            sources = [
                partial(
                    replace(each, columns=each.columns or tuple(known or ())).source, batch_size, types=known
                )
                for each in before
            ]
            read = read.history(one, earlier=_Events(one.name, sources) if sources else None)
        if split is None:
            return read
        several = tuple(types) if types is not None else None
        times = () if types is None else times_in(types)
        if split.last_of is None:
            keep = part_filter(chosen, split, several, times)
        else:
            decide = files if several is None else replace(files, columns=several, queue=None)
            keep = last_filter(chosen, split, decide.source(_AT_ONCE, types=types), several)
        made = {name for one in histories for name in one.columns}

        def keeps(records: Records) -> Tensor:
            # What is known of a record is what its file says. To select columns moves their values.
            return keep(records.select(n for n in records.columns if n not in made) if made else records)

        kept = read.filter(keeps, any_thread=True)
        # Filling up the batches of a live stream would delay them.
        return kept if files.live else kept.rebatch(batch_size)

    def patterns(self) -> list[str]:
        """Return the patterns whose files are read.

        Raises:
            ConfigError: There is no path.
        """
        from monolith.data.files.discovery import gen_patterns
        from monolith.filesystem import join

        if self.watch is not None:
            return [self.watch]
        if self.path is None:
            each = (
                "; with data.train and data.evaluate, read `data.pipeline(part, ...)`" if self.train else ""
            )
            raise ConfigError(f"data: path is not set; give it as data.path of the run, or to the task{each}")
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

    def file_format(self, example: str, types: Mapping[str, torch.dtype] | None = None) -> Format:
        """Return the format that `format` names, or else the one that the name of an example tells.

        Args:
            types: Of columns, for a format that would have to guess; then the caller also splits lists.
        """
        from monolith.data.formats import FramedFormat, Framing, format_of

        if types is not None:
            return format_of(example, self.format, types=types)
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

    def source(
        self, batch_size: int, *, types: Mapping[str, torch.dtype] | None = None, **options: Any
    ) -> FileSource | KafkaSource:
        """Return a source of these files, or topics.

        Args:
            types: Of columns; see `file_format`. Messages of topics need them.
            options: As `FileSource` takes them: epochs, shuffle, bad, ...

        Raises:
            ConfigError: Messages are read without types; or an option is not for a stream.
        """
        from monolith.data.files.bad_records import BadRecordPolicy
        from monolith.data.files.shared_queue import SharedFileQueue
        from monolith.data.files.source import FileSource

        if self.kafka is not None:
            return self._topics(self.kafka, batch_size, types, options)
        bad = BadRecordPolicy(max_fraction=self.max_unreadable)
        options = {"bad": bad, "threads": self.reading_threads, **options}
        if self.watch is not None:
            return self._watched(self.watch, batch_size, types, options)
        files = self.files()
        form = self.file_format(files[0], types)
        columns = self.columns or None
        if self.queue is None:
            return FileSource(files, form, batch_size=batch_size, columns=columns, **options)
        queue = SharedFileQueue(self.queue)
        queue.add(files)
        return FileSource(queue, form, batch_size=batch_size, columns=columns, **options)

    def _watched(
        self, pattern: str, batch_size: int, types: Mapping[str, torch.dtype] | None, options: dict[str, Any]
    ) -> FileSource:
        from monolith.data.files.discovery import Watch
        from monolith.data.files.growing import can_grow
        from monolith.data.files.source import FileSource

        form = self.file_format(pattern, types)
        grows = can_grow(form, [pattern])
        watch = Watch(pattern, grows=grows, every=None if grows else _LOOK_EVERY, stop_after=self.stop_after)
        columns = self.columns or None
        return FileSource(
            watch, form, batch_size=batch_size, columns=columns, max_wait=self.max_wait, **options
        )

    def _topics(
        self,
        topics: TopicsConfig,
        batch_size: int,
        types: Mapping[str, torch.dtype] | None,
        options: dict[str, Any],
    ) -> KafkaSource:
        from monolith.data.kafka import KafkaSource

        if types is None or options:
            found = "no types of columns" if types is None else f"the options {', '.join(options)}"
            raise ConfigError(
                f"data.kafka: messages are read by the types that features say, and this task gives {found}; "
                "leave the task to the config, or take a setting of type KafkaConfig"
            )
        if self.columns:
            types = {name: dtype for name, dtype in types.items() if name in self.columns}
        decode = topics.decoder(types, self.reading_threads)
        reading = topics.reading(batch_size, self.max_wait)
        return KafkaSource(reading, decode, threads=self.reading_threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataServiceConfig(Checked):
    """A data service: other processes read the data and assign its batches to trainers."""

    enabled: bool = False
    """Whether the task reads from the data service."""
    dispatcher: str | None = None
    """The address of the data service's dispatcher, host:port."""
    folder: str | None = None
    """The local folder in which the dispatcher of the run stores how far the data was read; None is
    data_service in the model_dir."""
    readers: int = 2
    """How many files a data worker of the run reads at the same time."""
    extra_workers: int = 0
    """How many data workers each worker starts on its machine, on the cores that it leaves idle."""
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
        """Return a source of this trainer's chunks, see `DataServiceSource`; None if it is not enabled.

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


@dataclass(frozen=True, slots=True)
class _Events:
    """The records of several sources, one after the other, each time from the beginning."""

    history: str
    sources: Sequence[Callable[[], Stream[Records]]]

    def __iter__(self) -> Iterator[Records]:
        from monolith.data.source import closed_after

        for make in self.sources:
            try:
                source = make()
            except DataError as cause:
                raise DataError(
                    f"history {self.history!r} begins with the events of the data that was trained on, which "
                    f"is not there: {cause}. Set data.train to it, or to none to begin without them."
                ) from cause
            with closed_after(source) as batches:
                yield from batches


def _day_after(day: str) -> str:
    return f"{datetime.strptime(day, '%Y%m%d') + timedelta(days=1):%Y%m%d}"
