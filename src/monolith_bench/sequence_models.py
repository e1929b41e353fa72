"""The models of `monolith experiment sequences`, with the published settings, and the batches they read.

Training pads the histories of a batch to one length: every step then has the same shapes, nothing in it waits
for the device, and a GPU can replay it as one graph. A processor pads only to the longest history of a batch,
and computes no scores for padding: most histories of the larger sets have under ten steps.

`padded_states` computes with the layers of an encoder what the encoder itself computes for jagged histories;
the steps behind the end of a history are never seen by those before, since attention is causal, and have no
part in the loss. Evaluation calls the encoder itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.data import UserSequences
from monolith.feature import Batch, Each, FeatureIds
from monolith.model import HSTU, EmbeddingOptimizer, Feature, GRU4Rec, SASRec
from monolith.model.next_item import NextItem
from monolith.nn import GRUEncoder, HSTUEncoder, SASRecEncoder
from monolith.nn.layers.jagged_attention import positions_of
from monolith.nn.layers.transducers import HSTULayer, SASRecLayer
from monolith.table import Adam
from monolith.tensors import RaggedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The published settings; a test makes them smaller."""

    dim: int = 50
    layers: int = 2
    heads: int = 1
    max_length: int = 200
    dropout: float = 0.2
    negatives: int = 128
    temperature: float = 0.05
    batch: int = 128
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """Steps of some users, end to end, with the next step of each. On one device."""

    items: Tensor
    """int64 of shape (steps,): numbers from 0 on."""
    times: Tensor
    """int64 of shape (steps,): Unix seconds."""
    next_items: Tensor
    """int64 of shape (steps,): what each step predicts."""
    next_times: Tensor
    """int64 of shape (steps,): when that happened, which a server knows, too: it is the time of a request."""
    row_splits: Tensor
    """int64 of shape (users + 1,)."""

    @classmethod
    def of(cls, log: UserSequences, rows: Tensor, ends: Tensor, most: int, device: torch.device) -> Histories:
        """Take the last `most` steps before each end; the step at the end is the last that is predicted."""
        places, splits = log.windows(rows, ends, most)
        # One copy for all: each would wait for the device.
        columns = torch.stack(
            [log.items[places], log.times[places], log.items[places + 1], log.times[places + 1]]
        )
        if device.type == "cuda":
            columns, splits = columns.pin_memory(), splits.pin_memory()
        items, times, next_items, next_times = columns.to(device, non_blocking=True)
        return cls(items, times, next_items, next_times, splits.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True, eq=False)
