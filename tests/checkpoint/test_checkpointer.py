"""Everything of one moment, or nothing: what a checkpoint promises a run that was cut short."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import ids
from torch import nn

from monolith.checkpoint.checkpointer import Checkpointer
from monolith.checkpoint.folder.manifest import read_chain, read_manifest, write_manifest
from monolith.checkpoint.folder.saver import Saver
from monolith.checkpoint.folder.state_files import read_checkpoint_state, read_ckpt_info
from monolith.checkpoint.part import RestoreOptions
from monolith.checkpoint.parts import DensePart, StatePart
from monolith.checkpoint.tables import TablesPart
from monolith.errors import ConfigError, CorruptFileError, FilesystemError, RestoreError, SaveError
from monolith.table import (
    Adagrad,
    Adam,
    NativeTable,
    Segment,
    SlidingFilter,
    SlotThresholds,
    Table,
    TableConfig,
    iterate,
)

ITEM = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad(), learning_rate=0.5),))
USER = replace(ITEM, name="user")


@dataclass
class Run:
    """A small run: two tables, a filter, a layer with its optimizer, and a place in the data."""

    folder: Path
    full_every: int = 1
    item: TableConfig = ITEM
    user: TableConfig = USER
    max_to_keep: int = 10
    share: tuple[int, int] = (0, 1)
    seed: int = 0
    position: dict[str, int] = field(default_factory=lambda: {"next": 0})

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.filter = SlidingFilter(1000, 7, SlotThresholds(1))
        self.tables = {
            "item": NativeTable(self.item, admission=self.filter),
            "user": NativeTable(self.user),
        }
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        parts = [
            TablesPart(
                self.tables,
                {"item": self.filter},
                incremental=self.full_every > 1,
                shard=self.share,
            ),
            DensePart(self.model, [self.optimizer]),
            StatePart("position", lambda: self.position, self.position.update),
        ]
        saver = Saver(str(self.folder), max_to_keep=self.max_to_keep)
        saver.recover()
        self.checkpointer = Checkpointer(saver, parts, full_every=self.full_every)

    def train(self, *keys: int, time: int = 1) -> None:
        for table in self.tables.values():
            table.apply_gradients(ids(*keys), torch.ones(len(keys), 2), event_time=time, dedup=True)
        self.model(torch.randn(4, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.position["next"] += len(keys)

    def state(self) -> dict[str, Any]:
        rows = {
            name: {
                key: (time, values, state)
                for chunk in iterate(table)
                for key, time, values, state in zip(
                    *(c.tolist() for c in (chunk.ids, chunk.event_times, chunk.values, chunk.state)),
                    strict=True,
                )
            }
            for name, table in self.tables.items()
        }
        return {
            "rows": rows,
            "seen": self.filter.get(torch.arange(50)).tolist(),
            "weights": {name: value.tolist() for name, value in self.model.state_dict().items()},
            "adam": [s["exp_avg"].tolist() for s in self.optimizer.state.values()],
            "position": dict(self.position),
            "random": torch.random.get_rng_state().tolist(),
        }


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    return lambda **how: Run(tmp_path / "run", **how)


def test_a_run_comes_back_as_it_was(make: Callable[..., Run]) -> None:
    run = make()
    run.train(1, 2, 3)
    run.train(2, 3, 4)
    prefix = run.checkpointer.save(7)
    saved = run.state()
    run.train(3, 9)
    other = make(seed=5)
    other.train(77)
    restored = other.checkpointer.restore(prefix)
    assert restored.step == 7
    assert other.state() == saved
    assert restored.report.complete
    assert restored.report.loaded["table item"] == "2 rows"
    other.train(3, 9)
    assert other.state() == run.state()


def test_the_moment_is_that_of_the_cut_whatever_follows(make: Callable[..., Run]) -> None:
    run = make()
    run.train(1, 2, 3)
    run.train(1, 2, 3)
    saved = run.state()
    moment = run.checkpointer.snapshot(1)
    run.train(2, 3, 4, 5, time=9)
    run.tables["user"].remove(ids(1))
    prefix = moment.write()
    moment.close(saved=True)
    other = make()
    other.checkpointer.restore(prefix)
    assert other.state() == saved


def test_there_is_no_checkpoint_before_the_manifest(make: Callable[..., Run], tmp_path: Path) -> None:
    run = make()
    run.train(1)

    class Breaks:
        name = "last"

        def snapshot(self, step: int) -> Any:  # noqa: ARG002
            return self

        def write(self, prefix: str, *, full: bool) -> Any:  # noqa: ARG002
            raise OSError(28, "No space left on device")

        def close(self, *, saved: bool) -> None: ...

    first = run.checkpointer.save(1)
    run.train(2)
    broken = Checkpointer(run.checkpointer.saver, [*run.checkpointer._parts, Breaks()])
    with pytest.raises(OSError, match="No space"):
        broken.save(2)
    assert not (tmp_path / "run" / "model.ckpt-2.manifest").exists()
    state = read_checkpoint_state(str(tmp_path / "run"))
    assert state is not None
    assert state.model_checkpoint_path == first
    other = make()
    assert other.checkpointer.restore(first).step == 1
    other.checkpointer.save(2)  # what was left behind is in nobody's way


def test_a_second_attempt_writes_the_same_moment(make: Callable[..., Run]) -> None:
    run = make()
    run.train(1, 2)
    saved = run.state()
    moment = run.checkpointer.snapshot(1)
    run.train(1, 2, 3)
    blocked = run.folder / "model.ckpt-1.assets"
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file where a folder should be")
    with pytest.raises(FilesystemError):
        moment.write()
    blocked.unlink()
    prefix = moment.write()
    moment.close(saved=True)
    other = make()
    other.checkpointer.restore(prefix)
    assert other.state() == saved


def test_one_moment_at_a_time(make: Callable[..., Run]) -> None:
    run = make()
    moment = run.checkpointer.snapshot(1)
    with pytest.raises(SaveError, match="step 1 is still being written"):
        run.checkpointer.snapshot(2)
    prefix = moment.write()
    with pytest.raises(RestoreError, match="still being written"):
        run.checkpointer.restore(prefix)
    moment.close(saved=True)
    run.checkpointer.snapshot(2).close(saved=False)


def test_the_newest_checkpoint_can_be_read_while_a_snapshot_waits(tmp_path: Path) -> None:
    cutting, back = threading.Event(), threading.Event()

    def state() -> dict[str, int]:
        if saved:  # as a part of a fleet waits for a lost server
            cutting.set()
            assert back.wait(60)
        return {}

    saved: list[str] = []
    checkpointer = Checkpointer(Saver(str(tmp_path)), [StatePart("state", state, lambda _: None)])
    saved.append(checkpointer.save(1))
    cut = threading.Thread(target=checkpointer.snapshot, args=(2,), daemon=True)
    cut.start()
    assert cutting.wait(60)
    asked = threading.Thread(target=lambda: saved.append(checkpointer.newest or ""), daemon=True)
    asked.start()
    asked.join(10)
    back.set()
    cut.join(60)
    assert saved == [saved[0]] * 2


def test_a_part_that_cannot_be_snapshotted_releases_the_other_parts(make: Callable[..., Run]) -> None:
    run = make()
    run.position["torn"] = object()  # type: ignore[assignment]
    with pytest.raises(SaveError, match="neither number, text"):
        run.checkpointer.save(1)
    del run.position["torn"]
    run.checkpointer.save(1)


def test_row_counts_are_written_next_to_a_checkpoint(make: Callable[..., Run], tmp_path: Path) -> None:
    run = make()
    run.train(1, (3 << 48) + 5)
    run.train(1, (3 << 48) + 5)
    run.checkpointer.save(4)
    info = read_ckpt_info(str(tmp_path / "run"), 4)
    assert info.feature_counts == {"item": 2, "user": 2}
    assert info.slot_counts == {0: 2, 3: 2}


# What may differ


def test_a_checkpoint_restores_into_any_number_of_shares(make: Callable[..., Run]) -> None:
    run = make()
    run.train(*range(-10, 40))
    run.train(*range(-10, 40))
    prefix = run.checkpointer.save(1)
    whole = run.state()["rows"]["item"]
    parts = []
    for number in range(3):
        other = make(share=(number, 3))
        other.checkpointer.restore(prefix)
        parts.append(other.state()["rows"]["item"])
    assert sum(map(len, parts)) == len(whole)
    assert parts[0] | parts[1] | parts[2] == whole


def test_another_capacity_takes_the_rows_or_says_that_there_is_no_room(make: Callable[..., Run]) -> None:
    run = make()
    run.train(*range(5000))
    run.train(*range(5000))
    prefix = run.checkpointer.save(1)
    make(item=replace(ITEM, initial_rows=100_000)).checkpointer.restore(prefix)
    small = make(item=replace(ITEM, capacity_bytes=100_000))
    with pytest.raises(RestoreError, match="do not fit into capacity_bytes"):
        small.checkpointer.restore(prefix)


def test_another_optimizer_resets_its_state_and_says_so(make: Callable[..., Run]) -> None:
    run = make()
    run.train(1, 2)
    run.train(1, 2)
    prefix = run.checkpointer.save(1)
    adam = replace(ITEM, segments=(Segment(dim=2, optimizer=Adam(), learning_rate=0.5),))
    with pytest.raises(RestoreError, match="optimizer_state='reset'"):
        make(item=adam).checkpointer.restore(prefix)
    other = make(item=adam)
    report = other.checkpointer.restore(prefix, RestoreOptions(optimizer_state="auto")).report
    assert "the optimizer changed" in report.reset["table item"]
    assert "table user" not in report.reset
    ours, theirs = run.state()["rows"]["item"], other.state()["rows"]["item"]
    assert {key: row[1] for key, row in ours.items()} == {key: row[1] for key, row in theirs.items()}


def test_a_table_that_is_new_is_an_error_unless_one_may_start_with_less(make: Callable[..., Run]) -> None:
    run = make()
    run.train(1)
    prefix = run.checkpointer.save(1)
    other = make()
    tables: dict[str, Any] = {**other.tables, "shop": NativeTable(replace(ITEM, name="shop"))}
    checkpointer = Checkpointer(other.checkpointer.saver, [TablesPart(tables)])
    with pytest.raises(RestoreError, match=r"'shop'.*extra_restore_names.*strict=False"):
        checkpointer.restore(prefix)
    report = checkpointer.restore(prefix, RestoreOptions(strict=False)).report
    assert report.missing == ("table shop",)
    assert set(report.unused) == {"dense", "position"}


def test_a_table_that_was_renamed_is_found_by_its_old_name(make: Callable[..., Run]) -> None:
    run = make()
    run.train(1)
    run.train(1)
    prefix = run.checkpointer.save(1)
    renamed: Table = NativeTable(replace(ITEM, name="article", extra_restore_names=("item",)))
    other = make()
    checkpointer = Checkpointer(other.checkpointer.saver, [TablesPart({"article": renamed})])
    report = checkpointer.restore(prefix).report
    assert report.renamed == {"table article": "table item"}
    assert len(renamed) == 1


def test_the_error_of_a_missing_table_names_the_old_names_that_were_tried(make: Callable[..., Run]) -> None:
    run = make()
    prefix = run.checkpointer.save(1)
    other = NativeTable(replace(ITEM, name="article", extra_restore_names=("product", "thing")))
    checkpointer = Checkpointer(run.checkpointer.saver, [TablesPart({"article": other})])
    with pytest.raises(RestoreError, match=r"does not have it, nor its old names 'product', 'thing'; it has"):
        checkpointer.restore(prefix)


def test_a_table_that_was_renamed_begins_a_chain_of_its_own(make: Callable[..., Run]) -> None:
    run = make(full_every=5)
    run.train(1, 2, 3)
    run.train(1, 2, 3)
    prefix = run.checkpointer.save(1)
    config = replace(ITEM, name="article", extra_restore_names=("item",))
    renamed = NativeTable(config)
    part = TablesPart({"article": renamed}, incremental=True)
    checkpointer = Checkpointer(make().checkpointer.saver, [part], full_every=5)
    checkpointer.restore(prefix)
    renamed.apply_gradients(ids(9), torch.ones(1, 2))
    following = checkpointer.save(2)
    assert read_manifest(following).manifest.kind == "full"
    other = NativeTable(config)
    Checkpointer(make().checkpointer.saver, [TablesPart({"article": other})]).restore(following)
    assert len(other) == 4


def test_a_chain_ends_when_a_renamed_table_is_restored(
    make: Callable[..., Run],
) -> None:
    run = make(full_every=5)
    run.train(1, 2, 3)
    prefix = run.checkpointer.save(1)
    renamed = NativeTable(replace(ITEM, name="article", extra_restore_names=("item",)))
    part = TablesPart({"article": renamed}, incremental=True)
    checkpointer = Checkpointer(make().checkpointer.saver, [part], full_every=5)
    checkpointer.save(2)
    checkpointer.restore(prefix)
    assert read_manifest(checkpointer.save(3)).manifest.kind == "full"


def test_names_of_parts_must_differ(make: Callable[..., Run]) -> None:
    run = make()
    with pytest.raises(ConfigError, match="'tables'"):
        Checkpointer(run.checkpointer.saver, [TablesPart({}), TablesPart({})])


# Increments


def test_increments_hold_what_changed_and_restore_in_order(make: Callable[..., Run]) -> None:
    run = make(full_every=4)
    kinds, states = [], []
    for step in range(1, 7):
        run.train(*range(step, step + 3), time=step)
        run.tables["user"].remove(ids(step))
        prefix = run.checkpointer.save(step)
        kinds.append(read_manifest(prefix).manifest.kind)
        states.append((prefix, run.state()))
    assert kinds == ["full", *["incremental"] * 3, "full", "incremental"]
    for prefix, state in states:
        other = make(seed=9)
        restored = other.checkpointer.restore(prefix)
        assert other.state() == state
        assert restored.report.complete


def test_an_increment_is_as_large_as_what_changed(make: Callable[..., Run]) -> None:
    run = make(full_every=2)
    run.train(*range(2000))
    run.train(*range(2000))
    full = read_manifest(run.checkpointer.save(1)).manifest.parts["tables"]["tables"]["item"]
    run.train(*range(20))
    part = read_manifest(run.checkpointer.save(2)).manifest.parts["tables"]["tables"]["item"]
    assert (full["rows"], part["rows"], part["changed"]) == (2000, 2000, 20)
    assert part["bytes"] < full["bytes"] / 10


def test_a_restored_run_continues_with_increments(make: Callable[..., Run]) -> None:
    run = make(full_every=5)
    run.train(1, 2)
    first = run.checkpointer.save(1)
    other = make(full_every=5)
    other.checkpointer.restore(first)
    other.train(2, 3)
    prefix = other.checkpointer.save(2)
    assert read_manifest(prefix).manifest.after == "model.ckpt-1"
    last = make()
    last.checkpointer.restore(prefix)
    assert last.state() == other.state()


def test_changes_of_a_save_that_failed_are_in_the_next_one(make: Callable[..., Run]) -> None:
    run = make(full_every=5)
    run.train(1, 2)
    run.train(1, 2)
    run.checkpointer.save(1)
    run.train(2)
    moment = run.checkpointer.snapshot(2)
    run.train(1)
    moment.close(saved=False)
    prefix = run.checkpointer.save(3)
    other = make()
    other.checkpointer.restore(prefix)
    assert other.state() == run.state()


@pytest.mark.parametrize("full_every", [1, 5])
def test_a_step_that_is_saved_again_has_what_changed_since(make: Callable[..., Run], full_every: int) -> None:
    """A worker that left, or a position that moved on, may change a checkpoint though no step was taken."""
    run = make(full_every=full_every)
    run.train(1)
    first = run.checkpointer.save(1)
    run.train(2)
    assert run.checkpointer.save(1) != first
    run.train(3)
    prefix = run.checkpointer.save(2)
    other = make()
    other.checkpointer.restore(prefix)
    assert other.state() == run.state()


def test_a_checkpoint_that_continues_a_step_saved_again_can_still_be_restored(
    make: Callable[..., Run],
) -> None:
    run = make(full_every=5)
    prefixes = []
    for step in (1, 2, 3):
        run.train(step)
        prefixes.append(run.checkpointer.save(step))
    third = run.state()
    run.checkpointer.restore(prefixes[0])
    run.train(9)
    again = run.checkpointer.save(2)
    other = make()
    other.checkpointer.restore(prefixes[2])
    assert other.state() == third
    other.checkpointer.restore(again)
    assert other.state() == run.state()


def test_a_chain_with_a_link_missing_is_refused(make: Callable[..., Run], tmp_path: Path) -> None:
    run = make(full_every=5)
    for step in (1, 2, 3):
        run.train(step)
        prefix = run.checkpointer.save(step)
    (tmp_path / "run" / "model.ckpt-2.manifest").rename(tmp_path / "gone")
    other = make()
    other.train(50)
    before = other.state()
    with pytest.raises(RestoreError, match=r"continues .*model.ckpt-2, which is not there"):
        other.checkpointer.restore(prefix)
    assert other.state() == before


def test_a_chain_whose_link_was_rewritten_is_refused(make: Callable[..., Run]) -> None:
    run = make(full_every=5)
    run.train(1)
    first = read_manifest(run.checkpointer.save(1))
    run.train(2)
    prefix = run.checkpointer.save(2)
    write_manifest(first.prefix, replace(first.manifest, saved_at=0.0))
    with pytest.raises(RestoreError, match="overwritten since"):
        make().checkpointer.restore(prefix)


def test_a_base_stays_as_long_as_an_increment_needs_it(make: Callable[..., Run], tmp_path: Path) -> None:
    run = make(full_every=4, max_to_keep=2)
    for step in range(1, 10):
        run.train(step, step + 1)
        prefix = run.checkpointer.save(step)
        other = make()
        other.checkpointer.restore(prefix)
        assert other.state() == run.state()
    there = sorted(int(path.stem.rpartition("-")[2]) for path in (tmp_path / "run").glob("*.manifest"))
    assert there == [5, 6, 7, 8, 9]  # 8 needs 5, 6 and 7


# Damage


@pytest.mark.parametrize("full_every", [1, 3])
def test_a_flipped_bit_anywhere_is_refused_by_the_name_of_its_file(
    make: Callable[..., Run], tmp_path: Path, full_every: int
) -> None:
    run = make(full_every=full_every)
    run.train(*range(30))
    run.train(*range(30))
    run.checkpointer.save(1)
    run.train(1, 2)
    run.tables["user"].remove(ids(3))
    prefix = run.checkpointer.save(2)
    folder = tmp_path / "run"
    files = [
        path
        for link in read_chain(prefix)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and Path(link.prefix).name in str(path)
        and (link.prefix == prefix or (".assets" in str(path) and "filter" not in path.name))
    ]
    assert len(files) > 8
    for path in files:
        good = path.read_bytes()
        for at in {0, len(good) // 2, len(good) - 1}:
            path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            with pytest.raises((CorruptFileError, RestoreError), match=path.name.split("-0")[0][:20]):
                make().checkpointer.restore(prefix)
        path.write_bytes(good)
    make().checkpointer.restore(prefix)
