"""A served `SequenceRanker`, made up, and how its cache of encoded histories does under live weights.

Its histories are as long as a case asks for, up to 1,000 steps of 10,000 items. It has learned nothing: the
row of each ID is that of one training step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith.data import MemorySource, Pipeline, Stream
from monolith.feature import Batch, FeatureSpec, HistoryFeature, IdFeature, Label
from monolith.model import SequenceRanker
from monolith.observe.metrics import Metrics
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export, task_exporter
from monolith.serve import Predictor
from monolith.serve.config import ServeFollowConfig
from monolith.serve.follower import ModelFollower
from monolith.serve.histories import HistoryCache
from monolith.serve.manifest import read_servable
from monolith.serve.metrics import HistoryMetrics
from monolith.sync.channel import MemoryChannel
from monolith.sync.messages import LearnedUpTo
from monolith.sync.publisher import Publisher, PublisherConfig
from monolith.table import FrozenTable, NativeTable, Segment, TableConfig
from monolith.train import Mode, SaveConfig, Task, TrainConfig
from monolith.wire.open_inference import SPLITS
from monolith_bench.options import BenchServeOptions
from monolith_bench.report import Report

NAME = "ranked"
LONGEST = 1_000
ITEMS = 10_000
NOW = 1_700_000_000
USERS = 200
"""Users of the live part. The n-th asks as often as a 1/n-th of the first."""
CACHE_BYTES = 256 << 20
CHANGED_ROWS = 1_000
SPEC = FeatureSpec(
    features={
        "user": IdFeature(),
        "item": IdFeature(),
        "history": HistoryFeature(of="item", max=LONGEST, with_=("time",)),
    },
    labels={"click": Label()},
    event_time="time",
)

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RankedClicks(Task):
    """Trains on each item once."""

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        users = ITEMS // LONGEST
        steps = np.arange(ITEMS).reshape(users, LONGEST).tolist()
        times = [list(range(NOW - LONGEST, NOW))] * users
        columns = {
            "user": list(range(users)),
            "item": list(range(users)),
            "history": steps,
            "history.time": times,
            "time": [NOW] * users,
            "click": [float(user % 2) for user in range(users)],
        }
        return Pipeline(MemorySource(columns, batch_size=users)).to_batches(SPEC)

    def model(self) -> nn.Module:
        return SequenceRanker(SPEC, threads=1)


def write_ranked(root: Path) -> None:
    """Write the one version of the model."""
    task = RankedClicks()
    config = TrainConfig(model_dir=f"{root}-run", steps=1, save=SaveConfig(), summary_every_steps=None)
    made = Trainer(task, config).train()
    assert made.checkpoint is not None
    with task_exporter(task, config, how_to_export(ExportConfig(), config), warm_up=False) as exporter:
        exporter.export(made.checkpoint, str(root))


def ranking_of(user: int, steps: int, items: int) -> dict[str, NDArray[np.int64]]:
    """Return the columns of a request: a user with a history of so many steps, and so many items."""
    random = np.random.default_rng(user)
    return {
        "user": np.array([user]),
        "time": np.array([NOW]),
        "history": random.integers(0, ITEMS, steps),
        "history" + SPLITS: np.array([0, steps]),
        "history.time": NOW - 1 - np.sort(random.integers(0, 10**7, steps))[::-1],
        "history.time" + SPLITS: np.array([0, steps]),
        "item": random.integers(0, ITEMS, items),
    }


def in_full_rows(columns: Columns) -> dict[str, NDArray[np.int64]]:
    """Return the same request with a row of the user for each item."""
    items, steps = len(columns["item"]), len(columns["history"])
    splits = np.arange(items + 1) * steps
    repeated = {name: np.tile(values, items) for name, values in columns.items() if name != "item"}
    return {
        **repeated,
        "item": columns["item"],
        **{name: splits for name in columns if name.endswith(SPLITS)},
    }


# Live


def measure_live(report: Report, root: Path, options: BenchServeOptions) -> None:
    """Ask for items of users while a trainer publishes rows and weights, with the cache and without it.

    An answer of one is compared with that of the other if no delta came between them.
    """
    steps, items = (20, 5) if options.quick else (200, 100)
    for interval in (0.1,) if options.quick else (0.1, 1.0, 10.0):
        metrics = Metrics()
        case = f"{USERS} users, {steps} steps, {items} items, a delta every {interval:g} s"
        report.say(case)
        with followed(root, metrics, interval) as (cached, plain):
            asked = [ranking_of(user, steps, items) for user in range(USERS)]
            drawn = np.random.default_rng(options.seed)
            share = 1 / np.arange(1, USERS + 1)
            users = drawn.choice(USERS, 100_000, p=share / share.sum())
            largest, compared, count = 0.0, 0, 0
            spent = {"cached": 0.0, "encoded": 0.0}
            end = time.monotonic() + max(options.seconds, 2 * interval * (not options.quick))
            while time.monotonic() < end and count < len(users):
                columns = asked[int(users[count])]
                before = state_of(cached, plain)
                found = {}
                for name, one in (("cached", cached), ("encoded", plain)):
                    begun = time.thread_time()
                    found[name] = one.predict(columns).outputs["click"]
                    spent[name] += time.thread_time() - begun
                if before == state_of(cached, plain) and before[0] == before[1]:
                    compared += 1
                    largest = max(largest, float((found["cached"] - found["encoded"]).abs().max()))
                count += 1
        hits, misses = looked_up(metrics)
        report.add(case, "hit_rate", hits / max(hits + misses, 1), "fraction")
        report.add(case, "compared", compared, "answers")
        report.add(case, "largest_difference", largest, "probability")
        plain_ms = spent["encoded"] / count * 1e3
        report.add(f"{case}, no cache", "processor_time", plain_ms, "ms")
        report.compare(
            case, "processor_time", spent["cached"] / count * 1e3, "ms", {f"{case}, no cache": plain_ms}
        )
    report.show("Encoded histories in the cache, while a trainer publishes")


def state_of(*predictors: Predictor) -> list[object]:
    """Return what changes with the weights and rows of some predictors."""
    graphs = [one.histories for one in predictors]
    numbers: list[object] = [one.now.number for one in graphs if one is not None]
    return [*numbers, *(id(one.rows.claim) for one in predictors)]


def looked_up(metrics: Metrics) -> tuple[float, float]:
    """Return how many histories were in the cache, and how many were not."""
    lines = metrics.render().decode().splitlines()
    hits, misses = (
        sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if f'_total{{model="{NAME}",outcome="{one}"}}' in line
        )
        for one in ("hit", "miss")
    )
    return hits, misses


@contextmanager
def followed(root: Path, metrics: Metrics, interval: float) -> Iterator[tuple[Predictor, Predictor]]:
    """Have two predictors follow a trainer that publishes rows and weights; the first has a cache."""
    channel = MemoryChannel()
    (version,) = (one for one in root.iterdir() if one.is_dir() and not one.name.startswith("."))
    servable = read_servable(str(version))
    tables = {name: rows_of(version / about.file, name, about.dim) for name, about in servable.tables.items()}
    with ExitStack() as opened:
        cached, plain = (opened.enter_context(Predictor(str(root), threads=1, show=False)) for _ in range(2))
        histories = cached.histories
        assert histories is not None
        weights = dict(histories.weights)
        cached.keep_histories(HistoryCache(CACHE_BYTES, HistoryMetrics(metrics)), NAME)
        factor = [1.0]

        def dense() -> dict[str, Tensor]:
            return {name: one * factor[0] for name, one in weights.items()}

        step = [10]
        publisher = Publisher(
            tables,
            channel.writer(),
            PublisherConfig(run=servable.run, dense_interval=0.0),
            dense=dense,
            learned=lambda: LearnedUpTo(step=step[0], published_at=time.time()),
        )
        opened.callback(publisher.close)
        publisher.publish_now()
        follower = ModelFollower(
            NAME, channel.reader, ServeFollowConfig(), metrics=Metrics(), go_to=lambda _: None
        )
        opened.callback(follower.close)
        for one in (cached, plain):
            follower.attach(one)
        stop = threading.Event()

        def publish() -> None:
            random = torch.Generator().manual_seed(0)
            while not stop.wait(interval):
                step[0] += 2
                factor[0] *= 1.001
                ids = torch.randperm(ITEMS, generator=random)[:CHANGED_ROWS]
                for table in tables.values():
                    table.assign(ids, torch.rand(len(ids), table.dim, generator=random) * 0.1 - 0.05)
                publisher.publish_now()

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield cached, plain
        finally:
            stop.set()
            thread.join()


def rows_of(file: Path, name: str, dim: int) -> NativeTable:
    """Return a table with the rows of an exported one."""
    table = NativeTable(TableConfig(name=name, segments=(Segment(dim=dim),)))
    frozen = FrozenTable(str(file))
    ids, values = frozen.core.scan(0, (1 << 64) - 1)
    table.assign(torch.from_numpy(ids), torch.from_numpy(values).reshape(-1, dim))
    frozen.close()
    return table
