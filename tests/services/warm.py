"""Programs in processes that have torch and monolith imported already: for tests that start many.

`Popen(["-m", "monolith", "train", ...])` is used as `subprocess.Popen([sys.executable, "-m", ...])` is. The
process is a real one, with a pid, an exit status, a working folder, an environment and files of its own, and
may be signalled, stopped and killed. But it begins as a fork of a server (see `warm_server`), which has
imported once what every one of them would import: a tenth of a second in place of three. All workers of
pytest share one server, which the first that needs it starts and which ends with pytest.

`sys.executable` of such a process starts warm ones too, so a launcher's members cost no more than itself. Who
needs a new interpreter (options before -m, another user, another namespace) starts one as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

import pytest
from services.warm_interpreter import ask

TESTS = Path(__file__).resolve().parents[1]
PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
START_TIMEOUT_S = 120.0
LONGEST_COMMAND_BYTES = 1 << 15
"""Room for what /proc says a process runs: the server is started with an argument as long, and forks write
theirs over it."""

_INTERPRETER = """#!{python} -IS
import sys
sys.path.append({services!r})
import warm_interpreter
warm_interpreter.main({socket!r}, {python!r}, sys.argv)
"""


class Server:
    """The process that forks. It ends, with all it has started, when the writers of its input have closed it.

    Args:
        folder: Where its socket and its interpreter are.
        life: Its input. By default a pipe of this process, so that it ends when this process does.
    """

    def __init__(self, folder: Path, life: int = subprocess.PIPE) -> None:
        self._folder = folder
        self.address = str(folder / "socket")
        self.interpreter = folder / "python"
        """Stands in for `sys.executable`, for others who start programs."""
        self._process: subprocess.Popen[bytes] | None = None
        if not Path(self.address).exists():
            self._start(life)

    def _start(self, life: int) -> None:
        self.interpreter.write_text(
            _INTERPRETER.format(
                python=sys.executable, services=str(Path(__file__).parent), socket=self.address
            )
        )
        self.interpreter.chmod(0o755)
        server = Path(__file__).with_name("warm_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(server), self.address, str(self.interpreter), " " * LONGEST_COMMAND_BYTES],
            stdin=life,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_TIMEOUT_S)[0]:
            raise TimeoutError(f"the server of warm processes does not listen after {START_TIMEOUT_S:g} s")
        assert self._process.stdout.readline() == b"listening\n", "the server of warm processes has failed"

    def close(self) -> None:
        """End a server that is not shared."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


_starting = threading.Lock()
_shared: Path | None = None
"""The folder of the server that all workers share; None in a pytest without workers."""


def server() -> Server:
    """Return the server of this process, started when first asked for, by whichever thread."""
    with _starting:
        return _server()


@cache
def _server() -> Server:
    if _shared is not None:
        # A worker that comes while another one starts the server waits here, and finds its socket.
        with (_shared / "lock").open("w") as lock, (_shared / "life").open("rb", buffering=0) as life:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return Server(_shared, life.fileno())
    started = Server(Path(tempfile.mkdtemp(prefix="warm-")))
    atexit.register(started.close)
    return started


class _Sharing:
    """In the process that starts the workers: the folder they share, and the writer that ends the server."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        os.mkfifo(self.folder / "life")
        self._life = os.open(self.folder / "life", os.O_RDWR)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["warm"] = str(self.folder)

    def pytest_unconfigure(self) -> None:
        os.close(self._life)
        shutil.rmtree(self.folder, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    global _shared  # noqa: PLW0603
    if (given := getattr(config, "workerinput", {}).get("warm")) is not None:
        _shared = Path(given)
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(_Sharing())


class Popen:
    """One program, from `-m module`, `-c text` or a script on. Files are text unless told otherwise."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        text: bool = True,
        start_new_session: bool = False,
    ) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        self._lock = threading.Lock()  # one thread reads the end at a time
        with contextlib.ExitStack() as ours:
            theirs: list[int] = []
            self.stdin = self._file(stdin, 0, theirs, ours, text)
            self.stdout = self._file(stdout, 1, theirs, ours, text)
            self.stderr = self._file(stderr, 2, theirs, ours, text)
            self._socket = ask(
                server().address,
                words,
                env=os.environ if env is None else env,
                cwd=str(cwd or Path.cwd()),
                files=theirs,
                session=start_new_session,
            )
        self.pid = int(self._line())

    @staticmethod
    def _file(what: int | IO[Any] | None, number: int, theirs: list[int], ours: Any, text: bool) -> Any:
        """Append the descriptor that the process is to have as `number`; return the other end of a pipe."""
        if what == PIPE:
            reader, writer = os.pipe()
            near, far = (writer, reader) if number == 0 else (reader, writer)
            ours.callback(os.close, far)
            theirs.append(far)
            file = io.open(near, "wb" if number == 0 else "rb")  # noqa: SIM115, UP020
            return io.TextIOWrapper(file, encoding="utf-8", write_through=True) if text else file
        if what == DEVNULL:
            nothing = os.open(os.devnull, os.O_RDWR)
            ours.callback(os.close, nothing)
            theirs.append(nothing)
        elif what == STDOUT:
            theirs.append(theirs[1])
        elif what is None:
            theirs.append(number)
        else:
            theirs.append(what if isinstance(what, int) else what.fileno())
        return None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                if not select.select([self._socket], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                self.returncode = int(self._line())
                self._socket.close()  # until now, nobody else has had its pid
            return self.returncode

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        """Read all that it says, until it ends.

        Raises:
            TimeoutExpired: It still runs.
        """
        said: dict[str, Any] = {"stdout": None, "stderr": None}
        files = {name: file for name in said if (file := getattr(self, name)) is not None}

        def read(name: str, file: IO[Any]) -> None:
            said[name] = file.read()

        readers = [threading.Thread(target=read, args=each, daemon=True) for each in files.items()]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(input or "")
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        for file in files.values():
            file.close()
        return said["stdout"], said["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdout, self.stderr, self.stdin):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
        self.wait()

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            got = self._socket.recv(1)
            if not got:
                raise ChildProcessError(f"the server of warm processes is gone; it ran {self.args}")
            line += got
        return line.decode()


def run(
    words: Sequence[str], *, timeout: float | None = None, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it said, as `subprocess.run` with `capture_output` does."""
    with Popen(words, stdout=PIPE, stderr=PIPE, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert process.returncode is not None
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
