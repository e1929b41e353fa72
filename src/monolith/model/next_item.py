"""Sequential retrieval: what a user did so far, step by step, predicts the next item.

The vector of a user is the state of an encoder after the last step of a history; the vector of an item is its
embedding, which is also what a step begins with. `SASRec`, `HSTU` and `GRU4Rec` differ in the encoder alone.

    history   [ i1  i2  i3 ]  item i4     steps of one example, and what came next
    states      s1  s2  s3                each sees its own step and those before
    wanted      i2  i3  i4                what each state should pick

It learns by picking what came next out of a sample of the items of the batch. Histories that are read from
columns train every step. Where the pipeline builds them from the stream, each event is an example with its
own history, and only the last step is new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, cast, get_args

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import CONCAT, Batch, Each, FeatureSpec, HistoryFeature, Layout
from monolith.model.features import Feature
from monolith.model.histories import (
    TIME,
    graph_numbers,
    has_times,
    is_captured,
    max_length_of,
    padded_steps,
    step_features,
    step_times,
)
from monolith.model.ready import MODEL_DEFAULTS, ModelInput, ModelInputs, ModelOptions
from monolith.model.retrieval import (
    Negatives,
    PickedItems,
    RetrievalModel,
    Similarity,
    negatives_among,
    positive_examples,
)
from monolith.nn import (
    GRUEncoder,
    HSTUEncoder,
    ItemFrequency,
    SASRecEncoder,
    sampled_softmax_loss,
)
from monolith.nn.layers.jagged_attention import positions_of, sequence_of
from monolith.tensors import RaggedTensor

Steps = Literal["all", "last"]


class SequenceOptions(ModelOptions, total=False):
    """Arguments that each model of sequences takes in addition to its own.

    Args:
        history: The feature with the steps; by default the only one of which each ID is kept.
        max_length: The most steps of a history; by default the `max` of a `HistoryFeature`, and 200 without.
        similarity: "cosine", the default, compares vectors of length 1; "dot" takes their dot product.
        temperature: By what scores are divided; by default 0.05 for "cosine" and 1 for "dot".
        steps: Which steps of a history are trained to pick the item that came next: "all", or the "last". By
            default the last one if the pipeline builds the history, since earlier steps were trained when
            they were new, and else all.
        negatives: How many items of a batch, at most, a step picks its item out of. If it has more, they are
            drawn anew each time, the same ones for all steps of the batch. Few of them slow learning down,
            since an item that was not drawn is not pushed away from the steps that it is too near to; each
            takes a float of memory per step.
        negatives_from: Which items of a batch these are: "batch", those of steps and of positive examples;
            "sampled", those of examples that are not positive, such as `NegativeGeneration` makes of items
            of earlier batches; or "both", the default.
        correction: Whether scores are corrected by how often each item is in a batch; see `ItemFrequency`.
    """

    history: str | None
    max_length: int | None
    similarity: Similarity
    temperature: float | None
    steps: Steps | None
    negatives: int
    negatives_from: Negatives
    correction: bool


SEQUENCE_DEFAULTS: SequenceOptions = {
    **MODEL_DEFAULTS,
    "history": None,
    "max_length": None,
    "similarity": "cosine",
    "temperature": None,
    "steps": None,
    "negatives": 2048,
    "negatives_from": "both",
    "correction": True,
}
"""The values of options that a caller leaves out."""


class NextItem(RetrievalModel):
    """What `SASRec`, `HSTU` and `GRU4Rec` have in common.

    Args:
        features: See these.
        dim: Width of a step, and of the vectors of users and items.
        encoder: Makes the encoder: of a width, for histories of so many steps at most.
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        dim: int,
        encoder: Callable[[int, int], nn.Module],
        options: SequenceOptions,
    ) -> None:
        name = type(self).__name__
        if unknown := sorted(options.keys() - SEQUENCE_DEFAULTS.keys()):
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
        chosen: SequenceOptions = {**SEQUENCE_DEFAULTS, **options}
        of_model = {key: value for key, value in options.items() if key in MODEL_DEFAULTS}
        inputs = ModelInputs(
            name, features, cast(ModelOptions, of_model), reads_floats=False, histories=lambda _: Each()
        )
        temperature = chosen["temperature"]
        if temperature is None:
            temperature = 0.05 if chosen["similarity"] == "cosine" else 1.0
        super().__init__(inputs.features.spec, chosen["similarity"], temperature)
        steps = step_features(name, inputs.features, chosen["history"], dim)
        self.step_features = steps
        """The features of the sequence."""
        said = None if self.spec is None else self.spec.features.get(steps.history)
        built = isinstance(said, HistoryFeature) and said.by is not None
        self.steps: Steps = chosen["steps"] or ("last" if built else "all")
        if self.steps not in get_args(Steps):
            raise ConfigError(f'{name}: steps must be "all" or "last", got {self.steps!r}')
        self.negatives = chosen["negatives"]
        if self.negatives < 1:
            raise ConfigError(f"{name}: negatives must be at least 1, got {self.negatives}")
        self.negatives_from = chosen["negatives_from"]
        if self.negatives_from not in get_args(Negatives):
            known = ", ".join(get_args(Negatives))
            raise ConfigError(f"{name}: negatives_from must be one of {known}, got {self.negatives_from!r}")
        if self.negatives_from == "sampled" and self.spec is not None and not self.spec.labels:
            raise ConfigError(
                f'{name}: negatives_from = "sampled" takes the items of examples that are not positive, and '
                "without labels all are: name the label that negatives have 0 in, or leave it out"
            )
        self.max_length = max_length_of(said, chosen["max_length"])
        self.item_id = steps.item
        self.item_features = (steps.item,)
        self.user_features = (steps.history, *steps.companions)
        self.out = dim
        slices = dict(zip(inputs.features.names, inputs.features.vectors(dim), strict=True))
        layouts = [Layout(one, CONCAT, [slices[one]]) for one in (steps.item, *self.user_features)]
        with inputs.seeded():
            self.encoder = encoder(dim, self.max_length)
            self.start = nn.Parameter(torch.empty(dim))
            nn.init.normal_(self.start, std=0.02)
        self.embeddings = inputs.embeddings(layouts)
        self.embeddings.padded_steps = padded_steps(self.encoder, steps, [steps.item])
        self.frequency = ItemFrequency() if chosen["correction"] else None
        self.to(self.embeddings.device)

    def forward(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the score of each user with the item of its own example, of shape (examples,)."""
        del floats
        read = self.embeddings(batch)
        items = self.compared(read[self.item_id])
        return self.score(self._users(read, batch, items.shape[0]), items)

    def users(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        del floats
        read = self.embeddings(batch)
        return self._users(read, batch, read[self.item_id].shape[0])

    def items(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        del floats
        return self.compared(self.embeddings(batch)[self.item_id])

    def pick(self, batch: Batch) -> PickedItems:
        """Return how badly states pick what came next out of a sample of the batch's items.

        Of examples with labels, those with one above 0 are picked: other items did not come next. Their
        histories train all the same, with `steps = "all"`.
        """
        read = self.embeddings(batch)
        history: RaggedTensor = read[self.step_features.history]
        device, row_splits = history.flat_values.device, history.row_splits
        # Vectors and IDs of the items of all steps, then of all examples. A captured step has padding behind
        # the last history: items that are not there, and queries that do not count.
        items = self.compared(torch.cat([history.flat_values, read[self.item_id]]))
        steps, numbers = len(history.flat_values), torch.arange(len(items), device=device)
        of_steps = batch.ids[self.step_features.history].flat_values
        ids = torch.cat([of_steps, batch.ids.first(self.item_id)]).to(device)
        there = (numbers < row_splits[-1]) | (numbers >= steps)
        states = self._states(read, batch)
        users = self._last(states, row_splits, len(batch))
        positive = positive_examples(batch, device)
        queries, wanted, counts = users, numbers[steps:], positive
        if self.steps == "all" and steps:
            # Every step but the last of its history wants the item of the next one.
            behind = numbers[1 : steps + 1]
            inner = there[:steps] & (behind != row_splits[sequence_of(row_splits, steps) + 1])
            queries = torch.cat([self.compared(states), queries])
            wanted, counts = torch.cat([behind, wanted]), torch.cat([inner, counts])
        if not is_captured(batch):
            of = counts.nonzero().flatten()
            queries, wanted, counts = queries[of], wanted[of], counts[of]
        came_next = torch.cat([there[:steps], positive])
        offered = there & negatives_among(came_next, self.negatives_from)
        loss = self._picked(queries, wanted, counts, items, ids, offered, captured=is_captured(batch))
        return PickedItems(loss, self.score(users, items[steps:]))

    def _picked(
        self,
        queries: Tensor,
        wanted: Tensor,
        counts: Tensor,
        items: Tensor,
        ids: Tensor,
        offered: Tensor,
        *,
        captured: bool,
    ) -> Tensor:
        """Return the loss of queries that each want one of the items.

        Args:
            queries: float of shape (queries, out).
            wanted: int64 of shape (queries,), among the items.
            counts: bool of shape (queries,): which of them count.
            items: float of shape (items, out), with repeats.
            ids: int64 of shape (items,).
            offered: bool of shape (items,): which of them are negatives.
            captured: Whether sizes must not depend on values.
        """
        # Those that are offered first, by ID. Of equal items, the first stands for all.
        order = torch.argsort(ids, stable=True)
        order = order[torch.argsort((~offered[order]).to(torch.int8), stable=True)]
        known, differs = ids[order], offered[order]
        differs[1:] &= known[1:] != known[:-1]
        # As many as there may be are drawn of those that differ: what is drawn behind them is no candidate.
        keys = torch.rand(len(ids), device=ids.device).masked_fill(~differs, 2.0)
        many = len(ids) if captured else int(differs.sum())
        drawn = torch.argsort(keys, stable=True)[: min(many, self.negatives)]
        candidates, missing = order[drawn], ~differs[drawn]
        own = (queries * items[wanted]).sum(1, keepdim=True)
        scores = torch.cat([own, queries @ items[candidates].t()], 1) / self.temperature
        if self.frequency is not None:
            if self.training and torch.is_grad_enabled():
                self.frequency.observe(known, differs)
            expected = self.frequency(ids).to(scores)
            drawn_expected = expected[candidates].expand(len(scores), -1)
            scores = scores - torch.cat([expected[wanted, None], drawn_expected], 1)
        hits = (ids[candidates] == ids[wanted, None]) | missing
        hits = torch.cat([torch.zeros_like(wanted, dtype=torch.bool)[:, None], hits], 1)
        losses = sampled_softmax_loss(
            scores, torch.zeros_like(wanted), hits=hits, weights=counts.to(scores), reduction="sum"
        )
        return losses / counts.sum().clamp(min=1)

    def _users(self, read: Mapping[str, Any], batch: ModelInput, examples: int) -> Tensor:
        history: RaggedTensor = read[self.step_features.history]
        return self._last(self._states(read, batch), history.row_splits, examples)

    def _last(self, states: Tensor, row_splits: Tensor, examples: int) -> Tensor:
        """Return the vector of each user: the last state, or `start` where there is no step."""
        some = row_splits.diff() > 0
        places = (row_splits[1:] - 1).clamp(min=0)
        padded = torch.cat([states, self.start[None]])  # so that there is a state to point to
        vectors = self.compared(padded[torch.where(some, places, states.shape[0])])
        return vectors if vectors.shape[0] == examples else vectors.expand(examples, -1)  # one user for all

    def _states(self, read: Mapping[str, Any], batch: ModelInput) -> Tensor:
        """Return a state for each step, float of shape (steps, dim)."""
        steps = self.step_features.read(read)
        return self._encoded(steps.flat_values * math.sqrt(self.out), steps.row_splits, batch)

    @property
    def time_features(self) -> tuple[str, ...]:
        """The features of times that it reads."""
        return ()

    def _encoded(self, values: Tensor, row_splits: Tensor, batch: ModelInput) -> Tensor:
        states: Tensor = self.encoder(values, row_splits, numbers=graph_numbers(batch, self.max_length))
        return states


class SASRec(NextItem):
    """Self-attentive sequential recommendation: a transformer over the steps (Kang and McAuley, 2018).

    Shapes: n examples in; vectors float32 of shape (n, dim) of users and of items, scores of shape (n,).

    Args:
        features: Features of IDs, among them an item and a history that shares its rows; see
            `HistoryFeature`. Others are not read.
        dim: Width of a step, and of the vectors of users and items.
        layers: How many blocks.
        heads: Of each attention; they share `dim` evenly.
        hidden: Width of the feed-forward networks; by default `dim`.
        options: See `SequenceOptions`.

    Examples:
        >>> import torch
        >>> from monolith import Each, Feature, RaggedTensor, SASRec
        >>> model = SASRec(["item", Feature(name="seen", shares="item", combiner=Each())], dim=8)
        >>> ids = {"item": torch.tensor([7, 8]), "seen": RaggedTensor.from_list([[1, 2, 3], [4]])}
        >>> model.users(ids).shape, model(ids).shape  # vectors, and scores with items 7 and 8
        (torch.Size([2, 8]), torch.Size([2]))
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        dim: int = 64,
        layers: int = 2,
        heads: int = 1,
        hidden: int | None = None,
        **options: Unpack[SequenceOptions],
    ) -> None:
        dropout = options.get("dropout", 0.0)

        def encoder(dim: int, max_length: int) -> nn.Module:
            return SASRecEncoder(dim, max_length, layers=layers, heads=heads, hidden=hidden, dropout=dropout)

        super().__init__(features, dim, encoder, options)


