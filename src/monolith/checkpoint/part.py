"""The part seam: what is saved and restored together, what a restore may change, and what it reports.

A checkpoint is rows, weights, the position in the data and more, all of one moment. Each part first takes a
snapshot, which must be quick because training waits, and writes it afterwards, which may take its time. The
manifest of the checkpoint has an entry of each part, and returns it on restore.

Nothing here imports torch: commands that only list checkpoints load this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from monolith.checkpoint.dense.custom_restore import CustomRestore

_SHOWN = 8


def _nothing() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """What a restore did, by name of a variable or of a thing such as `table item`.

    A restore that ignores something silently is how a model starts from noise unnoticed. So every part
    returns a report, and the merged report is printed once.

    A name may be in several fields: a table may have loaded "1,000 rows loaded" and reset "optimizer state
    reset", which is printed as one line.
    """

    loaded: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> a description of the loaded state; may be empty."""
    reset: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> what was reset, or why; may be empty."""
    renamed: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> the name in the checkpoint it was loaded from."""
    skipped: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> why it was left alone on purpose."""
    missing: tuple[str, ...] = ()
    """Names that the checkpoint does not have; they stay as the model initialized them."""
    unused: tuple[str, ...] = ()
    """Names that only the checkpoint has."""
    partly: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> which part was loaded, if the model changed; the rest starts fresh."""
    sizes: Mapping[str, str] = field(default_factory=_nothing)
    """Name -> its size as a text, if the model changed and a table of all names is printed."""
    global_step: int | None = None
    """The step to resume from; None if this part does not know it."""

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was loaded."""
        return not self.reset and not self.missing and not self.partly

    def merge(self, *others: RestoreReport) -> RestoreReport:
        """Return one report of all; if a name has two details, it keeps both."""
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
        """Return a table of what a model got from another model's checkpoint: loaded, partly, fresh, left
        out, each with its size."""
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


# A changed model: what of a checkpoint it can use
#
# A model that got a feature, another width or another type is started from a checkpoint of the old one. Rows
# are found by the name of their table and weights by theirs, as in any restore. `Changes` tells which rows
# mean other things now, and which part of a weight is of an input that both models have:
#
#     {"dense.mlp.0.kernel.weight": {"0": [["user", 4], ["item", 4], ["price", 1]]}}
#
# tells that the first axis of that weight has four rows for user, four for item and one for price. A
# checkpoint stores that of its model, so that the range of an input is found by its name.

InputAxes = Mapping[str, Mapping[str, Sequence[Sequence[Any]]]]
"""Variable to axis, as a text, to the names and widths of the inputs along it."""

Span = tuple[int, int, int]
"""A range of an axis: its start in the checkpoint, its start in the model, and its length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """How a model differs from the one of a checkpoint. Plain values: they are sent to parameter servers."""

    fresh: Mapping[str, str] = field(default_factory=dict)
    """Table to why its rows start fresh: the same ids mean other things now."""
    rescaled: tuple[str, ...] = ()
    """Features of numbers that are scaled in another way; the weights on them start fresh."""
    before: InputAxes = field(default_factory=dict)
    """The inputs along the axes of weights, in the checkpoint."""
    now: InputAxes = field(default_factory=dict)
    """The inputs along the axes of weights, in the model."""

    def pieces(
        self, name: str, saved: Sequence[int], wanted: Sequence[int]
    ) -> tuple[list[tuple[Span, ...]], str]:
        """Return the blocks of a variable that are loaded, each as its spans along every axis, and why the
        rest is not.

        No block and no reason means all of it. Along an axis of inputs, inputs are matched by name. Along
        other axes, such as hidden units, the leading part is loaded, but only if the inputs of both models
        are known: otherwise it is not known which axis that is.

        Args:
            saved, wanted: The shapes in the checkpoint and in the model.
        """
        if len(saved) != len(wanted):
            return [], f"it has {len(saved)} axes in the checkpoint and {len(wanted)} in this model"
        before, now = self.before.get(name, {}), self.now.get(name, {})
        if not self.before or not self.now or before.keys() != now.keys():
            if tuple(saved) == tuple(wanted) and not (before and now):
                return [], ""
            return [], f"it has shape {tuple(saved)} in the checkpoint, this model needs {tuple(wanted)}"
        axes: list[list[Span]] = []
        for axis, (old, new) in enumerate(zip(saved, wanted, strict=True)):
            if str(axis) in now:
                axes.append(list(self._named(before[str(axis)], now[str(axis)])))
            else:
                axes.append([(0, 0, min(old, new))])
        whole = tuple(saved) == tuple(wanted) and all(
            sum(size for begin, to, size in spans if begin == to) == size_of_axis
            for spans, size_of_axis in zip(axes, wanted, strict=True)
        )
        return ([] if whole else list(product(*axes))), ""

    def _named(self, before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> Iterator[Span]:
        ranges: dict[str, tuple[int, int]] = {}
        at = 0
        for name, width in before:
            ranges[name] = (at, width)
            at += width
        at = 0
        for name, width in now:
            if name in ranges and name not in self.rescaled:
                begin, size = ranges[name]
                yield begin, at, min(size, width)
            at += width


def covered(blocks: Sequence[tuple[Span, ...]]) -> int:
    """Return how many elements of a variable are loaded."""
    total = 0
    for block in blocks:
        size = 1
        for _, _, length in block:
            size *= length
        total += size
    return total


def aligned(saved: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the pairs of segments of rows that match, by their numbers; None if that is not known.

    A row is a vector, maybe with a bias before it. So if one of the two has one more segment, their last
    segments match.
    """
    if len(saved) == len(wanted):
        return [(at, at) for at in range(len(saved))]
    if {len(saved), len(wanted)} == {1, 2}:
        return [(len(saved) - 1, len(wanted) - 1)]
    return None


def changes_to_json(changes: Changes | None) -> dict[str, Any] | None:
    """Return changes as plain values, for a parameter server or a rank."""
    return None if changes is None else {each.name: getattr(changes, each.name) for each in fields(changes)}


def changes_from_json(plain: Mapping[str, Any] | None) -> Changes | None:
    """Return the changes that `changes_to_json` made plain."""
    return None if plain is None else Changes(**{**plain, "rescaled": tuple(plain["rescaled"])})


# The seam

Entry = dict[str, Any]
"""The entry of a part in a manifest: plain values that JSON can store."""

FEATURES = "features"
"""The key of the feature spec in a manifest."""


class SavedPart(NamedTuple):
    """A part in one checkpoint of a chain."""

    prefix: str
    entry: Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreOptions:
    """Which differences between a checkpoint and the model it is restored into are allowed.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, RestoreOptions, Saver
        >>> prefix = Checkpointer(Saver("run"), [DensePart(torch.nn.Linear(2, 1))]).save(100)
        >>> wider = Checkpointer(Saver("run"), [DensePart(torch.nn.Linear(3, 1))])
        >>> wider.restore(prefix, RestoreOptions(strict=False)).step  # only the bias is restored
        100
    """

    optimizer_state: Literal["keep", "reset", "auto"] = "keep"
    """What happens to optimizer state: "keep" refuses a checkpoint of other optimizers, "reset" starts all
    state from its initial values, "auto" does so if the optimizer changed, and reports it."""
    strict: bool = True
    """Whether a table or variable that the checkpoint does not have is an error."""
    custom: CustomRestore = field(default_factory=CustomRestore)
    """How dense variables that changed their names or shapes find their values."""
    changes: Changes | None = None
    """How the model differs from that of the checkpoint, if that is allowed: the fitting part is loaded, and
    the rest starts fresh. See `Checkpointer.fitting`."""
    model_dir: str | None = None
    """The folder with the markers of one-time instructions."""


class PartSnapshot(Protocol):
    """The state of one part at one step."""

    def write(self, prefix: str, *, full: bool) -> Entry:
        """Write it; return the entry that restoring needs. May be called again after a failure.

        Args:
            full: False writes only the changes since the checkpoint before, if the part supports that.
        """

    def close(self, *, saved: bool) -> None:
        """Release the snapshot. Closing again does nothing."""


class Part(Protocol):
    """One thing that a checkpoint saves. Called from the training thread; its `PartSnapshot` from any."""

    @property
    def name(self) -> str:
        """Its key in the manifest."""

    def snapshot(self, step: int) -> PartSnapshot:
        """Take a snapshot of the state after this step. Training waits, so it must be quick."""

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        """Restore the saved state; a part that writes no increments reads the last of the chain.

        Args:
            chain: A full checkpoint and the increments after it, oldest first. Checkpoints without this part
                are left out, so it may be empty.
        """
