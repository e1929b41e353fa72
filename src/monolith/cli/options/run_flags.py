"""Which of a command's flags are fields of the run's config: `--cluster.num-ps 2`, `--num_ps=2`.

A command has short flags of its own beside them; those keep their names. What neither knows is left
among the command's own, whose parser says what is nearest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

_TRUTHS = ("true", "false", "1", "0", "yes", "no", "on", "off")


def split_run_flags(args: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that are the command's own, and those that `load_run_config` reads.

    Args:
        own: Names of the command's own flags, with underscores.
    """
    names = [_name(word) for word in args]
    if all(not name or name in own for name in names):
        return list(args), []
    takes = _known()
    mine: list[str] = []
    run: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        if word == "--":
            return [*mine, word, *args[position:]], run
        name = _name(word)
        found = None if not name or name in own else _found(name, takes)
        if found is None:
            mine.append(word)
            continue
        run.append(word)
        values = int("=" in word)
        while position < len(args) and _is_value(args[position], found, values):
            run.append(args[position])
            position += 1
            values += 1
    return mine, run


def _name(word: str) -> str:
    """The name of a flag, with underscores; nothing for a word that is none."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _known() -> Mapping[str, str]:
    """Name of each flag -> what follows it: "many" words, "one", or a "truth", which may be left out."""
    from monolith.config import Renamed, describe_fields
    from monolith.run import OLD_NAMES, RunConfig
    from monolith.run.old_names import moved_fields

    takes = {info.path: _takes(info.hint) for info in describe_fields(RunConfig)}
    for old, alias in OLD_NAMES.items():
        takes[old] = takes[alias.path] if isinstance(alias, Renamed) else "many"
    former = (path for path in moved_fields() if "." in path)
    return {**dict.fromkeys(former, "one"), **takes}


def _tables() -> Collection[str]:
    """The groups of a run's config whose keys depend on the model, the features or the task."""
    from monolith.config.fields import field_hints, mapping_member
    from monolith.run import RunConfig

    return [name for name, hint in field_hints(RunConfig).items() if mapping_member(hint)]


def _takes(hint: Any) -> str:
    from monolith.config.fields import is_collection, is_mapping, members

    kinds = members(hint)
    if any(is_collection(kind) or is_mapping(kind) for kind in kinds):
        return "many"
    return "truth" if bool in kinds else "one"


def _found(name: str, takes: Mapping[str, str]) -> str | None:
    """What follows a flag; None for a flag that is not one of the run's."""
    group, dot, leaf = name.rpartition(".")
    positive = f"{group}{dot}{leaf.removeprefix('no_')}"
    if name in takes:
        return takes[name]
    if dot and name.partition(".")[0] in _tables():
        return "one"  # a key of a table, such as model.dim
    if takes.get(positive) == "truth" or takes.get(name.removeprefix("no").lstrip("_")) == "truth":
        return "nothing"
    # A mistyped field of a known group is for the reader of the config, who knows the nearest.
    return "one" if dot and any(path.startswith(f"{name.partition('.')[0]}.") for path in takes) else None


def _is_value(word: str, takes: str, values: int) -> bool:
    """Whether a word belongs to the flag before it, which has so many values already."""
    if word.startswith("-") and not word[1:2].isdigit():
        return False
    if takes == "truth":
        return not values and word.lower() in _TRUTHS
    return takes == "many" or (takes == "one" and not values)
