"""Secrets: text that passes through configs, logs and messages without being seen."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "********"
"""Shown in place of a secret. As the value of a secret it is refused: it was copied from printed output."""

_SECRET_NAME = re.compile(
    r"token|secret|passw|auth|credential|private_?key|api_?key|access_?key", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"(\w+://[^/@\s:]+:)[^/@\s]+@")
_WHERE_IT_IS = re.compile(r"(file|path|dir|folder)$", re.IGNORECASE)


class Secret:
    """A password or token. Whatever prints it prints a mask; only `reveal` gives the text.

    No subclass of str, since joining, formatting and JSON would then show it.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, for code that sends or compares it."""
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
        raise TypeError("a secret cannot be pickled: the bytes would contain it")


def is_secret_name(name: str) -> bool:
    """Whether the value of a flag, a variable or a field with this name must not be shown.

    A name that ends in file, path, dir or folder is the location of a secret, and not a secret itself.
    """
    last = re.split(r"[.\[\]]|__", name.strip("-"))[-1].replace("-", "_")
    return bool(_SECRET_NAME.search(last)) and not _WHERE_IT_IS.search(last)


def looks_secret(text: str) -> bool:
    """Whether text may be a token that was put in a wrong place: long, and letters mixed with digits."""
    return bool(re.fullmatch(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/=_~-]{16,}", text)) and "/" not in text


def masked_words(words: Sequence[str]) -> list[str]:
    """Return a command line with a mask in place of every value of a flag whose name is of a secret.

    Also of `--set name=value`, and of a password inside of a URL.
    """
    shown: list[str] = []
    hiding = False
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and is_secret_name(name):
            shown.append(f"{name}={MASK}")
        elif hiding and not word.startswith("--"):
            shown.append(MASK)
        else:
            shown.append(_URL_PASSWORD.sub(rf"\1{MASK}@", word))
        if word.startswith("--"):
            hiding = not equals and is_secret_name(word)
    return shown


def masked(values: Any, name: str = "") -> Any:
    """Return plain values with a mask in place of each value with the name of a secret."""
    if isinstance(values, Mapping):
        return {key: masked(value, str(key)) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [masked(value, name) for value in values]
    if isinstance(values, str) and values and is_secret_name(name):
        return MASK
    return _URL_PASSWORD.sub(rf"\1{MASK}@", values) if isinstance(values, str) else values
