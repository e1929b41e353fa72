"""Models whose rows are on a device: trained as in host memory, and nobody waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names, nothing_waits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from monolith.cuda import Device
from monolith.errors import NonFiniteError
from monolith.feature import (
    ADDN,
    CONCAT,
    NONE,
    FeatureColumn,
    FeatureIds,
    FeatureSlot,
    FirstN,
    Layout,
    Max,
    Mean,
    SlotConfig,
    Sum,
)
from monolith.model import (
    DeepFM,
    EmbeddingCollection,
    EmbeddingOptimizer,
    UpdateConfig,
    apply_gradients,
)
from monolith.nn import GradClipType
from monolith.store import LocalStore, MakeStore
from monolith.table import Adagrad, Adam, CudaTable, Fp32, Rows
from monolith.tensors import RaggedTensor

NAMES = ("ad", "item", "user")


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def stores_on(device: Device | None) -> MakeStore:
    if device is None:
        return LocalStore.from_configs
    return partial(LocalStore.from_configs, make_table=partial(CudaTable, device=device))


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


def batches(steps: int, size: int = 12) -> list[tuple[FeatureIds, Tensor]]:
    """Return ragged ids, some without any, of which many are equal; the last batch is smaller."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for step in range(steps):
        examples = size if step < steps - 1 else size // 3
        features = {}
        for name in NAMES:
            lengths = torch.randint(0, 4, (examples,), generator=draw).tolist()
            cells = [torch.randint(0, 6, (length,), generator=draw).tolist() for length in lengths]
            features[name] = ragged(*cells)
        labels = torch.randint(0, 2, (examples,), generator=draw).float()
        times = torch.randint(0, 2, (examples,), generator=draw) * torch.randint(
            100, 110 + step, (examples,), generator=draw
        )
        made.append((FeatureIds.pack(features, event_time=int(times.max()), event_times=times), labels))
    return made


def rows_of(module: nn.Module) -> dict[str, Rows]:
    """Return all rows, sorted by id."""
    stores = [part.store for part in module.modules() if isinstance(part, EmbeddingCollection)]
    tables = {
        name: store.table(name) for store in stores if isinstance(store, LocalStore) for name in store.tables
    }
    found = {name: table.scan(limit=1000).rows for name, table in tables.items()}
    return {name: rows.take(rows.ids.argsort()) for name, rows in found.items()}


def assert_same_rows(one: nn.Module, other: nn.Module, *, exact: bool) -> None:
    expected, found = rows_of(one), rows_of(other)
    assert expected.keys() == found.keys()
    assert any(len(rows) for rows in expected.values())
    for name, rows in expected.items():
        for column in ("ids", "event_times", "values", "state"):
            wanted, got = getattr(rows, column), getattr(found[name], column)
            if exact:
                assert torch.equal(got, wanted), (name, column)
            else:
                assert_close(got, wanted, rtol=1e-4, atol=1e-5)


class Trained:
    """A DeepFM that was trained by a plain loop."""

    def __init__(self, device: Device | None, **how: Any) -> None:
        where = torch.device("cpu") if device is None else device.torch_device
        self.where = where
        self.model = DeepFM(NAMES, dim=4, hidden=(8,), threads=1, **how).to(where)
        self.model.embeddings.bind(stores_on(device))
        self.sparse = EmbeddingOptimizer(self.model)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, ids: FeatureIds, labels: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self.model(ids), labels.to(self.where))

    def step(self, ids: FeatureIds, labels: Tensor) -> Tensor:
        self.dense.zero_grad()
        loss = self.loss(ids, labels)
        loss.backward()
        self.sparse.step()
        self.dense.step()
        return loss.detach()


def is_exact(device: Device) -> bool:
    """Whether the dense half computes on the same processor as that of rows in host memory."""
    return device.torch_device.type == "cpu"


# A whole model


@pytest.mark.parametrize("optimizer", [Adagrad(), Adam()])
def test_a_deepfm_trains_as_in_host_memory(device: Device, optimizer: Any) -> None:
    host, there = Trained(None, optimizer=optimizer), Trained(device, optimizer=optimizer)
    for ids, labels in batches(4):
        assert_close(there.step(ids, labels).cpu(), host.step(ids, labels), rtol=1e-5, atol=1e-6)
    assert_same_rows(host.model, there.model, exact=is_exact(device))


