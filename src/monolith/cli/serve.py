"""`monolith serve DIR...`: exported models, asked over HTTP and gRPC.

One process serves until SIGTERM or Ctrl-C: then it is not ready any more, answers what is in flight, and
ends with status 0. With --processes, one more watches over those that share the ports, and restarts what is
killed.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from monolith import filesystem
from monolith.cli.data_service import reachable_host, say, told_to_stop
from monolith.cli.options.flags import SecurityOptions, guard_of, limits_of, run_config_of, security_of
from monolith.cli.options.serve import SERVE_FIELDS, ServeOptions
from monolith.cluster import Discovery, open_discovery_url
from monolith.cluster.launch.processes import LaunchOptions, Member, launch
from monolith.cluster.run_token import TOKEN_FILE, read_token
from monolith.cluster.security import Guard, SecurityConfig, derive_token, guard_caller, ssl_context
from monolith.config import parse_bytes, parse_duration
from monolith.errors import ConfigError, MonolithError
from monolith.observe import ClockWatch, Metrics, MetricsServer, progress
from monolith.runtime.local_profile import profiled_by_user
from monolith.serve.config import ServeConfig
from monolith.serve.manifest import read_servable
from monolith.serve.predictor import LoadOptions
from monolith.serve.rows import RowSource
from monolith.serve.server import (
    InferenceServer,
    ServedFolder,
    ServerProcesses,
    VersionPolicy,
)
from monolith.serve.server.catalog import BestVersion, ServableCatalog, example_row, served_folder
from monolith.serve.shards import ServingServer, ServingServerConfig, open_remote_rows
from monolith.serve.versions import list_versions
from monolith.sync.channel import OpenReader
from monolith.sync.channel_url import open_reader, parse_channel_url
from monolith.sync.messages import split_identity
from monolith.wire.ports import bound_socket, join_address

READY = "ready"
"""What each of several processes says when it serves."""
RESTARTS = 1_000_000
"""How often a process that is killed is restarted: as often as it takes."""


def run(options: ServeOptions) -> int:
    """Serve until told to stop."""
    if options.processes < 1:
        raise ConfigError(f"serve: --processes must be at least 1, got {options.processes}")
    if options.metrics_port is not None and options.role != "ps":
        raise ConfigError(
            "serve: --metrics-port is for --role ps; others show metrics at /metrics of their port for HTTP"
        )
    if options.role == "ps":
        with profiled_by_user(f"serving-server-{options.shard}", os.environ, serves=options.folders):
            return serve_rows(options)
    if options.processes > 1:
        return serve_together(options)
    config = serve_config(options)
    torch.set_num_threads(config.predict_threads)  # of all threads of this process
    folders = [chosen_folder(text, options, config) for text in options.folders]
    names = [one.name for one in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"serve: two folders hold models of one name ({', '.join(names)}); write NAME=DIR")
    guard = guard_of(options.security, config.host, os.environ, role="predict")
    control = guard.for_role("control")
    context = ssl_context(security_of(options.security, os.environ), server=True)
    index, count, folder = peers_of(options.peers)
    with (
        told_to_stop(os.environ) as stop,
        trainer_of(options, config) as trainer,
        profiled_by_user(f"serve-{index}", os.environ, serves=[one.folder for one in folders]),
    ):
        loading = LoadOptions(
            threads=config.predict_threads,
            allow_module=options.allow_module,
            compiled=options.compiled,
            memory_bytes=None if config.memory_bytes is None else config.memory_bytes // count,
        )
        catalog = ServableCatalog(
            loading,
            serve_withheld=options.serve_withheld,
            rows=remote_rows(options, config, guard, stop) if options.role == "entry" else None,
        )
        peers = ServerProcesses(folder, index, count, guard if control.token is None else control)
        with InferenceServer(
            config,
            folders,
            catalog,
            guard=guard,
            context=context,
            peers=peers,
            follow=trainer,
        ) as server:
            if options.peers is None:
                for line in banner(server, folders, options):
                    say(line)
            else:
                say(READY)
            with ClockWatch(server.inference.metrics.all):
                stop.wait()
            sys.stderr.write("stopping: not ready any more; answering what is in flight\n")
    return 0


def chosen_folder(text: str, options: ServeOptions, config: ServeConfig) -> ServedFolder:
    """Return the folder that a word of the command line names, with the versions that flags choose."""
    if options.checkpoint is not None and options.version_policy is not None:
        raise ConfigError("serve: --checkpoint and --version-policy both choose a version; give one of them")
    policy = None
    if options.version_policy is not None or (config.follow.url and options.checkpoint is None):
        policy = VersionPolicy.parse(options.version_policy or "latest")  # a trainer continues its latest
    return served_folder(text, policy, checkpoint=options.checkpoint, serve_withheld=options.serve_withheld)


def chosen_text(one: ServedFolder, options: ServeOptions, version: str, *, follows: bool) -> str:
    """Return why a version is served, in words."""
    if options.checkpoint is not None:
        return f"  (--checkpoint {options.checkpoint})"
    if options.version_policy is not None:
        return f"  (--version-policy {options.version_policy})"
    if follows:
        return "  (the newest, which the trainer continues)"
    chosen = BestVersion(one.folder)
    return f"  ({chosen.why(version, list_versions(one.folder))})"


def banner(server: InferenceServer, folders: Sequence[ServedFolder], options: ServeOptions) -> list[str]:
    """Return what a person wants to know of a server that has begun."""
    follow = server.config.follow.url
    host = reachable_host(server.config.host, None)
    lines = []
    if server.http_url is not None:
        scheme, _, address = server.http_url.partition("://")
        http = f"{scheme}://{join_address(host, int(address.rpartition(':')[2]))}"
        lines.append(f"http     {http}  (/docs, /metrics, /v2/health/ready)")
    if server.grpc_address is not None:
        grpc = f"grpc://{join_address(host, int(server.grpc_address.rpartition(':')[2]))}"
        lines.append(f"grpc     {grpc}")
    for one in folders:
        versions = ", ".join(server.inference.repository.versions(one.name)) or "none that can be loaded"
        ready = server.inference.repository.is_ready(one.name)
        why = chosen_text(one, options, versions, follows=bool(follow)) if ready else ""
        lines.append(f"model    {one.name}  version {versions}  from {one.folder}{why}")
    if server.config.memory_bytes is not None:
        memory = f"{server.config.memory_bytes:,} bytes"
        lines.append(f"memory   {memory} for the rows of a version; all others are read from disk")
    if follow:
        lines.append(f"follows  {follow}")
    first = folders[0]
    if server.inference.repository.is_ready(first.name):
        with server.inference.repository.lease(first.name) as loaded:
            row = json.dumps(example_row(first.folder, loaded.model), ensure_ascii=False)
        url = http if server.http_url is not None else grpc
        which = f" --model {shlex.quote(first.name)}" if len(folders) > 1 else ""
        token = options.security.token_file
        shown = "" if token is None else f" --token-file {shlex.quote(str(token))}"
        lines.append(f"ask it   monolith query {url}{which}{shown} --row {shlex.quote(row)}")
    return lines


# Several processes


def serve_together(options: ServeOptions) -> int:
    """Start the processes that share the ports, and restart what is killed, until told to stop."""
    config = serve_config(options)
    guard_of(options.security, config.host, os.environ, role="predict")  # or each process would fail
    with ExitStack() as open_things:
        folder = open_things.enter_context(filesystem.temporary_folder("monolith-serve-"))
        chosen = with_ports(options, open_things)
        members = [
            Member(role="process", index=index, command=command_of(chosen, index, folder))
            for index in range(options.processes)
        ]
        told: set[str] = set()

        def tap(name: str, line: str) -> bool:
            if line != READY:
                return False
            if name not in told:
                told.add(name)
                if len(told) == options.processes:
                    for text in together_banner(chosen):
                        say(text)
            return True

        outcome = launch(
            members,
            LaunchOptions(
                output=sys.stderr,
                grace=config.drain + timedelta(seconds=5),
                followers=(),
                restarts=RESTARTS,
                tap=tap,
            ),
        )
    if outcome.failed is not None:
        raise ConfigError(f"serve: {outcome.text}; its lines above say why")
    return 0


def with_ports(options: ServeOptions, open_things: ExitStack) -> ServeOptions:
    """Return the options with ports chosen, which are kept for the processes while `open_things` is open."""
    config = serve_config(options)
    names = ("port",) if config.port is not None else ("http_port", "grpc_port")
    chosen: dict[str, Any] = {}
    for name in names:
        wanted = getattr(config, name)
        if wanted is not None:
            listener: socket.socket = bound_socket(config.host, wanted, share=True)
            open_things.callback(listener.close)
            port = listener.getsockname()[1]
            chosen[name] = port if name == "port" else str(port)
    return replace(options, **chosen)


def together_banner(options: ServeOptions) -> list[str]:
    config = serve_config(options)
    host = reachable_host(config.host, None)
    scheme = "https" if security_of(options.security, os.environ).uses_tls else "http"
    http = config.http_port if config.port is None else config.port
    grpc = config.grpc_port if config.port is None else config.port
    lines = []
    if http is not None:
        lines.append(f"http     {scheme}://{join_address(host, http)}  (/docs, /metrics, /v2/health/ready)")
    if grpc is not None:
        lines.append(f"grpc     grpc://{join_address(host, grpc)}")
    for one in (chosen_folder(text, options, config) for text in options.folders):
        versions = list_versions(one.folder)
        version = ", ".join(one.policy.wanted(versions))
        why = chosen_text(one, options, version, follows=bool(config.follow.url))
        lines.append(f"model    {one.name}  version {version}  from {one.folder}{why}")
    return [*lines, f"serving  with {options.processes} processes from {', '.join(options.folders)}"]


def command_of(options: ServeOptions, index: int, folder: Path) -> tuple[str, ...]:
    """Return the command line of one of several processes."""
    one = replace(options, processes=1, peers=f"{index}/{options.processes}:{folder}")
    words = [sys.executable, "-m", "monolith", "serve", *options.folders]
    return (*words, *flags_of(one, ServeOptions(folders=())), *flags_of(one.security, SecurityOptions()))


def flags_of(given: object, usual: object) -> list[str]:
    """Return the flags that make `given` of `usual`, both of one dataclass."""
    words: list[str] = []
    for field in fields(given):  # type: ignore[arg-type]
        value = getattr(given, field.name)
        if field.name in ("folders", "security") or value == getattr(usual, field.name):
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if isinstance(value, tuple):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words


def peers_of(text: str | None) -> tuple[int, int, Path | None]:
    """Read what `command_of` wrote."""
    if text is None:
        return 0, 1, None
    place, _, folder = text.partition(":")
    index, _, count = place.partition("/")
    if not (index.isdecimal() and count.isdecimal() and folder):
        raise ConfigError(f"serve: --peers is set by --processes; got {text!r}")
    return int(index), int(count), Path(folder)


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
                memory_bytes=config.memory_bytes,
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
                server.serve(stop)
    return 0


def _show(metrics: Metrics, options: ServeOptions, host: str, guard: Guard) -> MetricsServer:
    """Serve metrics to clients that may read rows."""
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
        if text is not None and options.port is not None:
            raise ConfigError(
                "serve: --port is one port for HTTP and gRPC, so "
                f"--{name.replace('_', '-')} has no meaning with it; give --http-port and --grpc-port, or "
                "--port alone"
            )
        if text is not None:
            if text.lower() != "none" and not text.isdecimal():
                flag = name.replace("_", "-")
                raise ConfigError(f"serve: --{flag} must be a whole number or None, got {text!r}")
            given[f"serve.{name}"] = None if text.lower() == "none" else int(text)
    if options.max_delay_ms is not None:
        given["serve.batching.max_delay"] = timedelta(milliseconds=options.max_delay_ms)
    for path in _DURATIONS & given.keys():
        given[path] = parse_duration(given[path])
    for flag, path in SERVE_FIELDS.items():
        if path in given and path.endswith("_bytes"):
            try:
                given[path] = parse_bytes(given[path])
            except ConfigError as error:
                raise ConfigError(f"serve: --{flag.replace('_', '-')}: {error}") from None
    return run_config_of(options.security, os.environ, given).serve


@contextmanager
def trainer_of(options: ServeOptions, config: ServeConfig) -> Iterator[OpenReader | None]:
    """Yield the function that opens the channel of the followed trainer; None without --follow.

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
        yield lambda: open_reader(
            url,
            guard=guard_of_follower(security, options.folders),
            discovery=registry,
            kafka_settings=config.follow.kafka_settings,
        )


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
