"""EmbeddingCollection: a batch of ids in, the tensors a model reads out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from monolith.errors import FeatureError
from monolith.feature import (
    ADDN,
    CONCAT,
    NONE,
    Batch,
    FeatureColumn,
    FeatureIds,
    FeatureSlot,
    FirstN,
    Layout,
    Mean,
    SlotConfig,
    Sum,
)
from monolith.model import EmbeddingCollection, EmbeddingOptimizer
from monolith.store import LocalStore, Store
from monolith.table import Ones, Segment, Sgd, TableConfig
from monolith.tensors import RaggedTensor, prefetch

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


def item_slot(**config: Any) -> FeatureSlot:
    """Rows of a bias and two columns, born as ones, trained by plain descent with a rate of 1."""
    settings: dict[str, Any] = {
        "has_bias": True,
        "bias_initializer": Ones(),
        "bias_optimizer": Sgd(),
        "bias_learning_rate": 1.0,
        "initializer": Ones(),
        "optimizer": Sgd(),
        "learning_rate": 1.0,
    }
    slot = FeatureSlot(SlotConfig(name="item", **(settings | config)))
    slot.add_slice(2)
    return slot


def collection(**options: Any) -> EmbeddingCollection:
    """An item, and the items clicked before, which share its rows."""
    slot = item_slot()
    item, clicks = FeatureColumn(slot, "item", Sum()), FeatureColumn(slot, "clicks", Mean())
    vector = slot.slices[1]
    return EmbeddingCollection(
        [
            Layout("bias", ADDN, [item.bias(), clicks.bias()]),
            Layout("vectors", CONCAT, [item.lookup(vector), clicks.lookup(vector)]),
        ],
        **options,
    )


BATCH = {"item": torch.tensor([1, 2]), "clicks": ragged([2, 3], [])}


def table(embeddings: EmbeddingCollection) -> Any:
    assert isinstance(embeddings.store, LocalStore)
    return embeddings.store.table("item")


def fill(embeddings: EmbeddingCollection, values: dict[int, list[float]]) -> None:
    table(embeddings).assign(
        torch.tensor(list(values)), torch.tensor(list(values.values()), dtype=torch.float32)
    )


def rows(embeddings: EmbeddingCollection, *ids: int) -> list[list[float]]:
    found: list[list[float]] = table(embeddings).lookup(torch.tensor(ids)).tolist()
    return found


# Forward


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_becomes_the_tensors_of_its_layouts(device: str) -> None:
    embeddings = collection(device=device)
    fill(embeddings, {1: [1, 2, 3], 2: [10, 20, 30], 3: [100, 200, 300]})
    out = embeddings(BATCH)
    assert {name: tensor.device.type for name, tensor in out.items()} == {"bias": device, "vectors": device}
    assert out["bias"].tolist() == [[56], [10]]
    assert out["vectors"].tolist() == [[2, 3, 110, 165], [20, 30, 0, 0]]


def test_a_batch_may_come_packed_or_with_labels() -> None:
    embeddings = collection()
    fill(embeddings, {1: [1, 2, 3]})
    packed = FeatureIds.pack(BATCH)
    expected = embeddings(BATCH)["vectors"]
    for batch in (packed, Batch(packed, labels={"click": torch.zeros(2)})):
        assert torch.equal(embeddings(batch)["vectors"], expected)


def test_it_says_what_it_reads_and_makes() -> None:
    embeddings = collection()
    assert embeddings.features == ("clicks", "item")
    assert embeddings.shapes == {"bias": (1,), "vectors": (4,)}
    assert "features=2, tables=1" in repr(embeddings)


# Where rows live


class Maker:
    """Makes local stores, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.made: list[Store] = []
        self.asked: list[dict[str, Any]] = []

    def __call__(self, configs: Mapping[str, TableConfig], /, **options: Any) -> Store:
        self.asked.append({"configs": configs, **options})
        self.made.append(LocalStore.from_configs(configs, **options))
        return self.made[-1]


def test_the_caller_of_a_model_chooses_where_its_rows_live() -> None:
    embeddings, make = collection(threads=1), Maker()
    embeddings.bind(make)
    assert embeddings.store is make.made[0]
    tables = embeddings.slot_tables
    assert make.asked == [{"configs": tables.configs, "thresholds": tables.thresholds, "threads": 1}]