def test_a_batch_looked_up_ahead_is_trained_as_it_was(device: Device) -> None:
    host, there = Trained(None), Trained(device)
    for one in (host, there):
        made = batches(3)
        ahead = [one.model.embeddings.prepare(ids) for ids, _ in made]
        for (ids, labels), prepared in zip(made, ahead, strict=True):
            one.model.embeddings.hold(ids, prepared)
            one.step(ids, labels)
    assert_same_rows(host.model, there.model, exact=is_exact(device))


def test_gradients_of_several_passes_are_one_step(device: Device) -> None:
    host, there = Trained(None), Trained(device)
    for one in (host, there):
        for ids, labels in batches(3):
            one.loss(ids, labels).backward()
        one.sparse.step()
    assert_same_rows(host.model, there.model, exact=False)


def test_the_rows_of_a_batch_that_nothing_came_back_to_are_left_alone(device: Device) -> None:
    there = Trained(device)
    (ids, labels), *_ = batches(1)
    there.loss(ids, labels)
    there.sparse.step()
    with torch.no_grad():
        assert not there.model(ids).requires_grad
    assert not any(len(rows) for rows in rows_of(there.model).values())


def test_outputs_are_where_the_rows_are(device: Device) -> None:
    there = Trained(device).model.embeddings
    assert there.device == there.store.device == device.torch_device
    outputs = there(batches(1)[0][0])
    assert outputs["vectors"].device == device.torch_device


