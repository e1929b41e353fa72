"""The life of a request, from decoded tensors to the answer, whatever transport it came over.

    bytes ──► tensors ──► columns ──► batch ──► rows ──► dense half ──► answer
    http_api, http_bodies   tensors.py    batching.py   predictor.py         http_bodies, grpc_port
    grpc_port                             request_reader.py

The usual request is packed by the core out of its bytes, without tensors and columns: see `PackedInputs`.

`Inference._life` is the place where the parts meet. It admits the request within the limit on concurrency,
routes its name to a model and version, leases that version so that a hot swap cannot close it, turns the
tensors into columns, waits for the batcher, and mirrors the request to shadows after it has the answer.

    >>> reply = inference.infer(InferRequest(model="ads", tensors=tensors, timeout=0.05))
    >>> reply.version, [tensor.name for tensor in reply.outputs]
    ('140', ['click'])
"""

from __future__ import annotations

import json
import logging
import random
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from monolith import concurrency, native
from monolith.concurrency import ThreadPoolExecutor
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    ForbiddenError,
    MonolithError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    UnavailableError,
    UnknownModelError,
)
from monolith.serve.candidates import CandidateColumns
from monolith.serve.config import Route, RouteTarget, ServeConfig, ServedFolder
from monolith.serve.item_index import ItemIndex, TopK
from monolith.serve.manifest import Signature
from monolith.serve.metrics import AccessLog, ServeMetrics, VersionStatistics
from monolith.serve.predictor import Prediction, Predictor
from monolith.serve.served_log import ServedLog
from monolith.serve.server.batching import DEFAULT_PRIORITY, ModelCall, ModelOutputs, RequestBatcher
from monolith.serve.server.canary import Canary
from monolith.serve.server.catalog import ServableCatalog
from monolith.serve.server.repository import LoadedVersion, ModelStatus, Repository
from monolith.serve.server.shared_memory import EXTENSION, RegionSlice, SharedMemoryRegions
from monolith.serve.server.spans import RequestSpans
from monolith.serve.server.tensors import RequestColumns, WireTensor, columns_of, output_tensor, raw_bytes
from monolith.serve.server.traffic import TrafficRoutes
from monolith.wire.open_inference import (
    BINARY_EXTENSION,
    EXCLUDE,
    FILTER,
    ITEM,
    PRIORITY,
    SCORE,
    SPLIT_KEY,
    SPLITS,
)

Parameter = bool | int | float | str
NOT_SEARCHED = "it has no towers; export a retrieval model, such as TwoTower"


@dataclass(slots=True)
class PackedInputs:
    """The inputs of a request that were not decoded yet."""

    request: native.WireRequest | None
    """The request as the core has read it, to be packed by the plan of a model; None if it is unusual."""
    read: Callable[[], Sequence[WireTensor]]
    """Decodes all inputs; raises a RequestError if they are malformed."""


@dataclass(slots=True, kw_only=True)
class InferRequest:
    """One request, decoded by its transport."""

    model: str
    version: str = ""
    """Empty lets the server choose."""
    id: str = ""
    tensors: Sequence[WireTensor] | PackedInputs
    outputs: Sequence[str] = ()
    """Names of the outputs to return; empty returns all."""
    shared_outputs: Mapping[str, RegionSlice] = field(default_factory=dict)
    """Where outputs are written that are not sent, by name."""
    timeout: float | None = None
    """Seconds that the client waits; None if it did not say."""
    priority: int = DEFAULT_PRIORITY
    """From 1, answered first, to 9."""
    split_key: str = ""
    """Requests with the same key go to the same target of a split; empty draws one."""
    transport: str = "local"
    trace: Mapping[str, str] | None = None
    """The headers by which a client names its span; None if it sends none, or spans are not recorded."""
    topk: TopK | None = None
    """Set if the best items are asked for, and not predictions."""


@dataclass(slots=True, kw_only=True)
class InferReply:
    """The answer to one request."""

    model: str
    version: str
    id: str
    outputs: list[WireTensor]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    shared: dict[str, dict[str, Parameter]] = field(default_factory=dict)
    """Parameters of the outputs that were written to shared memory, by name; their values are not sent."""


