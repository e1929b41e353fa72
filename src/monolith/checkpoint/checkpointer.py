"""Checkpointer: saves all parts of a run at one moment, committed by one rename.

    checkpointer = Checkpointer(Saver("runs/1"), [tables, dense, position])
    pending = checkpointer.snapshot(step)    # training waits for this
    prefix = pending.write()                 # in any thread, while training continues
    pending.close(saved=True)
    ...
    checkpointer.restore(prefix)

The phases of a save, and what a kill leaves behind:

    1. snapshot   every part copies, or freezes, its state of this step. A kill: nothing is on disk.
    2. write      each part writes its files; the manifest is renamed last. A kill: files without a manifest,
                  which are no checkpoint and are deleted by the next save.
    3. list       the saver replaces the state file `checkpoint`. A kill before it: a whole checkpoint that is
                  not listed, deleted by the next save. After it the checkpoint counts.
    4. close      the parts forget the changes that are saved now.

The order is what makes it atomic: the manifest names and checksums every other file, so a checkpoint exists
    if and only if its manifest does; and a run restores only what the state file lists.

With `full_every` above 1, most checkpoints are incremental: they have only the rows that changed, and
restoring reads the last full one and every increment after it. With `full_every=3`:

    step       100 full <- 200 incremental <- 300 incremental      400 full <- 500 incremental ...
    chain      (100)       (100, 200)         (100, 200, 300)      (400)       (400, 500)

Each increment names the manifest before it and its checksum, so a chain with a missing or replaced member is
refused. A chain never has more than `full_every` members, and retention deletes none that a listed one needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from monolith import concurrency, filesystem
from monolith.checkpoint.folder.manifest import Link, Manifest, read_chain, write_manifest
from monolith.checkpoint.folder.saver import MANIFEST, Saver, checkpoint_exists
from monolith.checkpoint.folder.state_files import CkptInfo, SaveNames, write_ckpt_info
from monolith.checkpoint.part import (
    FEATURES,
    Changes,
    Part,
    PartSnapshot,
    RestoreOptions,
    RestoreReport,
    SavedPart,
)
from monolith.checkpoint.parts import FeaturesPart
from monolith.errors import ConfigError, RestoreError, SaveError


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that was restored, and what became of each part."""

    prefix: str
    step: int
    report: RestoreReport


class _Tip(NamedTuple):
    """The checkpoint that an increment would continue, and its chain, oldest first."""

    chain: tuple[str, ...]
    crc: int


OF_MODEL = (FEATURES, "tables", "dense")
"""The parts that a run takes over from another run's model."""


def _saved(part: Part, chain: Sequence[Link]) -> list[SavedPart]:
    return [
        SavedPart(link.prefix, link.manifest.parts[part.name])
        for link in chain
        if part.name in link.manifest.parts
    ]


