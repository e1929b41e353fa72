"""The network of simulated ranks: what torch.distributed is to real ones, with the failures of gloo.

A group is a mesh of connections. In a call each rank sends its part to every other rank, and its own call is
complete once it has the parts that it needs. So a call may succeed on one rank and fail on another, as in
gloo: a rank dies after one of its messages has left and before the next. A rank that is gone breaks its
connections; a rank that is cut off breaks nothing, and its peers notice when their call times out.

Messages need no thread: each has the moment at which it arrives, and the rank that waits for it sleeps until
then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from monolith.errors import FailedPeerError, ListenError, UnavailableError
from monolith.store.rank_network import GroupOptions, Keys
from monolith.testing.network import SimNetwork
from monolith.testing.scheduler import SimMachine, SimThread, Simulation

_POLL = 0.05
"""Seconds between two looks whether two machines are still cut off from each other."""


class SimRankNetwork:
    """The ranks' network of one machine; implements `monolith.store.rank_network.RankNetwork`."""

    def __init__(self, network: SimNetwork, machine: SimMachine) -> None:
        self._network, self._machine = network, machine

    def serve_keys(self, host: str, port: int) -> _SimKeys:
        network = self._network
        address = f"{host}:{port or network.new_port()}"
        if (found := network.key_servers.get(address)) is not None and found.machine.alive:
            raise ListenError(f"cannot serve the keys of ranks at {address}: the port is taken")
        server = network.key_servers[address] = _KeyServer(self._machine)
        return _SimKeys(network, self._machine, address, server)

    def reach_keys(self, host: str, port: int) -> _SimKeys:
        keys = _SimKeys(self._network, self._machine, f"{host}:{port}")
        try:
            keys.check([])
        except RuntimeError as cause:
            raise UnavailableError(f"rank 0 does not answer at {host}:{port}: {cause}") from cause
        return keys

    def make_group(self, keys: Keys, name: str, rank: int, size: int, options: GroupOptions) -> _SimGroup:
        group = _SimGroup(self._network, self._machine, rank, size, options.timeout)
        others = [other for other in range(size) if other != rank]
        try:
            # As gloo does: write the own address, read those of the other ranks, connect to each.
            keys.set(f"{name}/{rank}", str(group.number))
            peers = {other: int(keys.get(f"{name}/{other}")) for other in others}
            group.connect({other: self._network.groups[number] for other, number in peers.items()})
            group.allgather([[torch.zeros(1)] * size], [torch.zeros(1)]).wait(options.connect)
        except FailedPeerError:
            group.abort()
            raise
        except (RuntimeError, UnavailableError) as cause:
            group.abort()
            raise UnavailableError(
                f"rank {rank} of {size} could not connect to all other ranks: {cause}"
            ) from cause
        return group


class _KeyServer:
    def __init__(self, machine: SimMachine) -> None:
        self.machine = machine
        self.values: dict[str, bytes] = {}


class _SimKeys:
    """Keys at one address; has the methods of a `torch.distributed.TCPStore` that `RankKeys` uses.

    As with a TCPStore an answer may take as long as the server is stopped or cut off: there is no timeout.

    Args:
        server: If this process serves the keys. It does for as long as this object lives.
    """

    def __init__(
        self, network: SimNetwork, machine: SimMachine, address: str, server: _KeyServer | None = None
    ) -> None:
        self._network, self._machine, self._address = network, machine, address
        self._server = server  # the only lasting reference

    @property
    def port(self) -> int:
        return int(self._address.rpartition(":")[2])

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda values: values.__setitem__(key, value), answered=False)

    def get(self, key: str) -> bytes:
        found: bytes | None = self._ask(lambda values: values.get(key))
        if found is None:
            raise RuntimeError(f"no value for the key {key}")
        return found

    def check(self, keys: Sequence[str]) -> bool:
        found: bool = self._ask(lambda values: all(key in values for key in keys))
        return found

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        def work(values: dict[str, bytes]) -> bytes:
            if values.get(key, b"") == expected:
                values[key] = desired
            return values.get(key, expected)

        found: bytes = self._ask(work)
        return found

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda values: values.pop(key, None)) is not None

    def _ask(self, work: Callable[[dict[str, bytes]], Any], *, answered: bool = True) -> Any:
        network, simulation = self._network, self._network.simulation
        simulation.check_alive()
        server = self._found()
        remote = server.machine is not self._machine
        if remote:
            network.travel(self._machine, server.machine)
            while (left := server.machine.paused_until - simulation.now) > 0 and server.machine.alive:
                simulation.block("stopped server of keys", left)
            breaks = network.breaks()
            if self._found() is not server or (breaks and simulation.random.random() < 0.5):
                raise RuntimeError("Connection reset by peer")
            found = work(server.values)
            if answered:
                network.travel(server.machine, self._machine)
                if breaks or not server.machine.alive:
                    raise RuntimeError("Connection reset by peer")
            return found
        simulation.maybe_switch()
        return work(server.values)

    def _found(self) -> _KeyServer:
        server: _KeyServer | None = self._network.key_servers.get(self._address)
        if server is None or not server.machine.alive:
            raise RuntimeError(f"Connection refused by {self._address}")
        return server


