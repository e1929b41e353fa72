"""Predictor: asks a servable, in this process.

    with Predictor("servables/clicks") as predictor:
        predictor.predict({"user": ["ann", "bob"], "price": [3.5, 4.0]}).outputs["click"]

A request takes one call into the core for its features, one for its rows and one for the tensors that are
made of them; then the dense half runs. Tables are mapped, so that several predictors of one machine, in one
process or many, share the memory of a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, RequestError
from monolith.feature import Batch, Gatherer
from monolith.observe import Progress, progress
from monolith.serve.dense import CompiledDense, DenseGraph
from monolith.serve.manifest import WARM_UP, Servable, ServableDense, Signature, read_requests
from monolith.serve.python_module import ModuleRunner, make_module
from monolith.serve.request_reader import RawTensors, RequestReader
from monolith.serve.rows import FoundRows, MappedRows, RowsClaim, RowSource, Said, together
from monolith.serve.versions import HeldVersion, hold_version
from monolith.store import TableIds
from monolith.table import FrozenTable
from monolith.tensors.files import FileRecord, read_tensors

GRAPH = "dense/graph.pt2"
COMPILED = "dense/compiled.pt2"
WEIGHTS = "dense/weights.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a model says of some rows."""

    outputs: dict[str, Tensor]
    """By head: float32 of shape (rows,)."""
    missing: tuple[str, ...] = field(default=())
    """Shards that did not answer, and whose rows were read as zeros."""
    freshness: Said = field(default_factory=dict)
    """How new the rows are that it was made of; see `monolith.serve.rows`."""


