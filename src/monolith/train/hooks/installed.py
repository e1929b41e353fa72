"""The hooks that the settings of a run ask for, in addition to those that train and save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import nn

from monolith import concurrency
from monolith.errors import ConfigError
from monolith.model.ready import WatchedModel
from monolith.observe import Metrics
from monolith.train.config import TrainConfig
from monolith.train.hook import Hook, TrainingRun
from monolith.train.hooks.barrier import Barrier, BarrierHook, MachineHealth, PsHealthHook, memory_health
from monolith.train.hooks.config import DeepInsightConfig, HooksConfig
from monolith.train.hooks.deep_insight import (
    DayFiles,
    DeepInsightHook,
    FileMetricHook,
    KafkaMetricHook,
    KafkaProducer,
)
from monolith.train.hooks.hours import SlowStart, SlowStartHook, slow_start_target
from monolith.train.hooks.insight import NasDataHook, gates_of, searches_of
from monolith.train.hooks.metric_sinks import HeartBeatHook, MetricClient, ThroughputHook
from monolith.train.hooks.save import SaveHook


class Others(Protocol):
    """The processes that train the same model, as far as hooks ask for them."""

    @property
    def index(self) -> int:
        """Which worker this process is; the chief is 0."""

    @property
    def servers(self) -> Sequence[str]:
        """The parameter servers."""

    def read_step(self) -> int:
        """Ask for the step of the whole model."""

    def server_health(self, server: int) -> MachineHealth:
        """Ask one server for its health. From any thread."""


class TrainedRun(TrainingRun, Protocol):
    """A run as its trainer made it."""

    @property
    def barrier(self) -> Barrier: ...
    @property
    def save(self) -> SaveHook | None: ...


def installed_hooks(
    config: TrainConfig,
    run: TrainedRun,
    task_name: str,
    *,
    metrics: Metrics,
    others: Others | None = None,
    rest: Sequence[Hook] = (),
    clock: Callable[[], float] = concurrency.time,
    timer: Callable[[], float] = concurrency.monotonic,
) -> list[Hook]:
    """Return the hooks that `config.hooks` asks for; they go before the rest.

    Args:
        metrics: Where counters and timers go.
        others: The processes that train with this one; None if it trains alone.
        rest: Hooks that are told of each step while this process waits or is halted: those that keep it
            together with the other processes.
        clock: Unix seconds.
        timer: Seconds that only grow.

    Raises:
        ConfigError: A setting asks for what this run does not have.
    """
    _check(config)
    asked, worker = config.hooks, 0 if others is None else others.index
    name = config.model_name or task_name
    idle = [hook.before_step for hook in rest]
    hooks: list[Hook] = []
    if worker == 0:
        if asked.memory_limit_bytes is not None:
            hooks += _memory_hooks(asked, run, metrics, others, idle)
        kind = "local" if others is None else "ps"
        hooks += _metric_hooks(config, name, MetricClient(metrics), kind, clock=clock, timer=timer)
        hooks += _nas_hooks(asked, run.model)
    elif others is not None and asked.slow_start_steps:
        hooks.append(
            SlowStartHook(
                SlowStart(
                    target_step=slow_start_target(asked.slow_start_steps, worker),
                    max_wait=asked.slow_start_max_wait,
                ),
                global_step=others.read_step,
                idle=idle,
                hours=config.hours,
                clocks=concurrency.Clocks(wall=clock, timer=timer),
            )
        )
    return [*hooks, *_insight_hooks(asked.deep_insight, name, worker)]


def _check(config: TrainConfig) -> None:
    asked = config.hooks
    if asked.online_file and config.dense_save is None:
        raise ConfigError(
            "hooks: online_file decides when dense weights alone are saved, and dense_save is not set; "
            "set dense_save, or leave online_file out"
        )
    for name, given in (("online_file", asked.online_file), ("nas_every_steps", asked.nas_every_steps)):
        if given and not config.model_dir:
            raise ConfigError(f"hooks: {name} needs a model_dir (--model-dir)")


def _memory_hooks(
    asked: HooksConfig,
    run: TrainedRun,
    metrics: Metrics,
    others: Others | None,
    idle: Sequence[Callable[[TrainingRun], None]],
) -> list[Hook]:
    """Return what checks the memory of all processes with rows, and what holds the chief at the barrier."""
    counter = metrics.counter("out_of_memory", "Processes found above their memory limit", ["process"])

    def name(index: int) -> str:
        return "this process" if others is None else f"parameter server {index}"

    def report(found: Mapping[int, MachineHealth]) -> None:
        for index in found:
            counter.inc(process=name(index))

    assert asked.memory_limit_bytes is not None
    checks: list[Callable[[], MachineHealth]] = (
        [partial(memory_health, asked.memory_limit_bytes)]
        if others is None
        else [partial(others.server_health, index) for index in range(len(others.servers))]
    )
    interval = asked.memory_check_every.total_seconds()
    saves = [] if run.save is None else [run.save.before_step]
    return [
        PsHealthHook(checks, run.barrier, report, name=name, interval=interval),
        BarrierHook(run.barrier, idle=[*idle, *saves]),
    ]


def _metric_hooks(
    config: TrainConfig,
    name: str,
    client: MetricClient,
    cluster_type: str,
    *,
    clock: Callable[[], float],
    timer: Callable[[], float],
) -> list[Hook]:
    asked = config.hooks
    hooks: list[Hook] = []
    if asked.heartbeat_every is not None:
        hooks.append(HeartBeatHook(client, every=asked.heartbeat_every))
    if asked.throughput_every is not None:
        hooks.append(
            ThroughputHook(
                client,
                model_name=name,
                cluster_type=cluster_type,
                started_at=clock() if config.submitted_at is None else config.submitted_at,
                every=asked.throughput_every,
                clock=clock,
                timer=timer,
            )
        )
    return hooks


def _nas_hooks(asked: HooksConfig, module: nn.Module) -> list[Hook]:
    if asked.nas_every_steps is None:
        return []
    features = module.segments if isinstance(module, WatchedModel) else {}
    every = asked.nas_every_steps
    return [NasDataHook(searches_of(module), gates_of(module), features=features, every_steps=every)]


def _insight_hooks(asked: DeepInsightConfig, name: str, worker: int) -> list[Hook]:
    sinks: list[FileMetricHook | KafkaMetricHook] = []
    if asked.folder is not None:
        sinks.append(FileMetricHook(DayFiles(asked.folder, name, worker)))
    if asked.kafka:
        if not asked.kafka_brokers or not asked.kafka_topic:
            raise ConfigError(
                "deep insight: kafka needs kafka_brokers and kafka_topic, or the variables KAFKA_BROKER_LIST "
                "and KAFKA_TOPIC_NAME"
            )
        producer = KafkaProducer(asked.kafka_brokers, asked.kafka_topic, settings=asked.kafka_settings)
        sinks.append(KafkaMetricHook(producer))
    if not sinks:
        return []
    insight = DeepInsightHook(
        sinks,
        model_name=name,
        sample_ratio=asked.sample_ratio,
        targets=asked.targets,
        extra_fields=asked.extra_fields,
    )
    return [insight, *sinks]
