"""servable.json: read strictly, whatever happened to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from monolith.errors import CorruptFileError, FileMissingError
from monolith.feature import CONCAT, NONE, FirstN, InputSpec, LayoutSpec, Mean, SliceSpec
from monolith.serve.manifest import (
    MANIFEST_NAME,
    MOST_JSON_BYTES,
    Servable,
    ServableCollection,
    ServableDense,
    ServableFile,
    ServableTable,
    Signature,
    TensorSpec,
    read_servable,
    write_servable,
)

COLLECTION = ServableCollection.of(
    (InputSpec("clicked", "item", FirstN(3)), InputSpec("user", "user", Mean())),
    (
        LayoutSpec("a", NONE, (SliceSpec("clicked", 0, 4), SliceSpec("user", 1, 2))),
        LayoutSpec("b", CONCAT, (SliceSpec("user", 0, 2),)),
    ),
)
SERVABLE = Servable(
    model="clicks",
    version="100",
    run="runs/1",
    checkpoint="model.ckpt-100",
    step=100,
    watermark=1_700_000_000,
    created=1.5,
    digest="abc",
    features={"features": {"user": {"type": "IdFeature", "column": "user_id"}}},
    signature=Signature(
        inputs=(TensorSpec(name="user", datatype="BYTES", shape=(-1,)),),
        outputs=(TensorSpec(name="click", datatype="FP32", shape=(-1,)),),
    ),
    collections=(COLLECTION,),
    dense=ServableDense(
        kind="exported", weights=("w",), floats={"price": 1}, outputs=("click",), torch="2.13.0"
    ),
    tables={
        "user": ServableTable(
            file="tables/user.rows", rows=3, dim=2, coding="fp16", largest_error=0.1, mean_error=0.01
        )
    },
    files={"tables/user.rows": ServableFile(bytes=10, crc=1 << 31)},
)


def test_what_is_written_is_read_back(tmp_path):
    write_servable(str(tmp_path), SERVABLE)
    assert read_servable(str(tmp_path)) == SERVABLE


def test_a_collection_is_planned_as_the_model_does():
    plan = COLLECTION.plan({"item": 4, "other": 9, "user": 2})
    assert [one.name for one in plan.features] == ["clicked", "user"]
    assert plan.shapes == ((3, 4), (1,), (2,))
    assert plan.lists == {"a"}


def test_a_folder_without_one_is_said_to_have_none(tmp_path):
    with pytest.raises(FileMissingError, match=r"servable\.json"):
        read_servable(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plain: plain | {"format": 2}, "its format is 2, and this version reads format 1"),
        (lambda plain: plain | {"step": 101}, "its checksum does not match"),
        (lambda plain: plain | {"stepp": 101}, "unknown key stepp.*nearest known key is step"),
        (lambda plain: plain | {"shards": "three"}, "shards.*expected int"),
        (lambda plain: {name: one for name, one in plain.items() if name != "model"}, "model is required"),
        (lambda plain: [plain], "expected an object"),
    ],
)
def test_an_altered_one_is_refused_with_the_reason(tmp_path, change, said):
    write_servable(str(tmp_path), SERVABLE)
    path = tmp_path / "servable.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CorruptFileError, match=said):
        read_servable(str(tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_torn_one_is_refused(tmp_path, share):
    write_servable(str(tmp_path), SERVABLE)
    path = tmp_path / "servable.json"
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * share)])
    with pytest.raises(CorruptFileError, match="torn"):
        read_servable(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["../x.rows", "/etc/passwd", "tables/../../x.rows", "", ".", "tables//x", "./x", "a\0b", "away/x.rows"],
)
def test_a_file_outside_of_the_folder_is_refused_before_it_is_opened(tmp_path, name):
    folder, table = tmp_path / "servable", SERVABLE.tables["user"]
    folder.mkdir()
    (folder / "away").symlink_to(tmp_path)
    size = ServableFile(bytes=10, crc=1)
    for servable in (
        replace(SERVABLE, tables={"user": replace(table, file=name)}, files={name: size}),
        replace(SERVABLE, files={**SERVABLE.files, name: size}),
        replace(SERVABLE, tables={"user": replace(table, file=name)}, files={}, shards=2),
    ):
        write_servable(str(folder), servable)
        with pytest.raises(CorruptFileError, match="is not inside of the folder"):
            read_servable(str(folder))


def test_a_linked_file_is_refused_and_a_linked_folder_of_versions_is_not(tmp_path):
    (tmp_path / "real" / "tables").mkdir(parents=True)
    write_servable(str(tmp_path / "real"), SERVABLE)
    (tmp_path / "version").symlink_to(tmp_path / "real")
    assert read_servable(str(tmp_path / "version")) == SERVABLE
    (tmp_path / "real" / "tables" / "user.rows").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptFileError, match="is not inside of the folder"):
        read_servable(str(tmp_path / "version"))


def test_a_table_without_a_file_and_a_manifest_without_end_are_refused(tmp_path):
    write_servable(str(tmp_path), replace(SERVABLE, files={}))
    with pytest.raises(CorruptFileError, match="lists no file of table 'user'"):
        read_servable(str(tmp_path))
    with (tmp_path / MANIFEST_NAME).open("wb") as file:
        file.truncate(MOST_JSON_BYTES + 1)
    with pytest.raises(CorruptFileError, match="bytes; at most"):
        read_servable(str(tmp_path))


def test_it_counts_rows_and_bytes():
    assert (SERVABLE.rows, SERVABLE.bytes) == (3, 10)
    assert replace(SERVABLE, features=None).spec is None
    spec = SERVABLE.spec
    assert spec is not None
    assert list(spec.features) == ["user"]
