"""What a benchmark found: rows of one shape, as JSON for programs and as tables for people.

JSON goes to standard output, alone; all that people read goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from monolith import __version__
from monolith.observe.machine import cpu_name, huge_pages, read_fields

SAID = {
    "longest_pause": "longest",
    "p99.9_pause": "p99.9",
    "processor_time": "of processor",
    "p50_step": "p50",
    "p99_step": "p99",
    "longest_step": "longest",
}
"""Metrics that a case and its unit do not give away -> how a table says them."""
HEADINGS: dict[str, JustifyMethod] = {
    "case": "left",
    "": "right",
    "baseline": "left",
    " ": "right",
    "ratio": "right",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One number, and how it compares."""

    case: str
    metric: str
    value: float | None
    """None if there was nothing to measure; `note` says why."""
    unit: str
    baseline: str | None = None
    ratio: float | None = None
    """`value` over the baseline's, both of this run."""
    note: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the fields all results have, and the note where there is one."""
        fields = asdict(self)
        if self.note is None:
            del fields["note"]
        return fields


def stderr_console() -> Console:
    """Return where people read: standard error; wide where it is a log, which has no edge to wrap at."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 100
    return console


class Report:
    """Collects results, and says on standard error how far the run has come.

    A line per phase, with no live bar: the thread that redraws one would compete
    with what is measured.

    Attributes:
        about: What the numbers depend on beyond the machine.
    """

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self._console = stderr_console()
        self._began = time.monotonic()
        self._elsewhere = cpu_seconds_elsewhere()
        self._shown = 0
        self.results: list[Result] = []
        self.about: dict[str, object] = {}

    def say(self, phase: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._began:4.0f} s[/]  {phase}", highlight=False)

    def add(self, case: str, metric: str, value: float | None, unit: str, *, note: str | None = None) -> None:
        """Record a number that stands alone: a baseline, or one without any."""
        self.results.append(Result(case=case, metric=metric, value=value, unit=unit, note=note))

    def compare(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        baselines: dict[str, float],
        *,
        note: str | None = None,
    ) -> None:
        """Record a number once for each baseline it is held against."""
        for baseline, other in baselines.items():
            result = Result(
                case=case,
                metric=metric,
                value=value,
                unit=unit,
                baseline=baseline,
                ratio=value / other,
                note=note,
            )
            self.results.append(result)

    def show(self, title: str) -> None:
        """Draw the results since the last call; a baseline is shown in the rows compared with it."""
        fresh = self.results[self._shown :]
        self._shown = len(self.results)
        baselines = {name for result in fresh for name in baseline_cases(result)}
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for heading, justify in HEADINGS.items():
            table.add_column(heading, justify=justify)
        previous: tuple[str, str] | None = None
        for result in fresh:
            if result.baseline is None and result.case in baselines:
                continue
            key = (result.case, result.metric)
            table.add_row(*([""] * 2 if key == previous else own_cells(result)), *beside_cells(result))
            previous = key
        self._console.print(table)

    def busy_elsewhere(self) -> float:
        """Return the share of the cores that others used since the run began, 0 to 1."""
        seconds = time.monotonic() - self._began
        return max((cpu_seconds_elsewhere() - self._elsewhere) / (seconds * cores()), 0.0)

    def finish(self) -> None:
        """Say how long it took, and how far the machine was ours."""
        self.say(f"done; others used {self.busy_elsewhere():.0%} of the machine's cores meanwhile")

    def print_json(self) -> None:
        report = {
            "bench": self._bench,
            "machine": machine() | self.about | {"busy_elsewhere": self.busy_elsewhere()},
            "results": [result.to_json() for result in self.results],
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")


def baseline_cases(result: Result) -> tuple[str, ...]:
    """Return the cases that a result's baseline may be: named in full, or by how it differs."""
    if result.baseline is None:
        return ()
    return result.baseline, result.baseline + result.case[result.case.find(",") :]


def own_cells(result: Result) -> tuple[str, str]:
    case = f"{result.case}, {SAID[result.metric]}" if result.metric in SAID else result.case
    if result.value is None:
        return case, f"[dim]{result.note}[/]"
    value = readable(result.value, result.unit)
    return case, value if result.note is None else f"{value} [dim]{result.note}[/]"


def beside_cells(result: Result) -> tuple[str, str, str]:
    if result.baseline is None or not result.ratio or result.value is None:
        return "", "", ""
    other = readable(result.value / result.ratio, result.unit)
    return beside(result.baseline, result.case), other, f"[bold]{result.ratio:.2f}[/]"


def beside(baseline: str, case: str) -> str:
    """Return how a baseline differs from the case: "1,000 rows" for the same at another size."""
    parts = case.split(", ")
    return ", ".join(part for part in baseline.split(", ") if part not in parts) or "itself"


def readable(value: float, unit: str) -> str:
    """Return a number for people: 12,345,678 rows/s -> "12.3 M/s"."""
    if unit == "share":
        return f"{value:.1%}"
    if value >= 1e9:
        number = f"{value / 1e9:.3g} G"
    else:
        number = f"{value / 1e6:.3g} M" if value >= 1e5 else f"{value:,.4g} "
    return number + unit.replace("rows/s", "/s")


def machine() -> dict[str, object]:
    """Return what the numbers depend on."""
    root = Path("/")
    return {
        "cpu": cpu_name(read_fields(root / "proc/cpuinfo")),
        "cores": cores(),
        "memory_bytes": memory("MemTotal"),
        "huge_pages": huge_pages(root) or f"no setting on {platform.system()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "monolith": __version__,
    }


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory(field: str) -> int | None:
    """Return a field of /proc/meminfo in bytes; None if the field or the file does not exist."""
    found = read_fields(Path("/proc/meminfo")).get(field)
    return None if found is None else int(found.split()[0]) * 1024


def cpu_seconds_elsewhere() -> float:
    """Return the time that cores have worked for others than us, since the system started; 0 where unknown.

    Includes what a host took away from a virtual machine.
    """
    path = Path("/proc/stat")
    if not path.is_file():
        return 0.0
    user, nice, system, _idle, _iowait, *rest = map(int, path.read_text().split("\n", 1)[0].split()[1:9])
    ours = os.times()
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - sum(ours[:4])
