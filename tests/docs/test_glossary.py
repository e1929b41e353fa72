"""docs/glossary.md: one line per word, in the order of the alphabet."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
WORDS = re.findall(r"^\| \*\*([^*]+)\*\* \|", PAGE, flags=re.MULTILINE)


def test_words_are_in_order_and_there_once() -> None:
    assert len(WORDS) > 50
    assert sorted(set(WORDS), key=str.lower) == WORDS


def test_a_word_that_explains_another_is_explained_itself() -> None:
    used = set(re.findall(r"\*\*([^*]+)\*\*", PAGE))
    assert used - set(WORDS) == set()
