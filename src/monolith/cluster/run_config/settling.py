"""Deciding what a config leaves open, once, into a new config that can be printed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from monolith.cluster.run_config.run import RunConfig
from monolith.errors import ConfigError

RETRIES = 6
DENSE_EVERY_IN_REALTIME = timedelta(minutes=30)


def settle(config: RunConfig) -> RunConfig:
    """Return the config with nothing left open.

    Real time comes first: it turns partial recovery on. Weights are never cut in pieces, whatever the old
    default says.
    """
    training, failover, checkpoint = config.training, config.failover, config.checkpoint
    if failover.partial_recovery is None:
        failover = replace(failover, partial_recovery=training.realtime)
    if failover.max_retries is None:
        failover = replace(failover, max_retries=RETRIES)
    if training.realtime and checkpoint.dense_every is None and checkpoint.dense_every_steps is None:
        checkpoint = replace(checkpoint, dense_every=DENSE_EVERY_IN_REALTIME)
    job = config.job
    if not job.model_name:
        job = replace(job, model_name=job.name or f"di_name_{_task_class(job.task)}")
    timeouts = config.timeouts
    if timeouts.operation is None:
        timeouts = replace(timeouts, operation=timeouts.lookup)
    return replace(
        config,
        job=job,
        failover=failover,
        timeouts=timeouts,
        dense=replace(config.dense, partition=False),
        checkpoint=checkpoint,
        metrics=replace(config.metrics, tensorboard_dir=config.metrics.tensorboard_dir or job.model_dir),
        data_service=replace(config.data_service, enabled=bool(config.data_service.enabled)),
        restore=replace(config.restore, guess_renamed=bool(config.restore.guess_renamed)),
    )


def settle_for_user(config: RunConfig) -> RunConfig:
    """Return what an author of a task means: ZooKeeper in place of Consul, and on CPUs nothing that waits.

    On CPUs rows are looked up at least one batch ahead, and their gradients pushed behind the step;
    but not where all ranks step together, since rows would change out of step.
    """
    if config.distributed and config.discovery.kind == "consul":
        config = replace(config, discovery=replace(config.discovery, kind="zookeeper"))
    if not config.training.gpu and not config.training.fully_synchronous:
        embedding = replace(config.embedding, prefetch=max(1, config.embedding.prefetch), postpush=True)
        config = replace(config, embedding=embedding)
    return settle(config)


def for_rank(config: RunConfig, rank: int, size: int) -> RunConfig:
    """Return the config of one rank of synchronous training, in which the ranks hold the tables.

    Raises:
        ConfigError: There is no such rank.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"cannot configure rank {rank}: there are {size}, counted from 0")
    job = config.job
    if not config.checkpoint.merge_ranks:
        folder = "/".join(part for part in (job.model_dir.rstrip("/"), job.id, f"index-{rank:04d}") if part)
        job = replace(job, model_dir=folder)
    cluster = replace(
        config.cluster,
        role="worker",
        index=rank,
        num_workers=size,
        num_ps=0,
        num_extra_ps=0,
        num_redundant_ps=0,
    )
    return replace(
        config,
        job=job,
        cluster=cluster,
        data=replace(config.data, reorder_fids=True),
        dense=replace(config.dense, partition=False),
    )


def _task_class(task: str | None) -> str:
    return (task or "").rpartition(":")[2].rpartition(".")[2]
