from __future__ import annotations

import errno
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from contracts.savers import FakeClock, write_checkpoint

from monolith.checkpoint.folder.manifest import Manifest, needs_of, read_chain, write_manifest
from monolith.checkpoint.folder.saver import Saver, checkpoint_exists
from monolith.checkpoint.folder.state_files import (
    CheckpointState,
    MonolithCheckpointState,
    TableKind,
    load_monolith_checkpoint,
    read_checkpoint_state,
    update_monolith_checkpoint,
    write_checkpoint_state,
)
from monolith.checkpoint.offline.listing import named_checkpoint
from monolith.checkpoint.override import resolve_restore, roll_back, start_from, wait_for_start
from monolith.errors import ConfigError, CorruptFileError, FilesystemError, RestoreError
from monolith.filesystem.backends import LocalBackend


def saved(folder: Path, *steps: int, latest: int = 61) -> str:
    """Make a folder with checkpoints, in this order; return it."""
    for step in steps:
        write_checkpoint(f"{folder}/model.ckpt-{step}")
    paths = tuple(f"{folder}/model.ckpt-{step}" for step in steps)
    write_checkpoint_state(str(folder), CheckpointState(f"{folder}/model.ckpt-{latest}", paths))
    return str(folder)


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "run", 61, 30, 0)


def latest(state: CheckpointState | None) -> str:
    assert state is not None
    return state.model_checkpoint_path.rpartition("/")[2]


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


# An earlier checkpoint of the same folder


def test_without_an_override_the_state_is_as_it_is(folder, tmp_path):
    before = content(folder)
    assert resolve_restore(folder) == read_checkpoint_state(folder)
    assert resolve_restore(str(tmp_path / "nowhere"), restore_ckpt="model.ckpt-30") is None
    assert content(folder) == before


def test_training_goes_back_once(folder):
    listed = read_checkpoint_state(folder).all_model_checkpoint_paths
    assert latest(resolve_restore(folder, restore_ckpt="model.ckpt-30")) == "model.ckpt-30"
    assert Path(folder, "restore_ckpt").read_text() == f"{folder}/model.ckpt-30"
    state = read_checkpoint_state(folder)
    assert (latest(state), state.all_model_checkpoint_paths) == ("model.ckpt-30", listed)
    saver = Saver(folder)
    saver.recover()
    saver.save(45, write_checkpoint)
    assert latest(resolve_restore(folder, restore_ckpt="model.ckpt-30")) == "model.ckpt-45"


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_others_go_back_every_time_and_leave_no_trace(folder, mode):
    before = content(folder)
    for _ in range(2):
        state = resolve_restore(folder, restore_ckpt="/elsewhere/model.ckpt-30", mode=mode)
        assert latest(state) == "model.ckpt-30"
    assert content(folder) == before
    resolve_restore(folder, restore_ckpt="model.ckpt-0")
    assert latest(resolve_restore(folder, restore_ckpt="model.ckpt-30", mode=mode)) == "model.ckpt-30"


def test_the_latest_itself_is_a_warning_and_counts_as_done(folder, caplog):
    assert latest(resolve_restore(folder, restore_ckpt="model.ckpt-61")) == "model.ckpt-61"
    assert "is the latest checkpoint already" in caplog.text
    assert Path(folder, "restore_ckpt").read_text() == f"{folder}/model.ckpt-61"


def test_one_that_is_not_listed_changes_nothing(folder, caplog):
    before = content(folder)
    for mode in ("train", "eval"):
        assert latest(resolve_restore(folder, restore_ckpt="model.ckpt-31", mode=mode)) == "model.ckpt-61"
    assert content(folder) == before
    assert "model.ckpt-31 does not exist" in caplog.text


def test_only_the_usual_state_file_is_overridden(folder):
    state = read_checkpoint_state(folder)
    write_checkpoint_state(folder, state, "checkpoint_other")
    assert resolve_restore(folder, restore_ckpt="model.ckpt-30", latest_filename="checkpoint_other") == state
    assert not Path(folder, "restore_ckpt").exists()


