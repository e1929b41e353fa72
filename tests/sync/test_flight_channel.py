"""What is special to the delta channel over Flight: ports, and readers that come, go and stall."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from sync.delta_channels import Copy, SmallPublisher, until
from sync.sample_messages import make_delta

from monolith.errors import CorruptMessageError, RequestError, UnavailableError
from monolith.sync import Delta, LogPosition, Message, PublishState, ShardLog, SnapshotBegin, SnapshotEnd
from monolith.sync.flight_channel import AWAITED_S, IDLE_S, SERVICE, DeltaPort, ReaderLimits
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.wire.flight import Caller

pytest.importorskip("pyarrow.flight")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Seconds:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_port(
    stack: ExitStack, port: int = 0, *, clock: Any = time.monotonic, wall: Any = time.time, **limits: int
) -> DeltaPort:
    opened = DeltaPort(port=port, clock=clock, wall=wall, reader_limits=ReaderLimits(**limits))
    stack.callback(opened.close)
    return opened


def open_reader(stack: ExitStack, *addresses: str, **options: object) -> FlightDeltaReader:
    reader = FlightDeltaReader(addresses, **options)  # type: ignore[arg-type]
    stack.callback(reader.close)
    return reader


def test_one_port_serves_the_shares_of_several_models(stack: ExitStack) -> None:
    port = open_port(stack)
    of_a = SmallPublisher(port.writer("a"), epoch="a")
    of_b = [SmallPublisher(port.writer("b"), epoch=f"b{n}", shard=(n, 2)) for n in range(2)]
    for number, publisher in enumerate([of_a, *of_b]):
        publisher.publish([number])
    assert list(open_reader(stack, port.address).logs()) == []
    reader, copy = open_reader(stack, port.address, model="b"), Copy()
    assert [log.shard for log in reader.logs()] == [(0, 2), (1, 2)]
    copy.follow(reader, 1)
    assert copy.equals(of_b[1])


def test_shares_are_gathered_from_all_addresses(stack: ExitStack) -> None:
    ports = [open_port(stack) for _ in range(2)]
    publishers = [SmallPublisher(ports[n].writer(), epoch=f"e{n}", shard=(n, 2)) for n in range(2)]
    reader = open_reader(stack, ports[0].address, ports[1].address)
    assert [log.shard for log in reader.logs()] == [(0, 2), (1, 2)]
    for number, publisher in enumerate(publishers):
        publisher.publish([number])
        copy = Copy()
        copy.follow(reader, number)
        assert copy.equals(publisher)


def test_while_one_publisher_is_away_the_rest_is_followed(stack: ExitStack) -> None:
    here, gone = open_port(stack), open_port(stack)
    SmallPublisher(here.writer(), shard=(0, 2)).publish([0])
    gone.close()
    reader = open_reader(stack, here.address, gone.address)
    assert [log.shard for log in reader.logs()] == [(0, 2)]
    with pytest.raises(UnavailableError, match="shard 1"):
        list(reader.read(1, None, wait=0.0))
    with pytest.raises(UnavailableError, match="no publisher can be reached"):
        open_reader(stack, gone.address).logs()


def test_a_reader_resumes_with_a_publisher_that_was_restarted(stack: ExitStack) -> None:
    first = open_port(stack)
    publisher, copy = SmallPublisher(first.writer()), Copy()
    publisher.publish([1])
    reader = open_reader(stack, first.address)
    copy.follow(reader)
    first.close()
    with pytest.raises(UnavailableError):
        copy.follow(reader)
    second = open_port(stack, first.port)
    again = SmallPublisher(second.writer(), epoch="e2")
    again.publish([2])
    copy.follow(reader)
    assert copy.equals(again)


def test_a_waiting_reader_is_released_when_the_publisher_ends(stack: ExitStack) -> None:
    port = open_port(stack)
    publisher = SmallPublisher(port.writer())
    failed = threading.Event()
    reader = open_reader(stack, port.address)
    messages = reader.read(0, publisher.position, wait=60.0)
    assert isinstance(next(messages), PublishState)

    def follow() -> None:
        try:
            list(messages)
        except UnavailableError:
            failed.set()

    thread = threading.Thread(target=follow)
    thread.start()
    port.close()
    thread.join(60.0)
    assert failed.is_set()


def test_readers_are_bounded_and_those_that_leave_make_room(stack: ExitStack) -> None:
    clock = Seconds()
    port = open_port(stack, readers=2, clock=clock)
    SmallPublisher(port.writer())
    one, two, three = (open_reader(stack, port.address) for _ in range(3))
    one.logs()
    two.logs()
    with pytest.raises(UnavailableError, match="2 readers"):
        three.logs()
    one.close()
    three.logs()
    assert port.reader_count == 2
    clock.now += IDLE_S + 1  # two and three ask no more
    assert port.reader_count == 0


def test_readers_that_are_there_are_awaited_until_they_have_the_last_delta(stack: ExitStack) -> None:
    clock = Seconds()
    port = open_port(stack, clock=clock)
    writer = port.writer()
    publisher, copy, reader = SmallPublisher(writer), Copy(), open_reader(stack, port.address)
    publisher.publish([1])
    assert writer.unfinished() is None  # no reader is there
    copy.follow(reader)
    assert writer.unfinished() is None
    publisher.publish([2])
    found = writer.unfinished()
    assert found is not None
    assert found.by_readers
    copy.follow(reader)
    assert writer.unfinished() is None
    assert copy.equals(publisher)


def test_a_reader_that_is_silent_or_makes_no_progress_is_not_awaited(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Seconds()
    port = open_port(stack, clock=clock)
    writer = port.writer()
    publisher, silent, stuck = SmallPublisher(writer), Copy(), open_reader(stack, port.address)
    silent.follow(gone := open_reader(stack, port.address))
    position = publisher.position
    publisher.publish([1])
    list(stuck.read(0, position, wait=0.0))
    for _ in range(3):
        clock.now += AWAITED_S / 2
        next(stuck.read(0, position, wait=0.0))
    assert writer.unfinished() is None
    gone.close()
    port.close()
    assert "1 of its readers have not fetched the last delta" in caplog.text


def many_rows(publisher: SmallPublisher) -> SmallPublisher:
    publisher.publish(range(100))
    return publisher


def test_a_snapshot_comes_in_chunks_and_is_made_while_it_is_fetched(stack: ExitStack) -> None:
    port = open_port(stack, answer_bytes=2000)
    publisher = many_rows(SmallPublisher(port.writer()))
    made: list[Message] = []
    take = publisher.snapshot

    def counting(buckets: torch.Tensor | None = None) -> Iterator[Message]:
        for message in take(buckets):
            made.append(message)
            yield message

    publisher.writer.open(ShardLog("run", (0, 1), publisher.position, 2, {"item": 2}), counting)
    messages = open_reader(stack, port.address).read(0, None, wait=0.0)
    next(one for one in messages if isinstance(one, SnapshotBegin))
    assert len(made) < 50
    assert sum(isinstance(one, SnapshotEnd) for one in messages) == 1
    assert len(made) == 102


def test_concurrent_snapshots_are_bounded_and_one_that_is_never_fetched_is_given_up(stack: ExitStack) -> None:
    clock = Seconds()
    port = open_port(stack, snapshots=1, answer_bytes=2000, clock=clock)
    publisher = many_rows(SmallPublisher(port.writer()))
    slow = open_reader(stack, port.address).read(0, None, wait=0.0)
    next(one for one in slow if isinstance(one, SnapshotBegin))
    with pytest.raises(UnavailableError, match="1 snapshots"):
        list(open_reader(stack, port.address).read(0, None, wait=0.0))
    clock.now += IDLE_S + 1
    copy = Copy()
    copy.follow(open_reader(stack, port.address))
    assert copy.equals(publisher)
    with pytest.raises(UnavailableError, match="given up"):
        list(slow)


def test_a_reader_that_lost_an_answer_starts_another_snapshot_in_place_of_its_first(
    stack: ExitStack,
) -> None:
    """Otherwise a few broken connections would leave no snapshot for any reader until they are idle."""
    port = open_port(stack, snapshots=1, answer_bytes=2000)
    publisher = many_rows(SmallPublisher(port.writer()))
    reader = open_reader(stack, port.address)
    reader._fetch(0, "snapshot", stream="", chunk=0, buckets=None)  # and the connection breaks
    copy = Copy()
    copy.follow(reader)
    assert copy.equals(publisher)


def test_a_snapshot_of_an_epoch_that_ended_is_given_up(stack: ExitStack) -> None:
    port = open_port(stack, answer_bytes=2000)
    publisher = many_rows(SmallPublisher(port.writer()))
    slow = open_reader(stack, port.address).read(0, None, wait=0.0)
    next(one for one in slow if isinstance(one, SnapshotBegin))
    publisher.open("e2")
    with pytest.raises(UnavailableError, match="given up"):
        list(slow)


def test_the_answer_to_a_chunk_may_be_lost_and_asked_for_again(stack: ExitStack) -> None:
    port = open_port(stack, answer_bytes=2000)
    many_rows(SmallPublisher(port.writer()))
    body = {"reader": "r", "model": "", "share": 0, "stream": "", "chunk": 0, "buckets": None}
    with Caller(SERVICE, port.address) as caller:
        first = caller.fetch({"ask": "snapshot", "body": body})
        stream = first.schema.metadata[b"monolith.delta"].decode().split('"')[-2]
        again = caller.fetch({"ask": "snapshot", "body": {**body, "stream": stream}})
        assert again.equals(first)
        with pytest.raises(UnavailableError, match="chunk 5"):
            caller.fetch({"ask": "snapshot", "body": {**body, "stream": stream, "chunk": 5}})


@pytest.mark.parametrize(
    "ticket",
    [
        {},
        {"ask": "everything"},
        {"ask": "deltas"},
        {
            "ask": "deltas",
            "body": {"reader": "r", "model": "", "share": -1, "after": None, "state": 0, "wait": 0},
        },
        {
            "ask": "deltas",
            "body": {"reader": "", "model": "", "share": 0, "after": None, "state": 0, "wait": 0},
        },
        {
            "ask": "snapshot",
            "body": {"reader": "r", "model": "", "share": 0, "stream": "", "chunk": 0, "buckets": [5000]},
        },
    ],
)
def test_a_ticket_that_makes_no_sense_is_refused(stack: ExitStack, ticket: dict[str, object]) -> None:
    port = open_port(stack)
    SmallPublisher(port.writer())
    with Caller(SERVICE, port.address) as caller, pytest.raises(RequestError):
        caller.fetch(ticket)


def test_a_frame_over_the_limit_is_no_message(stack: ExitStack) -> None:
    port = open_port(stack)
    publisher = SmallPublisher(port.writer())
    publisher.publish(range(1000))
    reader = open_reader(stack, port.address, limit=1000)
    with pytest.raises(CorruptMessageError, match="allowed"):
        list(reader.read(0, LogPosition("e1", 0), wait=0.0))


def test_the_log_is_bounded_in_bytes_for_every_reader(stack: ExitStack) -> None:
    port = open_port(stack)
    writer = port.writer(log_bytes=5_000)
    publisher, copy = SmallPublisher(writer), Copy()
    reader = open_reader(stack, port.address)
    copy.follow(reader)
    for number in range(100):
        publisher.publish([number])
        assert writer.log.stored_bytes <= 5_000
    copy.follow(reader)
    assert copy.equals(publisher)
    assert copy.snapshots == 2


@pytest.mark.parametrize("ahead", [86_400.0, -86_400.0])
def test_a_reader_measures_how_far_the_clock_of_a_publisher_is_from_its_own(
    stack: ExitStack, ahead: float
) -> None:
    port = open_port(stack, wall=lambda: 5000.0 + ahead)
    SmallPublisher(port.writer())
    (log,) = open_reader(stack, port.address, wall=lambda: 5000.0).logs()
    assert log.clock_offset == pytest.approx(ahead, abs=1.0)


def test_what_comes_is_there_at_once_for_a_reader_that_waits(stack: ExitStack) -> None:
    port = open_port(stack)
    publisher = SmallPublisher(port.writer())
    reader, found = open_reader(stack, port.address), threading.Event()

    def follow() -> None:
        if any(isinstance(one, Delta) for one in reader.read(0, publisher.position, wait=60.0)):
            found.set()

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: port.reader_count == 1, lambda: threading.Event().wait(0.01))
    publisher.writer.append(make_delta(1))
    assert found.wait(60.0)
    port.close()
    thread.join(60.0)
