"""Who may talk to whom: mutual TLS, and tokens by role.

One `SecurityConfig` serves every listener and every caller of a process. It may be empty only if
no other machine can connect: a listener on any address but loopback must demand a certificate or a token.

    role       a process with this token may                                 its token, if none is set
    ────       ─────────────────────────────                                 ─────────────────────────
    control    do everything: train, save, stop, follow, predict             none
    follow     read published rows, and rows of serving servers              derived from the control token
    predict    ask a model server for predictions                            derived from the control token

A port takes the token of its role or the control token. Derived tokens are HMACs of the control token: it
cannot be computed from them, nor one of them from another.

    guard = guard_listener(host, config)              # ConfigError unless host is loopback or guarded
    server = grpc.server(pool, interceptors=grpc_interceptors(guard))
    port = add_grpc_port(server, f"{host}:0", guard)

    channel = grpc_channel(address, guard_caller(config))
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from monolith import concurrency
from monolith.config import Checked, Problem, Secret, looks_secret
from monolith.errors import ConfigError, ListenError, optional_package
from monolith.wire.grpc_ports import import_grpc
from monolith.wire.proof import CallerProof, PortProof

_log = logging.getLogger(__name__)

Role = Literal["control", "follow", "predict"]

HEADER = "authorization"
REFUSAL = "the shared token is missing or wrong"
MESSAGE_WITHIN = 10.0
"""Seconds that a gRPC call may take for its next message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecurityConfig(Checked):
    """What this process shows to others, and asks of them. Empty only on loopback."""

    cert: Path | None = None
    """The certificate of this process, in PEM, followed by its chain."""
    key: Path | None = None
    """The private key of the certificate, in PEM."""
    ca: Path | None = None
    """The certificate authority that must have signed the certificates of other processes, in PEM."""
    server_name: str | None = None
    """The name in the servers' certificates, if it differs from the host by which they are reached."""
    token: Secret | None = None
    """The token that callers must have, for everything. A file is safer: other users of the machine can read
    flags."""
    token_file: Path | None = None
    """The file that contains the token that callers must have, for everything."""
    follow_token: Secret | None = None
    """The token for following a run only: reading the rows that it publishes. By default derived from the
    token for everything; `monolith config token --role follow` prints it."""
    follow_token_file: Path | None = None
    """The file that contains the token for following a run."""
    predict_token: Secret | None = None
    """The token for asking a model server for predictions only. By default derived from the token for
    everything; `monolith config token --role predict` prints it."""
    predict_token_file: Path | None = None
    """The file that contains the token for asking for predictions."""

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted, and both ends show a certificate."""
        return self.cert is not None

    def problems(self) -> Iterator[Problem]:
        given = [name for name in ("cert", "key", "ca") if getattr(self, name) is not None]
        if given and len(given) < 3:
            missing = ", ".join(name for name in ("cert", "key", "ca") if name not in given)
            yield Problem(("cert", "key", "ca"), f"mutual TLS needs all three; {missing} is missing")
        for name in ("token", "follow_token", "predict_token"):
            token: Secret | None = getattr(self, name)
            if token is not None and getattr(self, f"{name}_file") is not None:
                yield Problem((name, f"{name}_file"), "only one of them may be set")
            if token is not None and not _is_sendable(token.reveal()):
                yield Problem((name,), "must be visible ASCII characters without blanks, at least one")
        if self.server_name and not self.uses_tls:
            yield Problem(("server_name", "cert"), "names are compared only with TLS; set cert, key and ca")


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """A SecurityConfig with its files read: what a listener demands, and a caller presents.

    guard = guard_caller(config)               # demands and presents the control token
    guard.for_role("predict").admits(header)   # whether the header has the predict or the control token
    """

    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    ca: bytes | None = None
    token: Secret | None = None
    """The token of `role`."""
    server_name: str | None = None
    role: Role = "control"
    control: Secret | None = None
    """The control token, if this guard is of another role and knows it; a listener takes it too."""
    role_tokens: Mapping[Role, Secret] = field(default_factory=dict, repr=False, hash=False)
    """The tokens of other roles that were set and so are not derived."""

    @property
    def uses_tls(self) -> bool:
        return self.cert is not None

    @property
    def header(self) -> str | None:
        """What callers send under "authorization"; None without a token."""
        return None if self.token is None else f"Bearer {self.token.reveal()}"

    @property
    def tokens(self) -> dict[str, str]:
        """The tokens that a caller may prove here and a port takes: control first, as more ports have it."""
        held = {"control": self.control, self.role: self.token}
        return {role: token.reveal() for role, token in held.items() if token is not None}

    def for_role(self, role: Role) -> Guard:
        """Return a guard that presents the token of a role, and takes that or the control token.

        It has no token if neither the one of the role nor the control token is known here.
        """
        control = self.token if self.role == "control" else self.control
        if role == "control":
            return replace(self, token=control, role=role, control=None)
        token = self.role_tokens.get(role) or (None if control is None else derive_token(control, role))
        return replace(self, token=token, role=role, control=control)

    def admits(self, header: str | bytes) -> bool:
        """Whether a caller that sent this may come in. Takes as long for a near miss as for a far one."""
        accepted = [token for token in (self.token, self.control) if token is not None]
        given = header if isinstance(header, bytes) else header.encode()
        # A list, not a generator: all are compared, whichever matches.
        matches = [hmac.compare_digest(given, f"Bearer {token.reveal()}".encode()) for token in accepted]
        return any(matches) or not accepted

    # What rooms that may not look here ask of a guard that they are handed.

    def flight_location(self, address: str) -> str:
        return flight_location(address, self)

    def flight_server_options(self, service: str) -> dict[str, Any]:
        return flight_server_options(self, service)

    def flight_client_options(self) -> dict[str, Any]:
        return flight_client_options(self)

    def flight_proof(self, service: str) -> CallerProof | None:
        return CallerProof(service, self.tokens) if self.tokens else None


def derive_token(control: Secret, role: Role) -> Secret:
    """Return the token of a role that none was set for. The control token cannot be computed from it."""
    return Secret(hmac.digest(control.reveal().encode(), f"monolith token: {role}".encode(), "sha256").hex())


def guard_listener(
    bind: str, config: SecurityConfig, *, role: Role = "control", insecure: bool = False
) -> Guard:
    """Return what a listener on `bind` demands.

    Args:
        bind: Host, host:port, or unix:path.
        role: What callers of the port do.
        insecure: An operator allowed every process that reaches the address to connect.

    Raises:
        ConfigError: Others can reach that address and nothing is demanded of them; or a file cannot be read.
    """
    guard = guard_caller(config).for_role(role)
    if not is_loopback(bind):
        open_to_all = not guard.uses_tls and guard.token is None
        if open_to_all and not insecure:
            raise ConfigError(
                f"cannot listen on {bind}: others can reach it, and it would ask for neither certificates "
                "nor a token. Set security.cert, key and ca, or security.token_file, as flags "
                "--security.token-file and so on (of data commands --tls-cert, --tls-key, --tls-ca and "
                "--token-file); or listen on 127.0.0.1. On a network that you trust, commands with "
                "--insecure accept every caller."
            )
        if open_to_all:
            _log.warning("listening on %s without authentication (--insecure)", bind)
        elif not guard.uses_tls:
            _log.warning("listening on %s without TLS: all of its traffic is sent in clear text", bind)
    return guard


def guard_caller(config: SecurityConfig) -> Guard:
    """Return what a caller presents.

    Raises:
        ConfigError: A file cannot be read, or key and certificate do not belong together.
    """
    guard = Guard(
        cert=_read("cert", config.cert),
        key=_read("key", config.key),
        ca=_read("ca", config.ca),
        token=_token("token", config.token, config.token_file),
        server_name=config.server_name,
        role_tokens=_role_tokens(config),
    )
    ssl_context(config, server=False)  # Flight and gRPC do not say which file they cannot use
    return guard


def is_loopback(bind: str) -> bool:
    """Whether only this machine can reach an address: a host, host:port, or unix:path."""
    if bind.startswith(("unix:", "/")):
        return True
    host = bind
    if bind.startswith("["):
        host = bind[1:].partition("]")[0]
    elif bind.count(":") == 1:
        host = bind.partition(":")[0]
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name may mean any address, and another one tomorrow
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


# gRPC


def add_grpc_port(server: Any, address: str, guard: Guard) -> int:
    """Let a gRPC server listen on `address` and return the port. The token needs `grpc_interceptors`, too.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """
    grpc = import_grpc("grpc", "a gRPC connection")
    try:
        if guard.uses_tls:
            credentials = grpc.ssl_server_credentials(
                [(guard.key, guard.cert)], root_certificates=guard.ca, require_client_auth=True
            )
            port: int = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as cause:
        raise ListenError(f"cannot listen on {address}: {cause}") from cause
    if port == 0:
        raise ListenError(f"cannot listen on {address}: the port is in use, or not of this machine")
    return port


def grpc_interceptors(
    guard: Guard,
    message_within: float = MESSAGE_WITHIN,
    admit: Callable[[str], object] = lambda _: None,
    open_to_all: Collection[str] = (),
) -> tuple[Any, ...]:
    """Return what `grpc.server(interceptors=...)` needs to refuse callers without the token.

    gRPC gives a thread to each call when its headers have come, and the thread waits for the message. So a
    call without the token is refused by a handler that reads none, and one whose message does not come is
    cancelled.

    Args:
        message_within: Seconds that an admitted call may take for its next message.
        admit: Told the peer of each call that has sent its first message; see `wire.ports`.
        open_to_all: Methods that are answered without a token, such as health probes.
    """
    grpc = import_grpc("grpc", "a gRPC connection")
    waits = _MessageWaits(message_within)

    def refuse(messages: Any, context: Any) -> Any:  # noqa: ARG001
        context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)

    def one_message(answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def read(messages: Any, context: Any) -> Any:
            message = next(waits.bounded(messages, context), None)
            if message is None:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message that can be read")
            admit(context.peer())
            return answer(message, context)

        return read

    def all_messages(answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def read(messages: Any, context: Any) -> Any:
            admit(context.peer())  # a stream may be open for long before its first message
            return answer(waits.bounded(messages, context), context)

        return read

    class AdmittedCalls(grpc.ServerInterceptor):  # type: ignore[misc, name-defined]
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            handler = continuation(details)
            if handler is None:
                return None
            # Handlers of streams are called at once, those of a single message only when it has come.
            streams = (
                grpc.stream_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.stream_unary_rpc_method_handler
            )
            if guard.token is not None and details.method not in open_to_all:
                sent = [value for key, value in details.invocation_metadata or () if key == HEADER]
                if len(sent) != 1 or not guard.admits(sent[0]):
                    return streams(refuse)
            answers = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
            answer = next(one for one in answers if one is not None)
            bounded = all_messages(answer) if handler.request_streaming else one_message(answer)
            return streams(bounded, handler.request_deserializer, handler.response_serializer)

    return (AdmittedCalls(),)


class _MessageWaits:
    """Cancels calls whose next message does not come in time. Thread-safe.

    A thread watches while calls wait, and ends when none does.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[object, tuple[float, Any]] = {}
        """Calls that wait: key -> deadline and gRPC's context. All wait as long: the first is due first."""
        self._watched = False

    def bounded(self, messages: Any, context: Any) -> Iterator[Any]:
        """Yield the messages of a call."""
        key = object()
        while True:
            self._waiting[key] = (concurrency.monotonic() + self._seconds, context)
            # After the line above: `_watch` looks once more after it says that it watches no longer.
            if not self._watched:
                self._watched = True
                concurrency.Thread(target=self._watch, name="grpc-messages", daemon=True).start()
            try:
                message = next(messages)
            except StopIteration:
                return
            finally:
                self._waiting.pop(key, None)
            yield message

    def _watch(self) -> None:
        while True:
            concurrency.sleep(self._seconds / 4)
            for deadline, context in list(self._waiting.values()):
                if deadline > concurrency.monotonic():
                    break
                context.cancel()
            if not self._waiting:
                self._watched = False
                if not self._waiting:
                    return
                self._watched = True  # a second thread may watch as well, which does no harm


