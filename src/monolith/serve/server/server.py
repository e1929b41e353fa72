"""The server: models from folders, answered over HTTP and gRPC until it is told to stop.

    with InferenceServer(config, folders, catalog) as server:
        print(server.http_url, server.grpc_address)

It stops in this order, so that no request is lost: it reports itself as not ready, so that load balancers
stop sending; it accepts no new requests; it drains the requests in flight; it closes the models.
"""

from __future__ import annotations

import logging
import shutil
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from monolith import concurrency, filesystem
from monolith.cluster.security import Guard
from monolith.errors import ConfigError, RequestError
from monolith.observe.metrics import Metrics
from monolith.serve.config import ServeConfig, ServedFolder, VersionPolicy
from monolith.serve.follower import ModelFollower
from monolith.serve.histories import HistoryCache
from monolith.serve.item_index import ItemIndex
from monolith.serve.metrics import HistoryMetrics, IndexMetrics, ReadMetrics, ServeMetrics
from monolith.serve.predictor import Predictor
from monolith.serve.rows import MappedRows
from monolith.serve.server.batching import Quotas
from monolith.serve.server.catalog import ServableCatalog
from monolith.serve.server.grpc_port import GrpcPort
from monolith.serve.server.http_api import HttpApi, HttpPort
from monolith.serve.server.http_loop import KnownHosts
from monolith.serve.server.inference import Inference
from monolith.serve.server.processes import ServerProcesses
from monolith.serve.server.shared_memory import FOLDER, RegionStatus
from monolith.sync.channel import OpenReader
from monolith.table import FrozenTables
from monolith.wire.ports import bound_socket, join_address

_log = logging.getLogger(__name__)


