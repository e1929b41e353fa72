"""Entries as files: whole or not there, alive while they are touched."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from contracts.discoveries import eventually

from monolith.cluster import FilesConfig, FilesDiscovery
from monolith.errors import ConfigError, FilesystemError

A, B = "10.0.0.1:1", "[::1]:2"


class Now:
    """A clock that a test sets."""

    def __init__(self):
        self.seconds = 1_000_000.0

    def __call__(self):
        return self.seconds


def config(folder, **options):
    return FilesConfig(
        folder=str(folder), **{"heartbeat": timedelta(hours=1), "expire_after": timedelta(hours=2), **options}
    )


def test_an_entry_is_a_file_whose_first_line_is_the_address(tmp_path):
    with FilesDiscovery(config(tmp_path)) as discovery:
        discovery.register("ps", 3, A)
        assert (tmp_path / "ps" / "3").read_text().splitlines()[0] == A
    assert not (tmp_path / "ps" / "3").exists()


def test_an_entry_that_was_not_touched_for_long_is_gone_and_is_back_when_it_is_touched(tmp_path):
    now = Now()
    with (
        FilesDiscovery(config(tmp_path), now, timer=now) as one,
        FilesDiscovery(config(tmp_path), now, timer=now) as other,
    ):
        one.register("ps", 0, A)
        now.seconds += 2 * 3600
        assert other.query("ps") == {0: A}
        now.seconds += 1
        assert other.query("ps") == {}
        one.touch()
        assert other.query("ps") == {0: A}
        assert other.entries("ps")[0].registered_at == 1_000_000.0


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_wall_clock_that_jumps_ends_no_entry_and_keeps_none_alive(tmp_path, jump):
    wall, timer = Now(), Now()
    one = FilesDiscovery(config(tmp_path), wall, timer=timer)
    with one, FilesDiscovery(config(tmp_path), wall, timer=timer) as other:
        one.register("ps", 0, A)
        assert other.query("ps") == {0: A}
        wall.seconds += jump
        assert other.query("ps") == {0: A}
        for _ in range(3):
            timer.seconds += 3600
            one.touch()
            wall.seconds += 3600
            assert other.query("ps") == {0: A}
        timer.seconds += 2 * 3600 + 1  # by which it is gone, whatever the wall clock says
        assert other.query("ps") == {}


def test_the_heartbeat_keeps_an_entry_alive(tmp_path):
    quick = config(tmp_path, heartbeat=timedelta(milliseconds=20), expire_after=timedelta(milliseconds=500))
    with FilesDiscovery(quick) as discovery:
        discovery.register("ps", 0, A)
        mtime = (tmp_path / "ps" / "0").stat().st_mtime
        eventually(lambda: (tmp_path / "ps" / "0").stat().st_mtime > mtime + 0.6)
        assert discovery.query("ps") == {0: A}


@pytest.mark.parametrize("content", [b"", b"garbage", b"not an address\n1\nx\n", b"\xff\xfe\n1\n2\n"])
def test_a_file_that_is_no_entry_is_skipped_and_rewritten_by_its_owner(tmp_path, content):
    with FilesDiscovery(config(tmp_path)) as one, FilesDiscovery(config(tmp_path)) as other:
        one.register("ps", 0, A)
        (tmp_path / "ps" / "0").write_bytes(content)
        (tmp_path / "ps" / "notes.txt").write_text("of somebody")
        assert other.query("ps") == {}
        one.touch()
        assert other.query("ps") == {0: A}


def test_an_entry_that_was_removed_comes_back_while_its_process_lives(tmp_path):
    with FilesDiscovery(config(tmp_path)) as discovery:
        discovery.register("ps", 0, A)
        (tmp_path / "ps" / "0").unlink()
        discovery.touch()
        assert discovery.query("ps") == {0: A}


def test_a_replaced_process_does_not_take_its_place_back(tmp_path):
    now = Now()
    with (
        FilesDiscovery(config(tmp_path), now, timer=now) as before,
        FilesDiscovery(config(tmp_path), now, timer=now) as after,
    ):
        before.register("ps", 0, A)
        after.register("ps", 0, B)
        before.touch()
        assert after.query("ps") == {0: B}
        now.seconds += 3 * 3600
        before.touch()
        assert after.query("ps") == {}  # and does not keep it alive for the other either


PROCESS = """
import sys, threading
from datetime import timedelta
from monolith.cluster import FilesConfig, FilesDiscovery
folder, index = sys.argv[1:]
quick = {"heartbeat": timedelta(milliseconds=100), "expire_after": timedelta(seconds=1)}
FilesDiscovery(FilesConfig(folder=folder, **quick)).register("worker", int(index), f"10.0.0.{index}:1")
threading.Event().wait()
"""


def test_the_entry_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path):
    quick = config(tmp_path, heartbeat=timedelta(milliseconds=100), expire_after=timedelta(seconds=1))
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(index)]) for index in range(2)
    ]
    try:
        with FilesDiscovery(quick) as here:
            eventually(lambda: here.query("worker").keys() == {0, 1}, 60)
            processes[0].kill()
            eventually(lambda: here.query("worker") == {1: "10.0.0.1:1"})
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_many_that_register_at_once_are_all_there(tmp_path):
    discoveries = [FilesDiscovery(config(tmp_path)) for _ in range(8)]
    threads = [
        threading.Thread(
            target=lambda one=one, first=first: [one.register("ps", first + n, A) for n in range(10)]
        )
        for first, one in zip(range(0, 80, 10), discoveries, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert discoveries[0].query("ps") == dict.fromkeys(range(80), A)
    assert not [path for path in (tmp_path / "ps").iterdir() if not path.name.isdecimal()]
    for discovery in discoveries:
        discovery.close()


def test_a_heartbeat_slower_than_the_expiry_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="heartbeat"):
        FilesConfig(folder=str(tmp_path), heartbeat=timedelta(seconds=2), expire_after=timedelta(seconds=1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FilesystemError, match="file"):
        FilesDiscovery(config(tmp_path / "file" / "below"))
