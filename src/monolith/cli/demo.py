"""`monolith demo`: a DeepFM learns a click log while one looks on.

Every example is predicted before it is trained on, so the AUC shown is one on data the
model has not seen. The log is made up, and says itself how well one can do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.cli.commands import DemoOptions
from monolith.cli.doctor import size
from monolith.cli.tour import bars, facts, spark
from monolith.data import ClickLog, ClickLogConfig
from monolith.errors import ConfigError
from monolith.feature import Batch, Mean
from monolith.model import DeepFM, EmbeddingOptimizer, Feature
from monolith.nn import auc
from monolith.tensors import prefetch

LINES = 10
"""Lines that are drawn in the course of a demo."""
TEST = 50_000
"""Examples that are never trained on, to measure the end."""
FAR = 1 << 40
"""Where they begin: further than any demo comes."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Window:
    """What happened since the last line."""

    seconds: float
    examples: int
    speed: float
    loss: float
    auc: float
    rows: int
    bytes: int


def run(options: DemoOptions) -> int:
    """Train for as long as asked; return 0 if the model is better than chance."""
    for name in ("seconds", "users", "items", "dim", "batch"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"demo: --{name} must be above 0, got {getattr(options, name)}")
    console = Console()
    log = ClickLog(ClickLogConfig(users=options.users, items=options.items, seed=options.seed))
    model = DeepFM(
        ["user", "item", "context", Feature(name="history", shares="item", combiner=Mean())],
        dim=options.dim,
        seed=options.seed,
    )
    best = log.best_auc(TEST, first=FAR)
    console.print(
        f"A DeepFM over {options.users:,} users and {options.items:,} items; the items of a history share "
        f"their rows. Clicks are thrown with known probabilities, whose own AUC is [bold]{best:.3f}[/].\n",
        width=88,
    )
    windows = list(draw(console, train(model, log, options, time.perf_counter)))
    with torch.no_grad():
        test = log.batch(FAR, TEST)
        final = auc(model.eval()(test), test.label)
    console.print(summary(windows, final, best))
    return 0 if final > 0.5 else 1


def train(model: DeepFM, log: ClickLog, options: DemoOptions, clock: Clock) -> Iterator[Window]:
    """Train until the time is up; yield what happened at even times."""
    sparse = EmbeddingOptimizer(model)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    scores: list[Tensor] = []
    labels: list[Tensor] = []
    losses: list[float] = []
    examples = 0
    began = last = clock()
    with prefetch(endless(log, options.batch), capacity=4) as batches:
        for batch in batches:
            logits = model(batch)
            loss = binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            sparse.step()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= len(batch)  # rows learn from sums, weights from means
            dense.step()
            dense.zero_grad()
            scores.append(logits.detach())
            labels.append(batch.label)
            losses.append(loss.item() / len(batch))
            examples += len(batch)
            now = clock()
            done = now - began >= options.seconds
            if done or now - last >= options.seconds / LINES:
                stats = model.embeddings.store.stats().values()
                yield Window(
                    seconds=now - began,
                    examples=examples,
                    speed=sum(map(len, labels)) / (now - last),
                    loss=sum(losses) / len(losses),
                    auc=auc(torch.cat(scores), torch.cat(labels)),
                    rows=sum(table.rows for table in stats),
                    bytes=sum(table.bytes_total for table in stats),
                )
                scores, labels, losses, last = [], [], [], now
            if done:
                return


def endless(log: ClickLog, batch_size: int) -> Iterator[Batch]:
    """Yield the log from its beginning on."""
    for stretch in itertools.count():
        yield from log.batches(256, batch_size, first=stretch * 256 * batch_size)


def draw(console: Console, windows: Iterator[Window]) -> Iterator[Window]:
    """Draw each window as it comes: a table that grows on a terminal, lines in a log."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("time", "examples", "examples/s", "loss", "AUC before training", "rows", "memory"):
        table.add_column(heading, justify="right")
    if not console.is_terminal:
        for window in windows:
            console.print("  ".join(cells(window, words=True)), highlight=False, soft_wrap=True)
            yield window
        return
    with Live(table, console=console, auto_refresh=False) as live:
        for window in windows:
            table.add_row(*cells(window, words=False))
            live.update(table, refresh=True)
            yield window


def cells(window: Window, *, words: bool) -> list[str]:
    """Return the numbers of a window; with their names where no heading has them."""
    named = {
        "": f"{window.seconds:4.1f} s",
        "examples": f"{window.examples:,}",
        "examples/s": f"{window.speed:,.0f}",
        "loss": f"{window.loss:.4f}",
        "AUC": f"{window.auc:.4f}",
        "rows": f"{window.rows:,}",
        "memory": size(window.bytes),
    }
    return [f"{name} {text}".strip() for name, text in named.items()] if words else list(named.values())


def summary(windows: list[Window], final: float, best: float) -> Panel:
    last = windows[-1]
    curve = spark([window.auc for window in windows])
    lines = {
        "learned from": f"{last.examples:,} examples in {last.seconds:.0f} s, "
        f"{last.examples / last.seconds:,.0f} a second",
        "AUC on the way": f"{windows[0].auc:.3f} {curve} {last.auc:.3f}",
        "AUC at the end": f"[bold]{final:.3f}[/] on {TEST:,} examples that come later; chance is 0.5, "
        f"the probabilities themselves have {best:.3f}",
        "rows": f"{last.rows:,} in {size(last.bytes)}, made as their ids were met",
    }
    grid = Table.grid()
    grid.add_row(facts(lines))
    grid.add_row("")
    shares = {"learned": round(1000 * (final - 0.5)), "all there is": round(1000 * (best - 0.5))}
    grid.add_row(bars(shares, lambda points: f"{points / 1000:.3f} above chance"))
    return Panel(grid, title="[bold cyan]DeepFM[/]", title_align="left", padding=(0, 2), width=88)
