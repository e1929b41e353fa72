from __future__ import annotations

import pytest


@pytest.fixture(params=[200, pytest.param(5_000, marks=pytest.mark.soak)])
def schedules(request: pytest.FixtureRequest) -> int:
    """How many schedules a scenario is explored with: some in `make test`, many in `make soak`. They are the
    same in every run."""
    return int(request.param)
