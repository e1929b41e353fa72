"""Lost processes of a run that kept going: servers, workers, and the updates lost with them.

The command line describes them without importing torch, so they are apart from the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LostServer:
    """A parameter server was lost, and its shard restored in another process."""

    server: int
    rows: int | None
    """Rows that it had and the restored shard has not, at least: its last known number of rows, at most a
    second old, less the restored ones. None if the chief restarted meanwhile and never knew."""
    updates: int
    """Pushes of rows or weights that it had acknowledged and that are not in the checkpoint its shard was
    restored from, or in the copy of its standby. Of all workers, including those that left, except
    `uncounted`."""
    seconds: float
    """Seconds from the moment the chief missed it until all workers could continue."""
    restored_from: str | None
    """The checkpoint; None if there was none, so that the shard starts empty, or if a standby took over."""
    standby: str | None = None
    """The address of the standby that took over with its copy of the shard; None if none did."""
    behind: float = 0.0
    """Seconds from the newest change that the standby has until the chief missed the server."""
    uncounted: tuple[int, ...] | None = ()
    """Workers whose updates are not among those counted, because they were lost as well or did not answer;
    None if it is known only of the chief."""
    uncounted_why: str = ""
    """Which workers are not counted and why, in words; empty if all are."""

    def describe(self) -> str:
        rows = "an unknown number of" if self.rows is None else f"{self.rows:,}"
        source = (
            f"restored from {self.restored_from}" if self.restored_from else "started anew: nothing was saved"
        )
        if self.standby is not None:
            source = f"taken over by its standby at {self.standby}, {self.behind:.2f} s behind"
        return (
            f"parameter server {self.server} is back after {self.seconds:.1f} s, its shard {source}. Lost: "
            f"{rows} rows, {self.updates:,} updates{self._besides()}"
        )

    def _besides(self) -> str:
        return describe_uncounted(self.uncounted, self.uncounted_why)


def describe_uncounted(workers: Sequence[int] | None, why: str) -> str:
    """Return whose lost updates are not among those counted, and why; empty if all are."""
    if workers is None:
        return f", and those of all workers but the chief, which could not be counted: {why or 'not known'}"
    if workers:
        who = ", ".join(map(str, workers))
        return f", and those of workers {who}, which could not be counted: {why or 'not known'}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LostWorker:
    """A worker was lost, and another process replaced it, or the other workers have its work."""

    worker: int
    records: int | None
    """Records that it had trained since its last saved position, as far as it had said, which it does every
    second: they are trained again, and those that it trained after that. None if it is not known whether it
    had trained any: server 0 was lost as well, before the chief had learned that this worker had joined."""
    seconds: float
    """Seconds from the moment it was missed until it rejoined, or other workers could have its work; 0 if
    it had rejoined before that."""
    by_others: bool = False
    """Whether other workers train on them, because the data is a work queue."""

    def describe(self) -> str:
        if self.records is None:
            return (
                f"worker {self.worker} joined after server 0 was lost, which alone knew whether an earlier "
                "process of this worker had trained. If one had, the records since its last saved position "
                "are trained again"
            )
        if self.by_others:
            return (
                f"worker {self.worker} was lost, and its work given back after {self.seconds:.1f} s. The "
                f"others train the records since its last saved position again: {self.records:,} as far as "
                "it had said"
            )
        return (
            f"worker {self.worker} is back after {self.seconds:.1f} s. It trains the records since its last "
            f"saved position again: {self.records:,} as far as it had said"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """All losses of one run."""

    servers: tuple[LostServer, ...] = ()
    workers: tuple[LostWorker, ...] = ()
