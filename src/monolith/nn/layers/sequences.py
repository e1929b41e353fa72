"""Sequences: a user's behaviour, pooled with or without regard to the candidate item.

Sequences are padded tensors of shape (batch, length, dim), with a mask of shape (batch, length) or lengths of
shape (batch,). `SumPooling`, `AvgPooling` and `MaxPooling` reduce a list of equally shaped tensors to one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import (
    MLP,
    Activation,
    Dense,
    WeightInit,
    check_choice,
    check_positive,
    check_shape,
    check_widths,
    glorot_uniform,
    make_activation,
)


class SumPooling(nn.Module):
    """The elementwise sum of a non-empty list of tensors of one shape."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        _check(type(self).__name__, tensors)
        return _total(tensors)


class AvgPooling(nn.Module):
    """The elementwise mean of a non-empty list of tensors of one shape."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        _check(type(self).__name__, tensors)
        return _total(tensors) / len(tensors)


class MaxPooling(nn.Module):
    """The elementwise maximum of a non-empty list of tensors of one shape."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        _check(type(self).__name__, tensors)
        largest = tensors[0]
        for tensor in tensors[1:]:
            largest = torch.maximum(largest, tensor)
        return largest


def _total(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    # Into one new tensor: a stack would copy all of them first.
    total = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        total += tensor
    return total


def _check(layer: str, tensors: Sequence[Tensor]) -> None:
    if isinstance(tensors, Tensor) or not tensors:
        found = "one tensor" if isinstance(tensors, Tensor) else "an empty one"
        raise LayerArgumentError(f"{layer}: give a non-empty list of tensors, got {found}")
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise LayerArgumentError(f"{layer}: all tensors must have one shape, got {shapes}")


DIN_MODES = ("sum", "weighted")
ATTENTION_GRUS = ("AGRU", "AUGRU")


class DIN(nn.Module):
    """Deep interest network: each step of a sequence weighted by how it relates to the query.

    The weight is an MLP of [q, k, q - k, q * k]. It is not normalised over the steps, as
    in the paper: many relevant steps should say more than one.

    Args:
        dim: Width of the query and of each key.
        hidden_units: Widths of the MLP; the last is 1.
        mode: "sum" returns the weighted keys summed, "weighted" returns them one by one.
        decay: Divide the weights by `sqrt(dim)`.
    """

    def __init__(
        self,
        dim: int,
        hidden_units: Sequence[int],
        *,
        activations: Activation | Sequence[Activation] = None,
        mode: str = "sum",
        decay: bool = False,
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("DIN", dim=dim)
        check_choice("DIN", "mode", mode, DIN_MODES)
        units = check_widths("DIN", "hidden_units", hidden_units)
        if units[-1] != 1:
            raise LayerArgumentError(f"DIN: the last of hidden_units must be 1, got {list(units)}")
        self.dim = dim
        self.mode = mode
        self.decay = decay
        self.attention = MLP(4 * dim, units, activations=activations, kernel_init=kernel_init)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
        """Weight (batch, steps, dim) keys by a (batch, dim) query.

        Returns:
            float of shape (batch, dim), or (batch, steps, dim) in mode "weighted".
        """
        check_shape("DIN", "query", query, None, self.dim)
        check_shape("DIN", "keys", keys, query.shape[0], None, self.dim)
        _check_mask("DIN", mask, keys)
        queries = query.unsqueeze(1).expand_as(keys)
        relation = torch.cat([queries, keys, queries - keys, queries * keys], -1)
        weights: Tensor = self.attention(relation)
        if self.decay:
            weights = weights / self.dim**0.5
        if mask is not None:
            weights = weights.masked_fill(~mask.unsqueeze(-1), 0)
        if self.mode == "weighted":
            return weights * keys
        return torch.bmm(weights.transpose(1, 2), keys).squeeze(1)


class AGRUCell(nn.Module):
    """A GRU cell whose update listens to an attention weight `a` from 0 to 1.

    With reset gate r, update gate u and candidate `c = tanh([x, r h] W + b)`:

    - "AGRU": `h = (1 - a) h + a c`; the attention replaces the update gate.
    - "AUGRU": `u' = (1 - a) u; h = u' h + (1 - u') c`; the attention scales it.

    Args:
        in_features: Width of an input.
        units: Width of the state.
    """

    def __init__(
        self,
        in_features: int,
        units: int,
        *,
        att_type: str = "AGRU",
        activation: Activation = "tanh",
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("AGRUCell", in_features=in_features, units=units)
        check_choice("AGRUCell", "att_type", att_type, ATTENTION_GRUS)
        self.in_features = in_features
        self.units = units
        self.att_type = att_type
        self.gate_kernel = nn.Parameter(torch.empty(in_features + units, 2 * units))
        kernel_init(self.gate_kernel)
        # Gates start open, as usual for a GRU: at first the state is carried on.
        self.gate_bias = nn.Parameter(torch.ones(2 * units))
        self.candidate_kernel = nn.Parameter(torch.empty(in_features + units, units))
        kernel_init(self.candidate_kernel)
        self.candidate_bias = nn.Parameter(torch.zeros(units))
        self.activation = make_activation(activation, units)

    def forward(self, x: Tensor, state: Tensor, attention: Tensor) -> Tensor:
        """Take one step.

        Args:
            x: float of shape (batch, in_features).
            state: float of shape (batch, units).
            attention: float of shape (batch,).

        Returns:
            The next state, float of shape (batch, units).
        """
        check_shape("AGRUCell", "x", x, None, self.in_features)
        check_shape("AGRUCell", "state", state, x.shape[0], self.units)
        check_shape("AGRUCell", "attention", attention, x.shape[0])
        return self._step(*self._project(x), state, attention.unsqueeze(1))

    def run(self, inputs: Tensor, attention: Tensor, mask: Tensor | None = None) -> Tensor:
        """Take all steps from a state of zeros; a masked step leaves the state as it was.

        Args:
            inputs: float of shape (batch, steps, in_features).
            attention: float of shape (batch, steps).
            mask: bool of shape (batch, steps), true where a step is real.

        Returns:
            The last state, float of shape (batch, units).
        """
        check_shape("AGRUCell", "inputs", inputs, None, None, self.in_features)
        check_shape("AGRUCell", "attention", attention, *inputs.shape[:2])
        _check_mask("AGRUCell", mask, inputs)
        gates, candidates = self._project(inputs)  # one product for all steps
        state = inputs.new_zeros(inputs.shape[0], self.units)
        for step in range(inputs.shape[1]):
            after = self._step(gates[:, step], candidates[:, step], state, attention[:, step, None])
            state = after if mask is None else torch.where(mask[:, step, None], after, state)
        return state

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the input adds to the gates and to the candidate."""
        n = self.in_features
        return x @ self.gate_kernel[:n] + self.gate_bias, x @ self.candidate_kernel[:n] + self.candidate_bias

    def _step(self, gates: Tensor, candidate: Tensor, state: Tensor, attention: Tensor) -> Tensor:
        n = self.in_features
        reset, update = torch.addmm(gates, state, self.gate_kernel[n:]).sigmoid().chunk(2, 1)
        fresh: Tensor = self.activation(torch.addmm(candidate, reset * state, self.candidate_kernel[n:]))
        if self.att_type == "AGRU":
            return torch.lerp(state, fresh, attention)
        return torch.lerp(fresh, state, (1 - attention) * update)


class DIEN(nn.Module):
    """Deep interest evolution: how the interest that concerns the query came to be.

    A GRU turns the sequence into interests `s`, `softmax(s W q)` says which of them concern
    the query q, and an attention GRU follows those to the final state.

    Args:
        query_dim: Width of the query.
        key_dim: Width of each step of the sequence.
        num_units: Width of both states, hence of the result.
        att_type: "AGRU" or "AUGRU"; see `AGRUCell`.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        num_units: int,
        *,
        att_type: str = "AGRU",
        activation: Activation = "tanh",
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("DIEN", query_dim=query_dim, key_dim=key_dim, num_units=num_units)
        check_choice("DIEN", "att_type", att_type, ATTENTION_GRUS)
        self.query_dim = query_dim
        self.key_dim = key_dim
        self.gru = nn.GRU(key_dim, num_units, batch_first=True)
        self.attention = nn.Parameter(torch.empty(num_units, query_dim))
        kernel_init(self.attention)
        self.cell = AGRUCell(
            num_units, num_units, att_type=att_type, activation=activation, kernel_init=kernel_init
        )

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map a (batch, query_dim) query and (batch, steps, key_dim) keys to (batch, num_units)."""
        check_shape("DIEN", "query", query, None, self.query_dim)
        check_shape("DIEN", "keys", keys, query.shape[0], None, self.key_dim)
        _check_mask("DIEN", mask, keys)
        if mask is not None:
            # Real steps first, in their order: then no step that counts comes after padding.
            order = torch.argsort(mask, dim=1, descending=True, stable=True)
            keys = keys.gather(1, order.unsqueeze(-1).expand_as(keys))
            mask = mask.gather(1, order)
        interests: Tensor = self.gru(keys)[0]
        scores = (interests @ (query @ self.attention.t()).unsqueeze(-1)).squeeze(-1)
        return self.cell.run(interests, _masked_softmax(scores, mask), mask)


class DMRU2I(nn.Module):
    """Deep match to rank, user to item: a sequence pooled by position and content, times the item.

    Args:
        user_dim: Width of each step of the user's sequence.
        item_dim: Width of the item, hence of the result.
        seq_length: Steps in a sequence; each position has its own embedding, so this is fixed.
        cmp_dim: Width in which position and content meet.
        activation: Of the linear layer from the pooled sequence to the item's width.
    """

    def __init__(
        self,
        user_dim: int,
        item_dim: int,
        seq_length: int,
        cmp_dim: int,
        *,
        activation: Activation = "prelu",
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("DMRU2I", user_dim=user_dim, item_dim=item_dim, seq_length=seq_length, cmp_dim=cmp_dim)
        self.user_dim = user_dim
        self.item_dim = item_dim
        self.seq_length = seq_length
        self.positions = nn.Parameter(torch.empty(seq_length, cmp_dim))
        kernel_init(self.positions)
        self.content = Dense(user_dim, cmp_dim, kernel_init=kernel_init)
        self.score = Dense(cmp_dim, 1, use_bias=False, kernel_init=kernel_init)
        self.linear = Dense(user_dim, item_dim, activation=activation, kernel_init=kernel_init)

    def forward(self, item: Tensor, user: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map a (batch, item_dim) item and a (batch, seq_length, user_dim) sequence to (batch, item_dim)."""
        check_shape("DMRU2I", "item", item, None, self.item_dim)
        check_shape("DMRU2I", "user", user, item.shape[0], self.seq_length, self.user_dim)
        _check_mask("DMRU2I", mask, user)
        scores: Tensor = self.score(torch.tanh(self.content(user) + self.positions))
        weights = _masked_softmax(scores.squeeze(-1), mask)
        pooled = torch.bmm(weights.unsqueeze(1), user).squeeze(1)
        matched: Tensor = self.linear(pooled)
        return matched * item


def _masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over real steps; zeros where there is none."""
    if mask is None:
        return scores.softmax(-1)
    # The least finite number and not -inf, so that a row without real steps is not 0 / 0.
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask, lowest).softmax(-1).masked_fill(~mask, 0)


def _check_mask(layer: str, mask: Tensor | None, sequence: Tensor) -> None:
    if mask is None:
        return
    check_shape(layer, "mask", mask, *sequence.shape[:2])
    if mask.dtype is not torch.bool:
        raise LayerArgumentError(f"{layer}: mask must be bool, true where a step is real, got {mask.dtype}")
