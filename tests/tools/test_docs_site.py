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
    sys.path.insert(0, str(TOOL.parent))  # as mkdocs does
    spec.loader.exec_module(module)
    sys.path.remove(str(TOOL.parent))
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
        ("reference/tables.md", "[Sgd](../../src/monolith/table/optimizers.py)", "[Sgd](tables/Sgd.md)"),
        ("index.md", "`x[0](../CONTRIBUTING.md)`", "`x[0](../CONTRIBUTING.md)`"),
    ],
)
def test_a_link_leads_to_the_same_page_on_the_site(
    tool: ModuleType, page: str, text: str, expected: str
) -> None:
    assert turned(tool, page, text) == expected


def test_a_lazy_room_is_shown_with_what_its_stub_offers(pages: dict[str, str]) -> None:
    assert "::: monolith.data.source.Stage" in pages["data"]
    assert "::: monolith.store.store.TableIds" in pages["store"]


def test_a_public_name_is_shown_on_its_page_of_the_reference_and_linked_from_its_package(
    tool: ModuleType, pages: dict[str, str]
) -> None:
    assert "::: monolith.runtime.trainer.Trainer" in tool.reference.page("Trainer")
    assert "::: monolith.runtime.trainer.Trainer" not in pages["runtime"]
    assert "[`Trainer`][monolith.runtime.trainer.Trainer]" in pages["runtime"]


def test_the_reference_lists_the_page_of_every_name_below_its_area(tool: ModuleType) -> None:
    found = tool.with_names({"Reference": ["reference/errors.md"]})["Reference"]
    assert found[0]["Errors"][:2] == [
        "reference/errors.md",
        {"MonolithError": "reference/errors/MonolithError.md"},
    ]


def test_everything_is_shown_once(pages: dict[str, str]) -> None:
    shown = [line for page in pages.values() for line in page.splitlines() if line.startswith(":::")]
    assert len(shown) > 300
    assert len(shown) == len(set(shown))


def test_what_an_inner_room_shows_is_linked_from_the_outer_one(pages: dict[str, str]) -> None:
    assert "::: monolith.nn.layers.multi_task.MMoELayer" in pages["nn.layers"]
    assert "[`MMoELayer`][monolith.nn.layers.multi_task.MMoELayer]" in pages["nn"]
    assert "(nn.layers.md)" in pages["index"]
