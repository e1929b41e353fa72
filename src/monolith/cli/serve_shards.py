"""`monolith serve --role ps | entry`: rows of one model over serving servers, and who asks them.

A serving server (`ps`) answers lookups in the rows of its shard, as one replica of it, and is found in a
registry. An entry is a model server without rows of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from monolith import filesystem
from monolith.cli.data_service import reachable_host, say, told_to_stop
from monolith.cli.options.flags import guard_of, limits_of, run_config_of, security_of
from monolith.cli.options.serve import SERVE_FIELDS, ServeOptions
from monolith.cluster import Discovery, open_discovery_url
from monolith.cluster.run_token import TOKEN_FILE, read_token
from monolith.cluster.security import Guard, SecurityConfig, derive_token, guard_caller, ssl_context
from monolith.config import parse_bytes, parse_duration
from monolith.errors import ConfigError, MonolithError
from monolith.observe import ClockWatch, Metrics, MetricsServer, progress
from monolith.serve.config import ServeConfig
from monolith.serve.manifest import read_servable
from monolith.serve.rows import RowSource
from monolith.serve.shards import ServingServer, ServingServerConfig, open_remote_rows
from monolith.serve.versions import list_versions
from monolith.sync.channel import OpenReader
from monolith.sync.channel_url import open_reader, parse_channel_url
from monolith.sync.messages import split_identity
from monolith.wire.ports import join_address

FROM_DISCOVERY = "discovery"
"""The URL of a trainer whose addresses are in the registry."""
_DURATIONS = {"serve.follow.stale_after", "serve.limits.timeout", "serve.poll", "serve.drain"}
SERVERS_WITHIN = 30.0
"""Seconds that an entry waits for a server of every shard before it tries a version."""


def serve_rows(options: ServeOptions) -> int:
    """Answer lookups of one shard until told to stop."""
    if len(options.folders) != 1:
        raise ConfigError("serve --role ps: a serving server has the rows of one folder")
    config = serve_config(options)
    url = registry_of(options, config)
    guard = guard_of(options.security, config.host, os.environ, role="follow")
    with (
        told_to_stop(os.environ) as stop,
        open_discovery_url(url, os.environ) as discovery,
        trainer_of(options, config) as trainer,
        ExitStack() as shown,
    ):
        metrics = Metrics()
        server = ServingServer(
            options.folders[0],
            options.shard,
            ServingServerConfig(
                host=config.host,
                port=config.port or 0,
                advertise=reachable_host(config.host, options.advertise),
                replica=options.replica,
                threads=config.predict_threads,
                limits=limits_of(options.security, os.environ),
                follow=config.follow,
                serve_withheld=options.serve_withheld,
            ),
            guard=guard,
            discovery=discovery,
            follow=trainer,
            metrics=metrics,
        )
        with server:
            if options.metrics_port is not None:
                port = shown.enter_context(_show(metrics, options, config.host, guard))
                scheme = "https" if security_of(options.security, os.environ).uses_tls else "http"
                say(f"metrics  {scheme}://{join_address(config.host, port.port)}/metrics")
            with progress(f"Loading shard {options.shard}", server.file_bytes, "bytes") as bar:
                server.prefault(bar)
            server.start()
            say(
                f"rows     {server.address}  shard {server.shard}, replica {server.replica} of {server.model}"
            )
            with ClockWatch(metrics):
                stop.wait()
    return 0


def _show(metrics: Metrics, options: ServeOptions, host: str, guard: Guard) -> MetricsServer:
    """Serve metrics to those who may ask for rows."""
    assert options.metrics_port is not None
    return metrics.serve(
        options.metrics_port,
        host,
        context=ssl_context(security_of(options.security, os.environ), server=True),
        admits=None if guard.token is None else guard.admits,
    )


def remote_rows(
    options: ServeOptions, config: ServeConfig, guard: Guard, stop: threading.Event
) -> Callable[[str], RowSource]:
    """Return what opens the rows of a version, given its folder: over the serving servers of the registry.

    Args:
        stop: Once set, no server is waited for any more.
    """
    registry_of(options, config)  # or an error that names the flag
    shards = config.shards
    guard = guard.for_role("follow")

    def open_rows(folder: str) -> RowSource:
        rows = open_remote_rows(read_servable(folder), shards, guard=guard, environ=os.environ)
        end = time.monotonic() + SERVERS_WITHIN
        while not rows.ready and time.monotonic() < end and not stop.wait(0.02):
            pass
        return rows

    return open_rows


def serve_config(options: ServeOptions) -> ServeConfig:
    """Return the group `serve` of the config file and the environment, with the flags over it.

    Raises:
        ConfigError: A setting makes no sense; names its field.
    """
    given: dict[str, Any] = {
        path: value
        for name, path in SERVE_FIELDS.items()
        if (value := getattr(options, name)) is not None and value is not False and value not in ((), "")
    }
    for name in ("http_port", "grpc_port"):
        text = given.get(f"serve.{name}")
        if text is not None:
            if text.lower() != "none" and not text.isdecimal():
                flag = name.replace("_", "-")
                raise ConfigError(f"serve: --{flag} must be a whole number or None, got {text!r}")
            given[f"serve.{name}"] = None if text.lower() == "none" else int(text)
    if options.max_delay_ms is not None:
        given["serve.batching.max_delay"] = timedelta(milliseconds=options.max_delay_ms)
    for path in _DURATIONS & given.keys():
        given[path] = parse_duration(given[path])
    for path in [path for path in given if path.endswith("_bytes")]:
        given[path] = parse_bytes(given[path])
    return run_config_of(options.security, os.environ, given).serve


@contextmanager
def trainer_of(options: ServeOptions, config: ServeConfig) -> Iterator[OpenReader | None]:
    """Hand over what opens the channel of the trainer that is followed; None where none is.

    Raises:
        ConfigError: Its URL makes no sense.
    """
    url = config.follow.url
    if not url:
        yield None
        return
    parse_channel_url(url)  # says now what every reader would say
    security = security_of(options.security, os.environ)
    with ExitStack() as opened:
        registry: Discovery | None = None
        if url == FROM_DISCOVERY:
            registry = opened.enter_context(open_discovery_url(registry_of(options, config), os.environ))
        # The token is looked for when a reader is opened: the first export may be yet to come.
        yield lambda: open_reader(url, guard=guard_of_follower(security, options.folders), discovery=registry)


def guard_of_follower(security: SecurityConfig, folders: Sequence[str]) -> Guard:
    """Return what a follower proves: the token that was set, or the one of the run that an export is of.

    A run that was given no token leaves one in its model_dir, for its own user. Exports name their run, and
    may be in its folder.
    """
    guard = guard_caller(security).for_role("follow")
    if guard.token is not None or guard.uses_tls:
        return guard
    for text in folders:
        for folder in _run_folders(text.partition("=")[2] or text):
            if not filesystem.is_remote(folder) and (Path(folder) / TOKEN_FILE).exists():
                with suppress(ConfigError):  # it is of another user: not meant for us
                    control = read_token(Path(folder) / TOKEN_FILE)
                    follow = derive_token(control, "follow")
                    return guard_caller(replace(security, follow_token=follow)).for_role("follow")
    return guard


def _run_folders(folder: str) -> Iterator[str]:
    """Yield folders that may be the model_dir of what a folder has exports of."""
    versions = [filesystem.join(folder, one) for one in reversed(list_versions(folder))]
    for version in (folder, *versions[:1]):
        with suppress(MonolithError):
            yield split_identity(read_servable(version).run)[0]
    inside = Path(folder).absolute()
    yield from (str(one) for one in (inside, *inside.parents[:3]))


def registry_of(options: ServeOptions, config: ServeConfig) -> str:
    if not config.shards.discovery:
        raise ConfigError(
            f"serve --role {options.role}: say with --discovery where servers and trainers are found: "
            "zookeeper://host:2181/job, consul://host:8500/job or files:///shared/folder/job"
        )
    return config.shards.discovery
