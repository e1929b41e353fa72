from __future__ import annotations

import os
import sys
import threading

import pytest

from monolith.observe import yield_to_others


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_only_the_thread_that_asks_steps_back() -> None:
    found = {}

    def background() -> None:
        yield_to_others()
        found["background"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert found["background"] == 10
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
