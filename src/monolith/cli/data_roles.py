"""The data service of a run: its dispatcher, its data workers, and the workers that read from it.

All of them are started by the same command line, `monolith train TASK ...`, and differ by their role: by
cluster.role, or by what MLP says of each. What is read, and how, is what the task says of its own data.
Those who read for others end when the chief has ended: its status is then gone from the model_dir, and under
MLP nobody listens at its port.

    files ──► data workers, each reads some ──► chunks of a batch ──► workers, each trains some
                      dispatcher: who reads, and who is given, what
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from monolith import filesystem
from monolith.cli.data_service import dispatcher_answers, show_dispatched, told_to_stop
from monolith.cli.extra_workers import extra_data_workers
from monolith.cli.task_config import say, warn
from monolith.cluster import DATA_DISPATCHER, concat_ip_and_port, locator
from monolith.cluster.run_token import TOKEN_FILE, read_token, run_security, shared_security, user_security
from monolith.cluster.security import SecurityConfig, derive_token, guard_caller, guard_listener
from monolith.cluster.status import StatusBoard
from monolith.data.config import DataServiceConfig
from monolith.errors import ConfigError, MonolithError
from monolith.run import RunConfig
from monolith.run.runtime import dispatcher_address, listen_address, open_discovery
from monolith.runtime.status import OwnStatus
from monolith.runtime.task_data import TaskData, data_of, read_from_service

if TYPE_CHECKING:
    from monolith.cli.options.train import TrainOptions
    from monolith.train import Task

_log = logging.getLogger(__name__)

TRAINER = "worker"
"""The name of those who train, for the dispatcher; of several, each adds its number."""
LOOK_EVERY = 1.0


def secured(run: RunConfig, environ: Mapping[str, str]) -> RunConfig:
    """Return a run whose processes share a secret, whoever started them.

    Raises:
        ConfigError: Others can reach where this process listens, and nobody gave the run a secret; or the one
            in its model_dir is not to be trusted.
    """
    security = run_security(run.security, environ)
    if run.cluster.role != "worker":
        guard_listener(listen_address(run, environ)[0], security)
    model_dir = run.train.model_dir
    if (
        security is not run.security
        and run.publish.enabled
        and model_dir
        and not filesystem.is_remote(model_dir)
    ):
        # A launcher's token is known to its processes alone. Followers find one in the model_dir.
        shared = read_token(Path(model_dir) / TOKEN_FILE, make=True)
        security = replace(security, follow_token=derive_token(shared, "follow"))
    return replace(run, security=shared_security(security, model_dir))


def data_security(run: RunConfig, environ: Mapping[str, str]) -> SecurityConfig:
    """Return what the processes of the data service that a run reads from present to each other.

    The run's own data service has the token of the run. If the run names its dispatcher, the service may be
    anyone's on this machine: its processes share the token of their user, as `monolith data` commands do.

    Raises:
        ConfigError: As `secured`; or the token file cannot be used.
    """
    if run.data_service is None or run.data_service.dispatcher is None:
        return secured(run, environ).security
    if run.cluster.reads_for_others:  # a worker that starts extra data workers hands them its token
        run = replace(run, security=run_security(run.security, environ))
        guard_listener(listen_address(run, environ)[0], run.security)
    return user_security(run.security, environ)


# Who reads for others


def read_for_others(task: Task, run: RunConfig, environ: Mapping[str, str], status: OwnStatus) -> int:
    """Be the dispatcher or a data worker of a run, until it ends or this process is told to stop."""
    data = data_of(task)
    with ExitStack() as open_things:
        stop = open_things.enter_context(told_to_stop(environ))
        open_things.enter_context(stopped_with_chief(stop, run.train.model_dir))
        read = dispatch if run.cluster.role == "dispatcher" else read_splits
        return read(data, run, environ, status=status, stop=stop, open_things=open_things)


def dispatch(
    data: TaskData,
    run: RunConfig,
    environ: Mapping[str, str],
    *,
    status: OwnStatus,
    stop: threading.Event,
    open_things: ExitStack,
) -> int:
    """Hand out the files of a run until told to stop."""
    from monolith.data.service import DataJobConfig, Dispatcher

    host, port = listen_address(run, environ)
    running = open_things.enter_context(
        Dispatcher(
            DataJobConfig(splits=tuple(data.config.files()), epochs=data.epochs),
            folder=state_folder(run),
            host=host,
            port=port,
            guard=guard_listener(host, run.security),
            limits=run.limits,
        )
    )
    address = concat_ip_and_port(host, running.port)
    if run.discovery.kind not in ("mlp", "tf_config") and not run.job.local:
        # Opened last and so closed first: nobody is sent to a dispatcher that has stopped.
        discovery = open_things.enter_context(open_discovery(run, environ))
        assert discovery is not None  # the run is not local
        discovery.register(DATA_DISPATCHER, 0, address)
    say(f"dispatcher listens on {address}")
    status.watch_reader(address, "dispatching")
    show_dispatched(running, stop)
    say("dispatcher ended")
    return 0


def read_splits(
    data: TaskData,
    run: RunConfig,
    environ: Mapping[str, str],
    *,
    status: OwnStatus,
    stop: threading.Event,
    open_things: ExitStack,
) -> int:
    """Read files for the workers of a run until told to stop."""
    from monolith.data.service import DataWorker

    service = run.data_service or DataServiceConfig()
    where = dispatcher_of(run, environ, open_things)
    if not dispatcher_answers(where, service.patience, stop):
        return 0
    host, port = listen_address(run, environ)
    running = open_things.enter_context(
        DataWorker(
            where,
            data.open_split,
            host=host,
            port=port,
            guard=guard_listener(host, run.security),
            limits=run.limits,
            readers=service.readers,
            chunk_records=data.batch_size,
            patience=service.patience,
        )
    )
    say(f"data worker {run.cluster.index} listens on {running.address}")
    status.watch_reader(running.address, "reading")
    while not stop.is_set() and not running.wait(0.5):
        pass
    say(f"data worker {run.cluster.index} ended")
    return 0


def state_folder(run: RunConfig) -> str:
    """Return where the dispatcher keeps how far the data was read.

    Raises:
        ConfigError: The model_dir is remote, and no folder was named.
    """
    if run.data_service is not None and run.data_service.folder is not None:
        return run.data_service.folder
    if filesystem.is_remote(run.train.model_dir):
        raise ConfigError(
            f"data_service.folder: name a local folder for the dispatcher; {run.train.model_dir} is remote"
        )
    return filesystem.join(run.train.model_dir, "data_service")


@contextmanager
def stopped_with_chief(
    stop: threading.Event, model_dir: str, every: float = LOOK_EVERY
) -> Iterator[threading.Thread]:
    """Set an event when the chief of a run has said how it stands, and says no more: then it has ended."""
    board = StatusBoard(model_dir)
    seen = False

    def look() -> None:
        nonlocal seen
        while not stop.wait(every):
            try:
                there = board.read_one("worker", 0) is not None
            except MonolithError as error:  # a file is being replaced, or a disk is away
                _log.debug("cannot see the chief: %s", error)
                continue
            if seen and not there:
                _log.info("the chief has ended; this process stops, too")
                stop.set()
            seen = seen or there

    thread = threading.Thread(target=look, name="chief-watch", daemon=True)
    thread.start()
    yield thread


def dispatcher_of(run: RunConfig, environ: Mapping[str, str], open_things: ExitStack) -> Callable[[], str]:
    """Return who says where the dispatcher is, now and whenever it has to be found again.

    Raises:
        ConfigError: Nobody can.
    """
    address = dispatcher_address(run, environ)
    if address is not None:
        return lambda: address
    if run.job.local:
        raise ConfigError("data service: dispatcher is not set; give it as data_service.dispatcher")
    discovery = open_things.enter_context(open_discovery(run, environ))
    assert discovery is not None  # the run is not local
    return locator(discovery, DATA_DISPATCHER)


# Who trains


@contextmanager
def served_task(
    options: TrainOptions, task: Task, run: RunConfig, environ: Mapping[str, str]
) -> Iterator[Task]:
    """Give the task as this process trains it: reading from the data service, where the run has one.

    Its extra data workers live as long as the block.
    """
    service = run.data_service
    if run.cluster.role != "worker" or service is None or not service.enabled:
        if run.cluster.role == "worker" and run.discovery.kind == "mlp" and environ.get("MLP_DISPATCHER_NUM"):
            warn(
                "MLP has started a data service, and this run does not read from it; to use it set "
                "data_service.enabled (--dataset_use_dataservice)"
            )
        yield task
        return
    from monolith.data.service import DataServiceSource

    with ExitStack() as open_things:
        run = replace(run, security=data_security(run, environ))
        where = dispatcher_of(run, environ, open_things)
        guard = guard_caller(run.security)
        open_things.enter_context(extra_data_workers(options, run, environ, where))
        say("reading from the data service")
        yield read_from_service(
            task,
            lambda: DataServiceSource(
                where, TRAINER, guard=guard, prefetch=service.prefetch, patience=service.patience
            ),
        )
