"""Exits: a process that is asked to go says by which signal it went.

From `install_exit_signals` on, the signals end the process with their own number as its status,
after every `finally` has run, and the exit is counted. Counting waits until the interpreter ends:
a signal may have come in the middle of counting something else.

No command here installs it: `monolith train` ends after its step, saves, and exits with 128 plus the
signal's number.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from monolith.errors import WrongThreadError
from monolith.observe import Metrics

EXIT_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
EXIT_COUNTER = "exit_hook"


def install_exit_signals(
    metrics: Metrics,
    *,
    server_type: str,
    index: int,
    signals: Sequence[signal.Signals] = EXIT_SIGNALS,
    at_exit: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Exit with the signal's number when one of `signals` arrives, and count that exit.

    Args:
        metrics: Gets the counter `exit_hook`, with labels server_type, index and sig.
        at_exit: Called after counting, to send the metrics before the process is gone.

    Returns:
        A function that restores the earlier handlers, unless other code has set handlers since.

    Raises:
        WrongThreadError: Not called from the main thread. The same holds for the returned function.
    """
    _require_main_thread()
    arrived: list[int] = []

    def leave(signum: int, _frame: FrameType | None) -> None:
        arrived.append(signum)
        raise SystemExit(signum)

    def count() -> None:
        if arrived:
            counter = metrics.counter(EXIT_COUNTER, "Exits by signal", labels=("server_type", "index", "sig"))
            counter.inc(1, server_type=server_type, index=str(index), sig=str(arrived[0]))
            at_exit()

    earlier = {signum: signal.signal(signum, leave) for signum in signals}
    atexit.register(count)

    def uninstall() -> None:
        _require_main_thread()
        atexit.unregister(count)
        for signum, handler in earlier.items():
            if signal.getsignal(signum) is leave:
                # None stands for a handler that C code installed and Python cannot name.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    return uninstall


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise WrongThreadError(
            f"cannot change signal handlers from thread {threading.current_thread().name!r}: Python allows "
            "that in the main thread only. Call install_exit_signals from main(), before starting threads."
        )
