"""The bugs of `planted` fit the modules they are planted in: what finds them is in docs/simulation.md."""

from __future__ import annotations

import pytest
from simulation.planted import PLANTED


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_one_place_of_a_module(name: str) -> None:
    compile(PLANTED[name].text(), PLANTED[name].file, "exec")
