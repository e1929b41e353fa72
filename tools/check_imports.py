"""Checks, without running them, what the packages import, what they do while being imported, and their names.

Seven rules; the first three have a table each below:

1. A room imports only rooms on the rows above its own (`ROWS`), wherever the
   import stands: at the top, inside a function, under TYPE_CHECKING. The packages
   `monolith_bench` and `monolith_compat` are the last row: each may import all of
   `monolith`, which imports neither.
2. A package from elsewhere is imported at module level only by the rooms that
   own it (`OWNERS`), and by the rooms a model is written with (`PLAIN`) not at
   all, torch and numpy excepted.
3. Importing defines names and does nothing else: a call at module level must be
   to something known to have no effect (`PURE_CALLS`, `PURE_DECORATORS`).
4. A public name exists once: no two public classes, and no two things that front
   doors offer (`__init__.py` or its stub), are called the same.
5. No ambient state: no ContextVar, no thread-local that no object owns, no
   `global`, and nothing at module level that functions of the module change.
6. A package that coordinates processes (`COORDINATING`) takes threads, locks, queues and
   clocks from `monolith.concurrency`, so that a simulation can replace them.
7. So it does with gRPC, which it takes from `monolith.wire.grpc_ports` (`SEAMS`).

Prints `path:line: message` for each finding and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROWS = (
    {"errors", "front_door", "concurrency"},
    {"observe"},
    {"config", "wire", "filesystem"},
    {"native"},
    {"cuda"},
    {"tensors"},
    {"table"},
    {"feature"},
    {"nn"},
    {"data"},
    {"cluster"},
    {"store"},
    {"model"},
    {"checkpoint"},
    {"sync"},
    {"train"},
    {"serve"},
    {"ui"},
    {"runtime"},
    {"testing"},
    {"cli"},
    {"monolith_bench", "monolith_compat"},
)
STRANGERS = {("serve", "train")}
"""Pairs the rows would allow: a server must not know the trainer."""

AMBIENT = "concurrency"
"""The one room with ambient state, on which simulated machine a thread runs: docs/decisions/0064."""

COORDINATING = {
    "checkpoint",
    "cluster",
    "data",
    "model",
    "observe",
    "runtime",
    "serve",
    "store",
    "sync",
    "train",
    "wire",
}
"""Rooms that run in a simulation."""
REAL_CONCURRENCY = {
    "threading": "Thread Timer Lock RLock Condition Event Semaphore BoundedSemaphore Barrier current_thread",
    "time": "monotonic time sleep",
    "queue": "Queue SimpleQueue LifoQueue PriorityQueue Empty Full",
    "concurrent.futures": "Future ThreadPoolExecutor wait as_completed",
    "secrets": "token_hex",
    "uuid": "uuid1 uuid4",
}
"""Names of the standard library that coordinating rooms take from `monolith.concurrency`."""
REAL_ONLY = {
    "cluster.launch": "starts real processes and reads their signals",
    "cluster.ray_discovery": "runs in an actor of Ray",
    "observe.stacks": "looks at the threads of the interpreter",
    "train.hooks.feature_dump": "names files of one process",
    "train.hooks.summaries": "names a report of one process",
}
"""Modules of coordinating rooms that only run in a real process, with the reason."""
SEAMS = {"grpc": "wire.grpc_ports"}
"""Packages that coordinating rooms take from one module, which returns a simulated one in a simulation."""

ROOT = "the package itself"
"""The room of `monolith/__init__.py`: above every row, so it imports no room but `front_door`."""

PACKAGES = ("monolith", "monolith_bench", "monolith_compat")
"""The packages of this repository; all but the first are one room each."""

EVERYWHERE = {*PACKAGES, "torch", "numpy"}
PLAIN = {ROOT, "cuda", "tensors", "feature", "table", "nn", "model"}
OWNERS = {
    "confluent_kafka": {"data"},
    "fsspec": {"filesystem"},
    "google": {"wire", "checkpoint", "cluster", "train"},
    "httpx": {"cluster"},
    "kazoo": {"cluster"},
    "matplotlib": {"monolith_bench"},
    "mpi4py": {"monolith_compat"},
    "msgspec": {"config", "wire"},
    "prometheus_client": {"observe"},
    "pyarrow": {"data", "store", "sync"},
    "ray": {"cluster"},
    "rich": {"observe", "monolith_bench", "cli"},
    "safetensors": {"checkpoint"},
    "tensorboard": {"observe"},
    "tyro": {"config", "cli"},
    "uvicorn": {"serve"},
}

KERNELS = {"triton": "monolith.nn.layers.jagged_kernels"}
"""Packages of a CUDA build of torch, and the module that is written with one and imported when it is used."""

PURE_CALLS = """
    TypeVar ParamSpec TypeVarTuple ContextVar NewType NamedTuple namedtuple TypedDict Enum auto field cast
    Lock property bool bytes dict enumerate float frozenset int len list max min object
    range set sorted str sum tuple type vars zip
    items keys values join split strip format encode removeprefix removesuffix
    Decimal Fraction MappingProxyType Path PurePath PurePosixPath Struct
    attrgetter itemgetter methodcaller partial timedelta constexpr open_when_asked module_when_used
    _ThisThread re.compile logging.getLogger logging.makeLogRecord textwrap.dedent np.dtype np.finfo np.iinfo
    np.float32 np.float64 np.int32 np.int64 np.uint32 np.uint64 torch.finfo torch.iinfo
