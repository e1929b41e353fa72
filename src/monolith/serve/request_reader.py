"""Turns the raw columns of a request into the batch that a model reads.

A column is one of

    a list or tuple             a text, bytes, a number, None or a list of these per row
    a numpy array or tensor     numbers of shape (rows,) or (rows, k)
    a RaggedTensor              one row of values per row
    NAME and NAME.row_splits    all values in one, and int64 of shape (rows + 1,): the start of each row

There are three ways. A request that a server has received, also one that ranks items, is packed by one call
into the core, out of the bytes that were received (`RequestReader.pack`). If columns have one plain value per
row, one call into the core packs all of them (`RequestReader._packed`). Every other request is converted
column by column, by the code that training uses, so that all read the same.

A missing value (None, NaN, the NaT and NA of pandas, a row without values, an absent column) reads as in
training. Anything else that is wrong is a `RequestError` that names the column, and the row if there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import nan
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.data import Records
from monolith.data.formats.memory import are_whole, is_missing, seconds_of, values_of
from monolith.data.formats.tables import frame_records
from monolith.data.records import empty_rows
from monolith.errors import ConfigError, DataError, MonolithError, RequestError, RequestTooLargeError
from monolith.feature import (
    Batch,
    CrossFeature,
    FeatureIds,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    SequenceFeature,
)
from monolith.feature.gathering import PackedBatch
from monolith.feature.spec.packing import RawCells
from monolith.feature.spec.times import TIME
from monolith.serve.manifest import Datatype, TensorSpec
from monolith.tensors import RaggedTensor
from monolith.wire.open_inference import SPLITS

_log = logging.getLogger(__name__)

Kind = Literal["", "scalar", "list"]
RawTensors = Mapping[str, Any]
"""Columns by name."""

_DATATYPES: Mapping[torch.dtype, Datatype] = {
    torch.uint8: "BYTES",
    torch.int64: "INT64",
    torch.float32: "FP32",
    TIME: "INT64",
}
_DTYPES: Mapping[Datatype, torch.dtype] = {"BYTES": torch.uint8, "INT64": torch.int64, "FP32": torch.float32}
_WIRED: Mapping[Datatype, native.WireType] = {
    "BYTES": native.WireType.TEXTS,
    "INT64": native.WireType.INTS,
    "FP32": native.WireType.FLOATS,
}
MOST_REPEATED = 1 << 24
"""Values or bytes of one column, or values of all together, that are repeated for each item: a few bytes of a
request must not become gigabytes."""
_KEPT_SIZES = 256
"""Largest batch size whose row splits are cached."""


class RequestReader:
    """Makes batches of requests. Thread-safe.

    Shapes: a request of n rows becomes a `Batch` of n examples.

    Args:
        spec: How raw columns are read; None if requests have IDs and floats by the names of features.
        ids: The ID features of the model, if there is no spec.
        floats: Its float features -> their width, if there is no spec.
        kinds: Column -> "scalar" or "list", if the data says so; a request with the other is refused.

    Examples:
        >>> from monolith import FeatureSpec, IdFeature, Label
        >>> from monolith.serve.request_reader import RequestReader
        >>> features = {"user": IdFeature(kind="string"), "tags": IdFeature(kind="string")}
        >>> reader = RequestReader(FeatureSpec(features=features, labels={"click": Label()}))
        >>> batch = reader.batch({"user": ["ann", "bob"], "tags": [["a"], []]})
        >>> len(batch), batch.ids["tags"].row_lengths()
        (2, tensor([1, 0]))
    """

    def __init__(
        self,
        spec: FeatureSpec | None,
        ids: Iterable[str] = (),
        floats: Mapping[str, int] | None = None,
        kinds: Mapping[str, Kind] | None = None,
    ) -> None:
        self._splits: dict[int, Tensor] = {}
        self._floats = dict(floats or {})
        self._ids = tuple(ids)
        self._packs = False
        self._event_time: str | None = None  # if a feature reads how long before it something was
        self._plan: native.RequestPlan | None = None
        if spec is None:
            self._reader = None
            self.inputs = tuple(
                [TensorSpec(name=name, datatype="INT64", shape=(-1, -1)) for name in self._ids]
                + [
                    TensorSpec(name=name, datatype="FP32", shape=(-1, width))
                    for name, width in self._floats.items()
                ]
            )
            self._ignored: frozenset[str] = frozenset()
        else:
            # Without labels, and without an event time that no feature reads.
            serving = spec.only(spec.read_features)
            self._reader = serving.reader
            self._event_time = serving.event_time
            self.inputs = _inputs_of(serving, kinds or {})
            # The packed way takes one plain value per row, so a model that reads lists cannot use it.
            self._packs = self._reader.packs_all and all(one.kind != "list" for one in self.inputs)
            self._ignored = frozenset(spec.columns.keys() - serving.inputs.keys())
            if self._packs and not any(one.meaning for one in self.inputs):
                wired = [(one.name, _WIRED[one.datatype], len(one.shape) == 1) for one in self.inputs]
                self._plan = self._reader.request_plan(wired)
        self._dtypes = {one.name: _DTYPES[one.datatype] for one in self.inputs}
        self._kinds: dict[str, Kind] = {one.name: one.kind for one in self.inputs}
        self._names = self._dtypes.keys()
        self._expected = [one.name for one in self.inputs if not one.optional]
        self._lacked: set[str] = set()
        """Columns that a request lacked and that were logged."""

    def batch(self, columns: RawTensors | Any) -> Batch:
        """Return the batch of a request.

        Args:
            columns: Columns by name; or what `pack` returned; or a DataFrame of pandas or polars, or an Arrow
                table, whose other columns are ignored.

        Raises:
            RequestError: A column is unknown, missing, of another type or length, or has a bad value.
        """
        if isinstance(columns, native.PackedRanking):
            columns = full_rows(columns)
        if isinstance(columns, native.PackedRows):
            assert self._reader is not None
            return self._reader.batch_of(columns)
        if not isinstance(columns, Mapping):
            columns = self._of_frame(columns)
        if self._packs and (packed := self._packed(columns)) is not None:
            return packed
        made, size = self._columns(columns)
        if self._reader is None:
            return self._plain(made, size)
        try:
            reading = self._reader.read(Records(size, made))
        except DataError as cause:
            raise RequestError(str(cause)) from cause
        if reading.bad:
            row = min(reading.bad)
            raise RequestError(f"row {row} of {size}: {reading.bad[row]}")
        return reading.batch()

    def packed_batch(self, rows: native.PackedRows) -> PackedBatch:
        """Return the batch of rows of `pack`, without tensors of IDs: for `RowSource.gather`."""
        assert self._reader is not None
        return self._reader.packed_batch(rows)

    def pack(self, request: native.WireRequest) -> native.PackedRows | native.PackedRanking | None:
        """Return the features of a request as it was received, for `batch`; by side if it ranks items.

        None if it must be read as columns: it is malformed, or only unusual. Then nothing is known about it.
        """
        return None if self._plan is None else self._plan.pack(request)

    def _of_frame(self, frame: Any) -> RawTensors:
        try:
            records = frame_records(frame, self._dtypes)
        except (ConfigError, DataError) as cause:
            raise RequestError(str(cause)) from cause
        for name, kind in records.kinds.items():
            wanted = self._kinds[name]
            if wanted and wanted != ("scalar" if kind.single else "list"):
                raise _wrong_kind(name, wanted, None)
        return records.columns

    def _packed(self, columns: RawTensors) -> Batch | None:
        """Return the batch if all columns have one plain value per row; None if another way is needed."""
        cells: dict[str, RawCells] = {}
        size, splits = -1, self._even(0, 1)
        for name in self._names:
            given: Any = columns.get(name)
            if type(given) not in _FORMS:
                return None
            if len(given) != size:
                if size >= 0:
                    return None
                size = len(given)
                splits = self._even(size, 1)
            made = _cells(given, splits)
            if made is None:
                return None
            cells[name] = made
        if not size or (len(columns) > len(cells) and not self._ignored.issuperset(columns.keys() - cells)):
            return None
        assert self._reader is not None
        return self._reader.pack(cells, size)

    def _columns(self, columns: RawTensors) -> tuple[dict[str, RaggedTensor], int]:
        made: dict[str, RaggedTensor] = {}
        size: int | None = None
        first = ""
        for name, given in columns.items():
            if name not in self._names:
                self._check_unknown(name, columns)
                continue
            splits = columns.get(name + SPLITS)
            self._check_kind(name, given, splits)
            column = to_column(name, given, splits, self._even)
            rows = column.nrows
            if not len(column.values) and column.dtype is not self._dtypes[name]:
                column = empty_rows(self._dtypes[name], rows)  # an empty column has no type of its own
            if size is None:
                size, first = rows, name
            elif rows != size:
                raise RequestError(f"column {name!r} has {rows} rows, and {first!r} has {size}")
            made[name] = column
        if size is None:
            raise RequestError(f"the request has no column; the model reads {', '.join(self._names)}")
        for name in self._expected:
            if name not in made and name not in self._lacked:
                self._lacked.add(name)
                _log.warning(
                    "requests lack column %r, which the model reads: it counts as missing (said once)", name
                )
        time = self._event_time
        if time is not None and time not in made and time not in self._lacked:
            self._lacked.add(time)
            _log.warning(
                "requests lack the event time %r: the model does not know how long ago the last step of a "
                "history was, and takes it as just now (said once)",
                time,
            )
        return made, size

    def _check_kind(self, name: str, given: Any, splits: Any) -> None:
        """Refuse a list if the model reads one value, and one value if it reads a list."""
        kind = self._kinds[name]
        if not kind or isinstance(given, RaggedTensor) or (kind == "list" and splits is not None):
            return
        if splits is not None:
            lengths = np.diff(np.asarray(splits))
            if lengths.ndim == 1 and bool((lengths > 1).any()):
                raise _wrong_kind(name, kind, int((lengths > 1).argmax()))
            return
        if isinstance(given, list | tuple):
            for row, value in enumerate(given):
                is_list = isinstance(value, list | tuple | np.ndarray)
                is_none = not len(value) if is_list else is_missing(value)
                if not is_none and is_list is not (kind == "list"):
                    raise _wrong_kind(name, kind, row)
        elif isinstance(given, np.ndarray) and given.dtype == object:
            self._check_kind(name, given.tolist(), None)
        elif isinstance(given, np.ndarray | Tensor):
            is_list = given.ndim == 2 and (kind == "list" or given.shape[1] != 1)
            if is_list is not (kind == "list"):
                raise _wrong_kind(name, kind, None)

    def _check_unknown(self, name: str, columns: RawTensors) -> None:
        owner = name.removesuffix(SPLITS)
        if name in self._ignored or (owner != name and owner in columns):
            return
        near = get_close_matches(name, self._names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it reads {', '.join(sorted(self._names))}"
        raise RequestError(f"the model reads no column {name!r}; {hint}")

    def _plain(self, columns: Mapping[str, RaggedTensor], size: int) -> Batch:
        empty = {name: empty_rows(dtype, size) for name, dtype in self._dtypes.items() if name not in columns}
        columns = {**columns, **empty}
        for name in self._ids:
            if columns[name].dtype is not torch.int64:
                raise RequestError(f"column {name!r} must have IDs, which are whole numbers")
        floats = {}
        for name, width in self._floats.items():
            column = columns[name]
            if column.dtype is torch.uint8:
                raise RequestError(f"column {name!r} must have numbers, and has texts")
            lengths = column.row_lengths()
            wrong = (lengths != width) & (lengths != 0)
            if bool(wrong.any()):
                row = int(wrong.nonzero()[0])
                raise RequestError(
                    f"column {name!r}: row {row} has {int(lengths[row])} numbers instead of {width}"
                )
            # A missing number reads as 0, as in a batch of a BatchSpec.
            values = column.flat_values.to(torch.float32)
            numbers = column.with_flat_values(torch.where(values.isnan(), 0.0, values)).to_padded(width)
            if bool(numbers.isinf().any()):
                row = int(numbers.isinf().any(1).nonzero()[0])
                raise RequestError(f"column {name!r}: row {row} is {numbers[row].tolist()}")
            floats[name] = numbers
        ids = FeatureIds.pack({name: columns[name] for name in self._ids}, batch_size=size)
        return Batch(ids, floats)

    def _even(self, rows: int, each: int) -> Tensor:
        """Return the row splits of `rows` rows with `each` values."""
        if each != 1 or rows > _KEPT_SIZES:
            return torch.arange(rows + 1) * each
        found = self._splits.get(rows)
        if found is None:
            found = self._splits[rows] = torch.arange(rows + 1)
        return found


def full_rows(ranking: native.PackedRanking) -> native.PackedRows:
    """Return ranking requests with a row per item.

    Raises:
        RequestTooLargeError: They have too many values.
    """
    found = ranking.full(MOST_REPEATED)
    if found is None:
        raise RequestTooLargeError(
            f"columns with one row for all items would have more than {MOST_REPEATED} values if they are "
            "repeated for each item. Send fewer items in a request."
        )
    return found


def _wrong_kind(name: str, wanted: str, row: int | None) -> RequestError:
    where = "" if row is None else f" in row {row}"
    if wanted == "list":
        return RequestError(
            f"column {name!r} has one value{where}, and the model reads a list: send a list for each row, "
            f"also if it has one item, as [[...], [...]], or all items with {name + SPLITS!r}"
        )
    return RequestError(
        f"column {name!r} has a list{where}, and the model reads one value: send one value for each row, as "
        "[..., ...]"
    )


def kinds_of(batch: Batch) -> dict[str, Kind]:
    """Return for each raw column of a batch whether it has lists or one value, if that is known."""
    found: dict[str, Kind] = {}
    for name, column in batch.raw.items():
        known = batch.raw_kinds.get(name)
        if known is not None:
            found[name] = "scalar" if known.single else "list"
        elif bool((column.row_lengths() > 1).any()):
            found[name] = "list"
    return found


def _inputs_of(spec: FeatureSpec, kinds: Mapping[str, Kind]) -> tuple[TensorSpec, ...]:
    lists: set[str] = set()
    widths: dict[str, int] = {}
    # A column with a separator may be one text or a list of its items: both are accepted.
    split: set[str] = set()
    for name, one in spec.read_features.items():
        if isinstance(one, CrossFeature):
            continue
        columns = {one.column or name}
        if isinstance(one, HistoryFeature):
            columns = {each.column for each in spec.histories[name]}
        if one.separator is not None:
            split |= columns
        elif isinstance(one, SequenceFeature | HistoryFeature):
            lists |= columns
        elif isinstance(one, FloatFeature):
            widths[one.column or name] = one.width
    found = []
    for column, dtype in spec.inputs.items():
        width = widths.get(column, 1)
        kind: Kind = "list" if column in lists and column in kinds else kinds.get(column, "")
        if column in split:
            kind = ""
        shape: tuple[int, ...] = (-1, -1) if column in lists or kind == "list" else (-1,)
        if width > 1:
            kind, shape = "", (-1, width)
        found.append(
            TensorSpec(
                name=column,
                datatype=_DATATYPES[dtype],
                shape=shape,
                optional=column in spec.optional,
                kind=kind,
                meaning="time" if dtype is TIME else "",
            )
        )
    return tuple(found)


# One column

_FORMS = (list, tuple, np.ndarray)


def _cells(given: Any, splits: Tensor) -> RawCells | None:
    """Return a column with one plain value per row in the form of the core; None for any other column."""
    kind = type(given)
    if kind is np.ndarray:
        is_plain = given.ndim == 1 and given.flags.c_contiguous and given.dtype in (np.int64, np.float32)
        return RawCells(torch.from_numpy(_writable(given)), None, splits) if is_plain else None
    if kind is not list and kind is not tuple:
        return None
    kinds = set(map(type, given))
    if kinds == {int}:
        return RawCells(torch.tensor(given), None, splits) if _fits(given) else None
    if kinds == {float}:
        return RawCells(torch.tensor(given, dtype=torch.float32), None, splits)
    if kinds == {str}:
        joined = "".join(given)
        if not joined.isascii():
            return None
        data = bytearray(joined, "ascii")
    elif kinds == {bytes}:
        data = bytearray().join(given)
    else:
        return None
    begins = np.zeros(len(given) + 1, np.int64)
    np.fromiter(map(len, given), np.int64, len(given)).cumsum(out=begins[1:])
    texts = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return RawCells(texts, torch.from_numpy(begins), splits)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that torch accepts without a warning: arrays over received bytes are read-only."""
    return array if array.flags.writeable else array.copy()


