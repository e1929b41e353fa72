"""What a run's config says of publishing, as what its processes publish with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from monolith import filesystem
from monolith.checkpoint import Saver
from monolith.checkpoint.saved_tables import IdShard
from monolith.cluster import Discovery
from monolith.cluster.addresses import Address
from monolith.cluster.run_token import shared_security
from monolith.cluster.security import guard_listener
from monolith.errors import ConfigError
from monolith.observe import Metrics
from monolith.runtime.config import RunConfig
from monolith.runtime.export import VersionMarks
from monolith.runtime.publish_pause import PauseFile
from monolith.runtime.publish_shard import PublishPlan
from monolith.sync.channel import DeltaWriter
from monolith.sync.channel_url import ChannelUrl, open_writer, parse_channel_url
from monolith.sync.messages import run_identity

_log = logging.getLogger(__name__)


def publish_plan(run: RunConfig, metrics: Metrics, discovery: Discovery | None = None) -> PublishPlan | None:
    """Return how this process of a run publishes; None if the run publishes nothing.

    Args:
        discovery: The registry for a port that this process listens on, so that followers find it.

    Raises:
        ConfigError: `publish.to` is no URL of a channel.
    """
    url = run.publish.to
    if url is None:
        return None
    try:
        found = parse_channel_url(url)
    except ConfigError as error:
        raise ConfigError(f"publish.to: {error}") from error
    model_dir = run.train.model_dir
    if found.kind in ("flight", "discovery"):
        # A run of one process has a token, too: rows of a model are not for every user of a machine.
        run = replace(run, security=shared_security(run.security, model_dir))
    opening = _Opening(run, url, found, discovery)
    return PublishPlan(
        config=run.publish,
        run=_name_of(run),
        open_writer=opening,
        pause_file=pause_file_of(run) if model_dir else None,
        metrics=metrics,
    )


def pause_file_of(run: RunConfig) -> PauseFile:
    """Return the file that says whether publishing is paused; it marks the versions that a pause covers."""
    marks = VersionMarks.of(run.export, run.train)
    return PauseFile(run.train.model_dir, withhold=marks.withhold, release=marks.release)


@dataclass(frozen=True, slots=True)
class _Opening:
    """Opens the channel of a share of one run."""

    run: RunConfig
    url: str
    found: ChannelUrl
    discovery: Discovery | None

    def __call__(self, share: IdShard) -> DeltaWriter:
        run, url, host = self.run, self.url, run_host(self.run)
        guard = None
        if self.found.kind == "flight":
            address = address_of(self.found.addresses, share)
            scheme = url.partition("://")[0]
            name = f"/{self.found.name}" if self.found.name else ""
            url, host = f"{scheme}://{address}{name}", address.host
        if self.found.kind in ("flight", "discovery"):
            guard = guard_listener(host, run.security, role="follow")
        writer = open_writer(
            url,
            guard=guard,
            discovery=self.discovery if self.found.kind == "discovery" else None,
            host=host,
            log_bytes=run.publish.keep_bytes,
            limits=run.limits,
            kafka_settings=run.publish.kafka_settings,
        )
        where = url
        if writer.address is not None:
            where = f"{'grpc+tls' if run.security.uses_tls else 'grpc'}://{writer.address}"
        _log.info("shard %d of %d is published at %s", *share, where)
        return writer


def run_host(run: RunConfig) -> str:
    """Return the host that a process listens on if no URL names one."""
    return run.cluster.listen or "127.0.0.1"


def address_of(addresses: tuple[str, ...], share: IdShard) -> Address:
    """Return the address that one of several publishers listens at: its own, or the next port of the first.

    Raises:
        ConfigError: There are several addresses, and not as many as publishers.
    """
    number, count = share
    if len(addresses) == count:
        return Address.parse(addresses[number])
    if len(addresses) != 1:
        raise ConfigError(
            f"publish.to: there are {len(addresses)} addresses for {count} publishers; name one "
            "for each, in order, or only the first: the other publishers listen at the ports after it"
        )
    first = Address.parse(addresses[0])
    return Address(first.host, first.port + number if first.port else 0)


def _name_of(run: RunConfig) -> str:
    """Return what names the run in its messages: its folder and its id, as an export of it says, too."""
    if not run.train.model_dir:
        return run.job.name or run.job.task or "a run without a folder"
    return run_identity(filesystem.parent(Saver(run.train.model_dir).names.prefix(0)), make=True)
