"""A trainer that is killed at any moment, and the process that starts one after the other.

Run as a script, it imports everything once and then obeys the lines on its standard input,
each a JSON list, and answers each with a line:

    ["start", {...}]            fork a trainer for a `Job`; the answer is its process id
    ["wait", pid, seconds]      wait until it ends or stops, or kill it after so many seconds unless null;
                                the answer is its exit status, or "stopped"

What a trainer trained is in its log: a line when it starts, with the step it goes on from, and
a line per step, before anything of that step is saved. A kill loses none of these lines, since
what was written is the kernel's. And the model itself keeps a tally: the row of each record is
the number of times it was trained on.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monolith.data import (
    DriftConfig,
    DriftingStream,
    FileSource,
    JoinedSource,
    JoinerConfig,
    Pipeline,
    Records,
    Stream,
)
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.formats import ParquetFormat
from monolith.data.records import BatchSpec
from monolith.data.synthetic.drift import FEATURES, SPEC, TIME
from monolith.errors import MonolithError
from monolith.feature import ADDN, Batch, Layout
from monolith.model import DeepFM, EmbeddingCollection, Feature, UpdateConfig
from monolith.model.features import FeatureSet
from monolith.table import Adam, AdmissionConfig, Sgd, Zeros, iterate
from monolith.tensors import RaggedTensor
from monolith.train import (
    ExpiryConfig,
    Hook,
    KeepConfig,
    Mode,
    Outputs,
    RestoreConfig,
    SaveConfig,
    StepResult,
    Task,
    TrainConfig,
    Trainer,
)

RECORD = "record"
TALLY = "tally"
FORMAT = ParquetFormat(chunk_rows=5)
FEW_IDS = AdmissionConfig(capacity=1000)
"""A filter that takes no time to save."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and what is to happen to it."""

    model_dir: str
    notes: str
    """A folder: for the log, the last state of a run that ended well, and the error of one that did not."""
    batches: int = 30
    batch_size: int = 8
    prefetch: int = 1
    save_every: int = 2
    full_every: int = 1
    max_to_keep: int = 10
    asynchronous: bool = False
    """Save beside the training, which is then not deterministic."""
    summary_every: int | None = None
    checkpoint: str | None = None
    """Which to go back to."""
    reads: str = "stream"
    """What the data comes from: a "stream", a "queue" of files, or two such queues, "joined"."""
    reader: int | None = 0
    """The name under which files are taken from a queue."""
    strike: tuple[int, str, int] | None = None
    """A signal, and when the trainer sends it to itself: before the n-th event of a kind; see `Events`."""
    stops: tuple[int, ...] = ()
    """The steps after which the trainer stops itself, until it is continued."""
    last_secs: float = 0.5
    """Seconds for which the last save is retried."""
    file_limit: int | None = None
    """Bytes beyond which no file grows, as on a disk that is full."""

    @property
    def records(self) -> int:
        return self.batches * self.batch_size


# The model


class TalliedModel(nn.Module):
    """Learns clicks; and every record has a row of its own, which grows by 1 each time."""

    def __init__(self) -> None:
        super().__init__()
        features = [
            Feature(name="user", occurrence_threshold=1, admission=FEW_IDS),
            Feature(
                name="item", occurrence_threshold=2, expire_after=timedelta(minutes=1), admission=FEW_IDS
            ),
            Feature(name="context", expire_after=timedelta(minutes=1)),
        ]
        rows = Adam(learning_rate=0.05)
        self.clicks = DeepFM(
            features, dim=4, hidden=(8,), dropout=0.3, optimizer=rows, bias_optimizer=rows, threads=1
        )
        counted = FeatureSet(
            [Feature(name=RECORD, slot=TALLY)], optimizer=Sgd(learning_rate=1.0), initializer=Zeros()
        )
        self.tally = EmbeddingCollection(
            [Layout(TALLY, ADDN, counted.slices([RECORD], "times", 1))], threads=1
        )

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.clicks(batch)
        return logits


