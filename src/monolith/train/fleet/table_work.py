"""What a chief has its servers do with their tables: hold a moment fast, write it, restore one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from monolith.checkpoint import RestoreOptions, SavedPart
from monolith.checkpoint.fitting import changes_to_json
from monolith.store import ServerGroup
from monolith.train.fleet.bodies import (
    CloseCut,
    OfCut,
    RestoreTables,
    TablesRestored,
    TablesWritten,
    WriteTables,
)
from monolith.train.fleet.calls import run_job
from monolith.wire.messages import write_message

A = TypeVar("A")


class TableWork:
    """Work on the tables of one run, by all servers at a time. Their answers come in order."""

    def __init__(self, group: ServerGroup, run: str) -> None:
        self._group = group
        self._run = run

    def cut(self, cut: str) -> None:
        """Have each server hold its tables fast as they are now."""
        self._group.call_all("tables.cut", **write_message(OfCut(self._run, cut)))

    def close_cut(self, cut: str | None, *, saved: bool) -> None:
        """Have each server let go of the tables it held fast; None for whatever it holds."""
        self._group.call_all("tables.close", **write_message(CloseCut(self._run, cut, saved)))

    def write(self, cut: str, prefix: str, *, full: bool) -> list[TablesWritten]:
        """Have each server write the tables it held fast.

        Raises:
            MonolithError: What one of them raised.
        """
        body = WriteTables(self._run, cut, prefix, full)
        return on_each(
            range(len(self._group)),
            lambda server: run_job(self._group, server, "tables.write", body, TablesWritten),
        )

    def restore(
        self, chain: Sequence[SavedPart], options: RestoreOptions, servers: Collection[int]
    ) -> list[TablesRestored]:
        """Have some servers restore their shares of the tables; see `write`."""
        saved = tuple((one.prefix, one.entry) for one in chain)
        body = RestoreTables(
            self._run, saved, options.optimizer_state, options.strict, changes_to_json(options.changes)
        )
        return on_each(
            servers, lambda server: run_job(self._group, server, "tables.restore", body, TablesRestored)
        )


def on_each(servers: Collection[int], call: Callable[[int], A]) -> list[A]:
    """Call servers at a time; return their answers in order, or raise the first error."""
    asked = {server: Future[A]() for server in servers}

    def ask(server: int) -> None:
        try:
            asked[server].set_result(call(server))
        except BaseException as error:
            asked[server].set_exception(error)

    # Threads of a pool would keep a process from ending that no longer waits for them.
    for server in servers:
        threading.Thread(target=ask, args=(server,), name="fleet-work", daemon=True).start()
    wait(asked.values())
    return [future.result() for future in asked.values()]
