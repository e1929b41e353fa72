"""The bodies of the Open Inference Protocol over HTTP: JSON, and tensors in binary behind it.

With the header `Inference-Header-Content-Length: N`, the first N bytes of a body are JSON, and the rest are
the raw tensors of those inputs that say `"parameters": {"binary_data_size": ...}`, one after another.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from monolith import concurrency, native
from monolith.errors import RequestError, RequestTooLargeError
from monolith.serve.config import ServeLimits
from monolith.serve.item_index import TopK
from monolith.serve.server.batching import JSON_COST, Reservation
from monolith.serve.server.inference import (
    TIMEOUT,
    InferReply,
    InferRequest,
    PackedInputs,
    check_parameters,
    read_filter,
    read_priority,
    read_split_key,
    read_timeout,
)
from monolith.serve.server.shared_memory import PARAMETERS, RegionSlice, SharedInputs, SharedMemoryRegions
from monolith.serve.server.spans import TRACE_HEADERS
from monolith.serve.server.tensors import WireTensor, listed_tensor, ragged_tensor, raw_bytes, raw_tensor
from monolith.wire.open_inference import (
    BINARY,
    BINARY_OUTPUT,
    BINARY_SIZE,
    FILTER,
    JSON_LENGTH,
    PRIORITY,
    SPLIT_KEY,
    SPLIT_KEY_HEADER,
    TIMEOUT_HEADER,
    TOP_K,
)

_DEEPEST = 10
_WINDOWS = {"gzip": 31, "deflate": 15}
_UNPACKED_AT_ONCE = 1 << 20
_LARGE_JSON = 1 << 20
_LEAST_PACKED = 1 << 10
"""Bytes of an answer; a shorter one fits in a packet or two."""
_PACK_LEVEL = 1
"""Of zlib: the quickest."""
_REFUSED = re.compile(r"q=0(\.0*)?")


def unpacked(body: bytes, encoding: str, most: int, reservation: Reservation) -> bytes:
    """Return a body as it was before it was packed.

    Args:
        reservation: Counts the bytes, as they are unpacked.

    Raises:
        RequestError: It is not packed that way.
        RequestTooLargeError: It has more bytes than `most`; no more than those were unpacked.
        UnavailableError: Requests in flight use too much memory.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOWS:
        raise RequestError(f"cannot unpack {encoding[:40]!r}; send gzip, deflate, or nothing packed")
    unpack = zlib.decompressobj(_WINDOWS[encoding])
    whole = bytearray()
    left = body
    while not unpack.eof:
        try:
            part = unpack.decompress(left, _UNPACKED_AT_ONCE)
        except zlib.error as cause:
            raise RequestError(f"the body is not {encoding}: {cause}") from cause
        left = unpack.unconsumed_tail
        reservation.add(len(part))
        whole += part
        if len(whole) > most:
            raise RequestTooLargeError(
                f"the body has more than {most} bytes when unpacked, which are the most "
                "(--max-json-bytes; with tensors in binary, --max-request-bytes)"
            )
        if not part and not left and not unpack.eof:
            raise RequestError(f"the body is not {encoding}: it ends too early")
    return bytes(whole)


def packed(body: bytes, accepted: str) -> tuple[bytes, str]:
    """Return the body of an answer, packed if the client takes that and it may pay; and the encoding.

    Args:
        accepted: The header Accept-Encoding, such as "gzip, deflate;q=0.5".
    """
    if not accepted or len(body) < _LEAST_PACKED:
        return body, ""
    offered = {
        name.strip().lower(): rest for name, _, rest in (one.partition(";") for one in accepted.split(","))
    }
    for encoding, window in _WINDOWS.items():
        if encoding in offered and _REFUSED.fullmatch(offered[encoding].strip()) is None:
            pack = zlib.compressobj(_PACK_LEVEL, wbits=window)
            return pack.compress(body) + pack.flush(), encoding
    return body, ""


