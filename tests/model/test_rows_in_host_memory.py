"""A model on a device whose rows are in host memory: what goes there and back, and who waits for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names
from services.slow_device import SlowDevice
from torch import Tensor
from torch.testing import assert_close

from monolith.cuda import Device
from monolith.feature import FeatureIds
from monolith.model import DeepFM, EmbeddingOptimizer
from monolith.runtime.prefetch import PrefetchPipeline
from monolith.store import LocalStore, TableIds
from monolith.table import Adagrad, DelayCompensated, Sgd
from monolith.tensors import RaggedTensor

FEATURES = ("item", "user")


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def model_on(device: Device | None, **options: Any) -> DeepFM:
    adagrad = Adagrad(learning_rate=0.1)
    made = DeepFM(FEATURES, dim=3, hidden=(4,), seed=1, threads=1, **{"optimizer": adagrad, **options})
    if device is not None:
        made.to(device.torch_device)
        made.embeddings.compute_on(device)
    return made


def batch(seed: int, examples: int = 5) -> FeatureIds:
    draw = torch.Generator().manual_seed(seed)
    features = {}
    for name in FEATURES:
        lengths = torch.randint(0, 4, (examples,), generator=draw)
        ids = torch.randint(0, 6, (int(lengths.sum()),), generator=draw)
        splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        features[name] = RaggedTensor(ids, splits)
    return FeatureIds.pack(features, event_time=seed)


def loss_of(model: DeepFM, given: Any) -> Tensor:
    logits: Tensor = model(given)
    return (logits - 1).square().mean()


def rows_of(model: DeepFM) -> list[Tensor]:
    store = model.embeddings.store
    assert isinstance(store, LocalStore)
    return [store.table(name).lookup(torch.arange(6)) for name in FEATURES]


def test_rows_are_trained_as_on_the_cpu(device: Device) -> None:
    found = []
    for where in (None, device):
        model = model_on(where)
        sparse = EmbeddingOptimizer(model)
        for step in range(4):
            loss_of(model, batch(step)).backward()
            sparse.step()
        found.append(rows_of(model))
    assert found[0][0].any()
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_several_backward_passes_are_one_step(device: Device) -> None:
    found = []
    for where in (None, device):
        model = model_on(where)
        sparse = EmbeddingOptimizer(model)
        for number in range(3):
            loss_of(model, batch(number)).backward()
        sparse.step()
        found.append(rows_of(model))
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_looked_up_ahead_and_updated_behind_it_is_the_same_as_on_the_cpu(device: Device) -> None:
    found = []
    for where in (None, device):
        model = model_on(where)
        sparse = EmbeddingOptimizer(model)
        with PrefetchPipeline(
            iter(range(6)), lambda number, model=model: model.embeddings.prepare(batch(number))
        ) as lane:
            while (ready := lane.next()) is not None:
                loss_of(model, ready[1]).backward()
                lane.push(sparse.take())
            lane.drain()
        found.append(rows_of(model))
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_rows_come_with_the_gradients_where_a_store_compensates_for_delay(device: Device) -> None:
    found = []
    for where in (None, device):
        delayed = DelayCompensated(Adagrad(learning_rate=0.1), lambda_=0.5)
        model = model_on(where, optimizer=delayed, bias_optimizer=delayed)
        sparse = EmbeddingOptimizer(model)
        assert model.embeddings.store.delay_compensated
        for step in range(3):
            loss_of(model, batch(step)).backward()
            sparse.step()
        found.append(rows_of(model))
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


class Elsewhere:
    """A store that answers with memory of its own, as those over a network do."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lookup(self, ids: TableIds) -> Tensor:
        self.asked += 1
        return self._store.lookup(ids)


def test_rows_of_any_store_go_to_the_device(device: Device) -> None:
    plain = model_on(None)
    loss_of(plain, batch(0)).backward()
    assert isinstance(plain.embeddings.store, LocalStore)
    elsewhere: Any = Elsewhere(plain.embeddings.store)
    there = model_on(device, store=elsewhere)
    assert_close(there(batch(0)).cpu(), plain(batch(0)))
    assert elsewhere.asked == 1


# Who waits for what


def test_the_host_waits_for_gradients_only_where_they_are_applied() -> None:
    device = SlowDevice()
    model = model_on(device, optimizer=Sgd(learning_rate=1.0), bias_optimizer=Sgd(learning_rate=1.0))
    sparse = EmbeddingOptimizer(model)
    prepared = model.embeddings.prepare(batch(0))
    transfers: Any = model.embeddings.transfers
    loss_of(model, prepared).backward()
    (up,) = transfers.up.events
    assert up in device.first.waited_for, "the device waits for the rows"
    update = sparse.take()
    (down,) = transfers.down.events
    assert device.first in transfers.down.waited_for, "the copy waits for what computes the gradients"
    assert (up.waits, down.waits) == (0, 0)
    before = rows_of(model)
    thread = threading.Thread(target=update)
    thread.start()
    thread.join(60)
    assert (up.waits, down.waits) == (0, 1)
    assert not torch.equal(rows_of(model)[0], before[0])


def test_pinned_memory_is_made_once_for_batches_of_one_size() -> None:
    device = SlowDevice(slow=False)
    model = model_on(device)
    sparse = EmbeddingOptimizer(model)
    made = []
    for _ in range(4):
        loss_of(model, batch(0)).backward()
        sparse.step()
        made.append(model.embeddings.transfers.pool.made)  # type: ignore[union-attr]
    assert set(made) == {1}, "gradients come in the memory that rows have left"
