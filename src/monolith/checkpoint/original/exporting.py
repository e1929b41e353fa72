"""Exporting: a checkpoint as the original system would have written it, for it and for TensorFlow to read.

    <folder>/model.ckpt-100.index, .data-00000-of-00001     variables, global_step, optimizer slots
    <folder>/model.ckpt-100.assets/MonolithHashTable_item-00000-of-00001    the rows of a table
    <folder>/checkpoint                                     names the checkpoint as the latest

No task is needed: names, shapes and state come from the files of the checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monolith import filesystem
from monolith.checkpoint.dense.custom_restore import path_of
from monolith.checkpoint.dense.state import EXTRA, METADATA
from monolith.checkpoint.folder.manifest import Link, read_chain
from monolith.checkpoint.folder.state_files import (
    CHECKPOINT_FILE,
    CheckpointState,
    absolute_path,
    dense_path,
    optimizer_path,
    write_checkpoint_state,
)
from monolith.checkpoint.offline.reading import SavedTables
from monolith.checkpoint.offline.rewriting import Exported, saved_scan
from monolith.checkpoint.original.bundle import write_bundle
from monolith.checkpoint.original.importing import MULTI_TABLE, SINGLE_TABLE, STEP, transposed_axes
from monolith.checkpoint.original.names import SLOT_FAMILIES, NameMap
from monolith.checkpoint.saved_tables import describe_table
from monolith.errors import SaveError
from monolith.observe import Progress
from monolith.table import DumpReport, table_basename
from monolith.table.dumps import default_num_shards
from monolith.table.entry_dumps import export_multi_rows, export_rows
from monolith.tensors.files import FileRecord, read_header, read_tensors
from monolith.tensors.plain_state import decode

MULTI_NAME = f"{MULTI_TABLE}tables"
"""What a dump of all tables is called."""


def export_original(
    prefix: str,
    folder: str,
    names: NameMap,
    *,
    tables: Collection[str] | None = None,
    dense: bool = True,
    multi_table: bool = False,
    num_shards: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write a checkpoint as the original system does.

    Args:
        folder: Made if it is missing. A checkpoint of the same step in it is replaced.
        names: The original's names; without a rule a table is called `MonolithHashTable_<name>`, and a
            variable as it is here, with slashes.
        tables: Which; all by default.
        multi_table: Whether all tables are in one dump, compressed, as the original's multi tables are.
        num_shards: Files per dump; by default one per million rows, up to 4.
        progress: Advanced by rows.

    Raises:
        UnknownTableError: The checkpoint has no such table.
        ConfigError: The name map cannot be read from right to left.
        SaveError: Two things would have one name.
        ServingTableError: Rows have no optimizer state to write.
        RestoreError, CorruptFileError: A file of the checkpoint is damaged.
    """
    chain = read_chain(prefix)
    saved = SavedTables(chain)
    wanted = saved.names if tables is None else sorted(tables)
    histories = {name: saved.history(name) for name in wanted}  # refuses names it does not have
    called = {name: _table_name(names, name, "" if multi_table else SINGLE_TABLE) for name in wanted}
    if twice := [name for name, many in Counter(called.values()).items() if many > 1]:
        raise SaveError(f"cannot export {prefix}: two tables would be called {twice[0]!r}")
    folder = absolute_path(folder)
    target = filesystem.join(folder, f"model.ckpt-{chain[-1].manifest.step}")
    assets = f"{target}.assets"
    filesystem.make_dirs(assets if wanted else folder)
    largest = max(map(saved.rows, wanted), default=0)
    total = default_num_shards(largest) if num_shards is None else num_shards
    layouts = {name: describe_table(histories[name]).layout for name in wanted}
    done: dict[str, DumpReport] = {}
    if multi_table and wanted:
        sources = {called[name]: (layouts[name], saved_scan(histories[name], total)) for name in wanted}
        basename = filesystem.join(assets, MULTI_NAME)
        written = export_multi_rows(sources, basename, num_shards=total, progress=progress)
        done = {name: written[called[name]] for name in wanted}
    else:
        for name in wanted:
            scan = saved_scan(histories[name], total)
            basename = table_basename(assets, called[name])
            done[name] = export_rows(layouts[name], basename, scan, num_shards=total, progress=progress)
    files = list(dict.fromkeys(file for one in done.values() for file in one.files))
    left_out: list[str] = []
    if dense:
        variables, left_out = dense_as_original(chain, names)
        files += write_bundle(target, variables)
        state = CheckpointState(
            model_checkpoint_path=target,
            all_model_checkpoint_paths=(target,),
            all_model_checkpoint_timestamps=(chain[-1].manifest.saved_at,),
        )
        write_checkpoint_state(folder, state)  # last: it names the checkpoint as the latest
        files.append(filesystem.join(folder, CHECKPOINT_FILE))
    return Exported(
        rows={name: one.rows for name, one in done.items()},
        files=tuple(files),
        bytes=sum(map(filesystem.file_size, files)),
        left_out=tuple(left_out),
    )


