"""The network of ranks: the keys they share, and the process groups that carry their collective calls.

`RankKeys`, `Collective` and `RankGroups` know signatures, errors, heartbeats and which call belongs to which
group; a `RankNetwork` only moves keys and tensors. That of a real process is torch.distributed; that of a
simulated one is in `monolith.testing.groups`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist

from monolith.concurrency import machine
from monolith.errors import ConfigError, FailedPeerError, ListenError, UnavailableError

Keys = Any
"""A `torch.distributed.Store`, with or without signatures."""
Group = Any
"""A backend of torch.distributed such as ProcessGroupGloo: `Collective` calls its methods."""

REACH_WITHIN = timedelta(seconds=10)
"""How long a rank waits for the process that serves the keys to accept its connection, and for a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOptions:
    """How the ranks of one process group connect."""

    host: str
    """The address on which gloo listens, by which the other ranks reach this one. NCCL uses
    NCCL_SOCKET_IFNAME."""
    connect: timedelta
    """How long the other ranks may take to connect."""
    timeout: timedelta
    """How long one call may take."""
    backend: str = "gloo"
    """gloo, or nccl for tensors on GPUs."""


class RankNetwork(Protocol):
    """Connects one rank with the other ranks."""

    def serve_keys(self, host: str, port: int) -> Keys:
        """Serve keys to all ranks, at `host` alone, for as long as the returned store lives.

        Raises:
            ListenError: The port is taken, or the address is not of this machine.
            RuntimeError: An error of the store.
        """

    def reach_keys(self, host: str, port: int) -> Keys:
        """Return the keys that another process serves.

        Raises:
            UnavailableError: No process serves them at this address.
            RuntimeError: An error of the store.
        """

    def make_group(self, keys: Keys, name: str, rank: int, size: int, options: GroupOptions) -> Group:
        """Connect all ranks by a new process group. Every rank makes its groups in the same order.

        Args:
            keys: Shared by all ranks.
            name: Of the group; no other group has it.

        Raises:
            UnavailableError: Another rank did not connect in time.
        """


def rank_network() -> RankNetwork:
    """Return the network of the calling thread: torch.distributed, unless the thread is simulated."""
    here = machine()
    return TorchNetwork() if here is None else here.ranks


class TorchNetwork:
    """Keys by a TCPStore, groups by gloo or NCCL."""

    def serve_keys(self, host: str, port: int) -> Keys:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as cause:
            raise ListenError(f"cannot serve the keys of ranks at {host}:{port}: {cause}") from cause
        port = listener.getsockname()[1]
        # A TCPStore that binds its own socket listens on all interfaces, whatever its host. It owns this one.
        return _tcp_store(host, port, is_master=True, master_listen_fd=listener.detach())

    def reach_keys(self, host: str, port: int) -> Keys:
        try:  # torch would retry, and log every time
            socket.create_connection((host, port), REACH_WITHIN.total_seconds()).close()
        except OSError as cause:
            raise UnavailableError(f"rank 0 does not answer at {host}:{port}: {cause}") from cause
        return _tcp_store(host, port, is_master=False)

    def make_group(self, keys: Keys, name: str, rank: int, size: int, options: GroupOptions) -> Group:
        keys = prefixed(keys, name)
        if options.backend == "nccl":
            if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
                raise ConfigError(
                    "ranks: with CUDA_DEVICE_MAX_CONNECTIONS=1 a GPU runs the kernels of one NCCL group at a "
                    "time, and ranks that call several wait for each other forever. Unset it"
                )
            if not torch.cuda.is_available() or not dist.is_nccl_available():
                raise ConfigError("ranks: the backend nccl needs GPUs and a torch that was built with it")
            # By default torch's watchdog ends the process when another rank is lost. A rank has to outlive
            # that, to restart with the other ranks: 2 only aborts the calls. The group reads it when it is
            # made.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
            nccl: Any = dist.ProcessGroupNCCL
            return nccl(keys, rank, size, options.timeout)
        gloo: Any = dist.ProcessGroupGloo
        settings = gloo._Options()
        settings._timeout = options.connect
        settings._threads = 2
        settings._devices = [gloo.create_device(hostname=options.host)]
        try:
            group = gloo(keys, rank, size, settings)
            group._set_default_timeout(options.timeout)
            return group
        except FailedPeerError:  # its message is more precise than "no connection"
            raise
        except (RuntimeError, UnavailableError) as cause:
            raise UnavailableError(
                f"rank {rank} of {size} could not connect to all other ranks: {cause}"
            ) from cause


def prefixed(keys: Keys, prefix: str) -> Keys:
    """Return a view of the keys in which each has a prefix."""
    return getattr(dist, "PrefixStore")(prefix, keys)  # noqa: B009 - torch's stubs do not have it


def _tcp_store(host: str, port: int, **options: Any) -> Keys:
    make: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch's stubs do not have it
    return make(host, port, wait_for_workers=False, timeout=REACH_WITHIN, **options)
