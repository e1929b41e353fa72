"""`monolith export RUN --to DIR`: a checkpoint becomes a servable folder."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import filesystem
from monolith.cli.evaluation import ReadingBar, settled
from monolith.cli.options.export import ExportOptions
from monolith.cli.options.jobs import EmbeddingsOptions
from monolith.cli.options.train import EvaluateOptions
from monolith.cli.task_config import load_reading, load_reading_run, train_options
from monolith.cli.terminal import say, warn
from monolith.data import Records, Stream, format_of
from monolith.errors import ConfigError, MissingExtraError
from monolith.feature import Batch, ColumnKind, IdFeature
from monolith.filesystem import atomic_write
from monolith.observe import Progress, progress
from monolith.observe.progress import describe_bytes
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig, RowCoding, RunConfig
from monolith.runtime.export import export_folder, how_to_export, task_exporter
from monolith.runtime.report import read_run_manifest
from monolith.serve.exporter import ExportedServable
from monolith.serve.python_module import PythonModule
from monolith.tensors import RaggedTensor
from monolith.train import Candidates, Task

FACTORY = "monolith.cli.export:served_module"


def run(options: ExportOptions) -> int:
    """Export one checkpoint, and say what to do with it."""
    options = as_trained(with_run(options))
    task, settings = load_reading_run(reading_options(options))
    export, config = settings.export, settings.train
    export = with_flags(export, options)
    root = options.to or export_folder(export, config)
    how = replace(
        how_to_export(export, config, as_module=options.as_module),
        keep=options.keep,
        compiled=options.compile,
    )
    checkpoint, _, why = settled(config)
    with ExitStack() as opened:
        exporter = opened.enter_context(
            task_exporter(
                task,
                config,
                how,
                factory=FACTORY if options.as_module else None,
                arguments=module_arguments(options, settings),
                inputs=export.inputs,
                warm_up=False if options.no_warm_up else export.warm_up_file or True,
                say=warn,
            )
        )
        shown: Progress | None = None
        if not options.quiet:
            total = exporter.rows_of(checkpoint)
            shown = opened.enter_context(progress("Exporting", total, "rows"))
        made = exporter.export(checkpoint, root, version=options.version, progress=shown)
    if options.json:
        sys.stdout.write(json.dumps({**to_json(made, task, checkpoint), "chosen": why}) + "\n")
    else:
        say(f"checkpoint {checkpoint} ({why})")
        for line in described(made, root):
            say(line)
    return 0


def with_flags(export: ExportConfig, options: ExportOptions) -> ExportConfig:
    """Return what the config says, with what flags say over it.

    Raises:
        ConfigError: A coding is none.
    """
    known = get_args(RowCoding)
    tables: dict[str, Any] = {}
    for text in options.coding:
        table, equals, given = text.rpartition("=")
        coding: Any = given
        if coding not in known or (equals and not table):
            raise ConfigError(f"--coding: expected {', '.join(known)}, or TABLE=CODING, got {text!r}")
        if table:
            tables[table] = coding
        else:
            export = replace(export, coding=coding, codings={})
    if options.missing_rows is not None and options.missing_rows not in ("refuse", "default"):
        raise ConfigError(f"--missing-rows: expected refuse or default, got {options.missing_rows!r}")
    missing: Any = options.missing_rows or export.missing_rows
    if options.inputs is not None and options.inputs not in ("raw", "batch"):
        raise ConfigError(f"--inputs: expected raw or batch, got {options.inputs!r}")
    inputs: Any = options.inputs or export.inputs
    return replace(
        export,
        codings={**export.codings, **tables},
        shards=export.shards if options.shards is None else options.shards,
        missing_rows=missing,
        inputs=inputs,
    )


# Which task


def with_run(options: ExportOptions) -> ExportOptions:
    """Return the options with the run that --model-dir names, if it is named so.

    Raises:
        ConfigError: Another is named, too.
    """
    if options.model_dir is None:
        return options
    if options.run is not None:
        raise ConfigError(f"export: {options.run} and --model-dir both name the run; give one of them")
    return replace(options, run=options.model_dir)


def as_trained(options: ExportOptions, command: str = "export") -> ExportOptions:
    """Return the options with the task that the run was trained with, unless they name another.

    Raises:
        ConfigError: Nothing says what it was.
    """
    if options.task is not None or options.config is not None:
        return options
    if options.run is None:
        raise ConfigError(
            "export: needs the run to export, as in: monolith export runs/1 --to servables; or --config"
        )
    starts = read_run_manifest(options.run) if filesystem.is_folder(options.run) else []
    trained = train_options(starts[0].get("command", ())) if starts else None
    if trained is None or (trained.task is None and trained.config is None):
        raise ConfigError(
            f"{command}: nothing in {options.run} says which task was trained there; name it with --task "
            "path/to/file.py:Name, or the run's config file with --config"
        )
    say(f"the task is as {options.run} was trained: {trained.task or trained.config}")
    return replace(options, task=trained.task, config=trained.config, set=(*trained.set, *options.set))


def reading_options(options: ExportOptions) -> EvaluateOptions:
    return EvaluateOptions(
        task=options.task,
        model_dir=options.run,
        config=options.config,
        set=options.set,
        checkpoint=options.checkpoint,
        threads=options.threads,
        quiet=options.quiet,
    )


def module_arguments(options: ExportOptions, settings: RunConfig) -> dict[str, Any]:
    """Return what `served_module` is called with where the model is served as code."""
    if not options.as_module:
        return {}
    config = None if options.config is None else str(options.config.absolute())
    return {
        "task": settings.job.task,
        "config": config,
        "settings": list(options.set),
        "model_dir": os.path.abspath(settings.train.model_dir),  # noqa: PTH100  a remote one stays
        "folder": str(Path.cwd()),
    }


def served_module(
    task: str | None, config: str | None, settings: Sequence[str], model_dir: str, folder: str
) -> PythonModule:
    """Make the model of a task again, where it is served.

    Args:
        folder: Where the export was started: files of the task's code are found from there.
    """
    if task is not None and ".py:" in task and not Path(task.partition(":")[0]).exists():
        task = str(Path(folder, task))
    options = EvaluateOptions(
        task=task,
        model_dir=model_dir,
        config=None if config is None else Path(config),
        set=tuple(settings),
    )
    made, _ = load_reading_run(options)
    return PythonModule(made.model(), made.predictions)


# What is said


def described(made: ExportedServable, root: str) -> list[str]:
    """Return a description of the exported version, line by line."""
    servable = made.servable
    where = f"{made.folder} is there already" if made.was_there else f"exported {made.folder}"
    lines = [
        f"{where}: {servable.model}, step {servable.step:,}, {servable.rows:,} rows, "
        f"{describe_bytes(made.bytes)}"
        + (f" over {servable.shards} serving servers" if servable.shards else "")
    ]
    for name, table in servable.tables.items():
        if table.coding != "fp32" or table.expired:
            gone = f", {table.expired:,} expired rows left out" if table.expired else ""
            lines.append(
                f"  {name}: {table.coding}, off by at most {table.largest_error:.3g}, "
                f"{table.mean_error:.3g} on average{gone}"
            )
    if made.removed:
        lines.append(f"  removed the versions {', '.join(made.removed)}")
    if made.in_use:
        lines.append(f"  kept the versions {', '.join(made.in_use)}: a server uses them")
    if made.withheld:
        lines.append(
            "  withheld from servers: publishing of the run is paused, and this checkpoint is of the first "
            f"bad step or later. To serve it all the same: monolith serve {root} --serve-withheld "
            f"{servable.version}"
        )
    else:
        lines.append(f"next: monolith serve {root}")
    return lines


def to_json(made: ExportedServable, task: Task, checkpoint: str) -> Mapping[str, Any]:
    servable = made.servable
    return {
        "task": task.name,
        "checkpoint": checkpoint,
        "step": servable.step,
        "folder": made.folder,
        "version": servable.version,
        "was_there": made.was_there,
        "rows": servable.rows,
        "bytes": made.bytes,
        "watermark": servable.watermark,
        "shards": servable.shards,
        "tables": {
            name: {
                "rows": table.rows,
                "coding": table.coding,
                "largest_error": table.largest_error,
                "mean_error": table.mean_error,
                "expired": table.expired,
            }
            for name, table in servable.tables.items()
        },
        "removed": list(made.removed),
        "held": list(made.in_use),
        "withheld": made.withheld,
    }


NEIGHBOURS, BUILD_WIDTH, SEARCH_WIDTH = 32, 200, 128
"""Of the graph: edges of a node, and how many nodes are looked at while it is built and searched."""

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class AnnIndex(Protocol):
    """Vectors by id, to be searched."""

    library: str

    def search(self, queries: Floats, k: int) -> Ids:
        """Return the ids of the k best of each query, (queries, k); -1 where fewer were found."""

    def write(self, path: str) -> None:
        """Write it to a file that appears when it is whole."""


class FaissIndex:
    """A graph of FAISS; `faiss.read_index` reads its file."""

    library = "faiss"

    def __init__(self, ids: Ids, vectors: Floats) -> None:
        self._faiss: Any = importlib.import_module("faiss")
        graph = self._faiss.IndexHNSWFlat(vectors.shape[1], NEIGHBOURS, self._faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction, graph.hnsw.efSearch = BUILD_WIDTH, SEARCH_WIDTH
        self._index = self._faiss.IndexIDMap(graph)
        self._index.add_with_ids(vectors, ids)

    def search(self, queries: Floats, k: int) -> Ids:
        found: Ids = self._index.search(queries, k)[1]
        return found

    def write(self, path: str) -> None:
        with atomic_write(path) as file:
            file.write(self._faiss.serialize_index(self._index).tobytes())


class HnswlibIndex:
    """A graph of hnswlib; `Index(space="ip", dim=...).load_index` reads its file. Its labels are unsigned, so
    that an id below 0 comes back as the number of the same 64 bits."""

    library = "hnswlib"

    def __init__(self, ids: Ids, vectors: Floats) -> None:
        hnswlib: Any = importlib.import_module("hnswlib")
        self._index = hnswlib.Index(space="ip", dim=vectors.shape[1])
        self._index.init_index(max_elements=len(ids), ef_construction=BUILD_WIDTH, M=NEIGHBOURS)
        self._index.add_items(vectors, ids.view(np.uint64))
        self._index.set_ef(SEARCH_WIDTH)

    def search(self, queries: Floats, k: int) -> Ids:
        labels, _ = self._index.knn_query(queries, k=k)
        found: Ids = labels.view(np.int64)
        return found

    def write(self, path: str) -> None:
        with filesystem.temporary_folder() as folder:  # it writes to a local name and to nothing else
            made = folder / "index"
            self._index.save_index(str(made))
            with atomic_write(path) as file:
                file.write(made.read_bytes())


LIBRARIES: dict[str, Callable[[Ids, Floats], AnnIndex]] = {"faiss": FaissIndex, "hnswlib": HnswlibIndex}


def chosen_library(wanted: str | None) -> str:
    """Return the library to make an index with: the one that is wanted, or the first that is installed.

    Raises:
        MissingExtraError: It is not installed, or neither is.
    """
    for library in LIBRARIES if wanted is None else [wanted]:
        if importlib.util.find_spec(library) is not None:
            return library
    raise MissingExtraError(wanted or "faiss-cpu", "ann", "an index for approximate search")


def index_recall(index: AnnIndex, ids: Ids, vectors: Floats, queries: Floats, k: int) -> float:
    """Return the share of the k best of an exact search that the index finds, over all queries."""
    k = min(k, len(ids))
    found, right = index.search(queries, k), 0
    for query, some in zip(queries, found, strict=True):
        scores = vectors @ query
        kth = np.partition(scores, len(scores) - k)[len(scores) - k]
        good = set(ids[scores >= kth].tolist())  # with those that tie, either of which is right
        right += min(k, len(good & set(some.tolist())))
    return right / (k * len(queries))


def embeddings(options: EmbeddingsOptions) -> int:
    """Write the embeddings of all candidates, and an index of them if one is asked for."""
    if not options.to and not options.index:
        raise ConfigError("embeddings: needs --to, the Parquet file to write, or --index, or both")
    if options.k < 1 or options.queries < 1 or not 0 <= options.min_recall <= 1:
        raise ConfigError("embeddings: --k and --queries must be at least 1, and --min-recall from 0 to 1")
    library = chosen_library(options.library) if options.index else None
    task, config = load_reading(options)
    checkpoint, step, why = settled(config)
    kind = format_of(options.to or "", None if (options.to or "").endswith(".jsonl") else "parquet")
    column = id_column(task)
    with ReadingBar(options, "Embedding") as shown:

        def on_open(data: Stream[Batch]) -> None:
            if column is not None:
                data.keep_columns([column])
            shown.open(data)

        found, users = Trainer(task, config).embed(
            queries=options.queries if options.index else 0,
            checkpoint=checkpoint,
            on_open=on_open,
            advance=shown.advance,
        )
    said: dict[str, object] = {
        "task": task.name,
        "checkpoint": checkpoint,
        "step": step,
        "chosen": why,
        "items": len(found),
    }
    if options.to:
        with kind.writer(options.to) as file:
            file.write(to_records(found, step, column))
        said["file"] = options.to
    status = 0
    if options.index and library is not None:
        ids, vectors = found.ids.numpy(), np.ascontiguousarray(found.vectors.cpu().numpy())
        index = LIBRARIES[library](ids, vectors)
        recall = index_recall(index, ids, vectors, users.numpy(), options.k)
        said |= {"library": library, f"index_recall@{options.k}": recall, "queries": len(users)}
        if recall >= options.min_recall:
            index.write(options.index)
            said["index"] = options.index
        else:
            status = 1
            say(
                f"embeddings: the index finds {recall:.1%} of the best {options.k}, less than --min-recall "
                f"{options.min_recall:.1%}; {options.index} was not written"
            )
    if options.json:
        sys.stdout.write(json.dumps(said) + "\n")
    else:
        say(", ".join(f"{name} {value}" for name, value in said.items()))
    return status


def id_column(task: Task) -> str | None:
    """Return the column with the ids of items as the data has them; None if unknown."""
    model = task.model()
    spec, name = getattr(model, "spec", None), getattr(model, "item_id", None)
    feature = None if spec is None or name is None else spec.features.get(name)
    return (feature.column or name) if isinstance(feature, IdFeature) else None


def to_records(found: Candidates, step: int, column: str | None) -> Records:
    """Return a record for each candidate: what it is called, its embedding, and the step that it is of."""
    count, width = found.vectors.shape
    ids = one_each(found.ids)
    named = {"id": ids}
    kinds = {name: ColumnKind("int64") for name in ("id", "hash", "step")}
    if column is not None and column in found.raw:
        named = {"id": found.raw[column]}
        kinds["id"] = found.raw_kinds.get(column, kinds["id"])
        # Whole numbers are their own ids, unless they carry a slot; `hash` is what an index answers with.
        if named["id"].dtype is not torch.int64 or not torch.equal(named["id"].flat_values, found.ids):
            named["hash"] = ids
    vectors = RaggedTensor.from_row_lengths(found.vectors.cpu().reshape(-1), torch.full((count,), width))
    columns = {**named, "embedding": vectors, "step": one_each(torch.full((count,), step))}
    kinds["embedding"] = ColumnKind("float", single=False)
    return Records(count, columns, kinds={name: kinds[name] for name in columns})


def one_each(values: torch.Tensor) -> RaggedTensor:
    return RaggedTensor.from_row_lengths(values, torch.ones(len(values), dtype=torch.int64))
