"""Layouts: which slices stand where."""

from __future__ import annotations

from typing import Any

import pytest

from monolith.errors import ConfigError, DuplicateNameError, FeatureError, UnknownFeatureError
from monolith.feature import (
    ADDN,
    CONCAT,
    NONE,
    STACK,
    Combiner,
    FirstN,
    InputSpec,
    LayoutKind,
    LayoutPlan,
    LayoutSpec,
    SliceSpec,
    Sum,
    plan_layouts,
)

TABLES = {"users": 5, "items": 5}


def feature(name: str, table: str = "users", combiner: Combiner | None = None) -> InputSpec:
    return InputSpec(name, table, combiner or Sum())


def layout(kind: LayoutKind, *slices: tuple[str, int, int], name: str = "out") -> LayoutSpec:
    return LayoutSpec(name, kind, tuple(SliceSpec(*part) for part in slices))


def plan(*layouts: LayoutSpec, features: Any = None) -> LayoutPlan:
    known = features or [
        feature("a"),
        feature("b", "items"),
        feature("s", "items", FirstN(3)),
        feature("t", "users", FirstN(3)),
        feature("u", "users", FirstN(2)),
    ]
    return plan_layouts(TABLES, known, list(layouts))


@pytest.mark.parametrize(
    ("kind", "slices", "shapes"),
    [
        (CONCAT, [("a", 0, 1), ("b", 1, 5)], [(5,)]),
        (CONCAT, [("s", 0, 1), ("t", 1, 5)], [(3, 5)]),
        (STACK, [("a", 0, 2), ("b", 3, 5)], [(2, 2)]),
        (STACK, [("s", 0, 2), ("t", 3, 5)], [(2, 3, 2)]),
        (ADDN, [("a", 0, 2), ("b", 3, 5)], [(2,)]),
        (NONE, [("a", 0, 2), ("s", 3, 5), ("b", 0, 5)], [(2,), (3, 2), (5,)]),
    ],
)
def test_every_kind_has_its_shape(kind: LayoutKind, slices: Any, shapes: Any) -> None:
    assert list(plan(layout(kind, *slices)).shapes) == shapes


def test_outputs_come_in_the_order_of_names() -> None:
    made = plan(
        layout(NONE, ("a", 0, 1), ("b", 0, 1), name="z"),
        layout(CONCAT, ("a", 0, 1), name="b"),
        layout(CONCAT, ("a", 0, 1), name="a"),
    )
    assert made.names == {"a": (0,), "b": (1,), "z": (2, 3)}
    assert made.lists == {"z"}
    assert [f.name for f in made.features] == ["a", "b", "s", "t", "u"]
    assert made.tables == ("items", "users")


def test_a_range_may_span_slices_and_a_feature_may_be_used_twice() -> None:
    made = plan(layout(CONCAT, ("a", 0, 5), ("a", 2, 4)))
    assert [(use.start, use.width, use.offset) for use in made.uses] == [(0, 5, 0), (2, 2, 5)]


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (layout(CONCAT, ("x", 0, 1)), UnknownFeatureError, "layout 'out': there is no feature 'x'"),
        (layout(CONCAT, ("a", 0, 6)), FeatureError, r"floats \[0, 6\) of feature 'a' .* which have 5"),
        (layout(CONCAT, ("a", 2, 2)), FeatureError, r"floats \[2, 2\)"),
        (layout(CONCAT, ("a", -1, 2)), FeatureError, r"floats \[-1, 2\)"),
        (layout(CONCAT), ConfigError, "no slices"),
        (layout(CONCAT, ("a", 0, 1), ("s", 0, 1)), FeatureError, "as many positions"),
        (layout(STACK, ("s", 0, 1), ("u", 0, 1)), FeatureError, "as many positions"),
        (layout(STACK, ("a", 0, 1), ("b", 0, 2)), FeatureError, "slices of one width"),
        (layout(ADDN, ("a", 0, 1), ("b", 0, 2)), FeatureError, "slices of one width"),
        (layout(ADDN, ("s", 0, 1), ("t", 0, 1)), FeatureError, "cannot be added up"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(broken: LayoutSpec, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(broken)


def test_names_are_unique() -> None:
    with pytest.raises(DuplicateNameError, match="two layouts"):
        plan(layout(CONCAT, ("a", 0, 1)), layout(STACK, ("a", 0, 1)))
    with pytest.raises(DuplicateNameError, match="two features"):
        plan(layout(CONCAT, ("a", 0, 1)), features=[feature("a"), feature("a", "items")])
    with pytest.raises(UnknownFeatureError, match="no table 'words'"):
        plan(layout(CONCAT, ("a", 0, 1)), features=[feature("a", "words")])
