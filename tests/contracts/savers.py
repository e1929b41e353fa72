"""Every way to run the saver, with a clock and a writer of our own."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monolith import filesystem
from monolith.checkpoint.folder.saver import (
    DEFAULT_NAMING,
    MANIFEST,
    CheckpointNaming,
    Saver,
)


class FakeClock:
    """Stands still until it is told to go on."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def put(path: str, text: str = "x") -> str:
    filesystem.make_dirs(filesystem.parent(path))
    with filesystem.atomic_write(path) as file:
        file.write(text.encode())
    return path


def write_checkpoint(prefix: str) -> None:
    """Write what a checkpoint is made of: two shards, a table, and the manifest last."""
    put(f"{prefix}.dense-00000-of-00002")
    put(f"{prefix}.dense-00001-of-00002")
    put(f"{prefix}.assets/item-00000-of-00001")
    put(f"{prefix}{MANIFEST}")


def names(folder: str) -> list[str]:
    """The names of all files and folders directly in a folder."""
    found = filesystem.list_files(folder) + filesystem.list_folders(folder)
    return sorted(map(filesystem.base_name, found))


@dataclass(frozen=True)
class Case:
    """One way to run the saver."""

    naming: CheckpointNaming = DEFAULT_NAMING
    remote: bool = False

    @property
    def latest_filename(self) -> str:
        return self.naming.latest_filename

    @property
    def speaks_for_folder(self) -> bool:
        return self.latest_filename == "checkpoint"

    def folder(self, tmp_path: Path) -> str:
        return f"memory://{uuid.uuid4().hex}" if self.remote else f"{tmp_path}/run"


SAVERS = {
    "relative paths": Case(),
    "absolute paths": Case(CheckpointNaming(relative_paths=False)),
    "padded steps": Case(CheckpointNaming(pad_step_number=True)),
    "another state file": Case(CheckpointNaming(latest_filename="checkpoint_worker", basename="a[b]*.ckpt")),
    "remote": Case(remote=True),
}


class Run:
    """A folder, the savers that follow each other in it, and what they left there."""

    def __init__(self, case: Case, tmp_path: Path) -> None:
        self.case = case
        self.folder = case.folder(tmp_path)
        self.clock = FakeClock(1000.0)
        self.written: list[int] = []

    def saver(self, **options: Any) -> Saver:
        defaults: dict[str, Any] = {"keep_every": None, "clock": self.clock, "sleep": self.clock.sleep}
        return Saver(self.folder, naming=self.case.naming, **(defaults | options))

    def save(
        self, saver: Saver, *steps: int, after: Callable[[], None] = lambda: None, **options: Any
    ) -> str:
        prefix = ""
        for step in steps:
            self.written.append(step)
            prefix = saver.save(step, write_checkpoint, **options)
            after()
        return prefix

    def on_disk(self, saver: Saver) -> set[int]:
        """The steps whose checkpoints are there."""
        return {step for step in self.written if saver.find(step)}

    def listed(self, saver: Saver) -> list[int]:
        return [saver.names.step_of(path) for path in saver.last_checkpoints]
