"""Asks a process of ours over HTTP: no proxy, no redirect, a bound on the answer."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

from monolith.cluster.security import SecurityConfig, guard_caller, ssl_context
from monolith.errors import ConfigError, UnavailableError

ANSWER_SECONDS = 5.0
LARGEST_ANSWER = 16 << 20


class ProcessCaller:
    """Asks one process, on one thread.

    Args:
        url: http(s)://host:port; what follows is left out.
        security: What to show: a token, a certificate.

    Raises:
        ConfigError: It is no such URL, or a file of the security cannot be read.
    """

    def __init__(self, url: str, security: SecurityConfig) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as cause:
            raise ConfigError(f"ui: {url!r} is no URL of a process: {cause}") from cause
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise ConfigError(f"ui: {url!r} is no URL of a process; give http://host:port")
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self.name = f"{parts.scheme}://{parts.netloc}"
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._context = ssl_context(security, server=False) or ssl.create_default_context()
        header = guard_caller(security).header
        self._headers = {} if header is None else {"Authorization": header}

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Return the status and the body of an answer.

        Raises:
            UnavailableError: There is none; or the process wants a token and was shown none, or another.
        """
        connection = self._connection()
        try:
            connection.request(method, path, headers={**self._headers, "Accept": "*/*"})
            answer = connection.getresponse()
            body = answer.read(LARGEST_ANSWER + 1)
        except (OSError, http.client.HTTPException) as cause:
            why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise UnavailableError(f"{self.name} cannot be reached: {why}") from cause
        finally:
            connection.close()
        if answer.status == 401:
            raise UnavailableError(f"{self.name} wants a token; start the page with --source-token-file")
        if len(body) > LARGEST_ANSWER:
            raise UnavailableError(f"{self.name}{path} answers with more than {LARGEST_ANSWER >> 20} MB")
        return answer.status, body

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=ANSWER_SECONDS, context=self._context
        )
