"""Servables of a task: what `monolith export` writes, and a run when it saves.

Serving knows nothing of tasks, and training nothing of servables; they meet here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from monolith import filesystem
from monolith.checkpoint import Saver, read_manifest
from monolith.checkpoint.offline.reading import complete_names
from monolith.checkpoint.part import FEATURES
from monolith.checkpoint.parts import saved_spec
from monolith.data import Records, as_stream
from monolith.errors import ConfigError, DataError, ExportError, FileMissingError, MonolithError
from monolith.feature import Batch, FeatureSpec
from monolith.model import ReadyModel
from monolith.observe import Metrics
from monolith.observe.progress import describe_bytes
from monolith.runtime import Trainer
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.runtime.config import EXPORTED, ExportConfig
from monolith.runtime.publish_pause import PauseFile, PublishPause
from monolith.serve.candidates import with_parts
from monolith.serve.export_tables import TableCodings
from monolith.serve.exporter import ExportedServable, Exporter, ExportHow, ExportModel
from monolith.serve.manifest import draw_requests, read_requests, read_servable, write_requests
from monolith.serve.request_reader import Kind, RequestReader, kinds_of
from monolith.serve.versions import (
    ENTRY,
    Withheld,
    keep_newest,
    list_versions,
    release,
    remove_leftovers,
    remove_versions,
    withheld_versions,
    withhold,
)
from monolith.sync.messages import is_same_run, run_identity
from monolith.train import Mode, Task, TrainConfig
from monolith.train.hooks.save_timing import SaveListener
from monolith.train.model import Model

_log = logging.getLogger(__name__)

STATE_FILE = "ExportSaverListenerState"
"""In each folder of versions: which directory is of which step, as upstream writes it."""


def how_to_export(export: ExportConfig, train: TrainConfig, *, as_module: bool = False) -> ExportHow:
    """Return what a run's config says of its exports; retention is the caller's."""
    return ExportHow(
        codings=TableCodings(default=export.coding, tables=export.codings),
        shards=export.shards,
        missing_rows=export.missing_rows,
        as_module=as_module,
        evicts=train.keep.evict or train.evict_every_steps is not None,
        max_share=train.expiry.max_fraction,
    )


def export_folder(export: ExportConfig, train: TrainConfig) -> str:
    """Return the folder of versions."""
    return export.dir or filesystem.join(train.model_dir, EXPORTED)


def identity_of(model_dir: str) -> str:
    """Return what the manifests of a run's versions call it."""
    return run_identity(filesystem.parent(Saver(model_dir).names.prefix(0)))


def version_roots(root: str, shards: int) -> tuple[str, ...]:
    """Return the folders that have the parts of each version: the entry's, then that of each shard."""
    if not shards:
        return (root,)
    return tuple(filesystem.join(root, part) for part in (ENTRY, *(f"ps_{n}" for n in range(shards))))


# Versions that a pause of publishing covers


@dataclass(frozen=True, slots=True)
class VersionMarks:
    """Withholds the exported versions of one run while its publishing is paused."""

    model_dir: str
    """Of the run; versions of other runs are left alone."""
    roots: tuple[str, ...]
    """The entry's folder of versions, or the only one, first."""

    @classmethod
    def of(cls, export: ExportConfig, train: TrainConfig) -> VersionMarks:
        return cls(train.model_dir, version_roots(export_folder(export, train), export.shards))

    def withhold(self, kept: PublishPause) -> None:
        """Mark the versions of the first bad step or later; of a rollback, those later than its version."""
        run = identity_of(self.model_dir)
        for root in self.roots:
            found = {one: read_servable(filesystem.join(root, one)) for one in list_versions(root)}
            first = kept.first_bad_step
            if kept.version in found:
                # The operator has judged this version by naming it, whatever a guard said of its step.
                first = found[kept.version].step + 1
                release(filesystem.join(root, kept.version))
            for version, servable in found.items():
                bad = servable.created >= kept.since if first is None else servable.step >= first
                if bad and is_same_run(servable.run, run) and version != kept.version:
                    withhold(filesystem.join(root, version), _mark(kept, first))
            if found:
                write_states([root])

    def release(self) -> None:
        """Let servers take all versions again."""
        for root in self.roots:
            versions = list_versions(root)
            for version in withheld_versions(root, versions):
                release(filesystem.join(root, version))
                _log.info("version %s in %s is no longer withheld", version, root)
            if versions:
                write_states([root])


def withheld_export(model_dir: str) -> Callable[[int, float], Withheld | None]:
    """Return a function that says whether a version is withheld from its first moment, and why.

    The function takes the step of a checkpoint and the time of its save. A version is
    withheld if publishing of the run is paused, and the checkpoint is of the first bad step or later, or was
    saved since the pause: a run that rolled back to an earlier step has not been judged either.
    """

    def look(step: int, saved_at: float) -> Withheld | None:
        kept = PauseFile(model_dir).read() if model_dir else None
        if kept is None:
            return None
        bad = kept.first_bad_step is not None and step >= kept.first_bad_step
        return _mark(kept, kept.first_bad_step) if bad or saved_at >= kept.since else None

    return look