def to_column(name: str, given: Any, splits: Any, even: Callable[[int, int], Tensor]) -> RaggedTensor:
    """Return a column in the form of records.

    Args:
        splits: The row splits, if the request has them as a separate input.
        even: Returns the row splits of rows with equal numbers of values.

    Raises:
        RequestError: The column cannot be read; gives the reason.
    """
    try:
        values, rows = _values(name, given, even, flat=splits is not None)
        if splits is None:
            return RaggedTensor(values, rows, validate=False) if rows is not None else _ragged(given)
        return RaggedTensor(values, _checked_splits(name, splits, len(values)), validate=False)
    except RequestError:
        raise
    except (MonolithError, TypeError, ValueError, OverflowError) as cause:
        raise RequestError(f"column {name!r} cannot be read: {cause}") from cause


def _ragged(given: RaggedTensor) -> RaggedTensor:
    dtype = given.dtype
    if dtype in (torch.int64, torch.float32) or (dtype is torch.uint8 and given.ragged_rank == 2):
        return given
    return given.with_flat_values(_number_tensor(given.flat_values))


def _values(
    name: str, given: Any, even: Callable[[int, int], Tensor], *, flat: bool
) -> tuple[Tensor | RaggedTensor, Tensor | None]:
    """Return all values of a column, and its row splits; None for a ragged column, which has its own."""
    if isinstance(given, RaggedTensor):
        return given.values, None
    if isinstance(given, np.ndarray):
        if given.dtype == object or given.dtype.kind in "SU":
            given = given.tolist()
        elif given.dtype.kind == "M":
            given = seconds_of(given)
        elif given.dtype == np.float64 and given.ndim == 1 and are_whole(given):
            given = given.tolist()
        else:
            given = torch.from_numpy(_native(given))
    if isinstance(given, Tensor):
        if given.ndim not in (1, 2) or (flat and given.ndim != 1):
            wanted = "(values,)" if flat else "(rows,) or (rows, k)"
            raise RequestError(f"column {name!r} must have shape {wanted}, got {tuple(given.shape)}")
        each = 1 if given.ndim == 1 else given.shape[1]
        return _number_tensor(given.detach().cpu().reshape(-1)), even(len(given), each)
    if not isinstance(given, list | tuple):
        raise RequestError(
            f"column {name!r} must be a list with a value for each row, an array or a tensor, got "
            f"{type(given).__name__}"
        )
    return _of_list(name, given, even)


