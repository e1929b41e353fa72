from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from data.formats.messages import KINDS, Row, rows_of, signed, to_records, without_empty
from hypothesis import given
from hypothesis import strategies as st

from monolith.data import Records
from monolith.data.formats import PayloadParser, PayloadWriter
from monolith.errors import ConfigError, DataError
from monolith.feature.fids import make_fid
from monolith.native import Workers
from monolith.tensors import RaggedTensor
from monolith.wire import example_pb2, instance_pb2, tf_example_pb2

Drawn = list[tuple[bytes, Row]]
kinds = pytest.mark.parametrize("kind", KINDS)


def drawn(kind: str) -> st.SearchStrategy[Drawn]:
    return st.lists(KINDS[kind], max_size=4)


def ragged(rows: list[Any], dtype: torch.dtype) -> RaggedTensor:
    return RaggedTensor.from_list(rows, dtype)


# Reading


@kinds
@given(data=st.data())
def test_what_protobuf_writes_is_read(kind: str, data: st.DataObject) -> None:
    messages = data.draw(drawn(kind))
    records, bad = PayloadParser(kind)([payload for payload, _ in messages])
    assert not bad
    assert rows_of(records) == [without_empty(row) for _, row in messages]


@kinds
@given(data=st.data())
def test_only_the_columns_asked_for_are_read(kind: str, data: st.DataObject) -> None:
    messages = data.draw(drawn(kind))
    columns = data.draw(
        st.lists(st.sampled_from(["i1", "f1", "label", "line_id.uid", "nowhere"]), unique=True)
    )
    records, bad = PayloadParser(kind, columns=columns)([payload for payload, _ in messages])
    assert not bad
    assert set(records.columns) <= set(columns)
    assert rows_of(records) == [
        {name: values for name, values in without_empty(row).items() if name in columns}
        for _, row in messages
    ]


@kinds
@given(data=st.data())
def test_damaged_payloads_are_reported_or_read_and_the_rest_is_kept(kind: str, data: st.DataObject) -> None:
    good, row = data.draw(KINDS[kind])
    damaged = bytearray(good)
    if damaged:
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    records, bad = PayloadParser(kind)([good, bytes(damaged), good])
    assert len(records) + len(bad) == 3
    assert all(one.place == 1 and one.payload == bytes(damaged) and one.reason for one in bad)
    assert rows_of(records)[0] == rows_of(records)[-1] == without_empty(row)


def test_ids_of_version_1_become_version_2_and_an_instance_has_its_own_by_slot() -> None:
    fids = [make_fid(3, 5, 1), make_fid(1023, (1 << 54) - 1, 1), make_fid(3, 6, 1)]
    message = instance_pb2.Instance(fid=[fid % (1 << 64) for fid in fids])
    records, _ = PayloadParser("instance")([message.SerializeToString()])
    assert rows_of(records) == [
        {"fc_slot_3": [make_fid(3, 5), make_fid(3, 6)], "fc_slot_1023": [make_fid(1023, (1 << 48) - 1)]}
    ]


def test_values_may_be_written_one_by_one() -> None:
    unpacked = b"".join(b"\x08" + bytes([value]) for value in (1, 2, 3))
    feature = b"\x1a" + bytes([len(unpacked)]) + unpacked
    entry = b"\x0a\x01i\x12" + bytes([len(feature)]) + feature
    payload = b"\x0a" + bytes([len(entry) + 2]) + b"\x0a" + bytes([len(entry)]) + entry
    assert tf_example_pb2.Example.FromString(payload).features.feature["i"].int64_list.value == [1, 2, 3]
    records, _ = PayloadParser("tf_example")([payload])
    assert rows_of(records) == [{"i": [1, 2, 3]}]


def test_a_record_in_other_types_than_those_before_it_is_bad() -> None:
    writer = PayloadWriter("tf_example")
    (ints,) = writer(to_records([{"a": [1]}]))
    (floats,) = writer(to_records([{"a": [1.0], "b": [2]}]))
    records, bad = PayloadParser("tf_example")([ints, floats, ints])
    assert rows_of(records) == [{"a": [1]}, {"a": [1]}]
    assert "b" not in records.columns
    assert [(one.place, one.payload) for one in bad] == [(1, floats)]
    assert "column 'a' holds floats here, and integers in other records" in bad[0].reason


