"""Importing: a model that the original system trained, into the tables, weights and optimizer of a task here.

    source = OriginalCheckpoint.find("old/model.ckpt-100")
    report = import_original(source, NameMap.read("names.toml"), target)

A checkpoint of the original is a tensor bundle (`model.ckpt-100.index` and data files) and a folder of table
dumps (`model.ckpt-100.assets`); either may be alone. Whatever is left out is listed with the reason, and
whatever does not fit is an error: the target is then loaded in part, and not to be used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from monolith import filesystem
from monolith.checkpoint.dense.custom_restore import path_of
from monolith.checkpoint.dense.training_state import ModelVariables, kind_of
from monolith.checkpoint.folder.state_files import read_checkpoint_state
from monolith.checkpoint.original.bundle import BundleVariable, TensorBundle
from monolith.checkpoint.original.names import SLOT_FAMILIES, NameMap, Slot, plain_name, split_slot
from monolith.config.reading import nearest
from monolith.errors import FileMissingError, RestoreError
from monolith.observe import Progress
from monolith.table import Table, table_basename
from monolith.table.entry_dumps import (
    import_entry_dumps,
    import_multi_entry_dumps,
    is_multi_table,
    tables_of_multi_dump,
)

STEP = "global_step"
SINGLE_TABLE = "MonolithHashTable_"
MULTI_TABLE = "MonolithMultiHashTable_"
_FILTER = "hash_filter"
_POWERS = ("beta1_power", "beta2_power")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SHARD = re.compile(r"(?P<base>.+)-\d{5}-of-\d{5}")


@dataclass(frozen=True, slots=True)
class OriginalCheckpoint:
    """Where a checkpoint of the original system is."""

    bundle: str | None
    """The prefix of a tensor bundle; None if there are only tables."""
    tables: str | None
    """The folder of table dumps; None if there are only dense variables."""

    @classmethod
    def find(cls, path: str) -> OriginalCheckpoint:
        """Return the checkpoint that a prefix, its index, its `.assets` folder or a model folder means.

        A folder means the latest checkpoint that its file `checkpoint` names, or the only one it has, or
        table dumps that are in the folder itself.

        Raises:
            FileMissingError: There is no such thing.
            RestoreError: The folder has several and does not say which is the latest.
        """
        path = path.removesuffix("/").removesuffix(".index")
        if not filesystem.is_folder(path) or path.endswith(".assets"):
            return cls._at(path.removesuffix(".assets"), path)
        state = read_checkpoint_state(path, sleep=lambda _: None)
        if state is not None:  # the folder may have moved since; the names in it have not
            name = filesystem.base_name(state.model_checkpoint_path)
            return cls._at(filesystem.join(path, name), path)
        names = [filesystem.base_name(one) for one in filesystem.list_files(path)]
        prefixes = {name.removesuffix(".index") for name in names if name.endswith(".index")}
        folders = map(filesystem.base_name, filesystem.list_folders(path))
        prefixes |= {name.removesuffix(".assets") for name in folders if name.endswith(".assets")}
        if len(prefixes) > 1:
            raise RestoreError(
                f"{path} has the checkpoints {', '.join(sorted(prefixes))} and no file `checkpoint` that "
                "says which is the latest; name one of them"
            )
        if prefixes:
            return cls._at(filesystem.join(path, prefixes.pop()), path)
        if any(_SHARD.fullmatch(name) for name in names):
            return cls(None, path)
        raise FileMissingError(
            f"{path} has no checkpoint of the original: no *.index, *.assets or table dumps"
        )

    @classmethod
    def _at(cls, prefix: str, asked: str) -> OriginalCheckpoint:
        assets = f"{prefix}.assets"
        found = cls(
            prefix if filesystem.exists(f"{prefix}.index") else None,
            assets if filesystem.is_folder(assets) else None,
        )
        if found.bundle is None and found.tables is None:
            raise FileMissingError(
                f"{asked} is no checkpoint of the original: no {prefix}.index and no {assets}"
            )
        return found


@dataclass(frozen=True, slots=True)
class ImportTarget:
    """What a model is loaded into."""

    tables: Mapping[str, Table]
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    """What trains the dense weights."""


@dataclass(frozen=True, slots=True)
class ImportedName:
    """What became of one name of the original."""

    kind: Literal["table", "variable", "optimizer", "step"]
    original: str
    ours: str | None
    """None: it was left out."""
    detail: str
    """A description of the loaded state, or why it was left out."""


@dataclass(slots=True)
class ImportReport:
    """What an import did, by name."""

    step: int = 0
    names: list[ImportedName] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What the model has and the original did not: `table x` or the name of a variable."""
    rows: dict[str, int] = field(default_factory=dict)
    """By table of ours."""
    prefix: str | None = None
    """The checkpoint that was written; None in a dry run."""

    @property
    def loaded(self) -> list[ImportedName]:
        return [one for one in self.names if one.ours is not None]

    @property
    def left_out(self) -> list[ImportedName]:
        return [one for one in self.names if one.ours is None]


