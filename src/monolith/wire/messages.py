"""Messages: the JSON of a call, read into a frozen dataclass with types and bounds checked at the border.

A handler declares the message that it takes, as a dataclass, and is never called with anything else:

    @dataclass(frozen=True, slots=True)
    class Lease:
        worker: Name
        wait: Seconds = 0.0

    calls = {"lease": typed(Lease, self._lease)}

A key that is missing or unknown, a value of another type, a number out of bounds or not finite, a text
or list that is too long: each is a `RequestError` for the caller, and the handler has not run.

msgspec does the reading. Two things are added here. msgspec refuses unknown keys only for its own `Struct`
classes, so each dataclass gets a `Struct` with the same fields, made once; and a type without bounds of its
own gets the default bounds of this module, so that no field of a message is unbounded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from monolith import concurrency
from monolith.errors import RequestError

B = TypeVar("B")
Call = Callable[[dict[str, Any]], dict[str, Any]]
"""A handler from JSON to JSON."""
Gone = Callable[[], bool]
"""Returns whether the caller is gone: it was killed, or lost the connection."""
Poll = Callable[[dict[str, Any], Gone], dict[str, Any]]
"""A handler that waits, and checks meanwhile whether its caller still waits for the answer."""
Answer = Callable[[Any], object]
"""A handler from the dataclass of a call to the one that answers it, or None."""
PollAnswer = Callable[[Any, Gone], object]

_SHOWN = 60
"""Characters of a wrong value that an error shows."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most that a number may be; of a text, list or table, how long it may be."""

    least: float
    most: float


Count = Annotated[int, Bounds(0, 1 << 53)]
"""A number of things, or the number of one of them."""
Whole = Annotated[int, Bounds(-(1 << 63), (1 << 63) - 1)]
Seconds = Annotated[float, Bounds(0, 1e12)]
"""A time to wait; a server has a maximum of its own."""
Name = Annotated[str, Bounds(1, 1024)]
Text = Annotated[str, Bounds(0, 1 << 20)]
Json = Any
"""Plain values that the receiver stores or forwards unread."""

_LONGEST = Bounds(0, 1 << 20)
_DEFAULT_BOUNDS: Mapping[Any, Bounds] = {
    int: Bounds(-(1 << 63), (1 << 63) - 1),
    float: Bounds(-1.7e308, 1.7e308),  # every finite number; NaN fails both comparisons
}


@dataclass(frozen=True, slots=True)
class Nothing:
    """The message of a call that takes no arguments."""


def read_message(kind: type[B], body: object) -> B:
    """Return plain values as a `kind`, a dataclass.

    Raises:
        RequestError: They do not match. Names the field, and shows at most the beginning of its value.
    """
    try:
        msgspec.convert(body, _prepared(typing.cast("Any", kind)))
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _request_error(kind, body, str(error)) from None
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is no text
        raise RequestError(f"{kind.__name__}: a text of it is not valid Unicode") from None


def write_message(message: object) -> dict[str, Json]:
    """Return a dataclass as plain values, which `read_message` reads into an equal one."""
    assert dataclasses.is_dataclass(message)
    return {field.name: _plain(getattr(message, field.name)) for field in dataclasses.fields(message)}


def typed(kind: type[B], answer: Callable[[B], dict[str, Any] | None]) -> Call:
    """Return a handler that receives its message as a `kind`; an answer of None is sent as {}."""
    return lambda body: answer(read_message(kind, body)) or {}


def typed_calls(
    kinds: Mapping[str, type], calls: Mapping[str, Answer], *, longest: float = math.inf
) -> dict[str, Call]:
    """Return handlers that each receive the kind of message listed under their name.

    The answer, a dataclass or None, is sent as plain values.

    Args:
        longest: The most seconds that a message may ask to `wait`; a longer wait is shortened to it.

    Raises:
        KeyError: A call has no kind.
    """

    def call_of(kind: type, answer: Answer) -> Call:
        return lambda body: _written(answer(_within(read_message(kind, body), longest)))

    return {name: call_of(kinds[name], answer) for name, answer in calls.items()}


def typed_polls(
    kinds: Mapping[str, type], polls: Mapping[str, PollAnswer], *, longest: float = math.inf
) -> dict[str, Poll]:
    """Like `typed_calls`, for handlers that check whether their caller is gone."""

    def poll_of(kind: type, answer: PollAnswer) -> Poll:
        return lambda body, gone: _written(answer(_within(read_message(kind, body), longest), gone))

    return {name: poll_of(kinds[name], answer) for name, answer in polls.items()}


def _within(message: Any, longest: float) -> Any:
    if not hasattr(message, "wait"):
        return message
    return dataclasses.replace(message, wait=min(message.wait, longest))


def _written(answer: object) -> dict[str, Json]:
    return {} if answer is None else write_message(answer)


