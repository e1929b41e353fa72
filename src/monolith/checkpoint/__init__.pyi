"""Checkpoints: everything a run needs to resume, committed together.

checkpointer = Checkpointer(Saver("runs/1"), [TablesPart(tables), DensePart(model, [optimizer])])
checkpointer.save(step)
checkpointer.restore(prefix)
"""

from monolith.checkpoint.checkpointer import Checkpointer, PendingCheckpoint, Restored
from monolith.checkpoint.dense.custom_restore import CustomRestore
from monolith.checkpoint.folder.lock import ModelDirLock
from monolith.checkpoint.folder.manifest import Link, Manifest, read_chain, read_manifest
from monolith.checkpoint.folder.saver import Saver, checkpoint_exists, require_checkpoint
from monolith.checkpoint.folder.state_files import (
    BestCheckpoint,
    CheckpointState,
    CkptInfo,
    MonolithCheckpointState,
    read_best,
    read_checkpoint_state,
    read_ckpt_info,
    read_monolith_checkpoint,
    write_best,
)
from monolith.checkpoint.offline.comparing import Difference, compare
from monolith.checkpoint.offline.listing import Listed, Listing, list_checkpoints, named_checkpoint
from monolith.checkpoint.offline.reading import Contents, FoundRow, find_checkpoint, find_id, read_contents
from monolith.checkpoint.offline.rewriting import compact, export, reshard
from monolith.checkpoint.offline.values import find_value
from monolith.checkpoint.override import resolve_restore, roll_back, start_from, start_named, wait_for_start
from monolith.checkpoint.part import FEATURES, Part, PartSnapshot, RestoreOptions, RestoreReport, SavedPart
from monolith.checkpoint.parts import DensePart, FeaturesPart, StatePart, saved_spec
from monolith.checkpoint.saved_tables import merge_entries
from monolith.checkpoint.tables import TablesPart

__all__ = [
    "FEATURES",
    "BestCheckpoint",
    "CheckpointState",
    "Checkpointer",
    "CkptInfo",
    "Contents",
    "CustomRestore",
    "DensePart",
    "Difference",
    "FeaturesPart",
    "FoundRow",
    "Link",
    "Listed",
    "Listing",
    "Manifest",
    "ModelDirLock",
    "MonolithCheckpointState",
    "Part",
    "PartSnapshot",
    "PendingCheckpoint",
    "RestoreOptions",
    "RestoreReport",
    "Restored",
    "SavedPart",
    "Saver",
    "StatePart",
    "TablesPart",
    "checkpoint_exists",
    "compact",
    "compare",
    "export",
    "find_checkpoint",
    "find_id",
    "find_value",
    "list_checkpoints",
    "merge_entries",
    "named_checkpoint",
    "read_best",
    "read_chain",
    "read_checkpoint_state",
    "read_ckpt_info",
    "read_contents",
    "read_manifest",
    "read_monolith_checkpoint",
    "require_checkpoint",
    "reshard",
    "resolve_restore",
    "roll_back",
    "saved_spec",
    "start_from",
    "start_named",
    "wait_for_start",
    "write_best",
]
