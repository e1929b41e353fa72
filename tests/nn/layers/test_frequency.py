"""How often ids turn up, told from the batches."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import LayerArgumentError
from monolith.nn import ItemFrequency


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_an_id_of_every_batch_is_expected_as_often_as_it_is_there() -> None:
    frequency = ItemFrequency()
    for _ in range(5):
        frequency.observe(ids(7, 7, 8))
    assert frequency(ids(7, 8)).exp().tolist() == pytest.approx([2.0, 1.0])


def test_an_id_of_every_fourth_batch_is_expected_a_quarter_of_the_time() -> None:
    frequency = ItemFrequency(rate=0.2)
    for step in range(80):
        frequency.observe(ids(1, 2) if step % 4 == 0 else ids(1))
    assert frequency(ids(2)).exp().item() == pytest.approx(0.25, rel=0.05)


def test_an_id_that_was_never_seen_is_rarer_than_all_that_were() -> None:
    frequency = ItemFrequency()
    for _ in range(9):
        frequency.observe(ids(1))
    assert frequency(ids(5)).exp().item() == pytest.approx(0.1)


def test_repeats_that_do_not_count_change_nothing() -> None:
    frequency, plain = ItemFrequency(), ItemFrequency()
    for many in (1, 3, 2):
        given = ids(*range(many), *range(many))
        frequency.observe(given, torch.arange(len(given)) < many)
        plain.observe(ids(*range(many)))
    assert torch.equal(frequency(ids(0, 1, 2, 3)), plain(ids(0, 1, 2, 3)))


def test_popularity_that_changes_is_followed() -> None:
    frequency = ItemFrequency(rate=0.5)
    for _ in range(20):
        frequency.observe(ids(1))
    for step in range(60):
        frequency.observe(ids(1) if step % 10 == 0 else ids(2))
    assert frequency(ids(1)).exp().item() == pytest.approx(0.1, rel=0.2)


def test_ids_that_share_a_bucket_in_one_row_are_told_apart_by_another() -> None:
    torch.manual_seed(0)
    some = torch.randint(-(1 << 62), 1 << 62, (64,))

    def wrong(rows: int) -> int:
        frequency = ItemFrequency(buckets=256, rows=rows)
        frequency.observe(some)
        return int((frequency(some) > 0.1).sum())

    assert wrong(rows=4) < wrong(rows=1) / 2


def test_what_it_knows_is_in_the_state_dict() -> None:
    first, second = ItemFrequency(buckets=64), ItemFrequency(buckets=64)
    for _ in range(3):
        first.observe(ids(1, 1, 2))
    second.load_state_dict(first.state_dict())
    first.observe(ids(2))
    second.observe(ids(2))
    torch.testing.assert_close(second(ids(1, 2, 3)), first(ids(1, 2, 3)))


@pytest.mark.parametrize("wrong", [{"buckets": 100}, {"rows": 5}, {"rate": 0.0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(LayerArgumentError, match=next(iter(wrong))):
        ItemFrequency(**wrong)  # type: ignore[arg-type]
