"""Names made from names: class names in snake case, and names that no other layer has."""

from __future__ import annotations

import re
import threading

_WORD_BEGINS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z0-9])")


def to_snake_case(name: str) -> str:
    """`TestFFMModel` as `test_ffm_model`; a leading underscore becomes `private_`."""
    snake = _WORD_BEGINS.sub("_", name).lower()
    return f"private{snake}" if snake.startswith("_") else snake


class UniqueNames:
    """Hands out each name once: `dense`, `dense_1`, `dense_2`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._given: set[str] = set()
        self._next: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """`name` if nobody has it yet, else `name` with the lowest number that is free."""
        with self._lock:
            candidate = name
            number = self._next.get(name, 1)
            while candidate in self._given:
                candidate = f"{name}_{number}"
                number += 1
            self._next[name] = number
            self._given.add(candidate)
            return candidate
