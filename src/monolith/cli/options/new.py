"""What `monolith new` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class NewOptions:
    """Begin a project: a folder with a task, its config, sample data and a test, ready to be trained."""

    name: Path
    """The folder to make, such as shop; its name is that of the task, too."""
