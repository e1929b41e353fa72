"""Requests that the core packs out of the bytes received: equal to the reader of columns, or not packed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith import native
from monolith.errors import RequestError, RequestTooLargeError
from monolith.feature import Batch, BucketFeature, FeatureSpec, FloatFeature, IdFeature, Label
from monolith.serve.candidates import CandidateColumns
from monolith.serve.config import ServeLimits
from monolith.serve.manifest import Signature
from monolith.serve.request_reader import RequestReader
from monolith.serve.server.batching import Quotas
from monolith.serve.server.grpc_port import _tensors
from monolith.serve.server.http_bodies import _inputs
from monolith.serve.server.shared_memory import SharedInputs, SharedMemoryRegions
from monolith.serve.server.tensors import RequestColumns, columns_of, merged
from monolith.wire.open_inference import message_types

Columns = Mapping[str, tuple[str, list[Any]]]
"""Name -> datatype, a value for each row."""

SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "item": IdFeature(kind="int"),
        "tags": IdFeature(kind="string", separator="|"),
        "codes": IdFeature(kind="int", column="texts", separator=","),
        "age": BucketFeature(boundaries=(18.0, 30.5, 65.0)),
        "price": FloatFeature(scale="log"),
        "again": FloatFeature(column="price"),
    },
    labels={"click": Label()},
)
READER = RequestReader(SPEC)
SIGNATURE = Signature(inputs=READER.inputs, outputs=())
DATATYPES = {one.name: one.datatype for one in READER.inputs}
NOT_SHARED = SharedInputs(SharedMemoryRegions("", 0), Quotas(ServeLimits()).admit(""))

texts = st.one_of(st.text(max_size=20), st.sampled_from(["a|b||c", "|", "1,2", " 7 ", 'x"y\\z\n', "é"]))
wholes = st.integers(-(1 << 63), (1 << 63) - 1)
values = {
    "user": texts,
    "item": st.integers(0, (1 << 48) - 1) | wholes,
    "tags": texts,
    "texts": st.lists(st.integers(0, 1 << 40), max_size=3).map(lambda some: ",".join(map(str, some))) | texts,
    "age": st.floats(width=32, allow_nan=False),
    "price": st.floats(width=32),
}


@st.composite
def requests(draw) -> Columns:
    """Return a request; of some columns it may have one row, which holds for all."""
    rows = draw(st.integers(1, 5))
    names = draw(st.permutations(sorted(values)))
    shared = draw(st.just(frozenset()) | st.frozensets(st.sampled_from(names)))
    found = {}
    for name in names:
        size = 1 if name in shared else rows
        found[name] = (DATATYPES[name], draw(st.lists(values[name], min_size=size, max_size=size)))
    return found


def raw_of(datatype: str, given: list[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(len(one.encode()).to_bytes(4, "little") + one.encode() for one in given)
    return np.array(given, {"INT64": np.int64, "FP32": np.float32}[datatype]).tobytes()


def grpc_message(columns: Columns, *, typed: bool = False) -> bytes:
    message = message_types().ModelInferRequest(model_name="m", model_version="3", id="é")
    message.outputs.add(name="click")
    for name, (datatype, given_values) in columns.items():
        one = message.inputs.add(name=name, datatype=datatype, shape=[len(given_values)])
        if not typed:
            message.raw_input_contents.append(raw_of(datatype, given_values))
        elif datatype == "BYTES":
            one.contents.bytes_contents.extend(value.encode() for value in given_values)
        elif datatype == "INT64":
            one.contents.int64_contents.extend(given_values)
        else:
            one.contents.fp32_contents.extend(given_values)
    return message.SerializeToString()


def http_body(columns: Columns, *, binary: bool = False, **more: Any) -> tuple[bytes, int]:
    inputs, raws = [], []
    for name, (datatype, given_values) in columns.items():
        line = {"name": name, "shape": [len(given_values)], "datatype": datatype}
        if binary:
            raws.append(raw_of(datatype, given_values))
            line["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            line["data"] = given_values
        inputs.append(line)
    head = json.dumps({"id": "7", "inputs": inputs, **more}, ensure_ascii=False).encode("utf-8", "replace")
    return b"".join([head, *raws]), len(head)


def by_core(message: bytes, head: int | None) -> native.PackedRows | native.PackedRanking | None:
    read = native.read_grpc_request(message) if head is None else native.read_http_request(message, head)
    return None if read is None else READER.pack(read)


def by_python(message: bytes, head: int | None) -> Batch:
    if head is None:
        tensors = _tensors(message_types().ModelInferRequest.FromString(message), NOT_SHARED)
    else:
        tensors = list(_inputs(json.loads(message[:head]), memoryview(message)[head:], NOT_SHARED))
    asked = columns_of(tensors, SIGNATURE).asked
    return READER.batch(asked.full() if isinstance(asked, CandidateColumns) else asked)


def same(one: Batch, other: Batch) -> bool:
    return (
        len(one) == len(other)
        and one.ids.names == other.ids.names
        and torch.equal(one.ids.ids, other.ids.ids)
        and torch.equal(one.ids.splits, other.ids.splits)
        and one.floats.keys() == other.floats.keys()
        and all(torch.equal(one.floats[name], other.floats[name]) for name in one.floats)
    )


FORMS: dict[str, Callable[[Columns], tuple[bytes, int | None]]] = {
    "grpc raw": lambda columns: (grpc_message(columns), None),
    "grpc typed": lambda columns: (grpc_message(columns, typed=True), None),
    "http json": http_body,
    "http binary": lambda columns: http_body(columns, binary=True),
}
USUAL: Columns = {
    "user": ("BYTES", ["ann", "", "a text of more than sixteen bytes"]),
    "item": ("INT64", [7, 0, 1 << 40]),
    "tags": ("BYTES", ["a|b", "", "|c"]),
    "texts": ("BYTES", ["1,2", "", " 3 "]),
    "age": ("FP32", [18.0, 30.5, -1.0]),
    "price": ("FP32", [0.5, -3.0, 1e30]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_usual_request_is_packed_as_columns_are_read(form):
    message, head = FORMS[form](USUAL)
    packed = by_core(message, head)
    assert packed is not None
    assert same(READER.batch(packed), by_python(message, head))


RANKING: Columns = {
    **USUAL,
    "user": ("BYTES", ["ann"]),
    "tags": ("BYTES", ["a|b"]),
    "age": ("FP32", [30.0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_ranking_request_is_packed_with_the_row_of_its_user_once(form):
    message, head = FORMS[form](RANKING)
    packed = by_core(message, head)
    assert isinstance(packed, native.PackedRanking)
    assert (packed.shared.rows, packed.items.rows, packed.counts.tolist()) == (1, 3, [3])
    assert len(packed.shared.ids) == 4  # of ann, a and b, and a bucket
    is_own = dict(zip((one.name for one in READER.inputs), packed.own, strict=True))
    assert {name for name, own in is_own.items() if own} == {"item", "texts", "price"}
    assert same(READER.batch(packed), by_python(message, head))


def test_ranking_requests_are_merged_and_cut_as_columns_are():
    message, head = FORMS["grpc raw"](RANKING)
    packed = by_core(message, head)
    assert isinstance(packed, native.PackedRanking)
    whole = RequestColumns.of_packed(packed)
    pieces = [whole.part(0, 1), whole.part(1, 3)]
    assert [piece.rows for piece in pieces] == [1, 2]
    assert same(READER.batch(merged(pieces)), READER.batch(packed))
    twice = {
        name: (datatype, some * (2 if len(some) > 1 else 6)) for name, (datatype, some) in RANKING.items()
    }
    assert same(READER.batch(merged([whole, whole])), by_python(*FORMS["grpc raw"](twice)))


def test_a_row_that_would_take_too_much_memory_for_each_item_is_refused():
    tags = "|".join(["t"] * 2000)
    columns: Columns = {name: (kind, some * 3000) for name, (kind, some) in USUAL.items()} | {
        "tags": ("BYTES", [tags])
    }
    packed = by_core(*FORMS["grpc raw"](columns))
    assert isinstance(packed, native.PackedRanking)
    with pytest.raises(RequestTooLargeError, match="Send fewer items"):
        READER.batch(packed)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=tries(60), deadline=None)
@given(columns=requests())
def test_what_is_packed_is_what_the_reader_of_columns_reads(form, columns):
    try:
        message, head = FORMS[form](columns)
    except (UnicodeEncodeError, ValueError):
        return  # half of a character is no text that can be sent
    packed = by_core(message, head)
    try:
        wanted = by_python(message, head)
    except (RequestError, ValueError):
        assert packed is None
        return
    assert packed is None or same(READER.batch(packed), wanted)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=tries(200), deadline=None)
@given(data=st.data())
def test_a_torn_request_is_packed_only_if_it_still_reads_the_same(form, data):
    message, head = FORMS[form](USUAL)
    torn = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(torn) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "double"])):
            case "flip":
                torn[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                torn[at] = data.draw(st.integers(0, 255))
            case "cut":
                del torn[at:]
            case "double":
                torn[at:at] = torn[max(0, at - 8) : at]
        if not torn:
            break
    if head is not None:
        head = min(head, len(torn))
    packed = by_core(bytes(torn), head)
    try:
        wanted = by_python(bytes(torn), head)
    except Exception:  # whatever is wrong, the core must not have packed it
        assert packed is None
        return
    assert packed is None or same(READER.batch(packed), wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"user": None},
        {"extra": ("INT64", [1, 2, 3])},
        {"item": ("INT64", [1, 2])},
        {"item": ("FP32", [1.0, 2.0, 3.0])},
        {"user": ("INT64", [1, 2, 3])},
        {"price": ("INT64", [1, 2, 3])},
        {"price": ("FP32", [float("nan"), 1.0, 2.0])},
        {"texts": ("BYTES", ["x", "1", "2"])},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["grpc raw", "grpc typed", "http binary"])
def test_an_unusual_request_is_left_to_the_reader_of_columns(form, change):
    columns = {name: one for name, one in {**USUAL, **change}.items() if one is not None}
    assert by_core(*FORMS[form](columns)) is None


def test_json_with_anything_unusual_is_left_to_python():
    body, head = http_body(USUAL)
    text = body[:head].decode()
    assert by_core(body, head) is not None
    for old, new in [
        ('"id": "7"', '"id": 7'),
        ('"id": "7"', '"id": "7", "id": "8"'),
        ('"id": "7"', '"parameters": {"timeout": 5}'),
        ("[7, 0,", "[7, null,"),
        ("[7, 0,", "[7, true,"),
        ("[7, 0,", "[7.5, 0,"),
        ("[7, 0,", "[99999999999999999999, 0,"),
        ("[7, 0,", "[07, 0,"),
        ("[7, 0, 1099511627776]", "[[7], [0], [1099511627776]]"),
        ('"shape": [3]', '"shape": [3, 2]'),
        ('"shape": [3]', '"shape": []'),
        ('"INT64"', '"INT32"'),
    ]:
        changed = text.replace(old, new, 1).encode()
        assert changed != body
        assert by_core(changed, len(changed)) is None, (old, new)


def test_the_rest_of_a_request_is_read_with_it():
    read = native.read_grpc_request(grpc_message(USUAL))
    assert read is not None
    assert (read.model, read.version, read.id, read.outputs, read.typed) == (
        "m",
        "3",
        "é",
        [("click", None)],
        False,
    )
    wanted = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": True}}]
    body, head = http_body(USUAL, outputs=wanted, parameters={"binary_data_output": True})
    read = native.read_http_request(body, head)
    assert read is not None
    assert (read.id, read.outputs, read.binary_outputs) == ("7", [("a", None), ("b", True)], True)


def test_a_column_of_one_value_per_row_may_have_two_dimensions():
    message = message_types().ModelInferRequest.FromString(grpc_message(USUAL))
    message.inputs[1].shape.append(1)
    data = message.SerializeToString()
    packed = by_core(data, None)
    assert packed is not None
    assert same(READER.batch(packed), by_python(data, None))


def test_packed_rows_are_merged_and_cut_as_columns_are():
    message, head = FORMS["grpc raw"](USUAL)
    packed = by_core(message, head)
    assert packed is not None
    whole = RequestColumns.of_packed(packed)
    pieces = [whole.part(0, 1), whole.part(1, 3)]
    assert [piece.rows for piece in pieces] == [1, 2]
    assert same(READER.batch(merged(pieces)), READER.batch(packed))
    twice = {name: (datatype, some * 2) for name, (datatype, some) in USUAL.items()}
    assert same(READER.batch(merged([whole, whole])), by_python(*FORMS["grpc raw"](twice)))
