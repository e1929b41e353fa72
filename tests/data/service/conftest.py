"""What the tests of the data service start from."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from data.service.processes import CONFIG

from monolith.data.service import Dispatcher


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    # Flight's own threads show as dummies once they have logged something; they are gone with their server.
    left = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    assert left <= before


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def dispatcher(tmp_path, stack):
    return stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path / "job")))
