"""`monolith query freshness URL`: how new the answers of a server are, and how long events take to them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from monolith.cli.options.jobs import FreshnessOptions
from monolith.cli.query import read_row
from monolith.cluster.security import SecurityConfig, guard_caller, ssl_context
from monolith.errors import ConfigError
from monolith.observe import progress
from monolith.serve.client import Client, ClientAnswer, open_client
from monolith.serve.freshness_probe import FreshnessProbe, Probed, open_events, quantile, stages_of
from monolith.serve.rows import STAGES


def run(options: FreshnessOptions) -> int:
    """Probe, and print a table, or JSON."""
    if options.count < 1:
        raise ConfigError(f"freshness: --count must be at least 1, got {options.count}")
    if options.source is not None and options.id is None:
        raise ConfigError("freshness: --source needs --id, the column whose id is new in every event")
    if not options.row:
        raise ConfigError(
            "freshness: give a row to ask for with --row '{...}', such as that of the line `ask it` of "
            "monolith serve; with --source, labels included"
        )
    row = read_row(options.row, f"freshness: --row {options.row[:60]!r}")
    security = SecurityConfig(
        cert=options.tls_cert,
        key=options.tls_key,
        ca=options.tls_ca,
        server_name=options.tls_server_name,
        token_file=options.token_file,
    )
    context = ssl_context(security, server=False)
    with open_client(options.url, guard_caller(security), context=context) as asker:
        model = options.model or asker.only_model()
        if options.source is None:
            show_answers(options, watched(options, asker, model, row))
        else:
            show_probes(options, probed(options, asker, model, row))
    return 0


def watched(options: FreshnessOptions, asker: Client, model: str, row: dict[str, Any]) -> list[ClientAnswer]:
    """Ask so many times."""
    answers = []
    for number in range(options.count):
        if number:
            time.sleep(options.every)
        answers.append(asker.ask(model, [row]))
    return answers


def probed(options: FreshnessOptions, asker: Client, model: str, row: dict[str, Any]) -> list[Probed]:
    """Write so many events, and wait for each."""
    assert options.source is not None
    assert options.id is not None
    probe = FreshnessProbe(
        lambda rows: asker.ask(model, rows),
        row,
        options.id,
        event_time=options.event_time,
        pause=options.pause,
    )
    found = []
    events = open_events(options.source)
    try:
        with progress("Events", options.count, "events") as bar:
            for number in range(options.count):
                if number:
                    time.sleep(options.every)
                found.append(probe.probe(events, options.timeout))
                bar.advance(1)
    finally:
        events.close()
    return found


def show_answers(options: FreshnessOptions, answers: Sequence[ClientAnswer]) -> None:
    """Print what answers say of themselves."""
    last = answers[-1]
    staleness = [float(one.parameters["staleness"]) for one in answers if "staleness" in one.parameters]
    if not staleness:
        raise ConfigError(f"{options.url} does not say how new its answers are; is it a server of monolith?")
    spread, stages = _quantiles(staleness), stages_of(last.parameters)
    said: dict[str, Any] = {
        "model": last.model,
        "version": last.version,
        "step": last.parameters.get("step"),
        "watermark": last.parameters.get("watermark"),
        "staleness": spread,
        "stages": stages,
        "answers": len(answers),
    }
    if options.json:
        sys.stdout.write(json.dumps(said) + "\n")
        return
    console = Console(highlight=False)
    console.print(f"{last.model} version {last.version}, step {said['step']}, watermark {said['watermark']}")
    console.print(
        f"staleness of {len(answers)} answers: p50 {_time(spread['p50'])}, p99 {_time(spread['p99'])}"
    )
    if stages:
        console.print(", ".join(f"{name} {_time(took)}" for name, took in stages.items()))


def show_probes(options: FreshnessOptions, found: Sequence[Probed]) -> None:
    """Print how long events took."""
    by_stage = {name: [one.stages[name] for one in found if name in one.stages] for name in STAGES}
    total = [one.seconds for one in found]
    said = {
        "events": len(found),
        "seconds": _quantiles(total),
        "stages": {name: _quantiles(values) for name, values in by_stage.items() if values},
        "all": [round(one, 6) for one in total],
    }
    if options.json:
        sys.stdout.write(json.dumps(said) + "\n")
        return
    table = Table(show_edge=False)
    for name in ("from the event to its answer", "p50", "p99"):
        table.add_column(name, justify="left" if " " in name else "right")
    for name, values in [*by_stage.items(), ("all", total)]:
        if values:
            spread = _quantiles(values)
            table.add_row(
                name, _time(spread["p50"]), _time(spread["p99"]), style="bold" if name == "all" else ""
            )
    Console(highlight=False).print(table)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {name: round(quantile(values, share), 6) for name, share in (("p50", 0.5), ("p99", 0.99))}


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
