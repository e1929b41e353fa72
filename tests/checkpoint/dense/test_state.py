from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from checkpoint.dense.restores import restore_dense
from torch import Tensor, nn

from monolith import filesystem
from monolith.checkpoint.dense.custom_restore import CustomRestore
from monolith.checkpoint.dense.state import capture_dense
from monolith.checkpoint.folder.state_files import dense_path, optimizer_path
from monolith.errors import ConfigError, CorruptFileError, FilesystemError, RestoreError, SaveError
from monolith.filesystem import backends
from monolith.tensors.files import record_of, write_tensors

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"{tmp_path}/model.ckpt-7"


def mlp(value: float | None = None) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    if value is not None:
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def saved(prefix: str, **tensors: Tensor) -> str:
    capture_dense(tensors, random=False).write_files(prefix)
    return prefix


# There and back


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_and_buffers_come_back(prefix: str, device: str) -> None:
    model, other = mlp().to(device), mlp().to(device)
    model(torch.rand(4, 2, device=device))
    capture_dense(model, global_step=7).write_files(prefix)
    report = restore_dense(prefix, other)
    assert values(other) == values(model)
    assert list(report.loaded) == list(model.state_dict())
    assert (report.complete, report.global_step) == (True, 7)
    assert next(other.parameters()).device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_a_snapshot_is_of_its_moment(prefix: str, device: str) -> None:
    model = mlp(1.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 2, device=device)).sum().backward()
    optimizer.step()
    before, state = values(model), str(optimizer.state_dict())
    snapshot = capture_dense(model, [optimizer])
    for _ in range(3):
        model(torch.rand(2, 2, device=device)).sum().backward()
        optimizer.step()
    assert values(model) != before
    snapshot.write_files(prefix)
    restore_dense(prefix, model, [optimizer])
    assert values(model) == before
    assert str(optimizer.state_dict()) == state


def test_a_snapshot_may_be_written_twice(prefix: str, tmp_path: Path) -> None:
    snapshot = capture_dense(mlp())
    assert snapshot.write_files(prefix).keys() == snapshot.write_files(prefix).keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.ckpt-7.dense-00000-of-00001.safetensors",
        "model.ckpt-7.optimizer-00000-of-00001.safetensors",
    ]


def test_records_are_by_base_name_and_are_checked(prefix: str, tmp_path: Path) -> None:
    model = mlp()
    records = capture_dense(model).write_files(prefix)
    assert records == {path.name: record_of(str(path)) for path in tmp_path.iterdir()}
    restore_dense(prefix, model, records=records)
    capture_dense(mlp()).write_files(prefix)
    with pytest.raises(CorruptFileError, match="another file"):
        restore_dense(prefix, model, records=records)


def test_dense_weights_alone_are_one_file(prefix: str, tmp_path: Path) -> None:
    records = capture_dense(mlp(), random=False).write_files(prefix)
    assert (
        list(records)
        == ["model.ckpt-7.dense-00000-of-00001.safetensors"]
        == [p.name for p in tmp_path.iterdir()]
    )


def test_reading_weights_alone_does_not_need_the_other_file(prefix: str) -> None:
    model = mlp()
    capture_dense(model, [torch.optim.Adam(model.parameters())]).write_files(prefix)
    Path(optimizer_path(prefix)).write_bytes(b"broken")
    assert restore_dense(prefix, mlp()).complete


def test_remote_prefixes_work() -> None:
    filesystem.make_dirs("memory://dense_state")
    model, other = mlp(), mlp()
    records = capture_dense(model, [torch.optim.Adam(model.parameters())]).write_files(
        "memory://dense_state/m-1"
    )
    restore_dense("memory://dense_state/m-1", other, records=records)
    assert values(other) == values(model)


