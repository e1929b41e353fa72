"""A serving server: answers lookups in the rows of one shard.

    config = ServingServerConfig(host=host, port=7000, replica=1)
    server = ServingServer(DIR, 0, config, guard=guard, discovery=discovery)
    server.prefault(progress)           # so that no lookup waits for the disk
    server.serve(stop)                  # registers, and returns when `stop` is set or `close` was called

It maps DIR/ps_<shard>/<version>/tables/*.rows: the newest version when it starts, later ones as they
appear, and any that an entry requests. Several servers of one shard are its replicas: each has its own number
and is registered as <model>:ps_<shard> under it while it is ready.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from monolith import concurrency
from monolith.cluster import Discovery
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FileMissingError,
    MonolithError,
    OutOfMemoryError,
    RequestError,
    UnavailableError,
)
from monolith.observe import Progress
from monolith.observe.metrics import Metrics
from monolith.serve.config import ServeFollowConfig
from monolith.serve.follower import ModelFollower
from monolith.serve.metrics import LookupMetrics, ReadMetrics
from monolith.serve.rows import RowsClaim
from monolith.serve.shards.protocol import (
    SERVICE,
    ShardAbout,
    ShardHello,
    ShardStatus,
    pack_claim,
    shard_role,
)
from monolith.serve.shards.shard_versions import ShardVersion, ShardVersions
from monolith.store import TableIds
from monolith.store.row_requests import RowCall, RowFlags, RowHeader, RowRequest, pack_answer
from monolith.sync.channel import OpenReader
from monolith.wire.bulk import Bytes, Traffic
from monolith.wire.endpoint import Handlers
from monolith.wire.flight_server import Server
from monolith.wire.messages import Nothing, typed_calls
from monolith.wire.ports import Limits, join_address
from monolith.wire.transport import PortGuard

_log = logging.getLogger(__name__)

_EVERYWHERE = ("", "0.0.0.0", "::", "[::]")
_CALLS = {"hello": ShardHello, "status": Nothing}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingServerConfig:
    """Where a serving server listens, and how it opens versions."""

    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can reach it."""
    port: int = 0
    """Port to listen on; 0 lets the system choose."""
    advertise: str | None = None
    """Host by which entries reach the server if that is not `host`. A server that listens on all addresses of
    its machine cannot be registered without it."""
    replica: int = 0
    """A number that no other replica of the shard has."""
    versions: int = 3
    """Number of versions that stay open."""
    threads: int | None = None
    """Threads that a large lookup is spread over; by default the number of processors."""
    memory_bytes: int | None = None
    """Memory for the rows of each open version; by default as much as they need."""
    check_every: timedelta = timedelta(seconds=1)
    """Interval at which the folder is polled for a new version."""
    limits: Limits = field(default_factory=Limits)
    """Largest message and lookup of one caller."""
    follow: ServeFollowConfig = field(default_factory=ServeFollowConfig)
    """When to warn about stale rows, if a trainer is followed."""
    serve_withheld: Collection[str] = ()
    """Versions to serve although they are withheld, because an operator named them."""

    def __post_init__(self) -> None:
        if self.replica < 0 or self.versions < 1:
            raise ConfigError(
                "a serving server has a replica from 0 on and keeps at least 1 version, got replica "
                f"{self.replica}, {self.versions} versions"
            )


