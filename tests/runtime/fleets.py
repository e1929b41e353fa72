"""Fleets of threads: servers and workers of one process, who know each other by a dict."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from monolith.checkpoint import Checkpointer, Saver
from monolith.cluster import MemoryDiscovery
from monolith.data import DriftConfig, DriftingStream, FileSource, Pipeline, Records, ShuffleConfig, Stream
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.records import BatchSpec
from monolith.data.service import DataJobConfig, DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher
from monolith.data.synthetic.drift import FEATURES, SPEC, TIME
from monolith.feature import ADDN, Batch, Layout
from monolith.model import DeepFM, EmbeddingCollection, Feature, UpdateConfig
from monolith.model.features import FeatureSet
from monolith.runtime import LocalRun, Trainer, TrainReport, join_fleet, serve_parameters
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.runtime.cluster_config import ClusterConfig, FailoverConfig, JobConfig, TimeoutsConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.coordinator import Start, WorkerState
from monolith.runtime.fleet import Fleet
from monolith.runtime.fleet_coordinator import FleetCoordinator
from monolith.runtime.parameter_server import ServedShard, ServerEnd
from monolith.runtime.publish_shard import PublishPlan
from monolith.runtime.service import LOST_AFTER
from monolith.store import ServerGroup
from monolith.store.dense_config import DenseConfig
from monolith.table import AdmissionConfig, Sgd, Zeros, iterate
from monolith.train import Hook, Mode, Outputs, SaveConfig, Task, TrainConfig
from monolith.train.hooks import HooksConfig
from monolith.train.model import Model as TrainedModel

RECORD = "record"
TALLY = "tally"
PATIENT = 60.0
SOON = timedelta(seconds=0.2)
"""How long a question for news may still be under way when its fleet is closed."""

_log = logging.getLogger(__name__)


class TalliedModel(nn.Module):
    """Learns clicks; and every record has a row of its own, in a store of its own, which counts trainings."""

    def __init__(self, threshold: int, expire_after: timedelta | None) -> None:
        super().__init__()
        features = [
            Feature(
                name=name,
                occurrence_threshold=threshold,
                expire_after=expire_after,
                admission=AdmissionConfig(capacity=1000),  # which takes no time to save
            )
            for name in FEATURES
        ]
        self.clicks = DeepFM(features, dim=4, hidden=(8,), threads=1)
        counted = FeatureSet(
            [Feature(name=RECORD, slot=TALLY)], optimizer=Sgd(learning_rate=1.0), initializer=Zeros()
        )
        self.tally = EmbeddingCollection(
            [Layout(TALLY, ADDN, counted.slices([RECORD], "times", 1))], threads=1
        )

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.clicks(batch)
        return logits


TALLIED = BatchSpec(ids=(*FEATURES, RECORD), labels=SPEC.labels, event_time=TIME)


@dataclass(frozen=True)
class Tallied(Task):
    """Batches of 8 of the drifting stream, at one record a second."""

    batches: int = 20
    threshold: int = 0
    expire_after: timedelta | None = None

    @property
    def records(self) -> int:
        return self.batches * 8

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        return Pipeline(self.stream()).map(numbered).to_batches(TALLIED)

    def stream(self) -> DriftingStream:
        return DriftingStream(
            DriftConfig(
                examples=self.records,
                batch_size=8,
                cohort=timedelta(minutes=1),
                new_users=4,
                new_items=2,
                user_life=timedelta(minutes=10),
                item_life=timedelta(minutes=4),
                start_time=0,
                examples_per_second=1,
            )
        )

    def model(self) -> nn.Module:
        return TalliedModel(self.threshold, self.expire_after)

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found = super().outputs(model, batch)
        tally: Any = model.tally
        return Outputs(found.loss - tally(batch)[TALLY].sum(), found.predictions)

    def updates(self) -> UpdateConfig:
        return UpdateConfig(multiply_rows_by=1)  # or a tally would count batches

    def metrics(self, mode: Mode) -> Mapping[str, Sequence[str]] | Sequence[str]:
        return () if mode is Mode.TRAIN else super().metrics(mode)  # a fifth of a step, and nobody looks


@dataclass(frozen=True)
class TalliedSlowly(Tallied):
    """The same batches, some fifty a second: for those who watch a run."""

    def dataset(self, mode: Mode) -> Stream[Batch]:
        def wait(batch: Records) -> Records:
            time.sleep(0.02)
            return numbered(batch)

        del mode
        return Pipeline(self.stream()).map(wait).to_batches(TALLIED)


def numbered(records: Records) -> Records:
    return Records(records.size, {**records.columns, RECORD: records.columns[TIME]}, records.shared)


@dataclass(frozen=True)
class TalliedFiles(Tallied):
    """The same records, in files of 12."""

    folder: str = ""

    def write(self) -> list[str]:
        """Write the files, unless they are there."""
        form, paths = (
            ParquetFormat(),
            [f"{self.folder}/{one:03}.parquet" for one in range(self.records // 12)],
        )
        for number, path in enumerate(paths):
            if not Path(path).exists():
                with form.writer(path) as writer:
                    writer.write(numbered(self.stream().records(12 * number, 12)))
        return paths

    @property
    def records(self) -> int:
        return self.batches * 8 // 12 * 12

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        shuffle = ShuffleConfig(buffer=20)
        source = FileSource(self.write(), ParquetFormat(), batch_size=5, shuffle=shuffle)
        return Pipeline(source).rebatch(8).to_batches(TALLIED)


@dataclass(frozen=True)
class TalliedQueue(TalliedFiles):
    """The same files, from a queue; each batch is of one file or two."""

    def queue(self) -> SharedFileQueue:
        found = SharedFileQueue(f"{self.folder}/queue", pause=lambda _: time.sleep(0.02))
        found.add(self.write())
        return found

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        shuffle = ShuffleConfig(buffer=5)
        source = FileSource(self.queue(), ParquetFormat(), batch_size=8, shuffle=shuffle)
        return Pipeline(source).to_batches(TALLIED)


@dataclass(frozen=True)
class TalliedService(TalliedFiles):
    """The same files, from a data service at an address."""

    address: str = ""

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        source = DataServiceSource(self.address, "fleet", prefetch=2)
        return Pipeline(source).to_batches(TALLIED)

    @contextlib.contextmanager
    def served(self) -> Iterator[TalliedService]:
        """The same task while there is a dispatcher, and a data worker that cuts chunks of 8."""
        config = DataJobConfig(splits=tuple(self.write()))

        def split(path: str) -> FileSource:
            return FileSource([path], ParquetFormat(), batch_size=8)

        with (
            Dispatcher(config, folder=f"{self.folder}/job") as dispatcher,
            DataWorker(
                dispatcher.address, split, DataWorkerConfig(readers=1, buffer_chunks=4, chunk_records=8)
            ),
        ):
            yield replace(self, address=dispatcher.address)


@dataclass
class Outcome:
    """What became of each process: a worker's report, a server's reason, or an error."""

    workers: dict[int, Any] = field(default_factory=dict)
    servers: dict[int, Any] = field(default_factory=dict)

    @property
    def chief(self) -> TrainReport:
        return self.report(0)

    def report(self, worker: int) -> TrainReport:
        found = self.workers[worker]
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, TrainReport)
        return found


HooksOf = Callable[[int], Sequence[Hook] | Callable[[LocalRun], Sequence[Hook]]]


def run_fleet(
    task: Task,
    model_dir: Path | str,
    *,
    num_ps: int = 2,
    num_workers: int = 2,
    num_redundant_ps: int = 0,
    num_extra_ps: int = 0,
    hooks: HooksOf = lambda _: (),
    trainers: Callable[[int, Trainer], object] = lambda *_: None,
    task_of: Callable[[int], Task] | None = None,
    finish_timeout: timedelta = timedelta(seconds=PATIENT),
    lost_after: timedelta = LOST_AFTER,
    abandoned_after: timedelta = timedelta(minutes=30),
    news_every: timedelta = timedelta(seconds=1),
    installed: HooksConfig | None = None,
    dense: DenseConfig | None = None,
    publish: PublishPlan | None = None,
    **config: Any,
) -> Outcome:
    """Run servers and workers to their end.

    Args:
        hooks: Of each worker.
        trainers: Told of each worker's trainer.
        task_of: The task of each worker, where it is not the servers'.
        installed: What the settings of all say of hooks.
        dense: When workers fetch and push dense weights.
        publish: How all of them publish.
    """
    outcome = Outcome()
    discovery = MemoryDiscovery()
    settings = TrainConfig(
        **{
            "model_dir": str(model_dir),
            "save": SaveConfig(steps=6),
            "summary_every_steps": None,
            "idle_after": timedelta(milliseconds=50),
            "hooks": installed or HooksConfig(),
            **config,
        }
    )

    def serve(index: int) -> ServerEnd:
        served = run_config(
            settings,
            role="ps",
            index=index,
            num_ps=num_ps,
            num_workers=num_workers,
            num_redundant_ps=num_redundant_ps,
            num_extra_ps=num_extra_ps,
            timeouts=TimeoutsConfig(silence=lost_after, abandoned=abandoned_after),
        )
        return serve_parameters(task, served, discovery, stop=stop, linger=timedelta(), publish=publish)

    def work(index: int) -> TrainReport:
        joining = run_config(
            settings,
            index=index,
            num_ps=num_ps,
            num_workers=num_workers,
            num_redundant_ps=num_redundant_ps,
            num_extra_ps=num_extra_ps,
            measure_ps=timedelta(),
            timeouts=TimeoutsConfig(start=timedelta(seconds=PATIENT), finish=finish_timeout),
        )
        with join_fleet(discovery, joining, news_every=news_every) as fleet:
            trainer = Trainer(
                task if task_of is None else task_of(index),
                settings,
                hooks=hooks(index),
                coordinator=FleetCoordinator(fleet, dense),
                publish=publish,
            )
            trainers(index, trainer)
            return trainer.train()

    stop = threading.Event()
    all_ps = num_ps + num_redundant_ps + num_extra_ps
    threads = [
        *(_start(serve, index, outcome.servers) for index in range(all_ps)),
        *(_start(work, index, outcome.workers) for index in range(num_workers)),
    ]
    for thread in threads[all_ps:]:
        thread.join(PATIENT)
        assert not thread.is_alive(), "a worker hangs"
    stop.set()
    for thread in threads[:all_ps]:
        thread.join(PATIENT)
        assert not thread.is_alive(), "a server hangs"
    return outcome


def run_config(
    train: TrainConfig | None = None,
    *,
    timeouts: TimeoutsConfig | None = None,
    failover: FailoverConfig | None = None,
    **cluster: Any,
) -> RunConfig:
    """The config of one process of a fleet. It may do without a model_dir, as if it were local."""
    train = train or TrainConfig()
    return RunConfig(
        job=JobConfig(local=not train.model_dir),
        train=train,
        cluster=ClusterConfig(**cluster),
        timeouts=timeouts or TimeoutsConfig(),
        failover=failover or FailoverConfig(),
    )


def worker_state(number: int) -> WorkerState:
    """What worker `number` may say of itself."""
    return WorkerState(position={"next": number}, examples=10 * number, skipped=number, event_time=None)


@contextlib.contextmanager
def serving(
    task: Task,
    *,
    num_ps: int = 1,
    num_workers: int,
    config: TrainConfig,
    holds_weights: bool = True,
    publish: PublishPlan | None = None,
) -> Iterator[list[str]]:
    """Servers that are told nothing yet; their addresses."""
    with contextlib.ExitStack() as stack:
        shares = [
            ServedShard(
                task,
                config,
                ClusterConfig(
                    role="ps",
                    index=index,
                    num_ps=num_ps,
                    num_workers=num_workers,
                    mode="async" if holds_weights else "sync",
                ),
                publish=publish,
            )
            for index in range(num_ps)
        ]
        for share in shares:
            stack.callback(share.close_publishing)
        yield [stack.enter_context(share.serve("127.0.0.1", 0, None)).address for share in shares]


@contextlib.contextmanager
def begun_fleets(num_workers: int) -> Iterator[list[Fleet]]:
    """The places of all workers in a run that has begun, without anything to train."""
    with contextlib.ExitStack() as stack:
        task = Tallied()
        addresses = stack.enter_context(serving(task, num_workers=num_workers, config=TrainConfig()))
        fleets = [
            stack.enter_context(
                Fleet(
                    ServerGroup(addresses),
                    ClusterConfig(index=index, num_workers=num_workers),
                    news_every=SOON,
                )
            )
            for index in range(num_workers)
        ]
        for fleet in fleets:
            fleet.group.describe()
        fleets[0].begin()
        fleets[0].open(Start(step=0))
        for fleet in fleets[1:]:
            assert fleet.join() is not None
        yield fleets


def _start(run: Callable[[int], Any], index: int, outcomes: dict[int, Any]) -> threading.Thread:
    def note() -> None:
        try:
            outcomes[index] = run(index)
        except BaseException as error:
            _log.info("%s %d ended", run.__name__, index, exc_info=True)
            outcomes[index] = error

    thread = threading.Thread(target=note, name=f"{run.__name__}-{index}", daemon=True)
    thread.start()
    return thread


@dataclass
class Model:
    """Everything that a checkpoint holds, as plain values."""

    step: int
    rows: dict[str, dict[int, tuple[Any, ...]]]
    weights: dict[str, list[Any]]

    @property
    def tally(self) -> dict[int, float]:
        """Record -> how often it was trained on."""
        return {key: row[1][0] for key, row in self.rows[TALLY].items()}


def has_cold_rows(model: TrainedModel) -> bool:
    """Whether a process has rows in files, or asks processes that have."""
    return any(table.cold_rows for table in model.stats().values())


def read_model(task: Task, model_dir: Path) -> Model:
    """Return the newest checkpoint of a model_dir, restored into this process."""
    config = TrainConfig(model_dir=str(model_dir))
    model = TrainedModel(task, Mode.TRAIN, seed=0)
    with contextlib.closing(model):
        prefix = newest_checkpoint(config, "train")
        assert prefix is not None
        restored = Checkpointer(Saver(str(model_dir)), model.parts()).restore(prefix)
        rows = {
            name: {
                key: (time, value, state)
                for chunk in iterate(store.table(name))  # type: ignore[attr-defined]
                for key, time, value, state in zip(
                    chunk.ids.tolist(),
                    chunk.event_times.tolist(),
                    chunk.values.tolist(),
                    chunk.state.tolist(),
                    strict=True,
                )
            }
            for store in model.stores
            for name in store.tables
        }
        weights = {name: one.tolist() for name, one in model.module.state_dict().items()}
        return Model(restored.step, rows, weights)
