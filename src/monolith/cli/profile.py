"""`monolith status profile [JOB]`: where the time of a running job goes, asked of all its processes at once.

Jobs of this user on this machine are found by themselves, see `monolith.cluster.local_jobs`. Processes of a
run on other machines are asked by their control servers, which the status files of the model_dir name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monolith import filesystem
from monolith.cli.options.jobs import ProfileOptions
from monolith.cluster.local_jobs import LocalProcess, ask_process, local_processes
from monolith.cluster.security import SecurityConfig
from monolith.cluster.status import ProcessStatus
from monolith.errors import ConfigError, MonolithError, UnavailableError
from monolith.runtime.local_profile import absolute_folder

if TYPE_CHECKING:
    pass

MOST_AT_A_TIME = 64
_WRITE_SECONDS = 120.0
"""How long a process may take for starting torch's profiler and for writing its trace."""
_SHOWN_THREADS = 5
_IDLE = 0.005
"""A thread below this share of a core only waits."""


# The caller


def run(options: ProfileOptions, environ: Mapping[str, str] | None = None) -> int:
    """Profile the processes that were named, and say where their time goes; 1 if one has failed."""
    environ = os.environ if environ is None else environ
    asks = chosen_processes(options, environ)
    with ThreadPoolExecutor(min(len(asks), MOST_AT_A_TIME)) as pool:
        found = list(pool.map(lambda ask: ask(), asks))
    if options.json:
        sys.stdout.write(json.dumps({"profiles": found}) + "\n")
    for each in () if options.json else found:
        if "error" in each:
            sys.stderr.write(f"{each['process']}: {each['error']}\n")
        else:
            sys.stdout.write("\n".join(described(each)) + "\n")
    return int(any("error" in each for each in found))


Ask = Callable[[], dict[str, Any]]


def chosen_processes(options: ProfileOptions, environ: Mapping[str, str]) -> list[Ask]:
    """Return what profiles each process that was asked for.

    Raises:
        ConfigError: There is no such job or process, or several jobs run and none was named.
        UnavailableError: None of its processes can be reached.
    """
    here = local_processes(environ)
    job = job_of(here, options.run)
    names = [one.process for one in job]
    asks: dict[str, Ask] = {}
    for one in job:
        label = one.process if names.count(one.process) == 1 else f"{one.process}-{one.pid}"
        asks[label] = partial(ask_local, one, label, options, environ)
    unreached: set[str] = set()
    if not options.run.isdecimal() and options.run and not any(one.serves for one in job):
        for status in remote_processes(options, known_here=bool(job)):
            label = f"{status.role}-{status.index}"
            if label not in asks:
                asks[label] = partial(ask_control, status, options)
                unreached |= set() if status.control else {label}
    unknown = [name for name in options.process if name.replace(" ", "-") not in asks]
    if unknown:
        known = ", ".join(asks) or "none"
        raise ConfigError(f"profile: {options.run} has no process {unknown[0]}; those that run are: {known}")
    if options.process:
        return [asks[name.replace(" ", "-")] for name in options.process]
    if not asks.keys() - unreached:
        raise UnavailableError(
            f"profile: no process of {options.run} can be asked: they run on another machine or as another "
            "user. Run `monolith status profile` there, or start the run with --control."
        )
    return [
        ask
        for label, ask in asks.items()
        if label not in unreached and (not options.steps or label.startswith("worker-"))
    ]


def job_of(here: Sequence[LocalProcess], wanted: str) -> list[LocalProcess]:
    """Return the processes on this machine of the job that was named; none if it may run elsewhere.

    Raises:
        ConfigError: There is no such job, or there are several.
    """
    if not wanted:
        if len({_job(one) for one in here}) != 1:
            raise ConfigError(f"profile: name a job. {_listed(here)}")
        return list(here)
    if wanted.isdecimal():
        if not (found := [one for one in here if one.pid == int(wanted)]):
            raise ConfigError(f"profile: {_why_not(int(wanted))} {_listed(here)}")
        return found
    folder = absolute_folder(wanted)
    found = [one for one in here if folder == one.folder or folder in one.serves]
    found = found or [one for one in here if wanted in (one.name, Path(one.folder).name)]
    if len({_job(one) for one in found}) > 1:
        raise ConfigError(f"profile: {wanted!r} is the name of several jobs; give a pid. {_listed(found)}")
    if not found and "://" not in wanted and not Path(wanted).is_dir():
        raise ConfigError(f"profile: no job of this user here is called {wanted!r}. {_listed(here)}")
    return found


