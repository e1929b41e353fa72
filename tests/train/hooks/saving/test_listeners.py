"""Listeners that hear half of a save."""

from __future__ import annotations

import pytest

from monolith.train.hooks import AfterSaveListener, BeforeSaveListener, SaveListener


class Ear(SaveListener):
    def __init__(self, stop: bool | None = None) -> None:
        self.heard: list[str] = []
        self.stop = stop

    def begin(self) -> None:
        self.heard.append("begin")

    def before_save(self, step: int) -> None:
        self.heard.append(f"before {step}")

    def after_save(self, step: int) -> bool | None:
        self.heard.append(f"after {step}")
        return self.stop

    def end(self) -> None:
        self.heard.append("end")


def hear_all(listener: SaveListener) -> bool | None:
    listener.begin()
    listener.before_save(7)
    stop = listener.after_save(7)
    listener.end()
    return stop


def test_a_listener_that_overrides_nothing_does_nothing():
    assert hear_all(SaveListener()) is None


def test_the_half_before_a_save():
    ear = Ear(stop=True)
    assert hear_all(BeforeSaveListener(ear)) is None
    assert ear.heard == ["begin", "before 7", "end"]


@pytest.mark.parametrize("stop", [True, False, None])
def test_the_half_after_a_save_and_its_wish_to_stop(stop):
    ear = Ear(stop=stop)
    assert hear_all(AfterSaveListener(ear)) is stop
    assert ear.heard == ["begin", "after 7", "end"]
