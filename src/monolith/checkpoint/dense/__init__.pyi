"""The dense half of a checkpoint: weights, optimizers and random numbers, in safetensors."""

from monolith.checkpoint.dense.custom_restore import CustomRestore
from monolith.checkpoint.dense.state import DenseSelection, DenseSnapshot, capture_dense, restore_dense
from monolith.checkpoint.dense.training_state import ModelVariables, capture_random, restore_random

__all__ = [
    "CustomRestore",
    "DenseSelection",
    "DenseSnapshot",
    "ModelVariables",
    "capture_dense",
    "capture_random",
    "restore_dense",
    "restore_random",
]
