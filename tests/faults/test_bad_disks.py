"""What a disk or a person can do to a run: it says what is wrong, and the last good checkpoint goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.trainer_process import Job
from faults.trainers import MakeJob, Trainers, Uninterrupted, check_done, check_listed, error_of, last_state

from monolith.checkpoint import read_checkpoint_state
from monolith.checkpoint.folder.state_files import read_journal
from monolith.errors import CorruptFileError

_PRIVATE = ["unshare", "--map-root-user", "--mount", "--"]
"""Runs a command that may mount, and nobody else sees it; what is mounted goes when the command ends."""


def may_mount() -> bool:
    try:
        return (
            subprocess.run([*_PRIVATE, "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(_PRIVATE if may_mount() else ()) as trainers:
        yield trainers


class Disk:
    """A disk of 8 MiB that only trainers see under its own path, and we see under `path`."""

    def __init__(self, trainers: Trainers, mounted: Path) -> None:
        self._pid = str(trainers.pid)
        self.mounted = mounted
        self.path = Path(f"/proc/{self._pid}/root{mounted}")
        mounted.mkdir()
        self._do("mount", "-t", "tmpfs", "-o", "size=8m", "none", str(mounted))

    def fill(self, room: int) -> None:
        """Leave so many bytes."""
        with (self.path / "ballast").open("wb") as file:
            free = os.statvfs(self.path)
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - room)

    def empty(self) -> None:
        (self.path / "ballast").unlink()

    def forbid_writing(self, folder: str) -> None:
        """Over the folder as it was, so that files that are open do not stand against it."""
        self._do("mount", "--bind", folder, folder)
        self._do("mount", "-o", "remount,bind,ro", folder)

    def allow_writing(self, folder: str) -> None:
        self._do("umount", folder)

    def close(self) -> None:
        self._do("umount", "--lazy", str(self.mounted))

    def _do(self, *command: str) -> None:
        namespace = ["nsenter", "--target", self._pid, "--user", "--preserve-credentials", "--mount"]
        subprocess.run([*namespace, "--", *command], check=True)


@pytest.fixture
def disk(trainers: Trainers, tmp_path: Path) -> Iterator[Disk]:
    if not may_mount():
        pytest.skip("mounting a small disk is not allowed here")
    disk = Disk(trainers, tmp_path / "disk")
    yield disk
    disk.close()


HOW: dict[str, Any] = {"batches": 10, "max_to_keep": 2, "full_every": 3}
FILES = {
    "manifest": r"model\.ckpt-6\.manifest",
    "weights": r"model\.ckpt-6\.dense-.*",
    "optimizer": r"model\.ckpt-6\.optimizer-.*",
    "metrics": r"model\.ckpt-6\.metrics\..*",
    "table": r"user\.manifest",
    "rows": r"user\.[0-9a-f]+-.*",
    "removed": r"user\.removed\.manifest",
    "removed rows": r"user\.removed\.[0-9a-f]+-.*",
    "filter": r"hash_filter_user-00000-.*",
    "empty filter": r"hash_filter_user-00001-.*",
}
"""The files of an increment; of tables there are more."""


@pytest.fixture(scope="module")
def six_steps(trainers: Trainers, make: MakeJob) -> Job:
    job = make(**HOW)
    assert trainers.run(replace(job, batches=6)) == 0
    return job


@pytest.fixture
def begun(six_steps: Job, make: MakeJob) -> Job:
    """A job of which 6 of 10 steps were taken: model.ckpt-2, and its increments 4 and 6, which are listed."""
    job = make(**HOW)
    shutil.copytree(six_steps.notes, job.notes, dirs_exist_ok=True)
    return job


def refuse(trainers: Trainers, job: Job, kind: type[Exception] | str, *words: str) -> None:
    """The run ends with one of our errors, which says what happened to what."""
    assert trainers.run(job) == 1
    check_error(job, kind, *words)


def check_error(job: Job, kind: type[Exception] | str, *words: str) -> None:
    error = error_of(job)
    assert error is not None
    assert (kind if isinstance(kind, str) else kind.__name__) in error["kinds"]
    for word in words:
        assert word in error["text"]


def go_on(trainers: Trainers, job: Job, uninterrupted: Uninterrupted) -> None:
    """The run goes on from its last good checkpoint, and ends as if nothing had happened."""
    assert trainers.run(job) == 0
    check_done(job, trainers, uninterrupted(job))


def content(folder: str) -> dict[str, bytes]:
    """All files of a folder, less those that say who was there."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name not in (".lock", "run.json")
    }


# No room


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_that_may_not_grow_ends_the_run_and_leaves_the_last_checkpoint(
    asynchronous: bool, begun: Job, trainers: Trainers, uninterrupted: Uninterrupted
) -> None:
    job = replace(begun, asynchronous=asynchronous)
    before = content(job.model_dir)
    refuse(trainers, replace(job, file_limit=14_000), "FilesystemError", "model.ckpt-", "ulimit -f")
    after = content(job.model_dir)
    assert {name: after.get(name) for name in before if "journal" not in name} == {
        name: data for name, data in before.items() if "journal" not in name
    }
    go_on(trainers, job, uninterrupted)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("room", [0, 60_000])
