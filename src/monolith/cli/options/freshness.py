"""The options of `monolith freshness`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshnessOptions:
    """Measure how long it takes from an event to an answer of a server that knows of it.

    With --source, new ids are written to the stream that the trainer reads, and asked for until their answer
    changes. Without it, only what answers say of themselves is shown.
    """

    url: str
    """Where the server is: http://host:port, https://host:port or grpc://host:port."""
    row: str = ""
    """An event as a JSON object with all columns that training reads, labels included."""
    id: str | None = None
    """The column of the row whose id is replaced by one that nobody has seen; needed with --source."""
    source: str | None = None
    """Where events are written: kafka://broker:9092/topic (messages in JSON), or a folder that the trainer
    watches for new .jsonl files."""
    event_time: str | None = None
    """The column that is set to the time of writing, in Unix seconds."""
    count: int = 10
    """How many events are written, one after the other; without --source, how often the server is asked."""
    every: float = 0.2
    """Seconds between two events, or two requests without --source."""
    pause: float = 0.01
    """Seconds between two requests for one event."""
    timeout: float = 30.0
    """Seconds that an event has to reach an answer."""
    model: str | None = None
    """The name of the model; by default the only one of the server."""
    json: bool = False
    """Print the outcome as one JSON object."""
    token_file: Path | None = None
    """A file with the token that the server asks for."""
    tls_cert: Path | None = None
    """The certificate to show to the server, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificate of the server, PEM."""
    tls_server_name: str | None = None
    """The name in the server's certificate, where it is not the host in the URL."""