@dataclass(frozen=True)
class Tallied(Task):
    """The task of a job."""

    job: Job
    events: Events

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        job = self.job
        spec = BatchSpec(ids=(*FEATURES, RECORD), labels=SPEC.labels, event_time=TIME)
        if job.reads == "stream":
            return Pipeline(_stream(job)).map(_numbered).to_batches(spec)
        if job.reads == "queue":
            return Pipeline(queued(job, "shown", job.batch_size)).to_batches(spec).prefetch(2)
        config = JoinerConfig(
            key=RECORD,
            positives=(frozenset({1}),),
            window=timedelta(seconds=20),
            folder=f"{job.notes}/join",
            snapshot_every=4,
            memory_records=16,
        )
        joined = JoinedSource(queued(job, "shown", 6), queued(job, "clicked", 2), config)
        return Pipeline(joined).rebatch(job.batch_size).prefetch(2).to_batches(spec)

    def model(self) -> nn.Module:
        return TalliedModel()

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found = super().outputs(model, batch)
        tally: Any = model.tally
        return Outputs(found.loss - tally(batch)[TALLY].sum(), found.predictions)

    def updates(self) -> UpdateConfig:
        return UpdateConfig(multiply_rows_by=1)  # or a tally would count batches

    def chief_hooks(self, mode: Mode) -> Sequence[Hook]:  # noqa: ARG002
        return [_LogHook(self.job, self.events)]

    def hooks(self, mode: Mode) -> Sequence[Hook]:  # noqa: ARG002
        return [_LastStateHook(self.job)]


def _stream(job: Job) -> DriftingStream:
    return DriftingStream(
        DriftConfig(
            examples=job.records,
            batch_size=job.batch_size,
            cohort=timedelta(minutes=1),
            new_users=4,
            new_items=2,
            user_life=timedelta(minutes=10),
            item_life=timedelta(minutes=4),
            contexts=20,
            start_time=0,
            examples_per_second=1,  # so the time of a record is its number
        )
    )


def queue_of(job: Job, what: str) -> SharedFileQueue:
    return SharedFileQueue(f"{job.notes}/queue of {what}")


def queued(job: Job, what: str, batch_size: int) -> FileSource:
    """Read what was shown, or clicked, from a queue of files; they are written by whoever is first."""
    folder = Path(job.notes) / what
    folder.mkdir(exist_ok=True)
    for number, records in enumerate(_stream(job)):
        path = folder / f"{number // 4:03}-{number:03}.parquet"
        if path.exists():
            continue
        shown = _numbered(records)
        if what == "clicked":
            clicks = shown.keep(shown["label"].flat_values > 0)
            late = RaggedTensor(clicks[TIME].flat_values + 7, clicks[TIME].row_splits)
            done = RaggedTensor(torch.ones_like(clicks[TIME].flat_values), clicks[TIME].row_splits)
            shown = Records(clicks.size, {RECORD: clicks[RECORD], TIME: late, "line_id.actions": done})
        with FORMAT.writer(f"{path}-{os.getpid()}") as writer:
            writer.write(shown)
        Path(f"{path}-{os.getpid()}").rename(path)
    queue = queue_of(job, what)
    queue.add(sorted(map(str, folder.glob("*.parquet"))))
    return FileSource(queue, FORMAT, batch_size=batch_size, worker=job.reader)


def _numbered(records: Records) -> Records:
    return Records(records.size, {**records.columns, RECORD: records.columns[TIME]}, records.shared)


# What is known of it afterwards


