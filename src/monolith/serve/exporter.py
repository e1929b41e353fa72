"""Exporter: a checkpoint and its model become a servable folder.

    DIR/100/            standalone: manifest, dense half, tables, warm-up requests
    DIR/entry/100/      sharded: all but the tables
    DIR/ps_0/100/       and the rows of each serving server, by id as an unsigned number modulo their number

Everything is written to hidden folders and renamed into place, the shards before the entry, so that an entry
exists only if its rows do. A killed export is resumed: complete tables and parts are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from monolith import concurrency, filesystem, native
from monolith.checkpoint import read_chain
from monolith.checkpoint.offline.reading import SavedTables
from monolith.config import config_from_mapping, to_dict
from monolith.errors import ConfigError, CorruptFileError, ExportError
from monolith.feature import FeatureSpec
from monolith.model import EmbeddingCollection, RetrievalModel, SequenceRanker
from monolith.observe import Progress
from monolith.serve.dense import compile_graph
from monolith.serve.export_tables import Advance, ExpiredRows, TableCodings, export_table, saved_history
from monolith.serve.manifest import (
    WARM_UP,
    Meaning,
    Servable,
    ServableCollection,
    ServableDense,
    ServableFile,
    ServableTable,
    ServableTowers,
    Signature,
    TensorSpec,
    write_requests,
    write_servable,
)
from monolith.serve.predictor import COMPILED, GRAPH, HISTORY_GRAPHS, TOWER_GRAPHS, WEIGHTS
from monolith.serve.request_reader import Kind, RequestReader
from monolith.serve.tracing import Predict, TracedDense, collections_of, trace_dense, trace_histories
from monolith.serve.versions import (
    ENTRY,
    NewVersion,
    Withheld,
    existing_version,
    keep_newest,
    read_withheld,
    withhold,
)
from monolith.sync.messages import run_identity
from monolith.table import EventClock, TableConfig
from monolith.tensors.files import write_tensors

_log = logging.getLogger(__name__)

_DONE = "done.json"
"""A file in a folder that is being written, which lists the complete tables."""
_MOST_SHARDS = 1000
_SHARDS_AT_ONCE = 128
"""Number of shards that are written while a checkpoint is read once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportModel:
    """The model of all exported checkpoints: a plain module and its description."""

    name: str
    module: nn.Module
    """In eval mode, on the CPU."""
    outputs: Predict
    spec: FeatureSpec | None = None
    floats: Mapping[str, int] = field(default_factory=dict)
    """Float features of its batches -> their width, if there is no spec."""
    heads: Sequence[str] = ()
    """The labels that it is trained on, for checkpoints that do not list them."""
    meaning: Callable[[str], Meaning] = lambda _: ""
    """Returns the meaning of the output of a head."""
    factory: str | None = None
    """package.module:function that makes the module on the server, for a model that cannot be a graph."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory: plain values."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """Raw column -> whether its rows have one value or a list, if the data says so."""
    requests: Sequence[Mapping[str, Any]] = ()
    """Requests that warm up a server; see `draw_requests`."""

    @property
    def widths(self) -> Mapping[str, int]:
        return self.floats if self.spec is None else self.spec.floats


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportHow:
    """How a model is exported."""

    codings: TableCodings = field(default_factory=TableCodings)
    shards: int = 0
    """Number of serving servers that rows are spread over; 0 writes them to the same folder."""
    missing_rows: Literal["refuse", "default"] = "refuse"
    """Whether an entry may read rows as zeros if their server does not answer."""
    as_module: bool = False
    compiled: bool = False
    """Whether to add a package compiled by AOTInductor, for machines like this one."""
    keep: int | None = None
    """Number of versions that retention keeps; None removes none."""
    evicts: bool = False
    """Whether the run evicts expired rows; then they are left out."""
    max_share: float = 1.0
    """Fraction of a table that may be left out as expired."""

    def __post_init__(self) -> None:
        if not 0 <= self.shards <= _MOST_SHARDS:
            raise ConfigError(f"shards must be from 0 to {_MOST_SHARDS}, got {self.shards}")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep must be at least 1, got {self.keep}")
        if self.as_module and self.compiled:
            raise ConfigError("a Python module is not compiled: leave compiled or as_module out")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedServable:
    """The result of an export."""

    folder: str
    """Folder of the version; of a sharded one, that of its entry."""
    servable: Servable
    bytes: int
    """Bytes of all files of all parts."""
    was_there: bool
    """Whether the same export existed already."""
    removed: tuple[str, ...] = ()
    """Versions that retention removed."""
    in_use: tuple[str, ...] = ()
    """Versions that retention would have removed, but that a server uses."""
    withheld: bool = False
    """Whether it is withheld from servers because publishing of the run is paused."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The checkpoint of an export."""

    prefix: str
    step: int
    saved_at: float
    """Unix seconds."""
    watermark: int | None
    crc: int
    tables: SavedTables
    heads: tuple[str, ...]
    """The labels that it was trained on."""
    log_places: Mapping[str, tuple[str, int]]
    """Shard -> epoch and sequence of its delta log at the snapshot."""
    ranges: Mapping[str, tuple[float, float]]
    """Float feature -> the smallest and largest number of the batches that were looked at."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One export: its checkpoint, its version and its digest."""

    saved: _Checkpoint
    version: str
    digest: str
    progress: Progress | None


