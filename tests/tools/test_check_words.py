"""`tools/check_words.py` finds the words that readers stumbled over, and lets their count only fall."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_words.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("check_words", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "src" / "a.py").write_text('''"""Training goes on."""\n\nbeside = 1  # the others wait\n''')
    return tmp_path


@pytest.mark.usefixtures("repository")
def test_words_are_found_in_docstrings_and_comments(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 1
    out = capsys.readouterr().out
    assert "src/a.py:1: 'goes on': write continue or resume" in out
    assert "src/a.py:3: 'the others'" in out
    assert "beside" not in out


def test_known_words_pass_until_there_are_more(
    tool: Any, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--update"]) == 0
    assert tool.main([]) == 0
    (repository / "src" / "b.py").write_text("# nobody reads this\n")
    assert tool.main([]) == 1
    assert "src/b.py: 1 matches, 0 are known" in capsys.readouterr().out


def test_code_blocks_of_pages_are_not_prose(tool: Any, repository: Path) -> None:
    (repository / "README.md").write_text("Plain.\n\n```\ngo on beside nobody\n```\n")
    (repository / "src" / "a.py").write_text("")
    assert tool.main([]) == 0