@given(drawn("example"))
def test_threads_make_no_difference(messages: Drawn) -> None:
    payloads = [payload for payload, _ in messages] * 50
    alone, _ = PayloadParser("example")(payloads)
    together, _ = PayloadParser("example", workers=Workers(2))(payloads)
    assert rows_of(alone) == rows_of(together)
    assert list(alone.columns) == list(together.columns)


def test_nothing_is_read_as_nothing() -> None:
    records, bad = PayloadParser("example")([])
    assert (len(records), records.columns, bad) == (0, {}, [])


# Batches


def batch(size: int, **lists: list[list[int]]) -> bytes:
    """Return an ExampleBatch; a list of one feature where there are more records is shared."""
    message = example_pb2.ExampleBatch(batch_size=size)
    for name, rows in lists.items():
        features = message.named_feature_list.add(name=name, type=int(len(rows) == 1 != size))
        for row in rows:
            features.feature.add().int64_list.value.extend(row)
    return message.SerializeToString()


def test_a_batch_is_many_records_and_what_it_shares_stays_shared() -> None:
    parser = PayloadParser("example_batch")
    records, bad = parser([batch(3, item=[[1], [], [2, 3]], user=[[7, 8]])])
    assert not bad
    assert records.shared == {"user"}
    assert rows_of(records) == [
        {"item": [1], "user": [7, 8]},
        {"user": [7, 8]},
        {"item": [2, 3], "user": [7, 8]},
    ]


def test_batches_with_other_shared_values_are_laid_end_to_end() -> None:
    parser = PayloadParser("example_batch")
    records, bad = parser([batch(2, user=[[1]]), b"\xff", batch(2, user=[[2]]), batch(3, user=[[1], [2]])])
    assert rows_of(records) == [{"user": [1]}, {"user": [1]}, {"user": [2]}, {"user": [2]}]
    assert [one.place for one in bad] == [1, 3]
    assert "list 'user' has 2 features for 3 records" in bad[1].reason


def test_labels_weights_and_line_ids_of_a_batch_are_lifted() -> None:
    message = example_pb2.ExampleBatch(batch_size=2, data_source_key=256)
    labels = message.named_feature_list.add(name="__LABEL__")
    line_ids = message.named_feature_list.add(name="__LINE_ID__")
    for number in (1, 2):
        labels.feature.add().float_list.value.append(number)
        line_ids.feature.add().bytes_list.value.append(b"\x11" + struct.pack("<Q", number))
    records, _ = PayloadParser("example_batch")([message.SerializeToString()])
    assert rows_of(records) == [
        {"label": [1.0], "line_id.uid": [1], "data_source_key": [256]},
        {"label": [2.0], "line_id.uid": [2], "data_source_key": [256]},
    ]


@given(drawn("example"))
def test_a_batch_that_is_written_reads_the_same_and_protobuf_reads_it(messages: Drawn) -> None:
    rows = [without_empty(row) for _, row in messages]
    (payload,) = PayloadWriter("example_batch")(to_records(rows))
    message = example_pb2.ExampleBatch.FromString(payload)
    assert message.batch_size == len(rows)
    assert all(len(features.feature) == len(rows) for features in message.named_feature_list)
    records, bad = PayloadParser("example_batch")([payload])
    assert not bad
    assert rows_of(records) == rows


# Writing


@given(drawn("tf_example"))
def test_protobuf_reads_the_tf_examples_we_write(messages: Drawn) -> None:
    rows = [without_empty(row) for _, row in messages]
    payloads = PayloadWriter("tf_example")(to_records(rows))
    assert len(payloads) == len(rows)
    for payload, row in zip(payloads, rows, strict=True):
        features = tf_example_pb2.Example.FromString(payload).features.feature
        read = {
            name: list(getattr(feature, feature.WhichOneof("kind")).value)
            for name, feature in features.items()
        }
        assert read == row


