"""`monolith demo tour`: a short tour of the table, with sizes and speeds of this machine.

Every stop does for real what it tells of, and checks it: a tour that ends well
has shown that rows come back from disk bit by bit.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table as Grid
from torch import Tensor, nn

from monolith import filesystem, native
from monolith.cli.doctor import size
from monolith.errors import ConfigError, CorruptFileError
from monolith.observe import progress
from monolith.table import (
    Adagrad,
    Expiry,
    NativeTable,
    RandomUniform,
    Rows,
    Segment,
    Sgd,
    SlidingFilter,
    SlotThresholds,
    TableConfig,
    dump,
    iterate,
    load,
)
from monolith_bench.ids import id_of, zipf
from monolith_bench.options import TourOptions
from monolith_bench.report import cores

BATCH = 65536
NOW = 1_700_000_000
DAY = 86_400
STEPS = 25
THRESHOLD = 3
FILES, SHARDS = 4, 3
"""Files a table is saved into, and shards it is restored to: any number goes into any other."""


def run(options: TourOptions) -> int:
    """Take the tour; return 0 if every stop did what it says."""
    if options.rows < 1 or options.dim < 1:
        raise ConfigError(f"tour: --rows and --dim must be at least 1, got {options.rows} and {options.dim}")
    began = time.perf_counter()
    tour = Tour(options, Console(), native.Workers(cores()))
    table, ids = insert(tour)
    look_up(tour, table, ids)
    train(tour, table, ids)
    admit(tour)
    expire(tour)
    with tempfile.TemporaryDirectory(prefix="monolith-tour-") as folder:
        saved = save(tour, table, folder)
        good = refuse_damage(tour, saved) and restore(tour, table, saved)
    table.close()
    elapsed = time.perf_counter() - began
    outcome = "[green]All as expected[/]" if good else "[bold red]Not as expected[/]"
    tour.console.print(f"{outcome}, in {elapsed:.1f} s. The folder the tour worked in is gone.")
    return 0 if good else 1


@dataclass(frozen=True, slots=True)
class Tour:
    """What every stop needs: the options, a place to draw, threads to work with."""

    options: TourOptions
    console: Console
    workers: native.Workers

    def stop(self, title: str, shows: str, *drawings: RenderableType) -> None:
        """Draw one stop: its name, what it shows in one line, and the finds."""
        body = Group(f"[italic]{shows}[/]", "", *drawings)
        self.console.print(
            Panel(
                body,
                title=f"[bold cyan]{title}[/]",
                title_align="left",
                padding=(0, 2),
                width=min(self.console.width, 88),
            )
        )

    def new_table(self, name: str, *, admission: SlidingFilter | None = None) -> NativeTable:
        segment = Segment(
            dim=self.options.dim, optimizer=Adagrad(learning_rate=0.1), initializer=RandomUniform()
        )
        config = TableConfig(name=name, segments=(segment,), seed=self.options.seed)
        return NativeTable(config, admission=admission, workers=self.workers)


# The stops


def insert(tour: Tour) -> tuple[NativeTable, Tensor]:
    table = tour.new_table("item")
    ids = id_of(np.arange(tour.options.rows))
    zeros = torch.zeros(BATCH, table.dim)
    began = time.perf_counter()
    with progress("Inserting", total=len(ids), unit="rows") as bar:
        for batch in torch.split(ids, BATCH):
            table.assign_add(batch, zeros[: len(batch)], event_time=NOW)
            bar.advance(len(batch))
    elapsed = time.perf_counter() - began
    stats = table.stats()
    raw = len(table) * (table.dim + table.state_dim) * 4
    tour.stop(
        "Insert",
        "An empty table grows: one id, one row. Ids are any int64.",
        facts(
            {
                "rows": f"{len(table):,}, of {table.dim} floats and {table.state_dim} of Adagrad state",
                "speed": per_second(len(ids), elapsed),
                "memory": f"{size(stats.bytes_total)}, {stats.bytes_total / len(table):.0f} bytes a row",
            }
        ),
        "",
        bars({"rows": raw, "all the rest": stats.bytes_total - raw}, size),
    )
    return table, ids


def look_up(tour: Tour, table: NativeTable, ids: Tensor) -> None:
    order = np.random.default_rng(tour.options.seed).integers(0, len(ids), (16, min(BATCH, len(ids))))
    batches = [ids[torch.from_numpy(batch)] for batch in order]
    out = torch.empty(len(batches[0]), table.dim)
    table.lookup(batches[0], out)
    elapsed = best_seconds(lambda: [table.lookup(batch, out) for batch in batches])
    stranger = id_of(np.array([len(ids)]))
    absent = table.lookup(stranger)
    tour.stop(
        "Look up",
        "Rows are found by id. An id without a row reads as zeros and gets none.",
        facts(
            {
                "speed": f"{per_second(order.size, elapsed)} at random, threads: {tour.workers.threads}",
                f"id {ids[-1]}": vector(table.lookup(ids[-1:])[0]),
                f"id {stranger[0]}": f"{vector(absent[0])}  never seen",
            }
        ),
    )


def train(tour: Tour, table: NativeTable, ids: Tensor) -> None:
    """Learn a bit of each id that only its own embedding can hold."""
    some = ids[: min(50_000, len(ids))]
    liked = torch.from_numpy(np.random.default_rng(tour.options.seed).random(len(some)) < 0.5).float()
    watched = some[-1:]
    before = table.lookup(watched)[0]
    losses: list[float] = []
    began = time.perf_counter()
    for step in range(STEPS):
        embeddings = table.lookup(some).requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(embeddings.sum(1), liked)
        loss.backward()  # type: ignore[no-untyped-call]
        assert embeddings.grad is not None
        gradients = embeddings.grad * len(some)  # a row is in one example only: by the mean it would not move
        table.apply_gradients(some, gradients, step=step, event_time=NOW + step)
        losses.append(loss.item())
    elapsed = time.perf_counter() - began
    tour.stop(
        "Train",
        "Torch computes gradients of a toy task; the table takes the steps.",
        facts(
            {
                "task": f"was an id liked? a coin said so for each of {len(some):,}",
                "loss": f"{losses[0]:.3f} {spark(losses)} {losses[-1]:.3f} in {STEPS} steps",
                "speed": f"{per_second(STEPS * len(some), elapsed)}, torch's part of the work included",
                f"id {watched[0]}": f"{vector(before)}  before",
                "": f"{vector(table.lookup(watched)[0])}  {'liked' if liked[-1] else 'not liked'}",
            }
        ),
    )


def admit(tour: Tour) -> None:
    sightings = min(tour.options.rows, 500_000)
    stream = id_of(zipf(sightings, sightings, np.random.default_rng(tour.options.seed)))
    admission = SlidingFilter(capacity=max(2 * sightings, 1000), thresholds=SlotThresholds(THRESHOLD))
    table = tour.new_table("word", admission=admission)
    for batch in torch.split(stream, BATCH):
        table.apply_gradients(batch, torch.ones(len(batch), table.dim), event_time=NOW)
    stats = table.stats()
    distinct = len(np.unique(stream.numpy()))
    named, frequent = stats.rows / distinct, int(table.contains(stream).sum()) / sightings
    table.close()
    tour.stop(
        "Admit",
        f"Most ids hardly ever come. Only one seen {THRESHOLD} times before gets a row.",
        facts(
            {
                "stream": f"{sightings:,} sightings of {distinct:,} ids, Zipf-distributed",
                "turned away": f"{stats.filtered:,} sightings, all of them counted",
                "given a row": f"{named:.0%} of the ids, which make up {frequent:.0%} of the sightings",
            }
        ),
        "",
        bars({"rows without a filter": distinct, "rows with it": stats.rows}, "{:,}".format),
    )


def expire(tour: Tour) -> None:
    slots = {"news": (1, 2), "users": (2, 30)}
    count = min(tour.options.rows, 300_000) // len(slots) or 1
    lifetimes = {slot: timedelta(days=days) for slot, days in slots.values()}
    config = TableConfig(
        name="mixed",
        segments=(Segment(dim=tour.options.dim, optimizer=Sgd()),),
        expiry=Expiry(per_slot=lifetimes),
    )
    table = NativeTable(config, workers=tour.workers)
    ids = {name: torch.arange(count) + (slot << 48) for name, (slot, _) in slots.items()}
    ages = torch.arange(count) * (10 * DAY) // count
    for slot_ids in ids.values():
        table.assign(slot_ids, torch.zeros(count, table.dim), event_time=NOW - ages)
    began = time.perf_counter()
    gone = table.evict(NOW)
    elapsed = time.perf_counter() - began
    left = {name: int(table.contains(slot_ids).sum()) for name, slot_ids in ids.items()}
    stats = table.stats()
    table.close()
    tour.stop(
        "Expire",
        "Rows that no event has updated for as long as their slot allows go.",
        facts(
            {
                "rows": f"{2 * count:,}, last updated evenly over 10 days",
                "evicted": f"{gone:,} in {elapsed * 1e3:.0f} ms; {stats.rows:,} are left",
            }
        ),
        "",
        bars(
            {f"{name}, kept {days} days": left[name] for name, (_, days) in slots.items()},
            "{:,}".format,
            whole=count,
        ),
    )


def save(tour: Tour, table: NativeTable, folder: str) -> str:
    basename = filesystem.join(folder, "saved", "item")
    began = time.perf_counter()
    report = dump(table, basename, num_shards=FILES)
    elapsed = time.perf_counter() - began
    tour.stop(
        "Save",
        "Embeddings, optimizer state, event times: every byte under a checksum.",
        facts(
            {
                "files": f"{len(report.files)}, and a manifest that is put in place last",
                "size": f"{size(report.bytes)}, {report.bytes / report.rows:.0f} bytes a row",
                "speed": f"{per_second(report.rows, elapsed)}, {size(int(report.bytes / elapsed))}/s",
            }
        ),
    )
    return basename


def refuse_damage(tour: Tour, saved: str) -> bool:
    copy = filesystem.join(filesystem.parent(filesystem.parent(saved)), "damaged")
    filesystem.copy_tree(filesystem.parent(saved), copy)
    victim = max(Path(copy).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    place = len(content) // 2
    content[place] ^= 1
    victim.write_bytes(content)
    table = tour.new_table("item")
    found = "nothing: it was loaded"
    refused = False
    try:
        load(table, filesystem.join(copy, filesystem.base_name(saved)))
    except CorruptFileError as error:
        found = f"corrupt at byte {error.offset:,}: {error.reason}"
        refused = error.path == str(victim)
    tour.stop(
        "Refuse damage",
        "One bit of a copy is flipped: loading refuses it and says where.",
        facts(
            {
                "file": escape(victim.name),
                "flipped": f"bit 0 of byte {place:,} of {len(content):,}",
                "found": f"{escape(found)}; the table is {'empty' if len(table) == 0 else 'changed'}",
            }
        ),
    )
    table.close()
    return refused


def restore(tour: Tour, table: NativeTable, saved: str) -> bool:
    shards = [tour.new_table("item") for _ in range(SHARDS)]
    began = time.perf_counter()
    rows = [load(shard, saved, keep=(number, SHARDS)).rows for number, shard in enumerate(shards)]
    elapsed = time.perf_counter() - began
    same = sum(map(len, shards)) == len(table) and all(
        equal_rows(table, chunk) for shard in shards for chunk in iterate(shard)
    )
    tour.stop(
        "Restore",
        f"{FILES} files go into {SHARDS} tables, each of which keeps the ids that are its own.",
        facts(
            {
                "speed": f"{per_second(sum(rows), elapsed)}, all checksums first",
                "equal": "[green]every bit of every row[/]" if same else "[bold red]no[/]",
            }
        ),
        "",
        bars({f"shard {number}": count for number, count in enumerate(rows)}, "{:,}".format),
    )
    for shard in shards:
        shard.close()
    return same


def equal_rows(table: NativeTable, rows: Rows) -> bool:
    """Whether the table has these rows, bit by bit: NaN equals itself, 0 is not -0."""
    found, mine = table.lookup_rows(rows.ids)
    pairs = ((mine.values, rows.values), (mine.state, rows.state))
    return (
        bool(found.all())
        and torch.equal(mine.event_times, rows.event_times)
        and all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
    )


# How it is drawn


def facts(lines: Mapping[str, str]) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in lines.items():
        grid.add_row(name, text)
    return grid


def bars(amounts: Mapping[str, int], show: Callable[[int], str], *, whole: int | None = None) -> Grid:
    """Draw amounts side by side; full width is `whole`, or the greatest of them."""
    full = max(whole or 0, *amounts.values(), 1)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for name, amount in amounts.items():
        filled = round(32 * amount / full)
        drawn = f"[cyan]{'█' * filled}[/][dim]{'░' * (32 - filled)}[/]"
        grid.add_row(f"[dim]{name}[/]", drawn, show(amount))
    return grid


def spark(values: Iterable[float]) -> str:
    """Draw a curve in one line of text."""
    points = list(values)
    low, high = min(points), max(points)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (point - low) / ((high - low) or 1))] for point in points)


def vector(values: Tensor) -> str:
    """Show the head of an embedding."""
    return " ".join(f"{value:+.3f}" for value in values[:4].tolist()) + (" …" if len(values) > 4 else "")


def per_second(rows: int, seconds: float) -> str:
    return f"{rows / seconds / 1e6:.1f} M rows/s"


def best_seconds(work: Callable[[], object], tries: int = 3) -> float:
    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return min(once() for _ in range(tries))
