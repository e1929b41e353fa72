"""One server is lost, the others keep going: only its share goes back to the last checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from runtime.fleets import PATIENT, TALLY, Tallied, read_model
from runtime.losing import LosingFleet, Worker, settings, wait_for

from monolith.checkpoint import Checkpointer, CustomRestore, RestoreOptions, Saver
from monolith.errors import UnavailableError
from monolith.runtime import FleetCoordinator
from monolith.runtime.coordinator import Start
from monolith.runtime.failover import KeepGoing, ServerRecovery
from monolith.runtime.losses import Lost
from monolith.runtime.messages import Returned
from monolith.table import iterate
from monolith.train import Hook, Mode, SaveConfig, StepResult, TrainConfig, TrainingRun
from monolith.train.hook import DATA_ENDED
from monolith.train.model import Model

TASK = Tallied(batches=14)


def losing_servers(config: TrainConfig, **how: Any) -> LosingFleet:
    return LosingFleet(config, loses_servers=True, **{"task": TASK, **how})


class At(Hook):
    """Does something once, after a step of its own worker."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act
        self.done = False

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if run.step >= self._step and not self.done:
            self.done = True
            self._act()


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_server_is_restored_and_no_other_process_rolls_back(tmp_path: Path, lost: int) -> None:
    with losing_servers(settings(tmp_path)) as fleet:
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
    with losing_servers(settings(tmp_path, save=SaveConfig())) as fleet:
        report = fleet.train(hooks=[At(3, lambda: fleet.replace_server(1))]).report()
    (found,) = report.lost.servers
    assert found.restored_from is None
    assert "started anew: nothing was saved" in found.describe()
    tally = read_model(TASK, tmp_path).tally
    assert {record for record in tally if record % 2 == 0} == set(range(0, TASK.records, 2))
    assert not {record for record in tally if record % 2} & set(range(1, 8 * 3, 2))


def test_workers_continue_with_a_lost_server_0_and_their_steps_are_never_counted_back(tmp_path: Path) -> None:
    steps: dict[int, list[int]] = {0: [], 1: []}

    class Count(Hook):
        def __init__(self, worker: int) -> None:
            self._worker = worker

        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            steps[self._worker].append(result.step)

    task = Tallied(batches=20)
    config = settings(tmp_path, save=SaveConfig(steps=5))

    with losing_servers(config, num_workers=2, task=task) as fleet:
        chief = fleet.train(0, [Count(0), At(8, lambda: fleet.replace_server(0))])
        other = fleet.train(1, [Count(1)])
        reports = [chief.report(), other.report()]
    assert all(report.finished for report in reports)
    assert steps[0] == sorted(steps[0])
    assert steps[1] == sorted(steps[1])
    assert len(steps[0]) + len(steps[1]) == task.batches, "no worker left its loop"
    assert [found.server for found in reports[0].lost.servers] == [0]
    tally = read_model(task, tmp_path).tally
    assert {record for record in tally if record % 2} == set(range(1, task.records, 2))
    assert set(tally.values()) == {1.0}


def test_a_server_that_was_only_away_has_lost_nothing(tmp_path: Path) -> None:
    with LosingFleet(settings(tmp_path), task=TASK) as fleet:
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
    with losing_servers(settings(tmp_path)) as fleet:
        fleet.breaks[1].add(call)
        report = fleet.train().report()
    assert report.stop_reason == DATA_ENDED
    assert len(report.lost.servers) == 1
    saved = {path.name for path in tmp_path.glob("model.ckpt-*.manifest")}
    if call == "tables.close":  # all was written by then
        assert "model.ckpt-6.manifest" in saved
    else:
        assert "model.ckpt-6.manifest" not in saved
        assert "dropped the checkpoint of step 6, and training continues" in caplog.text
    assert set(read_model(TASK, tmp_path).tally.values()) == {1.0}


@pytest.mark.parametrize("call", ["tables.restore", "dense.restore", "server.begin"])
def test_a_server_that_is_lost_while_its_share_is_restored_is_brought_back_once_more(
    tmp_path: Path, call: str
) -> None:
    with losing_servers(settings(tmp_path)) as fleet:

        def lose() -> None:
            fleet.breaks[1].add(call)
            fleet.replace_server(1)

        report = fleet.train(hooks=[At(9, lose)]).report()
    assert report.stop_reason == DATA_ENDED
    (found,) = report.lost.servers
    assert found.restored_from == str(tmp_path / "model.ckpt-6")


# Spares


def test_a_spare_takes_the_place_of_a_server_that_does_not_come_back(tmp_path: Path) -> None:
    with losing_servers(settings(tmp_path)) as fleet:
        fleet.start_server(2)
        served: list[tuple[int, str]] = []
        report = fleet.train(
            hooks=[At(9, lambda: fleet.lose_server(1))],
            spare=fleet.take_over,
            spare_after=timedelta(0),
            served=lambda place, address: served.append((place, address)),
        ).report()
        assert served == [(1, fleet.address(2))]
    assert report.stop_reason == DATA_ENDED
    assert [one.server for one in report.lost.servers] == [1]
    assert set(read_model(TASK, tmp_path).tally.values()) == {1.0}


