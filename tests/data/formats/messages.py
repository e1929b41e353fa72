"""Messages of every kind that hypothesis makes up, and the columns that they should become.

The protobuf package writes and reads the messages; what is expected is computed from its objects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from monolith.data import Records
from monolith.feature.fids import convert_v1_to_v2
from monolith.tensors import RaggedTensor
from monolith.wire import example_pb2, instance_pb2, line_id_pb2, tf_example_pb2

Row = dict[str, list[Any]]
"""What one record has in each column. Strings are bytes."""

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
UINT64 = st.integers(0, (1 << 64) - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
NAMES = st.sampled_from(["i1", "i2", "f1", "f2", "s1", "fc_slot_3", "naïve name"])
STRINGS = st.binary(max_size=6)

TYPES = {"i": INT64, "f": FLOAT32, "s": STRINGS}
"""The first letter of a name says what a column holds, so that records agree."""


def kind_of(name: str) -> str:
    return name[0] if name[0] in "fs" and name != "fc_slot_3" else "i"


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def narrow(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(number))


@st.composite
def tf_examples(draw: st.DrawFn) -> tuple[bytes, Row]:
    message = tf_example_pb2.Example()
    row: Row = {}
    for name in draw(st.sets(NAMES)):
        values = draw(st.lists(TYPES[kind_of(name)], max_size=4))
        feature = message.features.feature[name]
        lists = {"i": feature.int64_list, "f": feature.float_list, "s": feature.bytes_list}
        lists[kind_of(name)].value.extend(values)
        row[name] = values
    return message.SerializeToString(), row


@st.composite
def monolith_features(draw: st.DrawFn, name: str) -> tuple[example_pb2.Feature, list[Any]]:
    """Return a Feature of the type the name asks for, in any of the ways to write it, and its values."""
    feature = example_pb2.Feature()
    values = draw(st.lists(TYPES[kind_of(name)], max_size=4))
    cut = draw(st.integers(0, len(values)))
    halves = values[:cut], values[cut:]
    match kind_of(name), draw(st.integers(0, 6)):
        case "i", 0:
            fids = draw(st.lists(UINT64, max_size=4))
            feature.fid_v1_list.value.extend(fids)
            return feature, [convert_v1_to_v2(signed(fid)) for fid in fids]
        case "i", 1:
            fids = draw(st.lists(UINT64, max_size=4))
            for half in (fids[:1], fids[1:]):
                feature.fid_v1_lists.list.add().value.extend(half)
            return feature, [convert_v1_to_v2(signed(fid)) for fid in fids]
        case "i", 2:
            feature.fid_v2_list.value.extend(value % (1 << 64) for value in values)
        case "i", 3:
            for half in halves:
                feature.fid_v2_lists.list.add().value.extend(value % (1 << 64) for value in half)
        case "i", 4 if values:
            feature.int64_value = values[0]
            return feature, values[:1]
        case "i", 5:
            for half in halves:
                feature.int64_lists.list.add().value.extend(half)
        case "i", _:
            feature.int64_list.value.extend(values)
        case "f", 0:
            doubles = draw(st.lists(st.floats(allow_nan=False), max_size=4))
            feature.double_list.value.extend(doubles)
            return feature, [narrow(double) for double in doubles]
        case "f", 1:
            for half in halves:
                feature.double_lists.list.add().value.extend(half)
        case "f", 2:
            for half in halves:
                feature.float_lists.list.add().value.extend(half)
        case "f", 3 if values:
            feature.float_value = values[0]
            return feature, values[:1]
        case "f", 4 if values:
            feature.double_value = values[0]
            return feature, values[:1]
        case "f", _:
            feature.float_list.value.extend(values)
        case "s", 0 if values:
            feature.bytes_value = values[0]
            return feature, values[:1]
        case "s", 1:
            for half in halves:
                feature.bytes_lists.list.add().value.extend(half)
        case _:
            feature.bytes_list.value.extend(values)
    return feature, values


@st.composite
def line_ids(draw: st.DrawFn) -> tuple[line_id_pb2.LineId, Row]:
    message = line_id_pb2.LineId()
    row: Row = {}
    int32 = st.integers(-(1 << 31), (1 << 31) - 1)
    text = st.text(st.characters(codec="utf-8"), max_size=4)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "uid": UINT64,
        "req_time": INT64,
        "item_id": UINT64,
        "actions": st.lists(int32, min_size=1, max_size=3),
        "chnid": INT64,
        "pre_actions": st.lists(int32, min_size=1, max_size=3),
        "sample_rate": FLOAT32,
        "special_strategies": st.lists(int32, min_size=1, max_size=3),
        "device_type": text,
        "cid": text,
        "user_id": text,
        "is_draw": st.booleans(),
        "rank": int32,
        "data_source_name": text,
    }
    for field in draw(st.sets(st.sampled_from(sorted(kinds)))):
        value = draw(kinds[field])
        if isinstance(value, list):
            getattr(message, field).extend(value)
            row["line_id." + field] = value
        else:
            setattr(message, field, value)
            value = signed(value) if field in {"uid", "item_id"} else value
            row["line_id." + field] = [value.encode() if isinstance(value, str) else value]
    return message, row


@st.composite
def examples(draw: st.DrawFn) -> tuple[bytes, Row]:
    message = example_pb2.Example()
    row: Row = {}
    for name in draw(st.sets(NAMES)):
        feature, values = draw(monolith_features(name))
        message.named_feature.add(name=name, feature=feature, id=3)
        row[name] = values
    as_features = draw(st.booleans())
    if draw(st.booleans()):
        line_id, columns = draw(line_ids())
        row |= columns
        if as_features:
            feature = example_pb2.Feature(
                bytes_list=example_pb2.BytesList(value=[line_id.SerializeToString()])
            )
            message.named_feature.add(name="__LINE_ID__", feature=feature)
        else:
            message.line_id.CopyFrom(line_id)
    labels = draw(st.lists(FLOAT32, max_size=3))
    row["label"] = labels
    if as_features:
        feature = example_pb2.Feature(float_list=example_pb2.FloatList(value=labels))
        message.named_feature.add(name="__LABEL__", feature=feature)
    else:
        message.label.extend(labels)
    if draw(st.booleans()):
        message.instance_weight = draw(FLOAT32.filter(bool))
        row["instance_weight"] = [message.instance_weight]
    if draw(st.booleans()):
        raw = message.named_raw_feature.add(name="raw")
        raw.raw_feature.feature.add().int64_value = 3
    return message.SerializeToString(), row


@st.composite
def instances(draw: st.DrawFn) -> tuple[bytes, Row]:
    message = instance_pb2.Instance()
    row: Row = {}
    for fid in draw(st.lists(UINT64, max_size=5)):
        message.fid.append(fid)
        row.setdefault(f"fc_slot_{fid >> 54}", []).append(convert_v1_to_v2(signed(fid)))
    for name in draw(st.sets(NAMES.filter(lambda name: name != "fc_slot_3"))):
        values = draw(st.lists(TYPES[kind_of(name)], max_size=4))
        feature = message.feature.add(name=name)
        row[name] = values
        match kind_of(name), draw(st.integers(0, 3)):
            case "i", 0:
                feature.fid.extend(value % (1 << 64) for value in values)
            case "i", 1:
                feature.fid_list.add().value.extend(value % (1 << 64) for value in values)
            case "i", 2:
                feature.int64_list.add().value.extend(values)
            case "i", _:
                feature.int64_value.extend(values)
            case "f", 0:
                feature.float_list.add().value.extend(values)
            case "f", _:
                feature.float_value.extend(values)
            case "s", 0:
                feature.bytes_list.add().value.extend(values)
            case _:
                feature.bytes_value.extend(values)
    if draw(st.booleans()):
        line_id, columns = draw(line_ids())
        message.line_id.CopyFrom(line_id)
        row |= columns
    row["label"] = draw(st.lists(FLOAT32, max_size=3))
    message.label.extend(row["label"])
    row["value"] = draw(st.lists(FLOAT32, max_size=2))
    message.value.extend(row["value"])
    if draw(st.booleans()):
        message.instance_weight = draw(FLOAT32)
        row["instance_weight"] = [message.instance_weight]
    message.dense.append(1)
    message.label_tag.key = 3
    message.next_fid.append(5)
    return message.SerializeToString(), row


KINDS = {"tf_example": tf_examples(), "example": examples(), "instance": instances()}


def rows_of(records: Records) -> list[Row]:
    """Return what each record has, columns without values left out."""
    columns = {
        name: records.strings(name) if column.dtype is torch.uint8 else records[name].to_list()
        for name, column in records.columns.items()
    }
    return [{name: rows[i] for name, rows in columns.items() if rows[i]} for i in range(len(records))]


def without_empty(row: Row) -> Row:
    return {name: values for name, values in row.items() if values}


def to_records(rows: list[Row]) -> Records:
    """Return the records that have these columns; the values say of what type they are."""
    columns: dict[str, RaggedTensor] = {}
    for name in {name: None for row in rows for name in without_empty(row)}:
        values = [row.get(name, []) for row in rows]
        first = next(value for row in values for value in row)
        if isinstance(first, bytes):
            columns[name] = RaggedTensor.from_list(
                [[list(text) for text in row] for row in values], torch.uint8, ragged_rank=2
            )
        else:
            dtype = torch.float32 if isinstance(first, float) else torch.int64
            columns[name] = RaggedTensor.from_list([list(map(type(first), row)) for row in values], dtype)
    return Records(len(rows), columns)