class _SimGroup:
    """The end of one rank of a process group; has the methods of a ProcessGroupGloo that `Collective` uses.

    Args:
        timeout: How long a call may take; one that takes longer breaks the group.
    """

    def __init__(
        self, network: SimNetwork, machine: SimMachine, rank: int, size: int, timeout: timedelta
    ) -> None:
        self._network, self._rank, self._size = network, rank, size
        self.machine = machine
        self.timeout = timeout.total_seconds()
        self.number = len(network.groups)
        self.broken = ""
        """Why no call can succeed any more."""
        self.waiters: list[SimThread] = []
        self._calls = itertools.count()
        self._peers: dict[int, _SimGroup] = {}
        self._received: dict[tuple[int, int], tuple[float, Any]] = {}
        """(Rank, number of the call) -> when its part arrives, and the part."""
        self._last: dict[int, float] = {}
        """Rank -> when the last message to it arrives: a connection keeps the order."""
        self._closed_at: dict[int, float] = {}
        """Rank -> when this end sees that its connection is closed. Later messages are lost."""
        network.groups.append(self)
        machine.on_kill.append(self._close)

    # As a backend of torch.distributed

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allgather(self, found: list[list[Tensor]], given: list[Tensor]) -> _Work:
        def take(parts: dict[int, Tensor]) -> None:
            for rank, part in parts.items():
                found[0][rank].copy_(part)

        return self._begin(lambda _: given[0].clone(), take)

    def allreduce(self, given: list[Tensor]) -> _Work:
        def take(parts: dict[int, Tensor]) -> None:
            given[0].copy_(torch.stack([parts[rank] for rank in sorted(parts)]).sum(0))

        return self._begin(lambda _: given[0].clone(), take)

    def broadcast(self, given: list[Tensor], options: Any) -> _Work:
        root = int(options.rootRank)
        return self._begin(lambda _: given[0].clone(), lambda parts: given[0].copy_(parts[root]), sender=root)

    def alltoall_base(self, found: Tensor, given: Tensor, received: list[int], sent: list[int]) -> _Work:
        slices = torch.split(given.clone(), sent)

        def take(parts: dict[int, Tensor]) -> None:
            for place, rank in zip(torch.split(found, received), range(self._size), strict=True):
                if place.shape != parts[rank].shape:
                    raise RuntimeError(f"rank {rank} sent {parts[rank].shape}, expected {place.shape}")
                place.copy_(parts[rank])

        return self._begin(lambda rank: slices[rank], take)

    def abort(self) -> None:
        self._break("the group was aborted")

    # The connections

    def connect(self, peers: dict[int, _SimGroup]) -> None:
        self._peers = peers
        for peer in peers.values():
            if peer.broken or not peer.machine.alive:
                raise RuntimeError("Connection refused")

    def arrived(self, rank: int, call: int) -> tuple[bool, float]:
        """Return whether the part of a rank is here, and in how many seconds it is worth looking again.

        Raises:
            RuntimeError: It will not come.
        """
        now = self._network.simulation.now
        if self._network.is_cut(self.machine, self._peers[rank].machine):
            return False, _POLL
        due, _ = self._received.get((rank, call), (float("inf"), None))
        closed = self._closed_at.get(rank, float("inf"))
        if due <= min(now, closed):
            return True, 0.0
        if closed <= now:
            raise RuntimeError(f"Connection closed by peer {rank}")
        return False, min(due, closed) - now

    def fail(self, why: str) -> None:
        self._break(why)

    def _begin(
        self,
        part: Callable[[int], Tensor],
        take: Callable[[dict[int, Tensor]], object],
        *,
        sender: int | None = None,
    ) -> _Work:
        simulation = self._network.simulation
        simulation.check_alive()
        if self.broken:
            raise RuntimeError(self.broken)
        call = next(self._calls)
        for rank, peer in self._peers.items():
            simulation.maybe_switch()  # which may kill this machine between two messages
            if sender is None or sender == self._rank:
                if self._network.breaks():
                    self._close_to(rank)
                    self._closed_at.setdefault(rank, simulation.now)
                peer._received[self._rank, call] = (self._due(rank), part(rank))
                simulation.wake_some(peer.waiters)
        needed = [rank for rank in self._peers if sender is None or rank == sender]
        return _Work(self, call, needed, take, part(self._rank))

    def _due(self, rank: int) -> float:
        """Return when a message that is sent now arrives at a rank."""
        now = self._network.simulation.now
        self._last[rank] = max(self._last.get(rank, 0.0), now + self._network.delay())
        return self._last[rank]

    def _close(self) -> None:
        for rank in self._peers:
            self._close_to(rank)

    def _close_to(self, rank: int) -> None:
        peer, simulation = self._peers[rank], self._network.simulation
        # A connection that is closed delivers earlier messages. One that is closed with unread messages
        # is reset, and what is under way may be lost.
        closed_at = simulation.now + self._network.delay()
        unread = any(sender == rank for sender, _ in self._received)
        if not unread or simulation.random.random() < 0.5:
            closed_at = max(closed_at, self._last.get(rank, 0.0))
        peer._closed_at.setdefault(self._rank, closed_at)
        simulation.wake_some(peer.waiters)

    def _break(self, why: str) -> None:
        if not self.broken and not self._network.simulation.dead():
            self.broken = why
            self._close()
            self._network.simulation.wake_some(self.waiters)


