"""Joining a fleet: finding the parameter servers of a run, and connecting to them.

no spares              every worker takes the servers that are registered as 0 to num_ps - 1
redundant or extra     the chief chooses num_ps of them, writes the list, and every other worker reads it
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from monolith import concurrency
from monolith.cluster import ClusterManager, ClusterManagerConfig, Discovery, OnWaiting, Waiting
from monolith.cluster.security import guard_caller
from monolith.errors import ConfigError, DeadlineExceededError, RetryableError
from monolith.observe import Metrics
from monolith.runtime.config import RunConfig
from monolith.runtime.failover import KeepGoing
from monolith.runtime.fleet import NEWS_EVERY, Fleet
from monolith.runtime.server_calls import ServerCalls
from monolith.runtime.server_choice import RESERVE_EVERY, PsBenchmark, ServerChoice, Spares, StepMeasure
from monolith.runtime.standbys import Standbys, UsedServer
from monolith.store import ServerGroup

_log = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=1)
"""How long to retry a server that does not answer: one that restarted has lost the run anyway."""


KEEP_GOING_EVERY = timedelta(seconds=1)
"""How often a worker reports its examples if the run keeps going: a loss is counted from the last report."""


ASK_EVERY = 0.5
"""Seconds between two attempts to reach all servers."""


def join_fleet(
    discovery: Discovery,
    config: RunConfig,
    *,
    metrics: Metrics | None = None,
    say: Callable[[str], None] = _log.info,
    news_every: timedelta = NEWS_EVERY,
    on_waiting: OnWaiting | None = None,
    process: str | None = None,
) -> Fleet:
    """Wait for the servers of a run to answer, and return this worker's part in its fleet.

    Args:
        config: The run, and in `cluster.index` which worker this is.
        metrics: Receives from the chief how many servers are missing, and the losses.
        say: Called with the servers that were chosen, and why.
        news_every: How often a worker reports that it is alive; it learns news at once.
        on_waiting: Called with the servers that are missing; it may raise to end the wait.
        process: Names this process in all of its attempts; see `Fleet`.

    Raises:
        DeadlineExceededError: Some servers did not answer in time.
        ConfigError: They serve another task, or another number of servers.
    """
    cluster, timeouts, failover = config.cluster, config.timeouts, config.failover
    is_chief, num_ps = cluster.index == 0, cluster.num_ps
    keep_going = failover.recovery == "keep_going"
    check_standbys(cluster.standbys, keep_going=keep_going)
    guard = guard_caller(config.security)
    manager = ClusterManager(
        discovery,
        ClusterManagerConfig(
            num_workers=cluster.num_workers,
            num_ps=num_ps,
            model_dir=config.train.model_dir,
            uuid=config.job.id,
            model_name=config.model_name,
            cluster_type=cluster.kind,
            num_redundant_ps=cluster.num_spares,
            query_every=timedelta(seconds=ASK_EVERY),
            timeout=timeouts.start,
            ps_file_timeout=timeouts.start,
        ),
        metrics=metrics if is_chief else None,
        on_waiting=on_waiting,
    )
    calls = ServerCalls(guard)
    choose: PsBenchmark | None = None
    if cluster.num_extra_ps:
        measure = StepMeasure(cluster.measure_ps, guard)
        choose = PsBenchmark(num_ps, measure, overridden=cluster.use_ps, say=say)
    choice = ServerChoice(
        manager,
        calls,
        num_ps=num_ps,
        candidates=num_ps + cluster.num_extra_ps,
        choose=choose,
        spare_after=failover.spare_after,
    )
    connect = _connections(config)
    listed = bool(cluster.num_spares)
    find_all = choice.of_chief if is_chief else choice.of_worker
    if not listed:
        find_all = lambda: manager.query_ps(num_ps)  # noqa: E731
    group = _answering(find_all, num_ps, connect, timeouts.start, on_waiting)
    spares: Spares | None = None
    if listed and is_chief:
        every = min(RESERVE_EVERY, timeouts.start / 4)
        spares = Spares(manager.registered_ps, lambda: group.addresses, calls, every=every)

    def find(place: int) -> list[str]:
        with contextlib.suppress(RetryableError):
            return choice.places_of(place) if listed else manager.registered_at(place)
        return []

    copies: Standbys | None = None
    if cluster.standbys and is_chief:
        copies = Standbys(
            manager.registered_ps,
            lambda: [UsedServer(*one) for one in zip(group.addresses, group.incarnations, strict=True)],
            calls,
            wanted=cluster.standbys,
            metrics=metrics,
            say=say,
        )
    how = KeepGoing(
        find=find,
        connect=lambda address: connect([address], timedelta()),
        spare=(lambda place, given: choice.take_over(place, group.addresses, given)) if listed else None,
        served=choice.list_server if listed else None,
        spare_after=failover.spare_after,
        standbys=copies,
        metrics=metrics,
    )
    try:
        return Fleet(
            group,
            cluster,
            timeouts,
            spares=spares,
            news_every=min(news_every, KEEP_GOING_EVERY) if keep_going else news_every,
            keep_going=how if keep_going else None,
            process=process,
        )
    except BaseException:
        group.close()
        raise


def check_standbys(standbys: int, *, keep_going: bool) -> None:
    """Refuse standbys that a run cannot use.

    Raises:
        ConfigError: Says why.
    """
    if standbys not in (0, 1, 2):
        raise ConfigError(f"standbys must be from 0 to 2, got {standbys}")
    if standbys and not keep_going:
        raise ConfigError(
            "standbys are for runs that keep going: a copy may miss the last updates, and an exact run rolls "
            "back to its last checkpoint"
        )


def reach_servers(
    discovery: Discovery, config: RunConfig, *, on_waiting: OnWaiting | None = None
) -> ServerGroup:
    """Wait for the servers of a run whose workers are ranks, and return connections to them.

    Raises:
        DeadlineExceededError: Some servers did not answer in time.
        ConfigError: They serve another task, or another number of servers.
    """
    cluster, start = config.cluster, config.timeouts.start
    manager = ClusterManager(
        discovery,
        ClusterManagerConfig(
            num_workers=cluster.num_workers,
            num_ps=cluster.num_ps,
            query_every=timedelta(seconds=ASK_EVERY),
            timeout=start,
        ),
        on_waiting=on_waiting,
    )
    find = lambda: manager.query_ps(cluster.num_ps)  # noqa: E731
    return _answering(find, cluster.num_ps, _connections(config), start, on_waiting)


def _connections(config: RunConfig) -> Callable[[Sequence[str], timedelta], ServerGroup]:
    """Return the function that connects to servers at these addresses, with a patience for each call."""
    cluster, timeouts = config.cluster, config.timeouts
    keep_going = config.failover.recovery == "keep_going" and cluster.mode == "async"

    def connect(addresses: Sequence[str], patience: timedelta) -> ServerGroup:
        return ServerGroup(
            addresses,
            guard=guard_caller(config.security),
            patience=patience,
            timeout=timeouts.operation or timeouts.lookup,
            lookup_timeout=timeouts.lookup,
            replacement_timeout=timeouts.start if keep_going else timedelta(),
            half=cluster.half_rows,
        )

    return connect


def _answering(
    find: Callable[[], list[str]],
    num_ps: int,
    connect: Callable[[Sequence[str], timedelta], ServerGroup],
    timeout: timedelta,
    on_waiting: OnWaiting | None,
) -> ServerGroup:
    """Return connections to all servers once each of them answers.

    A registry may name a server that is dead, or whose port is not open yet: it is asked again until all of
    its addresses answer.

    Args:
        find: Returns the addresses by shard.
    """
    began = concurrency.monotonic()
    while True:
        addresses: list[str] = []
        answered = 0
        try:
            addresses = find()
            with contextlib.closing(connect(addresses, timedelta())) as probe:
                for server in range(num_ps):
                    probe.call(server, "hello")
                    answered += 1
            group = connect(addresses, PATIENCE)
            try:
                group.describe()
                return group
            except BaseException:
                group.close()
                raise
        except RetryableError as cause:
            elapsed = timedelta(seconds=concurrency.monotonic() - began)
            if elapsed >= timeout:
                raise DeadlineExceededError(
                    f"waited {timeout} for {num_ps} parameter servers to answer: {cause}"
                ) from cause
            _log.debug("not all servers answer yet: %s", cause)
        if on_waiting is not None:
            late = min(answered, num_ps - 1)
            what = (
                f"parameter server {late} at {addresses[late]} to answer"
                if addresses
                else "servers to choose"
            )
            on_waiting(Waiting(what, answered, num_ps, elapsed))
        concurrency.sleep(ASK_EVERY)
