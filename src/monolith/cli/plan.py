"""`monolith plan`: how many parameter servers of which size a table needs, with the arithmetic."""

from __future__ import annotations

import difflib
import json
import sys
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from monolith import __version__
from monolith.cli.capacity import ClusterPlan, ServerCosts, Wish, make_plan
from monolith.cli.options.jobs import PlanOptions
from monolith.config import parse_bytes, parse_duration
from monolith.errors import ConfigError
from monolith.table import OPTIMIZERS, Segment, TableConfig
from monolith.table.config import EmbeddingDtype, TableStorage

LEAST_MEMORY = 1 << 30
MOST_STANDBYS = 2


def run(options: PlanOptions) -> int:
    """Compute the plan and print it."""
    wish = wish_of(options)
    costs = costs_of(options, wish.config)
    plan = make_plan(wish, costs)
    if options.json:
        asked = {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()
        }
        printed = {"version": __version__, "asked": asked, "costs": asdict(costs), **asdict(plan)}
        sys.stdout.write(json.dumps(printed, indent=2) + "\n")
    else:
        sys.stdout.write(text_of(plan, wish, costs))
    return 0


def wish_of(options: PlanOptions) -> Wish:
    """Check the options.

    Raises:
        ConfigError: Names the option, what it was given and what it takes.
    """
    _check(options)
    for flag, given, known in (
        ("--optimizer", options.optimizer, OPTIMIZERS),
        ("--embedding-dtype", options.embedding_dtype, get_args(EmbeddingDtype)),
    ):
        if given not in known:
            raise ConfigError(
                f"plan: {flag} must be one of {', '.join(known)}, got {given!r}{_nearest(given, known)}"
            )
    segment = Segment(dim=options.dim, optimizer=OPTIMIZERS[options.optimizer]())
    dtype: EmbeddingDtype = options.embedding_dtype  # type: ignore[assignment]
    both: tuple[TableStorage, ...] = ("memory", "tiered")
    try:
        memory, every = parse_bytes(options.memory), parse_duration(options.checkpoint_every).total_seconds()
    except ConfigError as error:
        raise ConfigError(f"plan: --memory and --checkpoint-every: {error}") from None
    if memory < LEAST_MEMORY:
        raise ConfigError(f"plan: --memory must be at least 1GiB, got {options.memory}")
    if every <= 0:
        raise ConfigError(f"plan: --checkpoint-every must be above 0, got {options.checkpoint_every}")
    return Wish(
        rows=round(options.rows),
        config=TableConfig(name="plan", segments=(segment,), embedding_dtype=dtype),
        examples_per_s=options.examples_per_s,
        ids_per_example=options.ids_per_example,
        batch=options.batch,
        zipf=options.zipf,
        hit_rate=options.hit_rate,
        memory=memory,
        headroom=options.headroom,
        network=options.gbits * 1e9 / 8,
        standbys=options.replicas,
        checkpoint_every=every,
        storages=both if options.storage == "both" else (options.storage,),
    )


_RANGES = {
    "rows": (1, 1e15),
    "dim": (1, 1 << 20),
    "examples_per_s": (1e-3, 1e12),
    "ids_per_example": (1e-3, 1e6),
    "batch": (1, 1e9),
    "gbits": (1e-3, 1e6),
    "headroom": (0, 0.95),
    "zipf": (0, 5),
    "hit_rate": (0, 1),
    "disk_reads_per_s": (1, 1e12),
    "disk_mb_per_s": (1, 1e9),
    "replicas": (0, MOST_STANDBYS),
}
"""What makes sense, both ends included."""


def _check(options: PlanOptions) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            flag = name.replace("_", "-")
            raise ConfigError(f"plan: --{flag} must be from {least:g} to {most:g}, got {value:g}")
    if options.folder is not None and not options.measure:
        raise ConfigError("plan: --folder needs --measure, too: it is the folder whose disk is measured")
    if options.folder is not None and not options.folder.is_dir():
        raise ConfigError(f"plan: --folder {options.folder} is not a folder; make it first")


def _nearest(given: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def costs_of(options: PlanOptions, config: TableConfig) -> ServerCosts:
    """Return measured costs: of this machine if asked for, and those that flags give."""
    costs = ServerCosts()
    if options.measure:
        from monolith.cli.measuring import measure_disk, measure_rows

        folder = options.folder or Path(tempfile.gettempdir())
        sys.stderr.write(f"monolith plan: measuring rows and the disk at {folder}, for some seconds\n")
        disk = measure_disk(folder)  # refuses a folder that cannot be used
        rows = measure_rows(config, folder)
        costs = replace(
            costs,
            row=costs.row - costs.table_row + rows.row,
            table_row=rows.row,
            cold_row=rows.cold_row,
            save_bytes_per_s=1 / rows.save_byte,
            restore_bytes_per_s=1 / rows.restore_byte,
            disk_reads_per_s=disk.reads_per_s,
            disk_bytes_per_s=disk.write_bytes_per_s,
            source=f"rows, saving and disk ({folder}): this machine; requests: `monolith bench scale` on a "
            "Neoverse N1, see docs/scale.md",
        )
    if options.disk_reads_per_s is not None:
        costs = replace(costs, disk_reads_per_s=options.disk_reads_per_s)
    if options.disk_mb_per_s is not None:
        costs = replace(costs, disk_bytes_per_s=options.disk_mb_per_s * 1e6)
    return costs


# How it is shown


def text_of(plan: ClusterPlan, wish: Wish, costs: ServerCosts) -> str:
    """Return the plan for people."""
    config = wish.config
    optimizer = config.segments[0].optimizer.rule.kind
    lines = [f"A row of {config.dim} values as {config.embedding_dtype} with {optimizer}"]
    lines += _aligned((figure.name, str(figure), figure.how) for figure in plan.row)
    lines += ["", f"The load of {wish.examples_per_s:,.0f} examples/s"]
    lines += _aligned((figure.name, str(figure), figure.how) for figure in plan.load)
    for found in plan.servers:
        where = (
            "all rows in memory" if found.storage == "memory" else "hot rows in memory, all others on a disk"
        )
        lines += ["", f'storage = "{found.storage}" ({where}): servers that each resource asks for']
        lines += _aligned(
            (bound.name, f"{bound.value:,}", bound.how + (" <- most" if bound.name == found.binding else ""))
            for bound in found.bounds
        )
        lines += ["", f"{_servers(found.servers, wish)}; each"]
        lines += _aligned((figure.name, str(figure), figure.how) for figure in found.each)
    lines += ["", f"Measured: {costs.source}."]
    return "\n".join(lines) + "\n"


def _servers(servers: int, wish: Wish) -> str:
    memory = wish.memory / 2**30
    said = f"=> {servers:,} server{'s' if servers > 1 else ''} of {memory:,.4g} GiB"
    if wish.standbys:
        said += f" and {servers * wish.standbys:,} standbys, {servers * (1 + wish.standbys):,} in all"
    return said


def _aligned(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    listed = list(rows)
    widths = [max(len(row[column]) for row in listed) for column in range(2)]
    return [f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {how}".rstrip() for name, value, how in listed]