class Exporter:
    """Exports checkpoints of one model. The graph is traced once, since only weights change.

    Args:
        restore: Loads the dense weights of a checkpoint, by its prefix, into the module.
        withhold: Returns why servers must not load the version of a checkpoint, given its step and the Unix
            seconds at which it was saved; None if they may.
        clock: Unix seconds.

    Raises:
        ExportError: The model cannot be exported; gives the reason and a remedy.
    """

    def __init__(
        self,
        model: ExportModel,
        how: ExportHow,
        restore: Callable[[str], object],
        *,
        withhold: Callable[[int, float], Withheld | None] = lambda _step, _saved_at: None,
        clock: Callable[[], float] = concurrency.time,
    ) -> None:
        self._model = model
        self._how = how
        self._restore = restore
        self._withhold = withhold
        self._clock = clock
        self._collections = collections_of(model.module)
        if not self._collections:
            raise ExportError("the model has no EmbeddingCollection, so there is nothing to look up")
        self._tables = _tables_of(self._collections)
        for name in how.codings.tables:
            if name not in self._tables:
                raise ConfigError(f"coding: there is no table {name!r}; there are {', '.join(self._tables)}")
        if how.as_module and model.factory is None:
            raise ExportError("to be served as a Python module, the model needs a factory function")
        model.module.eval()
        towers = (part for part in model.module.modules() if isinstance(part, RetrievalModel))
        self._towers = next(towers, None)
        self._tower_graphs: dict[str, bytes] = {}
        rankers = [part for part in model.module.modules() if isinstance(part, SequenceRanker)]
        self._ranker = rankers[0] if len(rankers) == 1 else None
        self._history_graphs: dict[tuple[str, ...], dict[str, bytes]] = {}
        self._traced: dict[tuple[str, ...], TracedDense] = {}
        if not how.as_module:
            self._trace(tuple(model.heads))  # raises an error before anything is written

    def _trace(self, heads: tuple[str, ...]) -> TracedDense:
        found = self._traced.get(heads)
        if found is None:
            model = self._model
            group = None if model.spec is None else model.spec.group
            found = trace_dense(model.module, model.outputs, floats=model.widths, heads=heads, group=group)
            self._traced[heads] = found
        return found

    def _trace_towers(self) -> dict[str, bytes]:
        """Return the graphs of the towers of a retrieval model: file -> graph. They are traced once."""
        towers, model = self._towers, self._model
        if towers is None or self._tower_graphs:
            return self._tower_graphs
        calls: Mapping[str, Predict] = {
            "user": lambda _, batch: {"user_vector": towers.users(batch)},
            "item": lambda _, batch: {"item_vector": towers.items(batch)},
        }
        group = None if model.spec is None else model.spec.group
        self._tower_graphs = {
            TOWER_GRAPHS[side]: trace_dense(
                model.module, call, floats=model.widths, group=group, vectors=True
            ).graph
            for side, call in calls.items()
        }
        return self._tower_graphs

    def _trace_histories(self, heads: tuple[str, ...]) -> dict[str, bytes]:
        """Return the graphs over histories: file -> graph; none of a model that has no such part. They are
        traced once."""
        model = self._model
        if self._ranker is None:
            return {}
        if heads not in self._history_graphs:
            group = None if model.spec is None else model.spec.group
            graphs: Sequence[bytes] = ()
            try:
                graphs = trace_histories(
                    *(model.module, model.outputs, self._ranker),
                    floats=model.widths,
                    heads=heads,
                    group=group,
                )
            except ExportError as error:
                _log.warning(
                    "model %r: histories are encoded for each item of a ranking request: %s",
                    model.name,
                    error,
                )
            self._history_graphs[heads] = dict(zip(HISTORY_GRAPHS, graphs, strict=False))
        return self._history_graphs[heads]

    def rows_of(self, prefix: str) -> int:
        """Return the number of rows that an export of a checkpoint reads, for a progress bar."""
        saved = _read(prefix, self._model.heads).tables
        return sum(
            int(history[-1].entry["rows"])
            for config in self._tables.values()
            if (history := saved_history(saved, config)) is not None
        )

    def export(
        self, prefix: str, root: str, *, version: str | None = None, progress: Progress | None = None
    ) -> ExportedServable:
        """Export a checkpoint. If the same export exists already, it is kept.

        Args:
            root: The folder of versions.
            version: By default the step of the checkpoint.
            progress: Advanced by rows.

        Raises:
            ExportError: The version is taken by something else, or the checkpoint does not fit the model.
            FileMissingError, RestoreError, CorruptFileError: The checkpoint is gone or damaged.
        """
        saved = _read(prefix, self._model.heads)
        version = str(saved.step) if version is None else version
        digest = self._digest(saved, version)
        job = _Job(saved, version, digest, progress)
        shards = self._how.shards
        parts = [f"ps_{number}" for number in range(shards)]
        roots = [filesystem.join(root, part) for part in (ENTRY, *parts)] if shards else [root]
        found = existing_version(roots[0], version, digest)
        was_there = found is not None
        total = 0
        if found is None:
            # Shards first, the entry last: an entry that exists has all of its rows.
            tables: dict[str, ServableTable] = {}
            for begin in range(0, shards, _SHARDS_AT_ONCE):
                shares = range(begin, min(begin + _SHARDS_AT_ONCE, shards))
                for written in self._write_parts(job, {share: roots[share + 1] for share in shares}):
                    tables = {name: _added(tables.get(name), table) for name, table in written.tables.items()}
                    total += written.bytes
            found = self._write_whole(job, roots[0], tables)
        total += found.bytes
        withheld = [self._withhold_committed(job, one) for one in roots]
        removed, in_use = ([], []) if self._how.keep is None else keep_newest(roots, self._how.keep)
        return ExportedServable(
            folder=filesystem.join(roots[0], version),
            servable=found,
            bytes=total,
            was_there=was_there,
            removed=tuple(removed),
            in_use=tuple(in_use),
            withheld=any(withheld),
        )

    # One folder

    def _commit(self, job: _Job, new: NewVersion, servable: Servable) -> Servable:
        filesystem.remove(filesystem.join(new.folder, _DONE))
        write_servable(new.folder, servable)
        if (mark := self._withhold(job.saved.step, job.saved.saved_at)) is not None:
            withhold(new.folder, mark)  # before the rename, so that no server ever sees it without its mark
        new.commit()
        return servable

    def _withhold_committed(self, job: _Job, root: str) -> bool:
        """Mark a version that was committed while publishing was being paused; return whether it is marked.

        A pause marks the existing versions. A version that is renamed into place just after that asked
        `withhold` just before the pause, so it is asked again here.
        """
        folder = filesystem.join(root, job.version)
        marked = read_withheld(folder) is not None
        if not marked and (mark := self._withhold(job.saved.step, job.saved.saved_at)) is not None:
            withhold(folder, mark)
            marked = True
        return marked

    def _write_parts(self, job: _Job, roots: Mapping[int, str]) -> list[Servable]:
        """Write the rows of serving servers; complete ones of an earlier attempt are kept.

        Args:
            roots: Shard -> its folder of versions.
        """
        found = {shard: existing_version(root, job.version, job.digest) for shard, root in roots.items()}
        with ExitStack() as opened:
            new = {
                shard: opened.enter_context(NewVersion(root, job.version, job.digest))
                for shard, root in roots.items()
                if found[shard] is None
            }
            for shard, (tables, files) in self._write_tables(job, new).items():
                servable = replace(self._about(job), part=f"ps_{shard}", tables=tables, files=files)
                found[shard] = self._commit(job, new[shard], servable)
        return [one for one in found.values() if one is not None]

    def _write_whole(self, job: _Job, root: str, elsewhere: Mapping[str, ServableTable]) -> Servable:
        """Write a standalone servable, or the entry of a sharded one.

        Args:
            elsewhere: The tables of the serving servers.
        """
        with NewVersion(root, job.version, job.digest) as new:
            tables, files = dict(elsewhere), dict[str, ServableFile]()
            if not self._how.shards:
                tables, files = self._write_tables(job, {0: new})[0]
            dense, more = self._write_dense(job.saved, new)
            files |= more
            if self._model.requests:
                files[WARM_UP] = _write(new.folder, WARM_UP, write_requests(self._model.requests))
            spec = self._model.spec
            servable = replace(
                self._about(job),
                part=ENTRY if self._how.shards else "whole",
                features=None if spec is None else spec.to_dict(),
                signature=self._signature(dense),
                collections=tuple(ServableCollection.of(c.inputs, c.layouts) for c in self._collections),
                dense=dense,
                tables=tables,
                files=files,
            )
            return self._commit(job, new, servable)

    def _write_tables(
        self, job: _Job, new: Mapping[int, NewVersion]
    ) -> dict[int, tuple[dict[str, ServableTable], dict[str, ServableFile]]]:
        """Write all tables. Each is read once, whatever the number of shards.

        Args:
            new: Shard -> the version that is written.
        """
        done: dict[int, _Done] = {}
        for share, one in new.items():
            filesystem.make_dirs(filesystem.join(one.folder, "tables"))
            done[share] = _Done(one.folder)
        expired = None
        if self._how.evicts and job.saved.watermark is not None:
            expired = ExpiredRows(now=job.saved.watermark, max_share=self._how.max_share)
        advance: Advance = (lambda _: None) if job.progress is None else job.progress.advance
        for name, config in self._tables.items():
            file = f"tables/{_file_name(name)}.rows"
            missing = [share for share in new if name not in done[share].tables]
            if not missing:
                advance(sum(one.tables[name].rows for one in done.values()))
                continue
            written = export_table(
                saved_history(job.saved.tables, config),
                config,
                {share: filesystem.join(new[share].folder, file) for share in missing},
                file,
                coding=self._how.codings.of(name),
                shares=max(self._how.shards, 1),
                expired=expired,
                advance=advance,
            )
            for share, (table, record) in written.items():
                done[share].add(name, table, record)
        return {share: (dict(one.tables), dict(one.files)) for share, one in done.items()}

    def _write_dense(
        self, saved: _Checkpoint, new: NewVersion
    ) -> tuple[ServableDense, dict[str, ServableFile]]:
        self._restore(saved.prefix)
        filesystem.make_dirs(filesystem.join(new.folder, "dense"))
        module = self._model.module
        traced = None if self._how.as_module else self._trace(saved.heads)
        tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        weights = {name: one.detach() for name, one in tensors.items()}
        record = write_tensors(filesystem.join(new.folder, WEIGHTS), weights, {})
        files = {WEIGHTS: ServableFile(bytes=record.bytes, crc=record.crc32c)}
        dense = ServableDense(
            kind="module" if traced is None else "exported",
            weights=tuple(weights),
            floats=dict(self._model.widths),
            outputs=(saved.heads or ("prediction",)) if traced is None else traced.outputs,
            torch=str(torch.__version__),
            labels=saved.heads,
            factory=self._model.factory if traced is None else None,
            arguments=self._model.arguments if traced is None else {},
            times=() if traced is None else traced.times,
            ranges={name: saved.ranges[name] for name in self._model.widths if name in saved.ranges},
            towers=None if traced is None or self._towers is None else _describe_towers(self._towers),
        )
        if traced is not None:
            files[GRAPH] = _write(new.folder, GRAPH, traced.graph)
            for name, graph in {**self._trace_towers(), **self._trace_histories(saved.heads)}.items():
                files[name] = _write(new.folder, name, graph)
            if self._how.compiled:
                package = compile_graph(traced.graph, weights, traced.example)
                files[COMPILED] = _write(new.folder, COMPILED, package)
        return dense, files

    def _signature(self, dense: ServableDense) -> Signature:
        ids = dict.fromkeys(name for one in self._collections for name in one.features)
        reader = RequestReader(self._model.spec, ids, self._model.floats, self._model.kinds)
        outputs = tuple(
            TensorSpec(name=head, datatype="FP32", shape=(-1,), meaning=self._model.meaning(head))
            for head in dense.outputs
        )
        return Signature(inputs=reader.inputs, outputs=outputs)

    def _about(self, job: _Job) -> Servable:
        saved = job.saved
        return Servable(
            model=self._model.name,
            version=job.version,
            run=run_identity(filesystem.parent(saved.prefix)),
            checkpoint=filesystem.base_name(saved.prefix),
            step=saved.step,
            watermark=saved.watermark,
            created=self._clock(),
            digest=job.digest,
            log_places=saved.log_places,
            shards=self._how.shards,
            missing_rows=self._how.missing_rows,
        )

    def _digest(self, saved: _Checkpoint, version: str) -> str:
        """Return a digest that is equal for exports that would write the same."""
        how = self._how
        said = {
            "checkpoint": [filesystem.base_name(saved.prefix), saved.crc],
            "version": version,
            "codings": {name: how.codings.of(name) for name in self._tables},
            "shards": how.shards,
            "missing_rows": how.missing_rows,
            "evicts": [how.evicts, how.max_share],
            "module": how.as_module,
            "compiled": how.compiled,
            "heads": list(saved.heads),
            "features": None if self._model.spec is None else self._model.spec.to_json(),
            # Exports without their graphs differ.
            **({} if self._towers is None else {"towers": True}),
            **({} if self._ranker is None else {"histories": True}),
        }
        return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8).hexdigest()


