"""The steward: all who hold rows publish, or none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from monolith.runtime.metric_guard import BadSince
from monolith.runtime.publish_hook import PublishSupervisor
from monolith.sync import LogPosition
from monolith.sync.publish_config import GuardConfig
from monolith.sync.publish_messages import PublishOrder, ShardPublishStatus

STANDING = ShardPublishStatus(
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
    """Publishers that do as they are told, and remember it."""

    sends_weights = True

    def __init__(self) -> None:
        self.shares = [STANDING, replace(STANDING, share=1)]
        self.orders: list[PublishOrder] = []

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
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
    def send_weights(self, weights: object) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def places(self) -> Mapping[int, LogPosition]:
        return {}


def steward(holders: TwoHolders, *, wrong: str | None = None, resume: Any = "by_hand") -> PublishSupervisor:
    bad = None if wrong is None else BadSince(wrong, 7)
    return PublishSupervisor(holders, GuardConfig(resume=resume), lambda: bad, every=60.0)


def test_while_nothing_is_paused_no_shard_is_told_anything() -> None:
    holders = TwoHolders()
    steward(holders).check()
    assert holders.orders == []


def test_if_the_guard_of_one_shard_pauses_all_are_paused() -> None:
    holders = TwoHolders()
    holders.hold(1, by_guard=True)
    steward(holders).check()
    assert holders.orders == [PublishOrder("hold", "a row is NaN (shard 1)", by_guard=True)]
    assert [one.held for one in holders.shares] == [True, True]


def test_a_shard_that_missed_the_rollback_rolls_back_too() -> None:
    holders = TwoHolders()
    holders.hold(0, version="1200")
    steward(holders).check()
    assert holders.orders == [PublishOrder("rollback", version="1200")]


def test_a_model_that_got_worse_holds_all() -> None:
    holders = TwoHolders()
    steward(holders, wrong="the AUC fell").check()
    assert holders.orders == [PublishOrder("hold", "the AUC fell", by_guard=True, first_bad_step=7)]


def test_a_recovered_model_resumes_by_itself_only_if_configured() -> None:
    holders = TwoHolders()
    for share in (0, 1):
        holders.hold(share, by_guard=True, recovered=True)
    steward(holders).check()
    assert holders.orders == []
    steward(holders, resume="when_recovered", wrong="the AUC fell").check()
    assert holders.orders == []
    steward(holders, resume="when_recovered").check()
    assert holders.orders == [PublishOrder("resume", by_guard=True)]


def test_a_pause_by_an_operator_stays() -> None:
    holders = TwoHolders()
    for share in (0, 1):
        holders.hold(share, by_guard=False)
    steward(holders, resume="when_recovered").check()
    assert holders.orders == []
