"""Gathering on a device: the same outputs as the core's to the bit, and a gradient for each occurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.emulated_cuda import device_named, device_names, nothing_waits
from services.properties import tries
from services.slow_device import SlowDevice
from torch import Tensor
from torch.testing import assert_close

from monolith.cuda import Device
from monolith.errors import FeatureError
from monolith.feature import (
    ADDN,
    CONCAT,
    NONE,
    STACK,
    Each,
    FeatureIds,
    FirstN,
    Gatherer,
    InputSpec,
    LayoutKind,
    LayoutPlan,
    LayoutSpec,
    Max,
    Mean,
    SliceSpec,
    Sum,
    plan_layouts,
)
from monolith.feature.cuda import DeviceGatherer, PaddedSteps
from monolith.tensors import RaggedTensor


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


def layout(name: str, kind: LayoutKind, *slices: tuple[str, int, int]) -> LayoutSpec:
    return LayoutSpec(name, kind, tuple(SliceSpec(*part) for part in slices))


TABLES = {"t": 3, "u": 2}
FEATURES = [
    InputSpec("sum", "t", Sum()),
    InputSpec("mean", "t", Mean()),
    InputSpec("max", "t", Max()),
    InputSpec("seq", "u", FirstN(2)),
    InputSpec("also", "u", Sum()),
]
LAYOUTS = [
    layout("add", ADDN, ("sum", 0, 1), ("mean", 0, 1), ("max", 2, 3)),
    layout("cat", CONCAT, ("mean", 1, 3), ("max", 0, 3), ("sum", 0, 2)),
    layout("list", NONE, ("sum", 0, 3), ("seq", 0, 2), ("also", 0, 2)),
    layout("stack", STACK, ("max", 1, 3), ("sum", 1, 3)),
    layout("steps", CONCAT, ("seq", 1, 2), ("seq", 0, 2)),
]
PLAN = plan_layouts(TABLES, FEATURES, LAYOUTS)
BATCH = FeatureIds.pack(
    {
        "sum": ragged([1, 2], [2], []),
        "other": ragged([77], [], [78, 79]),
        "mean": ragged([3, 4], [], [4, 4, 3]),
        "max": ragged([1], [5, 6], [7, 7]),
        "seq": ragged([1, 2, 3], [3], [2, 2]),
        "also": ragged([2], [9], [1]),
    }
)


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def tables_of(plan: LayoutPlan, sizes: Tensor) -> list[str]:
    return [table for table, many in zip(plan.tables, sizes.tolist(), strict=True) for _ in range(many)]


def split(plan: LayoutPlan, sizes: Tensor, rows: Tensor) -> list[Tensor]:
    """Return rows one by one."""
    dims = dict(zip(plan.tables, plan.table_dims, strict=True))
    return list(rows.split([dims[table] for table in tables_of(plan, sizes)]))


class Both:
    """A batch in host memory and on a device, with the same rows."""

    def __init__(
        self,
        plan: LayoutPlan,
        batch: FeatureIds,
        device: Device,
        values: Callable[[int], Tensor],
        *,
        padded: bool = False,
        steps: PaddedSteps | None = None,
    ) -> None:
        self.plan = plan
        self.host = Gatherer(plan).read(batch)
        self.there = DeviceGatherer(plan, device).read(batch, padded=padded, steps=steps)
        self.rows = values(self.host.floats)
        ids = zip(tables_of(plan, self.host.sizes), self.host.ids.tolist(), strict=True)
        self.by_id = dict(zip(ids, split(plan, self.host.sizes, self.rows), strict=True))
        found = [self.by_id[one] for one in self.occurrences]
        self.occurring = (torch.cat(found) if found else torch.zeros(0)).to(device.torch_device)

    @property
    def occurrences(self) -> list[tuple[str, int]]:
        tables = tables_of(self.plan, self.there.sizes)
        return list(zip(tables, self.there.ids.tolist(), strict=True))

    def gradients(self, scale: float) -> tuple[Tensor, Tensor]:
        """Return those of distinct rows: the core's, and the sums of the device's."""
        host = self._gradient(self.host, self.rows, scale)
        there = self._gradient(self.there, self.occurring, scale)
        sums = {key: torch.zeros_like(row) for key, row in self.by_id.items()}
        for key, one in zip(self.occurrences, split(self.plan, self.there.sizes, there.cpu()), strict=True):
            sums[key] += one
        return host, torch.cat(list(sums.values())) if sums else torch.zeros(0)

    def _gradient(self, batch: Any, rows: Tensor, scale: float) -> Tensor:
        rows = rows.clone().requires_grad_()
        outputs = batch.outputs(rows, lambda: scale)
        weights = [torch.linspace(-1, 2, out.numel()).view(out.shape).to(out) for out in outputs]
        torch.autograd.backward(list(outputs), weights)
        assert rows.grad is not None
        return rows.grad

    def assert_same(self, scale: float = 1.0) -> None:
        for found, expected in zip(
            self.there.outputs(self.occurring), self.host.outputs(self.rows), strict=True
        ):
            assert torch.equal(found.cpu(), expected)
        host, there = self.gradients(scale)
        assert_close(there, host, rtol=1e-6, atol=4e-6)  # sums of several, in another order


def random(seed: int) -> Callable[[int], Tensor]:
    return lambda floats: torch.randn(floats, generator=torch.Generator().manual_seed(seed))


def rounded(seed: int) -> Callable[[int], Tensor]:
    """Return values of which some are equal."""
    return lambda floats: random(seed)(floats).round()


# Batches


def test_ids_are_in_the_order_of_their_occurrence_table_after_table(device: Device) -> None:
    found = DeviceGatherer(PLAN, device).read(BATCH)
    assert found.ids.device == device.torch_device
    assert not found.distinct
    # Within a table features are in the order of their names: max, mean, sum; also, seq.
    assert found.ids.tolist() == [1, 5, 6, 7, 7, 3, 4, 4, 4, 3, 1, 2, 2, 2, 9, 1, 1, 2, 3, 3, 2, 2]
    assert found.sizes.tolist() == [13, 9]
    assert found.floats == 13 * 3 + 9 * 2


def test_outputs_have_the_bits_of_the_core_and_gradients_its_sums(device: Device) -> None:
    Both(PLAN, BATCH, device, random(0)).assert_same(scale=3.0)
    Both(PLAN, BATCH, device, rounded(1)).assert_same()  # maxima tie


def test_one_id_in_each_cell_is_the_plain_case(device: Device) -> None:
    features = [InputSpec(f"f{i}", "tu"[i % 2], [Sum(), Mean(), Max()][i % 3]) for i in range(7)]
    names = [feature.name for feature in features]
    layouts = [
        layout("bias", ADDN, *((name, 0, 1) for name in names)),
        layout("vectors", CONCAT, *((name, 0, 2) for name in names)),
    ]
    ids = torch.randint(0, 5, (9, 7), generator=torch.Generator().manual_seed(0))
    both = Both(plan_layouts(TABLES, features, layouts), FeatureIds.one_each(names, ids), device, random(0))
    both.assert_same(scale=9.0)


def test_a_gradient_is_bit_equal_where_each_float_of_a_row_goes_to_one_place(device: Device) -> None:
    plan = plan_layouts({"t": 3}, [InputSpec("a", "t", Mean())], [layout("a", CONCAT, ("a", 0, 3))])
    batch = FeatureIds.pack({"a": ragged([1, 2], [3, 1, 1], [], [2])})
    host, there = Both(plan, batch, device, random(0)).gradients(7.0)
    assert torch.equal(there, host)


def test_absent_features_read_as_zeros_and_have_no_gradients(device: Device) -> None:
    batch = FeatureIds.pack({"sum": ragged([1], [2]), "other": ragged([8], [9])})
    found = DeviceGatherer(PLAN, device).read(batch)
    assert found.ids.tolist() == [1, 2]
    outputs = found.layouts(found.outputs(torch.arange(6.0, device=device.torch_device)))
    assert outputs["cat"].tolist() == [[0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 3, 4]]  # type: ignore[union-attr]
    Both(PLAN, batch, device, random(0)).assert_same()


def test_a_shared_feature_reads_the_same_everywhere_and_takes_all_gradients(device: Device) -> None:
    batch = FeatureIds.pack(
        {
            "mean": ragged([3, 4]),
            "sum": ragged([1], [2], [1]),
            "seq": ragged([9, 8, 7]),
            "max": ragged([5, 5, 6]),
        },
        shared=["mean", "seq", "max"],
    )
    Both(PLAN, batch, device, rounded(0)).assert_same(scale=3.0)


def test_weights_multiply_embeddings_and_their_gradients(device: Device) -> None:
    features = [
        InputSpec("sum", "t", Sum()),
        InputSpec("mean", "t", Mean()),
        InputSpec("seq", "u", FirstN(2)),
        InputSpec("plain", "t", Mean()),
    ]
    layouts = [layout(feature.name, CONCAT, (feature.name, 0, 2)) for feature in features]
    weights = torch.tensor([0.5, -1.5, 3.0, 0.25, 0.0])
    batch = FeatureIds.pack(
        {feature.name: ragged([1, 2, 3], [], [2], [3]) for feature in features},
        weights=dict.fromkeys(("sum", "mean", "seq"), weights),
    )
    Both(plan_layouts(TABLES, features, layouts), batch, device, random(0)).assert_same(scale=4.0)


def test_weights_go_with_no_maximum(device: Device) -> None:
    batch = FeatureIds.pack({"max": ragged([1, 2])}, weights={"max": torch.full((2,), 0.5)})
    with pytest.raises(FeatureError, match="takes the maximum has no weights"):
        DeviceGatherer(PLAN, device).read(batch)


def test_outputs_that_are_not_used_count_as_zeros(device: Device) -> None:
    both = Both(PLAN, BATCH, device, random(0))
    rows = both.occurring.requires_grad_()
    both.there.layouts(both.there.outputs(rows))["list"][0].sum().backward()  # type: ignore[union-attr]
    assert rows.grad is not None
    keys = zip(both.occurrences, split(PLAN, both.there.sizes, rows.grad.cpu()), strict=True)
    found = [gradient.tolist() for _, gradient in keys]
    assert found == [[0] * 3] * 10 + [[1] * 3] * 3 + [[0] * 2] * 9


def test_a_batch_may_be_empty(device: Device) -> None:
    found = DeviceGatherer(PLAN, device).read(FeatureIds.pack({"sum": ragged()}))
    rows = torch.zeros(0, device=device.torch_device)
    assert [out.shape[0] for out in found.outputs(rows)] == [0] * len(PLAN.shapes)
    nobody = DeviceGatherer(PLAN, device).read(FeatureIds.pack({"sum": ragged([], [])}))
    assert not any(out.any() for out in nobody.outputs(rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": torch.tensor([0, 1])}, "splits must have one entry per cell"),
        ({"splits": torch.tensor([0, 2, 1, 3])}, "splits must not fall"),
        ({"splits": torch.tensor([0, 1, 2, 4])}, "end with the number of ids, 3"),
        ({"splits": torch.tensor([1, 1, 2, 3])}, "begin with 0"),
        ({"batch_size": 2}, "splits must have one entry per cell"),
        ({"names": ("sum", "sum")}, "appears twice"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    whole = {"names": ("sum",), "ids": torch.tensor([1, 2, 3]), "splits": torch.arange(4), "batch_size": 3}
    with pytest.raises(FeatureError, match=message):
        DeviceGatherer(PLAN, device_named(device_names()[0])).read(FeatureIds(**(whole | change)))


def test_rows_of_another_size_or_type_are_refused(device: Device) -> None:
    found = DeviceGatherer(PLAN, device).read(BATCH)
    for rows in (torch.zeros(3), torch.zeros(found.floats, dtype=torch.float64)):
        with pytest.raises(FeatureError, match=f"must be float32 of shape \\({found.floats},\\)"):
            found.outputs(rows.to(device.torch_device))


def test_more_outputs_than_kernels_can_be_told_of_are_refused(device: Device) -> None:
    many = [layout(f"l{number}", CONCAT, ("sum", 0, 1)) for number in range(449)]
    with pytest.raises(FeatureError, match="448 outputs, got 449"):
        DeviceGatherer(plan_layouts(TABLES, FEATURES, many), device)


# Equal ids


def test_equal_ids_of_a_table_are_brought_together_at_their_first_place(device: Device) -> None:
    plan = plan_layouts(
        {"t": 2, "u": 1},
        [InputSpec("a", "t", Sum()), InputSpec("b", "t", Sum()), InputSpec("c", "u", Sum())],
        [layout("a", CONCAT, ("a", 0, 2), ("b", 0, 2)), layout("c", CONCAT, ("c", 0, 1))],
    )
    batch = FeatureIds.pack({"a": ragged([5, 1], [5]), "b": ragged([1], [2]), "c": ragged([1], [1, 5])})
    found = DeviceGatherer(plan, device).read(batch)
    gradient = torch.tensor([1.0, 2, 10, 20, 100, 200, 3, 4, 30, 40, 7, 8, 9], device=device.torch_device)
    assert found.sum_equal(gradient).tolist() == [101, 202, 13, 24, 0, 0, 0, 0, 30, 40, 15, 0, 9]


def test_long_runs_of_equal_ids_are_summed_in_the_order_of_the_batch(device: Device) -> None:
    plan = plan_layouts({"t": 3}, [InputSpec("a", "t", Sum())], [layout("a", CONCAT, ("a", 0, 3))])
    ids = torch.tensor([7] * 100 + [3] * 31 + [7] * 40)
    found = DeviceGatherer(plan, device).read(FeatureIds.one_each(["a"], ids[:, None]))
    gradient = torch.randn(171, 3, generator=torch.Generator().manual_seed(0))
    summed = found.sum_equal(gradient.view(-1).to(device.torch_device)).cpu().view(171, 3)
    expected = torch.zeros(3)
    for one in gradient[ids == 7]:
        expected = expected + one
    assert torch.equal(summed[0], expected)
    assert_close(summed[100], gradient[100:131].sum(0))
    assert not summed[ids == 7][1:].any()
    assert found.sum_equal(torch.zeros(513, device=device.torch_device)).shape == (513,)


def test_no_call_waits_for_the_device(device: Device) -> None:
    found = DeviceGatherer(PLAN, device).read(BATCH)
    rows = torch.randn(found.floats, device=device.torch_device).requires_grad_()
    upstream = [torch.ones(3, *shape, device=device.torch_device) for shape in PLAN.shapes]
    with nothing_waits(device):
        torch.autograd.backward(list(found.outputs(rows)), upstream)
    assert rows.grad is not None


def test_ids_are_copied_while_the_device_computes_and_readers_wait_for_them() -> None:
    device = SlowDevice()
    found = DeviceGatherer(PLAN, device).read(BATCH)
    (upload,) = device.first.waited_for
    assert upload is not device.first
    assert [one.data_ptr() for one in device.first.kept] == [found.ids.untyped_storage().data_ptr()]
    rows, other = torch.randn(found.floats), device.new_stream()
    found.outputs(rows)
    assert device.first.waited_for == [upload]  # and for nothing more, where it was read
    with device.on(other):
        found.outputs(rows)
    assert other.waited_for == [device.first]
    assert {one.data_ptr() for one in other.kept} >= {rows.data_ptr()}
    assert not any(event.waits for stream in (device.first, other) for event in stream.events)


# Padded batches


def drawn_batch(seed: int, size: int = 200, most: int = 4) -> FeatureIds:
    """Return a batch of two tables, whose examples have up to `most` ids of a feature each."""
    draw = torch.Generator().manual_seed(seed)
    features = {}
    for name in ("sum", "mean", "seq"):
        lengths = torch.randint(0, most + 1, (size,), generator=draw)
        ids = torch.randint(0, 1000, (int(lengths.sum()),), generator=draw)
        features[name] = RaggedTensor.from_row_lengths(ids, lengths)
    return FeatureIds.pack(features)


def test_padding_repeats_the_last_id_of_a_table_and_has_no_gradient(device: Device) -> None:
    plain, padded = (DeviceGatherer(PLAN, device).read(BATCH, padded=one) for one in (False, True))
    assert padded.sizes.tolist() == [32, 24]
    assert plain.sizes.tolist() == [13, 9]
    for found, expected in zip(padded.ids.cpu().split([32, 24]), plain.ids.cpu().split([13, 9]), strict=True):
        assert found.tolist() == [*expected.tolist(), *[int(expected[-1])] * (len(found) - len(expected))]
    rows = torch.randn(padded.floats, device=device.torch_device).requires_grad_()
    torch.autograd.backward([one.sum() for one in padded.outputs(rows)])
    assert rows.grad is not None
    t, u = rows.grad.cpu().split([32 * 3, 24 * 2])
    assert t.view(32, 3)[13:].abs().sum() == u.view(24, 2)[9:].abs().sum() == 0
    assert u.view(24, 2)[:9].abs().sum() > 0


def test_batches_that_differ_a_little_are_padded_to_the_same_shape(device: Device) -> None:
    gatherer = DeviceGatherer(PLAN, device)
    several = [gatherer.read(drawn_batch(seed), padded=True) for seed in range(20)]
    assert len({one.shape for one in several}) == 1
    assert several[0].shape is not None
    many = [len(drawn_batch(seed).ids) for seed in range(20)]
    assert max(many) <= len(several[0].ids) <= 1.5 * min(many)
    assert gatherer.read(drawn_batch(0)).shape is None


def test_room_grows_with_larger_batches_and_shrinks_if_most_of_it_would_be_padding(device: Device) -> None:
    gatherer = DeviceGatherer(PLAN, device)
    small, large = (gatherer.read(drawn_batch(0, most=most), padded=True) for most in (4, 6))
    assert (large.sizes > small.sizes)[small.sizes > 0].all()
    again = gatherer.read(drawn_batch(1, most=5), padded=True)
    assert again.shape == large.shape  # fits into the room of the larger one
    few = gatherer.read(drawn_batch(1, most=1), padded=True)
    assert few.sizes.sum() < large.sizes.sum() / 2
    fewer = gatherer.read(drawn_batch(2, size=100, most=4), padded=True)
    assert fewer.shape != few.shape  # another number of examples


def test_a_table_without_ids_has_no_room_and_a_batch_without_a_feature_another_shape(device: Device) -> None:
    gatherer = DeviceGatherer(PLAN, device)
    both = gatherer.read(FeatureIds.pack({"sum": ragged([1], [2, 3]), "seq": ragged([], [4])}), padded=True)
    one = gatherer.read(FeatureIds.pack({"sum": ragged([1], [2, 3]), "seq": ragged([], [])}), padded=True)
    assert [bool(many) for many in both.sizes] == [True, True]
    assert [bool(many) for many in one.sizes] == [True, False]
    assert both.shape != one.shape


def test_a_batch_refills_the_memory_of_another_of_its_shape(device: Device) -> None:
    gatherer = DeviceGatherer(PLAN, device)
    first, second = (gatherer.read(drawn_batch(seed), padded=True) for seed in (0, 1))
    twin = first.twin()
    twin.refill(second)
    rows = torch.randn(second.floats, device=device.torch_device)
    for found, expected in zip(twin.outputs(rows), second.outputs(rows), strict=True):
        assert torch.equal(found.cpu(), expected.cpu())


# Each ID kept

JAGGED_HISTORY = layout("history", CONCAT, ("history", 1, 3), ("history", 0, 1))
JAGGED = plan_layouts(
    TABLES,
    [*FEATURES, InputSpec("history", "t", Each()), InputSpec("actions", "u", Each())],
    [
        *LAYOUTS,
        JAGGED_HISTORY,
        layout("steps of both", NONE, ("history", 0, 2), ("actions", 0, 2)),
    ],
)
HISTORY = FeatureIds.pack(
    {
        "history": ragged([5, 6, 5], [], [7]),
        "sum": ragged([6], [], [1]),
        "actions": ragged([1, 2, 1], [], [3]),
        "also": ragged([2], [9], [1]),
    }
)


def test_each_id_is_kept_as_by_the_core(device: Device) -> None:
    both = Both(JAGGED, HISTORY, device, random(0))
    both.assert_same(scale=2.0)
    history = both.there.layouts(both.there.outputs(both.occurring))["history"]
    assert isinstance(history, RaggedTensor)
    assert history.row_splits.tolist() == [0, 3, 3, 4]
    assert history.row_splits.device == history.flat_values.device


def test_a_model_of_kept_ids_alone_needs_no_kernel(device: Device) -> None:
    plan = plan_layouts({"t": 3}, [InputSpec("history", "t", Each())], [JAGGED_HISTORY])
    Both(plan, HISTORY, device, random(1)).assert_same(scale=3.0)


def test_batches_of_kept_ids_have_no_shape_that_a_graph_could_be_captured_for(device: Device) -> None:
    gatherer = DeviceGatherer(JAGGED, device)
    one_each = FeatureIds.one_each(("history", "sum"), torch.tensor([[1, 2], [3, 4]]))
    for batch in (HISTORY, one_each):
        assert gatherer.read(batch, padded=True).shape is None


STEPS = PaddedSteps(("history", "actions", "history.time"), ("first",))


def histories(seed: int, *, steps: bool = True) -> FeatureIds:
    """Return 50 examples with histories of up to 3 steps, an action for each, and times."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (50,), generator=draw) * steps
    many = int(lengths.sum())

    def of_steps() -> RaggedTensor:
        return RaggedTensor.from_row_lengths(torch.randint(0, 9, (many,), generator=draw), lengths)

    return FeatureIds.pack(
        {
            "first": torch.randint(0, 9, (50,), generator=draw),
            "history": of_steps(),
            "actions": of_steps(),
            "history.time": of_steps(),
            "also": torch.randint(0, 9, (50,), generator=draw),
            "sum": torch.randint(0, 9, (50,), generator=draw),
        },
        event_times=torch.randint(0, 1000, (50,), generator=draw),
        weights={"history": torch.rand(many, generator=draw)} if many else None,
    )


