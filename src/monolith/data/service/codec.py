"""Records as Arrow record batches, and back, over the same memory.

    int64, float32   large_list<int64>, large_list<float>: the values and the row splits as they are
    strings          large_list<large_binary>
    shared           a dictionary of the one row, with an index of 0 for every record

Whoever reads Arrow without knowing us sees what each record holds.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from monolith.data.records import Records
from monolith.data.service.flight import import_arrow
from monolith.errors import DataError
from monolith.feature import ColumnKind
from monolith.tensors import RaggedTensor

_KIND = b"monolith.kind"
"""In the metadata of a field: how the data holds the column, as JSON."""


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
    held = {
        name: {_KIND: json.dumps([kind.type, kind.single])} if (kind := records.kinds.get(name)) else None
        for name in records.columns
    }
    schema = [
        arrow.field(name, one.type, metadata=held[name]) for name, one in zip(held, arrays, strict=True)
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
