"""`monolith data head | stats | convert | validate`: files of records, for people.

The format is told by the name of a file where it can be, and otherwise by `--format`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from monolith import filesystem
from monolith.cli.options.data import (
    DataConvertOptions,
    DataHeadOptions,
    DataStatsOptions,
    DataValidateOptions,
)
from monolith.data import Chunk, Format, Records
from monolith.data.formats import format_of
from monolith.data.records import infinite_rows, known_columns
from monolith.data.source import closed_after
from monolith.data.statistics import ColumnStatistics, Statistics
from monolith.errors import ConfigError, CorruptFileError, DataError, optional_package
from monolith.observe import progress
from monolith.observe.progress import counted
from monolith.tensors import RaggedTensor

SHOWN_VALUES = 6
SHOWN_TEXT = 24
SHOWN_COLUMNS = 1000
SHOWN_NAME = 200


def head(options: DataHeadOptions) -> int:
    """Show the first records of some files: of each of them in turn, until there are enough."""
    if options.records < 1:
        raise ConfigError(f"data head: --records must be at least 1, got {options.records}")
    found: list[dict[str, list[object]]] = []
    bad, shown_of = 0, list[str]()
    for path in expanded(options.paths):
        if len(found) >= options.records:
            break
        kind = format_of(path, options.format)
        shown_of.append(f"{path} ({kind.name})")
        with closed_after(kind.chunks(path, columns=options.columns or None)) as chunks:
            for chunk in chunks:
                check_columns(chunk, options.columns, kind, path)
                bad += len(chunk.bad)
                found += rows_of(chunk.records.slice(0, options.records - len(found)))
                if len(found) >= options.records:
                    break
    if options.json:
        for row in found:
            sys.stdout.write(json.dumps(row) + "\n")
        return 0
    table = Table(box=box.SIMPLE_HEAD, title="\n".join(shown_of), title_justify="left")
    table.add_column("column", style="cyan", no_wrap=True)
    for number in range(len(found)):
        table.add_column(str(number))
    names = sorted({name for row in found for name in row})
    for name in names[:SHOWN_COLUMNS]:
        table.add_row(name[:SHOWN_NAME], *(shown(row.get(name, [])) for row in found))
    console = Console()
    console.print(table)
    if len(names) > SHOWN_COLUMNS:
        console.print(f"... and {len(names) - SHOWN_COLUMNS:,} more columns; name those to see in --columns")
    if bad:
        console.print(f"{bad:,} malformed records are not shown; `monolith data validate` says which")
    return 0


def stats(options: DataStatsOptions) -> int:
    """Count what each column of some files holds."""
    paths = expanded(options.paths)
    statistics = Statistics()
    bad = 0
    for path, form, chunk in read(paths, options.format, options.columns, "Counting"):
        bad += len(chunk.bad)
        statistics.add(chunk.records, form.times(path))
    if options.plot is not None:
        plot(statistics, options.plot)
    if options.json:
        sys.stdout.write(json.dumps(statistics.to_json(), indent=2) + "\n")
        return 0
    table = Table(box=box.SIMPLE_HEAD, title=f"{statistics.records:,} records", title_justify="left")
    headings = ("column", "kind", "missing", "values per record", "distinct", "min", "mean", "max")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("column", "kind") else "right")
    for name, column in sorted(statistics.columns.items())[:SHOWN_COLUMNS]:
        each = column.values / max(statistics.records, 1)
        table.add_row(
            name[:SHOWN_NAME],
            "integers" if column.kind == "ids" else column.kind,
            f"{1 - column.filled / max(statistics.records, 1):.1%}",
            f"{each:.2f}, at most {column.most:,}" if column.most > 1 else f"{each:.2f}",
            f"{'' if column.distinct.is_exact else 'about '}{len(column.distinct):,}",
            *(described(column, number) for number in (column.span.low, column.span.mean, column.span.high)),
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = max(console.width, 140)
    console.print(table)
    if len(statistics.columns) > SHOWN_COLUMNS:
        hidden = len(statistics.columns) - SHOWN_COLUMNS
        console.print(f"... and {hidden:,} more columns; name those to see in --columns, or use --json")
    if bad:
        console.print(f"{bad:,} malformed records are not counted; `monolith data validate` says which")
    if any(not column.distinct.is_exact for column in statistics.columns.values()):
        console.print("about: estimated within one percent")
    if options.plot is not None:
        Console(stderr=True).print(f"drawn to {options.plot}")
    return 0


def described(column: ColumnStatistics, number: float) -> str:
    """Return the least, mean or greatest of a column: a number, a time, or the length of a text."""
    if not math.isfinite(number):
        return ""
    if column.kind == "times":
        return f"{datetime.fromtimestamp(number, UTC):%Y-%m-%d %H:%M:%S}"
    if column.kind == "strings":
        return f"{number:.3g} bytes"
    return f"{number:,.0f}" if column.kind == "ids" and number == int(number) else f"{number:,.6g}"


def convert(options: DataConvertOptions) -> int:
    """Write the records of some files to one file of another format."""
    if not options.to:
        raise ConfigError("data convert: needs --to: the file to write")
    paths = expanded(options.paths)
    if options.to in paths:
        raise ConfigError(f"data convert: {options.to} is both input and output")
    written = bad = 0
    with format_of(options.to, options.to_format).writer(options.to) as file:
        for _, _, chunk in read(paths, options.format, options.columns, "Converting"):
            bad += len(chunk.bad)
            if len(chunk.records):
                file.write(chunk.records)
                written += len(chunk.records)
        if bad and not options.skip_bad:
            raise DataError(
                f"data convert: {bad:,} records are malformed, so {options.to} was not written. "
                "`monolith data validate` says which; --skip-bad leaves them out."
            )
    left_out = f", {bad:,} malformed ones skipped" if bad else ""
    Console(stderr=True).print(f"{written:,} records in {options.to}{left_out}")
    return 0


def validate(options: DataValidateOptions) -> int:
    """Read files to their end and say what is wrong with them; 1 where something is. A column whose type may
    be a mistake is noted: it is good data if it is meant."""
    console = Console()
    records = wrong = notes = 0

    def tell(fault: str) -> None:
        nonlocal wrong
        wrong += 1
        if wrong <= options.most:
            console.print(fault, highlight=False, soft_wrap=True)

    paths = expanded(options.paths)
    with FilesBar(paths, "Reading") as bar:
        for path in paths:
            first, before = 0, records + wrong
            try:
                kind = thorough(format_of(path, options.format))
                for odd in kind.odd_values(path):
                    if odd.is_slip:
                        tell(f"{path}: {odd.text}")
                    else:
                        notes += 1
                        console.print(f"note: {path}: {odd.text}", highlight=False, soft_wrap=True)
                for chunk in bar.watched(path, kind.chunks(path)):
                    for one in chunk.bad:
                        tell(f"{path}: {one.reason}")
                    found = list(infinities(chunk.records))
                    for number, what in found:
                        tell(f"{path}: record {first + number}: {what}")
                    first += len(chunk.records)
                    records += len(chunk.records) - len({number for number, _ in found})
            except CorruptFileError as error:
                tell(str(error))
            if records + wrong == before:
                tell(f"{path}: the file is empty: it has no records")
    if wrong > options.most:
        console.print(f"... and {wrong - options.most:,} more")
    more = f", {counted(notes, 'note')}" if notes else ""
    console.print(f"{counted(records, 'good record')}, {counted(wrong, 'fault')}{more}")
    return 1 if wrong else 0


def infinities(records: Records) -> Iterator[tuple[int, str]]:
    """Yield which records have an infinite float, from 0, and in which column."""
    for name in records.columns:
        for number in infinite_rows(records[name]).nonzero().squeeze(1).tolist():
            values = records.slice(number, number + 1)[name].flat_values
            yield number, f"column {name!r} is {values[values.isinf()][0].item()}"


# Reading


def expanded(patterns: Sequence[str]) -> list[str]:
    """Return the files that patterns name, each once, in order."""
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = [pattern] if filesystem.exists(pattern) else sorted(filesystem.glob(pattern))
        if not matches:
            raise ConfigError(f"data: there is no file {pattern!r}")
        found |= dict.fromkeys(matches)
    return list(found)


def read(
    paths: Sequence[str], kind: str | None, columns: Sequence[str], label: str
) -> Iterator[tuple[str, Format, Chunk]]:
    """Yield the chunks of files, one after another, with their path and format, and progress."""
    with FilesBar(paths, label) as bar:
        for path in paths:
            format_ = thorough(format_of(path, kind))
            for chunk in bar.watched(path, format_.chunks(path, columns=list(columns) or None)):
                check_columns(chunk, columns, format_, path)
                yield path, format_, chunk


def thorough(form: Format) -> Format:
    """Return a format that gets types from all of a file: whole numbers may be followed by others."""
    return form.inferring(sys.maxsize)


class FilesBar(ExitStack):
    """Shows how far reading files has come, by their bytes."""

    def __init__(self, paths: Sequence[str], label: str) -> None:
        super().__init__()
        self._sizes = {path: filesystem.file_size(path) for path in paths}
        self._total = sum(self._sizes.values())
        self._before = self._reached = 0
        self._bar = self.enter_context(progress(label, unit="records", fraction=self.part))

    def watched(self, path: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks of a file; whatever ends them, the next file comes after all of it."""
        try:
            for chunk in chunks:
                self._reached = chunk.reached or 0
                self._bar.advance(len(chunk.records))
                yield chunk
        finally:
            self._before, self._reached = self._before + self._sizes[path], 0

    def part(self) -> float | None:
        """Return the fraction of the bytes that is read; None if there are none."""
        return (self._before + self._reached) / self._total if self._total else None


