"""Dumps that link to the files of a tiered table. What every dump does: contracts/test_table_snapshot.py."""

from __future__ import annotations

import errno
import os
import random
import secrets
import signal
import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import ids
from services import warm

from monolith import filesystem
from monolith.errors import CorruptFileError, FilesystemError, RestoreError
from monolith.table import (
    Adagrad,
    DynamicWdAdagrad,
    Expiry,
    NativeTable,
    Rows,
    Segment,
    Sgd,
    TableConfig,
    TieredTable,
    TouchedKeySet,
    dump,
    dump_changes,
    dump_snapshot,
    iterate,
    load,
    load_changes,
    read_dump_manifest,
)
from monolith.table.cold_files import ColdFile, LinkedRows, in_order_of_hashes
from monolith.table.config import EmbeddingDtype
from monolith.table.dumps import inspect_dump, linked_rows, remove_dump
from monolith.table.hashing import mix
from monolith.table.row_streams import HASHES, DumpStep, find_row, newest_rows

ROWS = 12_000
SEGMENTS = (Segment(dim=3, optimizer=Adagrad(), learning_rate=0.1), Segment(dim=5, optimizer=Adagrad()))


@pytest.fixture
def config(tmp_path: Path) -> TableConfig:
    return TableConfig(
        name="item",
        segments=SEGMENTS,
        storage="tiered",
        memory_bytes=8 << 20,
        storage_dir=str(tmp_path / "cold"),
    )


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(tmp_path / "dumps" / "item")


def in_memory(config: TableConfig) -> TableConfig:
    return replace(config, storage="memory", memory_bytes=None, storage_dir=None)


def filled(config: TableConfig, rows: int = ROWS) -> TieredTable:
    """A table of ids 0 .. rows - 1, most of them in files, trained once at a second of their own."""
    table = TieredTable(config, most_hot_rows=500)
    for some in torch.arange(rows).split(1000):
        gradients = torch.randn(len(some), table.dim, generator=torch.Generator().manual_seed(int(some[0])))
        table.apply_gradients(some, gradients, event_time=some + 1, step=1)
    table.flush()
    return table


def linked(table: TieredTable, base: str, **how: Any) -> Any:
    snapshot = table.snapshot()
    try:
        return dump_snapshot(snapshot, base, **how)
    finally:
        snapshot.close(saved=True)


def everything(table: Any) -> Rows:
    return Rows.concat(list(iterate(table)))


def assert_same(found: Rows, expected: Rows) -> None:
    for column in ("ids", "event_times", "values", "state"):
        assert torch.equal(getattr(found, column), getattr(expected, column)), column


def names(base: str) -> set[str]:
    return {path.name.partition("-00")[0].removeprefix("item") for path in Path(base).parent.iterdir()}


@pytest.fixture
def dumped(config: TableConfig, base: str) -> Rows:
    """The rows of a dump with links; its table is closed and its folder gone."""
    table = filled(config)
    report = linked(table, base)
    assert report.rows == ROWS
    assert report.linked_rows > ROWS * 0.9
    assert report.bytes == sum(Path(file).stat().st_size for file in report.files)
    found = everything(table)
    table.close()
    assert list(Path(str(config.storage_dir)).iterdir()) == []
    return found


# There and back


def test_links_outlive_the_table_and_restore_any(dumped: Rows, config: TableConfig, base: str) -> None:
    memory = NativeTable(in_memory(config))
    report = load(memory, base)
    assert (report.rows, report.adopted, report.skipped) == (ROWS, 0, 0)
    assert_same(everything(memory), dumped)
    tiered = TieredTable(config, most_hot_rows=500)
    report = load(tiered, base)
    assert (report.rows, report.skipped) == (ROWS, 0)
    assert report.adopted > ROWS * 0.9
    assert_same(everything(tiered), dumped)
    assert tiered.stats().max_event_time == ROWS
    assert tiered.stats().inserted == ROWS
    tiered.close()


def test_a_table_that_is_closed_while_it_is_dumped_keeps_its_files_until_then(
    config: TableConfig, base: str
) -> None:
    table = filled(config)
    snapshot = table.snapshot()
    truth = everything(table)
    table.close()
    assert dump_snapshot(snapshot, base).linked_rows > ROWS * 0.9
    assert len(list(Path(str(config.storage_dir)).iterdir())) == 1
    snapshot.close(saved=True)
    snapshot.close(saved=True)
    assert list(Path(str(config.storage_dir)).iterdir()) == []
    load(memory := NativeTable(in_memory(config)), base)
    assert_same(everything(memory), truth)


