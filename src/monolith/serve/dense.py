"""The dense half of a servable: an exported graph, and the weights that it is run with.

A graph is a file of `torch.export.save`. To read one, torch unpickles whatever the file says is pickled,
looks operators up by any dotted name, evaluates sizes as expressions and writes the names of inputs into
source code that it runs. So torch never sees the file: its parts are read and checked here, and torch is
given a new archive that contains only the checked parts. A graph is then data.

The compiled dense half is a package of AOTInductor next to the graph. It is machine code for machines like
the one that made it, and takes a third to four fifths of the graph's time, less for fewer rows. It does not
round as the trainer does, and loading it runs the code of its author: so both the export and the server must
ask for it.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency, filesystem
from monolith.errors import CorruptFileError, ExportError, RestoreError
from monolith.serve.manifest import MOST_JSON_BYTES
from monolith.serve.operators import OPERATORS
from monolith.serve.split_graph import SplitGraph, SplitInput

_log = logging.getLogger(__name__)

_MODEL = "models/model.json"
_CONFIG = re.compile(r"data/(weights|constants)/model_\w+_config\.json")
_SAMPLES = "data/sample_inputs/model.pt"
_TENSOR = re.compile(r"data/(weights|constants)/((?:weight|tensor)_\d+)")
_NOTE = re.compile(r"archive_format|archive_version|byteorder|version|\.data/version")
_UNUSED = ".data/serialization_id"
_NOTE_BYTES = 64
MOST_BYTES = 1 << 30
"""Largest size of all parts of a graph together. Weights are not among them: they have their own file."""
_ROOT = "archive"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_ARGUMENTS = re.compile(
    r"as_(none|(tensor|int|float|string|sym_int|bool|sym_bool|sym_float|optional_tensor)s?|nested_tensors"
    r"|(int|float)_lists|scalar_type|memory_format|layout|device|complex|name|expr)"
)
"""Allowed kinds of arguments: no operators, graphs or Python objects."""
_TREES = frozenset(("builtins.tuple", "builtins.list", "builtins.dict"))
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_SYMBOLS = re.compile(
    r"[suz]+\d+|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing"
    r"|Add|Mul|True|False|oo|int_oo|Symbol|Integer|positive|integer"
)
_SQUARE = re.compile(r"Pow\((Symbol\('[suz]+\d+'(?:, \w+=True)*\)), Integer\(2\)\)")
"""A size times itself, as attention has it. Other powers are refused: they may be too large to compute."""
_QUOTED = re.compile(r"'([suz]+\d+)'")
_EXPRESSION = re.compile(r"[\w\s+\-*/%<>=!&|~(),.]*")


def clean_graph(data: bytes, name: str) -> bytes:
    """Return a graph as a new archive that contains only its operators over tensors.

    The source locations of operators are removed: they name folders of the machine that exported the graph.

    Args:
        name: The name of the graph in an error.

    Raises:
        CorruptFileError: The file is not a graph, or contains something that is not allowed; names it.
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
    # Python and torch may find different members in one file, because a ZIP64 archive has two directories.
    # The new archive has a single directory, and each member is stored uncompressed.
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{_ROOT}/{path}"), content)
    return made.getvalue()


def _checked_members(archive: zipfile.ZipFile, name: str) -> dict[str, bytes]:
    """Return the members of an archive that torch may read: path -> content."""
    found: dict[str, bytes] = {}
    if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
        raise CorruptFileError(name, 0, f"its parts have more than {MOST_BYTES} bytes")
    if sum(one.file_size for one in archive.infolist() if one.filename.endswith(".json")) > MOST_JSON_BYTES:
        raise CorruptFileError(name, 0, f"it has more than {MOST_JSON_BYTES} bytes of JSON")
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
                raise CorruptFileError(name, 0, "it has pickled example inputs, which are not read")
            found[inner] = b""
        elif _TENSOR.fullmatch(inner) or (_NOTE.fullmatch(inner) and member.file_size <= _NOTE_BYTES):
            found[inner] = archive.read(member)
        else:
            raise CorruptFileError(name, 0, f"it has the unknown member {inner!r:.80}")
    if _MODEL not in found:
        raise CorruptFileError(name, 0, "it has no program in it")
    return found


