"""`monolith top RUN|URL`: a training job, watched; `monolith status RUN|URL`: the same once.

What is shown is what the processes of the run say of themselves, see `monolith.cluster.status`. Nothing is
asked of those that train. A process that is not heard of any more stays on the list, and comes first.
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Protocol

from rich.console import Console, RenderableType

from monolith import filesystem
from monolith.cli.options.top import StatusOptions, TopOptions
from monolith.cli.top_frame import frame, is_well
from monolith.cluster.security import SecurityConfig, guard_caller, ssl_context
from monolith.cluster.status import STATUS_PATH, JobStatus, StatusBoard
from monolith.errors import ConfigError, MonolithError, RequestError, UnavailableError

ANSWER_SECONDS = 10.0
LARGEST_ANSWER = 64 << 20
LOG_WIDTH = 160
"""Columns, where there is no terminal."""


def status(options: StatusOptions) -> int:
    """Show how a job stands, once: all of its processes."""
    return run(TopOptions(**asdict(options), once=True, rows=0))


def run(options: TopOptions) -> int:
    """Show how a job stands, once or until somebody has seen enough."""
    if options.every <= 0:
        raise ConfigError(f"top: --every must be more than 0, got {options.every:g}")
    if options.rows is not None and options.rows < 0:
        raise ConfigError(f"top: --rows must be at least 0, got {options.rows}")
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
    source: StatusSource, options: TopOptions, draw: Drawing, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Draw frames until somebody interrupts; a job that cannot be read is said to be, and tried again."""
    last: JobStatus | None = None
    while True:
        try:
            last, problem = source.read(), None
        except MonolithError as error:
            problem = f"{error} (trying again every {options.every:g} s)"
        width, height = draw.size
        job = JobStatus(time=time.time()) if last is None else last
        if problem is not None:
            job = replace(job, time=time.time())  # what was heard grows old
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
            MonolithError: Nobody can tell. Says what to do.
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
                + ". Give the --model-dir of a run that goes on (metrics.status_every of its config must not "
                "be 0), or the URL of a process that was started with --metrics-port."
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


class Drawing(Protocol):
    """Shows one frame in place of the last."""

    @property
    def size(self) -> tuple[int, int | None]:
        """Columns, and lines where there is an end to them."""

    def show(self, picture: RenderableType) -> None: ...


class _Screen:
    def __init__(self, console: Console, update: Callable[[RenderableType], None]) -> None:
        self._console = console
        self._update = update

    @property
    def size(self) -> tuple[int, int | None]:
        return self._console.width, self._console.height if self._console.is_terminal else None

    def show(self, picture: RenderableType) -> None:
        self._update(picture)


@contextmanager
def drawn() -> Iterator[Drawing]:
    """Give what draws on standard output: in one place on a terminal, else one frame below the other."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH, highlight=False)
        yield _Screen(console, console.print)
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield _Screen(console, lambda picture: live.update(picture, refresh=True))
