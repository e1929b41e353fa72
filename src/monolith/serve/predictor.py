"""Predictor: loads a servable and answers requests in this process.

    with Predictor("servables/clicks") as predictor:
        predictor.predict({"user": ["ann", "bob"], "price": [3.5, 4.0]}).outputs["click"]

The steps of one prediction, for n rows:

    columns     values by name, each of n rows            RequestReader.batch: one call into the core
    batch       ragged IDs and floats (n, width)
    rows        float32, one row per distinct ID          RowSource.gather: one call into the core for mapped
    tensors     (n, ...) per layout                       tables, or serving servers
    dense half  float32 (n,) per head                     DenseGraph, CompiledDense or a Python module

Tables are mapped, so that predictors of one machine share the memory of a table, in one process or in many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, Unpack

import torch
from torch import Tensor

from monolith import concurrency, filesystem, native
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, RequestError
from monolith.feature import Batch, FeatureIds, Gatherer
from monolith.feature.gathering import PackedBatch
from monolith.feature.ranges import far_outside
from monolith.observe import Progress, progress
from monolith.serve.candidates import CandidateColumns, CandidateRunner, find_candidates
from monolith.serve.dense import MOST_BYTES, CompiledDense, DenseGraph
from monolith.serve.histories import HistoryCache, HistoryGraphs
from monolith.serve.jagged import JaggedInputs
from monolith.serve.manifest import WARM_UP, Servable, ServableDense, Signature, read_bounded, read_requests
from monolith.serve.python_module import ModuleRunner, make_module
from monolith.serve.request_reader import RawTensors, RequestReader
from monolith.serve.retrieval import ChangedRows, RowsListener, TowerRunner
from monolith.serve.rows import FoundRows, MappedRows, RowsClaim, RowSource, Said, together
from monolith.serve.versions import LockedVersion, lock_version
from monolith.table import FrozenTable
from monolith.tensors.files import FileRecord, read_tensors, record_of

GRAPH = "dense/graph.pt2"
COMPILED = "dense/compiled.pt2"
WEIGHTS = "dense/weights.safetensors"
TOWER_GRAPHS: Mapping[str, str] = {"user": "dense/user_vector.pt2", "item": "dense/item_vector.pt2"}
"""Side of a retrieval model -> the graph of its tower."""
HISTORY_GRAPHS = ("dense/encode_histories.pt2", "dense/with_histories.pt2")
"""The graphs that rank the items of a user with the history encoded once; see `monolith.serve.histories`."""


_REQUESTS_CHECKED = 100
"""The floats of so many requests are compared with those of the training data, after a version is loaded."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """The answer of a model to a request of n rows.

    Examples:
        >>> import torch
        >>> from monolith import Prediction
        >>> answer = Prediction({"click": torch.tensor([0.12, 0.40])}, missing=("1",))  # see Predictor
        >>> answer.outputs["click"], answer.missing  # rows of shard 1 were read as zeros
        (tensor([0.1200, 0.4000]), ('1',))
    """

    outputs: dict[str, Tensor]
    """Head -> float32 of shape (rows,)."""
    missing: tuple[str, ...] = field(default=())
    """Shards that did not answer; their rows were read as zeros."""
    freshness: Said = field(default_factory=dict)
    """The claim about the rows it was made of; see `monolith.serve.rows`."""


class Runner(Protocol):
    """Runs a model on a batch: as a graph, or as a Python module."""

    def run(self, batch: Batch, deadline: float | None) -> tuple[Mapping[str, Tensor], Sequence[FoundRows]]:
        """Return predictions by head, and the rows they were made of."""

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Use other weights from the next batch on."""


class LoadOptions(TypedDict, total=False):
    """How a `Predictor` loads a servable."""

    threads: int | None
    """Threads for large batches, the calling one included; by default as many as torch uses."""
    allow_module: bool
    """Whether a servable whose dense half is Python code may be imported and run."""
    compiled: bool
    """Whether to run the compiled package next to the graph (`monolith export --compile`): faster for few
    rows, equal to the trainer except for rounding, and native code of its author."""
    verify: bool
    """Whether every byte of the tables is checked; sizes, and all smaller files, always are."""
    serve_withheld: bool
    """Whether `folder` may be a withheld version, whose rows are not trusted. In a folder of versions,
    withheld ones are always skipped."""
    memory_bytes: int | None
    """Memory for rows and for finding them; by default all rows are in memory. With less, the rows that are
    asked for most are, and all others are read from the disk, those of a request at once."""
    show: bool
    """Whether to show the progress of loading on standard error; by default it is shown."""


