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
    partly: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> which part was loaded, where the model changed; the rest starts fresh."""
    sizes: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> how large it is, in words, where the model changed and a table of all is to be shown."""
    global_step: int | None = None
    """The step to go on from, where this restore had one to say."""

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was loaded."""
        return not self.reset and not self.missing and not self.partly

    def merge(self, *others: RestoreReport) -> RestoreReport:
        """Return one report of all; where one name has two details, both are kept."""
        reports = (self, *others)
        steps = [report.global_step for report in reports if report.global_step is not None]
        return RestoreReport(
            loaded=_joined(report.loaded for report in reports),
            reset=_joined(report.reset for report in reports),
            renamed=_joined(report.renamed for report in reports),
            skipped=_joined(report.skipped for report in reports),
            partly=_joined(report.partly for report in reports),
            sizes=_joined(report.sizes for report in reports),
            missing=tuple(dict.fromkeys(name for report in reports for name in report.missing)),
            unused=tuple(dict.fromkeys(name for report in reports for name in report.unused)),
            global_step=steps[-1] if steps else None,
        )

    def table(self, shown: int = 12) -> str:
        """Return what became of each part of a model that was started from another one's checkpoint, as a
        table of words: loaded, partly, fresh and left out, each with its size."""
        loaded = {name: words for name, words in self.loaded.items() if name not in self.partly}
        fresh = dict.fromkeys(self.missing, "the checkpoint does not have it")
        fresh |= {
            name: why.removeprefix("reset: ") for name, why in self.reset.items() if name not in self.loaded
        }
        groups = {
            "loaded": {
                name: self._with_size(name, self._said(name, words)) for name, words in loaded.items()
            },
            "partly": {name: self._said(name, words) for name, words in self.partly.items()},
            "fresh": {name: self._with_size(name, why) for name, why in fresh.items()},
            "left out": {name: self._with_size(name, "this model does not have it") for name in self.unused},
        }
        groups = {
            kind: {name: words for name, words in named.items() if words} for kind, named in groups.items()
        }
        rows = [
            (kind, name, words)
            for kind, named in groups.items()
            for name, words in (
                list(named.items())
                if len(named) <= shown
                else [*list(named.items())[:shown], (f"and {len(named) - shown} more", "")]
            )
        ]
        width = max((len(name) for _, name, _ in rows), default=0)
        return "\n".join(f"  {kind:<8}  {name:<{width}}  {words}".rstrip() for kind, name, words in rows)

    def _said(self, name: str, words: str) -> str:
        reset = self.reset.get(name, "").removeprefix("reset: ")
        return ", ".join(part for part in (words, reset) if part)

    def _with_size(self, name: str, words: str) -> str:
        return "; ".join(part for part in (self.sizes.get(name, ""), words) if part)

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
            ("loaded in part", [f"{name} ({words})" for name, words in self.partly.items()]),
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
