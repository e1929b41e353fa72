"""Asks a process of ours over HTTP: no proxy, no redirect, a bound on the answer.

Where the page looks: the folder of a run, a process that trains or serves, or this process itself.

A source is asked every second or so, on a thread of its own, and says how it stands. It keeps what it needs
to turn counts into rates; what it said before is the board's to remember.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

from monolith.cluster.security import SecurityConfig, guard_caller, ssl_context
from monolith.cluster.status import FAILED, STATUS_PATH, JobStatus, ProcessStatus, Rates, describe_tiers
from monolith.errors import ConfigError, RequestError, UnavailableError
from monolith.observe.metrics import Scraped
from monolith.observe.progress import describe_seconds
from monolith.ui.board import PageSource
from monolith.ui.figures import (
    STAGE_HISTOGRAMS,
    STAGES,
    Chart,
    CurvePoint,
    ModelFigures,
    PageReading,
    ProcessFigures,
    PublishFigures,
    RecentHistograms,
    SplitFigures,
    StageFigures,
    TableFigures,
    axis_of,
)

ANSWER_SECONDS = 5.0
LARGEST_ANSWER = 16 << 20


class ProcessCaller:
    """Asks one process, on one thread.

    Args:
        url: http(s)://host:port; what follows is left out.
        security: What to show: a token, a certificate.

    Raises:
        ConfigError: It is no such URL, or a file of the security cannot be read.
    """

    def __init__(self, url: str, security: SecurityConfig) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as cause:
            raise ConfigError(f"ui: {url!r} is no URL of a process: {cause}") from cause
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise ConfigError(f"ui: {url!r} is no URL of a process; give http://host:port")
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self.name = f"{parts.scheme}://{parts.netloc}"
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._context = ssl_context(security, server=False) or ssl.create_default_context()
        header = guard_caller(security).header
        self._headers = {} if header is None else {"Authorization": header}

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return the status and the body of an answer.

        Raises:
            UnavailableError: There is none; or the process wants a token and was shown none, or another.
        """
        connection = self._connection()
        try:
            connection.request(method, path, body, {**self._headers, "Accept": "*/*"})
            answer = connection.getresponse()
            read = answer.read(LARGEST_ANSWER + 1)
        except (OSError, http.client.HTTPException) as cause:
            why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise UnavailableError(f"{self.name} cannot be reached: {why}") from cause
        finally:
            connection.close()
        if answer.status == 401:
            raise UnavailableError(f"{self.name} wants a token; start the page with --source-token-file")
        if len(read) > LARGEST_ANSWER:
            raise UnavailableError(f"{self.name}{path} answers with more than {LARGEST_ANSWER >> 20} MB")
        return answer.status, read

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=ANSWER_SECONDS, context=self._context
        )


KNOWN = ("run_info", "train_step", "serve_in_flight")
"""One of these has every process that we know how to show."""
MOST_SHOWN = 500
"""Tables, models, processes or checkpoints of one source."""
STILL_LOOKS = 5
"""After so many reads with more steps and no newer event, the event time does not advance."""
MOST_CURVES = 8
"""Of one chart of one source."""
MOST_METRICS = 24
"""Of one source, whichever charts they are on."""
MOST_FED = 10_000
"""Points that a feed keeps until it is read."""


# This process


class Feed:
    """What this process itself has to show, such as a demo. Thread-safe.

    Args:
        name: What the page calls it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards what follows
        self._points: deque[CurvePoint] = deque(maxlen=MOST_FED)
        self._note = ""

    @property
    def name(self) -> str:
        return self._name

    def add(self, chart: Chart, x: float, y: float, label: str = "") -> None:
        """Add a point to a curve; the page draws it within a second."""
        with self._lock:
            self._points.append(CurvePoint(chart, label, x, y))

    def say(self, note: str) -> None:
        """Put a line below the name, in place of the last."""
        with self._lock:
            self._note = note

    def read(self) -> PageReading:
        with self._lock:
            points = tuple(self._points)
            self._points.clear()
            return PageReading(kind="this process", note=self._note, points=points)

    publishing = None
    """It publishes nothing that the page can control."""
    set_split = None
    """It answers no requests."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


# A process


