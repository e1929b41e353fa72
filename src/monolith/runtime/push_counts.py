"""How much a process has taught each server, and would be lost with it.

Every push to a shard has a number. A checkpoint includes the pushes acknowledged up to its pause; the copy of
a standby names the numbers it includes. A push that was acknowledged and is in neither is lost with its
server. A push that was not acknowledged is not lost: it is sent again to the next server of the shard.

A worker that leaves tells all of this, so that it can be counted without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from monolith import concurrency
from monolith.runtime.messages import CopiedPushes, PlacePushes, PushesTold, Served
from monolith.store import ServerGroup
from monolith.store.server_group import PushProgress


@dataclass(slots=True)
class _PlaceCounts:
    """The pushes of this process to one shard, across replacements of its server.

    Example: pauses at push 4 (number 1) and push 7 (number 2), 9 pushes acknowledged. A server restored from
    the checkpoint of pause 1 lost 9 - 4 = 5 of them; one of pause 2 lost 2. A standby whose copy has all up
    to 8 lost 1.
    """

    marks: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Pause -> the pushes acknowledged then, plus those lost since; 0 is the start of the run."""
    since: int = 0
    """The number of the last push when the server was last replaced: those up to it are accounted for."""
    carried: frozenset[int] = frozenset()
    """Except these, which were not acknowledged by then."""

    def take_lost(self, sender: str, served: Served, standing: PushProgress) -> int:
        """Return the pushes lost when another server took over the shard, and start to count again."""
        if served.copied is None:
            lost = standing.acknowledged - self._at(served.halt)
            # From here on the shard contains the checkpoint and what comes now, whichever pause is restored
            # from next: these pushes are lost once, and must not be counted with the next loss.
            self.marks = dict.fromkeys(self.marks, standing.acknowledged)
        else:
            lost = self._missed_by(served.copied.get(sender), standing)
            # What is lost with the standby, later, is none of these.
            self.marks = {halt: count + lost for halt, count in self.marks.items()}
        self.since, self.carried = standing.last, standing.unanswered
        return lost

    def _at(self, halt: int) -> int:
        before = max((at for at in self.marks if at <= halt), default=min(self.marks))
        return self.marks[before]

    def _missed_by(self, copied: CopiedPushes | None, standing: PushProgress) -> int:
        """Return how many acknowledged pushes a copy lacks: those above its highest number, and its gaps."""
        highest = self.since if copied is None else copied.highest
        missing = frozenset() if copied is None else frozenset(copied.missing)
        above = max(highest, self.since)
        lost = max(0, standing.last - above) - sum(number > above for number in standing.unanswered)
        between = {number for number in missing if self.since < number <= highest}
        carried = {
            number for number in self.carried if copied is None or number > highest or number in missing
        }
        return lost + len((between | carried) - standing.unanswered)


class PushCounts:
    """The pushes that each server has acknowledged to this process. Thread-safe."""

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        # Guards the counts. Held while a server is replaced in the group, too: a mark in between would take
        # the acknowledgements of one server for those of another.
        self._lock = concurrency.Lock()
        self._places = [_PlaceCounts() for _ in range(len(group))]

    def mark(self, halt: int) -> None:
        """Note a halt, when every push is acknowledged."""
        with self._lock:
            for place, standing in zip(self._places, self._group.pushes, strict=True):
                place.marks[halt] = standing.acknowledged

    def forget_before(self, halt: int) -> None:
        """Forget pauses before this one: its snapshot is on disk, and no restore goes further back."""
        with self._lock:
            for place in self._places:
                if halt in place.marks:
                    place.marks = {at: count for at, count in place.marks.items() if at >= halt}

    def replace(self, server: int, served: Served) -> int:
        """Use who serves a place from now on; return the pushes that were lost with who did before."""
        with self._lock:
            standing = self._group.replace(server, served.address, served.incarnation)
            return self._places[server].take_lost(self._group.sender, served, standing)

    def told(self) -> PushesTold:
        """Return all counts, for the service once this process has left: every push is acknowledged."""
        with self._lock:
            known = zip(self._places, self._group.pushes, self._group.incarnations, strict=True)
            places = tuple(_told(place, standing.last, incarnation) for place, standing, incarnation in known)
            return PushesTold(self._group.sender, places)


def marked(told: PushesTold, halt: int) -> PushesTold:
    """Return what a worker has told, with a halt whose cut has all of it."""
    places = (replace(one, marks={**one.marks, str(halt): one.last}) for one in told.places)
    return PushesTold(told.sender, tuple(places))


def take_lost_of(told: PushesTold, servers: Mapping[int, Served]) -> tuple[PushesTold, dict[str, int]]:
    """Count what a worker that left has lost with servers that were replaced since.

    Args:
        servers: By place, who serves it since it was replaced last.

    Returns:
        What it has told, counted anew; and the lost pushes, by the incarnation of who serves instead.
    """
    places, lost = list(told.places), dict[str, int]()
    for number, served in servers.items():
        if number < len(places) and places[number].incarnation != served.incarnation:
            said = places[number]
            marks = {int(halt): count for halt, count in said.marks.items() if halt.isdecimal()}
            place = _PlaceCounts(marks or {0: 0}, said.since, frozenset(said.carried))
            lost[served.incarnation] = max(0, place.take_lost(told.sender, served, PushProgress(said.last)))
            places[number] = _told(place, said.last, served.incarnation)
    return PushesTold(told.sender, tuple(places)), lost


def _told(place: _PlaceCounts, last: int, incarnation: str | None) -> PlacePushes:
    marks = {str(halt): count for halt, count in place.marks.items()}
    return PlacePushes(incarnation, last, place.since, tuple(sorted(place.carried)), marks)
