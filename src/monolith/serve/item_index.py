"""ItemIndex: the vectors of all items of a retrieval model, which follow training and are searched for users.

    delta ──► tables ──► changed IDs ──► one thread: item tower ──► vectors
    request ──► user tower ──► search of the vectors ──► items and scores

An item can be found if its ID has a row in the item table: an item that was trained a moment ago is found a
moment later, and one that expired is gone. There are two kinds of catalogue:

    the table   for an item tower that reads a whole number, the item's ID, and nothing else
    a file      for any other: a row for each item with the columns of the item tower. All its columns, those
                that the model does not read included, are attributes that a request can filter by. It is read
                again when it changes

The search is exact: one matrix product with all vectors. docs/decisions/0073 has the reasons, and the sizes.

New dense weights change every vector. The index embeds all items with them, and only then swaps vectors and
user tower together, so that a score is never made of two models.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency
from monolith.data.formats.parquet import import_arrow
from monolith.data.records import take_rows
from monolith.errors import ConfigError, MonolithError, RequestError
from monolith.feature import Batch, FeatureIds, IdFeature
from monolith.serve.manifest import ServableTowers
from monolith.serve.metrics import IndexMetrics
from monolith.serve.predictor import Predictor, claim_of
from monolith.serve.retrieval import ChangedRows
from monolith.serve.rows import RowsClaim, Said, together

_log = logging.getLogger(__name__)

MOST_K = 10_000
"""Largest number of items that a request may ask for."""
_CHUNK = 8192
"""Items that are embedded at a time."""
_SCORES_AT_ONCE = 1 << 24
"""Scores computed at a time: 64 MiB of float32."""
_LOOK_EVERY = 1.0
"""Seconds between two looks at the file of items."""
_SAMPLE_EVERY = 100
"""One of so many searches is compared with a brute-force search, if there was none for a while."""
_CHECK_EVERY = 60.0
"""Seconds between two such comparisons."""
_MOST_CHECKED = 200_000
"""Items that are embedded again for one; of more, as many are drawn."""


@dataclass(frozen=True, slots=True)
class TopK:
    """What a request asks of an index."""

    k: int
    """How many items for each user."""
    filter: Mapping[str, Any] = field(default_factory=dict)
    """Attribute -> the value that an item must have, a list of such values, or {"min": ..., "max": ...}."""

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not 1 <= self.k <= MOST_K:
            raise RequestError(f"the parameter `k` must be a whole number from 1 to {MOST_K}")
        if not isinstance(self.filter, dict):
            raise RequestError("the parameter `filter` must be an object: attribute -> value, or values")


@dataclass(frozen=True, slots=True, eq=False)
class FoundItems:
    """The best items for some users, those of each user in order of their scores."""

    items: list[list[Any]]
    scores: list[NDArray[np.float32]]
    freshness: Said
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Catalogue:
    """The items of a file."""

    names: list[Any]
    """The value of the item's column, of each row."""
    batch: Batch
    """The features of the item tower, of all rows."""
    table: Any
    """The Arrow table."""
    seen: tuple[int, int]
    """Time and size of the file when it was read."""


