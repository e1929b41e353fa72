"""Channels by their URLs: which one it is, what is refused, and who is found by discovery."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import pytest
from sync.delta_channels import Copy, SmallPublisher, until

from monolith.cluster.addresses import Address
from monolith.cluster.discovery import MemoryDiscovery
from monolith.cluster.security import SecurityConfig, guard_caller, guard_listener
from monolith.config import Secret
from monolith.errors import ConfigError, ListenError, UnavailableError
from monolith.sync.channel_url import (
    ChannelUrl,
    open_reader,
    open_writer,
    parse_channel_url,
)
from monolith.sync.flight_channel import PUBLISHER, DeltaPort, FlightDeltaWriter
from monolith.sync.folder_channel import FolderDeltaReader, FolderDeltaWriter

pytest.importorskip("pyarrow.flight")


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("grpc://host:7000", ChannelUrl("flight", ("host:7000",))),
        ("grpc://a:1,[::1]:2/model", ChannelUrl("flight", ("a:1", "[::1]:2"), "model")),
        ("grpc+tls://host:7000", ChannelUrl("flight", ("host:7000",), tls=True)),
        ("kafka://a:9092,b:9092/deltas", ChannelUrl("kafka", ("a:9092", "b:9092"), "deltas")),
        ("/shared/deltas", ChannelUrl("folder", name="/shared/deltas")),
        ("deltas", ChannelUrl("folder", name="deltas")),
        ("file:///shared/deltas", ChannelUrl("folder", name="file:///shared/deltas")),
        ("s3://bucket/deltas", ChannelUrl("folder", name="s3://bucket/deltas")),
        ("discovery", ChannelUrl("discovery")),
    ],
)
def test_a_url_says_which_channel_it_is(url: str, found: ChannelUrl) -> None:
    assert parse_channel_url(url) == found


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        ("gprc://host:7000", "Did you mean grpc://"),
        ("kafak://host:1/topic", "Did you mean kafka://"),
        ("http://host:7000", "it must be grpc"),
        ("host:7000", "Did you mean grpc://host:7000"),
        ("a:7000,b:7000", "Did you mean grpc://a:7000,b:7000"),
        ("grpc:/host:7000", "Did you mean grpc://host:7000"),
        ("grpc://host", "host"),
        ("grpc://host:seven", "seven"),
        ("grpc://a:1,,b:2", "it must be|Use grpc|host"),
        ("grpc://host:7000/a/b", "one word"),
        ("kafka://broker:9092", "topic"),
        ("kafka://broker:9092/a/b", "topic"),
        ("kafka://user:secret@broker:9092/topic", "can be read by others"),
        ("file:///", "no folder"),
    ],
)
def test_a_bad_url_is_refused_with_what_to_write(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_channel_url(url)
    assert "secret" not in str(caught.value)


def test_a_folder_is_opened_by_its_path(tmp_path: Path) -> None:
    writer, reader = open_writer(str(tmp_path)), open_reader(f"file://{tmp_path}")
    assert isinstance(writer, FolderDeltaWriter)
    assert isinstance(reader, FolderDeltaReader)
    publisher, copy = SmallPublisher(writer), Copy()
    publisher.publish([1, 2])
    until(lambda: copy.equals(publisher), lambda: copy.follow(reader, wait=0.1))
    writer.close()


def test_a_publisher_listens_at_one_address() -> None:
    with pytest.raises(ConfigError, match="one address"):
        open_writer("grpc://127.0.0.1:0,127.0.0.1:0")


def test_the_first_address_of_publishers_in_a_row_finds_them_all() -> None:
    first, second = two_ports_in_a_row()
    with closing(first), closing(second):
        publishers = [SmallPublisher(one, shard=(n, 2)) for n, one in enumerate((first, second))]
        publishers[1].publish([1])
        with closing(open_reader(f"grpc://{first.address}")) as reader:
            assert [log.shard for log in reader.logs()] == [(0, 2), (1, 2)]
            copy = Copy()
            copy.follow(reader, 1)
        assert copy.equals(publishers[1])


def test_a_name_of_publishers_that_are_not_in_a_row_finds_those_that_are_named() -> None:
    with closing(listen()) as alone:
        SmallPublisher(alone, shard=(1, 2))
        with closing(open_reader(f"grpc://{alone.address}")) as reader:
            assert [log.shard for log in reader.logs()] == [(1, 2)]


def listen(port: int = 0) -> FlightDeltaWriter:
    return DeltaPort(port=port).writer(owns_port=True)


def two_ports_in_a_row() -> tuple[FlightDeltaWriter, FlightDeltaWriter]:
    """Return two writers, the second at the port after that of the first."""
    for _ in range(100):
        first = listen()
        with suppress(ListenError):
            return first, listen(Address.parse(first.address).port + 1)
        first.close()
    pytest.fail("no two free ports in a row")


def test_tls_is_asked_for_by_both_or_by_none() -> None:
    with pytest.raises(ConfigError, match=r"security\.cert"):
        open_reader("grpc+tls://host:1")


def test_without_a_registry_discovery_is_refused() -> None:
    for open_end in (open_reader, open_writer):
        with pytest.raises(ConfigError, match="no registry"):
            open_end("discovery")


def test_publishers_are_found_by_discovery_wherever_they_are() -> None:
    with MemoryDiscovery() as discovery:
        writers = [open_writer("discovery", discovery=discovery) for _ in range(2)]
        reader = open_reader("discovery", discovery=discovery)
        assert list(reader.logs()) == []
        publishers = [SmallPublisher(writers[n], epoch=f"e{n}", shard=(n, 2)) for n in range(2)]
        for number, publisher in enumerate(publishers):
            publisher.publish([number])
        assert [log.shard for log in reader.logs()] == [(0, 2), (1, 2)]
        writers[1].close()
        assert set(discovery.query(PUBLISHER)) == {0}
        moved = open_writer("discovery", discovery=discovery)
        again, copy = SmallPublisher(moved, epoch="moved", shard=(1, 2)), Copy()
        again.publish([7])
        until(
            lambda: copy.equals(again), lambda: copy.follow(open_reader("discovery", discovery=discovery), 1)
        )
        reader.close()
        writers[0].close()
        moved.close()


def test_a_reader_without_the_token_is_refused() -> None:
    security = SecurityConfig(token=Secret("the-shared-token"))
    writer = open_writer("grpc://127.0.0.1:0", guard=guard_listener("127.0.0.1", security))
    assert writer.address is not None
    publisher, copy = SmallPublisher(writer), Copy()
    publisher.publish([1])
    url = f"grpc://{writer.address}"
    for wrong in (None, guard_caller(SecurityConfig(token=Secret("another")))):
        with pytest.raises(ConfigError, match="token"):
            open_reader(url, guard=wrong).logs()
    reader = open_reader(url, guard=guard_caller(security))
    copy.follow(reader)
    assert copy.equals(publisher)
    reader.close()
    writer.close()


def test_both_ends_show_certificates(certificates: Path) -> None:
    security = SecurityConfig(
        cert=certificates / "ca-node.crt", key=certificates / "ca-node.key", ca=certificates / "ca.crt"
    )
    guard = guard_listener("127.0.0.1", security)
    with pytest.raises(ConfigError, match=r"grpc\+tls"):
        open_writer("grpc://127.0.0.1:0", guard=guard)
    writer = open_writer("grpc+tls://127.0.0.1:0", guard=guard)
    assert writer.address is not None
    publisher, copy = SmallPublisher(writer), Copy()
    publisher.publish([1])
    reader = open_reader(f"grpc+tls://{writer.address}", guard=guard_caller(security))
    copy.follow(reader)
    assert copy.equals(publisher)
    other = SecurityConfig(
        cert=certificates / "other-node.crt",
        key=certificates / "other-node.key",
        ca=certificates / "other.crt",
    )
    for wrong in (None, guard_caller(other)):
        stranger = open_reader(f"grpc{'+tls' if wrong else ''}://{writer.address}", guard=wrong)
        with pytest.raises((ConfigError, UnavailableError)):
            stranger.logs()
        stranger.close()
    reader.close()
    writer.close()
