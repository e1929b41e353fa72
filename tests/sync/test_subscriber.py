"""How a subscriber keeps up, whatever the channel does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sync.sample_messages import make_delta
from sync.tables import Clock, held, ids, make_table, publish, subscribe, write
from torch import Tensor

from monolith.sync import (
    ChannelFaults,
    Delta,
    LearnedUpTo,
    LogPosition,
    MemoryChannel,
    Message,
    Publisher,
    PublisherConfig,
    ShardLog,
    SnapshotBegin,
    SnapshotEnd,
    Subscriber,
    TableTarget,
)
from monolith.sync.subscriber import ShardProgress, _LogLimit
from monolith.table import bucket_of


@pytest.fixture
def channel() -> MemoryChannel:
    return MemoryChannel()


def pair(channel: MemoryChannel, **options: Any) -> tuple[Any, Publisher, Any, Subscriber]:
    """Return a table, its publisher, the table that follows, and its subscriber."""
    source, copy = make_table(), make_table()
    publisher = publish(channel, source, **options)
    publisher.publish_now()
    subscriber, _ = subscribe(channel, copy)
    return source, publisher, copy, subscriber


# Following


def test_a_new_subscriber_gets_a_snapshot_and_then_deltas(channel: MemoryChannel) -> None:
    source, publisher, copy, subscriber = pair(channel)
    write(source, {1: 1.0, 2: 2.0})
    write(copy, {9: 9.0})
    subscriber.catch_up()
    assert held(copy) == held(source), "what it had before is gone"
    write(source, {2: 3.0, 4: 4.0})
    source.remove(ids(1))
    publisher.publish_now()
    subscriber.catch_up()
    assert held(copy) == held(source)
    assert subscriber.progress[0].position == publisher.position
    assert subscriber.progress[0].snapshots == 1


def test_a_subscriber_with_an_export_begins_with_the_deltas_after_it(channel: MemoryChannel) -> None:
    source, publisher, copy, _ = pair(channel)
    write(source, {1: 1.0})
    write(copy, {1: 1.0})
    publisher.publish_now()
    exported = publisher.position
    write(source, {2: 2.0})
    publisher.publish_now()
    subscriber, _ = subscribe(channel, copy, positions={0: exported})
    subscriber.catch_up()
    assert held(copy) == held(source)
    assert (subscriber.progress[0].snapshots, subscriber.progress[0].deltas) == (0, 1)


def test_an_export_of_another_epoch_is_replaced_by_a_snapshot(channel: MemoryChannel) -> None:
    source, _, copy, _ = pair(channel)
    write(source, {1: 1.0})
    write(copy, {2: 2.0})
    subscriber, _ = subscribe(channel, copy, positions={0: LogPosition("before", 5)})
    subscriber.catch_up()
    assert held(copy) == held(source)


def test_a_slow_reader_is_cut_off_and_catches_up_by_snapshot() -> None:
    channel = MemoryChannel(limit_bytes=2000)
    source, publisher, copy, subscriber = pair(channel, digest_buckets=0)
    subscriber.catch_up()
    for round_ in range(20):
        write(source, {key: float(round_) for key in range(round_, round_ + 5)})
        publisher.publish_now()
    source.remove(ids(3))
    publisher.publish_now()
    subscriber.catch_up()
    assert held(copy) == held(source)
    assert subscriber.progress[0].snapshots == 2


def test_a_rewind_is_followed_without_ghosts(channel: MemoryChannel) -> None:
    source, publisher, copy, subscriber = pair(channel)
    write(source, {1: 1.0})
    publisher.publish_now()
    subscriber.catch_up()
    write(source, {1: 2.0, 2: 2.0})
    publisher.publish_now()
    subscriber.catch_up()
    source.clear()
    write(source, {1: 1.0})
    publisher.begin_epoch("rewound")
    subscriber.catch_up()
    assert held(copy) == held(source) == {1: [1.0, 1.0]}


def test_what_was_learned_and_when_it_came_is_known(channel: MemoryChannel) -> None:
    source = make_table()
    learned = LearnedUpTo(step=3, watermark=5, event_at=6.0, read_at=7.0, trained_at=8.0)
    publisher = publish(channel, source, learned=lambda: learned, clock=Clock(9.0))
    publisher.publish_now()
    subscriber, _ = subscribe(channel, make_table(), clock=Clock(10.0))
    subscriber.catch_up()
    standing = subscriber.progress[0]
    assert standing.learned == replace(learned, published_at=9.0)
    assert (standing.received_at, standing.applied_at) == (10.0, 10.0)


def test_what_was_learned_counts_when_the_last_of_several_deltas_has_come(
    channel: MemoryChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monolith.sync.publisher.DELTA_IDS", 10)
    steps = [LearnedUpTo(step=5)]
    source, publisher, _, subscriber = pair(channel, learned=lambda: steps[-1])
    subscriber.catch_up()
    assert subscriber.progress[0].learned.step == 5
    write(source, dict.fromkeys(range(15), 1.0))
    steps.append(LearnedUpTo(step=9))
    publisher.publish_now()
    subscriber.catch_up()
    assert subscriber.progress[0].learned.step == 5, "rows of step 9 are still to come"
    publisher.publish_now()
    subscriber.catch_up()
    assert subscriber.progress[0].learned.step == 9
    assert subscriber.progress[0].newest_step == 10, "the update of a step more may have been under way"


def test_a_delta_that_was_being_made_while_a_snapshot_ended_does_not_tell_how_new_its_rows_are(
    channel: MemoryChannel,
) -> None:
    begin, end = LogPosition("e1", 0), LogPosition("e1", 1)

    def snapshot(_: Tensor | None = None) -> Iterator[Message]:
        yield SnapshotBegin("run", (0, 1), begin, LearnedUpTo(step=1))
        yield SnapshotEnd(begin, whole_at=end)

    writer = channel.writer()
    writer.open(ShardLog("run", (0, 1), begin, 1, {"item": 2}), snapshot)
    subscriber, _ = subscribe(channel, make_table())
    found = []
    for sequence in range(3):
        if sequence:
            delta = make_delta(sequence)
            writer.append(replace(delta, learned=replace(delta.learned, newest_step=sequence + 1)))
        subscriber.catch_up()
        found.append(subscriber.progress[0].newest_step)
    assert found == [None, None, 3]


def test_listeners_are_called_before_rows_change_and_after(channel: MemoryChannel) -> None:
    learned = LearnedUpTo(step=5)
    source, publisher, copy, _ = pair(channel, learned=lambda: learned)
    write(source, {1: 1.0})
    told: list[Any] = []
    subscriber = Subscriber(
        channel.reader,
        TableTarget({"item": copy}),
        on_applying=lambda _, came: told.append(("applying", came and came.newest_step, len(copy))),
        on_applied=lambda followed: told.append(("applied", followed.newest_step, len(copy))),
    )
    subscriber.catch_up()
    write(source, {2: 1.0})
    publisher.publish_now()
    subscriber.catch_up()
    assert told[:2] == [("applying", None, 0), ("applied", None, 1)], "a snapshot"
    assert told[-2:] == [("applying", 6, 1), ("applied", 6, 2)], "a delta"


def test_dense_weights_come_with_snapshots_and_deltas(channel: MemoryChannel) -> None:
    weights = {"w": torch.zeros(1)}
    clock = Clock()
    publisher = publish(channel, make_table(), dense=lambda: dict(weights), clock=clock, timer=clock)
    publisher.publish_now()
    subscriber, target = subscribe(channel, make_table())
    subscriber.catch_up()
    assert target.dense == weights
    weights["w"] = torch.ones(1)
    clock.now += 1.0
    publisher.publish_now()
    subscriber.catch_up()
    assert target.dense == weights


# What a channel may do to messages


def test_lost_repeated_disordered_and_late_messages_change_nothing_in_the_end(channel: MemoryChannel) -> None:
    source, publisher, copy, subscriber = pair(channel)
    channel.faults = ChannelFaults(drop=0.2, repeat=0.2, reorder=0.2, delay=0.2)
    for round_ in range(60):
        write(source, {key: float(round_) for key in range(round_ % 7, 40, 5)})
        source.remove(ids(round_ % 11))
        publisher.publish_now()
        subscriber.catch_up()
    channel.faults = None
    subscriber.catch_up()
    subscriber.catch_up()
    assert held(copy) == held(source)
    assert subscriber.progress[0].position == publisher.position


def test_an_old_delta_never_replaces_a_newer_row(channel: MemoryChannel) -> None:
    source, publisher, copy, subscriber = pair(channel)
    subscriber.catch_up()
    write(source, {1: 1.0})
    publisher.publish_now()
    channel.faults = ChannelFaults(delay=1.0)
    subscriber.catch_up()
    channel.faults = None
    write(source, {1: 2.0})
    publisher.publish_now()
    other, _ = subscribe(channel, copy, positions={0: publisher.position})
    other.catch_up()
    assert held(copy) == {}, "the late message is of a position before its own"
    subscriber.catch_up()
    assert held(copy) == {1: [2.0, 2.0]}


def test_a_snapshot_of_which_a_part_got_lost_is_not_taken_for_whole(
    channel: MemoryChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monolith.sync.publisher.CHUNK_BYTES", 1)
    source, publisher, copy, subscriber = pair(channel)
    write(source, dict.fromkeys(range(50), 1.0))
    publisher.publish_now()
    write(copy, {99: 9.0})
    channel.faults = ChannelFaults(drop=0.1)
    subscriber.catch_up()
    assert subscriber.progress[0].position is None
    assert 99 in held(copy), "nothing is dropped for a snapshot that is not whole"
    channel.faults = None
    subscriber.catch_up()
    assert held(copy) == held(source)


def test_a_channel_that_breaks_is_tried_again_and_said_once(
    channel: MemoryChannel, caplog: pytest.LogCaptureFixture
) -> None:
    source, publisher, copy, subscriber = pair(channel)
    subscriber.catch_up()
    channel.broken = True
    for _ in range(3):
        subscriber.catch_up()
    assert "cannot be reached" in subscriber.error
    assert "cannot be reached" in subscriber.progress[0].error
    assert len([r for r in caplog.records if "cannot follow" in r.getMessage()]) == 1
    channel.broken = False
    write(source, {1: 1.0})
    publisher.publish_now()
    subscriber.catch_up()
    assert held(copy) == held(source)
    assert (subscriber.error, subscriber.progress[0].error) == ("", "")


def test_a_part_of_an_older_snapshot_that_comes_late_is_made_good(channel: MemoryChannel) -> None:
    source, publisher, copy, subscriber = pair(channel, digest_buckets=0)
    write(source, {1: 1.0})
    publisher.publish_now()
    _, begin, rows, _ = channel.reader().read(0, None, wait=0.0)
    write(source, {1: 2.0})
    publisher.publish_now()
    subscriber.catch_up()
    channel._late[0] += [begin, rows]
    subscriber.catch_up()
    subscriber.catch_up()
    assert held(copy) == held(source) == {1: [2.0, 2.0]}
    assert subscriber.progress[0].snapshots == 1, "the deltas after it did"


def test_a_part_of_a_snapshot_of_an_epoch_before_is_made_good(channel: MemoryChannel) -> None:
    source, publisher, copy, subscriber = pair(channel, digest_buckets=0)
    write(source, {1: 1.0})
    _, begin, rows, _ = channel.reader().read(0, None, wait=0.0)
    source.remove(ids(1))
    publisher.begin_epoch("rewound")
    subscriber.catch_up()
    channel._late[0] += [begin, rows]
    subscriber.catch_up()
    subscriber.catch_up()
    assert held(copy) == held(source) == {}


class LettingGo(TableTarget):
    """A target that drops its rows when it is told to."""

    generation = 0

    def let_go(self) -> None:
        for table in self._tables.values():
            table.clear()
        self.generation += 1


def test_rows_that_the_target_dropped_are_fetched_again(channel: MemoryChannel) -> None:
    source, publisher, copy, _ = pair(channel, digest_buckets=0)
    write(source, {1: 1.0})
    publisher.publish_now()
    target = LettingGo({"item": copy})
    subscriber = Subscriber(channel.reader, target)
    subscriber.catch_up()
    target.let_go()
    write(source, {2: 2.0})
    publisher.publish_now()
    subscriber.catch_up()
    subscriber.catch_up()
    assert held(copy) == held(source)
    assert subscriber.progress[0].snapshots == 2


# Differences


def test_a_row_that_differs_is_found_and_repaired(
    channel: MemoryChannel, caplog: pytest.LogCaptureFixture
) -> None:
    source, publisher, copy, subscriber = pair(channel, digest_buckets=4096)
    write(source, {key: float(key) for key in range(100)})
    publisher.publish_now()
    subscriber.catch_up()
    write(copy, {7: 0.5})  # differs
    write(copy, {1000: 1.0})  # a ghost
    copy.remove(ids(8))  # is missing
    write(source, {1: 5.0})
    with caplog.at_level(logging.WARNING):
        publisher.publish_now()
        subscriber.catch_up()
    assert held(copy) == held(source)
    assert subscriber.progress[0].repaired == len(bucket_of(ids(7, 8, 1000)).unique())
    assert "differs" in caplog.text
    write(source, {1: 6.0})
    publisher.publish_now()
    subscriber.catch_up()
    assert subscriber.progress[0].snapshots == 2, "nothing is left to repair"


def test_a_repair_does_not_undo_what_comes_after(channel: MemoryChannel) -> None:
    """A bucket is read as it is now, and the deltas up to now are still to come."""
    source, publisher, copy, subscriber = pair(channel, digest_buckets=4096)
    write(source, {1: 1.0})
    publisher.publish_now()
    subscriber.catch_up()
    write(copy, {1: 7.0})
    for value in (2.0, 3.0, 4.0):
        write(source, {2: value})
        publisher.publish_now()
    write(source, {1: 5.0})
    source.remove(ids(2))
    subscriber.catch_up()
    publisher.publish_now()
    subscriber.catch_up()
    assert held(copy) == held(source)


# Shares


def test_shards_are_followed_in_parallel(channel: MemoryChannel) -> None:
    sources = [make_table() for _ in range(3)]
    publishers = [publish(channel, one, shard=(k, 3)) for k, one in enumerate(sources)]
    for k, source in enumerate(sources):
        write(source, {key: float(key) for key in range(30) if key % 3 == k})
        publishers[k].publish_now()
    copy = make_table()
    subscriber, _ = subscribe(channel, copy)
    subscriber.catch_up()
    sources[1].remove(ids(1))
    publishers[1].publish_now()
    subscriber.catch_up()
    assert held(copy) == held(*sources)
    assert sorted(subscriber.progress) == [0, 1, 2]


def test_another_number_of_shards_is_fetched_again(channel: MemoryChannel) -> None:
    def published(total: int, values: dict[int, float]) -> list[Any]:
        sources = [make_table() for _ in range(total)]
        for k, source in enumerate(sources):
            write(source, {key: value for key, value in values.items() if key % total == k})
            publish(channel, source, shard=(k, total)).publish_now()
        return sources

    copy = make_table()
    subscriber, _ = subscribe(channel, copy)
    published(3, dict.fromkeys(range(30), 1.0))
    subscriber.catch_up()
    sources = published(2, dict.fromkeys(range(10, 40), 2.0))
    subscriber.catch_up()
    assert held(copy) == held(*sources)
    assert {one.shard for one in subscriber.progress.values()} == {(0, 2), (1, 2)}


def test_shares_that_are_not_all_there_yet_do_not_replace_those_that_are_followed(
    channel: MemoryChannel,
) -> None:
    for k in range(3):
        publish(channel, make_table(), shard=(k, 3)).publish_now()
    subscriber, _ = subscribe(channel, make_table())
    subscriber.catch_up()
    publish(channel, make_table(), shard=(0, 2)).publish_now()
    subscriber.catch_up()
    assert {one.shard[1] for one in subscriber.progress.values()} == {3}
    assert all(one.error or one.shard[0] == 0 for one in subscriber.progress.values())
    publish(channel, make_table(), shard=(1, 2)).publish_now()
    subscriber.catch_up()
    assert {one.shard[1] for one in subscriber.progress.values()} == {2}


def test_a_share_that_is_nowhere_is_said_until_it_is_found(
    channel: MemoryChannel, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [make_table(), make_table()]
    write(sources[1], {1: 1.0})
    publish(channel, sources[0], shard=(0, 2)).publish_now()
    subscriber, _ = subscribe(channel, copy := make_table())
    for _ in range(3):
        subscriber.catch_up()
    assert subscriber.missing == (1,)
    assert "no publisher found for shards 1 of 2" in subscriber.error
    assert len([r for r in caplog.records if "Add the missing addresses" in r.getMessage()]) == 1
    publish(channel, sources[1], shard=(1, 2)).publish_now()
    subscriber.catch_up()
    assert (subscriber.missing, subscriber.error) == ((), "")
    assert held(copy) == held(*sources)


# Publish states


def test_the_target_is_told_of_a_hold_and_of_a_version(channel: MemoryChannel) -> None:
    source, copy = make_table(), make_table()
    publisher = publish(channel, source)
    write(source, {1: 1.0})
    publisher.publish_now()
    subscriber, target = subscribe(channel, copy)
    subscriber.catch_up()
    publisher.pause("AUC fell")
    subscriber.catch_up()
    assert target.state.reason == "AUC fell"
    publisher.rollback("3")
    subscriber.catch_up()
    assert target.state.version == "3"
    assert subscriber.progress[0].position is None
    write(source, {2: 2.0})
    subscriber.catch_up()
    assert set(held(copy)) == {1}, "nothing is read while a version is served"
    publisher.resume()
    subscriber.catch_up()
    assert target.state.version is None
    assert held(copy) == held(source)


def test_a_subscriber_that_needs_a_snapshot_while_publishing_is_paused_gets_the_reason(
    channel: MemoryChannel,
) -> None:
    source, publisher, copy, subscriber = pair(channel)
    publisher.pause("poisoned")
    subscriber.catch_up()
    assert "poisoned" in subscriber.progress[0].error
    publisher.resume()
    write(source, {1: 1.0})
    subscriber.catch_up()
    assert held(copy) == held(source)


def test_a_publisher_that_starts_again_counts_though_its_clock_is_behind(channel: MemoryChannel) -> None:
    publisher = publish(channel, make_table(), clock=Clock(5000.0))
    publisher.publish_now()
    subscriber, target = subscribe(channel, make_table())
    publisher.rollback("3")
    subscriber.catch_up()
    again = publish(channel, make_table(), clock=Clock(1000.0))
    again.publish_now()
    subscriber.catch_up()
    assert target.state.version is None
    again.pause("AUC fell")
    subscriber.catch_up()
    assert target.state.reason == "AUC fell"


def test_while_one_share_goes_back_all_do_whatever_their_clocks_say(channel: MemoryChannel) -> None:
    clocks = [Clock(5000.0), Clock(1000.0)]
    publishers = [publish(channel, make_table(), shard=(k, 2), clock=one) for k, one in enumerate(clocks)]
    subscriber, target = subscribe(channel, make_table())

    def told() -> str | None:
        subscriber.catch_up()
        return target.state.version

    for publisher in publishers:
        publisher.publish_now()
        publisher.rollback("3")
    assert told() == "3"
    publishers[0].resume()
    assert told() == "3"
    publishers[1].resume()
    assert told() is None
    publishers[1].rollback("2")
    assert told() == "2"


# Threads


def test_threads_keep_up_until_they_are_closed(channel: MemoryChannel) -> None:
    sources = [make_table(), make_table()]
    publishers = [
        Publisher({"item": one}, channel.writer(), PublisherConfig(run="run", shard=(k, 2), interval=0.002))
        for k, one in enumerate(sources)
    ]
    copy = make_table()
    subscriber = Subscriber(channel.reader, TableTarget({"item": copy}), wait=0.05)
    subscriber.start()
    for publisher in publishers:
        publisher.start()
    for round_ in range(20):
        for k, source in enumerate(sources):
            write(source, {2 * key + k: float(round_) for key in range(100)})
            source.remove(ids(2 * round_ + k))
    for publisher in publishers:
        assert publisher.flush()
    assert subscriber.wait_for({k: one.position for k, one in enumerate(publishers)}, timeout=60)
    assert held(copy) == held(*sources)
    assert not subscriber.wait_for({0: LogPosition("another", 1)}, timeout=0)
    subscriber.close()
    for publisher in publishers:
        publisher.close()


class Stumbling(TableTarget):
    """A target that cannot take the first delta, for a reason nobody thought of."""

    stumbled = False

    def apply(self, *what: Any) -> None:
        if not self.stumbled:
            self.stumbled = True
            raise ZeroDivisionError("nobody thought of this")
        super().apply(*what)


def test_an_unexpected_error_does_not_end_the_thread(
    channel: MemoryChannel, caplog: pytest.LogCaptureFixture
) -> None:
    source, publisher, copy, _ = pair(channel)
    target = Stumbling({"item": copy})
    subscriber = Subscriber(channel.reader, target, wait=0.01)
    subscriber.start()
    assert subscriber.wait_for({0: publisher.position}, timeout=60)
    write(source, {1: 1.0})
    publisher.publish_now()
    assert subscriber.wait_for({0: publisher.position}, timeout=60)
    assert held(copy) == held(source)
    assert target.stumbled
    assert "nobody thought of this" in caplog.text
    subscriber.close()


def test_an_error_at_the_end_of_a_snapshot_leaves_the_turn_to_other_snapshots(channel: MemoryChannel) -> None:
    source, _, copy, _ = pair(channel)
    write(source, {1: 1.0})
    errors = [ZeroDivisionError("the caller's own")]

    def applied(_: ShardProgress) -> None:
        if errors:
            raise errors.pop()

    subscriber, _ = subscribe(channel, copy, on_applied=applied)
    with pytest.raises(ZeroDivisionError):
        subscriber.catch_up()
    assert subscriber._target.turn.acquire(timeout=1)


def test_a_subscriber_may_start_before_any_publisher(channel: MemoryChannel) -> None:
    copy = make_table()
    subscriber = Subscriber(channel.reader, TableTarget({"item": copy}), wait=0.01)
    subscriber.start()
    source = make_table()
    publisher = publish(channel, source)
    write(source, {1: 1.0})
    delta = publisher.publish_now()
    assert isinstance(delta, Delta)
    assert subscriber.wait_for({0: delta.position}, timeout=60)
    assert held(copy) == held(source)
    subscriber.close()
    subscriber.close()


def test_lines_about_a_publisher_are_one_per_change_and_one_a_second_at_most() -> None:
    now = 0.0
    lines = _LogLimit(clock=lambda: now)
    assert lines.is_due("no answer")
    now = 100.0
    assert not lines.is_due("no answer")
    assert lines.is_due("garbage")
    now = 100.9
    assert not lines.is_due("no answer")
    now = 101.2
    assert lines.is_due("no answer")
