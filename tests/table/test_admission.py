from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from contracts.tables import ids, table_classes
from torch import Tensor

from monolith.errors import ConfigError, TableArgumentError
from monolith.table import (
    FILTERS,
    AdmissionConfig,
    NoFilter,
    ProbabilisticFilter,
    Segment,
    SlidingFilter,
    SlotThresholds,
    TableConfig,
    intercept_gradient,
    make_filter,
)


def sliding(threshold: int, capacity: int = 1000, split_num: int = 7) -> SlidingFilter:
    return SlidingFilter(capacity, split_num, SlotThresholds(threshold))


# Thresholds


def test_thresholds_check_themselves() -> None:
    assert SlotThresholds().largest == 0
    assert SlotThresholds(2, {5: 9, 3: 1}).largest == 9
    assert list(SlotThresholds(2, {5: 9, 3: 1}).per_slot) == [3, 5]
    for wrong in ({"default": -1}, {"per_slot": {32768: 1}}, {"per_slot": {-1: 1}}, {"per_slot": {1: -1}}):
        with pytest.raises(ConfigError, match="thresholds"):
            SlotThresholds(**wrong)  # type: ignore[arg-type]


def test_each_slot_has_its_own_threshold() -> None:
    admission = SlidingFilter(1000, 7, SlotThresholds(0, {1: 1, 2: 2}))
    keys = ids(7, 1 << 48, 2 << 48)
    seen = [admission.refuse(keys).tolist() for _ in range(3)]
    assert seen == [[False, True, True], [False, False, True], [False, False, False]]


# The sliding filter


def test_an_id_waits_as_often_as_its_threshold_says() -> None:
    admission = sliding(3)
    assert [admission.refuse(ids(7)).tolist() for _ in range(4)] == [[True], [True], [True], [False]]


def test_sightings_count_in_order_within_a_call() -> None:
    assert sliding(2).refuse(ids(7, 7, 7, 8)).tolist() == [True, True, False, True]


def test_counts_say_how_many_sightings() -> None:
    admission = sliding(3)
    assert admission.refuse(ids(7), ids(2)).tolist() == [True]
    assert admission.refuse(ids(7), ids(1)).tolist() == [True]
    assert admission.refuse(ids(7), ids(2**40)).tolist() == [False]


def test_a_threshold_of_zero_leaves_no_trace() -> None:
    admission = sliding(0)
    assert admission.refuse(ids(1, 2)).tolist() == [False, False]
    assert len(admission) == 0


def test_counts_can_be_read_and_end_at_15() -> None:
    admission = sliding(1)
    assert admission.add(ids(7, 7), ids(1, 20)).tolist() == [0, 1]
    assert admission.add(ids(7)).tolist() == [15]
    assert admission.get(ids(7, 8)).tolist() == [15, 0]
    assert (len(admission), admission.failures, admission.split_num) == (1, 0, 7)


def test_a_threshold_above_15_would_wait_forever() -> None:
    for thresholds in (SlotThresholds(16), SlotThresholds(0, {3: 16})):
        with pytest.raises(ConfigError, match="up to 15, got 16"):
            SlidingFilter(1000, 7, thresholds)
    assert ProbabilisticFilter(SlotThresholds(16)).refuse(ids(1)).dtype == torch.bool


def test_old_sightings_fade() -> None:
    admission = sliding(15, capacity=300, split_num=5)
    admission.add(ids(7), ids(3))
    assert admission.get(ids(7)).tolist() == [3]
    admission.refuse(torch.arange(100_000) << 17)
    assert admission.get(ids(7)).tolist() != [3]


def test_wrong_arguments_are_refused() -> None:
    admission = sliding(1)
    for keys, counts in (
        (ids(1), ids(1, 2)),
        (ids(1), ids(-1)),
        (torch.ones(1), None),
        (ids(1), torch.ones(1)),
    ):
        with pytest.raises(TableArgumentError):
            admission.refuse(keys, counts)
    for settings in ({"capacity": 0}, {"split_num": 0}, {"capacity": 300, "split_num": 301}):
        with pytest.raises(ConfigError):
            SlidingFilter(**settings)
    assert admission.refuse(ids()).tolist() == []


@pytest.mark.parametrize(("capacity", "least", "most"), [(100_000, 0.001, 0.02), (50_000, 0.4, 0.6)])
def test_counts_are_right_for_most_ids_while_there_is_room(capacity: int, least: float, most: float) -> None:
    """A tenth of upstream's 10^6 keys: about 0.9% wrong with room for all, about half with room for half."""
    keys = torch.randint(-(2**63), 2**63 - 1, (100_000,), generator=torch.Generator().manual_seed(1))
    admission = sliding(1, capacity, 10)
    admission.refuse(keys)
    assert least < float((admission.get(keys) != 1).float().mean()) < most
    assert admission.failures < 10


