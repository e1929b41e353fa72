"""What one worker hears of the others while it trains, and that it is there.

The thread that trains never waits for it: it looks here between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from monolith.errors import DeadlineExceededError, MonolithError, RetryableError, UnavailableError
from monolith.store import ServerGroup
from monolith.train.fleet.bodies import (
    AskNews,
    Attend,
    Attended,
    DealtPosition,
    Departure,
    News,
    Returned,
    Served,
)
from monolith.train.fleet.calls import ask
from monolith.train.fleet.push_bodies import PushesTold

_RETRY_AFTER = 0.1


class Mending(Protocol):
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
        mending: Mending | None = None,
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

    def _mended(self, error: Exception, mend: Callable[[Mending, RetryableError], None]) -> bool:
        """Do about an error what can be done; False where this thread has no more to do."""
        mending = self._mending
        if self._closed:
            return False
        if mending is not None and isinstance(error, RetryableError):
            try:
                mend(mending, error)
                time.sleep(_RETRY_AFTER)  # others may not have noticed yet
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
