"""Servers and workers train one model: nothing lost, nothing twice, and a checkpoint like any other."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import (
    PATIENT,
    TALLY,
    Outcome,
    Tallied,
    TalliedFiles,
    TalliedModel,
    read_model,
    run_config,
    run_fleet,
)
from torch import nn

from monolith.cluster import MemoryDiscovery, Waiting
from monolith.data import ClickLog, ClickLogConfig, Shard, Stream
from monolith.errors import (
    BarrierAlreadyPlacedError,
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    MonolithError,
    OutOfMemoryError,
    RestoreError,
    UnavailableError,
)
from monolith.feature import Batch
from monolith.model import DeepFM
from monolith.runtime import Fleet, FleetCoordinator, Trainer, join_fleet, parameter_server, serve_parameters
from monolith.runtime import local as alone
from monolith.runtime.cluster_config import ClusterConfig, TimeoutsConfig
from monolith.runtime.coordinator import Start
from monolith.runtime.failover import KeepGoing
from monolith.runtime.messages import GatheredStates, PauseNumber
from monolith.runtime.parameter_server import ServedShard, ServerEnd, ServerPort
from monolith.store import LocalStore, ServerGroup
from monolith.train import (
    AlertConfig,
    ExpiryConfig,
    Hook,
    KeepConfig,
    Mode,
    SaveConfig,
    StepResult,
    Task,
    TrainConfig,
    TrainingRun,
)
from monolith.train.hooks import BarrierHook
from monolith.wire.messages import write_message

TASK = Tallied(batches=16)
LONG = Tallied(batches=400)
"""For what ends long before its data does, however late somebody hears of it."""


def fleet_of(run: Any) -> Fleet:
    """A worker's place, which a run of its own keeps to itself."""
    coordinator = run.session.coordinator
    assert isinstance(coordinator, FleetCoordinator)
    return coordinator._fleet


class Fail(Hook):
    """Fails one worker at a step of its own."""

    def __init__(self, after: int) -> None:
        self._left = after

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._left -= 1
        if not self._left:
            raise OSError("the disk is gone")


class StopAt(Hook):
    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if result.step >= self._step:
            run.request_stop("the test says so")


def once(records: int) -> dict[int, float]:
    return dict.fromkeys(range(records), 1.0)


@pytest.mark.parametrize(("num_ps", "num_workers"), [(1, 1), (1, 3), (3, 2)])
def test_every_record_is_trained_once_and_the_step_counts_all_batches(
    tmp_path: Path, num_ps: int, num_workers: int
) -> None:
    outcome = run_fleet(TASK, tmp_path, num_ps=num_ps, num_workers=num_workers)
    assert outcome.servers == dict.fromkeys(range(num_ps), ServerEnd("the run is over", finished=True))
    assert (outcome.chief.step, outcome.chief.examples) == (TASK.batches, TASK.records)
    model = read_model(TASK, tmp_path)
    assert model.step == TASK.batches
    assert model.tally == once(TASK.records)
    assert {name: len(rows) > 0 for name, rows in model.rows.items()} == dict.fromkeys(model.rows, True)


def test_one_worker_trains_the_same_bits_on_servers_as_alone(tmp_path: Path) -> None:
    how: dict[str, Any] = {"deterministic": True, "save": SaveConfig(steps=6)}
    run_fleet(TASK, tmp_path / "fleet", num_ps=3, num_workers=1, **how)
    alone = TrainConfig(model_dir=str(tmp_path / "alone"), summary_every_steps=None, fresh_rows=False, **how)
    Trainer(TASK, alone).train()
    fleet, one = read_model(TASK, tmp_path / "fleet"), read_model(TASK, tmp_path / "alone")
    assert fleet.weights == one.weights
    assert fleet.rows == one.rows


NOW = [((2, 2), 3), ((2, 3), 1), ((3, 1), 3)]
SOAKED = [((2, 2), 1), ((2, 3), 3), ((3, 1), 1)]


