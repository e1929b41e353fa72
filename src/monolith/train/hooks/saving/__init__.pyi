"""Hooks that save: when it is time, who is told of it, and the checkpoint itself."""

from monolith.train.hooks.saving.listeners import AfterSaveListener, BeforeSaveListener, SaveListener
from monolith.train.hooks.saving.memory import SaveMemory
from monolith.train.hooks.saving.save import SaveConfig, SaveHook, Snapshot, Snapshots
from monolith.train.hooks.saving.timer import SaveTimer

__all__ = [
    "AfterSaveListener",
    "BeforeSaveListener",
    "SaveConfig",
    "SaveHook",
    "SaveListener",
    "SaveMemory",
    "SaveTimer",
    "Snapshot",
    "Snapshots",
]