def _mark(kept: PublishPause, first: int | None) -> Withheld:
    return Withheld(reason=kept.reason or "publishing is paused", first_bad_step=first or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """What the first batch of a task's data says."""

    floats: Mapping[str, int] = field(default_factory=dict)
    labels: Sequence[str] = ()
    requests: Sequence[Mapping[str, Any]] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)


@contextmanager
def task_exporter(
    task: Task,
    config: TrainConfig,
    how: ExportHow,
    *,
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    inputs: Literal["raw", "batch"] = "raw",
    warm_up: bool | str = True,
    say: Callable[[str], object] = _log.info,
) -> Iterator[Exporter]:
    """Have what exports the checkpoints of a task.

    Args:
        factory, arguments: What makes its model where it is served as a Python module.
        inputs: See `ExportConfig.inputs`.
        warm_up: Whether requests to warm a server up are drawn from the task's evaluation data; or a file of
            requests, see `ExportConfig.warm_up_file`.
        say: Told what could not be had, in a line.

    Raises:
        ExportError: The model cannot be exported; says why, and what to do.
    """
    with Trainer(task, config).without_rows() as (trained, restore):
        module = trained.module
        if inputs == "raw":
            _find_spec(trained, config)
        spec = _narrow(trained) if inputs == "raw" else None
        given = None
        if isinstance(warm_up, str) and (given := _requests_in(warm_up)) is None:
            say(f"there is no file {warm_up} of warm-up requests; they are drawn from the evaluation data")
        drawn = warm_up is not False and given is None
        sample = _sample_of(task, module, spec, say) if drawn or spec is None else _Sample()
        if given is not None:
            ids = [] if spec is not None else _features_of(module)
            _check_requests(given, RequestReader(spec, ids, sample.floats), str(warm_up))
        model = ExportModel(
            name=task.name,
            module=module,
            outputs=task.predictions,
            spec=spec,
            floats=sample.floats,
            heads=sample.labels if spec is None else tuple(spec.labels),
            meaning=task.meaning,
            factory=factory,
            arguments=arguments or {},
            kinds=sample.kinds,
            requests=sample.requests if drawn else given or (),
        )
        yield Exporter(model, how, restore, withhold=withheld_export(config.model_dir))


_HASHED = (
    "requests to a server would need IDs and floats as its batches have them, hashed and scaled, and raw "
    "values would be scored wrongly without a word"
)
_IF_MEANT = "If clients are to send IDs and floats of batches, say so: --inputs batch, or export.inputs"


def _find_spec(model: Model, config: TrainConfig) -> None:
    """Have a model know the spec by which raw columns become its batches.

    Raises:
        ExportError: They are made by code that a server does not have.
        FeatureError: The data is made by another spec than that of the model.
    """
    task, trouble = model.task, ""
    for mode in (Mode.EVALUATE, Mode.TRAIN):
        try:
            with closing(as_stream(task.dataset(mode))) as data:
                spec = data.spec
        except MonolithError as error:
            trouble = f"its data cannot be opened: {error}"
            continue
        model.read(spec)
        if spec is None and model.spec is None:
            raise ExportError(
                f"cannot export task {task.name!r}: dataset() returns batches that its own code makes, so "
                f"{_HASHED}. Return what to_batches(SPEC) returns, as it is, and do the work before it, in "
                f"`map` of the pipeline or in the spec. {_IF_MEANT}"
            )
        return
    if model.spec is None and (prefix := newest_checkpoint(config, "predict")) is not None:
        saved = read_manifest(prefix).manifest.parts.get(FEATURES)
        model.read(None if saved is None else saved_spec(prefix, saved.get("value")))
    if model.spec is None:
        raise ExportError(
            f"cannot export task {task.name!r}: {trouble}, so it is unknown whether {_HASHED}. Export it "
            f"where the data is. {_IF_MEANT}"
        )


def _narrow(model: Model) -> FeatureSpec | None:
    """Return the spec without the features of its data that a module does not look up: clients need not send
    them. All numbers stay: which of them a module reads is unknown."""
    spec = model.spec
    if spec is None or not model.reads_data_spec:
        return spec
    read = [name for name in _features_of(model.module) if name in spec.ids]
    narrow = spec.only(with_parts(spec, [*read, *spec.floats]))
    if type(narrow) is not FeatureSpec:  # part of a history, which JSON does not say
        return spec
    optional = tuple(name for name in spec.optional if name in narrow.inputs or name in spec.targets)
    return replace(narrow, labels=spec.labels, optional=optional)


