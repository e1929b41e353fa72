"""The problems of a config: all of them, not only the first.

A config that derives from `Checked` lists its problems, each with the fields it is about. The reader of
files and flags then continues without those fields, and reports all other problems, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from monolith.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    fields: tuple[str, ...]
    """Dotted paths, below the config that has the problem, of every field it was told by."""
    text: str
    """The rest of a sentence that begins with the fields."""

    def __str__(self) -> str:
        return f"{' and '.join(self.fields)}: {self.text}"


class ConfigProblemsError(ConfigError):
    """A config with one or more problems."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{name}: {count}" + "".join(f"\n  - {problem}" for problem in problems))
        self.problems = tuple(problems)


class UnreadableConfigError(ConfigError):
    """What files, flags or plain data say makes no config.

    Attributes:
        texts: What is wrong, each with its key path.
    """

    def __init__(self, what: str, texts: Sequence[str]) -> None:
        count = "one problem" if len(texts) == 1 else f"{len(texts)} problems"
        super().__init__(f"cannot read {what}: {count}" + "".join(f"\n  - {text}" for text in texts))
        self.texts = tuple(texts)


def problems_in(fields: tuple[str, ...], error: ConfigError) -> Iterator[Problem]:
    """Yield what is wrong with a part of a config that is read on its own, each as a problem of the whole.

    Args:
        fields: Of the whole, that the part was made of.
    """
    for text in error.texts if isinstance(error, UnreadableConfigError) else [str(error)]:
        yield Problem(fields, text)


class Checked:
    """Base of a config that refuses to be built while it has problems, and names them all."""

    __slots__ = ()

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong. The fields have their types already, where they come from a file or flags."""
        yield from ()

    def __post_init__(self) -> None:
        found = tuple(self.problems())
        if found:
            raise ConfigProblemsError(type(self).__name__, found)


def not_negative(config: object, *names: str) -> Iterator[Problem]:
    """Fields that must be None or at least 0."""
    yield from at_least(0, config, *names)


def at_least(least: int, config: object, *names: str) -> Iterator[Problem]:
    """Fields that must be None or at least so many; a duration counts in seconds."""
    for name in names:
        given = getattr(config, name)
        if given is None:
            continue
        number = given.total_seconds() if isinstance(given, timedelta) else given
        if number < least:
            yield Problem((name,), f"must be at least {least}, got {given}")


def at_most_one(config: object, *names: str) -> Iterator[Problem]:
    """Fields of which no two may be set."""
    given = tuple(name for name in names if getattr(config, name) is not None)
    if len(given) > 1:
        yield Problem(given, "only one of them may be set")
