"""The model of `bench stream` as one writes it in plain torch: nn.Embedding, and padded histories.

It has the weights of `SequenceRanker` with the encoder "hstu", and gives the same logits; a test compares
both. Histories are padded on the left to the longest of a batch, so that the item that is asked about is
always the last step. Attention is computed for all pairs of steps, and pairs with a step of the padding or of
the future are multiplied by 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.data.records import Records
from monolith.nn.layers.jagged_attention import gap_buckets
from monolith.nn.layers.transducers import LAYER_NORM_EPSILON
from monolith_bench.listening import LABEL, STEPS, TABLES

_TIME_BUCKETS = 128


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """Examples with histories of one length, on one device."""

    ids: Mapping[str, Tensor]
    """int64 by feature, of shape (examples,), or (examples, steps) of the history, padded with ID 0."""
    real: Tensor
    """bool of shape (examples, steps + 1): which steps there are; the last is the item asked about."""
    times: Tensor
    """int64 of shape (examples, steps + 1): Unix seconds."""
    labels: Tensor

    @classmethod
    def of(cls, records: Records, device: torch.device, length: int | None = None) -> PaddedBatch:
        """Pad the histories of some records to the longest of them, or to `length` steps."""
        lengths = records["history"].row_lengths()
        longest = int(lengths.max()) if length is None else length
        real = torch.arange(longest) >= longest - lengths[:, None]

        def padded(name: str) -> Tensor:
            found = torch.zeros(real.shape, dtype=torch.int64)
            found[real] = records[name].flat_values
            return found

        lists = ("history", *(f"history.{name}" for name in STEPS))
        ids = {name: records[name].flat_values for name in TABLES if name != "action"}
        ids |= {name: padded(name) for name in lists}
        own = torch.ones(len(records), 1, dtype=torch.bool)
        times = torch.cat([padded("history.time"), records["time"].flat_values[:, None]], 1)
        return cls(
            {name: found.to(device) for name, found in ids.items()},
            torch.cat([real, own], 1).to(device),
            times.to(device),
            records[LABEL].flat_values.to(device),
        )

    def __len__(self) -> int:
        return len(self.labels)


class LookedUp(torch.autograd.Function):
    """`table[index]`, with a gradient by histogram.

    The one that torch derives adds all pairs of steps to the places of the table one after another.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size, ctx.dtype = len(table), table.dtype
        return table[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        found = torch.bincount(index.flatten(), gradient.flatten().float(), ctx.size)
        return found.to(ctx.dtype), None


class PlainLayer(nn.Module):
    """A layer of HSTU over padded sequences."""

    def __init__(self, dim: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.heads, self.max_length = heads, max_length
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPSILON)
        self.kernel = nn.Parameter(torch.empty(dim, 4 * dim).normal_(std=0.02))
        self.output_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPSILON)
        self.output = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.output.weight)
        self.by_distance = nn.Parameter(torch.empty(max_length).normal_(std=0.02))
        self.by_time = nn.Parameter(torch.empty(_TIME_BUCKETS).normal_(std=0.02))

    def forward(self, steps: Tensor, mask: Tensor, apart: Tensor, buckets: Tensor) -> Tensor:
        """Return steps of the same shape (examples, steps, dim)."""
        parts = functional.silu(self.norm(steps) @ self.kernel)
        gate, content, query, key = parts.chunk(4, 2)
        content, query, key = (
            one.view(*one.shape[:2], self.heads, -1).transpose(1, 2) for one in (content, query, key)
        )
        by_time = cast(Any, LookedUp).apply(self.by_time, buckets)
        scores = query @ key.transpose(2, 3)
        bias = (cast(Any, LookedUp).apply(self.by_distance, apart) + by_time)[:, None].to(scores.dtype)
        weights = functional.silu(scores + bias) / self.max_length
        attended = (weights * mask[:, None]) @ content
        changed: Tensor = self.output(self.output_norm(attended.transpose(1, 2).flatten(2)) * gate)
        return steps + changed


class PlainHSTU(nn.Module):
    """Embeddings, layers of HSTU over padded histories, and an MLP over the last state and the features."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        dim: int,
        layers: int,
        heads: int,
        max_length: int,
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        self.dim, self.max_length = dim, max_length + 1
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(size, dim, sparse=True) for name, size in sizes.items()}
        )
        for table in self.tables.values():
            nn.init.uniform_(table.weight, -0.05, 0.05)  # type: ignore[arg-type]
        self.layers = nn.ModuleList(PlainLayer(dim, heads, self.max_length) for _ in range(layers))
        widths = [dim * (1 + len(TABLES)), *hidden]
        mlp: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            mlp += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.mlp = nn.Sequential(*mlp, nn.Linear(widths[-1], 1))

    def forward(self, batch: PaddedBatch) -> Tensor:
        """Return logits of shape (examples,)."""
        ids = batch.ids
        item = self.tables["item"](ids["item"])
        steps = self.tables["item"](ids["history"])
        for name in STEPS:
            steps = steps + self.tables[name](ids[f"history.{name}"])
        steps = torch.cat([steps, item[:, None]], 1) * math.sqrt(self.dim)
        numbers = torch.arange(steps.shape[1], device=steps.device)
        apart = (numbers[:, None] - numbers).clamp(min=0)
        mask = torch.tril(batch.real[:, None, :].expand(-1, steps.shape[1], -1))
        # Once for all layers.
        buckets = gap_buckets(batch.times[:, :, None] - batch.times[:, None, :], _TIME_BUCKETS)
        for layer in self.layers:
            steps = layer(steps, mask, apart, buckets)
        # An example has no action: it is what is to be predicted.
        vectors = [
            torch.zeros_like(item) if name == "action" else self.tables[name](ids[name]) for name in TABLES
        ]
        logits: Tensor = self.mlp(torch.cat([steps[:, -1], *vectors], 1))
        return logits.squeeze(1)


class PlainTrainer:
    """Trains a `PlainHSTU`: Adam for dense weights, sparse Adagrad for embeddings."""

    def __init__(self, model: PlainHSTU, device: torch.device, *, half: bool) -> None:
        self._model = model.to(device)
        self._half, self._device = half, device
        dense = [weight for name, weight in model.named_parameters() if not name.startswith("tables.")]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(dense, lr=1e-3),
            torch.optim.Adagrad(model.tables.parameters(), lr=0.05, initial_accumulator_value=0.1),
        ]

    def step(self, batch: PaddedBatch) -> Tensor:
        """Train on one batch and return the loss, on the device."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16) if self._half else nullcontext():
            logits = self._model(batch)
        loss = functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()
