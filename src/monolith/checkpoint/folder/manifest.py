"""Manifests: the one file whose rename makes a checkpoint.

`<prefix>.manifest` is written last, when every other file of the checkpoint is complete. Until then there is
no such checkpoint. It is JSON with a checksum: the step, an entry of each part, and for an increment the
checkpoint it continues, with the checksum of that one's manifest, so that a chain with a missing or replaced
member is refused.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from monolith import filesystem, native
from monolith.checkpoint.folder.saver import MANIFEST
from monolith.checkpoint.part import Entry
from monolith.errors import CorruptFileError, FileMissingError, FilesystemError, RestoreError

VERSION = 1
_LONGEST_CHAIN = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The description of a checkpoint."""

    step: int
    kind: Literal["full", "incremental"]
    parts: dict[str, Entry]
    """Part to its entry."""
    saved_at: float
    """When the snapshot was taken, in Unix seconds."""
    after: str | None = None
    """For an increment: the name of the checkpoint before it, in the same folder."""
    after_crc: int | None = None
    """The checksum of that one's manifest."""
    version: int = VERSION


class Link(NamedTuple):
    """One checkpoint of a chain."""

    prefix: str
    manifest: Manifest
    crc: int


def write_manifest(prefix: str, manifest: Manifest) -> int:
    """Write a manifest, which commits the checkpoint; return its checksum."""
    values = {field.name: getattr(manifest, field.name) for field in fields(manifest)}  # asdict copies it all
    body = json.dumps(values, sort_keys=True, allow_nan=False).encode()
    crc = native.crc32c(body)
    with filesystem.atomic_write(prefix + MANIFEST) as file:
        file.write(b"%s\n%08x\n" % (body, crc))
    return crc


def read_manifest(prefix: str) -> Link:
    """Read the manifest of a checkpoint.

    Raises:
        FileMissingError: There is no such checkpoint.
        CorruptFileError: The manifest is damaged.
    """
    path = prefix + MANIFEST
    text = filesystem.read_bytes(path)
    body, newline, crc = text.removesuffix(b"\n").rpartition(b"\n")
    if not newline or not text.endswith(b"\n") or crc != b"%08x" % native.crc32c(body):
        raise CorruptFileError(path, len(body), "the checksum in its last line does not match its content")
    try:
        found: dict[str, Any] = json.loads(body)
        if found.get("version") != VERSION:
            raise ValueError(f"version {found.get('version')}, this program reads {VERSION}")
        return Link(prefix, Manifest(**found), native.crc32c(body))
    except (ValueError, TypeError) as cause:
        raise CorruptFileError(path, 0, f"the manifest is malformed: {cause}") from cause


def needs_of(prefix: str) -> list[str]:
    """Return the chain before a checkpoint, newest first, as far as its manifests can be read."""
    found: list[str] = []
    with contextlib.suppress(FilesystemError, CorruptFileError):
        manifest = read_manifest(prefix).manifest
        while manifest.after is not None and len(found) < _LONGEST_CHAIN:
            found.append(filesystem.join(filesystem.parent(prefix), manifest.after))
            manifest = read_manifest(found[-1]).manifest
    return found


def read_chain(prefix: str) -> list[Link]:
    """Return the full checkpoint that `prefix` is based on and the increments up to it, oldest first.

    Raises:
        FileMissingError: There is no checkpoint at `prefix`.
        RestoreError: The chain is broken: a checkpoint of it is gone, or was replaced.
    """
    chain = [read_manifest(prefix)]
    while chain[-1].manifest.kind != "full":
        link = chain[-1]
        if link.manifest.after is None or len(chain) > _LONGEST_CHAIN:
            raise RestoreError(f"{link.prefix} is an increment of no checkpoint")
        before = filesystem.join(filesystem.parent(link.prefix), link.manifest.after)
        try:
            chain.append(read_manifest(before))
        except FileMissingError as cause:
            raise RestoreError(
                f"cannot restore {prefix}: it continues {before}, which is not there. "
                "Restore an earlier checkpoint, or copy the missing one back."
            ) from cause
        if chain[-1].crc != link.manifest.after_crc:
            raise RestoreError(
                f"cannot restore {prefix}: {before} is not the checkpoint that {link.prefix} continues; "
                "it was overwritten since. Restore a full checkpoint, or that one itself."
            )
    return chain[::-1]
