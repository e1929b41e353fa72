"""Those that train on a GPU, window after window.

A device works behind the back of its host, so no single step can be timed by a clock: a run trains on so many
batches and returns when the device is done with them. What a batch is made of is ready before: ids of
features as a reader of data hands them over, positions for torch in pinned memory, labels on the device.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from monolith.cuda import Device
from monolith.feature import Batch, FeatureIds
from monolith.model import PreparedBatch
from monolith.model.step_graph import GraphedStep, SentBatch
from monolith.runtime.prefetch import PrefetchPipeline
from monolith_bench.timing import Contender, Timing, race
from monolith_bench.trainers import FusedTorchTrainer, GraphedTorchTrainer, OurTrainer

_WARM_UP = 4
_MOST_STEPS = 400
_BEHIND = 3  # steps that the host is ahead of the device
_BUSY = 16_384  # rows of a square matrix that takes a GPU longer to multiply than a host to launch a step
_PREPARED = 4
"""Batches whose rows are on the device while it works alone."""


Run = Callable[[Iterable[int]], None]
"""Trains on the batches of these numbers, or does a part of it."""


class DeviceRun(Protocol):
    """A trainer on a GPU, with the batches it is to train on."""

    def load(self, batches: Sequence[Tensor], labels: Tensor) -> None:
        """Bring batches into the form in which it takes them: positions, int64 of (examples, features)."""

    def run(self, numbers: Iterable[int]) -> None:
        """Train on the batches of these numbers, and return when the device is done."""


class TorchRun:
    """torch's rows; positions go up from pinned memory in each step."""

    def __init__(self, trainer: FusedTorchTrainer | GraphedTorchTrainer, device: Device) -> None:
        self._trainer = trainer
        self._device = device
        self._batches: list[Tensor] = []
        self._labels = torch.empty(0)

    def load(self, batches: Sequence[Tensor], labels: Tensor) -> None:
        self._batches = [self._device.pinned(tuple(one.shape), one.dtype).copy_(one) for one in batches]
        self._labels = labels.to(self._device.torch_device)

    def run(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._trainer.step(self._batches[number], self._labels)
        self._device.current_stream().synchronize()


class PlainRun:
    """Our rows, in a plain loop: for rows that lie on the device."""

    def __init__(self, trainer: OurTrainer, device: Device) -> None:
        self.trainer = trainer
        self._device = device
        self._batches: list[FeatureIds] = []
        self._labels = torch.empty(0)

    def load(self, batches: Sequence[Tensor], labels: Tensor) -> None:
        self._batches = [self.trainer.batch_of(one) for one in batches]
        self._labels = labels.to(self._device.torch_device)

    def run(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.trainer.train(self._batches[number], self._labels)
        self._device.current_stream().synchronize()

    def phases(self) -> dict[str, float]:
        """Return the milliseconds the host takes to launch a step, and the device to compute each phase.

        The device is kept busy until everything is launched, so that it never waits for the host.
        """
        stream, trainer = self._device.current_stream(), self.trainer
        stream.synchronize()
        if self._device.torch_device.type == "cuda":
            busy = torch.empty((_BUSY, _BUSY), device=self._device.torch_device)
            torch.mm(busy, busy)
        began, marks = time.perf_counter(), [stream.record(timed=True)]
        prepared = trainer.model.embeddings.prepare(self._batches[0])
        marks.append(stream.record(timed=True))
        loss = trainer.forward(prepared, self._labels)
        marks.append(stream.record(timed=True))
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(stream.record(timed=True))
        trainer.update()
        marks.append(stream.record(timed=True))
        launched = (time.perf_counter() - began) * 1e3
        names = ("lookup", "forward", "backward", "update")
        took = [mark.milliseconds_since(before) for before, mark in itertools.pairwise(marks)]
        return {"launching": launched} | dict(zip(names, took, strict=True))


class GraphedRun:
    """The same with whole steps replayed from CUDA graphs, one for each size of batches.

    Batches go to the device in each step, ids and labels, as in `monolith train`: between two launches; or if
    the trainer has rows in host memory, by a thread that brings those of each batch, too.
    """

    def __init__(self, trainer: OurTrainer, device: Device, *, half: bool = False) -> None:
        self._device = device
        self._trainer = trainer
        self._graph = trainer.graph(half=half)
        self._batches: list[Batch] = []

    def load(self, batches: Sequence[Tensor], labels: Tensor) -> None:
        self._batches = [Batch(self._trainer.batch_of(one), labels={"label": labels}) for one in batches]
        self.run(range(min(_WARM_UP, len(batches))))  # captured by then

    def run(self, numbers: Iterable[int]) -> None:
        graph = self._graph
        steps: deque[GraphedStep] = deque()
        with ExitStack() as opened:
            batches: Iterator[SentBatch] = map(self._send, numbers)
            if graph.hot_rows:
                ahead = PrefetchPipeline(iter(numbers), self._send, lambda _, sent: sent)
                batches = (sent for _, sent in iter(opened.enter_context(ahead).next, None))
            for sent in batches:
                if not graph.takes(sent):
                    raise RuntimeError(graph.trouble or "the device has no room for the rows of a batch")
                steps.append(graph.train(sent))
                self._trainer.sparse.global_step += 1
                if len(steps) > _BEHIND:
                    steps.popleft().wait()  # as a run does, which reports its loss
        for step in steps:
            step.wait()
        self._device.current_stream().synchronize()

    def hits(self) -> tuple[int, int]:
        """Return how many ids were staged so far, and how many of them had to be brought from host memory."""
        counts = [hot.counts for hot in self._graph.hot_rows]
        return sum(one.seen for one in counts), sum(one.fetched for one in counts)

    def _send(self, number: int) -> SentBatch:
        return self._graph.send(self._batches[number])


class GraphedTorchRun(TorchRun):
    """torch's rows, with whole steps replayed from a CUDA graph; see `GraphedTorchTrainer`."""

    def load(self, batches: Sequence[Tensor], labels: Tensor) -> None:
        super().load(batches, labels)
        assert isinstance(self._trainer, GraphedTorchTrainer)
        self._trainer.capture(self._batches[0], self._labels)


class PipelinedRun(PlainRun):
    """Our rows in host memory: looked up ahead and updated behind by a lane, as in `monolith train`."""

    def __init__(self, trainer: OurTrainer, device: Device) -> None:
        super().__init__(trainer, device)
        self._prepared: list[PreparedBatch] = []
        self._gradients = torch.empty(0)

    def run(self, numbers: Iterable[int]) -> None:
        with PrefetchPipeline(iter(numbers), self._prepare) as lane:
            while (found := lane.next()) is not None:
                _, prepared = found
                self.trainer.train(prepared, self._labels, push=lane.push)
            lane.drain()
        self._device.current_stream().synchronize()

    def load(self, batches: Sequence[Tensor], labels: Tensor) -> None:
        super().load(batches, labels)
        several = [self._prepare(number) for number in range(len(batches))]
        self._prepared = several[:_PREPARED]
        self._gradients = torch.full((max(one.gathered.floats for one in several),), 1e-6)

    def run_host(self, numbers: Iterable[int]) -> None:
        """Do what the host does of these steps: find distinct ids, look rows up, update them."""
        for number in numbers:
            prepared = self._prepare(number)
            self.trainer.store.apply_gradients(prepared.keys, self._gradients[: prepared.gathered.floats])

    def run_device(self, numbers: Iterable[int]) -> None:
        """Run only the device's part of these steps, on rows that were looked up before."""
        self.trainer.model.eval()  # in eval mode the gradients of the rows are not collected
        for number in numbers:
            self.trainer.compute(self._prepared[number % len(self._prepared)], self._labels)
        self.trainer.model.train()
        self._device.current_stream().synchronize()

    def _prepare(self, number: int) -> PreparedBatch:
        return self.trainer.model.embeddings.prepare(self._batches[number])


@dataclass(frozen=True, slots=True)
class Windows:
    """How runs are timed: a number of steps at a time, on batches that are gone through in turn."""

    batches: int
    least_steps: int

    def race(self, runs: Mapping[str, Run], timing: Timing) -> dict[str, float]:
        """Return each one's best steps a second: windows by turns, each of as many steps as fill it."""
        contenders = {}
        for name, run in runs.items():
            steps = self._steps(run, timing["window"])
            contenders[name] = Contender(steps, self._window(run, steps), itertools.count(step=steps))
        return race(contenders, repeats=timing["repeats"], window=0.0)

    def _steps(self, run: Run, window: float) -> int:
        """Return how many steps fill a window, after some to warm up."""
        run(self._numbers(0, _WARM_UP))
        began = time.perf_counter()
        run(self._numbers(0, _WARM_UP))
        seconds = (time.perf_counter() - began) / _WARM_UP
        return int(min(max(window / seconds, self.least_steps), _MOST_STEPS))

    def _window(self, run: Run, steps: int) -> Callable[[int], None]:
        return lambda first: run(self._numbers(first, steps))

    def _numbers(self, first: int, steps: int) -> list[int]:
        return [number % self.batches for number in range(first, first + steps)]
