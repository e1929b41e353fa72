"""Random operations on a table and on the plain one: both must tell the same story."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from contracts.tables import quick_table_classes
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries
from torch import Tensor

from monolith import native
from monolith.table import (
    OPTIMIZERS,
    Adagrad,
    Constant,
    DelayCompensated,
    DictTable,
    Expiry,
    FixedR8,
    Fp16,
    NativeTable,
    OneBit,
    Ones,
    Optimizer,
    RandomUniform,
    Rows,
    Segment,
    Sgd,
    StochasticRounding,
    Table,
    TableConfig,
    Zeros,
    iterate,
)
from monolith.table.compressors import Compressor, Fp32
from monolith.table.update_rules import state_views

OTHERS = quick_table_classes()[1:]  # all but the plain one

# Thresholds are odd fractions and gradients are eighths, so that no comparison is decided by rounding.
SETTINGS: dict[str, dict[str, Any]] = {
    "ftrl": {"l1": 0.3, "l2": 0.1, "beta": 0.5},
    "group_ftrl": {"l1": 0.3, "l2": 0.1},
    "group_adagrad": {"l2": 0.3, "beta": 0.5, "weight_decay": 0.01},
    "adagrad": {"weight_decay": 0.01},
    "adam": {"weight_decay": 0.01, "use_nesterov": True},
    "momentum": {"use_nesterov": True, "weight_decay": 0.01},
    "dynamic_wd_adagrad": {"weight_decay": 0.01},
    "rowwise_adagrad": {"weight_decay": 0.01},
}
# Shorter than, equal to and longer than a vector register, so that remainders are covered.
DIMS = [1, 2, 3, 7, 8, 9, 16, 19]
KEYS = [0, 1, 2, 3, -1, -2, 2**63 - 1, -(2**63), 1 << 48, 1 << 48 | 1, 2 << 48, 3 << 48 | 9]
EIGHTHS = st.integers(-16, 16).map(lambda n: n / 8)


@st.composite
def optimizers(draw: st.DrawFn) -> Optimizer:
    kind = draw(st.sampled_from([*OPTIMIZERS, "rounded", "delayed", "both"]))
    # Rounding turns one unit in the last place into a whole half: only exact rules can be compared.
    if kind == "rounded":
        return StochasticRounding(Sgd())
    if kind == "both":
        return StochasticRounding(DelayCompensated(Sgd(), 0.0))
    base = draw(st.sampled_from(list(OPTIMIZERS))) if kind == "delayed" else kind
    bare = OPTIMIZERS[base](**SETTINGS.get(base, {}) if draw(st.booleans()) else {})
    return DelayCompensated(bare, 0.25) if kind == "delayed" else bare


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    optimizer = draw(optimizers())
    exact = optimizer.stochastic_rounding
    compressors: list[Compressor] = [Fp32(), Fp16(), FixedR8(4.0), OneBit(step_size=3, amplitude=0.5)]
    return Segment(
        dim=1 if optimizer.rule.kind == "batch_softmax" else draw(st.sampled_from(DIMS)),
        optimizer=optimizer,
        initializer=draw(st.sampled_from([Zeros(), Ones(), Constant(0.75), RandomUniform()])),
        compressor=Fp32() if exact else draw(st.sampled_from(compressors)),
        learning_rate=draw(st.sampled_from([0.0, 0.125, 0.5])),
    )


configs = st.builds(
    TableConfig,
    name=st.just("random"),
    segments=st.lists(segments(), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    expiry=st.just(Expiry.days(3, {1: 1, 2: 0})),
    initial_rows=st.sampled_from([0, 100]),
)


@dataclass(frozen=True)
class Operation:
    """A call by name; values are made from `seed` once the table's width is known."""

    name: str
    keys: tuple[int, ...]
    seed: int
    dedup: bool
    days: int

    def __call__(self, table: Table, step: int, reference_rows: Rows) -> Any:
        ids = torch.tensor(self.keys, dtype=torch.int64)
        values = _eighths(self.seed, len(ids), table.dim)
        times = torch.from_numpy(np.random.default_rng(self.seed).integers(0, 3 * 86400, len(ids)))
        times += self.days * 86400
        match self.name:
            case "assign":
                return table.assign(ids, values, event_time=times)
            case "assign_add":
                return table.assign_add(ids, values, event_time=self.days * 86400)
            case "apply_gradients":
                return table.apply_gradients(
                    ids,
                    values,
                    step=step,
                    event_time=times,
                    dedup=self.dedup,
                    latest_values=_eighths(self.seed + 1, 1, table.dim).expand(len(ids), table.dim),
                )
            case "reinitialize":
                return table.reinitialize(ids, now=self.days * 86400).tolist()
            case "remove":
                return table.remove(ids)
            case "evict":
                return table.evict(self.days * 86400 if self.dedup else None)
            case "restore":
                return table.restore(reference_rows)
            case "clear":
                return table.clear()
            case _:
                raise AssertionError(self.name)


