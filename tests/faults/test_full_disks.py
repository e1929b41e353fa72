"""A disk that is full for a while, under `monolith train`: it trains on, says so, and loses nothing.

Each run has its model_dir on a small disk of its own, which a test fills and empties. `test_bad_disks` does
the same to a trainer without the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.fleet_processes import LIMIT, FleetProcesses, LaunchedFleet, LaunchedRanks
from serve.served_tasks import SPEC, Served, columns
from services import warm
from sync.tables import held, make_table, write

from monolith.cli.main import main
from monolith.cli.status import is_well, totals
from monolith.cluster.status import JobStatus, ProcessStatus, StatusBoard
from monolith.data import FileSource, Pipeline, Stream, format_of
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.errors import DataError, TransientFilesystemError
from monolith.feature import Batch
from monolith.observe import Metrics
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import exports_when_saving
from monolith.serve.versions import list_versions
from monolith.sync import Publisher, PublisherConfig, Subscriber, TableTarget
from monolith.sync.folder_channel import FolderDeltaReader, FolderDeltaWriter
from monolith.train import Hook, Mode, SaveConfig, StepResult, TrainConfig, TrainingRun

ENDS_WITHIN = 10.0
"""Seconds from a SIGTERM, with the settings that a run has by default."""
RETRYING = ("--train.save.retry-secs", "0.1", "--train.save.max-failures", "1000")


class SmallDisk:
    """A disk in memory; what is on it goes with it."""

    def __init__(self, path: Path, mebibytes: int = 24) -> None:
        path.mkdir()
        self.path = path
        size = f"size={mebibytes}m"
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "none", str(path)], check=False, capture_output=True
        )
        if made.returncode:
            pytest.skip(f"mounting a small disk is not allowed here: {made.stderr.decode().strip()}")

    def fill(self, room: int = 0) -> None:
        """Leave so many bytes."""
        with (self.path / "ballast").open("ab") as file:
            while (left := self._free() - room) >= 4096:
                with contextlib.suppress(OSError):  # a run may have taken the last block since
                    os.posix_fallocate(file.fileno(), file.tell(), left)
                file.seek(0, os.SEEK_END)

    def _free(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def empty(self) -> None:
        (self.path / "ballast").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    (disk.path / "output.txt").symlink_to(tmp_path / "output.txt")  # what a run says must find room
    yield disk
    disk.close()


class WatchedRun(FleetProcesses):
    """What all runs of this module have: a slow task, saved often, on a small disk."""

    @property
    def task(self) -> list[str]:
        return ["runtime.fleets:TalliedSlowly"]

    @property
    def job(self) -> JobStatus:
        return StatusBoard(str(self.model_dir)).read()

    @property
    def chief(self) -> ProcessStatus:
        found: list[ProcessStatus] = []

        def reads() -> bool:
            found[:] = [one for one in self.job.processes if one.name == "worker 0"]
            return bool(found)

        self.wait_for(reads, "the status of the chief")  # it may be torn for a moment
        return found[0]

    def wait_for_failures(self, number: int) -> None:
        self.wait_for(lambda: self.output.count("Training continues") >= number, f"{number} failed saves")

    def wait_for_steps(self, number: int) -> None:
        step = self.chief.step or 0
        self.wait_for(lambda: (self.chief.step or 0) >= step + number, f"{number} more steps")

    def wait_for_end(self, process: warm.Popen) -> int:
        self.wait_for(lambda: process.poll() is not None, "the end", 2 * LIMIT)
        return int(process.returncode)


class OneProcess(WatchedRun):
    SHAPE = ()
    members: Any = ()

    def __init__(self, folder: Path, batches: int, *flags: str) -> None:
        super().__init__(folder, batches, *RETRYING, *flags)
        self.process = self.begin()

    def begin(self) -> warm.Popen:
        command = [word for word in self.command() if word != "--quiet"]
        self.process = self.start([*command, "--metrics-port", "0"])
        return self.process

    def shown(self) -> str:
        """What its port shows on /metrics."""
        with urllib.request.urlopen(self.chief.metrics, timeout=10) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        super().close()


def test_a_run_trains_on_says_so_and_its_next_save_holds_every_record(disk: SmallDisk) -> None:
    with OneProcess(disk.path, 300) as run:
        run.wait_for_another_checkpoint()
        disk.fill()
        run.wait_for_failures(2)
        run.wait_for(lambda: run.chief.save_trouble, "the trouble in the status")
        trouble, shown = run.chief.save_trouble, run.shown()
        assert re.search(r"attempt \d+ of 1000, .* free: cannot write .* The disk is full", trouble)
        assert not is_well(run.job)
        assert totals(run.job)
        failures = re.search(r'monolith_save_checkpoint_failures_in_a_row{mode="full"} (\d+)', shown)
        assert failures is not None
        assert int(failures[1]) >= 1
        assert 'monolith_save_checkpoint_age_seconds{mode="full"}' in shown
        run.wait_for_steps(20)
        disk.empty()
        run.wait_for_another_checkpoint()
        run.wait_for(lambda: not run.chief.save_trouble, "the end of the trouble in the status")
        os.kill(run.process.pid, signal.SIGKILL)  # ours: what counts now is what is on the disk
        run.process.wait()
        assert run.wait_for_end(run.begin()) == 0
        run.check_every_record_was_trained_once()


def test_a_run_that_cannot_save_its_end_says_what_is_missing_and_resumes_from_what_is_there(
    disk: SmallDisk,
) -> None:
    with OneProcess(disk.path, 200) as run:
        run.wait_for_another_checkpoint()
        disk.fill()
        run.wait_for_failures(1)
        os.kill(run.process.pid, signal.SIGTERM)
        stopped = time.monotonic()
        assert run.wait_for_end(run.process) == 2
        assert time.monotonic() - stopped < ENDS_WITHIN
        assert "without a checkpoint of it" in run.output
        assert "start the run again: it resumes from there" in run.output
        disk.empty()
        assert run.wait_for_end(run.begin()) == 0
        run.check_every_record_was_trained_once()


def test_too_many_failures_in_a_row_end_the_run(disk: SmallDisk) -> None:
    with OneProcess(disk.path, 1000, "--train.save.max-failures", "3") as run:
        run.wait_for_another_checkpoint()
        disk.fill()
        assert run.wait_for_end(run.process) == 2
        assert "saving failed 3 times in a row (save.max_failures)" in run.output


class WatchedFleet(WatchedRun, LaunchedFleet): ...


class WatchedRanks(WatchedRun, LaunchedRanks): ...


@pytest.mark.soak
@pytest.mark.parametrize("kind", [WatchedFleet, WatchedRanks])
def test_a_server_or_rank_that_cannot_write_its_shard_fails_the_save_and_not_the_run(
    kind: type[WatchedFleet | WatchedRanks], disk: SmallDisk
) -> None:
    with kind(disk.path, 600, *RETRYING) as run:
        run.wait_for_another_checkpoint()
        disk.fill()
        run.wait_for_failures(2)
        run.wait_for_steps(20)
        disk.empty()
        run.wait_for_another_checkpoint()
        run.finish()
        run.check_every_record_was_trained_once()
    assert "restart" not in run.output


def test_a_publisher_keeps_changed_rows_while_its_folder_has_no_room_and_subscribers_end_equal(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(disk.path / "log")
    table, copy, numbers = make_table(dim=8), make_table(dim=8), random.Random(7)
    publisher = Publisher(
        {"item": table},
        FolderDeltaWriter(folder, check_every=0.05),
        PublisherConfig(run="run", interval=0.01),
    )
    subscriber = Subscriber(
        lambda: FolderDeltaReader(folder, poll_every=0.01), TableTarget({"item": copy}), wait=0.1
    )

    def change() -> None:
        write(table, {numbers.randrange(5000): numbers.random() for _ in range(200)})

    with contextlib.closing(publisher), contextlib.closing(subscriber):
        publisher.start()
        subscriber.start()
        until(lambda: bool(subscriber.progress), change)
        disk.fill()
        until(lambda: bool(publisher.trouble), change)
        for _ in range(10):
            change()
        table.remove(torch.tensor(list(held(table))[:50]))
        assert "The disk is full" in publisher.trouble
        # One line when publishing fails; a small delta may still fit in between, and then fail again.
        assert 1 <= caplog.text.count("changed rows are collected") <= 3
        disk.empty()
        until(lambda: not publisher.trouble)
        change()
        assert publisher.flush()
        until(lambda: held(copy) == held(table))


def test_a_failed_export_leaves_no_half_version_and_the_next_save_exports_again(
    disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = disk.path / "to"
    config = TrainConfig(
        model_dir=str(tmp_path / "run"), steps=6, summary_every_steps=None, save=SaveConfig(steps=2)
    )

    class Fill(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            if run.step == 3:
                disk.fill(room=20_000)
            if run.step == 5:
                seen.append(listener.trouble)
                assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["2"]
                disk.empty()

    seen: list[str] = []
    with exports_when_saving(Served(), config, ExportConfig(when_saving=True, dir=str(folder))) as listeners:
        (listener,) = listeners
        Trainer(Served(), config, listeners=listeners, hooks=[Fill()]).train()
    assert "step 4 is saved, and not exported" in seen[0]
    assert "The disk is full" in seen[0]
    assert listener.trouble == ""
    assert list_versions(str(folder)) == ["2", "6"]
    assert "the next save is exported again" in caplog.text


class After(Hook):
    """Does something once, after a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if run.step == self.step:
            self.act()


