"""How a worker trains together with other processes: on parameter servers, or as a rank; with retries.

    join ──► train ──► done
      ▲        │ a RetryableError: another process was lost
      └─ wait ─┘ rejoin, and resume from the last checkpoint

A retry counts only if a server was replaced meanwhile. If all servers are the same, the cause was temporary
(a slow server, a worker that restarted), and retrying costs nothing; but such retries are limited, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from monolith import concurrency
from monolith.cluster import Discovery, Waiting
from monolith.cluster.addresses import get_local_host
from monolith.cluster.run_token import rank_security
from monolith.cluster.security import guard_listener
from monolith.errors import (
    AbsentWorkersError,
    FailedPeerError,
    ReplacedError,
    RetryableError,
    UnpublishedError,
)
from monolith.observe import Metrics
from monolith.runtime import Coordinator, Fleet, FleetCoordinator, TrainReport, join_fleet
from monolith.runtime.cluster_config import FailoverConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.context import Output
from monolith.runtime.discovery import (
    is_restarted_by_launcher,
    keys_are_named,
    listen_address,
    world_from_environment,
)
from monolith.runtime.fleet_join import reach_servers
from monolith.runtime.rank_rendezvous import RankRendezvous
from monolith.runtime.ranks import RankCoordinator
from monolith.store import RankGroups, ServerGroup
from monolith.store.rank_calls import RankPort
from monolith.store.rank_groups import RankOptions

UNCOUNTED = 100
"""The most retries in a row without a replaced server, none of which trained for as long as `STEADY`."""
STEADY = timedelta(minutes=10)

Servers = tuple[str, ...]
"""The processes of a run's parameter servers."""
LOOPBACK = "127.0.0.1"
CAUSE_ENDS_WITHIN = 5.0
"""Seconds that a failed rank has to end before the ranks that lost it: a launcher that ends all ranks with
the first one then reports the status of the rank that failed."""

Attempt = Callable[[Coordinator], TrainReport]
"""Trains once with the other processes."""


