from __future__ import annotations

import logging
import os
import signal
import socket
from pathlib import Path

import pytest
from services import warm

from monolith.checkpoint.folder.lock import ModelDirLock
from monolith.errors import FilesystemError, ModelDirLockedError

HOLD = """
import sys, time
from monolith.checkpoint.folder.lock import ModelDirLock
with ModelDirLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""

HOLD_AND_FORK = """
import os, sys, time
from monolith.checkpoint.folder.lock import ModelDirLock
with ModelDirLock(sys.argv[1]):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def start(script: str, folder: Path) -> warm.Popen:
    return warm.Popen(["-c", script, str(folder)], stdout=warm.PIPE)


def test_a_folder_is_locked_while_the_block_runs(tmp_path):
    folder = str(tmp_path / "new" / "run")
    with ModelDirLock(folder), pytest.raises(ModelDirLockedError), ModelDirLock(folder):
        pytest.fail("two at once")
    with ModelDirLock(folder):
        pass


def test_the_error_names_the_holder_of_the_lock(tmp_path):
    with start(HOLD, tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ModelDirLockedError) as raised, ModelDirLock(str(tmp_path)):
            pytest.fail("two at once")
        other.kill()
    assert (raised.value.pid, raised.value.host) == (other.pid, socket.gethostname())
    assert f"process {other.pid} on {socket.gethostname()}" in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_a_killed_process_leaves_nothing_to_clean_up(tmp_path):
    with start(HOLD, tmp_path) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.send_signal(signal.SIGKILL)
    with ModelDirLock(str(tmp_path)):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_children_do_not_inherit_the_lock_of_their_parent(tmp_path):
    with start(HOLD_AND_FORK, tmp_path) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            with pytest.raises(ModelDirLockedError), ModelDirLock(str(tmp_path)):
                pytest.fail("the parent is alive, and the child took nothing from it")
            other.kill()
            other.wait()
            os.kill(child, 0)
            with ModelDirLock(str(tmp_path)):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_error_in_the_block_releases_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), ModelDirLock(str(tmp_path)):
        raise ZeroDivisionError
    with ModelDirLock(str(tmp_path)):
        pass


def test_a_holder_that_has_not_named_itself_is_still_a_holder(tmp_path):
    with ModelDirLock(str(tmp_path)):
        (tmp_path / ".lock").write_text("")
        with (
            pytest.raises(ModelDirLockedError, match="another process") as raised,
            ModelDirLock(str(tmp_path)),
        ):
            pytest.fail("two at once")
    assert (raised.value.pid, raised.value.host) == (None, None)


def test_another_spelling_is_the_same_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    by_url, by_link = ModelDirLock(f"file://{tmp_path}/run"), ModelDirLock(str(tmp_path / "link"))
    with by_url, pytest.raises(ModelDirLockedError), by_link:
        pytest.fail("two at once")


def test_a_remote_folder_is_not_locked(caplog):
    with caplog.at_level(logging.DEBUG), ModelDirLock("memory://lock"), ModelDirLock("memory://lock"):
        pass
    assert "cannot be locked" in caplog.text


def test_a_folder_that_cannot_be_made_is_our_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FilesystemError), ModelDirLock(str(tmp_path / "file" / "run")):
        pytest.fail("there is no such folder")
