"""What goes through a writer is counted, and no bad row through a snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from monolith.errors import UnavailableError
from monolith.observe import Metrics
from monolith.runtime.publish_shard import CountedWriter
from monolith.sync import Delta, LearnedUpTo, LogPosition, Message, PublishState, ShardLog, TakeSnapshot
from monolith.sync.messages import SnapshotRows
from monolith.table import Rows


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.broken = False
        self.deltas: list[Delta] = []
        self.snapshot: TakeSnapshot | None = None

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:  # noqa: ARG002
        self.snapshot = snapshot

    def append(self, delta: Delta) -> None:
        if self.broken:
            raise UnavailableError("nobody is there")
        self.deltas.append(delta)

    def set_state(self, state: PublishState) -> None: ...
    def unfinished(self) -> None: ...
    def close(self) -> None: ...


ROWS = Rows(torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.ones(3, 4), torch.empty(3, 0))
LOG = ShardLog("r", (1, 2), LogPosition("e", 0), 1, {"item": 4})


def delta(**learned: float) -> Delta:
    removed = {"item": torch.tensor([7, 8])}
    stamps = LearnedUpTo(step=5, published_at=109.0, **learned)
    return Delta("r", (1, 2), LogPosition("e", 1), stamps, {"item": ROWS}, removed)


def said(metrics: Metrics) -> str:
    return metrics.render().decode()


def test_rows_bytes_and_stages_are_counted() -> None:
    metrics, inner = Metrics(), Kept()
    writer = CountedWriter(inner, metrics, 1)
    writer.open(LOG, lambda buckets=None: iter(()))  # noqa: ARG005
    writer.append(delta(event_at=100.0, read_at=102.0, trained_at=105.0))
    assert (writer.deltas, writer.rows, writer.bytes) == (1, 5, 3 * 8 + 3 * 8 + 3 * 16 + 2 * 8)
    text = said(metrics)
    assert 'monolith_publish_rows_total{share="1"} 5.0' in text
    assert 'monolith_publish_lag_seconds{share="1"} 9.0' in text
    for stage, seconds in (("read", 2.0), ("train", 3.0), ("publish", 4.0)):
        assert f'monolith_publish_stage_seconds_sum{{stage="{stage}"}} {seconds}' in text


def test_an_event_is_timed_once_and_an_unknown_one_is_not_timed() -> None:
    metrics = Metrics()
    writer = CountedWriter(Kept(), metrics, 0)
    for _ in range(2):
        writer.append(delta(event_at=100.0, trained_at=105.0))
    text = said(metrics)
    assert 'monolith_publish_stage_seconds_count{stage="publish"} 1.0' in text
    assert 'monolith_publish_stage_seconds_count{stage="read"} 0.0' in text


def test_what_the_channel_did_not_take_is_an_error_and_counted_as_nothing_else() -> None:
    metrics, inner = Metrics(), Kept()
    writer = CountedWriter(inner, metrics, 0)
    inner.broken = True
    with pytest.raises(UnavailableError):
        writer.append(delta())
    assert (writer.deltas, writer.errors) == (0, 1)
    assert 'monolith_publish_errors_total{share="0"} 1.0' in said(metrics)


def test_a_second_epoch_is_a_resync_and_holding_shows() -> None:
    metrics = Metrics()
    writer = CountedWriter(Kept(), metrics, 0)
    for _ in range(2):
        writer.open(LOG, lambda buckets=None: iter(()))  # noqa: ARG005
    writer.set_state(PublishState(paused=True))
    assert writer.resyncs == 1
    assert 'monolith_publish_resyncs_total{share="0"} 1.0' in said(metrics)
    assert 'monolith_publish_held{share="0"} 1.0' in said(metrics)


def test_a_snapshot_ends_where_something_is_wrong_with_it() -> None:
    inner = Kept()

    def snapshot(buckets: Tensor | None = None) -> Iterator[Message]:  # noqa: ARG001
        yield SnapshotRows("item", ROWS)
        yield SnapshotRows("user", ROWS)

    def problem(message: Message) -> str | None:
        return "a row is NaN" if isinstance(message, SnapshotRows) and message.table == "user" else None

    CountedWriter(inner, Metrics(), 0, problem=problem).open(LOG, snapshot)
    assert inner.snapshot is not None
    found = inner.snapshot()
    assert isinstance(next(found), SnapshotRows)
    with pytest.raises(UnavailableError, match="no snapshot for now: a row is NaN"):
        next(found)
