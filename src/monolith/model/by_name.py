"""Ready models by name, with their settings as plain values: what `[model]` of a run's file says.

    [model]
    type = "deepfm"
    dim = 16
    hidden = [128, 64]

The settings are the arguments of the model's class, with its types and defaults, so that a file says what a
person would write in Python. What the run decides (features, where rows live, the device) is no setting.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

from monolith.config import config_from_mapping, to_dict
from monolith.config.fields import argument_docs
from monolith.errors import ConfigError
from monolith.feature import FeatureSpec
from monolith.feature.spec import RowInitializer, RowOptimizer
from monolith.model.dcn import DCNv2
from monolith.model.deepfm import DeepFM
from monolith.model.din import DeepInterest
from monolith.model.dlrm import DLRM
from monolith.model.ffm import FFM
from monolith.model.mmoe import MMoE
from monolith.model.next_item import HSTU, SEQUENCE_DEFAULTS, GRU4Rec, SASRec, SequenceOptions
from monolith.model.ready import MODEL_DEFAULTS, ModelOptions, PlacementOptions, ReadyModel
from monolith.model.retrieval import RetrievalModel
from monolith.model.sequence_ranker import SequenceRanker
from monolith.model.two_tower import TwoTower
from monolith.table import Initializer, Optimizer

NamedModel = ReadyModel | RetrievalModel

MODELS: Mapping[str, type[NamedModel]] = {
    "deepfm": DeepFM,
    "dcnv2": DCNv2,
    "dlrm": DLRM,
    "ffm": FFM,
    "mmoe": MMoE,
    "din": DeepInterest,
    "sequence_ranker": SequenceRanker,
    "two_tower": TwoTower,
    "sasrec": SASRec,
    "hstu": HSTU,
    "gru4rec": GRU4Rec,
}
"""By the name that a file uses."""

OF_THE_RUN = ("features", "floats", "store", "device", "threads")
"""Arguments of models that are no settings."""

_PLAIN: Mapping[Any, Any] = {
    Optimizer: RowOptimizer,
    Initializer | None: RowInitializer | None,
}
"""Classes that have no fields of their own -> those of them that are plain values."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A ready model: which one, and how wide."""

    type: str
    """One of `MODELS`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its class by name, where they are not the defaults."""

    def __post_init__(self) -> None:
        if self.type not in MODELS:
            near = get_close_matches(self.type.lower(), MODELS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {_known()}"
            raise ConfigError(f"model.type: there is no ready model {self.type!r}; {hint}")

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], source: str = "the config") -> ModelConfig:
        """Read what a file says.

        Raises:
            ConfigError: There is no such model; or lists every unknown key, with the nearest known one, and
                every wrong value.
        """
        kind = plain.get("type")
        if not isinstance(kind, str):
            raise ConfigError(f'model.type is required: one of {_known()}, as in type = "deepfm"')
        chosen = cls(type=kind)
        given = {name: value for name, value in plain.items() if name != "type"}
        whole = dataclasses.make_dataclass(
            "WholeConfig", [("model", model_settings(kind))], namespace={"TITLE": source}
        )
        read: Any = config_from_mapping(whole, {"model": given}, source)
        return dataclasses.replace(chosen, settings={name: getattr(read.model, name) for name in given})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` reads back."""
        shadow = model_settings(self.type)
        plain = to_dict(shadow(**self.settings))
        return {"type": self.type, **{name: plain[name] for name in self.settings}}

    def make(self, features: FeatureSpec, *, seed: int = 0) -> NamedModel:
        """Return the model over these features, with its first weights.

        Args:
            seed: For these, where the settings do not say.
        """
        make: Any = MODELS[self.type]
        model: NamedModel = make(features, **{"seed": seed, **self.settings})
        return model


def model_settings(kind: str) -> Any:
    """Return a dataclass with the settings of a ready model, as the constructor of its class has them.

    Args:
        kind: One of `MODELS`.
    """
    model = MODELS[kind]
    hints = typing.get_type_hints(model.__init__)
    found: dict[str, tuple[Any, Any]] = {}
    for parameter in inspect.signature(model).parameters.values():
        hint = hints[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:  # `Unpack` of a TypedDict: the options of all models
            (options,) = typing.get_args(hint)
            types = typing.get_type_hints(options)
            defaults: Mapping[str, Any] = SEQUENCE_DEFAULTS if options is SequenceOptions else MODEL_DEFAULTS
            found |= {name: (types[name], defaults[name]) for name in types}
        else:
            found[parameter.name] = (hint, parameter.default)
    fields: list[Any] = []
    for name, (hint, default) in found.items():
        if name in OF_THE_RUN:
            continue
        required = default is inspect.Parameter.empty
        given: Any = field() if required else field(default_factory=partial(_same, default))
        fields.append((name, _PLAIN.get(hint, hint), given))
    return dataclasses.make_dataclass(f"{model.__name__}Settings", fields, frozen=True, kw_only=True)


def setting_docs(kind: str) -> dict[str, str]:
    """Return the documentation of each setting of a ready model, by name."""
    sources = (PlacementOptions, ModelOptions, SequenceOptions, MODELS[kind])
    docs = [argument_docs(source) for source in sources]
    return {name: text for found in docs for name, text in found.items()}


def _same(value: Any) -> Any:
    return value


def _known() -> str:
    return ", ".join(MODELS)
