"""What a user would otherwise train embeddings with: arrays of a fixed size, indexed by position.

Both take the same batches as the table and the same optimizer, Adagrad with one
accumulator per value, and sum the gradients of equal ids.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

LEARNING_RATE = 0.01
FBGEMM = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


class Rival(Protocol):
    """An embedding with its optimizer."""

    name: str

    def lookup(self, indices: Tensor) -> Tensor:
        """Return one embedding per index, keeping no track for a backward pass."""

    def step(self, indices: Tensor, gradients: Tensor) -> None:
        """Take a training step: look up, go backward from these gradients, update."""


class TorchEmbedding:
    """`nn.Embedding(sparse=True)` with `torch.optim.Adagrad`."""

    name = "torch"

    def __init__(self, rows: int, dim: int) -> None:
        self._unchecked: Any = torch.sparse.check_sparse_tensor_invariants  # off, said aloud: else it warns
        self._embedding = nn.Embedding(rows, dim, sparse=True, _weight=torch.full((rows, dim), 0.01))
        self._optimizer = torch.optim.Adagrad(
            self._embedding.parameters(), lr=LEARNING_RATE, initial_accumulator_value=0.1
        )

    @torch.no_grad()
    def lookup(self, indices: Tensor) -> Tensor:
        found: Tensor = self._embedding(indices)
        return found

    def step(self, indices: Tensor, gradients: Tensor) -> None:
        self._optimizer.zero_grad()
        self._embedding(indices).backward(gradients)
        with self._unchecked(False):
            self._optimizer.step()


class FbgemmEmbedding:
    """FBGEMM's table on the CPU, whose optimizer is fused into its backward pass."""

    name = "fbgemm"

    def __init__(self, rows: int, dim: int, batch: int) -> None:
        training: Any = importlib.import_module(FBGEMM)
        with quiet_logs():
            self._table = training.SplitTableBatchedEmbeddingBagsCodegen(
                [(rows, dim, training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
                optimizer=training.OptimType.EXACT_ADAGRAD,
                learning_rate=LEARNING_RATE,
                device=torch.device("cpu"),
            )
        for weights in self._table.split_embedding_weights():
            weights.fill_(0.01)
        self._offsets = torch.arange(batch + 1)  # bags of one

    @torch.no_grad()
    def lookup(self, indices: Tensor) -> Tensor:
        found: Tensor = self._table(indices, self._offsets)
        return found

    def step(self, indices: Tensor, gradients: Tensor) -> None:
        self._table(indices, self._offsets).backward(gradients)


def why_no_fbgemm() -> str | None:
    """Return why there is no FBGEMM to compare with; None when there is."""
    try:
        with quiet_logs():
            importlib.import_module(FBGEMM)
    except ModuleNotFoundError as error:
        return f"no module {error.name}: pip install --no-deps fbgemm-gpu-cpu"
    except (ImportError, OSError) as error:
        return f"does not load next to torch {torch.__version__}: {error}"
    return None


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Suppress log lines below a warning: FBGEMM logs some 20 per table, and a run some at its end."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