"""
"""Names that may be called while importing: plain ones match any prefix, dotted ones only as written."""

PURE_DECORATORS = """
    dataclass dataclass_transform property setter getter deleter cached_property staticmethod classmethod
    abstractmethod overload override final runtime_checkable unique total_ordering wraps deprecated
    cache lru_cache contextmanager asynccontextmanager no_grad inference_mode once_differentiable jit
"""


MUTATORS = """
    append appendleft extend insert add update setdefault pop popleft popitem remove discard clear
    sort reverse
"""
"""Methods that change a container."""

ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True, eq=False)  # to hash all of its nodes would take long
class Module:
    """One file of the package, parsed, with the room it stands in."""

    path: Path
    name: str
    room: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """All of the tree: to walk through it again for every rule would take most of the time."""
    imports: tuple[ast.AST, ...]
    """Those of the nodes that import."""

    def finding(self, node: ast.AST, message: str) -> Finding:
        return Finding(self.path, getattr(node, "lineno", 1), message)


def check(*packages: Path) -> list[Finding]:
    """Return all findings in the packages at these folders, in order."""
    modules = [
        read_module(path, package)
        for package in packages
        for path in sorted([*package.rglob("*.py"), *package.rglob("__init__.pyi")])
    ]
    frozen = {name for module in modules for name in frozen_classes(module)}
    findings = [
        finding
        for module in modules
        for found in (
            check_direction(module),
            check_packages(module),
            check_effects(module, frozen),
            check_ambient_state(module),
            check_concurrency(module),
        )
        for finding in found
    ]
    return sorted([*findings, *check_names(modules)])


def read_module(path: Path, package: Path) -> Module:
    parts = path.relative_to(package).with_suffix("").parts
    room = {"__init__": ROOT, "__main__": "cli"}.get(parts[0], parts[0])
    if package.name in PACKAGES[1:]:
        room = package.name
    name = ".".join([package.name, *parts])
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    nodes = tuple(walk(tree))
    imports = tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    return Module(path, name, room, tree, nodes, imports)


def walk(tree: ast.AST) -> list[ast.AST]:
    """Return what `ast.walk` yields, in a third of the time; less marks such as Load, which hold nothing."""
    found = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                found.append(value)
    return found


# 1. Direction


def check_direction(module: Module) -> Iterator[Finding]:
    row = row_of(module.room)
    if module.room == ROOT and module.path.suffix == ".pyi":
        return  # the list of public names, of all rooms; each is imported when it is first used
    if row is None:
        yield module.finding(module.tree, f"{module.room!r} is not a room of ROWS; give it a row")
        return
    for node in module.imports:
        allowed = {"front_door"} if module.room == ROOT else {module.room}
        for room in sorted(rooms_imported(node, module) - allowed):
            target = row_of(room)
            if target is None:
                yield module.finding(node, f"imports {room!r}, which is not a room of ROWS")
            elif target >= row:
                where = "on the same row as" if target == row else "below"
                yield module.finding(node, f"{module.room} imports {room}, which is {where} it")
            elif (module.room, room) in STRANGERS:
                yield module.finding(node, f"{module.room} and {room} do not know each other")


def row_of(room: str) -> int | None:
    if room == ROOT:
        return -1
    return next((row for row, rooms in enumerate(ROWS) if room in rooms), None)


def rooms_imported(node: ast.AST, module: Module) -> set[str]:
    names = [name.split(".") for name in names_imported(node, module)]
    inside = {name[1] for name in names if name[0] == PACKAGES[0] and len(name) > 1}
    return inside | {name[0] for name in names if name[0] in PACKAGES[1:]}


def names_imported(node: ast.AST, module: Module) -> list[str]:
    """Return the absolute dotted names that an import statement mentions; none for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    origin = origin_of(node, module)
    if origin != PACKAGES[0]:
        return [origin]
    # `from monolith import table` names a room; `from monolith import __version__` does not.
    return [f"{origin}.{alias.name}" for alias in node.names if not alias.name.startswith("__")]


