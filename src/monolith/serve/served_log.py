"""The log of served features: requests, the features that the model was given, and its answers.

    answer ──offer──► queue, bounded by rows ──► one thread: features, records ──► files, or a Kafka topic
             never waits; drops and counts

The thread gathers the requests of a quarter of a second, reads their features once more by the reader of the
version that answered, all together, and writes them as `monolith.data.served` lays out: tf.Examples, which
are encoded by the core. An answer waits for none of it: it only puts references into the queue.

Files are TFRecords in a folder, which only their user can read:

    served-20261118T053200-4f1c2a9b-000001.tfrecord        complete: it never changes again
    served-20261118T053200-4f1c2a9b-000002.tfrecord.open   being written, and locked by its server

A file gets its name without `.open` when it is complete, so a reader of `*.tfrecord` never finds half of a
record. If a server is killed, the next one on the same folder finds the file unlocked, cuts off what may be
half a record at its end, and completes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Protocol

from monolith import concurrency, filesystem, native
from monolith.concurrency import Clocks
from monolith.data.formats.payloads import PayloadWriter
from monolith.data.kafka import KafkaSink
from monolith.data.records import Records
from monolith.data.served import REQ_ID, ServedRequest, served_records
from monolith.errors import ConfigError, FilesystemError, MonolithError, RequestError
from monolith.observe import Metrics
from monolith.serve.config import ServeLogConfig
from monolith.serve.predictor import Predictor
from monolith.serve.server.batching import ModelOutputs
from monolith.serve.server.tensors import RequestColumns, merged
from monolith.sync.channel_url import parse_channel_url
from monolith.table.hashing import mix_one

_log = logging.getLogger(__name__)

KIND = "tf_example"
"""The format of a record: of a file, and of a Kafka message."""
SUFFIX = ".tfrecord"
OPEN = ".open"
"""Behind the name of a file that is being written."""
GATHER_S = 0.25
"""Seconds for which requests are gathered before they are written. Measured, of requests of 32 rows: 4.9 ms
of processor time for one by itself, 2.0 each for 3 together, 0.5 for 30, 0.4 for 128."""
BATCH_ROWS = 4096
"""Rows of one write, about."""
ID_CHARACTERS = 256
"""Longest ID of a request: it is written with each of its rows."""
QUIET_S = 60.0
"""Seconds between two log lines about records that were lost."""


class LogSink(Protocol):
    """Where records go: files of a folder, or a Kafka topic."""

    def write(self, records: Records) -> None: ...

    def due(self) -> float | None:
        """Return in how many seconds `tick` wants to be called; None if not at all."""

    def tick(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Answered:
    """An answered request in the queue."""

    model: Predictor
    columns: RequestColumns
    about: ServedRequest


class ServedLog:
    """Logs served features on a thread of its own. Thread-safe.

    Args:
        metrics: Counts rows that were logged and dropped.

    Raises:
        ConfigError: The destination makes no sense.
        FilesystemError: The folder cannot be written.
    """

    def __init__(
        self,
        config: ServeLogConfig,
        metrics: Metrics,
        *,
        clocks: Clocks | None = None,
        sink: LogSink | None = None,
    ) -> None:
        self._config = config
        self._clocks = clocks or Clocks()
        self._sink = sink or open_sink(config, self._clocks)
        self._rows = metrics.counter("serve_log_rows", "Rows written to the log of served features")
        self._dropped = metrics.counter(
            "serve_log_dropped",
            "Rows that are missing from the log of served features, by reason: the queue was full, or they "
            "could not be written",
            ("reason",),
        )
        for reason in ("full", "failed"):  # a dashboard shows 0, not nothing
            self._dropped.inc(0, reason=reason)
        self._prefix = concurrency.token_hex(8)
        self._numbers = count()
        self._told = -QUIET_S
        self._lock = concurrency.Lock()  # guards the queue; never held while something is written
        self._changed = concurrency.Condition(self._lock)
        self._queue: deque[_Answered] = deque()
        self._queued_rows = 0
        self._closing = False
        self._idle = True
        """Whether the thread waits for a first request."""
        self._thread = concurrency.Thread(target=self._run, name="served-log", daemon=True)
        self._thread.start()

    def check_id(self, request_id: str) -> str:
        """Return the ID of a request, or a new one if its client gave none.

        Raises:
            RequestError: It is too long to be written with each row.
        """
        if len(request_id) > ID_CHARACTERS:
            raise RequestError(
                f"the ID of the request has {len(request_id)} characters; this server logs IDs, of at most "
                f"{ID_CHARACTERS}"
            )
        return request_id or f"{self._prefix}-{next(self._numbers)}"

    def offer(
        self,
        request_id: str,
        name: str,
        model: Predictor,
        columns: RequestColumns,
        found: ModelOutputs,
    ) -> None:
        """Log an answered request, unless it is not in the sample, or the queue is full. Never waits.

        Args:
            name: The served name of the model.
            columns: They must not change any more.
        """
        fraction = self._config.fraction
        if (
            fraction < 1
            and mix_one(zlib.crc32(request_id.encode("utf-8", "backslashreplace"))) >= fraction * 2.0**64
        ):
            return
        about = ServedRequest(
            id=request_id,
            time=int(self._clocks.wall()),
            model=name,
            version=model.version,
            step=int(found.freshness.get("step", 0)),
            rows=columns.rows,
            scores=found.outputs,
        )
        with self._lock:
            full = self._closing or self._queued_rows + columns.rows > self._config.queue_rows
            if not full:
                self._queue.append(_Answered(model, columns, about))
                self._queued_rows += columns.rows
                if self._idle:
                    self._changed.notify()
        if full:
            self._dropped.inc(columns.rows, reason="full")

    def close(self, within: timedelta = timedelta(seconds=5)) -> None:
        """Write what is queued and complete the file, within a time. Again does nothing."""
        with self._lock:
            self._closing = True
            self._changed.notify()
        self._thread.join(within.total_seconds())

    # The thread

    def _run(self) -> None:
        try:
            while self._wait():
                self._write(self._take())
        finally:
            try:
                self._sink.close()
            except Exception as error:
                self._tell("cannot complete the log of served features", error)

    def _wait(self) -> bool:
        """Wait for requests; return False after the last at the end."""
        while True:
            with self._lock:
                self._idle = True
                self._changed.wait_for(lambda: self._queue or self._closing, self._sink.due())
                self._idle = False
                if self._queue or self._closing:
                    if not self._closing:
                        self._changed.wait_for(lambda: self._closing, GATHER_S)
                    return bool(self._queue)
            self._sink.tick()

    def _take(self) -> list[_Answered]:
        """Take requests of one version and layout from the front of the queue."""
        with self._lock:
            first = self._queue[0]
            taken: list[_Answered] = []
            rows = 0
            while self._queue and rows < BATCH_ROWS:
                one = self._queue[0]
                if one.model is not first.model or one.columns.layout != first.columns.layout:
                    break
                if one.about.scores.keys() != first.about.scores.keys():
                    break
                taken.append(self._queue.popleft())
                rows += one.columns.rows
            self._queued_rows -= rows
        return taken

    def _write(self, taken: Sequence[_Answered]) -> None:
        rows = sum(one.columns.rows for one in taken)
        try:
            batch = taken[0].model.read(merged([one.columns for one in taken]))
            self._sink.write(served_records(batch, [one.about for one in taken]))
            self._rows.inc(rows)
        except Exception as error:  # whatever it is, answers and later records must not suffer
            self._dropped.inc(rows, reason="failed")
            self._tell(f"cannot log {rows} rows of served features", error)
        self._sink.tick()

    def _tell(self, what: str, error: Exception) -> None:
        now = self._clocks.timer()
        if now - self._told >= QUIET_S:
            self._told = now
            _log.error(
                "%s, and the server still answers: %s (said once a minute; serve_log_dropped counts)",
                *(what, error),
                exc_info=None if isinstance(error, (MonolithError, OSError)) else error,
            )


def open_sink(config: ServeLogConfig, clocks: Clocks) -> LogSink:
    """Open where the log goes.

    Raises:
        ConfigError: It is neither a local folder nor a topic.
        FilesystemError: The folder cannot be made.
        MissingExtraError: The client of Kafka is not installed.
    """
    if config.to.startswith("kafka:"):
        url = parse_channel_url(config.to)
        return TopicSink(url.addresses, url.name, config.kafka_settings)
    if filesystem.is_remote(config.to):
        raise ConfigError(
            f"serve.log.to: {config.to!r} must be a local folder, to which files are appended, or "
            "kafka://broker:port/topic. Copy complete files (*.tfrecord) to a remote store."
        )
    return FolderSink(Path(config.to), config, clocks)


class FolderSink:
    """Files in a folder; see the drawing above. For one thread."""

    def __init__(self, folder: Path, config: ServeLogConfig, clocks: Clocks) -> None:
        self._folder = folder
        self._config = config
        self._clocks = clocks
        self._encoder = PayloadWriter(KIND)
        self._token, self._numbers = concurrency.token_hex(4), count(1)
        self._file: int | None = None
        self._path = folder
        self._bytes = 0
        self._ends_at = 0.0
        try:
            if not folder.is_dir():
                filesystem.make_dirs(folder.parent)
                filesystem.private_folder(folder)
            recover(folder)
        except OSError as cause:
            raise FilesystemError(f"serve.log.to: cannot write to {folder}: {cause}") from cause

    def write(self, records: Records) -> None:
        data = native.seal_tfrecords(*self._encoder.encode(records))
        if self._file is None:
            self._begin()
        assert self._file is not None
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            # Half a record may be at the end, as on a full disk: nothing behind it could be read. The next
            # write begins another file, and this one is completed as that of a server that was killed.
            os.close(self._file)
            self._file = None
            with suppress(OSError):
                recover(self._folder)
            raise
        self._bytes += len(data)

    def due(self) -> float | None:
        return None if self._file is None else max(0.0, self._ends_at - self._clocks.timer())

    def tick(self) -> None:
        if self._file is not None and (
            self._bytes >= self._config.file_bytes or self._clocks.timer() >= self._ends_at
        ):
            self._complete()

    def close(self) -> None:
        if self._file is not None:
            self._complete()

    def _begin(self) -> None:
        # By the time of its first record: names in order are times in order, whatever server wrote them.
        begun = f"{datetime.fromtimestamp(self._clocks.wall(), UTC):%Y%m%dT%H%M%S}"
        self._path = self._folder / f"served-{begun}-{self._token}-{next(self._numbers):06}{SUFFIX}"
        path = f"{self._path}{OPEN}"
        file = filesystem.open_regular(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, own=True)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file, self._bytes = file, 0
        self._ends_at = self._clocks.timer() + self._config.file_age.total_seconds()

    def _complete(self) -> None:
        file, self._file = self._file, None
        assert file is not None
        try:
            os.fsync(file)
            Path(f"{self._path}{OPEN}").rename(self._path)
        finally:
            os.close(file)
        if self._config.max_files is not None:
            files = sorted(path for path in self._folder.glob(f"served-*{SUFFIX}") if path.is_file())
            for old in files[: -self._config.max_files]:
                with suppress(OSError):  # another server removes it, or another user put it there
                    old.unlink()


def recover(folder: Path) -> list[str]:
    """Complete the files of servers that were killed; return their names. What may be half a record is cut
    off. Files that another user may have put there are left alone."""
    done = []
    for path in sorted(folder.glob(f"served-*{SUFFIX}{OPEN}")):
        try:
            descriptor = filesystem.open_regular(path, os.O_RDWR, own=True)
        except FileNotFoundError:  # another server has completed it
            continue
        except OSError as error:
            _log.warning("left alone a file that is not of this log: %s", error)
            continue
        with suppress(FileNotFoundError), os.fdopen(descriptor, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its server is alive
            if not path.exists():
                continue
            data = file.read()
            whole = native.split_tfrecords(data).consumed
            file.truncate(whole)
            os.fsync(file.fileno())
            if whole:
                path.rename(complete := path.with_name(path.name.removesuffix(OPEN)))
                done.append(complete.name)
                _log.warning(
                    "completed %s, which a server had not closed; %d bytes of half a record were cut off",
                    *(complete, len(data) - whole),
                )
            else:
                path.unlink()
    return done


class TopicSink:
    """A Kafka topic with one message for each record, by the ID of its request. For one thread."""

    def __init__(
        self, servers: Sequence[str], topic: str, settings: Mapping[str, str | int | float | bool]
    ) -> None:
        self._sink = KafkaSink(servers, topic, settings=settings)
        self._encoder = PayloadWriter(KIND)

    def write(self, records: Records) -> None:
        self._sink.send(self._encoder(records), [texts[0] for texts in records.strings(REQ_ID)])

    def due(self) -> float | None:
        return None

    def tick(self) -> None:
        pass

    def close(self) -> None:
        self._sink.flush(timedelta(seconds=5))
