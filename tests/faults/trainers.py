"""Starts trainers, and looks at what they leave: the other end of `trainer_process`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from faults.trainer_process import FORMAT, TALLY, Job, queue_of, trained
from services import warm

from monolith.checkpoint import read_checkpoint_state, read_manifest
from monolith.checkpoint.folder.manifest import read_chain
from monolith.data import FileSource

LONGEST = 60.0
"""Seconds after which a trainer hangs."""


class Trainers:
    """Trainers as processes of their own, any number at once.

    Args:
        wrapper: A command that runs the command it is given.
    """

    def __init__(self, wrapper: Sequence[str] = ()) -> None:
        tests = Path(__file__).parents[1]
        program = str(tests / "faults" / "trainer_process.py")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self._server: subprocess.Popen[bytes] | warm.Popen = (
            subprocess.Popen(
                [*wrapper, sys.executable, program], stdin=warm.PIPE, stdout=warm.PIPE, env=environment
            )
            if wrapper
            else warm.Popen([program], stdin=warm.PIPE, stdout=warm.PIPE, env=environment, text=False)
        )
        self._alive: set[int] = set()

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self, job: Job) -> int:
        """Start a trainer; return its process id."""
        pid = int(self._ask("start", asdict(job)))
        self._alive.add(pid)
        return pid

    def wait(self, pid: int, patience: float | None = None) -> int | str:
        """Wait until a trainer ends or is stopped; return its exit status, or "stopped".

        Args:
            patience: Seconds after which it is killed.
        """
        answer: int | str = self._ask("wait", pid, patience)
        if answer != "stopped":
            self._alive.discard(pid)
        return answer

    def run(self, job: Job, patience: float | None = None) -> int | str:
        """Start a trainer and wait for it."""
        return self.wait(self.start(job), patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)  # ours: nobody has waited for it
        self._server.stdin.close()
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _ask(self, *question: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(question).encode() + b"\n")
        self._server.stdin.flush()
        if not select.select([self._server.stdout], [], [], LONGEST)[0]:
            raise TimeoutError(f"no answer after {LONGEST:.0f} s: {question}")
        return json.loads(self._server.stdout.readline())


class MakeJob(Protocol):
    """Makes a job in a folder of its own."""

    def __call__(self, **how: Any) -> Job: ...


class Uninterrupted(Protocol):
    """Returns a job that nothing happened to and that must end the same; how much is kept does not count."""

    def __call__(self, job: Job) -> Job: ...


def check_listed(model_dir: str) -> None:
    """Every checkpoint that is listed is whole."""
    state = read_checkpoint_state(model_dir)
    for prefix in () if state is None else state.all_model_checkpoint_paths:
        read_chain(prefix)


def check_done(job: Job, trainers: Trainers, whole: Job) -> None:
    """A job that is done has trained every record once, and no checkpoint is left that is not needed."""
    records = range(job.records)
    order = trained(Path(job.notes))
    assert (sorted(order) if job.reads == "joined" else order) == list(records)
    for again in (False, True):  # as it was at the end; then as the last checkpoint restores it
        if again:
            assert trainers.run(job) == 0
        last = last_state(job)
        assert last["step"] == job.batches
        assert {int(record): _float(bits) for record, (_, bits, _) in last["rows"][TALLY].items()} == (
            dict.fromkeys(records, 1.0)
        )
        if not job.asynchronous:
            assert last == last_state(whole)
    parts = _saved_parts(job)
    if job.reads == "stream":
        assert parts["position"]["value"]["next"] == job.records
    for what in {"stream": [], "queue": ["shown"], "joined": ["shown", "clicked"]}[job.reads]:
        with contextlib.closing(FileSource(queue_of(job, what), FORMAT, batch_size=1)) as another:
            assert list(another) == [], "all of it counts, and nothing comes again"
    assert parts["progress"]["value"]["examples"] == job.records
    if not job.asynchronous:
        expected = _saved_parts(whole)
        for part in ("tables", "position"):  # of which one may be an increment; of which one names files
            del parts[part], expected[part]
        assert parts == expected
        assert _filters(job) == _filters(whole)
    state = read_checkpoint_state(job.model_dir)
    assert state is not None
    needed = {link.prefix for prefix in state.all_model_checkpoint_paths for link in read_chain(prefix)}
    found = {str(path.with_suffix("")) for path in Path(job.model_dir).glob("model.ckpt-*.assets")}
    assert found == needed


def error_of(job: Job) -> Any:
    """Return the error that ended a run, as its kinds and its text; None if it ended well."""
    path = Path(job.notes) / "error.json"
    return json.loads(path.read_text()) if path.exists() else None


def last_state(job: Job) -> Any:
    """Return every bit of the model as it was when the run ended well."""
    return json.loads((Path(job.notes) / "last.json").read_text())


def _float(bits: str) -> float:
    value: float = struct.unpack("<f", bytes.fromhex(bits))[0]
    return value


def _saved_parts(job: Job) -> dict[str, Any]:
    return dict(read_manifest(f"{job.model_dir}/model.ckpt-{job.batches}").manifest.parts)


def _filters(job: Job) -> dict[str, bytes]:
    """What the filters have counted, as it was saved last."""
    assets = Path(f"{job.model_dir}/model.ckpt-{job.batches}.assets")
    return {path.name: path.read_bytes() for path in assets.glob("hash_filter_*")}
