"""A client of a Consul agent: services that are registered there, kept alive, and looked up.

A service has a check with a time to live, which a thread passes while the process lives. A stock
agent is asked through its health API. ByteDance's Consul is asked at /v1/lookup/name, where
services have no ids and tags are a dict.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import quote, urlsplit

from monolith import concurrency
from monolith.cluster.addresses import Clock, concat_ip_and_port
from monolith.cluster.discovery import (
    Closing,
)
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    DiscoveryError,
    UnavailableError,
    optional_package,
)

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

SOCKET = "/opt/tmp/sock/consul.sock"
PORTS = {"stock": 8500, "lookup": 2280}
"""Where each kind of agent listens unless told otherwise."""

LOOKUP_TIMEOUT = timedelta(seconds=3)
FIRST_LOOKUP_TIMEOUT = timedelta(seconds=30)
"""For a name that nothing is known of yet, when a cached answer would have done."""
QUERY_TIMEOUT = timedelta(seconds=15)
REGISTER_TIMEOUT = timedelta(seconds=15)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsulConfig:
    """Which agent to ask, in which way, and how patiently."""

    host: str = "127.0.0.1"
    """The host name or IP of the agent, or the path of its unix socket, which begins with a slash."""
    port: int | None = None
    """The port of the agent; None is the default of the `api`. A unix socket has none."""
    api: Literal["stock", "lookup"] = "stock"
    """The HTTP API of the agent: `stock` is HashiCorp's Consul, `lookup` is ByteDance's."""
    token: str | None = field(default=None, repr=False)
    """The ACL token of the agent."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """The TLS context for https; None uses http."""
    ttl: timedelta = timedelta(seconds=60)
    """How long a service counts as alive without a heart-beat."""
    heartbeat: timedelta = timedelta(seconds=30)
    heartbeat_retry: timedelta = timedelta(seconds=2)
    """The pause after a heart-beat that failed."""
    remove_after: timedelta = timedelta(minutes=10)
    """How long a stock agent keeps a dead service before it removes it; at least a minute."""
    tries: int = 5
    """How often a request is tried when the agent cannot be reached."""
    max_backoff: timedelta = timedelta(seconds=5)
    """The longest pause between two tries; its length is random."""
    replace_every: timedelta = timedelta(seconds=3)
    """The pause after removing an old entry that has the place of a new one."""
    replace_tries: int = 10
    """How often an old entry is removed before registering fails."""
    visible_every: timedelta = timedelta(seconds=5)
    visible_tries: int = 36
    """How often a query may miss a new entry before registering fails."""
    watch_every: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        if not timedelta(0) < self.heartbeat < self.ttl:
            raise ConfigError(
                f"Consul: heartbeat ({self.heartbeat}) must be shorter than ttl ({self.ttl}), "
                "or living services would count as dead"
            )
        if self.api not in PORTS:
            raise ConfigError(f"Consul: api must be 'stock' or 'lookup', got {self.api!r}")
        for name in ("tries", "replace_tries", "visible_tries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Consul: {name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, socket_path: str = SOCKET, **options: Any
    ) -> Self:
        """Find the agent: CONSUL_HTTP_HOST, stock Consul's CONSUL_HTTP_ADDR, TCE_HOST_IP, a unix socket
        that is there, or this machine. Empty variables count as unset. CONSUL_HTTP_TOKEN is the token.
        """

        def named(name: str) -> str | None:
            return environment.get(name, "").strip() or None

        host, port = named("CONSUL_HTTP_HOST"), named("CONSUL_HTTP_PORT")
        if host is None and (address := named("CONSUL_HTTP_ADDR")) is not None:
            host, of_address = _split_http_addr(address)
            port = port or of_address
            if address.startswith("https://"):
                options.setdefault("tls", ssl.create_default_context())
        host = host or named("TCE_HOST_IP") or (socket_path if Path(socket_path).exists() else "127.0.0.1")
        if port is not None and not (port.isascii() and port.isdecimal()):
            raise ConfigError(f"Consul: CONSUL_HTTP_PORT must be a port, got {port!r}")
        options.setdefault("token", named("CONSUL_HTTP_TOKEN"))
        return cls(host=host, port=None if port is None else int(port), **options)

    @property
    def is_unix_socket(self) -> bool:
        return self.host.startswith("/")

    @property
    def address(self) -> str:
        """Where the agent is, for people."""
        if self.is_unix_socket:
            return self.host
        return concat_ip_and_port(self.host.strip("[]"), PORTS[self.api] if self.port is None else self.port)


@dataclass(frozen=True, slots=True)
class ConsulService:
    """One service as Consul shows it."""

    host: str
    port: int
    tags: dict[str, str] = field(default_factory=dict)
    id: str | None = None
    """The id of the service; None if the API does not report it."""
    node: str | None = None
    """The machine of the agent that registered the service; None if the API does not report it."""


class ConsulClient(Closing):
    """As much of Consul's HTTP API as discovery needs. Thread-safe.

    Raises:
        MissingExtraError: httpx is not installed.
    """

    def __init__(self, config: ConsulConfig, clock: Clock = concurrency.monotonic) -> None:
        with optional_package("httpx", "consul", "discovery through Consul"):
            import httpx
        self._config = config
        self._clock = clock
        self._lock = concurrency.Lock()  # guards the two below, and is never held during a call
        self._cache: dict[str, tuple[float, list[ConsulService]]] = {}
        self._hearts: dict[str, _Heart] = {}
        scheme = "http" if config.tls is None else "https"
        self._http = httpx.Client(
            base_url=f"{scheme}://{'localhost' if config.is_unix_socket else config.address}",
            headers={} if config.token is None else {"X-Consul-Token": config.token},
            transport=httpx.HTTPTransport(
                uds=config.host if config.is_unix_socket else None,
                verify=config.tls or False,  # without TLS, no certificates are read, which takes 30 ms
            ),
        )

    def lookup(
        self, name: str, timeout: timedelta = LOOKUP_TIMEOUT, max_age: timedelta = timedelta(0)
    ) -> list[ConsulService]:
        """Return the services of a name; none when Consul answers with an error, which is logged.

        See `services`, which raises it.
        """
        try:
            return self.services(name, timeout, max_age)
        except (DiscoveryError, UnavailableError) as error:
            if not isinstance(error.__cause__, _StatusError):
                raise
            _log.error("%s", error)
            return []

    def services(
        self, name: str, timeout: timedelta = LOOKUP_TIMEOUT, max_age: timedelta = timedelta(0)
    ) -> list[ConsulService]:
        """Return the services of a name whose checks pass.

        Args:
            max_age: An answer not older than this will do. Where there has never been one, the call
                may take 30 s: there is nothing to fall back on.

        Raises:
            UnavailableError: The agent cannot be reached, or cannot answer now.
            DeadlineExceededError: The agent took longer than `timeout`.
            DiscoveryError: It refuses to answer, or answers what is no list of services.
        """
        if max_age > timedelta(0):
            with self._lock:
                cached = self._cache.get(name)
            if cached is None:
                timeout = FIRST_LOOKUP_TIMEOUT
            elif self._clock() - cached[0] <= max_age.total_seconds():
                return list(cached[1])
        read = _read_health if self._config.api == "stock" else _read_lookup
        if self._config.api == "stock":
            path, params = f"/v1/health/service/{quote(name, safe='')}", {"passing": "true"}
        else:
            path, params = "/v1/lookup/name", {"name": name, "addr-family": "dual-stack"}
        body = self._call("GET", path, timeout, params=params)
        try:
            found = [read(one) for one in json.loads(body)]
        except (ValueError, TypeError, KeyError, AttributeError) as cause:
            raise DiscoveryError(
                f"Consul at {self._config.address} answered to {path} what is no list of services: "
                f"{body[:200]!r}. Is its API {self._config.api!r}?"
            ) from cause
        with self._lock:
            self._cache[name] = (self._clock(), found)
        return list(found)

    def cache_age(self, name: str) -> timedelta | None:
        """Return the age of the last answer for a name; None if there was no answer."""
        with self._lock:
            cached = self._cache.get(name)
        return None if cached is None else timedelta(seconds=self._clock() - cached[0])

    def register(
        self,
        name: str,
        port: int,
        *,
        tags: Mapping[str, str] | None = None,
        check_script: str | None = None,
        host: str | None = None,
        service_id: str | None = None,
        replaced: Callable[[], bool] | None = None,
    ) -> None:
        """Register a service, and pass its check from a thread until `deregister` or `close`.

        Should the agent forget the service, as after a restart without its files, it is registered
        again. A service with a script is checked by the agent, which must allow scripts; it has no thread.

        Args:
            host: Where it listens; None lets the agent say its own.
            service_id: Of this service at its agent; `<name>-<port>` unless given.
            replaced: Asked before each sign of life; once it says yes, the service is taken out.

        Raises:
            DiscoveryError: The agent refuses. Has its words.
            UnavailableError: The agent cannot be reached.
            DeadlineExceededError: It did not answer in time.
        """
        service_id = service_id or default_id(name, port)
        write = _stock_service if self._config.api == "stock" else _lookup_service
        body = write(
            self._config,
            service_id=service_id,
            name=name,
            port=int(port),
            tags=tags,
            check_script=check_script,
            host=host,
        )
        self._stop_heart(service_id)

        def put() -> None:
            self._call("PUT", "/v1/agent/service/register", REGISTER_TIMEOUT, body=body, final=True)

        put()
        if check_script is None:
            heart = _Heart(
                name=f"ConsulHealthCheck-{service_id}",
                beat=lambda: self._pass_check(service_id),
                revive=put,
                replaced=(lambda: False) if replaced is None else replaced,
                leave=lambda: self._deregister_here(service_id),
                every=self._config.heartbeat,
                retry=self._config.heartbeat_retry,
            )
            with self._lock:
                self._hearts[service_id] = heart
            heart.start()

    def deregister(
        self, name: str, port: int, service_id: str | None = None, node: str | None = None
    ) -> None:
        """Remove a service, and end its thread if it has one here.

        Args:
            node: Take it out of the catalog as a service of that machine, whose agent is not this one.
                Should that agent live, it will put the service back.

        Raises:
            DiscoveryError, UnavailableError, DeadlineExceededError: As for `register`.
        """
        service_id = service_id or default_id(name, port)
        if node is not None:
            body = {"Node": node, "ServiceID": service_id}
            self._call("PUT", "/v1/catalog/deregister", REGISTER_TIMEOUT, body=body)
            return
        self._stop_heart(service_id)
        self._deregister_here(service_id)

    def _deregister_here(self, service_id: str) -> None:
        path = f"/v1/agent/service/deregister/{quote(service_id, safe='')}"
        try:
            self._call("PUT", path, REGISTER_TIMEOUT, final=True)
        except DiscoveryError as error:
            if not (isinstance(error.__cause__, _StatusError) and error.__cause__.is_unknown_service):
                raise

    def node_name(self) -> str | None:
        """Return the name of the agent's machine; None if the API does not report it."""
        if self._config.api != "stock":
            return None
        try:
            return str(json.loads(self._call("GET", "/v1/agent/self", QUERY_TIMEOUT))["Config"]["NodeName"])
        except (ValueError, TypeError, KeyError) as cause:
            raise DiscoveryError(f"Consul at {self._config.address} does not report its node name") from cause

    def close(self) -> None:
        """End all threads and connections. Registered entries stay until their time to live is over."""
        with self._lock:
            hearts, self._hearts = self._hearts, {}
        for heart in hearts.values():
            heart.stop()
        self._http.close()

    def _pass_check(self, service_id: str) -> bool:
        """Give a sign of life; return whether the agent knew the service."""
        method = "PUT" if self._config.api == "stock" else "GET"
        path = f"/v1/agent/check/pass/service:{quote(service_id, safe='')}"
        try:
            self._call(method, path, REGISTER_TIMEOUT)
        except (DiscoveryError, UnavailableError) as error:
            if isinstance(error.__cause__, _StatusError) and error.__cause__.is_unknown_service:
                return False
            raise
        return True

    def _stop_heart(self, service_id: str) -> None:
        with self._lock:
            heart = self._hearts.pop(service_id, None)
        if heart is not None:
            heart.stop()

    def _call(
        self,
        method: str,
        path: str,
        timeout: timedelta,
        *,
        params: dict[str, str] | None = None,
        body: object = None,
        final: bool = False,
    ) -> bytes:
        """
        Args:
            final: Whether an error of the agent's own (5xx) is its last word, and not worth another try.
        """
        import httpx

        doing = f"Consul at {self._config.address}: {method} {path}"
        try:
            response: httpx.Response = self._http.request(
                method, path, params=params, json=body, timeout=timeout.total_seconds()
            )
        except httpx.TimeoutException as cause:
            raise DeadlineExceededError(f"{doing} took longer than {timeout.total_seconds():g} s") from cause
        except httpx.HTTPError as cause:
            raise UnavailableError(f"{doing} failed: {cause}. Is the agent running?") from cause
        if response.status_code == 200:
            return response.content
        status = _StatusError(response.status_code, response.text)
        kind = UnavailableError if response.status_code >= 500 and not final else DiscoveryError
        raise kind(f"{doing}: status {status.status}, {status.body}") from status


