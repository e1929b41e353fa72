"""What of the package a run uses, as far as imports tell."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("follow_imports")


Reached = Callable[[dict[str, str]], set[str]]


@pytest.fixture
def reached(tool: ModuleType, tmp_path: Path) -> Reached:
    """Write modules below a package, by path, and return which of them `cli/start.py` reaches."""

    def follow(files: dict[str, str]) -> set[str]:
        for name, source in files.items():
            path = tmp_path / "monolith" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        known = tool.read_package(tmp_path / "monolith")
        found = tool.reached_from(["monolith.cli.start"], known)
        return {module.removeprefix("monolith.") for module in found} - {"cli.start"}

    return follow


def test_an_import_is_followed_late_ones_too(reached: Reached) -> None:
    files = {
        "cli/start.py": "import monolith.table.a",
        "table/a.py": "def f():\n    from monolith.table.b import B",
        "table/b.py": "class B: ...",
        "table/c.py": "from monolith.table.b import B",
    }
    assert reached(files) == {"table.a", "table.b"}


@pytest.mark.parametrize("door", ["__init__.py", "__init__.pyi"])
def test_a_door_leads_only_to_what_is_asked_for(reached: Reached, door: str) -> None:
    files = {
        "cli/start.py": "from monolith.table import A",
        "table/__init__.py": "",
        f"table/{door}": "from monolith.table.a import A\nfrom monolith.table.b import B\n",
        "table/a.py": "class A: ...",
        "table/b.py": "class B: ...",
    }
    assert reached(files) == {"table.a"}


def test_a_room_that_is_imported_whole_is_followed_by_its_attributes(reached: Reached) -> None:
    files = {
        "cli/start.py": "from monolith import table as rows\nrows.a_function()",
        "table/__init__.py": "from monolith.table.a import a_function\nfrom monolith.table.b import B",
        "table/a.py": "def a_function(): ...",
        "table/b.py": "class B: ...",
    }
    assert reached(files) == {"table", "table.a"}


def test_what_only_type_checkers_import_is_not_used(reached: Reached) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from monolith.table.a import A"
    assert reached({"cli/start.py": source, "table/a.py": "class A: ..."}) == set()


def test_a_module_that_is_started_by_name_is_used(reached: Reached) -> None:
    assert reached({"cli/start.py": "run('-m', 'monolith.table.a')", "table/a.py": ""}) == {"table.a"}


def test_a_name_is_used_if_somebody_speaks_of_it(tool: ModuleType, tmp_path: Path, reached: Reached) -> None:
    modules = reached(
        {
            "cli/start.py": "from monolith.table.a import used",
            "table/a.py": "def used(): ...\ndef idle(): ...",
            "table/b.py": "def used(): ...",
        }
    )
    known = tool.read_package(tmp_path / "monolith")
    names = ("table.a", "table.a.used", "table.a.idle", "table.b", "table.b.used")
    whole = {f"monolith.{module}" for module in [*modules, "cli.start"]}
    assert [name for name in names if tool.is_used(f"monolith.{name}", whole, known)] == [
        "table.a",
        "table.a.used",
    ]
    with pytest.raises(LookupError, match="there is no monolith"):
        tool.is_used("monolith.table.z.x", whole, known)


def test_the_commands_of_runs_begin_it_and_benchmarks_do_not(tool: ModuleType) -> None:
    beginnings = tool.commands_of_runs()
    assert "monolith.cli.evaluation" in beginnings
    assert not [module for module in beginnings if ".bench" in module or ".demo" in module]


def test_it_says_of_a_name_how_a_run_comes_to_use_it(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["monolith.train.Trainer", "monolith.compat.params"]) == 0
    first, *way, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("monolith.train.Trainer: used by a run", "monolith.compat.params: library only")
    assert way[-1].startswith("  <- monolith.cli.")
