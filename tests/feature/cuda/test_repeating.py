"""Rows of distinct ids, as often as their ids occur, and gradients back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from services.emulated_cuda import device_named, device_names
from torch import Tensor

from monolith.cuda import Device
from monolith.errors import FeatureError
from monolith.feature.cuda.repeating import Occurrences, Repeater

DIMS = (3, 1, 2, 40)


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def occurring(repeater: Repeater, by_table: list[list[int]]) -> Occurrences:
    """Occurrences by the numbers that each table's ids have among its own distinct ones."""
    distinct = np.array([len(set(numbers)) for numbers in by_table], np.int64)
    many = np.array([len(numbers) for numbers in by_table], np.int64)
    firsts = np.cumsum(distinct) - distinct
    numbers = [int(first) + n for first, of_table in zip(firsts, by_table, strict=True) for n in of_table]
    there = repeater.device.torch_device
    return Occurrences(
        parts=torch.from_numpy(repeater.parts(distinct, many)).to(there),
        numbers=torch.tensor(numbers, dtype=torch.int64, device=there),
        distinct=int(distinct.sum()),
        floats=int(many @ np.array(DIMS)),
    )


def expected(rows: Tensor, by_table: list[list[int]]) -> Tensor:
    """By plain indexing, table by table."""
    parts, at = [], 0
    for dim, numbers in zip(DIMS, by_table, strict=True):
        size = len(set(numbers)) * dim
        parts.append(rows[at : at + size].view(-1, dim)[numbers].reshape(-1))
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize(
    "by_table",
    [
        [[0, 1, 0, 2], [0], [], [0, 0, 0]],
        [[0], [0, 1, 2, 3], [1, 0, 1, 0, 1, 1], [0, 1]],
        [[0] * 70, [0], [0, 1], [1] * 33 + [0] * 100],  # more than a warp has lanes
        [[], [], [], [0]],
    ],
)
def test_each_occurrence_has_its_row_and_a_row_the_gradients_of_all_of_its_occurrences(
    device: Device, by_table: list[list[int]]
) -> None:
    repeater = Repeater(DIMS, device)
    occurrences = occurring(repeater, by_table)
    draw = torch.Generator().manual_seed(0)
    floats = sum(dim * len(set(numbers)) for dim, numbers in zip(DIMS, by_table, strict=True))
    rows = torch.randn(floats, generator=draw)
    there = rows.clone().to(device.torch_device).requires_grad_()
    found = repeater.repeated(there, occurrences)
    plain = rows.double().requires_grad_()
    wanted = expected(plain, by_table)
    assert torch.equal(found.detach().cpu(), wanted.detach().float())
    gradient = torch.randn(len(found), generator=draw)
    found.backward(gradient.to(device.torch_device))
    wanted.backward(gradient.double())
    assert there.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(there.grad.cpu(), plain.grad.float(), rtol=1e-5, atol=1e-5)


def test_gradients_are_added_up_in_the_order_of_the_batch(device: Device) -> None:
    """In floats, other orders have other sums: 1 is lost beside 2^25 unless that has gone before."""
    repeater = Repeater(DIMS, device)
    occurrences = occurring(repeater, [[], [0, 1, 0, 0, 1, 1], [], []])
    big = float(1 << 25)
    gradients = torch.tensor([big, 1, -big, 1, big, -big], device=device.torch_device)
    assert repeater.summed(gradients, occurrences, 2).tolist() == [1, 0]


def test_nothing_occurs_in_an_empty_batch(device: Device) -> None:
    repeater = Repeater(DIMS, device)
    occurrences = occurring(repeater, [[], [], [], []])
    rows = torch.zeros(0, device=device.torch_device, requires_grad=True)
    found = repeater.repeated(rows, occurrences)
    found.backward(torch.zeros_like(found))
    assert found.shape == (0,)
    assert rows.grad is not None
    assert rows.grad.shape == (0,)


def test_a_batch_that_no_kernel_can_count_is_refused(device: Device) -> None:
    sizes = np.array([1 << 31, 0, 0, 0], np.int64)
    with pytest.raises(FeatureError, match="smaller batches"):
        Repeater(DIMS, device).parts(sizes, sizes)
