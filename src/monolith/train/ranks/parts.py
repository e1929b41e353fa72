"""What a checkpoint of ranks is made of: the same as that of one process or of servers, who can restore it.

Every rank writes and reads its share of the rows, all at a time, at paths that all reach; rank 0 writes the
weights, which all have alike, and the one manifest that makes it a checkpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

from monolith import filesystem
from monolith.checkpoint import DensePart, RestoreOptions, SavedPart, TablesPart, merge_entries
from monolith.checkpoint.fitting import changes_from_json, changes_to_json
from monolith.checkpoint.part import Entry, PartCut
from monolith.checkpoint.report import RestoreReport
from monolith.errors import ClusterError, SaveError
from monolith.store.rank_calls import RankCalls
from monolith.train.fleet.bodies import TablesRestored
from monolith.train.ranks.words import CloseRankCut, CutRank, RestoreRank, WriteRankCut
from monolith.wire.messages import Json, read_message, write_message


class RankShare:
    """The tables of this rank, as rank 0 has them cut, written and restored. From any thread.

    Args:
        part: This rank's share of the tables.
        rows: Returns how many rows each table of this rank has.
        model_dir: Below which it writes.
    """

    def __init__(
        self, calls: RankCalls, part: TablesPart, rows: Callable[[], dict[str, int]], model_dir: str
    ) -> None:
        self._part = part
        self._rows = rows
        self._model_dir = model_dir
        self._cuts: dict[str, PartCut] = {}
        calls.offer(
            {
                "tables.cut": lambda body: self._cut(read_message(CutRank, body)),
                "tables.write": lambda body: self._write(read_message(WriteRankCut, body)),
                "tables.close": lambda body: self._close(read_message(CloseRankCut, body)),
                "tables.restore": lambda body: self._restore(read_message(RestoreRank, body)),
            }
        )

    def _cut(self, body: CutRank) -> dict[str, Json]:
        self._cuts[body.cut] = self._part.cut(0)
        return {}

    def _write(self, body: WriteRankCut) -> dict[str, Json]:
        cut = self._cuts.get(body.cut)
        if cut is None:
            raise ClusterError("cannot write tables: this rank holds no such moment")
        if not self._model_dir or not filesystem.is_below(body.prefix, self._model_dir):
            raise SaveError(
                f"this rank writes only below the model_dir of its run, {self._model_dir!r}. Start all ranks "
                "with the same model_dir."
            )
        return cut.write(body.prefix, full=body.full)

    def _close(self, body: CloseRankCut) -> dict[str, Json]:
        cut = self._cuts.pop(body.cut, None)
        if cut is not None:
            cut.close(saved=body.saved)
        return {}

    def _restore(self, body: RestoreRank) -> dict[str, Json]:
        report = self._part.restore(
            [SavedPart(prefix, entry) for prefix, entry in body.chain],
            RestoreOptions(
                optimizer_state=body.optimizer_state,
                strict=body.strict,
                changes=changes_from_json(body.changes),
            ),
        )
        rows = {f"table {name}": many for name, many in self._rows().items()}
        return write_message(TablesRestored.of(report, rows))


class RankTables:
    """The tables of all ranks, as the part of a checkpoint that rank 0 makes."""

    name = "tables"

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls

    def cut(self, step: int) -> PartCut:  # noqa: ARG002
        cut = _RankCut(self._calls, secrets.token_hex(8))
        try:
            self._calls.ask_all("tables.cut", write_message(CutRank(cut=cut.name)))
        except BaseException:
            cut.close(saved=False)
            raise
        return cut

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        saved = tuple((one.prefix, one.entry) for one in chain)
        body = RestoreRank(
            chain=saved,
            optimizer_state=options.optimizer_state,
            strict=options.strict,
            changes=changes_to_json(options.changes),
        )
        found = [
            read_message(TablesRestored, answer)
            for answer in self._calls.ask_all("tables.restore", write_message(body))
        ]
        rows = {name: sum(one.rows[name] for one in found) for name in found[0].loaded}
        loaded = {name: f"{many:,} rows on {len(found)} ranks" for name, many in rows.items()}
        return replace(RestoreReport().merge(*(one.report() for one in found)), loaded=loaded)


class _RankCut:
    def __init__(self, calls: RankCalls, name: str) -> None:
        self._calls = calls
        self.name = name
        self._closed = False

    def write(self, prefix: str, *, full: bool) -> Entry:
        body = WriteRankCut(cut=self.name, prefix=prefix, full=full)
        return merge_entries(self._calls.ask_all("tables.write", write_message(body)))

    def close(self, *, saved: bool) -> None:
        if not self._closed:
            self._closed = True
            # A moment that was not saved is of no use, and a rank that is gone holds it no more.
            with nullcontext() if saved else suppress(ClusterError):
                self._calls.ask_all("tables.close", write_message(CloseRankCut(cut=self.name, saved=saved)))


class RankDense:
    """The weights, which are the same on all ranks, with the buffers of all of them."""

    name = "dense"

    def __init__(self, inner: DensePart, merged: Callable[[], AbstractContextManager[None]]) -> None:
        self._inner = inner
        self._merged = merged

    def cut(self, step: int) -> PartCut:
        with self._merged():
            return self._inner.cut(step)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        return self._inner.restore(chain, options)
