"""Reading a checkpoint without the model it was made by: its contents, and whether it is intact.

The manifest and the files describe themselves, so a checkpoint can be read long after the code that wrote it
has changed. Damage is collected, not raised: a reader wants to see all of it, and the intact parts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from monolith import filesystem
from monolith.checkpoint.folder.manifest import Link, read_chain, read_manifest
from monolith.checkpoint.folder.saver import MANIFEST, checkpoint_exists
from monolith.checkpoint.folder.state_files import (
    absolute_path,
    dense_path,
    optimizer_path,
    read_checkpoint_state,
)
from monolith.checkpoint.part import Entry
from monolith.checkpoint.saved_tables import SavedTable, filter_basename, filter_shards
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FileMissingError,
    FilesystemError,
    RestoreError,
    UnknownTableError,
)
from monolith.observe import Progress
from monolith.table import STATE_FIELDS, Rows, ShardInfo, filter_files
from monolith.table.dumps import removed_ids
from monolith.table.row_streams import describe_dump, find_row
from monolith.table.shard_files import RowLayout, SegmentLayout
from monolith.table.sharded_files import parse
from monolith.tensors.files import DenseHeader, FileRecord, read_header, read_tensors

Damage = (CorruptFileError, RestoreError, FileMissingError)
"""What reading a checkpoint raises when a file is not as it was written."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


# Which checkpoint is meant


def find_checkpoint(run_or_prefix: str) -> str:
    """Return the prefix of a checkpoint, or of the latest one of a run's folder.

    Raises:
        FileMissingError: There is none; the message lists the checkpoints there are.
        CorruptFileError: The state file of the run is damaged.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, Saver, find_checkpoint
        >>> prefix = Checkpointer(Saver("run"), [DensePart(torch.nn.Linear(2, 1))]).save(100)
        >>> find_checkpoint("run").endswith("run/model.ckpt-100")  # the latest of the run
        True
    """
    path = absolute_path(run_or_prefix.removesuffix(MANIFEST))
    if checkpoint_exists(path):
        return path
    if not filesystem.is_folder(path):
        folder = filesystem.parent(path)
        names = complete_names(folder) if filesystem.is_folder(folder) else []
        raise FileMissingError(
            f"there is no run and no checkpoint {run_or_prefix}: neither a folder nor a file "
            f"{path}{MANIFEST}.{_instead(folder, names)}"
        )
    state = read_checkpoint_state(path, sleep=lambda _: None)
    if state is None:
        raise FileMissingError(
            f"{run_or_prefix} has no file `checkpoint`, so it has no latest one."
            f"{_instead(path, complete_names(path))}"
        )
    if not checkpoint_exists(state.model_checkpoint_path):
        raise FileMissingError(
            f"the latest checkpoint of {run_or_prefix} is {state.model_checkpoint_path}, which is not there."
            f"{_instead(path, complete_names(path))}"
        )
    return state.model_checkpoint_path


def complete_names(folder: str) -> list[str]:
    """Return the names of the checkpoints in a folder that have a manifest."""
    files = map(filesystem.base_name, filesystem.list_files(folder))
    return [name.removesuffix(MANIFEST) for name in files if name.endswith(MANIFEST)]


def _instead(folder: str, names: Sequence[str]) -> str:
    return f" In {folder} there are: {', '.join(names)}." if names else ""


# The tables of a chain


class SavedTables:
    """The tables of a checkpoint, each with its history in the chain.

    A table that only earlier checkpoints of the chain have is included: a restore finds it too.
    """

    def __init__(self, chain: Sequence[Link]) -> None:
        self._chain = [link for link in chain if "tables" in link.manifest.parts]

    @property
    def names(self) -> list[str]:
        return sorted({name for link in self._chain for name in _tables(link)})

    def history(self, table: str) -> list[SavedTable]:
        """Return a table in the checkpoints that have it, oldest first.

        Raises:
            UnknownTableError: The checkpoint has no such table; the message lists those it has.
        """
        saved = (SavedTable.find(link.prefix, link.manifest.parts["tables"], table) for link in self._chain)
        found = [one for one in saved if one is not None]
        if not found:
            raise UnknownTableError(
                f"the checkpoint has no table {table!r}; it has {', '.join(self.names) or 'none'}"
            )
        return found

    def entry(self, table: str) -> Entry:
        """Return the entry of a table in the newest manifest that has it."""
        return self.history(table)[-1].entry

    def rows(self, table: str) -> int:
        return int(self.entry(table)["rows"])

    def rows_in_chain(self, table: str) -> int:
        """Return the number of rows of a table in all dumps of the chain together."""
        return sum(
            saved.entry["changed"] if saved.changes else saved.entry["rows"] for saved in self.history(table)
        )

    def filters(self) -> dict[str, Link]:
        """Return, by table, the newest link with its filter."""
        return {name: link for link in self._chain for name in link.manifest.parts["tables"]["filters"]}


