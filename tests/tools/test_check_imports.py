"""The checker that `make check` runs over the package: what it refuses and what it lets pass."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_imports.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_imports", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


Findings = Callable[..., list[str]]


@pytest.fixture
def findings(tool: ModuleType, tmp_path: Path) -> Findings:
    """Write files below a package and return the findings as `path:line: message`, paths relative."""
    package = tmp_path / "monolith"

    def check(**files: str) -> list[str]:
        for name, source in files.items():
            path = package / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(source))
        return [str(finding).removeprefix(f"{package}/") for finding in tool.check(package)]

    return check


@pytest.fixture
def front_door(tmp_path: Path) -> Callable[[str, str], None]:
    """Write the front door of a room, at a path below the package."""

    def write(path: str, source: str) -> None:
        (tmp_path / "monolith" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "monolith" / path).write_text(source + "\n")

    return write


def test_a_room_may_import_the_rows_above_it(findings: Findings) -> None:
    assert (
        findings(table__a="import monolith.errors\nfrom monolith.native import Core\nfrom . import b") == []
    )


def test_an_import_of_a_row_below_is_refused(findings: Findings) -> None:
    assert findings(table__a="from monolith.store import Store") == [
        "table/a.py:1: table imports store, which is below it"
    ]


def test_an_import_of_a_neighbour_is_refused(findings: Findings) -> None:
    assert findings(config__a="import monolith.filesystem.paths") == [
        "config/a.py:1: config imports filesystem, which is on the same row as it"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "def late():\n    from monolith.train import loop",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from monolith import train",
        "try:\n    import monolith.train\nexcept ImportError:\n    pass",
        "VALUE = 1\nfrom ..train import loop",
    ],
)
def test_a_late_a_typing_a_guarded_and_a_relative_import_count(findings: Findings, source: str) -> None:
    (found,) = findings(table__a=source)
    assert "table imports train, which is below it" in found


def test_a_server_does_not_know_the_trainer_though_it_is_on_a_lower_row(findings: Findings) -> None:
    assert findings(serve__a="import monolith.train", train__a="import monolith.serve") == [
        "serve/a.py:1: serve and train do not know each other",
        "train/a.py:1: train imports serve, which is below it",
    ]


def test_the_package_itself_imports_no_room(tool: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "monolith"
    package.mkdir()
    (package / "__init__.py").write_text("from monolith.table import Table\n")
    (found,) = tool.check(package)
    assert found.message == "the package itself imports table, which is below it"


def test_the_library_does_not_know_the_packages_built_on_it(tool: ModuleType, tmp_path: Path) -> None:
    sources = {
        "monolith/cli/a.py": "import monolith_compat",
        "monolith_compat/a.py": "from monolith.cli import b",
        "monolith_bench/a.py": "def f():\n    from monolith_compat.a import b",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(source)
    found = tool.check(*(tmp_path / name for name in tool.PACKAGES))
    assert [finding.message for finding in found] == [
        "cli imports monolith_compat, which is below it",
        "monolith_bench imports monolith_compat, which is on the same row as it",
    ]


def test_a_room_without_a_row_is_refused(findings: Findings) -> None:
    assert findings(utils__a="") == ["utils/a.py:1: 'utils' is not a room of ROWS; give it a row"]


def test_rooms_a_model_is_written_with_need_only_torch_and_numpy(findings: Findings) -> None:
    assert findings(
        nn__a="import math\nimport numpy\nfrom torch import nn\ndef f():\n    import pyarrow"
    ) == ["nn/a.py:5: nn imports pyarrow, but needs only torch and numpy"]


def test_an_optional_package_is_imported_at_module_level_only_by_its_owner(findings: Findings) -> None:
    assert findings(
        data__a="import pyarrow.parquet",
        cluster__a="def f():\n    import pyarrow",
        serve__a="import pyarrow",
        cli__a="import pandas",
    ) == [
        "cli/a.py:1: imports pandas at module level, which no room owns (see OWNERS)",
        "serve/a.py:1: imports pyarrow at module level, which only data and store and sync may do",
    ]


def test_definitions_constants_and_guards_are_no_effects(findings: Findings) -> None:
    source = '''
        """A docstring."""
        from __future__ import annotations
        import logging, re, sys
        from dataclasses import dataclass, field
        from enum import Enum, auto
        from typing import TYPE_CHECKING, TypeVar
        if TYPE_CHECKING:
            import torch
        try:
            import tomllib
        except ImportError:
            tomllib = None
        T = TypeVar("T")
        LOG = logging.getLogger(__name__)
        WORD = re.compile("[a-z]+")
        LATER = {"start": lambda: start()}
        class Kind(Enum):
            ONE = auto()
        @dataclass(frozen=True)
        class Options:
            """Options."""
            names: list[str] = field(default_factory=list)
        DEFAULT = Options()
        def start(options=DEFAULT):
            print(options)
    '''
    assert findings(table__a=source) == []


@pytest.mark.parametrize(
    "source",
    [
        "print('hello')",
        "logging.basicConfig()",
        "signal.signal(signal.SIGUSR1, handler)",
        "torch.manual_seed(0)",
        "threading.Thread(target=f).start()",
        "SESSION = requests.Session()",
        "TEXT = open('file').read()",
        "HOME = os.environ['HOME']",
        "HOME = os.getenv('HOME')",
        "os.environ['HOME'] = '/'",
        "torch.load = None",
        "with lock: pass",
        "for name in NAMES: pass",
        "while True: break",
        "try:\n    connect()\nexcept OSError:\n    pass",
        "if flag():\n    pass",
        "@register('adagrad')\nclass Adagrad: pass",
        "@app.route\ndef f(): pass",
        "def f(clock=time.time()): pass",
        "class A:\n    pool = ThreadPoolExecutor()",
        "if __name__ == '__main__':\n    run()",
    ],
)
def test_anything_that_happens_on_import_is_refused(findings: Findings, source: str) -> None:
    assert findings(table__a=source)


def test_the_command_line_may_run_as_a_script(findings: Findings) -> None:
    assert findings(cli__a="if __name__ == '__main__':\n    run()") == []


def test_a_public_class_exists_once(findings: Findings) -> None:
    assert findings(table__a="class Plan: ...", store__b="class Plan: ...\nclass Other: ...") == [
        "table/a.py:1: the public name Plan exists twice: monolith.table.a.Plan and monolith.store.b.Plan"
    ]


def test_private_classes_and_inner_ones_may_share_a_name(findings: Findings) -> None:
    source = "class _Plan: ...\nclass {}:\n    class Inner: ...\ndef build():\n    class Local: ..."
    assert findings(table__a=source.format("A"), store__b=source.format("B")) == []


def test_two_front_doors_may_not_offer_two_things_by_one_name(
    findings: Findings, front_door: Callable[[str, str], None]
) -> None:
    front_door("nn/__init__.py", "from monolith.nn.fm import FFM")
    front_door("model/__init__.pyi", "from monolith.model.ffm import build as FFM")
    front_door("model/__init__.py", "")
    assert findings(nn__fm="FFM = dict", model__ffm="def build(): ...") == [
        "nn/__init__.py:1: the public name FFM exists twice: monolith.nn.fm.FFM and monolith.model.ffm.build"
    ]


def test_a_name_that_several_doors_pass_on_exists_once(
    findings: Findings, front_door: Callable[[str, str], None]
) -> None:
    front_door("train/__init__.pyi", "from monolith.train.hooks import Hook, saving")
    front_door("train/hooks/__init__.pyi", "from monolith.train.hooks.hook import Hook\nimport torch")
    front_door("train/__init__.py", "")
    front_door("train/hooks/__init__.py", "")
    assert findings(train__hooks__hook="class Hook: ...", train__hooks__saving="") == []


@pytest.mark.parametrize(
    "source",
    [
        "from contextvars import ContextVar\nCURRENT = ContextVar('current')",
        "import contextvars\nclass A:\n    def f(self):\n        self.now = contextvars.ContextVar('now')",
        "import threading\ndef f():\n    return threading.local()",
        "from threading import local\nMINE = local()",
        "SEEN = 0\ndef f():\n    global SEEN\n    SEEN = 1",
        "SEEN = {}\ndef f(key):\n    SEEN[key] = 1",
        "SEEN = {}\ndef f(key):\n    del SEEN[key]",
        "SEEN = {}\ndef f(key):\n    SEEN[key] += 1",
        "SEEN = {}\ndef f(key):\n    SEEN[key].append(1)",
        "SEEN: set[int] = set()\ndef f(key):\n    SEEN.add(key)",
        "SEEN = []\nclass A:\n    def f(self):\n        return lambda: SEEN.clear()",
        "NOW = type('Now', (), {})\ndef f():\n    NOW.step = 1",
    ],
)
def test_ambient_state_is_refused(findings: Findings, source: str) -> None:
    assert [found for found in findings(table__a=source) if "ambient state" in found]


def test_what_a_function_or_an_object_owns_is_not_ambient(findings: Findings) -> None:
    source = """
        import threading
        NAMES = {"a": 1}
        class Scratch:
            def __init__(self) -> None:
                self._by_thread = threading.local()
                self.seen = {}
            def add(self, key, local):
                self.seen[key] = NAMES[key]
                return local(key)
        def f(NAMES):
            NAMES["b"] = 2
        def g():
            NAMES = []
            NAMES.append(1)
            return sorted(NAMES)
    """
    assert findings(table__a=source) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import threading\ndef f(): return threading.Lock()", "threading.Lock"),
        ("import time\ndef f(): time.sleep(1)", "time.sleep"),
        ("from time import monotonic", "time.monotonic"),
        ("from concurrent.futures import ThreadPoolExecutor", "concurrent.futures.ThreadPoolExecutor"),
        ("import time\ndef f(clock=time.time): return clock()", "time.time"),
    ],
)
def test_coordinating_rooms_take_threads_and_clocks_from_one_module(
    findings: Findings, source: str, name: str
) -> None:
    (found,) = findings(sync__a=source)
    assert f"`{name}` cannot be simulated; use monolith.concurrency." in found
    assert findings(sync__a="from monolith.concurrency import Lock, monotonic") == []


@pytest.mark.parametrize("source", ["def f():\n    import grpc.aio", "def f():\n    from grpc import server"])
def test_coordinating_rooms_take_grpc_from_its_seam(findings: Findings, source: str) -> None:
    (found,) = findings(serve__a=source)
    assert "`import grpc` cannot be simulated; use monolith.wire.grpc_ports" in found
    assert findings(serve__a="", wire__grpc_ports=source, cli__a=source) == []


def test_rooms_that_no_simulation_runs_may_use_any_clock(findings: Findings) -> None:
    source = "import time\ndef f(): return time.monotonic()"
    assert findings(cli__a=source, cluster__launch__a=source, table__a=source) == []


def test_findings_are_printed_and_exit_with_one(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room = tmp_path / "monolith" / "table"
    room.mkdir(parents=True)
    (room / "a.py").write_text("import monolith.serve\n")
    assert tool.main([str(tmp_path / "monolith")]) == 1
    assert capsys.readouterr().out == f"{room}/a.py:1: table imports serve, which is below it\n"
    (room / "a.py").write_text("import monolith.errors\n")
    assert tool.main([str(tmp_path / "monolith")]) == 0