def test_tied_weights_stay_tied(prefix: str) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    model, other, untied = tied(), tied(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    capture_dense(model).write_files(prefix)
    report = restore_dense(prefix, other)
    assert other[1].weight is other[0].weight
    assert values(other) == values(model)
    assert report.unused == ()
    restore_dense(prefix, untied)
    assert values(untied) == values(model)
    untied[1].weight.data.zero_()
    capture_dense(untied).write_files(prefix)
    before = values(other)
    with pytest.raises(RestoreError, match=r"'0.weight' and '1.weight' are one tensor in this model and two"):
        restore_dense(prefix, other)
    assert values(other) == before


def test_extra_state_of_modules_comes_back(prefix: str) -> None:
    class Counting(nn.Linear):
        seen: Any = ()

        def get_extra_state(self) -> Any:
            return {"seen": self.seen, "sum": torch.tensor([3.0])}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    model, other = Counting(2, 2), Counting(2, 2)
    model.seen = (1, "a")
    capture_dense(model).write_files(prefix)
    report = restore_dense(prefix, other)
    assert other.seen == (1, "a")
    assert "_extra_state" in report.loaded
    assert report.unused == ()
    model.seen = object()
    with pytest.raises(SaveError, match="_extra_state/seen"):
        capture_dense(model)
    capture_dense(nn.Linear(2, 2)).write_files(prefix)
    with pytest.raises(RestoreError, match="_extra_state: not found in checkpoint"):
        restore_dense(prefix, other)


def test_a_module_that_refuses_its_state_says_so_and_the_optimizer_keeps_its_own(prefix: str) -> None:
    class Stubborn(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None:
            raise KeyError(f"not {state}")

    model = Stubborn(2, 2)
    capture_dense(model, [torch.optim.SGD(model.parameters(), lr=0.1)]).write_files(prefix)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with pytest.raises(RestoreError, match="Stubborn refused a state that fits"):
        restore_dense(prefix, model, [optimizer])
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_variable_in_parts_is_saved_whole(prefix: str) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    capture_dense(
        {"x/part_0": whole[:3], "x/part_1": whole[3:], "y/part_0": torch.tensor([1, 2])}
    ).write_files(prefix)
    target = {"x": torch.zeros(5, 2), "y": torch.zeros(2, dtype=torch.int64)}
    restore_dense(prefix, target)
    assert torch.equal(target["x"], whole)
    three = {f"x.part_{i}": torch.zeros(rows, 2) for i, rows in enumerate((1, 3, 1))}
    restore_dense(prefix, three)
    assert torch.equal(torch.cat(list(three.values())), whole)
    with pytest.raises(
        RestoreError, match=r"its 2 parts make \(4, 2\), x in the checkpoint has shape \(5, 2\)"
    ):
        restore_dense(prefix, {"x.part_0": torch.zeros(2, 2), "x.part_1": torch.zeros(2, 2)})


def test_sparse_tensors_cannot_be_captured() -> None:
    with pytest.raises(SaveError, match=r"cannot save 'x': it is sparse_coo"):
        capture_dense({"x": torch.eye(2).to_sparse()})


# What the saver must hold


def test_int64_and_large_tensors(prefix: str) -> None:
    saved(prefix, step=torch.tensor(15, dtype=torch.int64), big=torch.ones(1000, 1000))
    target = {"step": torch.tensor(0, dtype=torch.int64), "big": torch.zeros(1000, 1000)}
    restore_dense(prefix, target)
    assert target["step"] == 15
    assert target["big"].sum() == 1_000_000


def test_a_wrong_dtype_names_the_original(prefix: str) -> None:
    saved(prefix, v=torch.tensor([1.5]))
    target = {"v": torch.tensor([3], dtype=torch.int64)}
    with pytest.raises(RestoreError, match=r"v: its original dtype, in the checkpoint, is float32, .* int64"):
        restore_dense(prefix, target)
    assert target["v"].item() == 3


def test_another_shape_is_refused_unless_it_may_be_reshaped(prefix: str) -> None:
    saved(prefix, v=torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    target = {"v": torch.zeros(3, 2)}
    with pytest.raises(
        RestoreError, match=r"(?s)shape \(2, 3\) .* needs \(3, 2\); reshape=True .*model changed"
    ):
        restore_dense(prefix, target)
    restore_dense(prefix, target, reshape=True)
    assert target["v"].tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(RestoreError, match=r"shape \(2, 3\) in the checkpoint, this model needs \(7,\)\n"):
        restore_dense(prefix, {"v": torch.zeros(7)}, reshape=True)


def test_a_map_of_names_is_what_is_saved(prefix: str) -> None:
    v0 = torch.tensor([10.0])
    capture_dense({"save_prefix/v0": v0}).write_files(prefix)
    with pytest.raises(RestoreError, match="v0: not found in checkpoint"):
        restore_dense(prefix, {"v0": torch.zeros(1)})
    other = torch.zeros(1)
    restore_dense(prefix, {"save_prefix/v0": other})
    assert other.item() == 10.0


def test_no_path_and_no_checkpoint_are_said_as_upstream_does(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"^Can't load save_path when it is None\.$"):
        restore_dense(None, mlp())
    for path in (prefix, f"{prefix}/deeper/x"):
        with pytest.raises(ValueError, match=r"^The passed save_path is not a valid checkpoint: "):
            restore_dense(path, mlp())


# Strict or not


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(prefix: str) -> None:
    saved(prefix, a=torch.ones(2), b=torch.ones(3), c=torch.ones(4), d=torch.ones(1))
    target = {"a": torch.zeros(2), "b": torch.zeros(5), "c": torch.zeros(4).double(), "new": torch.zeros(1)}
    with pytest.raises(RestoreError) as caught:
        restore_dense(prefix, target)
    for text in (
        f"cannot restore {prefix}: 3 names do not fit, nothing was changed",
        "b: it has shape (3,) in the checkpoint, this model needs (5,)",
        "c: its original dtype",
        "new: not found in checkpoint",
        "Has the model changed since? Restore with strict=False",
    ):
        assert text in str(caught.value)
    assert not any(tensor.any() for tensor in target.values())


def test_without_strict_what_fits_is_loaded_and_the_rest_is_told(prefix: str) -> None:
    saved(prefix, a=torch.ones(2), b=torch.ones(3), c=torch.ones(4), d=torch.ones(1))
    target = {"a": torch.zeros(2), "b": torch.zeros(5), "c": torch.zeros(4).double(), "new": torch.zeros(1)}
    report = restore_dense(prefix, target, strict=False)
    assert report.loaded == {"a": ""}
    assert report.reset.keys() == {"b", "c"}
    assert report.missing == ("new",)
    assert report.unused == ("d",)
    assert [bool(tensor.any()) for tensor in target.values()] == [True, False, False, False]
    assert "b: reset: it has shape (3,)" in report.describe()


def test_a_warm_start_takes_some_and_leaves_others(prefix: str) -> None:
    capture_dense(mlp(1.0)).write_files(prefix)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 9), nn.Linear(9, 1))
    head = model[3].weight.tolist()
    report = restore_dense(prefix, model, include=["0.*", "1.*", "3.*"], exclude=["3.*", "*.running_*"])
    assert report.loaded.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "1.num_batches_tracked"}
    assert report.skipped["1.running_mean"] == report.skipped["2.weight"] == "not chosen"
    assert model[0].bias.tolist() == [1.0] * 3
    assert model[3].weight.tolist() == head
    assert report.missing == ()
    with pytest.raises(RestoreError, match="lists of patterns"):
        restore_dense(prefix, model, include="0.*")


