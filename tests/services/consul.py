"""A Consul, as its HTTP API documentation describes it: agents, their services and checks, one catalog.

Not a stand-in that answers what a test wants: services are critical until a check passes, and again when
its time to live is over; a service that stays critical is removed; an agent puts back what somebody takes
out of the catalog while it lives. Answers over TCP or a unix socket. With `vendor`, an agent is asked as
ByteDance's is: /v1/lookup/name instead of the health API, and checks are passed with GET.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Service:
    """A service at its agent, with its one check."""

    id: str
    name: str
    port: int
    address: str
    tags: list[str]
    ttl_s: float | None
    remove_after_s: float | None
    passed_at: float | None
    critical_at: float

    def is_passing(self, now: float) -> bool:
        if self.ttl_s is None:
            return True
        return self.passed_at is not None and now - self.passed_at <= self.ttl_s

    def critical_for_s(self, now: float) -> float:
        since = self.critical_at if self.passed_at is None else self.passed_at + (self.ttl_s or 0)
        return 0.0 if self.is_passing(now) else now - since


@dataclass
class Catalog:
    """What all agents together know: (node, service id) -> service."""

    clock: Callable[[], float] = time.monotonic
    lock: threading.RLock = field(default_factory=threading.RLock)
    services: dict[tuple[str, str], Service] = field(default_factory=dict)
    agents: dict[str, Agent] = field(default_factory=dict)

    def settle(self) -> None:
        """Let living agents remove what has been critical for too long, and put back the rest of theirs."""
        now = self.clock()
        for agent in self.agents.values():
            if not agent.lives:
                continue
            for service in list(agent.services.values()):
                if service.remove_after_s and service.critical_for_s(now) > service.remove_after_s:
                    del agent.services[service.id]
            theirs = {(agent.node, service.id): service for service in agent.services.values()}
            for key in [key for key in self.services if key[0] == agent.node and key not in theirs]:
                del self.services[key]
            self.services.update(theirs)


class Agent:
    """One agent. A test may make it fail: see the attributes."""

    def __init__(
        self,
        catalog: Catalog | None = None,
        node: str = "node-a",
        path: Path | None = None,
        vendor: bool = False,
    ) -> None:
        """
        Args:
            path: Of the unix socket to listen on; None listens on a port of 127.0.0.1.
        """
        self.catalog = Catalog() if catalog is None else catalog
        self.catalog.agents[node] = self
        self.node = node
        self.vendor = vendor
        self.services: dict[str, Service] = {}
        self.failing: dict[str, int] = {}
        """Beginning of a path -> the status to answer with."""
        self.loses_registrations = False
        """Whether to say yes to a registration, and forget it."""
        self.hangs = threading.Event()
        """While set, requests are taken and not answered."""
        self.token: str | None = None
        """What a client must show."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.bodies: list[Any] = []
        """What was sent along, where something was."""
        self.connections: set[socket.socket] = set()
        self.lives = False
        self._path = path
        self.port = 0
        self.start()

    @property
    def host(self) -> str:
        return "127.0.0.1" if self._path is None else str(self._path)

    def start(self) -> None:
        """Listen; after `kill`, where it did before."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._server: Any = _UnixServer(str(self._path), _Handler)
        else:
            self._server = _TcpServer(("127.0.0.1", self.port), _Handler)
            self.port = self._server.server_address[1]
        self._server.agent = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.lives = True

    def kill(self, forget: bool = False) -> None:
        """Stop as in a crash: connections break, and the catalog keeps what it was told.

        Args:
            forget: The services too, as an agent does whose files are lost.
        """
        self.lives = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if forget:
            self.services.clear()

    def stop(self) -> None:
        self.hangs.clear()
        if self.lives:
            self.kill()

    def shown(self, name: str) -> set[str]:
        """Return the ids of the services of a name that pass."""
        with self.catalog.lock:
            self.catalog.settle()
            now = self.catalog.clock()
            return {
                one.id for one in self.catalog.services.values() if one.name == name and one.is_passing(now)
            }

    def answer(self, method: str, target: str, body: Any, token: str | None) -> tuple[int, Any]:
        """Return a status and what to send: text as it is, all else as JSON."""
        url = urlsplit(target)
        path, params = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
        self.requests.append((method, url.path))
        if body is not None:
            self.bodies.append(body)
        while self.hangs.is_set():
            time.sleep(0.01)
        for beginning, status in self.failing.items():
            if path.startswith(beginning):
                return status, "out of order"
        if self.token is not None and token != self.token:
            return 403, "Permission denied"
        with self.catalog.lock:
            self.catalog.settle()
            for (known, beginning), call in self._routes().items():
                if path.startswith(beginning):
                    if method != known:
                        return 405, "method not allowed"
                    return call(path.removeprefix(beginning), params, body)
        return 404, "no such endpoint"

    def _routes(self) -> dict[tuple[str, str], Callable[..., tuple[int, Any]]]:
        routes: dict[tuple[str, str], Callable[..., tuple[int, Any]]] = {
            ("PUT", "/v1/agent/service/register"): self._register,
            ("PUT", "/v1/agent/service/deregister/"): self._deregister,
            ("GET" if self.vendor else "PUT", "/v1/agent/check/pass/"): self._pass,
            ("PUT", "/v1/catalog/deregister"): self._catalog_deregister,
            ("GET", "/v1/agent/self"): lambda *_: (200, {"Config": {"NodeName": self.node}}),
            ("GET", "/v1/agent/services"): lambda *_: (200, {key: {"ID": key} for key in self.services}),
        }
        if self.vendor:
            return routes | {("GET", "/v1/lookup/name"): self._lookup}
        return routes | {
            ("GET", "/v1/health/service/"): self._health,
            ("GET", "/v1/catalog/service/"): self._catalog_service,
        }

    def _register(self, _path: str, _params: Any, body: Any) -> tuple[int, Any]:
        fields = {key.lower(): value for key, value in body.items()}
        if not fields.get("name"):
            return 400, "Missing service name"
        check = {key.lower(): value for key, value in (fields.get("check") or {}).items()}
        if ("args" in check or "script" in check) and "interval" not in check:
            return 400, "Interval must be > 0 for Script or HTTP checks"
        now = self.catalog.clock()
        service = Service(
            id=fields.get("id") or fields["name"],
            name=fields["name"],
            port=fields.get("port", 0),
            address=fields.get("address", ""),
            tags=fields.get("tags") or [],
            ttl_s=_duration(check.get("ttl")),
            remove_after_s=_duration(check.get("deregistercriticalserviceafter")),
            passed_at=now if check.get("status") == "passing" else None,
            critical_at=now,
        )
        if not self.loses_registrations:
            self.services[service.id] = service
        return 200, ""

    def _deregister(self, service_id: str, _params: Any, _body: Any) -> tuple[int, Any]:
        if self.services.pop(service_id, None) is None:
            return 404, f'Unknown service ID "{service_id}". Ensure that the service ID is passed.'
        return 200, ""

    def _pass(self, check_id: str, _params: Any, _body: Any) -> tuple[int, Any]:
        service = self.services.get(check_id.removeprefix("service:"))
        if service is None:
            return 404, f'Unknown check ID "{check_id}". Ensure that the check ID is passed.'
        service.passed_at = self.catalog.clock()
        return 200, ""

    def _catalog_deregister(self, _path: str, _params: Any, body: Any) -> tuple[int, Any]:
        self.catalog.services.pop((body["Node"], body["ServiceID"]), None)
        return 200, True

    def _health(self, name: str, params: Any, _body: Any) -> tuple[int, Any]:
        now = self.catalog.clock()
        found = []
        for (node, _), one in self.catalog.services.items():
            passing = one.is_passing(now)
            if one.name == name and (passing or "passing" not in params):
                status = "passing" if passing else "critical"
                found.append(
                    {
                        "Node": {"Node": node, "Address": "127.0.0.1"},
                        "Service": {
                            "ID": one.id,
                            "Service": one.name,
                            "Tags": one.tags,
                            "Address": one.address,
                            "Port": one.port,
                        },
                        "Checks": [{"CheckID": f"service:{one.id}", "Status": status}],
                    }
                )
        return 200, found

    def _catalog_service(self, name: str, _params: Any, _body: Any) -> tuple[int, Any]:
        items = self.catalog.services.items()
        return 200, [{"Node": node, "ServiceID": one.id} for (node, _), one in items if one.name == name]

    def _lookup(self, _path: str, params: Any, _body: Any) -> tuple[int, Any]:
        now, name = self.catalog.clock(), params["name"][0]
        return 200, [
            {"Port": one.port, "Host": "127.0.0.1", "Tags": dict(tag.split(":", 1) for tag in one.tags)}
            for one in self.catalog.services.values()
            if one.name == name and one.is_passing(now)
        ]


def _duration(text: str | None) -> float | None:
    """Read the durations that a Go program writes, as far as tests use them."""
    if text is None:
        return None
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text.removesuffix("s"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet, or the client's kernel waits for more

    def setup(self) -> None:
        super().setup()
        self.server.agent.connections.add(self.connection)

    def finish(self) -> None:
        self.server.agent.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(sent) if sent else None
        token = self.headers.get("X-Consul-Token")
        status, answer = self.server.agent.answer(self.command, self.path, body, token)
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Threads(socketserver.ThreadingMixIn):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """Say nothing: clients hang up, as they do."""


class _TcpServer(_Threads, socketserver.TCPServer):
    allow_reuse_address = True


class _UnixServer(_Threads, socketserver.UnixStreamServer):
    pass