def _checked_tensors(config: Any, name: str) -> Any:
    """Return the list of an archive's tensors, after checking that none is pickled."""
    for key, entry in config["config"].items():
        _check_name(key, name)
        if entry["use_pickle"] is not False:
            raise CorruptFileError(name, 0, f"its tensor {key!r} is pickled, which is not read")
        if not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
            raise CorruptFileError(name, 0, f"its tensor {key!r} is a Python object, which is not read")
        _check_parts(entry, name)
    return config


def _checked_program(program: Any, name: str) -> Any:
    """Return a program with only the parts that torch needs to run it."""
    module = program["graph_module"]
    graph = module["graph"]
    for node in graph["nodes"]:
        node["metadata"] = {}  # the source that called it
        if node["target"] not in OPERATORS:
            raise CorruptFileError(
                name,
                0,
                f"it calls {node['target']!r:.120}, which is not an allowed operator. If it only "
                "computes on tensors, add it to monolith/serve/operators.py",
            )
    if graph.get("custom_obj_values") or module.get("treespec_namedtuple_fields"):
        raise CorruptFileError(name, 0, "it has Python objects, which are not read")
    module["metadata"] = {}
    program["guards_code"] = []  # Python code that torch would run; sizes are checked when a graph is called
    for entry in module["module_call_graph"]:
        if (signature := entry["signature"]) is not None:
            for key in ("in_spec", "out_spec"):
                _, tree = json.loads(signature[key])
                _check_tree(tree, name)
    _check_parts(program, name)
    return program


def _check_parts(value: Any, name: str) -> None:
    """Refuse invalid names, argument kinds and sizes, anywhere in some JSON."""
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
            plain = _QUOTED.sub(r"\1", _SQUARE.sub(r"\1", str(inner)))
            if not _EXPRESSION.fullmatch(plain) or not all(map(_SYMBOLS.fullmatch, _SYMBOL.findall(plain))):
                raise CorruptFileError(name, 0, f"a size in it is {inner!r:.80}, which is not read")
        elif key in ("custom_obj", "token") or (key.startswith("as_") and not _ARGUMENTS.fullmatch(key)):
            raise CorruptFileError(name, 0, f"it has an argument of the kind {key!r:.40}, which is not read")


def _check_name(text: Any, name: str) -> None:
    # Names of inputs become source code, with torch.fx: "x=print(1)" would be a default value.
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise CorruptFileError(name, 0, f"it has the invalid name {text!r:.80}")


