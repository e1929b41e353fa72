"""Plain state: the contents of a `state_dict`, as JSON and named tensors.

Optimizers, schedulers and random generators describe themselves by nested dicts of
numbers, text and tensors. Here the tensors are collected under names, and JSON says
where each one belongs. What JSON has no word for is written as an object with one key
that begins with `$`. The list of types is closed: reading must never run code, so there
is no pickle to fall back to.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from monolith.errors import RestoreError, SaveError

Json: TypeAlias = Any
"""What `json` reads and writes."""
_IN_JSON = frozenset({bool, int, str, type(None)})


def encode(value: Any, name: str, tensors: dict[str, Tensor], *, longest_text: float = math.inf) -> Json:
    """Return `value` as JSON, and add the tensors in it, not copied, to `tensors`.

    Args:
        name: Of the value: tensors in it are named `<name>/<key>/...`, and errors speak of it.
        longest_text: Characters of a text that JSON should hold; a longer one becomes a tensor of its bytes.

    Raises:
        SaveError: Something in it is neither number, text, tensor nor a collection of such.
    """

    def inner(value: Any, name: str) -> Json:
        return encode(value, name, tensors, longest_text=longest_text)

    if isinstance(value, Tensor):
        return {"$tensor": _put(value.detach(), name, tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": _put(_as_tensor(value, name), name, tensors)}
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind is str and len(value) > longest_text:
        return {"$text": _put(torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8), name, tensors)}
    if kind in _IN_JSON:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        if _is_json(value, longest_text):
            return list(value)
        return [inner(item, f"{name}/{i}") for i, item in enumerate(value)]
    if kind in (tuple, torch.Size):
        return {"$tuple": [inner(item, f"{name}/{i}") for i, item in enumerate(value)]}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind in (dict, OrderedDict, defaultdict) and all(
        type(key) is str and not key.startswith("$") for key in value
    ):
        return {key: inner(item, f"{name}/{key}") for key, item in value.items()}
    if kind in (dict, OrderedDict, defaultdict, Counter):
        items = [[inner(key, f"{name}/{key}"), inner(item, f"{name}/{key}")] for key, item in value.items()]
        return {"$counter" if kind is Counter else "$dict": items}
    raise SaveError(
        f"cannot save {name}: it is a {kind.__module__}.{kind.__qualname__}, which is neither number, text, "
        "tensor nor a plain collection of those. A checkpoint holds no pickles; let state_dict return "
        "plain values."
    )


def _is_json(items: list[Any], longest_text: float) -> bool:
    """Whether JSON has words for all of them; thousands of numbers are looked at in no time."""
    kinds = set(map(type, items))
    if str in kinds and any(type(item) is str and len(item) > longest_text for item in items):
        return False
    return kinds <= _IN_JSON or (kinds == {float} and all(map(math.isfinite, items)))


def decode(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the encoded value. Tensors are those of `tensors`, not copies.

    Raises:
        RestoreError: `encode` writes no such thing, or a tensor is missing.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (marker := next(iter(value))).startswith("$"):
        try:
            return _decode_marked(marker, value[marker], tensors)
        except (ValueError, TypeError, KeyError, AttributeError) as cause:
            raise RestoreError(f"the saved state has {marker} of {value[marker]!r:.80}: {cause}") from cause
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_marked(marker: str, inner: Any, tensors: Mapping[str, Tensor]) -> Any:
    match marker:
        case "$tensor":
            return tensors[inner]
        case "$array":
            return tensors[inner].numpy()
        case "$text":
            return tensors[inner].numpy().tobytes().decode()
        case "$float":
            return float(inner)
        case "$tuple":
            return tuple(decode(item, tensors) for item in inner)
        case "$dtype":
            dtype = getattr(torch, inner)
            if not isinstance(dtype, torch.dtype):
                raise TypeError("no such dtype")
            return dtype
        case "$dict" | "$counter":
            items = {decode(key, tensors): decode(item, tensors) for key, item in inner}
            return Counter(items) if marker == "$counter" else items
        case _:
            raise ValueError("this program does not know it")


def _put(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    free, number = name, 2
    while free in tensors:
        free, number = f"{name}#{number}", number + 1
    tensors[free] = tensor
    return free


def _as_tensor(array: np.ndarray[Any, Any], name: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).copy())
    except TypeError as cause:
        raise SaveError(f"cannot save {name}: {cause}") from cause
