"""Fitting: means, standard deviations and quantiles, learned in one pass over raw data.

The same records in the same order give the same spec, in whatever batches they come: sums are in doubles and
rounded to the six digits that floats have anyway, and quantiles are those of a sample that depends only on
the number of each value in the stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.errors import DataError
from monolith.feature.spec.feature_spec import FeatureSpec
from monolith.feature.spec.kinds import AnyFeature, BucketFeature, FloatFeature
from monolith.feature.spec.reading import RawColumns, Reading, numbers_of
from monolith.observe import progress
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor

SAMPLE = 1 << 18
"""Values that quantiles are taken of, at most: enough for a thousand buckets that differ by some percent."""


def fit(
    spec: FeatureSpec,
    stream: Iterable[RawColumns],
    *,
    show: bool = True,
    fraction: Callable[[], float | None] | None = None,
) -> FeatureSpec:
    """Return the same spec with the means and boundaries that are to be learned; see `FeatureSpec.to_learn`.

    Values that cannot be read, and those that are not finite, count as missing. Means and boundaries that are
    set stay.

    Args:
        stream: Records, read once to their end: a source or a `Pipeline`, of which `take` reads only some.
        show: Whether to print progress to standard error.
        fraction: Returns the fraction of the stream that was read.

    Raises:
        DataError: A feature to learn found no number at all.
    """
    learners = {name: _learner_of(spec.features[name]) for name in spec.to_learn}
    if not learners:
        return spec
    shown = progress("Learning features", unit="records", fraction=fraction) if show else None
    with contextlib.nullcontext() if shown is None else shown as done:
        for records in stream:
            for name, learner in learners.items():
                found = _numbers(name, spec.features[name], records)
                if found is not None:
                    learner.see(found)
            if done is not None:
                done.advance(records.size)
    learned: dict[str, AnyFeature] = {}
    for name, learner in learners.items():
        try:
            learned[name] = learner.learned()
        except DataError as cause:
            column = getattr(spec.features[name], "column", None) or name
            raise DataError(f"features.{name}: column {column!r} {cause}") from cause
    return replace(spec, features={**spec.features, **learned})


def _learner_of(one: AnyFeature) -> _Moments | _Quantiles:
    if isinstance(one, FloatFeature):
        return _Moments(one)
    assert isinstance(one, BucketFeature)
    return _Quantiles(one)


def _numbers(name: str, one: AnyFeature, records: RawColumns) -> RaggedTensor | None:
    assert isinstance(one, FloatFeature | BucketFeature)
    column = one.column or name
    if column not in records.columns:
        return None
    return numbers_of(name, column, records[column], one.separator, Reading(records.size))


class _Moments:
    """Sums of each number of a feature and of its square, around the first one seen."""

    def __init__(self, feature: FloatFeature) -> None:
        self._feature = feature
        self._around: NDArray[np.float64] | None = None
        self._count = 0
        self._sum = np.zeros(feature.width)
        self._squares = np.zeros(feature.width)

    def see(self, numbers: RaggedTensor) -> None:
        width = self._feature.width
        whole = numbers.row_lengths() == width
        values = numbers.flat_values[torch.repeat_interleave(whole, numbers.row_lengths())]
        rows = values.double().view(-1, width).numpy()
        rows = rows[np.isfinite(rows).all(1)]
        if not len(rows):
            return
        if self._around is None:
            self._around = rows[0]
        away = rows - self._around
        self._count += len(rows)
        self._sum += away.sum(0)
        self._squares += (away * away).sum(0)

    def learned(self) -> FloatFeature:
        if self._around is None:
            raise DataError(f"has no record with {self._feature.width} numbers, so there is no mean")
        mean = self._sum / self._count
        variance = np.maximum(self._squares / self._count - mean * mean, 0.0)
        return replace(self._feature, mean=_rounded(self._around + mean), std=_rounded(np.sqrt(variance)))


class _Quantiles:
    """A sample of all numbers: those whose place in the stream hashes lowest."""

    def __init__(self, feature: BucketFeature) -> None:
        self._feature = feature
        self._seen = 0
        self._values = np.empty(0)
        self._ranks = np.empty(0, dtype=np.uint64)

    def see(self, numbers: RaggedTensor) -> None:
        values = numbers.flat_values.double().numpy()
        ranks = mix(np.arange(self._seen, self._seen + len(values), dtype=np.uint64))
        self._seen += len(values)
        fine = np.isfinite(values)
        self._values = np.concatenate([self._values, values[fine]])
        self._ranks = np.concatenate([self._ranks, ranks[fine]])
        if len(self._values) > 2 * SAMPLE:
            self._shrink()

    def _shrink(self) -> None:
        lowest = np.argpartition(self._ranks, SAMPLE - 1)[:SAMPLE]
        self._values, self._ranks = self._values[lowest], self._ranks[lowest]

    def learned(self) -> BucketFeature:
        if not len(self._values):
            raise DataError("has no number, so there are no quantiles")
        if len(self._values) > SAMPLE:
            self._shrink()
        parts = self._feature.quantiles
        assert parts is not None
        places = np.arange(1, parts) / parts
        found = np.unique(np.quantile(self._values, places, method="higher"))
        return replace(self._feature, boundaries=tuple(map(float, found)))


def _rounded(numbers: NDArray[Any]) -> tuple[float, ...]:
    """Return numbers to six digits, which do not depend on the order of summation."""
    return tuple(float(f"{number:.6g}") for number in numbers)
