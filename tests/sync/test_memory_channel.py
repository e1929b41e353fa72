"""The delta channel within one process, and the faults it can be told to have."""

from __future__ import annotations

import pytest
from sync.tables import make_table, publish, write

from monolith.errors import UnavailableError
from monolith.sync import ChannelFaults, Delta, LogPosition, MemoryChannel, PublishState, SnapshotBegin


def sequences(channel: MemoryChannel, after: LogPosition) -> list[int]:
    messages = channel.reader().read(0, after, wait=0)
    return [message.position.sequence for message in messages if isinstance(message, Delta)]


def published(channel: MemoryChannel, deltas: int) -> LogPosition:
    """Publish some deltas; return the position before them."""
    table = make_table()
    publisher = publish(channel, table)
    for key in range(deltas):
        write(table, {key: 1.0})
        publisher.publish_now()
    return LogPosition(publisher.position.epoch, 0)


def test_shares_are_those_that_are_published_now() -> None:
    channel = MemoryChannel()
    assert channel.reader().logs() == []
    publishers = [publish(channel, make_table(), shard=(number, 3)) for number in range(3)]
    for publisher in publishers:
        publisher.publish_now()
    assert [log.shard for log in channel.reader().logs()] == [(0, 3), (1, 3), (2, 3)]
    publish(channel, make_table(), shard=(0, 2)).publish_now()
    assert [log.shard for log in channel.reader().logs()] == [(0, 2)], "others are of a run that is over"


def test_a_reader_is_told_of_the_state_first_and_of_its_changes() -> None:
    channel = MemoryChannel()
    publisher = publish(channel, make_table())
    publisher.publish_now()
    messages = channel.reader().read(0, publisher.position, wait=0)
    first = next(messages)
    publisher.pause("why")
    assert isinstance(first, PublishState)
    assert not first.paused
    assert [message.paused for message in messages if isinstance(message, PublishState)] == [True]


def test_a_read_continues_with_a_snapshot_if_its_position_was_dropped() -> None:
    channel = MemoryChannel()
    table = make_table()
    publisher = publish(channel, table)
    publisher.publish_now()
    messages = channel.reader().read(0, publisher.position, wait=0)
    next(messages)
    write(table, {1: 1.0})
    publisher.begin_epoch("rewound")
    assert any(isinstance(message, SnapshotBegin) for message in messages)


def test_what_is_not_published_or_broken_cannot_be_read() -> None:
    channel = MemoryChannel()
    with pytest.raises(UnavailableError, match="shard 4"):
        channel.reader().read(4, None, wait=0)
    start = published(channel, 1)
    channel.broken = True
    for call in (channel.reader().logs, lambda: channel.reader().read(0, start, wait=0)):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            call()


def test_messages_can_be_made_to_get_lost_come_twice_late_or_in_another_order() -> None:
    channel = MemoryChannel()
    start = published(channel, 50)
    expected = list(range(1, 51))
    assert sequences(channel, start) == expected
    channel.faults = ChannelFaults(drop=0.3)
    assert set(sequences(channel, start)) < set(expected)
    channel.faults = ChannelFaults(repeat=0.3)
    assert len(sequences(channel, start)) > 50
    channel.faults = ChannelFaults(reorder=0.3)
    disordered = sequences(channel, start)
    assert disordered != expected
    assert sorted(disordered) == expected
    channel.faults = ChannelFaults(delay=0.3)
    early = sequences(channel, start)
    channel.faults = None
    late = sequences(channel, start)[:-50]
    assert sorted(early + late) == expected
