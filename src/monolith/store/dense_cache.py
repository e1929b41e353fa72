"""DenseCache: a worker's copy of the dense weights that parameter servers train.

There are two copies of each weight here. *Fetched* weights are the servers' last answer. The caller's own
variables are read by a step and change only in `assign`, between two steps. Gradients go to the servers.
`DenseConfig` says what is fetched and pushed while steps are computed:

    neither     push, wait ─► assign ─► step                        weights lack none of the worker's own
    pushes
    prefetch    push, wait ─► assign the result of a fetch that began after the previous push ─► step
    postpush    give the push to the thread ─► fetch, wait ─► assign ─► step
    both        assign the answer to an earlier push; give the push to the thread ─► step

In the last three a step first waits until at most max_staleness - 1 pieces of work are queued, so its weights
lack at most max_staleness of the worker's own pushes. It waits before it sends anything new: with a bound of
1 the weights lack exactly one push, however fast the servers are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith import concurrency
from monolith.errors import FeatureError
from monolith.store.dense import pack_tensors, partition_weights, rates_of, unpack_tensors
from monolith.store.dense_config import DenseConfig
from monolith.store.server_group import Request, ServerGroup
from monolith.wire.flight import Answer

_log = logging.getLogger(__name__)

_END_WITHIN = 5.0
"""Seconds that `BackgroundQueue.close` waits for the work under way."""

Work = Callable[[], None]


class BackgroundQueue:
    """A thread that does the work it is given, in order. Used by one other thread.

        given ──► waiting ──► under way ──► done
                                 └──error──► all later calls raise it, and no more work is done

    Args:
        what: Names the work in the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = concurrency.Condition()  # guards all below
        self._waiting: deque[Work] = deque()
        self._under_way = False
        self._error: BaseException | None = None
        self._closed = False
        self._thread: concurrency.Thread | None = None

    def give(self, work: Work) -> None:
        """Queue some work.

        Raises:
            Exception: Earlier work raised this.
        """
        with self._changed:
            self._raise()
            self._waiting.append(work)
            if self._thread is None:
                self._thread = concurrency.Thread(target=self._run, name=self._what, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, at_most: int = 0) -> None:
        """Return when at most so many pieces of work are unfinished.

        Raises:
            Exception: One of them raised this.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._left() <= at_most)
            self._raise()

    def close(self) -> None:
        """End the thread. Work that has not begun is dropped and logged: call `wait` before a clean end."""
        with self._changed:
            self._closed = True
            lost, thread = len(self._waiting), self._thread
            self._waiting.clear()
            self._changed.notify_all()
        if lost:
            _log.warning("%s: dropped %d, because the run failed", self._what, lost)
        if thread is not None:
            thread.join(_END_WITHIN)

    # The lock is held, except in `_run`.

    def _left(self) -> int:
        return len(self._waiting) + self._under_way

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._under_way = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                if self._closed:
                    return
                work = self._waiting.popleft()
                self._under_way = True
            try:
                work()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._under_way = False
                    self._changed.notify_all()
                return


_Weights = dict[int, NDArray[np.uint8]]


class DenseCache:
    """The caller's weights, the server that owns each, and the servers' last answer. Used by one thread.

        loss.backward(); cache.push()    # gradients to their servers, then cleared
        cache.assign()                   # the newest fetched weights into the module

    Args:
        group: The servers.
        push: Sends them requests that are applied once.
        parameters: The weights, by name. Only `assign` changes them.
        optimizer: If a task changes its learning rates, servers are told with the next push.
        descriptions: The answers of the servers to `describe`.
        scheduled: Whether servers change the rates themselves, by a schedule of the task.

    Raises:
        FeatureError: The servers have other weights.
    """

    def __init__(
        self,
        group: ServerGroup,
        push: Callable[[Mapping[int, Request]], dict[int, Answer]],
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        descriptions: list[dict[str, Any]],
        *,
        config: DenseConfig | None = None,
        scheduled: bool = False,
    ) -> None:
        self._group = group
        self._push = push
        self._config = config or DenseConfig()
        self._optimizer = optimizer
        self._scheduled = scheduled
        self._first_rates = rates_of(optimizer)
        self._shards = _shards(parameters, descriptions)
        self._background = BackgroundQueue("dense gradients in the background")
        self._pushed = 0
        self._covers = 0
        """How many of this worker's pushes the caller's weights contain."""
        self._as_of = 0
        """The global step of the caller's weights."""
        self._ready: _Fetched | None = None
        # Guards the fields below, which the background thread writes. The fields above belong to the caller.
        self._lock = concurrency.Lock()
        self._fetched: _Fetched | None = None
        self._answered = 0
        self._known_step = 0
        self._behind_last = self._behind_most = 0

    @property
    def servers(self) -> list[int]:
        """The servers that own a weight."""
        return [server for server, shard in enumerate(self._shards) if shard]

    @property
    def staleness(self) -> int:
        """How many of this worker's pushes the caller's weights lack now."""
        return self._pushed - self._covers

    @property
    def step(self) -> int:
        """The global step of the last push: the servers' count, plus the pushes that are still queued."""
        with self._lock:
            pending = self._pushed - self._answered
            return self._known_step + pending if pending else self._group.step

    @property
    def behind(self) -> tuple[int, int]:
        """By how many steps of all workers a gradient's weights were behind when it was applied: for the last
        gradient, and the maximum."""
        with self._lock:
            return self._behind_last, self._behind_most

    def push(self) -> None:
        """Send the gradients of the weights, and clear them.

        Raises:
            MonolithError: This push or fetch failed, or an earlier one. Some servers may have applied their
                part.
        """
        config = self._config
        # The bound on staleness: with max_staleness 1, the previous push is applied before this one is
        # queued.
        self._background.wait(config.max_staleness - 1)
        with self._lock:
            # Only while nothing is queued does the group know the newest step; later ones are counted here.
            if self._pushed == self._answered:
                self._known_step = self._group.step
            self._ready = self._fetched
            self._pushed += 1
        wants_weights = config.prefetch == config.postpush
        requests, number, as_of = self._gradients(wants_weights), self._pushed, self._as_of
        if config.postpush:
            self._background.give(lambda: self._send(requests, number, as_of, wants_weights))
            return
        self._send(requests, number, as_of, wants_weights)
        if config.prefetch:
            self._background.give(self.fetch)
        else:
            self._ready = self._fetched

    def assign(self) -> None:
        """Copy the fetched weights to the caller's; before the first fetch, fetch them."""
        if self._ready is None or (self._config.postpush and not self._config.prefetch):
            self.fetch()
            self._ready = self._fetched
        self._copy()

    def fetch(self) -> None:
        """Fetch the servers' weights, for the next `assign`."""
        # Before the fetch: a push that is answered meanwhile may or may not be in the weights, so it does not
        # count. The staleness that is reported is never too small.
        with self._lock:
            covers = self._answered
        requests: dict[int, Request] = {server: ({}, b"") for server in sorted({0, *self.servers})}
        self._keep(self._group.exchange("pull_dense", requests), covers)

    def refresh(self) -> None:
        """Wait until all pushes are applied, then fetch and assign the newest weights."""
        self._background.wait()
        self.fetch()
        self._ready = self._fetched
        self._copy()

    def settle(self) -> None:
        """Do `refresh` if something is done in the background; otherwise nothing is queued."""
        if self._config.in_background:
            self.refresh()

    def close(self) -> None:
        """Drop queued work and end the background thread."""
        self._background.close()

    # Inside

    def _copy(self) -> None:
        ready = self._ready
        assert ready is not None
        with torch.no_grad():
            for server in self.servers:
                weights = list(self._shards[server].values())
                for weight, value in zip(weights, unpack_tensors(ready.data[server], weights), strict=True):
                    weight.copy_(value)
        self._covers, self._as_of = ready.covers, ready.step

    def _gradients(self, wants_weights: bool) -> dict[int, Request]:
        """Return the gradients for each server. Server 0 always gets a push, because it counts the steps."""
        rates = rates_of(self._optimizer)
        told = [] if self._scheduled or rates == self._first_rates else list(rates.items())
        requests: dict[int, Request] = {}
        for server in sorted({0, *self.servers}):
            held = {name: w.grad for name, w in self._shards[server].items() if w.grad is not None}
            body = {"names": list(held), "wants_weights": wants_weights, "rates": told}
            requests[server] = body, pack_tensors(list(held.values()))
        for shard in self._shards:
            for weight in shard.values():
                weight.grad = None
        return requests

    def _send(self, requests: Mapping[int, Request], number: int, as_of: int, wants_weights: bool) -> None:
        answers = self._push(requests)
        step = int(answers[0].body["step"])
        with self._lock:
            self._answered, self._known_step = number, step
            self._behind_last = step - 1 - as_of
            self._behind_most = max(self._behind_most, self._behind_last)
        if wants_weights:
            self._keep(answers, number)

    def _keep(self, answers: Mapping[int, Answer], covers: int) -> None:
        data = {server: answers[server].data for server in self.servers}
        fetched = _Fetched(data, covers, int(answers[0].body["step"]))
        with self._lock:
            # The first `assign` may fetch on the caller's thread while a push is answered with weights: the
            # older answer must not replace the newer, or a later step would lack more than max_staleness.
            if self._fetched is None or covers >= self._fetched.covers:
                self._fetched = fetched


