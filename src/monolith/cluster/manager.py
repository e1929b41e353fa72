"""The cluster manager: chief, workers and parameter servers, put together from discovery.

Every process of a job ends with the same picture: where the chief is, and which parameter servers
hold which shards. A job may start more servers than it needs. Then those that register first are
taken, and the chief writes the choice into a file, so that late workers and a restarted chief agree.

A worker talks to the chief and to the parameter servers, never to other workers. So the addresses of
other workers are left out, and a worker that moves changes nothing for the other workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from monolith import concurrency
from monolith.cluster.addresses import Clock, Sleep, poll
from monolith.cluster.discovery import Discovery
from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    FileMissingError,
    RetryableError,
)
from monolith.filesystem import atomic_write, join, make_dirs, parent, read_bytes
from monolith.observe import Metrics

T = TypeVar("T")
_log = logging.getLogger(__name__)

PS_FOLDER = "ps_cluster_dir"
DEFAULT_PS_FILE = "ps_info"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The addresses of a job's processes, as one process sees them."""

    chief: str
    workers: tuple[str, ...]
    """The workers without the chief. Only this process's own address is real; the other addresses are
    placeholders `0.0.0.0:<index>`."""
    ps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """What one process is: the chief, or worker `index` of those that are not."""

    type: str
    index: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """How far the assembly has come."""

    what: str
    """What is waited for: `chief`, `ps`, or the path of the file that the chief writes."""
    found: int
    needed: int
    elapsed: timedelta