def test_ten_threads_count_each_sighting_once() -> None:
    admission = sliding(15, 100_000)
    keys = torch.arange(1000) << 17
    refused = [0] * 10

    def work(number: int) -> None:
        refused[number] = int(admission.refuse(keys).sum())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = admission.get(keys)
    assert int((counts == 10).sum()) > 950
    assert int(counts.min()) >= 10


# The others


@pytest.mark.parametrize(
    ("equal", "count", "rate"), [(False, 1, 1 / 7), (False, 7, 1.0), (True, 1, 0.348), (True, 7, 0.95)]
)
def test_chance_admits_at_the_rate_it_should(equal: bool, count: int, rate: float) -> None:
    admission = ProbabilisticFilter(SlotThresholds(7), equal, seed=3)
    refused = admission.refuse(torch.arange(20_000), torch.full((20_000,), count))
    assert 1 - float(refused.float().mean()) == pytest.approx(rate, abs=0.02)


def test_chance_repeats_with_its_seed() -> None:
    keys = torch.arange(100)
    first, again = (ProbabilisticFilter(SlotThresholds(2), seed=5).refuse(keys) for _ in "ab")
    assert torch.equal(first, again)
    assert not torch.equal(first, ProbabilisticFilter(SlotThresholds(2), seed=6).refuse(keys))
    with pytest.raises(ConfigError, match="seed"):
        ProbabilisticFilter(seed=-1)


def test_no_filter_admits_all() -> None:
    assert NoFilter().refuse(ids(1, 2), ids(1, 1)).tolist() == [False, False]
    assert NoFilter().core is None


def test_a_filter_is_chosen_by_name() -> None:
    asked = SlotThresholds(1)
    for kind, cls in FILTERS.items():
        assert type(make_filter(kind, asked, capacity=1000)) is cls
        assert type(make_filter(kind, SlotThresholds())) is NoFilter
    assert make_filter("sliding_hash_filter", asked, capacity=1000, split_num=9).core.split_num == 9  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="no admission filter 'bloom'; there are sliding_hash_filter"):
        make_filter("bloom", asked)


# Gradients


def gradients(admission: Any, keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    embeddings = torch.ones(shape, requires_grad=True)
    seen = intercept_gradient(admission, keys, embeddings)
    assert torch.equal(seen, embeddings)
    seen.backward(torch.full(shape, 2.0))
    assert embeddings.grad is not None
    return embeddings.grad


def test_gradients_of_ids_that_wait_are_zero() -> None:
    admission = sliding(3, 100)
    keys = ids(1, 3 << 17, 1)
    runs = [gradients(admission, keys, (3, 2))[:, 0].tolist() for _ in range(4)]
    assert runs == [[0, 0, 0], [0, 0, 2], [2, 0, 2], [2, 2, 2]]


def test_gradients_keep_their_shape() -> None:
    admission = sliding(1)
    keys = torch.tensor([[1, 2], [2, 3]])
    found = gradients(admission, keys, (2, 2, 3, 4))
    assert found.shape == (2, 2, 3, 4)
    assert found[:, :, 0, 0].tolist() == [[0, 0], [2, 0]]


def test_no_ids_have_no_gradients() -> None:
    assert gradients(sliding(1), ids(), (0, 4)).shape == (0, 4)


def test_nothing_is_counted_without_a_backward_pass() -> None:
    admission = sliding(1)
    intercept_gradient(admission, ids(1), torch.ones(1, 2))
    assert len(admission) == 0


def test_an_infinite_gradient_is_zeroed_too() -> None:
    embeddings = torch.ones(1, 1, requires_grad=True)
    intercept_gradient(sliding(1), ids(1), embeddings).backward(torch.tensor([[float("inf")]]))
    assert embeddings.grad is not None
    assert embeddings.grad.tolist() == [[0.0]]


def test_embeddings_must_belong_to_the_ids() -> None:
    for keys, shape in ((ids(1, 2), (3, 2)), (torch.ones(2), (2, 2)), (ids(1, 2), ())):
        with pytest.raises(TableArgumentError, match="intercept_gradient"):
            intercept_gradient(NoFilter(), keys, torch.ones(shape))


# Tables


@pytest.mark.parametrize("cls", table_classes())
def test_a_table_with_threshold_2_ignores_the_first_two_updates_of_an_id(cls: Any) -> None:
    table = cls(TableConfig(name="item", segments=(Segment(dim=1, learning_rate=1.0),)), admission=sliding(2))
    values = []
    for _ in range(4):
        table.apply_gradients(ids(5), torch.tensor([[-1.0]]))
        values.append(table.lookup(ids(5)).item())
    assert values == [0.0, 0.0, 1.0, 2.0]
    assert table.stats().filtered == 2


# The config


@pytest.mark.parametrize(
    "values, says", [({"capacity": 299}, "at least 300"), ({"split_num": 4}, "at least 5")]
)
def test_a_config_that_no_filter_can_keep_is_refused(values: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AdmissionConfig(**values)


def test_the_least_that_a_config_allows_is_a_filter() -> None:
    SlidingFilter(300, 5, SlotThresholds(1))
