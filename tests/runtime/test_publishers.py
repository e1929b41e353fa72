"""Runs of several processes publish as well: each holder of rows its share, and one the dense weights."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import Tallied, has_cold_rows, read_model, run_fleet
from runtime.losing import LosingFleet, settings, wait_for
from runtime.rank_runs import quiet, train_ranks
from train.published import OFTEN, Following

from monolith.errors import UnavailableError, UnpublishedError
from monolith.runtime import LocalRun, TrainReport
from monolith.sync.publish_messages import PublishOrder, ShardPublishStatus
from monolith.train import Hook, SaveConfig, TrainConfig
from monolith.train.config import TablesConfig

TASK = Tallied(batches=16)
SELDOM = replace(OFTEN, interval=timedelta(hours=1), finish_timeout=timedelta(milliseconds=200))
"""Only the last delta has all changes."""


def ends_equal(following: Following, model_dir: Path) -> None:
    """See that a subscriber holds what the last checkpoint of a run has, rows and weights."""
    saved = read_model(TASK, model_dir)
    assert following.values == {
        name: {key: tuple(value) for key, (_, value, _) in rows.items()} for name, rows in saved.rows.items()
    }
    assert {name: one.tolist() for name, one in following.dense.items()} == saved.weights
    assert sorted(following.subscriber.progress) == [0, 1]


class Watch(Hook):
    """Keeps what the process that leads hears of all holders."""

    def __init__(self, run: LocalRun, tables: TablesConfig | None = None) -> None:
        self._run = run
        self._is_tiered = tables is not None and tables.storage == "tiered"
        self.found: list[list[ShardPublishStatus]] = []

    def after_step(self, run: Any, result: Any) -> None:  # noqa: ARG002
        publishing = self._run.publish
        assert publishing is not None
        if run.step < 4 + 2 * len(self.found) or len(self.found) == 2:
            return
        wait_for(lambda: len(publishing.execute(PublishOrder("status"))) == 2, "all to publish")
        order = PublishOrder("resume") if self.found else PublishOrder("hold", "for a moment")
        self.found.append(list(publishing.execute(order)))
        assert has_cold_rows(self._run.session.model) == self._is_tiered

    def check(self) -> None:
        """See that both shares were held, and let go."""
        held, resumed = self.found
        assert [(one.share, one.shares, one.held) for one in held] == [(0, 2, True), (1, 2, True)]
        assert {one.reason for one in held} == {"for a moment"}
        assert [one.held for one in resumed] == [False, False]


def test_a_subscriber_of_two_parameter_servers_ends_equal_to_them(
    tmp_path: Path, tables: TablesConfig
) -> None:
    following = Following(TASK)
    watches: list[Watch] = []

    def watch(run: LocalRun) -> list[Hook]:
        watches.append(Watch(run, tables))
        return list(watches)

    outcome = run_fleet(
        TASK,
        tmp_path,
        num_ps=2,
        num_workers=2,
        hooks=lambda worker: () if worker else watch,
        publish=following.plan,
        tables=tables,
    )
    assert outcome.chief.finished
    ends_equal(following, tmp_path)
    watches[0].check()
    learned = [one.learned for one in following.subscriber.progress.values()]
    assert max(one.step for one in learned) == outcome.chief.step
    assert all(0 < one.trained_at <= one.published_at for one in learned)


def test_a_subscriber_of_two_ranks_ends_equal_to_them(tmp_path: Path) -> None:
    following = Following(TASK)
    config = quiet(TrainConfig(), model_dir=str(tmp_path), save=SaveConfig(steps=6))
    watches: list[Watch] = []

    def hooks(rank: int, run: LocalRun) -> list[Hook]:
        if rank:
            return []
        watches.append(Watch(run))
        return list(watches)

    train_ranks([TASK, TASK], config, hooks=hooks, publish=following.plan)
    ends_equal(following, tmp_path)
    watches[0].check()


def test_a_subscriber_of_servers_next_to_ranks_ends_equal_to_them(tmp_path: Path) -> None:
    following = Following(TASK)
    config = quiet(TrainConfig(), model_dir=str(tmp_path), save=SaveConfig(steps=6))
    train_ranks([TASK, TASK], config, num_ps=2, publish=following.plan)
    ends_equal(following, tmp_path)


def test_a_server_that_took_the_place_of_a_lost_one_publishes_in_an_epoch_of_its_own(tmp_path: Path) -> None:
    following = Following(TASK)
    epochs: list[dict[int, str]] = []

    class Loses(Hook):
        def after_step(self, run: Any, result: Any) -> None:  # noqa: ARG002
            if run.step == 4:
                wait_for(lambda: len(following.channel.reader().logs()) == 2, "both to publish")
                epochs.append(epochs_of(following))
            if run.step == 8:
                fleet.replace_server(1)

    config = settings(tmp_path, save=SaveConfig(steps=5))
    with LosingFleet(config, task=TASK, loses_servers=True, publish=following.plan) as fleet:
        report = fleet.train(hooks=[Loses()]).report()
        epochs.append(epochs_of(following))
    assert [found.server for found in report.lost.servers] == [1]
    before, after = epochs
    assert before[0] == after[0]
    assert before[1] != after[1]
    ends_equal(following, tmp_path)


def test_a_run_that_keeps_going_waits_for_the_server_that_was_lost_before_its_last_delta(
    tmp_path: Path,
) -> None:
    following = Following(TASK)
    with LosingFleet(settings(tmp_path), task=TASK, loses_servers=True, publish=following.plan) as fleet:
        fleet.breaks[1].add("publish.flush")
        assert fleet.train().report().finished
        assert not fleet.breaks[1]
    ends_equal(following, tmp_path)


def test_a_run_does_not_end_well_if_a_server_was_lost_before_its_last_delta_and_the_next_start_publishes_it(
    tmp_path: Path,
) -> None:
    following = Following(TASK)
    with LosingFleet(
        settings(tmp_path), task=TASK, keeps_going=False, loses_servers=True, publish=following.plan
    ) as fleet:
        fleet.breaks[1].add("publish.flush")
        worker = fleet.train()
        worker.fleet.group.replacement_timeout = timedelta()  # as in a run that does not keep going
        with pytest.raises(UnavailableError, match="saved and not all of them are published"):
            worker.report()
        wait_for(lambda: len(fleet.discovery.query("ps")) == 2, "the next server to be there")
        again = fleet.train().report()
        assert (again.finished, again.steps) == (True, 0)
    ends_equal(following, tmp_path)


class Lost(Hook):
    """Loses rank 1 when rank 0 has saved everything, and before rank 1 has published its last changes."""

    def __init__(self, rank: int, run: LocalRun, gone: threading.Event) -> None:
        self._rank, self._run, self._gone = rank, run, gone

    def end(self, run: Any) -> None:  # noqa: ARG002
        if self._rank == 0:
            assert self._gone.wait(60)
        elif not self._gone.is_set():
            assert self._run.publish is not None
            self._run.publish.publishers._share._closed.set()  # type: ignore[attr-defined]
            self._run.session.coordinator._groups.close()  # type: ignore[attr-defined]
            self._gone.set()
            raise UnavailableError("this rank is as good as killed")


def test_a_run_does_not_end_well_if_a_rank_was_lost_before_its_last_delta_and_the_next_start_publishes_it(
    tmp_path: Path,
) -> None:
    following = Following(TASK, SELDOM)
    config = quiet(TrainConfig(), model_dir=str(tmp_path), save=SaveConfig(steps=4))
    gone = threading.Event()

    def train() -> list[TrainReport]:
        return train_ranks(
            [TASK, TASK],
            config,
            hooks=lambda rank, run: [Lost(rank, run, gone)],
            publish=following.plan,
        )

    with pytest.raises(UnavailableError, match="saved and not all of them are published"):
        train()
    again = train()
    assert [(one.finished, one.steps) for one in again] == [(True, 0), (True, 0)]
    ends_equal(following, tmp_path)


class CutsOff(Hook):
    """Makes the channel unreachable between the last save and the last delta, the first time."""

    def __init__(self, following: Following) -> None:
        self._following, self._left = following, 1

    def end(self, run: Any) -> None:  # noqa: ARG002
        self._following.channel.broken = self._left > 0
        self._left -= 1


def test_a_run_on_servers_whose_channel_stays_away_fails_saved_and_its_next_start_publishes_all_rows(
    tmp_path: Path,
) -> None:
    following = Following(TASK, SELDOM)
    cuts = [CutsOff(following)]
    with LosingFleet(settings(tmp_path), task=TASK, keeps_going=False, publish=following.plan) as fleet:
        with pytest.raises(UnpublishedError, match=r"memory did not take .*shard 0 of 2.*shard 1 of 2"):
            fleet.train(hooks=cuts).report()
        following.channel.broken = False
        again = fleet.train(hooks=cuts).report()
        assert (again.finished, again.steps) == (True, 0)
    ends_equal(following, tmp_path)


def test_ranks_whose_channel_stays_away_fail_saved_and_their_next_start_publishes_all_rows(
    tmp_path: Path,
) -> None:
    following = Following(TASK, SELDOM)
    config = quiet(TrainConfig(), model_dir=str(tmp_path), save=SaveConfig(steps=6))
    cuts = CutsOff(following)

    def train() -> list[TrainReport]:
        return train_ranks(
            [TASK, TASK], config, hooks=lambda rank, _: [] if rank else [cuts], publish=following.plan
        )

    with pytest.raises(UnpublishedError, match=r"memory did not take .*shard 0 of 2.*shard 1 of 2"):
        train()
    following.channel.broken = False
    again = train()
    assert [(one.finished, one.steps) for one in again] == [(True, 0), (True, 0)]
    ends_equal(following, tmp_path)


def epochs_of(following: Following) -> dict[int, str]:
    return {log.shard[0]: log.newest.epoch for log in following.channel.reader().logs()}
