"""Starts all processes of a run, on this machine or on a Ray cluster, and waits for them.

Each process is the same command line with a role and an index after it. Their lines go to one stream, each
after the name of its process. The chief's report comes back as one of its lines, marked by a secret word.

    Run(launch="local")                        ┌─ ps 0, ps 1      monolith train ... --cluster.role ps ...
      └─ run_launched ── a guardian for each ──┤
                                               └─ worker 0, 1     monolith train ... --cluster.role worker ...

The processes find each other through a folder (local) or through Ray. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from monolith import concurrency, filesystem
from monolith.cluster.launch import (
    LaunchOptions,
    Member,
    RayLaunch,
    job_members,
    run_members,
    run_members_on_ray,
)
from monolith.cluster.launch.processes import Events, StopRequest
from monolith.cluster.run_token import RUN_TOKEN
from monolith.config import differences, to_dict
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import FOREIGN_VARIABLES, NOT_CONFIG, listed_problems, refused
from monolith.runtime.context import Launch, MakeTask, RunContext, RunResult
from monolith.runtime.discovery import (
    TORCHRUN_VARIABLES,
    installed_schedulers,
    listen_address,
    scheduler_of,
)

if TYPE_CHECKING:
    from monolith.train import Task

MARK = "MONOLITH_REPORT_MARK"
"""The variable with the word that precedes the chief's report in its output, for the launcher to find it."""
GRACE = timedelta(minutes=5)
"""From asking a process to stop to killing it: long enough for the last checkpoint. A second request does not
wait."""
CONFIG_FILE = "launched_run.json"
"""In the model_dir: the config of a run that was launched from Python, which its processes read."""

DECIDED = {
    "cluster.role": "which process is what",
    "cluster.index": "which process is what",
    "cluster.port": "the ports, since processes share machines",
    "discovery.kind": "how the processes find each other",
}
"""Fields that a launcher decides, so that no flag may set them."""
_OLD_FLAGS = {"server_type": "cluster.role", "index": "cluster.index", "discovery_type": "discovery.kind"}
_DISCOVERY: Mapping[str, Mapping[str, object]] = {
    "local": {"discovery.kind": "files", "discovery.folder": "of the launcher"},
    "ray": {"discovery.kind": "ray"},
}


def decided_fields(kind: str) -> dict[str, object]:
    """Return the fields that a launcher of this kind decides, by dotted path, as the launcher has them."""
    return {"cluster.role": "worker", "cluster.index": 0, **_DISCOVERY[kind]}


def run_launched(run: RunContext) -> RunResult:
    """Start all processes of a run, wait for them, and return the chief's report; see `Run.run`.

    Raises:
        ConfigError: The run makes no sense, or lacks a model_dir.
    """
    config, launch = run.config, run.launch
    discovery = replace(config.discovery, kind="files", folder="of the launcher")
    if launch.kind == "ray":
        discovery = replace(config.discovery, kind="ray")
    config = replace(config, cluster=replace(config.cluster, role="worker", index=0), discovery=discovery)
    check_launch(config, launch)
    restore = config.train.restore
    if restore.required and restore.checkpoint is not None and restore.dir is None:
        from monolith.checkpoint.override import checkpoint_to_roll_back_to

        checkpoint_to_roll_back_to(
            config.train.model_dir, restore.checkpoint
        )  # or an error, before any process starts
    if not launch.command:
        launch = replace(launch, command=written_command(run, config))
    report = ChiefReport()
    # Requests to stop go through this queue, which a signal handler may put into: it takes no lock.
    events: Events = concurrency.SimpleQueue()

    def ask(reason: str) -> None:
        events.put(StopRequest(signal.Signals.__members__.get(reason, signal.SIGTERM)))

    with (
        members_of(config, launch, run.environ, report.mark) as members,
        run.stopped_by(ask),
    ):
        options = LaunchOptions(output=run.lines, grace=GRACE, tap=report.take)
        if launch.kind == "local":
            outcome = run_members(
                members,
                replace(options, restarts=config.failover.max_retries, chief="worker 0"),
                events,
            )
        else:
            outcome = run_members_on_ray(members, RayLaunch(address=launch.ray_address), options, events)
    status = outcome.status
    if report.found is not None:
        run.output.report(report.found)
        if report.found.get("save_trouble") and not config.train.save.ignore_errors:
            return RunResult(outcome="not_saved", report=report.found, status=2)
    end: Literal["finished", "failed", "stopped"] = "failed" if outcome.failed is not None else "stopped"
    return RunResult(
        outcome=end if status else "finished", stop_reason=outcome.text, report=report.found, status=status
    )


