"""The wire of the data service: its calls over Arrow Flight, their arguments, and records as Arrow batches.

    int64, float32   large_list<int64>, large_list<float>: the values and the row splits as they are
    strings          large_list<large_binary>
    shared           a dictionary of the one row, with an index of 0 for every record

Any reader of Arrow sees what each record contains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from monolith import concurrency
from monolith.data.records import Records
from monolith.data.service.job import Place
from monolith.errors import ConfigError, DataError, RestoreError, ShutOutError
from monolith.feature import ColumnKind
from monolith.tensors import RaggedTensor
from monolith.wire import flight, flight_transport
from monolith.wire.endpoint import Fetch, Handlers
from monolith.wire.flight import POLL, Address, Clock, StoppedError
from monolith.wire.flight_server import Server
from monolith.wire.messages import Bounds, Call, Count, Json, Name, Seconds, Text
from monolith.wire.ports import Limits, join_address
from monolith.wire.transport import PortGuard, Service

_Many = Annotated[int, Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True)
class PlaceBody:
    """A `Place`, as JSON has it."""

    position: Json
    skip: Count = 0

    def read(self) -> Place:
        return Place(self.position, self.skip)


@dataclass(frozen=True, slots=True)
class OfWorker:
    worker: Name


@dataclass(frozen=True, slots=True)
class LeaseBody:
    worker: Name
    wait: Seconds


@dataclass(frozen=True, slots=True)
class RenewBody:
    worker: Name
    leases: Annotated[list[Name], Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True)
class AnnounceBody:
    lease: Name
    sequence: Count
    place: PlaceBody
    size: Annotated[int, Bounds(1, 1 << 32)]
    after: PlaceBody


@dataclass(frozen=True, slots=True)
class FinishBody:
    lease: Name
    chunks: Count


@dataclass(frozen=True, slots=True)
class FailBody:
    lease: Name
    error: Text


@dataclass(frozen=True, slots=True)
class ChunkBody:
    """Also the ticket by which a trainer fetches: it names a chunk, and says nothing of what that is."""

    job: Name
    epoch: Count
    number: Count
    sequence: Count

    @property
    def id(self) -> tuple[str, int, int, int]:
        return self.job, self.epoch, self.number, self.sequence


@dataclass(frozen=True, slots=True)
class AttachBody:
    trainer: Name
    job: Name | None
    turn: Count
    session: Name | None = None
    """The one that the trainer wants; None leaves the choice to the dispatcher."""


@dataclass(frozen=True, slots=True)
class TurnsBody:
    trainer: Name
    session: Name
    turn: Count
    most: _Many
    wait: Seconds


@dataclass(frozen=True, slots=True)
class AcknowledgeBody:
    trainer: Name
    turn: Count


@dataclass(frozen=True, slots=True)
class ReleaseBody:
    trainer: Name
    job: Name | None = None
    turn: Count | None = None


__all__ = [
    "POLL",
    "Address",
    "Call",
    "Clock",
    "DataCaller",
    "DataServer",
    "PortGuard",
    "StoppedError",
    "UnreachableError",
    "import_arrow",
    "join_address",
]


class UnreachableError(DataError):
    """No process answers at an address. Callers catch it and raise an error that says what they wanted."""


SERVICE = Service(
    name="data service",
    peers="dispatcher, data workers and trainers (--token-file, or security.token_file of a run)",
    failure=DataError,
    told=(RestoreError, ConfigError, ShutOutError, DataError),
    unreachable=UnreachableError,
    late=UnreachableError,
)


def import_arrow() -> Any:
    """Return pyarrow, or say how to get it."""
    return flight_transport.import_arrow("the data service")


class DataServer(Server):
    """Answers calls of the data service."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        *,
        fetch: Fetch | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        limits: Limits | None = None,
        out_of_memory: Callable[[BaseException], None] | None = None,
    ) -> None:
        handlers = Handlers(calls=calls, fetch=fetch, out_of_memory=out_of_memory)
        super().__init__(SERVICE, handlers, host=host, port=port, guard=guard, limits=limits)


class DataCaller(flight.Caller):
    """Makes calls to a dispatcher or a data worker."""

    def __init__(
        self,
        address: Address,
        *,
        guard: PortGuard | None = None,
        patience: timedelta = timedelta(),
        stops: Sequence[concurrency.Event] = (),
        clock: Clock = concurrency.monotonic,
    ) -> None:
        super().__init__(SERVICE, address, guard=guard, patience=patience, stops=stops, clock=clock)


