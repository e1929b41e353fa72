"""Checkpoints written anew: equal to what they were made of, and never lost on the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint import small_servers
from checkpoint.small_runs import ITEM, USER, SmallRun, chain, flip, rows_of
from contracts.tables import ids
from torch import nn

from monolith.checkpoint import Checkpointer, DensePart, ModelDirLock, Saver, TablesPart
from monolith.checkpoint.folder.manifest import read_chain, read_manifest
from monolith.checkpoint.folder.saver import CheckpointNaming
from monolith.checkpoint.folder.state_files import read_checkpoint_state, read_ckpt_info, read_journal
from monolith.checkpoint.offline.listing import list_checkpoints
from monolith.checkpoint.offline.reading import read_contents
from monolith.checkpoint.offline.rewriting import compact, export, reshard
from monolith.errors import (
    CorruptFileError,
    ModelDirLockedError,
    RestoreError,
    SaveError,
    ServingTableError,
    UnknownTableError,
)
from monolith.filesystem.backends import LocalBackend
from monolith.table import (
    DictTable,
    NativeTable,
    OneBit,
    ProbabilisticFilter,
    Segment,
    SlotThresholds,
    TableConfig,
    import_entry_dumps,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


# reshard


@pytest.mark.parametrize("num_shards", [1, 2, 7, None])
def test_a_resharded_chain_restores_equal(folder: Path, tmp_path: Path, num_shards: int | None) -> None:
    run, prefixes, states = chain(folder)
    for number in (0, 3):
        to = tmp_path / f"to{number}"
        done = reshard(prefixes[number], str(to), num_shards=num_shards)
        assert done.chain == tuple(prefixes[: number + 1])
        assert run.restored(done.prefix) == states[number]
        contents = read_contents(done.prefix, verify=True)
        assert (contents.kind, contents.problems) == ("full", ())
        assert {table.shards for table in contents.tables} == {num_shards or 1}
        assert done.rows == {name: len(rows) for name, rows in states[number]["rows"].items()}


def test_it_is_the_latest_of_its_folder_and_those_before_stay(folder: Path, tmp_path: Path) -> None:
    _, prefixes, _ = chain(folder)
    to = str(tmp_path / "to")
    for prefix in prefixes:
        reshard(prefix, to)
    state = read_checkpoint_state(to)
    assert state is not None
    names = [Path(path).name for path in state.all_model_checkpoint_paths]
    assert names == [f"model.ckpt-{step}" for step in (1, 2, 3, 4)]
    assert state.model_checkpoint_path.endswith("model.ckpt-4")
    assert list_checkpoints(to).sound
    shutil.rmtree(folder)
    assert all(read_contents(path, verify=True).problems == () for path in state.all_model_checkpoint_paths)


def test_rows_are_counted_again(folder: Path, tmp_path: Path) -> None:
    run = SmallRun(folder, full_every=3)
    run.train(1, (3 << 48) + 5)
    run.train(1, (3 << 48) + 5)
    run.save(1)
    run.train(1)
    done = reshard(run.save(2), str(tmp_path / "to"))
    info = read_ckpt_info(str(tmp_path / "to"), 2)
    assert info.feature_counts == {"item": 2, "user": 2}
    assert info.slot_counts == {0: 2, 3: 2}
    assert done.rows == {"item": 2, "user": 2}


def test_a_run_resumes_from_it_with_increments(folder: Path, tmp_path: Path) -> None:
    run, prefixes, _ = chain(folder)
    to = tmp_path / "to"
    reshard(prefixes[-1], str(to), num_shards=3)
    other = SmallRun(to, full_every=5, seed=3)
    other.checkpointer.restore(str(to / "model.ckpt-4"))
    other.train(3, 99, time=9)
    prefix = other.save(5)
    assert len(read_chain(prefix)) == 2
    assert run.restored(prefix) == other.state()


def test_a_name_that_is_taken_is_refused(folder: Path, tmp_path: Path) -> None:
    _, prefixes, _ = chain(folder)
    with pytest.raises(SaveError, match="compact it"):
        reshard(prefixes[-1], str(folder))
    reshard(prefixes[0], str(tmp_path / "to"))
    with pytest.raises(SaveError, match=r"has a checkpoint model\.ckpt-1"):
        reshard(prefixes[0], str(tmp_path / "to"))


def test_padded_names_and_other_basenames_are_kept(folder: Path, tmp_path: Path) -> None:
    table = NativeTable(USER)
    table.assign(ids(1), torch.ones(1, 2))
    saver = Saver(str(folder), naming=CheckpointNaming(basename="dense-only", pad_step_number=True))
    prefix = Checkpointer(saver, [TablesPart({"user": table})]).save(7)
    assert reshard(prefix, str(tmp_path / "to")).prefix == str(tmp_path / "to" / "dense-only-00000007")


def test_a_damaged_chain_is_not_listed(folder: Path, tmp_path: Path) -> None:
    _, prefixes, _ = chain(folder)
    to = tmp_path / "to"
    for path in (
        next(Path(f"{prefixes[0]}.assets").glob("item.*-of-*")),
        next(Path(f"{prefixes[3]}.assets").glob("user.removed.*-of-*")),
        Path(f"{prefixes[3]}.dense-00000-of-00001.safetensors"),
        next(Path(f"{prefixes[3]}.assets").glob("hash_filter_item-*")),
    ):
        good = path.read_bytes()
        flip(path)
        with pytest.raises(CorruptFileError, match=path.name):
            reshard(prefixes[-1], str(to))
        assert read_checkpoint_state(str(to)) is None
        path.write_bytes(good)
    reshard(prefixes[-1], str(to))
    Path(f"{prefixes[1]}.manifest").unlink()
    with pytest.raises(RestoreError, match="which is not there"):
        reshard(prefixes[-1], str(tmp_path / "other"))


def test_a_folder_that_a_run_writes_to_is_refused(folder: Path, tmp_path: Path) -> None:
    _, prefixes, _ = chain(folder)
    with ModelDirLock(str(tmp_path / "to")), pytest.raises(ModelDirLockedError):
        reshard(prefixes[0], str(tmp_path / "to"))


def test_scales_and_filters_without_rows_come_along(folder: Path, tmp_path: Path) -> None:
    config = TableConfig(name="a:b/c", segments=(Segment(dim=2, compressor=OneBit(step_size=1)),))
    table = NativeTable(config)
    admission = ProbabilisticFilter(SlotThresholds(3))
    admission.refuse(ids(1, 2, 3))
    table.apply_gradients(ids(1), torch.ones(1, 2), step=400)
    part = TablesPart({"a:b/c": table}, {"a:b/c": admission})
    prefix = Checkpointer(Saver(str(folder)), [part]).save(1)
    done = reshard(prefix, str(tmp_path / "to"))
    other, chances = NativeTable(config), ProbabilisticFilter(SlotThresholds(3))
    Checkpointer(Saver(str(tmp_path / "x")), [TablesPart({"a:b/c": other}, {"a:b/c": chances})]).restore(
        done.prefix
    )
    assert other.scales == table.scales != [1.0]
    assert chances.core.draws == admission.core.draws


# compact


def test_a_compacted_checkpoint_restores_equal_and_needs_no_other(folder: Path) -> None:
    run, prefixes, states = chain(folder)
    done = compact(prefixes[-1], num_shards=2)
    assert done.chain == tuple(prefixes)
    assert read_manifest(prefixes[-1]).manifest.kind == "full"
    contents = read_contents(prefixes[-1], verify=True)
    assert contents.problems == ()
    assert not list(Path(f"{prefixes[-1]}.assets").glob("*.removed*"))
    for prefix, state in zip(prefixes, states, strict=True):
        assert run.restored(prefix) == state
    for prefix in prefixes[:-1]:
        for path in folder.glob(f"{Path(prefix).name}.*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run.restored(prefixes[-1]) == states[-1]


def test_what_only_it_needed_goes(folder: Path) -> None:
    run, prefixes, states = chain(folder, max_to_keep=1)
    assert len(list_checkpoints(str(folder)).checkpoints) == 4
    assert compact(prefixes[-1]).deleted == tuple(prefixes[:-1])
    assert [one.prefix for one in list_checkpoints(str(folder)).checkpoints] == prefixes[-1:]
    assert read_journal(str(folder)).depends_on == {}
    assert not list(folder.glob("model.ckpt-1*"))
    assert run.restored(prefixes[-1]) == states[-1]


def test_what_others_need_stays(folder: Path) -> None:
    run, prefixes, states = chain(folder, max_to_keep=2)
    assert compact(prefixes[-1]).deleted == ()
    assert [one.prefix for one in list_checkpoints(str(folder)).checkpoints] == prefixes
    assert run.restored(prefixes[2]) == states[2]


def test_a_run_resumes_from_a_compacted_one_with_increments(folder: Path) -> None:
    _, prefixes, _ = chain(folder, max_to_keep=1)
    compact(prefixes[-1])
    run = SmallRun(folder, full_every=5, max_to_keep=1, seed=4)
    run.checkpointer.restore(prefixes[-1])
    run.train(1, 7, time=9)
    run.tables["item"].remove(ids(9))
    prefix = run.save(5)
    assert [link.manifest.kind for link in read_chain(prefix)] == ["full", "incremental"]
    assert run.restored(prefix) == run.state()


def test_one_that_others_continue_is_refused(folder: Path) -> None:
    run, prefixes, states = chain(folder)
    with pytest.raises(SaveError, match=r"model\.ckpt-3 continues it"):
        compact(prefixes[1])
    assert run.restored(prefixes[-1]) == states[-1]


def test_a_full_one_is_left_as_it_is(folder: Path) -> None:
    run, prefixes, states = chain(folder)
    before = Path(f"{prefixes[0]}.manifest").read_bytes()
    assert compact(prefixes[0]).chain == (prefixes[0],)
    assert Path(f"{prefixes[0]}.manifest").read_bytes() == before
    assert run.restored(prefixes[-1]) == states[-1]


def test_one_that_is_not_there_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="not a valid checkpoint"):
        compact(str(tmp_path / "none" / "model.ckpt-1"))
    assert not (tmp_path / "none").exists()


def test_nothing_is_done_while_a_run_writes_there(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    with ModelDirLock(str(folder)), pytest.raises(ModelDirLockedError):
        compact(prefixes[-1])


@pytest.mark.parametrize(
    "pattern", ["model.ckpt-1.assets/item.*-of-*", "model.ckpt-4.dense-*", "checkpoint.journal"]
)
def test_damage_is_named_and_nothing_is_lost(folder: Path, pattern: str) -> None:
    run, prefixes, states = chain(folder)
    path = next(folder.glob(pattern))
    good = path.read_bytes()
    flip(path)
    with pytest.raises(CorruptFileError, match=path.name):
        compact(prefixes[-1])
    path.write_bytes(good)
    assert run.restored(prefixes[-1]) == states[-1]
    compact(prefixes[-1])
    assert run.restored(prefixes[-1]) == states[-1]


class KilledError(BaseException):
    """Stands for kill -9: nothing is cleaned up after it."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the `step`-th change of the disk, and every one after it, not happen. Yields those that did."""
    done: list[str] = []

    def stopping(name: str) -> Callable[..., Any]:
        real = getattr(LocalBackend, name)

        def change(self: LocalBackend, *args: Any) -> Any:
            if len(done) >= step:
                raise KilledError
            done.append(f"{name} {args[-1]}")
            return real(self, *args)

        return change

    with monkeypatch.context() as patched:
        for name in ("create", "sync", "rename", "make_dirs", "remove_file", "remove_tree"):
            patched.setattr(LocalBackend, name, stopping(name))
        yield done


