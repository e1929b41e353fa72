"""Stacks: what every thread of a running process does, and the user's own line in a traceback.

`kill -USR1 <pid>` prints one stack per thread without stopping the process. Python runs signal handlers
between two bytecodes of the main thread, so a main thread that is stuck in native code answers when it
returns.

A task runs deep inside a trainer and torch, so its errors come with thirty frames of other code. The
innermost frame of a file that is neither ours, nor Python's, nor an installed package's is the one to read
first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import monolith
from monolith.errors import WrongThreadError

_Handler = Callable[[int, FrameType | None], Any] | int | None


def print_stack_trace(signum: int, frame: FrameType | None, *, file: TextIO | None = None) -> None:
    """Write the stack of every thread, that of the calling thread from `frame` down.

    A signal handler in its own right.

    Args:
        frame: Where the calling thread was interrupted; None takes its current frame.
        file: Standard error by default.
    """
    here = threading.get_ident()
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"Signal {signum}: process {os.getpid()} has {len(frames)} thread(s)\n"]
    for ident, current in sorted(frames.items(), key=lambda item: item[0] != here):
        mark = ", interrupted" if ident == here else ""
        lines.append(f"Thread {names.get(ident, 'not started by Python')!r} ({ident}{mark}):\n")
        lines += traceback.format_stack(frame if ident == here and frame is not None else current)
    _write("".join(lines), sys.stderr if file is None else file)


def install_stack_dump(signum: int = signal.SIGUSR1, file: TextIO | None = None) -> Callable[[], None]:
    """Dump all stacks whenever `signum` arrives, after any handler that was there before.

    Installing again takes the place of the earlier dump: one signal, one dump.

    Returns:
        Puts the earlier handler back, unless other code has taken the signal since.

    Raises:
        WrongThreadError: Not called from the main thread. The same holds for the
            returned function.
    """
    _require_main_thread(signum)
    current = signal.getsignal(signum)
    earlier: _Handler = current
    if isinstance(current, _StackDump):
        earlier = current.earlier
    dump = _StackDump(earlier, file)
    signal.signal(signum, dump)

    def uninstall() -> None:
        _require_main_thread(signum)
        if signal.getsignal(signum) is dump:
            # None means a handler that C code installed and Python cannot name.
            signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)

    return uninstall


class _StackDump:
    """The handler itself; a class, so that a second installation recognises the first."""

    def __init__(self, earlier: _Handler, file: TextIO | None) -> None:
        self.earlier = earlier
        self._file = file

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        try:
            if callable(self.earlier):
                self.earlier(signum, frame)
        finally:
            # A closed or full stderr must not become an exception in the middle of training.
            with contextlib.suppress(OSError, ValueError):
                print_stack_trace(signum, frame, file=self._file)


def _write(text: str, file: TextIO) -> None:
    try:
        descriptor = file.fileno()
    except (AttributeError, OSError):
        file.write(text)
        file.flush()
        return
    # The signal may have interrupted a write to this very file, whose buffer cannot be entered twice.
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


def _require_main_thread(signum: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise WrongThreadError(
            f"cannot change the handler of signal {signum} from thread {threading.current_thread().name!r}: "
            "Python allows that in the main thread only. Call install_stack_dump from main(), before "
            "starting threads."
        )


def describe_own_error(error: BaseException) -> str | None:
    """Return one line on an error in a person's own code: file, line, function and what was wrong.

    Returns:
        None if no frame is theirs: then the mistake is ours.
    """
    frame = own_frame(error)
    if frame is None:
        return None
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {what}"


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of a person's own file, in the error or in what it was raised from."""
    folders = tuple(_others())
    seen: BaseException | None = error
    while seen is not None:
        for frame in reversed(traceback.extract_tb(seen.__traceback__)):
            path = Path(frame.filename)
            if path.exists() and not any(folder in path.resolve().parents for folder in folders):
                return frame
        seen = seen.__cause__
    return None


def _others() -> Iterator[Path]:
    """Folders of code that the person did not write."""
    yield Path(monolith.__file__).resolve().parent
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield Path(sysconfig.get_path(name)).resolve()
