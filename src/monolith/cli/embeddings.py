"""`monolith export embeddings`: the vectors of all candidates of a retrieval task, and an index over them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.cli.evaluation import ReadingBar, settled
from monolith.cli.options.jobs import EmbeddingsOptions
from monolith.cli.task_config import load_reading
from monolith.cli.terminal import say
from monolith.data import Records, Stream, format_of
from monolith.errors import ConfigError, MissingExtraError
from monolith.feature import Batch, ColumnKind, IdFeature
from monolith.filesystem import atomic_write
from monolith.tensors import RaggedTensor
from monolith.train import Candidates, Task, Trainer

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
        with tempfile.TemporaryDirectory() as folder:  # it writes to a local name and to nothing else
            made = Path(folder) / "index"
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


def run(options: EmbeddingsOptions) -> int:
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
    """Return the column with the ids of items as the data has them; None where nothing says."""
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
