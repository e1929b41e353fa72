"""Files and folders in places that other users may write to: planted links and folders change nothing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from monolith import filesystem
from monolith.errors import FilesystemError
from monolith.filesystem import backends, link_or_copy, open_regular, private_folder, temporary_folder

WRITE = os.O_RDWR | os.O_CREAT


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("dear")
    return path


def test_a_link_is_not_followed_to_a_file_or_to_a_name_that_is_free(tmp_path: Path, victim: Path) -> None:
    for target in (victim, tmp_path / "free"):
        planted = tmp_path / f"planted-{target.name}"
        planted.symlink_to(target)
        with pytest.raises(FilesystemError, match="symbolic link"):
            open_regular(planted, WRITE)
    assert victim.read_text() == "dear"
    assert not (tmp_path / "free").exists()


def test_a_pipe_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FilesystemError, match="no ordinary file"):
        open_regular(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(OSError, match="pipe"):
        open_regular(tmp_path / "pipe", os.O_WRONLY)
    with pytest.raises(FilesystemError, match="no ordinary file"):
        open_regular(tmp_path / "folder", os.O_RDONLY)


def test_an_own_file_has_one_name_this_user_and_no_mode_for_others(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim.chmod(0o644)
    with pytest.raises(FilesystemError, match="mode 0644"):
        open_regular(victim, os.O_RDWR, own=True)
    victim.chmod(0o600)
    os.close(open_regular(victim, os.O_RDWR, own=True))
    os.link(victim, tmp_path / "second")
    with pytest.raises(FilesystemError, match="2 names"):
        open_regular(tmp_path / "second", os.O_RDWR, own=True)
    (tmp_path / "second").unlink()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(FilesystemError, match=f"not of user {other}"):
        open_regular(victim, os.O_RDWR, own=True)


def test_an_own_file_is_created_for_this_user_alone(tmp_path: Path) -> None:
    os.close(open_regular(tmp_path / "own", WRITE, own=True))
    assert mode_of(tmp_path / "own") == 0o600


def test_a_private_folder_is_made_and_found_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert private_folder(tmp_path / "mine") == tmp_path / "mine"
        assert mode_of(tmp_path / "mine") == 0o700


def test_a_folder_that_another_user_could_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "file").touch(mode=0o600)
    for name in ("link", "open", "file"):
        with pytest.raises(FilesystemError, match="must be a folder of this user"):
            private_folder(tmp_path / name)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(FilesystemError, match="must be a folder of this user"):
        private_folder(tmp_path / "real")


def test_a_temporary_folder_is_for_this_user_alone_and_gone_afterwards(tmp_path: Path) -> None:
    with temporary_folder("one-", tmp_path) as folder, temporary_folder("one-", tmp_path) as other:
        assert folder != other
        assert mode_of(folder) == 0o700
        (folder / "x").touch()
    assert not list(tmp_path.iterdir())


def test_a_lock_and_a_database_follow_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "planted").symlink_to(victim)
    backend, path = backends.locate(tmp_path / "planted")
    with pytest.raises(FilesystemError, match="symbolic link"):
        backend.lock(path, b"holder")
    (tmp_path / "new").symlink_to(tmp_path / "free")
    with pytest.raises(FilesystemError, match="symbolic link"):
        filesystem.open_database(tmp_path / "new")
    assert victim.read_text() == "dear"
    assert not (tmp_path / "free").exists()


@pytest.mark.parametrize("linked", [True, False], ids=["link", "copy"])
def test_a_private_file_is_as_readable_in_a_shared_folder_as_that_folder(
    tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint links to cold files; a team that can read the folder can read all of it."""
    if not linked:

        def cannot_link(old: str, new: str) -> None:
            raise OSError(errno.EXDEV, "other disk", old, None, new)

        monkeypatch.setattr(os, "link", cannot_link)
    for folder, mode in ((tmp_path / "team", 0o755), (tmp_path / "alone", 0o700)):
        folder.mkdir()
        folder.chmod(mode)
        source = tmp_path / f"rows-{folder.name}"
        source.touch(mode=0o600)
        assert link_or_copy(source, folder / "rows") == linked
        assert link_or_copy(folder / "rows", folder / "own", private=True) == linked
    assert mode_of(tmp_path / "team" / "rows") == 0o644
    assert mode_of(tmp_path / "team" / "own") == (0o644 if linked else 0o600)  # a link has one mode
    assert mode_of(tmp_path / "alone" / "rows") == (0o600 if linked else 0o644)