@pytest.mark.parametrize(
    ("servers", "full_every"), [*NOW, *(pytest.param(*one, marks=pytest.mark.soak) for one in SOAKED)]
)
def test_a_restarted_run_resumes_with_any_number_of_servers(
    tmp_path: Path, servers: tuple[int, int], full_every: int
) -> None:
    keep = KeepConfig(full_every=full_every)
    first = run_fleet(TASK, tmp_path, num_ps=servers[0], hooks=lambda _: [StopAt(9)], keep=keep)
    assert 9 <= first.chief.step < TASK.batches
    assert sum(read_model(TASK, tmp_path).tally.values()) == 8 * first.chief.step
    second = run_fleet(TASK, tmp_path, num_ps=servers[1], keep=keep)
    assert second.chief.restored_from is not None
    assert second.chief.step == TASK.batches
    assert first.chief.examples + second.chief.examples == TASK.records
    assert read_model(TASK, tmp_path).tally == once(TASK.records)


def test_a_local_run_resumes_with_servers_and_back(tmp_path: Path) -> None:
    Trainer(TASK, TrainConfig(model_dir=str(tmp_path), steps=5, summary_every_steps=None)).train()
    run_fleet(TASK, tmp_path, num_workers=1, max_steps=12)
    Trainer(TASK, TrainConfig(model_dir=str(tmp_path), summary_every_steps=None)).train()
    assert read_model(TASK, tmp_path).tally == once(TASK.records)


@pytest.mark.parametrize("workers", [(2, 3, 1), (1, 2)])
def test_another_number_of_workers_resumes_with_the_rest_of_the_files(
    tmp_path: Path, workers: tuple[int, ...]
) -> None:
    task = TalliedFiles(folder=str(tmp_path))
    trained = 0
    for number, count in enumerate(workers):
        last = number == len(workers) - 1
        hooks = [] if last else [StopAt(5 * (number + 1))]
        config = TrainConfig(model_dir=str(tmp_path / "model"), summary_every_steps=None)
        if count == 1:
            report = Trainer(task, config, hooks=hooks).train()
        else:
            report = run_fleet(
                task, tmp_path / "model", num_workers=count, hooks=lambda _, hooks=hooks: hooks
            ).chief
        trained += report.examples
        assert last or trained < task.records
    assert trained == task.records
    assert read_model(task, tmp_path / "model").tally == once(task.records)


def test_a_chief_that_comes_back_redistributes_nothing_that_workers_read_since(tmp_path: Path) -> None:
    class CameBack(alone.LocalCoordinator):
        def join(self, restore: Callable[[bool], Start], **_: Any) -> Start | None:
            return restore(True)

    task = TalliedFiles(folder=str(tmp_path))
    run_fleet(task, tmp_path / "model", hooks=lambda _: [StopAt(5)])
    config = TrainConfig(model_dir=str(tmp_path / "model"), summary_every_steps=None)
    message = r"run of 1 workers that continues: .* checkpoint of 2, .*together"
    with pytest.raises(RestoreError, match=message):
        Trainer(task, config, coordinator=CameBack()).train()


def test_another_number_of_workers_is_refused_where_the_data_cannot_be_redistributed(tmp_path: Path) -> None:
    run_fleet(TASK, tmp_path, hooks=lambda _: [StopAt(6)])
    outcome = run_fleet(TASK, tmp_path, num_workers=3)
    for worker in range(3):
        assert isinstance(outcome.workers[worker], ClusterError | RestoreError)
    with pytest.raises(
        RestoreError,
        match=r"saved by 2 workers.*this run has 3: DriftingStream cannot.*\. Train with 2 workers",
    ):
        outcome.report(0)
    with pytest.raises(RestoreError, match=r"saved by 2 workers.*this run has 1"):
        Trainer(TASK, TrainConfig(model_dir=str(tmp_path))).train()


def test_a_damaged_piece_of_a_checkpoint_is_named_by_the_server_that_reads_it(tmp_path: Path) -> None:
    run_fleet(TASK, tmp_path, hooks=lambda _: [StopAt(6)])
    newest = max(tmp_path.glob("model.ckpt-*.assets"), key=lambda path: int(path.stem.split("-")[1]))
    (damaged,) = (newest / "ps-1-of-2").glob("tally.*-00000-of-00001")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(MonolithError, match=damaged.name):
        run_fleet(TASK, tmp_path).report(0)
    assert damaged.read_bytes() == data