def rows_to_write(prefix: str, tables: Sequence[str] | None = None) -> int:
    """Return the number of rows in some tables of a checkpoint, or in all."""
    saved = SavedTables(read_chain(prefix))
    return sum(saved.rows(name) for name in (saved.names if tables is None else tables))


def rows_to_read(prefix: str) -> int:
    """Return the number of rows in a whole chain; 0 if it is broken, which reading it reports."""
    try:
        saved = SavedTables(read_chain(prefix))
    except Damage:
        return 0
    return sum(saved.rows_in_chain(name) for name in saved.names)


def _tables(link: Link) -> dict[str, Entry]:
    tables: dict[str, Entry] = link.manifest.parts["tables"]["tables"]
    return tables


# One row


@dataclass(frozen=True, slots=True)
class SegmentValues:
    """The values of one segment of a row."""

    optimizer: str
    values: list[float]
    state: dict[str, list[float] | int]
    """By the name of its field; a counter is a whole number."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """What a checkpoint knows of one id."""

    table: str
    id: int
    prefix: str | None
    """The checkpoint of the chain in which the row was last written, or removed."""
    status: Literal["found", "removed", "cleared", "absent"]
    """"removed": it had a row before; "cleared": the whole table was, or the shard of the server that had it;
    "absent": nothing is known of it."""
    event_time: int | None = None
    segments: tuple[SegmentValues, ...] = ()
    feature: str | None = None
    """The feature whose value was looked for; None if the id itself was given."""


def find_id(prefix: str, table: str, id_: int) -> FoundRow:
    """Return the row of one id, from the newest checkpoint of the chain that has it.

    Reads a few blocks of each dump, so it answers quickly for tables of any size.

    Raises:
        UnknownTableError: The checkpoint has no such table.
        ConfigError: The id does not fit 64 bits.
        RestoreError, CorruptFileError: A file that it depends on is damaged.
    """
    if not -(1 << 63) <= id_ < 1 << 64:
        raise ConfigError(f"an id has 64 bits, got {id_}")
    key = id_ - (1 << 64) if id_ >= 1 << 63 else id_
    for saved in reversed(SavedTables(read_chain(prefix)).history(table)):
        step = saved.step(id_ % (1 << 64) % saved.shards)
        rows = find_row(step.basename, key)
        if rows is not None:
            layout = describe_dump(step.basename).layout
            return FoundRow(
                table, key, saved.prefix, "found", int(rows.event_times[0]), tuple(named_values(rows, layout))
            )
        if step.cleared:
            return FoundRow(table, key, saved.prefix, "cleared")
        if step.changes and bool((removed_ids(step.basename) == key).any()):
            return FoundRow(table, key, saved.prefix, "removed")
    return FoundRow(table, key, None, "absent")


def named_values(rows: Rows, layout: RowLayout) -> Iterator[SegmentValues]:
    """Yield the segments of the first row, their optimizer state by name."""
    values, state = rows.values[0].numpy(), rows.state[0].numpy()
    for segment in layout.segments:
        yield SegmentValues(
            segment.optimizer,
            values[: segment.dim].tolist(),
            _named_state(segment, np.ascontiguousarray(state[: segment.state_dim])),
        )
        values, state = values[segment.dim :], state[segment.state_dim :]


def _named_state(segment: SegmentLayout, state: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
    fields = STATE_FIELDS.get(segment.optimizer, ())
    if sum(field.size(segment.dim) for field in fields) != segment.state_dim:
        return {"state": state.tolist()} if len(state) else {}  # of a serving table, or of another program
    named: dict[str, Any] = {}
    for each in fields:
        part, state = state[: each.size(segment.dim)], state[each.size(segment.dim) :]
        named[each.name] = int(part.copy().view(np.int64)[0]) if each.shape == "counter" else part.tolist()
    return named


# All of one checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class TableContents:
    """One table of a checkpoint."""

    name: str
    kind: Literal["full", "changes"]
    layout: str
    rows: int
    """Rows of the table at that step, whether or not they are in this checkpoint itself."""
    bytes: int
    """Bytes in this checkpoint itself."""
    shards: int
    """Shard files, of all servers together."""
    shares: int = 1
    """Number of servers that wrote it, one shard of ids each."""
    changed: int | None = None
    removed: int | None = None
    cleared: bool = False
    cleared_shares: tuple[int, ...] = ()
    """The servers whose shard was cleared, if not all were."""
    newest_event_time: int | None = None
    """Unix seconds, of the rows in this checkpoint itself."""
    linked: int = 0
    """Files of tiered tables that this checkpoint links to, of all servers together."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One dense variable."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str | None = None
    """The variable whose memory it shares."""


