from __future__ import annotations

from monolith.serve.shards.replicas import HedgeBudget, HedgeDelay


def test_the_wait_is_the_longest_until_enough_answers_came() -> None:
    delay = HedgeDelay(0.002, 0.1)
    for _ in range(31):
        delay.note(0.01)
    assert delay.seconds == 0.1
    delay.note(0.01)
    assert delay.seconds == 0.01


def test_it_is_longer_than_nearly_all_recent_answers_took() -> None:
    delay = HedgeDelay(0.002, 0.1)
    for number in range(1, 65):
        delay.note(number / 1000)
    assert delay.seconds == 0.061
    for _ in range(256):
        delay.note(0.005)
    assert delay.seconds == 0.005


def test_it_stays_within_its_bounds() -> None:
    delay = HedgeDelay(0.002, 0.1)
    for _ in range(32):
        delay.note(1e-6)
    assert delay.seconds == 0.002
    for _ in range(256):
        delay.note(9.0)
    assert delay.seconds == 0.1


def test_one_request_in_ten_may_be_made_twice_and_a_few_at_once() -> None:
    budget = HedgeBudget()
    assert [budget.spend() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(11):
        budget.earn()
    assert [budget.spend() for _ in range(2)] == [True, False]
