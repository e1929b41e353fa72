"""Tracing: the dense half of a model, through `torch.export`.

Embedding rows are not part of a graph, and neither are weights: both are its inputs. The traced function is

    outputs(weights, tensors of every EmbeddingCollection, float features) -> predictions by head

for any number of examples, and of steps of their histories; see `monolith.serve.jagged`. Weights that are
inputs can be swapped between two batches, and a graph without weights contains nothing that would have to be
unpickled.

While tracing, stand-ins replace the rows and IDs of a batch. A model that reads IDs outside of its
collections is refused, and may be served as a Python module.
"""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import CorruptFileError, ExportError, MonolithError
from monolith.feature import Batch, FeatureIds
from monolith.model import EmbeddingCollection, SequenceRanker
from monolith.model.collection import StandIn
from monolith.model.histories import EncodedHistories
from monolith.observe.stacks import own_frame
from monolith.serve.dense import DenseGraph, clean_graph
from monolith.serve.histories import ENCODED_KINDS, items_of
from monolith.serve.jagged import JaggedInputs, Taken, at_least
from monolith.tensors import RaggedTensor

Predict = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""Runs a module on a batch; returns predictions by head, each of shape (examples,)."""

INSTEAD = (
    "Or serve the model as a Python module: export with --as-module (as_module=True), and allow it where it "
    "is served (allow_module)."
)
_SIZES = (1, 2, 5)
"""Sizes of the batches by which a graph is compared with its model."""
_TRACED = 3
"""Examples in the traced batch: neither 0 nor 1, which broadcast."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedDense:
    """The dense half of a model, as a graph over weights, tensors of rows, and floats."""

    graph: bytes
    """The file of `torch.export.save`, without weights and example inputs."""
    weights: Mapping[str, Tensor]
    """Parameters and buffers by name, in the order of the graph's inputs."""
    outputs: tuple[str, ...]
    """Heads, in the order of the graph's outputs."""
    example: tuple[Sequence[Tensor], Sequence[Tensor]]
    """Example inputs: tensors of rows, and floats."""
    times: tuple[str, ...] = ()
    """Features of times that it reads; see `monolith.serve.jagged`."""


def collections_of(module: nn.Module) -> list[EmbeddingCollection]:
    """Return the sparse halves of a model, in the order in which it has them."""
    return [part for part in module.modules() if isinstance(part, EmbeddingCollection)]


def trace_dense(
    module: nn.Module,
    outputs: Predict,
    *,
    floats: Mapping[str, int] | None = None,
    heads: Sequence[str] = (),
    group: str | None = None,
    vectors: bool = False,
) -> TracedDense:
    """Trace a model in eval mode, on the CPU, and check that the graph predicts the same as the model.

    Args:
        floats: Float features of a batch -> their width.
        heads: The labels that the model was trained on: a batch has them, as NaN.
        group: The feature that batches are grouped by.
        vectors: Whether outputs are vectors, of shape (examples, out), in place of predictions.

    Raises:
        ExportError: The model cannot be exported; gives the reason and a remedy.
    """
    half = DenseHalf(module, outputs, dict(floats or {}), heads, group, vectors=vectors)
    weights = {name: tensor.detach() for name, tensor in _tensors(module).items()}
    rows, numbers = half.examples(_TRACED)
    size = torch.export.Dim("examples", min=1)
    graph = _exported(half, weights, (rows, numbers), half.jagged.sizes(size), size)
    traced = TracedDense(graph, weights, half.heads, (rows, numbers), half.jagged.times)
    _compare(half, traced, _written_at(module))
    return traced


