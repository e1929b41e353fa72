"""Ports: whether one can be listened on, and why not."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from monolith.errors import ListenError


def join_address(host: str, port: int) -> str:
    """Return host:port; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_port(whose: str, host: str, port: int) -> None:
    """Bind and let go again: Flight itself does not say why it cannot listen."""
    if not 0 <= port <= 65535:
        raise listen_error(whose, host, port, None)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            with suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server would
            probe.bind(address)
    except OSError as cause:
        raise listen_error(whose, host, port, cause) from cause


def bound_socket(host: str, port: int, share: bool = False, *, whose: str = "serve") -> socket.socket:
    """Return a socket that is bound, and not listening yet.

    Args:
        share: Whether other processes of this user may listen on the same port.
        whose: What an error begins with.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
    except OSError as cause:
        raise listen_error(whose, host, port, cause) from cause
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except (OSError, OverflowError) as cause:
        made.close()
        if isinstance(cause, OverflowError):
            raise ListenError(
                f"{whose}: cannot listen on {host}:{port}: a port is from 0 to 65535"
            ) from cause
        raise listen_error(whose, host, port, cause) from cause
    return made


def listen_error(whose: str, host: str, port: int, cause: OSError | None) -> ListenError:
    number = None if cause is None else cause.errno
    why = {
        errno.EADDRINUSE: "the port is in use. Choose another, or 0 for any free one.",
        errno.EACCES: "this user may not listen there. Ports below 1024 need privileges; choose one above.",
        errno.EADDRNOTAVAIL: "that is not an address of this machine.",
    }
    reason = why.get(number or 0, f"{cause}." if cause else "a port is a free number from 0 to 65535.")
    error = ListenError(f"{whose}: cannot listen on {host}:{port}: {reason}")
    error.errno = number
    return error
