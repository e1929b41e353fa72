"""`monolith query URL --row '{...}'`: what a served model says of some rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from monolith.cli.options.serve import AskOptions
from monolith.cluster.security import SecurityConfig, guard_caller, ssl_context
from monolith.errors import ConfigError
from monolith.serve.client import Answered, open_asker

SHOWN_FIRST = ("step", "watermark", "staleness")
"""Fields of an answer that the table shows; the times of its stages are for --json and `query freshness`."""
SHOWN_COLUMNS = 6
"""Columns of a row that the table shows beside its predictions."""


def run(options: AskOptions) -> int:
    """Ask, and print a table, or JSON."""
    rows = read_rows(options)
    security = SecurityConfig(
        cert=options.tls_cert,
        key=options.tls_key,
        ca=options.tls_ca,
        server_name=options.tls_server_name,
        token_file=options.token_file,
    )
    context = ssl_context(security, server=False)
    with open_asker(options.url, guard_caller(security), context=context, timeout=options.timeout) as asker:
        answered = asker.ask(options.model or asker.only_model(), rows, options.version)
    if options.json:
        said = {
            "model": answered.model,
            "version": answered.version,
            "outputs": answered.outputs,
            **answered.parameters,
        }
        sys.stdout.write(json.dumps(said) + "\n")
        return 0
    show(rows, answered)
    return 0


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


def show(rows: Sequence[dict[str, Any]], answered: Answered) -> None:
    """Print a table: the first columns of each row, and its predictions."""
    console = Console(highlight=False)
    columns = [name for name in rows[0] if name not in answered.passed_over][:SHOWN_COLUMNS]
    table = Table(show_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in answered.outputs:
        table.add_column(name, justify="right", style="bold")
    for number, row in enumerate(rows):
        values = [_shown(row.get(name, "")) for name in columns]
        table.add_row(*values, *(_shown(output[number]) for output in answered.outputs.values()))
    console.print(table)
    said = {name: value for name, value in answered.parameters.items() if not name.endswith("_at")}
    if "staleness" in said:
        said["staleness"] = f"{said['staleness']} s"
    order = [name for name in SHOWN_FIRST if name in said]
    order += [name for name in said if name not in SHOWN_FIRST]
    beside = ", ".join(f"{name} {said[name]}" for name in order)
    console.print(f"{answered.model} version {answered.version}" + (f", {beside}" if beside else ""))
    if answered.passed_over:
        sys.stderr.write(f"the model does not take {', '.join(answered.passed_over)}; passed over\n")


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
