"""Steps of models of sequences that are captured and replayed: padding changes nothing of what is learned.

On an emulated device, a replay runs the same torch code again, with attention padded to the longest history
that is possible. Kernels of Triton run on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from model.test_step_graph import OPTIMIZERS, Trained, assert_same, rows_of
from services.emulated_cuda import device_named, device_names, nothing_waits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.cuda import Device
from monolith.feature import Batch, Each, FeatureIds
from monolith.model import (
    HSTU,
    EmbeddingOptimizer,
    Feature,
    GRU4Rec,
    PreparedBatch,
    RetrievalModel,
    SASRec,
    SequenceRanker,
    UpdateConfig,
)
from monolith.model.step_graph import StepGraph
from monolith.store import LocalStore
from monolith.tensors import RaggedTensor

SIZE, ITEMS, LONGEST = 16, 40, 9
FEATURES: list[Any] = [
    "item",
    "action",
    Feature(name="seen", shares="item", combiner=Each()),
    Feature(name="seen.action", shares="action", combiner=Each()),
]
PICKS: dict[str, Any] = {"dim": 8, "layers": 1, "max_length": LONGEST}
RANKS: dict[str, Any] = {**PICKS, "hidden": (8,)}
KINDS: dict[str, Any] = {
    "hstu": partial(HSTU, FEATURES, **PICKS),
    "hstu, last steps": partial(HSTU, FEATURES, steps="last", **PICKS),
    "sasrec": partial(SASRec, FEATURES, **PICKS),
    "ranker, hstu": partial(SequenceRanker, FEATURES, encoder="hstu", **RANKS),
    "ranker, sasrec": partial(SequenceRanker, FEATURES, encoder="sasrec", **RANKS),
}
FEW = ["hstu", "sasrec", "ranker, hstu"]


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def batches(steps: int, bad: tuple[int, ...] = (), first: int = 0) -> Iterator[Batch]:
    """Return batches whose histories grow from none to `LONGEST` steps; an item of `bad` weighs NaN."""
    draw = torch.Generator().manual_seed(first)
    for step in range(first, first + steps):
        lengths = torch.randint(0, min(LONGEST, step // 2) + 1, (SIZE,), generator=draw)
        many = int(lengths.sum())
        seconds = torch.randint(0, 100_000, (many,), generator=draw)
        features = {
            "item": torch.randint(0, ITEMS, (SIZE,), generator=draw),
            "action": torch.randint(0, 3, (SIZE,), generator=draw),
            "seen": torch.randint(0, ITEMS, (many,), generator=draw),
            "seen.action": torch.randint(0, 3, (many,), generator=draw),
            "seen.time": 1_700_000_000 + seconds,
        }
        weights = {name: 0.5 + torch.rand(len(features[name]), generator=draw) for name in ("item", "seen")}
        if step in bad:
            weights["item"][0] = torch.nan
        ids = FeatureIds.pack(
            {
                name: RaggedTensor.from_row_lengths(one, lengths) if "seen" in name else one
                for name, one in features.items()
            },
            event_time=100 + step,
            event_times=1_700_000_000 + torch.randint(100_000, 200_000, (SIZE,), generator=draw),
            weights={name: one for name, one in weights.items() if len(one)},
        )
        yield Batch(ids, {}, {"click": torch.randint(0, 2, (SIZE,), generator=draw).float()})


class TrainedOnHistories(Trained):
    """A model of sequences, trained step by step, or by a graph from the second step on."""

    def __init__(
        self, device: Device, kind: str, *, graphed: bool, optimizer: str = "momentum", **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.device, self.model = device, KINDS[kind](threads=1, **settings).to(device.torch_device)
        self.model.embeddings.bind(partial(LocalStore.from_configs, device=device))
        self.sparse = EmbeddingOptimizer([self.model.embeddings])
        self.dense = OPTIMIZERS[optimizer](self.model.parameters())
        self.config = UpdateConfig(clip_norm=1.0)
        self.graph: StepGraph | None = None
        if graphed:
            self.graph = StepGraph(
                self.model, [self.model.embeddings], self.sparse, self.dense, self.outputs, self.config
            )
        self.said: list[tuple[str | None, float]] = []

    def outputs(self, batch: Batch, rows: list[PreparedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        model: nn.Module = self.model
        self.model.embeddings.hold(batch, rows[0])
        try:
            if isinstance(model, RetrievalModel):
                picked = model.pick(batch)
                return picked.loss, {"click": picked.scores}
            logits = model(batch)
            return binary_cross_entropy_with_logits(logits, batch.labels["click"]), {"click": logits}
        finally:
            self.model.embeddings.hold(batch, None)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_over_growing_histories_train_as_steps_one_by_one(device: Device, kind: str) -> None:
    eager = TrainedOnHistories(device, kind, graphed=False).train(batches(30, bad=(9, 25)))
    graphed = TrainedOnHistories(device, kind, graphed=True).train(batches(30, bad=(9, 25)))
    assert graphed.graph is not None
    assert graphed.graph.trouble is None
    assert graphed.graph.replays >= 10
    for one in (eager, graphed):
        assert [number for number, (trouble, _) in enumerate(one.said) if trouble] == [9, 25]
    assert_same(eager, graphed, exact=False)
    losses = [[loss for trouble, loss in one.said if trouble is None] for one in (eager, graphed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("kind", FEW)
def test_two_runs_are_equal_to_the_bit(device: Device, kind: str) -> None:
    """With dropout and few negatives, which are drawn anew in each replay."""
    how: Any = {"dropout": 0.3} if "ranker" in kind else {"dropout": 0.3, "negatives": 8}
    one, other = (
        TrainedOnHistories(device, kind, graphed=True, **how).train(batches(16, first=12)) for _ in range(2)
    )
    assert one.graph is not None
    assert one.graph.replays >= 4
    assert one.said == other.said
    for (name, mine), (_, theirs) in zip(
        one.model.state_dict().items(), other.model.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    for name, rows in rows_of(one).items():
        assert torch.equal(rows.values, rows_of(other)[name].values), name


@pytest.mark.parametrize("kind", FEW)
def test_a_replayed_step_waits_for_nothing(device: Device, kind: str) -> None:
    trained = TrainedOnHistories(device, kind, graphed=True, optimizer="sgd")
    trained.train(batches(16, first=20))
    graph = trained.graph
    assert graph is not None
    for batch in batches(6, first=26):
        replays, sent = graph.replays, graph.send(batch)
        if graph._shapes[sent.shape].graph is None:
            continue
        with nothing_waits(device):
            graph.train(sent)
        trained.sparse.global_step += 1
        assert graph.replays == replays + 1
        break
    else:
        pytest.fail("no batch was replayed")


@pytest.mark.parametrize("kind", FEW)
def test_a_batch_that_was_sent_may_be_trained_without_a_graph(device: Device, kind: str) -> None:
    """It was padded, and is read with its own number of steps."""
    there, plain = (
        TrainedOnHistories(device, kind, graphed=one).train(batches(3, first=12)) for one in (True, False)
    )
    assert there.graph is not None
    for batch in batches(3, first=15):
        sent = there.graph.send(batch)
        assert sent.shape is not None
        loss, _ = there.outputs(_on(device, batch), there.graph.look_up(sent))
        expected, _ = plain.outputs(_on(device, batch), [plain.model.embeddings.prepare(batch)])
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def _on(device: Device, batch: Batch) -> Batch:
    return Batch(batch.ids, {}, {name: one.to(device.torch_device) for name, one in batch.labels.items()})


def test_a_recurrent_model_is_not_captured_and_says_why(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "gru", partial(GRU4Rec, FEATURES, **PICKS))
    trained = TrainedOnHistories(device, "gru", graphed=True)
    assert trained.graph is not None
    assert "each ID of 'seen', 'seen.action' is kept" in (trained.graph.trouble or "")
    assert "a GRU has a launch for each step of the longest history" in (trained.graph.trouble or "")
    plain = TrainedOnHistories(device, "gru", graphed=False).train(batches(6))
    assert_same(plain, trained.train(batches(6)))
    assert trained.graph.replays == 0


def test_a_model_that_says_nothing_of_padding_is_not_captured(device: Device) -> None:
    trained = TrainedOnHistories(device, "sasrec", graphed=False)
    trained.model.embeddings.padded_steps = "it counts what is behind the last step"
    graph = StepGraph(
        trained.model, [trained.model.embeddings], trained.sparse, trained.dense, trained.outputs
    )
    assert "differ in size, and it counts what is behind the last step" in (graph.trouble or "")
    assert not graph.takes(graph.send(next(batches(1, first=12))))


def test_steps_without_an_action_for_each_are_not_captured(device: Device) -> None:
    """The error is that of the step without a graph."""
    trained = TrainedOnHistories(device, "sasrec", graphed=True).train(batches(4, first=12))
    assert trained.graph is not None
    (given,) = batches(1, first=16)
    names = ("item", "action", "seen", "seen.action")
    features = {name: given.ids[name] for name in names}
    lengths = features["seen.action"].row_lengths().flip(0)
    features["seen.action"] = RaggedTensor.from_row_lengths(features["seen.action"].flat_values, lengths)
    odd = Batch(FeatureIds.pack(features), {}, given.labels)
    assert trained.graph.send(given).shape is not None
    assert trained.graph.send(odd).shape is None
