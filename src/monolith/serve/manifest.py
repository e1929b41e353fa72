"""The manifest of a servable, `servable.json`: the description of an exported model.

It is plain JSON that people and other programs can read. Here it is read strictly: an unknown key, a later
format or a torn file is an error with that reason. It contains a checksum of itself, and the size and
checksum of every other file.

The *signature* lists inputs and outputs with names, types and shapes of the Open Inference Protocol.

*Warm-up requests* are a few requests of real data next to the model, in the JSON of the protocol. The first
requests of a process pay for pages, caches and threads, so a server answers these before it is ready.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from monolith import filesystem, native
from monolith.config import config_from_mapping, to_dict
from monolith.errors import ConfigError, CorruptFileError
from monolith.feature import (
    Batch,
    FeatureSpec,
    InputSpec,
    LayoutKind,
    LayoutPlan,
    LayoutSpec,
    SliceSpec,
    plan_layouts,
)
from monolith.feature.combiners import COMBINERS, FirstN, make_combiner
from monolith.tensors import RaggedTensor
from monolith.wire.open_inference import SPLITS

FORMAT = 1
MANIFEST_NAME = "servable.json"
MOST_JSON_BYTES = 64 << 20
"""Bytes of the manifest, of the warm-up requests and of the program of a graph. As Python objects, JSON takes
seven times as much or more."""

Coding = Literal["fp32", "fp16", "int8", "int4"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableFile:
    """Size and checksum of a file of the folder."""

    bytes: int
    crc: int
    """CRC-32C of the whole file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableInput:
    """An ID feature: the table it reads, and how its rows are combined."""

    table: str
    combiner: Literal["reduce_sum", "reduce_mean", "reduce_max", "first_n", "each"]
    length: int = 0
    """Positions per example for first_n; 0 for other combiners."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableSlice:
    """Floats [start, end) of a feature's rows."""

    feature: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableLayout:
    """One tensor, or several, made of slices of rows."""

    name: str
    kind: Literal["CONCAT", "STACK", "ADDN", "NONE"]
    slices: tuple[ServableSlice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableCollection:
    """One sparse half of a model: features, and the tensors that are made of their rows."""

    inputs: Mapping[str, ServableInput]
    layouts: tuple[ServableLayout, ...]

    @classmethod
    def of(cls, inputs: tuple[InputSpec, ...], layouts: tuple[LayoutSpec, ...]) -> ServableCollection:
        """Return the description of a model's collection."""
        names = {kind: name for name, kind in COMBINERS.items()}
        return cls(
            inputs={
                one.name: ServableInput(
                    table=one.table,
                    combiner=names[type(one.combiner)],  # type: ignore[arg-type]
                    length=one.combiner.n if isinstance(one.combiner, FirstN) else 0,
                )
                for one in inputs
            },
            layouts=tuple(
                ServableLayout(
                    name=layout.name,
                    kind=layout.kind.name,  # type: ignore[arg-type]
                    slices=tuple(
                        ServableSlice(feature=one.feature, start=one.start, end=one.end)
                        for one in layout.slices
                    ),
                )
                for layout in layouts
            ),
        )

    def plan(self, tables: Mapping[str, int]) -> LayoutPlan:
        """Return the plan that gathers rows into tensors.

        Args:
            tables: Table -> width of its rows, of the row source.
        """
        return plan_layouts(
            dict(tables),
            [
                InputSpec(name, one.table, make_combiner(one.combiner, one.length))
                for name, one in self.inputs.items()
            ],
            [
                LayoutSpec(
                    layout.name,
                    LayoutKind[layout.kind],
                    tuple(SliceSpec(one.feature, one.start, one.end) for one in layout.slices),
                )
                for layout in self.layouts
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableTable:
    """A table without optimizer state."""

    file: str
    """Its path in the folder, with / between names."""
    rows: int
    dim: int
    coding: Coding
    largest_error: float
    """Largest difference between an exported number and the trained one."""
    mean_error: float
    expired: int = 0
    """Rows that were left out because they had expired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableTowers:
    """The two towers of a retrieval model, each exported as a graph of its own; see `serve/retrieval.py`."""

    item_id: str
    """The feature whose IDs are the items."""
    user: tuple[str, ...]
    """Features of the user tower."""
    item: tuple[str, ...]
    """Features of the item tower."""
    out: int
    """Floats of a vector."""
    scale: float
    """A score is the dot product of two vectors times this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServableDense:
    """The dense half."""

    kind: Literal["exported", "module"]
    """A graph of torch.export, or a Python module that is made by `factory`."""
    weights: tuple[str, ...]
    """Names of the weights, in the order of the graph's inputs."""
    floats: Mapping[str, int]
    """Float features in order -> their width."""
    outputs: tuple[str, ...]
    """Heads, in the order of the graph's outputs."""
    labels: tuple[str, ...] = ()
    """The labels it was trained on: a batch for a Python module has them, as NaN."""
    torch: str
    """The version of torch that it was exported with."""
    factory: str | None = None
    """package.module:function that returns a `PythonModule`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    times: tuple[str, ...] = ()
    """Features of times that the graph reads; see `monolith.serve.jagged`."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Float feature -> the smallest and the largest number of a sample of the training data, as the model
    reads them; empty if unknown."""
    towers: ServableTowers | None = None
    """The towers of a retrieval model, whose items can be searched; None of other models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Servable:
    """The manifest of an exported model, or of one part of a sharded one."""

    model: str
    version: str
    run: str
    """Identity of the training run: its model_dir."""
    checkpoint: str
    """Base name of the exported checkpoint."""
    step: int
    watermark: int | None
    """Unix seconds that nearly all events it was trained on had reached; None if events have no times."""
    created: float
    """Unix seconds."""
    digest: str
    """Digest of the checkpoint and the export settings; equal digests mean equal exports."""
    log_places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Shard of the trainer -> epoch and sequence of its delta log when the rows were saved. A server that
    follows resumes from there. Empty if the run did not publish."""
    part: str = "whole"
    """whole, or of a sharded servable: entry, ps_0, ps_1, ..."""
    shards: int = 0
    """Number of serving servers that the rows are spread over, by the unsigned ID modulo this number; 0 if
    the rows are in this folder."""
    missing_rows: Literal["refuse", "default"] = "refuse"
    """Whether the entry may read rows as zeros if their server does not answer."""
    features: Mapping[str, Any] | None = None
    """The feature spec; None if the model has none."""
    signature: Signature | None = None
    collections: tuple[ServableCollection, ...] = ()
    dense: ServableDense | None = None
    tables: Mapping[str, ServableTable] = field(default_factory=dict)
    """Tables; of an entry, those of all shards together, whose files the shards have."""
    files: Mapping[str, ServableFile] = field(default_factory=dict)
    """Every file of the folder but this one, by path."""

    @property
    def spec(self) -> FeatureSpec | None:
        return None if self.features is None else FeatureSpec.from_dict(self.features, MANIFEST_NAME)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables.values())

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())


def write_servable(folder: str, servable: Servable) -> None:
    """Write the manifest of a folder."""
    plain = {"format": FORMAT, **to_dict(servable)}
    plain["checksum"] = _checksum(plain)
    with filesystem.atomic_write(filesystem.join(folder, MANIFEST_NAME)) as file:
        file.write(json.dumps(plain, indent=1).encode() + b"\n")


def read_servable(folder: str) -> Servable:
    """Read the manifest of a folder.

    Raises:
        FileMissingError: The folder has none: it is not a servable, or an unfinished one.
        CorruptFileError: It is torn, altered, of a format that this version does not read, or names a file
            outside of the folder.
    """
    path = filesystem.join(folder, MANIFEST_NAME)
    text = read_bounded(path)
    try:
        plain = json.loads(text)
        if not isinstance(plain, dict):
            raise ValueError("expected an object")
    except (ValueError, RecursionError) as cause:
        raise CorruptFileError(path, len(text), f"it is torn, or not JSON: {cause}") from cause
    found = plain.pop("format", None)
    if found != FORMAT:
        raise CorruptFileError(path, 0, f"its format is {found!r}, and this version reads format {FORMAT}")
    checksum = plain.pop("checksum", None)
    try:
        servable = config_from_mapping(Servable, plain, path)
    except (ConfigError, TypeError) as cause:
        raise CorruptFileError(path, 0, str(cause)) from cause
    if checksum != _checksum({"format": FORMAT, **plain}):
        raise CorruptFileError(path, 0, "its checksum does not match: it was altered after it was written")
    for name in {*servable.files, *(table.file for table in servable.tables.values())}:
        parts, inner = name.split("/"), filesystem.join(folder, name)
        if {"", ".", ".."} & set(parts) or "\0" in name or not filesystem.is_below(inner, folder):
            raise CorruptFileError(path, 0, f"its file {name!r:.100} is not inside of the folder")
    for name, table in servable.tables.items():
        if not servable.shards and table.file not in servable.files:
            raise CorruptFileError(path, 0, f"it lists no file of table {name!r:.100}")
    return servable


def read_bounded(path: str, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Return the content of a file of a servable, if it is not too large to be one.

    Raises:
        FileMissingError: There is none.
        CorruptFileError: It is larger.
    """
    if (size := filesystem.file_size(path)) > most_bytes:
        raise CorruptFileError(path, most_bytes, f"it has {size} bytes; at most {most_bytes} are read")
    return filesystem.read_bytes(path)


def _checksum(plain: Mapping[str, Any]) -> int:
    return native.crc32c(json.dumps(plain, sort_keys=True).encode())


Datatype = Literal["BYTES", "INT64", "FP32"]
Meaning = Literal["", "probability", "value", "score", "time"]
"""The meaning of an output: a probability, a value on the scale of its label, or a score that only ranks. Of
an input, "time" is a Unix time, which may also be text in ISO 8601. Empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    """-1 for any size; the first is the number of rows."""
    optional: bool = False
    """Whether a request may leave it out: its cells are then empty."""
    kind: Literal["", "scalar", "list"] = ""
    """Whether a row of an input has one value or a list, as in the data it was trained on; a request with the
    other is refused. Empty if unknown."""
    meaning: Meaning = ""
    """The meaning of the numbers; see `Meaning`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """All inputs and outputs, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


WARM_UP = "warmup.json"
SIZES = (1, 32, 1, 32)
"""Numbers of rows of the warm-up requests."""
_ARRAYS = {"INT64": np.int64, "FP32": np.float32}


def draw_requests(batch: Batch, inputs: Sequence[TensorSpec], *, raw: bool) -> list[dict[str, Any]]:
    """Return requests of the first rows of a batch.

    Args:
        inputs: The inputs of the model.
        raw: Whether these are raw columns of the batch, or else its IDs and floats by feature.
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
        return float(str(np.float32(value)))  # the shortest text that reads back the same
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
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as cause:
        raise CorruptFileError(name, 0, f"it has no requests: {cause}") from cause
