"""Which names of the package a run uses: the definitions that its commands reach, name by name.

    python tools/follow_names.py                           each definition that is used, and by which other
    python tools/follow_names.py monolith.nn.gradients ...  whether a run uses a module or a name, and how

A definition is a function, a class, a method or a constant of a module. It is reached if the body of another
that is reached mentions it: by a name that was imported, as an attribute of a module, through a front door.
Importing alone reaches nothing.

Without types the tool cannot see whose method `x.save()` calls. So a method of a reached class counts as soon
as any reached body mentions an attribute of that name. Three rules narrow or widen this:

- `Table.open()`, where `Table` is a class of the package, mentions `open` of that class and its bases alone.
- A class with a base from elsewhere (`nn.Module`, `Thread`) may be called by that base, so all of its methods
  count, as methods between double underscores do.
- Annotations of arguments and variables count only for fields of classes, which configs are read by.

What only a task of one's own names is not reached.
"""

from __future__ import annotations

import ast
import gc
import sys
import tomllib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from check_imports import PACKAGES, Module, find_origin, is_type_checking, origin_of, plain_name, walk

SOURCE = Path(__file__).parents[1] / "src"
APART = ("bench", "demo", "experiment", "tour")
"""Commands, by their first word, that are no run."""
ENTRANCE = "monolith.cli.main"
"""Every command starts in `main` of this module."""
COMMAND_TABLE = "monolith.cli.commands"
"""Names the module of every command as text."""
BY_TEXT = ("getattr", "hasattr", "attrgetter", "methodcaller")
"""Functions that take the name of an attribute as text."""

Name = tuple[str, str]
"""A module, and what it defines there: "f", "Class", "Class.method", or "" for what importing it executes."""


@dataclass(slots=True)
class Definition:
    """One definition, and what its body mentions."""

    uses: set[Name] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    """Attributes of values whose class is not known."""


@dataclass(slots=True)
class Class:
    """A class, as far as its methods are concerned."""

    methods: dict[str, Name] = field(default_factory=dict)
    bases: list[Name] = field(default_factory=list)
    foreign: bool = False
    """Whether a base is from another package, which may call any method."""


class Package:
    """All definitions of a package.

    Args:
        known: Each module by its name, a lazy front door by its stub.
    """

    def __init__(self, known: Mapping[str, Module]) -> None:
        self.known = known
        self.definitions: dict[Name, Definition] = defaultdict(Definition)
        self.classes: dict[Name, Class] = {}
        readers = [Reader(module, self) for module in known.values()]
        # Each pass over all modules before the next: a body may mention a class of any module, and methods
        # that the class inherits.
        for reader in readers:
            reader.define()
        for reader in readers:
            reader.bind()
        for reader in readers:
            reader.read()

    def find(self, module: str, name: str) -> Name | None:
        """Return the definition that a name of a module stands for; of a module, (it, "")."""
        if f"{module}.{name}" in self.known:
            return f"{module}.{name}", ""
        found = find_origin(module, name, self.known)
        if found is None:
            return None
        return (found.module, found.name) if (found.module, found.name) in self.definitions else None

    def method(self, owner: Name, name: str) -> Name | None:
        """Return the method of a class, or the one that it inherits."""
        found = self.classes.get(owner)
        if found is None:
            return None
        if name in found.methods:
            return found.methods[name]
        inherited = (self.method(base, name) for base in found.bases)
        return next((one for one in inherited if one is not None), None)

    def named(self, dotted: str) -> list[Name]:
        """Return the definitions of a module or a room, or the one of a name.

        Raises:
            LookupError: There is no such module or name.
        """
        if dotted in self.known:
            inside = (dotted, *(name for name in self.known if name.startswith(f"{dotted}.")))
            return [name for name in self.definitions if name[0] in inside and name[1]]
        parent, _, last = dotted.rpartition(".")
        if parent in self.known and (found := self.find(parent, last)) is not None:
            return [found]
        outer, _, owner = parent.rpartition(".")
        if outer in self.known and (of := self.find(outer, owner)) is not None:
            method = self.method(of, last)
            if method is not None:
                return [method]
        raise LookupError(f"there is no {dotted}")

    def reached_from(self, beginnings: Iterable[Name]) -> dict[Name, Name | None]:
        """Return each definition that is reached, with the one that mentions it; None for a beginning."""
        reached: dict[Name, Name | None] = {}
        pending: deque[tuple[Name, Name | None]] = deque((name, None) for name in beginnings)
        mentioned: dict[str, Name] = {}
        waiting: dict[str, list[Name]] = defaultdict(list)
        """Methods of reached classes, by a name that nothing has mentioned so far."""
        while pending:
            name, by = pending.popleft()
            if name in reached:
                continue
            reached[name] = by
            definition = self.definitions[name]
            pending += [(used, name) for used in sorted(definition.uses)]
            if name[1]:  # what importing its module executes, and its class if it is a method
                pending += [((name[0], part), name) for part in ("", name[1].rpartition(".")[0])]
            for attribute in sorted(definition.attributes - mentioned.keys()):
                mentioned[attribute] = name
                pending += [(method, name) for method in waiting.pop(attribute, ())]
            if (found := self.classes.get(name)) is not None:
                for last, method in found.methods.items():
                    if found.foreign or (last.startswith("__") and last.endswith("__")):
                        pending.append((method, name))
                    elif last in mentioned:
                        pending.append((method, mentioned[last]))
                    else:
                        waiting[last].append(method)
        return reached


