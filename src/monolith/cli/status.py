"""`monolith status RUN|URL`: how a training job is doing, once; `monolith status watch`: the same, refreshed.

The processes of a run report their status themselves, see `monolith.cluster.status`; no request reaches a
process that trains. A process that stops reporting stays on the list, and comes first.
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from monolith import filesystem
from monolith.cli.options.jobs import Sort, StatusOptions, TopOptions
from monolith.cluster.security import SecurityConfig, guard_caller, ssl_context
from monolith.cluster.status import (
    FAILED,
    MOST_PROCESSES,
    STATUS_PATH,
    JobStatus,
    ProcessStatus,
    Role,
    StatusBoard,
    describe_tiers,
)
from monolith.errors import ConfigError, MonolithError, RequestError, UnavailableError
from monolith.observe.progress import describe_bytes, describe_count, describe_part, describe_seconds

SHOWN_WITHOUT_TERMINAL = 50
LAGS = 600.0
"""Seconds behind the clock that are worth a colour."""
GOES_ON = "publishing"
"""The state of publishing that is not paused."""
MISSING = "not seen yet"
"""The state of a process that others count on, and that has said nothing."""
_CHROME = 7
"""Lines of a frame that are not processes."""

# What is wrong


def severity(status: ProcessStatus, now: float) -> int:
    """Return how much trouble a process is in; 0 for none."""
    if status.state == FAILED:
        return 4
    if status.is_silent(now):
        return 3
    if status.state == MISSING or status.state.startswith("no step"):
        return 2
    return int(bool(status.save_trouble) or status.state in ("rejoining", "without a chief"))


def is_well(job: JobStatus) -> bool:
    """Whether there is no process in trouble."""
    return not job.unreadable and not any(severity(one, job.time) for one in members(job))


def members(job: JobStatus) -> list[ProcessStatus]:
    """Return the processes of a job, with those that other processes expect and that have not reported yet.

    What a larger run left behind that had the folder before is left out.
    """
    now = job.time
    live = [one for one in job.processes if not one.is_silent(now)] or list(job.processes)
    if not live:
        return []
    first = max(live, key=lambda one: one.started)
    counts: dict[Role, int] = {"worker": first.num_workers, "ps": first.num_ps}
    known = {(one.role, one.index) for one in job.processes}
    absent = [
        ProcessStatus(
            role=role,
            index=index,
            state=MISSING,
            time=job.time,
            every=first.every,
            started=job.time,
        )
        for role, count in counts.items()
        for index in range(min(count, MOST_PROCESSES))
        if (role, index) not in known
    ]
    there = [
        one
        for one in job.processes
        if one.index < counts.get(one.role, MOST_PROCESSES) or not one.is_silent(now)
    ]
    return [*there, *absent]


# How it looks

_Value = Callable[[ProcessStatus, float], float | None]

_MEASURES: Mapping[str, _Value] = {
    "examples": lambda one, _: one.examples_per_s,
    "steps": lambda one, _: one.steps_per_s,
    "lag": lambda one, _: one.lag_seconds,
    "staleness": lambda one, _: one.staleness,
    "rows": lambda one, _: one.rows,
    "bytes": lambda one, _: one.bytes,
    "restarts": lambda one, _: one.restarts + one.failovers,
    "age": lambda one, now: one.age(now),
}


def ordered(processes: Sequence[ProcessStatus], sort: Sort, now: float) -> list[ProcessStatus]:
    """Return processes in the order they are shown in; where they are equal, workers first, by number."""

    def name(one: ProcessStatus) -> tuple[bool, int]:
        return one.role != "worker", one.index

    if sort == "name":
        return sorted(processes, key=name)
    if sort == "worst":
        return sorted(processes, key=lambda one: (*_trouble(one, now), *name(one)))
    measure = _MEASURES[sort]

    def most(one: ProcessStatus) -> tuple[float, bool, int]:
        value = measure(one, now)
        return (float("inf") if value is None else -value, *name(one))

    return sorted(processes, key=most)


def _trouble(one: ProcessStatus, now: float) -> tuple[float, ...]:
    """Return less for a process that is worse off: in trouble, for longer, after more of it."""
    how_bad = severity(one, now)
    return -how_bad, -one.age(now) if how_bad else 0.0, -one.restarts - one.failovers


def frame(
    job: JobStatus,
    options: TopOptions,
    name: str,
    *,
    width: int,
    height: int | None,
    problem: str | None = None,
) -> RenderableType:
    """Return one picture of a job.

    Args:
        name: Of where it comes from.
        height: Lines there are; None for a file, which has no end.
        problem: Why the job cannot be read now.
    """
    processes = ordered(members(job), options.sort, job.time)
    limit = options.rows
    if limit is None:
        chrome = _CHROME + len(published(job)) + len(without_standby(job))
        chrome += len(tiered(job)) + any(one.save_trouble for one in members(job))
        limit = SHOWN_WITHOUT_TERMINAL if height is None else max(height - chrome, 3)
    shown = processes[: limit or None]
    parts: list[RenderableType] = [Text(f"{name}  {_job_name(job)}".rstrip(), style="bold")]
    if problem is not None:
        parts.append(Text(problem, style="bold red"))
    parts.append(Text(totals(job)))
    parts += [Text(line) for line in tiered(job)]
    parts += [Text(one.save_trouble, style="bold red") for one in members(job) if one.save_trouble][:1]
    parts += [Text(line, style="" if line == GOES_ON else "bold red") for line in published(job)]
    parts += [Text(line, style="bold red") for line in without_standby(job)]
    if shown:
        parts.append(_table(shown, job.time, width))
    rest: list[str] = []
    if len(processes) > len(shown):
        troubled = sum(severity(one, job.time) > 0 for one in processes[len(shown) :])
        rest.append(
            f"... and {len(processes) - len(shown):,} more"
            + (f", {troubled:,} of them in trouble" if troubled else "")
            + "; --rows 0 shows all, --sort changes who comes first"
        )
    if job.unreadable:
        rest.append(f"{job.unreadable:,} status files cannot be read: damaged, or of another version")
    parts += [Text(line, style="dim") for line in rest]
    return Group(*parts)


def totals(job: JobStatus) -> str:
    """Return the whole job in two lines."""
    processes, now = members(job), job.time
    reporting = [one for one in processes if severity(one, now) < 2]
    counts = []
    words = {
        "worker": "workers",
        "ps": "servers",
        "dispatcher": "dispatchers",
        "data_worker": "data workers",
    }
    for role, word in words.items():
        of_role = [one for one in processes if one.role == role]
        if of_role:
            well = sum(severity(one, now) < 2 for one in of_role)
            counts.append(f"{well:,} of {len(of_role):,} {word}")
    saved = [one.saved_at for one in processes if one.saved_at is not None]
    lag = [one.lag_seconds for one in reporting if one.lag_seconds is not None]
    stale = [one.staleness for one in reporting if one.staleness is not None]
    read = [one.data_read for one in reporting if one.data_read is not None]
    left = [one.seconds_left for one in reporting if one.seconds_left is not None]
    first = [
        ", ".join(counts) or "no process",
        f"step {max((one.step for one in processes if one.step is not None), default=0):,}",
        f"{_sum(one.examples_per_s for one in reporting if one.role == 'worker')} examples/s",
        f"{_sum(one.steps_per_s for one in reporting if one.role == 'worker')} steps/s",
        f"{_count(sum(one.rows or 0 for one in processes))} rows",
        describe_bytes(sum(one.bytes or 0 for one in processes)),
    ]
    second = [
        f"{describe_part(sum(read) / len(read))} of the data" if read else "",
        f"{_time(max(left))} left" if left else "",
        f"behind {_time(max(lag))}" if lag else "",
        f"staleness up to {max(stale):.1f}" if stale else "",
        f"wire {_wire(reporting)}" if _wire(reporting) else "",
        f"restarts {sum(one.restarts for one in processes):,}",
        f"failovers {max((one.failovers for one in processes), default=0):,}",
        f"checkpoint {_time(now - max(saved))} ago" if saved else "no checkpoint by this start yet",
    ]
    return "  ".join(first) + "\n" + "  ".join(part for part in second if part)


def tiered(job: JobStatus) -> list[str]:
    """Return how many rows are in memory and in files, and what reading them takes: a line, or none."""
    line = describe_tiers(one.tiers for one in members(job) if severity(one, job.time) < 2)
    return [f"tiered tables: {line}"] if line else []


def published(job: JobStatus) -> list[str]:
    """Return how publishing stands, as the process says that leads it: a line, or none."""
    return [one.publishing for one in members(job) if one.publishing and severity(one, job.time) < 2][:1]


def without_standby(job: JobStatus) -> list[str]:
    """Return which shards lack a standby, as the chief says: a line, or none."""
    return [one.standbys for one in members(job) if one.standbys and severity(one, job.time) < 2][:1]


def _wire(processes: Sequence[ProcessStatus]) -> str:
    known = [one for one in processes if one.role == "ps" and one.received_per_s is not None]
    if not known:
        return ""
    received = sum(one.received_per_s or 0.0 for one in known)
    sent = sum(one.sent_per_s or 0.0 for one in known)
    return f"{describe_bytes(received)}/s in, {describe_bytes(sent)}/s out"


def _table(processes: Sequence[ProcessStatus], now: float, width: int) -> Table:
    cells = {heading: [cell(one, now) for one in processes] for heading, cell in _COLUMNS.items()}
    there = _fitting({heading: texts for heading, texts in cells.items() if any(texts)}, width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for heading in there:
        table.add_column(
            heading, justify="left" if heading in _LEFT else "right", no_wrap=True, overflow="ellipsis"
        )
    for number, one in enumerate(processes):
        style = ("", "yellow", "yellow", "bold red", "bold red")[severity(one, now)]
        if not style and (one.lag_seconds or 0.0) > LAGS:
            style = "cyan"
        table.add_row(*(Text(texts[number]) for texts in there.values()), style=style)
    return table


def _fitting(columns: Mapping[str, list[str]], width: int) -> dict[str, list[str]]:
    """Return the columns for which there is room, those that matter most."""
    left = dict(columns)
    widths = {heading: max(map(len, [heading, *texts])) + _GAP for heading, texts in columns.items()}
    for heading in _FIRST_TO_GO:
        if sum(widths[other] for other in left) <= width:
            break
        left.pop(heading, None)
    return left


def _state(one: ProcessStatus, now: float) -> str:
    if one.state == FAILED:
        return f"failed {_time(one.age(now))} ago"
    if ahead := one.clock_ahead(now):
        return f"{one.state}, its clock is {_time(ahead)} ahead"
    return f"silent for {_time(one.age(now))}" if one.is_silent(now) else one.state


def _place(one: ProcessStatus) -> str:
    return one.address or (f"{one.host} pid {one.pid}" if one.pid else "")


_COLUMNS: Mapping[str, Callable[[ProcessStatus, float], str]] = {
    "process": lambda one, _: one.name,
    "address": lambda one, _: _place(one),
    "state": _state,
    "step": lambda one, _: _count(one.step),
    "examples/s": lambda one, _: _rate(one.examples_per_s),
    "steps/s": lambda one, _: _rate(one.steps_per_s),
    "data": lambda one, _: "" if one.data_read is None else describe_part(one.data_read),
    "left": lambda one, _: "" if one.seconds_left is None else _time(one.seconds_left),
    "behind": lambda one, _: "" if one.lag_seconds is None else _time(one.lag_seconds),
    "stale": lambda one, _: "" if one.staleness is None else f"{one.staleness:.1f}",
    "rows": lambda one, _: _count(one.rows),
    "memory": lambda one, _: _bytes(one.bytes),
    "in/s": lambda one, _: _bytes(one.received_per_s),
    "out/s": lambda one, _: _bytes(one.sent_per_s),
    "restarts": lambda one, _: f"{one.restarts}" if one.restarts else "",
    "failovers": lambda one, _: f"{one.failovers}" if one.failovers else "",
    "saved": lambda one, now: "" if one.saved_at is None else f"{_time(now - one.saved_at)} ago",
}
"""Heading -> the cell below it. A column without any value is left out."""
_LEFT = frozenset({"process", "address", "state"})
_FIRST_TO_GO = (
    "failovers",
    "out/s",
    "in/s",
    "address",
    "steps/s",
    "saved",
    "data",
    "stale",
    "step",
    "restarts",
    "memory",
    "rows",
    "left",
    "behind",
)
"""Columns that a terminal without room for all is not shown, in this order."""
_GAP = 2


def _job_name(job: JobStatus) -> str:
    return next((one.job for one in job.processes if one.job), "")


def _sum(values: Iterable[float | None]) -> str:
    return _rate(sum(value or 0.0 for value in values))


def _rate(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def _count(value: int | None) -> str:
    return "" if value is None else describe_count(value)


def _bytes(value: float | None) -> str:
    return "" if value is None else describe_bytes(value)


def _time(seconds: float) -> str:
    days = seconds / 86_400
    return f"{days:,.0f} days" if days >= 2 else describe_seconds(max(seconds, 0.0))


ANSWER_SECONDS = 10.0
LARGEST_ANSWER = 64 << 20
LOG_WIDTH = 160
"""Columns, where there is no terminal."""


def status(options: StatusOptions) -> int:
    """Show how a job stands, once: all of its processes."""
    return run(TopOptions(**asdict(options), once=True, rows=0))


def run(options: TopOptions) -> int:
    """Show the status of a job, once or until the user interrupts."""
    if options.every <= 0:
        raise ConfigError(f"status watch: --every must be more than 0, got {options.every:g}")
    if options.rows is not None and options.rows < 0:
        raise ConfigError(f"status watch: --rows must be at least 0, got {options.rows}")
    source = source_of(options)
    if options.json:
        job = source.read()
        sys.stdout.buffer.write(job.to_json() + b"\n")
        return int(not is_well(job))
    if options.once:
        job = source.read()
        console = Console(soft_wrap=False, highlight=False)
        if not console.is_terminal:
            console = Console(width=LOG_WIDTH, highlight=False)
        console.print(frame(job, options, source.name, width=console.width, height=None))
        return int(not is_well(job))
    source.read()  # a name that leads nowhere is an error; what goes away later is shown
    with drawn() as draw:
        watch(source, options, draw)
    return 0


def watch(
    source: StatusSource,
    options: TopOptions,
    draw: StatusScreen,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw frames until the user interrupts; reading a job that fails is shown and retried."""
    last: JobStatus | None = None
    while True:
        try:
            last, problem = source.read(), None
        except MonolithError as error:
            problem = f"{error} (trying again every {options.every:g} s)"
        width, height = draw.size
        job = JobStatus(time=time.time()) if last is None else last
        if problem is not None:
            job = replace(job, time=time.time())  # the latest status grows old
        draw.show(frame(job, options, source.name, width=width, height=height, problem=problem))
        try:
            sleep(options.every)
        except KeyboardInterrupt:
            return


