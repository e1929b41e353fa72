"""Finding a task by its name: what `monolith train TASK` means by TASK.

    load_task("shop.tasks:Clicks")            a name in a module
    load_task("tasks/clicks.py:Clicks")       a name in a file
    load_task("shop.tasks.Clicks")            the first again, as a registry would write it

It names a `Task` subclass, a `Task`, or a function that returns one. What a constructor or function
takes, or the fields of a task that is a dataclass, are the settings of the task. They are read as
strictly as a config is: by their annotations, and one that is not known is an error.

A run may have configs for its task's sources and tables, such as a `KafkaConfig`. Each is handed to the
setting of the task that has this type; what the settings say of single fields wins.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from monolith.config.fields import FieldInfo, argument_docs, describe_fields, field_docs, field_hints, members
from monolith.config.reading import Reader
from monolith.config.tree import Branch, Leaf, Node, grow, overlay, plant
from monolith.errors import ConfigError, UnknownTaskError
from monolith.observe.stacks import own_frame
from monolith.train.task import Task

_FORMS = "write package.module:Name or path/to/file.py:Name"
_PLAIN = (bool, int, float, str)


def load_task(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    texts: Sequence[str] = (),
    source: str = "settings",
    inputs: Mapping[str, object] | None = None,
    optional: Collection[str] = (),
) -> Task:
    """Return the task of that name, made with these settings.

    Modules of the current folder are found, and those next to a file, as when Python runs a script.

    Args:
        settings: By name, with the values a config file can hold.
        texts: More of them, as "key=value"; the later wins. A dot leads into a nested dataclass.
        source: Where `settings` came from, for messages.
        inputs: Configs for the task's sources and tables, by the name of their group in the run.
        optional: Groups of them that the task need not take.

    Raises:
        UnknownTaskError: There is no such module, file or name, or it cannot be imported. Also a LookupError.
        ConfigError: The name makes no sense, what it names is no task, a setting is not one of its, or no
            setting takes one of the `inputs`.

    Examples:
        >>> from pathlib import Path
        >>> from monolith import load_task
        >>> source = '''
        ... from dataclasses import dataclass
        ... from monolith import ClickLog, DeepFM, Task
        ...
        ... @dataclass(frozen=True)
        ... class Clicks(Task):
        ...     dim: int = 8
        ...     def dataset(self, mode):
        ...         return ClickLog().batches(10, 64)
        ...     def model(self):
        ...         return DeepFM(["user", "item"], dim=self.dim)
        ... '''
        >>> _ = Path("clicks.py").write_text(source)
        >>> load_task("clicks.py:Clicks", {"dim": 16}).dim
        16
    """
    found = _find(name)
    inputs = inputs or {}
    if optional:
        takes = _taken(found)
        inputs = {
            group: given
            for group, given in inputs.items()
            if group not in optional or any(type(given) in members(hint) for hint in takes)
        }
    tree = functools.reduce(overlay, map(_planted, texts), grow(settings or {}, source))
    if isinstance(found, Task):
        return _changed(name, found, tree, inputs)
    if isinstance(found, type) and not issubclass(found, Task):
        raise ConfigError(f"{name} is a class, but not a Task; derive it from monolith.train.Task")
    if not callable(found):
        raise ConfigError(
            f"{name} is a {type(found).__name__}; name a Task, a subclass, or a function that returns one"
        )
    if isinstance(found, type) and inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(f"{name} is an abstract task: it does not define {missing}")
    made = found(**_read(name, tree, _parameters(found), inputs))
    if not isinstance(made, Task):
        raise ConfigError(f"{name} returned a {type(made).__name__} instead of a Task")
    return made


def describe_settings(name: str) -> list[tuple[FieldInfo, str]]:
    """Return the settings that a task takes, in order, each with what the source says of it.

    Raises:
        UnknownTaskError: There is no such task.
    """
    found = _find(name)
    make = type(found) if isinstance(found, Task) else found
    shadow = dataclasses.make_dataclass(
        "Settings",
        [(key, hint, _field(default)) for key, (hint, default) in _parameters(make).items()],
        kw_only=True,
    )
    docs = {**argument_docs(make), **(field_docs(make) if _is_dataclass(make) else {})}
    return [(info, info.doc or docs.get(info.path, "")) for info in describe_fields(shadow)]


# Finding


def _find(name: str) -> Any:
    place, colon, attribute = name.rpartition(":")
    is_file = place.endswith(".py") or "/" in place
    if not colon:
        if name.endswith(".toml"):
            raise ConfigError(f"{name} is a config file and no task: pass it as --config {name}")
        if name.endswith(".py") or "/" in name:
            raise ConfigError(f"{name}: name the task in the file, as in {name}:Clicks")
        if "." not in name:
            raise ConfigError(f"Invalid model name {name}: {_FORMS}")
        place, _, attribute = name.rpartition(".")
    if not place or not attribute:
        raise ConfigError(f"cannot find the task {name!r}: {_FORMS}")
    module = _load_file(place) if is_file else _import(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UnknownTaskError(f"{place} has no {attribute!r}; {_nearest(attribute, module)}")
        found = getattr(found, part)
    return found


MOVED = {"monolith.run.config_task": "monolith.runtime.config_task"}
"""Modules of tasks that run manifests and scripts written by an earlier release name."""


def _import(module: str) -> ModuleType:
    module = MOVED.get(module, module)
    _look_in("")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        if cause.name is None or not f"{module}.".startswith(f"{cause.name}."):
            raise UnknownTaskError(_broken(module, cause)) from cause
        raise UnknownTaskError(
            f"there is no module {cause.name!r} to find a task in; check the name, run from the folder that "
            "has it, or name its file: path/to/file.py:Name"
        ) from cause
    except (Exception, SystemExit) as cause:
        raise UnknownTaskError(_broken(module, cause)) from cause


def _load_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise UnknownTaskError(f"there is no file {path} with a task in it; check the path")
    spec = importlib.util.spec_from_file_location(f"task_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UnknownTaskError(f"{path} is not a Python file; its name should end in .py")
    _look_in(str(file.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and annotations look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as cause:
        sys.modules.pop(spec.name, None)
        raise UnknownTaskError(_broken(path, cause)) from cause
    return module


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _broken(what: str, cause: BaseException) -> str:
    """Say what went wrong while importing, and where: the innermost line of the person's own code."""
    frame = own_frame(cause) or next(reversed(traceback.extract_tb(cause.__traceback__)), None)
    where = "" if frame is None else f" at {frame.filename}:{frame.lineno}"
    if isinstance(cause, SyntaxError):
        where = f" at {cause.filename}:{cause.lineno}"
    return f"importing {what} failed{where}: {type(cause).__name__}: {cause}"


