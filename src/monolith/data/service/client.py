"""The trainer's side of the data service: a source of the chunks that this trainer gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from monolith import concurrency
from monolith.data.records import Records
from monolith.data.service.messages import (
    POLL,
    Address,
    Clock,
    DataCaller,
    PortGuard,
    StoppedError,
    UnreachableError,
    from_batch,
)
from monolith.data.shuffling import Epochs
from monolith.data.source import Position, Shard, ShardChoice, Source, WorkQueueSource
from monolith.errors import (
    ConfigError,
    DataError,
    NotRepeatableError,
    RestoreError,
    StoppedWhileWaitingError,
)

_log = logging.getLogger(__name__)

_KIND = "data_service"
_CLOSE_S = 3.0
"""How long the end of an iteration waits for a call that is under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    address: Address
    trainer: str
    guard: PortGuard | None
    prefetch: int
    patience: timedelta
    clock: Clock

    def caller(
        self, address: Address, *stops: concurrency.Event, patience: timedelta | None = None
    ) -> DataCaller:
        """Return a caller that is as patient as the settings say, unless it is told otherwise."""
        given = self.patience if patience is None else patience
        return DataCaller(address, guard=self.guard, patience=given, stops=stops, clock=self.clock)


class DataServiceSource(Source, WorkQueueSource):
    """Yields this trainer's chunks of a job.

    Each chunk of an epoch goes to one trainer. A position is the number of the trainer's turn: restored
    to it, the very same chunks come again, in the same order, then free ones. A trainer that
    starts without a position starts at turn 0, with the first chunk that was ever given to its name.

    Args:
        dispatcher: host:port, or a function that finds it.
        trainer: Its name, the same after a restart and unique in the job. If there are several trainers (see
            `read_shard`), "-" and their number are added.
        guard: The credentials that dispatcher and data workers demand, if they do.
        prefetch: Chunks to fetch ahead; a slow trainer may still have so many when the rest are done.
        patience: How long the dispatcher, or all data workers, may be unreachable.
    """

    live = False  # a job is of files that are there

    def __init__(
        self,
        dispatcher: Address,
        trainer: str,
        *,
        guard: PortGuard | None = None,
        prefetch: int = 4,
        patience: timedelta = timedelta(minutes=5),
        clock: Clock = concurrency.monotonic,
    ) -> None:
        if not trainer or prefetch < 1:
            raise ConfigError("data service: a trainer needs a name, and a prefetch of at least 1")
        self._choice = ShardChoice("data service")
        self._base, self._named = trainer, False
        self._settings = _Settings(
            address=dispatcher,
            trainer=trainer,
            guard=guard,
            prefetch=prefetch,
            patience=patience,
            clock=clock,
        )
        self._job: str | None = None
        self._turn = 0
        self._interrupted = concurrency.Event()
        # Of the iteration under way: set, it also ends calls that are being repeated until they are answered.
        self._stop = concurrency.Event()
        self._until = concurrency.Event()

    def read_until(self, stop: concurrency.Event) -> None:
        self._until = stop

    def read_shard(self, shard: Shard) -> None:
        """Become one of several trainers, which together get all chunks."""
        self._choice.choose(shard)

    def read_epochs(self, epochs: Epochs) -> None:  # noqa: ARG002
        raise NotRepeatableError(
            "a data service counts epochs itself, for all trainers together: give them to the source of the "
            "task, as in `self.data.source(batch_size=512, epochs=3)`, or to the dispatcher as --epochs"
        )

    def __iter__(self) -> Iterator[Records]:
        self._settle()
        # Before `_interrupted` is looked at: `interrupt` sets that first, so one of the two threads sees the
        # other.
        stop = self._stop = concurrency.Event()
        if self._interrupted.is_set():
            return
        until = self._until
        try:
            fetcher = _Fetcher(self._settings, self._job, self._turn, stop, until)
        except StoppedError:
            return
        try:
            self._job = fetcher.job
            for records in fetcher.until(until):
                self._turn += 1  # before the yield: a position taken meanwhile includes this chunk
                yield records
        finally:
            fetcher.close()

    def position(self) -> Position:
        self._settle()
        return {"kind": _KIND, "job": self._job, "trainer": self._trainer, "turn": self._turn}

    def restore(self, position: Position) -> None:
        _check(position)
        self._settle()
        if position["trainer"] != self._trainer:
            raise RestoreError(
                f"cannot restore trainer {self._trainer!r}: the position is of {position['trainer']!r}. "
                "Give each trainer the position that was saved under its own name."
            )
        self._job, self._turn = position["job"], position["turn"]

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Release the chunks after the positions of several trainers; return the positions of the new
        trainers, which get these chunks.

        Raises:
            RestoreError: A position is of another kind or job; or the chunks after it went to other trainers.
            DataError: The dispatcher does not answer.
        """
        for position in positions:
            _check(position)
        names = [self._base] if workers == 1 else [f"{self._base}-{one}" for one in range(workers)]
        jobs = {position["job"] for position in positions} - {None}
        try:
            with self._caller() as caller:
                for position in positions:
                    where = {name: position[name] for name in ("trainer", "job", "turn")}
                    caller.call("release", **where)
                saved = {position["trainer"] for position in positions}
                for name in caller.call("status")["trainers"]:
                    if name not in saved and self._is_ours(name):  # of a run that saved nothing
                        caller.call("release", trainer=name)
                known = caller.call("status")["trainers"]
        except (UnreachableError, StoppedError) as cause:
            raise self._gave_up("the dispatcher does not redistribute", cause) from cause
        turns = {name: known[name]["turns"] if name in known else 0 for name in names}
        job = min(jobs, default=None)
        return [{"kind": _KIND, "job": job, "trainer": name, "turn": turns[name]} for name in names]

    @property
    def work_queue(self) -> WorkQueueSource:
        return self

    def give_back(self, position: Position) -> Position:
        """Release the chunks after a trainer's position to other trainers; see `WorkQueueSource`.

        Raises:
            DataError: The dispatcher does not answer.
        """
        _check(position)
        try:
            with self._caller() as caller:
                caller.call("release", **{name: position[name] for name in ("trainer", "job", "turn")})
        except (UnreachableError, StoppedError) as cause:
            raise self._gave_up("the dispatcher takes nothing back", cause) from cause
        return position  # the trainer would get the chunks after it, and there are none

    def defer_to_chief(self) -> None:
        """Do nothing: closing the source does not free the chunks of a trainer."""

    def take_back(self, others: Sequence[Position]) -> bool:
        """Release what trainers of this name were given and have not trained; see `WorkQueueSource`.

        Raises:
            DataError: The dispatcher does not answer.
        """
        trained = {position["trainer"]: position["turn"] for position in others}
        self._settle()
        freed = 0
        try:
            with self._caller(self._interrupted) as caller:
                for name, known in caller.call("status")["trainers"].items():
                    saved = trained.get(name, known["acknowledged"])
                    if name != self._trainer and self._is_ours(name) and known["turns"] > saved:
                        freed += caller.call("release", trainer=name, turn=saved)["chunks"]
        except StoppedError:
            return freed > 0
        except UnreachableError as cause:
            raise self._gave_up("the dispatcher takes nothing back", cause) from cause
        return freed > 0

    def interrupt(self) -> None:
        self._interrupted.set()
        self._stop.set()

    def _is_ours(self, trainer: str) -> bool:
        """Whether a trainer is this one, or one of several with its name."""
        base, dash, number = trainer.rpartition("-")
        return trainer == self._base or (base == self._base and bool(dash) and number.isdecimal())

    def adopt(self, position: Position, end: Position | None = None) -> Position:  # noqa: ARG002
        """Refuse: a chunk is given to one trainer.

        Raises:
            RestoreError: Always.
        """
        raise RestoreError(
            "the records that a stage on top of the data service buffers cannot be moved; have the data "
            "workers cut chunks of the batch size, and leave out rebatch and shuffle"
        )

    def commit(self, position: Position) -> None:
        """Acknowledge a position that a checkpoint contains."""
        self.acknowledge(position)

    def acknowledge(self, position: Position) -> None:
        """Tell the dispatcher that a position was saved for good: all before it need not come again.

        Call it after the checkpoint that contains the position is complete. It lets the dispatcher forget
        old chunks, and give only later chunks to other trainers if this one is given up.
        """
        if position["job"] is None:
            return
        self._settle()
        try:
            with self._caller() as caller:
                caller.call("acknowledge", trainer=self._trainer, turn=position["turn"])
        except (UnreachableError, StoppedError) as cause:
            error = self._gave_up("cannot acknowledge to the dispatcher", cause)
            if isinstance(error, DataError):
                raise error from cause
            # The checkpoint has the position: the restored trainer gets the chunks after it.
            _log.warning("%s", error)

    def _caller(self, *stops: concurrency.Event) -> DataCaller:
        """Return a caller of the dispatcher that, once this trainer is to wait no more, calls once."""
        address = self._settings.address
        if self._until.is_set():
            return self._settings.caller(address, patience=timedelta())
        return self._settings.caller(address, *stops, self._until)

    def _gave_up(self, what: str, cause: Exception) -> DataError | StoppedWhileWaitingError:
        """Return the error for a call that the dispatcher did not answer."""
        kind = StoppedWhileWaitingError if self._until.is_set() else DataError
        return kind(f"data service: {what}: {cause}")

    def close(self) -> None:
        """End an iteration that another thread may be in: it must take no chunks any more."""
        self._stop.set()

    @property
    def _trainer(self) -> str:
        return self._settings.trainer

    def _settle(self) -> None:
        """Settle the name of this trainer among several; once."""
        if self._named:
            return
        self._named, shard = True, self._choice.settle()
        if shard.workers > 1:
            trainer = f"{self._settings.trainer}-{shard.worker}"
            self._settings = replace(self._settings, trainer=trainer)


def _check(position: Position) -> None:
    """Refuse a position of another source."""
    if not isinstance(position, Mapping) or position.get("kind") != _KIND:
        raise RestoreError(
            f"cannot restore a data service source: {position!r:.200} is not a position of one"
        )
    turn, job = position.get("turn"), position.get("job", "")
    if not isinstance(turn, int) or turn < 0 or "trainer" not in position or job == "":
        raise RestoreError(f"cannot restore a data service source: {position!r:.200} makes no sense")


class _Fetcher:
    """One iteration: a thread that prefetches chunks, and the chunks that are ready."""

    def __init__(
        self,
        settings: _Settings,
        job: str | None,
        turn: int,
        stop: concurrency.Event,
        until: concurrency.Event,
    ) -> None:
        self._settings = settings
        self._trainer = settings.trainer
        self._turn = turn
        self._prefetch = settings.prefetch
        self._patience = settings.patience.total_seconds()
        self._clock = settings.clock
        self._stop = stop
        # From the thread to the iteration, in the order of turns; None is the end. Its size bounds how many
        # chunks this trainer holds that others could train on. All callers below belong to the thread.
        self._ready: concurrency.Queue[Records | Exception | None] = concurrency.Queue(settings.prefetch)
        self._workers: dict[str, DataCaller] = {}
        self._dispatcher = settings.caller(settings.address, self._stop, until)
        try:
            # Its own session: if the connection breaks, this call may arrive twice, the second time after
            # calls of the session that it began.
            session = concurrency.token_hex(16)
            answer = self._ask("attach", job=job, turn=turn, session=session)
        except BaseException:
            self._dispatcher.close()
            raise
        self.job = str(answer["job"])
        self._session = answer["session"]
        # A daemon: a dispatcher that hangs must not keep the process from ending.
        self._thread = concurrency.Thread(target=self._run, name=f"fetch-{settings.trainer}", daemon=True)
        self._thread.start()

    def until(self, stop: concurrency.Event) -> Iterator[Records]:
        """Yield chunks until the data or the iteration ends, or an event is set."""
        while not self._stop.is_set() and not stop.is_set():
            try:
                one = self._ready.get(timeout=POLL)
            except concurrency.Empty:
                continue
            if one is None:
                return
            if isinstance(one, Exception):
                raise one
            yield one

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("data service: a call is not answered; it is left behind")
            return  # a connection is closed by the thread that uses it, if at all
        for caller in (self._dispatcher, *self._workers.values()):
            caller.close()

    def _run(self) -> None:
        end: Exception | None = None
        try:
            self._fetch_all()
        except StoppedError:
            return
        except Exception as error:  # raised again by the iteration
            end = error
        while not self._stop.is_set():
            with suppress(concurrency.Full):
                self._ready.put(end, timeout=POLL)
                break

    def _fetch_all(self) -> None:
        while not self._stop.is_set():
            # Asking for a turn assigns a chunk for good, so ask only for as many as fit into the queue.
            most = max(1, self._prefetch - self._ready.qsize())
            answer = self._ask("turns", session=self._session, turn=self._turn, most=most, wait=POLL)
            if answer["over"]:
                return
            for chunk in answer["chunks"]:
                self._put(self._fetch(chunk, answer["workers"]))
                self._turn += 1

    def _put(self, records: Records) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(records, timeout=POLL)
                return
            except concurrency.Full:  # the trainer takes its time; the dispatcher should know that it lives
                self._ask("turns", session=self._session, turn=self._turn, most=0, wait=0.0)
        raise StoppedError

    def _fetch(self, chunk: dict[str, Any], workers: list[str]) -> Records:
        """Return a chunk from the worker that has it, or from any other, which then reads it again."""
        ticket = {"job": self.job, **{name: chunk[name] for name in ("epoch", "number", "sequence")}}
        give_up: float | None = None
        while True:
            failure: Exception | None = None
            for worker in dict.fromkeys([chunk["worker"], *workers]):
                try:
                    records = from_batch(self._worker(worker).fetch(ticket))
                except ConfigError:
                    raise
                except DataError as error:  # gone, or it cannot read the split: perhaps another can
                    failure = error
                    self._workers.pop(worker).close()
                    continue
                if records.size != chunk["size"]:
                    raise DataError(
                        f"data service: {worker} sent {records.size} records of {chunk['split']!r}, "
                        f"not {chunk['size']}"
                    )
                return records
            give_up = self._clock() + self._patience if give_up is None else give_up
            if self._clock() >= give_up:
                raise DataError(
                    f"data service: no data worker has chunk {chunk['sequence']} of {chunk['split']!r}; "
                    f"{len(workers)} are alive: {failure}"
                ) from failure
            # Ask the dispatcher only which workers are alive by now.
            self._stop.wait(min(POLL, self._patience))
            workers = self._ask("turns", session=self._session, turn=self._turn, most=0, wait=0.0)["workers"]

    def _worker(self, address: str) -> DataCaller:
        if address not in self._workers:
            self._workers[address] = self._settings.caller(address, self._stop, patience=timedelta())
        return self._workers[address]

    def _ask(self, name: str, **body: Any) -> dict[str, Any]:
        try:
            return self._dispatcher.call(name, trainer=self._trainer, **body)
        except UnreachableError as cause:
            raise DataError(
                f"data service: trainer {self._trainer!r} lost the dispatcher: {cause}. Start it again with "
                "its folder; the trainer resumes from its last checkpoint."
            ) from cause