class ProcessSource:
    """A process that shows its metrics over HTTP: it trains, or it serves.

    Args:
        url: http(s)://host:port.
        clock: Unix seconds.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        name: str,
        url: str,
        security: SecurityConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._caller = ProcessCaller(url, security or SecurityConfig())
        self._clock = clock
        self._lately = RecentHistograms(clock=timer)
        self._rates = Rates(clock=timer)
        self._event_time: float | None = None
        self._step = 0.0
        self._still = 0
        """Reads in which the step advanced and the event time did not."""

    @property
    def name(self) -> str:
        return self._name

    def read(self) -> PageReading:
        status, text = self._caller.ask("GET", "/metrics")
        if status != 200:
            raise UnavailableError(f"{self._caller.name}/metrics answers {status}")
        try:
            scraped = Scraped(text, None, known=KNOWN)
        except RequestError as cause:
            raise UnavailableError(f"{self._caller.name}/metrics is of something else: {cause}") from cause
        if "serve_in_flight" in scraped:
            return self._server(scraped)
        return self._trainer(scraped)

    publishing = None
    """It publishes nothing that the page can control."""

    def set_split(self, name: str, targets: str) -> None:
        """Have the server divide the requests for a name in another way; needs its control token.

        Raises:
            RequestError: The server refuses; gives its reason.
            UnavailableError: The server cannot be reached.
        """
        body = json.dumps({"targets": targets}).encode()
        status, text = self._caller.ask("POST", f"/v2/splits/{quote(name, safe='')}", body)
        if status != 200:
            said = _read_json(text)
            why = said.get("error") if isinstance(said, dict) else None
            raise RequestError(
                f"{self._caller.name} answers {status}: {str(why or 'it gives no reason')[:500]}"
            )

    def close(self) -> None:
        """Do nothing: no connection is kept between two reads."""

    def trained(self, scraped: Scraped, now: float) -> list[CurvePoint]:
        """Return the points of a process that trains."""
        chart, at = self._place(scraped)
        metrics = sorted(scraped.by("train_metric", "metric").items())
        points = [
            CurvePoint(chart, metric.rpartition("/")[0], at, value)
            for metric, value in metrics
            if is_auc(metric)
        ][:MOST_CURVES]
        step, loss = scraped.value("train_step"), scraped.value("train_loss")
        others = [] if loss is None else [("loss", loss)]
        others += [(metric, value) for metric, value in metrics if not is_auc(metric)]
        if step is not None:
            points += [
                CurvePoint(chart_of("online", metric), metric.rpartition("/")[0], step, value)
                for metric, value in others[:MOST_METRICS]
            ]
        if (speed := scraped.value("train_examples_per_s")) is not None:
            points.append(CurvePoint("examples", "", now, speed))
        return points

    def stages(self, scraped: Scraped) -> list[StageFigures]:
        """Return how long events took for each stage that the process knows of."""
        found: dict[str, dict[float, float]] = {}
        for name in STAGE_HISTOGRAMS:
            found = {**scraped.histograms(name, "stage"), **found}
        return [
            StageFigures(stage=stage, seconds=self._lately.of(f"stage {stage}", found[stage]))
            for stage in STAGES
            if stage in found
        ]

    def _place(self, scraped: Scraped) -> tuple[Chart, float]:
        """Return the axis of quality curves: event time, or the step if event time does not advance.

        A file that is read again and again has the same newest event in each epoch.
        """
        event_time, step = scraped.value("train_event_time_seconds"), scraped.value("train_step") or 0.0
        moved = event_time != self._event_time or step == self._step
        self._still = 0 if moved else self._still + 1
        self._event_time, self._step = event_time, step
        if not event_time or self._still >= STILL_LOOKS:
            return "auc_by_step", step
        return "auc", event_time

    def _trainer(self, scraped: Scraped) -> PageReading:
        job = self._job()
        if job is None and not any(name in scraped for name in KNOWN):
            raise UnavailableError(
                f"{self._caller.name} is neither a run (`monolith train --metrics-port`) nor a server "
                "(`monolith serve`)"
            )
        now = self._clock()
        step, loss = scraped.value("train_step"), scraped.value("train_loss")
        behind = scraped.value("train_event_time_lag_seconds")
        facts = {
            "step": None if step is None else f"{step:,.0f}",
            "loss": None if loss is None else f"{loss:.4f}",
            "behind": None if behind is None else _describe_lag(behind),
        }
        return PageReading(
            kind="trainer",
            facts={name: value for name, value in facts.items() if value is not None}
            | ({} if job is None else tier_facts(job)),
            points=self.trained(scraped, now),
            tables=table_figures(scraped),
            stages=self.stages(scraped),
            publish=_published(scraped),
            processes=[] if job is None else process_figures(job),
        )

    def _server(self, scraped: Scraped) -> PageReading:
        now = self._clock()
        counts = {
            "requests": scraped.value("serve_requests_total") or 0.0,
            "rows": scraped.value("serve_rows_total") or 0.0,
        }
        grown = self._rates.of(counts)
        points = [] if "requests" not in grown else [CurvePoint("requests", "", now, grown["requests"])]
        for model, buckets in sorted(scraped.histograms("serve_request_seconds", "model").items()):
            if len(points) > MOST_CURVES:
                break
            took = self._lately.of(f"latency {model}", buckets)
            points += [
                CurvePoint("latency", f"{model} {which}", now, seconds * 1e3)
                for which, seconds in (("p50", took.p50), ("p99", took.p99))
                if seconds is not None
            ]
        refused = sum(
            one.value for one in scraped.samples("serve_requests_total") if one.labels.get("code") != "ok"
        )
        stale = [one.value for one in scraped.samples("serve_staleness_seconds")]
        return PageReading(
            kind="server",
            note=_followed(scraped),
            facts={
                "requests": f"{counts['requests']:,.0f}",
                "rows": f"{counts['rows']:,.0f}",
                **({"refused": f"{refused:,.0f}"} if refused else {}),
                **({"staleness": f"{max(stale):,.1f} s"} if stale else {}),
            },
            points=points,
            stages=self.stages(scraped),
            models=self._models(),
            splits=self._splits(),
        )

    def _job(self) -> JobStatus | None:
        status, text = self._caller.ask("GET", STATUS_PATH)
        if status != 200:
            return None
        try:
            return JobStatus.from_json(text)
        except RequestError:
            return None  # a process of a library user, whose port has metrics only

    def _splits(self) -> list[SplitFigures]:
        status, text = self._caller.ask("GET", "/v2/splits")
        found = _read_json(text) if status == 200 else None
        if not isinstance(found, dict):
            return []  # a server of an earlier version
        return [
            SplitFigures(name=name[:500], targets=str(targets)[:2000])
            for name, targets in sorted(found.items())[:MOST_SHOWN]
        ]

    def _models(self) -> list[ModelFigures]:
        status, text = self._caller.ask("POST", "/v2/repository/index")
        if status != 200:
            return []
        try:
            found = json.loads(text)
            return [
                ModelFigures(**{key: str(one[key])[:500] for key in ("name", "version", "state", "reason")})
                for one in found[:MOST_SHOWN]
            ]
        except (ValueError, KeyError, TypeError):
            return []


def _read_json(text: bytes) -> Any:
    """Return what a text holds; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _published(scraped: Scraped) -> PublishFigures | None:
    """Return whether a run holds its publishing back, which is all that its metrics say of it."""
    held = [one.value for one in scraped.samples("publish_held")]
    reason = "its model_dir, as another source, says why" if any(held) else ""
    return PublishFigures(held=any(held), reason=reason) if held else None


