"""Dense state: a model's variables and all that training them needs, saved and restored.

`capture_dense` copies them, and training continues while the copy is written:

    <prefix>.dense-00000-of-00001.safetensors       parameters and buffers, by name
    <prefix>.optimizer-00000-of-00001.safetensors   optimizers, schedulers, scaler, random generators

A serving server reads the first file alone. `restore_dense` reads, checks and fits everything before it
changes anything. Rows of tables are not parameters; they are saved by `tables`.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monolith import filesystem
from monolith.checkpoint.dense.custom_restore import (
    CustomRestore,
    Origin,
    RestorePlan,
    parts_by_whole,
    path_of,
)
from monolith.checkpoint.dense.training_state import (
    KEYS,
    LoadedVariables,
    ModelVariables,
    Optimizers,
    Resumed,
    Schedulers,
    TrainingRestore,
    Variables,
    encode_training,
)
from monolith.checkpoint.folder.state_files import dense_path, optimizer_path
from monolith.checkpoint.part import Changes, Entry, RestoreOptions, RestoreReport, Span, covered
from monolith.errors import CorruptFileError, FileMissingError, RestoreError, SaveError
from monolith.tensors.files import (
    DenseHeader,
    FileRecord,
    TensorInfo,
    memory_of,
    read_header,
    read_tensors,
    write_tensors,
)
from monolith.tensors.plain_state import Json, decode, encode

_KINDS = {"dense": frozenset({"extra"}), "optimizer": KEYS}
"""Kind of file -> the keys of its JSON, in addition to version and global step."""
METADATA = "monolith"
_VERSION = 1
EXTRA = "$extra/"
"""Prefix of the names of tensors that are not variables: a module's extra state."""
_COUNTER = "global_step"


@dataclass(frozen=True, slots=True, eq=False)
class DenseSnapshot:
    """A copy of the dense state at one moment, in the memory of this process."""

    variables: Mapping[str, Tensor]
    variables_json: str
    training: Mapping[str, Tensor]
    """The tensors of optimizers and other state that only training needs."""
    training_json: str | None
    """None: no such state was captured, and no file is written for it."""
    copied: Sequence[torch.cuda.Event] = ()
    """Events that complete when the copies from a GPU have arrived."""

    def write(self, prefix: str, *, full: bool) -> Entry:  # noqa: ARG002
        """Write the files of a checkpoint, all of them into an incremental one too; see `PartSnapshot`."""
        return {"files": {name: asdict(record) for name, record in self.write_files(prefix).items()}}

    def close(self, *, saved: bool) -> None:
        """Do nothing: the copies are freed with this object."""

    def write_files(self, prefix: str) -> dict[str, FileRecord]:
        """Write the files of a checkpoint; return the record of each by its base name.

        The folder must exist. From any thread.

        Raises:
            FilesystemError: A file could not be written; an earlier file of that name is still there.
        """
        for event in self.copied:
            event.synchronize()
        path = dense_path(prefix)
        written = {path: write_tensors(path, self.variables, {METADATA: self.variables_json})}
        if self.training_json is not None:
            path = optimizer_path(prefix)
            written[path] = write_tensors(path, self.training, {METADATA: self.training_json})
        return {filesystem.base_name(path): record for path, record in written.items()}