def _plain(value: object) -> Json:
    # Not msgspec.to_builtins, which leaves tuples as they are: a fake transport that skips JSON would
    # then deliver other values than a real one.
    if dataclasses.is_dataclass(value):
        return write_message(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return value


_PREPARING = concurrency.Lock()
"""Held while msgspec analyses a type for the first time. It stores the analysis on the type before it is
complete, and another thread that reads a message of that type meanwhile crashes the process."""


@cache
def _prepared(kind: Any) -> Any:
    """Return the strict type of a kind of message, after msgspec has analysed both for all threads."""
    with _PREPARING:
        strict = _strict(kind, None)
        for one in (strict, kind):
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert({}, one)
    return strict


@cache
def _strict(hint: Any, bounds: Bounds | None) -> Any:
    """Return the type that msgspec checks in place of `hint`: no unknown keys, and bounds everywhere."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _strict(args[0], args[1])
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_strict(arg, None) for arg in args)]  # noqa: UP007  made at run time
    if hint in (int, float):
        bounds = bounds or _DEFAULT_BOUNDS[hint]
        return Annotated[hint, msgspec.Meta(ge=hint(bounds.least), le=hint(bounds.most))]
    length = bounds or _LONGEST
    sized: dict[str, Any] = {"min_length": int(length.least), "max_length": int(length.most)}
    if hint is str:
        # Half of a surrogate pair is valid in JSON; files and databases refuse it.
        return Annotated[str, msgspec.Meta(pattern=r"\A[^\ud800-\udfff]*\Z", **sized)]
    if origin is tuple and args[-1] is not Ellipsis:
        return tuple[tuple(_strict(arg, None) for arg in args)]  # type: ignore[misc]
    if origin in (list, tuple):
        return Annotated[list[_strict(args[0], None)], msgspec.Meta(**sized)]  # type: ignore[misc]
    if origin is dict:
        return Annotated[dict[_strict(str, None), _strict(args[1], None)], msgspec.Meta(**sized)]  # type: ignore[misc]
    if not dataclasses.is_dataclass(hint):
        return hint  # Any, bool, None, Literal
    hints = typing.get_type_hints(hint, include_extras=True)
    fields: list[Any] = []
    for field in dataclasses.fields(hint):
        required = field.default is MISSING and field.default_factory is MISSING
        kind = _strict(hints[field.name], None)
        fields.append((field.name, kind) if required else (field.name, kind, None))
    return msgspec.defstruct(hint.__name__, fields, kw_only=True, forbid_unknown_fields=True)  # type: ignore[union-attr]


_PROBLEM = re.compile(r"(?P<text>.*?)(?: - at `(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def _request_error(kind: type, body: object, said: str) -> RequestError:
    """Return the problem that msgspec found, with the value and the choices, which msgspec does not tell."""
    match = _PROBLEM.fullmatch(said)
    assert match is not None
    text, path = match["text"].replace("`", ""), (match["path"] or "$").removeprefix("$").removeprefix(".")
    declared, found = _at(kind, body, path)
    if unknown := _UNKNOWN.fullmatch(match["text"]):
        takes = ", ".join(field.name for field in dataclasses.fields(declared)) or "nothing"
        return RequestError(f"{_below(path, unknown[1])[:_SHOWN]}: unknown key; it takes {takes}")
    if missing := _MISSING.fullmatch(match["text"]):
        return RequestError(f"{_below(path, missing[1])} is missing")
    if get_origin(declared) is Literal:
        text = f"expected one of {', '.join(map(repr, get_args(declared)))}"
    elif "matching regex" in text:
        text = "expected str without half surrogate pairs"
    elif not path.endswith("[...]"):  # of a value in a table, msgspec does not tell which one it is
        text = text.partition(", got ")[0]
    if ", got " not in text:
        text += f", got {_shown(found)}"
    return RequestError(f"{path or 'the message'}: {text[:1].lower()}{text[1:]}")


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(hint: Any, value: Any, path: str) -> tuple[Any, Any]:
    """Return the declared type and the value at a path of msgspec's, such as a.b[0] or a[...].b."""
    for step in [None, *re.findall(r"[^.\[\]]+|\.{3}", path)]:
        if step == "...":
            hint, value = get_args(hint)[1], next(iter(value.values()), None)
        elif step is not None and dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint, include_extras=True)
            hint, value = hints[step], value[step] if isinstance(value, dict) else None
        elif step is not None:
            args = get_args(hint)
            hint = args[int(step)] if get_origin(hint) is tuple and args[-1] is not Ellipsis else args[0]
            value = value[int(step)] if isinstance(value, (list, tuple)) else None
        while get_origin(hint) in (Annotated, typing.Union, types.UnionType):
            hint = get_args(hint)[0]
    return hint, value


def _shown(value: object) -> str:
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'table'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return ascii(value[:_SHOWN]) if isinstance(value, str) else repr(value)