class ItemIndex:
    """The items of one version of a retrieval model. Thread-safe.

    Shapes: n items have vectors float32 (n, out); m users get up to k items each.

    Example: `index.search({"user": ["ann"]}, TopK(2)).items` is [[8, 7]].

    Args:
        predictor: The version, which follows a trainer or not.
        name: The name by which the model is served.
        items: The file of items; empty if the item table is the catalogue.
        metrics: Counts items and updates.

    Raises:
        ConfigError: The model is no retrieval model, or its items cannot be known; says what to do.
    """

    def __init__(self, predictor: Predictor, name: str, items: str, metrics: IndexMetrics) -> None:
        self._name = name
        dense = predictor.servable.dense
        if dense is None or dense.towers is None:
            raise ConfigError(
                f"{predictor.folder} has no towers to search items with: export a retrieval model, such as "
                "TwoTower, with this version of monolith"
            )
        self._predictor = predictor
        self._towers: ServableTowers = dense.towers
        self._user, self._item = predictor.towers["user"], predictor.towers["item"]
        self._metrics = metrics
        self._path = Path(items) if items else None
        self._tables = {
            name: one.table
            for collection in predictor.servable.collections
            for name, one in collection.inputs.items()
            if name in self._towers.item
        }
        self._item_table = self._tables[self._towers.item_id]
        spec = predictor.servable.spec
        feature = None if spec is None else spec.features[self._towers.item_id]
        self._column = getattr(feature, "column", None) or self._towers.item_id
        if self._path is None and (why := _needs_file(predictor, self._towers, feature)):
            raise ConfigError(f"{why}: give a file with a row for each item, serve --items {name}=FILE")
        self._news = concurrency.Condition()
        self._pending: list[ChangedRows | None] = []  # guarded by `_news`
        self._busy = True  # guarded by `_news`: whether changes are being worked on
        self._closed = False  # guarded by `_news`
        # Guards the items: `_vectors`, `_alive`, `_names`, `_slot_of`, `_attributes` and the weights of the
        # user tower. One thread writes; a search holds it for its matrix product.
        self._lock = concurrency.Lock()
        self._generation = 0
        self._vectors = torch.zeros(0, self._towers.out)
        self._alive = torch.zeros(0, dtype=torch.bool)
        self._names: list[Any] = []
        self._slot_of: dict[int, int] = {}
        """ID in the item table -> place of the item."""
        self._slot_by_name: dict[Any, int] = {}
        self._users_of_rows: dict[str, tuple[Tensor, Tensor]] = {}
        """Table -> sorted IDs of other features of the item tower, and the place of an item that has it."""
        self._catalogue: _Catalogue | None = None
        self._searches = 0
        self._sample: tuple[int, Tensor, TopK] | None = None
        """Generation, vector and request of a user whose answer is to be compared."""
        self._checked_at = float("-inf")
        self._claim: RowsClaim = self._claim_now()
        predictor.on_rows(self._note)
        if self._path is not None:
            self._catalogue = self._read(self._path)
        self._rebuild()
        self._busy = False
        self._thread = concurrency.Thread(target=self._follow, name=f"items-{name}", daemon=True)
        self._thread.start()
        predictor.on_close(self.close)

    def __len__(self) -> int:
        """Return how many items can be found."""
        return int(self._alive.sum())

    def close(self) -> None:
        """Stop following. Closing again does nothing."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join()

    def wait_idle(self, seconds: float) -> bool:
        """Wait until all changes so far are in the index; return whether they are."""
        with self._news:
            return self._news.wait_for(lambda: not self._pending and not self._busy, seconds)

    # Search

    def search(
        self,
        columns: Any,
        asked: TopK,
        *,
        exclude: Sequence[Sequence[Any]] = (),
        deadline: float | None = None,
    ) -> FoundItems:
        """Return the best items for each user.

        Args:
            columns: The features of users, as `Predictor.predict` takes them.
            exclude: For each user, items that are not returned; others than those of the catalogue may be
                among them.

        Raises:
            RequestError: A column, a value or an attribute does not fit.
        """
        claim = self._claim_of_index()
        while True:
            generation = self._generation
            users, rows = self._user.embed(columns, deadline)
            with self._lock:
                if generation == self._generation:  # else the user tower has new weights meanwhile
                    items, scores = self._best(users, asked, exclude)
                    if self._searches % _SAMPLE_EVERY == 0 and len(users):
                        self._sample = (generation, users[:1].clone(), asked)
                    self._searches += 1
                    break
        claims = [one.claim for one in rows if one.claim is not None]
        missing = tuple(dict.fromkeys(name for one in rows for name in one.missing))
        said = together([claim, *claims]).said(concurrency.time())
        return FoundItems(items, scores, said, missing)

    def _best(
        self, users: Tensor, asked: TopK, exclude: Sequence[Sequence[Any]]
    ) -> tuple[list[list[Any]], list[NDArray[np.float32]]]:
        barred = ~self._alive
        if asked.filter:
            barred = barred | ~self._matches(asked.filter)
        k = min(asked.k, len(barred))
        items: list[list[Any]] = []
        scores: list[NDArray[np.float32]] = []
        step = max(1, _SCORES_AT_ONCE // max(len(barred), 1))
        for begin in range(0, len(users), step):
            part = (users[begin : begin + step] @ self._vectors.T) * self._towers.scale
            part.masked_fill_(barred, -torch.inf)
            for row in range(len(part)):
                for name in exclude[begin + row] if exclude else ():
                    if (slot := self._slot_by_name.get(name)) is not None:
                        part[row, slot] = -torch.inf
            best, places = part.topk(k)
            for values, slots in zip(best, places, strict=True):
                count = int((values > -torch.inf).sum())
                items.append([self._names[slot] for slot in slots[:count].tolist()])
                scores.append(values[:count].numpy().copy())
        return items, scores

    def check_recall(self, user: Tensor, asked: TopK) -> float:
        """Return the fraction of a user's best items that the index finds, of those that it should find.

        All items, or as many as are drawn of a large catalogue, are embedded again from the rows as they are
        at this moment: an update that was missed shows.

        Args:
            user: The vector of the user, float32 (1, out).
        """
        with self._lock:
            eligible = self._alive & self._matches(asked.filter) if asked.filter else self._alive.clone()
        slots = eligible.nonzero().flatten()
        if len(slots) > _MOST_CHECKED:
            slots = slots[torch.randperm(len(slots))[:_MOST_CHECKED]].sort().values
        k = min(asked.k, len(slots))
        if not k:
            return 1.0
        anew = torch.cat([self._embed(part) for part in torch.split(slots, _CHUNK)])
        with self._lock:
            known = self._vectors[slots]
        wanted = (user @ anew.T).topk(k).indices
        found = (user @ known.T).topk(k).indices
        return float(torch.isin(found, wanted).float().mean())

    def _check_sample(self) -> None:
        """Compare a sampled search, on the thread that updates the index, so that none is under way."""
        now = concurrency.monotonic()
        if self._sample is None or now < self._checked_at + _CHECK_EVERY:
            return
        (generation, user, asked), self._sample = self._sample, None
        if generation == self._generation:  # else the vector is of weights before
            self._checked_at = now
            self._metrics.compared(self._name, self.check_recall(user, asked))

    def _matches(self, wanted: Mapping[str, Any]) -> Tensor:
        """Return which items have the attributes, as a mask over all."""
        table = None if self._catalogue is None else self._catalogue.table
        mask = np.ones(len(self._alive), bool)
        for name, values in wanted.items():
            if table is None or name not in table.column_names:
                known = (
                    "none: the server has no file of items"
                    if table is None
                    else ", ".join(table.column_names)
                )
                raise RequestError(f"filter: items have no attribute {name[:80]!r}; there is {known}")
            mask &= _has(table.column(name), name, values)
        return torch.from_numpy(mask)

    def _claim_now(self) -> RowsClaim:
        return self._predictor.rows.claim or claim_of(self._predictor.servable)

    def _claim_of_index(self) -> RowsClaim:
        """Return how new the items are: as new as the rows, unless changes wait to be worked on."""
        with self._news:
            return self._claim if self._pending or self._busy else self._claim_now()

    # Changes

    def _note(self, changed: ChangedRows | None) -> None:
        """Take note of a change; called by the thread that applied it, which must not wait."""
        if changed is not None and changed.weights is None:
            tables = set(self._tables.values())
            if tables.isdisjoint((*changed.rows, *changed.removed)):
                return
        with self._news:
            self._pending.append(changed)
            self._news.notify_all()

    def _follow(self) -> None:
        while True:
            with self._news:
                self._busy = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._pending or self._closed, _LOOK_EVERY)
                if self._closed:
                    return
                changes, self._pending = self._pending, []
                # Rows of these changes, and perhaps of later ones, were applied before this moment.
                self._claim = self._claim_now()
                self._busy = True
            try:
                self._work_on(changes)
                if not changes:
                    self._check_sample()
            except Exception:  # the items as they were are served on; the next change tries again
                _log.exception("model %r: the index of items could not be updated", self._name)
                self._metrics.failed(self._name)

    def _work_on(self, changes: Sequence[ChangedRows | None]) -> None:
        if (
            self._path is not None
            and self._catalogue is not None
            and _seen(self._path) != self._catalogue.seen
        ):
            try:
                self._catalogue = self._read(self._path)
                changes = (*changes, None)
            except MonolithError as error:
                _log.error("the items as they were stay: %s", error)
                self._catalogue = _replaced_seen(self._catalogue, _seen(self._path))
        weights = next((one.weights for one in reversed(changes) if one is not None and one.weights), None)
        if None in changes or weights is not None:
            self._rebuild(weights, rescan=any(one is None or one.rows or one.removed for one in changes))
            return
        rows: dict[str, list[Tensor]] = {}
        removed: dict[int, bool] = {}
        for one in changes:
            assert one is not None
            for name, ids in one.removed.items():
                if name == self._item_table:
                    removed |= dict.fromkeys(ids.tolist(), True)
                else:
                    rows.setdefault(name, []).append(ids)
            for name, ids in one.rows.items():
                rows.setdefault(name, []).append(ids)
                if name == self._item_table:
                    removed |= dict.fromkeys(ids.tolist(), False)  # the order of changes decides
        self._update({name: torch.cat(parts) for name, parts in rows.items()}, removed)

    def _update(self, changed: Mapping[str, Tensor], removed: Mapping[int, bool]) -> None:
        """Embed the items whose rows changed, and drop those that were removed."""
        slots: set[int] = set()
        new: list[int] = []
        for id_, gone in removed.items():
            slot = self._slot_of.get(id_)
            if slot is None and self._catalogue is None and not gone:
                new.append(id_)
            elif slot is not None and not gone:
                slots.add(slot)
        for name, ids in changed.items():
            if (known := self._users_of_rows.get(name)) is not None:
                slots |= set(_places(known, ids).tolist())
        if new:
            slots |= set(self._append(new))
        ordered = torch.tensor(sorted(slots), dtype=torch.int64)
        vectors = self._embed(ordered)
        with self._lock:
            self._vectors[ordered] = vectors
            for id_, gone in removed.items():
                if (slot := self._slot_of.get(id_)) is not None:
                    self._alive[slot] = not gone
        self._metrics.updated(self._name, len(ordered), len(self))

    def _append(self, ids: Sequence[int]) -> range:
        """Give places to items that are new in the table; they cannot be found yet."""
        begin, end = len(self._names), len(self._names) + len(ids)
        with self._lock:
            if end > len(self._alive):
                room = max(2 * len(self._alive), end, 1024)
                vectors = torch.zeros(room, self._towers.out)
                vectors[: len(self._vectors)] = self._vectors
                alive = torch.zeros(room, dtype=torch.bool)
                alive[: len(self._alive)] = self._alive
                self._vectors, self._alive = vectors, alive
            self._names += ids
            self._slot_of |= zip(ids, range(begin, end), strict=True)
            self._slot_by_name = self._slot_of
        return range(begin, end)

    def _rebuild(self, weights: Mapping[str, Tensor] | None = None, *, rescan: bool = True) -> None:
        """Embed all items, and swap to them and to new weights at once.

        Args:
            rescan: Whether the item table may have other IDs than before.
        """
        if weights is not None:
            self._item.swap(weights)
        if rescan:
            present = self._predictor.rows.ids(self._item_table)
            if present is None:
                raise ConfigError("top-k needs the rows in this process; serve an export without --shards")
            if self._catalogue is None:
                # Sorted: thousands of IDs in the order of a hash table collide in the one that a batch's
                # distinct IDs are found with, which takes a hundred times as long.
                names = present.sort().values.tolist()
                slot_of = {id_: slot for slot, id_ in enumerate(names)}
                alive = torch.ones(len(names), dtype=torch.bool)
                by_name: dict[Any, int] = slot_of
            else:
                names, ids = self._catalogue.names, self._catalogue.batch.ids.first(self._towers.item_id)
                slot_of = {id_: slot for slot, id_ in enumerate(ids.tolist())}  # of two, the last counts
                alive = torch.isin(ids, present)
                alive &= torch.tensor(
                    [slot_of[id_] == slot for slot, id_ in enumerate(ids.tolist())], dtype=torch.bool
                )
                by_name = {name: slot_of[id_] for name, id_ in zip(names, ids.tolist(), strict=True)}
        else:
            names, slot_of, alive, by_name = self._names, self._slot_of, self._alive, self._slot_by_name
        chosen = alive.nonzero().flatten()
        vectors = torch.zeros(len(alive), self._towers.out)
        ids_of = names if self._catalogue is None else None
        for part in torch.split(chosen, _CHUNK):
            vectors[part] = self._embed(part, ids_of)
        with self._lock:
            if weights is not None:
                self._user.swap(weights)
            self._vectors, self._alive, self._names = vectors, alive, names
            self._slot_of, self._slot_by_name = slot_of, by_name
            if self._catalogue is not None:
                self._users_of_rows = self._by_row(self._catalogue.batch)
            self._generation += 1
        self._metrics.updated(self._name, len(chosen), len(self))

    def _by_row(self, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return which items have which IDs of the other features of the item tower, by table."""
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, table in self._tables.items():
            if name != self._towers.item_id:
                rows = batch.ids[name]
                places = torch.repeat_interleave(torch.arange(rows.nrows), rows.row_lengths())
                found.setdefault(table, []).append((rows.flat_values, places))
        whole = {}
        for table, parts in found.items():
            ids, order = torch.cat([one for one, _ in parts]).sort()
            whole[table] = (ids, torch.cat([places for _, places in parts])[order])
        return whole

    def _embed(self, slots: Tensor, ids: Sequence[int] | None = None) -> Tensor:
        """Return the vectors of the items at some places."""
        if not len(slots):
            return torch.zeros(0, self._towers.out)
        if self._catalogue is None:
            names = self._names if ids is None else ids
            some = torch.tensor([names[slot] for slot in slots.tolist()], dtype=torch.int64)
            batch = Batch(FeatureIds.pack({self._towers.item_id: some}))
        else:
            batch = _taken(self._catalogue.batch, slots)
        vectors, _ = self._item.embed_batch(batch)
        return vectors

    def _read(self, path: Path) -> _Catalogue:
        """Read the file of items.

        Raises:
            ConfigError: It cannot be read, or does not have the columns of the item tower.
        """
        seen = _seen(path)
        inputs = {one.name: one.datatype for one in self._item.reader.inputs}
        table = _arrow_table(path, [name for name, kind in inputs.items() if kind == "BYTES"])
        missing = [name for name in inputs if name not in table.column_names]
        if missing:
            raise ConfigError(
                f"--items: {path} has no column {missing[0]!r}, which the item tower reads; it has "
                f"{', '.join(table.column_names)}"
            )
        try:
            batch = self._item.reader.batch(table)
        except RequestError as error:
            raise ConfigError(f"--items: {path}: {error}") from error
        if bool((batch.ids[self._towers.item_id].row_lengths() != 1).any()):
            raise ConfigError(f"--items: {path}: each row needs one value in {self._column!r}")
        return _Catalogue(table.column(self._column).to_pylist(), batch, table, seen)


