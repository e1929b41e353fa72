"""The ready models learn what is there to be learned, and one row per id is what it takes.

The click log knows its own probabilities, and so the best AUC there is. Every bound here was set by
measuring with three seeds of log and model (0, 1, 2) and leaving room; the test runs the first. One
thread: the models are small, and tests share their cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import nn

from monolith.data import ClickLog, ClickLogConfig
from monolith.feature import Batch, Mean
from monolith.model import DLRM, FFM, DCNv2, DeepFM, EmbeddingOptimizer, Feature, MMoE, ReadyModel
from monolith.nn import auc
from monolith.table import Adagrad

STEPS, BATCH_SIZE, TESTED = 400, 768, 50_000

LOG = ClickLogConfig(
    users=1000, items=300, contexts=20, history=4, dim=2, user_skew=0.3, item_skew=0.5, numbers=4, likes=True
)
FEATURES = ["user", "item", "context", Feature(name="history", shares="item", combiner=Mean())]
NUMBERS = {"numbers": 4}
SLOW, FAST = Adagrad(learning_rate=0.1), Adagrad(learning_rate=0.2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def deepfm(seed: int) -> ReadyModel:
    return DeepFM(
        FEATURES, dim=8, hidden=(32,), floats=NUMBERS, optimizer=SLOW, bias_optimizer=SLOW, seed=seed
    )


def dcn(seed: int) -> ReadyModel:
    return DCNv2(FEATURES, dim=8, hidden=(32,), floats=NUMBERS, optimizer=FAST, seed=seed)


def dlrm(seed: int) -> ReadyModel:
    return DLRM(FEATURES, dim=8, bottom=(16,), top=(32,), floats=NUMBERS, optimizer=SLOW, seed=seed)


def mmoe(seed: int) -> ReadyModel:
    return MMoE(
        FEATURES,
        tasks=("click", "like"),
        dim=8,
        num_experts=2,
        experts=(48,),
        hidden=(16,),
        floats=NUMBERS,
        optimizer=FAST,
        seed=seed,
    )


def ffm(seed: int) -> ReadyModel:
    pairs = [("user", "item", 8), ("context", "item", 8), ("history", "item", 8)]
    return FFM(FEATURES, pairs, optimizer=SLOW, bias_optimizer=SLOW, seed=seed)


@cache
def drawn(config: ClickLogConfig) -> tuple[list[Batch], Batch]:
    """What is trained on, and what comes after: drawn once for all models."""
    log = ClickLog(config)
    return list(log.batches(STEPS, BATCH_SIZE)), log.batch(STEPS * BATCH_SIZE, TESTED)


@pytest.fixture(autouse=True, scope="module")
def drawn_for_this_file() -> Iterator[None]:
    yield
    drawn.cache_clear()


def train_and_test(
    model: ReadyModel, log: ClickLogConfig, change: Callable[[Batch], Batch] = lambda batch: batch
) -> dict[str, float]:
    """Train on the log once, in order; return the AUC of each task on what comes after."""
    sparse = EmbeddingOptimizer(model)
    weights = list(model.parameters())
    dense = torch.optim.Adam(weights, lr=0.005) if weights else None
    batches, test = drawn(log)
    for batch in map(change, batches):
        loss = torch.zeros(())
        for task, logits in by_task(model(batch)).items():
            loss = loss + nn.functional.binary_cross_entropy_with_logits(logits, batch.labels[task])
        loss.backward()
        sparse.step()
        if dense is not None:
            dense.step()
            dense.zero_grad()
    model.eval()
    test = change(test)
    with torch.no_grad():
        return {task: auc(logits, test.labels[task]) for task, logits in by_task(model(test)).items()}


def by_task(out: torch.Tensor | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return out if isinstance(out, dict) else {"click": out}


@cache
def best(log: ClickLogConfig, task: str = "click") -> float:
    return ClickLog(log).best_auc(TESTED, first=STEPS * BATCH_SIZE, task=task)


# Measured over the three seeds: 0.009 to 0.014 below the best, which is 0.84 to 0.85; once (DCN, the third
# seed) 0.031. Biases alone reach 0.65 to 0.67.
@pytest.mark.parametrize("make", [deepfm, dcn, dlrm])
def test_a_model_of_pairs_comes_near_the_best_there_is(make: Callable[[int], ReadyModel]) -> None:
    log = LOG
    assert train_and_test(make(0), log)["click"] > best(log) - 0.025


# It reads no numbers, so there are none. Measured: 0.013 to 0.017 below the best.
def test_field_aware_pairs_without_any_mlp_come_near_it_too() -> None:
    log = dataclasses.replace(LOG, numbers=0, likes=False)
    assert train_and_test(ffm(0), log)["click"] > best(log) - 0.025


# An MLP has to find the products by itself, here for two tasks at once, and takes longer for it. Measured:
# 0.022 to 0.061 below the best for clicks, 0.067 to 0.098 for likes.
def test_a_mixture_of_experts_learns_both_tasks() -> None:
    log = LOG
    reached = train_and_test(mmoe(0), log)
    assert reached["click"] > best(log, "click") - 0.1
    assert reached["like"] > best(log, "like") - 0.13


def hashed_to_a_quarter(batch: Batch) -> Batch:
    """Give ids a quarter of their number of places, as one does whose table cannot grow."""
    ids = batch.ids
    single = 3 * ids.batch_size  # users, items, contexts; then histories
    places = torch.full_like(ids.ids, LOG.items // 4)
    places[: ids.batch_size] = LOG.users // 4
    hashed = ids.ids.remainder(places)  # ids of the log are hashes already
    hashed[2 * ids.batch_size : single] = ids.ids[2 * ids.batch_size : single]  # contexts have their own
    return dataclasses.replace(batch, ids=dataclasses.replace(ids, ids=hashed))


# The paper's first result. Measured: 0.011 or 0.012 below the best with a row for each id; 0.171 to 0.177
# with a quarter of the rows, hardly better than biases alone.
def test_a_row_for_each_id_beats_rows_that_ids_have_to_share() -> None:
    log = dataclasses.replace(LOG, numbers=0, likes=False)
    own, shared = (
        DeepFM(FEATURES, dim=8, hidden=(32,), optimizer=SLOW, bias_optimizer=SLOW) for _ in range(2)
    )
    with_own = train_and_test(own, log)["click"]
    with_shared = train_and_test(shared, log, hashed_to_a_quarter)["click"]
    assert own.embeddings.store.stats()["user"].rows == LOG.users
    assert shared.embeddings.store.stats()["user"].rows <= LOG.users // 4
    assert with_own > best(log) - 0.025
    assert with_own > with_shared + 0.1
