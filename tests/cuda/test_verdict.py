"""The verdict on a batch: found on the device, and what a refused batch did is undone there."""

from __future__ import annotations

import pytest
import torch
from services.emulated_cuda import device_named, device_names, nothing_waits

from monolith.cuda import BatchVerdict, Device, Kept


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def test_what_is_not_finite_is_counted_by_kind(device: Device) -> None:
    where = device.torch_device
    verdict = BatchVerdict(device, ["the loss", "a gradient"])
    large = torch.zeros(100_000, device=where)
    verdict.look([torch.tensor(1.0, device=where)], [large, torch.empty(0, device=where)])
    assert verdict.describe(verdict.found.tolist()) is None
    large[[0, 50_000, 99_999]] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=where)
    verdict.look([torch.tensor(torch.nan, device=where)], [large.view(1000, 100).t()])
    assert verdict.found.tolist() == [4, 1, 3]
    assert verdict.describe([4, 1, 3]) == (
        "the loss has 1 floats that are NaN or infinite and a gradient has 3 floats that are NaN or infinite"
    )
    verdict.look([torch.tensor(2.0, device=where)], [])
    assert verdict.found.tolist() == [0, 0, 0]


def test_more_tensors_than_a_launch_has_room_for_are_looked_at(device: Device) -> None:
    verdict = BatchVerdict(device, ["a gradient"])
    several = [torch.ones(7, device=device.torch_device) for _ in range(250)]
    several[201][6] = torch.nan
    verdict.look(several)
    assert verdict.found.tolist() == [1, 1]


@pytest.mark.parametrize("refused", [False, True])
def test_tensors_are_put_back_if_the_batch_was_refused(device: Device, refused: bool) -> None:
    where = device.torch_device
    verdict = BatchVerdict(device, ["the loss"])
    tensors = [
        torch.arange(20_000, dtype=torch.float32, device=where),
        torch.arange(5, dtype=torch.bfloat16, device=where),
        torch.ones((), dtype=torch.int64, device=where),
        torch.ones((3, 4), device=where).t(),
    ]
    before = [one.clone() for one in tensors]
    kept = Kept(device, tensors, verdict)
    loss = torch.tensor(torch.nan if refused else 1.0, device=where)
    with nothing_waits(device):
        kept.keep()
        for one in tensors:
            one.add_(1)
        verdict.look([loss])
        kept.put_back()
    for one, was in zip(tensors, before, strict=True):
        assert torch.equal(one, was if refused else was + 1)