def _check_reading(task: Task, spec: FeatureSpec, names: Sequence[str], batch: Batch) -> None:
    """Check that a server, which has the spec alone, reads a batch of raw columns as the data does.

    Raises:
        ExportError: It reads something else.
    """
    try:
        made = spec.without_labels().make(Records(len(batch), batch.raw, kinds=batch.raw_kinds))
    except DataError:  # a column that the spec does not know as the data has it
        return
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for name in names:
        given, read = (ids[name] if name in ids.names else None for ids in (batch.ids, made.ids))
        pairs[name] = None if given is None else given.flat_values, None if read is None else read.flat_values
    pairs |= {name: (batch.floats.get(name), numbers) for name, numbers in made.floats.items()}
    for name, (one, other) in pairs.items():
        missing = one is None or other is None or one.shape != other.shape
        if missing or not torch.allclose(one, other, equal_nan=True):  # type: ignore[arg-type]
            raise ExportError(
                f"cannot export task {task.name!r}: {name!r} of its batches is not what its spec makes of "
                f"the raw columns: its own code changes it, and {_HASHED}. Do that work before to_batches, "
                f"in `map` of the pipeline, or in the spec. {_IF_MEANT}"
            )


def _sample_of(
    task: Task, module: nn.Module, spec: FeatureSpec | None, say: Callable[[str], object]
) -> _Sample:
    """Look at the first batch of the evaluation data, where that has an end: a live stream may have none."""
    floats = dict(module.floats.widths) if isinstance(module, ReadyModel) else {}
    try:
        batch = _first_batch(task, spec, say)
    except MonolithError as error:
        say(f"no warm-up requests: the evaluation data cannot be read: {error}")
        batch = None
    if batch is None:
        return _Sample(floats=floats)
    floats = {name: tensor.shape[1] for name, tensor in batch.floats.items()}
    kinds = kinds_of(batch)
    if spec is not None and all(name in batch.raw for name in spec.inputs if name not in spec.optional):
        _check_reading(task, spec, _features_of(module), batch)
    ids = [] if spec is not None else _features_of(module)
    requests = draw_requests(batch, RequestReader(spec, ids, floats, kinds).inputs, raw=spec is not None)
    return _Sample(floats=floats, labels=tuple(batch.labels), requests=requests, kinds=kinds)


def _first_batch(task: Task, spec: FeatureSpec | None, say: Callable[[str], object]) -> Batch | None:
    if spec is not None and spec.optional:
        with suppress(DataError):  # the data may lack them
            return _read_first(task, list(spec.inputs), say)
    names = [] if spec is None else [name for name in spec.inputs if name not in spec.optional]
    return _read_first(task, names, say)


def _read_first(task: Task, names: Sequence[str], say: Callable[[str], object]) -> Batch | None:
    with closing(as_stream(task.dataset(Mode.EVALUATE))) as data:
        # Without a spec the widths of floats are needed as well: unless it is known to be live, it is read.
        unknown = data.size() is None and data.fraction_read(data.position()) is None
        if data.live or (unknown and names):
            say("no warm-up requests: it is unknown whether the evaluation data ends")
            return None
        if names:
            data.keep_columns(names)
        return next(iter(data), None)


def _requests_in(path: str) -> list[dict[str, Any]] | None:
    """Return the warm-up requests of a file; None if there is no such file."""
    try:
        text = filesystem.read_bytes(path)
    except FileMissingError:
        return None
    try:
        try:
            parsed = [json.loads(text)]
        except ValueError:
            parsed = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [request for one in parsed for request in one.get("requests", [one])]
    except (ValueError, AttributeError, TypeError) as cause:
        raise ExportError(
            f"export.warm_up_file: {path} is not JSON of requests: {cause}. Write one in each line, as "
            "a client sends it to /v2/models/NAME/infer; records of TensorFlow's PredictionLog are not read"
        ) from cause


def _check_requests(requests: Sequence[Mapping[str, Any]], reader: RequestReader, path: str) -> None:
    for number, request in enumerate(requests, 1):
        try:
            for columns in read_requests(write_requests([request]), path):
                reader.batch(columns)
        except MonolithError as cause:
            raise ExportError(
                f"export.warm_up_file: the model cannot answer request {number} of {path}: {cause}"
            ) from cause


def _features_of(module: nn.Module) -> list[str]:
    from monolith.serve.tracing import collections_of

    return list(dict.fromkeys(name for one in collections_of(module) for name in one.features))


# When a run saves


