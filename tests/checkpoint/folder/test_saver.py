"""The saver when things go wrong; what it does when they do not is in contracts/test_saver.py."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from contracts.savers import FakeClock, names, put, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from services import warm
from services.properties import tries

from monolith import filesystem
from monolith.checkpoint.folder.saver import (
    MANIFEST,
    CheckpointNaming,
    Saver,
    checkpoint_exists,
    require_checkpoint,
)
from monolith.checkpoint.folder.state_files import (
    CheckpointState,
    CkptInfo,
    SaveNames,
    TableKind,
    load_monolith_checkpoint,
    read_checkpoint_state,
    read_ckpt_info,
    read_journal,
    write_checkpoint_state,
    write_ckpt_info,
)
from monolith.errors import ConfigError, CorruptFileError, FilesystemError, RestoreError
from monolith.filesystem.backends import LocalBackend


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"{tmp_path}/run"


def saver_of(folder: str, *, clock: Callable[[], float] = FakeClock(1000.0), **options: Any) -> Saver:  # noqa: B008
    names = {one.name: options.pop(one.name) for one in fields(CheckpointNaming) if one.name in options}
    how = {"keep_every": None, "clock": clock, "naming": CheckpointNaming(**names)}
    return Saver(folder, **(how | options))


def write_little(prefix: str) -> None:
    put(f"{prefix}.data")
    put(f"{prefix}{MANIFEST}")


def steps_on_disk(folder: str) -> set[int]:
    """The steps of which anything is left."""
    found = {name.removeprefix("model.ckpt-").partition(".")[0] for name in names(folder) if "ckpt-" in name}
    return set(map(int, found))


def listed_steps(folder: str) -> list[int]:
    state = read_checkpoint_state(folder)
    if state is None:
        return []
    for path in state.all_model_checkpoint_paths:
        assert checkpoint_exists(path), "what is listed is there"
    return [int(path.rpartition("-")[2]) for path in state.all_model_checkpoint_paths]


# Killed


class Killed(BaseException):
    """The process ends here; nobody catches it."""


@contextmanager
def killed_at(operation: int | None) -> Iterator[Callable[[], int]]:
    """Let the process die before the n-th change of the disk, or never."""
    done = 0

    def dying(honest: Any) -> Any:
        def change(self: LocalBackend, *paths: str) -> Any:
            nonlocal done
            done += 1
            if operation is not None and done >= operation:  # nor does a dead one change anything after it
                raise Killed
            return honest(self, *paths)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create", "rename", "remove_file", "remove_tree", "make_dirs"):
            patch.setattr(LocalBackend, name, dying(getattr(LocalBackend, name)))
        patch.setattr(os, "fsync", lambda _: None)  # a process dies here, not the machine; and there are many
        yield lambda: done


def dying_at(path: str) -> Any:
    """A rename that dies instead of giving this name."""
    honest = LocalBackend.rename

    def rename(self: LocalBackend, source: str, target: str) -> None:
        if target == path:
            raise Killed
        honest(self, source, target)

    return rename


NEEDS = {2: [1], 3: [2], 5: [4], 6: [5], 7: [4]}
"""Which checkpoints are incremental, and upon which they build."""
LAST = 8


def train(folder: str) -> None:
    """A run that goes on from whatever it finds, and ends with the same step in the end."""
    clock = FakeClock()
    state = read_checkpoint_state(folder)
    saver = saver_of(folder, clock=clock, max_to_keep=2, keep_every=timedelta(seconds=25))
    saver.recover()
    reached = 0 if state is None else saver.names.step_of(state.model_checkpoint_path)
    for step in range(reached + 1, LAST + 1):
        clock.now = step * 10.0
        saver.save(step, write_little, depends_on=[saver.names.prefix(need) for need in NEEDS.get(step, [])])


def check_what_is_left(folder: str) -> None:
    pending = listed_steps(folder)
    while pending:
        step = pending.pop()
        assert checkpoint_exists(f"{folder}/model.ckpt-{step}"), f"{step} is needed"
        pending += NEEDS.get(step, [])
    if filesystem.exists(f"{folder}/monolith_checkpoint"):
        load_monolith_checkpoint(folder)


def whole(folder: str) -> list[str]:
    """What is in a folder, less what a kill leaves of a file that never got its name."""
    return [name for name in names(folder) if not filesystem.is_temporary(name)]


def undisturbed(folder: str) -> tuple[list[str], int]:
    with killed_at(None) as count:
        train(folder)
        return whole(folder), count()


def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    expected, operations = undisturbed(f"{tmp_path}/undisturbed")
    assert operations > 100
    for operation in range(1, operations + 1):
        folder = f"{tmp_path}/{operation}"
        with pytest.raises(Killed), killed_at(operation):
            train(folder)
        Path(folder).mkdir(exist_ok=True)
        check_what_is_left(folder)
        with killed_at(None):
            train(folder)
        assert whole(folder) == expected, f"killed at change {operation} of the disk"


@settings(max_examples=tries(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 60), max_size=12))
def test_killed_again_and_again_it_still_does(kills: list[int]) -> None:
    with TemporaryDirectory() as tmp_path:
        expected, _ = undisturbed(f"{tmp_path}/undisturbed")
        folder = f"{tmp_path}/run"
        Path(folder).mkdir()
        for operation in kills:
            try:
                with killed_at(operation):
                    train(folder)
            except Killed:
                check_what_is_left(folder)
        with killed_at(None):
            train(folder)
        assert whole(folder) == expected


def test_what_was_being_written_when_it_was_killed_is_removed(folder: str) -> None:
    """The next run may save other steps, and never meet that one again."""
    saver_of(folder).save(1, write_checkpoint)

    def write_half(prefix: str) -> None:
        put(f"{prefix}.dense-00000-of-00002")
        put(f"{prefix}.assets/item")
        raise Killed

    with pytest.raises(Killed):
        saver_of(folder).save(5, write_half)
    assert steps_on_disk(folder) == {1, 5}
    saver = saver_of(folder)
    saver.recover()
    assert steps_on_disk(folder) == {1}
    assert listed_steps(folder) == [1]


def test_files_that_never_got_their_names_are_removed_if_no_writer_can_be_running(folder: str) -> None:
    saver_of(folder).save(5, write_checkpoint)
    random = "-tmp-0123456789ab"
    left = [
        f"checkpoint{random}",
        f"checkpoint.journal{random}",
        f"monolith_checkpoint{random}",
        f"best_checkpoint{random}",
        f"ckpt.info-5{random}",
        f"model.ckpt-5.manifest{random}",
        f"model.ckpt-5.assets/hash_filter_item-00000-of-00007{random}",
        f"model.ckpt-5.assets/ps-0-of-2/item.manifest{random}",
    ]
    others = [
        f"model.ckpt-6.assets/ps-0-of-2/item.manifest{random}",  # a server may be at it
        f"model.ckpt-55.manifest{random}",
        f"input_worker_3.ckpt-5{random}",
        f"checkpoint_dense{random}",
        f"notes.txt{random}",
        "model.ckpt-5.notes-tmp-mine",
    ]
    for name in (*left, *others):
        put(f"{folder}/{name}")
    saver_of(folder).recover()
    there = {str(path.relative_to(folder)) for path in Path(folder).rglob("*-tmp-*")}
    assert there == set(others)
    assert listed_steps(folder) == [5]


def test_a_failed_cleanup_does_not_stop_the_run(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    saver_of(folder).save(5, write_checkpoint)
    left = put(f"{folder}/checkpoint-tmp-0123456789ab")
    patch = refuse("remove_file", errno.EACCES, "-tmp-")
    saver_of(folder).recover()
    patch.undo()
    assert f"unfinished checkpoints: cannot remove {left}" in caplog.text
    assert listed_steps(folder) == [5]


def test_an_old_checkpoint_that_was_being_written_again_is_not_removed(folder: str) -> None:
    saver_of(folder).save(1, write_checkpoint)

    def die(_: str) -> None:
        raise Killed

    saver = saver_of(folder)  # knows nothing of 1
    saver.save(2, write_checkpoint)
    with pytest.raises(Killed):
        saver.save(1, die)
    saver = saver_of(folder)
    saver.recover()
    saver.save(3, write_checkpoint)
    assert steps_on_disk(folder) == {1, 2, 3}


def complete_names(folder: str) -> set[str]:
    return {name.removesuffix(MANIFEST) for name in names(folder) if name.endswith(MANIFEST)}


def test_the_only_checkpoint_stays_while_its_step_is_saved_again(folder: str) -> None:
    def die(prefix: str) -> None:
        assert prefix == f"{folder}/model.ckpt.2-1"
        put(f"{prefix}.data")
        raise Killed

    saver_of(folder, max_to_keep=1).save(1, write_checkpoint)
    before = {
        name: (Path(folder) / name).read_bytes()
        for name in names(folder)
        if name.startswith("model") and (Path(folder) / name).is_file()
    }
    saver = saver_of(folder, max_to_keep=1)
    saver.recover()
    with pytest.raises(Killed):
        saver.save(1, die)
    assert listed_steps(folder) == [1]
    saver = saver_of(folder, max_to_keep=1)
    saver.recover()
    assert complete_names(folder) == {"model.ckpt-1"}
    assert not (Path(folder) / "model.ckpt.2-1.data").exists()
    for name, content in before.items():
        assert (Path(folder) / name).read_bytes() == content
    assert saver.save(1, write_checkpoint) == f"{folder}/model.ckpt.2-1"
    assert complete_names(folder) == {"model.ckpt.2-1"}
    assert saver.find(1) == f"{folder}/model.ckpt.2-1"
    assert saver.save(1, write_checkpoint) == f"{folder}/model.ckpt-1", "the name is free again"


@pytest.mark.parametrize("exempt", ["model.ckpt-2", "model.ckpt-3"])
def test_an_exempt_checkpoint_and_what_it_continues_stay_though_their_steps_are_saved_again(
    folder: str, exempt: str
) -> None:
    saver = saver_of(folder, max_to_keep=3)
    saver.save(1, write_checkpoint)
    saver.save(2, write_checkpoint, depends_on=[f"{folder}/model.ckpt-1"])
    saver.save(3, write_checkpoint, depends_on=[f"{folder}/model.ckpt-1", f"{folder}/model.ckpt-2"])
    put(f"{folder}/monolith_checkpoint", f'exempt_model_checkpoint_paths: "{exempt}"')
    for step in (1, 2, 3, 4):  # rolled back to before 1
        saver.save(step, write_checkpoint)
    kept = {"model.ckpt-1", "model.ckpt-2", exempt}
    assert complete_names(folder) == {"model.ckpt.2-2", "model.ckpt.2-3", "model.ckpt-4"} | kept
    assert saver.find(3) == f"{folder}/model.ckpt.2-3"
    put(f"{folder}/monolith_checkpoint", "")
    saver.save(5, write_checkpoint)
    assert complete_names(folder) == {"model.ckpt.2-3", "model.ckpt-4", "model.ckpt-5"}


def test_the_counts_of_a_step_that_is_saved_again_are_files_of_their_own(folder: str) -> None:
    def write(prefix: str) -> None:
        number = SaveNames.number_of(prefix)
        write_ckpt_info(folder, 1, CkptInfo({}, {"item": number}), number)
        write_checkpoint(prefix)

    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write)
    saver.save(1, write)
    assert read_ckpt_info(folder, 1, 2).feature_counts == {"item": 2}
    assert "ckpt.info-1" not in names(folder)
    saver.save(2, write_checkpoint)
    assert "ckpt.info.2-1" not in names(folder)


def test_one_kept_for_good_that_was_being_listed_again_still_has_what_it_needs(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saver_at(now: float) -> Saver:
        saver = saver_of(folder, clock=FakeClock(now), max_to_keep=1, keep_every=timedelta(seconds=10))
        saver.recover()
        return saver

    saver_at(0.0).save(1, write_checkpoint)
    saver_at(11.0).save(2, write_checkpoint, depends_on=[f"{folder}/model.ckpt-1"])
    saver_at(12.0).save(3, write_checkpoint)
    assert steps_on_disk(folder) == {1, 2, 3}
    monkeypatch.setattr(LocalBackend, "rename", dying_at(f"{folder}/checkpoint"))
    with pytest.raises(Killed):
        saver_at(13.0).save(2, write_checkpoint, depends_on=[f"{folder}/model.ckpt-1"])
    monkeypatch.undo()
    saver_at(14.0).save(4, write_checkpoint)
    assert steps_on_disk(folder) == {1, 2, 4}


def test_a_second_try_that_is_killed_leaves_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wrote all of the data and could not list it; the second dies there too."""
    saver = saver_of(folder)
    saver.save(1, write_checkpoint)
    patch = refuse("create", errno.ENOSPC, "/checkpoint-tmp")
    with pytest.raises(FilesystemError):
        saver.save(2, write_checkpoint)
    patch.undo()
    monkeypatch.setattr(LocalBackend, "rename", dying_at(f"{folder}/checkpoint"))
    with pytest.raises(Killed):
        saver.save(2, write_checkpoint)
    monkeypatch.undo()
    saver_of(folder).recover()
    assert steps_on_disk(folder) == {1}