@pytest.mark.parametrize("space_returns", [True, False])
def test_the_export_of_the_last_save_is_retried_and_its_failure_is_in_the_report(
    disk: SmallDisk, tmp_path: Path, space_returns: bool
) -> None:
    folder = disk.path / "to"
    save = SaveConfig(steps=2, last_secs=60 if space_returns else 0.3)
    config = TrainConfig(model_dir=str(tmp_path / "run"), steps=4, summary_every_steps=None, save=save)
    with exports_when_saving(Served(), config, ExportConfig(when_saving=True, dir=str(folder))) as listeners:
        (listener,) = listeners
        returns = threading.Thread(target=lambda: (until(lambda: bool(listener.trouble)), disk.empty()))

        def fill() -> None:
            disk.fill(room=20_000)
            if space_returns:
                returns.start()

        report = Trainer(Served(), config, listeners=listeners, hooks=[After(3, fill)]).train()
    if space_returns:
        returns.join()
        assert (list_versions(str(folder)), report.save_trouble) == (["2", "4"], "")
    else:
        assert list_versions(str(folder)) == ["2"]
        assert "step 4 is saved, and not exported to" in report.save_trouble
        assert "The disk is full" in report.save_trouble


def test_a_run_whose_last_export_failed_says_so_in_its_last_line_and_exits_with_2(
    disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.fill()
    command = ["train", "serve.served_tasks:Served", "--model-dir", str(tmp_path / "run"), "--steps", "2"]
    command += ["--export.when-saving", "--export.dir", str(disk.path / "to"), "--train.save.last-secs", "0"]
    assert main([*command, "--no-summaries", "--json"]) == 2
    shown = capsys.readouterr()
    last = shown.err.splitlines()[-1]
    assert last.startswith("monolith: the run ended, and step 2 is saved, and not exported to")
    assert "The disk is full" in last
    report = json.loads(shown.out)
    assert report["checkpoint"].endswith("model.ckpt-2")
    assert report["save_trouble"] in last
    disk.empty()  # what was saved can be exported at any time
    assert main(["export", "--task", command[1], *command[2:4], "--to", str(disk.path / "to")]) == 0


# A queue of files


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Time:
    return Time()


def queue_on(disk: SmallDisk, clock: Time) -> SharedFileQueue:
    lease = timedelta(seconds=60)
    return SharedFileQueue(str(disk.path / "queue"), lease=lease, clock=clock, timer=clock, pause=clock.sleep)


def test_a_queue_keeps_what_workers_say_while_its_disk_is_full_and_writes_it_when_there_is_room(
    disk: SmallDisk, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = queue_on(disk, clock), queue_on(disk, clock)
    mine.add(["a", "b", "c", "d", "e"])
    a, b, c, theirs = mine.take("w"), mine.take("w"), mine.take("w"), other.take("v")
    assert a and b and c and theirs  # noqa: PT018 - for the types
    disk.fill()
    assert mine.finish(a)
    assert mine.report(b, {"record": 7})
    mine.give_back(c)
    with pytest.raises(TransientFilesystemError, match="cannot be written"):
        mine.take("w")
    for _ in range(12):  # two minutes, in which no lease of a minute can be renewed on disk
        clock.sleep(10)
        renewed, held = mine.renew(b), other.renew(theirs)
        assert renewed and held  # noqa: PT018
        b, theirs = renewed, held
    assert "The disk is full" in mine.trouble
    assert caplog.text.count("Training continues with the files") == 2, "once for each worker"
    disk.empty()
    clock.sleep(2)
    mine.flush()
    assert (mine.trouble, mine.unwritten) == ("", 0)
    again = other.take("v")
    assert again is not None
    assert again.path == "c", "what was given back comes first"
    found = queue_on(disk, clock).state()
    assert found["waiting"] == [[1, "b", {"record": 7}], [2, "c", {}], [3, "d", {}]], "and a is finished"
    assert other.renew(theirs) is not None, "no lease ran out meanwhile"


def test_a_queue_that_stays_full_is_an_error_after_a_bound_and_a_worker_that_ends_says_what_follows(
    disk: SmallDisk, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queue_on(disk, clock)
    queue.add(["a", "b"])
    assert queue.take("w") is not None
    lease = queue.take("v")
    assert lease is not None
    disk.fill()
    queue.release("w")
    began = clock.now
    queue.flush()
    assert clock.now - began <= 3
    assert "The files of this worker are leased again when its leases expire" in caplog.text
    for _ in range(34):
        clock.sleep(60)
        assert queue.report(lease, {"record": 1}), "it is kept"
    clock.sleep(60)
    with pytest.raises(DataError, match=r"retried for 2\d\d\d s. Make room there and start the run again"):
        queue.report(lease, {"record": 1})


def test_a_run_trains_on_while_the_queue_of_its_files_is_on_a_full_disk(
    disk: SmallDisk, tmp_path: Path
) -> None:
    for number in range(4):
        rows = columns(160, seed=number)
        lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    queue = SharedFileQueue(str(disk.path / "queue"))
    queue.add(sorted(map(str, tmp_path.glob("*.jsonl"))))
    metrics, shown = Metrics(), []

    def empty() -> None:
        until(lambda: bool(queue.trouble))
        shown.append(metrics.render().decode())
        disk.empty()

    empties = threading.Thread(target=empty)

    def fill() -> None:
        disk.fill()
        empties.start()

    class FromQueue(Served):
        def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
            return Pipeline(FileSource(queue, format_of("a.jsonl"), batch_size=16)).to_batches(SPEC)

    config = TrainConfig(model_dir=str(tmp_path / "run"), summary_every_steps=None, save=SaveConfig(steps=2))
    report = Trainer(FromQueue(), config, hooks=[After(5, fill)], metrics=metrics).train()
    empties.join()
    assert "monolith_data_trouble 1.0" in shown[0]
    assert "monolith_data_trouble 0.0" in metrics.render().decode()
    assert (report.examples, report.finished) == (640, True)
    ((_, path, reached),) = queue.state()["waiting"]  # all files are finished, or were read to their end
    assert reached["place"] == Path(path).stat().st_size


def until(condition: Callable[[], bool], act: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        act()
        time.sleep(0.02)
