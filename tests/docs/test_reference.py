"""docs/reference: every public name has a section, and the example of every page runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import monolith

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_one_section(tool: ModuleType) -> None:
    documented = [name for names in tool.AREAS.values() for name in names.split()]
    assert sorted(documented) == sorted(monolith.__all__)
    assert sorted(tool.AREAS) == [page.stem for page in PAGES]


def test_every_section_is_on_its_page(tool: ModuleType) -> None:
    for area, names in tool.AREAS.items():
        text = (ROOT / "docs" / "reference" / f"{area}.md").read_text(encoding="utf-8")
        assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == names.split()


def test_a_section_has_the_signature_and_the_summary_of_the_docstring(tool: ModuleType) -> None:
    assert tool.section("MissingExtraError").splitlines() == [
        "### MissingExtraError",
        "",
        "An optional package is needed and not installed. Defined in `monolith.errors`.",
        "",
        "```python",
        "MissingExtraError(package: str, extra: str, purpose: str)",
        "```",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_runs(page: Path) -> None:
    found = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    exec(compile(found[1], str(page), "exec"), {"__name__": "example"})
