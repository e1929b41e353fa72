"""What a worker knows of the other processes of its fleet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

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
)
from monolith.runtime.server_calls import ask
from monolith.store import ServerGroup


class Departures:
    """The departures of one run, by number. Used by the thread that trains."""

    def __init__(self) -> None:
        self._due: dict[int, Departure] = {}
        """Worker -> its departure, until its work was given back."""
        self.last = 0
        """The highest number that is known here."""
        self._past: set[int] = set()
        """Departures whose work was given back."""
        self._cut: dict[int, set[int]] = {}
        """Halt -> the departures that were known then."""
        self._saved: set[int] = set()
        self._since: dict[str, int] = {}
        """Worker -> the last halt before its work was given back, or dealt out."""
        self.gone: dict[str, WorkerState] = {}
        """Worker -> what is left of it, or was when another came in its place."""

    @property
    def due(self) -> list[tuple[int, Departure]]:
        """Who has departed, with work that was not given back yet, by worker."""
        return sorted(self._due.items())

    def note_heard(self, departing: Mapping[int, Departure]) -> None:
        """Note who has departed; what is old news by now is passed over."""
        for worker, one in departing.items():
            if one.number not in self._past:
                self._due[worker] = one
                self.last = max(self.last, one.number)

    def note_cut(self, halt: int, departing: Iterable[Departure]) -> None:
        """Note who had departed when everybody stood still."""
        self._cut[halt] = {one.number for one in departing if one.state is not None}

    def note_saved(self, halt: int) -> None:
        """Note that the checkpoint of a halt is on disk."""
        self._saved |= self._cut.pop(halt, set())
        self._cut = {number: found for number, found in self._cut.items() if number > halt}

    def is_saved(self, number: int) -> bool:
        """Whether all that a worker did before it departed is on disk."""
        return number in self._saved

    def note_given(self, worker: int, left: WorkerState, halt: int) -> None:
        """Note that its work was given back, after the halt of this number."""
        self._past.add(self._due.pop(worker).number)
        self._since[str(worker)] = halt
        self.gone[str(worker)] = left

    def note_dealt(self, workers: Iterable[int], halt: int) -> None:
        """Note that these workers were dealt other work, at the halt of this number."""
        self._since |= {str(worker): halt for worker in workers}

    def still_said(self, states: Mapping[str, WorkerState], halt: int) -> dict[str, WorkerState]:
        """Return what workers said at a halt, without those whose work was given back or dealt out since."""
        return {worker: one for worker, one in states.items() if halt > self._since.get(worker, 0)}


_RETRY_NEWS_AFTER = 0.1


class LostServerPolicy(Protocol):
    """What is done about lost servers where a run keeps going. Called from threads that ask for news."""

    def find_meeting(self, cause: RetryableError) -> None:
        """Return when news may be asked for again, from wherever server 0 is now.

        Raises:
            MonolithError: This worker has no part in the run any more, or waited long enough.
        """

    def bring_back(self, server: int, cause: RetryableError) -> None:
        """Return when a server that the chief attends to is there again, restored."""

    def take(self, servers: Mapping[str, Served]) -> None:
        """Work with those who serve some places by now."""

    def note_rows(self, server: int, rows: int) -> None:
        """Hear how many rows a server has."""

    def note_returned(self, returned: tuple[Returned, ...]) -> None:
        """Hear of all workers that were lost and came back so far."""


class FleetNews:
    """Asks for news on a thread of its own, so that a worker hears of a halt without asking at every step.

    A chief also keeps a call at every server: by it the server knows that the chief is there, and the
    chief hears at once when the server is gone.

    Args:
        mending: What to do when a server is lost; None takes that for the end of the run.
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
        """Those that this worker has trained, which others are told; set by the thread that trains."""
        self._changed = threading.Condition()  # guards what follows
        self.halt: int | None = None
        self.stop_reason: str | None = None
        self.present: tuple[int, ...] = ()
        """Other workers that are there, where they may come and go."""
        self.departing: dict[int, Departure] = {}
        """Worker -> what it left with, where the chief is to give its work back."""
        self.dealt: DealtPosition | None = None
        """What this worker was dealt last, known at the latest when the halt for that is over."""
        self.joined: tuple[int, ...] = ()
        """Other workers that have a part in the run, as the chief."""
        self.pushes: Mapping[str, PushesTold] = {}
        """By worker: what those had pushed who left, as the chief."""
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
        """Whether somebody stopped the run before its end."""
        with self._changed:
            return not self._finished

    def wait_for_end(self, timeout: float) -> bool:
        with self._changed:
            limit = time.monotonic() + timeout
            while not self._over:
                self._check()
                if time.monotonic() >= limit:
                    raise DeadlineExceededError(
                        f"the chief did not save within {timeout:.0f} s after this worker finished; see its "
                        "log"
                    )
                self._changed.wait(1.0)
            return self._finished

    def wait_for_release(self, halt: int) -> None:
        with self._changed:
            while self.halt == halt:
                self._check()
                self._changed.wait(1.0)
            self._check()

    def close(self) -> None:
        """Ask no more; a question that is under way is answered to nobody."""
        with self._changed:
            self._closed = True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=run, args=args, name="fleet-news", daemon=True).start()

    def _listen(self) -> None:
        seen = -1
        while not self._closed and not self._over:
            try:
                asked = AskNews(self._run, self._worker, seen, self._every, self._member, self.examples)
                news = ask(self._group, 0, "meeting.news", asked, News)
            except Exception as error:
                if not self._mended(error, lambda mending, cause: mending.find_meeting(cause)):
                    return
                seen = -1
                continue
            seen = news.version
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
        """Do about an error what can be done; False where this thread has no more to do."""
        mending = self._mending
        if self._closed:
            return False
        if mending is not None and isinstance(error, RetryableError):
            try:
                mend(mending, error)
                time.sleep(_RETRY_NEWS_AFTER)  # others may not have noticed yet
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
                self.joined, self.pushes = news.joined, news.pushes
                self.departing = {int(worker): one for worker, one in news.departing.items()}
                self._finished = not news.unfinished
            self._changed.notify_all()
