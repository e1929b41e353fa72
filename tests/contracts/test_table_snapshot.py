"""What a snapshot of a table is, for every table that can be snapshot. Read the names in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import (
    LinkingTieredTable,
    crowded_table_classes,
    ids,
    narrow_table_classes,
    roomy_table_classes,
    rows,
    table_classes,
    tiered_table_classes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.errors import CorruptFileError, RestoreError, TableArgumentError
from monolith.table import (
    Adagrad,
    Expiry,
    Segment,
    TableConfig,
    dump_changes,
    dump_snapshot,
    iterate,
    load,
    load_changes,
)

CONFIG = TableConfig(
    name="item",
    segments=(Segment(dim=2, optimizer=Adagrad(), learning_rate=0.5),),
    expiry=Expiry(default=timedelta(seconds=100)),
)
Content = dict[int, tuple[int, list[float], list[float]]]


@pytest.fixture(
    params=[
        *table_classes(),
        *tiered_table_classes(),
        LinkingTieredTable,
        *crowded_table_classes(),
        *roomy_table_classes(),
        *narrow_table_classes(),
    ],
    ids=lambda cls: cls.__name__,
)
def make(request: pytest.FixtureRequest) -> Any:
    return lambda config=CONFIG: request.param(config)


@pytest.fixture
def table(make: Any) -> Iterator[Any]:
    made = make()
    yield made
    made.close()


def read(chunks: Any) -> Content:
    found: Content = {}
    for chunk in chunks:
        columns = (chunk.ids, chunk.event_times, chunk.values, chunk.state)
        for key, *row in zip(*(column.tolist() for column in columns), strict=True):
            assert key not in found
            found[key] = tuple(row)
    return found


def content(table: Any) -> Content:
    return read(iterate(table))


def scanned(snapshot: Any, **how: Any) -> Content:
    def chunks() -> Iterator[Any]:
        cursor = None
        while True:
            scan = snapshot.scan(cursor, limit=3, **how)
            yield scan.rows
            cursor = scan.cursor
            if cursor is None:
                return

    return read(chunks())


def train(table: Any, *keys: int, time: int = 1) -> None:
    table.apply_gradients(ids(*keys), torch.ones(len(keys), 2), event_time=time, dedup=True)


def test_a_snapshot_shows_the_rows_of_the_moment_it_was_opened(table: Any) -> None:
    train(table, *range(10))
    before = content(table)
    snapshot = table.snapshot()
    train(table, 3, 4, 100, time=5)
    table.remove(ids(5, 6))
    table.assign(ids(7), rows([9.0, 9.0]), event_time=7)
    table.reinitialize(ids(8), now=9)
    train(table, 5)  # one that went and came back is another row
    assert scanned(snapshot) == before
    assert len(snapshot) == 10
    assert snapshot.max_event_time == 1


def test_a_snapshot_outlives_the_eviction_of_all_its_rows(table: Any) -> None:
    train(table, *range(5))
    before = content(table)
    snapshot = table.snapshot()
    assert table.evict(now=1000) == 5
    train(table, *range(50, 60), time=1000)  # where the old ones were
    assert scanned(snapshot) == before


def test_shards_of_a_snapshot_are_disjoint_and_cover_it(table: Any) -> None:
    train(table, *range(30))
    before = content(table)
    snapshot = table.snapshot()
    train(table, *range(15, 45))
    shards = [scanned(snapshot, shard=shard, num_shards=3) for shard in range(3)]
    assert sum(map(len, shards)) == 30
    assert shards[0] | shards[1] | shards[2] == before


def test_a_snapshot_can_be_read_again(table: Any) -> None:
    train(table, *range(10))
    snapshot = table.snapshot()
    train(table, *range(5))
    assert scanned(snapshot) == scanned(snapshot)


def test_one_snapshot_at_a_time(table: Any) -> None:
    snapshot = table.snapshot()
    with pytest.raises(TableArgumentError, match="is open already"):
        table.snapshot()
    snapshot.close(saved=True)
    table.snapshot().close(saved=True)


def test_a_table_is_not_cleared_under_a_snapshot(table: Any) -> None:
    train(table, 1)
    snapshot = table.snapshot()
    with pytest.raises(TableArgumentError, match="of this table is open"):
        table.clear()
    snapshot.close(saved=False)
    snapshot.close(saved=False)
    table.clear()


def test_a_closed_snapshot_is_not_read(table: Any) -> None:
    snapshot = table.snapshot()
    snapshot.close(saved=True)
    with pytest.raises(TableArgumentError, match="closed"):
        snapshot.scan()


def test_changes_are_told_only_by_a_table_that_tracks_them(table: Any) -> None:
    snapshot = table.snapshot()
    assert not snapshot.tracked
    with pytest.raises(TableArgumentError, match="does not keep track"):
        snapshot.scan(changed_only=True)


def test_a_snapshot_tells_what_changed_since_the_one_before(table: Any) -> None:
    train(table, *range(10))
    table.track_changes()
    train(table, 3, 11)
    table.remove(ids(4))
    snapshot = table.snapshot()
    train(table, 5)  # after the snapshot: the next one's business
    assert sorted(scanned(snapshot, changed_only=True)) == [3, 11]
    assert snapshot.removed().tolist() == [4]
    snapshot.close(saved=True)
    again = table.snapshot()
    assert sorted(scanned(again, changed_only=True)) == [5]
    assert again.removed().tolist() == []


def test_evicted_ids_count_as_removed(table: Any) -> None:
    train(table, 1, 2, time=1)
    train(table, 3, time=200)
    table.track_changes()
    table.evict()
    assert sorted(table.snapshot().removed().tolist()) == [1, 2]


def test_changes_of_a_snapshot_that_was_not_saved_are_told_again(table: Any) -> None:
    train(table, *range(10))
    table.track_changes()
    train(table, 1)
    table.remove(ids(2))
    snapshot = table.snapshot()
    train(table, 3)
    snapshot.close(saved=False)
    again = table.snapshot()
    assert sorted(scanned(again, changed_only=True)) == [1, 3]
    assert again.removed().tolist() == [2]


@given(data=st.data())
@settings(max_examples=tries(15), deadline=None)
def test_base_and_changes_make_the_table_whatever_happened(data: st.DataObject) -> None:
    """The same operations on every kind of table, saved by a base and increments, some of which fail."""
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["train", "remove", "evict", "clear", "save", "fail"]),
                st.lists(st.integers(-3, 12), min_size=1, max_size=6),
            ),
            max_size=25,
        )
    )
    for cls in [*table_classes(), *tiered_table_classes()]:
        table = cls(CONFIG)
        table.track_changes()
        copy: Content = {}
        for time, (what, keys) in enumerate(steps):
            if what == "train":
                train(table, *keys, time=40 * time)
            elif what == "remove":
                table.remove(ids(*keys))
            elif what == "evict":
                table.evict()
            elif what == "clear":
                table.clear()
            else:
                truth = content(table)
                snapshot = table.snapshot()
                train(table, *keys, time=40 * time)
                if what == "save":
                    if snapshot.cleared:
                        copy.clear()
                    for key in snapshot.removed().tolist():
                        copy.pop(key, None)
                    copy |= scanned(snapshot, changed_only=True)
                    assert copy == truth
                snapshot.close(saved=what == "save")
        table.close()


def test_a_snapshot_is_of_one_moment_while_others_write(make: Any) -> None:
    table = make()
    train(table, *range(200))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            train(table, *range(100, 300))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            snapshot = table.snapshot()
            first = scanned(snapshot, num_shards=1)
            assert scanned(snapshot) == first
            snapshot.close(saved=True)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    table.close()


def test_a_table_that_is_frozen_can_be_snapshotted(table: Any) -> None:
    """Tables that must agree are held still together, then snapshot."""
    train(table, 1, 2, 3)
    found: list[Content] = []

    def cut_it() -> None:
        with table.frozen():
            snapshot = table.snapshot()
            table.track_changes()
        found.append(scanned(snapshot))
        snapshot.close(saved=True)

    thread = threading.Thread(target=cut_it, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert found == [content(table)]


# On disk


def test_all_rows_of_a_snapshot_are_written_unless_a_time_is_given(make: Any, tmp_path: Path) -> None:
    table, base = make(), str(tmp_path / "item")
    train(table, 1, 2, time=0)
    train(table, 3, time=100)
    snapshot = table.snapshot()
    assert dump_snapshot(snapshot, base).rows == 3
    seen: list[int] = []
    report = dump_snapshot(snapshot, base, expire_at=100, written=lambda keys: seen.extend(keys.tolist()))
    assert (report.rows, report.expired, seen) == (1, 2, [3])


def test_rows_of_files_that_are_kept_count_as_written(make: Any, tmp_path: Path) -> None:
    table, base = make(), str(tmp_path / "item")
    train(table, *range(20))
    snapshot = table.snapshot()
    dump_snapshot(snapshot, base, num_shards=3, stamp="now")
    seen: list[int] = []
    report = dump_snapshot(
        snapshot,
        base,
        num_shards=3,
        stamp="now",
        resume=True,
        written=lambda keys: seen.extend(keys.tolist()),
    )
    assert (report.skipped, sorted(seen)) == (3, list(range(20)))


def test_a_dump_of_a_snapshot_is_of_its_moment(make: Any, tmp_path: Path) -> None:
    table, base = make(), str(tmp_path / "item")
    train(table, *range(20))
    before = content(table)
    snapshot = table.snapshot()
    train(table, *range(10, 30), time=50)
    report = dump_snapshot(snapshot, base, num_shards=3)
    assert (report.rows, report.expired) == (20, 0)
    other = make()
    load(other, base)
    assert content(other) == before


def test_a_base_and_its_changes_make_the_table(make: Any, tmp_path: Path) -> None:
    table, base, more = make(), str(tmp_path / "a" / "item"), str(tmp_path / "b" / "item")
    table.track_changes()
    train(table, *range(20))
    snapshot = table.snapshot()
    dump_snapshot(snapshot, base)
    snapshot.close(saved=True)
    train(table, 3, 50, time=60)
    table.remove(ids(4, 5))
    snapshot = table.snapshot()
    report = dump_changes(snapshot, more)
    snapshot.close(saved=True)
    # A row that leaves the device for host memory is taken out and put in again.
    moved = report.removed - 2
    assert moved == 0 or table.near.most_rows < 20
    assert (report.changed.rows, report.cleared) == (2 + moved, False)
    other = make()
    load(other, base)
    load_changes(other, more)
    assert content(other) == content(table)


def test_changes_of_a_table_that_was_cleared_start_again(make: Any, tmp_path: Path) -> None:
    table, base, more = make(), str(tmp_path / "a" / "item"), str(tmp_path / "b" / "item")
    table.track_changes()
    train(table, *range(20))
    snapshot = table.snapshot()
    dump_snapshot(snapshot, base)
    snapshot.close(saved=True)
    table.clear()
    train(table, 7)
    snapshot = table.snapshot()
    report = dump_changes(snapshot, more)
    other = make()
    load(other, base)
    load_changes(other, more, cleared=report.cleared)
    assert content(other) == content(table)


def test_damaged_changes_touch_nothing(make: Any, tmp_path: Path) -> None:
    table, more = make(), str(tmp_path / "item")
    table.track_changes()
    train(table, 1, 2)
    table.remove(ids(2))
    dump_changes(table.snapshot(), more)
    other = make()
    train(other, 2)
    before = content(other)
    for path in sorted(tmp_path.glob("item*-of-*")):
        good = path.read_bytes()
        path.write_bytes(good[:70] + bytes([good[70] ^ 1]) + good[71:])
        with pytest.raises(CorruptFileError, match=path.name):
            load_changes(other, more)
        assert content(other) == before
        path.write_bytes(good)
    for path in sorted(tmp_path.glob("*.manifest")):
        good = path.read_bytes()
        path.unlink()
        with pytest.raises((RestoreError, FileNotFoundError)):
            load_changes(other, more)
        assert content(other) == before
        path.write_bytes(good)


def test_changes_are_not_dumped_from_a_table_that_does_not_track_them(table: Any, tmp_path: Path) -> None:
    with pytest.raises(TableArgumentError, match=r"track_changes\(\)"):
        dump_changes(table.snapshot(), str(tmp_path / "item"))
