"""Spans of requests, for OpenTelemetry.

A client that traces its own work sends the header `traceparent` (W3C Trace Context). The server then records
a span for the request as a child of the client's, and sends it to a collector in the background. The client
decides: a request without the header, or whose trace is not sampled, is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from monolith import __version__
from monolith.errors import optional_package

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers over HTTP, and metadata over gRPC."""


class RequestSpans:
    """Records spans and sends them. Thread-safe.

    Args:
        to: The collector, for OTLP over HTTP: http://host:4318/v1/traces.
    """

    def __init__(self, to: str) -> None:
        with optional_package(
            "opentelemetry-exporter-otlp-proto-http",
            "otel",
            "sending spans (serve.trace_to)",
            "opentelemetry",
        ):
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._trace: Any = trace
        self._context = TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": "monolith-serve", "service.version": __version__})
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), resource=resource)
        # Sends from a thread of its own, and drops spans if the collector is too slow.
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=to)))
        self._tracer = self._provider.get_tracer("monolith.serve", __version__)

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Iterator[Any]:
        """Record a block as a child of the span that the headers name; yields what takes attributes."""
        with self._tracer.start_as_current_span(
            name,
            context=self._context.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,  # its text may quote what a client sent
        ) as span:
            yield span

    def close(self) -> None:
        """Send the spans that wait."""
        self._provider.shutdown()
