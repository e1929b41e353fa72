"""The pages that the site has beyond `docs/`, and links between all of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

TOOL = Path(__file__).parents[2] / "tools" / "docs_site.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(tool: ModuleType) -> dict[str, str]:
    found: dict[str, str] = tool.api_pages()
    return found


def turned(tool: ModuleType, page: str, text: str) -> str:
    found: str = tool.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)))
    return found


@pytest.mark.parametrize(
    "page, text, expected",
    [
        ("index.md", "[a](../CONTRIBUTING.md#set-up)", "[a](contributing.md#set-up)"),
        ("index.md", "[a](guides/data.md)", "[a](guides/data.md)"),
        ("guides/data.md", "[a](../../benchmarks/README.md)", "[a](../benchmarks.md)"),
        ("contributing.md", "[a](docs/glossary.md)", "[a](glossary.md)"),
        ("benchmarks.md", "![a](../docs/images/demo.png)", "![a](images/demo.png)"),
        ("guides/data.md", "[deploy](../../examples/deploy/README.md)", "deploy"),
        ("index.md", "[a](https://example.org) [b](#begin)", "[a](https://example.org) [b](#begin)"),
        ("index.md", "`x[0](../CONTRIBUTING.md)`", "`x[0](../CONTRIBUTING.md)`"),
    ],
)
def test_a_link_leads_to_the_same_page_on_the_site(
    tool: ModuleType, page: str, text: str, expected: str
) -> None:
    assert turned(tool, page, text) == expected


def test_a_lazy_room_is_shown_with_what_its_stub_offers(pages: dict[str, str]) -> None:
    assert "::: monolith.runtime.trainer.Trainer" in pages["runtime"]
    assert "::: monolith.data.source.Source" in pages["data"]
    assert "::: monolith.table.config.TableConfig" in pages["table"]


def test_everything_is_shown_once(pages: dict[str, str]) -> None:
    shown = [line for page in pages.values() for line in page.splitlines() if line.startswith(":::")]
    assert len(shown) > 300
    assert len(shown) == len(set(shown))


def test_what_an_inner_room_shows_is_linked_from_the_outer_one(pages: dict[str, str]) -> None:
    assert "::: monolith.nn.layers.dense.MLP" in pages["nn.layers"]
    assert "[`MLP`][monolith.nn.layers.dense.MLP]" in pages["nn"]
    assert "(nn.layers.md)" in pages["index"]