def check_launch(config: RunConfig, launch: Launch) -> None:
    """Refuse a run that every process would refuse, and flags that the launcher decides.

    Raises:
        ConfigError: Lists every problem found.
    """
    found = [*refused(config)]
    if not config.train.model_dir:
        found.append("train.model_dir: the processes of a run share their files there; set --model-dir")
    if not config.job.task:
        found.append("job.task: name the task, as in `monolith train tasks:MyTask --launch local`")
    if config.job.local:
        found.append("job.local: a run in one process has nothing to launch")
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in launch.flags}
    for field in sorted({_OLD_FLAGS.get(flag, flag) for flag in flags} & DECIDED.keys()):
        found.append(f"{field}: --launch {launch.kind} decides {DECIDED[field]}; leave it out")
    if launch.ray_address is not None and launch.kind != "ray":
        found.append("--ray-address needs --launch ray")
    if found:
        raise ConfigError(listed_problems("cannot launch this run", found))


class ChiefReport:
    """Takes the chief's report out of its lines. The report of a restarted chief replaces the first."""

    def __init__(self) -> None:
        self.mark = concurrency.token_hex(16)
        self.found: dict[str, Any] | None = None

    def take(self, name: str, line: str) -> bool:
        if name != "worker 0" or not line.startswith(f"{self.mark} "):
            return False
        self.found = json.loads(line.removeprefix(f"{self.mark} "))
        return True


@contextmanager
def members_of(
    config: RunConfig, launch: Launch, environ: Mapping[str, str], mark: str
) -> Iterator[Sequence[Member]]:
    """Yield the processes to start; the folder in which local ones register is removed at the end."""
    cluster, job = config.cluster, config.job
    words = without_flags(launch.command, "launch", "ray_address")
    shared = ["--cluster.port", "0"]
    # By a variable, since every user of the machine can read command lines.
    environment = {MARK: mark, RUN_TOKEN: concurrency.token_hex(32)}
    if cluster.mode == "sync":  # ranks report a lost rank by errors, which torch would also log at length
        environment["TORCH_CPP_LOG_LEVEL"] = environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")
    named = [] if job.id else ["--job.id", concurrency.token_hex(8)]
    if launch.kind == "ray":
        shared += ["--discovery.kind", "ray", "--discovery.ray", "auto"]
        members = job_members(
            ["monolith", *words],
            num_ps=cluster.num_ps,
            num_workers=cluster.num_workers,
            num_spares=cluster.num_spares,
            folder=None,
            flags=[*shared, *named],
            environment={**environment, **_variables_of_the_run(environ)},
        )
        yield _with_ports(members, config)
        return
    with filesystem.temporary_folder() as made:
        folder = str(made)
        members = job_members(
            [sys.executable, "-m", "monolith", *words],
            num_ps=cluster.num_ps,
            num_workers=cluster.num_workers,
            num_spares=cluster.num_spares,
            folder=folder,
            # The servers that a run has chosen are listed under its id: without one of its own, a run might
            # find the list of an earlier run.
            flags=[*shared, "--cluster.listen", "127.0.0.1", *(named if cluster.num_spares else [])],
            environment=environment,
        )
        yield _with_ports(members, config)


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


def _with_ports(members: Sequence[Member], config: RunConfig) -> Sequence[Member]:
    """Give the chief the metrics port of the config; other processes on its machine choose free ones."""
    if not config.metrics.port:
        return members
    return [
        member
        if member.name == "worker 0"
        else replace(member, command=(*member.command, "--metrics-port", "0"))
        for member in members
    ]


