"""What every ready model promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, FeatureError
from monolith.feature import Batch, FeatureIds, FirstN, Mean
from monolith.model import DLRM, FFM, DCNv2, DeepFM, EmbeddingOptimizer, Feature, MMoE, ReadyModel
from monolith.store import LocalStore
from monolith.tensors import RaggedTensor

FEATURES = ["user", "item", Feature(name="clicked", shares="item", combiner=Mean())]
NUMBERS = {"price": 1, "age": 2}
PAIRS = [("user", "item", 4), ("clicked", "item", 4)]

MODELS: dict[str, Callable[..., ReadyModel]] = {
    "DeepFM": lambda **more: DeepFM(FEATURES, dim=4, hidden=(16, 16), floats=NUMBERS, **more),
    "DCNv2": lambda **more: DCNv2(FEATURES, dim=4, hidden=(16, 16), floats=NUMBERS, **more),
    "DLRM": lambda **more: DLRM(FEATURES, dim=4, bottom=(8,), top=(16, 16), floats=NUMBERS, **more),
    "MMoE": lambda **more: MMoE(FEATURES, tasks=("click", "like"), dim=4, floats=NUMBERS, **more),
    "FFM": lambda **more: FFM(FEATURES, PAIRS, **more),
}
READ_NUMBERS = ["DeepFM", "DCNv2", "DLRM", "MMoE"]
MLPS = READ_NUMBERS

IDS = {
    "user": RaggedTensor.from_list([[1], [2], [1]]),
    "item": RaggedTensor.from_list([[10], [11], [12]]),
    "clicked": RaggedTensor.from_list([[11, 12], [10], []], dtype=torch.int64),
}
FLOATS = {"price": torch.tensor([[0.5], [1.0], [-1.0]]), "age": torch.ones(3, 2)}


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[..., ReadyModel]:
    return MODELS[request.param]


def batch() -> Batch:
    labels = {"click": torch.tensor([1.0, 0.0, 1.0])}
    return Batch(FeatureIds.pack(IDS), FLOATS, labels)


def logits_of(out: Tensor | dict[str, Tensor]) -> Tensor:
    return torch.stack(list(out.values())).sum(0) if isinstance(out, dict) else out


def train(model: ReadyModel, steps: int = 3) -> EmbeddingOptimizer:
    sparse = EmbeddingOptimizer(model)
    for _ in range(steps):
        take_step(model, sparse)
    return sparse


def take_step(model: ReadyModel, sparse: EmbeddingOptimizer) -> None:
    model.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(logits_of(model(batch())), batch().label).backward()
    sparse.step()


def test_it_gives_one_logit_for_each_example(make: Callable[..., ReadyModel]) -> None:
    out = make()(batch())
    for logits in out.values() if isinstance(out, dict) else [out]:
        assert (logits.shape, logits.dtype) == ((3,), torch.float32)


def test_it_reads_a_batch_its_ids_or_rows_looked_up_ahead_all_the_same(
    make: Callable[..., ReadyModel],
) -> None:
    model = make()
    train(model)
    model.eval()
    whole = logits_of(model(batch()))
    assert torch.equal(logits_of(model(FeatureIds.pack(IDS), FLOATS)), whole)
    assert torch.equal(logits_of(model(IDS, floats=FLOATS)), whole)
    assert torch.equal(logits_of(model(model.embeddings.prepare(batch()), FLOATS)), whole)


def test_unknown_features_are_skipped_and_missing_ones_read_as_zeros(
    make: Callable[..., ReadyModel],
) -> None:
    model = make()
    train(model)
    more = IDS | {"weather": RaggedTensor.from_list([[1], [2], [3]])}
    less = {"user": IDS["user"]}
    none = less | {
        name: RaggedTensor.from_list([[], [], []], dtype=torch.int64) for name in ("item", "clicked")
    }
    assert torch.equal(logits_of(model(more, FLOATS)), logits_of(model(IDS, FLOATS)))
    assert torch.equal(logits_of(model(less, FLOATS)), logits_of(model(none, FLOATS)))


def test_gradients_reach_rows_and_weights(make: Callable[..., ReadyModel]) -> None:
    model, ids = make(), torch.tensor([10, 11, 12])
    sparse = train(model)  # so that rows are not zeros, where products have no slope
    before = model.embeddings.store.table("item").lookup(ids)
    take_step(model, sparse)
    assert (model.embeddings.store.table("item").lookup(ids) != before).any(1).all()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


def test_the_seed_settles_rows_and_weights_and_torchs_own_numbers_are_left_alone(
    make: Callable[..., ReadyModel],
) -> None:
    state = torch.get_rng_state()
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for model in (one, same, other):
        train(model)
    assert torch.equal(logits_of(one(batch())), logits_of(same(batch())))
    assert not torch.equal(logits_of(one(batch())), logits_of(other(batch())))


def test_the_dense_half_compiles_as_one_graph(make: Callable[..., ReadyModel]) -> None:
    model = make()
    train(model)
    model.eval()
    plain = logits_of(model(batch()))
    torch.compiler.reset()
    model.dense = torch.compile(model.dense, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits_of(model(batch())), plain)


def test_rows_may_live_in_a_store_one_hands_over(make: Callable[..., ReadyModel]) -> None:
    tables = make().embeddings.slot_tables
    store = LocalStore.from_configs(tables.configs, thresholds=tables.thresholds, threads=1)
    model = make(store=store, threads=1)
    assert model.embeddings.store is store
    train(model)
    assert {name: len(store.table(name)) for name in store.tables} == {"user": 2, "item": 3}


def test_weights_but_not_rows_are_in_the_state_dict(make: Callable[..., ReadyModel]) -> None:
    assert all(name.startswith("dense.") for name in make().state_dict())


# Float features


@pytest.fixture(params=READ_NUMBERS)
def make_with_numbers(request: pytest.FixtureRequest) -> Callable[..., ReadyModel]:
    return MODELS[request.param]


def test_float_features_count(make_with_numbers: Callable[..., ReadyModel]) -> None:
    model = make_with_numbers()
    train(model)
    other = {**FLOATS, "price": FLOATS["price"] + 1}
    assert not torch.equal(logits_of(model(IDS, FLOATS)), logits_of(model(IDS, other)))


def test_float_features_that_are_missing_or_of_another_width_are_named(
    make_with_numbers: Callable[..., ReadyModel],
) -> None:
    model = make_with_numbers()
    with pytest.raises(FeatureError, match="'price', which the batch does not have; it has none"):
        model(IDS)
    with pytest.raises(FeatureError, match=r"'age' must have shape \(examples, 2\), got \(3, 1\)"):
        model(IDS, {**FLOATS, "age": torch.ones(3, 1)})
    with pytest.raises(ConfigError, match="'x': width must be at least 1"):
        DeepFM(["user"], floats={"x": 0})


# The MLP


@pytest.mark.parametrize("name", MLPS)
def test_dropout_drops_in_training_only(name: str) -> None:
    model = MODELS[name](dropout=0.5)
    train(model)
    assert not torch.equal(logits_of(model(batch())), logits_of(model(batch())))
    model.eval()
    assert torch.equal(logits_of(model(batch())), logits_of(model(batch())))


@pytest.mark.parametrize("name", MLPS)
def test_kernels_are_plain_unless_their_norm_is_asked_for(name: str) -> None:
    plain, normed = MODELS[name](), MODELS[name](kernel_norm=True)
    assert len(list(normed.parameters())) > len(list(plain.parameters()))
    train(normed)


@pytest.mark.parametrize("name", ["DeepFM", "DCNv2"])
def test_the_first_layer_tells_what_each_feature_contributes(name: str) -> None:
    model = MODELS[name]()
    train(model)
    reports: list[dict[str, Tensor]] = []
    handle = model.watch_features(reports.append)  # type: ignore[operator]
    model(batch())
    handle.remove()
    model(batch())
    (report,) = reports
    assert list(report) == ["user", "item", "clicked", "price", "age"]
    assert all(part.shape == (3,) for part in report.values())
    assert report["clicked"][2] == 0  # nothing was clicked there


# What makes no sense


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_at_least_one_feature_and_no_sequences(name: str) -> None:
    more = {"DLRM": {"floats": {"x": 1}}, "MMoE": {"tasks": ["click"]}, "FFM": {"pairs": PAIRS}}.get(name, {})
    model = {"DeepFM": DeepFM, "DCNv2": DCNv2, "DLRM": DLRM, "MMoE": MMoE, "FFM": FFM}[name]
    with pytest.raises(ConfigError, match=f"{name}: needs at least one feature"):
        model([], **more)
    with pytest.raises(ConfigError, match=f"{name}: feature 'a' keeps its first ids"):
        model([Feature(name="a", combiner=FirstN(2))], **more)


def test_dropout_is_a_share() -> None:
    with pytest.raises(ConfigError, match="dropout must be from 0 to below 1, got 1"):
        DeepFM(["a"], dropout=1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_with_its_dense_half_on_a_gpu_a_model_learns_the_same(make: Callable[..., ReadyModel]) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = make(device=device)
        sparse = EmbeddingOptimizer(model)
        for _ in range(5):
            out = model(batch())
            outputs = list(out.values()) if isinstance(out, dict) else [out]
            assert {output.device.type for output in outputs} == {device}
            torch.stack([(output - 1).square().sum() for output in outputs]).sum().backward()
            sparse.step()
        assert isinstance(model.embeddings.store, LocalStore)
        rows = model.embeddings.store.table("item").lookup(torch.tensor([10, 11, 12]))
        assert rows.abs().sum() > 0
        found.append([rows, *(output.detach().cpu() for output in outputs)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