def test_a_save_reads_and_writes_no_cold_row(config: TableConfig, base: str) -> None:
    table = filled(config)
    read = table.stats().cold_bytes_read
    report = linked(table, base)
    assert table.stats().cold_bytes_read == read
    manifest = read_dump_manifest(base)
    assert (manifest.version, sum(manifest.rows)) == (2, ROWS - report.linked_rows)
    assert sum(manifest.bytes) < sum(manifest.linked_bytes) / 5
    files = [path for path in Path(base).parent.iterdir() if ".cold-" in path.name]
    assert all(path.stat().st_nlink == 2 for path in files)
    other = TieredTable(config, most_hot_rows=500)
    load(other, base, verify_first=False)
    assert other.stats().cold_bytes_read < table.stats().cold_bytes / 4  # the directories
    assert all(path.stat().st_nlink == 3 for path in files)
    for one in (table, other):
        one.close()


@pytest.mark.usefixtures("dumped")
def test_a_restored_table_trains_on_to_the_bit(config: TableConfig, base: str) -> None:
    tiered, memory = TieredTable(config, most_hot_rows=500), NativeTable(in_memory(config))
    for table in (tiered, memory):
        load(table, base)
        for step in range(2, 12):
            generator = torch.Generator().manual_seed(step)
            keys = torch.randint(0, 2 * ROWS, (2000,), generator=generator)
            table.lookup(keys)
            gradients = torch.randn(len(keys), 8, generator=generator)
            table.apply_gradients(keys, gradients, step=step, event_time=ROWS + step, dedup=True)
    tiered.flush()
    assert tiered.stats().compactions > 0
    assert_same(everything(tiered), everything(memory))
    tiered.close()


def test_a_table_that_was_restored_is_dumped_by_links_again(
    dumped: Rows, config: TableConfig, base: str
) -> None:
    for number in range(3):
        table = TieredTable(config, most_hot_rows=500)
        load(table, base, verify_first=False)
        table.flush()
        base = f"{base}-{number}"
        assert linked(table, base).linked_rows > ROWS * 0.8
        table.close()
    memory = NativeTable(in_memory(config))
    load(memory, base)
    assert_same(everything(memory), dumped)


def test_memory_to_tiered_and_back(config: TableConfig, base: str) -> None:
    memory, tiered = NativeTable(in_memory(config)), TieredTable(config, most_hot_rows=500)
    memory.assign(torch.arange(ROWS), torch.rand(ROWS, 8), event_time=7)
    dump(memory, base)
    assert read_dump_manifest(base).version == 1
    assert load(tiered, base).adopted == 0
    tiered.flush()
    assert linked(tiered, base).linked_rows > 0
    load(again := NativeTable(in_memory(config)), base)
    assert_same(everything(again), everything(memory))
    tiered.close()


