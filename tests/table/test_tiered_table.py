"""A table with its hot rows in memory and all others in files. What every table does: tests/contracts."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import ids
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.errors import ConfigError, CorruptFileError, FilesystemError, RestoreError
from monolith.table import (
    Adagrad,
    DictTable,
    Expiry,
    NativeTable,
    Rows,
    Segment,
    Sgd,
    TableConfig,
    TieredTable,
    dump,
    iterate,
    load,
    tiered_table,
)
from monolith.table.dumps import dump_snapshot

SEGMENTS = (Segment(dim=16, optimizer=Adagrad(), learning_rate=0.1),)
NARROW = (Segment(dim=2, optimizer=Sgd(), learning_rate=1.0),)
MEMORY = 8 << 20


@pytest.fixture
def config(tmp_path: Path) -> TableConfig:
    return TableConfig(
        name="item",
        segments=SEGMENTS,
        storage="tiered",
        memory_bytes=MEMORY,
        storage_dir=str(tmp_path / "cold"),
    )


@pytest.fixture
def table(config: TableConfig) -> Iterator[TieredTable]:
    made = TieredTable(config, most_hot_rows=1000)
    yield made
    made.close()


def train(table: Any, keys: torch.Tensor, *, step: int = 1, time: int = 1) -> None:
    generator = torch.Generator().manual_seed(step)
    gradients = torch.randn(len(keys), table.dim, generator=generator)
    table.lookup(keys)
    table.apply_gradients(keys, gradients, step=step, event_time=time, dedup=True)


def everything(table: Any) -> Rows:
    return Rows.concat(list(iterate(table)))


def assert_equal(table: Any, other: Any) -> None:
    mine, others = everything(table), everything(other)
    for column in ("ids", "event_times", "values", "state"):
        assert torch.equal(getattr(mine, column), getattr(others, column)), column


def test_it_learns_to_the_bit_as_a_table_in_memory(config: TableConfig) -> None:
    tiered, memory = TieredTable(config, most_hot_rows=2000), NativeTable(in_memory(config))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 30):
        keys = torch.randint(0, 30_000, (3000,), generator=generator)
        for table in (tiered, memory):
            train(table, keys, step=step, time=step)
    tiered.flush()
    assert_equal(tiered, memory)
    keys = torch.arange(30_000)
    assert torch.equal(tiered.lookup(keys), memory.lookup(keys))
    buckets = torch.arange(4096)
    assert torch.equal(tiered.digests(buckets), memory.digests(buckets))
    tiered.close()


def in_memory(config: TableConfig) -> TableConfig:
    return replace(config, storage="memory", memory_bytes=None, storage_dir=None)


def test_memory_stays_within_its_budget_while_the_table_grows(config: TableConfig) -> None:
    table = TieredTable(replace(config, memory_bytes=2 * MEMORY))
    most = 0
    for step in range(150):
        train(table, torch.arange(step * 2000, (step + 1) * 2000), step=step + 1)
        most = max(most, table.stats().bytes_total)
    stats = table.stats()
    assert stats.rows == 300_000
    assert stats.cold_rows > 200_000
    assert 0.9 * 2 * MEMORY < most <= 2 * MEMORY  # and is used
    assert stats.bytes_total > 0.9 * 2 * MEMORY
    assert stats.cold_bytes >= stats.cold_rows * 16 * 2 * 4
    table.close()


def test_it_says_when_the_index_takes_most_of_the_memory(
    config: TableConfig, caplog: pytest.LogCaptureFixture
) -> None:
    table = TieredTable(replace(config, memory_bytes=4 << 20))
    with caplog.at_level(logging.DEBUG):
        for step in range(60):
            table.assign(torch.arange(step * 5000, (step + 1) * 5000), torch.ones(5000, 16))
    assert "hot rows get less of memory_bytes (4,194,304)" in caplog.text
    assert re.search(r"takes [\d,]+ of 4,194,304 bytes of memory; set memory_bytes to at least", caplog.text)
    assert len(table) == 300_000
    table.close()


def test_new_ids_are_refused_once_the_index_takes_all_memory(
    config: TableConfig, caplog: pytest.LogCaptureFixture
) -> None:
    table = TieredTable(replace(config, segments=NARROW, memory_bytes=4 << 20))
    most = 0
    for step in range(100):
        keys = torch.arange(step * 5000, (step + 1) * 5000)
        table.assign(keys, torch.ones(5000, 2))
        table.lookup(keys)
        most = max(most, table.stats().bytes_total)
    stats = table.stats()
    assert most <= 4 << 20
    assert stats.rows == table.core.most_rows == 500_000 - stats.refused
    assert stats.rows > 250_000
    warned = next(message for message in caplog.messages if "is full" in message)
    for part in (
        "table 'item' is full: it refused",
        f"holds {stats.rows:,} rows",
        "their index takes what its memory_bytes (4,194,304) can spare",
        "set memory_bytes to 8,388,608 for twice as many rows",
        "Refused ids read as zeros and learn nothing",
    ):
        assert part in warned
    # Rows that were there before still learn, none was lost, and those that go make room.
    known = torch.arange(stats.rows // 5000 * 5000)  # of the last batch some were refused
    assert bool((table.lookup(known) == 1).all())
    table.assign_add(known[:10_000], torch.ones(10_000, 2))
    assert bool((table.lookup(known[:10_000]) == 2).all())
    assert table.stats().refused == stats.refused
    assert not table.contains(torch.arange(499_000, 500_000)).any()
    assert table.remove(known[:1000]) == 1000
    table.assign(torch.arange(499_000, 500_000), torch.ones(1000, 2))
    assert table.stats().rows == stats.rows
    assert table.stats().bytes_total <= 4 << 20
    table.close()


def test_a_full_table_says_so_for_ids_that_are_reinitialized(config: TableConfig) -> None:
    table = TieredTable(replace(config, segments=NARROW, memory_bytes=4 << 20))
    most = table.core.most_rows
    for some in torch.arange(most).split(10_000):
        table.assign(some, torch.ones(len(some), 2))
    status = table.reinitialize(torch.tensor([5, most]), now=1)
    assert status.tolist() == [1, -1]
    table.close()


def test_what_a_smaller_memory_cannot_index_is_not_restored(config: TableConfig, tmp_path: Path) -> None:
    large = TieredTable(replace(config, segments=NARROW, memory_bytes=32 << 20), most_hot_rows=100)
    for some in torch.arange(400_000).split(20_000):
        large.assign(some, torch.ones(len(some), 2))
    large.flush()
    snapshot = large.snapshot()
    dump_snapshot(snapshot, str(tmp_path / "dump"))
    snapshot.close(saved=True)
    large.close()
    small = TieredTable(replace(config, segments=NARROW, memory_bytes=4 << 20))
    needed = r"cannot restore table 'item': its memory_bytes \(4,194,304\) .* Set memory_bytes to at least"
    with pytest.raises(RestoreError, match=needed):
        load(small, str(tmp_path / "dump"))
    assert small.stats().bytes_total <= 4 << 20
    small.clear()

    def restore_all() -> None:
        for some in torch.arange(400_000).split(20_000):
            count = len(some)
            small.restore(Rows(some, torch.ones_like(some), torch.ones(count, 2), torch.empty(count, 0)))

    with pytest.raises(RestoreError, match=needed):
        restore_all()
    assert len(small) > 250_000
    assert small.stats().bytes_total <= 4 << 20
    small.close()


@pytest.mark.parametrize("length", [3000, 39_000])
def test_a_scan_of_cold_rows_of_any_length_takes_the_place_of_no_popular_row(
    config: TableConfig, length: int
) -> None:
    table, popular = TieredTable(config, most_hot_rows=1000), torch.arange(500)
    for step in range(4):
        train(table, popular, step=step + 1)
    for turn in range(3):
        for some in torch.arange(1000 + turn * length, 1000 + (turn + 1) * length).split(250):
            train(table, some, step=turn + 10)
        read = table.stats().cold_found
        train(table, popular, step=turn + 10)
        assert table.stats().cold_found - read < 25
    table.close()


def test_rows_become_hot_in_place_of_those_that_were_popular_before(config: TableConfig) -> None:
    """Also if each is used so rarely that it leaves before it is used again."""
    table, random = TieredTable(config, most_hot_rows=1000), torch.Generator().manual_seed(1)
    for step in range(20):
        train(table, torch.arange(750), step=step + 1)
    popular = torch.arange(10_000, 10_800)
    for step in range(150):
        some = popular[torch.randperm(800, generator=random)[:100]]
        train(table, torch.cat([some, torch.arange(20_000 + 20 * step, 20_020 + 20 * step)]), step=step + 30)
    read = table.stats().cold_found
    train(table, popular, step=200)
    assert table.stats().cold_found - read < 200
    table.close()


def test_looking_up_moves_no_row_and_reads_a_cold_one_once(table: TieredTable) -> None:
    train(table, torch.arange(20_000))
    table.flush()
    before = table.stats()
    keys = torch.arange(0, 20_000, 20)
    first = table.lookup(keys)
    between = table.stats()
    assert torch.equal(table.lookup(keys), first)
    after = table.stats()
    assert (before.cold_rows, before.rows) == (after.cold_rows, after.rows)
    assert between.cold_bytes_read > before.cold_bytes_read
    reads = between.cold_reads - before.cold_reads
    assert 100 < reads <= (between.cold_bytes_read - before.cold_bytes_read) / 4096  # neighbours at once
    assert after.cold_reads - between.cold_reads < reads / 4
    assert after.cold_found_in_memory - between.cold_found_in_memory > 800
    assert (before.is_tiered, after.tiered_ids - between.tiered_ids) == (True, 1000)


def test_rows_that_were_read_ahead_are_looked_up_as_they_are_then_and_not_read_again(
    table: TieredTable,
) -> None:
    train(table, torch.arange(20_000))
    table.flush()
    keys = torch.arange(0, 20_000, 20)
    changed = keys[::2]
    before = table.stats()
    table.read_ahead(keys)
    between = table.stats()
    assert between.cold_ids_read - before.cold_ids_read > 800
    assert (between.cold_rows, between.tiered_ids) == (before.cold_rows, before.tiered_ids)
    table.assign(changed, torch.ones(len(changed), 16))
    found = table.lookup(keys)
    assert table.stats().cold_ids_read == between.cold_ids_read
    assert bool((found[::2] == 1).all())
    assert not bool((found[1::2] == 1).any())


def test_an_update_reads_no_row_again_that_a_lookup_of_the_last_two_batches_read(config: TableConfig) -> None:
    table = TieredTable(replace(config, memory_bytes=2 * MEMORY))
    keys = torch.randperm(150_000, generator=torch.Generator().manual_seed(0)).split(2000)
    for step, some in enumerate(keys):
        train(table, some, step=step + 1)
    table.flush()
    table.lookup(keys[0])
    looked_up = updated = 0
    for step in range(40):  # one batch ahead, as training does
        before = table.stats()
        table.lookup(keys[step + 1])
        between = table.stats()
        table.assign_add(keys[step], torch.ones(2000, 16))
        if step > 10:  # by now the table knows how large batches are
            looked_up += between.cold_ids_read - before.cold_ids_read
            updated += table.stats().cold_ids_read - between.cold_ids_read
    assert looked_up > 1000 * 29
    # But rows that were hot then, or in a buffer, and have been written to a file since.
    assert updated < 0.2 * looked_up
    assert table.stats().bytes_total <= 2 * MEMORY
    table.close()


def test_a_table_whose_memory_shrinks_is_that_of_one_in_memory(config: TableConfig) -> None:
    tiered, memory = TieredTable(replace(config, memory_bytes=4 << 20)), NativeTable(in_memory(config))
    for table in (tiered, memory):
        table.track_changes(True)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):  # the index grows to a third of the memory
        keys = torch.cat(
            [
                torch.arange(step * 2500, (step + 1) * 2500),
                torch.randint(0, 2500 * (step + 1), (500,), generator=generator),
            ]
        )
        for table in (tiered, memory):
            train(table, keys.unique(), step=step + 1)
        if step % 20 == 10:
            for table in (tiered, memory):
                table.snapshot().close(saved=True)
    assert_equal(tiered, memory)
    changed = []
    for table in (tiered, memory):
        snapshot = table.snapshot()
        found = snapshot.scan(limit=1 << 20, changed_only=True).rows.ids
        changed.append(found.sort().values)
        snapshot.close(saved=False)
    assert torch.equal(*changed)
    tiered.close()


def test_a_batch_larger_than_the_hot_rows_is_worked_on(config: TableConfig) -> None:
    table, memory = TieredTable(config, most_hot_rows=10), NativeTable(in_memory(config))
    for step in range(3):
        for one in (table, memory):
            train(one, torch.arange(5000), step=step + 1)
    assert table.stats().cold_rows >= 4980
    assert_equal(table, memory)
    table.close()


def test_cold_rows_expire(config: TableConfig) -> None:
    expiry = Expiry(default=timedelta(seconds=100), per_slot={7: timedelta(seconds=10)})
    tiered = TieredTable(replace(config, expiry=expiry), most_hot_rows=100)
    memory = NativeTable(replace(in_memory(config), expiry=expiry))
    for time in range(0, 150, 10):
        keys = torch.cat(
            [torch.arange(time * 100, time * 100 + 500), (7 << 48) + torch.arange(time, time + 500)]
        )
        for table in (tiered, memory):
            train(table, keys, step=time + 1, time=time)
    tiered.flush()
    assert tiered.count_expired(150) == memory.count_expired(150) > 1000
    assert tiered.evict(150) == memory.evict(150)
    assert tiered.stats().evicted == memory.stats().evicted
    assert_equal(tiered, memory)
    tiered.close()


def test_expiry_lets_writers_and_lookups_in_and_drops_what_expired(config: TableConfig) -> None:
    """A row that is written meanwhile is not dropped, wherever it was and wherever it has moved to."""
    expiry = Expiry(default=timedelta(seconds=100))
    table = TieredTable(replace(config, expiry=expiry), most_hot_rows=500)
    kept, old = torch.arange(0, 4000), torch.arange(4000, 30_000)
    for some in torch.cat([kept, old])[torch.randperm(30_000)].split(1000):
        table.assign(some, torch.ones(len(some), 16), event_time=1)
    table.assign(kept, torch.ones(4000, 16), event_time=1000)  # now in files with many that will go
    errors: list[BaseException] = []
    evicted: list[int] = []
    stop = threading.Event()

    def expire() -> None:
        try:
            evicted.append(table.evict(1000))
        except BaseException as error:
            errors.append(error)
        finally:
            stop.set()

    expiring = threading.Thread(target=expire)
    expiring.start()
    steps = 0
    while not stop.is_set() or steps < 20:  # rows leave for files, and files are compacted
        some = kept[steps * 700 % 4000 :][:700]
        table.assign_add(some, torch.zeros(len(some), 16), event_time=1000)
        assert bool((table.lookup(kept) == 1).all())
        steps += 1
    expiring.join(60)
    assert (errors, evicted) == ([], [26_000])
    assert len(table) == 4000
    assert not table.contains(old).any()
    assert table.stats().evicted == 26_000
    table.close()


def test_a_row_that_is_written_between_two_parts_of_an_expiry_stays(config: TableConfig) -> None:
    expiry = Expiry(default=timedelta(seconds=100))
    table = TieredTable(replace(config, expiry=expiry), most_hot_rows=500)
    table.assign(torch.arange(30_000), torch.ones(30_000, 16), event_time=1)
    table.flush()
    going = table.core.expiry(1000)
    parts = 0
    while table.core.find_expired(going):
        table.assign(torch.arange(parts * 100, (parts + 1) * 100), torch.ones(100, 16), event_time=1000)
        table.core.drop_expired(going)
        parts += 1
    assert parts > 3
    assert len(table) == parts * 100
    assert bool((table.lookup(torch.arange(parts * 100)) == 1).all())
    table.close()


def test_cold_rows_are_removed_where_they_are(table: TieredTable) -> None:
    train(table, torch.arange(20_000))
    table.flush()
    popular = torch.arange(19_950, 20_000)
    train(table, popular)
    before = table.stats()
    table.lookup(torch.arange(1000))
    looked = table.stats()
    cold, read = looked.cold_found - before.cold_found, looked.cold_bytes_read
    assert cold > 900
    assert table.remove(torch.arange(-10, 1000).repeat(2)) == 1000
    after = table.stats()
    assert (after.rows, after.removed) == (19_000, 1000)
    assert before.cold_rows - after.cold_rows == cold  # no row took the place of another
    assert after.cold_bytes_read == read  # the lookup did
    assert not table.contains(torch.arange(1000)).any()
    assert table.remove(torch.arange(1000)) == 0


def test_files_that_are_mostly_dead_are_compacted(table: TieredTable) -> None:
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        train(table, torch.randperm(5000, generator=generator)[:1000], step=step + 1)
    table.flush()
    stats = table.stats()
    assert stats.compactions > 0
    assert stats.cold_bytes_written > 5 * stats.cold_bytes
    assert stats.cold_bytes < 4 * stats.cold_rows * (16 * 2 * 4 + 16)


def test_dumps_are_those_of_any_table(config: TableConfig, tmp_path: Path) -> None:
    tiered, memory = TieredTable(config, most_hot_rows=100), NativeTable(in_memory(config))
    for table in (tiered, memory):
        train(table, torch.arange(10_000))
        dump(table, str(tmp_path / type(table).__name__), num_shards=3)
    again = TieredTable(config, most_hot_rows=100)
    load(again, str(tmp_path / "NativeTable"))
    assert_equal(again, memory)
    other = NativeTable(in_memory(config))
    load(other, str(tmp_path / "TieredTable"))
    assert_equal(other, memory)
    for table in (tiered, again):
        table.close()


@given(data=st.data())
@settings(max_examples=tries(20), deadline=None)
def test_any_operations_end_as_in_a_dict(data: st.DataObject) -> None:
    config = TableConfig(
        name="item",
        segments=(Segment(dim=2, optimizer=Sgd(), learning_rate=1.0),),
        expiry=Expiry(default=timedelta(seconds=60)),
    )
    tiered = TieredTable(replace(config, storage="tiered", memory_bytes=4 << 20), most_hot_rows=3)
    plain = DictTable(config)
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["assign", "train", "remove", "evict", "restore", "clear", "flush"]),
                st.lists(st.integers(-20, 20), min_size=1, max_size=10, unique=True),
            ),
            max_size=30,
        )
    )
    for time, (what, some) in enumerate(steps):
        keys, moment = torch.tensor(some), time * 10
        values = torch.full((len(keys), 2), float(time))
        for table in (tiered, plain):
            if what == "assign":
                table.assign(keys, values, event_time=moment)
            elif what == "train":
                table.apply_gradients(keys, values, event_time=moment, step=time)
            elif what == "remove":
                table.remove(keys)
            elif what == "evict":
                table.evict(moment)
            elif what == "restore":
                times = torch.full((len(keys),), moment)
                table.restore(Rows(keys, times, values, torch.empty(len(keys), 0)))
            elif what == "clear":
                table.clear()
            elif isinstance(table, TieredTable):
                table.flush()
        assert len(tiered) == len(plain)
    assert_equal(tiered, plain) if len(plain) else None
    tiered.close()


# What goes wrong


def test_a_disk_that_takes_no_rows_pauses_writers_and_loses_none(
    table: TieredTable, caplog: pytest.LogCaptureFixture
) -> None:
    train(table, torch.arange(5000))
    away = table.folder.with_name("away")
    table.folder.rename(away)  # as good as a full disk: no file can be made
    held = table.folder
    writer = threading.Thread(target=train, args=(table, torch.arange(5000, 25_000)), kwargs={"step": 2})
    with caplog.at_level(logging.WARNING):
        writer.start()
        while "is paused: its cold rows cannot be written" not in caplog.text:
            writer.join(0.05)
        assert writer.is_alive()
        table.lookup(torch.arange(100))  # readers do not wait
        away.rename(held)
        writer.join(60)
    assert not writer.is_alive()
    assert "resumes: its cold rows are written again" in caplog.text
    assert len(table) == 25_000
    assert bool(table.contains(torch.arange(25_000)).all())


@pytest.mark.parametrize("remover_has_locked", [False, True])
def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    config: TableConfig, monkeypatch: pytest.MonkeyPatch, remover_has_locked: bool
) -> None:
    """Two servers may start at once; each removes what has no owner."""
    lock, held = tiered_table._locked, []

    def after_another_has_looked(folder: Path) -> int | None:
        monkeypatch.setattr(tiered_table, "_locked", lock)
        if remover_has_locked:
            held.append(lock(folder))
        else:
            tiered_table._remove_ownerless(folder.parent)
            assert not folder.exists()
        return lock(folder)

    monkeypatch.setattr(tiered_table, "_locked", after_another_has_looked)
    own = tiered_table._OwnFolder(config)
    assert [one.name for one in own.path.iterdir()] == ["lock"]
    for file in held:
        os.close(file)
    _ = [tiered_table._remove_ownerless(own.path.parent) for _ in range(2)]
    assert list(own.path.parent.iterdir()) == [own.path]
    own.remove()
    assert not list(own.path.parent.iterdir())


def test_a_planted_folder_is_neither_changed_nor_in_the_way(config: TableConfig, tmp_path: Path) -> None:
    """A user who may write to storage_dir could have a file made in any folder of the table's user."""
    (tmp_path / "cold" / "second.cold").mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "letter").write_text("dear")
    (tmp_path / "cold" / "first.cold").symlink_to(victim)
    (tmp_path / "cold" / "second.cold" / "lock").symlink_to(victim / "made")
    (tmp_path / "cold" / "third.cold").write_text("no folder")
    TieredTable(config).close()
    assert [path.name for path in victim.iterdir()] == ["letter"]
    assert len(list((tmp_path / "cold").iterdir())) == 3


