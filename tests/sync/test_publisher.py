"""What a publisher lets out, and when."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from sync.tables import Clock, held, ids, make_table, publish, write
from torch import Tensor

from monolith.errors import ConfigError, UnavailableError
from monolith.sync import (
    BUCKETS,
    Delta,
    LearnedUpTo,
    LogPosition,
    MemoryChannel,
    Message,
    Publisher,
    PublisherConfig,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.table import Adagrad, DictTable, Expiry, NativeTable, Segment, TableConfig, bucket_of


@pytest.fixture
def channel() -> MemoryChannel:
    return MemoryChannel()


@pytest.fixture(params=[DictTable, NativeTable], ids=lambda cls: cls.__name__)
def table(request: pytest.FixtureRequest) -> Any:
    return make_table(cls=request.param, expiry=Expiry(default=timedelta(days=1)))


def log_of(channel: MemoryChannel, after: LogPosition | None) -> list[Message]:
    return list(channel.reader().read(0, after, wait=0))


def rows_of(delta: Delta | None) -> dict[int, list[float]]:
    assert delta is not None
    if "item" not in delta.rows:
        return {}
    rows = delta.rows["item"]
    return dict(zip(rows.ids.tolist(), rows.values.tolist(), strict=True))


def removed_of(delta: Delta | None) -> list[int]:
    assert delta is not None
    return sorted(delta.removed.get("item", ids()).tolist())


# Deltas


def test_a_delta_has_the_rows_that_changed_and_the_ids_that_lost_theirs(
    channel: MemoryChannel, table: Any
) -> None:
    publisher = publish(channel, table)
    write(table, {1: 1.0, 2: 2.0, 3: 3.0})
    first = publisher.publish_now()
    assert rows_of(first) == {1: [1.0, 1.0], 2: [2.0, 2.0], 3: [3.0, 3.0]}
    write(table, {2: 5.0})
    table.remove(ids(3))
    second = publisher.publish_now()
    assert rows_of(second) == {2: [5.0, 5.0]}
    assert removed_of(second) == [3]
    assert first is not None
    assert second is not None
    assert (first.position.sequence, second.position.sequence) == (1, 2)
    assert second.position == publisher.position
    assert second.run == "run"


def test_what_is_evicted_expires_or_is_cleared_is_removed(channel: MemoryChannel, table: Any) -> None:
    publisher = publish(channel, table)
    table.assign(ids(1, 2), torch.ones(2, 2), event_time=ids(0, 86_400))
    publisher.publish_now()
    table.evict(86_400)
    assert removed_of(publisher.publish_now()) == [1]
    table.clear()
    assert removed_of(publisher.publish_now()) == [2]


def test_nothing_is_sent_while_nothing_changes_but_a_sign_of_life(channel: MemoryChannel) -> None:
    clock = Clock()
    publisher = publish(channel, make_table(), clock=clock, timer=clock, dense_interval=1.0)
    assert publisher.publish_now() is not None, "the first says that somebody is there"
    assert publisher.publish_now() is None
    clock.now += 1.0
    alive = publisher.publish_now()
    assert rows_of(alive) == {}
    assert publisher.stats.deltas == 2


def test_rows_come_without_state_unless_it_is_asked_for() -> None:
    config = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad()),))
    for with_state, width in [(False, 0), (True, 2)]:
        table = NativeTable(config)
        publisher = Publisher(
            {"item": table}, MemoryChannel().writer(), PublisherConfig(run="run", with_state=with_state)
        )
        table.apply_gradients(ids(1), torch.ones(1, 2))
        delta = publisher.publish_now()
        assert delta is not None
        assert delta.rows["item"].state.shape == (1, width)


def test_a_wall_clock_that_jumps_a_day_ahead_and_back_stops_no_publishing(channel: MemoryChannel) -> None:
    wall, timer = Clock(), Clock()
    publisher = publish(channel, make_table(), clock=wall, timer=timer, dense_interval=1.0)
    publisher.publish_now()
    for jump in (86_400.0, -86_400.0, -86_400.0):
        wall.now += jump
        timer.now += 0.5
        assert publisher.publish_now() is None
        timer.now += 0.5
        sign_of_life = publisher.publish_now()
        assert sign_of_life is not None
        assert sign_of_life.learned.published_at == wall.now


def test_dense_weights_come_at_their_own_interval(channel: MemoryChannel) -> None:
    clock = Clock()
    weights = {"w": torch.ones(3)}
    publisher = publish(
        channel, make_table(), clock=clock, timer=clock, dense=lambda: weights, dense_interval=1.0
    )
    first = publisher.publish_now()
    assert first is not None
    assert first.dense is weights
    clock.now += 0.5
    assert publisher.publish_now() is None
    clock.now += 0.5
    later = publisher.publish_now()
    assert later is not None
    assert later.dense is weights
    assert publisher.stats.dense == 2


def test_a_delta_says_what_it_has_learned_from(channel: MemoryChannel, table: Any) -> None:
    """The stamp is asked for before the rows are read: they are never older than it says."""
    step = 7

    def learned() -> LearnedUpTo:
        write(table, {1: 7.0})
        return LearnedUpTo(step=step, watermark=50)

    publisher = publish(channel, table, learned=learned)
    write(table, {1: 1.0})
    delta = publisher.publish_now()
    assert rows_of(delta) == {1: [7.0, 7.0]}
    assert delta is not None
    assert delta.learned == LearnedUpTo(step=7, watermark=50, published_at=1000.0, newest_step=8)


def test_more_than_a_delta_holds_comes_in_several(
    channel: MemoryChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monolith.sync.publisher.DELTA_IDS", 10)
    table = make_table()
    publisher = publish(channel, table)
    write(table, dict.fromkeys(range(25), 1.0))
    assert publisher.stats.pending == 25
    assert len(rows_of(publisher.publish_now())) == 10
    assert publisher.flush()
    assert publisher.stats.deltas == 3
    assert publisher.stats.pending == 0


def test_the_extra_state_for_a_standby_comes_with_the_last_of_several_messages(
    channel: MemoryChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which updates the rows have: all of them, and not those of the first delta alone."""
    monkeypatch.setattr("monolith.sync.publisher.DELTA_IDS", 10)
    table = make_table()
    publisher = publish(
        channel, table, with_state=True, dense_interval=0.0, dense=lambda: {"about": torch.zeros(1)}
    )
    write(table, dict.fromkeys(range(25), 1.0))
    found = [publisher.publish_now() for _ in range(3)]
    assert [one is not None and one.dense is not None for one in found] == [False, False, True]