class Retries:
    """Counts the retries of one worker.

    Args:
        say: Takes a line with the reason and the time of each retry.
        pause: Waits for so many seconds; returns True if the run was asked to stop meanwhile.
    """

    def __init__(
        self,
        config: FailoverConfig,
        metrics: Metrics,
        *,
        say: Callable[[str], None],
        pause: Callable[[float], bool],
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._max_retries = config.max_retries
        self._wait = config.wait.total_seconds()
        self._metrics = metrics
        self._say = say
        self._pause = pause
        self._clock = clock
        self._servers: Servers = ()
        self._counted = 0
        self._uncounted = 0
        self._began = clock()
        self._error: RetryableError | None = None
        self._over = False

    def joined(self, servers: Servers) -> None:
        """Note the servers of an attempt; one attempt more than allowed ends here.

        Raises:
            RetryableError: The error that ended the previous attempt.
        """
        if self._error is not None:
            changed = servers != self._servers
            self._counted += changed
            self._uncounted += not changed
            if self._counted > self._max_retries or self._uncounted > UNCOUNTED:
                self._over = True  # `lost` is given this error, and must not retry
                raise self._error
        self._servers, self._began = servers, self._clock()

    def lost(self, error: RetryableError) -> None:
        """Wait after an attempt has failed.

        Raises:
            RetryableError: The same error, if no more attempts are allowed.
        """
        if self._clock() - self._began >= STEADY.total_seconds():
            self._uncounted = 0
        if not self._max_retries or self._over:
            raise error
        self._error = error
        self._metrics.counter(
            "worker_failovers", "Retries of this worker after other processes were lost."
        ).inc()
        self._say(
            f"{error}\nretrying in {self._wait:g} s (servers replaced so far: {self._counted}, at most "
            f"{self._max_retries})"
        )
        if self._pause(self._wait):
            raise error


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTraining:
    """What a worker needs to train together with other processes."""

    config: RunConfig
    """The config of the run, with the secret that its processes share."""
    environ: Mapping[str, str]
    metrics: Metrics
    output: Output
    retries: Retries
    on_waiting: Callable[[Waiting], object]
    """Called while this worker waits for other processes; ends the wait by raising."""
    on_lost: Callable[[], None]
    """Called when another process was lost, before the wait for the next attempt."""
    process: str = field(default_factory=lambda: concurrency.token_hex(8))
    """Names this process in all of its attempts."""

    def train_on_servers(self, attempt: Attempt, discovery: Discovery) -> TrainReport:
        """Train on parameter servers; if processes were lost, rejoin and resume from the last checkpoint.

        Raises:
            RetryableError: A process was lost, and there are no retries left.
        """
        while True:
            # Outside of the try: servers that do not come in time will not come in a second attempt.
            fleet = self._join_servers(discovery)
            try:
                with fleet:
                    self.retries.joined(fleet.servers)
                    return attempt(FleetCoordinator(fleet, self.config.dense))
            except RetryableError as error:
                self.on_lost()
                if isinstance(error, ReplacedError):
                    # If both processes of this worker retried, each would end the attempts of the other. A
                    # process that is wanted is started again by its launcher.
                    raise
                if isinstance(error, (AbsentWorkersError, UnpublishedError)):
                    # Workers will not come in a second attempt, either. One may have learned that an earlier
                    # chief has ended the run, and have ended well while this chief started: then a launcher
                    # starts it again only together with the chief. A delta channel that cannot be reached was
                    # waited for already; a launcher, which counts restarts, or an operator decides what next.
                    raise
                self.retries.lost(error)

    def _join_servers(self, discovery: Discovery) -> Fleet:
        """Wait for the parameter servers of the run, and return this worker's connection to them."""
        config = self.config
        fleet = join_fleet(
            discovery,
            config,
            metrics=self.metrics,
            say=self.output.say,
            on_waiting=self.on_waiting,
            process=self.process,
        )
        if config.train.submitted_at is not None:
            ready = self.metrics.gauge(
                "container_ready_seconds", "Seconds from the job's submission until its servers were there."
            )
            ready.set(concurrency.time() - config.train.submitted_at)
        return fleet

    def train_as_rank(self, attempt: Attempt, discovery: Discovery | None) -> TrainReport:
        """Train in step with the other ranks; if one was lost, resume together from the last checkpoint.

        Args:
            discovery: Finds the other ranks and the servers; None if environment variables name the ranks,
                see `keys_are_named`, and there are no servers.

        Raises:
            RetryableError: A rank was lost, and this process may not retry.
        """
        config, environ = self.config, self.environ
        cluster, timeouts = config.cluster, config.timeouts
        host = rank_host(config, environ)
        security = rank_security(config.security, environ, config.train.model_dir)
        meeting = RankRendezvous(
            cluster.index,
            cluster.num_workers,
            discovery=None if keys_are_named(environ) else discovery,
            environ=environ,
            port=RankPort(host=host, guard=guard_listener(host, security), limits=config.limits),
            start=timeouts.start,
            options=RankOptions(
                timeout=timeouts.exchange,
                silence=timeouts.silence,
                backend=config.ranks.backend,
                rows_backend=config.ranks.backend if config.train.asks_for_device_rows else "gloo",
            ),
            on_waiting=self.on_waiting,
        )
        try:
            while True:
                try:
                    with (
                        meeting.join() as groups,
                        servers_of(config, discovery, groups, self.on_waiting) as servers,
                    ):
                        found = () if servers is None else servers.processes
                        self.retries.joined((*meeting.processes, *found))
                        return attempt(RankCoordinator(groups, config.ranks, servers=servers))
                except RetryableError as error:
                    self.on_lost()
                    if isinstance(error, FailedPeerError) and error.replaced == cluster.index:
                        # Another process has joined as this rank: this one was replaced, and came back. If
                        # both retried, each would end the attempts of the other. A process that is wanted is
                        # started again by its launcher.
                        raise
                    if isinstance(error, UnpublishedError):  # see `train_on_servers`
                        raise
                    if is_restarted_by_launcher(environ):
                        if isinstance(error, FailedPeerError):
                            concurrency.sleep(CAUSE_ENDS_WITHIN)
                        raise
                    self.retries.lost(error)
        finally:
            meeting.close()


def rank_host(run: RunConfig, environ: Mapping[str, str]) -> str:
    """Return the one address on which this rank listens, and by which other ranks reach it."""
    world = world_from_environment(environ)
    if keys_are_named(environ) and not run.cluster.listen and world is not None:
        # No registry names this machine. If all ranks are on it, no other machine may reach them.
        return LOOPBACK if world.size == world.local_size else get_local_host(environ)
    return listen_address(run, environ)[0]


@contextmanager
def servers_of(
    run: RunConfig,
    discovery: Discovery | None,
    groups: RankGroups,
    on_waiting: Callable[[Waiting], object],
) -> Iterator[ServerGroup | None]:
    """Yield connections to the servers that hold the rows; None if the ranks hold them."""
    if not run.cluster.num_ps:
        yield None
        return
    assert discovery is not None  # servers are found through it

    def waiting(waits: Waiting) -> None:
        groups.check()
        on_waiting(waits)

    try:
        group = reach_servers(discovery, run, on_waiting=waiting)
    except BaseException as error:
        groups.fail(f"{type(error).__name__}: {error}")  # or the other ranks would wait for this one
        raise
    with closing(group):
        yield group
