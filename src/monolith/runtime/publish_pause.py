"""The pause file: it records next to the checkpoints of a run that publishing is paused.

An operator's pause or rollback lasts until an operator resumes publishing, even if all processes restart in
the meantime. So the process that leads writes a file, and every process that publishes reads it before its
first
delta:

    no file ──pause or rollback, by an operator or a guard──► file ──resume──► no file
                                                             │   ▲
                                        a process restarts ──┘   └── paused from its start

A file that cannot be read pauses publishing as well: it exists because publishing was paused.

A pause also covers exported versions: those of the first bad step or later are withheld from servers. The
process that writes the file marks the versions that exist; exports made during the pause mark themselves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from monolith import filesystem
from monolith.errors import FilesystemError, MonolithError, RequestError
from monolith.sync.publish_messages import Reason, ShardPublishStatus
from monolith.wire.messages import Count, Name, Seconds, read_message, write_message

_log = logging.getLogger(__name__)

NAME = "publish_hold.json"
"""The name of the file in the model_dir."""


@dataclass(frozen=True, slots=True)
class PublishPause:
    """Why publishing is paused, and since when."""

    reason: Reason
    since: Seconds
    """Unix seconds; 0 if unknown."""
    version: Name | None = None
    """The exported version that servers were rolled back to."""
    by_guard: bool = False
    """Whether a guard paused it, and not an operator."""
    first_bad_step: Count | None = None
    """The first step whose rows are not trusted; None in the file of an older release."""

    def describe(self) -> str:
        when = f"since {when_utc(self.since)}" if self.since else "already"
        return f"paused {when}: {self.reason or 'no reason was given'}"


class PauseFile:
    """The file in a run's model_dir. The process that leads writes it, and all publishing processes read it.

    Args:
        withhold: Marks the exported versions that a pause covers; called whenever a pause begins or changes,
            and at the first check after a start.
        release: Removes the marks of all exported versions.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        withhold: Callable[[PublishPause], None] = lambda _: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._withhold = withhold
        self._release = release
        self._folder = model_dir
        self._path = filesystem.join(model_dir, NAME)
        self._written: PublishPause | None = None
        self._known = False
        """Whether the content of the file is `_written`."""

    def read(self) -> PublishPause | None:
        """Return the recorded pause; None if publishing is not paused."""
        try:
            if not filesystem.exists(self._path):
                return None
            return read_message(PublishPause, json.loads(filesystem.read_bytes(self._path)))
        except (FilesystemError, RequestError, ValueError) as error:
            reason = f"{self._path}, which records a pause of publishing, cannot be read: {error}"
            return PublishPause(reason[:4096], since=0.0)

    def note(self, shares: Sequence[ShardPublishStatus]) -> None:
        """Record whether shards are paused, if that has changed; a write that fails is retried the next
        time."""
        if not shares:
            return
        held = [one for one in shares if one.held]
        kept = None
        if held:
            first = held[0]
            steps = [one.first_bad_step for one in held if one.first_bad_step is not None]
            kept = PublishPause(
                first.reason, first.since, first.version, first.by_guard, min(steps, default=None)
            )
        if self._known and kept == self._written:
            return
        try:
            self._write(kept)
        except MonolithError as error:
            self._known = False
            _log.warning(
                "a pause of publishing could not be recorded, retrying; the next start of this run, or "
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

    def _write(self, kept: PublishPause | None) -> None:
        if kept is None:
            filesystem.remove(self._path)  # versions stay withheld: see `release`
        else:
            filesystem.make_dirs(self._folder)
            with filesystem.atomic_write(self._path) as file:
                file.write(json.dumps(write_message(kept)).encode())
            # After the file: an export that is committed meanwhile either sees the file or is found here.
            self._withhold(kept)
        self._written, self._known = kept, True


def describe_publishing(shares: Sequence[ShardPublishStatus]) -> str:
    """Return the state of publishing in a few words; empty if it is unknown."""
    if not shares:
        return ""
    held = next((one for one in shares if one.held), None)
    failing = next((one.trouble for one in shares if one.trouble), "")
    if failing:
        return f"publishing fails, and is retried: {failing}"
    if held is None:
        return "publishing"
    kept = PublishPause(held.reason[:200], held.since, held.version)
    back = "" if held.version is None else f"; servers at version {held.version}"
    return f"publishing {kept.describe()}{back}"


def when_utc(seconds: float) -> str:
    """Return a time in Unix seconds as text in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
