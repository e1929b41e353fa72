"""`monolith bench data` also measures features made from raw columns, compared with just reading the columns.

Each case reads a file as training does, in chunks that are cut into batches. With the feature, the columns
become ids or numbers; without it, they are read, cut and left alone. So a ratio of 0.9 says that making the
feature takes a tenth of the speed of reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from monolith.data import Format, Records
from monolith.data.formats import CsvFormat, ParquetFormat
from monolith.feature import (
    Batch,
    BucketFeature,
    FeatureIds,
    FeatureSpec,
    FloatFeature,
    IdFeature,
    hash_strings,
)
from monolith.feature.spec import AnyFeature
from monolith.tensors import RaggedTensor
from monolith_bench.report import Report
from monolith_bench.timing import race

if TYPE_CHECKING:
    from monolith_bench.data import DataPlan

SEPARATOR = "|"
ITEMS = 3
"""In each list."""
BOUNDARIES = tuple(index / 32 for index in range(1, 32))
KNOWN = 100_000
"""Different strings of a column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Columns of one kind, as a feature and without."""

    name: str
    feature: AnyFeature
    without: AnyFeature | None
    """What is made of them instead; None leaves them alone."""
    baseline: str


CASES = (
    Case(
        name="strings hashed",
        feature=IdFeature(kind="string"),
        without=None,
        baseline="strings read",
    ),
    Case(
        name="lists split and hashed",
        feature=IdFeature(kind="string", separator=SEPARATOR),
        without=IdFeature(kind="string"),
        baseline="lists hashed as one string",
    ),
    Case(
        name="floats bucketised",
        feature=BucketFeature(boundaries=BOUNDARIES),
        without=FloatFeature(),
        baseline="floats as they are",
    ),
)


def measure_features(plan: DataPlan, report: Report, folder: str) -> None:
    """Measure each case in Parquet and in CSV, and hashing in Python, for what it was."""
    from monolith_bench.data import SLOW_SHARE, contender, write

    names = [f"f{number:02d}" for number in range(plan.features)]
    for case in CASES:
        records = make_columns(case, names, plan)
        made = spec_of(names, case.feature)
        alone = FeatureSpec(features={}) if case.without is None else spec_of(names, case.without)
        formats: dict[str, Format] = {
            "parquet": ParquetFormat(single=[*names, "label"]),
            "csv": CsvFormat(types=made.columns),
        }
        for kind, format_ in formats.items():
            report.say(f"{case.name}, {kind}")
            path = f"{folder}/{case.name.replace(' ', '_')}.{kind}"
            write(format_, path, records, len(records))
            runs = {
                case.name: contender(len(records), lambda f=format_, p=path, s=made: by_spec(f, p, plan, s)),  # type: ignore[misc]
                case.baseline: contender(
                    len(records),
                    lambda f=format_, p=path, s=alone: by_spec(f, p, plan, s),  # type: ignore[misc]
                ),
            }
            in_python = case.without is None and kind == "parquet"
            if in_python:
                few = f"{folder}/few_strings.{kind}"
                some = records.slice(0, max(plan.records // SLOW_SHARE, 1))
                write(format_, few, some, len(some))
                runs["strings hashed in Python"] = contender(
                    len(some),
                    lambda f=format_, p=few: with_python(f, p, plan, names),  # type: ignore[misc]
                )
            rates = race(runs, **plan.timing)
            baseline = {f"{case.baseline}, {kind}": rates[case.baseline]}
            report.add(next(iter(baseline)), "records_per_s", rates[case.baseline], "records/s")
            for name in (case.name, *(["strings hashed in Python"] if in_python else [])):
                report.compare(f"{name}, {kind}", "records_per_s", rates[name], "records/s", baseline)
    report.show(f"{plan.records:,} records of {plan.features} raw columns")


def spec_of(names: list[str], feature: AnyFeature) -> FeatureSpec:
    return FeatureSpec(features=dict.fromkeys(names, feature))


def make_columns(case: Case, names: list[str], plan: DataPlan) -> Records:
    """Return records with a value of the case's kind in every column, and a label."""
    random = np.random.default_rng(plan.seed)
    one_each = torch.arange(plan.records + 1)
    columns: dict[str, RaggedTensor] = {}
    for name in names:
        if isinstance(case.feature, BucketFeature):
            numbers = torch.from_numpy(random.random(plan.records, np.float32))
            columns[name] = RaggedTensor(numbers, one_each)
        else:
            items = 1 if case.without is None else ITEMS
            drawn = random.integers(0, KNOWN, (plan.records, items))
            texts = [SEPARATOR.join(f"{name}-{one:07d}" for one in row).encode() for row in drawn.tolist()]
            text = torch.from_numpy(np.frombuffer(b"".join(texts), np.uint8).copy())
            splits = torch.from_numpy(np.cumsum([0, *map(len, texts)]))
            columns[name] = RaggedTensor(RaggedTensor(text, splits, validate=False), one_each)
    label = torch.from_numpy(random.integers(0, 2, plan.records)).float()
    return Records(plan.records, {**columns, "label": RaggedTensor(label, one_each)})


def by_spec(format_: Format, path: str, plan: DataPlan, spec: FeatureSpec) -> Iterator[Batch]:
    """Read a file to batches of a spec, all columns read whatever it makes of them."""
    for chunk in format_.chunks(path):
        for begin in range(0, len(chunk.records), plan.batch):
            yield spec.make(chunk.records.slice(begin, begin + plan.batch))


def with_python(format_: Format, path: str, plan: DataPlan, names: list[str]) -> Iterator[Batch]:
    """Hash strings as a function in a pipeline would: a Python object for each."""
    for chunk in format_.chunks(path):
        for begin in range(0, len(chunk.records), plan.batch):
            some = chunk.records.slice(begin, begin + plan.batch)
            ids = {
                name: RaggedTensor(
                    hash_strings([text for row in some.strings(name) for text in row]),
                    some[name].row_splits,
                    validate=False,
                )
                for name in names
            }
            labels = {"label": some["label"].flat_values}
            yield Batch(FeatureIds.pack(ids, batch_size=some.size), labels=labels)
