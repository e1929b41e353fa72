"""A session of one worker of a fleet: its share of the data, rows and weights on servers."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from monolith.checkpoint import Part, StatePart
from monolith.data import Share, Stream, share_out
from monolith.data.source import Position, commit_to
from monolith.errors import ConfigError, NotShareableError, RetryableError
from monolith.feature import Batch
from monolith.model import EmbeddingOptimizer
from monolith.observe import Metrics
from monolith.store import ParameterServerStore, ServerGroup
from monolith.train.config import TrainConfig
from monolith.train.fleet.fleet import Fleet, State
from monolith.train.fleet.parts import ServedDense, ServedTables
from monolith.train.hook import Hook, Run
from monolith.train.metrics.metric_set import WindowRow
from monolith.train.positions import joined_positions, split_position
from monolith.train.session import Model, Session
from monolith.train.task import Mode, Task

_log = logging.getLogger(__name__)

DATA_ENDED = "the data ended"
RUN_IS_OVER = "the run is over"


class FleetSession(Session):
    """A session whose model is on parameter servers. The chief's is the one that is saved and restored."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        fleet: Fleet,
        *,
        report: Callable[[str, WindowRow], None] | None = None,
        clock: Callable[[], float] = time.time,
        metrics: Metrics | None = None,
    ) -> None:
        if config.alert is not None and config.alert.action == "rollback":
            raise ConfigError("alert: several processes cannot roll back together yet; set action to 'stop'")
        self._fleet = fleet
        self._others: list[State] = []
        self._starts: list[State] = []
        self._first_examples = 0
        self._first_skipped = 0
        self._halts: dict[int, Position] = {}
        super().__init__(task, config, report=report, clock=clock, metrics=metrics)
        weights = self.model.weights()
        self._served = ServedDense(fleet, self.model.dense_part(), weights, self.model.dense)
        store = self.model.stores[0]
        assert isinstance(store, ParameterServerStore)
        if self.model.dense is not None:
            store.attach_dense(weights, self.model.dense)
        self._dense = ServedOptimizer(fleet.group, store, self._sparse, self.model.dense)

    # Beginning

    def begin(self) -> None:
        if self._fleet.is_chief:
            self._fleet.begin()
            self._served.send()
            self.go_on_from(0)

    def ready(self) -> str | None:
        """Let the others begin, as the chief; otherwise wait until one may, and go where the chief says."""
        if self._fleet.is_chief:
            self._fleet.open({"step": self.step, "workers": self._starts})
        else:
            start = self._fleet.join(lambda: self._interrupted)
            if start is None:
                return RUN_IS_OVER
            self._sparse.global_step = start["step"]
            if start["workers"]:
                self._read_from(start["workers"][self._fleet.index])
        for store in self.model.stores[:1]:
            store.pull_dense()
        return None

    def go_on_from(self, step: int) -> None:
        super().go_on_from(step)
        self._fleet.group.set_step(step)

    # Between steps

    def state(self) -> State:
        """Return what a checkpoint keeps of this worker."""
        return {
            "position": self._position,
            "examples": self.examples - self._first_examples,
            "event_time": self.expiry.now(),
            "skipped": self.skipped - self._first_skipped,
        }

    def meet(self, run: Run) -> None:
        """Halt, stop or fail as the others do; between two steps."""
        self._fleet.check()
        if not self._fleet.is_chief:
            self._halt()
            self._commit_saved()
        if (reason := self._fleet.stop_reason) is not None:
            run.request_stop(reason)

    def commit(self, position: Position) -> None:
        super().commit(position)
        if self._fleet.is_chief:
            for halt in [number for number, held in self._halts.items() if held is position]:
                self._forget_halts(halt)
                self._fleet.note_saved(halt)

    def commit_last(self) -> None:
        """Tell the source that all is safe, when nothing more is read and the servers may be gone."""
        self._close_lane()
        commit_to(self.data, self._position)

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._fleet.halted(lambda: self._interrupted) as halt:
            self.take_in(halt.states)
            self._halts[halt.number] = self._position
            yield

    def take_in(self, others: list[State]) -> None:
        """Note, as the chief, how far the others have come."""
        self._others = others
        self._sparse.global_step = self._fleet.group.read_step()

    @property
    def total_examples(self) -> int:
        return self.examples + sum(int(state["examples"]) for state in self._others)

    @property
    def total_skipped(self) -> int:
        return self.skipped + sum(int(state["skipped"]) for state in self._others)

    # Saving and restoring, as the chief

    def dense_part(self) -> Part:
        return self._served

    def parts(self) -> list[Part]:
        return [
            ServedTables(self._fleet),
            self._served,
            StatePart("position", self._positions, self._go_to),
            StatePart("progress", self._progress, self._set_progress),
            StatePart("metrics", self.metrics.state, self.metrics.restore),
        ]

    def _positions(self) -> Position:
        return joined_positions([self._position, *(state["position"] for state in self._others)])

    def _go_to(self, position: Position) -> None:
        if self.restarts_data:
            return
        self._starts = split_position(position, self._fleet.num_workers)
        self._read_from(self._starts[0])

    def _set_progress(self, saved: Mapping[str, Any]) -> None:
        super()._set_progress(saved)
        self._first_examples = self.examples
        self._first_skipped = self.skipped

    # Inside

    def _make_model(self) -> Model:
        model = Model(self.task, Mode.TRAIN, seed=self.config.seed, make_store=self._fleet.make_store)
        if alone := [store for store in model.stores if not isinstance(store, ParameterServerStore)]:
            raise ConfigError(
                f"task {self.task.name!r}: its model brings a store of its own, {alone[0]!r}, so every "
                "worker would train rows of its own. Leave `store` out; whoever runs the task decides where "
                "rows live."
            )
        return model

    def _open_data(self) -> Stream[Batch]:
        share = Share(self._fleet.index, self._fleet.num_workers)
        data = self.task.dataset(Mode.TRAIN)
        if share.workers == 1:
            return data
        try:
            share_out(data, share)
        except NotShareableError as cause:
            data.close()
            raise ConfigError(
                f"task {self.task.name!r}: its data is not shared out, so {share.workers} workers would each "
                f"train on all of it: {cause}. Give it one, or read from FileSource, KafkaSource or another "
                "source of monolith.data, which have it."
            ) from cause
        except BaseException:
            data.close()
            raise
        return data

    def _expiry_time(self) -> int | None:
        """As for a session; of several workers the one with the oldest data says it, so that the rows it
        trains live. What others have reached is known from the last halt."""
        times = [super()._expiry_time(), *(state.get("event_time") for state in self._others)]
        return min((time for time in times if time is not None), default=None)

    def _found_nothing(self) -> None:
        _log.warning(
            "worker %d trained on nothing: its share of the data is empty, or was trained before a restart",
            self._fleet.index,
        )

    def _evict(self, now: int) -> None:
        if self._fleet.is_chief:
            super()._evict(now)

    def _idle(self) -> None:
        self._fleet.check()
        if not self._fleet.is_chief:
            self._halt()
        if self._fleet.stop_reason is not None:
            self.interrupt()

    def _halt(self) -> None:
        if self._fleet.is_halted:
            self.drain()
            position = self._position
            if halt := self._fleet.wait_at_halt(self.state()):
                self._halts[halt] = position

    def _commit_saved(self) -> None:
        saved = self._fleet.saved_halt
        if saved in self._halts:
            self.commit(self._halts[saved])
            self._forget_halts(saved)

    def _forget_halts(self, last: int) -> None:
        self._halts = {number: held for number, held in self._halts.items() if number > last}


