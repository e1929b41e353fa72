"""A program may end while threads of it are in the core."""

from __future__ import annotations

import subprocess
import sys

import pytest

DAEMONS = '''
import sys
import threading
import time
import types
from monolith import native

data, begun = bytes(1 << 22), threading.Barrier(4)

class TakesLong:
    """What is taken apart in the end, and lets others run meanwhile."""

    def __del__(self, sleep=time.sleep):
        sleep(1.0)

sys.modules["late"] = late = types.ModuleType("late")
late.kept = TakesLong()
del late

def work():
    native.crc32c(data)
    begun.wait()
    while True:
        native.crc32c(data)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
for _ in range(10):
    native.crc32c(data)
'''

NO_MORE_THREADS = """
import resource
from monolith import native

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
try:
    native.Workers(100_000)
except Exception as error:
    print("refused:", error)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    # An interpreter of its own, which is taken apart in the end as users' are.
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_daemon_thread_that_comes_back_too_late_aborts_nothing() -> None:
    ended = run(DAEMONS)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="where memory can be bounded")
def test_a_team_that_gets_too_few_threads_is_an_error_and_no_abort() -> None:
    ended = run(NO_MORE_THREADS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("refused:")