EVERY = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
"""Of how many changes of the disk one is the last, in a test that tries them in turn."""


@EVERY
def test_killed_at_any_moment_nothing_is_lost_and_the_next_attempt_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    run, prefixes, states = chain(tmp_path / "run", max_to_keep=2)
    clean = tmp_path / "clean"
    shutil.copytree(tmp_path / "run", clean)
    step, finished = 0, False
    kinds = set()
    while not finished:
        shutil.rmtree(run.folder)
        shutil.copytree(clean, run.folder)
        with killed_at(step, monkeypatch) as done:
            try:
                compact(prefixes[-1])
                finished = True
            except KilledError:
                assert len(done) == step
        kinds.add(read_manifest(prefixes[-1]).manifest.kind)
        listing = list_checkpoints(str(run.folder))
        assert listing.sound, (step, done[-1], listing)
        for prefix, state in zip(prefixes, states, strict=True):
            if step % (5 * every) == 0 or prefix == prefixes[-1]:
                assert run.restored(prefix) == state, (step, done[-1])
        assert read_contents(prefixes[-1], verify=True).problems == ()
        compact(prefixes[-1])
        assert run.restored(prefixes[-1]) == states[-1]
        assert read_manifest(prefixes[-1]).manifest.kind == "full"
        assert not list(Path(f"{prefixes[-1]}.assets").glob("*.removed*"))
        assert prefixes[-1] not in read_journal(str(run.folder)).depends_on
        step += every
    assert step > 25
    assert kinds == {"full", "incremental"}


