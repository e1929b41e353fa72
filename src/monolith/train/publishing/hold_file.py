"""Whether publishing is paused, kept next to the checkpoints of a run.

A person who holds publishing back, or takes servers back to a version, means it until somebody says
otherwise, whatever becomes of the processes meanwhile. So the process that leads writes it down, and whoever
holds rows reads it before it lets anything out:

    not there ──a hold or a rollback, by a person or a guard──► there ──resume──► not there
                                                               │  ▲
                                       a process starts again──┘  └──held from its first moment

What cannot be read holds as well: somebody meant something by it.

A pause covers the exported versions, too: those of the first bad step or later are withheld from servers. The
process that writes this file marks those that exist; exports that are made while it is there mark themselves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from monolith import filesystem
from monolith.errors import FilesystemError, MonolithError, RequestError
from monolith.train.publishing.bodies import Reason, ShareStanding
from monolith.wire.messages import Count, Name, Seconds, read_message, write_message

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
    first_bad_step: Count | None = None
    """The first step whose rows are not trusted; None in the file of an older release."""

    def describe(self) -> str:
        when = f"since {when_utc(self.since)}" if self.since else "already"
        return f"held {when}: {self.reason or 'no reason was given'}"


class HoldFile:
    """The file in a run's model_dir. One process writes it, of all that read it.

    Args:
        withhold: Marks the exported versions that a pause covers; called whenever a pause begins or changes,
            and at the first look after a start.
        release: Removes the marks of all exported versions.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        withhold: Callable[[KeptHold], None] = lambda _: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._withhold = withhold
        self._release = release
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
            return read_message(KeptHold, json.loads(filesystem.read_bytes(self._path)))
        except (FilesystemError, RequestError, ValueError) as error:
            reason = f"{self._path}, which says whether publishing is held, cannot be read: {error}"
            return KeptHold(reason[:4096], since=0.0)

    def note(self, shares: Sequence[ShareStanding]) -> None:
        """Keep whether shares are held, where that is something new; what fails is tried the next time."""
        if not shares:
            return
        held = [one for one in shares if one.held]
        kept = None
        if held:
            first = held[0]
            steps = [one.first_bad_step for one in held if one.first_bad_step is not None]
            kept = KeptHold(
                first.reason, first.since, first.version, first.by_guard, min(steps, default=None)
            )
        if self._known and kept == self._written:
            return
        try:
            self._write(kept)
        except MonolithError as error:
            self._known = False
            _log.warning(
                "a pause of publishing could not be written down, retrying; the next start of this run, or "
                "servers that take its exports, may not know of it: %s",
                error,
            )

    def release(self) -> None:
        """Let servers take all versions that were withheld.

        Raises:
            RequestError: Publishing is paused.
        """
        if self._written is not None:
            raise RequestError(
                "publish: publishing is paused, so its versions stay withheld; resume it first"
            )
        self._release()

    def _write(self, kept: KeptHold | None) -> None:
        if kept is None:
            filesystem.remove(self._path)  # versions stay withheld: see `release`
        else:
            filesystem.make_dirs(self._folder)
            with filesystem.atomic_write(self._path) as file:
                file.write(json.dumps(write_message(kept)).encode())
            # After the file: an export that is committed meanwhile either sees the file or is found here.
            self._withhold(kept)
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