@pytest.mark.parametrize("use", ["look rows up", "ask for the store", "train"])
def test_unbound_rows_live_here_from_their_first_use_on(use: str) -> None:
    embeddings, late = collection(), Maker()
    if use == "look rows up":
        embeddings(BATCH)
    elif use == "ask for the store":
        assert embeddings.store.tables == {"item": 3}
    else:
        EmbeddingOptimizer(embeddings).zero_below({"item": 1.0})
    embeddings.bind(late)
    assert isinstance(embeddings.store, LocalStore)
    assert not late.made


def test_what_it_reads_and_makes_is_known_before_it_is_bound() -> None:
    embeddings, make = collection(), Maker()
    assert embeddings.features == ("clicks", "item")
    assert embeddings.shapes == {"bias": (1,), "vectors": (4,)}
    assert "tables=1" in repr(embeddings)
    embeddings.bind(make)
    assert make.made, "none of that was a use"


def test_a_store_that_was_given_stays() -> None:
    own, make = LocalStore.from_configs(collection().slot_tables.configs), Maker()
    embeddings = collection(store=own)
    embeddings.bind(make)
    assert embeddings.store is own
    assert not make.made


def test_a_store_that_does_not_fit_is_refused_when_it_is_bound() -> None:
    def wrong(configs: Mapping[str, TableConfig], /, **_: Any) -> Store:
        return LocalStore.from_configs({f"{n}s": replace(c, name=f"{n}s") for n, c in configs.items()})

    with pytest.raises(FeatureError, match="the store does not fit"):
        collection().bind(wrong)


def test_looking_does_not_make_rows() -> None:
    embeddings = collection()
    embeddings(BATCH)
    assert len(table(embeddings)) == 0


def test_rows_are_not_parameters() -> None:
    assert list(collection().parameters()) == []
    assert collection().state_dict() == {}


def test_a_layout_of_single_tensors_is_a_list() -> None:
    slot = item_slot()
    column = FeatureColumn(slot, "history", FirstN(2))
    embeddings = EmbeddingCollection([Layout("parts", NONE, [column.bias(), column.floats(0, 3)])])
    fill(embeddings, {1: [1, 2, 3]})
    parts = embeddings({"history": ragged([1, 1, 1], [1])})["parts"]
    assert [part.tolist() for part in parts] == [
        [[[1], [1]], [[1], [0]]],
        [[[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [0, 0, 0]]],
    ]


def test_a_feature_has_one_column() -> None:
    slot = item_slot()
    with pytest.raises(FeatureError, match="feature 'item' has two feature columns"):
        EmbeddingCollection(
            [Layout("bias", ADDN, [FeatureColumn(slot, "item").bias(), FeatureColumn(slot, "item").bias()])]
        )


def test_a_store_must_have_the_tables() -> None:
    for config in ({}, {"item": TableConfig(name="item", segments=(Segment(dim=7),))}):
        with pytest.raises(FeatureError, match="table 'item' needs rows of 3 floats, it has"):
            collection(store=LocalStore.from_configs(config))


# Training


@pytest.mark.parametrize("device", DEVICES)
def test_each_distinct_id_is_stepped_once_with_the_sum_of_its_gradients(device: str) -> None:
    embeddings = collection(device=device)
    optimizer = EmbeddingOptimizer(embeddings, multiply_rows_by=1)
    out = embeddings(BATCH)
    (out["bias"].sum() + out["vectors"].sum()).backward()
    optimizer.step()
    # Item 1 is read once, item 2 as an item and as half of a mean, item 3 as the other half.
    assert rows(embeddings, 1, 2, 3) == [[0, 0, 0], [-0.5, -0.5, -0.5], [0.5, 0.5, 0.5]]


def test_gradients_accumulate_until_the_step() -> None:
    together, apart = collection(), collection()
    for embeddings, batches in (
        (together, [{"item": torch.tensor([1, 2, 1])}]),
        (apart, [{"item": torch.tensor([1, 2])}, {"item": torch.tensor([1])}]),
    ):
        optimizer = EmbeddingOptimizer(embeddings, multiply_rows_by=1)
        for batch in batches:
            out = embeddings(batch)
            (out["vectors"].sum() + 2 * out["bias"].sum()).backward()
        optimizer.step()
    assert rows(together, 1, 2) == rows(apart, 1, 2) == [[-3, -1, -1], [-1, 0, 0]]


def test_zero_grad_forgets() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(BATCH)["bias"].sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert len(table(embeddings)) == 0
    assert optimizer.param_groups[0]["params"] == []


def test_a_step_is_not_taken_twice() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings({"item": torch.tensor([1])})["bias"].sum().backward()
    optimizer.step()
    optimizer.step()
    assert rows(embeddings, 1) == [[0, 1, 1]]
    assert optimizer.global_step == 2


def test_a_forward_pass_without_a_backward_pass_changes_nothing() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(BATCH)
    optimizer.step()
    assert len(table(embeddings)) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_nothing_to_train(mode: Any) -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)
    fill(embeddings, {1: [1, 2, 3]})
    with mode():
        out = embeddings({"item": torch.tensor([1])})
    assert out["vectors"].tolist() == [[2, 3, 0, 0]]
    assert not out["vectors"].requires_grad
    assert optimizer.param_groups[0]["params"] == []