def test_a_share_must_be_one(channel: MemoryChannel) -> None:
    with pytest.raises(ConfigError, match="shard"):
        publish(channel, make_table(), shard=(2, 2))


# Digests


def test_digests_go_round_all_buckets(channel: MemoryChannel, table: Any) -> None:
    clock = Clock()
    publisher = publish(channel, table, clock=clock, timer=clock, digest_buckets=1024)
    write(table, {key: float(key) for key in range(100)})
    seen = []
    for _ in range(5):
        delta = publisher.publish_now()
        clock.now += 1
        assert delta is not None
        digests = delta.digests["item"]
        assert torch.equal(digests.sums, table.digests(digests.buckets))
        seen += digests.buckets.tolist()
    assert seen == [*range(BUCKETS), *range(1024)]


def test_a_bucket_that_changes_while_it_is_read_has_no_digest(channel: MemoryChannel) -> None:
    table = make_table()
    publisher = publish(channel, table, digest_buckets=BUCKETS)
    write(table, {1: 1.0, 2: 2.0})
    digests = table.digests
    table.digests = lambda buckets: (write(table, {2: 3.0}), digests(buckets))[1]  # type: ignore[assignment,func-returns-value,method-assign]
    delta = publisher.publish_now()
    assert rows_of(delta) == {1: [1.0, 1.0], 2: [2.0, 2.0]}
    assert delta is not None
    left_out = set(range(BUCKETS)) - set(delta.digests["item"].buckets.tolist())
    assert left_out == set(bucket_of(ids(2)).tolist())
    assert rows_of(publisher.publish_now()) == {2: [3.0, 3.0]}, "it comes with the next"


