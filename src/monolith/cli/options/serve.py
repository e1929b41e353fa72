"""The options of `monolith serve | ask`, apart from what runs them: reading them must not load torch.

Most flags of `serve` are aliases of a field of the group `serve` of a config file; their help names the
field. None, False or an empty list is a flag that was not given: the config file, then the default, holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from monolith.cli.options.flags import SecurityOptions

SERVE_FIELDS = {
    "discovery": "serve.shards.discovery",
    "missing": "serve.shards.missing",
    "follow": "serve.follow.url",
    "follow_any_run": "serve.follow.any_run",
    "stale_after": "serve.follow.stale_after",
    "host": "serve.host",
    "port": "serve.port",
    "http_port": "serve.http_port",
    "grpc_port": "serve.grpc_port",
    "allowed_hosts": "serve.allowed_hosts",
    "allow_control": "serve.allow_control",
    "shared_memory": "serve.shared_memory",
    "log_served": "serve.log.to",
    "log_fraction": "serve.log.fraction",
    "items": "serve.items",
    "split": "serve.splits",
    "canary": "serve.canary.routes",
    "shadow": "serve.shadows",
    "max_batch_rows": "serve.batching.max_rows",
    "max_delay_ms": "serve.batching.max_delay",
    "runners": "serve.batching.runners",
    "max_request_bytes": "serve.limits.request_bytes",
    "max_json_bytes": "serve.limits.json_bytes",
    "max_bytes_in_flight": "serve.limits.in_flight_bytes",
    "min_body_rate": "serve.limits.body_rate",
    "max_connections": "serve.limits.connections",
    "max_peer_connections": "serve.limits.peer_connections",
    "max_peer_requests": "serve.limits.peer_requests",
    "max_rows": "serve.limits.rows",
    "max_queue": "serve.limits.queue",
    "max_queue_rows": "serve.limits.queue_rows",
    "max_concurrency": "serve.limits.concurrency",
    "timeout": "serve.limits.timeout",
    "poll": "serve.poll",
    "drain": "serve.drain",
    "threads": "serve.threads",
    "predict_threads": "serve.predict_threads",
    "memory": "serve.memory_bytes",
    "history_cache_bytes": "serve.history_cache_bytes",
    "access_log": "serve.access_log",
    "trace_to": "serve.trace_to",
}
"""Flag -> the field of a config that it sets."""


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
    """Registry of serving servers, for --role entry and ps: zookeeper://host:2181/job, consul://host:8500/job
    or files:///shared/folder/job (serve.shards.discovery)."""
    shard: int = 0
    """The shard of a serving server."""
    replica: int = 0
    """The number of a serving server among those of its shard, each with another."""
    advertise: str | None = None
    """The host by which entries reach a serving server, where it is not the address listened on."""
    missing: Literal["refuse", "default"] | None = None
    """What an entry does if a shard does not answer: refuse the request, or default, which reads its rows as
    zeros and says so in the answer; by default the setting of the export, which must allow default
    (serve.shards.missing)."""
    follow: str | None = None
    """Follow a trainer: grpc://host:port of each publisher, separated by commas; kafka://broker/topic; a
    folder; or discovery, for the publishers in --discovery. By default models are served as exported
    (serve.follow.url)."""
    follow_any_run: bool = False
    """Follow a trainer of another run than the served export; by default it is refused
    (serve.follow.any_run)."""
    stale_after: str | None = None
    """Warn when followed rows are older than this: seconds, or as in 30s; by default 10 s
    (serve.follow.stale_after)."""
    host: str | None = None
    """Address to listen on; by default 127.0.0.1, which only this machine can reach (serve.host)."""
    port: int | None = None
    """One port for both HTTP and gRPC, instead of the two below; 0 chooses a free one. For --role ps, its
    port (serve.port)."""
    http_port: str = ""
    """Port for HTTP; 0 chooses a free one, None serves no HTTP; by default 8000 (serve.http_port)."""
    grpc_port: str = ""
    """Port for gRPC; 0 chooses a free one, None serves no gRPC; by default 8001 (serve.grpc_port)."""
    metrics_port: int | None = None
    """The port on which a serving server (--role ps) shows its metrics, at /metrics; 0 chooses a free one. By
    default it shows none. Other servers show theirs on their HTTP port."""
    allowed_hosts: tuple[str, ...] = ()
    """Other host names of the server over HTTP, such as that of a proxy; checked if neither a token nor
    certificates are required, or a page of another site could call the server (serve.allowed_hosts)."""
    allow_control: bool = False
    """Let clients that have the control token (--token-file) load and unload models (serve.allow_control)."""
    shared_memory: str | None = None
    """Let clients on this machine register shared memory for inputs and outputs, with the control token if
    there is one: POSIX objects whose keys begin with this prefix, such as shop_ for /shop_in. By default none
    (serve.shared_memory)."""
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
    items: tuple[str, ...] = ()
    """File of the items of a retrieval model, for top-k requests: NAME=FILE, or FILE with one model; CSV,
    Parquet or JSON lines with the columns of its item tower, and attributes to filter by (serve.items)."""
    split: tuple[str, ...] = ()
    """Divide the requests for a name: NAME=MODEL[/VERSION][:WEIGHT],... as in ads=ads/120:90,ads/140:10
    (serve.splits)."""
    canary: tuple[str, ...] = ()
    """Give a candidate more and more of the requests for a name, and roll it back if it is slower, fails or
    predicts otherwise on average: NAME=BASE,CANDIDATE as in ads=ads/120,ads/140 (serve.canary.routes)."""
    shadow: tuple[str, ...] = ()
    """Shadow traffic: mirror a fraction of requests to MODEL and compare; clients never see the answers.
    NAME=MODEL[/VERSION][:FRACTION] (serve.shadows)."""
    max_batch_rows: int | None = None
    """Largest number of rows in a batch; a larger request runs in pieces; by default 1024
    (serve.batching.max_rows)."""
    max_delay_ms: float | None = None
    """Milliseconds that a request may wait for others while the model is idle; by default 0
    (serve.batching.max_delay)."""
    runners: int | None = None
    """Largest number of batches of one version that run at a time, while they take 5 ms or more; by default 1
    (serve.batching.runners)."""
    max_request_bytes: str | None = None
    """Largest request with binary tensors, as in 64MiB, the default (serve.limits.request_bytes)."""
    max_json_bytes: str | None = None
    """Largest JSON of a request, and largest gRPC message without raw contents; by default 8MiB
    (serve.limits.json_bytes)."""
    max_bytes_in_flight: str | None = None
    """Memory that all requests in flight may use; JSON counts 16 times its size; by default 1GiB
    (serve.limits.in_flight_bytes)."""
    min_body_rate: int | None = None
    """Lowest bytes per second at which an HTTP body may arrive, after 10 seconds; by default 16384
    (serve.limits.body_rate)."""
    max_connections: int | None = None
    """Largest number of HTTP connections, including gRPC over a shared port; by default 4096
    (serve.limits.connections)."""
    max_peer_connections: int | None = None
    """Largest number of such connections from one client address; by default 1024
    (serve.limits.peer_connections)."""
    max_peer_requests: int | None = None
    """Largest number of requests in flight from one client address; by default 512
    (serve.limits.peer_requests)."""
    max_rows: int | None = None
    """Largest number of rows of a request; by default 65536 (serve.limits.rows)."""
    max_queue: int | None = None
    """Largest number of requests that wait for one version; by default 512 (serve.limits.queue)."""
    max_queue_rows: int | None = None
    """Largest number of rows that wait for one version, of all requests; by default 262144
    (serve.limits.queue_rows)."""
    max_concurrency: int | None = None
    """Largest number of requests in flight, waiting ones included; by default 1024
    (serve.limits.concurrency)."""
    timeout: str | None = None
    """Longest time for a request, whatever deadline its client sets: seconds, or as in 500ms; by default 10 s
    (serve.limits.timeout)."""
    poll: str | None = None
    """Interval at which folders are polled for new versions; by default 1 s (serve.poll)."""
    drain: str | None = None
    """Time for requests in flight to finish after SIGTERM; by default 30 s (serve.drain)."""
    threads: int | None = None
    """Number of requests of each transport that are handled at a time; by default 64 (serve.threads)."""
    predict_threads: int | None = None
    """Threads that compute one batch, of torch, too; by default 1 (serve.predict_threads)."""
    allow_module: bool = False
    """Import and run the Python code of a model that could not be exported as a graph."""
    compiled: bool = False
    """Run the code that export --compile put next to the graph: quicker for few rows, and equal to the
    trainer but for rounding. It is machine code from the exporting process; a version without it is not
    served."""
    memory: str | None = None
    """Memory for the rows of each loaded model version and for finding them, such as 8GiB; by default as much
    as they need. With less, the rows that are asked for most are in memory, and all others are read from the
    disk; the log and /metrics say how many (serve.memory_bytes)."""
    history_cache_bytes: int | None = None
    """Memory for encoded histories of users, in bytes, per process: for models whose items are ranked by the
    history of the user; by default 0, none (serve.history_cache_bytes)."""
    access_log: float | None = None
    """Fraction of answered requests that are logged, 0 to 1; of refused ones, ten per second are; by default
    0 (serve.access_log)."""
    trace_to: str | None = None
    """Send spans of requests that clients trace to an OpenTelemetry collector, such as
    http://127.0.0.1:4318/v1/traces; by default none are recorded (serve.trace_to)."""
    log_served: str | None = None
    """Log served features: requests, the features that the model was given, and its answers. A local folder,
    or kafka://broker:port/topic; by default nothing is logged (serve.log.to)."""
    log_fraction: float | None = None
    """Fraction of requests whose features are logged; by default 1 (serve.log.fraction)."""
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
