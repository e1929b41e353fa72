"""Warm processes are as others are: what a test does to them, and what they say, is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from services import warm

WAIT = "import sys, time; print('ready', flush=True); time.sleep(600)"


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """Return "R", "S", "T", "Z"; nothing for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("start", [[sys.executable], []], ids=["as others are", "warm"])
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("1/0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os._exit(7)", 7),
        ("import threading; threading.Timer(0.1, print, ['late']).start()", 0),
        ("import atexit; atexit.register(print, 'last')", 0),
        ("import sys; print(sys.argv, __name__, sys.path[0])", 0),
        ("import threading; print(len(threading.enumerate()))", 0),
        ("import sys; sys.stdout.write('half')", 0),
    ],
)
def test_it_ends_and_says_what_a_process_of_a_new_interpreter_does(
    start: list[str], program: str, status: int
) -> None:
    words = ["-c", program, "a word"]
    if start:
        ran = subprocess.run([*start, *words], capture_output=True, text=True, check=False)
    else:
        ran = warm.run(words)
    assert ran.returncode == status
    said = {
        "Timer": "late\n",
        "atexit": "last\n",
        "argv": "['-c', 'a word'] __main__ \n",
        "enumerate": "1\n",
        "half": "half",
    }
    assert ran.stdout == next((text for word, text in said.items() if word in program), "")
    assert ("Traceback" in ran.stderr) == ("1/0" in program or "raise" in program)
    assert "warm_server" not in ran.stderr


def test_folder_environment_and_files_are_those_it_was_given(tmp_path: Path) -> None:
    program = "import os, sys; os.write(2, b'no '); print(os.getcwd(), dict(os.environ), sys.stdin.read())"
    with (tmp_path / "out").open("w") as out:
        process = warm.Popen(
            ["-c", program], cwd=tmp_path, env={"A": "b"}, stdin=warm.PIPE, stdout=out, stderr=warm.STDOUT
        )
    process.communicate("word")
    assert process.returncode == 0
    assert (tmp_path / "out").read_text() == f"no {tmp_path} {{'A': 'b'}} word\n"


def test_modules_and_scripts_run_as_the_program(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")
    for words in (["-m", "mine"], ["mine.py"], [f"{tmp_path}/mine.py"]):
        done = warm.run([*words, "x"], cwd=tmp_path, check=True)
        assert done.stdout == f"__main__ ['x'] {tmp_path}\n"


def test_its_pid_is_its_own_and_says_what_it_runs() -> None:
    with warm.Popen(["-c", WAIT, "a word"], stdout=warm.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert words[1:] == [b"-c", WAIT.encode(), b"a word"]
        assert os.getsid(process.pid) == process.pid
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T")
        process.kill()
        until(lambda: state_of(process.pid) == "Z")  # nobody else gets its pid before it was waited for
        assert process.wait(60) == -signal.SIGKILL
    until(lambda: not state_of(process.pid))


def test_waiting_may_be_given_up() -> None:
    with warm.Popen(["-c", WAIT]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.01)
        process.terminate()
    assert process.returncode == -signal.SIGTERM


def test_what_it_starts_is_warm_too_and_ends_as_it_should() -> None:
    inner = "import sys, os; print('torch' in sys.modules, flush=True); os.kill(os.getpid(), 15)"
    outer = "from subprocess import *; import sys; sys.exit(-call([sys.executable, '-c', sys.argv[1]]))"
    done = warm.run(["-c", outer, inner])
    assert (done.returncode, done.stdout) == (15, "True\n")


def test_options_of_an_interpreter_start_a_new_one() -> None:
    outer = "from subprocess import *; import sys; check_call([sys.executable, '-IS', '-c', sys.argv[1]])"
    inner = "import sys; print(sys.flags.isolated, 'torch' in sys.modules)"
    done = warm.run(["-c", outer, inner], check=True)
    assert done.stdout == "1 False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_proxy_of_a_process_reaches_it(number: signal.Signals) -> None:
    outer = (
        "import os, signal, subprocess, sys\n"
        "inner = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "pid = int(inner.stdout.readline())\n"
        "inner.send_signal(int(sys.argv[2]))\n"
        "print(pid, inner.wait(), flush=True)\n"
    )
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    done = warm.run(["-c", outer, inner, str(int(number))], timeout=60, check=True)
    pid, ended = map(int, done.stdout.split())
    assert ended == -number
    until(lambda: not state_of(pid))