# The channel


def test_a_delta_that_was_not_kept_is_handed_in_again_as_it_was(
    channel: MemoryChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """Under its number readers may know it already: another delta must not have it."""
    table = make_table()
    publisher = publish(channel, table)
    publisher.publish_now()
    start = publisher.position
    channel.broken = True
    with caplog.at_level(logging.INFO):
        write(table, {1: 1.0})
        assert publisher.publish_now() is None
        write(table, {1: 2.0, 2: 2.0})
        assert publisher.publish_now() is None
        assert not publisher.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is said once"
    assert publisher.stats.failures == 3
    channel.broken = False
    assert publisher.flush()
    deltas = [message for message in log_of(channel, start) if isinstance(message, Delta)]
    assert [rows_of(delta) for delta in deltas] == [{1: [1.0, 1.0]}, {1: [2.0, 2.0], 2: [2.0, 2.0]}]


class Failing:
    """Dense weights, or a guard, that cannot be had now."""

    def __init__(self) -> None:
        self.fails = True

    def __call__(self, *_: Delta) -> None:
        if self.fails:
            raise RuntimeError("not now")


@pytest.mark.parametrize("part", ["dense", "check_delta"])
def test_what_fails_while_a_delta_is_made_loses_no_change(channel: MemoryChannel, part: str) -> None:
    table, failing = make_table(), Failing()
    publisher = publish(channel, table, **{part: failing})
    write(table, {1: 1.0, 2: 2.0})
    table.remove(ids(2))
    with pytest.raises(RuntimeError, match="not now"):
        publisher.publish_now()
    failing.fails = False
    delta = publisher.publish_now()
    assert rows_of(delta) == {1: [1.0, 1.0]}
    assert delta is not None
    assert delta.removed["item"].tolist() == [2]


def test_a_channel_that_comes_late_gets_a_log_and_a_snapshot(channel: MemoryChannel) -> None:
    channel.broken = True
    table = make_table()
    write(table, {1: 1.0})
    publisher = publish(channel, table)
    assert publisher.publish_now() is None
    channel.broken = False
    publisher.publish_now()
    snapshot = [message for message in log_of(channel, None) if isinstance(message, SnapshotRows)]
    assert snapshot[0].rows.ids.tolist() == [1]


def test_what_goes_wrong_does_not_stop_the_thread() -> None:
    class Broken:
        tried = threading.Semaphore(0)

        def open(self, *_: object) -> None: ...
        def set_state(self, *_: object) -> None: ...
        def close(self) -> None: ...
        def append(self, _: Delta) -> None:
            self.tried.release()
            raise RuntimeError("no")

    writer = Broken()
    publisher = Publisher({"item": make_table()}, writer, PublisherConfig(run="run", interval=0.001))
    publisher.start()
    for _ in range(3):
        assert writer.tried.acquire(timeout=60)
    publisher.close()
    assert publisher.stats.failures >= 3


def test_a_thread_publishes_until_it_is_closed(channel: MemoryChannel) -> None:
    table = make_table()
    publisher = Publisher({"item": table}, channel.writer(), PublisherConfig(run="run", interval=0.001))
    publisher.start()
    reader = channel.reader()
    write(table, {1: 1.0})
    messages = _until(lambda: reader.logs() and reader.read(0, None, wait=60), Delta)
    assert any(isinstance(message, SnapshotBegin) for message in messages)
    write(table, {2: 2.0})
    publisher.close()
    publisher.close()
    write(table, {3: 3.0})
    assert publisher.stats.pending == 0, "the table tells it nothing any more"


def _until(read: Any, kind: type) -> list[Message]:
    while not (messages := read()):
        pass
    found = []
    for message in messages:
        found.append(message)
        if isinstance(message, kind):
            break
    return found


# Epochs


def test_another_epoch_drops_the_log(channel: MemoryChannel) -> None:
    table = make_table()
    publisher = publish(channel, table)
    write(table, {1: 1.0})
    publisher.publish_now()
    before = publisher.position
    table.clear()
    write(table, {2: 2.0})
    publisher.begin_epoch("the run was rewound")
    assert publisher.position.epoch != before.epoch
    assert publisher.position.sequence == 0
    begin, rows, end = log_of(channel, before)[1:]
    assert isinstance(begin, SnapshotBegin)
    assert isinstance(rows, SnapshotRows)
    assert isinstance(end, SnapshotEnd)
    assert rows.rows.ids.tolist() == [2]
    assert publisher.stats.pending == 0, "the snapshot has it"


@pytest.mark.parametrize("how", ["writes", "clear"])
def test_more_changes_than_are_remembered_begin_an_epoch_and_say_so(
    channel: MemoryChannel, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    table = make_table()
    write(table, dict.fromkeys(range(20), 1.0))
    publisher = publish(channel, table, touched_capacity=10)
    publisher.publish_now()
    before = publisher.position
    if how == "writes":
        write(table, dict.fromkeys(range(20), 2.0))
    else:
        table.clear()
    publisher.publish_now()
    assert publisher.position.epoch != before.epoch
    assert publisher.stats.lost > 10
    assert publisher.stats.epochs == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "were dropped" in warning
    assert "'item'" in warning


def test_a_delta_that_was_made_while_the_set_overflowed_is_not_published(channel: MemoryChannel) -> None:
    """It lacks changes of the step that it would say it contains."""
    table, step = make_table(), 1

    def learned() -> LearnedUpTo:
        nonlocal step
        if step == 1:  # the training thread writes while the delta is made
            step = 2
            write(table, dict.fromkeys(range(20), 2.0))
        return LearnedUpTo(step=step)

    publisher = publish(channel, table, touched_capacity=10, learned=learned)
    write(table, {1: 1.0})
    before = publisher.position
    assert publisher.publish_now() is None
    assert publisher.position.epoch != before.epoch
    _, begin, rows, _ = log_of(channel, None)
    assert isinstance(begin, SnapshotBegin)
    assert isinstance(rows, SnapshotRows)
    assert (begin.learned.step, len(rows.rows)) == (2, 20)


# Holding back


class Finite:
    """Holds back rows that are not finite."""

    def check(self, delta: Delta) -> str | None:
        wrong = [name for name, rows in delta.rows.items() if not bool(torch.isfinite(rows.values).all())]
        return f"rows of {wrong[0]} are not finite" if wrong else None


def test_a_guard_rejects_bad_deltas(channel: MemoryChannel) -> None:
    table = make_table()
    publisher = publish(channel, table, check_delta=Finite().check)
    write(table, {1: 1.0})
    publisher.publish_now()
    position = publisher.position
    write(table, {1: float("nan"), 2: 2.0})
    assert publisher.publish_now() is None
    assert publisher.state.paused
    assert publisher.state.reason == "rows of item are not finite"
    assert publisher.position == position
    assert publisher.stats.pending == 2, "they stay changed"
    write(table, {1: 3.0})
    assert publisher.publish_now() is None, "until it is resumed"
    publisher.resume()
    assert rows_of(publisher.publish_now()) == {1: [3.0, 3.0], 2: [2.0, 2.0]}


def test_nothing_is_published_while_paused(channel: MemoryChannel) -> None:
    table = make_table()
    publisher = publish(channel, table)
    write(table, {1: 1.0})
    publisher.publish_now()
    publisher.pause("calibration is off")
    write(table, {1: 9.0})
    assert not publisher.flush()
    with pytest.raises(UnavailableError, match="calibration is off"):
        log_of(channel, None)
    with pytest.raises(UnavailableError, match="paused"):
        list(channel.reader().read_buckets(0, bucket_of(ids(1))))
    known = log_of(channel, LogPosition(publisher.position.epoch, 0))
    assert [rows_of(m) for m in known if isinstance(m, Delta)] == [{1: [1.0, 1.0]}], "what was let out stays"


def test_a_snapshot_that_is_being_read_ends_when_publishing_is_paused(channel: MemoryChannel) -> None:
    table = make_table()
    write(table, {1: 1.0})
    publisher = publish(channel, table)
    publisher.publish_now()
    messages = channel.reader().read_buckets(0, torch.arange(BUCKETS))
    assert isinstance(next(messages), SnapshotBegin)
    publisher.pause("poisoned")
    with pytest.raises(UnavailableError, match="poisoned"):
        next(messages)


@pytest.mark.parametrize("done", [False, True])
def test_a_snapshot_that_is_being_read_ends_when_rows_are_restored(
    channel: MemoryChannel, done: bool
) -> None:
    """It would say that the restored rows are of the step before the restore."""
    table = make_table()
    write(table, {1: 1.0})
    publisher = publish(channel, table)
    publisher.publish_now()
    messages = publisher._take_snapshot()
    assert isinstance(next(messages), SnapshotBegin)
    publisher.suspend()
    table.clear()
    if done:
        publisher.begin_epoch("restored")
    with pytest.raises(UnavailableError, match="restored"):
        next(messages)
    if not done:
        with pytest.raises(UnavailableError, match="restored"):
            log_of(channel, None)
        publisher.begin_epoch("restored")
    assert log_of(channel, None)


def test_continuing_after_a_rollback_begins_an_epoch(channel: MemoryChannel) -> None:
    publisher = publish(channel, make_table())
    publisher.publish_now()
    before = publisher.state, publisher.position
    publisher.rollback("1700")
    state = publisher.state
    assert (state.paused, state.version) == (True, "1700")
    assert state.number > before[0].number
    publisher.resume()
    assert (publisher.state.paused, publisher.state.version) == (False, None)
    assert publisher.state.number > state.number
    assert publisher.position.epoch != before[1].epoch


def test_the_state_of_a_publisher_that_starts_again_is_the_newer_one(channel: MemoryChannel) -> None:
    clock = Clock()
    first = publish(channel, make_table(), clock=clock)
    first.pause("why")
    clock.now += 1
    assert publish(channel, make_table(), clock=clock).state.number > first.state.number


# Snapshots


def chunks(channel: MemoryChannel, buckets: Tensor) -> Iterator[SnapshotRows]:
    return (m for m in channel.reader().read_buckets(0, buckets) if isinstance(m, SnapshotRows))


def test_a_snapshot_is_counted_and_whole(channel: MemoryChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monolith.sync.publisher.CHUNK_BYTES", 24 * 7)
    table = make_table()
    write(table, {key: float(key) for key in range(20)})
    publisher = publish(channel, table, dense=lambda: {"w": torch.ones(1)})
    publisher.publish_now()
    _, begin, *parts, end = log_of(channel, None)
    assert isinstance(begin, SnapshotBegin)
    assert isinstance(end, SnapshotEnd)
    assert begin.dense is not None
    assert begin.position == end.position == end.whole_at == publisher.position
    assert end.chunks == len(parts) == 3
    rows = [part for part in parts if isinstance(part, SnapshotRows)]
    assert [part.number for part in rows] == [0, 1, 2]
    assert {begin.snapshot, end.snapshot, *(part.snapshot for part in rows)} == {begin.snapshot}
    assert sorted(torch.cat([part.rows.ids for part in rows]).tolist()) == list(range(20))
    assert publisher.stats.snapshots == 1


def test_a_snapshot_is_refused_until_the_channel_knows_of_the_epoch(channel: MemoryChannel) -> None:
    """It would be of an epoch that the log does not have, and be asked for again and again."""
    publisher = publish(channel, make_table())
    publisher.publish_now()
    channel.broken = True
    publisher.begin_epoch("rewound")
    channel.broken = False
    with pytest.raises(UnavailableError, match="new epoch"):
        log_of(channel, None)
    publisher.publish_now()
    assert log_of(channel, None)


def test_a_snapshot_of_buckets_has_no_others(channel: MemoryChannel) -> None:
    table = make_table()
    write(table, {key: float(key) for key in range(200)})
    publish(channel, table).publish_now()
    buckets = bucket_of(ids(3, 70)).sort().values
    found = torch.cat([part.rows.ids for part in chunks(channel, buckets)])
    expected = [key for key in held(table) if bucket_of(ids(key)).item() in buckets.tolist()]
    assert sorted(found.tolist()) == sorted(expected)
    assert {3, 70} <= set(found.tolist())
