"""A delta channel by its URL: one line of text for a flag.

    grpc://trainer:7000                   Arrow Flight; several processes: grpc://host:7000,host:7001, or the
                                          first alone, if the rest are at the ports after it
    grpc+tls://trainer:7000/model         with TLS; the name of a model, if a process publishes several
    kafka://broker:9092,broker:9092/topic
    /shared/folder, s3://bucket/folder    a folder that both sides reach
    discovery                             Arrow Flight to every process registered as a publisher

A publisher listens at its Flight URL, which has one address then; port 0 lets the system choose.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from monolith.cluster.addresses import Address
from monolith.cluster.discovery import Discovery
from monolith.errors import AddressError, ConfigError
from monolith.sync.channel import LOG_BYTES, DeltaReader, DeltaWriter
from monolith.sync.publish_config import KafkaSettings
from monolith.wire.ports import Limits
from monolith.wire.transport import PortGuard

DISCOVERY = "discovery"
"""Instead of a URL: ask the registry for the publishers."""

_FORMS = (
    "grpc://host:port[,host:port], grpc+tls://host:port, kafka://broker:port[,broker:port]/topic, the path "
    "of a folder, or discovery"
)
_FORGOTTEN = re.compile(r"(?:[a-z+]+:/)?((?:[^/\\,]+:[0-9]{1,5},?)+)")
"""host:port without a scheme, or with half of one."""
_FLIGHT = ("grpc", "grpc+tls", "grpc+tcp")
_KINDS = (*_FLIGHT, "kafka", "file")


@dataclass(frozen=True, slots=True)
class ChannelUrl:
    """The parts of a channel's URL."""

    kind: str
    """"flight", "kafka", "folder" or "discovery"."""
    addresses: tuple[str, ...] = ()
    """host:port of each publisher, or of each broker."""
    name: str = ""
    """Name of the model, the topic or the folder."""
    tls: bool = False


def parse_channel_url(url: str) -> ChannelUrl:
    """Parse the URL of a channel. Connects to nothing.

    Raises:
        ConfigError: The text is no such URL; the message lists the forms.
    """
    if url == DISCOVERY:
        return ChannelUrl("discovery")
    if not url.strip():
        raise ConfigError(f"a delta channel has an empty URL: it must be {_FORMS}")
    scheme, separator, rest = url.partition("://")
    if not separator:
        if (forgotten := _FORGOTTEN.fullmatch(url)) is not None:
            raise ConfigError(
                f"cannot open the delta channel {url!r}: it must be {_FORMS}. Did you mean "
                f"grpc://{forgotten[1]}? For a folder of that name, write ./{url}."
            )
        return ChannelUrl("folder", name=url)
    if scheme in _FLIGHT or scheme == "kafka":
        return _with_addresses(url, scheme, rest)
    if scheme not in _folder_schemes():
        near = difflib.get_close_matches(scheme, _KINDS, n=1)
        hint = f" Did you mean {near[0]}://?" if near else ""
        raise ConfigError(f"cannot open the delta channel {url!r}: it must be {_FORMS}.{hint}")
    if not rest.strip("/"):
        raise ConfigError(f"cannot open the delta channel {url!r}: it names no folder")
    return ChannelUrl("folder", name=url)


def _with_addresses(url: str, scheme: str, rest: str) -> ChannelUrl:
    where, _, name = rest.partition("/")
    if "@" in where:
        raise ConfigError(
            f"cannot open a delta channel of {scheme}: a password in a URL can be read by others. Use "
            "security.token_file, or the settings of Kafka."
        )
    addresses = tuple(where.split(","))
    for address in addresses:
        try:
            Address.parse(address)
        except AddressError as cause:
            raise ConfigError(f"cannot open the delta channel {url!r}: {cause}. Use {_FORMS}.") from cause
    if "/" in name or (scheme == "kafka" and not name):
        wanted = (
            "a topic's name, as in kafka://broker:9092/topic" if scheme == "kafka" else "one word, a model's"
        )
        raise ConfigError(f"cannot open the delta channel {url!r}: after the addresses comes {wanted}")
    kind = "kafka" if scheme == "kafka" else "flight"
    return ChannelUrl(kind, addresses, name, scheme == "grpc+tls")


def _folder_schemes() -> set[str]:
    from fsspec import available_protocols  # type: ignore[import-untyped]

    return {"file", "local", "viewfs", *available_protocols()} - {"http", "https", "data"}


