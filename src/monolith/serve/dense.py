"""The dense half of a servable: an exported graph, and the weights that it is run with.

A graph is a file of `torch.export.save`. To read one, torch unpickles whatever the file says is pickled,
looks operators up by any dotted name, and evaluates sizes as expressions. So what may be in it is checked
before torch sees it: no pickles, only operators of torch, sizes made of numbers and symbols. A graph is then
data.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from monolith.errors import CorruptFileError, RestoreError

_MODEL = re.compile(r"models/model\.json")
_CONFIG = re.compile(r"data/(weights|constants)/model_\w+_config\.json")
_SAMPLES = re.compile(r"data/sample_inputs/model\.pt")
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)"
    r"|data/(weights|constants)/(weight|tensor)_\d+"
)
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.\w+(\.\w+)?|_operator\.\w+|torch\.sym_\w+|math\.\w+")
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_SYMBOLS = re.compile(
    r"[suz]+\d+|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing"
    r"|True|False|oo|int_oo|Symbol|Integer|positive|integer"
)
_QUOTED = re.compile(r"'([suz]+\d+)'")
_EXPRESSION = re.compile(r"[\w\s+\-*/%<>=!&|~(),.]*")
_MOST_BYTES = 1 << 30


def check_graph(data: bytes, name: str) -> None:
    """Refuse a graph that has anything in it but operators of torch over tensors.

    Args:
        name: What to call it in an error.

    Raises:
        CorruptFileError: It is no such file, or has something else in it; says what.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_archive(archive, name)
    except (
        zipfile.BadZipFile,
        ValueError,
        KeyError,
        TypeError,
        NotImplementedError,
        RecursionError,
    ) as cause:
        if isinstance(cause, CorruptFileError):
            raise
        raise CorruptFileError(name, 0, f"it is no graph of torch.export: {cause}") from cause


def _check_archive(archive: zipfile.ZipFile, name: str) -> None:
    models = 0
    for member in archive.infolist():
        _, _, inner = member.filename.partition("/")
        if member.file_size > _MOST_BYTES:
            raise CorruptFileError(name, 0, f"{inner} has {member.file_size} bytes")
        if _MODEL.fullmatch(inner):
            models += 1
            _check_program(json.loads(archive.read(member)), name)
        elif _CONFIG.fullmatch(inner):
            entries = json.loads(archive.read(member))["config"]
            if pickled := [each for each, entry in entries.items() if entry["use_pickle"] is not False]:
                raise CorruptFileError(name, 0, f"its tensor {pickled[0]!r} is pickled, which is not read")
        elif _SAMPLES.fullmatch(inner):
            if member.file_size:
                raise CorruptFileError(name, 0, "it has example inputs, which are pickled, and not read")
        elif not _PLAIN.fullmatch(inner):
            raise CorruptFileError(name, 0, f"it has {inner!r} in it, which no graph of ours has")
    if models != 1:
        raise CorruptFileError(name, 0, f"it has {models} programs instead of one")


