"""The jobs that one user runs on this machine, found without any configuration.

Each process of a job listens on a Unix socket in a folder of its user. The folder has mode 0700, so the file
system refuses every other user; the socket also asks the kernel who calls. A caller lists the sockets, asks
each process what it is, and sends it one request:

    FOLDER/4711.sock      {"do": "describe"}                -> {"pid": 4711, "process": "worker-0", ...}
                          {"do": "profile", "seconds": 5}   -> {"path": ..., "threads": [...]}

A message is one line of JSON. A socket that a killed process left behind refuses connections and is removed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monolith import concurrency
from monolith.errors import MonolithError, RequestError, UnavailableError
from monolith.filesystem import private_folder

_log = logging.getLogger(__name__)

_FOLDER = "monolith"
_LONGEST_PATH = 100
"""Bytes in the path of a Unix socket; the kernel allows 107."""
_LONGEST_LINE = 4 << 20
_DESCRIBE_SECONDS = 5.0
_REQUEST_SECONDS = 5.0

GivenUp = Callable[[], bool]
Answer = Callable[[Mapping[str, Any], GivenUp], Mapping[str, Any]]
"""(request, whether the caller has left) -> the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalProcess:
    """What one process of a job says of itself."""

    pid: int
    process: str
    """Its place in the job, such as worker-0, ps-1 or serve-0."""
    name: str = ""
    """The name of the run, or of the served models."""
    folder: str = ""
    """The model_dir of a run; empty if it has none."""
    serves: tuple[str, ...] = ()
    """The folders that a server serves."""
    started: float = 0.0
    """Unix seconds."""


def runtime_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders in which this user's processes may listen, the preferred one first.

    A job started by a service manager may lack XDG_RUNTIME_DIR, so a caller looks into all of them.
    """
    user = os.geteuid()
    own = [Path(text, _FOLDER)] if (text := environ.get("XDG_RUNTIME_DIR")) else []
    found = [*own, Path(f"/run/user/{user}", _FOLDER), Path(f"/tmp/monolith-{user}")]
    return [folder for folder in dict.fromkeys(found) if len(os.fsencode(folder)) + 20 <= _LONGEST_PATH]


@contextmanager
def listening(about: LocalProcess, answer: Answer, environ: Mapping[str, str]) -> Iterator[None]:
    """Answer requests of the same user while the block lasts.

    A process that cannot listen still does its work; the log says why it cannot be asked.

    Args:
        answer: Called in a thread of its own for each request. A MonolithError is sent to the caller.
    """
    server = _open(environ)
    if server is None:
        yield
        return
    path = Path(server.getsockname())
    stop = concurrency.Event()
    thread = concurrency.Thread(
        target=_accept, args=(server, about, answer, stop), name="job-socket", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        path.unlink(missing_ok=True)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes accept()
        server.close()
        thread.join(1.0)


def local_processes(environ: Mapping[str, str]) -> list[LocalProcess]:
    """Return the processes of all jobs of this user on this machine, the oldest first."""
    found = []
    for path in _sockets(environ):
        with suppress(MonolithError):
            told = _ask(path, {"do": "describe"}, _DESCRIBE_SECONDS)
            found.append(LocalProcess(**{**told, "serves": tuple(told["serves"])}))
    return sorted(found, key=lambda one: (one.started, one.process))


def ask_process(
    pid: int, request: Mapping[str, Any], environ: Mapping[str, str], *, timeout: float
) -> dict[str, Any]:
    """Send one request to a process of this user, and return its answer.

    Raises:
        UnavailableError: It has ended, or does not answer in time.
        RequestError: It refused; the message says why.
    """
    for path in _sockets(environ):
        if path.stem == str(pid):
            return _ask(path, request, timeout)
    raise UnavailableError(f"process {pid} has ended")


# The process that is asked


def _open(environ: Mapping[str, str]) -> socket.socket | None:
    why: object = "there is no folder with a short name"
    for folder in runtime_folders(environ):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if folder.parent.is_dir():
                private_folder(folder)
                path = folder / f"{os.getpid()}.sock"
                path.unlink(missing_ok=True)  # of a killed process that had this number
                server.bind(str(path))
                path.chmod(0o600)
                server.listen(8)
                return server
        except (OSError, RequestError) as error:
            why = error
        server.close()
    _log.info("`monolith status profile` cannot ask this process: %s", why)
    return None


def _accept(server: socket.socket, about: LocalProcess, answer: Answer, stop: concurrency.Event) -> None:
    while not stop.is_set():
        try:
            caller, _ = server.accept()
        except OSError:
            return  # closed
        concurrency.Thread(
            target=_serve, args=(caller, about, answer), name="job-socket-call", daemon=True
        ).start()


def _serve(caller: socket.socket, about: LocalProcess, answer: Answer) -> None:
    with caller:
        try:
            _check_caller(caller)
            caller.settimeout(_REQUEST_SECONDS)
            request = _read_line(caller)
            if request.get("do") == "describe":
                told: Mapping[str, Any] = asdict(about)
            else:
                told = answer(request, lambda: _has_left(caller))
        except MonolithError as error:
            told = {"error": str(error)}
        except Exception as error:  # the job must not end because of a request
            _log.warning("a request to this process failed: %s: %s", type(error).__name__, error)
            told = {"error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            caller.sendall(json.dumps(told).encode() + b"\n")


def _check_caller(caller: socket.socket) -> None:
    if sys.platform != "linux":
        return  # the folder's mode has refused other users already
    _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user not in (0, os.geteuid()):
        raise RequestError(f"this process belongs to user {os.geteuid()} and answers no one else, not {user}")


def _has_left(caller: socket.socket) -> bool:
    readable, _, _ = select.select([caller], [], [], 0)
    return bool(readable) and not caller.recv(1, socket.MSG_PEEK)


# The caller


def _sockets(environ: Mapping[str, str]) -> Iterator[Path]:
    for folder in runtime_folders(environ):
        try:
            found = sorted(folder.glob("*.sock"))
            if found:
                private_folder(folder)
        except (OSError, RequestError) as error:
            _log.warning("cannot look for running jobs: %s", error)
            continue
        yield from found


def _ask(path: Path, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as process:
        process.settimeout(timeout)
        try:
            process.connect(str(path))
            process.sendall(json.dumps(request).encode() + b"\n")
            told = _read_line(process)
        except OSError as cause:
            if cause.errno in (errno.ECONNREFUSED, errno.ENOENT):
                path.unlink(missing_ok=True)
                raise UnavailableError(f"process {path.stem} has ended") from cause
            why = cause.strerror or "no answer in time"
            raise UnavailableError(f"process {path.stem} cannot be asked: {why}") from cause
    if "error" in told:
        raise RequestError(str(told["error"]))
    return told


def _read_line(peer: socket.socket) -> dict[str, Any]:
    read = b""
    while not read.endswith(b"\n"):
        more = peer.recv(1 << 16)
        read += more
        if not more or len(read) > _LONGEST_LINE:
            raise UnavailableError("the connection ended before a whole message had come")
    try:
        message = json.loads(read)
    except ValueError as cause:
        raise RequestError("a message must be one line of JSON") from cause
    if not isinstance(message, dict):
        raise RequestError("a message must be one JSON object")
    return message
