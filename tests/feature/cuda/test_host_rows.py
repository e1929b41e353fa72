"""Rows in host memory for a model on a device: what comes out is what the core makes of them."""

from __future__ import annotations

import pytest
import torch
from services.emulated_cuda import device_named, device_names, nothing_waits
from torch import Tensor
from torch.testing import assert_close

from monolith import native
from monolith.cuda import Device
from monolith.errors import FeatureError
from monolith.feature import (
    ADDN,
    CONCAT,
    NONE,
    Each,
    FeatureIds,
    FirstN,
    Gatherer,
    InputSpec,
    LayoutSpec,
    Max,
    Mean,
    SliceSpec,
    Sum,
    plan_layouts,
)
from monolith.feature.cuda.host_rows import HostRowBatch, HostRowGatherer
from monolith.tensors import RaggedTensor


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


PLAN = plan_layouts(
    {"t": 3, "u": 2, "unused": 5},
    [
        InputSpec("sum", "t", Sum()),
        InputSpec("mean", "t", Mean()),
        InputSpec("max", "u", Max()),
        InputSpec("seq", "t", FirstN(2)),
        InputSpec("history", "t", Each()),
    ],
    [
        LayoutSpec("add", ADDN, (SliceSpec("sum", 0, 1), SliceSpec("mean", 0, 1), SliceSpec("max", 1, 2))),
        LayoutSpec("cat", CONCAT, (SliceSpec("mean", 1, 3), SliceSpec("max", 0, 2))),
        LayoutSpec("list", NONE, (SliceSpec("sum", 0, 3), SliceSpec("seq", 0, 2))),
        LayoutSpec("steps", CONCAT, (SliceSpec("history", 1, 3),)),
    ],
)
RAGGED = FeatureIds.pack(
    {
        "seq": ragged([1, 2, 3], [3], [2, 2]),
        "other": ragged([77], [], [78, 79]),
        "sum": ragged([1, 2], [2], []),
        "history": ragged([2, 9], [], [2]),
        "max": ragged([1], [5, 6], [7, 7]),
        "mean": ragged([3, 4], [], [4, 4, 3]),
    }
)
ONE_EACH = FeatureIds.one_each(
    ("sum", "mean", "max", "seq"), torch.tensor([[1, 1, 2, 3], [2, 1, 2, 1], [1, 5, 2, 3]])
)
SHARED = FeatureIds.pack({"mean": ragged([3, 4]), "sum": ragged([1], [2], [1])}, shared=["mean"])
WEIGHTED = FeatureIds.pack(
    {"sum": ragged([1, 2], [2], [1]), "mean": ragged([2], [2, 3], [])},
    weights={"sum": torch.tensor([0.5, 2.0, 1.0, 3.0])},
)
EMPTY = FeatureIds.pack({"sum": ragged([], [])})
EXTRA_PLACES = FeatureIds.pack(
    {
        "other": ragged([7, 8], [], [9]),
        "sum": ragged([1], [2], [1]),
        "max": ragged([3], [3], [2]),
    }
)
"""One id of each feature that is read, behind one that is not."""
BATCHES = {
    "ragged": RAGGED,
    "beside": EXTRA_PLACES,
    "one each": ONE_EACH,
    "shared": SHARED,
    "weighted": WEIGHTED,
    "empty": EMPTY,
}


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def sent(gatherer: HostRowGatherer, batch: FeatureIds, rows: Tensor) -> HostRowBatch:
    found = gatherer.read(batch)
    found.send(lambda out: out.copy_(rows))  # type: ignore[arg-type, return-value]
    return found


def weights_of(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [torch.linspace(-1, 2, out.numel()).view(out.shape).to(out) for out in outputs]


@pytest.mark.parametrize("kind", BATCHES)
def test_outputs_and_gradients_are_those_of_the_core(device: Device, kind: str) -> None:
    here = Gatherer(PLAN).read(BATCHES[kind])
    rows = torch.randn(here.floats, generator=torch.Generator().manual_seed(0))
    there = sent(HostRowGatherer(PLAN, native.Workers(2), device), BATCHES[kind], rows)
    assert there.ids.equal(here.ids)
    assert there.sizes.equal(here.sizes)
    assert there.counts.equal(here.counts)
    assert (there.floats, there.batch_size) == (here.floats, here.batch_size)
    rows.requires_grad_()
    with nothing_waits(device):
        on_device = there.rows().detach().requires_grad_()
        found = there.outputs(on_device, lambda: 2.0)
    expected = here.outputs(rows, lambda: 2.0)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    assert there.layouts(found).keys() == here.layouts(expected).keys()
    weights = weights_of(found)
    with nothing_waits(device):
        torch.autograd.backward(list(found), weights)
    torch.autograd.backward(list(expected), weights_of(expected))
    assert on_device.grad is not None
    assert_close(on_device.grad.cpu(), rows.grad, rtol=1e-6, atol=1e-6)


def test_one_batch_can_be_read_again_and_several_be_on_their_way(device: Device) -> None:
    gatherer = HostRowGatherer(PLAN, None, device)
    floats = Gatherer(PLAN).read(RAGGED).floats
    several = [sent(gatherer, RAGGED, torch.full((floats,), float(number))) for number in range(3)]
    for number, found in enumerate(several):
        for _ in range(2):
            assert found.outputs(found.rows())[2].amax().item() == 2 * number


def test_rows_of_another_size_are_refused(device: Device) -> None:
    found = sent(
        HostRowGatherer(PLAN, None, device), ONE_EACH, torch.zeros(Gatherer(PLAN).read(ONE_EACH).floats)
    )
    with pytest.raises(FeatureError, match=f"of shape \\({found.floats},\\)"):
        found.outputs(torch.zeros(3))