class GRU4Rec(NextItem):
    """A recurrent network over the steps (Hidasi et al., 2016), for comparison.

    Shapes: n examples in; vectors float32 of shape (n, dim) of users and of items, scores of shape (n,).

    Args:
        features: As of `SASRec`.
        dim: Width of a step, and of the vectors of users and items.
        layers: How many.
        hidden: Width of the network's state; by default `dim`.
        options: See `SequenceOptions`.

    Examples:
        >>> import torch
        >>> from monolith import Each, Feature, RaggedTensor
        >>> from monolith.model import GRU4Rec
        >>> model = GRU4Rec(["item", Feature(name="seen", shares="item", combiner=Each())], dim=8)
        >>> ids = {"item": torch.tensor([7, 8]), "seen": RaggedTensor.from_list([[1, 2, 3], [4]])}
        >>> model(ids).shape  # scores with items 7 and 8
        torch.Size([2])
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        dim: int = 64,
        layers: int = 1,
        hidden: int | None = None,
        **options: Unpack[SequenceOptions],
    ) -> None:
        dropout = options.get("dropout", 0.0)

        def encoder(dim: int, max_length: int) -> nn.Module:
            return GRUEncoder(dim, max_length, layers=layers, hidden=hidden, dropout=dropout)

        super().__init__(features, dim, encoder, options)


class HSTU(NextItem):
    """Hierarchical sequential transduction units over the steps (Zhai et al., 2024).

    Shapes: n examples in; vectors float32 of shape (n, dim) of users and of items, scores of shape (n,).

    Steps are weighted by how far apart they are, in steps and in time. Time needs a history with times: a
    `HistoryFeature` with the event time among `with_`, or IDs named with ".time" behind the name of the
    history, in Unix seconds. Without, only steps count.

    Args:
        features: As of `SASRec`.
        dim: Width of a step, and of the vectors of users and items.
        layers: How many.
        heads: Of each layer.
        attention_dim: Width of queries and keys in a head; by default `dim // heads`.
        linear_dim: Width of values and gates in a head; by default `dim // heads`.
        time_buckets: How many buckets time gaps fall into; 0 leaves time out.
        options: See `SequenceOptions`.

    Examples:
        >>> import torch
        >>> from monolith import HSTU, Each, Feature, RaggedTensor
        >>> model = HSTU(["item", Feature(name="seen", shares="item", combiner=Each())], dim=8)
        >>> ids = {"item": torch.tensor([7, 8]), "seen": RaggedTensor.from_list([[1, 2, 3], [4]])}
        >>> model(ids).shape  # scores with items 7 and 8
        torch.Size([2])
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        dim: int = 64,
        layers: int = 2,
        heads: int = 1,
        attention_dim: int | None = None,
        linear_dim: int | None = None,
        time_buckets: int = 128,
        **options: Unpack[SequenceOptions],
    ) -> None:
        dropout = options.get("dropout", 0.0)
        if isinstance(features, FeatureSpec) and not has_times(features, options.get("history")):
            time_buckets = 0

        def encoder(dim: int, max_length: int) -> nn.Module:
            return HSTUEncoder(
                dim,
                max_length,
                layers=layers,
                heads=heads,
                attention_dim=attention_dim,
                linear_dim=linear_dim,
                dropout=dropout,
                time_buckets=time_buckets,
            )

        super().__init__(features, dim, encoder, options)
        self.positions = nn.Parameter(torch.empty(self.max_length, dim, device=self.embeddings.device))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(options.get("seed", 0) + 1)
            nn.init.normal_(self.positions, std=0.02)
        self.dropout = nn.Dropout(dropout)

    @property
    def time_features(self) -> tuple[str, ...]:
        assert isinstance(self.encoder, HSTUEncoder)
        return (self.step_features.history + TIME,) if self.encoder.time_buckets else ()

    def _encoded(self, values: Tensor, row_splits: Tensor, batch: ModelInput) -> Tensor:
        steps = positions_of(row_splits, values.shape[0])
        values = self.dropout(values + self.positions[steps.clamp(max=self.max_length - 1)])
        assert isinstance(self.encoder, HSTUEncoder)
        times, asked = step_times(batch, self.step_features.history, row_splits)
        if times is None and self.encoder.time_buckets:
            times = asked = torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)
        states: Tensor = self.encoder(values, row_splits, times, asked, graph_numbers(batch, self.max_length))
        return states
