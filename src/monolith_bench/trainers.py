"""Those that train a DeepFM: on our rows, on torch's `EmbeddingBag`, on FBGEMM's tables.

All have the same dense half, the same Adagrad and the same loss, and take the same batches:
one position of each feature per example. The rivals' rows are arrays of a fixed size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.cuda import Device
from monolith.feature import Batch, FeatureIds
from monolith.model import DeepFM, EmbeddingOptimizer, PreparedBatch
from monolith.model.deepfm import DeepFMDense
from monolith.model.step_graph import StepGraph
from monolith.store import LocalStore
from monolith.table import Adagrad, TableConfig
from monolith.table.cuda.growth import bytes_for_rows
from monolith_bench.rivals import FBGEMM, LEARNING_RATE, quiet_logs

ACCUMULATOR = 0.1
FIRST_VALUE = 0.01


class TimedTrainer(Protocol):
    """A model with its optimizers."""

    def step(self, positions: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch, int64 of shape (examples, features), and return the loss."""


class OurTrainer:
    """A `DeepFM` on a local store, with a table for each feature.

    Args:
        device: Where the dense half computes; None for the CPU.
        embedding_device: Where rows lie.
        hot_rows: So many rows of each feature fit on the device, the rest is in host memory; None for all.
    """

    def __init__(
        self,
        features: int,
        rows: int,
        dim: int,
        hidden: Sequence[int],
        threads: int,
        *,
        device: Device | None = None,
        embedding_device: Literal["host", "device"] = "host",
        hot_rows: int | None = None,
    ) -> None:
        self._names = tuple(f"f{number:03d}" for number in range(features))
        adagrad = Adagrad(learning_rate=LEARNING_RATE, initial_accumulator_value=ACCUMULATOR)
        self.model = DeepFM(
            self._names, dim=dim, hidden=hidden, optimizer=adagrad, bias_optimizer=adagrad, threads=threads
        )
        embeddings = self.model.embeddings
        if device is not None:
            self.model.to(device.torch_device)
            embeddings.compute_on(device)
            if embedding_device == "device":
                embeddings.bind(partial(_store_with, device, hot_rows))
        assert isinstance(embeddings.store, LocalStore)
        self.store = embeddings.store
        for name in self._names:
            table = self.store.table(name)
            ids = torch.arange(rows, device=self.store.device)
            table.assign(ids, torch.full((rows, table.dim), FIRST_VALUE, device=ids.device))
        self.sparse = EmbeddingOptimizer(self.model)
        self._dense = dense_adagrad(self.model)

    def batch_of(self, positions: Tensor) -> FeatureIds:
        """Return a batch as a reader of data would hand it over."""
        return FeatureIds.one_each(self._names, positions)

    def step(self, positions: Tensor, labels: Tensor) -> Tensor:
        return self.train(self.batch_of(positions), labels)

    def train(
        self,
        batch: FeatureIds | PreparedBatch,
        labels: Tensor,
        push: Callable[[Callable[[], None]], None] | None = None,
    ) -> Tensor:
        """Train on one batch and return the loss.

        Args:
            push: Given what updates the rows, to be called in time; by default it is called here.
        """
        loss = self.forward(batch, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update(push)
        return loss

    def forward(self, batch: FeatureIds | PreparedBatch, labels: Tensor) -> Tensor:
        """Return the loss of a batch, to be differentiated."""
        self._dense.zero_grad()
        return loss_of(self.model(batch), labels)

    def update(self, push: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Take the step of rows and weights; see `train`."""
        if push is None:
            self.sparse.step()
        else:
            push(self.sparse.take())
        self._dense.step()

    def graph(self, *, half: bool = False) -> StepGraph:
        """Return what takes the same steps by replayed graphs; the labels of a batch are its "label".

        Args:
            half: Whether the dense half computes in bfloat16, as with `train.precision`.
        """

        def outputs(batch: Batch, rows: list[PreparedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
            with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
                logits = self.model(rows[0])
            logits = logits.float()
            return loss_of(logits, batch.labels["label"]), {"label": logits.sigmoid()}

        return StepGraph(self.model, [self.model.embeddings], self.sparse, self._dense, outputs)

    def compute(self, batch: PreparedBatch, labels: Tensor) -> None:
        """Do all of a step but to look rows up and to update them; in eval mode."""
        self._dense.zero_grad()
        loss_of(self.model(batch), labels).backward()  # type: ignore[no-untyped-call]
        self._dense.step()


class TorchTrainer:
    """Two `nn.EmbeddingBag(sparse=True)` for each feature, vectors and biases, with torch's Adagrad."""

    def __init__(self, features: int, rows: int, dim: int, hidden: Sequence[int], examples: int) -> None:
        self._unchecked: Any = torch.sparse.check_sparse_tensor_invariants  # off, said aloud: else it warns
        self._vectors = nn.ModuleList(bag(rows, dim) for _ in range(features))
        self._biases = nn.ModuleList(bag(rows, 1) for _ in range(features))
        self._half = DeepFMDense(features, dim, 0, hidden)
        self._sparse = adagrad_of(nn.ModuleList([self._vectors, self._biases]), examples)
        self._dense = dense_adagrad(self._half)

    def step(self, positions: Tensor, labels: Tensor) -> Tensor:
        self._sparse.zero_grad()
        self._dense.zero_grad()
        columns = positions.t().contiguous()
        bags = torch.arange(len(positions))
        vectors = torch.cat([one(ids, bags) for one, ids in zip(self._vectors, columns, strict=True)], 1)
        biases = torch.cat([one(ids, bags) for one, ids in zip(self._biases, columns, strict=True)], 1)
        loss = loss_of(self._half(biases.sum(1, keepdim=True), vectors), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        with self._unchecked(False):
            self._sparse.step()
        self._dense.step()
        return loss


class FusedTorchTrainer:
    """One `nn.EmbeddingBag` for all features, vector and bias in one row: what an expert makes of torch.

    Args:
        device: Where everything is; None for the CPU. Positions come from there or go there in each step.
    """

    def __init__(
        self,
        features: int,
        rows: int,
        dim: int,
        hidden: Sequence[int],
        examples: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._unchecked: Any = torch.sparse.check_sparse_tensor_invariants
        self._device = torch.device("cpu") if device is None else device
        self._rows = bag(features * rows, dim + 1, self._device)
        self._first = torch.arange(features, device=self._device) * rows
        self._half = DeepFMDense(features, dim, 0, hidden).to(self._device)
        self._sparse = adagrad_of(self._rows, examples)
        self._dense = dense_adagrad(self._half)

    def step(self, positions: Tensor, labels: Tensor) -> Tensor:
        self._sparse.zero_grad()
        self._dense.zero_grad()
        examples, features = positions.shape
        flat = (positions.to(self._device, non_blocking=True) + self._first).reshape(-1)
        found = self._rows(flat, torch.arange(len(flat), device=self._device)).view(examples, features, -1)
        vectors = found[..., 1:].reshape(examples, -1)
        loss = loss_of(self._half(found[..., 0].sum(1, keepdim=True), vectors), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        with self._unchecked(False):
            self._sparse.step()
        self._dense.step()
        return loss


class GraphedTorchTrainer:
    """The same rows as `FusedTorchTrainer`, in steps that one CUDA graph can replay.

    Sparse gradients of torch cannot be captured: the host asks how many rows they have. So rows are gathered,
    and their Adagrad is written out: it adds what repeated ids give one after another, in no fixed order, in
    place of the square of their sum.
    """

    def __init__(
        self, features: int, rows: int, dim: int, hidden: Sequence[int], *, device: torch.device
    ) -> None:
        self._rows = torch.full((features * rows, dim + 1), FIRST_VALUE, device=device)
        self._squares = torch.full_like(self._rows, ACCUMULATOR)
        self._first = torch.arange(features, device=device) * rows
        self._half = DeepFMDense(features, dim, 0, hidden).to(device)
        self._dense = dense_adagrad(self._half)
        self._positions = self._labels = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, positions: Tensor, labels: Tensor) -> None:
        """Capture a step on batches of this size."""
        self._graph = None
        self._positions = positions.to(self._first.device)
        self._labels = labels
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._work()
        self._graph = graph

    def step(self, positions: Tensor, labels: Tensor) -> Tensor:
        assert self._graph is not None, "it was captured"
        self._positions.copy_(positions, non_blocking=True)
        self._graph.replay()
        return labels

    def _work(self) -> None:
        examples, features = self._positions.shape
        flat = (self._positions + self._first).reshape(-1)
        rows = self._rows[flat].requires_grad_()
        found = rows.view(examples, features, -1)
        vectors = found[..., 1:].reshape(examples, -1)
        loss = loss_of(self._half(found[..., 0].sum(1, keepdim=True), vectors), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            assert rows.grad is not None
            gradient = rows.grad * examples
            self._squares.index_add_(0, flat, gradient * gradient)
            step = gradient * self._squares[flat].rsqrt_()
            self._rows.index_add_(0, flat, step, alpha=-LEARNING_RATE)
        self._dense.step()
        self._dense.zero_grad()


class FbgemmTrainer:
    """FBGEMM's tables on the CPU, one for each feature, with vector and bias in one row."""

    def __init__(self, features: int, rows: int, dim: int, hidden: Sequence[int], examples: int) -> None:
        training: Any = importlib.import_module(FBGEMM)
        self._width = -(-(dim + 1) // 4) * 4
        table = (rows, self._width, training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        with quiet_logs():
            self._rows = training.SplitTableBatchedEmbeddingBagsCodegen(
                [table] * features,
                optimizer=training.OptimType.EXACT_ADAGRAD,
                learning_rate=LEARNING_RATE,
                device=torch.device("cpu"),
            )
        for weights in self._rows.split_embedding_weights():
            weights.fill_(FIRST_VALUE)
        self._offsets = torch.arange(features * examples + 1)
        self._dim = dim
        self._half = DeepFMDense(features, dim, 0, hidden)
        self._dense = dense_adagrad(self._half)

    def step(self, positions: Tensor, labels: Tensor) -> Tensor:
        self._dense.zero_grad()
        examples, features = positions.shape
        found = self._rows(positions.t().reshape(-1), self._offsets).view(examples, features, self._width)
        vectors = found[..., : self._dim].reshape(examples, -1)
        loss = loss_of(self._half(found[..., self._dim].sum(1, keepdim=True), vectors), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._dense.step()
        return loss


def _store_with(
    device: Device, hot_rows: int | None, configs: Mapping[str, TableConfig], **how: Any
) -> LocalStore:
    """Make tables on a device, with room for so many rows of each if they are not to be all there."""
    if hot_rows is not None:
        how["device_bytes"] = sum(bytes_for_rows(config, hot_rows) for config in configs.values())
    return LocalStore.from_configs(configs, device=device, **how)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, labels)


def bag(rows: int, dim: int, device: torch.device | None = None) -> nn.EmbeddingBag:
    weight = torch.full((rows, dim), FIRST_VALUE, device=device)
    return nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight)


def dense_adagrad(module: nn.Module) -> torch.optim.Optimizer:
    on_cpu = all(weight.device.type == "cpu" for weight in module.parameters())
    fastest: dict[str, Any] = {"fused": True} if on_cpu else {"foreach": True}
    return torch.optim.Adagrad(module.parameters(), lr=LEARNING_RATE, **fastest)


def adagrad_of(module: nn.Module, examples: int) -> torch.optim.Optimizer:
    """Return an Adagrad of rows that trains by gradients of the mean as ours does by those of the sum.

    Gradients that are so many times smaller, on accumulators that begin with the square of that, take the
    same steps.
    """
    accumulator = ACCUMULATOR / examples**2
    return torch.optim.Adagrad(
        module.parameters(), lr=LEARNING_RATE, initial_accumulator_value=accumulator, eps=1e-10 / examples
    )