def trace_histories(
    module: nn.Module,
    outputs: Predict,
    ranker: SequenceRanker,
    *,
    floats: Mapping[str, int] | None = None,
    heads: Sequence[str] = (),
    group: str | None = None,
) -> tuple[bytes, bytes]:
    """Trace a model in two graphs, and check that they predict the same; see `monolith.serve.histories`.

    Args:
        module, outputs, floats, heads, group: As of `trace_dense`.
        ranker: The part of the model that reads histories.

    Returns:
        The graph that encodes histories, and the one that predicts with them.

    Raises:
        ExportError: The model cannot be cut so; gives the reason.
    """
    how = (dict(floats or {}), heads, group)
    half = DenseHalf(module, outputs, *how)
    roots = {half.jagged.root(name) for name in half.jagged.histories}
    if roots != {ranker.step_features.history}:
        raise ExportError(f"the model reads several histories: {', '.join(sorted(roots))}")
    weights = {name: tensor.detach() for name, tensor in _tensors(module).items()}
    kinds = half.jagged.kinds
    users, items = torch.export.Dim("histories", min=1), torch.export.Dim("examples", min=1)
    most = torch.export.Dim("most", min=1)
    sizes = list(zip(kinds, half.jagged.sizes(users), strict=True))
    encoding = _EncodingHalf(module, lambda _, batch: {"encoded": ranker.encode(batch)}, *how)
    following = _FollowingHalf(module, outputs, *how)
    example = _RankedExample.of(half, [2, 0, 3])
    encode = _exported(
        *(encoding, weights, (example.steps, [])),
        *([size for kind, size in sizes if kind in ENCODED_KINDS], users),
    )
    with torch.no_grad():
        (encoded,) = encoding(example.steps, [])
    steps = next(size for kind, size in sizes if kind == "values")
    follow = _exported(
        *(following, weights, ([*example.rows, encoded, *example.order], example.floats)),
        [
            *({0: items} if kind == "rows" else size for kind, size in sizes if kind != "values"),
            *(steps, {0: users, 1: most}, {0: items}),
        ],
        items,
    )
    graphs = [DenseGraph(one, weights, record=False) for one in (encode, follow)]
    for counts in ([1], [4], [0, 2, 1], [3, 0], [2, 2, 0, 1]):
        example = _RankedExample.of(half, counts)
        with torch.no_grad():
            wanted = half(example.whole, example.floats)
            (encoded,) = graphs[0](example.steps, [])
            found = graphs[1]([*example.rows, encoded, *example.order], example.floats)
        for one, other in zip(wanted, found, strict=True):
            if not torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True):
                raise ExportError("it then predicts something else")
    return encode, follow


