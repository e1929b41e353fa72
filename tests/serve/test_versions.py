"""Versions appear whole, and none goes while somebody has it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from monolith.errors import ConfigError, ExportError, FileMissingError
from monolith.serve.manifest import Servable, write_servable
from monolith.serve.versions import (
    WITHHELD,
    LockedVersion,
    NewVersion,
    Withheld,
    existing_version,
    find_version,
    keep_newest,
    list_versions,
    lock_version,
    read_withheld,
    release,
    remove_leftovers,
    remove_versions,
    withheld_versions,
    withhold,
)

SERVABLE = Servable(
    model="clicks",
    version="1",
    run="runs/1",
    checkpoint="model.ckpt-1",
    step=1,
    watermark=None,
    created=1.0,
    digest="d",
)


def put(root: Path, version: str, *, created: float = 1.0, digest: str = "d") -> str:
    with NewVersion(str(root), version, digest) as made:
        write_servable(made.folder, replace(SERVABLE, version=version, created=created, digest=digest))
        return made.commit()


def test_versions_are_listed_oldest_first_numbers_by_size(tmp_path):
    for version in ("9", "100", "20"):
        put(tmp_path, version)
    put(tmp_path, "rc", created=2.0)
    put(tmp_path, "beta", created=1.0)
    assert list_versions(str(tmp_path)) == ["beta", "rc", "9", "20", "100"]
    assert find_version(str(tmp_path)) == str(tmp_path / "100")
    assert find_version(str(tmp_path / "9")) == str(tmp_path / "9")


def test_a_version_that_is_not_complete_is_none(tmp_path):
    with NewVersion(str(tmp_path), "1", "d") as made:
        Path(made.folder, "half").touch()
        assert list_versions(str(tmp_path)) == []
        with pytest.raises(FileMissingError, match="monolith export --to"):
            find_version(str(tmp_path))
    (tmp_path / "2").mkdir()
    assert list_versions(str(tmp_path)) == []
    assert list_versions(str(tmp_path / "nowhere")) == []


def test_the_newest_of_a_sharded_servable_is_that_of_its_entry(tmp_path):
    put(tmp_path / "entry", "7")
    assert find_version(str(tmp_path)) == str(tmp_path / "entry" / "7")


@pytest.mark.parametrize("version", ["", ".1", "a/b", "x" * 101])
def test_a_version_that_cannot_be_a_folder_is_refused(tmp_path, version):
    with pytest.raises(ConfigError, match="name of a folder"):
        NewVersion(str(tmp_path), version, "d")


def test_the_files_of_a_killed_export_are_resumed(tmp_path):
    with NewVersion(str(tmp_path), "1", "d") as first:
        Path(first.folder, "table").touch()
    with NewVersion(str(tmp_path), "1", "d") as second:
        assert Path(second.folder, "table").exists()


def test_files_of_another_export_are_written_again(tmp_path):
    with NewVersion(str(tmp_path), "1", "d") as first:
        Path(first.folder, "table").touch()
    with NewVersion(str(tmp_path), "1", "other") as second:
        assert not Path(second.folder, "table").exists()
        assert not Path(first.folder).exists()


def test_two_do_not_write_one_version(tmp_path):
    with (
        NewVersion(str(tmp_path), "1", "d"),
        pytest.raises(ExportError, match="another process is exporting"),
    ):
        NewVersion(str(tmp_path), "1", "d")


def test_what_another_process_writes_is_left_alone(tmp_path):
    with NewVersion(str(tmp_path), "1", "d") as other, NewVersion(str(tmp_path), "2", "d"):
        assert Path(other.folder).exists()


def test_a_version_that_is_there_is_the_same_or_in_the_way(tmp_path):
    put(tmp_path, "1", digest="d")
    found = existing_version(str(tmp_path), "1", "d")
    assert found is not None
    assert found.version == "1"
    assert existing_version(str(tmp_path), "2", "d") is None
    with pytest.raises(ExportError, match=r"exists already.*--version"):
        existing_version(str(tmp_path), "1", "other")


# Holding


def test_a_version_in_use_is_not_removed(tmp_path):
    for version in ("1", "2", "3"):
        put(tmp_path, version)
    with LockedVersion(str(tmp_path / "1")) as held:
        assert held.servable.version == "1"
        assert keep_newest([str(tmp_path)], 1) == (["2"], ["1"])
        assert list_versions(str(tmp_path)) == ["1", "3"]
    assert keep_newest([str(tmp_path)], 1) == (["1"], [])
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_several_hold_one_version(tmp_path):
    folder = put(tmp_path, "1")
    first, second = LockedVersion(folder), LockedVersion(folder)
    first.close()
    first.close()
    assert remove_versions([str(tmp_path)], ["1"]) == ([], ["1"])
    second.close()
    assert remove_versions([str(tmp_path)], ["1"]) == (["1"], [])


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    folder = put(tmp_path, "1")
    code = (
        "import fcntl, os, sys, time\n"
        f"file = os.open({folder + '/.held'!r}, os.O_RDONLY)\n"
        "fcntl.flock(file, fcntl.LOCK_SH)\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert remove_versions([str(tmp_path)], ["1"]) == ([], ["1"])
        other.kill()
        other.wait(60)
    assert remove_versions([str(tmp_path)], ["1"]) == (["1"], [])


def test_a_version_that_one_part_holds_stays_in_all_parts(tmp_path):
    roots = [str(tmp_path / "entry"), str(tmp_path / "ps_0")]
    for root in roots:
        put(Path(root), "1")
    with LockedVersion(roots[1] + "/1"):
        assert remove_versions(roots, ["1"]) == ([], ["1"])
    assert remove_versions(roots, ["1"]) == (["1"], [])


def test_a_version_that_is_removed_meanwhile_is_not_locked(tmp_path):
    folder = put(tmp_path, "1")
    put(tmp_path, "2")
    remove_versions([str(tmp_path)], ["2"])
    with pytest.raises(FileMissingError, match="removed a moment ago"):
        LockedVersion(str(tmp_path / "2"))
    with lock_version(str(tmp_path)) as held:
        assert held.folder == folder


def test_a_version_that_was_renamed_into_place_just_now_is_waited_for(tmp_path):
    folder = put(tmp_path, "1")
    file = os.open(folder + "/.held", os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)  # as an export has it until it is done
    held: list[LockedVersion] = []
    waiting = threading.Thread(target=lambda: held.append(LockedVersion(folder)))
    waiting.start()
    waiting.join(0.05)
    assert held == []
    os.close(file)
    waiting.join(60)
    assert len(held) == 1
    held[0].close()


def test_what_a_killed_removal_left_is_removed(tmp_path):
    put(tmp_path, "1")
    left = tmp_path / ".0.removed.aa"
    left.mkdir()
    remove_leftovers(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_at_least_one_is_kept(tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        keep_newest([str(tmp_path)], 0)


# Withheld

BAD = Withheld(reason="labels went wrong", first_bad_step=2)


def test_the_newest_version_is_the_newest_that_is_not_withheld(tmp_path):
    for version in ("1", "2", "3"):
        put(tmp_path, version)
    withhold(str(tmp_path / "3"), BAD)
    assert find_version(str(tmp_path)) == str(tmp_path / "2")
    assert list_versions(str(tmp_path)) == ["1", "2", "3"], "it is complete, and stays"
    assert withheld_versions(str(tmp_path), ["1", "2", "3"]) == {"3": BAD}
    release(str(tmp_path / "3"))
    release(str(tmp_path / "3"))
    assert find_version(str(tmp_path)) == str(tmp_path / "3")


def test_a_withheld_version_is_opened_if_it_is_named_and_meant(tmp_path):
    put(tmp_path, "3")
    withhold(str(tmp_path / "3"), BAD)
    with pytest.raises(FileMissingError, match=r"3 \(from step 2 on, labels went wrong\)"):
        find_version(str(tmp_path))
    with pytest.raises(ConfigError, match="--serve-withheld 3"):
        lock_version(str(tmp_path / "3"))
    with lock_version(str(tmp_path / "3"), serve_withheld=True) as held:
        assert held.servable.version == "3"


def test_a_mark_that_cannot_be_read_withholds(tmp_path):
    put(tmp_path, "3")
    (tmp_path / "3" / WITHHELD).write_text("{")
    mark = read_withheld(str(tmp_path / "3"))
    assert mark is not None
    assert "cannot be read" in mark.reason


def test_retention_keeps_the_last_good_versions_however_many_are_withheld(tmp_path):
    for version in range(1, 8):
        put(tmp_path, str(version))
    for version in range(4, 8):
        withhold(str(tmp_path / str(version)), BAD)
    assert keep_newest([str(tmp_path)], 2) == (["1", "4", "5"], [])
    assert list_versions(str(tmp_path)) == ["2", "3", "6", "7"]


def test_a_withheld_version_makes_room_for_another_export_of_its_step(tmp_path):
    put(tmp_path, "3", digest="bad")
    with pytest.raises(ExportError):
        existing_version(str(tmp_path), "3", "good")
    withhold(str(tmp_path / "3"), BAD)
    with LockedVersion(str(tmp_path / "3")), pytest.raises(ExportError):
        existing_version(str(tmp_path), "3", "good")
    assert existing_version(str(tmp_path), "3", "good") is None
    assert list_versions(str(tmp_path)) == []
