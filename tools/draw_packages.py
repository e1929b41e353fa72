"""Draws docs/images/packages.svg: the packages in the rows of tools/check_imports.py.

    python tools/draw_packages.py

A package may import packages on rows above its own. Every package needs a line in `ABOUT`,
so that a new one cannot be forgotten.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from check_imports import ROWS

ABOUT = {
    "errors": "the exception tree",
    "front_door": "lazy package exports",
    "concurrency": "threads, clocks",
    "observe": "logs, progress, metrics, summaries",
    "config": "typed values",
    "wire": "Flight, messages",
    "filesystem": "paths, atomic writes",
    "testing": "a cluster in one process, on virtual time and a seeded order",
    "native": "the compiled core",
    "cuda": "devices, streams, kernels",
    "tensors": "ragged tensors, queues between CPU and GPU",
    "table": "one row per ID: optimizers, admission, expiry, dumps",
    "feature": "IDs, slots, combiners, layouts, the feature spec",
    "nn": "layers, losses, dense optimizers, clipping",
    "data": "records, formats, files, Kafka, joins, data service",
    "cluster": "addresses, discovery, security, launchers",
    "store": "rows in this process, on parameter servers, across ranks",
    "model": "features over a store, ready-made models",
    "checkpoint": "save and restore; inspect, reshard, export offline",
    "sync": "changed rows as numbered deltas to subscribers",
    "train": "what users write or read: task, metrics, evaluation, hooks",
    "serve": "export, predictor, server, shards and replicas",
    "ui": "the web page",
    "runtime": "what runs a task: step, coordinator, failover, publishing",
    "cli": "the command line: parse, call, print",
    "monolith_bench": "benchmarks",
    "monolith_compat": "names of the original",
}
GROUPS = (
    ("foundations", "errors", "#e6f4f1", "#0f766e"),
    ("parts of a model", "table", "#e8eefc", "#1d4ed8"),
    ("data and machines", "data", "#fdf3e1", "#b45309"),
    ("parameters", "store", "#e8eefc", "#1d4ed8"),
    ("state and its users", "checkpoint", "#f3e8fb", "#7e22ce"),
    ("running", "ui", "#f1f5f9", "#475569"),
)
"""Title, the first package of the group, background, border."""

SANS = "font-family=\"system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif\""
MONO = "font-family=\"'DejaVu Sans Mono', Menlo, Consolas, monospace\""
WIDTH, ROW, TOP = 900, 34, 56


def drawing() -> str:
    """Return the drawing as SVG."""
    height = TOP + ROW * len(ROWS) + 8 * len(GROUPS) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The packages in rows">',
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="white"/>',
        text(24, 34, "Packages: each imports only from rows above its own", size=17, bold=True),
    ]
    starts = [next(n for n, row in enumerate(ROWS) if first in row) for _, first, _, _ in GROUPS]
    for index, (title, _, background, border) in enumerate(GROUPS):
        rows = ROWS[starts[index] : starts[index + 1] if index + 1 < len(GROUPS) else None]
        top = TOP + ROW * starts[index] + 8 * index
        parts.append(
            f'<rect x="24" y="{top}" width="852" height="{ROW * len(rows) + 2}" rx="8" fill="{background}"/>'
        )
        parts.append(text(40, top + ROW * len(rows) // 2 + 5, title, fill=border))
        for number, row in enumerate(rows):
            parts += boxes(sorted(row, key=list(ABOUT).index), top + 5 + ROW * number, border)
    return "\n".join([*parts, "</svg>", ""])


def boxes(names: list[str], y: int, border: str) -> list[str]:
    """Return one row: a box per package, then what they contain."""
    parts, x = [], 210
    for name in names:
        width = 9 * len(name) + 22
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="26" rx="5" fill="white" stroke="{border}"/>'
        )
        parts.append(text(x + width // 2, y + 18, name, size=14, mono=True))
        x += width + 8
    about = " · ".join(ABOUT[name] for name in names)
    return [*parts, text(max(x + 6, 350), y + 18, about, fill="#6b7280", size=12.5)]


def text(
    x: int,
    y: int,
    words: str,
    *,
    fill: str = "#1f2937",
    size: float = 13,
    bold: bool = False,
    mono: bool = False,
) -> str:
    anchor, font, weight = (
        ("middle", MONO, "normal") if mono else ("start", SANS, "bold" if bold else "normal")
    )
    return (
        f'<text x="{x}" y="{y}" {font} font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "images" / "packages.svg"
    path.write_text(drawing(), encoding="utf-8")
    sys.stdout.write(f"{path}\n")
