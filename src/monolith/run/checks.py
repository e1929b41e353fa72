"""Checks that many fields share. Each yields the problems of the fields it is given by name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from monolith.config import Problem


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
