"""Numbered pushes at a server: each is applied once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.errors import ClusterError, TableArgumentError, UnavailableError
from monolith.store.pushes import REMEMBERED, AppliedPushes, KnownPushes


def push(applied: AppliedPushes, sender: str, number: int) -> str:
    return applied.once(sender, number, lambda: "applied", lambda: "from memory")


def test_a_number_that_comes_again_is_answered_from_memory() -> None:
    applied = AppliedPushes()
    assert [push(applied, "a", number) for number in (1, 1, 2, 1, 2)] == [
        "applied",
        "from memory",
        "applied",
        "from memory",
        "from memory",
    ]


def test_each_sender_has_numbers_of_its_own() -> None:
    applied = AppliedPushes()
    assert [push(applied, sender, 1) for sender in "aba"] == ["applied", "applied", "from memory"]


def test_numbers_may_come_out_of_order() -> None:
    applied = AppliedPushes()
    assert {push(applied, "a", number) for number in (3, 1, 5, 4, 2)} == {"applied"}
    assert {push(applied, "a", number) for number in (1, 2, 3, 4, 5)} == {"from memory"}


def test_a_number_too_old_to_remember_is_refused() -> None:
    applied = AppliedPushes()
    push(applied, "a", 1)
    push(applied, "a", REMEMBERED + 1)
    for old in (1, 0):
        with pytest.raises(
            UnavailableError, match=rf"push {old} is too old .* sender is at {REMEMBERED + 1}"
        ):
            push(applied, "a", old)
    assert push(applied, "a", 2) == "applied", "one that never came, and is not too old"


def test_a_server_that_took_over_accepts_a_sender_in_the_middle_of_its_sequence() -> None:
    applied = AppliedPushes()
    assert [push(applied, "a", number) for number in (1_000_000, 999_999, 999_999)] == [
        "applied",
        "applied",
        "from memory",
    ]
    with pytest.raises(UnavailableError, match="too old"):
        push(applied, "a", 5)


def test_a_push_that_was_refused_has_not_come() -> None:
    applied = AppliedPushes()

    def refuse() -> str:
        raise TableArgumentError("no")

    for _ in range(2):
        with pytest.raises(TableArgumentError, match="no"):
            applied.once("a", 1, refuse, lambda: "from memory")
    assert push(applied, "a", 1) == "applied"


def test_a_push_that_failed_in_the_middle_is_not_applied_again() -> None:
    applied = AppliedPushes()

    def fail() -> str:
        raise RuntimeError("half of it was done")

    with pytest.raises(RuntimeError):
        applied.once("a", 1, fail, lambda: "from memory")
    with pytest.raises(ClusterError, match=r"push 1 failed when it first arrived: .*half of it was done"):
        push(applied, "a", 1)


def test_one_that_comes_again_while_it_is_applied_waits_for_the_first() -> None:
    applied, begun, go_on = AppliedPushes(), threading.Event(), threading.Event()

    def slowly() -> str:
        begun.set()
        assert go_on.wait(60)
        return "applied"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(applied.once, "a", 1, slowly, lambda: "from memory")
        assert begun.wait(60)
        second = pool.submit(push, applied, "a", 1)
        assert push(applied, "a", 2) == push(applied, "b", 1) == "applied", "nobody else waits"
        assert not second.done()
        go_on.set()
        assert (first.result(60), second.result(60)) == ("applied", "from memory")


def test_what_is_remembered_is_bounded() -> None:
    applied = AppliedPushes()
    for number in range(1, 20 * REMEMBERED, 1000):
        push(applied, "a", number)
    assert len(applied._senders["a"].missing) <= REMEMBERED


@settings(max_examples=tries(20), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40)), max_size=60))
def test_in_whatever_order_numbers_come_each_is_applied_once(
    came: list[tuple[str, int]],
) -> None:
    applied, done = AppliedPushes(), []
    for push_ in came:
        applied.once(*push_, lambda push_=push_: done.append(push_), lambda: None)
    assert sorted(done) == sorted(set(came))


def test_a_successor_knows_which_pushes_its_rows_contain() -> None:
    first, second = AppliedPushes(), AppliedPushes()
    for number in (1, 2, 3, 5):
        first.once("a", number, lambda: None, lambda: None)
    assert first.known() == {"a": KnownPushes(highest=5, missing=(4,))}
    second.adopt(first.known())
    applied = [number for number in (2, 4, 5, 6) if second.once("a", number, lambda: True, lambda: False)]
    assert applied == [4, 6]


def test_a_push_that_is_under_way_does_not_count_as_applied() -> None:
    pushes = AppliedPushes()
    pushes.once("a", 1, lambda: None, lambda: None)
    known = pushes.once("a", 2, pushes.known, dict)
    assert known == {"a": KnownPushes(highest=2, missing=(2,))}


def test_a_sender_that_was_silent_while_thousands_pushed_has_no_push_applied_twice() -> None:
    applied = AppliedPushes()
    push(applied, "silent", 1)
    for other in range(5_000):
        push(applied, f"other-{other}", 1)
    assert push(applied, "silent", 1) == "from memory"


def test_one_sender_too_many_is_refused_and_all_others_stay_known() -> None:
    applied = AppliedPushes(senders=2)
    for sender in "ab":
        push(applied, sender, 1)
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"2 senders have pushed .* Nothing was applied"):
            push(applied, "c", 1)
    assert [push(applied, sender, 1) for sender in "ab"] == ["from memory"] * 2
    assert push(applied, "a", 2) == "applied"


def test_no_push_is_applied_while_the_rows_are_still() -> None:
    applied = AppliedPushes()
    began, go_on, done = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def slow() -> None:
        began.set()
        assert go_on.wait(10)
        order.append("under way")

    def read() -> None:
        with applied.still() as known:
            order.append("read")
            assert known == applied.known() == {"a": KnownPushes(1)}
            later = pool.submit(applied.once, "a", 2, lambda: order.append("later"), lambda: None)
            assert not done.wait(0.05), "the push waits"
            assert not later.done()
            order.append("still")
        later.result(10)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(applied.once, "a", 1, slow, lambda: None)
        assert began.wait(10)
        reading = pool.submit(read)
        assert not done.wait(0.05), "the block waits for the push that is under way"
        go_on.set()
        first.result(10)
        reading.result(10)
    assert order == ["under way", "read", "still", "later"]


def test_pushes_are_applied_again_after_a_block_that_failed() -> None:
    applied = AppliedPushes()
    with pytest.raises(ZeroDivisionError), applied.still():
        _ = 1 // 0
    assert push(applied, "a", 1) == "applied"