def open_writer(
    url: str,
    *,
    guard: PortGuard | None = None,
    discovery: Discovery | None = None,
    host: str = "127.0.0.1",
    advertise: str | None = None,
    log_bytes: int = LOG_BYTES,
    limits: Limits | None = None,
    kafka_settings: KafkaSettings | None = None,
) -> DeltaWriter:
    """Return the publisher's end of one shard, at a URL.

    Args:
        guard: Credentials that readers must present to a Flight port: `guard_listener` makes it.
        discovery: Registry in which a Flight port is announced.
        host: Where to listen if the URL is `discovery`, which names no address.
        advertise: The host by which readers reach this process, if that is not the one listened on.
        log_bytes: The most bytes of deltas in the log.
        kafka_settings: Settings of librdkafka in addition to the brokers, security included.

    Raises:
        ConfigError: The text is no URL of a channel, or contradicts guard or discovery.
        ListenError: The port is taken.
        MissingExtraError: A package is not installed.
    """
    found = parse_channel_url(url)
    if found.kind == "folder":
        from monolith.sync.folder_channel import FolderDeltaWriter

        return FolderDeltaWriter(found.name, log_bytes=log_bytes)
    if found.kind == "kafka":
        from monolith.sync.kafka_writer import KafkaDeltaWriter

        return KafkaDeltaWriter(found.addresses, found.name, log_bytes=log_bytes, settings=kafka_settings)
    if found.kind == "discovery":
        _need_discovery(discovery)
        address = Address(host, 0)
    else:
        _check_tls(url, found, guard)
        if len(found.addresses) != 1:
            raise ConfigError(f"cannot publish at {url!r}: a publisher listens at one address")
        address = Address.parse(found.addresses[0])
    from monolith.sync.flight_channel import DeltaPort

    port = DeltaPort(host=address.host, port=address.port, advertise=advertise, guard=guard, limits=limits)
    return port.writer(found.name, log_bytes=log_bytes, discovery=discovery, owns_port=True)


def open_reader(
    url: str,
    *,
    guard: PortGuard | None = None,
    discovery: Discovery | None = None,
    kafka_settings: KafkaSettings | None = None,
) -> DeltaReader:
    """Return a subscriber's end of all shards, at a URL.

    Args:
        guard: Credentials to present to publishers: `guard_caller` makes it.
        discovery: Registry to ask for publishers if the URL is `discovery`.
        kafka_settings: Settings of librdkafka in addition to the brokers, security included.

    Raises:
        ConfigError: The text is no URL of a channel, or contradicts guard or discovery.
        MissingExtraError: A package is not installed.
    """
    found = parse_channel_url(url)
    if found.kind == "folder":
        from monolith.sync.folder_channel import FolderDeltaReader

        return FolderDeltaReader(found.name)
    if found.kind == "kafka":
        from monolith.sync.kafka_reader import KafkaDeltaReader

        return KafkaDeltaReader(found.addresses, found.name, settings=kafka_settings)
    from monolith.sync.flight_channel import PUBLISHER
    from monolith.sync.flight_reader import FlightDeltaReader

    if found.kind == "discovery":
        registry = _need_discovery(discovery)
        return FlightDeltaReader(lambda: [*registry.query(PUBLISHER).values()], guard=guard)
    _check_tls(url, found, guard)
    in_a_row = len(found.addresses) == 1
    return FlightDeltaReader(found.addresses, model=found.name, guard=guard, in_a_row=in_a_row)


def _check_tls(url: str, found: ChannelUrl, guard: PortGuard | None) -> None:
    """Refuse a URL that contradicts the guard about whether connections are encrypted."""
    guarded = bool(getattr(guard, "uses_tls", False))
    if found.tls and not guarded:
        raise ConfigError(f"cannot open {url!r}: it asks for TLS. Set security.cert, key and ca.")
    if guarded and not found.tls:
        raise ConfigError(f"cannot open {url!r}: certificates are set. Write grpc+tls:// instead of grpc://.")


def _need_discovery(discovery: Discovery | None) -> Any:
    if discovery is None:
        raise ConfigError(
            "cannot look for publishers: there is no registry. Set the cluster's discovery, or give the URL "
            "of a publisher, a topic or a folder."
        )
    return discovery
