"""Gathering: rows to a model's inputs and gradients back, by the core and by torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from monolith import native
from monolith.errors import FeatureError
from monolith.feature import (
    ADDN,
    CONCAT,
    NONE,
    STACK,
    Combiner,
    Each,
    FeatureIds,
    FirstN,
    GatheredBatch,
    Gatherer,
    InputSpec,
    LayoutKind,
    LayoutPlan,
    LayoutSpec,
    Max,
    Mean,
    SliceSpec,
    Sum,
    combine,
    make_fid,
    plan_layouts,
)
from monolith.tensors import RaggedTensor

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


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
]
LAYOUTS = [
    layout("add", ADDN, ("sum", 0, 1), ("mean", 0, 1), ("max", 2, 3)),
    layout("cat", CONCAT, ("mean", 1, 3), ("max", 0, 3), ("sum", 0, 2)),
    layout("list", NONE, ("sum", 0, 3), ("seq", 0, 2)),
    layout("stack", STACK, ("max", 1, 3), ("sum", 1, 3)),
    layout("steps", CONCAT, ("seq", 1, 2), ("seq", 0, 2)),
]
PLAN = plan_layouts(TABLES, FEATURES, LAYOUTS)
BATCH = FeatureIds.pack(
    {
        "sum": ragged([1, 2], [2], []),
        "mean": ragged([3, 4], [], [4, 4, 3]),
        "max": ragged([1], [5, 6], [7, 7]),
        "seq": ragged([1, 2, 3], [3], [2, 2]),
    }
)


def random_rows(found: GatheredBatch, seed: int = 0) -> Tensor:
    return torch.randn(found.floats, generator=torch.Generator().manual_seed(seed))


def reference(plan: LayoutPlan, batch: FeatureIds, rows: Mapping[tuple[str, int], Tensor]) -> list[Tensor]:
    """Fill the outputs feature by feature and slice by slice, from each id's row."""
    sizes = [
        batch.batch_size
        if number < 0
        else len(batch[plan.features[number].name].flat_values)
        if plan.features[number].name in batch.names
        else 0
        for number in plan.each
    ]
    outputs = [
        torch.zeros(size, math.prod(shape)).double() for size, shape in zip(sizes, plan.shapes, strict=True)
    ]
    for use in plan.uses:
        feature = plan.features[use.feature]
        dim = plan.table_dims[plan.tables.index(feature.table)]
        each = isinstance(feature.combiner, Each)
        if feature.name in batch.names:
            ids = batch[feature.name]
            if not each and batch.shared[batch.names.index(feature.name)]:
                ids = RaggedTensor.from_list(ids.to_list() * batch.batch_size, torch.int64, ragged_rank=1)
        else:
            ids = ragged(*[[]] * batch.batch_size)
        held = [rows[feature.table, i] for i in ids.flat_values.tolist()]
        embeddings = torch.stack(held) if held else torch.zeros(0, dim).double()
        pooled = combine(feature.combiner, ids.row_splits, embeddings)[..., use.start : use.start + use.width]
        steps = feature.combiner.length or 1
        pooled = pooled.reshape(-1, steps, use.width)
        for step in range(steps):
            first = use.offset + step * use.stride
            place = outputs[use.output][:, first : first + use.width]
            outputs[use.output] = outputs[use.output].clone()
            outputs[use.output][:, first : first + use.width] = place + pooled[:, step]
    return [out.view(-1, *shape) for out, shape in zip(outputs, plan.shapes, strict=True)]


def by_id(plan: LayoutPlan, found: GatheredBatch, rows: Tensor) -> dict[tuple[str, int], Tensor]:
    ids, sizes, at = iter(found.ids.tolist()), found.sizes.tolist(), 0
    held = {}
    for table, dim, size in zip(plan.tables, plan.table_dims, sizes, strict=True):
        for _ in range(size):
            held[table, next(ids)] = rows[at : at + dim]
            at += dim
    return held


# Planning


