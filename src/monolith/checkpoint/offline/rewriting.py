"""Rewriting a checkpoint without the model it was made by: resharding, compacting, exporting.

All three stream rows from dump to dump, in the order of their hashes, so none loads a table into memory.
`reshard` and `export` read one folder and write another. However many servers wrote the checkpoint, the
result is one shard, except for filters: the counts of several servers cannot be merged, and are copied as
they are.

`compact` turns the last checkpoint of a chain into a full one, in place, so that it needs no other. In this
order, under the lock of the folder:

    dumps       each table's changes are replaced by all of its rows, by one rename per table
    manifest    replaced atomically: from here on the checkpoint is a full one
    leftovers   the lists of removed ids and the shards of servers, which nothing reads any more
    journal     records that it needs no other; then the saver deletes what only it needed

A kill before the manifest leaves an increment in which some tables' changes are all of their rows. Restoring
it loads those over the rows of the checkpoints before, with the same result: removed rows are still in the
list of removed ids, and the remaining rows are replaced by themselves. A kill after the manifest leaves a
full checkpoint, and compacting again does the rest. No file of the chain is deleted before the manifest is
replaced.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import safetensors.torch

from monolith import concurrency, filesystem, native
from monolith.checkpoint.dense.state import EXTRA
from monolith.checkpoint.folder.lock import ModelDirLock
from monolith.checkpoint.folder.manifest import (
    Link,
    Manifest,
    needs_of,
    read_chain,
    read_manifest,
    write_manifest,
)
from monolith.checkpoint.folder.saver import CheckpointNaming, Saver, checkpoint_exists, require_checkpoint
from monolith.checkpoint.folder.state_files import (
    CkptInfo,
    MonolithCheckpointState,
    SaveNames,
    absolute_path,
    choose_table_kind,
    dense_path,
    read_checkpoint_state,
    read_journal,
    read_monolith_checkpoint,
    write_ckpt_info,
    write_journal,
)
from monolith.checkpoint.offline.reading import (
    Damage,
    SavedTables,
    check_filter,
    complete_names,
    filter_paths,
)
from monolith.checkpoint.part import Entry
from monolith.checkpoint.saved_tables import (
    SHARD_FOLDER,
    SavedHistory,
    assets_folder,
    describe_table,
    dumps_of,
    filter_basename,
    filter_shards,
    shard_count,
    shard_folder,
)
from monolith.errors import CorruptFileError, SaveError
from monolith.feature import slot_of
from monolith.observe import Progress
from monolith.table import Rows, table_basename
from monolith.table.dumps import default_num_shards, dump_rows, remove_dump, removed_basename
from monolith.table.entry_dumps import ScanRows, export_rows
from monolith.table.row_streams import in_chunks, newest_rows, shard_range
from monolith.tensors.files import FileRecord, read_tensors

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """The result of resharding or compacting."""

    prefix: str
    chain: tuple[str, ...]
    """The checkpoints it was made of, oldest first."""
    rows: dict[str, int]
    """By table."""
    bytes: int
    """Of the tables."""
    deleted: tuple[str, ...] = ()
    """Checkpoints of the chain that nothing needed any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of an export."""

    rows: dict[str, int]
    """By table."""
    files: tuple[str, ...]
    bytes: int
    left_out: tuple[str, ...] = ()
    """Names that the other program does not have, with the reason."""


def reshard(
    prefix: str,
    folder: str,
    *,
    num_shards: int | None = None,
    workers: int = 4,
    progress: Progress | None = None,
) -> Rewritten:
    """Write a checkpoint to another folder, as a full one, and list it there as the latest.

    Args:
        folder: Made if it is missing. Checkpoints it has stay, and stay listed.
        num_shards: Files per table; by default one per million rows, up to 4.
        progress: Advanced by rows.

    Raises:
        SaveError: The folder has a checkpoint of that name.
        ModelDirLockedError: A run writes there.
        RestoreError, CorruptFileError: A file of the checkpoint is damaged. Nothing was listed.
    """
    chain = read_chain(prefix)
    folder = absolute_path(folder)
    target = filesystem.join(folder, filesystem.base_name(prefix))
    with ModelDirLock(folder):
        saver = _saver_for(target, read_monolith_checkpoint(filesystem.parent(prefix)))
        saver.recover(needs=needs_of)  # which clears away what an attempt that was killed left behind
        if checkpoint_exists(target):
            raise SaveError(
                f"cannot write {prefix} to {folder}: it has a checkpoint {filesystem.base_name(target)}. "
                "Choose another folder; to make an increment a full one where it is, compact it."
            )
        rewriting = _Rewriting(chain, target, num_shards, workers, progress)
        saver.save(chain[-1].manifest.step, lambda _: rewriting.write())
    return rewriting.report()


def compact(
    prefix: str, *, num_shards: int | None = None, workers: int = 4, progress: Progress | None = None
) -> Rewritten:
    """Make the last checkpoint of a chain a full one, and delete what only it needed.

    May be called again after a failure or a kill, and for a full one, where it does what is left.

    Args:
        num_shards: Files per table; by default one per million rows, up to 4.
        progress: Advanced by rows.

    Raises:
        SaveError: Another checkpoint continues this one, and could not be restored without it.
        ModelDirLockedError: A run writes there.
        RestoreError, CorruptFileError: A file of the chain is damaged. Nothing is lost.
    """
    prefix = absolute_path(require_checkpoint(prefix))
    folder = filesystem.parent(prefix)
    with ModelDirLock(folder):
        chain = read_chain(prefix)
        Saver(folder)  # refuses damaged state files before anything is done
        rewriting = _Rewriting(chain, prefix, num_shards, workers, progress)
        if len(chain) > 1:
            _refuse_followers(chain[-1])
            rewriting.write()
        _remove_leftovers(prefix)
        _need_nothing(folder, prefix)
        Saver(folder).recover(needs=needs_of)
    gone = tuple(link.prefix for link in chain if not checkpoint_exists(link.prefix))
    return replace(rewriting.report(), deleted=gone)


def export(
    prefix: str,
    folder: str,
    *,
    tables: Collection[str] | None = None,
    dense: bool = True,
    num_shards: int | None = None,
    workers: int = 4,
    progress: Progress | None = None,
) -> Exported:
    """Write a checkpoint for other programs: tables as EntryDumps, weights as safetensors.

    `<folder>/<table>-00000-of-00001` are TFRecords of EntryDump messages, as upstream writes them;
    `<folder>/dense.safetensors` are parameters and buffers by name, tied ones each for itself.

    Args:
        tables: Which; all by default.
        dense: Whether to write the weights, if there are any.
        progress: Advanced by rows.

    Raises:
        UnknownTableError: The checkpoint has no such table.
        ServingTableError: Rows have no optimizer state to write.
        RestoreError, CorruptFileError: A file of the checkpoint is damaged.
    """
    chain = read_chain(prefix)
    saved = SavedTables(chain)
    names = saved.names if tables is None else sorted(tables)
    histories = {name: saved.history(name) for name in names}  # refuses names it does not have
    filesystem.make_dirs(folder)
    rows: dict[str, int] = {}
    files: list[str] = []
    size = 0
    for name in names:
        total = default_num_shards(saved.rows(name)) if num_shards is None else num_shards
        done = export_rows(
            describe_table(histories[name]).layout,
            table_basename(folder, name),
            saved_scan(histories[name], total),
            num_shards=total,
            workers=workers,
            progress=progress,
        )
        rows[name] = done.rows
        files += done.files
        size += done.bytes
    if dense and (found := _newest_dense(chain)) is not None:
        path = filesystem.join(folder, "dense.safetensors")
        size += _write_plain(*found, path, chain[-1].manifest.step)
        files.append(path)
    return Exported(rows=rows, files=tuple(files), bytes=size)


# A chain as one full checkpoint


class _Rewriting:
    """Writes what a chain comes to at a prefix, which may be that of its last link."""

    def __init__(
        self,
        chain: Sequence[Link],
        target: str,
        num_shards: int | None,
        workers: int,
        progress: Progress | None,
    ) -> None:
        self._chain = chain
        self._target = target
        self._num_shards = num_shards
        self._workers = workers
        self._progress = progress
        self._tables = SavedTables(chain)
        self._slots: Counter[int] = Counter()
        self._lock = concurrency.Lock()  # guards _slots

    def write(self) -> None:
        """Write everything, the manifest last."""
        newest = {name: link for link in self._chain for name in link.manifest.parts}
        parts = {
            name: self._write_tables() if name == "tables" else self._copy(link, link.manifest.parts[name])
            for name, link in newest.items()
        }
        last = self._chain[-1].manifest
        if "tables" in parts:
            counts = {name: entry["rows"] for name, entry in parts["tables"]["tables"].items()}
            info, number = CkptInfo(dict(self._slots), counts), SaveNames.number_of(self._target)
            write_ckpt_info(filesystem.parent(self._target), last.step, info, number)
        manifest = Manifest(step=last.step, kind="full", parts=parts, saved_at=last.saved_at)
        write_manifest(self._target, manifest)

    def report(self) -> Rewritten:
        """Return what is at the target now."""
        entry = read_manifest(self._target).manifest.parts.get("tables", {"tables": {}})
        return Rewritten(
            prefix=self._target,
            chain=tuple(link.prefix for link in self._chain),
            rows={name: table["rows"] for name, table in sorted(entry["tables"].items())},
            bytes=sum(table["bytes"] for table in entry["tables"].values()),
        )

    def _write_tables(self) -> Entry:
        filesystem.make_dirs(assets_folder(self._target))
        tables = {name: self._write_table(name) for name in self._tables.names}
        filters = self._tables.filters()
        shares = {name: self._copy_filter(name, link) for name, link in filters.items()}
        slots = {str(slot): many for slot, many in sorted(self._slots.items())}
        entry: Entry = {"tables": tables, "filters": sorted(filters), "pieces": 1, "slots": slots}
        if several := {name: many for name, many in sorted(shares.items()) if many > 1}:
            entry["filter_pieces"] = several
        return entry

    def _copy_filter(self, name: str, link: Link) -> int:
        """Copy a filter in as many shares as it has, since they cannot be put together; return how many."""
        shares = filter_shards(link.manifest.parts["tables"], name)
        for number in range(shares):
            share = (number, shares)
            source, target = (filter_basename(prefix, name, share) for prefix in (link.prefix, self._target))
            filesystem.make_dirs(shard_folder(self._target, share))
            check_filter(name, source, verify=True)
            for path in filter_paths(source):
                _copy_file(path, target + path.removeprefix(source))
        return shares

    def _write_table(self, name: str) -> Entry:
        history, entry = self._tables.history(name), self._tables.entry(name)
        total = default_num_shards(entry["rows"]) if self._num_shards is None else self._num_shards
        scan = saved_scan(history, total)

        def counted(shard: int, limit: int) -> Iterator[Rows]:
            for rows in scan(shard, limit):
                slots, counts = np.unique(np.asarray(slot_of(rows.ids)), return_counts=True)
                with self._lock:
                    self._slots.update(dict(zip(slots.tolist(), counts.tolist(), strict=True)))
                yield rows

        done = dump_rows(
            table_basename(assets_folder(self._target), name),
            describe_table(history),
            counted,
            num_shards=total,
            workers=self._workers,
            progress=self._progress,
        )
        return {
            "kind": "full",
            "rows": done.rows,
            "bytes": done.bytes,
            "expired": 0,
            "layout": entry["layout"],
        }

    def _copy(self, link: Link, entry: Entry) -> Entry:
        """Copy the files of a part to where its like is looked for at the target; return its entry there."""
        if "files" not in entry:
            return entry
        old, new = filesystem.base_name(link.prefix), filesystem.base_name(self._target)
        files: dict[str, dict[str, int]] = {}
        for name, record in entry["files"].items():
            moved = new + name.removeprefix(old) if name.startswith(old) else name
            source = filesystem.join(filesystem.parent(link.prefix), name)
            target = filesystem.join(filesystem.parent(self._target), moved)
            _copy_file(source, target, FileRecord(**record))
            files[moved] = record
        return entry | {"files": files}


def saved_scan(history: SavedHistory, num_shards: int) -> ScanRows:
    """Return what reads the rows of a saved table, shard by shard, as they are at the end of its chain."""

    def scan(shard: int, limit: int) -> Iterator[Rows]:
        return in_chunks(newest_rows(dumps_of(history), *shard_range(shard, num_shards)), limit)

    return scan


def _copy_file(source: str, target: str, record: FileRecord | None = None) -> None:
    """Copy a file, unless it is there already; with a record, one that differs from it is refused."""
    with contextlib.ExitStack() as opened:
        reading = opened.enter_context(filesystem.open_read(source))
        writing = None if source == target else opened.enter_context(filesystem.atomic_write(target))
        size = crc = 0
        while chunk := reading.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = native.crc32c(chunk, crc)
            if writing is not None:
                writing.write(chunk)
        if record is not None and FileRecord(size, crc) != record:
            raise CorruptFileError(
                source,
                min(size, record.bytes),
                f"it has {size} bytes with the checksum {crc:08x}; {record.bytes} with {record.crc32c:08x} "
                "were recorded",
            )


def _saver_for(prefix: str, known: MonolithCheckpointState | None) -> Saver:
    """Return a saver for one more checkpoint of a folder, which deletes none that is there.

    Args:
        known: The `monolith_checkpoint` of the run it comes from.
    """
    folder, name = filesystem.parent(prefix), filesystem.base_name(prefix)
    basename, _, digits = name.rpartition("-")
    if not basename or not digits.isdecimal():
        raise SaveError(f"cannot list {prefix}: the name of a checkpoint ends in -<step>")
    state = read_checkpoint_state(folder)
    return Saver(
        folder,
        naming=CheckpointNaming(
            basename=basename, pad_step_number=digits.startswith("0") and len(digits) > 1
        ),
        max_to_keep=1 + (0 if state is None else len(state.all_model_checkpoint_paths)),
        keep_every=None,
        table_kind=choose_table_kind(None, known),
    )


# In place


def _refuse_followers(tip: Link) -> None:
    folder, own = filesystem.parent(tip.prefix), filesystem.base_name(tip.prefix)
    for name in complete_names(folder):
        try:
            manifest = read_manifest(filesystem.join(folder, name)).manifest
        except Damage:
            continue  # it could not be restored in any case
        if (manifest.after, manifest.after_crc) == (own, tip.crc):
            raise SaveError(
                f"cannot compact {tip.prefix}: {name} continues it as it is. Compact the last of the chain."
            )


def _remove_leftovers(prefix: str) -> None:
    """Remove what a full checkpoint has no use for: lists of removed ids, and shares it is no longer in."""
    entry = read_manifest(prefix).manifest.parts.get("tables", {"tables": {}})
    if shard_count(entry) > 1:
        return  # it was full before, and is in these shares
    folder = assets_folder(prefix)
    shares = filesystem.list_folders(folder) if filesystem.exists(folder) else []
    shares = [path for path in shares if SHARD_FOLDER.fullmatch(filesystem.base_name(path))]
    for name in entry["tables"]:
        remove_dump(removed_basename(table_basename(folder, name)))
        for path in shares:
            remove_dump(removed_basename(table_basename(path, name)))
            remove_dump(table_basename(path, name))
    for path in shares:
        if not filesystem.list_files(path):  # there may be filters
            filesystem.remove_tree(path)


def _need_nothing(folder: str, prefix: str) -> None:
    """Note that a checkpoint needs no other, so that those it needed may go."""
    journal = read_journal(folder)
    needs = {path: needed for path, needed in journal.depends_on.items() if path != prefix}
    kept = tuple(path for path in journal.preserved if path != prefix)
    write_journal(folder, replace(journal, depends_on=needs, preserved=kept))


# For other programs


def _newest_dense(chain: Sequence[Link]) -> tuple[str, FileRecord] | None:
    for link in reversed(chain):
        path = dense_path(link.prefix)
        record = link.manifest.parts.get("dense", {}).get("files", {}).get(filesystem.base_name(path))
        if record is not None:
            return path, FileRecord(**record)
    return None


def _write_plain(source: str, record: FileRecord, target: str, step: int) -> int:
    """Write variables as any other program would; return the bytes."""
    tensors = read_tensors(source, record, only=lambda name: not name.startswith(EXTRA))
    owners: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in owners:  # tied: the library refuses to write memory twice
            tensors[name] = tensor.clone()
        owners.add(tensor.data_ptr())
    data = safetensors.torch.save(tensors, {"format": "pt", "step": str(step)})
    with filesystem.atomic_write(target) as file:
        file.write(data)
    return len(data)
