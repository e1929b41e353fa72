"""Checkpointer: all parts of one moment, committed by one rename.

    checkpointer = Checkpointer(Saver("runs/1"), [tables, dense, position])
    moment = checkpointer.cut(step)      # training waits for this
    prefix = moment.write()              # in any thread, while training goes on
    moment.close(saved=True)
    ...
    checkpointer.restore(prefix)

With `full_every` above 1, most checkpoints are increments: they hold only the rows that
changed, and restoring reads the last full one and every increment after it. After
`full_every` checkpoints a full one begins a new chain, so no chain grows without end, and
the old one goes when nothing listed needs it any more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from monolith import filesystem
from monolith.checkpoint.features import FeaturesPart
from monolith.checkpoint.fitting import Changes
from monolith.checkpoint.folder.manifest import Link, Manifest, read_chain, write_manifest
from monolith.checkpoint.folder.saver import MANIFEST, Saver, checkpoint_exists
from monolith.checkpoint.folder.state_files import CkptInfo, write_ckpt_info
from monolith.checkpoint.part import FEATURES, Part, PartCut, RestoreOptions, SavedPart
from monolith.checkpoint.report import RestoreReport
from monolith.errors import ConfigError, RestoreError, SaveError


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint brought back."""

    prefix: str
    step: int
    report: RestoreReport


class _Tip(NamedTuple):
    """The checkpoint that an increment would continue, and its chain, oldest first."""

    chain: tuple[str, ...]
    crc: int


OF_MODEL = (FEATURES, "tables", "dense")
"""The parts that a run takes over from another one's model."""


def _saved(part: Part, chain: Sequence[Link]) -> list[SavedPart]:
    return [
        SavedPart(link.prefix, link.manifest.parts[part.name])
        for link in chain
        if part.name in link.manifest.parts
    ]


