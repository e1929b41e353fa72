"""What one worker hears of the others while it trains, and that it is there.

The thread that trains never waits for it: it looks here between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from monolith.errors import DeadlineExceededError, UnavailableError
from monolith.store import ServerGroup
from monolith.train.fleet.bodies import AskNews, Attend, News
from monolith.wire.bodies import read_body, write_body


class FleetNews:
    """Asks for news on a thread of its own, so that a worker hears of a halt without asking at every step.

    A chief also keeps a call at every server: by it the server knows that the chief is there, and the
    chief hears at once when the server is gone.
    """

    def __init__(self, group: ServerGroup, run: str, worker: int, every: float) -> None:
        self._group = group
        self._every = every
        self._run = run
        self._worker = worker
        self._changed = threading.Condition()  # guards what follows
        self.halt: int | None = None
        self.stop_reason: str | None = None
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
                asked = AskNews(self._run, self._worker, seen, self._every)
                news = read_body(News, self._group.call(0, "meeting.news", **write_body(asked)))
            except Exception as error:
                self._note(error=error)
                return
            seen = news.version
            self._note(news, error=UnavailableError(news.failure) if news.failure else None)

    def _attend(self, server: int) -> None:
        asked = write_body(Attend(self._run, self._every))
        while not self._closed:
            try:
                self._group.call(server, "server.attend", **asked)
            except Exception as error:
                self._note(error=error)
                return

    def _note(self, news: News | None = None, error: Exception | None = None) -> None:
        with self._changed:
            self._error = self._error or error
            if news is not None:
                self.halt, self.stop_reason = news.halt, news.stop
                self.saved, self._over = news.saved, news.over
                self._finished = not news.unfinished
            self._changed.notify_all()
