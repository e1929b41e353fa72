"""What `sys.executable` is in a warm process: starts another one, and stands in for it.

It hands on its files, its environment and the signals it gets, and ends as the process ended. Killed itself,
it takes the process with it. Knows only a little of the standard library, so that it is there at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Mapping, Sequence

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ask(
    address: str,
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    files: Sequence[int],
    session: bool = False,
) -> socket.socket:
    """Ask a server for a process with three files; return where a line with its pid comes, and its status."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(address)
    asked = {"words": list(words), "env": dict(env), "cwd": cwd, "session": session}
    request = json.dumps(asked).encode()
    socket.send_fds(end, [len(request).to_bytes(4, "big")], files)
    end.sendall(request)
    return end


def main(address: str, python: str, words: list[str]) -> None:
    """Run a program in a warm process, or in a new interpreter where it wants options of one."""
    if len(words) < 2 or (words[1].startswith("-") and words[1] not in ("-m", "-c")):
        os.execv(python, [python, *words[1:]])
    early: list[int] = []
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: early.append(number))
    folder = os.getcwd()  # noqa: PTH109  pathlib takes as long to import as all else here
    asked = ask(address, words[1:], env=os.environ, cwd=folder, files=[0, 1, 2])
    with asked, asked.makefile("r") as answers:
        pid = int(answers.readline())

        def hand_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in HANDED_ON:
            signal.signal(number, hand_on)
        for number in early:
            hand_on(number, None)
        status = int(answers.readline())
    if status >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