class Checkpointer:
    """Saves and restores the parts of a run. `cut` and `restore` belong to the training thread.

    Args:
        saver: Where checkpoints are kept and how many.
        parts: In the order in which they are restored. Their names must differ.
        full_every: Every so many checkpoints a full one; 1 writes no increments.
        clock: Unix seconds.
    """

    def __init__(
        self,
        saver: Saver,
        parts: Sequence[Part],
        *,
        full_every: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if full_every < 1:
            raise ConfigError(f"full_every must be at least 1, got {full_every}")
        names = [part.name for part in parts]
        if twice := [name for name, many in Counter(names).items() if many > 1]:
            raise ConfigError(f"two parts of a checkpoint are called {twice[0]!r}")
        self._saver = saver
        self._parts = list(parts)
        self._full_every = full_every
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._tip: _Tip | None = None
        self._open: Moment | None = None
        self._newest: str | None = None

    @property
    def saver(self) -> Saver:
        return self._saver

    @property
    def newest(self) -> str | None:
        """The checkpoint that was written or restored last. From any thread, also while a moment is cut: that
        may wait for a lost server, and who brings the server back asks for this."""
        return self._newest

    def cut(self, step: int) -> Moment:
        """Hold this moment fast, to be written.

        Raises:
            SaveError: The moment before has not been closed.
        """
        with self._lock:
            if self._open is not None:
                raise SaveError(f"cannot save step {step}: step {self._open.step} is still being written")
            tip = self._tip
            after = tip if tip is not None and len(tip.chain) < self._full_every else None
            cuts: dict[str, PartCut] = {}
            try:
                for part in self._parts:
                    cuts[part.name] = part.cut(step)
            except BaseException:
                for cut in cuts.values():
                    cut.close(saved=False)
                raise
            self._open = Moment(self, step, cuts, after, self._clock())
            return self._open

    def save(self, step: int) -> str:
        """Save this moment and wait for it; return the prefix."""
        moment = self.cut(step)
        saved = False
        try:
            prefix = moment.write()
            saved = True
            return prefix
        finally:
            moment.close(saved=saved)

    def fitting(self, prefix: str, options: RestoreOptions) -> RestoreOptions:
        """Return options that load what fits of another model's checkpoint, and start the rest fresh.

        Only rows and weights: the place in the data, metrics and evaluations are those of the other run.
        """
        chain = read_chain(prefix)
        changes = Changes()
        for part in self._parts:
            if isinstance(part, FeaturesPart):
                changes = part.changes(_saved(part, chain))
        state: Literal["reset", "auto"] = "reset" if options.optimizer_state == "reset" else "auto"
        custom = replace(options.custom, auto_alias=False)
        return replace(options, changes=changes, strict=False, optimizer_state=state, custom=custom)

    def restore(self, prefix: str, options: RestoreOptions | None = None) -> Restored:
        """Go back to a checkpoint, whatever parts it was made of.

        Raises:
            FileMissingError: There is no such checkpoint.
            RestoreError: It does not fit, or its chain is broken.
            CorruptFileError: A file is damaged; says which and where.
        """
        options = RestoreOptions() if options is None else options
        chain = read_chain(prefix)
        with self._lock:
            if self._open is not None:
                raise RestoreError(f"cannot restore {prefix}: step {self._open.step} is still being written")
            self._tip = None
        known = {part.name for part in self._parts}
        reports = []
        for part in self._parts:
            if options.changes is None or part.name in OF_MODEL:
                reports.append(part.restore(_saved(part, chain), options))
        last = chain[-1]
        unused = () if options.changes is not None else tuple(sorted(last.manifest.parts.keys() - known))
        report = RestoreReport(unused=unused).merge(*reports)
        step = last.manifest.step if report.global_step is None else report.global_step
        with self._lock:
            self._newest = prefix
        # An increment speaks of tables by their present names, so one that was renamed starts a new chain.
        as_it_was = report.complete and not report.renamed
        if as_it_was and filesystem.parent(prefix) == filesystem.parent(self._saver.names.prefix(0)):
            with self._lock:
                self._tip = _Tip(tuple(link.prefix for link in chain), last.crc)
        return Restored(prefix, step, report)

    def _written(self, moment: Moment, link: Link) -> None:
        chain = () if moment.after is None else moment.after.chain
        with self._lock:
            self._tip = _Tip((*chain, link.prefix), link.crc)
            self._newest = link.prefix

    def _closed(self, moment: Moment) -> None:
        with self._lock:
            if self._open is moment:
                self._open = None


class Moment:
    """One moment of a run. Written in any thread, as often as it takes; closed once."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int,
        cuts: dict[str, PartCut],
        after: _Tip | None,
        saved_at: float,
    ) -> None:
        self.step = step
        self.after = after
        self._checkpointer = checkpointer
        self._cuts = cuts
        self._saved_at = saved_at

    @property
    def kind(self) -> Literal["full", "incremental"]:
        """What is written: all, or only what changed since the checkpoint before."""
        return "full" if self.after is None else "incremental"

    def write(self) -> str:
        """Write the checkpoint and let the saver list it; return its prefix.

        Raises:
            FilesystemError: It could not be written; the checkpoints before are as they were. May be
                called again.
        """
        saver = self._checkpointer.saver
        prefix = saver.names.prefix(self.step)
        if self.after is not None and prefix in self.after.chain:
            return prefix  # saved already, and no step was taken since
        links: list[Link] = []
        saver.save(
            self.step,
            lambda prefix: links.append(self._write_files(prefix)),
            depends_on=() if self.after is None else self.after.chain,
        )
        self._checkpointer._written(self, links[-1])
        return prefix

    def close(self, *, saved: bool) -> None:
        """Let go of the moment; what changed up to it counts as saved, or as changed still.

        Half of a checkpoint that was not saved is deleted.
        """
        for cut in self._cuts.values():
            cut.close(saved=saved)
        if not saved:
            self._checkpointer.saver.discard(self.step)
        self._checkpointer._closed(self)

    def _write_files(self, prefix: str) -> Link:
        full = self.after is None
        if checkpoint_exists(prefix):  # of another history: half of it must not look like a whole one
            filesystem.remove(prefix + MANIFEST)
        parts = {name: cut.write(prefix, full=full) for name, cut in self._cuts.items()}
        manifest = Manifest(
            step=self.step,
            kind=self.kind,
            parts=parts,
            saved_at=self._saved_at,
            after=None if self.after is None else filesystem.base_name(self.after.chain[-1]),
            after_crc=None if self.after is None else self.after.crc,
        )
        self._write_info(prefix, manifest)
        return Link(prefix, manifest, write_manifest(prefix, manifest))

    def _write_info(self, prefix: str, manifest: Manifest) -> None:
        """Write how many rows there are by table and, in a full checkpoint, by slot."""
        entry = manifest.parts.get("tables")
        if entry is not None:
            write_ckpt_info(
                filesystem.parent(prefix),
                self.step,
                CkptInfo(
                    slot_counts={int(slot): many for slot, many in entry.get("slots", {}).items()},
                    feature_counts={name: table["rows"] for name, table in entry["tables"].items()},
                ),
            )