def _check_program(program: Any, name: str) -> None:
    for key, value in _entries(program):
        if key == "target" and isinstance(value, str) and not _OPERATOR.fullmatch(value):
            raise CorruptFileError(name, 0, f"it calls {value!r}, which is no operator of torch's own")
        if key == "expr_str":
            plain = _QUOTED.sub(r"\1", str(value))
            if not _EXPRESSION.fullmatch(plain) or not all(map(_SYMBOLS.fullmatch, _SYMBOL.findall(plain))):
                raise CorruptFileError(name, 0, f"a size in it is {value!r:.80}, which is not read")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of all objects in some JSON, with their values."""
    if isinstance(value, dict):
        yield from value.items()
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        yield from _entries(item)


class DenseGraph:
    """Runs an exported graph. Thread-safe: a call uses the weights that were there when it began.

    Args:
        graph: The bytes of its file.
        weights: In the order of the graph's inputs.
        name: What to call it in an error.

    Raises:
        CorruptFileError: The graph has something in it that is not read.
        RestoreError: This version of torch cannot read it, or the weights do not fit.
    """

    def __init__(self, graph: bytes, weights: Mapping[str, Tensor], name: str = "graph.pt2") -> None:
        check_graph(graph, name)
        try:
            program = torch.export.load(io.BytesIO(graph))
        except Exception as cause:
            raise RestoreError(
                f"{name}: torch {torch.__version__} cannot read this graph: {cause}. Export it again with "
                "the version that serves it."
            ) from cause
        graph_of = program.graph_module.graph
        constants = [
            program.constants[spec.target]
            for spec in program.graph_signature.input_specs
            if spec.target is not None and spec.target in program.constants
        ]
        for node in reversed(graph_of.nodes):
            if node.op == "call_function" and not node.users and "_assert" in str(node.target):
                graph_of.erase_node(node)  # inputs are made here, and need no look in every call
        graph_of.eliminate_dead_code()
        places = [node for node in graph_of.nodes if node.op == "placeholder"]
        fixed = len(constants) + len(weights)  # lifted constants come before what the user gives
        self._ahead = _Ahead(graph_of, places[:fixed])
        self._run = torch.fx.GraphModule(program.graph_module, self._ahead.rest).forward
        self._names = tuple(weights)
        self._shapes = [tuple(one.meta["val"].shape) for one in places[len(constants) : fixed]]
        self._constants = constants
        self._given: dict[str, Tensor] = {}
        self._values: tuple[Any, ...] = ()
        self.swap(weights)

    @property
    def weights(self) -> dict[str, Tensor]:
        """What it computes with at the moment. Not to be written to."""
        return dict(self._given)

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these from the next call on.

        Raises:
            RestoreError: Names or shapes are others.
        """
        if set(weights) != set(self._names):
            odd = sorted(set(weights) ^ set(self._names))[0]
            raise RestoreError(f"the weights do not fit the graph: {odd!r} is only in one of them")
        for name, shape in zip(self._names, self._shapes, strict=True):
            if tuple(weights[name].shape) != shape:
                raise RestoreError(
                    f"the weights do not fit the graph: {name!r} has shape {tuple(weights[name].shape)} "
                    f"instead of {shape}"
                )
        with torch.no_grad():
            self._values = self._ahead.values([*self._constants, *(weights[name] for name in self._names)])
        self._given = {name: weights[name] for name in self._names}

    def __call__(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return predictions, a tensor for each head."""
        found: Sequence[Tensor] = self._run(*self._values, *rows, *floats)
        return found


class _Ahead:
    """What a graph computes of weights alone, done once for all calls: transposed and normalised kernels.

    Args:
        fixed: The inputs that stay from call to call.
    """

    def __init__(self, graph: torch.fx.Graph, fixed: Sequence[torch.fx.Node]) -> None:
        self._fixed = list(fixed)
        known = set(fixed)
        self._steps: list[torch.fx.Node] = []
        for node in graph.nodes:
            inputs = node.all_input_nodes
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if node.op == "call_function" and inputs and known.issuperset(inputs) and not draws:
                self._steps.append(node)
                known.add(node)
        self._handed = [
            node for node in (*self._fixed, *self._steps) if any(user not in known for user in node.users)
        ]
        self.rest = torch.fx.Graph()
        """The rest of the graph: over the values that are computed ahead, and the other inputs."""
        copies = {node: self.rest.placeholder(node.name) for node in self._handed}
        for node in graph.nodes:
            if node not in known:
                copies[node] = self.rest.node_copy(node, copies.__getitem__)

    def values(self, given: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return what the rest of the graph takes first."""
        found: dict[torch.fx.Node, Any] = dict(zip(self._fixed, given, strict=True))
        for node in self._steps:
            args = torch.fx.map_arg(node.args, found.__getitem__)
            named = torch.fx.map_arg(node.kwargs, found.__getitem__)
            found[node] = node.target(*args, **named)  # type: ignore[operator]
        return tuple(found[node] for node in self._handed)
