"""The messages of a client: requests and answers of the Open Inference Protocol over HTTP and gRPC.

A *dialect* turns what a client wants into a `WireCall`, and bytes or messages of the server into our types.
It does no I/O: a transport of `client_transports` sends the call.

    dialect.infer(...) ──► WireCall ──► transport.send(call, seconds) ──► raw reply ──► call.read ──► answer
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from monolith.errors import (
    DeadlineExceededError,
    ForbiddenError,
    MonolithError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    UnavailableError,
    UnknownModelError,
)
from monolith.wire.open_inference import (
    BF16,
    BINARY_EXTENSION,
    BINARY_OUTPUT,
    BINARY_SIZE,
    CONTENTS,
    DTYPES,
    EXCLUDE,
    FILTER,
    ITEM,
    JSON_LENGTH,
    LENGTH_BYTES,
    PRIORITY,
    SCORE,
    SPLIT_KEY,
    SPLITS,
    TOP_K,
    message_types,
    read_bfloat16,
    unsigned_kept,
    values_dtype,
    write_bfloat16,
)

_ISO = re.compile(r"\d{4}-\d\d-\d\d")
LARGEST_JSON = 32 << 20
"""Bytes of the JSON of an answer. As Python objects it may take 24 times as much."""
MOST_TEXTS = 1 << 22
"""Texts of an output in binary. A short one takes 4 bytes in the answer and up to 120 as objects."""
_LONGEST_ERROR = 200
"""Characters of a server's own words in an error."""
_LONGEST_AGE = 1e9
"""Seconds, of an answer's rows."""
Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientInput:
    """An input of a model, as its metadata describes it.

    Examples:
        >>> from monolith.serve import ClientInput
        >>> ClientInput("price", "FP32", (-1,)).shape  # one number per row
        (-1,)
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """The answer of a server for some rows.

    Examples:
        >>> import numpy as np
        >>> from monolith.serve import ClientAnswer
        >>> scores = np.array([0.12, 0.40], np.float32)
        >>> answer = ClientAnswer("ads", "140", {"click": scores}, {"step": 140, "staleness": 0.8})
        >>> answer.outputs["click"].argmax(), answer.step, answer.staleness.total_seconds()
        (np.int64(1), 140, 0.8)
    """

    model: str
    """The model that answered; of a split, the chosen one."""
    version: str
    outputs: dict[str, NDArray[Any]]
    """Output -> an array whose first dimension is the rows; texts are `str`, in an array of objects."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Everything else that the server says: step, watermark, staleness, missing_shards and so on."""
    ignored: tuple[str, ...] = ()
    """Columns of the request that the model does not read; they were not sent."""
    id: str = ""
    """The ID of the request."""

    @property
    def step(self) -> int | None:
        """The training step whose updates every row of the answer includes; None if it is not known."""
        return None if "step" not in self.parameters else int(self.parameters["step"])

    @property
    def staleness(self) -> timedelta | None:
        """The age of the rows that the answer was made of; None if it is not known."""
        said = self.parameters.get("staleness")
        return None if said is None else timedelta(seconds=float(said))


