"""The batches of one training process: its source, the position in it, and the prefetch pipeline on top.

The position is that of the last batch trained on, not of the last one read: a checkpoint resumes with the
next record to train. Three things move it:

    a step              to the position after its batch
    a restore           to the position of a checkpoint; batches read ahead are dropped
    an assignment       by the chief, if the data is a work queue; batches read ahead are dropped, too

The pipeline reads on its own thread, so whatever moves the position closes it first. The next `next` opens
it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monolith import concurrency
from monolith.checkpoint.folder.state_files import absolute_path
from monolith.data import Epochs, Shard, Stream, WorkQueueSource, as_stream
from monolith.data.source import Position
from monolith.errors import ConfigError, DataError, NotRepeatableError, NotShareableError
from monolith.feature import Batch
from monolith.runtime.coordinator import Coordinator, Membership
from monolith.runtime.prefetch import PrefetchPipeline, Silence, WaitForData
from monolith.runtime.progress import order_of, positions_of, same_order, split_position
from monolith.train.config import TrainConfig
from monolith.train.model import LookedUp, Model
from monolith.train.task import Mode, Task

LIVE_UPDATE_AFTER_S = 0.002
"""How long the update of a batch of a live stream waits for the next batch, to be sent together with it.
Servers publish it only after the update, so the wait is part of every answer's age."""


STOP_WITHIN_S, READ_WITHIN_S = 3.0, 30.0
"""How long a source may stay in a read that is to end: if the process was asked to stop, and otherwise."""


class ReadBatch(NamedTuple):
    """A batch, and the position of the source after it."""

    batch: Batch
    position: Position | None
    """None if it is empty, and not of the source; see `lockstep`."""
    at: float
    """When it was read, in Unix seconds."""


_Pipeline = PrefetchPipeline[ReadBatch, Any]
"""The second type is `LookedUp`; for `fresh_rows`, the gathered IDs of a lookup in the step."""


OpenData = Callable[[Shard, Epochs | None, str], Stream[Batch]]
"""Opens the data of a task: the shard to read, how often, and the model_dir of the run."""


def open_data(
    task: Task, shard: Shard, epochs: Epochs | None = None, model_dir: str | None = None
) -> Stream[Batch]:
    """Return the data to train on, or one shard of it.

    Args:
        model_dir: Names the run, see `Stream.read_for`: one process at a time trains in a folder.
        epochs: How often it is read; None leaves that to the task.

    Raises:
        ConfigError: It cannot be sharded, or cannot be read several times.
    """
    data = as_stream(task.dataset(Mode.TRAIN))
    try:
        if model_dir:
            data.read_for(absolute_path(model_dir))
        if epochs is not None:
            data.read_epochs(epochs)
        try:
            # Of a run with one worker, too: its KafkaSource then has all partitions at once and for good,
            # and need not wait until the group has noticed that a killed worker is gone.
            data.read_shard(shard)
        except NotShareableError:
            if shard.workers > 1:
                raise
    except BaseException as cause:
        data.close()
        if isinstance(cause, NotRepeatableError):
            raise ConfigError(
                f"train.epochs: task {task.name!r}: {cause}. Leave train.epochs out, or use a source of "
                "monolith.data that ends, such as FileSource or MemorySource."
            ) from cause
        if not isinstance(cause, NotShareableError):
            raise
        raise ConfigError(
            f"task {task.name!r}: its data cannot be sharded, so {shard.workers} workers would each train "
            f"on all of it: {cause}. Add that method, or use a source of monolith.data, such as FileSource "
            "or KafkaSource."
        ) from cause
    return data


def _work_queue(stream: Stream[Batch], membership: Membership, config: TrainConfig) -> WorkQueueSource | None:
    """Return the work queue of the data if workers may join and leave; None if they may not.

    Raises:
        ConfigError: More workers may join than the data has shards.
    """
    found = stream.work_queue if membership.elastic and config.model_dir else None
    if found is None and membership.growable:
        raise ConfigError(
            "cluster.max_workers: workers can join a run only if its data is a work queue and it has a "
            "model_dir: a FileSource on a queue, a KafkaSource without an assignment, or the data service, "
            "without rebatch, shuffle and take of a pipeline on top of it. Set it to num_workers."
        )
    return found


def _shares_work(stream: Stream[Any] | None) -> bool:
    """Return whether which records a worker gets depends on how far other workers are, as with a queue."""
    while stream is not None:
        if (queue := stream.work_queue) is not None and not queue.chief_assigns:
            return True
        stream = stream.upstream
    return False


