"""Feature and FeatureSet: a list of features becomes slots, feature columns and slices.

Slots and feature columns say everything there is to say about rows, and a model of thirty
features would say it thirty times. A `Feature` is a name with what is special about it;
a `FeatureSet` gives the rest, and returns slices by name:

    features = FeatureSet(["user", "item", Feature(name="clicked", shares="item", combiner=Mean())])
    vectors = features.slices(["user", "item", "clicked"], "vector", 16)
    embeddings = EmbeddingCollection([Layout("vectors", CONCAT, vectors)])

A feature that shares another's rows shares its slices too: here "item" and "clicked" read
the same sixteen floats of the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from typing import Literal

from monolith.errors import ConfigError, DuplicateNameError, FeatureError, UnknownFeatureError
from monolith.feature import (
    NONE,
    ROW_OPTIMIZER,
    Combiner,
    Each,
    FeatureColumn,
    FeatureSlice,
    FeatureSlot,
    FeatureSpec,
    FirstN,
    FloatFeature,
    HistoryFeature,
    Layout,
    LayoutKind,
    Max,
    Mean,
    SequenceFeature,
    SliceUse,
    SlotConfig,
    Sum,
)
from monolith.feature.spec import GAP, RowSettings
from monolith.table import (
    AdmissionConfig,
    DelayCompensated,
    Fp16,
    Initializer,
    LearningRate,
    Optimizer,
    RandomUniform,
    StochasticRounding,
)
from monolith.table.compressors import Compressor
from monolith.table.config import EmbeddingDtype, EmbeddingRounding

_OF_ROWS = (
    "slot",
    "occurrence_threshold",
    "admission",
    "expire_after",
    "slot_id",
    "dim",
    "optimizer",
    "bias_optimizer",
    "initializer",
    "compressor",
    "bias_compressor",
    "learning_rate",
    "bias_learning_rate",
    "capacity_bytes",
    "when_full",
    "bias_initializer",
    "initial_rows",
    "embedding_dtype",
    "embedding_rounding",
)
_POOLED: dict[str, Combiner] = {"sum": Sum(), "mean": Mean(), "max": Max()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One ID feature of a model, and the settings of its rows; None takes the model's default.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import DeepFM, Feature, Mean
        >>> item = Feature(name="item", occurrence_threshold=2, expire_after=timedelta(days=30))
        >>> seen = Feature(name="seen", shares="item", combiner=Mean())  # reads the rows of `item`
        >>> model = DeepFM([item, seen, "user"], dim=8)
        >>> sorted(model.embeddings.store.tables)
        ['item', 'user']
    """

    name: str
    combiner: Combiner = field(default_factory=Sum)
    """How the embeddings of one example's ids become one."""
    shares: str | None = None
    """The feature whose rows this one reads; the settings of the rows are then set there."""
    slot: str | None = None
    """The name of its rows, as in checkpoints; by default that of the feature."""
    occurrence_threshold: int = 0
    """Sightings after which an id is given a row on the next; 0 at once."""
    admission: AdmissionConfig | None = None
    """How these sightings are counted."""
    expire_after: timedelta | None = None
    """Time without an update after which a row may go; None keeps it for good."""
    slot_id: int | None = None
    """The slot in the high bits of the ids, when they are fids."""
    dim: int | None = None
    """Floats of its vector, in models whose features may differ in that."""
    optimizer: Optimizer | None = None
    """What trains its vectors."""
    bias_optimizer: Optimizer | None = None
    """What trains its bias, in models that have one."""
    initializer: Initializer | None = None
    """What its vectors are before their first gradient."""
    bias_initializer: Initializer | None = None
    """What its bias is before its first gradient, in models that have one."""
    compressor: Compressor | None = None
    """How a server keeps its vectors."""
    bias_compressor: Compressor | None = None
    """How a server keeps its bias, in models that have one."""
    learning_rate: float | LearningRate | None = None
    """The rate of its vectors; None is the optimizer's own."""
    bias_learning_rate: float | LearningRate | None = None
    """The rate of its bias; None is the bias optimizer's own."""
    capacity_bytes: int | None = None
    """A ceiling on the memory of the feature's table; None for no ceiling."""
    when_full: Literal["refuse", "expire_oldest"] | None = None
    """What happens at that ceiling; see `TableConfig`. None refuses new rows."""
    initial_rows: int = 0
    """Rows that the feature's table has room for from the start; 0 leaves it to the run."""
    embedding_dtype: EmbeddingDtype | None = None
    """How the feature's table stores embeddings while they are trained, bias included; see `TableConfig`.
    None leaves it to the run."""
    embedding_rounding: EmbeddingRounding | None = None
    """How steps are rounded to embedding_dtype; see `TableConfig`. None leaves it to the run."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("feature: needs a name")
        if self.shares is not None:
            said = [name for name in _OF_ROWS if getattr(self, name) not in (None, 0)]
            if said:
                raise ConfigError(
                    f"feature {self.name!r} shares the rows of {self.shares!r}, and sets {', '.join(said)}: "
                    f"set it on {self.shares!r}, whose rows they are"
                )
        elif self.dim is not None and self.dim < 1:
            raise ConfigError(f"feature {self.name!r}: dim must be at least 1, got {self.dim}")
        elif self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ConfigError(
                f"feature {self.name!r}: capacity_bytes must be at least 1 or None, got {self.capacity_bytes}"
            )
        else:
            self.slot_config(SlotConfig(name=self.name))  # refuses what is out of range

    def slot_config(self, default: SlotConfig) -> SlotConfig:
        """Return the slot of this feature's rows: what it says, and the rest from `default`."""
        return SlotConfig(
            name=self.name if self.slot is None else self.slot,
            slot_id=self.slot_id,
            has_bias=default.has_bias,
            bias_initializer=(
                default.bias_initializer if self.bias_initializer is None else self.bias_initializer
            ),
            bias_optimizer=default.bias_optimizer if self.bias_optimizer is None else self.bias_optimizer,
            bias_compressor=default.bias_compressor if self.bias_compressor is None else self.bias_compressor,
            bias_learning_rate=(
                default.bias_learning_rate if self.bias_learning_rate is None else self.bias_learning_rate
            ),
            initializer=default.initializer if self.initializer is None else self.initializer,
            optimizer=default.optimizer if self.optimizer is None else self.optimizer,
            compressor=default.compressor if self.compressor is None else self.compressor,
            learning_rate=default.learning_rate if self.learning_rate is None else self.learning_rate,
            occurrence_threshold=self.occurrence_threshold,
            admission=default.admission if self.admission is None else self.admission,
            expire_after=default.expire_after if self.expire_after is None else self.expire_after,
            capacity_bytes=self.capacity_bytes,
            when_full=self.when_full or "refuse",
            initial_rows=self.initial_rows,
            embedding_dtype=self.embedding_dtype,
            embedding_rounding=self.embedding_rounding,
        )


