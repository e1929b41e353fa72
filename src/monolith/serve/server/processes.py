"""Several processes that serve the same models on the same port.

The operating system gives each connection to one of them. The process that receives a command for all, such
as loading a model, forwards it to its peers; the process that is asked for metrics collects those of all. For
that each process listens on a unix socket in a folder that only its user can read.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from monolith.cluster.security import HEADER, Guard

_log = logging.getLogger(__name__)

PEER_HEADER = "x-monolith-peer"
"""Marks a request that comes from a peer, so that it is not forwarded again."""
_TIMEOUT = 60.0
_METRICS_TIMEOUT = 2.0


class ServerProcesses:
    """The peers of this process, if any.

    Args:
        folder: The folder of the sockets; None if there is one process.
        index: The number of this process, below `count`.
        guard: The token that peers demand.
    """

    def __init__(
        self, folder: Path | None = None, index: int = 0, count: int = 1, guard: Guard | None = None
    ) -> None:
        self._folder = folder
        self._guard = guard or Guard()
        self.index = index
        self.count = count

    @property
    def share_port(self) -> bool:
        return self._folder is not None

    @property
    def socket(self) -> Path | None:
        """The socket on which this process listens for its peers."""
        return None if self._folder is None else self._path(self.index)

    def tell(self, verb: str, model: str, parameters: Mapping[str, str] | None = None) -> None:
        """Have the peers load or unload a model, too."""
        said = json.dumps({"parameters": dict(parameters or {})}).encode()
        self._tell(f"{verb} model {model!r}", f"/v2/repository/models/{quote(model, safe='')}/{verb}", said)

    def set_split(self, name: str, targets: str) -> None:
        """Have the peers divide the requests for a name in the same way."""
        body = json.dumps({"targets": targets}).encode()
        self._tell(f"split requests for {name!r}", f"/v2/splits/{quote(name, safe='')}", body)

    def splits(self) -> dict[str, str] | None:
        """Return how a peer divides requests now; None without a peer that answers."""
        for _, path in self._peers():
            with suppress(OSError, ValueError):
                status, body = self._call(path, "GET", "/v2/splits", _METRICS_TIMEOUT)
                if status == 200:
                    return {str(name): str(targets) for name, targets in json.loads(body).items()}
        return None

    def tell_regions(self, verb: str, name: str, said: Mapping[str, Any] | None = None) -> None:
        """Have the peers register or unregister shared memory, too; without a name, unregister all."""
        region = f"/region/{quote(name, safe='')}" if name else ""
        body = json.dumps(said or {}).encode()
        self._tell(f"{verb} shared memory {name!r}", f"/v2/systemsharedmemory{region}/{verb}", body)

    def regions(self) -> list[dict[str, Any]]:
        """Return the regions of shared memory that a peer knows; none without a peer that answers."""
        for _, path in self._peers():
            with suppress(OSError, ValueError):
                status, body = self._call(path, "GET", "/v2/systemsharedmemory/status", _METRICS_TIMEOUT)
                if status == 200:
                    return list(json.loads(body))
        return []

    def _tell(self, what: str, target: str, body: bytes | None = None) -> None:
        for index, path in self._peers():
            try:
                status, said = self._call(path, "POST", target, _TIMEOUT, body)
            except OSError as error:
                _log.warning("process %d was not told to %s: %s", index, what, error)
                continue
            if status != 200:
                _log.warning("process %d could not %s: %s", index, what, said[:500].decode())

    def metrics(self, own: bytes) -> bytes:
        """Return the metrics of all processes, each series labelled with its process."""
        if self._folder is None:
            return own
        from prometheus_client.parser import text_string_to_metric_families

        texts = {self.index: own}
        for index, path in self._peers():
            try:
                status, body = self._call(path, "GET", "/metrics", _METRICS_TIMEOUT)
            except OSError as error:
                _log.debug("process %d does not answer: %s", index, error)
                continue
            if status == 200:
                texts[index] = body
        families: dict[str, list[str]] = {}
        for index, text in sorted(texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                lines = families.setdefault(
                    family.name,
                    [f"# HELP {family.name} {family.documentation}", f"# TYPE {family.name} {family.type}"],
                )
                for sample in family.samples:
                    labels = {**sample.labels, "process": str(index)}
                    shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
                    lines.append(f"{sample.name}{{{shown}}} {sample.value}")
        return "\n".join(line for lines in families.values() for line in [*lines, ""]).encode()

    def _peers(self) -> Iterator[tuple[int, Path]]:
        for index in range(self.count):
            if index != self.index:
                yield index, self._path(index)

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"process_{index}.sock"

    def _call(
        self, path: Path, method: str, target: str, timeout: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        connection = _UnixConnection(path, timeout)
        try:
            headers = {PEER_HEADER: str(self.index)}
            if self._guard.header is not None:
                headers[HEADER] = self._guard.header
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as cause:
            raise ConnectionError(str(cause)) from cause
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
