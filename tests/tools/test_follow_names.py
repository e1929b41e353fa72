"""Which names of the package a run uses, as far as its source tells."""

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
        yield importlib.import_module("follow_names")


Reached = Callable[[dict[str, str]], set[str]]


@pytest.fixture
def reached(tool: ModuleType, tmp_path: Path) -> Reached:
    """Write modules below a package, by path, and return which names `run` of `cli/start.py` reaches."""

    def follow(files: dict[str, str]) -> set[str]:
        for name, source in files.items():
            path = tmp_path / "monolith" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        found = tool.read_packages(tmp_path / "monolith").reached_from([("monolith.cli.start", "run")])
        names = {tool.shown(name).removeprefix("monolith.") for name in found if name[1]}
        return names - {"cli.start.run"}

    return follow


def test_a_name_is_reached_if_a_reached_body_mentions_it(reached: Reached) -> None:
    files = {
        "cli/start.py": "from monolith.table.a import used, idle\ndef run(): used()\ndef other(): idle()",
        "table/a.py": "def used(): inner()\ndef inner(): ...\ndef idle(): ...",
        "table/b.py": "def used(): ...",
    }
    assert reached(files) == {"table.a.used", "table.a.inner"}


def test_late_imports_and_constants_are_followed(reached: Reached) -> None:
    files = {
        "cli/start.py": "def run():\n    from monolith.table.a import TABLE\n    return TABLE",
        "table/a.py": "class A: ...\nclass B: ...\nTABLE = {'a': A}",
    }
    assert reached(files) == {"table.a.TABLE", "table.a.A"}


@pytest.mark.parametrize("door", ["__init__.py", "__init__.pyi"])
def test_a_door_leads_only_to_what_is_asked_for(reached: Reached, door: str) -> None:
    files = {
        "cli/start.py": "from monolith.table import A\ndef run(): A()",
        "table/__init__.py": "",
        f"table/{door}": "from monolith.table.a import A\nfrom monolith.table.b import B\n",
        "table/a.py": "class A: ...",
        "table/b.py": "class B: ...",
    }
    assert reached(files) == {"table.a.A"}


def test_a_room_that_is_imported_whole_is_followed_by_its_attributes(reached: Reached) -> None:
    files = {
        "cli/start.py": "from monolith import table as rows\ndef run(): rows.a_function()",
        "table/__init__.py": "from monolith.table.a import a_function\nfrom monolith.table.b import B",
        "table/a.py": "def a_function(): ...",
        "table/b.py": "class B: ...",
    }
    assert reached(files) == {"table.a.a_function"}


def test_a_method_is_reached_with_its_class_and_a_mention_of_its_name(reached: Reached) -> None:
    files = {
        "cli/start.py": "from monolith.table.a import A\ndef run(x): A(); x.used()",
        "table/a.py": "class A:\n  def __init__(self): ...\n  def used(self): ...\n  def idle(self): ...",
        "table/b.py": "class B:\n    def used(self): ...",
    }
    assert reached(files) == {"table.a.A", "table.a.A.__init__", "table.a.A.used"}


def test_a_method_that_is_asked_of_a_class_is_no_mention_of_others_of_its_name(reached: Reached) -> None:
    files = {
        "cli/start.py": "from monolith.table.a import A, B\ndef run(): A.make(); B()",
        "table/a.py": (
            "class Base:\n    @classmethod\n    def make(cls): ...\nclass A(Base): ...\n"
            "class B:\n    @classmethod\n    def make(cls): ..."
        ),
    }
    assert reached(files) == {"table.a.A", "table.a.Base", "table.a.Base.make", "table.a.B"}


def test_a_base_from_elsewhere_may_call_every_method(reached: Reached) -> None:
    files = {
        "cli/start.py": "from monolith.table.a import A\ndef run(): A()",
        "table/a.py": "from torch import nn\nclass A(nn.Module):\n    def forward(self): ...",
    }
    assert reached(files) == {"table.a.A", "table.a.A.forward"}


def test_annotations_count_for_fields_of_classes_alone(reached: Reached) -> None:
    files = {
        "cli/start.py": "from monolith.table.a import Config, Idle\ndef run(x: Idle) -> Idle: Config()",
        "table/a.py": "class Inner: ...\nclass Idle: ...\nclass Config:\n    inner: Inner",
    }
    assert reached(files) == {"table.a.Config", "table.a.Inner"}


def test_what_only_type_checkers_import_is_not_used(reached: Reached) -> None:
    source = "if TYPE_CHECKING:\n    from monolith.table.a import A\ndef run(): A"
    assert reached({"cli/start.py": source, "table/a.py": "class A: ..."}) == set()


def test_a_module_or_a_class_that_is_started_by_name_is_used(reached: Reached) -> None:
    files = {
        "cli/start.py": "def run(): start('-m', 'monolith.table.a', 'monolith.table.b:B')",
        "table/a.py": "def main(): ...\ndef idle(): ...",
        "table/b.py": "class B: ...\nclass C: ...",
    }
    assert reached(files) == {"table.a.main", "table.b.B"}


def test_a_module_is_used_with_its_first_name_and_a_name_by_itself(
    tool: ModuleType, tmp_path: Path, reached: Reached
) -> None:
    reached(
        {
            "cli/start.py": "from monolith.table.a import A\ndef run(): A().used()",
            "table/__init__.py": "from monolith.table.a import A",
            "table/a.py": "class A:\n    def used(self): ...\n    def idle(self): ...",
            "table/b.py": "def idle(): ...",
        }
    )
    package = tool.read_packages(tmp_path / "monolith")
    found = package.reached_from([("monolith.cli.start", "run")])
    names = ("table", "table.a", "table.A", "table.A.used", "table.A.idle", "table.b", "table.b.idle")
    used = [name for name in names if tool.is_used(f"monolith.{name}", found, package)]
    assert used == ["table", "table.a", "table.A", "table.A.used"]
    with pytest.raises(LookupError, match="there is no monolith"):
        tool.is_used("monolith.table.z.x", found, package)


def test_the_commands_of_runs_begin_it_and_benchmarks_do_not(tool: ModuleType) -> None:
    beginnings = tool.commands_of_runs()
    assert ("monolith.cli.evaluation", "evaluate") in beginnings
    assert not [module for module, _ in beginnings if "bench" in module or ".demo" in module]


def test_it_says_of_a_name_how_a_run_comes_to_use_it(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["monolith.runtime.Trainer", "monolith_compat.params"]) == 0
    first, *way, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (
        "monolith.runtime.Trainer: used by a run",
        "monolith_compat.params: library only",
    )
    assert way[-1].startswith("  <- monolith.cli.")
