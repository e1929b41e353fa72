"""The steward: all who hold rows publish, or none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from monolith.sync import LogPosition
from monolith.sync.publish_config import GuardConfig
from monolith.train.publishing.bodies import PublishOrder, ShareStanding
from monolith.train.publishing.holders import Steward
from monolith.train.publishing.metric_guard import BadSince

STANDING = ShareStanding(
    share=0,
    shares=2,
    held=False,
    reason="",
    since=0.0,
    version=None,
    epoch="e",
    sequence=1,
    step=1,
    watermark=0,
    published_at=1.0,
    deltas=1,
    rows=1,
    bytes=1,
    errors=0,
    resyncs=0,
)


class TwoHolders:
    """Holders that do as they are told, and remember it."""

    brings_weights = True

    def __init__(self) -> None:
        self.shares = [STANDING, replace(STANDING, share=1)]
        self.orders: list[PublishOrder] = []

    def obey(self, order: PublishOrder) -> Sequence[ShareStanding]:
        if order.action != "status":
            self.orders.append(order)
            held = order.action == "hold"
            self.shares = [
                replace(one, held=held, reason=order.reason, by_guard=held and order.by_guard)
                for one in self.shares
            ]
        return self.shares

    def hold(self, share: int, **how: Any) -> None:
        self.shares[share] = replace(self.shares[share], held=True, reason="a row is NaN", **how)

    def start(self) -> None: ...
    def note(self, learned: object) -> None: ...
    def bring(self, weights: object) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def places(self) -> Mapping[int, LogPosition]:
        return {}


def steward(holders: TwoHolders, *, wrong: str | None = None, resume: Any = "by_hand") -> Steward:
    bad = None if wrong is None else BadSince(wrong, 7)
    return Steward(holders, GuardConfig(resume=resume), lambda: bad, every=60.0)


def test_while_nothing_is_held_nobody_is_told_anything() -> None:
    holders = TwoHolders()
    steward(holders).look()
    assert holders.orders == []


def test_where_the_guard_of_one_holds_it_all_are_held() -> None:
    holders = TwoHolders()
    holders.hold(1, by_guard=True)
    steward(holders).look()
    assert holders.orders == [PublishOrder("hold", "a row is NaN (share 1)", by_guard=True)]
    assert [one.held for one in holders.shares] == [True, True]


def test_who_missed_that_all_went_back_goes_back_too() -> None:
    holders = TwoHolders()
    holders.hold(0, version="1200")
    steward(holders).look()
    assert holders.orders == [PublishOrder("rollback", version="1200")]


def test_a_model_that_got_worse_holds_all() -> None:
    holders = TwoHolders()
    steward(holders, wrong="the AUC fell").look()
    assert holders.orders == [PublishOrder("hold", "the AUC fell", by_guard=True, first_bad_step=7)]


def test_what_has_recovered_goes_on_by_itself_only_where_that_is_asked() -> None:
    holders = TwoHolders()
    for share in (0, 1):
        holders.hold(share, by_guard=True, recovered=True)
    steward(holders).look()
    assert holders.orders == []
    steward(holders, resume="when_recovered", wrong="the AUC fell").look()
    assert holders.orders == []
    steward(holders, resume="when_recovered").look()
    assert holders.orders == [PublishOrder("resume", by_guard=True)]


def test_what_a_person_held_stays_held() -> None:
    holders = TwoHolders()
    for share in (0, 1):
        holders.hold(share, by_guard=False)
    steward(holders, resume="when_recovered").look()
    assert holders.orders == []
