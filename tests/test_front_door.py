"""A room's front door: what it lists, it has, and nothing is imported before somebody asks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import monolith
import monolith.store
import monolith.train

SOURCE = Path(monolith.__file__).parent
ROOMS = sorted(
    ".".join(["monolith", *path.parent.relative_to(SOURCE).parts]) for path in SOURCE.rglob("__init__.pyi")
)


def python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_every_name_it_lists(room: str) -> None:
    module = __import__(room, fromlist=["__all__"])
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


def test_going_past_a_door_does_not_import_torch() -> None:
    doors = ", ".join(ROOMS)
    assert python(f"import sys, {doors}; print('torch' in sys.modules)") == "False\n"


def test_a_module_is_imported_when_one_of_its_names_is_used() -> None:
    program = """
import sys
from monolith.front_door import module_when_used
wave = module_when_used("wave")
print("wave" in sys.modules, wave.WAVE_FORMAT_PCM, "wave" in sys.modules)
"""
    assert python(program) == "False 1 True\n"


def test_all_names_may_be_asked_for_at_once() -> None:
    names: dict[str, object] = {}
    exec("from monolith.store import *", names)
    assert names.keys() >= set(monolith.store.__all__) >= {"LocalStore"}


def test_a_name_that_is_not_there_is_said_as_python_says_it() -> None:
    with pytest.raises(AttributeError, match=r"module .monolith\.train. has no attribute 'Trainr'"):
        monolith.train.Trainr  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_of_a_door_is_a_module_behind_it(room: str) -> None:
    # Importing the module would put it in the place of the name.
    folder = SOURCE.joinpath(*room.split(".")[1:])
    modules = {path.stem for path in folder.iterdir()}
    assert modules.isdisjoint(__import__(room, fromlist=["__all__"]).__all__)
