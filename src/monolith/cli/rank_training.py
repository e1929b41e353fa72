"""This process as one of the ranks of a run: it meets the others, trains in step, and meets them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

from monolith.cli.failover import Failover
from monolith.cluster import Discovery, Waiting
from monolith.cluster.addresses import get_local_host
from monolith.cluster.mpi import is_restarted_by_launcher, keys_are_named, world_from_environment
from monolith.cluster.run_token import rank_security
from monolith.cluster.security import guard_caller, guard_listener
from monolith.errors import FailedPeerError, RetryableError
from monolith.run import RunConfig
from monolith.run.runtime import listen_address
from monolith.store import RankGroups, ServerGroup
from monolith.store.rank_calls import RankPort
from monolith.store.rank_groups import RankOptions
from monolith.train import Peers, TrainReport
from monolith.train.fleet.joining import reach_servers
from monolith.train.ranks.joining import RankMeeting
from monolith.train.ranks.peers import RankPeers

LOOPBACK = "127.0.0.1"
CAUSE_ENDS_WITHIN = 5.0
"""Seconds that a rank which failed has to end before those that lost it: a launcher that ends all with the
first then has the status that says why, and ends them."""


def as_rank(
    attempt: Callable[[Peers], TrainReport],
    run: RunConfig,
    discovery: Discovery | None,
    environ: Mapping[str, str],
    *,
    failover: Failover,
    on_waiting: Callable[[Waiting], object],
    lost_others: Callable[[], None],
) -> TrainReport:
    """Train in step with the others; where one was lost, go on together from the last checkpoint.

    Args:
        discovery: Where the others are, and the servers; None where variables say it, see `keys_are_named`,
            and there are no servers.

    Raises:
        RetryableError: One was lost, and this process is not to try again.
    """
    cluster, timeouts = run.cluster, run.timeouts
    named = keys_are_named(environ)
    host = rank_host(run, environ)
    security = rank_security(run.security, environ, run.train.model_dir)
    meeting = RankMeeting(
        cluster.index,
        cluster.num_workers,
        discovery=None if named else discovery,
        environ=environ,
        port=RankPort(host=host, guard=guard_listener(host, security), limits=run.limits),
        start=timeouts.start,
        options=RankOptions(
            timeout=timeouts.exchange,
            silence=timeouts.silence,
            backend=run.ranks.backend,
            rows_backend=run.ranks.backend if run.train.embedding_device == "device" else "gloo",
        ),
        on_waiting=on_waiting,
    )
    try:
        while True:
            try:
                with meeting.join() as groups, servers_of(run, discovery, groups, on_waiting) as servers:
                    found = () if servers is None else servers.processes
                    failover.joined((*meeting.processes, *found))
                    return attempt(RankPeers(groups, run.ranks, servers=servers))
            except RetryableError as error:
                lost_others()
                if is_restarted_by_launcher(environ):
                    if isinstance(error, FailedPeerError):
                        time.sleep(CAUSE_ENDS_WITHIN)
                    raise
                failover.lost(error)
    finally:
        meeting.close()


def rank_host(run: RunConfig, environ: Mapping[str, str]) -> str:
    """Return the one address on which this rank listens, and by which the others reach it."""
    world = world_from_environment(environ)
    if keys_are_named(environ) and not run.cluster.listen and world is not None:
        # No registry says how others reach this machine. If there are no other machines, none may.
        return LOOPBACK if world.size == world.local_size else get_local_host(environ)
    return listen_address(run, environ)[0]


@contextmanager
def servers_of(
    run: RunConfig,
    discovery: Discovery | None,
    groups: RankGroups,
    on_waiting: Callable[[Waiting], object],
) -> Iterator[ServerGroup | None]:
    """Give connections to the servers that hold the rows; None where the ranks do."""
    cluster, timeouts = run.cluster, run.timeouts
    if not cluster.num_ps:
        yield None
        return
    assert discovery is not None  # there are servers, who are found by it

    def waiting(waits: Waiting) -> None:
        groups.check()
        on_waiting(waits)

    try:
        group = reach_servers(
            discovery,
            num_ps=cluster.num_ps,
            num_workers=cluster.num_workers,
            guard=guard_caller(run.security),
            start_timeout=timeouts.start,
            call_timeout=timeouts.operation or timeouts.lookup,
            lookup_timeout=timeouts.lookup,
            half_rows=cluster.half_rows,
            on_waiting=waiting,
        )
    except BaseException as error:
        groups.fail(f"{type(error).__name__}: {error}")  # or the others wait for this one
        raise
    with closing(group):
        yield group
