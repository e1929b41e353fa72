"""What the code above gRPC relies on: of the real package, and of the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contracts.grpc_ports import GrpcPorts, SimGrpcPorts

from monolith import concurrency
from monolith.cluster.security import Guard, add_grpc_port, grpc_channel, grpc_interceptors
from monolith.config import Secret
from monolith.errors import ListenError

Run = Callable[[Callable[[GrpcPorts], object]], None]


@pytest.fixture(params=[GrpcPorts, SimGrpcPorts], ids=["real", "simulated"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.param.run
    return found


def echo(data: bytes, _: Any) -> bytes:
    return data


def test_an_answer_is_what_the_handler_returned(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        def answer(data: bytes, context: Any) -> bytes:
            sent = dict(context.invocation_metadata())
            context.set_trailing_metadata((("told", "with the answer"),))
            assert context.peer().startswith("ipv4:")
            return data + sent["who"].encode()

        method = ports.method(ports.serve(answer)[1])
        assert method(b"for ", timeout=30, metadata=(("who", "ann"),)) == b"for ann"
        said, call = method.with_call(b"", timeout=30, metadata=(("who", "bo"),))
        assert (said, call.code()) == (b"bo", ports.lib.StatusCode.OK)
        assert dict(call.trailing_metadata()) == {"told": "with the answer"}

    run(play)


def test_messages_are_converted_by_the_callers_functions(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        channel = ports.channel(ports.serve(echo)[1])
        method = channel.unary_unary(
            "/contract.Service/Call", request_serializer=str.encode, response_deserializer=bytes.decode
        )
        assert method("text", timeout=30) == "text"

    run(play)


def test_an_abort_tells_its_code_details_and_metadata(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        def answer(_: bytes, context: Any) -> bytes:
            context.set_trailing_metadata((("retry", "1000"),))
            context.abort(ports.lib.StatusCode.RESOURCE_EXHAUSTED, "too many")
            raise AssertionError("abort raises")

        method = ports.method(ports.serve(answer)[1])
        error = ports.failure(lambda: method(b"", timeout=30))
        assert (error.code(), error.details()) == (ports.lib.StatusCode.RESOURCE_EXHAUSTED, "too many")
        assert dict(error.trailing_metadata()) == {"retry": "1000"}

    run(play)


@pytest.mark.parametrize(
    ("does", "code", "details"),
    [
        ("raise", "UNKNOWN", "Exception calling application: a bug"),
        ("nothing", "INTERNAL", "Failed to serialize response!"),
        ("set", "NOT_FOUND", "no such thing"),
        ("cancel", "CANCELLED", "CANCELLED"),
        ("long", "RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (5000000 vs. 4194304)"),
    ],
    ids=["raise", "nothing", "set", "cancel", "long"],
)
def test_a_handler_ends_its_call_in_other_ways(run: Run, does: str, code: str, details: str) -> None:
    def play(ports: GrpcPorts) -> None:
        def answer(_: bytes, context: Any) -> Any:
            if does == "raise":
                raise ValueError("a bug")
            if does == "set":
                context.set_code(ports.lib.StatusCode.NOT_FOUND)
                context.set_details("no such thing")
            if does == "cancel":
                context.cancel()
            return {"nothing": None, "long": b"x" * 5_000_000}.get(does, b"")

        error = ports.failure(lambda: ports.method(ports.serve(answer)[1])(b"", timeout=30))
        assert error.code().name == code
        assert details in error.details()

    run(play)


def test_an_unknown_method_and_a_message_that_is_too_large_are_refused(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        _, address = ports.serve(echo, options=[("grpc.max_receive_message_length", 100)])
        error = ports.failure(lambda: ports.method(address, "/contract.Service/Other")(b"", timeout=30))
        assert (error.code().name, error.details()) == ("UNIMPLEMENTED", "Method not found!")
        error = ports.failure(lambda: ports.method(address)(b"x" * 101, timeout=30))
        said = "SERVER: Received message larger than max (101 vs. 100)"
        assert (error.code().name, error.details()) == ("RESOURCE_EXHAUSTED", said)

    run(play)


def test_a_deadline_ends_the_call_on_both_sides(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        seen: list[Any] = []

        def answer(_: bytes, context: Any) -> bytes:
            seen.append(context.time_remaining())
            ports.until(lambda: not context.is_active())
            seen.append(context.is_active())
            return b"too late"

        method = ports.method(ports.serve(answer)[1])
        error = ports.failure(lambda: method(b"", timeout=0.5))
        assert (error.code().name, error.details()) == ("DEADLINE_EXCEEDED", "Deadline Exceeded")
        ports.until(lambda: len(seen) == 2)
        assert 0 < seen[0] <= 0.6, "the deadline counts from the arrival of the call"

    run(play)


def test_a_call_without_a_deadline_has_all_the_time(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        remaining: list[float] = []

        def answer(data: bytes, context: Any) -> bytes:
            remaining.append(context.time_remaining())
            return data

        assert ports.method(ports.serve(answer)[1])(b"a") == b"a"
        assert remaining[0] > 1e9

    run(play)


def test_a_cancelled_call_is_over_and_its_handler_can_see_it(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        seen: list[str] = []

        def answer(data: bytes, context: Any) -> bytes:
            seen.append("begun")
            ports.until(lambda: not context.is_active())
            seen.append("over")
            return data

        call = ports.method(ports.serve(answer)[1]).future(b"", timeout=60)
        ports.until(lambda: seen)
        assert not call.done()
        assert call.cancel()
        assert (call.cancelled(), call.code().name) == (True, "CANCELLED")
        with pytest.raises(ports.lib.FutureCancelledError):
            call.result()
        ports.until(lambda: seen == ["begun", "over"])

    run(play)


def test_calls_run_at_a_time_up_to_the_limit(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        go, begun = concurrency.Event(), []

        def answer(data: bytes, _: Any) -> bytes:
            begun.append(data)
            assert go.wait(60)
            return data

        method = ports.method(ports.serve(answer, maximum_concurrent_rpcs=2)[1])
        calls = [method.future(bytes([number]), timeout=60) for number in range(2)]
        ports.until(lambda: len(begun) == 2)
        error = ports.failure(lambda: method(b"x", timeout=60))
        assert (error.code().name, error.details()) == (
            "RESOURCE_EXHAUSTED",
            "Concurrent RPC limit exceeded!",
        )
        go.set()
        assert [call.result(60) for call in calls] == [b"\0", b"\1"]
        ports.until(lambda: method(b"y", timeout=60) == b"y")

    run(play)


def test_without_a_server_a_call_fails_at_once_and_one_that_comes_back_is_found(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        server, address = ports.serve(echo)
        method = ports.method(address)
        assert method(b"a", timeout=30) == b"a"
        server.stop(None).wait()
        assert ports.failure(lambda: method(b"", timeout=30)).code().name == "UNAVAILABLE"
        ports.serve(echo, port=int(address.rpartition(":")[2]))

        def answers() -> bool:
            try:
                return bool(method(b"b", timeout=30) == b"b")
            except ports.lib.RpcError:
                return False

        ports.until(answers)

    run(play)


def test_a_server_that_stops_answers_calls_under_way_and_refuses_new_ones(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        go, begun = concurrency.Event(), []

        def answer(data: bytes, _: Any) -> bytes:
            begun.append(data)
            assert go.wait(60)
            return data

        server, address = ports.serve(answer)
        method = ports.method(address)
        call = method.future(b"a", timeout=60)
        ports.until(lambda: begun)
        stopped = server.stop(30)
        assert ports.failure(lambda: ports.method(address)(b"", timeout=30)).code().name == "UNAVAILABLE"
        assert not stopped.is_set()
        go.set()
        assert call.result(60) == b"a"
        assert stopped.wait(30)

    run(play)


def test_calls_that_outlast_the_grace_of_a_stop_are_cancelled(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        seen: list[str] = []

        def answer(data: bytes, context: Any) -> bytes:
            seen.append("begun")
            ports.until(lambda: not context.is_active())
            seen.append("over")
            return data

        server, address = ports.serve(answer)
        call = ports.method(address).future(b"a", timeout=60)
        ports.until(lambda: seen)
        assert server.stop(0.2).wait(30)
        error = ports.failure(call.result)
        assert (error.code().name, error.details()) == ("UNAVAILABLE", "Cancelling all calls")
        ports.until(lambda: seen == ["begun", "over"])

    run(play)


def test_a_closed_channel_makes_no_calls(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        channel = ports.channel(ports.serve(echo)[1])
        method = channel.unary_unary("/contract.Service/Call")
        assert method(b"a", timeout=30) == b"a"
        channel.close()
        with pytest.raises(ValueError, match="closed channel"):
            method(b"a", timeout=30)

    run(play)


def test_a_port_that_is_taken_is_an_error(run: Run) -> None:
    def play(ports: GrpcPorts) -> None:
        options = [("grpc.so_reuseport", 0)]
        _, address = ports.serve(echo, options=options)
        other = ports.lib.server(concurrency.ThreadPoolExecutor(1), options=options)
        with pytest.raises(ListenError, match="cannot listen"):
            add_grpc_port(other, address, Guard())

    run(play)


def test_interceptors_admit_callers_with_the_token(run: Run) -> None:
    guard = Guard(token=Secret("of-the-run"))

    def play(ports: GrpcPorts) -> None:
        admitted: list[str] = []
        interceptors = grpc_interceptors(guard, 10.0, admitted.append)
        _, address = ports.serve(echo, interceptors=interceptors)
        for presented, code in ((guard, "OK"), (Guard(), "UNAUTHENTICATED")):
            channel = grpc_channel(address, presented)
            method = channel.unary_unary("/contract.Service/Call")
            if code == "OK":
                assert method(b"a", timeout=30) == b"a"
            else:
                error = ports.failure(lambda method=method: method(b"a", timeout=30))
                assert error.code().name == code
            channel.close()
        assert len(admitted) == 1

    run(play)
