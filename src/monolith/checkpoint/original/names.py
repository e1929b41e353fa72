"""Names: what the original system calls the tables and variables of a model, and what they are called here.

A name map is a TOML or JSON file with the original name on the left and ours on the right:

    [tables]
    "MonolithHashTable_item_*" = "item"                  # one dump per parameter server, all into one table
    fc_slot_2 = false                                    # left out on purpose

    [variables]
    "tower/dense_*/bias" = "tower.*.bias"
    "tower/dense_*/kernel" = { name = "tower.*.weight", transpose = true }

`*` stands for one part of a name, without `/` and `.`, and `**` for several; the n-th on the left fills the
n-th on the right. A rule without stars beats one with stars; among those the first that fits counts. A rule
for a variable covers the slots that optimizers keep of it (`kernel/Adam`). Exports read the same file from
right to left. A name without a rule means the same name here, where `/` and `.` are one: `tower/0/weight` is
`tower.0.weight`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from monolith import filesystem
from monolith.config.reading import nearest
from monolith.errors import ConfigError

Kind = Literal["tables", "variables"]

_STAR = re.compile(r"\*\*|\*")
_KEYS = ("name", "transpose")


@dataclass(frozen=True, slots=True)
class NameRule:
    """One line of a name map."""

    original: str
    ours: str | None
    """None leaves it out."""
    transpose: bool | None = None
    """Whether a matrix is transposed on the way; None if the map does not tell."""

    def __post_init__(self) -> None:
        if self.ours is not None and _stars(self.ours) != _stars(self.original)[: len(_stars(self.ours))]:
            raise ConfigError(
                f"{self.original!r} = {self.ours!r}: the stars on the right must be on the left, too"
            )

    @property
    def exact(self) -> bool:
        return not _stars(self.original)

    def to_ours(self, original: str) -> str | None:
        """Return our name of an original one; None if the rule does not fit or leaves it out."""
        found = _pattern(self.original).fullmatch(original)
        return None if found is None or self.ours is None else _filled(self.ours, found.groups())

    def fits(self, original: str) -> bool:
        return _pattern(self.original).fullmatch(original) is not None

    def to_original(self, ours: str) -> str | None:
        """Return the original name of one of ours; None if the rule does not fit.

        Raises:
            ConfigError: It fits, and has stars on the left that nothing on the right fills.
        """
        found = None if self.ours is None else _pattern(self.ours).fullmatch(ours)
        if found is None:
            return None
        if _stars(self.original) != _stars(self.ours or ""):
            raise ConfigError(
                f"name map: {self.original!r} = {self.ours!r} does not say what {ours!r} is called in an "
                "export; add a line without a star for it, such as "
                f'"{self.original.replace("*", "0")}" = "{ours}"'
            )
        return _filled(self.original, found.groups())


class MappedName(NamedTuple):
    """What a map says of a name."""

    name: str | None
    """None: it is left out on purpose."""
    transpose: bool | None


@dataclass(frozen=True, slots=True)
class NameMap:
    """The original names of tables and variables, and ours."""

    tables: tuple[NameRule, ...] = ()
    variables: tuple[NameRule, ...] = ()

    @classmethod
    def read(cls, path: str) -> NameMap:
        """Read a map from a TOML or JSON file.

        Raises:
            ConfigError: It is neither, or says something that a map does not have.
        """
        data = filesystem.read_bytes(path)
        try:
            found = json.loads(data) if path.endswith(".json") else tomllib.loads(data.decode())
        except ValueError as cause:  # the errors of both
            raise ConfigError(f"name map {path}: {cause}") from cause
        if not isinstance(found, dict):
            raise ConfigError(f"name map {path}: expected [tables] and [variables]")
        for section in found.keys() - {"tables", "variables"}:
            near = nearest(section, ("tables", "variables"))
            raise ConfigError(
                f"name map {path}: unknown section [{section}]; the nearest known one is [{near}]"
            )
        return cls(**{section: tuple(_rules(path, section, said)) for section, said in found.items()})

    def ours(self, kind: Kind, original: str) -> MappedName | None:
        """Return what the map says of an original name; None if it says nothing."""
        fitting = [rule for rule in self._rules(kind) if rule.fits(original)]
        rule = next((one for one in fitting if one.exact), next(iter(fitting), None))
        return None if rule is None else MappedName(rule.to_ours(original), rule.transpose)

    def original(self, kind: Kind, ours: str) -> MappedName | None:
        """Return what one of our names is called by the original; None if the map does not say.

        Raises:
            ConfigError: The only rule that fits cannot be read from right to left.
        """
        rules = sorted(self._rules(kind), key=lambda rule: not rule.exact)
        for rule in rules:
            if (name := rule.to_original(ours)) is not None:
                return MappedName(name, rule.transpose)
        return None

    def unknown_targets(self, kind: Kind, known: Iterable[str]) -> None:
        """Refuse a rule without stars whose right side is nothing that the model has.

        Raises:
            ConfigError: Says which, and the nearest known name.
        """
        names = list(known)
        for rule in self._rules(kind):
            if rule.ours is not None and not _stars(rule.ours) and rule.ours not in names:
                what = kind.removesuffix("s")
                near = nearest(rule.ours, names)
                hint = f"; the nearest known one is {near!r}" if near else ""
                raise ConfigError(
                    f"name map: {rule.original!r} = {rule.ours!r}: the model has no {what} "
                    f"{rule.ours!r}{hint}"
                )

    def _rules(self, kind: Kind) -> tuple[NameRule, ...]:
        return self.tables if kind == "tables" else self.variables


def _rules(path: str, section: str, said: Any) -> Iterable[NameRule]:
    if not isinstance(said, Mapping):
        raise ConfigError(f"name map {path}: [{section}] must be names and what they are called here")
    for original, value in said.items():
        where = f"name map {path}: [{section}] {original!r}"
        if value is False:
            yield NameRule(original, None)
        elif isinstance(value, str) and value:
            yield NameRule(original, value)
        elif isinstance(value, Mapping) and isinstance(value.get("name"), str):
            for key in value.keys() - set(_KEYS):
                raise ConfigError(
                    f"{where}: unknown key {key!r}; the nearest known one is {nearest(key, _KEYS)!r}"
                )
            transposed = value.get("transpose")
            if transposed is not None and not isinstance(transposed, bool):
                raise ConfigError(f"{where}: transpose must be true or false, got {transposed!r}")
            yield NameRule(original, value["name"], transposed)
        else:
            raise ConfigError(f'{where}: expected a name, false, or {{ name = "...", transpose = true }}')


def _stars(pattern: str) -> list[str]:
    return _STAR.findall(pattern)


def _pattern(text: str) -> re.Pattern[str]:
    parts = _STAR.split(text)
    groups = [r"(.+)" if star == "**" else r"([^/.]+)" for star in _stars(text)] + [""]
    return re.compile("".join(re.escape(part) + group for part, group in zip(parts, groups, strict=True)))


def _filled(text: str, values: tuple[str, ...]) -> str:
    left = iter(values)
    return _STAR.sub(lambda _: next(left), text)


# What optimizers keep


@dataclass(frozen=True, slots=True)
class SlotFamily:
    """What the original calls the state that one of our dense optimizers keeps of a variable."""

    original: str
    """The optimizer's name there; its slots are `<variable>/<this>`, `<variable>/<this>_1` and so on."""
    keys: tuple[str, ...]
    """Ours, in that order."""

    def slot(self, number: int) -> str:
        return self.original if number == 0 else f"{self.original}_{number}"


