"""Exits by signal: the status says which, and the exit is counted."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
from services import warm

from monolith.errors import WrongThreadError
from monolith.observe import Metrics
from monolith_compat.exits import EXIT_SIGNALS, install_exit_signals

PROGRAM = """
import signal, sys
import monolith_compat.exits as exits
from monolith.observe import Metrics
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "importing installed a handler"
metrics = Metrics("m")
exits.install_exit_signals(
    metrics, server_type="worker", index=2, at_exit=lambda: sys.stdout.write(metrics.render().decode())
)
try:
    if sys.argv[1] != "0":
        signal.raise_signal(int(sys.argv[1]))
finally:
    print("cleaned up")
"""


@pytest.fixture(autouse=True)
def handlers_restored() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in EXIT_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def run(signum: int) -> subprocess.CompletedProcess[str]:
    return warm.run(["-c", PROGRAM, str(signum)], timeout=60)


@pytest.mark.parametrize("signum", EXIT_SIGNALS)
def test_a_signal_ends_the_process_with_its_number_and_is_counted_at_exit(signum: signal.Signals) -> None:
    ended = run(signum)
    assert ended.returncode == signum.value, ended.stderr
    assert ended.stdout.startswith("cleaned up")
    assert f'm_exit_hook_total{{index="2",server_type="worker",sig="{signum.value}"}} 1.0' in ended.stdout


def test_an_exit_without_a_signal_is_not_counted() -> None:
    ended = run(0)
    assert (ended.returncode, ended.stdout) == (0, "cleaned up\n")


def test_uninstalling_puts_the_earlier_handlers_back() -> None:
    def earlier(*_: object) -> None: ...

    signal.signal(signal.SIGHUP, earlier)
    uninstall = install_exit_signals(Metrics("m"), server_type="ps", index=0)
    with pytest.raises(SystemExit) as stop:
        signal.raise_signal(signal.SIGHUP)
    assert stop.value.code == signal.SIGHUP
    uninstall()
    assert signal.getsignal(signal.SIGHUP) is earlier


def test_uninstalling_leaves_a_handler_that_came_later() -> None:
    uninstall = install_exit_signals(Metrics("m"), server_type="ps", index=0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    uninstall()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_another_thread_cannot_install_it_and_is_told_so() -> None:
    errors: list[str] = []

    def install() -> None:
        try:
            install_exit_signals(Metrics("m"), server_type="ps", index=0)
        except WrongThreadError as error:
            errors.append(str(error))

    thread = threading.Thread(target=install, name="worker-3")
    thread.start()
    thread.join()
    assert "worker-3" in errors[0]
