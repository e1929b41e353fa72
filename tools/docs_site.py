"""What the documentation site has beyond `docs/`, as a hook of mkdocs.

- Pages that people look for in the repository (`OUTSIDE`) are part of the site, and links between them and
  `docs/` lead there. A link to any other file of the repository becomes plain text: the site has no copy.
- The API reference: one page for each room with a front door, with what the door offers. A lazy door
  keeps its names in a stub, `__init__.pyi`, so pages are written from the stub where there is one.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

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
    config.nav = [*(config.nav or []), {"API": [f"api/{room}.md" for room in ["index", *doors()]]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for origin, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text(encoding="utf-8")))
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
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    page = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if not page:
        return link["text"]
    relative = posixpath.relpath(page, posixpath.dirname(here) or ".")
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
    pages = {room: api_page(room, home) for room in rooms}
    rows = [f"| [monolith.{room}]({room}.md) | {summary(room_folder(room))} |" for room in pages]
    index = "# API\n\nOne page for each room, with what its front door offers.\n\n| room | |\n|---|---|\n"
    return {"index": index + "\n".join(rows) + "\n", **pages}


def depth(room: str) -> int:
    return room.count(".")


def api_page(room: str, home: dict[tuple[str, str], str]) -> str:
    """Return a page with what a room offers; of what an inner room offers too, only a link to its page."""
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
    stub = folder / "__init__.pyi"
    path = stub if stub.exists() else folder / "__init__.py"
    return parsed(path)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def offered(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each public name that a front door offers, with the module that defines it."""
    for node in door_of(folder).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("monolith."):
            for alias in node.names:
                module = defined_in(node.module or "", alias.name)
                if module and not alias.name.startswith("_"):
                    yield alias.name, module


def defined_in(module: str, name: str) -> str | None:
    """Follow imports to the module that defines a class, function or constant; None if there is none."""
    place = ROOT.joinpath("src", *module.split("."))
    if not place.is_dir() and not place.with_suffix(".py").exists():
        return None  # of the compiled core
    source = door_of(place) if place.is_dir() else parsed(place.with_suffix(".py"))
    for node in source.body:
        match node:
            case ast.ImportFrom(module=str(origin), names=names) if name in [alias.name for alias in names]:
                return defined_in(origin, name)
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return module
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)):
                if found == name:
                    return module
    return None
