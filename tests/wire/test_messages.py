"""Messages: a handler is never called with anything but the message it declared."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import RequestError
from monolith.wire.messages import (
    Bounds,
    Count,
    Json,
    Name,
    Nothing,
    Seconds,
    read_message,
    typed,
    typed_calls,
    typed_polls,
    write_message,
)


@dataclass(frozen=True, slots=True)
class Inner:
    position: Json
    skip: Count = 0


@dataclass(frozen=True, slots=True)
class Body:
    worker: Name
    size: Count
    wait: Seconds = 0.0
    full: bool = False
    job: str | None = None
    ids: Annotated[list[Count], Bounds(0, 3)] = field(default_factory=list)
    now: dict[str, int] = field(default_factory=dict)
    place: Inner | None = None
    chain: tuple[tuple[str, Json], ...] = ()
    how: Literal["keep", "reset"] = "keep"


FEWEST: dict[str, Any] = {"worker": "w", "size": 1}


def test_a_body_becomes_what_was_declared_with_defaults_for_what_it_leaves_out() -> None:
    assert read_message(Body, FEWEST) == Body("w", 1)
    place = {"position": {"file": [1, None]}, "skip": 2}
    whole = {**FEWEST, "wait": 3, "full": True, "job": "j", "ids": [1, 2], "now": {"t": -1}, "place": place}
    assert read_message(Body, {**whole, "chain": [["p", {}]], "how": "reset"}) == Body(
        "w", 1, 3.0, True, "j", [1, 2], {"t": -1}, Inner({"file": [1, None]}, 2), (("p", {}),), "reset"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker": 5}, r"^worker: expected str, got 5$"),
        ({"worker": ""}, r"^worker: expected str of length >= 1, got ''$"),
        ({"worker": "x" * 2000}, r"^worker: expected str of length <= 1024, got 'x{60}'$"),
        ({"worker": "\ud800"}, r"^worker: expected str without half surrogate pairs, got '.ud800'$"),
        ({"size": -3}, r"^size: expected int >= 0, got -3$"),
        ({"size": (1 << 53) + 1}, r"^size: expected int <= 9007199254740992, got "),
        ({"size": 10**5000}, r"^size: expected int .*, got a number of 16610 bits$"),
        ({"size": True}, r"^size: expected int, got True$"),
        ({"size": 1.0}, r"^size: expected int, got 1.0$"),
        ({"size": None}, r"^size: expected int, got None$"),
        ({"wait": -1}, r"^wait: expected float >= 0.0, got -1$"),
        ({"wait": float("inf")}, r"^wait: expected float <= 1000000000000.0, got inf$"),
        ({"wait": float("nan")}, r"^wait: expected float >= 0.0, got nan$"),
        ({"wait": 10**400}, r"^wait: number out of range, got a number of 1329 bits$"),
        ({"wait": "soon"}, r"^wait: expected float, got 'soon'$"),
        ({"full": 1}, r"^full: expected bool, got 1$"),
        ({"ids": [1, 2, 3, 4]}, r"^ids: expected array of length <= 3, got a list of 4$"),
        ({"ids": [1, "2"]}, r"^ids\[1\]: expected int, got '2'$"),
        ({"ids": {"a": 1}}, r"^ids: expected array, got a table of 1$"),
        ({"now": {"t": None}}, r"^now\[\.\.\.\]: expected int, got null$"),
        ({"now": [1]}, r"^now: expected object, got a list of 1$"),
        ({"place": {"skip": 1}}, r"^place.position is missing$"),
        ({"place": {"position": 1, "skip": -1}}, r"^place.skip: expected int >= 0, got -1$"),
        ({"chain": [["p"]]}, r"^chain\[0\]: expected array of length 2, got a list of 1$"),
        ({"how": "burn"}, r"^how: expected one of 'keep', 'reset', got 'burn'$"),
        ({"y" * 200: 1}, r"^y{60}: unknown key; it takes worker, size, wait, "),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_little_of_what_came(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        read_message(Body, {**FEWEST, **change})


def test_a_body_that_is_no_table_or_lacks_a_key_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^the message: expected object, got a list of 1$"):
        read_message(Body, [1])
    with pytest.raises(RequestError, match=r"^size is missing$"):
        read_message(Body, {"worker": "w"})
    with pytest.raises(RequestError, match=r"^x: unknown key; it takes nothing$"):
        read_message(Nothing, {"x": 1})


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(list(Body.__slots__)) | st.text(max_size=3), PLAIN))
def test_any_plain_values_are_a_body_or_a_request_error(body: dict[str, Any]) -> None:
    try:
        read = read_message(Body, {**FEWEST, **body})
    except RequestError:
        return
    assert isinstance(read.worker, str)
    assert read.size >= 0
    assert 0 <= read.wait < float("inf")


def test_a_typed_call_gets_the_body_as_declared_and_may_answer_with_nothing() -> None:
    seen: list[Body] = []
    call = typed(Body, seen.append)
    assert call(FEWEST) == {}
    assert seen == [Body("w", 1)]
    with pytest.raises(RequestError):
        call({})
    assert len(seen) == 1


def test_what_is_written_is_plain_and_read_as_it_was() -> None:
    place = Inner({"file": [1, None]}, 2)
    body = Body("w", 1, 3.0, True, "j", [1, 2], {"t": -1}, place, (("p", {"a": (1,)}),), "reset")
    plain = write_message(body)
    assert plain["place"] == {"position": {"file": [1, None]}, "skip": 2}
    assert plain["chain"] == [["p", {"a": [1]}]]
    assert read_message(Body, json.loads(json.dumps(write_message(Body("w", 1, place=place))))) == Body(
        "w", 1, place=place
    )


def test_calls_of_a_table_get_and_answer_what_was_declared() -> None:
    calls = typed_calls({"a": Inner, "b": Nothing}, {"a": lambda body: body, "b": lambda _: None})
    assert calls["a"]({"position": 3}) == {"position": 3, "skip": 0}
    assert calls["b"]({}) == {}
    with pytest.raises(RequestError):
        calls["b"]({"x": 1})


def test_a_poll_of_a_table_can_look_whether_its_caller_is_gone() -> None:
    polls = typed_polls({"a": Inner}, {"a": lambda body, gone: Inner([body.position, gone()])})
    assert polls["a"]({"position": 3}, lambda: True) == {"position": [3, True], "skip": 0}


def test_no_call_waits_longer_than_the_table_allows() -> None:
    calls = typed_calls({"a": Body}, {"a": lambda body: Inner(body.wait)}, longest=5.0)
    assert [calls["a"]({**FEWEST, "wait": wait})["position"] for wait in (1, 1e9)] == [1.0, 5.0]


def test_a_call_without_a_declared_body_is_not_served() -> None:
    with pytest.raises(KeyError):
        typed_calls({}, {"a": lambda body: body})
    with pytest.raises(KeyError):
        typed_polls({}, {"a": lambda body, _: body})


def test_several_threads_may_be_the_first_to_read_a_kind_of_message() -> None:
    values = {f"f{number}": number for number in range(30)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(50):
            inner = make_dataclass(f"Inner{number}", [(name, int) for name in values])
            outer = make_dataclass(f"Outer{number}", [("one", inner), ("many", list[inner])])  # type: ignore[valid-type]
            gate = threading.Barrier(6)

            def read(kind: type = outer, gate: threading.Barrier = gate) -> object:
                gate.wait(60)
                return read_message(kind, {"one": values, "many": [values]})

            with ThreadPoolExecutor(6) as pool:
                found = [call.result(60) for call in [pool.submit(read) for _ in range(6)]]
            assert all(one == found[0] for one in found)
    finally:
        sys.setswitchinterval(interval)
