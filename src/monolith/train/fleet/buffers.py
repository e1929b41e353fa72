"""Buffers of a module in a fleet: each worker has its own, and a checkpoint has those of all.

A running mean or a counter changes in the forward pass, so on workers and not on servers. All begin with what
the chief made or restored. When everybody stands still, and when a worker leaves, it lays its buffers down on
server 0; the chief, when it saves, takes them and writes one for all:

    numbers       the mean, each worker weighted by the examples that it has trained on since all began
    counters      what all began with, and what each has added to it
    the rest      the chief's

Workers go on with their own. What is saved of weights alone, while nobody stands still, has what the others
laid down last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from monolith.store import ServerGroup
from monolith.store.dense import pack_tensors, unpack_tensors

CHIEF = 0


class FleetBuffers:
    """The buffers of one worker's module, and its way to those of the others. Used by its training thread.

    Args:
        worker: Which one this is.
        buffers: By name, as they stand in the module. With none, nobody is asked for anything.
    """

    def __init__(self, group: ServerGroup, worker: int, buffers: Mapping[str, Tensor]) -> None:
        self._group = group
        self._worker = worker
        self._mine = list(buffers.values())
        self._first: list[Tensor] = []
        """What all began with."""
        self._examples = 0

    def begin(self) -> None:
        """Begin with what the chief has; it calls this before the others do."""
        if not self._mine:
            return
        if self._worker == CHIEF:
            self._give(0)
        else:
            for _, theirs in self._take(CHIEF):
                _fill(self._mine, theirs)
        self._first = [buffer.clone() for buffer in self._mine]

    def lay_down(self, examples: int) -> None:
        """Give what this worker has to whoever saves; the chief keeps its own, and says only what it weighs.

        Args:
            examples: Trained on by this worker since all began.
        """
        self._examples = examples
        if self._mine and self._worker != CHIEF:
            self._give(examples)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Have the buffers of all in the chief's module, while they are saved."""
        others = self._take(None) if self._mine else []
        if not others:
            yield
            return
        own = [buffer.clone() for buffer in self._mine]
        _fill(self._mine, merge_buffers(self._first, [(self._examples, own), *others]))
        try:
            yield
        finally:
            _fill(self._mine, own)

    def _give(self, examples: int) -> None:
        body = {"worker": self._worker, "examples": examples}
        self._group.exchange("put_buffers", {0: (body, pack_tensors(self._mine))})

    def _take(self, worker: int | None) -> list[tuple[int, list[Tensor]]]:
        """Return what others laid down, and how many examples it weighs; of all of them but the chief, or of
        one."""
        answer = self._group.exchange("get_buffers", {0: ({"worker": worker}, b"")})[0]
        about: Sequence[tuple[int, int]] = answer.body["workers"]
        size = len(answer.data) // max(len(about), 1)
        return [
            (examples, unpack_tensors(answer.data[number * size : (number + 1) * size], self._mine))
            for number, (who, examples) in enumerate(about)
            if who == worker or (worker is None and who != CHIEF)
        ]


def merge_buffers(first: Sequence[Tensor], given: Sequence[tuple[int, Sequence[Tensor]]]) -> list[Tensor]:
    """Return one tensor for each buffer.

    Args:
        first: What all began with.
        given: Of each worker, the chief before the others: examples, and its buffers.
    """
    total = sum(examples for examples, _ in given)
    merged = []
    for number, before in enumerate(first):
        all_of_them = [buffers[number] for _, buffers in given]
        own = all_of_them[0]
        if own.is_floating_point():
            same = all(torch.equal(own, other) for other in all_of_them)
            weighted = [buffers[number].double() * (examples / max(total, 1)) for examples, buffers in given]
            merged.append(own if same or not total else torch.stack(weighted).sum(0).to(own.dtype))
        elif own.dtype is torch.bool or own.is_complex():
            merged.append(own)
        else:
            merged.append(before + sum((one - before for one in all_of_them), torch.zeros_like(before)))
    return merged


def _fill(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
