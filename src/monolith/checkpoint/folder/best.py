"""The best checkpoint of a folder: which one it is, by which metric, and how good.

Evaluating beside a run finds it, and this file names it: `best_checkpoint`, replaced in one step. A saver
never deletes the one that is named there, however many came after it; the one that was the best before is
then one of many again.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from monolith import filesystem
from monolith.errors import CorruptFileError, FileMissingError

BEST_FILE = "best_checkpoint"
BEST = "best"
"""What a person calls it."""
LATEST = "latest"
"""What a person calls the newest one, which may be worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestCheckpoint:
    """The checkpoint of a folder that did best, and what it did best at."""

    name: str
    """Of the checkpoint, such as model.ckpt-300."""
    step: int
    metric: str
    """Such as click/auc."""
    value: float

    def prefix(self, model_dir: str) -> str:
        return filesystem.join(model_dir, self.name)


def read_best(model_dir: str) -> BestCheckpoint | None:
    """Return which checkpoint of a folder is the best; None where nobody has said.

    Raises:
        CorruptFileError: The file that names it makes no sense.
    """
    path = filesystem.join(model_dir, BEST_FILE)
    try:
        data = filesystem.read_bytes(path)
    except FileMissingError:
        return None
    try:
        found = json.loads(data)
        best = BestCheckpoint(
            name=str(found["name"]),
            step=int(found["step"]),
            metric=str(found["metric"]),
            value=float(found["value"]),
        )
    except (ValueError, KeyError, TypeError) as cause:
        reason = f"it does not name the best checkpoint: {cause}. Remove it, and the next best one is named"
        raise CorruptFileError(path, 0, reason) from cause
    if not best.name or filesystem.base_name(best.name) != best.name:
        raise CorruptFileError(path, 0, f"{best.name!r} is no name of a checkpoint in this folder")
    return best


def write_best(model_dir: str, best: BestCheckpoint) -> None:
    """Name the best checkpoint of a folder, in place of the one before."""
    assert math.isfinite(best.value), "what cannot be measured is not the best"
    with filesystem.atomic_write(filesystem.join(model_dir, BEST_FILE)) as file:
        file.write(json.dumps(asdict(best), indent=1).encode())