def _check_tree(tree: Any, name: str) -> None:
    """Refuse arguments in anything but tuples, lists and dicts: torch would import the named class."""
    if tree["type"] is not None and tree["type"] not in _TREES:
        raise CorruptFileError(name, 0, f"its arguments are in {tree['type']!r:.80}, which is not read")
    if "__enum__" in str(tree["context"]):
        raise CorruptFileError(name, 0, "its arguments have Python objects, which are not read")
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
    """Runs an exported graph. Thread-safe: a call uses the weights at its start.

    Shapes: row tensors (n, ...) per layout and floats (n, width) in, float32 (n,) per head out.

    Example: for a model with one layout and one head, `graph([rows], [prices])` returns [predictions].

    Args:
        graph: The bytes of its file.
        weights: Weights by name, in the order of the graph's inputs.
        name: The name of the graph in an error.
        record: Whether it is run without Python between its operators, if that gives the same answers.

    Raises:
        CorruptFileError: The graph contains something that is not allowed.
        RestoreError: This version of torch cannot read it, or the weights do not fit.
    """

    def __init__(
        self, graph: bytes, weights: Mapping[str, Tensor], name: str = "graph.pt2", *, record: bool = True
    ) -> None:
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
                graph_of.erase_node(node)  # we make the inputs, so a check in every call is not needed
        graph_of.eliminate_dead_code()
        places = [node for node in graph_of.nodes if node.op == "placeholder"]
        fixed = len(constants) + len(weights)  # lifted constants come before the inputs of the caller
        self._whole, self._fixed = graph_of, fixed
        self._input_shapes = [tuple(one.meta["val"].shape[1:]) for one in places[fixed:]]
        self._splits: list[SplitDense] = []
        self._changing = concurrency.Lock()  # a new split must not miss a swap; calls do not take it
        self._ahead = _Ahead(graph_of, places[:fixed])
        module = torch.fx.GraphModule(program.graph_module, self._ahead.rest)
        self._run: Callable[..., Any] = module.forward
        self._names = tuple(weights)
        self._shapes = [tuple(one.meta["val"].shape) for one in places[len(constants) : fixed]]
        self._constants = constants
        self._given: dict[str, Tensor] = {}
        self._values: tuple[Any, ...] = ()
        self.swap(weights)
        shapes = [one.meta["val"].shape for one in places[fixed:]]
        self._name = name
        if record:
            self._run = _without_python(module, self._values, lambda rows: _drawn(shapes, rows), name)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current weights; read-only."""
        return dict(self._given)

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from the next call on.

        Raises:
            RestoreError: Names or shapes differ.
        """
        if set(weights) != set(self._names):
            odd = sorted(set(weights) ^ set(self._names))[0]
            raise RestoreError(f"the weights do not fit the graph: {odd!r} is only in one of the two")
        for name, shape in zip(self._names, self._shapes, strict=True):
            if tuple(weights[name].shape) != shape:
                raise RestoreError(
                    f"the weights do not fit the graph: {name!r} has shape {tuple(weights[name].shape)} "
                    f"instead of {shape}"
                )
        fixed = [*self._constants, *(weights[name] for name in self._names)]
        with self._changing, torch.no_grad():
            self._values = self._ahead.values(fixed)
            self._given = {name: weights[name] for name in self._names}
            for split in self._splits:
                split.swap(fixed)

    def __call__(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return predictions, a tensor for each head."""
        found: Sequence[Tensor] = self._run(*self._values, *rows, *floats)
        return found

    def bound(self) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]:
        """Return this graph with the current weights, whatever is swapped later."""
        run, values = self._run, self._values
        return lambda rows, floats: run(*values, *rows, *floats)

    def split(self, inputs: Sequence[SplitInput]) -> SplitDense:
        """Return this graph for users and their items, checked against the whole graph; see `SplitGraph`.

        Args:
            inputs: How each tensor of rows, and then each of floats, is made of those of the two sides.

        Raises:
            ExportError: The two predict something else.
        """
        with self._changing, torch.no_grad():
            fixed = [*self._constants, *self._given.values()]
            try:
                made = SplitDense(self._whole, self._fixed, inputs)
                made.swap(fixed)
                for users in (1, 2):
                    whole = _example(self._input_shapes, inputs, users, items=5)
                    found = made(*whole.sides, np.bincount(whole.user.numpy()))
                    for one, other in zip(found, self._run(*self._values, *whole.rows), strict=True):
                        if not torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True):
                            raise ExportError("it then predicts something else")
            except Exception as cause:  # any error of torch: full rows are answered all the same
                raise ExportError(f"the graph cannot be split by side: {cause}") from cause
            made.record(lambda users, items: _example(self._input_shapes, inputs, users, items), self._name)
            self._splits.append(made)
        return made


class SplitDense:
    """Runs a graph whose inputs are split by side. Thread-safe, and swapped with the whole graph.

    Shapes: tensors (g, ...) of users, (n, ...) of items, and int64 (g,) in, float32 (n,) per head out.
    """

    def __init__(self, graph: torch.fx.Graph, fixed: int, inputs: Sequence[SplitInput]) -> None:
        self._variants = tuple(
            _SplitVariant(SplitGraph(graph, fixed, inputs, single=single), fixed) for single in (False, True)
        )

    def record(self, example: Callable[[int, int], _Example], name: str) -> None:
        """Run without Python between the operators from now on; see `_without_python`.

        Args:
            example: Returns inputs of so many users and items.
        """
        for single, one in zip((False, True), self._variants, strict=True):

            def drawn(rows: int, *, single: bool = single) -> list[Tensor]:
                made = example(1 if single else rows, rows)
                return [*made.sides[0], *made.sides[1], made.user]

            one.run = _without_python(one.module, one.values, drawn, f"{name}, split by side,")

    def swap(self, fixed: Sequence[Tensor]) -> None:
        """Use these constants and weights from the next call on."""
        for one in self._variants:
            one.values = one.ahead.values([*fixed, *one.indices])

    def __call__(
        self, shared: Sequence[Tensor], own: Sequence[Tensor], counts: NDArray[np.int64]
    ) -> Sequence[Tensor]:
        """Return predictions, a tensor for each head.

        Args:
            counts: Items of each user.
        """
        # The number of the user of each item.
        if len(counts) == 1:
            user = torch.zeros(int(counts[0]), dtype=torch.int64)
        else:
            user = torch.repeat_interleave(torch.from_numpy(counts))
        variant = self._variants[len(shared[0]) == 1]
        found: Sequence[Tensor] = variant.run(*variant.values, *shared, *own, user)
        return found


class _SplitVariant:
    """A split graph for one user, or for any number."""

    def __init__(self, split: SplitGraph, fixed: int) -> None:
        places = [node for node in split.graph.nodes if node.op == "placeholder"]
        self.indices = split.indices
        self.ahead = _Ahead(split.graph, places[: fixed + len(split.indices)])
        self.module = torch.fx.GraphModule(torch.nn.Module(), self.ahead.rest)
        self.run: Callable[..., Any] = self.module.forward
        self.values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Example:
    """Random inputs of some users and items, split and whole."""

    sides: tuple[list[Tensor], list[Tensor]]
    rows: list[Tensor]
    user: Tensor


def _example(
    shapes: Sequence[tuple[int, ...]], inputs: Sequence[SplitInput], users: int, items: int
) -> _Example:
    random = torch.Generator().manual_seed(0)
    user = torch.arange(items) * users // items

    def drawn(size: int, shape: Sequence[int]) -> Tensor:
        return torch.rand((size, *shape), generator=random) - 0.5

    sides: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
    rows = []
    for shape, made in zip(shapes, inputs, strict=True):
        parts = []
        for side, number, places, size in (
            (0, made.shared, made.shared_at, users),
            (1, made.own, made.own_at, len(user)),
        ):
            if number is not None:
                inner = list(shape)
                if made.dim is not None:
                    inner[made.dim - 1] = len(places)
                sides[side][number] = drawn(size, inner)
                parts.append((sides[side][number] if side else sides[side][number][user], places))
        if len(parts) == 1:
            rows.append(parts[0][0])
        elif made.dim is None:
            rows.append(parts[0][0] + parts[1][0])
        else:
            whole = torch.empty(len(user), *shape)
            for part, places in parts:
                whole.index_copy_(made.dim, torch.tensor(places), part)
            rows.append(whole)
    shared, own = ([side[number] for number in sorted(side)] for side in sides)
    return _Example((shared, own), rows, user)


_TRACED_ROWS = 3
_CHECKED_ROWS = (1, 2, 7)
_ATEN = torch.ops.aten
_SHAPING = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.expand.default)
"""Operators that take sizes, of which one may be -1."""


def _without_python(
    module: torch.fx.GraphModule, values: Sequence[Any], example: Callable[[int], Sequence[Tensor]], name: str
) -> Callable[..., Any]:
    """Return a function that runs a graph like `module.forward`, without Python between the operators.

    The operators are those of the graph, so the answers are the same to the last bit, and threads do not wait
    for the interpreter meanwhile. A DeepFM of 17 operators takes half of the time for one row
    (docs/decisions/0072). A graph that cannot be recorded, or whose record gives other answers for some
    number of rows, is run as it is.

    Args:
        values: The first arguments, which depend on weights.
        example: Returns the remaining ones, for so many rows.
    """
    recorded = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in recorded.graph.nodes:
        if node.target in _SHAPING and isinstance(sizes := node.args[1], list | tuple):
            # The number of rows would be recorded as a number: it is left to be found out.
            known = [size if isinstance(size, int) else -1 for size in sizes]
            if known.count(-1) == 1:
                node.args = (node.args[0], known)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # about TorchScript, and about numbers that are recorded
            record: Any = torch.jit.trace
            found = record(recorded, (*values, *example(_TRACED_ROWS)), check_trace=False)
        with torch.inference_mode():
            for rows in _CHECKED_ROWS * 2:  # the second time it has been optimized
                given = (*values, *example(rows))
                pairs = zip(module.forward(*given), _listed(found(*given)), strict=True)
                if not all(torch.equal(one, other) for one, other in pairs):
                    raise RestoreError(f"it gives other answers for {rows} rows")
    except Exception as cause:
        _log.info("%s is run by Python, operator by operator: %s", name, str(cause).partition("\n")[0][:200])
        return module.forward
    run = found.forward  # a call of the module would look for hooks each time
    return lambda *given: _listed(run(*given))


def _drawn(shapes: Sequence[Sequence[Any]], rows: int) -> list[Tensor]:
    """Return random tensors of some shapes, of which a size that is not a number is that of rows."""
    draw = torch.Generator().manual_seed(rows)
    known = [[size if isinstance(size, int) else rows for size in shape] for shape in shapes]
    return [torch.rand(shape, generator=draw) - 0.5 for shape in known]


def _listed(found: Any) -> Sequence[Tensor]:
    return [found] if isinstance(found, Tensor) else found


class _Ahead:
    """The operators that depend on weights only, such as transposed and normalised kernels, computed once.

    Args:
        fixed: The inputs that are the same in all calls.
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
        """The remaining graph, whose inputs are the values computed ahead and the inputs of a call."""
        copies = {node: self.rest.placeholder(node.name) for node in self._handed}
        for node in graph.nodes:
            if node not in known:
                copies[node] = self.rest.node_copy(node, copies.__getitem__)

    def values(self, given: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the first inputs of the remaining graph."""
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
        ExportError: It cannot be compiled on this machine; gives the reason.
    """
    from torch._inductor import aoti_compile_and_package

    program = torch.export.load(io.BytesIO(graph))
    rows, floats = example
    program.example_inputs = ((list(weights.values()), list(rows), list(floats)), {})
    try:
        with filesystem.temporary_folder() as folder:
            path = str(folder / "compiled.pt2")
            return Path(aoti_compile_and_package(program, package_path=path)).read_bytes()
    except Exception as cause:
        first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ExportError(
            f"the dense half cannot be compiled: {first:.300}. It needs a C++ compiler; leave --compile out, "
            "and the graph is served."
        ) from cause


class CompiledDense:
    """Runs a compiled package, like `DenseGraph` a graph. Thread-safe; one call runs at a time.

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
        """The current weights; read-only."""
        return dict(zip(self._names, self._weights, strict=True))

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from the next call on.

        Raises:
            RestoreError: Names or shapes differ.
        """
        for name, known in self.weights.items():
            if len(weights) != len(self._names) or name not in weights or weights[name].shape != known.shape:
                raise RestoreError(f"the weights do not fit: {name!r} is missing, or of another shape")
        self._weights = [weights[name] for name in self._names]

    def __call__(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return predictions, a tensor for each head."""
        found: Sequence[Tensor] = self._run(self._weights, list(rows), list(floats))
        return found