def _needs_file(predictor: Predictor, towers: ServableTowers, feature: object) -> str:
    """Return why the item table cannot be the catalogue; empty if it can."""
    if tuple(towers.item) != (towers.item_id,):
        return f"the item tower reads {', '.join(towers.item)}, and the item table has the IDs alone"
    spec = predictor.servable.spec
    plain = feature is None or (isinstance(feature, IdFeature) and feature.kind == "int")
    if not plain or (spec is not None and towers.item_id in spec.slots):
        return f"the item table has hashes of {towers.item_id!r} and not its values"
    return ""


def _seen(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as cause:
        raise ConfigError(f"--items: {path} cannot be read: {cause.strerror}") from cause
    return found.st_mtime_ns, found.st_size


def _replaced_seen(catalogue: _Catalogue, seen: tuple[int, int]) -> _Catalogue:
    return _Catalogue(catalogue.names, catalogue.batch, catalogue.table, seen)


def _arrow_table(path: Path, texts: Sequence[str]) -> Any:
    """Read a CSV, Parquet or JSON lines file; columns of texts are read as such, whatever they look like."""
    pa = import_arrow("reading items").pa
    from pyarrow import csv, json, parquet  # type: ignore[import-untyped]

    types = {name: pa.string() for name in texts}
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        if path.suffix in (".json", ".jsonl", ".ndjson"):
            return json.read_json(path)
        return csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=types))
    except (pa.ArrowException, OSError) as cause:
        raise ConfigError(f"--items: {path} cannot be read: {cause}") from cause


