"""Calls to the servers of a fleet, as typed requests and answers; see `bodies`."""

from __future__ import annotations

import secrets
from typing import TypeVar

from monolith.store import ServerGroup
from monolith.train.fleet.bodies import JobResult, StartJob, WaitForJob, WorkName
from monolith.wire.messages import read_message, write_message

A = TypeVar("A")

POLL = 10.0
"""Seconds that one call waits for something to happen."""


def ask(group: ServerGroup, server: int, name: str, request: object, kind: type[A]) -> A:
    """Return a server's answer to a call.

    Raises:
        MonolithError: What the server raised.
        RequestError: The answer is of another kind.
    """
    return read_message(kind, group.call(server, name, **write_message(request)))


def tell(group: ServerGroup, server: int, name: str, request: object) -> None:
    """Make a call whose answer says nothing."""
    group.call(server, name, **write_message(request))


def run_job(group: ServerGroup, server: int, work: WorkName, request: object, kind: type[A]) -> A:
    """Have a server do what takes longer than a call may; return its answer when it is done."""
    job = secrets.token_hex(8)
    tell(group, server, "job.start", StartJob(work, write_message(request), job))
    while True:
        result = ask(group, server, "job.wait", WaitForJob(job, POLL), JobResult)
        if result.done:
            return read_message(kind, result.answer)
