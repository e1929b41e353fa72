from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith_compat import unique_in_order


def test_ids_are_numbered_in_the_order_first_seen() -> None:
    first, inverse = unique_in_order(torch.tensor([7, 3, 7, -1, 3]))
    assert first.tolist() == [0, 1, 3]
    assert inverse.tolist() == [0, 1, 0, 2, 1]


def test_equal_ids_of_different_groups_are_distinct() -> None:
    first, inverse = unique_in_order(torch.tensor([7, 7, 7]), torch.tensor([0, 1, 0]))
    assert first.tolist() == [0, 1]
    assert inverse.tolist() == [0, 1, 0]


@given(st.lists(st.tuples(st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]), st.integers(0, 2)), max_size=20))
def test_it_does_what_a_dict_does(pairs: list[tuple[int, int]]) -> None:
    ids = torch.tensor([i for i, _ in pairs], dtype=torch.int64)
    groups = torch.tensor([g for _, g in pairs], dtype=torch.int64)
    seen: dict[tuple[int, int], int] = {}
    numbers = [seen.setdefault(pair, len(seen)) for pair in pairs]
    first, inverse = unique_in_order(ids, groups)
    assert inverse.tolist() == numbers
    assert [pairs[position] for position in first.tolist()] == list(seen)
