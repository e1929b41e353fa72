"""The arithmetic of `monolith plan`: bytes of a row are those of real tables, and formulas are right."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.cli import capacity
from monolith.cli.capacity import Figure, Popularity, RowBytes, ServerCosts, Servers, Wish, make_plan
from monolith.errors import ConfigError
from monolith.table import OPTIMIZERS, NativeTable, Segment, TableConfig, dump
from monolith.table.config import EmbeddingDtype

COSTS = ServerCosts(
    request=1e-3,
    row=100e-9,
    table_row=50e-9,
    cold_row=4e-6,
    save_bytes_per_s=250e6,
    restore_bytes_per_s=500e6,
    disk_reads_per_s=50_000,
    disk_bytes_per_s=2e9,
)


def config(optimizer: str = "adagrad", dim: int = 32, dtype: EmbeddingDtype = "float32") -> TableConfig:
    segment = Segment(dim=dim, optimizer=OPTIMIZERS[optimizer]())
    return TableConfig(name="item", segments=(segment,), embedding_dtype=dtype)


WISH = Wish(
    rows=10**10,
    config=config(),
    examples_per_s=1e6,
    ids_per_example=20,
    batch=5_000,
    zipf=0.0,
    hit_rate=None,
    memory=64 << 30,
    headroom=0.2,
    network=25e9 / 8,
    standbys=0,
    checkpoint_every=600,
    storages=("memory", "tiered"),
)


def bounds(found: Servers) -> dict[str, Figure]:
    return {bound.name: bound for bound in found.bounds}


def each(found: Servers) -> dict[str, float]:
    return {figure.name: figure.value for figure in found.each}


# What a row takes


@pytest.mark.parametrize("dim, dtype", [(32, "float32"), (30, "bfloat16"), (64, "bfloat16")])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "group_adagrad", "dynamic_wd_adagrad"])
def test_a_row_takes_what_a_real_table_takes(
    optimizer: str, dim: int, dtype: EmbeddingDtype, tmp_path: Path
) -> None:
    row = RowBytes.of(config(optimizer, dim, dtype))
    table = NativeTable(config(optimizer, dim, dtype))
    rows = 100_000
    table.assign(torch.randperm(rows * 3)[:rows], torch.ones(rows, dim))
    stats = table.stats()
    assert stats.bytes_rows / rows == pytest.approx(row.stored, rel=0.01)
    assert stats.bytes_total / rows == pytest.approx(row.in_memory, rel=0.06)
    written = dump(table, str(tmp_path / "item")).bytes
    assert written / rows == pytest.approx(row.saved, rel=0.01)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"batch_softmax"}))
def test_every_optimizer_has_its_state(optimizer: str) -> None:
    row = RowBytes.of(config(optimizer, 8))
    assert row.values == 32
    assert row.state == 4 * config(optimizer, 8).state_dim
    assert 0 <= row.padding < 16
    assert row.stored % 16 == 0


def test_the_index_of_a_large_table_takes_the_measured_bytes() -> None:
    table = NativeTable(config("sgd", 1))
    rows = 3_000_000
    for ids in torch.split(
        torch.randperm(rows * 3, generator=torch.Generator().manual_seed(1))[:rows], 50_000
    ):
        table.assign(ids, torch.ones(len(ids), 1))
    assert table.stats().bytes_index / rows == pytest.approx(capacity.INDEX_BYTES, rel=0.07)


# How ids are distributed


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.05, 2.0])
def test_distinct_rows_of_a_step_are_those_of_the_sum_over_all_rows(exponent: float) -> None:
    rows, draws = 200_000, 30_000
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    drawn = 1 - (1 - weights / weights.sum()) ** draws  # the chance that a row is among the draws
    popularity = Popularity(rows, exponent)
    assert popularity.distinct(draws) == pytest.approx(drawn.sum(), rel=0.005)
    for hot in (500, 20_000, rows):
        assert popularity.distinct(draws, hot) == pytest.approx(drawn[:hot].sum(), rel=0.005)


def test_few_rows_are_counted_one_by_one() -> None:
    assert Popularity(1, 1.0).distinct(1000) == pytest.approx(1)
    assert Popularity(10, 0.0).distinct(1) == pytest.approx(1, rel=0.06)
    assert Popularity(10**15, 1.05).distinct(100) < 100


# How many servers


def test_servers_in_memory_are_bound_by_what_each_resource_has() -> None:
    plan = make_plan(WISH, COSTS)
    load = {figure.name: figure.value for figure in plan.load}
    assert load["steps"] == 200
    assert load["rows of a step"] == pytest.approx(100_000, rel=0.001)  # uniform: hardly one twice
    found, memory = bounds(plan.servers[0]), plan.servers[0]
    assert found["memory"].value == 52  # 1e10 x 285 / (0.8 x 64 x 2^30) = 51.8
    assert found["processor"].value == 4  # 2e7 x 100 ns / (0.8 - 200 x 1 ms) = 3.3
    assert found["network"].value == 2  # 2e7 x 144 / (0.8 x 3.125e9) = 1.15
    assert found["checkpoints"].value == 5  # 1e10 x 268 / (4 x 250e6) / 600 = 4.5
    assert (memory.servers, memory.processes, memory.binding) == (52, 52, "memory")
    one = each(memory)
    assert one["rows"] == pytest.approx(1e10 / 52)
    assert one["memory for rows"] == pytest.approx(285e10 / 52)
    assert one["core"] == pytest.approx(0.2 + 2e7 / 52 * 100e-9, rel=0.001)
    assert one["a checkpoint"] == 268e10
    assert one["is saved in"] == pytest.approx(268e10 / 52 / 1e9)
    assert one["is restored in"] == pytest.approx(268e10 / 52 / 2e9)


def test_every_figure_says_how_with_numbers() -> None:
    found = bounds(make_plan(WISH, COSTS).servers[0])
    assert found["memory"].how == "1e10 rows x 285 B = 2.85 TB; / (0.8 x 64 GiB)"
    assert found["processor"].how == (
        "20 M rows/s x 100 ns = 2 cores; / (0.8 - 200 steps/s x 1 ms = 0.2 of a core)"
    )
    assert found["checkpoints"].how == "2.68 TB / (4 threads x 250 MB/s) = 44.7 min of one server; / 10 min"


def test_formulas_compute_the_number_that_is_shown() -> None:
    """The formula of servers by memory, read as arithmetic."""
    how = bounds(make_plan(WISH, COSTS).servers[0])["memory"].how
    match = re.fullmatch(r"(\S+) rows x (\d+) B = .*; / \(([\d.]+) x (\d+) GiB\)", how)
    assert match is not None
    rows, row, use, memory = map(float, match.groups())
    assert -(-rows * row // (use * memory * 2**30)) == 52


def test_tiered_servers_are_bound_by_the_disk() -> None:
    tiered = make_plan(WISH, COSTS).servers[1]
    found, one = bounds(tiered), each(tiered)
    assert tiered.binding in ("disk reads", "processor, rows in files")
    assert found["memory"].value == 4  # an index of 97 GB, in half of 51.2 GiB
    assert tiered.servers > 50  # uniform ids: nearly all rows must be hot
    assert 0.8 < one["found in memory"] <= 1
    assert one["disk reads"] <= 0.8 * COSTS.disk_reads_per_s
    assert one["disk writes"] <= 0.8 * COSTS.disk_bytes_per_s


def test_a_checkpoint_of_tiered_tables_writes_hot_rows_and_links_to_the_files_of_all_others() -> None:
    found = make_plan(replace(WISH, zipf=1.1, rows=1e11), COSTS).servers[1]
    one, files = each(found), each(found)["files"]
    hot, rows = one["rows in memory"], one["rows"]
    assert rows > 4 * hot
    heads = 2 * (rows - hot) * 16  # files have as many dead rows
    assert one["is saved in"] == pytest.approx(hot * 268 / 1e9 + heads / COSTS.disk_bytes_per_s)
    assert one["is saved in"] < rows * 268 / 1e9 / 3
    assert one["is restored in"] == pytest.approx(
        hot * 268 / min(2e9, COSTS.disk_bytes_per_s) + heads / COSTS.disk_bytes_per_s
    )
    assert one["a checkpoint"] == pytest.approx(found.servers * (hot * 268 + files), rel=1e-6)
    often = make_plan(replace(WISH, zipf=1.1, rows=1e11, checkpoint_every=30), COSTS).servers[1]
    assert bounds(often)["checkpoints"].value > bounds(found)["checkpoints"].value
    how = bounds(found)["checkpoints"].how
    assert re.fullmatch(
        r".* / .* \+ .* of directories / .*/s = .* of (one server|each of \d+ servers); within 10 min", how
    )


def test_uneven_ids_need_fewer_tiered_servers() -> None:
    counts = [make_plan(replace(WISH, zipf=zipf), COSTS).servers[1].servers for zipf in (0.0, 0.8, 1.1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2 * counts[-1]


def test_a_hit_rate_that_was_seen_takes_the_place_of_the_computed_one() -> None:
    found = make_plan(replace(WISH, hit_rate=0.99), COSTS).servers[1]
    # Of 100 lookups and updates, which are those of 50 rows, one read a file: 2 % of 20 M rows/s. Each disk
    # has 40,000 reads/s to spare.
    assert bounds(found)["disk reads"].value == 10
    assert each(found)["found in memory"] == pytest.approx(0.98)


def test_tables_that_fit_need_no_disk() -> None:
    tiered = make_plan(replace(WISH, rows=10**7), COSTS).servers[1]
    assert each(tiered)["found in memory"] == 1
    assert each(tiered)["files"] == 0
    assert bounds(tiered)["disk reads"].value == 1


def test_standbys_are_more_processes_and_not_more_shards() -> None:
    (memory, _) = make_plan(replace(WISH, standbys=2), COSTS).servers
    assert (memory.servers, memory.processes) == (52, 156)


def test_requests_that_take_a_whole_core_are_refused_with_a_batch_that_is_enough() -> None:
    wish = replace(WISH, batch=1000)
    with pytest.raises(
        ConfigError, match=r"1,000 steps/s x 1 ms = 1 of a core.* With --batch 2500 "
    ) as caught:
        make_plan(wish, COSTS)
    batch = re.search(r"--batch (\d+)", str(caught.value))
    assert batch is not None
    make_plan(replace(wish, batch=int(batch[1])), COSTS)


def test_a_table_in_memory_has_at_most_two_to_the_32_rows() -> None:
    wish = replace(WISH, config=config("sgd", 1), memory=4 << 40)
    found = bounds(make_plan(wish, COSTS).servers[0])
    assert found["memory"].value == 3
    assert "2^32" in found["memory"].how


@pytest.mark.parametrize(
    "more",
    [
        replace(WISH, rows=10**11),
        replace(WISH, examples_per_s=3e6),
        replace(WISH, ids_per_example=200),
        replace(WISH, config=config(dim=256)),
        replace(WISH, headroom=0.5),
        replace(WISH, memory=16 << 30),
    ],
)
def test_more_work_or_smaller_servers_never_need_fewer(more: Wish) -> None:
    for before, after in zip(make_plan(WISH, COSTS).servers, make_plan(more, COSTS).servers, strict=True):
        assert after.servers >= before.servers


# Numbers for people


@pytest.mark.parametrize(
    "value, text",
    [
        (0.5, "0.5"),
        (488.28, "488"),
        (999_499, "999,499"),
        (11.9e6, "11.9 M"),
        (1e10, "1e10"),
        (1.25e9, "1.25e9"),
    ],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert capacity.count(value) == text


@pytest.mark.parametrize(
    "value, text", [(268, "268 B"), (2.85e12, "2.85 TB"), (999.9e6, "1 GB"), (1.57e17, "157 PB")]
)
def test_sizes_are_short(value: float, text: str) -> None:
    assert capacity.size(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (172e-9, "172 ns"),
        (1.198e-3, "1.2 ms"),
        (90, "90 s"),
        (600, "10 min"),
        (7200, "2 h"),
        (86400 * 3, "3 days"),
    ],
)
def test_spans_are_short(seconds: float, text: str) -> None:
    assert capacity.span(seconds) == text
