"""Tables and rows that a program has at hand, as sources: pandas, polars, Arrow, and dicts in Python.

    PandasSource(frame, batch_size=512, epochs=5, shuffle=ShuffleConfig(seed=7))
    ArrowSource(lambda: dataset.scanner().to_reader(), batch_size=512)
    IterableSource(read_events, types={"user": int, "price": float, "title": str}, batch_size=512)

All of them are read a piece at a time from the beginning, and a position is a number of records. Restoring
skips the records before it, so they must come in the same order each time. Data that can be read only once,
such as a generator, can continue after a restart but cannot be restored twice; a function that opens the data
again can do both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import torch

from monolith.data.formats.memory import (
    Cell,
    ColumnType,
    cells_of,
    column_types,
    kind_of_cells,
    rows_as_records,
    values_of,
    wider,
)
from monolith.data.formats.parquet import arrow_records, columns_of, declared_by, import_arrow
from monolith.data.records import Records
from monolith.data.shuffling import (
    Batcher,
    Block,
    Epochs,
    ShuffleConfig,
    ShuffledBlock,
    Shuffler,
    check_epochs_unset,
    permutation,
)
from monolith.data.source import Position, Shard, ShardChoice, Source, closed_after
from monolith.errors import ConfigError, DataError, RestoreError, optional_package
from monolith.feature import ColumnKind

Row = Mapping[str, Any]
T = TypeVar("T")


class _Cursor(NamedTuple):
    """A place between two records of a worker's shard."""

    epoch: int
    read: int = 0
    """Records of the epoch before it; if they are shuffled, those before the shuffle block."""
    taken: int = 0
    """Records of the shuffle block that were yielded."""
    length: int = 0
    """Records of the shuffle block; 0 between two blocks."""


