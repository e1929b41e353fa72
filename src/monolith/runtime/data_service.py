"""The data service of a run: its dispatcher, its data workers, and the workers that read from it.

All of them are started by the same command line, `monolith train TASK ...`, and differ by their role:
cluster.role, or the role that MLP gives to each. The task's own data says which files are read, and how. The
dispatcher and the data workers end when the chief has ended: its status file is then gone from the model_dir,
and under MLP its port is closed.

    files ──► data workers, each reads some ──► chunks of a batch ──► workers, each trains some
                 dispatcher: assigns files to data workers, and chunks to workers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from monolith import concurrency, filesystem
from monolith.cluster import DATA_DISPATCHER, concat_ip_and_port, locator
from monolith.cluster.addresses import Address, connect_error, poll
from monolith.cluster.run_token import TOKEN_FILE, read_token, run_security, shared_security, user_security
from monolith.cluster.security import SecurityConfig, derive_token, guard_caller, guard_listener
from monolith.cluster.status import StatusBoard
from monolith.data.config import DataServiceConfig
from monolith.errors import ConfigError, DeadlineExceededError, MonolithError, RetryableError
from monolith.observe import progress
from monolith.runtime.config import RunConfig
from monolith.runtime.discovery import (
    CheckPort,
    dispatcher_address,
    installed_schedulers,
    listen_address,
    open_discovery,
)

if TYPE_CHECKING:
    from monolith.data.service import Dispatcher
    from monolith.runtime.context import RunContext
    from monolith.runtime.status import OwnStatus
    from monolith.runtime.task_data import TaskData
    from monolith.train import Task

_log = logging.getLogger(__name__)

TRAINER = "worker"
"""The name of the workers at the dispatcher; each of several adds its number."""
CHECK_EVERY = 1.0
_POLL_EVERY = timedelta(seconds=0.5)


def secured(run: RunConfig, environ: Mapping[str, str]) -> RunConfig:
    """Return a run whose processes share a secret, however they were started.

    Raises:
        ConfigError: Other machines can reach the address of this process, and the run has no secret; or the
            secret in its model_dir is not to be trusted.
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


# The dispatcher and the data workers


def read_for_workers(task: Task, config: RunConfig, run: RunContext, status: OwnStatus) -> None:
    """Be the dispatcher or a data worker of a run, until it ends or this process is asked to stop."""
    from monolith.runtime.task_data import data_of

    data = data_of(task)
    stop = concurrency.Event()
    with ExitStack() as open_things:
        open_things.enter_context(run.stopped_by(lambda _: stop.set()))
        stop_with_chief(stop, run.environ)
        open_things.enter_context(stopped_with_chief(stop, config.train.model_dir))
        read = dispatch if config.cluster.role == "dispatcher" else read_splits
        read(data, config, run, status=status, stop=stop, open_things=open_things)


def dispatch(
    data: TaskData,
    config: RunConfig,
    run: RunContext,
    *,
    status: OwnStatus,
    stop: concurrency.Event,
    open_things: ExitStack,
) -> None:
    """Assign the files of a run to its data workers until asked to stop."""
    from monolith.data.service import DataJobConfig, Dispatcher

    host, port = listen_address(config, run.environ)
    running = open_things.enter_context(
        Dispatcher(
            DataJobConfig(splits=tuple(data.config.files()), epochs=data.epochs),
            folder=state_folder(config),
            host=host,
            port=port,
            guard=guard_listener(host, config.security),
            limits=config.limits,
        )
    )
    address = concat_ip_and_port(host, running.port)
    if dispatcher_address(config, run.environ) is None and not config.job.local:
        # Opened last and so closed first: no process finds a dispatcher that has stopped.
        discovery = open_things.enter_context(open_discovery(config, run.environ))
        assert discovery is not None  # the run is not local
        discovery.register(DATA_DISPATCHER, 0, address)
    run.output.say(f"dispatcher listens on {address}")
    status.watch_reader(address, "dispatching")
    show_dispatched(running, stop)
    run.output.say("dispatcher ended")


def read_splits(
    data: TaskData,
    config: RunConfig,
    run: RunContext,
    *,
    status: OwnStatus,
    stop: concurrency.Event,
    open_things: ExitStack,
) -> None:
    """Read files for the workers of a run until asked to stop."""
    from monolith.data.service import DataWorker, DataWorkerConfig

    service = config.data_service or DataServiceConfig()
    dispatcher = dispatcher_of(config, run.environ, open_things)
    if not dispatcher_answers(dispatcher, service.patience, stop):
        return
    host, port = listen_address(config, run.environ)
    running = open_things.enter_context(
        DataWorker(
            dispatcher,
            data.open_split,
            DataWorkerConfig(
                readers=service.readers, chunk_records=data.batch_size, patience=service.patience
            ),
            host=host,
            port=port,
            guard=guard_listener(host, config.security),
            limits=config.limits,
        )
    )
    run.output.say(f"data worker {config.cluster.index} listens on {running.address}")
    status.watch_reader(running.address, "reading")
    while not stop.is_set() and not running.wait(0.5):
        pass
    run.output.say(f"data worker {config.cluster.index} ended")


