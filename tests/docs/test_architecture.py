"""docs/architecture.md draws the packages that exist, and names seams and contracts that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SEAMS = re.findall(r"^\| [^|]*\(`(monolith[\w.]+)`\).*\|([^|]*)\|$", PAGE, flags=re.MULTILINE)


def test_the_drawing_shows_the_rows_of_the_import_check() -> None:
    """After a change of `ROWS`, run tools/draw_packages.py."""
    drawn = subprocess.run(
        [sys.executable, "-c", "import draw_packages; print(draw_packages.drawing(), end='')"],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
    )
    assert drawn.stdout == (ROOT / "docs" / "images" / "packages.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("module, contract", SEAMS)
def test_each_seam_and_its_contract_are_there(module: str, contract: str) -> None:
    place = ROOT.joinpath("src", *module.split("."))
    assert place.is_dir() or place.with_suffix(".py").is_file()
    for path in re.findall(r"`([^`]+)`", contract):
        assert (ROOT / path).exists()


def test_all_seams_are_in_the_table() -> None:
    assert len(SEAMS) == 13