def test_a_deletion_that_is_planned_is_not_done_while_the_state_file_lists_the_checkpoint(
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write_checkpoint)
    monkeypatch.setattr(LocalBackend, "rename", dying_at(f"{folder}/checkpoint"))
    with pytest.raises(Killed):
        saver.save(2, write_checkpoint)
    monkeypatch.undo()
    assert f"{folder}/model.ckpt-1" in read_journal(folder).released
    saver = saver_of(folder, max_to_keep=1)
    saver.recover()
    assert listed_steps(folder) == [1]
    assert steps_on_disk(folder) == {1}


def test_a_planned_deletion_waits_if_the_checkpoint_was_exempted_meanwhile(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write_checkpoint)

    def die(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(LocalBackend, "remove_file", die)
    with pytest.raises(Killed):
        saver.save(2, write_checkpoint)
    monkeypatch.undo()
    put(f"{folder}/monolith_checkpoint", 'exempt_model_checkpoint_paths: "model.ckpt-1"')
    saver = saver_of(folder, max_to_keep=1)
    saver.recover()
    saver.save(3, write_checkpoint)
    assert steps_on_disk(folder) == {1, 3}
    put(f"{folder}/monolith_checkpoint", "")
    saver = saver_of(folder, max_to_keep=1)
    saver.recover()
    assert steps_on_disk(folder) == {3}


def test_what_is_in_no_list_is_never_touched(folder: str) -> None:
    for step in (1, 2):
        write_checkpoint(f"{folder}/model.ckpt-{step}")
    saver = saver_of(folder, max_to_keep=1)
    saver.recover()
    saver.save(3, write_checkpoint)
    saver.save(4, write_checkpoint)
    assert steps_on_disk(folder) == {1, 2, 4}


CHILD = """
import sys
from monolith.checkpoint.folder.saver import Saver
from contracts.savers import write_checkpoint
saver = Saver(sys.argv[1], max_to_keep=2, keep_every=None)
saver.recover()
last = max([saver.names.step_of(path) for path in saver.last_checkpoints], default=0)
for step in range(last + 1, last + 10_000):
    needs = saver.last_checkpoints[-1:] if step % 4 else []
    saver.save(step, write_checkpoint, depends_on=needs)
    print(step, flush=True)
"""


def test_kill_9_leaves_whole_checkpoints(folder: str) -> None:
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = 0
    for pause in (0.0, 0.013, 0.031):
        command = ["-c", CHILD, folder]
        with warm.Popen(command, stdout=warm.PIPE, env=environment) as child:
            assert child.stdout is not None
            first = int(child.stdout.readline())
            time.sleep(pause)
            child.send_signal(signal.SIGKILL)
            after = [first, *map(int, child.stdout.read().split())][-1]
        steps = listed_steps(folder)
        assert first == done + 1
        assert after <= steps[-1] <= after + 1
        for step in steps:  # whatever it builds upon is there
            assert {*range(step - step % 4 or 1, step + 1)} <= steps_on_disk(folder)
        done = steps[-1]
    saver = Saver(folder, max_to_keep=1, keep_every=None)
    saver.recover()
    saver.save(done + 1, write_checkpoint)
    assert steps_on_disk(folder) == {done + 1}


# Disks


def refuse(operation: str, code: int, name: str = "") -> Any:
    """Let an operation fail on paths that contain `name`."""
    honest = getattr(LocalBackend, operation)

    def fail(self: LocalBackend, *paths: str) -> Any:
        if name in paths[-1]:
            raise OSError(code, os.strerror(code))
        return honest(self, *paths)

    patch = pytest.MonkeyPatch()
    patch.setattr(LocalBackend, operation, fail)
    return patch


def test_a_full_disk_leaves_the_last_checkpoint_and_the_next_save_frees_what_was_half_written(
    folder: str,
) -> None:
    saver = saver_of(folder)
    saver.save(1, write_checkpoint)
    before = (Path(folder) / "checkpoint").read_bytes()

    def write(prefix: str) -> None:
        put(f"{prefix}.dense-00000-of-00002")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        saver.save(2, write)
    assert (Path(folder) / "checkpoint").read_bytes() == before
    assert (listed_steps(folder), saver.last_checkpoints) == ([1], [f"{folder}/model.ckpt-1"])

    def write_with_room(prefix: str) -> None:
        assert steps_on_disk(folder) == {1}, "first make room"
        write_checkpoint(prefix)

    saver.save(3, write_with_room)
    assert listed_steps(folder) == [1, 3]


def test_saving_the_same_step_again_finds_what_was_written_before(folder: str) -> None:
    """So that a second try need not write it all again."""
    saver = saver_of(folder)

    def fail(prefix: str) -> None:
        put(f"{prefix}.dense-00000-of-00002")
        raise OSError(errno.EIO, "Input/output error")

    def go_on(prefix: str) -> None:
        assert filesystem.exists(f"{prefix}.dense-00000-of-00002")
        write_checkpoint(prefix)

    with pytest.raises(OSError, match="Input/output"):
        saver.save(1, fail)
    saver.save(1, go_on)
    assert listed_steps(folder) == [1]


@pytest.mark.parametrize("name", ["checkpoint.journal", "checkpoint-tmp"])
def test_a_full_disk_while_listing_leaves_the_last_checkpoint(folder: str, name: str) -> None:
    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write_checkpoint)
    patch = refuse("create", errno.ENOSPC, name)
    with pytest.raises(FilesystemError, match="disk is full"):
        saver.save(2, write_checkpoint)
    patch.undo()
    assert listed_steps(folder) == [1]
    saver.save(3, write_checkpoint)
    assert (listed_steps(folder), steps_on_disk(folder)) == ([3], {3})


