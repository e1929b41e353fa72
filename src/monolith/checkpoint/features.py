"""What a checkpoint keeps of a model's feature spec: by what raw data its rows and weights were trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monolith import filesystem
from monolith.checkpoint.fitting import Changes, InputAxes
from monolith.checkpoint.part import FEATURES, RestoreOptions, SavedPart
from monolith.checkpoint.parts import StateCut, StatePart
from monolith.checkpoint.report import RestoreReport
from monolith.errors import ConfigError, RestoreError
from monolith.feature import FeatureSpec, FloatFeature
from monolith.feature.spec.feature_spec import differences

OF_IDS = ("type", "kind", "boundaries", "of", "gaps")
"""Settings of a feature that say which id a value becomes."""
OF_NUMBERS = ("width", "scale", "mean", "std")
"""Settings of a feature of numbers that say what a number becomes."""


class FeaturesPart(StatePart):
    """A feature spec, as a text in the manifest, whose keys have no order of their own.

    Restoring changes nothing: it refuses a checkpoint of features that mean other things.
    """

    def __init__(self, spec: FeatureSpec, axes: InputAxes | None = None) -> None:
        """
        Args:
            axes: The inputs along the axes of the model's weights; see `Changes`.
        """
        super().__init__(FEATURES, spec.to_json, lambda _: None)
        self._spec = spec
        self._axes = dict(axes or {})

    def cut(self, step: int) -> StateCut:
        cut = super().cut(step)
        cut.more = {"inputs": self._axes}
        return cut

    def changes(self, chain: Sequence[SavedPart]) -> Changes:
        """Return how the model differs from that of a checkpoint."""
        if not chain:
            return Changes(now=self._axes)
        prefix, entry = chain[-1]
        found = saved_spec(prefix, entry.get("value"))
        fresh: dict[str, str] = {}
        rescaled = []
        if self._spec.fids != found.fids:
            why = f"fids was {found.fids} in the checkpoint and is {self._spec.fids} now"
            fresh = {self._spec.rows(name): why for name in self._spec.ids}
        for name, one in self._spec.features.items():
            other = found.features.get(name)
            if other is None:
                continue
            differ = list(differences(other, one))
            meaning = [each for each in differ if each[0] in OF_IDS]
            if isinstance(one, FloatFeature):
                if type(one) is not type(other) or any(each[0] in OF_NUMBERS for each in differ):
                    rescaled.append(name)
            elif meaning:
                path, before, now = meaning[0]
                what = "" if path == "boundaries" else f": {before} in the checkpoint, {now} now"
                fresh[self._spec.rows(name)] = f"features.{name}.{path} changed{what}"
        return Changes(fresh=fresh, rescaled=tuple(rescaled), before=entry.get("inputs", {}), now=self._axes)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        """Compare the specs; a checkpoint without one is of a model that was made by hand, and fits any.

        Raises:
            RestoreError: The saved spec gives rows or weights another meaning; names the first difference.
        """
        if not chain:
            return RestoreReport()
        if options.changes is not None:
            return RestoreReport()
        prefix, entry = chain[-1]
        found = saved_spec(prefix, entry.get("value"))
        difference = self._spec.difference(found, strict=options.strict)
        if difference is not None:
            raise RestoreError(
                f"cannot restore {prefix}: {difference}. Resume with the features it was trained by, which "
                "`monolith checkpoint inspect` prints; or start a run of the changed model from it: monolith "
                f"train --from {filesystem.parent(prefix)} --model-dir NEW-FOLDER."
            )
        return RestoreReport(loaded={FEATURES: ""})


def saved_spec(prefix: str, value: Any) -> FeatureSpec:
    """Return the spec that a manifest holds.

    Raises:
        RestoreError: It is none that this version reads.
    """
    try:
        return FeatureSpec.from_json(value, prefix)
    except (ConfigError, TypeError) as cause:
        raise RestoreError(f"cannot restore {prefix}: its features cannot be read: {cause}") from cause
