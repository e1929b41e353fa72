"""A trainer that is killed and started again ends as if it had not been: every record trained once."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.trainers import MakeJob, Trainers, Uninterrupted, check_done, check_listed

KILLS = 3
"""For each way to train, or as many as it takes to hit each kind of moment. `make soak` has 200."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"prefetch": 0, "max_to_keep": 1},
    "ahead": {"prefetch": 2, "max_to_keep": 3, "save_every": 3},
    "increments": {"prefetch": 1, "max_to_keep": 2, "full_every": 3},
    "long chains": {"prefetch": 0, "max_to_keep": 1, "full_every": 7},
    # Longer, since many steps are taken while one is saved.
    "beside": {"prefetch": 1, "max_to_keep": 1, "full_every": 2, "asynchronous": True, "batches": 120},
    "a queue of files": {"prefetch": 1, "max_to_keep": 2, "save_every": 5, "reads": "queue"},
    "a queue, saved beside": {"max_to_keep": 1, "asynchronous": True, "batches": 120, "reads": "queue"},
    "joined streams": {"prefetch": 1, "max_to_keep": 2, "save_every": 7, "reads": "joined"},
}
QUICK = ("ahead", "beside", "joined streams")
"""Those that `make test` has."""
LATEST = {"restore": 70, "save": 250, "delete": 30, "step": 8}
"""How many events of a kind pass at most before a kill at one of them."""
PATIENCE = 1.0
"""Seconds that pass at most before any other kill."""


@pytest.mark.parametrize("way", QUICK)
def test_every_record_is_trained_once_whenever_the_trainer_is_killed(
    way: str, trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    kill_again_and_again(trainers, make, uninterrupted, WAYS[way], kills=KILLS, rng=random.Random(way))


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_every_record_is_trained_once_however_often_the_trainer_is_killed(
    way: str, trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    rng = random.Random(f"soak {way}")
    kill_again_and_again(trainers, make, uninterrupted, WAYS[way], kills=200, rng=rng)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["restore", "save", "delete"])
def test_there_is_no_call_at_which_a_kill_does_harm(
    kind: str, trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    how = {"batches": 10, "max_to_keep": 2, "full_every": 3}
    began = make(**{**how, "batches": 6})
    assert trainers.run(began) == 0
    number = 0
    while True:
        number += 1
        job = make(**how)
        shutil.copytree(began.model_dir, job.model_dir)
        shutil.copy(Path(began.notes) / "log", job.notes)
        status = trainers.run(replace(job, strike=(signal.SIGKILL, kind, number)))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert trainers.run(job) == 0
        check_done(job, trainers, uninterrupted(job))
        shutil.rmtree(job.notes)
    assert number > 20


def kill_again_and_again(
    trainers: Trainers,
    make: MakeJob,
    uninterrupted: Uninterrupted,
    way: dict[str, Any],
    *,
    kills: int,
    rng: random.Random,
) -> None:
    """Train to the end, as often as it takes to kill trainers so many times, at each kind of moment."""
    kinds = [*LATEST, "time"]
    deck: list[str] = []
    killed: Counter[str] = Counter()
    runs = 0
    while killed.total() < kills or killed.keys() < set(kinds):
        job = make(**way)
        while True:
            runs += 1
            assert runs < 10 * kills, f"some kind of moment is never hit: {killed}"
            missing = [kind for kind in kinds if kind not in killed]
            if killed.total() < kills:
                deck = deck or rng.sample(kinds, len(kinds))
                kind = deck.pop()
            else:
                kind = missing[0] if missing else "none"
            if kind == "none":
                status = trainers.run(job)
                assert status == 0
            elif kind == "time":
                status = trainers.run(job, patience=rng.uniform(0, PATIENCE))
            else:
                strike = signal.SIGKILL, kind, rng.randint(1, LATEST[kind])
                status = trainers.run(replace(job, strike=strike))
            assert status in (0, -signal.SIGKILL)
            check_listed(job.model_dir)
            if status == 0:
                break
            killed[kind] += 1
        check_done(job, trainers, uninterrupted(job))
        shutil.rmtree(job.notes)
