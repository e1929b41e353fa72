"""docs/reference: every public name has a row on an index page and a page, and every example runs."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import monolith

ROOT = Path(__file__).parents[2]
INDEX_PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES: dict[str, str] = load().examples()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load()


def test_every_public_name_is_in_one_area(tool: ModuleType) -> None:
    documented = [name for names in tool.names_by_area().values() for name in names]
    assert sorted(documented) == sorted(monolith.__all__)
    assert sorted(tool.AREAS) == [page.stem for page in INDEX_PAGES]


def test_the_index_pages_are_up_to_date(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = tool.main(["--check"])
    assert not status, capsys.readouterr().out


def test_a_row_of_an_index_page_has_the_first_sentence_of_the_docstring(tool: ModuleType) -> None:
    row = "| [TableError](../../src/monolith/errors.py) | A table refused a call. |"
    assert row in tool.index_page("errors").splitlines()


def test_the_page_of_a_name_says_what_to_render_and_where_it_is_defined(tool: ModuleType) -> None:
    assert tool.page("Segment").splitlines() == [
        "[Tables](../tables.md): `from monolith import Segment`, defined in `monolith.table.config`.",
        "",
        "::: monolith.table.config.Segment",
        "    options:",
        "      heading_level: 1",
    ]


def test_a_constant_is_documented_by_the_string_below_it(tool: ModuleType) -> None:
    assert tool.summary("METRICS") == "The metrics by name: each value makes a new `Metric`."


def test_every_public_name_has_an_example(tool: ModuleType) -> None:
    names = {name: f"{tool.definition(name)[0]}.{name}" for name in monolith.__all__}
    assert [name for name, defined in names.items() if defined not in EXAMPLES] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], {"__name__": "__main__"}, name, None, 0)
    assert example.examples
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("page", INDEX_PAGES, ids=lambda page: page.stem)
def test_the_example_of_an_area_runs(page: Path) -> None:
    found = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    exec(compile(found[1], str(page), "exec"), {"__name__": "example"})