class Checkpointer:
    """Saves and restores the parts of a run. Only the training thread calls `snapshot` and `restore`.

    Args:
        saver: Where checkpoints are, and how many stay.
        parts: In the order in which they are restored. Their names must differ.
        full_every: Write a full checkpoint every N saves; the rest are incremental. 1 writes only full ones.
        clock: Unix seconds.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, NativeTable, Saver, Segment, TableConfig, TablesPart
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)))
        >>> table.assign(torch.tensor([7]), torch.ones(1, 2))
        >>> parts = [TablesPart({"item": table}), DensePart(torch.nn.Linear(2, 1))]
        >>> checkpointer = Checkpointer(Saver("run"), parts)
        >>> checkpointer.save(100)
        'run/model.ckpt-100'
        >>> table.clear()
        >>> checkpointer.restore("run/model.ckpt-100").step, len(table)
        (100, 1)
    """

    def __init__(
        self,
        saver: Saver,
        parts: Sequence[Part],
        *,
        full_every: int = 1,
        clock: Callable[[], float] = concurrency.time,
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
        # Guards `_tip` and `_open`. Held while parts take their snapshots, which may wait for a lost
        # parameter server; so `_newest`, which the server's replacement asks for meanwhile, is read without
        # it.
        self._lock = concurrency.Lock()
        self._tip: _Tip | None = None
        self._open: PendingCheckpoint | None = None
        self._newest: str | None = None

    @property
    def saver(self) -> Saver:
        return self._saver

    @property
    def newest(self) -> str | None:
        """The checkpoint that was written or restored last. From any thread, also during `snapshot`."""
        return self._newest

    def snapshot(self, step: int) -> PendingCheckpoint:
        """Take a snapshot of every part, to be written by the checkpoint that is returned.

        Raises:
            SaveError: The checkpoint before has not been closed.
        """
        with self._lock:
            if self._open is not None:
                raise SaveError(f"cannot save step {step}: step {self._open.step} is still being written")
            tip = self._tip
            after = tip if tip is not None and len(tip.chain) < self._full_every else None
            taken: dict[str, PartSnapshot] = {}
            try:
                for part in self._parts:
                    taken[part.name] = part.snapshot(step)
            except BaseException:
                for one in taken.values():
                    one.close(saved=False)
                raise
            self._open = PendingCheckpoint(self, step, taken, after, self._clock())
            return self._open

    def save(self, step: int) -> str:
        """Save this step and wait until it is on disk; return the prefix."""
        pending = self.snapshot(step)
        saved = False
        try:
            prefix = pending.write()
            saved = True
            return prefix
        finally:
            pending.close(saved=saved)

    def fitting(self, prefix: str, options: RestoreOptions) -> RestoreOptions:
        """Return options that load the fitting parts of another model's checkpoint, and start the rest fresh.

        Only rows and weights are loaded: the position in the data, metrics and evaluations are those of the
        other run.
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
        """Restore a checkpoint, whatever parts it has.

        Raises:
            FileMissingError: There is no such checkpoint.
            RestoreError: It does not fit, or its chain is broken.
            CorruptFileError: A file is damaged; names the file and the offset.
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
            # The next save may continue this chain only if the run is exactly what the chain says, in the
            # same folder. A renamed table is not: increments name tables by their present names.
            unchanged = report.complete and not report.renamed
            if unchanged and filesystem.parent(prefix) == filesystem.parent(self._saver.names.prefix(0)):
                self._tip = _Tip(tuple(link.prefix for link in chain), last.crc)
        return Restored(prefix, step, report)

    def _written(self, pending: PendingCheckpoint, link: Link) -> None:
        chain = () if pending.after is None else pending.after.chain
        with self._lock:
            self._tip = _Tip((*chain, link.prefix), link.crc)
            self._newest = link.prefix

    def _closed(self, pending: PendingCheckpoint) -> None:
        with self._lock:
            if self._open is pending:
                self._open = None


class PendingCheckpoint:
    """The snapshots of all parts at one step. Written in any thread, again after a failure; closed once."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int,
        parts: dict[str, PartSnapshot],
        after: _Tip | None,
        saved_at: float,
    ) -> None:
        self.step = step
        self.after = after
        self._checkpointer = checkpointer
        self._parts = parts
        self._saved_at = saved_at

    @property
    def kind(self) -> Literal["full", "incremental"]:
        """Whether everything is written, or only the changes since the checkpoint before."""
        return "full" if self.after is None else "incremental"

    def write(self) -> str:
        """Write the checkpoint and list it; return its prefix.

        Raises:
            FilesystemError: It could not be written; the checkpoints before are as they were. May be
                called again.
        """
        links: list[Link] = []
        prefix = self._checkpointer.saver.save(
            self.step,
            lambda prefix: links.append(self._write_files(prefix)),
            depends_on=() if self.after is None else self.after.chain,
        )
        self._checkpointer._written(self, links[-1])
        return prefix

    def close(self, *, saved: bool) -> None:
        """Release the snapshots; the changes up to them count as saved, or as still changed.

        The files of a checkpoint that was not saved are deleted.
        """
        parts, self._parts = self._parts, {}  # copies of weights are freed now, not with this object
        for one in parts.values():
            one.close(saved=saved)
        if not saved:
            self._checkpointer.saver.discard(self.step)
        self._checkpointer._closed(self)

    def _write_files(self, prefix: str) -> Link:
        """Write all files, the manifest last."""
        full = self.after is None
        if checkpoint_exists(prefix):
            # An attempt that failed before it was listed. Its manifest goes first: a kill must not leave it
            # next to files of this attempt.
            filesystem.remove(prefix + MANIFEST)
        entries = {name: one.write(prefix, full=full) for name, one in self._parts.items()}
        if "tables" in entries:
            self._write_row_counts(prefix, entries["tables"])
        manifest = Manifest(
            step=self.step,
            kind=self.kind,
            parts=entries,
            saved_at=self._saved_at,
            after=None if self.after is None else filesystem.base_name(self.after.chain[-1]),
            after_crc=None if self.after is None else self.after.crc,
        )
        return Link(prefix, manifest, write_manifest(prefix, manifest))

    def _write_row_counts(self, prefix: str, entry: dict[str, Any]) -> None:
        """Write the number of rows by table and, in a full checkpoint, by slot."""
        info = CkptInfo(
            slot_counts={int(slot): many for slot, many in entry.get("slots", {}).items()},
            feature_counts={name: table["rows"] for name, table in entry["tables"].items()},
        )
        write_ckpt_info(filesystem.parent(prefix), self.step, info, SaveNames.number_of(prefix))