def test_the_distinct_ids_of_each_table_come_in_the_order_they_are_met() -> None:
    found = Gatherer(PLAN).read(BATCH)
    # Features are read in the order of their names: max, mean, seq, sum.
    assert found.ids.tolist() == [1, 5, 6, 7, 3, 4, 2, 1, 2, 3]
    assert found.sizes.tolist() == [7, 3]
    assert found.counts.tolist() == [2, 1, 1, 2, 2, 3, 2, 1, 3, 2]
    assert found.floats == 7 * 3 + 3 * 2


def test_features_the_model_does_not_read_are_skipped_and_absent_ones_are_zeros() -> None:
    found = Gatherer(PLAN).read(FeatureIds.pack({"sum": ragged([1], [2]), "other": ragged([8], [9])}))
    assert found.ids.tolist() == [1, 2]
    outputs = found.layouts(found.outputs(torch.arange(6.0)))
    assert outputs["cat"].tolist() == [[0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 3, 4]]  # type: ignore[union-attr]
    assert outputs["steps"].tolist() == [[[0, 0, 0]] * 2] * 2  # type: ignore[union-attr]


def test_each_id_that_is_read_has_the_number_of_its_distinct_one() -> None:
    found = Gatherer(PLAN, native.Workers(2)).read(BATCH)
    numbers = torch.empty(19, dtype=torch.int64)
    found.number(numbers)
    # By table: those of max, mean and sum, then those of seq.
    assert numbers.tolist() == [0, 1, 2, 3, 3, 4, 5, 5, 5, 4, 0, 6, 6, 7, 8, 9, 9, 8, 8]
    assert not found.one_each
    other = Gatherer(PLAN).read(FeatureIds.pack({"other": ragged([8], [9]), "sum": ragged([1], [2])}))
    other.number(numbers[:2])
    assert numbers[:2].tolist() == [0, 1]
    assert other.one_each
    with pytest.raises(ValueError, match="expected 2, got 3"):
        other.number(numbers[:3])


def test_the_order_of_a_batchs_features_does_not_matter() -> None:
    gatherer = Gatherer(PLAN)
    turned = FeatureIds.pack({name: BATCH[name] for name in reversed(BATCH.names)})
    first, second = gatherer.read(BATCH), gatherer.read(turned)
    assert torch.equal(first.ids, second.ids)
    rows = random_rows(first)
    assert all(torch.equal(a, b) for a, b in zip(first.outputs(rows), second.outputs(rows), strict=True))


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
        Gatherer(PLAN).read(FeatureIds(**(whole | change)))


def test_rows_of_another_size_are_refused() -> None:
    found = Gatherer(PLAN).read(BATCH)
    with pytest.raises(FeatureError, match=f"must have shape \\({found.floats},\\)"):
        found.outputs(torch.zeros(3))


def test_a_batch_may_be_empty() -> None:
    found = Gatherer(PLAN).read(FeatureIds.pack({"sum": ragged()}))
    assert [out.shape[0] for out in found.outputs(torch.zeros(0))] == [0] * len(PLAN.shapes)


# Values and gradients


def test_the_outputs_are_what_feature_by_feature_would_give() -> None:
    found = Gatherer(PLAN).read(BATCH)
    rows = random_rows(found)
    expected = reference(PLAN, BATCH, by_id(PLAN, found, rows.double()))
    assert_close(list(found.outputs(rows)), [e.float() for e in expected])
    assert_close(list(found.outputs(rows.double())), expected)


def test_the_torch_path_passes_gradcheck() -> None:
    found = Gatherer(PLAN).read(BATCH)
    assert gradcheck(found.outputs, (random_rows(found).double().requires_grad_(),))


@pytest.mark.filterwarnings("ignore:Input #0 requires gradient and is not a double")
def test_the_core_passes_gradcheck() -> None:
    """In float32, with large steps: without maxima the operation is linear, so they cost no accuracy."""
    smooth = [feature for feature in FEATURES if feature.name != "max"]
    linear = plan_layouts(TABLES, smooth, [layout("a", ADDN, ("sum", 0, 1), ("mean", 1, 2)), LAYOUTS[4]])
    found = Gatherer(linear).read(BATCH)
    rows = random_rows(found).requires_grad_()
    assert gradcheck(found.outputs, (rows,), eps=0.5, atol=1e-5, rtol=1e-5, nondet_tol=0.0)


