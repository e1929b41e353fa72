"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_first_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)
    assert tuple(names["embeddings"].shape) == (3, 16)  # type: ignore[attr-defined]
    assert len(names["item"]) == 0  # type: ignore[arg-type]  # all expired
