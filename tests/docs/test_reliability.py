"""Every fault in docs/reliability.md names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)?::([\w:]+)[^`]*`")


def named() -> list[tuple[str, str]]:
    """Return file and name of each test; a name alone is of the file named last."""
    found, file = [], ""
    for path, name in NAMED.findall(PAGE):
        file = path or file
        found.append((file, name.rpartition("::")[2]))
    return found


def test_every_test_that_is_named_is_there() -> None:
    assert len(named()) > 80
    missing = [
        f"{file}::{name}"
        for file, name in named()
        if not (ROOT / file).is_file() or not re.search(rf"(def|class) {name}\b", (ROOT / file).read_text())
    ]
    assert missing == []


def test_every_row_names_a_test() -> None:
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| fault"))
    ]
    bare = [row for row in rows if not NAMED.search(row) and "| the same |" not in row]
    assert bare == []
