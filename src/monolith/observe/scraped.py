"""Metrics as others read them: what a process shows at `/metrics`, taken apart again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from monolith.errors import RequestError

MOST_SAMPLES = 100_000


class Sample(NamedTuple):
    """One number."""

    labels: Mapping[str, str]
    value: float


class Scraped:
    """The metrics of a process at one moment.

    Args:
        text: In the Prometheus text format.
        prefix: Of the names that are asked for, without it. None takes that of `known`.
        known: Names of which a process has at least one, whatever its prefix is.
        most: Numbers that are taken.

    Raises:
        RequestError: It is something else, or too much.
    """

    def __init__(
        self,
        text: bytes,
        prefix: str | None = "monolith",
        *,
        known: Sequence[str] = (),
        most: int = MOST_SAMPLES,
    ) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[Sample]] = defaultdict(list)
        count = 0
        try:
            for family in text_string_to_metric_families(text.decode()):
                for name, labels, value, *_ in family.samples:
                    count += 1
                    if count > most:
                        raise RequestError(f"it has more than {most} numbers")
                    self._samples[name].append(Sample(labels, float(value)))
        except RequestError:
            raise
        except Exception as cause:  # the parser raises what it happens to stumble over
            raise RequestError("it does not read as metrics of Prometheus") from cause
        if prefix is None:
            ends = tuple(f"_{name}" for name in known)
            found = next((name for name in self._samples if name.endswith(ends)), "")
            prefix = next((found.removesuffix(end) for end in ends if found.endswith(end)), "monolith")
        self._prefix = f"{prefix}_"

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def samples(self, name: str) -> Sequence[Sample]:
        """Return the series of a name, those that are NaN left out."""
        found = self._samples.get(self._prefix + name, ())
        return [one for one in found if not math.isnan(one.value)]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with these labels; None where there are none."""
        found = [one.value for one in self.samples(name) if labels.items() <= one.labels.items()]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return what the series sum up to, by the value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.samples(name):
            if label in labels:
                sums[labels[label]] += value
        return dict(sums)

    def histograms(self, name: str, label: str) -> dict[str, dict[float, float]]:
        """Return histograms by the value of a label: upper bound to how many are up to it, the last one inf.

        Series that differ in other labels are added up.
        """
        found: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for value, bound, count in self._buckets(name, label):
            found[value][bound] += count
        return {value: dict(sorted(buckets.items())) for value, buckets in found.items()}

    def _buckets(self, name: str, label: str) -> Iterator[tuple[str, float, float]]:
        for labels, count in self.samples(f"{name}_bucket"):
            try:
                yield labels[label], float(labels["le"]), count
            except (KeyError, ValueError):
                continue  # of another label, or no bucket
