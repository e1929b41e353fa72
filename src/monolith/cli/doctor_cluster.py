"""`monolith doctor --cluster`: who of a job is registered, since when, and who answers.

A registration says that a process lived; only its port says that it lives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monolith import __version__
from monolith.cli.options.jobs import DoctorOptions
from monolith.cluster import (
    ClusterManagerConfig,
    Discovery,
    NodeAliveChecker,
    fetch_ps_cluster,
    open_discovery_url,
)
from monolith.cluster.waiting import Clock
from monolith.errors import ConfigError, NodeAliveCheckerError
from monolith.observe.progress import describe_seconds
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.discovery import discovery_defaults, open_discovery

_HOW = "name the registry: --cluster zookeeper://host:2181/job, or the run's file with --config"


@dataclass(frozen=True, slots=True)
class Registered:
    """One registration, and whether somebody is behind it."""

    role: str
    index: int
    address: str
    age_s: float | None
    """The seconds since it was registered; None where the registry keeps no times."""
    answers: bool
    problem: str
    """Why it does not answer; None if it does."""
    share: int | None = None
    """The share of the model that the run's list of servers gives it; None without a list, or for a spare."""


def run(options: DoctorOptions) -> int:
    """Print who is there; return 1 when somebody is registered and does not answer."""
    with registry(options, os.environ) as (name, discovery, config):
        listed = [] if config is None else listed_servers(config)
        members = examine(discovery, timedelta(seconds=options.timeout), listed=listed)
    healthy = all(member.answers for member in members)
    if options.json:
        report = {
            "version": __version__,
            "ok": healthy,
            "registry": name,
            "members": [asdict(member) for member in members],
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        console = Console()
        render(name, members, console, listed=bool(listed))
        if config is not None and (said := missing_servers(config, members)):
            console.print(said, style="yellow")
    return 0 if healthy else 1


@contextmanager
def registry(
    options: DoctorOptions, environ: Mapping[str, str]
) -> Iterator[tuple[str, Discovery, RunConfig | None]]:
    """Open the registry that flags, a config file or the environment name; give its name and the run, too.

    Raises:
        ConfigError: None is named, or two are.
        UnavailableError: It does not answer.
    """
    urls = options.cluster or ()
    if len(urls) > 1 or (urls and options.config is not None):
        raise ConfigError("doctor --cluster looks at one registry: give one URL, or --config")
    if urls:
        # A doctor is asked by somebody who waits.
        with open_discovery_url(urls[0], environ, connect_timeout=timedelta(seconds=5)) as discovery:
            yield urls[0], discovery, None
        return
    config = load_run_config(file=options.config, environ=environ, defaults=discovery_defaults(environ))
    try:
        opened = open_discovery(config, environ)
    except ConfigError as cause:
        raise ConfigError(f"doctor --cluster: {cause}. Or {_HOW}.") from cause
    with opened as found:
        if found is None:
            raise ConfigError(f"doctor --cluster: {options.config} is a local run, which has no registry")
        yield f"{config.discovery.kind}, as {options.config or 'the environment'} says", found, config


def listed_servers(config: RunConfig) -> list[str]:
    """Return the parameter servers that the chief chose, by share, where a run has more than it uses."""
    cluster, model_dir = config.cluster, config.train.model_dir
    if not cluster.num_spares or not model_dir:
        return []
    return fetch_ps_cluster(
        ClusterManagerConfig(
            num_workers=cluster.num_workers, num_ps=cluster.num_ps, model_dir=model_dir, uuid=config.job.id
        ).ps_file
    )


def missing_servers(config: RunConfig, members: Sequence[Registered]) -> str:
    """Say how many parameter servers of the run are not registered; nothing where all are."""
    cluster = config.cluster
    wanted, found = cluster.num_ps + cluster.num_spares, sum(member.role == "ps" for member in members)
    if found >= wanted:
        return ""
    return (
        f"{found} of {wanted} parameter servers are registered: num_ps is {cluster.num_ps}, num_extra_ps "
        f"{cluster.num_extra_ps}, num_redundant_ps {cluster.num_redundant_ps}"
        + (f", standbys {cluster.standbys}." if cluster.standbys else ".")
    )


def examine(
    discovery: Discovery, timeout: timedelta, clock: Clock = time.time, *, listed: Sequence[str] = ()
) -> list[Registered]:
    """Return everybody who is registered, by role and index.

    Args:
        timeout: For each of them to accept a connection.
        clock: Unix seconds.
        listed: Addresses of parameter servers, by share.
    """
    found = [(role, entry) for role in discovery.roles() for entry in discovery.entries(role)]
    dead: dict[str, str] = {}
    try:
        NodeAliveChecker([entry.address for _, entry in found], timeout).require_all()
    except NodeAliveCheckerError as error:
        dead = error.dead
    now = clock()
    return [
        Registered(
            role=role,
            index=entry.index,
            address=entry.address,
            age_s=None if entry.registered_at is None else round(max(0.0, now - entry.registered_at), 3),
            answers=entry.address not in dead,
            problem=dead.get(entry.address, ""),
            share=listed.index(entry.address) if role == "ps" and entry.address in listed else None,
        )
        for role, entry in found
    ]


def render(name: str, members: list[Registered], console: Console, *, listed: bool = False) -> None:
    """Print a table; with a column for shares where servers are `listed` by share."""
    console.print(f"[bold]{escape(name)}[/]")
    if not members:
        console.print("No process is registered.", style="yellow")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("role", "index", *(("share",) if listed else ()), "address", "registered", "answers"):
        table.add_column(heading, overflow="fold")
    for member in members:
        age = "" if member.age_s is None else f"{describe_seconds(member.age_s)} ago"
        answer = "[green]yes[/]" if member.answers else f"[bold red]no[/]: {escape(member.problem)}"
        share = "" if member.role != "ps" else "spare" if member.share is None else str(member.share)
        place = (str(member.index), share) if listed else (str(member.index),)
        table.add_row(escape(member.role), *place, escape(member.address), age, answer)
    console.print(table)
    silent = sum(not member.answers for member in members)
    if silent:
        console.print(f"{silent} of {len(members)} do not answer; see their logs.", style="bold red")
    else:
        console.print(f"All {len(members)} answer.", style="green")