@EVERY
def test_killed_while_what_is_no_longer_needed_goes_it_goes_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    run, prefixes, states = chain(tmp_path / "run", max_to_keep=1)
    clean = tmp_path / "clean"
    shutil.copytree(tmp_path / "run", clean)
    with killed_at(10**6, monkeypatch) as all_steps:
        compact(prefixes[-1])
    commit = next(i for i, what in enumerate(all_steps) if what.endswith("model.ckpt-4.manifest"))
    assert not any("remove" in what and "model.ckpt-1" in what for what in all_steps[: commit + 1])
    for step in range(commit, len(all_steps), every):
        shutil.rmtree(run.folder)
        shutil.copytree(clean, run.folder)
        with killed_at(step, monkeypatch), pytest.raises(KilledError):
            compact(prefixes[-1])
        assert run.restored(prefixes[-1]) == states[-1]
        compact(prefixes[-1])
        assert run.restored(prefixes[-1]) == states[-1]
        assert not list(run.folder.glob("model.ckpt-1*"))


@EVERY
def test_a_reshard_that_is_killed_leaves_no_checkpoint_and_can_be_repeated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    run, prefixes, states = chain(folder)
    to = tmp_path / "to"
    with killed_at(10**6, monkeypatch) as all_steps:
        reshard(prefixes[-1], str(to))
    for step in range(0, len(all_steps), every):
        shutil.rmtree(to)
        with killed_at(step, monkeypatch), pytest.raises(KilledError):
            reshard(prefixes[-1], str(to))
        listed = read_checkpoint_state(str(to)) if to.exists() else None
        if listed is not None:
            assert run.restored(listed.model_checkpoint_path) == states[-1]
        else:
            assert run.restored(reshard(prefixes[-1], str(to)).prefix) == states[-1]