SLOT_FAMILIES = {
    "torch.Adam": SlotFamily("Adam", ("exp_avg", "exp_avg_sq")),
    "torch.Adagrad": SlotFamily("Adagrad", ("sum",)),
    "torch.SGD": SlotFamily("Momentum", ("momentum_buffer",)),
    "monolith.Adamom": SlotFamily("Adamom", ("m", "v", "c")),
    "monolith.RMSprop": SlotFamily("Rmsprop", ("m", "v")),
}
"""By what a checkpoint calls the optimizer. The rules are the same as TensorFlow's or the original's own."""

_NAMES = "|".join(family.original for family in SLOT_FAMILIES.values())
_OTHERS = "Adadelta|AdamAsync|ExponentialMovingAverage|Ftrl|RMSProp|Shampoo"
_SLOT = re.compile(rf"(?P<of>.+)/(?P<optimizer>{_NAMES}|{_OTHERS})(?:_(?P<n>\d+))?")
_OBJECT_SLOT = re.compile(r"(?P<of>.+)/\.OPTIMIZER_SLOT/[^/]+/(?P<slot>[^/]+)")
_OBJECT_SLOTS = {
    "m": ("Adam", 0),
    "v": ("Adam", 1),
    "accumulator": ("Adagrad", 0),
    "momentum": ("Momentum", 0),
}
_OBJECT_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


class Slot(NamedTuple):
    """A variable that an optimizer keeps of another one."""

    variable: str
    optimizer: str
    number: int


def plain_name(name: str) -> str:
    """Return a name without what object-based checkpoints (`tf.train.Checkpoint`) put after it."""
    return name.removesuffix(_OBJECT_VALUE)


def split_slot(name: str) -> Slot | None:
    """Return which slot a plain name is; None if it is a variable of its own."""
    if found := _OBJECT_SLOT.fullmatch(name):
        optimizer, number = _OBJECT_SLOTS.get(found["slot"], (found["slot"], 0))
        return Slot(found["of"], optimizer, number)
    if found := _SLOT.fullmatch(name):
        return Slot(found["of"], found["optimizer"], int(found["n"] or 0))
    return None
