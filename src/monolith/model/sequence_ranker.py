"""SequenceRanker: the click of a user on an item, by what the user did before.

The item is the last step of the sequence, so that the encoder weighs the steps before by it:

    history   [ i1  i2  i3 ]  item i4
    sequence  [ i1  i2  i3  i4 ]
    state                   s4, next to the vectors of the other features, becomes the logit

A history that stands for many items is encoded once: to it, each item is one step more (`following` of the
encoders). A server has two graphs for that, of `SequenceRanker.encode` and of the rest; see
`monolith.serve.histories`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import CONCAT, Batch, Each, FeatureSpec, Layout
from monolith.model.features import Feature
from monolith.model.histories import (
    TIME,
    encoded_histories,
    graph_numbers,
    has_times,
    max_length_of,
    padded_steps,
    step_features,
    step_times,
)
from monolith.model.ready import (
    InputAxes,
    LogitModel,
    ModelInput,
    ModelInputs,
    ModelOptions,
    along,
    check_combined,
    tower,
)
from monolith.nn import GRUEncoder, HSTUEncoder, SASRecEncoder
from monolith.nn.layers.jagged_attention import sequence_of
from monolith.tensors import RaggedTensor

Encoder = Literal["hstu", "sasrec", "gru"]
_ENCODERS: Mapping[str, Any] = {"hstu": HSTUEncoder, "sasrec": SASRecEncoder, "gru": GRUEncoder}
_FIRST_CHANGE = 0.1
"""By how much the first weights of what an HSTU layer adds to a step are smaller than its own choice."""


class SequenceRankerDense(nn.Module):
    """The dense half of `SequenceRanker`: an encoder over steps, and an MLP over its last state and the rest.

    Args:
        encoder: What reads the steps.
        plain: Floats of the other features' vectors.
        floats: How many numbers an example has.
        mlp: Keyword arguments of the MLP's `tower`.
    """

    encoder: Any

    def __init__(
        self, encoder: nn.Module, dim: int, plain: int, floats: int, hidden: Sequence[int], mlp: Any
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.mlp = tower(dim + plain + floats, hidden, **mlp)

    def forward(
        self,
        steps: RaggedTensor,
        item: Tensor,
        rest: Sequence[Tensor],
        times: tuple[Tensor, Tensor] | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            steps: float of shape (examples, steps, dim): what happened before. One row, next to more items,
                stands for all and is encoded once.
            item: float of shape (examples, dim): what may happen now.
            rest: float of shape (examples, width) each.
            times: Seconds: of each step, of shape (steps,), and of each example.
            numbers: As of `HSTUEncoder.forward`.
        """
        if steps.nrows != item.shape[0]:
            encoded = self.encode(steps, None if times is None else times[0], numbers)
            asked = None if times is None else (times[0], times[1][None])
            return self.following(encoded, steps.row_splits, item[None], rest, asked, numbers)
        values, row_splits, places = appended(steps, item)
        if times is not None:
            before = RaggedTensor(times[0], steps.row_splits, validate=False)
            times = (appended(before, times[1])[0], times[1])
        whole = RaggedTensor(values, row_splits, validate=False)
        states = self.encoder(*self._steps(whole, None if times is None else times[0]), numbers=numbers)
        return self._logits(states[places], rest)

    def encode(self, steps: RaggedTensor, times: Tensor | None, numbers: Tensor | None = None) -> Tensor:
        """Return some histories as `following` reads them, float of shape (steps, floats).

        Args:
            steps, numbers: As of `forward`.
            times: Seconds of each step.
        """
        encoded: Tensor = self.encoder.encode(*self._steps(steps, times), numbers=numbers)
        return encoded

    def following(
        self,
        encoded: Tensor,
        row_splits: Tensor,
        items: Tensor,
        rest: Sequence[Tensor],
        times: tuple[Tensor, Tensor] | None = None,
        numbers: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return logits of shape (examples,), given what `encode` returned.

        Args:
            row_splits: Of the histories, int64 of shape (histories + 1,).
            items: float of shape (histories, items, dim).
            rest: As of `forward`.
            times: Seconds: of each step, and of items, of shape (histories, items or 1).
            places: int64 of shape (examples,): of each example among the items, history after history;
                by default each item is an example.
        """
        scaled = items * math.sqrt(items.shape[2])
        if self._reads_times:
            if times is None:
                none = row_splits.new_zeros(1)
                times = (none.expand(encoded.shape[0]), none[None].expand(row_splits.shape[0] - 1, 1))
            states = self.encoder.following(encoded, row_splits, scaled, times, numbers)
        else:
            states = self.encoder.following(encoded, row_splits, scaled, numbers=numbers)
        states = states.flatten(0, 1)
        return self._logits(states if places is None else states[places], rest)

    @property
    def _reads_times(self) -> bool:
        return isinstance(self.encoder, HSTUEncoder) and self.encoder.time_buckets > 0

    def _steps(self, steps: RaggedTensor, times: Tensor | None) -> tuple[Tensor, ...]:
        """Return the first arguments of the encoder."""
        values = steps.flat_values
        scaled = values * math.sqrt(values.shape[1])
        if not self._reads_times:
            return scaled, steps.row_splits
        if times is None:
            times = torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)
        return scaled, steps.row_splits, times

    def _logits(self, states: Tensor, rest: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.mlp(torch.cat([states, *rest], 1))
        return logits.squeeze(1)


class SequenceRanker(LogitModel):
    """A ranking model over the history of a user, with the item that is asked about as its last step.

    Shapes: n examples in, logits float32 of shape (n,) out.

    Args:
        features: Features of IDs, among them an item and a history that shares its rows; see
            `HistoryFeature`. All others, and numbers, are read by the MLP.
        encoder: What reads the steps: "hstu", "sasrec" or "gru"; see `HSTU`, `SASRec`, `GRU4Rec`.
        history: The feature with the steps; by default the only one of which each ID is kept.
        dim: Width of each feature's vector, and of a step.
        max_length: The most steps of a history; by default the `max` of a `HistoryFeature`, and 200 without.
        layers: How many the encoder has.
        heads: Of each layer of "hstu" and "sasrec".
        hidden: Widths of the MLP's hidden layers.
        options: See `ModelOptions`.

    Examples:
        >>> import torch
        >>> from monolith import Each, Feature, RaggedTensor
        >>> from monolith.model import SequenceRanker
        >>> seen = Feature(name="seen", shares="item", combiner=Each())
        >>> model = SequenceRanker(["user", "item", seen], dim=8, hidden=(16,))
        >>> seen_ids = RaggedTensor.from_list([[1, 2, 3], []])
        >>> model({"user": torch.tensor([17, 18]), "item": torch.tensor([7, 8]), "seen": seen_ids}).shape
        torch.Size([2])
    """

    dense: SequenceRankerDense

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        encoder: Encoder = "hstu",
        history: str | None = None,
        dim: int = 32,
        max_length: int | None = None,
        layers: int = 2,
        heads: int = 1,
        hidden: Sequence[int] = (128, 64),
        **options: Unpack[ModelOptions],
    ) -> None:
        if encoder not in get_args(Encoder):
            raise ConfigError(
                f"SequenceRanker: encoder must be one of {', '.join(get_args(Encoder))}, got {encoder!r}"
            )
        if not hidden:
            raise ConfigError("SequenceRanker: hidden must have at least one width")
        inputs = ModelInputs("SequenceRanker", features, options, histories=lambda _: Each())
        chosen = inputs.features
        steps = step_features("SequenceRanker", chosen, history, dim)
        plain = [name for name in chosen.names if name not in (steps.history, *steps.companions)]
        check_combined("SequenceRanker", chosen, plain)
        widths = chosen.widths(dim)
        said = None if chosen.spec is None else chosen.spec.features.get(steps.history)
        how: dict[str, Any] = {"layers": layers, "dropout": options.get("dropout", 0.0)}
        if encoder != "gru":
            how["heads"] = heads
        if encoder == "hstu" and chosen.spec is not None and not has_times(chosen.spec, steps.history):
            how["time_buckets"] = 0
        with inputs.seeded():
            # One step more: the item that is asked about.
            made = _ENCODERS[encoder](dim, max_length_of(said, max_length) + 1, **how)
            if encoder == "hstu":
                # What layers add to a step is normalised, so untrained ones drown the small first values of
                # rows in noise. In a stream that costs AUC until they have learned; see docs/quality.md.
                with torch.no_grad():
                    for layer in made.layers:
                        layer.output.weight.mul_(_FIRST_CHANGE)
            dense = SequenceRankerDense(
                made, dim, sum(widths[name] for name in plain), inputs.floats.width, hidden, inputs.tower
            )
        slices = dict(zip(chosen.names, chosen.vectors(dim), strict=True))
        layouts = [Layout(name, CONCAT, [slices[name]]) for name in (steps.history, *steps.companions)]
        layouts += [Layout("item", CONCAT, [slices[steps.item]])]
        layouts += [Layout("vectors", CONCAT, [slices[name] for name in plain])]
        super().__init__(inputs, layouts, dense)
        self.embeddings.padded_steps = padded_steps(made, steps)
        self.step_features = steps
        """The features of the sequence."""
        self.segments = {"history": dim, **{name: widths[name] for name in plain}, **inputs.floats.widths}
        """What the first layer of the MLP reads -> its width, in order."""

    @property
    def input_axes(self) -> InputAxes:
        """As of `ReadyModel`."""
        return {"dense.mlp.0.kernel.weight": {"0": along(self.segments)}}

    @property
    def time_features(self) -> tuple[str, ...]:
        """The features of times that it reads."""
        encoder = self.dense.encoder
        timed = isinstance(encoder, HSTUEncoder) and encoder.time_buckets
        return (self.step_features.history + TIME,) if timed else ()

    def forward(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            floats: The float features by name, where `batch` is not a `Batch`, which holds them itself.
        """
        read = self.embeddings(batch)
        numbers = self.floats.read(batch, floats, self.embeddings.device)
        steps = self.step_features.read(read)
        rest = [read["vectors"]] if numbers is None else [read["vectors"], numbers]
        ranked, order = encoded_histories(batch), graph_numbers(batch, self.dense.encoder.max_length)
        if ranked is None:
            times = self._times(batch, steps, read["item"].shape[0])
            logits: Tensor = self.dense(steps, read["item"], rest, times, order)
            return logits
        times = self._times(batch, steps, steps.nrows)
        asked = None if times is None else (times[0], times[1][:, None])
        items = read["item"][ranked.items]
        return self.dense.following(
            ranked.encoded, steps.row_splits, items, rest, asked, order, ranked.places
        )

    def encode(self, batch: ModelInput) -> Tensor:
        """Return the histories of a batch as its candidates read them, float of shape (steps, floats)."""
        steps = self.step_features.read(self.embeddings(batch))
        times, _ = step_times(batch, self.step_features.history, steps.row_splits)
        encoded: Tensor = self.dense.encode(steps, times, graph_numbers(batch, self.dense.encoder.max_length))
        return encoded

    def _times(self, batch: ModelInput, history: RaggedTensor, examples: int) -> tuple[Tensor, Tensor] | None:
        """Return the seconds of each step, and of each example: its event time, or that of its last step."""
        times, asked = step_times(batch, self.step_features.history, history.row_splits)
        if times is None or asked is None:
            return None
        ids = batch.ids if isinstance(batch, Batch) else batch
        event_times = getattr(ids, "event_times", None)
        padded = torch.cat([times, times.new_zeros(1)])
        some = history.row_lengths() > 0
        last = padded[torch.where(some, history.row_splits[1:] - 1, times.shape[0])]
        last = last if last.shape[0] == examples else last.expand(examples)
        if event_times is None or event_times.shape[0] != examples:
            return times, last
        known = event_times.to(times.device)
        return times, torch.where(known > 0, known, last)


def appended(rows: RaggedTensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append one value to each row.

    Args:
        rows: Values of shape (n, ...), in m rows.
        last: Shape (m, ...).

    Returns:
        The values of shape (n + m, ...), their row splits, and the places of the appended ones.
    """
    many = torch.arange(last.shape[0] + 1, device=last.device)
    row_splits = rows.row_splits + many
    places = row_splits[1:] - 1
    steps = rows.flat_values.shape[0]
    sequence = sequence_of(row_splits, steps + last.shape[0])
    numbers = torch.arange(steps + last.shape[0], device=last.device)
    # Before a step of a row lies one appended value of each row before it.
    order = torch.where(numbers == places[sequence], steps + sequence, numbers - sequence)
    return torch.cat([rows.flat_values, last])[order], row_splits, places
