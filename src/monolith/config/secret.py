"""Secrets: text that passes through configs, logs and messages without being seen."""

from __future__ import annotations

import hmac

MASK = "********"
"""What is shown in place of a secret. Read as a secret it is refused: somebody copied what was printed."""


class Secret:
    """A password or token. Whatever prints it prints a mask; only `reveal` gives the text.

    No subclass of str, since joining, formatting and JSON would then show it.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text. For whoever sends or compares it, and nobody else."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        return MASK

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled: whoever reads the bytes would read it")