def _nearest(attribute: str, module: ModuleType) -> str:
    """Name the tasks of a module, the most alike first."""
    tasks = [
        name
        for name, value in vars(module).items()
        if isinstance(value, Task)
        or (isinstance(value, type) and issubclass(value, Task) and value is not Task)
    ]
    near = difflib.get_close_matches(attribute, tasks or list(vars(module)), n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"its tasks are: {', '.join(tasks)}" if tasks else "there is no Task in it"


# Settings


def _planted(text: str) -> Node:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"a setting is written key=value, got {text!r}")
    return plant(tuple(key.strip().split(".")), Leaf((value,), repr(text), is_text=True))


def _parameters(make: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the type and default, or `dataclasses.MISSING`, of what a class or a function takes."""
    hints = field_hints(make) if _is_dataclass(make) else _hints(make)
    found: dict[str, tuple[Any, Any]] = {}
    for parameter in inspect.signature(make).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            has_default = parameter.default is not parameter.empty
            default = parameter.default if has_default else dataclasses.MISSING
            found[parameter.name] = (hints.get(parameter.name, _type_of(default)), default)
    if _is_dataclass(make):
        for field in dataclasses.fields(make):
            if field.name in found and field.default_factory is not dataclasses.MISSING:
                found[field.name] = (found[field.name][0], field.default_factory())
    return found


def _taken(found: Any) -> list[Any]:
    """Return the types of the settings of a task, or of what makes one."""
    if isinstance(found, Task):
        return list(field_hints(type(found)).values()) if dataclasses.is_dataclass(found) else []
    return [hint for hint, _ in _parameters(found).values()] if callable(found) else []


def _is_dataclass(make: Any) -> typing.TypeGuard[type]:
    return isinstance(make, type) and dataclasses.is_dataclass(make)


def _hints(make: Any) -> dict[str, Any]:
    function = inspect.getattr_static(make, "__init__") if isinstance(make, type) else make
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as cause:
        raise ConfigError(
            f"cannot read the annotations of {make.__qualname__}: {cause}. Import what they name at run "
            "time, not under TYPE_CHECKING."
        ) from cause
    except TypeError:  # a callable object that is no function
        return {}


def _type_of(default: Any) -> Any:
    """Without an annotation, what a default is says what a setting should be."""
    return type(default) if type(default) in _PLAIN else Any


def _changed(name: str, task: Task, tree: Node, inputs: Mapping[str, object]) -> Task:
    """A task that exists already takes settings if it is a dataclass."""
    keys = [*(tree.children if isinstance(tree, Branch) else ()), *inputs]
    if not keys:
        return task
    if not dataclasses.is_dataclass(task):
        raise ConfigError(
            f"{name} is an instance that takes no settings, got {', '.join(keys)}; make its class a "
            "dataclass, or name a function that returns the task"
        )
    hints = field_hints(type(task))
    fields = {field: (hint, getattr(task, field)) for field, hint in hints.items()}
    return dataclasses.replace(task, **_read(name, tree, fields, inputs))


def _read(
    name: str, tree: Node, takes: Mapping[str, tuple[Any, Any]], inputs: Mapping[str, object]
) -> dict[str, Any]:
    """Return the settings that were given, typed, and those that take one of the inputs."""
    handed = _handed(name, takes, inputs)
    takes = {key: (hint, handed.get(key, default)) for key, (hint, default) in takes.items()}
    shadow = dataclasses.make_dataclass(
        "Settings", [(key, hint, _field(default)) for key, (hint, default) in takes.items()], kw_only=True
    )
    reader = Reader(lambda key: f"give it as --set {key}=..., or in the table [task] of the config file")
    settings = reader.read(shadow, tree, "")
    if reader.problems:
        raise ConfigError(_told(name, [problem.text for problem in reader.problems])) from reader.cause
    given: Iterable[str] = tree.children if isinstance(tree, Branch) else ()
    return {key: getattr(settings, key) for key in dict.fromkeys([*handed, *given])}


def _handed(
    name: str, takes: Mapping[str, tuple[Any, Any]], inputs: Mapping[str, object]
) -> dict[str, object]:
    """Return which setting takes which of the inputs: that of its type; of several, that of its group's name.

    Raises:
        ConfigError: No setting takes one of them, or several do.
    """
    found: dict[str, object] = {}
    problems = []
    for group, given in inputs.items():
        kind = type(given)
        fitting = [key for key, (hint, _) in takes.items() if kind in members(hint)]
        if group in fitting or len(fitting) == 1:
            found[group if group in fitting else fitting[0]] = given
        elif fitting:
            problems.append(
                f"the run has a group {group}, and {' and '.join(fitting)} are both of type {kind.__name__}; "
                f"call the one that takes it {group}"
            )
        else:
            problems.append(
                f"the run has a group {group}, but the task has no setting of type {kind.__name__}; declare "
                f"one, such as `{group}: {kind.__name__} | None = None`, and use it, or remove {group} from "
                "the run"
            )
    if problems:
        raise ConfigError(_told(name, problems))
    return found


def _field(default: Any) -> Any:
    if default is dataclasses.MISSING:
        return dataclasses.field()
    return dataclasses.field(default_factory=lambda: default)


def _told(name: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"cannot make task {name}: {problems[0]}"
    return f"cannot make task {name}:" + "".join(f"\n  - {problem}" for problem in problems)
