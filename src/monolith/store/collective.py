"""Collectives: calls that all ranks of a run make together, each on a process group of its own.

A group carries one call at a time, in the same order on every rank. So each thread that makes calls has a
group of its own: rows are looked up ahead of a step, their gradients sent behind it, and neither may get
between the calls of the other. Groups are handed over; nothing here asks torch for a default one.

A rank that is gone breaks its connections, and whoever waits for it hears of that at once. One that hangs is
noticed when the call has taken as long as it may.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    FailedPeerError,
    RetryableError,
    UnavailableError,
)
from monolith.store.rank_keys import Keys
from monolith.wire.bulk import TrafficMeter


class Collective:
    """The calls of one process group. Used by one thread at a time, but for `abort`.

    Args:
        group: A backend of torch.distributed, such as a ProcessGroupGloo.
        name: What it is for, in messages.
        device: Where the tensors of a call must be: NCCL wants them on a GPU.
        traffic: Counts what goes to other ranks and comes from them.
    """

    def __init__(
        self,
        group: Any,
        name: str,
        *,
        device: torch.device | str = "cpu",
        traffic: TrafficMeter | None = None,
    ) -> None:
        self._group = group
        self._name = name
        self._device = torch.device(device)
        self._traffic = TrafficMeter() if traffic is None else traffic
        self._trouble: Callable[[], RetryableError | None] = lambda: None
        self._letting_go: threading.Thread | None = None
        self.rank: int = group.rank()
        self.size: int = group.size()

    @property
    def device(self) -> torch.device:
        """Where tensors go from, and where they arrive."""
        return self._device

    def ask_why(self, trouble: Callable[[], RetryableError | None]) -> None:
        """Have `trouble` say why a call failed, where somebody knows more than that a connection broke."""
        self._trouble = trouble

    def all_to_all(self, given: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send a stretch of `given` to each rank and return what they sent here, in the order of ranks.

        It arrives on `device`: what lies there is sent from there, and everything else goes there first.

        Args:
            given: Of one dimension: what goes to rank 0, then to rank 1, and so on.
            sent: How long each of these is.
            received: How long what comes from each is.
        """
        given = given.to(self._device)
        found = torch.empty(sum(received), dtype=given.dtype, device=self._device)
        if self.size == 1:
            return found.copy_(given)
        itemsize = given.itemsize
        self._traffic.count(
            sent=(sum(sent) - sent[self.rank]) * itemsize,
            received=(sum(received) - received[self.rank]) * itemsize,
        )
        self._finish(self._begin("alltoall_base", found, given, list(received), list(sent)))
        return found

    def all_gather(self, given: Tensor, waiting: Callable[[], None] | None = None) -> Tensor:
        """Return what every rank gives, of shape (ranks, *shape); all give one shape.

        Args:
            waiting: Called every second for as long as it takes.
        """
        given = given.to(self._device)
        found = [torch.empty_like(given) for _ in range(self.size)]
        self._finish(self._begin("allgather", [found], [given]), waiting)
        return torch.stack(found).cpu()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return what rank `root` gives, in the shape of `tensor`, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        sent = tensor.to(self._device, copy=True).contiguous()
        self._finish(self._begin("broadcast", [sent], options))
        return sent.to(tensor.device)

    def begin_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to add a tensor up over all ranks; the function returned waits for the sum."""
        summed = tensor.to(self._device)
        begun = [self._begin("allreduce", [summed])]

        def finish() -> Tensor:
            self._finish(begun.pop())  # who keeps this function does not keep the connections
            return summed.to(tensor.device)

        return finish

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, the same bits on each. It may be `tensor` itself."""
        return self.begin_sum(tensor)()

    def abort(self) -> None:
        """Break off what is under way, here and on the other ranks. From any thread; again does nothing."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()
            # Its connections are closed with the last reference, which waits for what is under way: until the
            # others have let go of it, too.
            last = [group]
            del group
            self._letting_go = threading.Thread(target=last.clear, name="let-go", daemon=True)
            self._letting_go.start()

    def let_go(self, within: float) -> None:
        """Abort, and wait until the connections are closed, for so many seconds at most.

        An interpreter that ends while a thread of it closes them ends with SIGABRT.
        """
        self.abort()
        if self._letting_go is not None:
            self._letting_go.join(within)

    def _begin(self, call: str, *arguments: Any) -> Any:
        group = self._group
        if group is None:
            raise self._judged(RuntimeError("it was broken off here"))
        try:
            return getattr(group, call)(*arguments)
        except RuntimeError as cause:
            raise self._judged(cause) from cause
        finally:
            del group  # whoever keeps the error keeps this frame, and must not keep the connections

    def _finish(self, work: Any, waiting: Callable[[], None] | None = None) -> None:
        try:
            while waiting is not None and not _done_within(work, WAITING_EVERY):
                waiting()
            work.wait()
        except RuntimeError as cause:
            raise self._judged(cause) from cause
        finally:
            del work  # as above

    def _judged(self, cause: RuntimeError) -> RetryableError:
        known = self._trouble()
        if known is not None:
            return known
        text = str(cause)
        if "imed out" in text:
            return DeadlineExceededError(
                f"{self._name}: another rank did not take part in time. It may hang, or be stopped: {text}"
            )
        return UnavailableError(f"{self._name}: another rank is gone, its log says why: {text}")


WAITING_EVERY = timedelta(seconds=1)


def _done_within(work: Any, limit: timedelta) -> bool:
    try:
        work.wait(limit)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def make_group(
    keys: Keys,
    rank: int,
    size: int,
    *,
    host: str,
    connect: timedelta,
    timeout: timedelta,
    backend: str = "gloo",
) -> Any:
    """Connect all ranks by a new process group. Every rank makes its groups in the same order.

    Args:
        keys: Seen by all; with a prefix that no other group has.
        host: The address on which gloo listens, by which the other ranks reach this one. NCCL listens where
            NCCL_SOCKET_IFNAME says.
        connect: How long the others may take to be there.
        timeout: How long one call may take.
        backend: gloo, or nccl for tensors on GPUs.

    Raises:
        UnavailableError: Another rank was not there in time.
    """
    if backend == "nccl":
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise ConfigError("ranks: the backend nccl needs GPUs and a torch that was built with it")
        nccl: Any = dist.ProcessGroupNCCL
        return nccl(keys, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = connect
    options._threads = 2
    options._devices = [gloo.create_device(hostname=host)]
    try:
        group = gloo(keys, rank, size, options)
        group._set_default_timeout(timeout)
        return group
    except FailedPeerError:  # which says more than that there is no connection
        raise
    except (RuntimeError, UnavailableError) as cause:
        raise UnavailableError(f"rank {rank} of {size} could not connect to all others: {cause}") from cause


class Pulse:
    """Notices that a rank is gone or hangs while nobody else talks to it: a thread that calls all the time.

    Args:
        collective: Nobody else's.
        lost: Called once, from that thread, with the error.
        every: The pause between two calls.
    """

    def __init__(
        self,
        collective: Collective,
        lost: Callable[[RetryableError], None],
        every: timedelta = timedelta(seconds=1),
    ) -> None:
        self._collective = collective
        self._lost = lost
        self._every = every.total_seconds()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End. Closing again does nothing."""
        self._over.set()
        self._collective.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(10)

    def _beat(self) -> None:
        one = torch.zeros(1, dtype=torch.int64)
        while not self._over.wait(self._every):
            try:
                self._collective.all_gather(one)
            except RetryableError as error:
                if not self._over.is_set():
                    self._lost(error)
                return
