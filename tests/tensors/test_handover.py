from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from monolith.tensors import leaves, map_leaves


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


@dataclass
class Plain:
    x: Any
    y: Any = None


@pytest.mark.parametrize(
    ("structure", "doubled"),
    [
        ({"a": 1, "b": [2, (3,)]}, {"a": 2, "b": [4, (6,)]}),
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=4)),
        (defaultdict(list, a=1), defaultdict(list, a=2)),
        (Pair(1, Pair(2, 3)), Pair(2, Pair(4, 6))),
        (Frozen([1]), Frozen([2])),
        (Plain(1, (2,)), Plain(2, (4,))),
        ([], []),
        (5, 10),
    ],
)
def test_leaves_change_and_containers_keep_their_types(structure: Any, doubled: Any) -> None:
    before = repr(structure)
    mapped = map_leaves(lambda leaf: leaf * 2, structure)
    assert mapped == doubled
    assert type(mapped) is type(structure)
    assert repr(structure) == before


def test_leaves_come_in_order_none_included() -> None:
    structure = {"b": 1, "a": [None, Pair(2, Frozen("x"))]}
    assert list(leaves(structure)) == [1, None, 2, "x"]
    seen: list[Any] = []
    map_leaves(seen.append, structure)
    assert seen == [1, None, 2, "x"]
