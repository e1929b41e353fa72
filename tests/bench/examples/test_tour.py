"""`monolith demo tour`: it ends well, tells what it did, and leaves nothing behind."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from monolith.cli.main import main
from monolith.table import Rows
from monolith_bench.examples import tour as tours
from monolith_bench.options import TourOptions

STOPS = ["Insert", "Look up", "Train", "Admit", "Expire", "Save", "Refuse damage", "Restore"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_tour_makes_all_its_stops_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "tour", "--rows", "2000", "--dim", "4"]) == 0
    printed = capsys.readouterr().out
    places = [printed.index(f"─ {stop} ─") for stop in STOPS]
    assert places == sorted(places)
    assert "corrupt at byte" in printed
    assert "every bit of every row" in printed
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("rows", [1, 7])
def test_a_handful_of_rows_will_do(rows: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    assert main(["demo", "tour", "--rows", str(rows), "--dim", "1"]) == 0
    assert "All as expected" in capsys.readouterr().out


def test_no_rows_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "tour", "--rows", "0"]) == 2
    assert "--rows and --dim must be at least 1" in capsys.readouterr().err


def test_rows_are_equal_only_bit_by_bit() -> None:
    tour = tours.Tour(TourOptions(dim=2), Console(file=io.StringIO()), tours.native.Workers(1))
    table = tour.new_table("item")
    ids = torch.tensor([5])
    rows = Rows(ids, torch.tensor([9]), torch.tensor([[0.0, torch.nan]]), torch.tensor([[1.0, 2.0]]))
    table.restore(rows)
    assert tours.equal_rows(table, rows)
    assert not tours.equal_rows(table, Rows(ids, rows.event_times + 1, rows.values, rows.state))
    assert not tours.equal_rows(table, Rows(ids, rows.event_times, -rows.values, rows.state))
    assert not tours.equal_rows(table, Rows(ids + 1, rows.event_times, rows.values, rows.state))


def test_a_curve_is_drawn_from_its_highest_to_its_lowest_point() -> None:
    assert tours.spark([2.0, 1.0, 0.0]) == "█▅▁"
    assert tours.spark([3.0, 3.0]) == "▁▁"
