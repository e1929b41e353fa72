"""Messages as bytes: what was written is read, bit for bit, and nothing else is."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync.sample_messages import make_delta, make_snapshot, same

from monolith import native
from monolith.errors import CorruptMessageError
from monolith.sync import (
    Delta,
    Digests,
    LearnedUpTo,
    LogPosition,
    Message,
    PublishState,
    ShardLog,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.sync.wire_format import (
    LEAD_BYTES,
    decode,
    decode_all,
    encode,
    frame_bytes,
    log_from_plain,
    log_to_plain,
)
from monolith.table import Rows

int64s = st.integers(-(1 << 63), (1 << 63) - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
seconds = st.floats(0, 1e12)
positions = st.builds(LogPosition, names, st.integers(0, 1 << 50))
shards = st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))
learned = st.builds(LearnedUpTo, st.integers(0, 1 << 50), int64s, seconds, seconds, seconds, seconds)


def ints(most: int = 4) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(int64s, max_size=most).map(lambda found: torch.tensor(found, dtype=torch.int64))


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    ids = draw(ints())
    dim, state = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    bits = draw(st.binary(min_size=4 * len(ids) * (dim + state), max_size=4 * len(ids) * (dim + state)))
    floats = torch.from_numpy(np.frombuffer(bits, np.float32).copy()).view(len(ids), dim + state)
    return Rows(ids, ids + 1, floats[:, :dim], floats[:, dim:])


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.arange(int(np.prod(shape, dtype=int))).view(shape).to(dtype)


buckets = st.sets(st.integers(0, 4095), max_size=4).map(
    lambda found: torch.tensor(sorted(found), dtype=torch.int64)
)
digests = buckets.map(lambda found: Digests(found, found * 77))
dense = st.none() | st.dictionaries(names, weights(), max_size=2)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Delta,
        *(names, shards, positions, learned),
        st.dictionaries(names, rows(), max_size=2),
        st.dictionaries(names, ints(), max_size=2),
        dense,
        st.dictionaries(names, digests, max_size=2),
    ),
    st.builds(SnapshotBegin, names, shards, positions, learned, st.none() | buckets, dense, names),
    st.builds(SnapshotRows, names, rows(), names, st.integers(0, 1 << 40)),
    st.builds(SnapshotEnd, positions, positions, names, st.none() | st.integers(0, 1 << 40)),
    st.builds(PublishState, st.booleans(), names, seconds, st.none() | names, st.integers(0, 1 << 40)),
)


@given(messages)
def test_what_was_written_is_read_bit_for_bit(message: Message) -> None:
    frame = encode(message)
    assert same(decode(frame), message)
    assert frame_bytes(frame[:LEAD_BYTES]) == len(frame)


@given(st.lists(messages, max_size=3))
def test_consecutive_frames_are_read_in_order(several: list[Message]) -> None:
    data = bytearray().join(encode(message) for message in several)
    assert all(same(*both) for both in zip(decode_all(data), several, strict=True))


@given(messages, st.data())
def test_any_altered_byte_is_found(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptMessageError):
        decode(frame)


@given(messages, st.data())
def test_a_torn_frame_is_refused_wherever_it_ends(message: Message, data: st.DataObject) -> None:
    frame = encode(message)
    with pytest.raises(CorruptMessageError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(st.binary(max_size=200))
def test_bytes_of_anything_else_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptMessageError):
        decode(data)


def forged(message: Message, change: Callable[[Any], object]) -> bytes:
    """A frame whose head says something else, with the checksum that belongs to it."""
    frame = encode(message)
    size, body_size = struct.unpack_from("<IQ", frame, 8)
    head = json.loads(frame[LEAD_BYTES : LEAD_BYTES + size])
    text = json.dumps(change(head) or head).encode()
    text += b" " * (-len(text) % 8)
    lead = struct.pack("<4sBBHIQ", frame[:4], frame[4], frame[5], 0, len(text), body_size)
    body = frame[LEAD_BYTES + size :]
    crc = native.crc32c(body, native.crc32c(text, native.crc32c(lead)))
    return lead + struct.pack("<I", crc) + text + body


DELTA = make_delta(3, dense={"w": torch.zeros(2)})


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["rows"]["item"].update(count=1 << 50),
        lambda head: head["rows"]["item"].update(count=-1),
        lambda head: head["rows"]["item"].update(count=1),
        lambda head: head["rows"]["item"].update(count=0, dim=1 << 53, state_dim=1 << 53),
        lambda head: head["dense"]["w"].update(shape=[0, 1 << 52, 1 << 52]),
        lambda head: head["dense"]["w"].update(shape=[1] * 40),
        lambda head: head["dense"]["w"].update(dtype="complex64"),
        lambda head: (
            head["dense"]["w"].update(dtype="bool", shape=[8])
            or {**head, "dense": head["dense"], "removed": {"x": 1 << 40}}
        ),
        lambda head: head.update(share=[3, 3]),
        lambda head: head["place"].update(sequence=-1),
        lambda head: head.update(more=1),
        lambda head: head.pop("learned") and None,
        lambda head: head["learned"].update(event_at=float("nan")),
        lambda _: [1],
    ],
)
def test_a_wrong_header_is_refused_though_its_checksum_is_right(change: Callable[[Any], object]) -> None:
    with pytest.raises(CorruptMessageError):
        decode(forged(DELTA, change))


def test_a_forged_frame_that_says_the_truth_is_read() -> None:
    assert same(decode(forged(DELTA, lambda _: None)), DELTA)


def test_buckets_are_ascending_and_there_are_4096() -> None:
    for found in ([4096], [-1], [2, 2], [2, 1]):
        begin = SnapshotBegin("run", (0, 1), LogPosition("e", 0), LearnedUpTo(), torch.tensor(found))
        with pytest.raises(CorruptMessageError):
            decode(encode(begin))


def test_a_frame_over_the_limit_is_refused_by_its_first_bytes() -> None:
    frame = encode(DELTA)
    with pytest.raises(CorruptMessageError, match="are allowed"):
        frame_bytes(frame[:LEAD_BYTES], limit=len(frame) - 1)
    lead = struct.pack("<4sBBHIQI", b"MDLT", 1, 1, 0, 8, 1 << 62, 0)
    with pytest.raises(CorruptMessageError, match="are allowed"):
        decode(lead + bytes(8))


def test_another_version_is_refused_with_what_to_do() -> None:
    frame = bytearray(encode(DELTA))
    frame[4] = 9
    with pytest.raises(CorruptMessageError, match=r"version 9.*one release"):
        decode(frame)


def test_tensors_are_views_of_a_frame_that_may_be_written_to() -> None:
    frame = bytearray(encode(make_delta(1)))
    delta = decode(frame)
    assert isinstance(delta, Delta)
    ids = delta.rows["item"].ids
    begin = np.frombuffer(frame, np.uint8).ctypes.data
    assert begin <= ids.data_ptr() < begin + len(frame)


def test_the_messages_of_a_snapshot_are_read() -> None:
    snapshot = make_snapshot(LogPosition("e", 4), [1, 2, 3])
    data = b"".join(map(encode, snapshot))
    assert all(same(*both) for both in zip(decode_all(data), snapshot, strict=True))


def test_the_description_of_a_log_becomes_plain_values_and_back() -> None:
    log = ShardLog("run", (1, 3), LogPosition("e", 7), 3, {"item": 8})
    assert log_from_plain(json.loads(json.dumps(log_to_plain(log)))) == log
    with pytest.raises(CorruptMessageError):
        log_from_plain({"run": 1})
