"""Calls to parameter servers, short and long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from monolith import concurrency
from monolith.checkpoint import RestoreOptions, SavedPart
from monolith.checkpoint.part import changes_to_json
from monolith.cluster.security import Guard
from monolith.concurrency import Future, ThreadPoolExecutor, wait
from monolith.errors import ClusterError, DeadlineExceededError, UnavailableError
from monolith.runtime.messages import (
    AssignShard,
    CloseSnapshot,
    JobResult,
    JobStarted,
    OfSnapshot,
    RestoreTables,
    StartJob,
    TablesRestored,
    TablesWritten,
    WaitForJob,
    WorkName,
    WriteTables,
)
from monolith.runtime.service import LONGEST_WAIT
from monolith.store import ServerGroup
from monolith.store.server import SERVICE
from monolith.wire.flight import Caller
from monolith.wire.messages import Answer, Call, Json, read_message, write_message

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
    # The caller names the job, so that a start which is repeated after a lost answer starts nothing twice.
    job = concurrency.token_hex(8)
    tell(group, server, "job.start", StartJob(work, write_message(request), job))
    # Without a limit of its own: a restore takes as long as it takes. A server that is lost or restarts ends
    # it by an error, since a new process knows no such job.
    while True:
        result = ask(group, server, "job.wait", WaitForJob(job, POLL), JobResult)
        if result.done:
            return read_message(kind, result.answer)


ANSWER_WITHIN = timedelta(seconds=10)
"""How long one small call of one server may take here."""


class ServerCalls:
    """Small calls to servers by address, whether they have a share or not. Thread-safe.

    Args:
        guard: What servers want to be shown.
        timeout: How long one may take to answer.
    """

    def __init__(self, guard: Guard | None = None, timeout: timedelta = ANSWER_WITHIN) -> None:
        self._guard = guard
        self._timeout = timeout

    def __call__(self, address: str, name: str, /, **body: Any) -> dict[str, Any]:
        """Return the answer of one server; see `ServerGroup.call`."""
        with Caller(SERVICE, address, guard=self._guard, timeout=self._timeout) as caller:
            try:
                return caller.call(name, **body)
            except (UnavailableError, DeadlineExceededError) as cause:
                raise type(cause)(f"the parameter server at {address}: {cause}") from cause

    def assign(self, address: str, share: int, num_ps: int) -> None:
        """Give a server its share; it may have it already.

        Raises:
            ClusterError: It holds another one in a run.
            UnavailableError: It is gone.
        """
        self(address, "server.assign", **write_message(AssignShard(share, num_ps)))

    def answers(self, address: str) -> bool:
        """Whether a server answers there, however slowly."""
        try:
            self(address, "hello")
        except UnavailableError:
            return False
        except DeadlineExceededError:
            return True
        return True

    def answering(self, addresses: Iterable[str]) -> list[str]:
        """Return the addresses that answer, in order; all are asked at the same time."""
        asked = list(addresses)
        with ThreadPoolExecutor(max(1, min(32, len(asked))), "servers-asked") as threads:
            return [
                address
                for address, there in zip(asked, threads.map(self.answers, asked), strict=True)
                if there
            ]


class TableWork:
    """Work on the tables of one run, by all servers at a time. Their answers come in order."""

    def __init__(self, group: ServerGroup, run: str) -> None:
        self._group = group
        self._run = run

    def cut(self, cut: str) -> None:
        """Have each server hold its tables fast as they are now."""
        self._group.call_all("tables.cut", **write_message(OfSnapshot(self._run, cut)))

    def close_cut(self, cut: str | None, *, saved: bool) -> None:
        """Have each server drop a snapshot of its tables; None for any that it has."""
        self._group.call_all("tables.close", **write_message(CloseSnapshot(self._run, cut, saved)))

    def write(self, cut: str, prefix: str, *, full: bool) -> list[TablesWritten]:
        """Have each server write the tables it held fast.

        Raises:
            MonolithError: What one of them raised.
        """
        body = WriteTables(self._run, cut, prefix, full)
        return on_each(
            range(len(self._group)),
            lambda server: run_job(self._group, server, "tables.write", body, TablesWritten),
        )

    def restore(
        self, chain: Sequence[SavedPart], options: RestoreOptions, servers: Collection[int]
    ) -> list[TablesRestored]:
        """Have some servers restore their shares of the tables; see `write`."""
        saved = tuple((one.prefix, one.entry) for one in chain)
        body = RestoreTables(
            self._run, saved, options.optimizer_state, options.strict, changes_to_json(options.changes)
        )
        return on_each(
            servers, lambda server: run_job(self._group, server, "tables.restore", body, TablesRestored)
        )


def on_each(servers: Collection[int], call: Callable[[int], A]) -> list[A]:
    """Call several servers at the same time; return their answers in order, or raise the first error.

    Waits for all of them in any case: a server that still works for a call that has failed elsewhere would
    meet the next call.
    """
    asked = {server: Future[A]() for server in servers}

    def ask(server: int) -> None:
        try:
            asked[server].set_result(call(server))
        except BaseException as error:
            asked[server].set_exception(error)

    # Threads of a pool would keep a process from ending that no longer waits for them.
    for server in servers:
        concurrency.Thread(target=ask, args=(server,), name="fleet-work", daemon=True).start()
    wait(asked.values())
    return [future.result() for future in asked.values()]


KEPT = 16
"""Results that are kept for a caller that asks again."""


class Jobs:
    """Runs each piece of work on a thread of its own. Thread-safe.

    Args:
        work: By name. Each looks at its body by itself.
    """

    def __init__(self, work: Mapping[str, Call]) -> None:
        self._work = dict(work)
        self._lock = concurrency.Lock()  # guards the one below, not the work
        self._running: dict[str, Future[dict[str, Json]]] = {}
        """Job -> its result; the last `KEPT` that are done stay, for a caller whose answer was lost."""

    @property
    def calls(self) -> Mapping[str, Answer]:
        """What others may call: `job.start` with a name of work, and `job.wait`."""
        return {"job.start": self._start, "job.wait": self._wait}

    def _start(self, body: StartJob) -> JobStarted:
        work, done = self._work[body.work], Future[dict[str, Json]]()

        def run() -> None:
            try:
                done.set_result(work(body.body))
            except BaseException as error:
                done.set_exception(error)

        # Asked twice, because the first answer was lost on the way, it is started once.
        job = body.job or concurrency.token_hex(8)
        with self._lock:
            if job in self._running:
                return JobStarted(job)
            self._forget()
            self._running[job] = done
        concurrency.Thread(target=run, name=f"job-{body.work}", daemon=True).start()
        return JobStarted(job)

    def _forget(self) -> None:
        done = [job for job, future in self._running.items() if future.done()]
        for job in done[:-KEPT]:
            del self._running[job]

    def _wait(self, body: WaitForJob) -> JobResult:
        with self._lock:
            done = self._running.get(body.job)
        if done is None:
            raise ClusterError(f"there is no job {body.job}: the server restarted meanwhile")
        # Not `result(timeout)`, whose TimeoutError may be the work's own, or come as the work is done.
        finished, _ = wait([done], min(body.wait, LONGEST_WAIT))
        return JobResult(True, done.result()) if finished else JobResult(False)
