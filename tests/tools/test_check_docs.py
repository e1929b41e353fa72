"""The checker that `make check` runs over the documentation: what it refuses and what it lets pass."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_docs.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


Findings = Callable[..., list[str]]


@pytest.fixture
def findings(tool: ModuleType, tmp_path: Path) -> Findings:
    """Write the pages of a repository, by path, and return what is found in them."""

    def check(pages: dict[str, str]) -> list[str]:
        for name, text in pages.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return [str(finding) for finding in tool.check(tmp_path)]

    return check


def test_the_documentation_itself_passes(tool: ModuleType) -> None:
    assert [str(finding) for finding in tool.check(TOOL.parents[1])] == []


def test_a_link_that_leads_to_a_file_or_a_heading_passes(findings: Findings) -> None:
    assert (
        findings(
            {
                "README.md": "[a](docs/a.md) ![p](docs/p.png)\n[b](docs/a.md#how-it-is) [c](#here)\n# Here",
                "docs/a.md": "# How `it` is\n[up](../README.md) [out](https://example.org/x.md)",
                "docs/p.png": "",
            }
        )
        == []
    )


def test_a_link_to_a_file_that_is_not_there_is_refused(findings: Findings) -> None:
    assert findings({"docs/a.md": "\n[b](b.md)"}) == [
        "docs/a.md:2: the link b.md leads nowhere: there is no b.md"
    ]


@pytest.mark.parametrize("link", ["#below", "b.md#below"])
def test_a_link_to_a_heading_that_is_not_there_is_refused(findings: Findings, link: str) -> None:
    (found,) = findings({"docs/a.md": f"[x]({link})\n# Above", "docs/b.md": "# Above"})
    assert found == f"docs/a.md:1: the link {link} leads nowhere: no heading #below"


def test_code_has_no_links_and_no_headings(findings: Findings) -> None:
    assert findings({"docs/a.md": "`x[i](j)`\n```python\ny[i](j)\n# Title\n```\n"}) == []
    assert findings({"docs/a.md": "[x](#title)\n```python\n# Title\n```\n"}) != []


def test_a_path_that_is_not_there_is_refused(findings: Findings) -> None:
    text = (
        "`src/a.py` `src/gone.py` `src/*.py` `src/*.cc` `src/a.py::test_x` `elsewhere/b.py` `src/<name>.py`"
    )
    assert findings({"CONTRIBUTING.md": text, "src/a.py": "def test_x(): ..."}) == [
        "CONTRIBUTING.md:1: there is no src/*.cc",
        "CONTRIBUTING.md:1: there is no src/gone.py",
    ]


@pytest.mark.parametrize(
    "command",
    [
        "monolith doctor",
        "monolith bench",
        "monolith bench NAME --json",
        "monolith data head part-0.parquet",
        "monolith checkpoint list | inspect | diff",
        "monolith train ... --traceback",
        "monolith train clicks.py:Clicks --model-dir runs/1",
        "monolith data dispatcher ... --tls-cert node.crt",
        "monolith --help",
    ],
)
def test_a_command_of_the_table_passes(findings: Findings, command: str) -> None:
    assert findings({"README.md": f"`{command}`"}) == []


@pytest.mark.parametrize(
    "command, message",
    [
        ("monolith bensh table", "unknown command 'bensh'"),
        ("monolith data haed x", "`monolith data` needs a subcommand"),
        ("monolith checkpoint list | inspekt", "monolith checkpoint inspekt"),
        ("monolith bench\ntable --rwos 3", "`monolith bench table` has no flag --rwos"),
        ("monolith bench table --rwos 3", "`monolith bench table` has no flag --rwos"),
        ("monolith train a.py:A --no-such-thing", "`monolith train` has no flag --no-such-thing"),
    ],
)
def test_another_command_or_flag_is_refused(findings: Findings, command: str, message: str) -> None:
    (found,) = findings({"README.md": f"`{command}`"})
    assert message in found or "not a whole command" in found


def test_commands_in_blocks_of_shell_are_checked_up_to_a_comment_or_a_pipe(findings: Findings) -> None:
    text = """
        ```
        monolith bench table --json > table.json      # --all of it
        monolith bench table --jsno | less
        ```
        ```python
        monolith nonsense
        ```
    """
    assert findings({"docs/a.md": text}) == [
        "docs/a.md:4: `monolith bench table --jsno`: `monolith bench table` has no flag --jsno"
    ]


FIGURES = "# x\n### `monolith bench table`\nlookup 36.6 M rows/s, 0.46 of raw\n### `monolith bench data`\n21"


def test_each_decision_has_one_row_and_each_row_a_decision(findings: Findings) -> None:
    pages = {
        "docs/decisions/0001-a.md": "# a",
        "docs/decisions/0002-b.md": "# b",
        "docs/decisions/README.md": "| page |\n| [0001](0001-a.md) | A. |\n| [0002](0002-b.md) | B. |\n",
    }
    assert findings(pages) == []
    pages["docs/decisions/README.md"] = "| [0001](0001-a.md) | A. |\n| [0003](0001-a.md) | A. |\n"
    assert findings(pages) == [
        "docs/decisions/0001-a.md:1: it has 2 rows in docs/decisions/README.md, and needs one",
        "docs/decisions/0002-b.md:1: it has 0 rows in docs/decisions/README.md, and needs one",
        "docs/decisions/README.md:2: the row of 0003 leads to 0001-a.md",
    ]


def test_a_figure_under_its_command_passes(findings: Findings) -> None:
    readme = "| lookup | 36.6 M rows/s | 0.46 | `monolith bench table --busy` |"
    assert findings({"README.md": readme, "benchmarks/README.md": FIGURES}) == []


@pytest.mark.parametrize(
    "readme, message",
    [
        (
            "| lookup | 36.7 M rows/s | `monolith bench table` |",
            "36.7 does not stand in benchmarks/README.md under `monolith bench table`",
        ),
        (
            "| parse | 36.6 M rows/s | `monolith bench data` |",
            "36.6 does not stand in benchmarks/README.md under `monolith bench data`",
        ),
        ("| lookup | 36.6 M rows/s |", "36.6 M rows/s names no command that gives it"),
        ("| lookup | 6 ms | `monolith bench store` |", "has no heading with `monolith bench store`"),
        ("It looks up 36.6 M rows/s.", "36.6 M rows/s names no command that gives it"),
    ],
)
def test_a_figure_without_its_source_is_refused(findings: Findings, readme: str, message: str) -> None:
    (found,) = findings({"README.md": readme, "benchmarks/README.md": FIGURES})
    assert found == f"README.md:1: {message}" or found.endswith(message)


MODULE = "class Table:\n    def lookup(self): ...\n\ndef merge(): ...\n"


def test_a_name_in_a_file_that_defines_it_passes(findings: Findings) -> None:
    page = "`src/monolith/t.py::Table`, `src/monolith/t.py::Table.lookup`, `src/monolith/t.py::merge`"
    assert findings({"docs/a.md": page, "src/monolith/t.py": MODULE}) == []


@pytest.mark.parametrize("name", ["Tables", "Table.assign", "lookup", "merge.lookup"])
def test_a_name_in_a_file_that_does_not_define_it_is_refused(findings: Findings, name: str) -> None:
    (found,) = findings({"docs/a.md": f"`src/monolith/t.py::{name}`", "src/monolith/t.py": MODULE})
    assert found == f"docs/a.md:1: src/monolith/t.py does not define {name}"


@pytest.mark.parametrize(
    "name", ["monolith.t", "monolith.t.Table.lookup", "monolith.Table", "monolith.commands"]
)
def test_a_dotted_name_that_exists_passes(findings: Findings, name: str) -> None:
    files = {"src/monolith/__init__.py": "from monolith.t import Table", "src/monolith/t.py": MODULE}
    assert findings({"docs/a.md": f"`{name}`", **files}) == []


@pytest.mark.parametrize(
    "name, message",
    [("monolith.s", "monolith has no s"), ("monolith.t.Store", "t.py does not define Store")],
)
def test_a_dotted_name_that_nothing_defines_is_refused(findings: Findings, name: str, message: str) -> None:
    files = {"src/monolith/__init__.py": "", "src/monolith/t.py": MODULE}
    assert findings({"docs/a.md": f"`{name}`", **files}) == [f"docs/a.md:1: `{name}`: {message}"]
    assert findings({"docs/a.md": "", "docs/decisions/README.md": f"`{name}`", **files}) == []


@pytest.mark.parametrize(
    "claim",
    ["is not built yet", "GPUs are not supported yet", "are planned", "not implemented", "coming soon"],
)
def test_a_page_that_calls_a_feature_missing_is_refused(findings: Findings, claim: str) -> None:
    (found,) = findings({"docs/a.md": f"It {claim}."})
    assert "is it still missing?" in found
    assert findings({"docs/a.md": "", "docs/seed-map.md": f"It {claim}."}) == []


@pytest.mark.parametrize("text", ["ranks are not supported yet", "several processes cannot roll back yet"])
def test_a_message_that_calls_a_feature_missing_is_refused(findings: Findings, text: str) -> None:
    (found,) = findings({"src/monolith/t.py": f"\nMESSAGE = {text!r}\n"})
    assert found.startswith("src/monolith/t.py:2: ")


def test_a_message_or_a_comment_about_a_state_passes(findings: Findings) -> None:
    assert findings({"src/monolith/t.py": "MESSAGE = 'it has not started yet'  # cannot start yet\n"}) == []


def test_findings_are_printed_and_exit_with_one(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("[a](b.md)")
    assert tool.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "README.md:1: the link b.md leads nowhere: there is no b.md\n"
    (tmp_path / "b.md").touch()
    assert tool.main([str(tmp_path)]) == 0