def test_live_variables_are_left_alone(prefix: str) -> None:
    saved(prefix, v0=torch.ones(1), v1=torch.ones(1))
    target = {"v0": torch.full((1,), 2.0), "v1": torch.zeros(1), "gone": torch.zeros(1)}
    report = restore_dense(prefix, target, only="v1".__eq__)
    assert (target["v0"].item(), target["v1"].item()) == (2.0, 1.0)
    assert report.skipped == {"v0": "live", "gone": "live"}
    assert report.unused == ()


# Custom restore


def test_an_automatic_map_is_followed(prefix: str) -> None:
    saved(prefix, **{"t/dense_10/bias": torch.tensor([10.0]), "t/dense_9/bias": torch.tensor([9.0])})
    target = {"t.dense_0.bias": torch.zeros(1), "t.dense_1.bias": torch.zeros(1)}
    with pytest.raises(RestoreError, match="not found in checkpoint"):
        restore_dense(prefix, target)
    report = restore_dense(prefix, target, custom=CustomRestore())
    assert [tensor.item() for tensor in target.values()] == [9.0, 10.0]
    assert report.renamed == {"t.dense_0.bias": "t/dense_9/bias", "t.dense_1.bias": "t/dense_10/bias"}


def make_run(value: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = mlp(value)
    model.register_buffer("global_step", torch.tensor(int(value)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 2)).sum().backward()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return model, optimizer, schedule


@pytest.mark.parametrize("continues", [False, True])
def test_clearing_reinitializes_the_dense_variables_once(
    prefix: str, tmp_path: Path, continues: bool
) -> None:
    model, optimizer, schedule = make_run(5)
    schedule.step()
    capture_dense(model, [optimizer], [schedule], global_step=7).write_files(prefix)
    custom = CustomRestore(reset_dense=True, continue_training=continues)
    other, resumed, other_schedule = make_run(1)
    fresh, momentum = values(other), str(resumed.state_dict())
    report = restore_dense(prefix, other, [resumed], [other_schedule], custom=custom, model_dir=str(tmp_path))
    assert report.global_step == (7 if continues else 0)
    assert other.global_step == (5 if continues else 1)
    assert values(other) | {"global_step": 0} == fresh | {"global_step": 0}
    assert str(resumed.state_dict()) == momentum
    assert other_schedule.last_epoch == (1 if continues else 0)
    assert "0.weight" in report.reset
    assert report.missing == ()
    assert (tmp_path / "clear_nn").read_text() == "clean nn done!"
    report = restore_dense(prefix, other, [resumed], [other_schedule], custom=custom, model_dir=str(tmp_path))
    assert values(other) == values(model)
    assert (report.complete, report.global_step) == (True, 7)


def test_clearing_that_fails_is_not_marked_as_done(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(RestoreError):
        restore_dense(prefix, mlp(), custom=CustomRestore(reset_dense=True), model_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="model_dir"):
        restore_dense(prefix, mlp(), custom=CustomRestore(reset_dense=True))
    assert not (tmp_path / "clear_nn").exists()


# Bad files


@pytest.mark.parametrize("path_of", [dense_path, optimizer_path])
def test_any_damage_to_either_file_changes_nothing(prefix: str, path_of: Any) -> None:
    model = mlp(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    records = capture_dense(model, [optimizer], random=False).write_files(prefix)
    other = mlp(2.0)
    resumed = torch.optim.SGD(other.parameters(), lr=0.3, momentum=0.9)
    before = values(other)
    path = Path(path_of(prefix))
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        for broken in (
            data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :],
            data[:position],
        ):
            path.write_bytes(broken)
            with pytest.raises((CorruptFileError, RestoreError), match=path.name):
                restore_dense(prefix, other, [resumed], records=records)
            with pytest.raises((CorruptFileError, RestoreError), match=path.name):
                restore_dense(prefix, other, [resumed])
    assert values(other) == before
    assert resumed.param_groups[0]["lr"] == 0.3


def test_a_file_that_the_manifest_knows_and_the_disk_does_not(prefix: str) -> None:
    model = mlp()
    records = capture_dense(model).write_files(prefix)
    Path(optimizer_path(prefix)).unlink()
    with pytest.raises(RestoreError, match=r"not a valid checkpoint.*manifest lists .*optimizer-00000"):
        restore_dense(prefix, model, records=records, random=True)


def test_a_file_that_the_manifest_does_not_know_is_not_part_of_the_checkpoint(prefix: str) -> None:
    model = mlp()
    capture_dense(model).write_files(prefix)
    with pytest.raises(RestoreError, match="not a valid checkpoint"):
        restore_dense(prefix, model, records={})


def test_the_wrong_kind_of_file_is_refused(prefix: str) -> None:
    model = mlp()
    capture_dense(model).write_files(prefix)
    Path(optimizer_path(prefix)).rename(dense_path(prefix))
    with pytest.raises(CorruptFileError, match=r"not a dense file of a checkpoint: .*optimizers"):
        restore_dense(prefix, model)
    write_tensors(dense_path(prefix), {"0.weight": torch.ones(1)}, {})
    with pytest.raises(CorruptFileError, match="not a dense file of a checkpoint"):
        restore_dense(prefix, model)
    write_tensors(
        dense_path(prefix), {}, {"monolith": json.dumps({"version": 99, "global_step": 0, "extra": {}})}
    )
    with pytest.raises(CorruptFileError, match="version 99, this program reads 1"):
        restore_dense(prefix, model)


def test_a_full_disk_leaves_the_old_checkpoint(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = mlp(1.0), mlp(2.0)
    records = capture_dense(model).write_files(prefix)
    create = backends.LocalBackend.create

    class Full:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            if self._file.tell() + len(data) > 512:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data)

        def close(self) -> None:
            self._file.close()

    monkeypatch.setattr(backends.LocalBackend, "create", lambda self, path: Full(create(self, path)))
    with pytest.raises(FilesystemError, match="disk is full"):
        capture_dense(other).write_files(prefix)
    restore_dense(prefix, other, records=records)
    assert values(other) == values(model)
    assert len(list(Path(prefix).parent.iterdir())) == 2
