"""RankGroups: the process groups that connect the ranks of a run.

A process group carries one call at a time, in the same order on every rank. So each thread that makes calls
has a group of its own: rows are looked up ahead of a step and their gradients sent after it, and neither may
get between the calls of the other. Groups are passed as arguments; nothing here uses torch's default group.

    lookups    IDs out and rows back, ahead of a step
    pushes     gradients of rows, after it
    dense      gradients of the weights, during backward
    control    between two steps: stop, quiesce, save. It waits for as long as it takes.
    pulse      a heartbeat; see `Heartbeat`
    calls      questions at any time; see `RankCalls`

A rank that is gone breaks its connections, and the ranks that wait for it fail at once. A rank that hangs is
noticed when its call times out. When one is lost, every group is aborted on every rank: a run of ranks
continues with all ranks or not at all.

NCCL differs from gloo in three ways that matter here. Its calls run on a stream of the GPU: waiting for one
orders the current stream after it and does not wait on the host. A call that is aborted ends like one that is
done, with whatever is in its memory. And calls of two groups may be in flight at once, in another order on
another rank. That is safe only if the GPU can run the kernels of both at once: with the environment variable
CUDA_DEVICE_MAX_CONNECTIONS at 1 it cannot, and no group is made.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist

from monolith import concurrency
from monolith.cuda import CudaDevice
from monolith.errors import (
    ClusterError,
    DeadlineExceededError,
    RetryableError,
    UnavailableError,
)
from monolith.store.rank_calls import RankCalls, RankPort
from monolith.store.rank_keys import RankKeys
from monolith.store.rank_network import GroupOptions, rank_network
from monolith.wire.bulk import Traffic, TrafficMeter


class Collective:
    """The collective calls of one process group. Used by one thread at a time, except `abort`.

        sums = Collective(group, "dense").sum(gradient)               # on all ranks, the same bits
        rows = Collective(group, "lookups").all_to_all(ids, [2, 1], [2, 3])

    Args:
        group: A backend of torch.distributed, such as a ProcessGroupGloo.
        name: Names the group in messages.
        device: The device of the tensors of a call: NCCL wants them on a GPU.
        traffic: Counts the bytes sent to other ranks and received from them.
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
        self._reason: Callable[[], RetryableError | None] = lambda: None
        self._closing_thread: concurrency.Thread | None = None
        self.rank: int = group.rank()
        self.size: int = group.size()

    @property
    def device(self) -> torch.device:
        """The device that tensors are sent from and received on."""
        return self._device

    def explain_failures_with(self, reason: Callable[[], RetryableError | None]) -> None:
        """Raise the error that `reason` returns when a call fails: it may know more than "connection
        broke"."""
        self._reason = reason

    def all_to_all(self, given: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send a slice of `given` to each rank and return the slices that they sent here, in rank order.

            rank 0 of 2: given = [a b | c]     sent = [2, 1]    received = [2, 1]  ──►  [a b | x]
            rank 1 of 2: given = [x | y z]     sent = [1, 2]    received = [1, 2]  ──►  [c | y z]

        Args:
            given: One dimension: the slice for rank 0, then for rank 1, and so on. Copied to `device` first,
                unless it is there.
            sent: The length of the slice for each rank.
            received: The length of the slice from each rank.

        Returns:
            A tensor of `sum(received)` elements on `device`.
        """
        given = given.to(self._device)
        found = torch.empty(sum(received), dtype=given.dtype, device=self._device)
        if self.size == 1 and self._device.type == "cpu":  # but NCCL's call is made: one GPU can test it
            return found.copy_(given)
        itemsize = given.itemsize
        self._traffic.count(
            sent=(sum(sent) - sent[self.rank]) * itemsize,
            received=(sum(received) - received[self.rank]) * itemsize,
        )
        self._finish(self._begin("alltoall_base", found, given, list(received), list(sent)))
        return found

    def all_gather(self, given: Tensor, waiting: Callable[[], None] | None = None) -> Tensor:
        """Return the tensors of all ranks, stacked: (ranks, *shape). All ranks give the same shape.

        Args:
            waiting: Called every second until all ranks take part.
        """
        given = given.to(self._device)
        found = [torch.empty_like(given) for _ in range(self.size)]
        self._finish(self._begin("allgather", [found], [given]), waiting)
        return torch.stack(found).cpu()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return the tensor of rank `root`, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        sent = tensor.to(self._device, copy=True).contiguous()
        self._finish(self._begin("broadcast", [sent], options))
        return sent.to(tensor.device)

    def begin_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over all ranks; the returned function waits for the sum.

        A sum that stays on a GPU is only ordered before later work there. It is valid if a later call of this
        group that is read on the host did not raise.
        """
        summed = tensor.to(self._device)
        begun = [self._begin("allreduce", [summed])]

        def finish() -> Tensor:
            # pop: a caller that keeps this function must not keep the connections alive.
            self._finish(begun.pop(), on_host=tensor.device != self._device)
            return summed.to(tensor.device)

        return finish

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, the same bits on each. It may be `tensor` itself."""
        return self.begin_sum(tensor)()

    def abort(self) -> None:
        """Abort the call under way, here and on the other ranks. From any thread; again does nothing."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()
            # The connections are closed with the last reference. That waits for the call under way, until the
            # other ranks have closed theirs, too: so a thread drops the reference.
            last = [group]
            del group
            self._closing_thread = concurrency.Thread(target=last.clear, name="close-group", daemon=True)
            self._closing_thread.start()

    def close(self, within: float) -> None:
        """Abort, and wait at most so many seconds until the connections are closed.

        An interpreter that exits while a thread closes them ends with SIGABRT.
        """
        self.abort()
        if self._closing_thread is not None:
            self._closing_thread.join(within)

    def _begin(self, call: str, *arguments: Any) -> Any:
        group = self._group
        if group is None:
            raise self._judged(RuntimeError("it was aborted here"))
        try:
            return getattr(group, call)(*arguments)
        except RuntimeError as cause:
            raise self._judged(cause) from cause
        finally:
            del group  # the error keeps this frame alive, which must not keep the connections

    def _finish(self, work: Any, waiting: Callable[[], None] | None = None, *, on_host: bool = True) -> None:
        """Wait for a call; with `on_host`, until its result may be read by the host."""
        try:
            while waiting is not None and not _done_within(work, WAITING_EVERY):
                waiting()
            work.wait()
            if self._device.type == "cuda" and on_host:
                # Until here only the stream waits. If another rank is lost, this returns when the heartbeat,
                # or the watchdog at the timeout, has aborted the call: then its result is no result.
                torch.cuda.current_stream(self._device).synchronize()
                work.wait()  # raises what the watchdog has found
                if self._group is None:
                    raise RuntimeError("it was aborted here")
        except RuntimeError as cause:
            raise self._judged(cause) from cause
        finally:
            del work  # as above

    def _judged(self, cause: RuntimeError) -> RetryableError:
        known = self._reason()
        if known is not None:
            return known
        text = str(cause)
        if "imed out" in text:
            return DeadlineExceededError(
                f"{self._name}: another rank did not take part in time. It may hang, or be suspended: {text}"
            )
        return UnavailableError(f"{self._name}: another rank is gone, see its log: {text}")


WAITING_EVERY = timedelta(seconds=1)


def _done_within(work: Any, limit: timedelta) -> bool:
    try:
        work.wait(limit)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


class Heartbeat:
    """A thread that calls all ranks periodically, to notice one that is gone or hangs between other calls.

    Args:
        collective: Used by no other thread.
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
        self._over = concurrency.Event()
        self._thread = concurrency.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End. Closing again does nothing."""
        self._over.set()
        self._collective.abort()
        if self._thread is not concurrency.current_thread():
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


_log = logging.getLogger(__name__)

ENDLESS = timedelta(days=30)
"""How long a rank may wait for the other ranks between steps, as long as their heartbeat continues."""
CLOSE_WITHIN = 10.0
"""Seconds that closing the connections may take: the other ranks close theirs at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """The timeouts and backends of `RankGroups`; the same on all ranks."""

    timeout: timedelta = timedelta(minutes=30)
    """How long one exchange of a step may take."""
    silence: timedelta = timedelta(seconds=60)
    """How long a rank may be silent, over working connections, before it counts as lost; and how long the
    ranks may take to connect once all have registered."""
    backend: str = "gloo"
    """gloo or nccl: with nccl the gradients of weights are summed on the GPU."""
    rows_backend: str = "gloo"
    """gloo sends rows and their gradients through host memory, wherever tables are. nccl sends them from GPU
    to GPU, for tables on GPUs; it needs a GPU for each rank."""
    heartbeat_every: timedelta = timedelta(seconds=1)


class RankGroups:
    """The connections of this rank to all others. All ranks make theirs at the same time.

        with RankGroups(keys, rank=0, size=4, port=port) as groups:
            store = AllToAllStore(local, configs, groups)
            total = groups.dense.sum(gradient)

    Args:
        keys: Shared by all ranks of this attempt.
        rank: The number of this rank.
        size: The number of ranks.
        port: Where this rank listens, and the credentials that callers must present.

    Raises:
        UnavailableError: A rank did not connect in time.
    """

    def __init__(
        self,
        keys: RankKeys,
        rank: int,
        size: int,
        *,
        port: RankPort,
        options: RankOptions = RankOptions(),  # noqa: B008 - immutable
    ) -> None:
        self.rank = rank
        self.size = size
        self._keys = keys
        self._traffic = TrafficMeter()
        # Guards `_lost` and `_closed`: any thread may notice a lost rank, and the first reason counts. A call
        # that fails takes its error from there, because "connection broke" does not say whose.
        self._lock = concurrency.Lock()
        self._lost: RetryableError | None = None
        self._closed = self._finishing = False
        self._collectives: list[Collective] = []

        def collective(name: str, limit: timedelta, kind: str = "gloo") -> Collective:
            settings = GroupOptions(host=port.host, connect=options.silence, timeout=limit, backend=kind)
            group = rank_network().make_group(keys, name, rank, size, settings)
            device = CudaDevice.of().torch_device if kind == "nccl" else torch.device("cpu")
            found = Collective(group, name, device=device, traffic=self._traffic)
            found.explain_failures_with(self._why)
            self._collectives.append(found)
            if kind == "nccl":
                # NCCL connects in the first call. Two threads that make theirs at the same time, in another
                # order on another rank, would wait for each other.
                found.all_gather(torch.zeros(1))
            return found

        self.calls = RankCalls(keys, rank, size, port, timeout=options.timeout)
        try:
            # All ranks make the groups in this order: making one is a collective call itself.
            self.lookups = collective("lookups", options.timeout, options.rows_backend)
            self.pushes = collective("pushes", options.timeout, options.rows_backend)
            self.dense = collective("dense", options.timeout, options.backend)
            self.control = collective("control", ENDLESS)
            self.calls.find_addresses()
            self._heartbeat = Heartbeat(
                collective("pulse", options.silence), self._lose, options.heartbeat_every
            )
        except BaseException:
            self.calls.close()
            for made in self._collectives:
                made.abort()
            raise

    @property
    def traffic(self) -> Traffic:
        """Bytes received from other ranks and sent to them."""
        return self._traffic.total()

    def check(self) -> None:
        """Raise if a rank was lost.

        Raises:
            RetryableError: A rank was lost.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost

    def put_note(self, key: str, value: str) -> None:
        """Leave a note for the other ranks, in place of an earlier one. It never raises."""
        with suppress(ClusterError):
            self._keys.set(f"said/{key}", value)

    def get_note(self, key: str) -> str:
        """Return the note that a rank left under a key; "" for none.

        Raises:
            UnavailableError: The process that serves the keys is gone.
        """
        return (self._keys.peek(f"said/{key}") or b"").decode()

    def expect_end(self) -> None:
        """Mark the run as finished: from now on a rank that is gone does not count as lost."""
        self._finishing = True

    def fail(self, text: str) -> None:
        """Tell all ranks why this one cannot continue, and abort everything. It never raises."""
        # Before the connections break, so that the other ranks find the reason.
        self._keys.fail(self.rank, text)
        self.close()

    def abort(self, error: RetryableError) -> None:
        """End the attempt for all ranks, because something all of them need is lost. From any thread."""
        self._keys.fail(self.rank, str(error))
        self._lose(error)

    def close(self) -> None:
        """Close all connections. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._abort()
        self._heartbeat.close()
        self.calls.close()
        deadline = concurrency.monotonic() + CLOSE_WITHIN
        for collective in self._collectives:
            collective.close(max(0.0, deadline - concurrency.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _abort(self) -> None:
        for collective in (self.lookups, self.pushes, self.dense, self.control):
            collective.abort()

    def _lose(self, error: RetryableError) -> None:
        if self._finishing:
            return
        _log.warning("rank %d lost its connection to other ranks: %s", self.rank, error)
        # First the reason, then the abort: the calls that it ends raise the reason.
        with self._lock:
            self._lost = self._lost or error
        self.calls.fail(error)
        self._abort()

    def _why(self) -> RetryableError | None:
        """Return why a call failed, if a rank has reported it."""
        with suppress(ClusterError):
            if (failure := self._keys.failure()) is not None:
                return failure
        with self._lock:
            return self._lost
