"""Retention: which checkpoints stay, which are deleted, and which deletions must wait.

                      beyond max_to_keep                        nothing needs its files
    saved ──▶ listed ────────────────────▶ released ─────────────────────────────────────▶ deleted
               │
               └─ the first after another `keep_every` ──▶ preserved, for good

A checkpoint is *listed* while a run may restore it. Beyond `max_to_keep` the oldest leave the list. Exempt
checkpoints, those that the operator or the file `best_checkpoint` names, never leave it and do not count.

A released checkpoint is deleted only when no listed, preserved or exempt one needs it: an incremental
checkpoint is useless without the chain before it. With `max_to_keep=2` and the chain 100 full <- 200 <- 300,
step 100 is released when 300 is saved, and deleted when 200 and 300 have left the list too.

Nothing here touches a file. A `Retention` never changes; each verb returns the next one, so that after a
failure half-way the caller still has the one that matches the disk.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from monolith import filesystem
from monolith.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, and when it was saved in Unix seconds."""

    path: str
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """All checkpoints of a run, and the rules by which they are deleted."""

    max_to_keep: int | None
    """How many to list in addition to the exempt; 0 or None lists none and releases none."""
    keep_every: timedelta | None = None
    """The time between two checkpoints that are preserved; None preserves none."""
    last_preserved: float | None = None
    """Unix seconds: when the run started, then a whole number of periods later. Saved with every checkpoint,
    so that a restart does not start a new period."""
    listed: tuple[Saved, ...] = ()
    """Oldest first."""
    released: tuple[str, ...] = ()
    """Checkpoints whose files may be deleted, and are not yet."""
    preserved: tuple[str, ...] = ()
    """Checkpoints that are not listed and stay; only those that need another one are remembered."""
    depends_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Checkpoint to the checkpoints that it needs directly."""

    def __post_init__(self) -> None:
        if self.max_to_keep is not None and self.max_to_keep < 0:
            raise ConfigError(f"max_to_keep must not be negative, got {self.max_to_keep}; 0 keeps all")
        if self.keep_every is not None and self.keep_every <= timedelta(0):
            raise ConfigError(f"keep_every must be above 0, got {self.keep_every}; None turns it off")
        if self.keep_every is not None and self.last_preserved is None:
            raise ConfigError(
                "keep_every needs last_preserved to count from: the time at which the run started"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The listed checkpoints, oldest first."""
        return tuple(saved.path for saved in self.listed)

    @property
    def next_keep_time(self) -> float | None:
        """A checkpoint saved after this is preserved when it leaves the list."""
        if self.keep_every is None or self.last_preserved is None:
            return None
        return self.last_preserved + self.keep_every.total_seconds()

    def begun(self, path: str, depends_on: Sequence[str] = ()) -> Retention:
        """A save of `path` starts. Until it is recorded, its files are incomplete."""
        needs = tuple(dict.fromkeys([*self.depends_on.get(path, ()), *depends_on]))
        return replace(
            self,
            released=(*_without(self.released, path), path),
            depends_on=_with(self.depends_on, path, needs),
        )

    def needing(self, path: str, depends_on: Sequence[str]) -> Retention:
        """`path` needs these too, in addition to what is known of it."""
        needs = tuple(dict.fromkeys([*self.depends_on.get(path, ()), *depends_on]))
        return replace(self, depends_on=_with(self.depends_on, path, needs)) if needs else self

    def recorded(self, path: str, time: float, depends_on: Sequence[str] = ()) -> Retention:
        """A save of `path` is complete: it becomes the newest, wherever it was before."""
        after = replace(
            self,
            listed=tuple(saved for saved in self.listed if saved.path != path),
            released=_without(self.released, path),
            preserved=_without(self.preserved, path),
            depends_on=_with(self.depends_on, path, tuple(depends_on)),
        )
        if self.max_to_keep:
            return replace(after, listed=(*after.listed, Saved(path, time)))
        return after._remembering([path])

    def trimmed(self, exempt: Collection[str]) -> Retention:
        """Release or preserve the oldest until as many are listed as may be.

        Args:
            exempt: Whole paths, see `exempt_paths`.
        """
        after, counted = self, [saved for saved in self.listed if saved.path not in exempt]
        surplus = max(0, len(counted) - self.max_to_keep) if self.max_to_keep else 0
        for saved in counted[:surplus]:
            after = replace(after, listed=tuple(other for other in after.listed if other != saved))
            if after.next_keep_time is not None and saved.time > after.next_keep_time:
                after = after._preserving(saved)
            else:
                after = replace(after, released=(*_without(after.released, saved.path), saved.path))
        return after

    def due(self, exempt: Collection[str]) -> tuple[str, ...]:
        """The released checkpoints that nothing needs: their files may be deleted now."""
        staying = self.needed(exempt) | set(self.paths) | set(exempt)
        return tuple(path for path in self.released if path not in staying)

    def needed(self, exempt: Collection[str]) -> set[str]:
        """All checkpoints that a listed, preserved or exempt one needs."""
        found: set[str] = set()
        pending = [*self.paths, *self.preserved, *exempt]
        while pending:
            for path in self.depends_on.get(pending.pop(), ()):
                if path not in found:
                    found.add(path)
                    pending.append(path)
        return found

    def releasing(self, paths: Collection[str]) -> Retention:
        """These leave the list: others took their places."""
        return replace(
            self,
            listed=tuple(saved for saved in self.listed if saved.path not in paths),
            released=(*(one for one in self.released if one not in paths), *sorted(paths)),
        )

    def without(self, path: str) -> Retention:
        """The files of `path` are deleted."""
        return replace(
            self,
            listed=tuple(saved for saved in self.listed if saved.path != path),
            released=_without(self.released, path),
            preserved=_without(self.preserved, path),
            depends_on=_with(self.depends_on, path, ()),
        )

    def relisted(self, listed: Iterable[Saved]) -> Retention:
        """List these instead. Those that leave the list are not released: their files stay."""
        latest = {saved.path: saved for saved in listed}
        after = replace(
            self,
            listed=tuple(latest.values()) if self.max_to_keep else (),
            released=tuple(path for path in self.released if path not in latest),
            preserved=tuple(path for path in self.preserved if path not in latest),
        )
        return after._remembering([*self.paths, *latest])

    def _remembering(self, paths: Iterable[str]) -> Retention:
        """Remember those of `paths` whose files stay unlisted and need others."""
        staying = [path for path in paths if path in self.depends_on and path not in self.paths]
        return replace(self, preserved=tuple(dict.fromkeys([*self.preserved, *staying])))

    def _preserving(self, saved: Saved) -> Retention:
        assert self.keep_every is not None
        assert self.last_preserved is not None
        assert self.next_keep_time is not None
        period = self.keep_every.total_seconds()
        # Idle time is skipped as a whole, or one checkpoint would be preserved for each period of it.
        periods = max(1, math.floor((saved.time - self.last_preserved) / period))
        after = replace(self, last_preserved=self.last_preserved + periods * period)
        while after.next_keep_time is not None and after.next_keep_time <= saved.time:  # rounding
            after = replace(after, last_preserved=after.next_keep_time)
        return after._remembering([saved.path])


def exempt_paths(entries: Iterable[str], folder: str) -> frozenset[str]:
    """Return the whole paths that exempt entries mean.

    An absolute entry means exactly that path; any other is below the folder of the saver, as a
    bare name is. Another folder's `model.ckpt-30` is not ours.
    """
    return frozenset(filesystem.join(folder, entry) for entry in entries if entry)


def _without(paths: tuple[str, ...], path: str) -> tuple[str, ...]:
    return tuple(each for each in paths if each != path)


def _with(
    depends_on: Mapping[str, tuple[str, ...]], path: str, needs: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    others = {each: needed for each, needed in depends_on.items() if each != path}
    return others | {path: needs} if needs else others