def test_in_evaluation_mode_rows_have_gradients_but_are_not_trained() -> None:
    embeddings = collection().eval()
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(BATCH)["bias"].sum().backward()
    optimizer.step()
    assert len(table(embeddings)) == 0


def test_a_schedule_follows_the_global_step() -> None:
    slot = FeatureSlot(SlotConfig(name="item", optimizer=Sgd(), learning_rate=float))
    vector = slot.add_slice(1)
    embeddings = EmbeddingCollection([Layout("v", CONCAT, [FeatureColumn(slot, "item").lookup(vector)])])
    optimizer = EmbeddingOptimizer(embeddings, global_step=2)
    fill(embeddings, {1: [0]})
    for _ in range(2):
        embeddings({"item": torch.tensor([1])})["v"].sum().backward()
        optimizer.step()
    assert rows(embeddings, 1) == [[-5]]  # rates 2 and 3


def test_a_caller_that_counts_steps_elsewhere_passes_the_step() -> None:
    slot = FeatureSlot(SlotConfig(name="item", optimizer=Sgd(), learning_rate=float))
    embeddings = EmbeddingCollection(
        [Layout("v", CONCAT, [FeatureColumn(slot, "item").lookup(slot.add_slice(1))])]
    )
    optimizer = EmbeddingOptimizer(embeddings)
    fill(embeddings, {1: [0]})
    for step in (3, 9):
        embeddings({"item": torch.tensor([1])})["v"].sum().backward()
        optimizer.take(step)()
        assert optimizer.global_step == step
    assert rows(embeddings, 1) == [[-10]]  # rates 2 and 8: of the steps that were taken before


def test_rows_remember_when_they_were_trained() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)
    for time, item in ((100, 1), (200, 2)):
        embeddings(FeatureIds.pack({"item": torch.tensor([item])}, event_time=time))["bias"].sum().backward()
    optimizer.step()
    assert table(embeddings).lookup_rows(torch.tensor([1, 2]))[1].event_times.tolist() == [100, 200]


def test_a_row_has_the_time_of_its_newest_example() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)

    def train(times: list[int], *items: list[int]) -> list[int]:
        each = {"event_time": max(times), "event_times": torch.tensor(times)}
        embeddings(FeatureIds.pack({"item": ragged(*items)}, **each))["bias"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return table(embeddings).lookup_rows(torch.tensor([1, 2, 3, 4]))[1].event_times.tolist()

    assert train([100, 200, 150], [1, 2], [2, 3], [3]) == [100, 200, 200, 0]
    assert train([90, 300], [1, 2], [3]) == [100, 200, 300, 0]  # older data makes no row older
    assert train([0, 400, 350], [1], [4], []) == [400, 200, 300, 400]  # without a time: as new as any


def test_rare_ids_wait_for_their_row() -> None:
    slot = item_slot(occurrence_threshold=2)
    embeddings = EmbeddingCollection([Layout("bias", ADDN, [FeatureColumn(slot, "item").bias()])])
    optimizer = EmbeddingOptimizer(embeddings)
    for _ in range(2):
        embeddings({"item": torch.tensor([1, 1, 2])})["bias"].sum().backward()
        optimizer.step()
    assert table(embeddings).contains(torch.tensor([1, 2])).tolist() == [True, False]


def test_one_collection_has_one_optimizer() -> None:
    embeddings = collection()
    EmbeddingOptimizer(embeddings)
    with pytest.raises(FeatureError, match="has an optimizer already"):
        EmbeddingOptimizer(embeddings)
    with pytest.raises(FeatureError, match="no EmbeddingCollection"):
        EmbeddingOptimizer(torch.nn.Linear(1, 1))


def test_the_optimizers_state_is_the_step() -> None:
    first, second = EmbeddingOptimizer(collection(), global_step=7), EmbeddingOptimizer(collection())
    second.load_state_dict(first.state_dict())
    assert second.global_step == 7
    with pytest.raises(ValueError, match="global_step"):
        second.load_state_dict({"global_step": "seven"})


def test_a_closure_is_run_with_gradients() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)

    def closure() -> Tensor:
        loss: Tensor = embeddings({"item": torch.tensor([1])})["bias"].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 0
    assert rows(embeddings, 1) == [[0, 1, 1]]


