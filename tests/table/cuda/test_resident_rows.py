"""Which ids of a batch get a row: worked out on the host, so it needs no GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from monolith.table.cuda.resident_rows import ask_filter, in_order, parts_of_batch


class AfterSightings:
    """Lets an id in once it was seen more often than `threshold` times, and notes what it was asked."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.seen: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []

    def refuse(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        assert counts is not None
        waits = []
        for key, count in zip(ids.tolist(), counts.tolist(), strict=True):
            self.asked.append((key, count))
            before = self.seen.get(key, 0)
            self.seen[key] = before + count
            waits.append(before < self.threshold)
        return torch.tensor(waits, dtype=torch.bool)


def array(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def test_repeats_are_counted_until_one_is_admitted() -> None:
    admission = AfterSightings(2)
    verdict = ask_filter(admission, array(7, 9, 7, 7, 7), array(1, 1, 1, 1, 1), together=False)
    assert verdict.waits.tolist() == [True, True, True, False, False]
    assert verdict.filtered == 3
    assert admission.asked == [(7, 1), (9, 1), (7, 1), (7, 1)]


def test_equal_ids_that_are_brought_together_are_asked_about_once_by_the_sum_of_their_counts() -> None:
    admission = AfterSightings(1)
    verdict = ask_filter(admission, array(9, 7, 9), array(2, 1, 3), together=True)
    assert admission.asked == [(9, 5), (7, 1)]
    assert (verdict.waits.tolist(), verdict.filtered) == ([True, True, True], 6)
    assert not ask_filter(admission, array(9), array(1), together=True).waits.any()


def test_new_ids_are_admitted_in_their_order() -> None:
    assert in_order(array(5, -3, 5, 8, -3)).tolist() == [5, -3, 8]
    assert in_order(array()).tolist() == []


def test_a_batch_is_divided_by_ids_and_none_is_in_two_parts() -> None:
    ids = array(5, 6, 5, 7, 8, 6, 9)
    assert [ids[part].tolist() for part in parts_of_batch(ids, 2)] == [[5, 6, 5, 6], [7, 8], [9]]
