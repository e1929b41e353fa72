"""Hyper-parameters: a named, nested, printable bag of values that a class is built from.

Tasks and layers describe themselves with one:

    @classmethod
    def params(cls):
        p = InstantiableParams(cls)
        p.define("hidden_units", 64, "Width of the tower.")
        return p

Callers set what differs and call `instantiate()`. A name must be defined before it
can be set, so a misspelt one is an error that suggests the right one. `with_params`
derives the bag from a plain constructor.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any, Self, TypeVar

from monolith.config.text import UniqueNames
from monolith.errors import FrozenParamsError, InvalidParamError, UnknownParamError

allowed_kwargs = frozenset(
    {
        "activity_regularizer",
        "autocast",
        "batch_input_shape",
        "implementation",
        "input_dim",
        "input_shape",
        "name",
        "weights",
    }
)
"""What `instantiate` passes on through `**kwargs`, where it is set."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ITEM = re.compile(r"([a-z][a-z0-9_]*)\[(\d+)\]")

C = TypeVar("C", bound=type)


class Params:
    """Named values. Attributes and items read and write defined names only.

    A dotted path reaches into nested `Params`: `p.get("train.steps")`, and into lists of
    them: `p.get("towers[1].units")`. Not thread-safe.
    """

    _values: dict[str, Any]
    _descriptions: dict[str, str]
    _immutable: bool

    def __init__(self) -> None:
        # Around __setattr__, which knows parameters only.
        self.__dict__.update(_values={}, _descriptions={}, _immutable=False)

    def define(self, name: str, default: Any, description: str) -> None:
        """Add a parameter.

        Raises:
            InvalidParamError: `name` is not lower-case letters, digits and underscores, a letter
                first; or it is a method of this class, which would hide it.
            UnknownParamError: There is one of that name.
            FrozenParamsError: Frozen.
        """
        self._require_mutable()
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidParamError(
                f"cannot define parameter {name!r}: a name is lower-case letters, digits and underscores, "
                "a letter first"
            )
        if hasattr(type(self), name):
            raise InvalidParamError(
                f"cannot define parameter {name!r}: that is a method of Params; rename it"
            )
        if name in self._values:
            raise UnknownParamError(f"Parameter {name} is already defined")
        self._values[name] = default
        self._descriptions[name] = description

    def get(self, path: str) -> Any:
        """The value at a dotted path.

        Raises:
            UnknownParamError: There is none.
            InvalidParamError: The path goes through something that is not a `Params`.
        """
        owner, name = self._resolve(path)
        value = owner._lookup(name)
        if value is _MISSING:
            raise UnknownParamError(owner._unknown(path))
        return value

    def set(self, **values: Any) -> Self:
        """Set parameters by dotted path, `p.set(**{"train.steps": 3})`; return self."""
        self._require_mutable()
        for path, value in values.items():
            owner, name = self._resolve(path)
            if name not in owner._values:
                raise UnknownParamError(owner._unknown(path))
            owner._require_mutable()
            owner._values[name] = value
        return self

    def delete(self, *paths: str) -> Self:
        """Remove the parameters at these dotted paths; return self."""
        self._require_mutable()
        for path in paths:
            owner, name = self._resolve(path)
            if name not in owner._values:
                raise UnknownParamError(owner._unknown(path))
            owner._require_mutable()
            del owner._values[name], owner._descriptions[name]
        return self

    def contain(self, path: str) -> bool:
        """Whether there is a parameter at a dotted path."""
        try:
            self.get(path)
        except (UnknownParamError, InvalidParamError):
            return False
        return True

    def describe(self, name: str) -> str:
        """What was said about a parameter when it was defined."""
        if name not in self._values:
            raise UnknownParamError(self._unknown(name))
        return self._descriptions[name]

    def freeze(self) -> None:
        """Refuse all further changes, for good, in copies too. Nested `Params` stay as they are."""
        self.__dict__["_immutable"] = True

    def copy(self) -> Self:
        """A copy to change freely: nested `Params` and containers are copied, tensors are shared."""
        return copy.deepcopy(self)

    def iter_params(self) -> Iterator[tuple[str, Any]]:
        """(name, value) in the order of definition."""
        yield from self._values.items()

    def __getattr__(self, name: str) -> Any:
        # Only reached for what is not a real attribute; `copy` and `pickle` probe before there is any.
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise UnknownParamError(self._unknown(name))
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.set(**{name: value})

    def __delattr__(self, name: str) -> None:
        self.delete(name)

    def __getitem__(self, path: str) -> Any:
        return self.get(path)

    def __setitem__(self, path: str, value: Any) -> None:
        self.set(**{path: value})

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self.contain(path)

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        return True  # an empty bag is still a bag

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __dir__(self) -> list[str]:
        return sorted(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Params):
            return NotImplemented
        return self._values.keys() == other._values.keys() and all(
            _same(value, other._values[name]) for name, value in self._values.items()
        )

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(
            _values={name: _copied(value, memo) for name, value in self._values.items()},
            _descriptions=dict(self._descriptions),
            _immutable=self._immutable,
        )
        return twin

    def __str__(self) -> str:
        return self._text(depth=0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_plain(self)})"

    def _text(self, depth: int) -> str:
        indent = "  " * depth
        lines = [
            f"{indent}  {name}: {_shown(self._values[name], depth + 1)}" for name in sorted(self._values)
        ]
        return "\n".join(["{", *lines, indent + "}"])

    def _require_mutable(self) -> None:
        if self._immutable:
            raise FrozenParamsError("This Params instance is immutable.")

    def _lookup(self, part: str) -> Any:
        """The value of `name` or of `name[i]`; `_MISSING` where there is none."""
        if part in self._values:
            return self._values[part]
        if item := _ITEM.fullmatch(part):
            values, index = self._values.get(item[1]), int(item[2])
            if isinstance(values, (list, tuple)) and index < len(values):
                return values[index]
        return _MISSING

    def _resolve(self, path: str) -> tuple[Params, str]:
        """The `Params` that owns the last name of `path`, and that name."""
        *through, last = path.split(".")
        owner = self
        for depth, part in enumerate(through, start=1):
            here = ".".join(through[:depth])
            value = owner._lookup(part)
            if value is _MISSING:
                raise UnknownParamError(owner._unknown(here))
            if not isinstance(value, Params):
                raise InvalidParamError(f"Cannot introspect {type(value)} for {here}")
            owner = value
        return owner, last

    def _unknown(self, path: str) -> str:
        """`path`, with the names here that look like its last one."""
        last = path.rpartition(".")[2]
        wanted = set() if _ITEM.fullmatch(last) else _three_grams(last)
        near = sorted(name for name in self._values if 2 * len(wanted & _three_grams(name)) > len(wanted))
        return f"{path} (did you mean: [{','.join(near)}])" if near else path


