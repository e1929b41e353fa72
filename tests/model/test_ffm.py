"""FFM: dot products of chosen pairs, and biases."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError, UnknownFeatureError
from monolith.feature import FirstN
from monolith.model import FFM, EmbeddingOptimizer, Feature, ffm_examples, ffm_loss, ffm_sample
from monolith.model.ffm import FFM_BIASES, FFM_PAIRS, NUM_EXAMPLES, VOCAB_SIZES
from monolith.table import Ftrl, NativeTable, Sgd


def sums(model: FFM, batch: object, feature: int) -> torch.Tensor:
    """Return one feature's rows, summed per example: float of shape (examples, dim)."""
    ids = batch.ids[f"feature_{feature}"]  # type: ignore[attr-defined]
    rows = model.embeddings.store.table(str(feature)).lookup(ids.flat_values)
    total = torch.zeros(ids.nrows, rows.shape[1])
    return total.index_add(0, ids.value_rowids, rows)


def train(model: FFM, batch: object, steps: int) -> list[float]:
    sparse = EmbeddingOptimizer(model, multiply_rows_by=1)  # 30 rows, which most examples meet
    losses = []
    for _ in range(steps):
        loss = ffm_loss(model(batch), batch.label)  # type: ignore[attr-defined]
        loss.backward()
        sparse.step()
        losses.append(loss.item())
    return losses


# The sample


def test_the_samples_examples_are_the_same_for_the_same_seed() -> None:
    one, two, other = ffm_examples(), ffm_examples(), ffm_examples(seed=1)
    assert len(one) == NUM_EXAMPLES == 64
    assert torch.equal(one.ids.ids, two.ids.ids)
    assert torch.equal(one.label, two.label)
    assert not torch.equal(one.label, other.label)


def test_each_feature_has_one_to_five_of_its_own_five_ids() -> None:
    batch = ffm_examples()
    for feature in range(len(VOCAB_SIZES)):
        ids = batch.ids[f"feature_{feature}"]
        assert set(ids.row_lengths().tolist()) == {1, 2, 3, 4, 5}
        assert set(ids.flat_values.tolist()) == set(range(5 * feature, 5 * feature + 5))


def test_labels_are_both_0_and_1_as_upstream_meant() -> None:
    assert set(ffm_examples().label.tolist()) == {0.0, 1.0}


def test_the_samples_rows_are_upstreams() -> None:
    tables = ffm_sample().embeddings.slot_tables.configs
    widths = {slot: sum(16 for pair in FFM_PAIRS if slot in pair[:2]) for slot in range(6)}
    assert list(tables) == ["0", "1", "2", "3", "4", "5"]
    for slot, width in widths.items():
        segments = tables[str(slot)].segments
        assert sum(segment.dim for segment in segments) == width + (slot in FFM_BIASES)
        assert segments[-1].optimizer == Sgd(learning_rate=0.1)
        if slot in FFM_BIASES:
            bias = Ftrl(learning_rate=0.1, initial_accumulator_value=1e-6, beta=1.0)
            assert (segments[0].dim, segments[0].optimizer) == (1, bias)


def test_the_logit_is_five_dot_products_and_four_biases() -> None:
    model, batch = ffm_sample(), ffm_examples()
    train(model, batch, 3)
    rows = [sums(model, batch, feature) for feature in range(6)]
    expected = sum(rows[feature][:, 0] for feature in FFM_BIASES)
    begin = [int(feature in FFM_BIASES) for feature in range(6)]  # past the bias
    for one, other, dim in FFM_PAIRS:
        left = rows[one][:, begin[one] : begin[one] + dim]
        right = rows[other][:, begin[other] : begin[other] + dim]
        expected = expected + (left * right).sum(1)
        begin[one] += dim
        begin[other] += dim
    torch.testing.assert_close(model(batch), expected)
    assert model(batch).shape == (64,)


def test_the_loss_is_the_mean_with_predictions_kept_from_0_and_1() -> None:
    logits, labels = torch.tensor([0.0, 2.0, 1000.0]), torch.tensor([1.0, 0.0, 0.0])
    largest = torch.tensor(1 - 1e-7)  # as a float32
    each = [torch.tensor(0.5).log(), (1 - torch.tensor(2.0).sigmoid()).log(), (1 - largest).log()]
    torch.testing.assert_close(ffm_loss(logits, labels), -torch.stack(each).mean())


def test_training_learns_the_samples_labels() -> None:
    losses = train(ffm_sample(), ffm_examples(), 100)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # no rows yet: every logit is 0
    assert losses[-1] < 0.6
    assert losses[-1] < losses[50] < losses[10]


# Any pairs


def test_any_pairs_may_be_chosen_and_biases_left_out() -> None:
    model = FFM(["user", "item"], [("user", "item", 2)], biases=[], optimizer=Sgd(learning_rate=1.0))
    assert model.embeddings.shapes == {"left": (2,), "right": (2,)}
    table = model.embeddings.store.table
    assert isinstance(table("user"), NativeTable)
    table("user").assign(torch.tensor([1]), torch.tensor([[1.0, 2.0]]))
    table("item").assign(torch.tensor([9]), torch.tensor([[3.0, 4.0]]))
    assert model({"user": torch.tensor([1]), "item": torch.tensor([9])}).tolist() == [11.0]


def test_features_of_a_pair_that_share_rows_still_have_a_vector_each() -> None:
    model = FFM(["item", Feature(name="clicked", shares="item")], [("item", "clicked", 2)], biases=["item"])
    assert model.embeddings.store.tables == {"item": 5}


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UnknownFeatureError, match="'itm'"):
        FFM(["user", "item"], [("user", "itm", 2)])
    with pytest.raises(ConfigError, match="at least one pair"):
        FFM(["user"], [])
    with pytest.raises(ConfigError, match="'clicked' keeps its first ids"):
        FFM(["user", Feature(name="clicked", combiner=FirstN(3))], [("user", "clicked", 2)])
