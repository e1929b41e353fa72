"""Seeds that once broke a rule: each led to a mend."""

from __future__ import annotations

import importlib

import pytest
import torch

FOUND = [
    (
        "data_service",
        2,
        "the dispatcher told trainers turns that were not synced to its disk and lost them with its power",
    ),
    (
        "publishing",
        658,
        "one lost answer of a Kafka broker stopped the deletion of old messages for good",
    ),
    (
        "ranks",
        38,
        "a replaced rank that came back and its replacement ended each other's attempts without end",
    ),
    (
        "fleet_kafka",
        1005,
        "a restarted run of one worker was given half of the partitions by its group, and took that for all",
    ),
    (
        "together",
        1009,
        "a split counted as finished though its last chunk was lost with the dispatcher's power",
    ),
    (
        "together",
        2767,
        "a worker's earlier attempt, cut off when the run restarted, took chunks that the run did not train",
    ),
    (
        "checkpoints",
        10084,
        "a kill while the best checkpoint was named left a temporary file for good",
    ),
    (
        "keep_going",
        2529,
        "a worker that joined and ended while the chief was cut off was not counted when server 0 was lost",
    ),
    (
        "keep_going",
        7118,
        "a worker that had ended was lost, then server 0, and the worker trained all of its data again",
    ),
    (
        "elastic",
        3180,
        "a thread of a failed attempt took a file, which the next attempt took for one that it had read",
    ),
    (
        "together",
        5001,
        "a worker without retries left joined its servers again and again, and never ended",
    ),
    (
        "fleet",
        7029,
        "a restarted chief waited for a worker that the earlier chief had told that the run is over",
    ),
    (
        "fleet",
        7058,
        "one broken connection made a chief choose its servers anew, one of which held another share",
    ),
    (
        "asking",
        64,
        "a client's first request was refused, because a version came after the description of its inputs",
    ),
    (
        "asking",
        156,
        "a batch with a bad row was computed again for a request that was refused for its deadline",
    ),
    (
        "asking",
        232,
        "an answer that was on its way for long was taken for as fresh as when it was made",
    ),
    (
        "keep_going",
        169,
        "a worker that was replaced took its place back, because a new server 0 did not know it",
    ),
]


@pytest.mark.parametrize(("world", "seed", "what"), FOUND)
def test_a_seed_that_found_a_defect_passes(world: str, seed: int, what: str) -> None:  # noqa: ARG001
    torch.set_num_threads(1)
    getattr(importlib.import_module(f"simulation.{world}"), world)(seed)