def show_dispatched(running: Dispatcher, stop: concurrency.Event) -> None:
    """Show how many records were dispatched, until told to stop."""
    known = 0
    with progress("Data dispatched", unit="records") as bar:
        while not stop.wait(1.0):
            records = running.status()["records"]
            bar.advance(records - known)
            known = records


def dispatcher_answers(where: Callable[[], str], patience: timedelta, stop: concurrency.Event) -> bool:
    """Wait until the dispatcher is found and its port is open; return False when told to stop before.

    Raises:
        DeadlineExceededError: That took longer than there was patience. Says what was found last.
    """
    last = ""

    def ask() -> bool | None:
        nonlocal last
        if stop.is_set():
            return False
        bar.advance(0)
        try:
            address = where()
            error = connect_error(Address.parse(address), timedelta(seconds=1))
            found = f"at {address}: {error}" if error else ""
        except RetryableError as unknown:
            found = str(unknown)
        if found not in ("", last):
            _log.info("waiting for the dispatcher: %s", found)
        last = found
        return None if found else True

    def sleep(seconds: float) -> None:
        stop.wait(seconds)
        bar.advance(seconds)

    with progress("Waiting for the dispatcher", total=patience.total_seconds(), unit="s") as bar:
        answers = poll(ask, timeout=patience, every=_POLL_EVERY, sleep=sleep)
    if answers is None:
        raise DeadlineExceededError(
            f"data worker: waited {patience.total_seconds():g} s for the dispatcher: {last}. "
            "Start it, or see its log; --patience waits longer."
        )
    return answers


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
    stop: concurrency.Event, model_dir: str, every: float = CHECK_EVERY
) -> Iterator[concurrency.Thread]:
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

    thread = concurrency.Thread(target=look, name="chief-watch", daemon=True)
    thread.start()
    yield thread


def dispatcher_of(run: RunConfig, environ: Mapping[str, str], open_things: ExitStack) -> Callable[[], str]:
    """Return a function that returns the current address of the dispatcher; call it again to reconnect.

    Raises:
        ConfigError: Neither the config nor the environment says how to find the dispatcher.
    """
    address = dispatcher_address(run, environ)
    if address is not None:
        return lambda: address
    if run.job.local:
        raise ConfigError("data service: dispatcher is not set; give it as data_service.dispatcher")
    discovery = open_things.enter_context(open_discovery(run, environ))
    assert discovery is not None  # the run is not local
    return locator(discovery, DATA_DISPATCHER)


def stop_with_chief(
    stop: concurrency.Event, environ: Mapping[str, str], check: CheckPort | None = None
) -> None:
    """Set `stop` when the chief ends, if a scheduler started this process as its helper and does not end
    it."""
    for scheduler in installed_schedulers().values():
        scheduler.stop_with_chief(stop, environ, check)


# The workers


@contextmanager
def served_task(task: Task, config: RunConfig, run: RunContext) -> Iterator[Task]:
    """Yield the task as this process trains it: reading from the data service, if the run has one.

    Its extra data workers live as long as the block.
    """
    service, environ = config.data_service, run.environ
    if config.cluster.role != "worker" or service is None or not service.enabled:
        mlp = config.discovery.kind == "mlp" and environ.get("MLP_DISPATCHER_NUM")
        if config.cluster.role == "worker" and mlp:
            run.output.warn(
                "MLP has started a data service, and this run does not read from it; to use it set "
                "data_service.enabled (--dataset_use_dataservice)"
            )
        yield task
        return
    from monolith.data.service import DataServiceSource
    from monolith.runtime.launch import extra_data_workers
    from monolith.runtime.task_data import read_from_service

    with ExitStack() as open_things:
        config = replace(config, security=data_security(config, environ))
        dispatcher = dispatcher_of(config, environ, open_things)
        guard = guard_caller(config.security)
        open_things.enter_context(extra_data_workers(run, config, dispatcher))
        run.output.say("reading from the data service")
        yield read_from_service(
            task,
            lambda: DataServiceSource(
                dispatcher, TRAINER, guard=guard, prefetch=service.prefetch, patience=service.patience
            ),
        )
