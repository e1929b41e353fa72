"""Listeners: what else happens around a save.

Tables, filters, exports and barriers each have something to do when a checkpoint is cut or is
safe on disk. They listen; the save hook decides when, and what an error of theirs means.

A run saves rows, weights and positions as parts of one checkpoint and needs no listener for them. Give those
of your own to a `Trainer`, or to a `SaveHook` that you make.
"""

from __future__ import annotations


class SaveListener:
    """A listener that does nothing; override what it should hear of."""

    trouble = ""
    """What failed in its last attempt, for a person; empty if nothing did. The next save tries it again, or
    `retry` at the end of a run."""

    def begin(self) -> None:
        """Once, before any state exists."""

    def before_save(self, step: int) -> None:
        """The state of this step is about to be cut; on the training thread."""

    def after_save(self, step: int) -> bool | None:  # noqa: ARG002
        """The checkpoint of this step is on disk; True asks the run to stop.

        Runs on the thread that wrote it, which is not the training thread where saving is asynchronous.
        """
        return None

    def retry(self) -> None:
        """Try again what `trouble` names: the run ends, and there is no next save that would."""

    def end(self) -> None:
        """Once, when the run ends well, after the final save."""


class BeforeSaveListener(SaveListener):
    """Lets a listener hear of the time before a save only."""

    def __init__(self, listener: SaveListener) -> None:
        self._listener = listener

    def begin(self) -> None:
        self._listener.begin()

    def before_save(self, step: int) -> None:
        self._listener.before_save(step)

    def end(self) -> None:
        self._listener.end()


class AfterSaveListener(SaveListener):
    """Lets a listener hear of the time after a save only."""

    def __init__(self, listener: SaveListener) -> None:
        self._listener = listener

    def begin(self) -> None:
        self._listener.begin()

    def after_save(self, step: int) -> bool | None:
        return self._listener.after_save(step)

    def end(self) -> None:
        self._listener.end()