class ExportListener(SaveListener):
    """Exports each checkpoint that is saved. A failure is logged, counted and retried, with the next save or
    at the end of the run.

    Args:
        root: The folder of versions.
        keep: How many stay; None keeps those whose checkpoints are there.
    """

    def __init__(
        self,
        exporter: Exporter,
        model_dir: str,
        root: str,
        *,
        shards: int = 0,
        keep: int | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._exporter = exporter
        self._model_dir = model_dir
        self._keep = keep
        self._root = root
        self._roots = version_roots(root, shards)
        metrics = Metrics() if metrics is None else metrics
        self._failed = metrics.counter("export_models_failed", "Checkpoints that could not be exported")
        self._latest = metrics.gauge("export_models_latest_version", "Step of the newest servable")
        self.newest: ExportedServable | None = None
        """The last exported servable."""
        self._failed_step: int | None = None

    def retry(self) -> None:
        if self._failed_step is not None:
            self.after_save(self._failed_step)

    def after_save(self, step: int) -> bool | None:
        try:
            self._export(step)
            self.trouble, self._failed_step = "", None
        except Exception as error:
            self._failed.inc()
            for root in self._roots:  # half of a version would fill the disk that the next save needs
                with suppress(OSError, MonolithError):
                    remove_leftovers(root)
            self._failed_step = step
            self.trouble = f"step {step} is saved, and not exported to {self._root}: {error}"
            unexpected = None if isinstance(error, MonolithError) else error
            _log.error(
                "the checkpoint of step %d is saved, and could not be exported to %s: %s Training continues, "
                "and the next save is exported again, at the end of a run the last one; `monolith export` "
                "exports this one.",
                step,
                self._root,
                error,
                exc_info=unexpected,
            )
        return None

    def _export(self, step: int) -> None:
        saver = Saver(self._model_dir)
        prefix = saver.find(step) or saver.names.prefix(step)
        made = self._exporter.export(prefix, self._root)
        self.newest = made
        removed, held = self._retain()
        write_states(self._roots)
        self._latest.set(step)
        _log.info(
            "exported step %d to %s%s: %s rows, %s%s%s",
            step,
            made.folder,
            ", withheld from servers while publishing is paused" if made.withheld else "",
            f"{made.servable.rows:,}",
            describe_bytes(made.bytes),
            f"; removed {', '.join(removed)}" if removed else "",
            f"; kept {', '.join(held)}, which a server holds" if held else "",
        )

    def _retain(self) -> tuple[list[str], list[str]]:
        if self._keep is not None:
            return keep_newest(self._roots, self._keep)
        versions = list_versions(self._roots[0])
        withheld = withheld_versions(self._roots[0], versions)
        # While publishing is paused the last good version is what servers start with, and may be older than
        # all checkpoints.
        last_good = [version for version in versions if version not in withheld][-1:]
        there = set(complete_names(self._model_dir))
        return remove_versions(
            self._roots,
            [
                one
                for one in versions
                if one not in last_good and self._is_ours_without_checkpoint(one, there)
            ],
        )

    def _is_ours_without_checkpoint(self, version: str, there: set[str]) -> bool:
        try:
            servable = read_servable(filesystem.join(self._roots[0], version))
        except MonolithError:
            return False
        ours = is_same_run(servable.run, identity_of(self._model_dir))
        return ours and servable.checkpoint not in there


def write_states(roots: Sequence[str]) -> None:
    """Write into each folder of versions which of them is of which step; always of what is there.

    Withheld versions are left out: other programs choose from this file what they serve.
    """
    for root in roots:
        entries = []
        versions = list_versions(root)
        withheld = withheld_versions(root, versions)
        for version in (one for one in versions if one not in withheld):
            folder = filesystem.join(root, version)
            step = read_servable(folder).step
            entries.append(f"entries {{\n  export_dir: {json.dumps(folder)}\n  global_step: {step}\n}}\n")
        with filesystem.atomic_write(filesystem.join(root, STATE_FILE)) as file:
            file.write("".join(entries).encode())


@contextmanager
def exports_when_saving(
    task: Task,
    config: TrainConfig,
    export: ExportConfig,
    *,
    metrics: Metrics | None = None,
    say: Callable[[str], object] = _log.info,
) -> Iterator[list[SaveListener]]:
    """Have the listener that exports what a run saves, if that is asked for.

    Raises:
        ConfigError: Nothing is saved.
        ExportError: The model cannot be exported. Better said before the training than after it.
    """
    if not export.when_saving:
        yield []
        return
    if not config.model_dir:
        raise ConfigError("export.when_saving: nothing is saved without a model_dir; set --model-dir")
    root = export_folder(export, config)
    if filesystem.is_remote(root):
        raise ExportError(
            f"cannot export to {root}: a servable is written to a disk of this machine; set export.dir"
        )
    how, warm_up = how_to_export(export, config), export.warm_up_file or True
    with task_exporter(task, config, how, inputs=export.inputs, warm_up=warm_up, say=say) as exporter:
        yield [
            ExportListener(
                exporter, config.model_dir, root, shards=export.shards, keep=export.keep, metrics=metrics
            )
        ]