# Where it comes from


class StatusSource(Protocol):
    """Says how a job stands."""

    @property
    def name(self) -> str: ...

    def read(self) -> JobStatus:
        """Look now.

        Raises:
            MonolithError: The status cannot be read. Says what to do.
        """


class FolderSource:
    """A job whose processes write to a model_dir that this machine sees."""

    def __init__(self, model_dir: str) -> None:
        self.name = model_dir
        self._board = StatusBoard(model_dir)

    def read(self) -> JobStatus:
        job = self._board.read()
        if not job.processes and not job.unreadable:
            there = filesystem.is_folder(self.name)
            raise UnavailableError(
                f"no process of a run says how it stands in {self.name!r}: "
                + ("it has ended" if there else "there is no such folder")
                + ". Give the --model-dir of a run that is training (metrics.status_every of its config must "
                "not be 0), or the URL of a process that was started with --metrics-port."
            )
        return job


class UrlSource:
    """A job as the metrics port of one of its processes shows it."""

    def __init__(self, url: str, security: SecurityConfig) -> None:
        scheme, _, rest = url.partition("://")
        host = rest.partition("/")[0]
        if not host or "@" in host:
            raise ConfigError(f"{url!r} is no URL of a process; give http://host:port")
        self.name = f"{scheme}://{host}"
        self._url = f"{self.name}{STATUS_PATH}"
        self._context = ssl_context(security, server=False) if scheme == "https" else None
        header = guard_caller(security).header
        self._headers = {} if header is None else {"Authorization": header}

    def read(self) -> JobStatus:
        request = urllib.request.Request(self._url, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS, context=self._context) as answer:
                text = answer.read(LARGEST_ANSWER)
        except urllib.error.HTTPError as cause:
            if cause.code == 401:
                raise ConfigError(f"{self.name} wants the run's token; give --token-file") from cause
            raise UnavailableError(f"{self.name} answered {cause.code} {cause.reason}") from cause
        except (OSError, ValueError) as cause:
            why = getattr(cause, "reason", None) or cause
            raise UnavailableError(
                f"{self.name} cannot be reached: {why}. Start the run with --metrics-port PORT, which "
                "says where it listens; or give its model_dir instead."
            ) from cause
        try:
            return JobStatus.from_json(text)
        except RequestError as cause:
            raise UnavailableError(
                f"{self._url} shows no status of a run: {cause}. It must be the metrics port of "
                "`monolith train`, of this version."
            ) from cause


def source_of(options: TopOptions) -> FolderSource | UrlSource:
    """Return where the run that was asked for says how it stands.

    Raises:
        ConfigError: It is neither a folder nor a URL of HTTP.
    """
    if options.run.startswith(("http://", "https://")):
        security = SecurityConfig(
            token_file=options.token_file, cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca
        )
        return UrlSource(options.run, security)
    return FolderSource(options.run)


# Where it goes


class StatusScreen:
    """Shows one frame in place of the last."""

    def __init__(self, console: Console, update: Callable[[RenderableType], None]) -> None:
        self._console = console
        self._update = update

    @property
    def size(self) -> tuple[int, int | None]:
        """Columns, and lines if there is an end to them."""
        return self._console.width, self._console.height if self._console.is_terminal else None

    def show(self, picture: RenderableType) -> None:
        self._update(picture)


@contextmanager
def drawn() -> Iterator[StatusScreen]:
    """Give what draws on standard output: in one place on a terminal, else one frame below the other."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH, highlight=False)
        yield StatusScreen(console, console.print)
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield StatusScreen(console, lambda picture: live.update(picture, refresh=True))