def test_killed_before_the_marker_it_is_applied_again(folder, monkeypatch):
    honest = LocalBackend.rename

    def die(self, source, target):
        if target.endswith("restore_ckpt"):
            raise KeyboardInterrupt
        honest(self, source, target)

    monkeypatch.setattr(LocalBackend, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        resolve_restore(folder, restore_ckpt="model.ckpt-30")
    monkeypatch.undo()
    assert latest(resolve_restore(folder, restore_ckpt="model.ckpt-30")) == "model.ckpt-30"
    assert Path(folder, "restore_ckpt").exists()


def test_all_threads_agree(folder):
    found = []

    def read():
        found.append(latest(resolve_restore(folder, restore_ckpt="model.ckpt-30")))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["model.ckpt-30"] * 8


def test_a_reader_agrees_with_the_process_that_applies_it(folder, monkeypatch):
    """The other is done between this one's first look and its second."""
    honest = LocalBackend.exists
    looked = []

    def exists(self, path):
        there = honest(self, path)
        if path.endswith("restore_ckpt") and not looked:
            looked.append(path)
            resolve_restore(folder, restore_ckpt="model.ckpt-30")
        return there

    monkeypatch.setattr(LocalBackend, "exists", exists)
    assert latest(resolve_restore(folder, restore_ckpt="model.ckpt-30")) == "model.ckpt-30"
    assert looked


def test_errors_of_the_disk_are_raised(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalBackend, "create", refuse)
    with pytest.raises(FilesystemError, match="Permission denied"):
        resolve_restore(folder, restore_ckpt="model.ckpt-30")


def test_a_state_that_makes_no_sense_is_raised(folder):
    Path(folder, "checkpoint").write_text("oops")
    with pytest.raises(CorruptFileError, match="read ckpt error!"):
        resolve_restore(folder, restore_ckpt="model.ckpt-30", sleep=FakeClock().sleep)


def test_the_mode_must_be_one(folder):
    with pytest.raises(ConfigError, match="'test'"):
        resolve_restore(folder, mode="test")


# The checkpoint of another folder


@pytest.fixture
def other(tmp_path):
    return saved(tmp_path / "other", 61, 30, 0)


@pytest.fixture
def new(tmp_path):
    return str(tmp_path / "new")


def waits(folder: str, minutes: float = 5) -> float:
    """Wait for the chief; return how long it took."""
    clock = FakeClock(1000.0)
    wait_for_start(folder, timedelta(minutes=minutes), clock=clock, timer=clock, sleep=clock.sleep)
    return clock.now - 1000.0


def test_a_run_begins_with_the_checkpoint_of_another_folder(other, new):
    assert start_from(other, new, "model.ckpt-30") == f"{other}/model.ckpt-30"
    assert read_checkpoint_state(new) == CheckpointState(
        f"{other}/model.ckpt-30", (f"{other}/model.ckpt-30",)
    )
    assert load_monolith_checkpoint(new) == MonolithCheckpointState((f"{other}/model.ckpt-30",))
    assert not Path(new, "restore_ckpt").exists()
    assert latest(resolve_restore(new, restore_ckpt="model.ckpt-30")) == "model.ckpt-30"
    assert Path(new, "restore_ckpt").exists()
    assert waits(new) == 0.0


def test_it_is_never_deleted(other, new):
    start_from(other, new)
    saver = Saver(new, max_to_keep=1, keep_every=None)
    saver.recover()
    for step in (62, 63, 64):
        saver.save(step, write_checkpoint)
    assert checkpoint_exists(f"{other}/model.ckpt-61")
    assert saver.last_checkpoints == [f"{other}/model.ckpt-61", f"{new}/model.ckpt-64"]


def test_by_default_it_is_the_latest(other, new, caplog):
    assert start_from(other, new) == f"{other}/model.ckpt-61"
    assert caplog.text == ""
    assert start_from(other, f"{new}2", "model.ckpt-31") == f"{other}/model.ckpt-61"
    assert "model.ckpt-31 does not exist" in caplog.text


def test_a_relative_folder_is_written_whole(other, new, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    start_from("other", "new")
    monkeypatch.chdir("/")
    assert read_checkpoint_state(new).model_checkpoint_path == f"{other}/model.ckpt-61"


def test_what_is_known_of_the_other_comes_along_but_for_its_exempt_list(other, new):
    theirs = MonolithCheckpointState(("model.ckpt-0",), 77, TableKind.CUCKOO_HASH_MAP)
    update_monolith_checkpoint(other, seed=theirs)
    Path(new).mkdir()
    update_monolith_checkpoint(new, seed=MonolithCheckpointState(("mine",)))
    start_from(other, new)
    assert load_monolith_checkpoint(new) == MonolithCheckpointState(
        ("mine", f"{other}/model.ckpt-61"), 77, TableKind.CUCKOO_HASH_MAP
    )


def test_without_any_state_the_kind_of_table_is_set_by_the_first_save(other, new):
    start_from(other, new)
    assert load_monolith_checkpoint(new).builtin_hash_table_type is None
    Saver(new, table_kind=TableKind.CUCKOO_HASH_MAP).save(62, write_checkpoint)
    assert load_monolith_checkpoint(new).builtin_hash_table_type is TableKind.CUCKOO_HASH_MAP


@pytest.mark.parametrize("restore_dir", ["other", "nowhere"])
@pytest.mark.usefixtures("other")
def test_a_run_that_has_begun_continues_from_its_own_checkpoint_without_waiting(tmp_path, new, restore_dir):
    saved(Path(new), 70, latest=70)
    before = Path(new, "checkpoint").read_bytes()
    assert start_from(f"{tmp_path}/{restore_dir}", new, "model.ckpt-30") is None
    assert Path(new, "checkpoint").read_bytes() == before
    assert not Path(new, "monolith_checkpoint").exists()
    assert waits(new) == 0.0


def chief_fails(restore_dir: str, folder: str, match: str) -> None:
    clock = FakeClock(1000.0)
    with pytest.raises(RestoreError, match=match):
        start_from(restore_dir, folder, clock=clock, sleep=clock.sleep)
    assert not Path(folder, "checkpoint").exists()
    with pytest.raises(RestoreError, match=match):
        waits(folder)


def test_no_checkpoint_there_fails_the_chief_and_the_workers(new, tmp_path):
    chief_fails(f"{tmp_path}/nowhere", new, "no checkpoint in")


def test_a_state_that_makes_no_sense_fails_them_too(other, new):
    Path(other, "checkpoint").write_text("oops")
    chief_fails(other, new, "read ckpt error!")


def test_a_checkpoint_whose_files_are_gone_fails_them_too(other, new):
    Path(other, "model.ckpt-61.manifest").unlink()
    chief_fails(other, new, "not a valid checkpoint")


def test_a_list_of_ours_that_makes_no_sense_fails_them_too_and_stays(other, new):
    Path(new).mkdir()
    Path(new, "monolith_checkpoint").write_text("oops")
    chief_fails(other, new, "monolith_checkpoint")
    assert Path(new, "monolith_checkpoint").read_text() == "oops"


def test_a_folder_that_cannot_be_written_fails_the_chief(other, new, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalBackend, "create", refuse)
    with pytest.raises(RestoreError, match="Permission denied"):
        start_from(other, new)
    assert "cannot tell the other workers" in caplog.text


@pytest.mark.parametrize("target", ["monolith_checkpoint", "checkpoint", "restore_dir"])
def test_a_chief_killed_half_way_begins_again(other, new, monkeypatch, target):
    honest = LocalBackend.rename

    def die(self, source, path):
        if path.endswith(f"/{target}"):
            raise KeyboardInterrupt
        honest(self, source, path)

    monkeypatch.setattr(LocalBackend, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        start_from(other, new)
    monkeypatch.undo()
    if target != "restore_dir":
        assert read_checkpoint_state(new) is None
    with pytest.raises(RestoreError, match="waited"):
        waits(new)
    start_from(other, new)
    assert read_checkpoint_state(new).model_checkpoint_path == f"{other}/model.ckpt-61"
    assert load_monolith_checkpoint(new).exempt_model_checkpoint_paths == (f"{other}/model.ckpt-61",)
    assert waits(new) == 0.0


# Waiting


def test_a_worker_looks_every_30_seconds(other, new):
    clock = FakeClock()
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        clock.sleep(seconds)
        if len(pauses) == 3:
            start_from(other, new, clock=clock)

    wait_for_start(new, timedelta(hours=1), clock=clock, timer=clock, sleep=sleep)
    assert pauses == [30.0, 30.0, 30.0]


def test_a_worker_waits_no_longer_than_it_may(new):
    clock = FakeClock(1000.0)
    with pytest.raises(RestoreError, match="waited 0:01:40 for the chief"):
        wait_for_start(new, timedelta(seconds=100), clock=clock, timer=clock, sleep=clock.sleep)
    assert clock.now == 1100.0


def test_a_failure_of_an_earlier_run_is_not_taken_for_this_one(other, new, tmp_path):
    with pytest.raises(RestoreError):
        start_from(f"{tmp_path}/nowhere", new, clock=FakeClock(0.0))
    clock = FakeClock(1000.0)

    def sleep(seconds):
        clock.sleep(seconds)
        start_from(other, new, clock=clock)

    wait_for_start(new, timedelta(hours=1), clock=clock, timer=clock, sleep=sleep)
    assert clock.now == 1030.0


def test_but_it_is_told_if_nothing_else_comes(new, tmp_path):
    with pytest.raises(RestoreError):
        start_from(f"{tmp_path}/nowhere", new, clock=FakeClock(0.0))
    with pytest.raises(RestoreError, match=r"waited .* last message was: .*no checkpoint in"):
        waits(new)


def test_a_marker_without_a_state_file_is_of_a_run_that_was_reset(other, new):
    start_from(other, new)
    Path(new, "checkpoint").unlink()
    with pytest.raises(RestoreError, match="waited"):
        waits(new)


def test_a_marker_that_makes_no_sense_is_raised(new):
    Path(new).mkdir()
    Path(new, "restore_dir").write_text("done")
    with pytest.raises(CorruptFileError, match="not a marker of the chief"):
        waits(new)


# An earlier checkpoint that a person names


def with_manifest(folder: Path, *steps: int, after: dict[int, int] | None = None) -> str:
    """Make a folder with sound checkpoints, in this order, of which some continue others."""
    folder.mkdir(exist_ok=True)
    crcs: dict[int, int] = {}
    for step in steps:
        before = (after or {}).get(step)
        manifest = Manifest(
            step=step,
            kind="full" if before is None else "incremental",
            parts={},
            saved_at=float(step),
            after=None if before is None else f"model.ckpt-{before}",
            after_crc=None if before is None else crcs[before],
        )
        crcs[step] = write_manifest(f"{folder}/model.ckpt-{step}", manifest)
    return str(folder)


def listed(folder: str) -> list[int]:
    state = read_checkpoint_state(folder)
    assert state is not None
    return [int(path.rpartition("-")[2]) for path in state.all_model_checkpoint_paths]


@pytest.fixture
def long_run(tmp_path: Path) -> str:
    """Of four checkpoints the last two are listed."""
    folder = with_manifest(tmp_path / "run", 10, 20, 30, 40)
    paths = (f"{folder}/model.ckpt-30", f"{folder}/model.ckpt-40")
    write_checkpoint_state(folder, CheckpointState(paths[1], paths, (30.0, 40.0), 5.0))
    return folder


@pytest.mark.parametrize("name", ["model.ckpt-20", "20", "{}/model.ckpt-20", "{}/model.ckpt-20.manifest"])
def test_a_person_goes_back_to_whatever_is_on_disk(long_run: str, name: str) -> None:
    assert roll_back(long_run, name.format(long_run)) == f"{long_run}/model.ckpt-20"
    state = read_checkpoint_state(long_run)
    assert state == CheckpointState(f"{long_run}/model.ckpt-20", (f"{long_run}/model.ckpt-20",), (20.0,), 5.0)
    assert checkpoint_exists(f"{long_run}/model.ckpt-40")
    assert latest(resolve_restore(long_run, restore_ckpt=name.format(long_run))) == "model.ckpt-20"


def test_a_person_goes_back_once_to_each(long_run: str, caplog: pytest.LogCaptureFixture) -> None:
    roll_back(long_run, "30")
    assert listed(long_run) == [30]
    saver = Saver(long_run, keep_every=None)
    saver.recover()
    saver.save(35, write_checkpoint)
    assert roll_back(long_run, "model.ckpt-30") is None
    assert "Remove " in caplog.text
    assert listed(long_run) == [30, 35]
    assert roll_back(long_run, "20") == f"{long_run}/model.ckpt-20"
    assert listed(long_run) == [20]


def test_the_names_of_another_folder_are_not_ours(long_run: str) -> None:
    with pytest.raises(RestoreError, match=r"no checkpoint /elsewhere/model\.ckpt-20"):
        roll_back(long_run, "/elsewhere/model.ckpt-20")


@pytest.mark.parametrize("name", ["model.ckpt-25", "25", "model.ckpt"])
def test_a_name_that_is_not_there_is_an_error_and_changes_nothing(long_run: str, name: str) -> None:
    before = content(long_run)
    with pytest.raises(RestoreError, match=r"it has model\.ckpt-10, model\.ckpt-20, model\.ckpt-30"):
        roll_back(long_run, name)
    assert content(long_run) == before


def test_later_ones_that_are_not_listed_any_more_keep_what_they_continue(tmp_path: Path) -> None:
    folder = with_manifest(tmp_path / "run", 10, 20, 30, 40, after={20: 10, 30: 20, 40: 30})
    paths = tuple(f"{folder}/model.ckpt-{step}" for step in (10, 20, 30, 40))
    write_checkpoint_state(folder, CheckpointState(paths[-1], paths))
    roll_back(folder, "20")
    saver = Saver(folder, max_to_keep=1, keep_every=None)
    saver.recover(needs=needs_of)
    for step in (21, 22, 23):
        saver.save(step, write_checkpoint)
    for step in (10, 20, 30, 40):
        assert checkpoint_exists(f"{folder}/model.ckpt-{step}")
    assert [link.manifest.step for link in read_chain(paths[-1])] == [10, 20, 30, 40]
    assert listed(folder) == [23]


def test_a_later_exempt_checkpoint_stays_when_its_step_is_saved_again(long_run: str) -> None:
    exempt = MonolithCheckpointState(exempt_model_checkpoint_paths=("model.ckpt-40",))
    update_monolith_checkpoint(long_run, seed=exempt)
    before = {path: value for path, value in content(long_run).items() if "ckpt-40" in path}
    roll_back(long_run, "20")
    saver = Saver(long_run, max_to_keep=1, keep_every=None)
    saver.recover(needs=needs_of)
    again = Manifest(step=40, kind="full", parts={}, saved_at=9.0)
    saver.save(40, lambda prefix: write_manifest(prefix, again) and None)
    assert before.items() <= content(long_run).items()
    assert listed(long_run) == [40]
    assert named_checkpoint(long_run, "40") == f"{long_run}/model.ckpt.2-40", "the listed one is meant"
    assert named_checkpoint(long_run, "model.ckpt-40") == f"{long_run}/model.ckpt-40"


def test_killed_between_list_and_marker_it_goes_back_again(
    long_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LocalBackend.rename

    def die(self: LocalBackend, source: str, target: str) -> None:
        if target.endswith("restore_ckpt"):
            raise KeyboardInterrupt
        honest(self, source, target)

    monkeypatch.setattr(LocalBackend, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        roll_back(long_run, "20")
    monkeypatch.undo()
    assert roll_back(long_run, "20") == f"{long_run}/model.ckpt-20"
    assert listed(long_run) == [20]


def test_a_person_starts_from_what_is_on_disk_elsewhere_or_not_at_all(long_run: str, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    with pytest.raises(RestoreError, match=r"no checkpoint 25 .* it has model\.ckpt-10"):
        start_from(long_run, own, "25", required=True)
    assert start_from(long_run, own, "20", required=True) == f"{long_run}/model.ckpt-20"
    assert roll_back(own, "20") == f"{long_run}/model.ckpt-20"
    saver = Saver(own, keep_every=None)
    saver.recover()
    saver.save(25, write_checkpoint)
    assert roll_back(own, "20") is None, "a restart resumes"
    assert latest(read_checkpoint_state(own)) == "model.ckpt-25"
