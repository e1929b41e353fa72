"""What the ready models have in common: embeddings below, a dense half above.

A ready model is a plain `nn.Module` of two parts. `embeddings` turns ids into tensors;
`dense` is an ordinary module over those tensors and the float features, so that
`model.dense = torch.compile(model.dense)` does what one expects, and a dense optimizer
takes `model.parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from monolith.cuda import ModuleGraph
from monolith.errors import ConfigError, FeatureError
from monolith.feature import ROW_OPTIMIZER, Batch, Each, FeatureSpec, Layout, Mean
from monolith.model.collection import EmbeddingCollection, Input, PreparedBatch
from monolith.model.features import Feature, FeatureSet, ReadHistory
from monolith.nn import Dense, watch_segments
from monolith.store import Store
from monolith.table import Initializer, Optimizer

ModelInput = Input | PreparedBatch
"""What a model reads: a batch, its ids alone, or rows that were looked up ahead."""


class PlacementOptions(TypedDict, total=False):
    """Where the rows of a ready model live, and from which seed they start.

    Args:
        store: The store that holds the rows; by default a new one in this process.
        device: The device of the dense half, "cpu" by default; rows are copied there.
        seed: The seed of the first values of rows and weights, 0 by default.
        threads: The threads that look up rows; by default as many as the machine has cores.
    """

    store: Store | None
    device: torch.device | str
    seed: int
    threads: int | None


class ModelOptions(PlacementOptions, total=False):
    """Arguments that each ready model takes in addition to its own.

    Args:
        floats: Float features: name to width. The MLP reads them, too. A `FeatureSpec` names them itself.
        optimizer: The optimizer of rows whose feature names none; see `ROW_OPTIMIZER` for losses.
        initializer: The initializer of vectors; by default uniform within 0.05 of 0.
        dropout: The fraction of the MLP's hidden units that is dropped in training, 0 by default.
        kernel_norm: Whether the kernels of dense layers are normalized; see `nn.MLP`.
    """

    floats: Mapping[str, int] | None
    optimizer: Optimizer
    initializer: Initializer | None
    dropout: float
    kernel_norm: bool


MODEL_DEFAULTS: ModelOptions = {
    "store": None,
    "device": "cpu",
    "seed": 0,
    "threads": None,
    "floats": None,
    "optimizer": ROW_OPTIMIZER,
    "initializer": None,
    "dropout": 0.0,
    "kernel_norm": False,
}
"""The values of options that a caller leaves out."""


class TowerOptions(TypedDict):
    """The options that dense halves pass to each `tower`."""

    dropout: float
    kernel_norm: bool


class ModelInputs:
    """The inputs of a ready model: its ID features, its float features, and the options for both.

    Args:
        model: The name of the model's class, for errors.
        bias: Whether each feature has a bias besides its vector; or the features that have one.
        bias_optimizer: The optimizer of biases; by default that of vectors.
        reads_floats: Whether the model reads the float features of its spec.
        histories: How the model reads histories of its spec; by default by the mean of their embeddings.
    """

    def __init__(
        self,
        model: str,
        features: Sequence[Feature | str] | FeatureSpec,
        options: ModelOptions,
        *,
        bias: bool | Sequence[str] = False,
        bias_optimizer: Optimizer | None = None,
        reads_floats: bool = True,
        histories: ReadHistory = lambda _: Mean(),
    ) -> None:
        if unknown := sorted(options.keys() - MODEL_DEFAULTS.keys()):
            raise TypeError(f"{model}() got an unexpected keyword argument {unknown[0]!r}")
        self._options: ModelOptions = {**MODEL_DEFAULTS, **options}
        self.features = FeatureSet(
            features,
            bias=bias,
            optimizer=self._options["optimizer"],
            bias_optimizer=bias_optimizer or self._options["optimizer"],
            initializer=self._options["initializer"],
            histories=histories,
        )
        spec = self.features.spec
        self.floats = FloatFeatures(self._options["floats"], spec) if reads_floats else FloatFeatures(None)

    @property
    def tower(self) -> TowerOptions:
        """The options that dense halves pass to each `tower`."""
        return {"dropout": self._options["dropout"], "kernel_norm": self._options["kernel_norm"]}

    def seeded(self) -> AbstractContextManager[None]:
        """Return a context in which dense weights are drawn from the model's seed."""
        return seeded(self._options["seed"])

    def embeddings(self, layouts: Sequence[Layout]) -> EmbeddingCollection:
        """Return the embeddings of the model, laid out as its dense half reads them."""
        options = self._options
        return EmbeddingCollection(
            layouts,
            store=options["store"],
            device=options["device"],
            seed=options["seed"],
            threads=options["threads"],
        )