def _followed(scraped: Scraped) -> str:
    """Return what a person should know of what a server follows."""
    if scraped.value("serve_rolled_back"):
        return "rolled back: an older version is served until publishing is resumed"
    return "the trainer has paused publishing" if scraped.value("serve_follow_paused") else ""


def table_figures(scraped: Scraped) -> list[TableFigures]:
    """Return what a process says of its tables, those with the most rows first."""
    names = ("rows", "bytes", "births", "filtered", "refused", "expired")
    found = {name: scraped.by(f"table_{name}", "table") for name in names}
    tables = {table for values in found.values() for table in values}
    figures = [
        TableFigures(table=table, **{name: found[name].get(table) for name in names}) for table in tables
    ]
    return sorted(figures, key=lambda one: (-(one.rows or 0), one.table))[:MOST_SHOWN]


def tier_facts(job: JobStatus) -> dict[str, str]:
    """Return what a job says of its tiered tables; nothing if it has none."""
    line = describe_tiers(one.tiers for one in job.processes if not one.is_silent(job.time))
    return {"tiered tables": line} if line else {}


def process_figures(job: JobStatus) -> list[ProcessFigures]:
    """Return the processes of a job, those in trouble first."""
    figures = [_process(one, job.time) for one in job.processes]
    return sorted(figures, key=lambda one: not one.trouble)[:MOST_SHOWN]


def _process(one: ProcessStatus, now: float) -> ProcessFigures:
    silent = one.is_silent(now)
    return ProcessFigures(
        name=one.name,
        state=f"silent for {one.age(now):.0f} s" if silent and one.state != FAILED else one.state,
        place=one.address or (f"{one.host} pid {one.pid}" if one.pid else ""),
        trouble=silent or bool(one.save_trouble) or one.state == FAILED or one.state.startswith("no step"),
        step=one.step,
        examples_per_s=one.examples_per_s,
        lag_seconds=one.lag_seconds,
        rows=one.rows,
        bytes=one.bytes,
        restarts=one.restarts,
        failovers=one.failovers,
    )


def is_auc(metric: str) -> bool:
    """Whether "head/metric" is an AUC."""
    return metric.rpartition("/")[2] == "auc"


def chart_of(base: str, metric: str) -> Chart:
    """Return the chart of a metric: an AUC is on the base chart, and each other scale has axes of its own."""
    return base if is_auc(metric) else f"{base}:{axis_of(metric)}"


def _describe_lag(seconds: float) -> str:
    days = seconds / 86_400
    return f"{days:,.0f} days" if days >= 2 else describe_seconds(seconds)


# By what people write


def source_of(text: str, security: SecurityConfig | None = None) -> PageSource:
    """Return the source that a person names: RUN, URL, NAME=RUN or NAME=URL.

    Raises:
        ConfigError: It is neither a folder nor a URL of HTTP.
    """
    from monolith.ui.run_source import RunSource

    name, separator, place = text.partition("=")
    if not separator or "/" in name or not name:
        name, place = "", text
    if not place:
        raise ConfigError(f"ui: {text!r} names no run and no URL; give RUN, URL, NAME=RUN or NAME=URL")
    if place.startswith(("http://", "https://")):
        return ProcessSource(name or place.partition("://")[2].partition("/")[0], place, security)
    if "://" in place and place.startswith(("grpc", "kafka")):
        raise ConfigError(f"ui: {place!r} is not a place the page can look at; give the http:// address")
    return RunSource(name or place.rstrip("/").rpartition("/")[2] or place, place, security)
