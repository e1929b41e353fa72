"""Checkpoints without a run: list, read, compare, reshard and export them."""

from monolith.checkpoint.offline.comparing import Difference, compare
from monolith.checkpoint.offline.listing import Listed, Listing, list_checkpoints, named_checkpoint
from monolith.checkpoint.offline.reading import Contents, FoundRow, find_checkpoint, find_id, read_contents
from monolith.checkpoint.offline.rewriting import compact, export, reshard

__all__ = [
    "Contents",
    "Difference",
    "FoundRow",
    "Listed",
    "Listing",
    "compact",
    "compare",
    "export",
    "find_checkpoint",
    "find_id",
    "list_checkpoints",
    "named_checkpoint",
    "read_contents",
    "reshard",
]