class InferenceServer:
    """Serves from construction to `close`.

    Args:
        folders: The models to serve.
        catalog: Lists and loads their versions.
        guard: The tokens that clients must present: predict or control for requests, control to load and
            unload models.
        context: TLS settings for HTTP; it demands a certificate from clients.
        peers: Other processes on the same port.
        follow: Opens a reader of the channel that a trainer publishes to; None serves models as exported.
        metrics: Counts requests.

    Raises:
        ListenError: A port is taken.
        MissingExtraError: A package of the extra `serve` is missing.
        ConfigError: Clients may load and unload models, or register shared memory, but there is no token for
            it.
    """

    def __init__(
        self,
        config: ServeConfig,
        folders: Sequence[ServedFolder],
        catalog: ServableCatalog,
        *,
        guard: Guard | None = None,
        context: ssl.SSLContext | None = None,
        peers: ServerProcesses | None = None,
        follow: OpenReader | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.config = config
        self._guard = (guard or Guard()).for_role("predict")
        if config.allow_control and self._guard.for_role("control").token is None:
            raise ConfigError(
                "serve: --allow-control lets clients with the control token load and unload models, and "
                "there is none. Start with --token-file."
            )
        if config.shared_memory:
            _check_shared_memory(self._guard)
        self._quotas = Quotas(config.limits)
        self._peers = peers or ServerProcesses()
        self._context = context
        self._metrics = metrics or Metrics()
        self._follow = follow
        self._followers: dict[str, ModelFollower] = {}
        self._items = _items_of(config, folders)
        self._index_metrics = IndexMetrics(self._metrics)
        self._read_metrics = ReadMetrics(self._metrics)
        self._files: dict[str, FrozenTables] = {}  # of the version of each model that was loaded last
        self._histories: HistoryCache | None = None
        if config.history_cache_bytes:
            self._histories = HistoryCache(config.history_cache_bytes, HistoryMetrics(self._metrics))
        if follow is not None:
            for one in folders:
                check_policy(one.policy, routed=_by_version(config, one.name))
        self.inference = Inference(
            config,
            folders,
            catalog,
            ServeMetrics(self._metrics),
            attach=self._attach,
            follows=follow is not None,
        )
        self._stop = concurrency.Event()
        self._poller: concurrency.Thread | None = None
        self._folder: Path | None = None
        self._grpc: GrpcPort | None = None
        self._http: HttpPort | None = None
        self.http_url: str | None = None
        self.grpc_address: str | None = None
        try:
            self.inference.repository.refresh()
            self._take_splits()
            self._take_regions()
            self._listen()
            self._take_regions()  # those of clients whose server could not tell this process yet
        except BaseException:
            self.close()
            raise
        self._poller = concurrency.Thread(target=self._poll, name="versions", daemon=True)
        self._poller.start()

    def close(self) -> None:
        """Stop, and return when the requests in flight have ended or the drain time is over. Again does
        nothing."""
        end = concurrency.monotonic() + self.config.drain.total_seconds()
        self.inference.stop_being_ready()
        self._stop.set()
        ports = [one for one in (self._grpc, self._http) if one is not None]
        if self.config.port is None:
            threads = [concurrency.Thread(target=one.close, args=(_left(end),)) for one in ports]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for one in ports:  # gRPC first: its requests pass through the loop of HTTP
                one.close(_left(end))
        self.inference.wait_idle(_left(end))
        if self._poller is not None:
            self._poller.join(_left(end))
        for follower in self._followers.values():
            follower.close()
        self.inference.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._grpc = self._http = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def followers(self) -> Mapping[str, ModelFollower]:
        """The followers by the name of their model."""
        return dict(self._followers)

    def _attach(self, name: str, predictor: Predictor) -> None:
        """Let a loaded version follow the trainer, and index the items of a retrieval model.

        The first version of a model starts its follower.
        """
        if isinstance(predictor.rows, MappedRows):
            self._files[name] = predictor.rows.files
        if self._follow is not None:
            self._follow_with(self._follow, name, predictor)
        self._index(name, predictor)
        if self._histories is not None and not predictor.keep_histories(self._histories, name):
            _log.info(
                "model %r has no history that is encoded once for many items: --history-cache-bytes has no "
                "effect on it",
                name,
            )

    def _index(self, name: str, predictor: Predictor) -> None:
        """Index the items of a retrieval model. Without a file that it needs, it answers all but top-k."""
        if not predictor.towers:
            if name in self._items:
                raise ConfigError(
                    f"serve --items: model {name!r} has no towers; export a retrieval model, such as TwoTower"
                )
            return
        try:
            self.inference.indexes[predictor] = ItemIndex(
                predictor, name, self._items.get(name, ""), self._index_metrics
            )
        except ConfigError as error:
            if name in self._items:
                raise
            self.inference.no_index[name] = str(error)
            _log.info("model %r answers no top-k requests: %s", name, error)

    def _follow_with(self, follow: OpenReader, name: str, predictor: Predictor) -> None:
        follower = self._followers.get(name)
        if follower is None:
            follower = self._followers[name] = ModelFollower(
                name,
                follow,
                self.config.follow,
                metrics=self._metrics,
                go_to=lambda version: self.inference.repository.serve_only(name, version),
            )
        follower.attach(predictor)

    def _take_splits(self) -> None:
        """Divide requests as the other processes do, which an operator may have changed since they began."""
        known, now = self.inference.traffic.described(), self._peers.splits()
        if now is not None:
            for name in {*known, *now}:
                if known.get(name) != now.get(name):
                    self.inference.set_split(name, now.get(name, ""))

    def _take_regions(self) -> None:
        """Register the shared memory that clients have registered with the other processes."""
        regions = self.inference.shared_memory
        if not regions.is_on:
            return
        known = {one.name for one in regions.status()}
        for said in self._peers.regions():
            one = RegionStatus.read(str(said["name"]), said)
            if one.name in known:
                continue
            try:
                regions.register(one)
            except RequestError as error:
                _log.warning("did not register the region %r of another process: %s", one.name, error)

    def _poll(self) -> None:
        while not self._stop.wait(self.config.poll.total_seconds()):
            try:
                self.inference.repository.refresh()
                for name, files in list(self._files.items()):
                    self._read_metrics.count(name, files)
                if self._peers.index == 0:  # one process decides for all
                    for name, targets in self.inference.guide_canaries().items():
                        self._peers.set_split(name, targets)
            except Exception:  # whatever it is, the loaded models still answer
                _log.exception("polling for new versions failed")

    def _listen(self) -> None:
        config = self.config
        relay: Path | None = None
        scheme = "http" if self._context is None else "https"
        http_port = config.http_port if config.port is None else config.port
        if config.port is not None:
            # HTTP's listener accepts all connections, ends TLS and relays gRPC to this socket, which only
            # this user can reach.
            self._folder = filesystem.new_folder("monolith-serve-")
            relay = self._folder / "grpc.sock"
            inner = replace(self._guard, cert=None, key=None, ca=None)
            self._grpc = GrpcPort(self.inference, f"unix:{relay}", inner, self._peers, self._quotas)
        elif config.grpc_port is not None:
            address = join_address(config.host, config.grpc_port)
            self._grpc = GrpcPort(self.inference, address, self._guard, self._peers, self._quotas)
            self.grpc_address = join_address(config.host, self._grpc.port)
        if http_port is None and self._peers.socket is None:
            return
        sockets = [] if http_port is None else [bound_socket(config.host, http_port, self._peers.share_port)]
        if self._context is not None and relay is not None:
            self._context.set_alpn_protocols(["h2", "http/1.1"])
        if peer_socket := self._peers.socket:
            with suppress(FileNotFoundError):
                peer_socket.unlink()
        ports = [one.getsockname()[1] for one in sockets]
        guarded = self._guard.token is not None or self._context is not None
        hosts = KnownHosts(config.host, config.allowed_hosts, any_name=guarded)
        self._http = HttpPort(
            HttpApi(self.inference, self._guard, self._peers, hosts),
            sockets,
            context=self._context,
            limits=config.limits,
            quotas=self._quotas,
            threads=config.threads,
            relay=relay,
            peer_socket=peer_socket,
        )
        if ports:
            address = join_address(config.host, ports[0])
            self.http_url = f"{scheme}://{address}"
            if relay is not None:
                self.grpc_address = address


def _items_of(config: ServeConfig, folders: Sequence[ServedFolder]) -> dict[str, str]:
    """Return the files of items by model.

    Raises:
        ConfigError: One of them is of no model.
    """
    names = [one.name for one in folders]
    found: dict[str, str] = {}
    for text in config.items:
        name, _, path = text.partition("=")
        if not path and len(names) == 1:
            name, path = names[0], text
        if name not in names or not path:
            raise ConfigError(f"serve --items: write NAME=FILE with one of {', '.join(names)}, got {text!r}")
        found[name] = path
    return found


def _left(end: float) -> float:
    """Return the seconds until a time, at least one, so that a finished thread can be joined."""
    return max(1.0, end - concurrency.monotonic())


def _by_version(config: ServeConfig, model: str) -> bool:
    """Whether a route names a version of a model."""
    routes = (*config.split_routes, *config.shadow_routes)
    return any(target.model == model and target.version for route in routes for target in route.targets)


def _check_shared_memory(guard: Guard) -> None:
    """Refuse to use the memory of clients if it is not known which of them may register it.

    Raises:
        ConfigError: There is a token for predictions and none for control, or this system has no such folder.
    """
    if not FOLDER.is_dir():
        raise ConfigError(f"serve --shared-memory: this system has no {FOLDER}; it needs Linux")
    if guard.token is not None and guard.for_role("control").token is None:
        raise ConfigError(
            "serve --shared-memory: clients with the control token register memory, and there is none. Start "
            "with --token-file."
        )


def check_policy(policy: VersionPolicy, *, routed: bool) -> None:
    """Refuse to follow with more than one version of a model.

    Raises:
        ConfigError: The policy, or a route, serves several.
    """
    if policy.newest != 1 and len(policy.named) != 1:
        raise ConfigError(
            "serve --follow: a model that follows a trainer has one version, the trainer's newest: leave "
            "--version-policy at latest"
        )
    if routed:
        raise ConfigError(
            "serve --follow: a split or shadow by version would make all of them equal; start another server "
            "for versions as they were exported"
        )
