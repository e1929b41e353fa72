"""Bodies: from the JSON of a call to a frozen dataclass, with types and bounds checked at the border.

Whoever answers a call says what it takes, as a dataclass, and is never called with anything else:

    @dataclass(frozen=True, slots=True)
    class Lease:
        worker: Name
        wait: Seconds = 0.0

    calls = {"lease": typed(Lease, self._lease)}

A key that is missing or unknown, a value of another type, a number out of bounds or not finite, a text
or list that is too long: each is a `RequestError` for the caller, and nothing has happened.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from monolith.errors import RequestError

B = TypeVar("B")
Call = Callable[[dict[str, Any]], dict[str, Any]]
"""From JSON to JSON."""
Gone = Callable[[], bool]
"""Whether the caller of a call is gone: it was killed, or lost the connection."""
Poll = Callable[[dict[str, Any], Gone], dict[str, Any]]
"""A call that waits, and looks meanwhile whether anybody still waits for its answer."""
Answer = Callable[[Any], object]
"""From a dataclass, the body of a call, to the one that answers it, or None."""
PollAnswer = Callable[[Any, Gone], object]

_LARGEST = (1 << 63) - 1
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most that a number may be; of a text, list or table, how long it may be."""

    least: float
    most: float


Count = Annotated[int, Bounds(0, 1 << 53)]
"""A number of things, or the number of one of them."""
Whole = Annotated[int, Bounds(-_LARGEST - 1, _LARGEST)]
Seconds = Annotated[float, Bounds(0, 1e12)]
"""How long to wait; a server has a longest of its own."""
Name = Annotated[str, Bounds(1, 1024)]
Text = Annotated[str, Bounds(0, 1 << 20)]
Json = Any
"""Plain values that the receiver keeps or hands on as they are."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """A call that takes nothing."""


def read_body(kind: type[B], body: object) -> B:
    """Return plain values as a `kind`, a dataclass.

    Raises:
        RequestError: They are not one. Says where, and shows no more than the beginning of what came.
    """
    read: B = _reader(kind)(body, "")
    return read


def typed(kind: type[B], answer: Callable[[B], dict[str, Any] | None]) -> Call:
    """Return a call that hands its body on as a `kind`; to answer None is to answer with nothing."""

    def call(body: dict[str, Any]) -> dict[str, Any]:
        return answer(read_body(kind, body)) or {}

    return call


def write_body(message: object) -> dict[str, Json]:
    """Return a dataclass as plain values, from which `read_body` makes an equal one."""
    assert dataclasses.is_dataclass(message)
    return {field.name: _plain(getattr(message, field.name)) for field in dataclasses.fields(message)}


def _plain(value: object) -> Json:
    if dataclasses.is_dataclass(value):
        return write_body(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return value


def typed_calls(
    kinds: Mapping[str, type], calls: Mapping[str, Answer], *, longest: float = math.inf
) -> dict[str, Call]:
    """Return calls of which each is handed a body of the kind that stands under its name.

    What it answers, a dataclass or None, is sent as plain values.

    Args:
        longest: The most seconds that a body can ask to `wait`; more counts as so many.

    Raises:
        KeyError: A call has no kind.
    """

    def call_of(kind: type, answer: Answer) -> Call:
        return lambda body: _answer(answer(_within(read_body(kind, body), longest)))

    return {name: call_of(kinds[name], answer) for name, answer in calls.items()}


def typed_polls(
    kinds: Mapping[str, type], polls: Mapping[str, PollAnswer], *, longest: float = math.inf
) -> dict[str, Poll]:
    """As `typed_calls`, for calls that look whether their caller is gone."""

    def poll_of(kind: type, answer: PollAnswer) -> Poll:
        return lambda body, gone: _answer(answer(_within(read_body(kind, body), longest), gone))

    return {name: poll_of(kinds[name], answer) for name, answer in polls.items()}


def _within(body: Any, longest: float) -> Any:
    return dataclasses.replace(body, wait=min(body.wait, longest)) if hasattr(body, "wait") else body


def _answer(message: object) -> dict[str, Json]:
    return {} if message is None else write_body(message)


_Read = Callable[[object, str], Any]
"""Takes plain values, and where in the body they stand."""


def _reader(hint: Any, bounds: Bounds | None = None) -> _Read:
    return _made(hint, bounds)


@cache
def _made(hint: Any, bounds: Bounds | None) -> _Read:
    """Return what reads values of a type; made once."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _reader(args[0], args[1])
    if hint is Any:
        return lambda value, _: value
    if origin in (typing.Union, types.UnionType):
        return _optional(*(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        return _literal(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return _fixed([_reader(arg) for arg in args])
    if origin in (list, tuple):
        return _list(_reader(args[0]), tuple if origin is tuple else list, bounds)
    if origin is dict:
        return _table(_reader(args[1]), bounds)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    return _SCALARS[hint](bounds)


def _optional(hint: Any) -> _Read:
    read = _reader(hint)
    return lambda value, at: None if value is None else read(value, at)


def _literal(allowed: tuple[Any, ...]) -> _Read:
    def read(value: object, at: str) -> Any:
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise _error(at, f"one of {', '.join(map(repr, allowed))}", value)
        return value

    return read


def _whole(bounds: Bounds | None) -> _Read:
    bounds = bounds or Bounds(-_LARGEST - 1, _LARGEST)

    def read(value: object, at: str) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _error(at, "a whole number", value)
        if not bounds.least <= value <= bounds.most:
            raise _error(at, f"a whole number from {bounds.least} to {bounds.most}", value)
        return value

    return read


def _real(bounds: Bounds | None) -> _Read:
    bounds = bounds or Bounds(-math.inf, math.inf)

    def read(value: object, at: str) -> Any:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise _error(at, "a number", value)
        if not (bounds.least <= value <= bounds.most and abs(value) <= 1.7e308):
            raise _error(at, f"a finite number from {bounds.least:g} to {bounds.most:g}", value)
        return float(value)

    return read


def _boolean(_: Bounds | None) -> _Read:
    def read(value: object, at: str) -> Any:
        if not isinstance(value, bool):
            raise _error(at, "true or false", value)
        return value

    return read


def _text(bounds: Bounds | None) -> _Read:
    bounds = bounds or Bounds(0, 1 << 20)

    def read(value: object, at: str) -> Any:
        if not isinstance(value, str):
            raise _error(at, "a text", value)
        if not bounds.least <= len(value) <= bounds.most:
            raise _error(at, f"a text of {bounds.least} to {bounds.most} characters", value)
        try:
            value.encode()
        except UnicodeEncodeError as cause:  # half of a pair, which files and databases refuse
            raise _error(at, "a text of whole characters", ascii(value)) from cause
        return value

    return read


_SCALARS: Mapping[Any, Callable[[Bounds | None], _Read]] = {
    bool: _boolean,
    int: _whole,
    float: _real,
    str: _text,
}


def _list(item: _Read, kind: type, bounds: Bounds | None) -> _Read:
    bounds = bounds or Bounds(0, 1 << 20)

    def read(value: object, at: str) -> Any:
        if not isinstance(value, list):
            raise _error(at, "a list", value)
        if not bounds.least <= len(value) <= bounds.most:
            raise _error(at, f"a list of {bounds.least} to {bounds.most}", value)
        return kind(item(one, f"{at}[{number}]") for number, one in enumerate(value))

    return read


def _fixed(items: list[_Read]) -> _Read:
    def read(value: object, at: str) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            raise _error(at, f"a list of {len(items)}", value)
        return tuple(item(one, f"{at}[{n}]") for n, (item, one) in enumerate(zip(items, value, strict=True)))

    return read


def _table(item: _Read, bounds: Bounds | None) -> _Read:
    bounds = bounds or Bounds(0, 1 << 20)
    text = _text(None)

    def read(value: object, at: str) -> Any:
        if not isinstance(value, dict):
            raise _error(at, "a table", value)
        if not bounds.least <= len(value) <= bounds.most:
            raise _error(at, f"a table of {bounds.least} to {bounds.most}", value)
        return {text(key, at): item(one, _below(at, str(key))) for key, one in value.items()}

    return read


def _dataclass(kind: Any) -> _Read:
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    }

    def read(value: object, at: str) -> Any:
        if not isinstance(value, dict):
            raise _error(at, f"a table of {', '.join(readers) or 'nothing'}", value)
        if unknown := [key for key in value if key not in readers]:
            takes = ", ".join(readers) or "nothing"
            raise RequestError(
                f"{_below(at, str(unknown[0]))[:_SHOWN]}: there is no such key; it takes {takes}"
            )
        if missing := sorted(required - value.keys()):
            raise RequestError(f"{_below(at, missing[0])}: it is missing")
        return kind(**{name: readers[name](one, _below(at, name)) for name, one in value.items()})

    return read


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _error(at: str, wanted: str, value: object) -> RequestError:
    if isinstance(value, (list, dict)):
        shown = f"a {'list' if isinstance(value, list) else 'table'} of {len(value)}"
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        shown = f"a number of {value.bit_length()} bits"
    else:
        shown = repr(value[:_SHOWN]) if isinstance(value, str) else repr(value)
    return RequestError(f"{at or 'the body'} must be {wanted}, got {shown}")
