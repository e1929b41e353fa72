"""The page as a whole: from its sources to an address for a browser."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

from monolith.cluster.security import Guard, SecurityConfig, guard_listener
from monolith.config import Secret
from monolith.serve.server.config import ServeLimits
from monolith.serve.server.http_loop import HttpLoop
from monolith.ui.board import EVERY, Board
from monolith.ui.page_app import PageApp
from monolith.ui.sources import PageSource, source_of
from monolith.wire.ports import bound_socket, join_address

MOST_CONNECTIONS = 256
GRACE_SECONDS = 1.0


class Page:
    """Draws what sources say, from `start` to `close`.

    Args:
        sources: What to look at; a text as `monolith ui` takes it: RUN, URL, NAME=RUN or NAME=URL.
        host: The address to listen on. Only this machine can reach the usual one.
        port: 0 chooses a free one.
        token: What onlookers must show; needed where others can reach the address, unless a guard says
            something else. The page asks for it.
        guard: What callers must show, in place of the token.
        context: For TLS.
        source_security: What to show to the sources that are given as texts.
        every: Seconds between two looks at a source.

    Raises:
        ConfigError: Others can reach the address, and nothing is demanded of them; or two sources have one
            name; or a text names none.
    """

    def __init__(
        self,
        sources: Sequence[PageSource | str],
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        *,
        guard: Guard | None = None,
        context: ssl.SSLContext | None = None,
        source_security: SecurityConfig | None = None,
        every: float = EVERY,
    ) -> None:
        if guard is None:
            guard = guard_listener(host, SecurityConfig(token=None if token is None else Secret(token)))
        opened = [source_of(one, source_security) if isinstance(one, str) else one for one in sources]
        self._board = Board(opened, every=every)
        self._app = PageApp(self._board, guard, host, every=every)
        self._host = host
        self._port = port
        self._context = context
        self._loop: HttpLoop | None = None
        self.address: str | None = None
        """The URL of the page, from `start` on."""

    def start(self) -> Self:
        """Look and listen from now on.

        Raises:
            ListenError: The port is taken.
            MissingExtraError: A package of the extra `serve` is missing.
        """
        if self._loop is not None:
            return self
        held = bound_socket(self._host, self._port, whose="ui")
        port = held.getsockname()[1]
        try:
            self._loop = HttpLoop(
                self._app,
                [held],
                context=self._context,
                limits=ServeLimits(connections=MOST_CONNECTIONS, read_timeout=timedelta(seconds=10)),
            )
        except BaseException:
            held.close()
            raise
        scheme = "http" if self._context is None else "https"
        self.address = f"{scheme}://{join_address(self._host, port)}/"
        self._board.start()
        return self

    def close(self) -> None:
        """Stop. Closing again does nothing."""
        self._app.close()
        if self._loop is not None:
            self._loop.close(GRACE_SECONDS)
            self._loop = None
        self._board.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