@dataclass(frozen=True, slots=True)
class TopKAnswer(ClientAnswer):
    """The best items for some users.

    Examples:
        >>> import numpy as np
        >>> from monolith.serve import TopKAnswer
        >>> found = np.array(["i4", "i9", "i2"], object), np.array([0, 2, 3]), np.array([0.9, 0.7, 0.8])
        >>> outputs = dict(zip(("item", "item.row_splits", "score"), found))
        >>> answer = TopKAnswer("shop", "140", outputs, {"step": 140, "staleness": 0.8})
        >>> answer.items[0], answer.scores[0].tolist(), answer.step
        (['i4', 'i9'], [0.9, 0.7], 140)
    """

    @property
    def items(self) -> list[list[Any]]:
        """The items of each user, the best first: texts or whole numbers, as the model has them."""
        items = self.outputs[ITEM].tolist()
        return [items[begin:end] for begin, end in self._ends()]

    @property
    def scores(self) -> list[NDArray[Any]]:
        """The scores of `items`, an array for each user."""
        return [self.outputs[SCORE][begin:end] for begin, end in self._ends()]

    def _ends(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.outputs[ITEM + SPLITS].tolist())

    @classmethod
    def of(cls, answer: ClientAnswer) -> TopKAnswer:
        """Return the answer to a top-k request as one.

        Raises:
            RequestError: It has no items: the server does not know such requests.
            UnavailableError: The items of each user cannot be told from its splits.
        """
        if missing := {ITEM, ITEM + SPLITS, SCORE} - set(answer.outputs):
            raise RequestError(
                f"the answer of model {answer.model!r} to a top-k request has no {min(missing)!r}: its "
                "server does not know such requests"
            )
        items, scores, splits = (answer.outputs[name] for name in (ITEM, SCORE, ITEM + SPLITS))
        fits = items.ndim == splits.ndim == 1 and items.shape == scores.shape and splits.dtype == np.int64
        if (
            not fits
            or not splits.size
            or splits[0]
            or splits[-1] != len(items)
            or (np.diff(splits) < 0).any()
        ):
            raise UnavailableError(
                f"the answer of model {answer.model!r} to a top-k request cannot be read: its items, scores "
                "and splits do not fit together"
            )
        return cls(
            answer.model, answer.version, answer.outputs, answer.parameters, answer.ignored, id=answer.id
        )


# Values to tensors


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """An input as it is sent: checked, of the datatype it says."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | list[bytes]
    """All values, flat; texts for BYTES."""

    def raw(self) -> bytes:
        """Return the bytes of a raw tensor."""
        if isinstance(self.values, list):
            parts = ((len(one).to_bytes(LENGTH_BYTES, "little"), one) for one in self.values)
            return b"".join(part for pair in parts for part in pair)
        return write_bfloat16(self.values) if self.datatype == BF16 else self.values.tobytes()

    def plain(self) -> list[Any]:
        """Return the values as JSON has them."""
        if isinstance(self.values, list):
            try:
                return [one.decode() for one in self.values]
            except UnicodeDecodeError as cause:
                raise RequestError(
                    f"{self.name!r} has bytes that are not UTF-8, and the server takes texts as JSON only"
                ) from cause
        values: list[Any] = self.values.tolist()
        if self.values.dtype.kind == "f" and np.isnan(self.values).any():
            return [None if math.isnan(one) else one for one in values]
        return values


def encode_inputs(
    known: Sequence[ClientInput], given: Sequence[Row] | Mapping[str, Any]
) -> tuple[list[EncodedTensor], tuple[str, ...]]:
    """Return rows, or columns, as the inputs that a model takes, and the names of those it does not take.

    Raises:
        RequestError: A value has another type than its input, or the model takes none of them.
    """
    if isinstance(given, Mapping):
        names, columns = list(given), given
    else:
        if not given:
            raise RequestError("the request has no rows")
        names = list(dict.fromkeys(name for row in given for name in row))
        columns = {one.name: [row.get(one.name) for row in given] for one in known if one.name in names}
    used = [one for one in known if one.name in columns]
    if not used:
        takes = ", ".join(one.name for one in known)
        raise RequestError(f"the model takes {takes}; the request has {', '.join(sorted(names))}")
    ignored = tuple(sorted(set(names) - {one.name for one in known}))
    return [tensor for one in used for tensor in tensors_of(one, columns[one.name])], ignored


def tensors_of(one: ClientInput, values: Any) -> list[EncodedTensor]:
    """Return a column as inputs of a request: one, or two if rows are missing or lists of different lengths.

    Args:
        values: A list of a value, a list of values, or None, for each row; or an array.

    Raises:
        RequestError: A value has another type than the input.
    """
    if not isinstance(values, (list, tuple)) and hasattr(values, "__array__"):
        array = np.asarray(values)
        if one.datatype != "BYTES" and array.dtype.kind != "O":
            return [_array_tensor(one, array)]
        values = array.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{one.name!r} must be a list of a value for each row, or an array")
    values = list(values)
    kinds = set(map(type, values))
    if one.datatype == "INT64" and kinds <= {str, list} and all(map(_is_time, values)):
        one = replace(one, datatype="BYTES")  # the server accepts or refuses it
    if len(one.shape) == 1 and not kinds & {list, tuple, np.ndarray, type(None)}:
        return [_tensor(one, (len(values),), values, kinds)]
    lists = [_items(value) for value in values]
    if len(one.shape) == 2 and one.shape[1] != -1 and (values_dtype(one.datatype) or _INT64).kind == "f":
        # A number that is missing keeps its place in the row, as NaN.
        width = one.shape[1]
        lists = [items or [None] * width for items in lists]
        flat = [math.nan if item is None else item for items in lists for item in items]
        for row, items in enumerate(lists):
            if len(items) != width:
                raise RequestError(f"row {row}: {one.name!r} must have {width} numbers, got {len(items)}")
        return [_tensor(one, (len(lists), width), flat)]
    lists = [[item for item in items if item is not None] for items in lists]
    ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    flat = [item for items in lists for item in items]
    return [
        _tensor(one, (len(flat),), flat),
        EncodedTensor(one.name + SPLITS, "INT64", (len(ends),), ends),
    ]


def encode_excluded(given: Collection[Any]) -> list[EncodedTensor]:
    """Return items that are not to be returned as inputs of a top-k request.

    Args:
        given: The items of one user, or a collection of items, or None, for each user.

    Raises:
        RequestError: It is neither, or a value is no item.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{EXCLUDE!r} must be a list of items, or such a list for each user")
    rows = list(given)
    is_each = any(isinstance(row, _SEVERAL) for row in rows)
    lists = [list(row) if isinstance(row, _SEVERAL) else _items(row) for row in rows]
    flat = [item for items in lists for item in items]
    if not flat:
        return []
    is_number = all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in flat)
    excluded = _tensor(ClientInput(EXCLUDE, "INT64" if is_number else "BYTES", (-1,)), (len(flat),), flat)
    if not is_each:
        return [excluded]
    ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return [excluded, EncodedTensor(EXCLUDE + SPLITS, "INT64", (len(ends),), ends)]


