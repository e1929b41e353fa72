"""Steps that are captured and replayed: they train as steps one by one, and wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names, nothing_waits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from monolith.cuda import Device
from monolith.errors import AcceleratorError, NonFiniteError
from monolith.feature import Batch, FeatureIds
from monolith.model import DeepFM, EmbeddingOptimizer, PreparedBatch, UpdateConfig, apply_gradients
from monolith.model.step_graph import GraphedStep, StepGraph
from monolith.nn import GradClipType
from monolith.store import LocalStore
from monolith.table import AdmissionConfig, SlotThresholds, TouchedKeySet
from monolith.table.cuda import snapshots
from monolith.tensors import RaggedTensor

NAMES = ("ad", "item", "user")
SIZE = 24


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def batches(steps: int, size: int = SIZE, most: int = 40, bad: tuple[int, ...] = ()) -> Iterator[Batch]:
    """Return batches with one id of each feature, many of them equal; those of `bad` have a label of NaN."""
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        ids = torch.randint(0, most * (step + 1), (size, len(NAMES)), generator=draw)
        labels = torch.randint(0, 2, (size,), generator=draw).float()
        floats = torch.rand((size, 2), generator=draw)
        if step in bad:
            labels[0] = torch.nan
        yield Batch(
            FeatureIds.one_each(NAMES, ids, event_time=100 + step), {"age": floats}, {"click": labels}
        )


def ragged_batches(
    steps: int, *, weighted: bool = False, bad: tuple[int, ...] = (), seed: int = 0
) -> Iterator[Batch]:
    """Return batches whose users have one id, items from none to five and ads now and then one."""
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        lengths = torch.randint(0, 6, (SIZE,), generator=draw)
        lengths[0] = 1
        items = torch.randint(0, 60, (int(lengths.sum()),), generator=draw)
        seldom = torch.randint(0, 2, (SIZE,), generator=draw)
        seldom[0] = 1
        ads = torch.randint(0, 5, (int(seldom.sum()),), generator=draw)
        labels = torch.randint(0, 2, (SIZE,), generator=draw).float()
        if step in bad:
            labels[0] = torch.nan
        weights = {"item": torch.rand(len(items), generator=draw)} if weighted else None
        features = {
            "ad": RaggedTensor.from_row_lengths(ads, seldom),
            "item": RaggedTensor.from_row_lengths(items, lengths),
            "user": torch.randint(0, 50, (SIZE,), generator=draw),
        }
        ids = FeatureIds.pack(features, event_time=100 + step, weights=weights)
        yield Batch(ids, {"age": torch.rand((SIZE, 2), generator=draw)}, {"click": labels})


class Net(nn.Module):
    """A DeepFM whose floats pass a batch norm, which has buffers."""

    def __init__(self, device: Device, thresholds: Mapping[str, SlotThresholds] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(2)
        self.deep = DeepFM(NAMES, dim=4, hidden=(8,), threads=1, floats={"age": 2})
        self.to(device.torch_device)
        self.embeddings = self.deep.embeddings
        self.embeddings.bind(
            lambda configs, **how: LocalStore.from_configs(
                configs, **{**how, "thresholds": thresholds, "device": device}
            )
        )

    def forward(self, rows: PreparedBatch, floats: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = self.deep(rows, {"age": self.norm(floats["age"])})
        return found


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


class Trained:
    """A model, trained step by step, or by a graph from the second step on."""

    def __init__(
        self,
        device: Device,
        *,
        graphed: bool,
        optimizer: str = "adam",
        config: UpdateConfig | None = None,
        thresholds: Mapping[str, SlotThresholds] | None = None,
    ) -> None:
        self.device, self.model = device, Net(device, thresholds)
        self.sparse = EmbeddingOptimizer([self.model.embeddings])
        self.dense = OPTIMIZERS[optimizer](self.model.parameters())
        self.config = UpdateConfig() if config is None else config
        self.graph: StepGraph | None = None
        if graphed:
            self.graph = StepGraph(
                self.model, [self.model.embeddings], self.sparse, self.dense, self.outputs, self.config
            )
        self.said: list[tuple[str | None, float]] = []

    def outputs(self, batch: Batch, rows: list[PreparedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.model(rows[0], batch.floats)
        return binary_cross_entropy_with_logits(logits, batch.labels["click"]), {"click": logits.sigmoid()}

    def train(self, given: Iterator[Batch]) -> Trained:
        later: list[GraphedStep] = []
        for batch in given:
            sent = None if self.graph is None else self.graph.send(batch)
            if self.graph is not None and sent is not None and self.graph.takes(sent):
                later.append(self.graph.train(sent))
                self.sparse.global_step += 1
                if len(later) > 2:
                    self._learn(later.pop(0))
            else:
                self._step(batch)
        for one in later:
            self._learn(one)
        return self

    def _learn(self, step: GraphedStep) -> None:
        found = step.wait()
        self.said.append((found.trouble, found.loss))
        if found.trouble is not None:
            assert self.graph is not None
            self.graph.refused()
            self.sparse.global_step -= 1

    def _step(self, batch: Batch) -> None:
        where = self.device.torch_device
        buffers = [(one, one.clone()) for one in self.model.buffers()]
        here = Batch(
            batch.ids,
            {name: one.to(where) for name, one in batch.floats.items()},
            {name: one.to(where) for name, one in batch.labels.items()},
        )
        loss, _ = self.outputs(here, [self.model.embeddings.prepare(batch)])
        try:
            apply_gradients(loss, self.sparse, self.dense, self.config)
            self.said.append((None, float(loss.detach())))
        except NonFiniteError as error:
            for one, before in buffers:
                one.copy_(before)
            self.said.append((str(error), float(loss.detach())))


def rows_of(trained: Trained) -> dict[str, Any]:
    store = trained.model.embeddings.store
    assert isinstance(store, LocalStore)
    found = {name: store.table(name).scan(limit=100_000).rows for name in store.tables}
    return {name: rows.take(rows.ids.argsort()) for name, rows in found.items()}


def assert_same(one: Trained, other: Trained, *, exact: bool | None = None) -> None:
    """Assert that both have the same weights and rows; to the bit where torch computes both alike."""
    exact = one.device.torch_device.type == "cpu" if exact is None else exact
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for (name, mine), (_, theirs) in zip(
        one.model.state_dict().items(), other.model.state_dict().items(), strict=True
    ):
        assert_close(mine, theirs, **close, msg=lambda text, name=name: f"{name}: {text}")
    mine_rows, their_rows = rows_of(one), rows_of(other)
    assert mine_rows.keys() == their_rows.keys()
    for name, rows in mine_rows.items():
        assert len(rows)
        for column in ("ids", "event_times", "values", "state"):
            assert_close(getattr(rows, column), getattr(their_rows[name], column), **close)
    assert one.sparse.global_step == other.sparse.global_step
    for weight, state in one.dense.state.items():
        del weight
        assert all(bool(value.isfinite().all()) for value in state.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_replayed_steps_train_as_steps_one_by_one(device: Device, optimizer: str) -> None:
    eager = Trained(device, graphed=False, optimizer=optimizer).train(batches(12))
    graphed = Trained(device, graphed=True, optimizer=optimizer).train(batches(12))
    assert graphed.graph is not None
    assert graphed.graph.captures >= 1
    assert_same(eager, graphed)
    losses = [[loss for _, loss in one.said] for one in (eager, graphed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_batch_that_is_not_finite_leaves_no_trace(device: Device, optimizer: str) -> None:
    """Its rows, which are new, do not exist; weights, their optimizer and buffers are as before."""
    if optimizer == "adam" and device.torch_device.type != "cuda":
        pytest.skip("torch's Adam counts its steps on a GPU, and otherwise in host memory")
    eager = Trained(device, graphed=False, optimizer=optimizer).train(batches(14, bad=(5, 6, 9)))
    graphed = Trained(device, graphed=True, optimizer=optimizer).train(batches(14, bad=(5, 6, 9)))
    assert [number for number, (trouble, _) in enumerate(graphed.said) if trouble] == [5, 6, 9]
    assert "the loss has 1 floats" in (graphed.said[5][0] or "")
    assert_same(eager, graphed)
    steps = [float(state["step"]) for state in graphed.dense.state.values() if "step" in state]
    assert set(steps) <= {11.0}


@pytest.mark.parametrize(
    "config",
    [
        UpdateConfig(clip_norm=0.05, dense_weight_decay=0.01),
        UpdateConfig(clip_type=GradClipType.ClipByDenseAndSparse, clip_norm=0.1, sparse_clip_norm=0.5),
        UpdateConfig(min_norms={"item": 1e9}, multiply_rows_by=1.0),
    ],
)
def test_gradients_are_limited_as_in_steps_one_by_one(device: Device, config: UpdateConfig) -> None:
    how: Any = {"config": config, "optimizer": "momentum"}
    eager = Trained(device, graphed=False, **how).train(batches(8, bad=(6,)))
    graphed = Trained(device, graphed=True, **how).train(batches(8, bad=(6,)))
    assert_same(eager, graphed)


@pytest.mark.parametrize("weighted", [False, True])
def test_ragged_batches_are_padded_and_train_as_steps_one_by_one(device: Device, weighted: bool) -> None:
    how: Any = {"optimizer": "momentum", "config": UpdateConfig(clip_norm=0.5, sparse_clip_norm=0.5)}
    eager = Trained(device, graphed=False, **how).train(ragged_batches(30, weighted=weighted, bad=(8, 20)))
    graphed = Trained(device, graphed=True, **how).train(ragged_batches(30, weighted=weighted, bad=(8, 20)))
    assert graphed.graph is not None
    assert graphed.graph.trouble is None
    assert [number for number, (trouble, _) in enumerate(graphed.said) if trouble] == [8, 20]
    assert 1 <= graphed.graph.captures <= 4  # tables grow, and so does the room for ids
    assert graphed.graph.replays >= 15
    assert_same(eager, graphed, exact=False)


def test_two_runs_on_ragged_batches_are_equal_to_the_bit(device: Device) -> None:
    one, other = (Trained(device, graphed=True).train(ragged_batches(15)) for _ in range(2))
    for (name, mine), (_, theirs) in zip(
        one.model.state_dict().items(), other.model.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    for name, rows in rows_of(one).items():
        assert torch.equal(rows.values, rows_of(other)[name].values), name


def test_a_model_that_reads_lengths_by_itself_is_not_captured(device: Device) -> None:
    trained = Trained(device, graphed=True, optimizer="sgd")
    plain = trained.outputs

    def peeks(batch: Batch, rows: list[PreparedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, predictions = plain(batch, rows)
        return loss * int(batch.ids.splits[1]), predictions

    assert trained.graph is not None
    trained.graph._outputs = peeks
    with pytest.raises(AcceleratorError, match="cannot be captured"):
        trained.graph.train(trained.graph.send(next(ragged_batches(1))))


def test_a_capture_that_fails_takes_nothing_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it has run, so weights are those that the steps before it have made."""
    trained = Trained(device, graphed=True, optimizer="sgd").train(batches(2, most=8))
    graph = trained.graph
    assert graph is not None
    assert graph.captures == 0

    def fails(_: object) -> None:
        raise AcceleratorError("no memory for it")

    monkeypatch.setattr(graph, "_capture", fails)
    before = {name: one.clone() for name, one in trained.model.state_dict().items()}
    with pytest.raises(AcceleratorError, match="no memory for it"):
        graph.train(graph.send(next(batches(1, most=8))))
    for name, one in trained.model.state_dict().items():
        assert torch.equal(one, before[name])
    trained.train(batches(6, most=8))  # by single launches
    plain = Trained(device, graphed=False, optimizer="sgd").train(batches(2, most=8))
    plain.train(batches(6, most=8))
    assert_same(plain, trained)