class ServedOptimizer:
    """Stands where a training step expects the optimizer of the dense weights, which the servers have."""

    def __init__(
        self,
        group: ServerGroup,
        store: ParameterServerStore,
        sparse: EmbeddingOptimizer,
        inner: torch.optim.Optimizer | None,
    ) -> None:
        self._group = group
        self._store = store
        self._sparse = sparse
        self._inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [] if self._inner is None else self._inner.param_groups

    def step(self) -> None:
        """Send the gradients, take the newest weights, and learn the step that this was."""
        self._store.push_dense()
        self._store.pull_dense()
        self._sparse.global_step = self._group.step - 1  # rows are trained next, and count it

    def zero_grad(self) -> None:
        if self._inner is not None:
            self._inner.zero_grad()


class FleetHook(Hook):
    """Keeps one worker together with the others; before the hook that saves.

    Args:
        look: Saves if it is time to; called by a chief who is done before the others.
    """

    def __init__(
        self, session: FleetSession, fleet: Fleet, look: Callable[[Run], None] | None = None
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._look = look

    def before_step(self, run: Run) -> None:
        self._session.meet(run)

    def end(self, run: Run) -> None:
        self._session.drain()
        if not self._fleet.is_chief:
            return
        if run.stop_reason != DATA_ENDED:
            self._fleet.stop(run.stop_reason or "the chief has ended", unfinished=run.interrupted)
        states = self._fleet.wait_for_others(
            lambda: None if self._look is None else self._look(run), stopping=run.interrupted
        )
        self._session.take_in(states)


class EndHook(Hook):
    """Ends one worker's part; the very last hook, since servers may be gone when it is done.

    The chief has saved by now, and tells everybody that the run is over. Another worker leaves, and waits to
    hear it: what it trained last is safe only then.
    """

    def __init__(self, session: FleetSession, fleet: Fleet) -> None:
        self._session = session
        self._fleet = fleet
        self._ended = False

    def end(self, run: Run) -> None:
        if self._fleet.is_chief:
            self._fleet.end()
        elif self._fleet.joined:
            if run.interrupted:  # its share of the data is not done, so the run cannot be either
                self._fleet.stop(f"worker {self._fleet.index}: {run.stop_reason}", unfinished=True)
            self._fleet.leave(self._session.state())
            self._fleet.wait_for_end()
            self._session.commit_last()
        self._ended = True

    def close(self) -> None:
        if not self._ended:
            error = sys.exc_info()[1]
            self._fleet.fail(
                "it was ended" if error is None else f"{type(error).__name__}: {error}",
                final=not isinstance(error, RetryableError),
            )
