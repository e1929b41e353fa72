"""What the documentation site has beyond `docs/`, as a hook of mkdocs.

- Pages that people look for in the repository (`OUTSIDE`) are part of the site, and links between them and
  `docs/` lead there. A link to any other file of the repository becomes plain text: the site has no copy.
- The reference has a page for each public name, below the index page of its area; see `tools/reference.py`.
- The API pages: one for each package with a front door, with the other names that the door offers. A lazy
  door keeps its names in a stub, `__init__.pyi`, so pages are written from the stub if there is one.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import defined_in, module_path, names_by_area, parsed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "monolith"
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Path in the repository -> page of the site."""

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    nav = [with_names(entry) for entry in config.nav or []]
    config.nav = [*nav, {"API": [f"api/{room}.md" for room in ["index", *doors()]]}]
    return config


def with_names(entry: Any) -> Any:
    """Add the pages of an area's names below its index page."""
    if not isinstance(entry, dict) or "Reference" not in entry:
        return entry
    areas = [PurePosixPath(index).stem for index in entry["Reference"]]
    names = names_by_area()
    return {
        "Reference": [
            {
                area.capitalize(): [
                    f"reference/{area}.md",
                    *({name: f"reference/{area}/{name}.md"} for name in names[area]),
                ]
            }
            for area in areas
        ]
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for origin, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text(encoding="utf-8")))
    for area, names in names_by_area().items():
        for name in names:
            files.append(File.generated(config, f"reference/{area}/{name}.md", content=reference.page(name)))
    for room, text in api_pages().items():
        files.append(File.generated(config, f"api/{room}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    origin = next((path for path, name in OUTSIDE.items() if name == here), f"docs/{here}")
    parts = CODE.split(markdown)  # code, which is every other part, stays as it is
    parts[::2] = [LINK.sub(lambda found: turned(found, origin, here), part) for part in parts[::2]]
    return "".join(parts)


def turned(link: re.Match[str], origin: str, here: str) -> str:
    target, _, anchor = link["target"].partition("#")
    if not target or ":" in target or here.startswith("api/"):
        return link[0]
    area = PurePosixPath(here).stem
    if here == f"reference/{area}.md" and link["text"] in names_by_area().get(area, ()):
        return f"[{link['text']}]({area}/{link['text']}.md)"  # in the repository, a name links to its module
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    on_site = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if not on_site:
        return link["text"]
    relative = posixpath.relpath(on_site, posixpath.dirname(here) or ".")
    return f"{link['image']}[{link['text']}]({relative}{'#' * bool(anchor)}{anchor})"


# The API reference


def doors() -> list[str]:
    """Return the rooms whose front door offers something, as dotted names below the package."""
    found = {path.parent for path in PACKAGE.rglob("__init__.py*") if list(offered(path.parent))}
    return sorted(".".join(room.relative_to(PACKAGE).parts) for room in found - {PACKAGE})


def api_pages() -> dict[str, str]:
    """Return the text of each page by the room it is of, and of the index."""
    rooms = doors()
    home = {item: room for room in sorted(rooms, key=depth) for item in offered(room_folder(room))}
    for name in (name for names in names_by_area().values() for name in names):
        home[name, reference.definition(name)[0]] = "reference"
    pages = {room: api_page(room, home) for room in rooms}
    rows = [f"| [monolith.{room}]({room}.md) | {summary(room_folder(room))} |" for room in pages]
    index = "# API\n\nOne page for each room, with what its front door offers.\n\n| room | |\n|---|---|\n"
    return {"index": index + "\n".join(rows) + "\n", **pages}


def depth(room: str) -> int:
    return room.count(".")


def api_page(room: str, home: dict[tuple[str, str], str]) -> str:
    """Return a page with what a room offers; of a public name, or one that an inner room offers too, only a
    link to its page."""
    folder = room_folder(room)
    items = sorted(offered(folder))
    own = [f"::: {module}.{name}" for name, module in items if home[name, module] == room]
    passed_on = [f"[`{name}`][{module}.{name}]" for name, module in items if home[name, module] != room]
    also = [f"Also offered here: {', '.join(passed_on)}."] if passed_on else []
    return "\n\n".join([f"# monolith.{room}", docstring(folder), *also, *own]) + "\n"


def room_folder(room: str) -> Path:
    return PACKAGE.joinpath(*room.split("."))


def summary(folder: Path) -> str:
    return docstring(folder).partition("\n")[0]


def docstring(folder: Path) -> str:
    return (ast.get_docstring(door_of(folder)) or "").strip()


def door_of(folder: Path) -> ast.Module:
    return parsed(module_path(".".join(folder.relative_to(PACKAGE.parent).parts)))


def offered(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each public name that a front door offers, with the module that defines it."""
    for node in door_of(folder).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("monolith."):
            for alias in node.names:
                module = defined_in(node.module or "", alias.name)
                if module and not alias.name.startswith("_"):
                    yield alias.name, module