def origin_of(node: ast.ImportFrom, module: Module) -> str:
    """Return the absolute name of the module that `from ... import` reads."""
    origin = node.module or ""
    if node.level:
        origin = ".".join([*module.name.split(".")[: -node.level], *([origin] if origin else [])])
    return origin


# 2. Packages from elsewhere


def check_packages(module: Module) -> Iterator[Finding]:
    at_top = set(run_on_import(module.tree))
    typing_only = {inner for node in at_top if is_type_checking(node) for inner in walk(node)}
    for node in module.imports:
        if node in typing_only:
            continue
        for package in sorted({name.split(".")[0] for name in names_imported(node, module)}):
            if package in EVERYWHERE or package in sys.stdlib_module_names:
                continue
            if KERNELS.get(package) == module.name:
                continue
            if module.room in PLAIN:
                yield module.finding(node, f"{module.room} imports {package}, but needs only torch and numpy")
            elif node in at_top and module.room not in OWNERS.get(package, set()):
                yield module.finding(node, f"imports {package} at module level, which {owners_of(package)}")


def owners_of(package: str) -> str:
    rooms = OWNERS.get(package)
    return f"only {' and '.join(sorted(rooms))} may do" if rooms else "no room owns (see OWNERS)"


# 3. Nothing happens on import


