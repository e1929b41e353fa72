"""Encoders of jagged sequences: what a user did, step by step, becomes a state for each step.

Sequences lie end to end in one tensor, as in a `RaggedTensor`: values of shape (n, dim), and row splits that
say where each one begins. Step i of a sequence sees steps 0 to i of the same sequence and nothing else, so
that each state may be trained to predict the step behind it.

    HSTUEncoder     attention without softmax, by content, distance and time (Zhai et al., 2024)
    SASRecEncoder   a transformer with causal attention (Kang and McAuley, 2018)
    GRUEncoder      a recurrent network (Hidasi et al., 2016), for comparison

`jagged_attention` says how the first two attend. A graph of torch.export cannot look at lengths: there
`numbers` is given, and sequences are padded to as many steps.

A step sees the steps before it, and none behind it. So what a history is to one next step it is to any: it is
encoded once (`encode`), and each candidate for the next step costs one step more (`following`).

    encoded = encoder.encode(steps, row_splits)                  keys and contents of each layer, by step
    states = encoder.following(encoded, row_splits, candidates)  candidates (sequences, any number, dim)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import check_positive, check_shape
from monolith.nn.layers.jagged_attention import (
    LengthGroup,
    PairBias,
    all_in_one,
    gap_buckets,
    hstu_attention,
    positions_of,
    softmax_attention,
)

LAYER_NORM_EPSILON = 1e-6
"""Of the norms of an HSTU layer, as published. In a new layer the sums over steps have a variance of 1e-9 to
1e-7, since weights are divided by the most steps: a larger epsilon hides what attention found."""


class _Encoder(nn.Module):
    """What all encoders check.

    Args:
        dim: Width of a step, before and after.
        max_length: The most steps of a sequence.
    """

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        check_positive(type(self).__name__, dim=dim, max_length=max_length)
        self.dim = dim
        self.max_length = max_length

    def _positions(self, values: Tensor, row_splits: Tensor, numbers: Tensor | None) -> Tensor:
        """Return the position of each step, after a look at the arguments.

        Raises:
            LayerArgumentError: A shape or a dtype is wrong, or a sequence is too long.
        """
        name = type(self).__name__
        check_shape(name, "values", values, None, self.dim)
        check_shape(name, "row_splits", row_splits, None)
        if row_splits.dtype is not torch.int64 or not row_splits.shape[0]:
            raise LayerArgumentError(f"{name}: row_splits must be int64 of shape (sequences + 1,)")
        if numbers is not None or row_splits.shape[0] < 2:
            return positions_of(row_splits, values.shape[0]).clamp(max=self.max_length - 1)
        if row_splits.is_cuda:
            # The host reads no lengths. As with an index out of range, CUDA reports an error later.
            fits = row_splits.diff().max() <= self.max_length
            torch._assert_async(fits, f"{name}: a sequence has more steps than max_length, {self.max_length}")
            return positions_of(row_splits, values.shape[0]).clamp(max=self.max_length - 1)
        if (longest := int(row_splits.diff().max())) > self.max_length:
            raise LayerArgumentError(
                f"{name}: a sequence has {longest} steps, and max_length is {self.max_length}; keep the last "
                f"{self.max_length} of each, or set max_length"
            )
        return positions_of(row_splits, values.shape[0])

    def _histories(
        self, encoded: Tensor, row_splits: Tensor, values: Tensor, numbers: Tensor | None
    ) -> tuple[Tensor, LengthGroup]:
        """Return encoded steps, at least one, and where the steps of each history are among them.

        Raises:
            LayerArgumentError: A shape is wrong, or a history is so long that no step may follow.
        """
        name = type(self).__name__
        sequences = row_splits.shape[0] - 1
        check_shape(name, "encoded", encoded, None, None)
        check_shape(name, "values", values, sequences, None, self.dim)
        if numbers is None:
            longest = int(row_splits.diff().max()) if sequences else 0
            if longest >= self.max_length:
                raise LayerArgumentError(
                    f"{name}: a history has {longest} steps, and with the next one max_length, which is "
                    f"{self.max_length}, is exceeded; keep the last {self.max_length - 1} of each"
                )
            numbers = torch.arange(longest, device=row_splits.device)
        if not encoded.shape[0]:
            encoded = encoded.new_zeros(1, encoded.shape[1])
        return encoded, all_in_one(row_splits, numbers, encoded.shape[0])


def _padded(encoded: Tensor, histories: LengthGroup) -> Tensor:
    """Return encoded steps by history, (sequences, length, floats), with zeros behind the end of each."""
    return torch.where(histories.real[:, :, None], encoded[histories.places], 0.0)


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Return (sequences, steps, heads * width) as (sequences, heads, steps, width)."""
    return values.view(*values.shape[:2], heads, values.shape[2] // heads).transpose(1, 2)


class HSTUEncoder(_Encoder):
    """Layers of hierarchical sequential transduction units over jagged sequences.

    A layer computes `u, v, q, k = silu(norm(x) W)`, weights `a = silu(q . k + bias) / max_length` of all
    steps up to its own, and `x + (norm(a v) * u) W'`. The weights are not normalised over the steps: how
    much a user did counts, too. The bias is learned by how far apart two steps are, in steps and in time.

    Shapes: n steps of all sequences together, values float of shape (n, dim) in and out.

    Args:
        dim: Width of a step.
        max_length: The most steps of a sequence.
        layers: How many.
        heads: Of each layer.
        attention_dim: Width of `q` and `k` in a head; by default `dim // heads`.
        linear_dim: Width of `u` and `v` in a head; by default `dim // heads`.
        dropout: The fraction of the inputs of a layer's last product that is dropped in training.
        time_buckets: How many buckets time gaps fall into, by their logarithm; 0 leaves time out.

    Examples:
        >>> import torch
        >>> from monolith import RaggedTensor
        >>> from monolith.nn import HSTUEncoder
        >>> encoder = HSTUEncoder(8, max_length=50, layers=2, heads=2)
        >>> seen = RaggedTensor(torch.randn(5, 8), torch.tensor([0, 3, 5]))  # two users, 3 and 2 steps
        >>> seconds = torch.tensor([0, 60, 3600, 0, 86400])
        >>> encoder(seen.values, seen.row_splits, seconds).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        dim: int,
        max_length: int,
        *,
        layers: int = 2,
        heads: int = 1,
        attention_dim: int | None = None,
        linear_dim: int | None = None,
        dropout: float = 0.0,
        time_buckets: int = 128,
    ) -> None:
        super().__init__(dim, max_length)
        share = max(1, dim // heads) if isinstance(heads, int) and heads > 0 else 1
        attention_dim = share if attention_dim is None else attention_dim
        linear_dim = share if linear_dim is None else linear_dim
        check_positive("HSTUEncoder", layers=layers, heads=heads)
        check_positive("HSTUEncoder", attention_dim=attention_dim, linear_dim=linear_dim)
        if time_buckets < 0:
            raise LayerArgumentError(f"HSTUEncoder: time_buckets must be 0 or more, got {time_buckets}")
        self.time_buckets = time_buckets
        self.layers = nn.ModuleList(
            HSTULayer(dim, max_length, heads, attention_dim, linear_dim, dropout, time_buckets)
            for _ in range(layers)
        )

    def forward(
        self,
        values: Tensor,
        row_splits: Tensor,
        times: Tensor | None = None,
        asked: Tensor | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Return a state for each step, float of shape (n, dim).

        Args:
            values: float of shape (n, dim).
            row_splits: int64 of shape (sequences + 1,).
            times: Seconds, of shape (n,): when each step happened. Needed if there are time buckets.
            asked: Seconds, of shape (n,): when the state of each step is asked for, such as the time of the
                step that it predicts; by default that of the step itself.
            numbers: For a graph of torch.export: 0, 1 and so on, as many as the longest sequence has, or
                more. Lengths are then not looked at.
        """
        self._positions(values, row_splits, numbers)
        self._check_times(times, values.shape[0])
        if self.time_buckets and asked is not None:
            check_shape("HSTUEncoder", "asked", asked, values.shape[0])
        for layer in self.layers:
            values = layer(values, row_splits, times, times if asked is None else asked, numbers)
        return values

    def encode(
        self, values: Tensor, row_splits: Tensor, times: Tensor | None = None, numbers: Tensor | None = None
    ) -> Tensor:
        """Return what next steps read of some histories, float of shape (n, floats); see `following`.

        Args:
            values, row_splits, times, numbers: As of `forward`.
        """
        self._positions(values, row_splits, numbers)
        self._check_times(times, values.shape[0])
        kept: list[Tensor] = []
        layers: list[Any] = [*self.layers]
        for layer in layers[:-1]:
            values = layer(values, row_splits, times, times, numbers, kept)
        return torch.cat([*kept, *layers[-1].keys(values)], 1)

    def following(
        self,
        encoded: Tensor,
        row_splits: Tensor,
        values: Tensor,
        times: tuple[Tensor, Tensor] | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Return the states of candidates for the next step, float of shape (sequences, candidates, dim).

        Each is the state that `forward` returns for the candidate, if it alone is appended to the history.

        Args:
            encoded: What `encode` returned for the histories.
            row_splits: Of the histories, int64 of shape (sequences + 1,).
            values: float of shape (sequences, candidates, dim).
            times: Seconds: of the steps of histories, of shape (n,), and of candidates, of shape
                (sequences, candidates), or (sequences, 1) for all of a history. Needed if there are time
                buckets.
            numbers: As of `forward`.
        """
        encoded, histories = self._histories(encoded, row_splits, values, numbers)
        self._check_times(None if times is None else times[0], None)
        last = histories.real.sum(1, keepdim=True)
        steps = torch.arange(histories.real.shape[1], device=values.device)
        apart = (last - steps).clamp(min=0, max=self.max_length - 1)
        buckets = None
        if self.time_buckets:
            assert times is not None
            then = times[0] if times[0].shape[0] else times[0].new_zeros(1)
            gaps = times[1][:, :, None] - then[histories.places][:, None, :]
            buckets = gap_buckets(gaps, self.time_buckets)
        bias = _FollowingBias(apart, buckets)
        layers: list[Any] = [*self.layers]
        parts = torch.split(_padded(encoded, histories), [w for one in layers for w in one.kept], 2)
        for number, layer in enumerate(layers):
            values = layer.following(values, parts[2 * number], parts[2 * number + 1], bias)
        return values

    def _check_times(self, times: Tensor | None, steps: int | None) -> None:
        if not self.time_buckets:
            return
        if times is None:
            raise LayerArgumentError(
                "HSTUEncoder: times must be given, or leave time out by time_buckets = 0"
            )
        check_shape("HSTUEncoder", "times", times, steps)


class _FollowingBias(NamedTuple):
    """How far the steps of histories are from candidates for their next step."""

    apart: Tensor
    """int64 of shape (sequences, length): in steps."""
    buckets: Tensor | None
    """int64 of shape (sequences, candidates or 1, length): in time, as numbers of buckets."""


class HSTULayer(nn.Module):
    """One layer of an `HSTUEncoder`, which documents the arguments."""

    def __init__(
        self,
        dim: int,
        max_length: int,
        heads: int,
        attention_dim: int,
        linear_dim: int,
        dropout: float,
        time_buckets: int,
    ) -> None:
        super().__init__()
        self.max_length, self.heads = max_length, heads
        self.widths = [heads * linear_dim, heads * linear_dim, heads * attention_dim, heads * attention_dim]
        self.kept = (heads * attention_dim, heads * linear_dim)
        """Widths of what `keys` returns."""
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPSILON)
        self.kernel = nn.Parameter(torch.empty(dim, sum(self.widths)))
        nn.init.normal_(self.kernel, std=0.02)
        self.output_norm = nn.LayerNorm(heads * linear_dim, eps=LAYER_NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(heads * linear_dim, dim)
        nn.init.xavier_uniform_(self.output.weight)
        self.by_distance = nn.Parameter(torch.empty(max_length))
        nn.init.normal_(self.by_distance, std=0.02)
        self.by_time = nn.Parameter(torch.empty(time_buckets)) if time_buckets else None
        if self.by_time is not None:
            nn.init.normal_(self.by_time, std=0.02)

    def forward(
        self,
        values: Tensor,
        row_splits: Tensor,
        times: Tensor | None,
        asked: Tensor | None,
        numbers: Tensor | None,
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        """Return values of the same shape; see `HSTUEncoder.forward`.

        Args:
            kept: Where what `keys` returns is put, too.
        """
        gate, content, query, key = self._projected(values)
        if kept is not None:
            kept += [key, content]

        query, key, content = (torch.unflatten(one, 1, (self.heads, -1)) for one in (query, key, content))
        bias = PairBias(self.by_distance)
        if self.by_time is not None:
            bias = PairBias(self.by_distance, self.by_time, times, asked)
        attended = hstu_attention(query, key, content, row_splits, self.max_length, bias, numbers).flatten(1)
        changed: Tensor = self.output(self.dropout(self.output_norm(attended) * gate))
        return values + changed

    def _projected(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return gate, content, query and key."""
        return torch.split(functional.silu(self.norm(values) @ self.kernel), self.widths, -1)

    def keys(self, values: Tensor) -> list[Tensor]:
        """Return the keys and the contents of steps, which later steps read."""
        _, content, _, key = self._projected(values)
        return [key, content]

    def following(self, values: Tensor, key: Tensor, content: Tensor, bias: _FollowingBias) -> Tensor:
        """Return values of the same shape; see `HSTUEncoder.following`.

        Args:
            values: float of shape (sequences, candidates, dim).
            key, content: Of histories, (sequences, length, width): zeros behind the end of each.
        """
        gate, own_content, query, own_key = self._projected(values)
        query, own_key, own_content, key, content = (
            _by_head(one, self.heads) for one in (query, own_key, own_content, key, content)
        )
        scores = query @ key.transpose(2, 3) + self.by_distance[bias.apart][:, None, None]
        own = (query * own_key).sum(3, keepdim=True) + self.by_distance[0]
        if self.by_time is not None:
            assert bias.buckets is not None
            scores = scores + self.by_time[bias.buckets][:, None]
            own = own + self.by_time[0]  # no time passes between a step and itself
        # The contents are divided in place of the weights: they are fewer.
        found = functional.silu(scores) @ (content / self.max_length)
        attended = (found + functional.silu(own) * (own_content / self.max_length)).transpose(1, 2).flatten(2)
        changed: Tensor = self.output(self.dropout(self.output_norm(attended) * gate))
        return values + changed


class SASRecEncoder(_Encoder):
    """A transformer over jagged sequences: blocks of causal attention and a feed-forward network.

    Shapes: n steps of all sequences together, values float of shape (n, dim) in and out.

    Args:
        dim: Width of a step.
        max_length: The most steps of a sequence; each position has a vector that is learned.
        layers: How many blocks.
        heads: Of each attention; they share `dim` evenly.
        hidden: Width of the feed-forward networks; by default `dim`.
        dropout: The fraction of attention weights, of hidden units and of each block's results that is
            dropped in training.

    Examples:
        >>> import torch
        >>> from monolith import RaggedTensor
        >>> from monolith.nn import SASRecEncoder
        >>> encoder = SASRecEncoder(8, max_length=50, layers=2)
        >>> seen = RaggedTensor(torch.randn(5, 8), torch.tensor([0, 3, 5]))  # two users, 3 and 2 steps
        >>> encoder(seen.values, seen.row_splits).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        dim: int,
        max_length: int,
        *,
        layers: int = 2,
        heads: int = 1,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, max_length)
        check_positive("SASRecEncoder", layers=layers, heads=heads)
        if dim % heads:
            raise LayerArgumentError(f"SASRecEncoder: {heads} heads cannot share a dim of {dim} evenly")
        self.positions = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.positions, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            SASRecLayer(dim, max_length, heads, dim if hidden is None else hidden, dropout)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, values: Tensor, row_splits: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return a state for each step, float of shape (n, dim).

        Args:
            values: float of shape (n, dim).
            row_splits: int64 of shape (sequences + 1,).
            numbers: As of `HSTUEncoder.forward`.
        """
        values = self.dropout(values + self.positions[self._positions(values, row_splits, numbers)])
        for layer in self.layers:
            values = layer(values, row_splits, numbers)
        states: Tensor = self.norm(values)
        return states

    def encode(self, values: Tensor, row_splits: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return what next steps read of some histories, float of shape (n, floats); see `following`.

        Args:
            values, row_splits, numbers: As of `forward`.
        """
        values = self.dropout(values + self.positions[self._positions(values, row_splits, numbers)])
        kept: list[Tensor] = []
        layers: list[Any] = [*self.layers]
        for layer in layers[:-1]:
            values = layer(values, row_splits, numbers, kept)
        return torch.cat([*kept, *layers[-1].keys(values)], 1)

    def following(
        self, encoded: Tensor, row_splits: Tensor, values: Tensor, numbers: Tensor | None = None
    ) -> Tensor:
        """Return the states of candidates for the next step; see `HSTUEncoder.following`."""
        encoded, histories = self._histories(encoded, row_splits, values, numbers)
        last = histories.real.sum(1).clamp(max=self.max_length - 1)
        values = self.dropout(values + self.positions[last][:, None])
        padding = torch.where(histories.real, 0.0, -math.inf)[:, None, None]
        parts = torch.split(_padded(encoded, histories), self.dim, 2)
        layers: list[Any] = [*self.layers]
        for number, layer in enumerate(layers):
            values = layer.following(values, parts[2 * number], parts[2 * number + 1], padding)
        states: Tensor = self.norm(values)
        return states


class SASRecLayer(nn.Module):
    """One block of a `SASRecEncoder`, which documents the arguments."""

    def __init__(self, dim: int, max_length: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        check_positive("SASRecEncoder", hidden=hidden)
        self.max_length, self.heads = max_length, heads
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = nn.Linear(dim, 3 * dim)
        self.attention_output = nn.Linear(dim, dim)
        self.network_norm = nn.LayerNorm(dim)
        self.network = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        values: Tensor,
        row_splits: Tensor,
        numbers: Tensor | None,
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        """Return values of the same shape; see `SASRecEncoder.forward`.

        Args:
            kept: Where what `keys` returns is put, too.
        """
        asked = self.attention(self.attention_norm(values))
        if kept is not None:
            kept += asked.chunk(3, 1)[1:]
        dropped = self.dropout.p if self.training else 0.0
        query, key, content = asked.unflatten(1, (3, self.heads, -1)).unbind(1)
        attended = softmax_attention(query, key, content, row_splits, self.max_length, dropped, numbers)
        return self._finished(values, attended.flatten(1))

    def keys(self, values: Tensor) -> list[Tensor]:
        """Return the keys and the contents of steps, which later steps read."""
        return [*self.attention(self.attention_norm(values)).chunk(3, 1)[1:]]

    def following(self, values: Tensor, key: Tensor, content: Tensor, padding: Tensor) -> Tensor:
        """Return values of the same shape; see `SASRecEncoder.following`.

        Args:
            values: float of shape (sequences, candidates, dim).
            key, content: Of histories, (sequences, length, dim): zeros behind the end of each.
            padding: What is added to scores, (sequences, 1, 1, length): -inf behind the end.
        """
        query, own_key, own_content = self.attention(self.attention_norm(values)).chunk(3, 2)
        query, own_key, own_content, key, content = (
            _by_head(one, self.heads) for one in (query, own_key, own_content, key, content)
        )
        query = query / math.sqrt(query.shape[3])
        own = (query * own_key).sum(3, keepdim=True)
        weights = torch.cat([query @ key.transpose(2, 3) + padding, own], 3).softmax(3)
        weights = functional.dropout(weights, self.dropout.p, self.training)
        attended = weights[..., :-1] @ content + weights[..., -1:] * own_content
        return self._finished(values, attended.transpose(1, 2).flatten(2))

    def _finished(self, values: Tensor, attended: Tensor) -> Tensor:
        values = values + self.dropout(self.attention_output(attended))
        changed: Tensor = self.dropout(self.network(self.network_norm(values)))
        return values + changed


class GRUEncoder(_Encoder):
    """A recurrent network over jagged sequences, without any padding.

    Shapes: n steps of all sequences together, values float of shape (n, dim) in and out.

    Args:
        dim: Width of a step.
        max_length: The most steps of a sequence.
        layers: How many.
        hidden: Width of the state; by default `dim`. Another one is brought back to `dim` by a linear layer.
        dropout: The fraction of the inputs, and of the states between layers, that is dropped in training.

    Examples:
        >>> import torch
        >>> from monolith import RaggedTensor
        >>> from monolith.nn import GRUEncoder
        >>> encoder = GRUEncoder(8, max_length=50)
        >>> seen = RaggedTensor(torch.randn(5, 8), torch.tensor([0, 3, 5]))  # two users, 3 and 2 steps
        >>> encoder(seen.values, seen.row_splits).shape
        torch.Size([5, 8])
    """

    def __init__(
        self, dim: int, max_length: int, *, layers: int = 1, hidden: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__(dim, max_length)
        hidden = dim if hidden is None else hidden
        check_positive("GRUEncoder", layers=layers, hidden=hidden)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(dim, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.output = nn.Identity() if hidden == dim else nn.Linear(hidden, dim)

    def forward(self, values: Tensor, row_splits: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return a state for each step, float of shape (n, dim).

        Args:
            values: float of shape (n, dim).
            row_splits: int64 of shape (sequences + 1,).
            numbers: As of `HSTUEncoder.forward`.
        """
        order, _, sizes = self._order(values, row_splits, numbers)
        if not len(values):
            return values
        found, _ = self.gru(PackedSequence(self.dropout(values)[order], sizes))
        states = torch.empty_like(order)
        states[order] = torch.arange(len(order), device=order.device)
        unpacked: Tensor = self.output(found.data[states])
        return unpacked

    def encode(self, values: Tensor, row_splits: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return the state behind each history, float of shape (sequences, floats); see `following`.

        Args:
            values, row_splits, numbers: As of `forward`.
        """
        order, longest_first, sizes = self._order(values, row_splits, numbers)
        layers, sequences = self.gru.num_layers, len(row_splits) - 1
        behind = values.new_zeros(layers, sequences, self.gru.hidden_size)
        if len(values):
            _, last = self.gru(PackedSequence(self.dropout(values)[order], sizes))
            behind = behind.index_copy(1, longest_first[: last.shape[1]], last)
        return behind.transpose(0, 1).flatten(1)

    def following(
        self, encoded: Tensor, row_splits: Tensor, values: Tensor, numbers: Tensor | None = None
    ) -> Tensor:
        """Return the states of candidates for the next step; see `HSTUEncoder.following`."""
        self._histories(encoded, row_splits, values, numbers)
        sequences, candidates, _ = values.shape
        behind = encoded.view(sequences, self.gru.num_layers, -1).transpose(0, 1)
        behind = behind.repeat_interleave(candidates, 1)
        _, last = self.gru(self.dropout(values).flatten(0, 1)[None], behind)
        states: Tensor = self.output(last[-1])
        return states.view_as(values)

    def _order(
        self, values: Tensor, row_splits: Tensor, numbers: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the order in which steps are read: all first ones, the longest sequence's first, then all
        second ones, and so forth; the sequences by length; and how many steps are read at a time."""
        positions = self._positions(values, row_splits, numbers)
        if numbers is not None:
            raise LayerArgumentError(
                "GRUEncoder: a recurrent network has an operator for each step of the longest sequence, and "
                "a graph has a fixed number of them; export a model with HSTUEncoder or SASRecEncoder"
            )
        lengths = row_splits.diff()
        longest_first = torch.argsort(lengths, descending=True, stable=True)
        ranks = torch.empty_like(lengths)
        ranks[longest_first] = torch.arange(len(lengths), device=lengths.device)
        rank_of_step = torch.repeat_interleave(ranks, lengths, output_size=len(values))
        order = torch.argsort(positions * len(lengths) + rank_of_step)
        return order, longest_first, torch.bincount(positions).cpu()
