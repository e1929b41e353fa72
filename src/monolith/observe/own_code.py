"""Where in a person's own code an error came from: the one line of a traceback that they wrote.

A task runs deep inside of a trainer and of torch, and what goes wrong in it comes with thirty frames of
others. The innermost frame of a file that is neither ours, nor Python's, nor an installed package's is where
to look first.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import monolith


def describe_own_error(error: BaseException) -> str | None:
    """Return one line on an error in a person's own code: file, line, function and what was wrong.

    Returns:
        None where none of it is theirs: the mistake is ours.
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
