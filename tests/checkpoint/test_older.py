"""Checkpoints of older programs restore to the bit; `older/README.md` says which programs wrote them."""

from __future__ import annotations

import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.older.task import ALONE, EXAMPLES, FLEET, OlderTask, checkpoints, config_of, content_of
from runtime.fleets import run_fleet

from monolith.checkpoint.offline.listing import list_checkpoints
from monolith.runtime import Trainer

WRITERS_MACHINE = "aarch64"
WRITERS_THREADS = 2
"""As many share a sum: with others its last bit differs, of which Adam makes a step."""
PROGRAMS = [path.name for path in (Path(__file__).parent / "older").iterdir() if path.is_dir()]


@pytest.fixture(params=sorted(name for name in PROGRAMS if not name.startswith("__")))
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of one older program, unpacked."""
    for kind in (ALONE, FLEET):
        with tarfile.open(Path(__file__).parent / "older" / request.param / f"{kind}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
    return tmp_path


def recorded(path: str | Path) -> Any:
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize("kind", [ALONE, FLEET])
def test_rows_weights_state_and_positions_come_back_to_the_bit(older: Path, kind: str) -> None:
    found = checkpoints(older / kind)
    assert len(found) >= 2
    for prefix in found:
        assert content_of(prefix) == recorded(f"{prefix}.content.json")


@pytest.mark.parametrize("kind", [ALONE, FLEET])
def test_its_folder_is_sound_and_has_full_checkpoints_and_increments(older: Path, kind: str) -> None:
    listing = list_checkpoints(str(older / kind))
    assert listing.sound
    assert {one.kind for one in listing.checkpoints} == {"full", "incremental"}


def test_a_run_resumes_where_the_older_one_stopped(older: Path) -> None:
    folder = older / ALONE
    threads = torch.get_num_threads()
    torch.set_num_threads(WRITERS_THREADS)
    try:
        Trainer(OlderTask(), config_of(folder)).train()
    finally:
        torch.set_num_threads(threads)
    found, expected = content_of(checkpoints(folder)[-1]), recorded(folder / "end.json")
    for exact in ("step", "admitted next"):
        assert found[exact] == expected[exact]
    assert found["states"]["position"] == expected["states"]["position"]
    assert found["rows"].keys() == expected["rows"].keys()
    for name, rows in expected["rows"].items():
        assert found["rows"][name].keys() == rows.keys()
    if platform.machine() == WRITERS_MACHINE:  # elsewhere Adam makes a step of a sum's last bit
        assert_near(found["rows"], expected["rows"])
        assert_near(found["weights"], expected["weights"])


def test_what_it_no_longer_needs_goes_with_the_next_save(older: Path) -> None:
    folder = older / ALONE
    assert steps(folder) == [2, 4, 6, 7]  # the newest three, and 2 for the increments after it
    Trainer(OlderTask(), config_of(folder)).train()
    assert steps(folder) == [7, 9, 11, 12]


def steps(folder: Path) -> list[int]:
    return [int(prefix.rpartition("-")[2]) for prefix in checkpoints(folder)]


def test_a_fleet_resumes_where_the_older_one_stopped(older: Path) -> None:
    folder = older / FLEET
    before = recorded(f"{checkpoints(folder)[-1]}.content.json")
    run_fleet(OlderTask(), folder, seed=7).report(0)
    after = content_of(checkpoints(folder)[-1])
    assert before["states"]["progress"]["examples"] < EXAMPLES
    assert after["states"]["progress"]["examples"] == EXAMPLES
    for name, rows in before["rows"].items():
        assert rows.keys() <= after["rows"][name].keys()


def assert_near(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert_near(found[key], one)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
    else:
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
