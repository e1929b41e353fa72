"""ConfigTask: the task that a config file says, features, model and data, without a line of Python.

A run with `[model]` and no task of its own is this one. In Python it is what one would write by hand:

    task = ConfigTask(
        features=FeatureSpec(features={"user": IdFeature(kind="string"), "price": FloatFeature()}),
        network=ModelConfig(type="deepfm", settings={"dim": 8}),
        data=DataConfig(path="clicks.csv", split=DataSplit(evaluate=0.1)),
    )

With a two-tower model it is a `ConfigRetrievalTask`, which has `[candidates]`, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from monolith.config import to_dict
from monolith.data import DataConfig, HistoryConfig, Pipeline, Stream
from monolith.data.config import Part
from monolith.data.served import ServedSpec
from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureSpec
from monolith.feature.spec import RowSettings
from monolith.model import RetrievalModel, UpdateConfig
from monolith.model.by_name import ModelConfig
from monolith.nn import optimizers as own
from monolith.nn.losses import Target
from monolith.runtime.config import RETRIEVAL
from monolith.table import AdmissionConfig
from monolith.train.candidates_config import CandidatesConfig
from monolith.train.retrieval import RetrievalTask
from monolith.train.task import Mode, Task

# What trains the dense weights of a task that is a config file: `optimizer` of `[task]`.
#
#     [task]
#     dense_rate = 0.003
#     optimizer = { type = "DenseAdamW", weight_decay = 0.01 }
#
# Each is a plain value with the settings of the optimizer that it makes; the rate is the task's.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Makes an optimizer of torch, whose arguments are the fields."""

    made: ClassVar[Any]

    def make(self, weights: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """Return the optimizer of some weights.

        Raises:
            ConfigError: A setting is out of range.
        """
        settings = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        try:
            optimizer: torch.optim.Optimizer = self.made(weights, lr=rate, **settings)
        except ValueError as cause:
            raise ConfigError(f"task.optimizer: {type(self).__name__}: {cause}") from cause
        return optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdam(_Made):
    """Adam."""

    made: ClassVar[Any] = own.EagerAdam
    betas: tuple[float, float] = (0.9, 0.999)
    """How much of the running means of gradients, and of their squares, is kept at each step."""
    eps: float = 1e-8
    weight_decay: float = 0.0
    """The factor by which each weight is added to its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdamW(_Made):
    """Adam with weights that decay apart from the gradient."""

    made: ClassVar[Any] = torch.optim.AdamW
    betas: tuple[float, float] = (0.9, 0.999)
    """How much of the running means of gradients, and of their squares, is kept at each step."""
    eps: float = 1e-8
    weight_decay: float = 0.01
    """The share of each weight, times the rate, that goes at each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSgd(_Made):
    """Gradient descent, with momentum if it is set."""

    made: ClassVar[Any] = torch.optim.SGD
    momentum: float = 0.0
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""
    weight_decay: float = 0.0
    """The factor by which each weight is added to its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdagrad(_Made):
    """Adagrad."""

    made: ClassVar[Any] = torch.optim.Adagrad
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    """The factor by which each weight is added to its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRMSprop(_Made):
    """RMSProp with momentum, as the original system has it; see `monolith.nn.RMSprop`."""

    made: ClassVar[Any] = own.RMSprop
    beta1: float = 0.99
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    use_v2: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdamom(_Made):
    """AdaMom, as the original system has it; see `monolith.nn.Adamom`."""

    made: ClassVar[Any] = own.Adamom
    ada_decay: float = 0.9999
    mom_decay: float = 0.99
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    use_v2: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseShampoo(_Made):
    """Shampoo, as the original system has it; see `monolith.nn.Shampoo`."""

    made: ClassVar[Any] = own.Shampoo
    beta_1: float = 0.9
    beta_2: float = 1.0
    warmup: int = 5000
    tau_1: int = 200
    tau_2: int = 20
    eigen_head: int = 100
    eigen_tail: int = 100
    damping_epsilon: float = 1e-3


DenseRule = DenseAdam | DenseAdamW | DenseSgd | DenseAdagrad | DenseRMSprop | DenseAdamom | DenseShampoo
"""What may train dense weights, by the `type` that a file says."""


PARTS: Mapping[Mode, Part] = {
    Mode.TRAIN: "train",
    Mode.EVALUATE: "evaluate",
    Mode.PREDICT: "predict",
}


@dataclass(frozen=True, kw_only=True)
class ConfigTask(Task):
    """A ready model over raw data, as features say."""

    features: FeatureSpec
    network: ModelConfig
    """The model; `[model]` of a file."""
    data: DataConfig
    batch_size: int = 512
    """How many examples a step trains on."""
    dense_rate: float = 1e-3
    """The learning rate of dense weights; train.schedule moves it. Rows have their own, of their
    optimizers."""
    optimizer: DenseRule = field(default_factory=DenseAdam)
    """What trains dense weights: a type (DenseAdam, DenseAdamW, DenseSgd, DenseAdagrad, DenseRMSprop,
    DenseAdamom, DenseShampoo) and its settings."""
    gradients: UpdateConfig = field(default_factory=UpdateConfig)
    """What is done to gradients before they are applied: clipping, weight decay."""
    admission: AdmissionConfig | None = None
    """How sightings of ids are counted, for features that have an occurrence_threshold and do not say;
    `[admission]` of a file."""
    scores: tuple[str, ...] = ()
    """The metrics of each label. By default auc, log_loss and calibration of classes, and gauc with groups;
    rmse, mae and calibration of numbers."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.dense_rate <= 0:
            raise ConfigError(f"dense_rate must be more than 0, got {self.dense_rate}")

    @property
    def name(self) -> str:
        return self.network.type

    def records(self, mode: Mode) -> Pipeline:
        """Return the records, with the types that the features need, and the histories of their users."""
        types = self._as_stored(self.features).source_columns
        return self.data.pipeline(PARTS[mode], self.batch_size, types=types, histories=self._histories)

    @cached_property
    def _histories(self) -> Sequence[HistoryConfig]:
        if self.data.served:
            return ()  # the log has those that were served
        return HistoryConfig.from_spec(self.features, max_users=self.data.history_users)

    def dataset(self, mode: Mode) -> Stream[Batch]:
        spec = self._read_by
        if mode is Mode.PREDICT:  # what is to be predicted may have labels, and need not
            spec = replace(spec, optional=tuple(dict.fromkeys([*spec.optional, *spec.targets])))
        # A stream knows by itself. A data service in place of files does not.
        threads = None if self.data.live else self.data.reading_threads
        return self.records(mode).to_batches(spec, threads=threads)

    @property
    def builds_histories(self) -> bool:
        """Whether histories of users are built of the data: its positions then have all of them."""
        return bool(self._histories)

    @cached_property
    def _read_by(self) -> FeatureSpec:
        """The features, with labels that are checked against their losses as they are read.

        Every read of the data shares this object, because its reader remembers which warnings it has given.
        """
        labels = {
            name: replace(label, loss=label.loss or "binary") for name, label in self.features.labels.items()
        }
        return self._as_stored(replace(self.features, labels=labels))

    def _as_stored(self, spec: FeatureSpec) -> FeatureSpec:
        """Return what reads the features in the form that the data has them in."""
        return ServedSpec.of(spec) if self.data.served else spec

    def targets(self) -> Mapping[str, Target]:
        return self._targets  # asked for several times in each step

    @cached_property
    def _targets(self) -> Mapping[str, Target]:
        return {
            name: Target(
                loss=label.loss or "binary",
                weight=label.weight,
                delta=label.delta,
                optional=(label.column or name) in self.features.optional,
            )
            for name, label in self.features.labels.items()
        }

    def model(self) -> nn.Module:
        features = {
            name: replace(one, admission=self.admission)
            if isinstance(one, RowSettings) and one.shares is None and one.admission is None
            else one
            for name, one in self.features.features.items()
        }
        made = replace(self.features, features=features)
        return self.network.make(made, seed=torch.initial_seed() % (1 << 31))

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        weights = list(model.parameters())
        return self.optimizer.make(weights, self.dense_rate) if weights else None

    def updates(self) -> UpdateConfig:
        return self.gradients

    def metrics(self, mode: Mode) -> Mapping[str, Sequence[str]] | Sequence[str]:  # noqa: ARG002
        if self.scores:
            return self.scores
        grouped = () if self.features.group is None else ("gauc",)
        return {
            name: (*target.metrics, *grouped) if target.is_probability else target.metrics
            for name, target in self.targets().items()
        }

    def describe(self) -> Mapping[str, Any]:
        return {"model": self.network.to_dict(), "features": self.features.to_dict()}


@dataclass(frozen=True, kw_only=True)
class ConfigRetrievalTask(ConfigTask, RetrievalTask):
    """A two-tower model over raw data, measured among all items of a table."""

    items: CandidatesConfig
    """The items that could be retrieved; `[candidates]` of a file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network.type not in RETRIEVAL:
            raise ConfigError(
                f"a model of type {self.network.type} has no candidates; {', '.join(RETRIEVAL)} have"
            )
        if self.scores:
            raise ConfigError(
                f"scores: a model of type {self.network.type} is measured by candidates.ks; leave scores out"
            )
        if self.barred is not None:
            self.features.id_feature(self.barred, "candidates.barred")

    @cached_property
    def _read_by(self) -> FeatureSpec:
        # A label says which items were wanted, by any number above 0.
        return self._as_stored(self.features)

    @property
    def ks(self) -> Sequence[int]:  # type: ignore[override]
        return self.items.ks

    @property
    def barred(self) -> str | None:  # type: ignore[override]
        return self.items.barred

    def candidates(self) -> Stream[Batch]:
        model = self.model()
        assert isinstance(model, RetrievalModel)
        spec = model.item_spec
        table = DataConfig(path=self.items.path, format=self.items.format)
        return table.pipeline("train", self.items.batch_size, types=spec.columns).to_batches(spec)

    def metrics(self, mode: Mode) -> Sequence[str]:
        return RetrievalTask.metrics(self, mode)

    def protocol(self, mode: Mode) -> str:
        part = PARTS[mode]
        before = [str(one.path) for one in self.data.earlier(part)] if self._histories else []
        began = f", histories beginning with the events of {' and '.join(before)}" if before else ""
        return f"{self.data.protocol(part)}{began}; {RetrievalTask.protocol(self, mode)}"

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "candidates": to_dict(self.items)}
