"""Importing and exporting checkpoints of the original: names, slots, steps, tables, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import ids
from torch import nn

from monolith.checkpoint import Checkpointer, DensePart, Saver, TablesPart
from monolith.checkpoint.original import (
    ImportReport,
    ImportTarget,
    NameMap,
    OriginalCheckpoint,
    TensorBundle,
    export_original,
    import_original,
    write_bundle,
)
from monolith.checkpoint.original.names import NameRule
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, RestoreError
from monolith.nn.optimizers import Adamom, EagerAdam, RMSprop
from monolith.table import Adagrad, NativeTable, Segment, Sgd, TableConfig, encode_entry_dumps, tfrecord

DATA = Path(__file__).parent / "data"
SAME = NameMap()
TOWER = NameMap(
    variables=(
        NameRule("dense/kernel", "first.weight", transpose=True),
        NameRule("dense/bias", "first.bias"),
        NameRule("top/kernel", "top.weight", transpose=True),
        NameRule("wide", None),
    )
)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 2)
        self.top = nn.Linear(2, 1, bias=False)


def table(name: str, dim: int = 2, optimizer: Any = None) -> NativeTable:
    return NativeTable(
        TableConfig(
            name=name, segments=(Segment(dim=dim, optimizer=optimizer or Adagrad(), learning_rate=0.5),)
        )
    )


def filled(name: str, *keys: int, dim: int = 2) -> NativeTable:
    made = table(name, dim)
    made.apply_gradients(ids(*keys), torch.rand(len(keys), dim), event_time=5)
    return made


def rows(of: Any) -> dict[int, tuple[list[float], list[float]]]:
    found = of.scan(limit=1 << 20).rows
    return {
        i: (v, s)
        for i, v, s in zip(found.ids.tolist(), found.values.tolist(), found.state.tolist(), strict=True)
    }


def imported(source: str | Path, model: nn.Module, names: NameMap = SAME, **how: Any) -> ImportReport:
    target = ImportTarget(how.pop("tables", {}), model, how.pop("optimizer", None))
    return import_original(OriginalCheckpoint.find(str(source)), names, target, **how)


def why(report: ImportReport, original: str) -> str:
    (found,) = (one.detail for one in report.left_out if one.original == original)
    return found


# What TensorFlow trained


def test_a_model_that_tensorflow_trained_resumes_here_as_it_would_there() -> None:
    model = Tower()
    optimizer = EagerAdam(model.parameters(), lr=0.01)
    report = imported(DATA / "partitioned", model, TOWER, optimizer=optimizer)
    bundle = TensorBundle(str(DATA / "partitioned/model.ckpt-2"))
    assert torch.equal(model.first.weight, bundle.read("dense/kernel").t())
    assert torch.equal(model.top.weight, bundle.read("top/kernel").t())
    state = optimizer.state[model.first.weight]
    assert torch.equal(state["exp_avg"], bundle.read("dense/kernel/Adam").t())
    assert torch.equal(state["exp_avg_sq"], bundle.read("dense/kernel/Adam_1").t())
    assert state["step"] == 2, "beta2_power is the third power of 0.999"
    assert (report.step, report.missing) == (2, [])
    assert why(report, "wide").endswith("left out by the name map")
    assert why(report, "wide/Adam") == "left out by the name map"


def test_state_of_another_optimizer_is_left_out_and_said_so() -> None:
    model = Tower()
    optimizer = torch.optim.Adagrad(model.parameters())
    report = imported(DATA / "partitioned", model, TOWER, optimizer=optimizer)
    assert why(report, "dense/bias/Adam") == "state of Adam; here Adagrad trains the weights"
    assert float(optimizer.state[model.first.bias]["sum"].sum()) == 0
    assert report.step == 2


def test_a_kernel_for_a_linear_layer_needs_a_word_about_its_axes() -> None:
    rules = [rule for rule in TOWER.variables if rule.original != "dense/kernel"]
    names = NameMap(variables=(*rules, NameRule("dense/kernel", "first.weight")))
    with pytest.raises(RestoreError, match=r"TensorFlow keeps kernels as \(in, out\).*transpose = true"):
        imported(DATA / "partitioned", Tower(), names)


def test_names_that_fit_nothing_are_listed_with_the_nearest(tmp_path: Path) -> None:
    write_bundle(f"{tmp_path}/model.ckpt-1", {"first/biass": torch.ones(2), "global_step": torch.tensor(1)})
    report = imported(tmp_path, Tower())
    assert (
        why(report, "first/biass")
        == "float32 2: the model has no variable first/biass; the nearest is first.bias"
    )
    assert sorted(report.missing) == ["first.bias", "first.weight", "top.weight"]


def test_shapes_and_kinds_must_fit(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/model.ckpt-1"
    write_bundle(prefix, {"first/weight": torch.ones(100, 2)})
    with pytest.raises(
        RestoreError, match=r"has shape \(100, 2\), 'first.weight' has \(2, 100\).*transpose = true"
    ):
        imported(prefix, Tower())
    write_bundle(prefix, {"first/bias": torch.ones(2, dtype=torch.int32)})
    with pytest.raises(RestoreError, match=r"is int32, and 'first.bias' is float32"):
        imported(prefix, Tower())
    write_bundle(prefix, {"first/bias": torch.full((2,), 1.5).bfloat16()})
    model = Tower()
    report = imported(prefix, model, step=9)
    assert model.first.bias.tolist() == [1.5, 1.5]
    assert report.loaded[0].detail == "bfloat16 2, as float32"
    assert report.step == 9
    write_bundle(prefix, {"global_step": torch.tensor(1.5)})
    with pytest.raises(RestoreError, match="not a number of steps"):
        imported(prefix, Tower())


@pytest.mark.parametrize("make", [Adamom, RMSprop, torch.optim.Adagrad, EagerAdam, "momentum"])
def test_the_state_of_dense_optimizers_goes_out_and_comes_back(tmp_path: Path, make: Any) -> None:
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Tower()
        weights = model.parameters()
        return model, torch.optim.SGD(weights, lr=0.1, momentum=0.9) if make == "momentum" else make(
            weights, lr=0.1
        )

    model, optimizer = trained()
    for _ in range(3):
        optimizer.zero_grad()
        model.top(model.first(torch.ones(4, 100))).square().sum().backward()
        optimizer.step()
    prefix = Checkpointer(Saver(f"{tmp_path}/run"), [DensePart(model, {"dense": optimizer})]).save(3)
    names = NameMap(variables=(NameRule("tower/*/kernel", "*.weight", transpose=True),))
    export_original(prefix, f"{tmp_path}/out", names)
    other, again = trained()
    report = imported(f"{tmp_path}/out", other, names, optimizer=again)
    assert report.left_out == []
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        kept, back = optimizer.state[one], again.state[two]
        assert kept.keys() == back.keys()
        assert all(torch.equal(torch.as_tensor(kept[key]), torch.as_tensor(back[key])) for key in kept)


def test_an_optimizer_that_the_original_lacks_is_left_out_of_an_export(tmp_path: Path) -> None:
    model = Tower()
    optimizer = torch.optim.Adamax(model.parameters())
    model.top(model.first(torch.ones(4, 100))).sum().backward()
    optimizer.step()
    prefix = Checkpointer(Saver(f"{tmp_path}/run"), [DensePart(model, {"dense": optimizer})]).save(1)
    done = export_original(prefix, f"{tmp_path}/out", NameMap())
    assert done.left_out == ("optimizer dense: the original has no optimizer like torch.Adamax",)


# Tables


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, dict[str, NativeTable]]:
    tables = {"item": filled("item", *range(20)), "user": filled("user", 7, 8, dim=3)}
    return Checkpointer(Saver(f"{tmp_path}/run"), [TablesPart(tables)]).save(4), tables


@pytest.mark.parametrize("multi_table", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_tables_go_out_and_come_back(
    tmp_path: Path, saved: tuple[str, dict[str, NativeTable]], multi_table: bool, num_shards: int
) -> None:
    prefix, tables = saved
    out = f"{tmp_path}/out"
    done = export_original(prefix, out, NameMap(), multi_table=multi_table, num_shards=num_shards)
    assert done.rows == {"item": 20, "user": 2}
    back = {"item": table("item"), "user": table("user", 3)}
    report = imported(out, nn.Module(), tables=back)
    assert {name: rows(one) for name, one in back.items()} == {
        name: rows(one) for name, one in tables.items()
    }
    assert (report.rows, report.step, report.missing) == ({"item": 20, "user": 2}, 4, [])


def test_the_dumps_of_several_servers_are_put_together(tmp_path: Path) -> None:
    assets = tmp_path / "model.ckpt-1.assets"
    assets.mkdir()
    for server, key in enumerate((10, 11, 11)):
        messages = encode_entry_dumps(filled("item", key).scan().rows, filled("item", key).config)
        path = assets / f"MonolithHashTable_item_{server}-00000-of-00001"
        path.write_bytes(b"".join(map(tfrecord, messages)))
    (assets / "hash_filter_0-00000-of-00007").write_bytes(b"")
    item = table("item")
    report = imported(tmp_path, nn.Module(), tables={"item": item})
    assert sorted(rows(item)) == [10, 11]
    assert why(report, "table item").startswith("1 rows of IDs that were in more than one dump")
    assert "admission filter" in why(report, "hash_filter_0")


def test_a_table_that_is_not_here_is_listed_with_the_nearest(
    tmp_path: Path, saved: tuple[str, dict[str, NativeTable]]
) -> None:
    for multi_table in (False, True):
        out = f"{tmp_path}/{multi_table}"
        export_original(saved[0], out, NameMap(), multi_table=multi_table)
        report = imported(out, nn.Module(), tables={"items": table("items"), "user": table("user", 3)})
        (left,) = report.left_out
        assert left.detail == "the model has no table item; the nearest is items"
        assert report.missing == ["table items"]
        renamed = NameMap(tables=(NameRule("item", "items"), NameRule("MonolithHashTable_item", "items")))
        there = {"items": table("items"), "user": table("user", 3)}
        assert imported(out, nn.Module(), renamed, tables=there).missing == []
    with pytest.raises(ConfigError, match="no table 'itms'; the nearest known one is 'items'"):
        imported(
            out, nn.Module(), NameMap(tables=(NameRule("item", "itms"),)), tables={"items": table("items")}
        )


@pytest.mark.parametrize("multi_table", [False, True])
def test_rows_that_do_not_fit_or_are_damaged_are_refused(
    tmp_path: Path, saved: tuple[str, dict[str, NativeTable]], multi_table: bool
) -> None:
    out = tmp_path / "out"
    export_original(saved[0], str(out), NameMap(), multi_table=multi_table, num_shards=2)
    user = table("user", 3)

    def refused(error: type[Exception], match: str, item: NativeTable | None = None) -> None:
        with pytest.raises(error, match=match):
            imported(out, nn.Module(), tables={"item": table("item") if item is None else item, "user": user})

    refused(RestoreError, "has 2 floats, the segment has 5", table("item", 5))
    refused(RestoreError, "wrong optimizer message", table("item", optimizer=Sgd()))
    assets = out / "model.ckpt-4.assets"
    base = "MonolithMultiHashTable_tables" if multi_table else "MonolithHashTable_item"
    path = assets / f"{base}-00001-of-00002"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    refused(CorruptFileError, f"{base}.* ends inside a snappy block" if multi_table else "truncated")
    path.write_bytes(b"garbage that is neither" + whole)
    refused(CorruptFileError, "the file ends inside a snappy block")
    path.write_bytes(b"\0\0\0\7garbage" + whole)
    refused(CorruptFileError, "corrupt at byte 0: neither a TFRecord nor a snappy stream")
    path.unlink()
    refused(RestoreError, "1 of 2 shards are missing: 1")


def test_a_dump_of_several_tables_must_match_its_companion(
    tmp_path: Path, saved: tuple[str, dict[str, NativeTable]]
) -> None:
    out = tmp_path / "out"
    export_original(saved[0], str(out), NameMap(), multi_table=True)
    meta = out / "model.ckpt-4.assets" / "MonolithMultiHashTable_tables.meta-00000-of-00001"
    for count, reason in (
        (3, "ends after 2 of the 3 rows"),
        (1, "has more rows than"),
        (1 << 60, "ends after 2 of"),
    ):
        from monolith.table.entry_dumps import _metadata

        meta.write_bytes(tfrecord(_metadata("item", 20)) + tfrecord(_metadata("user", count)))
        with pytest.raises(RestoreError, match=reason):
            imported(out, nn.Module(), tables={"user": table("user", 3)})
    meta.write_bytes(tfrecord(b"\x0a\xff\xff"))
    with pytest.raises(CorruptFileError, match="not a MultiHashTableMetadata"):
        imported(out, nn.Module(), tables={"user": table("user", 3)})


# Which checkpoint is meant


def test_a_folder_a_prefix_an_index_and_assets_mean_a_checkpoint(
    tmp_path: Path, saved: tuple[str, dict[str, NativeTable]]
) -> None:
    out = tmp_path / "out"
    export_original(saved[0], str(out), NameMap())
    prefix = f"{out}/model.ckpt-4"
    wanted = OriginalCheckpoint(prefix, f"{prefix}.assets")
    for path in (str(out), prefix, f"{prefix}.index", f"{prefix}.assets", f"{out}/"):
        assert OriginalCheckpoint.find(path) == wanted
    shutil.move(out, tmp_path / "moved")  # the file `checkpoint` names it relative to its folder
    assert OriginalCheckpoint.find(f"{tmp_path}/moved").bundle == f"{tmp_path}/moved/model.ckpt-4"
    (tmp_path / "moved" / "checkpoint").unlink()
    assert OriginalCheckpoint.find(f"{tmp_path}/moved").bundle == f"{tmp_path}/moved/model.ckpt-4"
    assets = f"{tmp_path}/moved/model.ckpt-4.assets"
    shutil.copytree(assets, tmp_path / "plain")
    assert OriginalCheckpoint.find(f"{tmp_path}/plain") == OriginalCheckpoint(None, f"{tmp_path}/plain")
    (tmp_path / "moved" / "model.ckpt-9.index").write_bytes(b"")
    with pytest.raises(RestoreError, match=r"model.ckpt-4, model.ckpt-9 and no file `checkpoint`"):
        OriginalCheckpoint.find(f"{tmp_path}/moved")
    for path in (f"{tmp_path}/none", f"{tmp_path}/moved/model.ckpt-7"):
        with pytest.raises(FileMissingError, match="is no checkpoint of the original"):
            OriginalCheckpoint.find(path)
