"""Jobs of one user on this machine: found without configuration, closed to other users."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from monolith.cluster.local_jobs import (
    GivenUp,
    LocalProcess,
    ask_process,
    listening,
    local_processes,
    runtime_folders,
)
from monolith.errors import ConfigError, RequestError, UnavailableError

ME = LocalProcess(pid=os.getpid(), process="worker-0", name="clicks", folder="/runs/a", started=5.0)


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    folder = tempfile.mkdtemp(prefix="jobs-")  # short: the path of a socket has at most 107 bytes
    yield {"XDG_RUNTIME_DIR": folder}
    shutil.rmtree(folder)


def own(found: list[LocalProcess]) -> list[LocalProcess]:
    return [one for one in found if one.pid == os.getpid()]  # other jobs of this user may run


def echo(request: Mapping[str, Any], _: GivenUp) -> Mapping[str, Any]:
    if request["do"] == "fail":
        raise ConfigError("the request makes no sense")
    if request["do"] == "break":
        raise ZeroDivisionError("oh")
    return {"told": request["do"]}


def test_a_process_is_found_asked_and_gone_when_it_ends(environ: dict[str, str]) -> None:
    with listening(ME, echo, environ):
        assert own(local_processes(environ)) == [ME]
        assert ask_process(ME.pid, {"do": "greet"}, environ, timeout=10) == {"told": "greet"}
    assert own(local_processes(environ)) == []
    with pytest.raises(UnavailableError, match="has ended"):
        ask_process(ME.pid, {"do": "greet"}, environ, timeout=10)


def test_an_error_is_raised_in_the_caller_and_the_process_continues(environ: dict[str, str]) -> None:
    with listening(ME, echo, environ):
        with pytest.raises(RequestError, match="the request makes no sense"):
            ask_process(ME.pid, {"do": "fail"}, environ, timeout=10)
        with pytest.raises(RequestError, match="ZeroDivisionError: oh"):
            ask_process(ME.pid, {"do": "break"}, environ, timeout=10)
        assert ask_process(ME.pid, {"do": "greet"}, environ, timeout=10) == {"told": "greet"}


def test_a_process_learns_that_its_caller_has_left(environ: dict[str, str]) -> None:
    left = threading.Event()

    def wait(_: Mapping[str, Any], given_up: GivenUp) -> Mapping[str, Any]:
        while not given_up():
            pass
        left.set()
        return {}

    with listening(ME, wait, environ):
        with pytest.raises(UnavailableError, match="no answer in time"):
            ask_process(ME.pid, {"do": "wait"}, environ, timeout=0.05)
        assert left.wait(60)


def test_the_folder_and_the_socket_are_of_this_user_alone(environ: dict[str, str]) -> None:
    with listening(ME, echo, environ):
        (folder, *_) = runtime_folders(environ)
        (path,) = folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["others may enter", "of another user", "a link"])
def test_a_folder_that_others_prepared_is_not_used(
    environ: dict[str, str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder, *_) = runtime_folders(environ)
    if what == "a link":
        (tmp_path / "there").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "there")
    else:
        folder.mkdir(mode=0o700)
        if what == "others may enter":
            folder.chmod(0o755)
        elif os.geteuid() == 0:
            os.chown(folder, 12345, 12345)
        else:
            pytest.skip("only root can make a folder of another user")
    monkeypatch.setattr("monolith.cluster.local_jobs.runtime_folders", lambda _: [folder])
    with listening(ME, echo, environ):  # the job itself does its work
        assert not [*folder.iterdir()]
        (folder / f"{ME.pid}.sock").touch()
        assert local_processes(environ) == []


def test_another_user_is_refused(environ: dict[str, str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with listening(ME, echo, environ):
        (folder, *_) = runtime_folders(environ)
        Path(environ["XDG_RUNTIME_DIR"]).chmod(0o755)
        path = str(folder / f"{ME.pid}.sock")

        def refused() -> bool:
            """Whether a child that is another user cannot connect."""
            child = os.fork()
            if child == 0:
                os.setuid(12345)
                with socket.socket(socket.AF_UNIX) as caller:
                    os._exit(0 if caller.connect_ex(path) == 13 else 1)
            return os.waitpid(child, 0)[1] == 0

        assert refused()


def test_a_socket_that_a_killed_process_left_is_removed(environ: dict[str, str]) -> None:
    (folder, *_) = runtime_folders(environ)
    folder.mkdir(mode=0o700)
    left = folder / "999999.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(left))
    assert 999999 not in {one.pid for one in local_processes(environ)}
    assert not left.exists()