def test_training_continues_on_a_full_disk_and_the_first_save_with_room_holds_everything(
    *,
    asynchronous: bool,
    room: int,
    disk: Disk,
    trainers: Trainers,
    make: MakeJob,
    uninterrupted: Uninterrupted,
) -> None:
    how = {**HOW, "batches": 12, "model_dir": str(disk.mounted / "model")}
    job = make(**how, asynchronous=asynchronous, summary_every=1, stops=(3, 9))
    seen = disk.path / "model"
    pid = trainers.start(job)
    assert trainers.wait(pid) == "stopped"
    before = checkpoint_files(seen)
    disk.fill(room)
    os.kill(pid, signal.SIGCONT)
    assert trainers.wait(pid) == "stopped"  # six steps later, of which three were to be saved
    if not asynchronous:  # where one may be written right now
        assert checkpoint_files(seen) == before, "half of a checkpoint is in the way"
    check_listed(str(seen))
    disk.empty()
    os.kill(pid, signal.SIGCONT)
    assert trainers.wait(pid) == 0
    # Rows expire with each save, which came at other steps than in a run without trouble.
    done = replace(job, model_dir=str(seen), asynchronous=True, stops=())
    check_done(done, trainers, uninterrupted(done))


def checkpoint_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("*ckpt*/**/*")} | {
        path.name for path in folder.glob("*ckpt*")
    }


