import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from monolith.errors import ConfigError, FileMissingError, FilesystemError
from monolith.filesystem import (
    atomic_write,
    copy_file,
    copy_tree,
    exists,
    is_folder,
    is_temporary,
    join,
    link_or_copy,
    list_files,
    make_dirs,
    read_bytes,
)
from monolith.filesystem.backends import LocalBackend


class Naps:
    """A sleep that only takes notes."""

    def __init__(self, wake=None) -> None:
        self.seconds: list[float] = []
        self._wake = wake or (lambda: None)

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._wake()


def make_file(path: str, data: bytes) -> str:
    with atomic_write(path) as file:
        file.write(data)
    return path


@pytest.fixture
def tree(folder) -> str:
    source = join(folder, "tree")
    make_dirs(join(source, "subdir"))
    make_file(join(source, "file.txt"), b"root")
    make_file(join(source, "subdir", "innerfile.txt"), b"inner")
    return source


def content(path: str) -> dict[str, bytes]:
    return {name.removeprefix(path + "/"): read_bytes(name) for name in list_files(path, recursive=True)}


WHOLE = {"file.txt": b"root", "subdir/innerfile.txt": b"inner"}


def test_a_file_is_copied_and_an_old_one_replaced(folder):
    source, target = make_file(join(folder, "a"), b"1"), join(folder, "b")
    assert copy_file(source, target)
    make_file(source, b"2")
    assert copy_file(source, target)
    assert read_bytes(target) == b"2"


def test_without_overwrite_an_existing_file_is_an_error(folder):
    source, target = make_file(join(folder, "a"), b"1"), make_file(join(folder, "b"), b"2")
    with pytest.raises(FilesystemError, match=r"exists\. Pass overwrite=True"):
        copy_file(source, target, overwrite=False)
    assert read_bytes(target) == b"2"


def test_a_missing_file_is_looked_for_again_with_growing_pauses_then_skipped(folder):
    naps = Naps()
    pause = timedelta(seconds=1)
    assert not copy_file(join(folder, "no"), join(folder, "b"), max_retries=3, pause=pause, sleep=naps)
    assert naps.seconds == [1.0, 2.0, 4.0]
    assert not exists(join(folder, "b"))


def test_a_missing_file_is_an_error_when_asked(folder):
    naps = Naps()
    with pytest.raises(FileMissingError):
        copy_file(join(folder, "no"), join(folder, "b"), skip_missing=False, sleep=naps)
    assert len(naps.seconds) == 5


def test_a_file_that_shows_up_late_is_copied(folder):
    source, target = join(folder, "late"), join(folder, "b")
    assert copy_file(source, target, sleep=Naps(wake=lambda: make_file(source, b"1")))
    assert read_bytes(target) == b"1"


def test_a_missing_target_folder_is_not_mistaken_for_a_missing_file(tmp_path):
    source = make_file(str(tmp_path / "a"), b"1")
    naps = Naps()
    with pytest.raises(FileMissingError, match="make its folder first"):
        copy_file(source, tmp_path / "no" / "b", sleep=naps)
    assert naps.seconds == []


