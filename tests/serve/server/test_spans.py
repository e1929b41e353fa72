"""Requests that clients trace have a span, as a child of the client's; a collector receives it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serve.server.linear import one_model
from serve.server.serving import ask_http, rows_json, serving

from monolith.errors import RequestError
from monolith.serve import Client

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
sent = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextmanager
def collector(spans: list) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in sent.ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/v1/traces"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def attributes(span):
    return {one.key: one.value.string_value for one in span.attributes}


def test_a_traced_request_has_a_span_and_others_have_none():
    spans: list = []
    with collector(spans) as to, serving(one_model(), trace_to=to) as server:
        for headers in (
            {"traceparent": SAMPLED},
            {},
            {"traceparent": SAMPLED[:-1] + "0"},
            {"traceparent": "x"},
        ):
            path = "/v2/models/f/infer"
            assert ask_http(server.http_port, "POST", path, rows_json("a", id="q"), headers)[0] == 200
    (span,) = spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "infer f",
        *SAMPLED.split("-")[1:3],
    )
    assert attributes(span) == {
        "monolith.model": "f",
        "monolith.transport": "http",
        "monolith.version": "1",
        "monolith.request_id": "q",
    }


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_the_span_of_a_client_is_passed_on(transport):
    spans: list = []
    tracer = sdk.TracerProvider().get_tracer("test")
    with collector(spans) as to, serving(one_model(), trace_to=to) as server:
        url = server.http_url if transport == "http" else f"grpc://{server.grpc_address}"
        with Client(url) as client, tracer.start_as_current_span("page") as page:
            client.predict("f", [{"user": "ann"}])
            client.predict("f", [{"user": "ann"}], split_key="ann")
            with pytest.raises(RequestError):
                client.predict("f", [{"user": "bad"}])
    parent = page.get_span_context()
    assert len(spans) == 3
    assert {(int.from_bytes(one.trace_id), int.from_bytes(one.parent_span_id)) for one in spans} == {
        (parent.trace_id, parent.span_id)
    }
    assert [attributes(one).get("error.type") for one in spans] == [None, None, "invalid"]
    assert spans[2].status.code == 2
    assert attributes(spans[0])["monolith.transport"] == transport