@pytest.mark.parametrize("fails", [0, 1])
def test_a_process_that_fails_ends_the_run_for_all_and_the_next_run_resumes_from_the_checkpoint(
    tmp_path: Path, fails: int
) -> None:
    outcome = run_fleet(
        TASK, tmp_path, hooks=lambda worker: [Fail(6)] if worker == fails else [], save=SaveConfig(steps=4)
    )
    assert isinstance(outcome.workers[fails], OSError)
    other = outcome.workers[1 - fails]
    assert isinstance(other, ClusterError)
    assert f"worker {fails} failed: OSError: the disk is gone" in str(other)
    assert not any(end.finished for end in outcome.servers.values()), "they stayed for the next run"
    saved = read_model(TASK, tmp_path)
    assert set(saved.tally.values()) == {1.0}
    assert sum(saved.tally.values()) == 8 * saved.step
    run_fleet(TASK, tmp_path)
    assert read_model(TASK, tmp_path).tally == once(TASK.records)


def test_a_process_that_is_told_to_stop_stops_all_and_saves(tmp_path: Path) -> None:
    chief: list[Trainer] = []

    class Ask(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            chief[0].stop("received SIGTERM")

    outcome = run_fleet(
        LONG,
        tmp_path,
        trainers=lambda worker, trainer: chief.append(trainer) if worker == 0 else None,
        hooks=lambda worker: [Ask()] if worker == 0 else [],
    )
    assert {outcome.report(worker).stop_reason for worker in (0, 1)} == {"received SIGTERM"}
    assert not any(outcome.report(worker).finished for worker in (0, 1)), "there is more to do"
    assert not any(end.finished for end in outcome.servers.values())
    saved = read_model(TASK, tmp_path)
    assert saved.step == outcome.chief.step < LONG.batches
    assert sum(saved.tally.values()) == 8 * saved.step


def test_an_operator_pauses_all_workers_saves_and_resumes_them(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Operator(Hook):
        """Acts from another thread, as the control server does, while the chief waits at the barrier."""

        def __init__(self, run: Any) -> None:
            self._run = run

        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if not seen:
                seen["placed"] = self._run.barrier.place()
                threading.Thread(target=self._act).start()

        def _act(self) -> None:
            barrier = self._run.barrier
            while barrier.blocked_indices() != [0, 1]:
                threading.Event().wait(0.01)
            step = fleet_of(self._run).group.read_step()
            seen["saved"] = self._run.save.trigger_save().result(PATIENT)
            seen["still"] = (barrier.blocked_indices(), fleet_of(self._run).group.read_step() - step)
            with pytest.raises(BarrierAlreadyPlacedError):
                barrier.place()
            barrier.remove()
            seen["after"] = barrier.blocked_indices()

    def hooks(run: Any) -> list[Hook]:
        return [BarrierHook(run.barrier, idle=[run.save.before_step], poll=0.01), Operator(run)]

    outcome = run_fleet(TASK, tmp_path, hooks=lambda worker: hooks if worker == 0 else [])
    assert outcome.chief.step == TASK.batches
    assert seen["saved"] is not None
    assert seen["still"] == ([0, 1], 0)
    assert seen["after"] == []
    assert read_model(TASK, tmp_path).tally == once(TASK.records)


class Server0:
    """A group of one server that notes the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __len__(self) -> int:
        return 1

    def call(self, server: int, name: str, **_: Any) -> dict[str, Any]:
        assert server == 0
        self.calls.append(name)
        if name == "meeting.halt":
            return write_message(PauseNumber(1))
        return write_message(GatheredStates((), (), {}, None)) if name == "meeting.gathered" else {}


def test_a_barrier_that_is_removed_during_a_snapshot_does_not_resume_the_workers() -> None:
    server: Any = Server0()
    fleet = Fleet(server, ClusterConfig(num_workers=1))
    fleet.pause()
    with fleet.halted():
        fleet.resume()
        assert "meeting.release" not in server.calls, "the servers are about to take their snapshots"
    assert server.calls.count("meeting.release") == 1


def test_a_barrier_that_is_placed_during_a_snapshot_outlasts_it() -> None:
    server: Any = Server0()
    fleet = Fleet(server, ClusterConfig(num_workers=1))
    with fleet.halted():
        fleet.pause()
    assert "meeting.release" not in server.calls
    fleet.resume()
    assert server.calls.count("meeting.release") == 1


class LosesAnswers(Server0):
    """A server whose first answer to each call is lost on its way, after the call had its effect."""

    def call(self, server: int, name: str, **body: Any) -> dict[str, Any]:
        answer = super().call(server, name, **body)
        if self.calls.count(name) == 1:
            raise UnavailableError("the connection broke")
        return answer


def test_a_pause_whose_answer_was_lost_is_asked_for_again_and_released() -> None:
    server: Any = LosesAnswers()
    how = KeepGoing(find=lambda _: [], connect=lambda _: server, sleep=lambda _: None)
    fleet = Fleet(server, ClusterConfig(num_workers=1), keep_going=how)
    fleet.pause()
    fleet.resume()
    assert server.calls == ["meeting.halt"] * 2 + ["meeting.release"] * 2


class Quiet(Tallied):
    """A stream whose second worker has nothing to say for a while."""

    released = threading.Event()

    def dataset(self, mode: Mode) -> Any:
        return _Waiting(super().dataset(mode), self.released)


class _Waiting:
    def __init__(self, inner: Stream[Batch], released: threading.Event) -> None:
        self._inner, self._released = inner, released
        self._waits = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_shard(self, share: Shard) -> None:
        self._inner.read_shard(share)
        self._waits = share.worker == 1

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._inner):
            if number == 2 and self._waits:
                assert self._released.wait(PATIENT)
            yield batch


def test_a_worker_without_data_does_not_block_saving(tmp_path: Path) -> None:
    Quiet.released.clear()

    class Release(Hook):
        """Lets the other have its data when a checkpoint without it was saved."""

        def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
            if (tmp_path / "model.ckpt-4.manifest").exists() or run.step >= 7:
                Quiet.released.set()

    outcome = run_fleet(
        Quiet(batches=16),
        tmp_path,
        hooks=lambda worker: [Release()] if worker == 0 else [],
        save=SaveConfig(steps=4),
    )
    assert outcome.chief.step == TASK.batches
    assert read_model(TASK, tmp_path).tally == once(TASK.records)


class _Committing:
    """A source that wants to know what is safe."""

    def __init__(self, inner: Stream[Batch]) -> None:
        self._inner = inner
        self.committed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._inner)

    def commit(self, position: Any) -> None:
        self.committed.append(position["next"])


class Committed(Tallied):
    sources: list[_Committing] = []  # noqa: RUF012

    def dataset(self, mode: Mode) -> Any:
        source = _Committing(super().dataset(mode))
        self.sources.append(source)
        return source


class InStep:
    """Keeps two workers within a step of each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = [0, 0]

    def of(self, worker: int) -> Hook:
        hook = Hook()
        hook.after_step = lambda run, result: self._step(worker, run)  # type: ignore[method-assign] # noqa: ARG005
        return hook

    def _step(self, worker: int, run: Any) -> None:
        with self._changed:
            self._taken[worker] += 1
            self._changed.notify_all()
            for _ in range(int(PATIENT / 0.01)):
                if self._taken[1 - worker] >= self._taken[worker] - 1 or fleet_of(run).is_halted:
                    return
                self._changed.wait(0.01)


def test_every_source_is_told_what_is_safe_up_to_its_end(tmp_path: Path) -> None:
    Committed.sources.clear()
    pace = InStep()
    run_fleet(
        Committed(batches=16), tmp_path, save=SaveConfig(steps=4), hooks=lambda worker: [pace.of(worker)]
    )
    assert len(Committed.sources) == 2
    for source in Committed.sources:
        assert source.committed == sorted(source.committed)
        assert len(source.committed) >= 2
        assert source.committed[-1] >= TASK.records


def test_rows_expire_on_the_servers(tmp_path: Path) -> None:
    task = Tallied(batches=20, expire_after=timedelta(seconds=20))
    run_fleet(task, tmp_path / "kept")
    run_fleet(task, tmp_path / "evicted", evict_every_steps=2, expiry=ExpiryConfig(max_fraction=1))
    kept, evicted = (len(read_model(task, tmp_path / name).rows["context"]) for name in ("kept", "evicted"))
    assert 0 < evicted < kept


def test_counts_of_filters_resume(tmp_path: Path) -> None:
    task = Tallied(batches=16, threshold=2)
    run_fleet(task, tmp_path / "cut", num_workers=1, hooks=lambda _: [StopAt(12)], deterministic=True)
    run_fleet(task, tmp_path / "cut", num_workers=1, deterministic=True)
    run_fleet(task, tmp_path / "whole", num_workers=1, deterministic=True)
    assert read_model(task, tmp_path / "cut").rows == read_model(task, tmp_path / "whole").rows


class Rows(Tallied):
    """A model of rows only."""

    def model(self) -> nn.Module:
        model = TalliedModel(0, None)
        for weight in model.parameters():
            weight.requires_grad_(False)
        return model

    def dense_optimizer(self, model: nn.Module) -> None:  # noqa: ARG002
        return None


def test_a_model_without_weights_to_train_counts_its_steps_all_the_same(tmp_path: Path) -> None:
    outcome = run_fleet(Rows(batches=16), tmp_path)
    assert outcome.chief.step == TASK.batches
    assert read_model(Rows(batches=16), tmp_path).tally == once(TASK.records)


def test_nothing_is_kept_without_a_model_dir(tmp_path: Path) -> None:
    outcome = run_fleet(TASK, "")
    assert outcome.chief.examples == TASK.records
    assert list(tmp_path.iterdir()) == []


# What cannot be


def refused(outcome: Outcome, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        outcome.report(0)
    with pytest.raises(ConfigError, match=words):
        outcome.report(1)


class _Unshared:
    def __init__(self, log: ClickLog) -> None:
        self._log = log

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._log.batches(1, 8))

    def position(self) -> dict[str, Any]:
        return {}

    def restore(self, position: Any) -> None: ...
    def close(self) -> None: ...


class LocalCoordinator(Task):
    """Reads what nobody shares out."""

    def dataset(self, mode: Mode) -> Any:  # noqa: ARG002
        return _Unshared(ClickLog(ClickLogConfig(users=10, items=10)))

    def model(self) -> nn.Module:
        return DeepFM(["user"], dim=2, threads=1)


def test_workers_that_would_all_read_the_same_are_refused(tmp_path: Path) -> None:
    refused(run_fleet(LocalCoordinator(), tmp_path), "2 workers would each train on all of it.*read_shard")
    outcome = run_fleet(LocalCoordinator(), tmp_path, num_workers=1)
    assert outcome.chief.steps == 1


class OwnStore(Tallied):
    def model(self) -> nn.Module:
        model = TalliedModel(0, None)
        model.tally.bind(LocalStore.from_configs)
        return model


def test_a_model_with_a_store_of_its_own_is_refused(tmp_path: Path) -> None:
    refused(
        run_fleet(TASK, tmp_path, task_of=lambda _: OwnStore(batches=16)),
        "would train its own copy of the rows",
    )


def test_servers_of_another_task_are_refused(tmp_path: Path) -> None:
    class Wider(Tallied):
        def model(self) -> nn.Module:
            model = super().model()
            model.clicks = DeepFM(["user", "item", "context"], dim=8, threads=1)
            return model

    refused(
        run_fleet(TASK, tmp_path, task_of=lambda _: Wider(batches=16)), "Do all processes run the same task"
    )


def test_rolling_back_together_is_not_offered(tmp_path: Path) -> None:
    refused(run_fleet(TASK, tmp_path, alert=AlertConfig(action="rollback")), "cannot roll back together yet")


def test_what_is_not_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no parameter server 2 of 2"):
        serve_parameters(TASK, run_config(index=2, num_workers=3, num_ps=2), MemoryDiscovery())
    with pytest.raises(ConfigError, match="num_redundant_ps needs a model_dir"):
        join_fleet(MemoryDiscovery(), run_config(num_ps=1, num_redundant_ps=1))


# Workers that are slow, or gone


class Slow(Hook):
    """Takes its time until it is told to stop."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        for _ in range(int(PATIENT / 0.01)):
            if fleet_of(self._run).stop_reason is not None or fleet_of(self._run).is_halted:
                return
            threading.Event().wait(0.01)


def test_a_chief_that_is_done_asks_workers_to_stop_after_a_while_and_saves_their_work(
    tmp_path: Path,
) -> None:
    outcome = run_fleet(
        TASK,
        tmp_path,
        hooks=lambda worker: (lambda run: [Slow(run)]) if worker == 1 else [],
        finish_timeout=timedelta(seconds=3),
        save=SaveConfig(steps=1000),
    )
    assert "the chief has waited 0:00:03" in outcome.report(1).stop_reason
    assert not outcome.chief.finished
    assert not outcome.report(1).finished
    saved = read_model(TASK, tmp_path)
    assert TASK.batches // 2 <= saved.step == outcome.chief.step < TASK.batches
    assert sum(saved.tally.values()) == 8 * saved.step


def test_a_worker_that_is_stopped_alone_stops_the_run_which_is_not_finished_then(tmp_path: Path) -> None:
    worker: list[Trainer] = []

    class Ask(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            worker[0].stop("SIGTERM")

    outcome = run_fleet(
        LONG,
        tmp_path,
        trainers=lambda index, trainer: worker.append(trainer) if index == 1 else None,
        hooks=lambda index: [Ask()] if index == 1 else [],
    )
    assert not any(outcome.report(index).finished for index in (0, 1))
    assert not any(end.finished for end in outcome.servers.values())
    saved = read_model(TASK, tmp_path)
    assert sum(saved.tally.values()) == 8 * saved.step < LONG.records


def test_a_worker_that_waits_for_its_chief_can_be_stopped(tmp_path: Path) -> None:
    discovery, stop = MemoryDiscovery(), threading.Event()
    config = TrainConfig(model_dir=str(tmp_path))

    def serve() -> None:
        serve_parameters(TASK, run_config(config, role="ps", num_ps=1, num_workers=2), discovery, stop=stop)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    patient = timedelta(seconds=PATIENT)
    joining = run_config(index=1, num_ps=1, num_workers=2, timeouts=TimeoutsConfig(start=patient))
    with join_fleet(discovery, joining) as fleet:
        trainer = Trainer(TASK, config, coordinator=FleetCoordinator(fleet))
        threading.Timer(0.5, trainer.stop, ["SIGTERM"]).start()
        report = trainer.train()
    assert (report.stop_reason, report.steps, report.finished) == ("SIGTERM", 0, False)
    stop.set()
    serving.join(PATIENT)


def test_a_chief_that_is_stopped_does_not_wait_for_workers_that_never_came(tmp_path: Path) -> None:
    discovery, stop = MemoryDiscovery(), threading.Event()
    config = TrainConfig(model_dir=str(tmp_path), summary_every_steps=None)

    def serve() -> None:
        served = run_config(config, role="ps", num_ps=1, num_workers=2)
        serve_parameters(TASK, served, discovery, stop=stop, linger=timedelta())

    class Ask(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            trainer.stop("SIGTERM")

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    patient = timedelta(seconds=PATIENT)
    joining = run_config(num_ps=1, num_workers=2, timeouts=TimeoutsConfig(start=patient))
    with join_fleet(discovery, joining) as fleet:
        trainer = Trainer(TASK, config, coordinator=FleetCoordinator(fleet), hooks=[Ask()])
        with pytest.raises(UnavailableError, match="workers 1 never joined"):
            trainer.train()
    stop.set()
    serving.join(PATIENT)


class AskAtTheEnd(Hook):
    """Looks at the tables when training is over, as the live line does."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.rows = 0

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        threading.Event().wait(0.5)  # so that servers that do not wait are gone
        self.rows = self._run.session.model.stats()[TALLY].rows


def test_hooks_of_every_worker_can_look_at_the_tables_when_they_end(tmp_path: Path) -> None:
    seen: list[AskAtTheEnd] = []

    def look(run: Any) -> list[Hook]:
        seen.append(AskAtTheEnd(run))
        return [seen[-1]]

    outcome = run_fleet(TASK, tmp_path, hooks=lambda _: look)
    assert all(outcome.report(worker).finished for worker in (0, 1))
    assert len(seen) == 2
    assert all(hook.rows > 0 for hook in seen)


def test_a_worker_waits_for_the_ports_of_servers_as_long_as_it_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    discovery = MemoryDiscovery()
    discovery.register("ps", 0, f"127.0.0.1:{port}")
    serving: list[threading.Thread] = []

    def serve() -> None:
        served = run_config(role="ps", num_ps=1)
        serve_parameters(TASK, served, discovery, port=ServerPort(port=port), stop=stop)

    def waiting(_: Waiting) -> None:
        asked.append(_)
        if len(asked) == 2:
            serving.append(threading.Thread(target=serve, daemon=True))
            serving[0].start()

    stop = threading.Event()
    asked: list[Waiting] = []
    patient = timedelta(seconds=PATIENT)
    joining = run_config(num_ps=1, timeouts=TimeoutsConfig(start=patient))
    with join_fleet(discovery, joining, on_waiting=waiting):
        assert asked[0].what == f"parameter server 0 at 127.0.0.1:{port} to answer"
    stop.set()
    serving[0].join(PATIENT)
    discovery.register("ps", 0, f"127.0.0.1:{port}")
    soon = TimeoutsConfig(start=timedelta(seconds=0.5))
    with pytest.raises(DeadlineExceededError, match=r"waited 0:00:00\.5.* for 1 parameter servers to answer"):
        join_fleet(discovery, run_config(num_ps=1, timeouts=soon))


@pytest.mark.parametrize("began", [True, False])
def test_a_server_that_has_no_chief_ends_with_an_error_after_a_while(tmp_path: Path, began: bool) -> None:
    share = ServedShard(TASK, TrainConfig(model_dir=str(tmp_path)), ClusterConfig(role="ps", num_ps=1))
    with share.serve("127.0.0.1", 0, None) as server:
        if began:
            with contextlib.closing(ServerGroup([server.address])) as group:
                group.call(0, "server.begin", run="r")
                group.call(0, "server.attend", run="r", wait=0)
        setting = "timeouts.abandoned" if began else "timeouts.start"
        none, long = timedelta(), timedelta(hours=1)
        timeouts = TimeoutsConfig(start=long if began else none, abandoned=none if began else long)
        with pytest.raises(DeadlineExceededError, match=rf"server 0 has had no chief .*{setting}"):
            share.wait(threading.Event(), timeouts=timeouts)


def test_a_server_without_memory_ends_with_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = ServedShard(TASK, TrainConfig(model_dir=str(tmp_path)), ClusterConfig(role="ps", num_ps=1))

    def full(_: object) -> None:
        raise MemoryError("rows")

    monkeypatch.setattr(share, "_begin", full)
    with share.serve("127.0.0.1", 0, None) as server:
        with (
            contextlib.closing(ServerGroup([server.address])) as group,
            pytest.raises(OutOfMemoryError, match=r"no memory left, and ends"),
        ):
            group.call(0, "server.begin", run="r")
        with pytest.raises(OutOfMemoryError, match=r"parameter server 0 has no memory left .*rows"):
            share.wait(threading.Event())
    share.close()


def test_a_server_whose_port_can_start_no_thread_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory:
        @staticmethod
        def mmap(*_: object) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(parameter_server, "mmap", NoMemory)
    share = ServedShard(TASK, TrainConfig(model_dir=str(tmp_path)), ClusterConfig(role="ps", num_ps=1))
    with pytest.raises(OutOfMemoryError, match=r"parameter server 0 has no memory left .*Cannot allocate"):
        share.wait(threading.Event())
    share.close()


def test_a_server_that_is_told_to_stop_does_not_wait_for_a_chief_that_is_gone(tmp_path: Path) -> None:
    now, stop = 0.0, threading.Event()
    config = TrainConfig(model_dir=str(tmp_path))

    def clock() -> float:
        nonlocal now
        now += 1.0  # each look is a second later
        return now

    share = ServedShard(TASK, config, ClusterConfig(role="ps", num_ps=1), clock=clock)
    with share.serve("127.0.0.1", 0, None) as server:
        with contextlib.closing(ServerGroup([server.address])) as group:
            group.call(0, "server.begin", run="r")
            group.call(0, "server.attend", run="r", wait=0)
        stop.set()
        end = share.wait(stop, linger=timedelta(hours=1))
    assert (end.why, end.finished) == ("stopped during a run whose chief is gone", False)


class Gone(Hook):
    """Is silent from its second step on, as if its process were killed, until the other has noticed."""

    def __init__(self, run: Any, noticed: threading.Event) -> None:
        self._run, self._noticed = run, noticed

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        fleet_of(self._run)._close_listener()
        assert self._noticed.wait(PATIENT)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_worker_that_falls_silent_ends_the_run(tmp_path: Path, gone: int) -> None:
    noticed = threading.Event()

    class Notice(Hook):
        def close(self) -> None:
            noticed.set()

    outcome = run_fleet(
        TASK,
        tmp_path,
        hooks=lambda worker: (lambda run: [Gone(run, noticed)]) if worker == gone else [Notice()],
        lost_after=timedelta(seconds=1),
        news_every=timedelta(seconds=0.1),
        save=SaveConfig(steps=4),
    )
    with pytest.raises(UnavailableError, match=rf"worker {gone}.* was lost: it has been silent for"):
        outcome.report(1 - gone)


def test_fresh_rows_are_refused_where_rows_are_on_servers_and_are_looked_up_ahead(tmp_path: Path) -> None:
    outcome = run_fleet(
        Tallied(), tmp_path, num_workers=1, fresh_rows=True, abandoned_after=timedelta(seconds=1)
    )
    assert isinstance(outcome.workers[0], ConfigError)
    assert "Set train.prefetch to 0" in str(outcome.workers[0])
