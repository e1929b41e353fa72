"""The case of `monolith bench serve` in which a request ranks items for one user.

The same request is sent with one row of the user's features and with full rows, by turns, to one server
process. What counts is the processor time of the server per request: a client that sends less also waits
less, which would flatter the ratio.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from monolith_bench.options import BenchServeOptions
from monolith_bench.report import Report
from monolith_bench.serve_load import LoadSeen

USER_FEATURES = 18 / 26
"""Fraction of the features that are the user's."""
ITEMS = 500

Columns = Mapping[str, np.ndarray[Any, Any]]
Ask = Callable[[str, Columns], LoadSeen]
"""Sends a request over one connection for a while, given the transport."""
WAYS = ("HTTP, JSON", "HTTP, binary", "gRPC")


def measure_candidates(report: Report, full: Columns, options: BenchServeOptions, ask: Ask, pid: int) -> None:
    """Compare requests with one row of the user's features with those that repeat it.

    Args:
        full: A request of as many rows as there are items.
        pid: The server, of one process.
    """
    names = list(full)
    user = names[: round(USER_FEATURES * len(names))]
    items = len(full[names[0]])
    repeated = {name: np.repeat(full[name][:1], items) if name in user else full[name] for name in names}
    short = {name: full[name][:1] if name in user else full[name] for name in names}
    case = f"candidates, {len(user)} user and {len(names) - len(user)} item features, {items} items"
    report.say(case)
    for way in WAYS:
        seen: dict[str, list[float]] = {"one row": [], "full rows": []}
        for _ in range(options.repeats):  # by turns, so that what else the machine does meets both
            for kind, columns in (("one row", short), ("full rows", repeated)):
                before = processor_seconds(pid)
                requests = ask(way, columns).requests
                seen[kind].append((processor_seconds(pid) - before) * 1e3 / max(requests, 1))
        theirs = f"{case}, {way}, full rows"
        report.add(theirs, "processor_ms_per_request", min(seen["full rows"]), "ms")
        ours = min(seen["one row"])
        baseline = {theirs: min(seen["full rows"])}
        report.compare(f"{case}, {way}", "processor_ms_per_request", ours, "ms", baseline)
    report.show("Ranking: one row of the user compared with full rows")


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
