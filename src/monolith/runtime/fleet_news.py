"""News of a fleet: what one worker knows of the other processes, and how it learns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from monolith import concurrency
from monolith.errors import DeadlineExceededError, MonolithError, RetryableError, UnavailableError
from monolith.runtime.coordinator import WorkerState
from monolith.runtime.messages import (
    AskNews,
    Attend,
    Attended,
    DealtPosition,
    Departure,
    News,
    PushesTold,
    Returned,
    Served,
    Trained,
)
from monolith.runtime.server_calls import ask
from monolith.store import ServerGroup


class Departures:
    """The departures of one run, by number, as the chief knows them.

    departed ──in a snapshot──► cut ──on disk──► saved ──work given back──► past

    The training thread takes a departure from step to step. The thread that brings back server 0 also notes
    and reads what is due, for the new coordination service. So a departure enters `_past` before it leaves
    `_due`: in the other order that thread could find it in neither, note it again, and its work would be
    given back twice.
    """

    def __init__(self) -> None:
        self._due: dict[int, Departure] = {}
        """Worker -> its departure, until its work is given back."""
        self.last = 0
        """The highest number that is known here."""
        self._past: set[int] = set()
        """Departures whose work was given back."""
        self._cut: dict[int, set[int]] = {}
        """Pause -> the departures that its snapshot includes."""
        self._saved: set[int] = set()
        self._since: dict[str, int] = {}
        """Worker -> the last pause before its work was given back, or assigned anew."""
        self.gone: dict[str, WorkerState] = {}
        """Worker -> its last state, since its work was given back."""

    @property
    def due(self) -> list[tuple[int, Departure]]:
        """Workers that departed with work that was not given back yet."""
        return sorted(self._due.items())

    def note_heard(self, departing: Mapping[int, Departure]) -> None:
        """Note departures; those whose work was given back already are ignored."""
        for worker, one in departing.items():
            if one.number not in self._past:
                self._due[worker] = one
                self.last = max(self.last, one.number)

    def note_cut(self, halt: int, departing: Iterable[Departure]) -> None:
        """Note the departures that a snapshot includes."""
        self._cut[halt] = {one.number for one in departing if one.state is not None}

    def note_saved(self, halt: int) -> None:
        """Note that the snapshot of a pause is on disk."""
        self._saved |= self._cut.pop(halt, set())
        self._cut = {number: found for number, found in self._cut.items() if number > halt}

    def is_saved(self, number: int) -> bool:
        """Whether all steps of a departed worker are on disk."""
        return number in self._saved

    def note_given(self, worker: int, left: WorkerState, halt: int) -> None:
        """Note that the work of a worker was given back, after the pause of this number."""
        self._past.add(self._due[worker].number)
        del self._due[worker]
        self._since[str(worker)] = halt
        self.gone = {**self.gone, str(worker): left}  # replaced as a whole: see `Fleet._begin_meeting`

    def note_dealt(self, workers: Iterable[int], halt: int) -> None:
        """Note that these workers were assigned other work, at the pause of this number."""
        self._since |= {str(worker): halt for worker in workers}

    def still_said(self, states: Mapping[str, WorkerState], halt: int) -> dict[str, WorkerState]:
        """Return the states reported at a pause that still hold: no work was given back or assigned since."""
        return {worker: one for worker, one in states.items() if halt > self._since.get(worker, 0)}


_RETRY_NEWS_AFTER = 0.1


class LostServerPolicy(Protocol):
    """Replaces lost servers if a run keeps going. Called from the threads that ask for news."""

    def find_meeting(self, cause: RetryableError) -> None:
        """Return when news may be asked for again, at the server that serves shard 0 now.

        Raises:
            MonolithError: This worker is not part of the run any more, or waited too long.
        """

    def bring_back(self, server: int, cause: RetryableError) -> None:
        """Return when the shard of a lost server is served again, restored."""

    def take(self, servers: Mapping[str, Served]) -> None:
        """Use the servers that replaced lost ones."""

    def note_rows(self, server: int, rows: int) -> None:
        """Note how many rows a server has."""

    def note_returned(self, returned: tuple[Returned, ...]) -> None:
        """Note all workers that were lost and rejoined so far."""


class FleetNews:
    """Asks for news on a thread of its own, so that a worker learns of a pause without a call at every step.

    A chief also keeps a call open at every server: the server knows by it that the chief is alive, and the
    chief notices at once when the server is lost.

    Args:
        mending: Replaces lost servers; None ends the run if one is lost.
    """

    def __init__(
        self,
        group: ServerGroup,
        run: str,
        worker: int,
        every: float,
        *,
        member: str,
        mending: LostServerPolicy | None = None,
    ) -> None:
        self._group = group
        self._every = every
        self._run = run
        self._worker = worker
        self._member = member
        self._mending = mending
        self.examples = 0
        """Examples this worker has trained on, as it reports; set by the training thread."""
        # Guards every field below. The threads set them, all of one answer together (`_note`); the training
        # thread reads single ones without it. Only a wait needs it: after `wait_for_release` the fields are
        # those of one answer, so a worker that was released knows what it was assigned.
        self._changed = concurrency.Condition()
        self.halt: int | None = None
        self.stop_reason: str | None = None
        self.present: tuple[int, ...] = ()
        """Other workers that are present, in an elastic run."""
        self.departing: dict[int, Departure] = {}
        """Worker -> its departure, if the chief is to give its work back."""
        self.dealt: DealtPosition | None = None
        """The work last assigned to this worker, known at the latest when the pause for that is over."""
        self.joined: tuple[int, ...] = ()
        """Other workers that are part of the run, on the chief."""
        self.pushes: Mapping[str, PushesTold] = {}
        """By worker: what those had pushed who left, as the chief."""
        self.left: Mapping[str, WorkerState] = {}
        """By worker that left: its last state, as the chief."""
        self.trained: Mapping[str, Trained] = {}
        """By worker: its process, and how much that has trained, as the chief."""
        self._error: Exception | None = None
        self.saved = 0
        self._over = False
        self._finished = True
        self._closed = False
        self._start(self._listen)

    def attend(self) -> None:
        """Keep a call at every server."""
        for server in range(len(self._group)):
            self._start(self._attend, server)

    def check(self) -> None:
        with self._changed:
            self._check()

    @property
    def unfinished(self) -> bool:
        """Whether the run was stopped before its end."""
        with self._changed:
            return not self._finished

    def wait_for_end(self, timeout: float) -> bool:
        with self._changed:
            limit = concurrency.monotonic() + timeout
            while not self._over:
                self._check()
                if concurrency.monotonic() >= limit:
                    raise DeadlineExceededError(
                        f"the chief did not save within {timeout:.0f} s after this worker finished; see its "
                        "log"
                    )
                self._changed.wait(1.0)
            return self._finished

    def wait_for_release(self, halt: int) -> None:
        with self._changed:
            # Without a limit of its own: the chief takes a snapshot meanwhile. If the chief is lost, the run
            # fails, which is news; if the run keeps going, the chief that rejoins ends every pause.
            while self.halt == halt:
                self._check()
                self._changed.wait(1.0)
            self._check()

    def close(self) -> None:
        """Ask no more; the answer to a question under way is dropped."""
        with self._changed:
            self._closed = True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        def run_and_report() -> None:
            # The training thread waits for what this one learns. An unexpected error must reach it,
            # or it would wait for a release that never comes.
            try:
                run(*args)
            except Exception as error:
                self._note(error=error)

        concurrency.Thread(target=run_and_report, name="fleet-news", daemon=True).start()

    def _listen(self) -> None:
        seen = -1
        while not self._closed and not self._over:
            try:
                asked = AskNews(self._run, self._worker, seen, self._every, self._member, self.examples)
                news = ask(self._group, 0, "meeting.news", asked, News)
            except Exception as error:
                if not self._mended(error, lambda mending, cause: mending.find_meeting(cause)):
                    return
                seen = -1  # another service counts its own versions
                continue
            seen = news.version
            # New servers before the rest: the training thread may act on a release at once, and must not wait
            # for a server that is known to be lost.
            if self._mending is not None:
                self._mending.take(news.servers)
                self._mending.note_returned(news.returned)
            self._note(news, error=UnavailableError(news.failure) if news.failure else None)

    def _attend(self, server: int) -> None:
        asked = Attend(self._run, self._every)
        while not self._closed:
            try:
                answer = ask(self._group, server, "server.attend", asked, Attended)
                if self._mending is not None:
                    self._mending.note_rows(server, answer.rows)
            except Exception as error:
                if not self._mended(error, lambda mending, cause: mending.bring_back(server, cause)):
                    return

    def _mended(self, error: Exception, mend: Callable[[LostServerPolicy, RetryableError], None]) -> bool:
        """Recover from an error if possible; return False if this thread has no more to do."""
        mending = self._mending
        if self._closed:
            return False
        if mending is not None and isinstance(error, RetryableError):
            try:
                mend(mending, error)
                concurrency.sleep(_RETRY_NEWS_AFTER)  # others may not have noticed yet
                return not self._closed
            except Exception as worse:
                error = worse
        self._note(error=error)
        return False

    def _note(self, news: News | None = None, error: Exception | None = None) -> None:
        if error is not None and self._mending is not None:
            lasting = error if isinstance(error, MonolithError) else UnavailableError(str(error))
            self._group.give_up(lasting)  # the thread that trains may wait for a server
        with self._changed:
            self._error = self._error or error
            if news is not None:
                self.dealt = news.dealt
                self.halt, self.stop_reason = news.halt, news.stop or self.stop_reason
                self.saved, self._over = news.saved, news.over
                self.present = news.present
                self.joined, self.pushes, self.left = news.joined, news.pushes, news.left
                self.trained = news.trained
                self.departing = {int(worker): one for worker, one in news.departing.items()}
                self._finished = not news.unfinished
            self._changed.notify_all()