def test_histories_of_a_shape_have_zeros_behind_the_last_step_and_no_gradient_there(device: Device) -> None:
    gatherer = DeviceGatherer(JAGGED, device)
    first, second = (gatherer.read(histories(seed), padded=True, steps=STEPS) for seed in (0, 1))
    assert first.shape == second.shape is not None
    twin = first.twin()
    twin.refill(second)
    rows = torch.randn(second.floats, device=device.torch_device).requires_grad_()
    real, padded = second.outputs(rows), twin.outputs(rows)
    for output, feature in enumerate(JAGGED.each):
        many = len(real[output])
        assert torch.equal(padded[output][:many].cpu(), real[output].cpu())
        if feature >= 0:
            assert many < len(padded[output])
            assert not padded[output][many:].any()
    expected = torch.autograd.grad(real, rows, [torch.ones_like(one) for one in real])
    gradients = [torch.full_like(one, torch.nan) for one in padded]
    for gradient, one in zip(gradients, real, strict=True):
        gradient[: len(one)] = 1
    found = torch.autograd.grad(padded, rows, gradients)
    assert torch.equal(found[0].cpu(), expected[0].cpu())
    history = twin.layouts(padded)["history"]
    assert isinstance(history, RaggedTensor)
    assert history.row_splits.tolist() == histories(1)["history"].row_splits.tolist()


