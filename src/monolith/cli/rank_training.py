"""This process as one of the ranks of a run: it meets the others, trains in step, and meets them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from monolith.cli.failover import Failover
from monolith.cluster import Discovery, Waiting
from monolith.cluster.mpi import is_restarted_by_launcher
from monolith.errors import FailedPeerError, RetryableError
from monolith.run import RunConfig
from monolith.run.runtime import listen_address
from monolith.train import Peers, TrainReport
from monolith.train.ranks.joining import RankMeeting
from monolith.train.ranks.peers import RankPeers

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
        discovery: Where the others are; None where variables say it: see `keys_are_named`.

    Raises:
        RetryableError: One was lost, and this process is not to try again.
    """
    cluster, timeouts = run.cluster, run.timeouts
    meeting = RankMeeting(
        cluster.index,
        cluster.num_workers,
        discovery=discovery,
        environ=environ,
        host=None if discovery is None else listen_address(run, environ)[0],
        start=timeouts.start,
        options={
            "timeout": timeouts.exchange,
            "silence": timeouts.silence,
            "backend": run.ranks.backend,
        },
        on_waiting=on_waiting,
    )
    try:
        while True:
            try:
                with meeting.join() as groups:
                    failover.joined(meeting.processes)
                    return attempt(RankPeers(groups, run.ranks))
            except RetryableError as error:
                lost_others()
                if is_restarted_by_launcher(environ):
                    if isinstance(error, FailedPeerError):
                        time.sleep(CAUSE_ENDS_WITHIN)
                    raise
                failover.lost(error)
    finally:
        meeting.close()
