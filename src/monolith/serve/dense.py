"""The dense half of a servable: an exported graph, and the weights that it is run with.

A graph is a file of `torch.export.save`. To read one, torch unpickles whatever the file says is pickled,
looks operators up by any dotted name, evaluates sizes as expressions and writes the names of inputs into
source code that it runs. So torch never sees the file: its parts are read and checked here, and torch is
given a new archive that holds the checked parts and nothing else. A graph is then data.

A dense half that was compiled: a package of AOTInductor beside the graph.

It is machine code for machines like the one that made it, and takes a third to four fifths of the graph's
time, the less the fewer rows. It does not round as the trainer does, and to load it is to run what somebody
compiled: so it is made where it is asked for, and used where it is asked for.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor

from monolith.errors import CorruptFileError, ExportError, RestoreError
from monolith.serve.operators import OPERATORS

_MODEL = "models/model.json"
_CONFIG = re.compile(r"data/(weights|constants)/model_\w+_config\.json")
_SAMPLES = "data/sample_inputs/model.pt"
_TENSOR = re.compile(r"data/(weights|constants)/((?:weight|tensor)_\d+)")
_NOTE = re.compile(r"archive_format|archive_version|byteorder|version|\.data/version")
_UNUSED = ".data/serialization_id"
_NOTE_BYTES = 64
_MOST_BYTES = 1 << 30
"""Of all parts of a graph together. Weights are not among them: they have a file of their own."""
_ROOT = "archive"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_ARGUMENTS = re.compile(
    r"as_(none|(tensor|int|float|string|sym_int|bool|sym_bool|sym_float|optional_tensor)s?|nested_tensors"
    r"|(int|float)_lists|scalar_type|memory_format|layout|device|complex|name|expr)"
)
"""Kinds of arguments. Not among them: operators, graphs and objects of Python."""
_TREES = frozenset(("builtins.tuple", "builtins.list", "builtins.dict"))
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_SYMBOLS = re.compile(
    r"[suz]+\d+|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing"
    r"|True|False|oo|int_oo|Symbol|Integer|positive|integer"
)
_QUOTED = re.compile(r"'([suz]+\d+)'")
_EXPRESSION = re.compile(r"[\w\s+\-*/%<>=!&|~(),.]*")


def clean_graph(data: bytes, name: str) -> bytes:
    """Return a graph as a new archive: its operators over tensors, and nothing else that the file holds.

    What says where in the source an operator was called is left out: it names folders of the machine that
    exported the graph.

    Args:
        name: What to call the graph in an error.

    Raises:
        CorruptFileError: The file is no graph, or has something in it that is not allowed; says what.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = _checked_members(archive, name)
    except (
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        NotImplementedError,
        RecursionError,
    ) as cause:
        if isinstance(cause, CorruptFileError):
            raise
        raise CorruptFileError(name, 0, f"it is no graph of torch.export: {cause}") from cause
    # Python and torch may find different members in one file (its ZIP64 directory is in two places). In the
    # new one there is a single directory, and each member is stored as it is.
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{_ROOT}/{path}"), content)
    return made.getvalue()


def _checked_members(archive: zipfile.ZipFile, name: str) -> dict[str, bytes]:
    """Return what torch may read of an archive: path -> content."""
    found: dict[str, bytes] = {}
    if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
        raise CorruptFileError(name, 0, f"its parts have more than {_MOST_BYTES} bytes")
    for member in archive.infolist():
        _, _, inner = member.filename.partition("/")
        if inner in found:
            raise CorruptFileError(name, 0, f"it has {inner!r} in it twice")
        if inner == _UNUSED:
            continue
        if inner == _MODEL:
            found[inner] = _dump(_checked_program(json.loads(archive.read(member)), name))
        elif _CONFIG.fullmatch(inner):
            found[inner] = _dump(_checked_tensors(json.loads(archive.read(member)), name))
        elif inner == _SAMPLES:
            if member.file_size:
                raise CorruptFileError(name, 0, "it has example inputs, which are pickled, and not read")
            found[inner] = b""
        elif _TENSOR.fullmatch(inner) or (_NOTE.fullmatch(inner) and member.file_size <= _NOTE_BYTES):
            found[inner] = archive.read(member)
        else:
            raise CorruptFileError(name, 0, f"it has {inner!r:.80} in it, which no graph of ours has")
    if _MODEL not in found:
        raise CorruptFileError(name, 0, "it has no program in it")
    return found


def _checked_tensors(config: Any, name: str) -> Any:
    """Return the list of an archive's tensors, none of which is pickled."""
    for key, entry in config["config"].items():
        _check_name(key, name)
        if entry["use_pickle"] is not False:
            raise CorruptFileError(name, 0, f"its tensor {key!r} is pickled, which is not read")
        if not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
            raise CorruptFileError(name, 0, f"its tensor {key!r} is an object of Python, which is not read")
        _check_parts(entry, name)
    return config


