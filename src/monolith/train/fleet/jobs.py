"""Work that takes longer than a call may: it is started by one call and waited for by others."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait

from monolith.errors import ClusterError
from monolith.train.fleet.bodies import JobResult, JobStarted, StartJob, WaitForJob
from monolith.train.fleet.meeting import LONGEST_WAIT
from monolith.wire.messages import Answer, Call, Json

KEPT = 16
"""Answers that are kept for who asks again."""


class Jobs:
    """Runs each piece of work on a thread of its own. Thread-safe.

    Args:
        work: By name. Each looks at its body by itself.
    """

    def __init__(self, work: Mapping[str, Call]) -> None:
        self._work = dict(work)
        self._lock = threading.Lock()  # guards what follows
        self._running: dict[str, Future[dict[str, Json]]] = {}

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
        job = body.job or secrets.token_hex(8)
        with self._lock:
            if job in self._running:
                return JobStarted(job)
            self._forget()
            self._running[job] = done
        threading.Thread(target=run, name=f"job-{body.work}", daemon=True).start()
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
