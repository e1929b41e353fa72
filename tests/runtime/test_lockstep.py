"""Ranks that read agree on which batches they train on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
from store.ranks import all_at_once, connected
from torch import Tensor

from monolith.runtime.lockstep import MOST_AHEAD, aligned
from monolith.runtime.prefetch import SILENT, Silence
from monolith.store import RankGroups

PATIENT = 60.0


def read_all(groups: RankGroups, items: Iterator[int], every: float = PATIENT) -> list[int | Silence]:
    return list(aligned(items, groups.lookups, empty=lambda: -1, every=every, pressed=lambda: False))


def test_each_rank_gets_its_own_items_in_order_and_then_empty_ones_until_no_rank_has_any() -> None:
    with connected(4) as groups:
        given = [iter(range(20)), iter(range(100, 123)), iter(range(200, 221)), iter(())]
        found = all_at_once(*(partial(read_all, *one) for one in zip(groups, given, strict=True)))
    assert found == [
        [*range(20), -1, -1, -1],
        [*range(100, 123)],
        [*range(200, 221), -1, -1],
        [-1] * 23,
    ]


def test_ranks_agree_at_once_on_all_batches_that_they_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(2) as groups:
        calls: list[Tensor] = []
        real = groups[0].lookups.all_gather

        def counted(word: Tensor) -> Tensor:
            calls.append(word)
            return real(word)

        monkeypatch.setattr(groups[0].lookups, "all_gather", counted)

        def reads(rank: int) -> list[int | Silence]:
            first_taken, full = threading.Event(), threading.Event()

            def items() -> Iterator[int]:
                yield 0
                assert first_taken.wait(PATIENT)
                yield from range(1, 1 + MOST_AHEAD)
                full.set()  # it is asked for another one, so there is a place for each of these
                yield from range(1 + MOST_AHEAD, 10)

            found = aligned(
                items(), groups[rank].lookups, empty=lambda: -1, every=PATIENT, pressed=lambda: False
            )
            taken = [next(found)]
            first_taken.set()
            assert full.wait(PATIENT)
            taken += [next(found) for _ in range(MOST_AHEAD)]
            found.close()
            return taken

        assert all_at_once(partial(reads, 0), partial(reads, 1)) == [list(range(1 + MOST_AHEAD))] * 2
    assert len(calls) == 2, "one for the first batch, and one for all others"


def test_a_rank_without_an_item_gives_all_a_silence_and_no_item_is_lost() -> None:
    with connected(2) as groups:
        silent = threading.Event()

        def slow() -> Iterator[int]:
            yield 0
            assert silent.wait(PATIENT)
            yield 1

        def reads(rank: int, items: Iterator[int], every: float) -> list[int | Silence]:
            found = []
            for item in aligned(
                items, groups[rank].lookups, empty=lambda: -1, every=every, pressed=lambda: False
            ):
                found.append(item)
                if item is SILENT:
                    silent.set()
            return found

        one, other = all_at_once(partial(reads, 0, slow(), 0.02), partial(reads, 1, iter((5, 6, 7)), PATIENT))
    assert [item for item in one if item is not SILENT] == [0, 1, -1]
    assert [item for item in other if item is not SILENT] == [5, 6, 7]
    assert [item is SILENT for item in one] == [item is SILENT for item in other]
    assert SILENT in one


def test_a_rank_whose_items_depend_on_the_other_ranks_lets_them_train_meanwhile() -> None:
    with connected(2) as groups:
        trained = threading.Event()

        def waits() -> Iterator[int]:
            yield 0
            assert trained.wait(PATIENT)
            yield 1

        def reads(rank: int, items: Iterator[int]) -> list[int | Silence]:
            found = []
            lookups = groups[rank].lookups
            for item in aligned(
                items, lookups, empty=lambda: -1, every=0.02, pressed=lambda: False, shares_work=True
            ):
                found.append(item)
                if item == 30:
                    trained.set()
            return found

        one, other = all_at_once(partial(reads, 0, waits()), partial(reads, 1, iter(range(31))))
    assert [item for item in one if item not in (SILENT, -1)] == [0, 1]
    assert [item for item in other if item not in (SILENT, -1)] == [*range(31)]
    assert [item is SILENT for item in one] == [item is SILENT for item in other]


def test_an_error_of_reading_comes_after_the_items_before_it() -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no disk")

    with connected(1) as (groups,):
        found = aligned(broken(), groups.lookups, empty=lambda: -1, every=PATIENT, pressed=lambda: False)
        assert [next(found) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="no disk"):
            next(found)