def test_a_spare_that_is_lost_while_it_takes_over_is_followed_by_another(tmp_path: Path) -> None:
    with losing_servers(settings(tmp_path)) as fleet:
        fleet.start_server(2)
        fleet.start_server(3)
        fleet.breaks[2].add("tables.restore")
        fleet.shares[2].lose = lambda: fleet.lose_server(2)  # type: ignore[attr-defined]
        report = fleet.train(
            hooks=[At(9, lambda: fleet.lose_server(1))], spare=fleet.take_over, spare_after=timedelta(0)
        ).report()
    assert report.stop_reason == DATA_ENDED
    assert [one.server for one in report.lost.servers] == [1]


def test_before_the_grace_is_over_no_spare_is_asked(tmp_path: Path) -> None:
    with losing_servers(settings(tmp_path)) as fleet:
        fleet.start_server(2)
        report = fleet.train(
            hooks=[At(9, lambda: fleet.replace_server(1))],
            spare=fleet.take_over,
            spare_after=timedelta(seconds=PATIENT),
        ).report()
        assert fleet.servers[2].shard is None
    assert len(report.lost.servers) == 1


# A chief that restarts, and servers of which some are new


def weights_of(fleet: LosingFleet, index: int) -> dict[str, list[float]]:
    held: Any = fleet.shares[index]._held
    return {name: weight.detach().tolist() for name, weight in held.dense.weights.items()}


def rows_of(fleet: LosingFleet, index: int) -> dict[int, float]:
    held: Any = fleet.shares[index]._held
    (table,) = (store.table(TALLY) for store in held.stores if TALLY in store.tables)
    return {
        key: value[0]
        for part in iterate(table)
        for key, value in zip(part.ids.tolist(), part.values.tolist(), strict=True)
    }


