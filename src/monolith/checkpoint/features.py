"""What a checkpoint keeps of a model's feature spec: by what raw data its rows and weights were trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monolith.checkpoint.part import FEATURES, RestoreOptions, SavedPart
from monolith.checkpoint.parts import StatePart
from monolith.checkpoint.report import RestoreReport
from monolith.errors import ConfigError, RestoreError
from monolith.feature import FeatureSpec


class FeaturesPart(StatePart):
    """A feature spec, as a text in the manifest, whose keys have no order of their own.

    Restoring changes nothing: it refuses a checkpoint of features that mean other things.
    """

    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__(FEATURES, spec.to_json, lambda _: None)
        self._spec = spec

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        """Compare the specs; a checkpoint without one is of a model that was made by hand, and fits any.

        Raises:
            RestoreError: The saved spec gives rows or weights another meaning; names the first difference.
        """
        if not chain:
            return RestoreReport()
        prefix, entry = chain[-1]
        found = saved_spec(prefix, entry.get("value"))
        difference = self._spec.difference(found, strict=options.strict)
        if difference is not None:
            raise RestoreError(
                f"cannot restore {prefix}: {difference}, in the checkpoint. Its rows would stand for other "
                "things. Go on with the features it was trained by (`monolith checkpoint inspect` prints "
                "them), or train anew in another folder."
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
