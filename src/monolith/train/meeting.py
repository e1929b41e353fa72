"""Where the workers of a run agree on when to begin, halt and end. Server 0 keeps it.

    begin      the chief starts a run: what an earlier run left is forgotten
    join       a worker waits here for the chief to have restored everything, and learns where to go on
    halt       the chief wants nobody to train; each worker finishes its step and arrives with its state
    release    they go on
    saved      the checkpoint of a halt is on disk, so sources may forget what came before it
    leave      a worker is done, and leaves its last state behind; or it failed, which ends the run for all
    stop       everybody is to finish
    over       the last checkpoint is on disk

A worker hears of all this by asking for news, again and again, which also tells that it lives.
Calls are from plain values to plain values: they come over a network. None waits longer than it
was told to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monolith.errors import ClusterError, ConfigError

Call = Callable[[dict[str, Any]], dict[str, Any]]

LONGEST_WAIT = 20.0
"""Seconds that one call may be kept waiting, whatever it asks for."""


@dataclass(slots=True)
class _Run:
    """One start of the chief."""

    name: str
    start: dict[str, Any] | None = None
    """What workers are told when they may begin; None while the chief still restores."""
    halt: int | None = None
    arrived: dict[int, Any] = field(default_factory=dict)
    """Worker -> its state, at the halt in force."""
    left: dict[int, Any] = field(default_factory=dict)
    """Worker -> its last state."""
    heard: dict[int, float] = field(default_factory=dict)
    """Worker -> when it last said something."""
    stop: str | None = None
    failure: str | None = None
    saved: int = 0
    """The last halt whose checkpoint is on disk."""
    over: bool = False
    told: set[int] = field(default_factory=set)
    """Workers who know that it is over."""
    version: int = 0
    """Counts changes that workers want to hear of."""


class Meeting:
    """The state that the workers of a run share. Thread-safe.

    Args:
        num_workers: The chief included, who is worker 0.
        clock: Seconds that only grow.
    """

    def __init__(self, num_workers: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        if num_workers < 1:
            raise ConfigError(f"meeting: num_workers must be at least 1, got {num_workers}")
        self._num_workers = num_workers
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._run: _Run | None = None
        self._halts = 0

    @property
    def calls(self) -> Mapping[str, Call]:
        """What others may call, by name."""
        return {
            "meeting.begin": self._begin,
            "meeting.open": self._open,
            "meeting.join": self._join,
            "meeting.news": self._news,
            "meeting.halt": self._halt,
            "meeting.arrive": self._arrive,
            "meeting.gathered": self._gathered,
            "meeting.release": self._release,
            "meeting.saved": self._saved,
            "meeting.over": self._over,
            "meeting.leave": self._leave,
            "meeting.stop": self._stop,
        }

    # The chief's

    def _begin(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["num_workers"] != self._num_workers:
            raise ConfigError(
                f"the chief counts {body['num_workers']} workers and server 0 {self._num_workers}; "
                "start all processes with the same cluster.num_workers"
            )
        with self._changed:
            self._run = _Run(body["run"])
            self._note(self._run)
        return {}

    def _open(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._of(body)
            run.start = body["start"]
            self._note(run)
        return {}

    def _halt(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._of(body)
            if run.halt is None:
                self._halts += 1
                run.halt = self._halts
                run.arrived.clear()
                self._note(run)
            return {"halt": run.halt}

    def _gathered(self, body: dict[str, Any]) -> dict[str, Any]:
        """Wait until every other worker has arrived or left; say who has not, and how long they are silent.

        With "left", wait until all have left.
        """
        with self._changed:
            run = self._of(body)

            def missing() -> list[int]:
                here = run.left.keys() if body.get("left") else run.left.keys() | run.arrived.keys()
                return [worker for worker in range(1, self._num_workers) if worker not in here]

            self._wait(lambda: self._run is not run or not missing() or run.failure is not None, body)
            now = self._clock()
            return {
                "missing": {str(w): now - run.heard[w] if w in run.heard else None for w in missing()},
                "states": {str(w): state for w, state in {**run.arrived, **run.left}.items()},
                "failure": run.failure,
            }

    def _release(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._of(body)
            run.halt = None
            run.arrived.clear()
            self._note(run)
        return {}

    def _saved(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._of(body)
            run.saved = max(run.saved, body["halt"])
            self._note(run)
        return {}

    def _over(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._of(body)
            run.over = True
            self._note(run)
            # Whoever keeps this may be gone in a moment.
            self._wait(lambda: run.heard.keys() - {0} <= run.told, body)
        return {}

    # Every worker's

    def _join(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_worker(body)
        with self._changed:
            self._wait(lambda: self._run is not None and bool(self._run.start or self._run.failure), body)
            run = self._run
            if run is not None and run.failure is not None:
                raise ClusterError(run.failure)
            if run is None or run.start is None:
                return {"run": None}
            run.heard[body["worker"]] = self._clock()
            return {"run": run.name, "start": run.start}

    def _news(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._of(body)
            run.heard[body["worker"]] = self._clock()
            self._wait(lambda: self._run is not run or run.version != body["seen"], body)
            run = self._of(body)
            now = self._clock()
            run.heard[body["worker"]] = now
            if run.over:
                run.told.add(body["worker"])
                self._changed.notify_all()
            return {
                "version": run.version,
                "halt": run.halt,
                "stop": run.stop,
                "failure": run.failure,
                "saved": run.saved,
                "over": run.over,
                "chief_silent": now - run.heard.get(0, now),
            }

    def _arrive(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_worker(body)
        with self._changed:
            run = self._of(body)
            if run.halt == body["halt"]:  # otherwise it was released meanwhile
                run.arrived[body["worker"]] = body["state"]
                self._changed.notify_all()
        return {}

    def _leave(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_worker(body)
        with self._changed:
            run = self._of(body)
            if body.get("failure"):
                if run.failure is None:
                    run.failure = f"worker {body['worker']} failed: {body['failure']}"
            else:
                run.left[body["worker"]] = body["state"]
            self._note(run)
        return {}

    def _stop(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            run = self._of(body)
            run.stop = run.stop or body["reason"]
            self._note(run)
        return {}

    # Inside; the lock is held

    def _of(self, body: Mapping[str, Any]) -> _Run:
        if self._run is None or self._run.name != body["run"]:
            raise ClusterError(
                "this run is over: the chief or server 0 was started again. Start this worker again, too; "
                "it then goes on from the last checkpoint."
            )
        return self._run

    def _check_worker(self, body: Mapping[str, Any]) -> None:
        if not 0 <= body["worker"] < self._num_workers:
            raise ConfigError(
                f"there is no worker {body['worker']} of {self._num_workers}; start all processes with the "
                "same cluster.num_workers"
            )

    def _note(self, run: _Run) -> None:
        run.version += 1
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], body: Mapping[str, Any]) -> None:
        self._changed.wait_for(ready, min(float(body.get("wait", 0.0)), LONGEST_WAIT))
