"""Structures: dicts, lists, tuples and dataclasses in each other, with anything at the leaves.

A batch is rarely one tensor. What must be done to every tensor in it is done here, to
a new structure of the same containers; the caller's own is never written to.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return `structure` with every leaf replaced by `function(leaf)`, its containers of the same types.

    Containers are dicts, lists, tuples, named tuples and dataclasses. All else is a
    leaf, None included. Leaves are visited in order.
    """
    if isinstance(structure, dict):
        # A copy keeps what a type has besides its items, such as a defaultdict's factory.
        mapped = copy.copy(structure)
        mapped.update((key, map_leaves(function, value)) for key, value in structure.items())
        return mapped
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(function, value) for value in structure))
    if isinstance(structure, list | tuple):
        return type(structure)(map_leaves(function, value) for value in structure)
    if is_dataclass_instance(structure):
        changed = copy.copy(structure)
        for field in dataclasses.fields(structure):
            # Frozen ones refuse to be set the plain way, and no caller has this copy yet.
            object.__setattr__(changed, field.name, map_leaves(function, getattr(structure, field.name)))
        return changed
    return function(structure)


def leaves(structure: Any) -> Iterator[Any]:
    """Yield every leaf, in the order in which `map_leaves` visits them."""
    if isinstance(structure, dict):
        children: Any = structure.values()
    elif isinstance(structure, list | tuple):
        children = structure
    elif is_dataclass_instance(structure):
        children = (getattr(structure, field.name) for field in dataclasses.fields(structure))
    else:
        yield structure
        return
    for child in children:
        yield from leaves(child)


def is_dataclass_instance(structure: object) -> bool:
    return dataclasses.is_dataclass(structure) and not isinstance(structure, type)