def grpc_channel(address: str, guard: Guard, options: Mapping[str, Any] | None = None) -> Any:
    """Return a channel to `address` that presents the certificate and the token. Connects when first used."""
    grpc = import_grpc("grpc", "a gRPC connection")
    settings = dict(options or {})
    if guard.uses_tls:
        if guard.server_name:
            settings["grpc.ssl_target_name_override"] = guard.server_name
        credentials = grpc.ssl_channel_credentials(guard.ca, guard.key, guard.cert)
        channel = grpc.secure_channel(address, credentials, options=list(settings.items()))
    else:
        channel = grpc.insecure_channel(address, options=list(settings.items()))
    if guard.header is not None:
        channel = grpc.intercept_channel(channel, _token_sender(grpc, guard.header))
    return channel


def grpc_async_channel(address: str, guard: Guard, options: Mapping[str, Any] | None = None) -> Any:
    """Return a channel as `grpc_channel` does, for the event loop that runs now."""
    grpc = import_grpc("grpc", "a gRPC connection")
    settings = dict(options or {})
    senders = [] if guard.header is None else [_async_token_sender(grpc, guard.header)]
    if not guard.uses_tls:
        return grpc.aio.insecure_channel(address, options=list(settings.items()), interceptors=senders)
    if guard.server_name:
        settings["grpc.ssl_target_name_override"] = guard.server_name
    credentials = grpc.ssl_channel_credentials(guard.ca, guard.key, guard.cert)
    return grpc.aio.secure_channel(address, credentials, options=list(settings.items()), interceptors=senders)