NAMES = ["apply_gradients"] * 6 + [
    "assign",
    "assign_add",
    "reinitialize",
    "remove",
    "evict",
    "restore",
    "clear",
]
operations = st.builds(
    Operation,
    name=st.sampled_from(NAMES),
    keys=st.lists(st.sampled_from(KEYS), max_size=12).map(tuple),
    seed=st.integers(0, 1000),
    dedup=st.booleans(),
    days=st.integers(0, 6),
)


def _eighths(seed: int, n: int, dim: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-16, 17, (n, dim)).astype(np.float32) / 8)


def _content(table: Table, limit: int) -> Rows:
    chunks = list(iterate(table, limit=limit))
    columns = [
        torch.cat([getattr(chunk, name) for chunk in chunks] or [getattr(table.scan().rows, name)])
        for name in ("ids", "event_times", "values", "state")
    ]
    order = columns[0].argsort()
    return Rows(*(column[order] for column in columns))


def _assert_close(expected: Any, found: Any, config: TableConfig, at: str) -> None:
    scale = 2e-3 if any(s.optimizer.stochastic_rounding for s in config.segments) else 2e-4
    np.testing.assert_allclose(found, expected, rtol=scale, atol=scale / 10, err_msg=at)


def _assert_same(expected: Rows, found: Rows, config: TableConfig) -> None:
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.event_times.tolist() == expected.event_times.tolist()
    _assert_close(expected.values, found.values, config, "values")
    start = 0
    for number, segment in enumerate(config.segments):
        end = start + segment.state_dim
        for want, got in zip(expected.state[:, start:end], found.state[:, start:end], strict=True):
            wanted = state_views(segment.optimizer, want.contiguous().numpy(), segment.dim)
            views = state_views(segment.optimizer, got.contiguous().numpy(), segment.dim)
            for name, view in wanted.items():
                at = f"segment {number}: {name} of {segment.optimizer}"
                if view.dtype == np.int64:
                    assert views[name].tolist() == view.tolist(), at
                else:
                    _assert_close(view, views[name], config, at)
        start = end


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
@settings(max_examples=tries(20), deadline=None)
@given(config=configs, story=st.lists(operations, max_size=12), limit=st.sampled_from([1, 5, 1000]))
def test_random_operations_have_the_same_effect(
    cls: Any, config: TableConfig, story: list[Operation], limit: int
) -> None:
    reference, table = DictTable(config), cls(config)
    for step, operation in enumerate(story):
        keys = torch.tensor(operation.keys, dtype=torch.int64)
        _, whole = reference.lookup_rows(keys)
        # Restored under other ids, so that rows are born as well as overwritten.
        moved = Rows(whole.ids ^ 1, whole.event_times, whole.values, whole.state)
        assert operation(table, step, moved) == operation(reference, step, moved)
        assert table.contains(keys).tolist() == reference.contains(keys).tolist()
    _assert_same(_content(reference, 1000), _content(table, limit), config)

    every = torch.tensor(KEYS)
    seen, wanted = table.lookup(every), reference.lookup(every)
    column = 0
    for segment in config.segments:
        part = slice(column, column + segment.dim)
        coarse = 4 / 128 if isinstance(segment.compressor, FixedR8) else 0.0
        np.testing.assert_allclose(seen[:, part], wanted[:, part], rtol=2e-3, atol=2e-4 + coarse)
        column += segment.dim

    for name in ("rows", "inserted", "filtered", "refused", "evicted", "removed", "max_event_time"):
        assert getattr(table.stats(), name) == getattr(reference.stats(), name), name
    table.close()


THREADS = 4
OWN = 3000
"""Ids that belong to one thread: enough, over all threads, for partitions to split under them."""


def _shared(cls: Any, config: TableConfig, *, threads: int) -> Any:
    """Make a table whose batches several threads work on, where it has any of its own."""
    return cls(config, workers=native.Workers(threads)) if cls is NativeTable else cls(config)