def _of_list(
    name: str, given: Sequence[Any], even: Callable[[int, int], Tensor]
) -> tuple[Tensor | RaggedTensor, Tensor]:
    kinds = set(map(type, given))
    # Floats need a closer check: mixed with other types they may mean missing values, and alone IDs or
    # times.
    if kinds <= _SCALARS and (float not in kinds or (len(kinds) == 1 and not are_whole(np.array(given)))):
        return _flat(name, given, kinds, None), even(len(given), 1)
    return _of_lists(name, [values_of(one) for one in given])


def _of_lists(name: str, lists: list[list[Any]]) -> tuple[Tensor | RaggedTensor, Tensor]:
    """Return the values of lists, in which None is a missing value."""
    kinds = {type(value) for one in lists for value in one}
    if kinds <= {float, int, _NONE} and float in kinds:
        there = np.array([value for one in lists for value in one if value is not None], dtype=np.float64)
        if are_whole(there):
            lists = [[value if value is None else int(value // 1) for value in one] for one in lists]
            kinds = {int}
    if float in kinds:
        lists = [[nan if value is None else value for value in one] for one in lists]
    else:
        lists = [[value for value in one if value is not None] for one in lists]
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    values = [value for one in lists for value in one]
    rows = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(lengths, out=rows[1:])
    return _flat(name, values, set(map(type, values)), rows), torch.from_numpy(rows)


_SCALARS = {str, bytes, int, float}
_NONE = type(None)


def _flat(
    name: str, values: Sequence[Any], kinds: set[type], rows: NDArray[np.int64] | None
) -> Tensor | RaggedTensor:
    """Return values of one type as a tensor, or texts as rows of bytes."""
    if kinds <= {int}:
        return torch.from_numpy(np.array(values, dtype=np.int64)) if _fits(values) else _signed(values)
    if kinds <= {float} or kinds == {int, float}:
        return torch.from_numpy(np.array(values, dtype=np.float32))
    if kinds <= {str, bytes}:
        texts = [one.encode("utf-8", "surrogateescape") if type(one) is str else one for one in values]
        splits = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=splits[1:])
        joined = np.frombuffer(bytearray(b"".join(texts)), np.uint8)
        return RaggedTensor(torch.from_numpy(joined), torch.from_numpy(splits), validate=False)
    return _odd(name, values, rows)


def _odd(name: str, values: Sequence[Any], rows: NDArray[np.int64] | None) -> Tensor | RaggedTensor:
    """Convert numpy scalars, bools and buffers to plain values; raise an error with the row of other
    types."""
    plain: list[Any] = []
    for number, given in enumerate(values):
        value = given.item() if isinstance(given, np.generic) or _is_scalar(given) else given
        if isinstance(value, bool):
            value = int(value)
        elif isinstance(value, bytearray | memoryview):
            value = bytes(value)
        if type(value) not in _SCALARS:
            row = number if rows is None else int(np.searchsorted(rows, number, side="right")) - 1
            raise RequestError(
                f"column {name!r}: row {row} has {value!r:.40}, a {type(value).__name__}: values are texts, "
                "bytes or numbers"
            )
        plain.append(value)
    kinds = set(map(type, plain))
    if kinds & {str, bytes} and kinds & {int, float}:
        is_text = isinstance(plain[0], str | bytes)
        other = next(n for n, one in enumerate(plain) if isinstance(one, str | bytes) is not is_text)
        row = other if rows is None else int(np.searchsorted(rows, other, side="right")) - 1
        raise RequestError(
            f"column {name!r}: row {row} has {plain[other]!r:.40}, and the rows before have "
            f"{'texts' if is_text else 'numbers'}"
        )
    return _flat(name, plain, kinds, rows)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _fits(values: Sequence[int]) -> bool:
    return not values or (max(values) < 1 << 63 and min(values) >= -(1 << 63))


def _signed(values: Sequence[int]) -> Tensor:
    """Return IDs, some of which exceed int64, as int64 with the same bits."""
    if max(values) >= 1 << 64 or min(values) < -(1 << 63):
        raise ValueError("a number does not fit into 64 bits")
    return torch.tensor([one - (1 << 64) if one >= 1 << 63 else one for one in values], dtype=torch.int64)


def _native(array: NDArray[Any]) -> NDArray[Any]:
    if not array.flags.c_contiguous or not array.flags.writeable or not array.dtype.isnative:
        return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return array


def _number_tensor(values: Tensor) -> Tensor:
    if values.dtype in (torch.int64, torch.float32):
        return values
    if values.dtype is torch.uint64:
        return values.view(torch.int64)
    if values.dtype.is_complex:
        raise ValueError(f"its numbers are {str(values.dtype).removeprefix('torch.')}")
    return values.to(torch.float32 if values.dtype.is_floating_point else torch.int64)


def _checked_splits(name: str, given: Any, values: int) -> Tensor:
    splits = torch.as_tensor(given)
    if splits.dtype is not torch.int64 or splits.ndim != 1 or not len(splits):
        raise RequestError(f"column {name + SPLITS!r} must be int64 of shape (rows + 1,)")
    rises = bool((splits[1:] >= splits[:-1]).all())
    if int(splits[0]) != 0 or int(splits[-1]) != values or not rises:
        raise RequestError(
            f"column {name + SPLITS!r} must rise from 0 to the {values} values of {name!r}, got "
            f"{splits.tolist()[:8]}{' ...' if len(splits) > 8 else ''}"
        )
    return splits
