"""Splits an exported graph by side: the user's half runs once per request, the items' half once per item.

A ranking request has g users (one per request of a batch) and n items. Each input tensor of the graph is then

    shared   (g, ...): computed from features of users only
    own      (n, ...): computed from features of items
    mixed    slices of both, next to each other along one dimension, as a CONCAT layout has them

The rewrite walks through the graph once. An operator over shared values runs on g rows. A linear layer over
a mixed value becomes the sum of two, `own @ W[own] + (shared @ W[shared])[user]`, and so do sums and dot
products. Any other operator gets all n rows, so a rule that is missing here costs time and nothing else. The
columns of weights are taken apart when weights are swapped, not in each request. With one user, which is the
usual batch, there is a graph that does not repeat its rows: they broadcast, and its part of a linear layer
becomes the bias.

Example: a Linear over 18 features of the user and 8 of an item, 16 wide, multiplies (1, 288) and (500, 128)
for 500 items, in place of (500, 416).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SplitInput:
    """How one input tensor of a graph is made of those of the two sides.

    With one of the two, that tensor is the input. With both, they are slices along `dim`; or, if `dim` is
    None, the input is their sum.
    """

    shared: int | None
    """Number of the tensor among those of the shared side; None if it has none."""
    own: int | None
    dim: int | None = None
    shared_at: tuple[int, ...] = ()
    """The places along `dim` that the shared side has."""
    own_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Shared:
    """A value with one row per user."""

    node: Node
    ndim: int


@dataclass(frozen=True, slots=True)
class _Mixed:
    """A value whose places along `dim` belong to users or to items."""

    shared: Node
    own: Node
    ndim: int
    dim: int
    shared_at: tuple[int, ...]
    own_at: tuple[int, ...]

    def is_split_like(self, other: object) -> bool:
        return (
            isinstance(other, _Mixed)
            and (self.ndim, self.dim, self.shared_at) == (other.ndim, other.dim, other.shared_at)
            and self.own_at == other.own_at
        )


_Value = Node | _Shared | _Mixed

_UNARY = frozenset(
    f"{name}.default"
    for name in (
        *(
            "relu",
            "sigmoid",
            "tanh",
            "gelu",
            "silu",
            "mish",
            "softplus",
            "elu",
            "selu",
            "leaky_relu",
            "relu6",
        ),
        *("neg", "exp", "expm1", "log1p", "abs", "square", "sqrt", "rsqrt", "hardtanh", "hardswish"),
        *("hardsigmoid", "clamp", "clamp_min", "clamp_max", "clone", "contiguous", "detach", "alias"),
        *("dropout", "nan_to_num"),
    )
) | {"to.dtype", "pow.Tensor_Scalar", "mul.Scalar", "add.Scalar", "sub.Scalar", "div.Scalar"}
"""Functions of each number alone."""
_BINARY = frozenset(
    ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "minimum.default")
)
_ALONG_ONE = (
    *("squeeze.dim", "unsqueeze.default", "select.int", "slice.Tensor", "softmax.int", "log_softmax.int"),
    *("_softmax.default", "cumsum.default", "unflatten.int", "flatten.using_ints"),
)
"""Operators of one tensor whose second argument is a dimension."""


class SplitGraph:
    """The rewritten graph.

    Args:
        graph: The exported graph: `fixed` placeholders of constants and weights, then the inputs.
        fixed: How many of its placeholders are constants and weights.
        inputs: How each of the other placeholders is made.
        single: Whether there is one user, so that g is 1.
    """

    def __init__(
        self, graph: torch.fx.Graph, fixed: int, inputs: Sequence[SplitInput], *, single: bool
    ) -> None:
        self._single = single
        self.graph = torch.fx.Graph()
        """Placeholders: the fixed ones, `indices`, the tensors of the shared side, those of the own side,
        and int64 (n,): the user of each item."""
        self.indices: list[Tensor] = []
        """Values of the placeholders after the fixed ones: places along the dimensions of weights."""
        places = [node for node in graph.nodes if node.op == "placeholder"]
        self._values: dict[Node, _Value] = {}
        self._fixed: set[Node] = set()
        for node in places[:fixed]:
            copy = self._values[node] = self.graph.placeholder(node.name)
            self._fixed.add(copy)
        self._index_nodes: dict[tuple[int, ...], Node] = {}
        self._last_fixed = list(self.graph.nodes)[-1] if fixed else None
        shared = [self.graph.placeholder(f"shared_{n}") for n in range(_count(one.shared for one in inputs))]
        own = [self.graph.placeholder(f"own_{n}") for n in range(_count(one.own for one in inputs))]
        self._user = self.graph.placeholder("user_of_item")
        self._size: Node | None = None
        for node, made in zip(places[fixed:], inputs, strict=True):
            self._values[node] = self._input(node, made, shared, own)
        for node in graph.nodes:
            if node.op == "output":
                self.graph.output(torch.fx.map_arg(node.args[0], lambda one: self._rows(self._values[one])))
            elif node.op != "placeholder":
                self._values[node] = self._rewritten(node)
        self.graph.eliminate_dead_code()

    # Values

    def _input(self, node: Node, made: SplitInput, shared: Sequence[Node], own: Sequence[Node]) -> _Value:
        ndim = node.meta["val"].ndim
        if made.own is None:
            assert made.shared is not None
            return _Shared(shared[made.shared], ndim)
        if made.shared is None:
            return own[made.own]
        if made.dim is None:
            return self._add(own[made.own], _Shared(shared[made.shared], ndim))
        return _Mixed(shared[made.shared], own[made.own], ndim, made.dim, made.shared_at, made.own_at)

    def _call(self, target: Any, *args: Any, **named: Any) -> Node:
        made = self.graph.call_function(target, args, named)
        inputs = made.all_input_nodes
        if inputs and self._fixed.issuperset(inputs):
            self._fixed.add(made)
        return made

    def _add(self, own: Node, shared: _Shared) -> Node:
        return self._call(_aten.add.Tensor, own, shared.node if self._single else self._rows(shared))

    def _rows(self, value: Any) -> Any:
        """Return a value with a row per item."""
        if isinstance(value, _Shared):
            if self._single:
                sizes = [self._item_count(), *[-1] * (value.ndim - 1)]
                return self._call(_aten.expand.default, value.node, sizes)
            return self._call(_aten.index_select.default, value.node, 0, self._user)
        if isinstance(value, _Mixed):
            parts = [self._rows(_Shared(value.shared, value.ndim)), value.own]
            whole = self._call(_aten.cat.default, parts, value.dim)
            order = (*value.shared_at, *value.own_at)
            if order == tuple(range(len(order))):
                return whole
            back = tuple(sorted(range(len(order)), key=order.__getitem__))
            return self._call(_aten.index_select.default, whole, value.dim, self._index(back))
        return value

    def _index(self, places: tuple[int, ...]) -> Node:
        """Return the placeholder of an index, which is an input like a weight."""
        if places not in self._index_nodes:
            after = next(reversed(self._index_nodes.values()), self._last_fixed)
            first = next(iter(self.graph.nodes))
            at = self.graph.inserting_before(first) if after is None else self.graph.inserting_after(after)
            with at:
                node = self.graph.placeholder(f"index_{len(self.indices)}")
            self._fixed.add(node)
            self._index_nodes[places] = node
            self.indices.append(torch.tensor(places, dtype=torch.int64))
        return self._index_nodes[places]

    def _taken(self, weight: Node, dim: int, places: tuple[int, ...]) -> Node:
        return self._call(_aten.index_select.default, weight, dim, self._index(places))

    # Operators

    def _rewritten(self, node: Node) -> _Value:
        values: Any = self._values.__getitem__
        given: Any = torch.fx.map_arg(node.args, values)
        named: Any = torch.fx.map_arg(node.kwargs, values)
        operator = _name_of(node.target)
        if operator == "sym_size.int" and isinstance(given[0], (_Shared, _Mixed)) and given[1] == 0:
            return self._item_count()
        some = [one for one in _flat((given, named)) if isinstance(one, (_Shared, _Mixed))]
        if some:
            rule = _rule_of(operator)
            found = None if rule is None else rule(self, node, given, named)
            if found is not None:
                return found
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda one: self._rows(self._values[one]))
        return self._call(node.target, *args, **kwargs)

    def _item_count(self) -> Node:
        if self._size is None:
            self._size = self._call(_aten.sym_size.int, self._user, 0)
        return self._size

    def _is_fixed(self, value: object) -> bool:
        return isinstance(value, Node) and value in self._fixed

    def _has_rows(self, node: Node, number: int, ndim: int) -> bool:
        """Whether an argument has a row per item, and so many dimensions."""
        source = node.args[number]
        if not isinstance(source, Node) or not isinstance(self._values[source], Node):
            return False
        is_tensor = isinstance(source.meta.get("val"), Tensor)
        return is_tensor and self._values[source] not in self._fixed and source.meta["val"].ndim == ndim

    def unary(self, node: Node, given: Any, named: Any) -> _Value | None:
        value, *rest = given
        if any(isinstance(one, Node) for one in _flat((rest, named))):
            return None
        if isinstance(value, _Shared):
            return _Shared(self._call(node.target, value.node, *rest, **named), value.ndim)
        return _Mixed(
            self._call(node.target, value.shared, *rest, **named),
            self._call(node.target, value.own, *rest, **named),
            *(value.ndim, value.dim, value.shared_at, value.own_at),
        )

    def binary(self, node: Node, given: Any, named: Any) -> _Value | None:
        one, other = given
        if isinstance(one, _Mixed) or isinstance(other, _Mixed):
            if isinstance(one, _Mixed) and one.is_split_like(other):
                return _Mixed(
                    self._call(node.target, one.shared, other.shared, **named),
                    self._call(node.target, one.own, other.own, **named),
                    *(one.ndim, one.dim, one.shared_at, one.own_at),
                )
            if isinstance(one, _Mixed) and isinstance(other, (int, float)):
                return self.unary(node, given, named)
            return None
        ndim = max(value.ndim for value in given if isinstance(value, _Shared))
        others = [n for n, value in enumerate(given) if not isinstance(value, _Shared)]
        if self._single and others and self._has_rows(node, others[0], ndim):
            parts = [value.node if isinstance(value, _Shared) else value for value in given]
            return self._call(node.target, *parts, **named)
        for number, value in enumerate(given):
            is_row = isinstance(value, _Shared) and value.ndim == ndim
            # A weight of as many dimensions may have a row for each example.
            is_weight = self._is_fixed(value) and _ndim(node, number) < ndim
            if not (is_row or is_weight or isinstance(value, (int, float))):
                return None
        parts = [value.node if isinstance(value, _Shared) else value for value in given]
        return _Shared(self._call(node.target, *parts, **named), ndim)

    def linear(self, node: Node, given: Any, named: Any) -> _Value | None:
        value, weight, *bias = given
        if named or not self._is_fixed(weight) or not all(one is None or self._is_fixed(one) for one in bias):
            return None
        if isinstance(value, _Shared):
            return _Shared(self._call(node.target, value.node, weight, *bias), value.ndim)
        if value.dim != value.ndim - 1:
            return None
        own_weight = self._taken(weight, 1, value.own_at)
        once = self._call(node.target, value.shared, self._taken(weight, 1, value.shared_at))
        if self._single and value.ndim == 2:
            # (1, out) -> (out,): one pass over the items' rows less than a sum.
            once = self._call(_aten.squeeze.dim, once, 0)
            if bias and bias[0] is not None:
                once = self._call(_aten.add.Tensor, once, bias[0])
            return self._call(node.target, value.own, own_weight, once)
        own = self._call(node.target, value.own, own_weight, *bias)
        return self._add(own, _Shared(once, value.ndim))

    def product(self, node: Node, given: Any, named: Any) -> _Value | None:
        value, weight = given
        if named or not isinstance(value, (_Shared, _Mixed)):
            return None
        if isinstance(value, _Shared) and isinstance(weight, _Shared):
            batched = value.ndim == weight.ndim == 3
            return _Shared(self._call(node.target, value.node, weight.node), 3) if batched else None
        if not self._is_fixed(weight) or _ndim(node, 1) != 2:
            return None
        if isinstance(value, _Shared):
            return _Shared(self._call(node.target, value.node, weight), value.ndim)
        if value.dim != value.ndim - 1:
            return None
        own = self._call(node.target, value.own, self._taken(weight, 0, value.own_at))
        once = self._call(node.target, value.shared, self._taken(weight, 0, value.shared_at))
        return self._add(own, _Shared(once, value.ndim))

    def total(self, node: Node, given: Any, named: Any) -> _Value | None:
        value, dims, *rest = given
        if dims is None or named:
            return None
        summed = {dim % value.ndim for dim in dims}
        if 0 in summed or not summed:
            return None
        keeps = bool(rest and rest[0])
        ndim = value.ndim if keeps else value.ndim - len(summed)
        if isinstance(value, _Shared):
            return _Shared(self._call(node.target, value.node, dims, *rest), ndim)
        shared = self._call(node.target, value.shared, dims, *rest)
        own = self._call(node.target, value.own, dims, *rest)
        if value.dim in summed:
            return self._add(own, _Shared(shared, ndim))
        dim = value.dim if keeps else value.dim - sum(one < value.dim for one in summed)
        return _Mixed(shared, own, ndim, dim, value.shared_at, value.own_at)

    def dot(self, node: Node, given: Any, named: Any) -> _Value | None:
        one, other = given
        dim = named.get("dim", -1)
        if isinstance(one, _Shared) and isinstance(other, _Shared) and one.ndim == other.ndim:
            if dim % one.ndim == 0:
                return None
            return _Shared(self._call(node.target, one.node, other.node, **named), one.ndim - 1)
        if not isinstance(one, _Mixed) or not one.is_split_like(other) or dim % one.ndim != one.dim:
            return None
        shared = self._call(node.target, one.shared, other.shared, **named)
        own = self._call(node.target, one.own, other.own, **named)
        return self._add(own, _Shared(shared, one.ndim - 1))

    def along(self, node: Node, given: Any, named: Any) -> _Value | None:
        value, dim = given[0], given[1] if len(given) > 1 else 0
        after = node.meta["val"].ndim
        # unsqueeze counts the dimensions of its result.
        dim %= max(value.ndim, after) if _name_of(node.target) == "unsqueeze.default" else value.ndim
        if isinstance(value, _Shared):
            if dim == 0:
                return None
            return _Shared(self._call(node.target, value.node, *given[1:], **named), after)
        if _name_of(node.target) == "unflatten.int" and dim == value.dim == 1 and value.ndim == 2:
            return self._unflattened(value, node.meta["val"].shape[1:])
        return None

    def view(self, node: Node, given: Any, named: Any) -> _Value | None:
        value, before, inner = given[0], _inner(node.args[0]), _inner(node)
        if named or not inner or before is None or math.prod(before) != math.prod(inner):
            return None  # it does not keep rows apart
        if isinstance(value, _Shared):
            return _Shared(self._call(node.target, value.node, [-1, *inner]), 1 + len(inner))
        return self._unflattened(value, inner) if value.ndim == 2 and value.dim == 1 else None

    def _unflattened(self, value: _Mixed, inner: Sequence[Any]) -> _Value | None:
        """Return (rows, features * width) as (rows, features, width), if features are whole on one side."""
        if len(inner) != 2:
            return None
        width = int(inner[1])
        sides = [_blocks(places, width) for places in (value.shared_at, value.own_at)]
        if sides[0] is None or sides[1] is None:
            return None
        parts = [
            self._call(_aten.view.default, part, [-1, len(blocks), width])
            for part, blocks in zip((value.shared, value.own), (sides[0], sides[1]), strict=True)
        ]
        return _Mixed(parts[0], parts[1], 3, 1, sides[0], sides[1])

    def joined(self, node: Node, given: Any, named: Any) -> _Value | None:
        """Join values next to each other: what is shared, and what is not."""
        parts, dim = given[0], given[1] if len(given) > 1 else 0
        ndim = node.meta["val"].ndim
        dim %= ndim
        if dim == 0 or named or any(self._is_fixed(one) for one in parts):
            return None
        if any(isinstance(one, _Mixed) and one.dim != dim for one in parts):
            return None
        shared: list[Node] = []
        own: list[Node] = []
        shared_at: list[int] = []
        own_at: list[int] = []
        at = 0
        for one, source in zip(parts, node.args[0], strict=True):  # type: ignore[arg-type]
            width = source.meta["val"].shape[dim]
            if not isinstance(width, int):
                return None
            if isinstance(one, _Mixed):
                shared.append(one.shared)
                own.append(one.own)
                shared_at += [at + place for place in one.shared_at]
                own_at += [at + place for place in one.own_at]
            elif isinstance(one, _Shared):
                shared.append(one.node)
                shared_at += range(at, at + width)
            else:
                own.append(one)
                own_at += range(at, at + width)
            at += width
        together = shared[0] if len(shared) == 1 else self._call(_aten.cat.default, shared, dim)
        if not own:
            return _Shared(together, ndim)
        rest = own[0] if len(own) == 1 else self._call(_aten.cat.default, own, dim)
        return _Mixed(together, rest, ndim, dim, tuple(shared_at), tuple(own_at))

    def batched(self, node: Node, given: Any, named: Any) -> _Value | None:
        """Transpose, permute and normalize shared values only, and never their first dimension."""
        value, *rest = given
        if not isinstance(value, _Shared) or named:
            return None
        match _name_of(node.target):
            case "transpose.int":
                ok = all(dim % value.ndim for dim in rest)
            case "permute.default":
                ok = rest[0][0] % value.ndim == 0
            case _:  # layer_norm: over the last dimensions, with weights
                ok = len(rest[0]) < value.ndim and all(
                    not isinstance(one, (_Shared, _Mixed)) for one in _flat(rest)
                )
        return _Shared(self._call(node.target, value.node, *rest), value.ndim) if ok else None


_Rule = Callable[[SplitGraph, Node, Any, Any], _Value | None]
_RULES: Mapping[str, _Rule] = {
    "linear.default": SplitGraph.linear,
    "mm.default": SplitGraph.product,
    "matmul.default": SplitGraph.product,
    "bmm.default": SplitGraph.product,
    "sum.dim_IntList": SplitGraph.total,
    "linalg_vecdot.default": SplitGraph.dot,
    "view.default": SplitGraph.view,
    "reshape.default": SplitGraph.view,
    "cat.default": SplitGraph.joined,
    "transpose.int": SplitGraph.batched,
    "permute.default": SplitGraph.batched,
    "layer_norm.default": SplitGraph.batched,
}
"""Rules by operator; each returns None if it does not apply."""


def _rule_of(operator: str) -> _Rule | None:
    if operator in _UNARY:
        return SplitGraph.unary
    if operator in _BINARY:
        return SplitGraph.binary
    return SplitGraph.along if operator in _ALONG_ONE else _RULES.get(operator)


def _name_of(target: Any) -> str:
    """Return the name of an operator of aten, without its namespace."""
    return str(target).removeprefix("aten.")


def _count(numbers: Any) -> int:
    return 1 + max((one for one in numbers if one is not None), default=-1)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for one in value for leaf in _flat(one)]


def _inner(node: Any) -> list[int] | None:
    """Return the shape of a node without its rows; None if another size varies, too."""
    inner = list(node.meta["val"].shape[1:])
    return inner if all(isinstance(one, int) for one in inner) else None


def _ndim(node: Node, number: int) -> int:
    source = node.args[number]
    assert isinstance(source, Node)
    return int(source.meta["val"].ndim)


def _blocks(places: tuple[int, ...], width: int) -> tuple[int, ...] | None:
    """Return which blocks of a width the places are; None if a block is not whole."""
    blocks = tuple(place // width for place in places[::width])
    whole = tuple(place for block in blocks for place in range(block * width, (block + 1) * width))
    return blocks if whole == places else None
