"""Real servers, real certificates: who shows the right ones comes in, and nobody else."""

import logging
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from monolith.cluster.security import (
    Guard,
    Role,
    SecurityConfig,
    add_grpc_port,
    derive_token,
    flight_client_options,
    flight_location,
    flight_server_options,
    grpc_channel,
    grpc_interceptors,
    guard_caller,
    guard_listener,
    is_loopback,
    ssl_context,
)
from monolith.config import Secret
from monolith.errors import ConfigError, ListenError
from monolith.wire.proof import UnprovedError

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
flight = pytest.importorskip("pyarrow.flight", reason="pyarrow is not installed")

TOKEN = SecurityConfig(token=Secret("right"))


@pytest.fixture
def tls(certificates) -> SecurityConfig:
    return SecurityConfig(
        cert=certificates / "ca-node.crt", key=certificates / "ca-node.key", ca=certificates / "ca.crt"
    )


@pytest.fixture
def strangers(certificates) -> SecurityConfig:
    """A certificate that another authority signed, though its own authority is known."""
    return SecurityConfig(
        cert=certificates / "other-node.crt", key=certificates / "other-node.key", ca=certificates / "ca.crt"
    )


# Where nothing may be demanded


@pytest.mark.parametrize(
    "bind, expected",
    [
        ("127.0.0.1", True),
        ("127.0.0.1:80", True),
        ("127.5.6.7:0", True),
        ("localhost:0", True),
        ("::1", True),
        ("[::1]:80", True),
        ("::ffff:127.0.0.1", True),
        ("unix:/tmp/x", True),
        ("/tmp/x.sock", True),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("::", False),
        ("", False),
        (":80", False),
        ("10.0.0.1", False),
        ("[fe80::1%eth0]:80", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.evil.com:80", False),
        ("127.0.0.1.evil.com", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(bind, expected):
    assert is_loopback(bind) is expected


def test_a_listener_without_any_demand_is_allowed_on_loopback_only():
    assert guard_listener("127.0.0.1:0", SecurityConfig()) == Guard()
    for bind in ("0.0.0.0:0", "[::]:0", "10.0.0.1", "node7:80"):
        with pytest.raises(ConfigError, match="others can reach it"):
            guard_listener(bind, SecurityConfig())


def test_elsewhere_certificates_or_a_token_are_enough_but_a_bare_token_is_warned_about(tls, caplog):
    with caplog.at_level(logging.WARNING):
        assert guard_listener("0.0.0.0:0", tls).uses_tls
        assert caplog.text == ""
        assert guard_listener("0.0.0.0:0", TOKEN).token == Secret("right")
    assert "is sent in clear text" in caplog.text


def test_with_insecure_a_server_listens_without_any_demand_and_warns(caplog):
    with caplog.at_level(logging.WARNING):
        assert guard_listener("0.0.0.0:0", SecurityConfig(), insecure=True) == Guard()
    assert "without authentication" in caplog.text


# The config


def test_certificates_come_in_threes_and_the_token_from_one_place(certificates, tmp_path):
    with pytest.raises(ConfigError, match="needs all three"):
        SecurityConfig(cert=certificates / "ca-node.crt", key=certificates / "ca-node.key")
    with pytest.raises(ConfigError, match="only one of them"):
        SecurityConfig(token=Secret("a"), token_file=tmp_path / "t")
    with pytest.raises(ConfigError, match="only with TLS"):
        SecurityConfig(server_name="node")


@pytest.mark.parametrize("text", ["", "two words", "line\nbreak", "größe"])
def test_a_token_must_fit_into_a_header(tmp_path, text):
    with pytest.raises(ConfigError, match="visible ASCII"):
        SecurityConfig(token=Secret(text))
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match="visible ASCII"):
        guard_caller(SecurityConfig(token_file=file))


def test_a_token_file_is_read_when_it_is_needed_less_its_line_end(tmp_path):
    config = SecurityConfig(token_file=tmp_path / "token")
    with pytest.raises(ConfigError, match=r"cannot read security\.token_file"):
        guard_caller(config)
    (tmp_path / "token").write_text("right\n")
    assert guard_caller(config).token == Secret("right")


def test_files_that_are_not_there_or_not_pem_are_named(tls, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read security\.key"):
        guard_caller(replace(tls, key=tmp_path / "none"))
    (tmp_path / "garbage").write_text("garbage")
    with pytest.raises(ConfigError, match="not PEM"):
        guard_caller(replace(tls, cert=tmp_path / "garbage"))


def test_a_key_of_another_certificate_is_an_error_before_any_server_listens(tls, certificates):
    with pytest.raises(ConfigError, match="cannot use"):
        guard_caller(replace(tls, key=certificates / "other-node.key"))


def test_neither_key_nor_token_is_printed(tls):
    guard = guard_caller(replace(tls, token=Secret("hunter2")))
    assert "hunter2" not in repr(guard)
    assert "PRIVATE KEY" not in repr(guard)


# Roles

ROLES: tuple[Role, ...] = ("control", "follow", "predict")


def bearer(token: Secret) -> str:
    return f"Bearer {token.reveal()}"


def test_a_port_takes_the_token_of_its_role_or_the_control_token_and_no_other():
    control = Secret("right")
    guard = guard_caller(SecurityConfig(token=control))
    follow, predict = derive_token(control, "follow"), derive_token(control, "predict")
    takes = {
        role: [guard.for_role(role).admits(bearer(one)) for one in (control, follow, predict)]
        for role in ROLES
    }
    assert takes == {
        "control": [True, False, False],
        "follow": [True, True, False],
        "predict": [True, False, True],
    }
    assert guard.for_role("follow").header == bearer(follow)
    assert guard.for_role("follow").for_role("control") == guard


def test_a_token_that_is_set_for_a_role_takes_the_place_of_the_derived_one():
    own = Secret("own")
    guard = guard_caller(SecurityConfig(token=Secret("right"), follow_token=own)).for_role("follow")
    assert guard.admits(bearer(own))
    assert not guard.admits(bearer(derive_token(Secret("right"), "follow")))


def test_a_process_that_has_the_token_of_one_role_only_has_none_for_another():
    guard = guard_caller(SecurityConfig(follow_token=Secret("own")))
    assert guard.for_role("follow").header == "Bearer own"
    assert guard.for_role("predict").header is None
    assert guard.token is None
    with pytest.raises(ConfigError, match="others can reach it"):
        guard_listener("0.0.0.0:0", SecurityConfig(predict_token=Secret("own")), role="follow")


# gRPC


def echo(request: bytes, context: object) -> bytes:  # noqa: ARG001
    return request


def repeat(request: bytes, context: object) -> Iterator[bytes]:  # noqa: ARG001
    yield from (request, request)


@pytest.fixture
def serve_grpc():
    servers = []

    def start(config: SecurityConfig) -> str:
        guard = guard_listener("127.0.0.1:0", config)
        server = grpc.server(ThreadPoolExecutor(2), interceptors=grpc_interceptors(guard))
        handlers = {
            "unary": grpc.unary_unary_rpc_method_handler(echo),
            "stream": grpc.unary_stream_rpc_method_handler(repeat),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = add_grpc_port(server, "127.0.0.1:0", guard)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def ask_grpc(address: str, config: SecurityConfig) -> bytes:
    with grpc_channel(address, guard_caller(config)) as channel:
        streamed = list(channel.unary_stream("/test.Echo/stream")(b"x", timeout=10))
        assert streamed == [b"x", b"x"]
        answer: bytes = channel.unary_unary("/test.Echo/unary")(b"hello", timeout=10)
        return answer


def refused_grpc(address: str, config: SecurityConfig) -> str:
    codes = set()
    with grpc_channel(address, guard_caller(config)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream("/test.Echo/stream")(b"x", timeout=10))
        codes.add(caught.value.code().name)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test.Echo/unary")(b"x", timeout=10)
        codes.add(caught.value.code().name)
    (code,) = codes
    return code


def test_grpc_with_the_right_token_passes_and_without_it_not(serve_grpc):
    address = serve_grpc(TOKEN)
    assert ask_grpc(address, TOKEN) == b"hello"
    assert refused_grpc(address, SecurityConfig(token=Secret("wrong"))) == "UNAUTHENTICATED"
    assert refused_grpc(address, SecurityConfig()) == "UNAUTHENTICATED"


def test_grpc_with_the_right_certificate_passes_and_without_it_not(serve_grpc, tls, strangers):
    address = serve_grpc(tls)
    assert ask_grpc(address, tls) == b"hello"
    assert refused_grpc(address, strangers) == "UNAVAILABLE"
    assert refused_grpc(address, SecurityConfig()) == "UNAVAILABLE"
    without = grpc.ssl_channel_credentials(tls.ca.read_bytes())
    with grpc.secure_channel(address, without) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/test.Echo/unary")(b"x", timeout=10)


def test_grpc_callers_refuse_a_server_that_another_authority_signed(serve_grpc, tls, certificates):
    address = serve_grpc(
        replace(tls, cert=certificates / "other-node.crt", key=certificates / "other-node.key")
    )
    assert refused_grpc(address, tls) == "UNAVAILABLE"


def test_grpc_with_certificates_still_wants_the_token(serve_grpc, tls):
    address = serve_grpc(replace(tls, token=Secret("right")))
    assert ask_grpc(address, replace(tls, token=Secret("right"))) == b"hello"
    assert refused_grpc(address, replace(tls, token=Secret("wrong"))) == "UNAUTHENTICATED"
    assert refused_grpc(address, tls) == "UNAUTHENTICATED"


def test_a_name_in_the_certificate_may_replace_the_host(serve_grpc, tls):
    address = serve_grpc(tls)
    assert ask_grpc(address, replace(tls, server_name="localhost")) == b"hello"
    assert refused_grpc(address, replace(tls, server_name="somebody")) == "UNAVAILABLE"


def test_an_address_of_another_machine_is_an_error():
    server = grpc.server(ThreadPoolExecutor(1))
    with pytest.raises(ListenError, match="cannot listen on"):
        add_grpc_port(server, "192.0.2.1:1", Guard())


# Flight


class Echo(flight.FlightServerBase):  # type: ignore[misc, name-defined]
    def do_action(self, context, action):  # noqa: ARG002
        return iter([flight.Result(action.body.to_pybytes())])


@pytest.fixture
def serve_flight():
    servers = []

    def start(config: SecurityConfig, role: Role = "control") -> str:
        guard = guard_listener("127.0.0.1:0", config, role=role)
        server = Echo(flight_location("127.0.0.1:0", guard), **flight_server_options(guard, "echo"))
        servers.append(server)
        return f"127.0.0.1:{server.port}"

    yield start
    for server in servers:
        server.shutdown()


def ask_flight(address: str, config: SecurityConfig, role: Role = "control") -> bytes:
    guard = guard_caller(config).for_role(role)
    proof = guard.flight_proof("echo")
    middleware = [] if proof is None else [proof.middleware(flight)]
    options = flight_client_options(guard)
    with flight.FlightClient(flight_location(address, guard), middleware=middleware, **options) as client:
        if proof is not None:
            client.authenticate(proof.handshake(flight), flight.FlightCallOptions(timeout=10))
        (result,) = client.do_action(flight.Action("echo", b"hello"), flight.FlightCallOptions(timeout=10))
        answer: bytes = result.body.to_pybytes()
        return answer


def refused_flight(address: str, config: SecurityConfig, role: Role = "control") -> type[Exception]:
    with pytest.raises((flight.FlightError, UnprovedError)) as caught:
        ask_flight(address, config, role)
    return type(caught.value)


def test_flight_with_the_right_token_passes_and_without_it_not(serve_flight):
    address = serve_flight(TOKEN)
    assert ask_flight(address, TOKEN) == b"hello"
    assert refused_flight(address, SecurityConfig(token=Secret("wrong"))) is UnprovedError
    assert refused_flight(address, SecurityConfig()) is flight.FlightUnauthenticatedError


def test_flight_of_a_role_takes_its_token_or_the_control_token_and_no_other(serve_flight):
    address = serve_flight(TOKEN, role="follow")
    follow, predict = (SecurityConfig(follow_token=derive_token(Secret("right"), role)) for role in ROLES[1:])
    assert ask_flight(address, follow, role="follow") == b"hello"
    assert ask_flight(address, TOKEN, role="follow") == ask_flight(address, TOKEN) == b"hello"
    assert refused_flight(address, predict, role="follow") is UnprovedError
    control = serve_flight(TOKEN)
    assert refused_flight(control, follow, role="follow") is flight.FlightUnauthenticatedError


def test_flight_with_the_right_certificate_passes_and_without_it_not(serve_flight, tls, strangers):
    address = serve_flight(tls)
    assert ask_flight(address, tls) == b"hello"
    assert refused_flight(address, strangers) is flight.FlightUnavailableError
    assert refused_flight(address, SecurityConfig()) is flight.FlightUnavailableError
    only_ca = {"tls_root_certs": tls.ca.read_bytes()}
    with (
        flight.FlightClient(f"grpc+tls://{address}", **only_ca) as client,
        pytest.raises(flight.FlightUnavailableError),
    ):
        list(client.do_action(flight.Action("echo", b""), flight.FlightCallOptions(timeout=10)))


def test_flight_with_certificates_still_wants_the_token(serve_flight, tls):
    address = serve_flight(replace(tls, token=Secret("right")))
    assert ask_flight(address, replace(tls, token=Secret("right"))) == b"hello"
    assert refused_flight(address, tls) is flight.FlightUnauthenticatedError


# HTTP


def test_http_contexts_show_and_demand_certificates(tls):
    server, client = ssl_context(tls, server=True), ssl_context(tls, server=False)
    assert server is not None
    assert client is not None
    assert server.verify_mode == client.verify_mode == ssl.CERT_REQUIRED
    assert ssl_context(SecurityConfig(), server=True) is None


def test_a_key_of_another_certificate_is_an_error(tls, certificates):
    with pytest.raises(ConfigError, match="cannot use"):
        ssl_context(replace(tls, key=certificates / "other-node.key"), server=True)
