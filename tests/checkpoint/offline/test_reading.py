"""Looking into a checkpoint without its model: contents, one id's row, and damage by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint import small_servers
from checkpoint.small_runs import SmallRun, chain, flip
from contracts.tables import ids

from monolith.checkpoint.folder.manifest import read_chain
from monolith.checkpoint.offline.reading import find_checkpoint, find_id, read_contents, readable
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, RestoreError, UnknownTableError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


# Which one is meant


def test_a_run_means_its_latest_checkpoint(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    assert find_checkpoint(str(folder)) == prefixes[-1]
    assert find_checkpoint(prefixes[1]) == prefixes[1]
    assert find_checkpoint(prefixes[1] + ".manifest") == prefixes[1]


def test_a_path_may_be_relative(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = SmallRun(folder).save(1)
    monkeypatch.chdir(folder)
    assert find_checkpoint("model.ckpt-1") == prefix
    assert find_checkpoint(".").endswith("model.ckpt-1")


def test_what_is_not_there_is_told_with_what_is(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="no run and no checkpoint"):
        find_checkpoint(str(folder))
    SmallRun(folder).save(1)
    with pytest.raises(FileMissingError, match=r"there are: model\.ckpt-1"):
        find_checkpoint(str(folder / "model.ckpt-2"))
    (folder / "checkpoint").unlink()
    with pytest.raises(FileMissingError, match=r"no file `checkpoint`.*there are: model\.ckpt-1"):
        find_checkpoint(str(folder))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileMissingError, match="no file `checkpoint`"):
        find_checkpoint(str(tmp_path / "empty"))


def test_a_latest_that_was_deleted_is_told(folder: Path) -> None:
    prefix = SmallRun(folder).save(1)
    Path(f"{prefix}.manifest").unlink()
    with pytest.raises(FileMissingError, match="which is not there"):
        find_checkpoint(str(folder))


# Contents


def test_a_full_checkpoint_says_what_it_holds(folder: Path) -> None:
    run, prefixes, states = chain(folder)
    found = read_contents(prefixes[0], verify=True)
    assert found.problems == ()
    assert (found.step, found.kind, found.chain) == (1, "full", (prefixes[0],))
    item, user = found.tables
    assert (item.name, item.kind, item.rows) == ("item", "full", len(states[0]["rows"]["item"]))
    assert item.layout == "3 values + 5 state (1 x dynamic_wd_adagrad, 2 x adagrad)"
    assert user.newest_event_time == 2
    assert [(v.name, v.dtype, v.shape) for v in found.variables] == [
        ("bias", "float32", (1,)),
        ("weight", "float32", (1, 2)),
    ]
    assert found.training_tensors > 0
    assert found.states == {"position": {"next": 100}}
    (one,) = found.filters
    assert (one.table, one.kind) == ("item", "sliding")
    assert 40 < (one.cells or 0) <= len(run.filter)


def test_an_increment_says_what_it_continues_and_what_it_holds_itself(folder: Path) -> None:
    _, prefixes, states = chain(folder)
    found = read_contents(prefixes[2], verify=True)
    assert found.problems == ()
    assert found.chain == tuple(prefixes[:3])
    item, user = found.tables
    assert (item.kind, item.rows, item.removed, item.cleared) == (
        "changes",
        len(states[2]["rows"]["item"]),
        0,
        False,
    )
    assert (user.rows, user.changed, user.cleared) == (2, 2, True)


def test_every_file_that_is_damaged_is_named(folder: Path) -> None:
    """A flipped bit in any file of the chain is found by reading all, and nothing is raised."""
    _, prefixes, _ = chain(folder)
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and ("model.ckpt-" in str(path))
        and not path.name.endswith("ckpt-4.manifest")
        and "filter" not in path.name
    ]
    assert len(files) > 25
    for path in files:
        good = path.read_bytes()
        flip(path)
        problems = read_contents(prefixes[-1], verify=True).problems
        assert any(path.name in problem for problem in problems), path
        path.write_bytes(good)
    assert read_contents(prefixes[-1], verify=True).problems == ()


def test_a_filter_that_is_damaged_is_named(folder: Path) -> None:
    prefix = chain(folder)[1][0]
    path = next(Path(f"{prefix}.assets").glob("hash_filter_item-*"))
    flip(path)
    (problem,) = read_contents(prefix, verify=True).problems
    assert path.name in problem


def test_several_faults_are_all_told(folder: Path) -> None:
    prefix = chain(folder)[1][0]
    paths = [next(Path(f"{prefix}.assets").glob(f"{name}.*-of-*")) for name in ("item", "user")]
    flip(paths[0], at=0)
    paths[1].unlink()
    flip(Path(f"{prefix}.dense-00000-of-00001.safetensors"), at=0)
    assert len(read_contents(prefix).problems) == 3


def test_a_missing_link_is_told_and_the_rest_shown(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    Path(f"{prefixes[1]}.manifest").unlink()
    found = read_contents(prefixes[3])
    assert len(found.tables) == 2
    (problem,) = found.problems
    assert "model.ckpt-2, which is not there" in problem


def test_a_damaged_manifest_leaves_nothing_to_tell(folder: Path) -> None:
    prefix = SmallRun(folder).save(1)
    flip(Path(f"{prefix}.manifest"))
    with pytest.raises(CorruptFileError, match=r"model\.ckpt-1\.manifest"):
        read_contents(prefix)


def test_values_are_made_readable() -> None:
    saved = {"a": {"$tuple": [1, {"$float": "inf"}]}, "b": {"$dict": [[3, {"$tensor": "t"}]]}}
    assert readable(saved) == {"a": [1, "inf"], "b": {"3": "<tensor t>"}}


# One row


def test_a_row_is_found_where_it_was_last_written(folder: Path) -> None:
    run, prefixes, states = chain(folder)
    for key, number in ((-20, 0), (3, 1), (40, 1), (8, 2), (7, 3)):
        found = find_id(prefixes[-1], "item", key)
        if key == 40:  # its one sighting was not enough
            assert found.status == "absent"
            continue
        assert (found.status, found.prefix) == ("found", prefixes[number])
        time, values, state = states[-1]["rows"]["item"][key]
        assert found.event_time == time
        assert [*found.segments[0].values, *found.segments[1].values] == values
        assert len(state) == 5
    assert (
        run.tables["item"].lookup(ids(7)).tolist()[0][0]
        == find_id(prefixes[-1], "item", 7).segments[0].values[0]
    )


def test_optimizer_state_has_names_and_counters_are_numbers(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    first, second = find_id(prefixes[-1], "item", 9).segments
    assert (first.optimizer, second.optimizer) == ("dynamic_wd_adagrad", "adagrad")
    assert list(first.state) == ["norm", "last_step"]
    assert isinstance(first.state["last_step"], int)
    assert list(second.state) == ["norm"]
    assert len(second.state["norm"]) == 2  # type: ignore[arg-type]


def test_an_earlier_checkpoint_of_a_chain_shows_the_row_of_its_time(folder: Path) -> None:
    _, prefixes, states = chain(folder)
    for prefix, state in zip(prefixes, states, strict=True):
        for key in (-9, -8, 0, 7, 8, 40, 41):
            for table in ("item", "user"):
                found = find_id(prefix, table, key)
                assert (found.status == "found") == (key in state["rows"][table])


def test_a_row_that_went_is_told_with_where_it_went(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    assert find_id(prefixes[-1], "item", -8).status == "removed"
    assert find_id(prefixes[-1], "item", -8).prefix == prefixes[1]
    assert find_id(prefixes[-1], "item", 0).prefix == prefixes[3]
    cleared = find_id(prefixes[-1], "user", 20)
    assert (cleared.status, cleared.prefix) == ("cleared", prefixes[2])
    never = find_id(prefixes[-1], "item", 12345)
    assert (never.status, never.prefix) == ("absent", None)


def test_an_id_may_be_given_as_an_unsigned_number(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    assert find_id(prefixes[-1], "item", (1 << 64) - 20) == find_id(prefixes[-1], "item", -20)
    with pytest.raises(ConfigError, match="64 bits"):
        find_id(prefixes[-1], "item", 1 << 64)
    with pytest.raises(ConfigError, match="64 bits"):
        find_id(prefixes[-1], "item", -(1 << 63) - 1)


def test_a_table_that_is_not_there_is_told_with_those_that_are(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    with pytest.raises(UnknownTableError, match="'shop'; it has item, user"):
        find_id(prefixes[-1], "shop", 1)


def test_a_row_of_a_damaged_or_broken_chain_is_refused(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    path = next(Path(f"{prefixes[3]}.assets").glob("item.*-of-*"))
    good = path.read_bytes()
    flip(path)
    with pytest.raises(CorruptFileError, match=path.name):
        find_id(prefixes[-1], "item", 5)
    path.write_bytes(good)
    Path(f"{prefixes[0]}.manifest").unlink()
    with pytest.raises(RestoreError, match="which is not there"):
        find_id(prefixes[-1], "item", 5)


def test_nothing_of_it_needs_the_model(folder: Path) -> None:
    """The manifests alone say which parts there are."""
    _, prefixes, _ = chain(folder)
    assert [set(link.manifest.parts) for link in read_chain(prefixes[-1])] == [
        {"tables", "dense", "position"}
    ] * 4


# Of several servers


def test_a_checkpoint_of_several_servers_shows_them_together(folder: Path) -> None:
    run, prefixes, contents = small_servers.chain(folder, 2, 2, 2, 2, filters=True)
    found = read_contents(prefixes[0], verify=True)
    assert found.problems == ()
    item, user = found.tables
    assert (item.rows, item.shares, item.shards) == (len(contents[0]["item"]), 2, 4)
    assert user.newest_event_time == 3
    (one,) = read_contents(prefixes[-1], verify=True).filters
    assert (one.kind, one.shares, one.cells) == ("sliding", 2, sum(map(len, run.filters)))
    alone = small_servers.Servers(folder.with_name("alone"), 1, filters=True).save(1)
    assert one.capacity == 2 * (read_contents(alone).filters[0].capacity or 0)
    _, user = read_contents(prefixes[2], verify=True).tables
    assert (user.rows, user.cleared, user.cleared_shares) == (len(contents[2]["user"]), False, (1,))


def test_every_damaged_file_of_any_server_is_named(folder: Path) -> None:
    _, prefixes, _ = small_servers.chain(folder, 2, 2, 2, 2, filters=True)
    files = [
        path
        for prefix in (prefixes[0], prefixes[-1])
        for path in sorted(Path(f"{prefix}.assets/ps-1-of-2").iterdir())
        if "filter" not in path.name or path.name.endswith("00000-of-00007")
    ]
    assert len(files) > 12
    for path in files:
        good = path.read_bytes()
        flip(path)
        problems = read_contents(prefixes[-1], verify=True).problems
        assert any(f"ps-1-of-2/{path.name}" in problem for problem in problems), path
        path.write_bytes(good)
    for table in ("item", "user"):
        Path(f"{prefixes[-1]}.assets/ps-0-of-2/{table}.manifest").unlink()
    problems = read_contents(prefixes[-1]).problems
    assert len(problems) == 2
    assert all("shard ps-0-of-2 of model.ckpt-4" in problem for problem in problems)


@pytest.mark.parametrize("layouts", [(2, 2, 2, 2), (1, 3, 2, 2)])
def test_a_row_is_found_in_whichever_share_it_is(folder: Path, layouts: tuple[int, ...]) -> None:
    _, prefixes, contents = small_servers.chain(folder, *layouts)
    for prefix, content in zip(prefixes, contents, strict=True):
        for table in ("item", "user"):
            for key in (-20, -19, -9, -8, 0, 7, 8, 9, 40, 41):
                found = find_id(prefix, table, key)
                assert (found.status == "found") == (key in content[table])
                if found.status == "found":
                    values = [value for segment in found.segments for value in segment.values]
                    assert (found.event_time, values) == content[table][key][:2]
    assert find_id(prefixes[-1], "item", -8).prefix == prefixes[1]
    assert find_id(prefixes[-1], "item", (1 << 64) - 19) == find_id(prefixes[-1], "item", -19)


def test_a_row_of_a_share_that_was_cleared_is_told_and_those_of_others_are_there(folder: Path) -> None:
    _, prefixes, _ = small_servers.chain(folder, 2, 2, 2, 2)
    assert (find_id(prefixes[-1], "user", 21).status, find_id(prefixes[-1], "user", 20).status) == (
        "cleared",
        "found",
    )
    assert find_id(prefixes[-1], "user", 21).prefix == prefixes[2]