class TabularSource(Source):
    """Records that come a piece at a time, from the beginning whenever it is asked.

    Args:
        pieces: Opens them.
        kind: Names this source in positions and messages.
        worker: Which of `num_workers` this is; record i is for worker i modulo `num_workers`. By default
            what `read_shard` says.
        epochs: How often to read the records; None without end. Batches continue across epochs.
        shuffle: Permutes blocks of `buffer` records, in another order in each epoch; None leaves the order.
        rows: How many records there are, for each time they are read; None if unknown.
    """

    repeats_order = True

    @property
    def live(self) -> bool:
        """Whether rows may arrive as they happen: a generator or a reader may yield live events."""
        return self._rows is None

    def __init__(
        self,
        pieces: Callable[[], Iterator[Records]],
        kind: str,
        *,
        batch_size: int,
        worker: int | None = None,
        num_workers: int | None = None,
        epochs: int | None = 1,
        shuffle: ShuffleConfig | None = None,
        rows: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"{kind} source: batch_size must be at least 1, got {batch_size}")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"{kind} source: epochs must be at least 1, or None for ever, got {epochs}")
        self._choice = ShardChoice(f"{kind} source", worker, num_workers)
        self._pieces = pieces
        self._kind = kind
        self._batch_size = batch_size
        self._epochs = epochs
        self._shuffle = shuffle
        self._rows = rows
        self._cursor = _Cursor(0)

    @property
    def reads_again(self) -> bool:
        return self._epochs != 1

    def read_shard(self, shard: Shard) -> None:
        """Read every `shard.workers`-th record."""
        self._choice.choose(shard)

    def size(self) -> int | None:
        """Return the number of records to read; None if unknown or endless."""
        if self._rows is None or self._epochs is None:
            return None
        return self._each * self._epochs

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        """Return the fraction of the records before a position; see `Stream.fraction_read`."""
        total = self.size()
        if not total:
            return None
        done: int = position["epoch"] * self._each + position["read"] + position["taken"]
        return min(1.0, (done + records) / total)

    @property
    def _each(self) -> int:
        """How many records this worker reads each time."""
        worker, workers = self._choice.settle()
        return len(range(worker, self._rows or 0, workers))

    def read_epochs(self, epochs: Epochs) -> None:
        """Read all records several times; see `Epochs`. An order of its own, if it has one, stays."""
        check_epochs_unset(f"{self._kind} source", self._epochs, settled=self._cursor != _Cursor(0))
        self._epochs = epochs.count
        self._shuffle = self._shuffle or epochs.shuffle

    def __iter__(self) -> Iterator[Records]:
        self._choice.settle()
        batcher: Batcher[_Cursor] = Batcher(self._batch_size)
        with closed_after(self._blocks()) as blocks:
            for block in blocks:
                for batch, self._cursor in batcher.add(block):
                    yield batch
        self._cursor = _Cursor(self._epochs or 0)
        if (rest := batcher.rest()) is not None:
            yield rest

    def position(self) -> Position:
        return {**self._settings(), **self._cursor._asdict()}

    def restore(self, position: Position) -> None:
        if not isinstance(position, Mapping) or position.get("source") != self._kind:
            raise RestoreError(f"cannot restore a {self._kind} source from {position!r:.200}: another kind")
        for name, value in self._settings().items():
            if name not in position or position[name] != value:
                raise RestoreError(
                    f"cannot restore a {self._kind} source: the position was taken with {name} "
                    f"{position.get(name)}, this one has {value}"
                )
        numbers = {name: position.get(name) for name in _Cursor._fields}
        if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
            raise RestoreError(f"cannot restore a {self._kind} source: malformed numbers {numbers}")
        self._cursor = _Cursor(**{name: int(number or 0) for name, number in numbers.items()})

    def _settings(self) -> Position:
        shuffle = None if self._shuffle is None else [self._shuffle.seed, self._shuffle.buffer]
        return {"source": self._kind, "shard": list(self._choice.settle()), "shuffle": shuffle}

    def _blocks(self) -> Iterator[Block[_Cursor]]:
        start = self._cursor
        while self._epochs is None or start.epoch < self._epochs:
            found = False
            with closed_after(self._epoch(start)) as blocks:
                for block in blocks:
                    found = True
                    yield block
            if not found and not start.read:  # an empty epoch would repeat without end
                return
            start = _Cursor(start.epoch + 1)

    def _epoch(self, start: _Cursor) -> Iterator[Block[_Cursor]]:
        """Yield the remaining records of an epoch."""
        with closed_after(self._mine(start)) as blocks:
            if self._shuffle is None:
                yield from blocks
                return
            seed = self._shuffle.seed
            shuffler: Shuffler[_Cursor] = Shuffler(
                self._shuffle.buffer,
                lambda begin, size: permutation(size, seed, begin.epoch, begin.read),
                lambda _: f"the data of a {self._kind} source",
            )
            end = start
            for block in blocks:
                end = block.cursor(len(block.records))
                for shuffled in shuffler.add(block):
                    yield _with_cursors(shuffled)
            if (last := shuffler.end(end)) is not None:
                yield _with_cursors(last)

    def _mine(self, start: _Cursor) -> Iterator[Block[_Cursor]]:
        """Yield the shard of this worker from a cursor on, in order."""
        worker, workers = self._choice.settle()
        passed = mine = 0
        length, taken = start.length, start.taken
        with closed_after(self._pieces()) as pieces:
            for piece in pieces:
                begin = min((worker - passed) % workers, len(piece))
                some = piece if workers == 1 else piece.take(torch.arange(begin, len(piece), workers))
                passed += len(piece)
                before, mine = mine, mine + len(some)
                first = max(start.read - before, 0)
                if first < len(some):
                    yield Block(some, _cursors(start.epoch, before), first, length, taken)
                    length = taken = 0
        if mine < start.read or length:
            raise DataError(
                f"{self._kind} source: there are {mine} records, fewer than when the position was saved; "
                "the data has changed"
            )


def _cursors(epoch: int, before: int) -> Callable[[int], _Cursor]:
    return lambda number: _Cursor(epoch, before + number)


def _with_cursors(block: ShuffledBlock[_Cursor]) -> Block[_Cursor]:
    """Return a shuffled block with the cursors between its records."""
    begin, size = block.begin, len(block.records)

    def cursor(number: int) -> _Cursor:
        return block.end if number == size else begin._replace(taken=number, length=size)

    return Block(block.records, cursor, block.first)


class ArrowSource(TabularSource):
    """Yields the rows of an Arrow table, or the record batches of a reader.

    Args:
        data: A Table, a RecordBatch, a RecordBatchReader; or a function that opens a reader or returns record
            batches, from the beginning at each call.
        columns: To read; None for all.
        options: Of `TabularSource`.

    Raises:
        MissingExtraError: pyarrow is not installed.

    Examples:
        >>> import pyarrow as pa
        >>> from monolith import ArrowSource
        >>> table = pa.table({"user": [17, 18], "tags": [[3, 9], []]})
        >>> [records] = ArrowSource(table, batch_size=2)
        >>> records["tags"].row_lengths()
        tensor([2, 0])
    """

    def __init__(self, data: Any, *, columns: Sequence[str] | None = None, **options: Any) -> None:
        pa = import_arrow("reading Arrow tables").pa
        declared: Mapping[str, torch.dtype] = {}
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        if isinstance(data, pa.Table):
            opened: Callable[[], Iterable[Any]] = data.to_batches
            options = {"rows": data.num_rows, **options}
            declared = declared_by(data)
        else:
            opened = _opener(
                data, "arrow", "a table, a reader of record batches, or a function that opens one"
            )
        super().__init__(lambda: _arrow_pieces(opened, columns, declared), "arrow", **options)