def _describe_towers(model: RetrievalModel) -> ServableTowers:
    return ServableTowers(
        item_id=model.item_id,
        user=model.user_features,
        item=model.item_features,
        out=model.out,
        scale=1 / model.temperature,
    )


class _Done:
    """The complete tables of a folder, recorded so that a killed export can resume."""

    def __init__(self, folder: str) -> None:
        self._path = filesystem.join(folder, _DONE)
        self.tables: dict[str, ServableTable] = {}
        self.files: dict[str, ServableFile] = {}
        if filesystem.exists(self._path):
            try:
                plain = json.loads(filesystem.read_bytes(self._path))
                for name, (table, file) in plain.items():
                    entry = config_from_mapping(ServableTable, table)
                    self.tables[name] = entry
                    self.files[entry.file] = config_from_mapping(ServableFile, file)
            except (
                ValueError,
                TypeError,
                ConfigError,
            ):  # not ours: we write it atomically
                self.tables, self.files = {}, {}

    def add(self, name: str, table: ServableTable, file: ServableFile) -> None:
        """Record that a table is complete."""
        self.tables[name], self.files[table.file] = table, file
        plain = {name: [to_dict(one), to_dict(self.files[one.file])] for name, one in self.tables.items()}
        with filesystem.atomic_write(self._path) as out:
            out.write(json.dumps(plain).encode())


