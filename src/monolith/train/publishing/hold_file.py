"""Whether publishing is held, kept beside the checkpoints of a run.

A person who holds publishing back, or takes servers back to a version, means it until somebody says
otherwise, whatever becomes of the processes meanwhile. So the process that leads writes it down, and whoever
holds rows reads it before it lets anything out:

    not there ──a hold or a rollback, by a person or a guard──► there ──resume──► not there
                                                               │  ▲
                                       a process starts again──┘  └──held from its first moment

What cannot be read holds as well: somebody meant something by it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from monolith import filesystem
from monolith.errors import FilesystemError, RequestError
from monolith.train.publishing.bodies import Reason, ShareStanding
from monolith.wire.bodies import Name, Seconds, read_body, write_body

_log = logging.getLogger(__name__)

NAME = "publish_hold.json"
"""In the model_dir."""


@dataclass(frozen=True, slots=True)
class KeptHold:
    """Why publishing is held, and since when."""

    reason: Reason
    since: Seconds
    """Unix seconds; 0 where nobody knows."""
    version: Name | None = None
    """The exported version that servers were taken back to."""
    by_guard: bool = False
    """Whether a guard holds it, and not a person."""

    def describe(self) -> str:
        when = f"since {when_utc(self.since)}" if self.since else "already"
        return f"held {when}: {self.reason or 'no reason was given'}"


class HoldFile:
    """The file in a run's model_dir. One process writes it, of all that read it."""

    def __init__(self, model_dir: str) -> None:
        self._folder = model_dir
        self._path = filesystem.join(model_dir, NAME)
        self._written: KeptHold | None = None
        self._known = False
        """Whether the file is as `_written` says."""

    def read(self) -> KeptHold | None:
        """Return what was held when the run last ended, or was; None where nothing is."""
        try:
            if not filesystem.exists(self._path):
                return None
            return read_body(KeptHold, json.loads(filesystem.read_bytes(self._path)))
        except (FilesystemError, RequestError, ValueError) as error:
            reason = f"{self._path}, which says whether publishing is held, cannot be read: {error}"
            return KeptHold(reason[:4096], since=0.0)

    def note(self, shares: Sequence[ShareStanding]) -> None:
        """Keep whether shares are held, where that is something new; what fails is tried the next time."""
        if not shares:
            return
        first = next((one for one in shares if one.held), None)
        kept = None if first is None else KeptHold(first.reason, first.since, first.version, first.by_guard)
        if self._known and kept == self._written:
            return
        try:
            self._write(kept)
        except FilesystemError as error:
            self._known = False
            _log.warning("whether publishing is held is not known to the next start of this run: %s", error)

    def _write(self, kept: KeptHold | None) -> None:
        if kept is None:
            filesystem.remove(self._path)
        else:
            filesystem.make_dirs(self._folder)
            with filesystem.atomic_write(self._path) as file:
                file.write(json.dumps(write_body(kept)).encode())
        self._written, self._known = kept, True


def describe_publishing(shares: Sequence[ShareStanding]) -> str:
    """Return in a few words how the publishing of a run stands; empty where nothing is known of it."""
    if not shares:
        return ""
    held = next((one for one in shares if one.held), None)
    failing = next((one.trouble for one in shares if one.trouble), "")
    if failing:
        return f"publishing fails, and is retried: {failing}"
    if held is None:
        return "publishing"
    kept = KeptHold(held.reason[:200], held.since, held.version)
    back = "" if held.version is None else f"; servers at version {held.version}"
    return f"publishing {kept.describe()}{back}"


def when_utc(seconds: float) -> str:
    """Return a moment in Unix seconds for a person."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
