"""Where the server finds models: folders that `monolith export` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from monolith import filesystem
from monolith.checkpoint import BestCheckpoint, read_best
from monolith.checkpoint.folder.state_files import BEST, CHECKPOINT_FILE, LATEST
from monolith.checkpoint.offline.listing import is_named
from monolith.errors import ConfigError, FileMissingError, MonolithError
from monolith.serve.config import ServedFolder, VersionPolicy
from monolith.serve.manifest import MANIFEST_NAME, WARM_UP, Servable, TensorSpec, read_bounded, read_servable
from monolith.serve.predictor import LoadOptions, Predictor
from monolith.serve.rows import RowSource
from monolith.serve.versions import ENTRY, describe_withheld, list_versions, withheld_versions
from monolith.sync.messages import is_same_run, split_identity

OpenRows = Callable[[str], RowSource]
"""Opens the rows of a version, given its folder."""


class ServableCatalog:
    """Versions of servables.

    Args:
        rows: Opens the rows of a version; by default each version's own tables are mapped.
        serve_withheld: Versions to serve although they are withheld.
        options: How versions are loaded; see `LoadOptions`.
    """

    def __init__(
        self,
        options: LoadOptions | None = None,
        *,
        rows: OpenRows | None = None,
        serve_withheld: Collection[str] = (),
    ) -> None:
        # The repository skips withheld versions. If it loads one, an operator named it: by --serve-withheld,
        # or by rolling servers back to it.
        self._options: LoadOptions = {**(options or {}), "serve_withheld": True}
        self._rows = rows
        self._serve_withheld = frozenset(serve_withheld)

    def versions(self, folder: str) -> Sequence[str]:
        return list_versions(folder)

    def withheld(self, folder: str, versions: Sequence[str]) -> Mapping[str, str]:
        found = withheld_versions(folder, versions)
        return {one: mark.describe() for one, mark in found.items() if one not in self._serve_withheld}

    def load(self, folder: str, version: str) -> Predictor:
        path = filesystem.join(folder, version)
        if self._rows is None:
            return Predictor(path, **self._options)
        rows = self._rows(path)
        try:
            predictor = Predictor(path, rows=rows, **self._options)
        except BaseException:
            rows.close()
            raise
        predictor.on_close(rows.close)  # the rows belong to this version alone
        return predictor


EXPORTED = "exported_models"
"""The folder of versions in the folder of a run, where `monolith export` writes by default."""


class BestVersion:
    """Chooses the version that is of the best checkpoint of its run, as long as the run's folder is there.

    Args:
        root: The folder of versions.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, Servable] = {}

    def __call__(self, versions: Sequence[str]) -> str | None:
        """Return the version of the best checkpoint; None if the run names none, or it is not exported."""
        best = self.best(versions)
        if best is None:
            return None
        run = self._servable(versions[-1]).run
        for version in reversed(versions):
            with suppress(MonolithError):  # one that is torn is not the best; loading it says so
                servable = self._servable(version)
                if servable.checkpoint == best.name and is_same_run(servable.run, run):
                    return version
        return None

    def best(self, versions: Sequence[str]) -> BestCheckpoint | None:
        """Return the best checkpoint of the run that the newest version is of; None if nothing says."""
        try:
            folder, _ = split_identity(self._servable(versions[-1]).run) if versions else ("", "")
            return read_best(folder) if folder and filesystem.is_folder(folder) else None
        except MonolithError:
            return None

    def named(self, name: str, versions: Sequence[str]) -> str | None:
        """Return the version of the checkpoint that a person names; None if there is none."""
        found = [one for one in versions if is_named(self._servable(one).checkpoint, name) or one == name]
        return found[-1] if found else None

    def why(self, version: str, versions: Sequence[str]) -> str:
        """Return why one of the versions is served, in words."""
        best = self.best(versions)
        if best is not None and self._servable(version).checkpoint == best.name:
            return f"the best by {best.metric}, {best.value:.4f}; --checkpoint latest serves the newest"
        if best is None or self(versions) is not None:
            return "the newest"
        run, _ = split_identity(self._servable(version).run)
        return f"the newest; the best, {best.name}, is not exported: monolith export {run}"

    def _servable(self, version: str) -> Servable:
        if version not in self._known:
            self._known[version] = read_servable(filesystem.join(self._root, version))
        return self._known[version]


