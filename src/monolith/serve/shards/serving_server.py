"""A serving server: answers lookups in the rows of one shard.

    server = ServingServer(DIR, 0, replica=1, host=host, port=7000, guard=guard, discovery=discovery)
    server.prefault(progress)           # where no lookup should wait for the disk
    server.serve(stop)                  # registers, and returns when `stop` is set or `close` was called

It maps DIR/ps_<shard>/<version>/tables/*.rows, the newest version when it starts, later ones as they
appear and any that an entry asks for. Several servers of one shard are its replicas: each has a number of
its own, and is registered as <model>:ps_<shard> under it while it is ready.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from monolith.cluster import Discovery
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FileMissingError,
    MonolithError,
    RequestError,
    UnavailableError,
)
from monolith.observe import Progress
from monolith.observe.metrics import Metrics
from monolith.serve.config import ServeFollowConfig
from monolith.serve.follower import ModelFollower
from monolith.serve.metrics import LookupMetrics
from monolith.serve.rows import RowsClaim
from monolith.serve.shards.protocol import (
    SERVICE,
    ShardAbout,
    ShardHello,
    ShardStatus,
    pack_claim,
    shard_role,
)
from monolith.serve.shards.shard_versions import HeldVersions, ShardVersion
from monolith.store import TableIds
from monolith.store.row_requests import RowCall, RowFlags, RowHeader, RowRequest, pack_answer
from monolith.sync.channel import OpenReader
from monolith.wire.bulk import Bytes, Traffic
from monolith.wire.flight import PortGuard
from monolith.wire.flight_server import Handlers, Server
from monolith.wire.messages import Nothing, typed_calls
from monolith.wire.ports import Limits, join_address

_log = logging.getLogger(__name__)

_EVERYWHERE = ("", "0.0.0.0", "::", "[::]")
_CALLS = {"hello": ShardHello, "status": Nothing}


class ServingServer:
    """One replica of one shard. Listens from the beginning; `start` or `serve` lets entries find it.

    Args:
        folder: DIR of a sharded export.
        shard: Which of its ps_<shard>.
        host: Where to listen; only this machine by default.
        port: 0 lets the system choose.
        guard: What callers must present; see `monolith.cluster.security.guard_listener`.
        discovery: Where to register; None where entries know the address. Still the caller's to close.
        replica: A number that no other replica of the shard has.
        advertise: The host by which entries reach it, where that is not `host`. One that listens on all
            addresses of its machine cannot be registered without it.
        versions: As many are kept open.
        threads: That share a large call; as many as there are processors by default.
        look_every: How often to look for a new version.
        limits: What one caller may ask for.
        on_lookup: Called before each lookup, on its thread.
        follow: Opens an end of the channel by which a trainer brings the rows up to date; None serves them as
            they were exported.
        following: When to warn that nothing comes.
        metrics: Where lookups are counted, and what was followed.
        serve_withheld: Versions to serve although they are withheld, since their rows are not trusted.

    Raises:
        FileMissingError: The folder has no version of the shard.
        CorruptFileError: Its newest version is damaged.
        ListenError: The port is taken.
    """

    def __init__(
        self,
        folder: str,
        shard: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        discovery: Discovery | None = None,
        replica: int = 0,
        advertise: str | None = None,
        versions: int = 3,
        threads: int | None = None,
        look_every: timedelta = timedelta(seconds=1),
        limits: Limits | None = None,
        on_lookup: Callable[[], None] | None = None,
        follow: OpenReader | None = None,
        following: ServeFollowConfig | None = None,
        metrics: Metrics | None = None,
        serve_withheld: Collection[str] = (),
    ) -> None:
        if shard < 0 or replica < 0 or versions < 1:
            raise ConfigError(
                f"a serving server has a shard and a replica from 0 on and keeps at least 1 version, got "
                f"shard {shard}, replica {replica}, {versions} versions"
            )
        self.shard, self.replica = shard, replica
        self._versions = HeldVersions(
            folder, shard, most=versions, threads=threads, serve_withheld=serve_withheld
        )
        self._newest = self._versions.open(self._versions.newest())
        metrics = Metrics() if metrics is None else metrics
        self._counts = LookupMetrics(metrics, self.role)
        self.follower: ModelFollower | None = None
        """Who brings the rows up to date."""
        if follow is not None:
            self.follower = ModelFollower(
                self.role,
                follow,
                following or ServeFollowConfig(),
                metrics=metrics,
                go_to=self._go_to,
                share=(shard, self._newest.about.shards),
            )
            self._attach(self._newest)
        self._limits = (limits or Limits()).for_readers()
        self._on_lookup = on_lookup
        self._discovery = discovery
        self._look_every = look_every.total_seconds()
        self._lookups = 0
        self._ended = threading.Event()
        self._ready = False
        self._watcher: threading.Thread | None = None
        calls = {"hello": self._hello, "status": lambda _: self.status()}
        try:
            self._server = Server(
                SERVICE,
                Handlers(calls=typed_calls(_CALLS, calls), message=self._lookup),
                host=host,
                port=port,
                guard=guard,
                limits=self._limits,
            )
        except BaseException:
            self._versions.close()
            raise
        self.address = join_address(advertise or host, self._server.port)
        """host:port, for entries."""

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def model(self) -> str:
        return self._newest.about.model

    @property
    def role(self) -> str:
        """As what it is registered."""
        return shard_role(self.model, self.shard)

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests."""
        return self._ready

    @property
    def traffic(self) -> Traffic:
        """What came from all callers, and went to them."""
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
        """Bring the newest version into memory; `progress` is advanced up to `file_bytes`."""
        self._newest.tables.prefault(progress)

    @property
    def file_bytes(self) -> int:
        """Of the newest version."""
        return self._newest.tables.bytes

    def start(self) -> None:
        """Register, and look for new versions from now on.

        Raises:
            RetryableError: The registry cannot be reached now.
            DiscoveryError: It refuses.
            ConfigError: Nobody could reach it at its address.
        """
        if self._watcher is not None:
            return
        if self._discovery is not None:
            if self.address.rpartition(":")[0] in _EVERYWHERE:
                raise ConfigError(
                    f"a serving server that listens on {self.address} cannot be found there. Say by which "
                    "host entries reach it, with advertise"
                )
            self._discovery.register(self.role, self.replica, self.address)
        self._ready = True
        if self.follower is not None:
            self.follower.begin()
        self._watcher = threading.Thread(target=self._watch, name=f"serving-{self.shard}", daemon=True)
        self._watcher.start()

    def serve(self, stop: threading.Event | None = None) -> None:
        """`start`, wait until `stop` is set or `close` was called, and `close`."""
        self.start()
        ended = self._ended if stop is None else stop
        try:
            while not ended.wait(0.5) and not self._ended.is_set():
                pass
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
                with contextlib.suppress(MonolithError):  # it will notice
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

    def look_for_versions(self) -> None:
        """Open the newest version that is not withheld, if it is another, and bring it into memory. The watch
        does this."""
        if self.follower is not None and self.follower.is_back:
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
        """Bring a version up to date from now on, where a trainer is followed."""
        if self.follower is not None and not self.follower.is_back:
            version.over = self.follower.attach_tables(version.servable, version.tables)

    def _go_to(self, version: str | None) -> None:
        """Serve a version as it was exported, so that entries may go back to it; or follow again.

        Entries that have not gone back yet have the rows they speak of for a moment longer: until the watch
        looks again.
        """
        if version is None:
            self._attach(self._newest)
        else:
            self._versions.open(version).over = None

    def _watch(self) -> None:
        said = ""
        while not self._ended.wait(self._look_every):
            try:
                self.look_for_versions()
                said = ""
            except (MonolithError, OSError) as error:  # entries go on with what is open
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
            raise RequestError("a serving server answers lookups, and nothing else")
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
        """Refuse what would be answered by more than a message may have, before memory is taken for it."""
        sizes = request.sizes
        if len(sizes) and (int(sizes.min()) < 0 or int(sizes.max()) > len(request.ids)):
            raise RequestError("a table cannot have less than 0 ids, or more than there are")
        floats = int((sizes.reshape(-1, max(1, len(widths))).sum(0) * np.array(widths, np.int64)).sum())
        if 4 * floats > self._limits.message_bytes:
            raise RequestError(
                f"its answer would have {4 * floats:,} bytes, and limits.message_bytes allows "
                f"{self._limits.message_bytes:,}"
            )