class Reader:
    """Reads the definitions of one module."""

    def __init__(self, module: Module, package: Package) -> None:
        self._module = module
        self._name = plain_name(module)
        self._package = package
        self._bound: dict[str, Name] = {}
        self._imports: list[ast.AST] = []
        self._bodies: list[tuple[str, list[ast.AST], bool]] = []
        """The name of a definition, all nodes of a part of its body, and whether it is a field of a class."""

    def define(self) -> None:
        """Note which names there are."""
        if self._module.path.suffix == ".pyi":  # a front door, which has only imports
            return
        definitions = self._package.definitions
        definitions[self._name, ""]
        for node in self._module.tree.body:
            if is_type_checking(node):
                continue
            if isinstance(node, ast.ClassDef):
                self._define_class(node)
            for name in defined_by(node):
                definitions[self._name, name]
                self._bound[name] = self._name, name
            if not isinstance(node, ast.ClassDef):
                nodes = walk(node)
                self._bodies += [(name, nodes, False) for name in defined_by(node) or [""]]
        for _, nodes, _ in self._bodies:
            self._imports += [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]

    def _define_class(self, node: ast.ClassDef) -> None:
        found = self._package.classes[self._name, node.name] = Class()
        for part in (*node.bases, *node.keywords, *node.decorator_list):
            self._bodies.append((node.name, walk(part), False))
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{node.name}.{inner.name}"
                found.methods[inner.name] = self._name, name
                self._package.definitions[self._name, name]
                self._bodies.append((name, walk(inner), False))
            else:
                self._bodies.append((node.name, walk(inner), True))

    def read(self) -> None:
        """Note what each definition mentions."""
        for name, nodes, in_class in self._bodies:
            self._mention(self._package.definitions[self._name, name], nodes, in_class=in_class)

    def bind(self) -> None:
        """Note what imported names stand for, wherever in the module the import is; and bases of classes."""
        for node in self._imports:
            for alias in node.names:  # type: ignore[attr-defined]
                local = alias.asname or alias.name
                if isinstance(node, ast.ImportFrom):
                    found = self._package.find(origin_of(node, self._module), alias.name)
                    if found is not None:
                        self._bound[local] = found
                elif alias.name in self._package.known:
                    self._bound[local] = alias.name, ""
        for node in self._module.tree.body:
            if isinstance(node, ast.ClassDef) and (self._name, node.name) in self._package.classes:
                self._find_bases(node)

    def _find_bases(self, node: ast.ClassDef) -> None:
        found = self._package.classes[self._name, node.name]
        for base in node.bases:
            written = ast.unparse(base).partition("[")[0]
            of = self._bound.get(written)
            if of is not None and of in self._package.classes:
                found.bases.append(of)
            elif written not in ("Protocol", "Generic", "ABC", "object"):
                found.foreign = True

    def _mention(self, definition: Definition, nodes: list[ast.AST], *, in_class: bool) -> None:
        """Note what a body mentions, without what it says to type checkers."""
        skipped: set[int] = set()
        for node in nodes:  # a node is before what is inside it
            if id(node) in skipped:
                continue
            match node:
                case ast.FunctionDef(returns=returns) | ast.AsyncFunctionDef(returns=returns):
                    skipped |= ids_in(returns)
                case ast.arg(annotation=annotation):
                    skipped |= ids_in(annotation)
                case ast.AnnAssign(annotation=annotation) if not in_class:
                    skipped |= ids_in(annotation)
                case ast.Name(id=name) if name in self._bound:
                    self._use(definition, self._bound[name])
                case ast.Attribute(value=ast.Name(id=local), attr=attribute) if local in self._bound:
                    self._use_attribute(definition, self._bound[local], attribute)
                case ast.Attribute(attr=attribute):
                    definition.attributes.add(attribute)
                case ast.Call(func=ast.Name(id=function)) if function in BY_TEXT:
                    texts = (one.value for one in node.args if isinstance(one, ast.Constant))
                    definition.attributes |= {text for text in texts if isinstance(text, str)}
                case ast.Constant(value=str(text)) if text.partition(".")[0] in PACKAGES:
                    self._use_text(definition, text)

    def _use(self, definition: Definition, name: Name) -> None:
        if name[1] != "":
            definition.uses.add(name)

    def _use_attribute(self, definition: Definition, of: Name, attribute: str) -> None:
        if of[1] == "":  # a module or a room
            found = self._package.find(of[0], attribute)
            if found is not None:
                definition.uses.add(found)
        elif of in self._package.classes and (method := self._package.method(of, attribute)) is not None:
            definition.uses.add(method)
        else:
            definition.attributes.add(attribute)

    def _use_text(self, definition: Definition, text: str) -> None:
        """A task or a module that is started by its name."""
        module, _, name = text.partition(":")
        if module not in self._package.known or self._name == COMMAND_TABLE:
            return
        if name:
            found = self._package.find(module, name)
            definition.uses |= set() if found is None else {found}
        else:
            definition.uses |= {(module, ""), (module, "main")} & self._package.definitions.keys()


