"""Which checkpoints a folder has, why each is there, and whether it is sound."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint import small_servers
from checkpoint.small_runs import SmallRun, chain, flip

from monolith.checkpoint.folder.state_files import MonolithCheckpointState, update_monolith_checkpoint
from monolith.checkpoint.offline.listing import Listed, list_checkpoints
from monolith.errors import FileMissingError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def by_name(folder: Path) -> dict[str, Listed]:
    return {one.name.removeprefix("model.ckpt-"): one for one in list_checkpoints(str(folder)).checkpoints}


def test_a_chain_is_listed_oldest_first_with_what_it_holds(folder: Path) -> None:
    _, prefixes, states = chain(folder)
    found = list_checkpoints(str(folder))
    assert found.sound
    assert [one.prefix for one in found.checkpoints] == prefixes
    assert [one.kind for one in found.checkpoints] == ["full"] + ["incremental"] * 3
    assert [one.step for one in found.checkpoints] == [1, 2, 3, 4]
    assert found.checkpoints[-1].chain == tuple(prefixes)
    assert found.checkpoints[-1].marks == ("latest", "listed")
    assert found.checkpoints[0].saved_at == 1000.0
    for one, state in zip(found.checkpoints, states, strict=True):
        assert one.rows == {name: len(rows) for name, rows in state["rows"].items()}
        on_disk = [*folder.glob(f"{one.name}.*"), *folder.glob(f"{one.name}.assets/*")]
        assert one.bytes == sum(path.stat().st_size for path in on_disk if path.is_file())


def test_an_empty_folder_has_none_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    found = list_checkpoints(str(tmp_path))
    assert (found.checkpoints, found.sound) == ((), True)
    with pytest.raises(FileMissingError, match="no folder"):
        list_checkpoints(str(tmp_path / "none"))


def test_why_each_is_kept_is_told(folder: Path) -> None:
    run = SmallRun(folder, full_every=3, max_to_keep=2)
    for step in range(1, 6):
        run.train(step, step + 1)
        run.save(step)
    marks = {name: one.marks for name, one in by_name(folder).items()}
    assert marks == {"4": ("listed",), "5": ("latest", "listed")}
    run.train(1)
    run.save(6)
    run.train(1)
    run.save(7)
    run.train(1)
    run.save(8)
    marks = {name: one.marks for name, one in by_name(folder).items()}
    assert marks == {"7": ("listed",), "8": ("latest", "listed")}


def test_a_base_that_left_the_list_is_needed(folder: Path) -> None:
    run = SmallRun(folder, full_every=9, max_to_keep=1)
    for step in (1, 2, 3):
        run.train(step)
        run.save(step)
    marks = {name: one.marks for name, one in by_name(folder).items()}
    assert marks == {"1": ("needed",), "2": ("needed",), "3": ("latest", "listed")}


def test_exempt_and_preserved_ones_are_told_apart(folder: Path) -> None:
    run = SmallRun(folder, max_to_keep=1)
    run.save(1)
    update_monolith_checkpoint(
        str(folder), seed=MonolithCheckpointState(exempt_model_checkpoint_paths=("model.ckpt-1",))
    )
    run.save(2)
    shutil.copy(folder / "model.ckpt-2.manifest", folder / "model.ckpt-9.manifest")  # somebody's copy
    marks = {name: one.marks for name, one in by_name(folder).items()}
    assert marks["1"] == ("listed", "exempt")
    assert marks["2"] == ("latest", "listed")
    assert marks["9"] == ("preserved",)


def test_what_was_begun_and_never_completed_is_no_damage(folder: Path) -> None:
    SmallRun(folder).save(1)
    (folder / "model.ckpt-2.assets").mkdir()
    (folder / "model.ckpt-2.assets" / "item-tmp-0123456789ab").write_bytes(b"abc")
    found = list_checkpoints(str(folder))
    unfinished = found.checkpoints[-1]
    assert (unfinished.kind, unfinished.step, unfinished.bytes) == ("unfinished", 2, 3)
    assert unfinished.marks == ()
    assert found.sound


def test_one_that_is_listed_and_gone_is_damage(folder: Path) -> None:
    run = SmallRun(folder)
    run.save(1)
    run.save(2)
    for path in folder.glob("model.ckpt-1.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = list_checkpoints(str(folder))
    assert found.checkpoints[0].kind == "gone"
    assert not found.sound


def test_damage_of_a_base_is_damage_of_all_that_continue_it(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    path = next(Path(f"{prefixes[1]}.assets").glob("item.*-of-*"))
    path.unlink()
    found = list_checkpoints(str(folder))
    assert [one.problem is None for one in found.checkpoints] == [True, False, False, False]
    assert all("model.ckpt-2.assets/item." in (one.problem or "") for one in found.checkpoints[1:])


def test_a_link_that_is_missing_or_was_rewritten_is_reported(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    manifest = Path(f"{prefixes[1]}.manifest")
    good = manifest.read_bytes()
    manifest.unlink()
    assert "model.ckpt-2, which is not there" in (by_name(folder)["3"].problem or "")
    manifest.write_bytes(Path(f"{prefixes[0]}.manifest").read_bytes())
    assert "overwritten since" in (by_name(folder)["3"].problem or "")
    manifest.write_bytes(good)
    assert list_checkpoints(str(folder)).sound


def test_a_damaged_manifest_is_named(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    flip(Path(f"{prefixes[0]}.manifest"))
    found = by_name(folder)
    assert found["1"].kind == "damaged"
    assert "model.ckpt-1.manifest" in (found["1"].problem or "")
    assert "model.ckpt-1.manifest" in (found["4"].problem or "")


@pytest.mark.parametrize("name", ["checkpoint", "monolith_checkpoint", "checkpoint.journal"])
def test_damaged_state_files_are_named_and_the_rest_is_shown(folder: Path, name: str) -> None:
    chain(folder)
    (folder / name).write_bytes(b"\xff nonsense {")
    found = list_checkpoints(str(folder))
    assert len(found.checkpoints) == 4
    assert not found.sound
    assert any(str(folder / name) in problem for problem in found.problems)


def test_checkpoints_of_another_folder_that_are_listed_are_shown(folder: Path, tmp_path: Path) -> None:
    prefix = SmallRun(folder).save(1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoint").write_text(
        f'model_checkpoint_path: "{prefix}"\nall_model_checkpoint_paths: "{prefix}"\n'
    )
    (one,) = list_checkpoints(str(other)).checkpoints
    assert (one.prefix, one.marks, one.problem) == (prefix, ("latest", "listed"), None)


def test_checkpoints_of_several_servers_are_listed_with_their_totals(folder: Path) -> None:
    _, prefixes, contents = small_servers.chain(folder, 2, 2, 3, 3)
    found = list_checkpoints(str(folder))
    assert found.sound
    for one, content in zip(found.checkpoints, contents, strict=True):
        assert one.rows == {name: len(rows) for name, rows in content.items()}
        on_disk = [*folder.glob(f"{one.name}.*"), *folder.glob(f"{one.name}.assets/*/*")]
        assert one.bytes == sum(path.stat().st_size for path in on_disk if path.is_file())
    Path(f"{prefixes[1]}.assets/ps-1-of-2/user.manifest").unlink()
    listed = by_name(folder)
    assert [listed[name].problem is None for name in "1234"] == [True, False, False, False]
    assert "shard ps-1-of-2 of model.ckpt-2" in (listed["4"].problem or "")


def test_all_shares_go_with_their_checkpoint(folder: Path) -> None:
    run = small_servers.Servers(folder, 2, max_to_keep=1)
    run.train(1, 2, 3)
    run.save(1)
    other = small_servers.Servers(folder, 3, max_to_keep=1)  # which begins with a full one
    other.train(1, 2, 3)
    other.save(2)
    there = sorted(path.name for path in folder.glob("model.ckpt-*.assets/*"))
    assert there == ["ps-0-of-3", "ps-1-of-3", "ps-2-of-3"]
    assert not list(folder.glob("model.ckpt-1*"))
