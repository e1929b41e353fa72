"""The order in which hooks hear of a run, and what an error in one of them does to the others."""

from __future__ import annotations

import pytest
from train.runs import FakeRun

from monolith.train.hook import Hook, TrainingRun, drive


class Noting(Hook):
    def __init__(self, name: str, told: list[str], *, error: Exception | None = None) -> None:
        self._name, self._told, self._error = name, told, error

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._told.append(f"{self._name} ends")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._told.append(f"{self._name} closes")


class Essential(Noting):
    essential = True


def test_an_error_at_the_end_is_raised_when_all_hooks_have_ended_and_closed() -> None:
    told: list[str] = []
    hooks = [Noting("metrics", told, error=ValueError("no")), Essential("save", told)]
    with pytest.raises(ValueError, match="no"):
        drive(FakeRun(), hooks, step=lambda: None)
    assert told == ["metrics ends", "save ends", "metrics closes", "save closes"]


def test_an_error_of_an_essential_hook_ends_the_run_before_it_is_saved() -> None:
    told: list[str] = []
    hooks = [Essential("updates", told, error=ValueError("lost")), Essential("save", told)]
    with pytest.raises(ValueError, match="lost"):
        drive(FakeRun(), hooks, step=lambda: None)
    assert told == ["updates ends", "updates closes", "save closes"]
