import io
import signal
import sys
import threading

import pytest

from monolith.errors import WrongThreadError
from monolith.observe import install_stack_dump, print_stack_trace


@pytest.fixture(autouse=True)
def handler_restored():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def a_function_with_a_telling_name(work):
    work()


def test_a_signal_prints_where_the_process_is_and_does_not_end_it():
    out = io.StringIO()
    install_stack_dump(file=out)
    a_function_with_a_telling_name(lambda: signal.raise_signal(signal.SIGUSR1))
    assert "a_function_with_a_telling_name" in out.getvalue()
    assert "MainThread" in out.getvalue()
    assert "print_stack_trace" not in out.getvalue()


def test_the_dump_shows_every_thread():
    out = io.StringIO()
    ready, leave = threading.Event(), threading.Event()

    def wait_where_the_dump_can_see_it():
        ready.set()
        leave.wait()

    thread = threading.Thread(target=wait_where_the_dump_can_see_it, name="prefetch")
    thread.start()
    ready.wait()
    print_stack_trace(signal.SIGUSR1, sys._getframe(), file=out)
    leave.set()
    thread.join()
    assert "'prefetch'" in out.getvalue()
    assert "wait_where_the_dump_can_see_it" in out.getvalue()
    assert "test_the_dump_shows_every_thread" in out.getvalue()


def test_installing_twice_prints_once_to_the_later_file():
    first, second = io.StringIO(), io.StringIO()
    install_stack_dump(file=first)
    install_stack_dump(file=second)
    signal.raise_signal(signal.SIGUSR1)
    assert first.getvalue() == ""
    assert second.getvalue().count("MainThread") == 1


def test_an_earlier_handler_runs_first_and_only_once():
    out, order = io.StringIO(), []
    signal.signal(signal.SIGUSR1, lambda *_: order.append(out.getvalue()))
    install_stack_dump(file=out)
    install_stack_dump(file=out)
    signal.raise_signal(signal.SIGUSR1)
    assert order == [""]
    assert out.getvalue()


def test_an_earlier_handler_that_raises_still_gets_its_dump():
    out = io.StringIO()

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    install_stack_dump(file=out)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGUSR1)
    assert "MainThread" in out.getvalue()


def test_an_ignored_signal_is_dumped_too():
    out = io.StringIO()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    install_stack_dump(file=out)
    signal.raise_signal(signal.SIGUSR1)
    assert "MainThread" in out.getvalue()


def test_uninstall_puts_the_earlier_handler_back():
    calls = []

    def earlier(*_):
        calls.append(1)

    signal.signal(signal.SIGUSR1, earlier)
    uninstall = install_stack_dump(file=io.StringIO())
    uninstall()
    assert signal.getsignal(signal.SIGUSR1) is earlier


def test_uninstall_leaves_a_handler_that_came_later():
    uninstall = install_stack_dump(file=io.StringIO())
    later = signal.SIG_IGN
    signal.signal(signal.SIGUSR1, later)
    uninstall()
    assert signal.getsignal(signal.SIGUSR1) == later


def test_a_closed_file_does_not_raise_into_the_program():
    out = io.StringIO()
    install_stack_dump(file=out)
    out.close()
    signal.raise_signal(signal.SIGUSR1)  # would raise here
    assert callable(signal.getsignal(signal.SIGUSR1))


def test_a_real_file_is_written_past_its_buffer(tmp_path):
    with (tmp_path / "stacks.txt").open("w") as out:
        install_stack_dump(file=out)
        signal.raise_signal(signal.SIGUSR1)
        assert "MainThread" in (tmp_path / "stacks.txt").read_text()


def test_another_thread_cannot_install_it_and_is_told_so():
    errors = []

    def install():
        try:
            install_stack_dump()
        except WrongThreadError as error:
            errors.append(str(error))

    thread = threading.Thread(target=install, name="worker-3")
    thread.start()
    thread.join()
    assert "worker-3" in errors[0]
    assert "main thread only" in errors[0]