class InstantiableParams(Params):
    """The parameters of one class, which they can build."""

    def __init__(self, cls: type | None = None) -> None:
        super().__init__()
        self.define("cls", cls, "The class these parameters build.")

    def instantiate(self) -> Any:
        """Build the class.

        A constructor whose only argument is `params`, of a class that has `params`, gets
        self. Any other gets the values whose names match its arguments, nested ones
        too, the nearest first; and through `**kwargs` those of `allowed_kwargs`
        that are not None.

        Raises:
            InvalidParamError: There is no class, or it does not take what `allowed_kwargs` holds.
        """
        cls = self._values.get("cls")
        if cls is None:
            raise InvalidParamError("cannot instantiate: `cls` is not set; set it to the class to build")
        arguments = _constructor_arguments(cls)
        if list(arguments) == ["params"] and hasattr(cls, "params"):
            return cls(self)
        leaves = {**_leaves(self), **{n: v for n, v in self._values.items() if isinstance(v, Params)}}
        given = {name: leaves[name] for name in arguments if name in leaves}
        takes_more = any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()
        )
        if takes_more:
            extra = {n: leaves[n] for n in allowed_kwargs if leaves.get(n) is not None and n not in given}
            given.update(extra)
        given.update(self._chosen_kwargs(cls, takes_more, arguments))
        return cls(**given)

    def _chosen_kwargs(self, cls: type, takes_more: bool, arguments: Collection[str]) -> dict[str, Any]:
        """What the parameter `allowed_kwargs` asks to pass."""
        chosen = self._values.get("allowed_kwargs") or {}
        if not isinstance(chosen, Mapping):
            raise InvalidParamError(f"`allowed_kwargs` must be a dict or None, got {type(chosen).__name__}")
        wanted = {name: value for name, value in chosen.items() if value is not None}
        for name in wanted:
            if name not in allowed_kwargs or not (takes_more or name in arguments):
                raise InvalidParamError(
                    f"cannot pass {name!r} to {cls.__name__}: it must be one of {sorted(allowed_kwargs)} and "
                    "the constructor must take it or **kwargs"
                )
        return wanted


def copy_params_to(source: Params, target: Params, skip: Collection[str] | None = None) -> Params:
    """Set every parameter of `source` in `target`, which must define it; return `target`.

    Nested `Params` are copied. `cls` stays, and so does what `skip` names.
    """
    for name, value in source.iter_params():
        if name != "cls" and name not in (skip or ()):
            target[name] = value.copy() if isinstance(value, Params) else value
    return target


