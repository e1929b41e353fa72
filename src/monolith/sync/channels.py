"""A delta channel by its URL: one line of text for a flag.

    grpc://trainer:7000                   Arrow Flight; several processes: grpc://host:7000,host:7001, or the
                                          first alone, where the others are at the ports after it
    grpc+tls://trainer:7000/model         with TLS; the name of a model, where a process publishes several
    kafka://broker:9092,broker:9092/topic
    /shared/folder, s3://bucket/folder    a folder that both sides reach
    discovery                             Arrow Flight at whoever has registered as a publisher

A publisher listens at its URL of Flight, so that names one address there; port 0 lets the system choose.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monolith.cluster.addresses import Address
from monolith.cluster.discovery import Discovery
from monolith.errors import AddressError, ConfigError
from monolith.sync.channel import DeltaReader, DeltaWriter, ShareLog, TakeSnapshot
from monolith.sync.delta_log import LOG_BYTES
from monolith.sync.messages import Delta, PublishState
from monolith.wire.flight import PortGuard
from monolith.wire.ports import Limits

PUBLISHER = "publisher"
"""The role under which processes that publish a share are registered, by the number of the share."""
DISCOVERY = "discovery"
"""In place of a URL: ask the registry who publishes."""

_FORMS = (
    "grpc://host:port[,host:port], grpc+tls://host:port, kafka://broker:port[,broker:port]/topic, the path "
    "of a folder, or discovery"
)
_FORGOTTEN = re.compile(r"(?:[a-z+]+:/)?((?:[^/\\,]+:[0-9]{1,5},?)+)")
"""host:port without a scheme, or with half of one."""
_FLIGHT = ("grpc", "grpc+tls", "grpc+tcp")
_KINDS = (*_FLIGHT, "kafka", "file")

KafkaSettings = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class ChannelUrl:
    """What the URL of a channel says."""

    kind: str
    """"flight", "kafka", "folder" or "discovery"."""
    addresses: tuple[str, ...] = ()
    """Of publishers, or of brokers: host:port."""
    name: str = ""
    """Of the model, the topic or the folder."""
    tls: bool = False


def parse_channel_url(url: str) -> ChannelUrl:
    """Read the URL of a channel. Reaches nobody.

    Raises:
        ConfigError: It is none; says what one looks like.
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
                f"grpc://{forgotten[1]}? Of a folder of that name, write ./{url}."
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
            f"cannot open a delta channel of {scheme}: others can read the password in its URL. Use "
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
    """Return the publisher's end of one share, at a URL.

    Args:
        guard: What readers must present, where a port is listened on: `guard_listener` makes it.
        discovery: Where to register a port that is listened on, for `discovery` and for Flight.
        host: Where to listen for `discovery`, which names no address.
        advertise: The host by which readers reach this process, where that is not the one listened on.
        log_bytes: The most bytes of deltas that are kept for readers.
        kafka_settings: What librdkafka is to know beside the brokers, security included.

    Raises:
        ConfigError: It is no URL of a channel, or does not fit to guard or discovery.
        ListenError: The port is taken.
        MissingExtraError: A package is not installed.
    """
    found = parse_channel_url(url)
    if found.kind == "folder":
        from monolith.sync.folder_channel import FolderDeltaWriter

        return FolderDeltaWriter(found.name, log_bytes=log_bytes)
    if found.kind == "kafka":
        from monolith.sync.kafka_channel import KafkaDeltaWriter

        return KafkaDeltaWriter(found.addresses, found.name, log_bytes=log_bytes, settings=kafka_settings)
    if found.kind == "discovery":
        _need_discovery(discovery)
        address = Address(host, 0)
    else:
        _check_tls(url, found, guard)
        if len(found.addresses) != 1:
            raise ConfigError(f"cannot publish at {url!r}: a publisher listens at one address")
        address = Address.parse(found.addresses[0])
    return ListeningWriter(
        address,
        found.name,
        guard=guard,
        discovery=discovery,
        advertise=advertise,
        log_bytes=log_bytes,
        limits=limits,
    )


def open_reader(
    url: str,
    *,
    guard: PortGuard | None = None,
    discovery: Discovery | None = None,
    kafka_settings: KafkaSettings | None = None,
) -> DeltaReader:
    """Return a subscriber's end of all shares, at a URL.

    Args:
        guard: What to present to publishers: `guard_caller` makes it.
        discovery: Whom to ask for publishers, where the URL is `discovery`.

    Raises:
        ConfigError: It is no URL of a channel, or does not fit to guard or discovery.
        MissingExtraError: A package is not installed.
    """
    found = parse_channel_url(url)
    if found.kind == "folder":
        from monolith.sync.folder_channel import FolderDeltaReader

        return FolderDeltaReader(found.name)
    if found.kind == "kafka":
        from monolith.sync.kafka_reader import KafkaDeltaReader

        return KafkaDeltaReader(found.addresses, found.name, settings=kafka_settings)
    from monolith.sync.flight_reader import FlightDeltaReader

    if found.kind == "discovery":
        registry = _need_discovery(discovery)
        return FlightDeltaReader(lambda: [*registry.query(PUBLISHER).values()], guard=guard)
    _check_tls(url, found, guard)
    in_a_row = len(found.addresses) == 1
    return FlightDeltaReader(found.addresses, model=found.name, guard=guard, in_a_row=in_a_row)


class ListeningWriter:
    """The end of a publisher with a port of its own, registered where others look for it.

    Args:
        address: Where to listen.
        model: Which model's share it is.
    """

    def __init__(
        self,
        address: Address,
        model: str = "",
        *,
        guard: PortGuard | None = None,
        discovery: Discovery | None = None,
        advertise: str | None = None,
        log_bytes: int = LOG_BYTES,
        limits: Limits | None = None,
    ) -> None:
        from monolith.sync.flight_channel import DeltaPort

        self._port = DeltaPort(
            host=address.host, port=address.port, advertise=advertise, guard=guard, limits=limits
        )
        self._writer = self._port.writer(model, log_bytes=log_bytes)
        self._discovery = discovery
        self._registered: int | None = None

    @property
    def address(self) -> str:
        """Where readers find it: host:port."""
        return self._port.address

    def open(self, log: ShareLog, snapshot: TakeSnapshot) -> None:
        self._writer.open(log, snapshot)
        if self._discovery is not None and self._registered != log.share[0]:
            self._deregister()
            self._discovery.register(PUBLISHER, log.share[0], self.address)
            self._registered = log.share[0]

    def append(self, delta: Delta) -> None:
        self._writer.append(delta)

    def say(self, state: PublishState) -> None:
        self._writer.say(state)

    def close(self) -> None:
        self._deregister()
        self._port.close()

    def _deregister(self) -> None:
        if self._discovery is not None and self._registered is not None:
            self._discovery.deregister(PUBLISHER, self._registered, self.address)
            self._registered = None


def _check_tls(url: str, found: ChannelUrl, guard: PortGuard | None) -> None:
    """Refuse a URL that says other than the guard whether connections are encrypted."""
    guarded = bool(getattr(guard, "uses_tls", False))
    if found.tls and not guarded:
        raise ConfigError(f"cannot open {url!r}: it asks for TLS. Set security.cert, key and ca.")
    if guarded and not found.tls:
        raise ConfigError(
            f"cannot open {url!r}: certificates are set. Write grpc+tls:// in place of grpc://."
        )


def _need_discovery(discovery: Discovery | None) -> Any:
    if discovery is None:
        raise ConfigError(
            "cannot look for publishers: no registry is known. Set the cluster's discovery, or give the URL "
            "of a publisher, a topic or a folder."
        )
    return discovery