class Predictor:
    r"""Answers raw rows with a loaded servable. Thread-safe.

    Shapes: n rows in, one float32 tensor of shape (n,) per head out.

    Args:
        folder: A version of a servable, or the folder of its versions, of which the newest is loaded. It is
            locked against removal until this is closed.
        rows: Looks up rows; by default the tables of the folder, mapped.
        clock: Unix seconds.
        options: See `LoadOptions`.

    Raises:
        FileMissingError: The servable or one of its files is missing.
        CorruptFileError: A file is truncated or altered.
        ConfigError: The servable has no tables of its own and `rows` is None, needs `allow_module`, or is
            withheld.

    Examples:
        >>> from pathlib import Path
        >>> from monolith import Predictor, Run, load_run_config
        >>> _ = Path("clicks.csv").write_text("user,item,click\n" + "ann,7,1\nbob,8,0\n" * 100)
        >>> config = load_run_config(
        ...     code={
        ...         "data.path": "clicks.csv",
        ...         "features": {"user": {"kind": "string"}, "item": {"kind": "int"}},
        ...         "labels": {"click": {}},
        ...         "model": {"type": "deepfm", "dim": 4, "hidden": [8]},
        ...         "train.model_dir": "run",
        ...         "data.split": {"evaluate": 0.1},
        ...         "export.when_saving": True,
        ...     }
        ... )
        >>> _ = Run(config).run()
        >>> with Predictor("run/exported_models") as predictor:
        ...     predictor.predict({"user": ["ann", "bob"], "item": [7, 8]}).outputs["click"].shape
        torch.Size([2])
    """

    def __init__(
        self,
        folder: str,
        *,
        rows: RowSource | None = None,
        clock: Callable[[], float] = concurrency.time,
        **options: Unpack[LoadOptions],
    ) -> None:
        if unknown := options.keys() - LoadOptions.__optional_keys__:
            raise TypeError(f"Predictor has no option {min(unknown)!r}")
        self._clock = clock
        self._notice: Callable[[], str] = str
        threads = options.get("threads")
        self._threads = torch.get_num_threads() if threads is None else threads
        with ExitStack() as opened:
            serve_withheld = options.get("serve_withheld", False)
            locked = opened.enter_context(lock_version(folder, serve_withheld=serve_withheld))
            self._locked = locked
            servable = locked.servable
            self._servable = servable
            dense, signature = servable.dense, servable.signature
            if dense is None or signature is None:
                raise ConfigError(
                    f"{locked.folder} is {servable.part} of a sharded servable: it has rows only and cannot "
                    "answer requests; open its entry"
                )
            check_files(locked, tables=rows is None)
            in_memory = rows is None and options.get("memory_bytes") is None
            if rows is None:
                rows = self._map_tables(locked, opened, options)
                opened.callback(rows.close)
            self._rows = rows
            kinds = {one.name: one.kind for one in signature.inputs}
            self._reader = RequestReader(servable.spec, _ids_of(servable), dense.floats, kinds)
            self._input_names = tuple(kinds)
            self._signature = signature
            self._ranking: CandidateRunner | None = None
            self._histories: HistoryGraphs | None = None
            self._towers: dict[str, TowerRunner] = {}
            self._listeners: tuple[RowsListener, ...] = ()
            self._runner, self._weight_names = self._open_dense(locked, dense, rows, options)
            self._ranges = _RangeCheck(servable.model, dense.ranges)
            self._graph_runner = self._runner if isinstance(self._runner, GraphRunner) else None
            self.answers_here = in_memory and self._graph_runner is not None
            """Whether a prediction waits for no other process and no disk, and runs no code of a user."""
            self._opened = opened.pop_all()

    # Description

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._servable.model

    @property
    def version(self) -> str:
        return self._servable.version

    @property
    def step(self) -> int:
        """Training step of the export."""
        return self._servable.step

    @property
    def watermark(self) -> int | None:
        """Event time, in Unix seconds, that nearly all trained events had reached; None without event
        times."""
        return self._servable.watermark

    @property
    def signature(self) -> Signature:
        """Inputs and outputs of the model."""
        return self._signature

    @property
    def rows(self) -> RowSource:
        """The source of its rows."""
        return self._rows

    def freshness(self) -> Said:
        """Return how new the rows are at this moment; see `monolith.serve.rows`.

        Rows may change until they are read, so each answer has a claim of its own. For rows on serving
        servers, which send claims with their answers, this is the claim of the export.
        """
        return (self._rows.claim or claim_of(self._servable)).said(self._clock())

    def follow(self, notice: Callable[[], str]) -> None:
        """Show a warning about the followed trainer in `about`."""
        self._notice = notice

    @property
    def servable(self) -> Servable:
        """The manifest of the servable."""
        return self._servable

    @property
    def folder(self) -> str:
        """Folder of the loaded version."""
        return self._locked.folder

    @property
    def about(self) -> Mapping[str, Any]:
        """A description of the version as plain values."""
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

    # Prediction

    def predict(self, columns: RawTensors | Any, *, deadline: float | None = None) -> Prediction:
        """Return the predictions for some rows.

        Args:
            columns: By name, as `signature` lists them; their forms are in `monolith.serve.request_reader`.
                A column with one row, next to columns of more, holds for all rows: so a request has the
                features of one user once, and those of many items; see `monolith.serve.candidates`.
                Or a DataFrame of pandas or polars, or an Arrow table. Labels, and columns of a frame that the
                model does not read, are ignored.
            deadline: When the client stops waiting, by `concurrency.monotonic`.

        Raises:
            RequestError: A column or a value does not fit the model; names the column and the row.
            DeadlineExceededError, UnavailableError: Serving servers did not answer.
        """
        if isinstance(columns, native.PackedRows) and self._graph_runner is not None:
            packed = self._reader.packed_batch(columns)
            self._ranges.look(packed.floats)
            return self._answer(*self._graph_runner.run(packed, deadline))
        if (asked := self._candidates_in(columns)) is not None:
            if self._ranges.left:
                self._ranges.look(self._full_batch(asked).floats)
            return self._predict_candidates(asked, deadline)
        batch = self._reader.batch(columns)
        self._ranges.look(batch.floats)
        return self._predict(batch, deadline)

    def _candidates_in(self, columns: Any) -> CandidateColumns | native.PackedRanking | None:
        """Return the columns of a ranking request by side; None if this is none."""
        if isinstance(columns, CandidateColumns | native.PackedRanking):
            return columns
        if not isinstance(columns, Mapping):
            return None
        try:
            if len({*map(len, columns.values())}) < 2:
                return None
        except TypeError:
            return None
        return find_candidates(columns, self._input_names)

    def _predict_candidates(
        self, asked: CandidateColumns | native.PackedRanking, deadline: float | None
    ) -> Prediction:
        if self._ranking is not None and (isinstance(asked, native.PackedRanking) or asked.rows):
            found = self._ranking.run(asked, deadline)
            if found is not None:
                return self._answer(*found)
        return self._predict(self._full_batch(asked), deadline)

    def _full_batch(self, asked: CandidateColumns | native.PackedRanking) -> Batch:
        return self._reader.batch(asked.full() if isinstance(asked, CandidateColumns) else asked)

    def pack(self, request: native.WireRequest) -> native.PackedRows | native.PackedRanking | None:
        """Return the features of a request as it was received, for `predict`; see `RequestReader.pack`."""
        return self._reader.pack(request)

    def read(self, columns: RawTensors | Any) -> Batch:
        """Return the features that the model is given for some rows: IDs and floats by feature.

        Takes the same columns as `predict`, and works after `close`, too.

        Raises:
            RequestError: A column or a value does not fit the model; names the column and the row.
        """
        asked = self._candidates_in(columns)
        return self._reader.batch(columns) if asked is None else self._full_batch(asked)

    def predict_batch(self, batch: Batch, *, deadline: float | None = None) -> Prediction:
        """Return the predictions for a ready batch, such as `FeatureSpec.make` returns.

        Raises:
            RequestError: The batch lacks a float feature.
            FeatureError: Its IDs are malformed.
        """
        return self._predict(batch, deadline)

    def _predict(self, batch: Batch, deadline: float | None) -> Prediction:
        if not len(batch):
            heads = (one.name for one in self._signature.outputs)
            return Prediction({head: torch.empty(0) for head in heads}, freshness=self.freshness())
        return self._answer(*self._runner.run(batch, deadline))

    def _answer(self, outputs: Mapping[str, Tensor], found: Sequence[FoundRows]) -> Prediction:
        missing = tuple(dict.fromkeys(name for one in found for name in one.missing))
        claims = [one.claim for one in found if one.claim is not None]
        said = together(claims or [claim_of(self._servable)]).said(self._clock())
        return Prediction(dict(outputs), missing, said)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the dense weights."""
        return self._weight_names

    def swap_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Use other dense weights from the next batch on.

        Raises:
            RestoreError: Their names or shapes do not fit.
        """
        self._runner.swap(weights)
        if self._histories is not None:
            self._histories.swap(weights)
        # Towers are swapped by the index of items, together with the vectors that it makes of them.
        self.rows_changed(ChangedRows(weights=weights))

    @property
    def histories(self) -> HistoryGraphs | None:
        """What ranks items with the history of a user encoded once; None if the model does not."""
        return self._histories

    def keep_histories(self, cache: HistoryCache, model: str) -> bool:
        """Keep encoded histories for the next request of the same user, until this predictor is closed.

        Args:
            cache: Where they are kept, with those of other models.
            model: The name of the model in its metrics.

        Returns:
            Whether the model encodes histories once for many items.
        """
        if self._histories is None:
            return False
        self._histories.keep_in(cache, model)
        self._opened.callback(self._histories.close)
        return True

    # Retrieval

    @property
    def towers(self) -> Mapping[str, TowerRunner]:
        """The towers of a retrieval model, `user` and `item`; empty of other models."""
        return self._towers

    def on_rows(self, listener: RowsListener) -> None:
        """Call `listener` after rows or weights changed, until this predictor is closed."""
        self._listeners = (*self._listeners, listener)

    def rows_changed(self, changed: ChangedRows | None) -> None:
        """Tell listeners that rows were changed by a delta; None if any row may have changed."""
        for listener in self._listeners:
            listener(changed)

    def warm_up(self) -> int:
        """Answer the warm-up requests of the servable; return how many there were."""
        path = filesystem.join(self._locked.folder, WARM_UP)
        if WARM_UP not in self._servable.files:
            return 0
        count = 0
        for columns in read_requests(read_bounded(path), path):
            self.predict(columns)
            count += 1
        return count

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` when this predictor is closed."""
        self._opened.callback(callback)

    def close(self) -> None:
        """Unmap the tables and unlock the version. No request may be running. Closing again does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Loading

    def _map_tables(self, locked: LockedVersion, opened: ExitStack, options: LoadOptions) -> MappedRows:
        servable = locked.servable
        if servable.shards:
            raise ConfigError(
                f"the rows of {locked.folder} are spread over {servable.shards} serving servers: serve it "
                "with monolith serve --role entry, or export without --shards"
            )
        total = sum(servable.files[table.file].bytes for table in servable.tables.values())
        bar: AbstractContextManager[Progress | None] = nullcontext()
        if options.get("show", True):
            bar = progress(f"Loading {servable.model} {servable.version}", total, "bytes")
        tables = {}
        with bar as shown:
            for name, entry in servable.tables.items():
                table = FrozenTable(
                    filesystem.join(locked.folder, entry.file), verify=options.get("verify", False)
                )
                opened.callback(table.close)
                tables[name] = table
            rows = MappedRows(
                tables,
                threads=self._threads,
                claim=claim_of(servable),
                memory_bytes=options.get("memory_bytes"),
            )
            rows.files.prefault(shown)
        return rows

    def _open_dense(
        self, locked: LockedVersion, dense: ServableDense, rows: RowSource, options: LoadOptions
    ) -> tuple[Runner, tuple[str, ...]]:
        folder, files = locked.folder, locked.servable.files
        record = files[WEIGHTS]
        path = filesystem.join(folder, WEIGHTS)
        weights = read_tensors(path, FileRecord(record.bytes, record.crc))
        if dense.kind == "module":
            if not options.get("allow_module"):
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
        plans = [collection.plan(rows.tables) for collection in locked.servable.collections]
        jagged = JaggedInputs(plans, dense.times)
        if options.get("compiled"):
            if COMPILED not in files:
                raise ConfigError(f"{folder} has no compiled package; export it with --compile")
            graph = CompiledDense(filesystem.join(folder, COMPILED), ordered)
        else:
            graph = DenseGraph(read_bounded(path, MOST_BYTES), ordered, path, record=not jagged)
        workers = native.Workers(self._threads)
        gatherers = [Gatherer(plan, workers) for plan in plans]
        if dense.towers is not None:
            for side, file in TOWER_GRAPHS.items():
                where = filesystem.join(folder, file)
                tower = DenseGraph(read_bounded(where, MOST_BYTES), ordered, where, record=not jagged)
                self._towers[side] = TowerRunner(locked.servable, side, tower, gatherers, rows)
        if all(one in files for one in HISTORY_GRAPHS):
            encode, following = (
                DenseGraph(read_bounded(where, MOST_BYTES), ordered, where, record=False)
                for where in (filesystem.join(folder, one) for one in HISTORY_GRAPHS)
            )
            self._histories = HistoryGraphs(encode, following, jagged)
        if self._histories is not None or (isinstance(graph, DenseGraph) and not jagged):
            by_side = self._histories or graph
            assert not isinstance(by_side, CompiledDense)
            inputs = [one.name for one in self._reader.inputs]
            self._ranking = CandidateRunner(locked.servable, by_side, rows, workers, inputs)
        runner = GraphRunner(graph, gatherers, rows, tuple(dense.floats), dense.outputs, jagged)
        return runner, tuple(ordered)


class _RangeCheck:
    """Warns, once for each feature, if floats of the first requests are far outside of the training data.

    Threads may count one request for another, which does no harm.
    """

    def __init__(self, model: str, ranges: Mapping[str, tuple[float, float]]) -> None:
        self._model = model
        self._ranges = dict(ranges)
        self.left = _REQUESTS_CHECKED if ranges else 0
        """Requests that are still looked at."""

    def look(self, floats: Mapping[str, Tensor]) -> None:
        if self.left <= 0:
            return
        self.left -= 1
        for name, number in far_outside(self._ranges, floats).items():
            found = self._ranges.pop(name, None)
            if found is not None:
                _log.warning(
                    "model %r: a request has %.6g for %r, as the model reads it, and training had %.6g to "
                    "%.6g: the client may send it in another unit, or scaled already. Compare its values "
                    "with those of the training data (said once)",
                    self._model,
                    number,
                    name,
                    *found,
                )


class GraphRunner:
    """Looks up rows, gathers them into tensors, and runs an exported graph."""

    def __init__(
        self,
        graph: DenseGraph | CompiledDense,
        gatherers: Sequence[Gatherer],
        rows: RowSource,
        floats: Sequence[str],
        outputs: Sequence[str],
        jagged: JaggedInputs | None = None,
    ) -> None:
        self._graph = graph
        self._gatherers = gatherers
        self._rows = rows
        self._floats = tuple(floats)
        self._outputs = tuple(outputs)
        self._jagged = jagged

    def run(
        self, batch: Batch | PackedBatch, deadline: float | None
    ) -> tuple[Mapping[str, Tensor], Sequence[FoundRows]]:
        ids = batch.ids
        all_found: list[FoundRows] = []
        tensors: list[Tensor] = []
        with torch.inference_mode():
            for gatherer in self._gatherers:
                # ids (n_ids,) with repeats -> distinct IDs (u,), then rows float32 (sum of u x width,), then
                # one tensor (n, ...) per layout: one call into the core per collection if the rows are here.
                made, found = self._rows.gather(gatherer, ids, deadline=deadline)
                all_found.append(found)
                tensors += made
            if self._jagged:
                assert isinstance(ids, FeatureIds), "requests with lists are not packed"
                tensors = self._jagged.tensors(tensors, ids)
            try:
                floats = [batch.floats[name] for name in self._floats]
            except KeyError as cause:
                raise RequestError(f"the batch has no float feature {cause.args[0]!r}") from cause
            outputs = self._graph(tensors, floats)
        return dict(zip(self._outputs, outputs, strict=True)), all_found

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        self._graph.swap(weights)


def claim_of(servable: Servable) -> RowsClaim:
    """Return the claim of an export's rows."""
    return RowsClaim(servable.step, servable.step, servable.created, servable.watermark or 0)


def _ids_of(servable: Servable) -> list[str]:
    """Return the names of the ID features of all collections, each once."""
    return list(dict.fromkeys(name for one in servable.collections for name in one.inputs))


def check_files(locked: LockedVersion, *, tables: bool) -> None:
    """Compare the files of a version with its manifest: their sizes, and of all but tables every byte.

    Args:
        tables: Whether the files of tables must exist.

    Raises:
        FileMissingError: A file is missing.
        CorruptFileError: A file has another size, or was altered.
    """
    rows = {table.file for table in locked.servable.tables.values()}
    for name, record in locked.servable.files.items():
        path = Path(locked.folder, name)
        if name in rows and not tables:
            continue
        try:
            size = path.stat().st_size
        except FileNotFoundError as cause:
            raise FileMissingError(f"{locked.folder} lacks its file {name}; export it again") from cause
        if size != record.bytes:
            at = min(size, record.bytes)
            raise CorruptFileError(str(path), at, f"it has {size} bytes, {record.bytes} were written")
        if name not in rows and record_of(str(path)).crc32c != record.crc:
            raise CorruptFileError(str(path), 0, "its checksum does not match: it was altered")
