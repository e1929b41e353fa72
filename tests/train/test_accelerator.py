"""Where a model computes, and what is said where that is impossible."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train.tasks import Clicks, rows_of

from monolith.errors import ConfigError
from monolith.runtime import Trainer
from monolith.train import Mode, TrainConfig
from monolith.train import accelerator as accelerators
from monolith.train.accelerator import ACCELERATORS, Cpu, Cuda, Xla, accelerator_of, take
from monolith.train.model import Model


def fake_xla(**changed: Any) -> Any:
    """What is used of torch_xla, on a device that is there."""
    fake = SimpleNamespace(synced=0, device=lambda: torch.device("cpu"))

    def sync() -> None:
        fake.synced += 1

    fake.sync = sync
    vars(fake).update(changed)
    return fake


def test_a_cpu_is_always_there() -> None:
    assert Cpu().missing() is None
    assert accelerator_of("cpu") is not None
    assert accelerator_of(None) is None


def test_each_accelerator_has_its_own_name() -> None:
    assert {name: make().name for name, make in ACCELERATORS.items()} == {name: name for name in ACCELERATORS}


def test_a_missing_gpu_is_said() -> None:
    said = Cuda(is_available=lambda: False).missing()
    assert said is not None
    assert "CUDA" in said


def test_a_missing_torch_xla_is_said_with_what_to_install() -> None:
    said = Xla(load=lambda: None).missing()
    assert said is not None
    assert "torch_xla is not installed" in said
    assert "pip install" in said


def test_a_torch_xla_that_finds_no_device_is_said_with_its_own_words() -> None:
    def device() -> torch.device:
        raise RuntimeError("No accelerator found")

    assert "No accelerator found" in str(Xla(load=lambda: fake_xla(device=device)).missing())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_trainer_refuses_what_its_machine_lacks_before_it_makes_anything() -> None:
    with pytest.raises(ConfigError, match=r"train\.accelerator: cannot use 'cuda'"):
        Trainer(Clicks(), TrainConfig(accelerator="cuda"))


def test_a_model_and_what_its_collections_give_go_to_the_accelerator() -> None:
    model = Model(Clicks(), Mode.TRAIN, seed=0)
    try:
        take(Xla(load=lambda: fake_xla(device=lambda: torch.device("meta"))), model.module)
        assert {weight.device.type for weight in model.module.parameters()} == {"meta"}
        assert {collection.device.type for collection in model.collections} == {"meta"}
    finally:
        model.close()


@dataclass(frozen=True)
class Kept(Clicks):
    """Keeps its model, to be looked at."""

    def model(self) -> Any:
        KEPT.append(super().model())
        return KEPT[-1]


KEPT: list[Any] = []


def test_xla_is_told_of_the_end_of_every_step_and_trains_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = fake_xla()
    monkeypatch.setitem(accelerators.ACCELERATORS, "xla", lambda: Xla(load=lambda: fake))  # type: ignore[arg-type]
    KEPT.clear()
    rows: list[Any] = []

    class Look(accelerators.Hook):
        def end(self, run: Any) -> None:  # noqa: ARG002
            rows.append(rows_of(KEPT[-1]))

    for name in ("xla", None):
        config = TrainConfig(accelerator=name, prefetch=0, async_push=False)  # type: ignore[arg-type]
        assert Trainer(Kept(batches=3), config, hooks=[Look()]).train().steps == 3
    assert fake.synced == 3
    assert rows[0] == rows[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_trains_and_the_cpu_reads_its_checkpoint(tmp_path: Any) -> None:
    KEPT.clear()
    config = TrainConfig(accelerator="cuda", model_dir=str(tmp_path))
    assert Trainer(Kept(batches=5), config).train().steps == 5
    assert {weight.device.type for weight in KEPT[0].parameters()} == {"cuda"}
    found = [
        Trainer(Clicks(batches=5), TrainConfig(accelerator=name, model_dir=str(tmp_path))).evaluate()["loss"]
        for name in ("cuda", "cpu")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