def test_the_default_folder_is_taken_only_if_it_is_this_users_alone(
    config: TableConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = replace(config, storage_dir=None)
    table = TieredTable(config)
    default = table.folder.parent
    assert default.parent == tmp_path
    assert stat.S_IMODE(default.stat().st_mode) == 0o700
    table.close()
    default.chmod(0o777)  # as another user could have made it
    with pytest.raises(FilesystemError, match=r"with mode 0777; remove it.*set storage_dir to a folder"):
        TieredTable(config)
    default.rmdir()
    default.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FilesystemError, match=r"is a link.*set storage_dir to a folder"):
        TieredTable(config)


def test_only_the_user_can_read_cold_rows_until_a_checkpoint_shares_them(
    table: TieredTable, tmp_path: Path
) -> None:
    def modes(paths: Iterable[Path]) -> set[int]:
        return {stat.S_IMODE(path.stat().st_mode) for path in paths}

    train(table, torch.arange(3000))
    table.flush()
    assert modes(table.folder.iterdir()) == {0o600}
    (tmp_path / "team").mkdir(mode=0o755)
    dump(table, str(tmp_path / "team" / "rows"))
    assert len(modes((tmp_path / "team").iterdir())) == 1  # linked files are as readable as written ones


def test_a_damaged_block_is_refused_by_file_and_offset(table: TieredTable) -> None:
    train(table, torch.arange(3000))
    table.flush()
    for path in table.folder.glob("*.cold"):
        content = bytearray(path.read_bytes())
        content[4096 + 100] ^= 1
        path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"\d+\.cold.*4,?096.*rows of IDs"):
        table.lookup(torch.arange(3000))