_SEVERAL = (list, tuple, set, frozenset, np.ndarray)
_INT64 = DTYPES["INT64"]


def _items(value: Any) -> list[Any]:
    """Return the values of a row: none, one or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]


def _is_time(value: Any) -> bool:
    """Whether a value is an ISO 8601 time, or a list of them."""
    if isinstance(value, list) and value:
        return all(map(_is_time, value))
    return isinstance(value, str) and _ISO.match(value) is not None


_PLAIN: Mapping[str, frozenset[type]] = {
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
    "b": frozenset({bool}),
}
"""Types of values that need no look one by one, by the kind of the array they become."""


def _tensor(
    one: ClientInput, shape: tuple[int, ...], values: list[Any], kinds: set[type] | None = None
) -> EncodedTensor:
    """Return values, none of which is None, as a tensor."""
    kinds = set(map(type, values)) if kinds is None else kinds
    if one.datatype == "BYTES":
        if not kinds <= {str}:
            values = [_text(one, row, value) for row, value in enumerate(values)]
        try:
            texts = [value if isinstance(value, bytes) else value.encode() for value in values]
        except UnicodeEncodeError as cause:
            raise RequestError(f"{one.name!r} has half of a character") from cause
        return EncodedTensor(one.name, one.datatype, shape, texts)
    dtype = _dtype(one)
    if not kinds <= _PLAIN[dtype.kind]:
        values = [_number(one, dtype, row, value) for row, value in enumerate(values)]
    try:
        with np.errstate(over="ignore"):
            return EncodedTensor(one.name, one.datatype, shape, np.array(values, dtype))
    except (OverflowError, ValueError) as cause:
        if one.datatype == "INT64" and (kept := unsigned_kept(values)) is not None:
            return EncodedTensor(one.name, one.datatype, shape, kept)
        raise RequestError(f"{one.name!r}: a value is too large for {one.datatype}") from cause


def _array_tensor(one: ClientInput, array: NDArray[Any]) -> EncodedTensor:
    dtype = _dtype(one)
    fits = {"i": "iu", "u": "iu", "f": "iuf", "b": "b"}[dtype.kind]
    if array.dtype.kind not in fits or array.ndim not in (1, 2):
        raise RequestError(
            f"{one.name!r} must be {one.datatype} with one or two dimensions, got an array of {array.dtype} "
            f"with the shape {list(array.shape)}"
        )
    if array.ndim == 1 and len(one.shape) == 2:
        array = array[:, None]  # a list of one value in each row
    if one.datatype == "INT64" and array.dtype == np.uint64:
        array = array.view(np.int64)  # an unsigned ID keeps its bits, as in training
    with np.errstate(over="ignore"):
        typed = array.astype(dtype, copy=False)
    if dtype.kind in "iu" and array.dtype != dtype and not np.array_equal(typed, array):
        raise RequestError(f"{one.name!r}: a value is too large for {one.datatype}")
    return EncodedTensor(one.name, one.datatype, array.shape, np.ascontiguousarray(typed).reshape(-1))


def _dtype(one: ClientInput) -> np.dtype[Any]:
    dtype = values_dtype(one.datatype)
    if dtype is None:
        raise RequestError(f"{one.name!r} is {one.datatype}, which this client cannot send")
    return dtype


def _text(one: ClientInput, row: int, value: Any) -> str | bytes:
    if isinstance(value, str | bytes):
        return value
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, int | float):
        return str(value)
    raise _wrong(one, row, value)


def _number(one: ClientInput, dtype: np.dtype[Any], row: int, value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) in _PLAIN[dtype.kind]:
        return value
    raise _wrong(one, row, value)


def _wrong(one: ClientInput, row: int, value: Any) -> RequestError:
    try:
        shown = json.dumps(value)
    except TypeError:
        shown = repr(value)
    return RequestError(f"row {row}: {one.name!r} must be {one.datatype}, got {shown[:60]}")


# Calls and replies


@dataclass(frozen=True, slots=True)
class ItemSearch:
    """Which items a top-k request asks for."""

    k: int
    filters: str
    """As JSON; empty for none."""
    exclude: Sequence[EncodedTensor] = ()

    @classmethod
    def of(cls, k: int, filters: Mapping[str, Any] | None, exclude: Collection[Any]) -> ItemSearch:
        """Return a search with its values encoded.

        Raises:
            RequestError: It cannot be.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k < 1 << 31:
            raise RequestError(f"`{TOP_K}` must be a whole number from 1 on, got {k!r}")
        try:
            text = json.dumps(dict(filters), allow_nan=False) if filters else ""
        except (TypeError, ValueError) as cause:
            raise RequestError(f"`filters` cannot be sent as JSON: {cause}") from cause
        return cls(k, text, encode_excluded(exclude))

    def parameters(self) -> dict[str, int | str]:
        return {TOP_K: self.k, **({FILTER: self.filters} if self.filters else {})}


