"""The messages of the Open Inference Protocol, apart from those of other packages.

The names in `proto/open_inference.proto` belong to the standard, and clients such as tritonclient define the
same ones. Protobuf holds every name once per pool, so both in the usual pool of one process would fail:
whichever came second. These messages live in a pool of their own.

    python -m grpc_tools.protoc -I monolith/wire=proto \\
        --descriptor_set_out=src/monolith/wire/open_inference.binpb monolith/wire/open_inference.proto

writes what is read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

SERVICE = "inference.GRPCInferenceService"
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""Little-endian layout of the values of a raw tensor, for all datatypes but BYTES."""
BF16 = "BF16"
"""A datatype that numpy lacks. Its values are float32 in memory, and their upper two bytes on the wire."""
LENGTH_BYTES = 4
"""Bytes before each text of a raw BYTES tensor, its length."""
CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of a gRPC tensor that has its values, if they are not raw."""
SPLITS = ".row_splits"
"""Suffix of the input that has the row splits of another one, for lists of any length."""
BINARY_EXTENSION = "binary_tensor_data"
"""The extension of a server that takes and sends raw tensors over HTTP, behind the JSON."""
JSON_LENGTH = "inference-header-content-length"
"""The header with the length of the JSON, if raw tensors follow it."""
BINARY_SIZE = "binary_data_size"
BINARY = "binary_data"
BINARY_OUTPUT = "binary_data_output"
TIMEOUT_HEADER = "x-request-timeout-ms"
"""The header with the time that an HTTP client waits."""
PRIORITY = "priority"
"""A parameter of a request, as Triton has it: lower is answered first, and 0 is the default."""
SPLIT_KEY = "split_key"
"""A parameter of a request: requests with one key go to the same target of a split."""
SPLIT_KEY_HEADER = "x-monolith-split-key"
"""The same as a header of HTTP."""
TOP_K, FILTER = "k", "filter"
"""Parameters of a top-k request."""
EXCLUDE = "exclude"
"""The input of a top-k request with the items that are not returned."""
ITEM, SCORE = "item", "score"
"""The outputs of a top-k request; with the row splits of the first."""
RETRY_HEADER = "grpc-retry-pushback-ms"
"""The trailing metadata by which a gRPC server says when to retry; a negative number says never."""


def unsigned_kept(values: Sequence[Any]) -> NDArray[np.int64] | None:
    """Return whole numbers, some of which exceed int64, as int64 with the same bits: as data of unsigned IDs
    is read in training. None if they do not fit into 64 bits either."""
    if not all(isinstance(one, int) and -(1 << 63) <= one < 1 << 64 for one in values):
        return None
    return np.array([one - (1 << 64) if one >= 1 << 63 else one for one in values], np.int64)


def values_dtype(datatype: str) -> np.dtype[Any] | None:
    """Return the numpy type of a tensor's values in memory; None if there is no such datatype."""
    return DTYPES["FP32"] if datatype == BF16 else DTYPES.get(datatype)


def read_bfloat16(raw: bytes | memoryview) -> NDArray[np.float32]:
    """Return the values of a raw BF16 tensor."""
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def write_bfloat16(values: NDArray[np.float32]) -> bytes:
    """Return float32 values as a raw BF16 tensor, each rounded to the nearest one, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # A NaN would be carried over into a number.
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()


@cache
def message_pool() -> Any:
    """Return the descriptors of the protocol, in a pool of their own."""
    from google.protobuf import (  # type: ignore[import-untyped]
        descriptor_pb2,
        descriptor_pool,
    )

    read = resources.files(__package__).joinpath("open_inference.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(read).file:
        pool.Add(file)
    return pool


@cache
def message_types() -> Any:
    """Return every message of the protocol as a class, by name: `message_types().ModelInferRequest`."""
    from google.protobuf import message_factory

    file = message_pool().FindFileContainingSymbol(SERVICE)
    return SimpleNamespace(
        **{
            name: message_factory.GetMessageClass(message)
            for name, message in file.message_types_by_name.items()
        }
    )


@cache
def packed_infer_type() -> Any:
    """Return `ModelInferRequest` with its parts left as bytes: `parameters`, `inputs` and `outputs`.

    Requests of one client usually differ only in their raw contents. A server that has seen such inputs
    before need not decode their names, types and shapes again.
    """
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    whole = message_types().ModelInferRequest.DESCRIPTOR
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="packed_infer_request.proto", package="monolith", syntax="proto3"
    )
    message = file.message_type.add(name="PackedInferRequest")
    for field in whole.fields:
        message.field.add(
            name=field.name,
            number=field.number,
            type=kinds.TYPE_BYTES if field.message_type else field.type,
            label=kinds.LABEL_REPEATED if field.is_repeated else kinds.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("monolith.PackedInferRequest"))


def service_methods() -> dict[str, tuple[Any, Any]]:
    """Return for every method of the service the classes of its request and its answer."""
    types = message_types()
    service = message_pool().FindServiceByName(SERVICE)
    return {
        method.name: (getattr(types, method.input_type.name), getattr(types, method.output_type.name))
        for method in service.methods
    }
