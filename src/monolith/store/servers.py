"""Parameter servers: each holds a share of a model's rows and dense weights, and answers for it.

A server knows its own share and nobody else. Rows come and go as bytes in one buffer; see
`monolith.store.rows` for what it holds. Everything else is small, and JSON.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import errors
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
from monolith.store.buffers import BufferShelf, LaidDown
from monolith.store.dense import DenseShare, pack_tensors, unpack_tensors
from monolith.store.local import LocalStore
from monolith.store.measuring import take_sample_step
from monolith.store.pushes import AppliedPushes, KnownPushes
from monolith.store.rows import RowCall, RowFlags, RowHeader, RowRequest, incarnation_bytes, pack_answer
from monolith.store.store import TableIds
from monolith.wire.bulk import Bytes, Traffic
from monolith.wire.flight import PortGuard, Service
from monolith.wire.flight_server import Exchange, Handlers, Server, typed_exchange
from monolith.wire.messages import Bounds, Call, Count, Name, Nothing, Poll, typed
from monolith.wire.ports import Limits

SERVICE = Service(
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
class Meant:
    """Which incarnation of a server's state the caller works on; None takes it as it is."""

    incarnation: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStore(Meant):
    store: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CountExpired(OfStore):
    now: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(OfStore):
    now: dict[str, Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStep(Meant):
    step: Count


_HALF_EXPONENT = 0x7C00
"""The bits of a half float that are all set in infinities and NaN alone."""
_Number = Annotated[int, Bounds(1, 1 << 53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDense(Meant):
    """A push. Sender and number name it, so that it is applied once; see `monolith.store.pushes`."""

    sender: Name
    number: _Number
    names: list[Name]
    brings: bool = True
    """Whether the answer is to bring the weights."""
    rates: tuple[tuple[Count, float], ...] = ()
    """Groups of the optimizer and the learning rates that the worker has moved them to."""


_Worker = Annotated[int, Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayBuffers(Meant):
    worker: _Worker
    examples: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBuffers(Meant):
    worker: _Worker | None = None
    """None takes those of all."""


class NewestPush(NamedTuple):
    """What the newest of all updates of rows said of itself."""

    step: int = 0
    event_time: int = 0
    at: float = 0.0
    """Unix seconds when it was applied."""


@dataclass(slots=True)
class _Held:
    """What a server holds for one run. A request works on what it found when it came: one of an earlier run
    that is still under way changes nothing of this one."""

    incarnation: str
    stores: list[LocalStore]
    dense: DenseShare
    buffers: BufferShelf = field(default_factory=BufferShelf)
    applied: AppliedPushes = field(default_factory=AppliedPushes)
    newest: NewestPush = field(default_factory=NewestPush)

    def is_meant(self, incarnation: bytes) -> bool:
        """Whether a header means this."""
        return incarnation in (incarnation_bytes(None), incarnation_bytes(self.incarnation))


class ParameterServer:
    """Serves one share of a model until it is closed.

    What it holds has a name, its incarnation: another start of the server, or another run, has another.
    Whoever reads or trains names the one that is meant, and is refused where it is gone. So a worker that
    was taken for dead and wakes up cannot train what others have restored meanwhile.

    Args:
        stores: One for each collection of the model's features, in an order that all processes share.
            Still the caller's: to save, to restore, and to close after the server.
        dense: The dense weights it is in charge of; None where the model has none.
        share: Which of how many servers this is, (k, n): it holds the ids that are k modulo n. None for one
            that waits until `replace` gives it a share, and has nothing to be asked for before.
        host: Where to listen; only this machine by default.
        port: 0 lets the system choose.
        guard: What callers must present.
        calls: More calls, from JSON to JSON, each on a thread of its own: one may wait for as long as
            30 seconds and keeps nobody else waiting.
        polls: More calls, which look meanwhile whether their caller is gone.
        exchanges: More calls whose body comes with bytes.
        limits: What one caller may ask for.

    Raises:
        ListenError: The port is taken.
        ConfigError: There is no such share, or a call has a name that is taken.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        stores: Sequence[LocalStore],
        dense: DenseShare | None = None,
        *,
        share: tuple[int, int] | None,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        calls: Mapping[str, Call] | None = None,
        polls: Mapping[str, Poll] | None = None,
        exchanges: Mapping[str, Exchange] | None = None,
        limits: Limits | None = None,
    ) -> None:
        _check_share(share)
        self._share = share
        self.process = secrets.token_hex(8)
        """Names this start of the server."""
        self._held = self._holding(secrets.token_hex(8), stores, dense, share)
        self._limits = limits or Limits()
        own: dict[str, Call] = {
            "hello": typed(Meant, self._hello),
            "describe": typed(Nothing, self._describe),
            "stats": typed(OfStore, self._stats),
            "count_expired": typed(CountExpired, lambda body: self._store(body).count_expired(body.now)),
            "evict": typed(Evict, self._evict),
            "step": typed(Meant, lambda body: self._about(self._meant(body))),
            "set_step": typed(SetStep, self._set_step),
        }
        bulky: dict[str, Exchange] = {
            **(exchanges or {}),
            "push_dense": typed_exchange(PushDense, self._push_dense),
            "pull_dense": typed_exchange(Meant, self._pull_dense),
            "dump_dense": typed_exchange(Meant, self._dump_dense),
            "load_dense": typed_exchange(Meant, self._load_dense),
            "sample_step": typed_exchange(Nothing, take_sample_step),
            "lay_buffers": typed_exchange(LayBuffers, self._lay_buffers),
            "take_buffers": typed_exchange(TakeBuffers, self._take_buffers),
        }
        if taken := sorted(own.keys() & {*(calls or {}), *(polls or {})}):
            raise ConfigError(f"a parameter server has a call {taken[0]!r} of its own; choose another name")
        self._server = Server(
            SERVICE,
            Handlers(calls=own | dict(calls or {}), polls=polls or {}, exchanges=bulky, message=self._rows),
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
        """Names what it holds now."""
        return self._held.incarnation

    @property
    def step(self) -> int:
        """Pushes that were counted here; on server 0, the global step."""
        return self._held.dense.step

    @step.setter
    def step(self, value: int) -> None:
        self._held.dense.step = value

    @property
    def newest_push(self) -> NewestPush:
        """What the rows that are held now have learned from last."""
        return self._held.newest

    def known_pushes(self) -> dict[str, KnownPushes]:
        """Return which pushes were applied to what is held now, by sender."""
        return self._held.applied.known()

    @property
    def traffic(self) -> Traffic:
        """What came from all callers, and went to them."""
        return self._server.traffic

    @property
    def share(self) -> tuple[int, int] | None:
        """Which of how many servers this is; None while it waits for a share."""
        return self._share

    def replace(
        self,
        stores: Sequence[LocalStore],
        dense: DenseShare | None = None,
        *,
        incarnation: str | None = None,
        share: tuple[int, int] | None = None,
        applied: Mapping[str, KnownPushes] | None = None,
    ) -> None:
        """Serve another run of the same task from now on. What was served before is not closed.

        Args:
            incarnation: Names what it holds from now on; by default at random.
            share: Which of how many servers this is from now on; by default what it was.
            applied: Pushes that are in what it holds, though they came to another server.

        Raises:
            ConfigError: There is no such share.
        """
        _check_share(share)
        share = share or self._share
        held = self._holding(incarnation or secrets.token_hex(8), stores, dense, share)
        held.applied.adopt(applied or {})
        self._held = held
        self._share = share

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

    def _hello(self, body: Meant) -> dict[str, Any]:
        held = self._held if self._share is None and body.incarnation is None else self._meant(body)
        return {"incarnation": held.incarnation, "share": self._said_share()}

    def _said_share(self) -> list[int] | None:
        return None if self._share is None else list(self._share)

    def _describe(self, _: Nothing) -> dict[str, Any]:
        held = self._held
        return {
            "process": self.process,
            "incarnation": held.incarnation,
            "share": self._said_share(),
            "stores": [
                {"tables": dict(store.tables), "counts_sightings": store.counts_sightings}
                for store in held.stores
            ],
            "weights": {
                name: [list(weight.shape), str(weight.dtype).removeprefix("torch.")]
                for name, weight in held.dense.weights.items()
            },
            "step": held.dense.step,
        }

    def _stats(self, body: OfStore) -> dict[str, Any]:
        return {name: asdict(stats) for name, stats in self._store(body).stats().items()}

    def _evict(self, body: Evict) -> dict[str, Any]:
        store, now = self._store(body), body.now
        if unknown := sorted(now.keys() - store.tables.keys()):
            raise UnknownTableError(
                f"evict: there is no table {unknown[0]!r}; there are {sorted(store.tables)}"
            )
        return {name: store.table(name).evict(time) for name, time in now.items()}

    def _set_step(self, body: SetStep) -> dict[str, Any]:
        held = self._meant(body)
        held.dense.step = body.step
        return self._about(held)

    # Bulk

    def _rows(self, header: bytes, data: Bytes) -> tuple[bytes, Any]:
        """Answer a lookup, or apply gradients."""
        about = RowHeader.read(header)
        held = self._held
        self._check_shared()
        if not held.is_meant(about.incarnation):
            raise _lost_state()
        store = self._store_of(held, about.store)
        if about.ids > self._limits.ids:
            raise RequestError(f"it has {about.ids:,} ids, and limits.ids allows {self._limits.ids:,}")
        request = RowRequest(
            data,
            cells=about.batches * len(store.tables),
            ids=about.ids,
            floats=about.floats,
            flags=about.flags,
        )
        counts = None if request.counts is None else torch.from_numpy(request.counts)
        ids = TableIds(
            torch.from_numpy(request.ids),
            torch.from_numpy(request.sizes),
            counts,
            about.batches,
            distinct=not about.flags & RowFlags.REPEATED,
        )
        if about.call == RowCall.LOOKUP:
            return _answer_rows(store.lookup(ids), half=bool(about.flags & RowFlags.HALF))

        def apply() -> None:
            store.apply_gradients(
                ids,
                torch.from_numpy(request.gradients),
                step=about.step,
                event_time=about.event_time if request.times is None else torch.from_numpy(request.times),
                latest_values=None if request.latest is None else torch.from_numpy(request.latest),
            )
            times, before = request.times, held.newest
            event_time = about.event_time if times is None or not len(times) else int(times.max())
            step = max(about.step, before.step)  # of two at the same time one may be lost: the next says it
            held.newest = NewestPush(step, max(event_time, before.event_time), time.time())

        held.applied.once(about.sender, about.number, apply, lambda: None)
        return pack_answer(RowFlags.NONE, 0), b""

    def _push_dense(self, body: PushDense, data: Bytes) -> tuple[dict[str, Any], Any]:
        held = self._meant(body)
        weights = held.dense.weights
        if unknown := [name for name in body.names if name not in weights]:
            raise FeatureError(f"this server is not in charge of the weight {unknown[0]!r}")
        gradients = unpack_tensors(data, [weights[name] for name in body.names])
        after = held.applied.once(
            body.sender,
            body.number,
            lambda: held.dense.push(dict(zip(body.names, gradients, strict=True)), dict(body.rates)),
            held.dense.pull,  # what others pushed meanwhile shows, as it would in the next answer
        )
        return self._about(held), self._packed(after) if body.brings else b""

    def _pull_dense(self, body: Meant, _: Bytes) -> tuple[dict[str, Any], Any]:
        held = self._meant(body)
        return self._about(held), self._packed(held.dense.pull())

    def _dump_dense(self, body: Meant, _: Bytes) -> tuple[dict[str, Any], Any]:
        held = self._meant(body)
        return self._about(held), held.dense.dump()

    def _load_dense(self, body: Meant, data: Bytes) -> tuple[dict[str, Any], Any]:
        held = self._meant(body)
        held.dense.load(data.tobytes())
        return self._about(held), b""

    def _lay_buffers(self, body: LayBuffers, data: Bytes) -> tuple[dict[str, Any], Any]:
        self._meant(body).buffers.lay_down(LaidDown(body.worker, body.examples, data))
        return {}, b""

    def _take_buffers(self, body: TakeBuffers, _: Bytes) -> tuple[dict[str, Any], Any]:
        found = self._meant(body).buffers.take(body.worker)
        data = np.concatenate([np.empty(0, np.uint8), *(one.data for one in found)])
        return {"workers": [[one.worker, one.examples] for one in found]}, data

    # Inside

    def _holding(
        self,
        incarnation: str,
        stores: Sequence[LocalStore],
        dense: DenseShare | None,
        share: tuple[int, int] | None,
    ) -> _Held:
        nothing = DenseShare({}, None, share or (0, 1))
        return _Held(incarnation, list(stores), nothing if dense is None else dense)

    def _check_shared(self) -> None:
        if self._share is None:
            raise UnavailableError(
                "the server has no share of the model: it is a spare, until the chief assigns it one"
            )

    def _meant(self, body: Meant) -> _Held:
        """Return what is held, if that is what the caller means."""
        held = self._held
        self._check_shared()
        if body.incarnation not in (None, held.incarnation):
            raise _lost_state()
        return held

    def _packed(self, weights: Mapping[str, Tensor]) -> Bytes:
        return pack_tensors(list(weights.values()))

    def _about(self, held: _Held) -> dict[str, Any]:
        return {"step": held.dense.step}

    def _store(self, body: OfStore) -> LocalStore:
        return self._store_of(self._meant(body), body.store)

    def _store_of(self, held: _Held, number: int) -> LocalStore:
        if number >= len(held.stores):
            raise UnknownTableError(f"there is no store {number}; this model has {len(held.stores)}")
        return held.stores[number]


def _lost_state() -> LostStateError:
    return LostStateError(
        "the server restarted or began another run, and no longer holds what this caller works on. "
        "Workers that join the run again go on from its last checkpoint."
    )


def _answer_rows(rows: Tensor, *, half: bool) -> tuple[bytes, Any]:
    """Return rows as an answer; as floats of 4 bytes where one is larger than half floats can be."""
    floats: NDArray[Any] = rows.numpy()
    flags = RowFlags.NONE
    if half:  # by numpy, which takes a tenth of the time that torch does
        with np.errstate(over="ignore"):
            halves = floats.astype(np.float16)
        too_large = (halves.view(np.uint16) & _HALF_EXPONENT) == _HALF_EXPONENT
        if not too_large.any():
            floats, flags = halves, RowFlags.HALF
    return pack_answer(flags, floats.size), floats


def _check_share(share: tuple[int, int] | None) -> None:
    if share is not None and not 0 <= share[0] < share[1]:
        raise ConfigError(f"a parameter server is number 0 to n - 1 of n, got share={share}")