@dataclass(frozen=True, slots=True)
class FilterContents:
    """What an admission filter keeps."""

    table: str
    kind: str
    cells: int | None = None
    """In use."""
    capacity: int | None = None
    shares: int = 1
    """Servers that each counted for themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What is in a checkpoint."""

    prefix: str
    step: int
    kind: Literal["full", "incremental"]
    saved_at: float
    chain: tuple[str, ...]
    """Prefixes, the full one first, this one last; shorter where the chain is broken."""
    bytes: int
    """Of its own files, without those of the checkpoints it continues."""
    tables: tuple[TableContents, ...]
    variables: tuple[Variable, ...]
    training_tensors: int
    """Tensors of optimizers and whatever else only training needs."""
    filters: tuple[FilterContents, ...]
    states: Mapping[str, Any]
    """Part -> its values, such as the position in the data."""
    verified: bool
    """Whether every byte was read, of the whole chain."""
    problems: tuple[str, ...]


def read_contents(prefix: str, *, verify: bool = False, progress: Progress | None = None) -> Contents:
    """Return a description of a checkpoint: its tables, variables and positions.

    Args:
        verify: Whether every byte of it and of the checkpoints it continues is read and checked;
            otherwise only their headers.
        progress: Advanced by rows as they are read.

    Raises:
        FileMissingError: There is no such checkpoint.
        CorruptFileError: Its manifest is damaged, so there is nothing to tell.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, Saver, read_contents
        >>> prefix = Checkpointer(Saver("run"), [DensePart(torch.nn.Linear(2, 1))]).save(100)
        >>> contents = read_contents(prefix, verify=True)
        >>> contents.step, [(variable.name, variable.shape) for variable in contents.variables]
        (100, [('bias', (1,)), ('weight', (1, 2))])
    """
    link = read_manifest(prefix)
    problems: list[str] = []
    chain = _attempt(problems, read_chain, prefix) or [link]
    for each in chain[:-1]:
        problems += check_files(each, verify=verify, progress=progress).problems
    own = check_files(link, verify=verify, progress=progress)
    return Contents(
        prefix=prefix,
        step=link.manifest.step,
        kind=link.manifest.kind,
        saved_at=link.manifest.saved_at,
        chain=tuple(each.prefix for each in chain),
        bytes=size_of(prefix),
        tables=tuple(own.tables),
        variables=tuple(_variables(own.headers.get(dense_path(prefix)))),
        training_tensors=len(_tensors(own.headers.get(optimizer_path(prefix)))),
        filters=tuple(own.filters),
        states={
            name: readable(entry["value"]) for name, entry in link.manifest.parts.items() if "value" in entry
        },
        verified=verify,
        problems=(*problems, *own.problems),
    )


@dataclass(slots=True)
class FilesReport:
    """The headers of one checkpoint's files, and their problems."""

    tables: list[TableContents] = field(default_factory=list)
    headers: dict[str, DenseHeader] = field(default_factory=dict)
    filters: list[FilterContents] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def check_files(link: Link, *, verify: bool = False, progress: Progress | None = None) -> FilesReport:
    """Check every file that the manifest of one checkpoint names, not those of its chain."""
    report = FilesReport()
    folder = filesystem.parent(link.prefix)
    for entry in link.manifest.parts.values():
        for name, record in entry.get("files", {}).items():
            path = filesystem.join(folder, name)
            header = _attempt(report.problems, _check_dense, path, FileRecord(**record), verify)
            if header is not None:
                report.headers[path] = header
    if "tables" not in link.manifest.parts:
        return report
    part = link.manifest.parts["tables"]
    for name in sorted(part["tables"]):
        saved = SavedTable.find(link.prefix, part, name)
        assert saved is not None
        found = [
            _attempt(report.problems, saved.inspect, share, verify=verify, progress=progress)
            for share in range(saved.shards)
        ]
        shards = [shard for share in found for shard in share or ()]
        for share in range(saved.shards):
            _attempt(report.problems, saved.inspect_removed, share, verify=verify)
        if None not in found:
            _attempt(report.problems, saved.check_rows, sum(shard.rows for shard in shards))
        report.tables.append(_table_contents(saved, shards))
    for name in part["filters"]:
        shares = filter_shards(part, name)
        each = [
            _attempt(
                report.problems, check_filter, name, filter_basename(link.prefix, name, (one, shares)), verify
            )
            for one in range(shares)
        ]
        report.filters.append(_joined_filter(name, [one for one in each if one is not None], shares))
    return report