class PaddedHistories:
    """Histories of some users, padded at the end to one length. On one device."""

    items: Tensor
    """int64 of shape (users, length)."""
    times: Tensor
    next_items: Tensor
    next_times: Tensor
    real: Tensor
    """bool of the same shape: which steps there are. Other steps have any item and time."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedSteps:
    """The steps of all users that are trained on, padded to one length, on the device that trains.

    They are the same in every epoch: the last steps of each user before the test. So a batch is a choice of
    rows, which is made on the device.
    """

    items: Tensor
    """int64 of shape (users, length + 1): the last step of each is only predicted."""
    times: Tensor
    lengths: Tensor
    """int64 of shape (users,): the steps that predict another."""

    @classmethod
    def of(cls, log: UserSequences, ends: Tensor, most: int, device: torch.device) -> TrainedSteps:
        """Take the last `most` steps before each end, and the step at the end."""
        rows = torch.arange(len(log))
        places, splits = log.windows(rows, ends, most)
        lengths = splits.diff()
        row = torch.repeat_interleave(rows, lengths)
        column = torch.arange(len(places)) - splits[row]
        items = torch.zeros(len(log), most + 1, dtype=torch.int64)
        times = torch.zeros_like(items)
        for padded, of in ((items, log.items), (times, log.times)):
            padded[row, column] = of[places]
            padded[row, column + 1] = of[places + 1]
        return cls(items.to(device), times.to(device), lengths.to(device))

    def batch(self, rows: Tensor) -> PaddedHistories:
        """Return the histories of these rows; -1 is a user without steps, which fills a batch."""
        chosen = rows.clamp(min=0)
        items, times = self.items[chosen], self.times[chosen]
        lengths = torch.where(rows >= 0, self.lengths[chosen], 0)
        if rows.device.type == "cpu":
            longest = max(1, int(lengths.max()))
            items, times = items[:, : longest + 1], times[:, : longest + 1]
        steps = torch.arange(items.shape[1] - 1, device=rows.device)
        real = steps < lengths[:, None]
        return PaddedHistories(items[:, :-1], times[:, :-1], items[:, 1:], times[:, 1:], real)


def padded_states(encoder: nn.Module, values: Tensor, times: Tensor, asked: Tensor) -> Tensor:
    """Return the states that an encoder has after the steps of padded histories.

    Args:
        values: float of shape (users, length, dim).
        times: int64 of shape (users, length): when each step happened.
        asked: int64 of the same shape: when the next step happens.
    """
    if isinstance(encoder, HSTUEncoder):
        return _padded_hstu(encoder, values, times, asked)
    if isinstance(encoder, SASRecEncoder):
        return _padded_sasrec(encoder, values)
    assert isinstance(encoder, GRUEncoder)
    states, _ = encoder.gru(encoder.dropout(values).transpose(0, 1))
    return cast(Tensor, encoder.output(states.transpose(0, 1)))


def _padded_hstu(encoder: HSTUEncoder, values: Tensor, times: Tensor, asked: Tensor) -> Tensor:
    users, length, _ = values.shape
    steps = torch.arange(length, device=values.device)
    apart = (steps[:, None] - steps).clamp(min=0)
    past = (steps[:, None] >= steps).to(values.dtype) / encoder.max_length
    gaps = (asked[:, :, None] - times[:, None, :]).clamp(min=1)
    # All layers have the same buckets; see `HSTULayer`.
    buckets = (gaps.to(torch.float64).log() / 0.301).long().clamp(max=encoder.time_buckets - 1).flatten(0, 1)
    for each in encoder.layers:
        layer = cast(HSTULayer, each)
        assert layer.by_time is not None
        # Each query has a copy of the biases: the gradient of an index would add millions of numbers to 128
        # places, one by one; that of copies adds a few hundred to each place, and then the copies.
        bias = layer.by_time.expand(users * length, -1).gather(1, buckets).view(users, 1, length, length)
        bias = bias + layer.by_distance.expand(length, -1).gather(1, apart)
        projected = functional.silu(layer.norm(values) @ layer.kernel)
        gate, content, query, key = torch.split(projected, layer.widths, 2)
        content, query, key = (
            one.view(users, length, layer.heads, -1).transpose(1, 2) for one in (content, query, key)
        )
        weights = functional.silu(query @ key.transpose(2, 3) + bias) * past
        attended = (weights @ content).transpose(1, 2).flatten(2)
        values = values + layer.output(layer.dropout(layer.output_norm(attended) * gate))
    return values


def _padded_sasrec(encoder: SASRecEncoder, values: Tensor) -> Tensor:
    values = encoder.dropout(values + encoder.positions[: values.shape[1]])
    for each in encoder.layers:
        layer = cast(SASRecLayer, each)
        read = layer.attention(layer.attention_norm(values))
        query, key, content = read.view(*values.shape[:2], 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(
            query, key, content, dropout_p=layer.dropout.p if layer.training else 0.0, is_causal=True
        )
        values = values + layer.dropout(layer.attention_output(found.transpose(1, 2).flatten(2)))
        values = values + layer.dropout(layer.network(layer.network_norm(values)))
    return cast(Tensor, encoder.norm(values))


class NextItemModel(nn.Module):
    """Vectors of items, and an encoder of histories whose states find the next item by cosine."""

    def __init__(self, items: int, encoder: nn.Module, settings: Settings, *, timed: bool) -> None:
        super().__init__()
        self._settings, self._timed = settings, timed
        self.items = nn.Embedding(items, settings.dim)
        nn.init.trunc_normal_(self.items.weight, std=0.02)
        self.encoder = encoder
        self.dropout = nn.Dropout(settings.dropout)
        # The other encoders have positions of their own, or need none.
        self.positions = nn.Parameter(torch.empty(settings.max_length, settings.dim)) if timed else None
        if self.positions is not None:
            nn.init.xavier_normal_(self.positions)
        if isinstance(encoder, SASRecEncoder):
            nn.init.trunc_normal_(encoder.positions, std=settings.dim**-0.5)

    def states(self, batch: Histories) -> Tensor:
        """Return a state of length 1 for each step, by the encoder: float of shape (steps, dim)."""
        values = self._values(batch.items)
        if self.positions is None:
            states = self.encoder(values, batch.row_splits)
        else:
            places = positions_of(batch.row_splits, len(values))
            values = self.dropout(values + self.positions[places])
            states = self.encoder(values, batch.row_splits, batch.times, batch.next_times)
        return functional.normalize(states, dim=1, eps=1e-6)

    def padded_states(self, batch: PaddedHistories) -> Tensor:
        """Return what `states` does, for padded histories: float of shape (users, length, dim)."""
        values = self._values(batch.items)
        if self.positions is not None:
            values = self.dropout(values + self.positions[: values.shape[1]])
        states = padded_states(self.encoder, values, batch.times, batch.next_times)
        return functional.normalize(states, dim=2, eps=1e-6)

    def _values(self, items: Tensor) -> Tensor:
        # The gradient of `index_select` is an addition that a graph can contain.
        found = self.items.weight.index_select(0, items.flatten()).view(*items.shape, -1)
        return found * math.sqrt(self._settings.dim)

    def vectors(self) -> Tensor:
        """Return the vector of each item, of length 1."""
        return functional.normalize(self.items.weight, dim=1, eps=1e-6)

    def loss(self, batch: PaddedHistories) -> Tensor:
        """Return how badly the states pick the next items out of others that are drawn evenly."""
        states, wanted, real = self.padded_states(batch).flatten(0, 1), batch.next_items.flatten(), batch.real
        real, count = real.flatten(), self.items.num_embeddings
        if states.device.type == "cpu":  # a GPU would have to wait for how many there are
            states, wanted, real = states[real], wanted[real], real[real]
        wanted = wanted[:, None]
        drawn = torch.randint(count - 1, (len(wanted), self._settings.negatives), device=wanted.device)
        drawn += drawn >= wanted  # never the wanted one: all others are as likely
        # The product with all items and a choice of its columns: the vectors of the drawn ones, gathered for
        # each step, would be 128 times as much memory as the states.
        scores = states @ self.vectors().t()
        chosen = scores.gather(1, torch.cat([wanted, drawn], 1)) / self._settings.temperature
        losses = -chosen.log_softmax(1)[:, 0]
        return losses.where(real, 0.0).sum() / real.sum().clamp(min=1)

    def queries(self, batch: Histories) -> Tensor:
        """Return the last state of each user: what the item behind the history is found by."""
        return self.states(batch)[batch.row_splits[1:] - 1]


def _attending(kind: type[HSTUEncoder | SASRecEncoder], items: int, settings: Settings) -> NextItemModel:
    encoder = kind(
        settings.dim,
        settings.max_length,
        layers=settings.layers,
        heads=settings.heads,
        dropout=settings.dropout,
    )
    return NextItemModel(items, encoder, settings, timed=kind is HSTUEncoder)


def _gru4rec(items: int, settings: Settings) -> NextItemModel:
    encoder = GRUEncoder(settings.dim, settings.max_length, dropout=settings.dropout)
    return NextItemModel(items, encoder, settings, timed=False)


def _hstu_large(items: int, settings: Settings) -> NextItemModel:
    return _attending(HSTUEncoder, items, replace(settings, layers=8, heads=2))


MODELS: Mapping[str, Callable[[int, Settings], NextItemModel]] = {
    "sasrec": partial(_attending, SASRecEncoder),
    "hstu": partial(_attending, HSTUEncoder),
    "hstu-large": _hstu_large,
    "gru4rec": _gru4rec,
}
"""Makes a model that has learned nothing, of so many items."""


READY: Mapping[str, tuple[Callable[..., NextItem], Mapping[str, int]]] = {
    "sasrec": (SASRec, {}),
    "hstu": (HSTU, {}),
    "hstu-large": (HSTU, {"layers": 8, "heads": 2}),
    "gru4rec": (GRU4Rec, {"layers": 1}),
}
"""The ready model of each name, and what is not as `Settings` says."""


class TableModel(nn.Module):
    """A ready model with rows in tables. It has the methods of `NextItemModel`."""

    def __init__(self, kind: str, items: int, settings: Settings, seed: int, device: torch.device) -> None:
        super().__init__()
        made, changed = READY[kind]
        sizes: dict[str, Any] = {"dim": settings.dim, "layers": settings.layers, **changed}
        beta1, beta2 = settings.betas
        self._count = items
        self.model = made(
            ["item", Feature(name="history", shares="item", combiner=Each())],
            max_length=settings.max_length,
            temperature=settings.temperature,
            dropout=settings.dropout,
            optimizer=Adam(learning_rate=settings.rate, beta1=beta1, beta2=beta2, epsilon=1e-8),
            device=str(device),
            seed=seed,
            **sizes,
        )
        self.rows = EmbeddingOptimizer(self.model)
        """Trains the rows; other parameters need another optimizer."""

    def loss(self, batch: Histories) -> Tensor:
        return self.model.pick(_as_batch(batch)).loss

    def vectors(self) -> Tensor:
        return self.model.items({"item": torch.arange(self._count)})

    def queries(self, batch: Histories) -> Tensor:
        return self.model.users(_as_batch(batch))


def _as_batch(given: Histories) -> Batch:
    """Return the histories as a run reads them: an example for each user, whose item is the last next one."""
    last = given.row_splits[1:] - 1
    ids: dict[str, RaggedTensor | Tensor] = {
        "item": given.next_items[last],
        "history": RaggedTensor(given.items, given.row_splits),
        "history.time": RaggedTensor(given.times, given.row_splits),
    }
    return Batch(FeatureIds.pack(ids, event_times=given.next_times[last]))