def _exported(
    half: DenseHalf,
    weights: Mapping[str, Tensor],
    inputs: tuple[Sequence[Tensor], Sequence[Tensor]],
    sizes: Sequence[Any],
    examples: Any,
) -> bytes:
    """Return the file of a graph.

    Args:
        inputs: Examples of tensors of rows, and of floats.
        sizes: The dimensions of rows that differ from batch to batch.
        examples: That of floats.
    """
    module = half.module
    rows, numbers = map(list, inputs)
    shapes = ([None] * len(weights), sizes, [{0: examples}] * len(numbers))
    try:
        with torch.no_grad():
            program = torch.export.export(
                _OverWeights(half, list(weights)),
                (list(weights.values()), rows, numbers),
                dynamic_shapes=shapes,
                strict=False,
            )
    except MonolithError as cause:
        if isinstance(cause, ExportError) and (place := _place_of(cause)):
            raise ExportError(f"{place}{cause}") from cause
        raise
    except Exception as cause:
        raise ExportError(
            f"{_place_of(cause) or _written_at(module)}torch.export cannot trace {type(module).__name__}: "
            f"{_first_lines(cause)}. {_advice(cause)}{INSTEAD}"
        ) from cause
    program.example_inputs = None  # they would be pickled
    file = io.BytesIO()
    torch.export.save(program, file)
    try:
        graph = clean_graph(file.getvalue(), "the exported graph")
    except CorruptFileError as cause:
        raise ExportError(
            f"{type(module).__name__} cannot be exported as a graph: {cause.reason}. {INSTEAD}"
        ) from cause
    return graph


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model, including buffers that checkpoints do not keep."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class DenseHalf(nn.Module):
    """A model with tensors in place of its rows.

    Args:
        floats, heads, group, vectors: See `trace_dense`.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Predict,
        floats: Mapping[str, int],
        heads: Sequence[str],
        group: str | None,
        *,
        vectors: bool = False,
    ) -> None:
        super().__init__()
        self._ndim = 2 if vectors else 1
        self.module = module
        self._outputs = outputs
        self._floats = floats
        self._labels = tuple(heads)
        self._group = group
        self._collections = collections_of(module)
        times = [name for one in module.modules() for name in getattr(one, "time_features", ())]
        self.jagged = JaggedInputs([one.plan for one in self._collections], times)
        """Its histories."""
        self.heads: tuple[str, ...] = ()
        """The heads of its predictions, after the first run."""

    @property
    def widths(self) -> Sequence[int]:
        """Of the float features."""
        return tuple(self._floats.values())

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each tensor of a graph, without its first dimension."""
        found: list[tuple[int, ...]] = []
        for one in self._collections:
            for feature, shape in zip(one.plan.each, one.plan.shapes, strict=True):
                found += [shape] if feature < 0 else [shape, (), ()]
        return [*found, *([()] * (len(self.jagged.kinds) - len(found)))]

    def examples(self, size: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors of rows and floats, of so many examples."""
        random = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (size,), generator=random) + torch.arange(size) // 2
        ids = {}
        for name in (*self.jagged.histories, *self.jagged.times):
            values = torch.randint(0, 1 << 20, (int(lengths.sum()),), generator=random)
            ids[name] = RaggedTensor.from_row_lengths(values, lengths)
        drawn = FeatureIds.pack(ids, batch_size=size)
        outputs = [
            torch.rand(shape, generator=random) - 0.5
            for one in self._collections
            for shape in one.plan.output_shapes(size, one.plan.row_splits(drawn))
        ]
        rows = self.jagged.tensors(outputs, drawn)
        return rows, [torch.rand((size, width), generator=random) for width in self._floats.values()]

    def forward(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> list[Tensor]:
        """Return predictions in the order of `heads`.

        Args:
            rows: The layout tensors of the collections, collection after collection, layouts in sorted order.
            floats: Of shape (examples, width) each.
        """
        size, predictions = self.predict(rows, floats)
        found = []
        for head, values in predictions.items():
            if values.ndim != self._ndim or values.shape[0] != size:
                raise ExportError(
                    f"the model predicts {head!r} with shape {tuple(values.shape)}: a served head has one "
                    "number per example"
                )
            found.append(values.to(torch.float32))
        return found

    def predict(
        self, rows: Sequence[Tensor], floats: Sequence[Tensor], encoded: EncodedHistories | None = None
    ) -> tuple[Any, Mapping[str, Tensor]]:
        """Return the number of examples, and what the model predicts for them, by head.

        Args:
            rows, floats: As of `forward`.
            encoded: The histories, if the model reads encoded ones.
        """
        given = iter(rows)
        taken = [self.jagged.layouts(one.plan, given) for one in self._collections]
        size: Any = self._examples(taken)  # symbolic while tracing
        labels = {head: torch.full((size,), math.nan) for head in self._labels}
        ids: Any = _StandInIds(size)
        ids.encoded = encoded
        for name in self.jagged.times:
            ids.times[name] = RaggedTensor(next(given), self._row_splits(name, taken), validate=False)
        if self.jagged.times:
            ids.event_times = next(given)
        batch = _StandInBatch(ids, dict(zip(self._floats, floats, strict=True)), labels, group=self._group)
        with ExitStack() as replaced:
            for collection, (outputs, row_splits, numbers) in zip(self._collections, taken, strict=True):
                layouts = collection.plan.by_name(outputs, row_splits)
                replaced.enter_context(collection.replaced(_stand_in(layouts, batch)))
                ids.numbers = numbers if ids.numbers is None else ids.numbers
            predictions = self._outputs(self.module, batch)
        self.heads = tuple(predictions)
        return size, predictions

    def _examples(self, taken: Sequence[Taken]) -> Any:
        """Return the number of examples."""
        for collection, (outputs, _, _) in zip(self._collections, taken, strict=True):
            for feature, output in zip(collection.plan.each, outputs, strict=True):
                if feature < 0:  # one history may stand for several examples
                    return output.shape[0]
        for _, row_splits, _ in taken:
            for found in row_splits.values():
                return found.shape[0] - 1
        raise ExportError("the model has no EmbeddingCollection, so there is nothing to look up")

    def _row_splits(self, times: str, taken: Sequence[Taken]) -> Tensor:
        """Return the row splits of the history that some times are of."""
        for collection, (_, row_splits, _) in zip(self._collections, taken, strict=True):
            for feature, found in row_splits.items():
                if times.startswith(f"{collection.plan.features[feature].name}."):
                    return found
        raise ExportError(f"the model reads {times!r}, and no history that they are the times of. {INSTEAD}")


class _EncodingHalf(DenseHalf):
    """A model that encodes histories."""

    def forward(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> list[Tensor]:  # noqa: ARG002
        """Return encoded histories.

        Args:
            rows: Those of the inputs of the whole that are of `ENCODED_KINDS`.
            floats: None.
        """
        # The model looks up all rows at once: those of items are not used, and not part of the graph.
        given = iter(rows)
        kinds, shapes = self.jagged.kinds, self.shapes()
        encoded = {place: next(given) for place, kind in enumerate(kinds) if kind in ENCODED_KINDS}
        users = encoded[kinds.index("ends")].shape[0]
        whole = [
            encoded[place]
            if place in encoded
            else torch.zeros(users, *shapes[place], dtype=torch.int64 if kind == "asked" else torch.float32)
            for place, kind in enumerate(kinds)
        ]
        numbers = [torch.zeros(users, width) for width in self.widths]
        return [*self.predict(whole, numbers)[1].values()]


class _FollowingHalf(DenseHalf):
    """A model that predicts with encoded histories."""

    def forward(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> list[Tensor]:
        """Return predictions.

        Args:
            rows: The inputs of the whole but the values of steps; then what `EncodedHistories` has.
        """
        *rows, encoded, items, places = rows
        given = iter(rows)
        whole = [
            torch.zeros(encoded.shape[0], *shape) if kind == "values" else next(given)
            for kind, shape in zip(self.jagged.kinds, self.shapes(), strict=True)
        ]
        _, found = self.predict(whole, floats, EncodedHistories(encoded, items, places))
        for head, values in found.items():
            if values.ndim != 1:
                raise ExportError(f"the model predicts {head!r} with shape {tuple(values.shape)}")
        return [values.to(torch.float32) for values in found.values()]


@dataclass(frozen=True, slots=True, eq=False)
class _RankedExample:
    """Random inputs of some users and their items."""

    whole: list[Tensor]
    """With a history for each item."""
    steps: list[Tensor]
    """What is encoded."""
    rows: list[Tensor]
    """What is not."""
    order: tuple[Tensor, Tensor]
    floats: list[Tensor]

    @classmethod
    def of(cls, half: DenseHalf, counts: Sequence[int]) -> _RankedExample:
        """Make an example with so many items for each user."""
        many = np.array(counts, np.int64)
        users, _ = half.examples(len(counts), seed=sum(counts))
        items, floats = half.examples(int(many.sum()), seed=1 + sum(counts))
        kinds = half.jagged.kinds
        user = torch.repeat_interleave(torch.from_numpy(many))
        ends = users[kinds.index("ends")]
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        places = [
            place for one in user.tolist() for place in range(int(ends[one] - lengths[one]), int(ends[one]))
        ]
        repeated = torch.tensor(places, dtype=torch.int64)
        whole = []
        for kind, one, item in zip(kinds, users, items, strict=True):
            match kind:
                case "rows":
                    whole.append(item)
                case "values" | "times":
                    whole.append(at_least(one[repeated]))
                case "ends":
                    whole.append(lengths[user].cumsum(0))
                case "numbers":
                    whole.append(one)
                case "asked":
                    whole.append(one[user])
        rows = [
            item if kind == "rows" else one
            for kind, one, item in zip(kinds, users, items, strict=True)
            if kind != "values"
        ]
        steps = [one for kind, one in zip(kinds, users, strict=True) if kind in ENCODED_KINDS]
        return cls(whole, steps, rows, items_of(many), floats)


class _OverWeights(nn.Module):
    """A model as a function of its weights. It has no weights itself, so that none are in the graph."""

    def __init__(self, half: DenseHalf, names: Sequence[str]) -> None:
        super().__init__()
        self.__dict__["half"] = half  # not a submodule, which would put its weights into the graph
        self._names = names

    def forward(self, weights: list[Tensor], rows: list[Tensor], floats: list[Tensor]) -> list[Tensor]:
        named = {f"module.{name}": one for name, one in zip(self._names, weights, strict=True)}
        found: list[Tensor] = torch.func.functional_call(self.__dict__["half"], named, (rows, floats))
        return found


def _stand_in(layouts: Mapping[str, Any], batch: _StandInBatch) -> StandIn:
    def layouts_of(asked: object) -> Mapping[str, Any]:
        if asked is not batch and asked is not batch.ids:
            raise ExportError(
                "the model looks up IDs that it computes itself; a graph only gets the rows of the batch's "
                f"features. Compute these IDs in the dataset, as a feature of the FeatureSpec. {INSTEAD}"
            )
        return layouts

    return layouts_of


class _StandInBatch(Batch):
    """A batch of any number of examples: with floats and labels, and IDs that cannot be read."""

    def __post_init__(self) -> None:
        """Skip the checks of sizes: the number of examples is symbolic."""

    def __len__(self) -> int:
        raise ExportError(
            "the model calls len(batch), which would be a constant in the graph. Use "
            f"batch.ids.batch_size, or the shape of a tensor. {INSTEAD}"
        )


class _StandInIds:
    """Stands in for the IDs of a batch while tracing."""

    def __init__(self, batch_size: Any) -> None:
        self.batch_size = batch_size
        self.event_time = 0
        self.event_times: Tensor | None = None
        self.numbers: Tensor | None = None
        """How far histories are padded; see `monolith.serve.jagged`."""
        self.encoded: EncodedHistories | None = None
        """Histories that were encoded before."""
        self.times: dict[str, RaggedTensor] = {}
        """Features of times -> those of all steps: they are inputs of the graph."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.times)

    def __getitem__(self, name: str) -> RaggedTensor:
        if name not in self.times:
            self._refuse(f"feature {name!r}")
        return self.times[name]

    def first(self, name: str) -> NoReturn:
        """Refuse to be read."""
        self._refuse(f"feature {name!r}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"all features, by batch.ids.{name}")

    def __len__(self) -> int:
        raise ExportError(
            "the model calls len(batch.ids), which would be a constant in the graph. Use "
            f"batch.ids.batch_size. {INSTEAD}"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise ExportError(
            f"the model reads the IDs of {what} outside of its EmbeddingCollection, and a graph gets rows, "
            "not IDs. Read a float feature or a layout instead, and make sure that the loss reads no IDs "
            f"if labels are missing. {INSTEAD}"
        )


def _compare(half: DenseHalf, traced: TracedDense, place: str) -> None:
    """Refuse a graph that predicts something else than its model, at any batch size.

    Args:
        place: File and line of the model, for the message.
    """
    graph = DenseGraph(traced.graph, traced.weights, record=not half.jagged)
    for size in _SIZES:
        rows, floats = half.examples(size, seed=size)
        with torch.no_grad():
            wanted = half(rows, floats)
            found = graph(rows, floats)
        for head, one, other in zip(traced.outputs, wanted, found, strict=True):
            if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
                same = False
            else:
                same = torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
            if not same:
                raise ExportError(
                    f"{place}the graph predicts something else for {head!r} than the model, for {size} "
                    "examples: a decision of the Python code became a constant in the graph. Decide with "
                    f"torch.where and tensors, not with Python numbers computed from them. {INSTEAD}"
                )


_ADVICE = {
    "data-dependent": (
        "The line decides in Python by the values of a tensor, as `if x.sum() > 0` or x.item() do; a "
        "graph cannot branch: use torch.where, or a mask. "
    ),
    "Dim": ("The line fixes the number of examples, as x.view(3, -1) does: use -1, or x.shape[0], for it. "),
}
"""A remedy for an error of torch.export, by a word in its message."""


def _advice(error: Exception) -> str:
    text = f"{type(error).__name__} {error}"
    words = {**_ADVICE, "DataDependent": _ADVICE["data-dependent"], "Constraint": _ADVICE["Dim"]}
    return next((advice for word, advice in words.items() if word in text), "")


def _place_of(error: BaseException) -> str:
    """Return the line of the user's code that raised an error, as the start of a message."""
    frame = own_frame(error)
    return "" if frame is None else f"{frame.filename}:{frame.lineno}, in {frame.name}: "


def _written_at(module: nn.Module) -> str:
    """Return file and line of a model's class; empty for our own models and for interactive code."""
    kind = type(module)
    if kind.__module__.partition(".")[0] == "monolith":
        return ""
    try:
        path, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return ""
    return f"{path}:{line}, class {kind.__name__}: "


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__