def served_folder(
    text: str,
    policy: VersionPolicy | None,
    *,
    checkpoint: str | None = None,
    serve_withheld: Collection[str] = (),
) -> ServedFolder:
    """Return what "DIR" or "NAME=DIR" serves: its versions, the one that it is, or those of its entry; of the
    folder of a run, those that were exported there.

    Args:
        policy: Which versions are served; None for one, that of `checkpoint`.
        checkpoint: The checkpoint whose version is served: best, latest, its name or step. By default the
            best, if the run was evaluated, and otherwise the latest.
        serve_withheld: Versions to serve although they are withheld.

    Raises:
        FileMissingError: There is nothing to serve.
        ConfigError: All that there is to serve is withheld.
    """
    name, equals, folder = text.partition("=")
    if not equals or "/" in name:
        name, folder = "", text
    folder = folder.rstrip("/") or folder
    if filesystem.exists(filesystem.join(folder, MANIFEST_NAME)):
        version = filesystem.base_name(folder)
        root = filesystem.parent(folder)
        policy = VersionPolicy(None, (version,))
    else:
        exported = filesystem.join(folder, EXPORTED)
        places = (folder, *(filesystem.join(one, ENTRY) for one in (folder, exported)), exported)
        root = next((place for place in places if list_versions(place)), folder)
    complete = list_versions(root)
    withheld = {
        one: mark for one, mark in withheld_versions(root, complete).items() if one not in serve_withheld
    }
    offered = [one for one in complete if one not in withheld]
    if policy is None:
        policy = _chosen(root, offered, checkpoint)
    versions = policy.wanted(offered)
    if not versions and (asked := policy.wanted(list(withheld))):
        raise ConfigError(
            f"there is nothing to serve in {folder}"
            + describe_withheld({one: withheld[one] for one in asked})
        )
    if not versions:
        raise FileMissingError(
            f"there is nothing to serve in {folder}: no folder of a version with a file {MANIFEST_NAME}. "
            + (
                f"Write one with: monolith export {folder}"
                if filesystem.exists(filesystem.join(folder, CHECKPOINT_FILE))
                else f"Write one with: monolith export RUN --to {folder}"
            )
        )
    name = name or read_servable(filesystem.join(root, versions[-1])).model
    return ServedFolder(folder=root, name=name, policy=policy)


def _chosen(root: str, offered: Sequence[str], checkpoint: str | None) -> VersionPolicy:
    """Return the policy that serves the version of one checkpoint.

    Raises:
        ConfigError: There are versions, and none is of it.
    """
    best = BestVersion(root)
    if checkpoint == LATEST:
        return VersionPolicy()
    if checkpoint in (None, BEST):
        if checkpoint == BEST and offered and best(offered) is None:
            raise ConfigError(
                f"serve: none of the versions {', '.join(offered)} in {root} is of the best checkpoint of "
                "its run. Export it with monolith export RUN, or serve the newest with --checkpoint latest"
            )
        return VersionPolicy(preferred=best)
    assert checkpoint is not None
    named = best.named(checkpoint, offered)
    if offered and named is None:
        raise ConfigError(
            f"serve: no version in {root} is of checkpoint {checkpoint}; there are {', '.join(offered)}"
        )
    return VersionPolicy(None, (named or checkpoint,))


def example_row(folder: str, model: Predictor) -> dict[str, Any]:
    """Return a row to ask a model with: the first one of its warm-up requests, or one that is made up."""
    try:
        path = filesystem.join(folder, model.version, WARM_UP)
        request = json.loads(read_bounded(path))["requests"][0]
        return first_row(request["inputs"])
    except (MonolithError, ValueError, LookupError, TypeError, RecursionError):
        return {one.name: _made_up(one) for one in model.signature.inputs}


def _made_up(one: TensorSpec) -> Any:
    """Return a value of an input: a list where the model reads one, of as many numbers as it takes."""
    values: dict[str, Any] = {"BYTES": "text", "INT64": 1}
    value, width = values.get(one.datatype, 0.5), one.shape[-1]
    return value if len(one.shape) == 1 and one.kind != "list" else [value] * max(width, 1)


def first_row(inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the first row of a request, as a person writes it: a value for each column, or a list."""
    data = {one["name"]: one["data"] for one in inputs}
    row: dict[str, Any] = {}
    for one in inputs:
        name, shape, values = one["name"], one["shape"], one["data"]
        splits = data.get(f"{name}.row_splits")
        if splits is not None:
            row[name] = values[: splits[1]]
        elif not name.endswith(".row_splits"):
            row[name] = values[0] if len(shape) == 1 else values[: shape[1]]
    return row