def capture_dense(
    model: Variables,
    optimizers: Optimizers = (),
    schedulers: Schedulers = (),
    *,
    scaler: torch.amp.GradScaler | None = None,
    random: bool = True,
    global_step: int = 0,
) -> DenseSnapshot:
    """Copy the dense state as it is now.

    From a GPU the copies go to pinned memory, after the work queued on the current stream, and this does not
    wait for them. No other thread may train meanwhile.

    Args:
        random: Whether the process's random generators are captured too.

    Raises:
        SaveError: A value is of a kind that cannot be saved, or an optimizer trains what is not in the model.
    """
    source = ModelVariables(model, SaveError)
    extra_tensors: dict[str, Tensor] = {}
    extra = {name: encode(value, EXTRA + name, extra_tensors) for name, value in source.extra.items()}
    training_tensors: dict[str, Tensor] = {}
    training = encode_training(
        source, optimizers, schedulers, scaler=scaler, random=random, tensors=training_tensors
    )
    about = {"version": _VERSION, "global_step": global_step}
    copies = _Copies()
    return DenseSnapshot(
        variables=copies.merged(source.tensors) | copies.of(extra_tensors),
        variables_json=json.dumps({**about, "extra": extra}, allow_nan=False),
        training=copies.of(training_tensors),
        training_json=json.dumps({**about, **training}, allow_nan=False) if any(training.values()) else None,
        copied=copies.start(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSelection:
    """Which part of the dense state a restore loads."""

    include: Collection[str] = ("*",)
    """Patterns with `*` and `?` of the names to load. All other variables are left alone."""
    exclude: Collection[str] = ()
    """Patterns of names that are not loaded, even if they are included."""
    only: Callable[[str], bool] | None = None
    """Whether to load a variable; the rest are live and left alone, with their optimizer's state."""
    reshape: bool = False
    """Whether a tensor may be loaded into one of another shape and as many elements, row by row."""
    random: bool = False
    """Whether the process's random generators are set, if they were saved."""


ALL = DenseSelection()
EXACT = RestoreOptions(custom=CustomRestore(auto_alias=False))
"""Names, shapes and optimizers must be those of the checkpoint."""


def restore_dense(
    prefix: str | None,
    model: Variables,
    optimizers: Optimizers = (),
    schedulers: Schedulers = (),
    *,
    scaler: torch.amp.GradScaler | None = None,
    records: Mapping[str, FileRecord] | None = None,
    options: RestoreOptions = EXACT,
    selection: DenseSelection = ALL,
) -> RestoreReport:
    """Load a checkpoint's dense state into a model and what trains it.

    All files are read and checked, and everything is found to fit, before anything changes. Variables that
    are not loaded stay as they are.

    Args:
        prefix: The checkpoint, `<model_dir>/model.ckpt-<step>`.
        records: Base name of each file -> its record, from the checkpoint's manifest.
        options: What may differ. Its `optimizer_state`: "reset" leaves optimizers, schedulers and scaler as
            they are; "auto" does so with those that changed, and reports it; "keep" refuses a change.
            Counters such as `EmbeddingOptimizer`'s are loaded in any case. Its `changes` need `strict` False.

    Raises:
        RestoreError: There is no such checkpoint, or it does not fit; names what does not.
        CorruptFileError: A file is damaged, or another than was recorded.
    """
    optimizer_state, changes, strict = options.optimizer_state, options.changes, options.strict
    if optimizer_state not in ("keep", "reset", "auto"):
        raise RestoreError(f"optimizer_state must be 'keep', 'reset' or 'auto', got {optimizer_state!r}")
    if prefix is None:
        raise RestoreError("Can't load save_path when it is None.")
    custom, model_dir, random = options.custom, options.model_dir, selection.random
    clears = custom.clears(model_dir)
    target = ModelVariables(model, RestoreError)
    chosen = _Chosen(selection)
    saved = _SavedFile.open(prefix, dense_path(prefix), "dense", records)
    if saved is None:
        raise RestoreError(
            f"The passed save_path is not a valid checkpoint: {prefix}. There is no {dense_path(prefix)}."
        )
    shapes = {name: i.shape for name, i in saved.header.tensors.items() if not name.startswith(EXTRA)}
    plan = custom.plan(
        {name: tuple(tensor.shape) for name, tensor in target.tensors.items()},
        shapes,
        wanted=[name for name in target.tensors if chosen.by_pattern(name)],
    )
    loads = _loads(clears, custom.continue_training)
    fitted = _fit(target, saved, plan, chosen, reshape=selection.reshape, loads=loads, changes=changes)
    asked = bool(optimizers or schedulers or scaler or random)
    trained = _SavedFile.open(prefix, optimizer_path(prefix), "optimizer", records) if asked else None
    training = TrainingRestore(
        None if trained is None else trained.about,
        (lambda _: {}) if trained is None else trained.read,
        LoadedVariables(target, chosen, fitted.origins, shapes, saved.all_names),
        _resumed(clears, custom.continue_training, optimizer_state, random),
    )
    training.prepare(optimizers, schedulers, scaler)
    problems = fitted.problems | (training.problems if optimizer_state == "keep" else {})
    if strict and problems:
        raise _does_not_fit(prefix, problems)
    values, extra = _values(saved, fitted, target)
    if strict:
        _check_tied(prefix, target, values)
    with ExitStack() as undo:
        training.apply(undo)
        target.load(values, extra)
        undo.pop_all()
    if clears and model_dir is not None:
        custom.mark_cleared(model_dir)
    used = {name for origin in plan.origins.values() for name in saved.all_names(origin.name)}
    sizes = {}
    if changes is not None:
        sizes = {name: shape_text(info.shape) for name, info in saved.header.tensors.items()}
        sizes |= {name: shape_text(tensor.shape) for name, tensor in target.tensors.items()}
    report = RestoreReport(
        loaded=dict.fromkeys([name for name in (*values, *extra) if name not in fitted.partial], ""),
        partly={name: _part_text(target.tensors[name], one) for name, one in fitted.partial.items()},
        sizes=sizes,
        renamed={name: old for name, old in plan.renamed.items() if name in values},
        reset=dict.fromkeys(fitted.cleared, "")
        | {name: f"reset: {why}" for name, why in fitted.problems.items() if name not in fitted.missing},
        skipped=fitted.skipped,
        missing=tuple(fitted.missing),
        unused=tuple(sorted(shapes.keys() - used)),
        global_step=0 if clears and not custom.continue_training else int(saved.about["global_step"]),
    )
    return report.merge(training.report)


# Copying


class _Copies:
    """Copies of tensors: memory is allocated for each, then all are copied at once."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return memory for a copy of each; names of one tensor share it."""
        return {name: self._copy(name, tensor) for name, tensor in tensors.items()}

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Like `of`, with the parts of a variable joined under its name."""
        split = {
            whole: parts
            for whole, parts in parts_by_whole({n: tuple(t.shape) for n, t in tensors.items()}).items()
            if len({(tensors[part].dtype, tensors[part].device) for part in parts}) == 1
        }
        in_parts = {part for parts in split.values() for part in parts}
        copies = self.of({name: tensor for name, tensor in tensors.items() if name not in in_parts})
        for whole, names in split.items():
            parts = [tensors[name].detach() for name in names]
            rows = [len(part) for part in parts]
            copies[whole] = _memory((sum(rows), *parts[0].shape[1:]), parts[0])
            self._targets += torch.split(copies[whole], rows)
            self._sources += parts
        return copies

    def start(self) -> list[torch.cuda.Event]:
        """Start copying; return the events to wait for."""
        with torch.no_grad():
            if self._sources:
                torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
        events = []
        for device in {source.device for source in self._sources if source.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise SaveError(f"cannot save {name!r}: it is {layout}, and only dense tensors can be saved")
        memory = memory_of(tensor)
        if memory is not None and memory in self._made:
            return self._made[memory]
        copy = _memory(tuple(tensor.shape), tensor)
        self._targets.append(copy)
        self._sources.append(tensor.detach())
        if memory is not None:
            self._made[memory] = copy
        return copy


def _memory(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


# Reading


@dataclass(frozen=True, slots=True)
class _SavedFile:
    """The header of one file of a checkpoint, before its tensors are read."""

    path: str
    header: DenseHeader
    about: Json
    record: FileRecord | None

    @classmethod
    def open(
        cls, prefix: str, path: str, kind: str, records: Mapping[str, FileRecord] | None
    ) -> _SavedFile | None:
        """Return the file; None if the checkpoint has no such one."""
        record = None
        if records is not None and (record := records.get(filesystem.base_name(path))) is None:
            return None
        try:
            header = read_header(path)
        except FileMissingError as cause:
            if record is None:
                return None
            raise RestoreError(
                f"The passed save_path is not a valid checkpoint: {prefix}. Its manifest lists {path}, "
                "which is missing. Restore the files as they were written, or use another checkpoint."
            ) from cause
        return cls(path, header, _about(path, header, kind), record)

    def read(self, only: Callable[[str], bool]) -> dict[str, Tensor]:
        return read_tensors(self.path, self.record, only=only)

    def all_names(self, name: str) -> list[str]:
        """Return the names of one saved tensor, the one asked for first."""
        shared = self.header.shared
        owner = shared.get(name, name)
        return list(dict.fromkeys([name, owner, *(n for n, other in shared.items() if other == owner)]))


def _about(path: str, header: DenseHeader, kind: str) -> Json:
    """Return the metadata of a file, if it is of that kind."""
    keys = _KINDS[kind] | {"version", "global_step"}
    try:
        about = json.loads(header.metadata[METADATA])
        if about["version"] != _VERSION:
            raise ValueError(f"it is of version {about['version']}, this program reads {_VERSION}")
        if about.keys() != keys:
            raise ValueError(f"it has {', '.join(sorted(about))} instead of {', '.join(sorted(keys))}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
        raise CorruptFileError(path, 8, f"this is not a {kind} file of a checkpoint: {cause!r}") from cause
    return about


def _values(
    saved: _SavedFile, fitted: _Fitted, target: ModelVariables
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the file once; return the values of variables, and the extra state of modules."""
    wanted = {origin.name for origin in fitted.origins.values()}
    wanted |= {partial.origin.name for partial in fitted.partial.values()}
    tensors = saved.read(lambda name: name in wanted or name.startswith(EXTRA))
    values = {
        name: (tensors[origin.name] if origin.rows is None else tensors[origin.name][slice(*origin.rows)])
        for name, origin in fitted.origins.items()
    }
    shaped = {name: value.reshape(target.tensors[name].shape) for name, value in values.items()}
    for name, partial in fitted.partial.items():
        made = target.tensors[name].detach().cpu().clone()
        source = tensors[partial.origin.name]
        for block in partial.blocks:
            there = tuple(slice(begin, begin + size) for begin, _, size in block)
            made[tuple(slice(to, to + size) for _, to, size in block)] = source[there]
        shaped[name] = made
    return shaped, {name: decode(saved.about["extra"][name], tensors) for name in fitted.extra}


# Fitting


class _Chosen:
    """Which names a restore loads."""

    def __init__(self, selection: DenseSelection) -> None:
        self._include, self._exclude, self._only = selection.include, selection.exclude, selection.only
        for patterns in (self._include, self._exclude):
            if isinstance(patterns, str):
                raise RestoreError(f"include and exclude are lists of patterns, got the text {patterns!r}")

    def by_pattern(self, name: str) -> bool:
        return _matches(name, self._include) and not _matches(name, self._exclude)

    def why_not(self, name: str) -> str:
        """Return why a name is not loaded; empty if it is."""
        if self._only is not None and not self._only(name):
            return "live"
        return "" if self.by_pattern(name) else "not chosen"

    def __call__(self, name: str) -> bool:
        return not self.why_not(name)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class _Partial(NamedTuple):
    """The blocks of a saved tensor that go into a variable."""

    origin: Origin
    blocks: list[tuple[Span, ...]]


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for people, as 21 x 8."""
    return " x ".join(map(str, shape)) or "one number"


def _part_text(tensor: Tensor, partial: _Partial) -> str:
    return f"{covered(partial.blocks):,} of {tensor.numel():,} weights of {shape_text(tensor.shape)}"


@dataclass(slots=True)
class _Fitted:
    """The variables, sorted by whether and how they can be loaded."""

    origins: dict[str, Origin] = field(default_factory=dict)
    partial: dict[str, _Partial] = field(default_factory=dict)
    """Variables of which a part is loaded; their optimizer state starts fresh."""
    extra: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    cleared: list[str] = field(default_factory=list)


def _fit(
    target: ModelVariables,
    saved: _SavedFile,
    plan: RestorePlan,
    chosen: _Chosen,
    *,
    reshape: bool,
    loads: Callable[[str], bool],
    changes: Changes | None,
) -> _Fitted:
    """Sort the variables; those that `loads` refuses are reset."""
    fitted = _Fitted()
    for name in (*target.tensors, *target.extra):
        if why := chosen.why_not(name):
            fitted.skipped[name] = why
        elif not loads(name):
            fitted.cleared.append(name)
        elif name in target.extra and name in saved.about["extra"]:
            fitted.extra.append(name)
        elif (origin := plan.origins.get(name)) is None:
            fitted.missing.append(name)
            fitted.problems[name] = "not found in checkpoint"
        elif changes is not None and (found := _partial(name, saved, origin, target, changes)) is not None:
            if isinstance(found, str):
                fitted.problems[name] = found
            else:
                fitted.partial[name] = found
        elif why := plan.problems.get(name) or _misfit(
            saved.header.tensors[origin.name], origin, target.tensors[name], reshape
        ):
            fitted.problems[name] = why
        else:
            fitted.origins[name] = origin
    return fitted


def _partial(
    name: str, saved: _SavedFile, origin: Origin, target: ModelVariables, changes: Changes
) -> _Partial | str | None:
    """Return the part of a saved tensor that a variable of a changed model loads, or why it loads none; None
    if it loads all of it."""
    info, tensor = saved.header.tensors[origin.name], target.tensors[name]
    if origin.rows is not None or info.dtype != tensor.dtype:
        return None
    blocks, why = changes.pieces(name, info.shape, tuple(tensor.shape))
    if blocks and not covered(blocks):
        return "its inputs are all new"
    return _Partial(origin, blocks) if blocks else why or None


def _loads(clears: bool, continues: bool) -> Callable[[str], bool]:
    """Return whether a variable is loaded: after a reset, at most a global step is."""
    if not clears:
        return lambda _: True
    return lambda name: continues and path_of(name).rpartition("/")[2] == _COUNTER


def _misfit(info: TensorInfo, origin: Origin, tensor: Tensor, reshape: bool) -> str:
    """Return why a saved tensor does not fit a variable; empty if it does."""
    if info.dtype != tensor.dtype:
        original, wanted = (str(dtype).removeprefix("torch.") for dtype in (info.dtype, tensor.dtype))
        return f"its original dtype, in the checkpoint, is {original}, this model needs {wanted}"
    found = info.shape if origin.rows is None else (origin.rows[1] - origin.rows[0], *info.shape[1:])
    wants = tuple(tensor.shape)
    as_many = math.prod(found) == math.prod(wants)
    if found == wants or (reshape and as_many):
        return ""
    hint = "; reshape=True would load it row by row" if as_many else ""
    return f"it has shape {found} in the checkpoint, this model needs {wants}{hint}"


def _does_not_fit(prefix: str, problems: Mapping[str, str], shown: int = 20) -> RestoreError:
    listed = [f"\n  {name}: {why}" for name, why in problems.items()]
    more = f"\n  and {len(listed) - shown} more" if len(listed) > shown else ""
    return RestoreError(
        f"cannot restore {prefix}: {len(listed)} {'name does' if len(listed) == 1 else 'names do'} not fit, "
        f"nothing was changed:{''.join(listed[:shown])}{more}\n"
        "Has the model changed since? Restore with strict=False to load what fits, leave variables out with "
        "exclude=, give their old names with CustomRestore(alias_map=...), or reset optimizers with "
        "optimizer_state='reset'."
    )


def _check_tied(prefix: str, target: ModelVariables, values: Mapping[str, Tensor]) -> None:
    """Refuse two values for variables that share memory: the later would win silently."""
    first: dict[tuple[Any, ...], str] = {}
    for name, value in values.items():
        memory = memory_of(target.tensors[name])
        other = name if memory is None else first.setdefault(memory, name)
        if other != name and not torch.equal(value, values[other]):
            raise RestoreError(
                f"cannot restore {prefix}: {other!r} and {name!r} are one tensor in this model and two "
                "different ones in the checkpoint. Untie them, or leave one out with exclude=."
            )


def _resumed(clears: bool, continues: bool, optimizer_state: str, random: bool) -> Resumed:
    keep = optimizer_state != "reset"
    return Resumed(
        optimizers=keep and not clears,
        counters=continues or not clears,
        schedulers=keep and (continues or not clears),
        scaler=keep and not clears,
        random=random and (continues or not clears),
    )