# export


@pytest.mark.parametrize("num_shards", [None, 3])
def test_exported_rows_are_read_back_by_upstreams_format(
    folder: Path, tmp_path: Path, num_shards: int | None
) -> None:
    run, prefixes, states = chain(folder)
    done = export(prefixes[-1], str(tmp_path / "to"), num_shards=num_shards)
    assert done.rows == {name: len(rows) for name, rows in states[-1]["rows"].items()}
    for name, config in (("item", ITEM), ("user", USER)):
        table = DictTable(config)
        import_entry_dumps(table, str(tmp_path / "to" / name))
        assert rows_of(table) == states[-1]["rows"][name]
    weights = safetensors.torch.load_file(tmp_path / "to" / "dense.safetensors")
    assert {name: value.tolist() for name, value in weights.items()} == states[-1]["weights"]
    assert len(done.files) == 2 * (num_shards or 1) + 1
    assert done.bytes == sum(path.stat().st_size for path in (tmp_path / "to").iterdir())
    assert len(run.tables) == 2


def test_tied_weights_are_each_written(folder: Path, tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    prefix = Checkpointer(Saver(str(folder)), [DensePart(model)]).save(1)
    done = export(prefix, str(tmp_path / "to"))
    weights = safetensors.torch.load_file(done.files[0])
    assert weights["a.weight"].tolist() == weights["b.weight"].tolist() == model["a"].weight.tolist()


def test_some_tables_and_no_weights(folder: Path, tmp_path: Path) -> None:
    _, prefixes, _ = chain(folder)
    done = export(prefixes[-1], str(tmp_path / "to"), tables=["user"], dense=False)
    assert [Path(path).name for path in done.files] == ["user-00000-of-00001"]
    with pytest.raises(UnknownTableError, match="'shop'"):
        export(prefixes[-1], str(tmp_path / "to"), tables=["shop"])


def test_rows_without_state_are_refused(folder: Path, tmp_path: Path) -> None:
    table = NativeTable(TableConfig(name="item", segments=ITEM.segments, serving=True))
    table.assign(ids(1), torch.ones(1, 3))
    prefix = Checkpointer(Saver(str(folder)), [TablesPart({"item": table})]).save(1)
    with pytest.raises(ServingTableError, match="have none"):
        export(prefix, str(tmp_path / "to"))
    assert len(reshard(prefix, str(tmp_path / "other")).rows) == 1


def test_damaged_rows_leave_no_export_that_looks_whole(folder: Path, tmp_path: Path) -> None:
    _, prefixes, _ = chain(folder)
    path = next(Path(f"{prefixes[0]}.assets").glob("item.*-of-*"))
    flip(path)
    with pytest.raises(CorruptFileError, match=path.name):
        export(prefixes[-1], str(tmp_path / "to"))
    assert not list((tmp_path / "to").iterdir())


# Of several servers


@pytest.mark.parametrize("layouts", [(2, 2, 2, 2), (1, 3, 2, 2)])
def test_shares_become_one(folder: Path, tmp_path: Path, layouts: tuple[int, ...]) -> None:
    _, prefixes, contents = small_servers.chain(folder, *layouts)
    for number in (0, 2, 3):
        done = reshard(prefixes[number], str(tmp_path / "to"), num_shards=3)
        assert done.rows == {name: len(rows) for name, rows in contents[number].items()}
        found = read_contents(done.prefix, verify=True)
        assert found.problems == ()
        assert {(table.shares, table.shards) for table in found.tables} == {(1, 3)}
        assert not list(Path(f"{done.prefix}.assets").glob("ps-*"))
        for readers in (1, 2):
            assert small_servers.restored(done.prefix, readers) == contents[number]


def test_rows_of_all_servers_are_exported(folder: Path, tmp_path: Path) -> None:
    _, prefixes, contents = small_servers.chain(folder, 2, 2, 2, 2)
    export(prefixes[-1], str(tmp_path / "to"))
    for name, config in (("item", ITEM), ("user", USER)):
        table = DictTable(config)
        import_entry_dumps(table, str(tmp_path / "to" / name))
        assert rows_of(table) == contents[-1][name]


@pytest.mark.parametrize("how", ["reshard", "compact"])
def test_filters_of_several_servers_stay_as_they_are(folder: Path, tmp_path: Path, how: str) -> None:
    """The servers that counted find their counts again; others are told that they begin anew."""
    run, prefixes, contents = small_servers.chain(folder, 2, 2, 2, 2, filters=True)
    if how == "reshard":
        prefix = reshard(prefixes[-1], str(tmp_path / "to")).prefix
        shutil.rmtree(folder)
    else:
        prefix = compact(prefixes[-1]).prefix
    (found,) = read_contents(prefix, verify=True).filters
    assert (found.kind, found.shares) == ("sliding", 2)
    others = small_servers.Servers(tmp_path / "other", 2, filters=True)
    assert others.restore(prefix).complete
    assert others.content() == contents[-1]
    keys = torch.arange(-20, 50)
    assert [one.get(keys).tolist() for one in others.filters] == [
        one.get(keys).tolist() for one in run.filters
    ]
    alone = small_servers.Servers(tmp_path / "alone", 1, filters=True)
    assert list(alone.restore(prefix).reset) == ["filter of item"]
    assert alone.content() == contents[-1]
    again = reshard(prefix, str(tmp_path / "again")).prefix
    assert [one.shares for one in read_contents(again, verify=True).filters] == [2]
    path = next(Path(f"{again}.assets/ps-1-of-2").glob("hash_filter_item-00000-*"))
    flip(path)
    assert any(path.name in problem for problem in read_contents(again, verify=True).problems)


def test_a_full_checkpoint_of_several_servers_is_left_in_its_shares(folder: Path) -> None:
    _, prefixes, contents = small_servers.chain(folder, 2, 2, 2, 2)
    before = sorted(path for path in Path(f"{prefixes[0]}.assets").rglob("*"))
    compact(prefixes[0])
    assert sorted(path for path in Path(f"{prefixes[0]}.assets").rglob("*")) == before
    assert small_servers.restored(prefixes[-1], 1) == contents[-1]


@EVERY
def test_compacting_shares_may_be_killed_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    folder, clean = tmp_path / "run", tmp_path / "clean"
    _, prefixes, contents = small_servers.chain(folder, 2, 2, 2, 2)
    shutil.copytree(folder, clean)
    with killed_at(10**6, monkeypatch) as all_steps:
        compact(prefixes[-1])
    kinds = set()
    for step in range(0, len(all_steps), every):
        shutil.rmtree(folder)
        shutil.copytree(clean, folder)
        with killed_at(step, monkeypatch), pytest.raises(KilledError):
            compact(prefixes[-1])
        kinds.add(read_manifest(prefixes[-1]).manifest.kind)
        assert list_checkpoints(str(folder)).sound
        assert small_servers.restored(prefixes[-1], 2) == contents[-1]
        compact(prefixes[-1])
        assert small_servers.restored(prefixes[-1], 3) == contents[-1]
        assert not list(Path(f"{prefixes[-1]}.assets").glob("ps-*"))
        assert not list(Path(f"{prefixes[-1]}.assets").glob("*.removed*"))
    assert kinds == {"full", "incremental"}


def test_servers_resume_from_a_compacted_one_with_increments(folder: Path) -> None:
    _, prefixes, _ = small_servers.chain(folder, 2, 2, 2, 2)
    compact(prefixes[-1])
    run = small_servers.Servers(folder, 2)
    run.restore(prefixes[-1])
    run.train(1, 7, time=20)
    run.remove("item", 9)
    prefix = run.save(5)
    assert [link.manifest.parts["tables"]["pieces"] for link in read_chain(prefix)] == [1, 2]
    assert small_servers.restored(prefix, 3) == run.content()