def test_no_step_of_a_plain_loop_waits_for_the_device(device: Device) -> None:
    """After the first, in which memory is taken."""
    there = Trained(device, optimizer=Adagrad())
    made = [(ids, labels.to(device.torch_device)) for ids, labels in batches(3)]
    there.step(*made[0])
    for ids, labels in made:
        if is_exact(device):  # there, what the host reads of a batch cannot be told from what the device has
            there.model.embeddings.hold(ids, there.model.embeddings.prepare(ids))
        with nothing_waits(device):
            there.step(ids, labels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_dense_half_that_is_replayed_from_graphs_trains_as_one_that_is_not() -> None:
    """The last batch is smaller, and goes the plain way."""
    device = device_named("gpu")
    plain, replayed = Trained(device), Trained(device)
    graph = replayed.model.capture(12)
    for ids, labels in batches(4):
        assert_close(replayed.step(ids, labels), plain.step(ids, labels), rtol=1e-5, atol=1e-6)
    assert graph.enabled
    assert replayed.model.state_dict().keys() == plain.model.state_dict().keys()
    assert_same_rows(plain.model, replayed.model, exact=False)


# Every kind of layout


def everything() -> EmbeddingCollection:
    """Several tables, one of them shared by features; every combiner; a feature that no batch has."""
    shared, own = (
        FeatureSlot(SlotConfig(name=name, optimizer=Adagrad(), compressor=Fp32()))
        for name in ("shared", "own")
    )
    left, wide = shared.add_slice(2), own.add_slice(3)
    columns = {
        "a": FeatureColumn(shared, "a", Sum()),
        "b": FeatureColumn(shared, "b", Mean()),
        "c": FeatureColumn(own, "c", Max()),
        "d": FeatureColumn(own, "d", FirstN(2)),
        "missing": FeatureColumn(own, "missing", FirstN(2)),
    }
    return EmbeddingCollection(
        [
            Layout("sum", ADDN, [columns["a"].lookup(left), columns["b"].lookup(left)]),
            Layout(
                "side", CONCAT, [columns[name].lookup(left) for name in "ab"] + [columns["c"].lookup(wide)]
            ),
            Layout("each", NONE, [columns["d"].lookup(wide), columns["missing"].lookup(wide)]),
        ],
        threads=1,
    )


def any_batch(*, shared: tuple[str, ...] = (), weighted: bool = False) -> FeatureIds:
    features = {
        "a": ragged([1, 2], [], [2, 2], [3]),
        "b": ragged([2]) if "b" in shared else ragged([1], [2, 3], [3, 3], []),
        "c": ragged([4, 5, 5]) if "c" in shared else ragged([4], [5, 4], [], [6, 6]),
        "d": ragged([4, 5, 6], [6], [], [5, 5]),
    }
    weights = {"a": torch.tensor([0.5, 2.0, 1.0, -1.0, 1.0])} if weighted else None
    return FeatureIds.pack(features, shared=shared, weights=weights)


def trained_everything(device: Device | None, batch: FeatureIds, steps: int = 3) -> EmbeddingCollection:
    collection = everything()
    collection.bind(stores_on(device))
    sparse = EmbeddingOptimizer(collection)
    for step in range(steps):
        outputs = flat(collection(batch))
        sum(((out - step) ** 2).sum() for out in outputs).backward()  # type: ignore[union-attr]
        sparse.step()
    return collection


def flat(outputs: Mapping[str, Any]) -> list[Tensor]:
    return [one for out in outputs.values() for one in (out if isinstance(out, list) else [out])]


@pytest.mark.parametrize(
    "batch",
    [any_batch(), any_batch(shared=("b", "c")), any_batch(weighted=True)],
    ids=["ragged", "shared", "weighted"],
)
def test_every_layout_trains_as_in_host_memory(device: Device, batch: FeatureIds) -> None:
    host, there = trained_everything(None, batch), trained_everything(device, batch)
    assert_same_rows(host, there, exact=False)
    for expected, found in zip(flat(host(batch)), flat(there(batch)), strict=True):
        assert_close(found.cpu(), expected)


def test_two_collections_share_a_store_and_train_together(device: Device) -> None:
    trained = []
    for where in (None, device):
        first, second = everything(), everything()
        first.bind(stores_on(where))
        second.bind(lambda *_, store=first.store, **__: store)
        sparse = EmbeddingOptimizer([first, second])
        (sum(out.sum() for out in flat(first(any_batch()))) + 2 * second(any_batch())["sum"].sum()).backward()
        sparse.step()
        trained.append(first)
    assert_same_rows(*trained, exact=False)


# What is done to gradients


def updated(device: Device | None, config: UpdateConfig, change: Callable[[Tensor], Tensor]) -> nn.Module:
    one = Trained(device, optimizer=Adagrad())
    for ids, labels in batches(3):
        apply_gradients(change(one.loss(ids, labels)), one.sparse, one.dense, config)
    return one.model


@pytest.mark.parametrize(
    "config",
    [
        UpdateConfig(clip_norm=0.05),
        UpdateConfig(clip_norm=5.0, sparse_clip_norm=0.5),
        UpdateConfig(clip_type=GradClipType.ClipByNorm, clip_norm=0.1),
        UpdateConfig(min_norms={"user": 5.0, "item": 0.01}),
        UpdateConfig(min_norms={"user": 5.0}, clip_norm=0.05),
        UpdateConfig(dense_weight_decay=0.1),
    ],
    ids=["global norm", "norm of rows", "each norm", "least norm", "both", "no limit"],
)
def test_limits_mean_the_same_as_in_host_memory(device: Device, config: UpdateConfig) -> None:
    """Norms are those of distinct rows, whatever the number of places at which an id stands."""
    host = updated(None, config, lambda loss: loss)
    assert_same_rows(host, updated(device, config, lambda loss: loss), exact=False)


def test_gradients_of_equal_ids_can_be_brought_together_before_clipping_by_hand(device: Device) -> None:
    host, there = Trained(None), Trained(device)
    norms = []
    for one in (host, there):
        (ids, labels), *_ = batches(1)
        one.loss(ids, labels).backward()
        one.sparse.sum_equal()
        rows = [row for group in one.sparse.param_groups for row in group["params"]]
        norms.append(nn.utils.clip_grad_norm_(rows, 0.1).cpu())
        one.sparse.step()
    assert_close(norms[1], norms[0])
    assert_same_rows(host.model, there.model, exact=False)


def test_a_loss_that_is_no_number_trains_nothing(device: Device) -> None:
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        updated(device, UpdateConfig(), lambda loss: loss * float("nan"))
