"""Checkpoints of tables whose cold rows are in files: they link to these files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.small_runs import USER, SmallRun, rows_of
from checkpoint.small_servers import ServersPart
from contracts.tables import LinkingTieredTable, ids, linking_three_tier_table_classes

from monolith.checkpoint import (
    Checkpointer,
    Saver,
    TablesPart,
    compact,
    compare,
    find_id,
    read_contents,
    reshard,
)
from monolith.errors import SaveError
from monolith.table import Adagrad, NativeTable, Segment, TableConfig, TieredTable
from monolith.table.row_streams import HASHES, DumpStep, newest_rows

KEYS = range(200)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a run, on the filesystem of the cold rows, so that files are linked and not copied."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "run"


def links(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.cold-*-of-*") if path.is_file())


def tiered(folder: Path, kind: Any = LinkingTieredTable, **how: Any) -> SmallRun:
    run = SmallRun(folder, kind=kind, **how)
    run.train(*KEYS)
    run.train(*KEYS[::2], time=2)
    return run


@pytest.mark.parametrize("kind", [NativeTable, LinkingTieredTable])
@pytest.mark.parametrize("full_every", [1, 3])
def test_a_run_comes_back_and_trains_on_to_the_bit(folder: Path, kind: Any, full_every: int) -> None:
    run = tiered(folder, full_every=full_every)
    run.save(1)
    assert len(links(folder)) >= 2
    run.train(1, 2, 300, time=3)
    run.tables["user"].remove(ids(5))
    prefix = run.save(2)
    saved = run.state()
    other = SmallRun(folder.with_name("other"), seed=99, kind=kind, full_every=full_every)
    other.train(7, 8, 9)
    other.checkpointer.restore(prefix)
    assert other.state() == saved
    for one in (run, other):
        for step in range(3, 8):
            one.train(*range(step * 30, step * 30 + 60), time=step)
        again = one.save(9)
        assert one.restored(again)["rows"] == one.state()["rows"]
    assert other.state()["rows"] == run.state()["rows"]


LINKING = [LinkingTieredTable, *linking_three_tier_table_classes()]


@pytest.mark.parametrize("writer", LINKING)
@pytest.mark.parametrize("reader", LINKING)
def test_a_restore_into_such_a_table_links_and_reads_no_row(folder: Path, writer: Any, reader: Any) -> None:
    run = tiered(folder, writer)
    prefix = run.save(1)
    before = {path: path.stat().st_nlink for path in links(folder)}
    assert len(before) >= 2
    other = SmallRun(folder.with_name("other"), kind=reader)
    other.checkpointer.restore(prefix)
    assert {path: path.stat().st_nlink for path in links(folder)} == {
        path: many + 1 for path, many in before.items()
    }
    assert len(other.tables["user"]) == len(KEYS)
    assert other.state()["rows"] == run.state()["rows"]


# What is read and written, by the count that the kernel keeps for the process

MANY = 60_000
ITEM = TableConfig(name="item", segments=(Segment(dim=32, optimizer=Adagrad(), learning_rate=0.1),))


def moved(what: Callable[[], Any]) -> tuple[int, int]:
    """Return how many bytes were read and written meanwhile, by all threads and by Python and C++ alike."""

    def counts() -> tuple[int, int]:
        said = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(said["rchar"]), int(said["wchar"])

    before = counts()
    what()
    after = counts()
    return after[0] - before[0], after[1] - before[1]


@pytest.fixture
def many(folder: Path) -> Iterator[TieredTable]:
    """A table with MANY rows of 272 bytes, all but 500 of them in nine files."""
    table = tiered_table(folder)
    for some in torch.arange(MANY).split(5000):
        table.apply_gradients(some, torch.ones(len(some), 32), event_time=some + 1, step=1)
    table.flush()
    yield table
    table.close()


def tiered_table(folder: Path) -> TieredTable:
    config = replace(ITEM, storage="tiered", memory_bytes=64 << 20, storage_dir=str(folder.parent / "cold"))
    return TieredTable(config, most_hot_rows=500)


def checkpointer_of(table: Any, folder: Path) -> Checkpointer:
    return Checkpointer(Saver(str(folder)), [TablesPart({"item": table})])


needs_counts = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="counts what a process reads by /proc/self/io, as Linux has it"
)


@needs_counts
def test_saving_reads_the_directories_and_a_restore_them_and_no_row(folder: Path, many: TieredTable) -> None:
    size, prefixes = many.stats().cold_bytes, list[str]()
    assert size > MANY * 272
    checkpointer = checkpointer_of(many, folder)
    read, written = moved(lambda: prefixes.append(checkpointer.save(1)))
    assert 0.05 * size < read < 0.1 * size  # 16 of 288 bytes of a row, and what else a checkpoint is
    assert written < 0.03 * size  # the hot rows, and a bit for each of the others
    other = tiered_table(folder)
    read, written = moved(lambda: checkpointer_of(other, folder).restore(prefixes[0]))
    assert read < 0.1 * size
    assert written < 0.03 * size
    assert len(other) == MANY
    other.close()


@needs_counts
def test_what_reads_rows_of_linked_files_reads_each_once(folder: Path, many: TieredTable) -> None:
    size = many.stats().cold_bytes
    prefix = checkpointer_of(many, folder).save(1)
    memory = NativeTable(ITEM)
    assert moved(lambda: checkpointer_of(memory, folder).restore(prefix))[0] < 1.1 * size
    assert len(memory) == MANY
    assert moved(lambda: read_contents(prefix, verify=True))[0] < 1.1 * size
    (manifest,) = folder.rglob("item.manifest")
    dump = [[DumpStep(str(manifest).removesuffix(".manifest"))]]
    for parts in (1, 2):  # as an export reads it, which finds the first row of its part by reading some
        bounds = [HASHES * number // parts for number in range(parts + 1)]
        found: list[int] = []

        def walk(bounds: list[int] = bounds, found: list[int] = found) -> None:
            for begin, end in pairwise(bounds):
                found.extend(len(rows) for rows in newest_rows(dump, begin, end))

        assert moved(walk)[0] < (1.05 if parts == 1 else 1.2) * size
        assert sum(found) == MANY


def test_retention_removes_links(folder: Path) -> None:
    run = tiered(folder, max_to_keep=2)
    for step in range(1, 6):
        run.train(*KEYS[step::5], time=step + 2)
        prefix = run.save(step)
    steps = {path.parent.name for path in links(folder)}
    assert steps == {"model.ckpt-4.assets", "model.ckpt-5.assets"}
    assert {path.name.partition(".")[0] for path in links(folder)} == {"item", "user"}
    alive = {path.name for path in folder.rglob("*.alive-*")}
    assert alive == {path.name.replace(".cold-", ".alive-") for path in links(folder)}
    assert run.restored(prefix) == run.state()


def test_what_is_said_of_a_checkpoint_counts_rows_in_links(folder: Path) -> None:
    run = tiered(folder)
    contents = read_contents(run.save(1), verify=True)
    assert contents.problems == ()
    assert [(one.name, one.rows, one.newest_event_time) for one in contents.tables] == [
        ("item", 150, 2),  # of which the filter admitted as many
        ("user", 200, 2),
    ]
    assert all(one.linked >= 1 for one in contents.tables)
    for path in links(folder):
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
    problems = " ".join(read_contents(contents.prefix, verify=True).problems)
    assert all(name in problems for name in ("item.", "user.", ".cold-00000-of-", "checksum of a block"))


def test_tools_without_the_model_read_links(folder: Path, tmp_path: Path) -> None:
    run = tiered(folder, full_every=2)
    first = run.save(1)
    run.train(1, 300, time=4)
    second = run.save(2)
    for key in (0, 1, 300):
        found = find_id(second, "user", key)
        assert (found.status, found.event_time) == ("found", rows_of(run.tables["user"])[key][0])
    changed = {one.name: one for one in compare(first, second).tables}["user"]
    assert (changed.rows_before, changed.rows_after) == (200, 201)
    resharded = reshard(second, str(tmp_path / "resharded"))
    assert links(tmp_path / "resharded") == []
    assert run.restored(resharded.prefix) == run.state()
    compact(second)
    assert run.restored(second) == run.state()


def test_servers_save_links_and_any_number_of_servers_restores_them(folder: Path) -> None:
    def servers(total: int, kind: Any) -> tuple[list[Any], Checkpointer]:
        tables = [{"user": kind(USER)} for _ in range(total)]
        parts = [TablesPart(each, shard=(k, total)) for k, each in enumerate(tables)]
        return [each["user"] for each in tables], Checkpointer(Saver(str(folder)), [ServersPart(parts)])

    tables, checkpointer = servers(2, LinkingTieredTable)
    truth = NativeTable(USER)
    for k, table in enumerate(tables):
        for one in (table, truth):
            one.assign(
                torch.arange(k, 400, 2), torch.rand(200, 2, generator=torch.Generator().manual_seed(k))
            )
    prefix = checkpointer.save(1)
    assert {path.parent.name for path in links(folder)} == {"ps-0-of-2", "ps-1-of-2"}
    for total in (1, 2, 3):
        for kind in (NativeTable, LinkingTieredTable):
            others, restoring = servers(total, kind)
            restoring.restore(prefix)
            found: dict[int, Any] = {}
            for other in others:
                found |= rows_of(other)
            assert found == rows_of(truth)


def test_ids_of_another_server_in_a_linked_file_are_not_saved(folder: Path) -> None:
    table = LinkingTieredTable(replace(USER, name="item"))
    table.assign(torch.arange(0, 400, 2), torch.ones(200, 2))
    part = TablesPart({"item": table}, shard=(0, 2))
    snapshot = part.snapshot(1)
    entry = snapshot.write(str(folder / "model.ckpt-1"), full=True)
    assert (entry["tables"]["item"]["rows"], entry["slots"]) == (200, {"0": 200})
    snapshot.close(saved=True)
    table.assign(ids(7), torch.ones(1, 2))
    table.assign(torch.arange(0, 400, 2), torch.ones(200, 2))
    snapshot = part.snapshot(2)
    with pytest.raises(SaveError, match="it has ids of other shards, such as 7"):
        snapshot.write(str(folder / "model.ckpt-2"), full=True)
    snapshot.close(saved=False)
