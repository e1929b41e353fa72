"""One server is lost, the others keep going: only its share goes back to the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from train.fleets import Tallied, read_model
from train.losing import LosingFleet, Worker, settings

from monolith.errors import UnavailableError
from monolith.train import Hook, Run, SaveConfig, StepResult
from monolith.train.hook import DATA_ENDED
from monolith.train.lost import Lost

TASK = Tallied()


class At(Hook):
    """Does something once, after a step of its own worker."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act
        self.done = False

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if run.step >= self._step and not self.done:
            self.done = True
            self._act()


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_server_is_restored_and_nobody_else_goes_back(tmp_path: Path, lost: int) -> None:
    with LosingFleet(settings(tmp_path)) as fleet:
        report = fleet.train(hooks=[At(9, lambda: fleet.replace_server(lost))]).report()
    assert report.step >= TASK.batches, "the step never goes back"
    assert report.stop_reason == DATA_ENDED
    (found,) = report.lost.servers
    assert (found.server, found.restored_from) == (lost, str(tmp_path / "model.ckpt-6"))
    assert found.rows is not None
    assert found.updates == 3 * (2 + 1), "steps 7 to 9 pushed rows of two stores, and weights"
    tally = read_model(TASK, tmp_path).tally
    mine = {record: times for record, times in tally.items() if record % 2 == lost}
    others = {record: times for record, times in tally.items() if record % 2 != lost}
    assert set(others.values()) == {1.0}, "what the other server learned, it still knows"
    assert set(mine.values()) == {1.0}
    gone = {record for record in range(TASK.records) if record % 2 == lost} - mine.keys()
    assert 0 < len(gone) <= 4 * 4, "at most what was trained after the checkpoint"


def test_without_a_checkpoint_a_lost_share_starts_as_at_the_first_start(tmp_path: Path) -> None:
    with LosingFleet(settings(tmp_path, save=SaveConfig())) as fleet:
        report = fleet.train(hooks=[At(3, lambda: fleet.replace_server(1))]).report()
    (found,) = report.lost.servers
    assert found.restored_from is None
    assert "started anew: nothing was saved" in found.describe()
    tally = read_model(TASK, tmp_path).tally
    assert {record for record in tally if record % 2 == 0} == set(range(0, TASK.records, 2))
    assert not {record for record in tally if record % 2} & set(range(1, 8 * 3, 2))


def test_workers_go_on_with_a_lost_server_0_and_their_steps_are_never_counted_back(tmp_path: Path) -> None:
    steps: dict[int, list[int]] = {0: [], 1: []}

    class Count(Hook):
        def __init__(self, worker: int) -> None:
            self._worker = worker

        def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
            steps[self._worker].append(result.step)

    task = Tallied(batches=40)
    config = settings(tmp_path, save=SaveConfig(steps=10))
    with LosingFleet(config, num_workers=2, task=task) as fleet:
        chief = fleet.train(0, [Count(0), At(15, lambda: fleet.replace_server(0))])
        other = fleet.train(1, [Count(1)])
        reports = [chief.report(), other.report()]
    assert all(report.finished for report in reports)
    assert steps[0] == sorted(steps[0])
    assert steps[1] == sorted(steps[1])
    assert len(steps[0]) + len(steps[1]) == task.batches, "no worker left its loop"
    (found,) = reports[0].lost.servers
    assert found.updates >= 3
    tally = read_model(task, tmp_path).tally
    assert {record for record in tally if record % 2} == set(range(1, task.records, 2))
    assert set(tally.values()) == {1.0}


def test_a_server_that_was_only_away_has_lost_nothing(tmp_path: Path) -> None:
    with LosingFleet(settings(tmp_path)) as fleet:
        workers: list[Worker] = []

        def miss() -> None:
            recovery = workers[0].fleet._recovery
            assert recovery is not None
            recovery.bring_back(1, UnavailableError("a call was late"))

        workers.append(fleet.train(hooks=[At(9, miss)]))
        report = workers[0].report()
    assert report.lost == Lost()
    assert read_model(TASK, tmp_path).tally == dict.fromkeys(range(TASK.records), 1.0)


@pytest.mark.parametrize("call", ["tables.cut", "tables.write", "tables.close"])
def test_a_server_that_is_lost_during_a_save_spoils_that_checkpoint_only(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LosingFleet(settings(tmp_path)) as fleet:
        fleet.breaks[1].add(call)
        report = fleet.train().report()
    assert report.stop_reason == DATA_ENDED
    assert len(report.lost.servers) == 1
    saved = {path.name for path in tmp_path.glob("model.ckpt-*.manifest")}
    if call == "tables.close":  # all was written by then
        assert "model.ckpt-6.manifest" in saved
    else:
        assert "model.ckpt-6.manifest" not in saved
        assert "dropped the checkpoint of step 6, and training goes on" in caplog.text
    assert set(read_model(TASK, tmp_path).tally.values()) == {1.0}


@pytest.mark.parametrize("call", ["tables.restore", "dense.restore", "server.begin"])
def test_a_server_that_is_lost_while_its_share_is_restored_is_brought_back_once_more(
    tmp_path: Path, call: str
) -> None:
    with LosingFleet(settings(tmp_path)) as fleet:

        def lose() -> None:
            fleet.breaks[1].add(call)
            fleet.replace_server(1)

        report = fleet.train(hooks=[At(9, lose)]).report()
    assert report.stop_reason == DATA_ENDED
    (found,) = report.lost.servers
    assert found.restored_from == str(tmp_path / "model.ckpt-6")