@dataclass(frozen=True, slots=True)
class InferQuestion:
    """What is asked of a model."""

    model: str
    version: str
    tensors: Sequence[EncodedTensor]
    outputs: Sequence[str]
    id: str
    split_key: str
    priority: int
    search: ItemSearch | None = None
    """Set if the best items are asked for, and not predictions."""


@dataclass(frozen=True, slots=True)
class WireCall(Generic[T]):
    """One message to a server, and how to read the reply."""

    method: str
    """Of HTTP, or the name of a gRPC method."""
    read: Callable[[Any], T]
    path: str = ""
    body: Any = None
    """Bytes over HTTP, a message over gRPC."""
    headers: Mapping[str, str] = field(default_factory=dict)


class WireError(Exception):
    """A call that failed: why, and whether it may be sent again."""

    def __init__(self, error: MonolithError, *, may_retry: bool = False, wait: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.may_retry = may_retry
        self.wait = wait
        """Seconds after which the server wants to be asked again."""


@dataclass(frozen=True, slots=True)
class HttpRawReply:
    """The reply to an HTTP request, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Dialect(Protocol):
    """The calls of a client, over one transport."""

    def models(self) -> WireCall[list[str]]: ...
    def extensions(self) -> WireCall[tuple[str, ...]] | None:
        """Return the call that asks which extensions a server has; None if it does not matter."""

    def inputs(self, model: str, version: str) -> WireCall[tuple[ClientInput, ...]]: ...
    def infer(self, question: InferQuestion, extensions: tuple[str, ...]) -> WireCall[ClientAnswer]: ...


class HttpDialect:
    """The protocol over HTTP: tensors in binary if the server takes them so, otherwise JSON."""

    def __init__(self, where: str) -> None:
        self._where = where

    def models(self) -> WireCall[list[str]]:
        def read(reply: HttpRawReply) -> list[str]:
            return sorted({str(one["name"]) for one in self._json(reply.body)})

        return WireCall("POST", self._reader(read), "/v2/repository/index", b"{}")

    def extensions(self) -> WireCall[tuple[str, ...]]:
        def read(reply: HttpRawReply) -> tuple[str, ...]:
            return tuple(map(str, self._json(reply.body).get("extensions", ())))

        return WireCall("GET", self._reader(read), "/v2")

    def inputs(self, model: str, version: str) -> WireCall[tuple[ClientInput, ...]]:
        def read(reply: HttpRawReply) -> tuple[ClientInput, ...]:
            said = self._json(reply.body)["inputs"]
            return tuple(
                ClientInput(_text_of(one, "name"), _text_of(one, "datatype"), _sizes(one["shape"], least=-1))
                for one in said
            )

        return WireCall("GET", self._reader(read), _model_path(model, version))

    def infer(self, question: InferQuestion, extensions: tuple[str, ...]) -> WireCall[ClientAnswer]:
        binary = BINARY_EXTENSION in extensions
        raws: list[bytes] = []
        inputs: list[dict[str, Any]] = []
        for one in question.tensors:
            line: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": one.shape}
            if binary:
                raws.append(one.raw())
                line["parameters"] = {BINARY_SIZE: len(raws[-1])}
            else:
                line["data"] = one.plain()
            inputs.append(line)
        message: dict[str, Any] = {"inputs": inputs}
        parameters: dict[str, Any] = {BINARY_OUTPUT: True} if binary else {}
        if question.priority:
            parameters[PRIORITY] = question.priority
        if question.split_key:
            parameters[SPLIT_KEY] = question.split_key
        if question.search is not None:
            parameters |= question.search.parameters()
        if parameters:
            message["parameters"] = parameters
        if question.id:
            message["id"] = question.id
        if question.outputs:
            message["outputs"] = [{"name": name} for name in question.outputs]
        try:
            head = json.dumps(message, allow_nan=False).encode()
        except ValueError as cause:
            raise RequestError("a number is infinite, which JSON cannot express") from cause
        headers = {JSON_LENGTH: str(len(head))} if binary else {}
        path = f"{_model_path(question.model, question.version)}/{'topk' if question.search else 'infer'}"
        return WireCall("POST", self._reader(self._answer), path, b"".join([head, *raws]), headers)

    def _answer(self, reply: HttpRawReply) -> ClientAnswer:
        at = int(reply.headers.get(JSON_LENGTH, len(reply.body)))
        if not 0 <= at <= len(reply.body):
            raise ValueError(f"its JSON has {at} of {len(reply.body)} bytes")
        said = self._json(reply.body[:at])
        outputs: dict[str, NDArray[Any]] = {}
        for one in said["outputs"]:
            name, datatype, shape = _text_of(one, "name"), _text_of(one, "datatype"), _sizes(one["shape"])
            length = one.get("parameters", {}).get(BINARY_SIZE)
            if length is None:
                outputs[name] = _listed(datatype, shape, one["data"])
                continue
            if type(length) is not int or not 0 <= length <= len(reply.body) - at:
                raise ValueError(f"the output {name!r:.60} has {length!r:.40} bytes")
            outputs[name] = _unpacked(datatype, shape, reply.body[at : at + length])
            at += length
        if at < len(reply.body):
            raise ValueError(f"{len(reply.body) - at} bytes belong to no output")
        return ClientAnswer(
            _text_of(said, "model_name"),
            str(said.get("model_version", "")),
            outputs,
            _checked_parameters(said.get("parameters", {})),
            id=_text_of(said, "id") if "id" in said else "",
        )

    def _reader(self, read: Callable[[HttpRawReply], T]) -> Callable[[HttpRawReply], T]:
        """Return a reader of replies that are what the protocol says."""

        def checked(reply: HttpRawReply) -> T:
            if reply.status != 200:
                raise self._failure(reply)
            try:
                return read(reply)
            except _UNREADABLE as cause:
                raise WireError(_not_a_server(self._where, cause)) from cause

        return checked

    def _failure(self, reply: HttpRawReply) -> WireError:
        try:
            said = json.loads(reply.body)
            text = str(said.get("error", said) if isinstance(said, dict) else said)
        except (ValueError, RecursionError):
            text = reply.body[:_LONGEST_ERROR].decode("utf-8", "replace")
        kind = _HTTP_ERRORS.get(reply.status, RequestError if reply.status < 500 else UnavailableError)
        return WireError(
            kind(f"{self._where} answered {reply.status}: {text[:_LONGEST_ERROR]}"),
            may_retry=reply.status in (429, 503),
            wait=retry_seconds(reply.headers.get("retry-after", "")),
        )

    def _json(self, body: bytes) -> Any:
        if len(body) > LARGEST_JSON:
            raise ValueError(f"its JSON has more than {LARGEST_JSON} bytes")
        return json.loads(body, parse_constant=_refuse_constant)


_HTTP_ERRORS: Mapping[int, type[MonolithError]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: UnknownModelError,
    413: RequestTooLargeError,
    429: OverloadedError,
    504: DeadlineExceededError,
}


class GrpcDialect:
    """The protocol over gRPC: tensors are raw."""

    def __init__(self, where: str) -> None:
        self._where = where

    def models(self) -> WireCall[list[str]]:
        message = message_types().RepositoryIndexRequest()
        return WireCall(
            "RepositoryIndex", lambda said: sorted({one.name for one in said.models}), "", message
        )

    def extensions(self) -> None:
        return None

    def inputs(self, model: str, version: str) -> WireCall[tuple[ClientInput, ...]]:
        def read(said: Any) -> tuple[ClientInput, ...]:
            return tuple(ClientInput(one.name, one.datatype, tuple(one.shape)) for one in said.inputs)

        message = message_types().ModelMetadataRequest(name=model, version=version)
        return WireCall("ModelMetadata", read, "", message)

    def infer(self, question: InferQuestion, extensions: tuple[str, ...]) -> WireCall[ClientAnswer]:  # noqa: ARG002
        kind = message_types().ModelInferRequest
        message = kind(
            model_name=question.model,
            model_version=question.version,
            id=question.id,
            inputs=[
                kind.InferInputTensor(name=one.name, datatype=one.datatype, shape=one.shape)
                for one in question.tensors
            ],
            outputs=[kind.InferRequestedOutputTensor(name=name) for name in question.outputs],
            raw_input_contents=[one.raw() for one in question.tensors],
        )
        if question.priority:
            message.parameters[PRIORITY].int64_param = question.priority
        if question.split_key:
            message.parameters[SPLIT_KEY].string_param = question.split_key
        if question.search is not None:
            message.parameters[TOP_K].int64_param = question.search.k
            if question.search.filters:
                message.parameters[FILTER].string_param = question.search.filters
        return WireCall("ModelInfer", self._answer, "", message)

    def _answer(self, said: Any) -> ClientAnswer:
        raws = said.raw_output_contents
        outputs: dict[str, NDArray[Any]] = {}
        try:
            for number, one in enumerate(said.outputs):
                if raws:
                    outputs[one.name] = _unpacked(one.datatype, _sizes(list(one.shape)), raws[number])
                else:
                    values = getattr(one.contents, CONTENTS[one.datatype])
                    outputs[one.name] = _listed(one.datatype, _sizes(list(one.shape)), values)
            parameters = _checked_parameters(
                {
                    name: getattr(value, value.WhichOneof("parameter_choice"))
                    for name, value in sorted(said.parameters.items())
                    if value.WhichOneof("parameter_choice")
                }
            )
        except _UNREADABLE as cause:
            raise WireError(_not_a_server(self._where, cause)) from cause
        return ClientAnswer(said.model_name, said.model_version, outputs, parameters, id=said.id)


# An integer may be too large for an array, and JSON too deep to be read.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _text_of(said: Mapping[str, Any], key: str) -> str:
    if not isinstance(said[key], str):
        raise ValueError(f"{key!r} is no text")
    return str(said[key])


def _sizes(shape: Any, *, least: int = 0) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(one) is int and one >= least for one in shape):
        raise ValueError(f"a shape is {shape!r:.60}")
    return tuple(shape)


def _checked_parameters(said: Any) -> dict[str, Any]:
    """Return the parameters of an answer, of which `ClientAnswer` reads two."""
    if not isinstance(said, dict):
        raise ValueError("`parameters` is no object")
    int(said.get("step", 0))
    if not 0 <= float(said.get("staleness", 0)) <= _LONGEST_AGE:
        raise ValueError(f"`staleness` is {said['staleness']!r:.40}")
    return said


def _unpacked(datatype: str, shape: Sequence[int], raw: bytes) -> NDArray[Any]:
    """Return a raw tensor of an answer; raises a ValueError or KeyError if it is none."""
    if datatype == BF16:
        return read_bfloat16(raw).reshape(shape)
    if datatype != "BYTES":
        return np.frombuffer(raw, DTYPES[datatype]).reshape(shape)
    texts: list[bytes] = []
    at = 0
    while at < len(raw):
        end = at + LENGTH_BYTES + int.from_bytes(raw[at : at + LENGTH_BYTES], "little")
        if len(texts) == MOST_TEXTS:
            raise ValueError(f"an output has more than {MOST_TEXTS} texts")
        texts.append(raw[at + LENGTH_BYTES : end])
        at = end
    if at != len(raw):
        raise ValueError("a text ends after its tensor")
    return _listed(datatype, shape, texts)


def _listed(datatype: str, shape: Sequence[int], values: Iterable[Any]) -> NDArray[Any]:
    """Return values of an answer as an array; raises a ValueError, TypeError or KeyError if it cannot be."""
    if datatype == "BYTES":
        # Bytes that are not UTF-8 can be told apart, and encoded again.
        texts = [one.decode("utf-8", "surrogateescape") if isinstance(one, bytes) else one for one in values]
        if not all(isinstance(one, str) for one in texts):
            raise ValueError("a text is none")
        return np.array(texts, dtype=object).reshape(tuple(shape))
    return np.array(list(values), DTYPES["FP32" if datatype == BF16 else datatype]).reshape(tuple(shape))


def _not_a_server(where: str, cause: Exception) -> UnavailableError:
    return UnavailableError(
        f"the process at {where} is not a server of the Open Inference Protocol: its answer cannot be read "
        f"({type(cause).__name__}: {str(cause)[:_LONGEST_ERROR]})"
    )


def retry_seconds(text: str) -> float:
    """Return what a server says about when to retry, in seconds; 0 if it does not, or gives a date."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path