def defined_by(node: ast.AST) -> list[str]:
    """Return the names that a statement at the top of a module or a class defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [inner.id for one in targets for inner in walk(one) if isinstance(inner, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def ids_in(node: ast.AST | None) -> set[int]:
    return set() if node is None else {id(inner) for inner in walk(node)}


def read_packages(*packages: Path) -> Package:
    """Read all modules of the packages at these folders."""
    collects = gc.isenabled()
    gc.disable()  # it would spend half of the time on looking at trees that all stay
    try:
        known = {}
        files = [
            (package, path)
            for package in packages
            for path in [*package.rglob("*.py"), *package.rglob("__init__.pyi")]
        ]
        for package, path in files:
            name = ".".join([package.name, *path.relative_to(package).with_suffix("").parts])
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            module = Module(path, name, "", tree, nodes=(), imports=())
            known[plain_name(module)] = module
        return Package(known)
    finally:
        if collects:
            gc.enable()


def commands_of_runs() -> list[Name]:
    """Return the names that a run starts from: functions of the command table, and values of entry points."""
    from monolith.cli.commands import COMMANDS

    runs = [command for name, command in COMMANDS.items() if name.split()[0] not in APART]
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = [
        tuple(value.split(":"))
        for group, values in project["entry-points"].items()
        if group != "monolith.commands"
        for value in values.values()
    ]
    return [
        (ENTRANCE, "main"),
        *sorted({(command.module, command.function) for command in runs}),
        *((module, name) for module, name in points),
    ]


def is_used(dotted: str, reached: Mapping[Name, object], package: Package) -> bool:
    """Whether a run uses a name, or anything of a module or a room.

    Raises:
        LookupError: There is no such module or name.
    """
    return any(name in reached for name in package.named(dotted))


def main(arguments: list[str]) -> int:
    package = read_packages(*(SOURCE / name for name in PACKAGES))
    reached = package.reached_from(commands_of_runs())
    if not arguments:
        sys.stdout.writelines(
            f"{shown(there)}  <- {shown(here) if here else 'a command'}\n"
            for there, here in sorted(reached.items())
            if there[1]
        )
    for dotted in arguments:
        used = [name for name in package.named(dotted) if name in reached]
        sys.stdout.write(f"{dotted}: {'used by a run' if used else 'library only'}\n")
        at = reached[used[0]] if used else None
        while at is not None:
            sys.stdout.write(f"  <- {shown(at)}\n")
            at = reached[at]
    return 0


def shown(name: Name) -> str:
    return f"{name[0]}.{name[1]}" if name[1] else name[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
