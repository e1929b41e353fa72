from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from monolith.checkpoint.dense.training_state import ModelVariables
from monolith.errors import RestoreError, SaveError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("scratch", torch.ones(1), persistent=False)


NAMES = ["kept", "first.weight", "first.bias", "second.weight", "second.bias"]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parameters_and_persistent_buffers_by_name() -> None:
    model = Model()
    found = ModelVariables(model, SaveError)
    assert sorted(found.tensors) == sorted(NAMES)
    assert found.extra == {}
    assert found.name_of(model.second.weight, "somebody") == "first.weight"


def test_compiled_modules_have_the_same_names() -> None:
    model = Model()
    model.first = torch.compile(model.first)
    compiled = torch.compile(model)
    found = ModelVariables(compiled, SaveError)  # type: ignore[arg-type]
    assert sorted(found.tensors) == sorted(NAMES)
    found.load({"first.bias": torch.full((2,), 7.0)}, {})
    assert model.first.bias.tolist() == [7.0, 7.0]
    assert found.name_of(model.first.bias, "somebody") == "first.bias"


@pytest.mark.usefixtures("one_rank")
def test_a_model_trained_across_ranks_has_the_same_names() -> None:
    model = Model()
    found = ModelVariables(nn.parallel.DistributedDataParallel(model), SaveError)
    assert sorted(found.tensors) == sorted(NAMES)
    found.load({"first.bias": torch.full((2,), 7.0)}, {})
    assert model.first.bias.tolist() == [7.0, 7.0]


def test_plain_tensors_by_name() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(1, requires_grad=True)}
    found = ModelVariables(tensors, SaveError)
    found.load({"a": torch.ones(2), "b": torch.ones(1)}, {})
    assert (tensors["a"].tolist(), tensors["b"].tolist()) == ([1.0, 1.0], [1.0])
    assert found.name_of(tensors["b"], "somebody") == "b"


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(RestoreError, match=r"optimizer 'x' trains a tensor of shape \(3,\) that is not"):
        ModelVariables(Model(), RestoreError).name_of(nn.Parameter(torch.ones(3)), "optimizer 'x'")


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.Linear(2, 2, device="meta")])
def test_variables_without_memory_are_refused(make: Any) -> None:
    with pytest.raises(SaveError, match="'weight' has no memory yet"):
        ModelVariables(make(), SaveError)