class _Fetched:
    """One answer of all servers with their weights."""

    def __init__(self, data: _Weights, covers: int, step: int) -> None:
        self.data = data
        self.covers = covers
        """How many of this worker's pushes the weights contain."""
        self.step = step
        """The global step of the weights."""


def _shards(
    parameters: Mapping[str, nn.Parameter], descriptions: list[dict[str, Any]]
) -> list[dict[str, nn.Parameter]]:
    """Return the weights that each server owns, checked against the servers' own lists."""
    shards: list[dict[str, nn.Parameter]] = [{} for _ in descriptions]
    for name, server in partition_weights(parameters, len(descriptions)).items():
        shards[server][name] = parameters[name]
    for server, about in enumerate(descriptions):
        here = {name: _kind(weight) for name, weight in shards[server].items()}
        there = {name: (tuple(shape), dtype) for name, (shape, dtype) in about["weights"].items()}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise FeatureError(
                    f"parameter server {server} does not fit: the weight {name!r} is "
                    f"{_said(there.get(name))} there, and {_said(here.get(name))} here. Do all processes "
                    "run the same task?"
                )
    return shards


def _kind(weight: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(weight.shape), str(weight.dtype).removeprefix("torch.")


def _said(kind: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if kind is None else f"{kind[1]} of shape {kind[0]}"