def test_a_state_file_that_was_replaced_after_all_loses_nothing(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk says it failed after it had done it: what the file lists must not be deleted."""
    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write_checkpoint)
    honest = LocalBackend.rename

    def rename(self: LocalBackend, source: str, target: str) -> None:
        honest(self, source, target)
        if target.endswith("/checkpoint"):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalBackend, "rename", rename)
    with pytest.raises(FilesystemError):
        saver.save(2, write_checkpoint)
    monkeypatch.undo()
    assert listed_steps(folder) == [2]

    def write(prefix: str) -> None:
        assert listed_steps(folder) == [2]
        write_checkpoint(prefix)

    saver.save(3, write)
    assert (listed_steps(folder), steps_on_disk(folder)) == ([3], {3})


def test_a_folder_that_may_not_be_written_is_said_before_anything_is(folder: str) -> None:
    saver = saver_of(folder)
    patch = refuse("create", errno.EACCES)

    def write(_: str) -> None:
        pytest.fail("too late")

    with pytest.raises(FilesystemError, match="owner and mode") as raised:
        saver.save(1, write)
    patch.undo()
    assert folder in str(raised.value)


def test_a_folder_inside_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FilesystemError, match="a folder was expected"):
        saver_of(f"{tmp_path}/file/run").save(1, write_checkpoint)


def test_a_deletion_that_fails_is_tried_again(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write_checkpoint)
    patch = refuse("remove_tree", errno.EBUSY)
    saver.save(2, write_checkpoint)
    patch.undo()
    assert "model.ckpt-1 is not deleted yet" in caplog.text
    assert not checkpoint_exists(f"{folder}/model.ckpt-1"), "it is no checkpoint any more"
    assert steps_on_disk(folder) == {1, 2}
    saver.save(3, write_checkpoint)
    assert steps_on_disk(folder) == {3}


def test_a_checkpoint_that_could_not_be_deleted_stays_if_the_next_one_needs_it(folder: str) -> None:
    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write_checkpoint)
    patch = refuse("remove_file", errno.EBUSY, "model.ckpt-1")
    saver.save(2, write_checkpoint)
    patch.undo()
    saver.save(3, write_checkpoint, depends_on=[f"{folder}/model.ckpt-1"])  # of a run that restored it
    assert steps_on_disk(folder) == {1, 3}


def test_the_manifest_is_deleted_first(folder: str) -> None:
    saver = saver_of(folder, max_to_keep=1)
    saver.save(1, write_checkpoint)
    patch = refuse("remove_file", errno.EBUSY, ".dense")
    saver.save(2, write_checkpoint)
    patch.undo()
    assert filesystem.exists(f"{folder}/model.ckpt-1.dense-00000-of-00002")
    assert not checkpoint_exists(f"{folder}/model.ckpt-1")


def test_a_save_that_cannot_be_noted_is_a_save(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    saver = saver_of(folder)
    patch = refuse("create", errno.EACCES, "monolith_checkpoint")
    saver.save(1, write_checkpoint)
    patch.undo()
    assert "cannot update monolith_checkpoint" in caplog.text
    assert listed_steps(folder) == [1]


def test_while_the_exempt_list_cannot_be_looked_at_nothing_is_deleted(folder: str) -> None:
    saver = saver_of(folder, max_to_keep=1)
    put(f"{folder}/monolith_checkpoint", 'exempt_model_checkpoint_paths: "model.ckpt-1"')
    saver.save(1, write_checkpoint)
    patch = refuse("open_read", errno.EIO, "monolith_checkpoint")
    saver.save(2, write_checkpoint)
    saver.save(3, write_checkpoint)
    patch.undo()
    assert steps_on_disk(folder) == {1, 2, 3}
    saver.save(4, write_checkpoint)
    assert steps_on_disk(folder) == {1, 4}


def test_a_checkpoint_deleted_under_us_is_skipped(folder: str) -> None:
    saver = saver_of(folder, max_to_keep=2)
    saver.save(1, write_checkpoint)
    saver.save(2, write_checkpoint)
    filesystem.remove(f"{folder}/model.ckpt-2{MANIFEST}")
    saver.save(3, write_checkpoint)
    saver = saver_of(folder, max_to_keep=2)
    saver.recover()
    assert saver.last_checkpoints == [f"{folder}/model.ckpt-3"]


def test_a_damaged_journal_is_refused_before_anything_is_deleted(folder: str) -> None:
    put(f"{folder}/checkpoint.journal", "{}")
    with pytest.raises(CorruptFileError, match="Move it away"):
        saver_of(folder)


# Places


def test_a_folder_can_be_moved_with_all_that_is_left_to_do(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    saver = saver_of(str(old), max_to_keep=1)
    saver.save(1, write_checkpoint)
    saver.save(2, write_checkpoint, depends_on=[saver.names.prefix(1)])
    old.rename(new)
    state = read_checkpoint_state(str(new))
    assert state is not None
    assert require_checkpoint(state.model_checkpoint_path) == f"{new}/model.ckpt-2"
    saver = saver_of(str(new), max_to_keep=1)
    saver.recover()
    assert steps_on_disk(str(new)) == {1, 2}
    saver.save(3, write_checkpoint)
    assert steps_on_disk(str(new)) == {3}


@pytest.mark.parametrize(
    "spelling", ["run/", "./run", "../{name}/run", "link", "{folder}/run", "file://{folder}/run"]
)
def test_a_folder_may_be_called_by_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    put("run/monolith_checkpoint", f'exempt_model_checkpoint_paths: "{tmp_path}/run/model.ckpt-1"')
    first = saver_of(str(tmp_path / "run"), max_to_keep=1, relative_paths=False)
    first.save(1, write_checkpoint)
    first.save(2, write_checkpoint)
    saver = saver_of(spelling.format(folder=tmp_path, name=tmp_path.name), max_to_keep=1)
    saver.recover()
    saver.save(3, write_checkpoint, depends_on=["model.ckpt-2"])
    assert steps_on_disk("run") == {1, 2, 3}
    saver.save(4, write_checkpoint)
    assert steps_on_disk("run") == {1, 4}


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    saver_of(f"{tmp_path}/a/b/c").save(1, write_checkpoint)
    assert listed_steps(f"{tmp_path}/a/b/c") == [1]


# Restarts


def test_without_timestamps_the_time_of_the_files_counts(folder: str) -> None:
    paths = [f"{folder}/model.ckpt-{step}" for step in (1, 2)]
    for path, changed in zip(paths, (100.0, 300.0), strict=True):
        write_checkpoint(path)
        os.utime(path + MANIFEST, (changed, changed))
    write_checkpoint_state(folder, CheckpointState(paths[1], tuple(paths), (), 0.0))
    saver = saver_of(folder, max_to_keep=1, keep_every=timedelta(seconds=200))
    saver.recover()
    saver.save(3, write_checkpoint)
    saver.save(4, write_checkpoint)
    assert steps_on_disk(folder) == {2, 3, 4}, "1 was too early to be kept for good; 3 was saved at 1000"


def test_a_list_of_ones_own_takes_times_from_the_state_file_or_the_files(folder: str) -> None:
    clock = FakeClock(50.0)
    saver_of(folder, clock=clock).save(1, write_checkpoint)
    write_checkpoint(f"{folder}/model.ckpt-2")
    os.utime(f"{folder}/model.ckpt-2{MANIFEST}", (70.0, 70.0))
    saver = saver_of(folder, clock=clock)
    saver.recover([f"{folder}/model.ckpt-1", f"{folder}/model.ckpt-2", f"{folder}/model.ckpt-9"])
    saver.save(3, write_checkpoint)
    state = read_checkpoint_state(folder)
    assert state is not None
    assert state.all_model_checkpoint_timestamps == (50.0, 70.0, 50.0)


def test_a_run_without_a_period_does_not_end_the_period_of_the_next(folder: str) -> None:
    saver_of(folder, clock=FakeClock(10.0), keep_every=timedelta(hours=1)).save(1, write_checkpoint)
    saver_of(folder).save(2, write_checkpoint)
    state = read_checkpoint_state(folder)
    assert state is not None
    assert state.last_preserved_timestamp == 10.0


# Arguments


def test_names_must_be_names(folder: str) -> None:
    with pytest.raises(ConfigError, match="collides with 'save_path'"):
        saver_of(folder, basename="checkpoint")
    with pytest.raises(ConfigError, match="path components"):
        saver_of(folder, latest_filename="a/b")
    with pytest.raises(ConfigError, match="plain name"):
        saver_of(folder, basename="a/b")


def test_making_a_saver_makes_no_file(folder: str) -> None:
    saver = saver_of(folder)
    assert saver.model_dir == folder
    assert not Path(folder).exists()


def test_the_kind_of_table_is_noted(folder: str) -> None:
    saver_of(folder, table_kind=TableKind.CUCKOO_HASH_MAP).save(1, write_checkpoint)
    state = load_monolith_checkpoint(folder)
    assert state is not None
    assert state.builtin_hash_table_type is TableKind.CUCKOO_HASH_MAP


def test_only_a_whole_checkpoint_can_be_restored(folder: str) -> None:
    with pytest.raises(RestoreError, match="Can't load save_path when it is None"):
        require_checkpoint(None)
    put(f"{folder}/model.ckpt-1.dense")
    with pytest.raises(RestoreError, match=r"^The passed save_path is not a valid checkpoint:"):
        require_checkpoint(f"{folder}/model.ckpt-1")
    write_checkpoint(f"{folder}/model.ckpt-1")
    assert require_checkpoint(f"{folder}/model.ckpt-1") == f"{folder}/model.ckpt-1"


# A folder that is named from where the process runs


def test_retention_continues_over_restarts_in_a_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for start in range(3):
        saver = saver_of("runs/1", max_to_keep=2)
        saver.recover()
        for step in (2 * start + 1, 2 * start + 2):
            saver.save(step, write_little)
    assert steps_on_disk("runs/1") == {5, 6}
    assert listed_steps("runs/1") == [5, 6]


def test_what_an_increment_needs_stays_in_a_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3):
        saver = saver_of("runs/1", max_to_keep=1)
        saver.recover()
        saver.save(step, write_little, depends_on=["runs/1/model.ckpt-1"] if step > 1 else ())
    assert steps_on_disk("runs/1") == {1, 3}


def test_an_exempt_name_is_kept_in_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put("runs/1/monolith_checkpoint", 'exempt_model_checkpoint_paths: "model.ckpt-1"\n')
    for step in (1, 2, 3):
        saver = saver_of("runs/1", max_to_keep=1)
        saver.recover()
        saver.save(step, write_little)
    assert steps_on_disk("runs/1") == {1, 3}
