"""Restoring in order: the listeners of a restore, and which parameter servers are left alone.

If some parameter servers were replaced and some survived, only the new ones load the checkpoint: the
survivors are ahead of it, and rolling them back would lose updates. Only a server knows which it is, so each
has a flag in its own process, which is lost with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from monolith import concurrency


class RestoreListener:
    """Called around a restore. The work belongs into `before_restore`, which is called in the listeners'
    order."""

    def begin(self) -> None:
        """Called once, before any state exists or is asked for."""

    def before_restore(self) -> None:
        """Restore the listener's own state; the listeners before it have restored theirs."""

    def after_restore(self) -> None:
        """Called when all listeners have restored."""

    def end(self) -> None:
        """Called at the end, also after a failure, if `begin` was."""


def run_restore(listeners: Iterable[RestoreListener]) -> None:
    """Call every listener's `begin`, then every `before_restore`, then every `after_restore`, in order.

    Once per start, never per step. Each listener whose `begin` was called is ended, whatever failed; then the
    first failure is raised.
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


class InitializedShards:
    """Which servers have live state.

    Args:
        flags: Device -> the flag of its server, which is not set when the server starts.
    """

    def __init__(self, flags: Mapping[str, concurrency.Event]) -> None:
        self._flags = dict(flags)

    def uninitialised(self, device: str) -> bool:
        """Whether the state on `device` must be restored; always true for a device without a server."""
        return device not in self._flags or not self._flags[device].is_set()

    def mark_all(self) -> None:
        """Set all flags; for the chief, once the restore is complete."""
        for flag in self._flags.values():
            flag.set()

    def restorable(self, device_of: Callable[[str], str]) -> Callable[[str], bool]:
        """Return the `only` of `DenseSelection`: whether a name is on an uninitialised device.

        Each device is asked once, at its first name, so that one restore uses one answer.
        """
        answers: dict[str, bool] = {}

        def only(name: str) -> bool:
            device = device_of(name)
            if device not in answers:
                answers[device] = self.uninitialised(device)
            return answers[device]

        return only
