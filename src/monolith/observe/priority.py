"""How much of the processor a thread may have."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def yield_to_others() -> None:
    """Let this thread, and those it starts, have the processor only where others leave it idle.

    For work beside the training, such as writing a checkpoint. Does nothing where the system gives
    priorities to processes only.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