class FloatFeatures:
    """The float features of a model, concatenated.

    Args:
        widths: Feature to how many numbers it has in each example.
        spec: What the model's features were made of; its numbers are the model's.
    """

    def __init__(self, widths: Mapping[str, int] | None, spec: FeatureSpec | None = None) -> None:
        if spec is not None:
            if widths is not None:
                raise ConfigError("the feature spec says which features are numbers: leave `floats` out")
            widths = spec.floats
        self.widths = dict(widths or {})
        for name, width in self.widths.items():
            if width < 1:
                raise ConfigError(f"float feature {name!r}: width must be at least 1, got {width}")

    @property
    def width(self) -> int:
        """Of all features together."""
        return sum(self.widths.values())

    def read(
        self, batch: ModelInput, floats: Mapping[str, Tensor] | None, device: torch.device
    ) -> Tensor | None:
        """Return float32 of shape (examples, width), or None if the model has no float features.

        Args:
            floats: Those of the batch, where it does not hold them itself; of a `Batch` they may be left out.
        """
        if not self.widths:
            return None
        found = batch.floats if floats is None and isinstance(batch, Batch) else floats or {}
        tensors = []
        for name, width in self.widths.items():
            if name not in found:
                raise FeatureError(
                    f"the model reads float feature {name!r}, which the batch does not have; "
                    f"it has {', '.join(found) or 'none'}. Without a Batch, pass `floats`."
                )
            tensor = found[name]
            if tensor.ndim != 2 or tensor.shape[1] != width:
                raise FeatureError(
                    f"float feature {name!r} must have shape (examples, {width}), got {tuple(tensor.shape)}"
                )
            tensors.append(tensor.to(device, torch.float32, non_blocking=True))
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the first weights from `seed`, and leave torch's own random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def tower(
    in_features: int,
    hidden: Sequence[int],
    out_features: int | None = 1,
    *,
    dropout: float = 0.0,
    kernel_norm: bool = False,
) -> nn.Sequential:
    """Return dense layers with relu and dropout between them, then a linear one.

    Args:
        out_features: Of the linear layer; None ends with the last hidden layer.
        kernel_norm: Normalise the kernels of the layers, as `nn.MLP` does by default; it costs time.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be from 0 to below 1, got {dropout}")
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(Dense(in_features, width, activation="relu", kernel_norm=kernel_norm))
        if dropout:
            layers.append(nn.Dropout(dropout))
        in_features = width
    if out_features is not None:
        layers.append(Dense(in_features, out_features, kernel_norm=kernel_norm))
    return nn.Sequential(*layers)


def beside(vectors: Tensor, floats: Tensor | None) -> Tensor:
    """Return what stands side by side in an example: its vectors and, if there are any, its numbers."""
    return vectors if floats is None else torch.cat([vectors, floats], 1)


class WatchedDense(nn.Module):
    """A dense half with an MLP over all features."""

    mlp: nn.Sequential

    @property
    def first(self) -> Dense:
        """The layer that sees the features."""
        layer = self.mlp[0]
        assert isinstance(layer, Dense)
        return layer


def check_combined(model: str, features: FeatureSet, names: Sequence[str] | None = None) -> None:
    """Refuse features without embeddings of their own width: none at all, or sequences.

    Args:
        names: Those to look at; by default all.
    """
    names = features.names if names is None else names
    if not names:
        raise ConfigError(f"{model}: needs at least one feature")
    check_not_jagged(model, features, names)
    for name in names:
        if features[name].combiner.length:
            raise ConfigError(
                f"{model}: feature {name!r} keeps its first ids, and this model reads one embedding "
                "for each feature; combine them with Sum, Mean or Max"
            )


def check_not_jagged(model: str, features: FeatureSet, names: Sequence[str] | None = None) -> None:
    """Refuse features of which each ID is kept.

    Args:
        names: Those to look at; by default all.
    """
    for name in features.names if names is None else names:
        if isinstance(features[name].combiner, Each):
            raise ConfigError(
                f"{model}: each ID of feature {name!r} is kept, which only models of sequences read: "
                "sequence_ranker, hstu, sasrec, gru4rec. Use one of them; or combine its IDs with Sum, Mean "
                "or Max (a history: as a SequenceFeature with a combiner)"
            )


def check_one_width(model: str, features: FeatureSet, dim: int) -> None:
    """Refuse features whose vectors a model would multiply, and cannot, since their widths differ."""
    for name, width in features.widths(dim).items():
        if width != dim:
            raise ConfigError(
                f"{model}: feature {name!r} has dim {width}, and this model multiplies the vectors of all "
                f"features, {dim} wide; leave its dim out, or use DCNv2 or MMoE"
            )


def watch(
    first: Dense, segments: Mapping[str, int], report: Callable[[dict[str, Tensor]], None]
) -> RemovableHandle:
    """Report what each feature brings to a first layer, after each of its training steps.

    Args:
        segments: Feature to its width, in the order in which they lie in the layer's input.
        report: Given, by feature, float of shape (examples,): the square of its part of the layer's
            output, before the activation. A feature that stays near 0 is not used.
    """
    names = list(segments)

    def named(parts: Tensor) -> None:
        report(dict(zip(names, parts.unbind(1), strict=True)))

    return watch_segments(first, list(segments.values()), named)


InputAxes = Mapping[str, Mapping[str, Sequence[Sequence[Any]]]]
"""Variable to axis, as a text, to the names and widths of the inputs along it, as JSON has them."""


def along(segments: Mapping[str, int]) -> list[list[Any]]:
    """Return inputs along an axis, as JSON has them."""
    return [[name, width] for name, width in segments.items()]


class ReadyModel(nn.Module):
    """A ready-made model: embeddings, and a dense half over them. `DeepFM`, `DLRM` and others derive from it.

    Args:
        inputs: The features of the model and its options.
        layouts: The embeddings in the order in which `dense` takes them; the float features come last.
        dense: The dense half.

    Examples:
        >>> from monolith import DeepFM, ReadyModel
        >>> model = DeepFM(["user", "item"], dim=4)
        >>> isinstance(model, ReadyModel)
        True
        >>> model.embeddings  # the sparse half; model.dense is the rest
        EmbeddingCollection(features=2, tables=2, layouts={'bias': (1,), 'vectors': (8,)})
    """

    def __init__(self, inputs: ModelInputs, layouts: Sequence[Layout], dense: nn.Module) -> None:
        super().__init__()
        self.spec = inputs.features.spec
        """Turns raw data into the model's inputs and is saved with its checkpoints; None if the features were
        given one by one."""
        self.embeddings = inputs.embeddings(layouts)
        self.dense = dense.to(self.embeddings.device)
        self.floats = inputs.floats
        self._inputs = tuple(layout.name for layout in layouts)

    @property
    def input_axes(self) -> InputAxes:
        """The inputs along the axes of weights, by which a changed model finds its part of a checkpoint."""
        return {}

    def read(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """Return what `dense` takes: a tensor for each layout, and the float features if there are any."""
        layouts = self.embeddings(batch)
        numbers = self.floats.read(batch, floats, self.embeddings.device)
        inputs = [layouts[name] for name in self._inputs]
        return inputs if numbers is None else [*inputs, numbers]

    def capture(self, examples: int) -> ModuleGraph:
        """Have the dense half of a model on a CUDA device replayed from graphs, for batches of so many.

        Worth it where batches are small: then launches take longer than what they launch. Call it in training
        mode, before the first step; each size of batches is captured for itself.
        """
        shapes = self.embeddings.shapes
        where = self.embeddings.device
        sample = [
            torch.zeros((examples, *shape), device=where, requires_grad=True)
            for name in self._inputs
            if isinstance(shape := shapes[name], tuple)
        ]
        if self.floats.width:
            sample.append(torch.zeros((examples, self.floats.width), device=where))
        return ModuleGraph(self.dense, sample)


class LogitModel(ReadyModel):
    """A model of one task."""

    def forward(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            floats: The float features by name, where `batch` is not a `Batch`, which holds them itself.
        """
        logits: Tensor = self.dense(*self.read(batch, floats))
        return logits


class WatchedModel(LogitModel):
    """A model whose dense half begins with a layer over all features, its `first`.

    Args:
        segments: Feature to its width, in the order in which they lie in that layer's input.
    """

    def __init__(
        self,
        inputs: ModelInputs,
        layouts: Sequence[Layout],
        dense: nn.Module,
        *,
        segments: Mapping[str, int],
    ) -> None:
        super().__init__(inputs, layouts, dense)
        self.segments = dict(segments)
        """Feature to its width, in the order in which they lie in the input of the first layer."""

    @property
    def input_axes(self) -> InputAxes:
        """As of `ReadyModel`."""
        return {"dense.mlp.0.kernel.weight": {"0": along(self.segments)}}

    def watch_features(self, report: Callable[[dict[str, Tensor]], None]) -> RemovableHandle:
        """Report what each feature brings to the first layer, on each training step; see `watch`."""
        return watch(self.first, self.segments, report)

    @property
    def first(self) -> Dense:
        """The layer that sees all features."""
        first = self.dense.first
        assert isinstance(first, Dense)
        return first