SERVER_NAME = "monolith"
PLATFORM = "pytorch_monolith"
_EXTENSIONS = (BINARY_EXTENSION, "model_repository", "statistics")
TIMEOUT = "timeout"
"""A parameter of a request, as Triton has it: microseconds."""
_LOWEST_PRIORITY = 9
VERSION = "version"
UNLOAD_PARAMETERS = ("unload_dependents", VERSION)
"""The first is sent by Triton's clients with every unload; no model here depends on another."""
SPLIT = "split"
"""A parameter of a load over gRPC, whose protocol has no call for splits: the new targets of the name."""
NO_CONTROL = (
    "this server does not load or unload models, or change splits, on request; start it with --allow-control"
)
NO_CONTROL_TOKEN = "loading or unloading a model, or a change of a split, needs the control token"
NO_REGION_TOKEN = "registering shared memory needs the control token, not the predict token"
INTERNAL = "the server failed to answer this request; its log says why"

GRPC_STATUS: Mapping[str, str] = {
    "not_found": "NOT_FOUND",
    "too_large": "RESOURCE_EXHAUSTED",
    "invalid": "INVALID_ARGUMENT",
    "overloaded": "RESOURCE_EXHAUSTED",
    "deadline": "DEADLINE_EXCEEDED",
    "unavailable": "UNAVAILABLE",
    "forbidden": "PERMISSION_DENIED",
    "internal": "INTERNAL",
}
HTTP_STATUS: Mapping[str, int] = {
    "not_found": 404,
    "too_large": 413,
    "invalid": 400,
    "overloaded": 429,
    "deadline": 504,
    "unavailable": 503,
    "forbidden": 403,
    "internal": 500,
}
"""Statuses of both transports by the code that `code_of` returns."""


