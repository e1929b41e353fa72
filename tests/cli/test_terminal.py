"""Signals that end a run: the first asks, the second does not."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from monolith.cli.terminal import StopSignals


class Asked:
    """Remembers the reason it was given."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.lines: list[str] = []
        self.come = threading.Event()

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)
        self.come.set()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_gives_the_status(number: signal.Signals, status: int) -> None:
    asked = Asked()
    with StopSignals(asked.stop, asked.lines.append) as signals:
        signal.raise_signal(number)
        assert asked.come.wait(60)
        assert signals.status(number.name) == status
    assert asked.reasons == [number.name]
    assert "again to abort" in asked.lines[0]
    assert len(asked.lines) == 1


def test_a_run_that_ended_by_itself_has_status_0() -> None:
    asked = Asked()
    with StopSignals(asked.stop, asked.lines.append) as signals:
        assert signals.status("the data ended") == 0
        signal.raise_signal(signal.SIGTERM)  # in the very step that was the last
        assert asked.come.wait(60)
        assert signals.status("the data ended") == 0


def test_the_second_signal_aborts() -> None:
    asked = Asked()

    def run() -> None:
        with StopSignals(asked.stop, asked.lines.append):
            signal.raise_signal(signal.SIGTERM)
            assert asked.come.wait(60)
            signal.raise_signal(signal.SIGINT)
            time.sleep(10)

    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 130
    assert asked.reasons == ["SIGTERM"]
    assert "continue from the last checkpoint" in asked.lines[-1]


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals(lambda _: None, lambda _: None):
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    def work() -> None:
        with StopSignals(lambda _: None, lambda _: None):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
