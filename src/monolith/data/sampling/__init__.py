"""Sampling: negatives made of what others were shown."""

from monolith.data.sampling.item_pool import Drawn, ItemPool, ItemPoolConfig
from monolith.data.sampling.negatives import NegativeGeneration, NegativeGenerationConfig
from monolith.data.sampling.pool_files import old_worker, restore_pool, save_pool

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
