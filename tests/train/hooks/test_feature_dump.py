"""Batches in files instead of in a model."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from train.runs import batch

from monolith.data.formats import FramedFormat
from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.tensors import RaggedTensor
from monolith.train.hooks import FeatureDump
from monolith.train.hooks.feature_dump import FEATURE_FRAMING
from monolith.wire.example_pb2 import INDIVIDUAL, ExampleBatch


def frames(path: str | Path) -> list[ExampleBatch]:
    """Read a file as the layout says, with protobuf."""
    data, batches = Path(path).read_bytes(), []
    while data:
        zero, length = struct.unpack_from("<QQ", data)
        assert zero == 0
        batches.append(ExampleBatch.FromString(data[16 : 16 + length]))
        data = data[16 + length :]
    return batches


def files(folder: Path) -> list[Path]:
    return sorted((folder / "features").iterdir()) if (folder / "features").exists() else []


def dump_one(folder: Path, one: Batch) -> dict[str, list]:
    dump = FeatureDump(str(folder), skip_first=False)
    dump(one)
    (found,) = frames(dump.flush())
    assert all(named.type == INDIVIDUAL for named in found.named_feature_list)
    assert found.batch_size == len(one)
    return {named.name: list(named.feature) for named in found.named_feature_list}


def test_every_feature_is_a_list_with_a_row_per_example(tmp_path):
    ids = FeatureIds.pack(
        {
            "item": torch.tensor([5, 6]),
            "user": torch.tensor([9]),
            "words": RaggedTensor.from_list([[1, 2], [3]]),
        },
        shared=["user"],
    )
    one = Batch(
        ids,
        {"age": torch.tensor([[0.5, 1.5], [2.5, 3.5]])},
        {"click": torch.tensor([1.0, 0.0]), "like": torch.tensor([0.0, 1.0])},
    )
    features = dump_one(tmp_path, one)
    assert [list(row.fid_v2_list.value) for row in features["item"]] == [[5], [6]]
    assert [list(row.fid_v2_list.value) for row in features["user"]] == [[9], [9]]
    assert [list(row.fid_v2_list.value) for row in features["words"]] == [[1, 2], [3]]
    assert [list(row.float_list.value) for row in features["age"]] == [[0.5, 1.5], [2.5, 3.5]]
    (label,) = (rows for name, rows in features.items() if "label" in name.lower())
    assert [list(row.float_list.value) for row in label] == [[1.0, 0.0], [0.0, 1.0]]


def test_a_feature_of_one_dimension_has_one_number_a_row(tmp_path):
    features = dump_one(tmp_path, Batch(batch(1, 2).ids, {"age": torch.tensor([0.5, 1.5])}))
    assert [list(row.float_list.value) for row in features["age"]] == [[0.5], [1.5]]


def test_a_row_without_values_does_not_change_the_type_of_its_feature(tmp_path):
    ids = FeatureIds.pack({"words": RaggedTensor.from_list([[1], [], [2]])})
    features = dump_one(tmp_path, Batch(ids, {"age": torch.tensor([[1.0], [2.0], [3.0]])}))
    assert [row.WhichOneof("type") for row in features["words"]] == ["fid_v2_list", None, "fid_v2_list"]
    assert [row.WhichOneof("type") for row in features["age"]] == ["float_list"] * 3


def test_numbers_without_width_are_left_out_and_do_not_become_ids(tmp_path):
    features = dump_one(tmp_path, Batch(batch(1, 2).ids, {"age": torch.zeros(2, 0)}))
    assert list(features) == ["item"]


def test_ids_above_int63_survive(tmp_path):
    features = dump_one(tmp_path, batch(-1))
    assert list(features["item"][0].fid_v2_list.value) == [2**64 - 1]


def test_a_file_is_written_every_cap_batches_and_at_the_end_and_the_first_run_is_skipped(tmp_path):
    names = iter("abc")
    dump = FeatureDump(str(tmp_path), "worker3", cap=2, name=lambda: next(names))
    for number in range(6):
        dump(batch(number))
    dump.flush()
    assert [path.name for path in files(tmp_path)] == ["worker3_a.pb", "worker3_b.pb", "worker3_c.pb"]
    values = [
        [list(one.named_feature_list[0].feature[0].fid_v2_list.value) for one in frames(path)]
        for path in files(tmp_path)
    ]
    assert values == [[[1], [2]], [[3], [4]], [[5]]]


def test_nothing_is_written_when_there_is_nothing(tmp_path):
    dump = FeatureDump(str(tmp_path), cap=2, skip_first=False)
    dump.flush()
    assert files(tmp_path) == []
    dump(batch(1))
    dump(batch(2))
    dump.flush()
    assert len(files(tmp_path)) == 1


def test_names_of_files_differ(tmp_path):
    dump = FeatureDump(str(tmp_path), cap=1, skip_first=False)
    dump(batch(1))
    dump(batch(2))
    assert len(files(tmp_path)) == 2
    assert all(path.name.startswith("chief_") for path in files(tmp_path))


def test_the_files_are_read_by_our_own_format(tmp_path):
    dump = FeatureDump(str(tmp_path), skip_first=False)
    dump(Batch(batch(1, 2).ids, {"age": torch.tensor([[0.5], [1.5]])}, {"click": torch.tensor([1.0, 0.0])}))
    (chunk,) = FramedFormat("example_batch", framing=FEATURE_FRAMING).chunks(dump.flush())
    assert chunk.records["item"].to_list() == [[1], [2]]
    assert chunk.records["age"].to_list() == [[0.5], [1.5]]
    assert chunk.records["label"].to_list() == [[1.0], [0.0]]


def test_a_cap_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cap"):
        FeatureDump(str(tmp_path), cap=0)
