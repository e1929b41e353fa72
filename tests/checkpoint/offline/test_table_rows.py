"""The rows of a chain in any shares: each once, in the order of their hashes, as a restore finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.small_servers import Servers, chain

from monolith.checkpoint import read_chain
from monolith.checkpoint.offline.reading import SavedTables
from monolith.checkpoint.saved_tables import SavedHistory, describe_table, dumps_of
from monolith.errors import RestoreError
from monolith.table import Rows
from monolith.table.hashing import mix
from monolith.table.row_streams import newest_rows, shard_range, side_by_side


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def history(prefix: str, table: str) -> SavedHistory:
    return SavedTables(read_chain(prefix)).history(table)


def content(parts: list[Rows]) -> dict[int, tuple[Any, ...]]:
    found = {}
    for rows in parts:
        for at, key in enumerate(rows.ids.tolist()):
            assert key not in found
            state = rows.state[at].view(torch.int32).tolist()
            found[key] = (int(rows.event_times[at]), rows.values[at].tolist(), state)
    return found


@pytest.mark.parametrize("layouts", [(1, 1, 1, 1), (2, 2, 2, 2), (3, 1, 2, 2), (1, 3, 3, 2)])
def test_they_are_what_a_restore_finds(folder: Path, layouts: tuple[int, ...]) -> None:
    _, prefixes, contents = chain(folder, *layouts)
    for prefix, saved in zip(prefixes, contents, strict=True):
        for table in ("item", "user"):
            parts = list(newest_rows(dumps_of(history(prefix, table))))
            assert content(parts) == saved[table]
            hashes = np.concatenate([mix(rows.ids.numpy()) for rows in parts])
            assert bool((hashes[1:] > hashes[:-1]).all())


def test_a_range_of_hashes_holds_its_part(folder: Path) -> None:
    _, prefixes, contents = chain(folder, 2, 2, 2, 2)
    saved = history(prefixes[-1], "item")
    parts = [list(newest_rows(dumps_of(saved), *shard_range(shard, 5))) for shard in range(5)]
    assert all(parts)
    assert content([rows for part in parts for rows in part]) == contents[-1]["item"]


def test_two_chains_side_by_side_whatever_their_shares(folder: Path, tmp_path: Path) -> None:
    histories = []
    for where, servers, keys in ((folder, 3, (1, 2, 3, 4)), (tmp_path / "b", 2, (2, 3, 4, 5, 6))):
        run = Servers(where, servers)
        run.train(*keys)
        histories.append(dumps_of(history(run.save(1), "user")))
    found = list(side_by_side(*histories))
    assert sum(one.only_before for one in found) == 1
    assert sum(one.only_after for one in found) == 2
    assert all(torch.equal(one.before.ids, one.after.ids) for one in found)
    assert sorted(key for one in found for key in one.before.ids.tolist()) == [2, 3, 4]


def test_shares_of_two_models_are_refused(folder: Path) -> None:
    prefix = Servers(folder, 2).save(1)
    share = Path(f"{prefix}.assets/ps-1-of-2")
    for path in list(share.glob("user.*")):
        path.unlink()
    for path in list(share.glob("item.*")):
        path.rename(share / path.name.replace("item", "user"))
    with pytest.raises(RestoreError, match=r"shard ps-1-of-2 of model\.ckpt-1 has 3 values"):
        describe_table(history(prefix, "user"))
