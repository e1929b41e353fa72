"""Deliberate bugs in the classes that are explored: a scenario that finds none of them shows nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any
from unittest import mock

from monolith.testing.interleavings import schedules_until_failure

MOST = 2_000
"""Schedules within which every deliberate bug is found."""


def check_found(
    scenario: Callable[[], object],
    modules: Iterable[ModuleType],
    owner: object,
    name: str,
    wrong: Callable[..., Any],
) -> None:
    """Fail unless the scenario fails with `wrong` in place of the attribute of that name."""
    with mock.patch.object(owner, name, wrong):
        found = schedules_until_failure(scenario, modules, most=MOST)
    assert found is not None, f"no schedule below {MOST} notices it"
    # Shown by pytest -rP: the figures of docs/simulation.md.
    print(f"found after {found} schedules")  # noqa: T201