def default_id(name: str, port: int) -> str:
    return f"{name}-{port}"


class _StatusError(Exception):
    """An answer other than 200: the cause of the errors that a caller sees."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body.strip()

    @property
    def is_unknown_service(self) -> bool:
        """Whether the agent says that it has no such service or check. Before 1.10 it said so with a 500."""
        words = self.body.lower()
        return self.status == 404 or (self.status == 500 and ("unknown" in words or "does not have" in words))


class _Heart:
    """A thread that gives signs of life for one service, whatever goes wrong, until it is stopped."""

    def __init__(
        self,
        *,
        name: str,
        beat: Callable[[], bool],
        revive: Callable[[], None],
        replaced: Callable[[], bool],
        leave: Callable[[], None],
        every: timedelta,
        retry: timedelta,
    ) -> None:
        self._beat, self._revive = beat, revive
        self._replaced, self._leave = replaced, leave
        self._every, self._retry = every, retry
        self._stopped = concurrency.Event()
        self._thread = concurrency.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        pause = timedelta(0)  # the first sign at once: a service is born without one
        while not self._stopped.wait(pause.total_seconds()):
            try:
                if self._replaced():
                    _log.warning("%s: another process registered in its place; leaving it", self._thread.name)
                    self._leave()
                    return
                if not self._beat() and not self._stopped.is_set():
                    _log.warning("%s: the agent lost the service; registering it again", self._thread.name)
                    self._revive()
                pause = self._every
            except Exception as error:
                # Whatever it was: a service whose thread ended would be dead to all others.
                _log.warning("%s: retrying: %s", self._thread.name, error)
                pause = self._retry


def _read_health(one: dict[str, Any]) -> ConsulService:
    service, node = one["Service"], one["Node"]
    tags = dict(tag.split(":", 1) for tag in service.get("Tags") or () if ":" in tag)
    host = service.get("Address") or node["Address"]
    return ConsulService(host, int(service["Port"]), tags, service["ID"], node["Node"])


def _read_lookup(one: dict[str, Any]) -> ConsulService:
    tags = {str(key): str(value) for key, value in (one.get("Tags") or {}).items()}
    return ConsulService(str(one["Host"]), int(one["Port"]), tags)


def _stock_service(
    config: ConsulConfig,
    *,
    service_id: str,
    name: str,
    port: int,
    tags: Mapping[str, str] | None,
    check_script: str | None,
    host: str | None,
) -> dict[str, Any]:
    """What a stock agent takes. A service is born critical unless told otherwise, and would be hidden."""
    body: dict[str, Any] = {"ID": service_id, "Name": name, "Port": port}
    if host is not None:
        body["Address"] = host
    if tags is not None:
        body["Tags"] = [f"{key}:{value}" for key, value in tags.items()]
    check = {"DeregisterCriticalServiceAfter": _seconds(config.remove_after)}
    if check_script is None:
        body["Check"] = check | {"TTL": _seconds(config.ttl), "Status": "passing"}
    else:
        body["Check"] = check | {
            "Interval": _seconds(config.heartbeat),
            "Args": ["/bin/sh", "-c", check_script],
        }
    return body


def _lookup_service(
    config: ConsulConfig,
    *,
    service_id: str,
    name: str,
    port: int,
    tags: Mapping[str, str] | None,
    check_script: str | None,
    host: str | None,  # noqa: ARG001
) -> dict[str, Any]:
    """What ByteDance's agent takes, which knows its own host."""
    body: dict[str, Any] = {"id": service_id, "name": name, "port": port}
    body["check"] = {"ttl": _seconds(config.ttl)}
    if check_script is not None:
        body["check"] = {"interval": _seconds(config.heartbeat), "script": check_script}
    if tags is not None:
        body["tags"] = [f"{key}:{value}" for key, value in tags.items()]
    return body


def _seconds(duration: timedelta) -> str:
    """As Go reads it."""
    whole, rest = divmod(duration, timedelta(seconds=1))
    return f"{whole * 1000 + rest // timedelta(milliseconds=1)}ms" if rest else f"{whole}s"


def _split_http_addr(address: str) -> tuple[str, str | None]:
    """Read CONSUL_HTTP_ADDR: host:port, http://host:port or unix:///path."""
    if address.startswith("unix://"):
        return address.removeprefix("unix://"), None
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None:
        raise ConfigError(
            f"Consul: CONSUL_HTTP_ADDR must be host:port, a URL or unix://PATH, got {address!r}"
        )
    return host, None if port is None else str(port)
