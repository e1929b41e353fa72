"""`monolith query URL --row '{...}'`: the predictions of a served model for some rows.

`monolith query freshness URL` measures how old the answers are, and how long events take to reach them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from monolith.cli.options.jobs import FreshnessOptions
from monolith.cli.options.serve import AskOptions
from monolith.cluster.security import SecurityConfig
from monolith.errors import ConfigError
from monolith.observe import progress
from monolith.serve.client import Client, ClientOptions
from monolith.serve.client_messages import ClientAnswer
from monolith.serve.freshness_probe import FreshnessProbe, Probed, open_events, quantile, stages_of
from monolith.serve.rows import STAGES

SHOWN_FIRST = ("step", "watermark", "staleness")
"""Fields of an answer that the table shows; the times of its stages are for --json and `query freshness`."""
SHOWN_COLUMNS = 6
"""Columns of a row that the table shows next to its predictions."""


def client_security(options: AskOptions | FreshnessOptions) -> SecurityConfig:
    """Return the credentials that the flags of a client name."""
    return SecurityConfig(
        cert=options.tls_cert,
        key=options.tls_key,
        ca=options.tls_ca,
        server_name=options.tls_server_name,
        token_file=options.token_file,
    )


def run(options: AskOptions) -> int:
    """Ask, and print a table, or JSON."""
    rows = read_rows(options)
    asks = ClientOptions(timeout=timedelta(seconds=options.timeout))
    with Client(options.url, options=asks, security=client_security(options)) as client:
        model = options.model or only_model(client)
        answered = client.predict(model, rows, version=options.version)
        if answered.ignored:
            warn_ignored(answered.ignored, [one.name for one in client.inputs(model, options.version)])
    if options.json:
        said = {
            "model": answered.model,
            "version": answered.version,
            "outputs": {name: values.tolist() for name, values in answered.outputs.items()},
            **answered.parameters,
        }
        sys.stdout.write(json.dumps(said) + "\n")
        return 0
    show(rows, answered)
    return 0


def warn_ignored(ignored: Sequence[str], inputs: Sequence[str]) -> None:
    """Say which columns of the rows the model does not take, and what they may have meant."""
    near = [one for name in ignored for one in get_close_matches(name, inputs, n=1)]
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    said = f"the model does not take {', '.join(ignored)}, which was ignored; it takes {', '.join(inputs)}."
    sys.stderr.write(f"{said}{hint}\n")


def only_model(client: Client) -> str:
    """Return the name of the server's only model.

    Raises:
        ConfigError: The server has several models, or none.
    """
    names = client.models()
    if len(names) != 1:
        raise ConfigError(f"the server has {', '.join(names) or 'no models'}; say which with --model")
    return names[0]


def read_rows(options: AskOptions) -> list[dict[str, Any]]:
    """Return the rows that flags and file name.

    Raises:
        ConfigError: One is no JSON object, or there are none.
    """
    rows = [read_row(text, f"query: --row {text[:60]!r}") for text in options.row]
    if options.file is not None:
        rows += _file_rows(options.file)
    if not rows:
        raise ConfigError("query: give rows with --row '{...}' or --file FILE")
    return rows


def _file_rows(path: Path) -> list[dict[str, Any]]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"query: cannot read --file {path}: {cause}") from cause
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except ValueError as cause:
            raise ConfigError(f"query: --file {path} is no JSON: {cause}") from cause
        if not all(isinstance(one, dict) for one in listed):
            raise ConfigError(f"query: --file {path} must be a list of objects")
        return list(listed)
    lines = [line for line in text.splitlines() if line.strip()]
    return [read_row(line, f"query: --file {path}, row {number}") for number, line in enumerate(lines)]


def read_row(text: str, where: str) -> dict[str, Any]:
    """Return a row that is written as a JSON object.

    Raises:
        ConfigError: It is none; begins with `where`.
    """
    try:
        row = json.loads(text)
    except ValueError as cause:
        raise ConfigError(f"{where} is no JSON: {cause}") from cause
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be a JSON object: a value, or a list of values, by column")
    return row


def show(rows: Sequence[dict[str, Any]], answered: ClientAnswer) -> None:
    """Print a table: the first columns of each row, and its predictions."""
    console = Console(highlight=False)
    columns = [name for name in rows[0] if name not in answered.ignored][:SHOWN_COLUMNS]
    table = Table(show_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in answered.outputs:
        table.add_column(name, justify="right", style="bold")
    outputs = [values.tolist() for values in answered.outputs.values()]
    for number, row in enumerate(rows):
        values = [_shown(row.get(name, "")) for name in columns]
        table.add_row(*values, *(_shown(output[number]) for output in outputs))
    console.print(table)
    said = {name: value for name, value in answered.parameters.items() if not name.endswith("_at")}
    if "staleness" in said:
        said["staleness"] = f"{said['staleness']} s"
    order = [name for name in SHOWN_FIRST if name in said]
    order += [name for name in said if name not in SHOWN_FIRST]
    details = ", ".join(f"{name} {said[name]}" for name in order)
    console.print(f"{answered.model} version {answered.version}" + (f", {details}" if details else ""))


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def freshness(options: FreshnessOptions) -> int:
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
    with Client(options.url, security=client_security(options)) as client:
        model = options.model or only_model(client)
        if options.source is None:
            show_answers(options, watched(options, client, model, row))
        else:
            show_probes(options, probed(options, client, model, row))
    return 0


def watched(options: FreshnessOptions, client: Client, model: str, row: dict[str, Any]) -> list[ClientAnswer]:
    """Ask so many times."""
    answers = []
    for number in range(options.count):
        if number:
            time.sleep(options.every)
        answers.append(client.predict(model, [row]))
    return answers


def probed(options: FreshnessOptions, client: Client, model: str, row: dict[str, Any]) -> list[Probed]:
    """Write so many events, and wait for each."""
    assert options.source is not None
    assert options.id is not None
    probe = FreshnessProbe(
        lambda rows: client.predict(model, rows),
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