_KIND = b"monolith.kind"
"""In the metadata of a field: how the data stores the column, as JSON."""


def to_batch(records: Records) -> Any:
    """Return records as a `pyarrow.RecordBatch` over the same memory.

    Raises:
        DataError: They have no columns, so Arrow could not say how many there are.
    """
    arrow = import_arrow()
    if not records.columns:
        raise DataError(f"data service: {records.size} records without a column cannot be sent")
    arrays = []
    for name, column in records.columns.items():
        array = _to_list_array(arrow, column)
        if name in records.shared:
            nothing = arrow.array(np.zeros(records.size, dtype=np.int32))
            array = arrow.DictionaryArray.from_arrays(nothing, array)
        arrays.append(array)
    metadata = {
        name: {_KIND: json.dumps([kind.type, kind.single])} if (kind := records.kinds.get(name)) else None
        for name in records.columns
    }
    schema = [
        arrow.field(name, one.type, metadata=metadata[name])
        for name, one in zip(metadata, arrays, strict=True)
    ]
    return arrow.RecordBatch.from_arrays(arrays, schema=arrow.schema(schema))


def from_batch(batch: Any) -> Records:
    """Return what `to_batch` was given, over the memory of the batch.

    Raises:
        DataError: A column is of a type that records do not have, or lacks a value.
    """
    arrow = import_arrow()
    columns, shared = {}, set()
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        rows = array
        if arrow.types.is_dictionary(array.type):
            shared.add(name)
            rows = array.dictionary
        columns[name] = _from_list_array(arrow, name, rows)
    kinds = {
        one.name: ColumnKind(*json.loads(one.metadata[_KIND]))
        for one in batch.schema
        if _KIND in (one.metadata or {})
    }
    return Records(batch.num_rows, columns, frozenset(shared), kinds=kinds)


def _to_list_array(arrow: Any, column: RaggedTensor) -> Any:
    values = column.values
    if isinstance(values, RaggedTensor):
        text = arrow.py_buffer(values.flat_values.numpy())
        inner = arrow.Array.from_buffers(
            arrow.large_binary(), values.nrows, [None, arrow.py_buffer(values.row_splits.numpy()), text]
        )
    else:
        inner = _to_array(arrow, values)
    return arrow.LargeListArray.from_arrays(_to_array(arrow, column.row_splits), inner)


def _to_array(arrow: Any, values: Tensor) -> Any:
    kind = arrow.int64() if values.dtype is torch.int64 else arrow.float32()
    return arrow.Array.from_buffers(kind, len(values), [None, arrow.py_buffer(values.numpy())])


def _from_list_array(arrow: Any, name: str, array: Any) -> RaggedTensor:
    kind = array.type
    if not arrow.types.is_large_list(kind) or array.null_count or array.values.null_count:
        raise DataError(f"data service: column {name!r} must be a large_list without nulls, got {kind}")
    if not len(array):
        splits = torch.zeros(1, dtype=torch.int64)
        begin = end = 0
    else:
        splits = from_dlpack(array.offsets)
        begin, end = int(splits[0]), int(splits[-1])
    inner = array.values.slice(begin, end - begin)
    if begin:
        splits = splits - begin
    item = kind.value_type
    values: Tensor | RaggedTensor
    if item == arrow.int64() or item == arrow.float32():
        values = from_dlpack(inner)
    elif arrow.types.is_large_binary(item):
        values = _from_texts(arrow, inner)
    else:
        raise DataError(f"data service: column {name!r} holds {item}, not int64, float or large_binary")
    return RaggedTensor(values, splits)


def _from_texts(arrow: Any, texts: Any) -> RaggedTensor:
    if not len(texts):
        return RaggedTensor(
            torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), validate=False
        )
    _, offsets, data = texts.buffers()
    whole = arrow.Array.from_buffers(arrow.int64(), texts.offset + len(texts) + 1, [None, offsets])
    splits = from_dlpack(whole.slice(texts.offset))
    begin, end = int(splits[0]), int(splits[-1])
    if end == begin:
        values = torch.empty(0, dtype=torch.uint8)
    else:
        values = from_dlpack(arrow.Array.from_buffers(arrow.uint8(), end, [None, data]).slice(begin))
    return RaggedTensor(values, splits - begin if begin else splits)