def _check_dense(path: str, record: FileRecord, verify: bool) -> DenseHeader:
    size = filesystem.file_size(path)
    if size != record.bytes:
        raise CorruptFileError(
            path, min(size, record.bytes), f"it has {size} bytes, {record.bytes} were recorded"
        )
    header = read_header(path)
    if verify:
        read_tensors(path, record, only=lambda _: False)
    return header


def _table_contents(saved: SavedTable, shards: Sequence[ShardInfo]) -> TableContents:
    entry = saved.entry
    return TableContents(
        name=saved.name,
        kind=entry["kind"],
        layout=str(shards[0].description.layout) if shards else saved.layout,
        rows=entry["rows"],
        bytes=entry["bytes"],
        shards=sum(not shard.linked for shard in shards),
        shares=saved.shards,
        changed=entry.get("changed"),
        removed=entry.get("removed"),
        cleared=all(saved.cleared),
        cleared_shares=() if all(saved.cleared) else tuple(np.flatnonzero(saved.cleared).tolist()),
        newest_event_time=max((shard.max_event_time for shard in shards), default=0) or None,
        linked=sum(shard.linked for shard in shards),
    )


def _joined_filter(table: str, found: Sequence[FilterContents], shares: int) -> FilterContents:
    if len(found) < shares:
        return FilterContents(table, "damaged")
    cells = [one.cells for one in found if one.cells is not None]
    room = [one.capacity for one in found if one.capacity is not None]
    return FilterContents(
        table, found[0].kind, sum(cells) if cells else None, sum(room) if room else None, shares
    )


def check_filter(table: str, basename: str, verify: bool) -> FilterContents:
    """Read the headers of a filter's files.

    Raises:
        RestoreError, CorruptFileError: One is missing or damaged.
    """
    draws = f"{basename}.draws"
    if filesystem.exists(draws):
        text = filesystem.read_bytes(draws)
        if not text.endswith(b"\n") or not text[:-1].isdigit():
            raise CorruptFileError(draws, 0, "it should contain one number")
        return FilterContents(table, "probabilistic")
    if not filter_paths(basename):
        return FilterContents(table, "none")  # one that lets every id in keeps nothing
    splits = filter_files.inspect(basename, verify=verify)
    return FilterContents(
        table,
        "sliding",
        sum(split.split["num_elements"] for split in splits),
        sum(split.split["total_size"] for split in splits),
    )


def filter_paths(basename: str) -> list[str]:
    """Return the files of a filter; none of one that lets every id in."""
    folder, stem = filesystem.parent(basename), filesystem.base_name(basename)
    if not filesystem.exists(folder):
        return []
    return [
        path
        for path in filesystem.list_files(folder)
        if (name := filesystem.base_name(path)) == f"{stem}.draws" or parse(stem, name)
    ]


def _variables(header: DenseHeader | None) -> Iterator[Variable]:
    for name, info in sorted(_tensors(header).items()):
        shared = None if header is None else header.shared.get(name)
        yield Variable(name, info.dtype_name, tuple(info.shape), shared)


def _tensors(header: DenseHeader | None) -> Mapping[str, Any]:
    return {} if header is None else header.tensors


def _attempt(
    problems: list[str], work: Callable[Given, Result], *args: Given.args, **named: Given.kwargs
) -> Result | None:
    """Return what `work` returns; where a file is damaged, note it and return None."""
    try:
        return work(*args, **named)
    except Damage as error:
        problems.append(str(error))
    except FilesystemError as error:
        problems.append(f"not readable: {error}")
    return None


# Values and sizes


def readable(value: Any) -> Any:
    """Return the values of a part as plain JSON, for people: tensors by name, tuples as lists."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (marker := next(iter(value))).startswith("$"):
        inner = value[marker]
        if marker in ("$tensor", "$array"):
            return f"<{marker[1:]} {inner}>"
        if marker in ("$dict", "$counter"):
            return {_key(key): readable(item) for key, item in inner}
        return readable(inner)
    return {key: readable(item) for key, item in value.items()}


def _key(key: Any) -> str:
    plain = readable(key)
    return plain if isinstance(plain, str) else str(plain)


def files_of(prefix: str) -> list[str]:
    """Return the paths of the files of a checkpoint, unfinished ones too."""
    folder, start = filesystem.parent(prefix), f"{filesystem.base_name(prefix)}."
    found = [path for path in filesystem.list_files(folder) if filesystem.base_name(path).startswith(start)]
    for path in filesystem.list_folders(folder):
        if filesystem.base_name(path).startswith(start):
            found += filesystem.list_files(path, recursive=True)
    return found


def size_of(prefix: str) -> int:
    """Return the bytes of a checkpoint's own files."""
    return sum(map(filesystem.file_size, files_of(prefix)))