def _has(column: Any, name: str, wanted: Any) -> NDArray[np.bool_]:
    """Return which values of an Arrow column are wanted."""
    pa = import_arrow("filtering items").pa
    from pyarrow import compute

    try:
        if isinstance(wanted, dict):
            if not wanted or wanted.keys() - {"min", "max"}:
                raise RequestError(f"filter: {name!r} takes a value, a list of values, or min and max")
            found = compute.is_valid(column)
            if "min" in wanted:
                found = compute.and_(found, compute.greater_equal(column, wanted["min"]))
            if "max" in wanted:
                found = compute.and_(found, compute.less_equal(column, wanted["max"]))
        else:
            values = pa.array(wanted if isinstance(wanted, list) else [wanted]).cast(column.type)
            found = compute.is_in(column, value_set=values)
    except (pa.ArrowException, TypeError) as cause:
        raise RequestError(
            f"filter: {name!r} holds {column.type}, which cannot be compared: {cause}"
        ) from cause
    return np.asarray(compute.fill_null(found, False))


def _places(known: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
    """Return the places of the items that have some IDs."""
    wanted = torch.unique(ids)
    begin, end = torch.searchsorted(known[0], wanted), torch.searchsorted(known[0], wanted, right=True)
    return torch.cat([known[1][:0], *(known[1][a:b] for a, b in zip(begin, end, strict=True))])


def _taken(batch: Batch, rows: Tensor) -> Batch:
    """Return some rows of a batch."""
    ids = {name: take_rows(batch.ids[name], rows) for name in batch.ids.names}
    floats = {name: values[rows] for name, values in batch.floats.items()}
    return Batch(FeatureIds.pack(ids, batch_size=len(rows)), floats)
