"""Data workers that a worker starts beside itself: a machine with a GPU has cores that nobody uses.

They are processes of their own, so that reading does not hold up training, and end with the worker, however
it ends. One that is killed is started again.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from monolith.cli.launching import without_flags
from monolith.cli.task_config import warn
from monolith.cli.train_report import MARK
from monolith.cluster import MLPEnv
from monolith.cluster.launch import Member
from monolith.cluster.launch.processes import Events, StopRequest, run_members
from monolith.cluster.mpi import MPI_VARIABLES, PMI_VARIABLES, TORCHRUN_VARIABLES
from monolith.cluster.run_token import RUN_TOKEN
from monolith.run import RunConfig
from monolith.run.runtime import listen_address

if TYPE_CHECKING:
    from monolith.cli.options.train import TrainOptions

_DECIDED = (
    *("cluster.role", "server_type", "cluster.index", "index", "cluster.listen", "cluster.port"),
    *("discovery.kind", "discovery_type", "data_service.dispatcher", "data_service_dispatcher"),
)
"""Flags of a worker that are others for its data workers, by new names and old."""
GRACE = timedelta(seconds=20)


@contextmanager
def extra_data_workers(
    options: TrainOptions, run: RunConfig, environ: Mapping[str, str], dispatcher: Callable[[], str]
) -> Iterator[None]:
    """Run as many data workers as the run's config asks for while the block lasts.

    Args:
        dispatcher: Says where it is.
    """
    members = extra_members(options, run, environ, dispatcher)
    if not members:
        yield
        return
    events: Events = queue.SimpleQueue()

    def look_after() -> None:
        outcome = run_members(
            members, output=sys.stderr, grace=GRACE, restarts=run.failover.max_retries, events=events
        )
        if outcome.failed is not None:
            warn(f"{outcome.text}; this worker goes on with what other data workers read")

    thread = threading.Thread(target=look_after, name="extra-data-workers")
    thread.start()
    try:
        yield
    finally:
        events.put(StopRequest())
        thread.join()


def extra_members(
    options: TrainOptions, run: RunConfig, environ: Mapping[str, str], dispatcher: Callable[[], str]
) -> list[Member]:
    """Return the processes to start: this one's command line, with the role of a data worker after it.

    Where MLP started this process, they listen on the ports that MLP leaves for them.
    """
    count = 0 if run.data_service is None else run.data_service.extra_workers
    if not count:
        return []
    by_mlp = run.discovery.kind == "mlp"
    ports = MLPEnv(environ).extra_dsworker_ports(count) if by_mlp else [0] * count
    first = MLPEnv(environ).num_replicas("dsworker") if by_mlp else 0
    host, _ = listen_address(run, environ)
    # They are told all that they need to know: no scheduler has heard of them.
    ranks = (*MPI_VARIABLES, *PMI_VARIABLES, *TORCHRUN_VARIABLES)
    silent = [name for name in environ if name.startswith("MLP_") or name in ranks]
    words = without_flags(options.words, *_DECIDED)
    token = {} if run.security.token is None else {RUN_TOKEN: run.security.token.reveal()}
    members = []
    for number, port in enumerate(ports):
        index = first + run.cluster.index * count + number
        flags = {
            "cluster.role": "data_worker",
            "cluster.index": index,
            "cluster.listen": host,
            "cluster.port": port,
            "discovery.kind": "consul",
            "data_service.dispatcher": dispatcher(),
            **({} if run.metrics.port is None else {"metrics-port": 0}),
        }
        given = [word for path, value in flags.items() for word in (f"--{path}", str(value))]
        members.append(
            Member(
                role="data_worker",
                index=index,
                command=(sys.executable, "-m", "monolith", *words, *given),
                # The mark names their lines; the token admits them to the data service that this worker uses.
                environment={**dict.fromkeys(silent, ""), MARK: "of the worker", **token},
            )
        )
    return members