def _live(table: Table, thread: int, story: Sequence[tuple[str, int]]) -> None:
    """Act out a story on the thread's own ids. What others do meanwhile must not show."""
    own = torch.arange(OWN) * THREADS + thread
    for step, (name, seed) in enumerate(story):
        random = np.random.default_rng(seed)
        ids = own[torch.from_numpy(random.integers(0, OWN, 400))]
        values = _eighths(seed, len(ids), table.dim)
        match name:
            case "apply_gradients":
                table.apply_gradients(ids, values, step=step, event_time=seed, dedup=seed % 2 == 0)
            case "assign":
                table.assign(ids, values, event_time=seed)
            case "remove":
                table.remove(ids[:50])
            case "lookup":
                before = table.lookup(ids)
                assert torch.equal(before, table.lookup(ids))  # nobody else writes these


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@settings(max_examples=4, deadline=None)
@given(
    stories=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["apply_gradients", "apply_gradients", "assign", "remove", "lookup"]),
                st.integers(0, 1000),
            ),
            min_size=6,
            max_size=6,
        ),
        min_size=THREADS,
        max_size=THREADS,
    )
)
def test_threads_that_share_a_table_do_not_disturb_each_other(
    cls: Any, kind: str, stories: list[list[tuple[str, int]]]
) -> None:
    segment = Segment(
        dim=1 if kind == "batch_softmax" else 5,
        optimizer=OPTIMIZERS[kind](**SETTINGS.get(kind, {})),
        initializer=RandomUniform(),
        learning_rate=0.125,
    )
    config = TableConfig(name="shared", segments=(segment,))
    alone, shared = cls(config), _shared(cls, config, threads=2)
    for thread, story in enumerate(stories):
        _live(alone, thread, story)
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(_live, shared, thread, story) for thread, story in enumerate(stories)]:
            done.result()
    expected, found = _content(alone, 1000), _content(shared, 1000)
    for name in ("ids", "event_times", "values", "state"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("size", [1, 255, 1023, 1024, 1025, 2047, 2048, 2049, 4097, 8191, 20_000])
@pytest.mark.parametrize("threads", [2, 5])
def test_a_batch_is_the_same_to_one_thread_and_to_many(cls: Any, size: int, threads: int) -> None:
    segment = Segment(dim=16, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.125)
    config = TableConfig(name="t", segments=(segment,))
    alone, shared = cls(config), _shared(cls, config, threads=threads)
    ids = torch.randint(-size, size, (size,))  # repeats, and later ids that are not there
    for step in range(3):
        gradients = torch.randn(size, 16)
        for table in (alone, shared):
            table.apply_gradients(ids, gradients, step=step, event_time=step, dedup=step == 1)
    asked = torch.cat([ids, torch.arange(-size, size)])
    assert torch.equal(shared.lookup(asked), alone.lookup(asked))
    assert torch.equal(shared.contains(asked), alone.contains(asked))
    (mask, rows), (other_mask, other_rows) = shared.lookup_rows(asked), alone.lookup_rows(asked)
    assert torch.equal(mask, other_mask)
    for name in ("ids", "event_times", "values", "state"):
        assert torch.equal(getattr(rows, name), getattr(other_rows, name)), name


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
@settings(max_examples=tries(15), deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20, unique=True),
    seed=st.integers(0, 2**64 - 1),
    dims=st.lists(st.sampled_from(DIMS), min_size=1, max_size=3),
    bounds=st.tuples(st.floats(-8, 8), st.floats(-8, 8)).map(sorted),
)
def test_random_first_values_agree_to_the_last_bit(
    cls: Any, keys: list[int], seed: int, dims: list[int], bounds: list[float]
) -> None:
    uniform = RandomUniform(low=bounds[0], high=bounds[1])
    config = TableConfig(
        name="t", seed=seed, segments=tuple(Segment(dim=d, initializer=uniform) for d in dims)
    )
    born = []
    for table in (DictTable(config), cls(config)):
        table.reinitialize(torch.tensor(keys), now=0)
        born.append(table.lookup(torch.tensor(keys)))
    assert torch.equal(*born)


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
@settings(max_examples=tries(15), deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20, unique=True),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**40),
    values=st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5),
)
def test_stochastic_rounding_agrees_to_the_last_bit(
    cls: Any, keys: list[int], seed: int, step: int, values: list[float]
) -> None:
    rounded = Segment(dim=3, optimizer=StochasticRounding(Sgd()), learning_rate=0.0)
    config = TableConfig(name="t", seed=seed, segments=(Segment(dim=2), rounded))
    ends = []
    for table in (DictTable(config), cls(config)):
        table.assign(torch.tensor(keys), torch.tensor(values).expand(len(keys), 5))
        table.apply_gradients(torch.tensor(keys), torch.zeros(len(keys), 5), step=step)
        ends.append(table.lookup(torch.tensor(keys)))
    assert torch.equal(*ends)
