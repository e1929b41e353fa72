"""DenseCache: a worker's copy of the dense weights that parameter servers train.

There are two copies of each weight here. *Fetched* is what servers said last. The caller's own
variables are what a step reads, and change only in `assign`, between two steps. Gradients go to the
servers. What is fetched and pushed while steps are computed, `DenseConfig` says:

    neither     push, wait ─► assign ─► step                        weights lack nothing of one's own
    prefetch    push, wait ─► assign what a fetch brought that began after the push before ─► step
    postpush    give the push to the thread ─► fetch, wait ─► assign ─► step
    both        assign what the answer to an earlier push brought; give the push to the thread ─► step

In the last three a step waits first until no more than max_staleness - 1 pieces of work are on their
way, so its weights lack max_staleness pushes of its own at most. Waiting comes before anything new is
sent: with a bound of 1 they lack exactly one, whoever was faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith.errors import FeatureError
from monolith.store.behind import Behind
from monolith.store.dense import pack_tensors, rates_of, share_of_weights, unpack_tensors
from monolith.store.dense_config import DenseConfig
from monolith.store.group import Request, ServerGroup
from monolith.wire.flight import Answer

_Weights = dict[int, NDArray[np.uint8]]


class DenseCache:
    """The caller's weights, whose they are on the servers, and what came back last. Used by one thread.

    Args:
        group: The servers; `push` sends them requests that are applied once.
        parameters: The weights, by name. Only `assign` changes them.
        optimizer: Of which a task may move the rates: servers are told with the next push.
        moved_there: Whether servers move the rates themselves, by a schedule of the task.
        descriptions: What each server says of itself.

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
        moved_there: bool = False,
    ) -> None:
        self._group = group
        self._push = push
        self._config = config or DenseConfig()
        self._optimizer = optimizer
        self._moved_there = moved_there
        self._first_rates = rates_of(optimizer)
        self._shares = _shares(parameters, descriptions)
        self._behind = Behind("dense gradients behind a step")
        self._pushed = 0
        self._covers = 0
        """Own pushes that are in the weights which the caller has."""
        self._as_of = 0
        """The global step that those are of."""
        self._ready: _Fetched | None = None
        self._lock = threading.Lock()  # guards what follows
        self._fetched: _Fetched | None = None
        self._answered = 0
        self._known_step = 0
        self._behind_last = self._behind_most = 0

    @property
    def servers(self) -> list[int]:
        """Who is in charge of a weight."""
        return [server for server, share in enumerate(self._shares) if share]

    @property
    def staleness(self) -> int:
        """Own steps that the caller's weights lack now."""
        return self._pushed - self._covers

    @property
    def step(self) -> int:
        """Which step of the model the last push was: as the servers said; while pushes are on their way, as
        many more as there are."""
        with self._lock:
            pending = self._pushed - self._answered
            return self._known_step + pending if pending else self._group.step

    @property
    def behind(self) -> tuple[int, int]:
        """By how many steps, of all workers, the weights of a gradient were behind when it was applied: the
        last one's, and the most."""
        with self._lock:
            return self._behind_last, self._behind_most

    def push(self) -> None:
        """Send the gradients that the weights hold, and clear them.

        Raises:
            MonolithError: What a push or fetch raised, perhaps an earlier one. Some servers may have applied
                their part.
        """
        config = self._config
        self._behind.wait(config.max_staleness - 1)
        with self._lock:
            if self._pushed == self._answered:
                self._known_step = self._group.step
            self._ready = self._fetched
            self._pushed += 1
        brings = config.prefetch == config.postpush
        requests, number, as_of = self._gradients(brings), self._pushed, self._as_of
        if config.postpush:
            self._behind.give(lambda: self._send(requests, number, as_of))
            return
        self._send(requests, number, as_of)
        if config.prefetch:
            self._behind.give(self.fetch)
        else:
            self._ready = self._fetched

    def assign(self) -> None:
        """Make the caller's weights what was fetched; before anything was, fetch."""
        if self._ready is None or (self._config.postpush and not self._config.prefetch):
            self.fetch()
            self._ready = self._fetched
        self._copy()

    def fetch(self) -> None:
        """Ask the servers for their weights, for the next `assign`."""
        with self._lock:
            covers = self._answered
        requests: dict[int, Request] = {server: ({}, b"") for server in sorted({0, *self.servers})}
        self._keep(self._group.exchange("pull_dense", requests), covers)

    def refresh(self) -> None:
        """Return when everything pushed was applied, with the newest weights assigned."""
        self._behind.wait()
        self.fetch()
        self._ready = self._fetched
        self._copy()

    def settle(self) -> None:
        """The same, where something is done in the background; else nothing is on its way."""
        if self._config.in_background:
            self.refresh()

    def close(self) -> None:
        """Let go of what is on its way."""
        self._behind.close()

    # Inside

    def _copy(self) -> None:
        ready = self._ready
        assert ready is not None
        with torch.no_grad():
            for server in self.servers:
                weights = list(self._shares[server].values())
                for weight, value in zip(weights, unpack_tensors(ready.data[server], weights), strict=True):
                    weight.copy_(value)
        self._covers, self._as_of = ready.covers, ready.step

    def _gradients(self, brings: bool) -> dict[int, Request]:
        """Take the gradients that the weights hold, for each server; server 0 is always there."""
        rates = rates_of(self._optimizer)
        told = [] if self._moved_there or rates == self._first_rates else list(rates.items())
        requests: dict[int, Request] = {}
        for server in sorted({0, *self.servers}):
            held = {name: w.grad for name, w in self._shares[server].items() if w.grad is not None}
            body = {"names": list(held), "brings": brings, "rates": told}
            requests[server] = body, pack_tensors(list(held.values()))
        for share in self._shares:
            for weight in share.values():
                weight.grad = None
        return requests

    def _send(self, requests: Mapping[int, Request], number: int, as_of: int) -> None:
        answers = self._push(requests)
        step = int(answers[0].body["step"])
        with self._lock:
            self._answered, self._known_step = number, step
            self._behind_last = step - 1 - as_of
            self._behind_most = max(self._behind_most, self._behind_last)
        if next(iter(requests.values()))[0]["brings"]:
            self._keep(answers, number)

    def _keep(self, answers: Mapping[int, Answer], covers: int) -> None:
        data = {server: answers[server].data for server in self.servers}
        fetched = _Fetched(data, covers, int(answers[0].body["step"]))
        with self._lock:
            self._fetched = fetched


class _Fetched:
    """What servers said of their weights."""

    def __init__(self, data: _Weights, covers: int, step: int) -> None:
        self.data = data
        self.covers = covers
        """Own pushes that are in it."""
        self.step = step
        """The global step it is of."""


def _shares(
    parameters: Mapping[str, nn.Parameter], descriptions: list[dict[str, Any]]
) -> list[dict[str, nn.Parameter]]:
    """Return the weights of each server."""
    shares: list[dict[str, nn.Parameter]] = [{} for _ in descriptions]
    for name, server in share_of_weights(parameters, len(descriptions)).items():
        shares[server][name] = parameters[name]
    for server, about in enumerate(descriptions):
        here = {name: _kind(weight) for name, weight in shares[server].items()}
        there = {name: (tuple(shape), dtype) for name, (shape, dtype) in about["weights"].items()}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise FeatureError(
                    f"parameter server {server} does not fit: the weight {name!r} is "
                    f"{_said(there.get(name))} there, and {_said(here.get(name))} here. Do all processes "
                    "run the same task?"
                )
    return shares


def _kind(weight: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(weight.shape), str(weight.dtype).removeprefix("torch.")


def _said(kind: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if kind is None else f"{kind[1]} of shape {kind[0]}"
