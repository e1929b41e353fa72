"""docs/architecture.md draws the rooms there are, and names seams and contracts that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = sorted(path.parent.name for path in (ROOT / "src" / "monolith").glob("*/__init__.py"))
SEAMS = re.findall(r"^\| [^|]*\(`(monolith[\w.]+)`\).*\|([^|]*)\|$", PAGE, flags=re.MULTILINE)


def test_every_room_is_drawn() -> None:
    drawn = re.findall(r">(\w+)</text>", (ROOT / "docs" / "images" / "rooms.svg").read_text(encoding="utf-8"))
    assert [room for room in ROOMS if room not in drawn] == []


@pytest.mark.parametrize("module, contract", SEAMS)
def test_each_seam_and_its_contract_are_there(module: str, contract: str) -> None:
    place = ROOT.joinpath("src", *module.split("."))
    assert place.is_dir() or place.with_suffix(".py").is_file()
    for path in re.findall(r"`([^`]+)`", contract):
        assert (ROOT / path).exists()


def test_all_seams_are_in_the_table() -> None:
    assert len(SEAMS) == 12
