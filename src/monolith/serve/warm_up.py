"""Warm-up requests: a few of real data, in the JSON of the Open Inference Protocol, beside the model.

The first requests of a process pay for what the later ones find ready: pages, caches, threads. A server asks
itself these before anybody else does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from monolith.errors import CorruptFileError
from monolith.feature import Batch
from monolith.serve.raw import SPLITS
from monolith.serve.signature import TensorSpec
from monolith.tensors import RaggedTensor

WARM_UP = "warmup.json"
SIZES = (1, 32, 1, 32)
"""Rows of the requests that are drawn."""
_ARRAYS = {"INT64": np.int64, "FP32": np.float32}


def draw_requests(batch: Batch, inputs: Sequence[TensorSpec], *, raw: bool) -> list[dict[str, Any]]:
    """Return requests of the first rows of a batch.

    Args:
        inputs: What the model is asked with.
        raw: Whether these are the raw columns of the batch, and not its ids and floats by feature.
    """
    columns = {}
    for one in inputs:
        column = batch.raw.get(one.name) if raw else _by_feature(batch, one.name)
        if column is None:
            if one.optional:
                continue
            return []
        columns[one.name] = column
    requests, begin = [], 0
    for size in SIZES:
        end = min(begin + size, len(batch))
        if begin == end:
            break
        requests.append(_request(columns, {one.name: one for one in inputs}, begin, end))
        begin = end
    return requests


def _by_feature(batch: Batch, name: str) -> RaggedTensor | None:
    if name in batch.ids.names:
        found = batch.ids[name]
        return found if found.nrows == len(batch) else None
    if name in batch.floats:
        numbers = batch.floats[name]
        lengths = torch.full((len(numbers),), numbers.shape[1])
        return RaggedTensor.from_row_lengths(numbers.reshape(-1), lengths)
    return None


def _request(
    columns: Mapping[str, RaggedTensor], specs: Mapping[str, TensorSpec], begin: int, end: int
) -> dict[str, Any]:
    inputs: list[dict[str, Any]] = []
    for name, column in columns.items():
        rows = column.to_list()[begin:end]
        values = [_plain(value) for row in rows for value in row]
        text = column.dtype is torch.uint8
        datatype = "BYTES" if text else "INT64" if column.dtype is torch.int64 else "FP32"
        if all(len(row) == 1 for row in rows) and len(specs[name].shape) == 1:
            inputs.append(_tensor(name, datatype, [len(rows)], values))
            continue
        splits = np.cumsum([0, *map(len, rows)]).tolist()
        inputs.append(_tensor(name, datatype, [len(values)], values))
        inputs.append(_tensor(name + SPLITS, "INT64", [len(splits)], splits))
    return {"inputs": inputs}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(str(np.float32(value)))  # as short as reads back the same
    return bytes(value).decode("utf-8", "surrogateescape") if isinstance(value, list) else value


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def write_requests(requests: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the file of some requests."""
    return json.dumps({"requests": list(requests)}, indent=1).encode() + b"\n"


def read_requests(data: bytes, name: str) -> Iterator[dict[str, Any]]:
    """Yield the columns of each request of a file, as `Predictor.predict` takes them.

    Raises:
        CorruptFileError: The file is torn.
    """
    try:
        for request in json.loads(data)["requests"]:
            yield {
                one["name"]: one["data"]
                if one["datatype"] == "BYTES"
                else np.array(one["data"], dtype=_ARRAYS[one["datatype"]]).reshape(one["shape"])
                for one in request["inputs"]
            }
    except (ValueError, KeyError, TypeError) as cause:
        raise CorruptFileError(name, 0, f"it holds no requests: {cause}") from cause