def test_a_disk_that_stays_full_ends_the_run_and_leaves_the_last_checkpoint(
    disk: Disk, trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    job = make(**HOW, model_dir=str(disk.mounted / "model"))
    disk.fill(room=350_000)
    refuse(
        trainers,
        job,
        "TransientFilesystemError",
        *(job.model_dir, "The disk is full", "for 0.5 s at its end", "start the run again"),
    )
    check_listed(str(disk.path / "model"))
    state = read_checkpoint_state(str(disk.path / "model"))
    assert state is not None
    disk.empty()
    assert trainers.run(job) == 0
    seen = replace(job, model_dir=str(disk.path / "model"))
    check_done(seen, trainers, uninterrupted(job))


def test_a_disk_without_any_room_is_said_at_the_start(disk: Disk, trainers: Trainers, make: MakeJob) -> None:
    disk.fill(room=0)
    job = make(**HOW, model_dir=str(disk.mounted / "model"))
    refuse(trainers, job, "FilesystemError", job.model_dir, "The disk is full")


# No writing


def test_a_folder_that_becomes_read_only_ends_the_run_and_leaves_the_last_checkpoint(
    disk: Disk, trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    job = make(**HOW, model_dir=str(disk.mounted / "model"))
    pid = trainers.start(replace(job, strike=(signal.SIGSTOP, "step", 7)))
    assert trainers.wait(pid) == "stopped"
    before = content(str(disk.path / "model"))
    disk.forbid_writing(job.model_dir)
    os.kill(pid, signal.SIGCONT)
    assert trainers.wait(pid) == 1
    check_error(job, "FilesystemError", job.model_dir, "mounted read-only")
    refuse(trainers, job, "FilesystemError", job.model_dir, "mounted read-only")
    assert content(str(disk.path / "model")) == before
    disk.allow_writing(job.model_dir)
    assert trainers.run(job) == 0
    seen = replace(job, model_dir=str(disk.path / "model"))
    check_done(seen, trainers, uninterrupted(job))


# Somebody deletes


def test_a_checkpoint_deleted_under_a_run_does_not_stop_it(
    trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    job = make(**{**HOW, "full_every": 1})
    pid = trainers.start(replace(job, strike=(signal.SIGSTOP, "step", 7)))
    assert trainers.wait(pid) == "stopped"
    delete(job, 6)
    os.kill(pid, signal.SIGCONT)
    assert trainers.wait(pid) == 0
    check_done(job, trainers, uninterrupted(job))


def test_a_checkpoint_deleted_under_a_run_that_builds_upon_it_is_missed_by_name(
    trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    job = make(**{**HOW, "full_every": 4})
    pid = trainers.start(replace(job, strike=(signal.SIGSTOP, "step", 5)))
    assert trainers.wait(pid) == "stopped"
    delete(job, 4)
    os.kill(pid, signal.SIGCONT)
    assert trainers.wait(pid) == 1
    check_error(job, "FileMissingError", "model.ckpt-6", "needs", "model.ckpt-4", "gone")
    go_on(trainers, job, uninterrupted)  # from step 2


def test_a_chain_that_lost_its_base_is_refused_by_name_until_it_is_brought_back(
    begun: Job, trainers: Trainers, uninterrupted: Uninterrupted
) -> None:
    manifest = Path(begun.model_dir) / "model.ckpt-2.manifest"
    aside = manifest.rename(Path(begun.notes) / manifest.name)
    refuse(trainers, begun, "RestoreError", "model.ckpt-6", "model.ckpt-2", "copy the missing one back")
    aside.rename(manifest)
    go_on(trainers, begun, uninterrupted)


# Something is not what it was


def flip(path: Path, whole: bytes, at: int) -> None:
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])


def file_of(kind: str, job: Job) -> Path:
    (path,) = (path for path in files_of(job, 6) if re.fullmatch(FILES[kind], path.name))
    return path


@pytest.mark.parametrize("kind", FILES)
def test_a_flipped_bit_is_refused_by_the_name_of_its_file(kind: str, begun: Job, trainers: Trainers) -> None:
    path = file_of(kind, begun)
    whole = path.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        flip(path, whole, at)
        before = content(begun.model_dir)
        refuse(trainers, begun, "MonolithError", str(path))
        assert content(begun.model_dir) == before


def test_the_run_resumes_from_the_previous_checkpoint_if_every_file_of_the_last_is_damaged(
    begun: Job, trainers: Trainers, uninterrupted: Uninterrupted
) -> None:
    for kind in FILES:
        path = file_of(kind, begun)
        flip(path, whole := path.read_bytes(), len(whole) // 2)
    go_on(trainers, replace(begun, checkpoint="model.ckpt-4"), uninterrupted)


def test_every_kind_of_file_of_a_checkpoint_is_tried(begun: Job) -> None:
    alike = re.compile("user|item|context|tally")
    names = {alike.sub("user", path.name) for path in files_of(begun, 6)}
    names = {re.sub("-0000[2-6]-of-00007", "-00001-of-00007", name) for name in names}
    unknown = {name for name in names if not any(re.fullmatch(one, name) for one in FILES.values())}
    assert unknown == {"ckpt.info-6"}  # counts for people; nothing is restored from it


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint.journal", "run.json"])
def test_a_torn_file_is_refused_by_its_name_and_nothing_is_touched(
    name: str, begun: Job, trainers: Trainers, uninterrupted: Uninterrupted
) -> None:
    path = Path(begun.model_dir) / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    before = content(begun.model_dir)
    refuse(trainers, begun, CorruptFileError, str(path))
    assert content(begun.model_dir) == before
    path.write_bytes(whole)
    go_on(trainers, begun, uninterrupted)


@pytest.mark.parametrize("name", ["checkpoint.journal", "run.json"])
def test_a_torn_file_may_be_moved_away(
    name: str, begun: Job, trainers: Trainers, uninterrupted: Uninterrupted
) -> None:
    (Path(begun.model_dir) / name).unlink()
    assert trainers.run(begun) == 0
    check_listed(begun.model_dir)
    assert last_state(begun) == last_state(uninterrupted(begun))


def test_without_its_journal_a_run_still_keeps_what_its_increments_need(
    begun: Job, trainers: Trainers
) -> None:
    (Path(begun.model_dir) / "checkpoint.journal").unlink()
    assert trainers.run(replace(begun, batches=8)) == 0  # saves a full one, and lists 6 and 8
    check_listed(begun.model_dir)


def test_a_state_file_torn_at_any_byte_is_refused_or_names_the_right_checkpoint(
    begun: Job, tmp_path: Path
) -> None:
    whole = (Path(begun.model_dir) / "checkpoint").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "checkpoint").write_bytes(whole[:length])
        try:
            state = read_checkpoint_state(str(tmp_path), sleep=lambda _: None)
        except CorruptFileError:
            continue
        assert state is not None
        assert state.model_checkpoint_path.endswith("model.ckpt-6")


def test_a_journal_torn_at_any_byte_is_refused(begun: Job, tmp_path: Path) -> None:
    whole = (Path(begun.model_dir) / "checkpoint.journal").read_bytes()
    for length in range(len(whole) - 1):  # without its last newline it still says everything
        (tmp_path / "checkpoint.journal").write_bytes(whole[:length])
        with pytest.raises(CorruptFileError, match=r"checkpoint\.journal"):
            read_journal(str(tmp_path))


# Somebody else is there


def test_a_second_run_is_refused_by_the_process_that_holds_the_folder_and_starts_once_that_is_killed(
    trainers: Trainers, make: MakeJob, uninterrupted: Uninterrupted
) -> None:
    job = make(**HOW)
    second = replace(job, notes=make().notes)
    pid = trainers.start(replace(job, strike=(signal.SIGSTOP, "step", 7)))
    assert trainers.wait(pid) == "stopped"
    before = content(job.model_dir)
    refuse(trainers, second, "ModelDirLockedError", job.model_dir, f"process {pid} ")
    assert content(job.model_dir) == before
    os.kill(pid, signal.SIGKILL)
    assert trainers.wait(pid) == -signal.SIGKILL
    go_on(trainers, job, uninterrupted)


def files_of(job: Job, step: int) -> list[Path]:
    found = [path for path in Path(job.model_dir).rglob("*") if path.is_file()]
    return [path for path in found if re.search(rf"(ckpt|info)-{step}(\.|$|/)", str(path))]


def delete(job: Job, step: int) -> None:
    for path in Path(job.model_dir).glob(f"model.ckpt-{step}.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