def check_columns(chunk: Chunk, wanted: Sequence[str], kind: Format, path: str) -> None:
    """Refuse columns that a table does not have; another file may bring them with a later record."""
    missing = [name for name in wanted if name not in chunk.records.columns]
    if missing and chunk.records.complete:
        there = next(iter(kind.chunks(path))).records.columns
        raise DataError(f"{path} has no column {missing[0]!r}; {known_columns(missing[0], there, 'it has')}")


def rows_of(records: Records) -> list[dict[str, list[object]]]:
    """Return records as Python objects, to look at or to print as JSON."""
    columns = {name: plain(records[name]) for name in records.columns}
    return [{name: rows[number] for name, rows in columns.items()} for number in range(len(records))]


def plain(column: RaggedTensor) -> list[list[object]]:
    rows = column.to_list()
    if column.dtype is torch.uint8:
        return [[bytes(text).decode("utf-8", "backslashreplace") for text in row] for row in rows]
    return rows


def shown(values: Sequence[object]) -> str:
    """Return a few values of a cell, short enough for a table."""
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values[:SHOWN_VALUES]]
    texts = [text if len(text) <= SHOWN_TEXT else text[: SHOWN_TEXT - 1] + "…" for text in texts]
    more = len(values) - SHOWN_VALUES
    return ", ".join(texts) + (f", … {more} more" if more > 0 else "")


def plot(statistics: Statistics, path: str) -> None:
    """Draw fill rates, values per record and distinct values of all columns to a picture."""
    with optional_package("matplotlib", "plot", "drawing statistics"):
        from matplotlib.figure import Figure
    found = sorted(statistics.columns.items(), reverse=True)
    names = [name for name, _ in found]
    panels: dict[str, list[float]] = {
        "records that have it": [column.filled / max(statistics.records, 1) for _, column in found],
        "values per record": [column.values / max(statistics.records, 1) for _, column in found],
        "distinct values": [len(column.distinct) for _, column in found],
    }
    figure = Figure(figsize=(13, 1.2 + 0.28 * len(names)))
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (title, numbers) in zip(axes, panels.items(), strict=True):
        axis.barh(names, numbers, color="#2a7f9e")
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(0, 1)
    if max(panels["distinct values"], default=0) > 1000:
        axes[2].set_xscale("log")
    figure.suptitle(f"{statistics.records:,} records")
    figure.tight_layout()
    figure.savefig(Path(path), dpi=120)
