"""The commands that this package adds to `monolith`: `bench` measures speed, `experiment` quality;
`demo` and `tour` are examples to watch.

`pyproject.toml` names the tables as entry points of the group `monolith.commands`, so the library finds them
without importing this package.
"""

from __future__ import annotations

from monolith.cli.commands import Command
from monolith_bench.options import (
    BenchAttentionOptions,
    BenchCheckpointOptions,
    BenchDataOptions,
    BenchFleetOptions,
    BenchFreshnessOptions,
    BenchPartsOptions,
    BenchRunOptions,
    BenchScaleOptions,
    BenchServedRowsOptions,
    BenchServeOptions,
    BenchStoreOptions,
    BenchStreamOptions,
    BenchSyncOptions,
    BenchTableOptions,
    BenchTiersOptions,
    BenchTrainOptions,
    DemoOptions,
    ExperimentCollisionsOptions,
    ExperimentFreshnessOptions,
    ExperimentOnlineOptions,
    ExperimentQualityOptions,
    ExperimentRetrievalOptions,
    ExperimentSequencesOptions,
    TourOptions,
)

BENCH = {
    "bench table": Command(BenchTableOptions, "monolith_bench.table"),
    "bench tiers": Command(BenchTiersOptions, "monolith_bench.tiers"),
    "bench data": Command(BenchDataOptions, "monolith_bench.data"),
    "bench checkpoint": Command(BenchCheckpointOptions, "monolith_bench.checkpoint"),
    "bench train": Command(BenchTrainOptions, "monolith_bench.train"),
    "bench run": Command(BenchRunOptions, "monolith_bench.run"),
    "bench stream": Command(BenchStreamOptions, "monolith_bench.stream"),
    "bench parts": Command(BenchPartsOptions, "monolith_bench.parts"),
    "bench store": Command(BenchStoreOptions, "monolith_bench.store"),
    "bench fleet": Command(BenchFleetOptions, "monolith_bench.fleet"),
    "bench sync": Command(BenchSyncOptions, "monolith_bench.sync"),
    "bench serve": Command(BenchServeOptions, "monolith_bench.serve"),
    "bench served-rows": Command(BenchServedRowsOptions, "monolith_bench.served_rows"),
    "bench freshness": Command(BenchFreshnessOptions, "monolith_bench.freshness"),
    "bench attention": Command(BenchAttentionOptions, "monolith_bench.attention"),
    "bench scale": Command(BenchScaleOptions, "monolith_bench.scale"),
}

EXPERIMENT = {
    "experiment collisions": Command(ExperimentCollisionsOptions, "monolith_bench.collisions"),
    "experiment intervals": Command(ExperimentFreshnessOptions, "monolith_bench.sync_intervals"),
    "experiment online": Command(ExperimentOnlineOptions, "monolith_bench.online"),
    "experiment quality": Command(ExperimentQualityOptions, "monolith_bench.quality"),
    "experiment retrieval": Command(ExperimentRetrievalOptions, "monolith_bench.retrieval"),
    "experiment sequences": Command(ExperimentSequencesOptions, "monolith_bench.sequences"),
}

EXAMPLES = {
    "demo": Command(DemoOptions, "monolith_bench.examples.demo.command"),
    "demo tour": Command(TourOptions, "monolith_bench.examples.tour"),
}