def _variables_of_the_run(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that say something of the run, which other machines lack."""
    return {
        name: text
        for name, text in environ.items()
        if (name.startswith("MONOLITH_") and name not in NOT_CONFIG)
        or (name in FOREIGN_VARIABLES and name != "TF_CONFIG")
    }


# A run that was launched from Python has no command line: its processes read its config from a file


def written_command(run: RunContext, config: RunConfig) -> tuple[str, ...]:
    """Write the config into the model_dir, and return the command line that trains it.

    Raises:
        ConfigError: Another process could not import the task, or not make it with the same settings.
    """
    job, settings = config.job, dict(config.task)
    if run.task is not None:
        name, settings = _importable(run.task)
        job = replace(job, task=name)
    elif job.task and job.task.rpartition(":")[0] == "__main__":
        raise ConfigError(_IN_MAIN.format(name=job.task.rpartition(":")[2]))
    plain = to_dict(config)
    tree: dict[str, Any] = {}
    # Only the fields that differ from the defaults, as a person would write the file. The processes get
    # their role, index and discovery by flags, since each of them has its own.
    for path in differences(replace(config, job=job, task=settings), RunConfig()):
        *groups, last = path.split(".")
        value: Any = plain
        inner = tree
        for group in groups:
            value, inner = value[group], inner.setdefault(group, {})
        inner[last] = value[last]
    for group in ("discovery", "security"):
        tree.pop(group, None)
    tree.setdefault("job", {})["task"] = job.task
    if settings:
        tree["task"] = settings
    filesystem.make_dirs(config.train.model_dir)
    path = filesystem.join(config.train.model_dir, CONFIG_FILE)
    with filesystem.atomic_write(path) as file:
        file.write(json.dumps(tree, indent=2).encode())
    return ("train", "--config", path, "--quiet")


_IN_MAIN = (
    "cannot launch processes for {name}: it is defined in __main__, a cell of this notebook or the script "
    "itself, which other processes cannot import. Put the class into a file next to it, such as tasks.py, "
    "and pass its name: Run(config, 'tasks.py:{name}', launch='local')"
)


def _importable(task: Task | MakeTask) -> tuple[str, dict[str, Any]]:
    """Return the name of a task object's class, and the settings that make an equal object.

    Raises:
        ConfigError: The class cannot be imported, or the settings have no plain form.
    """
    kind = type(task)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__":
        raise ConfigError(_IN_MAIN.format(name=kind.__qualname__))
    if callable(task) and not dataclasses.is_dataclass(task):
        raise ConfigError(
            "cannot launch processes for a function that makes a task: pass the task, or its name as "
            "'package.module:Name'"
        )
    if not dataclasses.is_dataclass(task):
        return name, {}
    given = to_dict(task)
    defaults = {
        field.name
        for field in dataclasses.fields(task)
        if field.default is not dataclasses.MISSING and getattr(task, field.name) == field.default
    }
    return name, {key: value for key, value in given.items() if key not in defaults}


# Data workers that a worker starts on its own machine, which has cores to spare

_NOT_OF_DATA_WORKERS = (
    *("cluster.role", "server_type", "cluster.index", "index", "cluster.listen", "cluster.port"),
    *("discovery.kind", "discovery_type", "data_service.dispatcher", "data_service_dispatcher"),
)
"""Flags of a worker that its data workers get with other values, by new names and old."""
DATA_WORKER_GRACE = timedelta(seconds=20)


@contextmanager
def extra_data_workers(run: RunContext, config: RunConfig, dispatcher: Callable[[], str]) -> Iterator[None]:
    """Run as many data workers as the config asks for while the block lasts.

    They are processes of their own, so that reading does not delay training, and they end with the worker,
    however it ends. One that is killed is restarted.

    Args:
        dispatcher: Returns the address of the dispatcher.
    """
    command = run.launch.command
    if config.data_service is not None and config.data_service.extra_workers and not command:
        command = written_command(run, config)
    members = extra_members(config, command, run.environ, dispatcher)
    if not members:
        yield
        return
    events: Events = concurrency.SimpleQueue()

    def look_after() -> None:
        outcome = run_members(
            members,
            LaunchOptions(output=run.lines, grace=DATA_WORKER_GRACE, restarts=config.failover.max_retries),
            events,
        )
        if outcome.failed is not None:
            run.output.warn(f"{outcome.text}; this worker continues with the data of other data workers")

    thread = concurrency.Thread(target=look_after, name="extra-data-workers")
    thread.start()
    try:
        yield
    finally:
        events.put(StopRequest())
        thread.join()


def extra_members(
    config: RunConfig, command: Sequence[str], environ: Mapping[str, str], dispatcher: Callable[[], str]
) -> list[Member]:
    """Return the processes to start: this one's command line, with the role of a data worker after it.

    They listen on the ports that the scheduler reserves for them, if one does.
    """
    count = 0 if config.data_service is None else config.data_service.extra_workers
    if not count:
        return []
    scheduler = scheduler_of(config.discovery)
    first, ports = (0, [0] * count) if scheduler is None else scheduler.extra_data_workers(environ, count)
    host, _ = listen_address(config, environ)
    # They are told everything they need: no scheduler knows of them, so its variables must not count.
    known = installed_schedulers().values()
    cleared = [
        name
        for name in environ
        if name in TORCHRUN_VARIABLES or any(scheduler.sets_variable(name) for scheduler in known)
    ]
    words = without_flags(command, *_NOT_OF_DATA_WORKERS)
    token = {} if config.security.token is None else {RUN_TOKEN: config.security.token.reveal()}
    members = []
    for number, port in enumerate(ports):
        index = first + config.cluster.index * count + number
        flags = {
            "cluster.role": "data_worker",
            "cluster.index": index,
            "cluster.listen": host,
            "cluster.port": port,
            "discovery.kind": "consul",
            "data_service.dispatcher": dispatcher(),
            **({} if config.metrics.port is None else {"metrics-port": 0}),
        }
        given = [word for path, value in flags.items() for word in (f"--{path}", str(value))]
        members.append(
            Member(
                role="data_worker",
                index=index,
                command=(sys.executable, "-m", "monolith", *words, *given),
                # The mark names their lines; the token admits them to the data service of this worker.
                environment={**dict.fromkeys(cleared, ""), MARK: "of the worker", **token},
            )
        )
    return members
