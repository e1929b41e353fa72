"""The saver: commits a checkpoint, lists it, and deletes those that have had their time.

One save, in this order:

    journal     what is about to be written, so that a kill leaves nothing that nobody knows of
    data        all files of the checkpoint, its manifest last
    journal     what is going to be deleted
    state       the file `checkpoint`, replaced in one step: from here on the checkpoint counts
    deletions   the manifest of each first, so that there is no half of one
    journal     what could not be deleted yet

Killed between any two of these, the state file lists whole checkpoints, and the next saver
finds in the journal what is left to do. What is in neither is never touched: a checkpoint
that is kept for good is listed nowhere.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from monolith import filesystem
from monolith.checkpoint.folder.best import read_best
from monolith.checkpoint.folder.retention import Retention, Saved, exempt_paths
from monolith.checkpoint.folder.state_files import (
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
"""Comes after the prefix of a checkpoint in the name of the file that is written last."""

_log = logging.getLogger(__name__)


def checkpoint_exists(prefix: str) -> bool:
    """Whether there is a whole checkpoint at a prefix: one with a manifest."""
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
            "it was never completed, was deleted, or is somewhere else."
        )
    return prefix


def is_in_folder(path: str, folder: str) -> bool:
    """Whether `path` lies directly in `folder`, by whatever links and spellings."""
    if _protocol(path) != _protocol(folder):
        return False  # and its filesystem may not even be installed here
    backend, parent = locate(filesystem.parent(path))
    other_backend, inner = locate(folder)
    return backend.is_same(other_backend) and backend.identity(parent) == other_backend.identity(inner)


class Saver:
    """Saves the checkpoints of one folder and keeps as many as it should.

    Makes no file and deletes none before `save` or `recover`. One thread at a time; one
    process at a time, see `ModelDirLock`.

    Args:
        model_dir: Made if it is missing.
        basename: Checkpoints are named `<basename>-<step>`.
        latest_filename: The state file beside them. Only the saver of `checkpoint` speaks for the folder:
            it notes its saves in `monolith_checkpoint`, and deletes what others wrote for its steps.
        max_to_keep: How many to keep besides the exempt; 0 or None keeps all and lists the newest.
        keep_every: Of those that leave, one per period is kept for good.
        relative_paths: Whether the folder may be moved or copied.
        pad_step_number: Whether steps are written with 8 digits at least.
        exempt: Never deleted, as are those the file `monolith_checkpoint` names and the best one. An
            absolute path, or a name in `model_dir`.
        table_kind: Noted in `monolith_checkpoint` where it has none.
        clock: Unix seconds.

    Raises:
        ConfigError: A name or a number makes no sense.
        CorruptFileError: The state file or the journal is damaged.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        basename: str = "model.ckpt",
        latest_filename: str = CHECKPOINT_FILE,
        max_to_keep: int | None = 10,
        keep_every: timedelta | None = timedelta(hours=24),
        relative_paths: bool = True,
        pad_step_number: bool = False,
        exempt: Iterable[str] = (),
        clock: Callable[[], float] = time.time,
        sleep: Sleep = time.sleep,
        table_kind: TableKind = TableKind.MULTI_CUCKOO_HASH_MAP,
    ) -> None:
        if not basename or filesystem.base_name(basename) != basename:
            raise ConfigError(f"the basename of checkpoints must be a plain name, got {basename!r}")
        check_latest_filename(latest_filename, filesystem.join(model_dir, basename))
        self._model_dir = model_dir
        self._latest_filename = latest_filename
        self._speaks_for_folder = latest_filename == CHECKPOINT_FILE
        self._relative_paths = relative_paths
        self._exempt = tuple(exempt)
        self._clock = clock
        self._sleep = sleep
        self._table_kind = table_kind
        self._names = SaveNames(
            filesystem.join(model_dir, basename),
            latest_filename=latest_filename,
            pad_step_number=pad_step_number,
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
        # What the state file lists stays, whether or not this saver is told to go on with that list.
        self._retention = retention.relisted(self._listed(state)).relisted([])

    @property
    def model_dir(self) -> str:
        """Where the checkpoints are."""
        return self._model_dir

    @property
    def names(self) -> SaveNames:
        """How the checkpoints are named."""
        return self._names

    @property
    def last_checkpoints(self) -> list[str]:
        """Those listed, oldest first; empty where all are kept."""
        return list(self._retention.paths)

    def set_last_checkpoints_with_time(self, checkpoints: list[tuple[str, float]]) -> None:
        """Go on with this list of paths and Unix seconds, oldest first, instead of one's own."""
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
        """Go on where an earlier saver of this folder ended, and finish the deletions it had begun.

        Files that it left without their names go too: state files, and those of listed checkpoints,
        which are complete. Of one that is not, a server may still be writing its share.

        Checkpoints that are gone are passed over. When one was saved is what the state file
        says; of those it says nothing about, when their manifest was changed.

        Args:
            paths: The checkpoints to go on with, oldest first, instead of those of the state file.
            needs: Returns the prefixes that one builds upon, as far as its own files tell: the journal
                knows, but somebody may have moved it away.
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
            write: Given the prefix, writes all files of the checkpoint, its manifest last, and
                returns when they are complete. What it raises is raised here; the checkpoints
                before are then listed as they were.
            depends_on: Prefixes of the checkpoints that this one is nothing without.

        Raises:
            FilesystemError: The folder cannot be written to; or a checkpoint of `depends_on` is gone;
                or `write` left no manifest.
        """
        if isinstance(step, bool) or step < 0:
            raise ConfigError(f"cannot save a checkpoint of step {step}: steps count from 0")
        prefix = self._names.prefix(step)
        needs = tuple(map(self._spelled, depends_on))
        filesystem.make_dirs(self._model_dir)
        exempt = self._read_exempt()
        if exempt is not None:  # what could not be deleted before may be what fills the disk
            self._delete(self._due(exempt | {prefix, *needs}))
        self._check_needs(prefix, needs)
        is_new = not checkpoint_exists(prefix)
        if not is_new and self._retention.max_to_keep and prefix not in self._retention.paths:
            _log.warning(
                "checkpoint %s, which this run went back from, is replaced by the step saved now", prefix
            )
        self._retention = before = self._retention.begun(prefix, needs, is_new=is_new)
        self._write_journal(before)

        write(prefix)
        if not checkpoint_exists(prefix):
            raise FileMissingError(
                f"cannot list checkpoint {prefix}: it was written, and there is no {prefix}{MANIFEST}. "
                "The writer of a checkpoint must write its manifest last."
            )

        now = self._clock()
        exempt = self._read_exempt()  # again: writing takes long, and people may have edited it
        after = before.recorded(prefix, now, needs)
        if exempt is not None:
            after = after.trimmed(exempt)
        # Until the state file lists it, it is what it was before.
        unlisted = replace(
            after,
            released=(*after.released, prefix) if prefix in before.released else after.released,
            preserved=tuple(dict.fromkeys(before.preserved + after.preserved)),
        )
        self._write_journal(unlisted)
        self._write_state(after, Saved(prefix, now))
        self._retention = after
        self._note_save(now)
        if exempt is not None:
            self._delete(after.due(exempt))
        try:
            self._write_journal(self._retention)
        except FilesystemError as cause:
            _log.error("checkpoint %s is saved, but not what is left to delete: %s", prefix, cause)
        return prefix

    def discard(self, step: int) -> None:
        """Delete the files of a save that failed and is not tried again: on a full disk they are in the way.

        Only what the journal calls worthless and no state file lists is deleted. A server that is still
        writing its shard leaves files once more; the next save deletes them. Never raises.
        """
        prefix = self._names.prefix(step)
        try:
            exempt = self._read_exempt()
            if exempt is not None and prefix in self._due(exempt) and self._delete_files(prefix):
                _log.info("deleted the unfinished files of checkpoint %s", prefix)
        except MonolithError as cause:
            _log.warning("the unfinished files of checkpoint %s are not deleted yet: %s", prefix, cause)

    # What others wrote

    def _read_state(self) -> CheckpointState | None:
        return read_checkpoint_state(self._model_dir, self._latest_filename, sleep=self._sleep)

    def _listed(self, state: CheckpointState | None) -> list[Saved]:
        if state is None:
            return []
        paths = [self._spelled(path) for path in state.all_model_checkpoint_paths]
        times = state.all_model_checkpoint_timestamps or [self._changed_at(path) for path in paths]
        return [Saved(path, saved_at) for path, saved_at in zip(paths, times, strict=True)]

    def _read_exempt(self) -> frozenset[str] | None:
        """What may not be deleted now; None if nobody can tell, and so nothing may."""
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

    def _check_needs(self, prefix: str, needs: Sequence[str]) -> None:
        if prefix in needs:
            raise ConfigError(f"cannot save checkpoint {prefix}: it cannot depend on itself")
        for path in needs:
            if not checkpoint_exists(path):
                raise FileMissingError(
                    f"cannot save checkpoint {prefix}: it builds upon {path}, which is gone. "
                    "Save a whole one instead."
                )

    def _changed_at(self, path: str) -> float:
        backend, inner = locate(path + MANIFEST)
        if isinstance(backend, LocalBackend):
            try:
                return Path(inner).stat().st_mtime
            except OSError:
                return self._clock()  # it is gone, and about to be passed over
        return self._clock()

    def _spelled(self, path: str) -> str:
        """The path as we write it, if it is in our folder: there may be links, and many ways to say it.

        A bare name is in our folder. Any other path is whole, though it may be one from where the process
        runs, as the folder itself may be: to put the folder before it once more would name nothing.
        """
        whole = path if filesystem.parent(path) else self._in_folder(path)
        return self._in_folder(filesystem.base_name(whole)) if self._is_ours(whole) else whole

    def _is_ours(self, path: str) -> bool:
        return is_in_folder(path, self._model_dir)

    def _in_folder(self, name: str) -> str:
        return filesystem.join(self._model_dir, name)

    # What we write

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
        """Note the save in `monolith_checkpoint`. The checkpoint counts already, whatever happens here."""
        if not self._speaks_for_folder:
            return
        try:
            update_monolith_checkpoint(self._model_dir, table_kind=self._table_kind, saved_at=now)
        except (CorruptFileError, FilesystemError) as cause:
            _log.error("cannot update monolith_checkpoint: %s", cause)

    # What we delete

    def _due(self, exempt: frozenset[str]) -> tuple[str, ...]:
        """What may be deleted now, less what the file lists: a save may have failed after replacing it."""
        if not self._retention.due(exempt):
            return ()
        state = self._read_state()
        listed = frozenset() if state is None else frozenset(saved.path for saved in self._listed(state))
        return self._retention.due(exempt | listed)

    def _delete(self, paths: Iterable[str]) -> None:
        """Delete checkpoints. One that cannot be deleted stays in the journal, to be tried again."""
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
        if self._speaks_for_folder and (numbered := re.search(r"-0*([0-9]+)$", name)):
            pattern += rf"|(ckpt\.info|input_worker_.*\.ckpt)-0*{numbered[1]}(\..*|-tmp-.*)?"
        belongs = re.compile(pattern, re.DOTALL)
        files = [path for path in filesystem.list_files(self._model_dir) if _matches(belongs, path)]
        folders = [path for path in filesystem.list_folders(self._model_dir) if _matches(belongs, path)]
        for path in sorted(files, key=lambda path: path != prefix + MANIFEST):
            filesystem.remove(path)
        for path in folders:
            filesystem.remove_tree(path)
        return bool(files or folders)

    def _remove_unfinished(self) -> None:
        """Remove what a kill left of files that never got their names: they are only in the disk's way."""
        own = [self._latest_filename, filesystem.base_name(journal_path("", self._latest_filename))]
        if self._speaks_for_folder:
            own.append(MONOLITH_CHECKPOINT_FILE)
        patterns = [re.escape(name) for name in own]
        folders = []
        for path in filter(self._is_ours, self._retention.paths):
            name = filesystem.base_name(path)
            patterns.append(rf"{re.escape(name)}\..*")
            if self._speaks_for_folder:
                patterns.append(rf"ckpt\.info-0*{SaveNames.step_of(path)}")
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
    """Of a URL; empty for a local path."""
    if not filesystem.is_absolute(path) or path.startswith("/"):
        return ""
    protocol = path.partition(":")[0]
    return "" if protocol in {"file", "local"} else protocol


def _matches(pattern: re.Pattern[str], path: str) -> bool:
    return pattern.fullmatch(filesystem.base_name(path)) is not None
