"""What layers ask of their arguments, said in one voice.

A layer knows its widths from the start, so a wrong shape is refused where it enters,
by the name the caller knows, and not three matrix products later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from torch import Tensor

from monolith.errors import LayerArgumentError


def check_shape(layer: str, name: str, tensor: Tensor, *shape: int | None) -> None:
    """Refuse a tensor that has not exactly this many axes, of these sizes; None allows any size."""
    fits = tensor.ndim == len(shape) and all(
        want is None or want == found for want, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LayerArgumentError(f"{layer}: {name} must have shape ({wanted}), got {tuple(tensor.shape)}")


def check_last_axis(layer: str, name: str, tensor: Tensor, features: int) -> None:
    """Refuse a tensor whose last axis is not `features` wide; any axes may come before it."""
    if tensor.ndim < 1 or tensor.shape[-1] != features:
        raise LayerArgumentError(
            f"{layer}: {name} must have shape (..., {features}), got {tuple(tensor.shape)}"
        )


def check_positive(layer: str, **numbers: int) -> None:
    """Refuse a width or a count that is not a whole number of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise LayerArgumentError(f"{layer}: {name} must be a whole number of at least 1, got {number!r}")


def check_widths(layer: str, name: str, widths: Iterable[int]) -> tuple[int, ...]:
    """Return the widths of a stack of layers as a tuple: one or more whole numbers of at least 1."""
    sizes = tuple(widths)
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise LayerArgumentError(
            f"{layer}: {name} must be one or more whole numbers of at least 1, got {sizes!r}"
        )
    return sizes


def check_choice(layer: str, name: str, chosen: str, allowed: Iterable[str] | Mapping[str, object]) -> None:
    """Refuse a name that is not in the table; the message says which one is nearest."""
    names = list(allowed)
    if chosen in names:
        return
    near = get_close_matches(str(chosen), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise LayerArgumentError(f"{layer}: {name} must be one of {', '.join(names)}, got {chosen!r}.{hint}")
