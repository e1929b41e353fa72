"""An index of vectors for approximate search, by FAISS or hnswlib, whichever is installed.

Both build the same graph (HNSW) for the inner product, and answer with the ids that the vectors were given.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from monolith.errors import MissingExtraError
from monolith.filesystem import atomic_write

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
