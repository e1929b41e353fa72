"""The server behind `warm`: imports once, forks for whoever asks.

python warm_server.py SOCKET INTERPRETER SPACE

A connection is a process: it asks for one, and is told its pid and in the end its status. The pid is nobody
else's until the connection is closed; closed before, the process is killed. When standard input ends, so does
the server, and with it every process.

A fork leaves `serve`, and runs its program as the end of this one: threads are waited for and exit handlers
run as ever. Only then it goes at once (see `Exit`), since to take apart what was imported takes longer than
most programs. Nothing here may start a thread.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

LIBRARIES = ("numpy.random", "pyarrow.flight", "pyarrow.parquet", "rich.progress", "torch._dynamo", "tyro")
ROOMS = ("checkpoint", "data", "data.service", "model", "store", "train", "train.hooks")
SHOW_STACKS = signal.SIGRTMIN + 1
"""Has a process write what each of its threads is at to its standard error."""
COMMANDS = ("train", "evaluate", "data dispatcher", "data worker")


def import_all() -> None:
    """Import what most programs of tests need. None of it does anything but define names."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in ROOMS:
        room = importlib.import_module(f"monolith.{name}")
        for offered in room.__all__:
            getattr(room, offered)  # a front door may open only when asked
    commands = importlib.import_module("monolith.cli.commands").COMMANDS
    for name in COMMANDS:
        importlib.import_module(commands[name].module)
    importlib.import_module("monolith.cli.main")
    importlib.import_module("monolith.cli.train")


@dataclass
class Request:
    """A program to run."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    session: bool
    files: list[int]


class Server:
    """Connections, and the process of each."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(64)
        self._pids: dict[socket.socket, int] = {}
        self._running: dict[int, socket.socket] = {}
        self._wakes, self._woken = os.pipe()
        for end in (self._wakes, self._woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes us up
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._wakes, 0):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Return None when standard input has ended; and in every fork what it is to run."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.fileobj == self._wakes:
                    os.read(self._wakes, 4096)
                    self._tell_ends()
                elif key.fileobj == 0:
                    for end in list(self._pids):
                        self._forget(end)
                    return None
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._forget(key.fileobj)

    def _accept(self) -> Request | None:
        end, _ = self._listener.accept()
        request = read_request(end)
        pid = os.fork()
        if not pid:
            self._leave()
            end.close()
            return request
        for file in request.files:
            os.close(file)
        self._pids[end] = pid
        self._running[pid] = end
        self._selector.register(end, selectors.EVENT_READ)
        answer(end, pid)
        return None

    def _tell_ends(self) -> None:
        for pid in list(self._running):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                answer(self._running.pop(pid), status)

    def _forget(self, end: socket.socket) -> None:
        pid = self._pids.pop(end)
        if self._running.pop(pid, None) is not None:
            os.kill(pid, signal.SIGKILL)  # ours: nobody has waited for it
        os.waitpid(pid, 0)
        self._selector.unregister(end)
        end.close()

    def _leave(self) -> None:
        """Close what is the server's, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self._listener.close()
        for end in self._pids:
            end.close()
        os.close(self._wakes)
        os.close(self._woken)


def read_request(end: socket.socket) -> Request:
    size, files, _, _ = socket.recv_fds(end, 4, 3)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += end.recv(1 << 20)
    return Request(files=files, **json.loads(text))


def answer(end: socket.socket, number: int) -> None:
    try:
        end.sendall(b"%d\n" % number)
    except OSError:
        return  # it has gone, and will be forgotten


def become(request: Request, interpreter: str) -> None:
    """Make this process one that was started by such a request."""
    if request.session:
        os.setsid()
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    for number, file in enumerate(request.files):
        os.dup2(file, number)
    for file in request.files:
        if file > 2:
            os.close(file)
    written_through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = opened(1, written_through)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = opened(2, written_through, errors="backslashreplace")  # type: ignore[misc]
    faulthandler.register(SHOW_STACKS, sys.stderr)
    sys.executable = interpreter
    show_command([interpreter, *request.words])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))  # which torch has read already


def opened(number: int, written_through: bool, errors: str = "strict") -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    buffered: Any = raw if written_through else io.BufferedWriter(raw)
    lines = raw.isatty() or number == 2
    return io.TextIOWrapper(
        buffered, encoding="utf-8", errors=errors, line_buffering=lines, write_through=written_through
    )


def show_command(words: list[str]) -> None:
    """Have /proc say what this process runs, as it would of one that was started by itself."""
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, stop = int(fields[45]), int(fields[46])
    text = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)[: stop - start - 1]
    ctypes.memset(start, 0, stop - start)
    ctypes.memmove(start, text, len(text))


def run(words: list[str]) -> None:
    """Run a program as an interpreter with these arguments does."""
    first, rest = words[0], words[1:]
    theirs = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [*theirs, *(path for path in sys.path[1:] if path not in theirs)]
    if first == "-m":
        sys.argv, sys.path[:] = rest, [str(Path.cwd()), *paths]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *paths]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[:] = words, [str(Path(first).parent.resolve()), *paths]
        runpy.run_path(first, run_name="__main__")


class Exit:
    """The end of a fork: the last exit handler, as the first that was registered."""

    def __init__(self) -> None:
        self._status: int | None = None
        atexit.register(self._leave)

    def after(self, words: list[str]) -> None:
        """Run a program, and keep the status it ends with."""
        try:
            run(words)
            self._status = 0
        except SystemExit as stop:
            if stop.code is not None and not isinstance(stop.code, int):
                sys.stderr.write(f"{stop.code}\n")
            self._status = stop.code & 0xFF if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException as error:
            error = error.with_traceback(own_frames(error.__traceback__))
            sys.excepthook(type(error), error, error.__traceback__)  # perhaps the program's own
            self._status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    def _leave(self) -> None:
        if self._status is None:
            return  # the server itself
        for file in (sys.stdout, sys.stderr):
            if not file.closed:
                file.flush()
        if self._status < 0:
            signal.signal(-self._status, signal.SIG_DFL)
            os.kill(os.getpid(), -self._status)
        os._exit(self._status)


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first frame on."""
    while (
        trace is not None
        and trace.tb_next
        and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__)
    ):
        trace = trace.tb_next
    return trace


def main(address: str, interpreter: str) -> None:
    exit_ = Exit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at a terminal it is for who asked
    import_all()
    gc.freeze()
    server = Server(address)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    request = server.serve()
    if request is not None:
        del server
        become(request, interpreter)
        exit_.after(request.words)


if __name__ == "__main__":
    main(*sys.argv[1:3])