class TrainingBatches:
    """Batches of one process in order, with their rows looked up. Used by the training thread.

        read, rows = batches.next()              # waits for data; calls `idle` meanwhile
        batches.push(update_rows)                # behind the step, in an order that timing cannot change
        batches.note_trained(read)               # a checkpoint resumes after it

    Args:
        stream: The data; closed by `close`.
        idle: Called again and again while there is no data; returns whether to stop waiting.
        clock: Unix seconds, for when a batch was read.
        stop: Set once this process was asked to stop.
    """

    def __init__(
        self,
        model: Model,
        stream: Stream[Batch],
        coordinator: Coordinator,
        config: TrainConfig,
        *,
        idle: Callable[[], bool],
        clock: Callable[[], float],
        stop: concurrency.Event | None = None,
    ) -> None:
        self._model = model
        self._stop = concurrency.Event() if stop is None else stop
        self._reading = concurrency.Event()
        """Set to end the reading of the pipeline that is open, whatever its source waits for."""
        self.stream = stream
        self._membership = membership = coordinator.membership
        self._placement = coordinator.placement
        self._config = config
        self._idle = idle
        self._clock = clock
        self.work_queue = _work_queue(stream, membership, config)
        """Set if workers may join and leave."""
        assigned = self.work_queue is not None and self.work_queue.chief_assigns
        self.assigned_queue = self.work_queue if assigned else None
        """The same, if the chief assigns its work instead of a queue."""
        if self.assigned_queue is not None:
            self.assigned_queue.defer_to_chief()
        stream.read_until(self._stop)
        self.position = stream.position()
        """After the last batch trained on."""
        self.starts: list[Position] = []
        """The position of each worker, if a checkpoint named them."""
        here = model.is_local and not membership.lockstep
        if config.fresh_rows and config.prefetch and not here:
            raise ConfigError(
                "train.fresh_rows: rows of this run are on parameter servers or sharded across ranks, and "
                "are looked up ahead of the step. Set train.prefetch to 0 to look them up in the step, or "
                "leave train.fresh_rows out."
            )
        self._fresh = config.wants_fresh_rows and here
        """Whether rows are looked up when a step begins, after the updates of the steps before it."""
        self.send: Callable[[Batch], Any] | None = None
        """Sends a batch to a GPU, which looks its rows up in the step, in place of looking them up here."""
        self.send_ahead = False
        """Whether batches are sent by the thread that reads ahead: it brings rows from host memory, too."""
        self._pipeline: _Pipeline | None = None
        self.reassigned = False
        """Whether `position` was assigned by the chief, and the data is still to be read from there."""
        self.work_returned = False
        """Whether work of another worker returned to the queue since the pipeline was opened: the data, if
        it ended before, may have more now."""
        self._draining = False
        """Whether `drain` waits, so that ranks do not wait for data meanwhile."""

    @property
    def interrupted(self) -> bool:
        """Whether this process was asked to stop, and should not wait for data."""
        return self._stop.is_set()

    @property
    def live(self) -> bool:
        """Whether the data has events as they happen, so that it can be behind the clock."""
        return self.stream.live is not False

    def fraction_read(self) -> float | None:
        """Return the fraction of its data this process has trained on, if that is known. From any thread."""
        return self.stream.fraction_read(self.position)

    # Reading

    def next(self) -> tuple[ReadBatch, LookedUp] | None:
        """Return the next batch and its rows; None at the end, or if waiting was interrupted."""
        return self._open().next()

    def note_trained(self, read: ReadBatch) -> None:
        """Note that a batch was trained on, or is not to be: a checkpoint resumes after it."""
        if read.position is not None:
            self.position = read.position

    @property
    def exhausted(self) -> bool:
        """Whether the data ended and every batch was returned."""
        return self._open().exhausted

    def push(self, work: Callable[[], None]) -> None:
        """Do some work after the lookups so far and before all later ones; see `PrefetchPipeline.push`."""
        self._open().push(work)

    def drain(self) -> None:
        """Return when all work that was pushed is done: before every snapshot."""
        if self._pipeline is not None:
            self._draining = True
            self._pipeline.drain()
            self._draining = False

    def interrupt(self) -> None:
        """Stop waiting for data: a step that waits is not taken. From any thread."""
        # Before the pipeline is looked at: `_open` looks at this after it has made one, so one of the two
        # threads sees the other.
        self._stop.set()
        pipeline = self._pipeline  # once: the training thread may close it at any time
        # In lockstep all ranks must stop at the same step: the interrupt is exchanged at the next `at_step`.
        if pipeline is not None and not self._membership.lockstep:
            pipeline.interrupt()
            self._reading.set()  # without a thread that reads ahead, the training thread waits for the source

    def stop_waiting(self) -> None:
        """Stop waiting for data, on all ranks at the same place: called by `idle`."""
        self._stop.set()
        if self._pipeline is not None:
            self._pipeline.interrupt()

    def close_pipeline(self) -> bool:
        """Stop reading ahead; return False if the source is blocked in a read."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return True
        self._reading.set()
        # A source of this library ends its reading by then. One that does not is waited for only if the
        # data is read again, and not by a process that was asked to stop.
        if not pipeline.close(STOP_WITHIN_S if self.interrupted else READ_WITHIN_S):
            return False
        self.stream.read_until(self._stop)  # it may be asked for its position, or restored
        return True

    def close(self) -> None:
        self.close_pipeline()
        self.stream.close()

    def _open(self) -> _Pipeline:
        if self.reassigned:
            self.reassigned = False
            self._read_reassigned()
        if self._pipeline is not None:
            return self._pipeline
        config, model, lockstep = self._config, self._model, self._membership.lockstep
        self.work_returned = False
        self._reading = concurrency.Event()
        self.stream.read_until(self._reading)
        # A deterministic run waits for data however long it takes; but a worker on a queue may wait for
        # work that another one has, and must take part in pauses meanwhile.
        waits = config.deterministic and self.work_queue is None
        items: Iterator[ReadBatch | Silence] = self._placement.align(
            self._read(),
            empty=lambda: ReadBatch(Batch.of_none(), None, self._clock()),
            every=config.idle_after.total_seconds(),
            pressed=lambda: self.interrupted or self._draining,
            silences=not config.deterministic,
            shares_work=_shares_work(self.stream),
        )
        # Rows that are looked up in the step see every update: none may wait behind (`complete`).
        prepare: Callable[[Batch], Any] = model.prepare
        if lockstep:
            prepare = lambda batch: model.prepare(batch) if len(batch) else model.prepare_none()  # noqa: E731
        complete: Callable[[ReadBatch, Any], Any] | None = None
        if self.send is not None:
            # Steps are launched ahead of the device, so it has work while this thread sends a batch. A second
            # thread would compete for the interpreter: a step of 8,192 examples took 1.45 ms, not 1.2.
            send = self.send
            if self.send_ahead:
                prepare, complete = send, lambda _, sent: sent
            else:
                prepare, complete = lambda _: None, lambda read, _: send(read.batch)
        elif self._fresh:
            prepare, complete = model.gather, lambda read, gathered: model.prepare(read.batch, gathered)
        self._pipeline = pipeline = PrefetchPipeline(
            items,
            lambda read: prepare(read.batch),
            complete,
            ahead=config.prefetch,
            behind=config.async_push,
            waiting=WaitForData(
                patience=None if waits else config.idle_after.total_seconds(),
                update_after=LIVE_UPDATE_AFTER_S if self.stream.live and not waits else None,
                idle=self._idle,
                threaded=self.work_queue is not None,
            ),
            lockstep=lockstep,
        )
        if self.interrupted and not lockstep:
            pipeline.interrupt()
            self._reading.set()
        return pipeline

    def _read(self) -> Iterator[ReadBatch]:
        for batch in self.stream:
            yield ReadBatch(batch, self.stream.position(), self._clock())

    # Moving

    def reassign(self, position: Position) -> None:
        """Read from a position that the chief assigned, before the next step; all updates are done."""
        self.position, self.reassigned = position, True

    def _read_reassigned(self) -> None:
        assert self.assigned_queue is not None
        self.assigned_queue.interrupt()
        if not self.close_pipeline():
            raise DataError(
                f"task {self._model.task.name!r}: its data is still being read, so the work assigned to this "
                "worker cannot be read instead; it resumes from the last checkpoint when it is started again"
            )
        self.stream.restore(self.position)

    def read_from(self, position: Position) -> None:
        """Read from a position of a checkpoint."""
        self.close_pipeline()  # batches read ahead are not those that follow
        self.reassigned = False
        self.stream.restore(position)
        self.stream.commit(position)  # a kill may have come between the checkpoint and its commit
        self.position = position

    def restore(self, position: Position, saved_order: Mapping[str, Any] | None, *, rejoined: bool) -> None:
        """Resume as the chief from the positions of all workers, as a checkpoint holds them.

        Args:
            saved_order: The settings that the order of the data followed from then; see `order_of`.
            rejoined: Whether the other workers continued without this process, and keep their work.
        """
        self.close_pipeline()
        with same_order(saved_order, order_of(self._config)):
            if self.work_queue is None:
                size = self._membership.size
                self.starts = split_position(position, size, self.stream, resumed=rejoined)
                self.read_from(self.starts[self._membership.index])
            elif not rejoined:
                self.divide(positions_of(position))

    def divide(self, positions: Sequence[Position]) -> None:
        """Put all work back into the queue but that before these positions, and start with it."""
        size = self._membership.size
        if self.assigned_queue is None:
            self.starts = self.stream.redistribute(positions, size)
        else:
            everything = self.assigned_queue.collect(positions)
            self.starts = [everything, *[self.assigned_queue.give_back(everything)] * (size - 1)]
        self.read_from(self.starts[self._membership.index])