def test_files_of_a_killed_process_are_removed_and_those_of_a_living_one_stay(
    config: TableConfig, tmp_path: Path
) -> None:
    program = textwrap.dedent("""
        import os, signal, sys, torch
        from monolith.table import Segment, TableConfig, TieredTable
        config = TableConfig(
            name="item",
            segments=(Segment(dim=16),),
            storage="tiered",
            memory_bytes=4 << 20,
            storage_dir=sys.argv[1],
        )
        table = TieredTable(config, most_hot_rows=10)
        table.assign(torch.arange(5000), torch.ones(5000, 16))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    living = TieredTable(config)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "cold")], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "cold").iterdir())) == 2
    other = TieredTable(config)
    assert set((tmp_path / "cold").iterdir()) == {living.folder, other.folder}
    assert living.folder.stat().st_mode & 0o777 == 0o700
    for table in (living, other):
        table.close()
    assert list((tmp_path / "cold").iterdir()) == []


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(
    config: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def remove_first(folder: Path) -> int | None:
        if not removed:
            shutil.rmtree(folder)
            removed.append(folder)
        return locked(folder)

    locked = tiered_table._locked
    monkeypatch.setattr(tiered_table, "_locked", remove_first)
    table = TieredTable(config)
    assert table.folder.is_dir()
    assert table.folder not in removed
    table.close()


def test_a_file_that_is_written_while_the_folder_is_removed_goes_too(
    config: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the core, while a lookup that began before keeps it alive."""
    table, real = TieredTable(config), shutil.rmtree

    def remove(path: Path, **how: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        real(path, **how)
        path.mkdir()
        (path / "7.cold").write_bytes(b"rows")

    monkeypatch.setattr(shutil, "rmtree", remove)
    table.close()
    assert not table.folder.exists()


def test_what_is_left_of_a_removal_that_was_not_finished_is_removed(
    config: TableConfig, tmp_path: Path
) -> None:
    left = tmp_path / "cold" / "item-1234.cold"
    left.mkdir(parents=True)
    (left / "7.cold").write_bytes(b"rows")
    TieredTable(config).close()
    assert not left.exists()


def test_a_folder_that_cannot_be_written_is_refused(config: TableConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FilesystemError, match="set storage_dir to a folder on a local disk"):
        TieredTable(replace(config, storage_dir=str(tmp_path / "file" / "cold")))


def test_settings_that_do_not_go_together_are_refused() -> None:
    for wrong, why in (
        ({"storage": "ssd"}, "storage must be 'memory' or 'tiered', got 'ssd'"),
        ({"storage": "tiered"}, "storage='tiered' needs memory_bytes"),
        ({"storage": "tiered", "memory_bytes": 1000}, "at least 4,194,304; got 1000"),
        ({"memory_bytes": MEMORY}, "memory_bytes and storage_dir are for storage='tiered'"),
        ({"storage": "tiered", "memory_bytes": MEMORY, "capacity_bytes": MEMORY}, "Leave capacity_bytes out"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)):
            TableConfig(name="item", segments=SEGMENTS, **wrong)
    with pytest.raises(ConfigError, match="a TieredTable needs storage='tiered'"):
        TieredTable(TableConfig(name="item", segments=SEGMENTS))


def test_a_lookup_finds_rows_that_move_meanwhile(table: TieredTable) -> None:
    keys = torch.arange(5000)
    table.assign(keys, torch.ones(5000, 16))
    stop = threading.Event()

    def move() -> None:
        step = 0
        while not stop.is_set():
            some = keys[step * 700 % 5000 :][:700]
            table.assign_add(some, torch.zeros(len(some), 16))
            step += 1

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(100):
            assert bool((table.lookup(keys) == 1).all())
    finally:
        stop.set()
        mover.join()
    assert len(table) == 5000
    assert table.lookup(ids(9999)).abs().sum() == 0
