"""Messages of a Kafka topic of deltas: pieces of frames, and what is said beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import CorruptMessageError
from monolith.sync import LogPosition, PublishState, ShardLog
from monolith.sync.kafka_reader import Envelope, FrameAssembler, SnapshotAt, seal, split_frame, unseal

LOG = ShardLog("run", (1, 3), LogPosition("e", 7), 3, {"item": 8})
ENVELOPE = Envelope(
    LOG, 5.0, "session", 4, 1, 3, "stream", SnapshotAt("s", 9, 6), None, PublishState(paused=True, number=2)
)


def test_an_envelope_says_what_was_put_in() -> None:
    envelope, piece = unseal(seal(ENVELOPE, b"piece"))
    assert envelope == ENVELOPE
    assert bytes(piece) == b"piece"


@given(st.integers(0, 11 + 100), st.integers(1, 255))
def test_an_altered_envelope_is_found(position: int, change: int) -> None:
    data = bytearray(seal(ENVELOPE, b""))
    data[position] ^= change
    with pytest.raises(CorruptMessageError):
        unseal(bytes(data))


@given(st.binary(max_size=60))
def test_messages_of_others_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptMessageError):
        unseal(data)


def sealed(frame: bytes, piece_bytes: int, number: int = 0) -> list[tuple[Envelope, memoryview]]:
    return [
        (Envelope(LOG, 5.0, "session", number, piece, pieces), data)
        for piece, pieces, data in split_frame(frame, piece_bytes)
    ]


@given(st.binary(max_size=50), st.integers(1, 20), st.lists(st.integers(0, 60), max_size=5))
def test_pieces_make_the_frame_again_though_some_are_repeated(
    frame: bytes, piece_bytes: int, repeated: list[int]
) -> None:
    pieces = sealed(frame, piece_bytes)
    sent = [one for number, one in enumerate(pieces) for _ in range(1 + repeated.count(number))]
    whole = FrameAssembler(1000)
    assert [bytes(found) for found in (whole.add(*one) for one in sent) if found is not None][:1] == [frame]


def test_a_frame_of_which_a_piece_is_lost_is_left_out() -> None:
    whole = FrameAssembler(1000)
    first, _, third = sealed(b"abcdef", 2)
    found = [whole.add(*one) for one in (first, third, *sealed(b"xy", 1, number=1))]
    assert found == [None, None, None, bytearray(b"xy")]


def test_a_frame_over_the_limit_is_left_out() -> None:
    whole = FrameAssembler(3)
    assert [whole.add(*one) for one in sealed(b"abcd", 2)] == [None, None]