class ServingServer:
    """One replica of one shard. Listens from construction on; `start` or `serve` registers it for entries.

    Shapes of a lookup, for t tables: `sizes` int64 (t,), `ids` int64 (sum of sizes,), answer float32
    (sum of sizes x width,), table after table, with the claim of the rows in its header.

    Example: of 2 shards, shard 1 has the odd IDs. A lookup of item IDs 1, 3 and user ID 5 sends sizes
    [2, 1] and ids [1, 3, 5], and receives 2 item rows and 1 user row; an ID without a row reads as zeros.

    Args:
        folder: The folder of a sharded export.
        shard: Number of the shard: the server maps `folder`/ps_<shard>.
        guard: The token or certificate that callers must present; see
            `monolith.cluster.security.guard_listener`.
        discovery: The registry; None if entries know the address. The caller closes it.
        follow: Opens a reader of the channel that a trainer publishes to; None serves rows as exported.
        metrics: Counts lookups and followed rows.
        on_lookup: Called before each lookup, on its thread.

    Raises:
        FileMissingError: The folder has no version of the shard.
        CorruptFileError: Its newest version is damaged.
        ListenError: The port is taken.
    """

    def __init__(
        self,
        folder: str,
        shard: int,
        config: ServingServerConfig | None = None,
        *,
        guard: PortGuard | None = None,
        discovery: Discovery | None = None,
        follow: OpenReader | None = None,
        metrics: Metrics | None = None,
        on_lookup: Callable[[], None] | None = None,
    ) -> None:
        config = config or ServingServerConfig()
        if shard < 0:
            raise ConfigError(f"a serving server has a shard from 0 on, got shard {shard}")
        self.shard, self.replica = shard, config.replica
        self._versions = ShardVersions(
            folder,
            shard,
            most=config.versions,
            threads=config.threads,
            memory_bytes=config.memory_bytes,
            serve_withheld=config.serve_withheld,
        )
        self._newest = self._versions.open(self._versions.newest())
        metrics = Metrics() if metrics is None else metrics
        self._counts = LookupMetrics(metrics, self.role)
        self._reads = ReadMetrics(metrics)
        self.follower: ModelFollower | None = None
        """Keeps the rows up to date; None if no trainer is followed."""
        if follow is not None:
            self.follower = ModelFollower(
                self.role,
                follow,
                config.follow,
                metrics=metrics,
                go_to=self._go_to,
                share=(shard, self._newest.about.shards),
            )
            self._attach(self._newest)
        self._limits = config.limits.for_readers()
        self._on_lookup = on_lookup
        self._discovery = discovery
        self._look_every = config.check_every.total_seconds()
        self._lookups = 0
        self._ended = concurrency.Event()
        self._no_memory: BaseException | None = None
        self._ready = False
        self._watcher: concurrency.Thread | None = None
        calls = {"hello": self._hello, "status": lambda _: self.status()}
        try:
            self._server = Server(
                SERVICE,
                Handlers(
                    calls=typed_calls(_CALLS, calls), message=self._lookup, out_of_memory=self._note_no_memory
                ),
                host=config.host,
                port=config.port,
                guard=guard,
                limits=self._limits,
            )
        except BaseException:
            self._versions.close()
            raise
        self.address = join_address(config.advertise or config.host, self._server.port)
        """host:port by which entries reach the server."""

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def model(self) -> str:
        return self._newest.about.model

    @property
    def role(self) -> str:
        """The role under which it is registered."""
        return shard_role(self.model, self.shard)

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests."""
        return self._ready

    @property
    def traffic(self) -> Traffic:
        """Bytes received from all callers and sent to them."""
        return self._server.traffic

    def status(self) -> ShardStatus:
        return ShardStatus(
            ready=self._ready,
            shard=self.shard,
            replica=self.replica,
            lookups=self._lookups,
            versions=[version.about for version in self._versions.all()],
            withheld=self._versions.withheld,
            following="" if self.follower is None else self.follower.notice,
        )

    def prefault(self, progress: Progress | None = None) -> None:
        """Load the newest version into memory; `progress` is advanced up to `file_bytes`."""
        self._newest.tables.prefault(progress)

    @property
    def file_bytes(self) -> int:
        """Bytes of the newest version's tables."""
        return self._newest.tables.bytes

    def start(self) -> None:
        """Register, and poll for new versions from now on.

        Raises:
            RetryableError: The registry cannot be reached now.
            DiscoveryError: It refuses.
            ConfigError: Entries could not reach it at its address.
        """
        if self._watcher is not None:
            return
        if self._discovery is not None:
            if self.address.rpartition(":")[0] in _EVERYWHERE:
                raise ConfigError(
                    f"entries cannot reach a serving server at {self.address}. Name the host by which they "
                    "reach it with advertise"
                )
            self._discovery.register(self.role, self.replica, self.address)
        self._ready = True
        if self.follower is not None:
            self.follower.begin()
        self._watcher = concurrency.Thread(target=self._watch, name=f"serving-{self.shard}", daemon=True)
        self._watcher.start()

    def _note_no_memory(self, error: BaseException) -> None:
        self._no_memory = error

    def serve(self, stop: concurrency.Event | None = None) -> None:
        """`start`, wait until `stop` is set or `close` was called, and `close`.

        Raises:
            OutOfMemoryError: There was no memory for a lookup: the process is to end. Other replicas answer
                until it is started again.
        """
        self.start()
        ended = self._ended if stop is None else stop
        try:
            while not ended.wait(0.5) and not self._ended.is_set():
                if self._no_memory is not None:
                    raise OutOfMemoryError(
                        f"serving server {self.role} has no memory left: {self._no_memory}"
                    ) from self._no_memory
        finally:
            self.close()

    def close(self) -> None:
        """Deregister, finish the requests under way, and free the port. Closing again does nothing."""
        self._ready = False
        if self._ended.is_set():
            return
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join()
            if self._discovery is not None:
                with contextlib.suppress(MonolithError):  # entries notice a closed port by themselves
                    self._discovery.deregister(self.role, self.replica, self.address)
        if self.follower is not None:
            self.follower.close()
        self._server.close()
        self._versions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Versions

    def check_versions(self) -> None:
        """Open the newest version that is not withheld and load it into memory. The watch thread calls it."""
        if self.follower is not None and self.follower.is_rolled_back:
            for one in self._versions.all():
                one.over = None
        newest = self._versions.newest()
        if newest == self._newest.about.version:
            return
        opened = self._versions.open(newest)
        opened.tables.prefault()
        self._attach(opened)
        _log.info("%s: opened version %s", self.role, newest)
        self._newest = opened

    def _attach(self, version: ShardVersion) -> None:
        """Keep a version up to date from now on, if a trainer is followed."""
        if self.follower is not None and not self.follower.is_rolled_back:
            version.over = self.follower.attach_tables(version.servable, version.tables)

    def _go_to(self, version: str | None) -> None:
        """Serve a version as exported, so that entries can roll back to it; with None, follow again.

        Other open versions keep their overlay until the next poll: an entry that has not rolled back yet
        still gets the rows of the version it serves.
        """
        if version is None:
            self._attach(self._newest)
        else:
            self._versions.open(version).over = None

    def _watch(self) -> None:
        said = ""
        while not self._ended.wait(self._look_every):
            try:
                self.check_versions()
                self._reads.count(self.role, self._newest.tables)
                said = ""
            except (MonolithError, OSError) as error:  # entries still use the open versions
                if str(error) != said:
                    said = str(error)
                    _log.warning("%s: cannot open a new version, retrying: %s", self.role, said)

    # Answers

    def _hello(self, body: ShardHello) -> ShardAbout:
        try:
            return self._versions.open(body.version).about
        except CorruptFileError as error:
            _log.warning("%s: %s", self.role, error)
            raise FileMissingError(f"version {body.version} is damaged: {error}") from error

    def _lookup(self, header: bytes, data: Bytes) -> tuple[bytes, Any]:
        about = RowHeader.read(header)
        if about.call != RowCall.LOOKUP or about.flags != RowFlags.NONE or about.store or about.floats:
            raise RequestError("a serving server answers only lookups")
        if about.ids > self._limits.ids:
            raise RequestError(f"it has {about.ids:,} ids, and limits.ids allows {self._limits.ids:,}")
        version = self._versions.find(about.incarnation)
        widths = list(version.tables.tables.values())
        request = RowRequest(data, cells=about.batches * len(widths), ids=about.ids)
        self._check_answer(request, widths)
        if self._on_lookup is not None:
            self._on_lookup()
        self._lookups += 1
        began = time.perf_counter()
        rows, claim = self._rows(version, request)
        self._counts.answered(about.ids, time.perf_counter() - began)
        return pack_answer(RowFlags.NONE, rows.numel()) + pack_claim(claim), rows.numpy()

    def _rows(self, version: ShardVersion, request: RowRequest) -> tuple[torch.Tensor, RowsClaim]:
        ids = TableIds(torch.from_numpy(request.ids), torch.from_numpy(request.sizes))
        try:
            return version.lookup(ids)
        except CorruptFileError as error:
            _log.error("%s: %s", self.role, error)
            raise UnavailableError(f"version {version.about.version} is damaged: {error}") from error

    def _check_answer(self, request: RowRequest, widths: list[int]) -> None:
        """Refuse a lookup whose answer would exceed the message limit, before memory is allocated for it."""
        sizes = request.sizes
        if len(sizes) and (int(sizes.min()) < 0 or int(sizes.max()) > len(request.ids)):
            raise RequestError("the number of ids of a table is negative, or larger than the request has")
        floats = int((sizes.reshape(-1, max(1, len(widths))).sum(0) * np.array(widths, np.int64)).sum())
        if 4 * floats > self._limits.message_bytes:
            raise RequestError(
                f"its answer would have {4 * floats:,} bytes, and limits.message_bytes allows "
                f"{self._limits.message_bytes:,}"
            )