def _job(one: LocalProcess) -> object:
    """What the processes of one job have in common."""
    return one.folder or one.serves or one.pid


def _listed(here: Sequence[LocalProcess]) -> str:
    if not here:
        return "No job of this user runs on this machine."
    width = max(len(one.process) for one in here)
    lines = [
        [f"\n  pid {one.pid}  {one.process:<{width}} ", one.name, one.folder, *one.serves] for one in here
    ]
    return f"Running now:{''.join(' '.join(filter(None, line)) for line in lines)}"


def _why_not(pid: int) -> str:
    """Say why a process cannot be profiled by its number."""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return f"there is no process {pid}."
    if owner != os.geteuid():
        return f"process {pid} belongs to user {owner}, and only that user can profile it."
    return f"process {pid} is no job of Monolith, or has only begun."


def remote_processes(options: ProfileOptions, *, known_here: bool) -> list[ProcessStatus]:
    """Return the processes of a run that say how they are, on whatever machine.

    Args:
        known_here: Whether processes of it were found on this machine, so that it need not say anything.
    """
    from monolith.cli.options.jobs import TopOptions
    from monolith.cli.status import source_of

    if known_here and "://" not in options.run and not Path(options.run).is_dir():
        return []  # a name
    status = TopOptions(
        run=options.run,
        token_file=options.token_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tls_ca=options.tls_ca,
    )
    try:
        job = source_of(status).read()
    except UnavailableError:
        if known_here:
            return []
        raise
    return [one for one in job.processes if not one.is_silent(job.time)]


def ask_local(
    one: LocalProcess, label: str, options: ProfileOptions, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the profile of a process on this machine, or why there is none."""
    folder = filesystem.join(one.folder, "profile") if one.folder else absolute_folder("profile")
    request = {
        "do": "profile",
        "seconds": options.seconds,
        "steps": options.steps,
        "folder": folder if options.to is None else absolute_folder(str(options.to)),
    }
    try:
        found = ask_process(one.pid, request, environ, timeout=options.seconds + _WRITE_SECONDS)
    except MonolithError as error:
        return {"process": label, "pid": one.pid, "error": str(error)}
    return {"process": label, "pid": one.pid, **found}


def ask_control(one: ProcessStatus, options: ProfileOptions) -> dict[str, Any]:
    """Return the trace of a process by its control server, or why there is none."""
    name = f"{one.role}-{one.index}"
    security = SecurityConfig(
        token_file=options.token_file, cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca
    )
    model_dir = "" if options.run.startswith(("http://", "https://")) else options.run
    try:
        if not one.control:
            raise UnavailableError(
                f"runs on {one.host or 'another machine'} without a control server; run "
                "`monolith status profile` there, or start it with --control"
            )
        from monolith.train.hooks import ControlClient

        with ControlClient(model_dir, address=one.control, security=security) as process:
            trace = process.profile(steps=options.steps, seconds=options.seconds)
    except MonolithError as error:
        return {"process": name, "error": str(error)}
    return {"process": name, "path": trace.path, "steps": trace.steps, "seconds": trace.seconds}


def described(found: Mapping[str, Any]) -> list[str]:
    """Return lines that say where the time of one process went."""
    steps = f"{found['steps']:,} steps, " if found["steps"] else ""
    lines = [
        f"{found['process']}: {steps}{found['seconds']:.1f} s",
        f"  trace: {found['path']} (open it in https://ui.perfetto.dev or chrome://tracing)",
    ]
    threads = found.get("threads", ())
    busy = [one for one in threads if one["cpu"] is None or one["cpu"] >= _IDLE]
    for one in busy[:_SHOWN_THREADS]:
        used = "" if one["cpu"] is None else f": {one['cpu']:.0%} of a core"
        lines.append(f"  {one['name']}{used}")
        if one["functions"]:
            lines.append("     own  total  function")
        lines += [
            f"    {each['own']:4.0%}   {each['total']:4.0%}  {each['function']}  {_short(each['at'])}"
            for each in one["functions"]
            if each["own"] >= 0.01
        ]
    if waiting := len(threads) - len(busy[:_SHOWN_THREADS]):
        lines.append(f"  {waiting} more threads, which waited or did little")
    return lines


def _short(at: str) -> str:
    """The last two parts of a path with a line."""
    return "/".join(at.split("/")[-2:])
