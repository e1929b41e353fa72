"""What becomes of records of files that cannot be read: how many may be left out, and where they are kept."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from monolith.data.format import BadRecord
from monolith.errors import ConfigError
from monolith.filesystem import atomic_write, base_name, join, make_dirs


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecordPolicy:
    """What becomes of records that cannot be read."""

    max_share: float = 0.0
    """The share of malformed records that is tolerated; more stop the reading, and with 0 the first does."""
    after: int = 1000
    """Records to read before `max_share` is checked: one in the first ten says little. It is checked at the
    end in any case."""
    quarantine: str | None = None
    """A folder for malformed records: one file of JSON lines per chunk that had any, with path, place, reason
    and payload in base64. A chunk that is read again, after a restart or in another epoch, writes the
    same."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"bad records: max_share must be from 0 to 1, got {self.max_share}")
        if self.after < 0:
            raise ConfigError(f"bad records: after must be 0 or more, got {self.after}")


def quarantine(folder: str, path: str, place: int, bad: Sequence[BadRecord]) -> None:
    """Keep bad records of a file in a folder."""
    # Named after the chunk, so that reading it again writes the file again, and not one more.
    name = f"{base_name(path)}-{zlib.crc32(path.encode()):08x}-{place}.jsonl"
    make_dirs(folder)
    with atomic_write(join(folder, name)) as file:
        for record in bad:
            line = {
                "path": path,
                "place": record.place,
                "reason": record.reason,
                "payload": base64.b64encode(record.payload).decode(),
            }
            file.write(json.dumps(line).encode() + b"\n")