@given(drawn("example"))
def test_protobuf_reads_the_examples_we_write(messages: Drawn) -> None:
    rows = [without_empty(row) for _, row in messages]
    for payload, row in zip(PayloadWriter("example")(to_records(rows)), rows, strict=True):
        message = example_pb2.Example.FromString(payload)
        read: Row = {}
        for named in message.named_feature:
            member = named.feature.WhichOneof("type")
            assert (member == "fid_v2_list") == named.name.startswith("fc_")
            values = getattr(named.feature, member).value
            read[named.name] = (
                [signed(value) for value in values] if member == "fid_v2_list" else list(values)
            )
        read |= line_id_of(message)
        if message.label:
            read["label"] = list(message.label)
        if message.instance_weight:
            read["instance_weight"] = [message.instance_weight]
        assert read == row


@given(drawn("instance"))
def test_protobuf_reads_the_instances_we_write(messages: Drawn) -> None:
    rows = [without_empty(row) for _, row in messages]
    for payload, row in zip(PayloadWriter("instance")(to_records(rows)), rows, strict=True):
        message = instance_pb2.Instance.FromString(payload)
        read: Row = {
            feature.name: [signed(fid) for fid in feature.fid]
            or list(feature.int64_value)
            or list(feature.float_value)
            or list(feature.bytes_value)
            for feature in message.feature
        }
        read |= line_id_of(message)
        for name, values in (("label", message.label), ("value", message.value)):
            if values:
                read[name] = list(values)
        if message.HasField("instance_weight"):
            read["instance_weight"] = [message.instance_weight]
        assert read == row


def line_id_of(message: Any) -> Row:
    read: Row = {}
    for field, value in message.line_id.ListFields():
        values = list(value) if field.is_repeated else [value]
        if field.name in {"uid", "item_id"}:
            values = [signed(one) for one in values]
        read["line_id." + field.name] = [one.encode() if isinstance(one, str) else one for one in values]
    return read


@pytest.mark.parametrize("kind", ["tf_example", "example", "instance"])
def test_shared_columns_are_written_to_every_record(kind: str) -> None:
    columns = {"user": ragged([[7]], torch.int64), "item": ragged([[1], [2]], torch.int64)}
    records = Records(2, columns, frozenset({"user"}))
    read, _ = PayloadParser(kind)(PayloadWriter(kind)(records))
    assert rows_of(read) == [{"user": [7], "item": [1]}, {"user": [7], "item": [2]}]


def test_shared_columns_of_a_batch_are_written_once() -> None:
    columns = {"user": ragged([[7]], torch.int64), "item": ragged([[1], [2]], torch.int64)}
    (payload,) = PayloadWriter("example_batch")(Records(2, columns, frozenset({"user"})))
    lists = {one.name: one for one in example_pb2.ExampleBatch.FromString(payload).named_feature_list}
    assert lists["user"].type == example_pb2.SHARED
    assert len(lists["user"].feature) == 1
    assert lists["item"].type == example_pb2.INDIVIDUAL


def test_which_columns_hold_ids_can_be_said() -> None:
    (payload,) = PayloadWriter("example", ids=["user"])(to_records([{"user": [1], "fc_x": [2]}]))
    members = {
        one.name: one.feature.WhichOneof("type")
        for one in example_pb2.Example.FromString(payload).named_feature
    }
    assert members == {"user": "fid_v2_list", "fc_x": "int64_list"}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"label": [1]}, "the message holds floats there"),
        ({"instance_weight": [1.0, 2.0]}, "one value there, and record 0 has 2"),
        ({"line_id.shoe_size": [43]}, "LineId has no such field"),
        ({"line_id.rank": [1 << 31]}, "32 bits"),
        ({"__LABEL__": [1.0]}, "a meaning of its own"),
    ],
)
def test_a_column_that_fits_no_field_is_refused(row: Row, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PayloadWriter("example")(to_records([row]))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are tf_example, example, instance, example_batch"):
        PayloadParser("tf")
