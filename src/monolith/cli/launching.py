"""`monolith train`: this process trains; or with `--launch` it starts all processes of the run, and is none.

Each of them is the same command line with a role and an index after it. Their lines go to standard error,
each after a name. The chief's report comes back as one of its lines, and is printed here.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from monolith.cli.options.train import TrainOptions
from monolith.cli.run_settings import run_of
from monolith.cli.train_report import MARK, write_report
from monolith.cluster.launch import Member, job_members, launch_on_ray, processes
from monolith.cluster.run_token import RUN_TOKEN
from monolith.errors import ConfigError
from monolith.run import RunConfig, refused
from monolith.run.loading import FOREIGN_VARIABLES, NOT_CONFIG, listed_problems

GRACE = timedelta(minutes=5)
"""From asking a process to stop to making it: long enough for the last checkpoint. A second signal does not
wait."""

_DECIDED = {
    "cluster.role": "which process is what",
    "cluster.index": "which process is what",
    "cluster.port": "the ports, since processes share machines",
    "discovery.kind": "how the processes find each other",
}
"""What a launcher decides, and nobody else by a flag."""

_MEETING: Mapping[str, Mapping[str, object]] = {
    "local": {"discovery.kind": "files", "discovery.folder": "of the launcher"},
    "ray": {"discovery.kind": "ray"},
}
"""How the processes find each other, whatever a file says."""


def run(options: TrainOptions) -> int:
    """Train here, or start all who do."""
    if options.launch is None:
        if options.ray_address is not None:
            raise ConfigError("train: --ray-address needs --launch ray")
        from monolith.cli import train

        return train.run(options)
    return launch(options, os.environ)


def launch(options: TrainOptions, environ: Mapping[str, str]) -> int:
    """Start all processes of a run, wait for them, and print the chief's report.

    Raises:
        ConfigError: The run makes no sense, or lacks a model_dir.
    """
    run = run_of(
        options,
        environ,
        {"cluster.role": "worker", "cluster.index": 0, **_MEETING[options.launch or "local"]},
    )
    check(options, run)
    if options.restore_checkpoint is not None and run.train.restore.dir is None:
        from monolith.checkpoint.override import to_go_back_to

        to_go_back_to(run.train.model_dir, options.restore_checkpoint)  # or an error, before any starts
    report = ChiefReport()
    with members_of(options, run, environ, report.mark) as members:
        if options.launch == "local":
            outcome = processes.launch(
                members,
                output=sys.stderr,
                grace=GRACE,
                restarts=run.failover.max_retries,
                chief="worker 0",
                tap=report.take,
            )
        else:
            outcome = launch_on_ray(
                members, address=options.ray_address, output=sys.stderr, grace=GRACE, tap=report.take
            )
    if report.found is not None:
        write_report(report.found, options, {})
        if report.found.get("save_trouble") and not run.train.save.ignore_errors:
            return 2  # the report has said it, in its last line
    if outcome.status:
        sys.stderr.write(f"monolith: {outcome.text}\n{how_to_go_on(options, run.train.model_dir)}\n")
    return outcome.status


def how_to_go_on(options: TrainOptions, model_dir: str) -> str:
    """Return what is left of a run that ended before its time, and the command that goes on with it."""
    from monolith.checkpoint import read_checkpoint_state

    state = read_checkpoint_state(model_dir)
    command = shlex.join(["monolith", *without_flags(options.words, "restore_checkpoint")])
    if state is None:
        return f"monolith: there is no checkpoint yet; this begins anew: {command}"
    return f"monolith: the last checkpoint is {state.model_checkpoint_path}; this goes on from it: {command}"


def check(options: TrainOptions, run: RunConfig) -> None:
    """Refuse what every process would refuse, and what the launcher decides.

    Raises:
        ConfigError: Lists every problem found.
    """
    found = [*refused(run)]
    if not run.train.model_dir:
        found.append("train.model_dir: the processes of a run share their files there; set --model-dir")
    if not run.job.task:
        found.append("job.task: name the task, as in `monolith train tasks:MyTask --launch local`")
    if run.job.local:
        found.append("job.local: a run in one process has nothing to launch")
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in options.run_flags}
    old = {"server_type": "cluster.role", "index": "cluster.index", "discovery_type": "discovery.kind"}
    for field in sorted({old.get(flag, flag) for flag in flags} & _DECIDED.keys()):
        found.append(f"{field}: --launch {options.launch} decides {_DECIDED[field]}; leave it out")
    if options.ray_address is not None and options.launch != "ray":
        found.append("--ray-address needs --launch ray")
    if found:
        raise ConfigError(listed_problems("cannot launch this run", found))


class ChiefReport:
    """Takes the chief's report out of its lines. Those of a chief that began again replace the first."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        self.found: dict[str, Any] | None = None

    def take(self, name: str, line: str) -> bool:
        if name != "worker 0" or not line.startswith(f"{self.mark} "):
            return False
        self.found = json.loads(line.removeprefix(f"{self.mark} "))
        return True


@contextmanager
def members_of(
    options: TrainOptions, run: RunConfig, environ: Mapping[str, str], mark: str
) -> Iterator[Sequence[Member]]:
    """Give the processes to start; the folder in which those on this machine meet is gone after the block."""
    cluster, job = run.cluster, run.job
    words = without_flags(options.words, "launch", "ray_address")
    shared = ["--cluster.port", "0"]
    # By a variable, since everybody on the machine can read command lines.
    environment = {MARK: mark, RUN_TOKEN: secrets.token_hex(32)}
    if cluster.mode == "sync":  # ranks hear of what is lost by errors, which torch would also log at length
        environment["TORCH_CPP_LOG_LEVEL"] = environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")
    named = [] if job.id else ["--job.id", secrets.token_hex(8)]
    if options.launch == "ray":
        shared += ["--discovery.kind", "ray", "--discovery.ray", "auto"]
        members = job_members(
            ["monolith", *words],
            num_ps=cluster.num_ps,
            num_workers=cluster.num_workers,
            num_spares=cluster.num_spares,
            folder=None,
            flags=[*shared, *named],
            environment={**environment, **_handed_on(environ)},
        )
        yield _with_ports(members, run)
        return
    with tempfile.TemporaryDirectory(prefix="monolith-", ignore_cleanup_errors=True) as folder:
        members = job_members(
            [sys.executable, "-m", "monolith", *words],
            num_ps=cluster.num_ps,
            num_workers=cluster.num_workers,
            num_spares=cluster.num_spares,
            folder=folder,
            # The servers that a run has chosen are listed under its id, and none is of an earlier run.
            flags=[*shared, "--cluster.listen", "127.0.0.1", *(named if cluster.num_spares else [])],
            environment=environment,
        )
        yield _with_ports(members, run)


def without_flags(words: Sequence[str], *flags: str) -> list[str]:
    """Return a command line without some flags and the value of each."""
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name[2:].replace("-", "_") not in flags:
            left.append(word)
        elif not equals:
            next(rest, None)
    return left


def _with_ports(members: Sequence[Member], run: RunConfig) -> Sequence[Member]:
    """Let the chief alone have the port of metrics that was asked for; others on its machine take any."""
    if not run.metrics.port:
        return members
    return [
        member
        if member.name == "worker 0"
        else replace(member, command=(*member.command, "--metrics-port", "0"))
        for member in members
    ]


def _handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that other machines lack."""
    return {
        name: text
        for name, text in environ.items()
        if (name.startswith("MONOLITH_") and name not in NOT_CONFIG)
        or (name in FOREIGN_VARIABLES and name != "TF_CONFIG")
    }
