"""Every vector of the specification, on our code.

`MONOLITH_VECTORS` names another file of the same shape. The shipped file may hold
ops of rooms still to be built, which are skipped by name; another file may not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.tables import EmulatedCudaTable, table_classes
from vectors.case import SHIPPED, Case, differences, load
from vectors.runner import NOT_YET, OPS, run
from vectors.table_ops import TABLE_OPS

from monolith.errors import MonolithError

OTHER_FILE = os.environ.get("MONOLITH_VECTORS")


def cases() -> Iterator[Any]:
    for vector in load(Path(OTHER_FILE) if OTHER_FILE else SHIPPED):
        classes = table_classes() if vector["op"] in TABLE_OPS else table_classes()[:1]
        for cls in classes:
            suffix = f"-{cls.__name__}" if vector["op"] in TABLE_OPS else ""
            slow = [pytest.mark.soak] if cls is EmulatedCudaTable else []  # each has a layout of its own
            yield pytest.param(Case(vector, cls), id=vector["name"] + suffix, marks=slow)


@pytest.mark.parametrize("case", list(cases()))
def test_vector(case: Case) -> None:
    op, expected = case.vector["op"], case.vector["expected"]
    if op not in OPS:
        if op in NOT_YET and not OTHER_FILE:
            pytest.skip(f"op {op!r} belongs to monolith.{NOT_YET[op]}, which is not built yet")
        pytest.fail(f"no runner for op {op!r}: add it to OPS of a module in {Path(__file__).parent}")
    if "error" in expected:
        with pytest.raises(MonolithError):
            run(case)
        return
    wrong = list(differences(expected, run(case), case.vector["tolerance"]))
    assert not wrong, "\n".join(wrong)


def test_what_is_built_is_not_listed_as_missing() -> None:
    assert not OPS.keys() & NOT_YET.keys()
    assert OPS.keys() >= TABLE_OPS


@pytest.mark.skipif(bool(OTHER_FILE), reason="about the shipped file")
def test_every_op_of_the_shipped_file_is_accounted_for() -> None:
    assert {vector["op"] for vector in load()} <= OPS.keys() | NOT_YET.keys()
