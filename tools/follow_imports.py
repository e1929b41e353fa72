"""Which modules of the package a run uses: those that its commands reach by imports, late ones included.

    python tools/follow_imports.py                           each module, with the one that imports it
    python tools/follow_imports.py monolith.nn.clipping ...  whether a run uses a module or a name, and how

A front door is passed through by name: who takes `Saver` from `monolith.checkpoint` reaches the module that
defines it, and not all that the door offers. Imports for type checkers do not count. It begins with modules
of all commands but those that measure or show (`APART`). What only a task of one's own names is not reached.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

from check_imports import Module, find_origin, is_type_checking, origin_of, plain_name, read_module, walk

PACKAGE = Path(__file__).parents[1] / "src" / "monolith"
APART = ("bench", "demo", "experiment", "tour")
"""Commands, by their first word, that are no run."""
ENTRANCE = "monolith.cli.main"
"""Every command comes this way."""
COMMAND_TABLE = "monolith.cli.commands"
"""Names the module of every command as text."""


def read_package(package: Path) -> dict[str, Module]:
    """Return each module by its name; a lazy front door by its stub."""
    paths = [*package.rglob("*.py"), *package.rglob("__init__.pyi")]
    return {plain_name(module): module for path in paths if (module := read_module(path, package))}


def commands_of_runs() -> list[str]:
    """Return the modules that runs begin with: those of the command table, less those apart."""
    from monolith.cli.commands import COMMANDS

    modules = {command.module for name, command in COMMANDS.items() if name.split()[0] not in APART}
    return sorted({ENTRANCE, *modules})


def reached_from(beginnings: list[str], known: Mapping[str, Module]) -> dict[str, str]:
    """Return each module that is reached, with the module that imports it; "" for a beginning."""
    reached = dict.fromkeys(beginnings, "")
    pending = list(beginnings)
    while pending:
        here = pending.pop(0)
        for there in sorted(imported_by(known[here], known) - reached.keys()):
            reached[there] = here
            pending.append(there)
    return reached


def imported_by(module: Module, known: Mapping[str, Module]) -> set[str]:
    """Return the modules that one takes something from. Doors only pass on, so they take nothing."""
    if module.path.stem == "__init__":
        return set()
    skipped = {id(inner) for node in module.nodes if is_type_checking(node) for inner in walk(node)}
    nodes = [node for node in module.nodes if id(node) not in skipped]
    modules = dict(modules_named(nodes, module, known))
    found = set(modules.values())
    for node in nodes:
        match node:
            case ast.ImportFrom(names=names):
                found |= {defining(origin_of(node, module), alias.name, known) for alias in names}
            case ast.Attribute(value=ast.Name(id=local), attr=name) if local in modules:
                found.add(defining(modules[local], name, known))
            case ast.Constant(value=str(text)) if text in known and plain_name(module) != COMMAND_TABLE:
                found.add(text)  # `python -m monolith...`
    return found & known.keys()


def modules_named(
    nodes: list[ast.AST], module: Module, known: Mapping[str, Module]
) -> Iterator[tuple[str, str]]:
    """Yield local names that stand for modules of the package, with the module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    yield alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{origin_of(node, module)}.{alias.name}"
                if whole in known:
                    yield alias.asname or alias.name, whole


def defining(module: str, name: str, known: Mapping[str, Module]) -> str:
    """Return the module that defines a name, or the module of that name; "" for what is of elsewhere."""
    if f"{module}.{name}" in known:
        return f"{module}.{name}"
    found = find_origin(module, name, known)
    return found.module if found else ""


def is_used(dotted: str, reached: Collection[str], known: Mapping[str, Module]) -> bool:
    """Whether a run uses a module, a room or a name.

    A module is used if it is reached, a room if one of its modules is, and a class, function or constant if
    its module is and some module that is reached speaks of it.

    Raises:
        LookupError: There is no such module or name.
    """
    if dotted in known:
        return any(module == dotted or module.startswith(f"{dotted}.") for module in reached)
    parent, _, name = dotted.rpartition(".")
    module = defining(parent, name, known) if parent in known else ""
    if not module:
        raise LookupError(f"there is no {dotted}")
    return module in reached and any(name in names_in(known[place]) for place in reached)


@cache
def names_in(module: Module) -> frozenset[str]:
    """Return every name that a module takes from others or speaks of; what it defines is not among them."""
    nodes = module.nodes
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return frozenset(imported | attributes | loaded)


def main(arguments: list[str]) -> int:
    known = read_package(PACKAGE)
    reached = reached_from(commands_of_runs(), known)
    if not arguments:
        sys.stdout.writelines(
            f"{there}  <- {here or 'a command'}\n" for there, here in sorted(reached.items())
        )
    for name in arguments:
        used = is_used(name, reached, known)
        sys.stdout.write(f"{name}: {'used by a run' if used else 'library only'}\n")
        at = name if name in known else defining(*name.rsplit(".", 1), known)
        while at := reached.get(at, ""):
            sys.stdout.write(f"  <- {at}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