def _read(prefix: str, heads: Sequence[str]) -> _Checkpoint:
    chain = read_chain(prefix)
    last = chain[-1]
    progress = last.manifest.parts.get("progress", {}).get("value", {})
    clock = EventClock(wall=lambda: last.manifest.saved_at)
    try:
        clock.restore(progress.get("event_times", []))
        watermark = clock.now()
    except (TypeError, ValueError) as cause:
        raise CorruptFileError(prefix, 0, f"its event times cannot be read: {cause}") from cause
    trained = tuple(str(head) for head in progress.get("heads", ()))  # older checkpoints do not list them
    return _Checkpoint(
        prefix,
        last.manifest.step,
        last.manifest.saved_at,
        watermark,
        last.crc,
        SavedTables(chain),
        trained or tuple(heads),
        _log_places(prefix, last.manifest.parts.get("log_places", {})),
        {name: (float(least), float(most)) for name, (least, most) in progress.get("ranges", {}).items()},
    )


def _log_places(prefix: str, entry: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the delta log offsets of a checkpoint, by shard."""
    try:
        said = entry.get("value", {}).items()
        return {str(int(share)): (str(place["epoch"]), int(place["sequence"])) for share, place in said}
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise CorruptFileError(prefix, 0, f"its offsets in the delta log cannot be read: {cause}") from cause


def _tables_of(collections: Sequence[EmbeddingCollection]) -> dict[str, TableConfig]:
    """Return the tables of all collections, sorted by name."""
    found: dict[str, TableConfig] = {}
    for collection in collections:
        for name, config in collection.slot_tables.configs.items():
            known = found.setdefault(name, config)
            if known.dim != config.dim:
                raise ExportError(
                    f"two collections of the model have a table {name!r}, with rows of {known.dim} and of "
                    f"{config.dim} floats; give their slots different names"
                )
    return dict(sorted(found.items()))


def _added(one: ServableTable | None, other: ServableTable) -> ServableTable:
    """Return the manifest entry of two shards of a table together."""
    if one is None:
        return other
    rows = one.rows + other.rows
    mean = (one.mean_error * one.rows + other.mean_error * other.rows) / rows if rows else 0.0
    return replace(
        one,
        rows=rows,
        largest_error=max(one.largest_error, other.largest_error),
        mean_error=mean,
        expired=one.expired + other.expired,
    )


def _file_name(table: str) -> str:
    """Return a table's name as a file name: other characters than letters, digits, - and _ as their code."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else f"%{ord(c):x}" for c in table)


def _write(folder: str, name: str, data: bytes) -> ServableFile:
    with filesystem.atomic_write(filesystem.join(folder, name)) as file:
        file.write(data)
    return ServableFile(bytes=len(data), crc=native.crc32c(data))
