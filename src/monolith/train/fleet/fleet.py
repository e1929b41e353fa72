"""A fleet: the processes that train one model together, as one of its workers sees them.

Parameter servers hold rows and weights. Workers, of whom the first is the chief, read a share of
the data each and train on what the servers hold. The chief also restores and saves: it halts the
others, has every server hold its share of the moment fast, and lets everybody go on while it is
written. So a checkpoint holds everything that was trained and nothing else, with the position of
each worker in its data.

Whoever dies ends the run for all, and those who are left hear of it within seconds. They stay and join
again; when the lost one is back the chief begins the next run, from the last checkpoint. What an earlier
run still has on its way is refused by the servers, so nothing is trained twice.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeVar

from monolith.checkpoint import RestoreOptions, SavedPart
from monolith.cluster import ClusterManager, ClusterManagerConfig, Discovery, OnWaiting, Waiting
from monolith.cluster.security import Guard
from monolith.errors import ClusterError, ConfigError, DeadlineExceededError, RetryableError, UnavailableError
from monolith.store import ParameterServerStore, ServerGroup, Store
from monolith.table import SlotThresholds, TableConfig
from monolith.train.fleet.bodies import (
    Arrive,
    AskGathered,
    BeginMeeting,
    CloseCut,
    EndRun,
    Farewell,
    GatheredStates,
    HaltNumber,
    HaltSaved,
    JobResult,
    Join,
    Joined,
    Leave,
    OfCut,
    OfRun,
    OpenMeeting,
    RestoreTables,
    SayOver,
    ServerHealth,
    StartJob,
    Stop,
    TablesRestored,
    TablesWritten,
    WaitForJob,
    WriteTables,
)
from monolith.train.fleet.news import FleetNews
from monolith.train.hooks.control.ps_health import HealthStatus, MachineHealth
from monolith.train.peers import Start, WorkerState
from monolith.wire.bodies import read_body, write_body

_log = logging.getLogger(__name__)

A = TypeVar("A")
WorkName = Literal["tables.write", "tables.restore"]

PATIENCE = timedelta(seconds=1)
"""How long to try a server where nobody answers: one that restarted holds nothing of this run."""
POLL = 10.0
"""Seconds that one call waits for something to happen."""
NEWS_EVERY = timedelta(seconds=POLL)
FAREWELL = timedelta(minutes=2)
"""How long the others have to hear that the run is over, as long as they are there."""
SAY_EVERY = 15.0
"""Seconds between two lines of the log about who is waited for."""
JOIN_WITHIN = 5.0
"""Seconds that a run which is stopping waits for workers that have not joined it."""
STOP_WITHIN = 60.0
"""Seconds that a worker has to stop where it is told to."""
OLD_NEWS = 60.0
"""Seconds after which the failure of a chief is no reason to give up for who comes now."""
_ASK_EVERY = 0.5


class Halt(NamedTuple):
    """Nobody but the chief trains."""

    number: int
    states: list[WorkerState]
    """Of workers 1, 2, ..."""


def join_fleet(
    discovery: Discovery,
    *,
    index: int,
    num_ps: int,
    num_workers: int,
    guard: Guard | None = None,
    model_dir: str = "",
    run_id: str = "",
    num_redundant_ps: int = 0,
    start_timeout: timedelta = timedelta(hours=2),
    finish_timeout: timedelta = timedelta(minutes=30),
    call_timeout: timedelta = timedelta(seconds=30),
    lookup_timeout: timedelta | None = None,
    half_rows: bool = False,
    news_every: timedelta = NEWS_EVERY,
    on_waiting: OnWaiting | None = None,
) -> Fleet:
    """Wait for the servers of a run to answer, and return this worker's place among its processes.

    Args:
        guard: What to present to the servers.
        run_id: Names this submission of the job; see `ClusterManagerConfig.uuid`.
        start_timeout: How long to wait for servers, and then for the chief.
        finish_timeout: How long the chief waits for the others at the end.
        call_timeout: The longest that one call of a server may take.
        lookup_timeout: The same for a lookup of rows; None takes that of other calls.
        half_rows: Whether lookups are answered in half floats; see `ServerGroup`.
        news_every: How often each says that it lives; of news it hears at once.
        on_waiting: Told who is missing.

    Raises:
        DeadlineExceededError: Some servers did not come in time.
        ConfigError: They serve another task, or were counted otherwise.
    """
    if num_redundant_ps:
        raise ConfigError(
            "num_redundant_ps is not supported yet: each server is given its share when it starts, so none "
            "can take over another's; set it to 0"
        )
    manager = ClusterManager(
        discovery,
        ClusterManagerConfig(
            num_workers=num_workers,
            num_ps=num_ps,
            model_dir=model_dir,
            uuid=run_id,
            query_every=timedelta(seconds=0.5),
            timeout=start_timeout,
        ),
        on_waiting=on_waiting,
    )

    def connect(addresses: Sequence[str], patience: timedelta) -> ServerGroup:
        return ServerGroup(
            addresses,
            guard=guard,
            patience=patience,
            timeout=call_timeout,
            lookup_timeout=lookup_timeout,
            half=half_rows,
        )

    group = _answering(manager, num_ps, connect, start_timeout, on_waiting)
    try:
        return Fleet(
            group,
            index,
            num_workers,
            start_timeout=start_timeout,
            finish_timeout=finish_timeout,
            news_every=news_every,
        )
    except BaseException:
        group.close()
        raise


def _answering(
    manager: ClusterManager,
    num_ps: int,
    connect: Callable[[Sequence[str], timedelta], ServerGroup],
    timeout: timedelta,
    on_waiting: OnWaiting | None,
) -> ServerGroup:
    """Return connections to all servers once each of them answers.

    A registry may know a server that is dead, or whose port is not open yet: it is asked again until what
    it says is true.
    """
    began = time.monotonic()
    while True:
        addresses = manager.query_ps(num_ps)
        answered = 0
        try:
            with contextlib.closing(connect(addresses, timedelta())) as probe:
                for server in range(num_ps):
                    probe.call(server, "hello")
                    answered += 1
            group = connect(addresses, PATIENCE)
            try:
                group.describe()
                return group
            except BaseException:
                group.close()
                raise
        except RetryableError as cause:
            elapsed = timedelta(seconds=time.monotonic() - began)
            if elapsed >= timeout:
                raise DeadlineExceededError(
                    f"waited {timeout} for {num_ps} parameter servers to answer: {cause}"
                ) from cause
            _log.debug("not all servers answer yet: %s", cause)
        if on_waiting is not None:
            late = min(answered, num_ps - 1)
            who = f"parameter server {late} at {addresses[late]} to answer"
            on_waiting(Waiting(who, answered, num_ps, elapsed))
        time.sleep(_ASK_EVERY)


class Fleet:
    """One worker's place in a fleet. Used by its training thread; closes the group in the end.

    Args: see `join_fleet`.
    """

    def __init__(
        self,
        group: ServerGroup,
        index: int,
        num_workers: int,
        *,
        start_timeout: timedelta = timedelta(hours=2),
        finish_timeout: timedelta = timedelta(minutes=30),
        news_every: timedelta = NEWS_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= index < num_workers:
            raise ConfigError(f"there is no worker {index} of {num_workers}")
        self.group = group
        self.index = index
        self.num_workers = num_workers
        self._member = secrets.token_hex(8)
        self._start_timeout = start_timeout
        self._finish_timeout = finish_timeout
        self._news_every = news_every.total_seconds()
        self._clock = clock
        self._stores = 0
        self._held = False
        self._run = ""
        self._absent: list[int] = []
        """Workers who have not joined yet, as far as is known here."""
        self._listener: FleetNews | None = None
        self.finished = True
        """Once the run is over: whether it came to its end, and nobody stopped it before."""

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def servers(self) -> tuple[str, ...]:
        """Names the processes of the servers: one that restarted has another name."""
        return self.group.processes

    def read_step(self) -> int:
        """Ask server 0 for the step of the whole model."""
        return self.group.read_step()

    def server_health(self, server: int) -> MachineHealth:
        """Ask one server for its health. From any thread."""
        answer = self._ask("server.health", OfRun(self._run), ServerHealth, server)
        return MachineHealth(HealthStatus(answer.status), answer.message)

    def make_store(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,  # noqa: ARG002  the servers know them
        threads: int | None,  # noqa: ARG002
    ) -> Store:
        """Return the next store of the model that is being bound; see `MakeStore`."""
        number, self._stores = self._stores, self._stores + 1
        return ParameterServerStore(self.group, number, configs)

    # Beginning

    def begin(self) -> None:
        """Start a run, as its chief: what an earlier one left on the servers no longer counts."""
        self._run = secrets.token_hex(8)
        self._tell_servers("server.begin", OfRun(self._run))
        self.group.expect(self._run)
        self._tell("meeting.begin", BeginMeeting(self._run, self.num_workers))
        self._listener = FleetNews(self.group, self._run, self.index, self._news_every)
        self._listener.attend()

    def open(self, start: Start) -> None:
        """Let the others begin, as the chief. They are told `start`."""
        self.check()
        self._tell("meeting.open", OpenMeeting(self._run, start))

    @property
    def joined(self) -> bool:
        """Whether this worker takes part in a run."""
        return bool(self._run)

    def join(self, stopped: Callable[[], bool] = lambda: False) -> Start | None:
        """Wait until the chief has restored everything; return what it says of where to go on.

        A run that failed long before this worker came is waited out: somebody may start the chief again.

        Args:
            stopped: Whether somebody wants this worker to stop; looked at every second.

        Returns:
            None where the run is over, and this worker's part in it done; or it was stopped.

        Raises:
            DeadlineExceededError: It did not in time.
            ClusterError: It failed, and will not begin again by itself.
        """
        limit, said = self._clock() + self._start_timeout.total_seconds(), self._clock()
        known, first = "", True
        while not stopped():
            answer = self._ask("meeting.join", Join(self.index, self._member, known, 1.0), Joined)
            if answer.run is not None:
                self._run = answer.run
                self.group.expect(self._run)
                self._listener = FleetNews(self.group, self._run, self.index, self._news_every)
                return answer.start
            if answer.over:
                self.finished = not answer.unfinished
                return None
            if (failed := answer.failed) is not None:
                if failed.final and not (first and failed.ago > OLD_NEWS):
                    raise ClusterError(failed.why)
                known = failed.run
            first = False
            now = self._clock()
            if now >= limit:
                raise DeadlineExceededError(
                    f"worker {self.index} waited {self._start_timeout} for the chief to restore the model; "
                    "see the chief's log"
                )
            if now - said >= SAY_EVERY:
                said = now
                _log.info("waiting for the chief to restore the model")
        return None

    # Between steps

    @property
    def stop_reason(self) -> str | None:
        """Why everybody is to finish; None while nobody asked."""
        return None if self._listener is None else self._listener.stop_reason

    def check(self) -> None:
        """Raise what has gone wrong with the others."""
        if self._listener is not None:
            self._listener.check()

    @property
    def is_halted(self) -> bool:
        """Whether the chief wants nobody to train."""
        return self._listener is not None and self._listener.halt is not None

    def wait_at_halt(self, state: WorkerState) -> int:
        """Arrive with this worker's state, all its updates done, and wait until everybody may go on.

        Returns:
            The number of the halt; 0 where it was over before.
        """
        listener = self._listener
        assert listener is not None
        halt = listener.halt
        if halt is None:
            return 0
        self._tell("meeting.arrive", Arrive(self._run, self.index, halt, state))
        listener.wait_for_release(halt)
        return halt

    @contextlib.contextmanager
    def halted(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Halt]:
        """Hold the others between their steps, as the chief, and hand out their states.

        Args:
            stopped: Whether somebody wants the run to stop: who has not joined it yet never will.
        """
        number = self._halt()
        try:
            yield Halt(number, self._gather(stopped))
        finally:
            if not self._held:
                self._release()

    def hold(self) -> int:
        """Halt the others, as the chief, until `let_go`; return the number of the halt. From any thread."""
        self._held = True
        return self._halt()

    def let_go(self) -> None:
        """Let the others go on that were held."""
        self._held = False
        self._release()

    def standing_still(self) -> list[int]:
        """Return the other workers who have arrived at the halt in force, or have left, as the chief."""
        answer = self._ask("meeting.gathered", AskGathered(self._run), GatheredStates)
        return sorted(int(worker) for worker in answer.states)

    def note_saved(self, halt: int) -> None:
        """Tell the others, as the chief, that the checkpoint of a halt is on disk."""
        self._tell("meeting.saved", HaltSaved(self._run, halt))

    @property
    def saved_halt(self) -> int:
        """The last halt whose checkpoint is on disk, as far as is known here; 0 for none."""
        return 0 if self._listener is None else self._listener.saved

    def stop(self, reason: str, *, unfinished: bool = False) -> None:
        """Ask everybody to finish.

        Args:
            unfinished: Whether there is more to do: the run is then not done, however well it ends.
        """
        self._tell("meeting.stop", Stop(self._run, reason, unfinished))

    # Ending

    def leave(self, state: WorkerState) -> None:
        """Say that this worker is done, all its updates too."""
        self._tell("meeting.leave", Leave(self._run, self.index, state))

    def fail(self, why: str, *, final: bool) -> None:
        """Say that this worker cannot go on, which ends the run; if anybody hears it.

        Args:
            final: Whether nobody should wait for this process to join or begin again by itself.
        """
        self._close_listener()
        if not self._run:
            return
        with contextlib.suppress(ClusterError, ConfigError):
            final = final and self.is_chief
            self._tell("meeting.leave", Leave(self._run, self.index, failure=why, final=final))

    def wait_for_others(self, idle: Callable[[], None], *, stopping: bool = False) -> list[WorkerState]:
        """Wait, as the chief, until all others have left; return their last states, in order.

        After `finish_timeout` they are asked to stop where they are.

        Args:
            idle: Called every second meanwhile.
            stopping: Whether the run is to stop before its end: who has not joined it yet never will.

        Raises:
            UnavailableError: One was lost, or never came.
            DeadlineExceededError: One does not stop.
        """
        asked_at: float | None = None
        limit = self._clock() + self._finish_timeout.total_seconds()
        began = self._clock()
        while missing := self._missing(left=True, wait=1.0):
            if stopping:
                self._check_joined(began)
            idle()
            now, who = self._clock(), ", ".join(map(str, missing))
            if asked_at is None and now >= limit:
                _log.warning("workers %s are still training; asking them to stop", who)
                self.stop(f"the chief has waited {self._finish_timeout} for this worker", unfinished=True)
                asked_at = now
            elif asked_at is not None and now - asked_at > STOP_WITHIN:
                raise DeadlineExceededError(
                    f"workers {who} were asked to stop and did not within {STOP_WITHIN:g} s; "
                    "all steps since the last checkpoint are lost"
                )
        return self._states()

    def wait_for_end(self) -> None:
        """Wait, having left, until the chief has saved and said that the run is over.

        Raises:
            RetryableError: Nobody says so any more: what this worker did last may not be saved.
        """
        assert self._listener is not None
        self.finished = self._listener.wait_for_end(self._finish_timeout.total_seconds())

    def end(self) -> None:
        """Tell everybody, as the chief, that the run is over and saved; who is gone is passed over."""
        self._close_listener()
        limit = self._clock() + FAREWELL.total_seconds()
        with _passed_over("server 0"):
            while True:
                answer = self._ask("meeting.over", SayOver(self._run, 1.0), Farewell)
                self.finished = not answer.unfinished
                if not answer.untold:
                    break
                if self._clock() >= limit:
                    _log.warning("workers %s were not told that the run is over", list(answer.untold))
                    break

        def tell(server: int) -> None:
            with _passed_over(f"server {server}"):
                self._tell("server.end", EndRun(self._run, self.finished), server)

        self._on_each(tell)

    def close(self) -> None:
        """Let go of the servers. Closing again does nothing."""
        self._close_listener()
        self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Work on servers that takes its time

    def cut_tables(self, cut: str) -> None:
        """Have each server hold its tables fast as they are now."""
        self._tell_servers("tables.cut", OfCut(self._run, cut))

    def close_cut(self, cut: str, *, saved: bool) -> None:
        """Have each server let go of the tables it held fast."""
        self._tell_servers("tables.close", CloseCut(self._run, cut, saved))

    def write_tables(self, cut: str, prefix: str, *, full: bool) -> list[TablesWritten]:
        """Have each server write the tables it held fast, all at a time; return the answers in order.

        Raises:
            MonolithError: What one of them raised.
        """
        return self._work("tables.write", WriteTables(self._run, cut, prefix, full), TablesWritten)

    def restore_tables(self, chain: Sequence[SavedPart], options: RestoreOptions) -> list[TablesRestored]:
        """Have each server restore its share of the tables; see `write_tables`."""
        saved = tuple((one.prefix, one.entry) for one in chain)
        body = RestoreTables(self._run, saved, options.optimizer_state, options.strict)
        return self._work("tables.restore", body, TablesRestored)

    def _work(self, name: WorkName, body: WriteTables | RestoreTables, kind: type[A]) -> list[A]:
        def work(server: int) -> A:
            job = secrets.token_hex(8)
            self._tell("job.start", StartJob(name, write_body(body), job), server)
            while True:
                result = self._ask("job.wait", WaitForJob(job, POLL), JobResult, server)
                if result.done:
                    return read_body(kind, result.answer)

        return self._on_each(work)

    def _on_each(self, call: Callable[[int], A]) -> list[A]:
        """Call all servers at a time; return their answers in order, or raise the first error."""
        asked = [Future[A]() for _ in range(len(self.group))]

        def ask(server: int) -> None:
            try:
                asked[server].set_result(call(server))
            except BaseException as error:
                asked[server].set_exception(error)

        # Threads of a pool would keep a process from ending that no longer waits for them.
        for server in range(len(self.group)):
            threading.Thread(target=ask, args=(server,), name="fleet-work", daemon=True).start()
        wait(asked)
        return [future.result() for future in asked]

    # Inside

    def _ask(self, name: str, request: object, kind: type[A], server: int = 0) -> A:
        """Return a server's answer to a call.

        Raises:
            MonolithError: What the server raised.
            RequestError: The answer is of another kind.
        """
        return read_body(kind, self.group.call(server, name, **write_body(request)))

    def _tell(self, name: str, request: object, server: int = 0) -> None:
        """Make a call whose answer says nothing."""
        self.group.call(server, name, **write_body(request))

    def _tell_servers(self, name: str, request: object) -> None:
        self.group.call_all(name, **write_body(request))

    def _halt(self) -> int:
        return self._ask("meeting.halt", OfRun(self._run), HaltNumber).halt

    def _release(self) -> None:
        self._tell("meeting.release", OfRun(self._run))

    def _gather(self, stopped: Callable[[], bool]) -> list[WorkerState]:
        """Wait until all others stand still; one that has not come yet is waited for as at the start."""
        began = said = self._clock()
        while missing := self._missing(left=False, wait=1.0):
            if stopped():
                self._check_joined(began)
            now = self._clock()
            if now - began > self._start_timeout.total_seconds():
                raise DeadlineExceededError(
                    f"cannot save: waited {self._start_timeout} for workers "
                    f"{', '.join(map(str, missing))} to halt; see their logs"
                )
            if now - said >= SAY_EVERY:
                said = now
                who = ", ".join(map(str, missing))
                _log.warning("waiting for workers %s to halt before saving; see their logs", who)
        return self._states()

    def _check_joined(self, since: float) -> None:
        """Wait no longer for workers who never came, when the run is to stop."""
        if self._absent and self._clock() - since > JOIN_WITHIN:
            raise UnavailableError(
                f"workers {', '.join(map(str, self._absent))} never joined, so the steps since the last "
                "checkpoint cannot be saved; the next start resumes from it"
            )

    def _states(self) -> list[WorkerState]:
        answer = self._ask("meeting.gathered", AskGathered(self._run), GatheredStates)
        return [answer.states[str(worker)] for worker in range(1, self.num_workers)]

    def _missing(self, *, left: bool, wait: float) -> list[int]:
        self.check()
        answer = self._ask("meeting.gathered", AskGathered(self._run, wait, left), GatheredStates)
        if answer.failure:
            raise UnavailableError(answer.failure)
        self._absent = list(answer.absent)
        return list(answer.missing)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


@contextlib.contextmanager
def _passed_over(who: str) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        _log.warning("could not tell %s that the run is over: %s", who, error)