class _Work:
    """One call under way, as a `torch.distributed.Work`."""

    def __init__(
        self,
        group: _SimGroup,
        call: int,
        needed: list[int],
        take: Callable[[dict[int, Tensor]], object],
        own: Tensor,
    ) -> None:
        self._group, self._call, self._take, self._own = group, call, take, own
        self._missing = set(needed)
        self._needed = needed
        self._simulation: Simulation = group._network.simulation
        self._began = self._simulation.now
        self._failed = False
        self._done = False

    def is_completed(self) -> bool:
        return self._done or self._failed

    def wait(self, limit: timedelta | None = None) -> None:
        if self._done:
            return
        group, simulation = self._group, self._simulation
        end = self._began + group.timeout
        until = end if limit is None else min(end, simulation.now + limit.total_seconds())
        simulation.maybe_switch()
        try:
            while (wake_in := self._look()) is not None:
                if simulation.now >= until:
                    if until == end:
                        self._failed = True
                        group.fail("Timed out waiting for another rank")
                    raise RuntimeError("Timed out waiting for another rank")
                simulation.block("collective call", min(wake_in, until - simulation.now), group.waiters)
        except RuntimeError as error:
            self._failed = self._failed or "imed out" not in str(error)
            raise
        received = {rank: group._received.pop((rank, self._call))[1] for rank in self._needed}
        self._take({**received, group._rank: self._own})
        self._done = True

    def _look(self) -> float | None:
        """Return None if all parts are here, else the seconds after which to look again."""
        if self._group.broken:
            raise RuntimeError(self._group.broken)
        again = float("inf")
        for rank in sorted(self._missing):
            here, later = self._group.arrived(rank, self._call)
            if here:
                self._missing.discard(rank)
            else:
                again = min(again, later)
        return again if self._missing else None
