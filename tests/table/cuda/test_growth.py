"""How large the memory of a device table is: planned on the host, so it needs no GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest

from monolith.errors import ConfigError
from monolith.table import Segment, TableConfig
from monolith.table.cuda.growth import FULL, Growth
from monolith.table.cuda.memory import EXTRA_PLACES, KEYS

BYTES = 100


def growth(capacity_bytes: int | None = None, initial_rows: int = 0) -> Growth:
    config = TableConfig(
        name="item",
        segments=(Segment(dim=2),),
        capacity_bytes=capacity_bytes,
        initial_rows=initial_rows,
    )
    return Growth(config, BYTES)


def sizes(plan: Growth, rows: int) -> list[int]:
    """Return the sizes a table has on its way to so many rows, one by one."""
    found = [plan.first(0)]
    while plan.grows(found[-1]) and plan.limit(found[-1]) < rows:
        found.append(plan.grown(found[-1], plan.limit(found[-1]) + 1))
    return found


def test_without_a_budget_a_table_doubles_when_it_is_full() -> None:
    found = sizes(growth(), 100_000)
    assert all(1.9 < after / before < 2.1 for before, after in pairwise(found))
    assert all(size % KEYS == 0 for size in found)
    assert found[-1] * FULL >= 100_000


def test_a_large_table_grows_by_half() -> None:
    found = sizes(growth(), 100_000_000)
    last = [after / before for before, after in pairwise(found) if before * BYTES > 1 << 30]
    assert len(last) > 3
    assert all(1.45 < times < 1.55 for times in last)


@pytest.mark.parametrize("places", [16, 255, 256, 4095, 4096, 5000, 100_000, 12_345_678])
def test_a_budget_holds_for_old_and_new_together_and_nearly_all_of_it_is_used(places: int) -> None:
    plan = growth(capacity_bytes=(places + EXTRA_PLACES) * BYTES)
    found = sizes(plan, places)
    for before, after in pairwise(found):
        assert after > before
        assert before + after + 2 * EXTRA_PLACES <= places + EXTRA_PLACES
    assert not plan.grows(found[-1])
    assert plan.limit(found[-1]) > 0.9 * 15 / 16 * (places - 2 * KEYS - EXTRA_PLACES) - 1


def test_a_table_that_will_be_large_takes_its_budget_at_once() -> None:
    plan = growth(capacity_bytes=10_000 * BYTES, initial_rows=5000)
    assert plan.first(5000) == (10_000 - EXTRA_PLACES) // KEYS * KEYS
    assert not plan.grows(plan.first(5000))


def test_where_a_device_has_no_room_for_the_wanted_size_smaller_ones_are_tried() -> None:
    plan = growth()
    wanted = plan.grown(1024, 800)
    tried = plan.sizes(wanted, 800)
    assert tried[0] == wanted > tried[1] > tried[2]
    assert 800 < plan.limit(tried[2]) < 1.1 * 800
    assert growth(capacity_bytes=10_000 * BYTES).sizes(wanted, 800) == [wanted]


def test_memory_is_returned_when_nearly_unused_but_never_below_the_first_size() -> None:
    plan = growth(initial_rows=300)
    large = plan.grown(plan.first(300), 100_000)
    assert plan.shrunk(large, 50_000) is None
    smaller = plan.shrunk(large, 5000)
    assert smaller is not None
    assert 4 * smaller <= large
    assert plan.limit(smaller) > 5000
    assert plan.shrunk(large, 0) == plan.first(300)
    assert plan.shrunk(plan.first(300), 0) is None


def test_a_table_goes_to_a_smaller_memory_only_where_the_budget_has_room_for_both() -> None:
    plan = growth(capacity_bytes=100_000 * BYTES)
    large = sizes(plan, 90_000)[-1]
    assert plan.shrunk(large, 5000) is None
    smaller = plan.shrunk(large, 1000)
    assert smaller is not None
    assert (smaller + large + 2 * EXTRA_PLACES) * BYTES <= 100_000 * BYTES


def test_a_budget_below_the_smallest_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        growth(capacity_bytes=KEYS * BYTES)
