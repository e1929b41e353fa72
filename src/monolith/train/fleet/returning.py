"""How a worker goes on when servers of its run are lost and others serve in their place.

It never stops training for it: what it asks of a lost server waits, inside of the group, until it is told who
serves that place. It is told by the meeting. When the meeting was lost with server 0, it looks for the run
wherever server 0 is now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta

from monolith.errors import ClusterError, DeadlineExceededError, RetryableError, UnavailableError
from monolith.store import ServerGroup
from monolith.train.fleet.bodies import ComeBack, Joined, LostUpdates, Returned, Served
from monolith.train.fleet.calls import ask, tell
from monolith.train.fleet.keep_going import LOOK_EVERY, KeepGoing
from monolith.train.fleet.pushes import PushCounts
from monolith.train.peers import WorkerState


class WorkerReturn:
    """`Mending` of a worker.

    Args:
        how: Where to look for server 0.
        patience: How long to look for the run.
    """

    def __init__(
        self,
        group: ServerGroup,
        run: str,
        pushes: PushCounts,
        how: KeepGoing,
        *,
        worker: int,
        member: str,
        patience: timedelta,
    ) -> None:
        self._group = group
        self._run = run
        self._worker = worker
        self._member = member
        self._pushes = pushes
        self._how = how
        self._patience = patience
        self.left: WorkerState | None = None
        """What this worker left the run with, once it has."""
        self._said: dict[int, tuple[str, int]] = {}
        """Place -> the incarnation that replaced a lost one, and what was pushed in vain to that."""

    def find_meeting(self, cause: RetryableError) -> None:
        limit = self._how.clock() + self._patience.total_seconds()
        while True:
            for address in self._how.find(0):
                if (answer := self._come_back(address)) is None:
                    continue
                if answer.failed is not None:
                    raise UnavailableError(answer.failed.why)
                if answer.run == self._run:
                    self.take(answer.servers)
                    return
            if self._how.clock() >= limit:
                raise DeadlineExceededError(
                    f"waited {self._patience} for parameter server 0, which was lost, to be back: {cause}"
                ) from cause
            self._how.sleep(LOOK_EVERY)

    def _come_back(self, address: str) -> Joined | None:
        lost = dict(self._said.values())
        asked = ComeBack(self._run, self._worker, self._member, self._group.step, self.left, lost)
        with contextlib.closing(self._how.connect(address)) as server, contextlib.suppress(ClusterError):
            return ask(server, 0, "meeting.back", asked, Joined)
        return None

    def take(self, servers: Mapping[str, Served]) -> None:
        for place, served in ((int(place), served) for place, served in servers.items()):
            if self._group.incarnations[place] == served.incarnation:
                continue
            updates = self._pushes.replace(place, served)
            self._said[place] = served.incarnation, updates
            with contextlib.suppress(ClusterError):  # a figure of a report is no reason to fail
                said = LostUpdates(self._run, self._worker, served.incarnation, updates)
                tell(self._group, 0, "meeting.lost", said)

    def bring_back(self, server: int, cause: RetryableError) -> None:  # noqa: ARG002
        raise cause  # only the chief attends to servers

    def note_rows(self, server: int, rows: int) -> None:
        """Do nothing: only the chief is told."""

    def note_returned(self, returned: tuple[Returned, ...]) -> None:
        """Do nothing: the chief reports it."""
