"""A checkpoint, whoever wrote it, becomes a servable; killed in between, the export goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.small_runs import ITEM, USER, chain
from checkpoint.small_servers import Servers
from runtime.fleets import run_fleet
from runtime.rank_runs import train_ranks
from serve.served_tasks import Predicted, Served, columns, exported, predictions, trained
from train.published import Following
from train.tasks import Clicks

from monolith.checkpoint import Checkpointer, Saver, TablesPart, read_chain
from monolith.checkpoint.offline.reading import SavedTables
from monolith.errors import ConfigError, CorruptFileError, ExportError, FileMissingError
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export, task_exporter
from monolith.serve import Predictor
from monolith.serve import exporter as exporting
from monolith.serve.export_tables import ExpiredRows, export_table, saved_history
from monolith.serve.exporter import Exporter
from monolith.serve.manifest import ServableTable, read_servable
from monolith.serve.versions import LockedVersion, list_versions
from monolith.table import DynamicWdAdagrad, Expiry, FrozenTable, NativeTable, Segment, TableConfig
from monolith.train import KeepConfig, SaveConfig, Task, TrainConfig


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return trained(tmp_path_factory.mktemp("run"))


# Tables


def frozen(
    prefix: str, config: TableConfig, path: Path, **how: Any
) -> tuple[dict[int, list[float]], ServableTable]:
    """Export one table; return its rows by id, and what is said of it."""
    saved = saved_history(SavedTables(read_chain(prefix)), config)
    ((made, _),) = export_table(saved, config, {0: str(path)}, "t", **{"coding": "fp32", **how}).values()
    return rows_in(path, made), made


def rows_in(path: Path, made: ServableTable) -> dict[int, list[float]]:
    asked = torch.arange(-50, 50)
    rows = FrozenTable(str(path)).lookup(asked)
    there = {key: row for key, row in zip(asked.tolist(), rows.tolist(), strict=True) if any(row)}
    assert len(there) == made.rows
    return there


def values(state: dict[int, tuple[Any, ...]]) -> dict[int, list[float]]:
    return {key: row[1] for key, row in state.items()}


def test_the_newest_rows_of_a_chain_of_increments_are_exported(tmp_path):
    _, prefixes, states = chain(tmp_path / "run")
    for number, (prefix, state) in enumerate(zip(prefixes, states, strict=True)):
        for config in (ITEM, USER):
            found, _ = frozen(prefix, config, tmp_path / f"{config.name}-{number}")
            assert found == values(state["rows"][config.name])


def test_rows_that_decay_lazily_are_exported_as_a_table_shows_them(tmp_path):
    lazy = DynamicWdAdagrad(learning_rate=0.5, weight_decay=0.2, lazy_decay=True)
    config = TableConfig(name="item", segments=(Segment(dim=2, optimizer=lazy),))
    table = NativeTable(config)
    for step, keys in enumerate((range(1, 9), range(1, 4), [1], [1])):
        table.apply_gradients(torch.tensor(keys), torch.ones(len(keys), 2), step=step)
    saver = Saver(str(tmp_path / "run"), clock=lambda: 1.0)
    prefix = Checkpointer(saver, [TablesPart({"item": table})], clock=lambda: 1000.0).save(4)
    found, _ = frozen(prefix, config, tmp_path / "item")
    shown = table.lookup(torch.arange(1, 9)).tolist()
    assert found == dict(zip(range(1, 9), shown, strict=True))
    assert table.lookup_rows(torch.arange(8, 9))[1].values.tolist() != [found[8]]  # it is stored as it was


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_servers_are_exported_as_those_of_one_process(tmp_path, count):
    servers = Servers(tmp_path / "run", count)
    servers.train(*range(-20, 20))
    servers.save(1)
    servers.train(*range(5), time=2)
    servers.remove("item", 7, -8)
    prefix = servers.save(2)
    found, _ = frozen(prefix, ITEM, tmp_path / "item")
    assert found == values(servers.content()["item"])


def test_rows_are_spread_by_their_id_as_an_unsigned_number_and_read_once(tmp_path):
    run, prefixes, _ = chain(tmp_path / "run")
    saved = saved_history(SavedTables(read_chain(prefixes[-1])), ITEM)
    paths = {share: tmp_path / f"{share}" for share in range(3)}
    read = []
    made = export_table(
        *(saved, ITEM, {share: str(path) for share, path in paths.items()}, "t"),
        coding="fp32",
        shares=3,
        advance=read.append,
    )
    parts = {share: rows_in(path, made[share][0]) for share, path in paths.items()}
    for share, part in parts.items():
        assert {key % (1 << 64) % 3 for key in part} == {share}
    every = values(run.state()["rows"]["item"])
    assert {**parts[0], **parts[1], **parts[2]} == every
    assert sum(read) == len(every)
    again = export_table(saved, ITEM, {1: str(tmp_path / "again")}, "t", coding="fp32", shares=3)
    assert rows_in(tmp_path / "again", again[1][0]) == parts[1]  # the only one that was missing


def test_expired_rows_are_counted_where_they_would_have_been(tmp_path):
    _, prefixes, states = chain(tmp_path / "run")
    expiring = replace(ITEM, expiry=Expiry(default=timedelta(seconds=4)))
    saved = saved_history(SavedTables(read_chain(prefixes[-1])), expiring)
    paths = {share: str(tmp_path / f"{share}") for share in range(2)}
    made = export_table(saved, expiring, paths, "t", coding="fp32", shares=2, expired=ExpiredRows(now=7))
    rows = states[-1]["rows"]["item"]
    for share, (table, _) in made.items():
        mine = {key: row for key, row in rows.items() if key % (1 << 64) % 2 == share}
        kept = {key: row[1] for key, row in mine.items() if 7 - row[0] < 4}
        assert rows_in(Path(paths[share]), table) == kept
        assert table.expired == len(mine) - len(kept)


def test_a_coding_says_what_it_costs(tmp_path):
    _, prefixes, _ = chain(tmp_path / "run")
    exact, plain = frozen(prefixes[-1], ITEM, tmp_path / "a")
    near, half = frozen(prefixes[-1], ITEM, tmp_path / "b", coding="fp16")
    assert (plain.largest_error, plain.mean_error) == (0.0, 0.0)
    off = max(abs(x - y) for key in exact for x, y in zip(exact[key], near[key], strict=True))
    assert half.largest_error == pytest.approx(off)
    assert half.coding == "fp16"


def test_expired_rows_are_left_out_only_where_they_are_dropped_in_training(tmp_path):
    _, prefixes, states = chain(tmp_path / "run")
    expiring = replace(ITEM, expiry=Expiry(default=timedelta(seconds=4)))
    rows = states[-1]["rows"]["item"]
    kept, made = frozen(prefixes[-1], expiring, tmp_path / "a")
    assert (len(kept), made.expired) == (len(rows), 0)
    kept, made = frozen(prefixes[-1], expiring, tmp_path / "b", expired=ExpiredRows(now=7))
    assert kept == {key: row[1] for key, row in rows.items() if 7 - row[0] < 4}
    assert made.expired == len(rows) - len(kept) > 0
    kept, made = frozen(prefixes[-1], expiring, tmp_path / "c", expired=ExpiredRows(now=7, max_share=0.1))
    assert (len(kept), made.expired) == (len(rows), 0)  # so many at once look like a wrong clock
    kept, made = frozen(prefixes[-1], ITEM, tmp_path / "d", expired=ExpiredRows(now=7))
    assert (len(kept), made.expired) == (len(rows), 0)  # these live for ever


def test_a_table_of_another_width_is_refused(tmp_path):
    _, prefixes, _ = chain(tmp_path / "run")
    with pytest.raises(
        ExportError, match="table 'user': the checkpoint has 2 floats per row, the model reads 3"
    ):
        frozen(prefixes[-1], replace(ITEM, name="user"), tmp_path / "a")


def test_a_table_that_the_checkpoint_knows_by_an_old_name_is_found(tmp_path):
    _, prefixes, states = chain(tmp_path / "run")
    renamed = replace(ITEM, name="goods", extra_restore_names=("item",))
    assert frozen(prefixes[-1], renamed, tmp_path / "a")[0] == values(states[-1]["rows"]["item"])


# Of one process, of servers, of ranks


def newest_step(folder: Path) -> int:
    return max(int(path.name.split("-")[1].split(".")[0]) for path in folder.glob("model.ckpt-*.manifest"))


def same_as_trainer(folder: Path, task: Task, root: Path) -> int:
    """Export the newest checkpoint of a run, compare it with the trainer, and return its rows."""
    config = TrainConfig(model_dir=str(folder), summary_every_steps=None)
    made = exported(config, root, step=newest_step(folder), task=task)
    with Predictor(str(root), show=False) as predictor:
        for batch, wanted in Trainer(task, config).predict(steps=2):
            found = predictor.predict_batch(batch).outputs
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[head], wanted[head]) for head in wanted)
    return made.servable.rows


TASK = Clicks(batches=8, batch_size=16)


def test_a_checkpoint_of_increments_is_served_as_the_trainer_predicts(tmp_path):
    trained(tmp_path / "run", TASK, steps=8, keep=KeepConfig(full_every=10))
    assert same_as_trainer(tmp_path / "run", TASK, tmp_path / "to") > 50


def test_a_checkpoint_of_servers_is_served_as_the_trainer_predicts(tmp_path):
    run_fleet(TASK, tmp_path / "run", num_ps=2, num_workers=1)
    assert same_as_trainer(tmp_path / "run", TASK, tmp_path / "to") > 50


def test_a_checkpoint_of_ranks_is_served_as_the_trainer_predicts(tmp_path):
    config = TrainConfig(
        model_dir=str(tmp_path / "run"), summary_every_steps=None, steps=4, save=SaveConfig(steps=4)
    )
    train_ranks([replace(TASK, seed=rank) for rank in range(2)], config)
    assert same_as_trainer(tmp_path / "run", TASK, tmp_path / "to") > 50


# The folder


def test_a_version_has_all_that_there_is_to_know(config, tmp_path):
    made = exported(config, tmp_path, coding="fp16", codings={"user": "int8"})
    folder = Path(made.folder)
    assert folder == tmp_path / "6"
    servable = read_servable(str(folder))
    assert servable == made.servable
    assert (servable.model, servable.version, servable.step) == ("served", "6", 6)
    assert servable.checkpoint == "model.ckpt-6"
    assert {name: one.coding for name, one in servable.tables.items()} == {
        "item": "fp16",
        "tags": "fp16",
        "user": "int8",
    }
    assert 0 < servable.tables["user"].largest_error < 0.01
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*servable.files, "servable.json", ".held"}
    assert servable.bytes == made.bytes
    requests = json.loads((folder / "warmup.json").read_text())["requests"]
    assert [one["inputs"][0]["shape"] for one in requests] == [[1], [32], [1], [30]]


def test_a_sharded_servable_has_an_entry_and_its_servers_rows(config, tmp_path):
    made = exported(config, tmp_path, shards=2, missing_rows="default")
    whole = exported(config, tmp_path / "whole").servable
    assert made.folder == str(tmp_path / "entry" / "6")
    assert (made.servable.part, made.servable.shards, made.servable.missing_rows) == ("entry", 2, "default")
    assert made.servable.rows == whole.rows
    assert not any(name.endswith(".rows") for name in made.servable.files)
    parts = [read_servable(str(tmp_path / f"ps_{n}" / "6")) for n in range(2)]
    assert [one.part for one in parts] == ["ps_0", "ps_1"]
    assert sum(one.rows for one in parts) == whole.rows
    assert all(one.dense is None and one.tables.keys() == whole.tables.keys() for one in parts)
    assert made.bytes == made.servable.bytes + sum(one.bytes for one in parts)


def test_an_export_says_from_where_on_a_server_that_follows_reads(tmp_path):
    task = Served()
    following = Following(task)
    config = TrainConfig(model_dir=str(tmp_path / "run"), steps=6, summary_every_steps=None)
    Trainer(task, config, publish=following.plan).train()
    found = exported(config, tmp_path / "to", shards=2).servable
    (place,) = found.log_places.values()
    assert place[0] == following.deltas[0].position.epoch
    assert 0 <= place[1] <= following.deltas[-1].position.sequence
    assert read_servable(str(tmp_path / "to" / "ps_1" / "6")).log_places == found.log_places


def test_places_in_the_log_that_make_no_sense_are_refused():
    assert exporting._log_places("p", {}) == {}
    with pytest.raises(CorruptFileError, match="its offsets in the delta log cannot be read"):
        exporting._log_places("p", {"value": {"0": ["e", 3]}})


def test_the_same_export_again_leaves_what_is_there(config, tmp_path):
    first = exported(config, tmp_path)
    changed = Path(first.folder, "servable.json").stat().st_mtime_ns
    again = exported(config, tmp_path)
    assert again.was_there
    assert Path(again.folder, "servable.json").stat().st_mtime_ns == changed
    with pytest.raises(ExportError, match=r"exists already.*--version"):
        exported(config, tmp_path, coding="int8")


def test_a_killed_export_resumes_with_the_tables_that_are_complete(config, tmp_path, monkeypatch):
    written: list[str] = []
    real = exporting.export_table

    def dies_at_the_second(*args: Any, **how: Any) -> Any:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(args[1].name)
        return real(*args, **how)

    monkeypatch.setattr(exporting, "export_table", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        exported(config, tmp_path)
    assert list_versions(str(tmp_path)) == []

    def counts(*args: Any, **how: Any) -> Any:
        written.append(args[1].name)
        return real(*args, **how)

    monkeypatch.setattr(exporting, "export_table", counts)
    exported(config, tmp_path)
    assert written == ["item", "tags", "user"]
    assert [path.name for path in tmp_path.iterdir()] == ["6"]
    (wanted,) = predictions(config, Predicted(rows=3))
    with Predictor(str(tmp_path), show=False) as predictor:
        assert torch.equal(predictor.predict(columns(3, seed=9)).outputs["click"], wanted["click"])


def test_a_killed_sharded_export_resumes_with_what_is_complete(config, tmp_path, monkeypatch):
    written: list[str] = []
    real = exporting.export_table

    def dies_at_the_second(*args: Any, **how: Any) -> Any:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(args[1].name)
        return real(*args, **how)

    monkeypatch.setattr(exporting, "export_table", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        exported(config, tmp_path, shards=2)
    with pytest.raises(FileMissingError):
        Predictor(str(tmp_path), show=False)  # there is no entry yet

    def counts(*args: Any, **how: Any) -> Any:
        written.append(args[1].name)
        return real(*args, **how)

    monkeypatch.setattr(exporting, "export_table", counts)
    commit = Exporter._commit

    def dies_before_the_entry(self: Exporter, job: Any, new: Any, servable: Any) -> Any:
        if servable.part == "entry":
            raise KeyboardInterrupt
        return commit(self, job, new, servable)

    monkeypatch.setattr(Exporter, "_commit", dies_before_the_entry)
    with pytest.raises(KeyboardInterrupt):
        exported(config, tmp_path, shards=2)
    assert written == ["item", "tags", "user"]
    monkeypatch.setattr(Exporter, "_commit", commit)
    first = (tmp_path / "ps_0" / "6" / "servable.json").stat().st_mtime_ns
    exported(config, tmp_path, shards=2)
    assert (tmp_path / "ps_0" / "6" / "servable.json").stat().st_mtime_ns == first
    assert written == ["item", "tags", "user"]
    assert list_versions(str(tmp_path / "entry")) == list_versions(str(tmp_path / "ps_1")) == ["6"]


@pytest.mark.parametrize("shards", [0, 2])
def test_only_the_newest_versions_and_those_in_use_stay(config, tmp_path, shards):
    how = replace(how_to_export(ExportConfig(shards=shards), config), keep=1)
    part = tmp_path / "ps_0" if shards else tmp_path
    exported(config, tmp_path, step=3, how=how)
    with LockedVersion(str(part / "3")):
        assert exported(config, tmp_path, step=6, how=how).in_use == ("3",)
    assert exported(config, tmp_path, step=6, how=how).removed == ("3",)
    assert list_versions(str(part)) == ["6"]


def test_a_checkpoint_that_is_not_there_is_refused(config, tmp_path):
    with pytest.raises(FileMissingError):
        exported(config, tmp_path, step=5)


def test_a_coding_of_an_unknown_table_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="no table 'goods'; there are item, tags, user"):
        exported(config, tmp_path, codings={"goods": "int8"})


def test_training_and_its_random_numbers_notice_nothing(config):
    before = torch.random.get_rng_state()
    with task_exporter(Served(), config, how_to_export(ExportConfig(), config)):
        pass
    assert torch.equal(torch.random.get_rng_state(), before)
