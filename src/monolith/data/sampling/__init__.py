"""Sampling: negatives made of items that other users were shown."""

from monolith.data.sampling.item_pool import (
    Drawn,
    ItemPool,
    ItemPoolConfig,
    old_worker,
    restore_pool,
    save_pool,
)
from monolith.data.sampling.negatives import NegativeGeneration, NegativeGenerationConfig

__all__ = [
    "Drawn",
    "ItemPool",
    "ItemPoolConfig",
    "NegativeGeneration",
    "NegativeGenerationConfig",
    "old_worker",
    "restore_pool",
    "save_pool",
]