@pytest.mark.parametrize("segments", [(Segment(dim=5),), SEGMENTS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_narrow_rows_are_linked_and_taken_over_only_as_such(
    segments: tuple[Segment, ...], dtype: EmbeddingDtype, config: TableConfig, base: str
) -> None:
    config = replace(config, segments=segments)
    narrow = replace(config, embedding_dtype=dtype)
    table = filled(narrow)
    linked(table, base)
    for other, adopts in ((narrow, True), (config, False)):
        tiered = TieredTable(other, most_hot_rows=500)
        assert (load(tiered, base).adopted > 0) == adopts
        assert_same(everything(tiered), everything(table))
        tiered.close()
    linked(filled(config), base)
    assert load(table, base).adopted == 0
    table.close()


def test_fresh_state_other_columns_and_rows_that_decay_have_to_be_read(
    dumped: Rows, config: TableConfig, base: str
) -> None:
    tiered = TieredTable(config, most_hot_rows=500)
    assert load(tiered, base, optimizer_state="reset").adopted == 0
    assert torch.equal(everything(tiered).values, dumped.values)
    assert not torch.equal(everything(tiered).state, dumped.state)
    tiered.close()
    wider = TieredTable(replace(config, segments=(SEGMENTS[0], Segment(dim=6))), most_hot_rows=500)
    assert load(wider, base, refit=True, optimizer_state="reset").adopted == 0
    assert torch.equal(everything(wider).values[:, :8], dumped.values)
    wider.close()
    lazy = replace(
        config,
        segments=(
            Segment(
                dim=2,
                optimizer=DynamicWdAdagrad(weight_decay=0.1, decouple_weight_decay=True, lazy_decay=True),
            ),
        ),
    )
    made = TieredTable(lazy, most_hot_rows=500)
    assert made.cold is None
    made.close()


def test_rows_that_have_expired_are_left_out(config: TableConfig, base: str) -> None:
    table = filled(replace(config, expiry=Expiry(default=timedelta(seconds=100))))
    seen: list[int] = []
    report = linked(table, base, expire_at=5000, written=lambda keys: seen.extend(keys.tolist()))
    table.close()
    # The row of id k is of second k + 1.
    assert (report.rows, report.expired) == (ROWS - 4900, 4900)
    assert sorted(seen) == list(range(4900, ROWS))
    load(memory := NativeTable(in_memory(config)), base)
    assert sorted(everything(memory).ids.tolist()) == sorted(seen)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_share_of_the_ids_is_taken_over_if_it_is_most_of_a_file(
    total: int, dumped: Rows, config: TableConfig, base: str
) -> None:
    tables = [TieredTable(config, most_hot_rows=500) for _ in range(total)]
    reports = [load(table, base, keep=(number, total)) for number, table in enumerate(tables)]
    assert sum(report.rows for report in reports) == ROWS
    assert (sum(report.adopted for report in reports) > 0) == (total < 3)
    found = Rows.concat([everything(table) for table in tables])
    order = torch.from_numpy(mix(found.ids.numpy()).argsort())
    assert_same(found.take(order), dumped)
    for table in tables:
        table.close()


@pytest.mark.usefixtures("dumped")
def test_a_table_with_rows_reads_them(config: TableConfig, base: str) -> None:
    table = TieredTable(config, most_hot_rows=500)
    table.assign(ids(3, ROWS + 1), torch.ones(2, 8))
    assert load(table, base, clear=False).adopted == 0
    assert len(table) == ROWS + 1
    table.close()


@pytest.mark.usefixtures("dumped")
def test_changes_since_a_restore_are_only_those(config: TableConfig, base: str) -> None:
    table = TieredTable(config, most_hot_rows=500)
    table.track_changes()
    load(table, base, verify_first=False)
    snapshot = table.snapshot()
    assert dump_changes(snapshot, f"{base}-all").changed.rows == ROWS  # they are new to this table
    snapshot.close(saved=True)
    table.apply_gradients(ids(5, 6), torch.ones(2, 8), event_time=ROWS)
    table.remove(ids(7))
    read = table.stats().cold_bytes_read
    snapshot = table.snapshot()
    report = dump_changes(snapshot, f"{base}-some")
    snapshot.close(saved=True)
    assert (report.changed.rows, report.removed) == (2, 1)
    assert table.stats().cold_bytes_read == read  # no file has a row that changed
    load(memory := NativeTable(in_memory(config)), base)
    load_changes(memory, f"{base}-some")
    assert_same(everything(memory), everything(table))
    table.close()


@pytest.mark.usefixtures("dumped")
def test_subscribers_are_told_of_adopted_rows(config: TableConfig, base: str) -> None:
    touched = TouchedKeySet(1 << 16)
    table = TieredTable(config, touched=touched, most_hot_rows=500)
    load(table, base)
    assert sorted(touched.steal().tolist()) == list(range(ROWS))
    table.close()


# Streams


def test_the_rows_come_in_the_order_of_their_hashes(
    dumped: Rows, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monolith.table.cold_files._MERGED_ROWS", 1000)
    monkeypatch.setattr("monolith.table.cold_files._MERGED_BYTES", 1)
    assert_same(Rows.concat(list(newest_rows([[DumpStep(base)]]))), dumped)
    bounds = [0, HASHES // 7, HASHES // 3, HASHES // 3 + 5, HASHES]
    parts = [rows for begin, end in pairwise(bounds) for rows in newest_rows([[DumpStep(base)]], begin, end)]
    assert_same(Rows.concat(parts), dumped)
    for links in ([], linked_rows(base)[:1]):
        chunks = list(in_order_of_hashes(links, 0, HASHES))
        assert sum(len(rows) for _, rows in chunks) == sum(link.info.rows for link in links)


def test_one_row_is_found_by_reading_a_few_blocks(dumped: Rows, base: str) -> None:
    for number in (0, 17, ROWS - 1):
        found = find_row(base, int(dumped.ids[number]))
        assert found is not None
        assert_same(found, dumped.slice(number, number + 1))
    assert find_row(base, ROWS) is None


# Where it is written


def test_a_dump_elsewhere_is_a_copy(config: TableConfig, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_filesystem(_source: str, _target: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    table = filled(config)
    remote = f"memory://{secrets.token_hex(4)}/item"
    linked(table, remote)
    monkeypatch.setattr(os, "link", other_filesystem)
    linked(table, base)
    assert all(path.stat().st_nlink == 1 for path in Path(base).parent.iterdir())
    for where in (base, remote):
        other = TieredTable(config, most_hot_rows=500)
        assert load(other, where, verify_first=False).adopted > 0
        assert_same(everything(other), everything(table))
        assert find_row(where, 77) is not None
        other.close()
    table.close()
    assert len(inspect_dump(remote, verify=True)) > 2
    remove_dump(remote)
    assert filesystem.list_files(filesystem.parent(remote)) == []


def test_the_folder_may_be_moved(dumped: Rows, config: TableConfig, base: str) -> None:
    Path(base).parent.rename(Path(base).parent.with_name("moved"))
    moved = base.replace("dumps", "moved")
    load(table := NativeTable(in_memory(config)), moved)
    assert_same(everything(table), dumped)


@pytest.mark.usefixtures("dumped")
def test_links_are_as_readable_as_shards(base: str) -> None:
    assert len({path.stat().st_mode for path in Path(base).parent.iterdir()}) == 1


def test_the_next_dump_removes_the_files_of_the_last(config: TableConfig, base: str) -> None:
    table = filled(config)
    linked(table, base)
    assert len(names(base)) == 4  # the manifest; shards, links and bits of one dump
    before = names(base)
    linked(table, base)
    assert len(names(base)) == 4
    assert len(names(base) & before) == 1
    table.close()
    remove_dump(base)
    assert names(base) == set()


# What goes wrong


def test_every_damaged_block_is_refused_by_name(dumped: Rows, config: TableConfig, base: str) -> None:
    generator = random.Random(1)
    tiered, memory = TieredTable(config, most_hot_rows=500), NativeTable(in_memory(config))
    memory.assign(ids(1), torch.ones(1, 8))
    for path in sorted(Path(base).parent.iterdir()):
        kind = path.name.split(".")[-1].partition("-")[0]
        if kind not in ("cold", "alive"):
            continue
        whole = path.read_bytes()
        for _ in range(3):
            torn = bytearray(whole)
            at = generator.randrange(len(whole))
            torn[at] ^= 1 << generator.randrange(8)
            path.write_bytes(torn)
            with pytest.raises(CorruptFileError) as refused:
                inspect_dump(base, verify=True)
            assert refused.value.path == str(path)
            if kind == "cold" and at > 4096:
                assert refused.value.offset == at // 4096 * 4096
            path.write_bytes(whole)
        for cut in (0, 100, len(whole) - 4096, len(whole) - 1):
            path.write_bytes(whole[: max(cut, 0)])
            with pytest.raises((CorruptFileError, RestoreError), match=path.name):
                load(memory, base)
        path.write_bytes(whole)
    assert len(memory) == 1  # nothing was touched
    load(tiered, base)
    assert_same(everything(tiered), dumped)
    tiered.close()


@pytest.mark.usefixtures("dumped")
def test_a_torn_row_of_a_file_that_was_taken_over_is_refused_when_it_is_read(
    config: TableConfig, base: str
) -> None:
    path = next(path for path in Path(base).parent.iterdir() if ".cold-" in path.name)
    content = bytearray(path.read_bytes())
    content[4096 + 100] ^= 1
    path.write_bytes(content)
    table = TieredTable(config, most_hot_rows=500)
    with pytest.raises(CorruptFileError, match=path.name):
        load(table, base)
    assert len(table) == 0
    load(table, base, verify_first=False)
    with pytest.raises(CorruptFileError, match=f"{path.name}.*4,?096"):
        table.lookup(torch.arange(ROWS))
    table.close()


@pytest.mark.usefixtures("dumped")
def test_files_that_are_missing_or_of_another_dump_are_named(config: TableConfig, base: str) -> None:
    files = sorted(path for path in Path(base).parent.iterdir() if ".cold-" in path.name)
    table = NativeTable(in_memory(config))
    kept = files[0].read_bytes()
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(RestoreError, match=f"{files[0].name} is not the file that was linked"):
        load(table, base)
    files[0].unlink()
    with pytest.raises(RestoreError, match=f"a file of a dump is missing.*{files[0].name}"):
        load(table, base)
    files[0].write_bytes(kept)
    alive = [path.with_name(path.name.replace(".cold-", ".alive-")) for path in files]
    first = alive[0].read_bytes()
    alive[0].unlink()
    with pytest.raises(RestoreError, match=f"missing.*{alive[0].name}"):
        inspect_dump(base)
    alive[0].write_bytes(first)
    assert load(table, base).rows == ROWS


def test_no_file_at_all_is_taken_for_a_cold_file(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "long").write_bytes(b"x" * 8192)
    with pytest.raises(CorruptFileError, match="at least 4096 bytes"):
        ColdFile(str(tmp_path / "short"))
    with pytest.raises(CorruptFileError, match="it begins with"):
        ColdFile(str(tmp_path / "long"))
    with pytest.raises(CorruptFileError, match="it has only 1 bytes"):
        LinkedRows(str(tmp_path / "long"), str(tmp_path / "short"))


def test_a_failed_dump_is_resumed_with_the_same_links(
    config: TableConfig, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in a buffer at the first attempt, and in a file at the second, are not written twice."""
    table = filled(config)
    truth = everything(table)
    table.assign(torch.arange(2000), torch.ones(2000, 8), event_time=torch.arange(2000) + 1)
    truth.values[:] = everything(table).values
    snapshot = table.snapshot()

    def fails(*_: object) -> None:
        raise FilesystemError("no")

    with monkeypatch.context() as broken:
        broken.setattr("monolith.table.dumps._write_manifest", fails)
        with pytest.raises(FilesystemError, match="no"):
            dump_snapshot(snapshot, base, num_shards=2, stamp="now", resume=True)
    assert f".{next(iter(names(base)))[1:17]}.cold" in names(base)
    table.assign(torch.arange(3000), torch.zeros(3000, 8))  # what was buffered is written meanwhile
    table.flush()
    report = dump_snapshot(snapshot, base, num_shards=2, stamp="now", resume=True)
    snapshot.close(saved=True)
    assert (report.skipped, report.rows) == (2, ROWS)
    assert len(names(base)) == 4
    load(memory := NativeTable(in_memory(config)), base)
    assert torch.equal(everything(memory).values, truth.values)
    table.close()


CHILD = """
import os, signal, sys, torch
from monolith.table import Segment, Sgd, TableConfig, TieredTable, dump_snapshot
from monolith.table import dumps
table = TieredTable(
    TableConfig(name="item", segments=(Segment(dim=8, optimizer=Sgd()),), storage="tiered",
                memory_bytes=4 << 20, storage_dir=sys.argv[2]),
    most_hot_rows=100,
)
def save():
    snapshot = table.snapshot()
    dump_snapshot(snapshot, sys.argv[1])
    snapshot.close(saved=True)
table.assign(torch.arange(9000), torch.ones(9000, 8))
table.flush()
save()
table.assign(torch.arange(9000), torch.zeros(9000, 8))
table.flush()
dumps._write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
save()
"""


def test_a_kill_between_links_and_manifest_leaves_the_dump_before(tmp_path: Path, base: str) -> None:
    cold = tmp_path / "cold"
    with warm.Popen(["-c", CHILD, base, str(cold)], stdout=warm.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.stdout.read()
        assert child.wait(60) == -signal.SIGKILL
    assert len(names(base)) == 7
    config = TableConfig(name="item", segments=(Segment(dim=8, optimizer=Sgd()),))
    tiered = TieredTable(
        replace(config, storage="tiered", memory_bytes=4 << 20, storage_dir=str(cold)), most_hot_rows=100
    )
    assert set(cold.iterdir()) == {tiered.folder}  # what the process left is gone
    report = load(tiered, base)
    assert (report.rows, report.adopted > 8000) == (9000, True)
    assert bool((tiered.lookup(torch.arange(9000)) == 1).all())
    linked(tiered, base)
    assert len(names(base)) == 4
    tiered.close()


LOOP = """
import sys, torch
from monolith.table import Segment, Sgd, TableConfig, TieredTable, dump_snapshot
table = TieredTable(
    TableConfig(name="item", segments=(Segment(dim=8, optimizer=Sgd()),), storage="tiered",
                memory_bytes=4 << 20, storage_dir=sys.argv[2]),
    most_hot_rows=100,
)
for value in range(1000):
    table.assign(torch.arange(9000), torch.full((9000, 8), float(value)))
    snapshot = table.snapshot()
    table.assign(torch.arange(0, 9000, 7), torch.full((1286, 8), -1.0))
    dump_snapshot(snapshot, sys.argv[1])
    snapshot.close(saved=True)
    print(value, flush=True)
"""


@pytest.mark.parametrize("pause", [0.0, 0.02, 0.07])
def test_a_kill_at_any_moment_leaves_one_whole_dump(tmp_path: Path, base: str, pause: float) -> None:
    with warm.Popen(["-c", LOOP, base, str(tmp_path / "cold")], stdout=warm.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        done = [0, *map(int, child.stdout.read().split())][-1]
    table = NativeTable(TableConfig(name="item", segments=(Segment(dim=8, optimizer=Sgd()),)))
    assert load(table, base).rows == 9000
    (value,) = table.lookup(torch.arange(9000)).unique().tolist()
    assert done <= value <= done + 1