def test_a_captured_step_has_the_ids_that_its_model_reads(device: Device) -> None:
    gatherer, given = DeviceGatherer(JAGGED, device), histories(1)
    twin = gatherer.read(histories(0), padded=True, steps=STEPS).twin()
    twin.refill(gatherer.read(given, padded=True, steps=STEPS))
    assert set(twin.kept_ids) == {"history", "actions", "history.time", "first"}
    for name, found in twin.kept_ids.items():
        wanted = given[name]
        assert found.row_splits.tolist() == wanted.row_splits.tolist()
        assert found.flat_values[: len(wanted.flat_values)].tolist() == wanted.flat_values.tolist()
    assert len({len(twin.kept_ids[name].flat_values) for name in STEPS.aligned}) == 1
    assert given.event_times is not None
    assert twin.event_times is not None
    assert twin.event_times.tolist() == given.event_times.tolist()


def test_each_occurrence_has_the_time_of_its_example_and_padding_has_none(device: Device) -> None:
    gatherer, given = DeviceGatherer(JAGGED, device), histories(1)
    assert given.event_times is not None
    found = gatherer.read(given, padded=True, steps=STEPS)
    newest = found.newest(given.event_times).cpu()
    wanted: dict[int, int] = {}
    for name in given.names:
        times = torch.repeat_interleave(given.event_times, given[name].row_lengths())
        for one, time in zip(given[name].flat_values.tolist(), times.tolist(), strict=True):
            wanted[one] = max(wanted.get(one, 0), time)
    for one, time in zip(found.ids.tolist(), newest.tolist(), strict=True):
        assert time <= wanted[one]
    assert int(newest.max()) == int(given.event_times.max())
    assert 0 in newest.tolist()


