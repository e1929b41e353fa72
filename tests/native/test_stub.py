"""The core's type stub, which `python -m nanobind.stubgen` writes, is that of the core as built."""

from __future__ import annotations

import ast
from pathlib import Path

import monolith.native
from monolith.native import _core


def _members(body: list[ast.stmt]) -> dict[str, set[str]]:
    """Public names of a stub to the public names inside each."""
    found: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            inside = _members(node.body) if isinstance(node, ast.ClassDef) else {}
            found.setdefault(node.name, set()).update(inside)
    return found


def test_the_stub_and_the_core_have_the_same_names() -> None:
    stub = _members(ast.parse((Path(monolith.native.__file__).parent / "_core.pyi").read_text()).body)
    built = {name: getattr(_core, name) for name in vars(_core) if not name.startswith("_")}
    assert set(stub) == set(built)
    for name, members in stub.items():
        defined = {member for member in vars(built[name]) if not member.startswith("_")} if members else set()
        assert members <= defined, name


def test_the_front_door_offers_all_of_the_core() -> None:
    assert set(monolith.native.__all__) == {name for name in vars(_core) if not name.startswith("_")}
