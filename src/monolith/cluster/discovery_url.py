"""A registry by its URL: one line of text for a flag, in place of a config.

    zookeeper://host:2181,host:2181/job
    consul://host:8500/job, or consul://host:2280/job?api=lookup for the original system's agents
    files:///shared/folder/job

Secrets do not belong there, since others can read flags: they come from the environment.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal

from monolith.cluster.addresses import Address
from monolith.cluster.consul import ConsulDiscovery
from monolith.cluster.consul_client import ConsulConfig
from monolith.cluster.discovery import Discovery, check_role
from monolith.cluster.files_discovery import FilesConfig, FilesDiscovery
from monolith.cluster.zookeeper import ZooKeeperConfig, ZooKeeperDiscovery, get_zk_auth_data
from monolith.errors import AddressError, ConfigError

Environment = Mapping[str, str]

_KINDS = ("zookeeper", "consul", "files")
_FORMS = "zookeeper://host:2181/job, consul://host:8500/job or files:///shared/folder/job"
_LOOKUP = "?api=lookup"
"""Ends the URL of a Consul agent that answers the original system's lookup API."""


def open_discovery_url(
    url: str, environ: Environment | None = None, *, connect_timeout: timedelta = timedelta(seconds=15)
) -> Discovery:
    """Open the registry that a URL names. Close it, or use it in a `with`.

    Args:
        environ: Has what does not belong into a URL: ZK_AUTH (user:password), CONSUL_HTTP_TOKEN, and for
            consul:///job, which names no agent, where it is. Usually `os.environ`.
        connect_timeout: For ZooKeeper, to which this function connects at once.

    Raises:
        ConfigError: It is no such URL.
        UnavailableError: ZooKeeper does not answer. The other kinds of registry connect later.
    """
    kind, colon, rest = url.partition("://")
    if not colon or kind not in _KINDS:
        near = difflib.get_close_matches(kind, _KINDS, n=1)
        hint = f" Did you mean {near[0]}://?" if near else ""
        raise ConfigError(f"cannot open the registry {url!r}: it must be {_FORMS}.{hint}")
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"cannot open a registry of {kind}: others can read the password in its URL. "
            "Set ZK_AUTH to user:password, or CONSUL_HTTP_TOKEN."
        )
    environ = {} if environ is None else environ
    if kind == "files":
        return _files(url, rest)
    if kind == "consul":
        return _consul(url, rest, environ)
    return _zookeeper(url, rest, environ, connect_timeout)


def _zookeeper(url: str, rest: str, environ: Environment, timeout: timedelta) -> ZooKeeperDiscovery:
    servers, job = _servers_and_job(url, rest)
    if not servers:
        raise ConfigError(f"cannot open the registry {url!r}: it names no ZooKeeper server")
    config = ZooKeeperConfig(servers=servers, auth=get_zk_auth_data(environ), connect_timeout=timeout)
    return ZooKeeperDiscovery(job, config)


def _consul(url: str, rest: str, environ: Environment) -> ConsulDiscovery:
    api: Literal["stock", "lookup"] = "lookup" if rest.endswith(_LOOKUP) else "stock"
    rest = rest.removesuffix(_LOOKUP)
    if "?" in rest:
        raise ConfigError(f"cannot open the registry {url!r}: after the job may be only {_LOOKUP}")
    server, job = _servers_and_job(url, rest)
    if not server:
        return ConsulDiscovery(job, ConsulConfig.from_environment(environ, api=api))
    has_port = ":" in server and not server.endswith("]")
    try:
        address = Address.parse(server if has_port else f"{server}:0")
    except AddressError as cause:
        raise ConfigError(f"cannot open the registry {url!r}: {cause}") from cause
    token = environ.get("CONSUL_HTTP_TOKEN", "").strip() or None
    port = address.port if has_port else None
    return ConsulDiscovery(job, ConsulConfig(host=address.host, port=port, api=api, token=token))


def _files(url: str, rest: str) -> FilesDiscovery:
    if not rest.startswith("/"):
        raise ConfigError(
            f"cannot open the registry {url!r}: give an absolute path, as in files:///shared/job"
        )
    return FilesDiscovery(FilesConfig(folder=rest))


def _servers_and_job(url: str, rest: str) -> tuple[str, str]:
    servers, _, job = rest.partition("/")
    try:
        check_role(job)
    except ConfigError as cause:
        raise ConfigError(
            f"cannot open the registry {url!r}: after the servers comes the job's name, one word without "
            "slashes, as in zookeeper://host:2181/job"
        ) from cause
    return servers, job
