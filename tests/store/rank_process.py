"""One rank as a process: looks rows up and trains them together with the others, and writes down its share.

    python -m store.rank_process RANK SIZE PORT FOLDER WHERE BACKEND

WHERE is host, gpu or emulated; rank 0 keeps the keys at PORT.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from services.emulated_cuda import device_named
from store.ranks import PORT, TOKEN
from torch import Tensor
from torch import distributed as dist

from monolith.store import AllToAllStore, LocalStore, RankGroups, TableIds
from monolith.store.rank_groups import RankOptions
from monolith.store.rank_keys import begin_attempt, join_attempt
from monolith.table import Adagrad, Adam, RandomUniform, Segment, TableConfig, dump

STEPS = 4
CONFIGS = {
    name: TableConfig(
        name=name,
        segments=(Segment(dim=dim, optimizer=optimizer, initializer=RandomUniform(), learning_rate=0.25),),
    )
    for name, dim, optimizer in (("item", 4, Adagrad()), ("user", 3, Adam()))
}


def batch(step: int, rank: int) -> tuple[TableIds, Tensor, int]:
    """Return what a rank has in a step: ids, gradients, the time of its events."""
    random = torch.Generator().manual_seed(100 * step + rank)
    keys = [torch.randint(0, 40, (30,), generator=random).unique() for _ in CONFIGS]
    floats = sum(len(ids) * config.dim for ids, config in zip(keys, CONFIGS.values(), strict=True))
    gradients = torch.randint(-16, 17, (floats,), generator=random) / 8  # their sums are exact in any order
    return TableIds(torch.cat(keys), torch.tensor([len(ids) for ids in keys])), gradients, step + 1


def train(store: Any, rank: int) -> list[Tensor]:
    """Take all steps; return what was looked up before each."""
    seen = []
    for step in range(STEPS):
        ids, gradients, time = batch(step, rank)
        seen.append(store.lookup(ids))
        store.apply_gradients(ids, gradients, step=step, event_time=time)
    return seen


def local_store(where: str, **options: Any) -> LocalStore:
    device = None if where == "host" else device_named(where)
    return LocalStore.from_configs(CONFIGS, threads=1, device=device, **options)


def main(place: tuple[int, int], port: int, folder: Path, *, where: str, backend: str) -> None:
    rank, size = place
    torch.set_num_threads(1)
    make_keys: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch's stubs do not have it
    inner = make_keys("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    keys = begin_attempt(inner, TOKEN) if rank == 0 else join_attempt(inner, TOKEN)
    patient = timedelta(seconds=120)
    groups = RankGroups(
        keys,
        rank,
        size,
        port=PORT,
        options=RankOptions(timeout=patient, backend=backend, rows_backend=backend),
    )
    rows = local_store(where)
    store = AllToAllStore(rows, CONFIGS, groups)
    torch.save(train(store, rank), folder / f"seen-{rank}.pt")
    for name in CONFIGS:
        table: Any = rows.table(name)
        dump(table, str(folder / f"{name}-{rank}"))
    groups.expect_end()
    groups.close()


if __name__ == "__main__":
    number, ranks, at, into, device, kind = sys.argv[1:]
    main((int(number), int(ranks)), int(at), Path(into), where=device, backend=kind)