class PandasSource(ArrowSource):
    """Yields the rows of a pandas DataFrame; NaN, None, NaT and NA are no value. Its index is left out.

    Args:
        frame: The table.
        options: Of `ArrowSource`.

    Raises:
        MissingExtraError: pandas or pyarrow is not installed.

    Examples:
        >>> import pandas as pd
        >>> from monolith import PandasSource
        >>> frame = pd.DataFrame({"user": [17, 18], "price": [0.5, None]})
        >>> [records] = PandasSource(frame, batch_size=2)
        >>> records["price"].row_lengths()  # a missing number is no value
        tensor([1, 0])
    """

    def __init__(self, frame: Any, **options: Any) -> None:
        with optional_package("pandas", "pandas", "reading DataFrames of pandas"):
            import pandas as pd
        if not isinstance(frame, pd.DataFrame):
            raise ConfigError(f"pandas source: expected a DataFrame, got a {type(frame).__name__}")
        super().__init__(_pandas_table(frame, "pandas source"), **options)


class PolarsSource(ArrowSource):
    """Yields the rows of a polars DataFrame; null and NaN are no value.

    Args:
        frame: The table; call collect() on a LazyFrame first.
        options: Of `ArrowSource`.

    Raises:
        MissingExtraError: polars or pyarrow is not installed.

    Examples:
        >>> import polars as pl
        >>> from monolith import PolarsSource
        >>> frame = pl.DataFrame({"user": [17, 18], "price": [0.5, None]})
        >>> [records] = PolarsSource(frame, batch_size=2)
        >>> records["price"].row_lengths()  # null is no value
        tensor([1, 0])
    """

    def __init__(self, frame: Any, **options: Any) -> None:
        with optional_package("polars", "polars", "reading DataFrames of polars"):
            import polars as pl
        if isinstance(frame, pl.LazyFrame):
            raise ConfigError("polars source: a LazyFrame has no rows yet; pass frame.collect()")
        if not isinstance(frame, pl.DataFrame):
            raise ConfigError(f"polars source: expected a DataFrame, got a {type(frame).__name__}")
        import_arrow("reading DataFrames of polars")
        super().__init__(frame.to_arrow(), **options)


class IterableSource(TabularSource):
    """Yields dicts in Python as records: {"user": 17, "tags": [3, 9], "price": 0.5, "word": "hi"}.

    Args:
        rows: A list or another iterable of dicts; or a function that starts again, as a generator function
            does. A generator itself can be read only once.
        types: Column to int, float or str; other keys are ignored. Without them, the narrowest type that
            fits each key of the first `infer_rows` rows, so that the first batch waits for these.
        options: Of `TabularSource`.

    Examples:
        >>> from monolith import IterableSource
        >>> def rows():
        ...     for user in (17, 18, 19):
        ...         yield {"user": user, "tags": [3, 9], "word": "hi"}
        >>> source = IterableSource(rows, batch_size=2, types={"user": int, "tags": int})
        >>> [records["tags"].row_lengths().tolist() for records in source]
        [[2, 2], [2]]
    """

    def __init__(
        self,
        rows: Iterable[Row] | Callable[[], Iterable[Row]],
        *,
        batch_size: int,
        types: Mapping[str, ColumnType] | None = None,
        infer_rows: int = 1000,
        **options: Any,
    ) -> None:
        if infer_rows < 1:
            raise ConfigError(f"iterable source: infer_rows must be at least 1, got {infer_rows}")
        declared = None if types is None else column_types(types, "iterable source")
        opened = _opener(rows, "iterable", "dicts, or a function that returns them")

        def pieces() -> Iterator[Records]:
            return _row_pieces(iter(opened()), declared, infer_rows, batch_size)

        super().__init__(pieces, "iterable", batch_size=batch_size, **options)


