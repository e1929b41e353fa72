"""DenseCache: a worker's copy of the dense weights that parameter servers train."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith.errors import FeatureError
from monolith.store.dense import pack_tensors, share_of_weights, unpack_tensors
from monolith.store.group import Request


class DenseCache:
    """The caller's weights, whose they are on the servers, and what came back last. Thread-safe."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], descriptions: list[dict[str, Any]]) -> None:
        shares = share_of_weights(parameters, len(descriptions))
        self._shares: list[dict[str, nn.Parameter]] = [{} for _ in descriptions]
        for name, server in shares.items():
            self._shares[server][name] = parameters[name]
        for server, about in enumerate(descriptions):
            here = {name: _kind(weight) for name, weight in self._shares[server].items()}
            there = {name: (tuple(shape), dtype) for name, (shape, dtype) in about["weights"].items()}
            for name in sorted(here.keys() | there.keys()):
                if here.get(name) != there.get(name):
                    raise FeatureError(
                        f"parameter server {server} does not fit: the weight {name!r} is "
                        f"{_said(there.get(name))} there, and {_said(here.get(name))} here. Do all processes "
                        "run the same task?"
                    )
        self._lock = threading.Lock()  # guards _newest
        self._newest: dict[int, NDArray[np.uint8]] = {}

    @property
    def servers(self) -> list[int]:
        """Who is in charge of a weight."""
        return [server for server, share in enumerate(self._shares) if share]

    @property
    def is_known(self) -> bool:
        """Whether every server has answered with its weights."""
        with self._lock:
            return all(server in self._newest for server in self.servers)

    def gradients(self) -> dict[int, Request]:
        """Take the gradients that the weights hold, for each server; server 0 is always there."""
        requests: dict[int, Request] = {}
        for server in sorted({0, *self.servers}):
            held = {name: w.grad for name, w in self._shares[server].items() if w.grad is not None}
            requests[server] = {"names": list(held)}, pack_tensors(list(held.values()))
        for share in self._shares:
            for weight in share.values():
                weight.grad = None
        return requests

    def keep(self, answers: Mapping[int, NDArray[np.uint8]]) -> None:
        with self._lock:
            self._newest |= answers

    def copy(self) -> None:
        """Make the caller's weights what came back last."""
        with self._lock:
            newest = dict(self._newest)
        with torch.no_grad():
            for server in self.servers:
                weights = list(self._shares[server].values())
                for weight, value in zip(weights, unpack_tensors(newest[server], weights), strict=True):
                    weight.copy_(value)


def _kind(weight: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(weight.shape), str(weight.dtype).removeprefix("torch.")


def _said(kind: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if kind is None else f"{kind[1]} of shape {kind[0]}"
