"""The contract of a delta channel, over every implementation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from sync.delta_channels import (
    AnyChannel,
    Copy,
    FlightChannel,
    FolderChannel,
    KafkaChannel,
    PlainChannel,
    SmallPublisher,
    until,
)
from sync.sample_messages import make_delta, same

from monolith import concurrency
from monolith.errors import UnavailableError
from monolith.sync import Delta, LogPosition, PublishState, SnapshotBegin, SnapshotEnd

MOMENT = 0.1
"""Seconds in which something that is there is read again, while we wait for it."""


@pytest.fixture(params=["memory", "flight", "folder", "kafka"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyChannel]:
    with ExitStack() as stack:
        if request.param == "memory":
            yield PlainChannel()
        elif request.param == "flight":
            pytest.importorskip("pyarrow.flight")
            yield FlightChannel(stack)
        elif request.param == "folder":
            yield FolderChannel(stack, tmp_path / "deltas")
        else:
            yield KafkaChannel(stack, request.getfixturevalue("kafka"))


def catch_up(copy: Copy, channel: AnyChannel, publisher: SmallPublisher, shard: int = 0) -> None:
    """Read until the copy is what was published."""
    reader = channel.reader()
    until(lambda: copy.equals(publisher), lambda: copy.follow(reader, shard, wait=MOMENT))


def test_without_a_publisher_there_are_no_shards(channel: AnyChannel) -> None:
    reader = channel.reader()
    assert list(reader.logs()) == []
    with pytest.raises(UnavailableError):
        list(reader.read(0, None, wait=0.0))


def test_what_is_appended_is_read_in_order(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    sent = [publisher.publish([number]) for number in range(5)]
    found: list[Delta] = []
    reader = channel.reader()

    def read_on() -> None:
        after = found[-1].position if found else LogPosition("e1", 0)
        found.extend(one for one in reader.read(0, after, wait=MOMENT) if isinstance(one, Delta))

    until(lambda: len(found) == 5, read_on)
    assert all(same(*both) for both in zip(found, sent, strict=True))


def test_a_reader_resumes_from_its_position(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    copy = Copy()
    publisher.publish([1, 2, 3])
    catch_up(copy, channel, publisher)
    publisher.publish([4], removed=[2])
    publisher.publish([5], value=7.0)
    seen = copy.snapshots
    copy.deltas.clear()
    catch_up(copy, channel, publisher)
    assert copy.deltas == [2, 3]
    assert copy.snapshots == seen


def test_a_new_reader_gets_a_snapshot_and_the_deltas_after_it(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    for number in range(4):
        publisher.publish([number, 100], removed=[number - 1])
    copy = Copy()
    catch_up(copy, channel, publisher)
    assert copy.snapshots == 1


def test_a_reader_too_far_behind_gets_a_snapshot_then_deltas(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer(log_bytes=2_500))
    copy = Copy()
    publisher.publish([1])
    catch_up(copy, channel, publisher)
    numbers, reader = itertools.count(), channel.reader()

    def publish_more() -> None:
        for number in itertools.islice(numbers, 10):
            publisher.publish([number], removed=[number - 3])

    until(lambda: reader.logs()[0].oldest > 2, publish_more)
    copy.deltas.clear()
    catch_up(copy, channel, publisher)
    assert copy.snapshots >= 2
    assert 2 not in copy.deltas
    publisher.publish([77])
    catch_up(copy, channel, publisher)


def test_another_epoch_begins_with_a_snapshot(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    copy = Copy()
    publisher.publish([1, 2])
    catch_up(copy, channel, publisher)
    publisher.rows = {8: 1.0}
    publisher.open("e2")
    publisher.publish([9])
    catch_up(copy, channel, publisher)
    assert copy.snapshots == 2
    assert set(copy.rows) == {8, 9}


def test_a_waiting_reader_is_told_of_a_new_epoch(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    copy = Copy()
    publisher.publish([1])
    catch_up(copy, channel, publisher)
    reader, began = channel.reader(), concurrency.Event()

    def follow() -> None:
        for message in reader.read(0, copy.position, wait=60.0):
            if isinstance(message, SnapshotBegin) and message.position.epoch == "e2":
                began.set()
                return

    thread = concurrency.Thread(target=follow)
    thread.start()
    publisher.open("e2")
    thread.join(60.0)
    assert began.is_set()


def test_several_shares_are_read_each_on_its_own(channel: AnyChannel) -> None:
    publishers = [SmallPublisher(channel.writer(), epoch=f"of-{n}", shard=(n, 3)) for n in range(3)]
    for number, publisher in enumerate(publishers):
        for _ in range(number + 1):
            publisher.publish([3 * number])
    found = channel.reader().logs()
    assert [log.shard for log in found] == [(0, 3), (1, 3), (2, 3)]
    assert [log.newest for log in found] == [publisher.position for publisher in publishers]
    assert all(log.tables == {"item": 2} and log.run == "run" for log in found)
    for number, publisher in enumerate(publishers):
        catch_up(Copy(), channel, publisher, number)


def test_the_newest_publish_state_is_told_to_all(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    publisher.publish([1])
    publisher.writer.set_state(PublishState(paused=True, reason="AUC fell", since=5.0, number=1))
    state = PublishState(paused=True, reason="rollback", since=6.0, version="17", number=2)
    publisher.writer.set_state(state)
    copy, reader = Copy(), channel.reader()
    until(lambda: copy.equals(publisher), lambda: copy.follow(reader, wait=MOMENT))
    assert copy.state == 2
    assert state in list(channel.reader().read(0, publisher.position, wait=0.0))


def test_a_waiting_reader_is_told_of_a_changed_state(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    publisher.publish([1])
    reader, heard = channel.reader(), concurrency.Event()
    catch_up(Copy(), channel, publisher)

    def follow() -> None:
        for message in reader.read(0, publisher.position, wait=60.0):
            if isinstance(message, PublishState) and message.paused:
                heard.set()
                return

    thread = concurrency.Thread(target=follow)
    thread.start()
    publisher.writer.set_state(PublishState(paused=True, number=1))
    thread.join(60.0)
    assert heard.is_set()


def test_a_delta_that_is_appended_again_is_there_once(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    delta = publisher.publish([1])
    publisher.writer.append(delta)
    publisher.publish([2])
    catch_up(Copy(), channel, publisher)


def test_a_delta_that_cannot_follow_is_refused(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    publisher.publish([1])
    with pytest.raises(UnavailableError, match="epoch"):
        publisher.writer.append(make_delta(3))
    with pytest.raises(UnavailableError, match="epoch"):
        publisher.writer.append(make_delta(2, epoch="other"))
    publisher.publish([2])
    catch_up(Copy(), channel, publisher)


def test_a_reader_that_stops_in_the_middle_delays_no_other(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer(log_bytes=6_000))
    publisher.publish(range(50))
    reader, copy = channel.reader(), Copy()
    until(lambda: bool(copy.rows), lambda: copy.follow(reader, wait=MOMENT))
    slow = channel.reader().read(0, copy.position, wait=60.0)
    publisher.publish([1])
    next(slow)  # and no more
    for number in range(60):
        publisher.publish([number % 7], value=float(number))
    catch_up(copy, channel, publisher)
    slow.close()


def test_a_snapshot_that_is_not_read_to_its_end_delays_no_other_reader(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer())
    publisher.publish(range(300))
    catch_up(Copy(), channel, publisher)
    begun = []
    for _ in range(3):
        messages = channel.reader().read(0, None, wait=60.0)
        next(one for one in messages if isinstance(one, SnapshotBegin))
        begun.append(messages)
    for number in range(20):
        publisher.publish([number])
    for messages in begun:
        messages.close()
    catch_up(Copy(), channel, publisher)


def test_buckets_are_read_again_to_repair_a_difference(channel: AnyChannel) -> None:
    publisher = SmallPublisher(channel.writer(log_bytes=2_000))
    publisher.publish(range(5))
    catch_up(Copy(), channel, publisher)
    reader = channel.reader()
    found: list[object] = []

    def ask() -> None:
        publisher.publish([1])
        try:
            found.extend(reader.read_buckets(0, torch.tensor([3, 7])))
        except UnavailableError:
            found.clear()

    until(lambda: bool(found), ask)
    assert isinstance(found[0], SnapshotBegin)
    assert isinstance(found[-1], SnapshotEnd)
    if channel.snapshots_on_demand:
        assert found[0].buckets is not None
        assert found[0].buckets.tolist() == [3, 7]


def test_a_restarted_writer_is_followed(channel: AnyChannel) -> None:
    first = SmallPublisher(channel.writer())
    copy = Copy()
    first.publish([1, 2])
    catch_up(copy, channel, first)
    first.writer.close()
    second = SmallPublisher(channel.writer(), epoch="another-process")
    second.publish([5])
    catch_up(copy, channel, second)
    assert set(copy.rows) == {5}


def test_fewer_shares_than_before_are_told(channel: AnyChannel) -> None:
    before = [SmallPublisher(channel.writer(), epoch=f"a{n}", shard=(n, 3)) for n in range(3)]
    for one in before:
        one.publish([1])
        one.writer.close()
    after = [SmallPublisher(channel.writer(), epoch=f"b{n}", shard=(n, 2)) for n in range(2)]
    for number, one in enumerate(after):
        one.publish([number])
    assert [log.shard for log in channel.reader().logs()] == [(0, 2), (1, 2)]
    catch_up(Copy(), channel, after[1], 1)


def test_closing_again_does_nothing(channel: AnyChannel) -> None:
    writer, reader = channel.writer(), channel.reader()
    SmallPublisher(writer).publish([1])
    for _ in range(2):
        writer.close()
        reader.close()


def test_a_writer_whose_clock_is_behind_is_followed_all_the_same(channel: AnyChannel) -> None:
    ahead = SmallPublisher(channel.writer(clock=lambda: 2e9), epoch="ahead")
    copy = Copy()
    ahead.publish([1])
    catch_up(copy, channel, ahead)
    ahead.writer.close()
    behind = SmallPublisher(channel.writer(clock=lambda: 1e9), epoch="behind")
    behind.publish([2])
    catch_up(copy, channel, behind)
    assert set(copy.rows) == {2}