def test_a_table_that_grows_is_captured_anew(device: Device) -> None:
    """Tables begin with 256 places, and get several thousand rows."""
    eager = Trained(device, graphed=False).train(batches(16, size=256, most=300))
    graphed = Trained(device, graphed=True).train(batches(16, size=256, most=300))
    assert graphed.graph is not None
    assert graphed.graph.captures > 1
    assert_same(eager, graphed)


def of_sizes(sizes: Sequence[int]) -> Iterator[Batch]:
    """Return batches of these sizes, of so few ids that no table grows."""
    return (next(batches(1, size=size, most=8)) for size in sizes)


@pytest.mark.parametrize("sizes", [5, 17])
def test_of_more_sizes_than_are_captured_four_are_replayed(device: Device, sizes: int) -> None:
    """Even if they come in turn, and if there are more than a gatherer remembers: the others do not push the
    captured ones out."""
    given = [*range(8, 8 + sizes)] * 5
    trained = Trained(device, graphed=True, optimizer="sgd").train(of_sizes(given))
    assert trained.graph is not None
    assert trained.graph.captures == 4
    assert trained.graph.replays == 4 * (5 - 2)  # of each captured size, two batches come first
    assert_same(trained, Trained(device, graphed=False, optimizer="sgd").train(of_sizes(given)))


