"""Both ends prove that they have the token, and the token is never sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import ConfigError, UnavailableError
from monolith.wire import proof
from monolith.wire.endpoint import Handlers
from monolith.wire.flight import Caller
from monolith.wire.flight_server import Server
from monolith.wire.proof import CallerProof, PortProof, UnprovedError
from monolith.wire.transport import Service

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

TOKEN = "the-token-of-this-run"
GUARD = Guard(token=Secret(TOKEN))
SERVICE = Service(
    name="echo service",
    peers="callers and echoes",
    failure=ConfigError,
    told=(),
    unreachable=UnavailableError,
    late=UnavailableError,
)


def shaken(port: PortProof, caller: CallerProof, seen: list[bytes] | None = None) -> None:
    """Let both shake hands without a network."""
    answers: list[bytes] = []
    steps: list[Any] = [port.challenge]

    def send(message: bytes) -> None:
        (seen if seen is not None else []).append(message)
        found = steps.pop()(message)
        if isinstance(found, tuple):
            answer, admit = found
            steps.append(admit)
        else:
            answer = found
        answers.append(answer)

    caller.shake_hands(send, lambda: answers.pop(0))


def answered(port: PortProof, caller: CallerProof) -> None:
    caller.take_answer(port.answer_call(caller.call_header()))
    caller.check()


# The protocol


def test_both_with_the_token_agree_and_each_answer_is_proved() -> None:
    port, caller = PortProof("s", {"control": TOKEN}), CallerProof("s", {"control": TOKEN})
    seen: list[bytes] = []
    shaken(port, caller, seen)
    for _ in range(3):
        answered(port, caller)
    assert not any(TOKEN.encode() in message for message in seen)


def test_a_server_without_the_token_is_shown_no_proof() -> None:
    seen: list[bytes] = []
    thief = PortProof("s", {"control": "another"})
    with pytest.raises(UnprovedError, match="it has another token"):
        shaken(thief, CallerProof("s", {"control": TOKEN}), seen)
    assert len(seen) == 1  # the greeting alone


def test_a_caller_without_the_token_is_admitted_to_no_session() -> None:
    port = PortProof("s", {"control": TOKEN})
    _, admit = port.challenge(b"monolith-proof/1 control " + b"0" * 32)
    with pytest.raises(UnprovedError, match="another token"):
        admit(b"0" * 64)
    with pytest.raises(UnprovedError):
        port.answer_call("0" * 32 + " 1 " + "0" * 64)


@pytest.mark.parametrize(
    "message", [b"", b"GET / HTTP/1.1", b"monolith-proof/1 control 0", b"monolith-proof/1 other " + b"0" * 32]
)
def test_a_greeting_that_is_something_else_is_refused(message: bytes) -> None:
    with pytest.raises(UnprovedError):
        PortProof("s", {"control": TOKEN}).challenge(message)


def test_a_proof_for_one_service_is_worth_nothing_at_another() -> None:
    with pytest.raises(UnprovedError, match="another token"):
        shaken(PortProof("rows", {"control": TOKEN}), CallerProof("deltas", {"control": TOKEN}))


def test_the_first_role_that_both_have_is_proved() -> None:
    port = PortProof("s", {"control": TOKEN, "follow": "f"})
    for tokens in ({"follow": "f"}, {"control": TOKEN}, {"control": TOKEN, "follow": "stale"}):
        caller = CallerProof("s", tokens)
        shaken(port, caller)
        answered(port, caller)


def test_an_answer_of_another_call_proves_nothing() -> None:
    port, caller = PortProof("s", {"control": TOKEN}), CallerProof("s", {"control": TOKEN})
    shaken(port, caller)
    before = port.answer_call(caller.call_header())
    caller.call_header()
    caller.take_answer(before)
    with pytest.raises(UnprovedError, match="without proof"):
        caller.check()


def test_a_call_that_was_recorded_cannot_be_made_again() -> None:
    port, caller = PortProof("s", {"control": TOKEN}), CallerProof("s", {"control": TOKEN})
    shaken(port, caller)
    recorded = caller.call_header()
    port.answer_call(recorded)
    with pytest.raises(UnprovedError, match="was made before"):
        port.answer_call(recorded)
    answered(port, caller)


def test_sessions_are_bounded_and_end_when_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "MOST_SESSIONS", 2)
    now = 0.0
    port = PortProof("s", {"control": TOKEN}, clock=lambda: now)
    callers = [CallerProof("s", {"control": TOKEN}) for _ in range(3)]
    for caller in callers:
        shaken(port, caller)
    with pytest.raises(UnprovedError, match="session is not known"):
        port.answer_call(callers[0].call_header())
    answered(port, callers[1])
    now = 2 * proof.SESSION_IDLE_S
    shaken(port, callers[0])
    with pytest.raises(UnprovedError, match="session is not known"):
        port.answer_call(callers[1].call_header())


# Over Flight


def serve(stack: ExitStack, guard: Guard | None = GUARD, port: int = 0, **options: Any) -> Server:
    server = Server(
        SERVICE,
        Handlers(calls={"echo": lambda body: body}, exchanges={"echo": lambda body, data: (body, data)}),
        guard=guard,
        port=port,
        **options,
    )
    stack.callback(server.close)
    return server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Thief(flight.FlightServerBase):  # type: ignore[misc, name-defined]
    """Takes every call and keeps what came; it has no token."""

    def __init__(self, port: int, **options: Any) -> None:
        super().__init__(f"grpc+tcp://127.0.0.1:{port}", **options)
        self.bodies: list[bytes] = []

    def do_action(self, context: Any, action: Any) -> Any:  # noqa: ARG002
        self.bodies.append(action.body.to_pybytes())
        return iter([flight.Result(b'{"answer": {"stolen": true}}')])


class AnyHands(flight.ServerAuthHandler):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[bytes] = []

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        self.messages.append(incoming.read())
        outgoing.write(b"control " + b"0" * 32 + b" " + b"0" * 64)
        self.messages.append(incoming.read())

    def is_valid(self, token: bytes) -> bytes:  # noqa: ARG002
        return b""


@contextmanager
def thief_at(port: int, hands: AnyHands | None = None) -> Iterator[Thief]:
    thief = Thief(port, auth_handler=hands)
    try:
        yield thief
    finally:
        thief.shutdown()


def test_a_program_that_has_taken_the_port_is_not_believed_and_learns_no_token(stack: ExitStack) -> None:
    """The server goes away while a caller is connected, and something else listens at its port."""
    server = serve(stack)
    caller = stack.enter_context(Caller(SERVICE, server.address, guard=GUARD))
    assert caller.call("echo", n=1) == {"n": 1}
    server.close()
    for hands in (None, AnyHands()):
        with (
            thief_at(server.port, hands) as thief,
            pytest.raises(
                ConfigError, match=rf"the process at {server.address} does not have this run's tok"
            ),
        ):
            caller.call("echo", large="x" * 100_000)
        assert not any(b"xxx" in body for body in thief.bodies)  # a large body is sent after the proof alone
        if hands is not None:
            assert not any(TOKEN.encode() in message for message in hands.messages)
    again = serve(stack, port=server.port)
    assert caller.call("echo", n=2) == {"n": 2}
    again.close()


def test_a_server_that_asks_for_no_token_is_not_the_one_that_is_meant(stack: ExitStack) -> None:
    server = serve(stack, guard=None)
    caller = stack.enter_context(Caller(SERVICE, server.address, guard=GUARD))
    with pytest.raises(ConfigError, match="does not have this run's token: it asks for none"):
        caller.call("echo")


def test_a_server_that_is_started_again_is_greeted_again_without_an_error(stack: ExitStack) -> None:
    server = serve(stack)
    caller = stack.enter_context(Caller(SERVICE, server.address, guard=GUARD, patience=timedelta(seconds=20)))
    stream = caller.open_stream()
    stream.send("echo", {"n": 1}, b"12345678")
    assert bytes(stream.receive().data) == b"12345678"
    stream.close()
    server.close()
    serve(stack, port=server.port)
    assert caller.call("echo", n=1) == {"n": 1}


def test_a_caller_that_stops_in_the_middle_of_the_handshake_holds_up_no_other(stack: ExitStack) -> None:
    server = serve(stack)
    halves = []
    for _ in range(20):
        half = stack.enter_context(flight.FlightClient(f"grpc+tcp://{server.address}"))
        halves.append(threading.Thread(target=_greet_and_wait, args=(half,), daemon=True))
        halves[-1].start()
    silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(20)]
    caller = stack.enter_context(Caller(SERVICE, server.address, guard=GUARD))
    assert caller.call("echo", n=1) == {"n": 1}
    assert silent


class _Half(flight.ClientAuthHandler):  # type: ignore[misc, name-defined]
    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        outgoing.write(b"monolith-proof/1 control " + b"0" * 32)
        incoming.read()
        incoming.read()  # the server waits for our proof as well

    def get_token(self) -> bytes:
        return b""


def _greet_and_wait(client: Any) -> None:
    with pytest.raises(flight.FlightError):
        client.authenticate(_Half(), flight.FlightCallOptions(timeout=2))
