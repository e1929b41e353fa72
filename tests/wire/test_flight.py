"""Calls over Flight: JSON, records and bytes, in the name of whichever service they are."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from data.service.loopback import until

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    ListenError,
    OutOfMemoryError,
    RequestError,
    RetryableError,
    TableClosedError,
    TableError,
    UnavailableError,
)
from monolith.wire.endpoint import Handlers
from monolith.wire.flight import Caller, CallStream, StoppedError
from monolith.wire.flight_server import Server
from monolith.wire.ports import Limits
from monolith.wire.transport import Service

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.flight")

SERVICE = Service(
    name="echo service",
    peers="callers and echoes",
    failure=ClusterError,
    told=(TableError,),
    unreachable=UnavailableError,
    late=DeadlineExceededError,
)


def fail(body: dict[str, Any]) -> dict[str, Any]:
    kinds = {"told": TableError, "other": TableClosedError, "bug": RuntimeError, "memory": MemoryError}
    raise kinds[body["kind"]]("no")


def echo(body: dict[str, Any], data: np.ndarray) -> tuple[dict[str, Any], Any]:
    return {"said": body, "bytes": len(data)}, data


def answer_anew(_: dict[str, Any], __: np.ndarray) -> tuple[dict[str, Any], Any]:
    return {}, np.arange(3, dtype=np.float32)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, **options: Any) -> Server:
    exchanges = {
        "echo": echo,
        "new": answer_anew,
        "fail": lambda body, _: (fail(body), b""),
        **options.pop("exchanges", {}),
    }
    calls = {"echo": lambda body: body, "fail": fail, **options.pop("calls", {})}
    others = {
        name: options.pop(name) for name in ("polls", "fetch", "message", "out_of_memory") if name in options
    }
    server = Server(SERVICE, Handlers(calls=calls, exchanges=exchanges, **others), **options)
    stack.callback(server.close)
    return server


def call(stack: ExitStack, address: Any, **options: Any) -> Caller:
    return stack.enter_context(Caller(SERVICE, address, **options))


def plain_client(stack: ExitStack, server: Server) -> Any:
    """As a stranger has one."""
    return stack.enter_context(pa.flight.FlightClient(f"grpc+tcp://{server.address}"))


def open_stream(stack: ExitStack, server: Server) -> CallStream:
    stream = call(stack, server.address).open_stream()
    stack.callback(stream.close)
    return stream


# Small calls


def test_an_answer_is_what_the_function_returned(stack: ExitStack) -> None:
    caller = call(stack, serve(stack).address)
    assert caller.call("echo", name="x", self=[1, None]) == {"name": "x", "self": [1, None]}


def test_the_service_decides_which_errors_callers_see(stack: ExitStack) -> None:
    caller = call(stack, serve(stack).address)
    with pytest.raises(TableError, match=r"^no$"):
        caller.call("fail", kind="told")
    with pytest.raises(ClusterError, match=r"^no$"):
        caller.call("fail", kind="other")
    with pytest.raises(ClusterError, match="echo service: there is no call 'shout'; there are echo, fail"):
        caller.call("shout")


def test_after_a_bug_the_caller_learns_only_where_to_look_in_the_log(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caller = call(stack, serve(stack, calls={"odd": lambda _: {"never": object()}}).address)
    for name in ("fail", "odd"):
        with pytest.raises(ClusterError) as caught:
            caller.call(name, kind="bug")
        found = re.fullmatch(rf"echo service: {name} failed; see error (\w+) in its log", str(caught.value))
        assert found is not None
        assert f"(error {found[1]})" in caplog.text
    assert "Traceback" in caplog.text
    assert caller.call("echo", still="there") == {"still": "there"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b"[1]", b'"text"', b"null"]
)
def test_a_body_that_is_no_table_of_json_is_refused(stack: ExitStack, body: bytes) -> None:
    server = serve(stack, fetch=lambda ticket: ticket)
    client = plain_client(stack, server)
    (result,) = client.do_action(pa.flight.Action("echo", body))
    answer = json.loads(result.body.to_pybytes())
    assert answer["error"] == "RequestError"
    assert re.match("echo service: echo: its body ", answer["message"])
    reader = client.do_get(pa.flight.Ticket(body))
    assert b"RequestError" in reader.schema.metadata[b"monolith.answer"]


def test_calls_beyond_the_limits_are_refused(stack: ExitStack) -> None:
    limits = Limits(call_bytes=100, message_bytes=1000, calls=1)
    begun, go_on = threading.Event(), threading.Event()
    stack.callback(go_on.set)

    def wait(_: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        return {"done": go_on.wait(60)}

    server = serve(stack, limits=limits, calls={"wait": wait})
    caller, stream = call(stack, server.address), open_stream(stack, server)
    with pytest.raises(RequestError, match=r"^echo service: echo: it has 112 bytes, and limits.call_bytes"):
        caller.call("echo", text="x" * 100)
    with pytest.raises(RequestError, match=r"it has 1,001 bytes, and limits.message_bytes allows 1,000"):
        exchange(stream, "echo", {}, bytes(1001))
    assert exchange(stream, "echo", {}, bytes(1000))[0]["bytes"] == 1000
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call(stack, server.address).call, "wait")
        assert begun.wait(30)
        with pytest.raises(RequestError, match=r"1 calls are in progress, as many as limits.calls allows"):
            caller.call("echo")
        go_on.set()
        assert waiting.result() == {"done": True}
    assert caller.call("echo") == {}


def test_flight_methods_other_than_our_calls_tell_nothing(stack: ExitStack) -> None:
    client = plain_client(stack, serve(stack))
    descriptor = pa.flight.FlightDescriptor.for_path("x")

    def put() -> None:
        writer, _ = client.do_put(descriptor, pa.schema([]))
        writer.close()

    heard = []
    for ask in (
        lambda: list(client.list_flights()),
        lambda: list(client.list_actions()),
        lambda: client.get_flight_info(descriptor),
        put,
    ):
        with pytest.raises(pa.ArrowException) as caught:
            ask()
        heard.append(str(caught.value))
    assert client.get_schema(descriptor).schema.names == []
    assert not [said for said in heard if "Traceback" in said or ".py" in said]


@pytest.mark.parametrize(
    "schema",
    [pa.schema([]), pa.schema([("bytes", pa.string())]), pa.schema([("bytes", pa.list_(pa.uint8()))])],
)
def test_a_stream_of_another_shape_is_refused_and_the_server_continues(stack: ExitStack, schema: Any) -> None:
    server = serve(stack)
    writer, reader = plain_client(stack, server).do_exchange(pa.flight.FlightDescriptor.for_command(b""))
    writer.begin(schema)
    arrays = [pa.array([], field.type) for field in schema]
    writer.write_with_metadata(pa.RecordBatch.from_arrays(arrays, schema=schema), b'{"name": "echo"}')
    answer = json.loads(reader.read_chunk().app_metadata.to_pybytes())
    assert answer["error"] == "RequestError"
    writer.close()
    assert call(stack, server.address).call("echo") == {}


def test_a_fetch_that_fails_is_an_error_as_of_a_call(stack: ExitStack) -> None:
    caller = call(stack, serve(stack, fetch=fail).address)
    with pytest.raises(TableError, match=r"^no$"):
        caller.fetch({"kind": "told"})
    with pytest.raises(ClusterError, match=r"^echo service: fetch failed; see error"):
        caller.fetch({"kind": "bug"})
    with pytest.raises(RequestError, match="this server serves no records"):
        call(stack, serve(stack).address).fetch({})


def test_a_missing_server_is_the_services_own_error(stack: ExitStack) -> None:
    server = serve(stack)
    server.close()
    with pytest.raises(UnavailableError, match=f"^no answer from {server.address}"):
        call(stack, server.address).call("echo")


def test_an_answer_that_takes_too_long_is_the_services_own_error(stack: ExitStack) -> None:
    go_on = threading.Event()
    server = serve(stack, calls={"wait": lambda _: {"done": go_on.wait(60)}})
    stack.callback(go_on.set)
    with pytest.raises(DeadlineExceededError, match=f"^no answer from {server.address}"):
        call(stack, server.address, timeout=timedelta(seconds=0.1)).call("wait")


def test_an_unknown_address_is_looked_up_again(stack: ExitStack) -> None:
    server, asked = serve(stack), []

    def where() -> str:
        asked.append(1)
        if len(asked) < 3:
            raise RetryableError("not yet")
        return server.address

    assert call(stack, where, patience=timedelta(minutes=1)).call("echo", n=1) == {"n": 1}
    asked.clear()
    with pytest.raises(UnavailableError, match=r"^not yet$"):
        call(stack, where).call("echo")


def test_a_server_without_memory_says_so_and_is_told_to_end(stack: ExitStack) -> None:
    noted: list[BaseException] = []
    caller = call(stack, serve(stack, out_of_memory=noted.append).address)
    with pytest.raises(OutOfMemoryError, match=r"echo service: fail: it has no memory left, and ends"):
        caller.call("fail", kind="memory")
    stream = stack.enter_context(closing(caller.open_stream()))
    stream.send("fail", {"kind": "memory"})
    with pytest.raises(OutOfMemoryError, match=r"a request of a stream: it has no memory left, and ends"):
        stream.receive()
    assert [type(error) for error in noted] == [MemoryError, MemoryError]


def test_a_call_that_is_told_to_stop_stops(stack: ExitStack) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        call(stack, serve(stack).address, stops=(threading.Event(), stop)).call("echo")


def test_a_wrong_token_is_named_with_the_processes_that_must_agree(stack: ExitStack) -> None:
    server = serve(stack, guard=Guard(token=Secret("right")))
    wrong = call(stack, server.address, guard=Guard(token=Secret("wrong")))
    said = r"does not have this run's token: .*Give callers and echoes the same token"
    with pytest.raises(ConfigError, match=said):
        wrong.call("echo")
    with pytest.raises(ConfigError, match=said):
        exchange(wrong.open_stream(), "echo", {})
    with pytest.raises(ConfigError, match=r"refused the shared token\. Give callers and echoes the same one"):
        call(stack, server.address).call("echo")


def test_a_port_that_is_taken_is_the_services_problem(stack: ExitStack) -> None:
    server = serve(stack)
    with pytest.raises(ListenError, match=rf"echo service: cannot listen on .*:{server.port}: .* in use"):
        serve(stack, port=server.port)


def test_records_are_fetched_as_batches(stack: ExitStack) -> None:
    server = serve(stack, fetch=lambda ticket: pa.record_batch({"n": list(range(ticket["n"]))}))
    assert call(stack, server.address).fetch({"n": 3}).to_pydict() == {"n": [0, 1, 2]}


# Limits


def test_calls_of_too_many_bytes_together_are_told_to_retry(stack: ExitStack) -> None:
    busy, go = threading.Event(), threading.Event()

    def wait(_: dict[str, Any]) -> dict[str, Any]:
        busy.set()
        assert go.wait(20)
        return {}

    server = serve(stack, calls={"wait": wait}, limits=Limits(calls_bytes=1000))
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(call(stack, server.address).call, "wait", text="x" * 900)
        assert busy.wait(20)
        other = call(stack, server.address)
        with pytest.raises(RequestError, match=r"limits\.calls_bytes allows 1,000; retry later"):
            other.call("echo", text="x" * 900)
        assert other.call("echo", n=1) == {"n": 1}
        go.set()
        assert first.result(20) == {}
    text = "x" * 2000
    assert other.call("echo", text=text) == {"text": text}  # one alone may always be


@pytest.mark.parametrize("limit", ["streams", "peer_streams"])
def test_streams_beyond_the_limit_are_refused_until_one_is_closed(stack: ExitStack, limit: str) -> None:
    server = serve(stack, limits=Limits(**{limit: 2}))  # type: ignore[arg-type]
    streams = [open_stream(stack, server) for _ in range(2)]
    for stream in streams:
        assert exchange(stream, "echo", {}, b"12345678").body["bytes"] == 8
    with pytest.raises(UnavailableError, match=rf"limits\.{limit} allows; retry later"):
        exchange(open_stream(stack, server), "echo", {})
    streams.pop().close()

    def is_free() -> bool:
        try:
            return bool(exchange(open_stream(stack, server), "echo", {}).body)
        except UnavailableError:
            return False

    until(is_free)
    assert exchange(streams.pop(), "echo", {}, b"12345678").body["bytes"] == 8


# Bytes


def exchange(stream: CallStream, name: str, body: dict[str, Any], data: Any = b"") -> Any:
    stream.send(name, body, data)
    return stream.receive()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, 3_000_001])
def test_bytes_come_back_as_they_were_sent(stack: ExitStack, size: int) -> None:
    stream = open_stream(stack, serve(stack))
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    for turn in range(3):
        answer = exchange(stream, "echo", {"turn": turn}, data)
        assert answer.body == {"said": {"turn": turn}, "bytes": size}
        assert np.array_equal(answer.data, data)


def test_received_bytes_are_aligned_and_the_receivers_own(stack: ExitStack) -> None:
    stream = open_stream(stack, serve(stack))
    first = exchange(stream, "new", {}).data.view(np.float32)
    assert first.ctypes.data % 8 == 0
    first += 1
    assert exchange(stream, "new", {}).data.view(np.float32).tolist() == [0, 1, 2]
    assert first.tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [300_000, 640_000, 3_000_001])
@pytest.mark.parametrize("words", ["", "x" * 13, "y" * 200])
def test_large_messages_are_read_where_they_came(stack: ExitStack, size: int, words: str) -> None:
    """However long their header is: it is padded, so that the bytes after it are aligned."""
    stream = open_stream(stack, serve(stack))
    answer = exchange(stream, "echo", {"words": words}, np.zeros(size, np.uint8))
    assert answer.body["said"] == {"words": words}
    assert not answer.data.flags.owndata


def test_a_stream_continues_after_a_request_was_refused(stack: ExitStack) -> None:
    stream = open_stream(stack, serve(stack))
    with pytest.raises(TableError, match=r"^no$"):
        exchange(stream, "fail", {"kind": "told"})
    with pytest.raises(ClusterError, match=r"^echo service: a request of a stream failed; see error"):
        exchange(stream, "fail", {"kind": "bug"})
    with pytest.raises(ClusterError, match="there is no call 'shout'; there are echo, new, fail"):
        exchange(stream, "shout", {})
    assert not stream.broken
    assert exchange(stream, "echo", {}, b"ab").data.tobytes() == b"ab"


def test_streams_do_not_wait_for_each_other(stack: ExitStack) -> None:
    server = serve(stack)
    first, second = open_stream(stack, server), open_stream(stack, server)
    first.send("echo", {}, b"1")
    second.send("echo", {}, b"2")
    assert (second.receive().data.tobytes(), first.receive().data.tobytes()) == (b"2", b"1")


def test_a_stream_that_was_cancelled_says_why_and_is_broken(stack: ExitStack) -> None:
    stream = open_stream(stack, serve(stack))
    exchange(stream, "echo", {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.receive)  # nothing was asked, so nothing comes
        stream.cancel("enough")
        with pytest.raises(DeadlineExceededError, match=r"no answer from .*: enough"):
            waiting.result()
    assert stream.broken


def test_a_server_closes_when_requests_are_answered_though_callers_keep_their_streams(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(body: dict[str, Any], data: Any) -> tuple[dict[str, Any], Any]:
        begun.set()
        assert go_on.wait(60)
        return body, data

    monkeypatch.setattr("monolith.wire.flight_server._LINGER", 600.0)
    server = serve(stack, exchanges={"slow": slow})
    stream, _idle = open_stream(stack, server), open_stream(stack, server)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(exchange, stream, "slow", {})
        assert begun.wait(60)
        closing = pool.submit(server.close)
        assert server._closing.wait(60)
        assert not closing.done()
        go_on.set()
        answer.result(60)
        closing.result(60)


def test_a_server_that_closes_answers_no_more_requests(stack: ExitStack) -> None:
    server = serve(stack)
    stream = open_stream(stack, server)
    exchange(stream, "echo", {})
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close)
        assert server._closing.wait(60)
        with pytest.raises(UnavailableError, match=f"^no answer from {server.address}"):
            exchange(stream, "echo", {})
        stream.close()
        closing.result()
    assert stream.broken


def test_a_server_that_closes_releases_waiting_callers(stack: ExitStack) -> None:
    asked, never = threading.Event(), threading.Event()

    def wait(_: dict[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
        asked.set()
        while not gone():
            never.wait(0.01)
        return {"told": True}

    server = serve(stack, polls={"wait": wait})
    caller = call(stack, server.address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(caller.call, "wait")
        assert asked.wait(30)
        server.close()
        assert waiting.result(30) == {"told": True}
