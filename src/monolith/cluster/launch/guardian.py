"""The process between the launcher and a command it runs; ends the command when the launcher is gone.

A killed process cannot clean up after itself, so another process must. The guardian holds one end
of a pipe, and only the launcher has the other end: when the pipe reads as closed, the launcher is dead,
however it died. Then, or after a SIGTERM, the guardian asks the command and its child processes to
stop, and kills them after a grace period; a second SIGTERM kills them at once. On Linux the command
also dies with the guardian if the guardian itself is killed.

The guardian runs by itself, without the package: it must be small and start early.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import sys
import time

NOT_STARTED = 127
"""Exit status of a command that could not be started, as shells have it."""

PROCESS_ID = b"\0process id "
"""The prefix of a command's first line, which has its process id; for the process that shows its lines."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(arguments: list[str]) -> None:
    """Run a command until it ends, and end as it did.

    Args:
        arguments: The pipe's descriptor, seconds from asking to making, and the command.
    """
    pipe, grace, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer)
    asked: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at a terminal: the launcher has it too, and decides
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes us up

    child = _start(command, (pipe, reader, writer))
    selector = selectors.DefaultSelector()
    selector.register(reader, selectors.EVENT_READ)
    selector.register(pipe, selectors.EVENT_READ)
    deadline: float | None = None
    told = 0
    killed = False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if left == 0.0 or told > 1:
            _signal_group(child, signal.SIGKILL)
            if not killed:
                killed = True
                late = f"still runs {grace:g} s after it was asked to stop"
                why = late if left == 0.0 else "was asked to stop twice"
                with contextlib.suppress(OSError):  # after the kill: a dead launcher reads nothing
                    os.write(2, f"process {child} {why}; killing it\n".encode())
            left = 1.0
        for key, _ in selector.select(left):
            if key.fd == reader:
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 4096)
            elif not os.read(pipe, 1):
                selector.unregister(pipe)
                asked.append(0)
        if len(asked) > told:
            told = len(asked)
            _signal_group(child, signal.SIGTERM)
            deadline = deadline or time.monotonic() + grace
    _signal_group(child, signal.SIGKILL)  # what it has left behind
    _end_like(status)


def _start(command: list[str], private: tuple[int, ...]) -> int:
    guardian = os.getpid()
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            os.setpgid(child, child)  # as the child does; the first call wins
        return child
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for end in private:
            os.close(end)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guardian:  # it died before we asked
                os._exit(NOT_STARTED)
        os.write(1, b"%s%d\n" % (PROCESS_ID, os.getpid()))
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _end_like(status: int) -> None:
    """End with the exit status, or by the signal, that a command ended with."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's core is the one to look at
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1.0)
    os._exit(os.waitstatus_to_exitcode(status))