def _async_token_sender(grpc: Any, header: str) -> Any:
    class AsyncTokenSender(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            metadata = grpc.aio.Metadata(*(details.metadata or ()), (HEADER, header))
            return await continuation(details._replace(metadata=metadata), request)

    return AsyncTokenSender()


def _token_sender(grpc: Any, header: str) -> Any:
    class TokenSender(
        grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
        grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
        grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
        grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
    ):
        # Call credentials would need TLS; a token is allowed without it.
        def _call(self, continuation: Any, details: Any, request: Any) -> Any:
            return continuation(_with_header(details, header), request)

        intercept_unary_unary = intercept_unary_stream = _call
        intercept_stream_unary = intercept_stream_stream = _call

    return TokenSender()


class _CallDetails:
    """gRPC's call details, with other metadata; its own are a tuple that cannot be changed."""

    def __init__(self, details: Any, metadata: list[tuple[str, str]]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = getattr(details, "wait_for_ready", None)
        self.compression = getattr(details, "compression", None)


def _with_header(details: Any, header: str) -> _CallDetails:
    return _CallDetails(details, [*(details.metadata or ()), (HEADER, header)])


# Arrow Flight


def flight_location(address: str, guard: Guard) -> str:
    """Return host:port as Flight writes it."""
    return f"{'grpc+tls' if guard.uses_tls else 'grpc+tcp'}://{address}"


def flight_server_options(guard: Guard, service: str) -> dict[str, Any]:
    """Return the keyword arguments that make a FlightServerBase demand certificate and token."""
    options: dict[str, Any] = {}
    if guard.uses_tls:
        options |= {
            "tls_certificates": [(guard.cert, guard.key)],
            "verify_client": True,
            "root_certificates": guard.ca,
        }
    if tokens := guard.tokens:
        options |= PortProof(service, tokens).server_options(_import_flight())
    return options


def flight_client_options(guard: Guard) -> dict[str, Any]:
    """Return the keyword arguments that make a FlightClient present the certificate."""
    options: dict[str, Any] = {}
    if guard.uses_tls:
        options |= {"tls_root_certs": guard.ca, "cert_chain": guard.cert, "private_key": guard.key}
        if guard.server_name:
            options["override_hostname"] = guard.server_name
    return options


# HTTP


def ssl_context(config: SecurityConfig, *, server: bool) -> ssl.SSLContext | None:
    """Return the context of an HTTP listener or caller that shows a certificate and asks for one.

    None if there are no certificates.

    Raises:
        ConfigError: A file cannot be read, or key and certificate do not belong together.
    """
    if config.cert is None or config.key is None or config.ca is None:
        return None
    purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
    try:
        context = ssl.create_default_context(purpose, cafile=str(config.ca))
        context.load_cert_chain(config.cert, config.key)
    except OSError as cause:
        raise ConfigError(
            f"cannot use security.cert {config.cert}, key {config.key} and ca {config.ca}: {cause}"
        ) from cause
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        text = path.read_bytes()
    except OSError as cause:
        raise ConfigError(f"cannot read security.{name} {path}: {cause.strerror}") from cause
    if b"-----BEGIN" not in text:
        raise ConfigError(f"cannot use security.{name} {path}: it is not PEM")
    return text


def _role_tokens(config: SecurityConfig) -> dict[Role, Secret]:
    given: dict[Role, Secret | None] = {
        "follow": _token("follow_token", config.follow_token, config.follow_token_file),
        "predict": _token("predict_token", config.predict_token, config.predict_token_file),
    }
    return {role: token for role, token in given.items() if token is not None}


def _token(name: str, token: Secret | None, path: Path | None) -> Secret | None:
    if path is None:
        return token
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as cause:
        why = (cause.strerror or str(cause)) if isinstance(cause, OSError) else "it is not text"
        raise ConfigError(f"cannot read security.{name}_file {_named(path)}: {why}") from cause
    if not _is_sendable(text):
        raise ConfigError(
            f"cannot use security.{name}_file {path}: a token must be visible ASCII characters "
            "without blanks, at least one"
        )
    return Secret(text)


def _named(path: Path) -> str:
    """Return a path to show; not one that may be the token itself, given in place of its file."""
    return "(not shown: is it the token itself?)" if looks_secret(str(path)) else str(path)


def _is_sendable(text: str) -> bool:
    """Whether text can stand in a header."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def _import_flight() -> Any:
    with optional_package("pyarrow", "arrow", "a Flight connection"):
        from pyarrow import flight  # type: ignore[import-untyped]
    return flight