class Runner(Protocol):
    """Runs the model on a batch."""

    def run(self, batch: Batch, deadline: float | None) -> tuple[Mapping[str, Tensor], Sequence[FoundRows]]:
        """Return predictions by head, and the rows that they were made of."""

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with other weights, from the next batch on."""


class Predictor:
    """Answers what a model says of raw rows. Thread-safe.

    Args:
        folder: A version of a servable, or the folder of its versions, of which the newest is taken. It is
            held, and so not removed, until this is closed.
        rows: Who answers rows; by default the tables of the folder, mapped.
        threads: That share large batches, the caller counted; by default as many as torch uses.
        allow_module: Whether a servable whose dense half is Python code may be imported and run.
        compiled: Whether to run what was compiled beside the graph (`monolith export --compile`): faster on
            few rows, equal to the trainer but for rounding, and code of whoever compiled it.
        verify: Whether every byte of the tables is checked; sizes, and all smaller files, always are.
        serve_withheld: Whether `folder` may be a version that is withheld, since its rows are not trusted. Of
            a folder of versions the newest one that is not withheld is taken in any case.
        show: Whether to say on standard error how far loading has come.
        clock: Unix seconds.

    Raises:
        FileMissingError: There is no servable, or a file of it is gone.
        CorruptFileError: A file is torn or altered.
        ConfigError: It has no tables of its own and `rows` is None, needs `allow_module`, or is withheld.
    """

    def __init__(
        self,
        folder: str,
        *,
        rows: RowSource | None = None,
        threads: int | None = None,
        allow_module: bool = False,
        compiled: bool = False,
        verify: bool = False,
        serve_withheld: bool = False,
        show: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._notice: Callable[[], str] = str
        self._compiled = compiled
        self._threads = torch.get_num_threads() if threads is None else threads
        with ExitStack() as opened:
            held = opened.enter_context(hold_version(folder, serve_withheld=serve_withheld))
            self._held = held
            servable = held.servable
            self._servable = servable
            dense, signature = servable.dense, servable.signature
            if dense is None or signature is None:
                raise ConfigError(
                    f"{held.folder} is {servable.part} of a sharded servable: it holds rows, and answers no "
                    "requests; open its entry"
                )
            check_files(held, tables=rows is None)
            if rows is None:
                rows = self._map_tables(held, opened, verify=verify, show=show)
                opened.callback(rows.close)
            self._rows = rows
            kinds = {one.name: one.kind for one in signature.inputs}
            self._reader = RequestReader(servable.spec, _ids_of(servable), dense.floats, kinds)
            self._signature = signature
            self._runner, self._weight_names = self._open_dense(held, dense, rows, allow_module)
            self._opened = opened.pop_all()

    # What it is

    @property
    def name(self) -> str:
        """Of the model."""
        return self._servable.model

    @property
    def version(self) -> str:
        return self._servable.version

    @property
    def step(self) -> int:
        """The training step that it is of."""
        return self._servable.step

    @property
    def watermark(self) -> int | None:
        """Unix seconds that nearly all events it was trained on had reached; None where events have none."""
        return self._servable.watermark

    @property
    def signature(self) -> Signature:
        """What it is asked with, and what it answers."""
        return self._signature

    @property
    def rows(self) -> RowSource:
        """Who answers its rows."""
        return self._rows

    def freshness(self) -> Said:
        """Return how new the rows are at this moment; see `monolith.serve.rows`.

        Rows may change until they are read: what an answer promises of its own rows is in the answer. Of rows
        on serving servers, which say it with each answer, this is how new the export is.
        """
        rows = self._rows
        claim = rows.claim if isinstance(rows, MappedRows) else claim_of(self._servable)
        return claim.said(self._clock())

    def follow(self, notice: Callable[[], str]) -> None:
        """Show, next to what is known of this version, what an operator should know of the trainer that it
        follows."""
        self._notice = notice

    @property
    def servable(self) -> Servable:
        """Its manifest."""
        return self._servable

    @property
    def folder(self) -> str:
        """Of its version."""
        return self._held.folder

    @property
    def about(self) -> Mapping[str, Any]:
        """What a person wants to know of it, as plain values."""
        servable = self._servable
        return {
            "model": servable.model,
            "version": servable.version,
            "step": servable.step,
            "watermark": servable.watermark,
            "created": servable.created,
            "run": servable.run,
            "following": self._notice(),
            "checkpoint": servable.checkpoint,
            "dense": None if servable.dense is None else servable.dense.kind,
            "rows": servable.rows,
            "bytes": servable.bytes,
            "shards": servable.shards,
            "tables": {
                name: {
                    "rows": one.rows,
                    "dim": one.dim,
                    "coding": one.coding,
                    "largest_error": one.largest_error,
                }
                for name, one in servable.tables.items()
            },
        }

    # Asking

    def predict(self, columns: RawTensors | Any, *, deadline: float | None = None) -> Prediction:
        """Return what the model says of rows.

        Args:
            columns: By name, as `signature` lists them; their forms are in `monolith.serve.request_reader`.
                Or a DataFrame of pandas or polars, or an Arrow table. Labels, and columns of a frame that the
                model does not read, are ignored.
            deadline: When the answer is of no use any more, by `time.monotonic`.

        Raises:
            RequestError: A column or a value is not what the model reads; names the column, and the row.
            DeadlineExceededError, UnavailableError: Rows did not come.
        """
        return self._predict(self._reader.batch(columns), deadline)

    def predict_batch(self, batch: Batch, *, deadline: float | None = None) -> Prediction:
        """Return what the model says of a batch that is ready, such as `FeatureSpec.make` returns.

        Raises:
            RequestError: It lacks a float feature.
            FeatureError: Its ids make no sense.
        """
        return self._predict(batch, deadline)

    def _predict(self, batch: Batch, deadline: float | None) -> Prediction:
        if not len(batch):
            heads = (one.name for one in self._signature.outputs)
            return Prediction({head: torch.empty(0) for head in heads}, freshness=self.freshness())
        outputs, found = self._runner.run(batch, deadline)
        missing = tuple(dict.fromkeys(name for one in found for name in one.missing))
        claims = [one.claim for one in found if one.claim is not None]
        said = together(claims or [claim_of(self._servable)]).said(self._clock())
        return Prediction(dict(outputs), missing, said)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Of the dense weights that it computes with."""
        return self._weight_names

    def swap_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with other dense weights, from the next batch on.

        Raises:
            RestoreError: They do not fit.
        """
        self._runner.swap(weights)

    def warm_up(self) -> int:
        """Answer the requests that were written beside the model; return how many there were."""
        path = filesystem.join(self._held.folder, WARM_UP)
        if WARM_UP not in self._servable.files:
            return 0
        count = 0
        for columns in read_requests(filesystem.read_bytes(path), path):
            self.predict(columns)
            count += 1
        return count

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have something closed together with this predictor."""
        self._opened.callback(callback)

    def close(self) -> None:
        """Let go of tables and version. Nobody may be asking. Closing again does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _map_tables(self, held: HeldVersion, opened: ExitStack, *, verify: bool, show: bool) -> MappedRows:
        servable = held.servable
        if servable.shards:
            raise ConfigError(
                f"the rows of {held.folder} are spread over {servable.shards} serving servers: serve it with "
                "monolith serve --role entry, or export without --shards"
            )
        total = sum(servable.files[table.file].bytes for table in servable.tables.values())
        bar: AbstractContextManager[Progress | None] = nullcontext()
        if show:
            bar = progress(f"Loading {servable.model} {servable.version}", total, "bytes")
        tables = {}
        with bar as shown:
            for name, entry in servable.tables.items():
                table = FrozenTable(filesystem.join(held.folder, entry.file), verify=verify)
                opened.callback(table.close)
                table.prefault(shown)
                tables[name] = table
        return MappedRows(tables, threads=self._threads, claim=claim_of(servable))

    def _open_dense(
        self, held: HeldVersion, dense: ServableDense, rows: RowSource, allow_module: bool
    ) -> tuple[Runner, tuple[str, ...]]:
        folder, files = held.folder, held.servable.files
        record = files[WEIGHTS]
        path = filesystem.join(folder, WEIGHTS)
        weights = read_tensors(path, FileRecord(record.bytes, record.crc))
        if dense.kind == "module":
            if not allow_module:
                raise ConfigError(
                    f"{folder}: its dense half is Python code, made by {dense.factory}. To import and run "
                    "that code, say so: allow_module=True, or monolith serve --allow-module"
                )
            assert dense.factory is not None
            module = make_module(dense.factory, dense.arguments)
            return ModuleRunner(module, weights, rows, dense.labels), tuple(weights)
        path = filesystem.join(folder, GRAPH)
        ordered = {name: weights[name] for name in dense.weights}
        graph: DenseGraph | CompiledDense
        if self._compiled:
            if COMPILED not in files:
                raise ConfigError(f"{folder} has nothing compiled in it; export it with --compile")
            graph = CompiledDense(filesystem.join(folder, COMPILED), ordered)
        else:
            graph = DenseGraph(filesystem.read_bytes(path), ordered, path)
        workers = native.Workers(self._threads)
        gatherers = [
            Gatherer(collection.plan(rows.tables), workers) for collection in held.servable.collections
        ]
        return GraphRunner(graph, gatherers, rows, tuple(dense.floats), dense.outputs), tuple(ordered)


class GraphRunner:
    """Looks rows up, makes tensors of them, and runs an exported graph."""

    def __init__(
        self,
        graph: DenseGraph | CompiledDense,
        gatherers: Sequence[Gatherer],
        rows: RowSource,
        floats: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        self._graph = graph
        self._gatherers = gatherers
        self._rows = rows
        self._floats = tuple(floats)
        self._outputs = tuple(outputs)

    def run(self, batch: Batch, deadline: float | None) -> tuple[Mapping[str, Tensor], Sequence[FoundRows]]:
        ids = batch.ids
        all_found: list[FoundRows] = []
        tensors: list[Tensor] = []
        with torch.inference_mode():
            for gatherer in self._gatherers:
                gathered = gatherer.read(ids)
                found = self._rows.lookup(TableIds(gathered.ids, gathered.sizes), deadline=deadline)
                all_found.append(found)
                tensors += gathered.gather(found.rows)
            try:
                floats = [batch.floats[name] for name in self._floats]
            except KeyError as cause:
                raise RequestError(f"the batch has no float feature {cause.args[0]!r}") from cause
            outputs = self._graph(tensors, floats)
        return dict(zip(self._outputs, outputs, strict=True)), all_found

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        self._graph.swap(weights)


def claim_of(servable: Servable) -> RowsClaim:
    """Return how new the rows of an export are."""
    return RowsClaim(servable.step, servable.step, servable.created, servable.watermark or 0)


def _ids_of(servable: Servable) -> list[str]:
    """Return the features of ids of all collections, each once."""
    return list(dict.fromkeys(name for one in servable.collections for name in one.inputs))


def check_files(held: HeldVersion, *, tables: bool) -> None:
    """Compare the files of a version with its manifest: their sizes, and of all but tables every byte.

    Args:
        tables: Whether those must be there.

    Raises:
        FileMissingError: One is gone.
        CorruptFileError: One is of another size, or altered.
    """
    rows = {table.file for table in held.servable.tables.values()}
    for name, record in held.servable.files.items():
        path = Path(held.folder, name)
        if name in rows and not tables:
            continue
        try:
            size = path.stat().st_size
        except FileNotFoundError as cause:
            raise FileMissingError(f"{held.folder} lacks its file {name}; export it again") from cause
        if size != record.bytes:
            at = min(size, record.bytes)
            raise CorruptFileError(str(path), at, f"it has {size} bytes, {record.bytes} were written")
        if name not in rows and native.crc32c(path.read_bytes()) != record.crc:
            raise CorruptFileError(str(path), 0, "its checksum does not match: it was altered")
