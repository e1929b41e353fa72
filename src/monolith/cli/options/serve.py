"""The options of `monolith serve | ask`, apart from what runs them: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from monolith.cli.options.flags import SecurityOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Serve exported models over the Open Inference Protocol: HTTP and gRPC."""

    folders: tuple[str, ...]
    """Folders that `monolith export` wrote, each of one model, or of runs that were exported: DIR, or
    NAME=DIR to choose its name. Of each, one version is served: that of the best checkpoint, if the run was
    evaluated, else the newest. A better one, or a newer one, is served as soon as it is there."""
    role: Literal["all", "entry", "ps"] = "all"
    """What this process does: all; entry, which answers requests with rows of serving servers; or ps, which
    answers lookups in the rows of one shard. For the last two, export with --shards."""
    discovery: str | None = None
    """Where an entry finds serving servers, and these register: zookeeper://host:2181/job,
    consul://host:8500/job or files:///shared/folder/job."""
    shard: int = 0
    """The shard of a serving server."""
    replica: int = 0
    """The number of a serving server among those of its shard, each with another."""
    advertise: str | None = None
    """The host by which entries reach a serving server, where it is not the address listened on."""
    missing: Literal["refuse", "default"] | None = None
    """What an entry does where a shard does not answer: refuse the request, or take zeros for its rows and
    say so in the answer. By default what the export allows; default only where it does."""
    follow: str | None = None
    """Where a trainer publishes what it learns, to serve it a moment later: grpc://host:port of every holder
    of rows, with commas; kafka://broker/topic; a folder; or discovery, for what --discovery knows. By default
    models are served as exported."""
    follow_any_run: bool = False
    """Follow a trainer of another run than the one that the served export was made from: all of its rows are
    taken. By default it is refused."""
    stale_after: float = 10.0
    """The age of what is served, in seconds, that is warned about where a trainer is followed."""
    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it."""
    port: int | None = None
    """One port for both HTTP and gRPC, in place of the two below; 0 chooses a free one. Of a serving server,
    its port; by default a free one."""
    http_port: int | None = 8000
    """The port for HTTP; 0 chooses a free one, None serves no HTTP."""
    grpc_port: int | None = 8001
    """The port for gRPC; 0 chooses a free one, None serves no gRPC."""
    metrics_port: int | None = None
    """The port on which a serving server (--role ps) shows its metrics, at /metrics; 0 chooses a free one. By
    default it shows none. The others show theirs on their port for HTTP."""
    allowed_hosts: tuple[str, ...] = ()
    """Other names by which clients reach the server over HTTP, such as the name of a proxy. Names are checked
    if neither a token nor certificates are demanded, or a page of another site could call the server."""
    allow_control: bool = False
    """Let clients that have the control token (--token-file) load and unload models."""
    processes: int = 1
    """The number of processes that share the ports; one that is killed is restarted."""
    checkpoint: str | None = None
    """The checkpoint whose version is served: best, latest, or its name or step, such as 30. By default the
    best, if the run was evaluated; with --follow the latest."""
    version_policy: str | None = None
    """The versions that are served, in place of --checkpoint: latest, latest:2 (the two newest), all, or
    specific:120,140."""
    serve_withheld: tuple[str, ...] = ()
    """Versions to serve although they are withheld: while publishing is paused, a run marks the versions
    whose rows it does not trust, and servers do not take them. Give their names, such as 600."""
    split: tuple[str, ...] = ()
    """How requests for a name are shared out: NAME=MODEL[/VERSION][:WEIGHT],... as in
    ads=ads/120:90,ads/140:10."""
    shadow: tuple[str, ...] = ()
    """Who is asked beside, compared and not heard: NAME=MODEL[/VERSION][:SHARE], with a share of the requests
    from 0 to 1."""
    max_batch_rows: int = 1024
    """The most rows that are answered together."""
    max_delay_ms: float = 0.0
    """How long a request may wait for others, in milliseconds. 0 answers at once; those that come while the
    model is busy are answered together all the same."""
    runners: int = 1
    """The number of batches of one version that are worked on at a time."""
    max_request_bytes: int = 64 << 20
    """The largest request with its tensors in binary."""
    max_json_bytes: int = 8 << 20
    """The largest JSON of a request, and the largest gRPC message without raw contents."""
    max_bytes_in_flight: int = 1 << 30
    """The most bytes that requests in flight hold together; JSON counts 16 times, as it does in memory."""
    min_body_rate: int = 16 << 10
    """The fewest bytes in a second that the body of an HTTP request may come with, after 10 seconds."""
    max_connections: int = 4096
    """The most HTTP connections, and those that a shared port passes on to gRPC."""
    max_peer_connections: int = 1024
    """The most such connections of one client address."""
    max_peer_requests: int = 512
    """The most requests of one client address in flight."""
    max_rows: int = 65_536
    """The most rows of a request."""
    max_queue: int = 512
    """The most requests that wait for one version of a model."""
    max_concurrency: int = 1024
    """The most requests that are answered at a time, waiting ones included."""
    timeout: float = 10.0
    """The most seconds that a request takes, whatever its caller allows."""
    poll: float = 1.0
    """Seconds between two looks for a new version."""
    drain: float = 30.0
    """Seconds that requests in flight have to end after SIGTERM."""
    threads: int = 64
    """The number of requests of each transport that are decoded, waited for and encoded at a time."""
    predict_threads: int | None = None
    """The number of threads that work on one batch; by default as many as torch uses."""
    allow_module: bool = False
    """Import and run the Python code of a model that could not be exported as a graph."""
    compiled: bool = False
    """Run what export --compile put beside the graph: quicker for few rows, and equal to the trainer but for
    rounding. It is code of whoever exported it; a version without it is not served."""
    access_log: float = 0.0
    """The share of answered requests that are logged, from 0 to 1; of refused ones, ten a second are."""
    peers: str | None = None
    """Set by --processes for each of them: INDEX/COUNT:FOLDER."""
    security: Annotated[SecurityOptions, tyro.conf.arg(name="")] = field(default_factory=SecurityOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskOptions:
    """Ask a model server what its model says of some rows."""

    url: str
    """Where the server is: http://host:port, https://host:port or grpc://host:port."""
    row: tuple[str, ...] = ()
    """A row as a JSON object, such as '{"user": "ann", "price": 3.5}'; several may follow each other."""
    file: Path | None = None
    """A file of rows: a JSON list of objects, or one object in each line. - reads standard input."""
    model: str | None = None
    """The name of the model; by default the only one of the server."""
    version: str = ""
    """The version of the model; by default the one that the server chooses."""
    timeout: float = 10.0
    """Seconds to wait for the answer."""
    json: bool = False
    """Print the answer as one JSON object."""
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