class JsonReader:
    """Reads JSON within bounds. Thread-safe."""

    def __init__(self, limits: ServeLimits) -> None:
        self._most_bytes = min(limits.json_bytes, limits.request_bytes)
        # Rows may be lists, of a few inputs. Texts with brackets count as well, which does no harm.
        self._most_brackets = 4 * limits.rows + 1024
        self._one_large = concurrency.Lock()  # Python can do nothing else while it parses; see `read`

    def read(self, body: bytes | memoryview, reservation: Reservation) -> Any:
        """Return what a body says.

        Args:
            reservation: Counts the memory that it takes.

        Raises:
            RequestError: It is not JSON.
            RequestTooLargeError: It is too long, or has too many lists and objects in it.
            UnavailableError: Requests in flight use too much memory.
        """
        return self.parse(self.admit(body, reservation))

    def admit(self, body: bytes | memoryview, reservation: Reservation) -> bytes:
        """Return a body that is within bounds, for `parse`; raises an error as `read` does."""
        if len(body) > self._most_bytes:
            raise RequestTooLargeError(
                f"the request has {len(body)} bytes of JSON; the most are {self._most_bytes} "
                "(--max-json-bytes). Send tensors in binary, or several requests."
            )
        text = bytes(body)
        if text.count(b"[") + text.count(b"{") > self._most_brackets:
            raise RequestTooLargeError(
                f"the JSON has more than {self._most_brackets} lists and objects, which is the limit. "
                "Send flat lists, with their shape."
            )
        reservation.add(JSON_COST * len(text))
        return text

    def parse(self, text: bytes) -> Any:
        """Return what JSON says.

        Raises:
            RequestError: It is not JSON.
        """
        if len(text) < _LARGE_JSON:
            return _parsed(text)
        with self._one_large:  # a second one would keep health probes waiting for twice as long
            return _parsed(text)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as cause:
        why = "it is nested too deeply" if isinstance(cause, RecursionError) else str(cause)
        raise RequestError(f"the body is not JSON: {why}") from cause


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_infer(
    target: tuple[str, str],
    body: bytes,
    headers: Mapping[str, str],
    reader: JsonReader,
    reservation: Reservation,
    regions: SharedMemoryRegions,
    *,
    topk: bool = False,
) -> tuple[InferRequest, BinaryOutputs]:
    """Return the request that a body is, and which outputs are to be sent in binary.

    The usual request is read by the core; any other is decoded here.

    Args:
        target: The model, and its version.
        reservation: Counts the memory that it takes.
        regions: Where inputs and outputs are that are not sent.
        topk: Whether it asks for the best items.

    Raises:
        RequestError: It is none; says where.
    """
    view = memoryview(body)
    said = headers.get(JSON_LENGTH)
    if said is None:
        head, rest = view, view[:0]
    else:
        length = _whole(said, JSON_LENGTH)
        if length > len(body):
            raise RequestError(f"{JSON_LENGTH} is {length}, the body has {len(body)} bytes")
        head, rest = view[:length], view[length:]
    text = reader.admit(head, reservation)
    model, version = target
    shared = SharedInputs(regions, reservation)
    usual = None if topk else native.read_http_request(body, len(head))
    if usual is not None:
        request = InferRequest(
            model=model,
            version=version,
            id=usual.id,
            tensors=PackedInputs(usual, lambda: list(_inputs(reader.parse(text), rest, shared))),
            outputs=[name for name, _ in usual.outputs],
            timeout=_timeout(headers, {}),
            split_key=read_split_key(headers.get(SPLIT_KEY_HEADER, "")),
            transport="http",
            trace={name: headers[name] for name in TRACE_HEADERS if name in headers},
        )
        chosen = {name: binary for name, binary in usual.outputs if binary is not None}
        return request, BinaryOutputs(usual.binary_outputs, chosen)
    message = reader.parse(text)
    if not isinstance(message, dict):
        raise RequestError("the body must be a JSON object with `inputs`")
    parameters = _object(message, "parameters")
    known = (TIMEOUT, PRIORITY, SPLIT_KEY, BINARY_OUTPUT, *((TOP_K, FILTER) if topk else ()))
    check_parameters("a request", parameters, known)
    wanted = _outputs(message, regions)
    request = InferRequest(
        model=model,
        version=version,
        id=_string(message, "id", ""),
        tensors=list(_inputs(message, rest, shared)),
        outputs=[name for name, _, _ in wanted],
        shared_outputs={name: place for name, _, place in wanted if place is not None},
        timeout=_timeout(headers, parameters),
        priority=read_priority(parameters.get(PRIORITY, 0)),
        split_key=read_split_key(parameters.get(SPLIT_KEY, headers.get(SPLIT_KEY_HEADER, ""))),
        transport="http",
        trace={name: headers[name] for name in TRACE_HEADERS if name in headers},
        topk=TopK(parameters.get(TOP_K, 10), read_filter(parameters.get(FILTER, {}))) if topk else None,
    )
    return request, BinaryOutputs(
        _flag(parameters, BINARY_OUTPUT),
        {name: given[BINARY] for name, given, _ in wanted if BINARY in given},
    )


class BinaryOutputs:
    """Which outputs a caller wants in binary."""

    def __init__(self, by_default: bool, chosen: Mapping[str, Any]) -> None:
        for name, value in chosen.items():
            if not isinstance(value, bool):
                raise RequestError(f"outputs: {BINARY} of {name[:80]!r} must be true or false")
        self._by_default = by_default
        self._chosen = chosen

    def has(self, name: str) -> bool:
        return bool(self._chosen.get(name, self._by_default))