class Trained:
    """Everything at one saved step, then changed by another that was not: as notes `restore_test` has it."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.fleet = losing_servers(settings(folder, save=SaveConfig(steps=1), max_steps=2, **more))

    def __enter__(self) -> Self:
        self.fleet.__enter__()
        chief = self.fleet.fleet()
        coordinator = FleetCoordinator(chief)
        model = Model(TASK, Mode.TRAIN, seed=0, make_store=coordinator.placement.make_store)
        optimizer = coordinator.placement.attach(model)
        assert optimizer is not None
        self.chief, self.coordinator, self.model = chief, coordinator, model
        coordinator.join(lambda _: Start(step=0))
        self._set(1.0)
        checkpointer = Checkpointer(Saver(self.fleet.config.model_dir), self.parts(coordinator, model))
        self.prefix = checkpointer.save(1)
        self._set(2.0)
        chief._close_listener()
        return self

    def parts(self, coordinator: FleetCoordinator, model: Model) -> list[Any]:
        return coordinator.placement.parts(model, incremental=False, background=False)

    def _set(self, value: float) -> None:
        """Make every weight, and the one row of each server, this value."""
        for index in range(2):
            held: Any = self.fleet.shares[index]._held
            for weight in held.dense.weights.values():
                weight.data.fill_(value)
            (table,) = (store.table(TALLY) for store in held.stores if TALLY in store.tables)
            table.assign(torch.tensor([index]), torch.tensor([[value]]))

    def restart(self, options: RestoreOptions | None = None) -> None:
        """Another process of the chief restores the checkpoint."""
        coordinator = FleetCoordinator(self.fleet.fleet())
        model = Model(TASK, Mode.TRAIN, seed=0, make_store=coordinator.placement.make_store)
        coordinator.placement.attach(model)
        checkpointer = Checkpointer(Saver(self.fleet.config.model_dir), self.parts(coordinator, model))
        coordinator.join(lambda _: Start(step=checkpointer.restore(self.prefix, options).step))

    def values(self) -> list[set[float]]:
        """Of each server: its weights and its row."""
        return [
            {number for weight in weights_of(self.fleet, index).values() for number in _flat(weight)}
            | set(rows_of(self.fleet, index).values())
            for index in range(2)
        ]

    def __exit__(self, *_: object) -> None:
        self.fleet.__exit__()


def _flat(found: Any) -> list[float]:
    return [number for one in found for number in _flat(one)] if isinstance(found, list) else [found]


def test_with_two_new_servers_everything_is_as_it_was_saved(tmp_path: Path) -> None:
    with Trained(tmp_path) as run:
        run.fleet.replace_server(0)
        run.fleet.replace_server(1)
        run.restart()
        assert run.values() == [{1.0}, {1.0}]


@pytest.mark.parametrize(("new", "values"), [(1, [{2.0}, {1.0}]), (0, [{1.0}, {2.0}])])
def test_with_one_new_server_the_other_keeps_what_it_learned(
    tmp_path: Path, new: int, values: list[set[float]]
) -> None:
    with Trained(tmp_path) as run:
        run.fleet.replace_server(new)
        run.restart()
        assert run.values() == values


def test_a_save_that_a_lost_chief_had_begun_does_not_block_later_saves(tmp_path: Path) -> None:
    with Trained(tmp_path) as run:
        run.chief.tables.cut("never written")
        run.restart()
        run.chief.tables.cut("another")
        assert run.values() == [{2.0}, {2.0}]


def test_exactly_all_go_back_to_what_was_saved(tmp_path: Path) -> None:
    with Trained(tmp_path) as run:
        run.fleet.keeps_going = False
        run.restart()
        assert run.values() == [{1.0}, {1.0}]


def test_clearing_the_dense_half_does_not_overwrite_a_server_that_lives(tmp_path: Path) -> None:
    with Trained(tmp_path) as run:
        run.fleet.replace_server(1)
        fresh = weights_of(run.fleet, 1)
        custom = CustomRestore(reset_dense=True)
        run.restart(RestoreOptions(custom=custom, model_dir=str(tmp_path)))
        assert run.values()[0] == {2.0}
        assert weights_of(run.fleet, 1) == fresh
        assert rows_of(run.fleet, 1) == {1: 1.0}, "tables are restored all the same"


def test_filters_are_restored_for_the_lost_share_only(tmp_path: Path) -> None:
    live: list[Any] = []

    def filters(fleet: LosingFleet, index: int) -> list[Any]:
        held: Any = fleet.shares[index]._held
        return [one for store in held.stores for one in store.filters.values()]

    with losing_servers(settings(tmp_path), task=Tallied(threshold=2)) as fleet:

        def lose() -> None:
            live.extend(filters(fleet, 0))
            fleet.replace_server(1)

        fleet.train(hooks=[At(9, lose)]).report()
        assert all(one is other for one, other in zip(filters(fleet, 0), live, strict=True))
    restored = list(tmp_path.glob("model.ckpt-6.assets/ps-1-of-2/hash_filter_*"))
    assert restored, "its filters were in the checkpoint, which a server restores as a whole"


# Workers that are lost


class Killed(BaseException):
    """As if the process had been killed."""


class Vanish(Hook):
    """Ends a worker at a step of its own, without a word to anybody."""

    def __init__(self, after: int) -> None:
        self._left = after

    def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
        self._left -= 1
        if not self._left:
            fleet = run.session.coordinator._fleet
            fleet._close_listener()
            fleet._run = ""
            raise Killed


class Pace(Hook):
    """Takes some steps, and the rest when it may; it arrives at halts all the same."""

    def __init__(self, steps: int, may: threading.Event) -> None:
        self._steps, self._may = steps, may
        self.taken: list[int] = []

    def after_step(self, run: Any, result: StepResult) -> None:
        self.taken.append(result.step)
        if len(self.taken) >= self._steps:
            fleet = run.session.coordinator._fleet
            wait_for(lambda: self._may.is_set() or fleet.is_halted, "the other to be back")


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_worker_or_chief_rejoins_and_no_other_process_rolls_back(tmp_path: Path, lost: int) -> None:
    task = Tallied(batches=18)
    back = threading.Event()
    pace = Pace(8, back)
    with LosingFleet(settings(tmp_path, save=SaveConfig(steps=4)), num_workers=2, task=task) as fleet:
        first = {index: fleet.train(index, [Vanish(6) if index == lost else pace]) for index in range(2)}
        first[lost].join(PATIENT)
        assert isinstance(first[lost].found, Killed)
        again = fleet.train(lost, [At(0, back.set)])
        reports = {lost: again.report(), 1 - lost: first[1 - lost].report()}
    assert all(report.finished for report in reports.values())
    assert pace.taken == sorted(pace.taken)
    assert len(pace.taken) == task.batches // 2, "the other has never left its loop"
    (found,) = reports[0].lost.workers
    assert found.worker == lost
    assert not reports[0].lost.servers
    tally = read_model(task, tmp_path).tally
    assert tally.keys() == set(range(task.records)), "nothing is left out"
    assert set(tally.values()) <= {1.0, 2.0}
    twice = sum(times - 1 for times in tally.values())
    assert twice <= 8 * 6, "what it had trained since its last saved position is trained again, and no more"


def test_workers_lost_after_server_0_was_replaced_are_counted_too() -> None:
    unused: Any = None
    how = KeepGoing(find=lambda _: [], connect=lambda _: unused)
    recovery = ServerRecovery(
        unused,
        "r",
        unused,
        how,
        last=lambda: None,
        halt_of=lambda _: 0,
        take_over_meeting=lambda _, __: None,
        patience=timedelta(),
    )
    first, second = Returned(1, records=5, seconds=1.0), Returned(2, records=7, seconds=2.0)
    for news in [(first,), (first,), (), (second,), (second,)]:  # the service of the new server 0 knows none
        recovery.note_returned(news)
    assert [(one.worker, one.records) for one in recovery.lost.workers] == [(1, 5), (2, 7)]
