"""The folder of checkpoints: its state files, its lock, its manifests, and which checkpoints are deleted."""

from monolith.checkpoint.folder.lock import ModelDirLock
from monolith.checkpoint.folder.manifest import Link, Manifest, read_chain, read_manifest
from monolith.checkpoint.folder.retention import Retention, exempt_paths
from monolith.checkpoint.folder.saver import Saver, checkpoint_exists, require_checkpoint
from monolith.checkpoint.folder.state_files import (
    CheckpointState,
    read_checkpoint_state,
    read_ckpt_info,
    read_monolith_checkpoint,
)

__all__ = [
    "CheckpointState",
    "Link",
    "Manifest",
    "ModelDirLock",
    "Retention",
    "Saver",
    "checkpoint_exists",
    "exempt_paths",
    "read_chain",
    "read_checkpoint_state",
    "read_ckpt_info",
    "read_manifest",
    "read_monolith_checkpoint",
    "require_checkpoint",
]
