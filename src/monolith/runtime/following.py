"""Following a run: its checkpoints one after another, as they come, in another process.

A follower checks the folder now and then. It takes the checkpoints that are listed there and were not taken
before, oldest first, and skips those that are deleted before their turn. It ends at the last step of the run:
the one it is told, or the last checkpoint of a run whose manifest says that it is finished. It also ends
if no new checkpoint comes for too long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from monolith import filesystem
from monolith.checkpoint import checkpoint_exists, read_checkpoint_state, read_manifest
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, FilesystemError
from monolith.runtime.report import read_run_manifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowConfig:
    """How long a run is followed, and how closely."""

    poll: timedelta = timedelta(seconds=5)
    """How often the folder is looked at."""
    timeout: timedelta | None = timedelta(hours=1)
    """How long no new checkpoint may come before following ends; None waits for ever."""
    last_step: int | None = None
    """The step at which following ends; None ends where the run says that it is finished."""

    def __post_init__(self) -> None:
        if self.poll <= timedelta(0):
            raise ConfigError(f"follow: poll must be above 0, got {self.poll}")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ConfigError(f"follow: timeout must be above 0, got {self.timeout}")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is new to a follower."""

    prefix: str
    step: int
    saved_at: float

    @property
    def name(self) -> str:
        return filesystem.base_name(self.prefix)

    @property
    def key(self) -> tuple[str, float]:
        return self.name, self.saved_at


class Follower:
    """Yields the checkpoints of a run as they come; see above. Used by one thread.

    Args:
        wait: Waits so many seconds; returns whether to stop.
        clock: Seconds that never run backwards.
        taken: Names of checkpoints, and when each was saved, that were taken before.
    """

    def __init__(
        self,
        model_dir: str,
        config: FollowConfig,
        *,
        wait: Callable[[float], bool],
        clock: Callable[[], float],
        taken: Iterable[tuple[str, float]] = (),
    ) -> None:
        self._model_dir = model_dir
        self._config = config
        self._wait = wait
        self._clock = clock
        self._taken = set(taken)
        self._last_taken = -1
        self.skipped = 0
        """Checkpoints that were deleted before they could be read."""
        self.why = ""
        """Why there are no more, at the end."""

    def __iter__(self) -> Iterator[Found]:
        """Yield checkpoints; one that is deleted while it is read is to be told to `passed_over`."""
        since = self._clock()
        while not self._is_over():
            finished = self._finished_at()  # before the folder is looked at, or its last save might be missed
            new = self._new()
            for found in new:
                if self._wait(0):
                    self.why = "stopped"
                    return
                if not checkpoint_exists(found.prefix):
                    self.passed_over(found)
                    continue
                self._taken.add(found.key)
                self._last_taken = found.step
                yield found
                since = self._clock()
                if self._is_over():
                    return
            if new:
                continue
            if finished is not None:
                self.why = f"the run is finished, at step {finished}"
                return
            timeout = self._config.timeout
            if timeout is not None and self._clock() - since >= timeout.total_seconds():
                self.why = f"no new checkpoint came for {timeout}"
                return
            if self._wait(self._config.poll.total_seconds()):
                self.why = "stopped"
                return

    def passed_over(self, found: Found) -> None:
        """Note that a checkpoint was deleted before it was read."""
        self.skipped += 1
        self._taken.add(found.key)
        _log.warning("skipped checkpoint %s: it was deleted before it could be read", found.name)

    def _is_over(self) -> bool:
        last = self._config.last_step
        if last is None or self._last_taken < last:
            return False
        self.why = f"step {last} is the last"
        return True

    def _new(self) -> list[Found]:
        """Return the listed checkpoints that were not taken yet, oldest first."""
        if not filesystem.is_folder(self._model_dir):
            return []
        state = read_checkpoint_state(self._model_dir)
        listed = () if state is None else (*state.all_model_checkpoint_paths, state.model_checkpoint_path)
        found = []
        for prefix in dict.fromkeys(listed):
            try:
                manifest = read_manifest(prefix).manifest
            except FileMissingError:  # deleted since it was listed: read by another follower, or never
                continue
            one = Found(prefix, manifest.step, manifest.saved_at)
            if one.key not in self._taken:
                found.append(one)
        return sorted(found, key=lambda one: one.step)

    def _finished_at(self) -> int | None:
        """Return the last step of the run, if it has said that it is finished."""
        try:
            starts = read_run_manifest(self._model_dir)
        except (CorruptFileError, FilesystemError):
            return None
        ended = starts[0].get("ended") if starts else None
        return int(ended["step"]) if ended and ended.get("finished") else None
