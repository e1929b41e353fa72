"""A request and its answer, however they came over the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from monolith.serve.server.tensors import WireTensor

Parameter = bool | int | float | str


@dataclass(slots=True)
class PackedInputs:
    """The inputs of a request, not read yet."""

    key: tuple[bytes, ...]
    """Their names, types and shapes, as they came."""
    contents: Sequence[bytes]
    """Their values, one after another in each."""
    read: Callable[[], Sequence[WireTensor]]
    """Reads all of it; raises a RequestError where it makes no sense."""


@dataclass(slots=True, kw_only=True)
class InferRequest:
    """One request."""

    model: str
    version: str = ""
    """Empty for the one that the server chooses."""
    id: str = ""
    tensors: Sequence[WireTensor] | PackedInputs
    outputs: Sequence[str] = ()
    """Names of those that are wanted; none for all."""
    timeout: float | None = None
    """Seconds that the caller waits."""
    transport: str = "local"


@dataclass(slots=True, kw_only=True)
class InferReply:
    """The answer to one."""

    model: str
    version: str
    id: str
    outputs: list[WireTensor]
    parameters: dict[str, Parameter] = field(default_factory=dict)