OnWaiting = Callable[[Waiting], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterManagerConfig:
    """How many processes make a job, and how long to wait for them."""

    num_workers: int
    """The number of workers, the chief included."""
    num_ps: int
    """The number of parameter servers that the job uses."""
    num_redundant_ps: int = 0
    """The number of parameter servers started in addition, so that slow ones need not be waited for."""
    model_dir: str = ""
    uuid: str = ""
    """The id of the run; names the file of the chosen servers."""
    model_name: str = ""
    """The model's name in metrics; without it there are no metrics."""
    cluster_type: str = "stable"
    query_every: timedelta = timedelta(seconds=5)
    timeout: timedelta | None = None
    """How long to wait for the chief and the servers; None waits without a limit."""
    ps_file_timeout: timedelta = timedelta(minutes=30)
    """How long a worker waits for the chief's choice of servers."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"cluster: num_workers must be at least 1, got {self.num_workers}")
        if self.num_ps < 0 or self.num_redundant_ps < 0:
            raise ConfigError(
                f"cluster: num_ps and num_redundant_ps must not be negative, got {self.num_ps} "
                f"and {self.num_redundant_ps}"
            )
        if self.num_redundant_ps and not self.model_dir:
            raise ConfigError(
                "cluster: num_redundant_ps needs a model_dir, where the chosen servers are listed"
            )

    @property
    def ps_file(self) -> str:
        """Where the chief writes the servers it chose."""
        return join(self.model_dir, PS_FOLDER, self.uuid or DEFAULT_PS_FILE)


class ClusterManager:
    """Finds the other processes of a job.

    Args:
        metrics: Record how many servers are missing.
        on_waiting: Called after each query that did not find all processes; for a progress bar.
    """

    def __init__(
        self,
        discovery: Discovery,
        config: ClusterManagerConfig,
        *,
        metrics: Metrics | None = None,
        on_waiting: OnWaiting | None = None,
        clock: Clock = concurrency.monotonic,
        sleep: Sleep = concurrency.sleep,
    ) -> None:
        self._discovery = discovery
        self._config = config
        self._metrics = metrics if config.model_name else None
        self._on_waiting = on_waiting
        self._clock, self._sleep = clock, sleep

    def training_cluster(self, address: str, index: int) -> tuple[Cluster, ProcessRole]:
        """Wait for all processes that worker `index`, which listens at `address`, needs to know.

        Raises:
            DeadlineExceededError: Some processes did not register in time. The message names them.
        """
        config = self._config
        if not 0 <= index < config.num_workers:
            raise ConfigError(
                f"cluster: worker {index} does not exist: there are {config.num_workers}, counted from 0"
            )
        workers = [f"0.0.0.0:{number}" for number in range(1, config.num_workers)]
        if index == 0:
            return Cluster(address, tuple(workers), tuple(self._ps_for_chief())), ProcessRole("chief", 0)
        workers[index - 1] = address
        chief = self._query_chief()
        redundant = config.num_redundant_ps > 0
        ps = self.listed_ps() if redundant else self.query_ps(config.num_ps, emit=False)
        return Cluster(chief, tuple(workers), tuple(ps)), ProcessRole("worker", index - 1)

    @property
    def ps_file(self) -> str:
        """Where the chief lists the servers it chose."""
        return self._config.ps_file

    def registered_ps(self) -> list[str]:
        """Return all parameter servers that are registered now, by index, dead ones too."""
        registered = self._discovery.query("ps")
        return [registered[index] for index in sorted(registered)]

    def registered_at(self, index: int) -> list[str]:
        """Return where the parameter server of a number is registered now; nothing if it is not."""
        found = self._discovery.query("ps").get(index)
        return [] if found is None else [found]

    def query_ps(self, count: int, *, emit: bool = True) -> list[str]:
        """Wait until `count` parameter servers are registered; return them by index, no more than that.

        Leaves the file of the chosen servers alone: at the end of a job all are asked to stop, the
        redundant ones too, and a worker that comes late must still find the list it was started with.

        Raises:
            DeadlineExceededError: Too few came in time.
        """

        def look(registered: dict[int, str]) -> tuple[int, list[str] | None]:
            left = max(0, count - len(registered))
            if emit:
                self._emit(left)
            if left:
                return len(registered), None
            return len(registered), [registered[index] for index in sorted(registered)][:count]

        return self._query("ps", count, look)

    def _query_chief(self) -> str:
        return self._query("worker", 1, lambda found: (int(0 in found), found.get(0)), what="chief")

    def _query(
        self,
        role: str,
        needed: int,
        look: Callable[[dict[int, str]], tuple[int, T | None]],
        what: str | None = None,
    ) -> T:
        """Ask discovery until `look`, which returns how many it found and an answer, has an answer."""
        start = self._clock()
        found, last = 0, None

        def ask() -> T | None:
            nonlocal found, last
            try:
                found, answer = look(self._discovery.query(role))
                last = None
            except RetryableError as error:  # a registry that is away may come back
                _log.warning("cluster: cannot query %s, retrying: %s", role, error)
                last, answer = error, None
            if answer is None:
                self._report(what or role, found, needed, start)
            return answer

        config = self._config
        answer = poll(
            ask, timeout=config.timeout, every=config.query_every, clock=self._clock, sleep=self._sleep
        )
        if answer is None:
            assert config.timeout is not None
            raise DeadlineExceededError(
                f"cluster: waited {config.timeout.total_seconds():g} s for {needed} {what or role}, and "
                f"found {found}. Registered now as {role}: {self._registered(role)}. "
                + (f"The registry said last: {last}" if last else "See the logs of those that are missing.")
            ) from last
        return answer

    def _registered(self, role: str) -> str:
        try:
            entries = self._discovery.entries(role)
        except ClusterError as error:
            return f"unknown ({error})"
        return ", ".join(f"{entry.index} at {entry.address}" for entry in entries) or "none"

    def _ps_for_chief(self) -> list[str]:
        """Return the servers of the job. An earlier choice is kept."""
        config = self._config
        if not config.num_redundant_ps:
            return self.query_ps(config.num_ps)
        chosen = fetch_ps_cluster(config.ps_file)
        if len(chosen) != config.num_ps:
            chosen = self.query_ps(config.num_ps)
            save_ps_cluster(config.ps_file, chosen)
        return chosen

    def listed_ps(self) -> list[str]:
        """Wait for the chief's choice; one of another length is of another run, and will be replaced.

        Raises:
            DeadlineExceededError: It did not come in time.
        """
        config, start = self._config, self._clock()
        found: list[str] = []

        def ask() -> list[str] | None:
            nonlocal found
            found = fetch_ps_cluster(config.ps_file)
            if len(found) == config.num_ps:
                return found
            self._report(config.ps_file, len(found), config.num_ps, start)
            return None

        chosen = poll(
            ask,
            timeout=config.ps_file_timeout,
            every=config.query_every,
            clock=self._clock,
            sleep=self._sleep,
        )
        if chosen is None:
            raise DeadlineExceededError(
                f"cluster: waited {config.ps_file_timeout.total_seconds():g} s for the chief to write "
                f"{config.num_ps} parameter servers into {config.ps_file}, which has {len(found)}. "
                "Is the chief running, and does it see the same model_dir?"
            )
        return chosen

    def _report(self, what: str, found: int, needed: int, start: float) -> None:
        if self._on_waiting is not None:
            self._on_waiting(Waiting(what, found, needed, timedelta(seconds=self._clock() - start)))

    def _emit(self, left: int) -> None:
        if self._metrics is None:
            return
        labels = {"model_name": self._config.model_name, "cluster_type": self._config.cluster_type}
        gauge = self._metrics.gauge
        gauge("containers_num_left_ps", "Parameter servers that are not registered yet.", list(labels)).set(
            left, **labels
        )
        gauge("containers_job_waiting", "1 while the job waits for servers, else 0.", list(labels)).set(
            int(left > 0), **labels
        )


def save_ps_cluster(path: str, addresses: Sequence[str]) -> None:
    """Write the chosen servers, whole or not at all; two concurrent writers do not conflict."""
    make_dirs(parent(path))
    with atomic_write(path) as file:
        file.write(",".join(addresses).encode())


def fetch_ps_cluster(
    path: str,
    timeout: timedelta = timedelta(0),
    *,
    every: timedelta = timedelta(seconds=5),
    clock: Clock = concurrency.monotonic,
    sleep: Sleep = concurrency.sleep,
) -> list[str]:
    """Return the chosen servers; none when the file is missing or empty until `timeout` is over."""

    def ask() -> list[str] | None:
        try:
            text = read_bytes(path).decode()
        except FileMissingError:
            return None
        return [part.strip() for part in text.split(",") if part.strip()] or None

    return poll(ask, timeout=timeout, every=every, clock=clock, sleep=sleep) or []
