"""Joining a fleet: the servers of a run are waited for, chosen where there are more, and connected to."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from monolith.cluster import ClusterManager, ClusterManagerConfig, Discovery, OnWaiting, Waiting
from monolith.cluster.security import Guard
from monolith.errors import ConfigError, DeadlineExceededError, RetryableError
from monolith.observe import Metrics
from monolith.store import ServerGroup
from monolith.train.fleet.choosing import RESERVE_EVERY, ServerCalls, ServerChoice, Spares
from monolith.train.fleet.fleet import NEWS_EVERY, Fleet
from monolith.train.fleet.keep_going import KeepGoing
from monolith.train.fleet.ps_benchmark import PsBenchmark, StepMeasure
from monolith.train.fleet.standbys import Standbys, UsedServer

_log = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=1)
"""How long to try a server where nobody answers: one that restarted holds nothing of this run."""
KEEP_GOING_EVERY = timedelta(seconds=1)
"""How often who keeps going says what would be lost with it."""
_ASK_EVERY = 0.5


def join_fleet(
    discovery: Discovery,
    *,
    index: int,
    num_ps: int,
    num_workers: int,
    max_workers: int | None = None,
    guard: Guard | None = None,
    model_dir: str = "",
    run_id: str = "",
    num_redundant_ps: int = 0,
    num_extra_ps: int = 0,
    standbys: int = 0,
    measure_ps: timedelta = timedelta(seconds=10),
    use_ps: Sequence[str] = (),
    metrics: Metrics | None = None,
    model_name: str = "",
    cluster_type: str = "stable",
    say: Callable[[str], None] = _log.info,
    start_timeout: timedelta = timedelta(hours=2),
    finish_timeout: timedelta = timedelta(minutes=30),
    call_timeout: timedelta = timedelta(seconds=30),
    lookup_timeout: timedelta | None = None,
    half_rows: bool = False,
    news_every: timedelta = NEWS_EVERY,
    keep_going: bool = False,
    spare_after: timedelta = timedelta(seconds=5),
    on_waiting: OnWaiting | None = None,
) -> Fleet:
    """Wait for the servers of a run to answer, and return this worker's place among its processes.

    Args:
        max_workers: The most workers there may be, where the data hands out work; None for no more.
        guard: What to present to the servers.
        run_id: Names this submission of the job; see `ClusterManagerConfig.uuid`.
        num_redundant_ps: Servers beyond `num_ps`: those that register first are used.
        num_extra_ps: Servers beyond `num_ps`: the chief measures all and uses the fastest.
        standbys: How many servers keep a copy of each shard, 0 to 2: `num_ps` servers more for each.
            Only for those who keep going.
        measure_ps: How long it measures them.
        use_ps: Addresses to use where there are extra servers, instead of measuring.
        metrics: Are told how many servers are missing, under the model's name and the cluster's type; and
            what was lost.
        say: Told which servers were chosen, and why.
        start_timeout: How long to wait for servers, and then for the chief.
        finish_timeout: How long the chief waits for the others at the end.
        call_timeout: The longest that one call of a server may take.
        lookup_timeout: The same for a lookup of rows; None takes that of other calls.
        half_rows: Whether lookups are answered in half floats; see `ServerGroup`.
        news_every: How often each says that it lives; of news it hears at once.
        keep_going: Whether the others keep what they learned when a process is lost.
        spare_after: How long a lost server may take to come back before a spare takes its place.
        on_waiting: Told who is missing.

    Raises:
        DeadlineExceededError: Some servers did not come in time.
        ConfigError: They serve another task, or were counted otherwise.
    """
    check_standbys(standbys, keep_going=keep_going)
    spares_wanted = num_redundant_ps + num_extra_ps + standbys * num_ps
    manager = ClusterManager(
        discovery,
        ClusterManagerConfig(
            num_workers=num_workers,
            num_ps=num_ps,
            model_dir=model_dir,
            uuid=run_id,
            model_name=model_name,
            cluster_type=cluster_type,
            num_redundant_ps=spares_wanted,
            query_every=timedelta(seconds=0.5),
            timeout=start_timeout,
            ps_file_timeout=start_timeout,
        ),
        metrics=metrics if index == 0 else None,
        on_waiting=on_waiting,
    )
    calls = ServerCalls(guard)
    choose: PsBenchmark | None = None
    if num_extra_ps:
        choose = PsBenchmark(num_ps, StepMeasure(measure_ps, guard), overridden=use_ps, say=say)
    choice = ServerChoice(
        manager,
        calls,
        num_ps=num_ps,
        candidates=num_ps + num_extra_ps,
        choose=choose,
        spare_after=spare_after,
    )

    def connect(addresses: Sequence[str], patience: timedelta) -> ServerGroup:
        return ServerGroup(
            addresses,
            guard=guard,
            patience=patience,
            timeout=call_timeout,
            lookup_timeout=lookup_timeout,
            replacement_timeout=start_timeout if keep_going else timedelta(),
            half=half_rows,
        )

    spares: Spares | None = None
    listed = bool(spares_wanted)
    if not listed:
        group = _answering(lambda: manager.query_ps(num_ps), num_ps, connect, start_timeout, on_waiting)
    elif index:
        group = _answering(choice.of_worker, num_ps, connect, start_timeout, on_waiting)
    else:
        group = _answering(choice.of_chief, num_ps, connect, start_timeout, on_waiting)
        every = min(RESERVE_EVERY, start_timeout / 4)
        spares = Spares(manager.registered_ps, lambda: group.addresses, calls, every=every)

    def find(place: int) -> list[str]:
        with contextlib.suppress(RetryableError):
            return choice.places_of(place) if listed else manager.registered_at(place)
        return []

    copies: Standbys | None = None
    if standbys and index == 0:
        copies = Standbys(
            manager.registered_ps,
            lambda: [UsedServer(*one) for one in zip(group.addresses, group.incarnations, strict=True)],
            calls,
            wanted=standbys,
            metrics=metrics,
            say=say,
        )
    how = KeepGoing(
        find=find,
        connect=lambda address: connect([address], timedelta()),
        spare=(lambda place: choice.take_over(place, group.addresses)) if listed else None,
        served=choice.list_server if listed else None,
        spare_after=spare_after,
        standbys=copies,
        metrics=metrics,
    )
    try:
        return Fleet(
            group,
            index,
            num_workers,
            max_workers=max_workers,
            spares=spares,
            start_timeout=start_timeout,
            finish_timeout=finish_timeout,
            news_every=min(news_every, KEEP_GOING_EVERY) if keep_going else news_every,
            keep_going=how if keep_going else None,
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
            "standbys are for runs that keep going: a copy may miss the last updates, and an exact run goes "
            "back to its last checkpoint"
        )


def reach_servers(
    discovery: Discovery,
    *,
    num_ps: int,
    num_workers: int,
    guard: Guard | None = None,
    start_timeout: timedelta = timedelta(hours=2),
    call_timeout: timedelta = timedelta(seconds=30),
    lookup_timeout: timedelta | None = None,
    half_rows: bool = False,
    on_waiting: OnWaiting | None = None,
) -> ServerGroup:
    """Wait for the servers of a run whose workers are ranks, and return connections to them.

    Args: see `join_fleet`.

    Raises:
        DeadlineExceededError: Some did not come in time.
        ConfigError: They serve another task, or were counted otherwise.
    """
    config = ClusterManagerConfig(
        num_workers=num_workers, num_ps=num_ps, query_every=timedelta(seconds=0.5), timeout=start_timeout
    )
    manager = ClusterManager(discovery, config, on_waiting=on_waiting)

    def connect(addresses: Sequence[str], patience: timedelta) -> ServerGroup:
        return ServerGroup(
            addresses,
            guard=guard,
            patience=patience,
            timeout=call_timeout,
            lookup_timeout=lookup_timeout,
            half=half_rows,
        )

    return _answering(lambda: manager.query_ps(num_ps), num_ps, connect, start_timeout, on_waiting)


def _answering(
    find: Callable[[], list[str]],
    num_ps: int,
    connect: Callable[[Sequence[str], timedelta], ServerGroup],
    timeout: timedelta,
    on_waiting: OnWaiting | None,
) -> ServerGroup:
    """Return connections to all servers once each of them answers.

    A registry may know a server that is dead, or whose port is not open yet: it is asked again until what
    it says is true.

    Args:
        find: Returns the addresses by share.
    """
    began = time.monotonic()
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
            elapsed = timedelta(seconds=time.monotonic() - began)
            if elapsed >= timeout:
                raise DeadlineExceededError(
                    f"waited {timeout} for {num_ps} parameter servers to answer: {cause}"
                ) from cause
            _log.debug("not all servers answer yet: %s", cause)
        if on_waiting is not None:
            late = min(answered, num_ps - 1)
            who = (
                f"parameter server {late} at {addresses[late]} to answer"
                if addresses
                else "servers to choose"
            )
            on_waiting(Waiting(who, answered, num_ps, elapsed))
        time.sleep(_ASK_EVERY)
