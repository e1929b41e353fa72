"""Proof of a shared token over Flight, in both directions. The token itself is never sent.

A port can be taken by another program while its server is away, so a caller must not show that program
anything secret, nor believe what it answers. Both sides prove that they have the token by HMACs of random
numbers:

    caller                                     server
    its roles, a nonce c               ──►
                                       ◄──     a role, a nonce s, HMAC(token, server, service, role, c, s)
    checks that; else it sends no more
    HMAC(token, caller, service,       ──►     checks that
         role, c, s)                   ◄──     the name of a session

    both: key = HMAC(token, session, service, role, c, s)

    each call: its number n,           ──►     checks that, and that n is above those before
         MAC(key, call, n)             ◄──     with the answer: MAC(key, answer, n), which the caller checks

gRPC connects again by itself, so the process that answers the next call may be another one than the process
that proved the token. For that reason each answer is proved, and not the handshake alone: an answer without
proof is dropped, and the caller shakes hands again.

Without TLS a program on the way between both can still relay messages, read them and change bodies. And a
process with the token of a role can pose as a server to callers that have no other token.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from monolith import concurrency

_log = logging.getLogger(__name__)

HEADER = "monolith-proof"
_HELLO = "monolith-proof/1"
_NONCE_BYTES = 16
_LONGEST_MESSAGE = 1024
MOST_SESSIONS = 4096
"""The sessions of one port; beyond that, the one used longest ago ends, and its caller shakes hands again."""
SESSION_IDLE_S = 3600.0
REFUSAL = "the caller has not proved that it has the shared token"

Tokens = Mapping[str, str]
"""Role -> its token."""


class UnprovedError(Exception):
    """The process that answered has not proved that it has the token. Never leaves this package."""


def _mac(key: bytes, *parts: str) -> str:
    return hmac.digest(key, "\0".join(parts).encode(), "sha256").hex()


def _call_mac(key: bytes, kind: str, number: str) -> str:
    """Return the proof of a call or an answer: keyed BLAKE2b, 2 microseconds where HMAC takes 12."""
    return blake2b(f"{kind} {number}".encode(), key=key, digest_size=32).hexdigest()


@dataclass(slots=True)
class _Session:
    key: bytes
    role: str
    used_at: float
    last: int = 0
    """The number of the newest call. A caller counts up, so an older one was recorded and sent again."""


class PortProof:
    """The side of a server. Thread-safe.

    Args:
        service: The name of the service: a proof made for one is worth nothing at another.
        tokens: Those of the roles that may call.
    """

    def __init__(
        self, service: str, tokens: Tokens, clock: Callable[[], float] = concurrency.monotonic
    ) -> None:
        self._service = service
        self._tokens = {role: token.encode() for role, token in tokens.items()}
        self._clock = clock
        self._lock = concurrency.Lock()  # guards the sessions; the one used longest ago is first
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def challenge(self, hello: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
        """Return what to answer to the first message, and what takes the second and names a session.

        Raises:
            UnprovedError: It is not a first message, or of other roles; or the second proves nothing.
        """
        words = _words(hello)
        if len(words) != 3 or words[0] != _HELLO or len(words[2]) != 2 * _NONCE_BYTES:
            raise UnprovedError("the first message of a handshake is something else")
        role = next((one for one in words[1].split(",") if one in self._tokens), None)
        if role is None:
            raise UnprovedError("the caller has a token of none of the roles that this port takes")
        about = (self._service, role, words[2], concurrency.token_hex(_NONCE_BYTES))
        token = self._tokens[role]

        def admit(proof: bytes) -> bytes:
            if not hmac.compare_digest(proof, _mac(token, "caller", *about).encode()):
                raise UnprovedError("the caller has another token")
            name = concurrency.token_hex(_NONCE_BYTES)
            key = bytes.fromhex(_mac(token, "session", *about))
            with self._lock:
                now = self._clock()
                while self._sessions and (
                    len(self._sessions) >= MOST_SESSIONS
                    or next(iter(self._sessions.values())).used_at < now - SESSION_IDLE_S
                ):
                    self._sessions.popitem(last=False)
                self._sessions[name] = _Session(key, role, now)
            return name.encode()

        return f"{role} {about[-1]} {_mac(token, 'server', *about)}".encode(), admit

    def answer_call(self, header: str) -> str:
        """Return what proves an answer to the call that came with this header.

        Raises:
            UnprovedError: The session is not known here, or the call is not of it.
        """
        name, _, rest = header.partition(" ")
        number, _, proof = rest.partition(" ")
        with self._lock:
            session = self._sessions.get(name)
        if session is None or not hmac.compare_digest(
            proof.encode(), _call_mac(session.key, "call", number).encode()
        ):
            raise UnprovedError("the session is not known here")
        with self._lock:
            if int(number) <= session.last:  # it is a number: the proof covers it
                raise UnprovedError("the call was made before")
            session.last = int(number)
            if name in self._sessions:
                session.used_at = self._clock()
                self._sessions.move_to_end(name)
        return _call_mac(session.key, "answer", number)

    def server_options(self, flight: Any) -> dict[str, Any]:
        """Return the keyword arguments by which a FlightServerBase takes calls with proof only."""
        port = self

        class Handshake(flight.ServerAuthHandler):  # type: ignore[misc]
            def authenticate(self, outgoing: Any, incoming: Any) -> None:
                try:
                    answer, admit = port.challenge(_read(incoming))
                    outgoing.write(answer)
                    outgoing.write(admit(_read(incoming)))
                except UnprovedError as error:
                    raise flight.FlightUnauthenticatedError(f"{REFUSAL}: {error}") from None

            def is_valid(self, token: bytes) -> bytes:  # noqa: ARG002  the middleware looks at each call
                return b""

        class Proof(flight.ServerMiddleware):  # type: ignore[misc]
            def __init__(self, proof: str) -> None:
                self._proof = proof

            def sending_headers(self) -> dict[str, str]:
                return {HEADER: self._proof}

        class CallCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
            def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> Proof | None:
                if info.method == flight.FlightMethod.HANDSHAKE:
                    return None
                sent = headers.get(HEADER, [])
                try:
                    if len(sent) != 1 or not isinstance(sent[0], str):
                        raise UnprovedError("the call has no proof")
                    return Proof(port.answer_call(sent[0]))
                except UnprovedError as error:
                    raise flight.FlightUnauthenticatedError(f"{REFUSAL}: {error}") from None

        return {"auth_handler": Handshake(), "middleware": {"proof": CallCheck()}}


class CallerProof:
    """The side of a caller, for one connection and one thread at a time.

    Args:
        tokens: Those that it has; it proves one of them, the first that the server has, too.
    """

    def __init__(self, service: str, tokens: Tokens) -> None:
        self._service = service
        self._tokens = {role: token.encode() for role, token in tokens.items()}
        self._session = ""
        self._key = b""
        self._number = 0
        self._proved = False

    def check(self) -> None:
        """Check that the answer to the last call was proved.

        Raises:
            UnprovedError: Another process answered than the one that proved that it has the token.
        """
        if not self._proved:
            raise UnprovedError("it answers calls without proof")

    def shake_hands(self, send: Callable[[bytes], object], receive: Callable[[], bytes]) -> None:
        """Let the server prove that it has the token, then prove the same, and begin a session.

        Raises:
            UnprovedError: It has not proved it. Nothing secret was sent.
        """
        nonce = concurrency.token_hex(_NONCE_BYTES)
        send(f"{_HELLO} {','.join(self._tokens)} {nonce}".encode())
        words = _words(receive())
        if len(words) != 3 or words[0] not in self._tokens or len(words[1]) != 2 * _NONCE_BYTES:
            raise UnprovedError("it does not answer as a process of a run does")
        token, about = self._tokens[words[0]], (self._service, words[0], nonce, words[1])
        if not hmac.compare_digest(words[2], _mac(token, "server", *about)):
            raise UnprovedError("it has another token")
        send(_mac(token, "caller", *about).encode())
        self._session = receive().decode("ascii", "replace")
        self._key = bytes.fromhex(_mac(token, "session", *about))

    def call_header(self) -> str:
        """Return what proves the call that begins now."""
        self._number += 1
        self._proved = False
        return f"{self._session} {self._number} {_call_mac(self._key, 'call', str(self._number))}"

    def take_answer(self, header: str) -> None:
        self._proved = hmac.compare_digest(
            header.encode(), _call_mac(self._key, "answer", str(self._number)).encode()
        )

    def middleware(self, flight: Any) -> Any:
        """Return the middleware of a FlightClient that proves each call."""
        caller = self

        class Proof(flight.ClientMiddleware):  # type: ignore[misc]
            def sending_headers(self) -> dict[str, str]:
                return {HEADER: caller.call_header()}

            def received_headers(self, headers: Mapping[str, list[str]]) -> None:
                sent = headers.get(HEADER, [])  # Flight calls this again for what comes after the answer
                if len(sent) == 1 and isinstance(sent[0], str):
                    caller.take_answer(sent[0])

        class CallProof(flight.ClientMiddlewareFactory):  # type: ignore[misc]
            def start_call(self, info: Any) -> Proof | None:
                return None if info.method == flight.FlightMethod.HANDSHAKE else Proof()

        return CallProof()

    def handshake(self, flight: Any) -> Any:
        """Return what a FlightClient authenticates with."""
        caller = self

        class Handshake(flight.ClientAuthHandler):  # type: ignore[misc]
            def authenticate(self, outgoing: Any, incoming: Any) -> None:
                caller.shake_hands(outgoing.write, incoming.read)

            def get_token(self) -> bytes:
                return b""

        return Handshake()


def _read(incoming: Any) -> bytes:
    message: bytes = incoming.read()
    if len(message) > _LONGEST_MESSAGE:
        raise UnprovedError("a message of the handshake is too long")
    return message


def _words(message: bytes) -> list[str]:
    return message[:_LONGEST_MESSAGE].decode("ascii", "replace").split(" ")
