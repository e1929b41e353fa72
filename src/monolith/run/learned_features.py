"""Means and quantiles that a run's features need: learned once, at its first start, and kept.

They are in `features.json` of the model_dir, and in every checkpoint. Whoever comes later, a restart, another
process of the run, `monolith evaluate` or `monolith predict`, reads them there: quantiles of other data would
make other ids of the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta

from monolith import filesystem
from monolith.checkpoint import read_manifest, saved_spec
from monolith.checkpoint.part import FEATURES
from monolith.data import as_stream
from monolith.errors import ConfigError, DataError, RestoreError
from monolith.feature import BucketFeature, FeatureSpec, FloatFeature
from monolith.feature.spec import AnyFeature
from monolith.run.config import RunConfig
from monolith.run.config_task import ConfigTask
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.train.config import TrainConfig
from monolith.train.task import Mode, Task

SPEC_FILE = "features.json"
"""In the model_dir: the features of the run, with what was learned."""

POLL = timedelta(seconds=0.2)
"""How often a process looks whether the chief has learned them."""


def with_learned_features(
    task: Task,
    run: RunConfig,
    *,
    trains: bool,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Task:
    """Return the task with the means and quantiles of its run, learned now if nobody has.

    Args:
        trains: Whether they may be learned: who only reads a model takes what it was trained with.

    Raises:
        ConfigError: Nobody has learned them, and this process may not or waited in vain.
    """
    if not isinstance(task, ConfigTask) or not task.features.to_learn:
        return task
    spec, config = task.features, run.train
    found = _first_complete(spec, _kept(config))
    if found is None and not trains:
        raise ConfigError(
            f"{', '.join(spec.to_learn)}: means or quantiles are not known: there is neither {SPEC_FILE} nor "
            f"a checkpoint with them in {config.model_dir}. Train first, with the same features."
        )
    if found is None and run.distributed and (run.cluster.role != "worker" or run.cluster.index):
        found = _awaited(spec, config, run.timeouts.start, clock, sleep)
    if found is None:
        for kept in _kept(config):  # of a run that this one starts from: its ids keep their meaning
            spec = take_learned(spec, kept)
        say(f"learning {', '.join(spec.to_learn)} in one pass over the training data")
        with_data = as_stream(_to_learn_from(task).records(Mode.TRAIN))
        try:
            found = spec.fit(with_data, fraction=lambda: with_data.fraction_read(with_data.position()))
        finally:
            with_data.close()
    if trains and config.model_dir and run.cluster.role == "worker" and not run.cluster.index:
        _keep(config.model_dir, found)
    return replace(task, features=found)


def _to_learn_from(task: ConfigTask) -> ConfigTask:
    """Return the task over what there is to read now, and to its end.

    Raises:
        ConfigError: It reads a stream of which nothing is there.
    """
    names = ", ".join(task.features.to_learn)
    try:
        data = task.data.at_rest()
        if task.data.live:
            data.files()
    except (ConfigError, DataError) as cause:
        raise ConfigError(
            f"{names}: means or quantiles are learned of the data before training, and there is none yet: "
            f"{cause}. Give boundaries, or mean and std, in the config; or train first on files."
        ) from cause
    return replace(task, data=data)


def take_learned(spec: FeatureSpec, kept: FeatureSpec) -> FeatureSpec:
    """Return a spec with what another one has learned of the same features, read in the same way."""
    taken: dict[str, AnyFeature] = {}
    for name in spec.to_learn:
        one, other = spec.features[name], kept.features.get(name)
        if isinstance(one, FloatFeature) and isinstance(other, FloatFeature):
            learned: AnyFeature = replace(one, mean=other.mean, std=other.std)
        elif isinstance(one, BucketFeature) and isinstance(other, BucketFeature):
            learned = replace(one, boundaries=other.boundaries)
        else:
            continue
        if learned == other:  # asked for in the same way, so learning would have come to the same
            taken[name] = learned
    return replace(spec, features={**spec.features, **taken})


def _first_complete(spec: FeatureSpec, kept: Iterable[FeatureSpec]) -> FeatureSpec | None:
    for other in kept:
        found = take_learned(spec, other)
        if not found.to_learn:
            return found
    return None


def _kept(config: TrainConfig) -> Iterator[FeatureSpec]:
    """Yield what is kept where this run, or the one that it starts from, writes; the surest first."""
    for folder in filter(None, (config.model_dir, config.restore.dir)):
        path = filesystem.join(folder, SPEC_FILE)
        if filesystem.exists(path):
            yield FeatureSpec.from_json(filesystem.read_bytes(path).decode(), path)
        prefix = newest_checkpoint(
            replace(config, model_dir=folder, restore=replace(config.restore, checkpoint=None)), "predict"
        )
        if prefix is not None:
            part = read_manifest(prefix).manifest.parts.get(FEATURES)
            if part is not None:
                yield saved_spec(prefix, part.get("value"))


def _awaited(
    spec: FeatureSpec,
    config: TrainConfig,
    patience: timedelta,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> FeatureSpec:
    end = clock() + patience.total_seconds()
    while clock() < end:
        found = _first_complete(spec, _kept(config))
        if found is not None:
            return found
        sleep(POLL.total_seconds())
    raise RestoreError(
        f"waited {patience} for the chief to learn {', '.join(spec.to_learn)} and write {SPEC_FILE} to "
        f"{config.model_dir}; see what the chief (worker 0) says, or raise timeouts.start"
    )


def _keep(model_dir: str, spec: FeatureSpec) -> None:
    path = filesystem.join(model_dir, SPEC_FILE)
    text = spec.to_json(indent=2).encode()
    if filesystem.exists(path) and filesystem.read_bytes(path) == text:
        return
    filesystem.make_dirs(model_dir)
    with filesystem.atomic_write(path) as file:
        file.write(text)