def test_the_core_and_torch_agree_on_gradients() -> None:
    found = Gatherer(PLAN).read(BATCH)
    for rows in (random_rows(found), torch.zeros(found.floats)):  # zeros: all maxima tie
        core, by_torch = both_gradients(found, rows, "cpu")
        assert by_torch.any()
        assert_close(core, by_torch, rtol=1e-5, atol=1e-5)


def both_gradients(found: GatheredBatch, rows: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows that the core finds, and those that torch does."""

    def gradient(kind: Tensor) -> Tensor:
        kind.requires_grad_()
        outputs = found.outputs(kind)
        weights = [torch.linspace(-1, 2, out.numel()).view(out.shape).to(out) for out in outputs]
        torch.autograd.backward(list(outputs), weights)
        assert kind.grad is not None
        return kind.grad.cpu().double()

    return gradient(rows.clone()), gradient(rows.clone().double().to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_gives_the_same(device: str) -> None:
    found = Gatherer(PLAN).read(BATCH)
    rows = random_rows(found)
    there = found.outputs(rows.double().to(device))
    assert all(out.device.type == device for out in there)
    assert_close([out.cpu().float() for out in there], list(found.outputs(rows)))
    assert_close(*both_gradients(found, rows, device), rtol=1e-5, atol=1e-5)


def test_outputs_that_are_not_used_cost_nothing_and_count_as_zeros() -> None:
    found = Gatherer(PLAN).read(BATCH)
    rows = random_rows(found).requires_grad_()
    found.layouts(found.outputs(rows))["list"][0].sum().backward()
    assert rows.grad is not None
    grads = by_id(PLAN, found, rows.grad)
    assert grads["t", 2].tolist() == [2, 2, 2]
    assert grads["t", 3].tolist() == [0, 0, 0]
    assert grads["u", 1].tolist() == [0, 0]


def test_a_shared_feature_reads_the_same_everywhere_and_takes_all_gradients() -> None:
    batch = FeatureIds.pack(
        {"mean": ragged([3, 4]), "sum": ragged([1], [2], [1]), "seq": ragged([9, 8, 7])},
        shared=["mean", "seq"],
    )
    found = Gatherer(PLAN).read(batch)
    rows = random_rows(found).requires_grad_()
    outputs = found.layouts(found.outputs(rows))
    expected = reference(PLAN, batch, by_id(PLAN, found, rows.detach().double()))
    assert_close(list(found.outputs(rows)), [e.float() for e in expected])
    (outputs["cat"][:, :2].sum() + outputs["list"][1].sum()).backward()  # type: ignore[union-attr, call-overload]
    assert rows.grad is not None
    grads = by_id(PLAN, found, rows.grad)
    assert grads["t", 3].tolist() == [0, 1.5, 1.5]  # half of each of three examples
    assert grads["u", 9].tolist() == [3, 3]
    assert grads["u", 7].tolist() == [0, 0]  # beyond the second position
    assert_close(*both_gradients(found, rows.detach(), "cpu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_multiply_embeddings_and_their_gradients(threads: int) -> None:
    features = [
        InputSpec("sum", "t", Sum()),
        InputSpec("mean", "t", Mean()),
        InputSpec("seq", "t", FirstN(2)),
    ]
    layouts = [layout(name, CONCAT, (name, 0, 1)) for name in ("sum", "mean", "seq")]
    batch = FeatureIds.pack(
        {name: ragged([1, 2], [], [2]) for name in ("sum", "mean", "seq")},
        weights={name: torch.tensor([0.5, 1.5, 3.0]) for name in ("sum", "mean", "seq")},
    )
    found = Gatherer(plan_layouts({"t": 1}, features, layouts), native.Workers(threads)).read(batch)
    rows = torch.tensor([10.0, 20.0]).requires_grad_()
    outputs = found.layouts(found.outputs(rows))
    assert outputs["sum"].flatten().tolist() == [35.0, 0.0, 60.0]  # type: ignore[union-attr]
    assert outputs["mean"].flatten().tolist() == [17.5, 0.0, 20.0]  # type: ignore[union-attr]
    assert outputs["seq"].flatten().tolist() == [5.0, 30.0, 0.0, 0.0, 60.0, 0.0]  # type: ignore[union-attr]
    assert_close(
        [one.float() for one in found.outputs(rows.detach().double())], list(found.outputs(rows.detach()))
    )
    assert_close(*both_gradients(found, rows.detach(), "cpu"), rtol=1e-5, atol=1e-5)


def test_weights_must_fit_their_ids_and_go_with_no_maximum() -> None:
    with pytest.raises(FeatureError, match="feature 'a' has 2 ids and weights"):
        FeatureIds.pack({"a": ragged([1, 2])}, weights={"a": torch.ones(3)})
    with pytest.raises(FeatureError, match="not there"):
        FeatureIds.pack({"a": ragged([1, 2])}, weights={"b": torch.ones(2)})
    plan = plan_layouts({"t": 1}, [InputSpec("a", "t", Max())], [layout("a", CONCAT, ("a", 0, 1))])
    batch = FeatureIds.pack({"a": ragged([1, 2])}, weights={"a": torch.full((2,), 0.5)})
    with pytest.raises(FeatureError, match="takes the maximum has no weights"):
        Gatherer(plan).read(batch)


# Each ID kept

JAGGED = plan_layouts(
    TABLES,
    [*FEATURES, InputSpec("history", "t", Each()), InputSpec("actions", "u", Each())],
    [
        *LAYOUTS,
        layout("history", CONCAT, ("history", 1, 3), ("history", 0, 1)),
        layout("steps of both", NONE, ("history", 0, 2), ("actions", 0, 2)),
    ],
)


def test_each_id_is_kept_without_padding() -> None:
    batch = FeatureIds.pack({"history": ragged([5, 6, 5], [], [7]), "sum": ragged([6], [], [])})
    found = Gatherer(JAGGED).read(batch)
    rows = torch.arange(9.0).requires_grad_()  # of 5, 6, 7
    layouts = found.layouts(found.outputs(rows))
    history = layouts["history"]
    assert isinstance(history, RaggedTensor)
    assert history.to_list() == [[[1, 2, 0], [4, 5, 3], [1, 2, 0]], [], [[7, 8, 6]]]
    both = layouts["steps of both"]
    assert [one.row_lengths().tolist() for one in both] == [[3, 0, 1], [0, 0, 0]]  # type: ignore[union-attr]
    torch.autograd.backward(
        [history.flat_values, layouts["add"]],  # type: ignore[list-item]
        [torch.arange(12.0).view(4, 3), torch.ones(3, 1)],
    )
    assert rows.grad is not None
    assert rows.grad.tolist() == [2 + 8, 0 + 6, 1 + 7, 5 + 1, 3, 4, 11, 9, 10]


def test_a_shared_history_is_kept_once() -> None:
    batch = FeatureIds.pack({"history": ragged([5, 6]), "sum": ragged([6], [5], [])}, shared=["history"])
    found = Gatherer(JAGGED).read(batch)
    history = found.layouts(found.outputs(torch.arange(6.0)))["history"]
    assert isinstance(history, RaggedTensor)
    assert history.to_list() == [[[1, 2, 0], [4, 5, 3]]]


def test_an_empty_batch_keeps_nothing() -> None:
    found = Gatherer(JAGGED).read(FeatureIds.pack({"history": ragged()}))
    history = found.layouts(found.outputs(torch.zeros(0)))["history"]
    assert isinstance(history, RaggedTensor)
    assert history.flat_values.shape == (0, 3)
    assert history.nrows == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (layout("x", STACK, ("history", 0, 1), ("history", 1, 2)), "STACK is not possible"),
        (layout("x", ADDN, ("history", 0, 1)), "ADDN is not possible"),
        (layout("x", CONCAT, ("history", 0, 1), ("sum", 0, 1)), "another number of parts than feature 'sum'"),
        (layout("x", CONCAT, ("sum", 0, 1), ("history", 0, 1)), "another number of parts than feature 'sum'"),
        (layout("x", CONCAT, ("history", 0, 1), ("actions", 0, 1)), "than feature 'actions'"),
        (layout("x", NONE, ("history", 0, 1), ("sum", 0, 1)), "give it a layout of its own"),
    ],
)
def test_kept_ids_are_not_laid_out_with_something_of_another_length(wrong: LayoutSpec, message: str) -> None:
    with pytest.raises(FeatureError, match=message):
        plan_layouts(TABLES, list(JAGGED.features), [wrong])


@st.composite
def batches(draw: Any) -> FeatureIds:
    size = draw(st.integers(1, 6))
    features, shared = {}, []
    for feature in JAGGED.features:
        if draw(st.booleans()):
            rows = 1 if draw(st.booleans()) else size
            ids = st.lists(st.integers(-3, 3), max_size=4)
            features[feature.name] = ragged(*draw(st.lists(ids, min_size=rows, max_size=rows)))
            shared += [feature.name] if rows == 1 else []
    return FeatureIds.pack(features, shared=shared, batch_size=size)


@settings(max_examples=tries(15), deadline=None)
@given(batch=batches(), seed=st.integers(0, 9), threads=st.sampled_from([1, 3]))
def test_any_batch_is_gathered_as_feature_by_feature(batch: FeatureIds, seed: int, threads: int) -> None:
    found = Gatherer(JAGGED, native.Workers(threads)).read(batch)
    rows = random_rows(found, seed).round()  # round numbers tie
    expected = reference(JAGGED, batch, by_id(JAGGED, found, rows.double()))
    assert_close(list(found.outputs(rows)), [e.float() for e in expected])
    assert_close(*both_gradients(found, rows, "cpu"), rtol=1e-5, atol=1e-5)


def test_many_threads_give_the_same_bits_as_one() -> None:
    random = np.random.default_rng(0)
    names = [f"f{i}" for i in range(8)]
    features = [InputSpec(name, f"t{i % 3}", [Sum(), Mean()][i % 2]) for i, name in enumerate(names)]
    plan = plan_layouts(
        {"t0": 5, "t1": 16, "t2": 33}, features, [layout("all", CONCAT, *((name, 0, 5) for name in names))]
    )
    ids = {
        name: RaggedTensor.from_row_lengths(
            torch.from_numpy(random.integers(0, 300, int(lengths.sum()))), torch.from_numpy(lengths)
        )
        for name in names
        for lengths in [random.integers(0, 4, 1000)]
    }
    results = []
    for workers in (None, native.Workers(4)):
        found = Gatherer(plan, workers).read(FeatureIds.pack(ids))
        rows = random_rows(found).requires_grad_()
        (out,) = found.outputs(rows)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        results.append((found.ids, out, rows.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # type: ignore[arg-type]


def large_batch() -> tuple[GatheredBatch, Tensor]:
    """Return a batch whose outputs and gradients take more than a megabyte each, and its rows."""
    plan = plan_layouts({"t": 64}, [InputSpec("a", "t", Sum())], [layout("all", CONCAT, ("a", 0, 64))])
    found = Gatherer(plan, native.Workers(2)).read(FeatureIds.one_each(("a",), torch.arange(8192)[:, None]))
    return found, random_rows(found)


def test_unreferenced_memory_is_reused() -> None:
    found, rows = large_batch()
    (first,) = found.gather(rows)
    place = first.data_ptr()
    (second,) = found.gather(rows)
    assert second.data_ptr() != place
    del first
    (third,) = found.gather(rows)
    assert third.data_ptr() == place


def test_referenced_memory_is_left_alone() -> None:
    found, rows = large_batch()
    rows.requires_grad_()
    (held,) = found.outputs(rows)
    part = held[5:7].detach()
    known = part.clone()
    del held
    for _ in range(3):
        found.gather(torch.zeros_like(rows))
    assert torch.equal(part, known)
    (output,) = found.outputs(rows)
    output.sum().backward()
    gradient = rows.grad
    for _ in range(3):
        found.scatter(rows, (torch.zeros(8192, 64),))
    assert gradient is not None
    assert (gradient == 1).all()


def test_outputs_may_be_changed_in_place() -> None:
    found, rows = large_batch()
    (output,) = found.outputs(rows.requires_grad_())
    output.mul_(2).sum().backward()
    assert rows.grad is not None
    assert (rows.grad == 2).all()


# The batch and configuration of upstream's serving_ps_test, made consistent


@dataclass(frozen=True)
class Meta:
    slot: int
    table: str
    shared: bool
    version: int = 1
    combiner: Combiner = field(default_factory=Sum)
    most: int = 1


SLICES = {"table1": [1, 4, 4, 8], "table2": [1, 4, 4], "table3": [8]}
METAS = {
    "f_user_id": Meta(1, "table1", shared=True),
    "f_user_ctx_network": Meta(61, "table1", shared=True),
    "f_user_test10_array": Meta(549, "table1", shared=True, combiner=Mean(), most=10),
    "f_user_id-f_page": Meta(504, "table3", shared=True, version=2, combiner=FirstN(10), most=10),
    "f_goods_id": Meta(200, "table2", shared=False),
    "f_page": Meta(305, "table2", shared=False),
}
USER = ["f_user_id", "f_user_ctx_network", "f_user_test10_array"]
POOLED = [*USER, "f_goods_id", "f_page"]
SIZE = 10


def serving_batch() -> FeatureIds:
    random = np.random.default_rng(7)
    features = {}
    for name, meta in METAS.items():
        rows = []
        for _ in range(1 if meta.shared else SIZE):
            signatures = random.integers(
                0, 1 << 48, 1 if meta.most == 1 else random.integers(1, meta.most + 1)
            )
            rows.append([make_fid(meta.slot, int(signature)) for signature in signatures])
        features[name] = ragged(*rows)
    return FeatureIds.pack(features, shared=[name for name, meta in METAS.items() if meta.shared])


def serving_plan() -> LayoutPlan:
    return plan_layouts(
        {table: sum(dims) for table, dims in SLICES.items()},
        [InputSpec(name, meta.table, meta.combiner) for name, meta in METAS.items()],
        [
            layout("bias", CONCAT, *((name, 0, 1) for name in POOLED)),
            layout("vec", CONCAT, *((name, 1, 5) for name in POOLED)),
            layout("uffm", NONE, *((name, 5, 9) for name in USER)),
            layout("iffm", NONE, *((name, 5, 9) for name in ("f_goods_id", "f_page"))),
            layout("seq", NONE, ("f_user_id-f_page", 0, 8)),
            layout("user_only", STACK, *((name, 9, 17) for name in USER)),
        ],
    )


def test_the_serving_batch_fills_its_layouts() -> None:
    plan, batch = serving_plan(), serving_batch()
    found = Gatherer(plan).read(batch)
    rows = random_rows(found)
    outputs = found.layouts(found.outputs(rows))
    shapes = {
        name: [tuple(o.shape) for o in out] if isinstance(out, list) else tuple(out.shape)
        for name, out in outputs.items()
    }
    assert shapes == {
        "bias": (SIZE, 5),
        "iffm": [(SIZE, 4)] * 2,
        "seq": [(SIZE, 10, 8)],
        "uffm": [(SIZE, 4)] * 3,
        "user_only": (SIZE, 3, 8),
        "vec": (SIZE, 20),
    }
    expected = reference(plan, batch, by_id(plan, found, rows.double()))
    assert_close(list(found.outputs(rows)), [e.float() for e in expected])
    user_only, seq = outputs["user_only"], outputs["seq"]
    assert isinstance(user_only, Tensor)
    assert torch.equal(user_only, user_only[:1].expand_as(user_only))  # one user, ten candidates
    length = len(batch["f_user_id-f_page"].flat_values)
    assert not seq[0][:, length:].any()
    assert seq[0][:, :length].all()
