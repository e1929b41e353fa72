"""Parameter servers: each holds one shard of a model's rows and dense weights.

A server knows its own shard and no other server. Rows travel as bytes in one buffer, described in
`monolith.store.row_requests`; all other calls are small, and JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency, errors
from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    FeatureError,
    LostStateError,
    RequestError,
    UnavailableError,
    UnknownTableError,
)
from monolith.store.dense import DenseShard, pack_tensors, unpack_tensors
from monolith.store.local import LocalStore
from monolith.store.pushes import AppliedPushes, KnownPushes
from monolith.store.row_requests import (
    RowCall,
    RowFlags,
    RowHeader,
    RowRequest,
    incarnation_bytes,
    pack_answer,
)
from monolith.store.store import TableIds
from monolith.wire.bulk import Bytes, Traffic
from monolith.wire.endpoint import Exchange, Handlers
from monolith.wire.flight_server import Server, typed_exchange
from monolith.wire.messages import Bounds, Call, Count, Name, Nothing, typed
from monolith.wire.ports import Limits
from monolith.wire.transport import PortGuard, Service

SERVICE: Service = Service(
    name="parameter server",
    peers="parameter servers and workers",
    failure=ClusterError,
    told=(
        errors.BarrierAlreadyPlacedError,
        errors.ClusterError,
        errors.ConfigError,
        errors.DataError,
        errors.DeadlineExceededError,
        errors.FeatureError,
        errors.FileMissingError,
        errors.FilesystemError,
        errors.LostStateError,
        errors.RestoreError,
        errors.SaveError,
        errors.ServingTableError,
        errors.TableArgumentError,
        errors.TableClosedError,
        errors.TableError,
        errors.TrainingError,
        errors.TransientFilesystemError,
        errors.UnavailableError,
        errors.UnknownTableError,
    ),
    unreachable=UnavailableError,
    late=DeadlineExceededError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequest:
    """A request about a server's state, fenced by the incarnation the caller means; None accepts any."""

    incarnation: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest(StateRequest):
    store: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CountExpired(StoreRequest):
    now: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(StoreRequest):
    now: dict[str, Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStep(StateRequest):
    step: Count


_HALF_EXPONENT = 0x7C00
"""The exponent bits of a half float; all are set only in infinities and NaN."""
_Number = Annotated[int, Bounds(1, 1 << 53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDense(StateRequest):
    """A push of dense gradients. Sender and number make sure it is applied once; see
    `monolith.store.pushes`."""

    sender: Name
    number: _Number
    names: list[Name]
    wants_weights: bool = True
    """Whether the answer contains the new weights."""
    rates: tuple[tuple[Count, float], ...] = ()
    """Groups of the optimizer and the learning rates that the worker has set."""


_Worker = Annotated[int, Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBuffers(StateRequest):
    worker: _Worker
    examples: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GetBuffers(StateRequest):
    worker: _Worker | None = None
    """None returns the buffers of all workers."""


class NewestPush(NamedTuple):
    """The step and event time of the newest update of rows."""

    step: int = 0
    event_time: int = 0
    at: float = 0.0
    """Unix seconds when it was applied."""


# Module buffers, such as the means of a batch norm: each worker computes them from its own part of the data.
# Servers only store them: the process that saves fetches those of all workers, and a worker that joins
# fetches those that the chief restored.


MOST_BYTES = 4 << 30
"""Bytes of the buffers of all workers together."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleBuffers:
    """The buffers of one worker."""

    worker: int
    examples: int
    """How many examples the worker has trained on."""
    data: Bytes


class WorkerBuffers:
    """The newest buffers of each worker. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = concurrency.Lock()  # guards _buffers
        self._buffers: dict[int, ModuleBuffers] = {}

    def put(self, given: ModuleBuffers) -> None:
        """Store the buffers of a worker in place of its earlier ones.

        Raises:
            FeatureError: Another worker's buffers have another size, so their models differ; or all together
                are too large.
        """
        copy = ModuleBuffers(given.worker, given.examples, np.array(given.data, np.uint8))
        with self._lock:
            for other in self._buffers.values():
                if other.worker != given.worker and len(other.data) != len(copy.data):
                    raise FeatureError(
                        f"worker {given.worker} has buffers of {len(copy.data):,} bytes, and worker "
                        f"{other.worker} of {len(other.data):,}. Do all processes run the same task?"
                    )
            workers = len(self._buffers.keys() | {given.worker})
            if workers * len(copy.data) > self._most_bytes:
                raise FeatureError(
                    f"{workers} workers have buffers of {len(copy.data):,} bytes each, and a server keeps "
                    f"{self._most_bytes:,} at most. Register buffers that need not be saved as "
                    "persistent=False."
                )
            self._buffers[given.worker] = copy

    def get(self, worker: int | None = None) -> list[ModuleBuffers]:
        """Return the buffers of all workers, in order, or of one."""
        with self._lock:
            return [self._buffers[one] for one in sorted(self._buffers) if worker in (None, one)]


# The sample step, by which a run compares servers before it uses some of them. It has the parts of a real
# step: bytes to the server, arithmetic there, bytes back. So a slow processor, a slow link and a busy
# neighbour all show in one number, which means nothing by itself.


SIDE = 256
"""Rows of a sample step, and floats per row."""
STEP_BYTES = SIDE * SIDE * 4
_BLOCK = 64
_SLICE = 16
_OFFSETS = 10
_REPEATS = 10


def sample_gradient() -> Bytes:
    """Return the gradient of a sample step, the same in every process."""
    floats = np.linspace(0.1, 1.0, SIDE * SIDE, dtype=np.float32)
    return floats.view(np.uint8)


def take_sample_step(_: Nothing, data: Bytes) -> tuple[dict[str, Any], Any]:
    """Do the arithmetic of a sample step, and answer with as many floats.

    Raises:
        RequestError: The gradient has another size.
    """
    if len(data) != STEP_BYTES:
        raise RequestError(f"a sample step takes {STEP_BYTES} bytes, got {len(data)}")
    gradient = np.abs(data.view(np.float32).reshape(SIDE, SIDE))
    answer = gradient.copy()
    for first in range(0, SIDE, _BLOCK):
        block = gradient[:, first : first + _BLOCK]
        for offset in range(_OFFSETS):
            a, b, c, d = np.split(np.roll(block, -offset, axis=1), _BLOCK // _SLICE, axis=1)
            for _repeat in range(_REPEATS):
                answer[:, first : first + _SLICE] += np.sqrt(np.sqrt(a * b) * c + d)
    return {}, answer


@dataclass(slots=True)
class _ServedState:
    """The state of a server for one run.

    A request works on the state that it found when it arrived: a request of an earlier run that is still
    under way changes nothing of the current one.
    """

    incarnation: str
    stores: list[LocalStore]
    dense: DenseShard
    buffers: WorkerBuffers = field(default_factory=WorkerBuffers)
    applied: AppliedPushes = field(default_factory=AppliedPushes)
    newest: NewestPush = field(default_factory=NewestPush)

    def matches(self, incarnation: bytes) -> bool:
        """Whether the incarnation of a row header means this state."""
        return incarnation in (incarnation_bytes(None), incarnation_bytes(self.incarnation))


class ParameterServer:
    """Serves one shard of a model until it is closed.

        with ParameterServer([store], dense, shard=(0, 2), port=5000) as server:
            server.replace([restored], dense, incarnation="run-2")     # requests of the first run are refused

    Its state has an ID, the incarnation: a restart of the server, or another run, has a new one. Requests
    name the incarnation they mean, and are refused if the server has another. So a worker that was declared
    dead and wakes up cannot train rows which other processes have restored in the meantime.

    Args:
        stores: One for each collection of the model's features, in the same order in all processes. The
            caller saves and restores them, and closes them after the server.
        dense: The dense weights that this server owns; None if the model has none.
        shard: (k, n) for server k of n: it holds the IDs that are k modulo n. None for a spare, which refuses
            requests until `replace` gives it a shard.
        host: The address to listen on; only this machine by default.
        port: 0 lets the system choose.
        guard: The credentials that callers must present.
        extra: More calls, polls and exchanges on the same port.
        limits: Bounds on the requests of one caller.

    Raises:
        ListenError: The port is taken.
        ConfigError: There is no such shard, or a call has a name that is taken.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        stores: Sequence[LocalStore],
        dense: DenseShard | None = None,
        *,
        shard: tuple[int, int] | None,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        extra: Handlers | None = None,
        limits: Limits | None = None,
    ) -> None:
        _check_shard(shard)
        self._shard = shard
        self.process = concurrency.token_hex(8)
        """A random ID of this server process."""
        extra = extra or Handlers()
        # One reference that `replace` swaps at once; each request reads it once, so no lock is needed.
        self._state = self._state_of(concurrency.token_hex(8), stores, dense, shard)
        self._limits = limits or Limits()
        own: dict[str, Call] = {
            "hello": typed(StateRequest, self._hello),
            "describe": typed(Nothing, self._describe),
            "stats": typed(StoreRequest, self._stats),
            "count_expired": typed(CountExpired, self._count_expired),
            "evict": typed(Evict, self._evict),
            "step": typed(StateRequest, lambda body: self._about(self._meant(body))),
            "set_step": typed(SetStep, self._set_step),
        }
        bulky: dict[str, Exchange] = {
            **extra.exchanges,
            "push_dense": typed_exchange(PushDense, self._push_dense),
            "pull_dense": typed_exchange(StateRequest, self._pull_dense),
            "dump_dense": typed_exchange(StateRequest, self._dump_dense),
            "load_dense": typed_exchange(StateRequest, self._load_dense),
            "sample_step": typed_exchange(Nothing, take_sample_step),
            "put_buffers": typed_exchange(PutBuffers, self._lay_buffers),
            "get_buffers": typed_exchange(GetBuffers, self._take_buffers),
        }
        if taken := sorted(own.keys() & {*extra.calls, *extra.polls}):
            raise ConfigError(f"a parameter server has a call {taken[0]!r} of its own; choose another name")
        self._server = Server(
            SERVICE,
            replace(extra, calls=own | dict(extra.calls), exchanges=bulky, message=self._rows),
            host=host,
            port=port,
            guard=guard,
            limits=self._limits,
        )

    @property
    def address(self) -> str:
        """host:port, for workers."""
        return self._server.address

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def incarnation(self) -> str:
        """The ID of the state that it holds now."""
        return self._state.incarnation

    @property
    def step(self) -> int:
        """Pushes that were counted here; on server 0, the global step."""
        return self._state.dense.step

    @step.setter
    def step(self, value: int) -> None:
        self._state.dense.step = value

    def raise_step(self, least: int) -> None:
        """Count from `least` on, unless more steps were counted here."""
        self._state.dense.raise_step(least)

    @property
    def newest_push(self) -> NewestPush:
        """The newest update of the rows that it holds now."""
        return self._state.newest

    def known_pushes(self) -> dict[str, KnownPushes]:
        """Return the pushes that the current state contains, by sender."""
        return self._state.applied.known()

    def still(self) -> AbstractContextManager[dict[str, KnownPushes]]:
        """Let no push change rows or weights while a block runs; see `AppliedPushes.still`."""
        return self._state.applied.still()

    @property
    def traffic(self) -> Traffic:
        """Bytes received from all callers and sent to them."""
        return self._server.traffic

    @property
    def shard(self) -> tuple[int, int] | None:
        """(k, n) for server k of n; None while it is a spare."""
        return self._shard

    def replace(
        self,
        stores: Sequence[LocalStore],
        dense: DenseShard | None = None,
        *,
        incarnation: str | None = None,
        shard: tuple[int, int] | None = None,
        applied: Mapping[str, KnownPushes] | None = None,
    ) -> None:
        """Serve another state of the same task from now on. The caller closes the earlier stores.

        Args:
            incarnation: The ID of the new state; random by default.
            shard: The new shard; by default it stays.
            applied: Pushes that the new state contains, though another server applied them.

        Raises:
            ConfigError: There is no such shard.
        """
        _check_shard(shard)
        shard = shard or self._shard
        state = self._state_of(incarnation or concurrency.token_hex(8), stores, dense, shard)
        # Complete before it is visible: a push that is sent again must find that it was applied.
        state.applied.adopt(applied or {})
        self._state = state
        self._shard = shard

    def close(self) -> None:
        """Finish the requests under way and free the port. Stores stay open. Closing again does nothing."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Small calls

    def _hello(self, body: StateRequest) -> dict[str, Any]:
        state = self._state if self._shard is None and body.incarnation is None else self._meant(body)
        return {"incarnation": state.incarnation, "shard": self._shard_json()}

    def _shard_json(self) -> list[int] | None:
        return None if self._shard is None else list(self._shard)

    def _describe(self, _: Nothing) -> dict[str, Any]:
        state = self._state
        return {
            "process": self.process,
            "incarnation": state.incarnation,
            "shard": self._shard_json(),
            "stores": [
                {"tables": dict(store.tables), "counts_sightings": store.counts_sightings}
                for store in state.stores
            ],
            "weights": {
                name: [list(weight.shape), str(weight.dtype).removeprefix("torch.")]
                for name, weight in state.dense.weights.items()
            },
            "step": state.dense.step,
        }

    def _stats(self, body: StoreRequest) -> dict[str, Any]:
        state = self._meant(body)
        with self._during(state):
            return {name: asdict(stats) for name, stats in self._store_of(state, body.store).stats().items()}

    def _count_expired(self, body: CountExpired) -> dict[str, Any]:
        state = self._meant(body)
        with self._during(state):
            return self._store_of(state, body.store).count_expired(body.now)

    def _evict(self, body: Evict) -> dict[str, Any]:
        state = self._meant(body)
        store, now = self._store_of(state, body.store), body.now
        if unknown := sorted(now.keys() - store.tables.keys()):
            raise UnknownTableError(
                f"evict: there is no table {unknown[0]!r}; there are {sorted(store.tables)}"
            )
        with self._during(state):
            return {name: store.table(name).evict(time) for name, time in now.items()}

    def _set_step(self, body: SetStep) -> dict[str, Any]:
        state = self._meant(body)
        state.dense.step = body.step
        return self._about(state)

    # Bulk

    def _rows(self, header: bytes, data: Bytes) -> tuple[bytes, Any]:
        """Answer a lookup, or apply gradients."""
        about = RowHeader.read(header)
        state = self._state
        self._check_shared()
        if not state.matches(about.incarnation):
            raise _lost_state()
        with self._during(state):
            return self._rows_of(state, about, data)

    def _rows_of(self, state: _ServedState, about: RowHeader, data: Bytes) -> tuple[bytes, Any]:
        store = self._store_of(state, about.store)
        if about.ids > self._limits.ids:
            raise RequestError(f"it has {about.ids:,} ids, and limits.ids allows {self._limits.ids:,}")
        request = RowRequest(
            data,
            cells=about.batches * len(store.tables),
            ids=about.ids,
            floats=about.floats,
            flags=about.flags,
        )
        if about.call == RowCall.LOOKUP:
            rows = store.lookup_arrays(request.ids, request.sizes, about.batches)
            return _answer_rows(rows, half=bool(about.flags & RowFlags.HALF))
        counts = None if request.counts is None else torch.from_numpy(request.counts)
        ids = TableIds(
            torch.from_numpy(request.ids),
            torch.from_numpy(request.sizes),
            counts,
            about.batches,
            distinct=not about.flags & RowFlags.REPEATED,
        )

        def apply() -> None:
            store.apply_gradients(
                ids,
                torch.from_numpy(request.gradients),
                step=about.step,
                event_time=about.event_time if request.times is None else torch.from_numpy(request.times),
                latest_values=None if request.latest is None else torch.from_numpy(request.latest),
            )
            # Without a lock: of two threads at once one may be overwritten, and the next push corrects it. It
            # only tells subscribers how new the rows are.
            times, before = request.times, state.newest
            event_time = about.event_time if times is None or not len(times) else int(times.max())
            step = max(about.step, before.step)
            state.newest = NewestPush(step, max(event_time, before.event_time), concurrency.time())

        state.applied.once(about.sender, about.number, apply, lambda: None)
        return pack_answer(RowFlags.NONE, 0), b""

    def _push_dense(self, body: PushDense, data: Bytes) -> tuple[dict[str, Any], Any]:
        state = self._meant(body)
        weights = state.dense.weights
        if unknown := [name for name in body.names if name not in weights]:
            raise FeatureError(f"this server does not own the weight {unknown[0]!r}")
        gradients = unpack_tensors(data, [weights[name] for name in body.names])
        after = state.applied.once(
            body.sender,
            body.number,
            lambda: state.dense.push(dict(zip(body.names, gradients, strict=True)), dict(body.rates)),
            state.dense.pull,  # a retry also sees the pushes of other workers, as the next answer would
        )
        return self._about(state), self._packed(after) if body.wants_weights else b""

    def _pull_dense(self, body: StateRequest, _: Bytes) -> tuple[dict[str, Any], Any]:
        state = self._meant(body)
        return self._about(state), self._packed(state.dense.pull())

    def _dump_dense(self, body: StateRequest, _: Bytes) -> tuple[dict[str, Any], Any]:
        state = self._meant(body)
        return self._about(state), state.dense.dump()

    def _load_dense(self, body: StateRequest, data: Bytes) -> tuple[dict[str, Any], Any]:
        state = self._meant(body)
        state.dense.load(data.tobytes())
        return self._about(state), b""

    def _lay_buffers(self, body: PutBuffers, data: Bytes) -> tuple[dict[str, Any], Any]:
        self._meant(body).buffers.put(ModuleBuffers(body.worker, body.examples, data))
        return {}, b""

    def _take_buffers(self, body: GetBuffers, _: Bytes) -> tuple[dict[str, Any], Any]:
        found = self._meant(body).buffers.get(body.worker)
        data = np.concatenate([np.empty(0, np.uint8), *(one.data for one in found)])
        return {"workers": [[one.worker, one.examples] for one in found]}, data

    # Inside

    def _state_of(
        self,
        incarnation: str,
        stores: Sequence[LocalStore],
        dense: DenseShard | None,
        shard: tuple[int, int] | None,
    ) -> _ServedState:
        nothing = DenseShard({}, None, shard or (0, 1))
        return _ServedState(incarnation, list(stores), nothing if dense is None else dense)

    def _check_shared(self) -> None:
        if self._shard is None:
            raise UnavailableError(
                "the server has no shard of the model: it is a spare until the chief assigns it one"
            )

    def _meant(self, body: StateRequest) -> _ServedState:
        """Return the state, if it is the one the caller means."""
        state = self._state
        self._check_shared()
        if body.incarnation not in (None, state.incarnation):
            raise _lost_state()
        return state

    @contextmanager
    def _during(self, state: _ServedState) -> Iterator[None]:
        """Say of tables that were closed under a request why they were: another run has begun."""
        try:
            yield
        except errors.TableClosedError as error:
            if state is self._state:
                raise
            raise _lost_state() from error

    def _packed(self, weights: Mapping[str, Tensor]) -> Bytes:
        return pack_tensors(list(weights.values()))

    def _about(self, state: _ServedState) -> dict[str, Any]:
        return {"step": state.dense.step}

    def _store_of(self, state: _ServedState, number: int) -> LocalStore:
        if number >= len(state.stores):
            raise UnknownTableError(f"there is no store {number}; this model has {len(state.stores)}")
        return state.stores[number]


def _lost_state() -> LostStateError:
    return LostStateError(
        "the server restarted or serves another run, and has lost the state this caller works on. "
        "Workers that rejoin the run resume from its last checkpoint."
    )


def _answer_rows(floats: NDArray[Any], *, half: bool) -> tuple[bytes, Any]:
    """Return rows as an answer; as 32-bit floats if one is too large for half floats."""
    flags = RowFlags.NONE
    if half:  # by numpy, which takes a tenth of the time that torch does
        with np.errstate(over="ignore"):
            halves = floats.astype(np.float16)
        too_large = (halves.view(np.uint16) & _HALF_EXPONENT) == _HALF_EXPONENT
        if not too_large.any():
            floats, flags = halves, RowFlags.HALF
    return pack_answer(flags, floats.size), floats


def _check_shard(shard: tuple[int, int] | None) -> None:
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"a parameter server is number 0 to n - 1 of n, got shard={shard}")