def frame_records(frame: Any, types: Mapping[str, torch.dtype]) -> Records:
    """Return the columns of a DataFrame of pandas or polars, or of an Arrow table, as records.

    Args:
        types: The columns to read, with the types that they should have; others are ignored. Whole
            numbers that are floats, as pandas has them if some are missing, become whole numbers again.

    Raises:
        ConfigError: It is none of these.
        DataError: A column cannot be read.
    """
    arrow = import_arrow("reading DataFrames")
    pa, kind = arrow.pa, type(frame).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(frame, "columns"):
        wanted = [name for name in frame.columns if name in types]
        table = _pandas_table(frame[wanted], "data frame")
    elif kind == "polars" and hasattr(frame, "to_arrow"):
        table = frame.select([name for name in frame.columns if name in types]).to_arrow()
    elif isinstance(frame, pa.Table | pa.RecordBatch):
        table = pa.table(frame) if isinstance(frame, pa.RecordBatch) else frame
    else:
        hint = "; call collect() first" if kind == "polars" else ""
        raise ConfigError(
            "expected columns by name, a DataFrame of pandas or polars, or an Arrow table, got a "
            f"{type(frame).__name__}{hint}"
        )
    for name in [name for name in table.schema.names if name in types]:
        at = table.schema.get_field_index(name)
        if types[name] is torch.int64 and arrow.types.is_floating(table.schema.field(name).type):
            try:
                table = table.set_column(at, name, table.column(name).cast(pa.int64()))
            except pa.lib.ArrowInvalid as cause:
                raise DataError(f"column {name!r} must hold whole numbers: {cause}") from cause
    return arrow_records(table, columns_of(table.schema, list(types)), "data frame", types)


def _pandas_table(frame: Any, what: str) -> Any:
    pa = import_arrow("reading DataFrames of pandas").pa
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.lib.ArrowException, TypeError, ValueError) as cause:
        raise DataError(f"{what}: a column has values of several types: {cause}") from cause


def _opener(data: Any, kind: str, expected: str) -> Callable[[], Iterable[Any]]:
    """Return a function that opens data again; if it can be read only once, the second call fails."""
    if callable(data):
        opened: Callable[[], Iterable[Any]] = data
        return opened
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise ConfigError(f"{kind} source: expected {expected}, got a {type(data).__name__}")
    if not isinstance(data, Iterator) and iter(data) is not data:
        return lambda: data
    left = [data]

    def once() -> Iterable[Any]:
        if not left:
            raise DataError(
                f"{kind} source: a {type(data).__name__} can be read only once, and it was. Pass a "
                "function that opens it."
            )
        found: Iterable[Any] = left.pop()
        return found

    return once


def _arrow_pieces(
    opened: Callable[[], Iterable[Any]], columns: Sequence[str] | None, declared: Mapping[str, torch.dtype]
) -> Iterator[Records]:
    pa = import_arrow().pa
    for batch in opened():
        names = columns_of(batch.schema, columns)
        yield arrow_records(pa.Table.from_batches([batch]), names, "arrow source", declared)


def _row_pieces(
    rows: Iterator[Row], declared: Mapping[str, torch.dtype] | None, infer_rows: int, size: int
) -> Iterator[Records]:
    types = declared
    if types is None:
        first = list(islice(rows, infer_rows))
        types, rows = _inferred(first), chain(first, rows)
    number = 0
    kinds: dict[str, ColumnKind] | None = None
    while some := list(islice(rows, size)):
        cells: list[dict[str, Cell]] = []
        for row in some:
            try:
                if declared is None and (unknown := [name for name in row if name not in types]):
                    raise ValueError(f"key {unknown[0]!r} was not in the first {infer_rows}; give types")
                cells.append(cells_of(row, types))
            except (ValueError, TypeError, AttributeError) as cause:
                raise DataError(f"iterable source: record {number}: {cause}") from cause
            number += 1
        if kinds is None:  # those of the first piece are used for all: a written file has one schema
            kinds = {name: kind_of_cells((row.get(name) for row in some), types[name]) for name in types}
        yield rows_as_records(cells, types, kinds)


def _inferred(rows: Sequence[Row]) -> dict[str, torch.dtype]:
    types: dict[str, torch.dtype | None] = {}
    for row in rows:
        if not isinstance(row, Mapping):
            raise DataError(f"iterable source: a record must be a dict, got a {type(row).__name__}")
        for name, value in row.items():
            types[name] = wider(types.get(name), values_of(value))
    return {name: torch.uint8 if dtype is None else dtype for name, dtype in types.items()}