def _decorated(one: RowSettings) -> Optimizer | None:
    """Return the optimizer of a feature's vectors, with what changes its steps."""
    made: Optimizer | None = one.optimizer
    if made is not None and one.delay_compensation is not None:
        made = DelayCompensated(made, one.delay_compensation)
    return StochasticRounding(made) if made is not None and one.stochastic_rounding else made


ReadHistory = Callable[[HistoryFeature], Combiner]
"""How a model reads a history of a spec, and the features that are kept along with it."""


def features_of(spec: FeatureSpec, histories: ReadHistory = lambda _: Each()) -> list[Feature]:
    """Return the features of ids that batches of a spec have and that read rows, in their order."""
    found = []
    for name, one in spec.features.items():
        if isinstance(one, FloatFeature):
            continue
        if isinstance(one, HistoryFeature):
            found += [
                Feature(name=each.name, combiner=histories(one), shares=each.feature)
                for each in spec.histories[name]
                if each.feature is not None  # times have no rows: a model reads them as they are
            ]
            continue
        kept = isinstance(one, SequenceFeature) and one.combiner is None
        combiner = FirstN(one.length) if kept else _POOLED[one.combiner]  # type: ignore[union-attr, index]
        owner = one.shares is None
        found.append(
            Feature(
                name=name,
                combiner=combiner,
                shares=one.shares,
                slot=one.rows,
                slot_id=spec.slots.get(name) if owner else None,
                dim=one.dim,
                occurrence_threshold=one.occurrence_threshold,
                admission=one.admission,
                compressor=one.compressor,
                bias_compressor=one.bias_compressor,
                expire_after=one.expire_after,
                optimizer=_decorated(one),
                bias_optimizer=one.bias_optimizer,
                initializer=one.initializer,
                bias_initializer=one.bias_initializer,
                initial_rows=one.initial_rows,
                learning_rate=one.learning_rate,
                bias_learning_rate=one.bias_learning_rate,
                capacity_bytes=one.capacity_bytes,
                when_full=one.when_full,
                embedding_dtype=one.embedding_dtype,
                embedding_rounding=one.embedding_rounding,
            )
        )
        if isinstance(one, SequenceFeature) and one.times is not None:
            found.append(Feature(name=name + GAP, combiner=combiner, slot_id=spec.slots.get(name + GAP)))
    return found