def test_a_size_that_has_become_clearly_more_frequent_is_captured(device: Device) -> None:
    """Here 13 replaces 8; and then 8, which comes about as often, does not replace 13."""
    trained = Trained(device, graphed=True, optimizer="sgd").train(of_sizes([8, 9, 10, 11] * 3))
    assert trained.graph is not None
    assert (trained.graph.captures, trained.graph.replays) == (4, 4)
    trained.train(of_sizes([13] * 14))
    assert (trained.graph.captures, trained.graph.replays) == (4, 4)  # seen 14 times: 3 times twice, and 8
    trained.train(of_sizes([13] * 4))
    assert (trained.graph.captures, trained.graph.replays) == (5, 6)
    trained.train(of_sizes([8, 13] * 6))
    assert (trained.graph.captures, trained.graph.replays) == (5, 12)


def test_a_replayed_step_waits_for_nothing(device: Device) -> None:
    # Of torch's optimizers on an emulated device, only one without a count of steps reads nothing.
    on_gpu = device.torch_device.type == "cuda"
    trained = Trained(device, graphed=True, optimizer="adam" if on_gpu else "sgd")
    trained.train(batches(10, most=8))
    assert trained.graph is not None
    for batch in batches(2, most=8):
        sent = trained.graph.send(batch)
        with nothing_waits(device):
            trained.graph.train(sent)
        trained.sparse.global_step += 1