def import_original(
    source: OriginalCheckpoint,
    names: NameMap,
    target: ImportTarget,
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Load a checkpoint of the original; return which names were loaded, which were not, and why.

    Args:
        step: The step to resume from, instead of the original's `global_step`.
        progress: Advanced by rows.

    Raises:
        ConfigError: The name map names something that the model does not have.
        RestoreError: Something does not fit: a width, a shape, or a kernel without a word about its axes.
        CorruptFileError, FileMissingError: A file is damaged or missing; says which.
    """
    report = ImportReport()
    names.unknown_targets("tables", target.tables)
    variables = ModelVariables(target.model, RestoreError)
    names.unknown_targets("variables", variables.tensors)
    if source.bundle is not None:
        bundle = TensorBundle(source.bundle)
        _Dense(bundle, names, target, variables=variables, report=report, step=step).load()
    else:
        report.missing += variables.tensors
    report.step = step if step is not None else report.step
    if source.tables is not None:
        _import_tables(source.tables, names, target.tables, report, progress)
    report.missing += [f"table {name}" for name in target.tables if name not in report.rows]
    return report


# Dense


class _Dense:
    """The dense variables of one bundle on their way into a model."""

    def __init__(
        self,
        bundle: TensorBundle,
        names: NameMap,
        target: ImportTarget,
        *,
        variables: ModelVariables,
        report: ImportReport,
        step: int | None,
    ) -> None:
        self._bundle = bundle
        self._names = names
        self._target = target
        self._variables = variables
        self._report = report
        self._step = step
        self._paths = {path_of(name): name for name in variables.tensors}
        self._kernels = {
            f"{name}.weight" if name else "weight"
            for name, module in target.model.named_modules()
            if isinstance(module, nn.Linear)
        }

    def load(self) -> None:
        values: dict[str, Tensor] = {}
        slots: dict[str, dict[int, tuple[str, str, bool]]] = {}  # ours -> number -> (name in the bundle, ...)
        plain = {plain_name(name): name for name in self._bundle.variables}
        for name, stored in plain.items():
            found = self._bundle.variables[stored]
            slot = split_slot(name)
            if name == STEP:
                self._load_step(stored)
            elif name in _POWERS or stored == _OBJECT_GRAPH:
                pass  # of Adam, and read with its slots; and the graph of Python objects, which has no values
            elif slot is not None and slot.variable in plain:
                self._note_slot(name, stored, slot, slots)
            else:
                self._load_variable(name, found, values)
        self._variables.load(values, {})
        memory = {
            self._variables.tensors[name].data_ptr() for name in values
        }  # of tied weights one is enough
        self._report.missing += [
            name
            for name, tensor in self._variables.tensors.items()
            if name not in values
            and tensor.data_ptr() not in memory
            and (tensor.is_floating_point() or tensor.is_complex())  # counters of layers start at 0
        ]
        if self._target.optimizer is not None:
            self._load_slots(self._target.optimizer, values, slots)

    def _load_step(self, stored: str) -> None:
        value = self._bundle.read(stored)
        if value.numel() != 1 or value.is_floating_point() or int(value) < 0:
            raise RestoreError(
                f"{self._bundle.prefix}: global_step is {value.tolist()!r}, not a number of steps"
            )
        self._report.step = int(value)
        used = f"step {int(value):,}"
        if self._step is not None and self._step != int(value):
            used += f"; the run resumes from {self._step:,}, as asked"
        self._note("step", STEP, "step", used)

    def _ours(self, original: str) -> tuple[str | None, bool | None, str]:
        """Return our variable for an original one, and whether to transpose it; or None and why not."""
        said = self._names.ours("variables", original)
        if said is not None and said.name is None:
            return None, None, "left out by the name map"
        wanted = original if said is None else said.name
        assert wanted is not None
        ours = self._paths.get(path_of(wanted))
        if ours is None:
            near = nearest(wanted, self._variables.tensors)
            hint = f"; the nearest is {near}" if near else ""
            return None, None, f"the model has no variable {wanted}{hint}"
        return ours, None if said is None else said.transpose, ""

    def _load_variable(self, name: str, found: BundleVariable, values: dict[str, Tensor]) -> None:
        ours, transposed, why = self._ours(name)
        if ours is None:
            self._note("variable", name, None, f"{_size(found)}: {why}")
            return
        if ours in values:
            raise RestoreError(f"{self._bundle.prefix}: {name!r} and another variable both go into {ours!r}")
        # A square kernel fits both ways, and the wrong one ruins the model: the name map has to say which.
        if transposed is None and ours in self._kernels and name.endswith("kernel"):
            raise RestoreError(
                f"{self._bundle.prefix}: {name!r} goes into {ours!r}, the weight of an nn.Linear. TensorFlow "
                f'keeps kernels as (in, out), torch as (out, in): map "{name}" to {{ name = "{ours}", '
                "transpose = true }, or with transpose = false if it was transposed already"
            )
        target = self._variables.tensors[ours]
        shape = tuple(reversed(found.shape)) if transposed else found.shape
        if shape != tuple(target.shape):
            how = " (transposed)" if transposed else ""
            advice = ""
            if transposed is None and tuple(reversed(shape)) == tuple(target.shape):
                advice = " Say transpose = true in the name map if it is stored the other way round."
            raise RestoreError(
                f"{self._bundle.prefix}: {name!r} has shape {found.shape}{how}, {ours!r} has "
                f"{tuple(target.shape)}.{advice}"
            )
        value = self._bundle.read(found.name)
        if _family(value.dtype) != _family(target.dtype):
            raise RestoreError(
                f"{self._bundle.prefix}: {name!r} is {found.dtype_name}, and {ours!r} is "
                f"{str(target.dtype).removeprefix('torch.')}"
            )
        detail = _size(found) + (", transposed" if transposed else "")
        if value.dtype != target.dtype:
            detail += f", as {str(target.dtype).removeprefix('torch.')}"
        values[ours] = (transposed_axes(value) if transposed else value).to(target.dtype).contiguous()
        self._note("variable", name, ours, detail)

    # What optimizers keep

    def _note_slot(
        self, name: str, stored: str, slot: Slot, slots: dict[str, dict[int, tuple[str, str, bool]]]
    ) -> None:
        family = (
            None if self._target.optimizer is None else SLOT_FAMILIES.get(kind_of(self._target.optimizer))
        )
        ours, transposed, why = self._ours(slot.variable)
        if ours is None:
            self._note("optimizer", name, None, why)
        elif family is None or family.original != slot.optimizer or slot.number >= len(family.keys):
            trains = "nothing" if self._target.optimizer is None else type(self._target.optimizer).__name__
            self._note(
                "optimizer", name, None, f"state of {slot.optimizer}; here {trains} trains the weights"
            )
        else:
            slots.setdefault(ours, {})[slot.number] = (name, stored, bool(transposed))

    def _load_slots(
        self,
        optimizer: torch.optim.Optimizer,
        values: Mapping[str, Tensor],
        slots: Mapping[str, dict[int, tuple[str, str, bool]]],
    ) -> None:
        family = SLOT_FAMILIES.get(kind_of(optimizer))
        state = optimizer.state_dict()
        steps = self._optimizer_steps(optimizer)
        for group, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
            if "step" in packed and slots:  # ours count steps by group, for rates that are functions of it
                packed["step"] = steps
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                ours = self._variables.name_of(parameter, "the dense optimizer")
                found = slots.get(ours, {})
                if family is None or not found or ours not in values:
                    continue
                if len(found) < len(family.keys):
                    for name, _, _ in found.values():
                        why = (
                            f"{family.original} has {len(family.keys)} slots, and only {len(found)} are there"
                        )
                        self._note("optimizer", name, None, why)
                    continue
                kept: dict[str, Any] = {}
                if family.original in ("Adam", "Adagrad"):  # torch's count steps by parameter
                    kept["step"] = torch.tensor(float(steps))
                for slot, key in enumerate(family.keys):
                    name, stored, transposed = found[slot]
                    kept[key] = self._slot_value(name, stored, transposed, key, parameter)
                    self._note("optimizer", name, f"{ours}: {key}", _size(self._bundle.variables[stored]))
                state["state"][number] = kept
        optimizer.load_state_dict(state)

    def _slot_value(
        self, name: str, stored: str, transposed: bool, key: str, parameter: Tensor
    ) -> Tensor | float:
        value = self._bundle.read(stored)
        if key == "c":  # Adamom's count: the original keeps it once per element, and all are equal
            if value.numel() and not bool((value == value.flatten()[0]).all()):
                raise RestoreError(f"{self._bundle.prefix}: {name!r} counts differently for some elements")
            return float(value.flatten()[0]) if value.numel() else 0.0
        value = transposed_axes(value) if transposed else value
        if value.shape != parameter.shape:
            raise RestoreError(
                f"{self._bundle.prefix}: {name!r} has shape {tuple(value.shape)}, its variable "
                f"{tuple(parameter.shape)}"
            )
        return value.to(parameter.dtype).contiguous()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how many steps the optimizer has taken: Adam's power says it; otherwise the global step."""
        known = {plain_name(name): name for name in self._bundle.variables}
        betas = optimizer.param_groups[0].get("betas") if optimizer.param_groups else None
        if betas and _POWERS[1] in known:
            power = float(self._bundle.read(known[_POWERS[1]]))
            if 1e-30 < power < 1 and 0 < betas[1] < 1:  # it underflows after some 60,000 steps
                # beta2_power begins as beta2, so it has one factor more than there were steps.
                return max(0, round(math.log(power) / math.log(betas[1])) - 1)
        return self._report.step

    def _note(
        self,
        kind: Literal["table", "variable", "optimizer", "step"],
        original: str,
        ours: str | None,
        detail: str,
    ) -> None:
        self._report.names.append(ImportedName(kind, original, ours, detail))


def _size(found: BundleVariable) -> str:
    shape = " x ".join(map(str, found.shape)) or "one number"
    parts = f", in {found.slices} parts" if found.slices > 1 else ""
    return f"{found.dtype_name} {shape}{parts}"


def transposed_axes(value: Tensor) -> Tensor:
    """Return a tensor with its axes in the opposite order."""
    return value.permute(*reversed(range(value.ndim)))


def _family(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "real" if dtype.is_floating_point else "whole"


# Tables


def _import_tables(
    folder: str,
    names: NameMap,
    tables: Mapping[str, Table],
    report: ImportReport,
    progress: Progress | None,
) -> None:
    taken: dict[str, int] = {}
    for base in _dumps(folder):
        basename = filesystem.join(folder, base)
        if base.startswith(_FILTER):
            why = "counts of an admission filter; here each table counts for itself"
            report.names.append(ImportedName("table", base, None, why))
        elif is_multi_table(basename):
            inside = {name: _table_for(name, names, tables) for name in tables_of_multi_dump(basename)}
            chosen = {name: tables[ours] for name, (ours, _) in inside.items() if ours is not None}
            done = import_multi_entry_dumps(chosen, basename, clear=False, progress=progress)
            for name, (ours, why) in inside.items():
                _note_table(f"{base}: {name}", ours, why if ours is None else done[name].rows, report, taken)
        else:
            ours, why = _table_for(base, names, tables)
            rows: int | str = why
            if ours is not None:
                done_one = import_entry_dumps(
                    tables[ours], basename, clear=False, verify_first=False, progress=progress
                )
                rows = done_one.rows
            _note_table(base, ours, rows, report, taken)
    for name, rows_read in taken.items():
        report.rows[name] = len(tables[name])
        if rows_read > len(tables[name]):
            again = rows_read - len(tables[name])
            why = f"{again:,} rows of IDs that were in more than one dump; the last one read was kept"
            report.names.append(ImportedName("table", f"table {name}", None, why))


def _dumps(folder: str) -> list[str]:
    """Return the basenames of the dumps in a folder, without companions."""
    names = map(filesystem.base_name, filesystem.list_files(folder))
    bases = {found["base"] for found in map(_SHARD.fullmatch, names) if found}
    return sorted(base for base in bases if not base.endswith((".meta", ".data")))


def _table_for(original: str, names: NameMap, tables: Mapping[str, Table]) -> tuple[str | None, str]:
    """Return our table for one of the original; or None and why there is none."""
    said = names.ours("tables", original)
    if said is not None and said.name is None:
        return None, "left out by the name map"
    wanted = original if said is None else said.name
    assert wanted is not None
    bare = wanted.removeprefix(SINGLE_TABLE)
    # The dump of a single table is called after its server, too: MonolithHashTable_item_0.
    candidates = [wanted, bare, *([re.sub(r"_\d+$", "", bare)] if bare != wanted and said is None else [])]
    for name, table in tables.items():
        known = {table_basename("", one) for one in (name, *table.config.extra_restore_names)}
        if not known.isdisjoint(table_basename("", one) for one in candidates):
            return name, ""
    near = nearest(bare, tables)
    hint = f"; the nearest is {near}" if near else ""
    return None, f"the model has no table {bare}{hint}"


def _note_table(
    original: str, ours: str | None, rows: int | str, report: ImportReport, taken: dict[str, int]
) -> None:
    if ours is None:
        report.names.append(ImportedName("table", original, None, str(rows)))
        return
    assert isinstance(rows, int)
    taken[ours] = taken.get(ours, 0) + rows
    report.names.append(ImportedName("table", original, ours, f"{rows:,} rows"))