def _checked_program(program: Any, name: str) -> Any:
    """Return a program without what torch does not need to run it."""
    module = program["graph_module"]
    graph = module["graph"]
    for node in graph["nodes"]:
        node["metadata"] = {}  # the source that called it
        if node["target"] not in OPERATORS:
            raise CorruptFileError(
                name,
                0,
                f"it calls {node['target']!r:.120}, which is not among the operators that are served. One "
                "that only computes on tensors may be added to monolith/serve/operators.py",
            )
    if graph.get("custom_obj_values") or module.get("treespec_namedtuple_fields"):
        raise CorruptFileError(name, 0, "it has objects of Python in it, which are not read")
    module["metadata"] = {}
    program["guards_code"] = []  # Python that torch would run; sizes are checked where a graph is called
    for entry in module["module_call_graph"]:
        if (signature := entry["signature"]) is not None:
            for key in ("in_spec", "out_spec"):
                _, tree = json.loads(signature[key])
                _check_tree(tree, name)
    _check_parts(program, name)
    return program


def _check_parts(value: Any, name: str) -> None:
    """Refuse names that are none, kinds of arguments and sizes that are not read; anywhere in some JSON."""
    for key, inner in _entries(value):
        if (key == "name" or key.endswith("_name")) and inner is not None:
            _check_name(inner, name)
        elif key.endswith("_values") or key in ("range_constraints", "opset_version"):
            for each in inner:
                _check_name(each, name)
        elif key in ("as_device", "device"):
            if inner["type"] != "cpu":
                raise CorruptFileError(name, 0, f"it computes on {inner['type']!r:.40}; export it on the CPU")
        elif key == "expr_str":
            plain = _QUOTED.sub(r"\1", str(inner))
            if not _EXPRESSION.fullmatch(plain) or not all(map(_SYMBOLS.fullmatch, _SYMBOL.findall(plain))):
                raise CorruptFileError(name, 0, f"a size in it is {inner!r:.80}, which is not read")
        elif key in ("custom_obj", "token") or (key.startswith("as_") and not _ARGUMENTS.fullmatch(key)):
            raise CorruptFileError(name, 0, f"it has an argument of the kind {key!r:.40}, which is not read")


def _check_name(text: Any, name: str) -> None:
    # Names of inputs become source code, with torch.fx: "x=print(1)" would be a default value.
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise CorruptFileError(name, 0, f"it has the name {text!r:.80} in it, which is none")


def _check_tree(tree: Any, name: str) -> None:
    """Refuse arguments in anything but tuples, lists and dicts: torch would import what they name."""
    if tree["type"] is not None and tree["type"] not in _TREES:
        raise CorruptFileError(name, 0, f"its arguments are in {tree['type']!r:.80}, which is not read")
    if "__enum__" in str(tree["context"]):
        raise CorruptFileError(name, 0, "its arguments have objects of Python in them, which are not read")
    for child in tree["children_spec"]:
        _check_tree(child, name)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of all objects in some JSON, with their values."""
    if isinstance(value, dict):
        yield from value.items()
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        yield from _entries(item)


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


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
        clean = clean_graph(graph, name)
        try:
            program = torch.export.load(io.BytesIO(clean))
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


Inputs = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Tensors of rows, and floats."""


def compile_graph(graph: bytes, weights: Mapping[str, Tensor], example: Inputs) -> bytes:
    """Return the package of a graph.

    Args:
        example: Inputs of more than one row.

    Raises:
        ExportError: It cannot be compiled here; says why.
    """
    from torch._inductor import aoti_compile_and_package

    program = torch.export.load(io.BytesIO(graph))
    rows, floats = example
    program.example_inputs = ((list(weights.values()), list(rows), list(floats)), {})
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "compiled.pt2"))
            return Path(aoti_compile_and_package(program, package_path=path)).read_bytes()
    except Exception as cause:
        first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ExportError(
            f"the dense half cannot be compiled: {first:.300}. It needs a C++ compiler; leave --compile out, "
            "and the graph is served."
        ) from cause


class CompiledDense:
    """Runs a compiled package, as `DenseGraph` runs a graph. Thread-safe; calls take turns.

    Raises:
        RestoreError: This machine, or its torch, cannot load it.
    """

    def __init__(self, path: str, weights: Mapping[str, Tensor]) -> None:
        from torch._inductor import aoti_load_package

        try:
            self._run: Any = aoti_load_package(path)
        except Exception as cause:
            raise RestoreError(
                f"{path} cannot be loaded: {cause}. It was compiled for another machine or another torch; "
                "export it here, or serve the graph."
            ) from cause
        self._names = tuple(weights)
        self._weights = list(weights.values())

    @property
    def weights(self) -> dict[str, Tensor]:
        """What it computes with at the moment. Not to be written to."""
        return dict(zip(self._names, self._weights, strict=True))

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these from the next call on.

        Raises:
            RestoreError: Names or shapes are others.
        """
        for name, known in self.weights.items():
            if len(weights) != len(self._names) or name not in weights or weights[name].shape != known.shape:
                raise RestoreError(f"the weights do not fit: {name!r} is missing, or of another shape")
        self._weights = [weights[name] for name in self._names]

    def __call__(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return predictions, a tensor for each head."""
        found: Sequence[Tensor] = self._run(self._weights, list(rows), list(floats))
        return found
