"""`monolith checkpoint list | inspect | diff | reshard | export | compact`: what people see."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import small_servers
from checkpoint.small_runs import SmallRun, chain, flip
from contracts.tables import LinkingTieredTable, ids

from monolith.checkpoint import Listed
from monolith.cli import checkpoint as command
from monolith.cli.main import main
from monolith.data.formats.memory import to_records
from monolith.feature import BucketFeature, FeatureSpec, IdFeature


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def prefixes(folder: Path) -> list[str]:
    return chain(folder)[1]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["checkpoint", *arguments]) == status
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        return found.err if status == 2 else found.out

    return run


# whose checkpoints


def test_the_config_file_of_a_run_names_its_checkpoints(
    prefixes: list[str], folder: Path, tmp_path: Path, printed: Any
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[train]\nmodel_dir = "{folder}"\n')
    listed = json.loads(printed("list", "--config", str(config), "--json"))
    assert [one["prefix"] for one in listed["checkpoints"]] == prefixes
    steps = [one["step"] for one in listed["checkpoints"]]
    for words, step in (((), steps[-1]), ((str(steps[0]),), steps[0]), ((Path(prefixes[1]).name,), steps[1])):
        found = json.loads(printed("inspect", *words, "--config", str(config), "--json"))
        assert found["step"] == step
    names = [str(step) for step in steps[:2]]
    found = json.loads(printed("diff", *names, "--config", str(config), "--json"))
    assert (found["before"], found["after"]) == (prefixes[0], prefixes[1])


def test_whose_checkpoints_are_meant_must_be_said_once(
    prefixes: list[str], folder: Path, tmp_path: Path, printed: Any
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[train]\nmodel_dir = "{folder}"\n')
    assert "give the config file of the run as --config" in printed("list", status=2)
    assert "both name the run" in printed("list", str(folder), "--config", str(config), status=2)
    missing = printed("inspect", "77", "--config", str(config), status=2)
    assert f"there is no checkpoint 77 in {folder}; it has {Path(prefixes[0]).name}" in missing
    config.write_text("")
    assert "has no train.model_dir" in printed("inspect", "--config", str(config), status=2)


# list


def test_checkpoints_are_listed_with_what_they_hold(prefixes: list[str], folder: Path, printed: Any) -> None:
    text = printed("list", str(folder))
    assert [name for name in map(Path, prefixes) if name.name not in text] == []
    assert "3 after model.ckpt-1" in text
    assert "latest" in text
    assert "ok" in text


def test_a_listing_as_json(prefixes: list[str], folder: Path, printed: Any) -> None:
    found = json.loads(printed("list", str(folder), "--json"))
    assert [one["name"] for one in found["checkpoints"]] == [Path(prefix).name for prefix in prefixes]
    last = found["checkpoints"][-1]
    assert (last["latest"], last["listed"], last["exempt"], last["ok"]) == (True, True, False, True)
    assert last["chain"] == prefixes
    assert last["rows"]["user"] == 4


def test_damage_in_a_listing_is_named_and_the_status_is_1(
    prefixes: list[str], folder: Path, printed: Any
) -> None:
    path = next(Path(f"{prefixes[0]}.assets").glob("user.*-of-*"))
    path.write_bytes(path.read_bytes()[:-64])
    text = printed("list", str(folder), status=1)
    assert path.name in text
    assert "damaged" in text
    found = json.loads(printed("list", str(folder), "--json", status=1))
    assert [one["ok"] for one in found["checkpoints"]] == [False] * 4


def test_a_folder_without_checkpoints_and_no_folder(tmp_path: Path, printed: Any) -> None:
    assert "no checkpoints" in printed("list", str(tmp_path))
    assert "there is no folder" in printed("list", str(tmp_path / "none"), status=2)


# inspect


def test_the_latest_checkpoint_of_a_run_is_shown(prefixes: list[str], folder: Path, printed: Any) -> None:
    text = printed("inspect", str(folder), "--details")
    assert prefixes[-1] in text
    assert "model.ckpt-1 < model.ckpt-2 < model.ckpt-3 < model.ckpt-4" in text
    assert "1 x dynamic_wd_adagrad" in text
    assert "weight" in text
    assert '{"next": 114}' in text
    assert "filter of item: sliding" in text
    assert "verified: all checksums match" in printed("inspect", str(folder), "--verify")


def test_long_values_are_shown_in_lines_below_each_other() -> None:
    assert command.in_lines({"next": 114}) == '{"next": 114}'
    shown = command.in_lines({"finished": [f"clicks/day-{day}.parquet" for day in range(500)], "next": 3})
    assert max(map(len, shown.splitlines())) <= command.LINE + 2
    assert shown.splitlines()[0] == ""
    assert "day-499.parquet" in shown


def test_linked_files_of_tiered_tables_are_counted(folder: Path, printed: Any) -> None:
    run = SmallRun(folder, kind=LinkingTieredTable)
    run.train(*range(200))
    run.save(1)
    assert re.search(r"user +200 +all +1 \+ \d+ linked ", printed("inspect", str(folder), "--details"))
    found = json.loads(printed("inspect", str(folder), "--json", "--verify"))
    assert [(one["shards"], one["linked"] > 0) for one in found["tables"]] == [(1, True), (1, True)]


def test_a_checkpoint_is_summed_up_in_a_line_for_each_table_and_part(
    prefixes: list[str], folder: Path, printed: Any
) -> None:
    lines = printed("inspect", str(folder)).splitlines()
    assert lines[0] == prefixes[-1]
    assert re.match(r"step 4, saved .* kB", lines[1])
    assert [line.split() for line in lines if " table " in line] == [
        ["table", "rows", "dim", "changed", "removed", "size", "newest"]
    ]
    (item,) = [line.split() for line in lines if line.startswith("  item ")]
    assert item[2] == "3"
    assert [line for line in lines if re.match(r"  dense     \d+ weights in \d+ variables", line)]
    assert '  position  {"next": 114}' in lines
    assert [line for line in lines if line.startswith("  filters   item: sliding")]
    assert lines[-1] == "ok; --verify reads every byte; --details shows every variable, setting and position"
    assert len(lines) < 20


def test_contents_as_json(prefixes: list[str], printed: Any) -> None:
    found = json.loads(printed("inspect", prefixes[2], "--json", "--verify"))
    assert (found["step"], found["kind"], found["ok"]) == (3, "incremental", True)
    assert [table["name"] for table in found["tables"]] == ["item", "user"]
    assert found["tables"][1]["cleared"] is True
    assert found["variables"][1]["shape"] == [1, 2]


def test_one_table_may_be_shown(prefixes: list[str], printed: Any) -> None:
    found = json.loads(printed("inspect", prefixes[2], "--json", "--table", "user"))
    assert [table["name"] for table in found["tables"]] == ["user"]
    assert "item, user" in printed("inspect", prefixes[2], "--table", "shop", status=2)


@pytest.mark.parametrize("key", ["-20", "7"])
def test_a_row_is_shown_with_its_state_by_name(folder: Path, printed: Any, key: str) -> None:
    chain(folder)
    text = printed("inspect", str(folder), "--table", "item", "--id", key)
    assert f"item {key} in model.ckpt-4: written by model.ckpt-{1 if key == '-20' else 4}" in text
    for word in ("embedding", "norm", "last_step", "2 x adagrad"):
        assert word in text
    found = json.loads(printed("inspect", str(folder), "--table", "item", "--id", key, "--json"))
    assert (found["status"], found["id"]) == ("found", int(key))
    assert isinstance(found["segments"][0]["state"]["last_step"], int)


def test_a_row_that_is_not_there_is_told_with_why(folder: Path, printed: Any) -> None:
    chain(folder)
    assert "removed at model.ckpt-2" in printed("inspect", str(folder), "--table", "item", "--id", "-8")
    assert "cleared, at model.ckpt-3" in printed("inspect", str(folder), "--table", "user", "--id", "20")
    assert "no row" in printed("inspect", str(folder), "--table", "item", "--id", "777")
    assert "--table, one of: item, user" in printed("inspect", str(folder), "--id", "1", status=2)


def test_a_row_is_found_by_the_value_that_the_data_has(folder: Path, printed: Any) -> None:
    features = {
        "user": IdFeature(kind="string"),
        "item": IdFeature(),
        "level": BucketFeature(column="price", boundaries=(1.0, 2.0), rows="item"),
    }
    spec = FeatureSpec(features=features, labels={})
    run = SmallRun(folder, spec=spec)
    user = spec.only(["user"]).make(to_records({"user": ["u_60ef"]})).ids["user"].flat_values
    run.tables["user"].assign(user, torch.ones(1, run.tables["user"].dim))
    for _ in range(2):  # an item gets a row when it is seen again
        run.tables["item"].assign(ids(7, 2), torch.ones(2, run.tables["item"].dim))
    run.save(1)
    inspect = partial(printed, "inspect", str(folder), "--id")
    assert f"user u_60ef (id {user.item()}) in model.ckpt-1: written by" in inspect("u_60ef")
    found = json.loads(inspect("u_60ef", "--feature", "user", "--json"))
    assert (found["id"], found["status"], found["feature"]) == (user.item(), "found", "user")
    assert "item 7 in model.ckpt-1: written by" in inspect("7")
    assert "item 2.5 (id 2) in model.ckpt-1: written by" in inspect("2.5", "--feature", "level")
    assert "(id " in (missing := inspect("u_0000"))
    assert "no row, neither here" in missing
    assert "777 in model.ckpt-1: no row in any of user, item" in inspect("777")
    assert f"user {user.item()} in model.ckpt-1: written" in inspect(str(user.item()), "--table", "user")
    assert "'u_60ef' is no value of item" in inspect("u_60ef", "--feature", "item", status=2)
    assert "did you mean 'user'?" in inspect("u_60ef", "--feature", "usr", status=2)


def test_a_value_that_several_features_have_needs_the_feature(folder: Path, printed: Any) -> None:
    spec = FeatureSpec(features={"user": IdFeature(), "item": IdFeature()}, labels={})
    run = SmallRun(folder, spec=spec)
    for table in (*run.tables.values(), run.tables["item"]):
        table.assign(ids(7), torch.ones(1, table.dim))
    run.save(1)
    said = printed("inspect", str(folder), "--id", "7", status=2)
    assert "'7' has a row in each of user, item; choose one with --feature" in said
    assert "item 7 in model.ckpt-1" in printed("inspect", str(folder), "--id", "7", "--feature", "item")


def test_a_number_that_is_none_does_not_break_json(folder: Path, printed: Any) -> None:
    run = SmallRun(folder)
    run.tables["user"].assign(ids(5), torch.tensor([[float("nan"), float("inf")]]))
    run.save(1)
    found = json.loads(printed("inspect", str(folder), "--table", "user", "--id", "5", "--json"))
    assert found["segments"][0]["values"] == ["nan", "inf"]


def test_damage_is_named_and_the_status_is_1(prefixes: list[str], folder: Path, printed: Any) -> None:
    path = next(Path(f"{prefixes[0]}.assets").glob("user.*-of-*"))
    flip(path)
    assert "ok; --verify" in printed("inspect", str(folder))
    assert path.name in printed("inspect", str(folder), "--verify", status=1)
    found = json.loads(printed("inspect", str(folder), "--verify", "--json", status=1))
    assert (found["ok"], len(found["problems"])) == (False, 1)


@pytest.mark.parametrize("more", [[], ["--json"], ["--table", "item", "--id", "3"]])
def test_a_damaged_manifest_is_named(
    prefixes: list[str], folder: Path, printed: Any, more: list[str]
) -> None:
    flip(Path(f"{prefixes[-1]}.manifest"))
    assert "model.ckpt-4.manifest" in printed("inspect", str(folder), *more, status=1)


def test_what_does_not_exist_is_one_line_with_what_does(
    prefixes: list[str], folder: Path, printed: Any
) -> None:
    text = printed("inspect", str(folder / "model.ckpt-9"), status=2)
    assert text.count("\n") == 1
    assert all(Path(prefix).name in text for prefix in prefixes)


# diff


def test_what_changed_is_shown(prefixes: list[str], printed: Any) -> None:
    text = printed("diff", prefixes[0], prefixes[1], "--details")
    for words in ("moved furthest", "position before", '{"next": 106}', "weight", "changed"):
        assert words in text
    found = json.loads(printed("diff", prefixes[0], prefixes[1], "--json", "--top", "2"))
    item = found["tables"][0]
    assert (item["name"], item["removed"], len(item["largest"])) == ("item", 2, 2)
    assert found["same"] is False


def test_a_difference_is_summed_up_in_a_line_for_each_table_and_part(
    prefixes: list[str], printed: Any
) -> None:
    lines = printed("diff", prefixes[0], prefixes[1]).splitlines()
    assert re.fullmatch(r"model.ckpt-1 \(step 1, .* kB\) and model.ckpt-2 \(step 2, .* kB\)", lines[0])
    table = [line.split() for line in lines if line.strip().startswith(("table", "item", "user"))]
    assert table[0][0] == "table"
    assert " ".join(table[0][1:]) == "rows before rows after added removed changed only time"
    assert [row[0] for row in table[1:]] == ["item", "user"]
    assert all(len(row) == 7 for row in table[1:])
    (dense,) = [line for line in lines if line.startswith("  dense")]
    assert re.search(r"variables: \d+ changed.*; .* by up to \d", dense)
    assert '  position  {"next": 100}, then {"next": 106}' in lines
    assert not [line for line in lines if "moved furthest" in line and "--details" not in line]
    assert len(lines) < 20


def test_equal_checkpoints_are_told_to_be_equal(prefixes: list[str], printed: Any) -> None:
    assert "the two are identical, bit for bit" in printed("diff", prefixes[3], prefixes[3])
    assert json.loads(printed("diff", prefixes[3], prefixes[3], "--json"))["same"] is True


def test_a_broken_chain_cannot_be_compared(prefixes: list[str], printed: Any) -> None:
    Path(f"{prefixes[1]}.manifest").unlink()
    assert "model.ckpt-2, which is not there" in printed("diff", prefixes[0], prefixes[3], status=1)
    found = json.loads(printed("diff", prefixes[0], prefixes[3], "--json", status=1))
    assert found["ok"] is False


# reshard, compact, export


def test_a_checkpoint_is_resharded(prefixes: list[str], folder: Path, tmp_path: Path, printed: Any) -> None:
    to = str(tmp_path / "to")
    assert "written to" in printed("reshard", str(folder), "--to", to, "--num-shards", "3")
    assert "the two are identical, bit for bit" in printed("diff", prefixes[-1], to)
    assert "has a checkpoint model.ckpt-4" in printed("reshard", str(folder), "--to", to, status=2)
    found = json.loads(printed("reshard", prefixes[0], "--to", str(tmp_path / "other"), "--json"))
    assert found["chain"] == [prefixes[0]]
    assert "--to" in printed("reshard", str(folder), status=2)
    assert "--num-shards" in printed("reshard", str(folder), "--to", to, "--num-shards", "0", status=2)


def test_a_chain_is_compacted(prefixes: list[str], folder: Path, printed: Any) -> None:
    text = printed("compact", str(folder))
    assert "full now, made of 4 checkpoints" in text
    assert "kept, listed or needed by one that is: model.ckpt-1, model.ckpt-2" in text
    assert "was full already" in printed("compact", str(folder))
    assert json.loads(printed("inspect", str(folder), "--json"))["kind"] == "full"
    assert "model.ckpt-3 continues it" in printed("compact", prefixes[1], status=2)
    found = json.loads(printed("compact", prefixes[2], "--json"))
    assert found["chain"] == prefixes[:3]


def test_a_checkpoint_is_exported(folder: Path, tmp_path: Path, printed: Any) -> None:
    chain(folder)
    to = tmp_path / "to"
    assert "rows of item" in printed("export", str(folder), "--to", str(to))
    assert sorted(path.name for path in to.iterdir()) == [
        "dense.safetensors",
        "item-00000-of-00001",
        "user-00000-of-00001",
    ]
    more = ["--tables", "user", "--no-dense", "--json"]
    found = json.loads(printed("export", str(folder), "--to", str(tmp_path / "user"), *more))
    assert [Path(path).name for path in found["files"]] == ["user-00000-of-00001"]
    assert "has no table 'shop'" in printed(
        "export", str(folder), "--to", str(to), "--tables", "shop", status=2
    )
    assert "--to" in printed("export", str(folder), status=2)


def test_what_went_with_a_chain_is_told(folder: Path, printed: Any) -> None:
    chain(folder, max_to_keep=1)
    assert "deleted: model.ckpt-1, model.ckpt-2, model.ckpt-3" in printed("compact", str(folder))


@pytest.mark.parametrize("verb", ["reshard", "export", "compact"])
def test_damage_stops_the_writing_and_the_status_is_1(
    prefixes: list[str], folder: Path, tmp_path: Path, printed: Any, verb: str
) -> None:
    path = next(Path(f"{prefixes[0]}.assets").glob("item.*-of-*"))
    flip(path)
    to = [] if verb == "compact" else ["--to", str(tmp_path / "to")]
    assert path.name in printed(verb, str(folder), *to, status=1)


# Around them


def test_help_answers_without_torch() -> None:
    code = (
        "import sys; from monolith.cli.main import main; "
        "status = main(['checkpoint', 'diff', '--help']); sys.exit(status or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("verb", ["list", "inspect"])
def test_commands_that_only_read_do_not_import_torch(prefixes: list[str], folder: Path, verb: str) -> None:
    code = (
        "import sys; from monolith.cli.main import main; status = main(sys.argv[1:]); "
        "sys.exit(status or (3 if 'torch' in sys.modules else 0))"
    )
    command = [sys.executable, "-c", code, "checkpoint", verb, str(folder)]
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert Path(prefixes[-1]).name in done.stdout


def test_many_tables_are_counted_together() -> None:
    one = Listed(
        prefix="/x/model.ckpt-1",
        step=1,
        saved_at=None,
        kind="full",
        chain=("/x/model.ckpt-1",),
        bytes=0,
        rows={f"table{number}": 1000 for number in range(12)},
        marks=(),
        problem=None,
    )
    assert command.rows_text(one) == "12,000\nin 12 tables"


def test_long_rows_are_cut_for_people() -> None:
    assert command.numbers([1.0] * 3) == "1, 1, 1"
    assert command.numbers([0.5] * 20).endswith("... (20)")


# Of several servers


def test_a_checkpoint_of_several_servers_is_shown_as_one(folder: Path, tmp_path: Path, printed: Any) -> None:
    _, prefixes, contents = small_servers.chain(folder, 2, 2, 2, 2, filters=True)
    assert f"item {len(contents[-1]['item']):,}" in printed("list", str(folder))
    text = printed("inspect", str(folder), "--verify", "--details")
    assert "2 of 2 servers" in text
    assert "filter of item: sliding, of 2 servers" in text
    assert "verified: all checksums match" in text
    assert "ps-1 cleared first" in printed("inspect", prefixes[2], "--details")
    for key in (7, 8):
        assert f"user {key} in model.ckpt-4: written by" in printed(
            "inspect", str(folder), "--table", "user", "--id", str(key)
        )
    assert "written to" in printed("reshard", str(folder), "--to", str(tmp_path / "to"))
    assert "the two are identical, bit for bit" in printed("diff", str(folder), str(tmp_path / "to"))
    assert "2 files" in printed("export", str(folder), "--to", str(tmp_path / "exported"))
    assert "is full now" in printed("compact", str(folder))
    assert "the two are identical, bit for bit" in printed("diff", str(folder), str(tmp_path / "to"))


def test_a_missing_piece_is_named_and_the_status_is_1(folder: Path, printed: Any) -> None:
    _, prefixes, _ = small_servers.chain(folder, 2, 2, 2, 2)
    Path(f"{prefixes[0]}.assets/ps-1-of-2/user.manifest").unlink()
    for arguments in (("list",), ("inspect",)):
        text = printed(*arguments, str(folder), status=1)
        assert "shard ps-1-of-2 of model.ckpt-1" in text
