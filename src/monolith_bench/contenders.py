"""Those that race: the table, raw rows and the rivals, each over the same batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from monolith import native
from monolith.table import Adagrad, NativeTable, Optimizer, RandomUniform, Segment, Table, TableConfig
from monolith.table.config import EmbeddingDtype
from monolith_bench.ids import IdBatches
from monolith_bench.rivals import LEARNING_RATE, Rival
from monolith_bench.timing import Contender

EVENT_TIME = 1_700_000_000
"""When the first update happens; each later one is a second newer, so the time is really written."""


def new_table(
    dim: int, threads: int, optimizer: Optimizer | None = None, dtype: EmbeddingDtype = "float32"
) -> NativeTable:
    """Return an empty table that has to grow."""
    segment = Segment(
        dim=dim,
        optimizer=Adagrad(learning_rate=LEARNING_RATE) if optimizer is None else optimizer,
        initializer=RandomUniform(),
    )
    config = TableConfig(name="bench", segments=(segment,), embedding_dtype=dtype)
    return NativeTable(config, workers=native.Workers(threads))


def make_gradients(batch: int, dim: int, seed: int) -> Tensor:
    return torch.randn((batch, dim), generator=torch.Generator().manual_seed(seed)) * 0.01


def fill(table: Table, ids: Tensor, gradients: Tensor) -> Iterator[float]:
    """Insert ids by training them, as many in a call as there are gradients; yield each call's seconds."""
    for time_passed, batch in enumerate(torch.split(ids, len(gradients))):
        began = time.perf_counter()
        table.apply_gradients(batch, gradients[: len(batch)], event_time=EVENT_TIME + time_passed)
        yield time.perf_counter() - began


def table_contenders(table: Table, requests: IdBatches, gradients: Tensor) -> dict[str, Contender]:
    """`lookup and update` sums the gradients of equal ids, as the rivals do; `update` applies each."""
    out = torch.empty_like(gradients)
    clock = itertools.count(EVENT_TIME)

    def update(batch: int, *, dedup: bool = False) -> None:
        table.apply_gradients(requests.ids[batch], gradients, event_time=next(clock), dedup=dedup)

    def step(batch: int) -> None:
        table.lookup(requests.ids[batch], out)
        update(batch, dedup=True)

    return {
        "lookup": contender(requests, lambda batch: table.lookup(requests.ids[batch], out)),
        "update": contender(requests, update),
        "update with dedup": contender(requests, lambda batch: update(batch, dedup=True)),
        "lookup and update": contender(requests, step),
    }


def raw_contenders(raw: native.RawRows, requests: IdBatches, gradients: Tensor) -> dict[str, Contender]:
    """`raw gather` copies rows of the table's own size, state included; a lookup returns the values only."""
    rows, values = (torch.empty((len(gradients), floats)).numpy() for floats in (2 * raw.width, raw.width))
    changes = gradients.numpy()
    return {
        "raw gather": contender(requests, lambda batch: raw.gather(requests.positions[batch], rows)),
        "raw gather of values only": contender(
            requests, lambda batch: raw.gather(requests.positions[batch], values)
        ),
        "raw read-modify-write": contender(
            requests, lambda batch: raw.update(requests.positions[batch], changes)
        ),
    }


def rival_contenders(rivals: Sequence[Rival], requests: IdBatches, gradients: Tensor) -> dict[str, Contender]:
    def lookup(rival: Rival) -> Callable[[int], object]:
        return lambda batch: rival.lookup(requests.indices[batch])

    def step(rival: Rival) -> Callable[[int], object]:
        return lambda batch: rival.step(requests.indices[batch], gradients)

    return {
        f"{rival.name} {work}": contender(requests, run)
        for rival in rivals
        for work, run in (("lookup", lookup(rival)), ("step", step(rival)))
    }


def contender(requests: IdBatches, run: Callable[[int], object]) -> Contender:
    return Contender(len(requests.ids[0]), run, itertools.cycle(range(len(requests))))
