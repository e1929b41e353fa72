"""Copies of a model that keeps learning: each serves the state of its last sync.

One model is trained. Its copies differ in nothing but how often they are synced, counted in
event time. An event is predicted by every copy, as it is then, before the model learns from it.

A copy follows as a server does: a publisher lets out what has changed, a subscriber takes it over. The clock
is event time, so that nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from monolith.errors import TrainingError
from monolith.model import DeepFM
from monolith.store import LocalStore
from monolith.sync import MemoryChannel, Publisher, PublisherConfig, Subscriber, TableTarget
from monolith.table import Fp32, NativeTable, TableConfig
from monolith_bench.learner import Learner, logits_of, make_model
from monolith_bench.timed_events import OnlinePlan, TimedEvents


class ServedCopy:
    """A model that knows what it was synced to last, and what it said of the events until now.

    Args:
        every: Event time between two syncs; None never syncs it again after the first time.
        model: Its own; only `catch_up` changes it.
        catch_up: Takes over all that was learned.
    """

    def __init__(
        self, every: timedelta | None, model: DeepFM, catch_up: Callable[[], None], plan: OnlinePlan
    ) -> None:
        self.every = every
        self.syncs = 0
        """How often it was synced since the online part began."""
        self._model = model
        self._catch_up = catch_up
        self._events: TimedEvents = plan.events
        self._said: list[Tensor] = []
        self._next = plan.online  # the first event it has said nothing of yet
        self._began = int(plan.events.times[plan.online])
        self._period = 0

    def sync_if_due(self, now: int, here: int) -> None:
        """Sync the copy with the trained model, if a sync is due; the first is due `every` after the start.

        Nothing changes a copy between two syncs: what it says of the events in between, up to `here`, is
        asked for at once, before the second.
        """
        if self.every is None:
            return
        period = (now - self._began) // int(self.every.total_seconds())
        if period > self._period:
            self._period = period
            self.serve_until(here)
            self._catch_up()
            self.syncs += 1

    def serve_until(self, here: int) -> None:
        """Predict the events before `here` that it has not predicted yet."""
        if self._next < here:
            self._said.append(logits_of(self._model, self._events, torch.arange(self._next, here)))
            self._next = here

    @property
    def logits(self) -> Tensor:
        """What it said of the events of the online part, in their order."""
        return torch.cat(self._said)


class FollowingCopies:
    """Copies of what a learner knows, kept by delta channels within this process.

    Args:
        learner: Has learned what comes before the online part, which the copies then know, too.
        intervals: Event time between two syncs of each copy; None never syncs it again.
        seed: Of the learner.
    """

    def __init__(
        self, plan: OnlinePlan, learner: Learner, intervals: Sequence[timedelta | None], seed: int
    ) -> None:
        self._plan = plan
        self._learner = learner
        self._now = int(plan.events.times[plan.online])
        self._open = ExitStack()
        self.copies = [self._follow(every, seed) for every in intervals]

    def learn(self, advance: Callable[[int], None]) -> None:
        """Go through the online part, second by second: sync who is due, and then learn.

        Args:
            advance: Told how many more events are done.
        """
        for now, first, end in self._plan.events.seconds(self._plan.online):
            self._now = now
            for copy in self.copies:
                copy.sync_if_due(now, first)
            self._learner.train(torch.arange(first, end))
            advance(end - first)
        for copy in self.copies:
            copy.serve_until(len(self._plan.events))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _follow(self, every: timedelta | None, seed: int) -> ServedCopy:
        """Return a copy that knows all that the learner does now."""
        trained = _deepfm(self._learner.model)
        served = _model_to_serve(self._plan, trained, seed)
        channel = MemoryChannel()
        publisher = Publisher(
            _tables(trained),
            channel.writer(),
            PublisherConfig(run="freshness", dense_interval=0.0),
            dense=lambda: {name: weight.clone() for name, weight in trained.state_dict().items()},
            clock=lambda: float(self._now),
        )
        self._open.callback(publisher.close)
        target = TableTarget(_tables(served), swap=lambda weights: _swap(served, weights))
        subscriber = Subscriber(channel.reader, target, clock=lambda: float(self._now))
        self._open.callback(subscriber.close)

        def catch_up() -> None:
            publisher.flush()
            subscriber.catch_up()
            if subscriber.progress[0].position != publisher.position:
                raise TrainingError(
                    f"a copy did not catch up with the published rows: it is at {subscriber.progress[0]}, "
                    f"the publisher at {publisher.position}"
                )

        catch_up()
        return ServedCopy(every, served, catch_up, self._plan)


def _model_to_serve(plan: OnlinePlan, trained: DeepFM, seed: int) -> DeepFM:
    """Return a model of its own that has nothing of the trained one yet: other first weights, and no rows."""
    tables = {name: _exact(config) for name, config in trained.embeddings.slot_tables.configs.items()}
    store = LocalStore.from_configs(tables, threads=1)
    return _deepfm(make_model(plan.recipe, plan.events.features, seed + 1, store=store))


def _deepfm(model: nn.Module) -> DeepFM:
    assert isinstance(model, DeepFM)
    return model


def _exact(config: TableConfig) -> TableConfig:
    """Return how a server keeps a table whose rows are not coded in fewer bits: only time is compared."""
    segments = tuple(replace(segment, compressor=Fp32()) for segment in config.segments)
    return replace(config, serving=True, segments=segments)


def _tables(model: DeepFM) -> dict[str, NativeTable]:
    store = model.embeddings.store
    assert isinstance(store, LocalStore)
    found = {name: store.table(name) for name in store.tables}
    return {name: table for name, table in found.items() if isinstance(table, NativeTable)}


def _swap(model: DeepFM, weights: Mapping[str, Tensor]) -> None:
    model.load_state_dict(dict(weights))