def test_histories_without_steps_are_padded_with_an_id_of_their_table(device: Device) -> None:
    gatherer, none = DeviceGatherer(JAGGED, device), histories(0, steps=False)
    found = gatherer.read(none, padded=True, steps=STEPS)
    assert found.shape is not None
    assert set(found.ids.tolist()) <= set(none.ids.tolist())
    assert len(found.kept_ids["history"].flat_values) > 0
    no_actions = FeatureIds.pack({name: none[name] for name in none.names if name not in ("also", "max")})
    assert gatherer.read(no_actions, padded=True, steps=STEPS).shape is None


def test_a_history_whose_actions_do_not_fit_has_no_shape(device: Device) -> None:
    assert DeviceGatherer(JAGGED, device).read(HISTORY, padded=True, steps=STEPS).shape is not None
    odd = FeatureIds.pack(
        {"history": ragged([5, 6], []), "actions": ragged([1], [2]), "sum": ragged([1], [2])}
    )
    assert DeviceGatherer(JAGGED, device).read(odd, padded=True, steps=STEPS).shape is None


# Any batch


@st.composite
def batches(draw: Any) -> FeatureIds:
    size = draw(st.integers(1, 6))
    features, shared, weights = {}, [], {}
    for feature in JAGGED.features:
        if draw(st.booleans()):
            rows = 1 if draw(st.booleans()) else size
            ids = st.lists(st.integers(-3, 3), max_size=4)
            cells = draw(st.lists(ids, min_size=rows, max_size=rows))
            features[feature.name] = ragged(*cells)
            shared += [feature.name] if rows == 1 else []
            many = sum(map(len, cells))
            if many and feature.name != "max" and draw(st.booleans()):
                some = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, -1.0]), min_size=many, max_size=many))
                weights[feature.name] = torch.tensor(some)
    return FeatureIds.pack(features, shared=shared, batch_size=size, weights=weights)


@settings(max_examples=tries(15), deadline=None)
@given(batch=batches(), seed=st.integers(0, 9), padded=st.booleans())
def test_any_batch_is_gathered_as_by_the_core(batch: FeatureIds, seed: int, padded: bool) -> None:
    device = device_named(device_names()[0])
    for plan in (PLAN, JAGGED):
        Both(plan, batch, device, rounded(seed), padded=padded).assert_same(scale=2.0)
    steps = PaddedSteps(("history",), ("sum", "actions"))
    Both(JAGGED, batch, device, rounded(seed), padded=padded, steps=steps).assert_same(scale=2.0)
