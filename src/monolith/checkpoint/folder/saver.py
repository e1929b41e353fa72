"""The saver: commits a checkpoint, lists it, and deletes checkpoints that retention releases.

One save, in this order:

    1. journal     names what is about to be written: after a kill the next saver deletes it
    2. data        all files of the checkpoint, its manifest last
    3. journal     names what is going to be deleted
    4. state       the file `checkpoint` is replaced atomically: from here on the checkpoint counts
    5. deletions   the manifest of each checkpoint first: without it, the rest is no checkpoint
    6. journal     names what could not be deleted yet

A checkpoint is never written over. A run that is rolled back, or has only just restored a checkpoint, may
save a step again: the new checkpoint is then called `model.ckpt.2-300`. Once it is listed, the one before is
released like any other, and its files stay as long as a listed, preserved or exempt one needs them.

Why this order: a kill between any two steps leaves a state file that lists only complete checkpoints (2
    before 4), no file that no file names (1 before 2), and no deletion that is forgotten (3 before 4). Files
    that neither the state file nor the journal names are never touched: a preserved checkpoint is in neither.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from monolith import concurrency, filesystem
from monolith.checkpoint.folder.retention import Retention, Saved, exempt_paths
from monolith.checkpoint.folder.state_files import (
    BEST_FILE,
    CHECKPOINT_FILE,
    MONOLITH_CHECKPOINT_FILE,
    CheckpointState,
    Journal,
    SaveNames,
    Sleep,
    TableKind,
    check_latest_filename,
    journal_path,
    load_monolith_checkpoint,
    read_best,
    read_checkpoint_state,
    read_journal,
    update_monolith_checkpoint,
    write_checkpoint_state,
    write_journal,
)
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FileMissingError,
    FilesystemError,
    MonolithError,
    RestoreError,
)
from monolith.filesystem.backends import LocalBackend, locate

MANIFEST = ".manifest"
"""Suffix of the file that is written last."""

_log = logging.getLogger(__name__)


def checkpoint_exists(prefix: str) -> bool:
    """Whether there is a complete checkpoint at a prefix: one with a manifest."""
    return filesystem.exists(prefix + MANIFEST)


def require_checkpoint(prefix: str | None) -> str:
    """Return `prefix` if there is a checkpoint to restore.

    Raises:
        RestoreError: There is none.
    """
    if prefix is None:
        raise RestoreError("Can't load save_path when it is None.")
    if not checkpoint_exists(prefix):
        raise RestoreError(
            f"The passed save_path is not a valid checkpoint: {prefix}. There is no {prefix}{MANIFEST}: "
            "it was never completed, was deleted, or is in another folder."
        )
    return prefix


def is_in_folder(path: str, folder: str) -> bool:
    """Whether `path` is directly in `folder`, through whatever links and spellings."""
    if _protocol(path) != _protocol(folder):
        return False  # and its filesystem may not even be installed here
    backend, parent = locate(filesystem.parent(path))
    other_backend, inner = locate(folder)
    return backend.is_same(other_backend) and backend.identity(parent) == other_backend.identity(inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointNaming:
    """The names of the checkpoints of a saver and of its state file."""

    basename: str = "model.ckpt"
    """Checkpoints are named `<basename>-<step>`, and `<basename>.2-<step>` if the first one of that step
    exists."""
    latest_filename: str = CHECKPOINT_FILE
    """The state file next to them. Only the saver of the file `checkpoint` is responsible for the folder: it
    writes `monolith_checkpoint`, and deletes files that other programs wrote for its steps."""
    relative_paths: bool = True
    """Whether the folder may be moved or copied."""
    pad_step_number: bool = False
    """Whether steps are written with at least 8 digits."""


DEFAULT_NAMING = CheckpointNaming()


class Saver:
    """Saves the checkpoints of one folder and deletes old ones.

    Writes no file and deletes none before `save` or `recover`. One thread at a time; one process at a time,
    see `ModelDirLock`.

    Args:
        model_dir: Made if it is missing.
        naming: How files are named.
        max_to_keep: How many to keep in addition to the exempt; 0 or None keeps all and lists the newest.
        keep_every: Of those that leave the list, one per period is preserved.
        exempt: Never deleted, like those that the file `monolith_checkpoint` names, and the best one. An
            absolute path, or a name in `model_dir`.
        table_kind: Written to `monolith_checkpoint` if it has none.
        clock: Unix seconds.

    Raises:
        ConfigError: A name or a number makes no sense.
        CorruptFileError: The state file or the journal is damaged.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, Saver
        >>> saver = Saver("run", max_to_keep=2)
        >>> checkpointer = Checkpointer(saver, [DensePart(torch.nn.Linear(2, 1))])
        >>> for step in (100, 200, 300):
        ...     prefix = checkpointer.save(step)
        >>> saver.last_checkpoints
        ['run/model.ckpt-200', 'run/model.ckpt-300']
    """

    def __init__(
        self,
        model_dir: str,
        *,
        naming: CheckpointNaming = DEFAULT_NAMING,
        max_to_keep: int | None = 10,
        keep_every: timedelta | None = timedelta(hours=24),
        exempt: Iterable[str] = (),
        clock: Callable[[], float] = concurrency.time,
        sleep: Sleep = concurrency.sleep,
        table_kind: TableKind = TableKind.MULTI_CUCKOO_HASH_MAP,
    ) -> None:
        basename, latest_filename = naming.basename, naming.latest_filename
        if not basename or filesystem.base_name(basename) != basename:
            raise ConfigError(f"the basename of checkpoints must be a plain name, got {basename!r}")
        check_latest_filename(latest_filename, filesystem.join(model_dir, basename))
        self._model_dir = model_dir
        self._latest_filename = latest_filename
        self._owns_folder = latest_filename == CHECKPOINT_FILE
        self._relative_paths = naming.relative_paths
        self._exempt = tuple(exempt)
        self._clock = clock
        self._sleep = sleep
        self._table_kind = table_kind
        self._names = SaveNames(
            filesystem.join(model_dir, basename),
            latest_filename=latest_filename,
            pad_step_number=naming.pad_step_number,
        )
        state = self._read_state()
        journal = read_journal(model_dir, latest_filename)
        self._journal: Journal | None = journal  # as it is on disk, if we know
        resumed = None if state is None else state.last_preserved_timestamp
        retention = Retention(
            max_to_keep=max_to_keep,
            keep_every=keep_every,
            last_preserved=clock() if resumed is None and keep_every is not None else resumed,
            released=journal.released,
            preserved=journal.preserved,
            depends_on=journal.depends_on,
        )
        # The checkpoints of the state file stay, whether or not this saver is told to continue that list.
        self._retention = retention.relisted(self._listed(state)).relisted([])

    @property
    def model_dir(self) -> str:
        """The folder of the checkpoints."""
        return self._model_dir

    @property
    def names(self) -> SaveNames:
        """How the checkpoints are named."""
        return self._names

    @property
    def last_checkpoints(self) -> list[str]:
        """The listed checkpoints, oldest first; empty if all are kept."""
        return list(self._retention.paths)

    def set_last_checkpoints_with_time(self, checkpoints: list[tuple[str, float]]) -> None:
        """Continue with this list of paths and Unix seconds, oldest first, instead of the saver's own."""
        if not isinstance(checkpoints, list):
            raise ConfigError(f"the last checkpoints must be a list, got {type(checkpoints).__name__}")
        listed = [Saved(self._spelled(path), saved_at) for path, saved_at in checkpoints]
        self._retention = self._retention.relisted(listed)

    def recover(
        self,
        paths: Sequence[str] | None = None,
        *,
        needs: Callable[[str], Sequence[str]] = lambda _: (),
    ) -> None:
        """Continue after an earlier saver of this folder, and finish its deletions.

        Temporary files that it left are deleted too: of state files, and of listed checkpoints, which are
        complete. Of an incomplete one, a server may still be writing its shard.

        Checkpoints that are gone are skipped. The time of a save is that of the state file; if it has none,
        the time at which the manifest was changed.

        Args:
            paths: The checkpoints to continue with, oldest first, instead of those of the state file.
            needs: Returns the prefixes that a checkpoint needs, from its own files: the journal has them too,
                but an operator may have moved it away.
        """
        state = self._read_state()
        known = self._listed(state)
        if paths is not None:
            times = {saved.path: saved.time for saved in known}
            known = [
                Saved(path, times[path] if path in times else self._changed_at(path))
                for path in map(self._spelled, paths)
            ]
        self._retention = self._retention.relisted(saved for saved in known if checkpoint_exists(saved.path))
        for path in self._retention.preserved:
            if not checkpoint_exists(path):
                self._retention = self._retention.without(path)
        exempt = self._read_exempt()
        for path in (*self._retention.paths, *self._retention.preserved, *(exempt or ())):
            if self._is_ours(path) and checkpoint_exists(path):
                self._retention = self._retention.needing(path, [self._spelled(one) for one in needs(path)])
        if exempt is not None:
            self._delete(self._due(exempt))
        self._remove_unfinished()
        self._write_journal(self._retention)

    def save(self, step: int, write: Callable[[str], None], *, depends_on: Sequence[str] = ()) -> str:
        """Save a checkpoint, and return its prefix.

        Args:
            write: Receives the prefix, writes all files of the checkpoint, its manifest last, and returns
                when they are complete. Its exceptions are raised here; the checkpoints before are then listed
                as they were.
            depends_on: Prefixes of the checkpoints that this one needs.

        Raises:
            FilesystemError: The folder cannot be written to; or a checkpoint of `depends_on` is gone;
                or `write` left no manifest.
        """
        if isinstance(step, bool) or step < 0:
            raise ConfigError(f"cannot save a checkpoint of step {step}: steps count from 0")
        needs = tuple(map(self._spelled, depends_on))
        filesystem.make_dirs(self._model_dir)
        exempt = self._read_exempt()
        due = () if exempt is None else self._due(exempt | set(needs))
        prefix = self._free_name(step, due)
        # Deletions that failed before may be what the disk is full of.
        self._delete(path for path in due if path != prefix)
        self._check_needs(prefix, needs)
        # Steps 1 and 2 (see above): journal, then data.
        self._retention = before = self._retention.begun(prefix, needs)
        self._write_journal(before)
        write(prefix)
        if not checkpoint_exists(prefix):
            raise FileMissingError(
                f"cannot list checkpoint {prefix}: it was written, and there is no {prefix}{MANIFEST}. "
                "The writer of a checkpoint must write its manifest last."
            )

        # Steps 3 and 4: journal of the deletions, then the state file.
        now = self._clock()
        exempt = self._read_exempt()  # again: writing takes long, and an operator may have edited it
        after = before.recorded(prefix, now, needs)
        if exempt is not None:
            replaced = [one for one in after.paths if one != prefix and self._names.is_of(one, step)]
            after = after.releasing(set(replaced) - exempt).trimmed(exempt)
        # A kill before the state file is replaced: the journal must still call the new files incomplete.
        unlisted = replace(
            after,
            released=(*after.released, prefix),
            preserved=tuple(dict.fromkeys(before.preserved + after.preserved)),
        )
        self._write_journal(unlisted)
        self._write_state(after, Saved(prefix, now))
        self._retention = after
        self._note_save(now)
        # Steps 5 and 6: deletions, then the journal of those that failed.
        if exempt is not None:
            self._delete(after.due(exempt))
        try:
            self._write_journal(self._retention)
        except FilesystemError as cause:
            _log.error("checkpoint %s is saved, but the journal of deletions is not: %s", prefix, cause)
        return prefix

    def discard(self, step: int) -> None:
        """Delete the files of a save that failed and is not retried: they take space on a disk that may be
        full.

        Only files that the journal calls incomplete and no state file lists are deleted. A server that is
        still writing its shard leaves files again; the next save deletes them. Never raises.
        """
        try:
            exempt = self._read_exempt()
            for prefix in () if exempt is None else self._due(exempt):
                if self._names.is_of(prefix, step) and self._delete_files(prefix):
                    _log.info("deleted the unfinished files of checkpoint %s", prefix)
        except MonolithError as cause:
            _log.warning("the unfinished files of step %d are not deleted yet: %s", step, cause)

    def find(self, step: int) -> str | None:
        """Return the newest checkpoint of a step: the one listed last; if none is listed, any that exists;
        None if there is none."""
        listed = [one.path for one in self._listed(self._read_state())]
        for path in reversed(listed):
            if self._names.is_of(path, step) and checkpoint_exists(path):
                return path
        files = filesystem.list_files(self._model_dir) if filesystem.is_folder(self._model_dir) else []
        names = [filesystem.base_name(path) for path in files if path.endswith(MANIFEST)]
        paths = [self._in_folder(name.removesuffix(MANIFEST)) for name in names]
        found = [path for path in paths if self._names.is_of(path, step)]
        return max(found, key=SaveNames.number_of, default=None)

    # Reading state

    def _read_state(self) -> CheckpointState | None:
        return read_checkpoint_state(self._model_dir, self._latest_filename, sleep=self._sleep)

    def _listed(self, state: CheckpointState | None) -> list[Saved]:
        if state is None:
            return []
        paths = [self._spelled(path) for path in state.all_model_checkpoint_paths]
        times = state.all_model_checkpoint_timestamps or [self._changed_at(path) for path in paths]
        return [Saved(path, saved_at) for path, saved_at in zip(paths, times, strict=True)]

    def _read_exempt(self) -> frozenset[str] | None:
        """Return what must not be deleted; None if that cannot be read, so that nothing may be deleted."""
        try:
            state = load_monolith_checkpoint(self._model_dir)
            best = read_best(self._model_dir)
        except (CorruptFileError, FilesystemError) as cause:
            _log.error(
                "%s. It may name checkpoints to keep, so none is deleted and it is left as it is "
                "until it can be read again",
                cause,
            )
            return None
        entries = self._exempt + (() if state is None else state.exempt_model_checkpoint_paths)
        entries += () if best is None else (best.name,)
        return frozenset(map(self._spelled, exempt_paths(entries, self._model_dir)))

    def _free_name(self, step: int, due: Collection[str]) -> str:
        """Return a prefix for a step at which there is no checkpoint, or one of `due`: a save that failed
        before it was listed is continued with the files it has."""
        numbers = itertools.count(1)
        names = (self._names.prefix(step, number) for number in numbers)
        prefix = next(name for name in names if name in due or not checkpoint_exists(name))
        if prefix != self._names.prefix(step):
            _log.info("step %d was saved before, and is saved again as %s", step, prefix)
        return prefix

    def _check_needs(self, prefix: str, needs: Sequence[str]) -> None:
        if prefix in needs:
            raise ConfigError(f"cannot save checkpoint {prefix}: it cannot depend on itself")
        for path in needs:
            if not checkpoint_exists(path):
                raise FileMissingError(
                    f"cannot save checkpoint {prefix}: it needs {path}, which is gone. "
                    "Save a full one instead."
                )

    def _changed_at(self, path: str) -> float:
        backend, inner = locate(path + MANIFEST)
        if isinstance(backend, LocalBackend):
            try:
                return Path(inner).stat().st_mtime
            except OSError:
                return self._clock()  # it is gone, and about to be skipped
        return self._clock()

    def _spelled(self, path: str) -> str:
        """Return the path in our spelling, if it is in our folder: links allow several spellings.

        A bare name is in our folder. Any other path is complete, though it may be relative to the process's
        working directory, as the folder itself may be: prepending the folder would be wrong.
        """
        whole = path if filesystem.parent(path) else self._in_folder(path)
        return self._in_folder(filesystem.base_name(whole)) if self._is_ours(whole) else whole

    def _is_ours(self, path: str) -> bool:
        return is_in_folder(path, self._model_dir)

    def _in_folder(self, name: str) -> str:
        return filesystem.join(self._model_dir, name)

    # Writing state

    def _write_journal(self, retention: Retention) -> None:
        journal = Journal(retention.released, retention.preserved, retention.depends_on)
        if journal != self._journal:
            self._journal = None
            write_journal(self._model_dir, journal, self._latest_filename)
            self._journal = journal

    def _write_state(self, retention: Retention, latest: Saved) -> None:
        listed = retention.listed or (latest,)
        state = CheckpointState(
            latest.path,
            tuple(saved.path for saved in listed),
            tuple(saved.time for saved in listed),
            retention.last_preserved,
        )
        write_checkpoint_state(
            self._model_dir, state, self._latest_filename, relative_paths=self._relative_paths
        )

    def _note_save(self, now: float) -> None:
        """Write the time of the save to `monolith_checkpoint`. The checkpoint counts already, even if this
        fails."""
        if not self._owns_folder:
            return
        try:
            update_monolith_checkpoint(self._model_dir, table_kind=self._table_kind, saved_at=now)
        except (CorruptFileError, FilesystemError) as cause:
            _log.error("cannot update monolith_checkpoint: %s", cause)

    # Deleting

    def _due(self, exempt: frozenset[str]) -> tuple[str, ...]:
        """Return what may be deleted now, without what the state file lists: a save may have failed after
        replacing it."""
        if not self._retention.due(exempt):
            return ()
        state = self._read_state()
        listed = frozenset() if state is None else frozenset(saved.path for saved in self._listed(state))
        return self._retention.due(exempt | listed)

    def _delete(self, paths: Iterable[str]) -> None:
        """Delete checkpoints. One that cannot be deleted stays in the journal, to be retried."""
        for path in paths:
            if not self._is_ours(path):
                _log.info("checkpoint %s is no longer needed; it is left in its other folder", path)
            else:
                try:
                    if not self._delete_files(path):
                        _log.warning("the files of checkpoint %s are gone already", path)
                except FilesystemError as cause:
                    _log.error("checkpoint %s is not deleted yet: %s", path, cause)
                    continue
            self._retention = self._retention.without(path)

    def _delete_files(self, prefix: str) -> bool:
        """Delete every file and folder of a step; return whether there were any."""
        name = filesystem.base_name(prefix)
        pattern = rf"{re.escape(name)}(\..*|_item_pool_.*)"
        if self._owns_folder and (numbered := re.search(r"-0*([0-9]+)$", name)):
            number = SaveNames.number_of(prefix)
            others = r"(ckpt\.info|input_worker_.*\.ckpt)" if number == 1 else rf"ckpt\.info\.{number}"
            pattern += rf"|{others}-0*{numbered[1]}(\..*|-tmp-.*)?"
        belongs = re.compile(pattern, re.DOTALL)
        files = [path for path in filesystem.list_files(self._model_dir) if _matches(belongs, path)]
        folders = [path for path in filesystem.list_folders(self._model_dir) if _matches(belongs, path)]
        for path in sorted(files, key=lambda path: path != prefix + MANIFEST):
            filesystem.remove(path)
        for path in folders:
            filesystem.remove_tree(path)
        return bool(files or folders)

    def _remove_unfinished(self) -> None:
        """Remove temporary files that a kill left."""
        own = [self._latest_filename, filesystem.base_name(journal_path("", self._latest_filename))]
        if self._owns_folder:
            own += [MONOLITH_CHECKPOINT_FILE, BEST_FILE]
        patterns = [re.escape(name) for name in own]
        folders = []
        for path in filter(self._is_ours, self._retention.paths):
            name = filesystem.base_name(path)
            patterns.append(rf"{re.escape(name)}\..*")
            if self._owns_folder:
                patterns.append(rf"ckpt\.info(\.[0-9]+)?-0*{SaveNames.step_of(path)}")
            folders.append(SaveNames.assets(path))
        belongs = re.compile(rf"({'|'.join(patterns)})-tmp-.*", re.DOTALL)
        try:
            if not filesystem.is_folder(self._model_dir):
                return
            found = [path for path in filesystem.list_files(self._model_dir) if _matches(belongs, path)]
            for folder in filter(filesystem.is_folder, folders):
                found += filesystem.list_files(folder, recursive=True)
            for path in filter(filesystem.is_temporary, found):
                filesystem.remove(path)
        except FilesystemError as cause:
            _log.warning("cannot delete unfinished checkpoints: %s", cause)


def _protocol(path: str) -> str:
    """Return the protocol of a URL; empty for a local path."""
    if not filesystem.is_absolute(path) or path.startswith("/"):
        return ""
    protocol = path.partition(":")[0]
    return "" if protocol in {"file", "local"} else protocol


def _matches(pattern: re.Pattern[str], path: str) -> bool:
    return pattern.fullmatch(filesystem.base_name(path)) is not None
