"""Tracing: the dense half of a model, through `torch.export`.

Rows without end are no part of a graph, and neither are weights: both are its inputs. What is traced is

    outputs(weights, tensors of every EmbeddingCollection, float features) -> predictions by head

with the number of examples left open. Weights as inputs can be swapped between two batches, and a graph
without any has nothing in it that would have to be unpickled.

A model may read of a batch only what a graph can be given. A model that reads IDs outside of
its collections is refused, and may be served as a Python module.
"""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from monolith.errors import CorruptFileError, ExportError, MonolithError
from monolith.feature import Batch
from monolith.model import EmbeddingCollection
from monolith.model.collection import StandIn
from monolith.observe.stacks import own_frame
from monolith.serve.dense import DenseGraph, clean_graph

Predict = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""Runs a module on a batch; returns predictions by head, each of shape (examples,)."""

INSTEAD = (
    "Or serve the model as a Python module: export with --as-module (as_module=True), and allow it where it "
    "is served (allow_module)."
)
_SIZES = (1, 2, 5)
"""Of the batches by which a graph is compared with its model."""
_TRACED = 3
"""Examples of the batch that is traced: neither 0 nor 1, which broadcast."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedDense:
    """The dense half of a model, as a graph over weights, tensors of rows, and floats."""

    graph: bytes
    """What `torch.export.save` writes: no weights, no example inputs."""
    weights: Mapping[str, Tensor]
    """Parameters and buffers by name, in the order of the graph's inputs."""
    outputs: tuple[str, ...]
    """Heads, in the order of the graph's outputs."""
    example: tuple[Sequence[Tensor], Sequence[Tensor]]
    """Tensors of rows and floats that it may be run with."""


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
) -> TracedDense:
    """Trace a model in eval mode, on the CPU, and see that the graph says what the model says.

    Args:
        floats: Float features of a batch -> their width.
        heads: The labels that the model was trained on: a batch has them, as NaN.
        group: What batches are grouped by.

    Raises:
        ExportError: The model cannot be exported; says why, and what to do.
    """
    half = DenseHalf(module, outputs, dict(floats or {}), heads, group)
    weights = {name: tensor.detach() for name, tensor in _tensors(module).items()}
    rows, numbers = half.examples(_TRACED)
    size = torch.export.Dim("examples", min=1)
    shapes = ([None] * len(weights), [{0: size}] * len(rows), [{0: size}] * len(numbers))
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
    traced = TracedDense(graph, weights, half.heads, (rows, numbers))
    _compare(half, traced, _written_at(module))
    return traced


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all that a model computes with, buffers that no checkpoint keeps included."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class DenseHalf(nn.Module):
    """A model with tensors in place of its rows.

    Args:
        floats, heads, group: See `trace_dense`.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Predict,
        floats: Mapping[str, int],
        heads: Sequence[str],
        group: str | None,
    ) -> None:
        super().__init__()
        self.module = module
        self._outputs = outputs
        self._floats = floats
        self._labels = tuple(heads)
        self._group = group
        self._collections = collections_of(module)
        self.heads: tuple[str, ...] = ()
        """What it returns predictions of, once it has run."""

    def examples(self, size: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors of rows and floats, of so many examples."""
        random = torch.Generator().manual_seed(seed)
        rows = [
            torch.rand((size, *shape), generator=random) - 0.5
            for one in self._collections
            for shape in _flat_shapes(one)
        ]
        return rows, [torch.rand((size, width), generator=random) for width in self._floats.values()]

    def forward(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> list[Tensor]:
        """Return predictions in the order of `heads`.

        Args:
            rows: What the collections hand out, collection after collection, layouts in sorted order.
            floats: Of shape (examples, width) each.
        """
        if not rows:
            raise ExportError("the model has no EmbeddingCollection, so there is nothing to look up")
        size: Any = rows[0].shape[0]  # not known while tracing
        labels = {head: torch.full((size,), math.nan) for head in self._labels}
        ids: Any = _StandInIds(size)
        batch = _StandInBatch(ids, dict(zip(self._floats, floats, strict=True)), labels, group=self._group)
        given = iter(rows)
        with ExitStack() as replaced:
            for collection in self._collections:
                replaced.enter_context(collection.replaced(_handing_out(collection, given, batch)))
            predictions = self._outputs(self.module, batch)
        self.heads = tuple(predictions)
        found = []
        for head, values in predictions.items():
            if values.shape != (size,):
                raise ExportError(
                    f"the model predicts {head!r} with shape {tuple(values.shape)}: what is served has one "
                    "number for each example"
                )
            found.append(values.to(torch.float32))
        return found


class _OverWeights(nn.Module):
    """A model as a function of its weights. It has none itself, so that none are in the graph."""

    def __init__(self, half: DenseHalf, names: Sequence[str]) -> None:
        super().__init__()
        self.__dict__["half"] = half  # no submodule of this one
        self._names = names

    def forward(self, weights: list[Tensor], rows: list[Tensor], floats: list[Tensor]) -> list[Tensor]:
        named = {f"module.{name}": one for name, one in zip(self._names, weights, strict=True)}
        found: list[Tensor] = torch.func.functional_call(self.__dict__["half"], named, (rows, floats))
        return found


def _flat_shapes(collection: EmbeddingCollection) -> list[tuple[int, ...]]:
    """Return the shapes of what a collection hands out, in order, without the examples."""
    found: list[tuple[int, ...]] = []
    for shape in collection.shapes.values():
        found += shape if isinstance(shape, list) else [shape]
    return found


def _handing_out(collection: EmbeddingCollection, given: Any, batch: _StandInBatch) -> StandIn:
    layouts = {
        name: [next(given) for _ in shape] if isinstance(shape, list) else next(given)
        for name, shape in collection.shapes.items()
    }

    def hand_out(asked: object) -> Mapping[str, Any]:
        if asked is not batch and asked is not batch.ids:
            raise ExportError(
                "the model looks up ids that it has made itself: a graph is given what the features of the "
                f"batch look up. Make these ids in the dataset, as a feature of the FeatureSpec. {INSTEAD}"
            )
        return layouts

    return hand_out


class _StandInBatch(Batch):
    """A batch of as many examples as there will be: with floats and labels, and ids that cannot be read."""

    def __post_init__(self) -> None:
        """Compare nothing: how many examples there are is left open."""

    def __len__(self) -> int:
        raise ExportError(
            "the model asks for len(batch), which is one number for good in a graph. Ask for "
            f"batch.ids.batch_size, or for the shape of a tensor. {INSTEAD}"
        )


class _StandInIds:
    """In place of the ids of a batch."""

    def __init__(self, batch_size: Any) -> None:
        self.batch_size = batch_size
        self.event_time = 0
        self.event_times = None

    def __getitem__(self, name: str) -> NoReturn:
        self._refuse(f"feature {name!r}")

    def first(self, name: str) -> NoReturn:
        """Refuse to be read."""
        self._refuse(f"feature {name!r}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"all features, by batch.ids.{name}")

    def __len__(self) -> int:
        raise ExportError(
            "the model asks for len(batch.ids), which is one number for good in a graph. Ask for "
            f"batch.ids.batch_size. {INSTEAD}"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise ExportError(
            f"the model reads the ids of {what} outside of its EmbeddingCollection, and a graph is given "
            "rows, not ids. Have it read a float feature or a layout instead, and see that its loss does not "
            f"look at ids where labels are missing. {INSTEAD}"
        )


def _compare(half: DenseHalf, traced: TracedDense, place: str) -> None:
    """Refuse a graph that says something else than its model, at any size.

    Args:
        place: Where the model is written, for the message.
    """
    graph = DenseGraph(traced.graph, traced.weights)
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
                    "examples: it takes decisions in Python that a graph has taken once for all. Decide with "
                    f"torch.where, and by tensors, not by numbers made of them. {INSTEAD}"
                )


_ADVICE = {
    "data-dependent": (
        "The line decides in Python by the values of a tensor, as `if x.sum() > 0` or x.item() do, and a "
        "graph has one way for all examples: use torch.where, or a mask. "
    ),
    "Dim": ("The line fixes the number of examples, as x.view(3, -1) does: use -1, or x.shape[0], for it. "),
}
"""What to do about an error of torch.export, by a word in it."""


def _advice(error: Exception) -> str:
    text = f"{type(error).__name__} {error}"
    words = {**_ADVICE, "DataDependent": _ADVICE["data-dependent"], "Constraint": _ADVICE["Dim"]}
    return next((advice for word, advice in words.items() if word in text), "")


def _place_of(error: BaseException) -> str:
    """Return the line of a person's own code that an error came from, to begin a message with."""
    frame = own_frame(error)
    return "" if frame is None else f"{frame.filename}:{frame.lineno}, in {frame.name}: "


def _written_at(module: nn.Module) -> str:
    """Return where a model is written; empty if it is one of ours, or made in an interpreter."""
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
