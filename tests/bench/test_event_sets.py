"""Public sets of `monolith experiment sequences`: what is read, what is left out, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from monolith.cli.main import main
from monolith.data import leave_one_out
from monolith.errors import ConfigError
from monolith_bench import event_sets
from monolith_bench.event_sets import LATEST, OMNIREC, SETS, frequent, read_event_set

Row = tuple[int, int, int]
USUAL = [(user, item, 10 * user + at) for user in (3, 5, 7, 8, 9) for at, item in enumerate((4, 2, 6, 1, 8))]
"""Five users with the same five items."""


def archive_of(folder: Path, parts: Sequence[Sequence[Row]]) -> str:
    """Write the archive of omnirec with a log in three parts; return its SHA-256."""
    path = folder / OMNIREC.file
    with tarfile.open(path, "w:gz") as writing:
        for part, rows in zip(("train", "val", "test"), parts, strict=True):
            lines = ["user,item,timestamp", *(",".join(map(str, row)) for row in rows)]
            data = "\n".join(lines).encode() + b"\n"
            inner = f"tmpDirTest/{LATEST}/LensKit.ItemKNNScorer-c3d66610-42/{part}.csv"
            member = tarfile.TarInfo(f"omnirec-1.1.0/{inner}")
            member.size = len(data)
            writing.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an archive in which one user and one item have too few events."""
    rows = [*USUAL, (6, 4, 90), (6, 2, 91), (9, 77, 99)]
    sha256 = archive_of(tmp_path, (rows[::3], rows[1::3], rows[2::3]))
    monkeypatch.setattr(event_sets, "OMNIREC", replace(OMNIREC, sha256=sha256))
    monkeypatch.setattr(event_sets, "SETS", {"ml-latest": replace(SETS["ml-latest"], counts=(6, 6, 28))})
    return tmp_path


def test_parts_are_put_together_and_rare_users_and_items_are_left_out(small: Path) -> None:
    found = read_event_set("ml-latest", small)
    assert found.log.users.tolist() == [3, 5, 7, 8, 9]
    assert found.log.items.tolist() == [2, 1, 3, 0, 4] * 5  # numbers from 0 on, in the order of time
    assert found.log.row_splits.tolist() == [0, 5, 10, 15, 20, 25]
    assert found.said.startswith(
        "part of MovieLens-Latest (omnirec-1.1.0.tar.gz): 28 events of 6 users with 6 items; without users "
        "and items of fewer than 5 events: 25 events of 5 users with 5 items. 5 tests, of which 0 have"
    )
    assert found.counts["kept_events"] == 25
    assert "GroupLens" in found.licence


def test_the_command_measures_a_ready_model_on_it_with_mean_and_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(user, (user + at) % 8, 10 * user + at) for user in range(8) for at in range(5)]
    sha256 = archive_of(tmp_path, (rows[::3], rows[1::3], rows[2::3]))
    monkeypatch.setattr(event_sets, "OMNIREC", replace(OMNIREC, sha256=sha256))
    monkeypatch.setattr(event_sets, "SETS", {"ml-latest": replace(SETS["ml-latest"], counts=(8, 8, 40))})
    words = ["--set", "ml-latest", "--folder", str(tmp_path), "--models", "gru4rec", "--tables"]
    assert main(["experiment", "sequences", *words, "--seeds", "2", "--epochs", "1", "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["set"], report["tables"], report["counts"]["tests"]) == ("ml-latest", True, 8)
    (result,) = report["results"]
    reached = [seed["evaluations"][-1]["mrr"] for seed in result["seeds"]]
    assert len(reached) == 2
    assert 0 < min(reached) < max(reached) < 1
    assert result["mean"]["mrr"] == pytest.approx(sum(reached) / 2)
    assert result["error"]["mrr"] == pytest.approx((max(reached) - min(reached)) / 2)
    assert "Part of MovieLens-Latest after 1 epochs of the ready models, with tables" in said.err
    assert "±" in said.err
    assert "Licence: GroupLens" in said.err
    assert "Protocol: leave-one-out" in said.err


def test_tests_without_a_known_order_are_counted(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(user, item, min(at, 33)) for user, item, at in USUAL]  # all but user 3 did everything at once
    sha256 = archive_of(small, (rows[:9], rows[9:12], rows[12:]))
    monkeypatch.setattr(event_sets, "OMNIREC", replace(OMNIREC, sha256=sha256))
    monkeypatch.setattr(event_sets, "SETS", {"ml-latest": replace(SETS["ml-latest"], counts=(5, 5, 25))})
    found = read_event_set("ml-latest", small)
    assert found.counts["tests_without_order"] == 5
    assert len(leave_one_out(found.log, valid=False).test) == found.counts["tests"] == 5


def test_users_and_items_are_counted_once_before_any_are_left_out() -> None:
    users, items = torch.tensor([1, 1, 2, 2, 2]), torch.tensor([7, 8, 7, 9, 9])
    kept = frequent((users, items, torch.arange(5)), 2)
    assert [one.tolist() for one in kept] == [[1, 2, 2, 2], [7, 7, 9, 9], [0, 2, 3, 4]]  # 1 has one left


def test_an_archive_with_other_counts_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sets, "SETS", SETS)
    with pytest.raises(ConfigError, match="has 6 users, 6 items and 28 events"):
        read_event_set("ml-latest", small)


def test_a_set_without_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment", "sequences", "--set", "book-crossing", "--folder", str(tmp_path)]
    assert main(words) == 2
    assert "has no times" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # nothing was downloaded for it
