"""Lets the user of a process profile it from the same machine, through a socket that only this user can open.

Nothing here needs torch until the first profile is asked for: serving commands use it, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monolith import concurrency
from monolith.cluster.local_jobs import GivenUp, LocalProcess, listening
from monolith.errors import RequestError

if TYPE_CHECKING:
    from monolith.train.hooks.profiling import Tracer


def profiled_by_user(
    process: str,
    environ: Mapping[str, str],
    *,
    name: str = "",
    model_dir: str = "",
    serves: Sequence[str | Path] = (),
    make: Callable[[], Tracer] | None = None,
) -> AbstractContextManager[None]:
    """Let the user of this process profile it while the block lasts.

    Args:
        process: What this process is in its job, such as worker-0.
        make: Makes what records the traces, when the first one is asked for.
    """
    tracers: list[Tracer] = []

    def answer(request: Mapping[str, Any], given_up: GivenUp) -> Mapping[str, Any]:
        if request.get("do") != "profile":
            raise RequestError(
                f"a process can be asked to describe or profile itself, not {request.get('do')!r}"
            )
        if not tracers:
            tracers.append(_tracer(process) if make is None else make())
        return (
            tracers[0]
            .trace(
                steps=int(request.get("steps", 0)),
                seconds=float(request.get("seconds", 10.0)),
                folder=str(request.get("folder", "")),
                given_up=given_up,
            )
            .to_dict()
        )

    about = LocalProcess(
        pid=os.getpid(),
        process=process,
        name=name,
        folder=absolute_folder(model_dir),
        serves=tuple(absolute_folder(str(folder)) for folder in serves),
        started=concurrency.time(),
    )
    return listening(about, answer, environ)


def _tracer(process: str) -> Tracer:
    from monolith.train.hooks.profiling import Tracer  # which needs torch

    return Tracer("", process.replace("-", "_"))


def absolute_folder(folder: str) -> str:
    return folder if "://" in folder or not folder else str(Path(folder).resolve())