# Torch's own tools


@pytest.mark.parametrize("device", DEVICES)
def test_a_grad_scaler_unscales_and_skips_what_overflowed(device: str) -> None:
    embeddings = collection(device=device)
    sparse = EmbeddingOptimizer(embeddings)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=1000)
    for factor, expected in ((1.0, [[0, 1, 1]]), (float("inf"), [[0, 1, 1]]), (1.0, [[-1, 1, 1]])):
        sparse.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = embeddings({"item": torch.tensor([1])})["bias"].sum() * factor
        scaler.scale(loss).backward()
        scaler.step(sparse)
        scaler.update()
        assert rows(embeddings, 1) == expected
    assert scaler.get_scale() == 4.0
    assert sparse.global_step == 2


def test_gradients_of_rows_can_be_clipped_by_torch() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)
    (3 * embeddings({"item": torch.tensor([1])})["vectors"][:, 0]).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
    optimizer.step()
    assert norm.item() == 3
    assert_close(torch.tensor(rows(embeddings, 1)), torch.tensor([[1, 0.5, 1]]))


def test_the_dense_part_can_be_compiled() -> None:
    torch.compiler.reset()
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings)
    dense = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    compiled = torch.compile(dense, backend="aot_eager")
    fill(embeddings, {i: [0.0, i, -i] for i in range(1, 5)})
    for size in (2, 3):
        batch = {"item": torch.arange(1, size + 1), "clicks": torch.arange(1, size + 1)}
        vectors = embeddings(batch)["vectors"]
        assert_close(compiled(vectors), dense(vectors))
        compiled(vectors).sum().backward()
    optimizer.step()
    assert rows(embeddings, 1) != [[0, 1, -1]]


def test_a_whole_model_can_be_compiled_around_the_lookup() -> None:
    torch.compiler.reset()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = collection()
            self.dense = torch.nn.Linear(4, 1)

        def forward(self, batch: FeatureIds) -> Tensor:
            out: Tensor = self.dense(self.embeddings(batch)["vectors"])
            return out.relu()

    model = Model()
    sparse = EmbeddingOptimizer(model)
    batch = FeatureIds.pack(BATCH)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(compiled(batch), model(batch))
    compiled(batch).sum().backward()
    sparse.step()


# Ahead of the step


def test_rows_can_be_looked_up_ahead_of_the_step() -> None:
    embeddings = collection()
    optimizer = EmbeddingOptimizer(embeddings, multiply_rows_by=1)
    ahead = embeddings.prepare(BATCH)
    fill(embeddings, {1: [5, 5, 5]})
    out = embeddings(ahead)
    assert out["bias"].tolist() == [[0], [0]]
    out["bias"].sum().backward()
    optimizer.step()
    assert rows(embeddings, 1) == [[4, 5, 5]]


def test_a_queue_can_prepare_batches() -> None:
    embeddings = collection()
    fill(embeddings, {i: [i, 0, 0] for i in range(20)})

    def batches() -> Iterator[Any]:
        for i in range(20):
            yield embeddings.prepare({"item": torch.tensor([i])})

    with prefetch(batches(), capacity=2) as queue:
        assert [embeddings(batch)["bias"].item() for batch in queue] == list(range(20))