def check_parameters(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse parameters that this server would have to ignore.

    Raises:
        RequestError: One of them is not known.
    """
    for name in given:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise RequestError(f"this server does not support the parameter {name[:80]!r} of {what}; {takes}")


def read_timeout(value: object) -> float | None:
    """Return the seconds of the parameter `timeout`; None for 0, which sets no limit.

    Raises:
        RequestError: It is not a number of microseconds.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise RequestError(f"the parameter `{TIMEOUT}` must be a whole number of microseconds")
    return value / 1e6 if value else None


def read_version(value: object) -> str:
    """Return the parameter `version` of an unload; empty for all versions.

    Raises:
        RequestError: It is not a text.
    """
    if not isinstance(value, str):
        raise RequestError(f"the parameter `{VERSION}` must be a text")
    return value


def read_split_key(value: object) -> str:
    """Return the parameter `split_key`, or the header of that meaning.

    Raises:
        RequestError: It is not text.
    """
    if not isinstance(value, str):
        raise RequestError(f"the parameter `{SPLIT_KEY}` must be text, such as the ID of the user")
    return value


def read_priority(value: object) -> int:
    """Return the parameter `priority`.

    Raises:
        RequestError: It is not a priority.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LOWEST_PRIORITY:
        raise RequestError(
            f"the parameter `{PRIORITY}` must be a whole number from 1, answered first, to "
            f"{_LOWEST_PRIORITY}; 0 is {DEFAULT_PRIORITY}"
        )
    return value or DEFAULT_PRIORITY


_log = logging.getLogger(__name__)

SHADOWS_WAITING = 64
"""Mirrored requests that may wait; more are dropped and counted."""
CODES: Mapping[type[BaseException], str] = {
    UnknownModelError: "not_found",
    RequestTooLargeError: "too_large",
    ForbiddenError: "forbidden",
    RequestError: "invalid",
    OverloadedError: "overloaded",
    DeadlineExceededError: "deadline",
    UnavailableError: "unavailable",
}
"""Error types, subclasses first, and their code in metrics and logs."""


FAULTS = ("internal", "unavailable", "deadline", "overloaded")
"""Codes that are no fault of the client."""


def code_of(error: BaseException) -> str:
    """Return the code of an error; "internal" marks a bug of the server or the model."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), "internal")


_Asked = tuple[RequestBatcher, ModelCall]
_Life = Generator[_Asked, ModelOutputs, InferReply]


def _finished(life: _Life, answer: ModelOutputs | Exception) -> InferReply:
    """Return the reply to a request for which the model has answered, or raise its error."""
    try:
        if isinstance(answer, Exception):
            life.throw(answer)
        else:
            life.send(answer)
    except StopIteration as done:
        reply: InferReply = done.value
        return reply
    raise AssertionError("a request asks the model once")


class Inference:
    """Answers decoded requests, over any transport. Thread-safe.

    Args:
        folders: The models to serve.
        catalog: Lists and loads their versions.
        metrics: Counts requests.
        attach: Called with each loaded version; see `Repository`.
        follows: Whether models follow a trainer, so that each has one version.
    """

    def __init__(
        self,
        config: ServeConfig,
        folders: Sequence[ServedFolder],
        catalog: ServableCatalog,
        metrics: ServeMetrics,
        *,
        attach: Callable[[str, Predictor], None] | None = None,
        follows: bool = False,
        clock: Callable[[], float] = concurrency.monotonic,
        generator: random.Random | None = None,
    ) -> None:
        draw = generator or random.Random(concurrency.token_hex(16))
        self.config = config
        self.metrics = metrics
        self._clock = clock
        self._follows = follows
        self._changing_splits = concurrency.Lock()  # one change of routes at a time; requests never take it
        self._limits = config.limits
        self._timeout = config.limits.timeout.total_seconds()
        self._access = AccessLog(config.access_log, draw, clock)
        self.traffic = TrafficRoutes(
            config.split_routes, config.shadow_routes, [one.name for one in folders], draw
        )
        self.repository = Repository(
            folders, catalog, self._batcher, attach=attach, pinned=self.traffic.pinned(), clock=clock
        )
        self.shared_memory = SharedMemoryRegions(config.shared_memory, config.limits.request_bytes)
        self.indexes: weakref.WeakKeyDictionary[Predictor, ItemIndex] = weakref.WeakKeyDictionary()
        """The searched items of loaded retrieval models."""
        self.no_index: dict[str, str] = {}
        """Model -> why its items cannot be searched."""
        # Guards the three counters below. Held for a few instructions only, never while a model runs.
        self._lock = concurrency.Lock()
        self._idle = concurrency.Condition(self._lock)
        self._in_flight = 0
        self._shadows_waiting = 0
        self._draining = False
        self._shadow_thread = ThreadPoolExecutor(1, thread_name_prefix="shadow") if config.shadows else None
        self._spans = RequestSpans(config.trace_to) if config.trace_to else None
        self._log = ServedLog(config.log, metrics.all) if config.log.to else None
        self.canaries = {
            route.name: Canary(route, config.canary, metrics.all, clock)
            for route in map(Route.parse, config.canary.routes)
        }

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions of the protocol that this server has."""
        return (*_EXTENSIONS, EXTENSION) if self.shared_memory.is_on else _EXTENSIONS

    @property
    def is_ready(self) -> bool:
        """Whether every wanted model has a version that can answer, and the server is not draining."""
        return not self._draining and self.repository.all_ready

    @property
    def in_flight(self) -> int:
        """The number of requests that are being answered, over all transports."""
        return self._in_flight

    @property
    def answers_at_once(self) -> bool:
        """Whether a request waits for nothing but the requests before it: no model waits for another process,
        and none for more requests."""
        return self.repository.answers_here and not self.config.batching.max_delay

    def infer(self, request: InferRequest) -> InferReply:
        """Answer a request.

        Raises:
            UnknownModelError: The server has no such model or version.
            RequestError: The inputs do not fit the model; RequestTooLargeError: there are too many rows.
            OverloadedError: Too many requests are in flight or queued.
            DeadlineExceededError: The deadline of the client or of the server passed.
            UnavailableError: The server is stopping, or the model is not loaded.
        """
        if self._spans is None or not request.trace:
            return self._infer(request)
        asked = {"monolith.model": request.model, "monolith.transport": request.transport}
        with self._spans.span(f"infer {request.model}", request.trace, asked) as span:
            try:
                reply = self._infer(request)
            except Exception as error:
                span.set_attribute("error.type", code_of(error))
                raise
            span.set_attribute("monolith.version", reply.version)
            span.set_attribute("monolith.request_id", reply.id)
            return reply

    @property
    def records_spans(self) -> bool:
        """Whether the headers of a client's trace are needed."""
        return self._spans is not None

    def infer_all(self, requests: Sequence[InferRequest]) -> list[InferReply | Exception]:
        """Answer several requests on this thread, those to one version in as few batches as possible.

        Returns:
            For each request its answer, or the error that `infer` would raise.
        """
        found: dict[int, InferReply | Exception] = {}
        asked: dict[RequestBatcher, list[tuple[int, _Life, ModelCall]]] = {}
        for number, request in enumerate(requests):
            try:
                if self._spans is not None and request.trace:
                    found[number] = self.infer(request)
                    continue
                life = self._life(request)
                batcher, call = next(life)
                asked.setdefault(batcher, []).append((number, life, call))
            except StopIteration as done:
                found[number] = done.value
            except Exception as error:
                found[number] = error
        for batcher, some in asked.items():
            answers = batcher.run_all([call for _, _, call in some])
            for (number, life, _), answer in zip(some, answers, strict=True):
                try:
                    found[number] = _finished(life, answer)
                except Exception as error:
                    found[number] = error
        return [found[number] for number in range(len(requests))]

    def _infer(self, request: InferRequest) -> InferReply:
        life = self._life(request)
        try:
            batcher, call = next(life)
        except StopIteration as done:
            reply: InferReply = done.value
            return reply
        answer: ModelOutputs | Exception
        try:
            answer = batcher.run(*call)
        except Exception as error:
            answer = error
        return _finished(life, answer)

    def _life(self, request: InferRequest) -> _Life:
        """Answer a request: yield what it asks of the model, get the outputs, and return the reply.

        So one thread can take several requests to the model together.
        """
        begun = self._clock()
        try:
            if self._log is not None:  # the answer has the ID, so that the client can name it in a label
                request.id = self._log.check_id(request.id)
            self._enter()
            try:
                reply, rows = yield from self._answer(request, begun)
            finally:
                self._leave()
        except Exception as error:
            self._note_refusal(request, error)
            raise
        seconds = self._clock() - begun
        self.metrics.answered(
            model=reply.model,
            version=reply.version,
            transport=request.transport,
            code="ok",
            rows=rows,
            seconds=seconds,
        )
        self._access.answered(
            model=reply.model,
            version=reply.version,
            transport=request.transport,
            id=request.id,
            rows=rows,
            seconds=seconds,
        )
        return reply

    def refuse(self, transport: str, error: BaseException, model: str = "", id: str = "") -> None:  # noqa: A002
        """Count and log a request that was refused before it could be decoded."""
        code = code_of(error)
        known = model if model in self.repository.names or model in self.traffic.names else ""
        self.metrics.answered(model=known, version="", transport=transport, code=code)
        self._access.refused(model=model, transport=transport, id=id, code=code, why=str(error))
        if code == "internal":
            _log.error("a request failed because of a bug in the server or its model", exc_info=error)

    def describe(self, name: str, version: str = "") -> tuple[Signature, tuple[str, ...], str]:
        """Return the signature of a model, its versions, and the model that a split resolves to."""
        model, chosen = (name, version) if version else self.traffic.main(name)
        with self.repository.lease(model, chosen) as loaded:
            return loaded.model.signature, self.repository.versions(model), model

    def has_ready(self, name: str, version: str = "") -> bool:
        """Return whether a model can answer.

        Raises:
            UnknownModelError: The server has no such model.
        """
        if name not in self.repository.names and name not in self.traffic.names:
            self.repository.versions(name)
        model, chosen = (name, version) if version else self.traffic.main(name)
        return not self._draining and self.repository.is_ready(model, chosen)

    def index(self, ready: bool = False) -> list[ModelStatus]:
        lines = self.repository.index()
        for name, targets in self.traffic.described().items():
            state = "READY" if self.has_ready(name) else "UNAVAILABLE"
            lines.append(ModelStatus(name, "", state, f"split: {targets}"))
        return [line for line in lines if line.state == "READY"] if ready else lines

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return the statistics of all versions that can answer; of one model, or version, if it is named.

        Raises:
            UnknownModelError: The server has no such model or version.
        """
        found: list[dict[str, Any]] = []
        models = self.repository.names
        if name:
            model, version = (name, version) if version else self.traffic.main(name)
            models = (model,)
        for model in models:
            for one in (version,) if version else self.repository.versions(model):
                with self.repository.lease(model, one) as loaded:
                    found.append({"name": model, "version": one, **loaded.statistics.read()})
        return found

    def stop_being_ready(self) -> None:
        """Report the server as not ready, so that load balancers stop sending; late requests are still
        answered."""
        self._draining = True

    def render_metrics(self) -> bytes:
        self.metrics.in_flight(self._in_flight)
        return self.metrics.all.render()

    def wait_idle(self, seconds: float) -> bool:
        with self._lock:
            return self._idle.wait_for(lambda: self._in_flight == 0, seconds)

    def close(self) -> None:
        if self._shadow_thread is not None:
            self._shadow_thread.shutdown(cancel_futures=True)
        if self._log is not None:
            self._log.close()
        if self._spans is not None:
            self._spans.close()
        self.repository.close()

    def _batcher(self, name: str, model: Predictor, statistics: VersionStatistics) -> RequestBatcher:
        def predict(columns: Any, *, deadline: float | None = None) -> Prediction:
            begun = self._clock()
            found = model.predict(columns, deadline=deadline)
            statistics.computed(self._clock() - begun)
            return found

        return RequestBatcher(
            predict,
            self.config.batching,
            limits=self._limits,
            clock=self._clock,
            report=lambda requests, rows: self.metrics.batched(name, requests, rows),
        )

    def _enter(self) -> None:
        with self._lock:
            if self._in_flight >= self._limits.concurrency:
                raise OverloadedError(
                    f"{self._in_flight} requests are in flight, which is the limit (--max-concurrency). "
                    "Retry later, or start more servers."
                )
            self._in_flight += 1

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.notify_all()

    def _answer(
        self, request: InferRequest, begun: float
    ) -> Generator[_Asked, ModelOutputs, tuple[InferReply, int]]:
        allowed = self._timeout if request.timeout is None else min(request.timeout, self._timeout)
        if allowed <= 0:
            raise DeadlineExceededError("the deadline of the request had passed when it arrived")
        deadline = begun + allowed
        name, version = self.traffic.target(request.model, request.version, self._split_key(request))
        canary = None if request.version else self.canaries.get(request.model)
        try:
            # The lease spans everything that touches the version: a hot swap may retire it meanwhile, and the
            # last lease to end closes it.
            with self.repository.lease(name, version) as loaded:
                try:
                    if request.topk is not None:
                        answer, users = self._search(request, request.topk, name, loaded, deadline)
                        _share_outputs(request, answer)
                        loaded.statistics.answered(users, self._clock() - begun)
                        return answer, users
                    columns = self._columns(request, loaded)
                    found = yield loaded.batcher, ModelCall(columns, deadline, request.priority)
                    reply = _reply(request, name, loaded, found)
                    _share_outputs(request, reply)
                except Exception:
                    loaded.statistics.failed(self._clock() - begun)
                    raise
                loaded.statistics.answered(columns.rows, self._clock() - begun)
                if found.missing:
                    self.metrics.missing(found.missing)
                if self._log is not None:
                    self._log.offer(request.id, name, loaded.model, columns, found)
        except Exception as error:
            if canary is not None and code_of(error) in FAULTS:
                canary.failed((name, version))
            raise
        if canary is not None:
            canary.answered((name, version), self._clock() - begun, found.outputs)
        # Shadows run after the answer is complete and on a thread of their own, so that they cannot slow it.
        for shadow in self.traffic.shadows(request.model):
            self._ask_shadow(shadow, request, found)
        return reply, columns.rows

    def _search(
        self, request: InferRequest, asked: TopK, name: str, loaded: LoadedVersion, deadline: float
    ) -> tuple[InferReply, int]:
        """Answer a top-k request: the best items of each user, and their scores."""
        assert not isinstance(request.tensors, PackedInputs)
        index = self.indexes.get(loaded.model) if loaded.model.towers else None
        if index is None:
            raise RequestError(
                f"model {name!r} cannot be searched for items: {self.no_index.get(name, NOT_SEARCHED)}"
            )
        given = [one for one in request.tensors if one.name not in (EXCLUDE, EXCLUDE + SPLITS)]
        columns = columns_of(given, loaded.model.signature)
        if columns.rows > self._limits.rows:
            raise RequestTooLargeError(
                f"the request has {columns.rows} users; the limit is {self._limits.rows}"
            )
        seen = excluded_items(request.tensors, columns.rows)
        whole = columns.asked
        if isinstance(whole, CandidateColumns):
            whole = whole.full()
        found = index.search(whole, asked, exclude=seen, deadline=deadline)
        if found.missing:
            self.metrics.missing(found.missing)
        names = [one for row in found.items for one in row]
        is_text = any(isinstance(one, str) for one in names)
        values: Any = [str(one).encode() for one in names] if is_text else np.array(names, np.int64)
        ends = np.cumsum([0, *map(len, found.items)], dtype=np.int64)
        scores = np.concatenate([np.zeros(0, np.float32), *found.scores])
        outputs = {
            ITEM: WireTensor(ITEM, "BYTES" if is_text else "INT64", (len(names),), values),
            ITEM + SPLITS: WireTensor(ITEM + SPLITS, "INT64", (len(ends),), ends),
            SCORE: WireTensor(SCORE, "FP32", (len(names),), scores),
        }
        wanted = request.outputs or list(outputs)
        if unknown := [one for one in wanted if one not in outputs]:
            raise RequestError(
                f"a top-k answer has no output {unknown[0][:200]!r}; it has {', '.join(outputs)}"
            )
        reply = InferReply(
            model=name,
            version=loaded.model.version,
            id=request.id,
            outputs=[outputs[one] for one in wanted],
            parameters=dict(found.freshness),
        )
        return reply, columns.rows

    def guide_canaries(self) -> dict[str, str]:
        """Judge all canaries; return the splits that changed, by name."""
        changed = {}
        for name, canary in self.canaries.items():
            targets = canary.tick(self.traffic.described().get(name))
            if targets is not None:
                self.set_split(name, targets)
                changed[name] = targets
        return changed

    def _split_key(self, request: InferRequest) -> str:
        """Return the key of a request: its own, or the first value of the column that the config names."""
        column = self.config.split_columns.get(request.model)
        if request.split_key or column is None:
            return request.split_key
        given = request.tensors
        for tensor in given.read() if isinstance(given, PackedInputs) else given:
            if tensor.name == column and len(tensor.values):
                first = tensor.values[0]
                return first.decode("utf-8", "backslashreplace") if isinstance(first, bytes) else str(first)
        return ""

    def set_split(self, name: str, targets: str) -> None:
        """Divide the requests for a name in another way, from the next request on.

        New versions are loaded before they are asked, and those that no route names any more are closed
        after.

        Args:
            targets: `MODEL[/VERSION][:WEIGHT],...`; one target pins the name to it, and nothing removes the
                split.

        Raises:
            RequestError: The text is no route, or this server follows a trainer and it names a version.
            UnknownModelError: The server has no such model or version. Nothing changes.
            UnavailableError: A version could not be loaded. Nothing changes.
        """
        with self._changing_splits:
            try:
                changed = self.traffic.with_split(name, Route.parse(f"{name}={targets}") if targets else None)
            except ConfigError as cause:
                raise RequestError(str(cause)) from cause
            if self._follows and any(changed.pinned().values()):
                raise RequestError(
                    "this server follows a trainer, and a split by version would make all of them equal"
                )
            before, after = self.traffic.pinned(), changed.pinned()
            both = {
                one: before.get(one, frozenset()) | after.get(one, frozenset()) for one in {*before, *after}
            }
            self.repository.pin(both)
            self.traffic = changed
            self.repository.pin(after)
        _log.info("requests for %r go to %s", name, targets or "the model of that name")

    def _columns(self, request: InferRequest, loaded: LoadedVersion) -> RequestColumns:
        given = request.tensors
        packed = None
        if isinstance(given, PackedInputs) and given.request is not None:
            packed = loaded.model.pack(given.request)
        if packed is not None:
            columns = RequestColumns.of_packed(packed)
        else:
            # This way also finds what is wrong with a request that cannot be packed.
            tensors = given.read() if isinstance(given, PackedInputs) else given
            columns = columns_of(tensors, loaded.model.signature)
        if columns.rows > self._limits.rows:
            raise RequestTooLargeError(
                f"the request has {columns.rows} rows; the limit is {self._limits.rows} (--max-rows). "
                "Split it."
            )
        return columns

    def _note_refusal(self, request: InferRequest, error: Exception) -> None:
        self.refuse(request.transport, error, request.model, request.id)

    def _ask_shadow(self, shadow: RouteTarget, request: InferRequest, found: ModelOutputs) -> None:
        assert self._shadow_thread is not None
        label = f"{shadow.model}/{shadow.version}" if shadow.version else shadow.model
        with self._lock:
            full = self._shadows_waiting >= SHADOWS_WAITING
            self._shadows_waiting += not full
        if full:
            self.metrics.shadowed(request.model, label, "dropped")
            return
        try:
            self._shadow_thread.submit(self._compare, shadow, label, request, found)
        except RuntimeError:  # the server is closing
            with self._lock:
                self._shadows_waiting -= 1

    def _compare(self, shadow: RouteTarget, label: str, request: InferRequest, found: ModelOutputs) -> None:
        try:
            with self.repository.lease(shadow.model, shadow.version) as loaded:
                columns, deadline = self._columns(request, loaded), self._clock() + self._timeout
                other = loaded.batcher.run(columns, deadline, _LOWEST_PRIORITY)
            difference = _difference(found, other)
            outcome = "same" if difference == 0 else "different"
            self.metrics.shadowed(request.model, label, outcome, difference)
        except MonolithError as error:
            _log.debug("the shadow %s failed: %s", label, error)
            self.metrics.shadowed(request.model, label, "failed")
        except Exception:
            _log.exception("the shadow %s failed", label)
            self.metrics.shadowed(request.model, label, "failed")
        finally:
            with self._lock:
                self._shadows_waiting -= 1


def excluded_items(tensors: Sequence[WireTensor], users: int) -> list[list[Any]]:
    """Return the items that each user must not get, from the input `exclude` of a top-k request.

    It has all items of one user, a row of items for each user, or all items with row splits.

    Raises:
        RequestError: It is none of these.
    """
    given = next((one for one in tensors if one.name == EXCLUDE), None)
    splits = next((one for one in tensors if one.name == EXCLUDE + SPLITS), None)
    if given is None:
        return []
    values = given.values
    items: list[Any] = (
        [one.decode("utf-8", "replace") for one in values] if isinstance(values, list) else values.tolist()
    )
    if splits is not None and not isinstance(splits.values, list):
        ends = splits.values.tolist()
    elif len(given.shape) == 2:
        ends = list(range(0, len(items) + 1, max(given.shape[1], 1)))
    else:
        ends = [0, len(items)]
    rises = all(isinstance(one, int) for one in ends) and ends == sorted(ends)
    if not rises or len(ends) != users + 1 or ends[0] != 0 or ends[-1] != len(items):
        raise RequestError(
            f"input {EXCLUDE!r} must have the items of each of {users} users: those of one user, a row for "
            f"each user, or all items with {EXCLUDE + SPLITS!r}"
        )
    return [items[begin:end] for begin, end in pairwise(ends)]


def read_filter(value: object) -> dict[str, Any]:
    """Return the parameter `filter`: an object, or its JSON text.

    Raises:
        RequestError: It is neither.
    """
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as cause:
        raise RequestError(f"the parameter `{FILTER}` is not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise RequestError(f"the parameter `{FILTER}` must be an object: attribute -> value, or values")
    return found


def _reply(
    request: InferRequest,
    name: str,
    loaded: LoadedVersion,
    found: ModelOutputs,
) -> InferReply:
    model = loaded.model
    parameters: dict[str, Parameter] = dict(found.freshness)
    if found.missing:
        parameters["missing_shards"] = ",".join(found.missing)
    wanted = request.outputs or list(found.outputs)
    unknown = [one for one in wanted if one not in found.outputs]
    if unknown:
        raise RequestError(f"the model has no output {unknown[0][:200]!r}; it has {', '.join(found.outputs)}")
    return InferReply(
        model=name,
        version=model.version,
        id=request.id,
        outputs=[output_tensor(one, found.outputs[one]) for one in wanted],
        parameters=parameters,
    )


def _share_outputs(request: InferRequest, reply: InferReply) -> None:
    """Write outputs to shared memory, those that the request says; none if one of them does not fit.

    Raises:
        RequestError: One does not fit, or its region is smaller than it was.
    """
    shared = [
        (place, tensor.name, raw_bytes(tensor.values))
        for tensor in reply.outputs
        if (place := request.shared_outputs.get(tensor.name)) is not None
    ]
    for place, _, data in shared:
        place.check(data)
    reply.shared = {name: place.write(data) for place, name, data in shared}


def _difference(one: ModelOutputs, other: ModelOutputs) -> float:
    """Return the largest absolute difference of any value; infinite if names or shapes differ."""
    if one.outputs.keys() != other.outputs.keys():
        return float("inf")
    largest = 0.0
    for name, values in one.outputs.items():
        others = other.outputs[name]
        if values.shape != others.shape:
            return float("inf")
        if values.size:
            largest = max(largest, float(np.abs(values.astype(np.float64) - others).max()))
    return largest
