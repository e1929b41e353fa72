"""Tables of several servers in one checkpoint: whoever wrote it, whoever reads it, the rows are the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from checkpoint.small_runs import USER, SmallRun, flip, rows_of
from checkpoint.small_servers import Servers, chain, local, restored, server_of
from contracts.tables import EmulatedCudaTable, ids, table_classes
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith import filesystem
from monolith.checkpoint import (
    Checkpointer,
    Manifest,
    Saver,
    TablesPart,
    compare,
    merge_entries,
    read_chain,
    reshard,
)
from monolith.checkpoint.folder.manifest import read_manifest, write_manifest
from monolith.checkpoint.part import RestoreOptions, SavedPart
from monolith.errors import ConfigError, CorruptFileError, RestoreError, SaveError
from monolith.feature import make_fid
from monolith.table import (
    Adagrad,
    DictTable,
    Expiry,
    NativeTable,
    OneBit,
    ProbabilisticFilter,
    Segment,
    SlidingFilter,
    SlotThresholds,
    TableConfig,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


# Any table


@pytest.mark.parametrize("kind", table_classes())
def test_a_save_writes_all_rows_and_counts_by_slot_those_it_wrote(folder: Path, kind: Any) -> None:
    """Whether rows have expired is for who evicts them to say: saving takes none."""
    table = kind(TableConfig(name="item", segments=(Segment(dim=2),), expiry=Expiry.days(1)))
    table.assign(ids(1, 2, 1 << 48), torch.ones(3, 2), event_time=ids(0, 0, 100 * 86_400))
    cut = TablesPart({"item": table}).snapshot(1)
    entry = cut.write(str(folder / "model.ckpt-1"), full=True)
    cut.close(saved=True)
    assert (entry["tables"]["item"]["rows"], entry["slots"]) == (3, {"0": 2, "1": 1})


@pytest.mark.parametrize("made, other", [(EmulatedCudaTable, NativeTable), (NativeTable, EmulatedCudaTable)])
def test_checkpoints_move_between_tables_of_host_and_device(folder: Path, made: Any, other: Any) -> None:
    """A full one and an increment, written from either and read into the other, are the same rows."""
    config = TableConfig(name="item", segments=(Segment(dim=3, optimizer=Adagrad(), learning_rate=0.5),))
    table, restored_table = made(config), other(config)
    part = TablesPart({"item": table}, incremental=True)

    def train(first: int, last: int, time: int) -> None:
        keys = torch.arange(first, last)
        table.apply_gradients(keys, torch.ones(len(keys), 3), event_time=time)

    def write(step: int) -> SavedPart:
        cut = part.snapshot(step)
        train(0, 500, 99)  # which the checkpoint knows nothing of
        prefix = str(folder / f"model.ckpt-{step}")
        entry = cut.write(prefix, full=step == 1)
        cut.close(saved=True)
        return SavedPart(prefix, entry)

    train(-100, 200, 1)
    saved = [write(1)]
    table.remove(torch.arange(-100, 0))
    train(400, 700, 100)
    expected = rows_of(table)
    saved.append(write(2))
    TablesPart({"item": restored_table}).restore(saved, RestoreOptions())
    assert rows_of(restored_table) == expected


# Any number of servers


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_any_number_of_servers_restores_what_any_number_saved(
    folder: Path, writers: int, readers: int
) -> None:
    _, prefixes, contents = chain(folder, *[writers] * 4)
    assert [link.manifest.kind for link in read_chain(prefixes[-1])] == ["full"] + ["incremental"] * 3
    assert restored(prefixes[-1], readers) == contents[-1]


@pytest.mark.parametrize("layouts", [(1, 2, 2, 1), (2, 3, 1, 2), (3, 3, 2, 5)])
def test_a_chain_may_be_of_servers_that_changed_in_number(folder: Path, layouts: tuple[int, ...]) -> None:
    """Rows that one server saved are removed, changed and cleared by whichever has them next."""
    _, prefixes, contents = chain(folder, *layouts)
    assert [link.manifest.parts["tables"]["pieces"] for link in read_chain(prefixes[-1])] == list(layouts)
    for prefix, content in zip(prefixes, contents, strict=True):
        for readers in (2, 3):
            assert restored(prefix, readers) == content


def test_a_table_that_one_server_cleared_keeps_the_rows_of_other_servers(folder: Path) -> None:
    run = Servers(folder, 2)
    run.train(1, 2, 3, 4)
    run.save(1)
    run.clear("user", 1)
    run.train(5)
    prefix = run.save(2)
    for readers in (1, 2, 3):
        found = restored(prefix, readers)
        assert set(found["user"]) == {2, 4, 5}
        assert set(found["item"]) == {1, 2, 3, 4, 5}
    assert read_manifest(prefix).manifest.parts["tables"]["tables"]["user"]["cleared"] == [False, True]


def test_a_table_that_all_servers_cleared_is_cleared(folder: Path) -> None:
    run = Servers(folder, 2)
    run.train(1, 2, 3, 4)
    run.save(1)
    for server in (0, 1):
        run.clear("user", server)
    run.train(4)
    prefix = run.save(2)
    for readers in (1, 2, 3):
        assert set(restored(prefix, readers)["user"]) == {4}


KEYS = st.sampled_from([0, 1, 2, 3, 4, 5, -1, -2, -7, 1 << 48, (3 << 48) + 5, -(1 << 63), (1 << 63) - 1])
CHANGES = st.tuples(st.lists(KEYS, max_size=6), st.lists(KEYS, max_size=4), st.integers(0, 7))


@given(
    layouts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    changes=st.lists(CHANGES, min_size=4, max_size=4),
    readers=st.integers(1, 5),
)
@settings(max_examples=tries(8), deadline=None)
def test_any_history_of_changes_is_restored_by_any_number_of_servers(
    layouts: Sequence[int], changes: Sequence[tuple[list[int], list[int], int]], readers: int
) -> None:
    with TemporaryDirectory() as where:
        folder = Path(where) / "run"
        run = Servers(folder, layouts[0])
        prefix = ""
        for step, (servers, (trained, removed, cleared)) in enumerate(zip(layouts, changes, strict=False), 1):
            if servers != run.count:
                run = Servers(folder, servers)
                run.restore(prefix)
            if cleared < servers:
                run.clear("item", cleared)
            run.train(*trained, time=step)
            run.remove("item", *removed)
            prefix = run.save(step)
        assert len(read_chain(prefix)) == len(layouts)
        assert restored(prefix, readers) == run.content()
        whole = reshard(prefix, str(Path(where) / "whole")).prefix
        assert compare(prefix, whole).same
        assert restored(whole, readers) == run.content()


def test_checkpoints_that_say_nothing_of_shares_are_in_one(folder: Path) -> None:
    run, prefixes, contents = chain(folder, 1, 1, 1, 1)
    for prefix in prefixes:
        link = read_manifest(prefix)
        tables = dict(link.manifest.parts["tables"])
        assert tables.pop("pieces") == 1
        for entry in tables["tables"].values():
            if entry["kind"] == "changes":
                (entry["cleared"],) = entry["cleared"]  # it was one value for all
        body = json.loads(Path(f"{prefix}.manifest").read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0])
        manifest = Manifest(**(body | {"parts": {"tables": tables}}))
        if link.manifest.after is not None:
            before = filesystem.join(filesystem.parent(prefix), link.manifest.after)
            manifest = Manifest(
                **(body | {"parts": {"tables": tables}, "after_crc": read_manifest(before).crc})
            )
        write_manifest(prefix, manifest)
    for prefix, content in zip(prefixes, contents, strict=True):
        for readers in (1, 3):
            assert restored(prefix, readers) == content
    assert run.count == 1


def test_one_writer_leaves_files_where_they_always_were(folder: Path) -> None:
    prefix = local(folder).save(1)
    assert (Path(f"{prefix}.assets") / "item.manifest").exists()
    assert "piece" not in read_manifest(prefix).manifest.parts["tables"]


def test_each_server_writes_into_a_folder_of_its_own(folder: Path) -> None:
    prefix = chain(folder, 2, 2, 2, 2, filters=True)[1][3]
    assert sorted(path.name for path in Path(f"{prefix}.assets").iterdir()) == ["ps-0-of-2", "ps-1-of-2"]
    for share in Path(f"{prefix}.assets").iterdir():
        names = {path.name for path in share.iterdir()}
        assert {"item.manifest", "item.removed.manifest", "user.manifest"} <= names
        assert any(name.startswith("hash_filter_item-") for name in names)


@pytest.mark.parametrize("kind", [DictTable, NativeTable])
def test_any_kind_of_table_takes_several_shares(folder: Path, kind: Any) -> None:
    _, prefixes, contents = chain(folder, 2, 2, 2, 2)
    table = kind(USER)
    part = TablesPart({"user": table})
    part.restore(saved_parts(prefixes[-1]), RestoreOptions())
    assert rows_of(table) == contents[-1]["user"]


# Which shares are read


@pytest.mark.parametrize(
    ("share", "writers", "read"),
    [((1, 2), 2, {1}), ((3, 4), 2, {1}), ((1, 2), 4, {1, 3}), ((0, 3), 2, {0, 1}), ((0, 1), 2, {0, 1})],
)
def test_only_shares_that_may_hold_rows_of_the_share_are_read(
    folder: Path, share: tuple[int, int], writers: int, read: set[int]
) -> None:
    _, prefixes, contents = chain(folder, *[writers] * 4)
    for prefix in prefixes:
        for other in set(range(writers)) - read:
            shutil.rmtree(f"{prefix}.assets/ps-{other}-of-{writers}")
    table = NativeTable(USER)
    TablesPart({"user": table}, shard=share).restore(saved_parts(prefixes[-1]), RestoreOptions())
    number, total = share
    expected = {key: row for key, row in contents[-1]["user"].items() if server_of(key, total) == number}
    assert rows_of(table) == expected
    for needed in read:
        shutil.move(f"{prefixes[0]}.assets/ps-{needed}-of-{writers}", folder / "aside")
        with pytest.raises(RestoreError, match=f"shard ps-{needed}-of-{writers} of model.ckpt-1"):
            TablesPart({"user": table}, shard=share).restore(saved_parts(prefixes[-1]), RestoreOptions())
        shutil.move(folder / "aside", f"{prefixes[0]}.assets/ps-{needed}-of-{writers}")
    assert rows_of(table) == expected


# Damage


def saved_parts(prefix: str) -> list[SavedPart]:
    return [SavedPart(link.prefix, link.manifest.parts["tables"]) for link in read_chain(prefix)]


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("damage", ["flipped", "torn", "gone"])
def test_a_damaged_file_of_any_share_is_named_and_nothing_is_touched(
    folder: Path, tmp_path: Path, damage: str, readers: int
) -> None:
    _, prefixes, contents = chain(folder, 2, 2, 2, 2, filters=True)
    run = Servers(tmp_path / "other", readers, filters=True)
    for _ in range(3):
        run.train(1, 2, 3, 1000)
    run.train(*APART)
    before, counted = run.content(), counts(*run.filters)
    files = [
        path
        for prefix in (prefixes[0], prefixes[2])
        for pattern in ("item.*-00001-of-00002", "user.manifest", "user.removed.*-of-*", "user.*-00000-of-*")
        for path in Path(f"{prefix}.assets/ps-1-of-2").glob(pattern)
    ]
    files += Path(f"{prefixes[-1]}.assets/ps-1-of-2").glob("hash_filter_item-00001-*")
    assert len(files) > 6
    for path in files:
        if readers != 2 and "filter" in path.name:
            continue  # it begins anew, whatever is in the file
        good = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "torn":
            path.write_bytes(good[: len(good) // 2])
        else:
            flip(path)
        name = path.name.split("-0000")[0] if damage == "gone" else path.name
        with pytest.raises((RestoreError, CorruptFileError), match=f"ps-1-of-2.*{name}"):
            run.parts[-1].restore(saved_parts(prefixes[-1]), RestoreOptions())
        path.write_bytes(good)
        assert run.content() == before
        assert counts(*run.filters) == counted
    run.restore(prefixes[-1])
    assert run.content() == contents[-1]


def test_an_empty_table_is_left_empty_if_a_share_is_damaged(folder: Path) -> None:
    _, prefixes, _ = chain(folder, 2, 2, 2, 2)
    flip(next(Path(f"{prefixes[0]}.assets/ps-1-of-2").glob("user.*-00000-of-*")))
    table = NativeTable(USER)
    with pytest.raises(CorruptFileError, match="ps-1-of-2/user"):
        TablesPart({"user": table}).restore(saved_parts(prefixes[-1]), RestoreOptions())
    assert len(table) == 0


def test_shares_in_each_others_place_are_refused(folder: Path) -> None:
    run = Servers(folder, 2)
    run.train(1, 2, 3, 4)
    prefix = run.save(1)
    places = [Path(f"{prefix}.assets/ps-{share}-of-2") for share in (0, 1)]
    places[0].rename(folder / "aside")
    places[1].rename(places[0])
    (folder / "aside").rename(places[1])
    for readers in (1, 2):
        with pytest.raises(
            RestoreError, match=r"2 rows in shard ps-0-of-2 of model\.ckpt-1 have ids of other"
        ):
            restored(prefix, readers)


def test_a_share_of_another_save_is_refused(folder: Path, tmp_path: Path) -> None:
    prefixes = []
    for where, keys in ((folder, (1, 2, 3)), (tmp_path / "other", (1, 2, 3, 5))):
        run = Servers(where, 2)
        run.train(*keys)
        prefixes.append(run.save(1))
    shutil.rmtree(f"{prefixes[0]}.assets/ps-1-of-2")
    shutil.copytree(f"{prefixes[1]}.assets/ps-1-of-2", f"{prefixes[0]}.assets/ps-1-of-2")
    with pytest.raises(RestoreError, match=r"4 rows in shard ps-0-of-2 of model\.ckpt-1 to 1, .* with 3"):
        restored(prefixes[0], 1)


def test_a_table_without_room_for_all_shares_is_left_empty(folder: Path) -> None:
    run = Servers(folder, 2)
    run.train(*range(20_000))
    prefix = run.save(1)
    config = TableConfig(name="user", segments=USER.segments, capacity_bytes=400_000)
    table = NativeTable(config)
    with pytest.raises(RestoreError, match="do not fit into"):
        TablesPart({"user": table}).restore(saved_parts(prefix), RestoreOptions())
    assert len(table) == 0


# What a share is


@pytest.mark.parametrize("share", [(2, 2), (-1, 2), (0, 0)])
def test_a_share_that_cannot_be_is_refused(share: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"k from 0 to n - 1"):
        TablesPart({}, shard=share)


@pytest.mark.parametrize("full", [True, False])
def test_rows_that_a_restore_would_not_find_are_not_saved(folder: Path, full: bool) -> None:
    table = NativeTable(USER)
    part = TablesPart({"user": table}, shard=(1, 2), incremental=True)
    table.assign(ids(1, -3, 6), torch.ones(3, 2))
    with pytest.raises(SaveError, match=r"'user' as shard 1 of 2: .* such as 6\."):
        part.snapshot(1).write(str(folder / "model.ckpt-1"), full=full)


def test_the_steepest_scale_of_all_shares_is_taken(folder: Path, tmp_path: Path) -> None:
    config = TableConfig(name="user", segments=(Segment(dim=2, compressor=OneBit(step_size=1)),))
    run = Servers(folder, 2)
    for tables in run.tables:
        tables["user"] = NativeTable(config)
    run.parts[:] = [TablesPart({"user": tables["user"]}, shard=(k, 2)) for k, tables in enumerate(run.tables)]
    run.tables[0]["user"].apply_gradients(ids(2), torch.ones(1, 2), step=400)
    run.tables[1]["user"].apply_gradients(ids(1), torch.ones(1, 2), step=100)
    prefix = run.save(1)
    for source in (prefix, reshard(prefix, str(tmp_path / "to")).prefix):
        table = NativeTable(config)
        TablesPart({"user": table}).restore(saved_parts(source), RestoreOptions())
        assert table.scales == run.tables[0]["user"].scales > run.tables[1]["user"].scales


# Filters


APART = [number * 131_075 for number in range(30)]
"""Ids that share no cell of a filter, of all servers."""


def counts(*filters: SlidingFilter) -> list[list[int]]:
    return [one.get(ids(*APART)).tolist() for one in filters]


def seen(folder: Path, servers: int) -> tuple[Servers, str]:
    """Save servers that saw half of the ids once, the others twice, so that all wait still."""
    run = Servers(folder, servers, filters=True)
    run.train(*APART)
    run.train(*APART[:15], time=2)
    assert run.content()["item"] == {}
    return run, run.save(1)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (1, 3), (2, 4)])
def test_counts_go_to_servers_whose_shard_is_within_one_saved_shard(
    folder: Path, tmp_path: Path, writers: int, readers: int
) -> None:
    run, prefix = seen(folder, writers)
    others = Servers(tmp_path / "other", readers, filters=True)
    report = others.restore(prefix)
    assert report.complete
    for k in range(readers):
        assert counts(others.filters[k]) == counts(run.filters[k % writers])
    others.train(APART[3], APART[20], time=3)
    assert set(others.content()["item"]) == {APART[3]}


@pytest.mark.parametrize(
    ("writers", "readers", "whom"), [(2, 1, "one process"), (2, 3, "3 servers"), (4, 2, "2 servers")]
)
def test_counts_that_cannot_be_merged_are_reset_and_the_report_says_so(
    folder: Path, tmp_path: Path, writers: int, readers: int, whom: str
) -> None:
    _, prefix = seen(folder, writers)
    others = Servers(tmp_path / "other", readers, filters=True)
    others.train(*APART)  # what was counted before the restore is of another history
    report = others.restore(prefix)
    why = f"starts counting from zero, because the counts of {writers} servers cannot be merged for {whom}"
    assert report.reset == {"filter of item": why}
    assert "filter of item: starts counting from zero" in report.describe()
    assert set(map(sum, counts(*others.filters))) == {0}
    others.train(APART[3], time=3)
    assert others.content()["item"] == {}
    assert len(read_chain(others.save(2))) == 1


def test_a_filter_of_another_size_is_reset_if_the_servers_changed(folder: Path, tmp_path: Path) -> None:
    _, prefix = seen(folder, 1)
    smaller = Servers(tmp_path / "other", 2, filters=True, capacity=500)
    why = "starts counting from zero, because it was saved with another capacity or split_num"
    assert smaller.restore(prefix).reset == {"filter of item": why}
    with pytest.raises(RestoreError, match="Restore with the capacity and split_num"):
        Servers(tmp_path / "alone", 1, filters=True, capacity=500).restore(prefix)


def test_a_filter_that_remembers_no_ids_is_restored_from_any_shard(folder: Path) -> None:
    entries = []
    prefix = str(folder / "model.ckpt-1")
    for k in (0, 1):
        admission = ProbabilisticFilter(SlotThresholds(3))
        admission.refuse(ids(*range(k + 5)))
        part = TablesPart({"user": NativeTable(USER)}, {"user": admission}, shard=(k, 2))
        entries.append(part.snapshot(1).write(prefix, full=True))
    chances = ProbabilisticFilter(SlotThresholds(3))
    part = TablesPart({"user": NativeTable(USER)}, {"user": chances})
    assert part.restore([SavedPart(prefix, merge_entries(entries))], RestoreOptions()).complete
    assert chances.core.draws == 5


# One process


def test_a_run_in_one_process_restores_what_servers_saved(folder: Path, tmp_path: Path) -> None:
    _, prefixes, contents = chain(folder, 3, 3, 3, 3)
    run = SmallRun(tmp_path / "local")
    part = TablesPart(run.tables)
    Checkpointer(Saver(str(tmp_path / "local")), [part]).restore(prefixes[-1])
    assert {name: rows_of(table) for name, table in run.tables.items()} == contents[-1]


# Tables that were merged, and tables apart


def slots_apart() -> dict[str, NativeTable]:
    return {name: NativeTable(replace(USER, name=name)) for name in ("a", "b", "c")}


def slots_together() -> dict[str, NativeTable]:
    merged = replace(USER, name="ab", merged=(("a", 1), ("b", 2)))
    return {"ab": NativeTable(merged), "c": NativeTable(replace(USER, name="c"))}


def train_slots(tables: dict[str, NativeTable], signature: int) -> None:
    """Take a step on one id of each slot: its number is in the high bits."""
    for slot, name in enumerate(("a", "b", "c"), 1):
        table = tables.get(name, tables.get("ab"))
        assert table is not None
        key = torch.tensor([make_fid(slot, signature)])
        table.apply_gradients(key, torch.full((1, 2), float(slot)), event_time=signature)


def all_rows(tables: dict[str, NativeTable]) -> dict[int, Any]:
    return {key: row for table in tables.values() for key, row in rows_of(table).items()}


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize(("made", "other"), [(slots_apart, slots_together), (slots_together, slots_apart)])
def test_a_checkpoint_restores_whether_slots_are_merged_or_not(
    folder: Path, made: Any, other: Any, readers: int
) -> None:
    tables = made()
    saver = Checkpointer(Saver(str(folder)), [TablesPart(tables, incremental=True)], full_every=3)
    train_slots(tables, 1)
    saver.save(1)
    train_slots(tables, 2)
    tables["c"].clear()
    if "a" in tables:
        tables["a"].clear()
    train_slots(tables, 3)
    prefix = saver.save(2)  # an increment
    found: dict[int, Any] = {}
    for number in range(readers):
        again = other()
        restored = Checkpointer(Saver(str(folder)), [TablesPart(again, shard=(number, readers))]).restore(
            prefix
        )
        assert restored.report.complete
        found |= all_rows(again)
    assert found == all_rows(tables)


def test_a_run_that_merges_its_slots_differently_begins_a_new_chain(folder: Path) -> None:
    tables = slots_apart()
    saver = Checkpointer(Saver(str(folder)), [TablesPart(tables, incremental=True)], full_every=5)
    train_slots(tables, 1)
    prefix = saver.save(1)
    again = slots_together()
    saver = Checkpointer(Saver(str(folder)), [TablesPart(again, incremental=True)], full_every=5)
    saver.restore(prefix)
    train_slots(again, 2)
    assert len(read_chain(saver.save(2))) == 1


def test_a_slot_that_a_checkpoint_lacks_is_missing(folder: Path) -> None:
    tables = slots_apart()
    del tables["b"]
    prefix = Checkpointer(Saver(str(folder)), [TablesPart(tables)]).save(1)
    with pytest.raises(RestoreError, match=r"cannot restore table 'b': .* it has a, c"):
        Checkpointer(Saver(str(folder)), [TablesPart(slots_together())]).restore(prefix)


def test_rows_whose_ids_are_of_another_slot_are_not_merged(folder: Path) -> None:
    tables = slots_apart()
    tables["a"].apply_gradients(ids(7), torch.ones(1, 2))
    prefix = Checkpointer(Saver(str(folder)), [TablesPart(tables)]).save(1)
    with pytest.raises(RestoreError, match=r"it is of slot 1, and has ids of other slots, such as 7\."):
        Checkpointer(Saver(str(folder)), [TablesPart(slots_together())]).restore(prefix)
