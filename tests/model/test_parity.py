"""Rows of a table are trained exactly as a dense embedding would be.

Upstream's comparison: 17 features, slices of 15, zeros to begin with, Adagrad with rate 0.05 and first
accumulator 0.1, and ids that wait for one sighting before they have a row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.feature import CONCAT, FeatureIds, Layout, Mean
from monolith.model import EmbeddingCollection, EmbeddingOptimizer, Feature, FeatureSet
from monolith.table import Adagrad, Zeros
from monolith.tensors import RaggedTensor

FEATURES, DIM, VOCAB, EXAMPLES, STEPS = 17, 15, 23, 32, 12
ADAGRAD = Adagrad(learning_rate=0.05, initial_accumulator_value=0.1)
NAMES = [f"feature_{number}" for number in range(FEATURES)]


def batches(seed: int) -> list[tuple[dict[str, RaggedTensor], Tensor]]:
    """Random ids, zero to three in a cell, with repeats, and labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(STEPS):
        ids = {}
        for name in NAMES:
            lengths = torch.randint(0, 4, (EXAMPLES,), generator=generator)
            values = torch.randint(0, VOCAB, (int(lengths.sum()),), generator=generator)
            ids[name] = RaggedTensor.from_row_lengths(values, lengths)
        made.append((ids, torch.randint(0, 2, (EXAMPLES,), generator=generator).float()))
    return made


def dense_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES * DIM, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits.squeeze(1), labels, reduction="sum")


def train_tables(seed: int, threshold: int) -> tuple[EmbeddingCollection, list[float]]:
    features = FeatureSet(
        [Feature(name=name, combiner=Mean(), occurrence_threshold=threshold) for name in NAMES],
        optimizer=ADAGRAD,
        initializer=Zeros(),
    )
    embeddings = EmbeddingCollection([Layout("x", CONCAT, features.slices(NAMES, "vector", DIM))])
    head = dense_head()
    sparse = EmbeddingOptimizer(embeddings, multiply_rows_by=1)  # the other side knows of no examples
    dense = torch.optim.Adagrad(head.parameters(), lr=0.05)
    losses = []
    for ids, labels in batches(seed):
        loss = loss_of(head(embeddings(FeatureIds.pack(ids))["x"]), labels)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return embeddings, losses


def train_dense(seed: int, threshold: int) -> tuple[list[nn.EmbeddingBag], list[float]]:
    """Train plain embeddings, of which an id's gradient is dropped while it still has to wait."""
    bags = [nn.EmbeddingBag(VOCAB, DIM, mode="mean") for _ in NAMES]
    for bag in bags:
        nn.init.zeros_(bag.weight)
    head = dense_head()
    rows = torch.optim.Adagrad([bag.weight for bag in bags], lr=0.05, initial_accumulator_value=0.1)
    dense = torch.optim.Adagrad(head.parameters(), lr=0.05)
    seen = torch.zeros(FEATURES, VOCAB, dtype=torch.int64)
    losses = []
    for ids, labels in batches(seed):
        read = [
            bag(ids[name].flat_values, ids[name].row_splits[:-1])
            for name, bag in zip(NAMES, bags, strict=True)
        ]
        loss = loss_of(head(torch.cat(read, 1)), labels)
        loss.backward()
        for number, (name, bag) in enumerate(zip(NAMES, bags, strict=True)):
            assert bag.weight.grad is not None
            bag.weight.grad[seen[number] < threshold] = 0
            seen[number] += torch.bincount(ids[name].flat_values, minlength=VOCAB)
        for optimizer in (rows, dense):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return bags, losses


def check_parity(threshold: int) -> None:
    embeddings, losses = train_tables(0, threshold)
    bags, expected_losses = train_dense(0, threshold)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert losses[-1] < losses[0]
    for name, bag in zip(NAMES, bags, strict=True):
        rows = embeddings.store.table(name).lookup(torch.arange(VOCAB))
        torch.testing.assert_close(rows, bag.weight.detach(), rtol=1e-4, atol=1e-6)
        assert rows.abs().sum() > 0


def test_rows_equal_a_dense_embedding_trained_by_dense_adagrad() -> None:
    check_parity(threshold=0)


def test_rows_that_wait_for_one_sighting_equal_one_without_the_gradients_of_the_wait() -> None:
    check_parity(threshold=1)
