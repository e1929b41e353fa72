"""Restoring, in order: who is called when a run starts from a checkpoint, and what is left alone.

When some parameter servers died and others did not, only the new ones load the
checkpoint: the survivors are ahead of it, and rolling them back would lose what they
learned. Which is which, only the servers know, so the flag lives with each of them and
dies with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol


class RestoreListener:
    """Called around a restore. The work belongs into `before_restore`: its order is the listeners'."""

    def begin(self) -> None:
        """Once, before any state exists or is asked for."""

    def before_restore(self) -> None:
        """Restore what is yours; those before you in the list have restored theirs."""

    def after_restore(self) -> None:
        """Everybody has restored."""

    def end(self) -> None:
        """The restore is over, well or not; called if `begin` was."""


def run_restore(listeners: Iterable[RestoreListener]) -> None:
    """Call every listener's `begin`, then every `before_restore`, then every `after_restore`, in order.

    Once per start, never per step. Each listener that was begun is ended, whatever failed;
    the first failure is raised when they have been.
    """
    listed = tuple(listeners)
    begun: list[RestoreListener] = []
    failures: list[BaseException] = []
    try:
        for listener in listed:
            begun.append(listener)
            listener.begin()
        for listener in listed:
            listener.before_restore()
        for listener in listed:
            listener.after_restore()
    except BaseException as failure:
        failures.append(failure)
    for listener in begun:
        try:
            listener.end()
        except Exception as failure:
            failures.append(failure)
    if failures:
        for further in failures[1:]:
            failures[0].add_note(f"then, while ending listeners: {type(further).__name__}: {further}")
        raise failures[0]


class ShardFlag(Protocol):
    """A flag kept by one server; a `threading.Event` is one. It is down when the server starts."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


class InitializedShards:
    """Which servers hold live state.

    Args:
        flags: Device -> the flag that its server keeps.
    """

    def __init__(self, flags: Mapping[str, ShardFlag]) -> None:
        self._flags = dict(flags)

    def uninitialised(self, device: str) -> bool:
        """Whether what is on `device` has yet to be restored. What is on no server always has."""
        return device not in self._flags or not self._flags[device].is_set()

    def mark_all(self) -> None:
        """Raise all flags; for the chief, once the restore is complete."""
        for flag in self._flags.values():
            flag.set()

    def restorable(self, device_of: Callable[[str], str]) -> Callable[[str], bool]:
        """Return what restore functions take as `only`: whether a name is on an uninitialised device.

        Each device is asked once, at its first name, so that one restore sees one answer.
        """
        answers: dict[str, bool] = {}

        def only(name: str) -> bool:
            device = device_of(name)
            if device not in answers:
                answers[device] = self.uninitialised(device)
            return answers[device]

        return only
