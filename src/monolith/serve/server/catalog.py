"""Where the server finds models: folders that `monolith export` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from monolith import filesystem
from monolith.errors import ConfigError, FileMissingError, MonolithError
from monolith.serve.predictor import Predictor
from monolith.serve.rows import RowSource
from monolith.serve.servable.manifest import MANIFEST_NAME, read_servable
from monolith.serve.servable.versions import ENTRY, describe_withheld, list_versions, withheld_versions
from monolith.serve.server.config import ServedFolder, VersionPolicy
from monolith.serve.server.served import ServedModel
from monolith.serve.warm_up import WARM_UP

OpenRows = Callable[[str], RowSource]
"""Makes who answers the rows of a version, whose folder it is given."""


class ServableCatalog:
    """Versions of servables.

    Args:
        threads: See `Predictor`.
        allow_module: See `Predictor`.
        compiled: See `Predictor`.
        rows: Who answers rows; by default each version's own tables.
        serve_withheld: Versions to serve although they are withheld.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        allow_module: bool = False,
        compiled: bool = False,
        rows: OpenRows | None = None,
        serve_withheld: Collection[str] = (),
    ) -> None:
        # The repository leaves withheld versions out, and what it loads was named: by --serve-withheld, or by
        # an operator who rolled servers back to it.
        self._how: dict[str, Any] = {
            "threads": threads,
            "allow_module": allow_module,
            "compiled": compiled,
            "serve_withheld": True,
        }
        self._rows = rows
        self._serve_withheld = frozenset(serve_withheld)

    def versions(self, folder: str) -> Sequence[str]:
        return list_versions(folder)

    def withheld(self, folder: str, versions: Sequence[str]) -> Mapping[str, str]:
        found = withheld_versions(folder, versions)
        return {one: mark.describe() for one, mark in found.items() if one not in self._serve_withheld}

    def load(self, folder: str, version: str) -> ServedModel:
        path = filesystem.join(folder, version)
        if self._rows is None:
            return Predictor(path, **self._how)
        rows = self._rows(path)
        try:
            return EntryPredictor(path, rows, **self._how)
        except BaseException:
            rows.close()
            raise


class EntryPredictor(Predictor):
    """A predictor that has its rows for itself: they are closed with it."""

    def __init__(self, folder: str, rows: RowSource, **how: Any) -> None:
        super().__init__(folder, rows=rows, **how)
        self._own_rows = rows

    def close(self) -> None:
        super().close()
        self._own_rows.close()


def served_folder(text: str, policy: VersionPolicy, *, serve_withheld: Collection[str] = ()) -> ServedFolder:
    """Return what "DIR" or "NAME=DIR" serves: its versions, the one that it is, or those of its entry.

    Args:
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
        entry = filesystem.join(folder, ENTRY)
        root = entry if not list_versions(folder) and list_versions(entry) else folder
    complete = list_versions(root)
    withheld = {
        one: mark for one, mark in withheld_versions(root, complete).items() if one not in serve_withheld
    }
    versions = policy.wanted([one for one in complete if one not in withheld])
    if not versions and (asked := policy.wanted(list(withheld))):
        raise ConfigError(
            f"there is nothing to serve in {folder}"
            + describe_withheld({one: withheld[one] for one in asked})
        )
    if not versions:
        raise FileMissingError(
            f"there is nothing to serve in {folder}: no folder of a version with a file {MANIFEST_NAME}. "
            f"Write one with: monolith export RUN --to {folder}"
        )
    name = name or read_servable(filesystem.join(root, versions[-1])).model
    return ServedFolder(folder=root, name=name, policy=policy)


def example_row(folder: str, model: ServedModel) -> dict[str, Any]:
    """Return a row to ask a model with: the first one of its warm-up requests, or one that is made up."""
    try:
        path = filesystem.join(folder, model.version, WARM_UP)
        request = json.loads(filesystem.read_bytes(path))["requests"][0]
        return first_row(request["inputs"])
    except (MonolithError, ValueError, LookupError, TypeError):
        made_up: dict[str, Any] = {"BYTES": "text", "INT64": 1}
        return {one.name: made_up.get(one.datatype, 0.5) for one in model.signature.inputs}


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
