"""Metrics: numbers that a Prometheus server collects, and that our own commands read back.

A `Metrics` is a registry of its own, passed to the code that counts. Nothing is registered globally, so
two in one process (a test, a trainer next to its parameter server) stay separate. `Scraped` parses the
text that a process serves at `/metrics`.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from socketserver import TCPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from monolith import concurrency
from monolith.errors import ConfigError, ListenError

if TYPE_CHECKING:
    import ssl
    from wsgiref.simple_server import WSGIServer

    import prometheus_client
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from monolith.errors import RequestError

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds that suit most durations, from a lookup to a slow step."""
CALLER_SECONDS = 10
"""How long a caller of /metrics may keep silent before it is hung up on."""


class _Metric:
    """A family of series: one per combination of label values."""

    def __init__(self, name: str, labels: tuple[str, ...], family: object) -> None:
        self.name = name
        self.labels = labels
        self._family = family

    def _check(self, given: dict[str, str]) -> None:
        if given.keys() != set(self.labels):
            raise ConfigError(
                f"metric {self.name!r} takes the labels {list(self.labels)}, got {sorted(given)}; "
                "give a value for each of them and for no other"
            )


class Counter(_Metric):
    """A number that only grows."""

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Add `amount`, which is not negative, to the series with these label values."""
        self._check(labels)
        if amount < 0:
            raise ConfigError(
                f"counter {self.name!r} can only increase, got {amount}; use a gauge for what decreases"
            )
        family = cast("prometheus_client.Counter", self._family)
        (family.labels(**labels) if labels else family).inc(amount)

    def series(self, **labels: str) -> Callable[[float], None]:
        """Return a function that adds to one series; for frequent calls, since labels are looked up once."""
        self._check(labels)
        family = cast("prometheus_client.Counter", self._family)
        return (family.labels(**labels) if labels else family).inc


class Gauge(_Metric):
    """A number that goes up and down."""

    def set(self, value: float, **labels: str) -> None:
        """Make `value` the current one of the series with these label values."""
        self._check(labels)
        family = cast("prometheus_client.Gauge", self._family)
        (family.labels(**labels) if labels else family).set(value)

    def read_from(self, value: Callable[[], float], **labels: str) -> None:
        """Ask for the current value whenever metrics are read, from the thread that reads them."""
        self._check(labels)
        family = cast("prometheus_client.Gauge", self._family)
        (family.labels(**labels) if labels else family).set_function(value)


class Histogram(_Metric):
    """How often a value fell into each of a few buckets."""

    def observe(self, value: float, **labels: str) -> None:
        """Count `value` in the series with these label values."""
        self._check(labels)
        family = cast("prometheus_client.Histogram", self._family)
        (family.labels(**labels) if labels else family).observe(value)

    def series(self, **labels: str) -> Callable[[float], None]:
        """Return a function that counts in one series; labels are looked up once."""
        self._check(labels)
        family = cast("prometheus_client.Histogram", self._family)
        return (family.labels(**labels) if labels else family).observe


M = TypeVar("M", bound=_Metric)


class Metrics:
    """The metrics of one process. Thread-safe.

    Asking twice for a metric gives the same one, so a name may be asked for where it
    is used. A name cannot change its kind, labels or buckets.
    """

    def __init__(self, prefix: str = "monolith") -> None:
        """
        Args:
            prefix: Comes before every name. Dots and dashes become underscores, which is
                all that Prometheus allows: "monolith.training" counts as "monolith_training".
        """
        from prometheus_client import CollectorRegistry

        self._prefix = re.sub(r"[.-]", "_", prefix)
        self._registry = CollectorRegistry()
        self._lock = concurrency.Lock()  # guards _known
        self._known: dict[str, tuple[tuple[object, ...], _Metric]] = {}

    def counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Counter:
        """A counter; Prometheus shows it as `<prefix>_<name>_total`."""
        from prometheus_client import Counter as Family

        return self._get(Counter, Family, name, description, labels)

    def gauge(self, name: str, description: str, labels: Sequence[str] = ()) -> Gauge:
        """A gauge, shown as `<prefix>_<name>`."""
        from prometheus_client import Gauge as Family

        return self._get(Gauge, Family, name, description, labels)

    def histogram(
        self,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """A histogram whose `buckets` are rising upper bounds; one for the rest is added."""
        from prometheus_client import Histogram as Family

        return self._get(Histogram, Family, name, description, labels, buckets=tuple(buckets))

    def render(self) -> bytes:
        """Every metric in the Prometheus text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def serve(
        self,
        port: int,
        address: str = "127.0.0.1",
        *,
        context: ssl.SSLContext | None = None,
        admits: Callable[[str], bool] | None = None,
        pages: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> MetricsServer:
        """Answer `/metrics` from background threads until the server is closed.

        Args:
            port: 0 lets the system choose; the server knows which.
            address: By default only this machine can connect. For another address, restrict clients by
                `context` or `admits`.
            context: Of a server, for TLS; it may ask callers for a certificate.
            admits: Whether a caller with this "authorization" header, "" for none, is answered.
            pages: Other paths, such as "/status", and what makes the JSON to answer with, on any thread.

        Raises:
            ListenError: The port is taken, or this process may not have it.
        """
        from prometheus_client import make_wsgi_app

        answer = _with_pages(make_wsgi_app(self._registry), pages or {})
        try:
            server = _server(port, address, answer if admits is None else _guarded(answer, admits))
        except (OSError, OverflowError) as cause:
            raise _listen_error(port, address, cause) from cause
        if context is not None:
            # Shaking hands is left to the thread of each caller: a slow one does not delay the next.
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        return MetricsServer(server, "http" if context is None else "https")

    def _get(
        self,
        kind: type[M],
        family: type[prometheus_client.Counter | prometheus_client.Gauge | prometheus_client.Histogram],
        name: str,
        description: str,
        labels: Sequence[str],
        **options: object,
    ) -> M:
        full = f"{self._prefix}_{name}" if self._prefix else name
        shape = (kind, tuple(labels), *options.values())
        with self._lock:
            if full in self._known:
                known, metric = self._known[full]
                if known != shape:
                    raise ConfigError(
                        f"metric {full!r} already exists as a {type(metric).__name__.lower()} with the "
                        f"labels {list(metric.labels)} and cannot also be a {kind.__name__.lower()} with "
                        f"{list(labels)} {options or ''}".rstrip()
                        + "; choose another name"
                    )
                return cast(M, metric)
            if not _NAME.fullmatch(full):
                raise ConfigError(
                    f"{full!r} is not a valid metric name: use letters, digits, underscores, a letter first"
                )
            try:
                made = family(full, description, tuple(labels), registry=self._registry, **options)  # type: ignore[arg-type]
            except ValueError as cause:
                raise ConfigError(f"cannot make metric {full!r}: {cause}") from cause
            metric = kind(full, tuple(labels), made)
            self._known[full] = (shape, metric)
            return metric


class MetricsServer:
    """A running `/metrics` endpoint; close it, or use it in a `with`."""

    def __init__(self, server: WSGIServer, scheme: str) -> None:
        self._server = server
        self.address = str(server.server_address[0])
        self.port = int(server.server_address[1])
        host = f"[{self.address}]" if ":" in self.address else self.address
        self.url = f"{scheme}://{host}:{self.port}/metrics"
        self._thread = concurrency.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; closing again does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""As WSGI has it."""


def _with_pages(answer: App, pages: Mapping[str, Callable[[], bytes]]) -> App:
    """Answer some paths with JSON, and all others as before."""

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        make = pages.get(environ.get("PATH_INFO", ""))
        if make is None:
            return answer(environ, start)
        page = make()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(page)))])
        return [page]

    return app


def _guarded(answer: App, admits: Callable[[str], bool]) -> App:
    """Answer only admitted callers."""

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if admits(environ.get("HTTP_AUTHORIZATION", "")):
            return answer(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"the shared token is missing or wrong\n"]

    return app


def _server(port: int, address: str, app: App) -> WSGIServer:
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    family, _, _, _, place = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]

    class Server(ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True

        def server_bind(self) -> None:
            # As WSGIServer does, less a question to DNS for the name of the address.
            TCPServer.server_bind(self)
            self.server_name, self.server_port = str(place[0]), int(self.server_address[1])
            self.setup_environ()

        def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
            _log.debug("answering a request for /metrics failed", exc_info=True)

    class Handler(WSGIRequestHandler):
        timeout = CALLER_SECONDS

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing: a log has no use for every scrape."""

    return make_server(str(place[0]), port, app, Server, Handler)


def _listen_error(port: int, address: str, cause: OSError | OverflowError) -> ListenError:
    doing = f"cannot serve metrics on {address}:{port}: "
    number = getattr(cause, "errno", None)
    if number == errno.EADDRINUSE:
        error = ListenError(
            doing + f"port {port} is in use by another process. Choose another port, or 0 for any free one; "
            f"`ss -ltnp 'sport = :{port}'` shows the process that has it."
        )
    elif number == errno.EACCES:
        error = ListenError(
            doing + "this user may not listen there. Ports below 1024 need privileges; choose one above."
        )
    elif isinstance(cause, OverflowError):
        error = ListenError(doing + "a port is a number from 0 to 65535.")
    else:
        error = ListenError(
            doing + f"{cause}. Choose an address of this machine, such as 127.0.0.1 or 0.0.0.0."
        )
    error.errno = number
    return error


MOST_SAMPLES = 100_000


class Sample(NamedTuple):
    """One number."""

    labels: Mapping[str, str]
    value: float


class Scraped:
    """The metrics of a process at one moment.

    Args:
        text: In the Prometheus text format.
        prefix: Of the names that are asked for, without it. None takes that of `known`.
        known: Names of which a process has at least one, whatever its prefix is.
        most: Numbers that are taken.

    Raises:
        RequestError: It is something else, or too much.
    """

    def __init__(
        self,
        text: bytes,
        prefix: str | None = "monolith",
        *,
        known: Sequence[str] = (),
        most: int = MOST_SAMPLES,
    ) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[Sample]] = defaultdict(list)
        count = 0
        try:
            for family in text_string_to_metric_families(text.decode()):
                for name, labels, value, *_ in family.samples:
                    count += 1
                    if count > most:
                        raise RequestError(f"it has more than {most} numbers")
                    self._samples[name].append(Sample(labels, float(value)))
        except RequestError:
            raise
        except Exception as cause:  # the parser raises what it happens to stumble over
            raise RequestError("it does not read as metrics of Prometheus") from cause
        if prefix is None:
            ends = tuple(f"_{name}" for name in known)
            found = next((name for name in self._samples if name.endswith(ends)), "")
            prefix = next((found.removesuffix(end) for end in ends if found.endswith(end)), "monolith")
        self._prefix = f"{prefix}_"

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def samples(self, name: str) -> Sequence[Sample]:
        """Return the series of a name, those that are NaN left out."""
        found = self._samples.get(self._prefix + name, ())
        return [one for one in found if not math.isnan(one.value)]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with these labels; None if there are none."""
        found = [one.value for one in self.samples(name) if labels.items() <= one.labels.items()]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return what the series sum up to, by the value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.samples(name):
            if label in labels:
                sums[labels[label]] += value
        return dict(sums)

    def histograms(self, name: str, label: str) -> dict[str, dict[float, float]]:
        """Return histograms by the value of a label: upper bound to how many are up to it, the last one inf.

        Series that differ in other labels are added up.
        """
        found: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for value, bound, count in self._buckets(name, label):
            found[value][bound] += count
        return {value: dict(sorted(buckets.items())) for value, buckets in found.items()}

    def _buckets(self, name: str, label: str) -> Iterator[tuple[str, float, float]]:
        for labels, count in self.samples(f"{name}_bucket"):
            try:
                yield labels[label], float(labels["le"]), count
            except (KeyError, ValueError):
                continue  # of another label, or no bucket
