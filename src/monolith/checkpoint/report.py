"""What a restore did, by name: the answer to "did it load my weights?".

A restore that passes over something and says nothing is how a model quietly starts from
noise. Every part of a checkpoint that restores something returns one of these; together
they are one, to be printed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_SHOWN = 8


def _nothing() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """Names, of variables or of things such as `table item`, and what became of them.

    A name may stand in several places: a table may have loaded "1,000 rows loaded" and
    reset "optimizer state reset", which reads as one line.
    """

    loaded: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> what was loaded, in words; empty where there is no more to say."""
    reset: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> what starts anew or why, in words; empty where there is no more to say."""
    renamed: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> the name in the checkpoint it was loaded from."""
    skipped: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> why it was left alone on purpose."""
    missing: tuple[str, ...] = ()
    """What the checkpoint does not have; it stays as the model made it."""
    unused: tuple[str, ...] = ()
    """What only the checkpoint has."""
    global_step: int | None = None
    """The step to go on from, where this restore had one to say."""

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was loaded."""
        return not self.reset and not self.missing

    def merge(self, *others: RestoreReport) -> RestoreReport:
        """Return one report of all; where one name has two details, both are kept."""
        reports = (self, *others)
        steps = [report.global_step for report in reports if report.global_step is not None]
        return RestoreReport(
            loaded=_joined(report.loaded for report in reports),
            reset=_joined(report.reset for report in reports),
            renamed=_joined(report.renamed for report in reports),
            skipped=_joined(report.skipped for report in reports),
            missing=tuple(dict.fromkeys(name for report in reports for name in report.missing)),
            unused=tuple(dict.fromkeys(name for report in reports for name in report.unused)),
            global_step=steps[-1] if steps else None,
        )

    def describe(self) -> str:
        """Return the report for people, a few lines long: long lists of names are cut short."""
        details = {
            name: ", ".join(
                words or verb
                for verb, words in (("loaded", self.loaded.get(name)), ("reset", self.reset.get(name)))
                if words is not None
            )
            for name in [*self.loaded, *self.reset]
        }
        lines = []
        for verb in ("loaded", "reset"):
            if plain := [name for name, words in details.items() if words == verb]:
                lines.append(f"{verb} {_names(plain)}")
        lines += [f"{name}: {words}" for name, words in details.items() if words not in ("loaded", "reset")]
        for title, names in (
            ("renamed", [f"{name} (was {old})" for name, old in self.renamed.items()]),
            ("left alone", [f"{name} ({why})" if why else name for name, why in self.skipped.items()]),
            ("missing in the checkpoint", self.missing),
            ("unused in the checkpoint", self.unused),
        ):
            if names:
                lines.append(f"{title} {_names(names)}")
        if self.global_step is not None:
            lines.append(f"global step: {self.global_step:,}")
        return "\n".join(lines) or "nothing was restored"


def _joined(details: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    found: dict[str, list[str]] = {}
    for one in details:
        for name, detail in one.items():
            known = found.setdefault(name, [])
            if detail and detail not in known:
                known.append(detail)
    return MappingProxyType({name: ", ".join(known) for name, known in found.items()})


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:_SHOWN])
    rest = len(listed) - _SHOWN
    return f"({len(listed)}): {shown}" + (f", and {rest} more" if rest > 0 else "")