def check_effects(module: Module, frozen: set[str]) -> Iterator[Finding]:
    if module.name.endswith("_pb2"):
        return  # written by protoc: it makes its messages known to protobuf, which is what it is for
    pure_calls = frozen | set(PURE_CALLS.split())
    pure_decorators = set(PURE_DECORATORS.split())
    for node in run_on_import(module.tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr() | ast.For() | ast.While() | ast.With() | ast.Match() | ast.Delete():
                yield module.finding(node, f"runs on import: `{headline(node)}`")
            case ast.If() if is_main_guard(node):
                if module.room not in ("cli", "monolith_bench"):
                    yield module.finding(node, "only cli and monolith_bench have a `__main__` to run")
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
                    yield module.finding(node, f"changes another object on import: `{headline(node)}`")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                for decorator in node.decorator_list:
                    name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
                    if name.split(".")[-1] not in pure_decorators:
                        yield module.finding(decorator, f"decorator runs on import: `@{name}`")
            case _:
                pass
        for part in expressions_of(node):
            yield from check_expression(module, part, pure_calls)


def check_expression(module: Module, expression: ast.expr, pure_calls: set[str]) -> Iterator[Finding]:
    for node in walk_evaluated(expression):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if pure_calls.isdisjoint({name, name.split(".")[-1]}):
                yield module.finding(node, f"calls on import: `{name}(...)`")
        elif isinstance(node, ast.Attribute) and dotted(node) == "os.environ":
            yield module.finding(node, "reads the environment on import")


def run_on_import(tree: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """Yield every statement that importing executes: not the bodies of functions, but those of classes."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if is_main_guard(node) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                pending.append(child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                pending.extend(child.body)


def expressions_of(node: ast.stmt) -> list[ast.expr]:
    """Return what a statement evaluates itself, less what the rules above have judged already."""
    match node:
        case ast.Assign(value=value) | ast.AugAssign(value=value):
            return [value]
        case ast.AnnAssign(value=value):
            return [value] if value else []
        case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
            return [*args.defaults, *(default for default in args.kw_defaults if default)]
        case ast.ClassDef(bases=bases, keywords=keywords):
            return [*bases, *(keyword.value for keyword in keywords)]
        case ast.If(test=test) | ast.Assert(test=test):
            return [test]
        case _:
            return []


def walk_evaluated(expression: ast.expr) -> Iterator[ast.AST]:
    """Like `ast.walk`, but stays outside of lambdas: their bodies run later."""
    pending: list[ast.AST] = [expression]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def frozen_classes(module: Module) -> Iterator[str]:
    """Yield the names of frozen dataclasses and enums: values, which one may build at module level."""
    for node in module.nodes:
        if isinstance(node, ast.ClassDef) and (
            any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
            or any(dotted(base).endswith("Enum") for base in node.bases)
        ):
            yield node.name


# 4. A public name exists once


@dataclass(frozen=True, slots=True, order=True)
class Definition:
    """Where something public is defined: a name of a module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def check_names(modules: list[Module]) -> Iterator[Finding]:
    by_stub_last = sorted(modules, key=lambda module: (module.path.stem == "__init__", module.path.suffix))
    known = {plain_name(module): module for module in by_stub_last}  # what a lazy door offers is in its stub
    public: dict[str, dict[Definition, Finding]] = defaultdict(dict)
    for module in by_stub_last:
        for name, definition, node in public_names(module, known):
            public[name].setdefault(definition, module.finding(node, ""))
    for name, found in sorted(public.items()):
        first = min(found)
        for definition in sorted(found.keys() - {first}):
            where = found[definition]
            message = f"the public name {name} exists twice: {definition} and {first}"
            yield Finding(where.path, where.line, message)


def public_names(module: Module, known: dict[str, Module]) -> Iterator[tuple[str, Definition, ast.AST]]:
    """Yield the public classes of a module and, if it is a front door, what it offers, with their origin."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, Definition(plain_name(module), node.name), node
        elif isinstance(node, ast.ImportFrom) and module.path.stem == "__init__":
            for alias in node.names:
                name = alias.asname or alias.name
                origin = find_origin(origin_of(node, module), alias.name, known)
                if origin is not None and not name.startswith("_"):
                    yield name, origin, node


def find_origin(module: str, name: str, known: Mapping[str, Module]) -> Definition | None:
    """Follow imports to the module of the package that defines a name; None if it is a module."""
    if f"{module}.{name}" in known:
        return None
    while (found := known.get(module)) is not None:
        step = next((step for step in imports_from(found) if step[0] == name), None)
        if step is None:
            return Definition(module, name)
        _, module, name = step
    return None


def imports_from(module: Module) -> Iterator[tuple[str, str, str]]:
    """Yield what a module imports by name at its top: the name it has here, its module, its name there."""
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, origin_of(node, module), alias.name


def plain_name(module: Module) -> str:
    return module.name.removesuffix(".__init__")


# 5. No ambient state


def check_ambient_state(module: Module) -> Iterator[Finding]:
    if module.room == AMBIENT:
        return
    owned = {
        id(value) for node in module.nodes if isinstance(node, ASSIGNMENTS) for value in given_to_self(node)
    }
    imported = {here for here, *there in imports_from(module) if there == ["threading", "local"]}
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield module.finding(node, f"ambient state: `global {', '.join(node.names)}`")
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "ContextVar":
            yield module.finding(node, "ambient state: a ContextVar; what varies is an argument")
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func) in {"threading.local", *imported}
            and id(node) not in owned
        ):
            yield module.finding(node, "ambient state: a thread-local that no object owns")
    names = assigned_names(module.tree.body)
    for function in outermost_functions(module.tree):
        for node, name in changes(function, names):
            yield module.finding(node, f"ambient state: `{headline(node)}` changes {name} of the module")


# 6 and 7. Threads and clocks come from monolith.concurrency, gRPC from monolith.wire.grpc_ports


def check_concurrency(module: Module) -> Iterator[Finding]:
    within = plain_name(module).removeprefix("monolith.")
    real_only = any(within == one or within.startswith(f"{one}.") for one in REAL_ONLY)
    if module.room not in COORDINATING or real_only:
        return
    for node in module.imports:
        for package in {name.split(".")[0] for name in names_imported(node, module)} & SEAMS.keys():
            if within != SEAMS[package]:
                yield module.finding(
                    node, f"`import {package}` cannot be simulated; use monolith.{SEAMS[package]}"
                )
    real = {f"{origin}.{name}" for origin, names in REAL_CONCURRENCY.items() for name in names.split()}
    imported = [
        (node, f"{node.module}.{alias.name}")
        for node in module.imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    used = [(node, dotted(node)) for node in module.nodes if isinstance(node, ast.Attribute)]
    for node, name in (*imported, *used):
        if name in real:
            last = name.split(".")[-1]
            yield module.finding(node, f"`{name}` cannot be simulated; use monolith.concurrency.{last}")


def given_to_self(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    """Return the value of `self.x = value`: an object owns it, so it lives and goes with the object."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    owns = any(isinstance(target, ast.Attribute) and dotted(target.value) == "self" for target in targets)
    return [node.value] if owns and node.value is not None else []


def assigned_names(body: list[ast.stmt]) -> set[str]:
    targets = [
        target
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def outermost_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in run_on_import(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def changes(function: ast.AST, names: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Yield what a function does to objects of the module by these names, less those it has itself."""
    inside = walk(function)
    used = [node for node in inside if isinstance(node, ast.Name)]
    own = {node.arg for node in inside if isinstance(node, ast.arg)}
    own |= {node.id for node in used if isinstance(node.ctx, ast.Store)}
    names = (names - own) & {node.id for node in used}
    if not names:
        return
    mutators = MUTATORS.split()
    for node in inside:
        changed: list[ast.expr] = []
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                changed = [part for target in targets for part in walk(target) if is_place(part)]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) if is_place(target):
                changed = [target]
            case ast.Call(func=ast.Attribute(value=value, attr=attribute)) if attribute in mutators:
                changed = [value]
        for name in sorted({root_of(target) for target in changed} & names):
            yield node, name


def is_place(node: ast.AST) -> bool:
    """Whether this is part of another object: `x[i]` or `x.y`, to be assigned or deleted."""
    return isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load)


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).split(".")[-1] == "TYPE_CHECKING"


def is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
        case _:
            return ast.unparse(node)


def headline(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def main(arguments: list[str]) -> int:
    source = Path(__file__).parents[1] / "src"
    findings = check(*map(Path, arguments) if arguments else (source / name for name in PACKAGES))
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
