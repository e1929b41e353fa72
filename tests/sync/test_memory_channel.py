"""The delta channel within one process, and the faults it can be told to have."""

from __future__ import annotations

import pytest
from sync.shares import make_table, publish, write

from monolith.errors import UnavailableError
from monolith.sync import ChannelFaults, Delta, LogPlace, MemoryChannel, PublishState, SnapshotBegin


def sequences(channel: MemoryChannel, after: LogPlace) -> list[int]:
    messages = channel.reader().read(0, after, wait=0)
    return [message.place.sequence for message in messages if isinstance(message, Delta)]


def published(channel: MemoryChannel, deltas: int) -> LogPlace:
    """Publish some deltas; return the place before them."""
    table = make_table()
    publisher = publish(channel, table)
    for key in range(deltas):
        write(table, {key: 1.0})
        publisher.publish_now()
    return LogPlace(publisher.place.epoch, 0)


def test_shares_are_those_that_are_published_now() -> None:
    channel = MemoryChannel()
    assert channel.reader().shares() == []
    publishers = [publish(channel, make_table(), share=(number, 3)) for number in range(3)]
    for publisher in publishers:
        publisher.publish_now()
    assert [log.share for log in channel.reader().shares()] == [(0, 3), (1, 3), (2, 3)]
    publish(channel, make_table(), share=(0, 2)).publish_now()
    assert [log.share for log in channel.reader().shares()] == [(0, 2)], "others are of a run that is over"


def test_a_reader_is_told_of_the_state_first_and_of_its_changes() -> None:
    channel = MemoryChannel()
    publisher = publish(channel, make_table())
    publisher.publish_now()
    messages = channel.reader().read(0, publisher.place, wait=0)
    first = next(messages)
    publisher.hold("why")
    assert isinstance(first, PublishState)
    assert not first.held
    assert [message.held for message in messages if isinstance(message, PublishState)] == [True]


def test_a_read_goes_on_with_a_snapshot_where_its_place_was_dropped() -> None:
    channel = MemoryChannel()
    table = make_table()
    publisher = publish(channel, table)
    publisher.publish_now()
    messages = channel.reader().read(0, publisher.place, wait=0)
    next(messages)
    write(table, {1: 1.0})
    publisher.begin_epoch("rewound")
    assert any(isinstance(message, SnapshotBegin) for message in messages)


def test_what_is_not_published_or_broken_cannot_be_read() -> None:
    channel = MemoryChannel()
    with pytest.raises(UnavailableError, match="share 4"):
        channel.reader().read(4, None, wait=0)
    start = published(channel, 1)
    channel.broken = True
    for call in (channel.reader().shares, lambda: channel.reader().read(0, start, wait=0)):
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