def update_params(target: Params, args: MutableMapping[str, Any]) -> None:
    """Set each leaf, at any depth, that `args` names, and pop it from `args`.

    What is left in `args` afterwards has no parameter. Of two leaves with one name, the
    first in the order of definition is set.
    """
    for name, value in list(target.iter_params()):
        if isinstance(value, Params):
            update_params(value, args)
        elif name in args:
            target[name] = args.pop(name)


def params(cls: type, names: UniqueNames | None = None) -> InstantiableParams:
    """The parameters of a plain class: its constructor's arguments and those of its bases.

    Starts from the nearest base that has `params()`. An argument that is a parameter
    already, at any depth, sets its default; any other is defined, as None if it
    has no default. `name` is the class's name.

    Args:
        names: Makes `name` unlike any it gave before.
    """
    result = _base_params(cls)
    inherited = result.cls
    result.cls = cls
    own_name = names.unique(cls.__name__) if names else cls.__name__
    if "name" not in result:
        result.define("name", own_name, "Name of the instance.")
    elif names or not result.name or result.name == getattr(inherited, "__name__", None):
        result.name = own_name
    owners = _owners(result)
    for argument, default in _all_arguments(cls).items():
        absent = default is inspect.Parameter.empty
        if argument not in owners:
            result.define(argument, None if absent else default, argument)
        elif not absent and not (argument == "name" and default is None):
            owners[argument][argument] = default
    if "allowed_kwargs" not in result:
        result.define("allowed_kwargs", None, "Extra keyword arguments for the constructor, by name.")
    return result


def with_params(cls: C) -> C:
    """Class decorator: gives `cls`, and through it each subclass, a `params()` made by `params`."""
    cls.params = classmethod(params)  # type: ignore[attr-defined]
    return cls


_MISSING = object()


def _base_params(cls: type) -> InstantiableParams:
    for base in cls.__mro__[1:]:
        if callable(make := getattr(base, "params", None)):
            found = make()
            if isinstance(found, InstantiableParams):
                return found
    return InstantiableParams(cls)


def _constructor_arguments(cls: type) -> dict[str, Any]:
    """Argument -> default of the constructor; without self, *args and **kwargs."""
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return {}
    return _named(list(inspect.signature(cls.__init__).parameters.values())[1:])  # type: ignore[misc]


def _all_arguments(cls: type) -> dict[str, Any]:
    """Argument -> default over all bases, the nearest default winning. `params` is self's own business."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        if "__init__" in vars(base):
            for name, default in _constructor_arguments(base).items():
                if name != "params" and (name not in found or default is not inspect.Parameter.empty):
                    found[name] = default
    return found


def _named(parameters: list[inspect.Parameter]) -> dict[str, Any]:
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return {p.name: p.default for p in parameters if p.kind not in variadic}


def _owners(root: Params) -> dict[str, Params]:
    """Name of each leaf -> the `Params` that has it, nearest to the root."""
    owners: dict[str, Params] = {}
    level = [root]
    while level:
        deeper = []
        for owner in level:
            for name, value in owner.iter_params():
                if isinstance(value, Params):
                    deeper.append(value)
                else:
                    owners.setdefault(name, owner)
        level = deeper
    return {**owners, **{n: root for n, v in root.iter_params() if isinstance(v, Params)}}


def _leaves(root: Params) -> dict[str, Any]:
    """Name of each leaf -> its value, nearest to the root."""
    return {name: owner._values[name] for name, owner in _owners(root).items()}


def _three_grams(name: str) -> set[str]:
    return {name[i : i + 3] for i in range(len(name) - 2)}


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # without it there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if _is_tensor(value):
        return value
    if type(value) is list:
        return [_copied(item, memo) for item in value]
    if type(value) is tuple:
        return tuple(_copied(item, memo) for item in value)
    if type(value) is dict:
        return {key: _copied(item, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if getattr(first, "shape", None) != getattr(second, "shape", None):
        return False
    if type(first) is type(second) and isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    equal = first == second
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _shown(value: Any, depth: int) -> str:
    if isinstance(value, Params):
        return value._text(depth)
    if isinstance(value, str) and not isinstance(value, Enum):
        return json.dumps(value, ensure_ascii=False)
    return str(_plain(value))


class _Bare:
    """Text that prints without quotes inside a list or dict."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _plain(value: Any) -> Any:
    """`value` with each `Params` inside as a dict sorted by name."""
    if isinstance(value, Params):
        value = value._values
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value, key=str)}
    if type(value) in {list, tuple}:
        return type(value)(_plain(item) for item in value)
    if isinstance(value, Enum):
        return _Bare(f"{type(value).__name__}.{value.name}")
    return value
