"""The front door of a room: its names are imported when they are first used.

`monolith checkpoint list` reads a few small files, and must not wait for torch because the room it
knocks at could also restore a model. So the `__init__.py` of a room that needs torch says only

    __getattr__, __dir__ = open_when_asked(__name__)

and the `__init__.pyi` next to it lists what the room offers and where that lives: for type checkers,
editors and this module alike.

Likewise `torch = module_when_used("torch")` stands for a module that only some functions of another need:
who reads what a file says of itself should not wait for what makes tensors of it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def open_when_asked(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names stand in its `__init__.pyi`."""

    @cache
    def offered() -> dict[str, str]:
        # What loaded the package has the stub, too. Not importlib.resources, which takes longer to import
        # than all of `import monolith` besides.
        module: Any = sys.modules[package]
        stub = ast.parse(module.__spec__.loader.get_data(f"{module.__file__}i"))
        imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
        return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name == "__all__":
            return sorted(offered())
        if name.startswith("__") or name not in offered():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(offered()[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return get, lambda: sorted({*offered(), *vars(sys.modules[package])})


def module_when_used(name: str) -> ModuleWhenUsed:
    """Return what stands for a module, and imports it when its first name is asked for."""
    return ModuleWhenUsed(name)


class ModuleWhenUsed:
    """Has the names of a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
