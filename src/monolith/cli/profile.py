"""`monolith profile RUN|URL`: traces of the processes of a running job, all at the same time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from monolith.cli.options.profile import ProfileOptions
from monolith.cli.options.top import TopOptions
from monolith.cli.top import source_of
from monolith.cluster.security import SecurityConfig
from monolith.cluster.status import ProcessStatus
from monolith.errors import ConfigError, MonolithError, UnavailableError

MOST_AT_A_TIME = 64


def run(options: ProfileOptions) -> int:
    """Profile the processes that were named, and say where the traces are; 1 where one has failed."""
    status = TopOptions(
        run=options.run,
        token_file=options.token_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tls_ca=options.tls_ca,
    )
    job = source_of(status).read()
    there = [one for one in job.processes if not one.is_silent(job.time)]
    chosen = choose(there, options)
    with ThreadPoolExecutor(min(len(chosen), MOST_AT_A_TIME)) as pool:
        found = list(pool.map(lambda one: profile(one, options), chosen))
    if options.json:
        sys.stdout.write(json.dumps({"profiles": found}) + "\n")
    for each in () if options.json else found:
        if "error" in each:
            sys.stderr.write(f"{each['process']}: {each['error']}\n")
        else:
            steps = f"{each['steps']:,} steps, " if each["steps"] else ""
            sys.stdout.write(f"{each['process']}: {each['path']} ({steps}{each['seconds']:.1f} s)\n")
    return int(any("error" in each for each in found))


def choose(there: Sequence[ProcessStatus], options: ProfileOptions) -> list[ProcessStatus]:
    """Return the processes to profile.

    Raises:
        ConfigError: There is none of a name.
        UnavailableError: None of them can be reached.
    """
    names = {f"{one.role}-{one.index}": one for one in there}
    unknown = [name for name in options.process if name.replace(" ", "-") not in names]
    if unknown:
        known = ", ".join(names) or "none"
        raise ConfigError(f"profile: {options.run} has no process {unknown[0]}; those that run are: {known}")
    chosen = [names[name.replace(" ", "-")] for name in options.process] or [
        one for one in there if one.control and (not options.steps or one.role == "worker")
    ]
    if not [one for one in chosen if one.control]:
        raise UnavailableError(
            f"profile: no process of {options.run} can be asked. Start the run with --control; a process "
            "that only begins says in a few seconds where it can be reached."
        )
    return chosen


def profile(one: ProcessStatus, options: ProfileOptions) -> dict[str, Any]:
    """Return the trace of one process, or why there is none."""
    from monolith.train.hooks import ControlClient

    name = f"{one.role}-{one.index}"
    security = SecurityConfig(
        token_file=options.token_file, cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca
    )
    model_dir = "" if options.run.startswith(("http://", "https://")) else options.run
    try:
        if not one.control:
            raise UnavailableError("has no control server; start it with --control")
        with ControlClient(model_dir, address=one.control, security=security) as process:
            trace = process.profile(steps=options.steps, seconds=options.seconds)
    except MonolithError as error:
        return {"process": name, "error": str(error)}
    return {"process": name, "path": trace.path, "steps": trace.steps, "seconds": trace.seconds}