def test_predictions_stay_on_the_device_and_the_report_says_whether_they_are_finite(device: Device) -> None:
    trained = Trained(device, graphed=True, optimizer="sgd")
    plain = trained.outputs

    def with_another(batch: Batch, rows: list[PreparedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, predictions = plain(batch, rows)
        return loss, {**predictions, "odd": batch.floats["age"].log()}

    assert trained.graph is not None
    trained.graph._outputs = with_another
    seen = []
    for number, batch in enumerate(batches(8, most=8)):
        if number == 6:
            batch.floats["age"][0, 0] = 1.0
            batch.floats["age"][0, 1] = 0.0
        sent = trained.graph.send(batch)
        step = trained.graph.train(sent)
        trained.sparse.global_step += 1
        assert {head: (tuple(one.shape), one.device) for head, one in step.predictions.items()} == {
            "click": ((SIZE,), device.torch_device),
            "odd": ((SIZE, 2), device.torch_device),
        }
        found = step.wait()
        assert found.trouble is None
        assert found.loss == float(step.loss)
        for head, one in step.predictions.items():
            assert torch.equal(found.predictions[head], one.cpu()) or not found.finite[head]
        seen.append(found.finite)
    assert trained.graph.captures == 1
    odd = [number for number, finite in enumerate(seen) if not finite["odd"]]
    assert odd == [6]
    assert all(finite["click"] for finite in seen)


def test_rates_follow_a_schedule(device: Device) -> None:
    def with_schedule(*, graphed: bool) -> Trained:
        trained = Trained(device, graphed=graphed)
        for number, batch in enumerate(batches(12)):
            for group in trained.dense.param_groups:
                group["lr"] = 0.01 / (1 + number)
            trained.train(iter([batch]))
        return trained

    eager, graphed = with_schedule(graphed=False), with_schedule(graphed=True)
    assert graphed.graph is not None
    assert graphed.graph.trouble is None
    assert_same(eager, graphed, exact=False)  # a rate on the device is a float of 32 bits
    assert [group["lr"] for group in graphed.dense.param_groups] == [0.01 / 12]


def test_touched_sets_get_the_ids_of_replayed_steps(device: Device) -> None:
    found = []
    for graphed in (False, True):
        trained, touched = Trained(device, graphed=graphed), TouchedKeySet(100_000)
        store = trained.model.embeddings.store
        assert isinstance(store, LocalStore)
        store.table("item").touch(touched)
        trained.train(batches(8, bad=(5,)))
        found.append(sorted(touched.steal().tolist()))
    assert found[0] == found[1] != []


@pytest.mark.parametrize("room", [True, False])
def test_a_snapshot_sees_rows_as_they_were(
    device: Device, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not room:
        monkeypatch.setattr(snapshots, "_WHOLE_SHARE", 0)
    trained = Trained(device, graphed=True).train(batches(8, most=8))
    store = trained.model.embeddings.store
    assert isinstance(store, LocalStore)
    before = rows_of(trained)["item"]
    snapshot = store.table("item").snapshot()
    assert trained.graph is not None
    replays = trained.graph.replays
    trained.train(batches(4, most=8))
    assert trained.graph.replays == replays + (4 if room else 0)
    seen = snapshot.scan(limit=100_000).rows
    snapshot.close(saved=True)
    assert torch.equal(seen.take(seen.ids.argsort()).values.cpu(), before.values.cpu())
    trained.train(batches(4, most=8))


def test_a_model_that_reads_ids_by_itself_is_not_captured(device: Device) -> None:
    trained = Trained(device, graphed=True)
    trained.train(batches(2))
    assert trained.graph is not None
    plain = trained.outputs

    def peeks(batch: Batch, rows: list[PreparedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, predictions = plain(batch, rows)
        return loss * float(batch.ids.ids[0]), predictions

    trained.graph._outputs = peeks
    before = {name: one.clone() for name, one in trained.model.state_dict().items()}
    with pytest.raises(AcceleratorError, match="cannot be captured"):
        trained.graph.train(trained.graph.send(next(batches(1))))
    assert trained.graph.trouble is not None
    assert not trained.graph.takes(trained.graph.send(next(batches(1))))
    for name, one in trained.model.state_dict().items():
        assert torch.equal(one, before[name])


THRESHOLDS = {
    "item": SlotThresholds(default=3, counting=AdmissionConfig(capacity=2000)),
    "user": SlotThresholds(default=2, counting=AdmissionConfig(kind="probabilistic_filter")),
}


def filters_of(trained: Trained, folder: Path) -> list[bytes]:
    """Return the files of all filters."""
    store = trained.model.embeddings.store
    assert isinstance(store, LocalStore)
    folder.mkdir()
    for name, one in store.filters.items():
        one.save(str(folder / name))
    return [path.read_bytes() for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_wait_for_admission_as_in_steps_one_by_one(device: Device, tmp_path: Path, ragged: bool) -> None:
    """Counts are the same after each part, and so are rows; batches that are refused count nothing."""
    how: Any = {"optimizer": "momentum", "thresholds": THRESHOLDS}
    eager, graphed = (Trained(device, graphed=one, **how) for one in (False, True))
    assert graphed.graph is not None
    make = ragged_batches if ragged else partial(batches, most=8)
    given = list(make(20, bad=(0, 6, 7, 13)))
    for part in range(0, 20, 5):
        for one in (eager, graphed):
            one.train(iter(given[part : part + 5]))
        if part == 5:  # batches of another shape, which are captured late
            for one in (eager, graphed):
                one.train(batches(5, size=16, most=8))
        counted = [filters_of(one, tmp_path / f"{part} {one is eager}") for one in (eager, graphed)]
        assert counted[0] == counted[1]
    assert graphed.graph.trouble is None
    assert graphed.graph.replays >= 10
    assert len([trouble for trouble, _ in graphed.said if trouble]) == 4
    assert_same(eager, graphed, exact=False if ragged else None)
    for name in THRESHOLDS:
        filtered = [one.model.embeddings.store.stats()[name].filtered for one in (eager, graphed)]
        assert filtered[0] == filtered[1] > 10


def test_a_replayed_step_with_a_filter_waits_for_nothing(device: Device) -> None:
    trained = Trained(device, graphed=True, optimizer="sgd", thresholds=THRESHOLDS)
    trained.train(batches(10, most=8))
    assert trained.graph is not None
    before = trained.graph.replays
    for batch in batches(2, most=8):
        sent = trained.graph.send(batch)
        with nothing_waits(device):
            trained.graph.train(sent)
        trained.sparse.global_step += 1
    assert trained.graph.replays == before + 2


def test_two_runs_are_equal_to_the_bit(device: Device) -> None:
    one, other = (Trained(device, graphed=True).train(batches(12)) for _ in range(2))
    for (name, mine), (_, theirs) in zip(
        one.model.state_dict().items(), other.model.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    for name, rows in rows_of(one).items():
        assert torch.equal(rows.values, rows_of(other)[name].values), name