class _LogHook(Hook):
    """Notes each record; the chief's hooks come before the one that saves."""

    def __init__(self, job: Job, events: Events) -> None:
        self._events = events
        self._log = os.open(Path(job.notes) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def after_create(self, run: Any) -> None:
        self._write({"from": run.step})
        self._events.restored = True

    def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
        self._write({"step": result.step, "records": result.batch.ids[RECORD].flat_values.tolist()})
        self._events.happened("step")

    def close(self) -> None:
        os.close(self._log)

    def _write(self, entry: dict[str, Any]) -> None:
        os.write(self._log, json.dumps(entry).encode() + b"\n")  # one call: a line is there whole, or not


class _LastStateHook(Hook):
    """Notes every bit of a model that was trained to the end, and saved."""

    def __init__(self, job: Job) -> None:
        self._path = Path(job.notes) / "last.json"

    def end(self, run: Any) -> None:
        module = run.session.model.module
        rows = {
            name: {
                str(key): (time, value.numpy().tobytes().hex(), state.numpy().tobytes().hex())
                for chunk in iterate(store.table(name))
                for key, time, value, state in zip(
                    chunk.ids.tolist(), chunk.event_times.tolist(), chunk.values, chunk.state, strict=True
                )
            }
            for store in run.session.model.stores
            for name in store.tables
        }
        weights = {name: one.numpy().tobytes().hex() for name, one in module.state_dict().items()}
        self._path.write_text(json.dumps({"step": run.step, "rows": rows, "weights": weights}))


def trained(notes: Path) -> list[int]:
    """Return the records that the model was trained on, in order: those of the steps that survived."""
    steps: list[list[int]] = []
    for line in (notes / "log").read_text().splitlines():
        entry = json.loads(line)
        if "from" in entry:
            assert entry["from"] <= len(steps), f"goes on from step {entry['from']}, which was never taken"
            del steps[entry["from"] :]
        else:
            steps.append(entry["records"])
            assert entry["step"] == len(steps), f"step {entry['step']} follows {len(steps) - 1}"
    return [record for step in steps for record in step]


# What happens to it


class Events:
    """Counts what a trainer does, and strikes it in the middle.

    The kinds are

        restore     it looks at or changes something in its model_dir, before its first step
        save        it does, after that
        delete      it removes a checkpoint or part of one, after that
        step        it has taken a step, and nothing of it is saved
    """

    def __init__(self, job: Job) -> None:
        self.counts: Counter[str] = Counter()
        self.restored = False
        self._folder = job.model_dir.rstrip("/") + "/"
        self._strike, self._stops = job.strike, job.stops
        sys.addaudithook(self._hear)

    def happened(self, kind: str) -> None:
        self.counts[kind] += 1
        if kind == "step" and self.counts[kind] in self._stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._strike is not None and self._strike[1:] == (kind, self.counts[kind]):
            os.kill(os.getpid(), self._strike[0])

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Told by Python of every call that opens, renames or removes a file, before it is made."""
        if event not in _CALLS:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        removing = event in _REMOVALS
        inside = removing and not path.startswith("/")  # removing a folder, from within
        if not inside and not path.startswith(self._folder):
            return
        if not self.restored:
            self.happened("restore")
        elif removing and (inside or _CHECKPOINT.match(path.removeprefix(self._folder))):
            self.happened("delete")
        else:
            self.happened("save")


_REMOVALS = {"os.remove", "os.rmdir", "shutil.rmtree"}
_CALLS = {"open", "os.rename", "os.mkdir", "os.listdir", "os.scandir", *_REMOVALS}
_CHECKPOINT = re.compile(r"(model\.ckpt|ckpt\.info)-[0-9]+(\.[^/]*)?$")


def train(job: Job) -> None:
    """Train to the end of the data, unless something happens."""
    if job.file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_limit, job.file_limit))
    events = Events(job)
    notes = Path(job.notes)
    config = TrainConfig(
        model_dir=job.model_dir,
        deterministic=not job.asynchronous,
        prefetch=job.prefetch,
        save=SaveConfig(
            steps=job.save_every,
            asynchronous=job.asynchronous,
            retry_secs=0.001,
            max_failures=100,
            last_secs=job.last_secs,
        ),
        keep=KeepConfig(max_to_keep=job.max_to_keep, full_every=job.full_every, evict=True),
        expiry=ExpiryConfig(max_fraction=1),
        restore=RestoreConfig(checkpoint=job.checkpoint),
        summary_every_steps=job.summary_every,
    )
    (notes / "error.json").unlink(missing_ok=True)
    try:
        Trainer(Tallied(job, events), config).train()
    except MonolithError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        (notes / "error.json").write_text(json.dumps({"kinds": kinds, "text": str(error)}))
        raise
    finally:
        (notes / "events.json").write_text(json.dumps(events.counts))


# The process that starts trainers


def _start(how: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        train(Job(**{**how, "strike": how["strike"] and tuple(how["strike"])}))
        code = 0
    except MonolithError:
        pass  # noted
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait(pid: int, patience: float | None) -> int | str:
    if patience is not None:
        ended = os.pidfd_open(pid)
        try:
            if not select.select([ended], [], [], patience)[0]:
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(ended)
    _, status = os.waitpid(pid, os.WUNTRACED)
    return "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)


def _warm_up() -> None:
    """Import what training imports on its way, so that trainers start in no time.

    A child trains a little and tells; to train here would start threads, which do not survive a fork.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "names"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for batches in (2, 3):  # the second is restored
                    train(Job(model_dir=f"{folder}/model", notes=folder, batches=batches, full_every=2))
                Path(folder, "join").mkdir()
                train(Job(model_dir=f"{folder}/joined", notes=f"{folder}/join", batches=3, reads="joined"))
                names.write_text("\n".join(sys.modules))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert status == 0, "the first trainer failed; see above"
        for name in names.read_text().splitlines():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def main() -> None:
    torch.set_num_threads(1)
    _warm_up()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer = _start(*arguments) if verb == "start" else _wait(*arguments)
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
