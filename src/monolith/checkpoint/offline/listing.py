"""The checkpoints of a folder: which there are, why each is still there, and whether it is intact.

    latest      a run resumes from it
    listed      a run may roll back to it
    best        never deleted as long as no later one is better, by the file `best_checkpoint`
    exempt      never deleted, because `monolith_checkpoint` names it
    needed      not listed, but a checkpoint that stays continues it
    released    deleted by the next save
    preserved   none of these: it stays

A folder may be listed while a run writes to it; files that it deletes meanwhile are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from monolith import filesystem
from monolith.checkpoint.folder.manifest import Link, read_manifest
from monolith.checkpoint.folder.retention import exempt_paths
from monolith.checkpoint.folder.saver import MANIFEST, checkpoint_exists, is_in_folder
from monolith.checkpoint.folder.state_files import (
    BEST,
    BEST_FILE,
    LATEST,
    Journal,
    SaveNames,
    absolute_path,
    load_monolith_checkpoint,
    read_best,
    read_checkpoint_state,
    read_journal,
)
from monolith.checkpoint.offline.reading import Damage, check_files, complete_names, size_of
from monolith.errors import CorruptFileError, FileMissingError, FilesystemError, RestoreError

_BEGUN = re.compile(r"(.+)\.(assets|dense-\d{5}-of-\d{5}\.safetensors)", re.DOTALL)
"""Files that only a checkpoint has; without a manifest it was started and never completed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One checkpoint of a folder."""

    prefix: str
    step: int
    saved_at: float | None
    """Unix seconds; None if unknown."""
    kind: str
    """"full" or "incremental"; "unfinished" without a manifest; "gone" if it is listed and not there;
    "damaged" if its manifest is."""
    chain: tuple[str, ...]
    """Prefixes of its chain, the full one first, its own last; shorter if the chain is broken."""
    bytes: int
    """Bytes of its own files."""
    rows: Mapping[str, int]
    """By table."""
    marks: tuple[str, ...]
    """Why it is there, in the words of the table above."""
    problem: str | None
    """What is wrong with it or with one that it needs; None if nothing is."""

    @property
    def name(self) -> str:
        return filesystem.base_name(self.prefix)


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints of a folder, oldest first."""

    model_dir: str
    checkpoints: tuple[Listed, ...]
    problems: tuple[str, ...]
    """Problems of the state files."""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged. What is unfinished is no damage: a run was cut short, or is at it."""
        return not self.problems and all(one.problem is None for one in self.checkpoints)


def list_checkpoints(model_dir: str) -> Listing:
    """Return the checkpoints of a folder, and of other folders that its state file lists.

    Only the headers of files are read; see `read_contents` for the rest.

    Raises:
        FileMissingError: There is no such folder.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, Saver, list_checkpoints
        >>> prefix = Checkpointer(Saver("run"), [DensePart(torch.nn.Linear(2, 1))]).save(100)
        >>> [(one.step, one.name) for one in list_checkpoints("run").checkpoints]
        [(100, 'model.ckpt-100')]
    """
    folder = absolute_path(model_dir)
    if not filesystem.is_folder(folder):
        raise FileMissingError(f"there is no folder {model_dir!r}, so there are no checkpoints")
    return _Folder(folder).listing()


def named_checkpoint(model_dir: str, name: str) -> str:
    """Return the prefix of the checkpoint that an operator names, listed or not, if it exists and is intact.

    Args:
        name: Its name, such as model.ckpt-30; its step; the whole prefix of its files; `best` or `latest`.

    Raises:
        RestoreError: There is none of that name, or it is damaged; the message lists those there are.
    """
    if name == BEST:
        name = _best_name(model_dir)
    if name == LATEST and (state := read_checkpoint_state(model_dir)) is not None:
        name = state.model_checkpoint_path
    try:
        there = list_checkpoints(model_dir).checkpoints
    except FileMissingError:
        there = ()
    found = [one for one in there if one.kind not in ("gone", "unfinished")]
    meant = [one for one in found if is_named(one.prefix, name)]
    if not meant:
        raise RestoreError(f"there is no checkpoint {name} in {model_dir}; {_those_there(found)}")
    if len(listed := [one for one in meant if "listed" in one.marks]) == 1:
        meant = listed  # a step was saved again after a rollback, and the first one of it is still needed
    if len(meant) > 1:
        names = ", ".join(one.name for one in meant)
        raise RestoreError(f"{name} may be any of {names} in {model_dir}; give its whole name")
    if meant[0].problem is not None:
        raise RestoreError(
            f"checkpoint {meant[0].name} of {model_dir} is damaged: {meant[0].problem}. Name another; "
            f"{_those_there(found)}"
        )
    prefix = meant[0].prefix
    return filesystem.join(model_dir, meant[0].name) if is_in_folder(prefix, model_dir) else prefix


def find_named(folder: str, name: str) -> str:
    """Return the checkpoint of a folder by its name; reading a damaged one reports the damage."""
    found = [one.prefix for one in list_checkpoints(folder).checkpoints if is_named(one.prefix, name)]
    return found[0] if len(found) == 1 else named_checkpoint(folder, name)


def _best_name(model_dir: str) -> str:
    best = read_best(model_dir)
    if best is None:
        raise RestoreError(
            f"no evaluation has named the best checkpoint of {model_dir}: there is no {BEST_FILE} in it. "
            "Train with train.evaluate, such as --train.evaluate.every_steps 1000, or name a checkpoint"
        )
    return best.name


def is_named(prefix: str, name: str) -> bool:
    """Whether `name` means the checkpoint of this prefix."""
    if name.isdecimal():
        return SaveNames.step_of(prefix) == int(name)
    name = name.removesuffix(MANIFEST)
    same = filesystem.base_name(prefix) == filesystem.base_name(name)
    return same and (not filesystem.parent(name) or is_in_folder(prefix, filesystem.parent(name)))


def _those_there(found: Iterable[Listed]) -> str:
    names = [one.name if one.problem is None else f"{one.name} (damaged)" for one in found]
    return f"it has {', '.join(names)}" if names else "it has none"


class _Folder:
    """What is known of a folder before its checkpoints are looked at one by one."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self.latest: str | None = None
        self.listed: dict[str, float | None] = {}
        self.exempt: frozenset[str] = frozenset()
        self.best: str | None = None
        self.journal = Journal()
        self._read_state_files()
        self.complete = [filesystem.join(folder, name) for name in complete_names(folder)]
        self.links: dict[str, Link] = {}
        self.own_problems: dict[str, str] = {}
        for prefix in {*self.complete, *self.listed}:
            self._look(prefix)
        staying = [
            prefix
            for prefix in self.links
            if prefix in self.listed
            or prefix in self.exempt
            or prefix == self.best
            or prefix not in self.journal.released
        ]
        self.needed = {needed for prefix in staying for needed in self._chain(prefix)[0] if needed != prefix}

    def listing(self) -> Listing:
        prefixes = {*self.complete, *self.listed, *self._begun()}
        found = sorted(map(self._describe, prefixes), key=lambda one: (one.step, one.prefix))
        return Listing(self.folder, tuple(found), tuple(self.problems))

    def _read_state_files(self) -> None:
        try:
            state = read_checkpoint_state(self.folder, sleep=lambda _: None)
        except (CorruptFileError, FilesystemError) as error:
            self.problems.append(str(error))
            state = None
        if state is not None:
            paths = state.all_model_checkpoint_paths
            times = state.all_model_checkpoint_timestamps or (None,) * len(paths)
            self.latest = state.model_checkpoint_path
            self.listed = dict(zip(paths, times, strict=True))
        try:
            known = load_monolith_checkpoint(self.folder)
            if known is not None:
                self.exempt = exempt_paths(known.exempt_model_checkpoint_paths, self.folder)
        except (CorruptFileError, FilesystemError) as error:
            self.problems.append(str(error))
        try:
            best = read_best(self.folder)
            self.best = None if best is None else best.prefix(self.folder)
        except (CorruptFileError, FilesystemError) as error:
            self.problems.append(str(error))
        try:
            self.journal = read_journal(self.folder)
        except (CorruptFileError, FilesystemError) as error:
            self.problems.append(str(error))

    def _look(self, prefix: str) -> None:
        try:
            link = read_manifest(prefix)
        except FileMissingError:
            return
        except (*Damage, FilesystemError) as error:
            self.own_problems[prefix] = str(error)
            return
        self.links[prefix] = link
        problems = check_files(link).problems
        if problems and checkpoint_exists(prefix):  # otherwise it was deleted under us
            self.own_problems[prefix] = problems[0]

    def _begun(self) -> Iterable[str]:
        files, folders = filesystem.list_files(self.folder), filesystem.list_folders(self.folder)
        for path in (*files, *folders):
            if match := _BEGUN.fullmatch(filesystem.base_name(path)):
                yield filesystem.join(self.folder, match[1])

    def _describe(self, prefix: str) -> Listed:
        link = self.links.get(prefix)
        manifest = None if link is None else link.manifest
        chain, broken = self._chain(prefix)
        if manifest is not None:
            kind: str = manifest.kind
        elif prefix in self.own_problems:
            kind = "damaged"
        else:
            kind = "gone" if prefix in self.listed else "unfinished"
            broken = "it is listed, and it is not there" if kind == "gone" else None
        tables = {} if manifest is None else manifest.parts.get("tables", {}).get("tables", {})
        return Listed(
            prefix=prefix,
            step=SaveNames.step_of(prefix) if manifest is None else manifest.step,
            saved_at=self.listed.get(prefix) if manifest is None else manifest.saved_at,
            kind=kind,
            chain=chain,
            bytes=_size(prefix),
            rows={name: entry["rows"] for name, entry in sorted(tables.items())},
            marks=self._marks(prefix),
            problem=broken,
        )

    def _chain(self, prefix: str) -> tuple[tuple[str, ...], str | None]:
        """Return what a checkpoint needs, and what is wrong with it or with the nearest of those."""
        chain, at = [prefix], prefix
        while at in self.links and at not in self.own_problems and self.links[at].manifest.kind != "full":
            link = self.links[at]
            at = filesystem.join(filesystem.parent(at), link.manifest.after or "")
            if at in chain or not link.manifest.after:
                return tuple(chain[::-1]), f"{chain[-1]} is an increment of no checkpoint"
            if at not in self.links and at not in self.own_problems:
                self._look(at)  # it may be in another folder than ours
            if at in self.links and self.links[at].crc != link.manifest.after_crc:
                return tuple(chain[::-1]), f"{at} was overwritten since {link.prefix} continued it"
            if at not in self.links and at not in self.own_problems:
                return tuple(chain[::-1]), f"it continues {at}, which is not there"
            chain.append(at)
        return tuple(chain[::-1]), self.own_problems.get(at)

    def _marks(self, prefix: str) -> tuple[str, ...]:
        marks = {
            "latest": prefix == self.latest,
            "listed": prefix in self.listed,
            "best": prefix == self.best,
            "exempt": prefix in self.exempt,
        }
        if not any(marks.values()) and prefix in {*self.links, *self.own_problems}:
            marks["needed"] = needed = prefix in self.needed
            marks["released"] = not needed and prefix in self.journal.released
            marks["preserved"] = not needed and prefix not in self.journal.released
        return tuple(mark for mark, applies in marks.items() if applies)


def _size(prefix: str) -> int:
    try:
        return size_of(prefix)
    except FileMissingError:  # deleted under us
        return 0