def test_a_copy_crosses_filesystems(tmp_path):
    make_file(str(tmp_path / "a"), b"1")
    copy_file(tmp_path / "a", "memory://crossing/a")
    copy_file("memory://crossing/a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"1"


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_gets_a_second_name_that_outlives_the_first(tmp_path, durable):
    source = make_file(str(tmp_path / "a"), b"1")
    make_file(str(tmp_path / "b"), b"old")
    assert link_or_copy(source, tmp_path / "b", durable=durable)
    assert (tmp_path / "b").samefile(source)
    (tmp_path / "a").unlink()
    assert (tmp_path / "b").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_where_there_can_be_no_link_there_is_a_copy(tmp_path, monkeypatch):
    def refused(_source, _target):
        raise OSError(errno.EXDEV, "no")

    make_file(str(tmp_path / "a"), b"1")
    assert not link_or_copy(tmp_path / "a", "memory://linking/a")
    assert not link_or_copy("memory://linking/a", tmp_path / "b")
    monkeypatch.setattr(os, "link", refused)
    assert not link_or_copy(tmp_path / "b", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"1"
    assert not (tmp_path / "c").samefile(tmp_path / "b")


def test_a_link_that_fails_leaves_nothing(tmp_path):
    source = make_file(str(tmp_path / "a"), b"1")
    with pytest.raises(FileMissingError, match="missing"):
        link_or_copy(tmp_path / "missing", tmp_path / "b")
    with pytest.raises(FileMissingError, match="make its folder first"):
        link_or_copy(source, tmp_path / "no" / "b")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(FilesystemError, match=r"link .*a to .*folder"):
        link_or_copy(source, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


@pytest.mark.parametrize("max_workers", [1, 2])
def test_a_tree_is_copied_whole(folder, tree, max_workers):
    assert copy_tree(tree, join(folder, "copy"), max_workers=max_workers)
    assert content(join(folder, "copy")) == WHOLE
    assert content(tree) == WHOLE


def test_a_trailing_slash_changes_nothing(folder, tree):
    copy_tree(tree + "/", join(folder, "copy") + "/")
    assert content(join(folder, "copy")) == WHOLE


def test_empty_folders_are_copied(tmp_path):
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    copy_tree(tmp_path / "a", tmp_path / "copy")
    assert (tmp_path / "copy" / "b" / "c").is_dir()


def test_an_existing_target_is_replaced_not_merged(folder, tree):
    target = join(folder, "copy")
    make_dirs(target)
    make_file(join(target, "stale"), b"old")
    copy_tree(tree, target)
    assert content(target) == WHOLE


def test_a_tree_replaces_a_file_of_that_name(folder, tree):
    target = make_file(join(folder, "copy"), b"a file")
    copy_tree(tree, target)
    assert content(target) == WHOLE


def test_folders_above_the_target_are_made(folder, tree):
    copy_tree(tree, join(folder, "x", "y"))
    assert content(join(folder, "x", "y")) == WHOLE


def test_a_file_source_is_copied_to_the_target_even_over_a_folder(folder):
    source, target = make_file(join(folder, "a"), b"1"), join(folder, "b")
    make_dirs(target)
    make_file(join(target, "x"), b"")
    assert copy_tree(source, target)
    assert read_bytes(target) == b"1"
    assert not is_folder(target)


def test_a_missing_source_is_skipped_or_an_error_and_the_target_stays(folder):
    target = make_file(join(folder, "b"), b"1")
    assert not copy_tree(join(folder, "no"), target)
    for kind in (FileMissingError, ValueError):
        with pytest.raises(kind, match="no doesn't exist!"):
            copy_tree(join(folder, "no"), target, skip_missing=False)
    assert read_bytes(target) == b"1"


@pytest.mark.parametrize("where", ["", "subdir", "../tree", "new/inside", ".."])
def test_a_target_inside_or_around_the_source_is_refused_before_anything_is_removed(tmp_path, where):
    tree = tmp_path / "tree"
    (tree / "subdir").mkdir(parents=True)
    (tree / "file.txt").write_bytes(b"root")
    with pytest.raises(FilesystemError, match="contains it"):
        copy_tree(tree, tree / where)
    assert (tree / "file.txt").read_bytes() == b"root"


def test_a_link_does_not_hide_an_overlap(tmp_path):
    tree = tmp_path / "tree"
    (tree / "subdir").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tree)
    with pytest.raises(FilesystemError, match="contains it"):
        copy_tree(tree, tmp_path / "link" / "copy")


def test_an_overlap_on_a_remote_store_is_refused_too(tree):
    with pytest.raises(FilesystemError, match="contains it"):
        copy_tree(tree, join(tree, "copy"))
    assert content(tree) == WHOLE


def test_a_name_that_only_begins_alike_is_no_overlap(tree):
    copy_tree(tree, tree + "2")
    assert content(tree + "2") == WHOLE


def test_a_target_that_is_a_link_is_replaced_and_what_it_pointed_to_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_bytes(b"1")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "y").write_bytes(b"2")
    copy_tree(tmp_path / "tree", tmp_path / "link")
    assert (tmp_path / "kept" / "x").read_bytes() == b"1"
    assert content(str(tmp_path / "link")) == {"y": b"2"}


def refuse_to_read(monkeypatch, name: str) -> None:
    honest = LocalBackend.open_read

    def open_read(self, path):
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", path)
        return honest(self, path)

    monkeypatch.setattr(LocalBackend, "open_read", open_read)


@pytest.mark.parametrize("max_workers", [1, 3])
def test_an_error_in_a_worker_reaches_the_caller_and_the_old_target_stays(tmp_path, monkeypatch, max_workers):
    tree, target = tmp_path / "tree", tmp_path / "copy"
    tree.mkdir()
    target.mkdir()
    (target / "old").write_bytes(b"old")
    for index in range(6):
        (tree / f"f{index}").write_bytes(b"x")
    refuse_to_read(monkeypatch, "f3")
    with pytest.raises(FilesystemError, match="f3: Permission denied"):
        copy_tree(tree, target, max_workers=max_workers)
    assert content(str(target)) == {"old": b"old"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "tree"]


def test_a_kill_in_the_middle_leaves_the_old_target_and_a_temporary_name(tmp_path):
    program = """
        import os, signal, sys
        from monolith.filesystem import copy_tree
        def kill(done, total):
            if done:
                os.kill(os.getpid(), signal.SIGKILL)
        copy_tree(sys.argv[1], sys.argv[2], on_progress=kill)
    """
    tree, target = tmp_path / "tree", tmp_path / "copy"
    tree.mkdir()
    target.mkdir()
    (target / "old").write_bytes(b"old")
    for name in "ab":
        (tree / name).write_bytes(b"x")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tree), str(target)],
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -signal.SIGKILL
    assert content(str(target)) == {"old": b"old"}
    [left] = [p for p in tmp_path.iterdir() if p not in {tree, target}]
    assert is_temporary(left)


