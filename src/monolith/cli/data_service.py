"""`monolith data dispatcher` and `monolith data worker`: the two servers of the data service.

Each prints its address as one line on standard output, shows on standard error how far it
has come, and stops in order on SIGTERM or Ctrl-C, or with the chief where MLP started it. Here
the data service meets the registry by which its processes find each other, and the guard that
decides who may come in.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from monolith.cli.options.data import DataDispatcherOptions, DataWorkerOptions
from monolith.cli.options.flags import SecurityOptions, guard_of, limits_of, security_of
from monolith.cli.terminal import STOP_SIGNALS
from monolith.errors import ConfigError
from monolith.runtime.data_service import dispatcher_answers, show_dispatched, stop_with_chief
from monolith.runtime.local_profile import profiled_by_user

if TYPE_CHECKING:
    from monolith.cluster.security import Guard

_log = logging.getLogger(__name__)

_EVERYWHERE = ("", "0.0.0.0", "::", "[::]")
"""Hosts to listen on to which no client can connect."""
_LOOK_AGAIN = timedelta(seconds=0.5)


def dispatcher(options: DataDispatcherOptions) -> int:
    """Run a dispatcher until it is told to stop."""
    from monolith import filesystem
    from monolith.cluster import DATA_DISPATCHER, concat_ip_and_port, open_discovery_url
    from monolith.data.service import DataJobConfig, Dispatcher

    splits: list[str] = []
    for split in options.splits:
        found = filesystem.glob(split) if "*" in split else [split]
        if not found:
            raise ConfigError(f"data dispatcher: no file matches {split!r}")
        splits += found
    config = DataJobConfig(
        splits=tuple(splits),
        epochs=options.epochs,
        lease=timedelta(seconds=options.lease),
        trainer_timeout=None
        if options.trainer_timeout is None
        else timedelta(seconds=options.trainer_timeout),
    )
    guard = data_guard(options.security, options.host, os.environ)
    with ExitStack() as open_things:
        stop = open_things.enter_context(told_to_stop(os.environ))
        open_things.enter_context(profiled_by_user("dispatcher-0", os.environ, name="data dispatcher"))
        running = open_things.enter_context(
            Dispatcher(
                config,
                folder=options.folder,
                host=options.host,
                port=options.port,
                guard=guard,
                limits=limits_of(options.security, os.environ),
            )
        )
        address = concat_ip_and_port(reachable_host(options.host, options.advertise), running.port)
        if options.discovery is not None:
            # Opened last and so closed first: no client is sent to a dispatcher that has stopped.
            discovery = open_things.enter_context(open_discovery_url(options.discovery, os.environ))
            discovery.register(DATA_DISPATCHER, 0, address)
        say(f"dispatcher {address}")
        show_dispatched(running, stop)
    return 0


def data_guard(options: SecurityOptions, bind: str, environ: Mapping[str, str]) -> Guard:
    """Return what a process of a stand-alone data service demands and presents: a token, unless --insecure.

    Without a setting it is the token of the run that launched this process, and else the one that the
    processes of this user share in a file.

    Raises:
        ConfigError: Other machines can reach the address and no token was given; or a file cannot be used.
    """
    from monolith.cli.terminal import say as say_to_person
    from monolith.cluster.run_token import is_guarded, run_security, user_security, user_token_file
    from monolith.cluster.security import guard_caller

    guard = guard_of(options, bind, environ)
    security = run_security(security_of(options, environ), environ)
    if options.insecure:
        return guard
    if not is_guarded(security):
        security = user_security(security, environ)
        say_to_person(
            f"data service: the token is in {user_token_file(environ)}; commands of this user find it, give "
            "processes elsewhere a copy by --token-file (security.token_file of a run)"
        )
    return guard_caller(security)


def worker(options: DataWorkerOptions) -> int:
    """Run a data worker until it is told to stop, or loses its dispatcher."""
    from monolith.data.service import DataWorker, DataWorkerConfig

    open_split = find_function(options.source)
    guard = data_guard(options.security, options.host, os.environ)
    advertise = reachable_host(options.host, options.advertise)
    patience = timedelta(seconds=options.patience)
    with ExitStack() as open_things:
        stop = open_things.enter_context(told_to_stop(os.environ))
        open_things.enter_context(profiled_by_user("data_worker-0", os.environ, name="data worker"))
        where = dispatcher_address(options, open_things)
        if not dispatcher_answers(where, patience, stop):
            return 0
        running = open_things.enter_context(
            DataWorker(
                where,
                open_split,
                DataWorkerConfig(
                    readers=options.readers,
                    buffer_chunks=options.buffer_chunks,
                    chunk_records=options.chunk_records,
                    patience=patience,
                ),
                host=options.host,
                port=options.port,
                advertise=advertise,
                guard=guard,
                limits=limits_of(options.security, os.environ),
            )
        )
        say(f"worker {running.address}")
        while not stop.is_set() and not running.wait(0.5):
            pass
    return 0


def dispatcher_address(options: DataWorkerOptions, open_things: ExitStack) -> Callable[[], str]:
    """Return who says where the dispatcher is, now and whenever it has to be found again."""
    from monolith.cluster import DATA_DISPATCHER, locator, open_discovery_url
    from monolith.data.service import dispatcher_from_environment

    if options.dispatcher is not None and options.discovery is not None:
        raise ConfigError("data worker: give the dispatcher by --dispatcher or by --discovery, not by both")
    if options.discovery is not None:
        return locator(
            open_things.enter_context(open_discovery_url(options.discovery, os.environ)), DATA_DISPATCHER
        )
    address = options.dispatcher or dispatcher_from_environment(os.environ)
    return lambda: address


def reachable_host(host: str, advertise: str | None) -> str:
    """Return the host by which others reach what listens on `host`."""
    from monolith.cluster import get_local_host

    if advertise:
        return advertise.strip("[]")
    return get_local_host(os.environ) if host in _EVERYWHERE else host.strip("[]")


def find_function(name: str) -> Callable[[str], Any]:
    """Return what `module:function` names."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"--source must be module:function, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script's path does not begin with the current folder; `python -m` has it
    try:
        found: Callable[[str], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as cause:
        raise ConfigError(f"--source {name}: {cause}") from cause
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def told_to_stop(
    environ: Mapping[str, str], check: Callable[[str, int, timedelta], bool] | None = None
) -> Iterator[threading.Event]:
    """An event that SIGTERM, Ctrl-C and, under MLP, the end of the chief set, as long as the block lasts.

    A handler may interrupt the thread that waits for the event while that thread has the event's lock, and
    would then wait for itself. So it only leaves a note, and a thread sets the event.

    Args:
        check: Whether a host accepts a connection at a port; by default asks there.
    """
    stop = threading.Event()
    notes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait_for_a_note() -> None:
        notes.get()
        stop.set()

    waiting = threading.Thread(target=wait_for_a_note, name="stop-signals", daemon=True)
    waiting.start()
    before = {number: signal.signal(number, lambda *_: notes.put(None)) for number in STOP_SIGNALS}
    stop_with_chief(stop, environ, check)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        notes.put(None)
        waiting.join()
