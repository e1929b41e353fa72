"""docs/checkpoint-format.md names every file that a run leaves, and no other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.small_runs import USER, SmallRun
from checkpoint.small_servers import Servers
from contracts.tables import LinkingTieredTable
from train.tasks import Clicks

from monolith.checkpoint import TablesPart
from monolith.runtime import Trainer
from monolith.train import KeepConfig, RestoreConfig, TrainConfig
from monolith.train.hooks import SaveConfig

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
HOLES = {
    "-<step>": r"(\.\d+)?-\d+",  # with a number before it if the step was saved again
    "<table>": r"(?!hash_filter_)\w+",
    "<dump>": r"[0-9a-f]{16}",
    "<i>": r"\d{5}",
    "<n>": r"\d{5}",
    "<k>": r"\d+",
    "<m>": r"\d+",
    "<rest>": r".+",
}


def named(of_servers: bool) -> list[str]:
    """Return the patterns of one of the two tables of files."""
    alone, served = (
        PAGE.split("## Files of a model_dir")[1]
        .split("## The manifest")[0]
        .split("Each parameter server writes")
    )
    return re.findall(r"^\| `([^`]+)` \|", served if of_servers else alone, flags=re.MULTILINE)


def matching(pattern: str, files: set[str]) -> set[str]:
    wanted = re.escape(pattern)
    for hole, form in HOLES.items():
        wanted = wanted.replace(re.escape(hole), form)
    return {file for file in files if re.fullmatch(wanted, file)}


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of three runs: one with increments and filters, one that starts from it, and one with tiered
    tables."""
    first, second, third = (tmp_path_factory.mktemp(name) for name in ("first", "second", "third"))
    task = Clicks(batches=12, threshold=1)
    config = TrainConfig(
        model_dir=str(first),
        save=SaveConfig(steps=4),
        dense_save=SaveConfig(steps=3),
        keep=KeepConfig(full_every=2),
        summary_every_steps=4,
    )
    Trainer(task, config).train()
    back = RestoreConfig(checkpoint="model.ckpt-4")
    Trainer(task, replace(config, restore=back, max_steps=10)).train()
    warm = RestoreConfig(dir=str(first), reset_dense=True)
    Trainer(task, replace(config, model_dir=str(second), restore=warm, steps=4)).train()
    tiered = SmallRun(third, kind=LinkingTieredTable)
    tiered.train(*range(200))
    tiered.save(1)
    return files_below(first) | files_below(second) | files_below(third)


@pytest.fixture(scope="module")
def of_servers(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The tables in full checkpoints and in an increment of two servers."""
    folder = tmp_path_factory.mktemp("servers")
    servers = Servers(folder, 2, filters=True)
    servers.train(1, 2, 3, 4)
    servers.save(1)
    servers.train(1, 2)
    servers.save(2)
    for k in range(2):
        table = LinkingTieredTable(USER)
        table.assign(torch.arange(k, 400, 2), torch.ones(200, 2))
        snapshot = TablesPart({"user": table}, shard=(k, 2)).snapshot(3)
        snapshot.write(str(folder / "model.ckpt-3"), full=True)
        snapshot.close(saved=True)
    return {file for file in files_below(folder) if ".assets/" in file}


@pytest.mark.parametrize("table", ["of_one_process", "of_servers"])
def test_a_run_writes_what_the_page_names_and_nothing_else(
    table: str, request: pytest.FixtureRequest
) -> None:
    files: set[str] = request.getfixturevalue(table)
    patterns = named(table == "of_servers")
    assert len(patterns) > 4
    found = {pattern: matching(pattern, files) for pattern in patterns}
    assert [pattern for pattern, matches in found.items() if not matches] == []
    assert sorted(files - set().union(*found.values())) == []
