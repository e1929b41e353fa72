"""The manifest of a run: with what settings, and what versions, a model came to be."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from monolith import __version__, filesystem
from monolith.config import masked, masked_words, to_dict
from monolith.errors import CorruptFileError
from monolith.train.config import TrainConfig
from monolith.train.task import Task

RUN_MANIFEST = "run.json"
"""In the model's folder; each start adds to it."""


def write_run_manifest(model_dir: str, task: Task, config: TrainConfig, step: int, now: float) -> None:
    """Add this start to the manifest: the newest first. Secrets are masked; only its owner reads it."""
    starts = read_run_manifest(model_dir)
    starts.insert(
        0,
        {
            "task": task.name,
            "class": f"{type(task).__module__}.{type(task).__qualname__}",
            "about": masked(dict(task.describe())),
            "config": to_dict(config),
            "started_at": now,
            "from_step": step,
            "versions": {
                "monolith": __version__,
                "python": platform.python_version(),
                **{name: found for name in ("torch", "numpy") if (found := _version(name))},
            },
            "machine": {"system": platform.platform(), "processor": platform.machine()},
            "command": sys.argv,
        },
    )
    for start in starts:  # those of older versions, too
        start["command"] = masked_words(start.get("command", []))
    _write(model_dir, starts)


def write_run_end(model_dir: str, *, step: int, reason: str, finished: bool, now: float) -> None:
    """Note in the manifest how the newest start has ended, for whoever follows the run."""
    starts = read_run_manifest(model_dir)
    if starts:
        starts[0]["ended"] = {"step": step, "reason": reason, "finished": finished, "at": now}
        _write(model_dir, starts)


def read_run_manifest(model_dir: str) -> list[dict[str, Any]]:
    """Return the starts of a run, newest first; none where there is no manifest.

    Raises:
        CorruptFileError: The manifest does not parse.
    """
    path = filesystem.join(model_dir, RUN_MANIFEST)
    if not filesystem.exists(path):
        return []
    try:
        starts: list[dict[str, Any]] = json.loads(filesystem.read_bytes(path))["starts"]
        return list(starts)
    except (ValueError, KeyError, TypeError) as cause:
        raise CorruptFileError(path, 0, f"the run's manifest makes no sense: {cause}") from cause


def _write(model_dir: str, starts: list[dict[str, Any]]) -> None:
    with filesystem.atomic_write(filesystem.join(model_dir, RUN_MANIFEST), private=True) as file:
        file.write(json.dumps({"starts": starts[:100]}, indent=2, default=str).encode())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