def dense_as_original(chain: Sequence[Link], names: NameMap) -> tuple[dict[str, Tensor], list[str]]:
    """Return the dense variables of a checkpoint by the original's names, and what could not be named so.

    Raises:
        SaveError: Two variables would have one name.
        ConfigError: The name map cannot be read from right to left.
        RestoreError, CorruptFileError: A file of the checkpoint is damaged.
    """
    step = chain[-1].manifest.step
    found: dict[str, Tensor] = {STEP: torch.tensor(step, dtype=torch.int64)}
    left_out: list[str] = []
    renamed: dict[str, tuple[str, bool]] = {}
    path, record = _newest(chain, dense_path)
    if path is None:
        return found, left_out
    for name, tensor in read_tensors(path, record, only=lambda one: not one.startswith(EXTRA)).items():
        said = names.original("variables", name)
        original = path_of(name) if said is None or said.name is None else said.name
        transposed = said is not None and bool(said.transpose)
        if original in found:
            raise SaveError(f"cannot export {name!r} as {original!r}: another variable has that name")
        renamed[name] = original, transposed
        found[original] = transposed_axes(tensor) if transposed else tensor
    path, record = _newest(chain, optimizer_path)
    if path is not None:
        about = json.loads(read_header(path).metadata[METADATA])
        tensors = read_tensors(path, record)
        for title, saved in about["optimizers"].items():
            if "plain" not in saved:  # the counter of steps of the rows' optimizer
                left_out += _add_slots(saved, tensors, renamed, found, f"optimizer {title}")
    return found, left_out


def _newest(chain: Sequence[Link], path_in: Callable[[str], str]) -> tuple[str | None, FileRecord | None]:
    for link in reversed(chain):
        path = path_in(link.prefix)
        record = link.manifest.parts.get("dense", {}).get("files", {}).get(filesystem.base_name(path))
        if record is not None:
            return path, FileRecord(**record)
    return None, None


def _add_slots(
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    renamed: Mapping[str, tuple[str, bool]],
    found: dict[str, Tensor],
    title: str,
) -> list[str]:
    """Add what an optimizer keeps of each variable; return what has no name in the original."""
    family = SLOT_FAMILIES.get(saved["kind"])
    if family is None:
        return [f"{title}: the original has no optimizer like {saved['kind']}"] if saved["state"] else []
    steps = 0
    for name, packed in saved["state"].items():
        state = decode(packed, tensors)
        if name not in renamed or any(state.get(key) is None for key in family.keys):
            continue  # it has had no gradient yet
        original, transposed = renamed[name]
        for number, key in enumerate(family.keys):
            value = state[key]
            if not isinstance(value, Tensor):  # Adamom's count, which the original keeps per element
                value = torch.full_like(found[original], float(value))
            elif transposed:
                value = transposed_axes(value)
            found[f"{original}/{family.slot(number)}"] = value
        steps = max(steps, int(state.get("step", 0)))
    betas = next((group["settings"].get("betas") for group in saved["groups"]), None)
    if family.original == "Adam" and steps and betas is not None:
        for name, beta in zip(("beta1_power", "beta2_power"), decode(betas, tensors), strict=True):
            found[name] = torch.tensor(beta ** (steps + 1), dtype=torch.float32)
    return []


def _table_name(names: NameMap, table: str, prefix: str) -> str:
    said = names.original("tables", table)
    return f"{prefix}{table}" if said is None or said.name is None else said.name
