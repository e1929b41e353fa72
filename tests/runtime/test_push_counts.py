"""What was acknowledged by a server and is in no copy and no checkpoint is lost with it, and counted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.runtime.messages import CopiedPushes, Served
from monolith.runtime.push_counts import PushCounts, marked, take_lost_of
from monolith.store.server_group import PushProgress


class Group:
    """One place, as a process sees it that pushes to it."""

    sender = "me"

    def __init__(self) -> None:
        self.last = 0
        self.unanswered: set[int] = set()
        self.incarnations: tuple[str | None, ...] = ("first",)

    def __len__(self) -> int:
        return 1

    @property
    def pushes(self) -> tuple[PushProgress, ...]:
        return (PushProgress(self.last, frozenset(self.unanswered)),)

    def replace(self, server: int, address: str, incarnation: str) -> PushProgress:
        assert (server, address) == (0, "h:1")
        self.incarnations = (incarnation,)
        return self.pushes[0]

    def push(self, pushes: int = 1, *, answered: bool = True) -> None:
        for _ in range(pushes):
            self.last += 1
            if not answered:
                self.unanswered.add(self.last)


def copy(highest: int, *missing: int, sender: str = "me", name: str = "next") -> Served:
    return Served("h:1", name, copied={sender: CopiedPushes(highest, missing)})


def restored(halt: int, name: str = "next") -> Served:
    return Served("h:1", name, halt)


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def counts(group: Any) -> PushCounts:
    return PushCounts(group)


def test_what_came_after_the_copy_is_lost(group: Group, counts: PushCounts) -> None:
    group.push(10)
    assert counts.replace(0, copy(7)) == 3


def test_a_copy_that_knows_nothing_of_a_sender_has_none_of_its_pushes(
    group: Group, counts: PushCounts
) -> None:
    group.push(4)
    assert counts.replace(0, copy(9, sender="another")) == 4


def test_unacknowledged_pushes_are_not_lost(group: Group, counts: PushCounts) -> None:
    group.push(3)
    group.push(2, answered=False)
    assert counts.replace(0, copy(2)) == 1


def test_a_push_that_is_in_the_copy_and_not_acknowledged_hides_none_that_is_lost(
    group: Group, counts: PushCounts
) -> None:
    group.push(9)
    group.push(answered=False)  # which the copy has
    group.push()
    assert counts.replace(0, copy(10)) == 1


def test_what_overtook_others_is_in_the_copy_without_them(group: Group, counts: PushCounts) -> None:
    group.push(5)
    assert counts.replace(0, copy(5, 3, 4)) == 2


def test_what_is_lost_once_is_not_lost_again(group: Group, counts: PushCounts) -> None:
    group.push(10)
    assert counts.replace(0, copy(6)) == 4
    group.push(5)
    # Whoever took over never saw 7 to 10.
    assert counts.replace(0, copy(13, 7, 8, 9, 10, name="third")) == 2


def test_what_was_sent_again_to_the_next_may_be_lost_with_that(group: Group, counts: PushCounts) -> None:
    group.push(2)
    group.push(answered=False)
    assert counts.replace(0, copy(2)) == 0
    group.unanswered.clear()
    assert counts.replace(0, copy(2, name="third")) == 1


def test_a_checkpoint_has_what_was_acknowledged_at_its_halt(group: Group, counts: PushCounts) -> None:
    group.push(4)
    counts.mark(1)
    group.push(2)
    counts.mark(2)
    group.push(1)
    assert counts.replace(0, restored(1)) == 3
    group.push(2)
    assert counts.replace(0, restored(1, "third")) == 2, "the others were lost before"


def test_what_a_standby_lacked_is_not_lost_again_with_a_checkpoint(group: Group, counts: PushCounts) -> None:
    group.push(4)
    counts.mark(1)
    group.push(5)
    assert counts.replace(0, copy(7)) == 2
    assert counts.replace(0, restored(1, "third")) == 3


@pytest.mark.parametrize(("served", "lost"), [(copy(3), 4), (restored(1), 5), (restored(2), 0), (copy(7), 0)])
def test_what_a_worker_left_with_is_counted_without_it(
    group: Group, counts: PushCounts, served: Served, lost: int
) -> None:
    group.push(2)
    counts.mark(1)
    group.push(5)
    told, found = take_lost_of(marked(counts.told(), 2), {0: served})
    assert found == {"next": lost}
    assert take_lost_of(told, {0: served}) == (told, {}), "once"


def test_a_worker_that_left_loses_nothing_more_with_a_later_server(group: Group, counts: PushCounts) -> None:
    group.push(7)
    told, _ = take_lost_of(counts.told(), {0: copy(3)})
    assert take_lost_of(told, {0: copy(3, name="third")})[1] == {"third": 0}


def test_unknown_places_are_skipped(counts: PushCounts) -> None:
    assert take_lost_of(counts.told(), {5: copy(3)})[1] == {}


@settings(max_examples=tries(100), deadline=None)
@given(st.integers(0, 1 << 30), st.booleans())
def test_the_count_is_that_of_the_pushes_themselves(seed: int, leaves: bool) -> None:
    """Against sets of numbers, over several losses, with pushes that overtake each other."""
    chance = random.Random(seed)
    group: Any = Group()
    counts = PushCounts(group)
    applied: set[int] = set()
    copied: set[int] = set()
    accounted: set[int] = set()
    for loss in range(4):
        for _ in range(chance.randrange(12)):
            group.push(answered=False)
        for number in sorted(group.unanswered, key=lambda _: chance.random()):
            if chance.random() < 0.8:
                applied.add(number)
            if number in applied and chance.random() < 0.8:
                group.unanswered.discard(number)
            if chance.random() < 0.5:
                copied = set(applied)
        if leaves:
            applied |= group.unanswered
            group.unanswered.clear()
        acknowledged = set(range(1, group.last + 1)) - group.unanswered
        lost = acknowledged - copied - accounted
        highest = max(copied, default=0)
        missing = (number for number in range(1, highest) if number not in copied)
        served = copy(highest, *missing, name=str(loss))
        if leaves and loss == 3:
            assert take_lost_of(counts.told(), {0: served})[1] == {"3": len(lost)}
        else:
            assert counts.replace(0, served) == len(lost)
        accounted |= acknowledged
        applied = set(copied)