def test_when_the_copy_cannot_take_the_name_the_old_target_gets_it_back(tmp_path, monkeypatch):
    tree, target = tmp_path / "tree", tmp_path / "copy"
    tree.mkdir()
    target.mkdir()
    (target / "old").write_bytes(b"old")
    honest, calls = LocalBackend.rename, []

    def rename(self, source, name):
        calls.append(name)
        if len(calls) == 2:  # the first moves the old target away
            raise OSError(5, "Input/output error")
        honest(self, source, name)

    monkeypatch.setattr(LocalBackend, "rename", rename)
    with pytest.raises(FilesystemError, match="The device failed"):
        copy_tree(tree, target)
    assert content(str(target)) == {"old": b"old"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "tree"]


def test_a_failed_copy_to_a_store_without_renames_leaves_no_part_of_it(tmp_path):
    class Failing(MemoryFileSystem):
        protocol = "failing"
        store: dict = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012
        cachable = False

        def open(self, path, mode="rb", **kwargs):
            if "w" in mode and "/b-tmp-" in path:
                raise PermissionError(13, "Permission denied", path)
            return super().open(path, mode, **kwargs)

    fsspec.register_implementation("failing", Failing, clobber=True)
    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(FilesystemError):
        copy_tree(tmp_path, "failing://copy")
    assert Failing.store == {}


def test_retries_and_pauses_apply_to_every_file(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "gone").symlink_to("nowhere")
    naps = Naps()
    assert copy_tree(tree, tmp_path / "copy", max_retries=2, pause=timedelta(seconds=1), sleep=naps)
    assert naps.seconds == [1.0, 2.0]
    assert list_files(tmp_path / "copy") == []
    with pytest.raises(FileMissingError):
        copy_tree(tree, tmp_path / "copy2", skip_missing=False, max_retries=1, sleep=naps)
    assert not exists(tmp_path / "copy2")


def test_progress_is_told_in_the_calling_thread(folder, tree):
    told = []
    copy_tree(
        tree,
        join(folder, "copy"),
        max_workers=2,
        on_progress=lambda done, total: told.append((done, total, threading.current_thread().name)),
    )
    assert told == [(n, 2, "MainThread") for n in range(3)]


def test_files_are_copied_side_by_side(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in "ab":
        (tree / name).write_bytes(b"x")
    both = threading.Barrier(2, timeout=10)  # breaks unless two workers meet
    honest = LocalBackend.open_read

    def open_read(self, path):
        both.wait()
        return honest(self, path)

    monkeypatch.setattr(LocalBackend, "open_read", open_read)
    assert copy_tree(tree, tmp_path / "copy", max_workers=2)


def test_no_workers_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        copy_tree(tmp_path, tmp_path / "x", max_workers=0)
