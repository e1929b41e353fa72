"""Ranks whose rows are on parameter servers learn what ranks learn that hold them: weights and rows, bit by
bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import SOON, Tallied, TalliedFiles, read_model, run_config, run_fleet, serving
from runtime.rank_data import Steady
from runtime.rank_runs import quiet, train_ranks
from store.fleets import wait_until
from store.ranks import connected

from monolith.cluster import MemoryDiscovery
from monolith.errors import UnavailableError
from monolith.model import UpdateConfig
from monolith.runtime import Trainer, serve_parameters
from monolith.runtime.rank_rows import RowsOnServers
from monolith.store import ServerGroup
from monolith.train import Hook, SaveConfig, StepResult, Task, TrainConfig, TrainingRun
from monolith.train.config import ExpiryConfig, KeepConfig

PLAIN = quiet(TrainConfig(), prefetch=0, async_push=False)
SAVING = quiet(TrainConfig(), save=SaveConfig(steps=3), keep=KeepConfig(full_every=2))


@dataclass(frozen=True)
class Clipped(Steady):
    """Whose rows are changed where the gradients of all ranks come together."""

    def updates(self) -> UpdateConfig:
        return UpdateConfig(multiply_rows_by=1, clip_norm=0.5)


def at(config: TrainConfig, model_dir: Path) -> TrainConfig:
    return replace(config, model_dir=str(model_dir))


CASES: list[Any] = [
    (1, 1, Steady(batches=6), {"prefetch": 0, "async_push": False}),
    pytest.param(*(2, 1, Steady(batches=12), {"prefetch": 0, "async_push": False}), marks=pytest.mark.soak),
    (2, 2, Steady(batches=12, threshold=2), {"prefetch": 1}),
    (3, 2, Steady(batches=12), {"prefetch": 2, "deterministic": True}),
    pytest.param(*(2, 2, Clipped(batches=12), {"prefetch": 0, "async_push": False}), marks=pytest.mark.soak),
    (3, 2, Clipped(batches=12), {"prefetch": 1}),
    (
        2,
        2,
        Steady(expire_after=timedelta(seconds=40)),
        {"prefetch": 1, "expiry": ExpiryConfig(), "evict_every_steps": 4},
    ),
]


@pytest.mark.parametrize(("size", "num_ps", "task", "options"), CASES)
def test_servers_change_nothing_in_what_is_learned(
    size: int, num_ps: int, task: Steady, options: dict[str, Any], tmp_path: Path
) -> None:
    config = replace(SAVING, **options)
    served = train_ranks([task] * size, at(config, tmp_path / "served"), num_ps=num_ps)
    held = train_ranks([task] * size, at(config, tmp_path / "held"))
    assert [one.step for one in served] == [one.step for one in held]
    assert (served[0].examples, served[0].refused) == (held[0].examples, held[0].refused)
    found, wanted = (read_model(task, tmp_path / name) for name in ("served", "held"))
    assert found.weights == wanted.weights
    assert found.rows == wanted.rows
    assert found.tally.keys() == set(range(task.records))


# Checkpoints


Kind = Callable[[Task, TrainConfig], object]
"""Trains a task in one of the ways there are."""


def on_ranks(size: int, num_ps: int = 0) -> Kind:
    return lambda task, config: train_ranks([task] * size, config, num_ps=num_ps)


def alone(task: Task, config: TrainConfig) -> object:
    return Trainer(task, config).train()


def on_a_fleet(task: Task, config: TrainConfig) -> object:
    return run_fleet(task, config.model_dir, max_steps=config.max_steps).chief


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (on_ranks(2, 1), on_ranks(3)),
        (on_ranks(3, 2), on_a_fleet),
        (alone, on_ranks(2, 2)),
        (on_a_fleet, on_ranks(2, 3)),
    ],
)
def test_a_checkpoint_resumes_anywhere_and_comes_from_anywhere(
    first: Kind, second: Kind, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    task = TalliedFiles(batches=15, folder=str(tmp_path / "data"))
    model_dir = tmp_path / "model"
    first(task, replace(SAVING, model_dir=str(model_dir), max_steps=2))
    assert 0 < sum(read_model(task, model_dir).tally.values()) < task.records
    second(task, at(SAVING, model_dir))
    alone(task, at(SAVING, model_dir))  # what ranks left of a step, for which one had no batch
    assert read_model(task, model_dir).tally == dict.fromkeys(range(task.records), 1.0)


# Who is lost


class At(Hook):
    """Does something once, at a step."""

    def __init__(self, step: int, do: Callable[[], object]) -> None:
        self._step, self._do = step, do

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if run.step == self._step:
            self._do()


def fail() -> None:
    raise RuntimeError("this rank has had enough")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_lost_one_begin_again_on_the_same_servers(rank: int, tmp_path: Path) -> None:
    task, config = Steady(batches=12), at(SAVING, tmp_path)
    with serving(task, num_ps=2, num_workers=2, config=config, holds_weights=False) as servers:
        with pytest.raises((RuntimeError, UnavailableError)):
            train_ranks(
                [task] * 2,
                config,
                servers=servers,
                hooks=lambda mine, _: [At(5, fail)] if mine == rank else [],
            )
        assert read_model(task, tmp_path).step == 3, "what was trained later is lost"
        train_ranks([task] * 2, config, servers=servers)
    assert read_model(task, tmp_path).tally == dict.fromkeys(range(task.records), 1.0)


def test_all_ranks_are_told_that_a_server_is_lost_and_restart_without_it(tmp_path: Path) -> None:
    task, config = Steady(batches=12), at(SAVING, tmp_path)
    with ExitStack() as held:
        servers = held.enter_context(
            serving(task, num_ps=2, num_workers=2, config=config, holds_weights=False)
        )
        with pytest.raises(UnavailableError, match=r"parameter server \d"):
            train_ranks(
                [task] * 2,
                config,
                servers=servers,
                hooks=lambda mine, _: [At(5, held.close)] if mine == 1 else [],
            )
    train_ranks([task] * 2, config, num_ps=2)
    assert read_model(task, tmp_path).tally == dict.fromkeys(range(task.records), 1.0)


def test_rank_0_notices_a_server_that_is_lost_while_it_is_idle(tmp_path: Path) -> None:
    config = at(PLAIN, tmp_path)
    with (
        connected(2) as groups,
        ExitStack() as held,
    ):
        servers = held.enter_context(serving(Tallied(), num_workers=2, config=config, holds_weights=False))
        with closing(ServerGroup(servers, patience=SOON)) as group:
            rows = RowsOnServers(groups[0], group)
            rows.begin()
            held.close()

            def heard() -> bool:
                with suppress(UnavailableError):
                    groups[0].check()
                    return False
                return True

            assert wait_until(heard)
            with pytest.raises(UnavailableError, match="rank 0 cannot continue: parameter server 0 is lost"):
                groups[1].control.all_gather(torch.zeros(1))


# What servers hold, and for how long


def test_servers_hold_no_weights_and_every_rank_has_all(tmp_path: Path) -> None:
    task, config = Steady(batches=4), at(PLAIN, tmp_path)
    with serving(task, num_ps=2, num_workers=2, config=config, holds_weights=False) as servers:
        with closing(ServerGroup(servers)) as group:
            assert [one["weights"] for one in group.describe()] == [{}, {}]
        train_ranks([task] * 2, config, servers=servers)
    assert read_model(task, tmp_path).weights


def test_servers_end_with_the_run(tmp_path: Path) -> None:
    task, config, discovery = Steady(batches=4), at(PLAIN, tmp_path), MemoryDiscovery()
    served = [
        run_config(config, role="ps", index=index, num_ps=2, num_workers=2, mode="sync") for index in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(serve_parameters, task, one, discovery) for one in served]
        assert wait_until(lambda: len(discovery.query("ps")) == 2)
        servers = [address for _, address in sorted(discovery.query("ps").items())]
        train_ranks([task] * 2, config, servers=servers)
        assert [one.result(60).finished for one in ends] == [True, True]
