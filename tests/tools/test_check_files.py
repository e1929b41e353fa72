"""The checker of what opens files and makes folders: what it refuses and what it lets pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_files.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_files", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def findings(tool: ModuleType, folder: Path, source: str, name: str = "monolith/serve/x.py") -> list[str]:
    (folder / "x.py").write_text(source)
    return [message for _, message in tool.check(folder / "x.py", name)]


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "path.open('r+b')",
        "path.open(mode='ab')",
        "open(file=path, mode='x')",
        "path.write_text('a')",
        "path.write_bytes(b'a')",
        "os.open(path, os.O_RDWR)",
        "os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW)",
        "os.open(path, flags)",
        "path.mkdir(mode=0o700)",
        "os.makedirs(path)",
        "make(path, exist_ok=True)",
        "tempfile.mkdtemp()",
        "tempfile.TemporaryDirectory()",
        "from tempfile import mkdtemp",
        "sqlite3.connect(path)",
        "shutil.copyfile(one, other)",
    ],
)
def test_what_may_follow_a_link_or_take_a_foreign_folder_is_refused(
    tool: ModuleType, tmp_path: Path, source: str
) -> None:
    assert len(findings(tool, tmp_path, source)) == 1
    assert not findings(tool, tmp_path, source, "monolith/filesystem/x.py")


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "path.open('rb')",
        "channel.open(log, snapshot=take)",
        "os.open(path, os.O_RDONLY | os.O_DIRECTORY)",
        "with write_text(path) as file: file.write(text)",
        "filesystem.make_dirs(path)",
        "tempfile.gettempdir()",
    ],
)
def test_reading_and_the_functions_of_the_package_pass(tool: ModuleType, tmp_path: Path, source: str) -> None:
    assert not findings(tool, tmp_path, source)


def test_the_packages_pass_and_findings_exit_with_one(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([]) == 0, capsys.readouterr().out
    (tmp_path / "y.py").write_text("x = 1\nopen('a', 'w')\n")
    assert tool.main([str(tmp_path)]) == 1
    assert f"{tmp_path}/y.py:2: `open` follows" in capsys.readouterr().out