class FeatureSet:
    """The slots and feature columns of a model's features.

    Args:
        features: In the order a model reads them; a plain name is a `Feature` of that name. Or a feature
            spec, whose features of ids they are.
        bias: Whether rows begin with one number for a model's linear part: of all features, of none, or
            of those named. A feature that shares rows is named by, and has the bias of, its rows' owner.
        optimizer, initializer, compressor: Of slices, where neither feature nor slice says.
        bias_optimizer: Of biases, which begin at 0.
        histories: How histories of a spec are combined: by default each ID is kept.

    Raises:
        DuplicateNameError: Two features have one name.
        UnknownFeatureError: A feature shares the rows of one that is not there.
        ConfigError: Features share each other's rows in a circle, so that no feature owns them.

    Examples:
        >>> import torch
        >>> from monolith import EmbeddingCollection, Feature, FeatureSet
        >>> from monolith.feature import ADDN, CONCAT, Layout
        >>> features = FeatureSet(["user", "item", Feature(name="seen", shares="item")], bias=True)
        >>> vectors = features.slices(features.names, "vector", 8)
        >>> layouts = [Layout("bias", ADDN, features.bias()), Layout("vectors", CONCAT, vectors)]
        >>> ids = {"user": torch.tensor([17, 18]), "item": torch.tensor([7, 8])}
        >>> inputs = EmbeddingCollection(layouts)(ids)
        >>> inputs["bias"].shape, inputs["vectors"].shape  # one bias, and 3 vectors of 8 floats
        (torch.Size([2, 1]), torch.Size([2, 24]))
    """

    def __init__(
        self,
        features: Iterable[Feature | str] | FeatureSpec,
        *,
        bias: bool | Collection[str] = False,
        optimizer: Optimizer = ROW_OPTIMIZER,
        initializer: Initializer | None = None,
        compressor: Compressor | None = None,
        bias_optimizer: Optimizer = ROW_OPTIMIZER,
        histories: ReadHistory = lambda _: Each(),
    ) -> None:
        self.spec = features if isinstance(features, FeatureSpec) else None
        """What the features were made of, where that is a spec."""
        self._features: dict[str, Feature] = {}
        for given in features_of(features, histories) if isinstance(features, FeatureSpec) else features:
            feature = Feature(name=given) if isinstance(given, str) else given
            if feature.name in self._features:
                raise DuplicateNameError(f"two features are named {feature.name!r}")
            self._features[feature.name] = feature
        owners = {name: self._owner(name) for name in self._features}
        biased = self._features.keys() if bias is True else bias or ()
        with_bias = {owners[self._known(name)] for name in biased}
        slots = {
            owner: FeatureSlot(
                self._features[owner].slot_config(
                    SlotConfig(
                        name=owner,
                        has_bias=owner in with_bias,
                        bias_optimizer=bias_optimizer,
                        optimizer=optimizer,
                        initializer=RandomUniform() if initializer is None else initializer,
                        compressor=Fp16() if compressor is None else compressor,
                    )
                )
            )
            for owner in dict.fromkeys(owners.values())
        }
        self._columns = {
            name: FeatureColumn(slots[owners[name]], name, feature.combiner)
            for name, feature in self._features.items()
        }
        self._slices: dict[tuple[str, str], FeatureSlice] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The features, in the order given."""
        return tuple(self._features)

    def __getitem__(self, name: str) -> Feature:
        return self._features[self._known(name)]

    def __len__(self) -> int:
        return len(self._features)

    def column(self, name: str) -> FeatureColumn:
        """Return the feature column of a feature."""
        return self._columns[self._known(name)]

    def bias(self, features: Sequence[str] | None = None) -> list[SliceUse]:
        """Return the combined bias of each feature; of all by default."""
        return [self.column(name).bias() for name in (self.names if features is None else features)]

    def slices(
        self,
        features: Sequence[str],
        name: str,
        dim: int,
        *,
        initializer: Initializer | None = None,
        optimizer: Optimizer | None = None,
        compressor: Compressor | None = None,
        learning_rate: float | LearningRate | None = None,
    ) -> list[SliceUse]:
        """Return one slice of each feature, combined: `dim` floats that are added to its rows on first use.

        The same name on a feature, or on one that shares its rows, gives the same floats again; how
        they are trained is settled by the first use.

        Raises:
            FeatureError: The slice is there with another width.
        """
        uses = []
        for feature in features:
            column = self.column(feature)
            slot = column.slot
            found = self._slices.get((slot.name, name))
            if found is None:
                found = self._slices[slot.name, name] = slot.add_slice(
                    dim,
                    initializer=initializer,
                    optimizer=optimizer,
                    compressor=compressor,
                    learning_rate=learning_rate,
                )
            elif found.dim != dim:
                raise FeatureError(
                    f"feature {feature!r}: slice {name!r} of slot {slot.name!r} has {found.dim} floats, "
                    f"and {dim} are asked for; give the other slice a name of its own"
                )
            uses.append(column.lookup(found))
        return uses

    def widths(self, dim: int) -> dict[str, int]:
        """Return the width of each feature's vector: its own, or that of its rows' owner, or `dim`."""
        owned = {name: self._features[self._owner(name)].dim for name in self._features}
        return {name: dim if own is None else own for name, own in owned.items()}

    def vectors(self, dim: int) -> list[SliceUse]:
        """Return the vector of each feature, as wide as `widths` says."""
        return [
            use for name, width in self.widths(dim).items() for use in self.slices([name], "vector", width)
        ]

    def lookup_embedding_slice(
        self, features: Sequence[str], slice_name: str, slice_dim: int, kind: LayoutKind = NONE
    ) -> Layout:
        """Return a layout of one slice of each feature, named by the slice and a digest of the features.

        The name is upstream's, `<slice_name>_<md5 of the sorted features, comma-joined>`, so that layouts
        can be matched with those of a model that was trained there.
        """
        digest = hashlib.md5(",".join(sorted(map(str, features))).encode(), usedforsecurity=False)
        return Layout(
            f"{slice_name}_{digest.hexdigest()}", kind, self.slices(features, slice_name, slice_dim)
        )

    def _known(self, name: str) -> str:
        if name not in self._features:
            near = get_close_matches(str(name), self._features, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self._features) or 'none'}"
            )
            raise UnknownFeatureError(f"there is no feature {name!r}; {hint}")
        return name

    def _owner(self, name: str) -> str:
        """Return the feature whose rows `name` reads, over any number of steps."""
        path = [name]
        while (shares := self._features[path[-1]].shares) is not None:
            if shares not in self._features:
                raise UnknownFeatureError(
                    f"feature {path[-1]!r} shares the rows of {shares!r}, which is not a feature here; "
                    f"there are {', '.join(self._features)}"
                )
            if shares in path:
                raise ConfigError(
                    f"features share rows in a circle, {' -> '.join([*path, shares])}: "
                    "let one of them have rows of its own"
                )
            path.append(shares)
        return path[-1]
