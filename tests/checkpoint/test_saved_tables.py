"""Pieces: where they lie, which holds what, and how the words of all servers become one entry."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import ids

from monolith.checkpoint import RestoreOptions, SavedPart, TablesPart, merge_entries
from monolith.checkpoint.saved_tables import SavedTable, filter_basename, shard_folder
from monolith.errors import SaveError
from monolith.table import NativeTable, Segment, TableConfig

LAYOUT = [[2, "adagrad", 2]]


def full(share: int, shares: int, **how: Any) -> dict[str, Any]:
    table = {"kind": "full", "rows": 10 + share, "bytes": 100, "expired": share, "layout": LAYOUT}
    return {
        "tables": {"item": table | how},
        "filters": ["item"],
        "pieces": 1,
        "piece": [share, shares],
        "slots": {"3": 4, str(10 + share): 1},
    }


def changes(share: int, shares: int, **how: Any) -> dict[str, Any]:
    table = {
        "kind": "changes",
        "rows": 10,
        "changed": 2,
        "bytes": 50,
        "removed": share,
        "cleared": share == 1,
        "layout": LAYOUT,
    }
    return {"tables": {"item": table | how}, "filters": [], "pieces": 1, "piece": [share, shares]}


def test_counts_of_all_rows_are_added_up() -> None:
    assert merge_entries([full(1, 2), full(0, 2)]) == {
        "tables": {"item": {"kind": "full", "rows": 21, "bytes": 200, "expired": 1, "layout": LAYOUT}},
        "filters": ["item"],
        "pieces": 2,
        "slots": {"3": 8, "10": 1, "11": 1},
    }


def test_counts_of_changes_are_summed_and_a_clear_is_kept() -> None:
    (table,) = merge_entries([changes(2, 3), changes(0, 3), changes(1, 3)])["tables"].values()
    assert table == {
        "kind": "changes",
        "rows": 30,
        "changed": 6,
        "bytes": 150,
        "removed": 3,
        "cleared": [False, True, False],
        "layout": LAYOUT,
    }


def test_slots_that_one_server_does_not_know_are_unknown() -> None:
    entries = [full(0, 2), full(1, 2)]
    del entries[1]["slots"]
    assert "slots" not in merge_entries(entries)


def test_what_was_merged_is_left_as_it_was() -> None:
    entries = [full(0, 2), full(1, 2)]
    before = copy.deepcopy(entries)
    merge_entries(entries)
    assert entries == before


def test_one_that_writes_alone_is_one_share() -> None:
    alone = full(0, 1)
    del alone["piece"]
    assert merge_entries([alone])["pieces"] == 1
    assert merge_entries([full(0, 1)]) == merge_entries([alone])


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], "none"),
        ([full(0, 2)], "ps-0-of-2"),
        ([full(0, 2), full(0, 2)], "ps-0-of-2, ps-0-of-2"),
        ([full(0, 3), full(2, 3)], "ps-0-of-3, ps-2-of-3"),
        ([full(0, 2), full(1, 3)], "ps-0-of-2, ps-1-of-3"),
        ([full(0, 1), full(0, 1)], "ps-0-of-1, ps-0-of-1"),
    ],
)
def test_every_shard_must_be_there_once(entries: list[dict[str, Any]], found: str) -> None:
    with pytest.raises(SaveError, match=f"shards {found}: each must be there once"):
        merge_entries(entries)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (full(1, 2) | {"tables": {}}, "the tables of shard 1: none; of shard 0: item"),
        (full(1, 2) | {"filters": []}, "the filters of shard 1: none; of shard 0: item"),
        (full(1, 2, layout=[[4, "sgd", 0]]), "the layout of table 'item' of shard 1"),
        (
            changes(1, 2) | {"filters": ["item"]},
            "the kind of table 'item' of shard 1: changes; of shard 0: full",
        ),
    ],
)
def test_shares_that_are_not_of_one_checkpoint_are_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(SaveError, match=words):
        merge_entries([full(0, 2), other])


def test_one_shard_is_in_the_assets_folder_and_several_in_folders_of_their_own() -> None:
    assert shard_folder("run/model.ckpt-1") == "run/model.ckpt-1.assets"
    assert shard_folder("run/model.ckpt-1", (1, 2)) == "run/model.ckpt-1.assets/ps-1-of-2"
    assert filter_basename("m", "a:b/c", (0, 2)) == "m.assets/ps-0-of-2/hash_filter_a-b-c"


@pytest.mark.parametrize(
    ("share", "saved_shares", "found"),
    [
        ((0, 1), 3, [0, 1, 2]),
        ((1, 3), 3, [1]),
        ((2, 3), 1, [0]),
        ((5, 6), 4, [1, 3]),
        ((1, 2), 6, [1, 3, 5]),
        ((1, 2), 3, [0, 1, 2]),
    ],
)
def test_the_saved_shares_that_are_read_are_all_that_hold_one_of_its_ids(
    share: tuple[int, int], saved_shares: int, found: list[int]
) -> None:
    saved = SavedTable("m", "item", saved_shares, {})
    assert saved.shards_for(share) == found
    number, total = share
    assert found == sorted({key % saved_shares for key in range(number, 100, total)})


@pytest.mark.parametrize("name", ["ps-0-of-2", "item.ps-0-of-2", "item-00000-of-00001"])
def test_names_of_tables_that_look_like_shares_are_no_trouble(tmp_path: Path, name: str) -> None:
    """Both tables in one checkpoint, of two servers and of one."""
    for shares in (1, 2):
        prefix = str(tmp_path / f"model.ckpt-{shares}")
        entries = []
        for share in range(shares):
            tables = {each: new_table(each) for each in ("item", name)}
            for value, table in enumerate(tables.values()):
                table.assign(ids(share), torch.full((1, 2), float(value)))
            entries.append(TablesPart(tables, shard=(share, shares)).snapshot(1).write(prefix, full=True))
        tables = {each: new_table(each) for each in ("item", name)}
        TablesPart(tables).restore([SavedPart(prefix, merge_entries(entries))], RestoreOptions())
        for value, table in enumerate(tables.values()):
            assert table.lookup(torch.arange(shares)).tolist() == [[value] * 2] * shares


def new_table(name: str) -> NativeTable:
    return NativeTable(TableConfig(name=name, segments=(Segment(dim=2),)))
