from __future__ import annotations

import torch

from monolith.nn.optimizers.dense_optimizer import fusable_runs


def test_runs_are_of_one_dtype_and_in_order() -> None:
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float16)
    assert fusable_runs([torch.zeros(1, dtype=dtype) for dtype in dtypes]) == [[0, 2], [1], [3]]


def test_runs_are_of_one_device() -> None:
    tensors = [torch.zeros(1), torch.zeros(1, device="meta"), torch.zeros(1)]
    assert fusable_runs(tensors) == [[0, 2], [1]]


def test_nothing_has_no_runs() -> None:
    assert fusable_runs([]) == []
