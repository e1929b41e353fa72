"""A parameter server: the process that holds a share of a model's rows and weights while others train it.

It is started with the same task as the workers, so it knows the tables and optimizers, and it
reads no data. The chief tells it what to restore, when to hold a moment fast and where to write
it, and that the run is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from monolith import filesystem
from monolith.checkpoint import RestoreOptions, SavedPart, TablesPart
from monolith.checkpoint.part import PartCut
from monolith.cluster import Discovery
from monolith.cluster.security import Guard
from monolith.errors import ClusterError, ConfigError, SaveError
from monolith.store import DenseShare, LocalStore, ParameterServer
from monolith.train.config import TrainConfig
from monolith.train.fleet_parts import describe_report
from monolith.train.jobs import Jobs
from monolith.train.meeting import Call, Meeting
from monolith.train.served_bodies import CALLS, WORK
from monolith.train.session import Model
from monolith.train.task import Mode, Task
from monolith.wire.bodies import checked
from monolith.wire.limits import Limits

_log = logging.getLogger(__name__)

LINGER = timedelta(seconds=15)
"""How long a server that is told to stop waits for the chief, who may want to save."""
_LOOK_EVERY = 0.1

Say = Callable[[str], None]


def serve_parameters(
    task: Task,
    config: TrainConfig,
    discovery: Discovery,
    *,
    index: int,
    num_ps: int,
    num_workers: int,
    host: str = "127.0.0.1",
    port: int = 0,
    guard: Guard | None = None,
    limits: Limits | None = None,
    stop: threading.Event | None = None,
    say: Say = _log.info,
    linger: timedelta = LINGER,
) -> str:
    """Hold a share of a model until the chief says that the run is over; return why it ended.

    Args:
        index: Which of `num_ps` servers this is.
        host: Where to listen; it is also how the others reach it.
        guard: What callers must present.
        limits: What one of them may ask for.
        stop: Set from outside to end; while a run goes on, the chief has `linger` to save first.
        say: Told where it listens.

    Raises:
        ListenError: The port is taken.
        ConfigError: The task cannot be served.
    """
    if not 0 <= index < num_ps:
        raise ConfigError(f"there is no parameter server {index} of {num_ps}")
    share = ServedShare(task, config, index=index, num_ps=num_ps, num_workers=num_workers)
    stop = threading.Event() if stop is None else stop
    with share.serve(host, port, guard, limits) as server:
        discovery.register("ps", index, server.address)
        try:
            say(f"parameter server {index} of {num_ps} listens on {server.address}")
            return share.wait(stop, linger)
        finally:
            discovery.deregister("ps", index, server.address)


@dataclass(slots=True)
class _Held:
    """What a server holds for one run."""

    model: Model
    stores: list[LocalStore]
    tables: TablesPart
    cuts: dict[str, PartCut]


class ServedShare:
    """One server's share of a model, with what the chief may ask of it.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        *,
        index: int,
        num_ps: int,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._config = config
        self._shard = (index, num_ps)
        self._clock = clock
        self._meeting = Meeting(num_workers) if index == 0 else None
        self._jobs = Jobs(checked(WORK, {"tables.write": self._write, "tables.restore": self._restore}))
        self._over = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._held = self._make()
        self._run: str | None = None
        self._server: ParameterServer | None = None

    def serve(
        self, host: str, port: int, guard: Guard | None, limits: Limits | None = None
    ) -> ParameterServer:
        """Listen; the server returned is closed by whoever called."""
        calls = {**self.calls, **self._jobs.calls, **({} if self._meeting is None else self._meeting.calls)}
        self._server = ParameterServer(
            self._held.stores,
            self._dense(self._held),
            shard=self._shard,
            host=host,
            port=port,
            guard=guard,
            calls=checked(CALLS, calls, longest=(limits or Limits()).wait.total_seconds()),
            limits=limits,
        )
        return self._server

    @property
    def calls(self) -> Mapping[str, Call]:
        return {
            "server.begin": self._begin,
            "server.end": self._end,
            "tables.cut": self._cut,
            "tables.close": self._close,
        }

    def wait(self, stop: threading.Event, linger: timedelta) -> str:
        """Return when the run is over, or `stop` was set and the chief had time to save."""
        limit: float | None = None
        while not self._over.wait(_LOOK_EVERY):
            if not stop.is_set():
                continue
            if limit is None:
                if self._run is None:
                    return "stopped before a run began"
                _log.info("told to stop; the chief has %g s to save first", linger.total_seconds())
                limit = self._clock() + linger.total_seconds()
            elif self._clock() >= limit:
                return "stopped while a run went on"
        return "the run is over"

    # The chief's calls

    def _begin(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._run not in (None, body["run"]):
                _log.info("another run begins: what the one before left here is dropped")
                for cut in self._held.cuts.values():
                    cut.close(saved=False)
                held = self._make()
                assert self._server is not None
                self._server.replace(held.stores, self._dense(held))
                self._held.model.close()
                self._held = held
            self._run = body["run"]
            return {}

    def _end(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["run"] == self._run:
            self._over.set()
        return {}

    def _cut(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if body["cut"] not in self._held.cuts:  # asked again, because an answer was lost
                self._held.cuts[body["cut"]] = self._held.tables.cut(0)
        return {}

    def _close(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            cut = self._held.cuts.pop(body["cut"], None)
        if cut is not None:
            cut.close(saved=body["saved"])
        return {}

    def _write(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            cut = self._held.cuts.get(body["cut"])
        if cut is None:
            raise ClusterError(
                "there is nothing to write: this server was started again since the moment was cut"
            )
        if not self._config.model_dir or not filesystem.is_below(body["prefix"], self._config.model_dir):
            raise SaveError(
                f"this server writes only below the model_dir of its run, {self._config.model_dir!r}. Start "
                "all processes with the same model_dir."
            )
        return {"entry": cut.write(body["prefix"], full=body["full"])}

    def _restore(self, body: dict[str, Any]) -> dict[str, Any]:
        held = self._held
        report = held.tables.restore(
            [SavedPart(prefix, entry) for prefix, entry in body["chain"]],
            RestoreOptions(optimizer_state=body["optimizer_state"], strict=body["strict"]),
        )
        rows = {f"table {name}": stats.rows for name, stats in held.model.stats().items()}
        return {"report": describe_report(report), "rows": rows}

    # Inside

    def _make(self) -> _Held:
        model = Model(self._task, Mode.TRAIN, seed=self._config.seed)
        part = model.tables_part(
            incremental=self._config.keep.full_every > 1,
            beside=self._config.saves_beside,
            shard=self._shard,
            piece=self._shard,
        )
        stores = [store for store in model.stores if isinstance(store, LocalStore)]
        return _Held(model, stores, part, {})

    def _dense(self, held: _Held) -> DenseShare:
        return DenseShare(held.model.weights(), held.model.dense, self._shard)
