"""Calls of ranks to each other, and of programs that are none of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from store.ranks import PORT, all_at_once, connected

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import ConfigError, DeadlineExceededError, RequestError, SaveError, UnavailableError
from monolith.store import RankGroups
from monolith.store.rank_calls import SERVICE
from monolith.wire.flight import Caller

flight = pytest.importorskip("pyarrow.flight")


@pytest.fixture
def ranks() -> Iterator[Sequence[RankGroups]]:
    with connected(3) as groups:
        yield groups


def address(groups: RankGroups) -> str:
    return groups._keys.get(f"calls/{groups.rank}").decode()


def test_all_answer_in_order_whichever_rank_calls(ranks: Sequence[RankGroups]) -> None:
    for one in ranks:
        one.calls.offer({"who": lambda body, rank=one.rank: {"rank": rank, **body}})
    for one in ranks:
        assert one.calls.ask_all("who", {"x": 1}) == [{"rank": rank, "x": 1} for rank in range(3)]


def test_a_call_before_it_is_offered_waits(ranks: Sequence[RankGroups]) -> None:
    def offer(one: RankGroups) -> None:
        one.calls.offer({"late": lambda _: {}})

    ranks[0].calls.offer({"late": lambda _: {}})
    threading.Timer(0.3, lambda: [offer(one) for one in ranks[1:]]).start()
    assert ranks[0].calls.ask_all("late", {}) == [{}, {}, {}]


def test_the_error_of_a_rank_names_it(ranks: Sequence[RankGroups]) -> None:
    def write(rank: int) -> dict[str, Any]:
        if rank == 2:
            raise SaveError("no disk")
        return {}

    for one in ranks:
        one.calls.offer({"write": lambda _, rank=one.rank: write(rank)})
    for one in ranks[:2]:
        with pytest.raises(SaveError, match=r"^rank 2: no disk"):
            one.calls.ask_all("write", {})


def test_a_short_call_does_not_wait_for_a_long_one(ranks: Sequence[RankGroups]) -> None:
    done = threading.Event()

    def long(_: dict[str, Any]) -> dict[str, Any]:
        assert done.wait(60)
        return {}

    for one in ranks:
        one.calls.offer({"long": long, "short": lambda _: {}})

    def short() -> list[dict[str, Any]]:
        try:
            return ranks[0].calls.ask_all("short", {})
        finally:
            done.set()

    assert all_at_once(lambda: ranks[0].calls.ask_all("long", {}), short) == [[{}] * 3] * 2


def test_a_rank_that_waits_for_a_lost_rank_is_told(ranks: Sequence[RankGroups]) -> None:
    ranks[0].calls.offer({"never": lambda _: {}})  # the others have it not
    threading.Timer(0.2, ranks[0].calls.fail, (DeadlineExceededError("it hangs"),)).start()
    with pytest.raises(DeadlineExceededError, match="it hangs"):
        ranks[0].calls.ask_all("never", {})
    ranks[2].calls.offer({"never": lambda _: {}})
    ranks[1].close()
    with pytest.raises((DeadlineExceededError, UnavailableError)):
        ranks[2].calls.ask_all("never", {})


def test_callers_without_the_token_are_refused(ranks: Sequence[RankGroups]) -> None:
    evicted: list[int] = []
    for one in ranks:
        one.calls.offer({"evict/0": lambda _, rank=one.rank: {"done": evicted.append(rank)}})
    for guard in (None, Guard(token=Secret("guessed"))):
        with (
            Caller(SERVICE, address(ranks[1]), guard=guard) as stranger,
            pytest.raises(ConfigError, match="token"),
        ):
            stranger.call("ask", call="evict/0", body={})
    assert not evicted


def test_no_message_ends_what_answers(ranks: Sequence[RankGroups]) -> None:
    for one in ranks:
        one.calls.offer({"save": lambda body: {"path": body["path"]}})
    with Caller(SERVICE, address(ranks[1]), guard=PORT.guard) as caller:  # even of a caller with the token
        for body in (b"", b"no JSON", b"[]", b"\xff\xfe", b"[" * 100_000, b"{" + b"x" * (1 << 20)):
            answer = caller._connected().call("ask", body, 30.0)
            assert json.loads(answer)["error"] == "RequestError"
        bodies: list[dict[str, Any]] = [
            {},
            {"call": 5, "body": {}},
            {"call": "save", "body": []},
            {"call": "x" * 2000},
        ]
        for wrong in bodies:
            with pytest.raises(RequestError):
                caller.call("ask", **wrong)
        with pytest.raises(SERVICE.failure, match="see error"):
            caller.call("ask", call="save", body={})  # raises a KeyError there
    assert ranks[0].calls.ask_all("save", {"path": "p"}) == [{"path": "p"}] * 3
