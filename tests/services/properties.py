"""How many examples a property is tried with: some in `make test`, many in `make soak`."""

from __future__ import annotations

from hypothesis import settings

QUICK, THOROUGH = 15, 400


def register_profiles() -> None:
    """Register both, and use the quick one unless pytest is told --hypothesis-profile=thorough.

    Neither has a deadline: machines are slow at times.
    """
    settings.register_profile("quick", max_examples=QUICK, deadline=None)
    settings.register_profile("thorough", max_examples=THOROUGH, deadline=None)
    settings.load_profile("quick")


def tries(quick: int) -> int:
    """Return how many examples a slow property gets: so many, or as many times more as others get."""
    return quick * settings.default.max_examples // QUICK
