"""Reads damaged files of every kind that we read: each is records, or an error of ours.

python -m faults.file_fuzzer [--seconds 600] [--seed N] [--first M]

The parsers in C++ have a fuzzer of their own, under sanitizers. Here whole files are read as a user reads
them: compressed streams, text, Parquet, shards of tables, filters, dense weights, state files. A failure says
which seed and number make the file again.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from faults.port_fuzzer import Mutator
from torch import nn

from monolith.checkpoint.folder.state_files import (
    CheckpointState,
    TableKind,
    load_monolith_checkpoint,
    read_checkpoint_state,
    update_monolith_checkpoint,
    write_checkpoint_state,
)
from monolith.data import Records
from monolith.data.formats import FORMATS
from monolith.errors import MonolithError
from monolith.store.dense import dump_dense, read_dense
from monolith.table import (
    FrozenSegment,
    FrozenTable,
    Rows,
    Segment,
    SlidingFilter,
    SlotThresholds,
    TableConfig,
    write_frozen_table,
)
from monolith.table.shard_files import Description, RowLayout, ShardReader, inspect, write_shard
from monolith.tensors import RaggedTensor

Read = Callable[[Path], Any]
FIRST_SPLIT = "filter-00000-of-00005"


class FileFuzzError(Exception):
    """Reading a file ended in what is no answer."""


def honest_files(folder: Path) -> dict[str, tuple[bytes, Read]]:
    """Return a file of each kind, and what reads one."""
    columns = {"user": RaggedTensor.from_list([[7], [8, 9]]), "label": RaggedTensor.from_list([[0.5], [1.0]])}
    made: dict[str, tuple[bytes, Read]] = {}
    for name, make in FORMATS.items():
        path = folder / f"honest.{name}"
        with suppress(MonolithError):  # a kind that has no place for these columns
            with make().writer(str(path)) as writer:
                writer.write(Records(2, columns))

            def read(path: Path, make: Callable[[], Any] = make) -> int:
                return sum(chunk.records.size for chunk in make().chunks(str(path)))

            made[name] = path.read_bytes(), read
    example, read_example = made["tf_example"]
    made["tf_example in gzip"] = gzip.compress(example, mtime=0), read_example
    made["tf_example in zlib"] = zlib.compress(example), read_example
    made["shard"] = _shard(folder), _read_shard
    made["frozen table"] = _frozen(folder), _read_frozen
    module = nn.Linear(2, 3)
    dense = bytes(dump_dense(dict(module.named_parameters()), torch.optim.Adam(module.parameters()), 3))
    made["dense"] = dense, lambda path: read_dense(path.read_bytes())
    made["filter"] = _filter(folder), _read_filter
    made["checkpoint"], made["monolith_checkpoint"] = _state_files(folder)
    return made


def _filter(folder: Path) -> bytes:
    admission = SlidingFilter(300, 5, SlotThresholds(2))
    admission.refuse(torch.arange(100) << 17)
    admission.save(str(folder / "filter"))
    return (folder / FIRST_SPLIT).read_bytes()


def _read_filter(path: Path) -> int:
    """Read a filter of whose files the first is damaged."""
    path.replace(path.with_name(FIRST_SPLIT))
    admission = SlidingFilter(300, 5, SlotThresholds(2))
    admission.restore(str(path.with_name("filter")))
    return len(admission)


def _state_files(folder: Path) -> tuple[tuple[bytes, Read], tuple[bytes, Read]]:
    paths = tuple(str(folder / f"model.ckpt-{step}") for step in (1, 2))
    write_checkpoint_state(str(folder), CheckpointState(paths[1], paths, (1.0, 2.0)))
    update_monolith_checkpoint(str(folder), table_kind=TableKind.MULTI_CUCKOO_HASH_MAP)
    listed, known = (folder / name for name in ("checkpoint", "monolith_checkpoint"))
    return (
        (
            listed.read_bytes(),
            lambda path: read_checkpoint_state(str(folder), path.name, sleep=lambda _: None),
        ),
        (known.read_bytes(), lambda path: load_monolith_checkpoint(str(folder), path.name)),
    )


def _shard(folder: Path) -> bytes:
    config = TableConfig(name="item", segments=(Segment(dim=2),))
    layout = RowLayout.of(config)
    rows = Rows(
        torch.tensor([1, -2]), torch.tensor([3, 4]), torch.rand(2, 2), torch.rand(2, layout.state_dim)
    )
    about = Description(
        table="item", layout=layout, shard=0, num_shards=1, dump="0123456789abcdef", stamp="", scales=(1.0,)
    )
    write_shard(str(folder / "honest.shard"), about, [rows])
    return (folder / "honest.shard").read_bytes()


def _read_shard(path: Path) -> int:
    inspect(str(path), verify=True)
    with ShardReader(str(path)) as reader:
        return sum(len(rows.ids) for rows in reader)


def _frozen(folder: Path) -> bytes:
    segments = [FrozenSegment(2), FrozenSegment(1, "fp16"), FrozenSegment(3, "int8")]
    rows = torch.arange(20), torch.rand(20, 6)
    write_frozen_table(str(folder / "honest.rows"), segments, [(rows[0].numpy(), rows[1].numpy())], rows=20)
    return (folder / "honest.rows").read_bytes()


def _read_frozen(path: Path) -> int:
    table = FrozenTable(str(path))
    table.lookup(torch.arange(-10, 30))
    table.verify()
    return table.rows


def fuzz_files(seconds: float, seed: int, folder: Path, *, first: int = 0) -> Counter[str]:
    """Read damaged files for so long; return how many of each kind were read, and refused.

    Raises:
        FileFuzzError: Says how to see it again.
    """
    honest = honest_files(folder)
    counts: Counter[str] = Counter()
    path, number, begun = folder / "damaged", first, time.monotonic()
    while time.monotonic() - begun < seconds:
        number += 1
        mutate = Mutator(random.Random(f"{seed}/{number}"))
        kind = mutate.random.choice(list(honest))
        data, read = honest[kind]
        path.write_bytes(data if mutate.random.random() < 0.05 else mutate.damaged(data))
        try:
            read(path)
            counts[f"{kind}: read"] += 1
        except MonolithError:
            counts[f"{kind}: refused"] += 1
        except Exception as error:
            raise FileFuzzError(
                f"a damaged file of {kind} ended in {type(error).__name__}: {error}\nsee it again: "
                f"python -m faults.file_fuzzer --seed {seed} --first {number - 1}"
            ) from error
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    sys.stdout.write(f"fuzzing files for {given.seconds:g} s with seed {given.seed}\n")
    with tempfile.TemporaryDirectory(prefix="monolith-fuzz-") as folder:
        counts = fuzz_files(given.seconds, given.seed, Path(folder), first=given.first)
    sys.stdout.write(f"{sum(counts.values())} files: {dict(sorted(counts.items()))}\n")


if __name__ == "__main__":
    main()
