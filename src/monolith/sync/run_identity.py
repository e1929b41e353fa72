"""The identity of a run: what a follower compares before it takes rows of a publisher.

A run is known by its folder and by a random id that its first publisher leaves there, `FOLDER#ID`. A
trainer that is started again finds the id, and so is the same run; another run in a folder of the same
name, on another machine or after the folder was emptied, is not. A remote folder has a name that no other
has, and needs no id.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from monolith import filesystem

_log = logging.getLogger(__name__)

ID_FILE = "run_id"
_ID = re.compile("[0-9a-f]{16}")
_IDENTITY = re.compile(r"(.*)#([0-9a-f]{16})", re.DOTALL)


def run_identity(folder: str, *, make: bool = False) -> str:
    """Return the identity of the run whose checkpoints are in a folder; the folder alone if it has no id.

    Args:
        make: Leave an id if there is none. If several processes do at once, one of them is the first.
    """
    if filesystem.is_remote(folder):
        return folder
    path = Path(folder) / ID_FILE
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            own = Path(filesystem.temporary(path))
            own.write_text(secrets.token_hex(8))
            with suppress(FileExistsError):
                os.link(own, path)  # in one step, and never over an id that is there
            own.unlink()
        with path.open() as file:
            text = file.read(64).strip()
    except FileNotFoundError:
        return folder
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("the run in %s is known by its folder alone: its id cannot be read (%s)", folder, error)
        return folder
    return f"{folder}#{text}" if _ID.fullmatch(text) else folder


def is_same_run(one: str, other: str) -> bool:
    """Whether two identities are of one run: by their ids, or by their folders if one has no id."""
    (folder, number), (other_folder, other_number) = split_identity(one), split_identity(other)
    if number and other_number:
        return number == other_number
    return folder == other_folder


def split_identity(identity: str) -> tuple[str, str]:
    """Return the folder and the id of a run; the id is empty if it has none."""
    found = _IDENTITY.fullmatch(identity)
    return (identity, "") if found is None else (found[1], found[2])