def write_infer(reply: InferReply, binary: BinaryOutputs) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON where tensors follow it."""
    outputs: list[dict[str, Any]] = []
    raws: list[bytes] = []
    for tensor in reply.outputs:
        line: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if tensor.name in reply.shared:
            line["parameters"] = reply.shared[tensor.name]
        elif binary.has(tensor.name):
            raws.append(raw_bytes(tensor.values))
            line["parameters"] = {BINARY_SIZE: len(raws[-1])}
        else:
            line["data"] = _plain(tensor)
        outputs.append(line)
    message: dict[str, Any] = {"model_name": reply.model, "model_version": reply.version, "outputs": outputs}
    if reply.id:
        message["id"] = reply.id
    if reply.parameters:
        message["parameters"] = reply.parameters
    head = json.dumps(message).encode()
    return (b"".join([head, *raws]), len(head)) if raws else (head, None)


def _plain(tensor: WireTensor) -> list[Any]:
    if isinstance(tensor.values, list):
        return [one.decode("utf-8", "replace") for one in tensor.values]
    values: list[Any] = tensor.values.tolist()
    if bool(np.isfinite(tensor.values).all()):
        return values
    return [None if isinstance(one, float) and not math.isfinite(one) else one for one in values]


def _inputs(message: Mapping[str, Any], rest: memoryview, shared: SharedInputs) -> Iterator[WireTensor]:
    inputs = message.get("inputs")
    if not isinstance(inputs, list):
        raise RequestError("the body must have `inputs`, a list")
    at = 0
    for number, one in enumerate(inputs):
        where = f"inputs[{number}]"
        if not isinstance(one, dict):
            raise RequestError(f"{where} must be an object")
        name, datatype, shape = _string(one, "name"), _string(one, "datatype"), _shape(one, where)
        parameters = _object(one, "parameters")
        if (data := shared.read(where, parameters)) is not None:
            check_parameters(where, parameters, PARAMETERS)
            if "data" in one:
                raise RequestError(f"{where} has `data` and is in shared memory; it needs one of both")
            yield raw_tensor(name, datatype, shape, data)
            continue
        check_parameters(where, parameters, (BINARY_SIZE,))
        size = parameters.get(BINARY_SIZE)
        if size is None:
            if "data" not in one:
                raise RequestError(f"{where} must have `data`, or {BINARY_SIZE} among its parameters")
            yield _listed(name, datatype, shape, one["data"], where)
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(rest) - at:
            raise RequestError(
                f"{where}: {BINARY_SIZE} must be a number of bytes that the body has; "
                f"{len(rest) - at} are left"
            )
        yield raw_tensor(name, datatype, shape, rest[at : at + size])
        at += size
    if at != len(rest):
        raise RequestError(f"{len(rest) - at} bytes are left after the inputs")


def _outputs(
    message: Mapping[str, Any], regions: SharedMemoryRegions
) -> list[tuple[str, Mapping[str, Any], RegionSlice | None]]:
    """Return the name of each output that is asked for, its parameters, and where it is not to be sent."""
    outputs = message.get("outputs")
    if outputs is None:
        return []
    if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):
        raise RequestError("`outputs` must be a list of objects")
    found = []
    for one in outputs:
        name, parameters = _string(one, "name"), _object(one, "parameters")
        what = f"the output {name[:80]!r}"
        place = regions.slice_of(what, parameters)
        check_parameters(what, parameters, (BINARY,) if place is None else (BINARY, *PARAMETERS))
        found.append((name, parameters, place))
    return found


def _listed(name: str, datatype: str, shape: Sequence[int], data: Any, where: str) -> WireTensor:
    flat = _flat(data, where)
    if len(shape) == 1 and len(data) == shape[0] != len(flat) and set(map(type, data)) == {list}:
        return ragged_tensor(name, datatype, [_flat(row, where) for row in data])
    return listed_tensor(name, datatype, shape, flat)


def _flat(data: Any, where: str, depth: int = 0) -> list[Any]:
    """Return nested lists as one, the innermost first."""
    if not isinstance(data, list):
        raise RequestError(f"{where}: `data` must be a list")
    if depth > _DEEPEST:
        raise RequestError(f"{where}: `data` is nested too deeply")
    if list not in set(map(type, data)):
        return data
    flat: list[Any] = []
    for one in data:
        flat += _flat(one, where, depth + 1)
    return flat


def _shape(one: Mapping[str, Any], where: str) -> Sequence[int]:
    shape = one.get("shape")
    if not isinstance(shape, list) or not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 40 for size in shape
    ):
        raise RequestError(f"{where} must have `shape`, a list of numbers from 0 on")
    return shape


def _string(one: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = one.get(key, default)
    if not isinstance(value, str) or len(value) > 1024:
        raise RequestError(f"`{key}` must be a text of at most 1024 characters")
    try:
        value.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(f"`{key}` has half of a character") from cause
    return value


def _object(one: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = one.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"`{key}` must be an object")
    return value


def _flag(one: Mapping[str, Any], key: str) -> bool:
    value = one.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"`{key}` must be true or false")
    return value


def _timeout(headers: Mapping[str, str], parameters: Mapping[str, Any]) -> float | None:
    """Return the seconds that a caller waits, by our header and by the parameter of Triton's clients."""
    found: list[float] = []
    if TIMEOUT_HEADER in headers:
        found.append(_whole(headers[TIMEOUT_HEADER], TIMEOUT_HEADER) / 1e3)
    if TIMEOUT in parameters and (asked := read_timeout(parameters[TIMEOUT])) is not None:
        found.append(asked)
    return min(found) if found else None


def _whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise RequestError(f"the header {name} must be a whole number from 0 on, got {text[:40]!r}")
    return int(text)
