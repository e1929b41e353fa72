"""What the log of a shard keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from monolith.errors import UnavailableError
from monolith.sync import (
    Delta,
    DeltaLog,
    LearnedUpTo,
    LogPosition,
    Message,
    PublishState,
    ShardLog,
    delta_bytes,
)


def no_rows(_: Tensor | None = None) -> Iterator[Message]:
    return iter(())


def opened(limit_bytes: int = 1 << 20, epoch: str = "a") -> DeltaLog:
    log = DeltaLog(limit_bytes)
    log.open(ShardLog("run", (0, 1), LogPosition(epoch, 0), 1, {"item": 2}), no_rows)
    return log


def delta(sequence: int, *, epoch: str = "a", ids: int = 0) -> Delta:
    removed = {"item": torch.arange(ids)} if ids else {}
    return Delta("run", (0, 1), LogPosition(epoch, sequence), LearnedUpTo(), removed=removed)


def kept(log: DeltaLog, after: LogPosition | None) -> list[int] | None:
    deltas = log.after(after)
    return None if deltas is None else [one.position.sequence for one in deltas]


def test_a_reader_gets_what_comes_after_its_position() -> None:
    log = opened()
    for sequence in (1, 2, 3):
        log.append(delta(sequence))
    assert kept(log, LogPosition("a", 0)) == [1, 2, 3]
    assert kept(log, LogPosition("a", 2)) == [3]
    assert kept(log, LogPosition("a", 3)) == []


def test_a_reader_without_a_position_or_of_another_epoch_needs_a_snapshot() -> None:
    log = opened()
    log.append(delta(1))
    assert kept(log, None) is None
    assert kept(log, LogPosition("b", 1)) is None
    assert kept(log, LogPosition("a", 5)) is None, "a position that was never reached"


def test_the_oldest_go_where_all_take_too_many_bytes() -> None:
    size = delta_bytes(delta(1, ids=100))
    log = opened(limit_bytes=3 * size)
    for sequence in range(1, 6):
        log.append(delta(sequence, ids=100))
    assert log.stored_bytes == 3 * size
    assert log.log is not None
    assert (log.log.oldest, log.log.newest.sequence) == (3, 5)
    assert kept(log, LogPosition("a", 2)) == [3, 4, 5]
    assert kept(log, LogPosition("a", 1)) is None


def test_a_delta_larger_than_the_bound_is_not_kept() -> None:
    log = opened(limit_bytes=300)
    log.append(delta(1, ids=1000))
    assert log.stored_bytes == 0
    assert kept(log, LogPosition("a", 0)) is None
    assert kept(log, LogPosition("a", 1)) == []


def test_a_delta_handed_in_again_is_there_once() -> None:
    log = opened()
    log.append(delta(1))
    log.append(delta(1))
    assert kept(log, LogPosition("a", 0)) == [1]


@pytest.mark.parametrize("wrong", [delta(2), delta(1, epoch="b")])
def test_a_delta_that_does_not_follow_is_refused(wrong: Delta) -> None:
    log = opened()
    with pytest.raises(UnavailableError, match="new epoch"):
        log.append(wrong)


def test_a_new_epoch_begins_empty() -> None:
    log = opened()
    log.append(delta(1))
    log.open(ShardLog("run", (0, 1), LogPosition("b", 0), 1, {}), no_rows)
    assert kept(log, LogPosition("a", 1)) is None
    assert kept(log, LogPosition("b", 0)) == []
    assert log.stored_bytes == 0


def test_an_older_state_does_not_replace_a_newer_one() -> None:
    log = opened()
    log.set_state(PublishState(paused=True, number=5))
    log.set_state(PublishState(paused=False, number=4))
    assert log.state.paused


def test_a_reader_waits_for_what_is_new() -> None:
    log = opened()
    assert not log.wait(LogPosition("a", 0), 0, timeout=0)
    thread = threading.Thread(target=log.append, args=(delta(1),))
    thread.start()
    assert log.wait(LogPosition("a", 0), 0, timeout=60)
    thread.join()
    log.set_state(PublishState(number=9))
    assert log.wait(LogPosition("a", 1), 0, timeout=60)


def test_a_log_that_is_closed_or_was_never_opened_cannot_be_read() -> None:
    log = DeltaLog()
    with pytest.raises(UnavailableError, match="no publisher now"):
        log.after(None)
    log = opened()
    log.close()
    assert log.log is None
    assert log.wait(LogPosition("a", 0), 0, timeout=60), "who waits is let go"
    with pytest.raises(UnavailableError, match="no publisher now"):
        log.snapshot()
